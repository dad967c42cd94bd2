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
from typing import ParamSpec, TypeVar

from fastgen.processes.errors import DepartedError
from fastgen.rl.engine import RemoteEngine, WeightStatus
from fastgen.rl.http import POLL_SECONDS, Connections, ServerClient, UnavailableError
from fastgen.rl.options import RemoteGeneratorOptions
from fastgen.rl.router import Router
from fastgen.rl.weights import ADAPTER, Named, RemoteUpdate

log = logging.getLogger(__name__)

AT_START = 0  # version of the weights with which an engine starts
PROBE_SECONDS = 1.0  # interval of attempts to reach an engine that is out of service
LOST = (ConnectionError, UnavailableError, DepartedError)  # errors of an engine that has ended

Result = TypeVar("Result")
Given = ParamSpec("Given")


class LostError(ConnectionError):
    """Error of a request whose engine has ended."""


class StaleError(ConnectionError):
    """Error of a request whose answer is of no use: its engine has the weights of the checkpoint, since it has ended
    and was started again, or it was lost and ended the request when it came back."""


@dataclass(eq=False)
class Member:
    """An engine of a fleet. number: its number in the router. serves: True while it gets requests. answers: True if it
    could be reached when it was last tried. running: number of its requests of this fleet. losses: number of times that
    it ceased to serve. trouble: why it does not serve."""

    number: int
    url: str
    engine: RemoteEngine
    serves: bool = False
    answers: bool = False
    running: int = 0
    losses: int = 0
    trouble: str = "it was not reached yet"


@dataclass(frozen=True)
class Turn:
    """A request on an engine. version, losses: version of the weights, and `Member.losses`, when it was sent."""

    member: Member
    version: int
    losses: int

    def check(self, version: int) -> None:
        """Raise StaleError if `version`, of the weights that the engine used, is that of a start, although the fleet
        had later weights when this request was sent."""
        if version == AT_START != self.version:
            raise StaleError(f"its weights have version {version} instead of {self.version}")

    def check_kept(self) -> None:
        """Raise StaleError if the engine was lost meanwhile: it ends its requests when it gets the current weights."""
        if self.losses != self.member.losses:
            raise StaleError("it was lost, and has ended its requests")


