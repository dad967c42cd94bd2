"""datatrove's inference pipeline with fgserve: as an endpoint, and as the server that a task starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from serving import FGSERVE, ROOT, Server, children, until

pytest.importorskip("datatrove", reason="needs the extra datatrove")
pytestmark = pytest.mark.timeout(180)

DOCUMENTS = 60


def start(url: str, folder: Path, log: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    program = [sys.executable, ROOT / "tests" / "datatrove_program.py", url, folder, str(DOCUMENTS)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(program, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path})


def written(folder: Path) -> list[dict]:
    return [json.loads(line) for path in (folder / "out").glob("*") for line in path.read_text().splitlines()]


def check(folder: Path) -> None:
    """Each document is there once, with an answer, or with the reason of fgserve if it is too long."""
    records = written(folder)
    assert Counter(record["id"] for record in records) == {str(number): 1 for number in range(DOCUMENTS)}
    answers = {int(record["id"]): record["metadata"]["rollout_results"] for record in records}
    (error,) = (answer[0]["error"] for answer in answers.values() if "error" in answer[0])
    assert "has 128" not in error
    assert "128" in error, error
    right = sum(answer[0].get("text") == f"{number} + 7 = {number + 7}." for number, answer in answers.items())
    assert right > 0.8 * DOCUMENTS


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_an_endpoint_on_this_machine_and_on_another_one(host: str, tmp_path: Path) -> None:
    """datatrove posts to localhost by itself, and to other hosts, such as 127.0.0.2, by the package openai."""
    with Server(FGSERVE, "--max-model-len", "128", "--host", host).await_ready() as server:
        assert start(server.url, tmp_path).wait(120) == 0
    check(tmp_path)


def test_a_task_that_is_killed_goes_on_and_its_server_ends(tmp_path: Path) -> None:
    for documents in (5, 25):
        kill_after(tmp_path, documents)
        assert len(written(tmp_path)) < DOCUMENTS
    assert start("", tmp_path).wait(120) == 0
    check(tmp_path)


def test_requests_are_sent_again_after_an_engine_has_died(tmp_path: Path) -> None:
    task = start("", tmp_path)
    until(lambda: done(tmp_path) >= 5 or task.poll() is not None, 60)
    (server,) = children(task.pid)
    (engine,) = children(server)
    os.kill(engine, signal.SIGKILL)
    assert task.wait(120) == 0
    check(tmp_path)


def kill_after(folder: Path, documents: int) -> None:
    """Start a task, kill it when so many documents are done, and wait for the end of its server."""
    task = start("", folder)
    until(lambda: done(folder) >= documents or task.poll() is not None, 60)
    (server,) = children(task.pid)
    task.kill()
    task.wait()
    until(lambda: not Path(f"/proc/{server}").exists(), 30)


def done(folder: Path) -> int:
    """Return the number of documents that checkpoints have, or that chunks have which need none any more."""
    waiting = sum(path.read_bytes().count(b"\n") for path in folder.glob("checkpoints/0*/*.jsonl"))
    last = folder / "checkpoints" / "last_chunk" / "00000.txt"
    return waiting + 10 * (int(last.read_text() or -1) + 1 if last.exists() else 0)


def test_a_server_that_cannot_start_ends_the_task_with_its_reason(tmp_path: Path) -> None:
    """The flags of `model_kwargs` reach fgserve."""
    from datatrove.data import Document
    from datatrove.pipeline.inference.run_inference import InferenceConfig
    from datatrove.pipeline.inference.types import ServerError
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.logging import logger

    from fastgen.data.datatrove import FastgenRunner

    async def rollout(document: Document, generate: object) -> object:
        return await generate({"prompt": document.text})

    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    config = InferenceConfig("custom", "fastgen-tiny", model_kwargs={"max_seqs": 0})
    with pytest.raises(ServerError):
        FastgenRunner(rollout, config, JsonlWriter(str(tmp_path))).run([Document("a", "a")])
    logger.remove(sink)
    assert any("--max-seqs" in line for line in said), said
