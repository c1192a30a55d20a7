"""
The comparison: GRPO, GTPO, and GTPO without each of its parts, on the arithmetic task, at several learning rates, with several seeds.

    python experiments/compare.py --jobs=2          # writes experiments/results.jsonl, a line a run; the same command goes on after a stop
    python experiments/report.py                    # tables of it, in Markdown
    python plot.py out/compare/*-lr0.0007-s*        # curves of one learning rate, a band over the seeds

For each seed one warm-up (train.py --algo=sft) makes the start of all runs of that seed, and the same seed gives them the same prompts and
random numbers: runs of one seed differ in nothing but the algorithm and the learning rate. Each run is a train.py and an eval.py of its own,
with one thread; a finished run is not repeated, a stopped one continues from its checkpoint.
"""
import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from tqdm import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from data import build_prompt, demonstration, load_problems  # noqa: E402
from model import GPT  # noqa: E402
from rewards import TAGS  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

ALGORITHMS = {                                                                      # name: flags of train.py
    "grpo": ["--algo=grpo"],
    "grpo_kl": ["--algo=grpo", "--beta=0.04"],                                      # the weight of DeepSeekMath, arXiv 2402.03300
    "grpo_no_std": ["--algo=grpo", "--scale_advantages=false"],                     # GTPO with all of its parts off
    "gtpo": ["--algo=gtpo"],
    "gtpo_no_conflict": ["--algo=gtpo", "--conflict=false"],
    "gtpo_no_filter": ["--algo=gtpo", "--entropy_filter=false"],
    "gtpo_gamma0": ["--algo=gtpo", "--gamma=0"],
}
SETTINGS = ("sft_steps", "steps", "prompts_per_step", "group_size", "temperature", "eval_problems", "eval_samples")   # the same for all runs
LAST = 5                                                                            # steps that a figure "at the end" averages

# ---- one run ------------------------------------------------------------------------------------------------------------------------


def run_name(algorithm, rate, seed):
    return f"sft-s{seed}" if algorithm == "sft" else f"{algorithm}-lr{rate:g}-s{seed}"


def train_command(a, algorithm, rate, seed):
    """The train.py command of a run. Its own evaluation is made as small as can be: eval.py measures, see eval_command."""
    command = [sys.executable, os.path.join(ROOT, "train.py"), f"--name={run_name(algorithm, rate, seed)}", f"--out_dir={a.out_dir}",
               f"--seed={seed}", "--data=arithmetic", "--device=cpu", "--resume=auto", "--save_every=50", "--show_every=0", "--eval_problems=1",
               "--eval_samples=1", f"--temperature={a.temperature:g}"]
    if algorithm == "sft":
        return command + ["--algo=sft", f"--sft_steps={a.sft_steps}"]
    return command + ALGORITHMS[algorithm] + [
        f"--model={os.path.join(a.out_dir, run_name('sft', rate, seed), 'model')}", "--sft_steps=0", f"--steps={a.steps}",
        f"--prompts_per_step={a.prompts_per_step}", f"--group_size={a.group_size}", f"--learning_rate={rate:g}"]


def eval_command(a, algorithm, rate, seed):
    """The eval.py command of a run: pass@k and maj@k on held-out problems, the same for all runs. It continues where it was killed."""
    folder = os.path.join(a.out_dir, run_name(algorithm, rate, seed))
    return [sys.executable, os.path.join(ROOT, "eval.py"), f"--model={folder}/model", "--data=arithmetic", f"--n={a.eval_samples}",
            f"--limit={a.eval_problems}", f"--temperature={a.temperature:g}", "--max_new_tokens=48", f"--seed={seed}", "--device=cpu",
            f"--out={folder}/eval.jsonl"]


class Commands:
    """Runs commands, one thread of arithmetic each, and ends those that are running when it is asked to stop."""

    def __init__(self):
        self.running, self.lock, self.stopped = set(), threading.Lock(), False

    def run(self, command):
        """Waits for the command. RuntimeError with the end of its stderr when it fails, or when stop() was called."""
        with self.lock:
            if self.stopped:
                raise RuntimeError("stopped")
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
                                       env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)     # Ctrl-C reaches it by stop()
            self.running.add(process)
        errors = process.communicate()[1]
        with self.lock:
            self.running.discard(process)
        if process.returncode or self.stopped:
            last = "\n".join(re.split(r"[\r\n]+", errors.strip())[-5:])
            raise RuntimeError("stopped" if self.stopped else f"exit code {process.returncode}: {' '.join(command)}\n{last}")

    def stop(self):
        with self.lock:
            self.stopped = True
            for process in self.running:
                process.terminate()                                                 # train.py saves a checkpoint and ends


