"""
Hugging Face folders: config.json and the weights, in and out.

    config = read_config(folder)            # the shape of the model, or what is unsupported in it
    dtype = load_weights(model, folder)     # every tensor by its name, every shape checked
    save_folder(model, folder, dtype)       # opens in transformers and vLLM
"""
import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lib.chat import read_template
from lib.files import beside, check_model_folder, read_json, refuse_lfs_pointer, write_whole

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
TYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
SHARDS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json")


# ---- config.json ---------------------------------------------------------------------------------

class Config:
    """The shape of a model, under the names of config.json as transformers 4 or 5 writes it; `raw`
    is that file, to write back. ValueError names the field that is missing, wrong or unsupported.
    """

    def __init__(self, raw, where="config.json"):
        self.raw, self.model_type = raw, raw.get("model_type")
        if self.model_type not in MODEL_TYPES:
            raise ValueError(f"{where}: model_type {self.model_type!r} is not supported; supported "
                             f"are {', '.join(MODEL_TYPES)} (docs/models.md lists families)")
        llama, qwen2, qwen3 = (self.model_type == kind for kind in ("llama", "qwen2", "qwen3"))
        get = partial(read_field, raw, where)
        self.vocab_size = get("vocab_size", int)
        self.hidden_size = get("hidden_size", int)
        self.intermediate_size = get("intermediate_size", int)
        self.num_hidden_layers = get("num_hidden_layers", int)
        self.num_attention_heads = heads = get("num_attention_heads", int)
        self.num_key_value_heads = get("num_key_value_heads", int, heads if llama else None)
        self.head_dim = get("head_dim", int, 128 if qwen3 else self.hidden_size // heads)
        self.max_position_embeddings = get("max_position_embeddings", int, 2048 if llama else None)
        self.rms_norm_eps = get("rms_norm_eps", float, 1e-6)
        self.tie_word_embeddings = get("tie_word_embeddings", bool, False)
        self.o_bias = (llama or qwen3) and get("attention_bias", bool, False)
        self.qkv_bias = qwen2 or self.o_bias
        self.mlp_bias = llama and get("mlp_bias", bool, False)
        self.initializer_range = get("initializer_range", float, 0.02)
        # rope_type, rope_theta and, for llama3, LLAMA3_ROPE
        self.rope = read_rope(raw, where)
        refuse_unsupported(self, where)


def read_field(raw, where, name, kind, default=None, positive=True):
    """raw[name] of type `kind`, a number finite and, unless told otherwise, positive; missing or
    null: the default."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ValueError(f"{where}: field {name!r} is missing")
    number, least = kind in (int, float), 0 if positive else -2**63
    right = type(value) is kind or kind is float and type(value) is int
    if not right or number and not least < value < 2**63:
        raise ValueError(f"{where}: field {name!r} should be a "
                         f"{'positive ' * (number and positive)}{kind.__name__}, found {value!r}")
    return value


def refuse_unsupported(c, where):
    """ValueError for what we do not compute, such as layers that see less than the whole context.
    Mistral's do if config.json has the size of a window; Qwen's if layer_types says so, or, without
    that, use_sliding_window and max_window_layers do."""
    if c.raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"{where}: hidden_act {c.raw['hidden_act']!r} is not supported, only silu")
    if c.raw.get("quantization_config"):
        raise ValueError(f"{where}: the weights are quantized (quantization_config); use the "
                         "original float checkpoint")
    if max(c.head_dim, c.num_hidden_layers) > 8192:
        raise ValueError(f"{where}: head_dim or num_hidden_layers is more than 8192")
    window = c.raw.get("sliding_window", 4096)  # what transformers takes when it is absent
    if window is None or type(window) is int and window >= c.max_position_embeddings:
        return
    layer_types = read_field(c.raw, where, "layer_types", list, [])
    slides = any(layer_type != "full_attention" for layer_type in layer_types)
    if not layer_types and c.raw.get("use_sliding_window"):
        full = read_field(c.raw, where, "max_window_layers", int, 28, positive=False)
        slides = full < c.num_hidden_layers  # those behind the first `full` layers, maybe all
    if slides or c.model_type == "mistral":
        raise ValueError(f"{where}: sliding-window attention is not supported (sliding_window "
                         f"{window!r}, layer_types {layer_types!r}); set sliding_window to null if "
                         "all your sequences are shorter")


def read_rope(raw, where):
    """The rotary embedding's parameters: `rope_theta` and `rope_scaling` (transformers 4), or
    `rope_parameters` (transformers 5). As in transformers, the older count if both are given."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
        raise ValueError(f"{where}: rope parameters should be one flat object, found {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{where}: rope type {kind!r} is not supported; supported are default "
                         "and llama3")
    if raw.get("partial_rotary_factor", given.get("partial_rotary_factor")) not in (None, 1):
        raise ValueError(f"{where}: partial_rotary_factor is not supported")
    given = {"rope_theta": raw.get("rope_theta", 10000.0), **given}
    names = ("rope_theta", *LLAMA3_ROPE) if kind == "llama3" else ("rope_theta",)
    return {"rope_type": kind, **{name: read_field(given, where, name, float) for name in names}}


def rope_frequencies(head_dim, rope):
    """Angle per position of each pair of channels, (head_dim / 2,) float32 radians; llama3 slows
    the low frequencies down."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu")
    freq = rope["rope_theta"] ** (-pairs / head_dim)  # (D/2,)
    if rope["rope_type"] == "llama3":
        factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
        # full turns within the original context
        turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
        # 1: fast, as it was; 0: slow, divided by factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = keep * freq + (1 - keep) * freq / factor
    return freq.float()


def read_config(folder):
    """The Config of a folder. FileNotFoundError or ValueError: what is wrong, and what to do."""
    check_model_folder(folder)
    path = os.path.join(folder, "config.json")
    return Config(read_json(path), path)


# ---- weights in ----------------------------------------------------------------------------------

def load_weights(model, folder):
    """Copies the weights of `folder` into the model, one tensor at a time, and returns the dtype
    that most of them have in the files. ValueError: a tensor is missing, misshapen, of no float
    type, or has no place."""
    params = dict(model.named_parameters())
    filled, sizes, tied_head = set(), Counter(), None
    for name, tensor, file in read_tensors(folder, "model.safetensors", "pytorch_model.bin"):
        # a constant that old files carry
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            tied_head = tensor, file
            continue
        if name not in params:
            raise ValueError(f"{file}: tensor {name!r} has no place in a {model.config.model_type} "
                             "model of this config.json (of a model that is compiled or wrapped by "
                             "DDP save the module inside; merge a PEFT adapter first)")
        check_tensor(name, tensor, file, params[name].shape, "config.json asks")
        params[name].copy_(tensor)
        filled.add(name)
        sizes[tensor.dtype] += tensor.numel()
    missing = [name for name in params if name not in filled]
    if missing:
        raise ValueError(f"{folder}: the weights lack {len(missing)} of {len(params)} tensors, the "
                         f"first is {missing[0]!r}")
    if tied_head and not same_values(tied_head[0], params["model.embed_tokens.weight"]):
        raise ValueError(f"{tied_head[1]}: tensor 'lm_head.weight' differs from the embedding "
                         "although config.json says tie_word_embeddings; set it to false")
    return sizes.most_common(1)[0][0]


def weights_hash(parameters):
    """Every 997th number of each tensor tells one set of weights from another."""
    some = [p.detach().flatten()[::997].float().cpu() for p in parameters]
    return hashlib.sha256(torch.cat(some).numpy().tobytes()).hexdigest() if some else ""


def check_tensor(name, tensor, file, shape, who_asks):
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, {who_asks} "
                         f"for {tuple(shape)}")
    if tensor.dtype not in TYPES:
        raise ValueError(f"{file}: tensor {name!r} is {tensor.dtype}, a float type is needed "
                         "(quantized weights are not supported)")


def same_values(tensor, param):
    return tensor.shape == param.shape and torch.equal(tensor.to(param), param)


def read_tensors(folder, safe_name, bin_name):
    """Yields (name, tensor, file) of the weights in `folder`, single or in shards, one tensor at a
    time; safetensors go before .bin."""
    for path in weight_files(folder, safe_name, bin_name):
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: the index names this file, but it is not there; "
                                    "download it, too")
        with open(path, "rb") as f:
            refuse_lfs_pointer(path, f.read(64))
        for name, tensor in read_file(path):
            yield name, tensor, path


def weight_files(folder, safe_name, bin_name):
    for single in (safe_name, bin_name):
        path = os.path.join(folder, single)
        if os.path.isfile(path):
            return [path]
        index = read_json(path + ".index.json", {})
        if index:
            file_of = read_field(index, path + ".index.json", "weight_map", dict, {})
            files = sorted(set(map(str, file_of.values())))
            return [os.path.join(folder, os.path.basename(file)) for file in files]
    there = [name for name in sorted(os.listdir(folder))
             if name.endswith((".safetensors", ".bin", ".gguf", ".pt", ".pth"))]
    raise FileNotFoundError(f"{folder}: has no weights ({safe_name} or {bin_name}, whole or in "
                            f"shards with an index); there is {', '.join(there[:3]) or 'none'}")


def read_file(path):
    """Yields (name, tensor) of one file. Of a .bin only plain tensors are unpickled, no code."""
    try:
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt") as f:
                for name in f.keys():
                    yield name, f.get_tensor(name)
        else:
            yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()
    except Exception as e:  # torch raises many kinds for a broken or unsafe pickle
        raise ValueError(f"{path}: not a readable file of tensors ({type(e).__name__}: "
                         f"{str(e)[:200]}); download it again") from None


# ---- weights out ---------------------------------------------------------------------------------

@torch.no_grad()
def save_folder(model, folder, dtype=None):
    """Writes config.json, the weights, in one file, and the tokenizer files of the folder that the
    model came from. An adapter is merged into the weights, and tokenizer files that it brought are
    on top. dtype: that of the files (None: the model's own). Needs memory for one more copy."""
    os.makedirs(folder, exist_ok=True)
    dtype = dtype or model.model.norm.weight.dtype
    names = [name for name, _ in model.named_parameters() if "lora_" not in name]
    save_tensors(os.path.join(folder, "model.safetensors"),
                 {name: merged_parameter(model, name).to("cpu", dtype) for name in names})
    for file in os.listdir(folder):  # of an earlier model: two sets of weights are ambiguous
        if SHARDS.fullmatch(file):
            os.remove(os.path.join(folder, file))
    raw = dict(model.config.raw)
    raw.pop("torch_dtype", None)
    # what transformers 4 reads, too
    raw["dtype" if "dtype" in raw else "torch_dtype"] = str(dtype).split(".")[1]
    write_json(os.path.join(folder, "config.json"), raw)
    copy_files(model.folder, folder, ("generation_config.json",))
    own, files = model.tokenizer_folder, list(TOKENIZER_FILES)
    if own and read_template(Path(own)):  # an adapter's, which the base's file would hide
        files.remove("chat_template.jinja")
    copy_files(model.folder, folder, files)
    copy_files(own, folder, TOKENIZER_FILES)


def merged_parameter(model, name):
    module, _, field = name.rpartition(".")
    module = model.get_submodule(module)
    if field == "weight" and hasattr(module, "merged_weight"):
        return module.merged_weight()
    return getattr(module, field)


def save_tensors(path, tensors):
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with beside(path) as new:
        save_file(tensors, new, metadata={"format": "pt"})


def write_json(path, content):
    write_whole(path, lambda f: json.dump(content, f, indent=2))


def copy_files(source, target, names):
    """Copies those of the files that are there; source None or the target itself: none."""
    if source is None or os.path.realpath(source) == os.path.realpath(target):
        return
    for name in names:
        path = os.path.join(source, name)
        if os.path.isfile(path):
            with beside(os.path.join(target, name)) as new:
                shutil.copyfile(path, new)
