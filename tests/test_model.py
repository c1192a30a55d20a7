"""model.py against transformers' and PEFT's own numbers (fixtures/hf), and a decoder written a second time, in NumPy."""
import json
import math
import os
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import model as model_py
from lib.hf import Config, rope_frequencies
from model import GPT, GroupCache, rotate
from sample import sample

HF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "hf")
NAMES = ("llama_gqa", "qwen2_tied", "qwen2_sharded", "qwen3")
TINY = dict(vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=300, rms_norm_eps=1e-5, rope_theta=1000.0, tie_word_embeddings=False, initializer_range=0.3)


def expected(name):
    return {k: torch.from_numpy(v) for k, v in np.load(os.path.join(HF, name, "expected.npz")).items()}


def config_of(name, form="config.json"):
    with open(os.path.join(HF, name, form)) as f:
        return json.load(f)


def weights_of(name):
    folder = os.path.join(HF, name)
    return {k: v for file in sorted(os.listdir(folder)) if file.endswith(".safetensors") for k, v in load_file(os.path.join(folder, file)).items()}


def copy(name, target):
    """A copy of a fixture that a test may change."""
    return shutil.copytree(os.path.join(HF, name), target)


def tiny(model_type="llama", seed=0, **fields):
    """A random model with every parameter away from its neutral value (biases not 0, norms not 1)."""
    torch.manual_seed(seed)
    model = GPT(Config.from_dict({"model_type": model_type, **TINY, **fields}))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
    return model


