"""From files into tensors on a GPU, through a few pinned buffers that several threads fill.

A copy from ordinary memory to a GPU is slow, because the driver first brings it into pinned memory of its own, a piece
at a time. Here each thread reads pieces of files straight into its pinned buffers (which needs no interpreter, so the
threads run side by side) and has them copied while it fills the next one. A slice of columns is many short runs of
bytes, which are gathered from the mapped file in one copy. On the CPU the same code runs with ordinary buffers.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

THREADS = 8
BUFFERS = 2  # a thread: one is filled while the other is copied
BUFFER_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, from `offset` on, that are a tensor of `dtype`, and the view that it is copied into.

    pitch: bytes from the beginning of one row to that of the next, where they are apart (None: each begins where the
    last one ends). A row is what one index of the view's first dimension selects.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    view: Tensor
    pitch: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.view.numel() * self.dtype.itemsize


def stage(pieces: Iterable[Piece], device: torch.device, progress: bool = False, buffer: int | None = None) -> None:
    """Read the pieces into their views, which are all on `device`, converting dtypes there; done when this returns.

    Work that was launched before on the current stream comes first. buffer: bytes (None: BUFFER_BYTES); one row must
    fit where rows are apart, in the file or in the view. Raises ValueError for a file that ends too early; what came
    before it may have been copied.
    """
    pieces = [piece for piece in pieces if piece.num_bytes]
    largest = max((piece.num_bytes for piece in pieces), default=0)
    buffer = min(BUFFER_BYTES if buffer is None else buffer, largest)  # a small checkpoint pins little
    parts = _Shared(part for piece in pieces for part in _parts(piece, buffer))
    total = sum(piece.num_bytes for piece in pieces)
    started = torch.cuda.current_stream(device) if device.type == "cuda" else None
    threads = min(THREADS, os.cpu_count() or 1)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar,
        ThreadPoolExecutor(threads, thread_name_prefix="fastgen-load") as pool,
    ):
        readers = [pool.submit(_read, parts, buffer, device, started, bar) for _ in range(threads)]
        try:
            wait(readers, return_when=FIRST_EXCEPTION)
        finally:
            parts.end()  # after an error, and after Ctrl-C, the other threads stop at their next part
    for reader in readers:
        reader.result()
    if device.type == "cuda":
        _give_back(device)


class _Shared:
    """An iterator that several threads take from."""

    def __init__(self, parts: Iterator[Piece]) -> None:
        self.lock = threading.Lock()
        self._parts = parts
        self._ended = False

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> Piece:
        with self.lock:
            if self._ended:
                raise StopIteration
            return next(self._parts)

    def end(self) -> None:
        self._ended = True


def _parts(piece: Piece, most: int) -> Iterator[Piece]:
    """Cut a piece into ones of at most `most` bytes."""
    view = piece.view.detach()  # threads have a grad mode of their own
    if piece.pitch is None and view.is_contiguous():
        view = view.view(-1)
    offset = piece.offset
    row = math.prod(view.shape[1:]) * piece.dtype.itemsize
    assert row <= most, f"a row of {row} bytes does not fit a buffer of {most}"
    for part in torch.split(view, most // row):
        yield Piece(piece.path, offset, piece.dtype, part, piece.pitch)
        offset += len(part) * (piece.pitch or row)


def _read(parts: _Shared, size: int, device: torch.device, started: torch.cuda.Stream | None, bar: Any) -> None:
    """What a thread does: take parts, read each into the buffer that was used longest ago, and launch its copy."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stream = None
        if started is not None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(started)
            stack.enter_context(torch.cuda.stream(stream))
            stack.callback(stream.synchronize)  # before the buffers go
        buffers: list[Tensor] = []
        copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        for turn, part in enumerate(parts):
            slot = turn % BUFFERS
            if len(buffers) == slot:
                buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=stream is not None))
            event = copied[slot]
            if event is not None:
                event.synchronize()
            filled = buffers[slot][: part.num_bytes]
            _fill(filled, part)
            part.view.copy_(filled.view(part.dtype).view(part.view.shape), non_blocking=True)
            if stream is not None:
                copied[slot] = stream.record_event(event)
            with parts.lock:
                bar.update(part.num_bytes)


def _fill(buffer: Tensor, part: Piece) -> None:
    """Read a part of a file."""
    with open(part.path, "rb", buffering=0) as file:
        if part.pitch is not None:
            rows = _mapped_rows(file.fileno(), part)
            np.copyto(buffer.numpy().reshape(rows.shape), rows)
            return
        into = buffer.numpy().data
        file.seek(part.offset)
        while into:
            count = file.readinto(into)
            if not count:
                raise _truncated(part.path)
            into = into[count:]


def _mapped_rows(file: int, part: Piece) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """The bytes [rows, bytes of a row] of a part with a pitch, in the file, which stays mapped as long as they live.

    Touching a mapped page that the file does not have (any more) ends the process, hence the look at its size just
    before; where rows are contiguous the file is read instead, which may end early without harm.
    """
    assert part.pitch is not None
    rows, row = len(part.view), part.num_bytes // len(part.view)
    within = part.offset % mmap.ALLOCATIONGRANULARITY
    length = within + (rows - 1) * part.pitch + row
    if os.fstat(file).st_size < part.offset - within + length:
        raise _truncated(part.path)
    mapped = mmap.mmap(file, length, access=mmap.ACCESS_READ, offset=part.offset - within)
    return np.ndarray((rows, row), np.uint8, mapped, within, (part.pitch, 1))


def _truncated(path: Path) -> ValueError:
    return ValueError(f"{path} is truncated; delete it and fetch it again")


def _give_back(device: torch.device) -> None:
    """Let go of the pinned buffers, and of what conversions took on the threads' streams: torch would keep both."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # not in every version of torch
    if empty_host_cache is not None:
        empty_host_cache()
