"""lib/lora.py: PEFT's own numbers (fixtures/hf/lora_qwen2), and PEFT's folders in and out."""
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib import products
from lib.chat import read_template
from lib.lora import adapter_as, add_lora, linears, ready_to_sample, save_adapter
from model import GPT
from tools.plan import Plan

HF = Path(__file__).parent / "fixtures" / "hf"
BASE, ADAPTER = HF / "qwen2_tied", HF / "lora_qwen2"
PREFIX = "base_model.model."
EMBEDDING = "model.embed_tokens.weight"


def expected():
    return {k: torch.from_numpy(v) for k, v in np.load(ADAPTER / "expected.npz").items()}


def tensors_of(folder, file="adapter_model.safetensors"):
    return load_file(folder / file)


TENSORS = tensors_of(ADAPTER)
Q0, Q1 = (PREFIX + f"model.layers.{layer}.self_attn.q_proj.lora_" for layer in range(2))


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def adapter(folder, changed=(), **fields):
    """A copy of the fixture's adapter with other fields and changed tensors (None: without it), by
    name."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**config_of(ADAPTER), **fields}))
    tensors = {k: v.contiguous() for k, v in {**TENSORS, **dict(changed)}.items() if v is not None}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


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
    model, ids = GPT.from_pretrained(HF / "llama_gqa"), torch.arange(14).view(2, 7)
    before, weights = model(ids).detach(), {n: p.clone() for n, p in model.named_parameters()}
    add_lora(model, 3)
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert set(own) == {f"{name}.lora_{side}" for name in linears(model) for side in "AB"}
    layers = len(model.model.layers)
    assert len(linears(model)) == 7 * layers and "lm_head" not in linears(model)
    layer = model.model.layers[0].mlp.down_proj
    assert layer.lora_scale == 1.0 and layer.lora_A.shape == (3, layer.in_features)
    # PEFT: kaiming_uniform with a = sqrt(5)
    assert 0.5 < layer.lora_A.abs().max() * layer.in_features ** 0.5 <= 1
    assert torch.equal(model(ids), before)
    first = {n: p.detach().clone() for n, p in own.items()}
    model(ids).log_softmax(-1)[..., 0].sum().backward()
    torch.optim.SGD(own.values(), lr=0.5).step()
    after = model(ids).detach()
    assert (after - before).abs().max() > 1e-3
    assert all("lora_" in n or torch.equal(p, weights[n]) for n, p in model.named_parameters())
    # GRPO's reference
    with pytest.raises(KeyboardInterrupt), adapter_as(model, first):
        assert torch.equal(model(ids), before)
        raise KeyboardInterrupt
    assert torch.equal(model(ids), after)
    with pytest.raises(ValueError, match="has a LoRA adapter already"):
        add_lora(model, 3)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("rank", (0, 4))
def test_the_plan_counts_what_the_sampler_copies_on_a_cpu(rank, dtype, monkeypatch):
    monkeypatch.setattr(products, "PACK_FROM", 64 * 64)  # of the model's matrices some are smaller
    bf16 = dtype == "bfloat16"
    model = GPT.from_pretrained(BASE, dtype=getattr(torch, dtype if rank else "float32"))
    if rank:
        add_lora(model, rank)
    own = {id(p) for p in model.parameters()}
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16), ready_to_sample(model):
        copied = [p for p in model.parameters() if id(p) not in own and p.dim() == 2]
        assert any(p.is_mkldnn for p in copied) == bool(products.PACKED_TYPES)
        size = sum(p.numel() * p.element_size() for p in copied)
    plan = Plan(SimpleNamespace(
        model="", dtype=dtype, device="cpu", adapter="", lora_rank=rank, checkpointing=False,
        beta=0.0, prompts_per_step=1, group_size=2, max_prompt_tokens=8, max_new_tokens=8,
        micro_tokens=100, eval_samples=1), model.config)
    head = 4 * model.head_weight.numel() * (plan.h == plan.r)
    assert plan.copies + plan.packed == size + head


def test_a_reference_comes_to_the_models_device():
    """Regression: after a resume the reference stayed on the CPU, and a run on a GPU ended."""
    model = GPT.from_pretrained(BASE, adapter=ADAPTER)
    stored = {n: p.detach().double() for n, p in model.named_parameters() if "lora_" in n}
    model.to("meta")
    with adapter_as(model, stored):
        for name, p in model.named_parameters():
            assert p.is_meta and p.dtype == torch.float32, name


def test_saved_adapters_are_as_peft_writes_them(tmp_path):
    """Names, shapes and fields are those of a file that PEFT wrote."""
    model, theirs = GPT.from_pretrained(BASE), config_of(ADAPTER)
    add_lora(model, 4)
    save_adapter(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["adapter_config.json", "adapter_model.safetensors"]
    assert {k: v.shape for k, v in tensors_of(tmp_path).items()} == {
        k: v.shape for k, v in tensors_of(ADAPTER).items()}
    config = config_of(tmp_path)
    for key in ("peft_type", "task_type", "r", "bias", "use_rslora", "fan_in_fan_out"):
        assert config[key] == theirs[key], key
    assert config["lora_alpha"] == 4 and config["base_model_name_or_path"] == str(BASE)
    assert config["target_modules"] == sorted(theirs["target_modules"])


@pytest.mark.parametrize("name, text", [
    ("tokenizer.json", "its own"), ("chat_template.jinja", "its own"),
    ("tokenizer_config.json", '{"chat_template": "its own"}')])
def test_an_adapter_keeps_its_own_tokenizer(name, text, tmp_path):
    """Regression: an adapter with a template but no tokenizer.json lost it when it was saved or
    merged, and was evaluated with the template of the base."""
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    (base / "chat_template.jinja").write_text("the base's")
    loaded = adapter(tmp_path / "loaded")
    (loaded / name).write_text(text)
    model = GPT.from_pretrained(base, adapter=loaded)
    save_adapter(model, tmp_path / "again")
    model.save_pretrained(tmp_path / "merged")
    for saved in ("again", "merged"):
        assert (tmp_path / saved / name).read_text() == text
    if name != "tokenizer.json":
        assert read_template(tmp_path / "merged") == "its own"


# ---- what PEFT's folders may hold ----------------------------------------------------------------

def without(part):
    return {name: None for name in TENSORS if part in name}


def base_weights(*names):
    base = tensors_of(BASE, "model.safetensors")
    return {PREFIX + name: base.get(name, base[EMBEDDING]).clone() for name in names}


# changed tensors, fields, and alpha / r (or alpha / sqrt(r)) by the end of the layer's name
VARIANTS = {
    "rslora": ({}, dict(use_rslora=True, lora_alpha=3.0, lora_dropout=0.1), {"": 3 / 2}),
    "few targets, bfloat16": (
        {name: t.bfloat16() if "q_proj" in name else None for name, t in TENSORS.items()},
        dict(target_modules=["self_attn.q_proj"], lora_alpha=2), {"": 2 / 4}),
    # PEFT takes any number
    "signs": ({}, dict(lora_alpha=0, alpha_pattern={"q_proj": -2.0}), {"q_proj": -2 / 4, "": 0}),
    "a regular expression": (without("layers.0"), dict(target_modules=r".*\.1\..*"), {"": 8 / 4}),
    # a pattern is the name's end, not its middle
    "alpha by pattern": ({}, dict(alpha_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_.*": 6,
                                                 "layers": 9}),
                         {"q_proj": 2 / 4, "layers.1.mlp.up_proj": 6 / 4, "": 8 / 4}),
    "rank by pattern": (
        {Q0 + "A.weight": TENSORS[Q0 + "A.weight"][:2],
         Q0 + "B.weight": TENSORS[Q0 + "B.weight"][:, :2]},
        dict(rank_pattern={r"layers\.0\.self_attn\.q_proj": 2}),
        {"layers.0.self_attn.q_proj": 8 / 2, "": 8 / 4}),
    "the base's embeddings": (base_weights(EMBEDDING, "lm_head.weight"), {}, {"": 8 / 4}),
    "untrained modules": (base_weights("model.norm.weight"), dict(modules_to_save=["norm"]),
                          {"": 8 / 4}),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_adapters_of_all_kinds_give_the_merged_model(case, tmp_path):
    """The logits of W + alpha / r * B A, added by hand; what is saved gives them again."""
    changed, fields, scales = VARIANTS[case]
    folder = adapter(tmp_path / "a", changed, **fields)
    tensors, weights = tensors_of(folder), tensors_of(BASE, "model.safetensors")
    for name, A in tensors.items():
        if "lora_A" in name:
            target = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            scale = next(s for end, s in scales.items() if target.endswith(end))
            B = tensors[name.replace("lora_A", "lora_B")]
            weights[target + ".weight"] += (scale * (B.double() @ A.double())).float()
    if case == "rslora":
        torch.save(tensors, folder / "adapter_model.bin")
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


ONES = torch.ones(4, 64)


@pytest.mark.parametrize("changed, fields, message", (
    ({}, dict(r=8), r"tensor '.*lora_A.*' has shape \(4, .*r = 8 ask for \(8, "),
    ({}, dict(rank_pattern={"q_proj": 8}), r"q_proj.*r = 8 ask for \(8, "),
    (without(Q1 + "B"), {}, "lora_A or lora_B of 'model.layers.1.self_attn.q_proj' is missing"),
    (without("1.mlp.up_proj"), {}, "'model.layers.1.mlp.up_proj' is missing"),
    # accepted on an untied model, it then played no part
    ({PREFIX + "lm_head.lora_A.weight": ONES}, {}, "lm_head.lora_A"),
    ({PREFIX + "model.norm.weight": torch.ones(64)}, {}, "model.norm.weight.* differs"),
    ({PREFIX + EMBEDDING: torch.ones(152, 64)}, {},
     r"embed_tokens.weight' \(152, 64\) differs from the base.*\(151, 64\)"),
    ({Q1 + "A.weight": TENSORS[Q1 + "A.weight"].int()}, {}, "is torch.int32"),
    # without PEFT's prefix
    ({Q1.removeprefix(PREFIX) + "A.weight": ONES}, {}, "is no lora_A or lora_B"),
    (without(""), dict(target_modules="all-linear"), "adapter holds no tensors"),
    ({}, dict(use_dora=True), "adapter_config.json: only plain LoRA.*use_dora True.*merge_and"),
    ({}, dict(init_lora_weights="pissa"), "init_lora_weights 'pissa'"),
    ({}, dict(bias="all"), "bias 'all'"),
    ({}, dict(peft_type="IA3"), "peft_type 'IA3'"),
    ({}, dict(r=True), "adapter_config.json: field 'r' should be a positive int, found True"),
    ({}, dict(lora_alpha="8"), "'lora_alpha' should be a float, found '8'"),
    ({}, dict(lora_alpha=float("nan")), "'lora_alpha' should be a float, found nan"),
    ({}, dict(rank_pattern=[4]), r"'rank_pattern' should be a dict, found \[4\]"),
    ({}, dict(alpha_pattern={"q_proj": "2"}),
     "adapter_config.json: alpha_pattern: field 'q_proj' should be a float, found '2'"),
    ({}, dict(rank_pattern={"q_proj": 0}),
     "rank_pattern: field 'q_proj' should be a positive int, found 0"),
    ({}, dict(rank_pattern={"q(": 4}),
     r"adapter_config.json: rank_pattern: 'q\(' is no regular expression \(.*; mend it"),
    ({}, dict(alpha_pattern={"a{4294967296}": 4}), r"'a\{4294967296}' is no regular expression"),
))
def test_bad_adapters_are_refused(changed, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(BASE, adapter=adapter(tmp_path / "a", changed, **fields))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    llama = HF / "llama_gqa"
    with pytest.raises(ValueError, match="has shape .* this model and r = 4 ask for"):
        GPT.from_pretrained(llama, adapter=ADAPTER)
    with pytest.raises(FileNotFoundError, match="has no adapter_config.json"):
        GPT.from_pretrained(BASE, adapter=llama)
    with pytest.raises(FileNotFoundError, match="hf download me/adapter"):
        GPT.from_pretrained(BASE, adapter="me/adapter")
    os.remove(adapter(tmp_path / "b") / "adapter_model.safetensors")
    with pytest.raises(FileNotFoundError, match="has no weights .adapter_model.safetensors or"):
        GPT.from_pretrained(BASE, adapter=tmp_path / "b")