def reference_logits(raw, w, ids):
    """A decoder in float64 NumPy, one head at a time, rotations as complex numbers. w: arrays by name, ids (T,) -> logits (T, V)."""
    Hq, Hkv, T = raw["num_attention_heads"], raw["num_key_value_heads"], len(ids)
    D = raw.get("head_dim") or raw["hidden_size"] // Hq

    def norm(x, name):
        return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + raw["rms_norm_eps"]) * w[name + ".weight"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    freq = raw["rope_theta"] ** (-2 * np.arange(D // 2) / D)
    scaling = raw.get("rope_scaling")
    for i, f in enumerate(freq if scaling else ()):                                 # llama3's rule, as published: by wavelength
        wave, old = 2 * math.pi / f, scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (old / wave - low) / (high - low)
        slow = f / scaling["factor"]
        freq[i] = slow if wave > old / low else f if wave < old / high else (1 - smooth) * slow + smooth * f
    turn = np.exp(1j * np.outer(np.arange(T), freq))                                # (T, D/2)

    def rotated(x):
        z = (x[:, :D // 2] + 1j * x[:, D // 2:]) * turn
        return np.concatenate((z.real, z.imag), axis=1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(raw["num_hidden_layers"]):
        layer, heads = f"model.layers.{i}.", []
        n = norm(x, layer + "input_layernorm")
        for h in range(Hq):
            own, shared = slice(h * D, h * D + D), slice(h // (Hq // Hkv) * D, h // (Hq // Hkv) * D + D)
            q, k = linear(n, layer + "self_attn.q_proj")[:, own], linear(n, layer + "self_attn.k_proj")[:, shared]
            if raw["model_type"] == "qwen3":
                q, k = norm(q, layer + "self_attn.q_norm"), norm(k, layer + "self_attn.k_norm")
            scores = rotated(q) @ rotated(k).T / math.sqrt(D)
            scores[np.triu_indices(T, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ linear(n, layer + "self_attn.v_proj")[:, shared])
        x = x + linear(np.concatenate(heads, axis=1), layer + "self_attn.o_proj")
        n = norm(x, layer + "post_attention_layernorm")
        gate = linear(n, layer + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(n, layer + "mlp.up_proj"), layer + "mlp.down_proj")
    return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def doubles(model):
    return {k: p.detach().double().numpy() for k, p in model.named_parameters()}


def check_fixture(model, name):
    z = expected(name)
    with torch.no_grad():
        logits = model(z["input_ids"])
        torch.testing.assert_close(logits, z["logits"], atol=2e-4, rtol=0)
        logps = logits.log_softmax(-1)[:, :-1].gather(-1, z["input_ids"][:, 1:, None])[..., 0]
        torch.testing.assert_close(logps, z["token_logprobs"], atol=2e-4, rtol=0)
        for side in ("left", "right"):
            mask = z[f"{side}_attention_mask"]
            for kind in (mask, mask.bool(), mask.float()):
                logits = model(z[f"{side}_input_ids"], attention_mask=kind)
                torch.testing.assert_close(logits[mask.bool()], z[f"{side}_logits"][mask.bool()], atol=2e-4, rtol=0)
                assert logits.isfinite().all()
        torch.testing.assert_close(model(z["long_input_ids"])[:, -8:], z["long_logits_last8"], atol=2e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------------
# the same numbers as transformers and PEFT

@pytest.mark.parametrize("form", ("config.json", "config_v4.json"))
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_also_after_saving(name, form, tmp_path):
    folder = copy(name, tmp_path / "model")
    shutil.copy(os.path.join(HF, name, form), folder / "config.json")
    model = GPT.from_pretrained(folder)
    check_fixture(model, name)
    model.save_pretrained(tmp_path / "saved")
    again = GPT.from_pretrained(tmp_path / "saved")
    assert config_of(name, form).items() <= json.loads((tmp_path / "saved/config.json").read_text()).items()
    for (key, a), (other, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert key == other and torch.equal(a, b)
    assert sorted(load_file(tmp_path / "saved/model.safetensors")) == sorted(weights_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_numpy_decoder_of_these_tests_is_right(name):
    z, raw = expected(name), config_of(name, "config_v4.json")
    w = {k: v.double().numpy() for k, v in weights_of(name).items()}
    np.testing.assert_allclose(reference_logits(raw, w, z["input_ids"][0].numpy()), z["logits"][0], atol=2e-4)


VARIANTS = [
    dict(model_type="llama", attention_bias=True),
    dict(model_type="llama", mlp_bias=True),
    dict(model_type="llama", head_dim=10),
    dict(model_type="llama", num_key_value_heads=4, tie_word_embeddings=True),
    dict(model_type="llama", num_key_value_heads=1),
    dict(model_type="llama", head_dim=8, rope_theta=500000.0, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
    dict(model_type="mistral", sliding_window=None),
    dict(model_type="mistral", sliding_window=300, attention_bias=True),            # Mistral never has biases
    dict(model_type="qwen2", sliding_window=16, use_sliding_window=False),
    dict(model_type="qwen2", head_dim=10),
    dict(model_type="qwen3", head_dim=10, attention_bias=True),
    dict(model_type="qwen3", head_dim=2, num_key_value_heads=4),
]


@pytest.mark.parametrize("fields", VARIANTS, ids=[" ".join(f"{k}={v}" for k, v in f.items())[:60] for f in VARIANTS])
def test_variants_follow_the_numpy_decoder(fields):
    model = tiny(**fields)
    ids = torch.randint(37, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids)[0]
    want = reference_logits({**TINY, **fields}, doubles(model), ids[0].numpy())
    np.testing.assert_allclose(logits, want, atol=3e-4 * max(1, np.abs(want).max()))


def test_which_projections_have_biases():
    def biased(model_type, **fields):
        return sorted({n.split(".")[-2] for n, _ in tiny(model_type, **fields).named_parameters() if n.endswith(".bias")})

    assert biased("llama") == biased("mistral", sliding_window=None) == biased("mistral", sliding_window=None, attention_bias=True) == []
    assert biased("qwen2") == ["k_proj", "q_proj", "v_proj"] and biased("qwen3") == []
    assert biased("llama", attention_bias=True) == biased("qwen3", attention_bias=True) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert biased("llama", mlp_bias=True) == ["down_proj", "gate_proj", "up_proj"]


@pytest.mark.parametrize("kind", ("llama_gqa", "lora"))
def test_activation_checkpointing_changes_no_gradient(kind, monkeypatch):
    grads, runs, forward = [], [], model_py.Layer.forward
    monkeypatch.setattr(model_py.Layer, "forward", lambda self, *a: runs.append(1) or forward(self, *a))
    for checkpointing in (False, True):
        model = some_model(kind)
        model.checkpointing = checkpointing
        prompt_ids, prompt_lengths = padded(PROMPTS)
        ids, _ = padded(COMPLETIONS)
        runs.clear()
        model.completion_hidden(prompt_ids, prompt_lengths, ids, torch.tensor(PROMPT_OF)).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
        layers = len(model.model.layers)
        assert len(runs) == (4 if checkpointing else 2) * layers                    # prompts and completions; each once more in the backward pass
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_compiled_steps_make_few_graphs_and_equal_eager():
    """Regression: every new length compiled the step again, until torch gave up. 200 steps with changing numbers of prompts, completions
    and tokens; equal sizes (heads, lengths) must not be taken for the same size. The backend only counts, so this is quick."""
    graphs, choose = [], random.Random(0)
    torch._dynamo.reset()

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    eager, compiled = tiny(vocab_size=40, num_hidden_layers=1), tiny(vocab_size=40, num_hidden_layers=1)
    compiled.load_state_dict(eager.state_dict())
    compiled.compile_steps(backend=count)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for step in range(200):
            prompts = [[choose.randrange(40) for _ in range(choose.randint(2, 9))] for _ in range(choose.randint(1, 3))]
            G, L = choose.randint(2, 3), choose.randint(2, 6)
            noise = torch.rand(len(prompts), G, L, generator=torch.Generator().manual_seed(step))
            a, b = (sample(m, prompts, G, L, eos_ids=[1, 2, 3, 4, 5], noise=noise) for m in (eager, compiled))
            assert torch.equal(a.ids, b.ids)
            torch.testing.assert_close(a.logps, b.logps, atol=1e-5, rtol=0)
            prompt_ids, prompt_lengths = padded(prompts)
            args = prompt_ids, prompt_lengths, a.ids.flatten(0, 1), torch.arange(len(prompts)).repeat_interleave(G)
            torch.testing.assert_close(eager.completion_hidden(*args), compiled.completion_hidden(*args), atol=1e-5, rtol=1e-4)
    assert 2 <= len(graphs) <= 6
    assert list(compiled.state_dict()) == list(eager.state_dict())                  # plain names in checkpoints


# ---------------------------------------------------------------------------------------------------------------------------
# positions and masks

def test_rotation_pairs_the_two_halves():
    """Regression: rotating neighbouring channels, silently wrong for Hugging Face's q_proj and k_proj, gives [0.5403, 0.8415, 0, 0]."""
    freq = rope_frequencies(4, dict(rope_type="default", rope_theta=10000.0))
    angles = (torch.tensor([[1.0]])[..., None] * freq).repeat(1, 1, 2)[:, None]
    sin = angles.sin() * torch.tensor([-1.0, -1, 1, 1])                             # as hidden_states passes it
    for q, turned in (((1.0, 0, 0, 0), (0.5403, 0, 0.8415, 0)), ((0.0, 0, 1, 0), (-0.8415, 0, 0.5403, 0))):
        q = torch.tensor(q).view(1, 1, 1, 4)
        torch.testing.assert_close(rotate(q, angles.cos(), sin).flatten(), torch.tensor(turned), atol=1e-4, rtol=0)


def test_bfloat16_keeps_positions_apart(monkeypatch):
    """Regression: a frequency buffer or positions cast to bfloat16 round 257 to 256."""
    model, seen = tiny(head_dim=6).to(torch.bfloat16), []
    monkeypatch.setattr(model_py, "rotate", lambda x, cos, sin: seen.append((cos, sin)) or rotate(x, cos, sin))
    with torch.no_grad():
        assert model(torch.zeros(1, 260, dtype=torch.long)).dtype == torch.bfloat16
    cos, sin = (t[0, :, 0].double() for t in seen[0])                                  # (260, 6)
    angles = torch.arange(260, dtype=torch.float64)[:, None] * (1000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)).repeat(2)
    signed_sin = angles.sin() * torch.tensor([-1.0, -1, -1, 1, 1, 1])
    assert (cos - angles.cos()).abs().max() < 1e-3 and (sin - signed_sin).abs().max() < 1e-3
    assert not torch.equal(cos[256], cos[257])


def naive_attention(q, k, v, mask=None):
    """Without the care that some versions of scaled_dot_product_attention take of rows that see nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("path", ("sdpa", "naive"))
def test_padding_never_gives_nan_and_reaches_nobody(path, monkeypatch):
    """Regression: a padding query that sees nothing makes a softmax of -inf alone, and nan spreads from there, also into gradients."""
    if path == "naive":
        monkeypatch.setattr(model_py, "attention", naive_attention)
    model, turns = tiny(), []
    ids = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    monkeypatch.setattr(model_py, "rotate", lambda x, cos, sin: turns.append(sin) or rotate(x, cos, sin))
    logits = model(ids, attention_mask=mask)
    assert logits.isfinite().all()
    for row, first in ((0, 2), (1, 0)):                                             # the first real token has position 0, the next 1
        torch.testing.assert_close(turns[0][row, first:first + 2, 0, 0], torch.tensor([0.0, -math.sin(1)]))
    other = model(torch.where(mask.bool(), ids, 5), attention_mask=mask)            # other ids under the padding
    torch.testing.assert_close(logits[mask.bool()], other[mask.bool()])
    torch.testing.assert_close(logits[0, 2:], model(ids[:1, 2:])[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[1, :4], model(ids[1:2, :4])[0], atol=1e-5, rtol=1e-5)
    logits[mask.bool()].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_token_sees_itself_and_what_stands_before_alone():
    model = tiny("qwen3", head_dim=6)
    ids = torch.randint(37, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 37
    with torch.no_grad():
        a, b = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(a[:7], b[:7], atol=1e-6, rtol=0)
    assert ((a - b).abs().amax(-1)[7:] > 1e-3).all()


def test_qwen3_takes_head_dim_from_the_config():
    """Regression: hidden / heads = 10 was taken where the config says 16."""
    fields = dict(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = tiny("qwen3", **fields)
    attn = model.model.layers[0].self_attn
    assert [tuple(getattr(attn, n).weight.shape) for n in ("q_proj", "k_proj", "v_proj", "o_proj")] == [(64, 40), (32, 40), (32, 40), (40, 64)]
    assert attn.q_norm.weight.shape == attn.k_norm.weight.shape == (16,)
    ids = torch.randint(37, (1, 6), generator=torch.Generator().manual_seed(1))
    _, prompt_kv = model.prefill(ids)
    assert prompt_kv[0][0].shape == (1, 2, 6, 16)
    want = reference_logits({**TINY, "model_type": "qwen3", **fields}, doubles(model), ids[0].numpy())             # attention scale 1/4
    np.testing.assert_allclose(model(ids)[0].detach(), want, atol=1e-3)


def test_an_empty_batch_passes_through():
    """Regression: view(B, T, -1, D) cannot infer a size when there is no element."""
    model, none = tiny(), torch.zeros(0, dtype=torch.long)
    assert model(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3, 37) and model(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 37)
    hidden = model.completion_hidden(torch.ones(1, 3, dtype=torch.long), torch.tensor([3]), torch.zeros(0, 4, dtype=torch.long), none)
    assert hidden.shape == (0, 4, 24)
    hidden.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------------
# prompts run once

PROMPTS = [[3, 9, 4], [5, 1, 8, 2, 7, 7, 30], [11]]
COMPLETIONS = [[6], [1, 2, 3, 4, 5, 6, 7, 8], [], [9, 9, 2], [31, 4, 4, 4, 1]]
PROMPT_OF = [1, 0, 0, 2, 1]


def padded(rows, length=None):
    ids = torch.full((len(rows), length or max(map(len, rows))), 13, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, :len(row)] = torch.tensor(row, dtype=torch.long)
    return ids, torch.tensor([len(row) for row in rows])


def loss_of(hidden, head, ids, weights):
    """Some function of hidden states and of log-probs."""
    return (weights * ((hidden @ head.T).log_softmax(-1).gather(-1, ids[:, None])[:, 0] + hidden.sum(-1))).sum()


def full_forward(model, prompt, completion):
    """Hidden states that predict the completion's tokens, from a forward pass over prompt and completion together."""
    keep = []
    handle = model.model.norm.register_forward_hook(lambda module, x, y: keep.append(y))
    model(torch.tensor([prompt + completion]))
    handle.remove()
    return keep[0][0, len(prompt) - 1:len(prompt) - 1 + len(completion)]            # (L, H)


def some_model(kind):
    if kind == "lora":
        return GPT.from_pretrained(os.path.join(HF, "qwen2_tied"), adapter=os.path.join(HF, "lora_qwen2"))
    return GPT.from_pretrained(os.path.join(HF, kind))


@pytest.mark.parametrize("kind", ("llama_gqa", "qwen2_tied", "qwen3", "lora"))
def test_completion_hidden_is_the_full_forward_and_so_are_its_gradients(kind):
    """Prompts of different lengths, several completions per prompt in any order, of 0, 1 and many tokens."""
    model = some_model(kind)
    weights = torch.randn(sum(map(len, COMPLETIONS)), generator=torch.Generator().manual_seed(0))
    prompt_ids, prompt_lengths = padded(PROMPTS)
    ids, lengths = padded(COMPLETIONS)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    hidden = model.completion_hidden(prompt_ids, prompt_lengths, ids, torch.tensor(PROMPT_OF))
    assert hidden.shape == (5, 8, model.config.hidden_size) and hidden.isfinite().all()
    loss_of(hidden[mask], model.head_weight, ids[mask], weights).backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    rows = [full_forward(model, PROMPTS[p], completion) for p, completion in zip(PROMPT_OF, COMPLETIONS)]
    torch.testing.assert_close(hidden[mask], torch.cat(rows), atol=2e-5, rtol=1e-4)
    loss_of(torch.cat(rows), model.head_weight, torch.tensor(sum(COMPLETIONS, [])), weights).backward()
    for name, p in model.named_parameters():
        if not p.requires_grad:                                                     # under an adapter
            assert kind == "lora" and p.grad is None, name
            continue
        assert p.grad.abs().max() > 0 or name.endswith("k_proj.bias"), name          # a bias of all keys changes no attention weight
        torch.testing.assert_close(got[name], p.grad, atol=2e-5 * max(1, p.grad.abs().max().item()), rtol=1e-3, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("length", (0, 1))
def test_completion_hidden_of_no_and_of_one_token(length):
    model = some_model("llama_gqa")
    prompt_ids, prompt_lengths = padded(PROMPTS)
    hidden = model.completion_hidden(prompt_ids, prompt_lengths, torch.full((5, length), 4), torch.tensor(PROMPT_OF))
    assert hidden.shape == (5, length, 48)
    for i, p in enumerate(PROMPT_OF if length else ()):
        torch.testing.assert_close(hidden[i], full_forward(model, PROMPTS[p], [4]), atol=2e-5, rtol=1e-4)
    hidden.sum().backward()


def test_completion_hidden_runs_each_prompt_once(monkeypatch):
    model, tokens = some_model("llama_gqa"), []
    hidden_states = model.hidden_states
    monkeypatch.setattr(model, "hidden_states", lambda ids, *args: tokens.append(ids.numel()) or hidden_states(ids, *args))
    model.completion_hidden(torch.full((1, 50), 3), torch.tensor([50]), torch.full((8, 5), 4), torch.zeros(8, dtype=torch.long))
    assert sum(tokens) == 50 + 8 * 4


@pytest.mark.parametrize("kind", ("llama_gqa", "qwen3"))
def test_decode_is_the_full_forward_also_when_rows_leave(kind):
    """Prompts of different lengths, more tokens than the first buffers hold, completions and whole prompts leaving in between."""
    model, L = some_model(kind), 70
    prompt_ids, prompt_lengths = padded(PROMPTS)
    ids = torch.randint(100, (3, 3, L), generator=torch.Generator().manual_seed(1))  # (P, G, L)
    with torch.no_grad():
        hidden, prompt_kv = model.prefill(prompt_ids)
        cache, rows = GroupCache(prompt_kv, prompt_lengths, 3, L), torch.arange(9).view(3, 3)
        for t in range(L):
            if t == 20:                                                             # the longest prompt leaves, and one of each group
                kept, members = torch.tensor([0, 2]), torch.tensor([[2, 0], [1, 2]])
                cache.select(kept, members)
                rows = rows[kept[:, None], members]
            got = model.decode(ids.view(9, L)[rows.flatten(), t], cache)
            if t in (0, 1, 19, 20, 21, 63, 64, 65, 69):
                for row, h in zip(rows.flatten().tolist(), got):
                    prompt, completion = PROMPTS[row // 3], ids.view(9, L)[row, :t + 1].tolist()
                    torch.testing.assert_close(h, full_forward(model, prompt, completion + [0])[-1], atol=5e-5, rtol=1e-4)
    assert cache.length == L == cache.own_kv[0][0].shape[3]                         # buffers never grow past what may come
    assert cache.prompt_kv[0][0].shape[2] == 3                                      # prompts are cut to the longest that is left


def test_training_after_inference_also_on_longer_input():
    """Regression: tables built lazily inside inference_mode broke the first backward ("Inference tensors cannot be saved")."""
    model = some_model("qwen3")
    with torch.inference_mode():
        model(torch.ones(1, 5, dtype=torch.long), attention_mask=torch.ones(1, 5))
        hidden, prompt_kv = model.prefill(torch.ones(1, 5, dtype=torch.long))
        model.decode(torch.tensor([1, 2]), GroupCache(prompt_kv, torch.tensor([5]), 2, 4))
    model(torch.ones(1, 40, dtype=torch.long)).sum().backward()
    hidden = model.completion_hidden(torch.ones(1, 40, dtype=torch.long), torch.tensor([40]), torch.ones(2, 9, dtype=torch.long), torch.tensor([0, 0]))
    hidden.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------------
# a new model, and what is written

def test_a_new_model_has_random_weights_of_the_given_size():
    torch.manual_seed(5)
    model = GPT(Config.from_dict({"model_type": "qwen2", **TINY, "hidden_size": 64, "vocab_size": 500}))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            assert abs(p.std().item() / 0.3 - 1) < 0.1 and abs(p.mean().item()) < 0.03, name
        else:
            assert torch.equal(p, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)), name
    torch.manual_seed(5)
    again = GPT(Config.from_dict({"model_type": "qwen2", **TINY, "hidden_size": 64, "vocab_size": 500}))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
