"""Files of conversations, which /save of fgchat writes and --resume reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fastgen.cli.chat_backends import SETTINGS


class Round(NamedTuple):
    """A message and its answer. reasoning: what the model thought before it answered."""

    message: str
    answer: str
    reasoning: str = ""


@dataclass
class Conversation:
    """A conversation.

    model: the arguments that name the model: "model", or "url" and perhaps "name" of a server. settings: values of
    SETTINGS in chat_backends.py, by name, without those left at their defaults. system: the system prompt, or None.
    """

    model: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    rounds: list[Round] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """Return the messages in OpenAI's form."""
        texts = [message("system", self.system)] if self.system else []
        for asked, answer, reasoning in self.rounds:
            thought = {"reasoning_content": reasoning} if reasoning else {}
            texts += [message("user", asked), {**message("assistant", answer), **thought}]
        return texts


def message(role: str, text: str) -> dict[str, str]:
    """Return a message in OpenAI's form."""
    # Bytes that are not UTF-8 arrive as lone surrogates, which no tokenizer accepts.
    return {"role": role, "content": text.encode("utf-8", "replace").decode()}


def save(conversation: Conversation, path: Path) -> None:
    """Write a conversation to a file. Raises ValueError if its folder does not exist or the file exists and is no
    conversation, or OSError."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if path.exists():
        load(path)
    content = {"model": conversation.model, "settings": conversation.settings, "messages": conversation.messages()}
    beside = path.with_name(f".{path.name}.fgchat.tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)


def load(path: Path) -> Conversation:
    """Read a conversation. Raises ValueError if there is no such file or it is no conversation, or OSError."""
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    try:
        content = json.loads(path.read_bytes())
        model, settings = dict(content["model"]), dict(content["settings"])
        messages = list(content["messages"])
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        rounds = [_round(*pair) for pair in zip(messages[::2], messages[1::2], strict=True)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a conversation that /save has written; choose another file") from None
    if unknown := settings.keys() - SETTINGS.keys():
        raise ValueError(f"{path} has the setting {min(unknown)!r}, which does not exist; remove it there")
    return Conversation(model, settings, system, rounds)


def _round(asked: Mapping[str, Any], answer: Mapping[str, Any]) -> Round:
    texts = (asked["content"], answer["content"], answer.get("reasoning_content", ""))
    if (asked["role"], answer["role"]) != ("user", "assistant") or not all(isinstance(text, str) for text in texts):
        raise ValueError("no round")
    return Round(*texts)
