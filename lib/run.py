"""
What a command needs around its work: one message for a mistake, processes, an output folder with
checkpoints, signals. Nothing here knows of GTPO; the loop is in train.py.
"""
import contextlib
import importlib.util
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lib.files import lock_file, read_jsonl, write_whole


def end(code):
    """Ends the process. One of several leaves out Python's own clean-up: a thread of gloo that lets
    go of a tensor meanwhile would abort it, and torchrun would call a finished run failed
    (pytorch/pytorch#190489)."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads any more
                stream.flush()
        os._exit(code)
    sys.exit(code)


def command(main, argv=None):
    """Runs main(argv), by default on the command line, and returns the exit code: what main
    returns, or 2 for a mistake or a fault, told in one message. Other exceptions are our mistakes
    and show a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may lack a character that a model writes
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main(sys.argv[1:] if argv is None else argv) or 0
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where Python flushes the rest
        return 128 + signal.SIGPIPE
    except SystemExit as e:
        return e.code or 0
    except (ValueError, OSError) as e:
        message = str(e)
    except (RuntimeError, MemoryError) as e:
        first = (str(e) or type(e).__name__).splitlines()[0]
        if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(e):
            message = (f"out of memory: {first}\nLower what is done at once: micro_tokens in "
                       "training (the result stays the same), prompts_per_step, group_size and "
                       "max_new_tokens in sampling, --batch_prompts in evaluation")
        elif isinstance(e, dist.DistError) or re.search("gloo|nccl|connection", str(e), re.I):
            message = (f"process {os.environ.get('RANK')}: another process ended, or did not "
                       f"answer in time ({first})")
        else:
            raise
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2


def peak_memory(device):
    """Largest memory of this process so far, MiB: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def forward_dtype(name, device):
    """The type of the forward pass. auto is bfloat16 on a GPU that has it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


def compile_where_it_pays(model, choice, say):
    """torch.compile of a model's layers, if the choice is yes; if it is auto, on a GPU, for a model
    that is worth the wait. Without what this needs auto says so and goes on; yes is a ValueError.
    say(line) tells what goes on."""
    cuda = model.head_weight.device.type == "cuda"
    large = sum(p.numel() for p in model.parameters()) >= 100e6
    if choice == "no" or choice == "auto" and not (cuda and large):
        return
    variable, *names = ("CC", "gcc", "clang") if cuda else ("CXX", "g++", "clang++")
    names = [os.environ[variable]] if os.environ.get(variable) else names
    triton = not cuda or importlib.util.find_spec("triton")
    if any(shutil.which(name) for name in names) and triton:
        say("compiling: the first steps of each kind take a minute or more")
        model.compile_layers()
        return
    needs = f"torch.compile needs {'Triton and ' * cuda}a compiler, {' or '.join(names)}, here"
    if choice == "yes":
        raise ValueError(f"{needs}; without: --compile=no")
    say(f"not compiled: {needs}")


def own_gpu():
    """The GPU of this process, of those of its node. ValueError if there is none."""
    count, place = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if place >= count:
        what = f", or start torchrun with --nproc_per_node={count}" if count else ""
        raise ValueError(f"process {place} of this node has no GPU: PyTorch sees {count}; use "
                         f"--device=cpu{what}")
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


