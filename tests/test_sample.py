"""sample.py with real tiny models (fixtures/hf) against full forward passes, and with a mock model whose distributions are known."""
import math
import os
import subprocess
import re
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample as sample_py
from gtpo import conflict_weights, token_logps
from model import GPT, Config
from sample import completion_texts, draw, group_page, restrict, sample, seeded_uniforms, show_completion, show_group
from lib.arithmetic import write_byte_tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HF = os.path.join(ROOT, "tests", "fixtures", "hf")
NAMES = ("llama_gqa", "qwen2_tied", "qwen2_sharded", "qwen3")
PROMPTS = [[3, 9, 4], [5, 1, 8, 2, 7, 7, 30], [11]]


class Mock:
    """The next token's logits are a row of `table` (V, V), chosen by the last token. Counts the rows of each decoding step."""

    def __init__(self, table):
        self.table, self.head_weight, self.batches = torch.tensor(table), torch.eye(len(table)), []
        self.config = SimpleNamespace(vocab_size=len(table), max_position_embeddings=1000)

    def prefill(self, prompt_ids):
        kv = torch.zeros(len(prompt_ids), 1, prompt_ids.shape[1], 2)
        return self.table[prompt_ids], [(kv, kv)]

    def decode(self, ids, cache):
        self.batches.append(len(ids))
        cache.length += 1
        return self.table[ids]


def always(*logits):
    return Mock([list(map(float, logits))] * len(logits))


