"""Measures, as `bench.py gpu --heads`, generated tokens per second with heads of random weights, DFlash and
EAGLE-3, and with an int4 copy of the model that drafts.

Random weights draft nothing that is right. So the answers are recorded, as in bench_speculate.py, and after the head
has run, its drafts are replaced by recorded tokens, each of which is right with the same probability, so that a step
yields as many tokens on average as was reported for real heads (ACCEPTANCE). Costs are real: the context that each step
keeps, the head, and the rows that verify. The streams run without a head, then with one in a Generator of its own. The
report is written after each of them, so that a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench_engine import ready_generator, write_report
from bench_limits import settings
from bench_speculate import Stream, recorded, requests

from fastgen import Generator, SamplingParams, Speculation
from fastgen.speculation.drafting import Drafting
from fastgen.speculation.head import Head
from fastgen.speculation.planning import DraftPlan

ACCEPTANCE = {"DFlash": 3.1, "EAGLE-3": 2.6, "int4": 3.44}
"""Tokens per step: of heads for Qwen3-8B on MT-Bench at temperature 1 (DSpark's paper, table 1), and of an int4 copy
each of whose 3 drafts is right with a probability of 0.9, which is an assumption."""

BLOCK, LAYERS = 16, 5
STREAMS = {
    "chat1": Stream(1, 0.0, uniform=True, prompt=512, generated=384),
    "chat8": Stream(8, 0.0, uniform=True, prompt=512, generated=384),
}
REPEATS = 3


@contextmanager
def head_folder(model: str, kind: str, smoke: bool) -> Iterator[Path | str]:
    """Yield a folder with the config.json of a head for a model: DFlash with a block of 16, or EAGLE-3 with 4 drafts
    and a vocabulary of 32,000 tokens. For an int4 copy, yield "int4", since it has no folder."""
    if kind == "int4":
        yield kind
        return
    config = settings(model, smoke)
    target = config["num_hidden_layers"]
    count = 1 if smoke else LAYERS
    ids = [0] if smoke else [round(1 + i * (target - 4) / (count - 1)) for i in range(count)]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
             "rope_theta", "vocab_size", "max_position_embeddings", "head_dim")  # fmt: skip
    head = {name: config[name] for name in names if name in config}
    if kind == "DFlash":
        head |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": count,
                 "block_size": BLOCK, "dflash_config": {"mask_token_id": 5, "target_layer_ids": ids}}  # fmt: skip
    else:
        head |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "target_layer_ids": ids[:3],
                 "draft_vocab_size": 200 if smoke else 32000}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(head))
        yield Path(folder)


def head_of(generator: Generator) -> Head:
    drafting = generator._runner.features[DraftPlan]
    assert isinstance(drafting, Drafting)
    assert drafting.head is not None
    return drafting.head


def rate_of(acceptance: float, drafts: int) -> float:
    """Return the probability that a draft after right ones is right, for so many tokens per step of so many drafts."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(drafts + 1)) < acceptance else (low, rate)
    return low


@contextmanager
def simulated(generator: Generator, answers: list[list[int]], rate: float) -> Iterator[None]:
    """Let drafts be right with probability `rate`. answers: prompts and answers by the seed of the request."""
    head, lanes = head_of(generator), generator._runner.lanes
    device, vocab = lanes.kv_lens.device, generator.model_config.vocab_size
    script = torch.tensor(answers, device=device)
    right = head.draft

    def draft(drawn: Any, plan: Any, rows: Any, tokens: Any, counts: Any) -> bool:
        drafted = right(drawn, plan, rows, tokens, counts)
        if drafted:
            own = drawn.lanes
            at = lanes.kv_lens[own].long()[:, None] + 1 + torch.arange(tokens.shape[1], device=device)
            numbers = lanes.state.table[own, 0].clamp(0, len(answers) - 1)
            good = script[numbers[:, None], at.clamp(max=script.shape[1] - 1)]
            wrong = torch.rand(good.shape, device=device) >= rate
            tokens[own] = torch.where(wrong, (good + 1) % vocab, good)
        return drafted

    with mock.patch.object(head, "draft", draft):
        yield


def measure(generator: Generator, stream: Stream, rate: float | None, speculate: bool = True) -> dict[str, Any]:
    """Run a stream REPEATS times. rate: see `simulated`; None: the Generator has no head, or does not use it."""
    prompts, answers, _ = requests(stream, generator.model_config.vocab_size, 0)
    shared = SamplingParams(max_tokens=stream.generated, ignore_eos=True, speculate=speculate)
    params, rates, before = [replace(shared, seed=number) for number in range(stream.lanes)], [], generator.stats
    known = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    with recorded(generator, prompts, answers), nullcontext() if rate is None else simulated(generator, known, rate):
        for _ in range(REPEATS):
            start = time.perf_counter()
            outputs = generator.generate(prompts, params)
            rates.append(stream.lanes * stream.generated / (time.perf_counter() - start))
            if [output.completions[0].token_ids for output in outputs] != answers:
                raise RuntimeError("the answers are not the recorded ones")
    stats = generator.stats.since(before)
    return {
        "tokens_per_second": statistics.median(rates), "spread": [min(rates), max(rates)],
        "tokens_per_step": stream.generated * stream.lanes * REPEATS / stream.lanes / stats.steps,
        "head_drafted": stats.head_drafted, "head_accepted": stats.head_accepted,
    }  # fmt: skip


def time_head(generator: Generator) -> dict[str, float]:
    """Return the microseconds of a head's CUDA graphs by the number of lanes."""
    head, found = head_of(generator), {}
    for size in head.graphs.keys if head.graphs is not None else ():
        if size in (1, 2, 4, 8, 16, 32):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            head.graphs.run(size)
            start.record()
            for _ in range(50):
                head.graphs.run(size)
            end.record()
            torch.cuda.synchronize()
            found[str(size)] = start.elapsed_time(end) / 50 * 1000
    return found


@dataclass
class Report:
    """The figures so far. streams: the results of each stream by the case. head_us: see `time_head`, by the kind."""

    arguments: argparse.Namespace
    streams: dict[str, dict[str, Any]] = field(default_factory=dict)
    head_us: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, case: str, result: dict[str, Any]) -> None:
        """Print and write the result of a case of a stream, the first of which is plain."""
        results = self.streams.setdefault(name, {})
        plain = results.get("plain", result)["tokens_per_second"]
        results[case] = {**result, "times_plain": result["tokens_per_second"] / plain}
        rate = f"{result['tokens_per_second']:8.1f} tok/s, {results[case]['times_plain']:.2f} times plain"
        print(f"{name:6} {case:25} {rate}, {result['tokens_per_step']:.2f} tokens per step", flush=True)
        self.write()

    def write(self) -> None:
        write_report(self.arguments, "heads", {"streams": self.streams, "head_us": self.head_us}, show=False)


