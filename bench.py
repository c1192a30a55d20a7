"""
Speed and memory, in one table: the sampler, the loss, a whole step and the conflict weights, each against the straightforward way to do
the same work (written here, on the same layers) and, when it is installed, against transformers' generate; then how cost grows.

    python bench.py                             2 or 3 minutes on two cores
    python bench.py --full                      all sizes
    python bench.py --only=sampler,loss         some sections of: sampler, loss, step, conflict, scaling
    python bench.py --device=cuda --dtype=bfloat16 --compile

Each figure is the best of a few rounds in which the versions take turns. The models have random weights and no end token, so every
completion has its full length. S has the sizes of the default run's policy, M 32 million parameters, Q those of Qwen2.5-0.5B (on a GPU only).
"""
import argparse
import importlib.util
import os
import platform
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from unittest import mock

import torch
import torch.nn.functional as F

import model as model_file
from gtpo import conflict_weights, group_advantages, gtpo_weights, mean_entropy, surrogate_loss, token_logps
from model import GPT, Config, GroupCache, attention
from sample import Samples, draw, sample
from train import TrainConfig, completion_logps, micro_batches, peak_memory

SHAPES = dict(S=(3, 128, 384, 4, 4, 300), M=(8, 512, 1408, 8, 4, 8192), Q=(24, 896, 4864, 14, 2, 151936))   # layers, width, ff, heads, kv heads, V
CARDS = {  # what datasheets say: dense TFLOP/s in bfloat16 and in float32 (no tf32), GB/s of memory
    "H200": (989, 67, 4800), "H100 80GB HBM3": (989, 67, 3350), "H100 PCIe": (756, 51, 2000), "A100-SXM4-80GB": (312, 19.5, 2039),
    "A100-SXM4-40GB": (312, 19.5, 1555), "L40S": (362, 91.6, 864), "L4": (121, 30.3, 300), "GeForce RTX 4090": (165, 82.6, 1008),
    "GeForce RTX 3090": (71, 35.6, 936)}


# ---- the straightforward versions -------------------------------------------------------------------------------------------------------------

def copy_prompts(prompts, G):
    """Every prompt G times, left-padded: ids and True on real tokens, (P*G, Tp)."""
    rows = [prompt for prompt in prompts for _ in range(G)]
    Tp = max(map(len, rows))
    ids = torch.tensor([[0] * (Tp - len(row)) + row for row in rows])
    return ids, torch.tensor([[False] * (Tp - len(row)) + [True] * len(row) for row in rows])


def positions_and_mask(real, new):
    """For the last `new` of the tokens so far, real (B, T): positions (B, new) and what each may see (B, 1, new, T)."""
    keys = torch.arange(real.shape[1], device=real.device)                          # (T,)
    queries = keys[-new:, None]                                                     # (new, 1)
    visible = (keys <= queries) & real[:, None, None] | (keys == queries)           # a padding query sees itself: no nan
    return (real.cumsum(1) - 1).clamp(min=0)[:, -new:], visible


@torch.no_grad()
def straightforward_sample(model, prompts, G, L, noise):
    """sample() without its savings: every completion runs its own copy of the prompt, and keys and values grow by concatenation."""
    P, device, cache = len(prompts), model.head_weight.device, {}
    new, real = (x.to(device) for x in copy_prompts(prompts, G))                    # (P*G, Tp)

    def attend(layer, q, k, v):
        if layer in cache:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache[layer], (k, v)))
        cache[layer] = k, v
        return attention(q, k, v, mask)

    columns = []
    for t in range(L):
        positions, mask = positions_and_mask(real, new.shape[1])
        hidden = model.hidden_states(new, positions, attend)[:, -1]                 # (P*G, H)
        logps = F.linear(hidden, model.head_weight).float().log_softmax(-1)         # (P*G, V)
        ids = draw(logps.exp(), noise.flatten(0, 1)[:, t])                          # (P*G,)
        columns.append((ids, logps.gather(-1, ids[:, None])[:, 0], -(logps.exp() * logps).sum(-1)))
        new, real = ids[:, None], F.pad(real, (0, 1), value=True)
    ids, logps, entropy = (torch.stack(column, 1).view(P, G, L) for column in zip(*columns))
    return Samples(ids, torch.ones_like(ids, dtype=torch.bool), logps, entropy, torch.zeros(P, G, dtype=torch.bool, device=device))


