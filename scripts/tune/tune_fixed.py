"""Times deterministic mode's products (fastgen/kernels/fixed.py) on this GPU, beside cuBLAS and the default mode's.

    python scripts/tune/tune_fixed.py --out fixed.json
    python scripts/tune/tune_fixed.py --out fixed.json --own    # the library's own configurations only; takes a minute

For Mistral 7B's products and numbers of tokens: each configuration in a CUDA graph, over several layers' weights, which
no L2 cache holds. Its rows must be those of the configuration for 8192 tokens, bit for bit. The norm before a product
is not part of it; SwiGLU and the addition behind it are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tune_product import LAYERS, MODELS, CompileOnly, Product, Weights, theirs, timed
from tune_product import ours as small

from fastgen.kernels import fixed as module
from fastgen.kernels import hopper
from fastgen.kernels import product as small_module
from fastgen.kernels.fixed import Config, config, launch_as
from fastgen.kernels.launch import Chip, triton
from fastgen.kernels.product import Fused

MODEL = MODELS["mistral-7b"]
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
"""Tokens, rows and warps to try for more than 64 tokens."""


def products() -> list[Product]:
    return [replace(each, norm=False) for each in (*MODEL.layer(), MODEL.head())]


def fused_of(product: Product, add: Tensor | None) -> Fused:
    return Fused(add=add, swiglu=product.swiglu, out_dtype=torch.float32 if product.logits else None)


def ours(product: Product, weights: Weights, chosen: Config, x: Tensor, add: Tensor | None) -> Tensor:
    return launch_as(chosen, x, weights.weight, weights.bias, fused_of(product, add))


def shapes(tokens: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """(tokens, rows, depth, warps, swap) to try, likely ones first."""
    if tokens <= 64:
        padded = max(8 if hopper.GLUON else 16, 1 << (tokens - 1).bit_length())
        if hopper.GLUON:
            yield padded, 32, 256, 4, True
        for rows, depth, warps in ((64, 128, 4), (64, 256, 4), (128, 128, 4), (64, 64, 4), (128, 64, 4), (128, 128, 8)):
            yield padded, rows, depth, warps, True
        for rows, depth in ((32, 128), (16, 128), (64, 128), (32, 64), (64, 64), (32, 256), (16, 256), (128, 128)):
            yield 64, rows, depth, 4, False
    else:
        for tile, rows, warps in LARGE:
            yield tile, rows, 64, warps, False


def configs(tokens: int, chip: Chip) -> Iterator[Config]:
    """With as many stages as let 1, 2 or 3 programs stay on a processor at a time."""
    for tile, rows, depth, warps, swap in shapes(tokens):
        step = 2 * (tile + rows) * depth
        found = {min(12, (chip.shared_memory // programs - 3072) // step) for programs in (1, 2, 3)}
        for stages in sorted(found, reverse=True):
            if stages >= 2:
                yield Config(tile, rows, depth, warps, stages, swap)


def only_compile() -> None:
    """What a compiling process begins with."""
    for each in (module, hopper):
        each._product_kernel = CompileOnly(each._product_kernel)


def compile_one(job: tuple[Product, Config]) -> bool:
    """Put a kernel into Triton's cache; whether that went well."""
    product, chosen = job
    weight = torch.empty(product.outputs, product.inputs, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(1, product.inputs, device="cuda", dtype=torch.bfloat16)
    add = torch.zeros(1, product.outputs, device="cuda", dtype=torch.bfloat16) if product.add else None
    try:
        ours(product, Weights(weight, None, None), chosen, x, add)
    except Exception as error:  # of whatever part of the compiler
        print(f"  {product.name} {chosen}: {type(error).__name__} {str(error)[:200]}", flush=True)
        return False
    return True


class Bench:
    """A product's weights in several layers, and the results for MOST tokens that all configurations must give."""

    def __init__(self, product: Product, chip: Chip) -> None:
        self.product, self.chip = product, chip
        self.weights = [Weights.random(product, product.outputs) for _ in range(1 if product.logits else LAYERS)]
        self.x = torch.randn(MOST, product.inputs, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.randn(MOST, product.outputs, device="cuda", dtype=torch.bfloat16)
        self.expected = self.result(config(MOST, product.outputs, product.inputs, torch.bfloat16, chip), MOST)

    def result(self, chosen: Config, tokens: int) -> Tensor:
        add = self.residual[:tokens].clone() if self.product.add else None
        return ours(self.product, self.weights[0], chosen, self.x[:tokens], add)

    def same(self, chosen: Config, tokens: int) -> bool:
        return torch.equal(self.result(chosen, tokens), self.expected[:tokens])

    def microseconds(self, chosen: Config | str, tokens: int) -> float:
        """Of one product; of "cuBLAS", or "default" mode's."""
        product, x = self.product, self.x[:tokens]
        add = self.residual[:tokens].clone() if product.add else None

        def run() -> None:
            for weights in self.weights:
                if isinstance(chosen, Config):
                    ours(product, weights, chosen, x, add)
                elif chosen == "default" and tokens <= small_module.PAYS:
                    cut = small_module.config(product.outputs, product.inputs, tokens, torch.bfloat16, self.chip)
                    small(product, weights, cut, x, add)
                else:
                    theirs(product, weights, x, add)

        return timed(run) / len(self.weights)


def measure(bench: Bench, tokens: int, chosen: list[Config], made: dict[Any, bool], deadline: float) -> dict[str, Any]:
    product = bench.product
    own = config(tokens, product.outputs, product.inputs, torch.bfloat16, bench.chip)
    found: dict[str, Any] = {"product": product.name, "tokens": tokens}
    found |= {name: bench.microseconds(name, tokens) for name in ("cuBLAS", "default")}
    tried = []
    for each in dict.fromkeys([own, *chosen]):
        if made.get((product, each)) and (each == own or time.monotonic() < deadline):
            try:
                tried.append({"us": bench.microseconds(each, tokens), "same": bench.same(each, tokens), **asdict(each)})
            except triton.runtime.errors.OutOfResources as error:
                print(f"  {product.name} {each}: {error}", flush=True)
    found |= {"own": tried[0], "tried": sorted(tried, key=lambda one: float(one["us"]))}
    beside = f"cuBLAS {found['cuBLAS']:8.1f}, default {found['default']:8.1f}, own {tried[0]['us']:8.1f} us"
    print(f"{product.name:8} {tokens:5} tokens: {beside}", flush=True)
    for one in found["tried"][:4]:
        cut = f"{one['tokens']} x {one['rows']} x {one['depth']}, {one['warps']} warps, {one['stages']} stages"
        print(f"    {one['us']:8.1f}  {cut}{', swapped' if one['swap'] else ''}")
    wrong = [one for one in tried if not one["same"]]
    for one in wrong:
        print(f"    OTHER BITS: {one}")
    return found


def layer_line(tokens: int, results: list[dict[str, Any]]) -> str:
    here = [each for each in results if each["tokens"] == tokens and each["product"] != "head"]
    sums = {name: sum(each[name] for each in here) for name in ("cuBLAS", "default")}
    own, best = sum(each["own"]["us"] for each in here), sum(each["tried"][0]["us"] for each in here)
    times = ", ".join(f"{own / each:.3f} and {best / each:.3f} times {name}" for name, each in sums.items())
    return f"a layer at {tokens} tokens: own {own:.1f} us, best {best:.1f}; {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for all that was measured")
    parser.add_argument("--seconds", type=float, default=360, help="how long it may take, about (default: 360)")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="that compile")
    parser.add_argument("--tokens", nargs="+", type=int, choices=TOKENS, default=TOKENS)
    parser.add_argument("--own", action="store_true", help="time the library's own configurations only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here to tune for")
    torch.manual_seed(0)
    deadline = time.monotonic() + args.seconds
    results: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, spawn, only_compile) as pool, torch.inference_mode():
        chip = Chip.of(torch.device("cuda", torch.cuda.current_device()))
        benches = [Bench(product, chip) for product in products()]
        made: dict[Any, bool] = {}
        for tokens in args.tokens:
            chosen = [] if args.own else list(configs(tokens, chip))
            owns = [
                (b.product, config(tokens, b.product.outputs, b.product.inputs, torch.bfloat16, chip)) for b in benches
            ]
            new = [*owns, *((bench.product, each) for bench in benches for each in chosen)]
            new = [job for job in dict.fromkeys(new) if job not in made]
            if time.monotonic() > deadline:
                break
            made |= zip(new, pool.map(compile_one, new, chunksize=2), strict=True)
            results += [measure(bench, tokens, chosen, made, deadline) for bench in benches]
            print(layer_line(tokens, results), flush=True)
            if args.out:
                facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": "mistral-7b"}
                args.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
