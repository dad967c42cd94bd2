"""Members: the engines of a fleet. Who serves, who gets the next request, and who comes back with which weights.

This module does not import torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastgen.processes.errors import DepartedError
from fastgen.rl.http import POLL_SECONDS, Connections, UnavailableError
from fastgen.rl.remote import RemoteGenerator, RemoteGeneratorOptions
from fastgen.rl.router import Router

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0  # interval of attempts to reach an engine that is out of service
LOST = (ConnectionError, UnavailableError, DepartedError)  # errors of an engine that has ended

Result = TypeVar("Result")


class LostError(ConnectionError):
    """Error of a request whose engine has ended."""


@dataclass(eq=False)
class Engine:
    """An engine of a fleet. number: its number in the router. serves: True while it gets requests. answers: True if it
    could be reached when it was last tried. running: number of its requests of this fleet. trouble: why it does not
    serve."""

    number: int
    url: str
    remote: RemoteGenerator
    serves: bool = False
    answers: bool = False
    running: int = 0
    trouble: str = "it was not reached yet"

    def state(self) -> dict[str, Any]:
        """Return its `weight_version`, and whether its weights are `torn` by an update that failed."""
        state: dict[str, Any] = self.remote._server.get("/weight_version")
        return state


@dataclass(frozen=True)
class Update:
    """An update of weights. kind: "all" or "some" of the weights, or "adapter".

    make: function that makes it in one engine; its arguments are the engine's RemoteGenerator, the source, the version
        of the new weights, and `in_flight`.
    source: tensors in host memory or the path of a folder; None: no tensors.
    """

    kind: str
    make: Callable[[RemoteGenerator, Any, int, str], int | None]
    source: dict[str, Tensor] | str | None = None


class Members:
    """The engines of a fleet.

    given: addresses of engines, or of replicas. router: see Router. version: version of the current weights; None
    until an engine was reached. updates: lock for what changes the weights of engines.
    resting: True while engines that have ended are not looked for.

    Threads may share it. A thread looks for engines that have ended as long as there are any, until `close`.
    """

    def __init__(self, given: Iterable[str], options: RemoteGeneratorOptions) -> None:
        self._options = options
        self._given = {url: self._remote(url) for url in given}
        self._engines: list[Engine] = []
        self._made = 0  # number of engines so far
        self.router = Router()
        self.version: int | None = None
        self._made_updates: list[Update] | None = []  # those that lead to the current weights; None: no copy
        self._changed = threading.Condition()  # guards all of the above
        self.resting = self._updating = self._closed = False
        self.updates = threading.Lock()
        self._watcher: threading.Thread | None = None

    def _remote(self, url: str) -> RemoteGenerator:
        return RemoteGenerator(**{**vars(self._options), "url": url, "ready_timeout": 0})

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines))

    # ------------------------------------------------------------------------------------ requests

    def ask_any(
        self, call: Callable[[RemoteGenerator], Result], keys: list[int], samples: int, connections: Connections
    ) -> Result:
        """Return the result of a call of one engine. If the engine ends, the next one is called. Raises ConnectionError
        if none is left. keys, samples: see `Router.choose`. connections: see RemoteGenerator."""
        while True:
            with suppress(LostError), self.engine_for(keys, samples, connections) as engine:
                return call(engine.remote)

    @contextmanager
    def engine_for(self, keys: list[int], samples: int, connections: Connections) -> Iterator[Engine]:
        """Choose the engine of a request within the block. Raises LostError if it ends."""
        engine = self._admit(keys, samples, connections)
        try:
            yield engine
        except LOST as error:
            if connections.ended:
                raise
            self._lose(engine, error)
            raise LostError(f"{engine.url} has ended: {error}") from None
        finally:
            with self._changed:
                engine.running -= 1
                self.router.leave(engine.number, samples)
                self._changed.notify_all()

    def _admit(self, keys: list[int], samples: int, connections: Connections) -> Engine:
        """Wait until an engine may serve a request, and return it. Raises ConnectionError if no engine is left."""
        deadline = time.monotonic() + self._options.timeout
        with self._changed:
            while not connections.ended:
                serving = self.serving()
                free = {engine.number: engine for engine in serving if engine.running < self._options.max_requests}
                if free and not self._updating:
                    engine = free[self.router.choose(keys, samples, free)]
                    engine.running += 1
                    return engine
                if serving or self._updating:
                    deadline = time.monotonic() + self._options.timeout
                elif time.monotonic() > deadline or all(engine.answers for engine in self._engines):
                    raise self.nobody()
                self._changed.wait(PROBE_SECONDS)
        raise ConnectionError("the stream was closed")

    def serving(self) -> list[Engine]:
        return [engine for engine in self._engines if engine.serves]

    def nobody(self) -> ConnectionError:
        reasons = [f"{engine.url}: {engine.trouble}" for engine in self._engines]
        return ConnectionError(f"no engine is left: {'; '.join(reasons)}")

    # ------------------------------------------------------------------------------------ engines that come and go

    def begin(self) -> None:
        """Reach the engines for the first time. Raises ConnectionError if none of them answers."""
        with self.updates:
            if self.version is not None:
                return
            states = self._await_engines()
            if all(isinstance(state, Exception) for state in states.values()):
                for engine, state in states.items():
                    engine.trouble = str(state)
                raise self.nobody()
            self.version = max(state["weight_version"] for state in states.values() if isinstance(state, dict))
            for engine, state in states.items():
                self._judge(engine, state)

    def _await_engines(self) -> dict[Engine, Any]:
        """Wait until all engines are ready, or `ready_timeout` has passed. Return {engine: its state or error}."""
        begun = time.monotonic()
        while True:
            self._find()
            states = each_engine(self._engines, Engine.state)
            late = [state for state in states.values() if isinstance(state, LOST)]
            if not late or time.monotonic() - begun > self._options.ready_timeout:
                return states
            log.info("waiting for %d of %d engines: %s", len(late), len(states), late[0])
            time.sleep(POLL_SECONDS)

    def _find(self) -> None:
        """Add the engines at the given addresses. The address of replicas lists the addresses of its engines, which
        change when Ray replaces one."""
        urls = list[str]()
        for url, remote in self._given.items():
            listed = tried(_engine_urls, remote)
            if isinstance(listed, Exception) and any(engine.url == url for engine in self._engines):
                listed = [url]
            elif isinstance(listed, LOST) and self._engines:  # replicas whose common address does not answer
                listed = [engine.url for engine in self._engines]
            urls += [url] if isinstance(listed, Exception) else listed
        with self._changed:
            gone = [engine for engine in self._engines if not engine.serves and engine.url not in urls]
            for url in urls:
                if all(url != engine.url for engine in self._engines):
                    if gone:  # one that has ended stays until another one takes its place, since it is looked for
                        self._engines.remove(gone.pop())
                    self._engines.append(Engine(self._made, url, self._remote(url)))
                    self._made += 1

    def _judge(self, engine: Engine, state: dict[str, Any] | Exception) -> None:
        """Let an engine serve if it has the current weights. state: see `Engine.state`, or the error of asking."""
        with self._changed:
            engine.answers = not isinstance(state, LOST)
            if isinstance(state, Exception):
                engine.serves, engine.trouble = False, str(state)
            else:
                version = state["weight_version"]
                engine.serves = version == self.version and not state["torn"]
                engine.trouble = f"its weights have version {version} instead of {self.version}; call update_weights"
            if not engine.serves:
                self.router.forget([engine.number])
                self._watch()
            self._changed.notify_all()

    def _lose(self, engine: Engine, error: Exception) -> None:
        """Send no more requests to an engine that does not answer."""
        with self._changed:
            if engine.serves:
                log.warning("%s is lost: %s", engine.url, error)
        self._judge(engine, error)

    def _watch(self) -> None:
        """Start the thread that looks for lost engines, if it does not run. `_changed` must be held."""
        if self._watcher is None and not self._closed:
            self._watcher = threading.Thread(target=self._bring_back, name="fastgen-fleet", daemon=True)
            self._watcher.start()

    def _bring_back(self) -> None:
        """Try lost engines until all serve."""
        while True:
            with self._changed:
                lost = [engine for engine in self._engines if not engine.serves]
                if self._closed or not lost:
                    self._watcher = None
                    return
            if not self.resting:
                for engine in lost:
                    self._restore(engine)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, PROBE_SECONDS)
            self._find()

    def _restore(self, engine: Engine) -> None:
        """Give a lost engine the current weights if it answers, and let it serve."""
        state = tried(engine.state)
        if isinstance(state, Exception):
            return self._judge(engine, state)
        with self.updates:
            if self._closed or engine.serves:
                return
            with suppress(*LOST):
                engine.remote.close()  # the weight group of the engine that has ended
            current = state["weight_version"] == self.version and not state["torn"]
            if self._made_updates and not current:
                log.info("%s answers again and gets the weights of version %s", engine.url, self.version)
                error = tried(self._update_again, engine.remote)
                state = error if isinstance(error, Exception) else tried(engine.state)
            self._judge(engine, state)

    def _update_again(self, remote: RemoteGenerator) -> None:
        """Make the updates that lead to the current weights."""
        assert self._made_updates is not None
        assert self.version is not None
        last = len(self._made_updates) - 1
        for place, update in enumerate(self._made_updates):
            # A version must differ from the previous one, and the last update sets the current one.
            update.make(remote, update.source, self.version + last - place, "abort")
        remote.close()  # the next update may send from another device

    # ------------------------------------------------------------------------------------ all engines

    def call_all(self, call: Callable[[RemoteGenerator], Result]) -> list[Result]:
        """Return the results of a call of every engine that serves. Raises the first error that is not the loss of an
        engine, and ConnectionError if none is left."""
        self.begin()
        with self._changed:
            serving = self.serving()
        found = each_engine(serving, lambda engine: call(engine.remote))
        for engine, result in found.items():
            if isinstance(result, LOST):
                self._lose(engine, result)
            elif isinstance(result, Exception):
                raise result
        results = [result for result in found.values() if not isinstance(result, LOST)]
        if not results:
            raise self.nobody()
        return results

    @contextmanager
    def held(self, in_flight: str) -> Iterator[None]:
        """Let no request begin within the block. Raises ValueError if requests run and `in_flight` does not allow it,
        before any engine is updated."""
        with self._changed:
            running = sum(engine.running for engine in self._engines)
            if running and in_flight == "error":
                raise ValueError(f"{running} requests are in flight; give in_flight='keep', 'recompute' or 'abort'")
            self._updating = True
        try:
            yield
        finally:
            with self._changed:
                self._updating = False
                self._changed.notify_all()

    def _note(self, update: Update | None) -> None:
        """Remember an update for engines that come back. None: there is no copy of its tensors."""
        made = self._made_updates
        if update is not None and update.kind == "all":
            self._made_updates = [update]
        elif update is None or made is None:
            self._made_updates = None
        elif update.kind == "adapter":
            self._made_updates = [*(each for each in made if each.kind != "adapter"), update]
        elif made and (joined := _joined(made[-1].source, update.source)) is not None:
            self._made_updates = [*made[:-1], replace(made[-1], source=joined)]
        else:
            self._made_updates = [*made, update]

    def settle(self, found: dict[Engine, Any], after: int, update: Update | None) -> int:
        """Let those engines serve that have the weights of the version `after`, and return it. Raises the first error
        that is not the loss of an engine.

        found: {engine: the result of its update, or an error}. update: the update, with tensors in host memory or the
        path of a folder, for engines that come back; None: there is no copy of its tensors.
        """
        if any(isinstance(result, int) for result in found.values()):
            self.version = after
            self._note(update)
            self.router.forget()
        for engine in list(self._engines):
            result = found.get(engine, UnavailableError(engine.trouble))
            if isinstance(result, LOST):
                self._lose(engine, result)
            elif isinstance(result, Exception):
                self._judge(engine, tried(engine.state))
            else:
                self._judge(engine, {"weight_version": after, "torn": False})
        errors = [result for result in found.values() if isinstance(result, Exception)]
        refused = [error for error in errors if not isinstance(error, LOST)]
        if refused or len(errors) == len(found):
            raise (refused or errors)[0]
        return after

    def close(self) -> None:
        """Close the weight groups, and look for lost engines no longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self.updates:
            found = each_engine(self._engines, lambda engine: engine.remote.close())
        for error in found.values():
            if isinstance(error, Exception) and not isinstance(error, LOST):
                raise error


def _joined(before: Any, after: Any) -> dict[str, Tensor] | None:
    """Return the tensors in host memory of two updates as one update; None if there are none, or if there are deltas,
    each of which changes a part of a tensor."""
    from fastgen.model.deltas import DELTA

    if not isinstance(before, dict) or not isinstance(after, dict):
        return None
    return None if any(name.endswith(DELTA) for name in (*before, *after)) else {**before, **after}


def _engine_urls(remote: RemoteGenerator) -> list[str]:
    """Return the addresses of the engines if this is the address of replicas; else it raises RuntimeError."""
    return list(remote._server.get("/engines")["urls"])


def tried(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call, or its error."""
    try:
        return function(*args)
    except Exception as error:
        return error


def each_engine(
    engines: Iterable[Engine], function: Callable[[Engine], Any], meanwhile: Callable[[], None] | None = None
) -> dict[Engine, Any]:
    """Call a function of each engine in threads, and another one in this thread. Return {engine: result or error}."""
    with ThreadPoolExecutor(thread_name_prefix="fastgen-fleet") as pool:
        futures = {engine: pool.submit(tried, function, engine) for engine in engines}
        if meanwhile is not None:
            meanwhile()
        return {engine: future.result() for engine, future in futures.items()}