def full_logits(hidden, head_weight, ids):
    """token_logps() with autograd: hidden (N, H), head_weight (V, H), ids (N,) -> logps, entropy (N,)."""
    logps = F.linear(hidden, head_weight).float().log_softmax(-1)                   # (N, V)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, ids[:, None])[:, 0], entropy


def straightforward_logps(model, prompts, ids):
    """completion_logps() without its savings: every completion after its own copy of the prompt, one padded batch, ids (P, G, L) -> (P*G*L,)."""
    prompt_ids, real = (x.to(ids.device) for x in copy_prompts(prompts, ids.shape[1]))
    input_ids = torch.cat((prompt_ids, ids.flatten(0, 1)), dim=1)                   # (P*G, Tp+L)
    positions, mask = positions_and_mask(F.pad(real, (0, ids.shape[2]), value=True), input_ids.shape[1])
    hidden = model.hidden_states(input_ids, positions, lambda layer, q, k, v: attention(q, k, v, mask))
    return full_logits(hidden[:, real.shape[1] - 1 : -1].flatten(0, 1), model.head_weight, ids.flatten())[0]


# ---- the work ---------------------------------------------------------------------------------------------------------------------------------

def make_model(size, device="cpu", compile=False):
    layers, width, ff, heads, kv_heads, V = SHAPES[size]
    model = GPT(Config.from_dict(dict(
        model_type="llama", vocab_size=V, hidden_size=width, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=2048, hidden_act="silu", tie_word_embeddings=False))).to(device)
    if compile:
        model.compile_steps()
    return model


def transformers_generate(model):
    """transformers' generate with the same weights, as a function of prompts, G and L; None if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaForCausalLM
    peer = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in model.config.raw.items() if k != "model_type"})).to(model.head_weight.device).eval()
    peer.load_state_dict(model.state_dict())

    def generate(prompts, G, L):
        ids, real = (x.to(model.head_weight.device) for x in copy_prompts(prompts, G))
        with torch.no_grad():
            return peer.generate(ids, attention_mask=real.long(), max_new_tokens=L, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None)
    return generate


def backward(model, prompts, ids, weights, ours):
    """The gradient of the loss of one rollout, ids and weights (P, G, L); returns the loss."""
    P, G, L = ids.shape
    if not ours:
        loss = surrogate_loss(straightforward_logps(model, prompts, ids), weights.flatten())
        loss.backward()
        return loss.item()
    total, prompt_of, rows = 0.0, [p for p in range(P) for _ in range(G)], ids.flatten(0, 1).tolist()
    for micro in micro_batches([len(prompt) for prompt in prompts], [L] * P * G, prompt_of, TrainConfig.micro_tokens):
        w = weights.flatten(0, 1)[micro].flatten()
        logps = completion_logps(model, prompts, [rows[i] for i in micro], [prompt_of[i] for i in micro], expected_grad=-w)
        loss = surrogate_loss(logps, w)
        loss.backward()
        total += loss.item()
    return total


def train_step(model, optimizer, prompts, rewards, noise, autocast, ours=True):
    """One whole step: sample, weights, forward and backward, update. rewards (P, G), noise (P, G, L); returns the loss."""
    P, G, L = noise.shape
    with autocast:
        samples = sample(model, prompts, G, L, noise=noise) if ours else straightforward_sample(model, prompts, G, L, noise)
    entropy = mean_entropy(samples.entropy, samples.mask)                           # (P, G)
    weights = gtpo_weights(samples.ids, samples.mask, group_advantages(rewards), entropy, entropy.mean().item()) / P        # (P, G, L)
    with autocast:
        loss = backward(model, prompts, samples.ids, weights, ours)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def loss_work(ours, G, L, H, V, train_head, autocast, device):
    """From hidden states to log-probs, entropy, loss and gradient, as a function to call. The straightforward version takes one
    completion at a time, as the authors' code does: the logits of all at once would need G times the memory."""
    hidden = torch.randn(G * L, H, device=device).requires_grad_()
    head = torch.randn(V, H, device=device).mul_(H ** -0.5).requires_grad_(train_head)
    ids, weights = torch.randint(V, (G * L,), device=device), torch.randn(G * L, device=device)

    def work():
        for h, o, w in [(hidden, ids, weights)] if ours else zip(hidden.split(L), ids.split(L), weights.split(L)):
            with autocast:
                logps, _ = token_logps(h, head, o, expected_grad=-w) if ours else full_logits(h, head, o)
            surrogate_loss(logps, w).backward()
        hidden.grad = head.grad = None
    return work


