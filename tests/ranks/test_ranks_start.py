"""Ranks as real processes live and die together, and with their parent."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from test_ranks_protocol import MODEL as MODEL_CONFIG
from test_ranks_protocol import FakeRunner, batch

import fastgen
from fastgen import Generator, SamplingParams
from fastgen.parallel.group import Group
from fastgen.processes import spawning as processes
from fastgen.ranks import start
from fastgen.ranks.protocol import Leader

pytestmark = pytest.mark.timeout(60)

# A follower whose runner is a stub. What computes, and torch, are absent: importing them takes most of a test's time.
FAKE = """
import os, sys, time
from types import ModuleType, SimpleNamespace

class Absent(ModuleType):
    def __getattr__(self, name):
        return type(name, (), {"__init__": lambda *_, **__: None})

names = (
    "device.find", "device.memory", "parallel.group", "engine.runner", "engine.startup", "engine.step",
    "model.live_weights", "model.weights", "kernels", "kernels.launch",
)
for name in ("torch", "torch.distributed", "torch.distributed.device_mesh", *(f"fastgen.{name}" for name in names)):
    sys.modules[name] = Absent(name)
sys.modules["torch"].distributed = sys.modules["torch.distributed"]
sys.modules["torch"].get_num_threads = lambda: 1
sys.modules["torch"].set_num_threads = print
group = SimpleNamespace(process_group=None, leave=lambda: None)
sys.modules["fastgen.parallel.group"].Group = SimpleNamespace(join=lambda *_: group)

from fastgen.ranks import start

class Runner:
    config = None

    def __init__(self, death, device, group):
        print("a rank", flush=True)
        if death == "fails":
            fail()
        self.death = death

    def launch(self, batch):
        if batch.decodes[0] == 99:  # the other waits for rank 1, as in a collective
            if sys.argv[-2] == "1":
                deaths[self.death]()
            time.sleep(1000)

    def synchronize(self):
        pass

def fail():
    raise LookupError("no such thing")

deaths = {
    "exits": lambda: os._exit(3),
    "raises": fail,
}
start.build_rank = Runner
start.main()
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(process_group=None, leave=lambda: None, interrupt=lambda: None)
    monkeypatch.setattr(Group, "join", lambda *_: group)
    monkeypatch.setattr(start, "build_rank", lambda *_: FakeRunner())
    monkeypatch.setattr(start, "FOLLOWER", ("-c", FAKE))


def started(death: str = "", size: int = 3) -> Leader:
    return start.start_followers(size, (death,), "cpu")


def pids_of(leader: Leader) -> list[int]:
    assert leader._spawned is not None
    return [process.pid for process in leader._spawned.processes]


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.02)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("death", "kind", "text"),
    [
        ("exits", RuntimeError, "rank 1 exited with status 3; make a new Generator"),
        ("raises", LookupError, "no such thing"),
    ],
)
def test_a_rank_that_dies_ends_all(death: str, kind: type[Exception], text: str) -> None:
    leader = started(death)
    pids = pids_of(leader)
    assert [os.getpgid(pid) for pid in pids] == pids, "Ctrl-C at the terminal does not come to them"
    assert leader.collect(leader.launch(batch(5))).tokens == [5]
    leader._runner.launch = lambda batch: None  # type: ignore[assignment, method-assign, return-value]
    start = time.monotonic()
    leader.launch(batch(99))
    with pytest.raises(kind, match=text):
        leader.synchronize()
    assert time.monotonic() - start < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "none lives, and none is a zombie"
    with pytest.raises(RuntimeError, match="no longer agree"):
        leader.launch(batch(6))
    leader.close()


@pytest.mark.usefixtures("fake")
def test_a_rank_that_can_not_start_ends_all() -> None:
    with pytest.raises(LookupError, match="no such thing"):
        started("fails").synchronize()  # the stub of a leader waits for nobody, and may be there first


@pytest.mark.usefixtures("fake")
def test_closing_ends_ranks_whatever_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.3)
    gc.collect()  # what failing tests left in cycles would be closed while this one counts
    before = len(os.listdir("/proc/self/fd"))
    leader = started()
    assert leader._spawned is not None
    pids = pids_of(leader)
    os.kill(pids[1], signal.SIGSTOP)  # it does not see the end of its connection
    while ") T" not in Path(f"/proc/{pids[1]}/stat").read_text():
        time.sleep(0.01)
    leader.close()
    first, second = (process.returncode for process in leader._spawned.processes)
    assert first in (1, -signal.SIGKILL)  # whichever comes first, where all are slow
    assert second == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) <= before
    leader.close()


