"""A job that rewrites web documents, for `bench.py gpu --data`, as datatrove's benchmark of vLLM does: 10,000 documents
of fineweb-edu, each after the prompt "tutorial", in a context of 8,192 tokens at temperature 0.

- prompts: 64 common tokens (the instruction and the chat template), then a document. Its length is log-normal with mean
  1,032, since sample-350BT has 350e9 tokens in 339e6 documents; the sigma of 1 is our guess. datatrove cuts documents
  at 3 * (8192 - 4096) characters, about 2,700 tokens.
- answers: log-normal with mean 359, the mean of FinePhrase, which SmolLM2 1.7B wrote (486e9 tokens in 1.35e9 answers);
  the sigma of 0.6 is our guess. Each runs to its length, at most 4,096.
- plain: without speculation. drafts, missed: with drafts from the text itself. Random weights at temperature 0 soon
  repeat themselves, so `drafts` accepts nearly all of them; `missed` draws at temperature 1 and accepts nearly none. A
  GPU drafts nothing while more than 32 sequences run: both then show what it costs to have speculation on.

With --data-parallel N, a GeneratorPool runs the job on N GPUs, and only the rate of the whole job is measured.

The steady rate is that of the time in which all lanes are in use: from when as many answers have ended as sequences
run, until the last document was read. It needs several times as many documents as lanes. With --seconds N, the job ends
after N seconds of it, and only the steady rate is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from bench_engine import Watch, dummy_folder, engine_options, ready_generator, write_report
from bench_limits import settings
from bench_requests import Draw

from fastgen import Generator, GeneratorPool, Request, SamplingParams

DOCUMENTS, CONTEXT, INSTRUCTION = 10_000, 8192, 64
DOCUMENT, DOCUMENT_SIGMA, LONGEST = 626, 1.0, 2700
ANSWER, ANSWER_SIGMA, MAX_TOKENS = 300, 0.6, 4096
PARTS = {"plain": ("off", 0.0), "drafts": ("ngram", 0.0), "missed": ("ngram", 1.0)}
"""{part: (value of speculate, temperature)}"""


def bench_data(arguments: argparse.Namespace) -> None:
    small = arguments.smoke
    context = arguments.max_model_len = arguments.max_model_len or (256 if small else CONTEXT)
    documents = arguments.documents or (12 if small else DOCUMENTS)
    if arguments.data_parallel > 1:
        report = measure_pool(arguments, documents)
        print(f"{arguments.data_parallel} GPUs: {report['tokens_per_second']:.1f} tok/s", flush=True)
        write_report(arguments, "data", {f"data_parallel_{arguments.data_parallel}": report}, show=False, keep=True)
        return
    for part in arguments.only or PARTS:
        speculate, temperature = PARTS[part]
        with ready_generator(arguments, speculate=speculate, max_model_len=context) as (gen, ready):
            vocab_size, stats = gen.model_config.vocab_size, lambda gen=gen: gen.stats.generated_tokens
            job = Job(vocab_size, documents, temperature, small, stats)
            found = {"ready_seconds": ready, **measure_job(gen, job, arguments.seconds)}
        names = {"tokens_per_second": "tok/s", "steady_tokens_per_second": "tok/s with all lanes in use"}
        rates = [f"{found[name]:.1f} {words}" for name, words in names.items() if found[name]]
        print(f"{part}: {', '.join(rates)}; {found['lanes']} lanes", flush=True)
        write_report(arguments, "data", {part: found}, show=False, keep=True)


class Job:
    """The requests of a job, which the engine reads as it needs them. generated: function that returns the number of
    tokens generated so far. read_all: when the last request was read, and the tokens generated until then."""

    def __init__(
        self, vocab_size: int, documents: int, temperature: float, small: bool, generated: Callable[[], int] = int
    ) -> None:
        self._generated, self._temperature, self._draw = generated, temperature, Draw(1, vocab_size)
        size, answer = (24, 8) if small else (DOCUMENT, ANSWER)
        around = self._draw.around
        self.lengths = [
            (around(size, DOCUMENT_SIGMA, 1, min(LONGEST, 4 * size)), around(answer, ANSWER_SIGMA, 1, MAX_TOKENS))
            for _ in range(documents)
        ]
        self.read_all = (0.0, 0)

    def requests(self) -> Iterator[Request]:
        instruction = self._draw.ids(INSTRUCTION)
        for size, answer in self.lengths:
            params = SamplingParams(temperature=self._temperature, max_tokens=answer, ignore_eos=True)
            yield Request(instruction + self._draw.ids(size), params)
        self.read_all = time.perf_counter(), self._generated()


def measure_job(gen: Generator, job: Job, limit: float | None) -> dict[str, Any]:
    """Return the figures of a job. limit: seconds of the steady rate after which it ends, or None for all of it."""
    before, begun, stopped = gen.stats, None, False
    ends: list[float] = []
    with Watch(gen) as watch, closing(gen.stream(job.requests())) as outputs:
        start = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a document failed: {output.error}")
            now, stats = time.perf_counter(), gen.stats
            ends.append(now - start)
            if begun is None and len(ends) >= stats.running:
                begun = now, stats.generated_tokens
            if stopped := begun is not None and limit is not None and now - begun[0] >= limit:
                break
        seconds = time.perf_counter() - start
        after = gen.stats
    tokens = after.generated_tokens - before.generated_tokens
    if not stopped and tokens != (asked := sum(answer for _, answer in job.lengths)):
        raise RuntimeError(f"{tokens} tokens instead of {asked}")
    assert begun is not None
    end = job.read_all if job.read_all[0] else (start + seconds, after.generated_tokens)
    steady = [last - first for first, last in zip(begun, end, strict=True)]
    names = ("prompt_tokens", "steps", "preemptions", "cached_tokens", "drafted", "accepted")
    return {
        "documents": len(ends),
        "generated_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": None if stopped else tokens / seconds,
        "ended_at": None if stopped else tenths(ends),
        "steady_seconds": max(steady[0], 0.0),
        "steady_tokens_per_second": steady[1] / steady[0] if steady[0] > 0 else None,
        "lanes": watch.lanes,
        **{name: getattr(after, name) - getattr(before, name) for name in names},
    }


def measure_pool(arguments: argparse.Namespace, documents: int) -> dict[str, Any]:
    """Return the figures of the part `plain` with a GeneratorPool."""
    job = Job(settings(arguments.model, arguments.smoke)["vocab_size"], documents, 0.0, arguments.smoke)
    tokens, drawn = sum(answer for _, answer in job.lengths), 0
    ends: list[float] = []
    with dummy_folder(arguments.model, arguments.smoke) as folder:
        options = {**engine_options(arguments), "data_parallel": arguments.data_parallel}
        with GeneratorPool(folder, **options) as pool:
            pool.generate([[7] * 128] * 64, SamplingParams(max_tokens=16, ignore_eos=True))
            start = time.perf_counter()
            for output in pool.stream(job.requests()):
                drawn += len(output.completions[0].token_ids)
                ends.append(time.perf_counter() - start)
    if drawn != tokens:
        raise RuntimeError(f"{drawn} tokens instead of {tokens}")
    return {
        "documents": documents,
        "generated_tokens": tokens,
        "seconds": ends[-1],
        "tokens_per_second": tokens / ends[-1],
        "ended_at": tenths(ends),
    }


def tenths(ends: list[float]) -> list[float]:
    """Return when each tenth of the answers had ended. ends: of each answer, in ascending order."""
    return [round(ends[-(-len(ends) * tenth // 10) - 1], 2) for tenth in range(1, 11)]
