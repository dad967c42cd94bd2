"""replies.py: complete and chunked responses of real events, as the openai package reads them.

The model of test_serve_openai.py writes text; the random weights of `gen` write parts of characters, too.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from conftest import EOS, VOCAB, allow
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion as OpenAIChat
from openai.types.chat import ChatCompletionChunk as OpenAIChunk
from pydantic import BaseModel

from fastgen import Generator
from fastgen.cli.serve.prompts import ModelFacts, needed, prepare
from fastgen.cli.serve.protocol import ApiError, ChatRequest, CompletionRequest, read_request
from fastgen.cli.serve.replies import ChatReply, CompletionReply, PromptTokens, Vocabulary
from fastgen.request import Event, SamplingParams
from fastgen.text.tokenizer import BROKEN

EXTENSIONS = {"token_ids", "prompt_token_ids", "weight_versions", "max_model_len"}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


class Asked:
    """A request, to /chat/completions if it has messages, and its events by step."""

    def __init__(self, gen: Generator, mask: Any = None, **fields: Any) -> None:
        kind: Any = ChatRequest if "messages" in fields else CompletionRequest
        self.request = read_request(kind, json.dumps({"seed": 5, "max_tokens": 12, **fields}).encode())
        self.vocabulary = Vocabulary(needed(gen.tokenizer))
        model = ModelFacts("tiny", gen.tokenizer, self.vocabulary, SamplingParams(mask=mask), VOCAB, gen.max_model_len)
        self.chat = kind is ChatRequest
        reply, params = prepare(model, self.request)
        self.prompts = reply.prompts
        for number, prompt in enumerate(self.prompts):
            gen.add(prompt.ids, params, id=number)
        self.steps: list[list[Event]] = []
        while gen.unfinished:
            self.steps.append(gen.step())
        self.events = [event for events in self.steps for event in events]

    def reply(self) -> ChatReply | CompletionReply:
        if self.chat:
            return ChatReply(self.request, "tiny", self.prompts[0], self.vocabulary)
        return CompletionReply(self.request, "tiny", self.prompts, self.vocabulary)

    def whole(self) -> dict[str, Any]:
        return as_openai(OpenAIChat if self.chat else OpenAICompletion, self.reply().whole(self.events))

    def chunks(self) -> list[dict[str, Any]]:
        reply = self.reply()
        steps = [self.events] if reply.scored else self.steps
        chunks = [chunk for events in steps for chunk in reply.push(events)] + reply.end()
        return [as_openai(OpenAIChunk if self.chat else OpenAICompletion, chunk) for chunk in chunks]


def as_openai(kind: type[BaseModel], reply: Any) -> dict[str, Any]:
    """Return the reply after JSON. The client's type must accept it without conversion and unknown fields.

    Two nulls are patched first: for the first token of an echoed prompt, and the finish_reason before a choice's end.
    """
    sent: dict[str, Any] = json.loads(json.dumps(reply, allow_nan=False))
    read = json.loads(json.dumps(reply))
    for choice in read.get("choices", ()):
        if read["object"] == "text_completion":
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        for values in ((choice.get("logprobs") or {}).get(name, []) for name in ("token_logprobs", "top_logprobs")):
            values[:] = [value for value in values if value is not None]
    assert extras(kind.model_validate(read, strict=True)) <= EXTENSIONS
    return sent


def extras(value: Any) -> set[str]:
    """Return the fields that the client's types do not have."""
    if isinstance(value, list | tuple):
        return set().union(*map(extras, value))
    if isinstance(value, BaseModel):
        return set(value.model_extra or ()).union(*(extras(inner) for _, inner in value if inner is not None))
    return set()


