r"""
The comparison: GRPO, GTPO, and GTPO without each of its parts, on the arithmetic task, at several
learning rates, with several seeds.

    python -m experiments.compare       # writes experiments/results.jsonl, a line a run
    python -m experiments.report        # tables of it, in Markdown
    # rules of experiments/variants.py in the place of equation (2)
    python -m experiments.compare --seeds=8 --learning_rates 3e-4 --out=out/conflict \
        --results=out/conflict.jsonl --algorithms grpo gtpo protect_only amplify_only
    # a pretrained model on word problems, some 25 minutes of one core a run
    python -m experiments.compare --task=word_problems --model=DIR --learning_rates 3e-4 \
        --algorithms grpo gtpo --seeds=3 --out=out/smollm2 --results=out/smollm2.jsonl
    python -m tools.plot out/compare/*-lr0.0007-s*      # curves, a band over the seeds

For each seed one warm-up (train.py --algo=sft) makes the start of all runs of that seed, and the
same seed gives them the same prompts and random numbers: runs of one seed differ in nothing but
the algorithm and the learning rate. Each run is a train.py and an eval.py of its own, one after
another, with one thread unless OMP_NUM_THREADS says otherwise. The same command goes on after a
stop: a finished run is not repeated, a stopped one continues from its last checkpoint.
"""
import argparse
import itertools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys

import torch
from tqdm import tqdm

from data import build_prompt, demonstration, load_problems
from experiments.variants import VARIANTS
from lib.files import expand_home, read_jsonl, write_whole
from lib.run import command
from model import GPT
from rewards import TAGS
from tokenizer import Tokenizer
from tools.plot import read_curves

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ALGORITHMS = {                                          # name: flags of train.py
    "grpo": dict(algo="grpo"),
    "grpo_kl": dict(algo="grpo", beta=0.04),            # as in DeepSeekMath, arXiv 2402.03300
    "grpo_no_std": dict(algo="grpo", scale="none"),     # GTPO with all parts off
    "gtpo": dict(algo="gtpo"),
    "gtpo_no_conflict": dict(algo="gtpo", conflict="false"),
    "gtpo_no_filter": dict(algo="gtpo", entropy_filter="false"),
    "gtpo_gamma0": dict(algo="gtpo", gamma=0),
}
ALL = ALGORITHMS | dict.fromkeys(VARIANTS, dict(algo="gtpo"))   # with another conflict rule, too
# of all runs of a task; the rest are train.py's defaults, or those of the task's preset
SETTINGS = {
    "arithmetic": dict(sft_steps=900, steps=60, prompts_per_step=8, group_size=8, temperature=1.0,
                       eval_problems=100, eval_samples=8),
    "word_problems": dict(sft_steps=20, steps=50, prompts_per_step=4, group_size=16,
                          temperature=1.0, eval_problems=120, eval_samples=4)}
KEY = ("algorithm", "learning_rate", "seed")            # which run it is; the rate of SFT is None
LAST = 5                                                # steps that a figure "at the end" averages


def settings(a):
    """Those of all runs of this call; a row with others is refused."""
    model = {"model": os.path.basename(os.path.abspath(a.model))} if a.model else {}
    return SETTINGS[a.task] | model


def folder_of(a, algorithm, rate, seed):
    name = f"sft-s{seed}" if algorithm == "sft" else f"{algorithm}-lr{rate}-s{seed}"
    return os.path.join(a.out, name)


def policy_of(a, folder):
    """The flags that name a finished run's policy: a pretrained model with the run's adapter."""
    if not a.model:
        return {"model": f"{folder}/model"}
    return {"model": a.model, "adapter": f"{folder}/adapter"}


def as_flags(values):
    return [f"--{name}={value}" for name, value in values.items()]


