"""
The policy: a decoder-only transformer that reads and writes Hugging Face folders (Llama, Qwen2,
Qwen2.5, Qwen3, Mistral).

    model = GPT.from_pretrained("Qwen2.5-0.5B-Instruct")
    logits = model(input_ids)                      # (B, T) -> (B, T, V)
    model.save_pretrained("out/mine/model")        # opens in transformers and vLLM

Modules carry the names of the checkpoint's tensors, so loading is copying by name (lib/hf.py).

A group of G completions shares its prompt. Three passes through the same layers make use of that:
    forward()                whole sequences, for everybody
    prefill(), decode()      sampling: each prompt once, then one token at a time (sample.py)
    completion_hidden()      training: each prompt once, its completions after its keys and values
They differ in `attend`, the function with which a layer looks at keys and values, and in the
tensors that it gets beside queries, keys and values of the tokens themselves.

Axes: B sequences of T tokens, P prompts, N completions; H hidden size, V vocabulary; Hq query
heads, Hkv key heads, D channels of a head.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lib.hf import load_weights, read_config, rope_frequencies, save_folder
from lib.lora import Linear, load_adapter


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):  # in float32, whatever x is
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary embedding, (B, T, heads, D). Channel i pairs with channel i + D/2, as Hugging Face
    stores q_proj and k_proj, not with its neighbour. `sin` carries the minus of the first half."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((b, a), dim=-1) * sin).to(x.dtype)


def attention(q, k, v, mask=None):
    """softmax(q k^T / sqrt(D)) v, causal without a mask: q (B, Hq, T, D), k and v (B, Hkv, S, D),
    mask (B or 1, 1, T, S) True where a query may look -> (B, Hq, T, D). Inside torch's kernel
    scores are float32, whatever q and k are."""
    repeat = q.shape[1] // k.shape[1]  # query head h reads key head h // repeat
    # on a GPU only flash attention shares keys between heads; it takes no mask and no float32
    if repeat > 1 and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                          enable_gqa=k.shape[1] < q.shape[1])


def attention_after_prompt(q, k, v, prompt_k, prompt_v, prompt_of, mask):
    """The same for completions (N, ...) whose prompts' keys and values (P, Hkv, Tp, D) stand
    before their own; prompt_of (N,) says which. (The gradient of index_select is a fast one.)"""
    k = torch.cat((prompt_k.index_select(0, prompt_of), k), dim=2)  # (N, Hkv, Tp + T, D)
    v = torch.cat((prompt_v.index_select(0, prompt_of), v), dim=2)  # (N, Hkv, Tp + T, D)
    return attention(q, k, v, mask)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, q_size, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, kv_size, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, kv_size, bias=c.qkv_bias)
        self.o_proj = Linear(q_size, c.hidden_size, bias=c.o_bias)
        self.q_norm = self.k_norm = nn.Identity()
        if c.model_type == "qwen3":
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x, cos, sin, attend, *seen):
        heads = (-1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).unflatten(2, heads)), cos, sin)  # (B, T, Hq, D)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(2, heads)), cos, sin)  # (B, T, Hkv, D)
        v = self.v_proj(x).unflatten(2, heads)  # (B, T, Hkv, D)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
        y = attend(q, k, v, *seen)  # (B, Hq, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2)), k, v  # (B, T, H)


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
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, attend, *seen):
        """x (B, T, H) -> (B, T, H), and this layer's keys and values (B, Hkv, T, D)."""
        y, k, v = self.self_attn(self.input_layernorm(x), cos, sin, attend, *seen)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Embedding(nn.Embedding):
    def reset_parameters(self):  # left to GPT: normal_ on the meta device imports torch's compiler
        pass


