"""OpenAI's batch files through fggen: the answers equal fgserve's, and OpenAI's types accept them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generating import Fggen
from openai.types import Completion
from openai.types.chat import ChatCompletion

from fastgen import Generator, SamplingParams
from fastgen.cli.gen import main
from fastgen.engine.seeds import seed_of

Answer = Callable[..., list[dict[str, Any]]]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def answer(fggen: Fggen) -> Answer:
    """answer(*rows) runs a batch file of these rows, and returns the answers in their order."""

    def run(*rows: Any, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        Path("in.jsonl").write_text("".join(line + "\n" for line in lines))
        assert fggen("in.jsonl", "-o", "out.jsonl", "--seed", 3, *options) == 0
        found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
        return sorted(found, key=lambda record: int(record["id"].removeprefix("batch_req_")))

    return run


def asked(url: str, custom_id: str = "x", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "any", **body}}


def test_chats_and_completions_come_back_in_openais_shape(answer: Answer, gen: Generator) -> None:
    chat, text, several = answer(
        asked(CHAT, "a", messages=HELLO, max_tokens=4, n=2, logprobs=True, top_logprobs=2),
        asked(TEXT, "b", prompt="hello", max_tokens=3, seed=7, echo=True),
        asked(TEXT, "c", prompt=[[5], [5, 6, 7]], max_tokens=2, return_token_ids=True, echo=True, logprobs=0),
    )
    for record, custom_id in ((chat, "a"), (text, "b"), (several, "c")):
        assert record.keys() == {"id", "custom_id", "response", "error"}
        assert (record["custom_id"], record["error"], record["response"]["status_code"]) == (custom_id, None, 200)
    reply = ChatCompletion.model_validate(chat["response"]["body"], strict=True)
    (output,) = gen.generate([HELLO], SamplingParams(n=2, max_tokens=4, seed=seed_of(3, 0)))
    assert [choice.message.content for choice in reply.choices] == [c.text for c in output.completions]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == sum(len(c.token_ids) for c in output.completions)
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2  # type: ignore[union-attr, index]
    echoed = Completion.model_validate(text["response"]["body"], strict=True)
    (output,) = gen.generate("hello", SamplingParams(max_tokens=3, seed=7))
    assert echoed.choices[0].text == "hello" + output.text
    both = several["response"]["body"]["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    assert both[1]["prompt_token_ids"] == [5, 6, 7]
    (output,) = gen.generate([[5, 6, 7]], SamplingParams(max_tokens=2, seed=seed_of(3, 2), prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    expected = [None, *output.prompt_logprobs[1:], *output.completions[0].raw_logprobs]
    assert both[1]["logprobs"]["token_logprobs"] == expected


def test_an_answer_follows_its_response_format(answer: Answer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no type"}}}
    good, wrong = answer(
        asked(CHAT, messages=HELLO, max_tokens=40, response_format=wanted),
        asked(CHAT, messages=HELLO, response_format=bad),
    )
    content = good["response"]["body"]["choices"][0]["message"]["content"]
    assert json.loads(content) in ({"a": True}, {"a": False})
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "response_format"


NO_TOOLS = asked(CHAT, messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}])
WRONG: list[tuple[Any, str, str | None]] = [
    ("nonsense", "line 3 of in.jsonl cannot be read", None),
    ({"body": {"messages": HELLO}, "url": CHAT}, "custom_id is required", "custom_id"),
    ({"custom_id": "x", "url": CHAT}, "body is required", "body"),
    ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, "url should be '/v1/chat/completions' or", "url"),
    ({"custom_id": "x", "method": "GET", "url": CHAT, "body": {}}, "method should be 'POST'", "method"),
    (asked(CHAT), "messages is required", "messages"),
    (asked(CHAT, messages=HELLO, stream=True), "stream is not supported in a batch", "stream"),
    (
        asked(CHAT, messages=HELLO, use_beam_search=True),
        "use_beam_search is not supported in a batch",
        "use_beam_search",
    ),
    (asked(CHAT, messages=HELLO, temprature=1), "temprature is not supported", "temprature"),
    (asked(TEXT, prompt=[5] * 600), "maximum context length", "prompt"),
    (asked(TEXT, prompt=[5], logit_bias={"900": 1}), "outside the vocabulary", "logit_bias"),
    (NO_TOOLS, "tools are not", "tools"),
    (asked(TEXT, prompt="\ud800"), "prompt has '\\ud800', half of a surrogate pair", None),
    (asked(CHAT, messages=[{**HELLO[0], "a": float("nan")}]), "messages has NaN or an infinity", None),
]


def test_a_wrong_request_is_answered_with_its_error(answer: Answer) -> None:
    torn, good, *found = answer("{", asked(TEXT, prompt="hello", max_tokens=1), *(row for row, _, _ in WRONG))
    assert [record["response"]["status_code"] for record in (torn, good)] == [400, 200]
    for bad, (_, reason, param) in zip(found, WRONG, strict=True):
        assert bad["response"]["status_code"] == 400
        assert bad["error"] is None
        error = bad["response"]["body"]["error"]
        assert reason in error["message"]
        assert error["param"] == param


def test_options_are_what_bodies_do_not_say(answer: Answer, gen: Generator) -> None:
    rows = (asked(CHAT, messages=HELLO), asked(CHAT, messages=HELLO, max_tokens=2, temperature=1))
    found = answer(*rows, options=("--max-tokens", "3", "--temperature", "0"))
    assert [record["response"]["body"]["usage"]["completion_tokens"] for record in found] == [3, 2]
    (output,) = gen.generate([HELLO], SamplingParams(max_tokens=3, temperature=0))
    assert found[0]["response"]["body"]["choices"][0]["message"]["content"] == output.text


def test_a_batch_goes_on_where_it_was_left(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [asked(TEXT, f"id {row}", prompt="hello", max_tokens=4) for row in range(6)]
    whole = answer(*rows)
    assert len({record["response"]["body"]["choices"][0]["text"] for record in whole}) > 2
    lines = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:3])[:-5])
    for before, after in zip(whole, answer(*rows), strict=True):
        assert after["custom_id"] == before["custom_id"]
        assert after["response"]["body"]["choices"] == before["response"]["body"]["choices"]
    answer(*rows)
    assert "nothing is left to do of 6 rows, 0 of them errors\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--template", "{a}"),
        ("--system", "x"),
        ("--regex", "x"),
        ("--n", "2"),
        ("--logprobs",),
        ("--chat",),
        ("-o", "o.parquet"),
    ],
)
def test_what_a_batch_has_no_place_for(
    answer: Answer, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    answer(asked(TEXT, prompt="hello", max_tokens=1))
    assert main.main(["random", "in.jsonl", "-o", "other.jsonl", *options]) == 2
    assert "batch" in capsys.readouterr().err
