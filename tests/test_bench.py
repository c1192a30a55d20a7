"""tools/bench.py compares speed only if both sides do the same work: each straightforward version
computes the numbers of ours, on tiny sizes."""
import contextlib
from types import SimpleNamespace

import pytest
import torch

from gtpo import conflict_weights, group_advantages, mean_entropy, token_weights
from sample import sample
from tools import bench

PROMPTS = [[5], [1, 2, 3, 4], [7, 8]]           # of different lengths: padding must not show
O = SimpleNamespace(device="cpu", autocast=contextlib.nullcontext)      # noqa: E741


@pytest.fixture
def tiny(monkeypatch):
    """A run of a model whose distributions are not nearly uniform; all sizes are as small."""
    for size in bench.SHAPES:
        monkeypatch.setitem(bench.SHAPES, size, (2, 16, 24, 4, 2, 20))
        monkeypatch.setitem(bench.ROLLOUTS, size, [(2, 4, 3, 5)])
    monkeypatch.setattr(bench, "GROWTH", [(2, 4), (2, 6)])
    torch.manual_seed(0)
    run = bench.make_run("M", O)
    for p in run.model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return run


def test_samplers_agree(tiny):
    noise = torch.rand(3, 4, 9)
    ours = sample(tiny.model, PROMPTS, 4, 9, noise=noise)
    plain = bench.plain_sample(tiny.model, PROMPTS, 4, noise)
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
    _, off = bench.gradient(tiny, PROMPTS, s, weights)
    assert 0 < off < 1e-5
    ours = [p.grad.clone() for p in tiny.model.parameters()]
    tiny.optimizer.zero_grad()
    bench.plain_loss(tiny.model, PROMPTS, s.ids, weights).backward()
    for p, grad in zip(tiny.model.parameters(), ours):
        assert grad.abs().max() > 1e-4
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ours", [True, False])
def test_a_step_changes_the_weights(tiny, ours):
    before = [p.clone() for p in tiny.model.parameters()]
    _, off = bench.train_step(tiny, PROMPTS, torch.randn(3, 4), torch.rand(3, 4, 6), ours)
    assert all((p != old).any() for p, old in zip(tiny.model.parameters(), before))
    assert (off is not None) == ours


def test_the_table(tiny, monkeypatch, capsys):
    """Every section has its rows; figures of a made-up clock, which ticks once a look: 1 s each.
    """
    monkeypatch.setitem(bench.SECTIONS, "loss", lambda o: [])   # its sizes are fixed and large
    monkeypatch.setitem(bench.SECTIONS, "conflict", lambda o: [])
    ticks = iter(range(10**6))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    bench.main(["--sizes=S,Q"])
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert torch.__version__ in head and "float32, eager" in head
    assert rows[0].split() == "sampler S 2 x 4, 3 + 5 1.000 1.000 (1.0x) 40".split()
    assert [row.split()[:2] for row in rows[:4]] == [["sampler", "S"], ["sampler", "Q"],
                                                     ["step", "S"], ["step", "Q"]]
    assert float(rows[2].split()[-1]) < 1e-5                    # the mismatch
    assert len(rows) == 4 + 2 * 2 and all(len(row) <= len(columns) for row in rows)


@pytest.mark.parametrize("flag, says", [
    ("--only=lose", "'lose' is none of sampler"), ("--sizes=S,X", "'X' is none of S"),
    ("--device=cuda", "no CUDA device"), ("--dtype=int8", "int8")])
def test_wrong_flags(flag, says, capsys):
    if flag == "--device=cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as stop:
        bench.main([flag])
    assert stop.value.code == 2 and says in capsys.readouterr().err
