"""Random draws: tokens of a distribution, by numbers that follow from a seed and a place alone."""
import hashlib
import math

import torch
import torch.nn.functional as F

BLOCK = 128  # columns of a distribution that draw() adds up at a time


def restrict(logp, top_k=0, top_p=1.0):
    """Probabilities, (B, V), of which all but the top_k most likely, then all but the smallest set
    with at least top_p of the mass, are 0."""
    if 0 < top_k < logp.shape[-1]:
        values, ids = logp.topk(top_k)  # (B, top_k)
        logp = torch.full_like(logp, -math.inf).scatter(-1, ids, values)
    if top_p < 1:
        probs, ids = logp.softmax(-1).sort(descending=True, stable=True)
        before = probs.cumsum(-1) - probs  # mass of the more likely ones
        out = (before >= top_p) & (before > 0)  # the first always stays: top_p may round to 0
        logp = logp.masked_fill(out.scatter(-1, ids, out), -math.inf)
    return logp.softmax(-1)


def draw(probs, uniforms):
    """One token a row, by inverting the cumulative distribution: probs (B, V), uniforms (B,) in
    [0, 1) -> (B,). One number a token, so no completion depends on what else is in the batch. First
    the block of columns, then the column in it: to add up all V in a row takes far longer."""
    V = probs.shape[1]
    if V % BLOCK:  # pad() would copy in any case
        probs = F.pad(probs, (0, -V % BLOCK))
    blocks = probs.unflatten(1, (-1, BLOCK))  # (B, n, BLOCK)
    block, share = invert(blocks.sum(-1), uniforms.double())  # (B,) each
    own = blocks[torch.arange(len(block), device=block.device), block]  # (B, BLOCK)
    place, _ = invert(own, share)  # (B,)
    return (block * BLOCK + place).clamp(max=V - 1)  # probs of nan: sample() refuses


def invert(weights, shares):
    """Where the running sum of weights (B, n) passes `shares` (B,), in [0, 1), of their total: the
    index (B,), never one of weight 0, and the share of its weight that is below (B,)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)  # (B, n) float32 sums may decrease
    # (B, 1), always below the total; rounding can make a share slightly negative
    target = shares[:, None].clamp(0, 1 - 2**-32) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)  # (B, 1)
    share = (target - cumulative.gather(1, index) + weight) / weight  # (B, 1)
    return index[:, 0], share[:, 0]


def seeded_uniforms(key, *shape):
    """Uniform numbers in [0, 1) that depend on nothing but `key`, a tuple of numbers and strings:
    there is no random state to save."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1  # of 63 bits, as torch takes it
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator)
