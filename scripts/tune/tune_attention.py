"""Times paged attention on this GPU over lists of configurations, and checks each against a softmax in float32.

    python scripts/tune/tune_attention.py --out tuned.json                 # decodes and prefills of Mistral 7B's shape
    python scripts/tune/tune_attention.py --out x.json --only 256x1100 --shape 40,8,128 --seconds 60

A case runs its layers in a CUDA graph, each over its own random keys and values in shuffled pages, so many of them that
the L2 cache does not hold them. A decode's rate is of the bytes of keys and values; a prefill's of the products that
causality leaves. The best settings go by hand into HOPPER_SHAPES and the like of kernels/triton/attention.py: all
phases must have as many keys, and the same instruction.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tune_products import timed

from fastgen.device.chip import Chip
from fastgen.kernels import attention, work_tiles
from fastgen.kernels.triton import attention as attention_kernels
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.paged import PagedAttention
from fastgen.model.kv_pool import KVPool

DEVICE = torch.device("cuda")
CHECKED = 4  # sequences of a case whose answers are compared
TOLERANCE = 0.01  # of the answer's norm, in bfloat16
CACHE = 400_000_000  # bytes of keys and values that a case's layers have together, at least


@dataclass(frozen=True)
class Case:
    """`count` sequences that have `known` tokens each and take `tokens` more."""

    name: str
    count: int
    tokens: int
    known: int

    @property
    def decodes(self) -> bool:
        return self.tokens == 1

    @property
    def length(self) -> int:
        return self.known + self.tokens


def decode(count: int, length: int) -> Case:
    return Case(f"{count}x{length}", count, 1, length - 1)


CASES = [
    decode(256, 1100), decode(512, 1100), decode(1, 384), decode(8, 384), decode(32, 384), decode(64, 400),
    decode(64, 4000), decode(1024, 300), decode(8, 4000), decode(20, 4000),
    decode(1, 32000), Case("8x1024 fresh", 8, 1024, 0), Case("4x2048 over 8192", 4, 2048, 8192),
    Case("1x16 over 32000", 1, 16, 32000),
]  # fmt: skip
# (rows, warps, stages, peel) of decodes, and of prefills
DECODES = [(64, 4, 2, False), (64, 4, 3, False), (64, 4, 2, True)]
PREFILLS = [(128, 8, 2, True), (128, 8, 3, True), (64, 4, 2, True), (64, 4, 3, True)]


class Setup:
    """A case's pool, tables and queries on the GPU."""

    def __init__(self, case: Case, heads: int, num_kv: int, head_size: int, page_size: int) -> None:
        self.case, self.heads = case, heads
        slots = -(-case.length // page_size)
        layer_bytes = 4 * case.count * case.length * num_kv * head_size
        layers = min(max(-(-CACHE // layer_bytes), 2), 128)
        self.kv_bytes = layer_bytes
        self.pool = KVPool(layers, case.count * slots, num_kv, page_size, head_size, torch.bfloat16, DEVICE)
        self.pool.keys.normal_()
        self.pool.values.normal_()
        torch.manual_seed(0)
        pages = torch.randperm(case.count * slots, device=DEVICE).int()
        self.table = pages.view(case.count, slots)
        self.lanes = torch.arange(case.count, device=DEVICE)
        self.kv_lens = torch.full((case.count,), case.length, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(case.count * case.tokens, heads, head_size, dtype=torch.bfloat16, device=DEVICE)
        whole = np.full(case.count, case.tokens), np.full(case.count, case.length)
        self.layout = StepLayout(*whole, case.count if case.decodes else 0, np.arange(case.count), self.table)
        self.paged = PagedAttention(self.pool, heads, (0,), case.count, case.length)
        self.expected = [self._expected(s) for s in range(0, case.count, -(-case.count // CHECKED))]

    @property
    def layers(self) -> int:
        return len(self.pool.keys)

    @property
    def flops(self) -> int:
        """The FLOPs of a layer's two products, over the keys that causality leaves."""
        case = self.case
        pairs = case.count * (case.tokens * case.known + case.tokens * (case.tokens + 1) // 2)
        return 4 * self.heads * self.q.shape[2] * pairs

    def _expected(self, sequence: int) -> tuple[int, Tensor]:
        """Return the first query row of the sequence, and its answers in layer 0, float32 [tokens, H, D]."""
        case, head_size = self.case, self.q.shape[2]
        pages = self.table[sequence].long()
        k, v = (
            kv[0][pages].transpose(0, 1).flatten(1, 2)[:, : case.length].float()
            for kv in (self.pool.keys, self.pool.values)
        )  # [K, length, D]
        first = sequence * case.tokens
        q = self.q[first : first + case.tokens].float()
        q = q.view(case.tokens, len(k), -1, head_size).permute(1, 2, 0, 3)  # [K, G, T, D]
        ahead = torch.arange(case.known, case.length, device=DEVICE)[:, None] - torch.arange(case.length, device=DEVICE)
        out = torch.empty_like(q)
        for head in range(len(k)):  # one at a time: scores of 2048 x 10240 are large
            scores = q[head] @ k[head].T * head_size**-0.5
            out[head] = scores.masked_fill(ahead < 0, -torch.inf).softmax(-1) @ v[head]
        return first, out.permute(2, 0, 1, 3).flatten(1, 2)

    def error(self, out: Tensor) -> float:
        """Return the largest distance to the expected answer of a sequence, relative to its norm."""
        found = [(out[first : first + len(want)].float() - want).norm() / want.norm() for first, want in self.expected]
        return max(float(x) for x in found)


def time_paged(setup: Setup, config: attention.AttentionConfig) -> tuple[float, float]:
    """Return the seconds per layer, and the error."""
    paged, case = setup.paged, setup.case
    paged.configs = dict.fromkeys(paged.configs, config)
    answers: list[Tensor] = []

    def step() -> None:
        plan = made or paged.plan_decode(setup.lanes, setup.kv_lens, setup.table, alone=True)
        setup.q.mul_(1)  # as the embedding, which is launched in the ordinary way
        if made:  # once; the counters have to begin anew at each replay
            for items in made.work[0]:
                items.list[1 : work_tiles.HEADER].zero_()
        answers.clear()
        for layer in range(setup.layers):
            answers.append(paged.attend(plan, layer, setup.q, 0))
            del answers[1:]  # the first layer's is compared

    made = None if case.decodes else paged.plan(setup.layout)
    taken = timed(step) / 1e6
    return taken / setup.layers, setup.error(answers[0])


def configured(setup: Setup, rows: int, warps: int, stages: int, peel: bool) -> attention.AttentionConfig:
    """Return a configuration with the values that follow from the others."""
    chip, dims = Chip.of(setup.q.device), 1 << (setup.q.shape[2] - 1).bit_length()
    own = setup.paged.configs[attention.DECODE if setup.case.decodes else attention.PREFILL]
    size = attention_kernels.shared_bytes(rows, own.keys, stages, dims, torch.bfloat16, chip)
    programs = attention_kernels.programs_of(size, warps, chip)
    changed = replace(own, rows=rows, warps=warps, stages=stages, programs=programs, peel=peel)
    return replace(changed, specialized=False, streamed=False)


class Tuner:
    """The measurements so far, which end at the time `until`."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.rows: list[dict[str, Any]] = []

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    def try_paged(self, setup: Setup, config: attention.AttentionConfig) -> None:
        if self.over:
            return
        try:
            taken, error = time_paged(setup, config)
        except Exception as refused:  # of the compiler, or for want of shared memory: the next may do
            print(f"{setup.case.name:18} {config}: {type(refused).__name__} {str(refused)[:100]}", flush=True)
            return
        case = setup.case
        done, unit = (setup.kv_bytes, "TB/s") if case.decodes else (setup.flops, "TFLOP/s")
        rate = done / taken / 1e12
        verdict = "" if error < TOLERANCE else "  WRONG"
        figures = f"{taken * 1e6:9.1f} us {rate:8.2f} {unit}  error {error:.4f}{verdict}"
        print(f"{case.name:18} {figures}  {config}", flush=True)
        self.rows.append({"case": case.name, "us": taken * 1e6, unit: rate, "error": error, **asdict(config)})

    def tune(self, setup: Setup) -> None:
        """Measure the library's own configuration first, then Triton's kernel in all shapes."""
        case = setup.case
        own = setup.paged.configs[attention.DECODE if case.decodes else attention.PREFILL]
        shapes = [configured(setup, *shape) for shape in (DECODES if case.decodes else PREFILLS)]
        self.try_paged(setup, own)
        for config in dict.fromkeys(shapes):
            if config != own and setup.paged.group <= config.rows:
                self.try_paged(setup, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--seconds", type=float, default=600, help="stop after about this long")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases (or the beginnings of them)")
    parser.add_argument("--shape", default="32,8,128", help="query heads, KV heads, head size")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--own", action="store_true", help="time the library's own configurations only")
    options = parser.parse_args()
    if options.own:
        DECODES.clear()
        PREFILLS.clear()
    tuner = Tuner(time.monotonic() + options.seconds)
    heads, num_kv, head_size = (int(x) for x in options.shape.split(","))
    with torch.inference_mode():
        for case in CASES:
            if not tuner.over and (not options.only or case.name.startswith(tuple(options.only))):
                setup = Setup(case, heads, num_kv, head_size, options.page_size)
                tuner.tune(setup)
                del setup
                torch.cuda.empty_cache()
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": options.shape}
    options.out.write_text(json.dumps({**facts, "results": tuner.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