class Members:
    """The engines of a fleet.

    given: addresses of engines, or of replicas. version: version of the current weights, after `begin`.
    updates: lock for what changes the weights of engines. resting: what is paused or asleep, such as "kv_cache"; until
    it is empty, engines that have ended are not looked for.

    Threads may share it. A thread looks for engines that have ended as long as there are any, until `close`.
    """

    def __init__(self, given: Iterable[str], options: RemoteGeneratorOptions) -> None:
        self._options = replace(options, ready_timeout=0)
        self._ready_timeout = options.ready_timeout
        self._given = {url: ServerClient(url, options.api_key, options.model, 0) for url in given}
        self._members: list[Member] = []
        self._made = 0  # number of members so far
        self._router = Router()
        self.version, self._begun = 0, False
        self._made_updates: list[RemoteUpdate] | None = []  # those that lead to the current weights; None: no copy
        self._changed = threading.Condition()  # guards all of the above
        self.resting = set[str]()
        self._updating = self._closed = False
        self.updates = threading.Lock()
        self._watcher: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members))

    # ------------------------------------------------------------------------------------ requests

    def ask_any(
        self, call: Callable[[Turn], Result], keys: list[int], samples: int, connections: Connections
    ) -> Result:
        """Return the result of a call of one engine. If the engine ends, or is stale, the next one is called. Raises
        ConnectionError if none is left. keys, samples: see `Router.choose`. connections: see Engines."""
        while True:
            with suppress(LostError), self.turn(keys, samples, connections) as turn:
                return call(turn)

    @contextmanager
    def turn(self, keys: list[int], samples: int, connections: Connections) -> Iterator[Turn]:
        """Choose the engine of a request within the block. Raises LostError if it ends or is stale."""
        turn = self._admit(keys, samples, connections)
        member = turn.member
        try:
            yield turn
        except LOST as error:
            if connections.ended:
                raise
            self._lose(member, error)
            raise LostError(f"{member.url} has ended: {error}") from None
        finally:
            with self._changed:
                member.running -= 1
                self._router.leave(member.number, samples)
                self._changed.notify_all()

    def _admit(self, keys: list[int], samples: int, connections: Connections) -> Turn:
        """Wait until an engine may serve a request, and return its turn. Raises ConnectionError if no engine is
        left."""
        deadline = time.monotonic() + self._options.timeout
        with self._changed:
            while not connections.ended:
                serving = self._serving()
                free = {member.number: member for member in serving if member.running < self._options.max_requests}
                if free and not self._updating:
                    member = free[self._router.choose(keys, samples, free)]
                    member.running += 1
                    return Turn(member, self.version, member.losses)
                if serving or self._updating:
                    deadline = time.monotonic() + self._options.timeout
                elif time.monotonic() > deadline or not self._may_return():
                    raise self._nobody()
                self._changed.wait(PROBE_SECONDS)
        raise ConnectionError("the stream was closed")

    def _may_return(self) -> bool:
        """Return whether an engine that does not serve may serve again before the next update."""
        restores = bool(self._made_updates) and not self.resting
        return restores or not all(member.answers for member in self._members)

    def _serving(self) -> list[Member]:
        return [member for member in self._members if member.serves]

    def _nobody(self) -> ConnectionError:
        reasons = [f"{member.url}: {member.trouble}" for member in self._members]
        return ConnectionError(f"no engine is left: {'; '.join(reasons)}")

    # ------------------------------------------------------------------------------------ engines that come and go

    def begin(self) -> None:
        """Reach the engines for the first time. Raises ConnectionError if none of them answers."""
        if self._begun:  # also while `updates` is held, since requests and other calls do not wait for an update
            return
        with self.updates:
            if self._begun:
                return
            states = self._await_members()
            versions = [state["weight_version"] for state in states.values() if not isinstance(state, Exception)]
            if not versions:
                for member, state in states.items():
                    member.trouble = str(state)
                raise self._nobody()
            self.version = max(versions)
            if self.version != AT_START:  # from updates that this object did not make
                self._made_updates = None
            for member, state in states.items():
                self._judge(member, state)
            self._begun = True

    def _await_members(self) -> dict[Member, WeightStatus | Exception]:
        """Wait until all engines are ready, or `ready_timeout` has passed. Return {member: its state or error}."""
        begun = time.monotonic()
        while True:
            self._find()
            states = of_each(self._members, lambda member: member.engine.state())
            late = [state for state in states.values() if isinstance(state, LOST)]
            if not late or time.monotonic() - begun > self._ready_timeout:
                return states
            log.info("waiting for %d of %d engines: %s", len(late), len(states), late[0])
            time.sleep(POLL_SECONDS)

    def _find(self) -> None:
        """Add the engines at the given addresses. The address of replicas lists the addresses of its engines, which
        change when Ray replaces one."""
        urls, old_urls = list[str](), [member.url for member in self._members]
        for url, client in self._given.items():
            listed = tried(client.get, "/engines")
            if not isinstance(listed, Exception):
                urls += listed["urls"]
            elif isinstance(listed, LOST) and old_urls and url not in old_urls:  # replicas, whose address is dead
                urls += old_urls
            else:
                urls.append(url)
        with self._changed:
            gone = [member for member in self._members if not member.serves and member.url not in urls]
            for url in dict.fromkeys(urls):
                if url not in old_urls:
                    if gone:  # one that has ended stays until another one takes its place, since it is looked for
                        self._members.remove(gone.pop())
                    self._members.append(Member(self._made, url, RemoteEngine(url, self._options)))
                    self._made += 1

    def _judge(self, member: Member, state: WeightStatus | Exception) -> None:
        """Let an engine serve if it has the current weights. state: of its weights, or the error of asking."""
        with self._changed:
            served, member.answers = member.serves, not isinstance(state, LOST)
            if isinstance(state, Exception):
                member.serves, member.trouble = False, str(state)
            else:
                version, torn = state["weight_version"], state["torn"]
                member.serves = version == self.version and not torn
                wrong = "are torn" if torn else f"have version {version} instead of {self.version}"
                member.trouble = f"its weights {wrong}; call update_weights"
            if not member.serves:
                member.losses += served  # what brings it back ends its requests
                self._router.forget([member.number])
                self._watch()
            self._changed.notify_all()

    def _lose(self, member: Member, error: Exception) -> None:
        """Send no more requests to an engine that does not answer."""
        with self._changed:
            if member.serves:
                log.warning("%s is lost: %s", member.url, error)
        self._judge(member, tried(member.engine.state) if isinstance(error, StaleError) else error)

    def _watch(self) -> None:
        """Start the thread that looks for lost engines, if it does not run. `_changed` must be held."""
        if self._watcher is None and not self._closed:
            self._watcher = threading.Thread(target=self._bring_back, name="fastgen-fleet", daemon=True)
            self._watcher.start()

    def _bring_back(self) -> None:
        """Try lost engines until all serve."""
        while True:
            with self._changed:
                lost = [member for member in self._members if not member.serves]
                if self._closed or not lost:
                    self._watcher = None
                    return
            if not self.resting:
                for member in lost:
                    self._restore(member)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, PROBE_SECONDS)
            self._find()

    def _restore(self, member: Member) -> None:
        """Give a lost engine the current weights if it answers, and let it serve."""
        state = tried(member.engine.state)
        if isinstance(state, Exception):
            return self._judge(member, state)
        with self.updates:
            if self._closed or member.serves:
                return
            tried(member.engine.close)  # the weight group of the engine that has ended
            current = state["weight_version"] == self.version and not state["torn"]
            if self._made_updates and not current:
                log.info("%s answers again and gets the weights of version %s", member.url, self.version)
                error = tried(self._update_again, member.engine, self._made_updates)
                state = error if isinstance(error, Exception) else tried(member.engine.state)
            self._judge(member, state)

    def _update_again(self, engine: RemoteEngine, updates: list[RemoteUpdate]) -> None:
        """Make the updates that lead to the current weights."""
        for left, update in zip(reversed(range(len(updates))), updates, strict=True):
            # A version must differ from the previous one, and the last update sets the current one.
            engine.update(update.with_options(version=self.version + left, in_flight="abort"))
        engine.close()  # the next update may send from another device

    # ------------------------------------------------------------------------------------ all engines

    def call_all(self, call: Callable[[RemoteEngine], Result]) -> list[Result]:
        """Return the results of a call of every engine that serves. Raises the first error that is not the loss of an
        engine, and ConnectionError if none is left."""
        self.begin()
        with self._changed:
            serving = self._serving()
        answers = of_each(serving, lambda member: call(member.engine))
        for member, result in answers.items():
            if isinstance(result, LOST):
                self._lose(member, result)
            elif isinstance(result, Exception):
                raise result
        results = [result for result in answers.values() if not isinstance(result, Exception)]
        if not results:
            raise self._nobody()
        return results

    @contextmanager
    def held(self, in_flight: str) -> Iterator[None]:
        """Let no request begin within the block. Raises ValueError if requests run and `in_flight` does not allow it,
        before any engine is updated."""
        with self._changed:
            running = sum(member.running for member in self._members)
            if running and in_flight == "error":
                raise ValueError(f"requests are in flight ({running}); give in_flight='keep', 'recompute' or 'abort'")
            self._updating = True
        try:
            yield
        finally:
            with self._changed:
                self._updating = False
                self._changed.notify_all()

    def that_take(self, update: RemoteUpdate) -> list[Member]:
        """Return the engines that take an update: those that serve, and with all weights also others that answer.
        Raises ConnectionError if there are none."""
        if not update.is_complete:  # an engine that was started again would hide its other weights under our version
            with self._changed:
                serving = self._serving()
            for member, state in of_each(serving, lambda member: member.engine.state()).items():
                if isinstance(state, Exception) or state["weight_version"] == AT_START != self.version:
                    self._judge(member, state)
        taking = [member for member in self if member.serves or (member.answers and update.is_complete)]
        if not taking:
            raise self._nobody()
        return taking

    def _note(self, update: RemoteUpdate | None) -> None:
        """Remember an update for engines that come back. None: there is no copy of its tensors."""
        made = self._made_updates
        if update is not None and update.is_complete:
            self._made_updates = [update]
        elif update is None or made is None:
            self._made_updates = None
        elif update.route == ADAPTER:
            self._made_updates = [*(each for each in made if each.route != ADAPTER), update]
        elif made and (joined := _joined(made[-1], update)) is not None:
            self._made_updates = [*made[:-1], replace(made[-1], source=joined)]
        else:
            self._made_updates = [*made, update]

    def settle(
        self, found: dict[Member, int | Exception | None], update: RemoteUpdate, copy: RemoteUpdate | None
    ) -> int:
        """Let those engines serve that have the weights of an update, and return their version. Raises the first error
        that is not the loss of an engine.

        found: {member: the result of its update, or an error}. copy: the update for engines that come back, with
        tensors in host memory or the path of a folder; None: there is no copy of its tensors.
        """
        after: int = update.options["version"]
        errors = [result for result in found.values() if isinstance(result, Exception)]
        if len(errors) < len(found):
            self.version = after
            self._note(copy)
            self._router.forget()
        for member in self:
            result = found.get(member, UnavailableError(member.trouble))
            if isinstance(result, LOST):
                self._lose(member, result)
            elif isinstance(result, Exception):
                self._judge(member, tried(member.engine.state))
            else:
                self._judge(member, WeightStatus(weight_version=after, torn=False))
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
            results = of_each(self._members, lambda member: member.engine.close())
        for error in results.values():
            if isinstance(error, Exception) and not isinstance(error, LOST):
                raise error


