"""Time steps with variants of the decode kernel, in turn, and compare their bits."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import bench_engine
import bench_gpu
import sweep_ahead
import torch
from bench_limits import WORKLOADS, Workload
from bench_step import Steps, compare, kernels

from fastgen import Generator, SamplingParams
from fastgen.kernels import fp8, hopper_decode
from fastgen.kernels.ahead import compile_ahead
from fastgen.request import Batch, LaneStart

NEW: dict[str, Any] = {"EARLY": 1, "IDLE": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "old": {},
    "new": NEW,
    "new 132": NEW | {"SPLIT_PROGRAMS": 132},
    "new 198": NEW | {"SPLIT_PROGRAMS": 198},
    "new p1": NEW | {"PROGRAMS": 1},
    "whole": NEW | {"SPLIT_BELOW": 0},
    "whole 132": NEW | {"SPLIT_BELOW": 0, "WHOLE_PROGRAMS": 132},
    "whole 264": NEW | {"SPLIT_BELOW": 0, "WHOLE_PROGRAMS": 264},
    "whole p1": NEW | {"PROGRAMS": 1, "SPLIT_BELOW": 0},
    "whole p1 132": NEW | {"PROGRAMS": 1, "SPLIT_BELOW": 0, "WHOLE_PROGRAMS": 132},
    "old again": {},
}
MORE = {
    "keys400": Workload(1, 400, 256),
    "keys700": Workload(1, 700, 256),
    "chat4": Workload(4, 128, 256),
    "chat16": Workload(16, 128, 256),
}


def change_of(settings: dict[str, Any]) -> Any:
    def change(stack: ExitStack) -> None:
        for name, value in settings.items():
            stack.enter_context(patch.object(hopper_decode, name, value))

    return change


def sweep(generator: Generator, name: str, workload: Workload) -> None:
    runner: Any = generator._runner
    steps = Steps(generator, workload.sequences, workload.prompt + workload.generated // 2)
    changes = {
        each: change_of(settings) for each, settings in VARIANTS.items() if name != "longchat" or "whole" not in each
    }

    def all_of_them() -> None:
        for change in changes.values():
            with ExitStack() as stack:
                change(stack)
                steps.reset()
                steps.step()

    compile_ahead(all_of_them, runner.device)
    runs = {each: steps.captured(change) for each, change in changes.items()}
    tokens = runner.lanes.state.last_token.clone()
    before, expected, wrong = steps.keys, {}, []
    for each, run in runs.items():
        for keys in (before - 56, before - 20, before - 1, before):  # each step reads only what earlier ones here wrote
            steps.keys = keys
            steps.reset()
            runner.lanes.state.last_token.copy_(tokens)
            run()
            found = runner._logits[: steps.count].clone()
            if not torch.equal(found, expected.setdefault(keys, found)) or not bool(found.isfinite().all()):
                wrong.append(f"{each} at {keys} keys")
    steps.keys = before
    steps.reset()
    times = compare(steps, runs, 2)
    print(f"{name}: {steps.count} lanes, {before} keys; OTHER BITS: {wrong}")
    for each, us in times.items():
        print(f"  {each:20} {us:9.1f} us, {us / times['old'] - 1:+7.2%}", flush=True)


def share(generator: Generator, name: str, groups: int, samples: int, common: int, prompt: int, keys: int) -> None:
    """Print the kernels of a step of lanes that share pages: those of `common` keys all, of `prompt` keys a group."""
    runner: Any = generator._runner
    lanes, page = groups * samples, generator.config.page_size
    steps = Steps(generator, 1, 64)
    params = SamplingParams(temperature=1)
    fresh = iter(range(generator.config.num_pages))
    first = [next(fresh) for _ in range(common // page)]
    updates = []
    for group in range(groups):
        shared = first + [next(fresh) for _ in range(prompt // page)]
        for lane in range(group * samples, (group + 1) * samples):
            own = [next(fresh) for _ in range(-(-(keys + 64) // page))]
            updates.append((lane, 0, tuple(shared + own)))
    starts = tuple(LaneStart(lane, params, seed=lane, prompt_len=keys) for lane in range(lanes))
    steps.count, steps.keys, steps.batch = lanes, common + prompt + keys, Batch(decodes=tuple(range(lanes)))
    runner.lanes.apply(Batch(starts=starts, page_updates=tuple(updates)))
    runner.lanes.set_decodes(steps.batch.decodes)
    for wanted in (True, False):
        if runner.prefixes is not None:
            runner.prefixes.wanted = wanted
            runner.prefixes.forget()
        steps.reset()
        steps.engine()
        bench_engine.wait(runner.device.type)
        found = getattr(runner.prefixes, "_found", None)
        us = [steps.microseconds(steps.engine) for _ in range(4)][1:]
        print(f"{name}: {lanes} lanes, shared {wanted}, found {found}, {min(us):.0f} us")
        for row in kernels(steps, steps.engine)[:9] if steps.runner.device.type == "cuda" else []:
            each = f"{row['per_step']:6.1f} x {row['us']:8.2f} us"
            print(f"  {row['name']:50} {each} = {row['us_per_step']:9.1f} us", flush=True)


def prefills(generator: Generator, smoke: bool) -> None:
    """Time prefills with and without `_fall_behind` and `_prefetch`, in turn."""
    size, count = (20, 8) if smoke else (1056, 64)
    prompts = [torch.randint(3, 300, (size,), generator=torch.manual_seed(n)).tolist() for n in range(count)]
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    variants, times, tokens = sweep_ahead.modules(), defaultdict(list), set()

    def run(name: str) -> float:
        fp8.hopper_fp8 = variants[name]  # type: ignore[attr-defined]
        start = time.perf_counter()
        outputs = generator.generate(prompts, params)
        tokens.add(str([(each.completions[0].token_ids, each.completions[0].logprobs) for each in outputs]))
        return time.perf_counter() - start

    if not smoke:
        with torch.inference_mode():
            sweep_ahead.compile_all(variants)
    for name in variants:
        run(name)
    for _ in range(1 if smoke else 4):
        for name in variants:
            times[name].append(run(name))
    for name, each in times.items():
        share = min(each) / min(times["both"]) - 1
        print(f"{count} x {size} {name:12} {min(each) * 1e3:8.1f} ms, {share:+.2%}", [f"{x * 1e3:.0f}" for x in each])
    print("results of prefills:", len(tokens), flush=True)


def main() -> None:
    arguments = bench_gpu.parse(["--step", *sys.argv[1:]])
    names = arguments.only or ["chat1", "chat8", "chat32"]
    trees = "group" in names
    several = {n: MORE[n] for n in os.environ.get("MORE", "").split(",") if n}
    several |= {n: Workload(4, 24, 80) if arguments.smoke else WORKLOADS[n] for n in names if n != "group"}
    most = 512 if trees and not arguments.smoke else max([4, *(each.sequences for each in several.values())])
    with bench_engine.ready_generator(arguments, max_seqs=most, prefix_cache=False) as (generator, _):
        pool = generator._runner.pool
        for layer in (*pool.keys, *pool.values):
            layer.normal_()
        with torch.inference_mode():
            for name, workload in several.items():
                sweep(generator, name, workload)
            if trees and arguments.smoke:
                share(generator, "group", 2, 2, 0, 64, 20)
            elif trees:
                share(generator, "group", 32, 16, 0, 1024, 256)
                share(generator, "tree", 32, 16, 2048, 512, 128)
        if arguments.quantization == "fp8" or arguments.smoke:
            prefills(generator, arguments.smoke)


if __name__ == "__main__":
    main()
