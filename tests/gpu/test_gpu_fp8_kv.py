"""The KV cache in fp8 on a GPU: its bytes are the twin's, answers have the same bits under any schedule and with pages
that come back from the host, and logprobs are near those with a cache in bfloat16."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import alone, answers, preempting, random_options, random_requests
from test_gpu_fp8 import folder  # noqa: F401

from fastgen import Generator, SamplingParams
from fastgen.kernels import fp8_pages
from fastgen.kernels.rope import SlotMapping, rope_write
from fastgen.model.attention import shared

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="there is no GPU with fp8"
)
OPTIONS: dict[str, Any] = {"device": "cuda", "seed": 0, "num_pages": 200, "kv_cache_dtype": "fp8"}


def test_bytes_are_those_of_the_twin() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(300, (8 + 2 * 2) * 128, device="cuda", dtype=torch.bfloat16)
    angles, slots = torch.randn(300, 64, device="cuda"), torch.randperm(640, device="cuda")[:300]
    mapping = SlotMapping(torch.arange(300, device="cuda"), slots, angles.cos(), angles.sin(), 300, 2, 64)
    found = []
    for run in (rope_write.launch, rope_write.twin):
        memory = torch.zeros(2, 10, 2, fp8_pages.head_bytes(64, 128), dtype=torch.uint8, device="cuda")
        run(qkv, mapping, *fp8_pages.numbers_of(memory, 64, 128))
        found.append(memory)
    assert torch.equal(found[0][1], found[1][1]), "values"
    assert (found[0] != found[1]).float().mean() < 1e-3, "keys, which the kernel rotates without fused multiply-adds"


def test_the_schedule_never_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    options = {**OPTIONS, "load": "dummy"}
    requests = random_requests(4096, 24, 300, 40)
    with Generator(folder, **options) as gen:
        assert gen.config.deterministic
        expected = alone(gen, requests)
    for seed in (0, 2):
        monkeypatch.setattr(shared, "SHARING_PAYS", 1 if seed else 16e6)
        monkeypatch.setattr(shared, "FILLS", 0 if seed else 0.5)
        other = {**options, **random_options(seed, 400), "speculate": "ngram" if seed else False}
        with Generator(folder, **other, deterministic=True, host_cache_gb=0.01 * other["prefix_cache"]) as gen:
            assert answers(preempting(gen, 29) if seed == 2 else gen, requests) == expected, seed


def test_pages_come_back_from_the_host_and_out_of_a_sleep(folder: Path) -> None:  # noqa: F811
    draw = random_requests(4096, 12, 300, 20)
    with Generator(folder, **OPTIONS, load="dummy") as gen:
        expected = alone(gen, draw)
    few = {**OPTIONS, "num_pages": 24, "page_size": 16, "max_model_len": 360, "host_cache_gb": 0.05}
    with Generator(folder, **few, load="dummy", deterministic=True) as gen:
        for _ in range(2):
            assert alone(gen, draw) == expected
        gen.sleep()
        gen.wake()
        assert alone(gen, draw) == expected


@pytest.mark.parametrize("page_size", [64, 32])  # with 32, decodes do not run in Gluon
def test_answers_are_near_those_of_bfloat16(folder: Path, page_size: int) -> None:  # noqa: F811
    prompts = [[(7 * at + start) % 4096 for at in range(200)] for start in range(20)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
    found = {}
    for dtype in ("auto", "fp8"):
        options = {**OPTIONS, "kv_cache_dtype": dtype, "page_size": page_size}
        with Generator(folder, **options, load="dummy") as gen:
            found[dtype] = [x for out in gen.generate(prompts, params) for x in (out.prompt_logprobs or [])[1:]]
    errors = [abs(one - other) for one, other in zip(found["auto"], found["fp8"], strict=True)]
    assert not any(map(math.isnan, errors))
    assert 0 < sum(errors) / len(errors) < 0.05
