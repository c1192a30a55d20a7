"""GTPO, Group-relative Trajectory-based Policy Optimization (arXiv 2508.03772), and GRPO, its baseline, as pure functions on tensors.
(arXiv 2508.04349 has an algorithm of the same name that weighs tokens by entropy; it is not this one.)

A prompt q gets a group of G completions o_1..o_G with rewards R_i. Position t of completion i is token o_it, |o_i| counts the end token too.

    (1)  A_i      = R_i - mean(R)                                                        group_advantages
    (2)  lambda_it = 2 if o_it is a conflict token and A_i > 0                           conflict_weights
                     0 if o_it is a conflict token and A_i < 0
                     1 otherwise
    (3)  <H>_i    = mean over t of the entropy of pi(. | q, o_i<t), in nats              mean_entropy
    (4)  delta_i  = 0 if <H>_ini < ln 2 and <H>_i > ln 2, else 1                         keep_completions
    (5)  w_it     = delta_i (A_i - gamma <H>_i) / (G |o_i|) * lambda_it                  gtpo_weights: constants, no gradient
    (6)  r_it     = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)                        token_logps, surrogate_loss
    (7)  J        = sum over i, t of w_it r_it,   loss = -J                              surrogate_loss

A conflict token has the same id at the same position as a token of a completion whose advantage has the other sign. Only two runs of each
completion count: the unbroken run of conflict tokens from its first token, and the one that ends at its last token, for which positions are
counted from the end of each completion. A completion with A = 0 has no conflicts and causes none. A filtered completion (delta 0) still causes them.

Example: rewards 20, 0, 10, so A = 10, -10, 0; token 2 is the end token, `.` is padding.

    i   A_i   o_i          lambda_i
    1   +10   5 6 7 8 2    2 2 1 1 2      prefix run 5 6 (shared with completion 2, the third token differs), suffix run 2
    2   -10   5 6 9 2 .    0 0 1 0 .      these updates would undo those of completion 1
    3     0   5 6 7 2 .    1 1 1 1 .      shares tokens with both, but A = 0

With <H>_i = 0.5 and gamma = 0.1, each token of completion 1 has weight (10 - 0.05) / (3 * 5) = 0.663, and its three conflict tokens twice that.

Where we follow the formula and the authors' published code does something else (`departs: N` marks our line):

    N   the authors' code                                               here
    1   A completion's loss is divided by max(prefix, suffix run, 1)    not divided
    2   losses are summed over the group                                averaged, 1/G
    3   a token in both runs gets 2 * 2 = 4                             2
    4   drops a completion when <H>_i > 0.7, whatever <H>_ini           delta_i of equation (4)
    5   a fixed pad id marks padding, wherever that id stands           the mask alone marks it
    6   vocabulary x length histograms find the conflicts               compares completions, memory independent of the vocabulary
    7   the sign of A is that of a float, which may be residue          |A| < 1e-6 is 0
    8   probabilities are raised to 1e-6 inside the entropy's log       the exact entropy
    9   r_it is always 1                                                1, or the ratio to old_logps
    10  logits of whole completions, and of a reference for its log     logits of a few tokens at a time, no reference

Shapes: G completions in a group, L positions, right-padded (real tokens first); `...` is any number of leading dimensions, for example P prompts.
"""
import math

import torch
import torch.nn.functional as F

SIGN_TOLERANCE = 1e-6
CHUNK_ELEMENTS = 2**24  # of one block of logits: 64 MB in float32


# ---- weights: what each token counts, constants of one rollout --------------------------------------------------------------------------------

def group_advantages(rewards, scale="none"):
    """Advantages of each group, equation (1): reward minus the mean of its group. rewards (..., G) -> (..., G).

    scale "none": nothing more, as GTPO. scale "std": divided by (standard deviation with n-1, + 1e-4), as GRPO (TRL's definition).
    Equal rewards, and a group of one, give exactly 0. ValueError: a reward is not finite, a group is empty, unknown scale.
    """
    if scale not in ("none", "std"):
        raise ValueError(f"scale is {scale!r}; use 'none' (GTPO) or 'std' (GRPO)")
    if rewards.ndim == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} hold no group; the last dimension counts the completions of a group")
    if not rewards.isfinite().all():
        where = tuple((~rewards.isfinite()).nonzero()[0].tolist())
        raise ValueError(f"rewards{list(where)} is {rewards[where].item()}; every reward must be a finite number")
    r = rewards.double()  # (..., G); in float32 the mean of equal rewards is off by a residue that looks like an advantage
    advantages = r - r.mean(-1, keepdim=True)  # (..., G)
    if rewards.is_floating_point():  # what is left is below the rounding of the rewards themselves: a reward equal to the mean
        residue = torch.finfo(rewards.dtype).eps * r.abs().amax(-1, keepdim=True)  # (..., 1)
        advantages = advantages.masked_fill(advantages.abs() <= residue, 0.0)
    if scale == "std":
        advantages = advantages / (r.std(-1, keepdim=True, correction=min(1, r.shape[-1] - 1)) + 1e-4)
    return advantages.to(rewards.dtype if rewards.dtype in (torch.float32, torch.float64) else torch.float32)


