"""
pass@k and maj@k: n completions of each problem are sampled, graded, written to a JSONL file, and summed up in one table a data set.

    python eval.py --model=out/arithmetic/model --data=arithmetic --n=8 --limit=50
    python eval.py --model=models/Qwen2.5-3B-Instruct --data=gsm8k,path/to/problems.jsonl --n=64 --k=1,8,16,32,64
    python eval.py --model=models/Qwen2.5-3B --data=math500 --few_shot=4 --examples=math     # four solved problems before each question
    torchrun --nproc_per_node=8 eval.py --model=models/Qwen2.5-3B-Instruct --preset=paper
    python eval.py --rescore=FILE.jsonl        # grades the completions of an earlier run again, without sampling

A killed evaluation goes on where it was when the same command is run again, also with another number of processes.

- A completion is right when its extracted answer (the last one it gives) equals the gold answer. The format need not be right for that,
  unlike in the training reward; how many completions have the right format is a figure of its own.
- pass@k is the unbiased estimate from all n completions; maj@k is the majority of the first k.
- A problem whose prompt is too long is skipped: it counts as wrong for every k, and has no part in the other figures.
- A figure is the mean over problems of each problem's own mean; the intervals resample problems.
- The random numbers for problem i come from (seed, i) alone, so what is sampled depends neither on the batch size nor on the number of
  processes (but for rounding in the model), and the first completions of a larger n are those of a smaller one.
"""
import argparse
import difflib
import glob
import hashlib
import json
import math
import os
import resource
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from data import NAMES, SYSTEM_PROMPT, build_prompt, load_problems
from model import GPT
from rewards import answers_equal, extract_answer, format_reward
from sample import completion_texts, sample, seeded_uniforms
from tokenizer import Tokenizer

# Published pass@k in percent, by k (arXiv 2508.03772, models trained on MATH). A trained model keeps its shape, not its name: a model is
# known by (model_type, hidden_size, num_hidden_layers).
PUBLISHED = {("qwen2", 2048, 36): ("Qwen2.5-3B-Instruct", {"amc23": {"GTPO": {1: 40.0, 8: 75.0, 64: 85.0}, "GRPO": {1: 30.0, 8: 67.5, 64: 87.5}},
                                                           "aime24": {"GTPO": {64: 30.0}, "GRPO": {64: 16.7}}})}
SHAPE = ("model_type", "hidden_size", "num_hidden_layers")
PAPER_N = {"gsm8k": 32, "math": 32, "aime24": 64, "aime25": 64, "amc23": 64}       # n and the largest k in the paper
SHARES = ["format", "truncated", "unreadable", "tokens"]

# -----------------------------------------------------------------------------
# the estimators


