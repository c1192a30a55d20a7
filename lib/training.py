"""
A training run around its steps, which are in train.py: what it needs, how it begins and goes on,
what happens after every step, how it is evaluated and saved.
"""
import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace

import torch
from tqdm import tqdm

from data import (NAMES, SYSTEM_PROMPT, as_row, check_fields, demonstration, encode_prompts,
                  held_out, is_plain, load_problems, to_stderr)
from eval import EvalConfig, evaluate
from lib.arithmetic import make_tiny_model
from lib.chat import check_variables
from lib.config import read_config, to_toml
from lib.hf import weights_hash
from lib.lora import add_lora, save_adapter
from lib.run import (Output, Processes, Signals, compile_where_it_pays, forward_dtype,
                     peak_memory)
from model import GPT
from tokenizer import Tokenizer
from tools.plan import model_config, report

MOST_BAD_UPDATES = 10  # in a row whose loss or gradient is not finite, then the run ends
DULL_STEPS = 5  # in a row that teach nothing, then a line says so
# of a Run, in its checkpoint, and what else is there; all other fields of a Run are made anew
STATE = {"step": int, "initial_entropy": float | None, "before": dict | None,
         "skipped_updates": int}
CHECKPOINT = STATE | {"reference": dict | None, "model": dict, "optimizer": dict, "seed": int,
                      "sft_steps": int, "problems": str, "frozen": str}


@dataclass
class Run:
    """What the steps share. `step` counts the updates of the warm-up, then RL steps."""
    c: object  # train.TrainConfig
    changed: list  # what a resumed run does otherwise than before, a line each
    processes: Processes
    output: Output
    signals: Signals
    tokenizer: Tokenizer
    model: GPT
    prompts: list  # (problem, prompt ids) to train on
    demonstrations: list  # those of them that the warm-up uses
    eval_problems: list
    system_prompt: str
    skipped: int  # problems whose prompt is too long
    problems: str  # hash of the training problems
    frozen: str  # hash of the weights that do not learn
    plain: bool  # prompts without a chat template
    policy: torch.nn.Module | None = None  # train.Policy, in DistributedDataParallel if need be
    optimizer: torch.optim.Optimizer | None = None
    step: int = 0
    initial_entropy: float | None = None  # <H>_ini, nats
    before: dict | None = None  # the evaluation before RL
    reference: object = None  # of GRPO's KL term: a model, or an adapter's tensors
    skipped_updates: int = 0
    bad_in_a_row: int = 0
    dull_in_a_row: int = 0

    @property
    def last(self):
        """The number of steps of the whole run."""
        return self.c.sft_steps + (self.c.steps if self.c.algo != "sft" else 0)

    def say(self, text, *more):
        """Prints a text of the main process; `more`: lines that belong to it."""
        if self.processes.main:
            with contextlib.suppress(OSError):  # nobody reads any more, the run goes on
                tqdm.write("\n  ".join([text, *more]))

    def autocast(self):
        device = self.processes.device
        low = forward_dtype(self.c.dtype, device) == torch.bfloat16
        return torch.autocast(device.type, torch.bfloat16, enabled=low)

    def bar(self, name, total, done):
        return tqdm(total=total, initial=done, unit="step", desc=name, dynamic_ncols=True,
                    disable=not self.processes.main)


# ---- its settings --------------------------------------------------------------------------------

GONE = {"out_dir": "--out=FOLDER names the folder of the run itself",
        "scale_advantages": "write scale=std or scale=none",
        "lora_alpha": "alpha is the rank", "lora_targets": "an adapter sits on all linear layers",
        "merge": "GPT.from_pretrained(folder, adapter=...).save_pretrained(...) merges",
        "zero": "lora_rank needs little optimizer state; ZeRO is not here",
        "sft_max_tokens": "it is max_prompt_tokens + max_new_tokens",
        "resume_force": "flags given again with --resume win",
        **dict.fromkeys("warmup_ratio weight_decay adam_beta2".split(),
                        "a constant at the top of train.py"),
        "filter_negative_only": "leave it out: whatever is noise is filtered",
        "max_bad_updates": "a constant at the top of lib/training.py",
        "timeout_minutes": "a constant of lib/run.py"}


