"""Pages of keys and values in fp8: numbers in E4M3, with one scale per token and KV head.

A scale is the smallest power of two with which the head's largest magnitude is at most 448. A number times its scale is
then exact in bfloat16, so a kernel can multiply at any point without changing the bits of the result. The P x D numbers
of each head's page are followed by P bytes, the exponents of the scales + 127.

Shape letters: K KV heads, P page size, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


def head_bytes(page_size: int, head_size: int) -> int:
    """Return the size in bytes of a head's page, including its scales."""
    return page_size * (head_size + 1)


def numbers_of(memory: Tensor, page_size: int, head_size: int) -> Tensor:
    """Return the numbers [..., P, D] as a view of memory, uint8 [..., head_bytes]."""
    shape, strides = (*memory.shape[:-1], page_size, head_size), (*memory.stride()[:-1], head_size, 1)
    return memory.view(E4M3).as_strided(shape, strides)  # unflatten gives another stride if there is one head


def scales_of(pages: Tensor) -> Tensor:
    """Return the exponents that follow the numbers [..., P, D] of `numbers_of`, as a view, uint8 [..., P]."""
    *outer, page_size, head_size = pages.shape
    first = pages.storage_offset() + page_size * head_size
    return pages.view(torch.uint8).as_strided((*outer, page_size), (*pages.stride()[:-2], 1), first)


def check(pages: Tensor) -> None:
    """Assert that pages [..., pages, K, P, D] have the memory layout of a KVPool."""
    if pages.dtype != E4M3:
        assert pages.is_contiguous()
        return
    *_, num_kv, page_size, head_size = pages.shape
    head = head_bytes(page_size, head_size)
    assert pages.stride()[-4:] == (num_kv * head, head, head_size, 1)


def put(pages: Tensor, rows: Tensor, heads: Tensor) -> None:
    """Write heads [n, K, D] to the given rows, int64 [n, K], of pages.view(-1, D); pages: [pages, K, P, D]."""
    page_size, head_size = pages.shape[2:]
    if pages.dtype != E4M3:
        pages.view(-1, head_size).index_put_((rows,), heads.to(pages.dtype))
        return
    heads = heads.float()
    largest = heads.abs().amax(-1, keepdim=True)
    exponents = ((largest.view(torch.int32) + 0x1FFFFF >> 23) - 8).clamp_(min=1)  # 448 is 1.75 times 2**8
    numbers = (heads * _power_of(254 - exponents)).to(E4M3)
    place = rows // page_size, rows % page_size
    pages.flatten(0, 1).view(torch.uint8).index_put_(place, numbers.view(torch.uint8))
    scales_of(pages).flatten(0, 1).index_put_(place, exponents[..., 0].to(torch.uint8))


def read(pages: Tensor, runs: Tensor, size: int) -> Tensor:
    """Return pages.view(-1, size, D)[runs] in float32, [n, size, D]. runs: int64 [n]. size: a divisor of P."""
    page_size, head_size = pages.shape[2:]
    if pages.dtype != E4M3:
        return pages.view(-1, size * head_size).index_select(0, runs).view(-1, size, head_size).float()
    place = runs // (page_size // size), runs % (page_size // size)
    numbers = pages.flatten(0, 1).view(torch.uint8).unflatten(1, (-1, size))[place]
    exponents = scales_of(pages).flatten(0, 1).unflatten(1, (-1, size))[place]
    floats: Tensor = numbers.view(E4M3).float() * _power_of(exponents.int())[..., None]
    return floats


def _power_of(exponents: Tensor) -> Tensor:
    """Return the scales of int32 exponents."""
    return (exponents << 23).view(torch.float32)
