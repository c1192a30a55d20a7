"""model.py against transformers' and PEFT's own numbers (fixtures/hf), and a decoder written a second time, in NumPy."""
import json
import math
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import model as model_py
from lib import files, hf
from lib.hf import Config, rope_frequencies
from lib.lora import adapter_as, add_lora, load_adapter, save_adapter
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


def write(folder, config, tensors=None):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    if tensors is not None:
        save_file({k: v.contiguous() for k, v in tensors.items()}, os.path.join(folder, "model.safetensors"))
    return str(folder)


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
def test_both_forms_of_config_say_the_same(name):
    a, b = (Config.from_dict(config_of(name, form)) for form in ("config.json", "config_v4.json"))
    a.raw = b.raw = {}
    assert a == b


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


def test_lora_logits_and_gradients_are_those_of_peft():
    z = expected("lora_qwen2")
    model = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"), adapter=os.path.join(HF, "lora_qwen2"))
    base = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"))
    with torch.no_grad():
        torch.testing.assert_close(base(z["input_ids"]), z["base_logits"], atol=2e-4, rtol=0)
    logits = model(z["input_ids"])
    torch.testing.assert_close(logits, z["logits"], atol=2e-4, rtol=0)
    logps = logits.log_softmax(-1)[:, :-1].gather(-1, z["input_ids"][:, 1:, None])
    loss = -logps.mean()
    torch.testing.assert_close(loss, z["loss"], atol=1e-4, rtol=0)
    loss.backward()
    params, grads = dict(model.named_parameters()), {k: v for k, v in z.items() if k.startswith("grad::")}
    assert len(grads) == 2 * 2 * 7 == sum("lora_" in name for name in params)
    for key, want in grads.items():
        got = params[key.removeprefix("grad::base_model.model.").removesuffix(".weight")].grad
        torch.testing.assert_close(got, want, atol=2e-5 * max(1, want.abs().max().item()), rtol=1e-3)


def test_a_saved_lora_model_is_merged(tmp_path):
    z = expected("lora_qwen2")
    model = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"), adapter=os.path.join(HF, "lora_qwen2"))
    model.save_pretrained(tmp_path / "merged")
    assert sorted(load_file(tmp_path / "merged/model.safetensors")) == sorted(weights_of("qwen2_tied"))
    with torch.no_grad():
        torch.testing.assert_close(GPT.from_pretrained(tmp_path / "merged")(z["input_ids"]), z["logits"], atol=5e-4, rtol=0)
        torch.testing.assert_close(model(z["input_ids"]), z["logits"], atol=2e-4, rtol=0)           # saving changed nothing


def test_lora_on_a_bfloat16_base(tmp_path):
    """Regression: float32 adapters on a bfloat16 base without autocast ended in "mat1 and mat2 must have the same dtype"; the saved file
    mixed float32 and bfloat16 tensors."""
    z = expected("lora_qwen2")
    model = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"), adapter=os.path.join(HF, "lora_qwen2"), dtype=torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.lora_A.dtype == torch.float32          # trainable: small steps must not be rounded away
    with torch.no_grad():
        logits = model(z["input_ids"])
        assert logits.dtype == torch.bfloat16 and (logits - z["logits"]).abs().mean() < 0.1 * z["logits"].std()
    model(z["input_ids"]).float().sum().backward()
    assert model.model.layers[0].mlp.up_proj.lora_A.grad.dtype == torch.float32
    model.save_pretrained(tmp_path / "merged")
    assert {t.dtype for t in load_file(tmp_path / "merged/model.safetensors").values()} == {torch.bfloat16}


