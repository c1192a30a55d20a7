"""
The group sampler: G completions for each of P prompts in one batch.

    python sample.py --model=out/arithmetic/model --prompt="47+12?" --gold=59 --group=8

shows one group the way GTPO sees it: rewards, advantages, entropies, who is kept, and the conflict
tokens. (The entropy filter needs <H>_ini, the entropy of the policy before training; here it is
this group's own mean, so who is kept may differ from a training run.)

Axes: P prompts, G completions of each, B = P * G of both, in this order; Hkv key heads, R query
heads that read each, D channels of a head; S tokens of a prompt, T sampled so far, L at most; V
vocabulary, H hidden size.
"""
import argparse
import bisect
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data import SYSTEM_PROMPT, build_prompt, is_plain, open_thought, plain_end
from gtpo import conflict_weights, group_advantages, keep_completions, mean_entropy
from lib.chat import check_variables
from lib.config import convert
from lib.draws import draw, restrict, seeded_uniforms
from lib.files import expand_home, write_whole
from lib.graph import CAPTURES, repeat
from lib.lora import ready_to_sample
from lib.products import pack
from lib.run import command, forward_dtype
from lib.show import group_page, show_group
from logprobs import entropy, log_probs, product_dtype
from model import GPT
from rewards import reward_parts
from tokenizer import Tokenizer

# logits alive at a time: more cost a CPU new pages of memory, fewer leave a GPU idle
DRAW_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
LOOK_EVERY = 4  # tokens between two looks at who has ended; a look makes a GPU wait


# ---- keys and values that a group shares ---------------------------------------------------------

class GroupCache:
    """Keys and values of a batch that is being sampled: those of each prompt once, for its whole
    group, and those of each completion's own tokens. All float32, so that a bfloat16 model's
    scores are not rounded (keys may be in the hundreds) and no key is cast at every token."""

    def __init__(self, prompt_kv, prompt_lengths, group_size, max_new_tokens):
        """prompt_kv: k and v (P, Hkv, S, D) of each layer; prompt_lengths (P,) real tokens each, on
        the CPU, as what select() gets is: no GPU is asked which shape comes next."""
        self.prompt_lengths, self.max_new_tokens = prompt_lengths, max_new_tokens
        self.prompt_kv = [tuple(x.float().contiguous() for x in kv) for kv in prompt_kv]
        (P, Hkv, _, D), device = self.prompt_kv[0][0].shape, self.prompt_kv[0][0].device
        room = min(64, max_new_tokens)  # of the own tokens' buffers; doubled when it is full
        self.own_kv = [tuple(x.new_zeros(P, Hkv, group_size, room, D) for x in kv)
                       for kv in self.prompt_kv]
        self.places = torch.arange(max_new_tokens, device=device)
        self.place_prompts()

    def place_prompts(self):
        """Where each prompt ends: own tokens follow there, padding behind it is hidden."""
        (_, Hkv, S, _), device = self.prompt_kv[0][0].shape, self.places.device
        padding = torch.arange(S) >= self.prompt_lengths[:, None, None]  # (P, 1, S)
        bias = torch.where(padding, -math.inf, 0.0)
        self.prompt_bias = bias.repeat_interleave(Hkv, dim=0).to(device)  # (P * Hkv, 1, S)
        G = self.own_kv[0][0].shape[2]
        self.starts = self.prompt_lengths.repeat_interleave(G).to(device)  # (B,)

    def select(self, prompts, members):
        """Keeps these prompts (P',) and of each these members of its group (P', G')."""
        self.prompt_lengths = self.prompt_lengths[prompts]
        S, device = int(self.prompt_lengths.max()), self.places.device
        prompts, members = prompts.to(device), members.to(device)
        self.prompt_kv = [tuple(x[prompts, :, :S] for x in kv) for kv in self.prompt_kv]
        heads = torch.arange(self.own_kv[0][0].shape[1], device=device)[:, None]  # (Hkv, 1)
        rows = prompts[:, None, None], heads, members[:, None]  # to (P', Hkv, G')
        self.own_kv = [tuple(x[rows] for x in kv) for kv in self.own_kv]
        self.place_prompts()

    def make_room(self, t):
        """For token t of each completion. True if that took other, larger buffers."""
        room = self.own_kv[0][0].shape[3]
        if t == room:
            more = min(room, self.max_new_tokens - room)
            self.own_kv = [tuple(F.pad(x, (0, 0, 0, more)) for x in kv) for kv in self.own_kv]
        return t == room

    def next_token(self, t):
        """What decode() needs for token t of each completion: positions (B,), per layer what
        attend_group gets, and what all layers share. t is a number; or, where shapes should stay
        until buffers grow, a tensor (1,): attention is then to the whole buffers, behind a mask."""
        whole = isinstance(t, torch.Tensor)
        places = self.places[: self.own_kv[0][0].shape[3] if whole else t + 1]
        own_bias = torch.where(places > t, -math.inf, 0.0)
        by_layer = [(*prompt, *own) for prompt, own in zip(self.prompt_kv, self.own_kv)]
        place = t if whole else slice(t, t + 1)  # where the new token goes
        return self.starts + t, by_layer, (self.prompt_bias, own_bias, place)


