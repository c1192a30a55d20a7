"""gtpo.py against brute force written from the equations of its docstring, values worked by hand,
and fixtures: masks and losses of an independent implementation of the published formula
(fixtures/gtpo), advantages and losses of TRL (fixtures/grpo)."""
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import gtpo
import logprobs
from conftest import Watch

FIXTURES = Path(__file__).parent / "fixtures"
NAN, INF, LN2 = math.nan, math.inf, math.log(2)


def pad(completions, pad_id=0, length=0):
    """Lists of token ids -> ids, mask (G, L), right-padded."""
    G, L = len(completions), max([length, *map(len, completions)])
    ids = [c + [pad_id] * (L - len(c)) for c in completions]
    mask = [[t < len(c) for t in range(L)] for c in completions]
    return torch.tensor(ids).long().view(G, L), torch.tensor(mask).bool().view(G, L)


def lambdas(completions, advantages, **padding):
    """conflict_weights of lists, as lists without padding."""
    ids, mask = pad(completions, **padding)
    lam = gtpo.conflict_weights(ids, mask, torch.tensor(advantages))
    assert lam.is_floating_point() and not lam[~mask].any()
    return [row[: len(c)].tolist() for row, c in zip(lam, completions)]


def brute_lambda(completions, advantages):
    """Equation (2) and what the docstring says of runs, one token at a time."""
    sign = [0 if abs(a) < 1e-6 else math.copysign(1, a) for a in advantages]
    result = []
    for i, own in enumerate(completions):
        others = [o for o, s in zip(completions, sign) if s * sign[i] < 0]
        start = [any(o[t : t + 1] == [x] for o in others) for t, x in enumerate(own)]
        left = [len(own) - t for t in range(len(own))]  # 1 for the last token
        end = [any(len(o) >= n and o[-n] == own[-n] for o in others) for n in left]
        conflict = [all(start[: t + 1]) or all(end[t:]) for t in range(len(own))]
        result.append([1 + sign[i] if c else 1.0 for c in conflict])
    return result


def brute_objective(completions, advantages, H, H_ini, ratios, gamma):
    """J, equations (2), (4), (5) and (7), in plain Python floats."""
    J = 0.0
    for i, (lam, ratio) in enumerate(zip(brute_lambda(completions, advantages), ratios)):
        w = 0 if H_ini < LN2 and H[i] > LN2 else (advantages[i] - gamma * H[i]) / len(completions)
        J += sum(w / len(lam) * r * x for r, x in zip(ratio, lam))
    return J


def random_group(rng):
    """A small group with many conflicts: completions (G lists of 0 to 8 ids), advantages."""
    G, V = rng.randint(1, 6), rng.randint(1, 4)
    stem = rng.choices(range(V), k=8)
    completions = []
    for _ in range(G):
        a, b = rng.randint(0, 3), rng.randint(0, 3)
        middle = rng.choices(range(V), k=rng.randint(0, 2))
        completions.append(stem[:a] + middle + stem[8 - b :])
    return completions, rng.choices([-1.5, -0.25, 0.5, 2.0, 0.0, 5e-7, -5e-7], k=G)


# ---- advantages ----------------------------------------------------------------------------------

def test_advantages_as_trl():
    cases = json.loads((FIXTURES / "grpo/advantages.json").read_text())["cases"]
    cases = [c for c in cases if c["scale_rewards"] != "batch"]
    assert {c["scale_rewards"] for c in cases} == {"group", "none"}
    for c in cases:
        rewards = torch.tensor(c["rewards"]).view(-1, c["num_generations"])
        scale = {"group": "std", "none": "none"}[c["scale_rewards"]]
        ours = gtpo.group_advantages(rewards, scale).flatten()
        torch.testing.assert_close(ours, torch.tensor(c["advantages"]), atol=1e-4, rtol=1e-5)