def train_command(a, algorithm, rate, seed):
    """The train.py of a run. Its own evaluation is as small as can be, since eval.py measures."""
    s, program = SETTINGS[a.task], [f"{ROOT}/train.py"]
    if algorithm in VARIANTS:
        program = ["-m", "experiments.variants", algorithm]
    if a.task == "word_problems":
        program.append(f"{ROOT}/config/smollm2_135m.toml")
    flags = dict(data=a.task, seed=seed, device="cpu", out=folder_of(a, algorithm, rate, seed),
                 show_every=0, save_every=10, eval_problems=1, eval_samples=1,
                 temperature=s["temperature"])
    if algorithm == "sft":
        flags |= dict(algo="sft", model=a.model, sft_steps=s["sft_steps"])
        if a.task == "arithmetic":
            flags |= dict(sft_learning_rate=3e-3)  # the default when our runs were made
    else:
        flags |= ALL[algorithm] | policy_of(a, folder_of(a, "sft", None, seed))
        flags |= dict(lora_rank=0, sft_steps=0, learning_rate=rate, steps=s["steps"],
                      prompts_per_step=s["prompts_per_step"], group_size=s["group_size"])
    return [sys.executable, *program, "--resume", *as_flags(flags)]


def eval_command(a, folder, seed):
    s = SETTINGS[a.task]
    return [sys.executable, f"{ROOT}/eval.py", *as_flags(policy_of(a, folder) | dict(
        data=a.task, n=s["eval_samples"], limit=s["eval_problems"], temperature=s["temperature"],
        max_new_tokens=48, seed=seed, device="cpu",
        dtype="float32" if a.task == "arithmetic" else "bfloat16", out=f"{folder}/eval.jsonl"))]


def call(words):
    """Runs a command, which ends when we are stopped. RuntimeError with the end of its stderr when
    it fails."""
    done = subprocess.run(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": ROOT})
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(words)}\n{last}")


@torch.no_grad()
def format_logp(problems, model, adapter=None):
    """Log-probability of the four tags in gold solutions, nats: a sum over their tokens given all
    before them, a mean over the problems. exp of it is about the share of completions whose
    format would be right if the rest of them were."""
    tokenizer, model = Tokenizer.from_pretrained(model), GPT.from_pretrained(model, adapter)
    total = 0.0
    for problem in problems:
        prompt, text = build_prompt(tokenizer, problem.question), demonstration(problem)
        spans = [(text.index(tag), text.index(tag) + len(tag)) for tag in TAGS]
        ids = tokenizer.encode(text)
        # where each token begins and ends; the task is ASCII: a character is a byte
        ends = itertools.accumulate((len(tokenizer.decode([i])) for i in ids), initial=0)
        tags = [t for t, (start, end) in enumerate(itertools.pairwise(ends))
                if any(start < stop and first < end for first, stop in spans)]
        logits = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1:-1]     # (L, V)
        logp = logits.float().log_softmax(-1)
        total += logp[tags, torch.tensor(ids)[tags]].sum().item()
    return total / len(problems)


def held_out_figures(path):
    """What a file of eval.py says: the hash of the weights and, each 0 to 1, accuracy (right answer
    in the right format), format, pass@k and maj@k for k = 1, 2, 4, ..."""
    header, *rows = read_jsonl(path)
    return {"weights": header["settings"].get("weights"),
            "accuracy": sum(row["correct"] and row["formatted"] for row in rows) / len(rows),
            "format": sum(row["formatted"] for row in rows) / len(rows),
            **next(iter(read_curves(path).values()))}


def training_figures(path):
    """What the RL steps in a metrics.jsonl say; {} without any. At the end: mean of the last five
    steps; worst: the worst such mean of five, for the entropy the highest single step.
    protected: share of tokens whose weight is not 1; filtered: share of completions that the
    entropy filter drops, or would."""
    steps = [row for row in read_jsonl(path) if row["phase"] not in ("sft", "eval")]
    if not steps:
        return {}

    def mean(field, rows):
        return sum(row[field] for row in rows) / len(rows)

    windows = [steps[i:i + LAST] for i in range(max(1, len(steps) - LAST + 1))]
    return {"entropy_end": mean("entropy", windows[-1]),
            "entropy_worst": max(row["entropy"] for row in steps),
            "reward_end": mean("reward", windows[-1]),
            "format_worst": min(mean("format", window) for window in windows),
            "protected": mean("conflict", steps), "filtered": 1 - mean("kept", steps),
            "mismatch": mean("mismatch", steps), "seconds": sum(row["seconds"] for row in steps)}


