"""Plots the learning curve that rl_grpo.py or async_grpo.py wrote.

    python scripts/rl/plot_rl.py scripts/results/rl-grpo-cpu.json scripts/results/rl-grpo-cpu.png

Needs matplotlib, which fastgen itself does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LINES = {"reward": ("samples, temperature 1", "0.6", ""), "held_out_accuracy": ("held out, greedy", "tab:blue", "o")}


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the rewards of the samples and the held-out accuracy over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for key, (label, color, marker) in LINES.items():
        points = [(point["step"], 100 * point[key]) for point in report["curve"] if key in point]
        axes.plot(*zip(*points, strict=True), label=label, color=color, marker=marker)
    shares = ", ".join(f"{part} {100 * share:.1f} %" for part, share in report["shares"].items())
    axes.set_title(f"GRPO of two-digit products, {report['machine']}\n{shares}", fontsize="medium")
    axes.set(xlabel="step", ylabel="right, %", ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the JSON that one of them wrote")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    plot(json.loads(arguments.report.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
