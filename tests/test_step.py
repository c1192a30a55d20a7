"""One step of train.py: its pieces, and the whole of it against a slow one."""
import itertools
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import OUT, largest_difference, rl_rows, run, spied, weights
from data import demonstration, load_problems, plain_end
from gtpo import conflict_weights, gtpo_loss, grpo_loss
from model import GPT
from rewards import reward_parts
from tokenizer import Tokenizer


# ---- the pieces ----------------------------------------------------------------------------------

def test_order_is_a_new_permutation_every_epoch_and_follows_from_the_seed():
    """P63, P70: there is no position to save, and no two processes draw the same."""
    epochs = [[train.order(e * 50 + i, 50, 0, "rl") for i in range(50)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50)) and epochs[0] != epochs[1]
    for other in ((1, "rl"), (0, "sft")):
        assert [train.order(i, 50, *other) for i in range(50)] != epochs[0]


def test_micro_batches_hold_every_completion_once_within_the_budget():
    rng = random.Random(0)
    prompt_lengths = torch.tensor([rng.randint(1, 20) for _ in range(6)])
    prompt_of = torch.arange(6).repeat_interleave(4)
    lengths = torch.tensor([rng.randint(1, 30) for _ in prompt_of])
    places = torch.arange(30)
    batch = train.Batch(torch.zeros(6, 20, dtype=torch.long), prompt_lengths, prompt_of,
                        places.repeat(24, 1), places < lengths[:, None])
    for budget in (1, 40, 200, 10**6):
        parts = list(batch.micro_batches(list(range(24)), budget))
        assert sorted(i for part in parts for i in part) == list(range(24))
        for part in parts:
            m = batch.take(part)
            assert m.prompt_ids.numel() + m.ids.numel() <= budget or len(part) == 1
            assert m.mask.sum(1).tolist() == lengths[part].tolist()
            assert torch.equal(m.prompt_lengths[m.prompt_of], prompt_lengths[prompt_of[part]])
            assert m.ids.shape[1] == lengths[part].max()  # no more padding than needed
    assert len(parts) == 1


def test_learning_rate_rises_linearly_and_falls_as_a_cosine():
    """0.5% of 800 steps are 4."""
    rates = [train.learning_rate(step, 800, 1.0) for step in (0, 1, 3, 4, 402)]
    assert rates == pytest.approx([0.25, 0.5, 1, 1, 0.5])
    assert train.learning_rate(0, 1, 1.0) == 1.0 and 0 < train.learning_rate(799, 800, 1.0) < 1e-4


@pytest.mark.parametrize("gradient, loss", [(math.inf, 0), (math.nan, 0), (1, math.nan)])
def test_an_update_that_is_not_finite_changes_nothing(gradient, loss):
    p = torch.nn.Parameter(torch.ones(2, 2))
    model = torch.nn.ParameterList([p])
    optimizer = train.make_optimizer(model)
    p.grad = torch.full((2, 2), float(gradient))
    run = SimpleNamespace(optimizer=optimizer, bad_in_a_row=0, skipped_updates=4)
    norm = train.update(run, 1e-2, 1.0, loss)
    assert not math.isfinite(norm) and torch.equal(p, torch.ones(2, 2)) and p.grad is None
    assert not optimizer.state and (run.bad_in_a_row, run.skipped_updates) == (1, 5)


def test_a_learning_rate_of_1e_6_moves_the_weights():
    """Weights in bfloat16 round an update of 1e-6 away; ours are float32."""
    p = torch.nn.Parameter(torch.full((4,), 0.02))
    fake = SimpleNamespace(optimizer=train.make_optimizer(torch.nn.ParameterList([p])))
    for _ in range(1000):
        p.grad = torch.ones(4)
        train.update(fake, 1e-6, 0.0, 0.0)
    assert p.mean().item() == pytest.approx(0.019, abs=2e-5)


def test_demonstrations_of_the_demo_are_imperfect_the_others_as_they_are(small_folder):
    """RL needs something to improve."""
    tokenizer = Tokenizer.from_pretrained(small_folder / "model")
    demonstrations = [(p, [1, 2]) for p in load_problems("arithmetic")[:60]]
    texts = {}
    for data in ("arithmetic", "gsm8k"):
        run = SimpleNamespace(c=train.TrainConfig(data=data), tokenizer=tokenizer,
                              demonstrations=demonstrations)
        examples = [train.sft_example(run, i) for i in range(60)]
        assert all(prompt == [1, 2] and ids[-1] == 269 for prompt, ids in examples)
        texts[data] = sorted(tokenizer.decode(ids[:-1]) for _, ids in examples)
    right = sorted(demonstration(p) for p, _ in demonstrations)
    assert texts["gsm8k"] == right and 5 < len(set(texts["arithmetic"]) & set(right)) < 50
    # a thought that the prompt leaves open is closed first
    run.demonstrations = [(demonstrations[0][0], tokenizer.encode("<think>"))]
    assert tokenizer.decode(train.sft_example(run, 0)[1]).startswith("</think>\n\n<reasoning>")


# ---- one step against a slow one -----------------------------------------------------------------

def record(monkeypatch):
    """The parameters and gradients of each update."""
    updates, update = [], train.update

    def updating(run, *arguments):
        params = dict(run.model.named_parameters())
        updates.append(({name: p.detach().clone() for name, p in params.items()},
                        {name: p.grad.clone() for name, p in params.items()}))
        return update(run, *arguments)
    monkeypatch.setattr(train, "update", updating)
    return updates


