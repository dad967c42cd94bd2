# ruff: noqa
# mypy: ignore-errors
"""Times layers of int4 products with several tiles (to be removed)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from tune_int4 import PRODUCTS, Bench, compile_ahead, timed

from fastgen.kernels import hopper_int4 as h
from fastgen.kernels import int4
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.launch import constant
from fastgen.kernels.norm import rms_norm

A, B, C = (64, 512, 4, 128, 1), (64, 512, 4, 128, 2), (32, 512, 4, 128, 2)
E, F, G = (32, 512, 4, 128, 1), (128, 256, 4, 64, 2), (64, 256, 4, 64, 1)
SHAPES = {
    8: {
        "gate_up": (F, (128, 512, 4, 64, 1), (128, 512, 4, 64, 2), (64, 256, 4, 128, 3)),
        "qkv": (A, C),
        "o": (C, E),
        "down": (E,),
    },
    16: {"gate_up": (F,), "qkv": (A, C), "o": (A, C, E), "down": (A, E)},
    64: {"gate_up": (F,), "qkv": (A,), "o": (A,), "down": (A,)},
    128: {"gate_up": (F,), "qkv": (G,), "o": (G,), "down": (G,)},
}


def launch(bench: Bench, tile: tuple[int, ...], tokens: int, is_early: bool, layer: int, x: Any, out: Any) -> Any:
    h.FEW = (64,) if is_early else (0,)
    fused = Fused(add=out if bench.product.add else None, swiglu=bench.product.swiglu)
    return int4.launch_as(h.Tile(min(tokens, 64), *tile), x, *bench.weights[layer % len(bench.weights)], None, fused)


def main() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    for tokens, shapes in SHAPES.items():
        benches = {product.name: Bench(product, tokens, device) for product in PRODUCTS[:4]}

        def one(
            name: str, tile: Any, is_early: bool, layer: int = 0, benches: Any = benches, tokens: int = tokens
        ) -> Any:
            bench = benches[name]
            return launch(bench, tile, tokens, is_early, layer, bench.x[:tokens], bench.residual[:tokens].clone())

        every = [(name, tile, is_early) for name, tiles in shapes.items() for tile in tiles for is_early in (0, 1)]
        compile_ahead(lambda every=every, one=one: [one(name, tile, bool(e)) for name, tile, e in every], device)
        best: dict[str, list[Any]] = {}
        for name, tile, is_early in every:
            same = torch.equal(one(name, tile, bool(is_early)), benches[name].expected[:tokens])
            bench, add = benches[name], benches[name].residual[:tokens].clone()
            x, count = bench.x[:tokens], len(bench.weights)
            run = [lambda n=n: launch(bench, tile, tokens, bool(is_early), n, x, add) for n in range(count)]
            took = timed(lambda run=run: [each() for each in run], 5) / count
            print(sys.argv[1], tokens, name, tile, is_early, f"{took:.2f} us", "" if same else "OTHER BITS", flush=True)
            best.setdefault(name, []).append((took, tile, bool(is_early)))
        norm = torch.ones(4096, device=device, dtype=torch.bfloat16)
        x, residual = benches["qkv"].x[:tokens].clone(), benches["o"].residual[:tokens].clone()

        def layers(chosen: dict[str, tuple[Any, bool]], benches: Any = benches, tokens: int = tokens, x: Any = x,
                   residual: Any = residual, norm: Any = norm) -> None:  # fmt: skip
            for layer in range(8):
                y = rms_norm(residual, norm, 1e-5)
                q = launch(benches["qkv"], *chosen["qkv"][:1], tokens, chosen["qkv"][1], layer, y, None)
                launch(
                    benches["o"], *chosen["o"][:1], tokens, chosen["o"][1], layer, q[:, :4096].contiguous(), residual
                )
                y = rms_norm(residual, norm, 1e-5)
                y = launch(benches["gate_up"], *chosen["gate_up"][:1], tokens, chosen["gate_up"][1], layer, y, None)
                launch(benches["down"], *chosen["down"][:1], tokens, chosen["down"][1], layer, y, residual)

        chosen: dict[str, tuple[Any, bool]] = {
            "qkv": (A if tokens < 128 else G, True),
            "o": (A, True),
            "gate_up": (F, False),
            "down": (A, True),
        }
        print(sys.argv[1], tokens, "a layer as it was", f"{timed(lambda: layers(chosen), 5) / 8:.2f} us", flush=True)
        for name, found in best.items():
            times = []
            for _, tile, is_early in found:
                changed = chosen | {name: (tile, is_early)}
                times.append((timed(lambda changed=changed: layers(changed), 5) / 8, tile, is_early))
                print(sys.argv[1], tokens, "a layer,", name, tile, is_early, f"{times[-1][0]:.2f} us", flush=True)
            chosen[name] = min(times)[1:]
        print(sys.argv[1], tokens, "best layer", f"{timed(lambda: layers(chosen), 5) / 8:.2f} us", chosen, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
