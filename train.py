"""
Trains a policy with GTPO, GRPO or SFT alone: one plain loop, on one CPU or on many GPUs.

    python train.py                                             the arithmetic demo: a laptop CPU, some minutes, nothing to download
    python train.py config/gsm8k.toml --model=DIR               a Hugging Face folder on GSM8K
    torchrun --nproc_per_node=8 train.py config/gsm8k.toml --model=DIR
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/gsm8k.toml --model=DIR
    python train.py --help                                      every setting; a TOML file sets any of them, flags win

Each step: sample a group of completions for every prompt, reward them, turn rewards into advantages and per-token weights, take one
gradient step. Output goes to out/NAME/: config.toml, metrics.jsonl (one line a step), ckpt.pt, model/ in Hugging Face format.
"""
import contextlib
import difflib
import functools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from data import SYSTEM_PROMPT, demonstration, encode_prompts, held_out, imperfect_demonstration, load_problems
from eval import evaluate
from gtpo import (conflict_weights, group_advantages, grpo_weights, gtpo_weights, keep_completions, kl_tokens, mean_entropy, surrogate_loss,
                  token_logps)
from model import GPT, Config
from rewards import accuracy_reward, format_reward
from sample import completion_texts, sample, seeded_uniforms, show_group
from tokenizer import Tokenizer, write_byte_tokenizer


@dataclass
class TrainConfig:
    # what to train on what
    name: str = "arithmetic"            # the run's name; output goes to OUT_DIR/NAME/
    out_dir: str = "out"                # the folder of all runs
    algo: str = "gtpo"                  # gtpo, grpo, or sft (only the warm-up)
    model: str = ""                     # folder of a model in Hugging Face format; empty: a tiny Llama and a byte tokenizer are made
    adapter: str = ""                   # folder of a LoRA adapter in PEFT's format to start from
    data: str = "arithmetic"            # name (arithmetic, gsm8k, math) or path of a .jsonl or .jsonl.gz file of problems
    eval_data: str = ""                 # problems to evaluate on; empty: the test split of DATA, or problems held out of the file
    system_prompt: str = "default"      # system turn of every prompt; default: the one of data.py (the demo's template leaves it out); empty: none
    prompt_style: str = "auto"          # chat (the tokenizer's template), plain, or auto: chat if there is a template
    seed: int = 0                       # all randomness follows from it: weights of a new model, order of problems, completions
    device: str = "auto"                # cpu, cuda, or auto
    dtype: str = "auto"                 # of the forward pass: float32, or bfloat16 by autocast; auto: bfloat16 on cuda. Weights are float32

    # supervised warm-up (SFT) on the gold solutions in the tagged format; for arithmetic on demonstrations with mistakes
    sft_steps: int = 900                # updates of the warm-up; 0: none
    sft_batch_size: int = 32            # demonstrations per step, over all processes
    sft_learning_rate: float = 3e-3     # peak; cosine to 0
    sft_max_tokens: int = 1024          # longer demonstrations (prompt and solution) are skipped and counted

    # reinforcement learning
    steps: int = 150                    # updates of the policy, one per rollout unless updates_per_rollout is larger
    prompts_per_step: int = 16          # prompts per step over all processes; must be divisible by their number
    group_size: int = 8                 # G, completions per prompt
    max_prompt_tokens: int = 64         # longer prompts are skipped and counted, never cut
    max_new_tokens: int = 48            # longer completions are cut off there and count like others
    temperature: float = 1.0            # of sampling and of the log-probs in the loss alike
    learning_rate: float = 3e-4         # peak; cosine to 0
    warmup_ratio: float = 0.005         # share of the steps in which the learning rate rises linearly
    weight_decay: float = 0.1           # AdamW's, on matrices only
    adam_beta2: float = 0.99            # AdamW's second beta; the first is 0.9
    grad_clip: float = 0.1              # largest norm of the gradient; 0: no clipping
    micro_tokens: int = 16384           # tokens per forward pass (padding counted): less memory, same result
    updates_per_rollout: int = 1        # more than one makes the ratio differ from 1

    # GTPO: each part is a switch of its own
    gamma: float = 0.1                  # weight of the entropy term A - gamma <H>; 0 turns it off
    conflict: bool = True               # protect conflict tokens: weight 2 where A > 0, 0 where A < 0
    entropy_filter: bool = True         # drop completions with <H> above the threshold if the policy began below it
    entropy_threshold: float = math.log(2)  # of the filter, in nats
    filter_negative_only: bool = False  # the filter drops only completions with A < 0

    # GRPO
    scale_advantages: bool = True       # divide by the standard deviation of the group's rewards
    epsilon: float = 0.2                # clip range of the ratio
    beta: float = 0.0                   # weight of the KL term to the policy as it was before RL; 0: none, and no reference is held

    # looking and keeping
    eval_problems: int = 200            # problems of the evaluation before and after RL
    eval_samples: int = 8               # completions for each
    eval_every: int = 0                 # also evaluate every so many RL steps; 0: only before and after
    save_every: int = 50                # steps between checkpoints
    show_every: int = 25                # RL steps between sampled groups shown on the screen; 0: none
    resume: str = "no"                  # no, yes (--resume), or auto: continue if there is a checkpoint
    resume_force: bool = False          # resume although the configuration differs
    overwrite: bool = False             # delete the run that stands in the output folder
    max_bad_updates: int = 10           # stop after so many non-finite gradients in a row
    timeout_minutes: float = 30.0       # how long processes wait for one another


