"""bench.py compares speed only if both sides do the same work: each straightforward version computes the numbers of ours, on tiny sizes."""
import re
import runpy
import sys

import pytest
import torch

import bench
from gtpo import token_logps
from sample import sample
from train import completion_logps

PROMPTS = [[5], [1, 2, 3, 4], [7, 8]]                                               # of different lengths: padding must not show
OFF = torch.autocast("cpu", enabled=False)


@pytest.fixture
def tiny(monkeypatch):
    for size in bench.SHAPES:
        monkeypatch.setitem(bench.SHAPES, size, (2, 16, 24, 4, 2, 20))
    torch.manual_seed(0)
    model = bench.make_model("M")
    for p in model.parameters():                                                    # 0.02 leaves every distribution nearly uniform
        torch.nn.init.normal_(p, std=0.5)
    return model


def test_samplers_agree(tiny):
    noise = torch.rand(3, 4, 9)
    ours, plain = sample(tiny, PROMPTS, 4, 9, noise=noise), bench.straightforward_sample(tiny, PROMPTS, 4, 9, noise)
    assert ours.ids.unique().numel() > 5
    for name in ("ids", "mask", "logps", "entropy", "finished"):
        torch.testing.assert_close(getattr(plain, name), getattr(ours, name), rtol=0, atol=1e-4)


def test_losses_agree():
    torch.manual_seed(0)
    hidden, head, ids = torch.randn(12, 8), torch.randn(30, 8), torch.randint(30, (12,))
    results = []
    for f in (token_logps, bench.full_logits):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logps, entropy = f(h, w, ids)
        (logps * torch.arange(12.0)).sum().backward()
        results.append((logps, entropy, h.grad, w.grad))
    for ours, plain in zip(*results):
        torch.testing.assert_close(plain, ours, rtol=1e-4, atol=1e-4)


def test_training_logps_agree(tiny):
    ids = torch.randint(20, (3, 4, 6))
    ours = completion_logps(tiny, PROMPTS, ids.flatten(0, 1).tolist(), [p for p in range(3) for _ in range(4)])
    torch.testing.assert_close(bench.straightforward_logps(tiny, PROMPTS, ids), ours, rtol=0, atol=1e-4)


def test_steps_agree(tiny, monkeypatch):
    """One step of both ends in the same loss and weights, also when ours is cut into micro-batches."""
    monkeypatch.setattr(bench.TrainConfig, "micro_tokens", 30)
    start, rewards, noise = {k: v.clone() for k, v in tiny.state_dict().items()}, torch.randn(3, 4), torch.rand(3, 4, 6)
    results = []
    for ours in (True, False):
        tiny.load_state_dict(start)
        loss = bench.train_step(tiny, torch.optim.SGD(tiny.parameters(), lr=0.1), PROMPTS, rewards, noise, OFF, ours)
        results.append((loss, {k: v.clone() for k, v in tiny.state_dict().items()}))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    for name, before in start.items():
        torch.testing.assert_close(results[1][1][name], results[0][1][name], rtol=0, atol=1e-5)
    assert max((results[0][1][name] - start[name]).abs().max() for name in start) > 1e-3


def test_prints_the_table(tiny, monkeypatch, capsys):
    """Every section prints a row for each of its sizes. Only the numbers that take long are made small; memory is measured elsewhere."""
    monkeypatch.setattr(bench, "extra_memory", lambda *arguments: 7.0)
    monkeypatch.setattr(bench, "best_seconds", lambda versions, *a, **k: {name: 2.0 if name == "ours" else 5.0 for name in versions} | (
        {"product": 1.0, "fill": 1.0, "sampler": 0.5, "gradient": 0.25}))
    bench.main([])
    out = capsys.readouterr().out
    assert "float32" in out and torch.__version__ in out and "1 CPU threads" in out
    for text in (r"S  16 x 8, prompt 32, 64 new +2.000 s +5.000 s +2.5x", r"M  2 x 8, prompt 512, 64 new +2.000 s",
                 r"head frozen +2.000 s +5.000 s +2.5x", r"64 groups of 16 x 2048 +2.000 s +7 MiB",
                 r"G 32, L 128 +30.5 \( +30.5\) +15.3 \( +15.3\) +3.91 +1.95", r"G 8, L 1024 "):
        assert re.search(text, out), (text, out)
    assert "G 8, L 256, V 32,000, head trained" in out and "-56 MiB" in out         # 7 - 62.5: the head's own gradient is no extra


def test_extra_memory_counts_what_is_held_at_once():
    """Resident memory of a new process; it once began with the parent's peak, and showed 0 for whatever was less."""
    big = torch.ones(2**25)                                                         # 128 MiB in this process must not hide the 64 MiB there
    del big
    memory = bench.extra_memory(torch.device("cpu"), bench.loss_work, (False, 1, 512, 4, 8192, False, OFF, torch.device("cpu")),
                                (False, 1, 2, 4, 8, False, OFF, torch.device("cpu")))
    assert 2 * 16 <= memory <= 8 * 16                                               # logits of 512 x 8192 are 16 MiB


@pytest.mark.parametrize("flag, message", [("--only=lose", "no section 'lose'"), ("--device=cuda", "no CUDA device"), ("--dtype=int8", "int8")])
def test_wrong_flags(flag, message, monkeypatch, capsys):
    if flag == "--device=cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", ["bench.py", flag])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(bench.__file__, run_name="__main__")
    assert end.value.code == 2 and message in capsys.readouterr().err
