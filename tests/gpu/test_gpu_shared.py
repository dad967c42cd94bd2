"""Sharing changes no answer on a GPU: prefixes are cached, forked, and read once for all sequences that share them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_gpu_graphs import check_replay

from fastgen import Generator, SamplingParams
from fastgen.engine.cuda_graphs import smallest_size
from fastgen.model.attention import shared
from fastgen.request import Completion

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

PARAMS = SamplingParams(n=3, max_tokens=40, seed=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SHARING_PAYS", 1)
    monkeypatch.setattr(shared, "FILLS", 0)


def tree_prompts(vocab_size: int) -> list[list[int]]:
    """Return a system prompt with few-shot prompts, each followed by questions (some asked twice), and an unrelated
    prompt."""
    draw = random.Random(3)

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    system = ids(200)
    shots = [system + ids(count) for count in (100, 37, 64)]
    questions = [shot + ids(count) for shot in shots for count in (1, 9, 30)]
    return [*questions, questions[0], questions[4], ids(150)]


def answers(dtype: str = "float32", shares: bool = True, rounds: int = 1, **options: Any) -> list[list[Completion]]:
    found = []
    with Generator(device="cuda", dtype=dtype, max_model_len=1024, **options) as gen:
        gen._runner.attention.prefixes.wanted = shares
        for _ in range(rounds):
            outputs = gen.generate(tree_prompts(gen.model_config.vocab_size), PARAMS)
            found = [output.completions for output in outputs]
    return found


def tokens(completions: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for several in completions for completion in several]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(answers(shares=False, prefix_cache=False))


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 64},
        {"page_size": 16, "rounds": 2, "max_step_tokens": 100, "max_seqs": 20},  # a warm cache, and chunks
        # The pool holds little more than one sequence, and the host tier not everything that is evicted.
        {"page_size": 16, "num_pages": 70, "max_seqs": 8, "rounds": 3, "host_cache_gb": 0.004},
    ],
)
def test_in_float32_nothing_changes(options: dict[str, Any], expected: list[list[int]]) -> None:
    assert tokens(answers(**options)) == expected


def test_in_bfloat16_nothing_changes() -> None:
    mode: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
    assert answers(**mode) == answers(shares=False, prefix_cache=False, **mode)


def test_a_replayed_step_is_the_launched_one() -> None:
    with Generator(device="cuda", max_model_len=1024, max_seqs=64, seed=0) as gen:
        for prompt in tree_prompts(gen.model_config.vocab_size):
            gen.add(prompt, PARAMS)
        for _ in range(6):
            gen.step()
        gen._loop.drain()
        runner, real = gen._runner, gen.stats.running
        assert real == len(tree_prompts(4)) * PARAMS.n
        assert runner.prefixes is not None
        assert runner.prefixes.rows.ends.any(), "rows share keys"
        size = smallest_size(runner.graphs[True].keys, real)
        check_replay(runner, size, real, runner.decode_body, shared=True)  # the last: each row for itself
