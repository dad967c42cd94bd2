"""Plots what bench_serve.py wrote: throughput and waiting times over the requests in flight, or over their rate.

    python scripts/plot_serve.py scripts/data/serve-NAME.json scripts/data/serve-NAME.png

Needs matplotlib, which fastgen itself does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TIMES = {"ttft": "first token", "inter_token": "between two tokens", "end_to_end": "whole answer"}
COLORS = {"p50": "tab:blue", "p90": "tab:orange", "p99": "tab:red"}


def series(report: dict[str, Any]) -> tuple[str, list[float], list[dict[str, Any]]]:
    """What the points differ in (concurrency or rate), its values, and the points, in the order of these."""
    by = "concurrency" if report["points"][0]["concurrency"] is not None else "rate"
    points = sorted(report["points"], key=lambda point: point[by])
    return by, [point[by] for point in points], points


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by, places, points = series(report)
    figure, grid = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    first, *others = grid.flat
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
    for axes in grid.flat:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("requests in flight" if by == "concurrency" else "requests per second")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['server']}, {report['machine']}: {report['prompt']} -> {report['tokens']} tokens")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the JSON that bench_serve.py wrote")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    plot(json.loads(arguments.report.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
