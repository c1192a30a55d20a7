"""gtpo.py against brute force written from the equations of its docstring, hand-worked values, and the fixtures: masks and losses of an
independent implementation of the published formula (fixtures/gtpo), advantages and losses of TRL (fixtures/grpo)."""
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gtpo

FIXTURES = Path(__file__).parent / "fixtures"
NAN, INF = float("nan"), float("inf")


def pad(completions, pad_id=0, length=None):
    """Lists of token ids -> ids, mask (G, L), right-padded."""
    L = max([len(c) for c in completions] + [length or 0])
    ids = torch.tensor([c + [pad_id] * (L - len(c)) for c in completions], dtype=torch.long).view(len(completions), L)
    mask = torch.tensor([[t < len(c) for t in range(L)] for c in completions], dtype=torch.bool).view(len(completions), L)
    return ids, mask


def lambdas(completions, advantages, **kw):
    """conflict_weights of lists, as lists without padding."""
    ids, mask = pad(completions, **kw)
    lam = gtpo.conflict_weights(ids, mask, torch.tensor(advantages, dtype=torch.float32))
    assert lam.is_floating_point() and not lam[~mask].any()
    return [lam[i, : len(c)].tolist() for i, c in enumerate(completions)]


def brute_lambda(completions, advantages):
    """The definition, one token at a time."""
    sign = [0 if abs(a) < 1e-6 else (1 if a > 0 else -1) for a in advantages]
    result = []
    for i, own in enumerate(completions):
        others = [o for o, s in zip(completions, sign) if s * sign[i] < 0]
        n = len(own)
        from_start = [any(len(o) > t and o[t] == own[t] for o in others) for t in range(n)]
        from_end = [any(len(o) >= n - t and o[len(o) - (n - t)] == own[t] for o in others) for t in range(n)]
        conflict = [all(from_start[: t + 1]) or all(from_end[t:]) for t in range(n)]
        result.append([1.0 + sign[i] if c else 1.0 for c in conflict])
    return result


def brute_objective(completions, advantages, H, H_ini, ratios, gamma=0.1, conflict=True, entropy_filter=True, threshold=math.log(2),
                    filter_negative_only=False):
    """J, equations (2), (4), (5), (7), in plain Python floats."""
    J = 0.0
    for i, (lam, ratio) in enumerate(zip(brute_lambda(completions, advantages), ratios)):
        delta = 0 if H_ini < threshold and H[i] > threshold else 1
        if not entropy_filter or (filter_negative_only and advantages[i] > -1e-6):
            delta = 1
        for t in range(len(lam)):
            J += delta * (advantages[i] - gamma * H[i]) / len(lam) * ratio[t] * (lam[t] if conflict else 1) / len(completions)
    return J


