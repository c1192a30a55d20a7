"""
LoRA: a low-rank float32 adapter on frozen weights, which may be bfloat16. Folders in PEFT's format.

    add_lora(model, rank)           a new adapter on every linear layer but the head, alpha = rank
    load_adapter(model, folder)     any alpha, targets, and ranks by pattern
    save_adapter(model, folder)

Merging is GPT.from_pretrained(folder, adapter=...), then save_pretrained(...).
"""
import contextlib
import math
import os
import re

import torch
import torch.nn as nn

from lib.files import check_folder, read_json
from lib.hf import (TOKENIZER_FILES, check_tensor, copy_files, read_field, read_tensors,
                    same_values, save_tensors, write_json)
from lib.products import linear, pack

# what PEFT calls LoRA, too, but computes something else
UNSUPPORTED = (
    "alora_invocation_tokens", "arrow_config", "fan_in_fan_out", "kasa_config", "layer_replication",
    "lora_bias", "monteclora_config", "target_parameters", "trainable_token_indices",
    "use_bdlora", "use_dora", "use_qalora", "velora_config")
LAYERS = r"(.*\.)?({})$"  # that a pattern means, by name


class Linear(nn.Linear):
    """nn.Linear with an optional LoRA adapter: y = W x + b + scale * B (A x)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)

    def set_lora(self, A, B, scale):
        """A (r, in) and B (out, r) become float32 parameters on the device of the weight."""
        A, B = (t.to(self.weight.device, torch.float32) for t in (A, B))
        self.lora_A, self.lora_B, self.lora_scale = nn.Parameter(A), nn.Parameter(B), scale

    def merged_weight(self):
        """W + scale * B A, in float32 if there is an adapter."""
        if self.lora_A is None:
            return self.weight
        return self.weight + self.lora_scale * (self.lora_B @ self.lora_A)

    def forward(self, x):
        y = linear(x, self.weight, self.bias)
        if self.lora_A is None:
            return y
        # they are float32, the product may be bfloat16
        A, B = self.lora_A.to(y.dtype), self.lora_B.to(y.dtype)
        return torch.add(y, linear(linear(x, A), B), alpha=self.lora_scale)


def linears(model):
    """The linear layers that an adapter may sit on, by name: not the output head."""
    named = model.model.named_modules(prefix="model")
    return {name: module for name, module in named if isinstance(module, Linear)}


def add_lora(model, rank):
    """Puts a new adapter on every linear layer but the head and freezes the rest. It changes
    nothing yet: B is 0; A is uniform up to 1 / sqrt(in), as PEFT draws it."""
    if model.lora is not None:
        raise ValueError("the model has a LoRA adapter already: train that one, or merge it first")
    layers = linears(model)
    for layer in layers.values():
        new = {"device": layer.weight.device, "dtype": torch.float32}
        bound = layer.in_features ** -0.5
        layer.set_lora(torch.empty(rank, layer.in_features, **new).uniform_(-bound, bound),
                       torch.zeros(layer.out_features, rank, **new), 1.0)
    model.lora = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.folder and str(model.folder),
        "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none", "use_rslora": False,
        "target_modules": sorted({name.split(".")[-1] for name in layers}),
        "fan_in_fan_out": False, "inference_mode": True}
    freeze_base(model)


def freeze_base(model):
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)


@contextlib.contextmanager
def ready_to_sample(model):
    """Inside this context linear layers hold their weights, and adapters, in the type of their
    products, on a CPU large ones packed: once for all tokens of a rollout. They are other
    parameters, without gradient: nothing that knows the model's own (optimizer,
    DistributedDataParallel) sees the difference. Costs a copy of what is not so already: on a CPU
    of nearly all; else of a float32 model under bfloat16 autocast half its size, which autocast
    would keep as well, of a bfloat16 model its adapter's half."""
    device, own = model.head_weight.device.type, []
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    try:
        for layer in linears(model).values():
            dtype = autocast or layer.weight.dtype
            for name, p in list(layer.named_parameters(recurse=False)):
                ready = p.to(dtype)
                if p.dim() == 2 and not model.compiled:
                    ready = pack(ready)
                if ready is not p:
                    setattr(layer, name, nn.Parameter(ready.detach(), requires_grad=False))
                    own.append((layer, name, p))
        yield
    finally:
        for layer, name, p in own:
            setattr(layer, name, p)


@contextlib.contextmanager
def adapter_as(model, tensors):
    """Inside this context the adapter's tensors are others: `tensors` by parameter name, wherever
    they are. Without gradient."""
    own = {name: model.get_parameter(name).data for name in tensors}
    try:
        for name, tensor in tensors.items():
            p = model.get_parameter(name)
            p.data = tensor.to(p.device, p.dtype)
        yield
    finally:
        for name, tensor in own.items():
            model.get_parameter(name).data = tensor


# ---- PEFT's folders ------------------------------------------------------------------------------

