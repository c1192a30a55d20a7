"""
Pictures of runs: what train.py logged at each step (metrics.jsonl), and the pass@k and maj@k curves of eval.py's files.

    python plot.py out/gtpo out/grpo                                                   # writes out/plot.png
    python plot.py out/gtpo-s0 out/gtpo-s1 out/grpo-s0 out/grpo-s1 --out=compare.png   # two lines, each with the band of two seeds
    python plot.py out/gtpo out/eval/Qwen2.5-3B-Instruct-0123abcd.jsonl                # beside a run, a file of eval.py

Names that differ only in a last -s0, -s1, ... are seeds of one setting: a line is their mean, its band goes from the lowest to the highest.
A run's curves over k come from its eval.jsonl (python eval.py ... --out=RUN/eval.jsonl), else from its last evaluation in metrics.jsonl.
Needs matplotlib, which nothing else here does: pip install matplotlib
"""
import argparse
import json
import math
import os
import re
import sys

import numpy as np

from eval import by_problem, columns, mean, problem_stats, read_results

PANELS = {"accuracy": "accuracy", "format": "format", "entropy": "entropy, nats", "reward": "reward", "kept": "kept share",
          "conflict": "conflict share", "grad_norm": "gradient norm"}                # field of metrics.jsonl: title


def read_metrics(folder):
    """The rows of folder/metrics.jsonl, as dicts. A last line that a kill has cut off is left out, with a note on stderr.
    ValueError: no such run, a file without rows, a broken line (with its number)."""
    path, rows = os.path.join(folder, "metrics.jsonl"), []
    if not os.path.exists(path):
        raise ValueError(f"{folder}: no such run; give the folder of a run (with metrics.jsonl in it) or a .jsonl file of eval.py")
    with open(path, "rb") as f:
        *lines, last = f.read().split(b"\n")                                        # last: what follows the last newline
    if last:
        print(f"{path}: the last line is cut off; it is left out", file=sys.stderr)
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            rows.append(None)
        if not isinstance(rows[-1], dict) or not {"step", "phase"} <= rows[-1].keys():
            raise ValueError(f"{path}:{number}: not a row of metrics; mend or remove the line")
    if not rows:
        raise ValueError(f"{path}: the file is empty; wait for the run's first step")
    return rows


def read_curves(path):
    """{data set: {"pass@1": 0 to 1, "maj@1": ..., "pass@2": ...}} of a file of eval.py, for k = 1, 2, 4, ... up to its n. ValueError: broken."""
    header, rows = read_results(path)
    if not rows:
        raise ValueError(f"{path}: there are no completions in it; run its eval.py command again")
    curves = {}
    for name, spec in header["settings"]["data"].items():
        ks = sorted({2**e for e in range(spec["n"].bit_length())} | {spec["n"]})
        stats = np.array([problem_stats(group, ks) for group in by_problem(r for r in rows if r["data"] == name).values()])  # (problems, columns)
        if stats.size:
            curves[name] = {c: mean(values) for c, values in zip(columns(ks), stats.T) if "@" in c}
    return curves


def read_run(path):
    """(series, curves) of a run's folder or a file of eval.py. series: {field of PANELS: array over RL steps}, empty without RL steps;
    curves as in read_curves. ValueError: nothing to draw."""
    if path.endswith(".jsonl"):
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file")
        return {}, read_curves(path)
    rows = read_metrics(path)
    steps = [row for row in rows if row["phase"] not in ("sft", "eval")]
    series = {field: np.array([math.nan if row.get(field) is None else row[field] for row in steps], float) for field in PANELS if steps}  # (steps,)
    if os.path.exists(os.path.join(path, "eval.jsonl")):
        return series, read_curves(os.path.join(path, "eval.jsonl"))
    last = next((row for row in reversed(rows) if row["phase"] == "eval"), {})
    curve = {k: v for k, v in last.items() if re.fullmatch(r"(pass|maj)@\d+", k) and v is not None}
    if not steps and not curve:
        raise ValueError(f"{path}: only SFT steps so far, nothing to draw; wait for the first RL step or evaluation")
    return series, {"held out": curve} if curve else {}


def group_runs(paths):
    """{label: the paths of its seeds}. The label is the path without the folders that all share and without a last -s0, _s1, -seed2."""
    paths = [os.path.normpath(path) for path in dict.fromkeys(paths)]
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    groups = {}
    for path in paths:
        label = re.sub(r"[-_.]s(eed)?\d+$", "", os.path.relpath(os.path.abspath(path), shared).removesuffix(".jsonl"))
        groups.setdefault(label, []).append(path)
    return groups


