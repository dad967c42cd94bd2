"""Reasoning in answers: the marks around it, a parser of whole answers, and grammars for what comes after it.

A model that thinks writes its reasoning between two marks, and then its answer. Some chat templates write the opening
mark themselves (R1-Distill, QwQ), so that the answer begins inside the block; others leave it to the model (Qwen3,
Magistral), or write an empty block if thinking is turned off (Qwen3 with enable_thinking=False).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, groupby
from typing import Any, Literal, get_args

from fastgen.limits import ReasoningState, ThinkingBudget
from fastgen.text.detokenizer import Detokenizer, overlap
from fastgen.text.grammar import quoted
from fastgen.text.syntax_names import ReasoningParser
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.parser import BLANK, HELD, ToolParser, without_blank

OFF = "off"


@dataclass(frozen=True)
class ReasoningSyntax:
    """The marks before and after the reasoning of an answer."""

    opens: str
    closes: str

    def begins_inside(self, text: str) -> bool:
        """Return whether a whole answer seems to begin inside the reasoning: it has only the closing mark."""
        before, mark, _ = text.partition(self.closes)
        return bool(mark) and self.opens not in before


THINK = ReasoningSyntax("<think>", "</think>")
MISTRAL = ReasoningSyntax("[THINK]", "[/THINK]")
PARSERS: dict[str, ReasoningSyntax | None] = {
    **dict.fromkeys(get_args(ReasoningParser), THINK),
    OFF: None,
    "mistral": MISTRAL,
}


def find_reasoning(tokenizer: Tokenizer) -> ReasoningSyntax | None:
    """Return the syntax of reasoning that the tokenizer's `reasoning_parser` names; if that is None, the one whose
    marks are in the chat template or, if there is no template, among the added tokens. None: answers have no
    reasoning. Raises ValueError for an unknown name."""
    if (name := tokenizer.reasoning_parser) is not None:
        if name not in PARSERS:
            raise ValueError(f"reasoning_parser is {name!r}; it must be one of {', '.join(map(repr, PARSERS))}")
        return PARSERS[name]
    template = tokenizer.hf.chat_template
    if template is not None:
        return PARSERS[template_parser(str(template))]
    return next((syntax for syntax in (MISTRAL, THINK) if None not in _mark_ids(syntax, tokenizer)), None)


def template_parser(template: str) -> str:
    """Return the name of the parser for the reasoning whose marks are in a chat template, or OFF."""
    marked = {"mistral": MISTRAL, "think": THINK}
    names = (name for name, syntax in marked.items() if syntax.opens in template or syntax.closes in template)
    return next(names, OFF)


def _mark_ids(syntax: ReasoningSyntax, tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """Return the ids of the marks, each None if the mark is not an added token."""
    return tokenizer.added_ids.get(syntax.opens), tokenizer.added_ids.get(syntax.closes)


def starts_open(tokenizer: Tokenizer, prompt: Sequence[int] | str) -> bool:
    """Return whether the answer to a prompt (ids or text) begins inside the reasoning. Marks in earlier turns, such as
    in the text of a user, do not count."""
    return _state_after(tokenizer, prompt) == "open"


def _state_after(tokenizer: Tokenizer, prompt: Sequence[int] | str) -> Literal["open", "closed", "none"]:
    """Return the state that the last turn of a prompt leaves: inside the reasoning, after it, or without any."""
    syntax = find_reasoning(tokenizer)
    if syntax is None:
        return "none"
    ids = tokenizer.encode(prompt, special=False) if isinstance(prompt, str) else prompt
    opens, closes = _mark_ids(syntax, tokenizer)
    ends = tokenizer.special_ids | ({opens, closes} - {None})
    # The end of the turn before, or a mark.
    at = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] in ends), -1)
    if at >= 0 and ids[at] in (opens, closes):
        return "open" if ids[at] == opens else "closed"
    if opens is not None and closes is not None:
        return "none"
    text = tokenizer.decode(ids[at + 1 :], special=True)
    opened, closed = text.rfind(syntax.opens), text.rfind(syntax.closes)
    return "none" if opened == closed else "open" if opened > closed else "closed"


# ------------------------------------------------------------------------------------------------- answers


class AnswerParser:
    """An incremental parser of one answer: reasoning, then content and tool calls.

    A delta is {"reasoning": text}, {"content": text} or {"tool_calls": [...]}. The reasoning ends at the first closing
    mark; calls inside it are part of its text. White space around it is dropped. An answer that is cut off inside the
    reasoning has no content. The result does not depend on how the text is cut into pieces.

    reasoning: None for an answer without it. starts_open: the answer begins inside the reasoning; see `starts_open`.
    tools: parser of the text after the reasoning; None: all of it is content.
    """

    def __init__(
        self, reasoning: ReasoningSyntax | None, starts_open: bool = False, tools: ToolParser | None = None
    ) -> None:
        self._syntax, self._starts_open, self._tools = reasoning, starts_open, tools
        self._text = ""  # text that is not reported yet
        self._deltas: list[dict[str, Any]] = []
        self._reasoned = False  # some reasoning was reported
        self._cut = False
        self._state: Callable[[bool], bool] = self._read_content if reasoning is None else self._read_beginning

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[dict[str, Any]]:
        """Return the deltas that a piece of text adds. last: this is the last piece. cut: see `ToolParser.push`."""
        self._text, self._cut = self._text + text, cut
        while self._state(last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each state consumes a part of the text, and returns True if the next state can go on.

    def _read_beginning(self, last: bool) -> bool:
        assert self._syntax is not None
        begun = self._text.lstrip(BLANK)
        if begun.startswith(self._syntax.opens):
            self._text, self._state = begun[len(self._syntax.opens) :], self._read_reasoning
        elif last or not self._syntax.opens.startswith(begun) or len(self._text) > HELD:
            self._state = self._read_reasoning if self._starts_open else self._read_content
        else:
            return False
        return True

    def _read_reasoning(self, last: bool) -> bool:
        assert self._syntax is not None
        reasoning, mark, rest = self._text.partition(self._syntax.closes)
        if not mark and not last:
            reasoning = reasoning[: len(reasoning) - overlap(reasoning, self._syntax.closes)]
        if mark:
            reasoning = reasoning.rstrip(BLANK)
        elif not last:
            reasoning = without_blank(reasoning)
        self._text = rest if mark else self._text[len(reasoning) :]
        said = reasoning if self._reasoned else reasoning.lstrip(BLANK)
        if said:
            self._deltas.append({"reasoning": said})
            self._reasoned = True
        if mark:
            self._state = self._skip_blank
        return bool(mark)

    def _skip_blank(self, last: bool) -> bool:
        self._text = self._text.lstrip(BLANK)
        if self._text:
            self._state = self._read_content
        return bool(self._text)

    def _read_content(self, last: bool) -> bool:
        content, self._text = self._text, ""
        if self._tools is not None:
            self._deltas += self._tools.push(content, last, self._cut)
        elif content:
            self._deltas.append({"content": content})
        return False


class ReasoningCounter:
    """A count of the reasoning tokens of one answer, without marks that are tokens, as vLLM counts.

    count: number of reasoning tokens so far. state: whether the next token is before, inside or after the reasoning.
    starts_open: see `starts_open`.
    """

    def __init__(self, tokenizer: Tokenizer, starts_open: bool) -> None:
        self.count = 0
        self._tokenizer, self._syntax = tokenizer, find_reasoning(tokenizer)
        self._opens, self._closes = (None, None) if self._syntax is None else _mark_ids(self._syntax, tokenizer)
        self.state: ReasoningState = "over" if self._syntax is None else "inside" if starts_open else "before"
        self._detokenizer = Detokenizer(tokenizer, ())
        self._text = ""  # the end of the text, where the marks are not tokens

    def push(self, ids: Iterable[int]) -> None:
        """Add the next tokens of the answer."""
        for id in ids:
            if self.state == "over":
                return
            if self._closes is None or self._opens is None:
                self._push_text(id)
            elif id == self._opens:
                self.state = "inside"
            elif self.state == "before":
                self.state = "over" if self._tokenizer.decode([id]).strip(BLANK) else "before"
            elif id == self._closes:
                self.state = "over"
            else:
                self.count += 1

    def _push_text(self, id: int) -> None:
        """Add a token, and look for marks in the text."""
        assert self._syntax is not None
        opens, closes = self._syntax.opens, self._syntax.closes
        self._text += self._detokenizer.push([id])
        if self.state == "before":
            self._text = self._text.lstrip(BLANK)
            if self._text.startswith(opens):
                self.state, self._text = "inside", self._text[len(opens) :]
            elif not opens.startswith(self._text):
                self.state = "over"
        elif closes in self._text:
            self.state = "over"
        else:
            self.count, self._text = self.count + 1, self._text[-len(closes) :]

    @property
    def closing(self) -> bool:
        """True if the text ends with the beginning of a closing mark; always False if marks are single tokens."""
        return self._syntax is not None and bool(overlap(self._text, self._syntax.closes))


def thinking_budget(tokens: int, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> ThinkingBudget | None:
    """Return the budget of the reasoning in an answer to a prompt; None if answers have no reasoning."""
    if (syntax := find_reasoning(tokenizer)) is None:
        return None
    reader = partial(ReasoningCounter, tokenizer, starts_open(tokenizer, prompt_ids))
    opens, closes = _mark_ids(syntax, tokenizer)
    if opens is not None and closes is not None:
        return ThinkingBudget(tokens, opens, (closes,), reader)
    return ThinkingBudget(tokens, None, tuple(tokenizer.encode(syntax.closes, special=False)), reader)


# ------------------------------------------------------------------------------------------------- grammars


def after_reasoning(
    grammar: str, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], eos_ids: Collection[int]
) -> str:
    """Return the grammar of an answer to a prompt whose text after the reasoning follows `grammar`.

    If the prompt leaves the reasoning open, any text and the closing mark come first; if it has no marks, the model may
    open and close the reasoning first. White space may follow. The grammar is unchanged if the prompt has closed the
    reasoning, or if the model has none, or thinks only if its template opens the reasoning. Reasoning has no special
    tokens and none of `eos_ids`, which end an answer.
    """
    syntax = None if tokenizer is None else find_reasoning(tokenizer)
    if syntax is None or tokenizer is None:
        return grammar
    state = _state_after(tokenizer, prompt_ids)
    if state == "closed" or (state == "none" and _thinks_if_asked(tokenizer, syntax)):
        return grammar
    opens, closes = _mark_ids(syntax, tokenizer)
    if closes is None:  # a lazy rule ends at the first mark
        thinking = [f"thinking[lazy]: TEXT {quoted(syntax.closes)}", r"TEXT: /(.|\n)*/"]
    else:
        kept_out = _ranges(tokenizer.special_ids, (*eos_ids, closes))
        thinking = [f"thinking: <[^{kept_out}]>* <[{closes}]>"]
    begins = quoted(syntax.opens) if opens is None else f"<[{opens}]>"
    start = "reasoned" if state == "open" else f"{begins} reasoned | answer"
    return "\n".join(
        [
            f"start: {start}",
            r"reasoned: thinking /[ \t\r\n]{1,4}/? answer",
            *thinking,
            f"answer: %lark {{\n{grammar}\n}}",
        ]
    )


def _thinks_if_asked(tokenizer: Tokenizer, syntax: ReasoningSyntax) -> bool:
    """Return whether the chat template opens the reasoning if `enable_thinking` is true and not otherwise, as that of
    the bundled model."""
    render = partial(tokenizer.render_chat, [{"role": "user", "content": "a"}])
    try:
        asked, usual = (render(variables=given).rstrip(BLANK) for given in ({"enable_thinking": True}, None))
    except ValueError:  # there is no template, or it takes no such message
        return False
    return asked.endswith(syntax.opens) and not usual.endswith(syntax.opens)


@lru_cache(8)  # a tokenizer may have a thousand special tokens, and each request needs their ranges
def _ranges(ids: frozenset[int], more: tuple[int, ...]) -> str:
    """Return ids in llguidance's notation, such as "0-2,7"."""
    ranks = count()
    runs = [list(run) for _, run in groupby(sorted({*ids, *more}), lambda id: id - next(ranks))]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