def load_adapter(model, folder):
    """Puts an adapter in PEFT's format (adapter_config.json, adapter_model.safetensors or .bin) on
    the model and freezes the rest. ValueError or FileNotFoundError names what is wrong."""
    config, layers, pairs = read_adapter_config(folder), linears(model), {}
    for name, tensor, file in read_tensors(folder, "adapter_model.safetensors",
                                           "adapter_model.bin"):
        short = name.removeprefix("base_model.model.")
        target, _, side = short.removesuffix(".weight").rpartition(".")
        if target in layers and side in ("lora_A", "lora_B") and name != short:
            r = by_pattern(config, "rank_pattern", target, config["r"])
            layer = layers[target]
            shape = (r, layer.in_features) if side == "lora_A" else (layer.out_features, r)
            check_tensor(name, tensor, file, shape, f"this model and r = {r} ask")
            pairs.setdefault(target, {})[side] = tensor
        else:
            check_base_tensor(model, name, short, tensor, file)
    if not pairs:
        raise ValueError(f"{folder}: the adapter holds no tensors")
    for target in [*targets_of(config, layers), *pairs]:
        if len(pairs.get(target, ())) < 2:
            raise ValueError(f"{folder}: lora_A or lora_B of {target!r} is missing")
    for target, pair in pairs.items():
        r = len(pair["lora_A"])
        alpha = by_pattern(config, "alpha_pattern", target, config["lora_alpha"])
        scale = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
        layers[target].set_lora(pair["lora_A"], pair["lora_B"], scale)
    # whole modules in it are the base's, as check_base_tensor saw
    model.lora = {**config, "modules_to_save": None}
    # the adapter's own tokenizer or template, if it has one, goes where it goes
    if any(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZER_FILES):
        model.tokenizer_folder = folder
    freeze_base(model)


def check_base_tensor(model, name, short, tensor, file):
    """PEFT also saves whole embeddings in some cases: fine if they are those of the base."""
    if short == "lm_head.weight" and model.lm_head is None:
        short = "model.embed_tokens.weight"
    base = dict(model.named_parameters()).get(short)
    if base is None:
        raise ValueError(f"{file}: tensor {name!r} is no lora_A or lora_B of a linear layer inside "
                         "this model's layers")
    if not same_values(tensor, base):
        raise ValueError(f"{file}: tensor {name!r} {tuple(tensor.shape)} differs from the base "
                         f"model's {tuple(base.shape)}; adapters with whole trained or resized "
                         "modules are not supported, merge it into its base with PEFT first")


def read_adapter_config(folder):
    check_folder(folder)
    where = os.path.join(folder, "adapter_config.json")
    c = read_json(where)
    unsupported = [key for key in UNSUPPORTED if c.get(key)]
    # pissa and its like also change the base weights
    if c.get("init_lora_weights") not in (True, False, None, "gaussian", "orthogonal", "eva"):
        unsupported.append("init_lora_weights")
    if c.get("peft_type") != "LORA" or c.get("bias", "none") != "none" or unsupported:
        raise ValueError(f"{where}: only plain LoRA is supported (peft_type {c.get('peft_type')!r},"
                         f" bias {c.get('bias')!r}"
                         + "".join(f", {key} {c[key]!r}" for key in unsupported)
                         + "); merge it into its base with PEFT first: merge_and_unload()")
    read_field(c, where, "r", int)
    read_field(c, where, "lora_alpha", float, positive=False)
    for key, kind in (("rank_pattern", int), ("alpha_pattern", float)):
        for pattern in read_field(c, where, key, dict, {}):
            read_field(c[key], f"{where}: {key}", pattern, kind, positive=kind is int)
            try:
                re.compile(LAYERS.format(pattern))
            except (re.error, OverflowError) as e:
                raise ValueError(f"{where}: {key}: {pattern!r} is no regular expression ({e}); "
                                 "mend it") from None
    return c


def by_pattern(config, key, target, default):
    """The value of the first pattern that is the end of the layer's name, as PEFT reads them."""
    for pattern, value in (config.get(key) or {}).items():
        if re.match(LAYERS.format(pattern), target):
            return value
    return default


def targets_of(config, layers):
    """The layers that must be in the files. A regular expression or a choice of layers promises
    none."""
    wanted = config.get("target_modules")
    chosen = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    if not isinstance(wanted, list) or chosen:
        return []
    return [name for name in layers if any(name.endswith(f".{end}") for end in wanted)]


def save_adapter(model, folder):
    """Writes the adapter in PEFT's format, and the tokenizer files it came with."""
    os.makedirs(folder, exist_ok=True)
    adapter = {f"base_model.model.{name}.weight": p
               for name, p in model.named_parameters() if "lora_" in name}
    save_tensors(os.path.join(folder, "adapter_model.safetensors"), adapter)
    write_json(os.path.join(folder, "adapter_config.json"), model.lora)
    copy_files(model.tokenizer_folder, folder, TOKENIZER_FILES)
