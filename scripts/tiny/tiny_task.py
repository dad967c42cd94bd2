"""Training tasks, the choice of those held out of training, and the typing habits of people.

A `Task` is a few turns of dialogue. Its `keys` name the facts that it teaches ("add:12+30"). A key is held out when its
hash falls in the top of its skill's range, so the split needs no list and never changes between runs.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from tiny_words import WORDS, read

_TEXTS = read("task")

Grade = Literal["number", "ends", "exact", "names", "json", "keys"]
Given = Literal["", "keys", "start"]

# The number of hash buckets, of 100, that a skill trains on; the rest are held out.
TRAINED_BUCKETS = 95
# Two-digit products are deliberately weak: the model sees this share of the pairs, and nothing of the others.
MUL2_TRAINED_BUCKETS = 30
_NAMES = re.compile(r'<tool_call>\n\{"name": "([^"]+)"')


class Turn(NamedTuple):
    """One question and its reply; `short` is the bare answer, for system prompts that ask for brevity.

    thought: what the model thinks before it replies; "" where thinking is off. given: what a grammar gives of a
    reply in JSON, its keys or only its start.
    """

    user: str
    reply: str
    short: str = ""
    thought: str = ""
    given: Given = ""


@dataclass(frozen=True)
class Task:
    """Consecutive turns that belong together; the last reply is the one that is graded.

    `accept` are the right answers and `grade` says how a reply is held to them: "number", its last number is the
    answer; "ends", it ends with the answer; "exact", it is one of the answers; "names", it calls the same
    functions; "json", it is the same JSON; "keys", JSON with the same keys. tools: the functions that
    the chat template shows to the model, as in OpenAI's API. system: the system prompt; schema: that of a grammar.
    """

    turns: tuple[Turn, ...]
    keys: tuple[str, ...]
    accept: tuple[str, ...]
    grade: Grade = "ends"
    tools: tuple[dict[str, Any], ...] = ()
    system: str = ""
    schema: dict[str, Any] | None = None

    def is_right(self, reply: str) -> bool:
        """Grade a reply to the last turn, without what was thought."""
        reply = reply.rpartition("</think>")[2]
        if self.grade == "names":
            return _NAMES.findall(reply) == _NAMES.findall(self.accept[0])
        if self.grade == "exact":
            return reply.strip() in self.accept
        if self.grade in ("json", "keys"):
            try:
                said, right = (json.loads(re.sub(r"^```json|```$", "", text)) for text in (reply, self.accept[0]))
            except ValueError:
                return False
            return said == right or (self.grade == "keys" and said.keys() == right.keys())
        if self.grade == "number":
            numbers = re.findall(r"-?\d+(?:\.\d+)?", reply)
            return bool(numbers) and numbers[-1] in self.accept
        stripped = reply.strip().rstrip(".!").lower()
        return any(re.search(rf"(^|\W){re.escape(a.rstrip('.').lower())}$", stripped) for a in self.accept)


# Skills by name: how often one is drawn, and the function that makes up a task.
Skills = dict[str, tuple[float, Callable[..., Task]]]

# The lines of data/skill_table.txt, by section: the name of a skill, how often it is drawn, and what it is about.
_SKILLS = {title: [line.split(" ", 2) for line in lines] for title, lines in read("skill_table").items()}
ABOUT_SKILLS = {name: about for lines in _SKILLS.values() for name, _, about in lines}


def skills(section: str, makers: dict[str, Any]) -> Skills:
    """Return the skills of a section. makers: the functions that make up tasks, by the names of the skills."""
    return {name: (json.loads(weight), makers[name]) for name, weight, _ in _SKILLS[section]}


def task(
    user: str, reply: str, key: str, answer: str | Sequence[str], grade: Grade = "ends", short: str | None = None
) -> Task:
    """Return a task of one turn; its bare answer is the first accepted one unless `short` says otherwise."""
    accept = (answer,) if isinstance(answer, str) else tuple(answer)
    return Task((Turn(user, reply, accept[0] if short is None else short),), (key,), accept, grade)


@lru_cache(maxsize=1 << 16)
def bucket(key: str) -> int:
    """Return the hash bucket of a key, 0 to 99."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100


def is_held_out(key: str) -> bool:
    """Return whether a fact such as "add:12+30" is never trained on."""
    return bucket(key) >= (MUL2_TRAINED_BUCKETS if key.startswith("mul2:") else TRAINED_BUCKETS)


# Ways to write the same thing; either side may become the other.
_SWAPS = tuple(tuple(line.split("|")[:2]) for line in _TEXTS["swaps"])
_DROPPED = frozenset(_TEXTS["small words"])


