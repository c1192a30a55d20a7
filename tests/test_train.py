"""train.py: configuration, the pieces of a step, and whole tiny runs (started as commands, as users do)."""
import contextlib
import io
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib

import pytest
import torch
import torch._dynamo  # noqa: F401 (the optimizer imports it, for a second: once here, not in each fork)

import eval as eval_command
import gtpo
import run as run_py
import train
from data import Problem, demonstration, held_out, load_problems
from model import GPT, Config
from safetensors.torch import load_file, save_file
from lib.arithmetic import write_byte_tokenizer
from tokenizer import Tokenizer
from tqdm import tqdm
from train import (TrainConfig, check_config, keep_metrics_before, learning_rate, make_tiny_model, micro_batches, order, read_config,
                   completion_logps, save_checkpoint, to_toml)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ["--sft_steps=4", "--sft_batch_size=8", "--steps=4", "--prompts_per_step=4", "--group_size=4", "--max_new_tokens=12", "--eval_problems=4",
        "--eval_samples=2", "--show_every=2", "--device=cpu", "--prompt_style=plain",
        "--system_prompt="]                                                         # the chat template costs a second a run


def run(cwd, *flags, code=0):
    """Runs the command's main in this process, in the folder cwd; returns what it printed. Its exit code must be `code`."""
    with contextlib.chdir(cwd), contextlib.redirect_stdout(io.StringIO()) as text:
        assert train.main([*TINY, *flags]) == code
    return text.getvalue()


def command(cwd, *flags):
    """Runs the command as a user does; returns the finished process with its output as text."""
    return subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), *flags], cwd=cwd, capture_output=True, text=True, timeout=170,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def small_model(folder):
    """A Llama of 33,000 parameters with the byte tokenizer."""
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    GPT(Config.from_dict(dict(model_type="llama", vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                              num_attention_heads=2, max_position_embeddings=128, initializer_range=0.1, eos_token_id=tokenizer.eos_ids[0],
                              pad_token_id=tokenizer.pad_id))).save_pretrained(folder)


def small_data(path, n=12):
    """Additions of one to four digits with worked solutions, so that prompts and demonstrations are of unequal length."""
    rows = [(10 ** (i % 4) + i, 7 * i + 1) for i in range(n)]
    path.write_text("".join(json.dumps({"question": f"{a}+{b}?", "answer": str(a + b), "solution": f"{a}+{b}={a + b}"}) + "\n" for a, b in rows))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Flags of a run that starts and ends in a moment: a folder with a small model and a file of problems."""
    folder = tmp_path_factory.mktemp("small")
    small_model(str(folder / "model"))
    small_data(folder / "problems.jsonl")
    return [f"--model={folder}/model", f"--data={folder}/problems.jsonl", "--sft_batch_size=4", "--prompts_per_step=4", "--group_size=4",
            "--max_prompt_tokens=24", "--max_new_tokens=12", "--eval_problems=2", "--eval_samples=2", "--show_every=0", "--device=cpu",
            "--prompt_style=plain", "--system_prompt=", "--timeout_minutes=1", "--sft_learning_rate=3e-4"]


def start(cwd, flags, processes=1, change=None):
    """Starts the command in forks of this process, which has imported torch already: one, or several with the variables that torchrun sets.
    change(rank) is called in each before it begins. Output goes to CWD/RANK.log. Returns the processes; their exitcode tells the end."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]

    def work(rank):
        os.chdir(cwd)
        sys.stdout = sys.stderr = open(f"{rank}.log", "w", buffering=1)
        tqdm.set_lock(threading.RLock())                                            # all forks share the other: one killed while it holds it stops the rest
        if processes > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR="localhost", MASTER_PORT=str(port))
        if change:
            change(rank)
        code = train.command(flags)
        sys.stdout.flush()
        os._exit(code)                                                              # as a command: nothing of pytest is to be cleaned up
    started = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in range(processes)]
    for process in started:
        process.start()
    return started


def finish(cwd, started, codes=None):
    """Waits for processes of start(); their exit codes must be `codes`, by default all 0."""
    for process in started:
        process.join(60)
    got, logs = [p.exitcode for p in started], "\n".join(path.read_text() for path in sorted(pathlib.Path(cwd).glob("*.log")))
    for process in started:
        process.kill()
    assert got == (codes or [0] * len(started)), logs
    return logs