def smooth(values, width):
    """Centred moving average over `width` values (made odd), fewer at the ends; NaNs are left out. values (n,) -> (n,)."""
    half, known = width // 2, ~np.isnan(values)
    window = lambda v: np.convolve(v, np.ones(2 * half + 1))[half:half + len(v)]    # noqa: E731
    with np.errstate(invalid="ignore"):                                             # 0/0 is NaN: no value in reach
        return window(np.where(known, values, 0)) / window(known.astype(float))


def band(seeds):
    """Mean, lowest and highest over seeds, for as many steps as all of them have. seeds: arrays (n_i,) -> three arrays (min n_i,)."""
    n = min(map(len, seeds))
    values = np.stack([s[:n] for s in seeds])                                       # (seeds, n)
    return values.mean(0), values.min(0), values.max(0)


def draw(groups, out):
    """Draws {label: [(series, curves) of each seed]} into the picture file `out`. ImportError without matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image                                                           # matplotlib needs it, too

    figure, axes = plt.subplots(3, 3, figsize=(13, 10), dpi=80, layout="constrained")
    axes, width = axes.flat, 1 + 2 * (max([len(s["reward"]) for runs in groups.values() for s, _ in runs if s] or [1]) // 30)

    def line(axis, x, mean, low, high, several, **style):
        drawn, = axis.plot(x, mean, **style)
        if several:
            axis.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)

    for number, (label, runs) in enumerate(groups.items()):
        color = f"C{number % 10}"
        several = len(runs) > 1
        for axis, field in zip(axes, PANELS):
            seeds = [smooth(series[field], width) for series, _ in runs if series]
            if seeds:
                values = band(seeds)
                line(axis, np.arange(1, len(values[0]) + 1), *values, several, color=color, linewidth=1.3)
        sets = list(dict.fromkeys(name for _, curves in runs for name in curves))
        for axis, kind in zip(axes[len(PANELS):], ("pass", "maj")):
            for dash, name in enumerate(sets):
                curves = [curves[name] for _, curves in runs if name in curves]
                ks = sorted(int(c.split("@")[1]) for c in curves[0] if c.startswith(kind) and all(c in curve for curve in curves))
                line(axis, ks, *band([np.array([curve[f"{kind}@{k}"] for k in ks]) for curve in curves]), several, color=color,
                     linestyle=("-", "--", ":", "-.")[dash % 4], marker="o", markersize=3, label=name if len(sets) > 1 else None)
        axes[0].plot([], [], color=color, label=label + (f" ({len(runs)} seeds)" if several else ""))     # the legend's entry
    entropy = axes[list(PANELS).index("entropy")]
    entropy.axhline(math.log(2), color="black", linestyle="--", linewidth=1)
    entropy.text(0.99, math.log(2), "ln 2", transform=entropy.get_yaxis_transform(), ha="right", va="bottom")
    for axis, title in zip(axes, [*PANELS.values(), "pass@k", "maj@k"]):
        axis.set_title(title)
        axis.set_xlabel("k" if "@" in title else "RL step")
        axis.grid(alpha=0.3)
        if title not in (PANELS["reward"], PANELS["grad_norm"]):
            axis.set_ylim(0, max(0.8, axis.get_ylim()[1]) if title == PANELS["entropy"] else 1.02)
        if "@" in title:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda k, _: f"{k:g}")
            if axis.get_legend_handles_labels()[1]:
                axis.legend(fontsize="small")
    axes[list(PANELS).index("grad_norm")].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel(f"per step: moving average over {width} steps" + "; bands: lowest and highest seed" * any(len(r) > 1 for r in groups.values()),
                     fontsize="small")
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    figure.canvas.draw()                                                            # 256 colours: a third of the size of savefig
    Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(out, optimize=True)
    plt.close(figure)


def main(argv=None):
    """The command line. Returns the exit code: 0, or 2 for bad usage and bad input."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or a .jsonl file of eval.py")
    p.add_argument("--out", default="out/plot.png", metavar="FILE.png", help="default: out/plot.png")
    args = p.parse_args(argv)
    if not args.out.endswith(".png"):
        p.error(f"--out={args.out}: the name of the picture should end in .png")
    try:
        draw({label: [read_run(path) for path in paths] for label, paths in group_runs(args.runs).items()}, args.out)
    except ImportError as e:
        print(f"error: plot.py draws with matplotlib ({e}); install it: pip install matplotlib", file=sys.stderr)
        return 2
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
