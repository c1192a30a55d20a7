"""
The results of compare.py as Markdown tables: means over the seeds with 95% intervals, and
differences to GRPO.

    python -m experiments.report                # of experiments/results.jsonl
    python -m experiments.report FILE.jsonl

Mean ± half of the interval, t s / sqrt(n): s with n - 1, t of Student's distribution with n - 1
degrees of freedom. A difference is that of two runs of one seed, which share the start, the
prompts and the random numbers; bold: its interval does not hold 0. With some dozens of
differences in a table, one in twenty is bold by chance.
"""
import math
import os
import statistics
import sys

from lib.files import read_jsonl
from lib.run import command

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results.jsonl")
# P(|T| < t) = 0.95 for 1, 2, ... degrees of freedom; the last serves for more, a little wide
T = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)
FIGURES = {                                     # field of a result: title, factor, decimals
    "accuracy": ("accuracy, %", 100, 1), "format": ("format, %", 100, 1),
    "format_logp": ("log p of the tags", 1, 3), "reward_end": ("reward at the end", 1, 2),
    "format_worst": ("format at worst, %", 100, 1),
    "entropy_end": ("entropy at the end", 1, 3), "entropy_worst": ("entropy at worst", 1, 3),
    "protected": ("conflict tokens, %", 100, 1), "filtered": ("filtered, %", 100, 1),
    "mismatch": ("mismatch", 1, 4), "seconds": ("seconds", 1, 0)}
NOT_COMPARED = ("protected", "filtered", "mismatch", "seconds")
BASELINE = "grpo"


def interval(values):
    """(mean, half of the 95% interval) of a list of numbers; the half is NaN for a single one."""
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return mean, math.nan
    return mean, T[min(n - 2, len(T) - 1)] * statistics.stdev(values) / math.sqrt(n)


def cell(values, factor, digits, mark=False):
    """Mean ± half of the interval as text, times factor. mark: with a sign, and bold if 0 is
    outside."""
    if not values:
        return "-"
    mean, half = interval([v * factor for v in values])
    text = f"{mean:{'+' if mark else ''}.{digits}f}"
    text += "" if math.isnan(half) else f" ± {half:.{digits}f}"
    return f"**{text}**" if mark and abs(mean) > half else text


def table(figures, runs, base=None):
    """Markdown, a row for each algorithm of {name: {seed: result}}; with the runs of a baseline,
    {seed: result}, of the differences to it, seed by seed."""
    lines = [["algorithm", *(title for title, *_ in figures.values())],
             ["---"] * (1 + len(figures))]
    for name, seeds in runs.items():
        lines.append([name])
        for field, (_, *how) in figures.items():
            values = {seed: row[field] for seed, row in seeds.items() if field in row}
            if base:
                values = {s: v - base[s][field] for s, v in values.items() if s in base}
            lines[-1].append(cell(list(values.values()), *how, mark=bool(base)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def report(rows):
    """The Markdown text of some results."""
    found = {}                                  # {learning rate: {algorithm: {seed: result}}}
    for row in sorted(rows, key=lambda row: (row["learning_rate"] or 0, row["algorithm"])):
        algorithms = found.setdefault(row["learning_rate"], {})
        algorithms.setdefault(row["algorithm"], {})[row["seed"]] = row
    start = found.pop(None, {}).get("sft", {})
    text = ["Settings: " + ", ".join(f"{k} {v}" for k, v in rows[0]["settings"].items()) + ".\n"]
    ks = sorted({int(k[5:]) for row in rows for k in row if k.startswith("pass@")})
    curve = {f"{kind}@{k}": (f"{kind}@{k}, %", 100, 1)
             for kind in ("pass", "maj") for k in ks if (kind, k) != ("maj", 1)}
    figures = {k: how for k, how in FIGURES.items() if any(k in row for row in rows)}
    compared = {k: how for k, how in figures.items() if k not in NOT_COMPARED}
    compared |= {k: how for k, how in curve.items() if k.endswith(("s@1", f"@{ks[-1]}"))}
    collapsed = []
    for rate, runs in found.items():
        counts = sorted({len(seeds) for seeds in runs.values()})
        shown = {"start (SFT)": start, **runs}
        text += [f"## Learning rate {rate:g}\n",
                 f"Seeds of each: {' or '.join(map(str, counts))}.\n",
                 table(figures, shown), table(curve, shown)]
        base = runs.get(BASELINE, {})
        others = {name: seeds for name, seeds in runs.items()
                  if name != BASELINE and seeds.keys() & base.keys()}
        if others:
            text += [f"Difference to {BASELINE}, seed by seed:\n", table(compared, others, base)]
        for name, seeds in runs.items():
            n = sum(row.get("entropy_worst", 0) > math.log(2) for row in seeds.values())
            collapsed += [f"{name} at {rate:g} in {n} of {len(seeds)}"] if n else []
    text.append("Runs in which the mean entropy of some step was above ln 2: "
                f"{'; '.join(collapsed) or 'none'}.\n")
    return "\n".join(text)


def main(argv):
    """The command line. ValueError, OSError: what is wrong with the results."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return
    path = argv[0] if argv else RESULTS
    needs = ("algorithm", "learning_rate", "seed", "settings")
    rows = read_jsonl(path, needs) if os.path.exists(path) else []
    if not rows:
        raise ValueError(f"{path}: holds no results yet; python -m experiments.compare makes them")
    print(report(rows))


if __name__ == "__main__":
    sys.exit(command(main))
