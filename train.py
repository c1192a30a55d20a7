"""
Trains a policy with GTPO, GRPO or SFT alone: one plain loop, on one CPU or on many GPUs.

    python train.py                                             the arithmetic demo: a laptop CPU, some minutes, nothing to download
    python train.py config/gsm8k.toml --model=DIR               a small model with random weights on GSM8K
    torchrun --nproc_per_node=8 train.py config/qwen2.5_3b_gsm8k.toml --model=DIR
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \\
        train.py config/qwen2.5_3b_gsm8k.toml --model=DIR --prompts_per_step=16             on each of two nodes that share out/
    python train.py config/qwen2.5_3b_gsm8k.toml --plan         parameters, memory and FLOPs per step; needs neither weights nor GPU
    python train.py --help                                      every setting; a TOML file sets any of them, flags win

Each step: sample a group of completions for every prompt, reward them, turn rewards into advantages and per-token weights, take one
gradient step. Output goes to out/NAME/: config.toml, metrics.jsonl (one line a step), ckpt.pt, model/ in Hugging Face format (with LoRA: adapter/
in PEFT's); beside them init/ or sft/, where a run began, heldout.jsonl, problems held out of a file, and lock, empty.

Exit code: 0; 2 for a mistake or a fault, with one message; 130 or 143 when Ctrl-C or SIGTERM stopped the run: it ends its step, saves,
and continues with --resume (a second signal ends it at once). torchrun restarts a process that a signal stopped, as after any other
exit code than 0, if it has restarts left. `torchrun --max_restarts=3 ... train.py ... --resume=auto` goes on from the last checkpoint; on
several nodes set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it, or the restarted processes read the addresses of the dead ones.
"""
import contextlib
import functools
import hashlib
import json
import math
import os
import random
import re
import resource
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from tqdm import tqdm

from data import NAMES, SYSTEM_PROMPT, demonstration, encode_prompts, held_out, load_problems
from eval import evaluate
from gtpo import (conflict_weights, group_advantages, grpo_weights, gtpo_weights, keep_completions, kl_tokens, mean_entropy,
                  surrogate_loss, token_logps)
from lib.arithmetic import imperfect_demonstration, write_byte_tokenizer
from model import GPT, LORA_TARGETS, Config
from plan import model_config, report
from rewards import reward_parts
from run import (Processes, Signals, clear_output, help_text, keep_metrics_before, lock_output, metrics_rows, read_config, restore, save_checkpoint,
                 to_toml, write_whole)
from sample import completion_texts, sample, seeded_uniforms, show_group
from tokenizer import Tokenizer


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
    sft_max_tokens: int = 1024          # demonstrations (prompt and solution) longer than this or than the model's window are skipped

    # reinforcement learning
    steps: int = 130                    # updates of the policy, one per rollout unless updates_per_rollout is larger
    prompts_per_step: int = 16          # prompts per step over all processes; must be divisible by their number
    group_size: int = 8                 # G, completions per prompt
    max_prompt_tokens: int = 64         # longer prompts are skipped and counted, never cut
    max_new_tokens: int = 48            # longer completions are cut off there and count like others
    temperature: float = 1.0            # of sampling and of the log-probs in the loss alike
    learning_rate: float = 3e-4         # peak; cosine to 0
    warmup_ratio: float = 0.005         # share of the steps in which the learning rate rises linearly; in the warm-up, too
    weight_decay: float = 0.1           # AdamW's, on matrices only; in the warm-up, too
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

    # LoRA, memory, speed
    lora_rank: int = 0                  # rank of a LoRA adapter, which is then all that is trained (the weights below may be bfloat16); 0: none
    lora_alpha: float = 0.0             # the adapter counts lora_alpha / lora_rank times; 0: the same as lora_rank
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # linear layers that get one
    merge: bool = False                 # at the end also write out/NAME/model with the adapter merged into the weights
    checkpointing: bool = False         # keep no activations inside layers, run them again in the backward pass: less memory, same result
    zero: bool = False                  # divide the optimizer's state over the processes (ZeroRedundancyOptimizer)
    compile: str = "auto"               # torch.compile of the training forward and the decode step: yes, no, or auto: yes on cuda
    plan: bool = False                  # only print what the run would need, and end

    # looking and keeping
    eval_problems: int = 200            # problems of the evaluation before and after RL
    eval_samples: int = 8               # completions for each
    eval_every: int = 0                 # also evaluate every so many RL steps; 0: only before and after
    save_every: int = 50                # steps between checkpoints
    show_every: int = 25                # RL steps between sampled groups shown on the screen; 0: none
    resume: str = "no"                  # no, yes (--resume), or auto: continue if there is a checkpoint, else start afresh
    resume_force: bool = False          # resume although the configuration differs
    overwrite: bool = False             # delete the run that stands in the output folder
    max_bad_updates: int = 10           # stop after so many updates in a row were skipped, their loss or gradient not being finite
    timeout_minutes: float = 30.0       # how long processes wait for one another


