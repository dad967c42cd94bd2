"""Fleet: several engines with the same weights, which a trainer uses as one Generator.

    gen = RemoteGenerator(["http://host1:5678", "http://host2:5678"])  # a Fleet

This module does not import torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Generator as PyGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastgen.engine.prompt_scores import pair_scores
from fastgen.option import takes_fields_of
from fastgen.processes.errors import DepartedError
from fastgen.request import Event, Params, Prompt, RequestOutput, SamplingParams
from fastgen.rl.http import POLL_SECONDS, Connections, UnavailableError
from fastgen.rl.remote import SCORED, RemoteGenerator, RemoteGeneratorOptions, Sent
from fastgen.rl.router import Router, prefix_keys

if TYPE_CHECKING:
    from torch import Tensor

    from fastgen.rl.gathering import Gathering

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0  # interval of attempts to reach an engine that is out of service
LOST = (ConnectionError, UnavailableError, DepartedError)  # errors of an engine that has ended
TAGS = ("weights", "kv_cache")

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
        return self.remote._weight_state()


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


class Fleet(RemoteGenerator):
    """Engines with the same weights, each a `fgserve --rollout`; `RemoteGenerator([url, ...])` makes one.

    Requests. Each goes to the least loaded engine, or to one that has the beginning of its prompt in its prefix cache
    (router.py). If an engine ends, its requests are sent to the others, from their beginning: each request has exactly
    one output.

    Weights. An update goes to all engines at the same time, and no request is sent meanwhile. Only engines with the
    version of the last update serve requests. One that has ended is tried once per second. When it answers again, it
    gets the weights of the last update before it serves, if these came from a folder or `keep_copy` is set; otherwise
    it stays out of service until the next update of all weights.

    A thread looks for engines that have ended as long as there are any, until `close`.
    """

    @takes_fields_of(RemoteGeneratorOptions)
    def __init__(self, options: RemoteGeneratorOptions) -> None:
        options.check()
        given = [options.url] if isinstance(options.url, str) else list(options.url)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"url is {options.url!r}; give one address or several different ones")
        self._prepare(options)
        self._given = {url: self._remote(url) for url in given}
        self._engines: list[Engine] = []
        self._made = 0  # number of engines so far
        self._router = Router()
        self._version: int | None = None  # None: no engine was reached yet
        self._made_updates: list[Update] | None = []  # those that lead to the current weights; None: no copy
        self._changed = threading.Condition()  # guards all of the above
        self._updating = self._closed = self._paused = False
        self._asleep = set[str]()
        self._updates = threading.Lock()  # held by what changes the weights of engines
        self._watcher: threading.Thread | None = None

    def _remote(self, url: str) -> RemoteGenerator:
        return RemoteGenerator(**{**vars(self._options), "url": url, "ready_timeout": 0})

    # ------------------------------------------------------------------------------------ requests

    def _open(self) -> int:
        self._begin()
        return self._options.max_requests * len(self._engines)

    def _complete(self, sent: Sent, connections: Connections) -> RequestOutput:
        keys, samples = prefix_keys(sent.request.prompt), _samples(sent.request.params)
        return self._ask_any(lambda remote: remote._complete(sent, connections), keys, samples, connections)

    def _abort(self, keys: list[str]) -> None:
        self._all(lambda remote: remote._abort(keys))

    def _events(self, body: dict[str, Any], id: str | int) -> PyGenerator[Event, None, None]:
        """Yield the events of a request by one engine. Raises ConnectionError if it ends."""
        self._begin()
        samples = _samples(body["params"])
        with self._engine_for(prefix_keys(body["prompt"]), samples, Connections()) as engine:
            yield from engine.remote._events(body, id)

    def score(
        self, sequences: Iterable[Prompt], start: int | Sequence[int] = 0, temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the logprobs of given tokens, computed by all engines; see `Generator.score`."""
        prompts, starts = pair_scores(sequences, start, temperature)
        self._begin()

        def score(first: int) -> list[list[float]]:
            some = slice(first, first + SCORED)
            count = len(prompts[some])
            return self._ask_any(
                lambda remote: remote.score(prompts[some], starts[some], temperature), [], count, Connections()
            )

        with ThreadPoolExecutor(len(self._engines), "fastgen-fleet") as pool:
            return [row for rows in pool.map(score, range(0, len(prompts), SCORED)) for row in rows]

    def _ask_any(
        self, call: Callable[[RemoteGenerator], Result], keys: list[int], samples: int, connections: Connections
    ) -> Result:
        """Return the result of a call of one engine. If the engine ends, the next one is called. Raises ConnectionError
        if none is left. keys, samples: see `Router.choose`. connections: see RemoteGenerator."""
        while True:
            with suppress(LostError), self._engine_for(keys, samples, connections) as engine:
                return call(engine.remote)

    @contextmanager
    def _engine_for(self, keys: list[int], samples: int, connections: Connections) -> Iterator[Engine]:
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
                self._router.leave(engine.number, samples)
                self._changed.notify_all()

    def _admit(self, keys: list[int], samples: int, connections: Connections) -> Engine:
        """Wait until an engine may serve a request, and return it. Raises ConnectionError if no engine is left."""
        deadline = time.monotonic() + self._options.timeout
        with self._changed:
            while not connections.ended:
                serving = self._serving()
                free = {engine.number: engine for engine in serving if engine.running < self._options.max_requests}
                if free and not self._updating:
                    engine = free[self._router.choose(keys, samples, free)]
                    engine.running += 1
                    return engine
                if serving or self._updating:
                    deadline = time.monotonic() + self._options.timeout
                elif time.monotonic() > deadline or all(engine.answers for engine in self._engines):
                    raise self._nobody()
                self._changed.wait(PROBE_SECONDS)
        raise ConnectionError("the stream was closed")

    def _serving(self) -> list[Engine]:
        return [engine for engine in self._engines if engine.serves]

    def _nobody(self) -> ConnectionError:
        reasons = [f"{engine.url}: {engine.trouble}" for engine in self._engines]
        return ConnectionError(f"no engine is left: {'; '.join(reasons)}")

    # ------------------------------------------------------------------------------------ engines that come and go

    def _begin(self) -> None:
        """Reach the engines for the first time. Raises ConnectionError if none of them answers."""
        with self._updates:
            if self._version is not None:
                return
            states = self._await_engines()
            if all(isinstance(state, Exception) for state in states.values()):
                for engine, state in states.items():
                    engine.trouble = str(state)
                raise self._nobody()
            self._version = max(state["weight_version"] for state in states.values() if isinstance(state, dict))
            for engine, state in states.items():
                self._judge(engine, state)

    def _await_engines(self) -> dict[Engine, Any]:
        """Wait until all engines are ready, or `ready_timeout` has passed. Return {engine: its state or error}."""
        begun = time.monotonic()
        while True:
            self._find()
            states = _each(self._engines, Engine.state)
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
            listed = _tried(remote._engine_urls)
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
                engine.serves = version == self._version and not state["torn"]
                engine.trouble = f"its weights have version {version} instead of {self._version}; call update_weights"
            if not engine.serves:
                self._router.forget([engine.number])
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
                resting = self._paused or self._asleep
            if not resting:
                for engine in lost:
                    self._restore(engine)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, PROBE_SECONDS)
            self._find()

    def _restore(self, engine: Engine) -> None:
        """Give a lost engine the current weights if it answers, and let it serve."""
        state = _tried(engine.state)
        if isinstance(state, Exception):
            return self._judge(engine, state)
        with self._updates:
            if self._closed or engine.serves:
                return
            with suppress(*LOST):
                engine.remote.close()  # the weight group of the engine that has ended
            current = state["weight_version"] == self._version and not state["torn"]
            if self._made_updates and not current:
                log.info("%s answers again and gets the weights of version %s", engine.url, self._version)
                error = _tried(self._update_again, engine.remote)
                state = error if isinstance(error, Exception) else _tried(engine.state)
            self._judge(engine, state)

    def _update_again(self, remote: RemoteGenerator) -> None:
        """Make the updates that lead to the current weights."""
        assert self._made_updates is not None
        assert self._version is not None
        last = len(self._made_updates) - 1
        for place, update in enumerate(self._made_updates):
            # A version must differ from the previous one, and the last update sets the current one.
            update.make(remote, update.source, self._version + last - place, "abort")
        remote.close()  # the next update may send from another device

    # ------------------------------------------------------------------------------------ weights

    def update_weights(
        self,
        named: Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path,
        version: int | None = None,
        partial: bool = False,
        in_flight: str = "error",
    ) -> int | None:
        """Replace the weights of all engines, and return their version; see `RemoteGenerator.update_weights`. DTensors
        are gathered once. No request is sent during an update.

        An engine that ends during the update is lost, and the update goes on. If engines refuse it, the first of their
        errors is raised; those that took it serve with the new version, and the others do not serve.
        """
        kind = "some" if partial else "all"

        def make(remote: RemoteGenerator, named: Any, after: int, in_flight: str) -> int | None:
            return remote.update_weights(named, after, partial, in_flight)

        if isinstance(named, str | Path):
            return self._update(Update(kind, make, str(Path(named).resolve())), None, version, in_flight)
        return self._gather(Update(kind, make), named, version, in_flight)

    def update_adapter(
        self,
        named: Mapping[str, Any] | Iterable[tuple[str, Any]] | None,
        config: Any = None,
        version: int | None = None,
        in_flight: str = "error",
    ) -> int | None:
        """Merge a LoRA adapter into the weights of all engines; see `RemoteGenerator.update_adapter` and, for engines
        that end, `update_weights`."""

        def make(remote: RemoteGenerator, named: Any, after: int, in_flight: str) -> int | None:
            return remote.update_adapter(named, config, after, in_flight)

        if named is None:
            return self._update(Update("adapter", make), None, version, in_flight)
        return self._gather(Update("adapter", make), named, version, in_flight)

    def _gather(self, update: Update, named: Any, version: int | None, in_flight: str) -> int | None:
        """Update all engines from tensors, which are gathered once."""
        from fastgen.model.deltas import packed_items
        from fastgen.rl.gathering import Gathering

        tensors = packed_items(named)
        if not tensors:
            raise ValueError("no tensors are given")
        gathering = Gathering(tensors, self._options.keep_copy and self._is_sender())
        try:
            return self._update(update, gathering, version, in_flight) if self._is_sender() else None
        finally:
            gathering.run()  # other ranks need this one to gather, also after an error

    def _update(self, update: Update, gathering: Gathering | None, version: int | None, in_flight: str) -> int:
        """Update all engines at the same time. gathering: the tensors, which this thread gathers meanwhile; None: the
        source of `update`."""
        self._begin()
        with self._updates, self._held(in_flight):
            assert self._version is not None
            after = self._version + 1 if version is None else version
            complete = update.kind == "all"
            engines = [engine for engine in self._engines if engine.serves or (engine.answers and complete)]
            if not engines:
                raise self._nobody()
            senders = {} if gathering is None else {engine: gathering.join() for engine in engines}

            def make(engine: Engine) -> int | None:
                if engine not in senders:
                    return update.make(engine.remote, update.source, after, in_flight)
                try:
                    return update.make(engine.remote, senders[engine].named, after, in_flight)
                finally:
                    senders[engine].leave()

            found = _each(engines, make, None if gathering is None else gathering.run)
            if any(isinstance(result, int) for result in found.values()):
                self._version = after
                if gathering is None:
                    self._note(update)
                else:
                    self._note(None if gathering.copies is None else replace(update, source=gathering.copies))
                self._router.forget()
            return self._settle(found, after)

    @contextmanager
    def _held(self, in_flight: str) -> Iterator[None]:
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

    def _settle(self, found: dict[Engine, Any], after: int) -> int:
        """Let those engines serve that have the weights of the version `after`, and return it. found: {engine: the
        result of its update, or an error}. Raises the first error that is not the loss of an engine."""
        for engine in list(self._engines):
            result = found.get(engine, UnavailableError(engine.trouble))
            if isinstance(result, LOST):
                self._lose(engine, result)
            elif isinstance(result, Exception):
                self._judge(engine, _tried(engine.state))
            else:
                self._judge(engine, {"weight_version": after, "torn": False})
        errors = [result for result in found.values() if isinstance(result, Exception)]
        refused = [error for error in errors if not isinstance(error, LOST)]
        if refused or len(errors) == len(found):
            raise (refused or errors)[0]
        return after

    @property
    def weight_version(self) -> int:
        """Version of the weights of all engines that serve, as `update_weights` returns it."""
        self._begin()
        assert self._version is not None
        return self._version

    # ------------------------------------------------------------------------------------ states

    def pause(self) -> None:
        """Run no steps until `resume`. Running requests stay as they are, and new ones wait."""
        self._paused = True
        self._all(RemoteGenerator.pause)

    def resume(self) -> None:
        """Run steps again."""
        self._all(RemoteGenerator.resume)
        self._paused = False

    def sleep(self, tags: str | Iterable[str] | None = None, keep_weights: bool = True) -> int:
        """Give device memory of all engines back, and return the number of bytes; see `Generator.sleep`. Engines that
        have ended stay out of service until `wake`."""
        named = _named(tags)
        self._asleep |= named
        return sum(self._all(lambda remote: remote.sleep(named, keep_weights)))

    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Take back the memory that `sleep` gave back."""
        named = _named(tags)
        self._all(lambda remote: remote.wake(named))
        self._asleep -= named

    def close(self) -> None:
        """Close the weight groups, so that another program may open one, and look for lost engines no longer. The
        servers continue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._updates:
            found = _each(self._engines, lambda engine: engine.remote.close())
        for error in found.values():
            if isinstance(error, Exception) and not isinstance(error, LOST):
                raise error

    def _all(self, call: Callable[[RemoteGenerator], Result]) -> list[Result]:
        """Return the results of a call of every engine that serves. Raises the first error that is not the loss of an
        engine, and ConnectionError if none is left."""
        self._begin()
        with self._changed:
            serving = self._serving()
        found = _each(serving, lambda engine: call(engine.remote))
        for engine, result in found.items():
            if isinstance(result, LOST):
                self._lose(engine, result)
            elif isinstance(result, Exception):
                raise result
        results = [result for result in found.values() if not isinstance(result, LOST)]
        if not results:
            raise self._nobody()
        return results