def test_advantages_by_hand():
    """Guards: population deviation, or none, where the sample deviation is meant (unsloth-zoo PR
    832); prompts that compete with each other because the mean is that of the whole batch."""
    rewards = torch.tensor([20.0, 10, 10, 0])
    assert gtpo.group_advantages(rewards).tolist() == [10, 0, 0, -10]
    std = gtpo.group_advantages(rewards, "std").tolist()
    assert std == pytest.approx([1.22473, 0, 0, -1.22473], abs=2e-5)
    tiny = gtpo.group_advantages(torch.tensor([2e-4, 0.0]), "std")
    assert tiny.tolist() == pytest.approx([0.41421, -0.41421], abs=1e-4)  # 1 / (sqrt(2) + 1)
    assert gtpo.group_advantages(rewards.view(2, 2)).tolist() == [[5, -5], [5, -5]]
    assert gtpo.group_advantages(torch.tensor([1, 0])).tolist() == [0.5, -0.5]  # whole numbers


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1e6 + 0.3, 20.1, -1.1, 0.0])
def test_equal_rewards_have_no_advantage(reward, dtype, scale):
    """Guards: seven equal rewards of 0.1 leave a residue in r - mean(r), and the group is taken as
    all negative; 0/0 in the normalised form."""
    for G in (1, 3, 7, 12):
        advantages = gtpo.group_advantages(torch.full((G,), reward, dtype=dtype), scale)
        assert advantages.dtype == dtype and advantages.tolist() == [0] * G


def test_reward_at_the_mean_has_no_sign_and_small_differences_do():
    """Guards: in float32 the rounding of 20.1 alone is above the tolerance of 1e-6."""
    for rewards in ([0.1, 0.2, 0.3], [10.1, 15.1, 20.1], [1e5 + 0.1, 1e5 + 0.2, 1e5 + 0.3]):
        advantages = gtpo.group_advantages(torch.tensor(rewards))
        assert gtpo.advantage_sign(advantages).tolist() == [-1, 0, 1]
    assert gtpo.group_advantages(torch.tensor([1e6, 1e6 + 0.5])).tolist() == [-0.25, 0.25]
    signs = gtpo.advantage_sign(torch.tensor([9e-7, -9e-7, 2e-6, -2e-6, -3.0]))
    assert signs.tolist() == [0, 0, 1, -1, -1]


@pytest.mark.parametrize("rewards, words", [
    ([[1.0, 2], [NAN, 1]], r"rewards\[1, 0\] is nan"), ([1.0, -INF], r"rewards\[1\] is -inf"),
    ([[], []], "at least one completion"), (1.0, "at least one completion")])
def test_bad_rewards(rewards, words):
    with pytest.raises(ValueError, match=words):
        gtpo.group_advantages(torch.tensor(rewards))


# ---- conflict tokens -----------------------------------------------------------------------------

def test_the_worked_example():
    """The table in gtpo.py's docstring, and the weights below it."""
    table = re.findall(r"^    \d +([+-]?\d+)   ([\d .]{9})    ([\d .]{9})", gtpo.__doc__, re.M)
    advantages = [float(row[0]) for row in table]
    completions = [[int(x) for x in row[1].split() if x != "."] for row in table]
    expected = [[float(x) for x in row[2].split() if x != "."] for row in table]
    assert gtpo.group_advantages(torch.tensor([20.0, 0, 10])).tolist() == advantages
    assert lambdas(completions, advantages) == expected == brute_lambda(completions, advantages)

    ids, mask = pad(completions)
    A, H = torch.tensor(advantages), torch.full((3,), 0.5)
    delta = gtpo.keep_completions(H, 0.4)
    weights = gtpo.token_weights(A - 0.1 * H, mask, gtpo.conflict_weights(ids, mask, A), delta)
    w1, w2, w3 = 9.95 / 15, -10.05 / 12, -0.05 / 12
    by_hand = [[2 * w1, 2 * w1, w1, w1, 2 * w1], [0, 0, w2, 0, 0], [w3, w3, w3, w3, 0]]
    torch.testing.assert_close(weights, torch.tensor(by_hand))
    assert f"= {w1:.3f},\nand its three conflict tokens twice that" in gtpo.__doc__


def test_lambda_of_the_fixtures():
    cases = json.loads((FIXTURES / "gtpo/masks.json").read_text())["cases"]
    assert len(cases) > 30
    for c in cases:
        lam = gtpo.conflict_weights(*(torch.tensor(c[x]) for x in ("ids", "mask", "advantages")))
        assert lam.tolist() == c["paper"]["lam"], c["note"]


def test_lambda_brute_force_and_properties():
    """Completions may change places, and with all advantages negated so do 2 and 0. Guards: a mask
    made by comparing with the pad id, which is also that of a token, often of the end token; the
    suffix run counted in text order; weight 4 where both runs meet."""
    rng = random.Random(0)
    for _ in range(400):
        completions, advantages = random_group(rng)
        expected = brute_lambda(completions, advantages)
        assert lambdas(completions, advantages) == expected
        pad_id = rng.choice([-1, 0, 3, 151_935])
        assert lambdas(completions, advantages, pad_id=pad_id, length=11) == expected
        assert lambdas(completions[::-1], advantages[::-1]) == expected[::-1]
        flipped = lambdas(completions, [-a for a in advantages])
        assert flipped == [[2.0 - x for x in row] for row in expected]