def advantage_sign(advantages):
    """-1, 0 or 1 for each advantage; less than 1e-6 from 0 is 0."""
    return advantages.sign().masked_fill(advantages.abs() < SIGN_TOLERANCE, 0)  # (departs: 7)


def completion_lengths(mask):
    """|o_i|, the number of real tokens. mask (..., L), True on real tokens -> (..., 1). ValueError: a real token stands after padding."""
    mask = mask.bool()
    hole = (mask[..., 1:] & ~mask[..., :-1]).any(-1)  # (...)
    if hole.any():
        row = hole.nonzero()[0].tolist()
        raise ValueError(f"mask: row {row} has a real token after padding; completions must be right-padded (real tokens first)")
    return mask.sum(-1, keepdim=True)


def conflict_weights(ids, mask, advantages):
    """lambda_it of equation (2): 2, 0 or 1, and 0 on padding. ids, mask (..., G, L), advantages (..., G) -> float (..., G, L).

    What stands under padding does not matter. Time O(G^2 L), memory O(G L). ValueError: shapes do not fit, mask has a hole.
    """
    if ids.shape != mask.shape or advantages.shape != ids.shape[:-1]:
        raise ValueError(f"ids {tuple(ids.shape)}, mask {tuple(mask.shape)}, advantages {tuple(advantages.shape)}: "
                         "need ids and mask of one shape (..., G, L) and advantages (..., G)")
    mask, length, L = mask.bool(), completion_lengths(mask), ids.shape[-1]
    sign = advantage_sign(advantages)[..., None]  # (..., G, 1)
    t = torch.arange(L, device=ids.device)  # (L,)

    # Each token as its id with the sign of its completion's advantage; 0 on padding and where A = 0 (departs: 5)
    signed = torch.where(mask, ids.int() + 1, 0) * sign.int()  # (..., G, L)
    from_end = signed.gather(-1, (length - 1 - t) % L)  # (..., G, L) each completion reversed, padding stays behind
    prefix, suffix = conflict_run(signed), conflict_run(from_end)  # (..., G, 1)
    in_run = (t < prefix) | (t >= length - suffix)  # (..., G, L) one run or both, the weight is the same (departs: 3)
    return torch.where(in_run, 1.0 + sign, 1.0) * mask  # 1 + 1 = 2 where A > 0, 1 - 1 = 0 where A < 0


def conflict_run(signed):
    """Length of the unbroken run of conflict tokens at the start. signed (..., G, L): ids from 1 with the sign of A, or 0 -> (..., G, 1).
    0 equals -0, so the run may go on into padding, and be anything where A = 0: no weight depends on it there."""
    conflict = torch.zeros_like(signed, dtype=torch.bool)  # (..., G, L)
    opposite = -signed
    for j in range(signed.shape[-2]):  # (departs: 6)
        conflict |= signed == opposite[..., j : j + 1, :]  # same id, other sign, same position
    return F.pad(conflict, (0, 1)).byte().argmin(-1, keepdim=True)  # first position without conflict


def mean_entropy(token_entropy, mask):
    """<H>_i of equation (3), nats: mean over the real tokens, 0 for an empty completion. token_entropy, mask (..., L) -> (...)."""
    return torch.where(mask.bool(), token_entropy, 0).sum(-1) / completion_lengths(mask)[..., 0].clamp(min=1)


def keep_completions(entropy, initial_entropy, threshold=math.log(2), advantages=None):
    """delta_i of equation (4): 1 to keep, 0 to leave out. entropy (..., G) is <H>_i, initial_entropy is <H>_ini, all in nats.
    A model that starts above the threshold is never filtered. With advantages (..., G), only completions with A < 0 are left out."""
    out = (entropy > threshold) & (initial_entropy < threshold)  # (..., G) (departs: 4)
    if advantages is not None:
        out &= advantage_sign(advantages) < 0
    return 1 - out.to(entropy.dtype)


