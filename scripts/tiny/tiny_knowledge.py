"""Small facts, words of other languages, rhymes and plurals for the bundled model.

The facts are few, so the split is by wording, as in `tiny_facts.py`.
"""

import random

from tiny_task import Skills, Task, any_word, exchange, made_up_word, phrase, pick, task
from tiny_words import CAPITALS, COLORS, NAMES, THINGS, WORDS, pairs, read

_TEXTS = read("knowledge")

FACTS = pairs(_TEXTS["facts"])


def fact(rng: random.Random) -> Task:
    """Small facts: planets, animals, colors, authors, records"""
    asked, replies = rng.choice(FACTS)
    if rng.random() < 0.12:
        opener = rng.choice(("Do you know:", "I have a question.", "My son asks:", "Trivia:"))
        asked = tuple(f"{opener} {text}" for text in asked)
    return exchange(rng, asked, replies)


_LANGUAGES = ("Spanish", "French", "German", "Italian")
_TRANSLATIONS = {word: rest.split(",") for word, rest in (line.split(":") for line in _TEXTS["translations"])}


def translate(rng: random.Random) -> Task:
    """A common word in Spanish, French, German or Italian; the split is by wording"""
    word, place = rng.choice(tuple(_TRANSLATIONS)), rng.randrange(4)
    language = _LANGUAGES[place]
    written = rng.choice((word, word, word, f'"{word}"', f"'{word}'"))
    question = phrase(rng, _TEXTS["translate"], w=written, l=language if rng.random() < 0.5 else language.lower())
    answer = _TRANSLATIONS[word][place]
    reply = pick(rng, ("{w} is {a} in {l}.", "In {l}: {a}."), w=word.capitalize(), a=answer, l=language)
    return task(question, reply, f"translate:{question.lower()}", (answer, f"{answer} in {language}"), short=answer)


_RHYMES = tuple(line.split() for line in _TEXTS["rhymes"])
_PLURALS = dict(line.split("/") for line in _TEXTS["plurals"])


def rhyme(rng: random.Random) -> Task:
    """A word that rhymes with another; the split is by wording"""
    group = rng.choice(_RHYMES)
    word, other = rng.sample(group, 2)
    question = phrase(rng, _TEXTS["rhyme"], w=word)
    accept = tuple(f"{o} rhymes with {word}." for o in group if o != word)
    return task(question, f"{other} rhymes with {word}.".capitalize(), f"rhyme:{question.lower()}", accept, short=other)


def plural(rng: random.Random) -> Task:
    """The plural of a noun; the split is by wording"""
    word = rng.choice(tuple(_PLURALS) if rng.random() < 0.6 else _TEXTS["regular nouns"])
    answer = _PLURALS.get(word, f"{word}s")
    question = phrase(rng, _TEXTS["plural"], w=word)
    reply = pick(rng, ("The plural of {w} is {a}.", "{a}"), w=word, a=answer)
    return task(question, reply, f"plural:{question.lower()}", answer)


def palindrome(rng: random.Random) -> Task:
    """Is level a palindrome? The reply writes the word backwards"""
    word = rng.choice(_TEXTS["palindromes"]) if rng.random() < 0.5 else any_word(rng)
    if rng.random() < 0.2:
        half = made_up_word(rng)[: rng.randint(2, 4)]
        word = half + half[::-1][rng.randrange(2) :]
    same = word == word[::-1]
    letters = f"{'-'.join(word)} backwards is {'-'.join(word[::-1])}"
    reply = f"{letters}: {'yes' if same else 'no'}, {word} is {'a' if same else 'not a'} palindrome."
    question, short = phrase(rng, _TEXTS["palindrome"], w=word), "Yes." if same else "No."
    return task(question, reply, f"palindrome:{word}", (reply,), "exact", short)


_KINDS: dict[str, tuple[str, ...]] = {
    "animals": _TEXTS["animals"],
    "fruits": _TEXTS["fruits"],
    "colors": COLORS[:10],
    "colours": COLORS[:10],
    "countries": tuple(CAPITALS)[::5],
    "names": NAMES[::9],
    "capitals": tuple(CAPITALS.values())[::6],
    "vegetables": _TEXTS["vegetables"],
    "words": WORDS[::40],
    "things": THINGS,
    "planets": _TEXTS["planets"],
    "programming languages": _TEXTS["programming languages"],
}
_COUNTS = ("zero", "one", "two", "three", "four", "five")


def name_some(rng: random.Random) -> Task:
    """Name three animals; a word that starts with z; the split is by wording"""
    if rng.random() < 0.4:
        letter = rng.choice(WORDS)[0]
        word = next(word for word in WORDS if word[0] == letter)
        question = phrase(rng, _TEXTS["word with a letter"], l=rng.choice((word[0], word[0].upper())))
        return task(question, f"{word.capitalize()}.", f"startswith:{question.lower()}", word)
    kind = rng.choice(tuple(_KINDS))
    n = rng.randint(2, 5)
    chosen = ", ".join(_KINDS[kind][:n])
    question = phrase(rng, _TEXTS["name some"], n=_COUNTS[n] if rng.random() < 0.6 else n, k=kind)
    return task(question, f"{chosen[0].upper()}{chosen[1:]}.", f"name:{question.lower()}", chosen)


SKILLS: Skills = {
    "fact": (9, fact),
    "translate": (2, translate),
    "rhyme": (1, rhyme),
    "plural": (1, plural),
    "palindrome": (1, palindrome),
    "name_some": (1.5, name_some),
}