def conflict_work(P, G, L, device):
    ids = torch.randint(151936, (P, G, L), device=device)
    ids[..., : L // 2] = ids[:, :1, : L // 2]                                       # the first half is shared
    mask = torch.arange(L, device=device) < torch.randint(L // 2, L + 1, (P, G, 1), device=device)
    advantages = group_advantages(torch.randint(3, (P, G), device=device).float())
    return lambda: conflict_weights(ids, mask, advantages)


# ---- measuring --------------------------------------------------------------------------------------------------------------------------------

def best_seconds(versions, device, rounds=5, budget=6, least=2):
    """Best time of each version (a dict of functions), in seconds. They take turns, up to `rounds` times or until `budget` seconds are spent."""
    best, began = {}, time.perf_counter()
    for done in range(rounds):
        if done >= least and time.perf_counter() - began > budget:
            break
        for name, work in versions.items():
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)
    return best


def extra_memory(device, make, sizes, tiny):
    """Peak memory of make(*sizes)() beyond its inputs, MiB: allocated on the GPU; on a CPU resident, of a new process that has done nothing
    but the same work on tiny sizes."""
    if device.type == "cuda":
        return growth(device, make, sizes, tiny)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(growth, device, make, sizes, tiny).result()


def growth(device, make, sizes, tiny):
    make(*tiny)()
    work = make(*sizes)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = high_water(device)
    work()
    return high_water(device) - before


def high_water(device):
    if device.type == "cpu" and os.path.exists("/proc/self/status"):                # on Linux peak_memory() begins with the parent's
        with open("/proc/self/status") as f:
            return int(re.search(r"VmHWM:\s*(\d+)", f.read())[1]) / 2**10
    return peak_memory(device)


# ---- the table: each section prints its rows as they are measured; o holds the options -----------------------------------------------------------

def row(name, best, more=""):
    """best: seconds of "ours" and perhaps of "straightforward" and "transformers"."""
    peers = "".join(f"{best[peer]:10.3f} s {best[peer] / best['ours']:5.1f}x" for peer in ("straightforward", "transformers") if peer in best)
    print(f"{name:38}{best['ours']:8.3f} s{peers}{more}", flush=True)


def rate(o, operations, seconds, bytes=0):
    """TFLOP/s and GB/s of ours; in brackets those of the card's datasheet."""
    peak = [f" ({p:,g})" for p in (o.peak[not o.bf16], o.peak[2])] if o.peak else ["", ""]
    return f"{operations / seconds / 1e12:9.3f}{peak[0]}" + (f"{bytes / seconds / 1e9:8.1f}{peak[1]}" if bytes else "")


def rollouts(o, M512):
    """Size, P, G, Tp, L of the rows of sampler and step; M512: prompts of 512 tokens."""
    rows = [("S", 16, 8, 32, 64), ("M", 8 if o.full else 4, 8, 64, 64), ("M", M512, 8, 512, 64), ("Q", 16, 8, 256, 256)]
    return [r for r in rows if r[1] and (r[0] != "Q" or o.device.type == "cuda")]


def work_of(o, model, P, G, Tp, L):
    """Operations in products with weights, and bytes of weights, keys and values read, of one rollout."""
    c = model.config
    weights = sum(p.numel() for p in model.parameters()) - c.vocab_size * c.hidden_size
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * (P * Tp + P * G * L / 2)
    return 2 * weights * P * (Tp + G * L), L * (2 if o.bf16 else 4) * (weights + kv)


def sampler(o):
    print(f"\n{'sampler':38}{'ours':>10}{'straightforward':>19}{'transformers':>19}{'tokens/s':>10}{'TFLOP/s':>9}{'GB/s':>8}")
    for size, P, G, Tp, L in rollouts(o, 4 if o.full else 2):
        model = make_model(size, o.device, o.compile).eval()
        prompts, noise = torch.randint(model.config.vocab_size, (P, Tp)).tolist(), torch.rand(P, G, L, device=o.device)
        work = {"ours": lambda: sample(model, prompts, G, L, noise=noise),
                "straightforward": lambda: straightforward_sample(model, prompts, G, L, noise)}
        if peer := transformers_generate(model):
            work["transformers"] = lambda: peer(prompts, G, L)
        with o.autocast:
            best = best_seconds(work, o.device)
        operations, bytes = work_of(o, model, P, G, Tp, L)
        row(f"{size}  {P} x {G}, prompt {Tp}, {L} new", best,
            f"{'' if peer else 'not installed':>{0 if peer else 19}}{P * G * L / best['ours']:10,.0f}" + rate(o, operations, best["ours"], bytes))


def loss(o):
    print(f"\n{'loss and gradient, width 512':38}{'ours':>10}{'straightforward':>19}{'TFLOP/s':>9}   extra memory of ours, straightforward")
    G, H = 8, 512
    for L, V in [(256, 32000)] + [(512, 151936)] * o.full:
        for train_head in (False, True):
            sizes, tiny = (G, L, H, V, train_head, o.autocast, o.device), (2, 64, 64, 1000, train_head, o.autocast, o.device)
            best = best_seconds({"ours": loss_work(True, *sizes), "straightforward": loss_work(False, *sizes)}, o.device)
            memory = [extra_memory(o.device, loss_work, (ours, *sizes), (ours, *tiny)) for ours in (True, False)]
            gradient = V * H * 4 / 2**20 if train_head else 0                       # a result, not extra
            row(f"G {G}, L {L}, V {V:,}, head {'trained' if train_head else 'frozen'}", best,
                rate(o, 2 * G * L * H * V * (3 if train_head else 2), best["ours"]) + "".join(f"{m - gradient:8,.0f} MiB" for m in memory))


def step(o):
    print(f"\n{'step: sample, weights, gradient, update':38}{'ours':>9}{'straightforward':>19}{'TFLOP/s':>9}")
    for size, P, G, Tp, L in rollouts(o, 4 if o.full else 0):
        models = {True: make_model(size, o.device, o.compile), False: make_model(size, o.device)}
        optimizers = {ours: torch.optim.AdamW(m.parameters(), lr=1e-6) for ours, m in models.items()}
        prompts = torch.randint(SHAPES[size][-1], (P, Tp)).tolist()
        rewards, noise = torch.randn(P, G, device=o.device), torch.rand(P, G, L, device=o.device)
        work = {name: partial(train_step, models[ours], optimizers[ours], prompts, rewards, noise, o.autocast, ours)
                for name, ours in (("ours", True), ("straightforward", False))}
        best = best_seconds(work, o.device)
        row(f"{size}  {P} x {G}, prompt {Tp}, {L} new", best, rate(o, 4 * work_of(o, models[True], P, G, Tp, L)[0], best["ours"]))


def conflict(o):
    print(f"\n{'conflict weights':38}{'ours':>10}   extra memory")
    sizes = (64, 16, 2048, o.device)
    memory = extra_memory(o.device, conflict_work, sizes, (1, 2, 8, o.device))
    row("64 groups of 16 x 2048", best_seconds({"ours": conflict_work(*sizes)}, o.device), f"{memory:8,.0f} MiB")


def scaling(o):
    print(f"\n{'cost: S, 4 prompts of 32, eager':38}microseconds a token (with attention left out)    milliseconds a completion")
    print(f"{'':38}{'sampler':>18}{'gradient':>20}{'sampler':>18}{'gradient':>12}")
    model, P, Tp, V = make_model("S", o.device), 4, 32, SHAPES["S"][-1]
    prompts = torch.randint(V, (P, Tp)).tolist()
    for G, L in [(G, 128) for G in (4, 8, 16, 32)] + [(8, L) for L in (64, 128, 256, 512, 1024)]:
        noise, weights = torch.rand(P, G, L, device=o.device), torch.randn(P, G, L, device=o.device)
        ids = torch.randint(V, (P, G, L), device=o.device)
        work = {"sampler": lambda: sample(model, prompts, G, L, noise=noise), "gradient": lambda: backward(model, prompts, ids, weights, ours=True)}
        with o.autocast:
            best = best_seconds(work, o.device, 3, 1, least=1)
            with mock.patch.object(model_file, "attention", lambda q, k, v, mask=None: q), \
                    mock.patch.object(GroupCache, "attend", lambda cache, layer, q, k, v: q):
                without = best_seconds(work, o.device, 3, 1, least=1)
        cells = [f"{best[n] / (P * G * L) * 1e6:.1f} ({without[n] / (P * G * L) * 1e6:6.1f})" for n in work]
        cells += [f"{best[n] / (P * G) * 1e3:.2f}" for n in work]
        print(f"{f'G {G}, L {L}':38}{cells[0]:>18}{cells[1]:>20}{cells[2]:>18}{cells[3]:>12}", flush=True)


SECTIONS = {section.__name__: section for section in (sampler, loss, step, conflict, scaling)}


def processor(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as f:
            return re.search(r"model name\s*: (.*)", f.read())[1]
    except (OSError, TypeError):                                                    # not Linux, or not x86
        return platform.processor() or platform.machine()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}, separated by commas")
    parser.add_argument("--full", action="store_true", help="all sizes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="bfloat16: by autocast, as train.py does it")
    parser.add_argument("--compile", action="store_true", help="ours with torch.compile (in sampler and step)")
    o = parser.parse_args(argv)
    unknown = [name for name in o.only.split(",") if name not in SECTIONS]
    if unknown:
        parser.error(f"--only: no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if o.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch finds no CUDA device here")
    o.device, o.bf16 = torch.device(o.device), o.dtype == "bfloat16"
    o.autocast = torch.autocast(o.device.type, torch.bfloat16, enabled=o.bf16)
    name = processor(o.device)
    o.peak = CARDS.get(name.removeprefix("NVIDIA "))

    size = 1024 if o.device.type == "cpu" else 8192
    square = torch.randn(size, size, device=o.device, dtype=torch.bfloat16 if o.bf16 else torch.float32)
    block = torch.empty(2**26, device=o.device)
    limit = best_seconds({"product": lambda: square @ square, "fill": lambda: block.fill_(1)}, o.device, 10)
    print(f"{name}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}, {o.dtype}{' by autocast' * o.bf16}, "
          f"ours {'compiled' if o.compile else 'eager'}\n"
          f"limits measured now: {2 * size**3 / limit['product'] / 1e12:.3f} TFLOP/s ({size} x {size} product), "
          f"{block.nbytes / limit['fill'] / 1e9:.1f} GB/s (memory written); datasheet {'in brackets' if o.peak else 'unknown'}\n"
          "G completions a group, L tokens each, vocabulary V; 16 x 8: 16 groups of 8. Extra memory: peak beside inputs and the head's gradient, "
          f"{'resident, of a new process' if o.device.type == 'cpu' else 'allocated'}.")
    for section in SECTIONS:
        if section in o.only.split(","):
            torch.manual_seed(0)
            SECTIONS[section](o)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as e:                                                       # torch has a class for it on GPUs only
        if "memory" not in str(e):
            raise
        print(f"error: out of memory: {str(e).splitlines()[0]}\nTry without --full, or only some sections with --only.", file=sys.stderr)
        sys.exit(2)
