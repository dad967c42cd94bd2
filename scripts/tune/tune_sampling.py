"""Checks the sampler's kernels against their torch twins on a GPU, and times them.

    python scripts/tune/tune_sampling.py --out sampling.json         # check, then time
    python scripts/tune/tune_sampling.py --against ../before         # also time the code in that folder, side by side
    python scripts/tune/tune_sampling.py --tune --seconds 300        # also with other chunks, warps and registers
    TRITON_INTERPRET=1 python scripts/tune/tune_sampling.py --smoke  # that it runs, without a GPU

Times are of `sample` replayed from a CUDA graph of many calls, with the logits as they are after the last layer: in the
cache as far as they fit. "pass" is the time to read the logits once at the bandwidth of a device copy. Host times are
of the eager call. `--against` takes a folder with another version of fastgen/ in it, which a process of its own times
after this version.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgen.kernels import sampling, scoring, truncation
from fastgen.kernels.launch import INTERPRETED
from fastgen.model import sampler
from fastgen.model.sampler import LaneState, SampleOutput, SamplePlan
from fastgen.request import LaneStart, SamplingParams

PARAMS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "min_p": SamplingParams(min_p=0.05),
    "top_p": SamplingParams(top_p=0.9),
    "top_k": SamplingParams(top_k=50),
    "top_k and top_p": SamplingParams(top_k=20, top_p=0.95, temperature=0.6),
    "much of top_k": SamplingParams(top_k=5000, top_p=0.95),
    "penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.2),
    "all": SamplingParams(top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1, logit_bias={5: 1.0}, min_tokens=4),
}


@dataclass(frozen=True)
class Timing:
    rows: int
    vocab: int
    logits: str
    params: str
    microseconds: float
    host: float
    one_pass: float


class Rows:
    """Logits and lanes to draw from."""

    def __init__(self, logits: Tensor, params: list[SamplingParams]) -> None:
        self.logits, self.params, self.plan = logits, params, SamplePlan.of(params)
        count, device = len(logits), logits.device
        self.lanes = torch.arange(count, device=device).flip(0).contiguous()
        self.positions = torch.arange(count, device=device) + 9
        starts = [
            LaneStart(count - 1 - row, p, row, row % 3, 8, frozenset({2, 7}), tuple(range(3, 12)))
            for row, p in enumerate(params)
        ]
        self.state = LaneState(count + 1, logits.shape[1], device)
        if self.state.counts is None:
            self.state.allocate_counts()
        self.state.start(starts)

    def draw(self, by: Callable[..., SampleOutput] = sampler.draw.launch) -> SampleOutput:
        return by(self.logits, self.state, self.lanes, self.positions, self.plan, None)


def flat(rows: int, vocab: int, device: torch.device) -> Tensor:
    """Return logits as a model of random weights has them: many tokens for every draw."""
    generator = torch.Generator(device).manual_seed(rows)
    return torch.randn(rows, vocab, generator=generator, device=device) * 2


def peaked(rows: int, vocab: int, device: torch.device) -> Tensor:
    """Return logits as a trained model has them: falling with the logarithm of the rank, a few tokens for most
    draws."""
    generator = torch.Generator(device).manual_seed(rows)
    rank = torch.rand(rows, vocab, generator=generator, device=device).argsort(1) + 1.0
    steep = 1.2 + 2 * torch.rand(rows, 1, generator=generator, device=device)
    return 18 - steep * rank.log() + 0.1 * torch.randn(rows, vocab, generator=generator, device=device)


LOGITS = {"flat": flat, "peaked": peaked}


# Checks.


def odd_rows(vocab: int, device: torch.device) -> Iterator[Tensor]:
    """Return rows [V] that are hard on a search."""
    normal = flat(1, vocab, device)[0]
    number = torch.arange(vocab, device=device)
    yield from (normal, normal.bfloat16().float(), (normal * 2).round() / 2, peaked(1, vocab, device)[0])
    yield torch.where(number == vocab // 2, 40.0, normal)
    yield torch.where(number % 1000 == 7, 1.0, 0.0)
    yield torch.zeros_like(normal)
    yield -(number // 40).float()
    yield normal * 1e30
    yield 1000 + normal * 1e-4
    yield torch.where(number == 60, 0.0, math.log(1.5 / vocab) + 0.02 * normal)
    yield torch.where(number % 3000 == 1, normal, -math.inf)
    yield torch.where(number == 5, math.nan, normal)
    yield torch.full_like(normal, -math.inf)


def check(vocab: int, device: torch.device) -> int:
    """Compare with the twin. Return the number of rows that drew another token, whose score is as good but for
    rounding."""
    odd = list(odd_rows(vocab, device))
    params = [
        *(SamplingParams(**{**asdict_of(p), "temperature": t}) for p in PARAMS.values() for t in (0.7, 1.0, 20.0)),
        PARAMS["greedy"],
    ]
    near = 0
    for one in params:
        logits = torch.stack(odd)
        ours, twin = Rows(logits, [one] * len(odd)), Rows(logits, [one] * len(odd))
        out, other = ours.draw(), twin.draw(sampler.draw.twin)
        same = out.tokens == other.tokens
        near += int((~same).sum())
        for row in (~same).nonzero().flatten().tolist():
            check_near(Rows(logits, [one] * len(odd)), row, int(out.tokens[row]))
        torch.testing.assert_close(out.logprobs[same], other.logprobs[same], atol=1e-5, rtol=2e-6, equal_nan=True)
        drawn = same & (other.tokens >= 0)
        torch.testing.assert_close(
            out.raw_logprobs[drawn], other.raw_logprobs[drawn], atol=1e-5, rtol=2e-6, equal_nan=True
        )
    mixed = [p for p in params for _ in range(2)]
    logits = flat(len(mixed), vocab, device)
    Rows(logits.bfloat16(), [PARAMS["plain"]] * len(mixed)).draw()
    together = Rows(logits, mixed).draw().packed
    for row, one in enumerate(mixed):
        alone = Rows(logits, mixed)
        alone.logits, alone.plan = logits[row : row + 1].clone(), SamplePlan.of([one])
        alone.lanes, alone.positions = alone.lanes[row : row + 1], alone.positions[row : row + 1]
        assert torch.equal(alone.draw().packed[:, 0], together[:, row]), f"alone and in company differ: {one}"
    targets = torch.randint(vocab, (len(mixed),), device=device)
    scores, twins = scoring.score.launch(logits, targets)[0], scoring.score.twin(logits.double(), targets)[0]
    torch.testing.assert_close(scores.double(), twins, atol=3e-6, rtol=1e-6, check_dtype=False)
    ids = scoring.alternatives.launch(logits.bfloat16(), 20)[0]
    assert torch.equal(ids, scoring.alternatives.twin(logits.bfloat16(), 20)[0])
    return near


def asdict_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def check_near(rows: Rows, row: int, token: int) -> None:
    """Check that rounding decides whether a row draws this token."""
    from fastgen.kernels.sampler_rows import gumbel

    at = slice(row, row + 1)
    lane, position = rows.lanes[at], rows.positions[at]
    parameters = rows.state.rows(lane)
    edited = sampler._edit(rows.state, parameters, lane, position, rows.logits[at], SamplePlan(), None)
    best = edited.amax(1, keepdim=True)
    kept = sampler._draw(edited, best, parameters, position[:, None], SamplePlan())[2]
    assert kept is not None
    noise = gumbel(parameters.seed, parameters.sample_index, position[:, None], edited.shape[1])
    scores = ((edited - best) / parameters.temperature + noise).where(kept, -math.inf)[0]
    short = float(scores.max() - scores[token])
    assert short <= 3e-5, f"row {row}: {token} is {short} below the best score, {rows.params[row]}"


# Times.


def graph_time(run: Callable[[], object], calls: int) -> float:
    """Return the microseconds of a call, the median of seven replays of a graph of `calls`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return float(sorted(times[1:])[3])


