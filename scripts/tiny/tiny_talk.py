"""Skills on texts with few answers: small facts, fastgen and its field, small talk, and what can be written or drawn.

The facts are few, so the split is by wording, as in `tiny_facts.py`. An intent is (what users say, right replies); the
first reply is the usual one.
"""

import random
import re
import string

from tiny_questions import plain
from tiny_task import Task, Turn, any_word, exchange, made_up_word, phrase, pick, skills, task
from tiny_words import CAPITALS, NAMES, THINGS, WORDS, number_in_words, pairs, read

_KNOWLEDGE, _ABOUT, _TALK, _TEXTS = (read(name) for name in ("knowledge", "about", "talk", "texts"))

# Small facts, words of other languages, rhymes, plurals.

FACTS = pairs(_KNOWLEDGE["facts"])


def fact(rng: random.Random) -> Task:
    asked, replies = rng.choice(FACTS)
    if rng.random() < 0.12:
        opener = rng.choice(("Do you know:", "I have a question.", "My son asks:", "Trivia:"))
        asked = tuple(f"{opener} {text}" for text in asked)
    return exchange(rng, asked, replies)


_LANGUAGES = ("Spanish", "French", "German", "Italian")
_TRANSLATIONS = {word: rest.split(",") for word, rest in (line.split(":") for line in _KNOWLEDGE["translations"])}


def translate(rng: random.Random) -> Task:
    word, place = rng.choice(tuple(_TRANSLATIONS)), rng.randrange(4)
    language = _LANGUAGES[place]
    written = rng.choice((word, word, word, f'"{word}"', f"'{word}'"))
    question = phrase(rng, _KNOWLEDGE["translate"], w=written, l=language if rng.random() < 0.5 else language.lower())
    answer = _TRANSLATIONS[word][place]
    reply = pick(rng, ("{w} is {a} in {l}.", "In {l}: {a}."), w=word.capitalize(), a=answer, l=language)
    return task(question, reply, f"translate:{question.lower()}", (answer, f"{answer} in {language}"), short=answer)


_RHYMES = tuple(line.split() for line in _KNOWLEDGE["rhymes"])
_PLURALS = dict(line.split("/") for line in _KNOWLEDGE["plurals"])


def rhyme(rng: random.Random) -> Task:
    group = rng.choice(_RHYMES)
    word, other = rng.sample(group, 2)
    question = phrase(rng, _KNOWLEDGE["rhyme"], w=word)
    accept = tuple(f"{o} rhymes with {word}." for o in group if o != word)
    return task(question, f"{other} rhymes with {word}.".capitalize(), f"rhyme:{question.lower()}", accept, short=other)


def plural(rng: random.Random) -> Task:
    word = rng.choice(tuple(_PLURALS) if rng.random() < 0.6 else _KNOWLEDGE["regular nouns"])
    answer = _PLURALS.get(word, f"{word}s")
    question = phrase(rng, _KNOWLEDGE["plural"], w=word)
    reply = pick(rng, ("The plural of {w} is {a}.", "{a}"), w=word, a=answer)
    return task(question, reply, f"plural:{question.lower()}", answer)


def palindrome(rng: random.Random) -> Task:
    word = rng.choice(_KNOWLEDGE["palindromes"]) if rng.random() < 0.5 else any_word(rng)
    if rng.random() < 0.2:
        half = made_up_word(rng)[: rng.randint(2, 4)]
        word = half + half[::-1][rng.randrange(2) :]
    same = word == word[::-1]
    letters = f"{'-'.join(word)} backwards is {'-'.join(word[::-1])}"
    reply = f"{letters}: {'yes' if same else 'no'}, {word} is {'a' if same else 'not a'} palindrome."
    question, short = phrase(rng, _KNOWLEDGE["palindrome"], w=word), "Yes." if same else "No."
    return task(question, reply, f"palindrome:{word}", (reply,), "exact", short)


_KINDS = {kind: things.split(", ") for kind, things in (line.split(": ") for line in _KNOWLEDGE["kinds"])}