def random_group(rng, ties=True):
    """A small group with a small vocabulary, so with many conflicts: completions (G lists of 0 to 8 ids) and advantages."""
    G, V = rng.randint(1, 6), rng.randint(1, 4)
    stem = [rng.randrange(V) for _ in range(8)]
    completions = []
    for _ in range(G):
        own = [rng.randrange(V) for _ in range(rng.randint(0, 8))]
        head, tail = rng.randint(0, len(own)), rng.randint(0, len(own))
        own[:head] = stem[:head]
        own[len(own) - tail :] = stem[8 - tail :]
        completions.append(own)
    advantages = [rng.choice([-1.5, -0.25, 0.5, 2.0] + ([0.0, 5e-7, -5e-7] if ties else [])) for _ in range(G)]
    return completions, advantages


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation makes, in elements, the largest matrix product, and how many of these there are."""
    elements = product = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__:
            self.products, self.product = self.products + 1, max(self.product, out.numel())
        self.elements = max([self.elements] + [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)])
        return out


# ---- advantages -------------------------------------------------------------------------------------------------------------------------------

def test_advantages_as_trl():
    cases = json.loads((FIXTURES / "grpo/advantages.json").read_text())["cases"]
    scales = {"group": "std", "none": "none"}
    for c in cases:
        if c["scale_rewards"] in scales:
            rewards = torch.tensor(c["rewards"]).view(-1, c["num_generations"])
            advantages = gtpo.group_advantages(rewards, scale=scales[c["scale_rewards"]])
            torch.testing.assert_close(advantages.flatten(), torch.tensor(c["advantages"]), atol=1e-4, rtol=1e-5)


def test_advantages_by_hand():
    """Guards: population deviation or none where the sample deviation is meant (unsloth-zoo PR 832); prompts that compete with each other because
    the mean is that of the whole batch."""
    assert gtpo.group_advantages(torch.tensor([20.0, 10, 10, 0])).tolist() == [10, 0, 0, -10]
    std = gtpo.group_advantages(torch.tensor([20.0, 10, 10, 0]), scale="std")
    torch.testing.assert_close(std, torch.tensor([1.22473, 0, 0, -1.22473]), atol=2e-5, rtol=0)
    tiny = gtpo.group_advantages(torch.tensor([2e-4, 0.0]), scale="std")  # 1e-4 / (sqrt(2) * 1e-4 + 1e-4)
    torch.testing.assert_close(tiny, torch.tensor([0.41421, -0.41421]), atol=1e-4, rtol=0)
    assert gtpo.group_advantages(torch.tensor([[20.0, 10], [0, 0]])).tolist() == [[5, -5], [0, 0]]
    assert gtpo.group_advantages(torch.tensor([3, 1])).tolist() == [1.0, -1.0]  # whole numbers
    assert gtpo.group_advantages(torch.ones(2, 3, 4)).shape == (2, 3, 4)


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1e6 + 0.3, 20.1, -1.1, 0.0])
def test_equal_rewards_have_no_sign(reward, dtype, scale):
    """Guards: seven equal rewards of 0.1 leave a residue in r - mean(r), the group is taken as all negative; 0/0 in the normalised form."""
    for G in (1, 3, 7, 12):
        advantages = gtpo.group_advantages(torch.full((G,), reward, dtype=dtype), scale)
        assert advantages.dtype == dtype and gtpo.advantage_sign(advantages).tolist() == [0] * G
        assert advantages.abs().max() < 1e-6


def test_reward_at_the_mean_has_no_sign_and_small_differences_do():
    """Guards: in float32 the rounding of 20.1 alone is above the tolerance of 1e-6."""
    for rewards in ([0.1, 0.2, 0.3], [10.1, 15.1, 20.1], [1e5 + 0.1, 1e5 + 0.2, 1e5 + 0.3]):
        assert gtpo.advantage_sign(gtpo.group_advantages(torch.tensor(rewards))).tolist() == [-1, 0, 1]
    assert gtpo.group_advantages(torch.tensor([1e6, 1e6 + 0.5])).tolist() == [-0.25, 0.25]
    assert gtpo.advantage_sign(torch.tensor([9e-7, -9e-7, 2e-6, -2e-6, -3.0])).tolist() == [0, 0, 1, -1, -1]


def test_bad_rewards():
    with pytest.raises(ValueError, match=r"rewards\[1, 0\] is nan"):
        gtpo.group_advantages(torch.tensor([[1.0, 2], [NAN, 1]]))
    with pytest.raises(ValueError, match="inf"):
        gtpo.group_advantages(torch.tensor([1.0, -INF]))
    with pytest.raises(ValueError, match="'batch'"):
        gtpo.group_advantages(torch.ones(2), scale="batch")
    for empty in (torch.ones(2, 0), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="no group"):
            gtpo.group_advantages(empty)


# ---- conflict tokens --------------------------------------------------------------------------------------------------------------------------

def test_lambda_of_the_fixtures():
    cases = json.loads((FIXTURES / "gtpo/masks.json").read_text())["cases"]
    assert len(cases) > 30
    for c in cases:
        ids, mask = torch.tensor(c["ids"]), torch.tensor(c["mask"])
        lam = gtpo.conflict_weights(ids, mask, torch.tensor(c["advantages"]))
        assert lam.tolist() == c["paper"]["lam"], c["note"]


@pytest.mark.parametrize("completions, advantages, expected", [
    # the example of the module's docstring
    ([[5, 6, 7, 8, 2], [5, 6, 9, 2], [5, 6, 7, 2]], [10, -10, 0], [[2, 2, 1, 1, 2], [0, 0, 1, 0], [1, 1, 1, 1]]),
    # Guards: the suffix run counted in text order
    ([[1, 2, 3, 7, 8], [1, 2, 4, 7, 8]], [1, -1], [[2, 2, 1, 2, 2], [0, 0, 1, 0, 0]]),
    # Guards: weight 4 where both runs meet
    ([[1, 2, 1], [1, 2, 2, 1]], [1, -1], [[2, 2, 2], [0, 0, 0, 0]]),
    # Guards: an id that is also the pad id somewhere is taken out of the run
    ([[9, 2, 3], [9, 2, 4]], [1, -1], [[2, 2, 1], [0, 0, 1]]),
    # id 0 is a token like any other; the run does not go on after a gap
    ([[0, 1, 0, 0, 5], [0, 2, 0, 0, 6]], [1, -1], [[2, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
    # each completion has its own runs: the first ends where the second goes on with the third
    ([[1, 2, 3], [1, 5, 6], [1, 5, 7]], [1, 1, -1], [[2, 1, 1], [2, 2, 1], [0, 0, 1]]),
    # one sign only, a single completion, an empty one
    ([[1, 2], [1, 2]], [1, 1], [[1, 1], [1, 1]]),
    ([[1, 2]], [-1], [[1, 1]]),
    ([[1, 2], []], [1, -1], [[1, 1], []]),
])
def test_lambda_by_hand(completions, advantages, expected):
    assert lambdas(completions, advantages) == expected == brute_lambda(completions, advantages)


def test_padding_is_what_the_mask_says():
    """Guards: the end token has the pad id and a mask is made by comparing ids, so that the model never learns to stop; the sampled end token is
    dropped before the loss. Completions of 3, pad = end token = 2."""
    completions = [[7, 8, 2], [7, 9, 2]]
    assert lambdas(completions, [1, -1], pad_id=2, length=5) == [[2, 1, 2], [0, 1, 0]]
    _, mask = pad(completions, length=5)
    weights = gtpo.grpo_weights(mask, torch.tensor([3.0, -3.0]))
    assert weights[0].tolist() == [0.5, 0.5, 0.5, 0, 0]  # 3 / (2 * 3): the end token counts


def test_lambda_brute_force_and_properties():
    rng = random.Random(0)
    seen = set()
    for _ in range(400):
        completions, advantages = random_group(rng)
        expected = brute_lambda(completions, advantages)
        seen |= {x for row in expected for x in row}
        assert lambdas(completions, advantages) == expected
        assert lambdas(completions, advantages, pad_id=rng.choice([-1, 0, 3, 151_935]), length=11) == expected
        order = rng.sample(range(len(completions)), len(completions))
        assert lambdas([completions[i] for i in order], [advantages[i] for i in order]) == [expected[i] for i in order]
        flipped = [[2.0 - x for x in row] for row in expected]
        assert lambdas(completions, [-a for a in advantages]) == flipped
    assert seen == {0.0, 1.0, 2.0}


def test_weights_batched_over_leading_dimensions():
    rng = random.Random(1)
    torch.manual_seed(0)
    ids, lengths = torch.randint(0, 3, (2, 3, 4, 6)), torch.randint(0, 7, (2, 3, 4, 1))
    mask, advantages, H = torch.arange(6) < lengths, torch.randn(2, 3, 4), torch.rand(2, 3, 4)
    batched = gtpo.gtpo_weights(ids, mask, advantages, H, 0.5)
    lam = gtpo.conflict_weights(ids, mask, advantages)
    for p in range(2):
        for q in range(3):
            at = (p, q)
            assert torch.equal(lam[at], gtpo.conflict_weights(ids[at], mask[at], advantages[at]))
            assert torch.equal(batched[at], gtpo.gtpo_weights(ids[at], mask[at], advantages[at], H[at], 0.5))
    logps = torch.randn(2, 3, 4, 6)
    each = [gtpo.gtpo_loss(logps[p, q], ids[p, q], mask[p, q], advantages[p, q], H[p, q], 0.5) for p in range(2) for q in range(3)]
    torch.testing.assert_close(gtpo.gtpo_loss(logps, ids, mask, advantages, H, 0.5), torch.stack(each).mean())
    each = [gtpo.grpo_loss(logps[p, q], mask[p, q], advantages[p, q]) for p in range(2) for q in range(3)]
    torch.testing.assert_close(gtpo.grpo_loss(logps, mask, advantages), torch.stack(each).mean())


def test_conflicts_need_no_vocabulary_sized_memory():
    """Guards: histograms of vocabulary x length, 2.5 GB each at the sizes of Qwen."""
    ids, mask = torch.randint(0, 151_936, (4, 2048)), torch.ones(4, 2048, dtype=torch.bool)
    with Largest() as largest:
        gtpo.conflict_weights(ids, mask, torch.tensor([1.0, -1, 1, -1]))
    assert largest.elements <= 4 * 2049


def test_bad_masks_and_shapes():
    mask = torch.tensor([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 0, 1]]])
    for call in (lambda: gtpo.conflict_weights(mask, mask, torch.ones(2, 2)), lambda: gtpo.grpo_weights(mask, torch.ones(2, 2)),
                 lambda: gtpo.mean_entropy(torch.ones(2, 2, 3), mask),
                 lambda: gtpo.gtpo_weights(mask, mask, torch.ones(2, 2), torch.ones(2, 2), 0.5, conflict=False)):
        with pytest.raises(ValueError, match=r"row \[1, 1\].*right-padded"):
            call()
    with pytest.raises(ValueError, match="row"):
        gtpo.conflict_weights(torch.ones(1, 3), torch.tensor([[False, True, True]]), torch.ones(1))  # left-padded
    ids = torch.ones(2, 3, dtype=torch.long)
    for shapes in ((ids, ids[:, :2].bool(), torch.ones(2)), (ids, ids.bool(), torch.ones(3)), (ids, ids.bool(), torch.ones(2, 1))):
        with pytest.raises(ValueError, match="one shape"):
            gtpo.conflict_weights(*shapes)
    with pytest.raises(ValueError, match="shapes must be equal"):
        gtpo.surrogate_loss(torch.ones(2, 3), torch.ones(3))


# ---- entropy filter and weights ---------------------------------------------------------------------------------------------------------------

def test_keep_completions():
    """Guards: the filter without its branch on the initial entropy, so that a model that starts above ln 2 gets no gradient; 0.7 for ln 2."""
    for initial, H, delta in ((0.9, 0.8, 1), (0.5, 0.8, 0), (0.5, 0.69, 1), (0.5, 0.695, 0), (0.5, math.log(2), 1), (math.log(2), 0.8, 1)):
        assert gtpo.keep_completions(torch.tensor([H]), initial).tolist() == [delta], (initial, H)
        assert gtpo.keep_completions(torch.tensor([H]), torch.tensor(initial)).tolist() == [delta], (initial, H)
    assert gtpo.keep_completions(torch.tensor([[0.3, 0.5]]), 0.2, threshold=0.4).tolist() == [[1, 0]]


def test_mean_entropy_leaves_padding_out():
    """Guards: padding in the mean: 2.65 instead of 0.3, and the filter drops a good completion."""
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    H = gtpo.mean_entropy(torch.tensor([[0.2, 0.4, 5, NAN], [1, 1, 1, 1], [1, 2, 3, 4]]), mask)
    torch.testing.assert_close(H, torch.tensor([0.3, 0, 2.5]))


SWITCHES = [{}, {"gamma": 0.0}, {"gamma": 0.7}, {"conflict": False}, {"entropy_filter": False}, {"threshold": 0.3}, {"filter_negative_only": True},
            {"conflict": False, "entropy_filter": False, "gamma": 0.0}, {"entropy_filter": False, "filter_negative_only": True}]


def test_gtpo_loss_brute_force():
    """Value and gradient, each switch, on-policy (ratio 1) and off-policy, for random small groups. d J / d logp_it = w_it r_it."""
    rng = random.Random(2)
    for n in range(270):
        completions, advantages = random_group(rng)
        switches = SWITCHES[n % len(SWITCHES)]
        ids, mask = pad(completions, length=rng.randint(0, 8))
        H = [rng.choice([0.1, 0.5, 0.72, 2.0]) for _ in completions]
        H_ini = rng.choice([0.2, 0.5, 0.9])
        logps = -torch.rand(ids.shape, dtype=torch.float64)
        old = None if n % 2 else logps + 0.3 * torch.randn_like(logps)
        logps.requires_grad_()

        def J(at):  # with plain floats
            now, before = at.tolist(), (at if old is None else old).tolist()
            ratios = [[math.exp(now[i][t] - before[i][t]) for t in range(len(c))] for i, c in enumerate(completions)]
            return brute_objective(completions, advantages, H, H_ini, ratios, **switches)

        loss = gtpo.gtpo_loss(logps, ids, mask, torch.tensor(advantages, dtype=torch.float64), torch.tensor(H, dtype=torch.float64), H_ini,
                              old_logps=old, **switches)
        assert loss.item() == pytest.approx(-J(logps.detach()), abs=1e-9)
        loss.backward()
        assert not logps.grad[~mask].any()
        old = logps.detach().clone() if old is None else old  # differences: the ratio is to a fixed policy
        for _ in range(3):
            if logps.numel():
                step = torch.zeros_like(logps).detach()
                step.view(-1)[rng.randrange(step.numel())] = 1e-4
                slope = (J(logps.detach() + step) - J(logps.detach() - step)) / 2e-4
                assert -(logps.grad * step).sum().item() / 1e-4 == pytest.approx(slope, abs=1e-5)


def test_weights_by_hand():
    """The docstring's numbers."""
    ids, mask = pad([[5, 6, 7, 8, 2], [5, 6, 9, 2], [5, 6, 7, 2]])
    weights = gtpo.gtpo_weights(ids, mask, torch.tensor([10.0, -10, 0]), torch.full((3,), 0.5), 0.4)
    w1, w2, w3 = 9.95 / 15, -10.05 / 12, -0.05 / 12
    torch.testing.assert_close(weights, torch.tensor([[2 * w1, 2 * w1, w1, w1, 2 * w1], [0, 0, w2, 0, 0], [w3] * 4 + [0]]))
    assert round(w1, 3) == 0.663


