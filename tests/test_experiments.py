"""experiments/compare.py (with stand-ins for train.py and eval.py, which take no time) and experiments/report.py."""
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "experiments"))
import compare
import report
import eval as evaluation
import train
from data import build_prompt, demonstration, load_problems

STAND_IN = r"""
import json, os, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
with open(os.environ["CALLS"], "a") as f:
    f.write(json.dumps([os.path.basename(sys.argv[0]), flags.get("name", flags.get("out"))]) + "\n")
if os.environ.get("SLOW", "none") in flags.get("name", ""):
    time.sleep(60)
if os.environ.get("BROKEN", "none") in flags.get("name", ""):
    sys.exit("error: no luck")
if sys.argv[0].endswith("train.py"):
    folder = os.path.join(flags["out_dir"], flags["name"])
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, "ckpt.pt"), "w").close()
    with open(os.path.join(folder, "metrics.jsonl"), "w") as f:
        for i in range(8):
            f.write(json.dumps(dict(step=i, phase=flags["algo"], entropy=[0.1, 0.9, 0.2, 0.2, 0.2, 0.3, 0.4, 0.4][i], format=i / 10,
                                    kept=1 - (i == 1) / 2, conflict=i / 100, seconds=0.5)) + "\n")
        f.write(json.dumps(dict(step=7, phase="eval")) + "\n")
else:
    with open(flags["out"], "w") as f:
        f.write(json.dumps({"model": "m", "k": {"arithmetic": [1]}, "settings": {"data": {"arithmetic": {"n": 2, "problems": 2}}}}) + "\n")
        for i in range(2):
            for j in range(2):
                f.write(json.dumps(dict(data="arithmetic", index=i, sample=j, gold="7", completion="", answer="7" if i else None, correct=i == 1,
                                        formatted=j == 0, tokens=3, finish="stop", question="q")) + "\n")
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """The flags of a small grid in tmp_path, run by the stand-ins: 2 seeds x 1 rate x 2 algorithms, and 2 warm-ups."""
    for name in ("train.py", "eval.py"):
        (tmp_path / name).write_text(STAND_IN)
    monkeypatch.setattr(compare, "ROOT", str(tmp_path))
    monkeypatch.setattr(compare, "format_logp", lambda folder, problems: -0.25)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return ["--seeds=2", "--learning_rates=0.001", "--algorithms=grpo,gtpo", "--jobs=2", f"--out_dir={tmp_path}/runs",
            f"--results={tmp_path}/r.jsonl"]


def calls(tmp_path):
    """The names of the runs that were trained since the last look."""
    text = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    (tmp_path / "calls").write_text("")
    return [name for program, name in map(json.loads, text.splitlines()) if program == "train.py"]


# ---- compare.py -------------------------------------------------------------------------------------------------------------


def test_the_grid_is_done_once(tmp_path, arguments):
    """Warm-ups come first; a second call repeats nothing; one more seed, and only that is done."""
    assert compare.main(arguments) == 0
    assert set(calls(tmp_path)[:2]) == {"sft-s0", "sft-s1"}
    rows = [json.loads(line) for line in open(tmp_path / "r.jsonl")]
    assert sorted(map(str, map(compare.key, rows))) == sorted(str((n, 0.001, s)) for n in ("grpo", "gtpo") for s in (0, 1)) + [
        "('sft', None, 0)", "('sft', None, 1)"]
    assert not (tmp_path / "runs" / "gtpo-lr0.001-s1" / "ckpt.pt").exists()          # of a finished run
    assert compare.main(arguments) == 0 and calls(tmp_path) == []
    assert compare.main(arguments + ["--seeds=3"]) == 0
    assert sorted(calls(tmp_path)) == ["grpo-lr0.001-s2", "gtpo-lr0.001-s2", "sft-s2"]


def test_figures_of_a_run(tmp_path, arguments):
    """Hand-worked from what the stand-ins write. Held out: problem 0 has no answer, problem 1 is right twice; one completion of two is in
    the right format. Steps: entropies .1 .9 .2 .2 .2 .3 .4 .4, format 0 .1 .. .7, conflict 0 .01 .. .07, half of step 1 filtered."""
    assert compare.main(arguments) == 0
    row = next(r for r in map(json.loads, open(tmp_path / "r.jsonl")) if r["algorithm"] == "gtpo")
    expected = {"accuracy": 0.25, "format": 0.5, "pass@1": 0.5, "pass@2": 0.5, "maj@1": 0.5, "maj@2": 0.5, "format_logp": -0.25,
                "entropy_end": 0.3, "entropy_worst": 0.9, "format_worst": 0.2, "protected": 0.035, "filtered": 0.0625, "filtered_worst": 0.5,
                "seconds": 4.0}
    assert {k: row[k] for k in expected} == pytest.approx(expected)
    assert row["settings"]["steps"] == 60


def test_a_torn_line_is_done_again(tmp_path, arguments):
    assert compare.main(arguments) == 0
    calls(tmp_path)
    whole = (tmp_path / "r.jsonl").read_text()
    (tmp_path / "r.jsonl").write_text(whole[:-20])
    lost = json.loads(whole.splitlines()[-1])
    assert compare.main(arguments) == 0
    assert calls(tmp_path) == [compare.run_name(*compare.key(lost))]
    assert len([json.loads(line) for line in open(tmp_path / "r.jsonl")]) == 6


def test_results_of_other_settings_are_refused(tmp_path, arguments, capsys):
    assert compare.main(arguments) == 0
    assert compare.main(arguments + ["--steps=70"]) == 2
    assert "r.jsonl:1: has other settings: steps is 60 there, 70 now" in capsys.readouterr().err
    (tmp_path / "r.jsonl").write_text('{"a": 1}\n')
    assert compare.main(arguments) == 2 and "r.jsonl:1: not a line of results" in capsys.readouterr().err


def test_a_failed_run_is_named_and_tried_again(tmp_path, arguments, capsys, monkeypatch):
    monkeypatch.setenv("BROKEN", "grpo-lr0.001-s1")
    assert compare.main(arguments) == 1
    said = capsys.readouterr().err
    assert "failed: grpo-lr0.001-s1: exit code 1" in said and "no luck" in said
    calls(tmp_path)
    monkeypatch.delenv("BROKEN")
    assert compare.main(arguments) == 0 and calls(tmp_path) == ["grpo-lr0.001-s1"]


def test_a_stopped_comparison_ends_its_runs_and_goes_on(tmp_path, arguments, monkeypatch):
    """SIGTERM: the run under way is ended, not left behind to fight with the next call over its folder."""
    program = ("import sys; sys.path.insert(0, sys.argv[1]); import compare; compare.ROOT = sys.argv[2]; compare.format_logp = lambda *_: -1.0; "
               "sys.exit(compare.main(sys.argv[3:]))")
    process = subprocess.Popen([sys.executable, "-c", program, os.path.join(ROOT, "experiments"), str(tmp_path), *arguments],
                               env={**os.environ, "SLOW": "gtpo-lr0.001-s0"}, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while "gtpo-lr0.001-s0" not in ((tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else "") and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]                                       # the stand-in would sleep for a minute
    assert process.returncode == 130 and "the same command goes on" in said
    calls(tmp_path)
    assert compare.main(arguments) == 0
    assert "gtpo-lr0.001-s0" in calls(tmp_path) and len((tmp_path / "r.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("flags, says", [(["--algorithms=ppo"], "'ppo': should be some of grpo"), (["--learning_rates=1e-3,x"], "list of positive"),
                                         (["--jobs=0"], "should be 1 or more"), (["--step=9"], "unrecognized")])
def test_bad_flags(flags, says, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(flags)
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_train_and_eval_take_the_commands():
    """Each command is read by the program itself; runs of one seed and rate differ only in the algorithm's own switches and the name."""
    a = compare.parse(["--temperature=1.5", "--eval_samples=4"])
    configs = {}
    for name in ["sft", *compare.ALGORITHMS]:
        c = train.read_config(train.TrainConfig, compare.train_command(a, name, 1e-3, 3)[2:])
        train.check_config(c, 1)
        configs[name] = vars(c)
        e = evaluation.parse(compare.eval_command(a, name, 1e-3, 3)[2:])
        assert (e.model, e.n, e.limit, e.temperature, e.seed) == (f"out/compare/{c.name}/model", 4, 100, 1.5, 3)
    base = configs["gtpo"]
    assert (base["algo"], base["model"], base["sft_steps"], base["steps"], base["seed"], base["learning_rate"], base["temperature"]) == (
        "gtpo", "out/compare/sft-s3/model", 0, 60, 3, 1e-3, 1.5)
    differ = {name: {k for k in c if c[k] != base[k]} - {"name"} for name, c in configs.items()}
    assert differ["gtpo_no_conflict"] == {"conflict"} and differ["gtpo_no_filter"] == {"entropy_filter"} and differ["gtpo_gamma0"] == {"gamma"}
    assert differ["grpo"] == {"algo"} and differ["grpo_kl"] == {"algo", "beta"} and differ["grpo_no_std"] == {"algo", "scale_advantages"}