def test_conflicts_need_no_vocabulary_sized_memory():
    """Guards: histograms of vocabulary x length, 2.5 GB each at the sizes of Qwen."""
    ids, mask = torch.randint(0, 151_936, (4, 2048)), torch.ones(4, 2048, dtype=torch.bool)
    with Watch() as watch:
        gtpo.conflict_weights(ids, mask, torch.tensor([1.0, -1, 1, -1]))
    assert watch.peak < 2**20  # bytes


def test_bad_masks_and_shapes():
    for bad in ([[1, 0, 1]], [[0, 1, 1]], [[[1, 1, 1]], [[1, 0, 1]]]):
        mask = torch.tensor(bad)
        with pytest.raises(ValueError, match="right-padded"):
            gtpo.conflict_weights(mask, mask, torch.ones(mask.shape[:-1]))
    ids = torch.ones(2, 3)
    for mask, advantages in ((ids[:, :2], ids[:, 0]), (ids, torch.ones(3)), (ids, ids[:, :1])):
        with pytest.raises(ValueError, match=r"need \(..., G, L\) twice and \(..., G\)"):
            gtpo.conflict_weights(ids, mask, advantages)


# ---- entropy and weights -------------------------------------------------------------------------

def test_mean_entropy_leaves_padding_out():
    """Guards: padding in the mean: 2.65 instead of 0.3, and the filter drops a good completion."""
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    token_entropy = torch.tensor([[0.2, 0.4, 5, NAN], [1, 1, 1, 1], [1, 2, 3, 4]])
    torch.testing.assert_close(gtpo.mean_entropy(token_entropy, mask), torch.tensor([0.3, 0, 2.5]))


@pytest.mark.parametrize("initial, H, delta", [
    (0.9, 0.8, 1), (0.5, 0.8, 0), (0.5, 0.69, 1), (0.5, 0.695, 0), (0.5, LN2, 1), (LN2, 0.8, 1)])
def test_keep_completions(initial, H, delta):
    """Guards: the filter without its branch on the initial entropy, so that a model that begins
    above ln 2 gets no gradient; 0.7 for ln 2."""
    H = torch.tensor([H])
    assert gtpo.keep_completions(H + 1, initial + 1, threshold=LN2 + 1).tolist() == [delta]
    assert gtpo.keep_completions(H, initial).tolist() == [delta]


def test_leading_dimensions():
    """Of P prompts each is treated alone; a loss is their mean."""
    torch.manual_seed(0)
    ids, lengths = torch.randint(0, 3, (2, 3, 4, 6)), torch.randint(0, 7, (2, 3, 4, 1))
    mask, logps = torch.arange(6) < lengths, torch.randn(2, 3, 4, 6)
    A, H = torch.randn(2, 3, 4), torch.rand(2, 3, 4)
    parts = lambda ids, mask, A, H, logps: (
        gtpo.conflict_weights(ids, mask, A), gtpo.keep_completions(H, 0.5),
        gtpo.token_weights(A, mask, logps, H), gtpo.gtpo_loss(logps, ids, mask, A, H, 0.5),
        gtpo.grpo_loss(logps, mask, A, None, -logps, 0.1))
    each = [parts(ids[at], mask[at], A[at], H[at], logps[at]) for at in np.ndindex(2, 3)]
    for i, whole in enumerate(parts(ids, mask, A, H, logps)):
        alone = torch.stack([x[i] for x in each])
        alone = alone.view(2, 3, *alone.shape[1:]) if whole.ndim else alone.mean()
        torch.testing.assert_close(whole, alone)


# ---- losses --------------------------------------------------------------------------------------