def add_up(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Merge chunks of either endpoint: text, lists of logprobs, ids and reason, by choice."""
    total: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        own = total.setdefault(choice["index"], {"text": "", "logprobs": {}, "ids": [], "reason": None})
        assert own["reason"] is None, "nothing comes after the reason"
        own["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for name, values in (choice["logprobs"] or {}).items():
            own["logprobs"].setdefault(name, []).extend(values or [])
        own["ids"] += choice.get("token_ids", [])
        own["reason"] = choice["finish_reason"]
    return total


class Letters:
    """A mask without bytes and end tokens, so that the text is well-formed."""

    def fill(self, row: np.ndarray) -> None:
        allow(row, np.arange(3 + 256, VOCAB))

    def accept(self, token: int) -> None:
        assert token >= 3 + 256


TWO = ["The cat sat", "", "é 你好 😀"]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CASES: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES},
    "chat, scored": {"messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": 5, "return_token_ids": True},
    "chat, stops": {"messages": MESSAGES, "n": 2, "temperature": 2, "stop": ["e", "zz"], "logprobs": True},
    "chat, ends at once": {"messages": MESSAGES, "logit_bias": {str(EOS): 100}, "return_token_ids": True},
    "text": {"prompt": TWO, "n": 2, "logprobs": 3, "return_token_ids": True},
    "text, echoed": {"prompt": TWO, "echo": True, "n": 2, "logprobs": 2, "return_token_ids": True},
    "text, stops": {"prompt": "The cat", "temperature": 2, "stop": ["e", "zz"], "logprobs": 0, "n": 2},
    "ids, echoed": {"prompt": [[1, 310], [1, 319, 200, 230]], "echo": True, "logprobs": 5, "temperature": 0},
    "ids, one token": {"prompt": [1, 300, 301, 302], "max_tokens": 1, "echo": True, "logprobs": 1},
    "ids, plain": {"prompt": [1, 300, 301, 302], "n": 2},
    "only an echo": {"prompt": TWO, "echo": True, "n": 2},
    "no answer": {"prompt": TWO, "echo": True, "max_tokens": 0, "logprobs": 1},
}


@pytest.mark.parametrize("mask", [None, Letters()], ids=["bytes", "letters"])
@pytest.mark.parametrize("case", CASES)
def test_chunks_add_up_to_the_whole(gen: Generator, case: str, mask: Letters | None) -> None:
    asked = Asked(gen, mask, **CASES[case], **STREAM)
    request: Any = asked.request
    whole, chunks = asked.whole(), asked.chunks()
    total = add_up(chunks)
    assert chunks[-1]["usage"] == whole["usage"]
    counted, echo = 0, not asked.chat and bool(request.echo)
    for choice in whole["choices"]:
        number, index = divmod(choice["index"], request.choices)
        prompt, own = asked.prompts[number], total[choice["index"]]
        events = [event for event in asked.events if (event.id, event.index) == (number, index)]
        ids = [token for event in events for token in event.token_ids]
        counted += len(ids)
        text = choice["message"]["content"] if asked.chat else choice["text"]
        assert text == own["text"] == (prompt.text if echo else "") + "".join(event.text for event in events)
        assert choice["finish_reason"] == own["reason"] == events[-1].finish_reason
        if request.logprobs is None:
            assert choice["logprobs"] is None
            assert not own["logprobs"]
        elif asked.chat:
            content = choice["logprobs"]["content"]
            assert own["logprobs"]["content"] == content
            assert [entry["token"] for entry in content] == [asked.vocabulary.text(token) for token in ids]
            assert all(len(entry["top_logprobs"]) == (request.top_logprobs or 0) for entry in content)
        else:
            assert choice["logprobs"] == own["logprobs"]
            check_logprobs(asked.vocabulary, choice, [*(prompt.ids if echo else []), *ids], request.logprobs, echo)
        if asked.chat:
            deltas = [
                part["delta"] for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]
            ]
            assert (deltas[0], deltas[-1]) == ({"role": "assistant", "content": ""}, {})
        if request.return_token_ids:
            assert choice["token_ids"] == own["ids"] == ids
            assert (whole if asked.chat else choice)["prompt_token_ids"] == prompt.ids
    prompted = sum(len(prompt.ids) for prompt in asked.prompts)
    usage = whole["usage"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    assert counts == (prompted, counted, prompted + counted)
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(asked.prompts) * request.choices))
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


def check_logprobs(vocabulary: Vocabulary, choice: dict[str, Any], ids: list[int], most: int, echo: bool) -> None:
    """Check that each id has an entry, is among its alternatives, and is in the text at its offset."""
    logprobs, text = choice["logprobs"], choice["text"]
    names = [vocabulary.name(token) for token in ids]
    assert logprobs["tokens"] == names
    assert {len(values) for values in logprobs.values()} == {len(ids)}
    assert (logprobs["token_logprobs"][0] is None) == (logprobs["top_logprobs"][0] is None) == echo
    for name, own, top in list(zip(names, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[echo:]:
        assert math.isfinite(own)
        assert min(most, 1) <= len(top) <= most + 1
        assert top[name] >= own if most else top == {name: own}
    for token, name, offset in zip(ids, names, logprobs["text_offset"], strict=True):
        plain = token not in vocabulary.special and not name.startswith("bytes:")
        if plain and offset + len(name) <= len(text) and BROKEN not in text:
            assert text.startswith(name if offset else (name, name.lstrip()), offset)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_a_failed_sample_fails_the_request(gen: Generator) -> None:
    for asked in (Asked(gen, messages=MESSAGES), Asked(gen, prompt="a", echo=True, logprobs=1)):
        for reason, error, message, status, kind in (
            ("error", "the logits are not finite", "not finite", 500, "server_error"),
            ("error", "the mask allowed no token", "the mask", 400, "invalid_request_error"),
            ("abort", None, "was aborted", 500, "server_error"),
        ):
            bad = Event(0, 0, [], "", finish_reason=reason, error=error)
            for say in (asked.reply().push, asked.reply().whole):
                with pytest.raises(ApiError, match=message) as raised:
                    say([bad])
                assert (raised.value.status, raised.value.body["error"]["type"]) == (status, kind)


def test_an_end_of_text_at_once_is_one_entry(gen: Generator) -> None:
    text = Asked(gen, prompt="a", echo=True, logprobs=2, logit_bias={str(EOS): 100})
    (choice,) = text.whole()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    assert choice["logprobs"]["tokens"][len(text.prompts[0].ids) :] == ["</s>"]
    assert choice["logprobs"]["text_offset"][-1] == len("a")


def test_values_that_json_lacks_are_replaced(gen: Generator) -> None:
    """A logprob may be minus infinity; of tokens with equal names, the best counts."""
    request = CompletionRequest(prompt="a", logprobs=3)
    assert gen.tokenizer is not None
    vocabulary = Vocabulary(gen.tokenizer)
    byte = next(token for token in range(300) if vocabulary.raw(token) == b"\xff")
    tops = {300: -0.5, byte: -1.0, 5000: -2.0, 5001: -3.0, 301: -math.inf}  # the last but one are no tokens at all
    event = Event(0, 0, [301], "x", "length", logprobs=[0.0], raw_logprobs=[-math.inf], top_logprobs=[tops])
    whole = CompletionReply(request, "tiny", [PromptTokens([1])], vocabulary).whole([event])
    (choice,) = as_openai(OpenAICompletion, whole)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    top = choice["logprobs"]["top_logprobs"][0]
    assert (top["bytes:\\xff"], top[""], top[vocabulary.name(301)]) == (-1.0, -2.0, -9999.0)


def test_logprobs_need_names() -> None:
    with pytest.raises(ApiError, match="no tokenizer files") as raised:
        CompletionReply(CompletionRequest(prompt=[1], logprobs=0), "tiny", [PromptTokens([1])], None)
    assert raised.value.param == "logprobs"
