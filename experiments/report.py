"""
The results of compare.py as Markdown tables: means over the seeds with 95% intervals, and differences to GRPO.

    python experiments/report.py                    # of experiments/results.jsonl
    python experiments/report.py FILE.jsonl

Mean ± half of the interval, mean ± t s / sqrt(n): s with n - 1, t of Student's distribution with n - 1 degrees of freedom. A difference is
that of two runs of one seed, which share the start, the prompts and the random numbers; bold: its interval does not hold 0. With some dozens
of differences in a table, one in twenty is bold by chance.
"""
import json
import math
import os
import statistics
import sys

FIGURES = {                                                                         # field of a result: title, factor, decimals
    "accuracy": ("accuracy, %", 100, 1), "format": ("format, %", 100, 1), "format_logp": ("log p of the tags", 1, 3),
    "format_worst": ("format at worst, %", 100, 1), "entropy_end": ("entropy at the end", 1, 3), "entropy_worst": ("entropy at worst", 1, 3),
    "protected": ("conflict tokens, %", 100, 1), "filtered": ("filtered, %", 100, 1), "seconds": ("seconds", 1, 0),
}
BASELINE = "grpo"


def t_quantile(df):
    """The t with P(|T| < t) = 0.95 for Student's T with df = 1, 2, ... degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    def inside(t):
        angle, total, term = math.atan(t / math.sqrt(df)), 0.0, 1.0
        for j in range(df // 2):                                                    # terms cos^(2j + odd)
            total += term * math.cos(angle) ** (2 * j + df % 2)
            term *= (2 * j + 1 + df % 2) / (2 * j + 2 + df % 2)
        return (angle + math.sin(angle) * total) * 2 / math.pi if df % 2 else math.sin(angle) * total

    low, high = 0.0, 20.0                                                           # 12.7 for df = 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 0.95 else (low, middle)
    return high


def interval(values):
    """(mean, half of the 95% interval) of a list of numbers; the half is NaN for a single one."""
    n = len(values)
    return statistics.fmean(values), t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan


def cell(values, factor, digits, mark=False):
    """Mean ± half of the interval as text, times factor. mark: with a sign, and bold if 0 is outside."""
    if not values:
        return "-"
    mean, half = interval([v * factor for v in values])
    text = f"{mean:+.{digits}f}" if mark else f"{mean:.{digits}f}"
    text += "" if math.isnan(half) else f" ± {half:.{digits}f}"
    return f"**{text}**" if mark and abs(mean) > half else text


def table(head, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def read(path):
    """{(algorithm, learning rate): {seed: result}}, SFT first. ValueError: no such file, a broken line, no rows."""
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file; python experiments/compare.py makes it")
    with open(path, encoding="utf-8") as f:
        lines = [line for line in f if line.endswith("\n")]                         # a line that is being written is not there yet
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["algorithm"], rows[-1]["learning_rate"], rows[-1]["seed"], rows[-1]["settings"]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path}:{number}: not a line of results ({e!r}); mend or remove it") from None
    if not rows:
        raise ValueError(f"{path}: holds no results yet")
    found = {}
    for row in sorted(rows, key=lambda row: (row["learning_rate"] or 0, row["algorithm"])):
        found.setdefault((row["algorithm"], row["learning_rate"]), {})[row["seed"]] = row
    return found


def report(found):
    """The Markdown text of what read() gives."""
    text, start = [], found.get(("sft", None), {})
    first = next(iter(next(iter(found.values())).values()))
    text.append("Settings: " + ", ".join(f"{k} {v}" for k, v in first["settings"].items()) + ".\n")
    ks = sorted({int(k[5:]) for seeds in found.values() for row in seeds.values() for k in row if k.startswith("pass@")})
    curve = {f"{kind}@{k}": (f"{kind}@{k}, %", 100, 1) for kind in ("pass", "maj") for k in ks if (kind, k) != ("maj", 1)}

    def values(runs, field):
        return [row[field] for row in runs.values() if row.get(field) is not None]

    for rate in sorted({rate for _, rate in found if rate}):
        runs = {name: found[name, r] for name, r in found if r == rate}
        counts = sorted({len(seeds) for seeds in runs.values()})
        text.append(f"## Learning rate {rate:g}\n\nSeeds of each: {' or '.join(map(str, counts))}.\n")
        for figures in (FIGURES, curve):
            lines = [[name, *(cell(values(seeds, field), *how) for field, (_, *how) in figures.items())]
                     for name, seeds in [("start (SFT)", start), *runs.items()]]
            text.append(table(["algorithm", *(title for title, *_ in figures.values())], lines))
        if BASELINE in runs:
            shown = {k: v for k, v in FIGURES.items() if k not in ("protected", "filtered", "seconds")}
            shown |= {k: v for k, v in curve.items() if k.endswith(("s@1", f"@{ks[-1]}"))}
            lines = []
            for name, seeds in runs.items():
                both = seeds.keys() & runs[BASELINE].keys()
                if name != BASELINE and both:
                    lines.append([name, *(cell([seeds[s][field] - runs[BASELINE][s][field] for s in sorted(both)], *how, mark=True)
                                          for field, (_, *how) in shown.items())])
            if lines:
                text.append(f"Difference to {BASELINE}, seed by seed:\n\n" + table(["algorithm", *(title for title, *_ in shown.values())], lines))
    collapsed = [f"{name} at {rate:g} in {n} of {len(seeds)}" for (name, rate), seeds in found.items()
                 if rate and (n := sum(row["entropy_worst"] > math.log(2) for row in seeds.values()))]
    text.append(f"Runs in which the mean entropy of some step was above ln 2: {'; '.join(collapsed) or 'none'}.\n")
    return "\n".join(text)


def main(argv):
    """The command line. Returns the exit code: 0, 2 for bad usage and bad input."""
    if "-h" in argv or "--help" in argv:
        print(__doc__.strip())
        return 0
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        print("error: usage: python experiments/report.py [FILE.jsonl]", file=sys.stderr)
        return 2
    try:
        print(report(read(argv[0] if argv else os.path.join(os.path.dirname(os.path.abspath(__file__)), "results.jsonl"))))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
