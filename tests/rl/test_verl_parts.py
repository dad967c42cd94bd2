"""rl/verl without verl: the arguments of an engine, the parameters of requests, the gate, and updates by a stand-in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from verl_stand_in import Config, use_rollout

from fastgen.rl.verl import check_version
from fastgen.rl.verl.gate import Gate
from fastgen.rl.verl.parameters import engine_arguments, logprobs_field, request_params


def test_an_engine_has_the_options_of_the_configuration() -> None:
    found = engine_arguments(Config(engine_kwargs={"fastgen": {"max_seqs": 8, "page_size": 16}, "vllm": {"a": 1}}), 0)
    assert (found["tensor_parallel"], found["memory_fraction"], found["max_seqs"]) == (2, 0.5, 8)
    assert (found["page_size"], found["generation_config"]) == (16, False)
    assert found["seed"] == Config().seed
    assert engine_arguments(Config(), 1)["seed"] != engine_arguments(Config(), 2)["seed"], "replicas draw other samples"
    assert logprobs_field(Config()) == "logprobs"
    assert logprobs_field(Config(logprobs_mode="raw_logprobs")) == "raw_logprobs"


@pytest.mark.parametrize("change", [{"quantization": "int3"}, {"enable_rollout_routing_replay": True}])
def test_what_the_engine_lacks_is_an_error(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"rollout.{name} is "):
        engine_arguments(replace(Config(), **change), 0)
    with pytest.raises(ValueError, match="must be one of processed_logprobs, raw_logprobs"):
        logprobs_field(Config(logprobs_mode="raw_logits"))


@pytest.mark.parametrize(
    ("given", "prompt", "expected"),
    [
        ({}, 100, 512),  # response_length
        ({}, 600, 424),  # prompt and answer together
        ({"max_tokens": 7}, 100, 7),
        ({"max_new_tokens": 9}, 100, 9),
        ({"max_tokens": 5000}, 100, 924),  # the context
        ({"max_tokens": 0}, 100, 1),
    ],
)
def test_the_length_of_an_answer(given: dict[str, Any], prompt: int, expected: int) -> None:
    verls = {"temperature": 0.5, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": True}
    params = request_params(Config(), {**verls, **given}, prompt, 1024)
    assert params.max_tokens == expected
    assert (params.temperature, params.top_k, params.logprobs, params.ignore_eos) == (0.5, 0, None, False)
    params.validate(1000)


def test_wrong_requests_are_errors() -> None:
    with pytest.raises(ValueError, match="leave no room in a context of 1024"):
        request_params(Config(), {}, 1024, 1024)
    with pytest.raises(TypeError, match="no option 'beam_width'"):
        request_params(Config(), {"beam_width": 2}, 3, 1024)


def test_a_closed_gate_holds_or_refuses_requests_and_says_when_all_have_left() -> None:
    async def run() -> None:
        gate = Gate()
        assert await gate.enter()
        assert await gate.enter()
        gate.close(refuse=False)
        waiting, empty = asyncio.create_task(gate.enter()), asyncio.create_task(gate.empty())
        await asyncio.sleep(0)
        gate.leave()
        await asyncio.sleep(0)
        assert not empty.done()
        gate.leave()
        await empty
        assert (gate.inside, waiting.done()) == (0, False)
        await gate.empty()
        gate.open()
        assert await waiting
        gate.close(refuse=True)
        assert not await gate.enter()
        gate.open()
        assert await gate.enter()
        assert gate.inside == 2

    asyncio.run(run())


def test_other_versions_of_verl_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, right in (("0.9.1", True), ("0.9.4", True), ("0.8.0", False), ("0.10.0", False)):
        monkeypatch.setattr("fastgen.rl.verl.version", lambda _, found=found: found)
        if right:
            check_version()
        else:
            with pytest.raises(ImportError, match=rf"verl {found} is installed; .* works with verl 0\.9\.\*"):
                check_version()


def test_an_engine_gets_the_weights_of_each_step() -> None:
    use_rollout("cpu", "gloo")
