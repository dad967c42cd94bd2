"""What a decode step begins with: from the lanes that take part, their tokens, positions and places in the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.kernels.launch import Chip, Kernel, jit, tl

BLOCK = 128


@dataclass(frozen=True)
class DecodeInput:
    """One token of each of T lanes. lanes, token_ids, positions, slots: int64 [T] (slot: page * P + offset);
    kv_lens: int32 [T], with the token itself."""

    lanes: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    kv_lens: Tensor

    @staticmethod
    def empty(size: int, device: torch.device) -> DecodeInput:
        even = size + size % 2  # so that each begins at a multiple of 16 bytes
        lanes, token_ids, positions, slots = torch.zeros(4, even, dtype=torch.int64, device=device)[:, :size]
        return DecodeInput(lanes, token_ids, positions, slots, torch.zeros(size, dtype=torch.int32, device=device))

    def first(self, size: int) -> DecodeInput:
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


def _launch(last_token: Tensor, kv_lens: Tensor, page_table: Tensor, step: DecodeInput, page_size: int) -> None:
    count = len(step.lanes)
    assert last_token.dtype == step.lanes.dtype == torch.int64
    assert kv_lens.dtype == page_table.dtype == torch.int32
    assert len(last_token) == len(kv_lens) == len(page_table)
    pdl = Chip.of(last_token.device).dependent_launch
    options = {"launch_pdl": True} if pdl else {}
    _advance_kernel[(-(-count // BLOCK),)](
        step.lanes, step.token_ids, step.positions, step.slots, step.kv_lens, last_token, kv_lens, page_table,
        len(kv_lens) - 1, page_table.stride(0), count, page_size, BLOCK, pdl, num_warps=4, **options,
    )  # fmt: skip


def _twin(last_token: Tensor, kv_lens: Tensor, page_table: Tensor, step: DecodeInput, page_size: int) -> None:
    """Fill `step` for its lanes from the lanes' state, and count the new token in kv_lens.

    last_token: int64 [lanes]; kv_lens: int32 [lanes]; page_table: int32 [lanes, slots]. The last lane is padding: it
    may be named many times, and stays at position 0.
    """
    lanes = step.lanes
    position = kv_lens[lanes].long()
    page = page_table[lanes, position // page_size].long()
    step.token_ids.copy_(last_token[lanes])
    step.positions.copy_(position)
    step.slots.copy_(page * page_size + position % page_size)
    step.kv_lens.copy_(position + 1)
    kv_lens.index_put_((lanes,), torch.where(lanes == len(kv_lens) - 1, 0, position + 1).int())


advance = Kernel(_launch, _twin)
