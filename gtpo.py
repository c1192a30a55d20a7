"""GTPO, Group-relative Trajectory-based Policy Optimization (arXiv 2508.03772), and its baseline
GRPO, as pure functions on tensors. (Another paper, arXiv 2508.04349, has a GTPO that weighs tokens
by their entropy; this is not that one.)

A prompt q gets a group of G completions o_1..o_G with rewards R_i. Token t of completion i is o_it;
|o_i| counts its tokens, the end token too.

    (1)  A_i       = R_i - mean(R)                                            group_advantages
    (2)  lambda_it = 2 if o_it is in a conflict run (below) and A_i > 0       conflict_weights
                     0 if o_it is in a conflict run and A_i < 0
                     1 otherwise
    (3)  <H>_i     = mean over t of the entropy of pi(. | q, o_i<t), in nats  mean_entropy
    (4)  delta_i   = 0 if <H>_ini < ln 2 and <H>_i > ln 2, else 1             keep_completions
    (5)  w_it      = delta_i (A_i - gamma <H>_i) lambda_it / (G |o_i|)        token_weights
    (6)  r_it      = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)            surrogate_loss
    (7)  J         = sum over i, t of w_it r_it,   loss = -J                  surrogate_loss

w_it is a constant: no gradient flows through A, lambda, <H> or delta. pi_old is the policy that
sampled, <H>_ini the mean of <H>_i over the first batch of all, before any update.

A conflict token has the same id, at the same position, as a token of a completion whose advantage
has the other sign. Only two runs of each completion count: the unbroken run of conflict tokens from
its first token, and the one that ends at its last token, for which positions are counted from the
end of each completion. Where A = 0 a completion has no conflicts and causes none; one that is
filtered (delta 0) still causes them. Example: rewards 20, 0, 10, so A = 10, -10, 0; token 2 is the
end token, `.` is padding:

    i   A_i   o_i          lambda_i
    1   +10   5 6 7 8 2    2 2 1 1 2    runs `5 6`, shared with completion 2, and `2`
    2   -10   5 6 9 2 .    0 0 1 0 .    its 0s: these updates would undo those of completion 1
    3     0   5 6 7 2 .    1 1 1 1 .    shares tokens with both, but A = 0

With <H>_i = 0.5 and gamma = 0.1 each token of completion 1 has w = (10 - 0.05) / (3 * 5) = 0.663,
and its three conflict tokens twice that.

GRPO is (5) to (7) with A_i / (std(R) + 1e-4), lambda = delta = 1, gamma = 0, a ratio that is
clipped and, if beta > 0, a KL term. `departs: N` marks a line where we follow the formula and the
authors' published code does something else: docs/departures.md says what.

Shapes: G completions in a group, L positions, right-padded (real tokens first); `...` is any number
of leading dimensions, such as P prompts. mask is True on real tokens.
"""
import math

import torch
import torch.nn.functional as F


def group_advantages(rewards, scale="none"):
    """A_i of each group, equation (1): rewards (..., G) -> (..., G).

    scale "none": nothing more, as GTPO; "std": divided by (the standard deviation with n - 1,
    plus 1e-4), as GRPO. Equal rewards, and a group of one, give exactly 0.
    ValueError: a reward is not finite, a group is empty.
    """
    if rewards.ndim == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)}: the last dimension is the "
                         "group and needs at least one completion")
    if not rewards.isfinite().all():
        where = tuple((~rewards.isfinite()).nonzero()[0].tolist())
        raise ValueError(f"rewards{list(where)} is {rewards[where].item()}: every reward must be "
                         "a finite number")
    r = rewards.double()  # (..., G)
    advantages = r - r.mean(-1, keepdim=True)  # (..., G)
    if rewards.is_floating_point():  # a difference below the rewards' own rounding is none
        rounding = torch.finfo(rewards.dtype).eps * r.abs().amax(-1, keepdim=True)  # (..., 1)
        advantages = advantages.masked_fill(advantages.abs() <= rounding, 0)
    if scale == "std":
        std = r.std(-1, keepdim=True, correction=min(1, r.shape[-1] - 1))  # (..., 1)
        advantages = advantages / (std + 1e-4)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def advantage_sign(advantages):
    """-1, 0 or 1; less than 1e-6 is 0 (advantages may also come from other code than ours)."""
    return advantages.sign().masked_fill(advantages.abs() < 1e-6, 0)  # (departs: 7)


def conflict_weights(ids, mask, advantages):
    """lambda_it of equation (2), 0 on padding: ids, mask (..., G, L), advantages (..., G)
    -> float (..., G, L). What stands under padding does not matter. Time O(G^2 L), memory O(G L).
    ValueError: shapes do not fit, or a real token stands behind padding.
    """
    if ids.shape != mask.shape or advantages.shape != ids.shape[:-1]:
        raise ValueError(f"ids {tuple(ids.shape)}, mask {tuple(mask.shape)}, advantages "
                         f"{tuple(advantages.shape)}: need (..., G, L) twice and (..., G)")
    mask = mask.bool()
    if (mask[..., 1:] & ~mask[..., :-1]).any():
        raise ValueError("mask has a real token behind padding: completions must be right-padded")
    length = mask.sum(-1, keepdim=True)  # (..., G, 1)
    sign = advantage_sign(advantages)[..., None]  # (..., G, 1)
    t = torch.arange(ids.shape[-1], device=ids.device)  # (L,)

    # each id, plus 1 so that id 0 has a sign, too, with the sign of its completion's advantage;
    # 0 on padding and where A = 0
    signed = torch.where(mask, ids.int() + 1, 0) * sign.int()  # (..., G, L) (departs: 5)
    from_end = signed.gather(-1, (length - 1 - t) % len(t))  # (..., G, L) reversed, padding behind
    prefix, suffix = conflict_run(signed), conflict_run(from_end)  # (..., G, 1)
    # a token in both runs counts once (departs: 3)
    in_run = (t < prefix) | (t >= length - suffix)  # (..., G, L)
    return torch.where(in_run, 1.0 + sign, 1.0) * mask  # 1 + 1 = 2 where A > 0, 1 - 1 = 0 where < 0


