"""What goes wrong outside: kills at any moment, full disks, broken checkpoints, broken files.
Nothing that was written is lost, and every fault ends with one message."""
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import train
from conftest import (OUT, ROOT, checkpoint, finish, largest_difference, learned, metrics, refused,
                      run, start, weights)
from data import build_prompt, load_problems
from lib.config import to_toml
from model import GPT
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """An uninterrupted run of 4 SFT and 6 RL steps: (its folder, its flags, seconds)."""
    cwd = tmp_path_factory.mktemp("whole")
    flags = [*small, "--sft_steps=4", "--steps=6", "--save_every=3", "--eval_every=4"]
    began = time.time()
    finish(cwd, start(cwd, flags))
    return cwd / OUT, flags, time.time() - began


def assert_same_end(out, whole):
    assert learned(out) == learned(whole)
    assert largest_difference(weights(out / "model"), weights(whole / "model")) == 0


# ---- kills ---------------------------------------------------------------------------------------

def test_killed_at_any_moment_nothing_is_lost(whole, tmp_path):
    """20 times SIGKILL at a random moment, each followed by a resume; every run that gets to its
    end has the uninterrupted run's bits."""
    out, flags, seconds = whole
    rng, kills, ends = random.Random(0), 0, 0
    while kills < 20:
        cwd = tmp_path / str(ends)
        cwd.mkdir()
        while True:
            started = start(cwd, [*flags, "--resume"])
            started[0].join(rng.random() * seconds if kills < 20 else 60)
            if started[0].exitcode is not None:
                break
            started[0].kill()
            started[0].join()
            kills += 1
            if (cwd / OUT / "ckpt.pt").exists():
                checkpoint(cwd / OUT)
        finish(cwd, started)
        assert_same_end(cwd / OUT, out)
        ends += 1
    print(f"\n{kills} kills survived in {ends} runs")


def test_a_killed_process_under_torchrun_is_started_again_and_resumes(small, tmp_path):
    """SIGKILL to rank 1 of 2: torchrun --max_restarts=1 starts both again, --resume goes on."""
    flags = [*small, "--sft_steps=2", "--steps=20", "--save_every=2"]
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "--max_restarts=1", f"{ROOT}/train.py", *flags, "--out=killed", "--resume"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    finish(tmp_path, start(tmp_path, [*flags, "--out=whole"], 2))
    rows = tmp_path / "killed/metrics.jsonl"
    for _ in range(1200):
        time.sleep(0.05)
        if rows.exists() and rows.read_text().count("\n") > 5:
            break
    pids = subprocess.run(["pgrep", "-P", str(torchrun.pid)], capture_output=True, text=True)
    rank_1, = [int(pid) for pid in pids.stdout.split()
               if b"\0RANK=1\0" in open(f"/proc/{pid}/environ", "rb").read()]
    os.kill(rank_1, signal.SIGKILL)
    text = torchrun.communicate(timeout=120)[0]
    assert torchrun.returncode == 0 and "resumed at step" in text, text[-3000:]
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


def test_a_second_signal_ends_the_run_at_once(small, tmp_path):
    """Of two that come together, from SLURM and from torchrun, the second does not count."""
    def change(rank):
        train.sample = lambda *_, **__: open("ready", "w").close() or time.sleep(60)
    started = start(tmp_path, [*small, "--sft_steps=0", "--eval_problems=0"], 1, change)
    while not (tmp_path / "ready").exists() and started[0].is_alive():
        time.sleep(0.02)
    for wait in (0.1, 1.1, 0):
        assert started[0].is_alive()
        os.kill(started[0].pid, signal.SIGTERM)
        time.sleep(wait)
    finish(tmp_path, started, [-signal.SIGTERM])


# ---- disks ---------------------------------------------------------------------------------------

def small_files(size):
    """A change for start(): the kernel refuses to let any file grow beyond so many bytes."""
    return lambda rank: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def full_at_the_second_checkpoint(rank):
    """A change for start(): where PyTorch's writer hides the reason in a RuntimeError."""
    real = torch.save

    def save(*arguments):
        if os.path.exists(f"{OUT}/ckpt.pt"):
            small_files(os.path.getsize(f"{OUT}/ckpt.pt") - 30_000)(rank)
        real(*arguments)
    torch.save = save


