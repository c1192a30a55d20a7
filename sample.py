"""
The group sampler: G completions for each of P prompts in one batch.

    python sample.py --model=out/arithmetic/model --prompt="47+12?" --gold=59 --group=8

shows one group the way GTPO sees it: rewards, advantages, entropies, who is kept, and the conflict tokens. (The entropy filter needs <H>_ini,
the entropy of the policy before training; here it is this group's own mean, so who is kept may differ from a training run.)
"""
import argparse
import hashlib
import html
import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data import SYSTEM_PROMPT, build_prompt
from gtpo import conflict_weights, group_advantages, keep_completions, mean_entropy
from model import GPT, GroupCache
from rewards import reward_parts
from tokenizer import Tokenizer


DRAW_ELEMENTS = 2**22                                                               # logits alive at a time; larger blocks cost a CPU more in
                                                                                    # pages of memory than in arithmetic


@dataclass
class Samples:
    """P groups of G completions of up to L tokens, right-padded. Log-probs and entropies in nats, 0 at padding."""
    ids: torch.Tensor                                                               # (P, G, L) int64
    mask: torch.Tensor                                                              # (P, G, L) True on sampled tokens, the end token included
    logps: torch.Tensor                                                             # (P, G, L) log-probability of each sampled token
    entropy: torch.Tensor                                                           # (P, G, L) entropy of the distribution it was drawn from
    finished: torch.Tensor                                                          # (P, G) True if it ended with an end token


def restrict(logits, top_k=0, top_p=1.0):
    """Sets all but the top_k most likely tokens, then all but the smallest set with at least top_p of the mass, to -inf.  (B, V)"""
    if 0 < top_k < logits.shape[-1]:
        values, ids = logits.topk(top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, values)
    if top_p < 1:
        probs, ids = logits.softmax(-1).sort(descending=True, stable=True)
        before = probs.cumsum(-1) - probs                                           # mass of the more likely ones; the first always stays
        logits = logits.masked_fill((before >= top_p).scatter(-1, ids, before >= top_p), -math.inf)
    return logits


