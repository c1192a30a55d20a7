"""
Will it fit? Memory and arithmetic of a run, from config.json and the settings alone: no weights, no GPU.

    python train.py config/qwen2.5_3b_gsm8k.toml --plan

Everything is counted at full length: every prompt has max_prompt_tokens, every completion max_new_tokens, and a micro-batch has the worst shape
that micro_tokens allows. The counts follow model.py, gtpo.py and sample.py tensor by tensor (tests/test_plan.py compares them with what torch
allocates). CUDA's context, the workspaces of its kernels and fragmentation come on top: a tenth of the GPU is left to them.
"""
import copy
import math
import os

import torch

from gtpo import CHUNK_ELEMENTS
from lib.hf import Config, read_json
from lib.lora import add_lora, linears
from model import GPT
from sample import DRAW_ELEMENTS

SHAPES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "config", "shapes")          # config.json of published models
GPU_BYTES, MARGIN = 80e9, 0.1


def model_config(name):
    """The Config of a model folder, or of a published model whose config.json lies in config/shapes/. ValueError, OSError: what is wrong."""
    if os.path.isdir(name):
        return Config.from_dict(read_json(name, "config.json"), os.path.join(name, "config.json"))
    known, base = sorted(f.removesuffix(".json") for f in os.listdir(SHAPES) if f.endswith(".json")), os.path.basename(name)
    if base not in known:
        raise ValueError(f"--plan: model={name!r} is no folder in Hugging Face format, and of published models only the shapes of "
                         f"{' and '.join(known)} are known (config/shapes/)")
    return Config.from_dict(read_json(SHAPES, base + ".json"), os.path.join(SHAPES, base + ".json"))