def test_equal_rewards_keep_the_entropy_term():
    """Guards: a second term that drives a tied group without anyone having said so. As in the formula: A - gamma <H> = -0.05."""
    mask = torch.ones(4, 2, dtype=torch.bool)
    advantages = gtpo.group_advantages(torch.full((4,), 10.0))
    weights = gtpo.gtpo_weights(torch.zeros(4, 2), mask, advantages, torch.full((4,), 0.5), 0.5)
    torch.testing.assert_close(weights, torch.full((4, 2), -0.05 / 8))
    assert not gtpo.grpo_weights(mask, gtpo.group_advantages(torch.full((4,), 10.0), "std")).any()


def test_filtered_completions_still_cause_conflicts():
    ids, mask = pad([[1, 3], [1, 4]])
    weights = gtpo.gtpo_weights(ids, mask, torch.tensor([1.0, -1]), torch.tensor([0.0, 5.0]), 0.1)
    assert weights.tolist() == [[0.5, 0.25], [0, 0]]


def test_all_parts_off_is_grpo_without_division():
    rng = random.Random(3)
    for _ in range(50):
        completions, _ = random_group(rng)
        ids, mask = pad(completions)
        rewards = torch.tensor([float(rng.choice([0, 1, 10, 20])) for _ in completions])
        advantages, H = gtpo.group_advantages(rewards), torch.rand(len(completions)) * 2
        logps = torch.randn(ids.shape, requires_grad=True)
        off = dict(gamma=0.0, conflict=False, entropy_filter=False)
        (a,) = torch.autograd.grad(gtpo.gtpo_loss(logps, ids, mask, advantages, H, 0.5, **off), logps)
        (b,) = torch.autograd.grad(gtpo.grpo_loss(logps, mask, advantages), logps)
        torch.testing.assert_close(a, b)


