"""Copies of whole pages: within the pool, and between the pool and staging memory, where pages lie otherwise."""

from __future__ import annotations

import itertools

from torch import Tensor

from fastgen.kernels.launch import Kernel, jit, tl, triton

BLOCK_BYTES = 16384  # that a program copies


@jit("sources_ptr", "targets_ptr")
def _copy_kernel(
    source_ptr, target_ptr, sources_ptr, targets_ptr,
    source_kv, source_layer, source_page, target_kv, target_layer, target_page,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a block of a page, layer, and keys or values. The strides times their numbers may exceed 32 bits."""
    BLOCKS: tl.constexpr = (E + BLOCK - 1) // BLOCK
    entry = tl.program_id(0) // BLOCKS
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    kv = tl.program_id(2).to(tl.int64)
    source = tl.load(sources_ptr + entry) * source_page + layer * source_layer + kv * source_kv
    target = tl.load(targets_ptr + entry) * target_page + layer * target_layer + kv * target_kv
    here = at < E
    tl.store(target_ptr + target + at, tl.load(source_ptr + source + at, mask=here), mask=here)


def _launch(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor) -> None:
    two, layers, _, size = source.shape
    assert target.shape[:2] == (two, layers)
    assert target.shape[3] == size
    assert source.dtype == target.dtype
    assert source.stride(3) == target.stride(3) == 1
    assert len(sources) == len(targets)
    block = min(BLOCK_BYTES // source.element_size(), triton.next_power_of_2(size))
    _copy_kernel[(len(sources) * -(-size // block), layers, two)](
        source, target, sources, targets, *source.stride()[:3], *target.stride()[:3], size, block, num_warps=4
    )


def _twin(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the pages `sources` of `source` to the pages `targets` of `target`, in all layers.

    source, target: [2, layers, pages, E], keys then values, a page's E numbers contiguous. sources, targets: int64 [n];
    where source and target are one, no page is in both.
    """
    for kv, layer in itertools.product(range(2), range(source.shape[1])):  # index_select copies what is not contiguous
        target[kv, layer].index_copy_(0, targets, source[kv, layer].index_select(0, sources))


copy_pages = Kernel(_launch, _twin)
