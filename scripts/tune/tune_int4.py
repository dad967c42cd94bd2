"""Times products with weights of 4 bits (fastgen/kernels/triton/int4.py) on this GPU, over configurations.

    python scripts/tune/tune_int4.py --out int4.json
    python scripts/tune/tune_int4.py --out int4.json --own     # only the library's own choices
    TRITON_INTERPRET=1 python scripts/tune/tune_int4.py --smoke    # on the CPU: does it run, on tiny shapes?

For Mistral 7B's products, in groups of 128 with zeros and float16 scales, and numbers of tokens: each configuration in
a CUDA graph over at least 200 MB of weights, which no L2 cache holds. Results must be those of the dequantized weight,
bit for bit. The share is of the memory bandwidth, with the weight's own bytes only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product as product_of
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tune_products import PRODUCTS, Product, timed

from fastgen.device.chip import Chip
from fastgen.kernels import batch_invariant, int4
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.hopper import int4 as hopper_int4
from fastgen.kernels.hopper.int4 import Tile
from fastgen.kernels.triton import int4 as int4_kernels
from fastgen.kernels.triton.compile_ahead import compile_ahead

BANDWIDTH = 3.02e12  # of an H100, in bytes per second
GROUP, BYTES = 128, 200e6
TOKENS = (1, 8, 32, 64, 16, 128, 256, 2, 4, 512, 1024, 4096)
FEW = (
    (64, 512, 4, 128, 1), (128, 256, 4, 64, 2), (32, 512, 4, 128, 1), (32, 512, 4, 128, 2), (32, 512, 4, 128, 3),
    (32, 256, 4, 128, 3), (32, 256, 4, 128, 4), (32, 1024, 4, 128, 1), (32, 1024, 4, 128, 2), (64, 512, 8, 128, 1),
    (64, 512, 8, 128, 2), (64, 256, 8, 128, 2), (64, 256, 8, 128, 3), (32, 512, 4, 64, 2), (64, 512, 4, 128, 2),
)  # fmt: skip
MANY = (
    (64, 128, 4, 64, 2), (64, 256, 4, 128, 1), (64, 256, 4, 64, 1), (128, 128, 8, 64, 1), (128, 128, 4, 64, 1),
)  # fmt: skip
"""(rows, depth, warps, chunk, programs) of a Tile to try for up to 64 tokens of a tile, and for more."""

Run = Callable[[int], Tensor]  # computes a product with the weight of a layer


def tiles(tokens: int) -> Iterator[Tile]:
    """Return the tiles to try."""
    padded = min(max(8, 1 << (tokens - 1).bit_length()), 256)
    sizes = (padded, 32) if tokens <= 64 else (padded, 128, 64)
    for size in dict.fromkeys(each for each in sizes if each <= padded):
        yield from (Tile(size, *shape) for shape in (FEW if tokens <= 64 else MANY))


class Bench:
    """A product's weights in several layers, and the result for `most` tokens."""

    def __init__(self, product: Product, most: int, device: torch.device, symmetric: bool = False) -> None:
        # Triton's interpreter rounds to bfloat16 differently.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self.product, self.device, self.symmetric = product, device, symmetric
        outputs, inputs = product.outputs, product.inputs
        self.bytes = outputs * inputs // 2 + outputs * inputs // GROUP * (2 if symmetric else 3)
        layers = -(-int(BYTES) // self.bytes) if device.type == "cuda" else 1
        self.weights = [self._weight() for _ in range(layers)]
        self.x = torch.randn(most, inputs, device=device, dtype=dtype)
        self.residual = torch.randn(most, outputs, device=device, dtype=dtype)
        self.dense = int4.dequantize.twin(*self.weights[0], dtype)
        assert torch.equal(int4.dequantize.launch(*self.weights[0], dtype), self.dense), "dequantized"
        self.expected = batch_invariant.product.launch(self.x, self.dense, None, self.fused(most))

    def _weight(self) -> tuple[Tensor, Tensor, Tensor | None]:
        outputs, inputs, device = self.product.outputs, self.product.inputs, self.device
        words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), device=device, dtype=torch.int64).int()
        scales = (torch.rand(outputs, inputs // GROUP, device=device) + 0.5) * (0.2 * inputs**-0.5)
        zeros = torch.randint(0, 16, scales.shape, device=device, dtype=torch.uint8)
        return (words, scales.bfloat16(), None) if self.symmetric else (words, scales.half(), zeros)

    def fused(self, tokens: int) -> Fused:
        add = self.residual[:tokens].clone() if self.product.add else None
        return Fused(add=add, swiglu=self.product.swiglu)

    def run(self, how: str | Tile, tokens: int) -> Run:
        """Return the function that computes the product in one way, "bf16" with the dequantized weight."""
        x, fused = self.x[:tokens], self.fused(tokens)
        if how == "bf16":
            return lambda layer: batch_invariant.product.launch(x, self.dense, None, fused)  # type: ignore[no-any-return]
        if how == "dequantize":
            return lambda layer: int4.dequantize.launch(*self.weights[layer], x.dtype)  # type: ignore[no-any-return]
        if how == "own":
            return lambda layer: int4.int4_product.launch(x, *self.weights[layer], None, fused)  # type: ignore[no-any-return]
        tile = None if how == "triton" else how
        assert not isinstance(tile, str)
        return lambda layer: int4_kernels.launch_as(tile, x, *self.weights[layer], None, fused)

    def same(self, how: str | Tile, tokens: int) -> bool:
        if how == "dequantize":
            return torch.equal(self.run(how, tokens)(0), self.dense)
        return torch.equal(self.run(how, tokens)(0), self.expected[:tokens])

    def microseconds(self, how: str | Tile, tokens: int) -> float:
        """Return the time of one product. (The dequantized weight of small products remains in the L2 cache.)"""
        run, layers = self.run(how, tokens), range(len(self.weights))
        return timed(lambda: [run(layer) for layer in layers], 3) / len(layers)


def ways(tokens: int, chip: Chip, own: bool) -> list[str | Tile]:
    found: list[str | Tile] = ["own", "bf16"]
    if not own:
        found += ["triton"] * (tokens <= 64)
        found += ["dequantize"] * (tokens == 1)
        if hopper_int4.runs_on(chip, torch.bfloat16, torch.float16) and tokens <= 8192:
            found += [each for each in tiles(tokens) if each.stages(chip, GROUP) > 1]
    return found


def launch_all(benches: list[Bench], several: list[str | Tile], tokens: int) -> None:
    """Launch each kernel that is measured next."""
    for bench in benches:
        for each in several:
            with suppress(Exception):  # it comes again where it is timed
                bench.run(each, tokens)(0)


def measure(bench: Bench, tokens: int, several: list[str | Tile], deadline: float) -> dict[str, Any]:
    tried = []
    for how in several:
        if time.monotonic() < deadline:
            try:
                tried.append({"how": str(how), "same": bench.same(how, tokens), "us": bench.microseconds(how, tokens)})
            except Exception as error:  # of whatever part of the compiler
                print(f"  {bench.product.name} {how}: {type(error).__name__} {str(error)[:200]}", flush=True)
    tried.sort(key=lambda one: float(one["us"]))
    for one in tried[:5] + [one for one in tried[5:] if "Tile" not in one["how"] or not one["same"]]:
        rate = bench.bytes / one["us"] * 1e6
        wrong = "" if one["same"] else "   OTHER BITS"
        line = f"{one['us']:8.2f} us {rate / 1e9:5.0f} GB/s {rate / BANDWIDTH:5.2f}  {one['how']}{wrong}"
        print(f"{bench.product.name:8} {tokens:5}: {line}", flush=True)
    return {"product": bench.product.name, "tokens": tokens, "bytes": bench.bytes, "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for all that was measured")
    parser.add_argument("--seconds", type=float, default=360, help="how long it may take, about (default: 360)")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--own", action="store_true", help="time the library's own choices only")
    parser.add_argument("--symmetric", action="store_true", help="bfloat16 scales and no zeros")
    parser.add_argument("--smoke", action="store_true", help="run tiny shapes once, on any device")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.smoke:
        parser.error("there is no GPU here to tune for")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    products = PRODUCTS[:4]
    if args.smoke:
        products = tuple(Product(each.name, 64, 256, each.add, each.swiglu) for each in products)
    deadline, chip, results = time.monotonic() + args.seconds, Chip.of(device), list[dict[str, Any]]()
    with torch.inference_mode():
        benches = [
            Bench(product, 70 if args.smoke else max(args.tokens), device, args.symmetric) for product in products
        ]
        for tokens in (3, 70) if args.smoke else args.tokens:
            several = ["own", "triton"][: 2 if tokens < 64 else 1] if args.smoke else ways(tokens, chip, args.own)
            if args.smoke:
                for bench, how in product_of(benches, several):
                    torch.testing.assert_close(bench.run(how, tokens)(0), bench.expected[:tokens])
                continue
            if time.monotonic() < deadline:
                compile_ahead(partial(launch_all, benches, several, tokens), device)
                results += [measure(bench, tokens, several, deadline) for bench in benches]
                here = [each["tried"] for each in results[-len(benches) :]]
                print(f"a layer at {tokens} tokens: best {sum(each[0]['us'] for each in here):.1f} us", flush=True)
            if args.out:
                facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": "mistral-7b"}
                args.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
