"""The kernels of a recurrent layer of Qwen3.5-9B on a GPU, beside those of flash-linear-attention.

    python scripts/bench/bench_recurrent.py --out scripts/results/hybrid-h200.json   # needs fla-core==0.6.0 and einops
    python scripts/bench/bench_recurrent.py --skip-peer

Times are of CUDA graphs, in microseconds, the median of 20 replays: a prefill of 8,192 tokens, and decodes of several
sequences, which go through as many layers as exceed the L2 cache. fastgen's include the convolution, the gates and the
norm; flash-linear-attention's are of its kernel alone, but for the lengths of keys and queries. `layer` has the four
projections too, by cuBLAS, and the share of the copy's bandwidth that the least bytes of such a layer take. Errors are
relative, against float32 on the CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_engine import machine
from reports import write_json
from torch import Tensor

from fastgen.device.new_memory import memory_on
from fastgen.model.attention.interface import StepLayout
from fastgen.model.recurrent_layers import DELTA_HEAD, DeltaWeights, Recurrent
from fastgen.recurrent.on_cpu import CpuMixer
from fastgen.recurrent.on_gpu import GpuMixer
from fastgen.recurrent.states import LaneStates

HIDDEN, LENGTH, SHORT = 4096, 8192, 512
SHAPE = Recurrent((0,), 16, 32)
LANES = (1, 2, 4, 8, 16, 32, 64)
EPS = 1e-6


def random_weights(device: str, dtype: torch.dtype) -> DeltaWeights:
    """Return weights whose decays go from slow to fast."""
    torch.manual_seed(0)
    heads = SHAPE.value_heads
    first = torch.randn(SHAPE.channels, 1, 4) / 2, torch.empty(heads).uniform_(-6, 1)
    more = torch.empty(heads).uniform_(0.01, 16).log(), 1 + torch.randn(DELTA_HEAD) / 10
    return DeltaWeights(*(each.bfloat16().to(device, dtype) for each in (*first, *more)))


def random_rows(count: int) -> Tensor:
    """Return results of the first product, on the CPU, with values of bfloat16."""
    return torch.randn(count, SHAPE.outputs, generator=torch.Generator().manual_seed(1)).bfloat16()


def layout(starts: list[int], counts: list[int], decodes: int) -> StepLayout:
    lengths = np.array([sum(pair) for pair in zip(starts, counts, strict=True)])
    return StepLayout(np.array(counts), lengths, decodes, np.arange(len(counts)), torch.zeros(1))


def new_mixer(lanes: int, device: str, dtype: torch.dtype) -> CpuMixer | GpuMixer:
    states = LaneStates.empty(SHAPE, lanes + 1, dtype, memory_on(torch.device(device)))
    return CpuMixer(SHAPE, states, EPS) if device == "cpu" else GpuMixer(SHAPE, states, lanes, EPS)


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


def errors() -> dict[str, Any]:
    """Return the relative error of a prefill against float32 on the CPU, and whether decodes have its bits."""
    rows, found = random_rows(SHORT), {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        mixer, weights = new_mixer(1, device, dtype), random_weights(device, dtype)
        found[device] = mixer.mix(mixer.plan(layout([0], [SHORT], 0)), 0, weights, rows.to(device, dtype))
    mixer, weights = new_mixer(1, "cuda", torch.bfloat16), random_weights("cuda", torch.bfloat16)
    steps = [mixer.plan(layout([at], [1], int(at > 0))) for at in range(SHORT)]
    decoded = torch.cat([mixer.mix(plan, 0, weights, rows[at : at + 1].cuda()) for at, plan in enumerate(steps)])
    got, want = found["cuda"].cpu().double(), found["cpu"].double()
    return {"error": float((got - want).norm() / want.norm()), "bits": torch.equal(decoded, found["cuda"])}


def prefill_time() -> float:
    mixer, weights = new_mixer(1, "cuda", torch.bfloat16), random_weights("cuda", torch.bfloat16)
    plan, x = mixer.plan(layout([0], [LENGTH], 0)), random_rows(LENGTH).cuda()
    return graph_time(lambda: mixer.mix(plan, 0, weights, x))


def least_bytes(places: list[int]) -> int:
    """Return what decodes of tokens at these places of their blocks must read and write, without projections."""
    heads, kinds = SHAPE.value_heads, SHAPE.key_heads
    total = 0
    for place in places:
        rows = place * DELTA_HEAD * 2 * (kinds + heads) + place % 16 * heads * (2 * DELTA_HEAD + 64)
        total += 2 * heads * DELTA_HEAD**2 + rows + 2 * (SHAPE.outputs + SHAPE.value_size)
    return total


def decode_times(number: int, bandwidth: float) -> dict[str, float]:
    """Return the times of a layer's decode of `number` sequences, alone and with its projections."""
    copies = max(3, math.ceil(300e6 / (2.2e6 * number)))
    mixers = [new_mixer(number, "cuda", torch.bfloat16) for _ in range(copies)]
    weights, x = random_weights("cuda", torch.bfloat16), random_rows(number).cuda()
    places = [(lane * 29 + 17) % 64 for lane in range(number)]
    plan = mixers[0].plan(layout([64 + place for place in places], [1] * number, number))
    size = least_bytes(places)
    each = graph_time(lambda: [mixer.mix(plan, 0, weights, x) for mixer in mixers]) / copies
    first = [torch.randn(SHAPE.outputs, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    last = [torch.randn(HIDDEN, SHAPE.value_size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    hidden = torch.randn(number, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def whole() -> None:
        for mixer, wide, narrow in zip(mixers, first, last, strict=False):
            F.linear(mixer.mix(plan, 0, weights, F.linear(hidden, wide)), narrow)

    layer_time = graph_time(whole) / min(copies, 4)
    share = (size + 2 * (first[0].numel() + last[0].numel())) / (layer_time / 1e6) / bandwidth
    return {"decode": each, "layer": layer_time, "layer_of_bandwidth": share}


def copy_bandwidth() -> float:
    """Return the bytes per second that a kernel reads and writes."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time(lambda: torch.neg(source, out=target)) * 1e6


def peer_times() -> dict[str, float]:
    """Return the times of flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    def inputs(*shape: int) -> list[Tensor]:
        kinds = [torch.randn(*shape, heads, DELTA_HEAD, device="cuda", dtype=torch.bfloat16) for heads in (16, 16, 32)]
        gates = torch.rand(*shape, SHAPE.value_heads, device="cuda")
        return [*kinds, -gates, gates]

    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    state, rows = torch.zeros(1, SHAPE.value_heads, DELTA_HEAD, DELTA_HEAD, device="cuda"), inputs(1, LENGTH)
    times = {"prefill": graph_time(lambda: chunk_gated_delta_rule(*rows, initial_state=state, **options))}
    for number in LANES:
        copies = max(3, math.ceil(300e6 / (4.2e6 * number)))
        states = [torch.randn(number, *state.shape[1:], device="cuda") for _ in range(copies)]
        tokens = inputs(number, 1)
        run = fused_recurrent_gated_delta_rule
        each = graph_time(lambda: [run(*tokens, initial_state=each, **options) for each in states])  # noqa: B023
        times[f"decode {number}"] = each / copies
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--skip-peer", action="store_true", help="do not measure flash-linear-attention")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    found: dict[str, Any] = {"machine": machine("cuda"), **errors()}
    found |= {"bandwidth": copy_bandwidth(), "prefill": prefill_time()}
    found |= {str(number): decode_times(number, found["bandwidth"]) for number in LANES}
    print(found, flush=True)
    if not options.skip_peer:
        found["flash-linear-attention"] = peer_times()
        print(found["flash-linear-attention"])
    if options.out:
        write_json(options.out, found)
    return int(not found["bits"])


if __name__ == "__main__":
    raise SystemExit(main())
