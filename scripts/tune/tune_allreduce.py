"""Times ways for ranks to add up what they have, on the GPUs of this host, and how products may hide it.

    torchrun --nproc-per-node 4 scripts/tune/tune_allreduce.py
    torchrun --nproc-per-node 2 scripts/tune/tune_allreduce.py --smoke    # tiny, on the CPU, to see that it runs

All-reduces of [T, hidden] of Llama 70B, in CUDA graphs: NCCL's, those of PyTorch's symmetric memory (one-shot and
two-shot), and fastgen.kernels.allreduce as its `config` chooses and otherwise. Then a layer's four products of many
rows, alone and with both all-reduces: one after the other; with the rows in two halves, and the all-reduces of one,
by NCCL or by copy engines, beside the products of the other. The sums are compared with those in float32 first.
Writes scripts/results/allreduce-GPU.json, in microseconds as rank 0 measures them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastgen.kernels import allreduce
from fastgen.kernels.allreduce import AllReduceConfig, Inbox, InboxLayout, words_of
from fastgen.kernels.launch import Chip
from fastgen.model.config import parse_config
from fastgen.parallel.group import FUSED_TOKENS

sys.path.append(str(Path(__file__).parent.parent / "bench"))

from bench_engine import RESULTS, slug
from bench_limits import product_shapes, settings

ONE_SHOT_TOKENS = 512  # beyond, one-shot is far behind

CONFIGS = [AllReduceConfig(1, block, warps) for block, warps in ((256, 2), (256, 4), (512, 4))]
CONFIGS += [
    AllReduceConfig(2, block, warps) for block, warps in ((256, 2), (256, 4), (512, 4), (1024, 8), (512, 8), (128, 4))
]

Start = Callable[[Tensor, int], Callable[[], Any]]
"""Begins to add up a part, of the number given; returns what makes the current stream wait for the sum."""


@dataclass(frozen=True)
class Sizes:
    """tokens: of the all-reduces; rows and layers: of the products; seconds: that one way of these is run for."""

    tokens: Sequence[int] = tuple(1 << power for power in range(14))
    rows: int = 8192
    layers: int = 3
    seconds: float = 1.2


SMALL = Sizes(tokens=(1, 4, 16), rows=32, layers=2, seconds=0.01)


@dataclass(frozen=True)
class Ranks:
    """This rank, and all of them; on the CPU where it is to run small."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, smoke: bool) -> Ranks:
        device = torch.device("cpu") if smoke else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if smoke:
            dist.init_process_group("gloo")
        else:
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device).mul_(scale).to(self.dtype)

    def shared(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Zeros [count] that all ranks can write, and the handle that tells where those of the others are."""
        import torch.distributed._symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(count, dtype=dtype, device=self.device).zero_()
        handle = symmetric_memory.rendezvous(memory, world())
        self.meet()
        return memory, handle

    def meet(self) -> None:
        """Wait for this device, and for all ranks."""
        self.wait()
        dist.barrier()
        self.wait()  # NCCL's barrier is work for the device

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def graphed(self, work: Callable[[], Any], calls: int) -> float:
        """Microseconds of a call, of so many in a CUDA graph: the median of 5. On the CPU without a graph."""
        for _ in range(3):
            work()
        if not self.on_gpu:
            return self.sustained(work, 0.001)
        self.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread may go on
            for _ in range(calls):
                work()
        found = []
        for _ in range(5):
            self.meet()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # behind it all ranks are in step
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / calls * 1e3)
        return round(statistics.median(found), 2)

    def sustained(self, work: Callable[[], Any], seconds: float) -> float:
        """Microseconds of a call, of as many as take about so long: the same number on all ranks."""
        work()
        once = self._seconds_of(work, 1)
        calls = torch.tensor([max(round(seconds / once), 3)], device=self.device)
        dist.broadcast(calls, 0)
        return round(self._seconds_of(work, int(calls)) / int(calls) * 1e6, 1)

    def _seconds_of(self, work: Callable[[], Any], calls: int) -> float:
        self.meet()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return time.perf_counter() - start


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def confirm(name: str, found: Tensor, exact: Tensor) -> None:
    """Raise RuntimeError where a sum is not as near to float32's as its dtype lets it be."""
    error = float((found.float() - exact).norm() / exact.norm())
    if not error < 0.01:
        raise RuntimeError(f"{name}: the error of a sum of {list(exact.shape)} is {error:.3g} of it")


def exact_sum(x: Tensor) -> Tensor:
    """Of all ranks' x, in float32."""
    total = x.to(torch.float32, copy=True)
    dist.all_reduce(total)
    return total


# All-reduces alone


class AllReduces:
    """Ways to add up [tokens, hidden]."""

    def __init__(self, ranks: Ranks, hidden: int, most_tokens: int) -> None:
        self.ranks, self.hidden = ranks, hidden
        if ranks.on_gpu:
            words = min(FUSED_TOKENS, most_tokens) * hidden // 2
            self._memory = ranks.shared(Inbox.bytes_for(words, ranks.size) // 4, torch.int32)
            self._inbox = Inbox.make(list(self._memory[1].buffer_ptrs), words, ranks.rank, ranks.device)

    def measure(self, tokens: int) -> dict[str, Any]:
        """Microseconds by way; of fastgen's kernels with each AllReduceConfig, what `config` chooses first."""
        ranks = self.ranks
        calls = 20 if tokens < 1024 else 5
        y = ranks.random(tokens, self.hidden)
        exact = exact_sum(y)
        found: dict[str, Any] = {"tokens": tokens}
        for name, x, work in self._library_ways(tokens):
            x.copy_(y)
            confirm(f"{name}, {tokens} tokens", work(), exact)
            found[name] = ranks.graphed(work, calls)
        if ranks.on_gpu and words_of(y) <= self._inbox.words:
            found["fastgen"] = [self._fused(chosen, y, exact, calls) for chosen in self._configs(words_of(y))]
        return found

    def _library_ways(self, tokens: int) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        """A name, a tensor to be filled, and what returns the sum over ranks of what it then holds."""
        ranks = self.ranks
        x = ranks.random(tokens, self.hidden)

        def reduce() -> Tensor:
            dist.all_reduce(x)
            return x

        yield "nccl" if ranks.on_gpu else "gloo", x, reduce
        if ranks.on_gpu:
            flat, _ = ranks.shared(tokens * self.hidden, ranks.dtype)
            group = world().group_name
            shape = (tokens, self.hidden)
            if tokens <= ONE_SHOT_TOKENS:
                one_shot = torch.ops.symm_mem.one_shot_all_reduce
                yield "one_shot", flat.view(shape), lambda: one_shot(flat, "sum", group).view(shape)
            two_shot = torch.ops.symm_mem.two_shot_all_reduce_
            yield "two_shot", flat.view(shape), lambda: two_shot(flat, "sum", group).view(shape)

    def _configs(self, words: int) -> list[AllReduceConfig]:
        """What `config` chooses, and of the others those that can do so many words."""
        chip, inbox = Chip.of(self.ranks.device), self._inbox
        flagged, room = InboxLayout.of(inbox.words, inbox.size).flagged, allreduce.warps_at_a_time(inbox.size, chip)

        def can(chosen: AllReduceConfig) -> bool:
            if chosen.trips == 1:
                programs = -(-words // chosen.block)
                return words <= flagged and programs <= allreduce.PROGRAMS and programs * chosen.warps <= room
            least = 8 * self.hidden // 2  # of words for which two trips are of interest
            return least <= words <= inbox.size * chosen.block * allreduce.BLOCKS

        own = allreduce.config(words, inbox, chip)
        return [own, *(other for other in CONFIGS if other != own and can(other))]

    def _fused(self, chosen: AllReduceConfig, y: Tensor, exact: Tensor, calls: int) -> dict[str, Any]:
        x = torch.zeros_like(y)
        allreduce.launch_as(chosen, x, y, self._inbox)
        confirm(f"fastgen, {chosen}", x, exact)
        taken = self.ranks.graphed(lambda: allreduce.launch_as(chosen, x, y, self._inbox), calls)
        if int(self._inbox.expired):
            raise RuntimeError(f"{chosen} has given up waiting for the other ranks")
        return {**asdict(chosen), "us": taken}


# Products and all-reduces


class Layers:
    """Products of a few layers, of which each rank has a share; their inputs are random, and the same in each layer."""

    def __init__(self, ranks: Ranks, shapes: Sequence[tuple[int, int]], sizes: Sizes) -> None:
        """shapes: (out, in) of qkv, o, gate and up, and down, of all ranks together."""
        size, rows = ranks.size, sizes.rows
        split = [
            (out, inner // size) if number % 2 else (out // size, inner) for number, (out, inner) in enumerate(shapes)
        ]
        self.weights = [[ranks.random(*shape, scale=0.02) for shape in split] for _ in range(sizes.layers)]
        self.inputs = [ranks.random(rows, inner) for _, inner in split]
        self.outputs = [torch.empty(rows, out, dtype=ranks.dtype, device=ranks.device) for out, _ in split]
        self.whole = [slice(0, rows)]
        self.halves = [slice(0, rows // 2), slice(rows // 2, rows)]

    def run(self, parts: Sequence[slice], start: Start) -> None:
        """All layers; a part's products begin when what was started behind its last ones is done."""
        waits: dict[int, Callable[[], Any]] = {}
        for weights in self.weights:
            for second in (1, 3):
                for number, rows in enumerate(parts):
                    if number in waits:
                        waits[number]()
                    for product in (second - 1, second):
                        x, y = self.inputs[product][rows], self.outputs[product][rows]
                        torch.mm(x, weights[product].t(), out=y)
                    waits[number] = start(y, number)
        for wait in waits.values():
            wait()

    def exact(self) -> Tensor:
        """The sum behind the last product, float32 [rows, hidden]."""
        return exact_sum(self.inputs[3].float() @ self.weights[-1][3].float().t())


def nothing(y: Tensor, number: int) -> Callable[[], Any]:
    return lambda: None


def library(y: Tensor, number: int) -> Callable[[], Any]:
    """NCCL, or gloo on the CPU."""
    work = dist.all_reduce(y, async_op=True)
    assert work is not None
    return work.wait


class CopyEngines:
    """Sums of halves by copies between GPUs, which leave the processors to others but for adding up.

    A rank sends each rank a slice, adds up the slices that come to it, and sends the sum to all. sums: [2, count], of
    either half.
    """

    def __init__(self, ranks: Ranks, count: int) -> None:
        """count: the elements of a half."""
        size, self.rank = ranks.size, ranks.rank
        shape, self.shape = (2, size, count // size), (size, count // size)
        parts, self.parts_handle = ranks.shared(2 * count, ranks.dtype)
        sums, self.sums_handle = ranks.shared(2 * count, ranks.dtype)
        self.parts = [self.parts_handle.get_buffer(rank, shape, ranks.dtype) for rank in range(size)]
        self.all_sums = [self.sums_handle.get_buffer(rank, shape, ranks.dtype) for rank in range(size)]
        self.sums = sums.view(2, count)
        self._memory = parts, sums
        self.others = [(ranks.rank + ahead) % size for ahead in range(1, size)]
        self.stream = torch.cuda.Stream(priority=-1)

    def start(self, y: Tensor, half: int) -> Callable[[], Any]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._add_up(y.view(self.shape), half)
            done = torch.cuda.Event()
            done.record()
        return partial(torch.cuda.current_stream().wait_event, done)

    def _add_up(self, slices: Tensor, half: int) -> None:
        for other in [*self.others, self.rank]:
            self.parts[other][half][self.rank].copy_(slices[other], non_blocking=True)
        self.parts_handle.barrier(channel=half)
        own = self.all_sums[self.rank][half][self.rank]
        torch.sum(self.parts[self.rank][half], 0, out=own)
        for other in self.others:
            self.all_sums[other][half][self.rank].copy_(own, non_blocking=True)
        self.sums_handle.barrier(channel=half)


def measure_layer(ranks: Ranks, shapes: Sequence[tuple[int, int]], sizes: Sizes) -> dict[str, float]:
    """Microseconds of a layer, by what is done behind its products."""
    layers = Layers(ranks, shapes, sizes)
    name, total = "nccl" if ranks.on_gpu else "gloo", layers.outputs[3]
    ways: dict[str, tuple[Sequence[slice], Start, Tensor | None]] = {
        "products": (layers.whole, nothing, None),
        "products of halves": (layers.halves, nothing, None),
        f"{name} in turn": (layers.whole, library, total),
        f"{name} beside halves": (layers.halves, library, total),
    }
    if ranks.on_gpu:
        copies = CopyEngines(ranks, total.numel() // 2)
        ways["copy engines beside halves"] = (layers.halves, copies.start, copies.sums.view(total.shape))
    exact, found = layers.exact(), {}
    for way, (parts, start, sums) in ways.items():
        work = partial(layers.run, parts, start)
        if sums is not None:
            sums.zero_()
            ranks.meet()
            work()
            confirm(way, sums, exact)
        found[way] = round(ranks.sustained(work, sizes.seconds) / sizes.layers, 1)
        ranks.say(f"{way:28} {found[way]:8.1f} us a layer of {sizes.rows} rows")
    return found


# Both


def line(found: dict[str, Any]) -> str:
    """A row of the table: what `config` chooses, and the best of the others."""
    cells = [f"{found['tokens']:6}"]
    cells += [f"{name} {us:7.2f}" for name, us in found.items() if name not in ("tokens", "fastgen")]
    own, *others = found.get("fastgen", [None])
    if own is not None:
        cells.append(f"fastgen {describe(own)}")
    if others:
        cells.append(f"best other {describe(min(others, key=lambda each: each['us']))}")
    return "  ".join(cells)


def describe(each: dict[str, Any]) -> str:
    return f"{each['us']:7.2f} ({each['trips']}, {each['block']}, {each['warps']})"


def measure(ranks: Ranks, sizes: Sizes) -> dict[str, Any]:
    model = parse_config(settings("llama70", not ranks.on_gpu))
    torch.manual_seed(ranks.rank)
    ranks.say("all-reduces, us: by tokens; a AllReduceConfig is (trips, block, warps)")
    ways, found = AllReduces(ranks, model.hidden_size, sizes.tokens[-1]), []
    for tokens in sizes.tokens:
        found.append(ways.measure(tokens))
        ranks.say(line(found[-1]))
    gpu = f"{ranks.size} x {torch.cuda.get_device_name()}" if ranks.on_gpu else "cpu"
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "hidden": model.hidden_size,
        "all_reduce_us": found,
        "rows": sizes.rows,
        "layer_us": measure_layer(ranks, product_shapes(model), sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: scripts/results)")
    parser.add_argument("--smoke", action="store_true", help="tiny, by gloo on the CPU; writes only with --out")
    arguments = parser.parse_args()
    if os.environ.get("WORLD_SIZE") not in ("2", "4", "8") or "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N, where N is 2, 4 or 8")
    if not arguments.smoke and torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        parser.error(f"there are {torch.cuda.device_count()} GPUs here for {os.environ['WORLD_SIZE']} ranks")
    ranks = Ranks.join(arguments.smoke)
    report = measure(ranks, SMALL if arguments.smoke else Sizes())
    if ranks.rank == 0 and (arguments.out or not arguments.smoke):
        path = (arguments.out or RESULTS) / f"allreduce-{slug(report['gpu'])}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    ranks.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