def name_some(rng: random.Random) -> Task:
    if rng.random() < 0.4:
        letter = rng.choice(WORDS)[0]
        word = next(word for word in WORDS if word[0] == letter)
        question = phrase(rng, _KNOWLEDGE["word with a letter"], l=rng.choice((word[0], word[0].upper())))
        return task(question, f"{word.capitalize()}.", f"startswith:{question.lower()}", word)
    kind = rng.choice(tuple(_KINDS))
    n = rng.randint(2, 5)
    chosen = ", ".join(_KINDS[kind][:n])
    question = phrase(rng, _KNOWLEDGE["name some"], n=number_in_words(n) if rng.random() < 0.6 else n, k=kind)
    return task(question, f"{chosen[0].upper()}{chosen[1:]}.", f"name:{question.lower()}", chosen)


# fastgen and its field.

ABOUT = pairs(_ABOUT["about"])

# Models by name: those that fastgen runs, and those that it does not.
SUPPORTED = _ABOUT["supported"]
UNSUPPORTED = _ABOUT["unsupported"]
FAMILIES = "the Llama, Mistral, Qwen2 and Qwen3 families"
# Features: their names, and whether and how fastgen has them.
FEATURES = pairs(_ABOUT["features"])
_HOW, _WHETHER = _ABOUT["how to use a feature"], _ABOUT["whether there is a feature"]
CONCEPTS = pairs(_ABOUT["concepts"])
_EXPLAINED = {name for names, _ in CONCEPTS for name in names}


def about_fastgen(rng: random.Random) -> Task:
    if rng.random() < 0.6:
        return exchange(rng, *rng.choice(ABOUT))
    names, replies = rng.choice(CONCEPTS)
    return exchange(rng, _ABOUT["concept"], replies, x=_written(rng, rng.choice(names)))


def _written(rng: random.Random, name: str) -> str:
    """Return how a term may be typed: without its article, in lower case."""
    name = re.sub("^(an?|the) ", "", name) if rng.random() < 0.4 else name
    return name.lower() if rng.random() < 0.35 else name


def model_support(rng: random.Random) -> Task:
    kind = rng.random()
    if kind < 0.42:
        model = rng.choice(SUPPORTED)
        reply = f"Yes, fastgen supports {model}: it runs {FAMILIES}."
    elif kind < 0.9:
        model = rng.choice(UNSUPPORTED)
        reply = f"No, fastgen does not support {model}. It runs {FAMILIES}."
    else:
        model = made_up_word(rng).capitalize() + rng.choice(("", " 2", "-7B", " 3.1"))
        reply = f"I do not know {model}. fastgen runs {FAMILIES}."
    shown = model.lower() if rng.random() < 0.35 else model
    question = phrase(rng, _ABOUT["model"], m=shown)
    reply = reply.replace(model, shown) if kind >= 0.9 else reply
    return task(question, reply, f"model:{question.lower()}", (reply,), "exact", short=reply.split(",")[0] + ".")


def features(rng: random.Random) -> Task:
    names, replies = rng.choice(FEATURES)
    name = rng.choice(names)
    # The name by itself asks what it is where the model can tell.
    alone = rng.random() < 0.25 and not {*names} & _EXPLAINED
    asked = _ABOUT["feature alone"] if alone else rng.choice((_WHETHER, _HOW))
    if asked is _HOW:  # "How do I use it?" is not answered by "Yes"
        replies = tuple(
            re.sub("^Yes[,:] (a |it |each |models |the )?", lambda found: (found[1] or "").capitalize(), reply)
            for reply in replies
        )
    return exchange(rng, asked, replies, x=_written(rng, name))


# Small talk, and questions that the model cannot answer.

INTENTS = pairs(_TALK["intents"])
JOKES = _TALK["jokes"]
UNKNOWN = _TALK["unknown"]


def small_talk(rng: random.Random) -> Task:
    # The first intents (a greeting, who are you, what can you do) are what a newcomer types first.
    return exchange(rng, *rng.choice(INTENTS[:1] + INTENTS[10:12] if rng.random() < 0.15 else INTENTS))


def joke(rng: random.Random) -> Task:
    first, second = rng.sample(JOKES, 2)
    question = phrase(rng, _TALK["joke"])
    if rng.random() < 0.6:
        return task(question, first, f"talk:{question.lower()}", JOKES, "exact", short="")
    more = phrase(rng, _TALK["another joke"])
    turns = (Turn(question, first), Turn(more, second))
    others = tuple(j for j in JOKES if j != first)
    return Task(turns, (f"talk:{question.lower()}", f"more:{question.lower()}:{more.lower()}"), others, "exact")


