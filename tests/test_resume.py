"""train.py --resume: exact, or refused."""
import os
import shutil
import signal
import subprocess
import sys

import pytest

from conftest import (OUT, ROOT, checkpoint, largest_difference, learned, metrics, refused, rl_rows,
                      run, stopped, tree, write_rows)
from model import GPT

KL = ["--algo=grpo", "--beta=0.1", "--learning_rate=1e-2"]


@pytest.mark.parametrize("flags, stop_after, number", [
    ([], 1, signal.SIGINT), ([], 2, signal.SIGTERM), ([], 4, signal.SIGHUP),
    (KL, 4, signal.SIGINT), ([*KL, "--lora_rank=2", "--compile"], 4, signal.SIGTERM)])
def test_stopped_and_resumed_equals_uninterrupted(small, tmp_path, monkeypatch, flags, stop_after,
                                                  number):
    """Bit for bit: prompts, completions, optimizer, schedule, reference and rows go on, in the
    warm-up, between it and RL, and in RL; P69: with or without compilation."""
    monkeypatch.setattr(GPT, "compile_layers", lambda model: None)
    flags = [*small, "--sft_steps=2", "--steps=3", *flags]
    run(tmp_path, *flags, "--out=whole")
    with stopped(stop_after, number):
        text = run(tmp_path, *flags, "--out=parts", code=128 + number)
    assert f"stopped after step {stop_after - 1}; the same command with --resume" in text
    assert checkpoint(tmp_path / "parts")["step"] == stop_after
    text = run(tmp_path, "--out=parts", "--resume", *flags)
    assert f"resumed at step {stop_after}\n" in text and "before   after" in text
    assert learned(tmp_path / "parts") == learned(tmp_path / "whole")
    ends = [checkpoint(tmp_path / name)["model"] for name in ("parts", "whole")]
    assert largest_difference(*ends) == 0
    assert not any("_orig_mod" in name for name in ends[0])


def test_a_finished_run_that_is_resumed_says_so_and_changes_nothing(done):
    """It used to evaluate again and to write a second row "after"."""
    cwd, flags, _ = done
    before = tree(cwd / OUT)
    assert "is finished: all 5 steps" in run(cwd, *flags, "--resume")
    assert tree(cwd / OUT) == before


def test_a_finished_run_goes_on_with_its_own_settings_and_flags_win(done, tmp_path):
    """The preset of then, or the defaults, silently took the place of what the run began with. 3 of
    10 held-out questions had been trained on: heldout.jsonl was written anew. The row of the last
    evaluation was cut off with what a kill leaves behind."""
    cwd, flags, _ = done
    shutil.copytree(cwd / OUT, tmp_path / "moved")
    (tmp_path / "preset.toml").write_text("out = 'moved'\ngroup_size = 7\nsteps = 99\n")
    (tmp_path / "moved/heldout.jsonl").write_text("as it was")
    text = run(tmp_path, "preset.toml", "--resume", "--steps=4", "--gamma=0.5")
    lines = text.split("resumed at step 5\n")[1].split("\n\n")[0].splitlines()
    assert lines == ["  steps is 4, it was 3", "  gamma is 0.5, it was 0.1"]
    config = (tmp_path / "moved/config.toml").read_text()
    assert "group_size = 4\n" in config and "steps = 4\n" in config and "gamma = 0.5" in config
    assert [row["step"] for row in rl_rows(tmp_path / "moved")] == [2, 3, 4, 5]
    assert sorted(os.listdir(tmp_path)) == ["moved", "preset.toml"]
    assert (tmp_path / "moved/heldout.jsonl").read_text() == "as it was"
    old, new = metrics(cwd / OUT), metrics(tmp_path / "moved")
    assert new[: len(old)] == old and [row["label"] for row in (old[-1], new[-1])] == ["after"] * 2


def test_a_kl_term_that_comes_late_is_refused_where_its_reference_is_lost(small, tmp_path):
    """The policy in the middle of RL was taken for the one before it. A whole model's is kept."""
    flags = [*small, "--sft_steps=1", "--steps=2"]
    for more in ([], ["--lora_rank=2"]):
        with stopped(2):
            run(tmp_path, *flags, *more, f"--out=a{len(more)}", code=143)
    run(tmp_path, "--out=a0", "--resume", "--beta=0.1")
    refused(tmp_path, ["--out=a1", "--resume", "--beta=0.1"], "needs the adapter as it was")


