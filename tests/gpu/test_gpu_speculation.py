"""Speculation on a GPU changes no bit where deterministic is on, in CUDA graphs and with steps launched ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import adversary_on_device
from known_models import KNOWN

from fastgen import Generator, SamplingParams, Speculation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")
EAGER = Speculation(row_cost=0.0, history_tokens=0)
GENERATED = 150


def params(number: int, speculate: bool = True) -> SamplingParams:
    """Parameters of a request, whose seed is its number."""
    temperature = (0.0, 0.7, 1.0)[number % 3]
    return SamplingParams(
        max_tokens=GENERATED, ignore_eos=True, seed=number, temperature=temperature, logprobs=1, speculate=speculate
    )


@pytest.mark.parametrize("name", [None, "Qwen/Qwen3-8B"])
def test_drafts_of_an_adversary_change_no_bit(name: str | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_seqs": 70}
    if name is not None:
        (tmp_path / "config.json").write_text(json.dumps({**KNOWN[name][0], "num_hidden_layers": 2}))
        options |= {"model": tmp_path, "load": "dummy"}
    options |= {"kv_cache_gb": 1.0, "max_model_len": 1024, "seed": 0, "deterministic": True, "prefix_cache": False}
    with Generator(speculate=EAGER, **options) as gen:
        for lanes in (1, 8, 20, 68):
            _compare(gen, lanes)


def _compare(gen: Generator, lanes: int) -> None:
    draw = torch.Generator().manual_seed(lanes)
    vocab, most = gen.model_config.vocab_size, gen._runner.config.speculate.most_lanes  # type: ignore[union-attr]
    prompts = [torch.randint(0, vocab, (5 + 37 * n % 200,), generator=draw).tolist() for n in range(lanes)]
    expected = gen.generate(prompts, [params(number, speculate=False) for number in range(lanes)])
    for adversarial in (False, True):
        before, ahead = gen.stats, list[bool]()
        with pytest.MonkeyPatch.context() as patch:
            _note_launches(patch, gen, ahead)
            if adversarial:
                adversary_on_device(patch, gen, expected)
            found = gen.generate(prompts, [params(number) for number in range(lanes)])
        for number, (right, other) in enumerate(zip(expected, found, strict=True)):
            assert other.completions == right.completions, f"request {number} of {lanes}, {adversarial=}"
        stats = gen.stats.since(before)
        if adversarial and lanes <= most:
            assert stats.drafted > stats.accepted > lanes * GENERATED / 3
        assert lanes > 1 or not adversarial or ahead.count(False) <= 6, "steps wait for each other"


def _note_launches(patch: pytest.MonkeyPatch, gen: Generator, ahead: list[bool]) -> None:
    """Append to `ahead` whether each step is launched while the one before is in flight."""
    launch = gen._runner.launch
    patch.setattr(gen._runner, "launch", lambda batch: ahead.append(gen._loop.in_flight is not None) or launch(batch))