def test_a_new_adapter_changes_nothing_and_trains_alone():
    model, ids = tiny("qwen2"), torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(1))
    before, weights = model(ids).detach(), {n: p.clone() for n, p in model.named_parameters()}
    add_lora(model, 3, 6.0, ("q_proj", "down_proj"))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sorted({n.split(".", 3)[3] for n in trained}) == [f"{t}.lora_{s}" for t in ("mlp.down_proj", "self_attn.q_proj") for s in "AB"]
    assert model.model.layers[0].mlp.down_proj.lora_scale == 2.0 and model.model.layers[0].mlp.down_proj.lora_A.shape == (3, 20)
    A = model.model.layers[0].mlp.down_proj.lora_A
    assert 0.5 * 20 ** -0.5 < A.abs().max() <= 20 ** -0.5                            # PEFT: kaiming_uniform with a = sqrt(5)
    assert torch.equal(model(ids), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(ids).log_softmax(-1)[..., 0].sum().backward()
    optimizer.step()
    after = model(ids).detach()
    assert (after - before).abs().max() > 1e-3
    for n, p in model.named_parameters():
        assert "lora_" in n or torch.equal(p, weights[n]), n
    half = {n: p.detach() / 2 for n, p in model.named_parameters() if "lora_" in n}
    with adapter_as(model, None):
        assert torch.equal(model(ids), before)                                      # the base
    with adapter_as(model, half):                                                    # GRPO's reference
        assert 1e-4 < (model(ids) - before).abs().max() < (after - before).abs().max()
    assert torch.equal(model(ids), after)


def test_saved_adapter_loads_as_itself_and_as_peft_wrote_it(tmp_path):
    """Names, shapes and fields are those of a file that PEFT wrote; an adapter with rslora keeps its scale."""
    adapter_folder = os.path.join(HF, "lora_qwen2")
    model = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"), adapter=adapter_folder)
    save_adapter(model, tmp_path / "again")
    saved, original = (load_file(os.path.join(f, "adapter_model.safetensors")) for f in (tmp_path / "again", adapter_folder))
    assert sorted(saved) == sorted(original) and all(torch.equal(saved[k], original[k]) for k in saved)
    new = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"))
    add_lora(new, 4, 8)
    save_adapter(new, tmp_path / "new")
    assert {k: v.shape for k, v in load_file(tmp_path / "new/adapter_model.safetensors").items()} == {k: v.shape for k, v in original.items()}
    configs = [json.load(open(os.path.join(f, "adapter_config.json"))) for f in (tmp_path / "new", adapter_folder)]
    for key in ("peft_type", "task_type", "r", "lora_alpha", "bias", "use_rslora", "fan_in_fan_out"):
        assert configs[0][key] == configs[1][key], key
    assert sorted(configs[0]["target_modules"]) == sorted(configs[1]["target_modules"])
    assert not [f for f in os.listdir(tmp_path / "new") if f.endswith(".tmp")]


@pytest.mark.parametrize("arguments, says", (((0, 8), "rank 0"), ((4, 8, ()), "none"), ((4, 8, ("lm_head",)), "lm_head")))
def test_adapters_that_cannot_be_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        add_lora(tiny(), *arguments)


def test_a_second_adapter_is_refused():
    model = tiny()
    add_lora(model, 2, 4)
    with pytest.raises(ValueError, match="already"):
        add_lora(model, 2, 4)


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

def test_llama3_frequencies_hand_worked():
    """Regression: `rope_type: llama3` was read but not applied; long text degenerated. Channel pair 2 turns 8192 * 1.41421e-3 / 2 pi
    = 1.84384 times in the original context: (1.84384 - 1) / 3 = 0.281280 of the old frequency and 0.718720 of a 32nd of it."""
    scaling = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    forms = (dict(rope_theta=500000.0, rope_scaling=scaling), dict(rope_parameters={**scaling, "rope_theta": 500000.0}))
    for form in forms:
        c = Config.from_dict({**{k: v for k, v in TINY.items() if k != "rope_theta"}, "model_type": "llama", "head_dim": 8, **form})
        torch.testing.assert_close(rope_frequencies(8, c.rope), torch.tensor([1.0, 0.0376060, 4.29557e-4, 1.66197e-6]), atol=0, rtol=1e-5)
    plain = rope_frequencies(8, dict(rope_type="default", rope_theta=500000.0))
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.0376060, 1.41421e-3, 5.31830e-5]), atol=0, rtol=1e-5)


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


def test_default_head_dim():
    base = {**TINY, "num_attention_heads": 6}
    head_dims = {t: Config.from_dict({**base, "model_type": t, "sliding_window": None}).head_dim for t in ("llama", "mistral", "qwen2", "qwen3")}
    assert head_dims == {"llama": 4, "mistral": 4, "qwen2": 4, "qwen3": 128}
    assert Config.from_dict({**base, "model_type": "qwen3", "num_attention_heads": 10, "head_dim": 2}).head_dim == 2
    assert Config.from_dict({**base, "model_type": "llama", "head_dim": None}).head_dim == 4


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


