"""Requests of a RemoteGenerator that are cut off, resumed and streamed; scores, adapters, and a server that loads."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import CONFIG, adapter
from conftest import random_ids
from safetensors.torch import load_file
from sending import KEY, Sharded, refusal
from serving import STUB, Server, until

from fastgen import Completion, Generator, Request, RequestOutput, SamplingParams
from fastgen.rl.bodies import RESUMED, completion_of
from fastgen.rl.policy import Policy
from fastgen.rl.remote import RemoteGenerator

pytestmark = pytest.mark.timeout(120)

LONG = SamplingParams(max_tokens=200, seed=7, ignore_eos=True, speculate=False)
SHORT = replace(LONG, max_tokens=8)


@pytest.fixture(scope="module")
def server(rollout_server: Server) -> Server:
    return rollout_server


@pytest.fixture
def gen(server: Server) -> Iterator[RemoteGenerator]:
    with RemoteGenerator(server.url, api_key=KEY, max_requests=4, timeout=5, replace_group=True) as gen:
        yield gen
        until(server.idle)


def resumed(gen: RemoteGenerator, output: RequestOutput, params: SamplingParams) -> list[Completion]:
    """Return the completions of an output, continued to their end; those that have ended stay as they are."""
    requests = [
        replace(output.resume(params, number), id=number)
        for number, completion in enumerate(output.completions)
        if completion.finish_reason == "abort"
    ]
    found = {each.id: each.completions[0] for each in gen.stream(requests)}
    assert not any(each.error for each in found.values())
    return [found.get(number, completion) for number, completion in enumerate(output.completions)]


def test_aborted_samples_come_with_their_tokens_and_go_on_as_if_never_ended(
    gen: RemoteGenerator, here: Generator, server: Server
) -> None:
    """The text goes on where it was, too, in the middle of a stop string and of a character."""
    params = replace(LONG, n=2, logprobs=2, return_sampling_mask=True, stop="never said by it")
    prompts: list[Any] = ["hello", *(random_ids(5, seed=number) for number in range(5))]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gen.generate, prompts, params)
        until(lambda: server.stats()["steps_total"] > 40 and server.stats()["running"])
        told = gen.abort()
        outputs = running.result(10)
    assert [output.id for output in outputs] == list(range(6))
    assert {id(output) for output in told} <= {id(output) for output in outputs}
    completions = [completion for output in outputs for completion in output.completions]
    assert len(completions) == 12
    assert "abort" in {completion.finish_reason for completion in completions}
    assert any(0 < len(completion.token_ids) < 200 for completion in completions)
    assert all(len(each.logprobs) == len(each.token_ids) for each in completions)
    assert outputs[-1].completions[1].token_ids == [], "it was not sent"
    begun = [output for output in outputs if output.prompt_token_ids and output.completions[0].token_ids]
    for output, expected in zip(begun, here.generate([each.prompt_token_ids for each in begun], params), strict=True):
        assert [vars_of(each) for each in resumed(gen, output, params)] == [vars_of(e) for e in expected.completions]


def vars_of(completion: Completion) -> dict[str, Any]:
    names = set(Completion.__dataclass_fields__) - {"weight_versions"}
    return {name: getattr(completion, name) for name in names}


def test_only_the_requests_with_these_ids_end(gen: RemoteGenerator, server: Server) -> None:
    schema = {"type": "object"}
    params = [LONG, LONG, replace(LONG, json_schema=schema, max_tokens=200), SHORT]
    stream = gen.stream(Request([5, 6], own, f"r{number}") for number, own in enumerate(params))
    assert next(stream).id == "r3"
    assert gen.abort(["other"]) == []
    (first,) = gen.abort("r1")
    assert (first.id, first.completions[0].finish_reason) == ("r1", "abort")
    gen.pause()
    (second,) = gen.abort(["r2", "other"])
    assert second.completions[0].seed == 7
    gen.resume()
    gen.cut_off("r0")
    ended = {output.id: output.completions[0].finish_reason for output in stream}
    assert ended == {"r0": "abort", "r1": "abort", "r2": "abort"}


def test_updates_that_abort_leave_completions_that_can_be_resumed(gen: RemoteGenerator, talker: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gen.generate, [[5, 6]], LONG)
        until(lambda: gen._sent)
        time.sleep(0.1)
        gen.update_weights(talker, in_flight="abort")
        (output,) = running.result(10)
    assert output.completions[0].finish_reason == "abort"
    (whole,) = resumed(gen, output, LONG)
    assert len(whole.token_ids) == len(whole.raw_logprobs) == 200
    assert whole.token_ids == gen.generate([[5, 6]], LONG)[0].completions[0].token_ids, "with the same weights"
    assert refusal(lambda: list(gen.events(Request([5], LONG, None, whole))), ValueError).startswith("the completion")


def test_events_arrive_one_by_one(gen: RemoteGenerator, server: Server) -> None:
    params = replace(LONG, n=2, max_tokens=40, logprobs=1)
    (expected,) = gen.generate(["hello"], params)
    events = list(gen.events("hello", params))
    assert len(events) > 4
    for completion in expected.completions:
        own = [event for event in events if event.index == completion.index]
        assert [token for event in own for token in event.token_ids] == completion.token_ids
        assert "".join(event.text for event in own) == completion.text
        assert [top for event in own for top in event.top_logprobs or ()] == completion.top_logprobs
        assert (own[-1].finish_reason, own[-1].weight_versions) == ("length", completion.weight_versions)
    stream = gen.events(Request([5], LONG, "mine"))
    assert next(stream).id == "mine"
    stream.close()
    until(server.idle)
    assert "outside the vocabulary" in refusal(lambda: next(gen.events([99999])), ValueError)
    assert "temperature" in refusal(lambda: gen.events("a", SamplingParams(temperature=-1)), ValueError)


def test_scores_are_those_of_a_generator(gen: RemoteGenerator, here: Generator) -> None:
    sequences = [random_ids(20, seed=seed) for seed in range(70)]
    found = gen.score(sequences, 3, temperature=0.7)
    assert found == here.score(sequences, 3, temperature=0.7)
    assert len(found) == 70
    assert gen.score(sequences, 3, logprobs=2) == here.score(sequences, 3, logprobs=2)
    assert gen.score(["hello", [5, 6]], [1, 0])[1][1:] == here.score([[5, 6]])[0][1:]
    assert "outside the vocabulary" in refusal(lambda: gen.score([[99999]]), ValueError)
    gen.pause()
    assert "paused; call resume before score" in refusal(lambda: gen.score([[5]]))
    gen.resume()


def test_a_policy_here_has_the_bits_of_draws_there(gen: RemoteGenerator, here: Generator) -> None:
    outputs = gen.generate([random_ids(50), random_ids(20)], SamplingParams(n=3, max_tokens=10))
    pairs = [(output.prompt_token_ids, sample) for output in outputs for sample in output.completions]
    logprobs = Policy(here).logprobs([ids + sample.token_ids for ids, sample in pairs], [len(ids) for ids, _ in pairs])
    assert logprobs.tolist() == [value for _, sample in pairs for value in sample.raw_logprobs]


def test_an_adapter_is_merged_and_taken_back(gen: RemoteGenerator, here: Generator, talker: Path) -> None:
    state = adapter(talker)
    here.update_adapter(state, CONFIG)
    expected = here.generate([[5, 6]], SHORT)[0].completions[0].token_ids
    here.update_adapter(None)
    version, old = gen.weight_version, gen.generate([[5, 6]], SHORT)[0].completions[0]
    sharded = {name: Sharded(tensor) for name, tensor in state.items()}
    assert gen.update_adapter(sharded, CONFIG) == version + 1
    new = gen.generate([[5, 6]], SHORT)[0].completions[0]
    assert (new.token_ids, new.weight_versions) == (expected, [(version + 1, 0, 8)])
    wrong = {name.replace("q_proj", "x_proj"): tensor for name, tensor in state.items()}
    assert "unexpected tensor" in refusal(lambda: gen.update_adapter(wrong, CONFIG), ValueError)
    assert "use_dora" in refusal(lambda: gen.update_adapter(state, {**CONFIG, "use_dora": True}), ValueError)
    assert "no tensors" in refusal(lambda: gen.update_adapter({}, CONFIG), ValueError)
    assert gen.generate([[5, 6]], SHORT)[0].completions[0].token_ids == expected
    assert gen.update_adapter(None, version=99) == 99
    assert gen.generate([[5, 6]], SHORT)[0].completions[0].token_ids == old.token_ids != expected


def test_sparse_deltas_are_sent_and_checked_as_a_whole(gen: RemoteGenerator, here: Generator, talker: Path) -> None:
    weights, name = load_file(talker / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    indices = torch.arange(0, weights[name].numel(), 3)
    deltas: dict[str, Any] = {name: (indices, torch.randn(len(indices))), "model.norm.weight": torch.ones(64) * 2}
    gen.update_weights(weights)
    version, old = gen.weight_version, gen.generate([[5, 6]], SHORT)[0].completions[0].token_ids
    here.update_weights(deltas, partial=True)
    expected = here.generate([[5, 6]], SHORT)[0].completions[0].token_ids
    here.update_weights(weights)
    wrong = {**deltas, "model.layers.0.mlp.down_proj.weight": (torch.tensor([1 << 30]), torch.ones(1))}
    assert "indices outside of its" in refusal(lambda: gen.update_weights(wrong, partial=True), ValueError)
    assert "unexpected tensor 'x" in refusal(
        lambda: gen.update_weights({**deltas, "x": deltas[name]}, partial=True), ValueError
    )
    assert gen.generate([[5, 6]], SHORT)[0].completions[0].token_ids == old
    assert gen.update_weights(deltas, partial=True) == version + 1
    assert gen.generate([[5, 6]], SHORT)[0].completions[0].token_ids == expected
    gen.update_weights(weights)


# ------------------------------------------------------------------------------------------------ the start


def test_it_waits_for_a_model_that_is_being_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = tmp_path / "slow"
    with Server(STUB, str(loaded), "--rollout", "--api-key", KEY, key=KEY) as server:
        gen = RemoteGenerator(server.url, api_key=KEY)
        soon = RemoteGenerator(server.url, api_key=KEY, ready_timeout=0)
        message = refusal(lambda: soon.generate([[5]], SHORT))
        assert "is being loaded; the server was not ready within 0 seconds (ready_timeout)" in message
        timer = threading.Timer(1, loaded.touch)
        timer.start()
        with caplog.at_level(logging.WARNING):
            assert len(gen.generate([[5]], SHORT)[0].completions[0].token_ids) == 8
        assert f"waiting for {server.url} (0 seconds so far): the model" in caplog.text
        request = Request([5], replace(SHORT, max_tokens=1), priority=3)
        assert [output.completions[0].token_ids for output in gen.stream([request])] == [[10]], "see StubGenerator"
        assert [event.token_ids for event in gen.events(request)] == [[10]]
        assert "priority" in refusal(lambda: next(gen.events(replace(request, priority="3"))), ValueError)  # type: ignore[arg-type]
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}, "priority": 3}
        assert server.post("/inference/v1/generate", body).json()["choices"][0]["token_ids"] == [10]
        larger_first = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "priority": -3}
        assert server.post("/generate", larger_first).json()["output_ids"] == [10]
        assert '"output_ids":[10]' in server.post("/generate", {**larger_first, "stream": True}).text


def test_it_does_not_wait_for_what_cannot_come(tmp_path: Path) -> None:
    gone = RemoteGenerator("http://localhost:1", ready_timeout=0.1)
    message = refusal(lambda: gone.generate([[5]], SHORT), ConnectionError)
    assert message.endswith("the server was not ready within 0.1 seconds (ready_timeout)")
    assert "no answer from http://localhost:1" in message


def test_spans_of_a_completion_come_back_as_tuples() -> None:
    completion = Completion(0, [5, 6], "", "stop", weight_versions=[(3, 0, 1), (4, 1, 2)], recomputed=[(4, 1)])
    back = completion_of(json.loads(json.dumps({name: getattr(completion, name) for name in RESUMED})))
    assert (back, back.recomputed) == (completion, [(4, 1)])
