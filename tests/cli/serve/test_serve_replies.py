"""replies.py: complete and chunked responses of real events, as the openai package reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import EOS, VOCAB, allow
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion as OpenAIChat
from openai.types.chat import ChatCompletionChunk as OpenAIChunk
from pydantic import BaseModel

from fastgen import Generator
from fastgen.cli.serve.prompts import ModelFacts, encode_chat, encode_text
from fastgen.cli.serve.protocol import ApiError, ChatRequest, CompletionRequest, read_request
from fastgen.cli.serve.replies import ChatReply, CompletionReply, PromptTokens, Vocabulary
from fastgen.cli.serve.tools import Calling
from fastgen.request import Event, SamplingParams
from fastgen.text.tokenizer import BROKEN

EXTENSIONS = {"token_ids", "prompt_token_ids", "weight_versions", "max_model_len"}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Generator]:
    """The bundled model, which writes text; `gen` has random weights and writes parts of characters."""
    with Generator(seed=0, max_seqs=8, page_size=16, max_model_len=256) as tiny:
        yield tiny


def run(gen: Generator, prompts: list[PromptTokens], params: SamplingParams) -> list[list[Event]]:
    """Return the events of each step, with the indices of prompts as ids."""
    for number, prompt in enumerate(prompts):
        gen.add(prompt.ids, params, id=number)
    said = []
    while gen.unfinished:
        said.append(gen.step())
    return said


class Chat:
    """A chat request and its events."""

    def __init__(self, gen: Generator, **fields: Any) -> None:
        body = {"messages": MESSAGES, "seed": 5, "max_tokens": 12, **fields}
        self.request = read_request(ChatRequest, json.dumps(body).encode())
        assert gen.tokenizer is not None
        self.prompt = PromptTokens(encode_chat(self.request, gen.tokenizer, Calling(gen.tokenizer, [])))
        self.vocabulary = Vocabulary(gen.tokenizer)
        self.steps = run(gen, [self.prompt], self.request.sampling_params(SamplingParams()))
        self.events = [event for events in self.steps for event in events]

    def reply(self, parser: Any = lambda: None) -> ChatReply:
        return ChatReply(self.request, "tiny", self.prompt, self.vocabulary, parser)

    def whole(self, parser: Any = lambda: None) -> dict[str, Any]:
        return as_openai(OpenAIChat, self.reply(parser).whole(self.events))

    def chunks(self, parser: Any = lambda: None) -> list[dict[str, Any]]:
        reply = self.reply(parser)
        chunks = [chunk for events in self.steps for chunk in reply.push(events)] + reply.end()
        return [as_openai(OpenAIChunk, chunk) for chunk in chunks]


class Letters:
    """A mask without bytes and end tokens, so that the text is well-formed."""

    def fill(self, row: np.ndarray) -> None:
        allow(row, np.arange(3 + 256, VOCAB))

    def accept(self, token: int) -> None:
        assert token >= 3 + 256


class Text:
    """A request to /completions and its events."""

    def __init__(self, gen: Generator, letters: bool = False, **fields: Any) -> None:
        self.request = read_request(CompletionRequest, json.dumps({"seed": 5, **fields}).encode())
        echo = bool(self.request.echo)
        assert gen.tokenizer is not None
        self.vocabulary = Vocabulary(gen.tokenizer)
        model = ModelFacts("tiny", gen.tokenizer, self.vocabulary, SamplingParams(), VOCAB, gen.max_model_len)
        self.prompts = [encode_text(prompt, model, echo) for prompt in self.request.prompts]
        params = self.request.sampling_params(SamplingParams(mask=Letters() if letters else None))
        self.steps = run(gen, self.prompts, params)
        self.events = [event for events in self.steps for event in events]

    def reply(self) -> CompletionReply:
        return CompletionReply(self.request, "tiny", self.prompts, self.vocabulary)

    def whole(self) -> dict[str, Any]:
        return as_openai(OpenAICompletion, self.reply().whole(self.events))

    def chunks(self) -> list[dict[str, Any]]:
        reply = self.reply()
        steps = [self.events] if reply.scored else self.steps
        chunks = [chunk for events in steps for chunk in reply.push(events)] + reply.end()
        return [as_openai(OpenAICompletion, chunk) for chunk in chunks]


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


# ------------------------------------------------------------------------------------------------- chat


def chat_cases() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    cases: list[dict[str, Any]] = [{}, {"temperature": 0}]
    for _ in range(8):
        case: dict[str, Any] = {"n": int(rng.integers(1, 4)), "temperature": float(rng.choice([0, 1, 2]))}
        if rng.random() < 0.6:
            case |= {"logprobs": True, "top_logprobs": int(rng.integers(0, 6))}
        if rng.random() < 0.3:
            case["stop"] = ["e", "zz"]
        if rng.random() < 0.3:
            case["return_token_ids"] = True
        if rng.random() < 0.3:
            case["logit_bias"] = {str(EOS): 100 if rng.random() < 0.5 else -100}
        cases.append(case)
    return cases


@pytest.mark.parametrize("case", chat_cases())
def test_a_chat_in_chunks_adds_up_to_the_whole(gen: Generator, case: dict[str, Any]) -> None:
    chat = Chat(gen, **case)
    whole, chunks = chat.whole(), chat.chunks()
    total = add_up(chunks)
    counted = 0
    for choice in whole["choices"]:
        events = [event for event in chat.events if event.index == choice["index"]]
        own, ids = total[choice["index"]], [token for event in events for token in event.token_ids]
        counted += len(ids)
        assert choice["message"]["content"] == own["text"] == "".join(event.text for event in events)
        assert choice["finish_reason"] == own["reason"] == events[-1].finish_reason
        if chat.request.logprobs:
            content = choice["logprobs"]["content"]
            assert own["logprobs"]["content"] == content
            assert [entry["token"] for entry in content] == [chat.vocabulary.text(token) for token in ids]
            assert all(len(entry["top_logprobs"]) == (chat.request.top_logprobs or 0) for entry in content)
        else:
            assert choice["logprobs"] is None
            assert not own["logprobs"]
        if chat.request.return_token_ids:
            assert choice["token_ids"] == own["ids"] == ids
            assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == chat.prompt.ids
    assert [choice["index"] for choice in whole["choices"]] == list(range(chat.request.choices))
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(chat.prompt.ids), counted)
    assert usage["total_tokens"] == len(chat.prompt.ids) + counted


def test_each_choice_of_a_stream_is_a_role_then_content_then_a_reason(gen: Generator) -> None:
    chunks = Chat(gen, n=3, stream=True).chunks()
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(list(choice["delta"]) == ["content"] and choice["delta"]["content"] for choice in own[1:-1])
        assert own[-1]["delta"] == {}
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_reasons_and_raw_logprobs(tiny: Generator) -> None:
    chat = Chat(tiny, temperature=0, max_tokens=200, logprobs=True, top_logprobs=3)
    (choice,) = chat.whole()["choices"]
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert content[-1]["token"] == "<|end|>", "the stop token counts, as usage says"
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert entry["logprob"] == max(values) <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
    assert "".join(entry["token"] for entry in content[:-1]) == choice["message"]["content"]
    cut = Chat(tiny, temperature=0, max_tokens=2).whole()["choices"][0]
    assert cut["finish_reason"] == "length"
    word = choice["message"]["content"].split()[1]
    stopped = Chat(tiny, temperature=0, stop=word).whole()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == choice["message"]["content"].partition(word)[0]


class Calls:
    """A parser that reports each letter a as a call, and the other text at the end."""

    def __init__(self) -> None:
        self.kept, self.calls = "", 0

    def push(self, text: str, last: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for letter in text:
            if letter == "a":
                call = {"index": self.calls, "id": f"c{self.calls}", "type": "function", "function": {"name": "f"}}
                deltas.append({"tool_calls": [call]})
                more = [{"index": self.calls, "function": {"arguments": piece}} for piece in ("{", "}")]
                deltas += [{"tool_calls": [piece]} for piece in more]
                self.calls += 1
            else:
                self.kept += letter
        return [*deltas, {"content": self.kept}] if last and self.kept else deltas


def test_a_filter_makes_tool_calls_of_text(tiny: Generator) -> None:
    chat = Chat(tiny, temperature=0, max_tokens=100, logprobs=True, return_token_ids=True)
    text = Chat(tiny, temperature=0, max_tokens=100).whole()["choices"][0]["message"]["content"]
    (choice,), chunks = chat.whole(Calls)["choices"], chat.chunks(Calls)
    assert text.count("a") > 1
    assert len(choice["message"]["tool_calls"]) == text.count("a")
    assert choice["message"]["content"] == text.replace("a", "")
    assert choice["message"]["tool_calls"][1] == {
        "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    state: Any = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(OpenAIChunk.model_validate(chunk))
    final = state.get_final_completion().choices[0]
    assert [call.function.arguments for call in final.message.tool_calls] == ["{}"] * text.count("a")
    total = add_up(chunks)[0]
    assert total["reason"] == "tool_calls"
    assert total["ids"] == choice["token_ids"]
    assert total["logprobs"]["content"] == choice["logprobs"]["content"]


def test_a_message_of_calls_alone_has_no_content(tiny: Generator) -> None:
    class Call:
        def push(self, text: str, last: bool) -> list[dict[str, Any]]:
            return [{"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f"}}]}] * last

    chat = Chat(tiny, temperature=0, max_tokens=3)
    (choice,) = chat.whole(Call)["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length", "it was cut short, whatever it held"


def test_a_failed_sample_fails_the_request(gen: Generator) -> None:
    chat = Chat(gen)
    text = Text(gen, prompt="a", echo=True, logprobs=1)
    for reason, error, message, status, kind in (
        ("error", "the logits are not finite", "not finite", 500, "server_error"),
        ("error", "the mask allowed no token", "the mask", 400, "invalid_request_error"),
        ("abort", None, "was aborted", 500, "server_error"),
    ):
        bad = Event(0, 0, [], "", finish_reason=reason, error=error)
        for say in (chat.reply().push, chat.reply().whole, text.reply().push, text.reply().whole):
            with pytest.raises(ApiError, match=message) as raised:
                say([bad])
            assert (raised.value.status, raised.value.body["error"]["type"]) == (status, kind)


# ------------------------------------------------------------------------------------------------- completions


def text_cases() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    prompts = ["The cat", ["The cat sat", "", "é 你好 😀"], [1, 300, 301, 302], [[1, 310], [1, 319, 200, 230]]]
    cases = []
    for number in range(24):
        case: dict[str, Any] = {
            "prompt": prompts[number % 4],
            "n": int(rng.integers(1, 3)),
            "max_tokens": int(rng.choice([1, 3, 12])),
            "temperature": float(rng.choice([0, 1, 2])),
            "echo": bool(rng.random() < 0.6),
            "letters": number >= 8,
        }
        if rng.random() < 0.7:
            case["logprobs"] = int(rng.integers(0, 6))
        if rng.random() < 0.3:
            case["stop"] = ["e", "zz"]
        if rng.random() < 0.3:
            case["return_token_ids"] = True
        cases.append(case)
    return cases


@pytest.mark.parametrize("case", text_cases())
def test_completions_in_chunks_add_up_to_the_whole(gen: Generator, case: dict[str, Any]) -> None:
    text = Text(gen, stream=True, stream_options={"include_usage": True}, **case)
    whole, chunks = text.whole(), text.chunks()
    total = add_up(chunks)
    assert chunks[-1]["usage"] == whole["usage"]
    counted = 0
    for choice in whole["choices"]:
        number, index = divmod(choice["index"], text.request.choices)
        prompt, own = text.prompts[number], total[choice["index"]]
        events = [event for event in text.events if (event.id, event.index) == (number, index)]
        ids = [token for event in events for token in event.token_ids]
        counted += len(ids)
        said = "".join(event.text for event in events)
        assert choice["text"] == own["text"] == (prompt.text if text.request.echo else "") + said
        assert choice["finish_reason"] == own["reason"] in ("stop", "length")
        if text.request.logprobs is None:
            assert choice["logprobs"] is None
            assert not own["logprobs"]
        else:
            assert choice["logprobs"] == own["logprobs"]
            shown = [*(prompt.ids if text.request.echo else []), *ids]
            check_logprobs(text.vocabulary, choice, shown, text.request.logprobs, bool(text.request.echo))
        if text.request.return_token_ids:
            assert choice["token_ids"] == own["ids"] == ids
            assert choice["prompt_token_ids"] == prompt.ids
    assert whole["usage"]["completion_tokens"] == counted
    assert whole["usage"]["prompt_tokens"] == sum(len(prompt.ids) for prompt in text.prompts)
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(text.prompts) * text.request.choices))


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


def test_an_end_of_text_at_once_is_one_entry(tiny: Generator) -> None:
    text = Text(tiny, prompt="a", echo=True, logprobs=2, max_tokens=5, logit_bias={"6": 100})
    (choice,) = text.whole()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    assert choice["logprobs"]["tokens"][len(text.prompts[0].ids) :] == ["<|end|>"]
    assert choice["logprobs"]["text_offset"][-1] == len("a")


def test_values_that_json_lacks_are_replaced(tiny: Generator) -> None:
    """A logprob may be minus infinity; of tokens with equal names, the best counts."""
    request = CompletionRequest(prompt="a", logprobs=3)
    assert tiny.tokenizer is not None
    vocabulary = Vocabulary(tiny.tokenizer)
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
