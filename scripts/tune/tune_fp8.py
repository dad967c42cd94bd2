"""Checks and times fp8 products (fastgen/kernels/fp8.py) on this Hopper GPU, beside torch's; two minutes.

    python scripts/tune/tune_fp8.py --out fp8.json

Checks, for Mistral 7B's products: the errors of each kind of kernel beside the torch twin, and whether it gives the
bits that 8192 tokens give. Times: 8192 tokens in loops of seconds, in which the power limit holds, and fewer in a CUDA
graph over weights that no L2 cache holds. "go" says whether 4096 x 14336 reaches 1100 TFLOP/s at 8192 tokens and 85 %
of 4.3 TB/s at one. The file is written after each figure.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tune_products import MOST, PRODUCTS, Product, timed

from fastgen.device.chip import Chip
from fastgen.kernels import fp8, hopper_fp8
from fastgen.kernels.ahead import compile_ahead
from fastgen.kernels.batch_invariant import Fused, ProductConfig, config, launch_as

LAYERS = 4
SECONDS = 1.5  # of a loop in which the power limit holds
FEW, MANY = (1, 8, 32, 64), (128, 512, MOST)
BYTES_A_SECOND, NEEDED_SHARE, NEEDED_TFLOPS = 4.3e12, 0.85, 1100
CUTS = ((64, 512), (64, 256), (32, 512), (32, 256), (128, 256), (128, 128))
"""Rows and depth to try for few tokens, of the products of SWEPT and numbers of tokens of SWEPT_TOKENS."""

SWEPT, SWEPT_TOKENS = ("down", "gate_up", "o"), (1, 64)
GROUPS = (1024, 4096, 8192)
"""Tokens whose tiles share the weight's, to try beside fastgen's own choice."""

Many = tuple[int, int]
"""Rows of each of a tile's sides, and hopper_fp8.GROUP."""


