"""The two ends of a weight group, without a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from fastgen.async_engine.wire import Wire, header_of
from fastgen.processes.errors import DepartedError

SENDER = """
import sys
import torch
from fastgen.async_engine.wire import connect, header_of

class Last:
    dtype, shape = torch.float32, (4,)
    def full_tensor(self):
        raise KeyError("last")

wire = connect(("127.0.0.1", int(sys.argv[1])), "key", "gloo", torch.device("cpu"), 20, 16)
tensors = [("first", torch.ones(4)), ("last", Last())]
wire.send(tensors, header_of(tensors), lambda: None)
"""


def test_a_receiver_has_left_the_group_when_it_raises() -> None:
    """With NCCL, an operation that waits for the other end would block the device, with which the caller synchronizes
    before it closes the wire."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))  # type: ignore[attr-defined]
    groups = len(_world.pg_group_ranks)
    wire = Wire(store, "key", 1, "gloo", torch.device("cpu"), 20, 16)
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(store.port)], stderr=subprocess.PIPE)
    header, received = header_of([(name, torch.ones(4)) for name in ("first", "last")]), list[list[float]]()

    def receive() -> None:
        for _, tensor in wire.receive(header, ended(sender)):
            received.append(tensor.tolist())
            assert len(_world.pg_group_ranks) == groups + 1

    try:
        with pytest.raises(DepartedError):
            receive()
        assert len(_world.pg_group_ranks) == groups
        assert wire.broken
        assert received == [[1.0] * 4]
        _, errors = sender.communicate(timeout=20)
        assert b"KeyError: 'last'" in errors
    finally:
        sender.kill()


def ended(sender: subprocess.Popen[bytes]) -> Callable[[], None]:
    """Return a check that raises when the sender has ended."""

    def check() -> None:
        if sender.poll() is not None:
            raise DepartedError("the sender has ended")

    return check