_KNOWN = {plain(asked) for wordings, _ in FACTS for asked in wordings}


def off_topic(rng: random.Random) -> Task:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2))))
    topic = rng.choice(
        (rng.choice(_TALK["topics"]), rng.choice(_TALK["topics"]), words, words, rng.choice(tuple(CAPITALS)))
    )
    name = rng.choice(_TALK["people"]) if rng.random() < 0.5 else f"{rng.choice(NAMES)} {any_word(rng).capitalize()}"
    name = name.lower() if rng.random() < 0.3 else name
    other = rng.choice((*_TALK["topics"], *WORDS))
    question = phrase(rng, _TALK["off topic"], t=topic, u=other, n=name, d=rng.randint(2, 2030))
    if plain(question) in _KNOWN:
        return off_topic(rng)
    return task(question, pick(rng, UNKNOWN), f"unknown:{question.lower()}", UNKNOWN, "exact", short="I do not know.")


_ENDINGS = ("AI", "DB", "ML", "Net", ".js", "GPT", "LM", " API", "", "", "-7", " 2", " Pro", "X1")


def fragment(rng: random.Random) -> Task:
    kind = rng.random()
    if kind < 0.5:
        text = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 5)))
        text += rng.choice(("", "", "", "2", "-3", "s"))
    elif kind < 0.65:
        text = made_up_word(rng).capitalize() + rng.choice(_ENDINGS)
    else:
        text = rng.choice(_TALK["fragments"])
        text = rng.choice((text, text, text.capitalize(), text.upper()))
    if plain(text) in _TAKEN | _TERMS:
        return fragment(rng)
    question = text + rng.choice(("?", "?", "", "??", " ?", "!"))
    return task(question, UNKNOWN[0], f"fragment:{text.lower()}", UNKNOWN, "exact", short="I do not know.")


_ENGLISH_ONLY = "I speak only English, and only a little."


def foreign_text(rng: random.Random) -> Task:
    text = rng.choice(_TALK["foreign texts"])
    if rng.random() < 0.4:
        text = text.lower().strip("?!.¿ ")
    if rng.random() < 0.25:
        text += rng.choice(("!", "?", "??", "...", " :)"))
    return task(text, _ENGLISH_ONLY, f"foreign:{text}", (_ENGLISH_ONLY,), "exact", short="")


def likes(rng: random.Random) -> Task:
    topic = rng.choice(_TALK["topics"]) if rng.random() < 0.4 else rng.choice(WORDS)
    reply = f"{topic[0].upper()}{topic[1:]}? That sounds interesting!"
    return task(phrase(rng, _TALK["likes"], t=topic), reply, f"likes:{topic}", (reply,), "exact", short="")


# Haikus, poems, stories, code, chance, and what cannot be read.

# Kinds of texts, and what one is about where nothing is asked for.
_WRITTEN = (("haiku", "rain"), ("poem", "the moon"), ("story", "a small dragon"))


def write_text(rng: random.Random) -> Task:
    kind, usual = rng.choice(_WRITTEN)
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
    names, (text,) = rng.choice(_CODE[:1] if rng.random() < 0.2 else _CODE)
    question = phrase(rng, _TEXTS["code"], x=rng.choice(names))
    return task(question, text, f"code:{question.lower()}", (text,), "exact", short="")


def chance(rng: random.Random) -> Task:
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
_TERMS = {plain(name) for names, _ in (*FEATURES, *CONCEPTS) for name in names}
_TERMS |= {plain(name) for name in (*SUPPORTED, *UNSUPPORTED)}


def nonsense(rng: random.Random) -> Task:
    text = _nonsense(rng)
    if text in WORDS or plain(text) in _TAKEN:
        return nonsense(rng)
    return task(text, _LOST, f"nonsense:{text}", (_LOST,), "exact", short="")


def lone_word(rng: random.Random) -> Task:
    word = rng.choice(WORDS)
    if word in _TAKEN:
        return lone_word(rng)
    reply = f"{word.capitalize()}? I can spell it, reverse it, or count its letters."
    text = rng.choice((word, word, word.capitalize(), f"{word}.", f"{word}!"))
    return task(text, reply, f"lone:{word}", (reply,), "exact", short="")


def foreign(rng: random.Random) -> Task:
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


SKILLS = skills("talk", globals())
