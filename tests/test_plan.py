"""tools/plan.py: published parameter counts, memory and arithmetic against torch's own count."""
import glob
import json
import os
import tomllib
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lib import products
from lib.hf import Config
from lib.lora import add_lora
from logprobs import head_loss
from model import GPT
from sample import sample
from lib.training import check_room
from tools.plan import Plan, model_config, report

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def settings(**changes):
    """What plan.py reads of TrainConfig."""
    return SimpleNamespace(**dict(
        model="toy", dtype="float32", device="cpu", adapter="", lora_rank=0, checkpointing=False,
        beta=0.0, prompts_per_step=2, group_size=4, max_prompt_tokens=64, max_new_tokens=48,
        micro_tokens=10000, eval_samples=4) | changes)


def config(layers, hidden, ff, vocab, heads, kv_heads):
    return Config(dict(
        model_type="qwen2", vocab_size=vocab, hidden_size=hidden, intermediate_size=ff,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=2048, tie_word_embeddings=True))


WIDE, DEEP = config(4, 448, 1536, 8192, 7, 1), config(12, 128, 256, 2048, 4, 2)


def peak_bytes(run):
    """The most that torch had allocated at a time while run() ran, of what it allocated itself."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        run()
    events = [e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        now += e.nbytes()
        peak = max(peak, now)
    assert peak, "this profiler reports no allocations"
    return peak


def make_model(m, c):
    torch.manual_seed(0)
    model = GPT(m)
    if c.lora_rank:
        add_lora(model.to(getattr(torch, c.dtype)), c.lora_rank)
    model.checkpointing = c.checkpointing
    return model


def micro_batch(model, c, P, Tp, N, L):
    """What train.py does with a micro-batch: forward under autocast, loss, backward."""
    prompts, lengths = torch.arange(P * Tp).view(P, Tp), torch.full((P,), Tp)
    ids, prompt_of = torch.arange(N * L).view(N, L), torch.arange(N) * P // N
    with torch.autocast("cpu", torch.bfloat16, enabled=c.dtype == "bfloat16"):
        hidden = model.completion_hidden(prompts, lengths, ids, prompt_of).flatten(0, 1)
        loss, _ = head_loss(hidden, model.head_weight, ids.flatten(), torch.sum)
    loss.backward()


@pytest.mark.parametrize("name, weights, adapter", [
    ("Qwen2.5-3B-Instruct", 3_085_938_688, 239_468_544),
    ("Llama-3.1-8B-Instruct", 8_030_261_248, 335_544_320)])
def test_state_by_hand(name, weights, adapter):
    """Weights, gradients, moments of as many parameters as published; full fine-tuning is float32
    throughout, with LoRA the base has 2 bytes. The adapter: 32 x 128 x (4096 + 4096 + ...)."""
    m = model_config(name)
    state = lambda **c: list(Plan(settings(**c), m).parts.values())[:3]     # noqa: E731
    assert state(dtype="bfloat16") == [4 * weights, 4 * weights, 8 * weights]
    assert state(dtype="auto", device="auto", lora_rank=128) == [
        2 * weights + 4 * adapter, 4 * adapter, 8 * adapter]
    assert state(beta=0.1)[0] == 8 * weights                # GRPO's reference, a frozen copy
    assert state(beta=0.1, lora_rank=128)[0] == 4 * (weights + adapter)     # the base is it


@pytest.mark.parametrize("m, shape, rank, dtype, checkpointing", [
    (WIDE, (1, 48, 4, 64), 0, "float32", False), (DEEP, (1, 512, 4, 16), 0, "float32", True),
    (DEEP, (1, 512, 4, 16), 0, "bfloat16", False), (DEEP, (1, 512, 4, 16), 16, "float32", False),
    (WIDE, (1, 48, 4, 64), 16, "bfloat16", True)])
def test_memory_of_training(m, shape, rank, dtype, checkpointing):
    """Within 20% of what torch allocates beside weights, moments and gradients."""
    P, Tp, N, L = shape
    c = settings(lora_rank=rank, dtype=dtype, checkpointing=checkpointing, prompts_per_step=P,
                 group_size=N // P, max_prompt_tokens=Tp, max_new_tokens=L)
    model, p = make_model(m, c), Plan(c, m)
    micro_batch(model, c, 1, 8, 1, 4)                       # now the gradients are there
    measured = peak_bytes(lambda: micro_batch(model, c, *shape))
    planned = p.parts["training: peak"] - sum(list(p.parts.values())[:3])
    assert 0.8 < planned / measured < 1.2


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Weights stay as they are (and torch counts the products)."""
    monkeypatch.setattr(products, "PACKED_TYPES", [])


