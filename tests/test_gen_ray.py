"""fggen --ray: two replicas of the bundled model on two cores, undisturbed and with one of them lost."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from generating import by_row, read, write
from serving import ROOT, alive, descendants, until

from fastgen import Generator, SamplingParams
from fastgen.cli.gen import main
from fastgen.cli.gen.rays import Worker
from fastgen.cli.gen.rows import Row
from fastgen.cli.gen.work import RowJob

JOB = ("--chat", "--seed", "5", "--max-tokens", "20", "--max-seqs", "8", "--page-size", "16", "--num-pages", "100")
ON_RAY = ("--ray", "--replicas", "2", "--replica-cpus", "0.4")
REPLICA = b"ray::MapWorker"
ROWS = 72


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that was done without Ray."""
    folder = tmp_path_factory.mktemp("gen")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prompts = [{"prompt": f"what is {row} + {97 * row % 100}?", "n": 1 + row % 2} for row in range(ROWS - 1)]
        write("in.jsonl", *prompts, "nonsense")
        assert main.main(["fastgen-tiny", "in.jsonl", "-o", "alone.jsonl", *JOB]) == 0
    return folder


def start(folder: Path, output: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fastgen.cli.gen.main", "fastgen-tiny", "in.jsonl", "-o", output, *JOB, *ON_RAY]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *options], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def replicas(process: subprocess.Popen[str]) -> list[int]:
    found = descendants(process.pid)
    return [one for one in found if Path(f"/proc/{one}/cmdline").read_bytes().startswith(REPLICA)]


def written(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def ended(process: subprocess.Popen[str], status: int) -> str:
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    return said


def test_an_interrupted_job_goes_on_without_ray(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    monkeypatch.chdir(alone)
    output = alone / "out.jsonl"
    process = start(alone, output.name)
    until(lambda: written(output) > 0, 60)
    assert len(replicas(process)) == 2
    process.send_signal(signal.SIGINT)
    assert "fggen: stopped; the same command goes on from here" in ended(process, 130)
    kept = written(output)
    assert kept < ROWS
    assert main.main(["fastgen-tiny", "in.jsonl", "-o", output.name, *JOB]) == 0
    said = capsys.readouterr().err
    assert f"fggen: {kept} rows are in {output.name} already" in said
    assert f"fggen: {ROWS - kept} rows in" in said
    assert by_row(output.name) == by_row("alone.jsonl")


def test_the_rows_of_a_replica_that_is_lost_are_done_again(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    monkeypatch.chdir(alone)
    output = alone / "ordered.jsonl"
    process = start(alone, output.name, "--ordered")
    until(lambda: written(output) > 0, 60)
    started, both = descendants(process.pid), replicas(process)
    os.kill(both[0], signal.SIGKILL)
    assert len(both) == 2
    assert written(output) < ROWS
    ended(process, 0)
    assert read(output.name) == by_row("alone.jsonl")
    until(lambda: not any(map(alive, started)))


def work_in(worker: Worker, *bundles: list[Row]) -> list[Any]:
    async def run() -> list[Any]:
        return await asyncio.gather(*(worker({"rows": pickle.dumps(bundle)}) for bundle in bundles))

    return [pickle.loads(answer["done"]) for answer in asyncio.run(run())]


def test_bundles_are_done_together_each_with_its_rows(gen: Generator) -> None:
    job = RowJob(SamplingParams(max_tokens=20, ignore_eos=True), seed=0)
    worker = Worker(lambda: (gen, job), os.getcwd(), logging.WARNING)
    bundles = [[Row(index, {"prompt": "hello"}) for index in range(first, first + 2)] for first in (0, 2, 4)]
    before = gen.stats.steps
    found = work_in(worker, *bundles, [Row(6, {})])
    assert [sorted(done.index for done in bundle) for bundle in found] == [[0, 1], [2, 3], [4, 5], [6]]
    assert all((done.error is None) == (done.index < 6) for bundle in found for done in bundle)
    assert gen.stats.steps - before < 40, "one after another they take 60"


def test_what_keeps_a_model_from_being_loaded_is_told() -> None:
    def make() -> Any:
        raise ValueError("no such model")

    (found,) = work_in(Worker(make, os.getcwd(), logging.WARNING), [Row(0, {})])
    assert str(found) == "no such model"


def test_options_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for options, reason in ((["--replicas", "2"], "give --ray too"), (["--ray"], "what comes by stdin can not")):
        assert main.main(["fastgen-tiny", "-", "-o", "out.jsonl", *options]) == 1
        assert reason in capsys.readouterr().err
