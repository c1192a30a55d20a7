"""
Speed, in one table: the sampler, the loss, a whole step, each against the straightforward way to
do the same work (written here, on the same layers), the sampler also against transformers'
generate where that is installed.

    python -m tools.bench                       some minutes on two cores
    python -m tools.bench --only sampler loss   some sections
    python -m tools.bench --device=cuda         what we would like to see of your GPU: send it all
    python -m tools.bench --count               what the sampler asks of a GPU for one token

A figure is the best of three rounds in which the versions take turns; (1.9x): so many times as
long as ours. The models have random weights and no end token, so every completion has its full
length. S has the sizes of the default run's policy, M 32 million parameters, L those of SmolLM2
135M, Q those of Qwen2.5 0.5B, with key biases as large as its. MiB: peak reserved on the GPU by
ours. mismatch: mean |log-prob of the trainer - of the sampler|, nats a token: about 1e-6 in
float32, below 0.03 in bfloat16. On a GPU the sampler's steps are a CUDA graph; `eager` is the same
sampler without one, and should take 1.5 to 3 times as long (an estimate).
"""
import argparse
import collections
import importlib.util
import math
import platform
import sys
import time
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gtpo import conflict_weights, group_advantages, mean_entropy, policy_loss, token_weights
from lib.draws import draw
from lib.graph import CAPTURES
from lib.hf import Config
from lib.lora import add_lora
from lib.run import command, forward_dtype
from logprobs import head_loss, head_loss_slow
from model import GPT, attention
from sample import Samples, sample
from train import (Policy, TrainConfig, backward, cross_entropy, make_batch, make_optimizer,
                   update)

# layers, width, MLP's width, heads, key heads, vocabulary
SHAPES = {"S": (3, 128, 384, 4, 4, 300), "M": (8, 512, 1408, 8, 4, 8192),
          "L": (30, 576, 1536, 9, 3, 49152), "Q": (24, 896, 4864, 14, 2, 151936)}
# prompts, completions of each, tokens of a prompt, tokens of a completion
ROLLOUTS = {"S": [(16, 8, 32, 64), (4, 32, 32, 64), (4, 8, 32, 256)],
            "M": [(8, 8, 64, 64), (4, 8, 512, 64)], "L": [(4, 8, 128, 64)],
            "Q": [(16, 8, 256, 256)]}


def new_model(model_type, shape, tied):
    """A model of random weights; shape: as in SHAPES."""
    layers, width, ff, heads, kv_heads, V = shape
    return GPT(Config(dict(
        model_type=model_type, vocab_size=V, hidden_size=width, intermediate_size=ff,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=2048, hidden_act="silu", tie_word_embeddings=tied)))


def make_model(size, o, compile=False):
    """The model of a size on the device of the options o."""
    with torch.device(o.device):
        model = new_model("qwen2" if size == "Q" else "llama", SHAPES[size], size in "LQ")
        for layer in model.model.layers if size == "Q" else ():
            torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=12)
            torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=60)
    if compile:
        model.compile_layers()
    return model


def make_run(model, o):
    """What train.backward() and train.update() need of a run."""
    return SimpleNamespace(c=TrainConfig(), processes=SimpleNamespace(size=1), model=model,
                           policy=Policy(model), optimizer=make_optimizer(model),
                           autocast=o.autocast, bad_in_a_row=0, skipped_updates=0)


# ---- the straightforward versions: every completion runs its own copy of the prompt --------------

def attend_to_past(q, k, v, past):
    """Attention to all keys so far, which grow by concatenation in the list `past`."""
    if past:
        k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
    past[:] = k, v
    if q.shape[2] == k.shape[2]:
        return attention(q, k, v)
    everything = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=k.device)
    return attention(q, k, v, everything)


@torch.no_grad()
def plain_sample(model, prompts, noise):
    """What sample() makes of prompts of one length: noise (P, G, L)."""
    P, G, L = noise.shape
    new = torch.tensor(prompts, device=noise.device).repeat_interleave(G, 0)    # (P*G, Tp)
    past, columns, seen = [([],) for _ in model.model.layers], [], 0
    for t in range(L):
        positions = torch.arange(seen, seen + new.shape[1], device=noise.device)
        hidden, _ = model.hidden_states(new, positions.expand_as(new), attend_to_past, past)
        logp = F.linear(hidden[:, -1], model.head_weight).float().log_softmax(-1)   # (P*G, V)
        ids = draw(logp.exp(), noise.flatten(0, 1)[:, t])                       # (P*G,)
        columns.append((ids, logp.gather(-1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
        seen, new = seen + new.shape[1], ids[:, None]
    ids, logps, entropy = (torch.stack(c, 1).view(P, G, L) for c in zip(*columns))
    return Samples(ids, torch.ones_like(ids, dtype=torch.bool), logps, entropy, None)


def plain_loss(model, prompts, ids, weights):
    """The loss of a rollout, ids and weights (P, G, L), in one batch with all its logits."""
    prompt_ids = torch.tensor(prompts, device=ids.device).repeat_interleave(ids.shape[1], 0)
    input_ids = torch.cat((prompt_ids, ids.flatten(0, 1)), dim=1)               # (P*G, Tp+L)
    positions = torch.arange(input_ids.shape[1], device=ids.device).expand_as(input_ids)
    hidden, _ = model.hidden_states(input_ids, positions, attention)
    hidden = hidden[:, prompt_ids.shape[1] - 1 : -1].flatten(0, 1)              # (P*G*L, H)
    return head_loss_slow(hidden, model.head_weight, ids.flatten(), cross_entropy,
                          [weights.flatten()])[0]


def generate_with_transformers(model):
    """transformers' generate with the same weights, as a function of prompts, G and L."""
    from transformers import AutoConfig, AutoModelForCausalLM
    raw = {k: v for k, v in model.config.raw.items() if k != "model_type"}
    peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.config.model_type, **raw))
    peer.load_state_dict(model.state_dict(), strict=False)      # a tied head has no tensor
    peer.to(model.head_weight.device).eval()

    @torch.no_grad()
    def generate(prompts, G, L):
        ids = torch.tensor(prompts, device=model.head_weight.device).repeat_interleave(G, 0)
        return peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=L,
                             do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None)
    return generate


