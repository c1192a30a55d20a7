"""
Speed, in one table: the sampler, the loss, a whole step, the conflict weights, each against the
straightforward way to do the same work (written here, on the same layers), the sampler also
against transformers' generate where that is installed; then cost by number and length of
completions.

    python -m tools.bench                       some minutes on two cores
    python -m tools.bench --only=sampler,loss   some sections
    python -m tools.bench --device=cuda         what we would like to see of your GPU: send it all

A figure is the best of a few rounds in which the versions take turns; (1.9x): so many times as
long as ours. The models have random weights and no end token, so every completion has its full
length. S has the sizes of the default run's policy, M 32 million parameters; Q and B those of
Qwen2.5 0.5B and 3B, with key biases as large as theirs. MiB: peak reserved on the GPU by ours.
mismatch: mean |log-prob of the trainer - of the sampler|, nats a token: about 1e-6 in float32,
below 0.03 in bfloat16.
"""
import argparse
import importlib.util
import platform
import sys
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from gtpo import conflict_weights, group_advantages, mean_entropy, policy_loss, token_weights
from lib.hf import Config
from lib.run import command, forward_dtype
from logprobs import head_loss
from model import GPT, attention
from sample import Samples, draw, pad, sample
from train import (Batch, Policy, TrainConfig, backward, cross_entropy, make_optimizer,
                   update)

# layers, width, MLP's width, heads, key heads, vocabulary
SHAPES = {"S": (3, 128, 384, 4, 4, 300), "M": (8, 512, 1408, 8, 4, 8192),
          "Q": (24, 896, 4864, 14, 2, 151936), "B": (36, 2048, 11008, 16, 2, 151936)}
# prompts, completions of each, tokens of a prompt, tokens of a completion
ROLLOUTS = {"S": [(16, 8, 32, 64)], "M": [(8, 8, 64, 64), (4, 8, 512, 64)],
            "Q": [(16, 8, 256, 256)], "B": [(8, 8, 512, 256)]}
# completions and tokens of each, of the rows that show how cost grows
GROWTH = [(G, 128) for G in (4, 16, 32)] + [(8, L) for L in (64, 128, 256, 512, 1024)]


def make_model(size, o):
    """A model of random weights on the device of the options o."""
    layers, width, ff, heads, kv_heads, V = SHAPES[size]
    config = Config.from_dict(dict(
        model_type="qwen2" if size in "QB" else "llama", vocab_size=V, hidden_size=width,
        intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=2048, hidden_act="silu",
        tie_word_embeddings=size in "QB"))
    with torch.device(o.device):
        model = GPT(config)
        for layer in model.model.layers if size in "QB" else ():
            torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=12)
            torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=60)
    return model


def make_run(size, o, compile=False):
    """What train.backward() and train.update() need of a run."""
    model = make_model(size, o)
    if compile:
        model.compile_layers()
    return SimpleNamespace(c=TrainConfig(), processes=SimpleNamespace(size=1), model=model,
                           policy=Policy(model), optimizer=make_optimizer(model),
                           autocast=o.autocast)


# ---- the straightforward versions ----------------------------------------------------------------

def copy_prompts(prompts, G, device):
    """Every prompt G times, left-padded: ids and True on real tokens, (P*G, Tp)."""
    ids, lengths = pad([prompt[::-1] for prompt in prompts for _ in range(G)], device)
    real = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    return ids.flip(1), real.flip(1)


def positions_and_mask(real, new):
    """For the last `new` of the tokens so far, real (B, T): positions (B, new) and what each may
    see (B, 1, new, T)."""
    keys = torch.arange(real.shape[1], device=real.device)      # (T,)
    queries = keys[-new:, None]                                 # (new, 1)
    visible = (keys <= queries) & real[:, None, None]
    return (real.cumsum(1) - 1).clamp(min=0)[:, -new:], visible | (keys == queries)


