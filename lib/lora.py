"""LoRA: a low-rank float32 adapter on frozen weights, which may be bfloat16; folders in PEFT's format."""
import contextlib
import math
import os
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from lib.hf import read_json, read_tensors, save_json, save_tensors

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Linear(nn.Linear):
    """nn.Linear with an optional LoRA adapter: y = W x + b + scale * B (A x)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)

    def set_lora(self, A, B, scale):                                                # A (r, in), B (out, r)
        self.lora_A, self.lora_B, self.lora_scale, self.lora_on = nn.Parameter(A), nn.Parameter(B), scale, True

    def merged_weight(self):
        if self.lora_A is None:
            return self.weight
        return (self.weight + self.lora_scale * (self.lora_B @ self.lora_A)).to(self.weight.dtype)

    def forward(self, x):
        y = super().forward(x)
        if self.lora_A is None or not self.lora_on:
            return y
        A, B = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)                     # they are float32, the base may be bfloat16
        return y + self.lora_scale * F.linear(F.linear(x, A), B)


def linears(model):
    """The linear layers that an adapter may sit on, by name: those of the layers, not the output head."""
    return {name: m for name, m in model.model.named_modules(prefix="model") if isinstance(m, Linear)}


def add_lora(model, rank, alpha, targets=LORA_TARGETS):
    """Puts a new adapter on the linear layers named in `targets` and freezes the rest. It changes nothing yet: B is 0; A is uniform
    up to 1 / sqrt(in), as PEFT draws it. ValueError: no such layer, or there is an adapter already."""
    if model.lora is not None:
        raise ValueError("the model has a LoRA adapter already: train that one, or merge it first (save_pretrained)")
    unknown = [t for t in targets if t not in LORA_TARGETS]
    if unknown or not targets or rank < 1:
        raise ValueError(f"LoRA: rank {rank}, target modules {', '.join(targets) or '(none)'}: needs a rank of at least 1 and some of "
                         f"{', '.join(LORA_TARGETS)}")
    for name, linear in linears(model).items():
        if name.rpartition(".")[2] in targets:
            out_features, in_features = linear.weight.shape
            new = partial(torch.zeros, device=linear.weight.device, dtype=torch.float32)
            linear.set_lora(new(rank, in_features).uniform_(-in_features ** -0.5, in_features ** -0.5), new(out_features, rank), alpha / rank)
    model.lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model.folder, "r": rank, "lora_alpha": alpha,
                 "lora_dropout": 0.0, "target_modules": list(targets), "bias": "none", "use_rslora": False, "fan_in_fan_out": False,
                 "inference_mode": True}
    freeze_base(model)


def freeze_base(model):
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)


@contextlib.contextmanager
def adapter_as(model, tensors=None):
    """Inside this context the adapter is another: none, so that the model is its base, or `tensors` by parameter name. Without gradient."""
    own = {name: p.data for name, p in model.named_parameters() if tensors and name in tensors}
    adapted = [linear for linear in linears(model).values() if linear.lora_A is not None]

    def use(tensors, on):
        for name in own:
            model.get_parameter(name).data = tensors[name]
        for linear in adapted:
            linear.lora_on = on

    use(tensors, on=tensors is not None)
    try:
        yield
    finally:
        use(own, on=True)


def load_adapter(model, folder):
    """Puts a LoRA adapter in PEFT's format (adapter_config.json, adapter_model.safetensors or .bin) on the model's linear layers."""
    c, where = read_json(folder, "adapter_config.json"), os.path.join(folder, "adapter_config.json")
    unsupported = [k for k in ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern",
                               "layer_replication", "trainable_token_indices", "target_parameters", "use_qalora", "use_bdlora",
                               "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config",
                               "monteclora_config") if c.get(k)]
    if c.get("init_lora_weights") not in (True, False, None, "gaussian", "orthogonal", "eva"):
        unsupported.append("init_lora_weights")                                 # pissa and its like also change the base weights
    if c.get("peft_type") != "LORA" or c.get("bias", "none") != "none" or unsupported:
        raise ValueError(f"{where}: only plain LoRA is supported (peft_type {c.get('peft_type')!r}, bias {c.get('bias')!r}"
                         + "".join(f", {k} {c[k]!r}" for k in unsupported) + ")")
    r, alpha = c.get("r"), c.get("lora_alpha")
    if type(r) is not int or r < 1 or isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) < 2**31:
        raise ValueError(f"{where}: r should be a positive int and lora_alpha a number, found {r!r} and {alpha!r}")
    layers = linears(model)
    pairs = {}
    for name, tensor, file in read_tensors(folder, "adapter_model.safetensors", "adapter_model.bin"):
        target, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if side not in ("lora_A", "lora_B") or target not in layers:
            raise ValueError(f"{file}: tensor {name!r} is no lora_A or lora_B of a linear layer inside this model's layers")
        out_features, in_features = layers[target].weight.shape
        shape = (r, in_features) if side == "lora_A" else (out_features, r)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, this model and r = {r} ask for {shape}")
        if side in pairs.get(target, {}):
            raise ValueError(f"{file}: tensor {name!r} is there twice")
        if not tensor.is_floating_point():
            raise ValueError(f"{file}: tensor {name!r} is {tensor.dtype}, a float type is needed")
        pairs.setdefault(target, {})[side] = tensor
    wanted = c.get("target_modules")
    if isinstance(wanted, list) and c.get("layers_to_transform") is None and not c.get("exclude_modules"):      # a regex is not checked
        pairs.update({n: {} for n in layers if n.rpartition(".")[2] in wanted and n not in pairs})
    for target, pair in pairs.items():
        if len(pair) < 2:
            raise ValueError(f"{folder}: lora_A or lora_B of {target!r} is missing from the adapter")
        scale = alpha / (math.sqrt(r) if c.get("use_rslora") else r)
        layers[target].set_lora(*(pair[s].to(layers[target].weight.device, torch.float32) for s in ("lora_A", "lora_B")), scale)
    if not pairs:
        raise ValueError(f"{folder}: the adapter holds no tensors")
    model.lora = c
    freeze_base(model)


def save_adapter(model, folder):
    """Writes the adapter in PEFT's format: adapter_config.json and adapter_model.safetensors."""
    os.makedirs(folder, exist_ok=True)
    save_tensors({f"base_model.model.{name}.weight": p for name, p in model.named_parameters() if "lora_" in name},
                 os.path.join(folder, "adapter_model.safetensors"))
    save_json(model.lora, os.path.join(folder, "adapter_config.json"))
