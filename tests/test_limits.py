"""limits.py: the end of an output that repeats itself, on its own and in the engine."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from conftest import check_idle

from fastgen import Generator, SamplingParams
from fastgen.limits import RepetitionDetector


def repeats(tokens: list[int], limits: Mapping[str, int]) -> bool:
    """Return whether tokens end with a pattern that occurs so many times, by comparing all of them."""
    count = limits["min_count"]
    return any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(limits["min_pattern_size"] or 1, limits["max_pattern_size"] + 1)
    )


def test_repetitions_are_those_that_comparing_all_tokens_finds() -> None:
    rng, found = random.Random(0), 0
    for _ in range(300):
        least = rng.randrange(4)
        limits = {
            "min_pattern_size": least, "max_pattern_size": least + rng.randrange(1, 6), "min_count": rng.randint(2, 4),
        }  # fmt: skip
        detector, prompt, output = RepetitionDetector(limits), [1] * rng.randrange(9), list[int]()
        for _ in range(40):
            output += [rng.randrange(rng.choice((1, 2, 3))) for _ in range(rng.choice((1, 1, 3)))]
            expected = repeats(output, limits)
            assert detector.repeats(prompt + output, len(prompt)) == expected
            found += expected
    assert found > 500


@pytest.mark.parametrize("speculate", [pytest.param(None, marks=pytest.mark.long), "ngram"])
def test_an_output_ends_where_it_repeats_itself(speculate: str | None) -> None:
    limits = {"max_pattern_size": 8, "min_pattern_size": 0, "min_count": 3}
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompts = ["count 1 2 3 1 2 3 1 2 3", "a b a b a b a b a b", "hello"]
    with Generator(seed=0, speculate=speculate) as gen:
        whole = [output.completions[0] for output in gen.generate(prompts, params)]
        ended = [
            output.completions[0] for output in gen.generate(prompts, {**vars(params), "repetition_detection": limits})
        ]
        ends = [next((n for n in range(81) if repeats(each.token_ids[:n], limits)), None) for each in whole]
        assert sum(end is not None for end in ends) >= 2
        for before, after, end in zip(whole, ended, ends, strict=True):
            assert after.token_ids == before.token_ids[:end]
            assert len(after.logprobs) == len(after.token_ids)
            reason = ("length", None) if end is None else ("stop", "repetition")
            assert (after.finish_reason, after.stop_reason) == reason
        assert gen.stats.repeated == sum(end is not None for end in ends)
        repeated, completion = gen.stats.repeated, ended[1]  # " a b a b a b"
        (cut,) = gen.generate(prompts[1], {**vars(params), "repetition_detection": limits, "stop": completion.text[1:]})
        assert (cut.completions[0].stop_reason, gen.stats.repeated) == (completion.text[1:], repeated)
        (word,) = gen.generate("hello", {"choice": ["a repetition"], "stop": "repetition"})
        assert (word.completions[0].stop_reason, gen.stats.repeated) == ("repetition", repeated)
        (late,) = gen.generate(prompts[:1], {**vars(params), "repetition_detection": limits, "min_tokens": 60})
        assert len(late.completions[0].token_ids) >= 60
        (off,) = gen.generate(prompts[:1], {**vars(params), "repetition_detection": {"max_pattern_size": 0}})
        assert off.completions[0] == whole[0]
        check_idle(gen)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_size": 3}, "must be a dict of max_pattern_size, min_pattern_size, min_count"),
        (3, "must be a dict of max_pattern_size"),
        ({"max_pattern_size": 3}, "repetition_detection's min_count is 0; it must be at least 2"),
        ({"max_pattern_size": -3}, "repetition_detection's max_pattern_size is -3; it must be at least 0"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "is 4, above its max_pattern_size, 3"),
    ],
)
def test_wrong_limits_are_refused(given: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(repetition_detection=given).validate(9)  # type: ignore[arg-type]