# ---- losses -----------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("through_token_logps", [False, True])
def test_gtpo_loss_of_the_fixtures(through_token_logps):
    """Loss, <H>, delta, lambda and the gradient to the hidden states, with the logits whole and in chunks."""
    z = np.load(FIXTURES / "gtpo/loss.npz")
    for c in z["cases"]:
        get = lambda key: torch.from_numpy(z[f"{c}/{key}"])
        ids, mask, head = get("ids"), get("mask").bool(), get("lm_head")
        hidden = get("hidden").requires_grad_()
        G, L = ids.shape
        if through_token_logps:
            flat = gtpo.token_logps(hidden[:, :L].reshape(G * L, -1), head, ids.reshape(-1) % len(head), chunk_size=3)
            logps, token_entropy = (x.view(G, L) for x in flat)
        else:
            every = (hidden @ head.T)[:, :L].log_softmax(-1)  # (G, L, V)
            logps, token_entropy = every.gather(-1, ids[..., None] % len(head))[..., 0], -(every.exp() * every).sum(-1)
        H = gtpo.mean_entropy(token_entropy, mask)
        torch.testing.assert_close(H.detach(), get("paper_entropy"), atol=1e-5, rtol=1e-5)
        assert torch.equal(gtpo.keep_completions(H, float(z[f"{c}/h_ini"])), get("paper_delta"))
        assert torch.equal(gtpo.conflict_weights(ids, mask, get("advantages")), get("paper_lambda"))
        old = get("old_logps") if f"{c}/old_logps" in z.files else None
        loss = gtpo.gtpo_loss(logps, ids, mask, get("advantages"), H, float(z[f"{c}/h_ini"]), old_logps=old)
        torch.testing.assert_close(loss.detach(), get("paper_loss"), atol=1e-5, rtol=1e-5)
        loss.backward()  # H carries a graph when the logits are whole: no gradient may flow through it
        torch.testing.assert_close(hidden.grad, get("paper_grad_hidden"), atol=1e-6, rtol=1e-4)


