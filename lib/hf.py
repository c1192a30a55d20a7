"""
A Hugging Face folder: its config.json, its weights, in and out.

    config = read_config(folder)                       # Config: the shape of the model
    load_weights(model, folder)                        # every tensor by name, each shape checked
    save_folder(model, folder)                         # opens in transformers and vLLM
"""
import json
import math
import os
import shutil
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
COPIED_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")  # save_pretrained takes them along


@dataclass
class Config:
    """The shape of a model, under the names of Hugging Face's config.json. `raw` is the file as read, to be written back."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    initializer_range: float
    rope: dict                                      # rope_type, rope_theta and, for llama3, the four scaling numbers
    raw: dict = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, raw, where="config.json"):
        """Reads a config.json as transformers 4 or 5 writes it. ValueError names the field that is missing, wrong or unsupported."""
        if not isinstance(raw, dict):
            raise ValueError(f"{where}: expected a JSON object, found {type(raw).__name__}")
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"{where}: model_type {model_type!r} is not supported; supported are {', '.join(MODEL_TYPES)}")

        def get(name, kind, default=None):
            value = raw.get(name)
            if value is None:
                value = default
            if value is None:
                raise ValueError(f"{where}: field {name!r} is missing")
            if kind is float and type(value) is int and abs(value) < 2**31:
                value = float(value)
            if type(value) is not kind or (kind is int and not 0 < value < 2**31) or (kind is float and not 0 < value < math.inf):
                raise ValueError(f"{where}: field {name!r} should be a {'positive ' if kind is not bool else ''}{kind.__name__}, found {value!r}")
            return value

        heads = get("num_attention_heads", int)
        hidden_size = get("hidden_size", int)
        if raw.get("head_dim") is None and model_type != "qwen3" and hidden_size % heads:
            raise ValueError(f"{where}: hidden_size {hidden_size} is not divisible by num_attention_heads {heads} and head_dim is not given")
        attention_bias, llama = get("attention_bias", bool, False), model_type == "llama"
        c = cls(
            model_type=model_type, vocab_size=get("vocab_size", int), hidden_size=hidden_size,
            intermediate_size=get("intermediate_size", int), num_hidden_layers=get("num_hidden_layers", int), num_attention_heads=heads,
            num_key_value_heads=get("num_key_value_heads", int, heads if llama else None),
            head_dim=get("head_dim", int, 128 if model_type == "qwen3" else hidden_size // heads),
            max_position_embeddings=get("max_position_embeddings", int, 2048 if llama else None),
            rms_norm_eps=get("rms_norm_eps", float, 1e-6), tie_word_embeddings=get("tie_word_embeddings", bool, False),
            qkv_bias=model_type == "qwen2" or (attention_bias and model_type != "mistral"),
            o_bias=attention_bias and model_type in ("llama", "qwen3"), mlp_bias=llama and get("mlp_bias", bool, False),
            initializer_range=get("initializer_range", float, 0.02), rope=read_rope(raw, where), raw=raw)
        if c.num_attention_heads % c.num_key_value_heads:
            raise ValueError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {c.num_key_value_heads}")
        if c.num_hidden_layers > 1000:
            raise ValueError(f"{where}: num_hidden_layers {c.num_hidden_layers} must be a mistake")
        if c.head_dim % 2:
            raise ValueError(f"{where}: head_dim {c.head_dim} is odd; rotary embedding needs pairs")
        if raw.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only silu")
        if raw.get("quantization_config"):
            raise ValueError(f"{where}: the weights are quantized (quantization_config); use the original float checkpoint")
        window = raw.get("sliding_window", 4096 if model_type == "mistral" else None)       # absent means 4096 to MistralConfig
        windowed = window is not None and (model_type == "mistral" or raw.get("use_sliding_window", False))
        layer_types = raw.get("layer_types")
        if layer_types is not None and not (isinstance(layer_types, list) and all(isinstance(t, str) for t in layer_types)):
            raise ValueError(f"{where}: field 'layer_types' should be a list of strings, found {layer_types!r}")
        if (windowed and not (isinstance(window, int) and window >= c.max_position_embeddings)) or set(layer_types or []) - {"full_attention"}:
            raise ValueError(f"{where}: sliding-window attention is not supported (sliding_window {window!r}); "
                             "set sliding_window to null if all your sequences are shorter than the window")
        return c


def read_rope(raw, where):
    """The rotary embedding's parameters: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
    given, older = raw.get("rope_parameters"), raw.get("rope_scaling")
    if given and older and given != older:
        raise ValueError(f"{where}: rope_parameters and rope_scaling are both given and differ; keep the one that is right")
    given = given or older or {}
    if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
        raise ValueError(f"{where}: rope parameters should be one flat object, found {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    names = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
    if not isinstance(kind, str) or kind not in names:
        raise ValueError(f"{where}: rope type {kind!r} is not supported; supported are default and llama3")
    if raw.get("partial_rotary_factor", given.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError(f"{where}: partial_rotary_factor is not supported")
    rope = {"rope_type": kind, "rope_theta": given.get("rope_theta", raw.get("rope_theta", 10000.0)), **{n: given.get(n) for n in names[kind]}}
    for name, value in rope.items():
        if name != "rope_type" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**63):
            raise ValueError(f"{where}: rope field {name!r} should be a positive number, found {value!r}")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(f"{where}: rope field 'low_freq_factor' should be smaller than 'high_freq_factor'")
    return rope


def rope_frequencies(head_dim, rope):
    """Angle per position of each pair of channels, (head_dim / 2,) float32 radians; llama3 slows the low frequencies down."""
    freq = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)       # (D/2,)
    if rope["rope_type"] == "llama3":
        factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)     # full turns within the original context  (D/2,)
        keep = ((turns - low) / (high - low)).clamp(0, 1)                           # 1: fast, as it was; 0: slow, divided by factor
        freq = keep * freq + (1 - keep) * freq / factor
    return freq.float()


