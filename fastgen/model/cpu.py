"""The operations between the products of a step on the CPU, in float32.

They compute what the twins of the kernels do, in fewer calls of torch: a call takes longer than its numbers in a step
of few tokens. The bits of a row do not depend on the other rows, nor on the number of threads: norms sum each row in
one order, exp is MKL's, and all else rounds each number alike.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fastgen.kernels.rope import SlotMapping


@lru_cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=torch.float32)


def takes(x: Tensor) -> bool:
    """Return whether these operations take x."""
    return x.device.type == "cpu" and x.dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x [T, N] over its last dimension, times weight [N]."""
    size = torch.linalg.vector_norm(x, 2, -1, True)
    scale = torch.addcmul(_constant(eps), size, size, value=1 / x.shape[1]).rsqrt_()
    return (x * scale).mul_(weight)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] of x [T, 2 I], which holds gate and then up."""
    gate, up = x.chunk(2, dim=-1)
    weight = gate.neg().exp_().add_(1)
    return torch.div(gate, weight, out=weight).mul_(up)


def rope_write(qkv: Tensor, mapping: SlotMapping, keys: Tensor, values: Tensor) -> Tensor:
    """Rotate queries and keys of qkv [T, (H + 2 K) D] in place, and write the keys and values of the real tokens to
    keys and values [pages, K, P, D]; return the queries, [T, H, D]."""
    num_kv, head_size = keys.shape[1], keys.shape[3]
    heads = qkv.view(len(qkv), -1, head_size)
    turned, (cos, sin) = heads[:, :-num_kv], mapping.turns
    first, second = turned.chunk(2, dim=-1)
    other = torch.cat((second, first), dim=-1)
    turned.mul_(cos).addcmul_(other, sin)
    real, cells = heads[: mapping.real], (mapping.rows,)
    keys.view(-1, head_size).index_put_(cells, real[:, -2 * num_kv : -num_kv])
    values.view(-1, head_size).index_put_(cells, real[:, -num_kv:])
    return heads[:, : -2 * num_kv]
