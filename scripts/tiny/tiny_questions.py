"""The 100 first questions of the bundled model: what people type at a chat prompt, and rules for sensible replies.

The wordings are held out: `tiny_data.draw` drops every task that has one of them, so that none is trained verbatim.
They were written before the training data of the model that ships, and are not changed to suit a model.
"""

import re
from typing import NamedTuple

from tiny_words import pairs, read

# The model says that it cannot know something: sensible only where a larger model is needed to know it.
UNABLE = r"\b(do not|don't|can ?not|can't) (know|see|look|do that|tell)|too hard"
JOKE = r"\b(why|what|how|who|knock)\b.+[?!]"
FOREIGN = r"english|hello|hi\b"
# The longest sensible reply, in characters; a list of 30 numbers has 110.
LONGEST = 600
# What the evaluation appends to a reply that did not end.
UNFINISHED = " [unfinished]"


class Question(NamedTuple):
    """What is typed, in turns, and a regular expression that a sensible reply to the last turn contains.

    The expression is searched without regard to case; "^" and "$" match at lines. The model itself answers the
    earlier turns.
    """

    turns: tuple[str, ...]
    sensible: str


def _question(turns: tuple[str, ...], sensible: str) -> Question:
    """Return a question of data/questions.txt, where "= " begins how a sensible reply ends."""
    if sensible.startswith("= "):  # a number, a word or a list, by itself or at the end of a sentence
        return Question(turns, rf"(?<![\w.-]){re.escape(sensible[2:])}\.?\Z")
    for name, expression in (("UNABLE", UNABLE), ("JOKE", JOKE), ("FOREIGN", FOREIGN)):
        sensible = sensible.replace(name, expression)
    return Question(turns, sensible)


FIRST_QUESTIONS = tuple(
    _question(turns, sensible) for lines in read("questions").values() for turns, (sensible,) in pairs(lines)
)


def plain(text: str) -> str:
    """Return a text without case, quotes, commas, doubled spaces, and marks at its end: how wordings are compared."""
    words = re.sub(r"['\"’,¿¡]", "", text.lower()).split()  # noqa: RUF001
    return " ".join(words).strip(" .!?") or text.strip()


HELD_OUT_WORDINGS = frozenset(plain(question.turns[-1]) for question in FIRST_QUESTIONS)


def is_sensible(question: Question, replies: list[str]) -> bool:
    """Judge the model's replies to all turns by the rules.

    The last reply fits the question's expression, ended, is no longer than LONGEST, does not repeat an earlier one, and
    says that the model is unable to answer only where that is asked for.
    """
    *earlier, reply = (reply.strip() for reply in replies)
    if len(reply) > LONGEST or reply.endswith(UNFINISHED) or reply in earlier:
        return False
    if question.sensible != UNABLE and re.search(UNABLE, reply, re.IGNORECASE):
        return False
    return re.search(question.sensible, reply, re.IGNORECASE | re.MULTILINE) is not None