@pytest.mark.parametrize("change, file", [
    (full_at_the_second_checkpoint, "ckpt.pt"), (small_files(600), "config.toml")])
def test_the_system_refuses_to_write(whole, tmp_path, change, file):
    """One message names the file (PyTorch's writer raises a RuntimeError, which named no cause),
    what stood there before loads, and the run goes on from it."""
    out, flags, _ = whole
    text = finish(tmp_path, start(tmp_path, flags, 1, change), [2])
    assert (f"error: {OUT}/{file}: could not be written ([Errno 27] File too large); what stood "
            "there before is untouched") in text and "Traceback" not in text
    if file == "ckpt.pt":
        assert checkpoint(tmp_path / OUT)["step"] == 3
    # half a checkpoint would keep the disk full
    assert not (tmp_path / OUT / f"{file}.tmp").exists()
    finish(tmp_path, start(tmp_path, [*flags, "--resume"]))
    assert_same_end(tmp_path / OUT, out)


def test_a_run_that_ended_before_its_first_checkpoint_is_not_in_the_way(small, tmp_path):
    """A new start and --resume were both refused. Here the disk is full in the middle of a row:
    the system writes what has room, without an error."""
    flags = [*small, "--algo=sft", "--sft_steps=20"]
    text = finish(tmp_path, start(tmp_path, flags, 1, small_files(3000)), [2])
    # where a row ends at the very byte, the next one fails as a whole
    why = r"/metrics.jsonl: could not be written \((the disk is full|.*File too large)"
    assert re.search(why, text) and "Traceback" not in text
    *whole_lines, _ = (tmp_path / OUT / "metrics.jsonl").read_text().split("\n")
    assert 5 < len(list(map(json.loads, whole_lines))) < 20
    refused(tmp_path, flags, "already holds heldout.jsonl, config.toml, metrics.jsonl: "
            "it has no ckpt.pt yet, --resume starts it again")
    assert "no checkpoint: starting at step 0" in run(tmp_path, *flags, "--resume")
    assert [row["step"] for row in metrics(tmp_path / OUT)] == list(range(21))


# ---- broken checkpoints --------------------------------------------------------------------------

