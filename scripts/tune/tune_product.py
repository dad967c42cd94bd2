"""Finds how to cut up the products of a few tokens (fastgen/kernels/product.py) on this GPU.

    python scripts/tune/tune_product.py --out product.json

A transformer layer's products run in a CUDA graph as they do in a decode step, one behind the other over several
layers' weights, so that gaps between launches, early starts and a cold L2 cache are part of the time. Each product in
turn tries its configurations while the others keep their best; then come the split of K, the weights fetched ahead, and
the early start. Compared with cuBLAS and torch's operations for what surrounds it. The first models and token counts
matter most: what does not fit into --seconds is left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels import product as module
from fastgen.kernels.launch import Chip, jit, tl, triton
from fastgen.kernels.product import Config, Fused, Workspace, complete, config, launch_as

EPS = 1e-5
LAYERS = 4
"""Whose weights (400 MB each and more) are read in turn, so that none is left in the L2 cache."""


@dataclass(frozen=True)
class Product:
    """One of a model's products; the flags are what fastgen.kernels.product.Fused says, and a bias."""

    name: str
    outputs: int
    inputs: int
    norm: bool = False
    bias: bool = False
    add: bool = False
    swiglu: bool = False
    logits: bool = False

    @property
    def bytes(self) -> int:
        return self.outputs * self.inputs * 2


@dataclass(frozen=True)
class Model:
    """The sizes of a model whose heads have 128 numbers."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    bias: bool = False

    def layer(self) -> list[Product]:
        qkv = (self.heads + 2 * self.kv_heads) * 128
        return [
            Product("qkv", qkv, self.hidden, norm=True, bias=self.bias),
            Product("o", self.hidden, self.heads * 128, add=True),
            Product("gate_up", 2 * self.intermediate, self.hidden, norm=True, swiglu=True),
            Product("down", self.hidden, self.intermediate, add=True),
        ]

    def head(self) -> Product:
        return Product("head", self.vocab, self.hidden, norm=True, logits=True)


MODELS = {
    "mistral-7b": Model(4096, 32, 8, 14336, 32768),
    "qwen2.5-14b": Model(5120, 40, 8, 13824, 152064, bias=True),
    "llama-3.1-8b": Model(4096, 32, 8, 14336, 128256),
}
TASKS = [("mistral-7b", tokens) for tokens in (1, 8, 32, 16, 64)]
TASKS += [(model, tokens) for tokens in (1, 8, 32, 16, 64) for model in ("qwen2.5-14b", "llama-3.1-8b")]


@dataclass(frozen=True)
class Weights:
    """What a product takes beside its input."""

    weight: Tensor
    bias: Tensor | None
    norm: tuple[Tensor, float] | None

    @staticmethod
    def random(product: Product, outputs: int) -> Weights:
        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

        norm = (randn(product.inputs, scale=0.1).add_(1), EPS) if product.norm else None
        bias = randn(outputs) if product.bias else None
        return Weights(randn(outputs, product.inputs, scale=product.inputs**-0.5), bias, norm)


def ours(product: Product, weights: Weights, chosen: Config, x: Tensor, add: Tensor | None) -> Tensor:
    fused = Fused(weights.norm, add, product.swiglu, out_dtype=torch.float32 if product.logits else None)
    return launch_as(chosen, x, weights.weight, weights.bias, workspace(), fused)


@cache
def workspace() -> Workspace:
    """One for all: the script's products run one after the other."""
    return Workspace.make(torch.device("cuda", torch.cuda.current_device()))


def theirs(product: Product, weights: Weights, x: Tensor, add: Tensor | None) -> Tensor:
    """cuBLAS, and torch's operations around it."""
    if weights.norm is not None:
        x = F.rms_norm(x, x.shape[1:], weights.norm[0], EPS)
    if add is not None:
        return add.addmm_(x, weights.weight.t())
    y = F.linear(x, weights.weight, weights.bias)
    if product.swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.float() if product.logits else y