def read_config(folder):
    """The Config of a folder's config.json."""
    return Config.from_dict(read_json(folder, "config.json"), os.path.join(folder, "config.json"))


def load_weights(model, folder):
    params = dict(model.named_parameters())
    filled, tied_head = {}, None
    for name, tensor, file in read_tensors(folder, "model.safetensors", "pytorch_model.bin"):
        if name.endswith(".rotary_emb.inv_freq"):                               # a constant that old files carry
            continue
        if name == "lm_head.weight" and model.lm_head is None:                   # tied, yet stored: must be the embedding
            tied_head = (tensor, file)
            continue
        if name not in params:
            raise ValueError(f"{file}: tensor {name!r} has no place in a {model.config.model_type} model of this config.json")
        if name in filled:
            raise ValueError(f"{file}: tensor {name!r} also stands in {filled[name]}")
        if tensor.shape != params[name].shape:
            raise ValueError(f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json asks for {tuple(params[name].shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"{file}: tensor {name!r} is {tensor.dtype}, a float type is needed (quantized weights are not supported)")
        params[name].copy_(tensor)
        filled[name] = file
    missing = [name for name in params if name not in filled]
    if missing:
        raise ValueError(f"{folder}: the weights lack {len(missing)} tensor{'s' * (len(missing) > 1)}, the first is {missing[0]!r}")
    if tied_head is not None:
        tensor, file = tied_head
        embedding = params["model.embed_tokens.weight"]
        if tensor.shape != embedding.shape or not torch.equal(tensor.to(embedding), embedding):
            raise ValueError(f"{file}: tensor 'lm_head.weight' differs from the embedding although config.json says "
                             "tie_word_embeddings; set tie_word_embeddings to false")


@torch.no_grad()
def save_folder(model, folder, dtype=None):
    """Writes config.json, model.safetensors (an adapter merged into the weights) and the tokenizer files of the folder it came from.
    Each file is written beside and renamed, so a reader never sees half a file. dtype: convert, e.g. torch.bfloat16."""
    os.makedirs(folder, exist_ok=True)
    tensors = {name: p for name, p in model.named_parameters() if "lora_" not in name}
    tensors.update({f"{name}.weight": m.merged_weight() for name, m in model.named_modules() if hasattr(m, "merged_weight")})
    save_tensors(tensors, os.path.join(folder, "model.safetensors"), dtype)
    dtype_name = str(dtype or model.model.norm.weight.dtype).removeprefix("torch.")
    raw = {name: value for name, value in model.config.raw.items() if name not in ("dtype", "torch_dtype")}
    save_json({**raw, "dtype" if "dtype" in model.config.raw else "torch_dtype": dtype_name}, os.path.join(folder, "config.json"))
    for name in COPIED_FILES if model.folder else ():
        source, target = os.path.join(model.folder, name), os.path.join(folder, name)
        if os.path.exists(source) and os.path.abspath(source) != os.path.abspath(target):
            shutil.copyfile(source, target + ".tmp")
            os.replace(target + ".tmp", target)


def save_tensors(tensors, path, dtype=None):
    """Writes a safetensors file beside and renames it: a reader never sees half a file, and a full disk costs nothing that was there."""
    tensors = {name: t.detach().to("cpu", dtype or t.dtype).contiguous() for name, t in tensors.items()}
    try:
        save_file(tensors, path + ".tmp", metadata={"format": "pt"})
    except SafetensorError as e:                                                    # for example a full disk
        raise OSError(f"{path}: could not be written ({e}); what stood there before is untouched") from None
    os.replace(path + ".tmp", path)


def save_json(content, path):
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2)
    os.replace(path + ".tmp", path)


def read_json(folder, name):
    path = os.path.join(folder, name)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder}: no such folder; give the folder of a model in Hugging Face format")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{folder}: has no {name}")
    try:
        with open(path, encoding="utf-8") as f:
            content = json.load(f)
    except (ValueError, RecursionError) as e:                                       # broken JSON or broken UTF-8
        raise ValueError(f"{path}: not valid JSON: {e}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_tensors(folder, safe_name, bin_name):
    """Yields (name, tensor, file) of the single or sharded weights in `folder`, one tensor at a time; safetensors before .bin."""
    for single in (safe_name, bin_name):
        path = os.path.join(folder, single)
        if os.path.isfile(path):
            files = {single: None}
            break
        if os.path.isfile(path + ".index.json"):
            weight_map = read_json(folder, single + ".index.json").get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(v, str) and os.path.basename(v) == v for v in weight_map.values()):
                raise ValueError(f"{path}.index.json: field 'weight_map' should map each tensor to a file in the same folder")
            files = {}
            for name, file in weight_map.items():
                files.setdefault(file, set()).add(name)
            break
    else:
        raise FileNotFoundError(f"{folder}: has no weights ({safe_name} or {bin_name}, whole or with an index)")
    for file, names in files.items():
        path = os.path.join(folder, file)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: the index names this file, but it is not there")
        found = set()
        for name, tensor in read_safetensors(path) if file.endswith(".safetensors") else read_bin(path):
            found.add(name)
            yield name, tensor, path
        if names is not None and found != names:
            name = min(found ^ names)
            raise ValueError(f"{path}: tensor {name!r} {'is missing, the index promises it' if name in names else 'is not in the index'}")


def read_safetensors(path):
    try:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():
                yield name, f.get_tensor(name)
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path}: not a readable safetensors file ({e}); download it again") from None


def read_bin(path):
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:                                                          # torch raises many kinds for a broken or unsafe pickle
        raise ValueError(f"{path}: not a readable PyTorch file of plain tensors ({type(e).__name__}: {str(e)[:200]})") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ValueError(f"{path}: expected a dictionary of tensors")
    yield from tensors.items()
