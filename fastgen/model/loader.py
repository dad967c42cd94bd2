"""Checkpoints: where they are, and how their tensors get into the model.

The model names a `Shard` for each tensor of a Hugging Face checkpoint: the slice that it holds, and the view that the
slice is copied into. The loader compares the two sides and copies; it knows nothing of the model's structure.

A copy from ordinary memory to a GPU is slow, because the driver first copies it to pinned memory of its own. So several
threads read pieces of the files into pinned buffers, and each piece goes to the GPU while the next ones are read. On
the CPU the same code runs with ordinary buffers.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from fastgen.device.memory import release_memory
from fastgen.device.pinned import Pinned, on_stream
from fastgen.model.weights import FLOATS, Shard, TensorMatcher

BUNDLED = Path(__file__).parent.parent / "tiny"

THREADS = min(os.cpu_count() or 1, 8)
BUFFERS = 2 * THREADS  # half of them are filled while the other half is copied
BUFFER_BYTES = 16 << 20

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
    """Return the local folder of a model: the bundled one (None), a folder, or a hub id, which is fetched if need be.

    A hub repository gives its configuration, its tokenizer and, with `weights`, the safetensors files that its index
    names, or else `model.safetensors`. The cache of huggingface_hub suffices if the hub can not be reached. Raises
    ValueError if the model is neither a folder nor on the hub, if access to it needs a login, or if it has no
    config.json (with `weights`; a tokenizer alone needs none).
    """
    folder = BUNDLED if model is None else Path(model).expanduser()
    if not folder.is_dir() and model is not None:
        folder = _fetch_model(str(model), revision, weights)
    elif revision is not None:
        raise ValueError(f"revision={revision!r} goes with a hub id, and {folder} is a folder")
    if weights and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; a checkpoint folder in Hugging Face's format is needed")
    return folder


def fill_random(targets: Mapping[str, Shard], seed: int = 0) -> None:
    """Fill the views for `load="dummy"`: norm weights with 1, all others from a normal distribution of deviation 0.02.

    The generator is on the views' device. The same seed, name, start and shape give the same values on the same kind of
    device, whatever other views there are.
    """
    (device,) = {shard.view.device for shard in targets.values()}
    generator = torch.Generator(device)
    with torch.no_grad():
        for name, shard in targets.items():
            if name.endswith("norm.weight"):
                shard.view.fill_(1.0)
            else:
                generator.manual_seed(zlib.crc32(f"{seed} {name} {shard.start}".encode()))
                shard.view.normal_(0.0, 0.02, generator=generator)


def load(targets: Mapping[str, Shard], folder: Path, progress: bool = False) -> None:
    """Copy the checkpoint of a folder into `targets`, which are all on one device, converting dtypes.

    Only files that `model.safetensors.index.json` names are read, or else `model.safetensors`, and of each tensor only
    the slice that its shard holds. progress: show a tqdm bar in bytes. Raises ValueError, before anything is copied,
    for a file that is missing, truncated or corrupt, or that lacks a tensor, and for a tensor that does not match.
    """
    (device,) = {shard.view.device for shard in targets.values()}
    pieces = _find_pieces(targets, folder)
    total = sum(piece.num_bytes for piece in pieces)
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fastgen-load")
    with (
        _Copier(pieces, device) as copier,
        tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar,
    ):
        try:
            for piece, _ in zip(pieces, pool.map(copier.copy, pieces), strict=True):
                bar.update(piece.num_bytes)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, threads end with their present piece
    release_memory(str(device))  # conversions of dtypes took some


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor in a file, and the part of a shard's view that they are copied into.

    offset: of the first row, in bytes from the beginning of the file; pitch: bytes from one row to the next; dtype: in
    the file; view: [rows, ...].
    """

    path: Path
    offset: int
    pitch: int
    dtype: torch.dtype
    view: Tensor

    @property
    def num_bytes(self) -> int:
        return self.view.numel() * self.dtype.itemsize

    def read(self, buffer: np.ndarray) -> None:
        """Read the rows into `buffer`, uint8 [num_bytes]."""
        rows = buffer.reshape(len(self.view), -1)
        if self.pitch != rows.shape[1]:  # a slice of columns: runs of bytes that are gathered from the mapped file
            length = (len(rows) - 1) * self.pitch + rows.shape[1]
            mapped = np.memmap(self.path, np.uint8, "r", self.offset, (length,))
            np.copyto(rows, np.ndarray(rows.shape, np.uint8, mapped, strides=(self.pitch, 1)))
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(buffer.data) < len(buffer):
                raise ValueError(f"{self.path} is truncated; delete it and fetch it again")


