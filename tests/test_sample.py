"""sample.py: real tiny models (fixtures/hf) against the passes that training makes, and a mock model
whose distributions are known."""
import math
import os
import random
import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample as sample_py
from lib import products
from lib.arithmetic import write_byte_tokenizer
from lib.draws import invert
from lib.hf import Config
from lib.lora import ready_to_sample
from lib.run import command
from logprobs import entropy, log_probs
from model import GPT
from sample import (GroupCache, Samples, completion_texts, draw, pad, plain_stop, restrict, sample,
                    seeded_uniforms)
from tools.bench import count_of_a_token

HF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "hf")
MODELS = "llama_gqa", "qwen2_tied", "qwen2_sharded", "qwen3", "lora"
PROMPTS = [[3, 9, 4], [5, 1, 8, 2, 7, 7, 30], [11]]
EOS = (5, 17, 30, 62, 90, 101)


class Mock:
    """The next token's logits are a row of `table` (V, V), chosen by the last token. Counts the
    rows of each decoding step."""
    compiled, model = False, torch.nn.Module()

    def __init__(self, table):
        self.table, self.head_weight, self.batches = table, torch.eye(len(table)), []
        self.config = SimpleNamespace(vocab_size=len(table), max_position_embeddings=1000)

    def prefill(self, prompt_ids):
        kv = torch.zeros(len(prompt_ids), 1, prompt_ids.shape[1], 2)
        return self.table[prompt_ids], [(kv, kv)]

    def decode(self, ids, positions, attend, seen_by_layer, seen):
        self.batches.append(len(ids))
        return self.table[ids]


def walk(following):
    """A mock that goes from each token to one other, a list, without doubt."""
    table = torch.full((len(following), len(following)), -1e9)
    table[range(len(following)), following] = 0
    return Mock(table)


def tiny(model_type="llama", **fields):
    torch.manual_seed(0)
    return GPT(Config(dict(
        model_type=model_type, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=400) | fields))


def uniforms(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models():
    loaded = {name: GPT.from_pretrained(os.path.join(HF, name)) for name in MODELS[:-1]}
    loaded["lora"] = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"),
                                         adapter=os.path.join(HF, "lora_qwen2"))
    return loaded


@torch.no_grad()
def check(model, prompts, out, temperature=1.0):
    """Log-probs and entropies are those of the trainer's pass over all tokens (test_model.py: which
    is that over each whole sequence); right-padded with zeros; what is not finished has every
    token."""
    (P, G, L), mask = out.ids.shape, out.mask
    lengths = mask.sum(-1)  # (P, G)
    assert out.ids.dtype == torch.int64 and out.finished.shape == (P, G)
    assert torch.equal(mask, torch.arange(L) < lengths[..., None])
    assert (lengths[~out.finished] == L).all()
    for x in (out.ids, out.logps, out.entropy):
        assert x.shape == (P, G, L) and (x[~mask] == 0).all() and not x.requires_grad
    hidden = model.completion_hidden(*pad(prompts), out.ids.flatten(0, 1),
                                     torch.arange(P).repeat_interleave(G))  # (P * G, L, H)
    logp = log_probs(hidden[mask.flatten(0, 1)], model.head_weight, temperature)  # (n, V)
    own = logp.gather(-1, out.ids[mask][:, None])[:, 0]
    torch.testing.assert_close(out.logps[mask], own, atol=1e-4, rtol=0)
    torch.testing.assert_close(out.entropy[mask], entropy(logp), atol=1e-4, rtol=0)


def same(a, *others):
    """The completions of `a` are those of the others, one after the other."""
    for name in ("ids", "mask", "finished", "logps", "entropy"):
        want = torch.cat([getattr(b, name).flatten(0, 1) for b in others])
        atol = 3e-5 if want.is_floating_point() else 0
        torch.testing.assert_close(getattr(a, name).flatten(0, 1), want, atol=atol, rtol=0)


# ---- what the passes of the sampler cost ---------------------------------------------------------

