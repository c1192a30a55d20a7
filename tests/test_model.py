"""model.py: its passes against transformers' own numbers (fixtures/hf), against a decoder written a
second time, in NumPy, and against each other."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import model as model_py
from lib.hf import Config
from model import GPT, rotate

HF = Path(__file__).parent / "fixtures" / "hf"
NAMES = ("llama_gqa", "qwen2_tied", "qwen2_sharded", "qwen3")
TINY = dict(vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=300,
            rms_norm_eps=1e-5, rope_theta=1000.0, tie_word_embeddings=False, initializer_range=0.3)


def some_model(kind):
    if kind == "lora":
        return GPT.from_pretrained(HF / "qwen2_tied", adapter=HF / "lora_qwen2")
    return GPT.from_pretrained(HF / kind)


def tiny(model_type="llama", **fields):
    """A random model with every parameter away from its neutral value (biases not 0, norms not
    1)."""
    torch.manual_seed(0)
    model = GPT(Config({"model_type": model_type, **TINY, **fields}))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
    return model


def random_ids(*shape, high=37):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def padded(rows):
    """Right-padded with an id that is none of theirs: ids (N, T), lengths (N,)."""
    ids = torch.full((len(rows), max(map(len, rows))), 13)
    for i, row in enumerate(rows):
        ids[i, :len(row)] = torch.tensor(row, dtype=torch.long)
    return ids, torch.tensor([len(row) for row in rows])


# ---- the same numbers as transformers ------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_those_of_transformers(name):
    """Whole sequences, padding on either side, a mask of any type, positions far out. They are also
    those of the decoder below, which then tests what these models do not have."""
    model = some_model(name)
    z = {k: torch.from_numpy(v) for k, v in np.load(HF / name / "expected.npz").items()}
    logits = model(z["input_ids"])
    torch.testing.assert_close(logits, z["logits"], atol=2e-4, rtol=0)
    w = {name: p.double().numpy() for name, p in model.named_parameters()}
    raw = {**model.config.raw, **model.config.rope}
    got = reference_logits(raw, w, z["input_ids"][0].numpy())
    np.testing.assert_allclose(got, z["logits"][0], atol=2e-4)
    logps = logits.log_softmax(-1)[:, :-1].gather(-1, z["input_ids"][:, 1:, None])[..., 0]
    torch.testing.assert_close(logps, z["token_logprobs"], atol=2e-4, rtol=0)
    for side in ("left", "right"):
        mask = z[f"{side}_attention_mask"]
        real = mask.bool()
        for kind in (mask, real, mask.float()):
            logits = model(z[f"{side}_input_ids"], attention_mask=kind)
            torch.testing.assert_close(logits[real], z[f"{side}_logits"][real], atol=2e-4, rtol=0)
            assert logits.isfinite().all()
    last = model(z["long_input_ids"])[:, -8:]
    torch.testing.assert_close(last, z["long_logits_last8"], atol=2e-4, rtol=0)


def reference_logits(raw, w, ids):
    """A decoder in float64 NumPy, one head at a time, rotations as complex numbers: w arrays by
    name, ids (T,) -> logits (T, V)."""
    Hq, Hkv, T = raw["num_attention_heads"], raw["num_key_value_heads"], len(ids)
    D = raw.get("head_dim") or raw["hidden_size"] // Hq

    def norm(x, name):
        mean = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean + raw["rms_norm_eps"]) * w[name + ".weight"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    freq = raw["rope_theta"] ** (-2 * np.arange(D // 2) / D)  # scaled ones: tests/test_hf.py
    turn = np.exp(1j * np.outer(np.arange(T), freq))  # (T, D/2)

    def rotated(x):
        z = (x[:, :D // 2] + 1j * x[:, D // 2:]) * turn
        return np.concatenate((z.real, z.imag), axis=1)

    def head(n, at, h):
        own = slice(h * D, h * D + D)
        shared = slice(h // (Hq // Hkv) * D, h // (Hq // Hkv) * D + D)
        q, k = linear(n, at + "q_proj")[:, own], linear(n, at + "k_proj")[:, shared]
        if raw["model_type"] == "qwen3":
            q, k = norm(q, at + "q_norm"), norm(k, at + "k_norm")
        scores = rotated(q) @ rotated(k).T / math.sqrt(D)
        scores[np.triu_indices(T, 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True) @ linear(n, at + "v_proj")[:, shared]

    x = w["model.embed_tokens.weight"][ids]
    for i in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        n = norm(x, layer + "input_layernorm")
        heads = [head(n, layer + "self_attn.", h) for h in range(Hq)]
        x = x + linear(np.concatenate(heads, axis=1), layer + "self_attn.o_proj")
        n = norm(x, layer + "post_attention_layernorm")
        gate = linear(n, layer + "mlp.gate_proj")
        up = gate / (1 + np.exp(-gate)) * linear(n, layer + "mlp.up_proj")
        x = x + linear(up, layer + "mlp.down_proj")
    return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


# fields of config.json, and the projections that have biases then
VARIANTS = [
    (dict(model_type="llama", attention_bias=True), "k o q v"),
    (dict(model_type="llama", mlp_bias=True), "down gate up"),
    (dict(model_type="llama", head_dim=10), ""),
    (dict(model_type="llama", num_key_value_heads=1), ""),
    (dict(model_type="llama", num_key_value_heads=4, tie_word_embeddings=True), ""),
    (dict(model_type="mistral", sliding_window=None, attention_bias=True), ""),  # it has none
    (dict(model_type="qwen2", head_dim=10), "k q v"),
    (dict(model_type="qwen3", head_dim=2, attention_bias=True), "k o q v"),
    # Regression (P14): hidden / heads = 10 was taken where the config says 16
    (dict(model_type="qwen3", hidden_size=40, head_dim=16), ""),
]


@pytest.mark.parametrize("fields, biases", VARIANTS, ids=lambda fields: str(fields)[15:75])
@torch.no_grad()
def test_variants_follow_the_numpy_decoder(fields, biases):
    model, ids = tiny(**fields), random_ids(1, 40)
    w = {k: p.double().numpy() for k, p in model.named_parameters()}
    biased = {name.split(".")[-2] for name in w if name.endswith(".bias")}
    assert biased == {f"{projection}_proj" for projection in biases.split()}
    want = reference_logits({**TINY, **fields}, w, ids[0].numpy())
    np.testing.assert_allclose(model(ids)[0], want, atol=3e-4 * max(1, np.abs(want).max()))


def test_a_new_model_has_random_weights_of_the_given_size():
    def new():
        torch.manual_seed(5)
        return GPT(Config({"model_type": "qwen2", **TINY, "hidden_size": 64,
                                     "vocab_size": 500}))

    for (name, p), again in zip(new().named_parameters(), new().parameters(), strict=True):
        assert torch.equal(p, again)
        if p.dim() == 2:
            assert abs(p.std().item() / 0.3 - 1) < 0.1 and abs(p.mean().item()) < 0.03, name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name


# ---- positions and masks -------------------------------------------------------------------------

def test_bfloat16_keeps_positions_apart(monkeypatch):
    """Regression (P15): frequencies or positions cast to bfloat16 round 257 to 256."""
    model, seen = tiny(head_dim=6).to(torch.bfloat16), []
    monkeypatch.setattr(model_py, "rotate",
                        lambda x, cos, sin: seen.append((cos, sin)) or rotate(x, cos, sin))
    with torch.no_grad():
        assert model(torch.zeros(1, 260, dtype=torch.long)).dtype == torch.bfloat16
    cos, sin = (t[0, :, 0].double() for t in seen[0])  # (260, 6)
    freq = 1000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    angles = torch.arange(260)[:, None] * freq.repeat(2)
    signed_sin = angles.sin() * torch.tensor([-1.0, -1, -1, 1, 1, 1])
    assert (cos - angles.cos()).abs().max() < 1e-3 and (sin - signed_sin).abs().max() < 1e-3
    assert not torch.equal(cos[256], cos[257])


def naive_attention(q, k, v, mask=None):
    """Without the care that some versions of scaled_dot_product_attention take of rows that see
    nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("kind", (torch.Tensor, OnGPU))
