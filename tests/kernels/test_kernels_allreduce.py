"""The all-reduce kernels in Triton's interpreter, with one process per rank and shared memory for the inboxes."""

from __future__ import annotations

import multiprocessing
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from compiling import compiled
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import allreduce
from fastgen.kernels.allreduce import AllReduceConfig, Inbox, InboxLayout, add_in_order, config, launch_as
from fastgen.kernels.launch import INTERPRETED

WORDS = 360
GUARD = 64
PATIENT, HASTY = 20_000, 20
KINDS = [
    AllReduceConfig(1, 128, 1),
    AllReduceConfig(1, 512, 4),
    AllReduceConfig(2, 32, 50),
    AllReduceConfig(2, 64, 1),
    AllReduceConfig(2, 256, 4),
]
"""With 50 warps the chip has room for 2 programs, each of which takes several blocks."""


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let ranks sleep at each poll for so many seconds, so that ranks that wait leave the cores to others.

    There are also fewer cells for step numbers.
    """
    if not INTERPRETED:
        pytest.skip("ranks here are processes that share a CPU's memory")
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, rmw, seconds = Builder.create_masked_load, Builder.create_atomic_rmw, [0.0005]

    def slow_load(self: object, ptr: object, mask: object, other: object, *options: object) -> object:
        if options[-1]:  # is_volatile
            time.sleep(seconds[0])
        return load(self, ptr, mask, other, *options)

    def slow_rmw(self: object, *arguments: object) -> object:
        found = rmw(self, *arguments)
        time.sleep(seconds[0])
        return found

    monkeypatch.setattr(Builder, "create_masked_load", slow_load)
    monkeypatch.setattr(Builder, "create_atomic_rmw", slow_rmw)
    monkeypatch.setattr(allreduce, "PROGRAMS", 40)
    return seconds


@dataclass(frozen=True)
class Call:
    """A call, and for how many seconds each rank sleeps before it."""

    x: Tensor
    parts: list[Tensor]
    chosen: AllReduceConfig
    sleeps: list[float]

    @property
    def expected(self) -> Tensor:
        x = self.x.clone()
        add_in_order(x, self.parts)
        return x


def random_call(rng: random.Random, size: int, chosen: AllReduceConfig | None = None, slow: bool = True) -> Call:
    dtype = rng.choice([torch.float32, torch.float16])
    tokens = rng.randint(1, 6)
    hidden = 2 * rng.randint(1, WORDS // tokens // 2)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    x, *parts = torch.randn(size + 1, tokens, hidden, generator=generator).to(dtype)
    sleeps = [rng.choice([0.0, 0.0, 0.0, 0.02]) * slow for _ in range(size)]
    return Call(x, parts, chosen or rng.choice(KINDS), sleeps)


@dataclass(frozen=True)
class Ranks:
    """The memory of all ranks, which forked processes share: inboxes, steps and expired, with one row per rank."""

    memory: Tensor
    steps: Tensor
    expired: Tensor
    polls: int

    @staticmethod
    def make(size: int, polls: int = PATIENT, step: int = 0) -> Ranks:
        count = Inbox.bytes_for(WORDS, size) // 4
        memory = torch.zeros(size, -(-(count + GUARD) // 4) * 4, dtype=torch.int32)
        memory[:, count:] = -1
        steps = torch.full((size, allreduce.PROGRAMS), step, dtype=torch.int32)
        expired = torch.zeros(size, 1, dtype=torch.int32)
        return Ranks(memory.share_memory_(), steps.share_memory_(), expired.share_memory_(), polls)

    def inbox(self, rank: int) -> Inbox:
        made = Inbox.make([row.data_ptr() for row in self.memory], WORDS, rank, torch.device("cpu"), self.polls)
        return replace(made, steps=self.steps[rank], expired=self.expired[rank])

    def run(self, work: Callable[[int], None], *ranks: int) -> None:
        """Run work(rank) for these ranks at the same time, in one process each."""
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=work, args=(rank,)) for rank in ranks]
        for process in processes:
            process.start()
        end = time.monotonic() + 60
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        assert [process.exitcode for process in processes] == [0] * len(ranks)

    def calls(self, calls: list[Call], *ranks: int, before: Callable[[int], None] = lambda rank: None) -> list[Tensor]:
        """Make calls in order, on these ranks, and return the result [N, T, H] of each call, zeros for other ranks.

        before: called with the rank, in its process.
        """
        results = [torch.zeros(len(self.memory), *call.x.shape, dtype=call.x.dtype).share_memory_() for call in calls]

        def work(rank: int) -> None:
            before(rank)
            inbox = self.inbox(rank)
            for call, result in zip(calls, results, strict=True):
                time.sleep(call.sleeps[rank])
                x = call.x.clone()
                launch_as(call.chosen, x, call.parts[rank], inbox)
                result[rank] = x

        self.run(work, *ranks)
        return results


@pytest.mark.usefixtures("pause")
@pytest.mark.parametrize("size", [2, 4])
def test_calls_of_all_kinds_and_sizes_in_a_row(size: int) -> None:
    rng = random.Random(size)
    count = 36 // size
    calls = [random_call(rng, size) for _ in range(count)]
    first = 2**31 - count // 2  # the step number wraps around on the way
    ranks = Ranks.make(size, step=first)
    for call, results in zip(calls, ranks.calls(calls, *range(size)), strict=True):
        for result in results:
            assert torch.equal(result, call.expected), (call.chosen, call.x.shape, call.x.dtype)
    assert ranks.expired.tolist() == [[0]] * size
    assert (ranks.steps == first + count - 2**32).all(), "a cell that some later call reads was forgotten"
    assert (ranks.memory[:, Inbox.bytes_for(WORDS, size) // 4 :] == -1).all(), "nothing is written behind the end"


@pytest.mark.parametrize("chosen", [KINDS[1], KINDS[4]])
def test_a_rank_may_read_late(chosen: AllReduceConfig, pause: list[float]) -> None:
    rng = random.Random(1)
    calls = [random_call(rng, 3, chosen, slow=False) for _ in range(4)]
    ranks = Ranks.make(3)
    results = ranks.calls(calls, 0, 1, 2, before=lambda rank: pause.__setitem__(0, [0.08, 0.0005, 0.02][rank]))
    assert all(torch.equal(result, call.expected) for call, rows in zip(calls, results, strict=True) for result in rows)
    assert not ranks.expired.any()


@pytest.mark.usefixtures("pause")
@pytest.mark.parametrize(("chosen", "count"), [(KINDS[0], 2), (KINDS[2], 1)])
def test_a_missing_rank_is_not_waited_for_for_ever(chosen: AllReduceConfig, count: int) -> None:
    rng = random.Random(0)
    calls = [random_call(rng, 3, chosen) for _ in range(count)]
    ranks = Ranks.make(3, HASTY)
    ranks.calls(calls, 0, 2)
    assert ranks.expired.tolist() == [[1], [0], [1]]
    assert ranks.steps[0].tolist() == [count] * allreduce.PROGRAMS

    results = ranks.calls(calls, 1)
    assert ranks.expired[1] == 1, "a rank that comes late does not go on with what the others have given up"
    assert chosen.trips == 2 or torch.equal(results[0][1], calls[0].expected), "what they had sent was right"


def test_the_call_that_waits_in_vain_is_the_only_one_that_waits(
    monkeypatch: pytest.MonkeyPatch, pause: list[float]
) -> None:
    ranks = Ranks.make(2, HASTY)
    inbox = ranks.inbox(0)
    looks: list[float] = []
    monkeypatch.setattr(time, "sleep", looks.append)
    x = torch.zeros(1, 8)
    counts = []
    for chosen in (KINDS[0], KINDS[3], KINDS[0]):
        launch_as(chosen, x, x.clone(), inbox)
        counts.append(len(looks))
        looks.clear()
    assert counts == [1 + 2 * HASTY, 6, 1], "each look but the first is at the limit too; two trips have two flags"


@pytest.mark.parametrize("processors", [4, 78, 132])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_any_number_of_words_is_cut_so_that_it_fits(size: int, processors: int) -> None:
    triton = pytest.importorskip("triton")
    assert triton is not None
    most = 4096 * 8192 // 2
    inbox = Inbox.make([0] * size, most, 0, torch.device("cpu"))
    chip, layout = Chip((9, 0), processors, 0), InboxLayout.of(most, size)
    trips = set()
    for words in [1, 31, 64, *(tokens * 4096 for tokens in (*range(1, 300, 3), 1000, 2048, 4095)), most]:
        chosen = config(words, inbox, chip)
        trips.add(chosen.trips)
        if chosen.trips == 1:
            programs = -(-words // chosen.block)
            assert words <= layout.flagged
            assert programs <= allreduce.PROGRAMS
            assert programs * chosen.warps <= allreduce.warps_at_a_time(size, chip)
        else:
            assert -(-words // (size * chosen.block)) <= allreduce.BLOCKS
            assert chosen.block <= allreduce.SLICE
    assert trips == {1, 2}


def test_the_twin_adds_in_the_order_of_ranks_and_rounds_once() -> None:
    big, one = torch.full((1, 2), 2.0**24), torch.ones(1, 2)
    x = torch.zeros(1, 2)
    add_in_order(x, [big, one, -big])
    assert x.tolist() == [[0.0, 0.0]]
    add_in_order(x, [big, -big, one])
    assert x.tolist() == [[1.0, 1.0]]
    half = torch.ones(1, 2, dtype=torch.bfloat16)
    add_in_order(half, [torch.full_like(half, 2.0**-8), torch.full_like(half, 2.0**-8)])
    assert half.tolist() == [[1 + 2.0**-7] * 2], "each alone would be rounded away"


LAUNCHES = """
from fastgen.kernels.allreduce import AllReduceConfig, Inbox, launch_as

