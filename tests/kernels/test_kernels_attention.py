"""Paged attention in Triton, in its interpreter if there is no GPU: the lists of a step's work tiles, and the attention
of their tokens, compared with the twins and with the reference."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from compiling import compiled
from ragged import KV_HEADS, LAYER, Ragged
from reference_attention import ReferenceAttention
from torch import Tensor

from fastgen.device.chip import Chip, power_of_two
from fastgen.kernels import attention as kernel
from fastgen.kernels import work_tiles
from fastgen.kernels.launch import Kernel, triton
from fastgen.kernels.triton import attention as attention_kernels
from fastgen.kernels.work_tiles import BEGIN, END, FIELDS, FIRST, HEADER, PART, SPLIT, SPLITS, TOKENS
from fastgen.model.attention.paged import PagedAttention
from fastgen.model.kv_pool import KVPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates to bfloat16
H200 = Chip((9, 0), 132, 232_448)
CHIPS = [H200, Chip((8, 0), 108, 166_912), Chip((8, 6), 82, 101_376), Chip((7, 5), 40, 65_536)]
WHOLE, CHUNKED = [1, 1, 1], [1, 1, 17, 2, 33]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch kernels on the CPU, too. The interpreter of Triton 3.6 converts an array of one number to an int, which
    NumPy 2.4 does not allow (https://github.com/triton-lang/triton/issues/9171)."""
    monkeypatch.setattr(Kernel, "runs_on", lambda self, device: True)
    if DEVICE.type == "cpu":
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        patch = interpreter._patch_lang_tensor

        def patched(tensor: type, scope: object) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def make(
    query_lens: list[int],
    kv_lens: list[int],
    head_size: int = 64,
    group: int = 4,
    page_size: int = 64,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
) -> Ragged:
    return Ragged(head_size, group, page_size, dtype, 0, query_lens, kv_lens, fp8)


def paged_of(case: Ragged, window: int) -> PagedAttention:
    pool = case.pool(DEVICE.type, garbage=torch.nan)
    return PagedAttention(pool, case.q.shape[1], (window,), len(case.table), 4096)


def attend(paged: PagedAttention, case: Ragged, window: int) -> Tensor:
    """Return the answer of a step by itself."""
    return paged.attend(paged.plan(case.layout(DEVICE.type)), LAYER, case.q.to(DEVICE), window)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-6 if found.dtype == torch.float32 else 2 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), expected.to(found.device), atol=tolerance, rtol=tolerance)


def tiles_of(whole: Tensor) -> Tensor:
    """Return the work tiles of a list, int32 [n, FIELDS]."""
    assert not whole[1:HEADER].any()
    return whole[HEADER : HEADER + int(whole[0]) * FIELDS].view(-1, FIELDS)


def checked(found: Tensor, slots: int) -> Iterator[list[list[int]]]:
    """Yield the splits of each query tile in order, and check that their ranges and their partial results are
    disjoint."""
    used: set[int] = set()
    for first in sorted(set(found[:, FIRST].tolist())):
        tile: list[list[int]] = found[found[:, FIRST] == first].tolist()
        tile.sort(key=lambda item: item[SPLIT])
        assert [item[SPLIT] for item in tile] == [number + len(tile) * SPLITS for number in range(len(tile))]
        assert all(a[END] == b[BEGIN] for a, b in itertools.pairwise(tile))
        assert all(item[BEGIN] < item[END] for item in tile)
        if len(tile) > 1:
            rows = set(range(tile[0][PART], tile[0][PART] + len(tile) * tile[0][TOKENS]))
            assert not rows & used
            assert max(rows) < slots
            used |= rows
        yield tile


