"""Kernels on the state of sequences: the input of a decode step, made from its lanes; the start of a step that the host
sends; and copies of KV pages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels.launch import Kernel, jit, tl

BLOCK = 128  # lanes per program
BLOCK_BYTES = 16384  # bytes of a page per program


@dataclass(frozen=True)
class DecodeInput:
    """The input of a decode step, with one token of each of T lanes.

    lanes, token_ids, positions: int64 [T]. slots: int64 [T], page * P + offset. kv_lens: int32 [T], number of keys of
    each sequence, including the new token.
    """

    lanes: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    kv_lens: Tensor

    @staticmethod
    def empty(size: int, device: torch.device) -> DecodeInput:
        even = size + size % 2  # so that each tensor begins at a multiple of 16 bytes
        lanes, token_ids, positions, slots = torch.zeros(4, even, dtype=torch.int64, device=device)[:, :size]
        return DecodeInput(lanes, token_ids, positions, slots, torch.zeros(size, dtype=torch.int32, device=device))

    def first(self, size: int) -> DecodeInput:
        """Return the first `size` lanes, as views."""
        return DecodeInput(
            self.lanes[:size], self.token_ids[:size], self.positions[:size], self.slots[:size], self.kv_lens[:size]
        )


@jit("padding", "table_width", "count")
def _advance_kernel(
    lanes_ptr, ids_ptr, positions_ptr, slots_ptr, lens_ptr, last_token_ptr, kv_lens_ptr, table_ptr,
    padding, table_width, count, P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < count
    lane = tl.load(lanes_ptr + row, mask=here, other=0)
    real = here & (lane != padding)
    position = tl.load(kv_lens_ptr + lane, mask=here, other=0)
    page = tl.load(table_ptr + lane * table_width + position // P, mask=here, other=0).to(tl.int64)
    tl.store(ids_ptr + row, tl.load(last_token_ptr + lane, mask=here, other=0), mask=here)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=here)
    tl.store(slots_ptr + row, page * P + position % P, mask=here)
    tl.store(lens_ptr + row, position + 1, mask=here)
    tl.store(kv_lens_ptr + lane, position + 1, mask=real)


def _advance_launch(last_token: Tensor, kv_lens: Tensor, page_table: Tensor, step: DecodeInput, page_size: int) -> None:
    count = len(step.lanes)
    assert last_token.dtype == step.lanes.dtype == torch.int64
    assert kv_lens.dtype == page_table.dtype == torch.int32
    assert len(last_token) == len(kv_lens) == len(page_table)
    pdl = Chip.of(last_token.device).dependent_launch
    _advance_kernel[(-(-count // BLOCK),)](
        step.lanes, step.token_ids, step.positions, step.slots, step.kv_lens, last_token, kv_lens, page_table,
        len(kv_lens) - 1, page_table.stride(0), count, page_size, BLOCK, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _advance_twin(last_token: Tensor, kv_lens: Tensor, page_table: Tensor, step: DecodeInput, page_size: int) -> None:
    """Fill `step` for its lanes from the state of all lanes, and count the new token in kv_lens.

    last_token: int64 [lanes]. kv_lens: int32 [lanes]. page_table: int32 [lanes, columns]. The last lane is padding,
    which may occur several times in the step, and stays at position 0.
    """
    lanes = step.lanes
    position = kv_lens[lanes].long()
    page = page_table[lanes, position // page_size].long()
    step.token_ids.copy_(last_token[lanes])
    step.positions.copy_(position)
    step.slots.copy_(page * page_size + position % page_size)
    step.kv_lens.copy_(position + 1)
    kv_lens.index_put_((lanes,), torch.where(lanes == len(kv_lens) - 1, 0, position + 1).int())


advance = Kernel(_advance_launch, _advance_twin)


@jit("count", "rows")
def _begin_kernel(
    lanes_ptr, lens_ptr, decode_lens_ptr, ids_ptr, last_token_ptr, kv_lens_ptr, count, rows, BLOCK: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = number < count
    lane = tl.load(lanes_ptr + number, mask=here, other=0)
    tl.store(kv_lens_ptr + lane, tl.load(lens_ptr + number, mask=here, other=0), mask=here)
    decodes = tl.load(decode_lens_ptr + number, mask=number < rows, other=0) > 0
    tl.store(ids_ptr + number, tl.load(last_token_ptr + lane, mask=decodes, other=0), mask=decodes)


def _begin_launch(
    lanes: Tensor, lens: Tensor, decode_lens: Tensor, ids: Tensor, last_token: Tensor, kv_lens: Tensor
) -> None:
    count, rows = len(lanes), len(decode_lens)
    assert lanes.dtype == ids.dtype == last_token.dtype == torch.int64
    assert lens.dtype == decode_lens.dtype == kv_lens.dtype == torch.int32
    assert len(lens) == count
    assert rows <= min(count, len(ids))
    assert len(last_token) == len(kv_lens)
    _begin_kernel[(-(-count // BLOCK),)](
        lanes, lens, decode_lens, ids, last_token, kv_lens, count, rows, BLOCK, num_warps=4
    )


def _begin_twin(
    lanes: Tensor, lens: Tensor, decode_lens: Tensor, ids: Tensor, last_token: Tensor, kv_lens: Tensor
) -> None:
    """Write the new KV lengths of lanes to kv_lens, and the last tokens of those that decode to `ids`.

    lanes: int64 [C], distinct except for padding, whose length stays 0. lens: int32 [C], their KV lengths after the
    step. decode_lens: int32 [D], the same of each of the first lanes if it decodes in the step, else 0. ids: int64 [T],
    of which the first D are written. last_token: int64 [all lanes]. kv_lens: int32 [all lanes]. D <= C and D <= T.
    """
    kv_lens[lanes] = lens
    own, first = ids[: len(decode_lens)], lanes[: len(decode_lens)]
    own.copy_(torch.where(decode_lens > 0, last_token[first], own))


begin_step = Kernel(_begin_launch, _begin_twin)


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


def _copy_launch(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor) -> None:
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


def _copy_twin(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the pages `sources` of `source` to the pages `targets` of `target`, in all layers.

    source, target: [2, layers, pages, E] of the same dtype, keys and then values; the E numbers of a page are
    contiguous. sources, targets: int64 [n], with no page in common if source and target are the same tensor.
    """
    # One layer at a time, because index_select on a tensor that is not contiguous would copy the whole source.
    for kv, layer in itertools.product(range(2), range(source.shape[1])):
        target[kv, layer].index_copy_(0, targets, source[kv, layer].index_select(0, sources))


copy_pages = Kernel(_copy_launch, _copy_twin)
