"""wire.py: weights go from one thread to another through a fake GPU's memory. tests/rl/test_remote.py tests gloo."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastgen.async_engine import wire
from fastgen.async_engine.wire import Wire, connect, header_of
from fastgen.processes.errors import DepartedError

CPU = torch.device("cpu")
TENSORS = [("a", torch.randn(3)), ("big", torch.randn(999)), ("c", torch.arange(7)), ("d", torch.randn(4, 5).half())]
BUCKET = 1000  # bytes, fewer than the largest tensor has


class FakeMemory:
    """IpcMemory of one process. The sender's end may close only after the receiver's."""

    made: ClassVar[dict[str, Tensor]] = {}

    def __init__(self, size: int, device: torch.device, handle: str | None = None) -> None:
        self.mine, self.handle = handle is None, handle or secrets.token_hex(64)
        self.bytes = self.made.setdefault(self.handle, torch.empty(size, dtype=torch.uint8))

    def close(self) -> None:
        assert (self.handle in self.made) != self.mine
        self.made.pop(self.handle, None)


def nothing() -> None:
    pass


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Wire, Wire]]:
    """A sender and a receiver."""
    monkeypatch.setattr(wire, "IpcMemory", FakeMemory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    listener = socket.create_server(("127.0.0.1", 0))
    address, limit = listener.getsockname(), timedelta(seconds=5)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=limit
    )
    receiver = Wire(store, "key", 1, "ipc", CPU, 2.0, BUCKET)
    sender = connect(address, "key", "ipc", CPU, 2.0, BUCKET)
    yield sender, receiver
    receiver.close()
    sender.close()


def test_tensors_arrive_as_they_were_sent(ends: tuple[Wire, Wire]) -> None:
    sender, receiver = ends
    with ThreadPoolExecutor(1) as pool:
        for turn in range(3):
            given: list[tuple[str, Tensor]] = [(name, tensor + turn) for name, tensor in TENSORS]
            header = header_of(given)
            sent = pool.submit(sender.send, given, header, nothing)
            found = {name: tensor.clone() for name, tensor in receiver.receive(header, nothing)}
            sent.result()
            assert list(found) == [name for name, _ in given]
            assert all(torch.equal(found[name], tensor) for name, tensor in given)
            assert not sender.broken
            assert not receiver.broken


def test_an_end_that_goes_away_is_an_error_of_the_other(ends: tuple[Wire, Wire]) -> None:
    sender, receiver = ends
    header = header_of(TENSORS)

    def stop() -> Iterator[tuple[str, Tensor]]:
        yield from TENSORS[:2]
        raise KeyError("gone")

    def check() -> None:
        if sent.done():
            raise DepartedError("the program that sends the weights has gone")

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, stop(), header, nothing)
        with pytest.raises(DepartedError):
            for _ in receiver.receive(header, check):
                pass
        assert isinstance(sent.exception(), KeyError)
    assert sender.broken
    assert receiver.broken