def host_time(run: Callable[[], object], calls: int = 100) -> float:
    """Return the microseconds that the host spends on a call, the least of five rounds."""
    best = math.inf
    for _ in range(5):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) * 1e6 / calls)
    synchronize()
    return best


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bandwidth(device: torch.device) -> float:
    """Return the bytes a microsecond that a device copy reads and writes."""
    if device.type != "cuda":
        return 1e4
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * 2**28 / graph_time(lambda: target.copy_(source), 4)


def measure(rows: int, vocab: int, kind: str, name: str, rate: float, logits: Tensor) -> Timing:
    case = Rows(logits, [PARAMS[name]] * rows)
    size = logits.numel() * logits.element_size()
    calls = max(2, min(50, int(2e9 / size)))
    if logits.device.type == "cuda":
        taken, host = graph_time(case.draw, calls), host_time(case.draw)
    else:
        taken = host = host_time(case.draw, 1)
    return Timing(rows, vocab, f"{kind} {str(logits.dtype)[6:]}", name, taken, host, size / rate)


def sweep(args: argparse.Namespace, device: torch.device, rate: float, deadline: float) -> Iterator[Timing]:
    for vocab in args.vocab:
        for rows in args.rows:
            for kind, make in LOGITS.items():
                logits = make(rows, vocab, device)
                for name in args.params:
                    if time.monotonic() < deadline:
                        yield measure(rows, vocab, kind, name, rate, logits)
                if kind == "flat" and "plain" in args.params and time.monotonic() < deadline:
                    yield measure(rows, vocab, kind, "plain", rate, logits.bfloat16())