def test_grpo_loss_of_the_fixtures():
    """TRL's loss_type grpo, on- and off-policy, with and without the KL term."""
    z = np.load(FIXTURES / "grpo/loss.npz")
    betas = set()
    for c in z["cases"]:
        get = lambda key: torch.from_numpy(z[f"{c}/{key}"]) if f"{c}/{key}" in z.files else None
        beta = float(z[f"{c}/beta"])
        betas.add(beta > 0)
        loss = gtpo.grpo_loss(get("per_token_logps"), get("completion_mask"), get("advantages"), old_logps=get("old_per_token_logps"),
                              ref_logps=get("ref_per_token_logps"), beta=beta, epsilon=float(z[f"{c}/epsilon"]))
        torch.testing.assert_close(loss, get("loss/grpo"), atol=1e-6, rtol=1e-5)
    assert betas == {False, True}


def test_clipped_ratio_by_hand():
    """r = 0.5, 1, 1.5 and epsilon 0.2: for w > 0 the gain stops at 1.2 w, for w < 0 it cannot fall below 0.8 w."""
    old = torch.zeros(1, 3)
    logps = torch.tensor([[0.5, 1.0, 1.5]]).log().requires_grad_()
    for w, gain, slope in ((2.0, [1.0, 2.0, 2.4], [1.0, 2.0, 0.0]), (-2.0, [-1.6, -2.0, -3.0], [0.0, -2.0, -3.0])):
        weights = torch.full((1, 3), w)
        loss = gtpo.surrogate_loss(logps, weights, old, epsilon=0.2)
        assert loss.item() == pytest.approx(-sum(gain))
        (grad,) = torch.autograd.grad(loss, logps)
        torch.testing.assert_close(grad, -torch.tensor([slope]))
        assert gtpo.surrogate_loss(logps, weights, old).item() == pytest.approx(-w * 3.0)  # GTPO does not clip


def test_kl_by_hand():
    """k3 of d = ln 2 is 2 - ln 2 - 1, of 0 it is 0: mean over 2 and 1 tokens, then over 2 completions; padding stays out."""
    ref = torch.tensor([[math.log(2), 0.0, NAN], [math.log(2), INF, NAN]])
    logps = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    k3 = 1 - math.log(2)
    kl = gtpo.kl_penalty(logps, ref, mask)
    assert kl.item() == pytest.approx((k3 / 2 + k3) / 2)
    kl.backward()
    assert gtpo.kl_tokens(torch.tensor([0.0, -1]), torch.tensor([math.log(2), -1])).tolist() == pytest.approx([k3, 0])
    torch.testing.assert_close(logps.grad, torch.tensor([[-0.25, 0, 0], [-0.5, 0, 0]]))  # (1 - e^d) / (2 |o_i|)
    with pytest.raises(ValueError, match="ref_logps is missing"):
        gtpo.grpo_loss(logps, mask, torch.ones(2), beta=0.1)


def test_loss_zero_gradient_not():
    """Guards: reports of "the loss is 0": rewards [20, 0], equal lengths, no conflict, gamma 0: the value is 0, the gradient is not."""
    logps = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    ids, mask = pad([[1, 2], [3, 4]])
    loss = gtpo.gtpo_loss(logps, ids, mask, gtpo.group_advantages(torch.tensor([20.0, 0.0])), torch.zeros(2), 0.5, gamma=0.0)
    loss.backward()
    assert loss.item() == 0 and logps.grad.tolist() == [[-2.5, -2.5], [2.5, 2.5]]


@pytest.mark.parametrize("loss_name", ["gtpo", "grpo"])
def test_any_micro_batches_give_the_same_gradient(loss_name):
    """Guards: the mean of the micro-batches' means, which depends on their sizes; a divisor that is the planned number of rows when the last
    micro-batch is smaller. 5 completions of lengths 1, 9, 4, 2, 7."""
    torch.manual_seed(0)
    ids, mask = pad([[random.Random(n).randrange(3) for _ in range(n)] for n in (1, 9, 4, 2, 7)])
    advantages, H = gtpo.group_advantages(torch.tensor([20.0, 0, 10, 0, 20])), torch.tensor([0.1, 0.3, 0.9, 0.2, 0.5])
    logps = torch.randn(5, 9, requires_grad=True)
    if loss_name == "gtpo":
        weights, whole = gtpo.gtpo_weights(ids, mask, advantages, H, 0.5), gtpo.gtpo_loss(logps, ids, mask, advantages, H, 0.5)
    else:
        weights, whole = gtpo.grpo_weights(mask, advantages), gtpo.grpo_loss(logps, mask, advantages)
    assert not weights.requires_grad
    (expected,) = torch.autograd.grad(whole, logps)
    for rows in ([[0, 1], [2, 3], [4]], [[4], [0, 2, 1, 3]], [[0], [1], [2], [3], [4]]):
        logps.grad, total = None, 0
        for r in rows:
            loss = gtpo.surrogate_loss(logps[r], weights[r])
            loss.backward()
            total += loss.item()
        torch.testing.assert_close(logps.grad, expected)
        assert total == pytest.approx(whole.item(), abs=1e-5)


