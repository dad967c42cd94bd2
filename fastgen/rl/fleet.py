"""Fleet: several engines with the same weights, which a trainer uses as one Generator.

    gen = RemoteGenerator(["http://host1:5678", "http://host2:5678"])  # a Fleet

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.option import takes_fields_of
from fastgen.request import Event, Params, Prompt, RequestOutput, SamplingParams
from fastgen.rl.http import Connections
from fastgen.rl.members import Engine, Members, Update, each_engine
from fastgen.rl.remote import SCORED, RemoteGenerator, RemoteGeneratorOptions, Sent
from fastgen.rl.router import prefix_keys

if TYPE_CHECKING:
    from fastgen.rl.gathering import Gathering

TAGS = ("weights", "kv_cache")


class AllServers:
    """All engines, in the place of the HTTP client of one server."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def post(self, path: str, body: dict[str, Any]) -> None:
        """Post a body to all engines."""
        self._members.call_all(lambda remote: remote._server.post(path, body))


class Fleet(RemoteGenerator):
    """Engines with the same weights, each a `fgserve --rollout`; `RemoteGenerator([url, ...])` makes one.

    Requests. Each goes to the least loaded engine, or to one that has the beginning of its prompt in its prefix cache
    (router.py). If an engine ends, its requests are sent to the others, from their beginning: each request has exactly
    one output.

    Weights. An update goes to all engines at the same time, and no request is sent meanwhile. Only engines with the
    version of the last update serve requests. One that has ended is tried once per second. When it answers again, it
    gets the weights of the last update before it serves, if these came from a folder or `keep_copy` is set; otherwise
    it stays out of service until the next update of all weights.

    A thread looks for engines that have ended as long as there are any, until `close` (members.py).
    """

    @takes_fields_of(RemoteGeneratorOptions)
    def __init__(self, options: RemoteGeneratorOptions) -> None:
        given = [options.url] if isinstance(options.url, str) else list(options.url)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"url is {options.url!r}; give one address or several different ones")
        super().__init__(**vars(options))
        self._members = Members(given, options)
        self._server = AllServers(self._members)
        self._paused, self._asleep = False, set[str]()

    # ------------------------------------------------------------------------------------ requests

    def _open(self) -> int:
        self._members.begin()
        return self._options.max_requests * len(self._members)

    def _complete(self, sent: Sent, connections: Connections) -> RequestOutput:
        keys, samples = prefix_keys(sent.request.prompt), _samples(sent.request.params)
        return self._members.ask_any(lambda remote: remote._complete(sent, connections), keys, samples, connections)

    def _events(self, body: dict[str, Any], id: str | int) -> PyGenerator[Event, None, None]:
        """Yield the events of a request by one engine. Raises ConnectionError if it ends."""
        self._members.begin()
        samples = _samples(body["params"])
        with self._members.engine_for(prefix_keys(body["prompt"]), samples, Connections()) as engine:
            yield from engine.remote._events(body, id)

    def score(
        self, sequences: Iterable[Prompt], start: int | Sequence[int] = 0, temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the logprobs of given tokens, computed by all engines; see `Generator.score`."""
        from fastgen.engine.prompt_scores import pair_scores  # which imports numpy

        prompts, starts = pair_scores(sequences, start, temperature)
        self._members.begin()

        def score(first: int) -> list[list[float]]:
            some = slice(first, first + SCORED)
            count = len(prompts[some])
            return self._members.ask_any(
                lambda remote: remote.score(prompts[some], starts[some], temperature), [], count, Connections()
            )

        with ThreadPoolExecutor(len(self._members), "fastgen-fleet") as pool:
            return [row for rows in pool.map(score, range(0, len(prompts), SCORED)) for row in rows]

    # ------------------------------------------------------------------------------------ weights

    def update_weights(
        self,
        named: Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path,
        version: int | None = None,
        partial: bool = False,
        in_flight: str = "error",
        requantize: bool = False,
    ) -> int | None:
        """Replace the weights of all engines, and return their version; see `RemoteGenerator.update_weights`. DTensors
        are gathered once. No request is sent during an update.

        An engine that ends during the update is lost, and the update goes on. If engines refuse it, the first of their
        errors is raised; those that took it serve with the new version, and the others do not serve.
        """
        kind = "some" if partial else "all"

        def make(remote: RemoteGenerator, named: Any, after: int, in_flight: str) -> int | None:
            return remote.update_weights(named, after, partial, in_flight, requantize)

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
        gathering = Gathering(tensors, self._options.keep_copy and self._sends())
        try:
            return self._update(update, gathering, version, in_flight) if self._sends() else None
        finally:
            gathering.run()  # other ranks need this one to gather, also after an error

    def _update(self, update: Update, gathering: Gathering | None, version: int | None, in_flight: str) -> int:
        """Update all engines at the same time. gathering: the tensors, which this thread gathers meanwhile; None: the
        source of `update`."""
        members = self._members
        members.begin()
        with members.updates, members.held(in_flight):
            assert members.version is not None
            after = members.version + 1 if version is None else version
            complete = update.kind == "all"
            engines = [engine for engine in members if engine.serves or (engine.answers and complete)]
            if not engines:
                raise members.nobody()
            senders = {} if gathering is None else {engine: gathering.join() for engine in engines}

            def make(engine: Engine) -> int | None:
                if engine not in senders:
                    return update.make(engine.remote, update.source, after, in_flight)
                try:
                    return update.make(engine.remote, senders[engine].named, after, in_flight)
                finally:
                    senders[engine].leave()

            found = each_engine(engines, make, None if gathering is None else gathering.run)
            if gathering is None:
                return members.settle(found, after, update)
            return members.settle(
                found, after, None if gathering.copies is None else replace(update, source=gathering.copies)
            )

    @property
    def weight_version(self) -> int:
        """Version of the weights of all engines that serve, as `update_weights` returns it."""
        self._members.begin()
        assert self._members.version is not None
        return self._members.version

    # ------------------------------------------------------------------------------------ states

    def pause(self) -> None:
        """Run no steps until `resume`. Running requests stay as they are, and new ones wait."""
        self._rest(True, self._asleep)
        self._members.call_all(RemoteGenerator.pause)

    def resume(self) -> None:
        """Run steps again."""
        self._members.call_all(RemoteGenerator.resume)
        self._rest(False, self._asleep)

    def _rest(self, paused: bool, asleep: set[str]) -> None:
        """Note the state of the engines. While they are paused or asleep, no lost engine is brought back."""
        self._paused, self._asleep = paused, asleep
        self._members.resting = paused or bool(asleep)

    def sleep(self, tags: str | Iterable[str] | None = None, keep_weights: bool = True) -> int:
        """Give device memory of all engines back, and return the number of bytes; see `Generator.sleep`. Engines that
        have ended stay out of service until `wake`."""
        named = _named(tags)
        self._rest(self._paused, self._asleep | named)
        return sum(self._members.call_all(lambda remote: remote.sleep(named, keep_weights)))

    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Take back the memory that `sleep` gave back."""
        named = _named(tags)
        self._members.call_all(lambda remote: remote.wake(named))
        self._rest(self._paused, self._asleep - named)

    def close(self) -> None:
        """Close the weight groups, so that another program may open one, and look for lost engines no longer. The
        servers continue."""
        self._members.close()


def _samples(params: Params) -> int:
    """Return the number of samples of a request, or 1 if that is wrong, which the engine will say."""
    found = params.n if isinstance(params, SamplingParams) else (params or {}).get("n", 1)
    return found if isinstance(found, int) else 1


def _named(tags: str | Iterable[str] | None) -> set[str]:
    return set(TAGS if tags is None else [tags] if isinstance(tags, str) else tags)


RemoteGenerator._of_several = Fleet
