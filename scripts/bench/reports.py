"""What all benchmarks share: models, where results are, the machine, medians; and the table of bench_peers.py.

python scripts/bench/reports.py scripts/results/cpu-peers-*.json    # prints it
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
"""The config.json of each model that runs with random weights."""


def write_json(path: Path, report: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Write a report, and the folders of its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def median_and_spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "spread": [min(values), max(values)]}


def processor() -> str:
    """Return the processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def peers_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return reports of bench_peers.py as one Markdown table: the best of all rounds, and fastgen's speed divided by
    its best peer's. Cells are tokens per second, or seconds for starts and first tokens."""
    engines = list(dict.fromkeys(name for report in reports for name in report["start"]))
    peers = ["fastgen", *(name for name in engines if name != "fastgen")]
    lines = [f"| | {' | '.join(peers)} | fastgen / best peer |", "|---" * (len(peers) + 2) + "|"]
    for report in reports:
        label = f"{report['model']}, {report['dtype']}: "
        rates = {name: {peer: max(each) for peer, each in row.items()} for name, row in report["rates"].items()}
        rates["start"] = {peer: 1 / min(seconds) for peer, seconds in report["start"].items()}
        for name, row in rates.items():
            seconds = name == "start" or report["workloads"][name]["answer"] == [1, 1]
            shown = {peer: f"{1 / rate:.2f} s" if seconds else f"{rate:.0f}" for peer, rate in row.items()}
            cells = [shown.get(peer, "") for peer in peers]
            ratio = row["fastgen"] / max(rate for peer, rate in row.items() if peer != "fastgen")
            lines.append(f"| {label}{name} | {' | '.join(cells)} | {ratio:.2f} |")
            label = "... "
    return "\n".join(lines)


if __name__ == "__main__":
    print(peers_table([json.loads(Path(file).read_text()) for file in sys.argv[1:]]))
