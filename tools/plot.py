"""
Pictures of runs: what train.py logged at each step, and the pass@k and maj@k of eval.py's files.

    python -m tools.plot out/gtpo out/grpo                      # writes out/plot.png
    python -m tools.plot out/gtpo-s0 out/gtpo-s1 out/grpo-s0 out/grpo-s1 --out=compare.png

Names that differ only in a last -s0, -s1, ... are seeds of one setting: a line is their mean, its
band goes from the lowest to the highest. A run's curves over k come from its eval.jsonl
(python eval.py ... --out=RUN/eval.jsonl), else from its last evaluation in metrics.jsonl.
Needs matplotlib, which nothing else here does: pip install matplotlib
"""
import argparse
import math
import os
import re
import sys

import numpy as np

from eval import ks_of, mean, problem_figures, read_results
from lib.files import expand_home, read_jsonl
from lib.run import command

# field of metrics.jsonl: title
PANELS = {"accuracy": "accuracy", "format": "format", "entropy": "entropy, nats",
          "reward": "reward", "kept": "kept share", "conflict": "conflict share",
          "grad_norm": "gradient norm"}


def read_curves(path):
    """{data set: {"pass@1": 0 to 1, "maj@1": ..., "pass@2": ...}} of a file of eval.py, for
    k = 1, 2, 4, ... up to its n. ValueError: broken, or without completions."""
    header, found = read_results(path)
    curves = {}
    for name, spec in header["settings"]["data"].items():
        ks = ks_of("", spec["n"])
        problems = [problem_figures(rows, ks) for rows in found[name].values()]
        if problems:
            curves[name] = {c: mean(problems, c) for c in problems[0] if "@" in c}
    if not curves:
        raise ValueError(f"{path}: no completions in it; run its eval.py command again")
    return curves


def read_run(path):
    """(series, curves) of a run's folder or a file of eval.py. series: {field of PANELS: array
    over RL steps}, empty without RL steps; curves as in read_curves."""
    if path.endswith(".jsonl"):
        return {}, read_curves(path)
    if not os.path.exists(f"{path}/metrics.jsonl"):
        raise ValueError(f"{path}: no such run; give the folder of a run (with metrics.jsonl in "
                         "it) or a .jsonl file of eval.py")
    rows = read_jsonl(f"{path}/metrics.jsonl", ("step", "phase"))
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            if (name in PANELS or "@" in name) and not isinstance(value, int | float | None):
                raise ValueError(f"{path}/metrics.jsonl:{number}: {name} is {value!r:.50}, not a "
                                 "number; mend or remove the line")
    steps = [row for row in rows if row["phase"] not in ("sft", "eval")]
    evaluations = [{k: v for k, v in row.items() if "@" in k and v is not None}
                   for row in rows if row["phase"] == "eval"]
    if not steps and not evaluations:
        raise ValueError(f"{path}: no RL step and no evaluation yet; wait for the first")
    series = {field: np.array([row.get(field) for row in steps], float) for field in PANELS}
    curves = {"held out": evaluations[-1]} if evaluations else {}
    if os.path.exists(f"{path}/eval.jsonl"):
        curves = read_curves(f"{path}/eval.jsonl")
    return series if steps else {}, curves


def group_runs(paths):
    """{label: the paths of its seeds}. The label is the path without a last -s0, _s1, -seed2."""
    groups = {}
    for path in paths:
        label = re.sub(r"[-_.]s(eed)?\d+$", "", os.path.normpath(path).removesuffix(".jsonl"))
        groups.setdefault(label, []).append(path)
    return groups


def smooth(values, width):
    """Centred moving average over `width` values (odd), fewer at the ends; NaNs are left out.
    values (n,) -> (n,)."""
    half, known = width // 2, ~np.isnan(values)
    near = [slice(max(0, i - half), i + half + 1) for i in range(len(values))]
    return np.array([values[s][known[s]].mean() if known[s].any() else math.nan for s in near])


def line(axis, x, seeds, **style):
    """The mean of seeds (arrays, the longer ones are cut) over x, and a band from the lowest to
    the highest."""
    n = min(map(len, seeds))
    values = np.stack([s[:n] for s in seeds])                   # (seeds, n)
    drawn, = axis.plot(x[:n], values.mean(0), **style)
    axis.fill_between(x[:n], values.min(0), values.max(0), color=drawn.get_color(), alpha=0.15,
                      linewidth=0)


def draw_curves(axis, kind, runs, color):
    """pass@k or maj@k of the seeds of one setting, a dash for each data set."""
    sets = dict.fromkeys(name for _, curves in runs for name in curves)
    for dash, name in zip(("-", "--", ":", "-."), sets):
        curves = [curves[name] for _, curves in runs if name in curves]
        shared = set.intersection(*map(set, curves))
        ks = sorted(int(c.split("@")[1]) for c in shared if c.startswith(kind))
        line(axis, ks, [[curve[f"{kind}@{k}"] for k in ks] for curve in curves], color=color,
             linestyle=dash, marker="o", markersize=3, label=name)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda k, _: f"{k:g}")
    axis.set(title=f"{kind}@k", xlabel="k", ylim=(0, 1.02))


def draw(groups, out):
    """Draws {label: [(series, curves) of each seed]} into the picture file `out`. ImportError
    without matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 3, figsize=(13, 10), dpi=80, layout="constrained")
    panels = dict(zip([*PANELS, "pass", "maj"], axes.flat))
    steps = [len(series["reward"]) for runs in groups.values() for series, _ in runs if series]
    width, names = 1 + 2 * (max(steps, default=1) // 30), []
    for number, (label, runs) in enumerate(groups.items()):
        color, seeds = f"C{number % 10}", [series for series, _ in runs if series]
        for field in PANELS if seeds else ():
            line(panels[field], range(1, max(steps) + 1),
                 [smooth(series[field], width) for series in seeds], color=color, linewidth=1.3)
        for kind in ("pass", "maj"):
            draw_curves(panels[kind], kind, runs, color)
        names.append(plt.Line2D([], [], color=color, label=f"{label} ({len(runs)})"))
    for field, title in PANELS.items():
        panels[field].set(title=title, xlabel="RL step")
    panels["grad_norm"].set_yscale("log")
    panels["entropy"].axhline(math.log(2), color="black", linestyle="--", label="ln 2")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="small")
    figure.legend(handles=names, loc="outside upper center", ncols=4)
    figure.supxlabel(f"(number of seeds); per step: moving average over {width} steps; bands: "
                     "lowest and highest seed", fontsize="small")
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    figure.savefig(out)
    plt.close(figure)


def main(argv):
    """The command line. ValueError, OSError: what is wrong with a run."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or a file of eval.py")
    p.add_argument("--out", default="out/plot.png", metavar="FILE.png", type=expand_home,
                   help="default: out/plot.png")
    args = p.parse_args(argv)
    groups = {label: [read_run(path) for path in paths]
              for label, paths in group_runs(args.runs).items()}
    try:
        draw(groups, args.out)
    except ImportError as e:
        raise ValueError(f"plot draws with matplotlib ({e}): pip install matplotlib") from None
    print(args.out)


if __name__ == "__main__":
    sys.exit(command(main))