class Plan:
    """What a run of settings `c` (train.py's TrainConfig) with a model of Config `m` needs on each of `processes` GPUs, in bytes.

    In a bfloat16 forward pass the inputs and outputs of linear layers have 2 bytes (`e`); the residual stream has those of the embedding
    (`r`): 2 with LoRA, whose frozen base is bfloat16, else 4.
    """

    def __init__(self, c, m, processes=1):
        self.c, self.m = c, m
        bf16 = c.dtype == "bfloat16" or (c.dtype == "auto" and c.device != "cpu")
        with torch.device("meta"):
            model = GPT(m)
        rank, targets = c.lora_rank, [t.strip() for t in c.lora_targets.split(",")]
        if c.adapter:                                                               # its rank and places; training goes on with it
            adapter = read_json(c.adapter, "adapter_config.json")
            rank, targets = adapter.get("r"), adapter.get("target_modules")
            if type(rank) is not int or rank < 1 or not isinstance(targets, list):
                raise ValueError(f"{c.adapter}/adapter_config.json: --plan needs r, a positive int, and target_modules, a list of names; "
                                 f"found {rank!r} and {targets!r}")
        self.base, self.linear = sum(p.numel() for p in model.parameters()), sum(x.weight.numel() for x in linears(model).values())
        if rank:
            add_lora(model, rank, rank, targets)
        self.full, self.rank, self.targets = not rank, rank, set(targets) if rank else set()
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.e, self.r = 2 if bf16 else 4, 2 if bf16 and rank else 4
        self.casts = bf16 and self.full                                             # autocast copies every float32 weight it uses
        self.one_pass = self.full and not bf16 and c.updates_per_rollout == 1 and not (c.algo == "grpo" and c.beta)    # see token_logps
        self.processes, self.prompts = processes, max(1, c.prompts_per_step // processes)

    def state(self):
        """What is there all the time (gradients: from the first micro-batch to the update)."""
        reference = 4 * self.base if self.c.algo == "grpo" and self.c.beta and self.full else 0
        return {"weights": self.base * self.r + reference + (0 if self.full else 4 * self.trainable), "gradients": 4 * self.trainable,
                "optimizer": 8 * self.trainable // (self.processes if self.c.zero else 1)}

    def layer(self, tokens, keys, mask):
        """What autograd keeps of one layer, its MLP and the rest, and what its backward pass needs beside it for a moment. `keys`: of all
        sequences together; `mask`: elements of the attention mask, which becomes a float bias."""
        m, e, full = self.m, self.e, self.full
        H, F, attention = m.hidden_size, m.intermediate_size, m.num_attention_heads * m.head_dim

        def input_of(*names):                                                       # kept for the gradient of A or of the weight
            return H * e * (len(names) if self.casts else 1) if full or self.targets & set(names) else 0

        norm = 4 * H + (self.r * H if full else 0)                                  # float32 input; normalised one for the norm's weight
        mlp = norm + input_of("gate_proj", "up_proj") + F * e * (3 + (full or "down_proj" in self.targets))    # gate, silu, up, product
        rest = norm + input_of("q_proj", "k_proj", "v_proj") + 2 * attention * e + 4 * m.num_attention_heads   # q, output, logsumexp
        rest += self.rank * e * len(self.targets)                                   # A x
        repeated = 2 * keys * attention * e                                         # keys and values, one for each query head
        mlp, rest = tokens * mlp, tokens * rest + repeated + mask * e
        return {"mlp": mlp, "rest": rest, "backward": max(tokens * (2 * F + 2 * H) * e, repeated - mlp)}

    def micro_batch(self, P, Tp, N, L):
        """Memory of a micro-batch of P prompts of Tp tokens and N completions of L, beside state(). `activations` and `copies` are kept
        when the forward pass ends; then token_logps adds `logits` and `direction`, the backward pass `backward`. `turn`: all of it when
        backward goes over from completions to prompts; gradients of all weights and of the prompts' K/V wait for their second part."""
        m, e, H, V, layers = self.m, self.e, self.m.hidden_size, self.m.vocab_size, self.m.num_hidden_layers
        a, b, S = P * Tp, N * (L - 1), Tp + L - 1                                   # prompt and completion tokens; keys of a completion
        prompt, own = self.layer(a, a, 0), self.layer(b, N * S, b * S)
        kept_prompt, kept_own = prompt["mlp"] + prompt["rest"], own["mlp"] + own["rest"]
        turn = max(kept_own + own["backward"], kept_prompt * self.c.checkpointing + prompt["backward"])
        kv = 2 * m.num_key_value_heads * m.head_dim * e * a * layers
        outside = (a + b) * (8 * m.head_dim + 4 * H + (self.r * H if self.full else 0)) + b * S        # cos and sin, final norm, mask
        again, copies = 0, 2 * self.linear if self.casts else 2 * self.trainable * (e < 4)             # bfloat16 weights or adapters
        if self.c.checkpointing:                                                    # the layers' inputs, and what completions attend to
            again, kept_prompt, kept_own, outside = kept_own, a * H * self.r, b * H * self.r, outside + kv
            copies *= self.casts                                                    # autocast's live as long as its context
        head = 4 * V * H if self.full else 0                                        # gradient of the head
        block = 4 * min(CHUNK_ELEMENTS, N * L * V)                                  # of float32 logits
        rows = min(V, CHUNK_ELEMENTS // max(H, N * L, 1))                           # of the head, whose gradient is made by blocks
        waiting = 4 * self.trainable - 2 * self.linear * self.casts                 # autocast's copies have bfloat16 gradients
        turn = max(turn - self.full * (2 if self.casts else 4) * self.linear // layers, head * m.tie_word_embeddings)  # layer 0, then embedding
        x = {"activations": layers * (kept_prompt + kept_own) + outside, "copies": copies,
             "direction": N * L * H * (e + 2 * self.r),                             # and the hidden states it belongs to
             "logits": block * 2 + (block // 2 if e < 4 else 0) + (2 * V * H if self.casts else 0),
             "backward": head + max(own["backward"] + again, rows * (N * L * (4 + (e < 4) * 2) + H * e) * (self.full and not self.one_pass)),
             "turn": layers * kept_prompt + outside + turn + kv + waiting}
        held = 0 if again else copies                                               # made again with the layer, or there for backward
        logits = x["logits"] + head * self.one_pass                                 # the head's gradient is there when the forward pass ends
        x["peak"] = max(x["activations"] + max(copies + x["direction"] + logits, held + x["backward"]), held + x["turn"])
        return x

    def shapes(self):
        """The largest micro-batches that micro_tokens allows, (P, Tp, N, L): for each number of prompts as many completions as have room at
        full length, and whole groups, shorter if need be. Between the two, memory is convex in N: keys grow with it, the mask shrinks."""
        c, Tp = self.c, self.c.max_prompt_tokens
        yield 1, Tp, 1, c.max_new_tokens                                            # stands alone if it is longer
        for P in range(1, min(self.prompts, c.micro_tokens // Tp) + 1):
            room = c.micro_tokens - P * Tp
            for N in {min(P * c.group_size, max(P, room // c.max_new_tokens)), min(P * c.group_size, room)}:
                if P <= N <= room:
                    yield P, Tp, N, min(c.max_new_tokens, room // N)

    def training(self):
        """Memory of the loss and the update: each part where it is largest, and `peak`, state included."""
        every = [self.micro_batch(*shape) for shape in self.shapes()]
        worst = {name: max(x[name] for x in every) for name in every[0]}
        update = 4 * self.trainable // (self.processes if self.c.zero else 1)       # AdamW's denominators, of all weights at once on a GPU
        return {**worst, "peak": sum(self.state().values()) + max(worst["peak"], update)}

    def sampling(self):
        """Memory of the sampler: its parts and `peak`, weights and optimizer included."""
        m, c, e, P, Tp = self.m, self.c, self.e, self.prompts, self.c.max_prompt_tokens
        B, L, kv = P * c.group_size, c.max_new_tokens, 2 * m.num_key_value_heads * m.head_dim * e * m.num_hidden_layers
        room = before = min(64, L)
        while room < L:
            before, room = room, min(2 * room, L)
        grows = before if room > before else 0                                      # the old buffers stand beside the new ones
        attention = m.num_attention_heads * m.head_dim
        prefill = P * Tp * (3 * m.intermediate_size * e + 2 * attention * e + 2 * m.hidden_size * self.r)
        state, x = self.state(), {"kv_prompts": P * Tp * kv, "kv_completions": B * (room + grows) * kv,
                                  "scores": B * m.num_attention_heads * (Tp + L) * (8 + 2 * e), "logits": 28 * min(B * m.vocab_size, max(DRAW_ELEMENTS, m.vocab_size))}
        copies = 2 * (self.linear + m.vocab_size * m.hidden_size) if self.casts else 0
        x["peak"] = state["weights"] + state["optimizer"] + copies + max(sum(x.values()), P * Tp * kv + max(prefill, P * Tp * kv + B * min(64, L) * kv))
        return x

    def flops(self):
        """Floating-point operations of a step, over all processes. Attention counts all pairs of a sequence, except those of decoding."""
        m, c, V, H = self.m, self.c, self.m.vocab_size, self.m.hidden_size
        Tp, G, L, prompts = c.max_prompt_tokens, c.group_size, c.max_new_tokens, c.prompts_per_step
        adapters, N = 0 if self.full else self.trainable, prompts * G
        pair = 4 * m.num_hidden_layers * m.num_attention_heads * m.head_dim         # q k and p v
        linear, head = 2 * (self.linear + adapters), 2 * V * H * N * L
        sampling = prompts * Tp * (linear + pair * Tp) + N * (L - 1) * (linear + pair * (Tp + L / 2)) + head
        runs = prompts * math.ceil(G / max(1, min(G, (c.micro_tokens - Tp) // L)))                     # of a prompt, once in each micro-batch
        tokens, attention = runs * Tp + N * (L - 1), pair * (runs * Tp * Tp + N * (L - 1) * (Tp + L - 1))
        forward = linear * tokens + attention
        weights = 2 * (self.linear if self.full else adapters) * tokens             # their gradients; frozen ones have none
        training = forward * (2 + c.checkpointing) + attention + weights + head * (4 - self.one_pass if self.full else 2)
        return {"sampling": sampling, "training": training}

    def peak(self):
        return max(self.training()["peak"], self.sampling()["peak"])


def changed(c, **settings):
    c = copy.copy(c)
    for name, value in settings.items():
        setattr(c, name, value)
    return c


def advice(c, m, processes):
    """Which setting to lower, tried one by one."""
    tries = [dict(checkpointing=True), dict(micro_tokens=max(c.max_prompt_tokens + c.max_new_tokens, c.micro_tokens // 2)),
             dict(prompts_per_step=max(processes, c.prompts_per_step // 2 // processes * processes)), dict(group_size=max(2, c.group_size // 2)),
             dict(max_new_tokens=max(1, c.max_new_tokens // 2)), dict(zero=processes > 1), dict(lora_rank=c.lora_rank or 128 * (not c.adapter))]
    peaks = {" --".join(f"--{k}={str(v).lower()}" for k, v in t.items()): Plan(changed(c, **t), m, processes).peak()
             for t in tries if any(getattr(c, k) != v for k, v in t.items())}
    enough = [flag for flag, peak in peaks.items() if peak <= (1 - MARGIN) * GPU_BYTES]
    most = sorted(peaks, key=peaks.get)[:3]
    return "each of these alone is enough: " + ", ".join(enough) if enough else "no setting alone is enough; what saves most: " + ", ".join(most)


def report(c, config, processes=1):
    """The plan as text: settings c (TrainConfig), the model's Config, for `processes` GPUs and, beside it, for 8.
    ValueError: the model has no room for prompt and completion, or another setting cannot be."""
    if c.max_prompt_tokens + c.max_new_tokens > config.max_position_embeddings:
        raise ValueError(f"max_prompt_tokens {c.max_prompt_tokens} + max_new_tokens {c.max_new_tokens} is more than the model's "
                         f"{config.max_position_embeddings} positions (max_position_embeddings)")
    counts = sorted({processes} | ({8} if c.prompts_per_step % 8 == 0 else set()))
    plans, on = [Plan(c, config, n) for n in counts], c.checkpointing
    state, training, sampling = ([getattr(p, name)() for p in plans] for name in ("state", "training", "sampling"))
    other = [Plan(changed(c, checkpointing=not on), config, n).training() for n in counts]
    totals = [max(s["peak"], t["peak"]) for s, t in zip(sampling, training)]
    rows = [("weights", state, "weights"), ("gradients", state, "gradients"), ("optimizer", state, "optimizer"),
            ("sampling: K/V of the prompts", sampling, "kv_prompts"), ("sampling: K/V of the completions", sampling, "kv_completions"),
            ("sampling: attention scores", sampling, "scores"), ("sampling: logits", sampling, "logits"),
            ("a micro-batch: activations, checkpointing", training if on else other, "activations"),
            ("a micro-batch: activations, no checkpointing", other if on else training, "activations"),
            ("a micro-batch: bfloat16 copies of weights", training, "copies"), ("a micro-batch: chunk of logits", training, "logits"),
            ("a micro-batch: direction buffer, hidden states", training, "direction"),
            ("a micro-batch: backward pass of a layer", training, "backward"),
            ("peak of sampling (without gradients)", sampling, "peak"), ("peak of training", training, "peak")]
    p, f, N, plural = plans[0], plans[0].flops(), c.prompts_per_step * c.group_size, lambda n: f"{n} GPU{'s' * (n > 1)}"
    unit, gb = (1e9, "GB") if max(totals) > 1e9 else (1e6, "MB")
    many = f"{p.base / 1e9:.2f} billion" if p.base > 1e9 else f"{p.base / 1e6:.2f} million"
    lines = [f"{c.model or 'a new ' + config.model_type}: {c.algo.upper()}, {f'LoRA rank {p.rank}' if p.rank else 'full fine-tuning'}, "
             f"{'bfloat16' if p.e == 2 else 'float32'}, checkpointing {'on' if on else 'off'}",
             f"parameters  {many} ({p.base:,}), trainable {p.trainable:,}" + " in the adapter" * bool(p.rank),
             f"a step      {c.prompts_per_step} prompts of {c.max_prompt_tokens:,} tokens, {N} completions of {c.max_new_tokens:,}: "
             f"{c.prompts_per_step * c.max_prompt_tokens + N * c.max_new_tokens:,} tokens at full length",
             f"arithmetic  {sum(f.values()) / 1e12:,.2f} TFLOP a step: sampling {f['sampling'] / 1e12:,.2f}, training {f['training'] / 1e12:,.2f}",
             "", f"{gb + ' on each GPU; not all parts are there at once':50}" + "".join(f"{plural(n):>9}" for n in counts)]
    lines += [f"  {name:48}" + "".join(f"{x[key] / unit:9.2f}" for x in values) for name, values, key in rows]
    lines.append(f"  {'total: the larger peak':48}" + "".join(f"{total / unit:9.2f}" for total in totals))
    for n, total in zip(counts, totals):
        fits = total <= (1 - MARGIN) * GPU_BYTES
        lines.append(f"{plural(n)} of {GPU_BYTES / 1e9:.0f} GB: " + (f"fits, {(GPU_BYTES - total) / 1e9:.1f} GB are left" if fits else
                     f"does not fit ({MARGIN:.0%} must stay free); {advice(c, config, n)}"))
    return "\n".join(lines)
