"""Small talk, and replies to questions that the model can not answer: phrasings and replies.

An intent is (what users say, right replies); the first reply is the usual one.
"""

import random

from tiny_knowledge import FACTS
from tiny_questions import plain
from tiny_task import Skills, Task, Turn, any_word, exchange, phrase, pick, task
from tiny_words import CAPITALS, NAMES, WORDS, pairs, read

_TEXTS = read("talk")
INTENTS = pairs(_TEXTS["intents"])
JOKES = _TEXTS["jokes"]
UNKNOWN = _TEXTS["unknown"]


def small_talk(rng: random.Random) -> Task:
    """Greetings, thanks, questions about the model, and a few everyday facts."""
    # The first intents (a greeting, who are you, what can you do) are what a newcomer types first.
    return exchange(rng, *rng.choice(INTENTS[:1] + INTENTS[10:12] if rng.random() < 0.15 else INTENTS))


def joke(rng: random.Random) -> Task:
    """A joke, and maybe a different one after it."""
    first, second = rng.sample(JOKES, 2)
    question = phrase(rng, _TEXTS["joke"])
    if rng.random() < 0.6:
        return task(question, first, f"talk:{question.lower()}", JOKES, "exact", short="")
    more = phrase(rng, _TEXTS["another joke"])
    turns = (Turn(question, first), Turn(more, second))
    others = tuple(j for j in JOKES if j != first)
    return Task(turns, (f"talk:{question.lower()}", f"more:{question.lower()}:{more.lower()}"), others, "exact")


_KNOWN = {plain(asked) for wordings, _ in FACTS for asked in wordings}


def off_topic(rng: random.Random) -> Task:
    """Questions that the model can not answer; it says so and what it can do."""
    words = " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2))))
    topic = rng.choice(
        (rng.choice(_TEXTS["topics"]), rng.choice(_TEXTS["topics"]), words, words, rng.choice(tuple(CAPITALS)))
    )
    name = f"{rng.choice(NAMES)} {any_word(rng).capitalize()}"
    question = phrase(rng, _TEXTS["off topic"], t=topic, n=name, d=rng.randint(2, 2030))
    if plain(question) in _KNOWN:
        return off_topic(rng)
    return task(question, pick(rng, UNKNOWN), f"unknown:{question.lower()}", UNKNOWN, "exact", short="I do not know.")


def likes(rng: random.Random) -> Task:
    """The user likes something; the reply takes it up."""
    topic = rng.choice(_TEXTS["topics"]) if rng.random() < 0.4 else rng.choice(WORDS)
    reply = f"{topic[0].upper()}{topic[1:]}? That sounds interesting!"
    return task(phrase(rng, _TEXTS["likes"], t=topic), reply, f"likes:{topic}", (reply,), "exact", short="")


SKILLS: Skills = {
    "small_talk": (9, small_talk),
    "joke": (1.5, joke),
    "off_topic": (6, off_topic),
    "likes": (0.7, likes),
}
