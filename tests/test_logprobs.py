"""logprobs.py: the loss through the head against its slow twin, in which autograd sees all logits,
and values worked by hand."""
import math
from functools import partial

import pytest
import torch

import logprobs
from conftest import Watch
from gtpo import policy_loss, surrogate_loss
from logprobs import entropy, head_loss, head_loss_slow, log_probs, token_logps

N, V, H = 7, 11, 5
BF16 = torch.bfloat16


def cross_entropy(logps, weights):
    return -(weights * logps).sum()


LOSSES = {"surrogate": surrogate_loss, "clip and KL": partial(policy_loss, epsilon=0.2),
          "cross-entropy": cross_entropy}


@pytest.fixture
def small():
    """hidden (N, H), head (V, H), ids (N,), in float64."""
    torch.manual_seed(0)
    hidden, head = torch.randn(N, H).double(), torch.randn(V, H).double()
    return hidden, head, torch.tensor([0, 10, 3, 6, 7, 1, 9])


def numbers(name, logps):
    """What the loss `name` asks beside the log-probs, one number a token each: weights of both
    signs and 0, old log-probs near and far, so that some ratios are clipped."""
    weights = torch.tensor([1.0, -2, 0, 0.5, 0, 3, -1], dtype=logps.dtype)
    old = logps.detach() + torch.tensor([0.5, 0.1, 0, -0.5, 1, 0, 0.3], dtype=logps.dtype)
    if name == "cross-entropy":
        return [weights.abs()]
    if name == "surrogate":
        return [weights, old]
    return [weights, old, torch.full_like(weights, 0.3), old.flip(0)]


