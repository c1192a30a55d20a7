"""README.md stays true: its line references, its worked example, its commands and its list of files."""
import math
import os
import re
import runpy
import shlex
import sys

import pytest
import torch

from gtpo import conflict_weights, group_advantages, grpo_weights, gtpo_weights
from train import TrainConfig, check_config, read_config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
    README = f.read()


def references():
    """(file, line, code) of each table row that links to a line; the code is what the row shows in backticks after the link."""
    for row in README.splitlines():
        if m := re.search(r"\[(\w+\.py):(\d+)\]\(\1#L\2\)(?: \|)? `([^`]+)`", row):
            yield m[1], int(m[2]), m[3].replace("\\|", "|")


def test_every_line_reference_is_true():
    wrong, found = [], list(references())
    assert len(found) >= 20 and len(found) == len(re.findall(r"#L\d+\)", README))
    for file, number, code in found:
        with open(os.path.join(ROOT, file), encoding="utf-8") as f:
            at = [i for i, line in enumerate(f, 1) if code in line]
        if number not in at:
            wrong.append(f"{file}:{number} `{code}` stands in line {at}")
    assert not wrong, "\n".join(wrong)


def test_the_worked_example():
    """The weights of GRPO and GTPO on the shared first token, and the marks of the table."""
    rows = re.findall(r"^\| (\d+) \| ([+-]\d+) \| (\d+) \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) == 4
    words = [re.sub(r"[*~`]+", "", text).split() for *_, text in rows]
    assert [len(w) for w in words] == [int(n) for _, _, n, _ in rows]
    vocabulary = {w: i for i, w in enumerate(dict.fromkeys(sum(words, [])))}
    longest = max(map(len, words))
    ids = torch.tensor([[vocabulary[w] for w in row] + [0] * (longest - len(row)) for row in words])                 # (4, L)
    mask = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in words])
    advantages = group_advantages(torch.tensor([float(r) for r, *_ in rows]))
    assert advantages.tolist() == [float(a) for _, a, *_ in rows]
    grpo = grpo_weights(mask, advantages)[:, 0].sum().item()
    gtpo = gtpo_weights(ids, mask, advantages, torch.zeros(4), 0.0, gamma=0.0)[:, 0].sum().item()
    assert f"= {grpo:.3f}: the tag is **punished**" in README and f"2·5/48 + 2·5/36 = +{gtpo:.3f}" in README
    shown = []
    for *_, text in rows:
        for mark, piece in re.findall(r"(\*\*|~~)?`([^`]*)`(?:\*\*|~~)?", text):
            shown += [{"**": 2, "~~": 0, "": 1}[mark]] * len(piece.split())
    assert shown == conflict_weights(ids, mask, advantages)[mask].int().tolist()


def commands():
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        yield from (line.split("#")[0].strip() for line in block.splitlines() if line.strip())
    yield from (c for c in re.findall(r"`((?:python|torchrun) [^`]*)`", README))


@pytest.mark.parametrize("script", ("sample.py", "eval.py", "data.py", "plot.py", "bench.py", "rewards.py"))
def test_commands_use_flags_that_exist(script, monkeypatch, capsys):
    """A documented command that does not run."""
    used = {word.split("=")[0] for c in commands() for word in shlex.split(c) if f" {script}" in c and word.startswith("--") and "_per_node" not in word}
    if used:
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        with pytest.raises(SystemExit):
            runpy.run_path(os.path.join(ROOT, script), run_name="__main__")
        text = capsys.readouterr().out
        assert all(re.search(rf"{flag}\b", text) for flag in used), used


def test_training_commands_are_configurations():
    count = 0
    for c in commands():
        if " train.py" in c and "..." not in c and "--help" not in c:
            words = shlex.split(c[c.index(" train.py") + len(" train.py"):])
            started = re.search(r"--nproc_per_node=(\d+)", c), re.search(r"--nnodes=(\d+)", c)
            processes = math.prod(int(m[1]) for m in started if m)
            check_config(read_config(TrainConfig, [os.path.join(ROOT, w) if w.endswith(".toml") else w for w in words]), processes)
            count += 1
    assert count >= 8


def test_the_list_of_files_is_complete():
    listed = re.findall(r"^(\w+\.py) ", README, re.MULTILINE)
    assert sorted(listed) == sorted(f for f in os.listdir(ROOT) if f.endswith(".py"))