@pytest.mark.parametrize("count", [1, 9, 64, 70])
@pytest.mark.parametrize("longest", [3000, 513, 512])
def test_decode_lists(count: int, longest: int) -> None:
    """The longest sequence has as many keys as sequences that are not split may have, one more, or many more."""
    rng = np.random.default_rng(count)
    kv_lens = torch.from_numpy(rng.integers(1, longest, count).astype(np.int32)).to(DEVICE)
    kv_lens[: count // 4] = 1  # padding
    kv_lens[-1] = longest
    lanes = torch.from_numpy(rng.permutation(count) + 3).to(DEVICE)
    windows = torch.tensor([0, 100, 512, 1024], dtype=torch.int32, device=DEVICE)
    for split, unsplit, most in ((64, 0, 47), (64, 128, 47), (64, 512, 47), (32, 0, 94), (work_tiles.WHOLE, 0, 1)):
        size = HEADER + count * (most + 1) * FIELDS
        found, twin = (torch.full((len(windows), size), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
        work_tiles.plan_decode.launch(lanes, kv_lens, windows, found, split, None, unsplit)
        work_tiles.plan_decode.twin(lanes, kv_lens, windows, twin, split, None, unsplit)
        assert torch.equal(found, twin)
        for window, whole in zip(windows.tolist(), found.cpu(), strict=True):
            tiles = list(checked(tiles_of(whole), count * (most + 1)))
            assert len(tiles) == count
            begins = [max(length - window, 0) // 64 * 64 if window else 0 for length in kv_lens.tolist()]
            whole_keys = max(length - begin for length, begin in zip(kv_lens.tolist(), begins, strict=True)) <= unsplit
            for tile in tiles:
                sequence, length = tile[0][FIRST], int(kv_lens[tile[0][FIRST]])
                assert tile[0][1:4] == [1, int(lanes[sequence]), length - 1]
                begin = begins[sequence]
                assert (tile[0][BEGIN], tile[-1][END]) == (begin, length)
                assert len(tile) <= most
                assert (len(tile) == 1) == (whole_keys or length - begin <= split)
                assert all(item[BEGIN] % min(split, 64) == 0 for item in tile)
                assert whole_keys or all(item[END] - item[BEGIN] <= split for item in tile)


def test_lanes_without_keys_are_left_out_and_do_not_count() -> None:
    """A graph has room for more lanes than decode in a step, and how many do decides whether their keys are split."""
    kv_lens = torch.tensor([0, 200, 0, 130, 0], dtype=torch.int32, device=DEVICE)
    lanes, windows = torch.arange(5, device=DEVICE) + 3, torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for most, splits in ((2, 4 + 3), (1, 2)):
        found, twin = (torch.full((1, HEADER + 40 * FIELDS), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
        for plan, lists in ((work_tiles.plan_decode.launch, found), (work_tiles.plan_decode.twin, twin)):
            plan(lanes, kv_lens, windows, lists, 64, None, 0, most)
        assert torch.equal(found, twin)
        tiles = list(checked(tiles_of(found[0].cpu()), 40))
        assert [tile[0][FIRST] for tile in tiles] == [1, 3]
        assert sum(map(len, tiles)) == splits == int(found[0, 0])


@pytest.mark.parametrize("window", [0, 70])
def test_a_step_is_planned_from_lists_of_a_fixed_size(window: int) -> None:
    """One graph serves steps with other numbers of decodes and chunks: what follows them is left out."""
    case = make([1, 1, 17, 2, 33], [300, 66, 150, 2, 400])
    paged, rest = paged_of(case, window), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    layout, table = case.layout(DEVICE.type), case.table.to(DEVICE)
    (size,), (listed,) = paged.list_sizes(len(case.q)), paged.lists(layout)
    lists = torch.full((size,), 7, dtype=torch.int32, device=DEVICE)
    for decodes, made in ((layout.decodes, listed), (0, listed), (layout.decodes, np.zeros(1, dtype=np.int32))):
        assert len(made) <= size
        lists[: len(made)] = torch.from_numpy(made).to(DEVICE)
        lanes = torch.cat([case.lanes[:decodes].to(DEVICE), rest])
        kv_lens = torch.cat([torch.tensor(case.kv_lens[:decodes], device=DEVICE), rest]).int()
        out = paged.attend(paged.plan_lists(lanes, kv_lens, table, [lists]), LAYER, case.q.to(DEVICE), window)
        expected = attend(paged, case, window)
        if decodes:
            assert torch.equal(out[:decodes], expected[:decodes])
        if len(made) > 1:
            assert torch.equal(out[layout.decodes :], expected[layout.decodes :])


def test_few_sequences_are_split_so_that_they_fill_the_chip() -> None:
    """Decodes are split into blocks, as long as there is room for partial results."""
    pool = KVPool(1, 2, 8, 64, 128, torch.bfloat16, DEVICE)
    for context, sequences, splits in ((4096, 4, True), (4096, 1000, False), (30000, 10, True), (300_000, 1, True)):
        paged = PagedAttention(pool, 32, (0,), sequences, context)
        paged.chip = H200
        zeros = torch.zeros(sequences, dtype=torch.int64, device=DEVICE)
        plan = paged.plan_decode(zeros, zeros.int(), zeros.int()[None])
        assert plan.work[0][0].split == splits
        assert plan.work[0][0].most == sequences * (-(-context // 64) + 1 if splits else 1) <= paged.partials


@pytest.mark.parametrize("window", [0, 100])
def test_list_ofs(window: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        query_lens = rng.choice([1, 2, 31, 32, 33, 300], 5)
        kv_lens = query_lens + rng.choice([0, 1, 700, 5000], 5)
        chunks = work_tiles.Chunks(np.cumsum(query_lens) - query_lens + 7, query_lens, np.arange(5) + 3, kv_lens)
        found = work_tiles.prefill_tiles(chunks, window, 32, 64)
        lengths = (found[:, END] - found[:, BEGIN]).tolist()
        assert lengths == sorted(lengths, reverse=True)
        whole = torch.from_numpy(work_tiles.list_of(found))
        seen: list[int] = []
        for tile in checked(tiles_of(whole), 0):
            first, tokens, lane, position = tile[0][:4]
            sequence = lane - 3
            assert position == (kv_lens - query_lens)[sequence] + first - chunks.first[sequence]
            assert tile[-1][END] == position + tokens
            begin = tile[0][BEGIN]
            assert begin % 64 == 0
            assert position - window - 63 <= begin <= max(position - window + 1, 0) if window else begin == 0
            seen += range(first, first + tokens)
        assert sorted(seen) == list(range(7, 7 + int(query_lens.sum())))


@pytest.mark.parametrize(
    ("head_size", "group", "page_size", "window"),
    [
        (64, 1, 64, 0), (64, 5, 16, 40), (96, 4, 64, 40), (128, 8, 16, 0), (80, 4, 48, 70), (256, 2, 16, 0),
        (256, 4, 64, 70), (32, 20, 64, 70), (64, 4, 1, 0),
    ],
)  # fmt: skip
def test_decodes_and_prefills_agree_with_the_reference(head_size: int, group: int, page_size: int, window: int) -> None:
    for query_lens, dtype in ((WHOLE, torch.float32), (CHUNKED, HALF)):
        known = [0, 63, 300, 64, 130]
        kv_lens = [length + before for length, before in zip(query_lens, known, strict=False)]
        case = make(query_lens, kv_lens, head_size, group, page_size, dtype)
        paged = paged_of(case, window)
        close(attend(paged, case, window), case.expected(window)[0])
        assert not paged._partial_results.arrivals.any()


@pytest.mark.parametrize(("head_size", "page_size"), [(64, 64), (80, 24)])
def test_keys_in_fp8(head_size: int, page_size: int) -> None:
    case = make([1, 1, 17], [64, 130, 83], head_size, 2, page_size, HALF, fp8=True)
    paged, q, (expected, _) = paged_of(case, 0), case.q.to(DEVICE), case.expected(0)
    pool, plan, twin = paged.pool, paged.plan(case.layout(DEVICE.type)), torch.empty_like(q)
    close(paged.attend(plan, LAYER, q, 0), expected)
    for tiles in plan.work[0]:
        arguments = pool.keys, pool.values, plan.page_table, tiles, paged._partial_results, LAYER, 0
        kernel.attention.twin(q, twin, *arguments)
    close(twin, expected)
    reference = ReferenceAttention(pool, case.q.shape[1])
    close(reference.attend(reference.plan(case.layout(DEVICE.type)), LAYER, q, 0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_scale_of_scores(dtype: torch.dtype) -> None:
    """With half the scale, the answers are those of queries of half the size."""
    case = make([1, 1, 17], [64, 130, 83], 64, 2, 64, dtype)
    pool, q = case.pool(DEVICE.type, garbage=torch.nan), case.q.to(DEVICE)
    paged = PagedAttention(pool, q.shape[1], (0,), len(case.table), 4096, scale=0.0625)
    plan, twin, half = paged.plan(case.layout(DEVICE.type)), torch.empty_like(q), ReferenceAttention(pool, q.shape[1])
    expected = half.attend(half.plan(case.layout(DEVICE.type)), LAYER, q / 2, 0).float()
    close(paged.attend(plan, LAYER, q, 0), expected)
    for tiles in plan.work[0]:
        arguments = pool.keys, pool.values, plan.page_table, tiles, paged._partial_results, LAYER, 0
        kernel.attention.twin(q, twin, *arguments, 0.0625)
    close(twin, expected)


def test_a_decode_step_is_planned_from_the_device() -> None:
    """One list serves all layers with the same window, each once. Lanes may occur twice, as padding does."""
    case = make([1] * 4, [700, 1, 260, 33])
    paged = PagedAttention(case.pool(DEVICE.type, garbage=torch.nan), KV_HEADS * 4, (0, 48, 0), 8, 4096)
    pick = [0, 1, 2, 3, 1, 1]
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)[pick].to(DEVICE)
    plan = paged.plan_decode(case.lanes[pick].to(DEVICE), kv_lens, case.table.to(DEVICE))
    for window in (48, 0):
        out = paged.attend(plan, LAYER, case.q[pick].to(DEVICE), window)
        close(out, case.expected(window)[0][pick])


def test_programs_take_tasks_until_there_are_none() -> None:
    """With fewer programs than tasks, partial results arrive in any order, and the bits stay the same."""
    case = make([1] * 3 + [20], [300, 200, 5, 340], 32)
    paged, q = paged_of(case, 0), case.q.to(DEVICE)
    paged.chip = H200  # for which decodes are split
    for phase, config in paged.configs.items():
        paged.configs[phase] = replace(config, programs=1, combine_splits=1)
    plan = paged.plan(case.layout(DEVICE.type))
    whole = paged.attend(plan, LAYER, q, 0)
    close(whole, case.expected(0)[0])
    for tiles in plan.work[0]:
        tasks, asked = int(tiles.list[0]) * KV_HEADS, int(tiles.list[2])
        assert tasks > Chip.of(DEVICE).processors
        assert asked == tasks, "each program takes its first task by number, and asks once in vain"
    rng = np.random.default_rng(0)
    for _ in range(2):
        plan = paged.plan(case.layout(DEVICE.type))
        for tiles in plan.work[0]:
            found = tiles_of(tiles.list)
            assert (int(found[:, SPLIT].max()) // SPLITS > 1) == (tiles is plan.work[0][0])
            found.copy_(found[torch.from_numpy(rng.permutation(len(found)))])
        assert torch.equal(paged.attend(plan, LAYER, q, 0), whole)


@pytest.mark.parametrize(("window", "dtype", "fp8"), [(0, HALF, False), (300, torch.float32, False), (0, HALF, True)])
def test_a_query_has_one_answer(window: int, dtype: torch.dtype, fp8: bool) -> None:
    """The bits are the same in a prefill, a chunk or a decode, with all keys in one work tile or in one per block."""
    case = make([12], [588], dtype=dtype, fp8=fp8)
    kept = attend(paged_of(case, window), case, window)
    for slots in (0, 1000):  # for partial results; 0: no keys are split
        paged = paged_of(case, window)
        paged.partials = slots
        for first, last in ((0, 1), (3, 10), (11, 12)):
            length = 576 + last
            lens = {"query_lens": np.array([last - first]), "kv_lens": np.array([length])}
            layout = replace(case.layout(DEVICE.type), **lens, decodes=int(last - first == 1))
            plan = paged.plan(layout)
            splits = tiles_of(plan.work[window][0].list)[:, SPLIT] // SPLITS
            assert (splits.max() > 1) == (slots > 0 and layout.decodes > 0)
            chunk = paged.attend(plan, LAYER, case.q[first:last].to(DEVICE), window)
            assert torch.equal(chunk, kept[first:last])
    close(kept, case.expected(window)[0])


LAUNCHES = """
from fastgen.kernels import attention
from fastgen.kernels.triton import attention as attention_kernels
from fastgen.kernels import work_tiles

cpu, tiles = torch.device("cpu"), zeros(work_tiles.HEADER + 4 * work_tiles.FIELDS, dtype=torch.int32)
for dims in (128, 64):
    q, (keys, values) = zeros(4, 32, dims), zeros(2, 1, 4, 8, 64, dims)
    partial = attention.PartialResults.empty(4, 32, 8, dims, cpu)
    for phase in (attention.DECODE, attention.PREFILL, attention.GROUP):
        listed = attention.TileList(tiles, 4, attention_kernels.configure(phase, 4, dims, torch.bfloat16, chip))
        attention.attention.launch(q, q, keys, values, zeros(4, 2, dtype=torch.int32), listed, partial, 0, 0)
"""


@pytest.mark.long
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_phases_are_compiled_alike() -> None:
    """All phases use Hopper's instruction, with 16 inputs at a time."""
    made = compiled(LAUNCHES)
    assert len(made) == 6
    for each in made:
        layouts = re.findall(r"^#mma\d* = .*warpsPerCTA = \[(.*?)\]", each["ttgir"], re.MULTILINE)
        assert layouts
        assert set(layouts) <= {"4, 1", "8, 1"}  # a row is in one warp
        assert not re.search(r"\bmma\.sync", each["ptx"])
        products = set(re.findall(r"mma_async\S*m64n\d+(k\S*)", each["ptx"]))
        assert products == {"k16.f32.bf16.bf16"}


@pytest.mark.parametrize("chip", CHIPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_configurations_fit_the_chip_and_have_the_same_bits(chip: Chip, dtype: torch.dtype) -> None:
    """On Hopper, 64 rows and four warps decide the instruction; in float32, rows and warps decide the order of sums."""
    for head_size, group in itertools.product((32, 64, 80, 96, 128, 256), (1, 4, 5, 7, 8, 12, 16)):
        phases = kernel.DECODE, kernel.PREFILL, kernel.GROUP
        configs = [attention_kernels.configure(phase, group, head_size, dtype, chip) for phase in phases]
        for config in configs:
            size = attention_kernels.shared_bytes(
                config.rows, config.keys, config.stages, power_of_two(head_size), dtype, chip
            )
            assert size * config.programs <= chip.shared_memory + 1024
            assert attention_kernels.REGISTERS * 32 * config.warps * config.programs <= 65536
            assert config.rows >= max(group, 16)
            assert work_tiles.ALIGN % config.keys == 0
            small = head_size == 256 and chip.shared_memory < 101_376
            assert small or config.keys == (32 if dtype == torch.float32 else 64)
        assert len({config.keys for config in configs}) == 1
        hopper = chip.capability[0] == 9 and dtype != torch.float32 and 64 <= head_size <= 128
        assert not hopper or min(config.rows for config in configs) >= 64
        assert hopper or len({config.warps for config in configs}) == 1
        assert dtype != torch.float32 or len({config.rows for config in configs}) == 1


def test_a_chip_that_is_too_small_is_named() -> None:
    with pytest.raises(ValueError, match="20000 bytes of shared memory; use dtype='bfloat16', another GPU"):
        attention_kernels.configure(kernel.PREFILL, 4, 256, torch.float32, Chip((7, 0), 10, 20_000))