@pytest.mark.parametrize("junk", [NAN, -INF, INF, 1e30])
@pytest.mark.parametrize("off_policy", [False, True])
def test_padding_may_hold_anything(junk, off_policy):
    """Guards: 0 * nan, in the value or, after a where that comes too late, in the gradient."""
    ids, mask = pad([[1, 2, 3], [1, 4], []])
    advantages, H = torch.tensor([1.0, -1, 0]), torch.tensor([0.2, 0.3, 0.0])
    results = []
    for padding in (0.0, junk):
        logps = torch.full((3, 3), -1.0).masked_fill(~mask, padding).requires_grad_()
        old = torch.full((3, 3), -1.5).masked_fill(~mask, padding) if off_policy else None
        losses = gtpo.gtpo_loss(logps, ids, mask, advantages, H, 0.5, old), gtpo.grpo_loss(logps, mask, advantages, old, logps.detach() * 1.5, 0.1)
        results.append([*losses, *torch.autograd.grad(sum(losses), logps)])
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty) and dirty.isfinite().all()


def test_a_nan_of_a_real_token_is_not_hidden():
    logps = torch.tensor([[-1.0, NAN], [-1, -1]])
    assert gtpo.grpo_loss(logps, torch.ones(2, 2), torch.tensor([1.0, -1])).isnan()


def test_nothing_left_to_learn_from():
    """Guards: no completion tokens at all (trouble in argmax, 0/0); a rank whose completions are all filtered skips backward and the others
    wait for it. The loss is 0 and has a graph."""
    for G, L, H in ((2, 0, 0.1), (2, 3, 9.0)):
        logps = torch.randn(G, L, requires_grad=True)
        mask, advantages = torch.ones(G, L, dtype=torch.bool), torch.tensor([1.0, -1.0])
        loss = gtpo.gtpo_loss(logps, torch.zeros(G, L), mask, advantages, torch.full((G,), H), 0.1)
        loss.backward()
        assert loss.item() == 0 and logps.grad.shape == (G, L) and not logps.grad.any()
    empty = torch.zeros(2, 0)
    assert gtpo.grpo_loss(empty, empty, torch.ones(2), ref_logps=empty, beta=0.1).item() == 0
    assert gtpo.mean_entropy(empty, empty).tolist() == [0, 0]


# ---- token_logps ------------------------------------------------------------------------------------------------------------------------------

