"""OpenAI's responses, complete or in chunks, made from the engine's events.

A reply takes the events of its request as they arrive and returns chunks (`push`), or takes all events at once and
returns a complete response (`whole`). The `id` of an event is the index of its prompt. Nothing here waits, so replies
may be made in any thread. Responses are plain dicts; tests check them against the types of the openai package.
"""

from __future__ import annotations

import codecs
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Generic, TypeVar

from fastgen.async_engine.client import joined
from fastgen.cli.serve.openai_input import ChatRequest, CompletionRequest
from fastgen.cli.serve.validation import ApiError
from fastgen.request import Event, RequestOutput, SamplingParams
from fastgen.text.reasoning import AnswerParser, ReasoningCounter
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tool_calls import joined_message

LOWEST = -9999.0  # replaces minus infinity, which JSON does not have


def token_name(token: int) -> str:
    """Return the name of a token without a vocabulary, as vLLM writes it for return_tokens_as_token_ids."""
    return f"token_id:{token}"


Request = TypeVar("Request", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The ids of a prompt. text: its text, for `echo` and `return_prompt_text`."""

    ids: list[int]
    text: str = ""


class _BaseReply(Generic[Request]):
    """The common part of both kinds of replies: the envelope and the counts.

    prefix: prefix of the response's id. kind: the `object` of a chunk. end_mark: bytes that end a stream.
    scored: True if the response begins with the logprobs of its prompts, which come with the last event of sample 0;
    then `push` takes all events at once. params: the parameters of the engine, with the model's defaults.
    """

    prefix: str
    kind: str
    params: SamplingParams
    scored = False
    end_mark = b"data: [DONE]\n\n"

    def __init__(
        self, request: Request, model: str, prompts: SequenceOf[PromptTokens], vocabulary: Vocabulary | None
    ) -> None:
        self.request: Request = request
        self.model, self.prompts = model, prompts
        self.id, self.created = f"{self.prefix}-{request.request_id or uuid.uuid4().hex}", int(time.time())
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._generated = 0
        self._cached = [0] * len(prompts)
        self._begun: set[int] = set()  # indices of choices that have a chunk
        if vocabulary is None and request.logprobs is not None and request.logprobs is not False:
            message = "this model has no tokenizer files, so its tokens have no names; leave logprobs out"
            raise ApiError(400, message, "logprobs", "invalid_value")
        self._vocabulary: Any = vocabulary  # used only with logprobs

    @property
    def usage(self) -> dict[str, Any]:
        """The token counts of all events so far. A prompt counts once, however many choices it has."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": self.prompt_tokens + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def end(self) -> list[dict[str, Any]]:
        """Return the chunks after the last event: the usage, if the request asks for it."""
        return [{**self._envelope([]), "usage": self.usage}] if self.request.streamed.usage else []

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the chunks of an error that ends the stream."""
        return [error.body]

    def _envelope(self, choices: SequenceOf[Any]) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices}

    def _complete(self, choices: SequenceOf[Any]) -> dict[str, Any]:
        """Return a complete response. Clients with types expect its nulls."""
        return {**self._envelope(choices), "service_tier": None, "system_fingerprint": None, "usage": self.usage}

    def _choice(
        self,
        index: int,
        logprobs: dict[str, Any] | None = None,
        ids: SequenceOf[int] = (),
        end: Event | None = None,
        **content: Any,
    ) -> dict[str, Any]:
        """Return a choice or a part of one. end: the event that comes with its end, if any. content: its content, under
        its name in the API."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": end and self._reason(end)}
        stopped = end and end.stop_reason
        asked = isinstance(stopped, str) or stopped in (self.request.stop_token_ids or ())
        choice["stop_reason"] = stopped if asked else None  # as in vLLM, None if the model ended it
        choice["token_ids"] = None
        if self.request.return_token_ids:
            choice["token_ids"], choice["weight_versions"] = list(ids), end and end.weight_versions
        return choice

    def _reason(self, event: Event) -> str | None:
        """Return the reason why the sample of an event ended, or None if it has not."""
        return event.finish_reason

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._envelope([choice])
        if self.request.streamed.usage:
            chunk["usage"] = self.usage if self.request.streamed.continuous_usage_stats else None
        return chunk

    def _prompt_ids(self, prompt: int) -> list[int] | None:
        """Return the ids of a prompt if the request asks for them."""
        return self.prompts[prompt].ids if self.request.return_token_ids else None

    def _prompt_scores(self, event: Event | None) -> list[dict[str, Any] | None] | None:
        """Return vLLM's `prompt_logprobs` if the request asks for them."""
        if self.request.prompt_logprobs is None:
            return None
        assert event is not None
        name = (lambda _: None) if self._vocabulary is None else self._vocabulary.text
        return prompt_scores(event, self.prompts[int(event.id)].ids, self.request.prompt_logprobs, name)

    def _count(self, event: Event) -> None:
        """Count an event. Raises ApiError if its sample has failed, which fails the whole request."""
        if event.finish_reason in ("error", "abort"):
            error = event.error or "the request was aborted"
            if error.startswith("the mask"):  # caused by the request's grammar, so trying again is useless
                raise ApiError(400, error, code="invalid_value")
            raise ApiError(500, error, code="engine_error")
        self._generated += len(event.token_ids)
        self._cached[int(event.id)] = event.cached_tokens


