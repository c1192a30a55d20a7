"""
Trains a policy with GTPO, GRPO or SFT alone, on one CPU or on many GPUs.

    python train.py                                    the demo: a laptop CPU, nothing to download
    python train.py config/gsm8k.toml --model=DIR      a small pretrained model on GSM8K, one GPU
    torchrun --nproc_per_node=8 train.py config/qwen2.5_3b_gsm8k.toml --model=DIR
    python train.py config/qwen2.5_3b_gsm8k.toml --plan     will it fit? needs no weights, no GPU
    python train.py --help                             every setting; flags win over a TOML file

Each step: sample a group of completions of every prompt, reward them, turn rewards into advantages
and per-token weights, take one gradient step. Output goes to the folder OUT: config.toml,
metrics.jsonl (one line a step), ckpt.pt, and model/ in Hugging Face format (with LoRA adapter/ in
PEFT's); beside them init/ or sft/, where RL began, heldout.jsonl, problems held out of a file.

Exit code: 0; 2 for a mistake or a fault, with one message; 130, 143 or 129 when Ctrl-C, SIGTERM or
SIGHUP stopped the run: it ends its step, saves, and goes on with --resume (a second signal ends it
at once). `torchrun --max_restarts=3 ... train.py ... --resume` goes on by itself after a crash.
"""
import contextlib
import functools
import math
import os
import random
import time
from dataclasses import asdict, dataclass, field

import torch
from torch.nn.parallel import DistributedDataParallel

from data import demonstration
from gtpo import (conflict_weights, group_advantages, keep_completions, mean_entropy, policy_loss,
                  token_weights)
from lib.arithmetic import imperfect_demonstration
from lib.config import check_ranges, help_text
from lib.draws import seeded_uniforms
from lib.lora import adapter_as
from lib.run import Output, Processes, Signals, command, end
from lib.show import show_group
from lib.training import (before_rl, begin, check_together, end_step, finish, is_finished, plan,
                          prepare, read_settings)
from logprobs import head_loss, token_logps
from rewards import reward_parts
from sample import completion_texts, pad, plain_stop, sample

WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.99)  # AdamW's; decay on matrices alone
LR_WARMUP = 0.005  # share of the steps in which the learning rate rises


@dataclass
class TrainConfig:
    # what to train on what
    out: str = "out/arithmetic"  # folder of the run
    algo: str = "gtpo"  # gtpo, grpo or sft (the warm-up alone); sets its parts' defaults
    model: str = ""  # folder in Hugging Face format; empty: a tiny Llama is made
    adapter: str = ""  # folder of a LoRA adapter in PEFT's format to start from
    data: str = "arithmetic"  # arithmetic, word_problems, gsm8k, math, or a file's path
    eval_data: str = ""  # problems to evaluate on; empty: DATA's test split or a part of it
    question_field: str = ""  # field of a row that holds the question; empty: the usual ones
    answer_field: str = ""  # field of a row that holds the gold answer; empty: the usual ones
    system_prompt: str = "default"  # system turn; default: the one of data.py; empty: none
    prompt_style: str = "auto"  # chat (by its template), plain, or auto: chat if it has one
    # for the chat template, such as {"enable_thinking": false}
    template_variables: dict = field(default_factory=dict)
    seed: int = 0  # all randomness follows from it: new weights, order of problems, completions
    device: str = "auto"  # cpu, cuda, or auto
    dtype: str = "auto"  # of the forward pass: float32, bfloat16, or auto

    # supervised warm-up (SFT) on gold solutions in the tagged format
    sft_steps: int = 700  # updates; 0: no warm-up
    sft_batch_size: int = 32  # demonstrations per step, over all processes
    sft_learning_rate: float = 2e-3  # peak; cosine to 0

    # reinforcement learning
    steps: int = 100  # rollouts, each with its updates
    prompts_per_step: int = 16  # over all processes; must be divisible by their number
    group_size: int = 8  # G, completions per prompt
    max_prompt_tokens: int = 64  # longer prompts are skipped and counted, never cut
    max_new_tokens: int = 48  # longer completions are cut off there and count like others
    temperature: float = 1.0  # of sampling and of the log-probs in the loss alike
    learning_rate: float = 3e-4  # peak; cosine to 0
    grad_clip: float = 0.1  # largest norm of the gradient; 0: no clipping
    micro_tokens: int = 16384  # tokens per forward pass, padding counted: less memory, same result
    updates_per_rollout: int = 1  # more than one needs an epsilon

    # the parts of the algorithm, each a switch; the defaults are GTPO's, GRPO's stand in brackets
    gamma: float = 0.1  # weight of the entropy term A - gamma <H> [0]
    conflict: bool = True  # conflict tokens weigh 2 where A > 0, 0 where A < 0 [false]
    entropy_filter: bool = True  # drop <H> above the threshold if the policy began below it [false]
    entropy_threshold: float = math.log(2)  # of the filter, nats
    scale: str = "none"  # of advantages: none, or std: divide by the group's deviation [std]
    epsilon: float = 0.0  # clip range of the ratio; 0: no clipping [0.2]
    beta: float = 0.0  # weight of the KL term to the policy as it was before RL; 0: none

    # LoRA, memory, speed
    lora_rank: int = 0  # of a new LoRA adapter, which is then all that is trained; 0: none
    checkpointing: bool = False  # keep no activations of layers: less memory, slower, same result
    compile: str = "auto"  # torch.compile: yes, no; auto: on a GPU that can, for a large model

    # looking and keeping
    eval_problems: int = 200  # of the evaluation before and after RL; 0: none
    eval_samples: int = 8  # completions of each
    eval_every: int = 0  # RL steps between further evaluations; 0: none
    save_every: int = 50  # steps between checkpoints
    show_every: int = 25  # RL steps between groups shown on the screen; 0: none
    resume: str = "no"  # yes (--resume alone): go on from the checkpoint, if there is one
    overwrite: bool = False  # delete the run that stands in the output folder


