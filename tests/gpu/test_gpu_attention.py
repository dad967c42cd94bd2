"""All implementations of attention on a GPU, compared with the reference in float32, within rounding to bfloat16."""

from __future__ import annotations

import pytest
import torch
from ragged import KV_HEADS, LAYER, Ragged, assert_within
from torch import Tensor

from fastgen.engine.startup import make_attention
from fastgen.model.attention.interface import Attention
from fastgen.model.kv_pool import KVPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

NAMES = ["paged", "flash"]
WINDOWS = (0, 100)
SHAPES = [(64, 1, 128), (96, 5, 16), (128, 4, 64), (128, 8, 16)]  # head size, query heads per KV head, page size


def make(name: str, pool: KVPool, num_heads: int, max_seqs: int) -> Attention:
    """Make an attention; skip the test if flash does not run here."""
    try:
        return make_attention(name, pool, num_heads, WINDOWS, max_seqs, 2048)
    except ValueError as error:
        pytest.skip(str(error))


def attention_of(name: str, case: Ragged) -> Attention:
    pool = case.pool("cuda")
    attention = make(name, pool, case.q.shape[1], len(case.query_lens))
    if not attention.needs_clean_pages:
        pool.values.copy_(case.pool(garbage=torch.nan).values)
    return attention


def queries(case: Ragged) -> Tensor:
    """Return queries on the GPU, as a part of a tensor with keys and values, as in a model."""
    length, heads, head_size = case.q.shape
    together = torch.full((length, heads + 2 * KV_HEADS, head_size), torch.nan, dtype=case.dtype, device="cuda")
    together[:, :heads] = case.q.cuda()
    return together[:, :heads]


def spoil_shared_memory() -> None:
    """Leave NaN in shared memory, where the next kernel finds it unless it loads something else."""
    x = torch.full((4096, 4096), torch.nan, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, x)


def check(attention: Attention, case: Ragged, window: int) -> None:
    with torch.inference_mode():
        plan, q = attention.plan(case.layout("cuda")), queries(case)
        spoil_shared_memory()
        assert_within(attention.attend(plan, LAYER, q, window), case.expected(window))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("head_size", "group", "page_size"), SHAPES)
def test_they_agree(head_size: int, group: int, page_size: int, name: str) -> None:
    for seed, window in enumerate(WINDOWS):
        case = Ragged(head_size, group, page_size, torch.bfloat16, seed)
        check(attention_of(name, case), case, window)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "query_lens", [None, [1], [1] * 20, [700], [5, 1], [1] * 300 + [2] * 300], ids=lambda lens: str(len(lens or ()))
)
def test_they_agree_on_any_number_of_sequences(query_lens: list[int] | None, name: str) -> None:
    dtype = torch.float16 if query_lens is None else torch.bfloat16
    case = Ragged(128, 4, 64, dtype, query_lens=query_lens)
    check(attention_of(name, case), case, 0)


@pytest.mark.parametrize("name", ["paged", "flash"])
def test_a_captured_decode_follows_the_device(name: str) -> None:
    """A graph that contains the plan uses the lanes, lengths and pages at the time of its replay."""
    case = Ragged(128, 4, 128, torch.bfloat16, query_lens=[1] * 37)
    attention = attention_of(name, case)
    assert attention.capturable
    q, lanes, table = queries(case), case.lanes.cuda(), case.table.cuda()
    lens = torch.tensor(case.kv_lens, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()  # what follows runs on another stream

    def step() -> list[Tensor]:
        # A plan serves each layer once, and the next one may take its memory.
        return [
            attention.attend(attention.plan_decode(lanes, lens, table), LAYER, q, window).clone() for window in WINDOWS
        ]

    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for out, window in zip(step(), WINDOWS, strict=True):
            assert_within(out, case.expected(window))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        shorter = [-(-length // 2) for length in case.kv_lens]
        lens.copy_(torch.tensor(shorter))
        order = torch.randperm(len(table))
        table.copy_(case.table[order])
        lanes.copy_(order.argsort()[case.lanes])
        spoil_shared_memory()
        graph.replay()
        torch.cuda.synchronize()
        for out, again, window in zip(captured, step(), WINDOWS, strict=True):
            assert torch.equal(out, again)
            assert_within(out, case.expected(window, shorter))


def test_flash_compiles_nothing_after_the_start() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface")
    size, group = 96, 2  # a shape that no other test has
    make("flash", Ragged(size, group, 128, torch.bfloat16).pool("cuda"), group * KV_HEADS, 300)
    functions = (interface._flash_attn_fwd, interface._compute_tile_cumsum, interface._compute_blocks_to_batch)
    before = [len(function.compile_cache.cache) for function in functions]
    assert before[0]
    for query_lens in (None, [3], [3] * 40, [500], [2] * 299):
        case = Ragged(size, group, 128, torch.bfloat16, query_lens=query_lens)
        attention = make("flash", case.pool("cuda"), group * KV_HEADS, 300)
        for window in WINDOWS:
            check(attention, case, window)
    assert [len(function.compile_cache.cache) for function in functions] == before
