"""
pass@k and maj@k: n completions of each problem are sampled, graded, written to a JSONL file, and
summed up in one table a data set.

    python eval.py --model=out/arithmetic/model --data=arithmetic --n=8 --limit=50
    python eval.py --model=models/Qwen2.5-3B-Instruct --data=gsm8k,my.jsonl --n=64 --k=1,8,64
    torchrun --nproc_per_node=8 eval.py --model=models/Qwen2.5-3B-Instruct --preset=paper
    python eval.py --rescore=FILE.jsonl     # grades the completions of an earlier run again

The same command goes on where a killed one was, also with another number of processes: the random
numbers for problem i come from (seed, i) alone, so what is sampled depends neither on them nor on
the batch size (but for rounding in the model). docs/evaluation.md explains the figures. A right
answer counts in any format, unlike in the training reward.
"""
import hashlib
import itertools
import json
import math
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta

import numpy as np
import torch
from tqdm import tqdm

from data import (SYSTEM_PROMPT, build_prompt, check_fields, encode_prompts, is_plain,
                  load_problems, to_stderr)
from lib.chat import check_variables
from lib.config import check_ranges, help_text, read_config
from lib.draws import seeded_uniforms
from lib.files import lock_file, read_jsonl, write_whole
from lib.hf import weights_hash
from lib.run import Processes, command, compile_where_it_pays, end, forward_dtype, peak_memory
from model import GPT
from rewards import answers_equal, extract_answer, format_reward
from sample import completion_texts, plain_stop, sample
from tokenizer import Tokenizer

# n and the largest k in the paper (arXiv 2508.03772)
PAPER_N = {"gsm8k": 32, "math": 32, "aime24": 64, "aime25": 64, "amc23": 64}
# its pass@k in percent for Qwen2.5-3B-Instruct trained on MATH: a model that still has that shape
PUBLISHED_SHAPE = ["qwen2", 2048, 36]
PUBLISHED = {
    "amc23": {"GTPO": {1: 40.0, 8: 75.0, 64: 85.0}, "GRPO": {1: 30.0, 8: 67.5, 64: 87.5}},
    "aime24": {"GTPO": {64: 30.0}, "GRPO": {64: 16.7}},
}
SHARES = ["format", "truncated", "unreadable", "tokens"]

# ---- the estimators ------------------------------------------------------------------------------