def test_format_logp_is_that_of_the_tags(tmp_path):
    """Brute force: one forward pass for every token of the tags, whose bytes are found by cutting the text before each tag."""
    train.make_tiny_model(str(tmp_path), 0)
    model, tokenizer = compare.GPT.from_pretrained(str(tmp_path)), compare.Tokenizer.from_pretrained(str(tmp_path))
    problems, total = load_problems("arithmetic", "test")[:3], 0.0
    for problem in problems:
        text = demonstration(problem)
        seen, ids = "", build_prompt(tokenizer, problem.question)
        for i in tokenizer.encode(text):
            piece = tokenizer.decode([i])
            # a token is the tag's if it has a character of one: characters between < and >, since nothing else uses these
            inside = any(text[:at + 1].rfind("<") > text[:at].rfind(">") for at in range(len(seen), len(seen + piece)))
            if inside:
                total += torch.log_softmax(model(torch.tensor([ids]))[0, -1], -1)[i].item()
            ids, seen = ids + [i], seen + piece
        assert seen == text
    assert compare.format_logp(str(tmp_path), problems) == pytest.approx(total / 3, abs=1e-4)


# ---- report.py --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("df, t", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (120, 1.980)])
def test_t_quantiles_are_those_of_printed_tables(df, t):
    assert report.t_quantile(df) == pytest.approx(t, abs=6e-4)