def read_settings(config_class, argv, parts):
    """The command line -> (settings, what a resumed run does otherwise than before). A run that
    goes on reads its own config.toml in place of a preset. parts: the defaults of each algo."""
    words = dict(gone=GONE, aliases={"name": "out=out/{}"}, defaults_of={"algo": parts},
                 bare={"resume": "yes", "compile": "yes"})
    c, _ = read_config(config_class, argv, **words)
    own, stands = os.path.join(c.out, "config.toml"), Output(c.out).stands()
    if c.resume != "no" and "ckpt.pt" in stands and "config.toml" not in stands:
        raise ValueError(f"{own} is gone, with which this run began; put it back, or start another "
                         "with --out=OTHER")
    begun = {"ckpt.pt", "metrics.jsonl"} & set(stands)
    if c.resume == "no" or not begun or "config.toml" not in stands:
        return c, []
    before, _ = read_config(config_class, [], file=own, **words)
    now, _ = read_config(config_class, argv, file=own, **words)
    now = replace(now, out=c.out)
    changed = [f"{key} is {getattr(now, key)!r}, it was {value!r}"
               for key, value in asdict(before).items()
               if key not in ("out", "resume", "overwrite") and getattr(now, key) != value]
    return now, changed


def check_together(c, processes):
    """Refuses settings that do not go together. ValueError says why."""
    if not c.out.strip("/. "):
        raise ValueError(f"out={c.out!r}: name a folder for the run, such as out/mine")
    if c.overwrite and c.resume != "no":
        raise ValueError("--overwrite deletes the run in the output folder and --resume goes on "
                         "with it: give one of the two")
    if c.lora_rank and c.adapter:
        raise ValueError(f"lora_rank={c.lora_rank} makes a new adapter, adapter={c.adapter} goes "
                         "on with an old one: give one of the two")
    if c.updates_per_rollout > 1 and not c.epsilon:
        raise ValueError(f"updates_per_rollout={c.updates_per_rollout} needs a clipped ratio: give "
                         "an epsilon, such as 0.2")
    check_variables(c.template_variables)
    check_fields(c.question_field, c.answer_field, (c.data, c.eval_data))
    for name, used in (("prompts_per_step", c.algo != "sft"), ("sft_batch_size", c.sft_steps)):
        if used and getattr(c, name) % processes:
            raise ValueError(f"{name}={getattr(c, name)} is not divisible by the {processes} "
                             f"processes; choose a multiple of {processes}")
    if not c.sft_steps and (c.algo == "sft" or not c.steps):
        raise ValueError(f"sft_steps=0, steps={c.steps}, algo={c.algo!r}: there is nothing to do")


def plan(c, processes):
    """What the run would need, as text."""
    with tempfile.TemporaryDirectory() as tiny:
        if not c.model:
            make_tiny_model(tiny, c.seed)
        config = model_config(c.model or tiny)
        check_room(c, config)
        return report(c, config, processes)


def check_room(c, config):
    """ValueError if a prompt and its completion may be more than the model has positions for."""
    window, needed = config.max_position_embeddings, c.max_prompt_tokens + c.max_new_tokens
    if needed > window:
        hint = "" if c.model else "; this is the tiny model of the demo, give yours as --model=DIR"
        raise ValueError(f"max_prompt_tokens {c.max_prompt_tokens} + max_new_tokens "
                         f"{c.max_new_tokens} is more than the model's {window} positions{hint}")


# ---- how it begins -------------------------------------------------------------------------------

