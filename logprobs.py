"""Log-probabilities and entropies of a language model's hidden states, at a temperature. Sampler,
loss and scoring all take them from here, so that what is sampled is what is scored.

    log p(. | h) = log_softmax(h W^T / T)          h (H,) hidden state, W (V, H) output head

`head_loss` takes hidden states to the loss without ever holding the logits of all tokens: with a
vocabulary of 150,000 those of one group would be larger than the model.
"""
import torch

from lib.products import linear

CHUNK_ELEMENTS = 2**26  # of one block of logits: 256 MB in float32; with fewer, products are slow


def product_dtype(hidden):
    """The type in which hidden states and head are multiplied: on a GPU that of the forward pass;
    on a CPU float32, since a product of bfloat16 numbers cannot return float32 there."""
    if hidden.dtype == torch.float64:
        return torch.float64
    if not hidden.is_cuda:
        return torch.float32
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype


def log_probs(hidden, head_weight, temperature=1.0, buffers=(None, None)):
    """log p of every next token, nats: hidden (N, H), head_weight (V, H), both of product_dtype
    -> (N, V), float32 (float64 for float64). `buffers`: two tensors (N, V) to write into, for
    logits (not if hidden is bfloat16) and result."""
    logits, out = buffers
    with torch.autocast(hidden.device.type, enabled=False):  # the types are chosen already
        if head_weight.is_mkldnn:
            logits = linear(hidden, head_weight)  # (N, V)
        elif hidden.dtype in (torch.float32, torch.float64):
            logits = torch.mm(hidden, head_weight.t(), out=logits)  # (N, V)
        elif "dtype" in torch.ops.aten.mm.overloads():  # torch 2.8: not rounded to bfloat16,
            # which would cost a log-prob 0.03 nats
            logits = torch.mm(hidden, head_weight.t(), out_dtype=torch.float32)  # (N, V)
        else:
            logits = torch.mm(hidden, head_weight.t()).float()  # (N, V)
    if temperature != 1:
        logits.div_(temperature)
    return torch.log_softmax(logits, -1, out=out)  # (N, V)


def entropy(logp, probs=None):
    """Entropy of each distribution, nats: log_probs (N, V), and their exp if at hand -> (N,).
    A token of probability 0, of which log p is -inf, adds 0."""
    probs = logp.exp() if probs is None else probs
    return -logp.clamp(min=-1e4).mul_(probs).sum(-1)  # (departs: 8)


def chunks(hidden, head_weight):
    """Slices of the N tokens whose logits fit CHUNK_ELEMENTS."""
    n = max(1, CHUNK_ELEMENTS // len(head_weight))
    return [slice(start, start + n) for start in range(0, len(hidden), n)]


@torch.no_grad()
def token_logps(hidden, head_weight, ids, temperature=1.0):
    """log p of given tokens, nats, without gradient: hidden (N, H), ids (N,) -> (N,)."""
    dtype = product_dtype(hidden)
    hidden, W = hidden.to(dtype), head_weight.to(dtype)
    logps = [log_probs(hidden[rows], W, temperature).gather(-1, ids[rows, None])[:, 0]
             for rows in chunks(hidden, W)]  # (n,) each
    return torch.cat(logps) if logps else hidden.new_zeros(0)


def head_loss(hidden, head_weight, ids, token_loss, per_token=(), temperature=1.0):
    """A loss of the log-probs of tokens, and the gradient of hidden states and head, in one pass.

    hidden (N, H), row n predicts ids[n]; head_weight (V, H); ids (N,). token_loss(logps,
    *per_token) -> scalar must be a sum over tokens; per_token are more tensors (N,), one number a
    token. Returns (loss, logps (N,) without gradient). Beside the gradients it needs, for any N
    and V, at most two blocks of logits, 512 MB (with bfloat16 products one more of half the size).
    """
    return HeadLoss.apply(hidden, head_weight, ids, token_loss, per_token, temperature)


class HeadLoss(torch.autograd.Function):
    """The work of head_loss. With z = h W^T / T, p = softmax(z) and g = d loss / d logp:

        d logp / d z = onehot(id) - p
        d loss / d h = g (onehot - p) W / T
        d loss / d W = sum over the tokens of g (onehot - p) h / T
    """

    @staticmethod
    def forward(ctx, hidden, head_weight, ids, token_loss, per_token, temperature):
        dtype = product_dtype(hidden)
        h, W = hidden.detach().to(dtype), head_weight.detach().to(dtype)  # (N, H), (V, H)
        wide = torch.float64 if dtype == torch.float64 else torch.float32  # of all but products
        need_hidden, need_head = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(h) if need_hidden else None  # (N, H)
        d_head = torch.zeros_like(head_weight, dtype=wide) if need_head else None  # (V, H)
        loss = torch.zeros((), dtype=wide, device=h.device)
        logps = torch.empty(len(h), dtype=wide, device=h.device)  # (N,)
        slices = chunks(h, W)
        largest = min(len(h), slices[0].stop) if slices else 0
        buffers = [torch.empty(largest, len(W), dtype=wide, device=h.device)
                   for needed in (dtype == wide, True) if needed]

        for rows in slices:  # (departs: 10)
            token = ids[rows, None]  # (n, 1)
            block = [None] * (2 - len(buffers)) + [b[: len(token)] for b in buffers]
            logp = log_probs(h[rows], W, temperature, block)  # (n, V)
            own = logp.gather(-1, token)[:, 0].requires_grad_()  # (n,)
            with torch.enable_grad():
                chunk_loss = token_loss(own, *(x[rows] for x in per_token))
            (g,) = torch.autograd.grad(chunk_loss, own)  # (n,)
            loss += chunk_loss.detach()
            logps[rows] = own.detach()

            p_minus_onehot = logp.exp_().scatter_add_(-1, token, -torch.ones_like(own)[:, None])
            # g (onehot - p) / T, (n, V)
            d_logits = p_minus_onehot.mul_(g[:, None] / -temperature).to(dtype)
            if need_hidden:
                torch.mm(d_logits, W, out=d_hidden[rows])  # (n, H)
            if need_head and dtype == wide:
                d_head.addmm_(d_logits.t(), h[rows])  # (V, H)
            elif need_head:
                d_head += d_logits.t() @ h[rows]  # (V, H) added up in float32
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(logps)
        return loss, logps

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, _):
        d_hidden, d_head = (None if d is None else d.mul_(d_loss) for d in ctx.saved_tensors)
        return d_hidden, d_head, None, None, None, None


def head_loss_slow(hidden, head_weight, ids, token_loss, per_token=(), temperature=1.0):
    """What head_loss computes, with all logits alive and autograd for all of it: to be read, and to
    be compared with."""
    logp = torch.log_softmax(hidden @ head_weight.t() / temperature, -1)  # (N, V)
    logps = logp.gather(-1, ids[:, None])[:, 0]  # (N,)
    return token_loss(logps, *per_token), logps.detach()
