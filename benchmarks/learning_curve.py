"""Draw the README's learning curve from finished runs: `python benchmarks/learning_curve.py OUT.svg RUN [RUN ...]`.

Needs matplotlib (`pip install matplotlib`), which quintain itself does not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

from quintain.trainer.tracking import read_metrics

REWARD, HELD_OUT = "reward/mean", "eval/success_frac_sampled"


def main(out: str, *runs: str) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "quintain"  # equal curves give equal files
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for index, run in enumerate(runs):
        rows = read_metrics(Path(run))
        color = f"C{index}"
        rewards = [(row["step"], row[REWARD]) for row in rows if REWARD in row]
        held_out = [(row["step"], row[HELD_OUT]) for row in rows if HELD_OUT in row]
        axes.plot(*zip(*rewards, strict=True), color=color, alpha=0.45, linewidth=1)
        axes.plot(*zip(*held_out, strict=True), color=color, marker="o", label=Path(run).name)
    axes.set(xlabel="step (128 trajectories each)", ylabel="success", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(title="held-out tasks (points), batch (thin)", loc="lower right", fontsize=8, title_fontsize=8)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
