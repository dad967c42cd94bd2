"""scripts/check: the simulation and the plausible bugs, as they are run by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "scripts" / "check"


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "options", "count"),
    [
        ("simulate.py", ("--schedules", "600", "--processes", "2"), "schedules"),
        ("mutate.py", ("--only", "step_times"), "found"),
    ],
)
def test_the_scripts_find_what_they_should(script: str, options: tuple[str, ...], count: str, tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    subprocess.run([sys.executable, CHECK / script, *options, "--json", report], check=True)
    found = json.loads(report.read_text())
    assert found[count] == (600 if count == "schedules" else found["mutants"])
