"""Checkpoints: where they are, and how their tensors get into the model.

The model names, for each tensor of a Hugging Face checkpoint, the `Part` that it holds: a slice or all of it, and the
view of a (fused) parameter that this belongs into. The loader copies, and holds the two sides to each other. It knows
nothing of the model's structure.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from fastgen.parallel import Part
from fastgen.staging import Piece, stage

BUNDLED = Path(__file__).parent / "tiny"

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
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


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


def load(targets: Mapping[str, Part], folder: Path, progress: bool = False) -> None:
    """Copy the checkpoint of a folder into `targets`, which are all on one device, converting dtypes.

    Only files that `model.safetensors.index.json` names are read, else `model.safetensors`, and of each tensor only the
    slice that is wanted (`fastgen.staging` says how). With `progress`, a tqdm bar in bytes. Raises ValueError, before
    anything is copied, with the name of the file that is missing, truncated or corrupt, that lacks a tensor, or whose
    tensor `Places` refuses.
    """
    (device,) = {part.view.device for part in targets.values()}
    stage(_pieces(targets, folder), device, progress)


def _pieces(targets: Mapping[str, Part], folder: Path) -> list[Piece]:
    """Where in the files the slices are that `targets` want, and where they belong; all of `targets`."""
    shards = _shards(folder)
    _check_present(shards, folder)
    places, pieces = Places(targets), []
    for path, names in shards.items():
        wanted = _wanted(path, names)  # holds the header to the format and to the file's size
        header, start = _read_header(path)
        for name in wanted:
            entry = header[name]
            dtype = _FLOATS.get(entry["dtype"], entry["dtype"])
            with _about(path):
                part = places.find(name, entry["shape"], dtype)
            if part is not None:
                assert isinstance(dtype, torch.dtype)
                pieces.append(_piece(path, start + entry["data_offsets"][0], dtype, part))
    with _about(folder):
        places.check_complete()
    return pieces


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Put a path before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _piece(path: Path, offset: int, dtype: torch.dtype, part: Part) -> Piece:
    """The slice of a tensor whose bytes begin at `offset`."""
    if part.is_whole:
        return Piece(path, offset, dtype, part.view)
    step = math.prod(part.shape[part.dim + 1 :]) * dtype.itemsize  # from one index along `dim` to the next
    pitch = part.shape[1] * step if part.dim == 1 else None
    return Piece(path, offset + part.start * step, dtype, part.view, pitch)


def fill_random(targets: Mapping[str, Part], seed: int = 0) -> None:
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


class Places:
    """Where tensors belong: each name of `targets` once, and what else a checkpoint may hold."""

    def __init__(self, targets: Mapping[str, Part]) -> None:
        self._targets = targets
        self._seen: set[str] = set()

    def find(self, name: str, shape: Sequence[int], dtype: torch.dtype | str) -> Part | None:
        """The part to take of a tensor; None for one to skip. Raises ValueError where it does not fit."""
        part = self._targets.get(name)
        if part is None:
            if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight":
                return None
            raise ValueError(f"unexpected tensor {name!r}; the model of this config.json has no such parameter")
        if name in self._seen:
            raise ValueError(f"tensor {name!r} is given twice")
        self._seen.add(name)
        if list(shape) != list(part.shape):
            raise ValueError(f"tensor {name!r} has shape {list(shape)}; the model needs {list(part.shape)}")
        if dtype not in _FLOATS.values():
            raise ValueError(f"tensor {name!r} is {dtype}; bfloat16, float16 and float32 weights are supported")
        return part

    def check_complete(self, listed: int = 5) -> None:
        """Raise ValueError where tensors are missing, with the names of so many of them."""
        missing = [name for name in self._targets if name not in self._seen]
        if missing:
            more = f" and {len(missing) - listed} more" if len(missing) > listed else ""
            names = ", ".join(missing[:listed])
            raise ValueError(f"missing {len(missing)} of {len(self._targets)} tensors: {names}{more}")


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files to read, each with the names to take from it; None: all of them."""
    index = folder / _INDEX
    if not index.is_file():
        return {folder / _SINGLE: None}
    shards: dict[Path, list[str] | None] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            names = shards.setdefault(folder / file, [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}; fetch it again") from error
    return shards


def _check_present(shards: Iterable[Path], folder: Path) -> None:
    """Raise ValueError for the first weight file that is missing."""
    for path in shards:
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
        lacking = [str(path.relative_to(folder)) for path in _shards(folder) if not path.is_file()] if weights else []
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
