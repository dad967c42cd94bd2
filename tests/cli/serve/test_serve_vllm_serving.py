"""vLLM's routes /chat/completions/batch and /generative_scoring, held to the chats and completions one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from serving import Server

pytestmark = pytest.mark.timeout(60)

CHATS = [[{"role": "user", "content": text}] for text in ("what is 12 + 30?", "hi")]
LABELS = [273, 5, 926]


def post(server: Server, path: str, **fields: Any) -> Any:
    reply = server.post(path, fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_batch_has_the_answers_of_its_chats(bundled_server: Server) -> None:
    fields = {"temperature": 0, "max_tokens": 6, "logprobs": True, "return_token_ids": True, "prompt_logprobs": 1}
    fields["return_prompt_text"] = True
    batch = post(bundled_server, "/v1/chat/completions/batch", messages=CHATS, **fields)
    alone = [post(bundled_server, "/v1/chat/completions", messages=chat, **fields) for chat in CHATS]
    prompts = [{name: chat[name] for name in ("prompt_token_ids", "prompt_logprobs", "prompt_text")} for chat in alone]
    assert prompts[0] != prompts[1]
    assert batch["choices"] == [
        {**chat["choices"][0], "index": index, **prompt}
        for index, (chat, prompt) in enumerate(zip(alone, prompts, strict=True))
    ]
    assert not prompts[0].keys() & batch.keys()
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(chat["usage"][name] for chat in alone)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": CHATS[0]}, "messages[0]"),
        ({"messages": [CHATS[0], []]}, "messages[1]"),
        ({"messages": [CHATS[0], [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": CHATS, "stream": True}, "stream"),
        ({"messages": CHATS, "n": 2}, "n"),
        ({"messages": CHATS, "logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
def test_an_error_of_a_batch_names_its_place(bundled_server: Server, fields: dict[str, Any], param: str) -> None:
    reply = bundled_server.post("/v1/chat/completions/batch", fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_probabilities_of_the_first_label(bundled_server: Server, item_first: bool) -> None:
    query, items = [1, 669, 698], [[956, 3150], [611]]
    fields: dict[str, Any] = {"query": query, "items": items, "label_token_ids": LABELS, "item_first": item_first}
    prompts = [item + query if item_first else query + item for item in items]
    asked = {"logprobs": 0, "logprob_token_ids": LABELS, "return_tokens_as_token_ids": True, "max_tokens": 1}
    choices = post(bundled_server, "/v1/completions", prompt=prompts, **asked)["choices"]
    tops = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
    among_all = [[math.exp(top[f"token_id:{id}"]) for id in LABELS] for top in tops]
    for apply, expected in (
        (False, [labels[0] for labels in among_all]),
        (True, [labels[0] / sum(labels) for labels in among_all]),
    ):
        scored = post(bundled_server, "/generative_scoring", **fields, apply_softmax=apply)
        assert [each["index"] for each in scored["data"]] == [0, 1]
        assert [each["score"] for each in scored["data"]] == pytest.approx(expected, rel=1e-4)
        assert scored["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_texts_are_tokenized_apart_and_only_the_query_has_special_tokens(bundled_server: Server) -> None:
    query, item = "Is 3 above 2? Answer:", " yes"
    ids = post(bundled_server, "/tokenize", prompt=query)["tokens"]
    more = post(bundled_server, "/tokenize", prompt=item, add_special_tokens=False)["tokens"]
    texts, same = (
        post(bundled_server, "/generative_scoring", query=one, items=[other], label_token_ids=LABELS)["data"]
        for one, other in ((query, item), (ids, more))
    )
    assert texts == same


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"),
        ({"items": ["a", [5]]}, "items[1]"),
        ({"items": [[99999]]}, "items"),
        ({"query": [99999]}, "query"),
        ({"query": "", "items": ["b", ""], "add_special_tokens": False}, "items"),
        ({"items": ["a " * 3000]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [99999]}, "label_token_ids"),
    ],
)
def test_an_error_of_a_scoring_names_its_field(bundled_server: Server, fields: dict[str, Any], param: str) -> None:
    reply = bundled_server.post("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [5], **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("path", "fields", "begin"),
    [
        ("/v1/chat/completions/batch", {"messages": CHATS, "max_tokens": 1}, "chatcmpl"),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [5]}, "generative-scoring"),
    ],
)
def test_the_header_gives_the_id_of_an_answer(
    bundled_server: Server, path: str, fields: dict[str, Any], begin: str
) -> None:
    assert bundled_server.post(path, fields, headers={"X-Request-Id": "r-1"}).json()["id"] == f"{begin}-r-1"
