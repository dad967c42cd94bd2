"""fgchat over a fake Generator: it starts in half a second, and the test decides how long an answer takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fastgen
from fastgen.cli import chat, command
from fastgen.request import Event, SamplingParams
from fastgen.text.tokenizer import Tokenizer

TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""


class FakeGenerator:
    """A Generator whose answer has the roles and contents of all messages, a word per step. Some messages are special:

    "count": 1 2 3 ... without an end; "escape": control characters; "break": the engine fails; "think": reasoning comes
    first, unless it is turned off. The context holds 200 characters. The model "thinking" has a tokenizer whose
    template knows reasoning.
    """

    max_model_len = 200
    default_params = SamplingParams()
    tokenizer: Tokenizer | None = None
    stats = "some statistics"

    def __init__(self, model: str | None = None, **options: object) -> None:
        self.model, self.options = model, options
        if model == "slow":
            print("loading", file=sys.stderr)
            time.sleep(60)
        if model == "thinking":
            self.tokenizer = Tokenizer(Path(fastgen.__file__).parent / "tiny")
            self.tokenizer.hf.chat_template = TEMPLATE
        self.prompts: list[list[dict[str, str]]] = []
        self.on_step: Callable[[], None] = lambda: None
        self.words: Iterator[str] = iter(())
        self.said: list[str] = []

    def add(self, prompt: dict[str, Any], params: SamplingParams) -> int:
        messages, self.variables = prompt["messages"], prompt.get("chat_template_kwargs")
        if (length := sum(len(message["content"]) for message in messages)) > self.max_model_len:
            raise ValueError(f"the prompt has {length} tokens,\nabove the context of {self.max_model_len}")
        self.prompts.append(messages)
        self.params, self.said = params, []
        self.words = self._answer(messages)
        return len(self.prompts)

    def _answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        last = messages[-1]["content"]
        if last == "break":
            raise RuntimeError("the engine\nbroke")
        if last == "escape":
            yield "a\x1b[2Jb\r\x9bc\td"
        elif last == "think":
            yield from (
                () if self.variables == {"enable_thinking": False} else ("<thi", "nk>\nlet me", " see\n</think>\n\n")
            )
            yield "the answer"
        elif last == "count":
            yield from (f"{number} " for number in range(1, 10**6))
        elif last:
            yield from (f"{message['role']}:{message['content']};" for message in messages)

    def step(self) -> list[Event]:
        self.on_step()
        time.sleep(0.001)
        full = self.params.max_tokens is not None and len(self.said) == self.params.max_tokens - 1
        word = next(self.words, None)
        if word is not None and not full:
            self.said.append(word)
            return [self._event(word, None)]
        return [self._event(word or "", "length" if full else "stop")]

    def __enter__(self) -> FakeGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def _event(self, text: str, finish_reason: str | None) -> Event:
        return Event(len(self.prompts), 0, [1], text, finish_reason)

    def abort(self, ids: Sequence[int]) -> None:
        assert list(ids) == [len(self.prompts)]
        if not self.said:
            del self.prompts[-1]  # it never began


if __name__ == "__main__":
    fastgen.Generator = FakeGenerator
    command.import_transformers = lambda: None
    sys.exit(chat.main())
