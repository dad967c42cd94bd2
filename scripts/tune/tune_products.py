"""Times batch-invariant products (kernels/triton/batch_invariant.py) on this GPU, and cuBLAS on the same products.

    python scripts/tune/tune_products.py                  # all numbers of tokens; takes minutes
    python scripts/tune/tune_products.py --tokens 8 64

For Mistral 7B's products and numbers of tokens: each configuration in a CUDA graph, over several layers' weights, which
no L2 cache holds. Its rows must be those of the configuration for 8192 tokens, bit for bit. The norm before a product
is not part of it; SwiGLU and the addition after it are.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.launch import GLUON
from fastgen.kernels.triton.batch_invariant import ProductConfig, config, launch_as
from fastgen.kernels.triton.compile_ahead import compile_ahead

LAYERS = 4
"""Number of layers whose weights (400 MB each) are read in turn, so that none is left in the L2 cache."""

TOKENS = (1, 8192, 512, 1024, 64, 8, 256, 32, 128, 2048)
MOST = 8192
LARGE = (
    (128, 256, 8),
    (256, 128, 8),
    (128, 128, 4),
    (128, 128, 8),
    (64, 256, 4),
    (64, 128, 4),
    (128, 64, 4),
    (64, 64, 4),
)
"""(tokens, rows, warps) to try for more than 64 tokens."""


@dataclass(frozen=True)
class Product:
    """A product of a model; its flags are the fields of fastgen.kernels.batch_invariant.Fused."""

    name: str
    outputs: int
    inputs: int
    add: bool = False
    swiglu: bool = False
    logits: bool = False


PRODUCTS = (
    Product("qkv", 6144, 4096),
    Product("o", 4096, 4096, add=True),
    Product("gate_up", 28672, 4096, swiglu=True),
    Product("down", 4096, 14336, add=True),
    Product("head", 32768, 4096, logits=True),
)


def ours(product: Product, weight: Tensor, chosen: ProductConfig, x: Tensor, add: Tensor | None) -> Tensor:
    fused = Fused(add=add, swiglu=product.swiglu, out_dtype=torch.float32 if product.logits else None)
    return launch_as(chosen, x, weight, None, fused)


def theirs(product: Product, weight: Tensor, x: Tensor, add: Tensor | None) -> Tensor:
    """Multiply with cuBLAS, and apply torch's operations to the result."""
    if add is not None:
        return add.addmm_(x, weight.t())
    y = F.linear(x, weight)
    if product.swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.float() if product.logits else y


def timed(work: Callable[[], Any], repeats: int = 5) -> float:
    """Return the microseconds of some launches in a CUDA graph: the median of `repeats`."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 250)
    return float(statistics.median(found))


def shapes(tokens: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """Return (tokens, rows, depth, warps, swap) to try, likely ones first."""
    if tokens <= 64:
        padded = max(8 if GLUON else 16, 1 << (tokens - 1).bit_length())
        if GLUON:
            yield padded, 32, 256, 4, True
        for rows, depth, warps in ((64, 128, 4), (64, 256, 4), (128, 128, 4), (64, 64, 4), (128, 64, 4), (128, 128, 8)):
            yield padded, rows, depth, warps, True
        for rows, depth in ((32, 128), (16, 128), (64, 128), (32, 64), (64, 64), (32, 256), (16, 256), (128, 128)):
            yield 64, rows, depth, 4, False
    else:
        for tile, rows, warps in LARGE:
            yield tile, rows, 64, warps, False


def configs(tokens: int, chip: Chip) -> Iterator[ProductConfig]:
    """Return configurations with as many stages as let 1, 2 or 3 programs stay on a processor at a time."""
    for tile, rows, depth, warps, swap in shapes(tokens):
        step = 2 * (tile + rows) * depth
        found = {min(12, (chip.shared_memory // programs - 3072) // step) for programs in (1, 2, 3)}
        for stages in sorted(found, reverse=True):
            if stages >= 2:
                yield ProductConfig(tile, rows, depth, warps, stages, swap)


class Bench:
    """A product's weights in several layers, and the results for MOST tokens that all configurations must give."""

    def __init__(self, product: Product, chip: Chip) -> None:
        self.product, self.chip = product, chip
        shape, scale = (product.outputs, product.inputs), product.inputs**-0.5
        self.weights = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)
            for _ in range(1 if product.logits else LAYERS)
        ]
        self.x = torch.randn(MOST, product.inputs, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.randn(MOST, product.outputs, device="cuda", dtype=torch.bfloat16)
        self.expected = self.result(self.own(MOST), MOST)

    def own(self, tokens: int) -> ProductConfig:
        """Return the library's configuration."""
        return config(tokens, self.product.outputs, self.product.inputs, torch.bfloat16, self.chip)

    def result(self, chosen: ProductConfig, tokens: int) -> Tensor:
        add = self.residual[:tokens].clone() if self.product.add else None
        return ours(self.product, self.weights[0], chosen, self.x[:tokens], add)

    def same(self, chosen: ProductConfig, tokens: int) -> bool:
        return torch.equal(self.result(chosen, tokens), self.expected[:tokens])

    def microseconds(self, chosen: ProductConfig | None, tokens: int) -> float:
        """Return the time of one product; of cuBLAS's without a ProductConfig."""
        product, x = self.product, self.x[:tokens]
        add = self.residual[:tokens].clone() if product.add else None

        def run() -> None:
            for weight in self.weights:
                if chosen is not None:
                    ours(product, weight, chosen, x, add)
                else:
                    theirs(product, weight, x, add)

        return timed(run) / len(self.weights)


def launch_all(benches: list[Bench], chosen: list[ProductConfig], tokens: int) -> None:
    """Launch each kernel that is measured next."""
    for bench in benches:
        for each in [bench.own(tokens), *chosen]:
            with suppress(Exception):  # it comes again where it is timed
                bench.result(each, tokens)


def measure(bench: Bench, tokens: int, chosen: list[ProductConfig]) -> None:
    """Print the times of cuBLAS, of the library's configuration, and of the fastest ones."""
    name, own = bench.product.name, bench.own(tokens)
    times: dict[ProductConfig, float] = {}
    for each in dict.fromkeys([own, *chosen]):
        try:
            times[each] = bench.microseconds(each, tokens)
            if not bench.same(each, tokens):
                print(f"    OTHER BITS: {each}")
        except Exception as error:  # of whatever part of the compiler
            print(f"  {name} {each}: {type(error).__name__} {str(error)[:200]}", flush=True)
    cublas = bench.microseconds(None, tokens)
    print(f"{name:8} {tokens:5} tokens: cuBLAS {cublas:8.1f}, own {times[own]:8.1f} us", flush=True)
    for each in sorted(times, key=times.__getitem__)[:4]:
        cut = f"{each.tokens} x {each.rows} x {each.depth}, {each.warps} warps, {each.stages} stages"
        print(f"    {times[each]:8.1f}  {cut}{', swapped' if each.swap else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, choices=TOKENS, default=TOKENS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here to tune for")
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        chip = Chip.of(device)
        benches = [Bench(product, chip) for product in PRODUCTS]
        for tokens in args.tokens:
            chosen = list(configs(tokens, chip))
            compile_ahead(partial(launch_all, benches, chosen, tokens), device)
            for bench in benches:
                measure(bench, tokens, chosen)


if __name__ == "__main__":
    main()
