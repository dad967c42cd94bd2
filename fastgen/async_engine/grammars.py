"""Compilation of grammars in the background, with a time limit.

    python -m fastgen.async_engine.grammars FD

runs a process that compiles grammars only to find out whether they have an error or take too long. FD is the file
descriptor of its end of a socket. This module does not import torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from multiprocessing.connection import Connection

from fastgen.processes import spawning as processes
from fastgen.text.grammar import CACHED_GRAMMARS, Compiler, GrammarMask, MarkVocabulary, compile_grammar

GRAMMAR_TIMEOUT = 10.0  # default time limit in seconds of CPU time: on a busy machine, a process may wait for longer
WAITING_SECONDS = 300.0  # maximum time of a compilation beyond its CPU time
MAX_TIMEOUT = 1e6  # the system's poll takes no limit of more than 24 days
WORKERS = 4  # number of grammars that are compiled at a time
NICENESS = 10  # the processes give way to the engine
MAX_BYTES = 4 * 2**30  # limit of a process's address space, since it must not take the engine's memory


class GrammarPool:
    """Pool of threads that compile grammars. Each thread has a process that first compiles the same text over a small
    vocabulary, and is killed at the time limit: llguidance would need hours for some schemas of a hundred bytes, and a
    thread cannot be killed. The thread compiles only texts that its process has compiled without an error.

    make_compiler: function that makes the Compiler, called for the first grammar.
    """

    def __init__(self, make_compiler: Callable[[], Compiler]) -> None:
        self._make_compiler = make_compiler
        self._threads = ThreadPoolExecutor(WORKERS, "fastgen-compile")
        self._lock = threading.Lock()  # for the first use of the Compiler
        self._check = lru_cache(CACHED_GRAMMARS)(self._check_anew)
        self._checkers: dict[int, _Checker] = {}  # by the thread's identifier

    def compile(self, grammar: str, seconds: float) -> Future[GrammarMask]:
        """Return a future of the mask for a request. Its result raises ValueError if the grammar is wrong, or takes
        more than `seconds` of CPU time to compile."""
        return self._threads.submit(self._compile, grammar, seconds)

    def close(self) -> None:
        """Cancel all compilations, and end the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for checker in list(self._checkers.values()):
            checker.kill()

    def _compile(self, grammar: str, seconds: float) -> GrammarMask:
        with self._lock:
            compiler = self._compiler
        self._check(grammar, seconds)
        return compiler.compile(grammar)

    @cached_property
    def _compiler(self) -> Compiler:
        return self._make_compiler()

    def _check_anew(self, grammar: str, seconds: float) -> None:
        """Compile a grammar in this thread's process. Raises ValueError if that fails or takes too long."""
        thread = threading.get_ident()
        if thread not in self._checkers:
            self._checkers[thread] = _Checker(self._compiler.marks)
        try:
            error = self._checkers[thread].compile(grammar, seconds)
        except BaseException:
            self._checkers.pop(thread).kill()
            raise
        if error is not None:
            raise ValueError(error)


class _Checker:
    """Process that compiles grammars over a small vocabulary, one after another."""

    def __init__(self, marks: MarkVocabulary) -> None:
        started: list[subprocess.Popen[bytes]] = []
        connection = processes.spawn(("-m", "fastgen.async_engine.grammars"), started)
        self._connection = Connection(connection.detach())
        (self._process,) = started
        self._unsent = [marks]

    def compile(self, grammar: str, seconds: float) -> str | None:
        """Compile a grammar. Return the reason if it is wrong. Raises ValueError if that takes more than `seconds` of
        CPU time, or if the process ends."""
        try:
            for message in (*self._unsent, (grammar, seconds)):
                self._connection.send(message)
            self._unsent = []
            if not self._connection.poll(seconds + WAITING_SECONDS):
                raise ValueError(f"the grammar was not compiled in {seconds + WAITING_SECONDS:g} seconds; try again")
            error: str | None = self._connection.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            if status == -signal.SIGPROF:
                message = f"the grammar takes more than {seconds:g} seconds of CPU time to compile; simplify it"
                raise ValueError(message) from None
            how = processes.describe_exit(status)
            raise ValueError(f"the process that compiled the grammar {how}; simplify the grammar") from None
        return error

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Compile grammars until the other end of the socket closes."""
    processes.end_with_parent()
    os.nice(NICENESS)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process when its CPU time is over
    if sys.platform == "linux":
        import resource  # which Windows lacks

        if resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    with Connection(int(sys.argv[-1])) as connection:
        tokens = connection.recv().tokens()
        while True:
            try:
                grammar, seconds = connection.recv()
            except EOFError:
                return
            error = None
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                compile_grammar(tokens, grammar)
            except ValueError as wrong:
                error = str(wrong)
            connection.send(error)


if __name__ == "__main__":
    main()
