"""What tests share: where the product is, one thread (tiny models are faster so, and sums come in
one order), and runs of train.py: in this process, or in forks of it that are as torchrun's."""
import contextlib
import io
import json
import multiprocessing
import os
import pathlib
import random
import signal
import socket
import sys
import threading
import traceback
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
torch.set_num_threads(1)

import train  # noqa: E402 (not before the path)
from lib.arithmetic import write_byte_tokenizer  # noqa: E402
from lib.hf import Config  # noqa: E402
from lib.run import command  # noqa: E402
from model import GPT  # noqa: E402
from sample import pad  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

OUT = "out/arithmetic"  # of a run that names no other folder


# ---- small things to train -----------------------------------------------------------------------

def small_model(folder, **changes):
    """A Llama of 33,000 parameters with the byte tokenizer (272 ids, <|end|> is 269)."""
    write_byte_tokenizer(folder)
    torch.manual_seed(0)
    fields = dict(model_type="llama", vocab_size=272, hidden_size=32, intermediate_size=64,
                  num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=128,
                  initializer_range=0.1, eos_token_id=269, pad_token_id=269)
    model = GPT(Config(fields | changes))
    model.save_pretrained(folder)
    model.folder = folder
    return model


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def teach(model, steps=60):
    """Steps of cross-entropy on additions of one to three digits with answers that are as good as
    random, a third of them in the full format, a third without tags: the rewards of its groups
    differ, its completions are of 2 to 20 tokens, its entropy is a little below ln 2."""
    tokenizer, rng = Tokenizer.from_pretrained(model.folder), random.Random(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    says = "<answer>{}</answer>", "<reasoning>{}</reasoning><answer>{}</answer>", "{}"
    for step in range(steps):
        asked = [f"{rng.randrange(10 ** (1 + i % 3))}+{rng.randrange(100)}?" for i in range(12)]
        rows = [tokenizer.encode(question + says[i % 3].format(*rng.sample(range(10), 2))) + [269]
                for i, question in enumerate(asked)]
        ids, lengths = pad(rows)
        real = torch.arange(1, ids.shape[1]) < lengths[:, None]
        F.cross_entropy(model(ids)[:, :-1][real], ids[:, 1:][real]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    """A folder with model/, small and taught, and problems.jsonl: additions with worked solutions,
    so that prompts and demonstrations are of unequal length."""
    folder = tmp_path_factory.mktemp("small")
    model = small_model(f"{folder}/model")
    teach(model)
    model.save_pretrained(f"{folder}/model")
    pairs = [(1 if i % 3 else 10 ** (i % 4) + i, i % 8) for i in range(24)]
    write_rows(folder / "problems.jsonl", [
        {"question": f"{a}+{b}?", "answer": str(a + b), "solution": f"{a}+{b}={a + b}"}
        for a, b in dict.fromkeys(pairs)])
    return folder


@pytest.fixture(scope="session")
def small(small_folder):
    """Flags of a run on them that starts and ends in a moment."""
    return [f"--model={small_folder}/model", f"--data={small_folder}/problems.jsonl",
            "--sft_batch_size=4", "--prompts_per_step=4", "--group_size=4",
            "--max_prompt_tokens=40", "--max_new_tokens=16", "--eval_problems=2",
            "--eval_samples=2", "--show_every=0", "--device=cpu", "--prompt_style=plain",
            "--system_prompt=", "--sft_learning_rate=3e-4"]


# ---- runs ----------------------------------------------------------------------------------------

def run(cwd, *flags, code=0, main=train.main):
    """Runs a command in this process, in the folder cwd. Returns what it printed; its exit code
    must be `code`."""
    with (contextlib.chdir(cwd), contextlib.redirect_stdout(io.StringIO()) as text,
          contextlib.redirect_stderr(text)):
        got = command(main, flags)
    assert got == code, text.getvalue()
    return text.getvalue()


def refused(cwd, flags, *says):
    """The command ends with code 2 and one message, which holds all of `says`."""
    text = run(cwd, *flags, code=2)
    message = text[text.index("error: "):]
    assert "Traceback" not in text and all(part in message for part in says), text


def start(cwd, flags, processes=1, change=None, main=train.main):
    """Starts a command in forks of this process, which has imported torch already: one, or several
    with the variables that torchrun sets. change(rank) is called in each before it begins. Output
    goes to CWD/RANK.log. Returns the processes."""
    import torch._dynamo  # noqa: F401 (optimizers do, for a second: once here, not in each fork)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = dict(MASTER_ADDR="localhost", MASTER_PORT=str(s.getsockname()[1]))

    def work(rank):
        code = 1
        try:
            os.chdir(cwd)
            sys.stdout = sys.stderr = open(f"{rank}.log", "w", buffering=1)
            # all forks share the other: one that is killed while it holds it stops the rest
            tqdm.set_lock(threading.RLock())
            if processes > 1:
                os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank),
                                  WORLD_SIZE=str(processes))
            if change:
                change(rank)
            code = command(main, flags)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)  # as a command does: nothing of pytest is to be cleaned up

    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=work, args=(rank,)) for rank in range(processes)]
    for process in started:
        process.start()
    return started


