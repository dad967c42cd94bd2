"""rendering.py: chat templates that take too long or write too much end with an error, and no others do."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from fastgen.text import rendering
from fastgen.text.rendering import rendered
from fastgen.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(60)

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
GIB = 2**30


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS.replace("BODY", ""), "takes more than 0.2 seconds of CPU time; look for a loop"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "than 0.2 seconds"),
        (ENDLESS.replace("BODY", "{{ messages[0].content * 99999 }}"), "takes more than 64 MiB of memory"),
        ("{{ messages[0].content * 2001 }}", "it renders 10005 characters, above the maximum of 10000"),
        ("{{ messages[0].content * 10**14 }}", "messages: MemoryError"),
    ],
)
def test_a_template_that_loops_or_multiplies_text_is_an_error(
    talker: Path, template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 20 if "MiB" in reason else 0.2)
    monkeypatch.setattr(rendering, "TEMPLATE_BYTES", 2**26)
    monkeypatch.setattr(rendering, "TEMPLATE_CHARS", 10_000)
    tokenizer = Tokenizer(talker)
    tokenizer.hf.chat_template = template
    with pytest.raises(ValueError, match=re.escape(reason)):
        tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert sum(1 for _ in range(10**6)) == 10**6, "nothing is raised later"


class Machine:
    """A machine whose clock and memory a test sets.

    seconds: CPU time of the thread that renders. polls: number of checks. allocated: bytes that rendering takes, which
    are free again after it. other: bytes of other threads.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.polls, self.allocated, self.other = 100.0, 0, 0, 0
        monkeypatch.setattr(rendering, "_thread_clock", lambda: 5)
        monkeypatch.setattr(rendering, "_seconds", lambda clock: self.seconds)
        monkeypatch.setattr(rendering, "trim_heap", self.free)
        monkeypatch.setattr(rendering, "used_memory", self.used)
        monkeypatch.setattr(rendering, "POLL_SECONDS", 0.001)

    def free(self) -> None:
        self.allocated = 0

    def used(self) -> int:
        self.polls += threading.current_thread().name == "fastgen-templates"
        return 5 * GIB + self.allocated + self.other

    def await_polls(self, count: int = 3) -> None:
        """Wait until the watcher has checked a few times more."""
        last = self.polls + count
        while self.polls < last:
            time.sleep(0.001)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_usual_limits_of_time_and_memory(machine: Machine) -> None:
    """Half a limit is allowed, and one and a half are not."""

    def render(seconds: float, size: float) -> str:
        machine.await_polls()
        machine.seconds += seconds
        machine.allocated += int(size)
        machine.await_polls()
        return "done"

    for seconds, size in ((2.5, 0), (0, 0.5 * GIB)):
        assert rendered(partial(render, seconds, size)) == "done"
        machine.allocated = 0
    for seconds, size, reason in ((7.5, 0, "5 seconds of CPU"), (0, 1.5 * GIB, "1024 MiB")):
        with pytest.raises(ValueError, match=f"takes more than {reason}"):
            rendered(partial(render, seconds, size))


def test_waiting_for_a_cpu_is_no_fault_of_a_template(machine: Machine) -> None:
    def render() -> str:
        machine.await_polls(50)  # as on a busy machine: time passes without CPU time of this thread
        return "done"

    assert rendered(render) == "done"


def test_a_rendering_that_never_gets_a_cpu_ends(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_POLLS", 20)
    with pytest.raises(ValueError, match=r"rendering takes more than 0\.02 seconds; look"):
        rendered(lambda: machine.await_polls(50))


def test_memory_of_other_threads_is_no_fault_of_a_template(machine: Machine) -> None:
    """The rendering is stopped twice to find that out, and begins again."""
    calls = []

    def render() -> str:
        calls.append(machine.polls)
        machine.await_polls()
        if len(calls) < 3:
            machine.other += 2 * GIB
            machine.await_polls()
        return "done"

    assert rendered(render) == "done"
    assert len(calls) == 3
