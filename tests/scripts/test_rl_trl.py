"""scripts/rl/rl_trl.py: what a GRPOTrainer is given by a Generator, and five steps of it. Needs the extra `rl`."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the extra rl")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "rl"))

import rl_grpo
import rl_trl

from fastgen import Generator
from fastgen.text.tokenizer import encode_prompt

DIFFERENCE = "sampling/sampling_logp_difference/max"


@pytest.fixture
def gen() -> Iterator[Generator]:
    with Generator(seed=0, num_pages=32) as gen:
        yield gen


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that differ within nearly every group, so that each step changes the weights."""
    monkeypatch.setattr(rl_trl, "reward", lambda problem, text: float(sum(map(ord, text)) % 7))
    monkeypatch.setattr(rl_trl, "LEARNING_RATE", 1e-3)


def trainer_of(gen: Generator, max_tokens: int) -> Any:
    return types.SimpleNamespace(gen=gen, max_completion_length=max_tokens, temperature=1.0)


def test_equal_neighbours_are_one_request_and_the_order_is_that_of_the_prompts(
    gen: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    generate = gen.generate
    monkeypatch.setattr(gen, "generate", lambda prompts, params: asked.extend(params) or generate(prompts, params))
    first, second = rl_grpo.chat((12, 34)), rl_grpo.chat((56, 78))
    prompts = [*[first] * 3, second, *[first] * 2]
    found = rl_trl.roll_out(prompts, trainer_of(gen, 64))
    assert [params.n for params in asked] == [3, 1, 2]
    assert found["prompt_ids"] == [encode_prompt(prompt, gen.tokenizer)[0] for prompt in prompts]
    assert [len(logprobs) for logprobs in found["logprobs"]] == [len(ids) for ids in found["completion_ids"]]
    assert all(isinstance(logprob, float) for logprobs in found["logprobs"] for logprob in logprobs)
    assert all(ids[-1] in (2, 6) for ids in found["completion_ids"]), "the final EOS stays"
    assert found["weight_version"] == [0] * 6


def test_a_prompt_that_can_not_be_answered_ends_the_training(gen: Generator) -> None:
    with pytest.raises(ValueError, match="a prompt can not be answered: the prompt has 3000 tokens"):
        rl_trl.roll_out([[5] * 3000], trainer_of(gen, 4))


@pytest.mark.usefixtures("dense")
def test_five_steps_with_the_weights_of_each() -> None:
    log = rl_trl.main(["--smoke"])["log"]
    assert [entry["weight_version"] for entry in log] == [1, 2, 3, 4, 5]
    assert sum(entry["grad_norm"] > 0 for entry in log) >= 4
    for entry in log:
        assert entry[rl_trl.RATIO] == pytest.approx(1, abs=1e-3)
        assert entry[DIFFERENCE] < 1e-4
        assert entry["completions/clipped_ratio"] < 1


@pytest.mark.usefixtures("dense")
def test_old_weights_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_trl.GeneratorTrainer, "sync_weights", lambda self: None)
    log = rl_trl.main(["--smoke"])["log"]
    assert {entry["weight_version"] for entry in log} == {0}
    assert max(abs(entry[rl_trl.RATIO] - 1) for entry in log) > 1e-3
    assert log[-1][DIFFERENCE] > 1e-2