def draw(probs, uniforms):
    """Draws one token per row by inverting the cumulative distribution: probs (B, V), uniforms (B,) in [0, 1) -> ids (B,).
    One uniform number per token, so a completion does not depend on what else is in the batch."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)                              # (B, V) in float32 a GPU's sum may fall back a little
    target = uniforms.double().clamp(max=1 - 2**-32) * cumulative[:, -1]            # always below the total
    ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]         # never a token of probability 0
    return ids.clamp(max=probs.shape[-1] - 1)                                       # rows of nan, which sample() refuses


def seeded_uniforms(key, *shape):
    """Uniform numbers in [0, 1) that depend on nothing but `key` (a tuple of numbers and strings): there is no random state to save."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def sample(model, prompts, group_size, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, eos_ids=(), generator=None, noise=None):
    """Samples group_size completions for each prompt (a list of lists of token ids); returns Samples.

    Every prompt runs once; its keys and values are shared by its group. A completion stops after any of eos_ids (kept) or after
    max_new_tokens. logps and entropy are those of softmax(logits / temperature) over the whole vocabulary, which is also what the
    loss computes; top_k and top_p only restrict the draw. temperature 0 is greedy, with logps and entropy at temperature 1.
    generator: for reproducible draws. noise: uniforms in [0, 1), (P, G, max_new_tokens), to be used instead.
    ValueError: empty prompt, id outside the vocabulary, no room for the completion, a setting out of range, logits that are not finite.
    """
    c, device, (P, G, L) = model.config, model.head_weight.device, (len(prompts), group_size, max_new_tokens)
    if G < 1 or L < 0 or not 0 <= temperature < math.inf or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"sample: group_size {G}, max_new_tokens {L}, temperature {temperature}, top_k {top_k}, top_p {top_p}: "
                         "out of range (at least 1, 0, 0, 0; 0 < top_p <= 1)")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"sample: prompt {i} is empty; it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= c.vocab_size:
            bad = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ValueError(f"sample: prompt {i} holds token id {bad}, the model knows 0 to {c.vocab_size - 1}")
        if len(prompt) + L > c.max_position_embeddings:
            raise ValueError(f"sample: no room for the completion: prompt {i} has {len(prompt)} tokens, with {L} new ones it passes the "
                             f"model's {c.max_position_embeddings} (max_position_embeddings)")
    out = Samples(ids=torch.zeros(P, G, L, dtype=torch.long, device=device), mask=torch.zeros(P, G, L, dtype=torch.bool, device=device),
                  logps=torch.zeros(P, G, L, device=device), entropy=torch.zeros(P, G, L, device=device),
                  finished=torch.zeros(P, G, dtype=torch.bool, device=device))
    if P == 0 or L == 0:
        return out
    if noise is None:
        noise = torch.rand(P, G, L, generator=generator, device=generator.device if generator is not None else device)
    if noise.shape != (P, G, L):
        raise ValueError(f"sample: noise has shape {tuple(noise.shape)}, {P} prompts, {G} completions and {L} tokens ask for {(P, G, L)}")
    noise = noise.to(device).reshape(P * G, L)
    eos = torch.tensor(list(eos_ids), dtype=torch.long, device=device)
    flat = {name: getattr(out, name).view(P * G, L) for name in ("ids", "logps", "entropy")}

    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    prompt_ids = torch.zeros(P, int(lengths.max()), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        prompt_ids[i, :len(prompt)] = torch.tensor(prompt)
    hidden, prompt_kv = model.prefill(prompt_ids.to(device))                        # (P, Tp, H)
    hidden = hidden[torch.arange(P, device=device), lengths - 1].repeat_interleave(G, dim=0)                        # (P*G, H)
    cache = GroupCache(prompt_kv, lengths, G, L)
    del prompt_kv                                                                   # the cache has its own

    at_once = max(1, DRAW_ELEMENTS // c.vocab_size)                                 # rows whose logits are alive at a time
    rows = torch.arange(P * G, device=device).view(P, G)                            # which completion each row of the batch is
    keep = torch.ones(P, G, dtype=torch.bool, device=device)                        # of these rows: no end token yet, when last looked at
    for t in range(L):
        for row, h in zip(rows.flatten().split(at_once), hidden.split(at_once)):    # (b,), (b, H)
            logits = F.linear(h, model.head_weight).float()                         # (b, V)
            if temperature not in (0, 1):
                logits = logits / temperature
            logps = logits.log_softmax(-1)                                          # (b, V)
            probs = logps.exp()                                                     # (b, V)
            if temperature == 0:
                ids = logits.argmax(-1)
            elif top_k or top_p < 1:
                ids = draw(restrict(logps, top_k, top_p).softmax(-1), noise[row, t])
            else:
                ids = draw(probs, noise[row, t])                                    # (b,)
            flat["ids"][row, t] = ids
            flat["logps"][row, t] = logps.gather(-1, ids[:, None])[:, 0]
            flat["entropy"][row, t] = -(probs * logps.clamp(min=-1e4)).sum(-1)      # clamped: 0 * -inf would be nan
        if t + 1 == L:
            break
        if t % 4 == 3 and len(eos):                                                 # looking makes a GPU wait, so not at every token
            keep = keep & ~torch.isin(flat["ids"][rows, t - 3 : t + 1], eos).any(-1)                                # (P', G')
            if not keep.any():
                break
            members = max(int(keep.sum(1).max()), min(2, keep.shape[1]))            # never down to one: a size of 1 is compiled anew
            prompts_left = keep.any(1).nonzero()[:, 0]
            if len(prompts_left) * members <= 0.8 * keep.numel():                   # finished rows leave the batch
                order = (~keep[prompts_left]).int().argsort(dim=1, stable=True)[:, :members]                        # unfinished first
                rows, keep = (x[prompts_left[:, None], order] for x in (rows, keep))
                cache.select(prompts_left, order)
        hidden = model.decode(flat["ids"][rows.flatten(), t], cache)                # (B, H)
    if not out.logps.isfinite().all():
        raise ValueError("sample: the model's logits are not finite: its weights hold nan or inf, training has diverged, or they are too large "
                         f"for temperature {temperature}")
    ended = torch.isin(out.ids, eos)                                                # (P, G, L)
    out.finished, out.mask = ended.any(-1), ended.cumsum(-1) - ended.long() == 0    # True up to the first end token, which it holds
    for x in (out.ids, out.logps, out.entropy):                                     # what was drawn after it goes
        x.masked_fill_(~out.mask, 0)
    return out


def completion_texts(tokenizer, samples):
    """The text of each completion without its end token, from one decode of all its ids: P lists of G strings."""
    lengths = (samples.mask.sum(-1) - samples.finished.long()).tolist()             # (P, G)
    return [[tokenizer.decode(ids[:n]) for ids, n in zip(*group)] for group in zip(samples.ids.tolist(), lengths)]


def printable(text):
    """Control characters escaped: a line stays a line, and nothing that a model or a data set writes can steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def weighted_runs(tokenizer, ids, lam):
    """The text of a completion as (piece, weight) for each run of tokens of one weight lambda. No piece ends inside a character."""
    text, start, place = tokenizer.decode(ids), 0, 0
    for t in range(1, len(ids) + 1):
        if t < len(ids) and lam[t] == lam[start]:
            continue
        end = len(text) if t == len(ids) else len(tokenizer.decode(ids[:t]).rstrip("\ufffd"))
        if end > place:
            yield printable(text[place:end]), int(lam[start])
        start, place = t, max(place, end)


def show_completion(tokenizer, ids, lam, color):
    """The text with its conflict tokens marked: [[..]] have weight 2, ((..)) have weight 0, the rest counts once."""
    parts = []
    for piece, weight in weighted_runs(tokenizer, ids, lam):
        if weight != 1:
            piece = f"[[{piece}]]" if weight == 2 else f"(({piece}))"
            piece = f"\x1b[{'1;32' if weight == 2 else '34'}m{piece}\x1b[0m" if color else piece
        parts.append(piece)
    return "".join(parts)


LEGEND = "[[..]]: conflict tokens where A > 0, weight 2; ((..)): where A < 0, weight 0, not punished; the rest counts once"


def show_group(tokenizer, question, gold, ids, mask, rewards, advantages, entropy, kept, lam, color=None):
    """One group as GTPO sees it, as text. ids, mask, lam (G, L); rewards, advantages, entropy, kept (G,). color None: if the screen has it."""
    if color is None:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    lines = [printable(question) + (f"   (gold: {printable(str(gold))})" if gold is not None else ""), "reward  advantage  entropy  tokens"]
    for g in range(len(ids)):
        n = int(mask[g].sum())
        lines.append(f"{rewards[g].item():6.1f} {advantages[g].item():+10.2f} {entropy[g].item():8.3f} {n:7d}  {'' if kept[g] else '(filtered) '}"
                     + show_completion(tokenizer, ids[g, :n].tolist(), lam[g, :n].tolist(), color))
    return "\n".join(lines + [LEGEND] * bool(((lam != 1) & mask.bool()).any()))


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>A group as GTPO sees it</title>
<style>
:root { color-scheme: light dark; --two: #c9efcf; --zero: #d5dcfa; --line: #8886; }
@media (prefers-color-scheme: dark) { :root { --two: #1d5b2a; --zero: #33418c; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; } th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { text-align: left; } .n { text-align: right; font-variant-numeric: tabular-nums; } code { white-space: pre-wrap; overflow-wrap: anywhere; }
.x2 { background: var(--two); font-weight: bold; } .x0 { background: var(--zero); text-decoration: underline; } .filtered code { opacity: .5; }
</style>
"""


def group_page(tokenizer, question, gold, ids, mask, rewards, advantages, entropy, kept, lam):
    """The same as show_group, as one self-contained HTML page, light or dark as the reader's screen is."""
    rows = []
    for g in range(len(ids)):
        n = int(mask[g].sum())
        text = "".join(f'<span class="x{weight}" title="weight {weight}">{html.escape(piece)}</span>' if weight != 1 else html.escape(piece)
                       for piece, weight in weighted_runs(tokenizer, ids[g, :n].tolist(), lam[g, :n].tolist()))
        cells = "".join(f'<td class="n">{cell}</td>' for cell in (f"{rewards[g].item():.1f}", f"{advantages[g].item():+.2f}",
                                                                  f"{entropy[g].item():.3f}", n, "yes" if kept[g] else "no"))
        rows.append(f'<tr{"" if kept[g] else " class=filtered"}>{cells}<td><code>{text}</code></td></tr>')
    head = "".join(f'<th class="n">{name}</th>' for name in ("reward", "advantage", "entropy", "tokens", "kept"))
    return (f"{PAGE}<h1>A group as GTPO sees it</h1>\n<p>{html.escape(question)}" + (f" (gold: {html.escape(str(gold))})" if gold is not None else "")
            + f'</p>\n<div class="wide"><table><tr>{head}<th>completion</th></tr>\n' + "\n".join(rows)
            + '\n</table></div>\n<p><span class="x2">Bold</span>: conflict tokens where the advantage is positive, weight 2. <span class="x0">Underlined</span>: '
            "conflict tokens where it is negative, weight 0, not punished. The rest counts once. Entropy is the mean over the tokens, in nats.</p>\n</html>\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder of a model in Hugging Face format")
    parser.add_argument("--adapter", help="folder of a LoRA adapter in PEFT's format")
    parser.add_argument("--prompt", required=True, help="the question; it goes through the chat template if there is one")
    parser.add_argument("--gold", help="the right answer; without it only the format is rewarded")
    parser.add_argument("--group", type=int, default=8, help="G, the number of completions")
    parser.add_argument("--max_new_tokens", type=int, help="default: 256, or what the model has room for")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--system_prompt", default=SYSTEM_PROMPT)
    parser.add_argument("--prompt_style", default="auto", choices=("auto", "chat", "plain"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--html", metavar="FILE", help="also write the group as a self-contained page")
    args = parser.parse_args(argv)
    if args.group < 1 or (args.max_new_tokens is not None and args.max_new_tokens < 1):
        parser.error("--group and --max_new_tokens must be at least 1")

    tokenizer = Tokenizer.from_pretrained(args.model)
    model = GPT.from_pretrained(args.model, adapter=args.adapter, device=args.device).eval()
    prompt = build_prompt(tokenizer, args.prompt, args.system_prompt, args.prompt_style)
    room = args.max_new_tokens or min(256, max(1, model.config.max_position_embeddings - len(prompt)))
    samples = sample(model, [prompt], args.group, room, args.temperature, args.top_k, args.top_p, tokenizer.eos_ids,
                     noise=seeded_uniforms((args.seed, "sample"), 1, args.group, room))
    texts = completion_texts(tokenizer, samples)[0]
    rewards = torch.tensor([sum(reward_parts(text, args.gold).values()) for text in texts])                          # (G,)
    advantages = group_advantages(rewards)                                          # (G,)
    ids, mask = samples.ids[0].cpu(), samples.mask[0].cpu()                         # (G, L)
    entropy = mean_entropy(samples.entropy[0].cpu(), mask)                          # (G,)
    group = (tokenizer, args.prompt, args.gold, ids, mask, rewards, advantages, entropy, keep_completions(entropy, entropy.mean()),
             conflict_weights(ids, mask, advantages))
    print(show_group(*group))
    if args.html:
        with open(args.html, "w", encoding="utf-8") as f:
            f.write(group_page(*group))
    if not samples.finished.all():
        print(f"{int((~samples.finished).sum())} of {args.group} reached max_new_tokens={room} without an end token")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
