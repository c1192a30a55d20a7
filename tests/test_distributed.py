"""train.py on several processes (gloo, CPU): they learn what one learns, continue exactly, and end together when one fails.

Most processes are forks of this one with the variables that torchrun sets: importing torch again for each would cost seconds.
"""
import os
import random
import signal
import subprocess
import sys
import zlib

import pytest
import torch

import train
from sample import Samples
from test_train import ROOT, finish, learned, metrics, small, start, weights  # noqa: F401 (small is a fixture)

HALF_FILTERED, UNEQUAL = "one half of the prompts filtered", "unequal lengths"


def largest_difference(a, b):
    return max((a[k] - b[k]).abs().max().item() for k in b)


def given_rollouts(kind, processes):
    """A change for start(): every prompt has given completions of 1 to 12 tokens and given rewards, so that only the update is compared.
    HALF_FILTERED: the entropy filter drops all completions of the first two prompts of each step: on 2 processes all that rank 0 has."""
    def change(rank):
        def sample(model, prompts, G, L, *_, **__):
            out = Samples(torch.zeros(len(prompts), G, L, dtype=torch.long), torch.zeros(len(prompts), G, L, dtype=torch.bool),
                          torch.zeros(len(prompts), G, L), torch.zeros(len(prompts), G, L), torch.ones(len(prompts), G, dtype=torch.bool))
            for p, prompt in enumerate(prompts):
                rng, place = random.Random(repr(prompt)), rank * len(prompts) + p   # place in the global batch
                for g in range(G):
                    n = rng.randint(1, L)
                    out.ids[p, g, :n] = torch.tensor([rng.randrange(97, 104) for _ in range(n)])
                    out.mask[p, g, :n] = True
                    out.entropy[p, g, :n] = 0.9 if kind == HALF_FILTERED and place < 2 else 0.2
            return out
        train.sample, train.reward_parts = sample, lambda text, gold: {"format": float(zlib.crc32(text.encode()) % 11), "accuracy": 0.0}
        real, gradients = torch.nn.utils.clip_grad_norm_, []

        def clip_grad_norm_(params, *arguments):                                    # sees the sum over all processes
            gradients.append(torch.cat([p.grad.flatten() for p in params]))
            torch.save(gradients, "gradients.pt" if rank == 0 else os.devnull)
            return real(params, *arguments)
        torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    return change


@pytest.mark.parametrize("kind, flags", [
    (UNEQUAL, ["--algo=gtpo"]), (HALF_FILTERED, ["--algo=gtpo"]), (UNEQUAL, ["--algo=grpo", "--beta=0.1", "--updates_per_rollout=2"])])
