"""Attention of prefill chunks by FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, PyPI: flash-attn-4).

The package is optional: install `fastgen[flash]` and pass attention="flash". Its kernels read the paged KV pool in
place, in bfloat16 or float16, on Hopper and on data-center Blackwell. Decodes still use the paged kernels, because the
package does not split the keys of a decode. So do the prefills of steps that run as CUDA graphs (`plan_lists`), which
have up to FLASH_TOKENS tokens (`warm_up.py`): the package takes tensors whose shapes depend on the number of chunks,
which differs from replay to replay.

The package compiles a kernel at its first call, which takes seconds. It caches kernels on disk if
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 is set; FLASH_ATTENTION_CUTE_DSL_CACHE_DIR names the folder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import upload_together
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.paged import PagedAttention, PagedPlan
from fastgen.model.kv_pool import KVPool

KEY_TILE = 128  # keys per tile in the package's kernels
MAX_HEAD_SIZE = 128  # the largest head size that was tested; larger heads have other tiles
MANY = 256  # above this number of sequences the package runs another variant of its kernel


@dataclass(frozen=True)
class FlashPlan(PagedPlan):
    """The plan of a step with S prefill chunks, which extends the plan of its decodes.

    decodes: number of decodes, the first tokens of the step. starts: int32 [S + 1], first row of q of each chunk, then
    the end of the last chunk. kv_lens: int32 [S]. pages: int32 [S, columns].
    """

    decodes: int
    starts: Tensor
    kv_lens: Tensor
    pages: Tensor


class FlashAttention(PagedAttention):
    """Paged attention that computes prefill chunks with flash-attn; see PagedAttention for the arguments.

    Raises ValueError if the package is missing, or does not support this GPU, dtype or head size.
    """

    needs_clean_pages = True  # unwritten values of a page are loaded, too, with weight 0; but 0 times a NaN is NaN

    def __init__(self, pool: KVPool, num_heads: int, windows: tuple[int, ...], max_seqs: int, *rest: Any) -> None:
        super().__init__(pool, num_heads, windows, max_seqs, *rest)
        try:
            if pool.keys.shape[-1] > MAX_HEAD_SIZE:
                raise ValueError(f"the head size is {pool.keys.shape[-1]}, above {MAX_HEAD_SIZE}")
            from flash_attn.cute import flash_attn_varlen_func

            self._varlen = flash_attn_varlen_func
            self._compile(num_heads)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the package asserts, and its compiler has errors of many types
            raise ValueError(
                f"attention is 'flash', but flash-attn-4 does not run here ({type(error).__name__}: {error}): it needs "
                "Hopper or a data-center Blackwell, bfloat16 or float16, and to be installed (fastgen[flash]); "
                "use attention='auto'"
            ) from error

    def plan(self, layout: StepLayout) -> PagedPlan:
        decodes, table = layout.decodes, layout.page_table
        if decodes == len(layout.query_lens):
            return super().plan(layout)
        paged = PagedPlan(table, {})
        if decodes:
            query_lens, kv_lens, lanes = (x[:decodes] for x in (layout.query_lens, layout.kv_lens, layout.lanes))
            paged = super().plan(replace(layout, query_lens=query_lens, kv_lens=kv_lens, lanes=lanes))
        starts = np.concatenate([[0], layout.query_lens.cumsum()])[decodes:]
        chunks = starts, layout.kv_lens[decodes:], layout.lanes[decodes:]
        begin, ends, owners = upload_together([each.astype(np.int32) for each in chunks], table.device)
        return FlashPlan(table, paged.work, decodes, begin, ends, table.index_select(0, owners))

    def attend(self, plan: PagedPlan, layer: int, q: Tensor, window: int) -> Tensor:
        if not isinstance(plan, FlashPlan):
            return super().attend(plan, layer, q, window)
        out = self._flash(plan, layer, q, window)
        if plan.decodes:
            out[: plan.decodes] = super().attend(plan, layer, q[: plan.decodes], window)
        return out

    def _flash(self, plan: FlashPlan, layer: int, q: Tensor, window: int) -> Tensor:
        """Return the attention [T, H, D] of q [T, H, D]. The rows of decodes are undefined."""
        out: Any = self._varlen(
            q,
            self.pool.keys[layer].transpose(1, 2),  # a view [pages, P, K, D]
            self.pool.values[layer].transpose(1, 2),
            cu_seqlens_q=plan.starts,
            seqused_k=plan.kv_lens,
            page_table=plan.pages,
            softmax_scale=self.scale,
            causal=True,
            window_size=(window - 1, 0) if window else (None, None),
        )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    @torch.inference_mode()
    def _compile(self, num_heads: int) -> None:
        """Run each variant of the package's kernels once on artificial sequences, so that none is compiled later.

        There are variants with and without a window, for more than MANY sequences, and on Blackwell for queries that
        fit one tile.
        """
        keys = self.pool.keys
        shapes = [(1, 1), (1, 2 * KEY_TILE), *[(MANY + 1, 1)] * (self.max_seqs > MANY)]
        for window in sorted({min(window, 1) for window in self.windows}):
            for sequences, length in shapes:
                q = keys.new_zeros(sequences * length, num_heads, keys.shape[-1])
                starts = torch.arange(0, len(q) + 1, length, dtype=torch.int32, device=q.device)
                pages = starts.new_zeros(sequences, 2 * KEY_TILE)
                plan = FlashPlan(pages, {}, 0, starts, starts.new_full((sequences,), length), pages)
                self._flash(plan, 0, q, window)