@jit()
def _stand_in_kernel(qkv_ptr: tl.tensor, out_ptr: tl.tensor, STRIDE: tl.constexpr, PDL: tl.constexpr) -> None:
    """Takes the place of rope and attention: a program copies a query head of a token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, column = tl.program_id(1), tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out_ptr + token * tl.num_programs(0) * 128 + column, tl.load(qkv_ptr + token * STRIDE + column))


class Chain:
    """LAYERS layers of a model at some number of tokens."""

    def __init__(self, model: Model, tokens: int, chip: Chip) -> None:
        self.model, self.tokens, self.chip = model, tokens, chip
        self.products = model.layer()
        self.weights = [[Weights.random(p, p.outputs) for p in self.products] for _ in range(LAYERS)]
        self.residual = torch.randn(tokens, model.hidden, device="cuda", dtype=torch.bfloat16)
        self.q = torch.empty(tokens, model.heads * 128, device="cuda", dtype=torch.bfloat16)

    def attend(self, qkv: Tensor) -> Tensor:
        pdl = self.chip.dependent_launch
        options = {"launch_pdl": True} if pdl else {}
        _stand_in_kernel[(self.model.heads, self.tokens)](qkv, self.q, qkv.shape[1], pdl, **options)
        return self.q

    def run(self, product: Callable[[int, Weights, Tensor, Tensor | None], Tensor]) -> None:
        for weights in self.weights:
            q = self.attend(product(0, weights[0], self.residual, None))
            product(1, weights[1], q, self.residual)
            product(3, weights[3], product(2, weights[2], self.residual, None), self.residual)

    def microseconds(self, configs: list[Config] | None) -> float:
        """Of a layer; with cuBLAS where there are no configs."""
        products = self.products

        def product(number: int, weights: Weights, x: Tensor, add: Tensor | None) -> Tensor:
            if configs is None:
                return theirs(products[number], weights, x, add)
            return ours(products[number], weights, configs[number], x, add)

        self.residual.normal_()
        return timed(lambda: self.run(product)) / LAYERS

    def alone(self, number: int, chosen: Config | None) -> float:
        """Microseconds of one of the products, one layer's behind the other's."""
        product = self.products[number]
        x = torch.randn(self.tokens, product.inputs, device="cuda", dtype=torch.bfloat16)
        add = self.residual if product.add else None
        return timed(lambda: run_each(product, [layer[number] for layer in self.weights], chosen, x, add)) / LAYERS


def run_each(product: Product, each: Iterable[Weights], chosen: Config | None, x: Tensor, add: Tensor | None) -> None:
    for weights in each:
        theirs(product, weights, x, add) if chosen is None else ours(product, weights, chosen, x, add)


def timed(work: Callable[[], Any], repeats: int = 5) -> float:
    """Microseconds of some launches, in a CUDA graph: the median of `repeats`."""
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


def is_right(product: Product, weights: Weights, chosen: Config, tokens: int) -> bool:
    """Whether it runs, and the result is as near to float32's as bfloat16 lets it be."""
    x = torch.randn(tokens, product.inputs, device="cuda", dtype=torch.bfloat16)
    add = torch.randn(tokens, product.outputs, device="cuda", dtype=torch.bfloat16) if product.add else None
    norm = None if weights.norm is None else (weights.norm[0].float(), EPS)
    wide = Weights(weights.weight.float(), None if weights.bias is None else weights.bias.float(), norm)
    exact = theirs(product, wide, x.float(), None if add is None else add.float())
    try:
        found = ours(product, weights, chosen, x, add).float()
    except triton.runtime.errors.OutOfResources as error:
        print(f"  {product.name} {describe(chosen)}: {error}", flush=True)
        return False
    right = bool((found - exact).norm() < 0.01 * exact.norm())
    if not right:
        print(f"  WRONG: {product.name} at {tokens} tokens: {describe(chosen)}", flush=True)
    return right


