"""lib/lora.py: PEFT's own numbers (fixtures/hf/lora_qwen2), and PEFT's folders in and out."""
import json
import math
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.hf import Config
from lib.lora import adapter_as, add_lora, linears, load_adapter, save_adapter
from model import GPT

HF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "hf")
BASE, ADAPTER = os.path.join(HF, "qwen2_tied"), os.path.join(HF, "lora_qwen2")
PREFIX = "base_model.model."
Q = PREFIX + "model.layers.1.self_attn.q_proj.lora_"
EMBEDDING = "model.embed_tokens.weight"


def expected():
    z = np.load(os.path.join(ADAPTER, "expected.npz"))
    return {k: torch.from_numpy(v) for k, v in z.items()}


def tensors_of(folder, file="adapter_model.safetensors"):
    return load_file(os.path.join(folder, file))


def config_of(folder):
    with open(os.path.join(folder, "adapter_config.json")) as f:
        return json.load(f)


def adapter(folder, change=None, **fields):
    """A copy of the fixture's adapter, tensors changed (None: without it), other fields."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**config_of(ADAPTER), **fields}))
    tensors = change(tensors_of(ADAPTER)) if change else tensors_of(ADAPTER)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def tiny():
    torch.manual_seed(0)
    return GPT(Config.from_dict(dict(
        model_type="qwen2", vocab_size=37, hidden_size=24, intermediate_size=20,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=300, initializer_range=0.3)))


def close(a, b, atol=2e-4):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def test_logits_and_gradients_are_those_of_peft():
    z, model = expected(), GPT.from_pretrained(BASE, adapter=ADAPTER)
    with torch.no_grad():
        close(GPT.from_pretrained(BASE)(z["input_ids"]), z["base_logits"])
    logits = model(z["input_ids"])
    close(logits, z["logits"])
    loss = -logits.log_softmax(-1)[:, :-1].gather(-1, z["input_ids"][:, 1:, None]).mean()
    close(loss, z["loss"], atol=1e-4)
    loss.backward()
    params = dict(model.named_parameters())
    grads = {k: v for k, v in z.items() if k.startswith("grad::")}
    assert len(grads) == 2 * 2 * 7 == sum(p.requires_grad for p in params.values())
    for key, want in grads.items():
        got = params[key.removeprefix("grad::" + PREFIX).removesuffix(".weight")].grad
        atol = 2e-5 * max(1, want.abs().max().item())
        torch.testing.assert_close(got, want, atol=atol, rtol=1e-3)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_saved_model_is_merged(dtype, tmp_path):
    """Regression: float32 adapters on a bfloat16 base without autocast ended in "mat1 and mat2 must
    have the same dtype"; the saved file mixed float32 and bfloat16 tensors."""
    z, model = expected(), GPT.from_pretrained(BASE, adapter=ADAPTER, dtype=dtype)
    assert all(p.dtype == (torch.float32 if "lora_" in name else dtype)
               for name, p in model.named_parameters())
    before = model(z["input_ids"])
    assert before.dtype == dtype and (before - z["logits"]).abs().mean() < 0.1 * z["logits"].std()
    before.float().sum().backward()
    assert model.model.layers[0].mlp.up_proj.lora_A.grad.dtype == torch.float32
    model.save_pretrained(tmp_path / "merged")
    saved = tensors_of(tmp_path / "merged", "model.safetensors")
    assert sorted(saved) == sorted(tensors_of(BASE, "model.safetensors"))
    assert {t.dtype for t in saved.values()} == {dtype}
    with torch.no_grad():
        assert torch.equal(model(z["input_ids"]), before)  # saving changed nothing
        if dtype == torch.float32:
            close(GPT.from_pretrained(tmp_path / "merged")(z["input_ids"]), z["logits"], 5e-4)