# ---------------------------------------------------------------------------------------------------------------------------
# configuration

def check_config(c, world_size):
    """Refuses what cannot work, before anything is loaded or written. ValueError names the setting."""
    for name, allowed in (("algo", ("gtpo", "grpo", "sft")), ("device", ("auto", "cpu", "cuda")), ("dtype", ("auto", "float32", "bfloat16")),
                          ("resume", ("no", "yes", "auto")), ("compile", ("auto", "yes", "no")), ("prompt_style", ("auto", "chat", "plain"))):
        if getattr(c, name) not in allowed:
            raise ValueError(f"{name}={getattr(c, name)!r}: should be one of {', '.join(allowed)}")
    least = dict(sft_batch_size=1, prompts_per_step=1, group_size=2, max_prompt_tokens=1, max_new_tokens=1, sft_max_tokens=2, micro_tokens=1,
                 updates_per_rollout=1, eval_problems=1, eval_samples=1, save_every=1, max_bad_updates=1, seed=0, sft_steps=0, steps=0,
                 eval_every=0, show_every=0, lora_rank=0, lora_alpha=0, weight_decay=0, grad_clip=0, gamma=0, beta=0, warmup_ratio=0, entropy_threshold=0)
    for name, smallest in least.items():
        if getattr(c, name) < smallest:
            raise ValueError(f"{name}={getattr(c, name)}: should be {smallest} or more")
        if isinstance(getattr(c, name), int) and getattr(c, name) >= (limit := 2**63 if name == "seed" else 2**31):
            raise ValueError(f"{name}={getattr(c, name)}: should be below {limit}")
    for name, largest in (("warmup_ratio", 1), ("timeout_minutes", 1e6)):
        if getattr(c, name) > largest:
            raise ValueError(f"{name}={getattr(c, name)}: should be {largest:g} or less")
    for name in ("temperature", "learning_rate", "sft_learning_rate", "epsilon", "timeout_minutes"):
        if getattr(c, name) <= 0:
            raise ValueError(f"{name}={getattr(c, name)}: should be above 0")
    for name in ("adam_beta2", "epsilon"):
        if not 0 <= getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)}: should be at least 0 and below 1")
    if c.overwrite and c.resume != "no":
        raise ValueError(f"--overwrite deletes the run in the output folder and --resume={c.resume} continues it: give one of the two")
    if c.lora_rank and c.adapter:
        raise ValueError(f"lora_rank={c.lora_rank} makes a new adapter, adapter={c.adapter} goes on with an old one: give one of the two")
    if unknown := [t for t in c.lora_targets.split(",") if t not in LORA_TARGETS]:
        raise ValueError(f"lora_targets: {unknown[0]!r} is none of {', '.join(LORA_TARGETS)}")
    if c.merge and not (c.lora_rank or c.adapter):
        raise ValueError("merge: there is no adapter to merge; give --lora_rank or --adapter")
    if c.updates_per_rollout > 1 and c.algo == "gtpo":
        raise ValueError("updates_per_rollout: GTPO has no clipping and takes one update per rollout; use --algo=grpo for more")
    for name, used in (("prompts_per_step", c.algo != "sft"), ("sft_batch_size", c.sft_steps)):
        if used and getattr(c, name) % world_size:
            raise ValueError(f"{name}={getattr(c, name)} is not divisible by the {world_size} processes; choose a multiple of {world_size}")
    if not re.fullmatch(r"[\w.+-]+", c.name) or c.name.startswith("."):
        raise ValueError(f"name={c.name!r}: use letters, digits, '-', '_', '+' and '.'; the folder is chosen with --out_dir")
    if c.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': this PyTorch sees no CUDA device; use --device=cpu")
    if c.sft_steps + (c.steps if c.algo != "sft" else 0) == 0:
        raise ValueError("sft_steps=0" + (" and steps=0" if c.algo != "sft" else " with algo='sft'") + ": there is nothing to do")


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


def completion_logps(model, prompts, completions, prompt_of, temperature=1.0, expected_grad=None):
    """Log-probs of completions (lists of ids) after their prompts -> (tokens,), the real tokens of all completions, one after another.
    expected_grad (tokens,): d loss / d logps if it is known beforehand, see token_logps."""
    used = sorted(set(prompt_of))
    device = model.head_weight.device
    prompt_ids, prompt_lengths = pad([prompts[p] for p in used], device)            # (P, Tp)
    ids, lengths = pad(completions, device)                                         # (N, L)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]             # (N, L)
    prompt_of = torch.tensor([used.index(p) for p in prompt_of], device=device)     # (N,)
    hidden = model.completion_hidden(prompt_ids, prompt_lengths, ids, prompt_of)    # (N, L, H)
    return token_logps(hidden[mask], model.head_weight, ids[mask], temperature, expected_grad=expected_grad)[0]


