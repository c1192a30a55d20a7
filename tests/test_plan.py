"""plan.py: parameter counts as published, memory against what torch allocates on a CPU, arithmetic against torch's own count."""
import glob
import json
import os
import tomllib
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from gtpo import token_logps
from lib.lora import add_lora
from model import GPT, Config
from plan import Plan, model_config, report
from sample import sample

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SEVEN = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def settings(**changes):
    """What plan.py reads of TrainConfig."""
    return SimpleNamespace(**{**dict(
        model="toy", algo="gtpo", dtype="float32", device="cpu", adapter="", lora_rank=0, lora_targets=SEVEN, checkpointing=False, zero=False,
        beta=0.0, updates_per_rollout=1, prompts_per_step=2, group_size=4, max_prompt_tokens=64, max_new_tokens=48, micro_tokens=256), **changes})


def config(layers, hidden, ff, vocab, heads, kv_heads, tied=True):
    return Config.from_dict(dict(model_type="qwen2", vocab_size=vocab, hidden_size=hidden, intermediate_size=ff, num_hidden_layers=layers,
                                 num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2048, tie_word_embeddings=tied))


SMALL, LARGE = config(6, 448, 1536, 8192, 7, 1), config(8, 640, 2048, 16384, 10, 10)           # 19 and 55 million parameters
DEEP = config(24, 128, 256, 2048, 4, 2, tied=False)


