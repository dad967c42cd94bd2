"""Check and measure kernels.py on a GPU, with the shapes of a recurrent layer of Qwen3.5-9B, beside
flash-linear-attention.

    python scripts/hybrid/measure.py --output scripts/results/hybrid-h200.json     # needs fla-core==0.6.0 and einops

Times are of CUDA graphs, in microseconds, the median of 20 replays. A decode's graph goes through as many layers as
exceed the L2 cache. Bytes are the least that a decode must read and write: the state, the block's earlier rows, inputs
and outputs. The exit status is 1 if outputs differ in a bit between schedules or tiles.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import kernels
import schedules
import torch
import torch.nn.functional as F
from kernels import BLOCK, DEFAULT, SIZE, Lanes, Tiles
from torch import Tensor

HEADS, KEY_HEADS, HIDDEN = 32, 16, 4096
LENGTH = 8192
LANES = (1, 2, 4, 8, 16, 32, 64)
FORK = multiprocessing.get_context("fork")
TILES: dict[str, list[dict[str, int]]] = {
    "_invert": [{"invert_warps": warps} for warps in (2, 4)],
    "_scan": [
        {"scan_columns": columns, "scan_warps": warps, "scan_stages": stages}
        for columns, warps, stages in ((32, 4, 2), (32, 4, 3), (16, 4, 2), (64, 8, 2), (32, 2, 2))
    ],
    "_outputs": [{"output_columns": columns, "output_warps": warps} for columns, warps in ((64, 4), (128, 8), (64, 2))],
    "_mix": [
        {"mix_warps": warps, "mix_stages": stages, "mix_registers": registers}
        for warps, stages, registers in ((1, 1, 255), (1, 2, 255), (1, 1, 168), (2, 1, 128), (4, 2, 255))
    ],
    "_apply": [
        {"apply_columns": columns, "apply_warps": warps, "apply_registers": registers}
        for columns, warps, registers in (
            (32, 2, 255),
            (64, 2, 255),
            (64, 4, 255),
            (64, 4, 128),
            (128, 4, 255),
            (128, 8, 128),
            (32, 4, 96),
        )
    ],
}
PREFILL = ("_prepare", "_sum_decays", "_invert", "_scan", "_outputs")
COMPILERS = 7  # processes that compile at the same time


def graph_time(launches: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a CUDA graph of `launches`, in microseconds."""
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    for _ in range(3):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return 1000 * sorted(start.elapsed_time(stop) for start, stop in events)[repeats // 2]


def check_bits(tiles: Tiles) -> dict[str, Any]:
    """Compare outputs of random schedules with those of a prefill, and prefills and decodes of all tiles."""
    different, schedule_count = 0, 0
    for seed, length in enumerate((200, 333, 64, 700, 150, 500)):
        inputs = schedules.random_inputs(length, HEADS, KEY_HEADS, "cuda", seed)
        want, _ = schedules.whole(inputs, tiles)
        got = schedules.by_schedule(inputs, seed, tiles)
        schedule_count += 1
        if not torch.equal(got, want):
            different += 1
            rows = (got != want).any(-1).any(-1).nonzero().flatten().tolist()
            print(
                "differs", seed, length, len(rows), rows[:5], error(got, want), compare_rows(inputs, tiles), flush=True
            )
    inputs = schedules.random_inputs(250, HEADS, KEY_HEADS, "cuda", 9)
    want, _ = schedules.whole(inputs, tiles)
    other: list[str] = []
    for kernel, choices in TILES.items():
        for changes in choices:
            changed = replace(tiles, **changes)
            run = (
                schedules.by_schedule(inputs, 9, changed)
                if kernel in ("_mix", "_apply")
                else schedules.whole(inputs, changed)[0]
            )
            if not torch.equal(run, want):
                other.append(f"{kernel} {changes}")
    return {"schedules": schedule_count, "different": different, "different_tiles": other}


def compare_rows(inputs: schedules.Inputs, tiles: Tiles) -> dict[str, bool]:
    """Return which rows of a block are equal, after a prefill and after decodes of 50 tokens."""
    part = inputs.part(0, 50)
    _, once = schedules.whole(part, tiles)
    lanes = Lanes.empty(1, HEADS, KEY_HEADS, "cuda")
    for at in range(50):
        kernels.decode(*(x[None] for x in part.part(at, at + 1).all()), lanes, tiles)
        lanes.count += 1
    names = ("keys", "strengths", "decays", "residuals", "writes", "inverse")
    sides = [[getattr(each, name)[:, :, :50] if name == "inverse" else getattr(each, name)[:, :50] for name in names]
             for each in (once, lanes)]  # fmt: skip
    return {name: torch.equal(*pair) for name, *pair in zip(names, *sides, strict=True)}


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.cpu().double(), want.cpu().double()
    return float((got - want).norm() / want.norm())


def prefill_inputs(length: int) -> tuple[Any, ...]:
    """Return random inputs, a lane, its number, how many rows it has, and buffers: arguments of a prefill."""
    inputs = schedules.random_inputs(length, HEADS, KEY_HEADS, "cuda", 1)
    blocks = length // BLOCK
    buffers = (
        torch.empty_like(inputs.q), torch.empty_like(inputs.q), torch.empty_like(inputs.g),
        inputs.v.new_empty(blocks, HEADS, BLOCK, BLOCK), inputs.v.new_empty(blocks, HEADS, SIZE, SIZE),
        torch.empty_like(inputs.v), torch.empty_like(inputs.v),
    )  # fmt: skip
    return *inputs.all(), Lanes.empty(1, HEADS, KEY_HEADS, "cuda"), 0, 0, buffers


def compile_some(first: int) -> None:
    """Launch every `COMPILERS`-th kernel, so that all are in Triton's cache when they are measured."""
    torch.set_grad_enabled(False)
    choices = [(name, choice) for name, several in TILES.items() for choice in several]
    arguments, rows, lanes = prefill_inputs(BLOCK), decode_inputs(1), filled(1, 0)
    for name, choice in choices[first::COMPILERS]:
        tiles = replace(DEFAULT, **choice)
        if name in PREFILL:
            kernels.prefill_launches(*arguments, tiles)[PREFILL.index(name)]()
        else:
            kernels.decode(*rows, lanes, tiles)
    kernels.launch_advance(lanes, torch.arange(1, device="cuda"), DEFAULT)
    torch.cuda.synchronize()


def prefill_times(tiles: Tiles) -> tuple[Tiles, dict[str, Any]]:
    """Return the best tiles of a prefill of LENGTH tokens, and the times of its kernels."""
    arguments = prefill_inputs(LENGTH)

    def launches(tiles: Tiles) -> dict[str, Callable[[], object]]:
        found = kernels.prefill_launches(*arguments, tiles)
        return dict(zip(PREFILL, found, strict=True))

    for launch in launches(tiles).values():
        launch()
    times: dict[str, Any] = {}
    for name in PREFILL:
        tried = {
            json.dumps(choice): graph_time(launches(replace(tiles, **choice))[name]) for choice in TILES.get(name, [{}])
        }
        best = min(tried, key=lambda each: tried[each])
        tiles = replace(tiles, **json.loads(best))
        times[name] = tried
    chosen = launches(tiles)
    times["all"] = graph_time(lambda: [launch() for launch in chosen.values()])
    return tiles, times


def filled(number: int, copy: int) -> Lanes:
    lanes = Lanes.empty(number, HEADS, KEY_HEADS, "cuda")
    lanes.state.normal_(0, 0.1)
    lanes.state16.copy_(lanes.state)
    lanes.keys.normal_(0, SIZE**-0.5)
    lanes.residuals.normal_()
    lanes.writes.normal_()
    lanes.strengths.fill_(0.5)
    lanes.decays.copy_(-0.01 * torch.arange(1, BLOCK + 1, device="cuda")[None, :, None])
    lanes.inverse.copy_(torch.eye(BLOCK, device="cuda"))
    counts = (torch.arange(number) + copy * number) * 29 + 17
    lanes.count.copy_(counts % BLOCK)
    return lanes


def least_bytes(counts: list[int]) -> int:
    total = 0
    for count in counts:
        rows = count * SIZE * 2 * (KEY_HEADS + 2 * HEADS) + 4 * HEADS * (count // 16 * 16) ** 2
        token = 2 * SIZE * (4 * KEY_HEADS + 4 * HEADS) + 4 * BLOCK * HEADS
        total += 2 * HEADS * SIZE**2 + rows + token
    return total


def decode_inputs(number: int) -> tuple[Tensor, ...]:
    inputs = schedules.random_inputs(number, HEADS, KEY_HEADS, "cuda", 3)
    return tuple(x[:, None].contiguous() for x in inputs.all())


def decode_time(number: int, tiles: Tiles) -> dict[str, float]:
    """Return the time of one layer's decode of `number` lanes, and the bandwidth that its least bytes have in it."""
    copies = max(3, math.ceil(300e6 / (2.2e6 * number)))
    layers = [filled(number, copy) for copy in range(copies)]
    rows = decode_inputs(number)
    q, _, v = rows[:3]
    buffers = torch.empty_like(q), v.new_empty(number, 1, HEADS, BLOCK), torch.empty_like(v)
    size = sum(least_bytes(layer.count.tolist()) for layer in layers) / copies
    each = graph_time(lambda: [kernels.decode(*rows, layer, tiles, buffers) for layer in layers]) / copies
    parts: dict[str, float] = {}
    for place, name in enumerate(("_prepare_rows", "_mix", "_apply")):
        chosen = [kernels.decode_launches(*rows, layer, tiles, buffers)[place] for layer in layers]
        parts[name] = graph_time(lambda: [launch() for launch in chosen]) / copies  # noqa: B023
    full = torch.arange(math.ceil(number / BLOCK), device="cuda")
    move = graph_time(lambda: [kernels.launch_advance(layer, full, tiles) for layer in layers]) / copies
    share = min(1.0, number / BLOCK)
    return {"decode": each, "advance": move, "with_advance": each + share * move, "bytes": size,
            "bandwidth": size / each * 1e6, **parts}  # fmt: skip


def decode_tiles(tiles: Tiles, number: int) -> tuple[Tiles, dict[str, float]]:
    times: dict[str, float] = {}
    for name in ("_mix", "_apply"):
        tried = {json.dumps(choice): decode_time(number, replace(tiles, **choice))["decode"] for choice in TILES[name]}
        tiles = replace(tiles, **json.loads(min(tried, key=lambda each: tried[each])))
        times |= tried
    return tiles, times


def layer_time(number: int, tiles: Tiles) -> dict[str, float]:
    """Return the time of one layer's decode with its four projections, by cuBLAS, without convolution and norm."""
    copies = 4
    layers = [filled(number, copy) for copy in range(copies)]
    wide = 2 * KEY_HEADS * SIZE + 2 * HEADS * SIZE + 2 * HEADS
    weights = [torch.randn(wide, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in layers]
    last = [torch.randn(HIDDEN, HEADS * SIZE, device="cuda", dtype=torch.bfloat16) for _ in layers]
    x = torch.randn(number, HIDDEN, device="cuda", dtype=torch.bfloat16)
    rows = decode_inputs(number)
    q, _, v = rows[:3]
    buffers = torch.empty_like(q), v.new_empty(number, 1, HEADS, BLOCK), torch.empty_like(v)

    def launches() -> None:
        for layer, first, second in zip(layers, weights, last, strict=True):
            F.linear(x, first)
            F.linear(kernels.decode(*rows, layer, tiles, buffers).view(number, -1), second)

    each = graph_time(launches) / copies
    size = sum(least_bytes(layer.count.tolist()) for layer in layers) / copies
    size += 2 * (weights[0].numel() + last[0].numel())
    return {"time": each, "bytes": size, "bandwidth": size / each * 1e6}


def copy_bandwidth() -> float:
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time(lambda: target.copy_(source)) * 1e6


def peer(folder: Path, ready: Event, go: Event) -> None:
    """Measure flash-linear-attention when its kernels are compiled and tuned, and the GPU is free."""
    torch.set_grad_enabled(False)
    helpers = [FORK.Process(target=compile_peer, args=(each,)) for each in range(COMPILERS)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    chunk, recurrent = peer_functions(LENGTH)
    output = chunk()[0][0, :512].cpu()
    recurrent(decode_inputs(1), [torch.zeros(1, HEADS, SIZE, SIZE, device="cuda")])
    torch.save(output, folder / "output.pt")
    ready.set()
    go.wait()
    times: dict[str, Any] = {"prefill": graph_time(chunk)}
    for number in LANES:
        copies = max(3, math.ceil(300e6 / (4.2e6 * number)))
        states = [torch.randn(number, HEADS, SIZE, SIZE, device="cuda") for _ in range(copies)]
        rows = decode_inputs(number)
        times[f"decode {number}"] = graph_time(lambda: recurrent(rows, states)) / copies  # noqa: B023
        (folder / "times.json").write_text(json.dumps(times))


def peer_functions(length: int) -> tuple[Callable[[], Any], Callable[[tuple[Tensor, ...], list[Tensor]], Any]]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    rows = [x[None] for x in schedules.random_inputs(length, HEADS, KEY_HEADS, "cuda", 1).all()]
    state = torch.zeros(1, HEADS, SIZE, SIZE, device="cuda")
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def chunk() -> Any:
        return chunk_gated_delta_rule(*rows, initial_state=state, **options)

    def recurrent(rows: tuple[Tensor, ...], states: list[Tensor]) -> Any:
        return [fused_recurrent_gated_delta_rule(*rows, initial_state=each, **options) for each in states]

    return chunk, recurrent


def compile_peer(first: int) -> None:
    """Compile what flash-linear-attention will try, without measuring it; each process begins elsewhere."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def rotated(self: Any, arguments: Any) -> Any:
        configs = prune(self, arguments)
        start = len(configs) * first // COMPILERS
        return configs[start:] + configs[:start]

    def run_once(_: Any, call: Callable[[], object], quantiles: Any) -> list[float]:
        call()
        return [1.0] * len(quantiles)

    Autotuner.prune_configs, Autotuner.do_bench = rotated, run_once
    peer_functions(1024)[0]()
    torch.cuda.synchronize()


def measure_all(options: argparse.Namespace, begin: float, folder: Path, ready: Event, go: Event, other: Any) -> int:
    """Measure everything, in the order of its importance, and write what there is after each step."""
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}

    def note(name: str, value: Any) -> None:
        results[name] = value
        print(round(time.monotonic() - begin, 1), name, json.dumps(value), flush=True)
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    tiles = DEFAULT
    note("bits", check_bits(tiles))
    if results["bits"]["different"]:  # with the instruction of decodes in prefills, too
        tiles = replace(DEFAULT, invert_warps=2, scan_warps=2, output_warps=2)
        note("bits with two warps", check_bits(tiles))
    inputs = schedules.random_inputs(LENGTH, HEADS, KEY_HEADS, "cuda", 1).part(0, 512)
    want = schedules.reference_outputs(inputs, torch.float32)
    note("errors", {"fastgen": error(schedules.whole(inputs, tiles)[0], want)})
    while other.is_alive() and not ready.wait(0.2):  # so that nothing else uses the GPU
        pass
    go.set()
    other.join()
    note("flash-linear-attention", json.loads((folder / "times.json").read_text()))
    note("errors", {**results["errors"], "flash-linear-attention": error(torch.load(folder / "output.pt"), want)})
    note("copy_bandwidth", copy_bandwidth())
    tiles, times = prefill_times(tiles)
    note("prefill", times)
    tiles_of = {}
    for number in (1, 64):
        tiles_of[number], tried = decode_tiles(tiles, number)
        note(f"decode tiles {number}", tried)
    note("tiles", {number: asdict(each) for number, each in tiles_of.items()})
    for number in LANES:
        note(f"decode {number}", decode_time(number, tiles_of[64 if number > 8 else 1]))
    for number in (1, 8, 64):
        note(f"layer {number}", layer_time(number, tiles_of[64 if number > 8 else 1]))
    return int(bool(results["bits"]["different"] or results["bits"]["different_tiles"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    begin = time.monotonic()
    folder, ready, go = Path(tempfile.mkdtemp()), FORK.Event(), FORK.Event()
    other = FORK.Process(target=peer, args=(folder, ready, go))
    compilers = [FORK.Process(target=compile_some, args=(each,), daemon=True) for each in range(COMPILERS)]
    for process in (other, *compilers):  # before this process uses the GPU
        process.start()
    for process in compilers:
        process.join()
    try:
        return measure_all(options, begin, folder, ready, go, other)
    finally:
        other.kill()


if __name__ == "__main__":
    raise SystemExit(main())
