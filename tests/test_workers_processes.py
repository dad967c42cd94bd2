"""Ranks as real processes: they live and die together, and with their caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fastgen import workers
from fastgen.request import Batch
from fastgen.workers import Ranks

pytestmark = pytest.mark.timeout(60)

MODEL: Any = None  # what the fakes are told of a model


def batch(step: int) -> Batch:
    return Batch((step,), (), (), (), False)


FAKE = """
import os, time
from types import SimpleNamespace
from fastgen.config import EngineConfig
from fastgen.links import Port
from fastgen.request import StepResult
from fastgen.workers import main

class Runner:
    config = EngineConfig("cpu", "float32", 128, 4, 64, 16, 8, "reference")

    def launch(self, batch):
        step = batch.decodes[0]
        if step == 99:  # the others wait for rank 1, as in a collective
            if self.rank == 1:
                raise LookupError("no such thing")
            time.sleep(1000)
        return SimpleNamespace(step=step)

    def collect(self, launched):
        return StepResult([launched.step, os.getpid()], [], [])

    def settle(self):
        pass

def build(start, link):
    print("rank", start.rank, flush=True)
    if start.rank == 0:
        link.send(Port(1))
    else:
        link.receive()
    runner = Runner()
    runner.rank = start.rank
    return runner

main(build)
"""


def spawned(size: int = 2, program: str = FAKE) -> Ranks:
    return Ranks(size, MODEL, {}, Path("model"), "dummy", "cpu", program=("-c", program))


def state(pid: int) -> str:
    """Of a process: a letter; "Z" too where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which is somebody's to wait for, does not."""
    return state(pid) != "Z"


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.02)


def test_a_rank_that_raises_ends_all() -> None:
    ranks = spawned()
    pids = [process.pid for process in ranks._processes]
    assert [os.getpgid(pid) for pid in pids] == pids, "Ctrl-C at the terminal does not come to them"
    assert ranks.collect(ranks.launch(batch(5))).tokens == [5, pids[0]]
    start = time.monotonic()
    with pytest.raises(LookupError, match="no such thing"):
        ranks.collect(ranks.launch(batch(99)))
    assert time.monotonic() - start < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "none lives, and none is a zombie"
    with pytest.raises(RuntimeError, match="broken"):
        ranks.launch(batch(6))
    ranks.close()


@pytest.mark.parametrize(
    ("death", "text"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "was killed by SIGKILL .has the memory run out.*; make a new Generator",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV; make a new Generator"),
        ("os._exit(3)", "exited with status 3; make a new Generator"),
    ],
)
def test_how_a_rank_dies_is_told(death: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=f"rank 0 of 1 {text}"):
        spawned(1, f"import os, signal; {death}")


def test_closing_ends_ranks_whatever_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.3)
    before = len(os.listdir("/proc/self/fd"))
    ranks = spawned()
    pids = [process.pid for process in ranks._processes]
    os.kill(pids[1], signal.SIGSTOP)  # it sees neither the end of its connection nor SIGTERM
    while state(pids[1]) != "T":
        time.sleep(0.005)
    ranks.close()
    assert [process.returncode for process in ranks._processes] == [1, -signal.SIGKILL]
    assert len(os.listdir("/proc/self/fd")) == before
    ranks.close()
    for call in (lambda: ranks.launch(batch(1)), ranks.delays):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    ranks.settle()


def test_ranks_that_nobody_holds_end() -> None:
    ranks = spawned(1)
    processes = ranks._processes
    del ranks
    assert [process.returncode for process in processes] == [1]


def test_what_ranks_print_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    spawned().close()
    out, err = capfd.readouterr()
    assert (out, sorted(err.splitlines())) == ("", ["rank 0", "rank 1"])


def test_an_interrupt_while_ranks_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "GRACE", 0.3)
    before = signal.signal(signal.SIGUSR1, interrupt)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    others = children.read_text()
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            spawned(program="import time; time.sleep(1000)")
        assert children.read_text() == others
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


CALLER = """
import os, signal, sys, time
from pathlib import Path
from fastgen.workers import Ranks

ranks = Ranks(1, None, {}, Path("model"), "dummy", "cpu", program=("-c", sys.argv[1]))
pid = os.fork()  # as a DataLoader's worker: it inherits the socket, and lives on
if pid == 0:
    os.close(1)
    time.sleep(30)
    os._exit(0)
print(ranks._processes[0].pid, pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_their_caller_and_a_fork_of_it_does_not_keep_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLER, FAKE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(workers.__file__).parent.parent)},
        stdout=subprocess.PIPE,
        timeout=30,
    )
    assert done.returncode == -signal.SIGKILL
    rank, fork = map(int, done.stdout.split())
    wait_until_gone([rank])
    assert alive(fork)
    os.kill(fork, signal.SIGKILL)
