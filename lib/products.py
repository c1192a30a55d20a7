"""
Linear layers whose weights oneDNN has prepacked, for sampling on a CPU.

Both ops of torch.ops.mkldnn are private ones of torch: can_pack() tries them. `is_mkldnn` marks a
prepacked weight.
"""
import torch
import torch.nn.functional as F

PACK_FROM = 2**18  # numbers; with fewer the call itself takes longer than what it saves


def linear(x, weight, bias=None):
    """x W^T + b, as F.linear, (N, in) -> (N, out); of a packed weight, in its type and without
    gradient."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")


def pack(weight):
    """The weight (out, in) in the order in which oneDNN's products read it: with 32 rows they take
    half the time. Itself where that cannot be, or gains nothing."""
    fits = weight.device.type == "cpu" and weight.dtype in PACKED_TYPES
    if not fits or weight.numel() < PACK_FROM:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def can_pack(dtype):
    """Whether this torch and this CPU can, as a small product says."""
    ones = torch.ones(16, 16, dtype=dtype)
    try:
        return torch.equal(linear(ones, torch.ops.mkldnn._reorder_linear_weight(ones)), ones * 16)
    except (AttributeError, RuntimeError, TypeError):
        return False


PACKED_TYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