def metrics(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


# ---- configuration ----------------------------------------------------------------------------------------------------------

def test_flags_take_the_type_of_the_field():
    """P80: `--learning_rate=1` is 1.0 and `--name=2024` is text; the literal need not look like the default."""
    c = read_config(TrainConfig, ["--learning_rate=1", "--name=2024", "--conflict=false", "--overwrite", "--resume", "--steps", "7"])
    assert (c.learning_rate, type(c.learning_rate)) == (1.0, float)
    assert (c.name, c.conflict, c.overwrite, c.resume, c.steps) == ("2024", False, True, "yes", 7)


@pytest.mark.parametrize("argv, says", [
    (["--lerning_rate=1e-5"], "nearest is learning_rate"), (["--steps=1.5"], "whole number"), (["--gamma=much"], "a number"),
    (["--gamma=nan"], "a number"), (["--conflict=maybe"], "true or false"), (["--steps"], "needs a value"), (["a.toml", "b.toml"], "two configuration"),
])
def test_bad_flags_are_named(argv, says):
    with pytest.raises(ValueError, match=says):
        read_config(TrainConfig, argv)


@pytest.mark.parametrize("text, says", [
    ("lerning_rate = 1e-5", "nearest is learning_rate"), ("steps = '5'x", "not valid TOML"), ("steps = true", "whole number"),
    ("gamma = 'much'", "a number"), ("[gtpo]\ngamma = 1", "gtpo"),
])
def test_bad_toml_is_named(tmp_path, text, says):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=says) as e:
        read_config(TrainConfig, [str(tmp_path / "bad.toml")])
    assert "bad.toml" in str(e.value)


def test_missing_toml_is_named():
    with pytest.raises(FileNotFoundError, match="nowhere.toml"):
        read_config(TrainConfig, ["nowhere.toml"])


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "a.toml").write_text("steps = 5\ngamma = 1\n")
    c = read_config(TrainConfig, [str(tmp_path / "a.toml"), "--steps=6"])
    assert (c.steps, c.gamma, c.group_size) == (6, 1.0, TrainConfig().group_size)


@pytest.mark.parametrize("name", sorted(f for f in os.listdir(os.path.join(ROOT, "config")) if f.endswith(".toml")))
def test_presets_are_valid(name):
    check_config(read_config(TrainConfig, [os.path.join(ROOT, "config", name)]), 1)


def test_written_configuration_reads_back(tmp_path):
    c = TrainConfig(name="x", system_prompt='say "hi"\n\\ <b>', gamma=0.5, conflict=False)
    (tmp_path / "c.toml").write_text(to_toml(c))
    assert TrainConfig(**tomllib.loads(to_toml(c))) == c == read_config(TrainConfig, [str(tmp_path / "c.toml")])


@pytest.mark.parametrize("change, says", [
    (dict(algo="ppo"), "algo"), (dict(group_size=1), "group_size"), (dict(prompts_per_step=0), "prompts_per_step"), (dict(temperature=0.0), "temperature"),
    (dict(sft_steps=0, steps=0), "nothing to do"), (dict(name="../x"), "name"), (dict(updates_per_rollout=2), "updates_per_rollout"),
    (dict(dtype="float16"), "dtype"), (dict(gamma=-1.0), "gamma"), (dict(adam_beta2=1.0), "adam_beta2"), (dict(seed=2**64), "seed"),
    (dict(warmup_ratio=1.5), "warmup_ratio"), (dict(epsilon=1.0), "epsilon"), (dict(steps=2**40), "steps"), (dict(timeout_minutes=1e9), "timeout"),
    (dict(overwrite=True, resume="auto"), "--overwrite .* --resume=auto"), (dict(algo="sft", sft_steps=0), "nothing to do"),
])
def test_settings_that_cannot_work_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        check_config(TrainConfig(**change), 1)


def test_sizes_that_do_not_divide_name_both_numbers():
    """3 prompts per step on 2 processes."""
    with pytest.raises(ValueError, match="prompts_per_step=3.* 2 processes"):
        check_config(TrainConfig(prompts_per_step=3), 2)
    check_config(TrainConfig(prompts_per_step=4), 2)                                # by the number of processes, not of devices


def test_help_lists_every_field_with_its_comment():
    text = train.help_text(TrainConfig, train.__doc__)
    for name in TrainConfig.__dataclass_fields__:
        line = next(line for line in text.splitlines() if line.startswith(f"  --{name}="))
        assert len(line.split(maxsplit=1)[1]) > 15