def test_update_is_the_same_for_any_number_of_processes_and_micro_batches(small, tmp_path, kind, flags):
    """One SFT and two RL steps with the rollouts given; all parameters, and the first gradient relative to its largest number, to 1e-6 in float32.
    Adam divides a gradient by its own size, so rounding shows most where it is almost 0, in proportion to the learning rate: 1e-4 here. Later
    gradients, of the fifth update at most, are taken at parameters that differ by rounding already: 2e-6."""
    runs = {}
    for processes in (1, 2, 4):
        for micro_tokens in (10**6, 60):
            name = f"{processes}-{micro_tokens}"
            finish(tmp_path, start(tmp_path, [*small, *flags, f"--name={name}", f"--micro_tokens={micro_tokens}", "--sft_steps=1", "--steps=2",
                                              "--sft_learning_rate=1e-4", "--learning_rate=1e-4"], processes, given_rollouts(kind, processes)))
            runs[processes, micro_tokens] = (weights(tmp_path / f"out/{name}/model"), torch.load(tmp_path / "gradients.pt"),
                                             [row for row in metrics(tmp_path / f"out/{name}") if "loss" in row])
    one, gradients, rows = runs[1, 10**6]
    if kind == HALF_FILTERED:
        assert [row["kept"] for row in rows if row["phase"] == "gtpo"] == [0.5, 0.5]
    assert largest_difference(weights(small[0].removeprefix("--model=")), one) > 1e-4      # something was learned
    print(f"\n{kind}, {' '.join(flags)}\nprocesses  micro-batches  largest difference of any parameter  of any gradient / the largest")
    for (processes, micro_tokens), (other, other_gradients, other_rows) in runs.items():
        difference = largest_difference(other, one)
        relative = [((g - h).abs().max() / h.abs().max()).item() for g, h in zip(other_gradients, gradients, strict=True)]
        print(f"{processes:9}  {'one' if micro_tokens > 100 else 'several':>13}  {difference:35.1e}  {max(relative):29.1e}")
        assert difference < 1e-6 and relative[0] < 1e-6 and max(relative) < 2e-6
        for row, expected in zip(other_rows, rows, strict=True):
            for key in ("loss", "grad_norm", "tokens", "lr"):
                assert row[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key


def test_sampling_rewards_and_evaluation_do_not_depend_on_the_number_of_processes(small, tmp_path):
    """The same prompts, each with the same completions, and the same figures, from 1, 2 and 4 processes."""
    for processes in (1, 2, 4):
        finish(tmp_path, start(tmp_path, [*small, f"--name=p{processes}", "--sft_steps=2", "--steps=2", "--eval_every=1"], processes))
    one = learned(tmp_path / "out/p1")
    for name in ("p2", "p4"):
        assert largest_difference(weights(tmp_path / f"out/{name}/model"), weights(tmp_path / "out/p1/model")) < 1e-4
        for row, expected in zip(learned(tmp_path / "out" / name), one, strict=True):
            for key, value in expected.items():
                assert row[key] == (pytest.approx(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value), key


def stop_at(count, on_rank=0):
    """A change for start(): SIGTERM comes to one process within the update of that number."""
    def change(rank):
        real, calls = train.update, []

        def update(*arguments):
            calls.append(1)
            if len(calls) == count and rank == on_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*arguments)
        train.update = update
    return change


def test_torchrun_resumes_two_processes_exactly(small, tmp_path):
    """20 steps on two processes; 10 steps, SIGTERM to one of them, and 10 more with the real torchrun: the same bits."""
    flags = [*small, "--sft_steps=7", "--steps=13", "--save_every=100"]
    finish(tmp_path, start(tmp_path, [*flags, "--name=whole"], 2))
    finish(tmp_path, start(tmp_path, [*flags, "--name=parts"], 2, stop_at(10, on_rank=1)), [143, 143])
    assert torch.load(tmp_path / "out/parts/ckpt.pt", weights_only=True)["step"] == 10
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", os.path.join(ROOT, "train.py"),
                           *flags, "--name=parts", "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "resumed at step 10 of 20" in done.stdout, done.stderr[-3000:]
    assert learned(tmp_path / "out/parts") == learned(tmp_path / "out/whole")
    assert largest_difference(weights(tmp_path / "out/parts/model"), weights(tmp_path / "out/whole/model")) == 0


def test_another_number_of_processes_continues(small, tmp_path):
    """Weights and optimizer go on, and so does the randomness, which the screen says."""
    flags = [*small, "--sft_steps=2", "--steps=2", "--name=run"]
    finish(tmp_path, start(tmp_path, flags, 1, stop_at(3)), [143])
    logs = finish(tmp_path, start(tmp_path, [*flags, "--resume"], 2))
    assert "resumed at step 3 of 4, with 2 process(es) instead of 1" in logs and "stay the same" in logs
    assert [row["step"] for row in metrics(tmp_path / "out/run") if "loss" in row] == [0, 1, 2, 3]


def test_a_mistake_that_one_process_sees_ends_all_with_one_message(small, tmp_path):
    """It used to leave the others waiting for timeout_minutes."""
    def change(rank):
        def broken(*_):
            raise ValueError("problems.jsonl:3: broken on this node")
        if rank == 1:
            train.load_problems = broken
    finish(tmp_path, start(tmp_path, [*small, "--sft_steps=1", "--steps=1"], 2, change), [2, 2])
    assert (tmp_path / "0.log").read_text() == "" and (tmp_path / "1.log").read_text() == "error: problems.jsonl:3: broken on this node\n"
    assert sorted(os.listdir(tmp_path / "out/arithmetic")) == ["lock"]


def test_nodes_that_do_not_share_the_output_folder_are_refused(small, tmp_path):
    """One would resume at step 3 and the other start at 0: their collectives would not match."""
    flags = [*small, "--sft_steps=2", "--steps=2", "--resume=auto"]
    finish(tmp_path, start(tmp_path, flags, 1, stop_at(3)), [143])
    (tmp_path / "other").mkdir()
    logs = finish(tmp_path, start(tmp_path, flags, 2, lambda rank: os.chdir("other" if rank else ".")), [2, 2])
    assert "processes 0 and 1 differ in their first step (3 and 0)" in logs and "share" in logs and "Traceback" not in logs
    assert torch.load(tmp_path / "out/arithmetic/ckpt.pt", weights_only=True)["step"] == 3


def test_a_process_that_fails_in_the_middle_ends_the_others(small, tmp_path):
    def change(rank):
        def broken(*_, **__):
            raise ValueError("sample: only here")
        if rank == 1:
            train.sample = broken
    finish(tmp_path, start(tmp_path, [*small, "--sft_steps=1", "--steps=1"], 2, change), [2, 2])
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert "error: sample: only here" in logs[1] and "another process ended" in logs[0] and "Traceback" not in "".join(logs)


def nan_on_rank_1(steps):
    """A change for start(): on rank 1 the loss of these RL updates is not a number, its gradient is."""
    def change(rank):
        real, calls = train.surrogate_loss, []

        def surrogate_loss(*arguments):
            calls.append(1)
            return real(*arguments) + (torch.tensor(float("nan")) if rank == 1 and len(calls) in steps else 0)
        train.surrogate_loss = surrogate_loss
    return change


def test_a_loss_that_is_not_finite_on_one_process_skips_the_update_on_all(small, tmp_path):
    flags = [*small, "--sft_steps=0", "--steps=3", "--updates_per_rollout=1"]
    finish(tmp_path, start(tmp_path, [*flags, "--name=bad"], 2, nan_on_rank_1({2})))
    rows = [row for row in metrics(tmp_path / "out/bad") if "loss" in row]
    assert [(row["skipped_updates"], row["grad_norm"] is None, row["loss"] is None) for row in rows] == [(0, False, False), (1, True, True),
                                                                                                        (1, False, False)]
    logs = finish(tmp_path, start(tmp_path, [*flags, "--name=worse", "--max_bad_updates=2", "--save_every=1"], 2, nan_on_rank_1({2, 3})), [2, 2])
    assert logs.count("error: ") == 1 and "step 2: loss or gradient was not finite 2 times in a row" in logs
    assert "first prompt of the step is '" in logs and "checkpoint is out/worse/ckpt.pt" in logs


def test_zero_divides_the_optimizer_and_changes_nothing(small, tmp_path):
    """Two processes with --zero learn bit for bit what they learn without, in one go and resumed after a stop."""
    flags = [*small, "--sft_steps=3", "--steps=3", "--save_every=2"]
    for name, more in (("plain", []), ("zero", ["--zero"])):
        finish(tmp_path, start(tmp_path, [*flags, f"--name={name}", *more], 2))
    finish(tmp_path, start(tmp_path, [*flags, "--name=halves", "--zero"], 2, stop_at(4)), [143, 143])
    finish(tmp_path, start(tmp_path, [*flags, "--name=halves", "--zero", "--resume"], 2))
    for other in ("zero", "halves"):
        a, b = weights(tmp_path / "out/plain/model"), weights(tmp_path / f"out/{other}/model")
        assert all(torch.equal(a[k], b[k]) for k in a), other
        assert learned(tmp_path / "out/plain") == learned(tmp_path / f"out/{other}"), other
    states = [torch.load(tmp_path / f"out/{name}/ckpt.pt", weights_only=True)["optimizer"]["state"] for name in ("plain", "zero")]
    assert len(states[0]) == len(states[1])                                         # the checkpoint holds the state of all processes
