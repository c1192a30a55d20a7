"""lib/hf.py: config.json and weights of Hugging Face folders, in and out."""
import json
import math
import os
import shutil
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.hf import Config, rope_frequencies, save_folder
from model import GPT

HF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "hf")
NAMES = ("llama_gqa", "qwen2_tied", "qwen2_sharded", "qwen3")
TINY = dict(vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=300,
            rms_norm_eps=1e-5, rope_theta=1000.0, tie_word_embeddings=False)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)
INDEX = "model.safetensors.index.json"


def config_of(name, form="config.json"):
    with open(os.path.join(HF, name, form)) as f:
        return json.load(f)


def weights_in(folder):
    files = sorted(file for file in os.listdir(folder) if file.endswith(".safetensors"))
    return {k: v for file in files for k, v in load_file(os.path.join(folder, file)).items()}


def weights_of(name):
    return weights_in(os.path.join(HF, name))


def write(folder, config, tensors=None):
    os.makedirs(folder, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        tensors = {k: v.contiguous() for k, v in tensors.items()}
        save_file(tensors, folder / "model.safetensors")
    return folder


def copy(name, target):
    """A copy of a fixture that a test may change."""
    return shutil.copytree(os.path.join(HF, name), target)


def tiny(model_type="llama", **fields):
    return Config.from_dict({"model_type": model_type, **TINY, **fields}, "a/config.json")


def assert_holds(model, tensors):
    """Every parameter of the model is that of the files, bit for bit."""
    params = dict(model.named_parameters())
    assert sorted(params) == sorted(tensors)
    for name, p in params.items():
        assert torch.equal(p, tensors[name].to(p.dtype)), name


# --------------------------------------------------------------------------------------------------
# config.json

@pytest.mark.parametrize("name", NAMES)
def test_both_forms_of_config_say_the_same(name):
    a, b = (Config.from_dict(config_of(name, f)) for f in ("config.json", "config_v4.json"))
    a.raw = b.raw = {}
    assert a == b


def test_llama3_frequencies_hand_worked():
    """Regression: `rope_type: llama3` was read but not applied; long text degenerated. Channel pair
    2 turns 8192 * 1.41421e-3 / 2 pi = 1.84384 times in the original context: (1.84384 - 1) / 3 =
    0.281280 of the old frequency and 0.718720 of a 32nd of it."""
    scaling = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)
    want = torch.tensor([1.0, 0.0376060, 4.29557e-4, 1.66197e-6])
    for form in (dict(rope_theta=500000.0, rope_scaling=scaling),
                 dict(rope_theta=None, rope_parameters={**scaling, "rope_theta": 500000.0})):
        freq = rope_frequencies(8, tiny(head_dim=8, **form).rope)
        torch.testing.assert_close(freq, want, atol=0, rtol=1e-5)
    plain = rope_frequencies(8, dict(rope_type="default", rope_theta=500000.0))
    want = torch.tensor([1.0, 0.0376060, 1.41421e-3, 5.31830e-5])
    torch.testing.assert_close(plain, want, atol=0, rtol=1e-5)


def test_default_head_dim():
    six = dict(num_attention_heads=6, sliding_window=None)
    head_dims = [tiny(t, **six).head_dim for t in ("llama", "mistral", "qwen2", "qwen3")]
    assert head_dims == [4, 4, 4, 128]
    assert tiny("qwen3", num_attention_heads=10, head_dim=2).head_dim == 2
    assert tiny("llama", head_dim=None).head_dim == 6