@pytest.mark.usefixtures("fake")
def test_ranks_that_nobody_holds_end_and_what_they_print_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    leader = started(size=2)
    assert leader._spawned is not None
    processes = leader._spawned.processes
    leader.synchronize()
    del leader
    assert [process.returncode for process in processes] == [1]
    out, err = capfd.readouterr()
    assert out == ""
    assert "a rank\n" in err


@pytest.mark.usefixtures("fake")
def test_an_interrupt_while_ranks_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "FOLLOWER", ("-c", "import time; time.sleep(1000)"))

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


CALLER = """
import os, signal, sys, time
from types import SimpleNamespace
from fastgen.parallel.group import Group
from fastgen.ranks import start

program, ending = sys.argv[1:]
Group.join = lambda *_: SimpleNamespace(process_group=None, leave=lambda: None, interrupt=lambda: None)
start.build_rank, start.FOLLOWER = (lambda *_: SimpleNamespace(config=None)), ("-c", program)
leader = start.start_followers(2, ("",), "cpu")
print(*(process.pid for process in leader._spawned.processes), flush=True)
if ending == "forked":
    pid = os.fork()  # as a DataLoader's worker: it inherits the sockets, and lives on
    if pid == 0:
        os.close(1)
        time.sleep(30)
        os._exit(0)
    print(pid, flush=True)
if ending != "ends":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("ending", ["ends", "forked"])
def test_ranks_end_with_their_caller(ending: str, tmp_path: Path) -> None:
    """The parent ends without a close, or is killed while a fork of it lives on."""
    done = subprocess.run(
        [sys.executable, "-c", CALLER, FAKE, ending],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(fastgen.__file__).parent.parent)},
        stdout=subprocess.PIPE,
        timeout=30,
    )
    assert done.returncode == (0 if ending == "ends" else -signal.SIGKILL)
    rank, *fork = map(int, done.stdout.split())
    wait_until_gone([rank])
    for pid in fork:
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)


def generate_forever(gen: Generator) -> None:
    while True:
        gen.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=20, ignore_eos=True))


def test_a_generator_goes_on_after_an_interrupt_is_traced_and_ends_with_a_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, speculate=False)
    options: dict[str, Any] = {"load": "dummy", "device": "cpu", "num_pages": 16, "page_size": 16, "max_seqs": 4}
    with Generator(tmp_path, **options, tensor_parallel=2) as gen:
        answer = gen.generate([[1, 2, 3]], params)[0].completions
        interrupted = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        interrupted.start()
        with pytest.raises(KeyboardInterrupt):
            generate_forever(gen)
        assert gen.unfinished == 0
        assert gen.generate([[1, 2, 3]], params)[0].completions == answer

        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the program's own
        assert gen.generate([[1, 2, 3]], params)[0].completions == answer
        dist.destroy_process_group()
        assert gen.generate([[1, 2, 3]], params)[0].completions == answer

        gen.add([1, 2, 3], params, "a")
        with gen.profile(tmp_path / "trace.json", steps=5):
            for _ in range(3):
                gen.step()
        assert len(gen.abort("a")[0].completions[0].token_ids) == 3, "none that came meanwhile is lost"
        events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
        found = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        assert [found[part] for part in ("schedule", "launch", "collect", "update")] == [3, 3, 2, 2]
        assert {"aten::embedding"} <= {event["name"] for event in events if event.get("cat") == "cpu_op"}
        with pytest.raises(ValueError, match="in a folder that exists"), gen.profile(tmp_path / "no" / "trace.json"):
            pass

        rank = gen._runner._spawned.processes[0]
        os.kill(rank.pid, signal.SIGSTOP)
        threading.Timer(0.3, rank.send_signal, (signal.SIGCONT,)).start()
        assert gen.generate([[1, 2, 3]], params)[0].completions == answer, "it waits for a rank that is stopped"

        killed = threading.Timer(0.2, rank.kill)
        killed.start()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            generate_forever(gen)
        assert time.monotonic() - start < 10
