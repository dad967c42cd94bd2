"""deterministic=True on the CPU: the same to the bit under random schedules, in whatever dtype."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bitwise import alone, answers, preempting, random_options, random_requests
from conftest import VOCAB

from fastgen import Generator

CONTEXT = 200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_schedule_never_shows(dtype: str, llama: Path) -> None:
    requests = random_requests(VOCAB, 6, CONTEXT // 2, 20)
    with Generator(llama, dtype=dtype, deterministic=True) as gen:
        assert gen.config.deterministic
        expected = alone(gen, requests)
    seen: Counter[str] = Counter()
    for seed in range(3):
        with Generator(llama, dtype=dtype, deterministic=True, **random_options(seed, CONTEXT)) as gen:
            preempting(gen, steps=19)
            for _ in range(2):  # with a cold cache and a warm one
                assert answers(gen, requests) == expected, f"random_options({seed}, {CONTEXT})"
            seen["preempted"] += gen.stats.preemptions
            seen["cached"] += gen.stats.cached_tokens
    assert seen["preempted"] > 10
    assert seen["cached"] > 100
