"""lib/hf.py: config.json and weights of Hugging Face folders, in and out."""
import json
import os
import shutil
import stat
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import lib.hf
from lib.files import check_model_folder
from lib.hf import Config, save_folder
from model import GPT

HF = Path(__file__).parent / "fixtures" / "hf"
TINY = dict(vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=300,
            rms_norm_eps=1e-5, rope_theta=1000.0, tie_word_embeddings=False)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=8192)
INDEX = "model.safetensors.index.json"


def config_of(folder):
    return json.loads((HF / folder / "config.json").read_text())


def weights_of(folder):
    files = sorted((HF / folder).glob("*.safetensors"))
    return {k: v for file in files for k, v in load_file(file).items()}


def write(folder, config, tensors=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


def copy(name, target):
    """A copy of a fixture that a test may change."""
    return shutil.copytree(HF / name, target)


def tiny(model_type="llama", **fields):
    return Config({"model_type": model_type, **TINY, **fields}, "a/config.json")


def assert_holds(model, tensors):
    """Every parameter of the model is that of the files, bit for bit."""
    params = dict(model.named_parameters())
    assert sorted(params) == sorted(tensors)
    for name, p in params.items():
        assert torch.equal(p, tensors[name].to(p.dtype)), name


# ---- config.json ---------------------------------------------------------------------------------

def test_llama3_frequencies_hand_worked():
    """Regression: `rope_type: llama3` was read but not applied; long text degenerated. Channel pair
    2 turns 8192 * 1.41421e-3 / 2 pi = 1.84384 times in the original context: (1.84384 - 1) / 3 =
    0.281280 of the old frequency and 0.718720 of a 32nd of it."""
    theta, older = 500000.0, {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    want = torch.tensor([1.0, 0.0376060, 4.29557e-4, 1.66197e-6])
    # as in transformers, the older form counts if both are given
    for form in (dict(rope_theta=theta, rope_scaling=older),
                 dict(rope_theta=None, rope_parameters=LLAMA3),
                 dict(rope_theta=theta, rope_scaling=older, rope_parameters={"rope_theta": 1.0})):
        freq = GPT(tiny(head_dim=8, **form)).rope_freq
        torch.testing.assert_close(freq, want, atol=0, rtol=1e-5)


def test_what_a_config_may_leave_out():
    six = dict(num_attention_heads=6, sliding_window=None)
    head_dims = [tiny(t, **six).head_dim for t in ("llama", "mistral", "qwen2", "qwen3")]
    assert head_dims == [4, 4, 4, 128]
    assert tiny("qwen3", num_attention_heads=10, head_dim=2).head_dim == 2
    c = tiny(num_key_value_heads=None, max_position_embeddings=None, rms_norm_eps=None,
             head_dim=None, tie_word_embeddings=None)
    assert (c.num_key_value_heads, c.max_position_embeddings, c.rms_norm_eps) == (4, 2048, 1e-6)
    assert c.head_dim == 6 and not c.tie_word_embeddings
    raw = {key: value for key, value in c.raw.items() if key != "rope_theta" and value is not None}
    assert Config(raw).rope == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("fields, message", (
    (dict(model_type="gpt2"), "model_type 'gpt2' is not supported.*llama.*docs/models.md"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope type 'linear' is not supported"),
    (dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "should be one flat object"),
    (dict(rope_parameters={**LLAMA3, "factor": None}), "field 'factor' is missing"),
    (dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary"),
    (dict(model_type="mistral", max_position_embeddings=8192), "not supported.*window 4096"),
    (dict(model_type="mistral", sliding_window="null"), "sliding_window 'null'"),
    (dict(model_type="qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=1),
     "sliding_window 128"),
    (dict(model_type="qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=0),
     "sliding-window attention"),  # of all layers
    (dict(model_type="qwen3", sliding_window=128, layer_types=["full_attention", "sliding"]),
     "sliding-window attention"),
    (dict(model_type="qwen3", sliding_window=128, layer_types=5),
     "'layer_types' should be a list, found 5"),
    (dict(quantization_config={"quant_method": "gptq"}), "quantized .*quantization_config"),
    # made, they would fill the memory or take hours, without a word
    (dict(head_dim=10**9), "head_dim or num_hidden_layers is more than 8192"),
    (dict(num_hidden_layers=10**9), "head_dim or num_hidden_layers is more than 8192"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
    (dict(vocab_size=None), "'vocab_size' is missing"),
    (dict(vocab_size="37"), "'vocab_size' should be a positive int, found '37'"),
    (dict(num_hidden_layers=True), "'num_hidden_layers' should be a positive int, found True"),
    (dict(rms_norm_eps=0), "'rms_norm_eps' should be a positive float, found 0"),
    (dict(tie_word_embeddings="false"), "'tie_word_embeddings' should be a bool, found 'false'"),
    (dict(model_type="qwen2", num_key_value_heads=None), "'num_key_value_heads' is missing"),
))
def test_unsupported_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"a/config.json: .*({message})"):
        tiny(**fields)


@pytest.mark.parametrize("fields", (
    dict(rms_norm_eps=1, rope_theta=10000),
    dict(rope_scaling={"type": "default"}, hidden_act="swish"),
    dict(head_dim=None, quantization_config=None, rope_scaling=None, pretraining_tp=1),
    # Mistral v0.3, and a window wider than the context
    dict(model_type="mistral", sliding_window=None, head_dim=6),
    dict(model_type="mistral", sliding_window=300),
    # Qwen2.5, also as transformers 5 writes it; a window for layers that the model has not
    dict(model_type="qwen2", use_sliding_window=False, sliding_window=64, max_window_layers=1),
    dict(model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1,
         layer_types=["full_attention"] * 2),
    dict(model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=2),
))
def test_what_real_configs_carry(fields):
    """Regression: use_sliding_window with max_window_layers or layer_types that leave every layer
    its full attention was refused."""
    tiny(**fields)


def test_a_config_too_large_for_the_machine_is_refused(tmp_path):
    large = {**config_of("llama_gqa"), "vocab_size": 2**62, "hidden_size": 2**31 - 2}
    folder = write(tmp_path / "a", large)
    with pytest.raises(ValueError, match=f"{folder}: cannot make the model of this config.json"):
        GPT.from_pretrained(folder)
    with pytest.raises(ValueError, match="on device abacus"):
        GPT.from_pretrained(HF / "llama_gqa", device="abacus")


# ---- weights in ----------------------------------------------------------------------------------

def test_a_tied_head_is_the_embedding(tmp_path):
    """Regression: KeyError for lm_head.weight, which a tied checkpoint does not store; some store
    it all the same, or only name it in their index."""
    tensors, config = weights_of("qwen2_tied"), config_of("qwen2_tied")
    model = GPT.from_pretrained(HF / "qwen2_tied")
    assert model.head_weight is model.model.embed_tokens.weight
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    folder = write(tmp_path / "a", config, {**tensors, **head})
    assert_holds(GPT.from_pretrained(folder), tensors)
    head["lm_head.weight"][3, 3] += 1
    with pytest.raises(ValueError, match="safetensors: .*'lm_head.weight' differs.*tie_word_emb"):
        GPT.from_pretrained(write(folder, config, {**tensors, **head}))
    os.rename(write(folder, config, tensors) / "model.safetensors", folder / "x.safetensors")
    names = dict.fromkeys([*tensors, *head], "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert_holds(GPT.from_pretrained(folder), tensors)


@pytest.mark.parametrize("sharded", (False, True))
def test_pytorch_bin_files_and_what_lies_beside_the_weights(sharded, tmp_path):
    """Safetensors go before .bin. Old files also hold a constant table of frequencies."""
    tensors, table = weights_of("qwen2_tied"), "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = write(tmp_path / "a", config_of("qwen2_tied"))
    files = {name: "pytorch_model.bin" for name in [*tensors, table]}
    if sharded:
        files = {name: f"model-{i % 2}.bin" for i, name in enumerate(files)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        part = {k: {**tensors, table: torch.ones(4)}[k] for k, f in files.items() if f == file}
        torch.save(part, folder / file)
    for name in ("consolidated.safetensors", "training_args.bin"):
        (folder / name).write_text("x")
    assert_holds(GPT.from_pretrained(folder), tensors)
    other = {k: v + 1 for k, v in tensors.items()}
    assert_holds(GPT.from_pretrained(write(folder, config_of("qwen2_tied"), other)), other)


W, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("change, message", (
    ({UP: None}, f"the weights lack 1 of 21 tensors, the first is '{UP}'"),
    ({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}, "safetensors: .*layers.2.* no place in"),
    ({UP: torch.ones(1, 48)}, rf"'{UP}' has shape \(1, 48\), config.json asks for \(80, 48\)"),
    ({"_orig_mod." + W: torch.ones(48)}, "no place .*of a model that is compiled"),
    ({W: torch.ones(48, dtype=torch.int8)}, f"'{W}' is torch.int8"),
    ({W: torch.ones(48).to(torch.float8_e4m3fn)}, "is torch.float8_e4"),
))
def test_bad_weights_are_refused(change, message, tmp_path):
    tensors = {k: v for k, v in {**weights_of("llama_gqa"), **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(write(tmp_path / "a", config_of("llama_gqa"), tensors))


FIRST = "model-00001-of-00004.safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize("name, content, message", (
    (FIRST, None, f"{FIRST}: the index names this file"),
    (FIRST, b"x" * 50000, f"{FIRST}: not a readable file of tensors"),
    (FIRST, LFS, f"{FIRST}: a Git LFS pointer.*git lfs pull"),
    (INDEX, LFS, f"{INDEX}: a Git LFS pointer"),
    (INDEX, b'{"metadata": {}}', "the weights lack 27 of 27 tensors"),
    (INDEX, b'{"weight_map": {"a": 5}}', "the index names this file, but it is not there"),
    (INDEX, b'{"weight_map": []}', "'weight_map' should be a dict"),
    (INDEX, None, f"has no weights.*; there is {FIRST}, model-00002"),
    ("config.json", None, "has no config.json"),
    ("config.json", b"{", "config.json: not valid JSON"),
    ("config.json", b'{"a": "\xff"}', "config.json: not valid JSON"),
    ("config.json", b"[1]", "config.json: expected a JSON object, found"),
))
def test_bad_files_are_refused(name, content, message, tmp_path):
    folder = copy("qwen2_sharded", tmp_path / "a")
    os.remove(folder / name)
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        GPT.from_pretrained(folder)


class RunsCode:
    def __reduce__(self):
        return open, ("victim", "w")


def test_a_bin_file_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({W: RunsCode()}, write(tmp_path / "a", config_of("llama_gqa")) / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: not a readable file of tensors"):
        GPT.from_pretrained("a")
    assert not os.path.exists("victim")


@pytest.mark.parametrize("files, folder, message", (
    ([], "Qwen/Qwen2.5-0.5B", "no such folder.*hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-"),
    ([], "https://huggingface.co/Qwen/Qwen3-4B/", "download Qwen/Qwen3-4B --local-dir Qwen3-4B"),
    ([], "/none/of/these", "/none/of/these: no such folder.*hf download OWNER/NAME"),
    (["adapter_config.json"], ".", r"LoRA adapter, not a model; give its base \(B\) as --model"),
    (["metrics.jsonl"], ".", "the folder of a run; its policy is in ./model, or with"),
    (["hub/snapshots/0a/config.json"], "hub", "did you mean hub/snapshots/0a?"),
    ([f"checkpoint-{n}/config.json" for n in range(8, 13)], ".", "mean .*/checkpoint-12?"),
    (["a/config.json"], "a/config.json", "json: is a file; give the folder"),
))
def test_folders_that_are_no_models(files, folder, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in map(Path, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"base_model_name_or_path": "B"}')
    with pytest.raises((FileNotFoundError, NotADirectoryError, ValueError), match=message):
        GPT.from_pretrained(folder)
    Path("config.json").write_text("{}")
    check_model_folder(".")  # whatever else is in it


# ---- weights out ---------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ("llama_gqa", "qwen2_tied", "qwen2_sharded", "qwen3"))
def test_a_saved_folder_holds_what_was_loaded(name, tmp_path):
    raw, tensors = {**config_of(name), "kv_dtype": [1, {"a": None}]}, weights_of(name)
    save_folder(GPT.from_pretrained(write(copy(name, tmp_path / "a"), raw)), tmp_path / "b")
    assert json.loads((tmp_path / "b/config.json").read_text()) == raw
    saved = load_file(tmp_path / "b/model.safetensors")
    assert sorted(saved) == sorted(tensors)
    assert all(torch.equal(saved[k], tensors[k]) for k in saved)


@pytest.mark.parametrize("stored", (torch.bfloat16, torch.float16, torch.float64))
def test_weights_come_in_one_type_and_go_out_in_another(stored, tmp_path):
    """What most numbers have is the folder's type, even if most tensors, the small ones, are
    float32."""
    tensors = weights_of("llama_gqa")
    tensors = {k: v if v.numel() < 3000 else v.to(stored) for k, v in tensors.items()}
    assert sum(t.dtype == torch.float32 for t in tensors.values()) > len(tensors) / 2
    folder = write(tmp_path / "a", {**config_of("llama_gqa"), "torch_dtype": "x"}, tensors)
    for loaded, asked in ((torch.bfloat16, None), (torch.float32, stored)):
        model, want = GPT.from_pretrained(folder, dtype=loaded), asked or loaded
        assert model.stored_dtype == stored and {p.dtype for p in model.parameters()} == {loaded}
        model.save_pretrained(tmp_path / "b", dtype=asked)
        assert all(t.dtype == want and torch.equal(t, tensors[k].to(loaded).to(want))
                   for k, t in load_file(tmp_path / "b/model.safetensors").items())
        written = json.loads((tmp_path / "b/config.json").read_text())
        assert written["dtype"] == str(want).removeprefix("torch.") and "torch_dtype" not in written


def test_shards_of_an_earlier_model_do_not_stay(tmp_path):
    """Two sets of weights in a folder are ambiguous: which one counts depends on who reads it."""
    folder, model = copy("qwen2_sharded", tmp_path / "a"), GPT.from_pretrained(HF / "llama_gqa")
    assert INDEX in os.listdir(folder)
    model.save_pretrained(folder)
    weights = [name for name in os.listdir(folder) if name.startswith("model")]
    assert weights == ["model.safetensors"]
    assert_holds(GPT.from_pretrained(folder), weights_of("llama_gqa"))


def test_a_save_that_dies_leaves_the_old_weights(tmp_path, monkeypatch):
    """Regression: a file overwritten in place is unreadable after a kill."""
    folder, tensors = copy("llama_gqa", tmp_path / "a"), weights_of("llama_gqa")
    model, before = GPT.from_pretrained(folder), sorted(os.listdir(folder))

    def full_disk(tensors, path, metadata):
        (tmp_path / path).write_bytes(b"half")
        raise SafetensorError("no space left on device")

    monkeypatch.setattr(lib.hf, "save_file", full_disk)
    torch.nn.init.zeros_(model.model.norm.weight)
    with pytest.raises(OSError, match="model.*safetensors: could not be written .*no space"):
        save_folder(model, folder)
    assert sorted(os.listdir(folder)) == before
    assert_holds(GPT.from_pretrained(folder), tensors)


def test_save_copies_the_tokenizer_and_all_may_read_it(tmp_path):
    """Regression: weights had mode 0600, so that no server of another user could read them."""
    folder, umask = copy("llama_gqa", tmp_path / "a"), os.umask(0o027)
    text = ["chat_template.jinja", "merges.txt", "tokenizer.json", "tokenizer_config.json"]
    for name in (*text, "notes.txt"):
        (folder / name).write_text(name)
    os.chmod(folder / "merges.txt", 0o600)
    save_folder(GPT.from_pretrained(folder), tmp_path / "b")
    os.umask(umask)
    saved = {f.name: stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "b").iterdir()}
    assert saved == dict.fromkeys([*text, "config.json", "generation_config.json",
                                   "model.safetensors"], 0o640)
    assert all((tmp_path / "b" / name).read_text() == name for name in text)
    before = sorted(os.listdir(folder))
    GPT.from_pretrained(folder).save_pretrained(folder)  # onto itself
    assert sorted(os.listdir(folder)) == before


def test_weights_are_read_one_tensor_at_a_time(monkeypatch):
    """Guards against a second copy of the weights in memory."""
    seen, check = [], lib.hf.check_tensor

    def watched(name, tensor, *rest):
        seen.append(weakref.ref(tensor))
        assert sum(one() is not None for one in seen) <= 2
        check(name, tensor, *rest)

    monkeypatch.setattr(lib.hf, "check_tensor", watched)
    GPT.from_pretrained(HF / "qwen2_sharded")
    assert len(seen) == 27