def commit():
    """The commit of this code, with a + if files differ from it; None outside of git."""
    words = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    return said.strip() or None


def do_run(a, algorithm, rate, seed):
    """Trains and measures one run, or what is left of it. Returns its line of the results."""
    folder = folder_of(a, algorithm, rate, seed)
    call(train_command(a, algorithm, rate, seed))
    call(eval_command(a, folder, seed))
    row = {"algorithm": algorithm, "learning_rate": rate, "seed": seed,
           "settings": settings(a), "commit": commit(),
           **held_out_figures(f"{folder}/eval.jsonl"),
           "format_logp": format_logp(load_problems(a.task, "test")[:64], **policy_of(a, folder)),
           **training_figures(f"{folder}/metrics.jsonl")}
    pathlib.Path(folder, "ckpt.pt").unlink(missing_ok=True)     # three times the model
    return row


def finished(a):
    """The rows of the results so far. ValueError if they were made with other settings."""
    rows = read_jsonl(a.results, (*KEY, "settings")) if os.path.exists(a.results) else []
    for number, row in enumerate(rows, 1):
        if row["settings"] != settings(a):
            raise ValueError(f"{a.results}:{number}: has other settings, {row['settings']}. Take "
                             "another --results and --out")
    return rows


def add(a, rows, row):
    """Adds a row to the rows, and writes all of them."""
    rows.append(row)
    write_whole(a.results, lambda f: f.writelines(json.dumps(row) + "\n" for row in rows))


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=5, help="seeds 0 to SEEDS-1 (default: 5)")
    p.add_argument("--learning_rates", nargs="+", type=float, default=[3e-4, 7e-4, 3e-3])
    p.add_argument("--algorithms", nargs="+", choices=ALL, default=list(ALGORITHMS))
    p.add_argument("--task", choices=SETTINGS, default="arithmetic",
                   help="word_problems: a pretrained model, with config/smollm2_135m.toml")
    p.add_argument("--model", default="", type=expand_home,
                   help="folder of the model for word_problems")
    p.add_argument("--out", default="out/compare", type=expand_home, help="folder of the runs")
    p.add_argument("--results", type=expand_home, default=f"{ROOT}/experiments/results.jsonl")
    a = p.parse_args(argv)
    if (a.task == "word_problems") != bool(a.model):
        p.error("--task=word_problems and --model=DIR belong together")
    if a.seeds < 1 or not all(0 < rate < math.inf for rate in a.learning_rates):
        p.error("--seeds: at least 1 is needed; --learning_rates: positive numbers")
    return a


def main(argv):
    """Does all runs that are not in the results yet: the warm-ups, then seed after seed. Returns
    the exit code: 0, or 1 when a run failed."""
    a = parse(argv)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # as Ctrl-C
    rows, failed = finished(a), 0
    done = [tuple(row[name] for name in KEY) for row in rows]
    warm_ups = [("sft", None, seed) for seed in range(a.seeds)]
    runs = [(name, rate, seed) for seed in range(a.seeds)
            for rate in dict.fromkeys(a.learning_rates) for name in dict.fromkeys(a.algorithms)]
    os.makedirs(os.path.dirname(os.path.abspath(a.results)), exist_ok=True)
    for run in tqdm([run for run in warm_ups + runs if run not in done], unit="run"):
        try:
            row = do_run(a, *run)
        except Exception as e:                          # the other runs go on
            failed = 1
            tqdm.write(f"failed: {folder_of(a, *run)}: {e}", file=sys.stderr)
            if run in warm_ups:                         # all runs of this seed begin with it
                break
        else:
            add(a, rows, row)
    return failed


if __name__ == "__main__":
    sys.exit(command(main))
