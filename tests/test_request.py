"""SamplingParams, whose bad values are errors that name the parameter, and the other records of requests."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from fastgen.request import (
    MAX_LOGPROBS,
    Batch,
    Completion,
    Prefill,
    RequestOutput,
    SamplingParams,
    raise_for_errors,
)

VOCAB = 300
NAN, INF = math.nan, math.inf


BAD_VALUES: dict[str, list[Any]] = {
    "n": [0, -3],
    "max_tokens": [-1, 0],  # with 0 and without prompt_logprobs, there is nothing to compute
    "min_tokens": [-1],
    "temperature": [-0.1, NAN, INF, 10**400],
    "top_p": [0, 0.0, -0.5, 1.01, NAN],
    "top_k": [-2],
    "min_p": [-0.1, 1.5],
    "repetition_penalty": [0, -1.0, INF],
    "presence_penalty": [NAN, -INF],
    "frequency_penalty": [INF],
    "logit_bias": [{VOCAB: 1.0}, {-1: 1.0}, {5: NAN}, {5: -INF}],
    "choice": [[]],
    "allowed_token_ids": [[]],
    "seed": [2**64, -(2**63) - 1],
    "stop": ["", ["fine", ""]],
    "stop_token_ids": [[VOCAB], [-1]],
    "logprob_token_ids": [[VOCAB], [-1], [5] * 129],
    "logprobs": [-1, MAX_LOGPROBS + 1],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1],
}
BAD_TYPES: dict[str, list[Any]] = {
    "n": [1.0, True, None],
    "max_tokens": ["16", 16.0],
    "min_tokens": [None],
    "temperature": ["hot", None, True],
    "top_p": [[0.5]],
    "top_k": [1.5, None],
    "min_p": [None],
    "repetition_penalty": ["1"],
    "presence_penalty": [None],
    "frequency_penalty": [False],
    "logit_bias": [{"a": 1.0}, {5: "1"}, [(5, 1.0)]],
    "seed": [1.0],
    "stop": [3, [5], [None], b"a", np.array(["a", "b"]), {"a": 1}, iter(["a"])],  # iter: empty when it is used
    "stop_token_ids": [iter([3]), ["</s>"], [True]],
    "allowed_token_ids": [3],
    "bad_words": ["no"],
    "choice": ["no"],
    "regex": [3],
    "grammar": [["start"]],
    "mask": [3],
    "ignore_eos": ["yes", None],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": [0],
    "return_sampling_mask": ["no"],
    "logprobs": [2.0, True],
    "prompt_logprobs": ["all"],
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, table in ((ValueError, BAD_VALUES), (TypeError, BAD_TYPES))
        for name, values in table.items()
        for value in values
    ],
)
def test_a_bad_value_is_an_error_that_names_its_parameter(kind: type[Exception], name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})  # not an error yet: parameters are checked on entry
    with pytest.raises(kind, match=rf"\b{name}\b"):
        params.validate(VOCAB)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n is 2 with max_tokens=0"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, above max_tokens, which is 3"),
    ],
)
def test_values_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given).validate(VOCAB)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"n": 1000},
        {"max_tokens": 1},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"max_tokens": 4, "min_tokens": 4},
        {"min_tokens": 10**6},  # the context ends the output first
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 100},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": 10**9},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 1e-3, "presence_penalty": -5, "frequency_penalty": 5.0},
        {"logit_bias": {0: -100, VOCAB - 1: 100.0}},
        {"logit_bias": {}},
        {"logit_bias": {"5": 1.0}},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"stop": "\n"},
        {"stop": [" "]},
        {"stop": ("a", "b")},
        {"stop": []},
        {"stop": None, "stop_token_ids": None, "bad_words": None},
        {"stop": {"a", "b"}, "stop_token_ids": np.array([3, 4]), "allowed_token_ids": {3}},
        {"n": np.int64(2), "temperature": np.float32(0.5)},
        {"stop_token_ids": [0, VOCAB - 1], "ignore_eos": True},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
    ],
)
def test_the_edges_of_what_is_allowed_pass(given: dict[str, Any]) -> None:
    SamplingParams(**given).validate(VOCAB)


def test_alternatives_are_at_most_the_vocabulary() -> None:
    SamplingParams(logprobs=5).validate(5)
    with pytest.raises(ValueError, match="logprobs is 6; the vocabulary has 5 tokens"):
        SamplingParams(logprobs=6).validate(5)


def test_sampling_params_are_frozen_and_refuse_unknown_names() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[call-arg]


def test_replace_checks_what_it_changes() -> None:
    params = SamplingParams(temperature=0.5, seed=7)
    assert params.replace(n=3, seed=None) == SamplingParams(temperature=0.5, n=3)
    assert params == SamplingParams(temperature=0.5, seed=7)
    with pytest.raises(ValueError, match="top_p is 2; it must be above 0 and at most 1"):
        params.replace(top_p=2)
    with pytest.raises(TypeError, match="the nearest one is 'temperature'"):
        params.replace(temprature=1)


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")
    assert SamplingParams().stop_strings == ()


def test_penalized() -> None:
    assert not SamplingParams(logit_bias={1: 1.0}, top_k=3).penalized
    assert SamplingParams(repetition_penalty=0.5).penalized
    assert SamplingParams(presence_penalty=-0.5).penalized
    assert SamplingParams(frequency_penalty=0.5).penalized


def test_the_lanes_that_draw_are_the_decodes_then_the_prompts_that_end() -> None:
    prefills = (
        Prefill(lane=4, start=0, tokens=(1, 2, 3), sample=True),
        Prefill(lane=0, start=3, tokens=(5, 6), sample=False),
        Prefill(lane=1, start=7, tokens=(8,), sample=True),
    )
    batch = Batch(decodes=(3, 2), prefills=prefills)
    assert batch.sampling == (3, 2, 4, 1)


def test_an_output_shows_its_first_text_and_error() -> None:
    fine = Completion(0, [5], "five", "stop", stop_reason=5)
    failed = Completion(1, [], "", "error", error="too long")
    output = RequestOutput("r0", [1], [fine, failed])
    assert (output.text, output.error) == ("five", "too long")
    assert RequestOutput("r0", [1], [fine]).error is None


def test_one_error_names_all_requests_that_failed() -> None:
    fine = RequestOutput("fine", [1], [Completion(0, [5], "five", "stop")])
    failed = [RequestOutput(id, [], [Completion(0, [], "", "error", error=f"no {id}")]) for id in range(25)]
    raise_for_errors(iter([fine]))
    with pytest.raises(ValueError, match=r"^2 of 3 requests failed:\n  0: no 0\n  1: no 1$"):
        raise_for_errors([failed[0], fine, failed[1]])
    with pytest.raises(ValueError, match=r"\n  19: no 19\n  and 5 more$"):
        raise_for_errors(failed)
    for wrong, kind in ((5, "int"), ([fine, 5], "int"), ("fine", "str"), (failed[0].completions, "Completion")):
        with pytest.raises(TypeError, match=f"takes a list of RequestOutput, as generate returns it, not {kind}$"):
            raise_for_errors(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="request 0 has failed or was not sent"):
        failed[0].resume(None)
    for index in (1, -2, "0"):
        with pytest.raises(ValueError, match=f"request 'fine' has no completion {index!r}; give an index from 0 to 0"):
            fine.resume(None, index)  # type: ignore[arg-type]
    assert fine.resume(None, -1).resume is fine.completions[0]
    with pytest.raises(TypeError, match="params must be SamplingParams or a dict, not str"):
        fine.resume("greedy")  # type: ignore[arg-type]
