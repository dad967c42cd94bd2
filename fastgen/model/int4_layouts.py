"""The tensors of int4 checkpoints, and the arithmetic between them and fastgen's own form of an int4 weight.

fastgen's form: words int32 [N, K / 8], whose bits 4i to 4i + 3 are q of column 8j + i in word j; scales [N, G]; zeros
uint8 [N, G], or None if all are 8. The weight is (q - zero) * scale, with q from 0 to 15.

Shape letters: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.model.weights import FLOATS, Part, Shard

NIBBLES = 8  # numbers of 4 bits per word
MIDDLE = 8  # the zero of symmetric groups
LEVELS = 15  # steps between the smallest and the largest q
PIECE_BYTES = 4 << 20  # size of the pieces of an int4 tensor, whose conversion takes several times the memory
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibbles of a word of AWQ that hold its columns 0 to 7
GPTQ_ONES = 0x11111111  # GPTQ stores words of zeros minus this
SKIPPED = (".g_idx", ".weight_shape", ".qzeros", ".bias")
"""Suffixes of the names of tensors that int4 checkpoints may have and that are not needed; see `check_skipped`."""


def nibbles(words: Tensor) -> Tensor:
    """Return the numbers uint8 [R, 8 * W] of words int32 [R, W], from the lowest bits to the highest."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def packed(numbers: Tensor) -> Tensor:
    """Return words int32 [R, C / 8] of numbers uint8 [R, C]; the inverse of `nibbles`."""
    return (numbers[:, ::2] | numbers[:, 1::2] << 4).contiguous().view(torch.int32)


def _awq_numbers(words: Tensor) -> Tensor:
    """Return the numbers uint8 [8 * W, R] of AWQ's words int32 [R, W], which hold neighbouring rows of the weight."""
    return nibbles(words).view(*words.shape, NIBBLES)[..., AWQ_ORDER].flatten(1).t()


def _awq_words(words: Tensor) -> Tensor:
    return packed(_awq_numbers(words))


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def _zeros_along_rows(words: Tensor) -> Tensor:
    return nibbles(words).t()


def _gptq_zeros(words: Tensor) -> Tensor:
    """Undo GPTQ's subtraction of whole words, in which a zero of 0 borrows from its neighbour."""
    return nibbles(words + GPTQ_ONES).t()


def _packed_zeros(words: Tensor) -> Tensor:
    """Return the zeros of compressed-tensors: words int32 [N / 8, G], each with the zeros of 8 rows."""
    return nibbles(words.t()).t()


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Stored(NamedTuple):
    """A tensor of an int4 checkpoint.

    suffix: end of its name. by_columns: its first dimension is that of the weight's columns. rows, columns: number of
    the weight's rows and columns per number in the file; columns 0: those of a group. convert: function that turns
    whole rows of the weight, as they are in the file, into rows of fastgen's form.
    """

    suffix: str
    by_columns: bool
    rows: int
    columns: int
    convert: Callable[[Tensor], Tensor]


class Layout(NamedTuple):
    """The tensors of an int4 weight in a checkpoint."""

    words: Stored
    scales: Stored
    zeros: Stored


_SCALES = Stored("scales", True, 1, 0, _transposed)
LAYOUTS = {
    "awq": Layout(
        Stored("qweight", True, NIBBLES, 1, _awq_words), _SCALES, Stored("qzeros", True, NIBBLES, 0, _awq_numbers)
    ),
    "gptq": Layout(
        Stored("qweight", True, 1, NIBBLES, _transposed), _SCALES, Stored("qzeros", True, NIBBLES, 0, _gptq_zeros)
    ),
    "gptq_v2": Layout(
        Stored("qweight", True, 1, NIBBLES, _transposed), _SCALES, Stored("qzeros", True, NIBBLES, 0, _zeros_along_rows)
    ),
    "packed": Layout(
        Stored("weight_packed", False, 1, NIBBLES, _same),
        Stored("weight_scale", False, 1, 0, _same),
        Stored("weight_zero_point", False, NIBBLES, 0, _packed_zeros),
    ),
}
"""{Int4.stored: the layout of such a checkpoint}."""