CHOICES = {"algo": ("gtpo", "grpo", "sft"), "prompt_style": ("auto", "chat", "plain"),
           "device": ("auto", "cpu", "cuda"), "dtype": ("auto", "float32", "bfloat16"),
           "scale": ("none", "std"), "compile": ("auto", "yes", "no"),
           "resume": ("no", "yes", "auto")}
RANGES = {**dict.fromkeys(("sft_batch_size", "prompts_per_step", "max_prompt_tokens",
                           "max_new_tokens", "micro_tokens", "updates_per_rollout",
                           "eval_samples", "save_every"), ">= 1"),
          **dict.fromkeys(("temperature", "learning_rate", "sft_learning_rate"), "> 0"),
          "group_size": ">= 2", "epsilon": ">= 0 and < 1"}  # all other numbers are >= 0
ALGO_DEFAULTS = {
    "gtpo": dict(gamma=0.1, conflict=True, entropy_filter=True, scale="none", epsilon=0.0),
    "grpo": dict(gamma=0.0, conflict=False, entropy_filter=False, scale="std", epsilon=0.2)}


def settings(argv):
    """The command line -> (TrainConfig, what a resumed run does otherwise than before)."""
    return read_settings(TrainConfig, argv, ALGO_DEFAULTS)


def check(c, processes):
    """ValueError, before anything is loaded or written, for what cannot work."""
    check_ranges(c, CHOICES, RANGES)
    check_together(c, processes)


# ---- the pieces of a step ------------------------------------------------------------------------

@functools.lru_cache(maxsize=4)
def permutation(n, seed, label, epoch):
    return random.Random(f"{seed} {label} {epoch}").sample(range(n), n)


def order(number, n, seed, label):
    """Index of the number-th problem to be used, of n: every epoch is a new permutation, and all
    follows from the seed, so there is no position to save."""
    epoch, place = divmod(number, n)
    return permutation(n, seed, label, epoch)[place]


