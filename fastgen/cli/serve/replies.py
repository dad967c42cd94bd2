"""OpenAI's responses, complete or in chunks, made of events of the engine.

A reply takes the events of its request as they come (`push`) and returns chunks, or all of them at once (`whole`) and
returns a complete response. The `id` of an event is the index of its prompt. Nothing here waits, so replies may run in
any thread.
"""

from __future__ import annotations

import codecs
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, Generic, TypeVar

from fastgen.cli.serve import shapes
from fastgen.cli.serve.messages import joined
from fastgen.cli.serve.protocol import ApiError, ChatRequest, CompletionRequest
from fastgen.cli.serve.tokens import PromptTokens, Vocabulary
from fastgen.cli.serve.toolcalls import ToolParser
from fastgen.request import Event

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have

Request = TypeVar("Request", ChatRequest, CompletionRequest)


class _BaseReply(Generic[Request]):
    """The common part of both kinds: envelope and counts. prefix: of the id; kind: the `object` of a chunk."""

    prefix: str
    kind: str

    def __init__(
        self, request: Request, model: str, prompts: SequenceOf[PromptTokens], vocabulary: Vocabulary | None
    ) -> None:
        self.request: Request = request
        self.model, self.prompts = model, prompts
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._generated = 0
        self._cached = [0] * len(prompts)
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        if vocabulary is None and request.logprobs is not None and request.logprobs is not False:
            message = "this model has no tokenizer files, so its tokens have no names; leave logprobs out"
            raise ApiError(400, message, "logprobs", "invalid_value")
        self._vocabulary: Any = vocabulary  # used only with logprobs

    @property
    def usage(self) -> shapes.Usage:
        """Counts of all events so far. A prompt counts once, whatever its number of choices."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt_tokens + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def end(self) -> list[Any]:
        """Return the chunks after the last event: the usage, if the request asks for it."""
        return [{**self._envelope([]), "usage": self.usage}] if self.request.include_usage else []

    def _envelope(self, choices: SequenceOf[Any], kind: str | None = None) -> dict[str, Any]:
        about = {"id": self.id, "object": kind or self.kind, "created": self.created, "model": self.model}
        return {**about, "choices": choices}

    def _chunk(self, choice: Any) -> Any:
        chunk = self._envelope([choice])
        if self.request.continuous_usage:
            chunk["usage"] = self.usage
        elif self.request.include_usage:
            chunk["usage"] = None
        return chunk

    def _whole(self, choices: SequenceOf[Any], kind: str | None = None) -> Any:
        return {**self._envelope(choices, kind), "usage": self.usage}

    def _count(self, event: Event) -> None:
        self._generated += len(event.token_ids)
        self._cached[int(event.id)] = event.cached_tokens


# ------------------------------------------------------------------------------------------------- chat


class ChatReply(_BaseReply[ChatRequest]):
    """The response of a chat. make_parser: returns the parser of tool calls for one choice, or None without tools."""

    prefix, kind = "chatcmpl", "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        model: str,
        prompt: PromptTokens,
        vocabulary: Vocabulary | None,
        make_parser: Callable[[], ToolParser | None] = lambda: None,
    ) -> None:
        super().__init__(request, model, [prompt], vocabulary)
        self._parsers = [make_parser() for _ in range(request.choices)]
        self._begun: set[int] = set()
        self._called: set[int] = set()  # choices with a tool call

    def push(self, events: Iterable[Event]) -> list[shapes.ChatChunk]:
        """Return the chunks for new events: for each choice first the role, then its content, then finish_reason."""
        return [chunk for event in checked(events) for chunk in self._chunks(event)]

    def _chunks(self, event: Event) -> Iterator[shapes.ChatChunk]:
        index, ids = event.index, event.token_ids
        if index not in self._begun:
            self._begun.add(index)
            begin = self._delta(index, {"role": "assistant", "content": ""})
            if self.request.return_token_ids:
                begin["prompt_token_ids"] = self.prompts[0].ids
            yield begin
        self._count(event)
        deltas, logprobs = self._deltas(event), self._logprobs(event)
        if not deltas and ids and (logprobs is not None or self.request.return_token_ids):
            deltas = [{}]  # tokens without text yet
        for number, delta in enumerate(deltas):  # logprobs and ids go with the first
            yield self._delta(index, delta, None if number else logprobs, ids=[] if number else ids)
        if event.finish_reason is not None:
            yield self._delta(index, {}, reason=self._reason(event))

    def _deltas(self, event: Event) -> list[shapes.Delta]:
        parser = self._parsers[event.index]
        if parser is None:
            return [{"content": event.text}] if event.text else []
        deltas = parser.push(event.text, event.finish_reason is not None)
        if any("tool_calls" in delta for delta in deltas):
            self._called.add(event.index)
        return deltas

    def _reason(self, event: Event) -> str:
        assert event.finish_reason is not None
        return "tool_calls" if event.finish_reason == "stop" and event.index in self._called else event.finish_reason

    def _delta(
        self,
        index: int,
        delta: shapes.Delta,
        logprobs: shapes.ChatLogprobs | None = None,
        reason: str | None = None,
        ids: list[int] | None = None,
    ) -> shapes.ChatChunk:
        choice: shapes.ChatChunkChoice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if self.request.return_token_ids:
            choice["token_ids"] = ids or []
        chunk: shapes.ChatChunk = self._chunk(choice)
        return chunk

    def whole(self, events: Iterable[Event]) -> shapes.ChatCompletion:
        """Return the complete response for all events of the request."""
        choices = [self._choice(event) for event in joined(checked(events))]
        reply: shapes.ChatCompletion = self._whole(choices, "chat.completion")
        if self.request.return_token_ids:
            reply["prompt_token_ids"] = self.prompts[0].ids
        return reply

    def _choice(self, event: Event) -> shapes.ChatChoice:
        self._count(event)
        choice: shapes.ChatChoice = {
            "index": event.index,
            "message": _message(self._deltas(event)),
            "logprobs": self._logprobs(event),
            "finish_reason": self._reason(event),
        }
        if self.request.return_token_ids:
            choice["token_ids"] = event.token_ids
        return choice

    def _logprobs(self, event: Event) -> shapes.ChatLogprobs | None:
        """Return an entry for each token, including the stop token."""
        if self.request.alternatives is None:
            return None
        content: list[shapes.TokenLogprob] = []
        for position, (token, logprob) in enumerate(zip(event.token_ids, event.raw_logprobs, strict=True)):
            top = event.top_logprobs[position] if event.top_logprobs else {}
            tops = [self._alternative(*pair) for pair in top.items()]
            own = self._alternative(token, top.get(token, logprob))  # the same number as among the alternatives
            content.append({**own, "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _alternative(self, token: int, logprob: float) -> shapes.Alternative:
        raw = self._vocabulary.raw(token)
        return {"token": self._vocabulary.text(token), "logprob": max(LOWEST, logprob), "bytes": list(raw)}


def _message(deltas: Iterable[shapes.Delta]) -> shapes.ChatMessage:
    """Return the message that deltas add up to."""
    content, calls = "", dict[int, shapes.MessageToolCall]()
    for delta in deltas:
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            blank: shapes.MessageToolCall = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(piece["index"], blank)
            call["id"] += piece.get("id", "")
            call["function"]["name"] += piece["function"].get("name", "")
            call["function"]["arguments"] += piece["function"].get("arguments", "")
    message: shapes.ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = list(calls.values())
    return message


# ------------------------------------------------------------------------------------------------- completions


class CompletionReply(_BaseReply[CompletionRequest]):
    """The response of /completions: choice n p + i is sample i of prompt p."""

    prefix, kind = "cmpl", "text_completion"

    def __init__(
        self, request: CompletionRequest, model: str, prompts: SequenceOf[PromptTokens], vocabulary: Vocabulary | None
    ) -> None:
        super().__init__(request, model, prompts, vocabulary)
        scored = request.echo and request.logprobs is not None
        # Events of prompts whose logprobs, which the response begins with, have not come yet.
        self._held: dict[int, list[Event]] = {prompt: [] for prompt in range(len(prompts))} if scored else {}
        self._scores: dict[int, Event] = {}  # by prompt: the event with the prompt's logprobs
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}

    def push(self, events: Iterable[Event]) -> list[shapes.TextCompletion]:
        """Return the chunks for new events. With echo and logprobs, the events of a prompt are held until its logprobs
        come, with the end of its sample 0."""
        chunks = []
        for event in checked(events):
            prompt = int(event.id)
            ready = [event]
            if prompt in self._held:
                self._held[prompt].append(event)
                ready = self._held.pop(prompt) if self._scored(event) else []
            chunks += [self._chunk(self._choice(event)) for event in ready if self._has_news(event)]
        return chunks

    def _scored(self, event: Event) -> bool:
        if event.prompt_logprobs is not None:
            self._scores[int(event.id)] = event
        return event.prompt_logprobs is not None

    def _has_news(self, event: Event) -> bool:
        """Return whether an event makes a chunk. An event without text, such as a part of a character, is counted."""
        first = self._index(event) not in self._begun and self.request.echo
        details = self.request.logprobs is not None or self.request.return_token_ids
        if event.text or event.finish_reason is not None or first or details:
            return True
        self._count(event)
        return False

    def _index(self, event: Event) -> int:
        return int(event.id) * self.request.choices + event.index

    def whole(self, events: Iterable[Event]) -> shapes.TextCompletion:
        """Return the complete response for all events of the request."""
        merged = joined(checked(events))
        for event in merged:
            self._scored(event)
        reply: shapes.TextCompletion = self._whole([self._choice(event) for event in merged])
        return reply

    def _choice(self, event: Event) -> shapes.CompletionChoice:
        self._count(event)
        index, prompt = self._index(event), self.prompts[int(event.id)]
        first = index not in self._begun
        self._begun.add(index)
        choice: shapes.CompletionChoice = {
            "index": index,
            "text": prompt.text + event.text if first and self.request.echo else event.text,
            "logprobs": None if self.request.logprobs is None else self._logprobs(event, first),
            "finish_reason": event.finish_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = event.token_ids
            if first:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _logprobs(self, event: Event, first: bool) -> shapes.TextLogprobs:
        """Return an entry for each token, including the stop token. With echo, the prompt's come before the first."""
        found: shapes.TextLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        prompt, index = self.prompts[int(event.id)], self._index(event)
        if first:
            offsets = self._offsets[index] = _Offsets(self._vocabulary)
            if self.request.echo:
                scores = self._scores[int(event.id)]
                assert scores.prompt_logprobs is not None
                self._append(found, prompt.ids, scores.prompt_logprobs, scores.prompt_top_logprobs)
                found["text_offset"] += offsets.take(prompt.ids, prompt.text)
                offsets.begin(len(prompt.text))
        self._append(found, event.token_ids, event.raw_logprobs, event.top_logprobs)
        found["text_offset"] += self._offsets[index].take(event.token_ids, event.text)
        return found

    def _append(
        self, found: shapes.TextLogprobs, ids: list[int], logprobs: list[float], tops: list[dict[int, float]] | None
    ) -> None:
        """Append the entries of tokens. A token is among its alternatives, which may be one more for that reason."""
        name = self._vocabulary.name
        for position, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            found["tokens"].append(name(token))
            if math.isnan(logprob):  # the first token of a prompt
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            top = dict(tops[position]) if tops else {}
            found["token_logprobs"].append(max(LOWEST, top.setdefault(token, logprob)))
            named: dict[str, float] = {}
            for other, value in top.items():  # best first: of tokens with equal names, the best stays
                named.setdefault(name(other), max(LOWEST, value))
            found["top_logprobs"].append(named)


