"""One step of train.py: its pieces, and the whole of it against a slow one."""
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch

import train
from conftest import OUT, largest_difference, rl_rows, run, spied, weights
from data import demonstration, load_problems, plain_end
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


def conflict_run(group, advantages, i):
    """How many tokens from the start of completion i have a conflict."""
    others = [ids for ids, a in zip(group, advantages) if a * advantages[i] < 0]
    n = 0
    while n < len(group[i]) and any(ids[n : n + 1] == [group[i][n]] for ids in others):
        n += 1
    return n


def slow_conflict_weights(group, advantages):
    result, backwards = [], [ids[::-1] for ids in group]
    for i, (ids, a) in enumerate(zip(group, advantages)):
        first, last = (conflict_run(each, advantages, i) for each in (group, backwards))
        result.append([(2 if a > 0 else 0) if t < first or t >= len(ids) - last else 1
                       for t in range(len(ids))])
    return result


def log_probs(model, prompt, ids):
    """(L, V) of one completion, the whole sequence alone, at temperature 0.8."""
    logits = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / 1.2, -1)


def of_tokens(model, prompt, ids):
    return log_probs(model, prompt, ids).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def slow_rollout(model, tokenizer, prompts, samples, algo):
    """[(prompt, ids, weight of each token, logps when sampled)], and the figures of the row."""
    rows, figures = [], dict.fromkeys(("reward", "format", "accuracy", "kept", "conflict"), 0)
    groups = [[ids[mask].tolist() for ids, mask in zip(*group)]
              for group in zip(samples.ids, samples.mask)]
    entropies = [[-(log_probs(model, prompt, ids).exp() * log_probs(model, prompt, ids)).sum(-1)
                  .mean().item() for ids in group] for prompt, group in zip(prompts, groups)]
    everyone = sum(entropies, [])
    initial = sum(everyone) / len(everyone)
    for prompt, group, entropy in zip(prompts, groups, entropies):
        a, b = re.findall(r"\d+", tokenizer.decode(prompt))
        texts = [tokenizer.decode(ids).removesuffix("<|end|>") for ids in group]
        parts = [reward_parts(text[:plain_end(text)], str(int(a) + int(b))) for text in texts]
        rewards = torch.tensor([sum(part.values()) for part in parts])
        advantages = (rewards - rewards.mean()).tolist()
        lam = slow_conflict_weights(group, advantages)
        for i, ids in enumerate(group):
            kept = not (initial < 0.8 < entropy[i])
            weight = kept * (advantages[i] - 0.1 * entropy[i])
            if algo == "grpo":
                weight = advantages[i] / (rewards.std().item() + 1e-4)
            tokens = torch.tensor([weight * (x if algo == "gtpo" else 1) for x in lam[i]])
            rows.append((prompt, ids, tokens / len(ids) / len(everyone),
                         of_tokens(model, prompt, ids)))
            figures["kept"] += kept / 16
            figures["reward"] += rewards[i].item() / 16
            figures["format"] += (parts[i]["format"] == 10) / 16
            figures["accuracy"] += (parts[i]["accuracy"] == 10) / 16
            figures["conflict"] += sum(x != 1 for x in lam[i]) / sum(map(len, sum(groups, [])))
    return rows, {**figures, "entropy": initial, "initial_entropy": initial}


def slow_loss(model, rows, epsilon, beta):
    loss = 0
    for prompt, ids, weights, old in rows:
        logps = of_tokens(model, prompt, ids)
        ratio = (logps - old).exp()
        gain = ratio * weights
        if epsilon:
            gain = torch.minimum(gain, ratio.clamp(1 - epsilon, 1 + epsilon) * weights)
        d = old - logps  # the reference is the policy that sampled
        loss = loss - gain.sum() + beta * (d.exp() - d - 1).mean() / len(rows)
    return loss


def adamw(p, gradients, lr):
    """A parameter after these updates; gradients come with the norm of all."""
    m = v = 0
    for n, (g, norm) in enumerate(gradients, 1):
        g = g * min(1, 0.1 / (norm + 1e-6))
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        p = p * (1 - lr * 0.1 * (p.dim() > 1))
        p = p - lr * (m / (1 - 0.9**n)) / ((v / (1 - 0.99**n)).sqrt() + 1e-8)
    return p


@pytest.mark.parametrize("algo, flags, epsilon, beta", [
    ("gtpo", [], 0, 0),
    ("grpo", ["--beta=0.1", "--updates_per_rollout=2", "--micro_tokens=60"], 0.2, 0.1)])
def test_one_step_is_the_slow_one(small, small_folder, tmp_path, monkeypatch, algo, flags, epsilon,
                                  beta):
    """Golden: rewards, advantages, weights, gradients, AdamW and the row of one rollout, by hand
    from the formulas, each sequence alone: a mean of means, scoring at another temperature, a
    reference that moves, a wrong mask show here. kept and conflict are measured for GRPO, too."""
    updates, rollouts = record(monkeypatch), spied(monkeypatch, train, "sample")
    run(tmp_path, *small, "--sft_steps=0", "--steps=1", "--eval_problems=0", f"--algo={algo}",
        "--temperature=1.2", "--seed=2", "--learning_rate=0.01", "--entropy_threshold=0.8", *flags)
    ((_, prompts, *_), samples), = rollouts
    tokenizer = Tokenizer.from_pretrained(small_folder / "model")
    model = GPT.from_pretrained(small_folder / "model")
    with torch.no_grad():
        rows, figures = slow_rollout(model, tokenizer, prompts, samples, algo)
    row, = rl_rows(tmp_path / OUT)
    losses, norms = [], []
    for params, gradients in updates:
        model.load_state_dict(params)
        loss = slow_loss(model, rows, epsilon, beta)
        slow = torch.autograd.grad(loss, [model.get_parameter(name) for name in params])
        largest = max(g.abs().max() for g in slow)
        assert largest_difference(gradients, dict(zip(params, slow))) < 1e-5 * largest
        losses.append(loss.item())
        norms.append(torch.cat([g.flatten() for g in slow]).norm().item())
    first, last = updates[0][0], weights(tmp_path / OUT / "model")
    updated = {name: adamw(p, [(g[name], norm) for (_, g), norm in zip(updates, norms)], 0.01)
               for name, p in first.items()}
    assert largest_difference(updated, last) < 1e-6 < 1e-3 < largest_difference(first, last)

    expected = {**figures, "loss": sum(losses) / len(losses), "grad_norm": norms[-1], "lr": 0.01,
                "truncated": 1 - samples.finished.float().mean().item(),
                "completion_tokens": samples.mask.sum().item() / 16}
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < row["format"] < 1 and 0 < row["conflict"] < 1 and row["mismatch"] < 1e-6
    assert 0 < row["kept"] < 1 and 0 < row["tied"] < 1