def attend_group(q, k, v, prompt_k, prompt_v, own_k, own_v, prompt_bias, own_bias, place):
    """Attention of one new token of each completion, to its prompt and to its own tokens.

    q (B, Hkv * R, 1, D), k and v (B, Hkv, 1, D); prompt_k, prompt_v (P, Hkv, S, D); own_k, own_v
    (P, Hkv, G, room, D), to which k and v are added at `place`; prompt_bias (P * Hkv, 1, S),
    own_bias (T,) -> (B, Hkv * R, 1, D). A group's scores with its prompt's keys are one product
    for each key head. Everything is float32, inside autocast too.
    """
    (P, Hkv, G, _, D), S, T = own_k.shape, prompt_k.shape[2], len(own_bias)
    dtype, R, scale = q.dtype, q.shape[1] // Hkv, D**-0.5
    with torch.autocast(q.device.type, enabled=False):
        own_k[:, :, :, place] = k.float().view(P, G, Hkv, 1, D).transpose(1, 2)
        own_v[:, :, :, place] = v.float().view(P, G, Hkv, 1, D).transpose(1, 2)
        own_k, own_v = (x.flatten(0, 2)[:, :T] for x in (own_k, own_v))  # (P * Hkv * G, T, D)
        prompt_k, prompt_v = prompt_k.flatten(0, 1), prompt_v.flatten(0, 1)  # (P * Hkv, S, D)
        q = q.float().view(P, G, Hkv, R, D).transpose(1, 2).contiguous()  # (P, Hkv, G, R, D)
        for_prompt, for_own = q.view(P * Hkv, G * R, D), q.view(P * Hkv * G, R, D)

        prompt_scores = torch.baddbmm(prompt_bias, for_prompt, prompt_k.mT, alpha=scale)
        own_scores = torch.baddbmm(own_bias, for_own, own_k.mT, alpha=scale)
        scores = torch.cat((prompt_scores.view(-1, R, S), own_scores), dim=-1)
        probs = scores.softmax(dim=-1)  # (P * Hkv * G, R, S + T)
        y = probs[..., :S].reshape(P * Hkv, G * R, S) @ prompt_v  # (P * Hkv, G * R, D)
        y = torch.baddbmm(y.view(-1, R, D), probs[..., S:], own_v)  # (P * Hkv * G, R, D)
    return y.view(P, Hkv, G, R, D).transpose(1, 2).reshape(P * G, Hkv * R, 1, D).to(dtype)


# ---- the sampler ---------------------------------------------------------------------------------

@dataclass
class Samples:
    """P groups of G completions of up to L tokens, right-padded with 0."""
    ids: torch.Tensor  # (P, G, L) int64
    mask: torch.Tensor  # (P, G, L) True on tokens that count, the end token included
    logps: torch.Tensor  # (P, G, L) log-probability of each, nats
    entropy: torch.Tensor  # (P, G, L) of the distribution it was drawn from, nats
    finished: torch.Tensor  # (P, G) True if it came to its end, False if it was cut off