def attend_to_past(q, k, v, past, mask):
    """Attention to all keys so far, which grow by concatenation in the list `past`."""
    if past:
        k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
    past[:] = k, v
    return attention(q, k, v, mask)


@torch.no_grad()
def plain_sample(model, prompts, G, noise):
    """sample() without its savings: every completion runs its own copy of the prompt."""
    new, real = copy_prompts(prompts, G, noise.device)          # (P*G, Tp)
    past, columns = [([],) for _ in model.model.layers], []
    for t in range(noise.shape[2]):
        positions, mask = positions_and_mask(real, new.shape[1])
        hidden, _ = model.hidden_states(new, positions, attend_to_past, past, (mask,))
        logits = F.linear(hidden[:, -1], model.head_weight)     # (P*G, V)
        logp = logits.float().log_softmax(-1)
        ids = draw(logp.exp(), noise.flatten(0, 1)[:, t])       # (P*G,)
        columns.append((ids, logp.gather(-1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
        new, real = ids[:, None], F.pad(real, (0, 1), value=True)
    ids, logps, entropy = (torch.stack(c, 1).view(noise.shape) for c in zip(*columns))
    return Samples(ids, torch.ones_like(ids, dtype=torch.bool), logps, entropy, None)


def plain_head_loss(hidden, head, ids, weights):
    """head_loss() with all logits and autograd, and the entropies as the authors' code takes them:
    hidden (N, H), head (V, H), ids and weights (N,)."""
    logp = F.linear(hidden, head).float().log_softmax(-1)       # (N, V)
    with torch.no_grad():
        -(logp.exp() * logp).sum(-1)
    return -(weights * logp.gather(-1, ids[:, None])[:, 0]).sum()


def plain_loss(model, prompts, ids, weights):
    """The loss of a rollout, ids and weights (P, G, L), without the savings of train.Policy: all
    completions behind their own copies of the prompts in one batch."""
    prompt_ids, real = copy_prompts(prompts, ids.shape[1], ids.device)
    input_ids = torch.cat((prompt_ids, ids.flatten(0, 1)), dim=1)               # (P*G, Tp+L)
    real = F.pad(real, (0, ids.shape[2]), value=True)
    positions, mask = positions_and_mask(real, input_ids.shape[1])
    hidden, _ = model.hidden_states(input_ids, positions, attention, seen=(mask,))
    hidden = hidden[:, prompt_ids.shape[1] - 1 : -1].flatten(0, 1)              # (P*G*L, H)
    return plain_head_loss(hidden, model.head_weight, ids.flatten(), weights.flatten())


def generate_with_transformers(model):
    """transformers' generate with the same weights, as a function of prompts, G and L."""
    from transformers import AutoConfig, AutoModelForCausalLM
    raw = {k: v for k, v in model.config.raw.items() if k != "model_type"}
    peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.config.model_type, **raw))
    peer.load_state_dict(model.state_dict(), strict=False)      # a tied head has no tensor
    peer.to(model.head_weight.device).eval()

    @torch.no_grad()
    def generate(prompts, G, L):
        ids, real = copy_prompts(prompts, G, model.head_weight.device)
        return peer.generate(ids, attention_mask=real.long(), max_new_tokens=L, do_sample=True,
                             top_k=0, pad_token_id=0, eos_token_id=None)
    return generate


# ---- the sections: each yields (name, {version: function}, tokens) -------------------------------

def gradient(run, prompts, samples, weights):
    """The gradient of one rollout as train.py makes it; returns (loss, mismatch)."""
    P, G, L = weights.shape
    prompt_of = torch.arange(P, device=weights.device).repeat_interleave(G)
    batch = Batch(*pad(prompts, weights.device), prompt_of, samples.ids.flatten(0, 1),
                  samples.mask.flatten(0, 1))
    per_token = [weights.flatten(0, 1), samples.logps.flatten(0, 1)]            # (N, L)
    loss, logps = backward(run, batch, list(range(P * G)), policy_loss, per_token)
    off = sum((new - per_token[1][part].flatten()).abs().sum() for part, new in logps)
    return loss, off.item() / (P * G * L)


def train_step(run, prompts, rewards, noise, ours=True):
    """A whole step: sample, weights, forward and backward, update. rewards (P, G), noise
    (P, G, L). Returns the loss and, of ours, the mismatch."""
    P, G, L = noise.shape
    with run.autocast():
        samples = (sample(run.model, prompts, G, L, noise=noise) if ours
                   else plain_sample(run.model, prompts, G, noise))
    advantages, entropy = group_advantages(rewards), mean_entropy(samples.entropy, samples.mask)
    lam = conflict_weights(samples.ids, samples.mask, advantages)
    weights = token_weights(advantages - 0.1 * entropy, samples.mask, lam) / P  # (P, G, L)
    if ours:
        loss, off = gradient(run, prompts, samples, weights)
    else:
        with run.autocast():
            part = plain_loss(run.model, prompts, samples.ids, weights)
        part.backward()
        loss, off = part.item(), None
    update(run, 1e-6, 0.1, loss)
    return loss, off


def sampler(o):
    for size in o.sizes:
        model = make_model(size, o).eval()
        peer = generate_with_transformers(model) if o.transformers else None
        if o.compile:
            model.compile_layers()
        for P, G, Tp, L in ROLLOUTS[size]:
            prompts = torch.randint(SHAPES[size][-1], (P, Tp)).tolist()
            noise = torch.rand(P, G, L, device=o.device)
            work = {"ours": lambda: sample(model, prompts, G, L, noise=noise),
                    "plain": lambda: plain_sample(model, prompts, G, noise)}
            if peer:
                work["transformers"] = lambda: peer(prompts, G, L)
            yield f"sampler {size} {P} x {G}, {Tp} + {L}", work, P * G * L


def loss(o):
    """The straightforward version takes one completion at a time, as the authors' code does: the
    logits of all at once would need G times the memory."""
    G, L, H = 8, 256, 512
    for V in (32000, 151936):
        for trained in (False, True):
            hidden = torch.randn(G * L, H, device=o.device, requires_grad=True)
            head = (torch.randn(V, H, device=o.device) * H**-0.5).requires_grad_(trained)
            ids = torch.randint(V, (G * L,), device=o.device)
            weights = torch.randn(G * L, device=o.device)

            def ours():
                head_loss(hidden, head, ids, cross_entropy, [weights])[0].backward()
                hidden.grad = head.grad = None

            def plain():
                for rows in torch.arange(G * L).split(L):
                    plain_head_loss(hidden[rows], head, ids[rows], weights[rows]).backward()
                hidden.grad = head.grad = None

            yield (f"loss V {V}, head {'trained' if trained else 'frozen'}",
                   {"ours": ours, "plain": plain}, G * L)


def step(o):
    for size in o.sizes:
        ours, plain = make_run(size, o, o.compile), make_run(size, o)
        for P, G, Tp, L in ROLLOUTS[size]:
            prompts = torch.randint(SHAPES[size][-1], (P, Tp)).tolist()
            rewards = torch.randn(P, G, device=o.device)
            noise = torch.rand(P, G, L, device=o.device)
            yield (f"step {size} {P} x {G}, {Tp} + {L}",
                   {"ours": lambda: train_step(ours, prompts, rewards, noise)[1],
                    "plain": lambda: train_step(plain, prompts, rewards, noise, False)},
                   P * G * L)


def conflict(o):
    P, G, L = 64, 16, 2048
    ids = torch.randint(151936, (P, G, L), device=o.device)
    ids[..., : L // 2] = ids[:, :1, : L // 2]                   # the first half is shared
    ends = torch.randint(L // 2, L + 1, (P, G, 1), device=o.device)
    mask = torch.arange(L, device=o.device) < ends
    advantages = group_advantages(torch.randint(3, (P, G), device=o.device).float())
    yield (f"conflict weights {P} x {G} x {L}",
           {"ours": lambda: conflict_weights(ids, mask, advantages)}, P * G * L)


def scaling(o):
    run, P, Tp = make_run("S", o), 4, 32
    prompts = torch.randint(SHAPES["S"][-1], (P, Tp)).tolist()
    for G, L in GROWTH:
        noise = torch.rand(P, G, L, device=o.device)
        samples, weights = sample(run.model, prompts, G, L, noise=noise), torch.randn_like(noise)
        yield (f"sampler S 4 x {G}, {Tp} + {L}",
               {"ours": lambda: sample(run.model, prompts, G, L, noise=noise)}, P * G * L)
        yield (f"gradient S 4 x {G}, {Tp} + {L}",
               {"ours": lambda: gradient(run, prompts, samples, weights)[1]}, P * G * L)


# ---- measuring -----------------------------------------------------------------------------------

def measure(work, o, rounds=5, budget=6):
    """Best seconds of each version; they take turns, up to `rounds` times but not (after two) for
    more than `budget` seconds. Then MiB reserved on the GPU by ours, and what ours returned."""
    best, memory, results, began = {}, None, {}, time.perf_counter()
    for done in range(rounds):
        if done >= 2 and time.perf_counter() - began > budget:
            break
        for name, run in work.items():
            if o.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            with o.autocast():
                results[name] = run()
            if o.device == "cuda":
                torch.cuda.synchronize()
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)
            if o.device == "cuda" and name == "ours":
                memory = torch.cuda.max_memory_reserved() / 2**20
    return best, memory, results["ours"]


def line(name, best, tokens, memory, off):
    """One row of the table."""
    others = ["" if other not in best else f"{best[other]:.3f} ({best[other] / best['ours']:.1f}x)"
              for other in ("plain", "transformers")]
    return (f"{name:32}{best['ours']:8.3f}{others[0]:>17}{others[1]:>17}"
            f"{tokens / best['ours']:12,.0f}{'' if memory is None else f'{memory:,.0f}':>8}"
            f"{f'{off:.1e}' if isinstance(off, float) else '':>10}")


SECTIONS = {section.__name__: section for section in (sampler, loss, step, conflict, scaling)}


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--sizes", help="some of S,M,Q,B; default: S,M, on a GPU S,M,Q")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
                        help="bfloat16: by autocast, as in training; auto: on GPUs that have it")
    parser.add_argument("--compile", action="store_true", help="ours with torch.compile")
    o = parser.parse_args(argv)
    o.sizes = (o.sizes or ("S,M" if o.device == "cpu" else "S,M,Q")).split(",")
    for flag, names, known in (("only", o.only.split(","), SECTIONS), ("sizes", o.sizes, SHAPES)):
        for name in names:
            if name not in known:
                parser.error(f"--{flag}: {name!r} is none of {', '.join(known)}")
    if o.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: torch finds no CUDA device here")
    dtype = forward_dtype(o.dtype, torch.device(o.device))
    o.autocast = lambda: torch.autocast(o.device, torch.bfloat16, enabled=dtype == torch.bfloat16)
    o.transformers = importlib.util.find_spec("transformers") is not None

    cuda = o.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    print(f"{name}, {torch.get_num_threads()} threads, Python "
          f"{platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
          f"{str(dtype).removeprefix('torch.')}, {'compiled' if o.compile else 'eager'}\n"
          f"{'16 x 8, 32 + 64: 16 prompts of 32':32}{'ours, s':>8}{'straightforward':>17}"
          f"{'transformers':>17}{'tokens/s':>12}{'MiB':>8}{'mismatch':>10}")
    for section in o.only.split(","):
        torch.manual_seed(0)
        for name, work, tokens in SECTIONS[section](o):
            best, memory, off = measure(work, o)
            print(line(name, best, tokens, memory, off), flush=True)


if __name__ == "__main__":
    sys.exit(command(main))
