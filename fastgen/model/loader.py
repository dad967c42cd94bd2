"""Finds checkpoints, and copies their tensors into the model.

The model gives a `Shard` for each tensor of a Hugging Face checkpoint: the slice that the rank holds, and the view that
the slice is copied into. The loader matches these with the files and copies; it knows nothing about the structure of
the model.

The files are mapped into memory, and several threads copy pieces of them. If the model is on a GPU, each thread first
copies its piece to pinned memory, which the driver would do in a single thread.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from fastgen.device.pinned import on_stream
from fastgen.device.threads import at_most
from fastgen.model.config import BUNDLED_NAME, ModelConfig
from fastgen.model.quantization import SKIPPED
from fastgen.model.weights import EMBEDDING, FLOATS, HEAD, UNUSED, Shard, TensorMatcher, text_name
from fastgen.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BUNDLED = Path(__file__).parent.parent / "tiny"

THREADS = min(os.cpu_count() or 1, 8)
PIECE_BYTES = 16 << 20

SCALE = ".weight_scale"
_DTYPES = {**FLOATS, "F8_E4M3": torch.float8_e4m3fn}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Advice in Python has double quotes, so that the command line does not take its arguments for options.
_GGUF = (
    "convert it with transformers, if that can read it: AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, "
    'dtype="auto").save_pretrained(other), and the tokenizer likewise'
)
_FOLDER = "give the folder of config.json and the weights"
_CONVERSION = (
    "fastgen reads safetensors only, so convert other formats with transformers: "
    'AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(folder)'
)


def resolve(model: str | Path | None, revision: str | None = None, weights: bool = True) -> Path:
    """Return the local folder of a model: BUNDLED_NAME or None (the bundled model), a folder, or a hub id.

    If `model` is a hub id, files that are not in the cache of huggingface_hub are fetched: the configuration, the
    tokenizer and, with `weights`, the safetensors files that the index names, or else `model.safetensors`. If the hub
    cannot be reached, the cache is used. Raises ValueError if the model is neither a folder nor on the hub, or if
    access to it needs a login.
    """
    folder = BUNDLED if model is None or model == BUNDLED_NAME else Path(model).expanduser()
    if folder.exists() and not folder.is_dir():
        remedy = _GGUF if folder.suffix == ".gguf" else _FOLDER
        raise ValueError(f"{folder} is a file, and fastgen reads folders in Hugging Face's format; {remedy}")
    if not folder.is_dir():
        from fastgen.model.hub import fetch_model  # a folder needs no hub

        folder = fetch_model(str(model), revision, weight_files if weights else None)
    elif revision is not None:
        raise ValueError(f"revision={revision!r} goes with a hub id, and {folder} is a folder")
    if weights and (folder / _SINGLE).is_file() and (folder / _INDEX).is_file():
        log.warning(
            "%s has %s and %s; the first is read, as in transformers; delete the other", folder, _SINGLE, _INDEX
        )
    return folder


def find_tokenizer(name: str | Path | None, folder: Path, **options: Any) -> Tokenizer | None:
    """Return the tokenizer with this name (see `resolve`), or by default the model's own, or None if it has none.

    folder: the model's folder. options: see Tokenizer.
    """
    try:
        source = folder if name is None else resolve(name, weights=False)
    except ValueError as error:
        raise ValueError(f"tokenizer: {error}") from error
    tokenizer = Tokenizer.find(source, **options)
    if name is not None and tokenizer is None:
        raise ValueError(f"tokenizer is {str(name)!r}, which has no tokenizer files")
    return tokenizer


def with_eos_of(tokenizer: Tokenizer | None, config: ModelConfig) -> ModelConfig:
    """Return the configuration of a model whose answers also end with the end token of its tokenizer."""
    eos = None if tokenizer is None else tokenizer.eos
    if eos is None or eos[0] in config.eos_ids or not 0 <= eos[0] < config.vocab_size:
        return config
    log.warning(
        "the tokenizer's end token %s (%d) is not among the model's eos_token_id %s; all of them end answers",
        eos[1],
        eos[0],
        list(config.eos_ids),
    )
    return replace(config, eos_ids=(*config.eos_ids, eos[0]))


def fill_random(targets: Mapping[str, Shard]) -> None:
    """Fill the views for `load="dummy"`: norm weights with 1, others from a normal distribution with deviation 0.02.

    The values depend only on a shard's name, start and shape, and on the kind of device.
    """
    (device,) = {shard.view.device for shard in targets.values()}
    generator = torch.Generator(device)
    with torch.no_grad():
        for name, shard in targets.items():
            if "norm" in name.split(".")[-2]:
                shard.view.fill_(1.0)
            else:
                generator.manual_seed(zlib.crc32(f"{name} {shard.start}".encode()))
                numbers = shard.staged()
                numbers.normal_(0.0, 0.02, generator=generator)
                replace(shard, shape=tuple(numbers.shape), start=0).write(numbers)


def load(targets: Mapping[str, Shard], folder: Path, progress: bool = False, whole: bool = True) -> None:
    """Copy the checkpoint in a folder into `targets`, which are all on one device, and convert dtypes.

    Only `model.safetensors` is read, or else the files that `model.safetensors.index.json` names, and only the slice
    of each tensor that its shard holds. progress: show a progress bar in bytes. whole: the targets are all tensors of
    the model. Raises ValueError before anything is copied if a file is missing, truncated or corrupt or lacks a tensor,
    or if a tensor does not match.
    """
    (device,) = {shard.view.device for shard in targets.values()}
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    pieces = _find_pieces(targets, folder, whole)
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fastgen-load")

    def copy(piece: tuple[Shard, Tensor]) -> int:
        """Copy a piece, through pinned memory if it goes to a GPU, and return its size in the file in bytes."""
        shard, source = piece
        size = source.nbytes
        with torch.no_grad(), at_most(1), on_stream(stream):
            if stream is not None:
                dtype = shard.staged_as(source.dtype)
                source = torch.empty(source.shape, dtype=dtype, device="cpu", pin_memory=True).copy_(source)
            shard.write(source)  # waits for the copy, so that a thread holds only one piece of pinned memory
        return size

    total = sum(source.nbytes for _, source in pieces)
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar:
        try:
            for size in pool.map(copy, pieces):
                bar.update(size)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, threads end after their current piece


def _find_pieces(targets: Mapping[str, Shard], folder: Path, whole: bool = True) -> list[tuple[Shard, Tensor]]:
    """Match the tensors of a checkpoint with all `targets`. Return the pieces to copy: shards of some rows of a view,
    each with the same rows of the mapped file."""
    of_int4 = tuple({suffix for shard in targets.values() for suffix in shard.skipped})
    is_fp8 = any(name.endswith(SCALE) for name in targets)
    skipped = (*SKIPPED, *of_int4) if of_int4 else SKIPPED if is_fp8 else ()
    matcher, pieces = TensorMatcher(targets, skipped=skipped), list[tuple[Shard, Tensor]]()
    some = None if whole else targets.keys()
    names = {_target_name(name, targets) for _, _, name in _entries(folder, some)}
    for path, file, name in _entries(folder, some):
        entry = file.get_slice(name)
        for place in _places(name, targets, names):
            with _about(path):
                shard = matcher.find(place, entry.get_shape(), _DTYPES.get(entry.get_dtype(), entry.get_dtype()))
                if shard is None and of_int4 and not place.startswith(UNUSED):
                    from fastgen.model.int4_layouts import check_skipped  # only checkpoints in int4 have loaded it

                    check_skipped(place, file.get_tensor(name), targets)
            if shard is not None and shard.view.numel():
                tensor = file.get_tensor(name)
                for part in shard.separated():
                    pieces += part.pieces(part.slice(tensor), PIECE_BYTES)
    with _about(folder):
        matcher.check_names()
        matcher.check_complete()
    return pieces


def _target_name(name: str, targets: Mapping[str, Shard]) -> str:
    """Return the name that a tensor has in the text model. In a checkpoint of a model without a head, such as
    Qwen3-Embedding's, names begin at the layers."""
    name = text_name(name)
    name = name.removesuffix("_inv") if name.endswith(SCALE + "_inv") else name  # it multiplies, too
    return f"model.{name}" if f"model.{name}" in targets else name