def pad(rows, device="cpu"):
    """Lists of ids -> ids (N, T), right-padded with 0, and their lengths (N,)."""
    ids = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    return ids.to(device), lengths.to(device)


def next_tokens(hidden, head, uniforms, temperature, top_k, top_p):
    """hidden (b, H), head (V, H), uniforms (b,) -> ids, log-probs and entropies, (b,) each."""
    logp = log_probs(hidden, head, temperature or 1.0)  # (b, V)
    probs = logp.exp()  # (b, V)
    if temperature == 0:
        ids = logp.argmax(-1)
    else:
        restricted = top_k or top_p < 1
        ids = draw(restrict(logp, top_k, top_p) if restricted else probs, uniforms)
    return ids, logp.gather(-1, ids[:, None])[:, 0], entropy(logp, probs)


@torch.no_grad()
def sample(model, prompts, group_size, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0,
           eos_ids=(), generator=None, noise=None, stop=None):
    """group_size completions of each prompt (lists of token ids) -> Samples.

    A completion ends after any of eos_ids (kept), after the token where stop(ids) says so (a rule
    on all its ids: how many of them count, or None), or after max_new_tokens. Log-probs and
    entropies are those of softmax(logits / temperature) over the whole vocabulary, as in the loss;
    top_k and top_p only restrict the draw. temperature 0 is greedy, with log-probs at temperature
    1. generator: for reproducible draws; or noise: uniforms in [0, 1), (P, G, max_new_tokens).
    ValueError: an empty prompt, an id outside the vocabulary, no room, logits that are not finite.
    """
    P, G, L = len(prompts), group_size, max_new_tokens
    check(model.config, prompts, G, L, temperature, top_k, top_p)
    device, head = model.head_weight.device, model.head_weight
    if noise is None:
        where = generator.device if generator else device
        noise = torch.rand(P, G, L, generator=generator, device=where)
    noise = noise.to(device).reshape(P * G, L)
    ids = torch.zeros(P * G, L, dtype=torch.long, device=device)
    logps, entropies = torch.zeros(2, P * G, L, device=device)
    # who has ended and who goes on is known to the CPU, which asks a GPU once in LOOK_EVERY tokens
    ends = torch.full((P * G,), L + 1)  # tokens that count, L + 1: no end yet
    rows = torch.arange(P * G).view(P, G)  # which completion each row of the batch is
    at = rows.flatten().to(device)  # the same, (B,)
    at_once = max(1, DRAW_ELEMENTS[device.type] // model.config.vocab_size)
    fixed = model.compiled or CAPTURES[device.type]  # shapes, until the batch changes
    now, steps = torch.zeros(1, dtype=torch.long, device=device), None

    def draw_tokens(hidden, t):
        for some, h in zip(at.split(at_once), hidden.split(at_once)):
            ids[some, t], logps[some, t], entropies[some, t] = next_tokens(
                h.to(head.dtype), head, noise[some, t], temperature, top_k, top_p)

    def step(t):
        """Reads token t of each completion, draws the next. t as next_token() takes it; a tensor
        is moved on."""
        positions, by_layer, shared = cache.next_token(t)
        hidden = model.decode(ids[at, t], positions, attend_group, by_layer, shared)  # (B, H)
        t += 1
        draw_tokens(hidden, t)

    with ready_to_sample(model):
        for t in range(L if P else 0):
            if t == 0:
                hidden, cache = read_prompts(model, prompts, G, L)  # (B, H)
                head = pack(head.to(product_dtype(hidden)))
                draw_tokens(hidden, 0)
            else:
                if cache.make_room(t - 1) or steps is None:
                    steps = repeat(step, now)  # a graph knows only the tensors that it was made of
                next(steps) if fixed else step(t - 1)
            if t % LOOK_EVERY == LOOK_EVERY - 1 or t + 1 == L:
                look_for_ends(ends, ids[at, : t + 1], rows.flatten(), eos_ids, stop)
                going = ends[rows] > L  # (P', G')
                if not going.any():
                    break
                prompts_left, members = who_goes_on(going)
                if len(prompts_left) * members.shape[1] <= 0.8 * going.numel():
                    steps = None  # lets go of a graph and of the memory of its step
                    cache.select(prompts_left, members)
                    rows = rows[prompts_left[:, None], members]
                    at = rows.flatten().to(device)
    if not logps.isfinite().all():
        raise ValueError("sample: the model's logits are not finite: its weights hold nan or inf, "
                         f"training has diverged, or temperature {temperature} is too small")
    ends = ends.view(P, G).to(device)
    mask = torch.arange(L, device=device) < ends[..., None]  # (P, G, L)
    ids, logps, entropies = (torch.where(mask, x.view(P, G, L), 0) for x in (ids, logps, entropies))
    return Samples(ids, mask, logps, entropies, ends <= L)


def check(config, prompts, G, L, temperature, top_k, top_p):
    if G < 1 or L < 0 or not 0 <= temperature < math.inf or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"sample: group_size {G}, max_new_tokens {L}, temperature {temperature}, "
                         f"top_k {top_k}, top_p {top_p}: out of range (at least 1, 0, 0, 0, and "
                         "0 < top_p <= 1)")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"sample: prompt {i} is empty; it needs at least one token")
        bad = [token for token in (min(prompt), max(prompt)) if not 0 <= token < config.vocab_size]
        if bad:
            raise ValueError(f"sample: prompt {i} holds token id {bad[0]}, the model knows 0 to "
                             f"{config.vocab_size - 1}")
        if len(prompt) + L > config.max_position_embeddings:
            raise ValueError(f"sample: no room for the completion: prompt {i} has {len(prompt)} "
                             f"tokens, with {L} new ones it passes the model's "
                             f"{config.max_position_embeddings} (max_position_embeddings)")