def pass_at_k(n, c, k):
    """Chance that at least one of k completions is right, when k are drawn without replacement
    from n of which c are right: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1), for any n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right in {n} completions cannot be estimated: "
                         "0 <= c <= n and 1 <= k <= n are needed")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def maj_at_k(answers, gold, k):
    """1.0 if the majority of the first k answers equals gold, else 0.0. None (no readable answer)
    casts no vote, equal answers written differently vote together, a tie goes to the answer seen
    first."""
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} answers: k must be from 1 to their number")
    first, votes = {}, []  # {a spelling: the spelling of that answer which came first}
    for answer in answers[:k]:
        text = (answer or "").strip()
        if text and text not in first:
            first[text] = next((first[old] for old in first if answers_equal(text, old)), text)
        if text:
            votes.append(first[text])
    return float(bool(votes) and answers_equal(statistics.mode(votes), gold))


# ---- from rows, one dict a completion, to figures ------------------------------------------------

def verdict(completion, gold):
    """The graded fields of a row: the extracted answer or None, is it right, is the format."""
    answer = extract_answer(completion)
    return {"answer": answer, "correct": answer is not None and answers_equal(answer, gold),
            "formatted": format_reward(completion) >= 10}


def row_of(problem, index, sample, prompt, completion, tokens, finish):
    """The row of one graded completion of problem `index`. prompt: as the model read it, or None;
    tokens: how many it has; finish: "stop", "length" (cut off) or "skipped" (prompt too long)."""
    return {"index": index, "sample": sample, "question": problem.question, "gold": problem.answer,
            "level": problem.level, "subject": problem.subject, "prompt": prompt,
            "completion": completion, **verdict(completion, problem.answer), "tokens": tokens,
            "finish": finish}


def problem_figures(rows, ks):
    """{figure: value} of one problem from all its rows; a skipped one has no SHARES."""
    if rows[0]["finish"] == "skipped":
        return {f"{kind}@{k}": 0.0 for kind in ("pass", "maj") for k in ks}
    n, right = len(rows), sum(row["correct"] for row in rows)
    answers, gold = [row["answer"] for row in rows], rows[0]["gold"]
    return {**{f"pass@{k}": pass_at_k(n, right, k) for k in ks},
            **{f"maj@{k}": maj_at_k(answers, gold, k) for k in ks},
            "format": sum(row["formatted"] for row in rows) / n,
            "truncated": sum(row["finish"] == "length" for row in rows) / n,
            "unreadable": answers.count(None) / n, "tokens": sum(row["tokens"] for row in rows) / n}


def mean(problems, name):
    """The mean of a figure over the problems that have it; nan if none has."""
    values = [figures[name] for figures in problems if name in figures]
    return float(np.mean(values)) if values else math.nan


# ---- sampling ------------------------------------------------------------------------------------

def sample_problems(model, tokenizer, problems, processes, c, done=()):
    """Yields the rows of one problem after the other, but for those whose index is in `done`: c.n
    rows (c: an EvalConfig), or a single one when the prompt is too long. Of several processes each
    samples its share of every batch and is given the rows of all."""
    n, prompts = c.n, {}  # of those to sample, {index: ids}
    room = min(c.max_prompt_tokens, model.config.max_position_embeddings - c.max_new_tokens)
    for i, problem in enumerate(problems):
        if i not in done:
            fits, _ = encode_prompts(tokenizer, [problem], room, c.system_prompt, c.prompt_style,
                                     c.template_variables)
            if fits:
                prompts[i] = fits[0][1]
            else:
                yield [row_of(problem, i, 0, None, "", 0, "skipped")]

    plain = is_plain(tokenizer, c.prompt_style)
    stop = plain_stop(tokenizer) if plain else None
    order = sorted(prompts, key=lambda i: -len(prompts[i]))  # alike lengths side by side
    size = (c.batch_prompts or max(1, 128 // n)) * processes.size
    for at in tqdm(range(0, len(order), size), "evaluate", leave=False,
                   disable=not processes.main or None):
        groups, mine = [], order[at:at + size][processes.rank::processes.size]
        if mine:
            ids = [prompts[i] for i in mine]
            noise = [seeded_uniforms(("eval", c.seed, i), n, c.max_new_tokens) for i in mine]
            out = sample(model, ids, n, c.max_new_tokens, temperature=c.temperature, top_p=c.top_p,
                         eos_ids=tokenizer.eos_ids, noise=torch.stack(noise), stop=stop)
            texts = completion_texts(tokenizer, out, ids, plain)
            lengths, ended = out.mask.sum(-1).tolist(), out.finished.tolist()
            groups = [[row_of(problems[i], i, j, tokenizer.decode(ids[p]), texts[p][j],
                              lengths[p][j], "stop" if ended[p][j] else "length")
                       for j in range(n)] for p, i in enumerate(mine)]
        yield from itertools.chain(*processes.gather(groups))


def evaluate(model, tokenizer, problems, processes, c, after_each=lambda: None):
    """Samples completions of each problem as the EvalConfig c says and returns their figures:
    problems and skipped (counts), pass@K and maj@K for each K of c.k, SHARES, seconds.
    after_each() is called after each problem, by all processes. The model's mode and all global
    random states stay as they were."""
    start, training, ks = time.time(), model.training, ks_of(c.k, c.n)
    found = {}  # {index: figures of that problem}
    model.eval()
    try:
        for rows in sample_problems(model, tokenizer, problems, processes, c):
            found[rows[0]["index"]] = problem_figures(rows, ks)
            after_each()
    finally:
        model.train(training)
    figures = [found[i] for i in sorted(found)]  # added up in one order, whoever sampled
    names = [f"{kind}@{k}" for kind in ("pass", "maj") for k in ks] + SHARES
    return {"problems": len(figures), "skipped": sum("tokens" not in one for one in figures),
            **{name: mean(figures, name) for name in names}, "seconds": time.time() - start}


# ---- the results file: a header line with the settings, then one row a line ----------------------

# what we read of a row
ROW = {"data": str, "index": int, "sample": int, "gold": str, "level": int | None,
       "subject": str | None, "completion": str, "answer": str | None, "correct": bool,
       "formatted": bool, "tokens": int, "finish": str}


def read_results(path):
    """(header, {data set: {index: rows of that problem}}) of a results file, in order, with the
    problems of which all completions are there. What a kill has cut off is dropped; ValueError
    names any other line that is not ours."""
    header, *rows = read_jsonl(path) or [{}]
    try:
        sets = header["settings"]["data"]
        n = {name: spec["n"] for name, spec in sets.items()}
        counts = [*n.values(), *(spec["problems"] for spec in sets.values())]
        ours = all(isinstance(count, int) for count in counts)
    except (KeyError, TypeError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"{path}:1: not the settings of an evaluation; take another file")
    found = {name: {} for name in sorted(n)}
    for number, row in enumerate(rows, 2):
        ours = all(name in row and isinstance(row[name], kind) for name, kind in ROW.items())
        if not ours or row["data"] not in n:
            raise ValueError(f"{path}:{number}: not a completion of {', '.join(n)}; mend or "
                             "remove the line, or take another file")
        of_problem = found[row["data"]].setdefault(row["index"], [])
        of_problem.append(row)
        if len(of_problem) > n[row["data"]]:
            raise ValueError(f"{path}:{number}: one completion of problem {row['index']} too many; "
                             "is it there twice? Remove the lines that are")
    return header, {name: {index: rows for index, rows in sorted(groups.items())
                           if len(rows) == n[name] or rows[0]["finish"] == "skipped"}
                    for name, groups in found.items()}


def rows_in(found):
    """All rows of what read_results found: {data set: {index: rows of that problem}}."""
    return [row for groups in found.values() for rows in groups.values() for row in rows]


def tidy(path, header):
    """Writes the results file anew, in order and without what a kill has cut off, and returns its
    {data set: {index: rows}}. ValueError if it has other settings than header."""
    nothing = {name: {} for name in header["settings"]["data"]}
    old, found = read_results(path) if os.path.exists(path) else (header, nothing)
    now, then = header["settings"], old["settings"]
    differ = [f"{key} is {then.get(key)!r} there, {now[key]!r} now"
              for key in now if then.get(key) != now[key]]
    if differ:
        raise ValueError(f"{path} has other settings: {'; '.join(differ)}. Delete it, or take "
                         "another --out")
    lines = [header, *rows_in(found)]
    write_whole(path, lambda f: f.writelines(json.dumps(line) + "\n" for line in lines))
    return found


# ---- the table -----------------------------------------------------------------------------------

def print_line(first, cells):
    print(f"  {first:<23}" + "".join(f"{cell:<21}" for cell in cells).rstrip())


def figure(problems, name):
    """Mean and 95 % interval as text, in percent, but for the tokens. The interval: percentiles of
    the means of 1000 resamples of the problems."""
    values = np.array([figures[name] for figures in problems if name in figures])  # (problems,)
    picks = np.random.default_rng(0).integers(values.size, size=(1000, values.size))
    low, high = np.percentile(values[picks].mean(1), (2.5, 97.5))
    unit = 1 if name == "tokens" else 100
    return f"{values.mean() * unit:.1f} [{low * unit:.1f}, {high * unit:.1f}]"


def print_tables(header, found, k):
    """The figures of each data set, of the problems found: {data set: {index: rows}}. k: as in
    --k"""
    for name, spec in header["settings"]["data"].items():
        groups = list(found[name].values())
        print(f"\n{name}: {len(groups)} of {spec['problems']} problems, {spec['n']} completions "
              "each; percent, 95 % bootstrap interval over problems")
        if groups:
            print_table(name, header, groups, ks_of(k, spec["n"]))


def print_table(name, header, groups, ks):
    """groups: the rows of each problem."""
    problems = [problem_figures(rows, ks) for rows in groups]
    print_line("", [f"k={k}" for k in ks])
    print_line("pass@k", [figure(problems, f"pass@{k}") for k in ks])
    if header.get("shape") == PUBLISHED_SHAPE:
        for method, known in PUBLISHED.get(name, {}).items():
            print_line(f"paper, {method}", [known.get(k, "-") for k in ks])
    print_line("maj@k", [figure(problems, f"maj@{k}") for k in ks])

    skipped = sum("tokens" not in figures for figures in problems)
    if skipped:
        print(f"  problems skipped: {skipped}, their prompt is too long; they count as wrong")
    if skipped < len(problems):
        print_line("", SHARES)
        print_line("completions", [figure(problems, share) for share in SHARES])
    if mean(problems, "truncated") > 0.5:
        print("  more than half of the completions were cut off: raise --max_new_tokens")
    shown = [f"pass@{ks[0]}", f"pass@{ks[-1]}", f"maj@{ks[-1]}"]
    for kind in ("level", "subject"):
        values = [rows[0].get(kind) for rows in groups]
        if len(set(values)) > 1:
            print_line(kind, ["problems", *shown])
            for value in sorted(set(values) - {None}):
                own = [figures for figures, its in zip(problems, values) if its == value]
                print_line(str(value)[:22], [len(own), *(figure(own, name) for name in shown)])


def rescore(path, k):
    """Grades the rows of a results file again; prints each verdict that changes, and the tables.
    Nothing is written."""
    header, found = read_results(path)
    rows, word = rows_in(found), {True: "right", False: "wrong"}
    for row in rows:
        answer, correct = row["answer"], row["correct"]
        row.update(verdict(row["completion"], row["gold"]))
        if row["correct"] != correct:
            print(f"{row['data']} problem {row['index']} sample {row['sample']}: "
                  f"{answer!r:.50} was {word[correct]}, {row['answer']!r:.50} is "
                  f"{word[row['correct']]}, gold {row['gold']!r:.50}")
    print(f"{path}: {len(rows)} rows graded again")
    print_tables(header, found, k)


# ---- the command ---------------------------------------------------------------------------------

@dataclass
class EvalConfig:
    # settings, as flags or in a TOML file that is given first
    model: str = ""  # model folder: config.json, weights, tokenizer files
    adapter: str = ""  # folder of a LoRA adapter for it
    data: str = ""  # problem sets, names or paths, separated by commas
    question_field: str = ""  # name of the question in the rows of a file; empty: found
    answer_field: str = ""  # name of the answer in the rows of a file; empty: found
    preset: str = ""  # paper: its five sets unless data is given, n 32, on AIME and AMC 64
    n: int = 0  # completions a problem, 0: 8; torchrun takes --n for its own, write --samples there
    k: str = ""  # for pass@k and maj@k, such as 1,8,64; empty: powers of two up to n, and n
    limit: int = 0  # only the first problems of each set; 0: all
    temperature: float = 1.0  # 0 is greedy, with n=1
    top_p: float = 1.0  # 1: the whole distribution
    max_new_tokens: int = 0  # longest completion; 0: 1500, or half of a smaller model's window
    max_prompt_tokens: int = 4000  # a longer prompt is skipped, which counts as wrong
    system_prompt: str = "default"  # default: that of data.py, as in training; empty: none
    prompt_style: str = "auto"  # chat (the tokenizer's template), plain; auto: chat if there is one
    template_variables: dict = field(default_factory=dict)  # for the chat template
    seed: int = 0  # of the random numbers
    batch_prompts: int = 0  # prompts sampled at a time by a process; 0: 128 / n
    device: str = "auto"  # cpu, cuda; auto: cuda if there is one
    dtype: str = "auto"  # of the weights: float32, bfloat16, float16; auto: bfloat16 on such a GPU
    compile: str = "auto"  # torch.compile: yes, no; auto: on a GPU that can, for a large model
    out: str = ""  # file for the completions; empty: out/eval/MODEL-HASH.jsonl, of the settings
    rescore: str = ""  # a file whose completions are graded again; nothing is sampled or written


CHOICES = {"preset": ("", "paper"), "prompt_style": ("auto", "chat", "plain"),
           "device": ("auto", "cpu", "cuda"), "dtype": ("auto", "float32", "bfloat16", "float16"),
           "compile": ("auto", "yes", "no")}
RANGES = {"top_p": "> 0 and <= 1", "max_prompt_tokens": ">= 1"}  # all other numbers are >= 0
GONE = {"few_shot": "write solved examples into --system_prompt",
        "examples": "write solved examples into --system_prompt",
        "split": "give a file as --data, such as data/gsm8k/train.jsonl",
        "overwrite": "delete the file, or take another --out"}
# what decides about the completions, beside model and problems
SAMPLING = ("temperature", "top_p", "max_new_tokens", "max_prompt_tokens", "system_prompt",
            "prompt_style", "template_variables", "seed")


def parse(argv):
    """The settings of a command line. ValueError for wrong usage."""
    c, _ = read_config(EvalConfig, argv, gone=GONE, aliases={"samples": "n={}"},
                       bare={"compile": "yes"})
    check_ranges(c, CHOICES, RANGES)
    check_variables(c.template_variables)
    c.data = c.data or (",".join(PAPER_N) if c.preset else "")
    if not c.rescore and not (c.model and all(c.data.split(","))):
        raise ValueError("give --model and --data=NAME,NAME (or --preset=paper), or --rescore")
    if c.data:
        check_fields(c.question_field, c.answer_field, c.data.split(","))
    if c.temperature == 0 and c.n != 1:
        raise ValueError("temperature 0 gives the same completion every time: add --n=1")
    if c.system_prompt == "default":
        c.system_prompt = SYSTEM_PROMPT
    return c


def ks_of(text, n):
    """The ks of a table, in order: of --k such as 1,8,64, else powers of two up to n, and n."""
    if not text:
        return sorted({2**e for e in range(n.bit_length())} | {n})
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--k={text}: not a list of whole numbers such as 1,8,64") from None
    if not 1 <= ks[0] <= ks[-1] <= n:
        raise ValueError(f"--k={text}: with n={n} each must be from 1 to {n}")
    return ks


def digest(*content):
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def prepare(c, device):
    """(model, tokenizer, {name: problems}, header of the results file). Evaluations with the same
    header["settings"] sample the same."""
    names = c.data.split(",")
    sets = {name: load_problems(name, "test", c.question_field, c.answer_field, strict=True)
            for name in names}
    data = {name: {"n": c.n or (PAPER_N.get(name, 32) if c.preset else 8)} for name in names}
    for spec in data.values():
        ks_of(c.k, spec["n"])  # a wrong k is better refused now than when all is sampled
    dtype = forward_dtype(c.dtype, device)
    model = GPT.from_pretrained(c.model, adapter=c.adapter or None, dtype=dtype, device=device)
    tokenizer = Tokenizer.from_pretrained(c.model, adapter=c.adapter or None)
    config, window = model.config.raw, model.config.max_position_embeddings
    c.max_new_tokens = c.max_new_tokens or min(1500, window // 2)
    if c.max_new_tokens >= window:
        raise ValueError(f"max_new_tokens={c.max_new_tokens} leaves no room for a prompt in the "
                         f"model's {window} tokens")

    # one prompt tells tokenizers and templates apart
    prompt = build_prompt(tokenizer, "1+1?", c.system_prompt, c.prompt_style, c.template_variables)
    for name in names:
        sets[name] = sets[name][:c.limit or None]
        texts = [[p.question, p.answer, p.messages] for p in sets[name]]
        data[name] |= {"problems": len(texts), "hash": digest(prompt, texts)}
    settings = {"weights": digest(config, weights_hash(model.parameters())),
                "dtype": str(dtype).removeprefix("torch."),
                **{name: getattr(c, name) for name in SAMPLING}, "data": data}
    shape = [config.get(name) for name in ("model_type", "hidden_size", "num_hidden_layers")]
    header = {"model": c.model, "adapter": c.adapter, "shape": shape, "settings": settings}
    return model.eval(), tokenizer, sets, header


def run(c, processes):
    """Samples what is not in the file yet, writes it there as it comes, and prints the tables."""
    main, device, done = processes.main, processes.device, {}
    model, tokenizer, sets, header = processes.agree(
        lambda: prepare(c, device), lambda prepared: {"settings": digest(prepared[-1]["settings"])})
    settings = header["settings"]
    label = "-".join(os.path.abspath(c.model).split(os.sep)[-2:])
    path = c.out or f"out/eval/{label}-{digest(settings)[:8]}.jsonl"
    if main:
        lock = lock_file(f"{path}.lock", path, "another file with --out=FILE")
        done = {name: set(groups) for name, groups in tidy(path, header).items()}
        if tokenizer.of_adapter:
            print(f"tokenizer and chat template: those of {c.adapter}")
        print(f"{c.model}: up to {c.max_new_tokens} new tokens, {settings['dtype']} on {device}; "
              f"completions go to {path}, which has those of "
              f"{sum(map(len, done.values()))} problems", flush=True)
    compile_where_it_pays(model, c.compile, to_stderr if main else lambda line: None)
    # The first process alone reads and writes the file; the others hear from it what is done.
    done = processes.gather(done)[0]

    start, tokens = time.time(), 0
    with open(path if main else os.devnull, "a") as f:
        for name, problems in sets.items():
            own = replace(c, n=settings["data"][name]["n"])
            for rows in sample_problems(model, tokenizer, problems, processes, own, done[name]):
                f.writelines(json.dumps({"data": name, **row}) + "\n" for row in rows)
                f.flush()
                tokens += sum(row["tokens"] for row in rows)
    seconds = time.time() - start
    processes.close()
    if main:
        found = tidy(path, header)
        lock.close()
        print_tables(header, found, c.k)
        print(f"\n{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s; peak memory "
              f"{peak_memory(device):.0f} MiB; see {path}")
        lost = sum(len(problems) - len(found[name]) for name, problems in sets.items())
        if lost:
            raise ValueError(f"{path} has lost the completions of {lost} problems: something else "
                             "wrote to it. Run the same command again")


def main(argv):
    """The command line; lib.run.command makes exit codes of what it raises."""
    if "--help" in argv or "-h" in argv:
        print(help_text(EvalConfig, __doc__))
        return
    c = parse(argv)
    if c.rescore:
        rescore(c.rescore, c.k)
    else:
        run(c, Processes(c.device, timedelta(hours=24)))  # a batch may be long on a CPU


if __name__ == "__main__":
    end(command(main))