class Processes:
    """This process among those that torchrun started (alone without torchrun)."""

    def __init__(self, device="auto", timeout=timedelta(minutes=30)):
        """device: cpu, cuda or auto; timeout: how long processes wait for one another."""
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.main = self.rank == 0
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self.device = own_gpu() if cuda else torch.device("cpu")
        if self.size > 1:
            store, *_ = next(rendezvous("env://", timeout=timeout))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # torchrun keeps its store over restarts (pytorch/pytorch#135712): a restarted
                # group would read the addresses of the dead one
                start = os.environ["TORCHELASTIC_RESTART_COUNT"]
                store = dist.PrefixStore(f"start {start}", store)
            dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=self.rank,
                                    world_size=self.size, timeout=timeout)

    def total(self, numbers):
        """A number, or a list of them, summed over all processes, in float64."""
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor.tolist()

    def means(self, tensors):
        """{name: tensor} -> {name: the mean of its numbers on all processes}."""
        sums = [x.sum().item() for x in tensors.values()]
        totals = self.total(sums + [x.numel() for x in tensors.values()])
        return {name: totals[i] / totals[len(sums) + i] for i, name in enumerate(tensors)}

    def gather(self, value):
        """The value (text, numbers, a dictionary) of every process, in the order of their ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def agree(self, prepare, facts):
        """prepare() on every process: a mistake that one sees ends all, told once, and facts(of
        what was prepared), a dictionary, must be the same everywhere. Returns what was prepared."""
        prepared, error, told = None, None, None
        try:
            prepared = prepare()
            told = facts(prepared)
        except (ValueError, OSError) as e:
            error = e
        everywhere = self.gather(told)
        for rank, other in enumerate(everywhere):
            if other is None:
                raise error if rank == self.rank else SystemExit(2)
            for key in other:
                if other[key] != everywhere[0][key]:
                    text = (f"processes 0 and {rank} differ in their {key} ({everywhere[0][key]} "
                            f"and {other[key]}): every node needs the same command and the same "
                            "files, and an output folder that all nodes share")
                    raise ValueError(text) if self.main else SystemExit(2)
        return prepared

    def barrier(self):
        if self.size > 1:
            dist.barrier()

    def close(self):
        """After a run that ended well; after a fault it might wait for the others."""
        if self.size > 1:
            dist.destroy_process_group()


class Output:
    """The folder of a run: config.toml, metrics.jsonl, ckpt.pt, and what else it writes. Only the
    main process writes; on the others every method that would does nothing."""

    # what a run writes; the rows go last: as long as they stand, it is known that there was a run
    NAMES = ("ckpt.pt", "model", "adapter", "sft", "init", "heldout.jsonl", "config.toml",
             "metrics.jsonl")

    def __init__(self, folder, main=True):
        self.folder, self.main = folder, main
        self.checkpoint, self.metrics = self.path("ckpt.pt"), self.path("metrics.jsonl")
        self.log_file, self.lock_file = None, None

    def lock(self):
        """Creates the folder and locks it until close() or the end of the process. ValueError if
        another run is writing to it."""
        if self.main:
            self.lock_file = lock_file(self.path("lock"), self.folder,
                                       "another folder with --out=FOLDER")

    def path(self, name):
        return os.path.join(self.folder, name)

    def stands(self):
        """Those of NAMES that are there."""
        return [name for name in self.NAMES if os.path.lexists(self.path(name))]

    def clear(self):
        """Deletes what a run writes, and nothing else."""
        for name in self.NAMES if self.main else ():
            path = self.path(name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.remove(path)

    def write(self, name, text):
        if self.main:
            write_whole(self.path(name), lambda f: f.write(text))

    def rows(self):
        """The rows of metrics.jsonl, but for a last one that a kill has cut off."""
        rows = read_jsonl(self.metrics, ("step",)) if os.path.exists(self.metrics) else []
        for number, row in enumerate(rows, 1):
            if not isinstance(row["step"], int):
                raise ValueError(f"{self.metrics}:{number}: step is {row['step']!r}, not a whole "
                                 "number; mend or remove the line")
        return rows

    def open_log(self, step):
        """Opens metrics.jsonl behind the rows of the steps before `step`; others are cut off."""
        if self.main:
            kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] < step
                    or (row["step"] == step and row.get("label") == "after")]
            self.write("metrics.jsonl", "".join(kept))
            self.log_file = open(self.metrics, "ab", buffering=0)  # a row is there, or it is not

    def log(self, row):
        """One more line of metrics.jsonl. What is not finite becomes null: JSON has no nan."""
        if not self.main:
            return
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                  for key, value in row.items()}
        line = (json.dumps(finite) + "\n").encode()
        try:
            if self.log_file.write(line) < len(line):
                raise OSError("the disk is full")
        except OSError as e:
            raise OSError(f"{self.metrics}: could not be written ({e})") from None

    def save(self, state):
        """Writes the checkpoint; it never knows more than the rows."""
        if self.main:
            os.fsync(self.log_file.fileno())
            write_whole(self.checkpoint, lambda f: torch.save(state, f), "wb")

    def load(self, keys):
        """The checkpoint, which must have these keys, {name: types}. ValueError if it cannot be
        read."""
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True, mmap=True)
            for key, kinds in keys.items():
                if key not in state or not isinstance(state[key], kinds):
                    raise ValueError(f"it has no {key!r}, or none that could be")
        except Exception as e:  # torch raises many kinds for a broken file
            raise ValueError(f"{self.checkpoint}: not a readable checkpoint ({type(e).__name__}: "
                             f"{str(e)[:200]}); --overwrite starts afresh") from None
        return state

    def close(self):
        for file in (self.log_file, self.lock_file):
            if file is not None:
                file.close()


class Signals:
    """SIGINT, SIGTERM and SIGHUP ask the loop to finish its step, save and stop; a second one, a
    second later or more, stops at once (SLURM and torchrun may both pass on the same one)."""

    def __enter__(self):
        self.received, self.when = 0, 0.0
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup wants it
            numbers.append(signal.SIGHUP)
        self.before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def handle(self, number, frame):
        if not self.received:
            self.received, self.when = number, time.monotonic()
            with contextlib.suppress(OSError):  # the terminal may be gone
                print("\nstopping when the step is done and saved; once more stops at once",
                      file=sys.stderr, flush=True)
        elif time.monotonic() - self.when > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)
