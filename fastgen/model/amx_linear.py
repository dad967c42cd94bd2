"""Linear layers in bfloat16 on CPUs with AMX, with the same bits for any number of rows and of threads.

oneDNN, which torch includes, sums long rows in pieces whose size depends on the number of rows and threads, and short
rows in one piece. So a weight is divided into parts with few inputs. The product of each part is rounded to bfloat16,
and these are added in order, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.model.linear import Linear, finish

INPUTS = 896
"""Maximum number of inputs of a part of a weight."""

UNIT = 64
"""Parts other than the last one have a multiple of this number of inputs: oneDNN sums rows of other lengths, and rows
that begin at other places, in another order."""

SMALLEST = 1025
"""Minimum number of weights of a part, which is padded with rows of zeros: torch does not use oneDNN for products of
4 rows with fewer weights."""


@dataclass(eq=False)
class AmxLinear(Linear):
    """A linear layer in bfloat16. parts: the columns of the weight in contiguous tensors [out, at most INPUTS].
    `weight` has a shape but no memory."""

    parts: tuple[Tensor, ...] = field(kw_only=True)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        outputs, (first, *others) = len(self.weight), torch.split(x, [part.shape[1] for part in self.parts], 1)
        y = F.linear(first, self.parts[0])
        if others:
            total = y.float()
            for inputs, part in zip(others, self.parts[1:], strict=True):
                total += F.linear(inputs, part)
            y = total
        y = y if y.shape[1] == outputs else y[:, :outputs].contiguous()
        y = y if self.bias is None else y.add_(self.bias)
        return finish(y.to(fused.out_dtype or x.dtype), fused)

    @classmethod
    def pack(cls, linear: Linear) -> AmxLinear:
        """Return the linear layer with its weight in parts."""
        weight, units = linear.weight, -(-linear.weight.shape[1] // UNIT)
        parts = torch.split(weight, -(-units // -(-units * UNIT // INPUTS)) * UNIT, 1)
        rows = -(-SMALLEST // parts[-1].shape[1])
        padded = [F.pad(part, (0, 0, 0, max(rows - len(part), 0))).contiguous() for part in parts]
        return cls(weight.new_empty(()).expand(weight.shape), linear.bias, parts=tuple(padded))

    def unpack(self) -> Linear:
        """Return a linear layer with a plain weight."""
        return Linear(torch.cat(self.parts, 1)[: len(self.weight)], self.bias)