def _swap(rng: random.Random, text: str) -> str:
    """Write a part of the text in another way, if it has one of the parts that are known."""
    found = [(a, b) for pair in _SWAPS for a, b in (pair, pair[::-1]) if a in text]
    if not found:
        return text
    old, new = rng.choice(found)
    return text.replace(old, new, 1)


def _reword(rng: random.Random, text: str) -> str:
    """Leave a small word out, or put a filler in: the words that are left tell what is meant."""
    words = text.split(" ")
    if len(words) < 3:
        return text
    small = [i for i, word in enumerate(words) if word.lower() in _DROPPED]
    # A filler next to a placeholder could be taken for a part of what fills it.
    gaps = [i for i in range(1, len(words)) if "{" not in words[i - 1] + words[i]]
    if small and rng.random() < 0.6:
        del words[rng.choice(small)]
    elif gaps:
        words.insert(rng.choice(gaps), rng.choice(_TEXTS["fillers"]))
    return " ".join(words)


def _typo(rng: random.Random, text: str) -> str:
    """Drop, double or swap one letter of one longer word, but never change a placeholder."""
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if len(word) > 3 and word.isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    word, at = words[i], rng.randrange(1, len(words[i]) - 1)
    kind = rng.random()
    if kind < 0.4:
        words[i] = word[:at] + word[at + 1 :]
    elif kind < 0.6:
        words[i] = word[:at] + word[at] + word[at:]
    else:
        words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def casual(rng: random.Random, text: str, decorate: bool = True) -> str:
    """Type `text` the way people do: other words, lower case, no question mark or apostrophe, a typo, a "please"."""
    if rng.random() < 0.15:
        text = _swap(rng, text)
    if rng.random() < 0.12:
        text = _reword(rng, text)
    if rng.random() < 0.45:
        text = text.lower()
    if "'" in text and rng.random() < 0.25:
        text = text.replace("'", "")
    if rng.random() < 0.05:
        text = _typo(rng, text)
    if text[-1] in "?.!" and rng.random() < 0.4:
        text = text[:-1]
    if decorate and rng.random() < 0.10:
        first = text if text[:2] == "I " or text[:1] == "{" else text[:1].lower() + text[1:]
        text = f"{rng.choice(_TEXTS['prefixes'])} {first}"
    if decorate and text[-1] not in "?.!" and rng.random() < 0.08:
        text += rng.choice(_TEXTS["suffixes"][:8] if text.endswith("}") else _TEXTS["suffixes"])
    return text


def phrase(rng: random.Random, templates: Sequence[str], /, **fields: object) -> str:
    """Return a template, typed casually, with its fields filled in; what the fields hold is never altered."""
    return casual(rng, rng.choice(templates)).format(**fields)


def pick(rng: random.Random, templates: Sequence[str], /, **fields: object) -> str:
    """Return a reply: a template filled in. The first template is likeliest, so that greedy decoding has one answer."""
    index = 0 if rng.random() < 0.5 else rng.randrange(len(templates))
    return templates[index].format(**fields)


def exchange(rng: random.Random, asked: Sequence[str], replies: Sequence[str], **fields: object) -> Task:
    """Return a task of one turn whose facts are few: the split is by the wording of the question."""
    question = phrase(rng, asked, **fields)
    return task(question, pick(rng, replies), f"talk:{question.lower()}", replies, "exact", short="")


def _letter_chain() -> dict[str, str]:
    """Return the letters seen after each pair of letters in WORDS ("^" starts a word, "$" ends it)."""
    chain: dict[str, str] = {}
    for entry in WORDS:
        padded = f"^^{entry}$"
        for i in range(len(entry) + 1):
            chain[padded[i : i + 2]] = chain.get(padded[i : i + 2], "") + padded[i + 2]
    return chain


_CHAIN = _letter_chain()


def made_up_word(rng: random.Random) -> str:
    """Return a word of 3 to 12 letters, mostly by the statistics of English letters, sometimes of random letters."""
    if rng.random() < 0.15:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))
    if rng.random() < 0.4:
        a, b = rng.choice(WORDS), rng.choice(WORDS)
        return (a[: rng.randint(1, len(a))] + b[rng.randrange(len(b)) :])[:12].ljust(3, "a")
    while True:
        letters = "^^"
        while letters[-1] != "$" and len(letters) < 15:
            letters += rng.choice(_CHAIN[letters[-2:]])
        if letters[-1] == "$" and len(letters) >= 6:
            return letters[2:-1]


def any_word(rng: random.Random) -> str:
    """Return a real word (three times in five) or a made-up one, so that skills on letters do not memorize the list."""
    return rng.choice(WORDS) if rng.random() < 0.6 else made_up_word(rng)