def show(timing: Timing, note: str = "") -> None:
    print(
        f"{timing.rows:5} x {timing.vocab:6} {timing.logits:16} {timing.params:16} {timing.microseconds:9.1f} us"
        f"  host {timing.host:6.1f} us  pass {timing.one_pass:7.1f} us {note}",
        flush=True,
    )


def compare(args: argparse.Namespace, timings: list[Timing]) -> list[dict[str, Any]]:
    """Time the code of another folder, print its times beside `timings`, and return them."""
    size = [*map(str, args.rows)], [*map(str, args.vocab)]
    command = [sys.executable, __file__, "--times", "--rows", *size[0], "--vocab", *size[1], "--params", *args.params]
    command += ["--seconds", str(args.seconds), *["--smoke"] * args.smoke]
    environment = {**os.environ, "PYTHONPATH": str(args.against.resolve())}
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    others: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    known = {key(other): other for other in others}
    for timing in timings:
        if other := known.get(key(asdict(timing))):
            before, after = other["microseconds"], timing.microseconds
            show(timing, f"against {before:9.1f} us: {after / before:5.2f}, host {other['host']:6.1f} us")
    return others


def key(timing: dict[str, Any]) -> tuple[Any, ...]:
    return timing["rows"], timing["vocab"], timing["logits"], timing["params"]


def tune(device: torch.device, rate: float, deadline: float) -> Iterator[dict[str, Any]]:
    """Time the cases that matter most with other constants."""
    from fastgen.kernels import sampler_rows as layout

    sizes = [(1, 131072), (32, 131072), (512, 32768)]
    cases = [("flat", "plain"), ("flat", "top_p"), ("peaked", "top_k and top_p"), ("flat", "all")]
    for chunk, sub, warps in ((4096, 512, 8), (4096, 512, 4), (2048, 512, 4), (8192, 512, 8), (8192, 512, 16)):
        for registers in ((80, 128, 128), (128, 128, 168), (64, 96, 96)):
            layout.CHUNK, layout.SUB, layout.WARPS = chunk, sub, warps
            most = 2048 // warps  # registers that a thread can have
            sampling.EDIT_REGISTERS, sampling.DRAW_REGISTERS, sampling.CUT_REGISTERS = (
                min(most, wanted) for wanted in registers
            )
            for rows, vocab in sizes:
                for kind, name in cases:
                    if time.monotonic() > deadline or (name == "plain" and registers != (80, 128, 128)):
                        continue
                    timing = measure(rows, vocab, kind, name, rate, LOGITS[kind](rows, vocab, device))
                    show(timing, f"chunk {chunk} sub {sub} warps {warps} registers {registers}")
                    yield {**asdict(timing), "chunk": chunk, "sub": sub, "warps": warps, "registers": registers}


def compiled() -> int:
    """Return the number of kernels that have been compiled."""
    kernels = (
        sampling._edit_kernel, sampling._draw_kernel, truncation.bin_kernel, truncation.cut_kernel,
        scoring._score_kernel, scoring._list_kernel, scoring._merge_kernel,
    )  # fmt: skip
    return sum(len(cache[0]) for kernel in kernels for cache in getattr(kernel, "device_caches", {}).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 128256, 152064])
    parser.add_argument(
        "--params", nargs="+", choices=PARAMS, default=[*PARAMS], help="ways of sampling (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=400, help="of timing, at most")
    parser.add_argument("--against", type=Path, help="a folder with another version of fastgen/, to be timed as well")
    parser.add_argument("--times", action="store_true", help="(what --against starts: time only, and print JSON)")
    parser.add_argument("--tune", action="store_true", help="also time other constants")
    parser.add_argument("--smoke", action="store_true", help="small, to see that it runs")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not (args.smoke and INTERPRETED):
        parser.error("there is no GPU here; --smoke with TRITON_INTERPRET=1 runs without")
    if args.smoke:
        args.rows, args.vocab = [1, 2], [5000]
    if args.times:
        for timing in sweep(args, device, bandwidth(device), time.monotonic() + args.seconds):
            print(json.dumps(asdict(timing)), flush=True)
        return
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none", "near": {}}
    for vocab in args.vocab:
        found["near"][vocab] = check(vocab, device)
        print(f"V = {vocab}: as the twin; {found['near'][vocab]} draws within rounding of another token", flush=True)
    before, rate, deadline = compiled(), bandwidth(device), time.monotonic() + args.seconds
    timings = []
    for timing in sweep(args, device, rate, deadline):
        show(timing)
        timings.append(timing)
    found["timings"] = [asdict(timing) for timing in timings]
    found["compiled while timing"] = compiled() - before
    print(f"compiled while timing: {found['compiled while timing']}, which should be 0")
    if args.against:
        found["against"] = compare(args, timings)
    if args.tune:
        found["tuned"] = list(tune(device, rate, deadline))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