def finish(cwd, started, codes=None):
    """Waits for processes of start(). Returns what they printed; their exit codes must be `codes`,
    by default all 0."""
    for process in started:
        process.join(60)
    got = [process.exitcode for process in started]
    logs = "\n".join(path.read_text() for path in sorted(pathlib.Path(cwd).glob("*.log")))
    for process in started:
        process.kill()
    assert got == (codes or [0] * len(started)), logs
    return logs


def stop_at(count, on_rank=0, number=signal.SIGTERM):
    """A change for start(): a signal comes to one process within the update of that number."""
    def change(rank):
        real, calls = train.update, []

        def update(*arguments):
            calls.append(1)
            if len(calls) == count and rank == on_rank:
                os.kill(os.getpid(), number)
            return real(*arguments)
        train.update = update
    return change


@pytest.fixture(scope="session")
def done(small, tmp_path_factory):
    """A run of two SFT and three RL steps on a file: (working folder, flags, output)."""
    cwd, flags = tmp_path_factory.mktemp("done"), [*small, "--sft_steps=2", "--steps=3"]
    return cwd, flags, run(cwd, *flags)


@contextlib.contextmanager
def stopped(count, number=signal.SIGTERM):
    """Within it, runs in this process are stopped so."""
    real = train.update
    stop_at(count, number=number)(0)
    try:
        yield
    finally:
        train.update = real


def spied(monkeypatch, module, name):
    """A list to which each call of that function adds (its arguments, its result)."""
    calls, real = [], getattr(module, name)

    def spy(*arguments, **more):
        result = real(*arguments, **more)
        calls.append((arguments, result))
        return result
    monkeypatch.setattr(module, name, spy)
    return calls


# ---- what they leave -----------------------------------------------------------------------------

def metrics(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def rl_rows(folder):
    return [row for row in metrics(folder) if row["phase"] in ("gtpo", "grpo")]


def learned(folder):
    """metrics.jsonl without what a clock or the machine decides."""
    measured = ("seconds", "sample_seconds", "memory_mib")
    return [{key: value for key, value in row.items() if key not in measured}
            for row in metrics(folder)]


def weights(folder):
    return dict(GPT.from_pretrained(str(folder)).named_parameters())


def checkpoint(folder):
    return torch.load(os.path.join(folder, "ckpt.pt"), weights_only=True)


def largest_difference(a, b):
    assert sorted(a) == sorted(b)
    return max((a[name] - b[name]).abs().max().item() for name in b)


def assert_close_rows(rows, expected, rel=1e-3, abs=1e-4):
    """The same rows, floats within a tolerance."""
    for row, other in zip(rows, expected, strict=True):
        for key, value in other.items():
            close = pytest.approx(value, rel=rel, abs=abs) if type(value) is float else value
            assert row[key] == close, (key, row, other)


def tree(folder):
    files = [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]
    return {path: open(path, "rb").read() for path in sorted(files)}


# ---- counting memory and products ----------------------------------------------------------------

class Watch(TorchDispatchMode):
    """Counts the matrix products made inside it, and `peak`, the most bytes that tensors took at
    once, those not counted that were `given`."""

    def __init__(self, *given):
        super().__init__()
        self.products = self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += "mm" in func.__name__
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.known.remove(key)
        self.live -= size