# ---------------------------------------------------------------------------------------------------------------------------
# configuration

def help_text():
    """--help: every field with its default and the comment beside it, read from this file."""
    lines = []
    with open(__file__, encoding="utf-8") as f:
        source = f.read().split("class TrainConfig:")[1].split("\n\n\n")[0]
    for line in source.splitlines():
        if m := re.match(r"    (\w+): (\w+) = (.+?)  +# (.*)", line):
            lines.append(f"  --{m[1]}={m[3]}".ljust(36) + f" {m[4]}")
        elif m := re.match(r"    # (.*)", line):
            lines.append(f"\n{m[1]}")
    return __doc__ + "\n".join(lines)


def convert(kind, value, what):
    """The value of a flag (text) or of a TOML key as the type of the field; ValueError says what was expected."""
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no"):
        return value.lower() in ("true", "1", "yes")
    try:
        if kind is not bool and isinstance(value, str) and kind is not str:
            value = kind(value)
    except ValueError:
        pass
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{what}: expected {dict(int='a whole number', float='a number', bool='true or false', str='text')[kind.__name__]}, "
                         f"found {value!r}")
    return value


def read_config(argv):
    """[FILE.toml] and --key=value flags -> TrainConfig. Flags win over the file, the file over the defaults. `--flag` alone is true."""
    kinds = {f.name: f.type if isinstance(f.type, type) else {"str": str, "int": int, "float": float, "bool": bool}[f.type]
             for f in fields(TrainConfig)}
    values, flags, file = {}, {}, None

    def known(name, what):
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.0)[0]
            raise ValueError(f"{what} does not exist; the nearest is {near} (python train.py --help lists all)")
        return kinds[name]

    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if file is not None:
                raise ValueError(f"two configuration files given, {file} and {word}; give one, and flags as --name=value")
            file = word
            continue
        name, given, value = word[2:].partition("=")
        name = name.replace("-", "_")
        kind = known(name, f"flag --{name}")
        if not given:
            if kind is bool or name == "resume":
                value = "true" if kind is bool else "yes"
            elif words and not words[0].startswith("--"):
                value = words.pop(0)
            else:
                raise ValueError(f"flag --{name} needs a value: --{name}=...")
        flags[name] = convert(kind, value, f"flag --{name}")
    if file is not None:
        try:
            with open(file, "rb") as f:
                content = tomllib.load(f)
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: no such configuration file; presets are in config/") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise ValueError(f"{file}: not valid TOML: {e}") from None
        for name, value in content.items():
            values[name] = convert(known(name, f"{file}: key {name!r}"), value, f"{file}: key {name!r}")
    return TrainConfig(**{**values, **flags})


