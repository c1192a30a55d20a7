"""train.py on several processes (gloo, CPU): they learn what one learns, go on exactly, and end
together when one fails."""
import os
import signal

import pytest
import torch

import train
from conftest import (OUT, assert_close_rows, checkpoint, finish, largest_difference, learned,
                      metrics, rl_rows, start, stop_at, weights)
from lib import training
from sample import Samples

SMALLEST = ["--sft_steps=1", "--steps=1"]


# ---- the same for any number of processes --------------------------------------------------------

def same_rollouts(half_filtered):
    """A change for start(): each prompt is sampled alone, so that rounding does not depend on what
    else is in the batch, and only the update is compared; the sum of the gradients is kept.
    half_filtered: the filter drops the first two prompts of each step, all that rank 0 of 2 has."""
    def change(rank):
        real, clip, gradients = train.sample, torch.nn.utils.clip_grad_norm_, []

        def sample(model, prompts, *sizes, noise, **more):
            each = [vars(real(model, [prompt], *sizes, noise=numbers[None], **more)).values()
                    for prompt, numbers in zip(prompts, noise)]
            samples = Samples(*map(torch.cat, zip(*each)))
            if half_filtered:
                samples.entropy[:] = 0.1
                samples.entropy[: max(0, 2 - rank * len(prompts))] = 0.9
            return samples

        def clip_grad_norm_(params, *arguments):
            gradients.append(torch.cat([p.grad.flatten() for p in params]))
            torch.save(gradients, "gradients.pt" if rank == 0 else os.devnull)
            return clip(params, *arguments)
        train.sample, torch.nn.utils.clip_grad_norm_ = sample, clip_grad_norm_
    return change


@pytest.mark.parametrize("flags", [["--algo=gtpo"], ["--algo=grpo", "--beta=0.1", "--lora_rank=2",
                                                     "--updates_per_rollout=2"]])
def test_the_update_is_the_same_for_any_processes_and_micro_batches(small, tmp_path, flags):
    """One SFT and two RL steps: all parameters, and the first gradients relative to their largest
    number, to 1e-6. Adam divides a gradient by its own size, so that rounding shows most where it
    is almost 0, in proportion to the learning rate: 3e-5 here. Later gradients are taken at
    parameters that differ by rounding. P62: with GTPO one process has nothing to learn from."""
    gtpo, runs = flags == ["--algo=gtpo"], {}
    for processes, micro_tokens in ((1, 10**6), (1, 60), (2, 60), (4, 10**6)):
        out = f"{processes}-{micro_tokens}"
        finish(tmp_path, start(tmp_path, [
            *small, *flags, f"--out={out}", f"--micro_tokens={micro_tokens}", "--sft_steps=1",
            "--steps=2", "--eval_problems=0", "--sft_learning_rate=3e-5", "--learning_rate=3e-5"],
            processes, same_rollouts(gtpo)))
        runs[out] = (checkpoint(tmp_path / out)["model"], torch.load(tmp_path / "gradients.pt"),
                     [{key: row[key] for key in ("loss", "grad_norm", "lr", "tokens")}
                      for row in metrics(tmp_path / out)])
    one, gradients, rows = runs["1-1000000"]
    assert min(g.abs().max() for g in gradients) > 1e-3
    if gtpo:
        assert [row["kept"] for row in rl_rows(tmp_path / out)] == [0.5, 0.5]
    for other, other_gradients, other_rows in runs.values():
        relative = [((g - h).abs().max() / h.abs().max()).item()
                    for g, h in zip(other_gradients, gradients, strict=True)]
        assert largest_difference(other, one) < 1e-6
        assert max(relative[:2]) < 1e-6 and max(relative) < 1e-5
        assert_close_rows(other_rows, rows, rel=1e-5, abs=1e-6)


FLAGS = ["--sft_steps=3", "--steps=3", "--save_every=100", "--eval_every=2"]


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """{number of processes: the folder of an uninterrupted run on so many}"""
    folders = {}
    for processes in (1, 2, 4):
        cwd = tmp_path_factory.mktemp(f"whole{processes}")
        finish(cwd, start(cwd, [*small, *FLAGS], processes))
        folders[processes] = cwd / OUT
    return folders


@pytest.mark.parametrize("processes", [2, 4])
def test_sampling_rewards_and_evaluation_do_not_depend_on_the_number_of_processes(whole, processes):
    """P63: the same prompts, each with the same completions, and the same figures. P66: a process
    that enters a collective alone would wait for ever, or find the others gone."""
    new, old = whole[processes], whole[1]
    assert largest_difference(weights(new / "model"), weights(old / "model")) < 1e-4
    assert_close_rows(learned(new), learned(old))


def stop_in_the_last_evaluation(rank):
    real, calls = training.evaluate, []

    def evaluate(*arguments, **more):
        calls.append(1)
        if len(calls) == 3 and rank == 1:  # behind those before and during RL
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **more)
    training.evaluate = evaluate


@pytest.mark.parametrize("processes, change, step", [
    (2, stop_at(4, on_rank=1), 4), (4, stop_at(4, on_rank=1), 4),
    (2, stop_in_the_last_evaluation, 6)])