def prepare(c, changed, processes, output, signals, make_optimizer):
    """Reads and checks all that a run needs, and writes nothing but the lock, so that a mistake
    costs nothing. ValueError and OSError say what is wrong. -> Run"""
    output.lock()
    state = open_output(c, output)
    dtype = torch.float32  # of weights that learn; those below an adapter do not
    if c.lora_rank or c.adapter:
        dtype = forward_dtype(c.dtype, processes.device)
    folder = source = c.model or output.path("init")
    with tempfile.TemporaryDirectory() as tiny:
        if not c.model and state is None:  # it is not in the output folder yet
            source = tiny
            make_tiny_model(tiny, c.seed)
        tokenizer = Tokenizer.from_pretrained(source, adapter=c.adapter or None)
        model = GPT.from_pretrained(source, adapter=c.adapter or None, dtype=dtype,
                                    device=processes.device)
    model.folder, model.checkpointing = folder, c.checkpointing
    if c.lora_rank:
        torch.manual_seed(c.seed)
        add_lora(model, c.lora_rank)
    check_room(c, model.config)
    if not tokenizer.eos_ids:
        raise ValueError(f"{folder}: no end token is known, completions would never end; set "
                         "eos_token_id in generation_config.json")
    system_prompt = SYSTEM_PROMPT if c.system_prompt == "default" else c.system_prompt
    say = to_stderr if processes.main else lambda line: None
    problems, eval_problems = read_problems(c, say)
    prompts, skipped = encode_prompts(tokenizer, problems, c.max_prompt_tokens, system_prompt,
                                      c.prompt_style, c.template_variables)
    needed = 1 if c.algo == "sft" else c.prompts_per_step
    if len(prompts) < needed:
        raise ValueError(f"{c.data}: {len(prompts)} usable prompts ({skipped} longer than "
                         f"max_prompt_tokens={c.max_prompt_tokens}), {needed} are needed")
    demonstrations = usable_demonstrations(c, tokenizer, prompts)
    check_ids(model, tokenizer, prompts)
    asked = repr([(p.question, p.answer, p.messages) for p, _ in prompts]).encode()
    frozen = weights_hash(p for p in model.parameters() if not p.requires_grad)
    run = Run(c, changed, processes, output, signals, tokenizer, model, prompts,
              demonstrations, eval_problems, system_prompt, skipped,
              hashlib.sha256(asked).hexdigest(), frozen, is_plain(tokenizer, c.prompt_style),
              optimizer=make_optimizer(model))
    if state is not None:
        restore(run, state)
    return run


def open_output(c, output):
    """The checkpoint to go on from, or None for a new run. ValueError if the folder holds a run
    and nobody said what to do, or what may be the user's own."""
    stands, resume = output.stands(), c.resume != "no"
    if "ckpt.pt" in stands and resume:
        return output.load(CHECKPOINT)
    # a run that ended before its first checkpoint
    unborn = "metrics.jsonl" in stands and not {"ckpt.pt", "model", "adapter"} & set(stands)
    if stands and not (unborn and resume or c.overwrite):
        hint = "it has no ckpt.pt, so nothing can go on with it; "
        if "ckpt.pt" in stands:
            hint = "--resume goes on with it, "
        elif unborn:
            hint = "it has no ckpt.pt yet, --resume starts it again, "
        raise ValueError(f"{c.out} already holds {', '.join(stands)}: {hint}--out=OTHER starts "
                         "another run beside it, --overwrite deletes it")
    for name in ("model", "adapter", "data", "eval_data"):
        path = os.path.realpath(getattr(c, name)) + os.sep
        if getattr(c, name) and path.startswith(os.path.realpath(c.out) + os.sep):
            raise ValueError(f"{name}={getattr(c, name)} lies in the output folder {c.out}, which "
                             "a new run clears; choose another --out")
    return None


def read_problems(c, say):
    """(to train on, to evaluate on); the second are never in the first. say(line) tells what was
    left out."""
    fields = c.question_field, c.answer_field
    problems = load_problems(c.data, "train", *fields, say=say)
    if not c.eval_problems:
        return problems, []
    if c.eval_data or c.data in NAMES:
        test = load_problems(c.eval_data or c.data, "test", *fields)[: c.eval_problems]
        asked = {problem.question for problem in test}
        rest = [problem for problem in problems if problem.question not in asked]
        if len(rest) < len(problems):
            say(f"{c.data}: {len(problems) - len(rest)} problems are left out of training, they "
                "are those of the evaluation")
        return rest, test
    rest, test = held_out(problems, c.eval_problems)  # the same split for every seed
    if len(test) > len(rest):
        say(f"{c.data}: {len(test)} problems are held out for evaluation and {len(rest)} stay to "
            "train on; --eval_problems sets how many")
    return rest, test


