"""
Will it fit? Memory and arithmetic of a run, from config.json and the settings alone: no weights,
no GPU.

    python train.py config/qwen2.5_3b_gsm8k.toml --plan

A formula, within 20% of what torch allocates (tests/test_plan.py compares). Every prompt has
max_prompt_tokens, every completion max_new_tokens. CUDA's context and the workspaces of its
kernels come on top: 1 or 2 GB. On a CPU the sampler's packed copy of the weights is counted, which
torch.compile does without.
"""
import os

import torch

from lib import products
from lib.files import read_json
from lib.hf import Config
from lib.lora import read_adapter_config
from logprobs import CHUNK_ELEMENTS
from sample import DRAW_ELEMENTS

# config.json of published models
SHAPES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "config", "shapes")


def model_config(name):
    """The Config of a model folder, or of a published model whose config.json lies in
    config/shapes/. ValueError, OSError: what is wrong."""
    known = sorted(f.removesuffix(".json") for f in os.listdir(SHAPES) if f.endswith(".json"))
    path = os.path.join(name, "config.json")
    if not os.path.isdir(name):
        if os.path.basename(name) not in known:
            raise ValueError(f"--plan: model={name!r} is no folder in Hugging Face format, and of "
                             f"published models only the shapes of {' and '.join(known)} are "
                             "known (config/shapes/)")
        path = os.path.join(SHAPES, os.path.basename(name) + ".json")
    return Config(read_json(path), path)