def conflict_run(signed):
    """Length of the unbroken run of conflict tokens at the start: signed (..., G, L), ids from 1
    with the sign of A -> (..., G, 1). 0 equals -0, so a run may go on into padding, and be anything
    where A = 0: no weight depends on it there."""
    conflict = torch.zeros_like(signed, dtype=torch.bool)  # (..., G, L)
    for j in range(signed.shape[-2]):  # same id, other sign, same position (departs: 6)
        conflict |= signed == -signed[..., j : j + 1, :]  # (..., G, L)
    return F.pad(conflict, (0, 1)).byte().argmin(-1, keepdim=True)  # the first that is no conflict


def mean_entropy(token_entropy, mask):
    """<H>_i of equation (3), nats: (..., L) twice -> (...). 0 for an empty completion."""
    total = torch.where(mask.bool(), token_entropy, 0).sum(-1)  # (...)
    return total / mask.sum(-1).clamp(min=1)


def keep_completions(entropy, initial_entropy, threshold=math.log(2)):
    """delta_i of equation (4), 1 or 0: entropy (..., G) is <H>_i, initial_entropy <H>_ini, nats.
    A policy that begins above the threshold is never filtered."""
    out = (entropy > threshold) & (initial_entropy < threshold)  # (..., G) (departs: 4)
    return 1 - out.to(entropy.dtype)


@torch.no_grad()
def token_weights(advantages, mask, lam=1.0, delta=1.0):
    """w_it of equation (5), 0 on padding: advantages (..., G), for GTPO A - gamma <H>, mask
    (..., G, L), lam (..., G, L), delta (..., G) -> (..., G, L). Without lam and delta: GRPO's."""
    tokens = mask.sum(-1).clamp(min=1)  # (..., G)
    G = advantages.shape[-1]
    per_token = delta * advantages / (G * tokens)  # (..., G) (departs: 1, 2)
    return per_token[..., None] * lam * mask.bool()


def surrogate_loss(logps, weights, old_logps, epsilon=0.0):
    """Minus the sum of w_it r_it, equations (6) and (7): three tensors of one shape -> scalar.

    epsilon > 0: GRPO's clipped ratio, min(r w, clip(r, 1 - epsilon, 1 + epsilon) w). Being a sum,
    it may be taken in any pieces. Where the weight is 0 (padding, filtered, protected) logps may be
    anything, even nan, and gets gradient 0.
    """
    log_ratio = torch.where(weights != 0, logps - old_logps, 0)  # before exp: 0 * nan is nan
    ratio = log_ratio.exp()  # (departs: 9)
    gain = ratio * weights
    if epsilon > 0:
        gain = torch.minimum(gain, ratio.clamp(1 - epsilon, 1 + epsilon) * weights)
    return -gain.sum()


def kl_k3(logps, ref_logps):
    """KL to a reference policy at each token, nats: the estimate exp(d) - d - 1 with
    d = ref_logps - logps, any shape."""
    d = ref_logps - logps
    return d.exp() - d - 1


def policy_loss(logps, weights, old_logps, kl_weights=None, ref_logps=None, epsilon=0.0):
    """surrogate_loss plus, with kl_weights, the sum of kl_weights * KL: what one step minimises."""
    loss = surrogate_loss(logps, weights, old_logps, epsilon)
    if kl_weights is not None:
        d = torch.where(kl_weights != 0, logps, 0), torch.where(kl_weights != 0, ref_logps, 0)
        loss = loss + (kl_weights * kl_k3(*d)).sum()
    return loss


# The two losses in one call each, for tests and for your own loop. train.py calls the same pieces.

def gtpo_loss(logps, ids, mask, advantages, entropy, initial_entropy, old_logps=None, gamma=0.1):
    """GTPO's loss -J of a group, a mean over groups if there are more. logps, ids, mask, old_logps
    (..., G, L), advantages and entropy <H>_i (..., G), initial_entropy a number -> scalar.
    Without old_logps the ratio is 1 and its gradient that of logps."""
    lam = conflict_weights(ids, mask, advantages)  # (..., G, L)
    delta = keep_completions(entropy, initial_entropy)  # (..., G)
    weights = token_weights(advantages - gamma * entropy, mask, lam, delta)  # (..., G, L)
    old_logps = logps.detach() if old_logps is None else old_logps
    return surrogate_loss(logps, weights, old_logps) / advantages.shape[:-1].numel()


def grpo_loss(logps, mask, advantages, old_logps=None, ref_logps=None, beta=0.0, epsilon=0.2):
    """GRPO's loss of a group, a mean over groups if there are more, plus beta times the KL to
    ref_logps: a mean over the tokens of each completion, then over completions. Shapes as above;
    advantages: group_advantages(rewards, "std"). ValueError: beta without ref_logps."""
    if beta and ref_logps is None:
        raise ValueError(f"beta is {beta} but there are no ref_logps: pass those of the reference "
                         "policy, or beta=0")
    weights = token_weights(advantages, mask)  # (..., G, L)
    kl_weights = token_weights(torch.full_like(advantages, beta), mask) if beta else None
    old_logps = logps.detach() if old_logps is None else old_logps
    loss = policy_loss(logps, weights, old_logps, kl_weights, ref_logps, epsilon)
    return loss / advantages.shape[:-1].numel()