def check_config(c, world_size):
    """Refuses what cannot work, before anything is loaded or written. ValueError names the setting."""
    for name, allowed in (("algo", ("gtpo", "grpo", "sft")), ("device", ("auto", "cpu", "cuda")), ("dtype", ("auto", "float32", "bfloat16")),
                          ("resume", ("no", "yes", "auto")), ("prompt_style", ("auto", "chat", "plain"))):
        if getattr(c, name) not in allowed:
            raise ValueError(f"{name}={getattr(c, name)!r}: should be one of {', '.join(allowed)}")
    least = dict(sft_batch_size=1, prompts_per_step=1, group_size=2, max_prompt_tokens=1, max_new_tokens=1, sft_max_tokens=2, micro_tokens=1,
                 updates_per_rollout=1, eval_problems=1, eval_samples=1, save_every=1, max_bad_updates=1, seed=0, sft_steps=0, steps=0,
                 eval_every=0, show_every=0, weight_decay=0, grad_clip=0, gamma=0, beta=0, warmup_ratio=0, entropy_threshold=0)
    for name, smallest in least.items():
        if getattr(c, name) < smallest:
            raise ValueError(f"{name}={getattr(c, name)}: should be {smallest} or more")
    for name in ("temperature", "learning_rate", "sft_learning_rate", "epsilon", "timeout_minutes"):
        if getattr(c, name) <= 0:
            raise ValueError(f"{name}={getattr(c, name)}: should be above 0")
    if not 0 <= c.adam_beta2 < 1:
        raise ValueError(f"adam_beta2={c.adam_beta2}: should be at least 0 and below 1")
    if c.updates_per_rollout > 1 and c.algo == "gtpo":
        raise ValueError("updates_per_rollout: GTPO has no clipping and takes one update per rollout; use --algo=grpo for more")
    for name in ("prompts_per_step", "sft_batch_size"):
        if getattr(c, name) % world_size:
            raise ValueError(f"{name}={getattr(c, name)} is not divisible by the {world_size} processes; choose a multiple of {world_size}")
    if not re.fullmatch(r"[\w.+-]+", c.name) or c.name.startswith("."):
        raise ValueError(f"name={c.name!r}: use letters, digits, '-', '_', '+' and '.'; the folder is chosen with --out_dir")
    if c.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': this PyTorch sees no CUDA device; use --device=cpu")
    if c.sft_steps + c.steps == 0:
        raise ValueError("sft_steps and steps are both 0: there is nothing to do")


def to_toml(c):
    return "".join(f"{k} = {json.dumps(v)}\n" for k, v in asdict(c).items())       # these JSON values are TOML values, too


# ---------------------------------------------------------------------------------------------------------------------------
# processes

class Processes:
    """This process among those that torchrun started (alone without torchrun). Data parallelism is just sum(), called on gradients."""

    def __init__(self, device, timeout_minutes):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=timeout_minutes))
        self.main = self.rank == 0

    def sum(self, *tensors):
        """Replaces each tensor by its sum over all processes."""
        if self.size > 1:
            for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
                work.wait()

    def totals(self, values):
        """Sums a dictionary of numbers over all processes, in float64."""
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        self.sum(tensor)
        return dict(zip(values, tensor.tolist()))

    def barrier(self):
        if self.size > 1:
            dist.barrier()


# ---------------------------------------------------------------------------------------------------------------------------
# the pieces of a step

@functools.lru_cache(maxsize=4)
def permutation(n, seed, label, epoch):
    return random.Random(f"{seed} {label} {epoch}").sample(range(n), n)


def order(number, n, seed, label):
    """Index of the number-th problem to be used, of n: every epoch is a new permutation, and all follows from the seed."""
    epoch, place = divmod(number, n)
    return permutation(n, seed, label, epoch)[place]


def micro_batches(prompt_lengths, completion_lengths, prompt_of, budget):
    """Splits completions into micro-batches of at most `budget` tokens, padding counted (a single longer one stands alone).
    Completions of one prompt stay side by side, since each micro-batch runs each of its prompts once. Yields lists of indices."""
    longest = {}
    for i, p in enumerate(prompt_of):
        longest[p] = max(longest.get(p, 0), completion_lengths[i])
    micro, prompts, Tp, L = [], set(), 0, 0
    for i in sorted(range(len(prompt_of)), key=lambda i: (longest[prompt_of[i]], prompt_of[i], completion_lengths[i])):
        more, Tp2, L2 = prompts | {prompt_of[i]}, max(Tp, prompt_lengths[prompt_of[i]]), max(L, completion_lengths[i])
        if micro and len(more) * Tp2 + (len(micro) + 1) * L2 > budget:
            yield micro
            micro, more, Tp2, L2 = [], {prompt_of[i]}, prompt_lengths[prompt_of[i]], completion_lengths[i]
        micro, prompts, Tp, L = micro + [i], more, Tp2, L2
    if micro:
        yield micro