@dataclass
class Batch:
    """N completions behind their P prompts, right-padded."""
    prompt_ids: torch.Tensor  # (P, Tp)
    prompt_lengths: torch.Tensor  # (P,)
    prompt_of: torch.Tensor  # (N,) which prompt is whose
    ids: torch.Tensor  # (N, L)
    mask: torch.Tensor  # (N, L) True on tokens that count

    def take(self, rows):
        """The completions `rows` (n,), their prompts, and no more padding than these need."""
        used, prompt_of = self.prompt_of[rows].unique(return_inverse=True)
        lengths = self.prompt_lengths[used]
        L = int(self.mask[rows].sum(1).max())
        return Batch(self.prompt_ids[used, : int(lengths.max())], lengths, prompt_of,
                     self.ids[rows, :L], self.mask[rows, :L])

    def hidden(self, model):
        """The hidden states that predict the real tokens, (tokens, H)."""
        return model.completion_hidden(self.prompt_ids, self.prompt_lengths, self.ids,
                                       self.prompt_of)[self.mask]

    def spread(self, values):
        """One number of each real token, (tokens,) -> (N, L), 0 on padding."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)

    def micro_batches(self, rows, most):
        """Splits `rows`, a list of completions, into parts of at most `most` tokens with padding
        (a longer one stands alone). Completions of one prompt stay side by side, since each part
        runs each of its prompts once."""
        prompt_lengths, lengths = self.prompt_lengths.tolist(), self.mask.sum(1).tolist()
        prompt_of, longest, some = self.prompt_of.tolist(), {}, []
        for i in rows:
            longest[prompt_of[i]] = max(longest.get(prompt_of[i], 0), lengths[i])

        def padded(some):
            prompts = {prompt_of[i] for i in some}
            return (len(prompts) * max(prompt_lengths[p] for p in prompts)
                    + len(some) * max(lengths[i] for i in some))

        for i in sorted(rows, key=lambda i: (longest[prompt_of[i]], prompt_of[i], lengths[i])):
            if some and padded([*some, i]) > most:
                yield some
                some = []
            some.append(i)
        yield some


def make_batch(prompts, ids, mask):
    """Batch of prompts (P lists of ids) and completions (N, L), of each prompt N / P in a row."""
    prompt_of = torch.arange(len(ids), device=ids.device) // (len(ids) // len(prompts))  # (N,)
    return Batch(*pad(prompts, ids.device), prompt_of, ids, mask)


class Policy(torch.nn.Module):
    """What DistributedDataParallel wraps: a micro-batch in, its loss out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch, token_loss, per_token, temperature=1.0):
        """token_loss(logps, *per_token) is a sum over tokens; per_token: tensors (N, L). Returns
        the loss and the log-probs (N, L)."""
        mask = batch.mask
        loss, logps = head_loss(batch.hidden(self.model), self.model.head_weight, batch.ids[mask],
                                token_loss, [x[mask] for x in per_token], temperature)
        return loss, batch.spread(logps)


def backward(run, batch, rows, token_loss, per_token, temperature=1.0):
    """Adds the gradient of the loss of the completions `rows` to .grad, which then holds the sum
    over all processes (a sum, since the weights in per_token are divided by the size of the global
    batch already). per_token: tensors (N, L). Returns the loss of this process, and log-probs
    (N, L), 0 elsewhere."""
    total, logps = 0.0, torch.zeros_like(batch.ids, dtype=torch.float32)  # (N, L)
    micro_batches = list(batch.micro_batches(rows, run.c.micro_tokens))
    for some in micro_batches:
        micro = batch.take(some)
        L = micro.ids.shape[1]
        # gradients are summed over processes with the last one
        waits = run.processes.size > 1 and some is not micro_batches[-1]
        with run.policy.no_sync() if waits else contextlib.nullcontext():
            with run.autocast():
                loss, logps[some, :L] = run.policy(
                    micro, token_loss, [x[some, :L] for x in per_token], temperature)
            (loss * run.processes.size).backward()  # DDP makes the mean over processes of it
        total += loss.item()
    return total, logps


def reference_logps(run, batch, rows):
    """Log-probs of `rows` under the policy as it was before RL: (N, L), 0 elsewhere."""
    model, swapped = run.reference, contextlib.nullcontext()
    if run.model.lora:  # its adapter of then
        model, swapped = run.model, adapter_as(run.model, run.reference)
    logps = torch.zeros_like(batch.ids, dtype=torch.float32)  # (N, L)
    with torch.no_grad(), run.autocast(), swapped:
        for some in batch.micro_batches(rows, run.c.micro_tokens):
            micro = batch.take(some)
            found = token_logps(micro.hidden(model), model.head_weight, micro.ids[micro.mask],
                                run.c.temperature)  # (tokens,)
            logps[some, : micro.ids.shape[1]] = micro.spread(found)
    return logps


def learning_rate(step, steps, peak):
    """Linear rise over the first LR_WARMUP of the steps, then a cosine to 0."""
    rise = math.ceil(LR_WARMUP * steps)
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def make_optimizer(model):
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True)


def update(run, lr, grad_clip, loss):
    """One step of the optimizer with the gradients in .grad; left out, and counted, if one of them
    or the loss is not finite. loss: the sum over processes. Returns the norm before clipping."""
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(params, grad_clip or math.inf).item()
    if math.isfinite(norm + loss):
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        run.optimizer.step()
        run.bad_in_a_row = 0
    else:
        run.bad_in_a_row += 1
        run.skipped_updates += 1
    run.optimizer.zero_grad(set_to_none=True)
    return norm if math.isfinite(loss) else math.nan


# ---- the warm-up: supervised fine-tuning ---------------------------------------------------------

def cross_entropy(logps, weights):
    return -(weights * logps).sum()