def test_a_new_run_deletes_nothing_of_the_users_own(small, tmp_path):
    """A preset, notes or a model of the user's in the output folder went with the first start."""
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/config.toml").write_text("# my preset\n")
    (tmp_path / "mine/model/notes.txt").write_text("precious")
    for word in ([], ["--resume"]):
        refused(tmp_path, [*small, "--out=mine", *word], "already holds model, config.toml: ")
    assert (tmp_path / "mine/model/notes.txt").read_text() == "precious"
    assert (tmp_path / "mine/config.toml").read_text() == "# my preset\n"


def test_a_run_that_lost_a_file_is_not_started_again(done, tmp_path):
    """Without ckpt.pt --resume began at step 0 and deleted the policy; without config.toml it went
    on with the defaults."""
    cwd, flags, _ = done
    shutil.copytree(cwd / OUT, tmp_path / "run")
    os.rename(tmp_path / "run/ckpt.pt", tmp_path / "ckpt.pt")
    refused(tmp_path, [*flags, "--out=run", "--resume"], "run already holds model, ",
            "it has no ckpt.pt, so nothing can go on with it", "--overwrite")
    os.rename(tmp_path / "ckpt.pt", tmp_path / "run/ckpt.pt")
    os.remove(tmp_path / "run/config.toml")
    refused(tmp_path, [*flags, "--out=run", "--resume", "--steps=9"], "run/config.toml is gone")


def test_a_run_of_an_older_version_hears_which_setting_is_gone(done, tmp_path):
    """Its own config.toml holds every setting of then: the answer was that one does not exist, and
    the nearest name."""
    cwd, flags, _ = done
    shutil.copytree(cwd / OUT, tmp_path / "run")
    with open(tmp_path / "run/config.toml", "a") as f:
        f.write("filter_negative_only = false\n")
    refused(tmp_path, [*flags, "--out=run", "--resume", "--steps=9"],
            "run/config.toml: key 'filter_negative_only' is gone: leave it out")


def test_a_run_without_a_checkpoint_starts_again_with_its_own_settings(small, tmp_path):
    """It took the settings of the second command line, and did not say so."""
    flags = [*small, "--sft_steps=0", "--steps=1", "--gamma=0.3", "--out=a", "--resume"]
    assert "a has no checkpoint: starting at step 0\n" in run(tmp_path, *flags)
    os.remove(tmp_path / "a/ckpt.pt")
    shutil.rmtree(tmp_path / "a/model")
    text = run(tmp_path, "--out=a", "--resume=auto", "--seed=1")
    assert "no checkpoint: starting at step 0\n  seed is 1, it was 0\n" in text
    config = (tmp_path / "a/config.toml").read_text()
    assert "gamma = 0.3\nconflict" in config and 'resume = "no"' in config


def test_other_answers_or_other_weights_below_an_adapter_are_noticed(small, small_folder, tmp_path):
    """Both went on without a word: other rewards, and an adapter over weights it was not made
    for."""
    shutil.copytree(small_folder / "model", tmp_path / "model")
    rows = [{"question": f"{i}+1?", "answer": f"{i + 1}", "solution": "so"} for i in range(15)]
    write_rows(tmp_path / "p.jsonl", rows)
    run(tmp_path, *small, "--sft_steps=0", "--steps=1", "--model=model", "--data=p.jsonl",
        "--lora_rank=2", "--out=a")
    write_rows(tmp_path / "p.jsonl", [row | {"answer": "7"} for row in rows])
    refused(tmp_path, ["--out=a", "--resume", "--steps=2"], "other problems to train on than then",
            "steps is 2, it was 1")
    write_rows(tmp_path / "p.jsonl", rows)
    model = GPT.from_pretrained(tmp_path / "model")
    model.model.norm.weight.data += 1
    model.save_pretrained(tmp_path / "model")
    refused(tmp_path, ["--out=a", "--resume", "--steps=2"], "other weights below the adapter")


def test_a_reader_who_goes_away_does_not_end_the_run(small, tmp_path):
    """`train.py | head -3` ended the run; so did a character that the terminal lacks."""
    process = subprocess.Popen(
        [sys.executable, os.path.join(ROOT, "train.py"), *small, "--sft_steps=0", "--steps=2",
         "--show_every=1"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"})
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert checkpoint(tmp_path / OUT)["step"] == 2 and (tmp_path / OUT / "model").exists()
