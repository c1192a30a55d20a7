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
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lib.hf import Config, load_weights, read_config, rope_frequencies, save_folder
from lib.lora import Linear, load_adapter


# ---------------------------------------------------------------------------------------------------------------------------
# layers

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
        self.stored_dtype = torch.float32                                           # of the files that the weights came from
        self.tokenizer_folder = None                                                # an adapter's, if it has a tokenizer of its own
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
    # Hugging Face folders

    @classmethod
    def from_pretrained(cls, folder, adapter=None, dtype=torch.float32, device="cpu"):
        """Loads config.json and the weights (*.safetensors or pytorch_model*.bin, single or in
        shards, any float type) of `folder`. adapter: a folder with a LoRA adapter in PEFT's format,
        put on top; the weights below it are frozen. Every tensor of the files is used, every
        parameter filled, every shape checked: FileNotFoundError or ValueError says what is wrong
        with which file or tensor."""
        config = read_config(folder)
        try:
            # tensors are copied in one by one, so the weights are never twice in memory
            with torch.device("meta"):
                model = cls(config)
            model.to(dtype).to_empty(device=device)
        except (RuntimeError, AssertionError) as e:  # too large for it, or no such device
            raise ValueError(f"{folder}: cannot make the model of this config.json on device "
                             f"{device}: {str(e).splitlines()[0]}") from None
        model.folder = folder
        with torch.no_grad():
            model.stored_dtype = load_weights(model, folder)
            if adapter is not None:
                load_adapter(model, adapter)
        return model

    def save_pretrained(self, folder, dtype=None):
        """Writes a folder that opens in transformers and vLLM, an adapter merged into the weights.
        dtype: that of the files; None: that of the parameters."""
        save_folder(self, folder, dtype)