@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("heads", ((4, 2), (6, 1), (3, 3)))
def test_attention_of_grouped_heads_and_its_gradient(heads, masked, kind):
    """With keys that several query heads share, and with copies of them, as on a GPU."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, 5, 8, requires_grad=True) for n in (*heads, heads[1])]
    mask = (torch.rand(2, 1, 5, 5) < 0.5) | torch.eye(5, dtype=torch.bool) if masked else None
    results = []
    for function in (model_py.attention, naive_attention):
        y = function(*(x.as_subclass(kind) for x in inputs), mask).as_subclass(torch.Tensor)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", (model_py.attention, naive_attention))
def test_padding_never_gives_nan_and_reaches_nobody(attention, monkeypatch):
    """Regression (P13, P17): positions that counted padding; and a padding query that sees nothing
    makes a softmax of -inf alone, from where nan spreads, also into gradients."""
    sines = []
    monkeypatch.setattr(model_py, "attention", attention)
    monkeypatch.setattr(model_py, "rotate",
                        lambda x, cos, sin: sines.append(sin) or rotate(x, cos, sin))
    model, ids = tiny(), random_ids(3, 9)
    mask = torch.tensor([[0] * 2 + [1] * 7, [1] * 4 + [0] * 5, [0] * 9])
    real = mask.bool()
    logits = model(ids, attention_mask=mask)
    assert logits.isfinite().all()
    first_two = torch.stack((sines[0][0, 2:4, 0, 0], sines[0][1, :2, 0, 0]))  # of real tokens
    torch.testing.assert_close(first_two, torch.tensor([[0.0, -math.sin(1)]] * 2))
    other = model(torch.where(real, ids, 5), attention_mask=mask)  # other ids under the padding
    torch.testing.assert_close(logits[real], other[real])
    for row, kept in ((0, slice(2, 9)), (1, slice(0, 4))):
        alone = model(ids[row:row + 1, kept])[0]
        torch.testing.assert_close(logits[row, kept], alone, atol=1e-5, rtol=1e-5)
    logits[real].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_an_empty_batch_passes_through():
    """Regression: view(B, T, -1, D) cannot infer a size when there is no element."""
    model, none = tiny(), torch.zeros(0, dtype=torch.long)
    for shape in ((0, 3), (2, 0)):
        assert model(torch.zeros(shape, dtype=torch.long)).shape == (*shape, 37)
    hidden = model.completion_hidden(torch.ones(1, 3, dtype=torch.long), torch.tensor([3]),
                                     torch.zeros(0, 4, dtype=torch.long), none)
    assert hidden.shape == (0, 4, 24)
    hidden.sum().backward()


# ---- prompts run once in training ----------------------------------------------------------------

PROMPTS = [[3, 9, 4], [5, 1, 8, 2, 7, 7, 30], [11]]
COMPLETIONS = [[6], [1, 2, 3, 4, 5, 6, 7, 8], [], [9, 9, 2], [31, 4, 4, 4, 1]]
PROMPT_OF = [1, 0, 0, 2, 1]


def full_forward(model, prompt, completion):
    """Hidden states that predict the completion's tokens, (L, H), from one pass over both."""
    kept = []
    handle = model.model.norm.register_forward_hook(lambda module, x, y: kept.append(y))
    model(torch.tensor([prompt + completion]))
    handle.remove()
    return kept[0][0, len(prompt) - 1:len(prompt) - 1 + len(completion)]


