"""Several Hopper GPUs give a request the same bits under any schedule: in batches, chunks, halves of long steps, after
preemption, from cached pages, with drafts, and after a sleep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import Answer, Requests, alone, answers, preempting, random_options, random_requests
from test_gpu_deterministic import CONTEXT, MISTRAL

from fastgen import Generator, Speculation

HOPPERS = torch.cuda.device_count() > 1 and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPERS, reason="there are fewer than 2 Hopper GPUs that torch can use")

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GREATEST_UNCUT = 2047  # maximum number of tokens in a step that is not cut in halves


class Split:
    """A model on several GPUs, requests, and the answer to each request by itself."""

    def __init__(self, **how: Any) -> None:
        self.how: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "seed": 0, "tensor_parallel": RANKS} | how
        with self.generator(max_seqs=4, prefix_cache=False) as gen:
            assert gen.config.deterministic
            self.requests: Requests = random_requests(gen.model_config.vocab_size, 32, 640, 40)
            self.expected: list[Answer] = alone(gen, self.requests)

    def generator(self, **options: Any) -> Generator:
        return Generator(**self.how, **{"max_model_len": CONTEXT, "num_pages": 500} | options)

    def check(self, gen: Generator) -> None:
        """Check the answers to all requests at once, with a cold cache and a warm one."""
        for cache in ("cold", "warm"):
            found = answers(gen, self.requests)
            wrong = [number for number, each in enumerate(found) if each != self.expected[number]]
            assert not wrong, cache


@pytest.fixture(scope="module", params=["bundled", "mistral", "mistral in fp8", "mistral in int4"])
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    if request.param == "bundled":
        yield Split()
        return
    folder: Path = tmp_path_factory.mktemp("mistral")
    settings, how = MISTRAL, dict[str, Any]()
    if "int4" in request.param:
        settings, how = MISTRAL | {"torch_dtype": "float16", "quantization_config": AWQ}, {"dtype": "float16"}
    elif "fp8" in request.param:
        how = {"quantization": "fp8"}
    (folder / "config.json").write_text(json.dumps(settings))
    yield Split(model=folder, load="dummy", **how)


def test_in_halves_of_long_steps_and_after_a_sleep(split: Split) -> None:
    """Steps of thousands of tokens, which are cut in halves, and decodes of up to 64 rows."""
    with split.generator(max_seqs=64) as gen:
        split.check(gen)
        assert gen.stats.cached_tokens > 1000
        gen.sleep()
        gen.wake()
        split.check(gen)


def test_in_steps_that_are_just_too_short_for_halves(split: Split) -> None:
    """A sum of so many tokens takes several launches."""
    with split.generator(max_seqs=32, max_step_tokens=GREATEST_UNCUT, prefix_cache=False) as gen:
        split.check(gen)


def test_in_chunks_preempted_and_with_drafts(split: Split) -> None:
    always = Speculation(row_cost=0.0, history_tokens=0)
    with split.generator(**random_options(1, CONTEXT), speculate=always) as gen:
        preempting(gen, steps=29)
        split.check(gen)
        assert gen.stats.preemptions > 3
        assert gen.stats.drafted > 0