class GPT(nn.Module):
    def __init__(self, config):
        """A model with random weights of the shape of `config` (lib.hf.Config)."""
        super().__init__()
        self.config = config
        self.folder = None  # where its files came from
        self.tokenizer_folder = None  # its adapter's, if that has tokenizer files of its own
        self.lora = None  # adapter_config.json of its adapter, if there is one
        self.stored_dtype = torch.float32  # of the weights in its files
        self.checkpointing = False  # keep no activations of layers, run them again instead
        self.compiled = False
        self.model = nn.ModuleDict(dict(
            embed_tokens=Embedding(config.vocab_size, config.hidden_size),
            layers=nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers)),
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps)))
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        # angle a position of each pair of channels; no buffer: a cast must not round it
        self.rope_freq = rope_frequencies(config.head_dim, config.rope)  # (D/2,)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=config.initializer_range)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    @property
    def head_weight(self):
        """The output head, (V, H); the embedding itself when the two are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden_states(self, input_ids, positions, attend, seen_by_layer=None, seen=(), keep=False):
        """input_ids and positions (B, T) -> last hidden states (B, T, H), and with `keep` the keys
        and values (B, Hkv, T, D) of each layer. Layer i calls
        attend(q, k, v, *seen_by_layer[i], *seen)."""
        if self.rope_freq.device != positions.device:
            self.rope_freq = self.rope_freq.to(positions.device)
        angles = positions[..., None].float() * self.rope_freq  # (B, T, D/2)
        cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]  # (B, T, 1, D/2)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)  # (B, T, 1, D)
        x = self.model.embed_tokens(input_ids)  # (B, T, H)
        kept = []
        for i, layer in enumerate(self.model.layers):
            arguments = x, cos, sin, attend, *(seen_by_layer[i] if seen_by_layer else ()), *seen
            if self.checkpointing and torch.is_grad_enabled():
                x, k, v = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                x, k, v = layer(*arguments)
            if keep:
                kept.append((k, v))
        return self.model.norm(x), kept

    def forward(self, input_ids, attention_mask=None):
        """input_ids (B, T), attention_mask (B, T) True (1) on real tokens, padded on either side
        -> logits (B, T, V). Positions count real tokens from 0. Logits at padding are finite and
        mean nothing."""
        B, T = input_ids.shape
        if attention_mask is None:
            positions, mask = torch.arange(T, device=input_ids.device).expand(B, T), None
        else:
            real = attention_mask.bool()  # (B, T)
            positions = (real.cumsum(1) - 1).clamp(min=0)  # (B, T)
            ones = torch.ones(T, T, dtype=torch.bool, device=input_ids.device)
            itself = ones.diag().diag()  # padding looks at itself: a row of nothing would be nan
            mask = ones.tril() & real[:, None, None] | itself  # (B, 1, T, T)
        hidden, _ = self.hidden_states(input_ids, positions, attention, seen=(mask,))
        return F.linear(hidden, self.head_weight)

    def prefill(self, prompt_ids):
        """Right-padded prompts (P, Tp) -> hidden states (P, Tp, H), and keys and values of each
        layer (P, Hkv, Tp, D). Causal attention keeps the padding behind from reaching real tokens,
        so no mask is needed."""
        positions = torch.arange(prompt_ids.shape[1], device=prompt_ids.device)
        return self.hidden_states(prompt_ids, positions.expand_as(prompt_ids), attention, keep=True)

    def decode(self, ids, positions, attend, seen_by_layer, seen):
        """One more token of each completion, (B,) -> hidden states (B, H) that predict the next."""
        hidden, _ = self.hidden_states(ids[:, None], positions[:, None], attend, seen_by_layer,
                                       seen)
        return hidden[:, 0]

    def completion_hidden(self, prompt_ids, prompt_lengths, completion_ids, prompt_of):
        """Hidden states that predict the tokens of N completions, (N, L, H): place t predicts
        completion token t, place 0 is the prompt's last. What stands at padding means nothing.

        prompt_ids (P, Tp) right-padded, prompt_lengths (P,), completion_ids (N, L) right-padded,
        prompt_of (N,) the prompt of each. Every prompt runs once; gradients flow through it, too.
        """
        (N, L), device = completion_ids.shape, prompt_ids.device
        hidden, prompt_kv = self.prefill(prompt_ids)  # (P, Tp, H)
        last = hidden[torch.arange(len(prompt_ids), device=device), prompt_lengths - 1]  # (P, H)
        first = last[prompt_of, None]  # (N, 1, H)
        if L <= 1:
            return first[:, :L]
        own = torch.arange(L - 1, device=device)  # the last token predicts nothing
        place = torch.arange(prompt_ids.shape[1], device=device)  # (Tp,)
        real = (place < prompt_lengths[prompt_of, None])[:, None, None]  # (N, 1, 1, Tp)
        before = (own <= own[:, None]).expand(N, 1, -1, -1)  # (N, 1, L-1, L-1)
        mask = torch.cat((real.expand(-1, -1, L - 1, -1), before), dim=-1)  # (N, 1, L-1, Tp+L-1)
        positions = prompt_lengths[prompt_of, None] + own  # (N, L-1)
        rest, _ = self.hidden_states(completion_ids[:, :-1], positions, attention_after_prompt,
                                     prompt_kv, (prompt_of, mask))  # (N, L-1, H)
        return torch.cat((first, rest), dim=1)

    def compile_layers(self, **options):
        """torch.compile, options go to it, one layer at a time: all layers and all lengths share a
        few graphs, names in checkpoints stay as they are, and checkpointing goes on to work."""
        # sizes that are equal by chance may differ next time; eps and lora_scale never change; a
        # size of 1 is compiled apart, in each of the passes: one prompt, completions of one token
        torch.fx.experimental._config.use_duck_shape = False
        torch._dynamo.config.specialize_float = True
        torch._dynamo.config.cache_size_limit = 32
        for layer in self.model.layers:
            layer.compile(dynamic=True, **options)
        self.compiled = True

    @classmethod
    def from_pretrained(cls, folder, adapter=None, dtype=torch.float32, device="cpu"):
        """The model in a folder: config.json and *.safetensors or pytorch_model*.bin, of any float
        type. adapter: the folder of a LoRA adapter in PEFT's format, put on top; the weights below
        it are then frozen. Every tensor is used, every parameter filled, every shape checked.
        FileNotFoundError or ValueError says what is wrong with which file or tensor."""
        config = read_config(folder)
        try:
            with torch.device("meta"):
                model = cls(config)
            model.to(dtype).to_empty(device=device)  # filled tensor by tensor: never there twice
        except (RuntimeError, AssertionError) as e:  # too large for it, or no such device
            raise ValueError(f"{folder}: cannot make the model of this config.json on device "
                             f"{device}: {str(e).splitlines()[0]}") from None
        with torch.no_grad():
            model.folder, model.stored_dtype = folder, load_weights(model, folder)
            if adapter is not None:
                load_adapter(model, adapter)
        return model

    def save_pretrained(self, folder, dtype=None):
        """Writes config.json, *.safetensors (an adapter merged into the weights) and the tokenizer
        files of the folder it came from. dtype: convert to it, e.g. torch.bfloat16."""
        save_folder(self, folder, dtype)
