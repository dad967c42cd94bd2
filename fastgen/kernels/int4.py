"""Batch-invariant products with weights of 4 bits, in groups with one scale each.

A weight is (q - zero) * scale, computed in float32 and rounded once to the dtype of x. The products are those of
fastgen.kernels.batch_invariant with the rounded weight, with the same instruction in the same order, so a result has
the bits that the dequantized weight gives there. Kernels for few tokens, and on Hopper for up to
hopper.int4.max_tokens, dequantize in registers. More tokens use a scratch copy of the dequantized weight.

Shape letters: T tokens, N outputs, K inputs, G groups of K / G inputs.

The logical form of a weight is
- words: int32 [N, K / 8]. Bits 4i to 4i + 3 of word j are q, 0 to 15, of column 8j + i.
- scales: float16, bfloat16 or float32 [N, G].
- zeros: uint8 [N, G], or None, which means 8.

Kernels read a prepared form, which has the same shapes, in another order. Blocks of 16 rows follow each other, so a
range of blocks can be prepared or restored separately. A block of words is [K / 64, 32, 4]: for each 64 columns, and
each thread of a warp, 4 words with the weights that the thread holds of 16 x 16 weights in a tensor core instruction.
The bits 4i and 16 + 4i of a word are neighbours in a row (see `prepare`). A block of scales or zeros is [G, 16].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused, finished
from fastgen.kernels.launch import Kernel

ROWS, COLUMNS = 16, 64  # rows of a block, and columns of a part of it
GROUPS = (32, 64)  # columns of a group, if they are not a multiple of 128 or all columns
MIDDLE = 8  # the zero of weights without zeros


def check(outputs: int, inputs: int, group: int) -> None:
    """Raise ValueError if the kernels cannot take a weight [outputs, inputs] with `group` columns per group."""
    if outputs % ROWS or inputs % COLUMNS:
        raise ValueError(
            f"weights of 4 bits need outputs in multiples of {ROWS} and inputs in multiples of {COLUMNS}, and one is "
            f"{outputs} x {inputs}"
        )
    if inputs % group or not (group in GROUPS or group % 128 == 0 or group == inputs):
        raise ValueError(
            f"weights of 4 bits need groups of {', '.join(map(str, GROUPS))}, a multiple of 128 or all columns, which "
            f"divide the number of columns, and one has groups of {group} in {inputs} columns"
        )


def prepare(words: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the prepared form of a weight in its logical form. Both have the same shapes.

    Thread 4 * row + t of a warp holds of each 16 x 16 weights: rows `row` and `row + 8`, columns 2t, 2t + 1, 2t + 8 and
    2t + 9. Nibble (h, i1, i0) of its word, of which i0 is the lowest bit of the nibble's number, is the weight of row
    `row + 8 * i0` and column 2t + 8 * i1 + h.
    """
    rows, columns = words.shape[0], 8 * words.shape[1]
    check(rows, columns, columns // scales.shape[1])
    nibbles = _nibbles(words).view(rows // ROWS, 2, 8, columns // COLUMNS, 4, 2, 4, 2)  # block i0 row part j i1 t h
    ordered = nibbles.permute(0, 3, 2, 6, 4, 7, 5, 1).reshape(rows, columns // 8, 8)
    return _words(ordered), _blocked(scales), None if zeros is None else _blocked(zeros)


def restore(words: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logical form of a weight in its prepared form: the inverse of `prepare`."""
    return _words(_restored(words).unflatten(1, (-1, 8))), _rows(scales), None if zeros is None else _rows(zeros)


def _nibbles(words: Tensor) -> Tensor:
    """Return the nibbles of words [N, K / 8], uint8 [N, K / 8, 8]."""
    bytes_: Tensor = words.contiguous().view(torch.uint8).unflatten(1, (-1, 4))
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(2)


def _words(nibbles: Tensor) -> Tensor:
    """Return words with the given nibbles: the inverse of `_nibbles`."""
    pairs: Tensor = nibbles.unflatten(2, (4, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32).squeeze(2)


def _restored(words: Tensor) -> Tensor:
    """Return the nibbles of prepared words [N, K / 8] in the logical order, uint8 [N, K]."""
    rows, columns = words.shape[0], 8 * words.shape[1]
    ordered = _nibbles(words).view(rows // ROWS, columns // COLUMNS, 8, 4, 4, 2, 2, 2)  # block part row t j h i1 i0
    return ordered.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(rows, columns)


def _blocked(scales: Tensor) -> Tensor:
    return scales.view(-1, ROWS, scales.shape[1]).transpose(1, 2).reshape(scales.shape)


def _rows(blocked: Tensor) -> Tensor:
    rows, groups = blocked.shape
    return blocked.reshape(-1, groups, ROWS).transpose(1, 2).reshape(rows, groups)


def _dequantize_twin(words: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] in `dtype` from its prepared form."""
    q: Tensor = _restored(words).unflatten(1, (scales.shape[1], -1)).float()
    q -= MIDDLE if zeros is None else _rows(zeros).float()[:, :, None]
    return q.mul_(_rows(scales).float()[:, :, None]).to(dtype).flatten(1)


dequantize = Kernel(_dequantize_twin, "fastgen.kernels.triton.int4:dequantize")


def _twin(x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, fused: Fused) -> Tensor:
    """Return x weight^T + bias, [T, N] in x's dtype, with the epilogue `fused`.

    x: [T, K], bfloat16, float16 or float32. words, scales, zeros: the weight's prepared form. bias: [N] in x's dtype.
    """
    return finished(F.linear(x, dequantize.twin(words, scales, zeros, x.dtype), bias), fused)


int4_product = Kernel(_twin, "fastgen.kernels.triton.int4:int4_product")