def blocks(tokens: int, chip: Chip) -> Iterator[Config]:
    """What to try for a tile, with as many stages as let 4, 3, 2 or 1 programs stay on a processor at a time."""
    if tokens == 1:
        for rows, depth, warps in ((4, 1024, 4), (8, 512, 4), (8, 1024, 4), (16, 512, 4), (4, 2048, 8), (8, 1024, 8)):
            yield from (Config(1, rows, depth, 1, warps, stages) for stages in (1, 2, 3, 4))
    least = max(8, 1 << (tokens - 1).bit_length())
    for padded in (8, 16) if least == 8 else (least,):
        for rows, warps in ((16, 1), (32, 2), (32, 4), (64, 4), (128, 4), (128, 8)):
            for depth in (64, 128, 256, 512):
                step = (rows + padded) * depth
                if step > 160 * 32 * warps or rows * padded > 32 * 32 * warps:
                    continue  # more than the registers hold
                stages = {min(8, (chip.shared_memory // programs - 2048) // (2 * step)) for programs in (4, 3, 2, 1)}
                yield from (Config(padded, rows, depth, 1, warps, each) for each in sorted(stages) if each >= 2)


class CompileOnly:
    """In the place of a kernel: its launches compile it, and no more."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel.warmup, grid=grid)


def only_compile() -> None:
    """What a compiling process begins with."""
    module._product_kernel = CompileOnly(module._product_kernel)


def compile_one(job: tuple[Product, Config]) -> bool:
    """Put a kernel into Triton's cache; whether that went well."""
    product, chosen = job
    weights = Weights.random(product, 256)
    x = torch.zeros(1, product.inputs, device="cuda", dtype=torch.bfloat16)
    add = torch.zeros(1, 256, device="cuda", dtype=torch.bfloat16) if product.add else None
    try:
        ours(product, weights, chosen, x, add)
    except Exception as error:  # of whatever part of the compiler
        print(f"  {product.name} {describe(chosen)}: {type(error).__name__} {str(error)[:200]}", flush=True)
        return False
    return True


Measured = list[tuple[float, Config]]
"""Microseconds, and with what."""


class Tuner:
    """Tries configurations until the time is over, and keeps what it measured."""

    def __init__(self, pool: ProcessPoolExecutor, deadline: float) -> None:
        self.pool, self.deadline = pool, deadline
        self.chip = Chip.of(torch.device("cuda", torch.cuda.current_device()))
        self.made: dict[tuple[Product, Config], bool] = {}
        self.results: list[dict[str, Any]] = []

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline

    def compile(self, jobs: Iterable[tuple[Product, Config]]) -> None:
        new = [job for job in dict.fromkeys(jobs) if job not in self.made]
        self.made |= zip(new, self.pool.map(compile_one, new, chunksize=2), strict=True)

    def layer(self, name: str, tokens: int) -> None:
        model = MODELS[name]
        chain = Chain(model, tokens, self.chip)
        products = chain.products
        default = [config(p.outputs, p.inputs, tokens, torch.bfloat16, self.chip) for p in products]
        best = list(default)
        start = chain.microseconds(best)
        found: list[list[Measured]] = []  # of each way to vary, in turn, what each product measured
        for vary in (self.vary_blocks, self.vary_split, self.vary_start):
            wanted = [[*dict.fromkeys([old, *vary(p, old, tokens)])] for p, old in zip(products, best, strict=True)]
            self.compile((p, each) for p, several in zip(products, wanted, strict=True) for each in several)
            found.append([])
            for number, several in enumerate(wanted):
                found[-1].append(self.measure(chain, best, number, several))
                best[number] = found[-1][number][0][1] if found[-1][number] else best[number]
        self.report(name, chain, start, default, best, found)

    def measure(self, chain: Chain, best: list[Config], number: int, several: list[Config]) -> Measured:
        """The time of a layer with each of `several` for one product, best first."""
        product, weights = chain.products[number], chain.weights[0][number]
        found = []
        for each in several:
            if not self.over and self.made[product, each] and is_right(product, weights, each, chain.tokens):
                found.append((chain.microseconds([*best[:number], each, *best[number + 1 :]]), each))
        return sorted(found, key=lambda pair: pair[0])

    def report(
        self,
        name: str,
        chain: Chain,
        start: float,
        default: list[Config],
        best: list[Config],
        found: list[list[Measured]],
    ) -> None:
        size = sum(product.bytes for product in chain.products)
        times = {
            "cuBLAS": chain.microseconds(None),
            "default": start,
            "best": chain.microseconds(best),
            "best, no dependent launch": chain.microseconds([replace(each, dependent=False, ahead=0) for each in best]),
        }
        print(f"\n{name}, {chain.tokens} tokens, a layer:")
        for label, spent in times.items():
            print(f"  {label:26} {spent:7.1f} us  {size / spent / 1e6:5.2f} TB/s")
        for spent, block in uniform(found[0])[:3]:
            print(f"  one block for all: {spent:+7.1f} us  (tokens, rows, depth, warps, stages) = {block}")
        result: dict[str, Any] = {"model": name, "tokens": chain.tokens, "us a layer": times, "products": {}}
        for number, product in enumerate(chain.products):
            alone = [chain.alone(number, each) for each in (None, default[number], best[number])]
            print(f"  {product.name:8} alone: cuBLAS {alone[0]:6.1f}, default {alone[1]:6.1f}, best {alone[2]:6.1f} us")
            for measured in found:
                for spent, each in measured[number][:3]:
                    print(f"    {spent:7.1f}  {describe(each)}")
            result["products"][product.name] = {
                "alone": dict(zip(("cuBLAS", "default", "best"), alone, strict=True)),
                "tried": [[{"us a layer": spent, **asdict(each)} for spent, each in way[number]] for way in found],
            }
        self.results.append(result)

    def head(self, name: str, tokens: int) -> None:
        """The logits, alone."""
        product = MODELS[name].head()
        weights = [Weights.random(product, product.outputs)]
        x = torch.randn(tokens, product.inputs, device="cuda", dtype=torch.bfloat16)
        default = config(product.outputs, product.inputs, tokens, torch.bfloat16, self.chip)
        wanted = [default, *(each for each in self.vary_blocks(product, default, tokens) if each.warps >= 4)]
        self.compile((product, each) for each in wanted)
        theirs_us = timed(lambda: run_each(product, weights, None, x, None))
        found = []
        for each in wanted:
            if not self.over and self.made[product, each] and is_right(product, weights[0], each, tokens):
                found.append((timed(partial(run_each, product, weights, each, x, None)), each))
        print(f"\n{name}, {tokens} tokens, head: cuBLAS {theirs_us:.1f} us, {product.bytes / theirs_us / 1e6:.2f} TB/s")
        for spent, each in sorted(found, key=lambda pair: pair[0])[:4] + found[:1]:  # the last: the default
            print(f"    {spent:7.1f}  {product.bytes / spent / 1e6:5.2f} TB/s  {describe(each)}")
        listed = [{"us": spent, **asdict(each)} for spent, each in found]
        self.results.append({"model": name, "tokens": tokens, "head": listed, "cuBLAS": theirs_us})

    def vary_blocks(self, product: Product, chosen: Config, tokens: int) -> Iterator[Config]:
        for each in blocks(tokens, self.chip):
            yield complete(each, product.outputs, product.inputs, 2, self.chip)

    def vary_split(self, product: Product, chosen: Config, tokens: int) -> Iterator[Config]:
        steps = -(-product.inputs // chosen.depth)
        tiles = -(-product.outputs // chosen.rows)
        most = min(steps, module.PARTIALS // (tiles * (chosen.rows + 1) * chosen.tokens))
        around = {1, 2, 3, 4, 6, 8, chosen.split - 1, chosen.split + 1, chosen.split * 2}
        yield from (replace(chosen, split=split) for split in sorted(around) if 1 <= split <= most)

    def vary_start(self, product: Product, chosen: Config, tokens: int) -> Iterator[Config]:
        if self.chip.dependent_launch:
            for ahead in (0, 128, 256, 512, 1024, 2048):
                if ahead * chosen.split <= product.inputs:
                    yield from (replace(chosen, ahead=ahead, early=early) for early in (True, False))


def uniform(found: list[Measured]) -> list[tuple[float, tuple[int, ...]]]:
    """What one block for all products of a layer costs beside the best of each, in microseconds, best first.

    A block is (tokens, rows, depth, warps, stages).
    """
    lost: dict[tuple[int, ...], dict[int, float]] = {}
    for number, measured in enumerate(found):
        for spent, each in measured:
            block = (each.tokens, each.rows, each.depth, each.warps, each.stages)
            lost.setdefault(block, {}).setdefault(number, spent - measured[0][0])
    return sorted((sum(each.values()), block) for block, each in lost.items() if len(each) == len(found))


def describe(chosen: Config) -> str:
    start = f"ahead {chosen.ahead}{', early' if chosen.early else ''}" if chosen.dependent else "serial"
    tile = f"tokens {chosen.tokens:2}, {chosen.rows:3} x {chosen.depth:4}, split {chosen.split:2}"
    return f"{tile}, {chosen.warps} warps, {chosen.stages} stages, {start}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for all that was measured")
    parser.add_argument("--seconds", type=float, default=240, help="how long it may take, about (default: 240)")
    parser.add_argument(
        "--processes", type=int, default=multiprocessing.cpu_count(), help="that compile (default: all)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, choices=(1, 8, 16, 32, 64), default=[1, 8, 16, 32, 64])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here to tune for")
    torch.manual_seed(0)
    deadline = time.monotonic() + args.seconds
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, spawn, only_compile) as pool, torch.inference_mode():
        tuner = Tuner(pool, deadline)
        for name, tokens in TASKS:
            if tuner.over or name not in args.models or tokens not in args.tokens:
                continue
            if name != "llama-3.1-8b":  # its layers have the shapes of Mistral's
                tuner.layer(name, tokens)
            if not tuner.over:
                tuner.head(name, tokens)
            if args.out:
                device = torch.cuda.get_device_name()
                args.out.write_text(json.dumps({"device": device, "results": tuner.results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
