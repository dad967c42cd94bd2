"""Hybrid models on a GPU: the same bits under any schedule, and as near to float32 as transformers is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import Requests, alone, answers, preempting, random_requests
from families import HYBRIDS, SIZES, load_reference, save_random
from torch import Tensor

from fastgen import Generator, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

CONTEXT = 2048
VOCAB = 1024
OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "max_model_len": CONTEXT, "memory_fraction": 0.3,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
LINEAR, FULL = "linear_attention", "full_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "two value heads per key head": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "as many value heads as key heads": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {"max_seqs": 16},
    "few lanes, short steps": {"max_seqs": 3, "max_step_tokens": 96},
    "few pages": {"max_seqs": 16, "max_step_tokens": 300, "num_pages": 40},
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights in bfloat16, with attention in two of six layers."""
    name, fields = HYBRIDS["qwen3_5"]
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 256,
        "num_hidden_layers": 6, "layer_types": [LINEAR, LINEAR, FULL] * 2, "initializer_range": 0.06,
        "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    made = tmp_path_factory.mktemp("hybrid")
    save_random(name, {**SIZES, **fields, **sizes, **SHAPES[request.param]}, made, torch.bfloat16)
    return made


@pytest.fixture(scope="module")
def requests() -> Requests:
    """Prompts on both sides of the borders of blocks, and some that begin alike."""
    draw = torch.Generator().manual_seed(0)
    found: Requests = random_requests(VOCAB, 10, 300, 70)
    for seed, length in enumerate((1, 63, 64, 65, 700, 1500)):
        ids = torch.randint(3, VOCAB, (length,), generator=draw).tolist()
        found.append((ids, SamplingParams(max_tokens=70, seed=seed, ignore_eos=True)))
    return found


def next_turns(requests: Requests, said: Any) -> Requests:
    params = SamplingParams(max_tokens=5, seed=3, ignore_eos=True)
    return [
        (ids + completions[0].token_ids + [5, 6, 7], params)
        for (ids, _), (completions, _) in zip(requests, said, strict=True)
    ]


def test_the_schedule_never_shows(folder: Path, requests: Requests) -> None:
    """In decodes from graphs, in chunks, as forks, from kept states, in next turns, and after preemptions."""
    with Generator(folder, **OPTIONS, prefix_cache=False, max_seqs=8) as gen:
        expected = alone(gen, requests)
        turns = next_turns(requests, expected)
        expected_turns = alone(gen, turns)
        assert answers(gen, requests) == expected
    for options in SCHEDULES.values():
        with Generator(folder, **OPTIONS, **options) as gen:
            assert answers(gen, requests) == expected
            assert answers(gen, requests[::-1]) == expected[::-1]
            cached = gen.stats.cached_tokens
            assert answers(gen, turns) == expected_turns
            assert gen.stats.cached_tokens > cached
            preempting(gen, steps=29)
            assert answers(gen, requests) == expected
            assert gen.stats.preemptions > 0


def test_a_start_keeps_little_more_memory_than_its_largest_step_takes(folder: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with Generator(folder, **OPTIONS, max_seqs=256):
        kept, largest = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    print(f"{kept / 1e9:.2f} GB for {largest / 1e9:.2f}")
    assert kept < 4 * largest


@torch.inference_mode()
def logprobs(model: Any, ids: list[int]) -> Tensor:
    """Return what transformers gives all tokens but the first, in float64."""
    rows = model(torch.tensor([ids], device="cuda")).logits[0, :-1].double().log_softmax(1).cpu()
    return rows.gather(1, torch.tensor(ids)[1:, None])[:, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_errors_are_not_above_those_of_transformers(folder: Path, requests: Requests, dtype: str) -> None:
    prompts = [ids for ids, _ in requests]
    with Generator(folder, **OPTIONS | {"dtype": dtype}) as gen:
        outputs = [output.completions[0] for output in gen.generate(prompts, GREEDY)]
        sequences = [ids + output.token_ids for ids, output in zip(prompts, outputs, strict=True)]
        scored = gen.score(sequences)
    exact, rounded = (load_reference(folder, each).to("cuda") for each in (torch.float32, getattr(torch, dtype)))
    ours: dict[str, list[Tensor]] = {"prefill": [], "decode": []}
    theirs: dict[str, list[Tensor]] = {"prefill": [], "decode": []}
    for ids, output, scores in zip(sequences, outputs, scored, strict=True):
        right, drawn = logprobs(exact, ids), len(output.token_ids)
        its = logprobs(rounded, ids) - right
        ours["prefill"].append(torch.tensor(scores).double()[1:] - right)
        ours["decode"].append(torch.tensor(output.raw_logprobs).double() - right[-drawn:])
        theirs["prefill"].append(its)
        theirs["decode"].append(its[-drawn:])
    for part in ours:
        mine, its = (torch.cat(errors[part]).square().mean().sqrt() for errors in (ours, theirs))
        print(part, f"{mine:.5f}, transformers {its:.5f}")
        assert 0 < mine <= its