def test_a_tied_head_is_the_embedding(tmp_path):
    """Regression: KeyError for lm_head.weight, which a tied checkpoint does not store; some store it all the same."""
    model, z = GPT.from_pretrained(os.path.join(HF, "qwen2_tied")), expected("qwen2_tied")
    assert model.head_weight is model.model.embed_tokens.weight
    assert not any("lm_head" in name for name in model.state_dict())
    tensors = weights_of("qwen2_tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    model = GPT.from_pretrained(write(tmp_path / "stored", config_of("qwen2_tied"), tensors))
    torch.testing.assert_close(model(z["input_ids"]), z["logits"], atol=2e-4, rtol=0)
    tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(ValueError, match="model.safetensors.*lm_head.weight.*tie_word_embeddings"):
        GPT.from_pretrained(write(tmp_path / "other", config_of("qwen2_tied"), tensors))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_on_disk_and_in_memory(dtype, tmp_path):
    tensors = {k: v.to(dtype) for k, v in weights_of("llama_gqa").items()}
    folder = write(tmp_path / "half", config_of("llama_gqa"), tensors)
    for loaded in (torch.float32, dtype):
        model = GPT.from_pretrained(folder, dtype=loaded)
        assert all(p.dtype == loaded and torch.equal(p, tensors[name].to(loaded)) for name, p in model.named_parameters())
    assert model(expected("llama_gqa")["input_ids"]).dtype == dtype
    for target, options in (("as it is", {}), ("converted", dict(dtype=torch.float32)), ("back", dict(dtype=dtype))):
        model.save_pretrained(tmp_path / target, **options)
        saved, want = load_file(tmp_path / target / "model.safetensors"), options.get("dtype", dtype)
        assert all(t.dtype == want and torch.equal(t, tensors[name].to(want)) for name, t in saved.items())
        assert json.loads((tmp_path / target / "config.json").read_text())["dtype"] == str(want).removeprefix("torch.")


def test_saved_config_keeps_its_form_and_its_other_fields(tmp_path):
    raw = {**config_of("llama_gqa", "config_v4.json"), "pretraining_tp": 7, "my_field": [1, {"a": None}]}
    model = GPT.from_pretrained(write(tmp_path / "a", raw, weights_of("llama_gqa")))
    model.save_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "b/config.json").read_text()) == {**raw, "torch_dtype": "bfloat16"}


def test_save_copies_the_tokenizer_and_leaves_nothing_else(tmp_path):
    folder = copy("llama_gqa", tmp_path / "a")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "notes.txt"):
        (folder / name).write_text(name)
    GPT.from_pretrained(folder).save_pretrained(tmp_path / "b")
    text = ["chat_template.jinja", "merges.txt", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(tmp_path / "b")) == sorted([*text, "config.json", "generation_config.json", "model.safetensors"])
    assert all((tmp_path / "b" / name).read_text() == name for name in text)
    before = sorted(os.listdir(folder))
    GPT.from_pretrained(folder).save_pretrained(folder)                             # onto itself
    assert sorted(os.listdir(folder)) == before
    check_fixture(GPT.from_pretrained(folder), "llama_gqa")


