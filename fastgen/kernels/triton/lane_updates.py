"""Updates of the state of lanes: see the twins in fastgen.kernels.lane_updates."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.lane_updates import DecodeInput
from fastgen.kernels.triton.jit import jit, tl

BLOCK = 128  # lanes per program


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


def advance(last_token: Tensor, kv_lens: Tensor, page_table: Tensor, step: DecodeInput, page_size: int) -> None:
    count = len(step.lanes)
    assert last_token.dtype == step.lanes.dtype == torch.int64
    assert kv_lens.dtype == page_table.dtype == torch.int32
    assert len(last_token) == len(kv_lens) == len(page_table)
    pdl = Chip.of(last_token.device).dependent_launch
    _advance_kernel[(-(-count // BLOCK),)](
        step.lanes, step.token_ids, step.positions, step.slots, step.kv_lens, last_token, kv_lens, page_table,
        len(kv_lens) - 1, page_table.stride(0), count, page_size, BLOCK, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


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


def begin_step(
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