@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.7])
def test_gtpo_loss_brute_force(gamma):
    """Value and gradient for small groups, on-policy and off-policy. Guards: reports of "the loss
    is 0" where its gradient is not; a tied group without its entropy term; conflicts that filtered
    completions do not cause."""
    rng = random.Random(gamma)
    torch.manual_seed(0)
    for n in range(50):
        completions, advantages = random_group(rng)
        ids, mask = pad(completions, length=rng.randint(0, 8))
        H = [rng.choice([0.1, 0.5, 0.72, 2.0]) for _ in completions]
        H_ini = rng.choice([0.2, 0.5, 0.9])
        logps = -torch.rand(ids.shape, dtype=torch.float64)
        old = logps + (n % 2) * 0.3 * torch.randn_like(logps)

        def J(at):  # with plain floats; the policy that sampled stays
            ratios = (at - old).exp().tolist()
            return brute_objective(completions, advantages, H, H_ini, ratios, gamma)

        A, mean_H = torch.tensor([advantages, H], dtype=torch.float64)
        rest = ids, mask, A, mean_H, H_ini, old if n % 2 else None, gamma
        loss = gtpo.gtpo_loss(logps.requires_grad_(), *rest)
        assert loss.item() == pytest.approx(-J(logps.detach()), abs=1e-9)
        loss.backward()
        assert not logps.grad[~mask].any()
        for place in rng.sample(range(logps.numel()), min(3, logps.numel())):
            step = torch.zeros_like(old)
            step.view(-1)[place] = 1e-4
            slope = (J(logps.detach() + step) - J(logps.detach() - step)) / 2e-4
            assert -logps.grad.view(-1)[place].item() == pytest.approx(slope, abs=1e-5)


def test_gtpo_loss_of_the_fixtures(monkeypatch):
    """<H>, delta, lambda, the loss and the gradient of the hidden states: by gtpo_loss with all
    logits, and by the pieces and logprobs.head_loss, a few tokens at a time."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 200)
    z = np.load(FIXTURES / "gtpo/loss.npz")
    for c in z["cases"]:
        get = lambda key: torch.from_numpy(z[f"{c}/{key}"])
        ids, mask, head, A = get("ids"), get("mask").bool(), get("lm_head"), get("advantages")
        states, H_ini = get("hidden").requires_grad_(), float(z[f"{c}/h_ini"])
        hidden = states[:, : ids.shape[1]]  # (G, L, H)
        every = logprobs.log_probs(hidden.flatten(0, 1), head).view(*ids.shape, -1)  # (G, L, V)
        logps = every.gather(-1, ids[..., None] % len(head))[..., 0]
        H = gtpo.mean_entropy(logprobs.entropy(every), mask)
        torch.testing.assert_close(H.detach(), get("paper_entropy"), atol=1e-5, rtol=1e-5)
        delta, lam = gtpo.keep_completions(H, H_ini), gtpo.conflict_weights(ids, mask, A)
        assert torch.equal(delta, get("paper_delta")) and torch.equal(lam, get("paper_lambda"))
        old = get("old_logps") if f"{c}/old_logps" in z.files else logps.detach()
        weights = gtpo.token_weights(A - 0.1 * H, mask, lam, delta)
        for loss in (gtpo.gtpo_loss(logps, ids, mask, A, H, H_ini, old),
                     logprobs.head_loss(hidden[mask], head, ids[mask], gtpo.surrogate_loss,
                                        [weights[mask], old[mask]])[0]):
            torch.testing.assert_close(loss.detach(), get("paper_loss"), atol=1e-5, rtol=1e-5)
            (grad,) = torch.autograd.grad(loss, states, retain_graph=True)  # none through H
            torch.testing.assert_close(grad, get("paper_grad_hidden"), atol=1e-6, rtol=1e-4)


def test_grpo_loss_of_the_fixtures():
    """TRL's loss_type grpo, on- and off-policy, with and without the KL term."""
    z = np.load(FIXTURES / "grpo/loss.npz")
    names = "per_token_logps completion_mask advantages old_per_token_logps ref_per_token_logps"
    for c in z["cases"]:
        there = [f"{c}/{name}" if f"{c}/{name}" in z.files else None for name in names.split()]
        tensors = [torch.from_numpy(z[name]) if name else None for name in there]
        loss = gtpo.grpo_loss(*tensors, float(z[f"{c}/beta"]), float(z[f"{c}/epsilon"]))
        expected = torch.from_numpy(z[f"{c}/loss/grpo"])
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    assert {float(z[f"{c}/beta"]) > 0 for c in z["cases"]} == {False, True}