def uniforms(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models():
    loaded = {name: GPT.from_pretrained(os.path.join(HF, name)) for name in NAMES}
    loaded["lora"] = GPT.from_pretrained(os.path.join(HF, "qwen2_tied"), adapter=os.path.join(HF, "lora_qwen2"))
    return loaded


def full_logits(model, prompt, completion):
    """Logits that predict the completion's tokens, from one forward pass over both, (L, V) float64."""
    with torch.no_grad():
        return model(torch.tensor([prompt + completion]))[0, len(prompt) - 1:-1].double()


def check_against_full_forward(model, prompts, out, temperature=1.0, tol=1e-4):
    for p, prompt in enumerate(prompts):
        for ids, mask, logps, entropy in zip(out.ids[p], out.mask[p], out.logps[p], out.entropy[p]):
            n = int(mask.sum())
            want = (full_logits(model, prompt, ids[:n].tolist()) / temperature).log_softmax(-1)
            torch.testing.assert_close(logps[:n].double(), want.gather(-1, ids[:n, None])[:, 0], atol=tol, rtol=0)
            torch.testing.assert_close(entropy[:n].double(), -(want.exp() * want).sum(-1), atol=tol, rtol=0)


def check_padding(out):
    """Right-padded, with zeros under the padding; an end token closes what is finished."""
    P, G, L = out.ids.shape
    lengths = out.mask.sum(-1)
    assert out.ids.dtype == torch.int64 and out.mask.dtype == torch.bool == out.finished.dtype and out.finished.shape == (P, G)
    assert torch.equal(out.mask, torch.arange(L) < lengths[..., None])
    for x in (out.ids, out.logps, out.entropy):
        assert x.shape == (P, G, L) and (x[~out.mask] == 0).all() and not x.requires_grad
    assert (lengths[~out.finished] == L).all()


# ---------------------------------------------------------------------------------------------------------------------------
# against other people's numbers, and against the full forward pass

@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_that_of_transformers(models, name):
    """Regression: one position counter for prompts of different lengths answers the longest sensibly and no other."""
    z = {k: torch.from_numpy(v) for k, v in np.load(os.path.join(HF, name, "expected.npz")).items()}
    prompts = [row[m.bool()].tolist() for row, m in zip(z["prompt_ids"], z["prompt_mask"])]
    assert [len(p) for p in prompts] == [5, 9]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = sample(models[name], prompts, 2, z["greedy_ids"].shape[1], temperature=0)
    for g in range(2):
        assert torch.equal(out.ids[:, g], z["greedy_ids"])
        torch.testing.assert_close(out.logps[:, g], z["greedy_token_logprobs"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", (*NAMES, "lora"))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_logps_and_entropies_are_those_of_the_loss(models, name, temperature):
    """Regression: sampled at one temperature and scored at another, the importance ratio of an unchanged policy is not 1."""
    model = models[name]
    out = sample(model, PROMPTS, 4, 12, temperature, eos_ids=(5, 17, 30, 62, 90, 101), noise=uniforms(3, 4, 12))
    check_padding(out)
    assert out.finished.any() and not out.finished.all()
    prompt_ids = torch.zeros(3, 7, dtype=torch.long)
    for i, prompt in enumerate(PROMPTS):
        prompt_ids[i, :len(prompt)] = torch.tensor(prompt)
    with torch.no_grad():
        hidden = model.completion_hidden(prompt_ids, torch.tensor([3, 7, 1]), out.ids.flatten(0, 1), torch.arange(3).repeat_interleave(4))
        logps, entropy = token_logps(hidden[out.mask.flatten(0, 1)], model.head_weight, out.ids[out.mask], temperature)
    torch.testing.assert_close(out.logps[out.mask], logps, atol=1e-4, rtol=0)
    torch.testing.assert_close(out.entropy[out.mask], entropy, atol=1e-4, rtol=0)
    check_against_full_forward(model, PROMPTS, out, temperature)


def test_a_long_completion_is_the_full_forward(models):
    """150 tokens: the buffers of 64 grow twice, the second time to what is left."""
    model = models["llama_gqa"]
    out = sample(model, PROMPTS[:2], 2, 150, noise=uniforms(2, 2, 150))
    assert out.mask.all()
    check_against_full_forward(model, PROMPTS[:2], out, tol=2e-4)


@pytest.mark.parametrize("name", ("llama_gqa", "qwen3"))
@pytest.mark.parametrize("temperature", (0, 1.0))
def test_each_row_equals_its_own_single_run(models, name, temperature):
    """Regression: left padding shifted the positions of short prompts. Completions do not depend on what else is in the batch."""
    noise = uniforms(3, 3, 10)
    together = sample(models[name], PROMPTS, 3, 10, temperature, noise=noise)
    for p, prompt in enumerate(PROMPTS):
        for g in range(3):
            alone = sample(models[name], [prompt], 1, 10, temperature, noise=noise[p:p + 1, g:g + 1])
            assert torch.equal(alone.ids[0, 0], together.ids[p, g])
            torch.testing.assert_close(alone.logps[0, 0], together.logps[p, g], atol=2e-5, rtol=0)
            torch.testing.assert_close(alone.entropy[0, 0], together.entropy[p, g], atol=2e-5, rtol=0)


def test_a_shared_prompt_equals_separate_prompts(models):
    noise = uniforms(3, 4, 9)
    shared = sample(models["qwen2_tied"], PROMPTS, 4, 9, eos_ids=(7, 50), noise=noise)
    separate = sample(models["qwen2_tied"], [p for p in PROMPTS for _ in range(4)], 1, 9, eos_ids=(7, 50), noise=noise.view(12, 1, 9))
    assert torch.equal(shared.ids, separate.ids.view(3, 4, 9)) and torch.equal(shared.mask, separate.mask.view(3, 4, 9))
    torch.testing.assert_close(shared.logps, separate.logps.view(3, 4, 9), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_one_prompt_and_a_group(models, name):
    """Regression: with a single prompt, torch lays the group's queries out in another way, which a view refused."""
    out = sample(models[name], PROMPTS[1:2], 8, 10, eos_ids=(5, 17), noise=uniforms(1, 8, 10))
    check_padding(out)
    check_against_full_forward(models[name], PROMPTS[1:2], out)


def test_each_prompt_is_read_once(models, monkeypatch):
    model, tokens = models["llama_gqa"], []
    prefill = model.prefill
    monkeypatch.setattr(model, "prefill", lambda ids: tokens.append(tuple(ids.shape)) or prefill(ids))
    sample(model, [[3] * 20, [4] * 9], 8, 3)
    assert tokens == [(2, 20)]


@pytest.mark.parametrize("name", ("llama_gqa", "qwen3"))
def test_finished_rows_leave_the_batch_and_change_nothing(models, name, monkeypatch):
    """The same draws without end tokens, cut behind the first end token by hand, are what remains when finished rows leave."""
    model, P, G, L, rows = models[name], 3, 6, 40, []
    eos, noise = tuple(range(0, 130, 9)), uniforms(3, 6, 40, seed=3)                # about every ninth token ends a completion
    endless = sample(model, PROMPTS, G, L, noise=noise)
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda ids, cache: rows.append(len(ids)) or decode(ids, cache))
    out = sample(model, PROMPTS, G, L, eos_ids=eos, noise=noise)
    assert rows[0] == P * G and rows == sorted(rows, reverse=True) and len(set(rows)) > 3
    for p in range(P):
        for g in range(G):
            ids = endless.ids[p, g].tolist()
            n = next((t + 1 for t, i in enumerate(ids) if i in eos), L)
            assert out.ids[p, g].tolist() == ids[:n] + [0] * (L - n) and int(out.mask[p, g].sum()) == n
            assert bool(out.finished[p, g]) == (ids[n - 1] in eos)
            torch.testing.assert_close(out.logps[p, g, :n], endless.logps[p, g, :n], atol=3e-5, rtol=0)
            torch.testing.assert_close(out.entropy[p, g, :n], endless.entropy[p, g, :n], atol=3e-5, rtol=0)
    check_padding(out)


def test_a_large_vocabulary_is_drawn_from_a_few_rows_at_a_time(models, monkeypatch):
    args = models["llama_gqa"], PROMPTS, 4, 9
    whole = sample(*args, eos_ids=(7, 50), noise=uniforms(3, 4, 9))
    monkeypatch.setattr(sample_py, "DRAW_ELEMENTS", 5 * models["llama_gqa"].config.vocab_size)                     # 5 of 12 rows, then 2
    parts = sample(*args, eos_ids=(7, 50), noise=uniforms(3, 4, 9))
    assert torch.equal(whole.ids, parts.ids) and torch.equal(whole.mask, parts.mask) and torch.equal(whole.finished, parts.finished)
    torch.testing.assert_close(whole.logps, parts.logps, atol=1e-5, rtol=0)
    torch.testing.assert_close(whole.entropy, parts.entropy, atol=1e-5, rtol=0)


def test_nothing_survives_a_call(models):
    """Regression: a cache, or its length, that survived the first call spoiled the second."""
    model = GPT.from_pretrained(os.path.join(HF, "llama_gqa"))
    sample(model, [[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 2, 3, 80, temperature=0)
    second = sample(model, [[7, 7]], 1, 4, temperature=0)
    fresh = sample(GPT.from_pretrained(os.path.join(HF, "llama_gqa")), [[7, 7]], 1, 4, temperature=0)
    assert torch.equal(second.ids, fresh.ids) and torch.equal(second.logps, fresh.logps)


def test_training_after_sampling_also_on_longer_input():
    """Regression: "Inference tensors cannot be saved for backward" at the first update after sampling."""
    model = GPT.from_pretrained(os.path.join(HF, "qwen3"))
    with torch.inference_mode():
        sample(model, [[1, 2, 3]], 2, 5)
    assert not sample(model, [[1, 2, 3]], 2, 5).logps.requires_grad
    model(torch.ones(1, 50, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ("qwen3", "lora"))
def test_autocast(models, name):
    """As train.py runs on a GPU: float32 weights, bfloat16 products, the same for the sampler and the loss."""
    model = models[name]
    with torch.autocast("cpu", torch.bfloat16):
        out = sample(model, PROMPTS[:1], 4, 70, noise=uniforms(1, 4, 70))
        with torch.no_grad():
            hidden = model.completion_hidden(torch.tensor(PROMPTS[:1]), torch.tensor([3]), out.ids[0], torch.zeros(4, dtype=torch.long))
            logps, entropy = token_logps(hidden.flatten(0, 1), model.head_weight, out.ids.flatten())
    assert out.logps.dtype == out.entropy.dtype == torch.float32
    assert (out.logps.flatten() - logps).abs().mean() < 0.1 and (out.entropy.flatten() - entropy).abs().mean() < 0.1


def test_bfloat16_model(models):
    model = GPT.from_pretrained(os.path.join(HF, "llama_gqa"), dtype=torch.bfloat16)
    out = sample(model, PROMPTS, 3, 10, noise=uniforms(3, 3, 10))
    assert out.logps.dtype == out.entropy.dtype == torch.float32
    check_against_full_forward(model, PROMPTS, out, tol=0.2)


# ---------------------------------------------------------------------------------------------------------------------------
# end tokens

def cycle(*path, size=16):
    """A mock that goes along the path without doubt, and then round the last token."""
    table = [[-1e9] * size for _ in range(size)]
    for a, b in zip(path, path[1:] + path[-1:]):
        table[a][b] = 0.0
    return Mock(table)


def test_any_of_several_end_tokens_stops_and_is_kept():
    """Regression: only one end id was honoured, text ran past the end of the turn, and finished text counted as truncated."""
    out = sample(cycle(1, 5, 9, 12, 3, 11), [[1]], 2, 8, eos_ids=(11, 12))
    assert out.ids[0].tolist() == [[5, 9, 12, 0, 0, 0, 0, 0]] * 2
    assert out.mask[0].tolist() == [[True] * 3 + [False] * 5] * 2 and out.finished.all()
    out = sample(cycle(1, 5, 9, 12, 3, 11), [[1]], 2, 8, eos_ids=[11])
    assert out.ids[0, 0].tolist() == [5, 9, 12, 3, 11, 0, 0, 0] and out.finished.all()
    check_padding(out)


def test_end_token_at_the_edges():
    model = cycle(1, 5, 9, 12)
    for L, finished in ((1, False), (2, False), (3, True), (4, True)):              # 12 is the third token: also as the last one that fits
        out = sample(model, [[1]], 1, L, eos_ids=(12,))
        assert out.finished.tolist() == [[finished]] and out.ids[0, 0].tolist() == [5, 9, 12, 0][:L]
    out = sample(model, [[9], [1]], 1, 3, eos_ids=(12,))                            # the very first token
    assert out.ids[:, 0].tolist() == [[12, 0, 0], [5, 9, 12]] and out.finished.all()
    assert not sample(model, [[1]], 1, 5).finished.any()                            # no end ids: never finished
    out = sample(cycle(0, 0), [[0]], 1, 5, eos_ids=(0,))                            # the end id may be 0, which padding holds, too
    assert out.mask[0, 0].tolist() == [True] + [False] * 4 and out.finished.all()


def test_sampling_stops_when_all_have_ended():
    model = cycle(1, 5, 9, 12)
    sample(model, [[1]] * 3, 2, 500, eos_ids=(12,))
    assert len(model.batches) <= 6


# ---------------------------------------------------------------------------------------------------------------------------
# the distribution

def test_draw_inverts_the_cumulative_distribution():
    logits, u = torch.randn(500, 23, generator=torch.Generator().manual_seed(1)) * 3, uniforms(500)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    want = (cumulative <= u.double()[:, None]).sum(-1)
    clear = ((cumulative - u.double()[:, None]).abs() > 1e-6).all(-1)
    assert clear.sum() > 480 and torch.equal(draw(logits.softmax(-1), u)[clear], want[clear])


def test_draw_never_takes_what_has_no_probability():
    inf, below_one = math.inf, 1 - 2**-24
    row = torch.tensor([[-inf, -inf, 0.0, -inf, 1.0, -inf, -inf]])
    assert [draw(row.softmax(-1), torch.tensor([u])).item() for u in (0.0, 2**-149, 0.2689, 0.2690, below_one)] == [2, 2, 2, 4, 4]
    u64 = torch.tensor([math.nextafter(1, 0), 1 - 2**-30], dtype=torch.float64)      # float64 numbers that float32 rounds up to 1
    assert draw(row.softmax(-1).expand(2, -1), u64).tolist() == [4, 4]
    wide = torch.full((400, 6000), -inf)
    wide[:, 100:1100] = torch.randn(400, 1000, generator=torch.Generator().manual_seed(1)) * 4
    wide[:, 103] = -inf
    for u in (0.0, below_one):
        ids = draw(wide.softmax(-1), torch.full((400,), u))
        assert (wide.gather(-1, ids[:, None]) > -inf).all()
    assert draw(torch.tensor([[0.0, 1.0, 0.0]]).expand(2, -1), torch.tensor([0.0, below_one])).tolist() == [1, 1]


def chi_square(counts, probs):
    want = counts.sum() * probs
    return ((counts - want) ** 2 / want).sum().item()


def test_draw_follows_the_distribution():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625], dtype=torch.float64)
    ids = draw(probs.float().expand(20000, -1), uniforms(20000))
    assert chi_square(torch.bincount(ids, minlength=5).double(), probs) < 18.5       # 4 degrees of freedom: 1 in 1000


@pytest.mark.parametrize("temperature", (1.0, 0.5))
def test_completions_follow_the_distribution(temperature):
    """Every transition of a Markov chain as often as its logits say; the draws of different tokens and rows are independent."""
    model = Mock((torch.randn(4, 4, generator=torch.Generator().manual_seed(2)) * 0.8).tolist())
    out = sample(model, [[0], [1]], 100, 100, temperature, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([0, 1]).view(2, 1, 1).expand(2, 100, 1)
    pairs = torch.bincount((torch.cat((first, out.ids[..., :-1]), -1) * 4 + out.ids).flatten(), minlength=16).view(4, 4).double()
    for counts, logits in zip(pairs, model.table.double()):
        assert counts.sum() > 500 and chi_square(counts, (logits / temperature).softmax(-1)) < 16.3      # 3 degrees of freedom: 1 in 1000


def kept(logits, **options):
    return [(row > -math.inf).nonzero()[:, 0].tolist() for row in restrict(torch.as_tensor(logits), **options)]


def test_top_p_at_the_exact_boundary():
    """Regression: one id too many, or none at all."""
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    for top_p, want in ((0.75, [0, 1]), (0.5, [0]), (0.01, [0]), (1.0, [0, 1, 2, 3]), (0.76, [0, 1, 2]), (0.999, [0, 1, 2, 3])):
        assert kept(probs.log(), top_p=top_p) == [want], top_p
    assert kept(probs[:, [2, 0, 3, 1]].log(), top_p=0.75) == [[1, 3]]               # any order of the vocabulary
    assert kept(torch.cat((probs, probs.flip(-1))).log(), top_p=0.6) == [[0, 1], [2, 3]]            # each row its own


def test_top_k_and_top_p():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    assert [kept(logits, top_k=k) for k in (0, 1, 2, 3, 4, 9)] == [[[0, 1, 2, 3]], [[1]], [[1, 3]], [[1, 2, 3]], [[0, 1, 2, 3]], [[0, 1, 2, 3]]]
    assert len(kept(torch.zeros(1, 5), top_k=2)[0]) == 2                       # ties: k and no more
    assert kept(logits, top_k=2, top_p=0.7) == [[1]]                                # e^3 has 0.731 of the mass of the two that top_k leaves
    assert kept(logits, top_k=2, top_p=0.74) == [[1, 3]]
    assert kept(logits, top_p=0.7) == [[1, 3]]                                      # and 0.644 of the whole
    assert torch.equal(restrict(logits), logits)


def test_sampling_stays_inside_top_k_and_top_p():
    model = always(0, 3, 1, 2)
    assert set(sample(model, [[0]], 50, 20, top_k=2).ids.flatten().tolist()) == {1, 3}
    assert set(sample(model, [[0]], 50, 20, top_p=0.5).ids.flatten().tolist()) == {1}
    assert set(sample(model, [[0]], 50, 20).ids.flatten().tolist()) == {0, 1, 2, 3}
    assert set(sample(model, [[0]], 50, 20, temperature=0.5, top_p=0.8).ids.flatten().tolist()) == {1}         # top_p of the cooled distribution: 0.865


def test_greedy():
    """Regression: division by zero, an error or always token 0. Log-probs are those at temperature 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = sample(always(1.0, 2.0, 0.5), [[0], [1, 2]], 3, 5, temperature=0)
    assert (out.ids == 1).all()
    logps = torch.tensor([1.0, 2.0, 0.5]).log_softmax(-1)
    torch.testing.assert_close(out.logps, logps[1].expand(2, 3, 5))
    torch.testing.assert_close(out.entropy, -(logps.exp() * logps).sum().expand(2, 3, 5))


def test_hand_worked_logps():
    """Regression: at temperature 0.5 scored at 1; with top_k scored over the ids that it keeps, which says 0."""
    out = sample(always(0, 1), [[0]], 1, 1, temperature=0.5, noise=torch.full((1, 1, 1), 0.9))
    assert out.ids.item() == 1 and out.logps.item() == pytest.approx(-0.126928, abs=1e-6)
    logits, H = torch.tensor([[0.0, 1.0]]), torch.eye(2)
    assert token_logps(logits, H, torch.tensor([1]), 0.5)[0].item() == pytest.approx(-0.126928, abs=1e-6)
    for options in (dict(top_k=1), dict(top_p=0.1)):
        out = sample(always(2, 1, 0), [[0]], 1, 1, **options)
        assert out.ids.item() == 0 and out.logps.item() == pytest.approx(-0.407606, abs=1e-6)
        assert out.entropy.item() == pytest.approx(0.832395, abs=1e-5)              # of the whole distribution: 0.665241, 0.244728, 0.090031
    model = always(0, 0, 0)                                                         # a token of logit -inf: ln 2, not nan
    model.table, model.head_weight = torch.ones(3, 1), torch.tensor([[0.0], [-math.inf], [0.0]])
    assert torch.allclose(sample(model, [[0]], 1, 3).entropy, torch.tensor(math.log(2)))


# ---------------------------------------------------------------------------------------------------------------------------
# randomness

def test_generator_makes_draws_reproducible_and_leaves_global_state_alone(models):
    model = models["llama_gqa"]
    state = torch.get_rng_state()
    a, b = (sample(model, PROMPTS, 2, 8, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    c = sample(model, PROMPTS, 2, 8, generator=torch.Generator().manual_seed(5))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.logps, b.logps) and not torch.equal(a.ids, c.ids)
    assert not torch.equal(a.ids[:, 0], a.ids[:, 1])                                # the members of a group differ
    sample(model, PROMPTS, 2, 8, noise=uniforms(3, 2, 8))
    sample(model, PROMPTS, 2, 8, temperature=0, noise=uniforms(3, 2, 8))
    assert torch.equal(torch.get_rng_state(), state)
    g = torch.Generator().manual_seed(4)
    first, second = sample(model, PROMPTS, 2, 8, generator=g), sample(model, PROMPTS, 2, 8, generator=g)
    assert torch.equal(first.ids, a.ids) and not torch.equal(first.ids, second.ids)
    torch.manual_seed(3)
    first = sample(model, PROMPTS, 2, 8)                                            # neither: the global state
    torch.manual_seed(3)
    assert torch.equal(first.ids, sample(model, PROMPTS, 2, 8).ids)


def test_noise_may_be_a_slice_of_something_larger(models):
    noise = uniforms(2, 3, 20).double().transpose(0, 1)                             # (P, G, L), not contiguous
    a = sample(models["qwen3"], PROMPTS, 2, 8, noise=noise[:, :, :8])
    b = sample(models["qwen3"], PROMPTS, 2, 8, noise=noise[:, :, :8].contiguous())
    longer = sample(models["qwen3"], PROMPTS, 2, 20, noise=noise)
    assert torch.equal(a.ids, b.ids) and torch.equal(a.ids, longer.ids[..., :8])    # nor does a completion depend on the room it has


@pytest.fixture(scope="module")
def own_process(tmp_path_factory):
    """sample.py in another process, with another hash seed: prints uniforms, then runs the command for a folder that is not there."""
    code = ("import runpy, sys; root, *sys.argv = sys.argv[1:]; sys.path.insert(0, root); from sample import seeded_uniforms\n"
            "print(seeded_uniforms((1, 'sample', 7), 3).tolist(), flush=True); runpy.run_path(sys.argv[0], run_name='__main__')")
    args = [ROOT, os.path.join(ROOT, "sample.py"), f"--model={tmp_path_factory.mktemp('a')}/none", "--prompt=1"]
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "77"}, timeout=120)


def test_seeded_uniforms_depend_on_the_key_alone(own_process):
    state = torch.get_rng_state()
    a, b = seeded_uniforms((1, "sample", 7), 2, 3, 1000), seeded_uniforms((1, "sample", 7), 2, 3, 1000)
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), state)
    others = [seeded_uniforms(key, 2, 3, 1000) for key in ((1, "sample", 8), (2, "sample", 7), (1, "other", 7), (1, "sample"), (17, "sample"))]
    assert not any(torch.equal(a, other) for other in others)
    assert a.min() >= 0 and a.max() < 1 and abs(a.mean() - 0.5) < 0.02
    assert own_process.stdout.strip() == str(seeded_uniforms((1, "sample", 7), 3).tolist()), own_process.stderr


# ---------------------------------------------------------------------------------------------------------------------------
# empty and refused

def test_no_prompts_and_no_tokens(models):
    """Regression: IndexError where no completion token exists at all."""
    for prompts, G, L in (([], 4, 5), ([], 1, 0), ([[1, 2], [3]], 2, 0)):
        out = sample(models["llama_gqa"], prompts, G, L)
        assert out.ids.shape == (len(prompts), G, L) and not out.finished.any()
        check_padding(out)
    assert sample(models["llama_gqa"], [[1] * 512], 1, 0).mask.shape == (1, 1, 0)   # a prompt that fills the window
    assert sample(models["llama_gqa"], [[1] * 511], 1, 1).mask.shape == (1, 1, 1)


REFUSED = [
    (dict(prompts=[[1], []]), "prompt 1 is empty"),
    (dict(prompts=[[1], [3, 131]]), "prompt 1 holds token id 131, the model knows 0 to 130"),
    (dict(prompts=[[1, -2, 5]]), "prompt 0 holds token id -2"),
    (dict(prompts=[[1] * 509]), r"no room for the completion: prompt 0 has 509 tokens, with 4 new ones .* 512 \(max_position_embeddings\)"),
    (dict(group_size=0), "group_size 0"),
    (dict(group_size=-1), "group_size -1"),
    (dict(max_new_tokens=-1), "max_new_tokens -1"),
    (dict(temperature=-0.1), "temperature -0.1"),
    (dict(temperature=math.nan), "temperature nan"),
    (dict(temperature=math.inf), "temperature inf"),
    (dict(top_k=-1), "top_k -1"),
    (dict(top_p=0), "top_p 0"),
    (dict(top_p=1.01), "top_p 1.01"),
    (dict(top_p=math.nan), "top_p nan"),
    (dict(noise=torch.rand(1, 2, 5)), r"noise has shape \(1, 2, 5\), 1 prompts, 2 completions and 4 tokens ask for \(1, 2, 4\)"),
    (dict(noise=torch.rand(2, 1, 4)), r"noise has shape \(2, 1, 4\)"),
]


@pytest.mark.parametrize("change,message", REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused_arguments(models, change, message):
    with pytest.raises(ValueError, match=f"sample: .*{message}"):
        sample(models["llama_gqa"], **{**dict(prompts=[[1, 2]], group_size=2, max_new_tokens=4), **change})


@pytest.mark.parametrize("temperature", (0, 1.0))
def test_logits_that_are_not_finite_are_refused(temperature):
    """Regression: a diverged model ended in "index 131 is out of bounds" (on a GPU: an assertion that kills the process)."""
    model = GPT.from_pretrained(os.path.join(HF, "llama_gqa"))
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        sample(model, PROMPTS, 2, 4, temperature)


# ---------------------------------------------------------------------------------------------------------------------------
# what is shown

class Bytes:
    """A token is a byte; 256 is the end token."""
    eos_ids = (256,)

    def decode(self, ids):
        return b"".join(b"<|end|>" if i == 256 else bytes([i]) for i in ids).decode("utf-8", errors="replace")


def test_completion_texts_leave_out_the_end_token():
    model, text = cycle(*b"?a", 0xf0, 0x9f, 0x8d, 0x8e, *b"z", 256, size=257), "a\U0001F34Ez"
    out = sample(model, [list(b"?")], 2, 8, eos_ids=(256,))
    assert completion_texts(Bytes(), out) == [[text, text]]
    out = sample(model, [list(b"?")], 1, 6, eos_ids=(256,))
    assert completion_texts(Bytes(), out) == [[text]]                               # not finished: every token counts
    out = sample(model, [list(b"?")], 1, 3, eos_ids=(256,))
    assert completion_texts(Bytes(), out) == [["a\ufffd"]]                          # cut inside a character
    assert completion_texts(Bytes(), sample(model, [[63]], 2, 0)) == [["", ""]]
    out = sample(cycle(*b"?", 256, size=257), [list(b"?")], 1, 4, eos_ids=(256,))
    assert completion_texts(Bytes(), out) == [[""]]


def test_show_completion_marks_runs():
    show = lambda text, lam, **kw: show_completion(Bytes(), list(text.encode()), lam, kw.get("color", False))
    assert show("abcde", [2, 2, 1, 1, 2]) == "[[ab]]cd[[e]]"
    assert show("abcde", [0, 1, 1, 0, 0]) == "((a))bc((de))"
    assert show("abc", [1, 1, 1]) == "abc" and show("abc", [2, 2, 2]) == "[[abc]]" and show("", []) == "" and show("a", [0]) == "((a))"
    assert show("a\nb", [2, 2, 1]) == "[[a\\n]]b"
    assert show("a\x1b[31m\rb\u2028", [1] * 11) == "a\\x1b[31m\\rb\\u2028"            # a model must not steer the terminal
    assert show("ab", [2, 1], color=True) == "\x1b[1;32m[[a]]\x1b[0mb" and show("ab", [0, 1], color=True) == "\x1b[34m((a))\x1b[0mb"


def test_show_completion_never_cuts_a_character():
    """Regression: decoding piece by piece fills the text with U+FFFD. An emoji cut by a run's end goes whole into the later run."""
    text = "a\U0001F34E\u2211b"                                                     # 1, 4, 3 and 1 bytes
    plain = text.encode()
    for cut in range(1, 9):
        for second in range(cut, 10):
            lam = [2] * cut + [1] * (second - cut) + [0] * (9 - second)
            shown = show_completion(Bytes(), list(plain), lam, False)
            assert "\ufffd" not in shown
            assert re.sub(r"\[\[|\]\]|\(\(|\)\)", "", shown) == text
    assert show_completion(Bytes(), list(plain), [2, 2, 2, 0, 0, 1, 1, 1, 1], False) == "[[a]]((\U0001F34E))\u2211b"
    broken = list(b"a\xf0\x9f")                                                     # the completion itself ends inside a character
    assert show_completion(Bytes(), broken, [2, 1, 1], False) == "[[a]]\ufffd"
    assert show_completion(Bytes(), list("\u2211b".encode()), [2, 1, 1, 1], False) == "\u2211b"       # Regression: an empty "[[]]" in front


def test_show_group():
    """A hand-made group: two completions of opposite sign that share their first two tokens and their end."""
    rows = [b"12 a", b"12 bc", b"9"]
    ids, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.bool)
    for g, row in enumerate(rows):
        ids[g, :len(row) + 1] = torch.tensor([*row, 256])
        mask[g, :len(row) + 1] = True
    advantages = torch.tensor([10.0, -10.0, 0.0])
    text = show_group(Bytes(), "1+1?", "2", ids, mask, torch.tensor([20.0, 0.0, 10.0]), advantages, torch.tensor([0.25, 0.5, 1.25]),
                      torch.tensor([1.0, 1.0, 0.0]), conflict_weights(ids, mask, advantages), color=False)
    question, head, *lines, legend = text.split("\n")
    assert question == "1+1?   (gold: 2)" and head.split() == ["reward", "advantage", "entropy", "tokens"] and legend == sample_py.LEGEND
    assert [line.split(maxsplit=4) for line in lines] == [
        ["20.0", "+10.00", "0.250", "5", "[[12 ]]a[[<|end|>]]"],
        ["0.0", "-10.00", "0.500", "6", "((12 ))bc((<|end|>))"],
        ["10.0", "+0.00", "1.250", "2", "(filtered) 9<|end|>"]]


def test_show_group_colors_only_a_screen(monkeypatch):
    ids = torch.tensor([[65, 66]])
    args = (Bytes(), "q", None, ids, torch.ones(1, 2, dtype=torch.bool), torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1), torch.full((1, 2), 2.0))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = show_group(*args)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = show_group(*args)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert "\x1b[" in colored and "\x1b[" not in plain and show_group(*args) == plain and "gold" not in plain
    assert sample_py.LEGEND in plain and sample_py.LEGEND not in show_group(*args[:-1], torch.ones(1, 2))            # no marks, no legend
    hostile = show_group(Bytes(), "a\x1b[2Jb", "1\n2", *args[3:])
    assert hostile.startswith("a\\x1b[2Jb   (gold: 1\\n2)")                         # a data set must not steer the terminal either


def test_group_page_is_self_contained_and_escapes_everything(tmp_path):
    ids = torch.tensor([list(b"<b>&1"), list(b"<b>&2")])
    mask, lam = torch.ones(2, 5, dtype=torch.bool), torch.tensor([[2.0, 2, 2, 2, 1], [0.0, 0, 0, 0, 1]])
    page = group_page(Bytes(), "<script>alert(1)</script>", "<i>", ids, mask, torch.tensor([20.0, 10.0]), torch.tensor([5.0, -5.0]),
                      torch.tensor([0.25, 0.75]), torch.tensor([1.0, 0.0]), lam)
    assert '<span class="x2" title="weight 2">&lt;b&gt;&amp;</span>1' in page and '<span class="x0" title="weight 0">&lt;b&gt;&amp;</span>2' in page
    assert "<script" not in page and "&lt;script&gt;" in page and "<i>" not in page and "src=" not in page and "href" not in page and "@import" not in page
    cells = re.findall(r'<td class="n">(.*?)</td>', page)
    assert cells == ["20.0", "+5.00", "0.250", "5", "yes", "10.0", "-5.00", "0.750", "5", "no"] and page.count("<tr class=filtered>") == 1
    assert "prefers-color-scheme: dark" in page and page.endswith("</html>\n")


# ---------------------------------------------------------------------------------------------------------------------------
# the command

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that knows nothing, with the byte tokenizer of the default run."""
    path = str(tmp_path_factory.mktemp("model"))
    write_byte_tokenizer(path)
    torch.manual_seed(0)
    GPT(Config.from_dict(dict(model_type="llama", vocab_size=280, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                              num_key_value_heads=1, max_position_embeddings=400))).save_pretrained(path)
    return path


def run_main(capsys, *args):
    sample_py.main(list(args))
    return capsys.readouterr().out


def test_command_shows_a_group(folder, capsys):
    args = (f"--model={folder}", "--prompt=47+12?", "--gold=59", "--group=3", "--max_new_tokens=12", "--device=cpu")
    out = run_main(capsys, *args)
    lines = out.splitlines()
    assert lines[0] == "47+12?   (gold: 59)" and lines[1].split() == ["reward", "advantage", "entropy", "tokens"]
    assert [line.split()[:2] for line in lines[2:5]] == [["0.0", "+0.00"]] * 3 and "reached max_new_tokens=12 without an end token" in lines[-1]
    assert all(4 < float(line.split()[2]) < math.log(280) for line in lines[2:5])   # nearly uniform over 280 tokens
    assert run_main(capsys, *args) == out != run_main(capsys, *args, "--seed=1")
    assert "reached max_new_tokens=256 " in run_main(capsys, f"--model={folder}", "--prompt=1", "--group=8", "--system_prompt=", "--device=cpu")
    for extra in ("--temperature=0", "--top_k=1", "--top_p=0.5", "--prompt_style=plain", "--group=1", "--system_prompt=", "--prompt="):
        assert "47+12?" in run_main(capsys, *args, extra) or extra == "--prompt="


def test_command_marks_what_it_sampled(folder, capsys, monkeypatch, tmp_path):
    """The rewards, advantages and marks shown are those of the completions: two right ones, one wrong one."""
    right, wrong = ("<reasoning>\n1\n</reasoning>\n<answer>\n%s\n</answer>" % answer for answer in (59, 60))

    def fake(model, prompts, group_size, max_new_tokens, *args, noise):
        assert (group_size, len(prompts), tuple(noise.shape)) == (3, 1, (1, 3, max_new_tokens)) and args == (0.5, 7, 0.9, (269,))
        ids, mask = torch.zeros(1, 3, 80, dtype=torch.long), torch.zeros(1, 3, 80, dtype=torch.bool)
        for g, text in enumerate((right, wrong, right)):
            ids[0, g, :len(text) + 1] = torch.tensor([*text.encode(), 269])
            mask[0, g, :len(text) + 1] = True
        return sample_py.Samples(ids, mask, torch.zeros(1, 3, 80), torch.full((1, 3, 80), 0.5) * mask, torch.ones(1, 3, dtype=torch.bool))

    monkeypatch.setattr(sample_py, "sample", fake)
    lines = run_main(capsys, f"--model={folder}", "--prompt=47+12?", "--gold=59", "--group=3", "--device=cpu", "--temperature=0.5", "--top_k=7",
                     "--top_p=0.9").splitlines()
    start, end = right.replace("\n", "\\n").split("59")
    assert [line.split(maxsplit=4) for line in lines[2:5]] == [
        [reward, advantage, "0.500", str(len(right) + 1), f"{a}{start}{b}{answer}{a}{end}<|end|>{b}"]
        for reward, advantage, answer, a, b in (("20.0", "+3.33", 59, "[[", "]]"), ("10.0", "-6.67", 60, "((", "))"), ("20.0", "+3.33", 59, "[[", "]]"))]
    assert len(lines) == 6                                                          # all ended: no word about the limit
    file = tmp_path / "group.html"
    run_main(capsys, f"--model={folder}", "--prompt=47+12?", "--gold=59", "--group=3", "--device=cpu", "--temperature=0.5", "--top_k=7", "--top_p=0.9",
             f"--html={file}")
    page = file.read_text()
    assert "47+12? (gold: 59)" in page and page.count('class="x2"') == 5 and page.count('class="x0"') == 3          # two right, one wrong, the legend


@pytest.mark.parametrize("extra", ("--group=0", "--group=-1", "--max_new_tokens=-1", "--max_new_tokens=0", "--group=x", "--modle=a", "--prompt_style=x"))
def test_command_refuses_bad_usage(folder, capsys, extra):
    """Regression: --max_new_tokens=-1 ended in "Trying to create tensor with negative dimension"."""
    with pytest.raises(SystemExit) as e:
        sample_py.main([f"--model={folder}", "--prompt=1", "--device=cpu", extra])
    assert e.value.code == 2 and "error: " in capsys.readouterr().err


def test_command_refuses_what_the_model_cannot_do(folder):
    for extra, message in (("--temperature=-1", "temperature -1"), ("--top_p=2", "top_p 2"), ("--device=abacus", "device abacus"),
                           (f"--adapter={folder}", "adapter_config.json"), ("--max_new_tokens=399", "no room for the completion"),
                           ("--prompt=" + "a" * 500, "no room for the completion")):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            sample_py.main([f"--model={folder}", "--prompt=1", "--device=cpu", extra])


def test_command_line_ends_without_a_traceback(own_process):
    assert own_process.returncode == 2 and own_process.stderr.startswith("error: ") and "/none: no" in own_process.stderr
    assert "Traceback" not in own_process.stderr and len(own_process.stdout.splitlines()) == 1
