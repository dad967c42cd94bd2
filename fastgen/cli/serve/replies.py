"""From the engine's events to OpenAI's answers, whole or in chunks.

A reply is fed with the events of its requests as they come, and says the chunks; a whole answer is what one chunk a
choice would say. Nothing here waits or reads a clock but for `created`, so that it may run in any thread.
"""

from __future__ import annotations

import codecs
import math
import time
import uuid
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, Generic, TypeVar, cast

from fastgen.cli.serve import shapes
from fastgen.cli.serve.messages import joined
from fastgen.cli.serve.protocol import ApiError, ChatRequest, CompletionRequest
from fastgen.cli.serve.tokens import PromptTokens, Vocabulary
from fastgen.cli.serve.toolcalls import ToolParser
from fastgen.request import Event

UNLIKELY = -9999.0  # stands for minus infinity, which JSON does not have


class Plain:
    """Stands where a ToolParser does: all text of a choice is content of its message."""

    def push(self, text: str, last: bool = False) -> list[shapes.Delta]:
        """The deltas that new text makes; they hold content or tool_calls, no role. last: nothing more will come."""
        return [{"content": text}] if text else []


RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)


class _Reply(Generic[RequestT]):
    """What the replies of both endpoints have in common: an envelope, and counts. kind: what a chunk is called."""

    prefix: str
    kind: str
    request: RequestT

    def __init__(
        self, request: RequestT, model: str, prompts: SequenceOf[PromptTokens], vocabulary: Vocabulary | None
    ) -> None:
        self.request, self.model, self.prompts, self.vocabulary = request, model, prompts, vocabulary
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._generated = 0
        self._cached = [0] * len(prompts)
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        if vocabulary is None and request.logprobs is not None and request.logprobs is not False:
            message = "this model has no tokenizer files, so its tokens have no names; leave logprobs out"
            raise ApiError(400, message, "logprobs", "invalid_value")

    @property
    def usage(self) -> shapes.Usage:
        """Of all that has been pushed: a prompt counts once, however many its choices are."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt_tokens + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def end(self) -> list[Any]:
        """The chunks that come after all events: the usage, where it is asked for."""
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

    def _count(self, event: Event, prompt: int) -> None:
        self._generated += len(event.token_ids)
        self._cached[prompt] = event.cached_tokens

    @property
    def _words(self) -> Vocabulary:
        assert self.vocabulary is not None
        return self.vocabulary


# ------------------------------------------------------------------------------------------------- chat


class ChatReply(_Reply[ChatRequest]):
    """The answer to a chat. text_filter: makes the filter of a choice, where there are tools."""

    prefix, kind = "chatcmpl", "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        model: str,
        prompt: PromptTokens,
        vocabulary: Vocabulary | None,
        text_filter: Callable[[], ToolParser | Plain] = Plain,
    ) -> None:
        super().__init__(request, model, [prompt], vocabulary)
        self._filters = [text_filter() for _ in range(request.choices)]
        self._begun = [False] * request.choices
        self._calls = [False] * request.choices

    def push(self, events: Iterable[Event], prompt: int = 0) -> list[shapes.ChatChunk]:
        """The chunks that new events make: of each choice first the role, then what it says, then why it ended."""
        return [chunk for event in checked(events) for chunk in self._chunks(event)]

    def _chunks(self, event: Event) -> Iterable[shapes.ChatChunk]:
        index, ids = event.index, event.token_ids
        if not self._begun[index]:
            self._begun[index] = True
            begin = self._delta(index, {"role": "assistant", "content": ""})
            if self.request.return_token_ids:
                begin["prompt_token_ids"] = self.prompts[0].ids
            yield begin
        self._count(event, 0)
        deltas, logprobs = self._said(event), self._logprobs(event)
        if not deltas and ids and (logprobs is not None or self.request.return_token_ids):
            deltas = [{}]  # they have no text yet
        for number, delta in enumerate(deltas):  # logprobs and ids come once, with the first
            yield self._delta(index, delta, None if number else logprobs, ids=[] if number else ids)
        if event.finish_reason is not None:
            yield self._delta(index, {}, reason=self._reason(event))

    def _said(self, event: Event) -> list[shapes.Delta]:
        deltas = self._filters[event.index].push(event.text, event.finish_reason is not None)
        self._calls[event.index] |= any("tool_calls" in delta for delta in deltas)
        return deltas

    def _reason(self, event: Event) -> str:
        assert event.finish_reason is not None
        return "tool_calls" if event.finish_reason == "stop" and self._calls[event.index] else event.finish_reason

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
        return cast(shapes.ChatChunk, self._chunk(choice))

    def whole(self, events: Iterable[Event]) -> shapes.ChatCompletion:
        """The answer that all events of the request make."""
        choices = [self._choice(event) for event in joined(checked(events))]
        reply = {**self._envelope(choices, "chat.completion"), "usage": self.usage}
        if self.request.return_token_ids:
            reply["prompt_token_ids"] = self.prompts[0].ids
        return cast(shapes.ChatCompletion, reply)

    def _choice(self, event: Event) -> shapes.ChatChoice:
        self._count(event, 0)
        choice: shapes.ChatChoice = {
            "index": event.index,
            "message": _message(self._said(event)),
            "logprobs": self._logprobs(event),
            "finish_reason": self._reason(event),
        }
        if self.request.return_token_ids:
            choice["token_ids"] = event.token_ids
        return choice

    def _logprobs(self, event: Event) -> shapes.ChatLogprobs | None:
        """An entry a token, the stop token's included."""
        if self.request.alternatives is None:
            return None
        content: list[shapes.TokenLogprob] = []
        for place, (token, logprob) in enumerate(zip(event.token_ids, event.raw_logprobs, strict=True)):
            top = event.top_logprobs[place] if event.top_logprobs else {}
            tops = [self._alternative(*pair) for pair in top.items()]
            own = self._alternative(token, top.get(token, logprob))  # where it is among them, it is one number
            content.append({**own, "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _alternative(self, token: int, logprob: float) -> shapes.Alternative:
        words = self._words
        return {"token": words.text(token), "logprob": _finite(logprob), "bytes": list(words.raw(token))}


def _message(deltas: Iterable[shapes.Delta]) -> shapes.ChatMessage:
    """The message that deltas add up to."""
    content, calls = "", dict[int, shapes.ToolCall]()
    for delta in deltas:
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            blank: shapes.ToolCall = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(piece["index"], blank)
            call["id"] += piece.get("id", "")
            call["function"]["name"] += piece["function"].get("name", "")
            call["function"]["arguments"] += piece["function"].get("arguments", "")
    message: shapes.ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


# ------------------------------------------------------------------------------------------------- completions


class CompletionReply(_Reply[CompletionRequest]):
    """The answers to the prompts of /completions: choice n p + i is sample i of prompt p."""

    prefix, kind = "cmpl", "text_completion"

    def __init__(
        self, request: CompletionRequest, model: str, prompts: SequenceOf[PromptTokens], vocabulary: Vocabulary | None
    ) -> None:
        super().__init__(request, model, prompts, vocabulary)
        self._held: dict[int, list[Event]] = {}  # of prompts, until their logprobs are known, which come first
        if request.echo and request.logprobs is not None:
            self._held = {number: [] for number in range(len(prompts))}
        self._scores: dict[int, Event] = {}  # by prompt: the event with the prompt's logprobs
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}

    def push(self, events: Iterable[Event], prompt: int = 0) -> list[shapes.Completion]:
        """The chunks that new events of a prompt make.

        With echo and logprobs they are held back until the prompt's logprobs come, with the end of its sample 0.
        """
        events = checked(events)
        if prompt in self._held:
            self._held[prompt] += events
            self._scored(events, prompt)
            if prompt not in self._scores:
                return []
            events = self._held.pop(prompt)
        return [self._chunk(self._choice(event, prompt)) for event in events if self._tells(event, prompt)]

    def _scored(self, events: Iterable[Event], prompt: int) -> None:
        for event in events:
            if event.prompt_logprobs is not None:
                self._scores[prompt] = event

    def _tells(self, event: Event, prompt: int) -> bool:
        """Whether an event makes a chunk; one with a part of a character may have nothing to say, but counts."""
        first = self._index(event, prompt) not in self._begun and self.request.echo
        told = self.request.logprobs is not None or self.request.return_token_ids
        if event.text or event.finish_reason is not None or first or told:
            return True
        self._count(event, prompt)
        return False

    def _index(self, event: Event, prompt: int) -> int:
        return prompt * self.request.choices + event.index

    def whole(self, events: SequenceOf[Iterable[Event]]) -> shapes.Completion:
        """The answer that all events make, which are given by prompt."""
        choices = []
        for prompt, own in enumerate(events):
            merged = joined(checked(own))
            self._scored(merged, prompt)
            choices += [self._choice(event, prompt) for event in merged]
        return cast(shapes.Completion, {**self._envelope(choices), "usage": self.usage})

    def _choice(self, event: Event, prompt: int) -> shapes.CompletionChoice:
        self._count(event, prompt)
        index, given, text = self._index(event, prompt), self.prompts[prompt], event.text
        first = index not in self._begun
        self._begun.add(index)
        if first and self.request.echo:
            text = given.text + text
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = self._logprobs(event, prompt, first)
        choice: shapes.CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": event.finish_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = event.token_ids
            if first:
                choice["prompt_token_ids"] = given.ids
        return choice

    def _logprobs(self, event: Event, prompt: int, first: bool) -> shapes.Logprobs:
        """An entry a token, the stop token's included; those of the prompt before the first, where it is echoed."""
        found: shapes.Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        given, index = self.prompts[prompt], self._index(event, prompt)
        if first:
            offsets = self._offsets[index] = _Offsets(self._words)
            if self.request.echo:
                scores = self._scores[prompt]
                assert scores.prompt_logprobs is not None
                self._list(given.ids, scores.prompt_logprobs, scores.prompt_top_logprobs, found)
                found["text_offset"] += offsets.take(given.ids, given.text)
                offsets.begin(len(given.text))
        self._list(event.token_ids, event.raw_logprobs, event.top_logprobs, found)
        found["text_offset"] += self._offsets[index].take(event.token_ids, event.text)
        return found

    def _list(
        self, ids: list[int], logprobs: list[float], tops: list[dict[int, float]] | None, found: shapes.Logprobs
    ) -> None:
        """Append tokens to lists of logprobs. A token is among its alternatives, so that they are one more at times."""
        name = self._words.name
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            found["tokens"].append(name(token))
            if math.isnan(logprob):
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            top = dict(tops[place]) if tops else {}
            own = top.setdefault(token, logprob)
            found["token_logprobs"].append(_finite(own))
            named: dict[str, float] = {}
            for other, value in top.items():  # best first: of tokens with one name, the best
                named.setdefault(name(other), _finite(value))
            found["top_logprobs"].append(named)


class _Offsets:
    """Where in a text its tokens begin, in characters; special tokens have no length unless the text shows them.

    Bytes that are no characters make them approximate: tokenizers show these in different ways.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.begin(0)

    def begin(self, at: int) -> None:
        """What comes begins there."""
        self._at, self._start = at, at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, ids: Iterable[int], text: str) -> list[int]:
        """The offsets of the next tokens, of which `text` is known to come of them."""
        found, base = [], self._at
        for token in ids:
            name = self._vocabulary.text(token)
            if token in self._vocabulary.special and not text.startswith(name, self._at - base):
                found.append(self._at)
                continue
            new = self._decoder.decode(self._vocabulary.raw(token))
            found.append(self._at + max(0, len(new) - len(name)))  # behind a character that has remained a part
            if self._at == self._start and new.startswith(" ") and text[:1] not in ("", " "):
                new = new[1:]  # a tokenizer that begins each text with a space
            self._at += len(new)
        return found


# ------------------------------------------------------------------------------------------------- both


def _finite(logprob: float) -> float:
    return logprob if logprob > UNLIKELY else UNLIKELY


def checked(events: Iterable[Event]) -> list[Event]:
    """Raises ApiError where an event says that its sample failed, which fails the request."""
    events = list(events)
    for event in events:
        if event.finish_reason in ("error", "abort"):
            error = event.error or "the request was aborted"
            if error.startswith("the mask"):  # which the request has asked for: to send it again is of no use
                raise ApiError(400, error, code="invalid_value")
            raise ApiError(500, error, code="engine_error")
    return events