def usable_demonstrations(c, tokenizer, prompts):
    """Those (problem, prompt ids) whose demonstration has room. ValueError if none has."""
    room, usable = c.max_prompt_tokens + c.max_new_tokens, []
    if not c.sft_steps:
        return usable
    for problem, ids in prompts:
        if not problem.solution:
            raise ValueError(f"{c.data}: the problem {problem.question!r:.80} has no worked "
                             "solution to learn from in the warm-up; add \"solution\" to it, or "
                             "leave the warm-up out with --sft_steps=0")
        text = demonstration(problem, tokenizer.decode(ids))
        if len(ids) + len(tokenizer.encode(text)) + 1 <= room:
            usable.append((problem, ids))
    if not usable:
        raise ValueError(f"{c.data}: all {len(prompts)} demonstrations are longer than "
                         f"max_prompt_tokens + max_new_tokens = {room}; raise them, or leave the "
                         "warm-up out with --sft_steps=0")
    return usable


def check_ids(model, tokenizer, prompts):
    """ValueError if the tokenizer makes ids that the model does not have."""
    largest = max([tokenizer.eos_id, *(max(ids) for _, ids in prompts)])
    if largest >= model.config.vocab_size:
        raise ValueError(f"{model.folder}: the tokenizer makes the id {largest}, config.json says "
                         f"vocab_size {model.config.vocab_size}: they belong to different models")


def restore(run, state):
    """The run as the checkpoint has it. ValueError names what differs between the two."""
    path, model = run.output.checkpoint, run.model
    own = {name: tuple(p.shape) for name, p in trained(model).items()}
    saved = {name: tuple(getattr(x, "shape", ())) for name, x in state["model"].items()}
    for name in [*own, *saved]:
        if own.get(name) != saved.get(name):
            raise ValueError(f"{path}: tensor {name!r} is {saved.get(name, 'missing')} in the "
                             f"checkpoint and {own.get(name, 'missing')} in this model; resume "
                             "with the model that the run began with")
    for name, now, what in (("seed", run.c.seed, "another seed"),
                            ("sft_steps", run.c.sft_steps, "other sft_steps"),
                            ("problems", run.problems, "other problems to train on"),
                            ("frozen", run.frozen, "other weights below the adapter")):
        if state[name] != now:
            text = f"{path}: {what} than then; a run keeps these; --out=OTHER starts another"
            raise ValueError("\n  ".join([text, *run.changed]))
    if run.c.beta and model.lora and state["step"] > run.c.sft_steps and not state["reference"]:
        raise ValueError(f"{path}: beta={run.c.beta} needs the adapter as it was before RL, which "
                         "a run that began with beta=0 did not keep; start another: --out=OTHER")
    model.load_state_dict(state["model"], strict=False)  # it may hold an adapter alone
    try:
        run.optimizer.load_state_dict(state["optimizer"])
    except Exception as e:  # many kinds
        raise ValueError(f"{path}: the optimizer's state does not fit this model "
                         f"({type(e).__name__}: {str(e)[:200]})") from None
    for name in (*STATE, "reference"):
        setattr(run, name, state[name])


def begin(run):
    """Writes the first files of a run, or says how it goes on."""
    c, output = run.c, run.output
    if c.resume != "no":
        where = f"resumed at step {run.step}"
        if not run.step:
            where = f"{c.out} has no checkpoint: starting at step 0"
        run.say(where, *run.changed)
    if not run.step:
        output.clear()
    output.open_log(run.step)
    if run.processes.main and not run.step:
        if not c.model:
            make_tiny_model(run.model.folder, c.seed)
        if c.data not in NAMES and not c.eval_data and run.eval_problems:
            rows = [json.dumps(as_row(problem)) + "\n" for problem in run.eval_problems]
            output.write("heldout.jsonl", "".join(rows))
    output.write("config.toml", to_toml(replace(c, overwrite=False, resume="no")))
    if run.tokenizer.of_adapter:
        run.say(f"tokenizer and template are those of the adapter {c.adapter}")
    introduce(run)
    problem, ids = run.prompts[0]
    asked = c.model and not run.plain and not problem.messages  # the demo's template is to do so
    if asked and run.system_prompt.strip() not in run.tokenizer.decode(ids):
        run.say("note: the chat template leaves the system prompt out: nothing asks for the format "
                "that the rewards look for; put that into the questions, or --prompt_style=plain")
    compile_where_it_pays(run.model, c.compile, run.say)