def learning_rate(step, steps, peak, warmup_ratio):
    """Linear warm-up over the first warmup_ratio of the steps, then a cosine to 0."""
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def make_optimizer(model, c):
    """AdamW on what learns, with weight decay on matrices alone; its state divided over the processes if c.zero."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": c.weight_decay},
              {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]
    if c.zero and dist.is_initialized():
        from torch.distributed.optim import ZeroRedundancyOptimizer                 # imports much, and warns of it
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.0, betas=(0.9, c.adam_beta2))
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, c.adam_beta2))


def update(model, optimizer, processes, lr, grad_clip, loss=0.0):
    """Sums the gradients over processes, clips and steps. Returns the gradient's norm before clipping. If it, or the loss of any process, is not
    finite (then nan is returned), nothing is changed, on all processes alike."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        if p.grad is None:                                                          # this process had nothing to learn from
            p.grad = torch.zeros_like(p)
    losses = torch.tensor(float(loss), device=params[0].device)                     # nan and inf stay what they are in a sum
    processes.sum(losses, *(p.grad for p in params))
    norm = (torch.nn.utils.clip_grad_norm_(params, grad_clip or math.inf) + 0 * losses).item()
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def trained(model):
    """The parameters that learn, by name: all of them, or those of the adapter."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_policy(model, folder):
    """What was learned, as a Hugging Face folder: the whole model, or the adapter in PEFT's format."""
    (model.save_adapter if model.lora else model.save_pretrained)(folder)


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
    """Trains as the command line says. Returns the exit code. ValueError and OSError say what is wrong."""
    if "--help" in argv or "-h" in argv:
        print(help_text(TrainConfig, __doc__))
        return 0
    c = read_config(TrainConfig, argv)
    check_config(c, int(os.environ.get("WORLD_SIZE", 1)))
    if c.plan:
        with tempfile.TemporaryDirectory() as tiny:
            if not c.model:
                make_tiny_model(tiny, c.seed)
            print(report(c, model_config(c.model or tiny), int(os.environ.get("WORLD_SIZE", 1))))
        return 0
    processes = Processes(c.device, c.timeout_minutes)
    with Signals() as signals, contextlib.ExitStack() as held:
        code = train(c, processes, signals, held)
    if processes.size > 1:                                                          # after a fault it might wait for the others
        dist.destroy_process_group()
    return code


def command(argv):
    """main() for the shell: what goes wrong ends with one message and exit code 2; other exceptions are our mistakes and show a traceback."""
    try:
        return main(argv)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as e:
        message = str(e)
    except (RuntimeError, MemoryError) as e:
        first = (str(e) or type(e).__name__).splitlines()[0]
        if isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(e):
            message = (f"out of memory: {first}\nLower micro_tokens (the loss; the result stays the same), or prompts_per_step, group_size and "
                       "max_new_tokens (sampling); the run continues from its last checkpoint with --resume")
        elif isinstance(e, dist.DistError) or re.search("gloo|nccl|connection", str(e), re.IGNORECASE):
            message = f"process {os.environ.get('RANK')}: another process ended, or did not answer within timeout_minutes ({first})"
        else:
            raise
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2


RESUME_MAY_DIFFER = {"name", "out_dir", "resume", "resume_force", "overwrite", "device", "micro_tokens", "save_every", "show_every",
                     "eval_every", "max_bad_updates", "timeout_minutes", "merge", "checkpointing", "zero", "compile", "plan"}    # what is learned is the same
CHECKPOINT = ("config", "step", "processes", "model", "optimizer", "initial_entropy", "before", "reference", "skipped_updates")


