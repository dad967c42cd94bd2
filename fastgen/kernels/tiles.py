"""How attention's kernel is run: the tiles of its phases, as they fit a chip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastgen.kernels.launch import Chip

DECODE, FEW, PREFILL = "decode", "few", "prefill"  # FEW: decodes of so few sequences that the chip is not filled
GROUP = "group"  # of rows that share keys
FILLED = 8  # units (a sequence and a KV head) a processor, up to which decodes are FEW
REGISTERS = 255  # of a thread: all that it may have measured faster than more programs a processor
MERGED = {
    DECODE: 8,
    FEW: 8,
    PREFILL: 16,
    GROUP: 16,
}  # numbers of partial results that a thread has on their way while it merges
HOPPER = (9, 0)


@dataclass(frozen=True)
class Config:
    """rows: of a query tile, tokens * G or more; keys: of an iteration; registers: that a thread may have; programs:
    that a processor is given; peel: blocks of keys that all rows see in full have a loop of their own, without a mask;
    merge_rows, merge_splits: of the partial results that are read at once. fixed: an iteration's keys are summed by
    themselves before they are added to those before them, so that it does not matter who does that; swap: the rows are
    then the right side of its products. dealt: a program knows most of its units from the start."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int
    programs: int
    peel: bool
    merge_rows: int
    merge_splits: int
    fixed: bool = False
    swap: bool = False
    dealt: bool = False


# Per phase, and whether a number takes 2 bytes: (rows, keys, warps, stages), the first of which fits is taken. Rows 0:
# those of a token. `stages` - 1 blocks of keys are on their way while one is worked on. As measured on an H200
# (scripts/tune/tune_attention.py).
_HALF_PREFILL = ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2))
CONFIGS = {
    (DECODE, True): ((0, 32, 1, 2), (0, 16, 1, 2)),
    (DECODE, False): ((0, 32, 4, 2), (0, 16, 4, 2)),
    (FEW, True): ((0, 64, 2, 3), (0, 64, 2, 2), (0, 32, 2, 2), (0, 16, 2, 2)),
    (FEW, False): ((0, 32, 4, 2), (0, 16, 4, 2)),
    (PREFILL, True): ((128, 64, 8, 3), (128, 64, 8, 2), *_HALF_PREFILL),
    (PREFILL, False): ((32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2)),
    (GROUP, True): ((64, 32, 4, 3), *_HALF_PREFILL),
    (GROUP, False): ((32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2)),
}
# Where the bits of a row must not tell its phase: as many keys an iteration in all of them, and the same instruction of
# the tensor cores. Hopper's own takes 64 rows or more on the left, so that a decode's rows are on the right.
FIXED_CONFIGS = {
    (DECODE, True): ((0, 64, 2, 2),),
    (FEW, True): ((0, 64, 2, 2),),
    (PREFILL, True): ((32, 64, 2, 2),),
    (GROUP, True): ((32, 64, 2, 2),),
} | {(phase, False): ((32, 32, 4, 2),) for phase in (DECODE, FEW, PREFILL, GROUP)}
FIXED_HOPPER = {
    DECODE: ((0, 64, 4, 2),),
    FEW: ((0, 64, 4, 2),),
    PREFILL: ((128, 64, 8, 3), (64, 64, 4, 2)),
    GROUP: ((64, 64, 4, 2),),
}
SWAPPED_REGISTERS = 168  # of a thread: three programs a processor


def configure(
    phase: str, group: int, head_size: int, dtype: torch.dtype, chip: Chip, deterministic: bool = False
) -> Config:
    """The configuration for `group` query heads a KV head (G)."""
    dims, least = power_of_two(head_size), max(power_of_two(group), 16)
    wide = dims > 128  # then a tile of half the rows has as many numbers
    hopper = deterministic and chip.capability[0] == HOPPER[0] and dtype.itemsize == 2 and 64 <= dims <= 128
    choices = (FIXED_CONFIGS if deterministic else CONFIGS)[phase, dtype.itemsize == 2]
    for rows, keys, warps, stages in FIXED_HOPPER[phase] if hopper else choices:
        if deterministic and not hopper:  # so that warps share keys out in all phases, as it was tested
            rows = min(rows, dims // 2)
        rows = max(rows // 2 if wide else rows, least)
        warps = max(warps, min(rows // 16, 8) if rows == least else 0, 4 if wide else 0)
        swap = hopper and phase in (DECODE, FEW)
        size = shared_bytes(rows, keys, stages, dims, dtype, chip, swap)
        if size <= chip.shared_memory:
            tiles = phase in (PREFILL, GROUP)
            merge_rows = min(rows if tiles else power_of_two(group), 32)
            merge_splits = min(max(MERGED[phase] * warps * 32 // (merge_rows * dims), 1), 16)
            if deterministic:  # one after the other, of which many are on their way
                merge_splits = min(4 * merge_splits, 8)
            registers = SWAPPED_REGISTERS if swap else REGISTERS
            programs = programs_of(size, registers, warps, chip)
            merging = merge_rows, merge_splits
            fixed = deterministic, swap, deterministic and not tiles
            return Config(rows, keys, warps, stages, registers, programs, tiles, *merging, *fixed)
    raise ValueError(
        f"attention='paged' can not run {group} query heads a KV head of size {head_size} in {dtype} on this GPU, "
        f"whose blocks have {chip.shared_memory} bytes of shared memory; use attention='reference'"
    )


def programs_of(shared_memory: int, registers: int, warps: int, chip: Chip) -> int:
    """Programs that a processor holds at once: if there were more, the last would start when all work is taken."""
    by_memory = (chip.shared_memory + 1024) // (shared_memory + 1024)  # a kilobyte of each is the system's
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    return max(min(by_memory, by_registers, 16), 1)


def shared_bytes(
    rows: int, keys: int, stages: int, dims: int, dtype: torch.dtype, chip: Chip, swap: bool = False
) -> int:
    """Of shared memory, that a program takes: rounded up, since the compiler decides."""
    ahead = stages if swap or (chip.capability >= HOPPER and rows >= 64) else max(stages - 1, 1)
    numbers = 2 * ahead * keys * dims + rows * dims + rows * keys
    return max(numbers * dtype.itemsize, rows * dims * 4) + 2048


def power_of_two(size: int) -> int:
    """The least power of two that is not less."""
    return 1 << (size - 1).bit_length()