def sft_example(run, number):
    """The number-th demonstration: prompt ids and completion ids."""
    c, tokenizer = run.c, run.tokenizer
    place = order(number, len(run.demonstrations), c.seed, "sft")
    problem, prompt = run.demonstrations[place]
    text = demonstration(problem, tokenizer.decode(prompt))
    if c.data == "arithmetic":  # with mistakes, which leave RL something to improve
        text = imperfect_demonstration(problem, random.Random(f"{c.seed} {number}"))
    return prompt, tokenizer.encode(text) + [tokenizer.eos_id]


def sft_step(run):
    """Cross-entropy on demonstrations, a mean over the tokens of the global batch -> row of
    metrics.jsonl."""
    c, processes = run.c, run.processes
    count = c.sft_batch_size // processes.size
    first = run.step * c.sft_batch_size + processes.rank * count
    prompts, completions = zip(*(sft_example(run, first + i) for i in range(count)))
    ids, lengths = pad(completions, processes.device)  # (N, L), (N,)
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]  # (N, L)
    tokens = processes.total(lengths.sum().item())
    weights = mask / tokens  # (N, L)
    batch = make_batch(prompts, ids, mask)
    loss, _ = backward(run, batch, list(range(count)), cross_entropy, [weights])
    loss = processes.total(loss)
    lr = learning_rate(run.step, c.sft_steps, c.sft_learning_rate)
    norm = update(run, lr, 1.0, loss)  # clipped at 1, the usual value for SFT
    return {"phase": "sft", "loss": loss, "tokens": tokens, "grad_norm": norm, "lr": lr}


# ---- reinforcement learning ----------------------------------------------------------------------

def grade(texts, problems, device):
    """The parts of each completion's reward by name: texts, P lists of G -> {name: (P, G)}."""
    graded = [[reward_parts(text, problem.answer) for text in group]
              for problem, group in zip(problems, texts)]
    return {name: torch.tensor([[float(one[name]) for one in group] for group in graded],
                               device=device) for name in graded[0][0]}


def rl_step(run):
    """One rollout and what is learned from it -> row of metrics.jsonl."""
    c, processes, device = run.c, run.processes, run.processes.device
    P, G, L = c.prompts_per_step // processes.size, c.group_size, c.max_new_tokens
    step = run.step - c.sft_steps  # of RL; draws and rows of the log count the warm-up, too

    # 1. prompts: the same for any number of processes; each takes its share, whole groups
    mine = range(processes.rank * P, processes.rank * P + P)
    numbers = [order(step * c.prompts_per_step + i, len(run.prompts), c.seed, "rl") for i in mine]
    problems, prompts = zip(*(run.prompts[number] for number in numbers))

    # 2. a group of G completions of each; every draw follows from seed, step and place
    began = time.time()
    noise = torch.stack([seeded_uniforms((c.seed, "rollout", run.step, i), G, L) for i in mine])
    with run.autocast():
        s = sample(run.model, prompts, G, L, c.temperature, eos_ids=run.tokenizer.eos_ids,
                   noise=noise, stop=plain_stop(run.tokenizer) if run.plain else None)  # (P, G, L)
    sample_seconds = time.time() - began

    # 3. rewards by rule
    texts = completion_texts(run.tokenizer, s, prompts, run.plain)  # P lists of G
    parts = grade(texts, problems, device)  # {"format": (P, G), "accuracy": (P, G)}
    rewards = sum(parts.values())  # (P, G)

    # 4. what each token counts, equations (1) to (5): constants, no gradient
    advantages = group_advantages(rewards, c.scale)  # (P, G)
    entropy = mean_entropy(s.entropy, s.mask)  # (P, G)
    if run.initial_entropy is None:  # <H>_ini: the first batch, of all processes
        run.initial_entropy = processes.means({"entropy": entropy})["entropy"]
    lam = conflict_weights(s.ids, s.mask, advantages)  # (P, G, L)
    # lambda and delta are made when they are switched off, too: the log tells what they would be
    delta = keep_completions(entropy, run.initial_entropy, c.entropy_threshold)  # (P, G)
    used_lam = lam if c.conflict else torch.ones_like(lam)  # (P, G, L)
    used_delta = delta if c.entropy_filter else torch.ones_like(delta)  # (P, G)
    weights = token_weights(advantages - c.gamma * entropy, s.mask, used_lam, used_delta)
    weights = weights / c.prompts_per_step  # (P, G, L) a mean over the groups of all processes

    # 5. the gradient of -J, equations (6) and (7), a sum over the tokens of N = P * G completions
    batch = make_batch(prompts, s.ids.flatten(0, 1), s.mask.flatten(0, 1))
    weights, old_logps = weights.flatten(0, 1), s.logps.flatten(0, 1)  # (N, L); of pi_old
    per_token = [weights, old_logps]  # as policy_loss takes them behind the log-probs
    # completions whose weights are all 0 are not run; but DDP waits for a gradient from every
    # process, so if none is left the first one is run all the same, for a gradient of 0
    rows = weights.any(-1).nonzero()[:, 0].tolist() or [0]
    if run.reference is not None:  # the KL term counts on all completions
        rows = list(range(P * G))
        kl_weights = token_weights(torch.full_like(advantages, c.beta), s.mask) / c.prompts_per_step
        per_token += [kl_weights.flatten(0, 1), reference_logps(run, batch, rows)]
    token_loss = functools.partial(policy_loss, epsilon=c.epsilon)
    losses, lr = [], learning_rate(step, c.steps, c.learning_rate)
    for _ in range(c.updates_per_rollout):
        loss, logps = backward(run, batch, rows, token_loss, per_token, c.temperature)
        if not losses:  # before the first update trainer and sampler should agree
            mismatch = (logps - old_logps)[rows][batch.mask[rows]].abs()  # (tokens,) nats
        losses.append(processes.total(loss))

        # 6. one update, the same on all processes; none if something is not finite
        norm = update(run, lr, c.grad_clip, losses[-1])

    # 7. what happened, means over all processes; of format and accuracy the share of those right
    means = {"reward": rewards, **parts, "accuracy": parts["accuracy"] > 0,
             "format": parts["format"] >= 10, "entropy": entropy, "kept": delta,
             "truncated": ~s.finished, "completion_tokens": s.mask.sum(-1),
             "tied": rewards.amax(1) == rewards.amin(1), "conflict": (lam != 1)[s.mask],
             "mismatch": mismatch}
    row = {"phase": c.algo, **processes.means(means),
           "initial_entropy": run.initial_entropy, "tokens": processes.total(s.mask.sum().item()),
           "loss": sum(losses) / len(losses), "grad_norm": norm, "lr": lr,
           "sample_seconds": sample_seconds}
    if c.show_every and step % c.show_every == 0:
        run.say(f"\nstep {step}, one group:\n" + show_group(
            run.tokenizer, problems[0].question, problems[0].answer, s.ids[0], s.mask[0],
            rewards[0], advantages[0], entropy[0], used_delta[0], used_lam[0]))
    return row