def pass_at_k(n, c, k):
    """Chance that at least one of k completions is right, when k are drawn without replacement from n of which c are right:
    1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1). Exact for any n. ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right in {n} completions cannot be estimated: 0 <= c <= n and 1 <= k <= n are needed")
    n, c, k = int(n), int(c), int(k)
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def answer_classes(answers):
    """A class number for each answer, in order of first appearance; equal answers share one, however written. None or blank: None."""
    class_of, firsts, classes = {}, [], []
    for answer in answers:
        text = "" if answer is None else str(answer).strip()
        if text and text not in class_of:                                           # compare each spelling once, not each answer
            class_of[text] = next((i for i, first in enumerate(firsts) if answers_equal(text, first)), len(firsts))
            if class_of[text] == len(firsts):
                firsts.append(text)
        classes.append(class_of.get(text))
    return classes


def majority(classes):
    """Position of the winning answer (the first of its class), None when nobody votes. A tie goes to the class seen first."""
    votes = {}
    for c in classes:
        if c is not None:
            votes[c] = votes.get(c, 0) + 1
    return classes.index(max(votes, key=votes.get)) if votes else None              # votes keeps the order of first appearance


def maj_at_k(answers, gold, k):
    """1.0 if the majority of the first k answers equals gold, else 0.0. None (no readable answer) casts no vote, equal answers written
    differently vote together, a tie goes to the answer seen first, no vote is 0.0. ValueError if k < 1 or there are fewer than k."""
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} answers: k must be from 1 to the number of answers")
    winner = majority(answer_classes(answers[:k]))
    return float(winner is not None and bool(answers_equal(str(answers[winner]), str(gold))))


def check_ks(n, ks):
    """ks in order, without repeats. ValueError if n < 1, or a k is not within 1..n."""
    wrong = [k for k in ks if not 1 <= k <= n]
    if n < 1 or wrong or not ks:
        raise ValueError(f"n={n}, k={','.join(map(str, wrong or ks))}: n must be at least 1, and each k from 1 to n")
    return sorted(set(ks))

# -----------------------------------------------------------------------------
# from rows (one dict a completion) to figures


def verdict(completion, gold):
    """The graded fields of a row: extracted answer (or None), whether it equals gold, whether the format is right."""
    answer = extract_answer(completion)
    return {"answer": answer, "correct": answer is not None and bool(answers_equal(answer, gold)),
            "formatted": format_reward(completion) >= 10}


def by_problem(rows):
    """{problem index: its rows in order of sample}. A completion that is there twice counts once."""
    found = {}
    for row in rows:
        found.setdefault(row["index"], {}).setdefault(row["sample"], row)
    return {i: [found[i][j] for j in sorted(found[i])] for i in sorted(found)}


def columns(ks):
    return [f"pass@{k}" for k in ks] + [f"maj@{k}" for k in ks] + SHARES


def problem_stats(rows, ks):
    """The columns(ks) of one problem. NaN where it cannot say: k larger than its number of rows (missing completions are not made up),
    shares of a skipped problem."""
    if rows[0]["finish"] == "skipped":
        return [0.0] * (2 * len(ks)) + [math.nan] * len(SHARES)
    n, right, classes = len(rows), sum(row["correct"] for row in rows), answer_classes([row["answer"] for row in rows])
    winners = [majority(classes[:k]) for k in ks]
    passed = [pass_at_k(n, right, k) if k <= n else math.nan for k in ks]
    voted = [float(w is not None and rows[w]["correct"]) if k <= n else math.nan for k, w in zip(ks, winners)]
    sums = [sum(row["formatted"] for row in rows), sum(row["finish"] == "length" for row in rows), classes.count(None),
            sum(row["tokens"] for row in rows)]
    return passed + voted + [x / n for x in sums]


def mean(values):
    """Mean without the NaNs; NaN when nothing else is there."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan


def bootstrap(values, seed=0):
    """95 % percentile interval (low, high) of mean(values), from 1000 resamples of the problems. Equal values give a width of 0."""
    values, rng = values[~np.isnan(values)], np.random.default_rng(seed)
    if not values.size:
        return math.nan, math.nan
    means = [values[rng.integers(values.size, size=(100, values.size))].mean(1) for _ in range(10)]
    return tuple(float(x) for x in np.percentile(np.concatenate(means), (2.5, 97.5)))

# -----------------------------------------------------------------------------
# sampling


