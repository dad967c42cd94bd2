"""Open requests that the bundled model can meet: haikus, poems, stories, code, chance; and what it can not read."""

import random
import string

from tiny_about import ABOUT, CONCEPTS
from tiny_questions import plain
from tiny_talk import INTENTS
from tiny_task import Skills, Task, phrase, task
from tiny_words import THINGS, WORDS, pairs, read

_TEXTS = read("texts")

# Kinds of texts, and what one is about where nothing is asked for.
_KINDS = (("haiku", "rain"), ("poem", "the moon"), ("story", "a small dragon"))


def write_text(rng: random.Random) -> Task:
    """A haiku, a poem or a story about something; the split is by wording"""
    kind, usual = rng.choice(_KINDS)
    topic = rng.choice(_TEXTS["topics"]) if rng.random() < 0.6 else rng.choice(("a ", "the ", "")) + rng.choice(WORDS)
    if rng.random() < 0.25:
        question, topic = phrase(rng, _TEXTS[kind]), usual
    else:
        question = phrase(rng, _TEXTS[f"{kind} about"], t=topic)
    replies = tuple(text.format(t=topic, T=topic[0].upper() + topic[1:], N="Mia") for text in _TEXTS[f"{kind} texts"])
    reply = replies[0] if rng.random() < 0.7 else rng.choice(replies)
    return task(question, reply, f"text:{question.lower()}", replies, "exact", short="")


# How a program is named, and its code.
_CODE = pairs(_TEXTS["programs"])


def code(rng: random.Random) -> Task:
    """Hello world in several languages, and short functions; the split is by wording"""
    names, (text,) = rng.choice(_CODE[:1] if rng.random() < 0.2 else _CODE)
    question = phrase(rng, _TEXTS["code"], x=rng.choice(names))
    return task(question, text, f"code:{question.lower()}", (text,), "exact", short="")


def chance(rng: random.Random) -> Task:
    """A coin, a die, a random number, one of two things"""
    kind = rng.choice(("coin", "coin", "die", "number", "number", "choice"))
    if kind == "coin":
        question, replies = phrase(rng, _TEXTS["coin"]), ("Heads!", "Tails!")
    elif kind == "die":
        question, replies = phrase(rng, _TEXTS["die"]), tuple(f"You rolled a {n}." for n in range(1, 7))
    elif kind == "number":
        low = rng.choice((0, 1, 1, 1, 1, rng.randint(2, 20)))
        high = low + rng.choice((5, 9, 9, 9, 10, 19, 49, 99))
        high = 10 * round(high / 10) if high > 9 else high
        high = max(high, low + 4)
        question, replies = phrase(rng, _TEXTS["number"], a=low, b=high), tuple(f"{n}." for n in range(low, high + 1))
    else:
        x, y = rng.sample(THINGS, 2) if rng.random() < 0.4 else (rng.choice(WORDS), rng.choice(WORDS))
        question, replies = phrase(rng, _TEXTS["choice"], x=x, y=y), (f"I would take {x}.", f"I would take {y}.")
    return task(question, rng.choice(replies), f"chance:{question.lower()}", replies, "exact", short="")


_LOST = "I do not understand that. Ask me for a sum, a word to spell, a capital, or about fastgen."
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "poiuytrewq", "lkjhgfdsa")
_EMOJI = "😀😂🙂😎🤖🎉👍🔥❤️🚀🐱🐶🌈☕🍕✨🙏😢😡🤔💡👋"