def test_several_processes_resume_exactly(small, whole, tmp_path, processes, change, step):
    """Stopped by a signal to one of them, the same bits. DistributedDataParallel sorts its buckets
    anew after its first backward, which on three processes and more is another order of additions.
    In the last evaluation a signal was told and did nothing."""
    flags = [*small, *FLAGS]
    logs = finish(tmp_path, start(tmp_path, flags, processes, change), [143] * processes)
    assert f"stopped after step {step - 1}; the same command" in logs
    assert checkpoint(tmp_path / OUT)["step"] == step
    assert {row.get("label") for row in metrics(tmp_path / OUT)}.isdisjoint({"after"})
    logs = finish(tmp_path, start(tmp_path, [*flags, "--resume"], processes))
    assert f"resumed at step {step}" in logs
    assert learned(tmp_path / OUT) == learned(whole[processes])
    ends = [checkpoint(folder)["model"] for folder in (tmp_path / OUT, whole[processes])]
    assert largest_difference(*ends) == 0


def test_another_number_of_processes_goes_on(small, whole, tmp_path):
    """Weights and optimizer, and so does the randomness."""
    finish(tmp_path, start(tmp_path, [*small, *FLAGS], 1, stop_at(4)), [143])
    finish(tmp_path, start(tmp_path, [*small, *FLAGS, "--resume"], 2))
    assert_close_rows(learned(tmp_path / OUT), learned(whole[1]))


# ---- one fails, all end --------------------------------------------------------------------------

def broken_problems(rank):
    def broken(*_):
        raise ValueError("problems.jsonl:3: broken on this node")
    if rank == 1:
        training.read_problems = broken


def other_gamma(rank):
    train.ALGO_DEFAULTS["gtpo"]["gamma"] = 0.1 + rank


@pytest.mark.parametrize("change, says", [
    (broken_problems, "problems.jsonl:3: broken on this node"),
    (other_gamma, "processes 0 and 1 differ in their gamma (0.1 and 1.1): every node needs the")])
def test_a_mistake_that_one_process_sees_ends_all_with_one_message(small, tmp_path, change, says):
    """It used to leave the others waiting; all settings of both stood in the message."""
    logs = finish(tmp_path, start(tmp_path, [*small, *SMALLEST], 2, change), [2, 2]).strip()
    assert logs.startswith(f"error: {says}") and "\n" not in logs
    assert os.listdir(tmp_path / OUT) == ["lock"]


def test_nodes_that_do_not_share_the_output_folder_are_refused(small, tmp_path):
    """One would resume at step 3 and the other start at 0: their collectives would not match."""
    flags = [*small, "--sft_steps=2", "--steps=2", "--resume"]
    finish(tmp_path, start(tmp_path, flags, 1, stop_at(3)), [143])
    (tmp_path / "other").mkdir()
    elsewhere = start(tmp_path, flags, 2, lambda rank: os.chdir("other" if rank else "."))
    logs = finish(tmp_path, elsewhere, [2, 2])
    assert "processes 0 and 1 differ in their first step (3 and 0)" in logs and "share" in logs
    assert logs.count("error: ") == 1 and "Traceback" not in logs
    assert checkpoint(tmp_path / OUT)["step"] == 3


def test_a_process_that_fails_in_the_middle_ends_the_others(small, tmp_path):
    def change(rank):
        def broken(*_, **__):
            raise ValueError("sample: only here")
        if rank == 1:
            train.sample = broken
    finish(tmp_path, start(tmp_path, [*small, *SMALLEST], 2, change), [2, 2])
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert "error: sample: only here" in logs[1] and "another process ended" in logs[0]
    assert "Traceback" not in "".join(logs)
    assert checkpoint(tmp_path / OUT)["step"] == 1  # the end of the warm-up is kept


def test_a_loss_that_is_not_finite_on_one_process_skips_the_update_on_all(small, tmp_path):
    """Its gradient may be finite, so the processes would go on with different weights. Ten in a
    row end the run."""
    def change(rank):
        real, calls = train.policy_loss, []

        def policy_loss(*arguments, **more):
            calls.append(1)
            bad = rank == 1 and (len(calls) == 2 or len(calls) > 3)
            return real(*arguments, **more) + (float("nan") if bad else 0)
        train.policy_loss = policy_loss
    flags = [*small, "--sft_steps=0", "--steps=20", "--save_every=1", "--eval_problems=0"]
    logs = finish(tmp_path, start(tmp_path, flags, 2, change), [2, 2])
    assert logs.count("error: ") == 1 and f"what was good stands in {OUT}/ckpt.pt" in logs
    assert "step 12: loss or gradient was not finite 10 times in a row" in logs
    rows = metrics(tmp_path / OUT)
    assert [row["skipped_updates"] for row in rows] == [0, 1, 1, *range(2, 12)]
    assert [row["loss"] is None for row in rows] == [False, True, False] + [True] * 10
    assert rows[1]["grad_norm"] is None and rows[2]["grad_norm"] > 0
