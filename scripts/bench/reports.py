"""What all benchmarks share: models, where results are, the machine, medians."""

from __future__ import annotations

import json
import os
import platform
import statistics
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