# ---- the pieces of a step ------------------------------------------------------------------------------------------------------

def test_order_is_a_new_permutation_every_epoch_and_follows_from_the_seed():
    epochs = [[order(e * 50 + i, 50, 0, "rl") for i in range(50)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50)) and epochs[0] != epochs[1]
    assert [order(i, 50, 1, "rl") for i in range(50)] != epochs[0] and [order(i, 50, 0, "sft") for i in range(50)] != epochs[0]


def test_micro_batches_hold_every_completion_once_within_the_budget():
    rng = random.Random(0)
    for budget in (1, 40, 200, 10**6):
        prompt_lengths = [rng.randint(1, 20) for _ in range(6)]
        prompt_of = [p for p in range(6) for _ in range(4)]
        lengths = [rng.randint(1, 30) for _ in prompt_of]
        micros = list(micro_batches(prompt_lengths, lengths, prompt_of, budget))
        assert sorted(i for m in micros for i in m) == list(range(24))
        for m in micros:
            prompts = {prompt_of[i] for i in m}
            cost = len(prompts) * max(prompt_lengths[p] for p in prompts) + len(m) * max(lengths[i] for i in m)
            assert cost <= budget or len(m) == 1
    assert len(micros) == 1 and list(micro_batches([3], [], [], 10)) == []


def test_learning_rate_rises_linearly_and_falls_as_a_cosine():
    assert [round(learning_rate(s, 100, 1.0, 0.04), 4) for s in (0, 1, 3, 4)] == [0.25, 0.5, 1.0, 1.0]
    assert learning_rate(52, 100, 1.0, 0.04) == pytest.approx(0.5)
    assert learning_rate(99, 100, 1.0, 0.0) == pytest.approx(0.5 * (1 + math.cos(0.99 * math.pi)))
    assert learning_rate(0, 1, 1.0, 0.005) == 1.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("tiny"))
    make_tiny_model(folder, 0)
    return folder


def test_completion_logps_are_those_of_whole_sequences(tiny):
    """Each prompt runs once for its completions, padding in both; the straightforward way runs every sequence alone."""
    model = GPT.from_pretrained(tiny)
    prompts, completions, prompt_of = [[5, 6, 7], [8, 9, 10, 11, 12], [1]], [[1, 2], [3, 4, 5, 6], [7], [8, 8, 8]], [1, 1, 0, 1]
    got = completion_logps(model, prompts, completions, prompt_of, temperature=0.7)
    want = []
    for p, o in zip(prompt_of, completions):
        logps = (model(torch.tensor([prompts[p] + o]))[0] / 0.7).log_softmax(-1)
        want += [logps[len(prompts[p]) - 1 + t, token] for t, token in enumerate(o)]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=0)