def test_a_save_that_dies_leaves_the_old_weights(tmp_path, monkeypatch):
    """Regression: a file overwritten in place is unreadable after a kill."""
    folder = copy("llama_gqa", tmp_path / "a")
    model = GPT.from_pretrained(folder)

    def dies(tensors, path, metadata):
        with open(path, "wb") as f:
            f.write(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(hf, "save_file", dies)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(folder)
    check_fixture(GPT.from_pretrained(folder), "llama_gqa")


# ---------------------------------------------------------------------------------------------------------------------------
# how weights come in

def shard(tensors, folder, bin_name=False):
    """Writes tensors as two shards and an index, in Hugging Face's naming."""
    names, ext = sorted(tensors), ("pytorch_model", "bin") if bin_name else ("model", "safetensors")
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{ext[0]}-0000{i}-of-00002.{ext[1]}"
        chosen = {n: tensors[n].contiguous() for n in part}
        torch.save(chosen, os.path.join(folder, file)) if bin_name else save_file(chosen, os.path.join(folder, file))
        weight_map.update(dict.fromkeys(part, file))
    with open(os.path.join(folder, f"{ext[0]}.{ext[1]}.index.json"), "w") as f:
        json.dump({"metadata": {}, "weight_map": weight_map}, f)
    return folder


def test_pytorch_bin_files(tmp_path):
    tensors = weights_of("qwen2_tied")
    torch.save(tensors, os.path.join(write(tmp_path / "single", config_of("qwen2_tied")), "pytorch_model.bin"))
    check_fixture(GPT.from_pretrained(tmp_path / "single"), "qwen2_tied")
    check_fixture(GPT.from_pretrained(shard(tensors, write(tmp_path / "sharded", config_of("qwen2_tied")), True)), "qwen2_tied")
    shard(tensors, tmp_path / "single")                                             # safetensors go first
    torch.save({}, tmp_path / "single/pytorch_model.bin")
    check_fixture(GPT.from_pretrained(tmp_path / "single"), "qwen2_tied")


def test_old_files_with_a_stored_frequency_table(tmp_path):
    tensors = {**weights_of("llama_gqa"), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    check_fixture(GPT.from_pretrained(write(tmp_path / "a", config_of("llama_gqa"), tensors)), "llama_gqa")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    victim = str(tmp_path / "victim")
    for name, where in (("pytorch_model.bin", dict()), ("adapter_model.bin", dict(adapter=tmp_path / "a"))):
        write(tmp_path / "a", config_of("qwen2_tied"))
        shutil.copy(os.path.join(HF, "lora_qwen2", "adapter_config.json"), tmp_path / "a")
        torch.save({**weights_of("qwen2_tied"), "x": Malicious(victim)}, tmp_path / "a" / name)
        with pytest.raises(ValueError, match=name):
            GPT.from_pretrained(os.path.join(HF, "qwen2_tied") if where else tmp_path / "a", **where)
        assert not os.path.exists(victim)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_loading_does_not_hold_the_weights_twice(tmp_path):
    """The most that a process ever held while loading: the weights in float32, and, in half precision, the pages of the mapped file.
    Measured by the kernel, in another process: memory that this one has freed would be used again and hide a second copy."""
    raw = {**TINY, "model_type": "llama", "vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
           "tie_word_embeddings": True}
    with torch.device("meta"):
        blank = {k: torch.zeros(v.shape, dtype=torch.float16, device="cpu") for k, v in GPT(Config.from_dict(raw)).state_dict().items()}
    write(tmp_path / "safetensors", raw, blank)
    torch.save(blank, os.path.join(write(tmp_path / "bin", raw), "pytorch_model.bin"))
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import model as M
def memory(field):
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024
M.torch.set_num_threads(1)
kept = [M.GPT.from_pretrained(sys.argv[2])]                                         # what torch loads at the first call
for folder in sys.argv[3:]:
    start = memory("VmRSS")
    kept.append(M.GPT.from_pretrained(folder))
    print(memory("VmHWM") - start)
"""
    args = [os.path.dirname(model_py.__file__), os.path.join(HF, "llama_gqa"), str(tmp_path / "safetensors"), str(tmp_path / "bin")]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    size = sum(t.numel() for t in blank.values()) * 4 / 2**20                       # in float32
    assert size > 30 and all(size < extra < 1.75 * size for extra in map(float, done.stdout.split())), (size, done.stdout)


# ---------------------------------------------------------------------------------------------------------------------------
# what is refused

def changed(tensors, **edits):
    return {**tensors, **edits}


W, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BAD_WEIGHTS = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != UP}, f"the weights lack 1 tensor, .*{UP}"),
    "extra": (lambda t: changed(t, **{"model.layers.2.mlp.up_proj.weight": torch.ones(2)}),
              "model.safetensors: tensor 'model.layers.2.mlp.up_proj.weight'"),
    "a bias too many": (lambda t: changed(t, **{"model.layers.0.self_attn.o_proj.bias": torch.ones(48)}), "model.safetensors: .*o_proj.bias"),
    "misshapen": (lambda t: changed(t, **{UP: t[UP].T}), rf"model.safetensors: tensor '{UP}' has shape \(48, 80\).*\(80, 48\)"),
    "would broadcast": (lambda t: changed(t, **{UP: t[UP][:1]}), rf"'{UP}' has shape \(1, 48\)"),
    "scalar": (lambda t: changed(t, **{W: torch.tensor(1.0)}), rf"'{W}' has shape \(\)"),
    "integers": (lambda t: changed(t, **{W: torch.ones(48, dtype=torch.int8)}), f"'{W}' is torch.int8"),
    "other names": (lambda t: {k.removeprefix("model."): v for k, v in t.items()}, "model.safetensors: tensor .*has no place in a llama model"),
    "no tensors": (lambda t: {}, "the weights lack 21 tensors"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_refused(case, tmp_path):
    change, message = BAD_WEIGHTS[case]
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(write(tmp_path / "a", config_of("llama_gqa"), change(weights_of("llama_gqa"))))


def spoil_index(content):
    def spoil(folder):
        (folder / "model.safetensors.index.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return spoil


def truncate(name, size):
    def spoil(folder):
        with open(folder / name, "r+b") as f:
            f.truncate(size)
    return spoil


def edit_index(change):
    def spoil(folder):
        content = json.loads((folder / "model.safetensors.index.json").read_text())
        change(content["weight_map"])
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return spoil


def second_copy(folder):
    """A tensor of the first shard once more in another one."""
    first = load_file(folder / "model-00001-of-00004.safetensors")
    other = load_file(folder / "model-00003-of-00004.safetensors")
    save_file({**other, "model.embed_tokens.weight": first["model.embed_tokens.weight"] + 1}, folder / "model-00003-of-00004.safetensors")


FIRST = "model-00001-of-00004.safetensors"
BAD_SHARDS = {
    "missing shard": (lambda f: os.remove(f / FIRST), f"{FIRST}: the index names this file"),
    "shard is a folder": (lambda f: (os.remove(f / FIRST), os.mkdir(f / FIRST)), f"{FIRST}: the index names this file"),
    "empty shard": (truncate(FIRST, 0), f"{FIRST}: not a readable safetensors"),
    "truncated header": (truncate(FIRST, 100), f"{FIRST}: not a readable safetensors"),
    "truncated data": (truncate(FIRST, 50000), f"{FIRST}: not a readable safetensors"),
    "text for a shard": (lambda f: (f / FIRST).write_text("version https://git-lfs.github.com/spec/v1\n" * 3), f"{FIRST}: not a readable safetensors"),
    "tensor twice": (
        second_copy, "model-00003-of-00004.safetensors: tensor 'model.embed_tokens.weight' also stands in .*model-00001-of-00004.safetensors"),
    "index names a tensor that is not there": (edit_index(lambda m: m.update({"model.x": FIRST})), f"{FIRST}: tensor 'model.x' is missing"),
    "index lacks a tensor": (edit_index(lambda m: m.pop("model.norm.weight")), "tensor 'model.norm.weight' is not in the index"),
    "index leads elsewhere": (edit_index(lambda m: m.update({"model.norm.weight": f"../{FIRST}"})), "index.json: field 'weight_map'"),
    "index with numbers": (edit_index(lambda m: m.update({"model.norm.weight": 1})), "index.json: field 'weight_map'"),
    "index without map": (spoil_index({"metadata": {}}), "index.json: field 'weight_map'"),
    "index with a list": (spoil_index({"weight_map": ["a"]}), "index.json: field 'weight_map'"),
    "empty map": (spoil_index({"weight_map": {}}), "the weights lack 27 tensors"),
    "index is a list": (spoil_index([]), "index.json: expected a JSON object"),
    "index is broken": (spoil_index('{"weight_map": '), "index.json: not valid JSON"),
    "no index": (lambda f: os.remove(f / "model.safetensors.index.json"), "has no weights"),
    "no config": (lambda f: os.remove(f / "config.json"), "has no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
    "config not in UTF-8": (lambda f: (f / "config.json").write_bytes(b'{"model_type": "\xff"}'), "config.json: not valid JSON"),
    "config is nested without end": (lambda f: (f / "config.json").write_text("[" * 100000), "config.json: not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), "config.json: expected a JSON object, found list"),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_bad_files_are_refused(case, tmp_path):
    spoil, message = BAD_SHARDS[case]
    spoil(copy("qwen2_sharded", tmp_path / "a"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        GPT.from_pretrained(tmp_path / "a")


def test_bad_bin_files_are_refused(tmp_path):
    folder = write(tmp_path / "a", config_of("llama_gqa"))
    for content in ([torch.ones(2)], {"model.norm.weight": 3}, {"model.norm.weight": {"x": torch.ones(2)}}):
        torch.save(content, os.path.join(folder, "pytorch_model.bin"))
        with pytest.raises(ValueError, match="pytorch_model.bin: expected a dictionary of tensors"):
            GPT.from_pretrained(folder)
    torch.save(weights_of("llama_gqa"), os.path.join(folder, "pytorch_model.bin"))
    truncate("pytorch_model.bin", 5000)(tmp_path / "a")
    with pytest.raises(ValueError, match="pytorch_model.bin: not a readable PyTorch file"):
        GPT.from_pretrained(folder)


def test_folders_that_are_no_models(tmp_path):
    for folder, message in ((tmp_path, "has no config.json"), (tmp_path / "none", "no such folder"),
                            (os.path.join(HF, "qwen3", "config.json"), "no such folder")):
        with pytest.raises(FileNotFoundError, match=message):
            GPT.from_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="has no weights"):
        GPT.from_pretrained(write(tmp_path / "a", config_of("qwen3")))


LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
BAD_CONFIGS = [
    (dict(model_type="gpt2"), "model_type 'gpt2' is not supported.*llama"),
    (dict(model_type="qwen2_moe"), "model_type 'qwen2_moe'"),
    (dict(model_type=None), "model_type None"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope type 'linear' is not supported"),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope type 'yarn'"),
    (dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), "rope type 'dynamic'"),
    (dict(rope_parameters={"rope_type": ["llama3"]}), "rope type"),
    (dict(rope_parameters={"rope_theta": "1e4"}), "'rope_theta' should be a positive number, found '1e4'"),
    (dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "rope parameters should be one flat object"),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling={"type": "yarn", "factor": 4.0}), "rope_parameters and rope_scaling"),
    (dict(rope_parameters={**LLAMA3, "factor": None}), "rope field 'factor'"),
    (dict(rope_parameters={k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}), "rope field 'low_freq_factor'"),
    (dict(rope_parameters={**LLAMA3, "low_freq_factor": 4.0}), "'low_freq_factor' should be smaller"),
    (dict(rope_theta=-1.0), "'rope_theta' should be a positive number, found -1.0"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    (dict(model_type="mistral", max_position_embeddings=8192), "sliding-window attention is not supported.*sliding_window 4096"),
    (dict(model_type="mistral", sliding_window=299), "sliding_window 299"),
    (dict(model_type="qwen2", sliding_window=128, use_sliding_window=True), "sliding_window 128"),
    (dict(model_type="qwen3", layer_types=["full_attention", "sliding_attention"]), "sliding-window attention"),
    (dict(model_type="qwen3", layer_types="full_attention"), "'layer_types' should be a list"),
    (dict(quantization_config={"quant_method": "gptq"}), "quantized .*quantization_config"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
    (dict(num_attention_heads=5), "hidden_size 24 is not divisible by num_attention_heads 5"),
    (dict(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    (dict(head_dim=7), "head_dim 7 is odd"),
    (dict(vocab_size=None), "'vocab_size' is missing"),
    (dict(vocab_size="37"), "'vocab_size' should be a positive int, found '37'"),
    (dict(vocab_size=0), "'vocab_size' should be a positive int, found 0"),
    (dict(num_hidden_layers=True), "'num_hidden_layers' should be a positive int, found True"),
    (dict(num_hidden_layers=10**8), "num_hidden_layers 100000000"),
    (dict(intermediate_size=20.0), "'intermediate_size' should be a positive int, found 20.0"),
    (dict(rms_norm_eps=0), "'rms_norm_eps' should be a positive float, found 0"),
    (dict(rms_norm_eps="1e-5"), "'rms_norm_eps' should be a positive float"),
    (dict(tie_word_embeddings="false"), "'tie_word_embeddings' should be a bool, found 'false'"),
    (dict(model_type="qwen2", num_key_value_heads=None), "'num_key_value_heads' is missing"),
]


@pytest.mark.parametrize("fields,message", BAD_CONFIGS, ids=[str(f)[:70] for f, _ in BAD_CONFIGS])
def test_unsupported_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"a/config.json: .*({message})"):
        Config.from_dict({"model_type": "llama", **TINY, **fields}, "a/config.json")


def test_what_a_config_may_leave_out_or_carry():
    plain = Config.from_dict({k: TINY[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
                             | {"model_type": "llama"})
    assert (plain.num_key_value_heads, plain.max_position_embeddings, plain.rms_norm_eps, plain.tie_word_embeddings) == (4, 2048, 1e-6, False)
    assert plain.rope == {"rope_type": "default", "rope_theta": 10000.0}
    for fields in (dict(rms_norm_eps=1), dict(rope_theta=10000), dict(rope_scaling={"type": "default"}), dict(hidden_act="swish"), dict(head_dim=None),
                   dict(quantization_config=None), dict(layer_types=["full_attention"] * 2), dict(sliding_window=4096),
                   dict(rope_parameters={"rope_type": "default", "rope_theta": 5.0}, rope_scaling={"rope_type": "default", "rope_theta": 5.0}),
                   dict(model_type="mistral", sliding_window=300)):
        Config.from_dict({"model_type": "llama", **TINY, **fields})


WRONG = ("x", "", None, -1, 0, 1, 2.5, 10**30, 10**400, True, False, [], [1], ["x"], {}, {"a": 1}, {"a": {}}, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("name", ("llama_gqa", "qwen3"))
def test_any_wrong_value_in_config_gives_a_model_or_a_clear_error(name, tmp_path):
    """Regression: an int of 31 digits gave OverflowError, a list for rope_type TypeError, a text for initializer_range TypeError."""
    raw = {**config_of(name), **dict(sliding_window=None, use_sliding_window=False, quantization_config=None, partial_rotary_factor=None, rope_theta=1e4,
                                     rope_scaling=None, layer_types=["full_attention"] * 2, attention_bias=False, mlp_bias=False)}
    folder, refused, seen = str(copy(name, tmp_path / "a")), 0, []
    for field in raw:
        for value in WRONG:
            try:
                config = Config.from_dict({**raw, field: value}, f"{folder}/config.json")
                config.raw = {}
                if config not in seen:
                    seen.append(config)
                    GPT.from_pretrained(write(folder, {**raw, field: value}))       # the weights may not fit it
            except ValueError as e:
                refused += 1
                names = (field, field.replace("_", " "), "tensor", "sliding_window", "is not divisible by num_attention_heads")
                assert folder in str(e) and any(n in str(e) for n in names), (field, value, str(e))
    assert refused > 200
    for form in ("rope_parameters", "rope_scaling"):
        for field in LLAMA3:
            for value in WRONG:
                try:
                    GPT(Config.from_dict({"model_type": "llama", **TINY, form: {**LLAMA3, field: value}}))
                except ValueError as e:
                    assert field in str(e) or field == "rope_type" and "rope type" in str(e) or "rope parameters" in str(e), (field, value, str(e))


def test_a_config_too_large_for_the_machine_is_refused(tmp_path):
    folder = write(tmp_path / "a", {**config_of("llama_gqa"), "vocab_size": 2**31 - 1, "hidden_size": 2**31 - 2}, weights_of("llama_gqa"))
    with pytest.raises(ValueError, match=f"{folder}: cannot make the model of this config.json on device cpu"):
        GPT.from_pretrained(folder)
    with pytest.raises(ValueError, match="on device abacus"):
        GPT.from_pretrained(os.path.join(HF, "llama_gqa"), device="abacus")


# ---------------------------------------------------------------------------------------------------------------------------
# adapters

def adapter(folder, change=None, **config):
    """A copy of the fixture's adapter with other tensors or other fields."""
    with open(os.path.join(HF, "lora_qwen2", "adapter_config.json")) as f:
        content = {**json.load(f), **config}
    tensors = load_file(os.path.join(HF, "lora_qwen2", "adapter_model.safetensors"))
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump(content, f)
    tensors = change(tensors) if change else tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, os.path.join(folder, "adapter_model.safetensors"))
    return folder


def with_adapter(folder, base="qwen2_tied"):
    return GPT.from_pretrained(os.path.join(HF, base), adapter=folder)


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
BAD_ADAPTERS = {
    "wrong r": (None, dict(r=8), r"adapter_model.safetensors: tensor '.*lora_A.*' has shape \(4, .*r = 8 ask for \(8, "),
    "missing B": (lambda t: {k: v for k, v in t.items() if k != Q + "B.weight"}, {}, "lora_A or lora_B of 'model.layers.1.self_attn.q_proj'"),
    "missing module": (lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up_proj" not in k}, {}, "'model.layers.1.mlp.up_proj' is missing"),
    "unknown module": (lambda t: changed(t, **{"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}), {}, "layers.9.mlp.up_proj.lora_A"),
    "output head": (lambda t: changed(t, **{"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}), {}, "lm_head.lora_A"),
    "embedding": (lambda t: changed(t, **{"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 151)}), {}, "lora_embedding_A"),
    "whole weight": (lambda t: changed(t, **{"base_model.model.model.norm.weight": torch.ones(64)}), {}, "model.norm.weight"),
    "misshapen": (lambda t: changed(t, **{Q + "A.weight": t[Q + "A.weight"].T}), {}, r"q_proj.lora_A.weight' has shape \(64, 4\)"),
    "integers": (lambda t: changed(t, **{Q + "A.weight": t[Q + "A.weight"].int()}), {}, "q_proj.lora_A.weight' is torch.int32"),
    "twice": (lambda t: changed(t, **{Q.removeprefix("base_model.model.") + "A.weight": t[Q + "A.weight"] + 1}), {}, "q_proj.lora_A.weight' is there twice"),
    "no tensors": (lambda t: {}, dict(target_modules="all-linear"), "the adapter holds no tensors"),
    "DoRA": (None, dict(use_dora=True), "adapter_config.json: only plain LoRA.*use_dora True"),
    "KaSA": (None, dict(kasa_config={"beta": 1.0}), "adapter_config.json: only plain LoRA.*kasa_config"),
    "PiSSA": (None, dict(init_lora_weights="pissa"), "adapter_config.json: only plain LoRA.*init_lora_weights 'pissa'"),
    "biases": (None, dict(bias="all"), "bias 'all'"),
    "other modules": (None, dict(modules_to_save=["lm_head"]), r"modules_to_save \['lm_head'\]"),
    "ranks by pattern": (None, dict(rank_pattern={"q_proj": 8}), "rank_pattern"),
    "other method": (None, dict(peft_type="IA3"), "peft_type 'IA3'"),
    "r missing": (None, dict(r=None), "adapter_config.json: r should be a positive int"),
    "r is true": (None, dict(r=True), "r should be a positive int"),
    "alpha is text": (None, dict(lora_alpha="8"), "lora_alpha a number, found 4 and '8'"),
    "alpha is nan": (None, dict(lora_alpha=math.nan), "lora_alpha a number"),
    "alpha is huge": (None, dict(lora_alpha=10**400), "lora_alpha a number"),
}


@pytest.mark.parametrize("case", BAD_ADAPTERS)
def test_bad_adapters_are_refused(case, tmp_path):
    change, fields, message = BAD_ADAPTERS[case]
    with pytest.raises(ValueError, match=message):
        with_adapter(adapter(tmp_path / "a", change, **fields))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    """Regression: an adapter on the output head of an untied model was accepted and then played no part."""
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: tensor '.*' has shape .* this model and r = 4 ask for"):
        with_adapter(os.path.join(HF, "lora_qwen2"), base="llama_gqa")
    head = {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48), "base_model.model.lm_head.lora_B.weight": torch.ones(131, 4)}
    with pytest.raises(ValueError, match="lm_head.lora_A"):
        with_adapter(adapter(tmp_path / "a", lambda t: head, target_modules=["lm_head"]), base="llama_gqa")
    with pytest.raises(FileNotFoundError, match="has no adapter_config.json"):
        with_adapter(os.path.join(HF, "llama_gqa"))
    os.remove(adapter(tmp_path / "b") / "adapter_model.safetensors")
    with pytest.raises(FileNotFoundError, match="has no weights .adapter_model.safetensors or adapter_model.bin"):
        with_adapter(tmp_path / "b")


def test_adapter_variants(tmp_path):
    """A .bin file, fewer modules, half precision, another scale: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
    z = expected("lora_qwen2")
    with torch.no_grad():
        folder = adapter(tmp_path / "bin")
        torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
        os.remove(folder / "adapter_model.safetensors")
        torch.testing.assert_close(with_adapter(folder)(z["input_ids"]), z["logits"], atol=2e-4, rtol=0)

        same = adapter(tmp_path / "scale", use_rslora=True, lora_alpha=4.0)         # 4 / sqrt(4) = 8 / 4
        torch.testing.assert_close(with_adapter(same)(z["input_ids"]), z["logits"], atol=2e-4, rtol=0)

        few = adapter(tmp_path / "few", lambda t: {k: v.bfloat16() for k, v in t.items() if "q_proj" in k}, target_modules=["q_proj"], lora_alpha=2)
        model, w = with_adapter(few), {k: v.double().numpy() for k, v in weights_of("qwen2_tied").items()}
        for name, t in load_file(few / "adapter_model.safetensors").items():
            if "lora_A" in name:
                B = load_file(few / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
                w[name.removeprefix("base_model.model.").replace("lora_A.", "")] += 2 / 4 * (B.double() @ t.double()).numpy()
        want = reference_logits(config_of("qwen2_tied", "config_v4.json"), w, z["input_ids"][0].numpy())
        np.testing.assert_allclose(model(z["input_ids"])[0], want, atol=3e-4)


def test_any_wrong_value_in_adapter_config_gives_a_model_or_a_clear_error(tmp_path):
    """Regression: an int of 400 digits for lora_alpha gave OverflowError."""
    with open(os.path.join(HF, "lora_qwen2", "adapter_config.json")) as f:
        fields = json.load(f)
    folder, model = adapter(tmp_path / "a"), GPT.from_pretrained(os.path.join(HF, "qwen2_tied"))
    for field in fields:
        for value in ("x", None, -1, 0, 10**400, True, [], ["x"], [1], {"a": 1}, math.nan):
            (folder / "adapter_config.json").write_text(json.dumps({**fields, field: value}))
            try:
                load_adapter(model, folder)
            except ValueError as e:
                assert str(folder) in str(e) and (field in str(e) or "lora_A" in str(e)), (field, value, str(e))