@torch.no_grad()
def gtpo_weights(ids, mask, advantages, entropy, initial_entropy, gamma=0.1, conflict=True, entropy_filter=True,
                 threshold=math.log(2), filter_negative_only=False):
    """w_it of equation (5), without gradient, 0 on padding. ids, mask (..., G, L), advantages, entropy <H>_i (..., G) -> (..., G, L).

    Each part is a switch, for ablations: conflict=False sets lambda to 1, entropy_filter=False sets delta to 1, gamma=0 drops the entropy
    term, filter_negative_only=True filters only completions with A < 0. With all three parts off this is grpo_weights.
    A group of equal rewards keeps the term -gamma <H>_i, as in the formula.
    """
    length, G = completion_lengths(mask), advantages.shape[-1]  # (..., G, 1)
    lam = conflict_weights(ids, mask, advantages) if conflict else mask.to(advantages.dtype)  # (..., G, L)
    of = advantages if filter_negative_only else None
    delta = keep_completions(entropy, initial_entropy, threshold, of) if entropy_filter else torch.ones_like(entropy)  # (..., G)
    score = delta * (advantages - gamma * entropy)  # (..., G)
    return score[..., None] / (G * length.clamp(min=1)) * lam  # (..., G, L) (departs: 1, 2)


@torch.no_grad()
def grpo_weights(mask, advantages):
    """GRPO: A_i / (G |o_i|) on every real token, 0 on padding. mask (..., G, L), advantages (..., G) -> (..., G, L)."""
    return advantages[..., None] / (advantages.shape[-1] * completion_lengths(mask).clamp(min=1)) * mask.bool()


# ---- losses: scalars with gradient to logps ---------------------------------------------------------------------------------------------------

def surrogate_loss(logps, weights, old_logps=None, epsilon=None):
    """Minus the sum of w_it r_it, equations (6) and (7). logps, weights, old_logps of one shape, usually (rows, L) -> scalar.

    r_it = exp(logps - old_logps); without old_logps, its value is 1 and its gradient that of logps. epsilon: GRPO's clipped ratio,
    min(r w, clip(r, 1 - epsilon, 1 + epsilon) w). A sum, so any split of a rollout's rows into micro-batches adds up to the same gradient.
    Positions of weight 0 (padding, filtered, skipped) take no part: their logps may be anything, even nan, and get gradient 0.
    """
    old_logps = logps.detach() if old_logps is None else old_logps  # (departs: 9)
    if not logps.shape == weights.shape == old_logps.shape:
        raise ValueError(f"logps {tuple(logps.shape)}, weights {tuple(weights.shape)}, old_logps {tuple(old_logps.shape)}: shapes must be equal")
    ratio = torch.where(weights != 0, logps - old_logps, 0).exp()  # masked before exp: nan * 0 is nan, also in the gradient
    gain = ratio * weights
    if epsilon is not None:
        gain = torch.minimum(gain, ratio.clamp(1 - epsilon, 1 + epsilon) * weights)
    return -gain.sum()


def kl_tokens(logps, ref_logps):
    """KL to a reference policy at each token, nats: the k3 estimate exp(d) - d - 1 with d = ref_logps - logps, any shape."""
    d = ref_logps - logps
    return d.exp() - d - 1


