"""Copies of KV pages: see the twin in fastgen.kernels.page_copies."""

from __future__ import annotations

from torch import Tensor

from fastgen.device.chip import power_of_two
from fastgen.kernels.triton.jit import jit, tl

BLOCK_BYTES = 16384  # bytes of a page per program


@jit("sources_ptr", "targets_ptr")
def _copy_kernel(
    source_ptr, target_ptr, sources_ptr, targets_ptr,
    source_kv, source_layer, source_page, target_kv, target_layer, target_page,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one block of a page of a layer's keys or values per program. Offsets may exceed 32 bits."""
    BLOCKS: tl.constexpr = (E + BLOCK - 1) // BLOCK
    entry = tl.program_id(0) // BLOCKS
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    layer = tl.program_id(1).to(tl.int64)
    kv = tl.program_id(2).to(tl.int64)
    source = tl.load(sources_ptr + entry) * source_page + layer * source_layer + kv * source_kv
    target = tl.load(targets_ptr + entry) * target_page + layer * target_layer + kv * target_kv
    here = at < E
    tl.store(target_ptr + target + at, tl.load(source_ptr + source + at, mask=here), mask=here)


def copy_pages(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor) -> None:
    two, layers, _, size = source.shape
    assert target.shape[:2] == (two, layers)
    assert target.shape[3] == size
    assert source.dtype == target.dtype
    assert source.stride(3) == target.stride(3) == 1
    assert len(sources) == len(targets)
    block = min(BLOCK_BYTES // source.element_size(), power_of_two(size))
    _copy_kernel[(len(sources) * -(-size // block), layers, two)](
        source, target, sources, targets, *source.stride()[:3], *target.stride()[:3], size, block, num_warps=4
    )
