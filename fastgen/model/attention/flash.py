"""Attention by FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, PyPI: flash-attn-4), for prefill chunks.

The package is optional. Its kernels read the paged KV where it lies, on Hopper and Blackwell. They have no split over
the keys there, which decodes want, so these stay with another implementation unless it is told otherwise. They are
compiled when first called, for each of the variants that `_warm` runs; here they are also kept on disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.kernels.launch import Chip
from fastgen.model.attention.interface import Attention, StepLayout
from fastgen.model.kv_pool import KVPool

CAPABILITIES = (9, 10, 11)  # the major ones for which the package has kernels over paged KV
MOST_HEAD_SIZE = 128  # above it the kernels take other tiles of keys
KEY_TILE = 128  # a page of so many tokens is loaded as a whole, which is fastest; of others only what is in use
MANY = 256  # sequences beyond which the package looks a tile's sequence up in a table: another variant
SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def why_not(pool: KVPool) -> str | None:
    """Why the package can not serve this pool, as the end of a sentence; None if it can."""
    device, dtype, head_size = pool.keys.device, pool.keys.dtype, pool.keys.shape[-1]
    if device.type != "cuda":
        return "flash-attn-4 needs a GPU"
    major, minor = Chip.of(device).capability
    if major not in CAPABILITIES:
        return f"flash-attn-4 needs Hopper or a data-center Blackwell, and this GPU has capability {major}.{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn-4 computes in bfloat16 and float16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_size % 16 or head_size > MOST_HEAD_SIZE:
        return f"head sizes must be a multiple of 16 up to {MOST_HEAD_SIZE} for flash-attn-4, and this is {head_size}"
    try:
        _import()
    except Exception as error:  # a beta over many native parts can fail in any way, and must not end a start
        if isinstance(error, ModuleNotFoundError) and error.name in ("flash_attn", "flash_attn.cute"):
            return "the package flash-attn-4 is not installed"
        return f"flash-attn-4 can not be imported ({_line(error)})"
    return None


@dataclass(frozen=True)
class _Plan:
    """decodes: the other implementation's plan for the first `rows` of q, if there are any; the rest is for flash.

    starts: int32 [S + 1], the row of q that each sequence begins at, and where the last one ends; kv_lens: int32 [S];
    pages: int32 [S, slots]; all None where nothing is left for flash.
    """

    rows: int
    decodes: Any = None
    starts: Tensor | None = None
    kv_lens: Tensor | None = None
    pages: Tensor | None = None


class FlashAttention:
    """Prefill chunks by flash, and by `other` the decodes; with decodes=True flash does these too.

    num_heads: H; windows: of each layer, 0 for none; max_seqs: of a step. Raises ValueError if the package does not run
    here after all, which a look at the pool (`why_not`) does not tell.
    """

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        windows: tuple[int, ...],
        other: Attention,
        decodes: bool = False,
        max_seqs: int = MANY + 1,
    ) -> None:
        self.pool, self.other = pool, other
        # Of a page that is loaded as a whole, unwritten values weigh 0, and 0 times a NaN is NaN.
        self.needs_clean_pages = pool.page_size == KEY_TILE or other.needs_clean_pages
        self._decodes = decodes
        self._varlen = _import()
        # [pages, P, K, D] is what the kernels read: by strides, so that nothing moves.
        self._keys = [keys.transpose(1, 2) for keys in pool.keys]
        self._values = [values.transpose(1, 2) for values in pool.values]
        try:
            self._warm(num_heads, windows, max_seqs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of another version of the package, or its compiler
            raise ValueError(f"flash-attn-4 does not run here ({_line(error)}); take attention='paged'") from error

    @property
    def capturable(self) -> bool:
        return self._decodes or self.other.capturable

    @property
    def shares(self) -> bool:
        return not self._decodes and self.other.shares

    def plan(self, layout: StepLayout) -> _Plan:
        rows = 0 if self._decodes else layout.decodes
        decodes = self.other.plan(_first(layout, rows)) if rows else None
        if rows == len(layout.query_lens):
            return _Plan(rows, decodes)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), layout.query_lens.cumsum(0)])[rows:]
        kv_lens, lanes = layout.kv_lens[rows:], layout.lanes[rows:]
        slots = -(-int(kv_lens.max()) // self.pool.page_size)
        packed = torch.cat([starts, kv_lens, lanes]).int()
        table = layout.page_table
        if table.device.type == "cuda":
            packed = packed.pin_memory()  # a copy from other memory would wait for the device
        packed = packed.to(table.device, non_blocking=True)
        starts, kv_lens, lanes = torch.split(packed, [len(starts), len(kv_lens), len(lanes)])
        return _Plan(rows, decodes, starts, kv_lens, table[:, :slots].index_select(0, lanes))

    def share(self, lanes: NDArray[np.int64], full: NDArray[np.int64], tables: NDArray[np.int32]) -> bool:
        return self.shares and self.other.share(lanes, full, tables)

    def plan_decode(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, shared: bool = False, alone: bool = False
    ) -> _Plan:
        """Has to be made inside the capture that it is for: a replay gathers the pages anew. kv_lens are at least 1."""
        if not self._decodes:
            return _Plan(len(lanes), self.other.plan_decode(lanes, kv_lens, page_table, shared, alone))
        starts = torch.arange(len(lanes) + 1, dtype=torch.int32, device=lanes.device)
        return _Plan(0, None, starts, kv_lens, page_table.index_select(0, lanes))

    def attend(self, plan: _Plan, layer: int, q: Tensor, window: int) -> Tensor:
        if plan.starts is None:
            return self.other.attend(plan.decodes, layer, q, window)
        # All of q goes in, the decodes' rows in no sequence: the answer then has room for them without a large copy.
        out = self._flash(plan, layer, q, window)
        if plan.rows:
            out[: plan.rows] = self.other.attend(plan.decodes, layer, q[: plan.rows], window)
        return out

    def _flash(self, plan: _Plan, layer: int, q: Tensor, window: int) -> Tensor:
        """[T, H, D], of which only the rows of the plan's sequences are written. Waits for nothing."""
        out = self._varlen(
            q,
            self._keys[layer],
            self._values[layer],
            cu_seqlens_q=plan.starts,
            seqused_k=plan.kv_lens,
            page_table=plan.pages,
            causal=True,
            window_size=(window - 1, 0) if window else (None, None),
        )
        answer: Tensor = out[0] if isinstance(out, tuple) else out
        return answer

    @torch.inference_mode()
    def _warm(self, num_heads: int, windows: tuple[int, ...], max_seqs: int) -> None:
        """Run each variant of the kernels once on made-up sequences, so that none is compiled while serving.

        They differ by: whether there is a window; on Blackwell whether all queries fit one tile; more than MANY
        sequences. Lengths, the number of pages and the size of a window do not matter.
        """
        keys = self.pool.keys
        shapes = [(1, 1), (1, 2 * KEY_TILE), (MANY + 1, 1)][: 3 if max_seqs > MANY else 2]
        for window in sorted({min(window, 1) for window in windows}):
            for sequences, length in shapes:
                q = keys.new_zeros(sequences * length, num_heads, keys.shape[-1])
                starts = torch.arange(0, len(q) + 1, length, dtype=torch.int32, device=q.device)
                pages = starts.new_zeros(sequences, 2 * KEY_TILE)
                self._flash(_Plan(0, None, starts, starts.new_full((sequences,), length), pages), 0, q, window)


def _first(layout: StepLayout, count: int) -> StepLayout:
    """The layout of its first `count` sequences, all decodes."""
    return replace(
        layout,
        query_lens=layout.query_lens[:count],
        kv_lens=layout.kv_lens[:count],
        decodes=count,
        lanes=layout.lanes[:count],
    )


def _import() -> Callable[..., Any]:
    with _keeping_kernels():
        from flash_attn.cute import flash_attn_varlen_func
    found: Callable[..., Any] = flash_attn_varlen_func
    return found


@contextmanager
def _keeping_kernels() -> Iterator[None]:
    """Tell the package, which reads this from the environment when it is imported, to keep what it compiles: a variant
    takes seconds. Not in its own default folder, under /tmp, where others could put theirs. The user's settings win.
    """
    folder = Path.home() / ".cache" / "fastgen" / "flash-attn-4"
    ours = {SWITCH: "1", FOLDER: str(folder)}
    if any(name in os.environ for name in ours):
        yield
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # no home that can be written: compiled anew in each process
        yield
        return
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _line(error: Exception) -> str:
    """The first line of an error that says something, without the terminal's colors."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(error)).split("\n")
    return f"{type(error).__name__}: {next(filter(str.strip, lines), '')}"