def prompt_scores(
    scored: Event | RequestOutput, prompt: SequenceOf[int], most: int, name: Callable[[int], str | None]
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of a prompt, the entries of the token, first, and of its
    alternatives, at most `most`, by id. The first token has none. name: returns the text of a token.

    The rank of a token is unknown if the engine was asked for no alternatives."""
    values = scored.prompt_logprobs
    assert values is not None
    tops = scored.prompt_top_logprobs or [{}] * len(values)
    ranks = scored.prompt_ranks or [0] * len(values)
    scores: list[dict[str, Any] | None] = []
    for token, value, top, own_rank in zip(prompt, values, tops, ranks, strict=True):
        best = enumerate(islice(top.items(), most), 1)
        entries = {token: (value, own_rank or None)} | {id: (logprob, rank) for rank, (id, logprob) in best}
        scores.append(None if math.isnan(value) else {
            str(id): {"logprob": max(LOWEST, logprob), "rank": rank, "decoded_token": name(id)}
            for id, (logprob, rank) in entries.items()
        })  # fmt: skip
    return scores


# ------------------------------------------------------------------------------------------------- chat


class ChatReply(_BaseReply[ChatRequest]):
    """The response to a chat.

    make_parser: returns the parser of a choice; by default, its text is the content. make_counter: returns the counter
    of a choice's reasoning tokens; None if the model has no reasoning.
    """

    prefix, kind = "chatcmpl", "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        model: str,
        prompt: PromptTokens,
        vocabulary: Vocabulary | None,
        make_parser: Callable[[], AnswerParser] = lambda: AnswerParser(None),
        make_counter: Callable[[], ReasoningCounter] | None = None,
    ) -> None:
        super().__init__(request, model, [prompt], vocabulary)
        self._parsers = [make_parser() for _ in range(request.choices)]
        self._counters = [] if make_counter is None else [make_counter() for _ in range(request.choices)]
        self._called: set[int] = set()  # indices of choices with a tool call

    @property
    def usage(self) -> dict[str, Any]:
        reasoning = sum(counter.count for counter in self._counters)
        return {**super().usage, "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _count(self, event: Event) -> None:
        super()._count(event)
        if self._counters:
            self._counters[event.index].push(event.token_ids)

    def push(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Return the chunks for new events. The first one of a choice has its role, and the last its finish_reason."""
        return [chunk for event in events for chunk in self._chunks(event)]

    def _chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        index, ids = event.index, event.token_ids
        if index not in self._begun:
            self._begun.add(index)
            begin = self._chunk(self._choice(index, delta={"role": "assistant", "content": self.request.echoed}))
            yield {**begin, **self._prompt()}
        self._count(event)
        deltas, logprobs = self._deltas(event), self._logprobs(event)
        detailed = ids and (logprobs is not None or self.request.return_token_ids)
        if not deltas and (detailed or event.finish_reason is not None):
            deltas = [{}]  # tokens without text yet, or an end without text
        for place, delta in enumerate(deltas, 1):
            end = event if place == len(deltas) else None
            yield self._chunk(self._choice(index, logprobs, ids, end, delta=_named(delta)))
            logprobs, ids = None, []  # they are sent with the first delta

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        cut = event.finish_reason == "length" or isinstance(event.stop_reason, str)  # "repetition" is one too
        deltas = self._parsers[event.index].push(event.text, last=event.finish_reason is not None, cut=cut)
        if any("tool_calls" in delta for delta in deltas):
            self._called.add(event.index)
        shown = self.request.shows_reasoning
        return deltas if shown else [delta for delta in deltas if "reasoning" not in delta]

    def _reason(self, event: Event) -> str | None:
        return "tool_calls" if event.finish_reason == "stop" and event.index in self._called else event.finish_reason

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        """Return the complete response for all events of the request."""
        merged = joined(list(events))
        reply = {**self._complete([self._choice_of(event) for event in merged]), "object": "chat.completion"}
        return {**reply, "prompt_logprobs": self._prompt_scores(merged[0]), **self._prompt()}

    def _prompt(self) -> dict[str, Any]:
        """Return the ids and the text of the prompt, if the request asks for them."""
        text = {"prompt_text": self.prompts[0].text} if self.request.return_prompt_text else {}
        return {"prompt_token_ids": self._prompt_ids(0), **text}

    def _choice_of(self, event: Event) -> dict[str, Any]:
        self._count(event)
        message = {**joined_message(self._deltas(event)), "refusal": None}
        if echoed := self.request.echoed:
            message["content"] = echoed + (message["content"] or "")
        if self._counters and self.request.shows_reasoning:  # null if the model has not thought
            message["reasoning_content"] = message["reasoning"] = message.get("reasoning_content")
        return self._choice(event.index, self._logprobs(event), event.token_ids, event, message=message)

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        """Return an entry for each token, including the stop token."""
        if self.request.alternatives is None:
            return None
        content, drawn = [], getattr(event, self.request.drawn)
        for position, (token, logprob) in enumerate(zip(event.token_ids, drawn, strict=True)):
            top = event.top_logprobs[position] if event.top_logprobs else {}
            if self.request.logprob_token_ids:
                top = {token: top.get(token, logprob), **top}
            tops = [self._alternative(*pair) for pair in top.items()]
            own = self._alternative(token, top.get(token, logprob))  # the same value as among the alternatives
            content.append({**own, "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _alternative(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.raw(token)
        text = token_name(token) if self.request.return_tokens_as_token_ids else self._vocabulary.text(token)
        return {"token": text, "logprob": max(LOWEST, logprob), "bytes": list(raw)}


def _named(delta: dict[str, Any]) -> dict[str, Any]:
    """Return a delta with both names of reasoning, of DeepSeek's API and of vLLM's."""
    return {**delta, "reasoning_content": delta["reasoning"]} if "reasoning" in delta else delta


# ------------------------------------------------------------------------------------------------- completions


class CompletionReply(_BaseReply[CompletionRequest]):
    """The response of /completions. With n samples per prompt, choice n p + i is sample i of prompt p."""

    prefix, kind = "cmpl", "text_completion"

    def __init__(
        self, request: CompletionRequest, model: str, prompts: SequenceOf[PromptTokens], vocabulary: Vocabulary | None
    ) -> None:
        super().__init__(request, model, prompts, vocabulary)
        self.scored = bool(request.echo) and request.logprobs is not None
        self._scores: dict[int, Event] = {}  # {index of a prompt: the event with its logprobs}
        self._offsets: dict[int, _Offsets] = {}

    def push(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Return the chunks for new events. Events without text, such as parts of a character, are only counted."""
        details = self.request.logprobs is not None or self.request.return_token_ids
        chunks = []
        for event in self._sorted(events):
            if event.text or event.finish_reason is not None or details:
                chunks.append(self._chunk(self._choice_of(event)))
            else:
                self._count(event)
        return chunks

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        """Return the complete response for all events of the request."""
        return self._complete([self._choice_of(event) for event in self._sorted(events)])

    def _sorted(self, events: Iterable[Event]) -> list[Event]:
        merged = joined(list(events))
        self._scores |= {int(event.id): event for event in merged if event.prompt_logprobs is not None}
        return merged

    def _choice_of(self, event: Event) -> dict[str, Any]:
        self._count(event)
        index, prompt = int(event.id) * self.request.choices + event.index, self.prompts[int(event.id)]
        first = index not in self._begun
        self._begun.add(index)
        logprobs = None if self.request.logprobs is None else self._logprobs(event, index, first)
        text = prompt.text + event.text if first and self.request.echo else event.text
        choice = self._choice(index, logprobs, event.token_ids, event, text=text)
        choice["prompt_token_ids"] = self._prompt_ids(int(event.id)) if first else None
        choice["prompt_logprobs"] = self._prompt_scores(self._scores.get(int(event.id)))
        return choice

    def _logprobs(self, event: Event, index: int, first: bool) -> dict[str, list[Any]]:
        """Return lists with an entry per token, including the stop token. With echo, they begin with the prompt."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if first:
            offsets = self._offsets[index] = _Offsets(self._vocabulary)
            if self.request.echo:
                prompt, scores = self.prompts[int(event.id)], self._scores[int(event.id)]
                assert scores.prompt_logprobs is not None
                self._append(lists, prompt.ids, scores.prompt_logprobs, scores.prompt_top_logprobs)
                lists["text_offset"] += offsets.take(prompt.ids, prompt.text)
                offsets.begin(len(prompt.text))
        self._append(lists, event.token_ids, getattr(event, self.request.drawn), event.top_logprobs)
        lists["text_offset"] += self._offsets[index].take(event.token_ids, event.text)
        return lists

    def _append(
        self,
        lists: dict[str, list[Any]],
        ids: list[int],
        logprobs: list[float],
        tops: list[dict[int, float]] | None,
    ) -> None:
        """Append the entries of tokens. As in vLLM, a token is the first of its own alternatives, so there may be one
        more; the others follow, best first."""
        chosen = self.request.logprob_token_ids or ()
        name = token_name if self.request.return_tokens_as_token_ids else self._vocabulary.name
        for position, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            lists["tokens"].append(name(token))
            if math.isnan(logprob):  # the first token of a prompt
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
                continue
            top = dict(islice(tops[position].items(), self.request.logprobs)) if tops else {}
            top |= {id: tops[position][id] for id in chosen if tops and id in tops[position]}
            own = top.get(token, logprob)
            lists["token_logprobs"].append(max(LOWEST, own))
            named: dict[str, float] = {}
            for other, value in {token: own, **top}.items():  # of tokens with equal names, the first one is kept
                named.setdefault(name(other), max(LOWEST, value))
            lists["top_logprobs"].append(named)


class _Offsets:
    """The offsets of tokens in a text, in characters. A special token has length 0 unless the text shows it.

    After bytes that are not valid characters, offsets are approximate, since tokenizers show such bytes differently.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.begin(0)

    def begin(self, offset: int) -> None:
        """Set the offset of the next token."""
        self._at, self._start = offset, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, ids: Iterable[int], text: str) -> list[int]:
        """Return the offsets of the next tokens. text: their text, as far as it is known."""
        offsets, base = [], self._at
        for token in ids:
            name = self._vocabulary.text(token)
            if token in self._vocabulary.special and not text.startswith(name, self._at - base):
                offsets.append(self._at)
                continue
            new = self._decoder.decode(self._vocabulary.raw(token))
            offsets.append(self._at + max(0, len(new) - len(name)))  # begins after an earlier, incomplete character
            if self._at == self._start and new.startswith(" ") and text[:1] not in ("", " "):
                new = new[1:]  # the tokenizer adds a space at the beginning of each text
            self._at += len(new)
        return offsets


# ------------------------------------------------------------------------------------------------- tokens


class Vocabulary:
    """The bytes of each token of a tokenizer: byte-level BPE as in GPT-2, or SentencePiece with bytes as <0x0A>.

    raw: function that returns the UTF-8 bytes of a token, which may be a part of a character; b"" for an unknown id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        hf = tokenizer.hf
        self._hf, self._added = hf, frozenset(hf.added_tokens_decoder)
        self.special = frozenset(id for id, token in hf.added_tokens_decoder.items() if token.special)
        decoder = getattr(getattr(hf, "backend_tokenizer", None), "decoder", None)
        self._bytes: dict[str, bytes] | None = None  # by the characters that represent them in a byte-level vocabulary
        if decoder is not None and b"ByteLevel" in decoder.__getstate__():
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            letters = bytes_to_unicode()  # type: ignore[no-untyped-call]
            self._bytes = {char: bytes([byte]) for byte, char in letters.items()}
        self.raw: Callable[[int], bytes] = cache(self._raw)

    def _raw(self, id: int) -> bytes:
        entry = self._hf.convert_ids_to_tokens(id) or ""
        if id in self._added:
            return entry.encode()
        if self._bytes is not None:
            return b"".join(self._bytes.get(char) or char.encode() for char in entry)
        if len(entry) == 6 and entry.startswith("<0x"):
            return bytes([int(entry[3:5], 16)])
        return entry.replace("\u2581", " ").encode()

    def text(self, id: int) -> str:
        """Return the text of a single token, with U+FFFD for parts of characters."""
        return self.raw(id).decode(errors="replace")

    def name(self, id: int) -> str:
        """Return the text of a token, or "bytes:\\x.." for parts of characters, as OpenAI's /completions does."""
        raw = self.raw(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
