"""Updates of the state of lanes: the input of a decode step, made from its lanes, and the start of a step that the host
sends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.kernels.launch import Kernel


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


advance = Kernel(_advance_twin, "fastgen.kernels.triton.lane_updates:advance")


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


begin_step = Kernel(_begin_twin, "fastgen.kernels.triton.lane_updates:begin_step")
