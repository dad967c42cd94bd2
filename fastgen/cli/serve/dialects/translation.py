"""The common part of the APIs that are translated to chats and back: messages, and answers in blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fastgen.cli.serve.openai_input import TEXT_ONLY
from fastgen.cli.serve.openai_output import ChatReply
from fastgen.cli.serve.validation import ApiError
from fastgen.request import Event

SYSTEM = ("system", "developer")

Item = TypeVar("Item")
Part = TypeVar("Part")
TEXT_FIELDS = ("content", "reasoning_content")  # of a message
Kind = Literal["text", "reasoning", "call"]
KINDS: dict[str, Kind] = {"reasoning": "reasoning", "content": "text"}  # {part of a delta: the kind of its block}


def merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages in a form that most chat templates accept: adjacent messages of one role are joined,
    except results of tools, and a system message after the first message of another role becomes the user's."""
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        role = message["role"]
        if role in SYSTEM:
            role = "user" if turns and turns[-1][0] != "system" else "system"
        if not turns or turns[-1][0] != role or role == "tool":
            turns.append((role, []))
        turns[-1][1].append(message)
    return [_joined(role, turn) for role, turn in turns]


def _joined(role: str, turn: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one message for several messages of a role."""
    if len(turn) == 1:
        return {**turn[0], "role": role}
    texts = {name: "\n\n".join(filter(None, (message.get(name) for message in turn))) for name in TEXT_FIELDS}
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    return {"role": role, **texts, **({"tool_calls": calls} if calls else {})}


class ItemError(ValueError):
    """An error about an item of a list. path: place of the item, such as "messages[0].content[1]"."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(reason)
        self.path = path


def each_of(items: Iterable[Item], field: str, translate: Callable[[Item], list[Part]]) -> list[Part]:
    """Translate the items of a field, each into a list of parts. Raises ItemError for the first wrong one, or for an
    item of it; field: its name, which begins with a point if it belongs to an item."""
    parts = []
    for place, item in enumerate(items):
        try:
            parts += translate(item)
        except ValueError as error:
            raise ItemError(str(error), f"{field}[{place}]{getattr(error, 'path', '')}") from None
    return parts


def translated(items: Iterable[Item], field: str, translate: Callable[[Item], list[Part]]) -> list[Part]:
    """Translate the items of a field of a request, as `each_of`. Raises ApiError."""
    try:
        return each_of(items, field, translate)
    except ItemError as error:
        raise ApiError(400, f"{error.path} {error}", error.path, "invalid_value") from None


def text_of(content: Any, field: str) -> str:
    """Return the text of a message's content: a string or a list of parts. Raises ValueError for other content. field:
    as of `each_of`."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(each_of(content, field, text_of_part) if isinstance(content, list) else text_of_part(content))


def text_of_part(part: Any) -> list[str]:
    """Return the text of a part of a message's content. Raises ValueError if it has another type."""
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return [text]
        case {"type": "refusal", "refusal": str(text)}:
            return [text]
        case {"type": "tool_reference", "tool_name": str(name)}:  # the prompt shows all tools
            return [name]
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(f"has content of the type {kind!r:.40}; give text, or parts of the type text: {TEXT_ONLY}")


def called(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return the message of the assistant with a call of a function."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}


def thought(text: str) -> list[dict[str, Any]]:
    """Return the messages with an earlier reasoning of the assistant: one, or none if the text is empty."""
    return [{"role": "assistant", "reasoning_content": text}] if text else []


@dataclass
class Block:
    """A part of an answer: a text, reasoning, or a call with an id and a name, whose `text` is its arguments."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class BlockReply(ChatReply, ABC):
    """A chat's reply as events of another API. Each block of the answer is opened, grows and is closed before the next.

    Subclasses make the events for each of these steps. An answer has one choice and at least one block. finish_reason:
    as in a chat; None until it is known. stop_reason: the stop id or string that ended the answer.
    """

    end_mark = b""

    def __init__(self, *chat: Any) -> None:
        super().__init__(*chat)
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._open = False
        self._scores: list[dict[str, Any]] = []  # logprobs of tokens whose text has not come yet

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        """Return the complete response for all events of the request."""
        self.push(events)
        return self.body()

    def _chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        self._count(event)
        if not self._begun:
            self._begun.add(event.index)
            yield from self.begin()
        self._scores += (self._logprobs(event) or {}).get("content", ())
        for delta in self._deltas(event):
            yield from self._take(delta)
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = self._reason(event), event.stop_reason
            if not self.blocks:
                yield from self._begin_block()
            yield from self._end_block()

    def _take(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for name, kind in KINDS.items():
            if text := delta.get(name):
                if not self._open or self.blocks[-1].kind != kind:
                    yield from self._begin_block(kind)
                yield from self._grow(text)
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                yield from self._begin_block("call", piece["id"], piece["function"]["name"])
            if arguments := piece["function"].get("arguments"):
                yield from self._grow(arguments)

    def _begin_block(self, kind: Kind = "text", id: str = "", name: str = "") -> Iterator[dict[str, Any]]:
        yield from self._end_block()
        self.blocks.append(Block(len(self.blocks), kind, id, name))
        self._open = True
        yield from self.open(self.blocks[-1])

    def _grow(self, piece: str) -> Iterator[dict[str, Any]]:
        block, scores = self.blocks[-1], list[dict[str, Any]]()
        if block.kind != "reasoning":  # which has no place for logprobs; the text after it has them
            scores, self._scores = self._scores, scores
        block.text += piece
        block.logprobs += scores
        yield from self.grow(block, piece, scores)

    def _end_block(self) -> Iterator[dict[str, Any]]:
        if self._open:
            if self._scores and self.blocks[-1].kind == "text":
                yield from self._grow("")  # the logprobs of a stop token
            self._open = False
            yield from self.close(self.blocks[-1])

    @abstractmethod
    def begin(self) -> Iterable[dict[str, Any]]:
        """Return the events before the first block."""

    @abstractmethod
    def open(self, block: Block) -> Iterable[dict[str, Any]]:
        """Return the events that open a block."""

    @abstractmethod
    def grow(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Return the events for a new piece of a block. logprobs: logprobs of its tokens, as in a chat."""

    @abstractmethod
    def close(self, block: Block) -> Iterable[dict[str, Any]]:
        """Return the events that close a block."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the complete response. The answer has ended."""
