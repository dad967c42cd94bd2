"""router.py: requests with a common beginning share an engine, and no engine is left idle for that."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from conftest import random_ids

from fastgen.rl.router import KEY_CHARS, KEY_IDS, MAX_KEYS, SLACK, Router, prefix_keys

ENGINES = range(3)


def test_prompts_share_the_keys_of_their_common_blocks() -> None:
    first = random_ids(3 * KEY_IDS)
    longer, other = first + [5], [*first[: 2 * KEY_IDS], *random_ids(KEY_IDS, 1)]
    assert len(prefix_keys(first)) == 3
    assert prefix_keys(longer)[:3] == prefix_keys(first)
    assert prefix_keys(other)[:2] == prefix_keys(first)[:2]
    assert prefix_keys(other)[2] != prefix_keys(first)[2]
    assert prefix_keys({"prompt": first}) == prefix_keys(tuple(first)) == prefix_keys(first)
    assert prefix_keys("a" * KEY_CHARS + "b")[0] == prefix_keys("a" * KEY_CHARS + "c")[0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_longer_conversation_has_the_keys_of_its_beginning(wrapped: bool) -> None:
    turns = [{"role": "user", "content": "tell me of the sea " * 40}, {"role": "assistant", "content": "it is wide"}]
    first: Any = turns[:1]
    both: Any = turns
    keys, more = (prefix_keys({"messages": each} if wrapped else each) for each in (first, both))
    assert more[: len(keys) - 1] == keys[:-1] != []


@pytest.mark.parametrize("prompt", [[], "", None, 5, [[1, 2], [3]], {"prompt": 5}, {"prompt": [[1], [2]]}])
def test_an_empty_or_wrong_prompt_has_no_keys(prompt: Any) -> None:
    assert prefix_keys(prompt) == []


def test_groups_of_a_prompt_stay_together_and_engines_have_equal_loads() -> None:
    router = Router()
    prompts = [prefix_keys(random_ids(20, seed)) for seed in range(6)]
    places = [{router.choose(keys, 1, ENGINES) for _ in range(8)} for keys in prompts]
    assert all(len(place) == 1 for place in places)
    assert Counter(place.pop() for place in places) == {0: 2, 1: 2, 2: 2}
    assert router.loads == {0: 16, 1: 16, 2: 16}


def test_a_busy_engine_loses_its_prefix_to_the_least_loaded_one() -> None:
    router, keys = Router(), prefix_keys(random_ids(20))
    chosen = [router.choose(keys, 1, ENGINES) for _ in range(90)]
    assert chosen[: SLACK + 1] == [chosen[0]] * (SLACK + 1)
    assert set(chosen) == set(ENGINES), "a prefix that all requests share does not bind them to one engine"
    assert max(router.loads.values()) <= 2 * min(router.loads.values()) + SLACK + 1


@pytest.mark.parametrize("least", [0, 5])
def test_an_engine_may_have_16_samples_more_than_twice_the_smallest_load(least: int) -> None:
    router, keys = Router(), prefix_keys(random_ids(20))
    router.loads = {0: 0, 1: least, 2: least}
    taken = 2 * least + 16 + 1
    assert [router.choose(keys, 1, ENGINES) for _ in range(taken)] == [0] * taken, "as docs/rl.md says"
    assert router.choose(keys, 1, ENGINES) == 1


def test_only_engines_that_are_open_are_chosen_and_forgotten_ones_have_no_prefix() -> None:
    router, keys = Router(), prefix_keys(random_ids(20))
    first = router.choose(keys, 4, ENGINES)
    router.leave(first, 4)
    others = [engine for engine in ENGINES if engine != first]
    second = router.choose(keys, 1, others)
    assert second in others
    assert router.choose(keys, 1, ENGINES) == first, "the least loaded of the two with the prefix"
    router.forget([first])
    router.choose([1], 1, [first])
    assert router.choose(keys, 1, ENGINES) == second
    router.forget()
    assert router.choose(keys, 1, ENGINES) not in (first, second)


def test_loads_are_those_of_the_running_requests() -> None:
    chance, router, running = random.Random(0), Router(), list[tuple[int, int]]()
    for step in range(2000):
        if running and chance.random() < 0.5:
            router.leave(*running.pop(chance.randrange(len(running))))
        else:
            samples = chance.randrange(1, 9)
            engine = router.choose([chance.randrange(20), step], samples, chance.sample(ENGINES, 2))
            running.append((engine, samples))
        expected = Counter[int]()
        for engine, samples in running:
            expected[engine] += samples
        assert {engine: load for engine, load in router.loads.items() if load} == expected


def test_old_keys_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.rl.router.MAX_KEYS", 10)
    router = Router()
    for number in range(100):
        router.leave(router.choose([number], 1, ENGINES), 1)
    assert MAX_KEYS > 10 == len(router._places)