def _samples(params: Params) -> int:
    """Return the number of samples of a request, or 1 if that is wrong, which the engine will say."""
    found = params.n if isinstance(params, SamplingParams) else (params or {}).get("n", 1)
    return found if isinstance(found, int) else 1


def _joined(before: Any, after: Any) -> dict[str, Tensor] | None:
    """Return the tensors in host memory of two updates as one update; None if there are none, or if there are deltas,
    each of which changes a part of a tensor."""
    from fastgen.model.deltas import DELTA

    if not isinstance(before, dict) or not isinstance(after, dict):
        return None
    return None if any(name.endswith(DELTA) for name in (*before, *after)) else {**before, **after}


def _named(tags: str | Iterable[str] | None) -> set[str]:
    return set(TAGS if tags is None else [tags] if isinstance(tags, str) else tags)


def _tried(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call, or its error."""
    try:
        return function(*args)
    except Exception as error:
        return error


def _each(
    engines: Iterable[Engine], function: Callable[[Engine], Any], meanwhile: Callable[[], None] | None = None
) -> dict[Engine, Any]:
    """Call a function of each engine in threads, and another one in this thread. Return {engine: result or error}."""
    with ThreadPoolExecutor(thread_name_prefix="fastgen-fleet") as pool:
        futures = {engine: pool.submit(_tried, function, engine) for engine in engines}
        if meanwhile is not None:
            meanwhile()
        return {engine: future.result() for engine, future in futures.items()}