# ---- the command ---------------------------------------------------------------------------------

def parallel(run):
    """The policy to train: in DistributedDataParallel if there are more processes than one."""
    run.policy = Policy(run.model)
    if run.processes.size == 1:
        return
    run.policy = DistributedDataParallel(run.policy, gradient_as_bucket_view=True)
    # DDP sorts its buckets anew after its first backward. With one at every start, a resumed run
    # adds up gradients in the same order as one that was never stopped.
    ids = torch.zeros(1, 2, dtype=torch.long, device=run.processes.device)
    batch = make_batch([[0, 0]], ids, torch.ones_like(ids, dtype=torch.bool))
    backward(run, batch, [0], lambda logps: 0 * logps.sum(), [])
    run.optimizer.zero_grad(set_to_none=True)


def loop(run, name, one_step, first, last):
    """Steps `first` to `last` of the run; one that was resumed goes on in the middle."""
    bar = run.bar(name, last - first, run.step - first)
    while run.step < last:
        began = time.time()
        row = one_step(run)
        end_step(run, row, began, bar)
    bar.close()


def main(argv):
    """Trains as the command line says. Returns the exit code."""
    if "--help" in argv or "-h" in argv:
        print(help_text(TrainConfig, __doc__))
        return 0
    c, changed = settings([word for word in argv if word != "--plan"])
    processes = int(os.environ.get("WORLD_SIZE", 1))
    check(c, processes)
    if "--plan" in argv:
        print(plan(c, processes))
        return 0
    processes = Processes(c.device)
    output = Output(c.out, processes.main)
    with Signals() as signals, contextlib.closing(output):
        run = processes.agree(
            lambda: prepare(c, changed, processes, output, signals, make_optimizer),
            lambda run: {"first step": run.step, "problems": run.problems, **asdict(c)})
        if not is_finished(run):
            begin(run)
            parallel(run)
            if run.step < c.sft_steps:
                loop(run, "SFT", sft_step, 0, c.sft_steps)
            if c.algo != "sft":
                before_rl(run)
                if run.step == c.sft_steps:  # RL begins with a new AdamW
                    run.optimizer = make_optimizer(run.model)
                loop(run, c.algo.upper(), rl_step, c.sft_steps, run.last)
            finish(run)
    processes.close()
    return 0


if __name__ == "__main__":
    end(command(main))