def introduce(run):
    c, model = run.c, run.model
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    learned = sum(p.numel() for p in trained(model).values()) / 1e6
    adapter = f", of which {learned:,.2f} million, the adapter, are trained" if model.lora else ""
    too_long = len(run.prompts) - len(run.demonstrations) if c.sft_steps else 0
    run.say(f"""
{c.algo.upper()} on {c.data}: {len(run.prompts):,} problems ({run.skipped} skipped: longer than \
{c.max_prompt_tokens} tokens), {len(run.eval_problems)} for evaluation
policy    {c.model or 'a new ' + model.config.model_type}, {parameters:,.2f} million parameters\
{adapter}, on {run.processes.device.type}, {run.processes.size} process(es)
prompts   {'plain, without a chat template' if run.plain else 'by the chat template'}
warm-up   {c.sft_steps} SFT steps of {c.sft_batch_size} demonstrations, learning rate \
{c.sft_learning_rate:g}{f', {too_long} skipped: too long' if too_long else ''}
RL        {run.last - c.sft_steps} steps of {c.prompts_per_step} prompts x {c.group_size} \
completions of up to {c.max_new_tokens} tokens, learning rate {c.learning_rate:g}
output    {c.out}/
""")


# ---- what happens after a step -------------------------------------------------------------------

def end_step(run, row, began, bar):
    """After a step of either kind: its row, the bar, now and then a checkpoint. SystemExit, after a
    checkpoint, when a signal asked for it; ValueError when nothing is finite any more."""
    c = run.c
    run.output.log({"step": run.step, **row, "skipped_updates": run.skipped_updates,
                    "seconds": time.time() - began,
                    "memory_mib": peak_memory(run.processes.device)})
    run.step += 1
    shown = ["loss"]
    if row["phase"] != "sft":
        shown = ["reward", "accuracy", "format", "entropy", "kept", "conflict", "grad_norm"]
        advise(run, row)
    bar.set_postfix({name: f"{row[name]:.2f}" for name in shown})
    bar.update()
    if run.bad_in_a_row >= MOST_BAD_UPDATES:
        error = ValueError(f"step {run.step - 1}: loss or gradient was not finite "
                           f"{run.bad_in_a_row} times in a row; try a lower learning rate; what "
                           f"was good stands in {run.output.checkpoint}, if there is one yet")
        raise error if run.processes.main else SystemExit(2)
    rl_steps = run.step - c.sft_steps
    if c.eval_every and rl_steps > 0 and rl_steps % c.eval_every == 0 and run.step < run.last:
        evaluation(run, "during", run.step - 1)
    stop_if_asked(run)
    if run.step % c.save_every == 0 or run.step in (c.sft_steps, run.last):
        save(run)


def stop_if_asked(run):
    """SystemExit, after a checkpoint, when a signal came to one of the processes. All of them call
    this together."""
    stop = max(run.processes.gather(run.signals.received))
    if not stop:
        return
    if run.optimizer is not None:  # it is gone in the last evaluation, before which all was saved
        save(run)
    run.say(f"stopped after step {run.step - 1}; the same command with --resume goes on")
    raise SystemExit(128 + stop)


def advise(run, row):
    """One line when several RL steps in a row teach nothing, and why."""
    why = None
    if row["truncated"] > 0.5:
        why = (f"most completions were cut off at max_new_tokens={run.c.max_new_tokens}, most "
               "before their answer: raise it")
    elif row["tied"] == 1:
        why = ("all groups had equal rewards, which teach nothing: take other problems, a larger "
               "group_size, or a warm-up")
    run.dull_in_a_row = run.dull_in_a_row + 1 if why else 0
    if run.dull_in_a_row == DULL_STEPS:
        run.say(f"note: in {DULL_STEPS} steps in a row {why}")