def test_a_new_adapter_changes_nothing_and_trains_alone():
    model = tiny()
    ids = torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(1))
    before, weights = model(ids).detach(), {n: p.clone() for n, p in model.named_parameters()}
    add_lora(model, 3)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora_{side}" for name in linears(model) for side in "AB"}
    assert len(linears(model)) == 2 * 7 and "lm_head" not in linears(model)
    layer = model.model.layers[0].mlp.down_proj
    assert layer.lora_scale == 1.0 and layer.lora_A.shape == (3, 20)
    # PEFT: kaiming_uniform with a = sqrt(5)
    assert 0.5 * 20 ** -0.5 < layer.lora_A.abs().max() <= 20 ** -0.5
    assert torch.equal(model(ids), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(ids).log_softmax(-1)[..., 0].sum().backward()
    optimizer.step()
    after = model(ids).detach()
    assert (after - before).abs().max() > 1e-3
    assert all("lora_" in n or torch.equal(p, weights[n]) for n, p in model.named_parameters())
    # GRPO's reference: B = 0 is the base
    first = {n: p.detach() * ("lora_A" in n) for n, p in model.named_parameters() if n in trained}
    with pytest.raises(KeyboardInterrupt), adapter_as(model, first):
        assert torch.equal(model(ids), before)
        raise KeyboardInterrupt
    assert torch.equal(model(ids), after)
    with pytest.raises(ValueError, match="has a LoRA adapter already"):
        add_lora(model, 3)


def test_a_reference_from_a_checkpoint_comes_to_the_models_device():
    """Regression: after a resume the reference stayed on the CPU, and a run on a GPU ended."""
    model = GPT.from_pretrained(BASE, adapter=ADAPTER)
    stored = {n: p.detach().double() for n, p in model.named_parameters() if "lora_" in n}
    model.to("meta")
    with adapter_as(model, stored):
        for name, p in model.named_parameters():
            assert p.is_meta and p.dtype == torch.float32, name


def test_saved_adapters_are_as_peft_writes_them(tmp_path):
    """Names, shapes and fields are those of a file that PEFT wrote, and what was loaded comes back,
    with its own tokenizer and template."""
    fields = dict(lora_alpha=7, rank_pattern={"x_proj": 9}, use_rslora=True, lora_dropout=0.1)
    loaded = adapter(tmp_path / "loaded", **fields)
    (loaded / "tokenizer.json").write_text("its own")
    model = GPT.from_pretrained(BASE, adapter=loaded)
    save_adapter(model, tmp_path / "again")
    want = {**config_of(ADAPTER), **fields, "modules_to_save": None}
    assert config_of(tmp_path / "again") == want
    saved, original = tensors_of(tmp_path / "again"), tensors_of(ADAPTER)
    assert sorted(saved) == sorted(original)
    assert all(torch.equal(saved[k], original[k]) for k in saved)
    model.save_pretrained(tmp_path / "merged")
    for name in ("again", "merged"):
        assert (tmp_path / name / "tokenizer.json").read_text() == "its own"

    new = GPT.from_pretrained(BASE)
    add_lora(new, 4)
    save_adapter(new, tmp_path / "new")
    assert {k: v.shape for k, v in tensors_of(tmp_path / "new").items()} == {
        k: v.shape for k, v in original.items()}
    config, theirs = config_of(tmp_path / "new"), config_of(ADAPTER)
    for key in ("peft_type", "task_type", "r", "bias", "use_rslora", "fan_in_fan_out"):
        assert config[key] == theirs[key], key
    assert config["lora_alpha"] == 4 and config["base_model_name_or_path"] == BASE
    assert config["target_modules"] == sorted(theirs["target_modules"])
    assert sorted(os.listdir(tmp_path / "new")) == ["adapter_config.json",
                                                    "adapter_model.safetensors"]


# --------------------------------------------------------------------------------------------------
# what PEFT's folders may hold

def only(*parts):
    return lambda t: {k: v for k, v in t.items() if any(part in k for part in parts)}


def halved(t):
    """q_proj in layer 0 of rank 2: the first two of four."""
    name = PREFIX + "model.layers.0.self_attn.q_proj.lora_"
    return {**t, name + "A.weight": t[name + "A.weight"][:2],
            name + "B.weight": t[name + "B.weight"][:, :2]}


def base_weights(*names):
    base = tensors_of(BASE, "model.safetensors")
    head = {"lm_head.weight": base[EMBEDDING].clone()}
    return lambda t: {**t, **{PREFIX + name: {**base, **head}[name] for name in names}}


# change, fields, and alpha / r (or alpha / sqrt(r)) by the end of the layer's name
VARIANTS = {
    "as it is": (None, {}, {"": 8 / 4}),
    "rslora": (None, dict(use_rslora=True, lora_alpha=3.0), {"": 3 / 2}),
    "few targets, bfloat16": (lambda t: {k: v.bfloat16() for k, v in only("q_proj")(t).items()},
                              dict(target_modules=["self_attn.q_proj"], lora_alpha=2), {"": 2 / 4}),
    "a regular expression": (only("layers.1"), dict(target_modules=r".*\.1\..*"), {"": 8 / 4}),
    "alpha by pattern": (None, dict(alpha_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_.*": 6}),
                         {"q_proj": 2 / 4, "layers.1.mlp.up_proj": 6 / 4, "": 8 / 4}),
    "rank by pattern": (halved, dict(rank_pattern={r"layers\.0\.self_attn\.q_proj": 2}),
                        {"layers.0.self_attn.q_proj": 8 / 2, "": 8 / 4}),
    "the name's end, not its middle": (None, dict(alpha_pattern={"layers": 2, "proj": 2}),
                                       {"": 8 / 4}),
    "the base's embeddings": (base_weights(EMBEDDING, "lm_head.weight"), {}, {"": 8 / 4}),
    "untrained modules": (base_weights("model.norm.weight"), dict(modules_to_save=["norm"]),
                          {"": 8 / 4}),
}


@pytest.mark.parametrize("file", ("adapter_model.safetensors", "adapter_model.bin"))
@pytest.mark.parametrize("case", VARIANTS)
def test_adapters_of_all_kinds_give_the_merged_model(case, file, tmp_path):
    """The logits of W + alpha / r * B A, added by hand; what is saved gives them again."""
    change, fields, scales = VARIANTS[case]
    folder = adapter(tmp_path / "a", change, **fields)
    tensors, weights = tensors_of(folder), tensors_of(BASE, "model.safetensors")
    for name, A in tensors.items():
        if "lora_A" in name:
            target = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            scale = next(s for end, s in scales.items() if target.endswith(end))
            B = tensors[name.replace("lora_A", "lora_B")]
            weights[target + ".weight"] += (scale * (B.double() @ A.double())).float()
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
        os.remove(folder / "adapter_model.safetensors")
    by_hand, ids = GPT.from_pretrained(BASE), expected()["input_ids"]
    by_hand.load_state_dict(weights)
    with torch.no_grad():
        want, model = by_hand(ids), GPT.from_pretrained(BASE, adapter=folder)
        close(model(ids), want, 5e-4)
        save_adapter(model, tmp_path / "b")
        assert all("lora_" in name for name in tensors_of(tmp_path / "b"))
        assert config_of(tmp_path / "b") == {**config_of(folder), "modules_to_save": None}
        again = GPT.from_pretrained(BASE, adapter=tmp_path / "b")
        assert torch.equal(again(ids), model(ids))


def plus(**tensors):
    return lambda t: {**t, **{PREFIX + k.replace("__", "."): v for k, v in tensors.items()}}


ONES = torch.ones(4, 64)
BAD_ADAPTERS = {
    "wrong r": (None, dict(r=8), r"tensor '.*lora_A.*' has shape \(4, .*r = 8 ask for \(8, "),
    "wrong r by pattern": (None, dict(rank_pattern={"q_proj": 8}), r"q_proj.*r = 8 ask for \(8, "),
    "missing B": (lambda t: {k: v for k, v in t.items() if k != Q + "B.weight"}, {},
                  "lora_A or lora_B of 'model.layers.1.self_attn.q_proj' is missing"),
    "missing module": (lambda t: {k: v for k, v in t.items() if "1.mlp.up_proj" not in k}, {},
                       "'model.layers.1.mlp.up_proj' is missing"),
    "unknown layer": (plus(model__layers__9__mlp__up_proj__lora_A__weight=ONES), {}, "layers.9"),
    "output head": (plus(lm_head__lora_A__weight=ONES), {}, "lm_head.lora_A"),
    "embedding": (plus(model__embed_tokens__lora_embedding_A=ONES), {}, "lora_embedding_A"),
    "trained norm": (plus(model__norm__weight=torch.ones(64)), {}, "model.norm.weight.* differs"),
    "resized vocabulary": (plus(model__embed_tokens__weight=torch.ones(152, 64)), {},
                           r"embed_tokens.weight' \(152, 64\) differs from the base.*\(151, 64\)"),
    "trained head": (plus(lm_head__weight=torch.ones(151, 64)), {}, "lm_head.weight.* differs"),
    "misshapen": (lambda t: {**t, Q + "A.weight": t[Q + "A.weight"].T}, {}, r"shape \(64, 4\)"),
    "integers": (lambda t: {**t, Q + "A.weight": t[Q + "A.weight"].int()}, {}, "is torch.int32"),
    "without PEFT's prefix": (lambda t: {k.removeprefix(PREFIX): v for k, v in t.items()}, {},
                              "is no lora_A or lora_B"),
    "no tensors": (lambda t: {}, dict(target_modules="all-linear"), "adapter holds no tensors"),
    "DoRA": (None, dict(use_dora=True), "adapter_config.json: only plain LoRA.*use_dora True"),
    "PiSSA": (None, dict(init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
    "biases": (None, dict(bias="all"), "bias 'all'"),
    "other method": (None, dict(peft_type="IA3"), "peft_type 'IA3'"),
    "r is true": (None, dict(r=True), "adapter_config.json: r should be a positive int"),
    "alpha is text": (None, dict(lora_alpha="8"), "lora_alpha a number, found 4 and '8'"),
    "alpha is nan": (None, dict(lora_alpha=math.nan), "lora_alpha a number"),
    "pattern is no expression": (None, dict(alpha_pattern={"(": 1}), r"alpha_pattern .*'\(': 1"),
    "pattern gives text": (None, dict(rank_pattern={"a": "1"}), "rank_pattern should map names"),
}


@pytest.mark.parametrize("case", BAD_ADAPTERS)
def test_bad_adapters_are_refused(case, tmp_path):
    change, fields, message = BAD_ADAPTERS[case]
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(BASE, adapter=adapter(tmp_path / "a", change, **fields))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    """Regression: an adapter on the output head of an untied model was accepted and then played no
    part."""
    llama = os.path.join(HF, "llama_gqa")
    with pytest.raises(ValueError, match="has shape .* this model and r = 4 ask for"):
        GPT.from_pretrained(llama, adapter=ADAPTER)
    head = plus(lm_head__lora_A__weight=torch.ones(4, 48))({})
    with pytest.raises(ValueError, match="lm_head.lora_A"):
        GPT.from_pretrained(llama, adapter=adapter(tmp_path / "a", lambda t: head))
    with pytest.raises(FileNotFoundError, match="adapter_config.json, it is a whole model"):
        GPT.from_pretrained(BASE, adapter=llama)
    with pytest.raises(FileNotFoundError, match="hf download me/adapter"):
        GPT.from_pretrained(BASE, adapter="me/adapter")
    os.remove(adapter(tmp_path / "b") / "adapter_model.safetensors")
    with pytest.raises(FileNotFoundError, match="has no weights .adapter_model.safetensors or"):
        GPT.from_pretrained(BASE, adapter=tmp_path / "b")


def test_any_wrong_value_in_adapter_config_gives_a_model_or_a_clear_error(tmp_path):
    """Regression: an int of 400 digits for lora_alpha gave OverflowError."""
    folder, fields, model = adapter(tmp_path / "a"), config_of(ADAPTER), GPT.from_pretrained(BASE)
    for field in (*fields, "alpha_pattern", "rank_pattern"):
        for value in ("x", None, -1, 0, 10**400, True, [], ["x"], [1], {"a": 1}, {".*": 2.5},
                      math.nan):
            content = json.dumps({**fields, field: value})
            (folder / "adapter_config.json").write_text(content)
            try:
                load_adapter(model, folder)
            except ValueError as e:
                assert str(folder) in str(e) and (field in str(e) or "lora_A" in str(e)), str(e)
