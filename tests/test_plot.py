"""plot.py: reading, grouping, smoothing, bands; the picture itself only where matplotlib is there."""
import json
import math
import os
import sys

import numpy as np
import pytest

import plot


def step(number, phase="gtpo", **figures):
    row = dict(step=number, phase=phase, reward=1.0, accuracy=0.5, format=0.5, entropy=0.2, kept=1.0, conflict=0.1, grad_norm=2.0)
    return {**row, **figures}


def write_run(folder, rows, end=""):
    """A run's folder with these rows in metrics.jsonl; returns its path."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return str(folder)


def write_eval(path, problems, n=4):
    """A file of eval.py: problems is a list of (answers of n completions, gold)."""
    rows = [{"model": "m", "k": {"toy": [1]}, "settings": {"data": {"toy": {"n": n, "problems": len(problems)}}}}]
    for i, (answers, gold) in enumerate(problems):
        rows += [dict(data="toy", index=i, sample=j, question="q", gold=gold, completion="", answer=answer, correct=answer == gold, formatted=True,
                      tokens=3, finish="stop") for j, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_series_hold_the_rl_steps_alone(tmp_path):
    """Warm-up and evaluations are rows of the same file, with other fields; null, which train.py writes for nan, is a gap."""
    rows = [dict(step=0, phase="sft", loss=1.0, grad_norm=9.0), {"step": 1, "phase": "eval", "pass@1": 0.25, "label": "before"},
            step(1, reward=3.0), step(2, reward=5.0, grad_norm=None), {"step": 2, "phase": "eval", "pass@1": 0.5, "maj@8": 0.75, "pass@8": None}]
    series, curves = plot.read_run(write_run(tmp_path / "a", rows))
    assert set(series) == {"accuracy", "format", "entropy", "reward", "kept", "conflict", "grad_norm"}
    assert series["reward"].tolist() == [3.0, 5.0]
    assert series["grad_norm"][0] == 2.0 and math.isnan(series["grad_norm"][1])
    assert curves == {"held out": {"pass@1": 0.5, "maj@8": 0.75}}                   # of the last evaluation


def test_curves_come_from_the_eval_file(tmp_path):
    """Hand-worked. Problem 1: 2 of 4 right, pass@2 = 1 - C(2,2)/C(4,2) = 5/6; votes 7 8 8 7: maj@2 is 7 (a tie, seen first), maj@4 too.
    Problem 2: 0 of 4 right."""
    folder = write_run(tmp_path / "a", [step(0), {"step": 0, "phase": "eval", "pass@1": 0.9}])
    path = write_eval(tmp_path / "a" / "eval.jsonl", [(["7", "8", "8", "7"], "7"), (["1", "1", None, "2"], "3")])
    curve = {"pass@1": 0.25, "pass@2": 5 / 12, "pass@4": 0.5, "maj@1": 0.5, "maj@2": 0.5, "maj@4": 0.5}
    assert plot.read_run(folder)[1]["toy"] == pytest.approx(curve)                  # and not from metrics.jsonl
    assert plot.read_run(path)[0] == {} and plot.read_run(path)[1]["toy"] == pytest.approx(curve)


def test_seeds_are_grouped_by_name():
    groups = plot.group_runs(["out/gtpo-lr0.001-s0", "out/gtpo-lr0.001-s1/", "out/grpo_seed12", "out/x/grpo_s3", "out/llama3", "out/gtpo-lr0.001-s0"])
    assert groups == {"gtpo-lr0.001": ["out/gtpo-lr0.001-s0", "out/gtpo-lr0.001-s1"], "grpo": ["out/grpo_seed12"],
                      os.path.join("x", "grpo"): ["out/x/grpo_s3"], "llama3": ["out/llama3"]}
    assert list(plot.group_runs(["out/gtpo"])) == ["gtpo"]


def test_smooth_is_a_centred_mean_without_the_gaps():
    values = np.array([1.0, 2.0, 6.0, math.nan, 2.0])
    assert plot.smooth(values, 3).tolist() == pytest.approx([1.5, 3.0, 4.0, 4.0, 2.0])
    assert plot.smooth(values, 1)[[0, 2, 4]].tolist() == [1.0, 6.0, 2.0]
    assert math.isnan(plot.smooth(values, 1)[3])
    assert plot.smooth(np.array([1.0, 3.0]), 9).tolist() == [2.0, 2.0]              # a window wider than the run


def test_band_of_seeds_ends_with_the_shortest():
    mean, low, high = plot.band([np.array([1.0, 2.0, 3.0]), np.array([3.0, 8.0])])
    assert (mean.tolist(), low.tolist(), high.tolist()) == ([2.0, 5.0], [1.0, 2.0], [3.0, 8.0])


def test_a_cut_off_last_line_is_left_out_and_said(tmp_path, capsys):
    folder = write_run(tmp_path / "a", [step(0), step(1)], end='{"step": 2, "pha')
    assert len(plot.read_metrics(folder)) == 2
    assert "last line is cut off" in capsys.readouterr().err


@pytest.mark.parametrize("text, says", [
    (None, "no such run"), ("", "is empty"), ('{"step": 0', "is empty"), ('{"step": 0\n', "metrics.jsonl:1: not a row"), ("[1]\n", ":1: not a row"),
    ('{"step": 0, "phase": "sft"}\n{"a": 1}\n', "metrics.jsonl:2: not a row"), ('{"step": 0, "phase": "sft"}\n', "only SFT steps so far"),
])
def test_bad_runs_get_a_message(tmp_path, capsys, text, says):
    folder = tmp_path / "a"
    if text is not None:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(text)
    assert plot.main([str(folder)]) == 2
    assert says in capsys.readouterr().err


def test_a_picture_that_is_no_png_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        plot.main([write_run(tmp_path / "a", [step(0)]), "--out=a.pdf"])
    assert stop.value.code == 2 and "should end in .png" in capsys.readouterr().err


def test_bad_eval_files_get_a_message(tmp_path, capsys):
    assert plot.main([str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "e.jsonl").write_text("")
    assert plot.main([str(tmp_path / "e.jsonl")]) == 2
    assert "no completions" in capsys.readouterr().err


def test_without_matplotlib_it_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)                            # import matplotlib raises ImportError
    assert plot.main([write_run(tmp_path / "a", [step(0)]), f"--out={tmp_path}/a.png"]) == 2
    said = capsys.readouterr().err
    assert "pip install matplotlib" in said and said.count("\n") == 1
    assert not (tmp_path / "a.png").exists()


def test_the_picture_is_small(tmp_path):
    """A full picture, with gaps, bands and curves, is a PNG under 200 KB. Skipped without matplotlib, which is optional."""
    pytest.importorskip("matplotlib")
    rng, runs = np.random.default_rng(0), []
    for name in ("gtpo-s0", "gtpo-s1", "grpo-s0", "grpo-s1", "sft"):
        rows = [step(i, **{k: None if i == 5 else float(rng.random()) for k in plot.PANELS}) for i in range(0 if name == "sft" else 150)]
        runs.append(write_run(tmp_path / name, rows + [{"step": 150, "phase": "eval", "pass@1": 0.5, "pass@8": 0.75, "maj@8": 0.6}]))
    out = tmp_path / "new" / "a.png"
    assert plot.main([*runs, f"--out={out}"]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG" and 10_000 < out.stat().st_size < 200_000