@pytest.mark.parametrize("damage, says", [
    (lambda raw, state: b"", "not a readable"), (lambda raw, state: raw[:-1], "not a readable"),
    (lambda raw, state: raw[: len(raw) // 2], "not a readable"),
    (lambda raw, state: b"not a checkpoint", "not a readable"),
    (lambda raw, state: [1, 2], "no 'step'"), (lambda raw, state: {"step": 2}, "it has no"),
    (lambda raw, state: state | {"seed": random.Random()}, "not a readable"),
    (lambda raw, state: state | {"step": "2"}, "no 'step', or none that could be"),
    (lambda raw, state: state | {"optimizer": {"state": {}, "param_groups": []}}, "optimizer's"),
    (lambda raw, state: state | {"model": dict.fromkeys(state["model"], 1)}, "tensor 'model."),
    (lambda raw, state: state | {"model": state["model"] | {"model.norm.weight": torch.ones(7)}},
     "tensor 'model.norm.weight' is (7,) in the checkpoint and (32,) in this model")],
    ids=["nothing", "last byte gone", "half", "text", "a list", "no model", "an object",
         "a step that is text", "other optimizer", "no tensors", "other tensors"])
def test_broken_checkpoints_are_named(whole, tmp_path, damage, says):
    out, flags, _ = whole
    (tmp_path / OUT).mkdir(parents=True)
    path = tmp_path / OUT / "ckpt.pt"
    for name in ("ckpt.pt", "config.toml"):
        shutil.copy(out / name, tmp_path / OUT)
    damaged = damage(path.read_bytes(), torch.load(path))
    path.write_bytes(damaged) if isinstance(damaged, bytes) else torch.save(damaged, path)
    before = path.read_bytes()
    refused(tmp_path, [*flags, "--resume"], f"{OUT}/ckpt.pt: ", says)
    assert path.read_bytes() == before


# ---- mutated files -------------------------------------------------------------------------------

PIECES = [b"", b"{", b"}", b"[", b"]", b'"', b"'", b"\\", b"=", b":", b",", b"\n", b"\0", b"\xff",
          b"\xed\xa0\x80", b"-1", b"0", b"1e999", b"nan", b"null", b"true", b"[]", b"{}",
          b"99999999999999999999", b"\\ud800", b"\\boxed{", b"<answer>", b"0.5", b"inf", b"#",
          b"####", b" " * 2000]


def mutated(content, rng):
    """One to three changes: a cut, a gap, a troublesome piece, a repetition, a flipped bit, or a
    JSON or TOML value that becomes another."""
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(content) + 1), rng.choice([0, 1, 2, 5, 20])
        before, middle, after = content[:at], content[at:at + length], content[at + length:]
        bit = bytes([content[at] ^ 1 << rng.randrange(8)]) if at < len(content) else b""
        values = [m.span(1) for m in re.finditer(rb'[:=] *([-\w.]+|"[^"\n]*")', content)]
        start, end = rng.choice(values or [(at, at)])
        content = rng.choice([
            before, before + after, before + middle * 2 + after,
            before + bit + content[at + 1:], before + rng.choice(PIECES) + after,
            content[:start] + rng.choice(PIECES) + content[end:]])
    return content


def use_configuration(folder):
    train.check(train.settings([str(folder / "run.toml")])[0], 1)


def use_problems(folder):
    for p in load_problems(str(folder / "problems.jsonl"), say=lambda line: None):
        assert p.question.strip() and p.answer.strip()
        json.dumps([p.question, p.answer, p.solution], ensure_ascii=False).encode()


def use_model(folder):
    GPT.from_pretrained(str(folder))(torch.tensor([[5, 6, 7]]))


def use_tokenizer(folder):
    tokenizer = Tokenizer.from_pretrained(str(folder))
    ids = build_prompt(tokenizer, "17+25? \u00e9", "be brief") + tokenizer.encode("a\ufffd b")
    assert isinstance(tokenizer.decode(ids), str)


@pytest.mark.parametrize("file, use", [
    ("run.toml", use_configuration), ("problems.jsonl", use_problems),
    ("model.safetensors", use_model), ("config.json", use_model),
    ("tokenizer.json", use_tokenizer), ("tokenizer_config.json", use_tokenizer)])
def test_mutated_files_give_a_message_or_a_result(small_folder, tmp_path, file, use):
    """504 mutated files in all: ValueError or OSError, which the commands print, or a result; no
    other exception, and none takes 10 seconds."""
    for path in (*(small_folder / "model").iterdir(), small_folder / "problems.jsonl"):
        shutil.copy(path, tmp_path)
    settings = train.TrainConfig(system_prompt='say "hi"\n', template_variables={"a": [1, "b"]})
    (tmp_path / "run.toml").write_text(to_toml(settings))
    content, rng = (tmp_path / file).read_bytes(), random.Random(file)
    use(tmp_path)

    def hangs(*_):
        raise AssertionError("no answer within 10 seconds")
    refusals, wrong, previous = 0, [], signal.signal(signal.SIGALRM, hangs)
    header = len(content)
    if file == "model.safetensors":
        header = int.from_bytes(content[:8], "little") + 8
    for number in range(84):
        now = mutated(content[:header], rng)
        (tmp_path / file).write_bytes(now + content[header:])
        signal.alarm(10)
        try:
            use(tmp_path)
        except (ValueError, OSError) as e:
            refusals += 1
            assert len(str(e)) > 10, repr(e)
        except Exception as e:
            wrong.append(f"mutation {number}: {type(e).__name__}: {e}\n{now[:3000]!r}")
        finally:
            signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    assert not wrong, "\n\n".join(wrong)
    assert refusals > 20