def test_interval_by_hand():
    """1 2 3 4 5: mean 3, s^2 = (4 + 1 + 0 + 1 + 4) / 4 = 2.5, half = 2.776 * sqrt(2.5 / 5) = 1.963."""
    mean, half = report.interval([1, 2, 3, 4, 5])
    assert mean == 3 and half == pytest.approx(1.963, abs=1e-3)
    assert report.interval([7.0, 7.0]) == (7.0, 0.0)
    assert report.interval([7.0])[0] == 7.0 and math.isnan(report.interval([7.0])[1])


def test_interval_covers_the_truth_in_95_of_100():
    rng = random.Random(0)
    hits = 0
    for _ in range(2000):
        mean, half = report.interval([rng.gauss(5, 2) for _ in range(5)])
        hits += abs(mean - 5) < half
    assert 0.935 < hits / 2000 < 0.965                                              # three standard errors are 0.015; with 1.96 for t it is 0.88


def result(algorithm, rate, seed, accuracy, **more):
    row = {"accuracy": accuracy, "format": 0.9, "format_logp": -0.1, "pass@1": accuracy, "pass@2": accuracy, "maj@1": accuracy, "maj@2": accuracy}
    if rate:
        row |= dict(entropy_end=0.1, entropy_worst=0.2, format_worst=0.8, protected=0.3, filtered=0.0, seconds=9.0)
    return {"algorithm": algorithm, "learning_rate": rate, "seed": seed, "settings": {"steps": 60}, **row, **more}


def test_report_tables(tmp_path, capsys):
    """Differences are those of one seed: gtpo is 1 and 3 points above grpo, 2 ± 12.706 * sqrt(2) / sqrt(2) = 2 ± 12.7, though the levels differ
    by 40 points between the seeds. On seed 2 grpo is not there yet, so the difference leaves that seed out."""
    rows = [result("gtpo", 1e-3, 0, 0.51), result("gtpo", 1e-3, 1, 0.93), result("gtpo", 1e-3, 2, 0.90), result("grpo", 1e-3, 0, 0.50),
            result("grpo", 1e-3, 1, 0.90, entropy_worst=0.7), result("sft", None, 0, 0.4), result("gtpo_gamma0", 1e-3, 0, 0.6),
            result("gtpo_gamma0", 1e-3, 1, 1.0)]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    levels, curves, differences = [part.split("\n| ")[1:] for part in text.split("| algorithm |")[1:]]
    row_of = {line.split(" | ")[0]: line.split(" | ") for line in levels}
    assert row_of["start (SFT)"][1] == "40.0"                                       # one seed has no interval
    assert row_of["start (SFT)"][5:8] == ["-", "-", "-"]                            # no RL steps
    assert row_of["grpo"][1] == "70.0 ± 254.1"                                      # 12.706 * 28.28 / sqrt(2)
    assert row_of["gtpo"][1] == "78.0 ± 58.2"                                       # s^2 = (27^2 + 15^2 + 12^2) / 2, 4.303 s / sqrt(3)
    row_of = {line.split(" | ")[0]: line.split(" | ") for line in differences}
    assert "grpo" not in row_of and row_of["gtpo"][1] == "+2.0 ± 12.7"
    assert row_of["gtpo_gamma0"][1] == "**+10.0 ± 0.0**"
    assert "pass@2" in text and "maj@2" in text and "above ln 2: grpo at 0.001 in 1 of 2." in text


@pytest.mark.parametrize("text, says", [(None, "compare.py makes it"), ("", "no results yet"), ("{]\n", "r.jsonl:1: "), ("[]\n", ":1: "),
                                        ('{"algorithm": "a"}\n', ":1: ")])
def test_report_of_bad_results(tmp_path, capsys, text, says):
    if text is not None:
        (tmp_path / "r.jsonl").write_text(text)
    assert report.main([str(tmp_path / "r.jsonl")]) == 2
    assert says in capsys.readouterr().err
