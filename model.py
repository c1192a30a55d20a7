"""
The policy: a decoder-only transformer that reads and writes Hugging Face folders (Llama, Qwen2, Qwen2.5, Qwen3, Mistral).

    model = GPT.from_pretrained("Qwen2.5-0.5B-Instruct")
    logits = model(input_ids)                      # (B, T) -> (B, T, V)
    model.save_pretrained("out/mine/model")        # opens in transformers and vLLM

Modules carry the names of the checkpoint's tensors (`model.layers.0.self_attn.q_proj.weight`), so loading is copying by name.

One group of G completions shares its prompt. Three ways to run the same layers make use of that:
    forward()               whole sequences, for everybody
    completion_hidden()     training: each prompt runs once, its completions attend to the prompt's keys and values
    prefill(), decode()     sampling: the same, one token at a time, with a GroupCache
They differ only in `attend`, the function that a layer calls with its queries, keys and values.
"""
import contextlib
import json
import math
import os
import shutil
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COPIED_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")  # save_pretrained takes them along


# ---------------------------------------------------------------------------------------------------------------------------
# config.json

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


# ---------------------------------------------------------------------------------------------------------------------------
# layers

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


class Embedding(nn.Embedding):
    def reset_parameters(self):                                                     # left to GPT.__init__: normal_ on the meta device
        pass                                                                        # makes torch import its compiler, for seconds


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):                                                           # in float32, whatever x is
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary embedding. Channel i pairs with channel i + D/2, as Hugging Face stores q_proj and k_proj (not with its neighbour).
    The first half of the channels turns with a minus sign, which `sin` carries."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((b, a), dim=-1) * sin).to(x.dtype)                  # (B, T, H, D)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        if c.model_type == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x, cos, sin, attend):
        q = self.q_norm(self.q_proj(x).unflatten(2, (-1, self.head_dim)))           # (B, T, Hq, D)
        k = self.k_norm(self.k_proj(x).unflatten(2, (-1, self.head_dim)))           # (B, T, Hkv, D)
        v = self.v_proj(x).unflatten(2, (-1, self.head_dim))                        # (B, T, Hkv, D)
        y = attend(rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2))    # (B, Hq, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))                            # (B, T, H)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(c.hidden_size, c.rms_norm_eps), Attention(c)
        self.post_attention_layernorm, self.mlp = RMSNorm(c.hidden_size, c.rms_norm_eps), MLP(c)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))                       # (B, T, H)


