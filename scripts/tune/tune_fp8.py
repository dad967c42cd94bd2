"""Times fp8 products on this Hopper GPU: in every kernel that can compute them, with equal bits.

    python scripts/tune/tune_fp8.py --out fp8.json

For the products of Mistral 7B (or of --model) and numbers of tokens: the library's choice, tiles of few tokens
(hopper/products.py) and both kinds of tiles of many tokens (hopper/fp8.py), in CUDA graphs over several layers'
weights, which no L2 cache holds. Quantizing is not part of it; SwiGLU and the addition after a product are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tune_products import LAYERS, PRODUCTS, Product, timed

from fastgen.device.chip import Chip
from fastgen.kernels import fp8
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.hopper import fp8 as hopper_fp8
from fastgen.kernels.hopper import products as hopper_products
from fastgen.kernels.triton import fp8 as fp8_kernels
from fastgen.kernels.triton.batch_invariant import ProductConfig
from fastgen.kernels.triton.compile_ahead import compile_ahead

TOKENS = (128, 256, 64, 96, 192)
TILES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (32, 128, 4))
"""Tokens and rows of a tile, and warps."""

MODELS = {
    "mistral7": PRODUCTS[:4],
    "llama8": (Product("qkv", 6144, 4096), *PRODUCTS[1:4]),
    "qwen14": (
        Product("qkv", 7168, 5120), Product("o", 5120, 5120, add=True),
        Product("gate_up", 27648, 5120, swiglu=True), Product("down", 5120, 13824, add=True),
    ),
    "llama1": (
        Product("qkv", 3072, 2048), Product("o", 2048, 2048, add=True),
        Product("gate_up", 16384, 2048, swiglu=True), Product("down", 2048, 8192, add=True),
    ),
}  # fmt: skip


def kinds(tokens: int, outputs: int, chip: Chip) -> Iterator[ProductConfig | int]:
    """Return the kinds of kernels to try; see fastgen.kernels.fp8.Kind."""
    yield from hopper_fp8.SIDES
    for tile, rows, warps in TILES:
        if tile >= 2 * tokens or tokens > hopper_products.MOST:
            continue
        cut = -(-tokens // tile)
        programs = 1 if cut * -(-outputs // rows) <= chip.processors or warps > 4 else 2
        for depth in (128, 256):
            stages = min((chip.shared_memory // programs - 3072) // ((tile + rows) * depth), 12)
            if stages >= 2 and tile * rows * depth <= 128 * 64 * 256:
                yield ProductConfig(tile, rows, depth, warps, stages, swap=True, token_tiles=cut)


class Bench:
    """A product's weights in several layers, and x of `most` tokens."""

    def __init__(self, product: Product, most: int) -> None:
        self.product = product
        shape, scale = (product.outputs, product.inputs), product.inputs**-0.5
        self.weights = [fp8.quantize_weight(torch.randn(shape, device="cuda").mul_(scale)) for _ in range(LAYERS)]
        self.x, self.x_scales = fp8.quantize(torch.randn(most, product.inputs, device="cuda", dtype=torch.bfloat16))
        self.residual = torch.randn(most, product.outputs, device="cuda", dtype=torch.bfloat16)

    def run(self, kind: ProductConfig | int, tokens: int, weight: fp8.Quantized, add: Tensor | None) -> Tensor:
        fused = Fused(add=add, swiglu=self.product.swiglu, out_dtype=torch.bfloat16)
        return fp8_kernels.launch_as(kind, self.x[:tokens], self.x_scales[:tokens], weight, None, fused)

    def result(self, kind: ProductConfig | int, tokens: int) -> Tensor:
        return self.run(kind, tokens, self.weights[0], self.added(tokens))

    def added(self, tokens: int) -> Tensor | None:
        return self.residual[:tokens].clone() if self.product.add else None

    def own(self, tokens: int) -> ProductConfig | int:
        """Return the library's choice."""
        return fp8_kernels.kind_of(tokens, self.product.outputs, self.product.inputs, Chip.of(self.x.device))

    def microseconds(self, kind: ProductConfig | int, tokens: int) -> float:
        add = self.added(tokens)
        return timed(lambda: [self.run(kind, tokens, weight, add) for weight in self.weights]) / LAYERS


def launch_all(benches: list[Bench], tokens: list[int], chip: Chip) -> None:
    for bench in benches:
        for count in tokens:
            for kind in (bench.own(count), *kinds(count, bench.product.outputs, chip)):
                with suppress(Exception):  # it comes again where it is timed
                    bench.result(kind, count)


def measure(bench: Bench, tokens: int, chip: Chip) -> dict[str, Any]:
    product, own = bench.product, bench.own(tokens)
    expected, tried = bench.result(hopper_fp8.SIDES[0], tokens), []
    for kind in dict.fromkeys([own, *kinds(tokens, product.outputs, chip)]):
        try:
            same = torch.equal(bench.result(kind, tokens), expected)
            tried.append({"us": bench.microseconds(kind, tokens), "same": same, "kind": short(kind)})
        except Exception as error:  # of whatever part of the compiler
            print(f"  {product.name} {short(kind)}: {type(error).__name__} {str(error)[:200]}", flush=True)
    found = {"product": product.name, "tokens": tokens, "own": tried[0]}
    tried.sort(key=lambda one: float(one["us"]))
    shown = ", ".join(f"{one['kind']} {one['us']:.1f}{'' if one['same'] else ' OTHER BITS'}" for one in tried)
    print(f"{product.name:8}{tokens:4}: own {found['own']['kind']} {found['own']['us']:.1f} us; {shown}", flush=True)
    return found | {"tried": tried}


def short(kind: ProductConfig | int) -> str:
    """Return tokens x rows x depth / stages, and for other numbers of warps than 4 these; or "many" and the rows."""
    if isinstance(kind, int):
        return f"many{kind}"
    warps = f"/{kind.warps}w" if kind.warps != 4 else ""
    return f"{kind.tokens}x{kind.rows}x{kind.depth}/{kind.stages}{warps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for all that was measured")
    parser.add_argument("--model", choices=MODELS, default="mistral7")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here to tune for")
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        chip = Chip.of(device)
        benches = [Bench(product, max(args.tokens)) for product in MODELS[args.model]]
        compile_ahead(partial(launch_all, benches, args.tokens, chip), device)
        results = [measure(bench, tokens, chip) for tokens in args.tokens for bench in benches]
    for tokens in args.tokens:
        here = [each for each in results if each["tokens"] == tokens]
        own, best = sum(each["own"]["us"] for each in here), sum(each["tried"][0]["us"] for each in here)
        print(f"a layer at {tokens} tokens: own {own:.1f} us, best {best:.1f}")
    if args.out:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": args.model}
        args.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
