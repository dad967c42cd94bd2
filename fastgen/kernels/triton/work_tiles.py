"""The kernel that lists the work tiles of a decode step (see fastgen.kernels.work_tiles), and the task scheduler."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.work_tiles import ALIGN, BLOCKS, CLASSES, FIELDS, HEADER, SPLITS, WHOLE, SharedRows


@jit("sequences", "split", "most_split", "unsplit", "list_size", "bases_size")
def _plan_kernel(
    lanes_ptr, lens_ptr, windows_ptr, lists_ptr, shared_ptr, ends_ptr, bases_ptr,
    sequences, split, most_split, unsplit, list_size, bases_size,
    BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr, HEADER: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr,
    WHOLE: tl.constexpr, ALIGN: tl.constexpr, CLASSES: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the work tiles of a decode step, with one program per window. Each sequence has count - 1 work tiles of
    `split` keys, and one with the remaining keys, or only one work tile if no sequence has more than `unsplit` keys, or
    if more than `most_split` sequences have keys."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    list_ptr = lists_ptr + tl.program_id(0) * list_size
    window = tl.load(windows_ptr + tl.program_id(0))
    s = tl.arange(0, BLOCK_S)
    lane = tl.load(lanes_ptr + s, mask=s < sequences, other=0).to(tl.int32)
    length = tl.load(lens_ptr + s, mask=s < sequences, other=0)
    split = tl.where(tl.sum((length > 0).to(tl.int32), 0) > most_split, WHOLE, split)
    begin = tl.where(window > 0, tl.maximum(length - window, 0) // ALIGN * ALIGN, 0)
    partials = tl.zeros([BLOCK_S], tl.int32)
    if SHARED:
        ends = tl.load(ends_ptr + s, mask=s < sequences, other=0)
        begin = tl.maximum(begin, ends)
        partials = (ends > 0).to(tl.int32)
    unsplit = tl.where(tl.max(length - begin, 0) > unsplit, 0, unsplit)
    start = begin // split
    count = tl.where(length - begin > unsplit, (length + split - 1) // split - start, (length > begin).to(tl.int32))
    rest = length - tl.maximum(begin, (start + count - 1) * split)

    longest = tl.maximum(tl.max(tl.where(count > 1, split, rest), 0), 1)
    rest_class = (longest - rest) * CLASSES // longest
    whole = tl.where(count > 1, count - 1, 0)
    whole_at = tl.cumsum(whole, 0) - whole
    total = tl.sum(whole, 0)
    rest_at = tl.zeros([BLOCK_S], tl.int32)
    for number in tl.static_range(CLASSES):
        there = (rest_class == number) & (count > 0)
        place = tl.where(there, 1, 0)
        rest_at = tl.where(there, total + tl.cumsum(place, 0) - 1, rest_at)
        total += tl.sum(place, 0)
    parts = tl.where(count > 1, count, 0) + partials
    part = tl.cumsum(parts, 0) - parts

    header = tl.arange(0, HEADER)
    tl.store(list_ptr + header, tl.where(header == 0, total, 0))
    if SHARED:
        tl.store(bases_ptr + tl.program_id(0) * bases_size + s, part, mask=s < sequences)
        if tl.program_id(0) == 0:
            tl.store(shared_ptr + header, tl.zeros([HEADER], tl.int32), mask=header > 0)
    for first_j in range(0, tl.max(count, 0), BLOCK_J):
        j = (first_j + tl.arange(0, BLOCK_J))[None, :]
        here = j < count[:, None]
        at = tl.where(j == count[:, None] - 1, rest_at[:, None], whole_at[:, None] + j)
        tile_ptr = list_ptr + HEADER + at * FIELDS
        from_key = (start[:, None] + j) * split
        tl.store(tile_ptr, s[:, None], mask=here)
        tl.store(tile_ptr + 1, 1 + partials[:, None] * SPLITS, mask=here)
        tl.store(tile_ptr + 2, lane[:, None], mask=here)
        tl.store(tile_ptr + 3, length[:, None] - 1, mask=here)
        tl.store(tile_ptr + 4, tl.maximum(from_key, begin[:, None]), mask=here)
        tl.store(tile_ptr + 5, tl.where(j == count[:, None] - 1, length[:, None], from_key + split), mask=here)
        tl.store(tile_ptr + 6, part[:, None], mask=here)
        tl.store(tile_ptr + 7, j + count[:, None] * SPLITS, mask=here)


def plan_decode(
    lanes: Tensor, kv_lens: Tensor, windows: Tensor, lists: Tensor, split: int, shared: SharedRows | None,
    unsplit: int = 0, most_split: int = BLOCKS[-1],
) -> None:  # fmt: skip
    count, capacity = len(lanes), (lists.shape[1] - HEADER) // FIELDS
    assert lanes.dtype == torch.int64
    assert kv_lens.dtype == windows.dtype == lists.dtype == torch.int32
    assert lanes.shape == kv_lens.shape
    assert lanes.is_contiguous()
    assert kv_lens.is_contiguous()
    assert lists.stride() == (lists.shape[1], 1)
    assert len(windows) == len(lists)
    assert split % ALIGN == 0 or ALIGN % split == 0
    assert 0 < count <= min(capacity, BLOCKS[-1])
    block = next(size for size in BLOCKS if size >= count)
    pdl = Chip.of(lanes.device).dependent_launch
    tables: tuple[Tensor, ...] | tuple[None, ...] = (None, None, None)
    bases_size = 0
    if shared is not None:
        tables, bases_size = (shared.list, shared.ends, shared.bases), shared.bases.stride(0)
        assert shared.list.dtype == shared.ends.dtype == shared.bases.dtype == torch.int32
        assert min(len(shared.ends), shared.bases.shape[1]) >= count
    _plan_kernel[(len(windows),)](
        lanes, kv_lens, windows, lists, *tables, count, split, most_split, unsplit, lists.shape[1], bases_size,
        block, max(1024 // block, 1), HEADER, FIELDS, SPLITS, WHOLE, ALIGN, CLASSES, shared is not None, pdl,
        num_warps=4 if block == BLOCKS[0] else 16 if block < 4096 else 32, launch_pdl=pdl,
    )  # fmt: skip


@jit()
def schedule(task, programs, tasks):
    """Return a program's first task and the number of programs that take tasks, each taking every `programs`-th one.

    The number is the smallest that finishes in the same number of rounds: with more programs, few of them would have a
    task in the last round, too few to use the full memory bandwidth.
    """
    programs = tl.cdiv(tasks, tl.maximum(tl.cdiv(tasks, programs), 1))
    return tl.where(task < programs, task, tasks), programs


@jit()
def next_task(list_ptr, layer, tasks):
    """Take and return the next task, or return `tasks` if there are no more."""
    task = tasks
    if tasks > tl.num_programs(0):
        task = tl.num_programs(0) + tl.atomic_add(list_ptr + 1 + layer, 1, sem="relaxed")
    return task


@jit()
def read_tile(tile_ptr):
    """Return the fields of a work tile."""
    first = tl.load(tile_ptr)
    tokens = tl.load(tile_ptr + 1)
    lane = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
    begin = tl.load(tile_ptr + 4)
    end = tl.load(tile_ptr + 5)
    part = tl.load(tile_ptr + 6)
    split = tl.load(tile_ptr + 7)
    return first, tokens, lane, position, begin, end, part, split