@torch.no_grad()
def format_logp(folder, problems):
    """Log-probability of the four tags in gold solutions, nats: a sum over their tokens given all before them, a mean over the problems.
    exp of it is about the share of completions whose format would be right if the rest of them were."""
    model, tokenizer = GPT.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    total = 0.0
    for problem in problems:
        prompt, text = build_prompt(tokenizer, problem.question), demonstration(problem)
        ids, end, tag_tokens = tokenizer.encode(text), 0, []
        spans = [(text.index(tag), text.index(tag) + len(tag)) for tag in TAGS]
        for t, i in enumerate(ids):
            start, end = end, end + len(tokenizer.decode([i]))                      # the task is ASCII: a character is a byte
            if any(start < stop and first < end for first, stop in spans):
                tag_tokens.append(t)
        logp = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1:-1].float().log_softmax(-1)                   # (L, V)
        total += logp[tag_tokens, torch.tensor(ids)[tag_tokens]].sum().item()
    return total / len(problems)


def read_jsonl(path):
    """The rows of a JSONL file, none if there is no file. A last line that a kill has cut off is dropped; ValueError: another broken line."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as f:
        *lines, last = f.read().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as e:
            raise ValueError(f"{path}:{number}: broken JSON: {e}; mend or remove the line") from None
    return rows


def held_out_figures(path):
    """What a file of eval.py says, each 0 to 1: accuracy (right answer in the right format), format, pass@k and maj@k for k = 1, 2, 4, ..."""
    from plot import read_curves
    rows = read_jsonl(path)[1:]
    return {"accuracy": sum(row["correct"] and row["formatted"] for row in rows) / len(rows),
            "format": sum(row["formatted"] for row in rows) / len(rows), **read_curves(path)["arithmetic"]}


def training_figures(path):
    """What the RL steps in a metrics.jsonl say. At the end: mean of the last five steps; worst: the worst such mean of five, for the entropy
    the highest single step. protected: share of conflict tokens; filtered: share of completions that the entropy filter drops, or would."""
    steps = [row for row in read_jsonl(path) if row["phase"] not in ("sft", "eval")]
    if not steps:
        return {}
    means = {k: [sum(row[k] for row in steps[i:i + LAST]) / LAST for i in range(max(1, len(steps) - LAST + 1))] for k in ("entropy", "format")}
    return {"entropy_end": means["entropy"][-1], "entropy_worst": max(row["entropy"] for row in steps), "format_worst": min(means["format"]),
            "protected": sum(row["conflict"] for row in steps) / len(steps), "filtered": 1 - sum(row["kept"] for row in steps) / len(steps),
            "filtered_worst": 1 - min(row["kept"] for row in steps), "seconds": sum(row["seconds"] for row in steps)}


def do_run(a, commands, algorithm, rate, seed):
    """Trains and measures one run, or what is left of it. Returns its line of the results."""
    folder = os.path.join(a.out_dir, run_name(algorithm, rate, seed))
    commands.run(train_command(a, algorithm, rate, seed))
    commands.run(eval_command(a, algorithm, rate, seed))
    figures = {**held_out_figures(f"{folder}/eval.jsonl"), "format_logp": format_logp(f"{folder}/model", load_problems("arithmetic", "test")[:64]),
               **training_figures(f"{folder}/metrics.jsonl")}
    return {"algorithm": algorithm, "learning_rate": None if algorithm == "sft" else rate, "seed": seed,
            "settings": {k: getattr(a, k) for k in SETTINGS}, **figures}

# ---- all runs -----------------------------------------------------------------------------------------------------------------------


def key(row):
    return row["algorithm"], row["learning_rate"], row["seed"]


def finished(a):
    """{key: row} of the runs that are in the results. ValueError if they were made with other settings."""
    rows = read_jsonl(a.results)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not {"algorithm", "learning_rate", "seed", "settings"} <= row.keys():
            raise ValueError(f"{a.results}:{number}: not a line of results; mend or remove it")
        differ = [f"{k} is {row['settings'].get(k)} there, {getattr(a, k)} now" for k in SETTINGS if row["settings"].get(k) != getattr(a, k)]
        if differ:
            raise ValueError(f"{a.results}:{number}: has other settings: {'; '.join(differ)}. Take another --results and --out_dir")
    return {key(row): row for row in rows}


def append(path, row):
    """Adds a line to a JSONL file; a torn last line goes first."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "a+b") as f:
        f.seek(0)
        f.truncate(f.read().rfind(b"\n") + 1)
        f.write(json.dumps(row).encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


def compare(a):
    """Does all runs that are not in the results yet: the warm-ups, then seed after seed. Returns the number of those that failed."""
    done, commands, failed = finished(a), Commands(), 0
    phases = [[("sft", None, seed) for seed in range(a.seeds)],
              [(name, rate, seed) for seed in range(a.seeds) for rate in a.learning_rates for name in a.algorithms]]
    with tqdm(total=sum(map(len, phases)), initial=sum(run in done for phase in phases for run in phase), unit="run", dynamic_ncols=True) as bar:
        for runs in phases:
            with ThreadPoolExecutor(a.jobs) as pool:
                futures = {pool.submit(do_run, a, commands, *run): run for run in runs if run not in done}
                try:
                    for future in as_completed(futures):
                        try:
                            append(a.results, future.result())
                            bar.update()
                            with contextlib.suppress(FileNotFoundError):            # of no more use, and three times the model's size
                                os.remove(os.path.join(a.out_dir, run_name(*futures[future]), "ckpt.pt"))
                        except (RuntimeError, ValueError, OSError) as e:
                            failed += 1
                            tqdm.write(f"failed: {run_name(*futures[future])}: {e}", file=sys.stderr)
                except KeyboardInterrupt:
                    commands.stop()
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            if failed:
                break
    return failed


def numbers(kind):
    def parse(text):
        values = [kind(part) for part in text.split(",")]
        if not all(0 < v < math.inf for v in values):
            raise ValueError
        return values
    parse.__name__ = "list of positive numbers"
    return parse


def algorithms(text):
    names = text.split(",")
    for name in names:
        if name not in ALGORITHMS:
            raise argparse.ArgumentTypeError(f"{name!r}: should be some of {', '.join(ALGORITHMS)}")
    return names


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each (default: 1)")
    p.add_argument("--seeds", type=int, default=5, help="seeds 0 to SEEDS-1 (default: 5)")
    p.add_argument("--learning_rates", type=numbers(float), default=[3e-4, 7e-4, 3e-3], help="default: 3e-4,7e-4,3e-3")
    p.add_argument("--algorithms", type=algorithms, default=list(ALGORITHMS), help=f"default: {','.join(ALGORITHMS)}")
    p.add_argument("--sft_steps", type=int, default=900, help="updates of the warm-up (default: 900)")
    p.add_argument("--steps", type=int, default=60, help="RL updates of a run (default: 60)")
    p.add_argument("--prompts_per_step", type=int, default=8, help="default: 8")
    p.add_argument("--group_size", type=int, default=8, help="completions per prompt (default: 8)")
    p.add_argument("--temperature", type=float, default=1.0, help="of training and evaluation (default: 1)")
    p.add_argument("--eval_problems", type=int, default=100, help="held-out problems (default: 100)")
    p.add_argument("--eval_samples", type=int, default=8, help="completions for each (default: 8)")
    p.add_argument("--out_dir", default=os.path.join("out", "compare"), help="folder of the runs (default: out/compare)")
    p.add_argument("--results", default=os.path.join(ROOT, "experiments", "results.jsonl"), help="default: results.jsonl beside this file")
    a = p.parse_args(argv)
    for name in ("jobs", "seeds", "sft_steps", "steps", "prompts_per_step", "eval_problems", "eval_samples"):
        if getattr(a, name) < 1:
            p.error(f"--{name}={getattr(a, name)}: should be 1 or more")
    return a


def main(argv=None):
    """The command line. Returns the exit code: 0, 1 when a run failed, 2 for bad usage, 130 when stopped."""
    a = parse(argv)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)                       # as Ctrl-C
    try:
        return int(compare(a) > 0)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