def gradients(model, hidden, ids):
    """Of some function of hidden states (n, H) and of log-probs of ids (n,)."""
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(0))
    logps = (hidden @ model.head_weight.T).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    (weights * (logps + hidden.sum(-1))).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("kind", ("llama_gqa", "qwen2_tied", "qwen3", "lora"))
def test_completion_hidden_is_the_full_forward_and_so_are_its_gradients(kind, checkpointing,
                                                                        monkeypatch):
    """Prompts of different lengths, several completions of each in any order, of 0, 1 and many
    tokens; each prompt runs once, and its gradient counts. Checkpointing runs each layer once
    more."""
    model, tokens, forward = some_model(kind), [], model_py.Layer.forward
    (prompt_ids, prompt_lengths), (ids, lengths) = padded(PROMPTS), padded(COMPLETIONS)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    rows = [full_forward(model, PROMPTS[p], completion)
            for p, completion in zip(PROMPT_OF, COMPLETIONS)]
    want = gradients(model, torch.cat(rows), torch.tensor(sum(COMPLETIONS, [])))

    def counting(self, x, *rest):
        tokens.append(x[..., 0].numel())
        return forward(self, x, *rest)

    monkeypatch.setattr(model_py.Layer, "forward", counting)
    model.checkpointing = checkpointing
    hidden = model.completion_hidden(prompt_ids, prompt_lengths, ids, torch.tensor(PROMPT_OF))
    assert hidden.shape == (5, 8, model.config.hidden_size) and hidden.isfinite().all()
    torch.testing.assert_close(hidden[mask], torch.cat(rows), atol=2e-5, rtol=1e-4)
    got = gradients(model, hidden[mask], ids[mask])
    runs = (2 if checkpointing else 1) * len(model.model.layers)
    assert sum(tokens) == runs * (prompt_ids.numel() + ids[:, 1:].numel())
    assert got.keys() == want.keys()
    for name, grad in want.items():
        # a bias of all keys changes no attention weight
        assert grad.abs().max() > 0 or name.endswith("k_proj.bias"), name
        atol = 2e-5 * max(1, grad.abs().max().item())
        torch.testing.assert_close(got[name], grad, atol=atol, rtol=1e-3, msg=name)


@pytest.mark.parametrize("length", (0, 1))
def test_completion_hidden_of_no_and_of_one_token(length):
    model, (prompt_ids, prompt_lengths) = some_model("llama_gqa"), padded(PROMPTS)
    hidden = model.completion_hidden(prompt_ids, prompt_lengths, torch.full((5, length), 4),
                                     torch.tensor(PROMPT_OF))
    want = [full_forward(model, PROMPTS[p], [4] * length) for p in PROMPT_OF]
    torch.testing.assert_close(hidden, torch.stack(want), atol=2e-5, rtol=1e-4)
    hidden.sum().backward()