def whole(hidden, head, ids, temperature=1.0):
    """Log-probs and entropies from all logits at once, by autograd."""
    every = (hidden @ head.T / temperature).log_softmax(-1)  # (N, V)
    return every.gather(-1, ids[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.fixture
def small(monkeypatch):
    """N = 7, V = 11, H = 5, float64; blocks of the vocabulary so small that the head's gradient needs several, the last one shorter."""
    monkeypatch.setattr(gtpo, "CHUNK_ELEMENTS", 30)
    torch.manual_seed(0)
    return torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64), torch.tensor([0, 10, 3, 6, 7, 1, 9])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("trained", ["hidden", "head", "both"])
def test_token_logps_gradients(small, trained, chunk_size, temperature):
    hidden, head, ids = small
    hidden.requires_grad_(trained != "head"), head.requires_grad_(trained != "hidden")
    logps, entropy = gtpo.token_logps(hidden, head, ids, temperature, chunk_size)
    expected, expected_entropy = whole(hidden, head, ids, temperature)
    torch.testing.assert_close((logps, entropy), (expected, expected_entropy.detach()))
    assert logps.requires_grad and not entropy.requires_grad
    weights = torch.tensor([1.0, -2, 0, 0.5, 0, 3, -1], dtype=torch.float64)  # tokens of weight 0 are left out of the head's gradient
    inputs = [x for x in (hidden, head) if x.requires_grad]
    ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (logps, expected))
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(lambda h, W: gtpo.token_logps(h, W, ids, temperature, chunk_size)[0], (hidden, head))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_head_gradient_in_one_pass(small, dtype, chunk_size, temperature):
    """With d loss / d logps known beforehand the gradients are the same, in three products a chunk. What arrives counts: another gradient, and a
    second backward pass, are served by a second look, whatever became of the hint and of what was given away."""
    hidden, head, ids = (x.to(dtype) if x.is_floating_point() else x for x in small)
    weights = torch.tensor([1.0, -2, 0, 0.5, 0, 3, -1], dtype=dtype)
    logps = whole(hidden.requires_grad_(), head.requires_grad_(), ids, temperature)[0]
    gradients = lambda logps, w: torch.autograd.grad((logps * w).sum(), (hidden, head), retain_graph=True)
    for arrives in (weights, weights * 1.005, weights.roll(1)):  # the last has its zeros elsewhere
        hint = weights.clone()
        with Largest() as largest:
            ours, _ = gtpo.token_logps(hidden, head, ids, temperature, chunk_size, expected_grad=hint)
            hint.mul_(2)
            first = gradients(ours, arrives)
        torch.testing.assert_close(first, gradients(logps, arrives), rtol=1e-5, atol=1e-6)
        chunks = -(-7 // chunk_size)
        assert largest.products == 3 * chunks if arrives is weights else largest.products > 3 * chunks
        first[1].zero_()
        torch.testing.assert_close(gradients(ours, weights), gradients(logps, weights))
    alone, _ = gtpo.token_logps(hidden.detach(), head, ids, temperature, chunk_size, weights)
    torch.testing.assert_close(torch.autograd.grad((alone * weights).sum(), head)[0], gradients(logps, weights)[1])


@pytest.mark.parametrize("hidden_type, head_type, autocast", [
    (torch.bfloat16, torch.float32, False), (torch.float32, torch.bfloat16, False), (torch.float16, torch.float16, False),
    (torch.float32, torch.float32, True)])
def test_one_pass_is_for_full_precision(small, hidden_type, head_type, autocast):
    """In shorter types the chunks' products would be rounded one by one: there the gradient is that without the hint, bit for bit."""
    hidden, head, ids = small[0].to(hidden_type), small[1].to(head_type).requires_grad_(), small[2]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        gradients = [torch.autograd.grad(gtpo.token_logps(hidden, head, ids, chunk_size=2, expected_grad=hint)[0].sum(), head)[0]
                     for hint in (None, torch.ones(7))]
    assert torch.equal(*gradients)


def test_the_hint_may_have_another_type(small):
    hidden, head, ids = small[0].float(), small[1].float().requires_grad_(), small[2]
    gradients = [torch.autograd.grad(gtpo.token_logps(hidden, head, ids, chunk_size=2, expected_grad=hint)[0].sum(), head)[0]
                 for hint in (torch.ones(7), torch.ones(7, dtype=torch.float64), torch.ones(7, dtype=torch.long), torch.ones(7, requires_grad=True))]
    assert all(torch.equal(g, gradients[0]) for g in gradients)


def test_token_logps_by_hand():
    """Guards: sampling at one temperature and scoring at another; log-probs renormalised over the kept ids; log-probs one token off."""
    one = lambda logits, id, T=1.0: [x.item() for x in gtpo.token_logps(torch.ones(1, 1), torch.tensor(logits)[:, None], torch.tensor([id]), T)]
    assert one([0.0, 1.0], 1, T=0.5)[0] == pytest.approx(-0.126928, abs=1e-6)
    assert one([0.0, 1.0], 1)[0] == pytest.approx(-0.313262, abs=1e-6)
    assert one([2.0, 1.0, 0.0], 0)[0] == pytest.approx(-0.407606, abs=1e-6)
    assert one([3.0, 3.0], 0)[1] == pytest.approx(math.log(2), abs=1e-6)
    assert one([0.0] * 8, 5, T=3.0) == pytest.approx([-math.log(8), math.log(8)], abs=1e-6)
    logps, entropy = gtpo.token_logps(torch.eye(3) * 100, torch.eye(3), torch.tensor([0, 1, 2]))
    assert logps.tolist() == [0, 0, 0] and entropy.abs().max() < 1e-6
    assert gtpo.token_logps(torch.eye(3) * 100, torch.eye(3), torch.tensor([1, 2, 0]))[0].tolist() == [-100] * 3


def test_entropy_of_impossible_tokens():
    """Guards: 0 * -inf. Logits [1, 1, 1, -inf] have entropy ln 3, and finite gradients."""
    head = torch.tensor([[1.0], [1], [1], [-INF]], requires_grad=True)
    logps, entropy = gtpo.token_logps(torch.ones(1, 1), head, torch.tensor([2]))
    assert entropy.item() == pytest.approx(1.098612, abs=1e-6) and logps.item() == pytest.approx(-1.098612, abs=1e-6)
    logps.sum().backward()
    torch.testing.assert_close(head.grad[:, 0], torch.tensor([-1 / 3, -1 / 3, 2 / 3, 0]))


def test_confident_tokens_keep_their_gradient_in_bf16():
    """Guards: onehot - p taken after rounding to bf16, where 0.999 is 1 and the gradient vanishes. Here p = 1 - 0.00091."""
    hidden, head = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[7.0], [0.0]], dtype=torch.bfloat16)
    for x in (hidden.requires_grad_(), head.requires_grad_()):
        (grad,) = torch.autograd.grad(gtpo.token_logps(hidden, head, torch.tensor([0]))[0].sum(), x)
        torch.testing.assert_close(grad[0], torch.tensor([7 * 0.000911 if x is hidden else 0.000911], dtype=torch.bfloat16), rtol=0.01, atol=0)


