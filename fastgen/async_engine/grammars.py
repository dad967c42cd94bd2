"""Grammars that are compiled in the background, with a limit on their time.

    python -m fastgen.async_engine.grammars FD

is a process that compiles grammars only to show that they do not take too long. FD is the number of its end of a
socket. This module does not import torch.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from multiprocessing.connection import Connection

from fastgen.ranks import processes
from fastgen.text.grammar import CACHED_GRAMMARS, Compiler, GrammarMask

GRAMMAR_TIMEOUT = 10.0  # default of the seconds that a grammar may take
WORKERS = 4  # grammars that are compiled at a time
POLL_SECONDS = 0.05  # interval of checks whether anybody still waits for a grammar
NICENESS = 10  # the processes give way to the engine
MAX_BYTES = 4 * 2**30  # address space of a process, which must not take the engine's memory


class GrammarPool:
    """Compiles grammars in threads. A process compiles each grammar first, over a vocabulary of bytes. It is killed
    when the time is over, and when nobody waits for the grammar any longer: llguidance would need hours for some
    schemas of a hundred bytes, and a thread can not be killed.

    make_compiler: makes the Compiler, when the first grammar comes.
    """

    def __init__(self, make_compiler: Callable[[], Compiler]) -> None:
        self._make_compiler = make_compiler
        self._threads = ThreadPoolExecutor(WORKERS, "fastgen-compile")
        self._lock = threading.Lock()  # for the first use of the Compiler
        self._wanted: set[int] = set()  # requests that wait
        self._passed: set[str] = set()  # grammars that a process has compiled
        self._idle: list[_Checker] = []

    def compile(self, number: int, grammar: str, seconds: float) -> Future[GrammarMask]:
        """Return the future mask for a request. It raises ValueError where the grammar is wrong, or takes more than
        `seconds` after its time in the queue."""
        self._wanted.add(number)
        return self._threads.submit(self._compile, number, grammar, seconds)

    def drop(self, number: int) -> None:
        """Give up the mask for a request; its future raises an error."""
        self._wanted.discard(number)

    def close(self) -> None:
        """Give up all masks, and end the processes."""
        self._wanted.clear()
        self._threads.shutdown(cancel_futures=True)
        for checker in self._idle:
            checker.kill()

    def _compile(self, number: int, grammar: str, seconds: float) -> GrammarMask:
        try:
            if grammar not in self._passed:
                self._check(number, grammar, seconds)
            with self._lock:
                compiler = self._compiler
            return compiler.compile(grammar)
        finally:
            self._wanted.discard(number)

    @cached_property
    def _compiler(self) -> Compiler:
        return self._make_compiler()

    def _check(self, number: int, grammar: str, seconds: float) -> None:
        """Compile a grammar in a process. Raises ValueError where that does not end in time."""
        if number not in self._wanted:
            raise ValueError("the request has ended")
        try:
            checker = self._idle.pop()
        except IndexError:  # not more often than there are threads
            checker = _Checker()
        end = time.monotonic() + seconds
        try:
            if not checker.compiles(grammar, lambda: number in self._wanted and time.monotonic() < end):
                raise ValueError(f"the grammar takes more than {seconds:g} seconds to compile; simplify it")
        except BaseException:
            checker.kill()
            raise
        self._idle.append(checker)
        if len(self._passed) >= CACHED_GRAMMARS:
            self._passed.clear()
        self._passed.add(grammar)


class _Checker:
    """A process that compiles grammars, one after another."""

    def __init__(self) -> None:
        started: list[subprocess.Popen[bytes]] = []
        connection = processes.spawn(("-m", "fastgen.async_engine.grammars"), started)
        self._connection = Connection(connection.detach())
        (self._process,) = started

    def compiles(self, grammar: str, wanted: Callable[[], bool]) -> bool:
        """Return True when a grammar is compiled, or False as soon as it is not `wanted`; then the process goes on.
        Raises ValueError where the process ends."""
        try:
            self._connection.send(grammar)
            while not self._connection.poll(POLL_SECONDS):
                if not wanted():
                    return False
            self._connection.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            how = processes.describe_exit(status)
            raise ValueError(f"the process that compiled the grammar {how}; simplify the grammar") from None
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


def main() -> None:
    """Compile grammars until the other end of the socket closes."""
    from llguidance import LLMatcher, LLTokenizer

    processes.end_with_parent()
    os.nice(NICENESS)
    if sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    tokens = LLTokenizer("byte")
    with Connection(int(sys.argv[-1])) as connection:
        while True:
            try:
                grammar = connection.recv()
            except EOFError:
                return
            # Bytes stand for the tokens that this vocabulary does not have. The engine's compiler reports errors.
            known = re.sub(r"<\[[^\]]*\]>|<\|[^|]*\|>", "<[1]>", grammar)
            matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(known), log_level=0)
            if not matcher.is_error():
                matcher.compute_logit_bias()  # some take their time here
            connection.send(None)


if __name__ == "__main__":
    main()
