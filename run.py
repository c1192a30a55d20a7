"""
What a training run needs around its loop: configuration, processes, the output folder, checkpoints, signals. Nothing here knows of GTPO;
the loop itself is in train.py.
"""
import contextlib
import difflib
import fcntl
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from dataclasses import asdict, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

# ---------------------------------------------------------------------------------------------------------------------------
# configuration

def help_text(config_class, introduction):
    """--help: every field with its default and the comment beside it, read from the source."""
    lines = []
    for line in inspect.getsource(config_class).splitlines():
        if m := re.match(r"    (\w+): (\w+) = (.+?)  +# (.*)", line):
            lines.append(f"  --{m[1]}={m[3]}".ljust(36) + f" {m[4]}")
        elif m := re.match(r"    # (.*)", line):
            lines.append(f"\n{m[1]}")
    return introduction + "\n".join(lines)


def convert(kind, value, what):
    """The value of a flag (text) or of a TOML key as the type of the field; ValueError says what was expected."""
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no"):
        return value.lower() in ("true", "1", "yes")
    try:
        if kind is not bool and isinstance(value, str) and kind is not str:
            value = kind(value)
    except ValueError:
        pass
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{what}: expected {dict(int='a whole number', float='a number', bool='true or false', str='text')[kind.__name__]}, "
                         f"found {value!r}")
    return value


def read_config(config_class, argv):
    """[FILE.toml] and --key=value flags -> an object of config_class, a dataclass. Flags win over the file, the file over the defaults. `--flag` alone is true."""
    kinds = {f.name: f.type if isinstance(f.type, type) else {"str": str, "int": int, "float": float, "bool": bool}[f.type]
             for f in fields(config_class)}
    values, flags, file = {}, {}, None

    def known(name, what):
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.0)[0]
            raise ValueError(f"{what} does not exist; the nearest is {near} (python train.py --help lists all)")
        return kinds[name]

    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if file is not None:
                raise ValueError(f"two configuration files given, {file} and {word}; give one, and flags as --name=value")
            file = word
            continue
        name, given, value = word[2:].partition("=")
        name = name.replace("-", "_")
        kind = known(name, f"flag --{name}")
        if not given:
            if kind is bool or name in ("resume", "compile"):                        # these know a third value
                value = "true" if kind is bool else "yes"
            elif words and not words[0].startswith("--"):
                value = words.pop(0)
            else:
                raise ValueError(f"flag --{name} needs a value: --{name}=...")
        flags[name] = convert(kind, value, f"flag --{name}")
    if file is not None:
        try:
            with open(file, "rb") as f:
                content = tomllib.load(f)
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: no such configuration file; presets are in config/") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
            raise ValueError(f"{file}: not valid TOML: {e}") from None
        for name, value in content.items():
            values[name] = convert(known(name, f"{file}: key {name!r}"), value, f"{file}: key {name!r}")
    return config_class(**{**values, **flags})


def to_toml(c):
    return "".join(f"{k} = {json.dumps(v)}\n" for k, v in asdict(c).items())       # these JSON values are TOML values, too


# ---------------------------------------------------------------------------------------------------------------------------
# processes

