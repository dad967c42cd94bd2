"""Plots what `bench.py gpu --perf` wrote: generated tokens per second over the tokens generated, and the limit.

    python scripts/plot_perf.py scripts/data/mistral7-h200-perf.json scripts/data/mistral7-perf.png

Needs matplotlib, which fastgen itself does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {"mistral7": "Mistral 7B", "qwen14": "Qwen2.5 14B"}


def series(report: dict[str, Any]) -> tuple[list[int], list[float], list[float]]:
    """Tokens generated a sequence, tokens per second, and its limit; in the order of the first."""
    points = sorted(report["points"], key=lambda point: point["workload"]["generated"])
    lengths = [point["workload"]["generated"] for point in points]
    speeds = [point["tokens_per_second"] for point in points]
    return lengths, speeds, [point["limit"]["h200"] for point in points]


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths, speeds, limits = series(report)
    workload = report["points"][0]["workload"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(lengths, limits, "--", color="0.5", label="limit of memory and matrix products")
    axes.plot(lengths, speeds, "o-", color="tab:blue", label="fastgen")
    for length, speed in zip(lengths, speeds, strict=True):
        axes.annotate(f"{speed:.0f}", (length, speed), textcoords="offset points", xytext=(5, -11))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.5)  # room for the last label
    axes.set_ylim(0, 1.1 * max(limits))
    axes.set_xlabel("tokens generated a sequence")
    axes.set_ylabel("generated tokens per second")
    model = NAMES.get(report["model"], report["model"])
    axes.set_title(f"{model}, {report['gpu']}: {workload['sequences']} prompts of {workload['prompt']} tokens")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the JSON that bench.py wrote")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    plot(json.loads(arguments.report.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
