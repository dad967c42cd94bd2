"""fggen --data-parallel: the records are those of one process, also if one of the processes is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from generating import Fggen, by_row, write
from serving import ROOT, children, until

from fastgen.cli.gen import main

ROWS = 120
JOB = ("--chat", "--seed", 5, "--max-tokens", 40, "--ignore-eos")


def test_rows_of_a_process_that_is_killed_are_done_by_the_other(fggen: Fggen, talker: Path) -> None:
    prompts = [{"prompt": f"hello {number}", "max_tokens": 10 + number} for number in range(ROWS - 1)]
    write("in.jsonl", *prompts, "nonsense")
    assert fggen("in.jsonl", "-o", "alone.jsonl", *JOB) == 0
    options = [*map(str, JOB), "--data-parallel", "2", "--device", "cpu", "--max-seqs", "8", "--num-pages", "200"]
    command = [sys.executable, "-m", "fastgen.cli.gen.main", str(talker), "in.jsonl", "-o", "out.jsonl", *options]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: Path("out.jsonl").exists() and Path("out.jsonl").read_bytes().count(b"\n") > 5, 60)
        both = children(process.pid)
        os.kill(both[0], signal.SIGKILL)
        _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert len(both) == 2
    assert "was killed by SIGKILL (has the memory run out?); its " in said
    assert f"fggen: {ROWS} rows in" in said
    assert by_row("out.jsonl") == by_row("alone.jsonl")


def test_it_is_for_a_model_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for options, reason in (
        (["--url", "http://localhost:1"], "--data-parallel needs the model here, not at --url; leave it out"),
        (["--replicas", "2"], "--data-parallel is for this machine, without Ray"),
    ):
        with pytest.raises(SystemExit):
            main.main(["model", "in.jsonl", "-o", "out.jsonl", "--data-parallel", "2", *options])
        assert reason in capsys.readouterr().err
