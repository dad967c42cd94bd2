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

INPUTS = 448
"""Maximum number of inputs of a part of a weight. From 512 on, the order of the sums of oneDNN 3.12 depends on
the number of rows and threads."""

UNIT = 64
"""Each part has a multiple of this number of inputs, and the last one is padded with zeros: oneDNN sums rows of other
lengths, and rows that begin at other places, in an order that depends on the number of rows."""

SMALLEST = 1025
"""Minimum number of weights of a part, which is padded with rows of zeros: torch does not use oneDNN for products of
4 rows with fewer weights."""


@dataclass(eq=False)
class AmxLinear(Linear):
    """A linear layer in bfloat16. parts: the columns of the weight in contiguous tensors [out, at most INPUTS], with
    zeros up to a multiple of UNIT columns. `weight` has a shape but no memory."""

    parts: tuple[Tensor, ...] = field(kw_only=True)

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        (outputs, inputs), sizes = self.weight.shape, [part.shape[1] for part in self.parts]
        if missing := sum(sizes) - inputs:
            x = F.pad(x, (0, missing))
        first, *others = torch.split(x, sizes, 1)
        y = F.linear(first, self.parts[0])
        if others:
            total = y.float()
            for columns, part in zip(others, self.parts[1:], strict=True):
                total += F.linear(columns, part)
            y = total
        y = y if y.shape[1] == outputs else y[:, :outputs].contiguous()
        y = y if self.bias is None else y.add_(self.bias)
        return finish(y.to(fused.out_dtype or x.dtype), fused)

    @classmethod
    def pack(cls, linear: Linear) -> AmxLinear:
        """Return the linear layer with its weight in parts."""
        weight, units = linear.weight, -(-linear.weight.shape[1] // UNIT)
        parts = torch.split(weight, -(-units // -(-units * UNIT // INPUTS)) * UNIT, 1)
        more_rows = max(-(-SMALLEST // UNIT) - len(weight), 0)
        padded = [F.pad(part, (0, -part.shape[1] % UNIT, 0, more_rows)).contiguous() for part in parts]
        return cls(weight.new_empty(()).expand(weight.shape), linear.bias, parts=tuple(padded))

    def unpack(self) -> Linear:
        """Return a linear layer with a plain weight."""
        outputs, inputs = self.weight.shape
        return Linear(torch.cat(self.parts, 1)[:outputs, :inputs].contiguous(), self.bias)