def test_clipped_ratio_by_hand():
    """r = 0.5, 1, 1.5 and epsilon 0.2: for w > 0 the gain stops at 1.2 w, for w < 0 it cannot fall
    below 0.8 w. Without epsilon nothing is clipped; of an unchanged policy nothing either."""
    old = torch.zeros(1, 3)
    logps = torch.tensor([[0.5, 1.0, 1.5]]).log().requires_grad_()
    for w, gain, slope in ((2.0, [1.0, 2.0, 2.4], [1.0, 2.0, 0.0]),
                           (-2.0, [-1.6, -2.0, -3.0], [0.0, -2.0, -3.0])):
        weights = torch.full((1, 3), w)
        loss = gtpo.surrogate_loss(logps, weights, old, epsilon=0.2)
        assert loss.item() == pytest.approx(-sum(gain))
        torch.testing.assert_close(torch.autograd.grad(loss, logps)[0], -torch.tensor([slope]))
        assert gtpo.surrogate_loss(logps, weights, old).item() == pytest.approx(-w * 3.0)
        for epsilon in (0.0, 0.2):  # ratio 1
            loss = gtpo.surrogate_loss(logps, weights, logps.detach(), epsilon)
            assert loss.item() == -3 * w
            assert torch.equal(torch.autograd.grad(loss, logps)[0], -weights)


def test_kl_by_hand():
    """k3 of d = ln 2 is 2 - ln 2 - 1, of 0 it is 0: mean over 2 and 1 tokens, then over 2
    completions; padding stays out, a weight of 0 does not keep the KL out."""
    k3 = 1 - LN2
    kl = gtpo.kl_k3(torch.tensor([0.0, -1]), torch.tensor([LN2, -1]))
    assert kl.tolist() == pytest.approx([k3, 0])
    ref = torch.tensor([[LN2, 0.0, NAN], [LN2, INF, NAN]])
    logps = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss = gtpo.grpo_loss(logps, mask, torch.zeros(2), ref_logps=ref, beta=0.5)
    assert loss.item() == pytest.approx(0.5 * (k3 / 2 + k3) / 2)
    loss.backward()  # of each token beta (1 - e^d) / (2 |o_i|)
    assert logps.grad.tolist() == [[-0.125, 0, 0], [-0.25, 0, 0]]
    with pytest.raises(ValueError, match="beta is 0.1 but there are no ref_logps"):
        gtpo.grpo_loss(logps, mask, torch.ones(2), beta=0.1)


@pytest.mark.parametrize("junk", [NAN, -INF, INF, 1e30])
@pytest.mark.parametrize("off_policy", [False, True])
def test_padding_may_hold_anything(junk, off_policy):
    """Guards: 0 * nan, in the value or, after a where that comes too late, in the gradient."""
    ids, mask = pad([[1, 2, 3], [1, 4], []])
    A, H = torch.tensor([1.0, -1, 0]), torch.tensor([0.2, 0.3, 0.0])
    results = []
    for padding in (0.0, junk):
        filled = lambda x: torch.full((3, 3), x).masked_fill(~mask, padding)
        logps, old = filled(-1.0).requires_grad_(), filled(-1.5) if off_policy else None
        losses = (gtpo.gtpo_loss(logps, ids, mask, A, H, 0.5, old),
                  gtpo.grpo_loss(logps, mask, A, old, filled(-1.2), 0.1))
        results.append([*losses, *torch.autograd.grad(sum(losses), logps)])
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty) and dirty.isfinite().all()


def test_a_nan_of_a_real_token_is_not_hidden():
    logps = torch.tensor([[-1.0, NAN], [-1, -1]])
    assert gtpo.grpo_loss(logps, torch.ones(2, 2), torch.tensor([1.0, -1])).isnan()


@pytest.mark.parametrize("L, H", [(0, 0.1), (3, 9.0)])
def test_nothing_left_to_learn_from(L, H):
    """Guards: no completion tokens at all (trouble in argmax, 0/0); a process whose completions are
    all filtered has no graph, and the others wait for its gradient."""
    logps, mask = torch.randn(2, L, requires_grad=True), torch.ones(2, L, dtype=torch.bool)
    A = torch.tensor([1.0, -1.0])
    loss = gtpo.gtpo_loss(logps, torch.zeros(2, L), mask, A, torch.full((2,), H), 0.1)
    loss.backward()
    assert loss.item() == 0 and torch.equal(logps.grad, torch.zeros(2, L))
    empty = torch.zeros(2, 0)
    assert gtpo.grpo_loss(empty, empty, torch.ones(2), ref_logps=empty, beta=0.1).item() == 0
    assert gtpo.mean_entropy(empty, empty).tolist() == [0, 0]