@pytest.mark.parametrize("fixed", (False, True))
def test_no_shape_is_asked_of_the_device(fixed):
    """On the meta device, which has no values to give. Buffers grow, never past what may come; a
    batch that gets smaller is cut to its longest prompt."""
    kv = torch.empty(3, 2, 5, 4, device="meta")  # (P, Hkv, S, D)
    cache, rooms = GroupCache([(kv, kv)], torch.tensor([3, 5, 1]), 3, max_new_tokens=70), set()
    for t in range(70):
        cache.make_room(t)
        if t == 3:
            cache.select(torch.tensor([0, 2]), torch.tensor([[2, 0], [1, 2]]))
        positions, [(prompt_k, _, own_k, _)], (_, own_bias, _) = cache.next_token(
            torch.empty(1, dtype=torch.long, device="meta") if fixed else t)
        rooms.add(own_k.shape[3])
        assert len(own_bias) == (own_k.shape[3] if fixed else t + 1)
    assert rooms == {64, 70} and own_k.shape[:3] == (2, 2, 2)
    assert prompt_k.shape == (2, 2, 3, 4) and positions.shape == (4,)


@pytest.mark.parametrize("rank", (0, 3))
def test_weights_are_cast_once_a_rollout(rank):
    """Regression: 14 casts of adapters in each layer at every token; and no value is waited for."""
    counts = count_of_a_token(2, rank)
    assert counts["casts"] == counts["waits"] == 0 and counts["launches"] > 100


def test_weights_that_are_ready_leave_no_trace(models):
    """Inside, products' types under autocast, biases too; then the very parameters come back, also
    after an error: optimizer and DistributedDataParallel know no others."""
    model = models["lora"]
    own = dict(model.named_parameters())
    for autocast in (False, True):
        with pytest.raises(KeyError), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with ready_to_sample(model):
                inside = {name: p.dtype for name, p in model.named_parameters()}
                raise KeyError
        low = {name for name, dtype in inside.items() if dtype == torch.bfloat16}
        assert low == {name for name in own if autocast and "_proj." in name}
        after = dict(model.named_parameters())
        assert after.keys() == own.keys() and all(after[name] is own[name] for name in own)


@pytest.mark.parametrize("dtype, atol", ((torch.float32, 1e-5), (torch.bfloat16, 0.1)))
def test_packed_products(dtype, atol, monkeypatch):
    """Those of the weight as it was, for rows of any layout and number. What is small, has no
    values or a type that oneDNN does not know stays as it is."""
    w, b = uniforms(40, 24, seed=1).to(dtype), uniforms(40, seed=2).to(dtype)
    assert products.pack(w) is w
    monkeypatch.setattr(products, "PACK_FROM", 0)
    packed = products.pack(w)
    assert packed.is_mkldnn
    for x in (uniforms(3, 1, 24), uniforms(24, 300).t(), uniforms(0, 24)):
        for bias in (torch.zeros(40).to(dtype), b):
            want = torch.nn.functional.linear(x.double(), w.double(), bias.double())
            torch.testing.assert_close(products.linear(x, packed, bias).double(), want,
                                       atol=atol, rtol=0)
    for other in (w.double(), w.half(), w.to("meta")):
        assert products.pack(other) is other


@pytest.mark.parametrize("name", ("lora", "qwen2_sharded"))
def test_packed_weights_sample_the_same(models, name, monkeypatch):
    def run(pack_from):
        monkeypatch.setattr(products, "PACK_FROM", pack_from)
        return sample(models[name], PROMPTS, 4, 12, eos_ids=EOS, noise=uniforms(3, 4, 12))

    monkeypatch.setattr(products.F, "linear", None)
    packed = run(0)  # all products
    monkeypatch.undo()
    same(packed, run(2**18))


