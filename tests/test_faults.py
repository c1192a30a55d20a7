"""What goes wrong outside: kills at any moment, full disks, broken checkpoints, broken files. Nothing that was written is lost, and every
fault ends with one message."""
import contextlib
import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import train
from data import build_prompt, load_problems
from model import GPT
from test_distributed import largest_difference
from test_train import ROOT, finish, learned, metrics, small, start, weights  # noqa: F401 (small is a fixture)
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """An uninterrupted run of 4 SFT and 6 RL steps: (its folder, its flags, seconds)."""
    cwd, flags = tmp_path_factory.mktemp("whole"), [*small, "--sft_steps=4", "--steps=6", "--save_every=3", "--eval_every=4"]
    began = time.time()
    finish(cwd, start(cwd, flags))
    return cwd / "out/arithmetic", flags, time.time() - began


def assert_same_end(out, whole):
    assert learned(out) == learned(whole[0])
    assert largest_difference(weights(out / "model"), weights(whole[0] / "model")) == 0


def test_killed_at_any_moment_nothing_is_lost(whole, tmp_path):
    """20 times SIGKILL at a random moment, each followed by a resume; every run that gets to its end has the uninterrupted run's bits."""
    rng, kills, ends = random.Random(0), 0, 0
    while kills < 20:
        cwd = tmp_path / str(ends)
        cwd.mkdir()
        while True:
            started = start(cwd, [*whole[1], "--resume=auto"])
            started[0].join(rng.random() * whole[2] if kills < 20 else 60)
            if started[0].exitcode is not None:
                break
            started[0].kill()
            started[0].join()
            kills += 1
            if (cwd / "out/arithmetic/ckpt.pt").exists():
                torch.load(cwd / "out/arithmetic/ckpt.pt", weights_only=True)
        finish(cwd, started)
        assert_same_end(cwd / "out/arithmetic", whole)
        ends += 1
    print(f"\n{kills} kills survived in {ends} runs")


def test_a_killed_process_under_torchrun_is_started_again_and_resumes(small, tmp_path):
    """SIGKILL to rank 1 of 2: torchrun --max_restarts=1 starts both again, --resume=auto goes on from the checkpoint."""
    flags = [*small, "--sft_steps=2", "--steps=30", "--save_every=2"]
    finish(tmp_path, start(tmp_path, [*flags, "--name=whole"], 2))
    torchrun = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=1",
                                 os.path.join(ROOT, "train.py"), *flags, "--name=killed", "--resume=auto"], cwd=tmp_path,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for _ in range(1200):
        time.sleep(0.05)
        if os.path.exists(tmp_path / "out/killed/metrics.jsonl") and len(metrics(tmp_path / "out/killed")) > 5:
            break
    workers = subprocess.run(["pgrep", "-P", str(torchrun.pid)], capture_output=True, text=True).stdout.split()
    rank_1 = [int(pid) for pid in workers if b"\0RANK=1\0" in open(f"/proc/{pid}/environ", "rb").read()]
    os.kill(rank_1[0], signal.SIGKILL)
    text = torchrun.communicate(timeout=120)[0]
    assert torchrun.returncode == 0 and "resumed at step" in text, text[-3000:]
    assert learned(tmp_path / "out/killed") == learned(tmp_path / "out/whole")
    assert largest_difference(weights(tmp_path / "out/killed/model"), weights(tmp_path / "out/whole/model")) == 0