class Processes:
    """This process among those that torchrun started (alone without torchrun). Data parallelism is just sum(), called on gradients."""

    def __init__(self, device, timeout_minutes):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            if self.device.index >= torch.cuda.device_count():
                raise ValueError(f"process {self.device.index} of this node has no GPU: PyTorch sees {torch.cuda.device_count()}; start torchrun "
                                 f"with --nproc_per_node={torch.cuda.device_count()}, or train with --device=cpu")
            torch.cuda.set_device(self.device)
        if self.size > 1:
            timeout = timedelta(minutes=timeout_minutes)
            store, *_ = next(rendezvous("env://", timeout=timeout))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # torchrun keeps its store over restarts (pytorch/pytorch#135712): a restarted group would read the addresses of the dead one
                store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
            dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self.main = self.rank == 0

    def sum(self, *tensors):
        """Replaces each tensor by its sum over all processes."""
        if self.size > 1:
            for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
                work.wait()

    def share(self, model):
        """Gives every process the weights of the first."""
        if self.size > 1:
            for p in model.parameters():
                dist.broadcast(p.data, 0)

    def totals(self, values):
        """Sums a dictionary of numbers over all processes, in float64."""
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        self.sum(tensor)
        return dict(zip(values, tensor.tolist()))

    def gather(self, value):
        """The value (text, numbers, a dictionary) of every process, in the order of their ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self):
        if self.size > 1:
            dist.barrier()

    def fail(self, error, teller=0):
        """Ends all processes for the same reason (each must call this): one of them tells it."""
        raise error if self.rank == teller else SystemExit(2)


# ---------------------------------------------------------------------------------------------------------------------------
# output folder: config.toml, metrics.jsonl, ckpt.pt, model/

def lock_output(out):
    """Locks the output folder (created if need be) for one run, until the returned file is closed or the process dies."""
    os.makedirs(out, exist_ok=True)
    file = open(os.path.join(out, "lock"), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another run is writing to {out}: wait for it or stop it, or choose another folder with --name=OTHER") from None
    except OSError as e:                                                            # some network file systems
        print(f"note: {out} cannot be locked ({e}); take care that no second run uses it", file=sys.stderr)
    return file


def restore(model, optimizer, checkpoint, path):
    """Weights and optimizer as the checkpoint has them; it lets go of its own. ValueError names the first tensor that does not fit the model."""
    own, saved = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}, checkpoint["shapes"]
    for name in [*own, *saved]:
        if own.get(name) != saved.get(name):
            raise ValueError(f"{path}: tensor {name!r} is {saved.get(name, 'missing')} in the checkpoint and {own.get(name, 'missing')} in this "
                             "model; resume with the model that the run began with")
    model.load_state_dict(checkpoint.pop("model"), strict=False)                    # under an adapter the checkpoint holds the adapter alone
    try:
        optimizer.load_state_dict(checkpoint.pop("optimizer"))
    except Exception as e:                                                          # many kinds, too
        raise ValueError(f"{path}: the optimizer's state does not fit this model ({type(e).__name__}: {str(e)[:200]})") from None


def clear_output(out):
    """Deletes what a run writes, and nothing else. The rows go last: as long as they stand, the folder is known to have held a run."""
    for name in ("ckpt.pt", "model", "adapter", "sft", "init", "heldout.jsonl", "config.toml", "metrics.jsonl"):
        path = os.path.join(out, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)


def write_whole(path, write, mode="w"):
    """write(file), beside the path, flushed to the disk, then renamed: what stood there stays until the new file is whole."""
    try:
        with open(path + ".tmp", mode, encoding=None if "b" in mode else "utf-8") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except (OSError, RuntimeError) as e:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        while e.__context__ and not isinstance(e, OSError):                         # torch.save hides it behind a RuntimeError
            e = e.__context__
        raise OSError(f"{path}: could not be written ({e}); what stood there before is untouched") from None


def save_checkpoint(out, state):
    write_whole(os.path.join(out, "ckpt.pt"), lambda f: torch.save(state, f), "wb")


def metrics_rows(path):
    """(row, line) for each line of metrics.jsonl; a torn one, such as the last of a killed run, is left out."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield row, line.rstrip("\n") + "\n"


def keep_metrics_before(path, step):
    """Cuts metrics.jsonl back to the lines of the steps before `step`, those that the checkpoint knows of."""
    if os.path.exists(path):
        kept = [line for row, line in metrics_rows(path) if row["step"] < step]
        write_whole(path, lambda f: f.writelines(kept))


class Signals:
    """SIGINT and SIGTERM ask the loop to finish its step, save and stop; a second one, a second later or more, stops at once
    (SLURM and torchrun may both pass on the same one)."""

    def __enter__(self):
        self.received, self.when = 0, 0.0
        self.before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def handle(self, number, frame):
        if not self.received:
            self.received, self.when = number, time.monotonic()
        elif time.monotonic() - self.when > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)