@pytest.mark.parametrize("autocast", (False, True), ids=("bfloat16 weights", "autocast"))
def test_large_keys_keep_sampler_and_model_together(autocast):
    """Regression: with key biases as large as Qwen2's, scores rounded to bfloat16 made the sampler
    differ from a forward pass by 0.1 nats a token; inside autocast on a CPU, which is how training
    looks on a GPU, its logits were rounded too."""
    model = tiny("qwen2", vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    for name, p in model.named_parameters():
        if name.endswith(("k_proj.bias", "q_proj.bias")):
            torch.nn.init.normal_(p, std=60 if "k_proj" in name else 12)
    model.to(torch.float32 if autocast else torch.bfloat16)
    prompts = [list(range(3, 20)), [7, 8, 9]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        out = sample(model, prompts, 4, 48, noise=uniforms(2, 4, 48))
        for p, prompt in enumerate(prompts):
            whole = torch.cat((torch.tensor([prompt] * 4), out.ids[p]), dim=1)  # (4, T)
            logits = model(whole)[:, len(prompt) - 1:-1]  # (4, 48, V)
            assert logits.dtype == torch.bfloat16 and out.logps.dtype == torch.float32
            logps = logits.float().log_softmax(-1).gather(-1, out.ids[p, ..., None])[..., 0]
            assert (logps - out.logps[p]).abs().mean() < 0.03


# ---- against whole passes ------------------------------------------------------------------------

@pytest.mark.parametrize("name, temperature, prompts, G, L, eos", (
    *((name, temperature, PROMPTS, 4, 12, EOS) for name in MODELS for temperature in (1.0, 0.7)),
    ("llama_gqa", 1.0, PROMPTS[:2], 2, 150, ()),  # buffers of 64 grow twice
    ("llama_gqa", 1.0, PROMPTS[1:2], 8, 10, ())))
def test_what_is_sampled_is_what_is_scored(models, name, temperature, prompts, G, L, eos):
    """Regressions: (P21) sampled at one temperature and scored at another, the importance ratio of
    an unchanged policy is not 1; (P13) one position counter for prompts of different lengths; with
    one prompt, torch lays the group's queries out in another way, which a view refused."""
    noise = uniforms(len(prompts), G, L)
    out = sample(models[name], prompts, G, L, temperature, eos_ids=eos, noise=noise)
    assert out.finished.any() == bool(eos) and not out.finished.all()
    check(models[name], prompts, out, temperature)


@pytest.mark.parametrize("name", ("llama_gqa", "qwen3"))
@pytest.mark.parametrize("temperature", (0, 1.0))
def test_completions_do_not_depend_on_what_else_is_in_the_batch(models, name, temperature):
    """Regression: left padding shifted the positions of short prompts. A group that shares its
    prompt equals copies of the prompt, and each completion its own single run; noise may be a part
    of something larger, and room for more tokens changes nothing."""
    def run(prompts, noise):
        return sample(models[name], prompts, *noise.shape[1:], temperature, eos_ids=EOS,
                      noise=noise)

    noise = uniforms(4, 3, 20).double().transpose(0, 1)[:, :3]  # (3, 3, 20), not contiguous
    together, part = run(PROMPTS, noise[..., :10]), noise[..., :10].reshape(9, 1, 10)
    copies = [prompt for prompt in PROMPTS for _ in range(3)]
    same(together, run(copies, part))
    same(together, *(run(copies[i:i + 1], part[i:i + 1]) for i in range(9)))
    assert torch.equal(together.ids, run(PROMPTS, noise).ids[..., :10])


def test_a_prompt_is_read_once_and_a_large_vocabulary_drawn_from_in_parts(models, monkeypatch):
    model, read, rows, next_tokens = models["llama_gqa"], [], [], sample_py.next_tokens
    args, prefill = (model, PROMPTS, 4, 9, 1.0, 0, 1.0, (7, 50)), model.prefill
    whole = sample(*args, noise=uniforms(3, 4, 9))
    monkeypatch.setattr(sample_py, "DRAW_ELEMENTS", {"cpu": 5 * model.config.vocab_size})
    monkeypatch.setattr(sample_py, "next_tokens",
                        lambda hidden, *a: rows.append(len(hidden)) or next_tokens(hidden, *a))
    monkeypatch.setattr(model, "prefill", lambda ids: read.append(ids.shape) or prefill(ids))
    same(whole, sample(*args, noise=uniforms(3, 4, 9)))
    assert rows[:3] == [5, 5, 2] and read == [(3, 7)]


def test_nothing_survives_a_call_and_training_comes_after():
    """Regressions: a cache, or its length, that survived the first call spoiled the second (P23);
    tables built inside inference_mode broke the first backward pass, "Inference tensors cannot be
    saved" (P25)."""
    model, fresh = (GPT.from_pretrained(os.path.join(HF, "qwen3")) for _ in range(2))
    with torch.inference_mode():
        sample(model, [[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 2, 3, 80, temperature=0)
    second, first = (sample(m, [[7, 7]], 1, 4, temperature=0) for m in (model, fresh))
    assert torch.equal(second.ids, first.ids) and torch.equal(second.logps, first.logps)
    model(torch.ones(1, 140, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_compiled_steps_make_few_graphs_and_equal_eager():
    """Regression (P68): every new length compiled the step again, until torch gave up. Changing
    numbers of prompts, completions and tokens, a last prompt alone in the middle of its completions
    and from the start; sizes that are equal by chance must not be taken for one size. The backend
    only counts, yet this is the slow test: 15 seconds of one core."""
    graphs, decoding, choose = [], 0, random.Random(0)
    torch._dynamo.reset()

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def gradient(model, prompts, ids):
        model.zero_grad()
        prompt_of = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
        hidden = model.completion_hidden(*pad(prompts), ids.flatten(0, 1), prompt_of)
        hidden.square().sum().backward()
        return model.model.embed_tokens.weight.grad

    eager, compiled = (tiny(vocab_size=40, hidden_size=24, num_attention_heads=4,
                            num_key_value_heads=2, initializer_range=0.3) for _ in range(2))
    compiled.compile_layers(backend=count)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for step in range(40):
            P, G = choose.randint(3 if step < 10 else 1, 3), choose.randint(2, 3)
            L = 70 if step == 20 else choose.randint(2, 8)  # 70: the buffers grow
            prompts = [choose.choices(range(40), k=choose.randint(2, 9)) for _ in range(P)]
            before = len(graphs)
            a, b = (sample(model, prompts, G, L, eos_ids=range(1, 16), noise=uniforms(P, G, L))
                    for model in (eager, compiled))
            same(a, b)
            decoding += len(graphs) - before
            torch.testing.assert_close(*(gradient(model, prompts, a.ids)
                                         for model in (eager, compiled)), atol=1e-3, rtol=1e-4)
    # one prompt or more, in prefill and decode; in training also completions of 2 tokens or more
    assert decoding <= 4 and len(graphs) <= 12 and compiled.compiled
    assert list(compiled.state_dict()) == list(eager.state_dict())  # plain names in checkpoints


# ---- where completions end -----------------------------------------------------------------------

def test_any_of_several_end_tokens_stops_and_is_kept():
    """Regressions (P18, P45): only one end id was honoured, text ran past the end of the turn, and
    finished text counted as truncated; the end token was left out of the mask."""
    model = walk([0, 2, 3, 4, 5, 5])  # 0, 0, 0, ... or 1, 2, 3, 4, 5, 5, ...
    for prompts, L, eos, ids in (
            ([1, 1], 6, (5, 3), [2, 3]), ([1, 3], 6, [5], [2, 3, 4, 5]), ([4], 3, [5], [5]),
            ([1], 4, [5], [2, 3, 4, 5]), ([1], 3, [5], [2, 3, 4]),  # the last that fits, one more
            ([1], 6, (), [2, 3, 4, 5, 5, 5]), ([0], 5, [0], [0])):  # 0 may be one
        out = sample(model, [[p] for p in prompts], 2, L, eos_ids=eos)
        n = len(ids)
        assert out.ids[0].tolist() == [ids + [0] * (L - n)] * 2
        assert out.mask[0].tolist() == [[True] * n + [False] * (L - n)] * 2
        assert out.finished.tolist() == [[ids[-1] in eos] * 2] * len(prompts)
    model.batches.clear()
    sample(model, [[1]] * 3, 2, 500, eos_ids=[3])
    assert len(model.batches) <= 6  # all have ended


def sixth_even(ids):
    """A rule to stop: with the sixth even id."""
    even = [n for n, i in enumerate(ids, 1) if i % 2 == 0]
    return even[5] if len(even) > 5 else None


@pytest.mark.parametrize("eos, stop", (
    ((), sixth_even), (range(0, 130, 9), None), (range(0, 130, 9), sixth_even)))
@pytest.mark.parametrize("name", ("llama_gqa", "qwen3"))
def test_ended_rows_leave_the_batch_and_change_nothing(models, name, eos, stop, monkeypatch):
    """The same draws without any end, cut by hand where the first end is, are what remains when
    ended rows leave: 90 completions that end within and across looks."""
    model, P, G, L, rows = models[name], 3, 30, 40, []
    noise, decode = uniforms(P, G, L, seed=3), model.decode
    endless = sample(model, PROMPTS, G, L, noise=noise)
    monkeypatch.setattr(model, "decode", lambda ids, *a: rows.append(len(ids)) or decode(ids, *a))
    out = sample(model, PROMPTS, G, L, eos_ids=eos, stop=stop, noise=noise)
    assert rows[0] == P * G and rows == sorted(rows, reverse=True) and len(set(rows)) > 3
    ends = torch.zeros(P, G)
    for p, g in np.ndindex(P, G):
        ids = endless.ids[p, g].tolist()
        at_eos = next((n for n, i in enumerate(ids, 1) if i in eos), L + 1)
        ends[p, g] = min(at_eos, stop and stop(ids) or L + 1)
    mask = torch.arange(L) < ends[..., None]
    same(out, Samples(endless.ids * mask, mask, endless.logps * mask, endless.entropy * mask,
                      ends <= L))


class Pieces:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, pieces):
        self.pieces, self.eos_ids = pieces, tuple(i for i, x in enumerate(pieces) if x == "<|end|>")

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


@pytest.mark.parametrize("ending, count, text", (  # a completion, how many of its pieces count
    (["4", "</", "answer", ">", "x", "<|end|>"], 4, "4</answer>"),
    (["4", "</answer>, and", " so", "</answer>"], 2, "4</answer>"),
    (["<think>", "</answer>", "</think>", "</answer>", "x"], 4,
     "<think></answer></think></answer>"),
    (["4", "\nProb", "lem: 1", "+1"], 3, "4"), (["4", "<|end|>", "</answer>"], 2, "4"),
    (["4", "</answer>", "<|end|>"], 2, "4</answer>")))
def test_plain_completions_end_with_their_answer(ending, count, text):
    """Regression: a base model answers, then invents the next question, and that answer was graded.
    0 to 12 pieces in front, so that the end comes at every place of a look, as the last token that
    fits, and behind it; nobody's end changes another's."""
    rows = [["prompt", *["."] * front, *ending] for front in range(13)]
    starts = [1 + sum(map(len, rows[:front])) for front in range(13)]
    tokenizer, L = Pieces([" ", *sum(rows, [])]), 10
    last = {0, *(start + len(row) - 1 for start, row in zip(starts, rows))}
    following = [0 if i in last else i + 1 for i in range(len(tokenizer.pieces))]
    prompts = [[start] for start in starts]
    out = sample(walk(following), prompts, 2, L, eos_ids=tokenizer.eos_ids,
                 stop=plain_stop(tokenizer))
    texts = completion_texts(tokenizer, out, prompts, plain=True)
    for front, start in enumerate(starts):
        n = front + count
        assert out.mask[front].sum(-1).tolist() == [min(n, L)] * 2
        assert out.finished[front].tolist() == [n <= L] * 2
        cut_off = tokenizer.decode(range(start + 1, start + 1 + L))
        assert texts[front] == ["." * front + text if n <= L else cut_off] * 2


def test_texts_that_are_graded():
    """One decode of all ids, without the end token (and nothing else), behind a thought that the
    prompt left open; only those of plain prompts are cut."""
    tokenizer = Pieces(["<|end|>", "a", "</answer>", " more", "prompt", "<think>", "\n"])
    ids = torch.tensor([[[1, 2, 3, 0], [1, 1, 1, 1]], [[0, 0, 0, 0], [1, 2, 3, 1]]])
    mask = torch.arange(4) < torch.tensor([[[4], [4]], [[1], [3]]])
    samples, prompts = Samples(ids, mask, mask, mask, None), [[4], [4, 5, 6]]
    for plain, rest in ((False, "</answer> more"), (True, "</answer>")):
        assert completion_texts(tokenizer, samples, prompts, plain) == [
            ["a" + rest, "aaaa"], ["<think>\n", "<think>\na" + rest]]


# ---- the distribution ----------------------------------------------------------------------------

def test_draw_inverts_the_cumulative_distribution():
    """And never takes what has no probability, whatever is rounded."""
    u = uniforms(500).double()[:, None]
    probs = torch.randn(500, 3000, generator=torch.Generator().manual_seed(1)).softmax(-1)
    cumulative = probs.double().cumsum(-1)
    cumulative /= cumulative[:, -1:].clone()
    clear = ((cumulative - u).abs() > 1e-8).all(-1)
    assert clear.sum() > 480
    assert torch.equal(draw(probs, u[:, 0])[clear], (cumulative <= u).sum(-1)[clear])

    row, below_one = torch.tensor([[0, 0, 0.2689, 0, 0.7311, 0, 0]]), 1 - 2**-24
    for number, token in ((0.0, 2), (2**-149, 2), (0.2688, 2), (0.2690, 4), (below_one, 4),
                          (1 - 2**-30, 4), (1.0, 4)):  # what float32 rounds up to 1
        assert draw(row, torch.tensor([number], dtype=torch.float64)).item() == token
    for share in (-1e-18, 0.0):  # what is left for a block may be rounded below nothing
        assert invert(torch.tensor([[0, 0.5, 0.5]]), torch.tensor([share]).double())[0] == 1
    wide = torch.zeros(400, 6000)
    wide[:, 100:1100] = torch.randn(400, 1000).mul(4).softmax(-1)
    wide[:, 103] = 0
    for number in (0.0, below_one):
        ids = draw(wide, torch.full((400,), number))
        assert (wide.gather(-1, ids[:, None]) > 0).all()


HALVES, UNEVEN = [[0.5, 0.25, 0.125, 0.125]], [[0.03, 0.64, 0.09, 0.24]]


@pytest.mark.parametrize("probs, options, kept", (
    *((HALVES, dict(top_p=top_p), [[*range(n)]]) for top_p, n in (
        (0.75, 2), (0.5, 1), (0.01, 1), (1.0, 4), (0.76, 3), (0.999, 4))),
    ([*HALVES, [0.125, 0.5, 0.125, 0.25]], dict(top_p=0.75), [[0, 1], [1, 3]]),  # in any order
    *((UNEVEN, dict(top_k=top_k), [ids]) for top_k, ids in (
        (0, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3]))),
    (UNEVEN, dict(top_p=0.7), [[1, 3]]), (UNEVEN, dict(top_p=1e-50), [[1]]),  # 0 in float32
    (UNEVEN, dict(top_k=2, top_p=0.7), [[1]]),  # 0.73 of what top_k leaves
    (UNEVEN, dict(top_k=2, top_p=0.74), [[1, 3]])))
def test_top_p_and_top_k_at_the_exact_boundary(probs, options, kept):
    """Regression (P20): one id too many, or none at all."""
    rows = restrict(torch.tensor(probs).log(), **options)
    torch.testing.assert_close(rows.sum(-1), torch.ones(len(rows)))
    assert [row.nonzero()[:, 0].tolist() for row in rows] == kept
    assert restrict(torch.zeros(1, 5), top_k=2).count_nonzero() == 2  # ties: k and no more


HIGH = torch.full((1, 1, 1), 0.99)


@pytest.mark.parametrize("logits, options, token, logp, H", (
    # at temperature 1 this number would draw the other
    ((0, 1), dict(temperature=0.5, noise=torch.full((1, 1, 1), 0.2)), 1, -0.126928, 0.365334),
    ((2, 1, 0), dict(top_k=1, noise=HIGH), 0, -0.407606, 0.832395),
    ((2, 1, 0), dict(top_k=2, noise=HIGH), 1, -1.407606, 0.832395),
    ((2, 1, 0), dict(top_p=0.7, noise=HIGH), 1, -1.407606, 0.832395),
    # of the cooled distribution, where the first has 0.867; at temperature 1 it has 0.665
    ((2, 1, 0), dict(top_p=0.8, temperature=0.5, noise=HIGH), 0, -0.142932, 0.441057),
    ((1, 2, 0), dict(temperature=0), 1, -0.407606, 0.832395),
    ((0, 5, -math.inf), dict(temperature=0), 1, -0.006715, 0.040180)))
def test_hand_worked_log_probs(logits, options, token, logp, H):
    """Regressions (P19, P21, P22): temperature 0 divided by zero or always gave token 0 (its
    log-probs are those at temperature 1); sampled at temperature 0.5, scored at 1; with top_k
    scored over the ids that it keeps, which says 0; entropy nan where a token is impossible."""
    model = Mock(torch.ones(len(logits), 1))
    model.head_weight = torch.tensor(logits, dtype=torch.float32)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = sample(model, [[0]], 1, 1, **options)
    assert out.ids.item() == token
    assert out.logps.item() == pytest.approx(logp, abs=2e-6)
    assert out.entropy.item() == pytest.approx(H, abs=2e-6)


# ---- randomness ----------------------------------------------------------------------------------

def test_draws_are_reproducible_and_leave_the_global_state_alone(models):
    """Regression (P63): completions of one group that are all the same."""
    def run(**options):
        return sample(models["llama_gqa"], PROMPTS, 2, 8, **options).ids

    state, generator = torch.get_rng_state(), torch.Generator()
    first, second = run(generator=generator.manual_seed(4)), run(generator=generator)
    assert torch.equal(first, run(generator=generator.manual_seed(4)))
    assert not torch.equal(first, second) and not torch.equal(first[:, 0], first[:, 1])
    run(noise=uniforms(3, 2, 8))
    assert torch.equal(torch.get_rng_state(), state)
    first = run()  # neither generator nor noise: the global state
    torch.set_rng_state(state)
    assert torch.equal(first, run())


def test_seeded_uniforms_depend_on_the_key_alone():
    """The same in every process: these were drawn in another one, with another hash seed."""
    state, key = torch.get_rng_state(), (1, "sample", 7)
    numbers = seeded_uniforms(key, 3)
    assert numbers.tolist() == pytest.approx([0.215974, 0.100564, 0.628359], abs=1e-6)
    a = seeded_uniforms(key, 2, 3, 1000)
    assert torch.equal(torch.get_rng_state(), state)
    for other in ((1, "sample", 8), (2, "sample", 7), (1, "other", 7), (1, "sample")):
        assert not torch.equal(a, seeded_uniforms(other, 2, 3, 1000))
    assert a.min() >= 0 and a.max() < 1 and abs(a.mean() - 0.5) < 0.02


# ---- empty and refused ---------------------------------------------------------------------------

def test_no_prompts_and_no_tokens(models):
    """Regression (P24): IndexError where no completion token exists at all."""
    model = models["llama_gqa"]
    for prompts, G, L in (([], 4, 5), ([], 1, 0), ([[1, 2], [3]], 2, 0)):
        out = sample(model, prompts, G, L)
        assert not out.finished.any() and out.ids.shape == (len(prompts), G, L)
        check(model, prompts, out)
    for n, L in ((512, 0), (511, 1)):  # a prompt that fills the window
        assert sample(model, [[1] * n], 1, L).mask.shape == (1, 1, L)


REFUSED = [
    (dict(prompts=[[1], []]), "prompt 1 is empty"),
    (dict(prompts=[[1], [3, 131]]), "prompt 1 holds token id 131, the model knows 0 to 130"),
    (dict(prompts=[[1, -2, 5]]), "prompt 0 holds token id -2"),
    (dict(prompts=[[1] * 509]), "no room for the completion: prompt 0 has 509 tokens, with 4 new "
     r"ones .* 512 \(max_position_embeddings\)"),
    *((dict([setting]), "{} {}".format(*setting)) for setting in (
        ("group_size", 0), ("max_new_tokens", -1), ("temperature", -0.1), ("temperature", math.nan),
        ("temperature", math.inf), ("top_k", -1), ("top_p", 0), ("top_p", 1.01),
        ("top_p", math.nan))),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused_arguments(models, change, message):
    arguments = {**dict(prompts=[[1, 2]], group_size=2, max_new_tokens=4), **change}
    with pytest.raises(ValueError, match=f"sample: .*{message}"):
        sample(models["llama_gqa"], **arguments)


@pytest.mark.parametrize("temperature", (0, 1.0))
def test_logits_that_are_not_finite_are_refused(temperature):
    """Regression: a diverged model ended in "index 131 is out of bounds" (on a GPU: an assertion
    that kills the process)."""
    model = GPT.from_pretrained(os.path.join(HF, "llama_gqa"))
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        sample(model, PROMPTS, 2, 4, temperature)


# ---- the command ---------------------------------------------------------------------------------

@pytest.fixture
def run(tmp_path, capsys):
    """The command on a model that knows nothing, with the byte tokenizer of the default run."""
    write_byte_tokenizer(tmp_path)
    tiny(vocab_size=280).save_pretrained(tmp_path)

    def run(*arguments):
        given = [f"--model={tmp_path}", "--prompt=47+12?", "--gold=59", "--group=3", "--device=cpu"]
        try:
            code = command(sample_py.main, [*given, *arguments])
        except SystemExit as e:  # argparse
            code = e.code
        out, err = capsys.readouterr()
        assert (code, "error: " in err) in ((2, True), (0, False))
        assert code or err.startswith("sampling 3 completions of up to ")
        return err if code else out
    return run


def test_command_shows_a_group(run):
    out = run("--max_new_tokens=12")
    lines = out.splitlines()
    assert lines[0] == "47+12?   (gold: 59)"
    assert [line.split()[:2] for line in lines[2:5]] == [["0.0", "+0.00"]] * 3
    assert all(4 < float(line.split()[2]) < math.log(280) for line in lines[2:5])
    assert lines[-1] == "3 of 3 were cut off at max_new_tokens=12"
    assert run("--max_new_tokens=12") == out != run("--max_new_tokens=12", "--seed=1")
    assert "max_new_tokens=392\n" in run("--temperature=0", "--system_prompt=")  # all there is


def test_command_rewards_what_it_sampled(run, monkeypatch, tmp_path):
    """Two right completions and a wrong one, which share most tokens. Of a plain prompt only what
    comes up to the first answer counts."""
    right, wrong = ("<reasoning>\n1\n</reasoning>\n<answer>\n%s\n</answer>" % n for n in (59, 60))
    rows, stops = [[*text.encode(), 269] for text in (right, wrong, right)], []

    def fake(model, prompts, G, L, *args, noise, stop):
        assert (len(prompts), G, L) == tuple(noise.shape) and args == (0.5, 7, 0.9, (269,))
        stops.append(stop and stop(list(b"<answer>4</answer> <answer>")))
        ids, lengths = pad(rows)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return Samples(ids[None], mask[None], mask[None] * 0.0, mask[None] * 0.5,
                       torch.ones(1, 3, dtype=torch.bool))

    monkeypatch.setattr(sample_py, "sample", fake)
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ("--temperature=0.5", "--top_k=7", "--top_p=0.9", "--html=~/group.html")
    lines = run(*flags).splitlines()
    n, marked = str(len(rows[0])), "59[[\\n</answer><|end|>]]"
    assert [line.split()[:4] for line in lines[2:5]] == [
        ["20.0", "+3.33", "0.500", n], ["10.0", "-6.67", "0.500", n], ["20.0", "+3.33", "0.500", n]]
    assert lines[2].endswith(marked) and len(lines) == 6  # all ended: no word about the limit
    assert "-6.67" in (tmp_path / "group.html").read_text()
    rows[1] = [*(right + wrong).encode()]
    rewards = [[line.split()[0] for line in run(*flags, *style).splitlines()[2:5]]
               for style in ((), ("--prompt_style=plain",))]
    assert rewards == [["20.0", "0.0", "20.0"], ["20.0"] * 3] and stops == [None, None, 18]


def test_command_says_whose_template_counts(run, tmp_path, capsys, monkeypatch):
    """Regression: it used the template of an adapter without a word."""
    adapter = tmp_path / "adapter"
    shutil.copytree(os.path.join(HF, "lora_qwen2"), adapter)
    (adapter / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    monkeypatch.setattr(GPT, "from_pretrained", lambda *_, **__: tiny(vocab_size=280))
    arguments = [f"--model={tmp_path}", "--prompt=1+1?", "--max_new_tokens=1", "--device=cpu"]
    for more in ([], [f"--adapter={adapter}/"]):
        command(sample_py.main, arguments + more)
        assert ("tokenizer and template of" in capsys.readouterr().err) == bool(more)


def test_command_refuses_in_one_message(run):
    """Regressions: --max_new_tokens=-1 ended in "Trying to create tensor with negative dimension",
    --device=abacus in a traceback."""
    for extra, message in (
            ("--group=0", "at least 1"), ("--max_new_tokens=-1", "at least 1"),
            ("--group=x", "invalid int"), ("--modle=a", "--modle=a"), ("--prompt_style=x", "plain"),
            ("--template_variables=x", "template_variables: expected names with values"),
            ("--template_variables=[1]", "template_variables: expected names with values"),
            ('--template_variables={"self": 1}', "template_variables: 'self' cannot be set"),
            ("--temperature=-1", "temperature"), ("--top_p=2", "top_p 2"),
            ("--device=abacus", "abacus"), ("--model=none", "none: no"),
            ("--adapter=.", "adapter_config.json"), ("--max_new_tokens=399", "no room for"),
            ("--prompt=" + "a" * 500, "no room for")):
        assert message in run(extra), extra