def trained(model):
    """The parameters that learn, by name: all of them, or those of the adapter."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save(run):
    """The checkpoint, from which a run goes on exactly."""
    state = {name: getattr(run, name) for name in (*STATE, "problems", "frozen")}
    state |= {"model": {name: p.detach() for name, p in trained(run.model).items()},
              "optimizer": run.optimizer.state_dict(), "seed": run.c.seed,
              "sft_steps": run.c.sft_steps,
              "reference": run.reference if run.model.lora else None}  # else it lies in a folder
    run.output.save(state)
    run.processes.barrier()


def save_policy(run, name, dtype=None):
    """What was learned, in the folder `name` of the output: the whole model, or with LoRA the
    adapter in PEFT's format. By the main process; the others wait. -> the folder"""
    folder = run.output.path(name)
    if run.processes.main and run.model.lora:
        save_adapter(run.model, folder)
    elif run.processes.main:
        run.model.save_pretrained(folder, dtype)
    run.processes.barrier()
    return folder


def evaluation(run, label, step, model=None):
    """pass@k, maj@k and format on the held-out problems, by all processes together; a row of
    metrics.jsonl. No more completions at a time than in a rollout. None without such problems.
    SystemExit if a signal comes in the last one, when all is saved."""
    c, processes = run.c, run.processes
    if not run.eval_problems:
        return None
    at_once = c.prompts_per_step * c.group_size // processes.size
    settings = EvalConfig(
        n=c.eval_samples, k=f"1,{c.eval_samples}", temperature=c.temperature, seed=c.seed,
        max_new_tokens=c.max_new_tokens, max_prompt_tokens=c.max_prompt_tokens,
        system_prompt=run.system_prompt, prompt_style=c.prompt_style,
        template_variables=c.template_variables, batch_prompts=max(1, at_once // c.eval_samples))
    with run.autocast():
        result = evaluate(model or run.model, run.tokenizer, run.eval_problems, processes, settings,
                          after_each=lambda: stop_if_asked(run) if label == "after" else None)
    run.output.log({"step": step, "phase": "eval", "label": label, **result})
    return result


def before_rl(run):
    """What stands between the warm-up and RL: the evaluation, the folder sft/, and the reference of
    GRPO's KL term, the policy as it is now. A resumed run reads them instead."""
    c = run.c
    if run.step == c.sft_steps:
        run.before = evaluation(run, "before", run.step)
        if c.sft_steps:
            save_policy(run, "sft")
    if c.beta and run.reference is None and run.model.lora:
        run.reference = {name: p.detach().clone() for name, p in trained(run.model).items()}
    elif c.beta and run.reference is None:
        folder = run.output.path("sft") if c.sft_steps else run.model.folder
        run.reference = GPT.from_pretrained(folder, device=run.processes.device)
        run.reference.requires_grad_(False)


def is_finished(run):
    """Does the folder hold all steps, and the evaluation behind them? Says so."""
    done = run.step >= run.last and any(
        row["step"] == run.step and row.get("label") == "after" for row in run.output.rows())
    finished = run.processes.gather(done)[0]
    if finished:
        run.say(f"{run.c.out} is finished: all {run.step} steps and the last evaluation are there; "
                "more steps: --resume --steps=MORE", *run.changed)
    return finished


def finish(run):
    """Saves the policy, evaluates what was saved, and says how far it came."""
    c, model = run.c, run.model
    if not all(p.isfinite().all() for p in trained(model).values()):
        raise ValueError("the policy's weights are not finite, nothing is saved: those that it "
                         "began with were not, or training diverged")
    run.optimizer = run.policy = run.reference = None  # their memory is the evaluation's
    if model.lora:
        folder, adapter = model.folder, save_policy(run, "adapter")
    else:
        folder, adapter = save_policy(run, "model", model.stored_dtype), None
    if run.eval_problems:
        dtype = forward_dtype(c.dtype, run.processes.device) if adapter else torch.float32
        run.model = model = None
        saved = GPT.from_pretrained(folder, adapter=adapter, dtype=dtype,
                                    device=run.processes.device)
        after = evaluation(run, "after", run.step, saved)
        run.say(before_after(run.before, after))
    run.say(f"the policy is in {adapter or folder}/")


def before_after(before, after):
    """The table at the end, from two results of evaluate(); before may be None."""
    names = [k for k in after if k.startswith(("pass@", "maj@")) and k != "maj@1"]
    lines = [" " * 12 + ("  before" if before else "") + "   after"]
    for name in names + ["format", "truncated"]:
        figures = [result[name] for result in (before, after) if result]
        lines.append(f"{name:12}" + "".join(f"{100 * figure:7.1f}%" for figure in figures))
    return "\n".join(lines)
