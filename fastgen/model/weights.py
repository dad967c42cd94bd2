"""The slices of checkpoint tensors that a rank holds, and the names under which they are found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fastgen.kernels.fp8_pages import E4M3

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Supported dtypes of weights, by their names in safetensors files."""
Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Named tensors as programs pass them."""
UNEXPECTED = "the model of this config.json has no such parameter"

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER = {EMBEDDING: HEAD, HEAD: EMBEDDING}
WRAPPERS = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
"""Beginnings of the names of a text model's tensors inside a model with vision: on disk, and in transformers 5."""
_VISION = "vision_tower", "multi_modal_projector", "visual", "vision_adapter", "vision_projection"
UNUSED = (
    *(f"{model}{part}." for model in ("", "model.") for part in _VISION),
    "model.mtp_layers.",
    "mtp.",
)
"""Beginnings of the names of tensors that text does not need: of images, and of layers of MiMo and EXAONE 4.5 that
draft tokens."""

WRAPPING = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that torch adds to those of a model: data parallelism, torch.compile, FSDP, checkpoints."""

QUANTIZED_BYTES = 16 << 20  # size of the pieces in which a weight is quantized


class Part(NamedTuple):
    """The part of a weight that a rank holds: `size` rows (dim 0) or columns (dim 1) from `start` on.

    shape: shape of the whole weight [N, K].
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    size: int