def attention(q, k, v, mask=None):
    """softmax(q k^T / sqrt(D)) v; causal without a mask. q (B, Hq, T, D), k and v (B, Hkv, S, D), mask (B or 1, 1, T, S) True = may see."""
    repeat = q.shape[1] // k.shape[1]                                               # query head h reads key head h // repeat
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class GroupCache:
    """Keys and values while a group is sampled: those of its prompt once, shared by the G completions, and those of their own tokens.

    prompt_kv: per layer k and v, (P, Hkv, Tp, D), with prompt_lengths (P,) real tokens each; own tokens go to buffers (P, Hkv, G, L, D).
    prompt_bias (P*Hkv, 1, Tp) masks the padding of prompts, own_bias (1, 1, seen), the same for all, the places that are not sampled yet.
    """

    def __init__(self, prompt_kv, prompt_lengths, group_size, max_new_tokens):
        P, Hkv, Tp, D = prompt_kv[0][0].shape
        self.prompt_kv = [tuple(x.clone(memory_format=torch.contiguous_format) for x in kv) for kv in prompt_kv]    # not in every product
        self.prompt_lengths, self.max_new_tokens = prompt_lengths, max_new_tokens
        room = min(64, max_new_tokens)                                              # doubled when it is full
        self.own_kv = [tuple(x.new_zeros(P, Hkv, group_size, room, D) for x in kv) for kv in prompt_kv]
        self.length = 0                                                             # own tokens so far
        self.set_padding()

    def set_padding(self):
        (P, Hkv, Tp, _), device = self.prompt_kv[0][0].shape, self.prompt_lengths.device
        padding = torch.arange(Tp, device=device) >= self.prompt_lengths[:, None]                                   # (P, Tp)
        self.prompt_bias = self.bias(padding).repeat_interleave(Hkv, dim=0)[:, None]                                # (P*Hkv, 1, Tp)

    def bias(self, masked):
        """What is added to scores: minus infinity where a key is masked, else 0."""
        return torch.zeros_like(masked, dtype=self.own_kv[0][0].dtype).masked_fill_(masked, -math.inf)

    def select(self, prompts, members):
        """Keeps these prompts (P',) and of each these members of the group (P', G'): finished completions leave the batch."""
        Tp = int(self.prompt_lengths[prompts].max())
        self.prompt_kv = [tuple(x[prompts, :, :Tp] for x in kv) for kv in self.prompt_kv]
        heads = torch.arange(self.own_kv[0][0].shape[1], device=prompts.device)[:, None]
        self.own_kv = [tuple(x[prompts[:, None, None], heads, members[:, None]] for x in kv) for kv in self.own_kv]
        self.prompt_lengths = self.prompt_lengths[prompts]
        self.set_padding()

    def next_token(self, static=False):
        """Makes room for one more token per completion; sets its place and what it may not see. Returns its positions (P*G,).
        static: it attends to the whole buffer and the place is a tensor, so that no shape changes until the buffer grows (for torch.compile)."""
        (_, _, G, room, _), device, t = self.own_kv[0][0].shape, self.prompt_lengths.device, self.length
        if t == room:
            more = min(room, self.max_new_tokens - room)
            self.own_kv = [tuple(F.pad(x, (0, 0, 0, more)) for x in kv) for kv in self.own_kv]
            room += more
        self.place = torch.tensor([t], device=device) if static else slice(t, t + 1)
        self.own_bias = self.bias(torch.arange(room if static else t + 1, device=device) > t)[None, None]           # (1, 1, seen)
        self.length += 1
        return self.prompt_lengths.repeat_interleave(G) + t

    def attend(self, layer, q, k, v):
        """One new token per completion: q (P*G, Hq, 1, D), k and v (P*G, Hkv, 1, D) -> (P*G, Hq, 1, D). Scores of the prompt's keys are one
        product for the whole group, those of the own keys one for each completion; the softmax is over both."""
        (prompt_k, prompt_v), (own_k, own_v) = self.prompt_kv[layer], self.own_kv[layer]
        (P, Hkv, G, _, D), Tp, seen = own_k.shape, prompt_k.shape[2], self.own_bias.shape[2]
        R, scale = q.shape[1] // Hkv, D ** -0.5                                     # R query heads to a key head
        for own, new in ((own_k, k), (own_v, v)):
            own[:, :, :, self.place] = new.reshape(P, G, Hkv, 1, D).transpose(1, 2)
        own_k, own_v = (own.flatten(0, 2)[:, :seen] for own in (own_k, own_v))      # (P*Hkv*G, seen, D)
        q = q.reshape(P, G, Hkv, R, D).transpose(1, 2).reshape(P * Hkv, G * R, D)
        prompt_scores = torch.baddbmm(self.prompt_bias, q, prompt_k.flatten(0, 1).mT, alpha=scale).view(-1, R, Tp)  # (P*Hkv*G, R, Tp)
        own_scores = torch.baddbmm(self.own_bias, q.reshape(-1, R, D), own_k.mT, alpha=scale)                       # (P*Hkv*G, R, seen)
        probs = torch.cat((prompt_scores, own_scores), dim=-1).softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        y = probs[..., :Tp].reshape(P * Hkv, G * R, Tp) @ prompt_v.flatten(0, 1)    # (P*Hkv, G*R, D)
        y = torch.baddbmm(y.view(-1, R, D), probs[..., Tp:], own_v)                 # (P*Hkv*G, R, D)
        return y.view(P, Hkv, G, R, D).transpose(1, 2).reshape(P * G, Hkv * R, 1, D)


# ---------------------------------------------------------------------------------------------------------------------------
# the model

