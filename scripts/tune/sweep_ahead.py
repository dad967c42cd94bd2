"""Time fp8 products of many tokens with and without `_fall_behind` and `_prefetch`, in turn."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from collections import defaultdict
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


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    modules = {
        "both": hopper_fp8,
        "no fall": without("no_fall", FALL, folder=folder),
        "no prefetch": without("no_prefetch", PREFETCH, folder=folder),
        "neither": without("neither", FALL, PREFETCH, folder=folder),
    }
    if not torch.cuda.is_available():
        return
    torch.manual_seed(0)
    chip = Chip.of(torch.device("cuda", 0))
    totals: dict[tuple[str, int], float] = defaultdict(float)
    with torch.inference_mode():
        benches = [Bench(product, 8448) for product in PRODUCTS[:4]]

        def launch_all() -> None:
            for bench in benches:
                for tokens in TOKENS:
                    for module in modules.values():
                        fp8.hopper_fp8 = module  # type: ignore[attr-defined]
                        rows = hopper_fp8.rows_of(tokens, bench.product.outputs, chip)
                        bench.run(rows, tokens, bench.weights[0], bench.added(tokens))

        compile_ahead(launch_all, torch.device("cuda", 0))
        for bench in benches:
            product = bench.product
            for tokens in TOKENS:
                rows, add = hopper_fp8.rows_of(tokens, product.outputs, chip), bench.added(tokens)
                graphs = {}
                for name, module in modules.items():
                    fp8.hopper_fp8 = module  # type: ignore[attr-defined]
                    bench.run(rows, tokens, bench.weights[0], add)
                    torch.cuda.synchronize()
                    graphs[name] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graphs[name]):
                        for weight in bench.weights:
                            bench.run(rows, tokens, weight, add)
                found: dict[str, list[float]] = defaultdict(list)
                for _ in range(16):
                    for name, graph in graphs.items():
                        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        begin.record()
                        for _ in range(3):
                            graph.replay()
                        end.record()
                        end.synchronize()
                        found[name].append(begin.elapsed_time(end) * 1000 / 3 / len(bench.weights))
                for name, times in found.items():
                    us = statistics.median(times[3:])
                    totals[name, tokens] += us
                    print(f"{product.name:8} {tokens:5} {name:12} {us:8.1f} us, least {min(times):8.1f}", flush=True)
    for (name, tokens), us in totals.items():
        print(f"a layer {tokens:5} {name:12} {us:8.1f} us, {us / totals['both', tokens] - 1:+.2%}")


if __name__ == "__main__":
    main()