@dataclass(frozen=True)
class Shard:
    """The slice of a checkpoint tensor that a rank holds, and its place in the rank's memory.

    view: the tensor that the slice is copied into, often a part of a fused parameter. shape: shape of the whole tensor
    in the checkpoint. dim: the dimension that is sliced, 0 for rows or 1 for columns. start: first index of the slice
    in that dimension; it ends at start + view.shape[dim]. The slice is empty on ranks that do not apply this tensor,
    for example a bias that only rank 0 adds.

    scales: scales of a view in fp8, float32 [rows], or [rows / 128, columns / 128] for blocks; weights are quantized as
    they are written. An fp8 view without scales takes numbers that are in fp8 already; the checkpoint then has the
    scales as a separate tensor, with a shard of its own, whose shape is () if there is one scale per tensor. Shards of
    int4 are subclasses (int4_layouts.py).

    parts: (start, size) of each slice of a tensor that several modules share, such as qkv_proj; the view holds the
    slices one after the other. (): one slice. form: the form of a view with scales. skipped: suffixes of the names of
    tensors beside this one in a checkpoint that are not needed.
    """

    form: ClassVar[str] = "fp8"
    skipped: ClassVar[tuple[str, ...]] = ()
    view: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    scales: Tensor | None = None
    parts: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        sizes = tuple(self.view.shape)
        if sizes == self.shape or not self.shape:
            assert self.start == 0
            return
        assert self.dim in (0, 1)
        assert 0 <= self.start <= self.start + sizes[self.dim] <= self.shape[self.dim]
        assert sizes == (*self.shape[: self.dim], sizes[self.dim], *self.shape[self.dim + 1 :])

    @classmethod
    def whole(cls, view: Tensor) -> Shard:
        """Return the shard of a whole tensor."""
        return cls(view, tuple(view.shape))

    @property
    def is_whole(self) -> bool:
        return self.view.shape == self.shape or not self.shape

    def slice(self, tensor: Tensor) -> Tensor:
        """Return the slice of a whole tensor [*shape]: a view of it, or a copy if there are `parts`."""
        if self.is_whole:
            return tensor
        parts = self.parts or ((self.start, self.view.shape[self.dim]),)
        slices = [tensor.narrow(self.dim, start, size) for start, size in parts]
        return slices[0] if len(slices) == 1 else torch.cat(slices, self.dim)

    def separated(self) -> Iterator[Shard]:
        """Yield shards of one slice each, which are views of a whole tensor."""
        if self.is_whole or not self.parts:
            yield self
            return
        first, step = 0, 1 if self.scales is None else len(self.view) // len(self.scales)
        for start, size in self.parts:
            scales = None if self.scales is None else self.scales[first // step : (first + size) // step]
            yield Shard(self.view[first : first + size], self.shape, 0, start, scales)
            first += size

    def is_finite(self) -> bool:
        """Return whether all numbers are finite. In fp8, the scale of a number that is not finite is not finite."""
        return bool((self.view if self.scales is None else self.scales).isfinite().all())

    @property
    def memory(self) -> tuple[Tensor | None, ...]:
        """The tensors that hold the numbers: the view, and what a quantized weight has besides."""
        return self.view, self.scales

    def checksum(self) -> str:
        """Return the SHA-256 of the bytes of `memory`, in hexadecimal."""
        digest = sha256()
        for tensor in self.memory:
            if tensor is not None:
                digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def takes(self, dtype: torch.dtype | str) -> bool:
        """Return whether a tensor of this dtype can be written."""
        is_fp8 = self.view.dtype == E4M3 and self.scales is None
        return dtype == E4M3 if is_fp8 else dtype in FLOATS.values()

    def staged_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of `dtype` is copied to the device."""
        return self.view.dtype if self.scales is None else dtype

    def staged(self) -> Tensor:
        """Return a tensor for numbers of the slice that are then written: the view, if it is not quantized."""
        return self.view if self.scales is None else torch.empty_like(self.view, dtype=torch.float32)

    def pieces(self, part: Tensor, size: int) -> Iterator[tuple[Shard, Tensor]]:
        """Yield pieces of about `size` bytes: a shard of some rows of the view, and the same rows of its slice
        `part`."""
        if not self.shape:
            yield self, part
            return
        step = 1 if self.scales is None else len(self.view) // len(self.scales)  # rows per scale
        rows = -(-max(size // part[0].nbytes, 1) // step) * step
        for first in range(0, len(part), rows):
            view, scales = self.view.detach()[first : first + rows], self.scales
            if scales is not None:
                scales = scales[first // step : (first + rows) // step]
            yield Shard(view, tuple(view.shape), scales=scales), part[first : first + rows]

    def write(self, tensor: Tensor) -> None:
        """Copy the slice of a whole tensor into the view, in place, converting dtype and device."""
        part, device = self.slice(tensor), self.view.device
        if part.is_cuda and part.device != device:
            part = part.to(device)  # other GPUs cannot write to memory that fastgen.device.gpu_memory has mapped
        if self.scales is None:
            self.view.copy_(part)
            return
        from fastgen.kernels.fp8 import quantize_weight  # only for weights in fp8

        for piece, rows in self.pieces(part, QUANTIZED_BYTES):  # quantizing takes several times the memory
            result = quantize_weight(rows.to(device), self.scales.dim() > 1)
            piece.view.copy_(result.values)
            assert piece.scales is not None
            piece.scales.copy_(result.scales)


def text_name(name: str) -> str:
    """Return the name that a tensor or module has in the text model, if it is named as inside a model with vision."""
    start = next((start for start in WRAPPERS if name.startswith(start)), "")
    return WRAPPERS.get(start, "") + name.removeprefix(start)


def shard_of(name: str, targets: Mapping[str, Shard]) -> Shard | None:
    """Return the shard of a tensor, or None if there is none. The head of a tied model is its embedding."""
    return targets.get(EMBEDDING if name == HEAD and HEAD not in targets else name)


def known_name(name: str, targets: Mapping[str, Shard]) -> str | None:
    """Return the name of the tensor that is probably meant by an unexpected name: without what wraps a model, without
    any other beginning, or with the beginning that it lacks. None if there is no such tensor."""
    plain = ".".join(part for part in name.split(".") if part not in WRAPPING)
    if shard_of(plain, targets) is not None:
        return plain
    return next((each for each in targets if f".{plain}".endswith(f".{each}") or each.endswith(f".{plain}")), None)


class TensorMatcher:
    """A check of given tensors against the model's shards.

    targets: the shards by Hugging Face name. unexpected: why a tensor without a shard is wrong, for errors. skipped:
    suffixes of the names of tensors that are not needed.
    """

    def __init__(
        self, targets: Mapping[str, Shard], unexpected: str = UNEXPECTED, skipped: tuple[str, ...] = ()
    ) -> None:
        self._targets, self._unexpected = targets, unexpected
        self._skipped = "rotary_emb.inv_freq", *skipped
        self._seen: set[str] = set()
        self._renamed: dict[str, str] = {}  # names that are not expected: the names that are probably meant

    def find(self, name: str, shape: Sequence[int], dtype: torch.dtype | str) -> Shard | None:
        """Return the shard of a tensor, or None if it is not to be written.

        Raises ValueError for a tensor that is unexpected, given twice, of another shape or of an unsupported dtype. One
        with a name that resembles the model's is an error of `check_names`.
        """
        shard = shard_of(name, self._targets)
        if shard is None:
            if name.endswith(self._skipped) or name.startswith(UNUSED):
                return None
            if meant := known_name(name, self._targets):
                self._renamed[name] = meant
                return None
            raise ValueError(f"unexpected tensor {name!r}; {self._unexpected}")
        if name in self._seen:
            raise ValueError(f"tensor {name!r} is given twice")
        self._seen.add(name)
        if list(shape) != list(shard.shape) and not (not shard.shape and list(shape) == [1]):
            raise ValueError(f"tensor {name!r} has shape {list(shape)}; the model needs {list(shard.shape)}")
        if not shard.takes(dtype):
            supported = "bfloat16, float16, float32 and float64 weights are supported"
            if dtype in FLOATS.values():
                form = "fp8" if shard.view.dtype == E4M3 else "words of int32"
                supported = f"quantization_config says that it is in {form}"
            raise ValueError(f"tensor {name!r} is {dtype}; {supported}")
        return shard

    def check_names(self) -> None:
        """Raise ValueError if tensors have been given by other names than the model's."""
        if self._renamed:
            name, meant = next(iter(self._renamed.items()))
            count = f"{len(self._renamed)} names are" if len(self._renamed) > 1 else "a name is"
            raise ValueError(f"{count} not the model's; give {meant!r} instead of {name!r}, for example")

    def check_complete(self, listed: int = 5) -> None:
        """Raise ValueError with the names of up to `listed` missing tensors, if any are missing."""
        seen = self._seen | (OTHER.keys() if HEAD in self._seen and HEAD not in self._targets else set())
        missing = self._targets.keys() - seen - {*self._renamed.values()}
        if missing:
            more = f" and {len(missing) - listed} more" if len(missing) > listed else ""
            names = ", ".join([name for name in self._targets if name in missing][:listed])
            raise ValueError(f"missing {len(missing)} of {len(self._targets)} tensors: {names}{more}")


class Target(Protocol):
    """An object to which a tensor of an update is written, such as a Shard."""

    def write(self, tensor: Tensor) -> None:
        """Write the tensor, in place."""


def write(targets: Mapping[str, Target], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write each tensor to the target with its name.

    If a write fails, the remaining tensors are still read, because other ranks may make them together with this rank;
    then the first error is raised.
    """
    failure: Exception | None = None
    for name, tensor in tensors:
        try:
            with torch.no_grad():
                targets[name].write(tensor)
        except Exception as error:
            failure = failure or error
        del tensor
    if failure is not None:
        raise failure
