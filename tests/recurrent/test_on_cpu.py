"""recurrent/on_cpu.py, hybrid.py and planning.py in a Generator: the outputs of transformers, and the same bits under
any schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import Answer, Requests, alone, answers, preempting
from conftest import HYBRIDS, VOCAB, Checkpoint, check_idle, hf_logits, new_weights, random_ids
from torch import Tensor

from fastgen import Generator, SamplingParams

CONTEXT = 448
NAME, BASE = HYBRIDS["qwen3_5"]
LINEAR, FULL = "linear_attention", "full_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "two value heads per key head": {},
    "as many value heads as key heads": {"linear_num_key_heads": 2, "num_key_value_heads": 4},
    "two of three layers with attention": {"layer_types": [LINEAR, FULL, FULL]},
    "every second layer": {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL] * 2},
}
LONG = pytest.mark.long
PROMPTS = [random_ids(length) for length in (1, 63, 64, 65, 200)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make(checkpoint: Checkpoint, shape: str) -> Path:
    return checkpoint(NAME, **{**BASE, **SHAPES[shape]})


def logprobs(folder: Path, ids: list[int], start: int, dtype: torch.dtype) -> Tensor:
    """Return what transformers gives the tokens of ids from `start` on."""
    rows = hf_logits(folder, ids, dtype).log_softmax(1)[start - 1 : -1]
    return rows.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]


def compare(folder: Path, dtype: str) -> tuple[Tensor, Tensor]:
    """Return the errors of logprobs against transformers in float32, of scored and of drawn tokens: those of a
    Generator, and those of transformers in the same dtype."""
    ours, theirs = [], []
    with Generator(folder, device="cpu", dtype=dtype, max_model_len=CONTEXT) as gen:
        outputs = [output.completions[0] for output in gen.generate(PROMPTS, GREEDY)]
        sequences = [ids + output.token_ids for ids, output in zip(PROMPTS, outputs, strict=True)]
        for ids, output, scores in zip(sequences, outputs, gen.score(sequences), strict=True):
            right = logprobs(folder, ids, 1, torch.float32)
            drawn = right[len(ids) - len(output.token_ids) - 1 :]
            ours += [torch.tensor(scores)[1:] - right, torch.tensor(output.raw_logprobs) - drawn]
            its = logprobs(folder, ids, 1, DTYPES[dtype]) - right
            theirs += [its, its[-len(drawn) :]]
    return torch.cat(ours), torch.cat(theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_prefills_and_decodes_are_those_of_transformers(shape: str, checkpoint: Checkpoint) -> None:
    """In float32 both are equally far from what float64 gives: up to 2e-4, 1e-5 on average."""
    errors, _ = compare(make(checkpoint, shape), "float32")
    assert errors.abs().max() < 5e-4
    assert errors.square().mean().sqrt() < 5e-5


@pytest.mark.parametrize("shape", [*[*SHAPES][:2], *(pytest.param(each, marks=LONG) for each in [*SHAPES][2:])])
def test_errors_in_bfloat16_are_not_above_those_of_transformers(shape: str, checkpoint: Checkpoint) -> None:
    ours, theirs = (each.square().mean().sqrt() for each in compare(make(checkpoint, shape), "bfloat16"))
    assert 1e-3 < ours <= 1.5 * theirs


# --------------------------------------------------------------------------------------------------- schedules


def requests_of(seed: int) -> Requests:
    """Prompts that share prefixes, begin like others but not for a whole block, or follow on others as next turns."""
    draw = random.Random(seed)
    prefix, found = random_ids(140, seed=seed), []
    for at, length in enumerate((1, 63, 64, 65, 150)):
        start = prefix[: draw.choice((0, 0, 64, 100, 128, 140))]
        params = SamplingParams(
            n=draw.choice((1, 1, 3)), temperature=draw.choice((0.0, 1.0)), max_tokens=draw.choice((2, 20, 66)),
            seed=at, ignore_eos=True, logprobs=2,
        )  # fmt: skip
        found.append(((start + random_ids(length, seed=at))[:240], params))
    return [*found, (prefix[:128], found[0][1]), (prefix, SamplingParams(max_tokens=9, seed=3, ignore_eos=True))]


def next_turns(requests: Requests, said: list[Answer]) -> Requests:
    """Requests whose prompts are those of others, the first answers to them, and some tokens."""
    params = SamplingParams(max_tokens=4, seed=5, ignore_eos=True)
    return [
        (ids + completions[0].token_ids + random_ids(3 + at), params)
        for at, ((ids, _), (completions, _)) in enumerate(zip(requests, said, strict=True))
    ]


REQUESTS = requests_of(1)


@cache
def apart(folder: Path, dtype: str) -> tuple[list[Answer], Requests, list[Answer]]:
    """Return the answer to each request by itself, one sample after the other, and the next turns and their answers."""
    with Generator(folder, device="cpu", dtype=dtype, max_model_len=CONTEXT, prefix_cache=False, max_seqs=1) as gen:
        found = alone(gen, REQUESTS)
        turns = next_turns(REQUESTS, found)
        assert gen.stats.cached_tokens == 0
        return found, turns, alone(gen, turns)


SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "all at once": ("two value heads per key head", {}),
    "short steps": ("every second layer", {"max_step_tokens": 33, "max_seqs": 6}),
    "few lanes": ("two of three layers with attention", {"max_step_tokens": 100, "max_seqs": 2}),
    "small pages": ("as many value heads as key heads", {"page_size": 16, "max_step_tokens": 70}),
    "pages that do not divide a block": ("two value heads per key head", {"page_size": 48, "max_seqs": 8}),
    "without a prefix cache": ("two value heads per key head", {"prefix_cache": False, "max_step_tokens": 150}),
}
IN_TURN = ["all at once", "short steps", *(pytest.param(each, marks=LONG) for each in [*SCHEDULES][2:])]


@pytest.mark.parametrize("schedule", IN_TURN)
def test_schedules_change_no_bit(schedule: str, checkpoint: Checkpoint) -> None:
    """Twice, so that prefixes and forks continue from kept states; then next turns, which continue after answers."""
    shape, options = SCHEDULES[schedule]
    folder = make(checkpoint, shape)
    expected, turns, expected_turns = apart(folder, "float32")
    with Generator(folder, device="cpu", dtype="float32", max_model_len=CONTEXT, **options) as gen:
        assert answers(gen, REQUESTS) == expected
        first = gen.stats.cached_tokens
        assert answers(gen, turns) == expected_turns
        second = gen.stats.cached_tokens
        assert answers(gen, REQUESTS[::-1]) == expected[::-1]
        check_idle(gen)
        if options.get("prefix_cache", True):
            assert gen.stats.cached_tokens > second > first


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=LONG)])
def test_preemptions_and_few_pages_change_no_bit(dtype: str, checkpoint: Checkpoint) -> None:
    folder = make(checkpoint, "two value heads per key head")
    expected, turns, expected_turns = apart(folder, dtype)
    options: dict[str, Any] = {"page_size": 16, "num_pages": 34, "max_seqs": 5, "max_step_tokens": 90}
    with Generator(folder, device="cpu", dtype=dtype, max_model_len=CONTEXT, **options) as gen:
        preempting(gen, steps=13)
        assert answers(gen, REQUESTS) == expected
        assert answers(gen, turns) == expected_turns
        assert gen.stats.preemptions > 5
        check_idle(gen)


def test_new_weights_do_not_continue_from_states_of_old_ones(checkpoint: Checkpoint) -> None:
    folder = make(checkpoint, "two value heads per key head")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": CONTEXT, "page_size": 16}
    other, requests = new_weights(folder), REQUESTS[-2:]
    with Generator(folder, **options, prefix_cache=False, max_seqs=1) as gen:
        gen.update_weights(other, version=1)
        expected = alone(gen, requests)
    with Generator(folder, **options) as gen:
        for _ in range(2):
            assert answers(gen, requests) != expected
        cached = gen.stats.cached_tokens
        assert cached > 0
        gen.update_weights(other, version=1)
        assert answers(gen, requests[1:]) == expected[1:]
        assert gen.stats.cached_tokens == cached
        assert answers(gen, requests[::-1]) == expected[::-1]
        assert gen.stats.cached_tokens > cached


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: str, checkpoint: Checkpoint) -> None:
    folder = make(checkpoint, "as many value heads as key heads")
    found = []
    for count in (1, 2):
        with threads(count), Generator(folder, device="cpu", dtype=dtype, max_model_len=CONTEXT) as gen:
            found.append(answers(gen, REQUESTS[-3:]))
            assert torch.get_num_threads() == count
    assert found[0] == found[1]
    assert VOCAB > len({token for completions, _ in found[0] for token in completions[0].token_ids}) > 5
