"""use_beam_search in /completions and /chat/completions; test_beam_search.py holds the beams to transformers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import random_ids
from serving import Server

from fastgen import Generator
from fastgen.beam_search import BeamCompletion

pytestmark = pytest.mark.timeout(60)

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hello you"}]


def asked(server: Server, path: str, **fields: Any) -> Any:
    reply = server.post(f"/v1/{path}", {"use_beam_search": True, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_completions_have_the_beams_of_each_prompt(rollout_server: Server, here: Generator) -> None:
    prompts = [random_ids(20), random_ids(33)]
    options = {"n": 3, "max_tokens": 7, "length_penalty": 0.5, "temperature": 0, "stop_token_ids": [9]}
    body = asked(rollout_server, "completions", prompt=prompts, logprobs=2, return_token_ids=True, **options)
    outputs = here.beam_search(prompts, 3, 7, length_penalty=0.5, stop_token_ids=[9], logprobs=2)
    expected = [completion for output in outputs for completion in output.completions]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for choice, completion in zip(body["choices"], expected, strict=True):
        assert isinstance(completion, BeamCompletion)
        assert choice["token_ids"] == completion.token_ids
        assert choice["text"] == completion.text
        assert choice["finish_reason"] == completion.finish_reason
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(completion.raw_logprobs)
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * len(completion.token_ids)
    count = sum(len(completion.token_ids) for completion in expected)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (53, count)


def test_a_chat_has_the_best_answer_first(rollout_server: Server, here: Generator) -> None:
    (output,) = here.beam_search([{"messages": CHAT}], 2, 6)
    body = asked(rollout_server, "chat/completions", messages=CHAT, n=2, max_tokens=6)
    assert [choice["message"]["content"] for choice in body["choices"]] == [each.text for each in output.completions]
    (best,) = asked(rollout_server, "chat/completions", messages=CHAT, max_tokens=6, n=1)["choices"]
    assert best["message"]["content"] == here.beam_search([{"messages": CHAT}], 1, 6)[0].text


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"stream": True}, "stream", "the best answer is only known at the end"),
        ({"stop": "a"}, "stop", "stop is not available with use_beam_search; leave one of them out"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not available with use_beam_search"),
        ({"frequency_penalty": 1}, "frequency_penalty", "is not available with use_beam_search"),
        ({"n": 128}, None, "128 beams are too many with 1 stop ids; ask for at most 127"),
        ({"length_penalty": "1"}, "length_penalty", "valid number"),
        ({"length_penalty": 1000}, "length_penalty", "it must be from -40 to 40"),
    ],
)
def test_what_a_search_does_not_take(rollout_server: Server, fields: dict[str, Any], param: str, reason: str) -> None:
    reply = rollout_server.post("/v1/chat/completions", {"messages": CHAT, "use_beam_search": True, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
    neutral = {"use_beam_search": False, "length_penalty": 2, "max_tokens": 1}
    assert rollout_server.post("/v1/chat/completions", {"messages": CHAT, **neutral}).status_code == 200