def test_update_skips_gradients_that_are_not_finite(tiny):
    model = GPT.from_pretrained(tiny)
    optimizer = train.make_optimizer(model, TrainConfig())
    before = [p.detach().clone() for p in model.parameters()]
    model.head_weight.grad = torch.full_like(model.head_weight, math.inf)
    norm = train.update(model, optimizer, train.Processes("cpu", 1), 1e-2, 1.0)
    assert not math.isfinite(norm) and all(torch.equal(p, q) for p, q in zip(before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_small_learning_rate_moves_the_weights():
    """Weights in bfloat16 would round an update of 1e-6 away; ours are float32."""
    weight = torch.nn.Parameter(torch.full((4, 4), 0.02))
    model = torch.nn.Module()
    model.weight = weight
    optimizer = train.make_optimizer(model, TrainConfig(weight_decay=0.0))
    processes = train.Processes("cpu", 1)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        train.update(model, optimizer, processes, 1e-6, 0.0)
    assert weight.mean().item() == pytest.approx(0.019, abs=2e-5)


def test_checkpoint_is_replaced_only_when_whole(tmp_path, monkeypatch):
    """A writer that dies half-way leaves the previous checkpoint."""
    save_checkpoint(str(tmp_path), {"step": 1})
    real = torch.save

    def dies(state, f):
        real(state, f)
        f.truncate(10)
        raise OSError("No space left on device")
    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(OSError):
        save_checkpoint(str(tmp_path), {"step": 2})
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True) == {"step": 1}


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 1, "torn')
    keep_metrics_before(str(path), 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


# ---- whole runs ------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One uninterrupted run of 4 SFT and 4 GTPO steps: (working folder, its output)."""
    cwd = tmp_path_factory.mktemp("run")
    return cwd, run(cwd, "--name=whole", "--save_every=3")


def test_run_leaves_everything_it_promises(finished):
    cwd, _ = finished
    out = cwd / "out" / "whole"
    rows = metrics(out)
    assert [r["step"] for r in rows if r["phase"] in ("sft", "gtpo")] == list(range(8))
    assert [(r["phase"], r.get("label")) for r in rows if r["phase"] == "eval"] == [("eval", "before"), ("eval", "after")]
    for name in ("reward", "accuracy", "format", "entropy", "kept", "conflict", "grad_norm", "loss", "lr", "truncated", "memory_mib"):
        assert math.isfinite(rows[-2][name]), name
    assert torch.load(out / "ckpt.pt", weights_only=True)["step"] == 8
    trained, start = GPT.from_pretrained(str(out / "model")), GPT.from_pretrained(str(out / "init"))
    assert not torch.equal(trained.head_weight, start.head_weight)
    assert (out / "model" / "tokenizer.json").exists() and (out / "config.toml").exists()


def test_screen_shows_plan_group_and_result(finished):
    _, text = finished
    for part in ("GTPO on arithmetic", "million parameters", "4 prompts x 4 completions", "out/whole", "one group", "advantage", "before", "pass@1",
                 "python sample.py", "python eval.py", "python train.py"):
        assert part in text, part


def test_second_run_in_the_same_folder_is_refused(finished):
    cwd, _ = finished
    before = (cwd / "out/whole/metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        run(cwd, "--name=whole")
    assert (cwd / "out/whole/metrics.jsonl").read_bytes() == before


def weights(folder):
    return dict(GPT.from_pretrained(str(folder)).named_parameters())


def learned(folder):
    """metrics.jsonl without what a clock or the machine decides."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "sample_seconds", "memory_mib")} for row in metrics(folder)]


def test_a_finished_run_that_is_resumed_says_so_and_changes_nothing(finished):
    """It used to evaluate again and to write a second row "after"."""
    cwd, _ = finished
    rows = (cwd / "out/whole/metrics.jsonl").read_bytes()
    assert "is finished" in run(cwd, "--name=whole", "--resume", "--save_every=3")
    assert (cwd / "out/whole/metrics.jsonl").read_bytes() == rows and metrics(cwd / "out/whole")[-1]["step"] == 8


@pytest.mark.parametrize("stop_after", [2, 6])
def test_interrupted_and_resumed_equals_uninterrupted(finished, monkeypatch, stop_after):
    """Prompts, completions, optimizer, schedule and metrics continue exactly, in the warm-up and in RL."""
    cwd, _ = finished
    name, real, calls = f"stop{stop_after}", train.update, []

    def update(*arguments):
        calls.append(1)
        if len(calls) == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)
    monkeypatch.setattr(train, "update", update)
    assert "--resume" in run(cwd, f"--name={name}", code=143)
    assert torch.load(cwd / f"out/{name}/ckpt.pt", weights_only=True)["step"] == stop_after
    monkeypatch.undo()
    run(cwd, f"--name={name}", "--resume")
    assert learned(cwd / f"out/{name}") == learned(cwd / "out/whole")
    a, b = weights(cwd / f"out/{name}/model"), weights(cwd / "out/whole/model")
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_resume_with_another_configuration_lists_what_differs(finished):
    cwd, _ = finished
    with pytest.raises(ValueError, match="gamma: 0.1 then, 0.5 now"):
        run(cwd, "--name=whole", "--resume", "--gamma=0.5")


def test_resume_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        run(tmp_path, "--resume")


def assert_learned_the_same(cwd, name):
    a, b = weights(cwd / "out/whole/model"), weights(cwd / f"out/{name}/model")
    assert max((a[k] - b[k]).abs().max().item() for k in a) < 1e-4
    for row, other in zip(learned(cwd / "out/whole"), learned(cwd / f"out/{name}"), strict=True):
        for key, value in row.items():
            assert other[key] == (pytest.approx(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value), key


def test_size_of_micro_batches_does_not_matter(finished):
    """A mean of means, or a log of the last micro-batch only."""
    cwd, _ = finished
    run(cwd, "--name=micro", "--micro_tokens=40")
    assert_learned_the_same(cwd, "micro")


def test_the_head_is_looked_at_once(small, tmp_path):
    """d loss / d logps as announced to token_logps is what arrives, bit for bit, in the warm-up and in RL: no second look at the logits."""
    def change(rank):
        gtpo.head_gradient = None                                                   # a call would end the run
    for algo in ("gtpo", "grpo"):
        finish(tmp_path, start(tmp_path, [*small, f"--algo={algo}", f"--name={algo}", "--sft_steps=2", "--steps=2", "--updates_per_rollout=1",
                                          "--beta=0", "--micro_tokens=100"], change=change))
        assert sum("loss" in row for row in metrics(tmp_path / f"out/{algo}")) == 4


def test_grpo_with_kl_and_several_updates_runs(finished):
    cwd, _ = finished
    run(cwd, "--name=grpo", "--algo=grpo", "--beta=0.1", "--updates_per_rollout=2")
    rows = [r for r in metrics(cwd / "out/grpo") if r["phase"] == "grpo"]
    assert len(rows) == 4 and all(math.isfinite(r["loss"]) for r in rows)


def test_sft_alone_runs(finished):
    cwd, _ = finished
    assert "pass@1" in run(cwd, "--name=sft", "--algo=sft")
    assert [r["phase"] for r in metrics(cwd / "out/sft")] == ["sft"] * 4 + ["eval"]


def test_user_mistakes_are_named(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"question": "q", "answer": "1"}\n{"question":\n')
    for flags, says in (((f"--data={tmp_path}/broken.jsonl",), "broken.jsonl:2"), (("--model=/nowhere",), "/nowhere"),
                        (("--max_prompt_tokens=2",), "usable prompts"), (("--max_new_tokens=5000",), "positions"), (("--data=gsm9k",), "gsm8k")):
        with pytest.raises((ValueError, OSError), match=says):
            run(tmp_path, "--overwrite", *flags)


def test_a_mistake_on_the_command_line_ends_with_one_message_and_code_2(tmp_path):
    done = command(tmp_path, "--lerning_rate=1")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "learning_rate" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_of_ones_own_trains_on_a_file_of_ones_own(finished):
    """--model and --data: a Hugging Face folder and a JSONL file with worked solutions, held-out problems taken from the file."""
    cwd, _ = finished
    with open(cwd / "mine.jsonl", "w") as f:
        for i in range(20):
            f.write(json.dumps({"question": f"What is {i}+1?", "answer": f"Add one: <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}) + "\n")
    text = run(cwd, "--name=mine", f"--model={cwd}/out/whole/model", f"--data={cwd}/mine.jsonl")
    assert "16 problems" in text and "4 held out" in text
    assert (cwd / "out/mine/model/config.json").exists() and not (cwd / "out/mine/init").exists()


def refused(cwd, flags, says):
    """The command ends with code 2 and one message that holds all of `says`, without a traceback."""
    with contextlib.chdir(cwd), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as text:
        assert train.command(flags) == 2
    message = text.getvalue()[text.getvalue().index("error: "):]
    assert all(part in message for part in says), message


@pytest.fixture(scope="module")
def done(small, tmp_path_factory):
    """A finished run of one SFT and two RL steps on a file: (working folder, flags, output)."""
    cwd, flags = tmp_path_factory.mktemp("done"), [*small, "--sft_steps=1", "--steps=2"]
    return cwd, flags, finish(cwd, start(cwd, flags))


def tree(folder):
    return {path: path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("flags, says", [
    (["--model=/nowhere"], ["/nowhere"]), (["--data=/nowhere.jsonl"], ["/nowhere.jsonl"]), (["--max_new_tokens=5000"], ["positions"]),
    (["--model=out/arithmetic/model"], ["model=out/arithmetic/model lies in the output folder", "--name"]),
    (["--eval_data=out/arithmetic/heldout.jsonl"], ["eval_data=", "lies in the output folder"]), (["--sft_max_tokens=3"], ["all 10", "sft_max_tokens"])])
def test_overwrite_deletes_nothing_before_all_is_checked(done, flags, says):
    """The old run was deleted first, and the mistake in the new command found then."""
    cwd, start_flags, _ = done
    before = tree(cwd / "out")
    refused(cwd, [*start_flags, "--overwrite", *flags], says)
    assert tree(cwd / "out") == before


def test_overwrite_deletes_the_old_run_alone(done, tmp_path):
    cwd, flags, _ = done
    shutil.copytree(cwd / "out", tmp_path / "out")
    (tmp_path / "out/arithmetic/notes.txt").write_text("mine")
    finish(tmp_path, start(tmp_path, [*flags, "--overwrite", "--algo=sft"]))
    assert (tmp_path / "out/arithmetic/notes.txt").exists() and not (tmp_path / "out/arithmetic/sft").exists()
    assert [row["phase"] for row in metrics(tmp_path / "out/arithmetic")] == ["sft", "eval"]


def test_a_second_run_in_the_folder_is_refused_while_the_first_one_lives(done):
    cwd, flags, _ = done
    with train.lock_output(str(cwd / "out/arithmetic")):
        for more in (["--resume=auto"], ["--overwrite"], []):
            refused(cwd, [*flags, *more], ["another run is writing to out/arithmetic"])


def test_a_file_system_without_locks_gets_a_note(tmp_path, monkeypatch, capsys):
    """Regression: the note itself failed, on the file systems that several nodes share."""
    def flock(*_):
        raise OSError("no locks here")
    monkeypatch.setattr(run_py.fcntl, "flock", flock)
    run_py.lock_output(str(tmp_path / "out")).close()
    assert "cannot be locked (no locks here)" in capsys.readouterr().err


def test_problems_without_a_solution_are_found_before_anything_is_written(small, tmp_path):
    """The message came when the problem was drawn, perhaps hours later."""
    rows = [{"question": f"{i}+1?", "answer": str(i + 1), "solution": "count"} for i in range(11)] + [{"question": "no idea?", "answer": "1"}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*small, "--data=some.jsonl", "--eval_data=some.jsonl", "--steps=0"]
    refused(tmp_path, [*flags, "--sft_steps=1"], ["'no idea?'", "solution", "--sft_steps=0"])
    assert os.listdir(tmp_path / "out/arithmetic") == ["lock"]


def test_long_demonstrations_are_left_out_and_counted_on_the_screen(small, tmp_path):
    tokenizer, problems = Tokenizer.from_pretrained(small[0].removeprefix("--model=")), load_problems(small[1].removeprefix("--data="))
    lengths = sorted(len(tokenizer.encode(p.question)) + len(tokenizer.encode(demonstration(p))) + 1 for p in held_out(problems, 2)[0])
    text = finish(tmp_path, start(tmp_path, [*small, "--algo=sft", "--sft_steps=1", f"--sft_max_tokens={lengths[4]}"]))
    assert lengths[4] < lengths[9] and f"{sum(n > lengths[4] for n in lengths)} of 10 skipped: too long" in text


def test_the_reference_of_grpo_is_the_policy_before_rl_with_its_adapter(small, tmp_path, monkeypatch):
    """Without a warm-up the reference was the model without --adapter. It must be the same after a resume, too."""
    model = small[0].removeprefix("--model=")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}))
    generator = torch.Generator().manual_seed(0)
    save_file({f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{side}.weight":
               torch.randn(2, 32, generator=generator).reshape(shape) for i in range(2) for side, shape in (("A", (2, 32)), ("B", (32, 2)))},
              tmp_path / "adapter/adapter_model.safetensors")
    seen, real, calls = [], train.kl_tokens, []

    def kl_tokens(logps, ref_logps):
        seen.append((logps - ref_logps).abs().max().item())
        return real(logps, ref_logps)

    def stops(*arguments):
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*arguments)
    update = train.update
    monkeypatch.setattr(train, "kl_tokens", kl_tokens)
    monkeypatch.setattr(train, "update", stops)
    flags = [*small, f"--adapter={tmp_path}/adapter", "--algo=grpo", "--beta=0.1", "--sft_steps=0", "--steps=2", "--learning_rate=1e-2"]
    run(tmp_path, *flags, code=143)
    assert seen == [0]
    run(tmp_path, *flags, "--resume")
    policy = GPT.from_pretrained(model, adapter=str(tmp_path / "adapter"))
    saved = torch.load(tmp_path / "out/arithmetic/ckpt.pt", weights_only=True)["model"]
    assert sorted(saved) == sorted(n for n, p in policy.named_parameters() if p.requires_grad)                     # the adapter alone
    assert len(seen) == 2 and seen[1] > 1e-4                                        # the policy has moved, the reference has not


def test_an_adapter_is_trained_saved_resumed_and_merged(small, tmp_path, monkeypatch):
    """LoRA through warm-up and RL with a KL term: only the adapter learns and is saved, a resumed run is the uninterrupted one (its reference, too),
    and the merged model is the base with the adapter."""
    flags = [*small, "--lora_rank=2", "--lora_targets=q_proj,down_proj", "--algo=grpo", "--beta=0.1", "--sft_steps=2", "--steps=3", "--learning_rate=1e-2",
             "--sft_learning_rate=1e-2", "--merge"]
    monkeypatch.setattr(train, "reward_parts", lambda text, gold: {"format": float(len(text) % 2), "accuracy": 0.0})
    text = run(tmp_path, *flags, "--name=whole")
    out, base = tmp_path / "out/whole", small[0].removeprefix("--model=")
    assert "of them in the adapter" in text and "--model=out/whole/model " in text
    assert sorted(os.listdir(out / "adapter")) == sorted(os.listdir(out / "sft")) == ["adapter_config.json", "adapter_model.safetensors"]
    saved = torch.load(out / "ckpt.pt", weights_only=True)
    assert {name.rpartition(".")[2] for name in saved["model"]} == {"lora_A", "lora_B"} == {name.rpartition(".")[2] for name in saved["reference"]}
    assert any((saved["model"][name] - saved["reference"][name]).abs().max() > 1e-3 for name in saved["model"])
    ids = torch.arange(20)[None]
    with torch.no_grad():
        adapted, merged = GPT.from_pretrained(base, adapter=str(out / "adapter"))(ids), GPT.from_pretrained(str(out / "model"))(ids)
        torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-4)
        assert (adapted - GPT.from_pretrained(base)(ids)).abs().max() > 1e-2
    real, calls = train.update, []

    def stops(*arguments):
        calls.append(1)
        if len(calls) == 4:                                                         # the second step of RL
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)
    monkeypatch.setattr(train, "update", stops)
    run(tmp_path, *flags, "--name=halves", code=143)
    run(tmp_path, *flags, "--name=halves", "--resume")
    a, b = (load_file(tmp_path / f"out/{name}/adapter/adapter_model.safetensors") for name in ("whole", "halves"))
    assert all(torch.equal(a[k], b[k]) for k in a) and learned(out) == learned(tmp_path / "out/halves")
    hints = run(tmp_path, *[f for f in flags if f != "--merge"], "--name=apart")
    assert f"--model={base} --adapter=out/apart/adapter" in hints and not (tmp_path / "out/apart/model").exists()


def test_activation_checkpointing_and_compilation_learn_the_same(finished, monkeypatch):
    cwd, _ = finished
    run(cwd, "--name=checkpointing", "--checkpointing")
    assert_learned_the_same(cwd, "checkpointing")
    compiled = []

    def compile_steps(model):                                                       # compiling takes long; test_model.py does it
        compiled.append(1)
        model.compiled = True
    monkeypatch.setattr(GPT, "compile_steps", compile_steps)
    run(cwd, "--name=compiled", "--compile")
    assert_learned_the_same(cwd, "compiled")
    assert compiled == [1] and sorted(torch.load(cwd / "out/compiled/ckpt.pt", weights_only=True)["model"]) == sorted(weights(cwd / "out/whole/init"))


def test_kept_is_what_the_loss_keeps(small, tmp_path, monkeypatch):
    """It was the filter's verdict even where the filter is off, or spares completions with A >= 0."""
    real = train.keep_completions
    monkeypatch.setattr(train, "keep_completions", lambda entropy, _, __, advantages: real(entropy + 9, 0.0, 1.0, advantages))     # all are noise
    monkeypatch.setattr(train, "reward_parts", lambda text, gold: {"format": float(len(text) % 2), "accuracy": 0.0})
    kept = {}
    for name, flags in dict(all=[], off=["--entropy_filter=false"], negative=["--filter_negative_only"], grpo=["--algo=grpo"]).items():
        text = run(tmp_path, *small, f"--name={name}", "--sft_steps=0", "--steps=1", "--show_every=1", *flags)
        kept[name] = metrics(tmp_path / "out" / name)[1]["kept"], text.count("(filtered)"), len(re.findall(r"(?<!\.\.)(?:\]\]|\)\))", text))
    assert kept["all"][:2] == (0, 4) and kept["off"][:2] == (1, 0) and 0 < kept["negative"][0] < 1 and 0 < kept["negative"][1] < 4
    assert kept["grpo"] == (0, 0, 0)                                                # what GTPO would keep; nothing is marked


def test_time_of_the_first_step_is_without_the_evaluation(small, tmp_path, monkeypatch):
    real = train.evaluate
    waits = [2, 0]                                                                  # seconds, before and after RL
    monkeypatch.setattr(train, "evaluate", lambda *a, **k: time.sleep(waits.pop(0)) or real(*a, **k))
    run(tmp_path, *small, "--sft_steps=0", "--steps=1")
    row = metrics(tmp_path / "out/arithmetic")[1]
    assert row["sample_seconds"] <= row["seconds"] < 2


def test_closing_hints_are_commands_that_work(done, small):
    """Paths and texts were not quoted, the question was cut at 60 characters, and the problems to evaluate on were those of the training."""
    cwd, _, text = done
    kept_out, all_problems = load_problems(str(cwd / "out/arithmetic/heldout.jsonl")), load_problems(small[1].removeprefix("--data="))
    assert len(kept_out) == 2 and {p.question for p in kept_out} < {p.question for p in all_problems}
    lines = {line.split("python ")[1].split(".py")[0]: shlex.split(line.split(".py ")[1]) for line in text.splitlines() if " python " in line}
    args = eval_command.parse(lines["eval"])
    assert (args.model, args.data, args.n, args.k) == ("out/arithmetic/model", "out/arithmetic/heldout.jsonl", 2, [1, 2])
    assert (args.max_new_tokens, args.system_prompt, args.prompt_style) == (12, "", "plain")
    assert {f"--prompt={kept_out[0].question}", "--max_new_tokens=12", "--system_prompt="} < set(lines["sample"])
    with contextlib.chdir(cwd):
        c = read_config(TrainConfig, lines["train"])
        check_config(c, 1)
    assert (c.resume, c.resume_force, c.steps, c.max_new_tokens, c.name) == ("yes", True, 4, 12, "arithmetic")


def test_closing_hints_quote_and_cut_nothing():
    problems = [Problem("It's long & \"quoted\"\n" * 9, "1"), Problem("Tom's $5?", "x; rm *")]
    words = shlex.split(train.closing_hints(TrainConfig(data="my file.jsonl", temperature=0.5), "out dir/x", problems))
    for word in ("--model=out dir/x/model", "--prompt=Tom's $5?", "--gold=x; rm *", "--data=out dir/x/heldout.jsonl", "--temperature=0.5"):
        assert word in words
    assert not any(word.startswith(("--system_prompt", "--prompt_style")) for word in words)


def test_resume_with_another_model_names_the_first_tensor_that_differs(done, tmp_path):
    """It was PyTorch's RuntimeError, a page of it."""
    cwd, flags, _ = done
    make_tiny_model(str(tmp_path / "other"), 0)
    refused(cwd, [*flags, "--resume", "--resume_force", f"--model={tmp_path}/other"],
            ["ckpt.pt: tensor 'model.embed_tokens.weight' is", "32) in the checkpoint", "128) in this model"])


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="process 2 of this node has no GPU: PyTorch sees 2.*--nproc_per_node=2"):
        train.Processes("auto", 1)


def test_out_of_memory_says_what_to_lower(small, tmp_path, monkeypatch):
    def sample(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
    monkeypatch.setattr(train, "sample", sample)
    refused(tmp_path, [*small, "--sft_steps=0"], ["Tried to allocate 2.00 GiB", "micro_tokens", "prompts_per_step"])


def test_a_second_signal_ends_the_run_at_once(small, tmp_path):
    def change(rank):
        train.sample = lambda *_, **__: open("ready", "w").close() or time.sleep(60)
    started = start(tmp_path, [*small, "--sft_steps=0"], 1, change)
    while not (tmp_path / "ready").exists() and started[0].is_alive():
        time.sleep(0.02)
    for wait in (0.1, 1.2, 0):                                                      # the second one comes with the first: SLURM and torchrun
        os.kill(started[0].pid, signal.SIGTERM)
        time.sleep(wait)
    finish(tmp_path, started, [-signal.SIGTERM])


def test_imports_leave_the_environment_alone():
    """Importing our modules must not choose devices for the user."""
    code = ("import os, sys; sys.path.insert(0, %r); before = dict(os.environ)\n"
            "import torch; state = torch.get_rng_state()\n"
            "import model, tokenizer, data, rewards, gtpo, sample, eval, train\n"
            "assert dict(os.environ) == before and torch.equal(state, torch.get_rng_state())" % ROOT)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"})