@pytest.mark.parametrize("mode", ["bf16", "bf16 hidden", "autocast"])
def test_token_logps_in_bf16(small, mode):
    """Products in bf16, softmax and entropy in float32, gradients in the parameters' dtype; near the float64 values."""
    hidden, head, ids = small
    expected, expected_entropy = whole(hidden.requires_grad_(), head.requires_grad_(), ids)
    gradients = torch.autograd.grad(expected.sum(), (hidden, head))
    h = hidden.detach().to(torch.float32 if mode == "autocast" else torch.bfloat16).requires_grad_()
    W = head.detach().to(torch.bfloat16 if mode == "bf16" else torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
        logps, entropy = gtpo.token_logps(h, W, ids, chunk_size=2)
        assert logps.dtype == entropy.dtype == torch.float32
        assert logps.sum().item() != pytest.approx(expected.sum().item(), abs=1e-5)  # the products are indeed in bf16
        ours = torch.autograd.grad(logps.sum(), (h, W))
    torch.testing.assert_close(logps, expected.float(), atol=0.06, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=0.06, rtol=0)
    for g, x, e in zip(ours, (h, W), gradients):
        assert g.dtype == x.dtype and (g.double() - e).norm() < 0.03 * e.norm()


def test_backward_under_autocast_keeps_the_forward_dtype(small):
    hidden, head, ids = (x.float() if x.is_floating_point() else x for x in small)
    expected = torch.autograd.grad(whole(hidden.requires_grad_(), head.requires_grad_(), ids)[0].sum(), (hidden, head))
    logps, _ = gtpo.token_logps(hidden, head, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(torch.autograd.grad(logps.sum(), (hidden, head)), expected)


def test_float32_softmax_of_bf16_logits():
    """4096 equal logits: in bf16 the sum of the probabilities would stop growing at 256."""
    logps, entropy = gtpo.token_logps(torch.zeros(1, 2, dtype=torch.bfloat16), torch.zeros(4096, 2, dtype=torch.bfloat16), torch.tensor([5]))
    assert logps.item() == pytest.approx(-math.log(4096), abs=1e-5) and entropy.item() == pytest.approx(math.log(4096), abs=1e-4)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("N", [1, 64])
def test_logits_are_never_all_alive(monkeypatch, N, known):
    """Guards: for few tokens the blocks of the vocabulary are long, and a second head gradient is alive beside the first."""
    monkeypatch.setattr(gtpo, "CHUNK_ELEMENTS", 4096)
    hidden, head = torch.randn(N, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    ids = torch.randint(0, 1000, (N,))
    with Largest() as largest:
        gtpo.token_logps(hidden, head, ids, expected_grad=torch.ones(N) if known else None)[0].sum().backward()
    assert largest.product <= (8000 if known else 4096)  # all logits of 64 tokens would be 64,000; the head's gradient is 8,000, added up in place
    assert largest.elements <= head.numel()
    assert head.grad.shape == head.shape and hidden.grad.shape == hidden.shape


def test_only_the_products_that_are_needed():
    hidden, head, ids = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4), torch.randint(0, 9, (6,))
    with Largest() as scored, torch.no_grad():
        logps, _ = gtpo.token_logps(hidden, head, ids, chunk_size=2)
    assert scored.products == 3 and not logps.requires_grad
    with Largest() as frozen:
        gtpo.token_logps(hidden, head, ids, chunk_size=2, expected_grad=torch.ones(6))[0].sum().backward()
    assert frozen.products == 6  # logits and direction of each chunk; backward adds none


@pytest.mark.parametrize("known", [False, True])
def test_token_of_weight_zero_spreads_nothing(known):
    """Guards: 0 * nan in backward, when a position that takes no part in the loss holds junk."""
    hidden, head = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    hidden[1] = NAN
    hidden.requires_grad_()
    weights = torch.tensor([1.0, 0, -1])
    logps, _ = gtpo.token_logps(hidden, head, torch.tensor([1, 2, 3]), expected_grad=-weights if known else None)
    gtpo.surrogate_loss(logps, weights).backward()
    assert hidden.grad.isfinite().all() and head.grad.isfinite().all() and not hidden.grad[1].any()


def test_no_tokens():
    hidden, head = torch.randn(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    logps, entropy = gtpo.token_logps(hidden, head, torch.zeros(0, dtype=torch.long))
    assert logps.shape == entropy.shape == (0,)
    logps.sum().backward()
    assert hidden.grad.shape == (0, 4) and head.grad.shape == (5, 4) and not head.grad.any()


def test_bad_token_logps():
    hidden, head = torch.randn(2, 4), torch.randn(5, 4)
    for bad in (5, -1):
        with pytest.raises(ValueError, match=rf"ids\[1\] is {bad}, outside the vocabulary of 5"):
            gtpo.token_logps(hidden, head, torch.tensor([0, bad]))
    for temperature in (0, -1.0, NAN):
        with pytest.raises(ValueError, match="temperature"):
            gtpo.token_logps(hidden, head, torch.tensor([0, 1]), temperature)
    for shapes in ((hidden, head[:, :3], torch.tensor([0, 1])), (hidden, head, torch.tensor([0])), (hidden[None], head, torch.tensor([[0, 1]]))):
        with pytest.raises(ValueError, match=r"need \(N, H\)"):
            gtpo.token_logps(*shapes)
    with pytest.raises(ValueError, match=r"expected_grad \(3,\): need one number for each of the 2 tokens"):
        gtpo.token_logps(hidden, head, torch.tensor([0, 1]), expected_grad=torch.ones(3))


def test_old_logps_of_an_unchanged_policy_give_ratio_one():
    """The same function scores old and new policy, so at the first update r = 1 exactly and the clip is idle."""
    torch.manual_seed(0)
    hidden, head, ids = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4), torch.randint(0, 9, (6,))
    with torch.no_grad():
        old, _ = gtpo.token_logps(hidden, head, ids, temperature=0.8)
    weights = torch.tensor([1.0, -1, 2, 0, -0.5, 1])
    logps, _ = gtpo.token_logps(hidden, head, ids, temperature=0.8)
    assert torch.equal(old, logps)
    (a,) = torch.autograd.grad(gtpo.surrogate_loss(logps, weights, old, epsilon=0.2), hidden, retain_graph=True)
    (b,) = torch.autograd.grad(gtpo.surrogate_loss(logps, weights), hidden)
    assert torch.equal(a, b)
