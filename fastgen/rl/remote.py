"""RemoteGenerator: a Generator behind `fgserve --rollout`, for a trainer on other GPUs or another machine.

    gen = RemoteGenerator("http://host:5678", api_key="secret")
    outputs = gen.generate(prompts, SamplingParams(n=16, max_tokens=512))
    gen.update_weights(model.named_parameters(), in_flight="keep")

With a list of addresses it is a Fleet (fleet.py): several engines with the same weights.

Importing this module does not import torch.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastgen.engine.outputs import error_output
from fastgen.engine.prompts import prompt_list, request_source
from fastgen.engine.stats import with_progress
from fastgen.names import explains_names
from fastgen.option import Options, option, takes_fields_of
from fastgen.request import Completion, Event, Params, Prompt, Request, RequestOutput, SamplingParams
from fastgen.rl.http import Connections, ServerClient, shut_down
from fastgen.rl.outputs import event_of, output_of, unsent_output

if TYPE_CHECKING:
    from fastgen.async_engine.wire import Wire

END_SECONDS = 0.02  # between two attempts to end connections or requests
SCORED = 64  # maximum number of sequences that one request to /score has, since nothing is reported during one
RESUMED = tuple(Completion.__dataclass_fields__)
_END: Any = object()  # marks the end of an iterable
VOCABULARY = 2**31  # vocabulary size for checks in this process; the server checks with the model's


@dataclass(frozen=True)
class RemoteGeneratorOptions(Options):
    """The arguments of a RemoteGenerator."""

    url: str | Sequence[str] = field(
        metadata={"help": "address of `fgserve --rollout`, such as http://localhost:5678, or a list of addresses"}
    )
    _: KW_ONLY
    api_key: str | None = option(None, "API key of the server", unset="no key")
    model: str | None = option(None, "name of the model, if the server has several", unset="the server's only model")
    backend: str | None = option(
        None, "transport of weights: a process group of NCCL or gloo", choices=("nccl", "gloo"),
        unset="memory of the GPU (CUDA IPC) if the tensors are on the server's GPU, NCCL between two GPUs, else gloo",
    )  # fmt: skip
    timeout: float = option(60.0, "seconds without progress after which an update fails, on both sides", low=0)
    bucket_bytes: int = option(
        128 << 20, "bytes of tensors that are sent together, which both sides hold in device memory", low=1
    )
    replace_group: bool = option(False, "take over the weight group of a trainer that has ended without `close`")
    max_requests: int = option(256, "maximum number of requests of this object that are on a server at a time", low=1)
    ready_timeout: float = option(600.0, "seconds to wait at the first call until the server's model is loaded", low=0)
    keep_copy: bool = option(
        False, "with a list of addresses: keep a copy of the last weights in host memory, which an engine that comes "
        "back gets at once; without a copy it stays out of service until the next update from tensors"
    )  # fmt: skip


@explains_names("generate", "stream")
class RemoteGenerator:
    """A Generator in a server, with the methods that a trainer needs. Threads may share it, except for updates.

    The arguments are the fields of `RemoteGeneratorOptions`; `help(RemoteGenerator)` describes them.

    Methods raise ValueError if the server refuses a request, RuntimeError if its state does not allow the call, and
    ConnectionError if the server cannot be reached.
    """

    _of_several: ClassVar[type[RemoteGenerator]]  # Fleet, which sets it, since it is made of this class

    @takes_fields_of(RemoteGeneratorOptions)
    def __init__(self, options: RemoteGeneratorOptions) -> None:
        options.check()
        self._options = options
        if type(self) is RemoteGenerator and not isinstance(options.url, str):
            self.__class__ = self._of_several  # not by __new__, which would hide the arguments of __init__
            self.__init__(**vars(options))  # type: ignore[misc]
            return
        if isinstance(options.url, str):
            self._server: Any = ServerClient(options.url, options.api_key, options.model, options.ready_timeout)
        self._name, self._count = uuid.uuid4().hex, itertools.count()  # of the ids of requests on the server
        self._sent: dict[str, Sent] = {}  # the running requests of `generate` and `stream`, by key
        self._calls: set[_Call] = set()  # the calls of `generate` that run
        self._replace_group = options.replace_group
        self._wire: Wire | None = None
        self._key: str | None = None  # key of the group that this object has opened

    # ------------------------------------------------------------------------------------ outputs

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params | Sequence[Params] = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Return the outputs in the order of the prompts; see `Generator.generate`. A mask cannot be sent."""
        many = prompt_list(prompts)
        shared = params is None or isinstance(params, SamplingParams | Mapping)
        given: Any = params
        each = [given] * len(many) if shared else list(given)
        if len(each) != len(many):
            raise ValueError(f"there are {len(many)} prompts and {len(each)} params; give one, or one per prompt")
        for own in each[:1] if shared else each:
            _fields(own)  # raises before anything runs
        requests = [Request(prompt, own, number) for number, (prompt, own) in enumerate(zip(many, each, strict=True))]
        call = _Call()
        self._calls.add(call)
        try:
            with closing(self._serve(iter(requests), call)) as outputs:
                found = {output.id: output for output in with_progress(outputs, len(many), progress)}
        finally:
            self._calls.discard(call)
        return [found[number] for number in range(len(many))]

    def stream(
        self, requests: Prompt | Iterable[Request | Prompt | None], params: Params = None
    ) -> PyGenerator[RequestOutput, None, None]:
        """Yield the outputs of requests, in the order of completion; see `Generator.stream`. Closing the stream early
        aborts its requests. A Request may resume a completion."""
        _fields(params)  # raises before anything runs
        return self._serve(request_source(requests, params), _Call())

    def _serve(self, source: Iterator[Request | None], call: _Call) -> PyGenerator[RequestOutput, None, None]:
        running, numbers, connections = set[Future[RequestOutput]](), itertools.count(), Connections()
        most = self._open()
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

    def _open(self) -> int:
        """Prepare for requests. Return the maximum number of those of one stream that are sent at a time."""
        return self._options.max_requests

    def _submit(
        self, pool: ThreadPoolExecutor, request: Request, call: _Call, connections: Connections
    ) -> Future[RequestOutput]:
        """Send a request in a thread of the pool. Return the future of its output."""
        sent = Sent(request, f"{self._name}-{next(self._count)}", call.aborted)
        sent.future = future = pool.submit(self._complete, sent, connections)
        self._sent[sent.key] = sent
        future.add_done_callback(lambda _: self._sent.pop(sent.key))
        return future

    def _complete(self, sent: Sent, connections: Connections) -> RequestOutput:
        """Return the output of a request. If the server refuses the request, the output has an error."""
        request = sent.request
        assert request.id is not None
        try:
            body = _body(request)
            if sent.aborted:
                return unsent_output(request, int((body["params"] or {}).get("n", 1)))
            return output_of(self._server.post("/generate", {**body, "id": sent.key}, connections), request.id)
        except (ValueError, TypeError) as error:
            return error_output(request.id, error)

    def abort(self, ids: str | int | Iterable[str | int] | None = None) -> list[RequestOutput]:
        """End requests of `generate` and `stream`, from another thread or between two outputs of a `stream`. They
        return the tokens that they have, with the finish_reason "abort"; this method returns the same outputs. Their
        completions can be resumed; see `Request`.

        ids: those of Requests that run; other ids are skipped. None: all requests of this object. Prompts of `generate`
        that were not sent yet then get completions without tokens, and a `stream` goes on with its next request.
        """
        wanted = None if ids is None else {ids} if isinstance(ids, str | int) else set(ids)
        if wanted is None:
            for call in list(self._calls):
                call.aborted = True
        sent = [each for each in list(self._sent.values()) if wanted is None or each.request.id in wanted]
        for each in sent:
            each.aborted = True
        while left := [each for each in sent if not each.future.done()]:
            self._server.post("/abort", {"ids": [each.key for each in left]})  # again, as the request may come later
            wait([each.future for each in left], timeout=END_SECONDS)
        return [each.future.result() for each in sent if not each.future.cancelled()]

    def events(self, request: Request | Prompt, params: Params = None) -> PyGenerator[Event, None, None]:
        """Yield the events of one request as they arrive; see `AsyncGenerator.stream`. Closing the iterator aborts the
        request. Raises ValueError if the server refuses it."""
        _fields(params)  # raises before anything runs
        (one,) = request_source([request], params)
        assert one is not None
        return self._events({**_body(one), "stream": True}, "r0" if one.id is None else one.id)

    def _events(self, body: dict[str, Any], id: str | int) -> PyGenerator[Event, None, None]:
        with closing(self._server.lines("/generate", body)) as lines:
            for found in lines:
                yield event_of(found, id)

    def score(
        self, sequences: Iterable[Prompt], start: int | Sequence[int] = 0, temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the logprobs of given tokens; see `Generator.score`. Running requests continue meanwhile. Raises
        RuntimeError while the engine is paused."""
        from fastgen.engine.prompt_scores import pair_scores  # it imports NumPy

        prompts, starts = pair_scores(sequences, start, temperature)
        found: list[list[float]] = []
        for first in range(0, len(prompts), SCORED):
            some = slice(first, first + SCORED)
            body = {"sequences": prompts[some], "start": starts[some], "temperature": float(temperature)}
            found += self._server.post("/score", body)["logprobs"]
        return found

    # ------------------------------------------------------------------------------------ weights

    def update_weights(
        self,
        named: Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path,
        version: int | None = None,
        partial: bool = False,
        in_flight: str = "error",
        requantize: bool = False,
    ) -> int | None:
        """Replace the weights, and return their version; see `Generator.update_weights`.

        named: named tensors, such as `model.named_parameters()`, or the path of a folder of safetensors on the server's
            machine. An iterator is read before the first tensor is sent; DTensors (FSDP) are gathered one at a time, as
            they are sent. Names, shapes and dtypes are checked before anything is written. With partial=True, a pair
            (indices, values) is a sparse delta; an update that has one is received as a whole before it is written.

        In a program whose ranks shard the model, all ranks of its default process group call this method. Rank 0 sends;
        the other ranks take part in gathering, and return None.
        """
        options = {"version": version, "partial": partial, "in_flight": in_flight, "requantize": requantize}
        if isinstance(named, str | Path):
            folder = str(Path(named).resolve())
            return int(self._server.post("/update_weights", {"folder": folder, **options})["weight_version"])
        return self._send_all("/update_weights", named, options)

    def update_adapter(
        self,
        named: Mapping[str, Any] | Iterable[tuple[str, Any]] | None,
        config: Any = None,
        version: int | None = None,
        in_flight: str = "error",
    ) -> int | None:
        """Merge a LoRA adapter into the weights, replacing the previous one, and return their version; see
        `Generator.update_adapter`. Ranks that shard the adapter call it together, as `update_weights`."""
        fields = config.to_dict() if hasattr(config, "to_dict") else config
        options = {"config": fields, "version": version, "in_flight": in_flight}
        if named is None:
            return int(self._server.post("/update_adapter", options)["weight_version"])
        return self._send_all("/update_adapter", named, options)

    def _send_all(self, path: str, named: Any, options: dict[str, Any]) -> int | None:
        """Send tensors to a route that receives them. Return the version of the weights; None on ranks above 0."""
        from fastgen.async_engine.wire import header_of
        from fastgen.model.deltas import packed_items

        tensors = packed_items(named)
        if not tensors:
            raise ValueError("no tensors are given")
        turns = iter(tensors)
        try:
            header = header_of(tensors)
            return self._send(path, tensors[0][1].device, turns, header, options) if self._sends() else None
        finally:
            for _, tensor in turns:  # other ranks need this one to gather the remaining tensors
                if hasattr(tensor, "full_tensor"):
                    tensor.full_tensor()

    def _sends(self) -> bool:
        """Return whether this rank of the trainer sends the tensors that all ranks gather."""
        from fastgen.async_engine.wire import is_sender

        return is_sender()

    def _send(self, path: str, device: Any, tensors: Iterator[Any], header: Any, options: dict[str, Any]) -> int:
        """Ask the server to receive the tensors, and send them meanwhile. Return the version of the weights."""
        wire = self._open_wire(device)
        connections, answer = set[HTTPConnection](), Future[int]()
        body = {"group": wire.key, "tensors": header, **options}

        def ask() -> None:
            try:
                answer.set_result(self._server.post(path, body, connections)["weight_version"])
            except Exception as error:
                answer.set_exception(error)

        def check() -> None:
            if answer.done():
                answer.result()  # raises the error of the server; without one, it has received everything

        asking = threading.Thread(target=ask, name="fastgen-update", daemon=True)
        asking.start()
        try:
            wire.send(tensors, header, check)
            return answer.result()
        except BaseException:  # the two ends may have come to different places
            wire.close()
            self._wire = None
            while asking.is_alive():
                shut_down(connections)
                asking.join(END_SECONDS)
            raise

    def _open_wire(self, device: Any) -> Wire:
        """Return the connection for weights. It is made for the first update, and again after a failed one."""
        if self._wire is None:
            from fastgen.async_engine.wire import connect
            from fastgen.device.memory import gpu_id

            limits = {"timeout": self._options.timeout, "bucket_bytes": self._options.bucket_bytes}
            body = {"backend": self._options.backend, "gpu": gpu_id(device), "replace": self._replace_group, **limits}
            found = self._server.post("/init_weight_group", body)
            self._replace_group = True  # from now on, the group belongs to this object
            self._key = found["group"]
            address = self._server.host, found["port"]
            self._wire = connect(
                address, found["group"], found["backend"], device, self._options.timeout, self._options.bucket_bytes
            )
        return self._wire

    @property
    def weight_version(self) -> int:
        """Version of the server's weights, as `update_weights` returns it."""
        return int(self._server.get("/weight_version")["weight_version"])

    # ------------------------------------------------------------------------------------ states

    def pause(self) -> None:
        """Run no steps until `resume`. Running requests stay as they are, and new ones wait."""
        self._server.post("/pause", {})

    def resume(self) -> None:
        """Run steps again."""
        self._server.post("/resume", {})

    def sleep(self, tags: str | Iterable[str] | None = None, keep_weights: bool = True) -> int:
        """Give device memory back, and return the number of bytes; see `Generator.sleep`."""
        return int(self._server.post("/sleep", {"tags": _tags(tags), "keep_weights": keep_weights})["freed"])

    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Take back the memory that `sleep` gave back."""
        self._server.post("/wake", {"tags": _tags(tags)})

    def close(self) -> None:
        """Close the weight group, so that another program may open one. The server continues."""
        wire, key = self._wire, self._key
        self._wire = self._key = None
        try:
            if key is not None:
                self._server.post("/close_weight_group", {"group": key})
        finally:
            if wire is not None:  # after the server has closed its end, which may use this end's memory
                wire.close()

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
class Sent:
    """A request that a thread sends. key: its id on the server. aborted: it is not to be sent, if it was not yet."""

    request: Request
    key: str
    aborted: bool
    future: Future[RequestOutput] = field(init=False)


def _tags(tags: str | Iterable[str] | None) -> list[str] | None:
    return None if tags is None else [tags] if isinstance(tags, str) else list(tags)


def _body(request: Request) -> dict[str, Any]:
    """Return the body of a request to /generate. Raises ValueError or TypeError for wrong params."""
    resume = None if request.resume is None else {name: getattr(request.resume, name) for name in RESUMED}
    return {"prompt": request.prompt, "params": _fields(request.params), "resume": resume}


def _fields(params: Params) -> dict[str, Any] | None:
    """Return parameters for the body of a request, after checking them. Raises ValueError or TypeError."""
    if params is None:
        return None
    checked = SamplingParams(**params) if isinstance(params, Mapping) else params
    if not isinstance(checked, SamplingParams):
        raise TypeError(f"params must be SamplingParams or a dict, not {type(params).__name__}")
    checked.validate(VOCABULARY)
    if checked.mask is not None:
        raise ValueError("a mask cannot be sent to a server; use json_schema, regex, choice or grammar")
    return dict(params) if isinstance(params, Mapping) else dict(vars(checked))