class GPT(nn.Module):
    def __init__(self, config):
        """A model with random weights (normal, `initializer_range`, default 0.02) of the shape of `config`."""
        super().__init__()
        self.config, self.folder = config, None
        self.lora = None                                                            # adapter_config.json of the adapter, if there is one
        self.checkpointing = False                                                  # keep no activations inside layers; run them again instead
        self.compiled = False
        self.model = nn.ModuleDict(dict(
            embed_tokens=Embedding(config.vocab_size, config.hidden_size),
            layers=nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers)),
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps)))
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope_freq = rope_frequencies(config.head_dim, config.rope)             # no buffer: model.to(bfloat16) must not round it
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=config.initializer_range)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    @property
    def head_weight(self):
        """The output head, (V, H); the embedding itself when the two are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden_states(self, input_ids, positions, attend):
        """input_ids and positions (B, T) -> last hidden states (B, T, H). attend(layer, q, k, v) -> (B, Hq, T, D)."""
        if self.rope_freq.device != positions.device:
            self.rope_freq = self.rope_freq.to(positions.device)
        angles = (positions[..., None].float() * self.rope_freq).repeat(1, 1, 2)[:, :, None]                        # (B, T, 1, D)
        cos, sin = angles.cos(), angles.sin()
        sin[..., : sin.shape[-1] // 2].neg_()                                       # see rotate()
        x = self.model.embed_tokens(input_ids)                                      # (B, T, H)
        for i, layer in enumerate(self.model.layers):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, partial(attend, i), use_reentrant=False)
            else:
                x = layer(x, cos, sin, partial(attend, i))
        return self.model.norm(x)

    def forward(self, input_ids, attention_mask=None):
        """input_ids (B, T), attention_mask (B, T) True (1) on real tokens, padded on either side -> logits (B, T, V).
        Positions count real tokens from 0. Logits at padding are finite and mean nothing."""
        B, T = input_ids.shape
        if attention_mask is None:
            positions, mask = torch.arange(T, device=input_ids.device).expand(B, T), None
        else:
            real = attention_mask.bool()                                            # (B, T)
            positions = (real.cumsum(1) - 1).clamp(min=0)                           # (B, T)
            ones = torch.ones(T, T, dtype=torch.bool, device=input_ids.device)
            mask = ones.tril() & real[:, None, None] | ones.diag().diag()           # a padding query sees itself: no NaN  (B, 1, T, T)
        hidden = self.hidden_states(input_ids, positions, lambda layer, q, k, v: attention(q, k, v, mask))
        return F.linear(hidden, self.head_weight)

    def prefill(self, prompt_ids):
        """Runs right-padded prompts (P, Tp) -> hidden states (P, Tp, H) and, per layer, keys and values (P, Hkv, Tp, D).
        Causal attention keeps the padding on the right from reaching real tokens, so no mask is needed."""
        prompt_kv = {}

        def attend(layer, q, k, v):
            prompt_kv.setdefault(layer, (k, v))                                     # when checkpointing runs it again, the first ones stay
            return attention(q, k, v)

        positions = torch.arange(prompt_ids.shape[1], device=prompt_ids.device).expand_as(prompt_ids)
        hidden = self.hidden_states(prompt_ids, positions, attend)
        return hidden, [prompt_kv[i] for i in range(len(self.model.layers))]

    def decode(self, ids, cache):
        """One sampled token per completion (P*G,) -> hidden states (P*G, H) that predict the next one; the cache grows by one."""
        return self.decode_step(ids, cache.next_token(static=self.compiled), cache)

    def decode_step(self, ids, positions, cache):                                   # what compile_steps() compiles
        return self.hidden_states(ids[:, None], positions[:, None], cache.attend)[:, 0]      # (P*G, H)

    def completion_hidden(self, prompt_ids, prompt_lengths, completion_ids, prompt_of):
        """Hidden states that predict the tokens of N completions; each prompt runs once for all its completions.

        prompt_ids (P, Tp) right-padded with prompt_lengths (P,); completion_ids (N, L) right-padded; prompt_of (N,): each completion's
        prompt. Returns (N, L, H): place t predicts completion token t (place 0 is the prompt's last hidden state). Gradients flow
        through the prompt, too. What stands at padding means nothing.
        """
        N, L = completion_ids.shape
        Tp, device = prompt_ids.shape[1], prompt_ids.device
        hidden, prompt_kv = self.prefill(prompt_ids)                                # (P, Tp, H)
        first = hidden[torch.arange(len(prompt_ids), device=device), prompt_lengths - 1][prompt_of, None]           # (N, 1, H)
        if L <= 1:
            return first[:, :L]
        own = torch.arange(L - 1, device=device)                                    # the last token predicts nothing
        seen_prompt = (torch.arange(Tp, device=device) < prompt_lengths[prompt_of, None])[:, None, None]            # (N, 1, 1, Tp)
        seen_own = (own[:, None] >= own).expand(N, 1, L - 1, L - 1)
        mask = torch.cat((seen_prompt.expand(N, 1, L - 1, Tp), seen_own), dim=-1)   # (N, 1, L-1, Tp+L-1)

        def after_prompt(prompt_x, x):                                              # index_select: its gradient is faster than that of an index
            return torch.cat((prompt_x.index_select(0, prompt_of), x), dim=2)       # (N, Hkv, Tp+L-1, D)

        def attend(layer, q, k, v):
            prompt_k, prompt_v = prompt_kv[layer]
            return attention(q, after_prompt(prompt_k, k), after_prompt(prompt_v, v), mask)

        rest = self.hidden_states(completion_ids[:, :-1], prompt_lengths[prompt_of, None] + own, attend)             # (N, L-1, H)
        return torch.cat((first, rest), dim=1)

    def compile_steps(self, **options):
        """torch.compile for the training forward and the decode step; options go to torch.compile. Names in checkpoints stay as they are."""
        torch.fx.experimental._config.use_duck_shape = False                        # sizes that are equal by chance may differ next time
        self.decode_step = torch.compile(self.decode_step, dynamic=True, **options)
        self.completion_hidden = torch.compile(self.completion_hidden, dynamic=True, **options)
        self.compiled = True

    # -----------------------------------------------------------------------------------------------------------------------
    # LoRA: a low-rank float32 adapter on frozen weights, which may be bfloat16

    def linears(self):
        """The linear layers that an adapter may sit on, by name: those of the layers, not the output head."""
        return {name: m for name, m in self.model.named_modules(prefix="model") if isinstance(m, Linear)}

    def add_lora(self, rank, alpha, targets=LORA_TARGETS):
        """Puts a new adapter on the linear layers named in `targets` and freezes the rest. It changes nothing yet: B is 0; A is uniform
        up to 1 / sqrt(in), as PEFT draws it. ValueError: no such layer, or there is an adapter already."""
        if self.lora is not None:
            raise ValueError("the model has a LoRA adapter already: train that one, or merge it first (save_pretrained)")
        unknown = [t for t in targets if t not in LORA_TARGETS]
        if unknown or not targets or rank < 1:
            raise ValueError(f"LoRA: rank {rank}, target modules {', '.join(targets) or '(none)'}: needs a rank of at least 1 and some of "
                             f"{', '.join(LORA_TARGETS)}")
        for name, linear in self.linears().items():
            if name.rpartition(".")[2] in targets:
                out_features, in_features = linear.weight.shape
                new = partial(torch.zeros, device=linear.weight.device, dtype=torch.float32)
                linear.set_lora(new(rank, in_features).uniform_(-in_features ** -0.5, in_features ** -0.5), new(out_features, rank), alpha / rank)
        self.lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self.folder, "r": rank, "lora_alpha": alpha,
                     "lora_dropout": 0.0, "target_modules": list(targets), "bias": "none", "use_rslora": False, "fan_in_fan_out": False,
                     "inference_mode": True}
        self.freeze_base()

    def freeze_base(self):
        for name, p in self.named_parameters():
            p.requires_grad_("lora_" in name)

    @contextlib.contextmanager
    def adapter_as(self, tensors=None):
        """Inside this context the adapter is another: none, so that the model is its base, or `tensors` by parameter name. Without gradient."""
        own = {name: p.data for name, p in self.named_parameters() if tensors and name in tensors}
        linears = [linear for linear in self.linears().values() if linear.lora_A is not None]

        def use(tensors, on):
            for name in own:
                self.get_parameter(name).data = tensors[name]
            for linear in linears:
                linear.lora_on = on

        use(tensors, on=tensors is not None)
        try:
            yield
        finally:
            use(own, on=True)

    # -----------------------------------------------------------------------------------------------------------------------
    # Hugging Face folders

    @classmethod
    def from_pretrained(cls, folder, adapter=None, dtype=torch.float32, device="cpu"):
        """Loads config.json and the weights (*.safetensors or pytorch_model*.bin, single or sharded, any float type) of `folder`.

        adapter: a folder with a LoRA adapter in PEFT's format, put on top (then the weights below it are frozen). Every tensor of the files
        is used, every parameter filled and every shape checked. FileNotFoundError or ValueError says what is wrong with which file or tensor.
        """
        config = Config.from_dict(read_json(folder, "config.json"), os.path.join(folder, "config.json"))
        try:
            with torch.device("meta"):
                model = cls(config)
            model.to(dtype).to_empty(device=device)                                 # tensors are copied in one by one: never twice in memory
        except (RuntimeError, AssertionError) as e:                                 # too large for it, or no such device
            raise ValueError(f"{folder}: cannot make the model of this config.json on device {device}: {str(e).splitlines()[0]}") from None
        model.folder = folder
        with torch.no_grad():
            model.load_weights(folder)
            if adapter is not None:
                model.load_adapter(adapter)
        return model

    def load_weights(self, folder):
        params = dict(self.named_parameters())
        filled, tied_head = {}, None
        for name, tensor, file in read_tensors(folder, "model.safetensors", "pytorch_model.bin"):
            if name.endswith(".rotary_emb.inv_freq"):                               # a constant that old files carry
                continue
            if name == "lm_head.weight" and self.lm_head is None:                   # tied, yet stored: must be the embedding
                tied_head = (tensor, file)
                continue
            if name not in params:
                raise ValueError(f"{file}: tensor {name!r} has no place in a {self.config.model_type} model of this config.json")
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

    def load_adapter(self, folder):
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
        linears = self.linears()
        pairs = {}
        for name, tensor, file in read_tensors(folder, "adapter_model.safetensors", "adapter_model.bin"):
            target, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            if side not in ("lora_A", "lora_B") or target not in linears:
                raise ValueError(f"{file}: tensor {name!r} is no lora_A or lora_B of a linear layer inside this model's layers")
            out_features, in_features = linears[target].weight.shape
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
            pairs.update({n: {} for n in linears if n.rpartition(".")[2] in wanted and n not in pairs})
        for target, pair in pairs.items():
            if len(pair) < 2:
                raise ValueError(f"{folder}: lora_A or lora_B of {target!r} is missing from the adapter")
            scale = alpha / (math.sqrt(r) if c.get("use_rslora") else r)
            linears[target].set_lora(*(pair[s].to(linears[target].weight.device, torch.float32) for s in ("lora_A", "lora_B")), scale)
        if not pairs:
            raise ValueError(f"{folder}: the adapter holds no tensors")
        self.lora = c
        self.freeze_base()

    def save_adapter(self, folder):
        """Writes the adapter in PEFT's format: adapter_config.json and adapter_model.safetensors."""
        os.makedirs(folder, exist_ok=True)
        save_tensors({f"base_model.model.{name}.weight": p for name, p in self.named_parameters() if "lora_" in name},
                     os.path.join(folder, "adapter_model.safetensors"))
        save_json(self.lora, os.path.join(folder, "adapter_config.json"))

    @torch.no_grad()
    def save_pretrained(self, folder, dtype=None):
        """Writes config.json, model.safetensors (an adapter merged into the weights) and the tokenizer files of the folder it came from.
        Each file is written beside and renamed, so a reader never sees half a file. dtype: convert, e.g. torch.bfloat16."""
        os.makedirs(folder, exist_ok=True)
        tensors = {name: p for name, p in self.named_parameters() if "lora_" not in name}
        tensors.update({f"{name}.weight": m.merged_weight() for name, m in self.named_modules() if isinstance(m, Linear)})
        save_tensors(tensors, os.path.join(folder, "model.safetensors"), dtype)
        dtype_name = str(dtype or self.model.norm.weight.dtype).removeprefix("torch.")
        raw = {name: value for name, value in self.config.raw.items() if name not in ("dtype", "torch_dtype")}
        save_json({**raw, "dtype" if "dtype" in self.config.raw else "torch_dtype": dtype_name}, os.path.join(folder, "config.json"))
        for name in COPIED_FILES if self.folder else ():
            source, target = os.path.join(self.folder, name), os.path.join(folder, name)
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