class Case:
    """A product with a weight in one of the two forms, and the inputs of MOST tokens."""

    def __init__(self, product: Product, blocks: bool, chip: Chip) -> None:
        self.product, self.blocks, self.chip = product, blocks, chip
        shape, scale = (product.outputs, product.inputs), product.inputs**-0.5
        self.weights = [
            fp8.quantize_weight(torch.randn(shape, device="cuda").mul_(scale), blocks) for _ in range(LAYERS)
        ]
        x = torch.randn(MOST, product.inputs, device="cuda", dtype=torch.bfloat16)
        self.x, self.x_scales = fp8.quantize.twin(x)
        self.residual = torch.randn(MOST, product.outputs, device="cuda", dtype=torch.bfloat16)
        self.name = f"{product.name}, {'blocks' if blocks else 'rows'}"

    def fused(self, tokens: int) -> Fused:
        add = self.residual[:tokens].clone() if self.product.add else None
        return Fused(add, self.product.swiglu, None, torch.bfloat16)

    def choices(self, tokens: int) -> Iterator[ProductConfig | Many]:
        """Return our configuration for a number of tokens, and others to try."""
        p = self.product
        swept = p.name in SWEPT and not self.blocks
        padded, rows = fp8.kind_of(tokens, p.outputs, self.chip)
        if not padded:
            yield rows, hopper_fp8.GROUP
            for other in hopper_fp8.SIDES if swept or tokens < MOST else ():
                yield other, hopper_fp8.GROUP
            for group in GROUPS if swept and tokens == MOST else ():
                yield rows, group
            return
        yield config(padded, p.outputs, p.inputs, fp8.E4M3, self.chip)
        for rows, depth in CUTS if swept and tokens in SWEPT_TOKENS else ():
            for programs in (1, 2):
                room = self.chip.shared_memory // programs - 3072 - max(64 - rows, 0) * 128
                stages = min(room // ((padded + rows) * depth), 12)
                sums = max(rows, 64) * padded // 128 * (1 + depth // fp8.BLOCK)
                if stages > 1 and sums <= 96:  # registers
                    yield ProductConfig(padded, rows, depth, 4, stages, swap=True)

    def run(self, tokens: int, chosen: ProductConfig | Many, fused: Fused, layer: int = 0) -> Tensor:
        x, scales, weight = self.x[:tokens], self.x_scales[:tokens], self.weights[layer]
        if isinstance(chosen, ProductConfig):
            return launch_as(chosen, x, weight.values, None, fused, (scales, weight.scales))
        before, (rows, hopper_fp8.GROUP) = hopper_fp8.GROUP, chosen
        try:
            return fp8.launch_as((0, rows), x, scales, weight, None, fused)
        finally:
            hopper_fp8.GROUP = before

    def compile(self) -> None:
        for tokens in (16, *FEW, *MANY):
            for chosen in dict.fromkeys(self.choices(tokens)):
                with suppress(Exception):  # it comes again where it is timed
                    self.run(tokens, chosen, self.fused(tokens))

    def check(self) -> dict[str, Any]:
        """Return the largest and the mean error of each kind of kernel beside the twin, and whether its bits are those
        of MOST tokens."""
        given = self.weights[0], None
        twin = fp8.product.twin(self.x[:300], self.x_scales[:300], *given, self.fused(300)).float()
        expected = fp8.product.launch(self.x, self.x_scales, *given, self.fused(MOST))
        found: dict[str, Any] = {"mean": float(twin.abs().mean())}
        for kind in fp8.KINDS:
            count = kind[0] or 300
            out = fp8.launch_as(kind, self.x[:count], self.x_scales[:count], *given, self.fused(count))
            error = (out.float() - twin[:count]).abs()
            found[str(kind)] = [float(error.max()), float(error.mean()), torch.equal(out, expected[:count])]
        return found

    def times(self, tokens: int) -> list[dict[str, Any]]:
        """Return the figures of our configuration for a number of tokens, and of the others behind it."""
        found, fused = [], self.fused(tokens)
        for chosen in dict.fromkeys(self.choices(tokens)):

            def layers(chosen: ProductConfig | Many = chosen) -> None:
                for layer in range(LAYERS):
                    self.run(tokens, chosen, fused, layer)

            try:
                took = (sustained(layers) if tokens == MOST else timed(layers)) / LAYERS
            except Exception as error:  # of whatever part of the compiler
                print(f"  {chosen}: {type(error).__name__} {str(error)[:300]}", flush=True)
                continue
            found.append(self.figures(tokens, took) | {"choice": str(chosen)})
        return found

    def figures(self, tokens: int, us: float) -> dict[str, Any]:
        p, size = self.product, self.weights[0].values.nbytes
        share, tflops = size / us * 1e6 / BYTES_A_SECOND, 2 * p.outputs * p.inputs * tokens / us / 1e6
        return {"us": round(us, 2), "share": round(share, 3), "tflops": round(tflops, 1)}

    def torchs(self, name: str) -> dict[str, Any]:
        """Return the figures of torch's product of MOST tokens: in bf16, or in fp8 with few bits for sums or more."""
        weight = self.weights[0]
        values, scales = weight.values.t(), (self.x_scales[:, None], weight.scales[None])
        plain, wide = torch.randn(self.x.shape, device="cuda", dtype=torch.bfloat16), weight.values.bfloat16()

        def work() -> Tensor:
            if name == "bf16":
                return plain @ wide.t()
            return torch._scaled_mm(
                self.x, values, *scales, out_dtype=torch.bfloat16, use_fast_accum=name == "fast sums"
            )

        return self.figures(MOST, sustained(work))


def sustained(work: Callable[[], Any]) -> float:
    """Return the microseconds of one call of `work` in the second half of a loop of SECONDS."""
    took = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        start, count = time.perf_counter(), 0
        while (took := time.perf_counter() - start) < SECONDS / 2:
            for _ in range(10):
                work()
            torch.cuda.synchronize()
            count += 10
    return took * 1e6 / count


def attempt(name: str, work: Callable[[], Any], results: dict[str, Any], path: Path | None) -> None:
    """Note and write the result of `work`, or its error, and go on."""
    try:
        results[name] = work()
    except Exception:
        results[name] = traceback.format_exc()
    for line in results[name] if isinstance(results[name], list) else [results[name]]:
        print(f"{name}: {line}", flush=True)
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")


def goes(results: dict[str, Any]) -> bool:
    """Return whether the two figures that fp8 was wanted for are reached."""
    many, one = results[f"down, rows, {MOST} tokens"][0], results["down, rows, 1 tokens"][0]
    return bool(many["tflops"] >= NEEDED_TFLOPS and one["share"] >= NEEDED_SHARE)


@torch.inference_mode()
def measure(path: Path | None, chip: Chip) -> None:
    """Check and time a scale a row, 4096 x 14336 first, then blocks."""
    several = sorted((each for each in PRODUCTS if not each.logits), key=lambda each: each.name != "down")
    cases = [Case(each, blocks=False, chip=chip) for each in several]
    cases += [Case(each, blocks=True, chip=chip) for each in several if each.name in SWEPT]
    start = time.perf_counter()
    compile_ahead(lambda: [case.compile() for case in cases], torch.device("cuda", 0))  # type: ignore[func-returns-value]
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for case in cases:
        attempt(f"{case.name}, check", case.check, results, path)
        for name in ("bf16", "fast sums", "exact sums") if case is cases[0] else ():
            attempt(f"down, torch, {name}", partial(case.torchs, name), results, path)
        for tokens in (*reversed(MANY), *FEW):
            attempt(f"{case.name}, {tokens} tokens", partial(case.times, tokens), results, path)
    attempt("go", partial(goes, results), results, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for all that was measured")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    measure(arguments.out, Chip.of(torch.device("cuda", torch.cuda.current_device())))


if __name__ == "__main__":
    main()