def kl_penalty(logps, ref_logps, mask):
    """KL to a reference policy, nats: mean over the tokens of each completion, then over the completions. All (..., L) -> scalar."""
    mask = mask.bool()
    kl = kl_tokens(torch.where(mask, logps, 0), torch.where(mask, ref_logps, 0))  # (..., L)
    return (kl.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def gtpo_loss(logps, ids, mask, advantages, entropy, initial_entropy, old_logps=None, gamma=0.1, **switches):
    """GTPO's loss -J of a group in one call, averaged over groups if there are leading dimensions; no clipping, no KL. (train.py takes the
    weights and surrogate_loss apart.) logps, ids, mask, old_logps (..., G, L), advantages, entropy (..., G), initial_entropy a number;
    switches as in gtpo_weights -> scalar."""
    weights = gtpo_weights(ids, mask, advantages, entropy, initial_entropy, gamma, **switches)
    return surrogate_loss(logps, weights, old_logps) / advantages.shape[:-1].numel()


def grpo_loss(logps, mask, advantages, old_logps=None, ref_logps=None, beta=0.0, epsilon=0.2):
    """GRPO's loss of a group (averaged over groups), clipped at epsilon, plus beta times the KL to ref_logps. advantages: scale="std"."""
    loss = surrogate_loss(logps, grpo_weights(mask, advantages), old_logps, epsilon) / advantages.shape[:-1].numel()
    if beta == 0:
        return loss
    if ref_logps is None:
        raise ValueError(f"beta is {beta} but ref_logps is missing: pass the reference's log-probs, or beta=0")
    return loss + beta * kl_penalty(logps, ref_logps, mask)


# ---- log-probs without the logits -------------------------------------------------------------------------------------------------------------

def token_logps(hidden, head_weight, ids, temperature=1.0, chunk_size=None, expected_grad=None):
    """Log-probs of tokens, and entropies, under softmax(hidden @ head_weight.T / temperature), a few tokens at a time.

    hidden (N, H) float, row n predicts ids[n]; head_weight (V, H); ids (N,) -> logps (N,) with gradient, entropy (N,) nats without; float32
    (float64 for float64 hidden), computed in it from logits of hidden's dtype, or autocast's. chunk_size, in tokens, defaults to what makes
    a block of logits 64 MB: then 130 to 160 MB are needed beside the result, whatever N and V (autocast also copies a head of another dtype).
    expected_grad (N,): d loss / d logps if it is known beforehand, -w_it when every ratio is 1. In float32 and float64 the head's gradient is then
    made in the same pass and kept, (V, H), until backward; elsewhere it is not used. If another gradient arrives, that one counts.
    ValueError: shapes do not fit, temperature is not above 0, an id outside the vocabulary (found on CPU only: on GPU the look would stall it,
    and gather stops there with a device assertion).
    """
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1] or ids.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, head_weight {tuple(head_weight.shape)}, ids {tuple(ids.shape)}: need (N, H), (V, H), (N,)")
    if expected_grad is not None and expected_grad.shape != ids.shape:
        raise ValueError(f"expected_grad {tuple(expected_grad.shape)}: need one number for each of the {len(ids)} tokens")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need a temperature above 0")
    V = head_weight.shape[0]
    if ids.device.type == "cpu" and (outside := (ids < 0) | (ids >= V)).any():
        n = outside.nonzero()[0].item()
        raise ValueError(f"ids[{n}] is {ids[n].item()}, outside the vocabulary of {V} rows of head_weight")
    if not torch.is_grad_enabled():  # inside an autograd.Function one cannot tell
        hidden, head_weight = hidden.detach(), head_weight.detach()
    return TokenLogps.apply(hidden, head_weight, ids.long(), temperature, chunk_size or max(1, CHUNK_ELEMENTS // V), expected_grad)


class TokenLogps(torch.autograd.Function):
    """The work of token_logps. With z = hidden @ W.T / T and p = softmax(z):  d logp / d z = onehot(id) - p."""

    @staticmethod
    def forward(ctx, hidden, head_weight, ids, temperature, chunk_size, expected_grad):
        N, V, device = hidden.shape[0], head_weight.shape[0], hidden.device
        autocast = torch.is_autocast_enabled(device.type) and hidden.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype  # of the matrix products
        exact = torch.float64 if dtype == torch.float64 else torch.float32  # of softmax, log and entropy
        logps, entropy = torch.empty(N, dtype=exact, device=device), torch.empty(N, dtype=exact, device=device)
        direction = torch.empty_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None  # (N, H) d logp / d hidden
        logsumexp = torch.empty_like(logps) if ctx.needs_input_grad[1] else None
        W = head_weight.to(dtype)  # (V, H)
        # d loss / d W in the same pass: not in shorter types, where the chunks' products would be rounded one by one
        one_pass = ctx.needs_input_grad[1] and expected_grad is not None and dtype == exact == head_weight.dtype
        ctx.grad_head, ctx.expected_grad = (torch.zeros_like(head_weight), expected_grad.to(exact, copy=True)) if one_pass else (None, None)

        n = min(chunk_size, N)
        logits = torch.empty(n, V, dtype=dtype, device=device)  # these buffers serve every chunk
        z = logits if dtype == exact else torch.empty(n, V, dtype=exact, device=device)
        logp = torch.empty(n, V, dtype=exact, device=device)
        for start in range(0, N, chunk_size):  # (departs: 10)
            rows, token = slice(start, start + chunk_size), ids[start : start + chunk_size, None]  # (n, 1)
            n = len(token)
            logits, z, logp = logits[:n], z[:n], logp[:n]  # the last chunk is shorter
            torch.mm(hidden[rows].to(dtype), W.t(), out=logits)  # (n, V); autocast leaves out= alone
            if dtype != exact:
                z.copy_(logits)
            if temperature != 1:
                z.div_(temperature)
            torch.log_softmax(z, -1, out=logp)  # (n, V)
            logps[rows] = logp.gather(-1, token)[:, 0]
            if logsumexp is not None:
                logsumexp[rows] = z.amax(-1) - logp.amax(-1)
            p = torch.exp(logp, out=z)  # (n, V)
            logp.clamp_(min=-1e4)  # p is 0 there, and 0 * -inf would be nan
            entropy[rows] = -logp.mul_(p).sum(-1)  # (departs: 8)
            p.scatter_add_(-1, token, p.new_full((n, 1), -1.0))  # p - onehot, before rounding to dtype: p is often nearly 1
            if direction is not None:  # -(p - onehot) @ W / T
                torch.mm(p if dtype == exact else logits.copy_(p), W, out=direction[rows])  # (n, H)
                direction[rows].div_(-temperature)
            if one_pass:  # += grad (onehot - p)^T @ hidden / T
                grad = ctx.expected_grad[rows, None]  # (n, 1)
                p.index_fill_(0, (grad[:, 0] == 0).nonzero()[:, 0], 0)  # a nan under weight 0 stays there
                scaled = torch.where(grad != 0, grad / -temperature * hidden[rows], 0)  # (n, H)
                torch.addmm(ctx.grad_head, p.t(), scaled, out=ctx.grad_head)
        ctx.mark_non_differentiable(entropy)
        ctx.temperature, ctx.dtype, ctx.exact = temperature, dtype, exact
        ctx.hidden_dtype = hidden.dtype
        ctx.save_for_backward(direction, logsumexp, *((hidden, head_weight, ids) if ctx.needs_input_grad[1] else ()))
        return logps, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logps, _):
        direction, logsumexp, *inputs = ctx.saved_tensors
        grad_hidden = grad_head = None
        if direction is not None:
            grad = grad_logps[:, None]  # (N, 1)
            grad_hidden = torch.where(grad != 0, grad * direction, 0).to(ctx.hidden_dtype)  # (N, H) a nan under weight 0 stays there
        if logsumexp is not None:
            hidden, head_weight, ids = inputs
            if ctx.grad_head is not None and torch.equal(grad_logps, ctx.expected_grad):
                grad_head, ctx.grad_head = ctx.grad_head, None  # given away: what receives it may change it
            else:
                with torch.autocast(hidden.device.type, enabled=False):
                    grad_head = head_gradient(ctx, grad_logps, logsumexp, hidden, head_weight, ids)
        return grad_hidden, grad_head, None, None, None, None


def head_gradient(ctx, grad_logps, logsumexp, hidden, head_weight, ids):
    """d / d head_weight, (V, H): sum over the tokens of grad (onehot(id) - p) hidden^T / T. With logsumexp at hand a softmax needs no whole row,
    so here the vocabulary is cut into blocks, and each row of the gradient is one product over all tokens, written once."""
    used = grad_logps.nonzero()[:, 0]  # (N',) tokens of weight 0 have no part in it
    hidden, ids, logsumexp = hidden[used], ids[used, None], logsumexp[used, None]  # (N', H), (N', 1), (N', 1)
    scaled = (hidden * (grad_logps[used, None] / -ctx.temperature)).to(ctx.dtype)  # (N', H)
    hidden = hidden.to(ctx.dtype)
    grad_head = torch.empty_like(head_weight)
    block = max(1, CHUNK_ELEMENTS // max(*hidden.shape, 1))  # rows of the head: their logits and their gradient both fit the chunk
    for W, grad, first in zip(head_weight.split(block), grad_head.split(block), range(0, len(head_weight), block)):  # (v, H)
        p = torch.mm(hidden, W.to(ctx.dtype).t()).to(ctx.exact).div_(ctx.temperature).sub_(logsumexp).exp_()  # (N', v)
        here = (ids >= first) & (ids < first + len(W))  # (N', 1) the token's own column lies in this block
        p.scatter_add_(-1, (ids - first).clamp(0, len(W) - 1), -here.to(p.dtype))  # p - onehot
        grad.copy_(p.to(ctx.dtype).t() @ scaled)
    return grad_head
