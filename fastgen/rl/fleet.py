"""Fleet: several engines with the same weights, which a RemoteGenerator of a list of addresses uses like one.

This module does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from collections.abc import Generator as PyGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from fastgen.engine.seeds import seed_of
from fastgen.rl.bodies import samples_of
from fastgen.rl.http import Connections, Json
from fastgen.rl.members import LOST, Member, Members, Turn, of_each
from fastgen.rl.options import RemoteGeneratorOptions
from fastgen.rl.router import prefix_keys
from fastgen.rl.weights import RemoteUpdate

if TYPE_CHECKING:
    from fastgen.rl.gathering import Gathering


class Fleet:
    """Engines with the same weights, each a `fgserve --rollout`. See Engines for the methods.

    Requests. Each goes to the least loaded engine, or to one that has the beginning of its prompt in its prefix cache
    (router.py). If an engine ends, its requests are sent to the others, from their beginning: each request has exactly
    one output.

    A request without a seed gets one from the fleet, since engines with one seed would draw the same samples. It is
    derived from the engines' seeds and the number of the request, so it does not matter which engine draws.

    Weights. An update goes to all engines at the same time, and no request is sent meanwhile. Only engines with the
    version of the last update serve requests. One that has ended is tried once per second. When it answers again, it
    gets the weights of the last update before it serves, if these came from a folder or `keep_copy` is set; otherwise
    it stays out of service until the next update of all weights. An engine may also end and start between two requests;
    its answer with the weights of the checkpoint is thrown away, and the request goes to another engine.

    A thread looks for engines that have ended as long as there are any, until `close` (members.py).
    """

    def __init__(self, urls: Sequence[str], options: RemoteGeneratorOptions) -> None:
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"url is {urls!r}; give one address or several different ones")
        self._options = options
        self.members = Members(urls, options)
        self._seed, self._seeding = b"", threading.Lock()

    # ------------------------------------------------------------------------------------ requests

    def begin(self) -> int:
        self.members.begin()
        return self._options.max_requests * len(self.members)

    def seeded(self, body: Json, number: int, connections: Connections) -> Json:
        params = body["params"] or {}
        if body["resume"] is not None or params.get("seed") is not None:
            return body
        self.members.begin()
        with self._seeding:
            self._seed = self._seed or self.members.ask_any(lambda _: self._draw_seed(), [], 0, connections)
        return {**body, "params": {**params, "seed": seed_of(self._seed, number)}}

    def _draw_seed(self) -> bytes:
        """Return a seed that no other client of these engines has. Each engine adds a number, in the order of their
        addresses, so that clients that begin at the same time, or do not reach all engines, differ."""
        serving = sorted((member for member in self.members if member.serves), key=lambda member: member.url)
        answers = of_each(serving, lambda member: member.engine.fleet_seed()).values()
        seeds = [seed for seed in answers if isinstance(seed, int)]
        for error in answers:
            if isinstance(error, Exception) and (not seeds or not isinstance(error, LOST)):
                raise error
        return repr(seeds).encode()

    def generate(self, body: Json, connections: Connections, is_aborted: Callable[[], bool]) -> Json | None:
        def generate(turn: Turn) -> Json | None:
            output = turn.member.engine.generate(body, connections, is_aborted)
            resumed = len((body.get("resume") or {"token_ids": ()})["token_ids"])
            for completion in output["completions"] if output else ():
                if completion["finish_reason"] == "abort" and not is_aborted():
                    turn.check_kept()
                for version, _, end in completion["weight_versions"][-1:]:
                    if end > resumed:
                        turn.check(version)
            return output

        return self.members.ask_any(generate, prefix_keys(body["prompt"]), samples_of(body), connections)

    def lines(self, body: Json) -> PyGenerator[Json, None, None]:
        """Yield the events of a request by one engine. Raises ConnectionError if it ends."""
        self.members.begin()
        with self.members.turn(prefix_keys(body["prompt"]), samples_of(body), Connections()) as turn:
            turn.check(turn.member.engine.weight_version())
            yield from turn.member.engine.lines(body)

    def score(self, bodies: list[Json]) -> list[Json]:
        self.members.begin()

        def score(turn: Turn, body: Json) -> Json:
            turn.check(turn.member.engine.weight_version())
            return turn.member.engine.score([body])[0]

        def ask(body: Json) -> Json:
            return self.members.ask_any(lambda turn: score(turn, body), [], len(body["sequences"]), Connections())

        with ThreadPoolExecutor(len(self.members), "fastgen-fleet") as pool:
            return list(pool.map(ask, bodies))

    # ------------------------------------------------------------------------------------ weights

    def update(self, update: RemoteUpdate) -> int | None:
        """Update all engines. DTensors are gathered once.

        An engine that ends during the update is lost, and the update goes on. If engines refuse it, the first of their
        errors is raised; those that took it serve with the new version, and the others do not serve.
        """
        if not isinstance(update.source, list):
            return self._update(update, None)
        from fastgen.async_engine.wire import is_sender
        from fastgen.rl.gathering import Gathering

        sends = is_sender()
        gathering = Gathering(update.source, self._options.keep_copy and sends)
        try:
            return self._update(update, gathering) if sends else None
        finally:
            gathering.run()  # other ranks need this one to gather, also after an error

    def _update(self, update: RemoteUpdate, gathering: Gathering | None) -> int:
        """Update all engines at the same time. gathering: the tensors, which this thread gathers meanwhile; None: the
        source of `update`."""
        members = self.members
        members.begin()
        with members.updates, members.held(update.options["in_flight"]):
            if update.options["version"] is None:
                update = update.with_options(version=members.version + 1)
            taking = members.that_take(update)
            if gathering is None:
                return members.settle(of_each(taking, lambda member: member.engine.update(update)), update, update)
            senders = {member: gathering.join() for member in taking}

            def send(member: Member) -> int | None:
                try:
                    return member.engine.update(replace(update, source=senders[member].named))
                finally:
                    gathering.leave(senders[member])

            results, copies = of_each(taking, send, gathering.run), gathering.copies
            copy = None if copies is None else replace(update, source=list(copies.items()))
            return members.settle(results, update, copy)

    def weight_version(self) -> int:
        """Return the version of the weights of all engines that serve."""
        self.members.begin()
        return self.members.version

    # ------------------------------------------------------------------------------------ states

    def post(self, path: str, body: Json) -> list[Json]:
        """Post to each engine, and return the answers. Of engines that are paused or asleep, none that has ended is
        brought back."""
        states, before = set(body.get("tags", ("steps",))), set(self.members.resting)
        if path in ("/pause", "/sleep"):
            self.members.resting |= states
        try:
            answers = self.members.call_all(lambda engine: engine.post(path, body))
        except Exception:  # refused, for instance since requests are in flight
            self.members.resting = before
            raise
        if path in ("/resume", "/wake"):
            self.members.resting -= states
        return list(chain.from_iterable(answers))

    def close(self) -> None:
        """Close the weight groups, and look for lost engines no longer."""
        self.members.close()
