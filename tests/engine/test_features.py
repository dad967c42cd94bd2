"""The door of features: what is there from the start, and what comes with the first request that asks for it."""

from __future__ import annotations

from dataclasses import fields
from pkgutil import resolve_name
from typing import Any

import pytest
from conftest import Turns

from fastgen import Generator, SamplingParams, Speculation
from fastgen.engine.features import BY_OPTION, BY_PAYLOAD, BY_REQUEST, EMPTY_HISTORY, read_options
from fastgen.engine.host_tier import HostPages
from fastgen.engine.masks import Masks
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.request import Sequence
from fastgen.speculation.planning import Speculator

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


def kinds(gen: Generator) -> list[type]:
    """Return the classes of the features in the scheduler, and of their payloads in the runner."""
    runner: Any = gen._runner
    return [*map(type, gen._loop.scheduler._features), *runner.features]


def test_a_feature_comes_with_the_first_request_that_asks_for_it() -> None:
    with Generator() as gen:
        gen.generate("hello", SHORT)
        assert kinds(gen) == []
        gen.generate("hello", SamplingParams(max_tokens=2, mask=Turns()))
        assert kinds(gen) == [Masks], "which has no part in the runner"
        for _ in range(2):
            gen.score([[5, 6, 7]])
            assert [kind.__name__ for kind in kinds(gen)] == ["Masks", "PromptScores", "ScorePlan"]


def test_features_of_options_are_there_from_the_start_and_stay_after_a_reset() -> None:
    with Generator(speculate="auto", host_cache_gb=0.001) as gen:
        assert kinds(gen)[:2] == [HostPages, Speculator]
        first = gen._loop.scheduler._features[1]
        gen.generate("hello", SHORT)
        gen._loop.reset()
        assert gen._loop.scheduler._features[1] is first
        assert gen.history is first.history
        assert gen.history.tokens > 0, "an exception does not forget it"


def test_without_speculation_the_history_stays_empty() -> None:
    with Generator() as gen:
        gen.generate("hello", SHORT)
        assert gen.history.tokens == 0
        gen.history.clear()


def test_a_value_that_turns_a_feature_off_is_read_as_none() -> None:
    with Generator() as gen:
        model = gen.model_config
    for value in (None, False, "off"):
        assert read_options(GeneratorOptions(speculate=value), model, 1).speculate is None
    assert read_options(GeneratorOptions(speculate="ngram"), model, 1).speculate == Speculation(history_tokens=0)
    with pytest.raises(ValueError, match="speculate is 0; it must be 'auto'"):
        read_options(GeneratorOptions(speculate=0), model, 1)


def test_the_tables_name_what_there_is() -> None:
    assert BY_OPTION.keys() <= {each.name for each in fields(EngineConfig)}
    assert BY_REQUEST.keys() <= {each.name for each in fields(Sequence)}
    for path in (*BY_OPTION.values(), *BY_REQUEST.values(), *BY_PAYLOAD, *BY_PAYLOAD.values(), EMPTY_HISTORY):
        assert isinstance(resolve_name(path), type)
