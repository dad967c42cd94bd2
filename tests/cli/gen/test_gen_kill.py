"""fggen is killed at random moments; in the end each row is there once, as in an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from serving import ROOT, until

ROWS = 30


class Forks:
    """Processes of fggen, one at a time."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tests" / "gen_program.py")]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.errors = folder / "errors"

    def start(self, *arguments: str) -> int:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([arguments, str(self.errors)]) + "\n")
        self._server.stdin.flush()
        return self._read("process")

    def end(self) -> int:
        """Wait for the process, and return its status."""
        return self._read("status")

    def _read(self, what: str) -> int:
        assert self._server.stdout is not None
        said = self._server.stdout.readline().split()
        assert said[:1] == [what], "an earlier test did not wait for its process"
        return int(said[1])

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gen")


@pytest.fixture(scope="module")
def forks(folder: Path) -> Iterator[Forks]:
    made = Forks(folder)
    yield made
    made.close()


def arguments(folder: Path, output: Path, rows: int = ROWS) -> list[str]:
    prompts = folder / f"{rows}.jsonl"
    if not prompts.exists():
        draw = random.Random(0)
        asked = [f"what is {draw.randrange(100)} + {draw.randrange(100)}?" for _ in range(rows)]
        prompts.write_text("".join(json.dumps({"prompt": prompt, "n": 1 + row % 3}) + "\n"
                                   for row, prompt in enumerate(asked)))  # fmt: skip
    engine = ["--max-seqs", "8", "--page-size", "16", "--num-pages", "100"]
    options = ["--chat", "--seed", "5", "--max-tokens", "20", "--logprobs", *engine]
    return ["fastgen-tiny", str(prompts), "-o", str(output), *options]


def in_peace(forks: Forks, folder: Path, rows: int = ROWS) -> list[dict]:
    """Return the records of an undisturbed job, which runs once."""
    output = folder / f"{rows}-out.jsonl"
    forks.start(*arguments(folder, output, rows))
    assert forks.end() == 0, forks.errors.read_text()
    return records(output)


def records(output: Path) -> list[dict]:
    if output.is_dir():
        found = [row for part in output.glob("part-*.parquet") for row in pq.read_table(part).to_pylist()]
    else:
        found = [json.loads(line) for line in output.read_bytes().splitlines()]
    return sorted(found, key=lambda record: record["row"])


def written(output: Path) -> int:
    """Return the number of rows in the output; the last one may be torn."""
    if output.is_dir():
        return sum(pq.read_metadata(part).num_rows for part in output.glob("part-*.parquet"))
    return output.read_bytes().count(b"\n") if output.exists() else 0


def killed(forks: Forks, folder: Path, output: Path, times: int, rows: int) -> int:
    """Kill a job `times` times at random moments, then let it end; return how many of them had written rows."""
    draw = random.Random(times)
    hits = 0
    for part in range(times):
        before, moment = written(output), draw.uniform(part, part + 1) * (rows - 4) / times
        process = forks.start(*arguments(folder, output, rows))
        if moment > before:
            until(lambda moment=moment: written(output) >= moment)
            time.sleep(draw.uniform(0, 0.03))
        else:
            time.sleep(draw.uniform(0, 0.5))  # while it loads, perhaps
        with suppress(ProcessLookupError):  # it may have ended
            os.kill(process, signal.SIGKILL)
        status = forks.end()
        assert status in (-signal.SIGKILL, 0), forks.errors.read_text()
        hits += status != 0 and written(output) > before
    forks.start(*arguments(folder, output, rows))
    assert forks.end() == 0, forks.errors.read_text()
    return hits


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("times", "hits", "rows"), [(3, 1, ROWS), pytest.param(20, 10, 200, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["out.jsonl", pytest.param("out.parquet", marks=pytest.mark.long)])
def test_killed_it_loses_and_doubles_nothing(
    forks: Forks, folder: Path, tmp_path: Path, name: str, times: int, hits: int, rows: int
) -> None:
    output, expected = tmp_path / name, in_peace(forks, folder, rows)
    assert killed(forks, folder, output, times, rows) >= hits
    assert records(output) == expected
    assert [record["row"] for record in expected] == list(range(rows))
    assert all(len(record["completions"]) == record["n"] for record in expected)
    assert not list(tmp_path.rglob("*.tmp"))
    assert not output.is_dir() or len(list(output.glob("part-*.parquet"))) > 2


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_keeps_what_is_written_and_says_how_to_go_on(
    forks: Forks, folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "out.jsonl"
    process = forks.start(*arguments(folder, output))
    until(lambda: written(output) >= 1)
    os.kill(process, number)
    assert forks.end() == 130
    said = forks.errors.read_text()
    assert "fggen: stopped; the same command goes on from here" in said
    assert "Traceback" not in said
    kept = records(output)
    assert 1 <= len(kept) < ROWS
    forks.start(*arguments(folder, output))
    assert forks.end() == 0
    assert f"fggen: {len(kept)} rows are in {output} already" in forks.errors.read_text()
    assert records(output) == in_peace(forks, folder)
