"""fggen --ray: two replicas of the bundled model on two cores, undisturbed, killed, and with one of them lost."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from generating import by_row, read, write
from serving import ROOT, is_called, until

from fastgen import Generator, SamplingParams
from fastgen.cli.gen import main
from fastgen.cli.gen.ray_backend import Worker
from fastgen.cli.gen.rows import Row
from fastgen.cli.gen.work import RowJob

pytestmark = pytest.mark.timeout(600)

JOB = ("--chat", "--seed", "5", "--max-tokens", "20", "--max-seqs", "8", "--page-size", "16", "--num-pages", "100")
ON_RAY = ("--ray", "--replicas", "2", "--replica-cpus", "0.4")
REPLICA = b"ray::Worker"
ROWS = 120


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job that ran without Ray."""
    pytest.importorskip("ray", reason="needs the extra ray")
    folder = tmp_path_factory.mktemp("gen")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prompts = [{"prompt": f"what is {row} + {97 * row % 100}?", "n": 1 + row % 2} for row in range(ROWS - 1)]
        write("in.jsonl", *prompts, "nonsense")
        assert main.main(["fastgen-tiny", "in.jsonl", "-o", "alone.jsonl", *JOB]) == 0
    return folder


@contextmanager
def on_ray(source: str, output: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run fggen on Ray in this folder, as a session of its own; kill what is left of the session in the end."""
    command = [sys.executable, "-m", "fastgen.cli.gen.main", "fastgen-tiny", source, "-o", output, *JOB, *ON_RAY]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *options], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        until(lambda: not any(map(end, session(process))))
        process.communicate()


def session(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of the session, among them all of Ray's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(number) == process.pid:
                found.append(int(path.parent.name))
    return found


def end(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    return True


def replicas(process: subprocess.Popen[str]) -> list[int]:
    return [one for one in session(process) if is_called(one, REPLICA)]


def written(output: str) -> int:
    return Path(output).read_bytes().count(b"\n")


def more(output: str, than: int) -> int:
    """Wait until the output has more lines than `than`; return their number."""
    until(lambda: Path(output).exists() and written(output) > than, 240)
    return written(output)


def ended(process: subprocess.Popen[str], status: int) -> str:
    """Wait for the end; return stderr. No process of the session may be left."""
    _, said = process.communicate(timeout=240)
    assert process.returncode == status, said
    until(lambda: not session(process))
    return said


def test_a_job_is_gone_on_with_on_ray_and_without(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(alone)
    lines = Path("alone.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:10]) + lines[10][:-9])  # as a SIGKILL leaves it
    shutil.copy("alone.jsonl.fggen.json", "out.jsonl.fggen.json")
    with on_ray("in.jsonl", "out.jsonl") as process:
        more("out.jsonl", than=10)
        process.kill()
    kept = written("out.jsonl")
    with on_ray("in.jsonl", "out.jsonl") as process:
        assert more("out.jsonl", than=kept) < ROWS
        assert len(replicas(process)) == 2
        process.send_signal(signal.SIGTERM)
        said = ended(process, 130)
    assert f"fggen: {kept} rows are in out.jsonl already" in said
    assert "fggen: stopped; the same command goes on from here" in said
    kept = written("out.jsonl")
    assert kept < ROWS
    assert main.main(["fastgen-tiny", "in.jsonl", "-o", "out.jsonl", *JOB]) == 0
    said = capsys.readouterr().err
    assert f"fggen: {kept} rows are in out.jsonl already" in said
    assert f"fggen: {ROWS - kept} rows in" in said
    assert by_row("out.jsonl") == by_row("alone.jsonl")


def test_the_rows_of_a_replica_that_is_lost_are_done_again(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(alone)
    with on_ray("in.jsonl", "ordered.jsonl", "--ordered") as process:
        more("ordered.jsonl", than=0)
        both = replicas(process)
        os.kill(both[0], signal.SIGKILL)
        assert len(both) == 2
        assert written("ordered.jsonl") < ROWS
        ended(process, 0)
    assert read("ordered.jsonl") == by_row("alone.jsonl")


def work_in(make: Any, *bundles: list[Row]) -> list[Any]:
    worker = Worker(make, os.getcwd(), logging.WARNING)

    async def run() -> list[Any]:
        return await asyncio.gather(*map(worker.do, bundles))

    return asyncio.run(run())


def test_bundles_are_done_together_each_with_its_rows(talker: Path) -> None:
    job = RowJob(SamplingParams(max_tokens=20, ignore_eos=True), seed=0)
    made: list[Generator] = []  # it stays in the worker's thread, which waits for more rows

    def make() -> tuple[Generator, Any]:
        made.append(Generator(talker, max_seqs=8, max_step_tokens=64, page_size=16))
        return made[0], job.ask

    bundles = [[Row(index, {"prompt": "hello"}) for index in range(first, first + 2)] for first in (0, 2, 4)]
    found = work_in(make, *bundles, [Row(6, {})])
    assert [sorted(done.index for done in bundle) for bundle in found] == [[0, 1], [2, 3], [4, 5], [6]]
    assert all((done.error is None) == (done.index < 6) for bundle in found for done in bundle)
    assert made[0].stats.steps < 40, "one after another they take 60"


def test_what_keeps_a_model_from_being_loaded_is_told() -> None:
    def make() -> Any:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        work_in(make, [Row(0, {})])