# ---- the sections: each yields (name, {version: function}, tokens) -------------------------------

def rollouts(size, o):
    """(name, prompts, noise (P, G, L)) of each rollout of a size."""
    for P, G, Tp, L in ROLLOUTS[size]:
        prompts = torch.randint(SHAPES[size][-1], (P, Tp)).tolist()
        yield f"{size} {P} x {G}, {Tp} + {L}", prompts, torch.rand(P, G, L, device=o.device)


def gradient(run, prompts, samples, weights):
    """The gradient of one rollout as train.py makes it; returns (loss, mismatch)."""
    P, G, _ = weights.shape
    batch = make_batch(prompts, samples.ids.flatten(0, 1), samples.mask.flatten(0, 1))
    per_token = [weights.flatten(0, 1), samples.logps.flatten(0, 1)]            # (P*G, L)
    loss, logps = backward(run, batch, list(range(P * G)), policy_loss, per_token)
    return loss, (logps - per_token[1]).abs().mean().item()


def train_step(run, prompts, rewards, noise, ours=True):
    """A whole step: sample, weights, forward and backward, update. rewards (P, G), noise
    (P, G, L). Returns the mismatch of ours, else None."""
    P, G, L = noise.shape
    with run.autocast():
        samples = (sample(run.model, prompts, G, L, noise=noise) if ours
                   else plain_sample(run.model, prompts, noise))
    advantages, entropy = group_advantages(rewards), mean_entropy(samples.entropy, samples.mask)
    lam = conflict_weights(samples.ids, samples.mask, advantages)
    weights = token_weights(advantages - 0.1 * entropy, samples.mask, lam) / P  # (P, G, L)
    if ours:
        loss, mismatch = gradient(run, prompts, samples, weights)
    else:
        with run.autocast():
            part = plain_loss(run.model, prompts, samples.ids, weights)
        part.backward()
        loss, mismatch = part.item(), None
    update(run, 1e-6, 0.1, loss)
    return mismatch


def sampler(o):
    for size in o.sizes:
        ours, plain = make_model(size, o, o.compile), make_model(size, o)
        peer = generate_with_transformers(plain) if o.transformers else None
        for name, prompts, noise in rollouts(size, o):
            G, L = noise.shape[1:]
            work = {"ours": lambda: sample(ours, prompts, G, L, noise=noise),
                    "plain": lambda: plain_sample(plain, prompts, noise)}
            if peer:
                work["transformers"] = lambda: peer(prompts, G, L)
            yield f"sampler {name}", work, noise.numel()
            if CAPTURES[o.device]:
                without = patch.dict(CAPTURES, {o.device: False})
                yield f"eager {name}", {"ours": without(work["ours"])}, noise.numel()


def loss(o):
    """The straightforward version takes one completion at a time, as the authors' code does: the
    logits of all at once would need G times the memory."""
    G, L, H = 8, 256, 512
    for V, trained in ((32000, False), (32000, True), (151936, False), (151936, True)):
        hidden = torch.randn(G * L, H, device=o.device, requires_grad=True)
        head = (torch.randn(V, H, device=o.device) * H**-0.5).requires_grad_(trained)
        ids = torch.randint(V, (G * L,), device=o.device)
        weights = torch.randn(G * L, device=o.device)

        def gradients(compute, size):
            for rows in torch.arange(G * L).split(size):
                loss, _ = compute(hidden[rows], head, ids[rows], cross_entropy, [weights[rows]])
                loss.backward()
            hidden.grad = head.grad = None

        yield (f"loss V {V}, head {'trained' if trained else 'frozen'}",
               {"ours": lambda: gradients(head_loss, G * L),
                "plain": lambda: gradients(head_loss_slow, L)}, G * L)


def step(o):
    for size in o.sizes:
        ours = make_run(make_model(size, o, o.compile), o)
        plain = make_run(make_model(size, o), o)
        for name, prompts, noise in rollouts(size, o):
            rewards = torch.randn(noise.shape[:2], device=o.device)
            yield (f"step {name}",
                   {"ours": lambda: train_step(ours, prompts, rewards, noise),
                    "plain": lambda: train_step(plain, prompts, rewards, noise, ours=False)},
                   noise.numel())