class _Offsets:
    """Offsets of tokens in a text, in characters. A special token has length 0 unless the text shows it.

    Offsets behind bytes that are no characters are approximate, since tokenizers differ in how they show these.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.begin(0)

    def begin(self, offset: int) -> None:
        """Let the next token begin at an offset."""
        self._at, self._start = offset, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, ids: Iterable[int], text: str) -> list[int]:
        """Return the offsets of the next tokens. text: what is known of the text that they make."""
        found, base = [], self._at
        for token in ids:
            name = self._vocabulary.text(token)
            if token in self._vocabulary.special and not text.startswith(name, self._at - base):
                found.append(self._at)
                continue
            new = self._decoder.decode(self._vocabulary.raw(token))
            found.append(self._at + max(0, len(new) - len(name)))  # behind an earlier, incomplete character
            if self._at == self._start and new.startswith(" ") and text[:1] not in ("", " "):
                new = new[1:]  # the tokenizer begins each text with a space
            self._at += len(new)
        return found


# ------------------------------------------------------------------------------------------------- errors


def checked(events: Iterable[Event]) -> list[Event]:
    """Return the events. Raises ApiError for a sample that failed, which fails the request."""
    events = list(events)
    for event in events:
        if event.finish_reason in ("error", "abort"):
            error = event.error or "the request was aborted"
            if error.startswith("the mask"):  # the request's grammar caused it, so a retry is of no use
                raise ApiError(400, error, code="invalid_value")
            raise ApiError(500, error, code="engine_error")
    return events