def bench_heads(arguments: argparse.Namespace) -> None:
    smoke, report = arguments.smoke, Report(arguments)
    streams = {name: replace(each, prompt=60, generated=40) if smoke else each for name, each in STREAMS.items()}
    options: dict[str, Any] = {"prefix_cache": False}
    with ready_generator(arguments, speculate=False, **options) as (generator, _):
        for name, stream in streams.items():
            report.add(name, "plain", measure(generator, stream, None))
    for kind, acceptance in ACCEPTANCE.items():
        if kind == "int4" and arguments.quantization:
            continue
        with head_folder(arguments.model, kind, smoke) as folder:
            speculate = Speculation(head=folder, history_tokens=0, max_draft=3 if kind == "int4" else 15)
            with ready_generator(arguments, speculate=speculate, **options) as (generator, _):
                rate = rate_of(acceptance, head_of(generator).most)
                for name, stream in streams.items():
                    cases = {
                        f"{kind} unused": (None, False),
                        f"{kind} accepting {acceptance}": (rate, True),
                        f"{kind} accepting nothing": (0.0, True),
                    }
                    for case, (accepted, used) in cases.items():
                        report.add(name, case, measure(generator, stream, accepted, used))
                report.head_us[kind] = time_head(generator)
                print(f"{kind}: {report.head_us[kind]} us", flush=True)
                report.write()