def scores(model, prompts, samples):
    """Log-probs (P, G, L) and mean entropies (P, G) at temperature 1.1, each sequence alone."""
    logps, entropy = torch.zeros(samples.mask.shape), torch.zeros(samples.mask.shape[:2])
    for p, g in itertools.product(*map(range, entropy.shape)):
        ids = samples.ids[p, g][samples.mask[p, g]]  # (l,)
        logits = model(torch.tensor([prompts[p] + ids.tolist()]))[0, len(prompts[p]) - 1 : -1]
        logp = torch.log_softmax(logits / 1.1, -1)  # (l, V)
        logps[p, g, : len(ids)] = logp.gather(-1, ids[:, None])[:, 0]
        entropy[p, g] = -(logp.exp() * logp).sum(-1).mean()
    return logps, entropy


def parts_of_rewards(tokenizer, prompts, samples):
    """{part: (P, G)} of the completions' rewards."""
    graded = []
    for prompt, group, masks in zip(prompts, samples.ids, samples.mask):
        a, b = re.findall(r"\d+", tokenizer.decode(prompt))
        texts = [tokenizer.decode(ids[mask].tolist()).removesuffix("<|end|>")
                 for ids, mask in zip(group, masks)]
        graded.append([reward_parts(text[: plain_end(text)], str(int(a) + int(b)))
                       for text in texts])
    return {name: torch.tensor([[one[name] for one in group] for group in graded])
            for name in ("format", "accuracy")}


def adamw(p, gradients, lr):
    """A parameter after these updates; gradients come with the norm of all."""
    m = v = 0
    for n, (g, norm) in enumerate(gradients, 1):
        g = g * min(1, 0.1 / (norm + 1e-6))
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        p = p * (1 - lr * 0.1 * (p.dim() > 1))
        p = p - lr * (m / (1 - 0.9**n)) / ((v / (1 - 0.99**n)).sqrt() + 1e-8)
    return p


@pytest.mark.parametrize("algo, flags", [
    ("gtpo", []), ("grpo", ["--beta=0.1", "--updates_per_rollout=2", "--micro_tokens=60"])])
def test_one_step_is_the_slow_one(small, small_folder, tmp_path, monkeypatch, algo, flags):
    """Golden: rewards, advantages, losses, gradients, AdamW and the row of one rollout, from the
    loss of gtpo.py, which has tests of its own, and each sequence alone: a mean of means, scoring
    at another temperature, a reference that moves, a wrong mask show here. kept and conflict are
    measured for GRPO, too."""
    updates, rollouts = record(monkeypatch), spied(monkeypatch, train, "sample")
    run(tmp_path, *small, "--sft_steps=0", "--steps=1", "--eval_problems=0", f"--algo={algo}",
        "--temperature=1.1", "--seed=2", "--learning_rate=0.01", *flags)
    ((_, prompts, *_), s), = rollouts
    model = GPT.from_pretrained(small_folder / "model")
    tokenizer = Tokenizer.from_pretrained(small_folder / "model")
    with torch.no_grad():
        old, entropy = scores(model, prompts, s)  # (P, G, L), (P, G)
    parts = parts_of_rewards(tokenizer, prompts, s)
    rewards = parts["format"] + parts["accuracy"]
    plain = rewards - rewards.mean(1, keepdim=True)
    losses, norms = [], []
    for params, gradients in updates:
        model.load_state_dict(params)
        logps, _ = scores(model, prompts, s)
        if algo == "gtpo":
            loss = gtpo_loss(logps, s.ids, s.mask, plain, entropy, entropy.mean(), old)
        else:  # the reference is the policy that sampled
            loss = grpo_loss(logps, s.mask, plain / (rewards.std(1, keepdim=True) + 1e-4), old,
                             old, 0.1)
        slow = torch.autograd.grad(loss, [model.get_parameter(name) for name in params])
        largest = max(g.abs().max() for g in slow)
        assert largest_difference(gradients, dict(zip(params, slow))) < 1e-5 * largest
        losses.append(loss.item())
        norms.append(torch.cat([g.flatten() for g in slow]).norm().item())
    first, last = updates[0][0], weights(tmp_path / OUT / "model")
    updated = {name: adamw(p, [(g[name], norm) for (_, g), norm in zip(updates, norms)], 0.01)
               for name, p in first.items()}
    assert largest_difference(updated, last) < 1e-6 < 1e-3 < largest_difference(first, last)

    lam = conflict_weights(s.ids, s.mask, plain)
    kept = ~((entropy > math.log(2)) & (entropy.mean() < math.log(2)))
    means = {"reward": rewards, "format": parts["format"] == 10, "entropy": entropy, "kept": kept,
             "accuracy": parts["accuracy"] == 10, "initial_entropy": entropy,
             "truncated": ~s.finished, "completion_tokens": s.mask.sum(-1),  # (P, G) each
             "tied": rewards.std(1) == 0}  # (P,)
    expected = {**{name: x.float().mean().item() for name, x in means.items()},
                "conflict": (lam[s.mask] != 1).float().mean().item(), "lr": 0.01,
                "loss": sum(losses) / len(losses), "grad_norm": norms[-1]}
    row, = rl_rows(tmp_path / OUT)
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert all(0 < row[name] < 1 for name in ("format", "conflict", "kept", "tied"))
    assert row["mismatch"] < 1e-6
