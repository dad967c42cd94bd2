"""A server of HTTP in a process of its own, for tests that are its clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]


@contextmanager
def serving(*command: str, listening: str = r"listening at (\S+)") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a Python command in the repository, until it says where it listens; its URL, and the process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert process.stderr is not None
        said = ""
        while (found := re.search(listening, said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield found[1], process
    finally:
        process.terminate()
        process.communicate(timeout=20)


@contextmanager
def fgserve(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The bundled model behind HTTP, ready."""
    with serving("-m", "fastgen.cli.serve.main", "--port", "0", "--num-pages", "100", *arguments) as (url, process):
        deadline = time.monotonic() + 120
        while httpx.get(f"{url}/ready").status_code != 200:
            assert time.monotonic() < deadline, "it does not get ready"
            time.sleep(0.05)
        yield url, process
