"""A library of NCCL without GPUs, whose other ranks come or not as a test says."""
# ruff: noqa: N802 (names of the library)

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fastgen.device import nccl

SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7


class FakeEvent:
    def __init__(self, done: bool) -> None:
        self._done = done

    def query(self) -> bool:
        return self._done


class FakeNccl:
    """state: function of the number of looks that returns what ncclCommGetAsyncError reports. called: names of the
    functions that were called, without looks. config: size, magic, version and blocking of the communicator."""

    def __init__(self, state: Callable[[int], int]) -> None:
        self.state, self.called, self.config, self.looks = state, list[str](), list[int](), 0

    def ncclCommInitRankConfig(self, handle: Any, size: int, id: Any, rank: int, config: Any) -> int:
        self.called.append("init")
        handle._obj.value = 1
        fields = ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32))
        self.config = [fields[0], fields[2], fields[3], fields[4]]
        return IN_PROGRESS

    def ncclCommGetAsyncError(self, handle: Any, state: Any) -> int:
        self.looks += 1
        state._obj.value = self.state(self.looks)
        return SUCCESS

    def ncclAllReduce(self, *_: Any) -> int:
        return self._begun("all_reduce")

    def ncclBroadcast(self, *_: Any) -> int:
        return self._begun("broadcast")

    def ncclCommAbort(self, _: Any) -> int:
        self.called.append("abort")
        return IN_PROGRESS

    def ncclGetErrorString(self, status: int) -> bytes:
        return b"error %d" % status

    def _begun(self, name: str) -> int:
        self.called.append(name)
        self.looks = 0
        return IN_PROGRESS


def use(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch, sends: bool = True) -> FakeNccl:
    """Let communicators use a fake library. sends: the work on the stream ends."""

    class Stream:
        cuda_stream = 0

        def record_event(self) -> FakeEvent:
            fake.called.append("event")
            return FakeEvent(sends)

    monkeypatch.setattr(nccl, "_library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return fake
