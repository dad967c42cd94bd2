"""Ranks as real processes: they live and die together, and with their caller."""

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
from types import FrameType
from typing import Any

import pytest
from test_spmd import MODEL as MODEL_CONFIG

from fastgen import Generator, SamplingParams, processes, workers
from fastgen.request import Batch
from fastgen.workers import Ranks

pytestmark = pytest.mark.timeout(60)

MODEL: Any = None  # what the fakes are told of a model


def batch(step: int) -> Batch:
    return Batch((step,), (), (), (), False)


# A rank whose runner is a stub. What computes and torch are absent: to import them would take most of a test's time.
FAKE = """
import os, sys, time
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

class Absent(ModuleType):
    def __getattr__(self, name):
        return type(name, (), {})

names = ("exchange", "parallel", "profiling", "runner", "sleeping", "startup", "transfer", "weights")
for name in ("torch", "torch.distributed", *(f"fastgen.{name}" for name in names)):
    sys.modules[name] = Absent(name)
sys.modules["fastgen.profiling"].LocalTracer = lambda *_, **__: SimpleNamespace(span=nullcontext)

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
                deaths[self.death]()
            time.sleep(1000)
        return SimpleNamespace(step=step)

    def collect(self, launched):
        return StepResult([launched.step, os.getpid()], [], [], [])

    def settle(self):
        pass

def fail():
    raise LookupError("no such thing")

deaths = {
    "exits": lambda: os._exit(3),
    "raises": fail,
}

def build(start, link):
    print("rank", start.rank, flush=True)
    if start.rank == 0:
        link.send(Port(1))
    else:
        link.receive()
    runner = Runner()
    runner.rank, runner.death = start.rank, start.options.get("death")
    if start.options.get("slow"):
        time.sleep(1000)
    return runner

main(build)
"""


def spawned(size: int = 2, **options: Any) -> Ranks:
    return Ranks(size, MODEL, options, Path("model"), "dummy", "cpu", program=("-c", FAKE))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which is somebody's to wait for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("death", "kind", "text"),
    [
        ("exits", RuntimeError, "rank 1 of 2 exited with status 3; make a new Generator"),
        ("raises", LookupError, "no such thing"),
    ],
)
def test_a_rank_that_dies_ends_all(death: str, kind: type[Exception], text: str) -> None:
    ranks = spawned(death=death)
    pids = [process.pid for process in ranks._processes]
    assert [os.getpgid(pid) for pid in pids] == pids, "Ctrl-C at the terminal does not come to them"
    assert ranks.collect(ranks.launch(batch(5))).tokens == [5, pids[0]]
    start = time.monotonic()
    with pytest.raises(kind, match=text):
        ranks.collect(ranks.launch(batch(99)))
    assert time.monotonic() - start < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "none lives, and none is a zombie"
    with pytest.raises(RuntimeError, match="broken"):
        ranks.launch(batch(6))
    ranks.close()


def test_closing_ends_ranks_whatever_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.3)
    gc.collect()  # what failing tests left in cycles would be closed while this one counts
    before = len(os.listdir("/proc/self/fd"))
    ranks = spawned(death="exits")
    pids = [process.pid for process in ranks._processes]
    os.kill(pids[1], signal.SIGSTOP)  # it does not see the end of its connection
    while ") T" not in Path(f"/proc/{pids[1]}/stat").read_text():
        time.sleep(0.01)
    ranks.close()
    first, second = (process.returncode for process in ranks._processes)
    assert first in (1, -signal.SIGKILL)  # whichever comes first, where all are slow
    assert second == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) <= before
    ranks.close()
    for call in (lambda: ranks.launch(batch(1)), ranks.delays):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    ranks.settle()


def test_ranks_that_nobody_holds_end_and_what_they_print_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = spawned(size=1)
    processes = ranks._processes
    del ranks
    assert [process.returncode for process in processes] == [1]
    assert capfd.readouterr() == ("", "rank 0\n")


def test_an_interrupt_while_ranks_start_leaves_none() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    others = children.read_text()
    timer = threading.Timer(1.0, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            spawned(size=1, slow=True)
        assert children.read_text() == others
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


CALLER = """
import os, signal, sys, time
from pathlib import Path
from fastgen.workers import Ranks

program, ending = sys.argv[1:]
ranks = Ranks(1, None, {}, Path("model"), "dummy", "cpu", program=("-c", program))
print(*(process.pid for process in ranks._processes), flush=True)
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
    """By itself without a close, or killed, when a fork that lives on does not keep them."""
    done = subprocess.run(
        [sys.executable, "-c", CALLER, FAKE, ending],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(workers.__file__).parent.parent)},
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


def test_a_generator_goes_on_after_an_interrupt_traces_its_rank_0_and_ends_with_a_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"load": "dummy", "device": "cpu", "num_pages": 16, "page_size": 16, "max_seqs": 4}
    with Generator(tmp_path, **options, tensor_parallel=2) as gen:
        answer = gen.generate([[1, 2, 3]], params)[0].completions
        interrupted = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        interrupted.start()
        with pytest.raises(KeyboardInterrupt):
            generate_forever(gen)
        assert gen.unfinished == 0
        assert gen.generate([[1, 2, 3]], params)[0].completions == answer

        gen.add([1, 2, 3], params, "a")
        with gen.profile(tmp_path / "trace.json", steps=5):
            for _ in range(3):
                gen.step()
        assert len(gen.abort("a")[0].completions[0].token_ids) == 3, "none that came meanwhile is lost"
        events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
        found = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        assert found["launch"] == 3
        assert 2 <= found["collect"] <= 3
        assert {"aten::embedding"} <= {event["name"] for event in events if event.get("cat") == "cpu_op"}
        (tmp_path / "folder").mkdir()
        with gen.profile(tmp_path / "folder" / "trace.json", steps=1):
            (tmp_path / "folder").rmdir()
            assert gen.generate([[1, 2, 3]], params)[0].completions == answer
        with pytest.raises(ValueError, match="in a folder that exists"), gen.profile(tmp_path / "no" / "trace.json"):
            pass

        killed = threading.Timer(0.2, gen._runner._processes[1].kill)
        killed.start()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 of 2 was killed by SIGKILL"):
            generate_forever(gen)
        assert time.monotonic() - start < 10