def read_prompts(model, prompts, G, L):
    """Each prompt once, for its group -> hidden states that predict the first tokens (B, H), and
    the cache of what follows."""
    prompt_ids, lengths = pad(prompts)  # (P, S), (P,)
    hidden, prompt_kv = model.prefill(prompt_ids.to(model.head_weight.device))  # (P, S, H)
    last = hidden[torch.arange(len(prompts)), lengths - 1]  # (P, H)
    return last.repeat_interleave(G, dim=0), GroupCache(prompt_kv, lengths, G, L)


def look_for_ends(ends, ids, rows, eos_ids, stop):
    """Writes to ends (B,) how many tokens count of those of `rows` (B',) that came to an end within
    the last of their ids (B', T): an end token, or what stop() says."""
    since = max(0, ids.shape[1] - LOOK_EVERY)
    ids = ids[:, since if stop is None else 0 :].cpu()
    hit = torch.isin(ids[:, -LOOK_EVERY:], torch.tensor(list(eos_ids), dtype=torch.long))
    first = since + hit.int().argmax(-1) + 1  # (B',)
    ends[rows] = torch.where(hit.any(-1) & (first < ends[rows]), first, ends[rows])
    if stop is not None:
        for row, tokens, end in zip(rows.tolist(), ids.tolist(), ends[rows].tolist()):
            count = stop(tokens[:end]) if end > since else None  # else it was looked at before
            if count is not None:
                ends[row] = count


def who_goes_on(going):
    """The smallest batch of all that go on, `going` (P, G) -> prompts (P',) and of each members of
    its group (P', G'). A group of which fewer go on than G' keeps some that have ended; nobody
    looks at what they go on to say."""
    prompts = going.any(1).nonzero()[:, 0]  # (P',)
    members = max(int(going.sum(1).max()), min(2, going.shape[1]))  # 1 would be compiled anew
    return prompts, (~going[prompts]).int().argsort(dim=1, stable=True)[:, :members]


# ---- texts ---------------------------------------------------------------------------------------

def plain_stop(tokenizer):
    """The rule `stop` for prompts without a chat template: a completion ends with the token that
    completes its answer, or begins another problem (data.plain_end)."""
    def stop(ids):
        def has_end(n):
            return plain_end(tokenizer.decode(ids[:n])) is not None
        if not has_end(len(ids)):
            return None
        return 1 + bisect.bisect_left(range(1, len(ids)), True, key=has_end)  # the fewest tokens
    return stop