def test_full_disk_while_the_checkpoint_is_written(whole, tmp_path):
    """The second checkpoint stops half-way with ENOSPC; the message names the file, the first one loads, and the run goes on from it."""
    def change(rank):
        real, calls = torch.save, []

        def save(state, f):
            calls.append(1)
            if len(calls) == 2:
                f.write(b"half of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            real(state, f)
        torch.save = save
    text = finish(tmp_path, start(tmp_path, whole[1], 1, change), [2])
    out = tmp_path / "out/arithmetic"
    assert "error: out/arithmetic/ckpt.pt: could not be written ([Errno 28] No space left on device); what stood there" in text
    assert "Traceback" not in text and torch.load(out / "ckpt.pt", weights_only=True)["step"] == 3
    assert not (out / "ckpt.pt.tmp").exists()                                       # half a checkpoint would keep the disk full
    finish(tmp_path, start(tmp_path, [*whole[1], "--resume"]))
    assert_same_end(out, whole)


def small_files(size):
    """A change for start(): the kernel refuses to let any file grow beyond so many bytes."""
    return lambda rank: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size, file", [(300_000, "ckpt.pt"), (600, "config.toml")])
def test_the_system_refuses_to_write(whole, tmp_path, size, file):
    """The same from the kernel, within PyTorch's writer (it raises a RuntimeError, which named no cause) and in the configuration."""
    text = finish(tmp_path, start(tmp_path, whole[1], 1, small_files(size)), [2])
    assert f"error: out/arithmetic/{file}: could not be written ([Errno 27] File too large)" in text and "Traceback" not in text
    finish(tmp_path, start(tmp_path, [*whole[1], "--resume=auto"]))
    assert_same_end(tmp_path / "out/arithmetic", whole)


def test_a_run_that_ended_before_its_first_checkpoint_is_not_in_the_way(small, tmp_path):
    """Its rows were taken for a run, so that a new start and --resume were both refused. Here the disk is full in the middle of the rows."""
    flags, out = [*small, "--algo=sft", "--sft_steps=30"], tmp_path / "out/arithmetic"
    text = finish(tmp_path, start(tmp_path, flags, 1, small_files(3000)), [2])
    assert "error: out/arithmetic/metrics.jsonl: could not be written (" in text and "Traceback" not in text
    assert 5 < sum(1 for _ in train.metrics_rows(out / "metrics.jsonl")) < 30       # what was written can be read
    text = finish(tmp_path, start(tmp_path, flags), [2])
    assert "already holds a run that ended before its first checkpoint" in text and "--overwrite" in text and "--resume" not in text
    assert "--overwrite" in finish(tmp_path, start(tmp_path, [*flags, "--resume"]), [2])
    assert "no checkpoint: starting at step 0" in finish(tmp_path, start(tmp_path, [*flags, "--resume=auto"]))
    assert [row["step"] for row in metrics(out)] == list(range(31))


@pytest.mark.parametrize("damage", ["cut to nothing", "cut in half", "last byte gone", "text", "a list", "no optimizer", "other tensors",
                                    "no tensors"])
def test_broken_checkpoints_are_named(whole, tmp_path, damage):
    shutil.copytree(whole[0], tmp_path / "out/arithmetic")
    path = tmp_path / "out/arithmetic/ckpt.pt"
    content, state = path.read_bytes(), torch.load(path, weights_only=True)
    cut = {"cut to nothing": b"", "cut in half": content[:len(content) // 2], "last byte gone": content[:-1], "text": b"not a checkpoint"}
    if damage in cut:
        path.write_bytes(cut[damage])
    elif damage == "a list":
        torch.save([1, 2], path)
    else:
        state["step"] = 5
        if damage == "no optimizer":
            del state["optimizer"]
        elif damage == "no tensors":
            state["model"] = {name: 1 for name in state["model"]}
        else:
            state["model"]["model.norm.weight"] = torch.ones(7)
        torch.save(state, path)
    before = path.read_bytes()
    with contextlib.chdir(tmp_path), contextlib.redirect_stderr(io.StringIO()) as text:
        assert train.command([*whole[1], "--resume"]) == 2
    assert text.getvalue().startswith("error: out/arithmetic/ckpt.pt: ") and path.read_bytes() == before
    if damage == "other tensors":
        assert "tensor 'model.norm.weight' is (7,) in the checkpoint and (32,) in this model" in text.getvalue()


# ---- mutated files -------------------------------------------------------------------------------------------------------------

PIECES = [b"", b"{", b"}", b"[", b"]", b'"', b"'", b"\\", b"=", b":", b",", b"\n", b"\0", b"\xff", b"\xed\xa0\x80", b"-1", b"0", b"1e999", b"nan",
          b"null", b"true", b"[]", b"{}", b"99999999999999999999", b"\\ud800", b"\\boxed{", b"<answer>", b"0.5", b"inf", b"#", b"####", b" " * 2000]


def mutated(content, rng):
    """Cuts, flips, swaps, repeats and insertions of troublesome pieces: one to three of them."""
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(content) + 1), rng.choice([0, 1, 2, 5, 20])
        kind = rng.randrange(6)
        if kind == 0:
            content = content[:at]
        elif kind == 1:
            content = content[:at] + content[at + length:]
        elif kind == 2:
            content = content[:at] + rng.choice(PIECES) + content[at + length:]
        elif kind == 3:
            content = content[:at] + content[at:at + length] * 2 + content[at + length:]
        elif kind == 4 and at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1:]
        else:                                                                       # a JSON or TOML value becomes another
            values = [(m.start(1), m.end(1)) for m in train.re.finditer(rb'[:=] *([-\w.]+|"[^"\n]*")', content)]
            if values:
                a, b = rng.choice(values)
                content = content[:a] + rng.choice(PIECES) + content[b:]
    return content


def use_configuration(folder):
    train.check_config(train.read_config(train.TrainConfig, [str(folder / "run.toml")]), 1)


def use_problems(folder):
    for p in load_problems(str(folder / "problems.jsonl")):
        assert p.question.strip() and p.answer.strip()
        json.dumps([p.question, p.answer, p.solution], ensure_ascii=False).encode()


def use_model(folder):
    GPT.from_pretrained(str(folder))(torch.tensor([[5, 6, 7]]))


def use_tokenizer(folder):
    tokenizer = Tokenizer.from_pretrained(str(folder))
    ids = build_prompt(tokenizer, "17+25? \u00e9", "be brief") + tokenizer.encode("a\ufffd b")
    assert isinstance(tokenizer.decode(ids), str)


@pytest.mark.parametrize("file, use", [("run.toml", use_configuration), ("problems.jsonl", use_problems), ("model.safetensors", use_model),
                                       ("config.json", use_model), ("tokenizer.json", use_tokenizer), ("tokenizer_config.json", use_tokenizer)])
def test_mutated_files_give_a_message_or_a_result(small, tmp_path, file, use):
    """504 mutated files in all: ValueError or OSError, which the commands print, or a result; no other exception, and none takes 10 seconds."""
    for path in (*os.scandir(small[0].removeprefix("--model=")), small[1].removeprefix("--data=")):
        shutil.copy(path, tmp_path)
    (tmp_path / "run.toml").write_text(train.to_toml(train.TrainConfig(system_prompt='say "hi"\n', eval_data="a.jsonl")))
    content, rng = (tmp_path / file).read_bytes(), random.Random(file)
    use(tmp_path)

    def hangs(*_):
        raise AssertionError("no answer within 10 seconds")
    refused, wrong, previous = 0, [], signal.signal(signal.SIGALRM, hangs)
    header = int.from_bytes(content[:8], "little") + 8 if file == "model.safetensors" else len(content)
    for number in range(84):
        (tmp_path / file).write_bytes(now := mutated(content[:header], rng) + content[header:])
        signal.alarm(10)
        try:
            use(tmp_path)
        except (ValueError, OSError) as e:
            refused += 1
            assert len(str(e)) > 10, repr(e)
        except Exception as e:
            wrong.append(f"mutation {number} of {file}: {type(e).__name__}: {e}\n{now[:3000]!r}")
        finally:
            signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    print(f"\n{file}: 84 mutations, {refused} refused, {84 - refused} still right")
    assert not wrong, "\n\n".join(wrong)
    assert refused > 20