# ---- counting ------------------------------------------------------------------------------------

NO_WORK = "empty", "detach", "_unsafe_view"  # beside views


class Count(TorchDispatchMode):
    """Counts, inside it, `launches`, operations that do some work (of a GPU each is a kernel or
    more), among them `casts` of parameters, and `waits`, where the CPU asks for a value."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func.__name__.split(".")[0]
        self.counts["launches"] += not func.is_view and name not in NO_WORK
        self.counts["casts"] += name == "_to_copy" and isinstance(args[0], torch.nn.Parameter)
        self.counts["waits"] += name in ("_local_scalar_dense", "nonzero")
        return out


def count_of_a_token(layers, rank, fixed=False):
    """Counts of one token between two looks at who has ended, of a small model with the layers of
    Qwen2.5: a LoRA adapter on bfloat16 weights, or with rank 0 float32 weights under autocast.
    fixed: shapes, as in what a GPU captures."""
    model = new_model("qwen2", (layers, 64, 96, 4, 2, 300), tied=True)
    if rank:
        add_lora(model.to(torch.bfloat16), rank)
    model.compiled = fixed
    counts = []
    for L in (2, 3):  # one look each, at the end
        with torch.autocast("cpu", torch.bfloat16), Count() as count:
            sample(model, [[1, 2, 3], [4]], 2, L)
        counts.append(count.counts)
    return {name: counts[1][name] - counts[0][name] for name in counts[0]}


def print_counts(layers=36):
    """Those of a model of so many layers, as what one layer adds says."""
    for name, rank in (("LoRA on bfloat16", 4), ("float32, autocast", 0)):
        for fixed in (False, True):
            one, two = (count_of_a_token(n, rank, fixed) for n in (1, 2))
            total = {what: one[what] + (layers - 1) * (two[what] - one[what]) for what in one}
            print(f"{name}, {layers} layers, a token, {'in one graph' if fixed else 'eager'}:",
                  ", ".join(f"{n:,} {what}" for what, n in total.items()))


# ---- measuring -----------------------------------------------------------------------------------

def measure(work, o):
    """Best seconds of each version in three rounds, in which they take turns; MiB reserved on the
    GPU by ours; what ours returned."""
    best, memory, results = dict.fromkeys(work, math.inf), None, {}
    for name, run in [*work.items()] * 3:
        if o.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with o.autocast():
            results[name] = run()
        if o.device == "cuda":
            torch.cuda.synchronize()
        best[name] = min(best[name], time.perf_counter() - start)
        if o.device == "cuda" and name == "ours":
            memory = torch.cuda.max_memory_reserved() / 2**20
    return best, memory, results["ours"]


def line(name, tokens, best, memory, mismatch):
    """One row of the table."""
    ours = best["ours"]
    plain, peer = (f"{best[other]:.3f} ({best[other] / ours:.1f}x)" if other in best else ""
                   for other in ("plain", "transformers"))
    return (f"{name:32}{ours:8.3f}{plain:>17}{peer:>17}{tokens / ours:12,.0f}"
            f"{'' if memory is None else f'{memory:,.0f}':>8}"
            f"{f'{mismatch:.1e}' if isinstance(mismatch, float) else '':>10}")


SECTIONS = {section.__name__: section for section in (sampler, loss, step)}


def options(argv):
    """The command line, and what follows from it: autocast, transformers."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, help="default: S M, on a GPU all")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
                        help="bfloat16: by autocast, as in training; auto: on GPUs that have it")
    parser.add_argument("--compile", action="store_true", help="ours with torch.compile")
    parser.add_argument("--count", action="store_true", help="only count what a token takes")
    o = parser.parse_args(argv)
    if o.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch finds no CUDA device here")
    o.sizes = o.sizes or ("S", "M") + ("L", "Q") * (o.device == "cuda")
    o.dtype = forward_dtype(o.dtype, torch.device(o.device))
    o.autocast = lambda: torch.autocast(o.device, torch.bfloat16, enabled=o.dtype == torch.bfloat16)
    o.transformers = importlib.util.find_spec("transformers") is not None
    return o


def main(argv):
    o = options(argv)
    if o.count:
        return print_counts()
    device = platform.processor() or platform.machine()
    if o.device == "cuda":
        device = torch.cuda.get_device_name()
    print(f"{device}, {torch.get_num_threads()} threads, Python "
          f"{platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
          f"{str(o.dtype).removeprefix('torch.')}, {'compiled' if o.compile else 'eager'}\n"
          f"{'prompts x group, tokens of each':32}{'ours, s':>8}{'straightforward':>17}"
          f"{'transformers':>17}{'tokens/s':>12}{'MiB':>8}{'mismatch':>10}")
    for section in o.only:
        torch.manual_seed(0)
        for name, work, tokens in SECTIONS[section](o):
            print(line(name, tokens, *measure(work, o)), flush=True)


if __name__ == "__main__":
    sys.exit(command(main))