class _Copier:
    """Buffers between files and `device`, pinned if that is a GPU, for several threads that call `copy`."""

    def __init__(self, pieces: list[_Piece], device: torch.device) -> None:
        size = -(-max((piece.num_bytes for piece in pieces), default=0) // 16) * 16
        count = min(BUFFERS, len(pieces))
        self._pinned = Pinned(count * size, device, "loading the weights", "end other programs")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._free: SimpleQueue[tuple[Tensor, torch.cuda.Event | None]] = SimpleQueue()  # the longest used first
        for number in range(count):
            self._free.put((self._pinned.bytes[number * size : (number + 1) * size], None))

    def copy(self, piece: _Piece) -> None:
        """Read a piece, and launch its copy into the view."""
        buffer, copied = self._free.get()
        try:
            if copied is not None:
                copied.synchronize()
            filled = buffer[: piece.num_bytes]
            piece.read(filled.numpy())
            with torch.no_grad(), on_stream(self._stream):
                source = filled.view(piece.dtype).view(piece.view.shape)
                piece.view.copy_(source, non_blocking=True)
        finally:
            self._free.put((buffer, None if self._stream is None else self._stream.record_event()))

    def __enter__(self) -> _Copier:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _find_pieces(targets: Mapping[str, Shard], folder: Path) -> list[_Piece]:
    """Match the tensors of a checkpoint with all `targets`, and return the pieces to copy."""
    files = _weight_files(folder)
    _check_present(files, folder)
    matcher, pieces = TensorMatcher(targets), list[_Piece]()
    for path, names in files.items():
        header, start = _read_header(path)
        wanted = set(header) if names is None else names
        if lacking := wanted - set(header):
            raise ValueError(f"{path} lacks the tensor {min(lacking)!r} that {_INDEX} places there")
        for name, entry in header.items():
            if name not in wanted:
                continue
            dtype = FLOATS.get(entry["dtype"], entry["dtype"])
            with _about(path):
                shard = matcher.find(name, entry["shape"], dtype)
            if shard is not None:
                assert isinstance(dtype, torch.dtype)
                pieces += _cut(path, start + entry["data_offsets"][0], dtype, shard)
    with _about(folder):
        matcher.check_complete()
    return pieces


def _cut(path: Path, offset: int, dtype: torch.dtype, shard: Shard) -> Iterator[_Piece]:
    """Cut a shard into pieces of at most BUFFER_BYTES. offset: of the whole tensor in the file."""
    view = shard.view.detach()
    view = view if view.ndim else view[None]
    if not view.numel():
        return
    row = pitch = math.prod(view.shape[1:]) * dtype.itemsize
    if not shard.is_whole:
        step = math.prod(shard.shape[shard.dim + 1 :]) * dtype.itemsize  # from one index along `dim` to the next
        offset += shard.start * step
        pitch = shard.shape[1] * step if shard.dim == 1 else row
    for part in torch.split(view, max(BUFFER_BYTES // row, 1)):
        yield _Piece(path, offset, pitch, dtype, part)
        offset += len(part) * pitch


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Put a path before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Return the weight files to read, each with the names of the tensors to take from it; None stands for all."""
    index = folder / _INDEX
    if not index.is_file():
        return {folder / _SINGLE: None}
    files: dict[Path, set[str]] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            files.setdefault(folder / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}; fetch it again") from error
    return dict(files)


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


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors file (https://github.com/huggingface/safetensors), and where its data begin.

    A tensor's entry has dtype, shape and data_offsets, which count from there. Raises ValueError for a file that is not
    whole.
    """
    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass  # it has checked the header against the file's size
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}); delete it and fetch it again"
        ) from error
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _fetch_model(model: str, revision: str | None, weights: bool) -> Path:
    """Bring the needed files of a hub repository into huggingface_hub's cache, and return its folder there."""
    from huggingface_hub import errors

    login = "log in with `hf auth login` or set HF_TOKEN"
    try:
        folder = _fetch(model, revision, _SMALL_FILES, bars=False)
        files = [str(path.relative_to(folder)) for path in _weight_files(folder)] if weights else []
        if lacking := [name for name in files if not (folder / name).is_file()]:
            # The commit of the first part, even if the repository has moved on meanwhile.
            _fetch(model, folder.name, lacking, bars=True)
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{model} is gated: accept its licence at https://huggingface.co/{model}, then {login}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{model} has no revision {revision!r} on the hub") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(f"{model} is neither a folder nor a model on the hub; for a private one {login}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(
            f"{model} is not a folder, is not in the local hub cache, and the hub can not be reached ({error})"
        ) from error
    if lacking := [name for name in files if not (folder / name).is_file()]:
        remedy = f"fetch it with `hf download {model}`"
        if not (folder / _INDEX).is_file():
            remedy = f"fetch all files with `hf download {model} --local-dir folder`; {_CONVERSION}"
        raise ValueError(
            f"{model}: {', '.join(lacking)} is not in the local hub cache {folder}, and the hub does not have it or can"
            f" not be reached; {remedy}"
        )
    return folder


class _SilentBar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]  # with stubs and without
    """A progress bar that is never shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _fetch(model: str, revision: str | None, patterns: list[str], bars: bool) -> Path:
    """Fetch the files of a hub repository that match `patterns`; return the folder of the snapshot in the cache."""
    from huggingface_hub import errors, snapshot_download

    tqdm_class: Any = None if bars else _SilentBar  # else every start would show bars of files that are in the cache
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, tqdm_class=tqdm_class))
    except errors.LocalEntryNotFoundError as error:
        # Newer versions refuse a cached snapshot that lacks any file matching a pattern. Not all of these files are
        # needed, so return the snapshot; a file that is needed and missing has an error of its own.
        snapshot = getattr(error, "snapshot_path", None)
        if snapshot is None:
            raise
        return Path(snapshot)