def open_output(c, out):
    """Returns the checkpoint to continue from, or None for a new run. ValueError if the folder holds a run and nobody said what to do."""
    path, metrics = os.path.join(out, "ckpt.pt"), os.path.join(out, "metrics.jsonl")
    saved, logged = os.path.exists(path), os.path.exists(metrics) and os.path.getsize(metrics) > 0
    if c.resume == "yes" and not saved:
        raise FileNotFoundError(f"{path}: no checkpoint to resume from; start without --resume" + (" and with --overwrite" if logged else ""))
    if c.resume == "no" and not c.overwrite and (saved or logged):
        held = "a run: --resume continues it, " if saved else "a run that ended before its first checkpoint: "
        raise ValueError(f"{out} already holds {held}--name=OTHER starts another beside it, --overwrite deletes it")
    if c.resume == "no" or not saved:                                               # a new run
        for name in ("model", "adapter", "data", "eval_data"):
            if getattr(c, name) and (os.path.realpath(getattr(c, name)) + os.sep).startswith(os.path.realpath(out) + os.sep):
                raise ValueError(f"{name}={getattr(c, name)} lies in the output folder {out}, which a new run clears; choose another --name")
        return None
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if missing := [key for key in CHECKPOINT if key not in checkpoint]:
            raise ValueError(f"it has no {missing[0]!r}")
        before = dict(checkpoint["config"])
        checkpoint["shapes"] = {name: tuple(tensor.shape) for name, tensor in checkpoint["model"].items()}
    except Exception as e:                                                          # torch raises many kinds for a broken file
        raise ValueError(f"{path}: not a readable checkpoint ({type(e).__name__}: {str(e)[:200]}); --overwrite starts afresh") from None
    now = asdict(c)
    differing = [f"{k}: {before.get(k)!r} then, {now[k]!r} now" for k in now if k not in RESUME_MAY_DIFFER and before.get(k) != now[k]]
    if differing and not c.resume_force:
        raise ValueError(f"{path} was written with another configuration:\n  " + "\n  ".join(differing) +
                         "\nGive the same settings, or --resume_force to go on with the new ones")
    return checkpoint


def use_bfloat16(c, device):
    return c.dtype == "bfloat16" or (c.dtype == "auto" and device.type == "cuda")


def prepare(c, processes, out, held):
    """Reads and checks all that a run needs, and writes nothing but the lock, so that a mistake costs nothing.
    Returns a dictionary of what train() goes on with. ValueError and OSError say what is wrong."""
    if processes.main:
        held.enter_context(lock_output(out))
    checkpoint = open_output(c, out)
    folder = c.model or os.path.join(out, "init")
    with contextlib.ExitStack() as stack:
        source = folder
        if not c.model and checkpoint is None:                                      # the tiny model, which is not in out/NAME/init yet
            source = stack.enter_context(tempfile.TemporaryDirectory())
            make_tiny_model(source, c.seed)
        tokenizer = Tokenizer.from_pretrained(source)
        base = torch.bfloat16 if (c.lora_rank or c.adapter) and use_bfloat16(c, processes.device) else torch.float32         # what is trained is float32
        model = GPT.from_pretrained(source, adapter=c.adapter or None, dtype=base, device=processes.device)
    model.folder, model.checkpointing = folder, c.checkpointing
    if c.lora_rank:
        torch.manual_seed(c.seed)
        model.add_lora(c.lora_rank, c.lora_alpha or c.lora_rank, c.lora_targets.split(","))
    positions = model.config.max_position_embeddings
    if not tokenizer.eos_ids:
        raise ValueError(f"{folder}: no end token is known, completions would never end; set eos_token_id in generation_config.json")
    if c.max_prompt_tokens + c.max_new_tokens > positions:
        raise ValueError(f"max_prompt_tokens {c.max_prompt_tokens} + max_new_tokens {c.max_new_tokens} is more than the model's "
                         f"{positions} positions (max_position_embeddings)")
    optimizer = make_optimizer(model, c)
    if checkpoint is not None:
        restore(model, optimizer, checkpoint, os.path.join(out, "ckpt.pt"))

    problems, is_file = load_problems(c.data, "train"), c.data not in NAMES
    if c.eval_data or not is_file:
        eval_problems = load_problems(c.eval_data or c.data, "test")[:c.eval_problems]
    else:
        problems, eval_problems = held_out(problems, c.eval_problems, 0)            # the same split for every seed
    system_prompt = SYSTEM_PROMPT if c.system_prompt == "default" else c.system_prompt
    prompts, skipped = encode_prompts(tokenizer, problems, c.max_prompt_tokens, system_prompt, c.prompt_style)
    if len(prompts) < max(1, c.prompts_per_step if c.algo != "sft" and c.steps else 1):
        raise ValueError(f"{c.data}: {len(prompts)} usable prompts ({skipped} longer than max_prompt_tokens={c.max_prompt_tokens}), "
                         f"prompts_per_step={c.prompts_per_step} asks for more")
    demonstrations = []
    if c.sft_steps:
        for problem, ids in prompts:
            if not problem.solution:
                raise ValueError(f"{c.data}: the problem {problem.question!r:.80} has no worked solution to learn from in the warm-up; "
                                 "add \"solution\" to it, or leave the warm-up out with --sft_steps=0")
            if len(ids) + len(tokenizer.encode(demonstration(problem))) + 1 <= min(c.sft_max_tokens, positions):
                demonstrations.append((problem, ids))
        if not demonstrations:
            raise ValueError(f"{c.data}: all {len(prompts)} demonstrations are longer than sft_max_tokens={c.sft_max_tokens} or the model's "
                             f"{positions} positions; raise sft_max_tokens, or leave the warm-up out with --sft_steps=0")
    return dict(checkpoint=checkpoint, tokenizer=tokenizer, model=model, optimizer=optimizer, system_prompt=system_prompt, prompts=prompts,
                skipped=skipped, demonstrations=demonstrations, eval_problems=eval_problems, held_out=is_file and not c.eval_data)


