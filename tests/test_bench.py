"""tools/bench.py compares speed only if both sides do the same work: each straightforward version
computes the numbers of ours, on tiny sizes."""
import contextlib
import re
from types import SimpleNamespace

import pytest
import torch

from gtpo import conflict_weights, group_advantages, mean_entropy, token_weights
from lib import graph
from sample import sample
from tools import bench

PROMPTS = [[5, 1, 2], [1, 2, 3], [7, 8, 9]]
O = SimpleNamespace(device="cpu", autocast=contextlib.nullcontext)      # noqa: E741


@pytest.fixture
def tiny(monkeypatch):
    """A run of a model whose distributions are not nearly uniform; all sizes are as small."""
    for size in bench.SHAPES:
        monkeypatch.setitem(bench.SHAPES, size, (2, 16, 24, 4, 2, 20))
        monkeypatch.setitem(bench.ROLLOUTS, size, [(2, 4, 3, 5)])
    torch.manual_seed(0)
    run = bench.make_run(bench.make_model("M", O), O)
    for p in run.model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return run


def test_samplers_agree(tiny):
    noise = torch.rand(3, 4, 9)
    ours, plain = sample(tiny.model, PROMPTS, 4, 9, noise=noise), bench.plain_sample(
        tiny.model, PROMPTS, noise)
    assert ours.ids.unique().numel() > 5
    for name in ("ids", "mask", "logps", "entropy"):
        torch.testing.assert_close(getattr(plain, name), getattr(ours, name), rtol=0, atol=1e-4)


def test_gradients_agree(tiny):
    """Also when ours is cut into micro-batches; and sampler and trainer agree to rounding."""
    s = sample(tiny.model, PROMPTS, 4, 6, noise=torch.rand(3, 4, 6))
    advantages = group_advantages(torch.randn(3, 4))
    weights = token_weights(advantages - mean_entropy(s.entropy, s.mask), s.mask,
                            conflict_weights(s.ids, s.mask, advantages))
    tiny.c.micro_tokens = 30
    _, mismatch = bench.gradient(tiny, PROMPTS, s, weights)
    assert 0 < mismatch < 1e-5
    ours = [p.grad.clone() for p in tiny.model.parameters()]
    tiny.optimizer.zero_grad()
    bench.plain_loss(tiny.model, PROMPTS, s.ids, weights).backward()
    for p, grad in zip(tiny.model.parameters(), ours):
        assert grad.abs().max() > 1e-4
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ours", [True, False])
def test_a_step_changes_the_weights(tiny, ours):
    before = [p.clone() for p in tiny.model.parameters()]
    bench.train_step(tiny, PROMPTS, torch.randn(3, 4), torch.rand(3, 4, 6), ours)
    assert all((p != old).any() for p, old in zip(tiny.model.parameters(), before))


def test_the_table(tiny, monkeypatch, capsys):
    """Figures of a made-up clock, which ticks once a look: 1 s each."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    bench.main(["--sizes", "S", "Q", "--only", "sampler", "step"])
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert torch.__version__ in head and "float32, eager" in head
    assert rows[0].split() == "sampler S 2 x 4, 3 + 5 1.000 1.000 (1.0x) 40".split()
    assert [row.split()[:2] for row in rows] == [["sampler", "S"], ["sampler", "Q"],
                                                 ["step", "S"], ["step", "Q"]]
    assert float(rows[2].split()[-1]) < 1e-5 and len(rows[2]) == len(columns)   # the mismatch


def test_a_device_that_captures_has_a_line_without(tiny, monkeypatch, capsys):
    captured = []
    monkeypatch.setitem(graph.CAPTURES, "cpu", True)
    monkeypatch.setattr(graph, "capture", lambda step, t: captured.append(step) or step)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    bench.main(["--sizes", "S", "--only", "sampler"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row[:32].split() for row in rows] == [f"{name} S 2 x 4, 3 + 5".split()
                                                  for name in ("sampler", "eager")]
    assert len(captured) == 3 and graph.CAPTURES["cpu"]


def test_counts_grow_with_the_layers(capsys):
    """Two lines for LoRA, two for float32 weights under autocast. What they count, test_sample.py
    and test_graph.py ask."""
    assert not bench.main(["--count"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[-2:] for line in lines] == [[" 0 casts", " 0 waits"]] * 4
    assert all(1000 < int(re.search("([0-9,]+) launches", line)[1].replace(",", ""))
               for line in lines)


@pytest.mark.parametrize("flag, says", [("--only=lose", "'lose'"), ("--device=cuda", "no CUDA")])
def test_wrong_flags(flag, says, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        bench.main([flag])
    assert stop.value.code == 2 and says in capsys.readouterr().err
