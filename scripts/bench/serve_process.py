"""A server for scripts to measure: `Server` starts fgserve."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from bench_limits import settings
from reports import MODELS

READY_SECONDS = 600.0
BUNDLED = "bundled"
TINY = Path(__file__).parents[2] / "fastgen" / "tiny"


class Server:
    """fgserve at a free port of this machine, ready when the `with` block begins.

    model: a folder or hub id; None: the bundled model. flags: of fgserve. environment: its environment variables; None:
    this process's.
    """

    def __init__(
        self, model: str | None, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        models = [] if model is None else [model]
        command = [sys.executable, "-m", "fastgen.cli.serve.main", *models, "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
        )
        self.url = ""
        self._said: deque[str] = deque(maxlen=1000)
        self._listening = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line)
            if found := re.search(r"listening at (\S+)", line):
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    def __enter__(self) -> Server:
        try:
            self._listening.wait()
            deadline = time.monotonic() + READY_SECONDS
            while not self._ready():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server does not get ready; it said: {self.said}")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise
        return self

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=10) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False
        except (OSError, ValueError):  # it has ended, or never listened
            return False

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    @property
    def said(self) -> str:
        """The last lines of its log."""
        return "".join(self._said)

    @property
    def engine(self) -> int:
        """Return the process of its engine."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(found[0])


@contextmanager
def model_folder(name: str, smoke: bool = False) -> Iterator[tuple[str | None, list[str]]]:
    """Return (model, flags of fgserve) of a name: `bundled`, a model of bench.py (mistral7, ...) with random weights,
    or a folder or hub id. smoke: tiny shapes, on the CPU."""
    if name not in MODELS:
        yield (None if name == BUNDLED else name), []
        return
    from bench_engine import dummy_folder  # not above: it imports torch

    config = settings(name, smoke)
    with dummy_folder(name, smoke) as folder:
        write_tokenizer(folder, config["vocab_size"])
        yield str(folder), ["--load", "dummy", *(["--device", "cpu"] if smoke else [])]


def write_tokenizer(folder: Path, size: int) -> None:
    """Write the bundled model's tokenizer and chat template, with made-up words up to a vocabulary of `size`, so that
    random weights give text."""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f" w{number}": number for number in range(len(words), size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
