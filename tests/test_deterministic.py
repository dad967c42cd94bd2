"""deterministic=True on the CPU: the same bits under random schedules in each dtype, and KV caches in fp8."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bitwise import alone, answers, preempting, random_options, random_requests
from conftest import VOCAB

from fastgen import Generator, SamplingParams
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.model.config import read_config

CONTEXT = 200


@pytest.mark.parametrize(("dtype", "kv"), [("float32", "auto"), ("bfloat16", "auto"), ("float32", "fp8")])
def test_the_schedule_never_shows(dtype: str, kv: str, llama: Path) -> None:
    requests = random_requests(VOCAB, 6, CONTEXT // 2, 20)
    with Generator(llama, dtype=dtype, kv_cache_dtype=kv, deterministic=True) as gen:
        assert gen.config.deterministic
        expected = alone(gen, requests)
    seen: Counter[str] = Counter()
    for seed in range(2):
        options = random_options(seed, CONTEXT) | {"dtype": dtype, "kv_cache_dtype": kv}
        with Generator(llama, deterministic=True, **options, host_cache_gb=0.001 * options["prefix_cache"]) as gen:
            preempting(gen, steps=19)
            for _ in range(2):  # with a cold cache and a warm one
                assert answers(gen, requests) == expected, f"random_options({seed}, {CONTEXT})"
            seen["preempted"] += gen.stats.preemptions
            seen["cached"] += gen.stats.cached_tokens
    assert seen["preempted"] > 10
    assert seen["cached"] > 100


def test_a_kv_cache_in_fp8_changes_logprobs_a_little() -> None:
    """The bundled model's scores change little, and are the same to the bit again after a sleep."""
    chats = [[{"role": "user", "content": text}] for text in ("What is paged attention?", "What is 23 + 48?")]
    with Generator(device="cpu") as gen:
        outputs = gen.chat(chats, SamplingParams(temperature=0, max_tokens=40))
        ids = [output.prompt_token_ids + output.completions[0].token_ids for output in outputs]
        expected = gen.score(ids)
    with Generator(device="cpu", kv_cache_dtype="fp8") as gen:
        found = gen.score(ids)
        gen.sleep("kv_cache")
        gen.wake()
        assert gen.score(ids[:1])[0][1:] == found[0][1:]
    pairs = [pair for scores in zip(expected, found, strict=True) for pair in list(zip(*scores, strict=True))[1:]]
    apart = [abs(one - other) for one, other in pairs]
    assert 0 < sum(apart) / len(apart) < 0.2
    answers = [len(output.completions[0].token_ids) for output in outputs]
    of_answers = [
        abs(one - other)
        for count, *scores in zip(answers, expected, found, strict=True)
        for one, other in zip(*(each[-count:] for each in scores), strict=True)
    ]
    assert max(of_answers) < 0.2


def test_fp8_takes_a_byte_per_number_of_a_page(llama: Path) -> None:
    with pytest.raises(ValueError, match="attention is 'flash', whose kernels do not read fp8"):
        EngineConfig.make(read_config(llama), GeneratorOptions(device="cuda", attention="flash", kv_cache_dtype="fp8"))
    sizes = {}
    for kv in ("auto", "fp8"):
        options = GeneratorOptions(device="cpu", dtype="bfloat16", kv_cache_dtype=kv)
        sizes[kv] = EngineConfig.make(read_config(llama), options).page_bytes(read_config(llama))
    size = read_config(llama).head_size
    assert sizes["fp8"] / sizes["auto"] == (size + 1) / (4 * size), "the KV cache of the CPU is in float32"
