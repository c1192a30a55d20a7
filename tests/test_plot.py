"""tools/plot.py: reading, grouping, smoothing, bands; the picture itself where matplotlib is."""
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tools import plot


def step(number, phase="gtpo", **figures):
    return dict(step=number, phase=phase, reward=1.0, accuracy=0.5, format=0.5, entropy=0.2,
                kept=1.0, conflict=0.1, grad_norm=2.0) | figures


def write_run(folder, rows, end=""):
    """A run's folder with these rows in metrics.jsonl; returns its path."""
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + end)
    return str(folder)


def test_series_hold_the_rl_steps_alone(tmp_path):
    """Warm-up and evaluations are rows of the same file, with other fields; null, which train.py
    writes for nan, is a gap; a last line that a kill has cut off is left out."""
    rows = [dict(step=0, phase="sft", loss=1.0, grad_norm=9.0),
            {"step": 1, "phase": "eval", "pass@1": 0.25, "label": "before"},
            step(1, reward=3.0), step(2, reward=5.0, grad_norm=None),
            {"step": 2, "phase": "eval", "pass@1": 0.5, "maj@8": 0.75, "pass@8": None}]
    series, curves = plot.read_run(write_run(tmp_path / "a", rows, end='{"step": 3, "pha'))
    assert set(series) == set(plot.PANELS) and series["reward"].tolist() == [3.0, 5.0]
    assert series["grad_norm"][0] == 2.0 and math.isnan(series["grad_norm"][1])
    assert curves == {"held out": {"pass@1": 0.5, "maj@8": 0.75}}       # the last evaluation


def test_curves_come_from_the_eval_file(tmp_path):
    """By hand. Problem 1: 2 of 4 right, pass@2 = 1 - C(2,2)/C(4,2) = 5/6; votes 7 8 8 7: maj@2 is
    7 (a tie, seen first), maj@4 too. Problem 2: 0 of 4 right."""
    folder = write_run(tmp_path / "a", [step(0), {"step": 0, "phase": "eval", "pass@1": 0.9}])
    data = {"toy": {"n": 4, "problems": 2}}
    rows = [{"shape": [], "settings": {"data": data, "max_new_tokens": 9}}]
    problems = (["7", "8", "8", "7"], "7"), (["1", "1", None, "2"], "3")
    for i, (answers, gold) in enumerate(problems):
        rows += [dict(data="toy", index=i, sample=j, gold=gold, completion="", answer=answer,
                      correct=answer == gold, formatted=True, tokens=3, finish="stop", level=None,
                      subject=None)
                 for j, answer in enumerate(answers)]
    path = tmp_path / "a" / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = {"pass@1": 0.25, "pass@2": 5 / 12, "pass@4": 0.5,
             "maj@1": 0.5, "maj@2": 0.5, "maj@4": 0.5}
    assert plot.read_run(folder)[1]["toy"] == pytest.approx(curve)      # not from metrics.jsonl
    series, curves = plot.read_run(str(path))
    assert series == {} and curves["toy"] == pytest.approx(curve)


def test_seeds_are_grouped_by_name():
    runs = ["out/gtpo-lr0.001-s0", "out/gtpo-lr0.001-s1/", "out/x/grpo_s3.jsonl", "out/llama3"]
    assert plot.group_runs(runs) == {"out/gtpo-lr0.001": runs[:2], "out/x/grpo": runs[2:3],
                                     "out/llama3": runs[3:]}


def test_smooth_is_a_centred_mean_without_the_gaps():
    values = np.array([1.0, 2.0, 6.0, math.nan, 2.0])
    assert plot.smooth(values, 3).tolist() == pytest.approx([1.5, 3.0, 4.0, 4.0, 2.0])
    assert math.isnan(plot.smooth(values, 1)[3])
    assert plot.smooth(np.array([1.0, 3.0]), 9).tolist() == [2.0, 2.0]  # wider than the run


def test_a_line_ends_with_the_shortest_seed():
    drawn = []
    axis = SimpleNamespace(
        plot=lambda x, y, **_: [drawn.append((list(x), y.tolist()))
                                or SimpleNamespace(get_color=lambda: "C0")],
        fill_between=lambda x, low, high, **_: drawn.append((low.tolist(), high.tolist())))
    plot.line(axis, range(1, 9), [np.array([1.0, 2.0, 3.0]), np.array([3.0, 8.0])])
    assert drawn == [([1, 2], [2.0, 5.0]), ([1.0, 2.0], [3.0, 8.0])]


@pytest.mark.parametrize("text, says", [
    (None, "no such run"), ("", "no RL step"), ('{"step": 0\n', "metrics.jsonl:1: not a JSON"),
    ('{"step": 0, "phase": "sft"}\n{"a": 1}\n', "metrics.jsonl:2: not .* with step, phase"),
    *(('{"step": 0, "phase": "sft"}\n{"step": 1, "phase": "gtpo", "reward": %s}\n' % value,
       "metrics.jsonl:2: reward is .*, not a number; mend or remove the line")
      for value in ('"high"', "[1]", "{}")),
    ('{"step": 0, "phase": "eval", "pass@1": "x"}\n', "metrics.jsonl:1: pass@1 is 'x', not a")])
def test_bad_runs_get_a_message(tmp_path, text, says):
    folder = tmp_path / "a"
    if text is not None:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=says):
        plot.main([str(folder)])


def test_without_matplotlib_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)        # importing it raises ImportError
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plot.main([write_run(tmp_path / "a", [step(0)])])


def test_the_picture(tmp_path):
    """With gaps, bands and curves. Skipped without matplotlib, which is optional."""
    pytest.importorskip("matplotlib")
    rng, runs = np.random.default_rng(0), []
    for name in ("gtpo-s0", "gtpo-s1", "sft"):
        rows = [step(i, **{k: None if i == 5 else float(rng.random()) for k in plot.PANELS})
                for i in range(0 if name == "sft" else 50)]
        evaluation = {"step": 150, "phase": "eval", "pass@1": 0.5, "pass@8": 0.75, "maj@8": 0.6}
        runs.append(write_run(tmp_path / name, [*rows, evaluation]))
    out = tmp_path / "new" / "a.png"
    plot.main([*runs, f"--out={out}"])
    assert out.read_bytes()[:4] == b"\x89PNG" and out.stat().st_size > 10_000