def peak_bytes(run):
    """The most that torch had allocated at a time while run() ran, of what it allocated itself."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        run()
    events = sorted((e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    assert events, "this profiler reports no allocations"
    now = peak = 0
    for e in events:
        now += e.nbytes()
        peak = max(peak, now)
    return peak


def make_model(m, c):
    torch.manual_seed(0)
    model = GPT(m)
    if c.lora_rank:
        model.to(torch.bfloat16 if c.dtype == "bfloat16" else torch.float32)
        add_lora(model, c.lora_rank, c.lora_rank, c.lora_targets.split(","))
    model.checkpointing = c.checkpointing
    return model


def micro_batch(model, c, P, Tp, N, L):
    """What train.py does with a micro-batch: forward under autocast, token_logps, backward."""
    V = model.config.vocab_size
    prompts, lengths = torch.arange(P * Tp).view(P, Tp) % V, torch.full((P,), Tp)
    ids, prompt_of, mask = torch.arange(N * L).view(N, L) % V, torch.arange(N) * P // N, torch.ones(N, L, dtype=torch.bool)

    def logps():
        hidden = model.completion_hidden(prompts, lengths, ids, prompt_of)
        known = torch.ones(N * L) if c.updates_per_rollout == 1 and not (c.algo == "grpo" and c.beta) else None
        return token_logps(hidden[mask], model.head_weight, ids[mask], expected_grad=known)[0]

    with torch.autocast("cpu", torch.bfloat16, enabled=c.dtype == "bfloat16"):
        out = logps()
    out.sum().backward()


@pytest.mark.parametrize("name, billions, adapter", [("Qwen2.5-3B-Instruct", 3.09, 239.5e6), ("Llama-3.1-8B-Instruct", 8.03, 335.5e6)])
def test_parameters_are_the_published_ones(name, billions, adapter):
    """The adapter by hand: rank 128 x (inputs + outputs) of the seven layers, e.g. 32 x 128 x (4096 + 4096 + 2 x (4096 + 1024) + ...)."""
    m = model_config(name)
    assert round(Plan(settings(), m).base / 1e9, 2) == billions
    h, f, kv = m.hidden_size, m.intermediate_size, m.num_key_value_heads * m.head_dim
    p = Plan(settings(lora_rank=128), m)
    assert p.trainable == 128 * m.num_hidden_layers * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f)) == pytest.approx(adapter, rel=1e-3)
    assert Plan(settings(lora_rank=128, lora_targets="q_proj, v_proj"), m).trainable == 128 * m.num_hidden_layers * (2 * h + h + kv)


def test_state_by_hand():
    """Weights, gradients, moments of 8.03 billion parameters: float32 throughout; with LoRA the base has 2 bytes; ZeRO divides the moments."""
    m = model_config("Llama-3.1-8B-Instruct")
    n, a = 8_030_261_248, 335_544_320
    assert Plan(settings(dtype="bfloat16"), m).state() == {"weights": 4 * n, "gradients": 4 * n, "optimizer": 8 * n}
    assert Plan(settings(dtype="bfloat16", zero=True), m, 8).state()["optimizer"] == n
    assert Plan(settings(dtype="auto", device="auto", lora_rank=128), m).state() == {"weights": 2 * n + 4 * a, "gradients": 4 * a, "optimizer": 8 * a}
    assert Plan(settings(algo="grpo", beta=1e-6), m).state()["weights"] == 8 * n    # a second, frozen copy
    assert Plan(settings(algo="grpo", beta=1e-6, lora_rank=128), m).state()["weights"] == 4 * (n + a)         # the base is the reference


@pytest.mark.parametrize("size, rank, dtype, checkpointing", [
    ("small", 0, "float32", False), ("small", 0, "float32", True), ("small", 16, "float32", False), ("small", 16, "float32", True),
    ("small", 0, "bfloat16", False), ("small", 16, "bfloat16", True), ("deep", 0, "float32", False), ("deep", 16, "float32", True),
    ("large", 0, "float32", False), ("large", 16, "float32", True)])
def test_memory_of_a_micro_batch(size, rank, dtype, checkpointing):
    """Within 10% of what torch allocates beside weights and gradients. deep: many layers, long prompts, where the gradients of the prompts' keys
    and values, which wait until backward comes to the prompts, are a large part (they were once left out)."""
    m, shape = {"small": (SMALL, (1, 48, 4, 64)), "large": (LARGE, (2, 64, 4, 32)), "deep": (DEEP, (1, 512, 4, 16))}[size]
    c = settings(lora_rank=rank, dtype=dtype, checkpointing=checkpointing)
    model = make_model(m, c)
    micro_batch(model, c, 1, 8, 1, 4)                                               # now the gradients are there, as in any but the first one
    measured, planned = peak_bytes(lambda: micro_batch(model, c, *shape)), Plan(c, m).micro_batch(*shape)["peak"]
    print(f"{size:6} {dtype:9} rank {rank:2} checkpointing {checkpointing!s:6} {shape}  planned {planned / 1e6:6.1f} MB  "
          f"measured {measured / 1e6:6.1f} MB  ratio {planned / measured:.2f}")
    assert 0.9 < planned / measured < 1.1


@pytest.mark.parametrize("tokens", [66, 1])
def test_memory_of_sampling(tokens):
    """At full length: no end token, so every completion runs to the last place. With 66 tokens the buffers of 64 grow at the end; with one, the
    prompts make the peak."""
    m, c = config(6, 256, 768, 2048, 4, 4), settings(max_prompt_tokens=160, max_new_tokens=tokens)
    model, p = make_model(m, c), Plan(c, m)
    measured = peak_bytes(lambda: sample(model, [[5] * 160] * 2, 4, tokens))
    planned = p.sampling()["peak"] - p.state()["weights"] - p.state()["optimizer"]
    print(f"sampling: planned {planned / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB, ratio {planned / measured:.2f}")
    assert 0.9 < planned / measured < 1.1


@pytest.mark.parametrize("rank, checkpointing, more, tolerance", [
    (0, False, {}, 1e-9), (0, False, {"updates_per_rollout": 2}, 1e-9), (0, False, {"algo": "grpo", "beta": 0.1}, 1e-9), (0, True, {}, 0.07),
    (8, False, {}, 0.04), (8, True, {}, 0.04)])
def test_arithmetic_is_what_torch_counts(rank, checkpointing, more, tolerance):
    """torch leaves out the attention kernel, counted here: 4 x width for each pair, forward once or twice, backward twice. Checkpointing skips
    the last product of a layer; with LoRA nothing flows into the first layer's base."""
    m, c = config(3, 128, 320, 512, 4, 2), settings(lora_rank=rank, checkpointing=checkpointing, **more)
    model = make_model(m, c)
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):                                                          # 256 tokens: one prompt of 64 and its 4 completions of 48
            micro_batch(model, c, 1, 64, 4, 48)
    pairs = 2 * 64 * 64 + 8 * 47 * (64 + 47)
    attention = 3 * 4 * 128 * pairs * (3 + checkpointing)
    assert Plan(c, m).flops()["training"] - attention == pytest.approx(counter.get_total_flops(), rel=tolerance)
    with FlopCounterMode(display=False) as counter:
        sample(model, [[5] * 64] * 2, 4, 48)
    assert Plan(c, m).flops()["sampling"] - 3 * 4 * 128 * 2 * 64 * 64 == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_worst_micro_batch_is_one_that_fits():
    """All shapes stay within micro_tokens, hold at most a group for each prompt, and one of them is a group at full length. The largest is as
    large as the largest of all shapes there are."""
    p = Plan(settings(prompts_per_step=6, micro_tokens=700), SMALL, 2)
    shapes = list(p.shapes())
    assert (1, 64, 4, 48) in shapes and (3, 64, 12, 42) in shapes
    for P, Tp, N, L in shapes:
        assert P <= 3 and Tp == 64 and P <= N <= 4 * P and 1 <= L <= 48 and P * Tp + N * L <= 700
    assert list(Plan(settings(micro_tokens=50), SMALL).shapes()) == [(1, 64, 1, 48)]           # longer than micro_tokens: stands alone
    every = [(P, 64, N, min(48, (700 - P * 64) // N)) for P in range(1, 4) for N in range(P, 4 * P + 1)]
    largest = max(p.micro_batch(*s)["peak"] for s in every)
    assert p.training()["peak"] == pytest.approx(sum(p.state().values()) + largest, rel=0.01)


@pytest.mark.parametrize("path", sorted(glob.glob(os.path.join(ROOT, "config", "*_*.toml"))), ids=os.path.basename)
def test_presets_have_the_papers_settings_and_fit(path):
    """Each line has a comment; one epoch; 8 GPUs divide the prompts; the plan says that 80 GB are enough, with 1 GPU and with 8."""
    with open(path, encoding="utf-8") as f:
        text = f.read()
    assert all("#" in line for line in text.splitlines() if line)
    t = tomllib.loads(text)
    assert os.path.basename(path) == t["name"] + ".toml"
    paper = dict(lora_rank=128, lora_alpha=128, learning_rate=1e-6, weight_decay=0.1, warmup_ratio=0.005, grad_clip=0.1, gamma=0.1, sft_steps=0,
                 max_prompt_tokens=4000, dtype="bfloat16", temperature=1.0)
    assert {name: t[name] for name in paper} == paper and t["group_size"] in (8, 12) and t["max_prompt_tokens"] + t["max_new_tokens"] == 5500
    problems = {"gsm8k": 7473, "math": 7500}[t["data"]]
    assert t["prompts_per_step"] % 8 == 0 and t["steps"] == problems // t["prompts_per_step"]
    text = report(settings(device="auto", **t), model_config(t["model"]))
    assert "1 GPU of 80 GB: fits" in text and "8 GPUs of 80 GB: fits" in text
    assert f"parameters  {dict(Q='3.09', L='8.03')[t['model'][0]]} billion" in text


def test_advice_is_tried():
    """Llama 8B without LoRA fits nowhere; with LoRA and without checkpointing, checkpointing alone is enough and --group_size is not named."""
    m = model_config("Llama-3.1-8B-Instruct")
    c = settings(model="L", dtype="bfloat16", lora_rank=128, prompts_per_step=8, group_size=8, max_prompt_tokens=4000, max_new_tokens=1500,
                 micro_tokens=16384)
    text = report(c, m, 8)
    assert "does not fit (10% must stay free); each of these alone is enough: --checkpointing=true" in text
    assert "does not fit" not in report(SimpleNamespace(**{**vars(c), "checkpointing": True}), m, 8)
    text = report(SimpleNamespace(**{**vars(c), "lora_rank": 0, "micro_tokens": 30000, "group_size": 12}), m, 1)
    assert "no setting alone is enough; what saves most: " in text and "zero" not in text.split("1 GPU of")[1].split("\n")[0]


def test_a_folder_is_read_and_mistakes_are_told(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(dict(
        model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)))
    m = model_config(str(tmp_path / "mine"))
    assert Plan(settings(), m).base == 2 * 64 * 32 + 4 * 32 * 32 + 3 * 32 * 48 + 3 * 32
    assert model_config(str(tmp_path / "Qwen2.5-3B-Instruct")).hidden_size == 2048  # no folder there yet
    for name in ("", "Qwen2.5-7B", str(tmp_path / "none")):
        with pytest.raises(ValueError, match="Llama-3.1-8B-Instruct and Qwen2.5-3B-Instruct are known"):
            model_config(name)
    with pytest.raises(ValueError, match="is more than the model's 2048 positions"):
        report(settings(max_new_tokens=2000), m)
    (tmp_path / "mine" / "adapter_config.json").write_text('{"r": 2, "target_modules": ["q_proj"]}')
    assert Plan(settings(adapter=str(tmp_path / "mine")), m).trainable == 2 * (32 + 32)
    (tmp_path / "mine" / "adapter_config.json").write_text('{"r": 2, "target_modules": "q_.*"}')
    with pytest.raises(ValueError, match="--plan needs r, a positive int, and target_modules, a list"):
        Plan(settings(adapter=str(tmp_path / "mine")), m)
