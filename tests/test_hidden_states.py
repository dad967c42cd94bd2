"""hidden_states.py: the states of all layers, held to transformers; their bits do not depend on the schedule."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FEW, FIRST_HALF, check_idle, families_in_turn, hf_model, random_ids
from handmade import let_pages_run_out
from safetensors import safe_open
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.rl.remote import RemoteGenerator

SEQUENCES = [random_ids(1), random_ids(70), random_ids(33), random_ids(64), random_ids(33)]
LAYERS = (0, 1, 2, 3)  # all of them


@cache
def alone(family: Path) -> list[Tensor]:
    """The states of each sequence by itself."""
    with Generator(family) as gen:
        return [gen.features([sequence], LAYERS)[0] for sequence in SEQUENCES]


@pytest.mark.parametrize("family", [*FEW, "llama", "qwen3"], indirect=True)
def test_the_states_are_those_of_transformers(family: Path) -> None:
    model = hf_model(family)
    for sequence, found in zip(SEQUENCES, alone(family), strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(found, torch.cat(states), rtol=1e-5, atol=2e-4)


def test_states_have_the_dtype_of_the_model(llama: Path) -> None:
    with Generator(llama, dtype="bfloat16") as gen:
        found = gen.features(SEQUENCES[1], LAYERS)[0]
    expected = hf_model(llama).model.embed_tokens.weight[SEQUENCES[1]]
    assert torch.equal(found[0], expected.bfloat16())
    errors = (found.float() - alone(llama)[1]).square().mean((1, 2)) / alone(llama)[1].square().mean((1, 2))
    assert errors.max() < 0.01, "rounding, and no wrong bits"


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


SCHEDULES: list[dict[str, Any]] = [
    {"max_seqs": 2, "max_step_tokens": 512},
    {"max_seqs": 7, "max_step_tokens": 7},
    {"max_step_tokens": 16, "page_size": 1},
    {"max_step_tokens": 50, "speculate": "ngram"},
]


@pytest.mark.parametrize(("family", "schedule"), families_in_turn(SCHEDULES), indirect=["family"])
def test_batches_chunks_and_neighbours_change_no_bit(family: Path, schedule: dict[str, Any]) -> None:
    expected, params = alone(family), SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    with Generator(family, **{"page_size": 16, **schedule}) as gen:
        answers = [gen.generate(random_ids(20), params)[0].completions]
        for _ in range(2):  # the second time, pages are cached
            gen.add(random_ids(20), params, id=0)
            gen.step()
            assert equal(gen.features(SEQUENCES, LAYERS), expected)
            assert gen.unfinished == 1, "its decodes were in the same steps"
            (output,) = gen.abort(0)
            assert output.completions[0].token_ids == answers[0][0].token_ids[: len(output.completions[0].token_ids)]
        cached = gen.stats.cached_tokens
        assert equal(gen.features(SEQUENCES, [-1, 2], "last"), [states[[3, 2], -1:] for states in expected])
        assert gen.stats.cached_tokens > cached, "the prefix cache has all but the last page"
        assert equal(gen.features(SEQUENCES[1], 1, [69, 3, -67]), [expected[1][[1]][:, [69, 3, 3]]])
        own = [[0], range(5, 30), [], [-1], range(33)]
        rows = [states[:, list(at)] for states, at in zip(expected, own, strict=True)]
        assert equal(gen.features(SEQUENCES, LAYERS, [*own[:-1], "all"]), rows)
        check_idle(gen)


@pytest.mark.parametrize("family", FIRST_HALF, indirect=True)
def test_a_preemption_changes_no_bit(family: Path) -> None:
    with Generator(family, page_size=1, num_pages=150, max_step_tokens=20) as gen:
        let_pages_run_out(gen)
        for id in range(4):  # they take four pages in each step, and the youngest sequence gives its own
            gen.add(random_ids(10, seed=id), SamplingParams(max_tokens=60, ignore_eos=True), id=id)
        gen.step()
        assert equal(gen.features(SEQUENCES, LAYERS), alone(family))
        assert gen.stats.preemptions > 0
        gen.abort(range(4))


def read_shards(paths: list[Path]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the positions and states of each sequence."""
    count = 0
    for path in paths:
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"first": str(count)}
            offsets, positions = file.get_tensor("offsets"), file.get_tensor("positions")
            layers = torch.stack([file.get_tensor(f"layer.{number}") for number in (3, 0)])
        for first, end in pairwise(offsets.tolist()):
            yield positions[first:end], layers[:, first:end]
            count += 1