# ---------------------------------------------------------------------------------------------------------------------------
# the loop

def train(c, processes, signals, held):
    """The run: start or continue, SFT warm-up, RL, evaluations, the saved policy. c: TrainConfig; held: an ExitStack that closes what is open
    at the end. Returns the exit code."""
    rank, device, main = processes.rank, processes.device, processes.main
    say = tqdm.write if main else lambda text: None
    out = os.path.join(c.out_dir, c.name)
    metrics_path = os.path.join(out, "metrics.jsonl")

    # the policy, its tokenizer, the problems; what is wrong on one process ends all, and all must be about to do the same
    ready, error, plan, finished = {}, None, {}, False
    try:
        ready = prepare(c, processes, out, held)
        questions = [[p.question for p, _ in ready["prompts"]], [p.question for p in ready["eval_problems"]]]
        plan = {"first step": ready["checkpoint"]["step"] if ready["checkpoint"] else 0, "configuration": asdict(c),
                "problems": hashlib.sha256(repr(questions).encode()).hexdigest()}
    except (ValueError, OSError) as e:
        error = e
    plans = processes.gather(plan)
    if failed := [r for r, other in enumerate(plans) if not other]:
        processes.fail(error, failed[0])
    for r, other in enumerate(plans):
        for key in plan:
            if other[key] != plans[0][key]:
                processes.fail(ValueError(f"processes 0 and {r} differ in their {key} ({plans[0][key]} and {other[key]}): every node needs the "
                                          f"same command and the same files, and {c.out_dir} must be a folder that all nodes share"))
    checkpoint, tokenizer, model, optimizer = (ready[key] for key in ("checkpoint", "tokenizer", "model", "optimizer"))
    prompts, demonstrations, eval_problems = ready["prompts"], ready["demonstrations"], ready["eval_problems"]
    system_prompt, folder = ready["system_prompt"], model.folder
    processes.share(model)

    def sft_example(number):
        """The number-th demonstration of the warm-up: prompt ids and completion ids."""
        problem, prompt = demonstrations[order(number, len(demonstrations), c.seed, "sft")]
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
            line = (json.dumps(row) + "\n").encode()
            try:
                if metrics_file.write(line) < len(line):                            # not buffered: it is there, or it is not
                    raise OSError("the disk is full")
            except OSError as e:
                raise OSError(f"{metrics_path}: could not be written ({e})") from None

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(c, device))

    def save(next_step):
        if hasattr(optimizer, "consolidate_state_dict"):                            # a ZeroRedundancyOptimizer
            optimizer.consolidate_state_dict()                                      # to process 0, by all together
        if main:
            os.fsync(metrics_file.fileno())                                         # a checkpoint never knows more than the rows
            save_checkpoint(out, {"config": asdict(c), "step": next_step, "processes": processes.size,
                                  "model": {name: p.detach() for name, p in trained(model).items()},
                                  "optimizer": optimizer.state_dict(), "initial_entropy": initial_entropy, "before": before,
                                  "reference": reference if model.lora else None, "skipped_updates": skipped_updates})
        processes.barrier()

    # start, or continue
    sft_steps, steps = c.sft_steps, c.steps if c.algo != "sft" else 0
    start, initial_entropy, before, reference, skipped_updates, bad_in_a_row = 0, None, None, None, 0, 0
    if checkpoint is not None:
        start, initial_entropy, before, reference, skipped_updates = (
            checkpoint[key] for key in ("step", "initial_entropy", "before", "reference", "skipped_updates"))
        if processes.gather(any(row["step"] == start >= sft_steps + steps and row.get("label") == "after"
                                for row, _ in metrics_rows(metrics_path)))[0]:
            say(f"{out} is finished: all {start} steps and the last evaluation are there; more steps: --resume --resume_force --steps=MORE")
            return 0
        say(f"resumed at step {start} of {sft_steps + steps}" + ("" if checkpoint["processes"] == processes.size else
            f", with {processes.size} process(es) instead of {checkpoint['processes']}: prompts and random numbers depend on seed, step and "
            "prompt alone and stay the same"))
    elif c.resume == "auto":
        say(f"{out} has no checkpoint: starting at step 0")
    if main:
        if checkpoint is None:
            clear_output(out)
            if not c.model:
                make_tiny_model(folder, c.seed)
        write_whole(os.path.join(out, "config.toml"), lambda f: f.write(to_toml(replace(c, overwrite=False, resume="no", resume_force=False))))
        if ready["held_out"]:
            write_whole(os.path.join(out, "heldout.jsonl"), lambda f: write_problems(f, eval_problems))
        keep_metrics_before(metrics_path, start)
        metrics_file = held.enter_context(open(metrics_path, "ab", buffering=0))

    if c.compile == "yes" or (c.compile == "auto" and device.type == "cuda"):
        model.compile_steps()
    parameters, learned = (sum(p.numel() for p in ps) for ps in (model.parameters(), trained(model).values()))
    adapter = f" ({learned / 1e6:,.2f} of them in the adapter, which alone is trained)" if model.lora else ""
    longer = f"{ready['skipped']} skipped: longer than {c.max_prompt_tokens} tokens"
    too_long = f", {len(prompts) - len(demonstrations)} of {len(prompts)} skipped: too long" if sft_steps else ""
    rollout = f"{c.prompts_per_step} prompts x {c.group_size} completions of up to {c.max_new_tokens} tokens"
    where = f"on {device.type}, {processes.size} process(es), {torch.get_num_threads()} threads each"
    say(f"""
{c.algo.upper()} on {c.data}: {len(prompts):,} problems ({longer}), {len(eval_problems)} held out for evaluation
policy    {c.model or 'a new ' + model.config.model_type}, {parameters / 1e6:,.2f} million parameters{adapter}, {where}
warm-up   {sft_steps} SFT steps of {c.sft_batch_size} demonstrations, learning rate {c.sft_learning_rate:g}{too_long}
RL        {steps} steps of {rollout}, learning rate {c.learning_rate:g}
output    {out}/ (config.toml, metrics.jsonl, ckpt.pt, {'adapter/' if model.lora else 'model/'})
""")
    bar = None
    for step in range(start, sft_steps + steps):
        began, rl = time.time(), step >= sft_steps
        if bar is None or step == sft_steps:
            if bar is not None:
                bar.close()
            bar = held.enter_context(tqdm(total=steps if rl else sft_steps, initial=step - sft_steps if rl else step, unit="step",
                                          desc=c.algo.upper() if rl else "SFT", disable=not main, dynamic_ncols=True))

        if not rl:
            # supervised warm-up: cross-entropy on demonstrations, a mean over the tokens of the global batch
            count = c.sft_batch_size // processes.size
            examples = [sft_example(step * c.sft_batch_size + rank * count + i) for i in range(count)]
            question = demonstrations[order(step * c.sft_batch_size, len(demonstrations), c.seed, "sft")][0].question
            totals = processes.totals({"tokens": sum(len(o) for _, o in examples)})
            loss = 0.0
            for micro in micro_batches([len(p) for p, _ in examples], [len(o) for _, o in examples], range(len(examples)), c.micro_tokens):
                completions = [examples[i][1] for i in micro]
                expected_grad = torch.full((sum(map(len, completions)),), -1 / totals["tokens"], device=device)           # d loss / d logps
                with autocast():
                    logps = completion_logps(model, [p for p, _ in examples], completions, micro, expected_grad=expected_grad)
                micro_loss = -logps.sum() / totals["tokens"]
                micro_loss.backward()
                loss += micro_loss.item()
            lr = learning_rate(step, sft_steps, c.sft_learning_rate, c.warmup_ratio)
            norm = update(model, optimizer, processes, lr, 1.0, loss)               # clipped at 1, the usual value for SFT
            bad = int(not math.isfinite(norm))
            row = {"phase": "sft", "loss": processes.totals({"loss": loss})["loss"], "tokens": totals["tokens"]}
            shown = dict(loss=f"{row['loss']:.3f}")
        else:
            if step == sft_steps:                                                   # RL begins
                if before is None:
                    before = evaluation(step, "before")
                optimizer = make_optimizer(model, c)
                if main and sft_steps:
                    save_policy(model, os.path.join(out, "sft"))
                processes.barrier()
            if c.algo == "grpo" and c.beta and reference is None:                   # the policy as it was before RL
                if model.lora:                                                      # its adapter; it also goes to the checkpoint
                    reference = {name: p.detach().clone() for name, p in trained(model).items()}
                else:                                                               # from the disk, where it is also after a resume
                    reference = GPT.from_pretrained(os.path.join(out, "sft") if sft_steps else folder, device=device).requires_grad_(False)
            began = time.time()

            # 1. this step's prompts, the same for any number of processes; each process takes its share, whole groups
            P, G, L = c.prompts_per_step // processes.size, c.group_size, c.max_new_tokens
            mine = range(rank * P, rank * P + P)
            first = (step - sft_steps) * c.prompts_per_step
            batch = [prompts[order(first + i, len(prompts), c.seed, "rl")] for i in mine]
            question = batch[0][0].question

            # 2. a group of G completions for each
            noise = torch.stack([seeded_uniforms((c.seed, "rollout", step, i), G, L) for i in mine])                # (P, G, L)
            with autocast():
                samples = sample(model, [ids for _, ids in batch], G, L, c.temperature, eos_ids=tokenizer.eos_ids, noise=noise)
            ids, mask = samples.ids, samples.mask                                   # (P, G, L)
            sampled = time.time()

            # 3. rewards
            texts = completion_texts(tokenizer, samples)                            # P lists of G
            parts = [[reward_parts(text, batch[p][0].answer) for text in texts[p]] for p in range(P)]
            rewards = torch.tensor([[float(sum(part.values())) for part in group] for group in parts], device=device)          # (P, G)

            # 4. advantages and the weight of every token in J
            advantages = group_advantages(rewards, "std" if c.algo == "grpo" and c.scale_advantages else "none")    # (P, G)
            entropy = mean_entropy(samples.entropy, mask)                           # (P, G)
            if initial_entropy is None:                                             # <H>_ini: the first global batch, before any update
                total = processes.totals({"entropy": entropy.sum().item(), "count": P * G})
                initial_entropy = total["entropy"] / total["count"]
            lam = conflict_weights(ids, mask, advantages)                           # (P, G, L)
            # (P, G) who is kept; of GRPO: who would be. Like lam, for the screen and the metrics: gtpo_weights makes its own
            kept = keep_completions(entropy, initial_entropy, c.entropy_threshold, advantages if c.filter_negative_only else None)
            if c.algo == "gtpo" and not c.entropy_filter:
                kept = torch.ones_like(kept)
            if c.algo == "gtpo":
                weights = gtpo_weights(ids, mask, advantages, entropy, initial_entropy, c.gamma, c.conflict, c.entropy_filter,
                                       c.entropy_threshold, c.filter_negative_only)
            else:
                weights = grpo_weights(mask, advantages)
            weights = weights / c.prompts_per_step                                  # the mean over the groups of the global batch

            # 5. the gradient, in micro-batches of real tokens; a completion whose weights are all 0 has none
            lengths, used = mask.sum(-1).tolist(), (weights != 0).any(-1).tolist()  # (P, G)
            rows = [(p, ids[p, g, :lengths[p][g]].tolist(), weights[p, g, :lengths[p][g]]) for p in range(P) for g in range(G)
                    if used[p][g] or (reference is not None and lengths[p][g])]     # prompt, ids, weights
            old_logps, loss, bad = {}, 0.0, 0
            for repeat in range(c.updates_per_rollout):
                losses = 0.0
                for n, micro in enumerate(micro_batches([len(q) for _, q in batch], [len(o) for _, o, _ in rows], [p for p, _, _ in rows],
                                                        c.micro_tokens)):
                    arguments = [q for _, q in batch], [rows[i][1] for i in micro], [rows[i][0] for i in micro], c.temperature
                    token_weights = torch.cat([rows[i][2] for i in micro])          # (tokens,)
                    expected_grad = -token_weights if c.updates_per_rollout == 1 and reference is None else None    # d loss / d logps
                    with autocast():
                        logps = completion_logps(model, *arguments, expected_grad)  # (tokens,)
                    old = old_logps.setdefault(n, logps.detach()) if c.updates_per_rollout > 1 else None
                    micro_loss = surrogate_loss(logps, token_weights, old, c.epsilon if c.algo == "grpo" else None)
                    if reference is not None:
                        with torch.no_grad(), autocast(), model.adapter_as(reference) if model.lora else contextlib.nullcontext():
                            ref_logps = completion_logps(model if model.lora else reference, *arguments)
                        scale = torch.cat([torch.full_like(rows[i][2], 1 / (len(rows[i][1]) * G * c.prompts_per_step)) for i in micro])
                        micro_loss = micro_loss + c.beta * (scale * kl_tokens(logps, ref_logps)).sum()
                    micro_loss.backward()
                    losses += micro_loss.item()
                # 6. the update
                lr = learning_rate(step - sft_steps, steps, c.learning_rate, c.warmup_ratio)
                norm = update(model, optimizer, processes, lr, c.grad_clip, losses)
                bad += not math.isfinite(norm)
                loss += losses / c.updates_per_rollout

            real = mask.sum().item()
            totals = processes.totals({
                "loss": loss, "completions": P * G, "tokens": real, "reward": rewards.sum().item(), "accuracy": sum(part["accuracy"] > 0 for group in parts for part in group),
                "format": sum(part["format"] >= 10 for group in parts for part in group), "entropy": entropy.sum().item(), "kept": kept.sum().item(),
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
                ones = torch.ones_like                                              # shown is what counts in this loss
                say(f"\nstep {step - sft_steps}, one group:\n" + show_group(
                    tokenizer, question, batch[0][0].answer, ids[0], mask[0], rewards[0], advantages[0], entropy[0],
                    kept[0] if c.algo == "gtpo" else ones(kept[0]), lam[0] if c.algo == "gtpo" and c.conflict else ones(lam[0])))

        # after either kind of step: bookkeeping
        skipped_updates, bad_in_a_row = skipped_updates + bad, bad_in_a_row + bad if bad else 0
        log({"step": step, **row, "grad_norm": norm, "lr": lr, "skipped_updates": skipped_updates, "seconds": time.time() - began,
             "memory_mib": peak_memory(device)})
        bar.set_postfix(shown)
        bar.update()
        if bad_in_a_row >= c.max_bad_updates:
            saved = f"the last good checkpoint is {out}/ckpt.pt" if os.path.exists(os.path.join(out, "ckpt.pt")) else "there is no checkpoint yet"
            processes.fail(ValueError(f"step {step}: loss or gradient was not finite {bad_in_a_row} times in a row; the first prompt of the step "
                                      f"is {question!r:.200}; {saved}; try a lower learning rate"))
        done = step + 1
        stopped = processes.totals({number: signals.received == number for number in (signal.SIGTERM, signal.SIGINT)})
        stop = next((number for number in stopped if stopped[number]), 0)           # the same on all processes
        if rl and c.eval_every and (done - sft_steps) % c.eval_every == 0 and done < sft_steps + steps:
            evaluation(step, "during")
        if stop or done % c.save_every == 0 or done in (sft_steps, sft_steps + steps):
            save(done)
        if stop:
            bar.close()
            say(f"stopped after step {step}; continue with the same command and --resume")
            return 128 + stop
    if bar is not None:
        bar.close()

    if main:                                                                        # before the row that says: finished
        save_policy(model, os.path.join(out, "adapter" if model.lora else "model"))
        if c.merge:
            model.save_pretrained(os.path.join(out, "model"))
    after = evaluation(max(start, sft_steps + steps), "after")
    if main:
        say(before_after(before, after) + closing_hints(c, out, eval_problems))
    return 0


def write_problems(file, problems):
    for p in problems:
        row = {"question": p.question, "answer": p.answer, "level": p.level, "subject": p.subject}
        file.write(json.dumps({key: value for key, value in row.items() if value is not None}) + "\n")


def closing_hints(c, out, eval_problems):
    """The commands that go on from here, ready to be pasted."""
    def flags(**values):
        return "".join(f" --{name}={shlex.quote(str(value))}" for name, value in values.items())

    same = {"max_new_tokens": c.max_new_tokens}                                     # what the commands would do otherwise
    same.update({} if c.temperature == 1 else {"temperature": c.temperature})
    same.update({} if c.system_prompt == "default" else {"system_prompt": c.system_prompt})
    same.update({} if c.prompt_style == "auto" else {"prompt_style": c.prompt_style})
    policy, data = {"model": os.path.join(out, "model")}, c.eval_data or (c.data if c.data in NAMES else os.path.join(out, "heldout.jsonl"))
    if (c.lora_rank or c.adapter) and not c.merge:
        policy = {"model": c.model or os.path.join(out, "init"), "adapter": os.path.join(out, "adapter")}
    problem = eval_problems[0] if len(eval_problems[0].question) <= 60 else min(eval_problems, key=lambda p: len(p.question))
    k = ",".join(map(str, sorted({1, c.eval_samples})))
    if c.algo == "sft":
        more = flags(name=c.name + "-gtpo", algo="gtpo", **policy, sft_steps=0) + " --lora_rank=0" * ("adapter" in policy)
    else:
        more = " --resume" + flags(resume_force="true", steps=2 * c.steps)
    return f"""
look at a group     python sample.py{flags(**policy, prompt=problem.question, gold=problem.answer, **same)}
evaluate            python eval.py{flags(**policy, data=data, n=c.eval_samples, k=k, **same)}
train on            python train.py {shlex.quote(os.path.join(out, 'config.toml'))}{more}"""


def before_after(before, after):
    """The table at the end, as text, from two results of evaluate()."""
    names = [k for k in after if k.startswith(("pass@", "maj@")) and k != "maj@1"] + ["format", "truncated"]
    lines = [f"{'':12}{'before':>8}{'after':>8}"] if before else [f"{'':12}{'after':>8}"]
    for name in names:
        lines.append(f"{name:12}" + (f"{100 * before[name]:7.1f}%" if before else "") + f"{100 * after[name]:7.1f}%")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