class Plan:
    """What a run of settings `c` (train.py's TrainConfig) with a model of Config `m` needs on each
    of `processes` GPUs, in bytes; .parts maps each row of the table to its bytes."""

    def __init__(self, c, m, processes=1):
        self.c, self.m, self.device = c, m, "cpu" if c.device == "cpu" else "cuda"
        rank = c.lora_rank
        if c.adapter:
            rank = read_adapter_config(c.adapter)["r"]
        H, F, layers = m.hidden_size, m.intermediate_size, m.num_hidden_layers
        q, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
        shapes = [(H, q), (H, kv), (H, kv), (q, H), (H, F), (H, F), (F, H)]     # of a layer
        vectors = 2 * H + m.qkv_bias * (q + 2 * kv) + m.o_bias * H + m.mlp_bias * (2 * F + H)
        vectors += 2 * m.head_dim * (m.model_type == "qwen3")
        self.matrices = layers * sum(rows * columns for rows, columns in shapes)
        self.base = self.matrices + layers * vectors + H
        self.base += m.vocab_size * H * (1 if m.tie_word_embeddings else 2)
        adapter = layers * rank * sum(rows + columns for rows, columns in shapes)
        self.full, self.trainable = not rank, adapter or self.base
        # bytes of a number: in a layer, of a base weight and between layers, in the head
        bf16 = c.dtype == "bfloat16" or (c.dtype == "auto" and c.device != "cpu")
        self.e = 2 if bf16 else 4
        self.r = 4 if self.full else self.e
        self.h = 4 if c.device == "cpu" else self.e
        # of matrices in bfloat16: autocast's, and the sampler's
        self.copies = 2 * (self.matrices if self.full else adapter) if bf16 else 0
        self.head_copy = self.h * m.vocab_size * H * (self.h != self.r)
        # what the sampler packs on a CPU beside these: bytes of layers, of the head
        sizes = [] if bf16 and self.full else [rows * columns for rows, columns in shapes]
        sizes += [] if bf16 else [rank * n for shape in shapes for n in shape]
        large = layers * sum(n for n in sizes if n >= products.PACK_FROM)
        kind = torch.bfloat16 if bf16 else torch.float32
        packs = self.device == "cpu" and kind in products.PACKED_TYPES
        self.packed = packs * (self.e * large + (self.h * m.vocab_size * H - self.head_copy))
        reference = self.base if c.beta and self.full else 0
        self.weights = self.r * (self.base + reference) + 4 * adapter
        self.moments = 8 * self.trainable

        self.prompts = max(1, c.prompts_per_step // processes)              # of one process
        activations, training = self.training()
        cache, sampling = self.sampling(self.prompts, c.group_size)
        batch = max(1, self.prompts * c.group_size // c.eval_samples)
        self.parts = {"weights": self.weights, "gradients": 4 * self.trainable,
                      "optimizer": self.moments, "training: activations": activations,
                      "training: peak": training, "sampling: keys and values": cache,
                      "sampling: peak": sampling,
                      "evaluation: peak": self.sampling(batch, c.eval_samples)[1]}

    def sampling(self, P, G):
        """Of G completions for each of P prompts: keys and values; the peak, with all else."""
        m, Tp, L = self.m, self.c.max_prompt_tokens, self.c.max_new_tokens
        kv = 8 * m.num_hidden_layers * m.num_key_value_heads * m.head_dim   # of a token, float32
        rows = min(P * G, max(1, DRAW_ELEMENTS[self.device] // m.vocab_size))
        prompts, own = P * Tp * kv, P * G * L * kv
        scores = P * G * m.num_attention_heads * (Tp + L) * 16
        logits = rows * m.vocab_size * 16 + self.head_copy
        prefill = P * Tp * (3 * m.intermediate_size + 4 * m.hidden_size) * self.e
        first = prompts * self.e // 4 + max(prefill, prompts)               # kept, then as float32
        grow = own // 2 * (L > 64)              # buffers stand beside those twice as large
        peak = max(first, prompts + own + max(grow, scores + logits))
        return prompts + own, self.weights + self.moments + self.copies + self.packed + peak

    def layer(self, tokens, keys, mask):
        """What autograd keeps of a layer, and what its backward pass needs beside it for a moment.
        keys: of all sequences together; mask: its elements."""
        m, e, H, F = self.m, self.e, self.m.hidden_size, self.m.intermediate_size
        width = m.num_attention_heads * m.head_dim
        repeated = self.device == "cuda" and (mask or e == 4)   # keys, for each query head
        key_width = width if repeated else m.num_key_value_heads * m.head_dim
        kept = tokens * (e * (4 * F + 2 * width + 2 * H) + 2 * H * (4 + e))
        return kept + e * (2 * key_width * keys + mask), tokens * e * (2 * F + 2 * H)

    def training(self):
        """Of a micro-batch at full length: what layers keep; the peak, with all else."""
        m, c, H, V = self.m, self.c, self.m.hidden_size, self.m.vocab_size
        Tp, G, L = c.max_prompt_tokens, c.group_size, c.max_new_tokens
        P = min(self.prompts, max(1, c.micro_tokens // (Tp + G * L)))
        N = min(P * G, max(1, (c.micro_tokens - P * Tp) // L))
        prompt, backward = self.layer(P * Tp, P * Tp, 0)
        own, more = self.layer(N * L, N * (Tp + L), N * L * (Tp + L))
        backward = max(backward, more)
        if c.checkpointing:                     # inputs of layers are kept, one layer runs again
            backward += max(prompt, own)
            kv = 2 * m.num_key_value_heads * m.head_dim * self.e
            prompt, own = P * Tp * (H * self.r + kv), N * L * H * self.r
        layers = m.num_hidden_layers
        chunk = min(CHUNK_ELEMENTS, N * L * V) * (8 + 2 * (self.h == 2))
        head = chunk + N * L * H * (self.e + 2 * self.h) + 4 * V * H * self.full + self.head_copy
        # when backward goes over from completions to prompts, gradients of the former wait
        waiting = 4 * self.trainable - self.copies + layers * prompt
        peak = max(self.copies + layers * (prompt + own) + max(head, backward), waiting + backward)
        return layers * (prompt + own), self.weights + self.moments + 4 * self.trainable + peak

    def flops(self):
        """Floating-point operations of a step over all processes: sampling, training."""
        m, c, layers = self.m, self.c, self.m.num_hidden_layers
        Tp, L, P, N = c.max_prompt_tokens, c.max_new_tokens, c.prompts_per_step, c.group_size
        tokens, own = P * (Tp + N * L), P * N * L
        head = 2 * m.vocab_size * m.hidden_size * own
        pairs = P * Tp * Tp / 2 + own * (Tp + L / 2)
        attention = 4 * layers * m.num_attention_heads * m.head_dim * pairs
        inside = 2 * self.matrices * tokens + attention
        # checkpointing runs the layers again, each but for its last product
        again = inside - 2 * layers * m.intermediate_size * m.hidden_size * tokens
        training = (inside + head) * (3 if self.full else 2) + again * c.checkpointing
        return inside + head, training


def report(c, config, processes=1):
    """The plan as text: settings c (TrainConfig), the model's Config, for `processes` GPUs and,
    beside it, for 8."""
    counts = sorted({processes} | ({8} if c.prompts_per_step % 8 == 0 else set()))
    plans = [Plan(c, config, n) for n in counts]
    p, (sampling, training) = plans[0], plans[0].flops()

    def line(name, sizes):
        return f"{name:38}" + "".join(f"{size / 1e9:10.3f}" for size in sizes)

    return "\n".join([
        f"{c.model or 'a new ' + config.model_type}: {p.base:,} weights, {p.trainable:,} trained, "
        f"{'bfloat16' if p.e == 2 else 'float32'}" + ", checkpointing" * c.checkpointing,
        f"a step: {c.prompts_per_step} prompts of {c.max_prompt_tokens:,} tokens, "
        f"{c.prompts_per_step * c.group_size} completions of {c.max_new_tokens:,}; "
        f"{sampling / 1e12:,.2f} TFLOP to sample, {training / 1e12:,.2f} to train", "",
        f"{'GB on each GPU; not all at once':38}" + "".join(f"{n:>3} GPU(s)" for n in counts),
        *(line("  " + row, [plan.parts[row] for plan in plans]) for row in p.parts),
        line("the largest peak, give or take 20%",
             [max(size for row, size in plan.parts.items() if "peak" in row) for plan in plans])])