@dataclass(frozen=True)
class StoredShard(Shard):
    """The shard of a tensor of an int4 checkpoint, which is converted as it is written.

    view: rows of the words, scales or zeros of an Int4Linear. shape, dim, start, size: the slice of the stored tensor,
    in its own units; see `Shard` and `of`.
    """

    skipped = SKIPPED
    size: int = field(kw_only=True)
    stored: Stored = field(kw_only=True)

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.start + self.size <= self.shape[self.dim]

    @classmethod
    def of(cls, view: Tensor, stored: Stored, part: Part, group: int) -> StoredShard:
        """Return the shard of a stored tensor. group: number of columns of the whole weight with one scale."""
        columns = stored.columns or group
        units, cut = (stored.rows, columns), part.dim
        shape = part.shape[0] // units[0], part.shape[1] // units[1]
        start, size = part.start // units[cut], part.size // units[cut]
        if cut == 1 and shape[1] == 1:  # one scale for the columns of all ranks
            start, size = 0, 1
        if stored.by_columns:
            shape, cut = (shape[1], shape[0]), 1 - cut
        return cls(view, shape, cut, start, size=size, stored=stored)

    def slice(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.start, self.size)

    def takes(self, dtype: torch.dtype | str) -> bool:
        return dtype in FLOATS.values() if self.view.is_floating_point() else dtype == "I32"

    def staged_as(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pieces(self, part: Tensor, size: int) -> Iterator[tuple[Shard, Tensor]]:
        dim, unit = int(self.stored.by_columns), self.stored.rows
        step = max(min(size, PIECE_BYTES) // (part.nbytes // part.shape[dim]), 1)
        for first in range(0, part.shape[dim], step):
            some = part.narrow(dim, first, min(step, part.shape[dim] - first))
            view = self.view.detach()[first * unit : (first + step) * unit]
            yield replace(self, view=view, shape=tuple(some.shape), start=0, size=some.shape[self.dim]), some

    def write(self, tensor: Tensor) -> None:
        self.view.copy_(self.stored.convert(self.slice(tensor).to(self.view.device)))


@dataclass(frozen=True)
class RoundedShard(Shard):
    """The shard of a weight in int4, which is given in a float dtype and rounded to the nearest as it is written.

    view: words [rows, columns / 8] of an Int4Linear, with `scales` and `zeros`; or on the CPU, floats [rows, columns]
    that take the values which int4 gives. group: number of columns with one scale. asymmetric: groups have a zero of
    their own. scale_dtype: dtype of the scales.
    """

    group: int = field(kw_only=True)
    asymmetric: bool = field(kw_only=True)
    scale_dtype: torch.dtype = field(kw_only=True)
    zeros: Tensor | None = field(kw_only=True, default=None)

    form = "int4"

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.start + self.held[self.dim] <= self.shape[self.dim]

    @property
    def memory(self) -> tuple[Tensor | None, ...]:
        return *super().memory, self.zeros

    @property
    def held(self) -> tuple[int, int]:
        """The numbers of rows and columns of the slice."""
        rows, columns = self.view.shape
        return rows, columns if self.view.is_floating_point() else columns * NIBBLES

    @property
    def is_whole(self) -> bool:
        return self.held == self.shape

    def slice(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.start, self.held[self.dim])

    def takes(self, dtype: torch.dtype | str) -> bool:
        return dtype in FLOATS.values()

    def staged(self) -> Tensor:
        return torch.empty(self.held, dtype=torch.float32, device=self.view.device)

    def write(self, tensor: Tensor) -> None:
        part = self.slice(tensor)
        step = max(PIECE_BYTES // part[0].nbytes, 1)
        for first in range(0, len(part), step):
            rows = slice(first, first + step)
            words, scales, zeros = quantize(
                part[rows].to(self.view.device), self.group, self.asymmetric, self.scale_dtype
            )
            if self.scales is None:
                self.view[rows] = dequantize(words, scales, zeros)
                continue
            self.view[rows], self.scales[rows] = words, scales
            if zeros is not None and self.zeros is not None:
                self.zeros[rows] = zeros


def dequantize(words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return the weight, float32 [N, K]."""
    numbers = nibbles(words).view(*scales.shape, -1).float()
    numbers -= MIDDLE if zeros is None else zeros[..., None]
    return numbers.mul_(scales.float()[..., None]).flatten(1)


def quantize(
    weight: Tensor, group: int, asymmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the words, scales and zeros (None unless `asymmetric`) of a weight [N, K], rounded to the nearest.

    The range of a group of columns is that of its numbers and 0, or the symmetric one around 0. The scale of numbers
    that are not finite is not finite.
    """
    groups = weight.float().reshape(len(weight), -1, group)
    low, high = groups.amin(2), groups.amax(2)
    if asymmetric:
        low, high = low.clamp(max=0), high.clamp(min=0)
    else:
        high = torch.maximum(low.abs(), high.abs())
        low = -high
    # Divided by a tensor, because a GPU multiplies by the reciprocal of a Python number, which has other bits.
    scales = ((high - low) / torch.full_like(high, LEVELS)).to(scale_dtype)
    divisor = scales.float().masked_fill(scales == 0, 1)
    zeros = (-low / divisor).round().clamp(0, LEVELS) if asymmetric else torch.full_like(divisor, MIDDLE)
    numbers = (groups / divisor[..., None]).round().add_(zeros[..., None]).clamp_(0, LEVELS).nan_to_num_()
    words = packed(numbers.flatten(1).to(torch.uint8))
    return words, scales, zeros.nan_to_num_().to(torch.uint8) if asymmetric else None


def check_skipped(name: str, tensor: Tensor, targets: Mapping[str, Shard]) -> None:
    """Raise ValueError if a tensor that ends in one of SKIPPED does matter.

    It does not if inputs are in order (g_idx), if all zeros of a symmetric AWQ weight are 8, and if all biases of a
    layer without a bias are 0. GPTQ says that zeros of symmetric weights are not to be read.
    """
    module, _, last = name.rpartition(".")
    words, scales = targets.get(f"{module}.qweight"), targets.get(f"{module}.scales")
    if last == "g_idx" and words is not None and scales is not None:
        inputs, groups = words.shape[0] * NIBBLES, scales.shape[0]
        if tensor.shape != (inputs,) or tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; the model needs integers [{inputs}]")
        if not torch.equal(tensor.long(), torch.arange(inputs, device=tensor.device) // (inputs // groups)):
            raise ValueError(f"{name} has inputs out of order (desc_act), which is not supported")
    is_awq = isinstance(words, StoredShard) and words.stored is LAYOUTS["awq"].words
    if last == "qzeros" and is_awq:
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; the model needs words of int32 in rows")
        if bool((nibbles(tensor) != MIDDLE).any()):
            raise ValueError(
                f"{name} has zeros other than 8, and the configuration says that there are none (zero_point)"
            )
    if last == "bias" and (tensor.dtype not in FLOATS.values() or bool(tensor.any())):
        raise ValueError(f"unexpected tensor {name!r}; the model of this config.json has no such bias")