# ---- the loss through the head -------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk", [0, 1, 3, 7, 100])
@pytest.mark.parametrize("trained", ["hidden", "head", "both"])
def test_head_loss_is_the_slow_one(monkeypatch, small, trained, chunk, name, temperature, dtype):
    """Loss, log-probs and gradients, for any number of tokens that fit a chunk (0: not even one),
    times any factor; with two matrix products a chunk, three if the head is trained as well."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk * V + V - 1)
    hidden, head, ids = small[0].to(dtype), small[1].to(dtype), small[2]
    hidden.requires_grad_(trained != "head")
    head.requires_grad_(trained != "hidden")
    inputs = [x for x in (hidden, head) if x.requires_grad]
    more = numbers(name, token_logps(hidden, head, ids, temperature))
    results = []
    for function in (head_loss, head_loss_slow):
        with Watch() as watch:
            loss, logps = function(hidden, head, ids, LOSSES[name], more, temperature)
            gradients = torch.autograd.grad(2.5 * loss, inputs)
        assert loss.dtype == logps.dtype == dtype and not logps.requires_grad
        results.append((loss, logps, *gradients))
        if function is head_loss:
            assert watch.products == math.ceil(N / max(1, chunk)) * (1 + len(inputs))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    if dtype == torch.float64:
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_a_graph_serves_once(small):
    """Guards: gradients that are scaled in place, and then once more by a second backward pass."""
    hidden, head, ids = small
    for keep in (False, True):
        loss, _ = head_loss(hidden.requires_grad_(), head, ids, cross_entropy, [torch.ones(N)])
        (2 * loss).backward(retain_graph=keep)
        with pytest.raises(RuntimeError, match="second time|modified by an inplace operation"):
            (2 * loss).backward()
    loss, _ = head_loss(hidden, head, ids, cross_entropy, [torch.ones(N)])
    (gradient,) = torch.autograd.grad(loss**2, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("tokens", [1, 4, 64, 500])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_memory_of_two_blocks(monkeypatch, tokens, temperature):
    """Guards: all logits alive at once, here up to 500,000 numbers; a second head gradient beside
    the first."""
    assert 2 * 4 * logprobs.CHUNK_ELEMENTS < 640 * 2**20  # bytes
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4096)
    hidden, head = torch.randn(tokens, 8, requires_grad=True), torch.randn(1000, 8)
    ids, weights = torch.randint(0, 1000, (tokens,)), torch.randn(tokens)
    head.requires_grad_()
    bound = 2 * 4 * min(4096, 1000 * tokens) + 16 * tokens + 200  # and a few numbers a token
    with Watch(hidden, head, ids, weights) as scored:
        token_logps(hidden, head, ids, temperature)
    assert scored.peak <= bound
    with Watch(hidden, head, ids, weights) as learned:
        loss, _ = head_loss(hidden, head, ids, cross_entropy, [weights], temperature)
        loss.backward()
    assert learned.peak <= bound + 4 * (hidden.numel() + head.numel())


def test_no_tokens():
    """Guards: None for a gradient where DDP waits for one."""
    hidden, head = torch.randn(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    ids = torch.zeros(0, dtype=torch.long)
    loss, logps = head_loss(hidden, head, ids, cross_entropy, [torch.zeros(0)])
    loss.backward()
    assert loss.item() == 0 and logps.shape == token_logps(hidden, head, ids).shape == (0,)
    assert hidden.grad.shape == (0, 4) and torch.equal(head.grad, torch.zeros(5, 4))


# ---- values --------------------------------------------------------------------------------------

@pytest.mark.parametrize("logits, token, temperature, logp, H", [
    ((0.0, 1), 1, 0.5, -0.126928, 0.365334), ((0.0, 1), 1, 1.0, -0.313262, 0.582203),
    ((2.0, 1, 0), 0, 1.0, -0.407606, 0.832395), ([0.0] * 8, 5, 3.0, -math.log(8), math.log(8)),
    # p = 1/2, 1/4, 1/4
    ((math.log(2), 0, 0), 1, 1.0, -math.log(4), 1.5 * math.log(2)),
    ((0.0, 100, 0), 1, 1.0, 0, 0), ((0.0, 100, 0), 2, 1.0, -100, 0)])
def test_values_by_hand(logits, token, temperature, logp, H):
    """Guards: sampling at one temperature and scoring at another; log-probs one token off."""
    hidden, head, ids = torch.ones(1, 1), torch.tensor(logits)[:, None], torch.tensor([token])
    every = log_probs(hidden, head, temperature)  # (1, V)
    logps = token_logps(hidden, head, ids, temperature)
    _, learned = head_loss(hidden, head, ids, cross_entropy, [torch.ones(1)], temperature)
    assert logps.item() == learned.item() == every[0, token] == pytest.approx(logp, abs=1e-6)
    assert entropy(every).item() == pytest.approx(H, abs=1e-6)


def test_impossible_tokens():
    """Guards: 0 * -inf. Logits [1, 1, 1, -inf] have entropy ln 3, and finite gradients."""
    head = torch.tensor([[1.0], [1], [1], [-math.inf]], requires_grad=True)
    assert entropy(log_probs(torch.ones(1, 1), head)).item() == pytest.approx(math.log(3))
    loss, logps = head_loss(torch.ones(1, 1), head, torch.tensor([2]), cross_entropy,
                            [torch.ones(1)])
    loss.backward()
    assert logps.item() == pytest.approx(-math.log(3))
    torch.testing.assert_close(head.grad[:, 0], torch.tensor([1 / 3, 1 / 3, -2 / 3, 0]))


# ---- short types ---------------------------------------------------------------------------------

@pytest.mark.parametrize("hidden_type, head_type", [
    (BF16, BF16), (BF16, torch.float32), (torch.float32, BF16), (torch.float16, torch.float16)])
def test_products_in_float32_on_a_cpu(monkeypatch, small, hidden_type, head_type):
    """Loss and log-probs of bfloat16 numbers as if they were float32; gradients are added up in
    float32 and rounded once, to the parameters' type, with a chunk for every token."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", V)
    short = [small[0].to(hidden_type).requires_grad_(), small[1].to(head_type).requires_grad_()]
    wide = [x.detach().float().requires_grad_() for x in short]
    assert torch.equal(token_logps(*short, small[2]), token_logps(*wide, small[2]))
    results = []
    for inputs in (short, wide):
        loss, logps = head_loss(*inputs, small[2], cross_entropy, [torch.arange(1.0, N + 1)])
        assert loss.dtype == logps.dtype == torch.float32
        results.append((loss, logps, *torch.autograd.grad(loss, inputs)))
    for ours, expected, kind in zip(*results, [torch.float32] * 2 + [hidden_type, head_type]):
        assert ours.dtype == kind and torch.equal(ours, expected.to(kind))


def test_confident_tokens_keep_their_gradient_in_bf16():
    """Guards: onehot - p taken after rounding to bf16, where 0.999 is 1 and the gradient vanishes.
    Here p = 1 - 0.000911."""
    hidden, head = torch.ones(1, 1, dtype=BF16), torch.tensor([[7.0], [0.0]], dtype=BF16)
    loss, _ = head_loss(hidden.requires_grad_(), head.requires_grad_(), torch.tensor([0]),
                        cross_entropy, [torch.ones(1)])
    loss.backward()
    assert hidden.grad.item() == pytest.approx(-7 * 0.000911, rel=0.01)
    assert head.grad[:, 0].tolist() == pytest.approx([-0.000911, 0.000911], rel=0.01)


def test_autocast_changes_no_score(small):
    """Guards: inside autocast on a CPU a product without a buffer was one of bfloat16, and the
    sampler's log-probs were 0.16 nats off those of the loss."""
    hidden, head, ids = small[0].float(), small[1].float(), small[2]

    def everything():
        every, scored = log_probs(hidden, head, 0.7), token_logps(hidden, head, ids, 0.7)
        inputs = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss, logps = head_loss(*inputs, ids, cross_entropy, [torch.ones(N)], 0.7)
        return every, entropy(every), scored, loss, logps, *torch.autograd.grad(loss, inputs)

    expected = everything()
    with torch.autocast("cpu", BF16):
        ours = everything()
    for x, y in zip(ours, expected):
        assert x.dtype == torch.float32 and torch.equal(x, y)