def completion_texts(tokenizer, samples, prompts, plain=False):
    """The text of each completion as it is graded and saved, P lists of G: one decode of all its
    ids but the end token; of plain prompts up to where the answer ends. It begins with the
    `<think>` that its prompt (ids) left open, if it did: rewards.py looks behind a thought."""
    lengths = samples.mask.sum(-1).tolist()  # (P, G)
    texts = []
    for prompt, group, group_lengths in zip(prompts, samples.ids.tolist(), lengths):
        thought = open_thought(tokenizer.decode(prompt))
        texts.append([])
        for ids, n in zip(group, group_lengths):
            ended = n > 0 and ids[n - 1] in tokenizer.eos_ids
            text = tokenizer.decode(ids[: n - ended])
            texts[-1].append(thought + (text[: plain_end(text)] if plain else text))
    return texts


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, type=expand_home, help="folder of a model in Hugging Face format")
    add("--adapter", type=expand_home, help="folder of a LoRA adapter in PEFT's format")
    add("--prompt", required=True, help="the question")
    add("--gold", help="the right answer; without it only the format is rewarded")
    add("--group", type=int, default=8, help="G, the number of completions")
    add("--max_new_tokens", type=int, help="default: 512, or what the model has room for")
    add("--temperature", type=float, default=1.0)
    add("--top_k", type=int, default=0)
    add("--top_p", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--system_prompt", default=SYSTEM_PROMPT)
    add("--prompt_style", default="auto", choices=("auto", "chat", "plain"))
    add("--template_variables", default="{}", metavar="JSON",
        help='for the chat template, such as \'{"enable_thinking": false}\'')
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu",
        choices=("cpu", "cuda"))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    add("--html", metavar="FILE", type=expand_home, help="also write the group as a page")
    args = parser.parse_args(argv)
    if args.group < 1 or (args.max_new_tokens is not None and args.max_new_tokens < 1):
        parser.error("--group and --max_new_tokens must be at least 1")
    variables = convert(dict, args.template_variables, "flag --template_variables")
    check_variables(variables)

    tokenizer = Tokenizer.from_pretrained(args.model, adapter=args.adapter)
    model = GPT.from_pretrained(args.model, adapter=args.adapter, device=args.device,
                                dtype=forward_dtype(args.dtype, torch.device(args.device)))
    plain = is_plain(tokenizer, args.prompt_style)
    prompt = build_prompt(tokenizer, args.prompt, args.system_prompt, args.prompt_style, variables)
    room = max(1, model.config.max_position_embeddings - len(prompt))
    L = args.max_new_tokens or min(512, room)
    noise = seeded_uniforms((args.seed, "sample"), 1, args.group, L)
    print(f"sampling {args.group} completions of up to {L} tokens"
          + " (plain prompt: no chat template)" * plain
          + f" (tokenizer and template of {args.adapter})" * tokenizer.of_adapter,
          file=sys.stderr, flush=True)
    samples = sample(model, [prompt], args.group, L, args.temperature, args.top_k, args.top_p,
                     tokenizer.eos_ids, noise=noise, stop=plain_stop(tokenizer) if plain else None)
    texts = completion_texts(tokenizer, samples, [prompt], plain)[0]
    rewards = torch.tensor([sum(reward_parts(text, args.gold).values()) for text in texts])  # (G,)
    advantages = group_advantages(rewards)  # (G,)
    ids, mask = samples.ids[0].cpu(), samples.mask[0].cpu()  # (G, L)
    H = mean_entropy(samples.entropy[0].cpu(), mask)  # (G,)
    group = (tokenizer, args.prompt, args.gold, ids, mask, rewards, advantages, H,
             keep_completions(H, H.mean()), conflict_weights(ids, mask, advantages))
    print(show_group(*group))
    if args.html:
        write_whole(args.html, lambda f: f.write(group_page(*group)))
    if not samples.finished.all():
        cut = int((~samples.finished).sum())
        print(f"{cut} of {args.group} were cut off at max_new_tokens={L}")
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
