"""The 150 first questions of the bundled model: what people type at a chat prompt, and rules for sensible replies.

The wordings are held out: `tiny_data.draw` drops every task that has one of them, so that none is trained verbatim.
They were written without looking at a model's replies, and are not changed to suit a model. Those of the section
"Tools" are asked with the tools of data/question_tools.json; for those of "Thinking" the template opens <think>.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tiny_words import pairs, read

# The model says that it cannot know something: sensible only where a larger model is needed to know it.
UNABLE = r"\b(do not|don't|can ?not|can't) (know|see|look|do that|tell)|too hard|no tool"
JOKE = r"\b(why|what|how|who|knock)\b.+[?!]"
FOREIGN = r"english|hello|hi\b"
# The longest sensible reply, in characters; a list of 30 numbers has 110.
LONGEST = 600
# What the evaluation appends to a reply that did not end.
UNFINISHED = " [unfinished]"


class Question(NamedTuple):
    """What is typed, in turns, and a regular expression that a sensible reply to the last turn contains.

    The expression is searched without regard to case; "^" and "$" match at lines. The model itself answers the
    earlier turns. A turn that begins with "tool: " is the result of a call. section: its section in data/questions.txt.
    """

    turns: tuple[str, ...]
    sensible: str
    section: str = ""

    def message(self, turn: int) -> tuple[str, str]:
        """Return the role and the content of a turn."""
        text = self.turns[turn]
        return ("tool", text.removeprefix("tool: ")) if text.startswith("tool: ") else ("user", text)


def _question(section: str, turns: tuple[str, ...], sensible: str) -> Question:
    """Return a question of data/questions.txt, where "= " begins how a sensible reply ends."""
    if sensible.startswith("= "):  # a number, a word or a list, by itself or at the end of a sentence
        return Question(turns, rf"(?<![\w.-]){re.escape(sensible[2:])}\.?\Z", section)
    for name, expression in (("UNABLE", UNABLE), ("JOKE", JOKE), ("FOREIGN", FOREIGN)):
        sensible = sensible.replace(name, expression)
    return Question(turns, sensible, section)


FIRST_QUESTIONS = tuple(
    _question(section, turns, sensible)
    for section, lines in read("questions").items()
    for turns, (sensible,) in pairs(lines)
)
_TOOLS = json.loads(Path(__file__).with_name("data").joinpath("question_tools.json").read_text())


def first_prompt(question: Question) -> dict[str, Any]:
    """Return the prompt of a question without messages, as `Generator.generate` takes it."""
    further = {
        "Tools": {"tools": _TOOLS},
        "Thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    return {"messages": [], **further.get(question.section, {})}


def plain(text: str) -> str:
    """Return a text without case, quotes, commas, doubled spaces, and marks at its end: how wordings are compared."""
    words = re.sub(r"['\"’,¿¡]", "", text.lower()).split()  # noqa: RUF001
    return " ".join(words).strip(" .!?") or text.strip()


HELD_OUT_WORDINGS = frozenset(
    plain(next(turn for turn in reversed(question.turns) if not turn.startswith("tool: ")))
    for question in FIRST_QUESTIONS
)


def is_sensible(question: Question, replies: list[str]) -> bool:
    """Judge the model's replies to all turns by the rules.

    The last reply fits the question's expression, ended, is no longer than LONGEST, does not repeat an earlier one, and
    says that the model is unable to answer only where that is asked for. Where the model thinks, the reply is the text
    after its thought.
    """
    *earlier, reply = (reply.strip() for reply in replies)
    if question.section == "Thinking":
        thought, _, reply = reply.partition("</think>")
        reply = reply.strip() if thought.strip() else ""
    if len(reply) > LONGEST or reply.endswith(UNFINISHED) or reply in earlier:
        return False
    if UNABLE not in question.sensible and re.search(UNABLE, reply, re.IGNORECASE):
        return False
    return re.search(question.sensible, reply, re.IGNORECASE | re.MULTILINE) is not None