def _places(name: str, targets: Mapping[str, Shard], names: Collection[str]) -> list[str]:
    """Return the names of the targets of a tensor. names: the names that all tensors have in the text model."""
    place = _target_name(name, targets)
    if place == HEAD and EMBEDDING in names and HEAD not in targets:
        return []  # of a tied model, where both are equal (see `follow_head`)
    # Without a head, the embedding stands for one that is not tied to it.
    stands_for_head = place == EMBEDDING != text_name(name) and HEAD in targets and HEAD not in names
    return [EMBEDDING, HEAD] if stands_for_head else [place]


def follow_head(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return the configuration of the model in a folder: a tied one has its own head if the files have one that differs
    from the embedding, as in transformers."""
    if not config.tied:
        return config
    names = {HEAD, EMBEDDING, EMBEDDING.removeprefix("model.")}
    tensors = {text_name(name): file.get_tensor(name) for _, file, name in _entries(folder, names)}
    if len(tensors) < 2 or HEAD not in tensors:
        return config
    from fastgen.model.tied import are_equal  # few files have both

    if are_equal(*tensors.values()):
        return config
    log.warning(
        "%s: config.json has tie_word_embeddings=true, and the weights have a head that is not the embedding; it is "
        "used, as in transformers; set tie_word_embeddings to false",
        folder,
    )
    return replace(config, own_head=True)


def scale_dtype(folder: Path, suffix: str) -> str:
    """Return the dtype of a checkpoint's scales, whose names end in `suffix`: float32 if they do not share one of 2
    bytes."""
    entries = ((file, name) for _, file, name in _entries(folder) if name.endswith("." + suffix))
    dtypes = {file.get_slice(name).get_dtype() for file, name in entries}
    return {("F16",): "float16", ("BF16",): "bfloat16"}.get(tuple(dtypes), "float32")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's safetensors files, or of one such file, by name, in the mapped files. Raises
    ValueError for a file that is missing, truncated or corrupt, or that lacks a tensor."""
    if path.is_dir():
        return {name: file.get_tensor(name) for _, file, name in _entries(path)}
    if not path.is_file():
        raise ValueError(f"there is no folder {path}, nor a safetensors file, on the Generator's machine")
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _entries(folder: Path, some: Collection[str] | None = None) -> Iterator[tuple[Path, Any, str]]:
    """Yield (path of the file, open file, tensor name) for each tensor to read from a folder. some: the names of the
    tensors to read, as in the text model; None: all."""
    files = weight_files(folder)
    _check_present(files, folder)
    for path, names in files.items():
        with _open(path) as file:
            stored_names = set(file.keys())
            selection = stored_names if names is None else names
            if lacking := selection - stored_names:
                raise ValueError(f"{path} lacks the tensor {min(lacking)!r} that {_INDEX} places there")
            for name in sorted(name for name in selection if some is None or text_name(name) in some):
                yield path, file, name


def _open(path: Path) -> Any:
    """Map a safetensors file into memory, for a `with` block. Raises ValueError if it is truncated or corrupt."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}); delete it and fetch it again"
        ) from error


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Put a path before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Return {weight file to read: names of the tensors to take from it, or None for all}.

    Beside a single file, an index is left over from an earlier save in several files; transformers does not read it.
    """
    index = folder / _INDEX
    if (folder / _SINGLE).is_file() or not index.is_file():
        return {folder / _SINGLE: None}
    files: dict[Path, set[str]] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file in this folder")
            files.setdefault(folder / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