def _joined(before: RemoteUpdate, after: RemoteUpdate) -> Named | None:
    """Return the tensors in host memory of an update and of a partial one after it as those of one update; None if they
    cannot be one. Deltas are written into the tensors of `before`, so that their number does not matter."""
    from fastgen.model.deltas import DELTA, Delta
    from fastgen.model.weights import text_name

    if before.route != after.route or not isinstance(before.source, list) or not isinstance(after.source, list):
        return None
    joined = {text_name(name): tensor for name, tensor in before.source}
    for name, tensor in ((text_name(name), tensor) for name, tensor in after.source):
        whole = name.removesuffix(DELTA)
        if name == whole:
            joined.pop(name + DELTA, None)
            joined[name] = tensor
        elif whole in joined:
            joined[whole] = Delta(tensor).applied_to(joined[whole])
        elif before.is_complete:  # which takes no delta
            return None
        else:
            joined[name] = Delta(joined[name]).then(Delta(tensor)).packed if name in joined else tensor
    return list(joined.items())


def tried(function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result | Exception:
    """Return the result of a call, or its error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def of_each(
    members: Iterable[Member], function: Callable[[Member], Result], meanwhile: Callable[[], None] | None = None
) -> dict[Member, Result | Exception]:
    """Call a function of each member in a separate thread, and another one in this thread. Return {member: result or
    error}."""
    each = list(members)
    with ThreadPoolExecutor(max(1, len(each)), "fastgen-fleet") as pool:  # since senders wait for each other
        futures = {member: pool.submit(tried, function, member) for member in each}
        if meanwhile is not None:
            meanwhile()
        return {member: future.result() for member, future in futures.items()}
