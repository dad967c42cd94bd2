"""scripts/check: the plausible bugs and the sanitizer, run small."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "scripts" / "check"
sys.path.insert(0, str(CHECK))

import mutate  # noqa: E402
import sanitize  # noqa: E402


def test_each_bug_can_be_applied() -> None:
    assert mutate.faults(mutate.mutants()) == []


@pytest.mark.long
def test_each_pattern_of_the_sanitizer_selects_tests() -> None:
    """A test that is renamed would no longer run under the sanitizer, without any error."""
    files = sorted({f"tests/{path}" for path, _, _ in sanitize.PARTS.values()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *files]
    collected = subprocess.run(command, cwd=CHECK.parents[1], capture_output=True, text=True, check=True).stdout
    for path, expression, _ in sanitize.PARTS.values():
        names = re.findall(rf"^tests/{path}::(.*)$", collected, re.MULTILINE)
        words = {*re.findall(r"[\w-]+", expression)} - {"and", "or", "not"}
        assert names
        assert [word for word in words if not any(word in name for name in names)] == [], path


def test_bugs_that_cannot_be_applied_are_listed(tmp_path: Path) -> None:
    (tmp_path / "fastgen").mkdir()
    (tmp_path / "fastgen" / "module.py").write_text(
        "SIZE = 4\n\n\nclass A:\n    def f(self):\n        return g(\n            1)\n\n\ndef f():\n    return 4 + 4\n"
    )

    def apply(symbol: str, text: str, other: str) -> list[str]:
        mutant = mutate.Mutant("module", ("fastgen/module.py",), symbol, text, other)
        return mutate.faults([mutant], tmp_path) or mutant.apply(tmp_path).split("\n")

    assert apply("SIZE", "4", "5")[0] == "SIZE = 5"
    assert apply("A.f", "return g( 1)", "pass")[4:7] == ["    def f(self):", "        pass", ""]
    for symbol, text, other, fault in (
        ("f", "4", "5", "f has the text 2 times, not once"),
        ("B.f", "4", "5", "there is no B.f; there is A.f, f"),
        ("f", "4 +", "(", "a syntax error"),
    ):
        (found,) = apply(symbol, text, other)
        assert fault in found
    assert len(mutate.faults([mutate.Mutant("gone", ("tests/gone.py",), "f", "4", "5")], tmp_path)) == 2


@pytest.mark.long
def test_bugs_in_the_options_are_found(tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    subprocess.run([sys.executable, CHECK / "mutate.py", "--only", "engine.options", "--json", report], check=True)
    found = json.loads(report.read_text())
    assert found["found"] == found["mutants"] > 0


SANITIZER = """#!/bin/sh
while [ "$1" != "$PYTHON" ]; do shift; done
"$@"
printf '%s\\n' "========= $REPORT"
"""
CLEAN = "ERROR SUMMARY: 0 errors"
READ = "Invalid __global__ read of size 4 bytes\n=========     at _spread_kernel+0x1f0 in drafts.py:80\n"


@pytest.mark.long
@pytest.mark.parametrize("report", [CLEAN, READ + "========= ERROR SUMMARY: 1 error"])
def test_the_reports_of_a_sanitizer_are_counted(report: str, tmp_path: Path) -> None:
    tool, found = tmp_path / "compute-sanitizer", tmp_path / "found.json"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHON": sys.executable, "REPORT": report, "TRITON_INTERPRET": "1"}
    command = [sys.executable, CHECK / "sanitize.py", "memcheck", "--parts", "drafts", "--json", found]
    status = subprocess.run(command, env=os.environ | environment).returncode
    part = json.loads(found.read_text())["memcheck"]["drafts"]
    assert (part["tests"] > 10, part["passed"], part["failed"]) == (True, part["tests"], 0)
    assert part["summaries"] == [report.partition("SUMMARY: ")[2]]
    wrong = "Invalid __global__ read of size 4 bytes at _spread_kernel in drafts.py:80"
    assert part["reported"] == ([] if report == CLEAN else [wrong])
    assert status == (report != CLEAN)
