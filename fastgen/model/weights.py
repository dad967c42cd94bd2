"""The slices of checkpoint tensors that a rank holds, and updates that overwrite them in place."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fastgen.kernels.fp8_pages import E4M3
from fastgen.model.deltas import DELTA, Delta
from fastgen.model.tied import EMBEDDING, HEAD, OTHER, Tie

LISTED = 20  # maximum number of names or faults that an error lists
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Supported dtypes of weights, by their names in safetensors files."""
Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Named tensors as programs pass them."""
IN_FLIGHT = ("error", "keep", "recompute", "abort")
TAGS = ("weights", "kv_cache")
TORN = "the weights are torn, as an update was cut short or failed"
DROPPED = "the weights were dropped by sleep"
UNEXPECTED = "the model of this config.json has no such parameter"

WRAPPERS = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
"""Beginnings of the names of a text model's tensors inside a model with vision: on disk, and in transformers 5."""
UNUSED = (
    *(f"{model}{part}." for model in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
    "model.mtp_layers.",
)
"""Beginnings of the names of tensors that text does not need: of images, and of MiMo's layers that draft tokens."""

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
    slices one after the other. (): one slice. form: the form of a view with scales.
    """

    form: ClassVar[str] = "fp8"
    view: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    scales: Tensor | None = None
    parts: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        held = tuple(self.view.shape)
        if held == self.shape or not self.shape:
            assert self.start == 0
            return
        assert self.dim in (0, 1)
        assert 0 <= self.start <= self.start + held[self.dim] <= self.shape[self.dim]
        assert held == (*self.shape[: self.dim], held[self.dim], *self.shape[self.dim + 1 :])

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
        found = [tensor.narrow(self.dim, start, size) for start, size in parts]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

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
            part = part.to(device)  # other GPUs cannot write to memory that fastgen.device.memory has mapped
        if self.scales is None:
            self.view.copy_(part)
            return
        from fastgen.kernels.fp8 import quantize_weight  # only for weights in fp8

        for piece, rows in self.pieces(part, QUANTIZED_BYTES):  # quantizing takes several times the memory
            found = quantize_weight(rows.to(device), self.scales.dim() > 1)
            piece.view.copy_(found.values)
            assert piece.scales is not None
            piece.scales.copy_(found.scales)


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
    return next((known for known in targets if f".{plain}".endswith(f".{known}") or known.endswith(f".{plain}")), None)


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
                held = "fp8" if shard.view.dtype == E4M3 else "words of int32"
                supported = f"quantization_config says that it is in {held}"
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


class Update:
    """A weight update: tensors that a program gives as a mapping or as an iterable of (name, tensor).

    shards: the whole tensors of the model by Hugging Face name; only their shapes are used. partial: tensors may be
    missing. reading: a function that wraps the iterable while it is read. names: names of the tensors that matched in
    the last pass over `tensors`. merges: the update merges an adapter. adapted: see `AdapterUpdate`. tie: of a
    tied model that is updated; None if only names and shapes are checked.
    """

    unexpected = UNEXPECTED
    merges = False
    adapted: frozenset[str] = frozenset()

    def __init__(
        self,
        given: Any,
        shards: Mapping[str, Shard],
        partial: bool = False,
        reading: Callable[[Iterable[Any]], Iterator[Any]] = iter,
        tie: Tie | None = None,
    ) -> None:
        self.partial = partial
        self.names: list[str] = []
        self._given, self._shards, self._reading, self._tie = given, shards, reading, tie

    def check(self) -> None:
        """Check all tensors against the model before any is written, if they can be read twice: a mapping, its items
        and a sequence can. Raises ValueError as `tensors` does, and TypeError for an object that is not iterable."""
        _check_iterable(self._given)
        if isinstance(self._given, Mapping | ItemsView | Sequence):
            for _ in self._followed(copy(self._tie)):
                pass

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that match the model. No reference to a tensor is kept while the next one is made.

        After the last tensor, raise ValueError with all faults: names that are unexpected, given twice or missing, and
        shapes and dtypes that do not match. It is not raised earlier, because the iterables of several ranks may make
        their tensors together.
        """
        return self._followed(self._tie)

    def _followed(self, tie: Tie | None) -> Iterator[tuple[str, Tensor]]:
        return self._matched() if tie is None else tie.follow(self._matched(), self.partial)

    def _matched(self) -> Iterator[tuple[str, Tensor]]:
        matcher, self.names = TensorMatcher(self._shards, self.unexpected), []
        faults: list[str] = []
        for item in self._reading(self._given.items() if isinstance(self._given, Mapping) else self._given):
            try:
                name, tensor = _checked(item)
                name = travels = text_name(name)
                shape: Sequence[int] = tensor.shape
                dtype = tensor.dtype
                if name.endswith(DELTA):
                    name = name.removesuffix(DELTA)
                    shape, dtype = self._check_delta(name, tensor)
                known = matcher.find(name, shape, dtype) is not None
            except ValueError as error:
                if str(error) not in faults:  # a thousand items without a name have the same fault
                    faults.append(str(error))
                continue
            finally:
                del item
            if known:
                self.names.append(name)
                yield travels, tensor
            del tensor
        complete: list[Callable[[], None]] = [] if self.partial else [partial(matcher.check_complete, LISTED)]
        for check in (*complete, matcher.check_names):
            try:
                check()
            except ValueError as error:
                faults.insert(0, str(error))
        if self.partial and not self.names and not faults:
            faults.append("no tensors are given")
        if faults:
            more = [f"and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
            raise ValueError("\n  ".join(["the weights do not fit the model:", *faults[:LISTED], *more]))

    def _check_delta(self, name: str, packed: Tensor) -> tuple[Sequence[int], torch.dtype]:
        """Check a delta of the model's weight. Return the shape of the weight, and a dtype that it takes; those of the
        delta if there is no such weight."""
        shard = shard_of(name, self._shards)
        if shard is None:
            return packed.shape, packed.dtype
        Delta(packed).check(name, shard, self.partial)
        return shard.shape, torch.float64


def named_items(given: Any) -> list[tuple[str, Any]]:
    """Return the tensors that a program sends to another one as a list, where each delta is one tensor, under the name
    with which it travels. DTensors stay as they are. Raises TypeError or ValueError for what cannot be sent."""
    _check_iterable(given)
    items = given.items() if isinstance(given, Mapping) else given
    return [(item[0], item[1]) if _is_sharded(item) else _checked(item) for item in items]


def _check_iterable(given: object) -> None:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        kind = type(given).__name__
        raise TypeError(f"the weights must be a mapping, or an iterable of (name, tensor), not {kind}")


def _is_sharded(item: Any) -> bool:
    """Return whether an item has a name and a DTensor."""
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and isinstance(item[0], str)
        and hasattr(item[1], "full_tensor")
    )


def _checked(item: Any) -> tuple[str, Tensor]:
    """Return the name and tensor of an item, where a delta has the name with which it travels. Raises ValueError for
    another item, or a tensor that cannot be copied."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ValueError(f"{type(item).__name__} is given, and no (name, tensor)")
    name, tensor = item
    if isinstance(name, str) and isinstance(tensor, tuple | list):
        name, tensor = name + DELTA, Delta.of(name, tensor).packed
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise ValueError(f"({type(name).__name__}, {type(tensor).__name__}) is given, and no (name, tensor)")
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"tensor {name!r} is a DTensor; give its full_tensor()")
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensor {name!r} is {tensor.layout} on {tensor.device}; give a dense one on a CPU or GPU")
    return name, tensor


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


def check_tags(tags: str | Iterable[str]) -> frozenset[str]:
    """Return the parts of the memory to put to sleep. Raises ValueError for an unknown one."""
    wanted = frozenset((tags,) if isinstance(tags, str | int) else tags)
    if unknown := wanted.difference(TAGS):
        raise ValueError(f"tags has {', '.join(sorted(map(repr, unknown)))}; there are 'weights' and 'kv_cache'")
    return wanted


def check_in_flight(treatment: str, requests: int) -> None:
    """Raise ValueError if there are requests in flight and their treatment is "error"."""
    if requests and treatment == "error":
        raise ValueError(
            f"{requests} requests are in flight; finish or abort them, or pass in_flight='keep' (they continue with "
            "the KV of the old weights), 'recompute' (their KV is computed again) or 'abort'"
        )


class WeightState:
    """The version of a Generator's weights, and whether they can be used.

    version: version of the weights in the model. torn: why the weights are a mixture of two versions, or "". asleep:
    the parts of the memory that `sleep` has released. has_adapter: an adapter is merged. not_finite: names of weights
    that contain NaN or an infinity, or None before the first search.
    """

    def __init__(self, has_adapter: bool) -> None:
        self.version = 0
        self.torn = ""
        self.has_adapter = has_adapter
        self.asleep: frozenset[str] = frozenset()
        self.not_finite: list[str] | None = None

    def check(self) -> None:
        """Raise RuntimeError if the model cannot generate because it is asleep, or because its weights are torn."""
        if self.asleep:
            raise RuntimeError(f"asleep: {', '.join(sorted(self.asleep))}; call wake first")
        self.check_whole()

    def check_whole(self) -> None:
        """Raise RuntimeError if the weights are torn."""
        if self.torn:
            raise RuntimeError(f"{self.torn}; call update_weights with all of them")

    def blame(self, find_not_finite: Callable[[], list[str]]) -> str:
        """Return the end of a message about logits that are not finite: the names of weights that are not finite."""
        if self.not_finite is None:
            self.not_finite = find_not_finite()
        if not self.not_finite:
            return ""
        more = f" and {len(self.not_finite) - LISTED} more" if len(self.not_finite) > LISTED else ""
        return f", nor are the weights {', '.join(self.not_finite[:LISTED])}{more}; load or update them again"

    def check_update(self, update: Update, version: int | None, in_flight: str) -> int:
        """Return the version after an update: `version`, or the next number if it is None.

        Raises TypeError for a version that is not an integer, ValueError for the current version, and ValueError or
        RuntimeError if the update cannot begin now.
        """
        if version is None:
            version = self.version + 1
        elif not isinstance(version, Integral) or isinstance(version, bool):
            raise TypeError(f"version must be an integer, not {version!r}")
        if version == self.version:
            raise ValueError(f"version is {version}, which is the current one; give another, or none")
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight is {in_flight!r}; it must be one of {', '.join(map(repr, IN_FLIGHT))}")
        if "weights" in self.asleep:
            raise RuntimeError("the weights are asleep; call wake first, of 'weights' at least")
        if update.partial or update.merges:
            self.check_whole()
        if update.partial and self.has_adapter:
            raise ValueError("partial=True with an adapter in the weights; call update_adapter(None) first")
        return int(version)

    def finish(self, update: Update, version: int) -> None:
        """Note that an update is complete."""
        self.version, self.torn, self.not_finite = version, "", None
        self.has_adapter = update.merges and bool(update.names)