def test_many_sequences_are_written_to_a_folder(
    gen: Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sequences = [random_ids(3 + at % 50, seed=at) for at in range(200)]
    sequences[7] = random_ids(513)
    ahead: list[int] = []

    def source() -> Iterator[list[int]]:
        finished = gen.stats.finished
        for number, ids in enumerate(sequences):
            ahead.append(number - (gen.stats.finished - finished))
            yield ids

    with caplog.at_level(logging.WARNING):
        paths = gen.write_features(tmp_path / "new", source(), (-1, 0), [0, -1, -2], shard_bytes=30_000)
    assert "sequence 7 has no features: the prompt has 513 tokens" in caplog.text
    assert sorted((tmp_path / "new").iterdir()) == paths
    assert len(paths) == -(-199 // -(-30_000 // (2 * 3 * 64 * 4)))
    assert max(ahead) < 40, "sequences are read as they are needed"
    found = list(read_shards(paths))
    good = sequences[:7] + sequences[8:]
    expected = iter(gen.features(good, (-1, 0), [0, -1, -2]))
    for number, (positions, states) in enumerate(found):
        if number == 7:
            assert (len(positions), states.shape) == (0, (2, 0, 64))
            continue
        assert positions.tolist() == [0, len(sequences[number]) - 1, len(sequences[number]) - 2]
        assert torch.equal(states, next(expected))
    assert len(found) == 200
    with pytest.raises(ValueError, match="already has features; give a new folder"):
        gen.write_features(tmp_path / "new", sequences)


def test_one_sequence_and_positions_in_a_tensor(gen: Generator, tmp_path: Path) -> None:
    for number, one in enumerate(("hello", [5, 6, 7], torch.tensor([5, 6, 7]))):
        ((positions, states),) = read_shards(gen.write_features(tmp_path / str(number), one, (3, 0)))  # type: ignore[arg-type]
        assert positions.tolist() == list(range(states.shape[1]))
        assert torch.equal(states, gen.features(one, (3, 0))[0])  # type: ignore[arg-type]
    assert torch.equal(gen.features([5, 6, 7], (3, 0), torch.tensor([2, 0]))[0], states[:, [2, 0]])  # type: ignore[arg-type]


def test_arguments_that_cannot_be_served(gen: Generator, tmp_path: Path) -> None:
    for error, reason, arguments in [
        (ValueError, r"there is no layer 4; give 0 \(the embedding\) to 3", ([[5]], 4)),
        (TypeError, "layers must be an integer or a list of integers, not 'all'", ([[5]], "all")),
        (TypeError, r"layers must be an integer or a list of integers, not \[\]", ([[5]], [])),
        (ValueError, "positions is 'first'; give 'all', 'last' or a list", ([[5]], 0, "first")),
        (TypeError, "positions must be 'all', 'last' or lists", ([[5]], 0, 1)),
        (TypeError, r"positions must be integers, not \[0.5\]", ([[5]], 0, [[0.5]])),
        (TypeError, "positions must be integers, not 0.5", ([[5]], 0, [0.5])),
        (
            ValueError,
            "there is no position 2 in a sequence of 2 tokens",
            ([random_ids(100), [5, 6, 7], [5, 6]], 0, [2]),
        ),
        (ValueError, "give one list of positions for each sequence", ([[5]], 0, [[0], [0]])),
        (ValueError, "give one list of positions for each sequence", ([[5], [6]], 0, [[0]])),
        (ValueError, "the prompt has 513 tokens", ([random_ids(100), [5] * 513],)),
        (TypeError, "prompts must be a prompt or a list", (5,)),
    ]:
        with pytest.raises(error, match=reason):
            gen.features(*arguments)  # type: ignore[arg-type]
        check_idle(gen)
    with pytest.raises(ValueError, match="positions is 'first'"):
        gen.write_features(tmp_path, [[5]], positions="first")
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        gen.write_features(tmp_path, [[5]], shard_bytes=0)
    with pytest.raises(TypeError, match="shard_bytes must be an integer, not '9'"):
        gen.write_features(tmp_path, [[5]], shard_bytes="9")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prompts must be a prompt or a list of prompts, not NoneType"):
        gen.write_features(tmp_path, None)  # type: ignore[arg-type]
    assert gen.features([]) == []
    gen.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        gen.features([[5]])
    gen.wake()
    with pytest.raises(AttributeError, match="hidden states are not sent over HTTP; use a Generator"):
        RemoteGenerator("http://localhost:1").features  # noqa: B018
