"""Checkpoints: where they are, and how their tensors get into the model.

The model names, for each tensor of a Hugging Face checkpoint, the `Shard` that it holds: a slice or all of it, and the
view of a (fused) parameter that this belongs into. The loader copies, and holds the two sides to each other. It knows
nothing of the model's structure.

From files into tensors on a GPU, through a few pinned buffers that several threads fill.

A copy from ordinary memory to a GPU is slow, because the driver first brings it into pinned memory of its own, a piece
at a time. Here each thread reads pieces of files straight into its pinned buffers (which needs no interpreter, so the
threads run side by side) and has them copied while it fills the next one. A slice of columns is many short runs of
bytes, which are gathered from the mapped file in one copy. On the CPU the same code runs with ordinary buffers.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from fastgen.model.weights import FLOATS, Shard, TensorMatcher

BUNDLED = Path(__file__).parent.parent / "tiny"

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Everything but weights; fetched first, because the index says which weights there are.
_SMALL_FILES = [
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template*", _INDEX,
]  # fmt: skip
_CONVERSION = (
    "fastgen reads safetensors only, so convert other formats with transformers: "
    "AutoModelForCausalLM.from_pretrained(folder, dtype='auto').save_pretrained(folder)"
)


def resolve(model: str | Path | None, revision: str | None = None, weights: bool = True) -> Path:
    """The local folder of a model: the bundled one (None), a folder, or a hub id, which is fetched if need be.

    Of a hub repository only the configuration, the tokenizer and (with `weights`) the safetensors files that the index
    names are fetched, else `model.safetensors`; what is in huggingface_hub's cache suffices when the hub can not be
    reached. Raises ValueError if the model is neither a folder nor on the hub, if access to it needs a login, or if it
    has no config.json (with `weights`; a tokenizer alone needs none).
    """
    folder = BUNDLED if model is None else Path(model).expanduser()
    if not folder.is_dir() and model is not None:
        folder = _fetch_model(str(model), revision, weights)
    elif revision is not None:
        raise ValueError(f"revision={revision!r} goes with a hub id, and {folder} is a folder")
    if weights and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; a checkpoint folder in Hugging Face's format is needed")
    return folder


def load(targets: Mapping[str, Shard], folder: Path, progress: bool = False) -> None:
    """Copy the checkpoint of a folder into `targets`, which are all on one device, converting dtypes.

    Only files that `model.safetensors.index.json` names are read, else `model.safetensors`, and of each tensor only the
    slice that is wanted (`stage` says how). With `progress`, a tqdm bar in bytes. Raises ValueError, before
    anything is copied, with the name of the file that is missing, truncated or corrupt, that lacks a tensor, or whose
    tensor `TensorMatcher` refuses.
    """
    (device,) = {part.view.device for part in targets.values()}
    stage(_pieces(targets, folder), device, progress)


def _pieces(targets: Mapping[str, Shard], folder: Path) -> list[Piece]:
    """Where in the files the slices are that `targets` want, and where they belong; all of `targets`."""
    files = _weight_files(folder)
    _check_present(files, folder)
    matcher, pieces = TensorMatcher(targets), []
    for path, names in files.items():
        wanted = _wanted(path, names)  # holds the header to the format and to the file's size
        header, start = _read_header(path)
        for name in wanted:
            entry = header[name]
            dtype = FLOATS.get(entry["dtype"], entry["dtype"])
            with _about(path):
                part = matcher.find(name, entry["shape"], dtype)
            if part is not None:
                assert isinstance(dtype, torch.dtype)
                pieces.append(_piece(path, start + entry["data_offsets"][0], dtype, part))
    with _about(folder):
        matcher.check_complete()
    return pieces


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Put a path before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _piece(path: Path, offset: int, dtype: torch.dtype, part: Shard) -> Piece:
    """The slice of a tensor whose bytes begin at `offset`."""
    if part.is_whole:
        return Piece(path, offset, dtype, part.view)
    step = math.prod(part.shape[part.dim + 1 :]) * dtype.itemsize  # from one index along `dim` to the next
    pitch = part.shape[1] * step if part.dim == 1 else None
    return Piece(path, offset + part.start * step, dtype, part.view, pitch)


def fill_random(targets: Mapping[str, Shard], seed: int = 0) -> None:
    """Fill the views for `load="dummy"`: norm weights with 1, all else from a normal distribution of deviation 0.02.

    On the views' own device, from generators of its own: the same seed, name, start and shape of a view give the same
    values on the same device, whatever else there is.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, part in targets.items():
            view = part.view
            if name.endswith("norm.weight"):
                view.fill_(1.0)
                continue
            if view.device not in generators:
                generators[view.device] = torch.Generator(view.device)
            own = generators[view.device].manual_seed(zlib.crc32(f"{seed} {name} {part.start}".encode()))
            view.normal_(0.0, 0.02, generator=own)


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files to read, each with the names to take from it; None: all of them."""
    index = folder / _INDEX
    if not index.is_file():
        return {folder / _SINGLE: None}
    files: dict[Path, list[str] | None] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            names = files.setdefault(folder / file, [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}; fetch it again") from error
    return files


def _check_present(files: Iterable[Path], folder: Path) -> None:
    """Raise ValueError for the first weight file that is missing."""
    for path in files:
        if path.is_file():
            continue
        if (folder / _INDEX).is_file():
            raise ValueError(f"{path} is missing, though {_INDEX} names it; fetch it again")
        pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
        instead = f"there is {pickles[0]} instead" if pickles else f"there is no {_INDEX}"
        raise ValueError(f"{path} is missing, and {instead}; {_CONVERSION}")


def _wanted(path: Path, names: list[str] | None) -> list[str]:
    """Which tensors of a safetensors file to take, in their order there."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            stored: list[str] = file.keys()  # sorted, which is how files are laid out
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}); delete it and fetch it again"
        ) from error
    lacking = set(names or ()) - set(stored)
    if lacking:
        raise ValueError(f"{path} lacks the tensor {min(lacking)!r} that {_INDEX} places there")
    wanted = set(stored if names is None else names)
    return [name for name in stored if name in wanted]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file (https://github.com/huggingface/safetensors), and where its data begin.

    A name's entry has dtype, shape and data_offsets, which count from there.
    """
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(size)), 8 + size


def _fetch_model(model: str, revision: str | None, weights: bool) -> Path:
    """Bring a hub repository into huggingface_hub's cache, as far as it is needed, and return its folder there."""
    from huggingface_hub import errors

    try:
        folder = _fetch(model, revision, _SMALL_FILES, bars=False)
        lacking = (
            [str(path.relative_to(folder)) for path in _weight_files(folder) if not path.is_file()] if weights else []
        )
        if lacking:  # at the commit of the first part, even if the repository moved on meanwhile
            _fetch(model, folder.name, lacking, bars=True)
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{model} is gated: accept its licence at https://huggingface.co/{model}, then log in with"
            " `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{model} has no revision {revision!r} on the hub") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"{model} is neither a folder nor a model on the hub; for a private one log in with `hf auth login`"
            " or set HF_TOKEN"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(
            f"{model} is not a folder, is not in the local hub cache, and the hub can not be reached ({error})"
        ) from error
    lacking = [name for name in lacking if not (folder / name).is_file()]
    if lacking:
        remedy = f"fetch it with `hf download {model}`"
        if not (folder / _INDEX).is_file():
            remedy = f"fetch all files with `hf download {model} --local-dir folder`; {_CONVERSION}"
        raise ValueError(
            f"{model}: {', '.join(lacking)} is not in the local hub cache {folder}, and the hub does not have it or can"
            f" not be reached; {remedy}"
        )
    return folder


class _SilentBar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]  # with stubs and without
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _fetch(model: str, revision: str | None, patterns: list[str], bars: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    tqdm_class: Any = None if bars else _SilentBar  # or every start would show bars of files that are in the cache
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, tqdm_class=tqdm_class))
    except errors.LocalEntryNotFoundError as error:
        # Newer versions refuse a cached snapshot that lacks any file matching a pattern. Not all of them are needed, so
        # take it, and let whoever misses a file say so.
        snapshot = getattr(error, "snapshot_path", None)
        if snapshot is None:
            raise
        return Path(snapshot)


# From files into tensors


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
