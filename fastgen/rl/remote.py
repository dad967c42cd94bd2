"""RemoteGenerator: a Generator behind `fgserve --rollout`, for a trainer on other GPUs or another machine.

    gen = RemoteGenerator("http://host:5678", api_key="secret")
    outputs = gen.generate(prompts, SamplingParams(n=16, max_tokens=512))
    gen.update_weights(model.named_parameters(), in_flight="keep")

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from fastgen.engine.outputs import error_output
from fastgen.engine.prompts import prompt_list, request_source
from fastgen.engine.stats import with_progress
from fastgen.names import explains_names
from fastgen.option import Options, option, takes_fields_of
from fastgen.request import Completion, Params, Prompt, Request, RequestOutput, SamplingParams, Timings

if TYPE_CHECKING:
    from fastgen.async_engine.wire import Wire

CONNECT_SECONDS = 10.0
END_SECONDS = 0.02  # between two attempts to end connections
_END: Any = object()  # marks the end of an iterable
VOCABULARY = 2**31  # vocabulary size for checks in this process; the server checks with the model's


@dataclass(frozen=True)
class RemoteGeneratorOptions(Options):
    """The arguments of a RemoteGenerator."""

    url: str = field(metadata={"help": "address of `fgserve --rollout`, such as http://localhost:5678"})
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
    max_requests: int = option(256, "maximum number of requests of this object that are on the server at a time", low=1)


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
        self._options, self._parsed = options, urlsplit(options.url)
        if self._parsed.scheme not in ("http", "https") or not self._parsed.hostname:
            raise ValueError(f"url is {options.url!r}; it must be like http://localhost:5678")
        self._headers = {"Content-Type": "application/json"}
        if options.api_key is not None:
            self._headers["Authorization"] = f"Bearer {options.api_key}"
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
        with closing(self.stream(requests)) as outputs:
            found = {output.id: output for output in with_progress(outputs, len(many), progress)}
        return [found[number] for number in range(len(many))]

    def stream(
        self, requests: Prompt | Iterable[Request | Prompt | None], params: Params = None
    ) -> PyGenerator[RequestOutput, None, None]:
        """Yield the outputs of requests, in the order of completion; see `Generator.stream`. Closing the stream early
        aborts its requests."""
        _fields(params)  # raises before anything runs
        source, numbers = request_source(requests, params), count()
        running, connections = set[Future[RequestOutput]](), set[HTTPConnection]()
        most = self._options.max_requests
        pool = ThreadPoolExecutor(most, "fastgen-remote")
        try:
            while True:
                while len(running) < most and (request := next(source, _END)) is not _END:
                    if request is None:
                        if running:
                            break
                        continue
                    id = f"r{next(numbers)}" if request.id is None else request.id
                    running.add(pool.submit(self._complete, replace(request, id=id), connections))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while left := [each for each in running if not each.done()]:  # `wait` never returns cancelled ones as done
                _shut_down(connections)
                wait(left, timeout=END_SECONDS)

    def _complete(self, request: Request, connections: set[HTTPConnection]) -> RequestOutput:
        """Return the output of a request. If the server refuses the request, the output has an error."""
        assert request.id is not None
        try:
            if request.resume is not None:
                raise ValueError("a completion cannot be resumed over HTTP; give prompt and completion as one prompt")
            body = {"prompt": request.prompt, "params": _fields(request.params)}
            return _output(self._post("/generate", body, connections), request.id)
        except (ValueError, TypeError) as error:
            return error_output(request.id, error)

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
            they are sent. Names, shapes and dtypes are checked before anything is written.

        In a program whose ranks shard the model, all ranks of its default process group call this method. Rank 0 sends;
        the other ranks take part in gathering, and return None.
        """
        options = {"version": version, "partial": partial, "in_flight": in_flight, "requantize": requantize}
        if isinstance(named, str | Path):
            folder = str(Path(named).resolve())
            return int(self._post("/update_weights", {"folder": folder, **options})["weight_version"])
        from fastgen.async_engine.wire import header_of, is_sender

        tensors = list(named.items() if isinstance(named, Mapping) else named)
        if not tensors:
            raise ValueError("no tensors are given")
        turns = iter(tensors)
        try:
            return self._send(tensors[0][1].device, turns, header_of(tensors), options) if is_sender() else None
        finally:
            for _, tensor in turns:  # other ranks need this one to gather the remaining tensors
                if hasattr(tensor, "full_tensor"):
                    tensor.full_tensor()

    def _send(self, device: Any, tensors: Iterator[Any], header: Any, options: dict[str, Any]) -> int:
        """Ask the server to receive the tensors, and send them meanwhile. Return the version of the weights."""
        wire = self._open_wire(device)
        connections, answer = set[HTTPConnection](), Future[int]()
        body = {"group": wire.key, "tensors": header, **options}

        def ask() -> None:
            try:
                answer.set_result(self._post("/update_weights", body, connections)["weight_version"])
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
                _shut_down(connections)
                asking.join(END_SECONDS)
            raise

    def _open_wire(self, device: Any) -> Wire:
        """Return the connection for weights. It is made for the first update, and again after a failed one."""
        if self._wire is None:
            from fastgen.async_engine.wire import connect
            from fastgen.device.memory import gpu_id

            limits = {"timeout": self._options.timeout, "bucket_bytes": self._options.bucket_bytes}
            body = {"backend": self._options.backend, "gpu": gpu_id(device), "replace": self._replace_group, **limits}
            found = self._post("/init_weight_group", body)
            self._replace_group = True  # from now on, the group belongs to this object
            self._key = found["group"]
            address = self._parsed.hostname or "", found["port"]
            self._wire = connect(
                address, found["group"], found["backend"], device, self._options.timeout, self._options.bucket_bytes
            )
        return self._wire

    @property
    def weight_version(self) -> int:
        """Version of the server's weights, as `update_weights` returns it."""
        model = self._options.model
        query = "" if model is None else "?" + urlencode({"model": model})
        return int(self._ask("GET", "/weight_version" + query)["weight_version"])

    # ------------------------------------------------------------------------------------ states

    def pause(self) -> None:
        """Run no steps until `resume`. Running requests stay as they are, and new ones wait."""
        self._post("/pause", {})

    def resume(self) -> None:
        """Run steps again."""
        self._post("/resume", {})

    def sleep(self, tags: str | Iterable[str] | None = None, keep_weights: bool = True) -> int:
        """Give device memory back, and return the number of bytes; see `Generator.sleep`."""
        return int(self._post("/sleep", {"tags": _tags(tags), "keep_weights": keep_weights})["freed"])

    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Take back the memory that `sleep` gave back."""
        self._post("/wake", {"tags": _tags(tags)})

    def close(self) -> None:
        """Close the weight group, so that another program may open one. The server continues."""
        wire, key = self._wire, self._key
        self._wire = self._key = None
        try:
            if key is not None:
                self._post("/close_weight_group", {"group": key})
        finally:
            if wire is not None:  # after the server has closed its end, which may use this end's memory
                wire.close()

    def __enter__(self) -> RemoteGenerator:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ConnectionError):  # a server that has gone
            self.close()

    # ------------------------------------------------------------------------------------ HTTP

    def _post(self, path: str, body: dict[str, Any], connections: set[HTTPConnection] | None = None) -> Any:
        data = json.dumps({**body, "model": self._options.model}, default=_plain)
        return self._ask("POST", path, data, connections)

    def _ask(
        self, method: str, path: str, data: str | None = None, connections: set[HTTPConnection] | None = None
    ) -> Any:
        """Return the body of a response. connections: set that holds the connection while the request runs, so that
        other threads can shut it down."""
        kind = HTTPSConnection if self._parsed.scheme == "https" else HTTPConnection
        connection = kind(self._parsed.hostname or "", self._parsed.port, timeout=CONNECT_SECONDS)
        connections = set() if connections is None else connections
        with closing(connection):
            try:
                connection.connect()
                assert connection.sock is not None
                connection.sock.settimeout(None)  # an answer takes as long as it takes
                connections.add(connection)
                connection.request(method, self._parsed.path.rstrip("/") + path, data, self._headers)
                response = connection.getresponse()
                status, text = response.status, response.read().decode()
            except (OSError, HTTPException) as error:
                raise ConnectionError(f"no answer from {self._options.url}: {error or type(error).__name__}") from None
            finally:
                connections.discard(connection)
        if status == 200:
            return json.loads(text)
        message = text[:300]
        with suppress(ValueError, KeyError, TypeError):
            message = json.loads(text)["error"]["message"]
        if status in (400, 413):
            raise ValueError(message)
        hint = "; start fgserve with --rollout" if status == 404 else ""
        raise RuntimeError(f"{self._options.url} answers {status}: {message}{hint}")


def _shut_down(connections: set[HTTPConnection]) -> None:
    """End connections, from a thread other than the ones that wait for their answers."""
    for connection in list(connections):
        with suppress(OSError, AttributeError):  # the connection has ended already
            connection.sock.shutdown(socket.SHUT_RDWR)


def _plain(value: Any) -> Any:
    """Return an array, a set, a pydantic class and the like in a form that JSON can represent."""
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _tags(tags: str | Iterable[str] | None) -> list[str] | None:
    return None if tags is None else [tags] if isinstance(tags, str) else list(tags)


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


def _output(found: dict[str, Any], id: str | int) -> RequestOutput:
    """Return the output described by the body of a response."""
    output = RequestOutput(**{**found, "id": id})
    output.completions = [Completion(**each) for each in found["completions"]]
    for completion in output.completions:
        completion.weight_versions = [(version, start, end) for version, start, end in completion.weight_versions]
        completion.top_logprobs = _with_ids(completion.top_logprobs)
    output.prompt_top_logprobs = _with_ids(output.prompt_top_logprobs)
    output.timings = Timings(**found["timings"])
    return output


def _with_ids(tops: list[dict[Any, float]] | None) -> list[dict[int, float]] | None:
    """Return alternatives with integer ids, which are strings in JSON."""
    return None if tops is None else [{int(id): logprob for id, logprob in top.items()} for top in tops]
