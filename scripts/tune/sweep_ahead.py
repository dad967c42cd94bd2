"""Time fp8 products of many tokens with and without `_fall_behind` and `_prefetch`, in turn."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from tune_fp8 import Bench
from tune_products import PRODUCTS

from fastgen.device.chip import Chip
from fastgen.kernels import fp8, hopper_fp8
from fastgen.kernels.ahead import compile_ahead

TOKENS = (8448, 4096, 1024)
FALL = "    if PART == 1:\n        _fall_behind(tiles)\n"
PREFETCH = "        if ADD:\n            _prefetch(out_ptr, first_token, row, T, N, TOKENS, 2 * ROWS)\n"


def without(name: str, *texts: str, folder: Path) -> ModuleType:
    source = Path(str(hopper_fp8.__file__)).read_text()
    for text in texts:
        assert source.count(text) == 1
        source = source.replace(text, "")
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def modules() -> dict[str, ModuleType]:
    folder = Path(tempfile.mkdtemp())
    return {
        "both": hopper_fp8,
        "no fall": without("no_fall", FALL, folder=folder),
        "no prefetch": without("no_prefetch", PREFETCH, folder=folder),
        "neither": without("neither", FALL, PREFETCH, folder=folder),
    }


def compile_all(variants: dict[str, ModuleType]) -> None:
    chip = Chip.of(torch.device("cuda", 0))
    benches = [Bench(product, 8448) for product in PRODUCTS[:4]]

    def launch_all() -> None:
        for bench in benches:
            for tokens in TOKENS:
                for module in variants.values():
                    fp8.hopper_fp8 = module  # type: ignore[attr-defined]
                    rows = hopper_fp8.rows_of(tokens, bench.product.outputs, chip)
                    bench.run(rows, tokens, bench.weights[0], bench.added(tokens))

    compile_ahead(launch_all, torch.device("cuda", 0))