def pad(rows, device):
    """Lists of ids -> ids (N, T), right-padded with 0, and their lengths (N,)."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, :len(row)] = torch.tensor(row, dtype=torch.long)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def completion_logps(model, prompts, completions, prompt_of, temperature=1.0):
    """Log-probs of completions (lists of ids) after their prompts -> (tokens,), the real tokens of all completions, one after another."""
    used = sorted(set(prompt_of))
    device = model.head_weight.device
    prompt_ids, prompt_lengths = pad([prompts[p] for p in used], device)            # (P, Tp)
    ids, lengths = pad(completions, device)                                         # (N, L)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]             # (N, L)
    prompt_of = torch.tensor([used.index(p) for p in prompt_of], device=device)     # (N,)
    hidden = model.completion_hidden(prompt_ids, prompt_lengths, ids, prompt_of)    # (N, L, H)
    return token_logps(hidden[mask], model.head_weight, ids[mask], temperature)[0]


def learning_rate(step, steps, peak, warmup_ratio):
    """Linear warm-up over the first warmup_ratio of the steps, then a cosine to 0."""
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def make_optimizer(model, c):
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": c.weight_decay},
              {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, c.adam_beta2))


def update(model, optimizer, processes, lr, grad_clip):
    """Sums the gradients over processes, clips and steps. Returns the gradient norm before clipping; a non-finite one changes nothing."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        if p.grad is None:                                                          # this process had nothing to learn from
            p.grad = torch.zeros_like(p)
    processes.sum(*(p.grad for p in params))
    norm = torch.nn.utils.clip_grad_norm_(params, grad_clip or math.inf).item()
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def peak_memory(device):
    """Largest memory of this process so far, MiB: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def make_tiny_model(folder, seed):
    """Writes the default policy, an untrained Llama of 0.7 million parameters, and its byte tokenizer as a Hugging Face folder."""
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    model = GPT(Config.from_dict(dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=tokenizer.vocab_size, hidden_size=128, intermediate_size=384,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, rms_norm_eps=1e-6,
        rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False, initializer_range=0.02,
        eos_token_id=tokenizer.eos_ids[0], pad_token_id=tokenizer.pad_id, torch_dtype="float32")))
    model.save_pretrained(folder)


def main(argv):
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return
    c = read_config(argv)
    check_config(c, int(os.environ.get("WORLD_SIZE", 1)))
    processes = Processes(c.device, c.timeout_minutes)
    try:
        with Signals() as signals:
            train(c, processes, signals)
    finally:
        if processes.size > 1:
            dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------------
# output folder: config.toml, metrics.jsonl, ckpt.pt, model/

RESUME_MAY_DIFFER = {"name", "out_dir", "resume", "resume_force", "overwrite", "device", "micro_tokens", "save_every", "show_every",
                     "eval_every", "max_bad_updates", "timeout_minutes"}            # none of these changes what is learned


def open_output(c, out, processes):
    """Returns the checkpoint to continue from, or None for a new run. ValueError if the folder holds a run and nobody said what to do."""
    path = os.path.join(out, "ckpt.pt")
    if c.overwrite and c.resume == "no":
        processes.barrier()
        if processes.main:
            for name in ("ckpt.pt", "metrics.jsonl", "config.toml"):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(out, name))
            for name in ("model", "sft", "init"):
                shutil.rmtree(os.path.join(out, name), ignore_errors=True)
        processes.barrier()
    elif c.resume == "no" and (os.path.exists(path) or os.path.exists(os.path.join(out, "metrics.jsonl"))):
        raise ValueError(f"{out} already holds a run: --resume continues it, --name=OTHER starts another beside it, --overwrite deletes it")
    if c.resume == "no" or (c.resume == "auto" and not os.path.exists(path)):
        return None
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no checkpoint to resume from; start without --resume")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        before = checkpoint["config"]
    except Exception as e:                                                          # torch raises many kinds for a broken file
        raise ValueError(f"{path}: not a readable checkpoint ({type(e).__name__}: {str(e)[:200]})") from None
    now = asdict(c)
    differing = [f"{k}: {before.get(k)!r} then, {now[k]!r} now" for k in now if k not in RESUME_MAY_DIFFER and before.get(k) != now[k]]
    if differing and not c.resume_force:
        raise ValueError(f"{path} was written with another configuration:\n  " + "\n  ".join(differing) +
                         "\nGive the same settings, or --resume_force to go on with the new ones")
    return checkpoint


def save_checkpoint(out, state):
    """Written beside, flushed to the disk, then renamed: the previous checkpoint stays until the new one is whole."""
    path = os.path.join(out, "ckpt.pt")
    with open(path + ".tmp", "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


def keep_metrics_before(path, step):
    """Cuts metrics.jsonl back to the lines of the steps before `step`, those that the checkpoint knows of."""
    if not os.path.exists(path):
        return
    kept = []
    with open(path, encoding="utf-8") as f:
        for line in f:
            with contextlib.suppress(ValueError):                                   # the last line of a killed run may be torn
                row = json.loads(line)
                if row["step"] < step:
                    kept.append(line if line.endswith("\n") else line + "\n")
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.writelines(kept)
    os.replace(path + ".tmp", path)


# ---------------------------------------------------------------------------------------------------------------------------
# the loop

def train(c, processes, signals):
    rank, device, main = processes.rank, processes.device, processes.main
    say = tqdm.write if main else lambda text: None
    out = os.path.join(c.out_dir, c.name)
    checkpoint = open_output(c, out, processes)
    os.makedirs(out, exist_ok=True)

    # the policy, its tokenizer, the problems
    folder = c.model or os.path.join(out, "init")
    if not c.model and main and checkpoint is None:
        make_tiny_model(folder, c.seed)
    processes.barrier()
    tokenizer = Tokenizer.from_pretrained(folder)
    model = GPT.from_pretrained(folder, adapter=c.adapter or None, device=device)
    if not tokenizer.eos_ids:
        raise ValueError(f"{folder}: no end token is known, completions would never end; set eos_token_id in generation_config.json")
    if c.max_prompt_tokens + c.max_new_tokens > model.config.max_position_embeddings:
        raise ValueError(f"max_prompt_tokens {c.max_prompt_tokens} + max_new_tokens {c.max_new_tokens} is more than the model's "
                         f"{model.config.max_position_embeddings} positions (max_position_embeddings)")
    system_prompt = SYSTEM_PROMPT if c.system_prompt == "default" else c.system_prompt
    is_file = ".json" in c.data                                                    # a path; else the name of a data set
    problems = load_problems(c.data, "train")
    if c.eval_data:
        eval_problems = load_problems(c.eval_data, "test")[:c.eval_problems]
    elif is_file:
        problems, eval_problems = held_out(problems, c.eval_problems, 0)            # the same split for every seed
    else:
        eval_problems = load_problems(c.data, "test")[:c.eval_problems]
    prompts, skipped = encode_prompts(tokenizer, problems, c.max_prompt_tokens, system_prompt, c.prompt_style)
    if len(prompts) < max(1, c.prompts_per_step if c.algo != "sft" and c.steps else 1):
        raise ValueError(f"{c.data}: {len(prompts)} usable prompts ({skipped} longer than max_prompt_tokens={c.max_prompt_tokens}), "
                         f"prompts_per_step={c.prompts_per_step} asks for more")

    def sft_example(number):
        """The number-th demonstration of the warm-up: prompt ids and completion ids."""
        problem, prompt = prompts[order(number, len(prompts), c.seed, "sft")]
        arithmetic = c.data == "arithmetic"
        text = imperfect_demonstration(problem, random.Random(f"{c.seed} {number}")) if arithmetic else demonstration(problem)
        return prompt, tokenizer.encode(text) + [tokenizer.eos_id]

    def evaluation(step, label):
        """Held-out pass@k, maj@k and format, by all processes together; goes to metrics.jsonl."""
        ks = sorted({1, c.eval_samples})
        with autocast():
            result = evaluate(model, tokenizer, eval_problems, c.eval_samples, ks, c.max_new_tokens, temperature=c.temperature,
                              system_prompt=system_prompt, prompt_style=c.prompt_style, max_prompt_tokens=c.max_prompt_tokens, seed=c.seed,
                              rank=rank, world_size=processes.size)
        del result["rows"]
        log({"step": step, "phase": "eval", "label": label, **result})
        return result

    def log(row):
        if main:
            row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}         # JSON has no nan
            metrics_file.write(json.dumps(row) + "\n")
            metrics_file.flush()

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=c.dtype == "bfloat16" or (c.dtype == "auto" and device.type == "cuda"))

    def save(next_step):
        if main:
            save_checkpoint(out, {"config": asdict(c), "step": next_step, "processes": processes.size, "model": model.state_dict(),
                                  "optimizer": optimizer.state_dict(), "initial_entropy": initial_entropy, "before": before,
                                  "skipped_updates": skipped_updates})
        processes.barrier()

    # start, or continue
    sft_steps, steps = c.sft_steps, c.steps if c.algo != "sft" else 0
    start, initial_entropy, before, skipped_updates, bad_in_a_row = 0, None, None, 0, 0
    optimizer = make_optimizer(model, c)
    if checkpoint is not None:
        start, initial_entropy, before = checkpoint["step"], checkpoint["initial_entropy"], checkpoint["before"]
        skipped_updates = checkpoint["skipped_updates"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        say(f"resumed at step {start} of {sft_steps + steps}")
    if main:
        keep_metrics_before(os.path.join(out, "metrics.jsonl"), start)
        metrics_file = open(os.path.join(out, "metrics.jsonl"), "a", encoding="utf-8")
        with open(os.path.join(out, "config.toml"), "w", encoding="utf-8") as f:
            f.write(to_toml(c))

    parameters = sum(p.numel() for p in model.parameters())
    say(f"""
{c.algo.upper()} on {c.data}: {len(prompts):,} problems ({skipped} skipped: longer than {c.max_prompt_tokens} tokens), {len(eval_problems)} held out for evaluation
policy    {c.model or 'a new ' + model.config.model_type}, {parameters / 1e6:,.2f} million parameters, on {device.type}, {processes.size} process(es), {torch.get_num_threads()} threads each
warm-up   {sft_steps} SFT steps of {c.sft_batch_size} demonstrations, learning rate {c.sft_learning_rate:g}
RL        {steps} steps of {c.prompts_per_step} prompts x {c.group_size} completions of up to {c.max_new_tokens} tokens, learning rate {c.learning_rate:g}
output    {out}/ (config.toml, metrics.jsonl, ckpt.pt, model/)
""")
    reference, bar = None, None
    for step in range(start, sft_steps + steps):
        began, rl = time.time(), step >= sft_steps
        if bar is None or step == sft_steps:
            if bar is not None:
                bar.close()
            bar = tqdm(total=steps if rl else sft_steps, initial=step - sft_steps if rl else step, desc=c.algo.upper() if rl else "SFT",
                       unit="step", disable=not main, dynamic_ncols=True)

        if not rl:
            # supervised warm-up: cross-entropy on demonstrations, a mean over the tokens of the global batch
            count = c.sft_batch_size // processes.size
            examples = [sft_example(step * c.sft_batch_size + rank * count + i) for i in range(count)]
            examples = [(p, o) for p, o in examples if len(p) + len(o) <= c.sft_max_tokens]
            totals = processes.totals({"tokens": sum(len(o) for _, o in examples), "examples": len(examples)})
            loss = 0.0
            for micro in micro_batches([len(p) for p, _ in examples], [len(o) for _, o in examples], range(len(examples)), c.micro_tokens):
                with autocast():
                    logps = completion_logps(model, [p for p, _ in examples], [examples[i][1] for i in micro], micro)
                micro_loss = -logps.sum() / totals["tokens"]
                micro_loss.backward()
                loss += micro_loss.item()
            lr = learning_rate(step, sft_steps, c.sft_learning_rate, c.warmup_ratio)
            norm = update(model, optimizer, processes, lr, 1.0)
            row = {"phase": "sft", "loss": processes.totals({"loss": loss})["loss"], "tokens": totals["tokens"],
                   "too_long": c.sft_batch_size - totals["examples"]}
            shown = dict(loss=f"{row['loss']:.3f}")
        else:
            if step == sft_steps:                                                   # RL begins
                if before is None:
                    before = evaluation(step, "before")
                optimizer = make_optimizer(model, c)
                if main and sft_steps:
                    model.save_pretrained(os.path.join(out, "sft"))
                processes.barrier()
            if c.algo == "grpo" and c.beta and reference is None:
                reference = GPT.from_pretrained(os.path.join(out, "sft") if sft_steps else folder, device=device).requires_grad_(False)

            # 1. this step's prompts, the same for any number of processes; each process takes its share, whole groups
            P, G, L = c.prompts_per_step // processes.size, c.group_size, c.max_new_tokens
            mine = range(rank * P, rank * P + P)
            first = (step - sft_steps) * c.prompts_per_step
            batch = [prompts[order(first + i, len(prompts), c.seed, "rl")] for i in mine]

            # 2. a group of G completions for each
            noise = torch.stack([seeded_uniforms((c.seed, "rollout", step, i), G, L) for i in mine])                # (P, G, L)
            with autocast():
                samples = sample(model, [ids for _, ids in batch], G, L, c.temperature, eos_ids=tokenizer.eos_ids, noise=noise)
            ids, mask = samples.ids, samples.mask                                   # (P, G, L)
            sampled = time.time()

            # 3. rewards
            texts = completion_texts(tokenizer, samples)                            # P lists of G
            formats = torch.tensor([[format_reward(text) for text in group] for group in texts])                    # (P, G)
            correct = torch.tensor([[accuracy_reward(text, batch[p][0].answer) for text in texts[p]] for p in range(P)])
            rewards = (formats + correct).to(device)                                # (P, G)

            # 4. advantages and the weight of every token in J
            advantages = group_advantages(rewards, "std" if c.algo == "grpo" and c.scale_advantages else "none")    # (P, G)
            entropy = mean_entropy(samples.entropy, mask)                           # (P, G)
            if initial_entropy is None:                                             # <H>_ini: the first global batch, before any update
                total = processes.totals({"entropy": entropy.sum().item(), "count": P * G})
                initial_entropy = total["entropy"] / total["count"]
            lam = conflict_weights(ids, mask, advantages)                           # (P, G, L)
            kept = keep_completions(entropy, initial_entropy, c.entropy_threshold)  # (P, G)
            if c.algo == "gtpo":
                weights = gtpo_weights(ids, mask, advantages, entropy, initial_entropy, c.gamma, c.conflict, c.entropy_filter,
                                       c.entropy_threshold, c.filter_negative_only)
            else:
                weights = grpo_weights(mask, advantages)
            weights = weights / c.prompts_per_step                                  # the mean over the groups of the global batch

            # 5. the gradient, in micro-batches of real tokens; a completion whose weights are all 0 has none
            lengths, used = mask.sum(-1).tolist(), (weights != 0).any(-1).tolist()  # (P, G)
            rows = [(p, ids[p, g, :lengths[p][g]].tolist(), weights[p, g, :lengths[p][g]]) for p in range(P) for g in range(G)
                    if used[p][g] or (reference is not None and lengths[p][g])]
            old_logps, loss, norm = {}, 0.0, 0.0
            for repeat in range(c.updates_per_rollout):
                for n, micro in enumerate(micro_batches([len(ids) for _, ids in batch], [len(o) for _, o, _ in rows], [p for p, _, _ in rows],
                                                        c.micro_tokens)):
                    arguments = [ids for _, ids in batch], [rows[i][1] for i in micro], [rows[i][0] for i in micro], c.temperature
                    with autocast():
                        logps = completion_logps(model, *arguments)                 # (tokens,)
                    old = old_logps.setdefault(n, logps.detach()) if c.updates_per_rollout > 1 else None
                    micro_loss = surrogate_loss(logps, torch.cat([rows[i][2] for i in micro]), old, c.epsilon if c.algo == "grpo" else None)
                    if reference is not None:
                        with torch.no_grad(), autocast():
                            ref_logps = completion_logps(reference, *arguments)
                        scale = torch.cat([torch.full_like(rows[i][2], 1 / (len(rows[i][1]) * G * c.prompts_per_step)) for i in micro])
                        micro_loss = micro_loss + c.beta * (scale * kl_tokens(logps, ref_logps)).sum()
                    micro_loss.backward()
                    loss += micro_loss.item() / c.updates_per_rollout
                # 6. the update
                lr = learning_rate(step - sft_steps, steps, c.learning_rate, c.warmup_ratio)
                norm = update(model, optimizer, processes, lr, c.grad_clip)

            real = mask.sum().item()
            totals = processes.totals({
                "loss": loss, "completions": P * G, "tokens": real, "reward": rewards.sum().item(), "accuracy": (correct > 0).sum().item(),
                "format": (formats >= 10).sum().item(), "entropy": entropy.sum().item(), "kept": kept.sum().item(),
                "conflict": ((lam != 1) & mask).sum().item(), "truncated": (~samples.finished).sum().item(),
                "tied": (rewards.amax(1) == rewards.amin(1)).sum().item()})
            n = totals["completions"]
            row = {"phase": c.algo, "reward": totals["reward"] / n, "accuracy": totals["accuracy"] / n, "format": totals["format"] / n,
                   "entropy": totals["entropy"] / n, "initial_entropy": initial_entropy, "kept": totals["kept"] / n,
                   "conflict": totals["conflict"] / max(1, totals["tokens"]), "tied": totals["tied"] / c.prompts_per_step,
                   "truncated": totals["truncated"] / n, "completion_tokens": totals["tokens"] / n, "loss": totals["loss"],
                   "tokens": totals["tokens"], "sample_seconds": sampled - began}
            shown = dict(reward=f"{row['reward']:.2f}", acc=f"{row['accuracy']:.2f}", format=f"{row['format']:.2f}", H=f"{row['entropy']:.3f}",
                         kept=f"{row['kept']:.2f}", conflict=f"{row['conflict']:.2f}", grad=f"{norm:.2f}")
            if main and c.show_every and (step - sft_steps) % c.show_every == 0:
                say(f"\nstep {step - sft_steps}, one group:\n" + show_group(tokenizer, batch[0][0].question, batch[0][0].answer, ids[0], mask[0],
                                                                            rewards[0], advantages[0], entropy[0], kept[0], lam[0]))

        # after either kind of step: bookkeeping
        bad = not math.isfinite(norm)
        skipped_updates, bad_in_a_row = skipped_updates + bad, bad_in_a_row + 1 if bad else 0
        log({"step": step, **row, "grad_norm": norm, "lr": lr, "skipped_updates": skipped_updates, "seconds": time.time() - began,
             "memory_mib": peak_memory(device)})
        bar.set_postfix(shown)
        bar.update()
        if bad_in_a_row >= c.max_bad_updates:
            raise ValueError(f"step {step}: the gradient was not finite {bad_in_a_row} times in a row; the last good checkpoint is "
                             f"{out}/ckpt.pt; try a lower learning rate")
        done = step + 1
        stop = processes.totals({"stop": signals.received})["stop"] > 0
        if rl and c.eval_every and (done - sft_steps) % c.eval_every == 0 and done < sft_steps + steps:
            evaluation(step, "during")
        if stop or done % c.save_every == 0 or done in (sft_steps, sft_steps + steps):
            save(done)
        if stop:
            bar.close()
            say(f"stopped after step {step}; continue with the same command and --resume")
            return
    if bar is not None:
        bar.close()

    after = evaluation(sft_steps + steps - 1, "after")
    if main:
        model.save_pretrained(os.path.join(out, "model"))
        say(before_after(before, after))
        say(f"""
look at a group     python sample.py --model={out}/model --prompt={shlex.quote(eval_problems[0].question[:60])} --gold={shlex.quote(eval_problems[0].answer)}
evaluate            python eval.py --model={out}/model --data={c.data} --n=8 --k=1,8
train on            python train.py --resume --resume_force --steps={2 * c.steps} (and your other settings)""")


class Signals:
    """SIGINT and SIGTERM ask the loop to finish its step, save and stop; a second one stops at once."""

    def __enter__(self):
        self.received = 0
        self.before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def handle(self, number, frame):
        self.received = 1
        signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def before_after(before, after):
    names = [k for k in after if k.startswith(("pass@", "maj@")) and k != "maj@1"] + ["format", "truncated"]
    lines = [f"{'':12}{'before':>8}{'after':>8}"] if before else [f"{'':12}{'after':>8}"]
    for name in names:
        lines.append(f"{name:12}" + (f"{100 * before[name]:7.1f}%" if before else "") + f"{100 * after[name]:7.1f}%")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