inbox = Inbox.make([0, 16], 1024, 0, torch.device("cpu"))
for trips in (1, 2):
    launch_as(AllReduceConfig(trips, 256, 4), zeros(2, 512), zeros(2, 512), inbox)
"""


def test_a_step_number_is_written_after_all_warps_have_read_it() -> None:
    """Each warp reads the cell separately. Without a barrier before the write, a warp that was late read the next
    number, and both ranks waited for ever, in one start of twenty."""
    kernels = [made["ptx"] for made in compiled(LAUNCHES)]
    assert len(kernels) == 2
    for ptx in kernels:
        before, store, _ = ptx.partition("st.global.b32")  # the first of 4 bytes; words are stored as vectors
        assert store
        assert "bar.sync" in before


NORMS = """
from fastgen.kernels.fp8 import rms_norm_fp8
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.sum_norm import sum_norm
x, weight = zeros(300, 4096), zeros(4096)
norm = RMSNorm(weight, 1e-5)
rms_norm.launch(x, norm)
rms_norm.launch(x, norm, x)
rms_norm_fp8.launch(x, norm)
rms_norm_fp8.launch(x, norm, x)
sum_norm.launch(x, x, zeros(2, 300, 4096), 1, weight, 1e-5, x)
"""


def test_all_kernels_of_norms_sum_in_one_order() -> None:
    """The order is the layout of the tensor that the reduction takes, and which it may reorder freely. A step whose
    halves are summed over the ranks uses another kernel than one that is not cut."""
    layouts = []
    for kernel in compiled(NORMS):
        (name,) = set(re.findall(r"tt\.reshape .* allow_reorder : tensor<4096xf32, (#\w+)>", kernel["ttgir"]))
        layouts += re.findall(rf"^{name} = (.*)", kernel["ttgir"], re.MULTILINE)
    assert len(layouts) == 5
    assert len(set(layouts)) == 1
