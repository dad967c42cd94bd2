"""Times all-reduces on the GPUs of this host.

    torchrun --nproc-per-node 4 scripts/tune/tune_allreduce.py
    torchrun --nproc-per-node 2 scripts/tune/tune_allreduce.py --smoke    # tiny, on the CPU, to see that it runs

The all-reduces are of [T, hidden] of Llama 70B, in CUDA graphs: NCCL's, those of PyTorch's symmetric memory (one-shot
and two-shot), and fastgen.kernels.allreduce as its `config` chooses and otherwise. The sums are compared with those in
float32 first. Writes scripts/results/allreduce-GPU.json, in microseconds as rank 0 measures them.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import allreduce
from fastgen.kernels.allreduce import AllReduceConfig, Inbox, InboxLayout, words_of
from fastgen.model.config import parse_config
from fastgen.parallel.group import FUSED_TOKENS

sys.path.append(str(Path(__file__).parent.parent / "bench"))

from bench_engine import RESULTS, slug
from bench_limits import settings

ONE_SHOT_TOKENS = 512  # beyond, one-shot is far behind

CONFIGS = [AllReduceConfig(1, block, warps) for block, warps in ((256, 2), (256, 4), (512, 4))]
CONFIGS += [
    AllReduceConfig(2, block, warps) for block, warps in ((256, 2), (256, 4), (512, 4), (1024, 8), (512, 8), (128, 4))
]

TOKENS = [1 << power for power in range(14)]
FEW_TOKENS = [1, 4, 16]  # of --smoke


@dataclass(frozen=True)
class Ranks:
    """This rank and its group; on the CPU for --smoke."""

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
        """Return zeros [count] that all ranks can write, and the handle with the addresses of the other ranks'
        memory."""
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
        """Return the microseconds of a call, of so many in a CUDA graph: the median of 5. On the CPU without a
        graph."""
        for _ in range(3):
            work()
        if not self.on_gpu:
            return round(self._seconds_of(work, 3) / 3 * 1e6, 1)
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
    """Return the sum of all ranks' x, in float32."""
    total = x.to(torch.float32, copy=True)
    dist.all_reduce(total)
    return total


class AllReduces:
    """All-reduces of [tokens, hidden] to compare."""

    def __init__(self, ranks: Ranks, hidden: int, most_tokens: int) -> None:
        self.ranks, self.hidden = ranks, hidden
        if ranks.on_gpu:
            words = min(FUSED_TOKENS, most_tokens) * hidden // 2
            self._memory = ranks.shared(Inbox.bytes_for(words, ranks.size) // 4, torch.int32)
            self._inbox = Inbox.make(list(self._memory[1].buffer_ptrs), words, ranks.rank, ranks.device)

    def measure(self, tokens: int) -> dict[str, Any]:
        """Return the microseconds of each way; of fastgen's kernels for each AllReduceConfig, the choice of `config`
        first."""
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
        """Yield a name, a tensor to be filled, and a function that returns the sum over ranks of its contents."""
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
        """Return the choice of `config`, and the other configurations that can sum so many words."""
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


def line(found: dict[str, Any]) -> str:
    """Return a row of the table: the choice of `config`, and the best of the others."""
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


def measure(ranks: Ranks, token_counts: Sequence[int]) -> dict[str, Any]:
    model = parse_config(settings("llama70", not ranks.on_gpu))
    torch.manual_seed(ranks.rank)
    ranks.say("all-reduces, us: by tokens; an AllReduceConfig is (trips, block, warps)")
    ways, found = AllReduces(ranks, model.hidden_size, token_counts[-1]), []
    for tokens in token_counts:
        found.append(ways.measure(tokens))
        ranks.say(line(found[-1]))
    gpu = f"{ranks.size} x {torch.cuda.get_device_name()}" if ranks.on_gpu else "cpu"
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "hidden": model.hidden_size,
        "all_reduce_us": found,
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
    report = measure(ranks, FEW_TOKENS if arguments.smoke else TOKENS)
    if ranks.rank == 0 and (arguments.out or not arguments.smoke):
        path = (arguments.out or RESULTS) / f"allreduce-{slug(report['gpu'])}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    ranks.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
