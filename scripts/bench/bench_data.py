"""A job that rewrites web documents, for `bench.py gpu --data`, as datatrove's benchmark of vLLM does: 10,000 documents
of fineweb-edu, each after the prompt "tutorial", in a context of 8,192 tokens at temperature 0.

- prompts: 64 common tokens (the instruction and the chat template), then a document. Its length is log-normal with mean
  1,032, since sample-350BT has 350e9 tokens in 339e6 documents; the sigma of 1 is our guess. datatrove cuts documents
  at 3 * (8192 - 4096) characters, about 2,700 tokens.
- answers: log-normal with mean 359, the mean of FinePhrase, which SmolLM2 1.7B wrote (486e9 tokens in 1.35e9 answers);
  the sigma of 0.6 is our guess. Each runs to its length, at most 4,096.
- plain: without speculation. drafts, missed: with drafts from the text itself. Random weights at temperature 0 soon
  repeat themselves, so `drafts` accepts nearly all of them, which is the most that they can gain; `missed` draws at
  temperature 1 and accepts nearly none, which is what they cost. A real model is in between.

With --data-parallel N, a GeneratorPool runs the job on N GPUs, and only the rate of the whole job is measured.

The steady rate is that from the first finished answer until the last document was read, while all lanes are in use. It
needs several times as many documents as lanes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
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
            job = {"ready_seconds": ready, **measure_job(gen, Job(vocab_size, documents, temperature, small, stats))}
        steady = job["steady_tokens_per_second"]
        more = f", {steady:.1f} while documents were left" if steady else ""
        print(f"{part}: {job['tokens_per_second']:.1f} tok/s{more}; {job['lanes']} lanes", flush=True)
        write_report(arguments, "data", {part: job}, show=False, keep=True)


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


def measure_job(gen: Generator, job: Job) -> dict[str, Any]:
    """Return the figures of a job."""
    before, first_end = gen.stats, None
    with Watch(gen) as watch:
        start = time.perf_counter()
        for output in gen.stream(job.requests()):
            if output.error is not None:
                raise RuntimeError(f"a document failed: {output.error}")
            first_end = first_end or (time.perf_counter(), gen.stats.generated_tokens)
        seconds = time.perf_counter() - start
    after = gen.stats
    tokens = sum(answer for _, answer in job.lengths)
    if after.generated_tokens - before.generated_tokens != tokens:
        raise RuntimeError(f"{after.generated_tokens - before.generated_tokens} tokens instead of {tokens}")
    assert first_end is not None
    steady = [end - begin for begin, end in zip(first_end, job.read_all, strict=True)]
    names = ("steps", "preemptions", "cached_tokens", "drafted", "accepted")
    return {
        "documents": len(job.lengths),
        "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
        "generated_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "steady_tokens_per_second": steady[1] / steady[0] if steady[0] > 0 else None,
        "lanes": watch.lanes,
        **{name: getattr(after, name) - getattr(before, name) for name in names},
    }


def measure_pool(arguments: argparse.Namespace, documents: int) -> dict[str, Any]:
    """Return the figures of the part `plain` with a GeneratorPool."""
    job = Job(settings(arguments.model, arguments.smoke)["vocab_size"], documents, 0.0, arguments.smoke)
    tokens = sum(answer for _, answer in job.lengths)
    with dummy_folder(arguments.model, arguments.smoke) as folder:
        options = {**engine_options(arguments), "data_parallel": arguments.data_parallel}
        with GeneratorPool(folder, **options) as pool:
            pool.generate([[7] * 128] * 64, SamplingParams(max_tokens=16, ignore_eos=True))
            start = time.perf_counter()
            drawn = sum(len(output.completions[0].token_ids) for output in pool.stream(job.requests()))
            seconds = time.perf_counter() - start
    if drawn != tokens:
        raise RuntimeError(f"{drawn} tokens instead of {tokens}")
    return {
        "documents": documents,
        "generated_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