@pytest.mark.parametrize("m, P, Tp, G, L", [
    (WIDE, 2, 160, 4, 1), (config(2, 128, 256, 512, 4, 4), 2, 16, 16, 96)])
def test_memory_of_sampling(as_on_a_gpu, m, P, Tp, G, L):
    """At full length: without an end token every completion runs to the last place. With one
    token the prompts make the peak. The evaluation takes no more completions at a time."""
    c = settings(prompts_per_step=P, group_size=G, max_prompt_tokens=Tp, max_new_tokens=L,
                 eval_samples=G)
    p = Plan(c, m)
    measured = peak_bytes(lambda: sample(make_model(m, c), [[5] * Tp] * P, G, L))
    assert 0.8 < (p.parts["sampling: peak"] - p.moments) / measured < 1.2
    assert p.parts["evaluation: peak"] == p.parts["sampling: peak"]
    one = Plan(settings(**{**vars(c), "eval_samples": 1}), m)       # as many prompts, no groups
    assert one.parts["evaluation: peak"] > p.parts["sampling: peak"]


@pytest.mark.parametrize("rank, checkpointing", [(0, True), (8, False)])
def test_arithmetic(as_on_a_gpu, rank, checkpointing):
    """torch leaves attention's kernel out of its count: few tokens make it small."""
    m, counts = config(3, 448, 1536, 8192, 7, 1), []
    c = settings(lora_rank=rank, checkpointing=checkpointing, max_prompt_tokens=16,
                 max_new_tokens=16)
    model = make_model(m, c)
    for run in (lambda: sample(model, [[5] * 16] * 2, 4, 16),
                lambda: micro_batch(model, c, 2, 16, 8, 16)):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert Plan(c, m).flops() == pytest.approx(counts, rel=0.2)


@pytest.mark.parametrize("path", sorted(glob.glob(os.path.join(ROOT, "config", "*_*b_*.toml"))),
                         ids=os.path.basename)
def test_presets_of_the_paper_fit_on_80_gb(path):
    with open(path, "rb") as f:
        c = settings(device="auto", **tomllib.load(f))
    text = report(c, model_config(c.model))
    assert f"{dict(Q='3,085,938,688', L='8,030,261,248')[c.model[0]]} weights" in text
    peaks = [float(size) for size in text.splitlines()[-1].split()[-2:]]
    assert 12 < peaks[1] <= peaks[0] < 72                   # of 8 GPUs and of one


def test_parameters_are_those_of_the_model():
    m = Config(dict(
        model_type="qwen3", vocab_size=96, hidden_size=32, intermediate_size=48, head_dim=8,
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, attention_bias=True,
        max_position_embeddings=64))
    model = GPT(m)
    assert Plan(settings(), m).base == sum(p.numel() for p in model.parameters())
    add_lora(model, 3)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert Plan(settings(lora_rank=3), m).trainable == trained


def test_a_folder_is_read_and_mistakes_are_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=48, mlp_bias=True,
        num_hidden_layers=1, num_attention_heads=4)))
    m = model_config(str(tmp_path))
    matrices = 2 * 64 * 32 + 4 * 32 * 32 + 3 * 32 * 48
    assert Plan(settings(), m).base == matrices + 3 * 32 + 2 * 48 + 32  # norms, biases of the MLP
    with pytest.raises(ValueError, match="Llama-3.1-8B-Instruct and Qwen2.5-3B-Instruct are"):
        model_config("Qwen2.5-7B")
    with pytest.raises(ValueError, match="is more than the model's 2048 positions"):
        check_room(settings(max_new_tokens=2000), m)
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    assert Plan(settings(adapter=str(tmp_path)), m).trainable == 2 * (4 * 64 + 3 * 80)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="field 'r' is missing"):
        Plan(settings(adapter=str(tmp_path)), m)
