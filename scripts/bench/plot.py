"""Plots what bench_serve.py, rl_grpo.py or async_grpo.py wrote.

    python scripts/bench/plot.py scripts/results/rl-grpo-cpu.json scripts/results/rl-grpo-cpu.png

Needs matplotlib, which fastgen itself does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Report = dict[str, Any]

LINES = {"reward": ("samples, temperature 1", "0.6", ""), "held_out_accuracy": ("held out, greedy", "tab:blue", "o")}
TIMES = {"ttft": "first token", "inter_token": "between two tokens", "end_to_end": "whole answer"}
COLORS = {"p50": "tab:blue", "p90": "tab:orange", "p99": "tab:red"}


def plot(report: Report, path: Path) -> None:
    """Plot a report. Raises ModuleNotFoundError where there is no matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    next(draw for key, draw in DRAWN.items() if key in report)(report, figure)
    figure.savefig(path, dpi=figure.dpi)  # which one that draws may have set


def draw_serve(report: Report, figure: Any) -> None:
    """Draw throughput and waiting times over the requests in flight."""
    points = report["points"]
    places = [point["concurrency"] for point in points]
    figure.set(size_inches=(10, 7), dpi=130)
    first, *others = figure.subplots(2, 2).flat
    first.plot(places, [point["tokens_per_second"] for point in points], "o-", color="tab:blue")
    first.set_title("generated tokens per second")
    first.set_ylim(bottom=0)
    for axes, (name, title) in zip(others, TIMES.items(), strict=True):
        told = [(place, point[name]) for place, point in zip(places, points, strict=True) if point[name] is not None]
        for quantile, color in COLORS.items():
            axes.plot(
                [place for place, _ in told],
                [1000 * times[quantile] for _, times in told],
                "o-",
                color=color,
                label=quantile,
            )
        axes.set_title(f"{title}, ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    for axes in (first, *others):
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("requests in flight")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['server']}, {report['machine']}: {report['prompt']} -> {report['tokens']} tokens")


def draw_rl(report: Report, figure: Any) -> None:
    """Draw the rewards of the samples and the held-out accuracy over the steps."""
    axes = figure.subplots()
    curves = {"": report["curve"]}
    if "synchronous" in report:
        curves = {"asynchronous: ": report["curve"], "synchronous: ": report["synchronous"]}
    for (name, curve), style in zip(curves.items(), ("-", ":"), strict=False):
        for key, (label, color, marker) in LINES.items():
            points = [(point["step"], 100 * point[key]) for point in curve if key in point]
            axes.plot(*zip(*points, strict=True), style, label=name + label, color=color, marker=marker)
    shares = ", ".join(f"{part} {100 * share:.1f} %" for part, share in report["shares"].items())
    axes.set_title(f"GRPO of two-digit products, {report['machine']}\n{shares}", fontsize="medium")
    axes.set(xlabel="step", ylabel="right, %", ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


DRAWN = {  # by a key that the report has
    "server": draw_serve,
    "curve": draw_rl,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the JSON that one of them wrote")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    plot(json.loads(arguments.report.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
