"""Spawned ranks as real processes: they end together, and with their parent."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
from serving import alive, until
from test_ranks_protocol import FakeRunner

import fastgen
from fastgen.parallel.rank_group import RankGroup
from fastgen.processes import spawning
from fastgen.ranks import start
from fastgen.ranks.protocol import Leader

pytestmark = pytest.mark.timeout(60)

# A follower with a stub of a runner. torch and the modules that compute are replaced: importing them takes seconds.
FAKE = """
import sys
from types import ModuleType, SimpleNamespace

class Absent(ModuleType):
    def __getattr__(self, name):
        return type(name, (), {"__init__": lambda *_, **__: None})

names = (
    "device.find", "device.memory", "parallel.rank_group", "engine.runner", "engine.startup", "engine.step",
    "model.live_weights", "model.loader", "model.weights", "kernels", "kernels.launch",
)
for name in ("torch", "torch.distributed", "torch.distributed.device_mesh", *(f"fastgen.{name}" for name in names)):
    sys.modules[name] = Absent(name)
sys.modules["torch"].distributed = sys.modules["torch.distributed"]
sys.modules["torch"].get_num_threads = lambda: 1
sys.modules["torch"].set_num_threads = print
group = SimpleNamespace(process_group=None, leave=lambda: None)
sys.modules["fastgen.parallel.rank_group"].RankGroup = SimpleNamespace(join=lambda *_: group)

from fastgen.ranks import start

def build_rank(death, device, group):
    print("a rank", flush=True)
    if death:
        raise LookupError("no such thing")
    return SimpleNamespace(config=None, synchronize=lambda: None)

start.build_rank = build_rank
start.main()
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(process_group=None, leave=lambda: None, interrupt=lambda: None)
    monkeypatch.setattr(RankGroup, "join", lambda *_: group)
    monkeypatch.setattr(start, "build_rank", lambda *_: FakeRunner())
    monkeypatch.setattr(start, "FOLLOWER", ("-c", FAKE))


def started(death: str = "", size: int = 3) -> tuple[Leader, list[subprocess.Popen[bytes]]]:
    """Start a leader; return it and its followers' processes."""
    leader = start.start_followers(size, (death,), "cpu")
    assert leader._spawned is not None
    return leader, leader._spawned.processes


@pytest.mark.usefixtures("fake")
def test_a_rank_that_cannot_start_ends_all() -> None:
    with pytest.raises(LookupError, match="no such thing"):
        started("fails")[0].synchronize()  # the stub of a leader waits for nobody, and may be ready first


@pytest.mark.usefixtures("fake")
def test_closing_ends_ranks_whatever_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawning, "GRACE", 0.3)
    started(size=2)[0].close()  # torch opens some files at its first store
    gc.collect()  # otherwise files that failed tests left in cycles might be closed during the count
    before = len(os.listdir("/proc/self/fd"))
    leader, processes = started()
    for process in processes:
        assert os.getpgid(process.pid) == process.pid, "Ctrl-C in the terminal does not reach it"
    os.kill(processes[1].pid, signal.SIGSTOP)  # so that it does not notice the end of its connection
    while ") T" not in Path(f"/proc/{processes[1].pid}/stat").read_text():
        time.sleep(0.01)
    leader.close()
    assert processes[0].returncode in (1, -signal.SIGKILL)  # whichever comes first on a slow machine
    assert processes[1].returncode == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) <= before
    leader.close()


@pytest.mark.usefixtures("fake")
def test_ranks_that_nobody_holds_end_and_what_they_print_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    leader, processes = started(size=2)
    leader.synchronize()
    del leader
    assert [process.returncode for process in processes] == [1]
    out, err = capfd.readouterr()
    assert out == ""
    assert "a rank\n" in err


@pytest.mark.usefixtures("fake")
def test_an_interrupt_while_ranks_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "FOLLOWER", ("-c", "import time; time.sleep(1000)"))
    monkeypatch.setattr(spawning, "GRACE", 0.1)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    others = children.read_text()
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            started(size=2)
        assert children.read_text() == others
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


# Two forks of the program each lead a rank: one ends without a close, and the other is killed while a fork of it, such
# as a DataLoader's worker, lives on and keeps the sockets.
CALLER = """
import os, signal, sys, time
from types import SimpleNamespace
from fastgen.parallel.rank_group import RankGroup
from fastgen.ranks import start

def lead():
    leader = start.start_followers(2, ("",), "cpu")
    print(*(process.pid for process in leader._spawned.processes), flush=True)
    return leader

RankGroup.join = lambda *_: SimpleNamespace(process_group=None, leave=lambda: None, interrupt=lambda: None)
start.build_rank, start.FOLLOWER = (lambda *_: SimpleNamespace(config=None)), ("-c", sys.argv[1])
forked = os.fork()
if forked:
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
leader = lead()
if forked:
    worker = os.fork()
    if worker == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(worker, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_their_caller(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLER, FAKE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(fastgen.__file__).parent.parent)},
        stdout=subprocess.PIPE,
        timeout=50,
    )
    assert done.returncode == -signal.SIGKILL
    first, second, worker = map(int, done.stdout.split())
    until(lambda: not alive(first) and not alive(second))
    assert alive(worker)
    os.kill(worker, signal.SIGKILL)
