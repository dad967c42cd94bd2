"""Updates of weights, and the trainer's end of the weight group of one engine. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, Protocol

from fastgen.rl.http import END_SECONDS, Json, shut_down
from fastgen.rl.options import RemoteGeneratorOptions

if TYPE_CHECKING:
    import torch

    from fastgen.async_engine.wire import Wire

WEIGHTS, ADAPTER = "/update_weights", "/update_adapter"

Named = list[tuple[str, Any]]
"""Named tensors, or objects like DTensors: with a dtype, shape and device, and gathered by `full_tensor()`."""


@dataclass(frozen=True)
class RemoteUpdate:
    """An update of weights, as a server takes it.

    route: WEIGHTS or ADAPTER. source: tensors, the path of a folder on the server's machine, or None for no adapter.
    options: the other fields of the request, `version` and `in_flight` among them.
    """

    route: str
    source: Named | str | None
    options: Json

    @property
    def is_complete(self) -> bool:
        """True for an update of all weights."""
        return self.route == WEIGHTS and not self.options["partial"]

    def with_options(self, **options: Any) -> RemoteUpdate:
        return replace(self, options={**self.options, **options})


def tensors_of(named: Any) -> Named:
    """Return what a trainer gives as weights, each sparse delta as one tensor. Raises ValueError if there are none, and
    ValueError or TypeError if one cannot be sent, such as a tensor on the device meta."""
    from fastgen.model.weight_updates import named_items

    tensors = named_items(named)
    if not tensors:
        raise ValueError("no tensors are given")
    return tensors


class Poster(Protocol):
    """A client of an engine. host: of the store in which the two ends of the weight group meet."""

    @property
    def host(self) -> str: ...
    def post(self, path: str, body: Json, connections: set[HTTPConnection] | None = None) -> Json: ...


class WeightSender:
    """Updates the weights of one engine. Its weight group is made for the first tensors, and again after a failure.

    sends: whether this rank of the trainer sends the tensors that all ranks gather; None: if it is rank 0.
    """

    def __init__(self, client: Poster, options: RemoteGeneratorOptions, sends: bool | None = None) -> None:
        self._client, self._options, self._sends = client, options, sends
        self._replace_group = options.replace_group
        self._wire: Wire | None = None
        self._key: str | None = None  # key of the group that this object has opened

    @property
    def backend(self) -> str | None:
        """Backend of the weight group; None if there is no group."""
        return None if self._wire is None else self._wire.backend

    def update(self, update: RemoteUpdate) -> int | None:
        """Make an update. Return the version of the weights; None on ranks that only gather tensors."""
        if update.source is None or isinstance(update.source, str):
            folder = {} if update.source is None else {"folder": update.source}
            return int(self._client.post(update.route, {**folder, **update.options})["weight_version"])
        from fastgen.async_engine.wire import is_sender

        turns = iter(update.source)
        try:
            sends = is_sender() if self._sends is None else self._sends
            return self._send(update, update.source, turns) if sends else None
        finally:
            for _, tensor in turns:  # other ranks need this one to gather the remaining tensors
                if hasattr(tensor, "full_tensor"):
                    tensor.full_tensor()

    def _send(self, update: RemoteUpdate, tensors: Named, turns: Iterator[tuple[str, Any]]) -> int:
        """Ask the engine to receive tensors, and send them meanwhile. turns: iterator of `tensors`."""
        from fastgen.async_engine.wire import header_of

        header, connections = header_of(tensors), set[HTTPConnection]()
        wire = self._open_wire(tensors[0][1].device)
        body = {"group": wire.key, "tensors": header, **update.options}

        def check() -> None:
            if asking.done():
                asking.result()  # raises the error of the server; without one, it has received everything

        with ThreadPoolExecutor(1, "fastgen-update") as pool:
            asking = pool.submit(self._client.post, update.route, body, connections)
            try:
                wire.send(turns, header, check)
                return int(asking.result()["weight_version"])
            except BaseException:  # the two ends may have come to different places
                wire.close()
                self._wire = None
                while not asking.done():
                    shut_down(connections)
                    wait([asking], END_SECONDS)
                raise

    def _open_wire(self, device: torch.device) -> Wire:
        if self._wire is None:
            from fastgen.async_engine.wire import connect
            from fastgen.device.memory import gpu_id

            seconds, bucket_bytes = self._options.timeout, self._options.bucket_bytes
            limits = {"timeout": seconds, "bucket_bytes": bucket_bytes}
            body = {"backend": self._options.backend, "gpu": gpu_id(device), "replace": self._replace_group, **limits}
            group = self._client.post("/init_weight_group", body)
            self._replace_group = True  # from now on, the group belongs to this object
            self._key = group["group"]
            address = self._client.host, group["port"]
            self._wire = connect(address, group["group"], group["backend"], device, seconds, bucket_bytes)
        return self._wire

    def close(self) -> None:
        """Close the weight group, so that another program may open one."""
        wire, key = self._wire, self._key
        self._wire = self._key = None
        try:
            if key is not None:
                self._client.post("/close_weight_group", {"group": key})
        finally:
            if wire is not None:  # after the server has closed its end, which may use this end's memory
                wire.close()