def _nonsense(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(_TEXTS["babble"])
    if kind < 0.45:
        row = rng.choice(_ROWS)
        start = rng.randrange(len(row) - 3)
        return row[start : start + rng.randint(3, 9)] * rng.choice((1, 1, 1, 2))
    if kind < 0.7:
        letters = string.ascii_lowercase
        return " ".join("".join(rng.choices(letters, k=rng.randint(3, 9))) for _ in range(rng.randint(1, 3)))
    if kind < 0.78:
        return rng.choice(string.ascii_lowercase) * rng.randint(1, 8)
    if kind < 0.86:
        return "".join(rng.choices("!?.,;:#+-*/&%$@", k=rng.randint(2, 6)))
    if kind < 0.92:
        return "".join(rng.choices(_EMOJI, k=rng.randint(1, 3)))
    syllable = rng.choice(("bla", "blah", "blub", "la", "ba", "da", "ha", "tra", "du", "wob", "yada"))
    return rng.choice((" ", "")).join([syllable] * rng.randint(2, 5))


# Wordings that have a reply of their own although they are a single word.
_TAKEN = {plain(asked) for wordings, _ in (*INTENTS, *ABOUT, *CONCEPTS) for asked in wordings}
_TAKEN |= {"joke", "story", "poem", "haiku"}


def nonsense(rng: random.Random) -> Task:
    """What can not be read: keys, symbols, babble"""
    text = _nonsense(rng)
    if text in WORDS or plain(text) in _TAKEN:
        return nonsense(rng)
    return task(text, _LOST, f"nonsense:{text}", (_LOST,), "exact", short="")


def lone_word(rng: random.Random) -> Task:
    """A word alone: what can be done with it"""
    word = rng.choice(WORDS)
    if word in _TAKEN:
        return lone_word(rng)
    reply = f"{word.capitalize()}? I can spell it, reverse it, or count its letters."
    text = rng.choice((word, word, word.capitalize(), f"{word}.", f"{word}!"))
    return task(text, reply, f"lone:{word}", (reply,), "exact", short="")


def foreign(rng: random.Random) -> Task:
    """Hello in other languages; the split is by wording"""
    name, words = rng.choice(_TEXTS["greetings"]).split(": ")
    text = rng.choice(words.split(", "))
    text = rng.choice((text, text.capitalize(), text.capitalize()))
    text += rng.choice(("", "", "!", "?", "!!", ".", " !", "..."))
    if rng.random() < 0.15:
        text = rng.choice(("¡", "¿", "")) + text
    reply = f"{name}! I speak only English, and only a little."
    return task(text, reply, f"foreign:{text.lower()}", (reply,), "exact", short="")


_TIMES = ("Good morning", "Good evening", "Good afternoon", "Morning", "Evening")
_WHOM = ("",) * 3 + _TEXTS["whom"]
_TAILS = ("",) * 4 + _TEXTS["tails"]
HELLO = "Hello! How can I help you today? You can ask me for a sum, a capital, or what fastgen is."
_WELL = "I am fine, thank you! How can I help you?"


def greeting(rng: random.Random) -> Task:
    """Hello in many forms, how are you, nice to meet you; the split is by wording"""
    whom = rng.choice(_WHOM)
    kind = rng.random()
    opener = rng.choice(_TIMES if kind < 0.2 else _TEXTS["simple"])
    start = f"{opener} {whom}".strip() + rng.choice((",", "!", ".", "", "!"))
    if kind < 0.2:
        text = f"{start} {rng.choice(_TAILS)}".strip()
        reply = f"{opener if opener[0] == 'G' else 'Good ' + opener.lower()}! What can I do for you?"
    elif kind < 0.6:
        text, reply = f"{start} {rng.choice(_TAILS)}".strip(), HELLO
    elif kind < 0.85:
        feeling = rng.choice(_TEXTS["feelings"])
        text, reply = (f"{start} {feeling}" if rng.random() < 0.6 else feeling.capitalize()), _WELL
    else:
        meeting = rng.choice(_TEXTS["meeting"])
        text = rng.choice((f"{start} {meeting}", meeting.capitalize(), f"{meeting.capitalize()}, {whom or 'tiny'}!"))
        reply = "Nice to meet you too! How can I help you?"
    question = phrase(rng, (text.replace("{", "").rstrip(","),))
    return task(question, reply, f"greet:{question.lower()}", (reply,), "exact", short="")


SKILLS: Skills = {
    "write_text": (3, write_text),
    "code": (1.5, code),
    "chance": (2, chance),
    "nonsense": (2.5, nonsense),
    "lone_word": (0.8, lone_word),
    "foreign": (1.5, foreign),
    "greeting": (3, greeting),
}
