"""RemoteGenerator: a Generator behind `fgserve --rollout`, for a trainer on other GPUs or another machine.

    gen = RemoteGenerator("http://host:5678", api_key="secret")
    outputs = gen.generate(prompts, SamplingParams(n=16, max_tokens=512))
    gen.update_weights(model.named_parameters(), in_flight="keep")

With a list of addresses it uses several engines with the same weights (fleet.py).

Importing this module does not import torch.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, overload

from fastgen.engine.outputs import error_output
from fastgen.engine.prompts import Ids, Scores, TopScores, ids_of, pair_scores, params_list, prompt_list, request_source
from fastgen.engine.stats import with_progress
from fastgen.engine.weight_state import InFlight, check_tags
from fastgen.names import explains_names
from fastgen.option import takes_fields_of
from fastgen.request import Event, Params, Prompt, Request, RequestOutput
from fastgen.rl.bodies import body_of, event_of, fields_of, output_of, samples_of, scores_of, unsent_output, with_ids
from fastgen.rl.engine import Engines, RemoteEngine
from fastgen.rl.fleet import Fleet
from fastgen.rl.http import END_SECONDS, Connections, Json, shut_down
from fastgen.rl.options import RemoteGeneratorOptions as RemoteGeneratorOptions
from fastgen.rl.weights import ADAPTER, WEIGHTS, RemoteUpdate, tensors_of

SCORED = 64  # maximum number of sequences that one request to /score has, since nothing is reported during one
_END: Any = object()  # marks the end of an iterable


@explains_names("generate", "stream")
class RemoteGenerator:
    """A Generator in a server, with the methods that a trainer needs. Threads may share it, except for updates.

    The arguments are the fields of `RemoteGeneratorOptions`; `help(RemoteGenerator)` describes them.

    Methods raise ValueError if the server refuses a request, RuntimeError if its state does not allow the call, and
    ConnectionError if the server cannot be reached.
    """

    @takes_fields_of(RemoteGeneratorOptions)
    def __init__(self, options: RemoteGeneratorOptions) -> None:
        options.check()
        url = options.url
        self._engines: Engines = RemoteEngine(url, options) if isinstance(url, str) else Fleet(url, options)
        self._name, self._count = uuid.uuid4().hex, itertools.count()  # of requests
        self._sent: dict[str, _Sent] = {}  # the running requests of `generate` and `stream`, by key
        self._calls: set[_Call] = set()  # the calls of `generate` that run

    # ------------------------------------------------------------------------------------ outputs

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params | Sequence[Params] = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Return the outputs in the order of the prompts; see `Generator.generate`. A mask cannot be sent."""
        many = prompt_list(prompts)
        each = params_list(params, len(many))
        for own in {id(own): own for own in each}.values():
            fields_of(own)  # raises before anything runs
        requests = [Request(prompt, own, number) for number, (prompt, own) in enumerate(zip(many, each, strict=True))]
        call = _Call()
        self._calls.add(call)
        try:
            with closing(self._serve(iter(requests), call)) as outputs:
                by_number = {output.id: output for output in with_progress(outputs, len(many), progress)}
        finally:
            self._calls.discard(call)
        return [by_number[number] for number in range(len(many))]

    def stream(
        self, requests: Prompt | Iterable[Request | Prompt | None], params: Params = None
    ) -> PyGenerator[RequestOutput, None, None]:
        """Yield the outputs of requests, in the order of completion; see `Generator.stream`. Closing the stream early
        aborts its requests. A Request may resume a completion."""
        fields_of(params)  # raises before anything runs
        return self._serve(request_source(requests, params), _Call())

    def _serve(self, source: Iterator[Request | None], call: _Call) -> PyGenerator[RequestOutput, None, None]:
        running, numbers, connections = set[Future[RequestOutput]](), itertools.count(), Connections()
        most = self._engines.begin()
        pool = ThreadPoolExecutor(most, "fastgen-remote")
        try:
            while True:
                while len(running) < most and (request := next(source, _END)) is not _END:
                    if request is None:
                        if running:
                            break
                        continue
                    id = f"r{next(numbers)}" if request.id is None else request.id
                    running.add(self._submit(pool, replace(request, id=id), call, connections))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            connections.ended = True
            while left := [each for each in running if not each.done()]:  # `wait` never returns cancelled ones as done
                shut_down(connections)
                wait(left, timeout=END_SECONDS)

    def _submit(
        self, pool: ThreadPoolExecutor, request: Request, call: _Call, connections: Connections
    ) -> Future[RequestOutput]:
        """Send a request in a thread of the pool. Return the future of its output."""
        number = next(self._count)
        sent = _Sent(request, f"{self._name}-{number}", number, call.aborted)
        sent.future = future = pool.submit(self._complete, sent, connections)
        self._sent[sent.key] = sent
        future.add_done_callback(lambda _: self._sent.pop(sent.key))
        return future

    def _complete(self, sent: _Sent, connections: Connections) -> RequestOutput:
        """Return the output of a request. If the server refuses the request, the output has an error."""
        request = sent.request
        assert request.id is not None
        try:
            body, output = self._engines.seeded(body_of(request), sent.number, connections), None
            if not sent.aborted:  # which may change while an engine is waited for
                output = self._engines.generate({**body, "id": sent.key}, connections, lambda: sent.aborted)
            return unsent_output(request, samples_of(body)) if output is None else output_of(output, request.id)
        except (ValueError, TypeError) as error:
            return error_output(request.id, error)

    def abort(self, ids: Ids = None) -> list[RequestOutput]:
        """End requests of `generate` and `stream`, from another thread or between two outputs of a `stream`. They
        return the tokens that they have, with the finish_reason "abort"; this method returns the same outputs. Their
        completions can be resumed; see `RequestOutput.resume`.

        ids: those of Requests that run; other ids are skipped. None: all requests of this object. Prompts of `generate`
        that were not sent yet then get completions without tokens, and a `stream` goes on with its next request.
        """
        selection = None if ids is None else set(ids_of(ids, ()))
        if selection is None:
            for call in list(self._calls):
                call.aborted = True
        sent = [each for each in list(self._sent.values()) if selection is None or each.request.id in selection]
        for each in sent:
            each.aborted = True
        while left := [each for each in sent if not each.future.done()]:
            self._engines.post("/abort", {"ids": [each.key for each in left]})  # again, as the request may come later
            wait([each.future for each in left], timeout=END_SECONDS)
        return [each.future.result() for each in sent if not each.future.cancelled()]

    def cut_off(self, ids: Ids = None) -> None:
        """End requests as `abort` does, but return nothing, like `Generator.cut_off`."""
        self.abort(ids)

    def events(self, request: Request | Prompt, params: Params = None) -> PyGenerator[Event, None, None]:
        """Yield the events of one request as they arrive; see `AsyncGenerator.stream`. Closing the iterator aborts the
        request. Raises ValueError if the server refuses it."""
        fields_of(params)  # raises before anything runs
        (one,) = request_source([request], params)
        assert one is not None
        body = self._engines.seeded(body_of(one), next(self._count), Connections())
        return self._events(body, "r0" if one.id is None else one.id)

    def _events(self, body: Json, id: str | int) -> PyGenerator[Event, None, None]:
        with closing(self._engines.lines(body)) as lines:
            for event in lines:
                yield event_of(event, id)

    @overload
    def score(
        self, sequences: Iterable[Prompt], start: int | Sequence[int] = 0, temperature: float = 1.0
    ) -> Scores: ...
    @overload
    def score(
        self, sequences: Iterable[Prompt], start: int | Sequence[int] = 0, temperature: float = 1.0, *, logprobs: int
    ) -> tuple[Scores, TopScores]: ...
    def score(
        self,
        sequences: Iterable[Prompt],
        start: int | Sequence[int] = 0,
        temperature: float = 1.0,
        *,
        logprobs: int | None = None,
    ) -> Scores | tuple[Scores, TopScores]:
        """Return the logprobs of given tokens; see `Generator.score`. Running requests continue meanwhile. Raises
        RuntimeError while the engine is paused."""
        prompts, starts = pair_scores(sequences, start, temperature, logprobs)
        parts = [slice(first, first + SCORED) for first in range(0, len(prompts), SCORED)]
        options = {"temperature": float(temperature), "logprobs": logprobs}
        bodies = [{"sequences": prompts[part], "start": starts[part], **options} for part in parts]
        answers = self._engines.score(bodies)
        values = [scores_of(row) or [] for answer in answers for row in answer["logprobs"]]
        if logprobs is None:
            return values
        return values, [with_ids(row) or [] for answer in answers for row in answer["top_logprobs"]]

    # ------------------------------------------------------------------------------------ weights

    def update_weights(
        self,
        named: Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path,
        version: int | None = None,
        partial: bool = False,
        in_flight: InFlight = "error",
        requantize: bool = False,
    ) -> int | None:
        """Replace the weights, and return their version; see `Generator.update_weights`.

        named: named tensors, such as `model.named_parameters()`, or the path of a folder of safetensors on the server's
            machine. An iterator is read before the first tensor is sent; DTensors (FSDP) are gathered one at a time, as
            they are sent. Names, shapes and dtypes are checked before anything is written. With partial=True, a pair
            (indices, values) is a sparse delta; an update that has one is received as a whole before it is written.

        In a program whose ranks shard the model, all ranks of its default process group call this method. Rank 0 sends;
        the other ranks take part in gathering, and return None. With a folder, only one rank calls it.

        Of several engines, one that ends during an update is lost, and the update goes on. If some refuse it, the first
        of their errors is raised; those that took it serve with the new version, and the others do not serve.
        """
        options = {"version": version, "partial": partial, "in_flight": in_flight, "requantize": requantize}
        source = str(Path(named).resolve()) if isinstance(named, str | Path) else tensors_of(named)
        return self._engines.update(RemoteUpdate(WEIGHTS, source, options))

    def update_adapter(
        self,
        named: Mapping[str, Any] | Iterable[tuple[str, Any]] | None,
        config: Any = None,
        version: int | None = None,
        in_flight: InFlight = "error",
    ) -> int | None:
        """Merge a LoRA adapter into the weights, replacing the previous one, and return their version; see
        `Generator.update_adapter`. Ranks that shard the adapter call it together, as `update_weights`."""
        fields = config.to_dict() if hasattr(config, "to_dict") else config
        options = {"config": fields, "version": version, "in_flight": in_flight}
        return self._engines.update(RemoteUpdate(ADAPTER, None if named is None else tensors_of(named), options))

    @property
    def weight_version(self) -> int:
        """Version of the server's weights, as `update_weights` returns it."""
        return self._engines.weight_version()

    def weight_checksums(self) -> list[dict[str, str]]:
        """Return the SHA-256 of each weight, in a dict for each rank; see `Generator.weight_checksums`. With several
        engines, the ranks of the first one come first."""
        return [rank["checksums"] for answer in self._engines.post("/weights_checker", {}) for rank in answer["ranks"]]

    # ------------------------------------------------------------------------------------ states

    def pause(self) -> None:
        """Run no steps until `resume`. Running requests stay as they are, and new ones wait."""
        self._engines.post("/pause", {})

    def resume(self) -> None:
        """Run steps again."""
        self._engines.post("/resume", {})

    @property
    def features(self) -> NoReturn:
        """Raise an AttributeError that says where hidden states are available."""
        raise AttributeError("hidden states are not sent over HTTP; use a Generator, or an AsyncGenerator's call")

    def sleep(self, tags: str | Iterable[str] | None = None, keep_weights: bool = True) -> int:
        """Give device memory back, and return the number of bytes; see `Generator.sleep`."""
        answers = self._engines.post("/sleep", {"tags": sorted(check_tags(tags)), "keep_weights": keep_weights})
        return sum(answer["freed"] for answer in answers)

    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Take back the memory that `sleep` gave back."""
        self._engines.post("/wake", {"tags": sorted(check_tags(tags))})

    def close(self) -> None:
        """Close the weight group, so that another program may open one. The server continues."""
        self._engines.close()

    def __enter__(self) -> RemoteGenerator:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ConnectionError):  # a server that has gone
            self.close()


@dataclass(eq=False)
class _Call:
    """A call of `generate` or `stream`. aborted: its next requests are not sent."""

    aborted: bool = False


@dataclass(eq=False)
class _Sent:
    """A request that a thread sends. key: its id on the server. number: its place in the order of all requests.
    aborted: it is not to be sent, if it was not yet."""

    request: Request
    key: str
    number: int
    aborted: bool
    future: Future[RequestOutput] = field(init=False)