@torch.no_grad()
def evaluate(model, tokenizer, problems, n, ks, max_new_tokens, temperature=1.0, top_p=1.0, system_prompt=SYSTEM_PROMPT,
             prompt_style="auto", max_prompt_tokens=None, seed=0, batch_prompts=None, rank=0, world_size=1, progress=True,
             on_rows=None, earlier=(), examples=()):
    """Samples n completions of each problem and grades them. Returns a dict:

    problems, skipped, completions  counts; skipped: the prompt is too long, which counts as wrong
    pass@K, maj@K                   0 to 1, for each K of ks
    format, truncated, unreadable   share of completions in the right format, without end token, without readable answer
    tokens                          mean length of a completion, end token included
    seconds, sampled_tokens         time of this call, and the tokens that all processes sampled in it
    rows                            this process's rows: index, sample, question, gold, level and subject (if known), prompt (None:
                                    skipped), completion (without end token), answer, correct, formatted, tokens, finish ("stop", "length", "skipped")

    A prompt may have max_prompt_tokens tokens (None: any), and at most the model's window less max_new_tokens; `examples`, solved problems,
    stand in each. batch_prompts prompts are sampled at a time (None: about 128 completions). With world_size > 1 each process calls this
    with its rank, in the default process group; each problem is sampled by one of them, and all get the same figures. on_rows(rows) gets the
    rows of each problem when they are there. `earlier`: rows of an earlier call, the same on every process; their problems are counted but
    not sampled. The model's mode and all global random states stay as they were. ValueError for settings that make no sense.
    """
    start, ks, window = time.time(), check_ks(n, ks), model.config.max_position_embeddings
    if not len(problems):
        raise ValueError("there are no problems to evaluate on")
    if max_new_tokens < 1 or max_new_tokens >= window:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1 and leave room for a prompt in the model's {window} tokens")
    if min(batch_prompts or 1, max_prompt_tokens or 1) < 1 or 0 in (batch_prompts, max_prompt_tokens):
        raise ValueError(f"batch_prompts={batch_prompts}, max_prompt_tokens={max_prompt_tokens}: each must be at least 1")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature={temperature}, top_p={top_p}: temperature must be at least 0, and top_p above 0 and at most 1")
    if temperature == 0 and n > 1:
        raise ValueError(f"temperature 0 gives the same completion {n} times: take n=1, or a temperature above 0")
    room = min(window - max_new_tokens, max_prompt_tokens or window)
    done, rows = by_problem(earlier), []
    stats = torch.zeros(len(problems), len(columns(ks)), dtype=torch.float64)       # (problems, columns), each row filled by one process
    counts = torch.zeros(3, dtype=torch.float64)                                    # skipped, completions, tokens sampled now

    def row(i, j, completion, tokens, finish):
        p = problems[i]
        known = {key: value for key, value in (("level", p.level), ("subject", p.subject)) if value is not None}
        return {"index": i, "sample": j, "question": p.question, "gold": p.answer, **known, "prompt": texts_of.get(i), "completion": completion,
                **verdict(completion, p.answer), "tokens": tokens, "finish": finish}

    def take(i, its_rows, new=True):
        stats[i] = torch.tensor(problem_stats(its_rows, ks), dtype=torch.float64)
        skipped = its_rows[0]["finish"] == "skipped"
        counts.add_(torch.tensor([skipped, 0 if skipped else len(its_rows), sum(r["tokens"] for r in its_rows) if new else 0]))
        rows.extend(its_rows)
        if new and on_rows:
            on_rows(its_rows)

    # a question of over 64 characters per allowed token is skipped unread: an absurd row must not hang the tokenizer
    prompts = {i: build_prompt(tokenizer, p.question, system_prompt, prompt_style, examples)
               for i, p in enumerate(problems) if i not in done and len(p.question) <= 64 * room}
    fits = sorted((i for i in prompts if len(prompts[i]) <= room), key=lambda i: -len(prompts[i]))     # alike lengths side by side
    mine, size = fits[rank::world_size], batch_prompts or max(1, 128 // n)
    texts_of = {i: tokenizer.decode(prompts[i]) for i in mine}
    if rank == 0:
        for i in done:
            take(i, done[i], new=False)
        for i in sorted(set(range(len(problems))) - set(done) - set(fits)):
            take(i, [row(i, 0, "", 0, "skipped")])

    was_training = model.training
    model.eval()
    try:
        with tqdm(total=len(mine), desc="evaluate", unit="problem", disable=not progress or rank != 0, leave=False) as bar:
            for batch in (mine[at:at + size] for at in range(0, len(mine), size)):
                noise = torch.stack([seeded_uniforms(("eval", seed, i), n, max_new_tokens) for i in batch])          # (P, G, L)
                out = sample(model, [prompts[i] for i in batch], n, max_new_tokens, temperature=temperature, top_p=top_p,
                             eos_ids=tokenizer.eos_ids, noise=noise)
                texts, lengths, ended = completion_texts(tokenizer, out), out.mask.sum(-1).tolist(), out.finished.tolist()
                for p, i in enumerate(batch):
                    take(i, [row(i, j, text, length, "stop" if end else "length")
                             for j, (text, length, end) in enumerate(zip(texts[p], lengths[p], ended[p]))])
                bar.update(len(batch))
    finally:
        model.train(was_training)

    if world_size > 1:
        device = next(model.parameters()).device if dist.get_backend() == "nccl" else "cpu"
        for total in (stats, counts):
            shared = total.to(device)
            dist.all_reduce(shared)
            total.copy_(shared)
    figures = {name: mean(column) for name, column in zip(columns(ks), stats.numpy().T)}
    skipped, completions, sampled = (int(x) for x in counts)
    return {"problems": len(problems), "skipped": skipped, "completions": completions, **figures,
            "seconds": time.time() - start, "sampled_tokens": sampled, "rows": rows}

# -----------------------------------------------------------------------------
# the file of completions: a header line with the settings, then one row a line. Process r > 0 writes to FILE.rankR.

FIELDS = {"data": str, "index": int, "sample": int, "gold": str, "completion": str, "answer": (str, type(None)), "correct": bool,
          "formatted": bool, "tokens": int, "finish": str}


def check_line(line, number):
    """The dict of one line of the file (number 1 is the header), or ValueError."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if number == 1:
        try:
            if all(check_ks(spec["n"], row["k"][name]) and spec["problems"] > 0 for name, spec in row["settings"]["data"].items()):
                return {**row, "model": str(row["model"])}
        except (KeyError, TypeError, AttributeError):
            pass
        raise ValueError("not the header of an evaluation")
    for field, kind in FIELDS.items():
        if field not in row or not isinstance(row[field], kind):
            raise ValueError(f"field {field!r} is missing or of the wrong type")
    return row


def read_results(path):
    """(header, rows) of a results file; (None, []) for an empty one. A last line that a kill has cut off is dropped; any other line that is
    not ours is a ValueError naming file:line."""
    with open(path, "rb") as f:
        lines = f.read().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        last = number == len(lines)                                                 # what follows the last newline
        if last and not line:
            break
        try:
            row = check_line(line, number)
            if number > 1 and row["data"] not in rows[0]["settings"]["data"]:
                raise ValueError(f"data {row['data']!r} is not in the header")
            rows.append(row)
        except ValueError as e:                                                     # that json and unicode errors are, too
            if last and (number > 1 or line.startswith(b'{"model": ')):
                break
            raise ValueError(f"{path}:{number}: {e}; mend or remove the line, or take another file") from None
    return (rows[0], rows[1:]) if rows else (None, [])


def merge(path, header):
    """Puts the complete problems of path and path.rank* into path, in order and in one atomic step; the others will be sampled again.
    ValueError when one of the files has other settings."""
    data, found = header["settings"]["data"], []
    parts = glob.glob(glob.escape(path) + ".rank*")
    for part in [path] * os.path.exists(path) + sorted(parts):
        old, rows = read_results(part)
        there, now = old["settings"] if old else header["settings"], header["settings"]
        differ = [f"{key} is {there.get(key)!r} there, {now.get(key)!r} now" for key in {**there, **now} if there.get(key) != now.get(key)]
        if rows and differ:
            raise ValueError(f"{part} has other settings: {'; '.join(differ)}. Take another --out, or --overwrite to start again")
        found += rows
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(json.dumps(header) + "\n")
        for name in data:
            for group in by_problem(row for row in found if row["data"] == name).values():
                if len(group) == data[name]["n"] or group[0]["finish"] == "skipped":
                    f.writelines(json.dumps(row) + "\n" for row in group)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)
    for part in parts:
        os.remove(part)


def fingerprint(model):
    """A hash that tells one model from another: its config.json, and every 997th number of each tensor."""
    digest = hashlib.sha256(json.dumps(model.config.raw, sort_keys=True).encode())
    for parameter in model.parameters():
        digest.update(parameter.detach().flatten()[::997].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]

# -----------------------------------------------------------------------------
# the tables


def benchmark(name):
    """The benchmark that a --data entry names, or that its path contains; else the entry itself."""
    parts = [part.split(".")[0] for part in reversed(os.path.normpath(name).split(os.sep))]
    return next((part for part in parts if part in PAPER_N), name)


def print_table(name, rows, header, ks):
    """Prints the figures of one data set from its rows."""
    spec, groups = header["settings"]["data"][name], list(by_problem(rows).values())
    if not groups:
        return print(f"\n{name}: none of its {spec['problems']} problems is there")
    stats = dict(zip(columns(ks), np.array([problem_stats(group, ks) for group in groups]).T))      # column -> (problems,)
    n, sampled = spec["n"], [group for group in groups if group[0]["finish"] != "skipped"]
    short = [len(group) for group in sampled if len(group) < n]

    def line(first, *cells):
        print(f"  {first:<23}" + "".join(f"{cell:<21}" for cell in cells).rstrip())

    def figure(column, which=slice(None)):
        values = (stats[column] * (1 if column == "tokens" else 100))[which]
        return "n/a" if np.isnan(values).all() else "{:.1f} [{:.1f}, {:.1f}]".format(mean(values), *bootstrap(values))

    print(f"\n{name}: {len(groups)} problems, {n} completions each; percent, 95 % bootstrap interval over problems")
    if len(groups) < spec["problems"]:
        print(f"  only {len(groups)} of {spec['problems']} problems are there")
    if len(sampled) < len(groups):
        print(f"  problems skipped: {len(groups) - len(sampled)}, their prompt is too long; they count as wrong")
    if short:
        print(f"  completions missing: {len(short) * n - sum(short)}, from {len(short)} of the problems; each of these counts with those "
              "it has, and has no part where k is larger")
    line("", *(f"k={k}" for k in ks))
    line("pass@k", *(figure(f"pass@{k}") for k in ks))
    published, figures = PUBLISHED.get(tuple(header.get("shape", ())), ("", {}))
    for method, known in figures.get(benchmark(name), {}).items():
        line(f"paper, {method}", *(known.get(k, "-") for k in ks))
    line("maj@k", *(figure(f"maj@{k}") for k in ks))
    if benchmark(name) in figures:
        print(f"  paper: pass@k of {published} trained on MATH, arXiv 2508.03772")
    line("", *SHARES)
    line("completions", *(figure(column) for column in SHARES))
    if mean(stats["truncated"]) > 0.5:
        print(f"  more than half of the completions were cut off: max_new_tokens={header['settings'].get('max_new_tokens')} is too few")
    shown = [f"pass@{ks[0]}", f"pass@{ks[-1]}", f"maj@{ks[-1]}"]
    for field in ("level", "subject"):
        values = [group[0].get(field) for group in groups]
        if len(set(values)) > 1:
            line(field, "problems", *shown)
            for value in sorted(set(values) - {None}, key=str):
                which = np.array([v == value for v in values])
                line(str(value)[:22], int(which.sum()), *(figure(column, which) for column in shown))


def rescore(path, ks):
    """Grades the rows of a results file again; prints each verdict that changes, and the tables. Nothing is written."""
    header, rows = read_results(path)
    if header is None:
        raise ValueError(f"{path} is empty: there is nothing to grade")
    changed, name_of = [], {True: "right", False: "wrong"}
    for row in rows:
        old = {key: row[key] for key in ("answer", "correct", "formatted")}
        row.update(verdict(row["completion"], row["gold"]))
        if any(row[key] != old[key] for key in old):
            changed.append((old, row))
    verdicts = [(old, row) for old, row in changed if old["correct"] != row["correct"]]
    print(f"{path}: {len(rows)} rows graded again, {len(verdicts)} verdicts changed, "
          f"{len(changed) - len(verdicts)} more rows changed in answer or format only")
    for old, row in verdicts[:20]:
        print(f"  {row['data']} problem {row['index']} sample {row['sample']}: {name_of[old['correct']]} -> {name_of[row['correct']]}, "
              f"answer {old['answer']!r:.50} -> {row['answer']!r:.50}, gold {row['gold']!r:.50}")
    if len(verdicts) > 20:
        print(f"  and {len(verdicts) - 20} more")
    for name, spec in header["settings"]["data"].items():
        print_table(name, [row for row in rows if row["data"] == name], header, check_ks(spec["n"], ks or header["k"][name]))

# -----------------------------------------------------------------------------
# the command


def numbers(text):
    """1,8,64 -> [1, 8, 64]"""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,8,64") from None


def parse(argv):
    """The flags. ValueError for wrong usage, naming the nearest flag where one does not exist."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def wrong(message):
        raise ValueError(f"{message} (--help lists the flags)")
    p.error = wrong
    p.add_argument("--model", help="model folder: config.json, weights, tokenizer files")
    p.add_argument("--adapter", help="folder of a LoRA adapter for it")
    p.add_argument("--data", help="problem sets, names or paths, separated by commas")
    p.add_argument("--split", default="test", help="of a set given by name (default: test)")
    p.add_argument("--preset", choices=["paper"], help="the paper's five sets unless --data is given; n and k to 32, on AIME and AMC to 64")
    p.add_argument("--n", "--samples", type=int, help="completions a problem (default: 8); under torchrun write --samples, "
                   "which may take --n for one of its own flags")
    p.add_argument("--k", type=numbers, help="for pass@k and maj@k, such as 1,8,64 (default: powers of two up to n, and n)")
    p.add_argument("--limit", type=int, help="only the first LIMIT problems of each set")
    p.add_argument("--temperature", type=float, default=1.0, help="default: 1; 0 is greedy, with n=1")
    p.add_argument("--top_p", type=float, default=1.0, help="default: 1, the whole distribution")
    p.add_argument("--max_new_tokens", type=int, help="longest completion (default: 1500, or half of the model's window if that is less)")
    p.add_argument("--max_prompt_tokens", type=int, default=4000, help="a longer prompt is skipped, which counts as wrong (default: 4000)")
    p.add_argument("--system_prompt", default=SYSTEM_PROMPT, help="default: the one of training")
    p.add_argument("--prompt_style", default="auto", choices=["auto", "chat", "plain"], help="default: auto, chat if there is a template")
    p.add_argument("--few_shot", type=int, default=0, metavar="N", help="solved examples before each question (default: 0)")
    p.add_argument("--examples", help="set, or file with solutions, to take them from (default: the train split of the set itself)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--batch_prompts", type=int, help="prompts sampled at a time by a process, n completions each (default: 128 / n)")
    p.add_argument("--device", help="default: cuda if there is one, else cpu")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: bfloat16 on cuda, else float32)")
    p.add_argument("--out", help="file for the completions (default: out/eval/MODEL-HASH.jsonl, HASH being that of the settings)")
    p.add_argument("--overwrite", action="store_true", help="start again where --out exists")
    p.add_argument("--rescore", metavar="FILE", help="grade the completions of FILE again; nothing is sampled or written")
    args, unknown = p.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], [o for action in p._actions for o in action.option_strings], n=1)
        wrong(f"unknown argument {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
    args.data = args.data or (",".join(PAPER_N) if args.preset else None)
    if not args.rescore and not (args.model and args.data):
        wrong("give --model and --data (or --preset=paper), or --rescore")
    if args.data and not all(args.data.split(",")):
        wrong(f"--data={args.data}: an empty name")
    if args.few_shot < 0 or args.examples and not args.few_shot:
        wrong(f"--few_shot={args.few_shot}: it must be at least 0, and at least 1 with --examples")
    if args.limit is not None and args.limit < 1:
        wrong(f"--limit={args.limit} is less than 1")
    return args


def few_shot(args, name, problems):
    """The first --few_shot problems with a solution, of --examples or of the train split of the set, none of which is asked."""
    if not args.few_shot:
        return []
    if not args.examples and name not in NAMES:
        raise ValueError(f"--few_shot={args.few_shot}: {name} is a file; say with --examples=FILE where the solved examples are")
    asked, source = {p.question for p in problems}, args.examples or name
    found = [p for p in load_problems(source, split="train") if p.solution and p.question not in asked][:args.few_shot]
    if len(found) < args.few_shot:
        raise ValueError(f"--few_shot={args.few_shot}: {source} has only {len(found)} problems with a solution that are not asked in {name}")
    return found


def run(args, rank, world_size, device):
    """Samples what is not in the file yet, writes it there as it comes, and prints the tables."""
    plan = {}                                                                       # name -> (n, ks)
    for name in args.data.split(","):
        n = args.n if args.n is not None else PAPER_N.get(benchmark(name), 32) if args.preset else 8
        plan[name] = n, check_ks(n, args.k or [2**e for e in range(n.bit_length())] + [n])
    sets = {name: load_problems(name, split=args.split)[:args.limit] for name in plan}
    shots = {name: few_shot(args, name, problems) for name, problems in sets.items()}
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    model = GPT.from_pretrained(args.model, adapter=args.adapter, dtype=getattr(torch, dtype), device=device)
    tokenizer = Tokenizer.from_pretrained(args.model)
    if args.max_new_tokens is None:
        args.max_new_tokens = min(1500, model.config.max_position_embeddings // 2)

    settings = {"weights": fingerprint(model), "dtype": dtype}
    for key in ("split", "temperature", "top_p", "max_new_tokens", "max_prompt_tokens", "system_prompt", "prompt_style", "seed"):
        settings[key] = getattr(args, key)
    if args.few_shot:
        settings.update(few_shot=args.few_shot, examples=args.examples)
    settings["data"] = {}
    for name, problems in sets.items():
        first = build_prompt(tokenizer, "1+1?", args.system_prompt, args.prompt_style, shots[name])   # tells tokenizers, templates, examples apart
        digest = hashlib.sha256(json.dumps([first, [[p.question, p.answer] for p in problems]]).encode()).hexdigest()[:16]
        settings["data"][name] = {"n": plan[name][0], "problems": len(problems), "hash": digest}
    header = {"model": args.model, "adapter": args.adapter, "shape": [model.config.raw.get(key) for key in SHAPE],
              "k": {name: ks for name, (n, ks) in plan.items()}, "settings": settings}
    label = "-".join(os.path.abspath(args.model).split(os.sep)[-2:])
    path = args.out or os.path.join("out", "eval", f"{label}-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]}.jsonl")

    if rank == 0:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        for old in [path] + glob.glob(glob.escape(path) + ".rank*") if args.overwrite else ():
            if os.path.exists(old):
                os.remove(old)
        merge(path, header)
    if world_size > 1:
        dist.barrier()
    earlier = read_results(path)[1]
    if rank == 0:
        print(f"{args.model}: temperature {args.temperature:g}, top_p {args.top_p:g}, up to {args.max_new_tokens} new tokens, {dtype} on "
              f"{device}; completions go to {path}" + (f", which has {len(earlier)} already" if earlier else ""), flush=True)
    sampled = seconds = 0
    with open(path if rank == 0 else f"{path}.rank{rank}", "a" if rank == 0 else "w", encoding="utf-8") as f:
        if rank > 0:
            f.write(json.dumps(header) + "\n")
        for name, (n, ks) in plan.items():
            def write(rows):
                f.write("".join(json.dumps({"data": name, **row}) + "\n" for row in rows))
                f.flush()
            result = evaluate(model, tokenizer, sets[name], n, ks, args.max_new_tokens, args.temperature, args.top_p, args.system_prompt,
                              args.prompt_style, args.max_prompt_tokens, args.seed, args.batch_prompts, rank, world_size, on_rows=write,
                              earlier=[row for row in earlier if row["data"] == name], examples=shots[name])
            sampled, seconds = sampled + result["sampled_tokens"], seconds + result["seconds"]
    if world_size > 1:
        dist.barrier()                                                              # the other processes' files are closed
    if rank == 0:
        merge(path, header)
        rows = read_results(path)[1]
        for name, (n, ks) in plan.items():
            print_table(name, [row for row in rows if row["data"] == name], header, ks)
        print(f"\n{sampled} tokens in {seconds:.1f} s, {sampled / max(seconds, 1e-9):.0f} tokens/s; {peak_memory(device)}; see {path}")


def peak_memory(device):
    """The most memory this process has held: of the GPU, or on a CPU all of it."""
    if device.type == "cuda":
        return f"peak GPU memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
    unit = 1 if sys.platform == "darwin" else 1024                                  # ru_maxrss is in bytes there, else in KiB
    return f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB"


def main(argv=None):
    """The command line. Returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = parse(argv)
        if args.rescore:
            rescore(args.rescore, args.k)
            return 0
        try:
            device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as e:
            raise ValueError(f"--device={args.device}: {str(e).splitlines()[0]}") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device={args.device}, but torch sees no CUDA device; take --device=cpu")
        if world_size > 1:
            if device.type == "cuda":
                if device.index is not None:
                    raise ValueError(f"--device={args.device}: under torchrun each process takes a GPU of its own; write --device=cuda")
                device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=24))   # shares may end hours apart
        run(args, rank, world_size, device)
        return 0
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as e:
        print(f"error: {str(e).splitlines()[0]} Lower --batch_prompts; the same command goes on from here", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        if world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