BAD_CONFIGS = [
    (dict(model_type="gpt2"), "model_type 'gpt2' is not supported.*llama"),
    (dict(model_type=None), "model_type None"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope type 'linear' is not supported"),
    (dict(rope_parameters={"rope_type": ["llama3"]}), "rope type"),
    (dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "should be one flat object"),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4},
          rope_scaling={"type": "yarn", "factor": 4.0}), "rope_parameters and rope_scaling"),
    (dict(rope_parameters={**LLAMA3, "factor": None}), "rope field 'factor'"),
    (dict(rope_parameters={**LLAMA3, "low_freq_factor": 4.0}), "'low_freq_factor' should be small"),
    (dict(rope_theta=-1.0), "'rope_theta' should be a positive number, found -1.0"),
    (dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary"),
    (dict(model_type="mistral", max_position_embeddings=8192), "not supported.*window 4096"),
    (dict(model_type="mistral", sliding_window=299), "sliding_window 299"),
    (dict(model_type="qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=1),
     "sliding_window 128"),
    (dict(model_type="qwen3", sliding_window=128, layer_types=["full_attention", "sliding"]),
     "sliding-window attention"),
    (dict(model_type="qwen3", sliding_window=None, layer_types="full_attention"), "layer_types"),
    (dict(quantization_config={"quant_method": "gptq"}), "quantized .*quantization_config"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
    (dict(num_attention_heads=5), "hidden_size 24 is not divisible by num_attention_heads 5"),
    (dict(num_key_value_heads=3), "heads 4 is not a multiple of num_key_value_heads 3"),
    (dict(head_dim=7), "head_dim 7 is odd"),
    (dict(vocab_size=None), "'vocab_size' is missing"),
    (dict(vocab_size="37"), "'vocab_size' should be a positive int, found '37'"),
    (dict(num_hidden_layers=True), "'num_hidden_layers' should be a positive int, found True"),
    (dict(num_hidden_layers=10**8), "num_hidden_layers 100000000"),
    (dict(rms_norm_eps=0), "'rms_norm_eps' should be a positive float, found 0"),
    (dict(tie_word_embeddings="false"), "'tie_word_embeddings' should be a bool, found 'false'"),
    (dict(model_type="qwen2", num_key_value_heads=None), "'num_key_value_heads' is missing"),
]


@pytest.mark.parametrize("fields,message", BAD_CONFIGS, ids=[str(f)[:70] for f, _ in BAD_CONFIGS])
def test_unsupported_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"a/config.json: .*({message})"):
        tiny(**fields)


REAL_CONFIGS = {
    "an integer for a float": dict(rms_norm_eps=1, rope_theta=10000),
    "older names": dict(rope_scaling={"type": "default"}, hidden_act="swish"),
    "nulls": dict(head_dim=None, quantization_config=None, rope_scaling=None, pretraining_tp=1),
    "both rope forms, equal": dict(rope_parameters={"rope_type": "default", "rope_theta": 5.0},
                                   rope_scaling={"rope_type": "default", "rope_theta": 5.0}),
    "SmolLM2": dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3,
                    rope_theta=100000, rope_interleaved=False, is_llama_config=True,
                    **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    "Mistral v0.3": dict(model_type="mistral", sliding_window=None, head_dim=6),
    "Mistral, a window wider than the context": dict(model_type="mistral", sliding_window=300),
    "Qwen2.5": dict(model_type="qwen2", use_sliding_window=False, sliding_window=64,
                    max_window_layers=1),
    "Qwen2.5, written by transformers 5": dict(
        model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1,
        layer_types=["full_attention"] * 2, rope_theta=None, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "a window for layers it has not": dict(model_type="qwen2", use_sliding_window=True,
                                           sliding_window=64, max_window_layers=2),
}


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_what_real_configs_carry(name):
    """Regression: use_sliding_window with max_window_layers or layer_types that leave every layer
    its full attention was refused."""
    tiny(**REAL_CONFIGS[name])


def test_what_a_config_may_leave_out():
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads")
    c = Config.from_dict({"model_type": "llama", **{key: TINY[key] for key in needed}})
    assert (c.num_key_value_heads, c.max_position_embeddings, c.rms_norm_eps) == (4, 2048, 1e-6)
    assert not c.tie_word_embeddings and c.rope == {"rope_type": "default", "rope_theta": 10000.0}


WRONG = ("x", "", None, -1, 0, 1, 2.5, 10**30, 10**400, True, False, [], [1], ["x"], {}, {"a": 1},
         {"a": {}}, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("name", ("llama_gqa", "qwen3"))
def test_any_wrong_value_in_config_gives_a_model_or_a_clear_error(name, tmp_path):
    """Regression: an int of 31 digits gave OverflowError, a list for rope_type TypeError."""
    raw = {**config_of(name), "sliding_window": None, "use_sliding_window": False,
           "max_window_layers": 1, "quantization_config": None, "partial_rotary_factor": None,
           "rope_theta": 1e4, "rope_scaling": None, "layer_types": ["full_attention"] * 2,
           "attention_bias": False, "mlp_bias": False}
    folder, refused, seen = copy(name, tmp_path / "a"), 0, []
    cases = [{**raw, field: value} for field in raw for value in WRONG]
    cases += [{**raw, "rope_parameters": {**LLAMA3, k: value}} for k in LLAMA3 for value in WRONG]
    for case in cases:
        try:
            config = Config.from_dict(case, f"{folder}/config.json")
            config.raw = {}
            if config not in seen:
                seen.append(config)
                GPT.from_pretrained(write(folder, case))
        except ValueError as e:  # the fault, or the weights do not fit it
            refused += 1
            assert str(folder) in str(e) and len(str(e)) > len(str(folder)) + 40, str(e)
    assert refused > 250


def test_a_config_too_large_for_the_machine_is_refused(tmp_path):
    large = {**config_of("llama_gqa"), "vocab_size": 2**31 - 1, "hidden_size": 2**31 - 2}
    folder = write(tmp_path / "a", large, weights_of("llama_gqa"))
    with pytest.raises(ValueError, match=f"{folder}: cannot make the model of this config.json"):
        GPT.from_pretrained(folder)
    with pytest.raises(ValueError, match="on device abacus"):
        GPT.from_pretrained(os.path.join(HF, "llama_gqa"), device="abacus")


# --------------------------------------------------------------------------------------------------
# weights in

def test_a_tied_head_is_the_embedding(tmp_path):
    """Regression: KeyError for lm_head.weight, which a tied checkpoint does not store; some store
    it all the same, or only name it in their index."""
    tensors, config = weights_of("qwen2_tied"), config_of("qwen2_tied")
    model = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"))
    assert model.head_weight is model.model.embed_tokens.weight
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    folder = write(tmp_path / "stored", config, {**tensors, **head})
    assert_holds(GPT.from_pretrained(folder), tensors)
    head["lm_head.weight"][3, 3] += 1
    with pytest.raises(ValueError, match="safetensors: .*'lm_head.weight' differs.*tie_word_emb"):
        GPT.from_pretrained(write(tmp_path / "other", config, {**tensors, **head}))
    folder = write(tmp_path / "named", config, tensors)
    os.rename(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys([*tensors, "lm_head.weight"], "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert_holds(GPT.from_pretrained(folder), tensors)


@pytest.mark.parametrize("sharded", (False, True))
def test_pytorch_bin_files_and_what_lies_beside_the_weights(sharded, tmp_path):
    tensors = weights_of("qwen2_tied")
    folder = write(tmp_path / "a", config_of("qwen2_tied"))
    if sharded:
        names, weight_map = sorted(tensors), {}
        for file, part in (("model-1.bin", names[::2]), ("model-2.bin", names[1::2])):
            torch.save({name: tensors[name] for name in part}, folder / file)
            weight_map.update(dict.fromkeys(part, file))
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "original").mkdir()
    for name in ("original/consolidated.00.pth", "original/params.json", "consolidated.safetensors",
                 "training_args.bin"):
        (folder / name).write_text("x")
    assert_holds(GPT.from_pretrained(folder), tensors)
    other = {k: v + 1 for k, v in tensors.items()}
    assert_holds(GPT.from_pretrained(write(folder, config_of("qwen2_tied"), other)), other)


def test_old_files_with_a_stored_frequency_table(tmp_path):
    tensors = weights_of("llama_gqa")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = write(tmp_path / "a", config_of("llama_gqa"), {**tensors, **table})
    assert_holds(GPT.from_pretrained(folder), tensors)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("file", ("pytorch_model.bin", "adapter_model.bin"))
def test_a_pickle_that_runs_code_is_refused(file, tmp_path):
    victim, folder = tmp_path / "victim", write(tmp_path / "a", config_of("qwen2_tied"))
    shutil.copy(os.path.join(HF, "lora_qwen2", "adapter_config.json"), folder)
    torch.save({**weights_of("qwen2_tied"), "x": Malicious(str(victim))}, folder / file)
    with pytest.raises(ValueError, match=file):
        if file == "pytorch_model.bin":
            GPT.from_pretrained(folder)
        else:
            GPT.from_pretrained(os.path.join(HF, "qwen2_tied"), adapter=folder)
    assert not victim.exists()


W, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BAD_WEIGHTS = {
    "missing": ({UP: None}, f"the weights lack 1 tensor, .*{UP}"),
    "extra": ({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}, "safetensors: .*layers.2"),
    "misshapen": ({UP: torch.ones(48, 80)}, rf"'{UP}' has shape \(48, 80\).*\(80, 48\)"),
    "would broadcast": ({UP: torch.ones(1, 48)}, rf"'{UP}' has shape \(1, 48\)"),
    "integers": ({W: torch.ones(48, dtype=torch.int8)}, f"'{W}' is torch.int8"),
    "8 bits without scales": ({W: torch.ones(48).to(torch.float8_e4m3fn)}, "is torch.float8_e4"),
    "another name": ({"norm.weight": torch.ones(48)}, "'norm.weight' has no place in a llama"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_refused(case, tmp_path):
    change, message = BAD_WEIGHTS[case]
    tensors = {k: v for k, v in {**weights_of("llama_gqa"), **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(write(tmp_path / "a", config_of("llama_gqa"), tensors))


def put(name, content):
    content = json.dumps(content) if isinstance(content, dict) else content
    content = content.encode() if isinstance(content, str) else content
    return lambda f: (f / name).write_bytes(content)


def cut(name, size):
    return lambda f: os.truncate(f / name, size)


def twice(folder):
    other, name = folder / "model-00003-of-00004.safetensors", "model.embed_tokens.weight"
    save_file({**load_file(other), name: load_file(folder / FIRST)[name] + 1}, other)


FIRST = "model-00001-of-00004.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
BAD_FILES = {
    "missing shard": (lambda f: os.remove(f / FIRST), f"{FIRST}: the index names this file"),
    "empty shard": (cut(FIRST, 0), f"{FIRST}: not a readable safetensors"),
    "truncated data": (cut(FIRST, 50000), f"{FIRST}: not a readable safetensors"),
    "LFS for a shard": (put(FIRST, LFS), f"{FIRST}: a Git LFS pointer.*git lfs pull"),
    "LFS for the index": (put(INDEX, LFS), f"{INDEX}: a Git LFS pointer"),
    "LFS for config.json": (put("config.json", LFS), "config.json: a Git LFS pointer"),
    "LFS for .bin": (lambda f: (os.remove(f / INDEX), put("pytorch_model.bin", LFS)(f)),
                     "pytorch_model.bin: a Git LFS pointer"),
    "tensor twice": (twice, f"00003-of-00004.*'model.embed_tokens.weight' also .*{FIRST}"),
    "index leads elsewhere": (put(INDEX, {"weight_map": {W: f"../{FIRST}"}}), "field 'weight_map'"),
    "index with numbers": (put(INDEX, {"weight_map": {W: 1}}), "field 'weight_map'"),
    "index without map": (put(INDEX, {"metadata": {}}), "field 'weight_map'"),
    "empty map": (put(INDEX, {"weight_map": {}}), "the weights lack 27 tensors"),
    "no index": (lambda f: os.remove(f / INDEX), "has no weights"),
    "no config": (lambda f: os.remove(f / "config.json"), "has no config.json"),
    "broken config": (put("config.json", "{"), "config.json: not valid JSON"),
    "config not in UTF-8": (put("config.json", b'{"a": "\xff"}'), "config.json: not valid JSON"),
    "config is a list": (put("config.json", "[1]"), "config.json: expected a JSON object, found"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused(case, tmp_path):
    spoil, message = BAD_FILES[case]
    spoil(copy("qwen2_sharded", tmp_path / "a"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        GPT.from_pretrained(tmp_path / "a")


def test_bad_bin_files_are_refused(tmp_path):
    path = write(tmp_path / "a", config_of("llama_gqa")) / "pytorch_model.bin"
    for content in ([torch.ones(2)], {W: 3}, {W: {"x": torch.ones(2)}}):
        torch.save(content, path)
        with pytest.raises(ValueError, match="pytorch_model.bin: expected a dictionary of tensors"):
            GPT.from_pretrained(tmp_path / "a")
    torch.save(weights_of("llama_gqa"), path)
    os.truncate(path, 5000)
    with pytest.raises(ValueError, match="pytorch_model.bin: not a readable PyTorch file"):
        GPT.from_pretrained(tmp_path / "a")


@pytest.mark.parametrize("folder, message", (
    ("Qwen/Qwen2.5-0.5B", "no such folder.*hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B"),
    ("https://huggingface.co/Qwen/Qwen3-4B", "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B"),
    ("/none/of/these", "/none/of/these: no such folder; give one in Hugging Face format"),
    (os.path.join(HF, "qwen3", "config.json"), "config.json: no such folder but a file"),
    (os.path.join(HF, "lora_qwen2"), r"LoRA adapter, not a model; give its base \(.*\) as --model"),
))
def test_folders_that_are_no_models(folder, message):
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        GPT.from_pretrained(folder)


# --------------------------------------------------------------------------------------------------
# weights out

@pytest.mark.parametrize("form", ("config.json", "config_v4.json"))
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_folder_holds_what_was_loaded(name, form, tmp_path):
    raw, tensors = {**config_of(name, form), "kv_dtype": [1, {"a": None}]}, weights_of(name)
    save_folder(GPT.from_pretrained(write(copy(name, tmp_path / "a"), raw)), tmp_path / "b")
    assert json.loads((tmp_path / "b/config.json").read_text()) == raw
    assert_holds(GPT.from_pretrained(tmp_path / "b"), tensors)
    assert sorted(load_file(tmp_path / "b/model.safetensors")) == sorted(tensors)


@pytest.mark.parametrize("stored", (torch.bfloat16, torch.float16, torch.float64))
def test_weights_come_in_one_type_and_go_out_in_another(stored, tmp_path):
    """What most numbers have is the folder's type, even if most tensors, the small ones, are
    float32."""
    tensors = weights_of("llama_gqa")
    tensors = {k: v if v.numel() < 3000 else v.to(stored) for k, v in tensors.items()}
    assert sum(t.dtype == torch.float32 for t in tensors.values()) > len(tensors) / 2
    folder = write(tmp_path / "a", {**config_of("llama_gqa"), "torch_dtype": "x"}, tensors)
    for loaded, asked in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, stored)):
        model = GPT.from_pretrained(folder, dtype=loaded)
        assert model.stored_dtype == stored and {p.dtype for p in model.parameters()} == {loaded}
        assert_holds(model, tensors)
        model.save_pretrained(tmp_path / "b", dtype=asked)
        saved, want = load_file(tmp_path / "b/model.safetensors"), asked or loaded
        assert all(t.dtype == want and torch.equal(t, tensors[k].to(loaded).to(want))
                   for k, t in saved.items())
        written = json.loads((tmp_path / "b/config.json").read_text())
        assert written["dtype"] == str(want).removeprefix("torch.") and "torch_dtype" not in written


def test_shards_as_on_the_hub_and_none_of_an_earlier_save(tmp_path):
    """Two sets of weights in a folder are ambiguous: which one counts depends on who reads it."""
    tensors, folder = weights_of("llama_gqa"), tmp_path / "b"
    model = GPT.from_pretrained(os.path.join(HF, "llama_gqa"))
    for limit in (40_000, 90_000, 10**9, 90_000, 90_000, 10**9):
        save_folder(model, folder, shard_bytes=limit)
        files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
        sizes = [sum(t.nbytes for t in load_file(folder / f).values()) for f in files]
        assert max(sizes) <= limit and sum(sizes) == sum(t.nbytes for t in tensors.values())
        assert_holds(GPT.from_pretrained(folder), tensors)
        if limit == 10**9:
            assert files == ["model.safetensors"] and not (folder / INDEX).exists()
            continue
        n, index = len(files), json.loads((folder / INDEX).read_text())
        assert n > 2 and files == [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
        assert index["metadata"] == {"total_size": sum(sizes)}
        assert index["weight_map"] == {k: f for f in files for k in load_file(folder / f)}
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json",
                                          "model.safetensors"]


@pytest.mark.parametrize("shard_bytes", (10**9, 90_000))
def test_a_save_that_dies_leaves_the_old_weights(shard_bytes, tmp_path, monkeypatch):
    """Regression: a file overwritten in place is unreadable after a kill."""
    folder, tensors = copy("llama_gqa", tmp_path / "a"), weights_of("llama_gqa")
    model = GPT.from_pretrained(folder)
    save_folder(model, folder, shard_bytes=shard_bytes)
    before, synced, sync = sorted(os.listdir(folder)), [], os.fsync

    def full_disk(fd):
        synced.append(fd)
        if len(synced) == (1 if shard_bytes == 10**9 else 3):
            raise OSError("no space left on device")
        sync(fd)

    monkeypatch.setattr(os, "fsync", full_disk)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    with pytest.raises(OSError, match="model.*safetensors: could not be written .*no space"):
        save_folder(model, folder, shard_bytes=shard_bytes)
    assert sorted(os.listdir(folder)) == before
    assert_holds(GPT.from_pretrained(folder), tensors)


def test_a_save_that_is_killed_between_two_shards_is_refused(tmp_path, monkeypatch):
    """Half of the shards are the new ones and half the old ones: every tensor is there."""
    model, moved, replace = GPT.from_pretrained(os.path.join(HF, "llama_gqa")), [], os.replace
    save_folder(model, tmp_path, shard_bytes=90_000)

    def killed(source, target):
        moved.extend([target] if os.path.dirname(target) == str(tmp_path) else [])
        if len(moved) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_folder(model, str(tmp_path), shard_bytes=90_000)
    with pytest.raises(FileNotFoundError, match="has no weights"):
        GPT.from_pretrained(tmp_path)


def test_save_copies_the_tokenizer_and_all_may_read_it(tmp_path):
    """Regression: weights had mode 0600, so that no server of another user could read them."""
    folder, umask = copy("llama_gqa", tmp_path / "a"), os.umask(0o027)
    text = ["chat_template.jinja", "merges.txt", "tokenizer.json", "tokenizer_config.json"]
    for name in (*text, "notes.txt"):
        (folder / name).write_text(name)
    os.chmod(folder / "merges.txt", 0o600)
    save_folder(GPT.from_pretrained(folder), tmp_path / "b", shard_bytes=90_000)
    os.umask(umask)
    saved = set(os.listdir(tmp_path / "b"))
    assert {f for f in saved if not f.startswith("model")} == {
        *text, "config.json", "generation_config.json"}
    assert all((tmp_path / "b" / name).read_text() == name for name in text)
    modes = {f: stat.S_IMODE(os.stat(tmp_path / "b" / f).st_mode) for f in saved}
    assert set(modes.values()) == {0o640}, modes
    before = sorted(os.listdir(folder))
    GPT.from_pretrained(folder).save_pretrained(folder)  # onto itself
    assert sorted(os.listdir(folder)) == before


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_loading_and_saving_do_not_hold_the_weights_twice(tmp_path):
    """The most that a process ever held: the weights in float32 and, in half precision, the pages
    of the mapped file. Measured by the kernel, in another process: memory that this one has freed
    would be used again and hide a second copy."""
    raw = {**TINY, "model_type": "llama", "vocab_size": 4000, "hidden_size": 512,
           "intermediate_size": 1024, "num_hidden_layers": 4, "tie_word_embeddings": True}
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in GPT(Config.from_dict(raw)).state_dict().items()}
    blank = {k: torch.zeros(shape, dtype=torch.float16) for k, shape in shapes.items()}
    write(tmp_path / "safetensors", raw, blank)
    torch.save(blank, write(tmp_path / "bin", raw) / "pytorch_model.bin")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from model import GPT
def memory(field):
    status = open("/proc/self/status")
    return sum(int(line.split()[1]) for line in status if line.startswith(field)) / 1024
torch.set_num_threads(1)
kept = [GPT.from_pretrained(sys.argv[2])]  # what torch loads at the first call
for folder in sys.argv[3:]:
    start = memory("VmRSS")
    kept.append(GPT.from_pretrained(folder))
    print(memory("VmHWM") - start)
start = memory("VmHWM")
kept[-1].save_pretrained(folder + "/saved", dtype=torch.bfloat16)
print(memory("VmHWM") - start)
"""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    args = [root, os.path.join(HF, "llama_gqa"), tmp_path / "safetensors", tmp_path / "bin"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *loads, saved = map(float, done.stdout.split())
    size = sum(t.numel() for t in blank.values()) * 4 / 2**20  # in float32
    assert size > 30 and all(size < extra < 1.75 * size for extra in loads), (size, loads)
    assert saved < 0.3 * size, (size, saved)
