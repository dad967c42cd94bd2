"""Skills on fixed facts and on what was said before: capitals, the calendar, follow-up questions, recall.

The facts are few, so the split is by the exact phrasing of a question: every capital is trained, but a held-out
wording of the question for that country never was.
"""

import random

from tiny_skills import SKILLS as PLAIN_SKILLS
from tiny_skills import backwards, steps_keys, two_digit_factors, work_out
from tiny_task import Task, Turn, any_word, made_up_word, phrase, pick, skills, task
from tiny_words import (
    CAPITALS,
    COLORS,
    COUNTRY_ALIASES,
    DAYS,
    MONTH_DAYS,
    MONTHS,
    NAMES,
    ORDINALS,
    WORDS,
    number_in_words,
    read,
)

_TEXTS = read("facts")


def _cased(rng: random.Random, name: str) -> str:
    return name.lower() if rng.random() < 0.3 else name


def _country(rng: random.Random) -> tuple[str, str]:
    """Return a country and how a user might write it."""
    country = rng.choice(tuple(CAPITALS))
    shown = rng.choice(COUNTRY_ALIASES[country]) if country in COUNTRY_ALIASES and rng.random() < 0.5 else country
    return country, _cased(rng, shown)


def _article(country: str) -> str:
    return f"the {country}" if country.startswith(("United", "Netherlands", "Philippines", "Maldives")) else country


def capital(rng: random.Random) -> Task:
    country, shown = _country(rng)
    question, answer = phrase(rng, _TEXTS["capital"], c=shown), CAPITALS[country]
    replies = ("The capital of {c} is {a}.", "{a}.", "{a} is the capital of {c}.")
    # The graded reply ends with the answer, so the third form is used only half as often as pick() would.
    reply = pick(rng, replies[: 2 + (rng.random() < 0.5)], c=_article(country), a=answer)
    accept = (answer, f"{answer} is the capital of {_article(country)}")
    return task(question, reply, f"capital:{question.lower()}", accept)


def country_of_capital(rng: random.Random) -> Task:
    country = rng.choice(tuple(CAPITALS))
    shown = _cased(rng, CAPITALS[country])
    question = phrase(rng, _TEXTS["country of capital"], a=shown)
    reply = pick(rng, ("{a} is the capital of {c}.", "{c}."), a=CAPITALS[country], c=_article(country))
    return task(question, reply, f"country:{question.lower()}", country)


def unknown_capital(rng: random.Random) -> Task:
    name = made_up_word(rng).capitalize()
    question = phrase(rng, _TEXTS["capital"], c=_cased(rng, name))
    shown = name if name in question else name.lower()
    reply = f"I do not know the capital of {shown}."
    return task(question, reply, f"nocapital:{name}", (reply,), "exact", short="I do not know.")


def weekday(rng: random.Random) -> Task:
    i, shape = rng.randrange(7), rng.random()
    day = _cased(rng, DAYS[i])
    if shape < 0.35:
        step, question = 1, phrase(rng, _TEXTS["day after"], d=day)
    elif shape < 0.6:
        step, question = -1, phrase(rng, _TEXTS["day before"], d=day)
    else:
        step = rng.randint(2, 10) * (1 if rng.random() < 0.7 else -1)
        n = str(abs(step)) if rng.random() < 0.8 else number_in_words(abs(step))
        question = phrase(rng, _TEXTS["days after" if step > 0 else "days before"], n=n, d=day)
    answer = DAYS[(i + step) % 7]
    return task(question, pick(rng, ("{a}.", "It is {a}.", "{a}"), a=answer), f"weekday:{question.lower()}", answer)


def month(rng: random.Random) -> Task:
    i, shape = rng.randrange(12), rng.random()
    name = _cased(rng, MONTHS[i])
    if shape < 0.55:
        step = rng.choice((1, 1, -1, -1, 2, 3))
        where = "before" if step < 0 else "after"
        asked = "month beside" if abs(step) == 1 else "months away"
        question = phrase(rng, _TEXTS[asked], w=where, m=name, n=abs(step))
        answer = MONTHS[(i + step) % 12]
        reply = pick(rng, ("{a}.", "It is {a}.", "{a}"), a=answer)
    elif shape < 0.75:
        short = f"{i + 1}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(i + 1, 'th') }".replace(" ", "")
        question = phrase(rng, _TEXTS["nth month"], o=ORDINALS[i] if rng.random() < 0.7 else short)
        answer, reply = MONTHS[i], pick(rng, ("{a}.", "It is {a}."), a=MONTHS[i])
    else:
        question, answer = phrase(rng, _TEXTS["days of month"], m=name), f"{MONTH_DAYS[i]} days"
        reply = f"{MONTHS[i]} has {MONTH_DAYS[i]} days." if i != 1 else "In most years, February has 28 days."
    return task(question, reply, f"month:{question.lower()}", answer)


def follow_up_capital(rng: random.Random) -> Task:
    one, shown = _country(rng)
    two, other = _country(rng)
    question, answer = phrase(rng, _TEXTS["another capital"], c=other), CAPITALS[two]
    reply = f"The capital of {_article(one)} is {CAPITALS[one]}."
    first = Turn(phrase(rng, _TEXTS["capital"], c=shown), reply, CAPITALS[one])
    second = Turn(question, f"The capital of {_article(two)} is {answer}.", answer)
    return Task((first, second), (f"capital2:{one},{question.lower()}",), (answer,))


def follow_up_word(rng: random.Random) -> Task:
    if rng.random() < 0.3:
        country, shown = _country(rng)
        word = CAPITALS[country]
        first = Turn(phrase(rng, _TEXTS["capital"], c=shown), f"The capital of {_article(country)} is {word}.", word)
    else:
        word = any_word(rng)
        first = Turn(phrase(rng, ("Spell {w}.", "How do you spell {w}?", "spell {w}"), w=word), "-".join(word))
    if not word.isalpha():
        return follow_up_word(rng)
    kind = rng.random()
    if kind < 0.4:
        answer = word.lower()[::-1]
        second = Turn(phrase(rng, _TEXTS["reverse it"]), backwards(word.lower()), answer)
    elif kind < 0.7:
        reply = f"{'-'.join(word.lower())}: {len(word)} letters."
        second = Turn(phrase(rng, _TEXTS["count its letters"]), reply, str(len(word)))
        return Task((first, second), (f"spell:{word}", f"letters:{word.lower()}"), (str(len(word)),), "number")
    else:
        answer = "-".join(word)
        second = Turn(phrase(rng, _TEXTS["spell it again" if first.reply == answer else "spell it"]), answer, answer)
    return Task((first, second), (f"spell:{word}", f"reverse:{word.lower()}"), (answer,))


def follow_up_steps(rng: random.Random) -> Task:
    a, b = two_digit_factors(rng)
    turns = (
        Turn(phrase(rng, ("What is {a} * {b}?", "{a} * {b}", "{a} x {b}?"), a=a, b=b), f"{a} * {b} = {a * b}."),
        Turn(phrase(rng, _TEXTS["steps"]), work_out(a, b)),
    )
    return Task(turns, steps_keys(a, b), (str(a * b),), "number")


# What a user tells: the texts are how it is told, the reply, how it is asked for, and the answer.
_PERSONAL = ("name", "color", "number", "city", "pet", "word")


def _personal_value(rng: random.Random, kind: str) -> str:
    if kind in ("name", "pet"):
        return rng.choice(NAMES) if rng.random() < 0.6 else made_up_word(rng).capitalize()
    if kind == "color":
        return rng.choice(COLORS) if rng.random() < 0.8 else rng.choice(WORDS)
    if kind == "city":
        return rng.choice(tuple(CAPITALS.values())) if rng.random() < 0.6 else made_up_word(rng).capitalize()
    return str(rng.randrange(1000)) if kind == "number" else any_word(rng)


def tell(rng: random.Random, memory: dict[str, str]) -> Task:
    """The user says something about themselves; `memory` takes it up."""
    kind = rng.choice(("name", "name", *_PERSONAL))
    value = _personal_value(rng, kind)
    memory[kind] = value
    reply = pick(rng, _TEXTS[f"{kind} reply"], v=value)
    told = phrase(rng, _TEXTS[f"{kind} told"], v=value)
    return task(told, reply[:1].upper() + reply[1:], f"recall:{value}", value, short="")


def ask(rng: random.Random, memory: dict[str, str]) -> Task:
    """The user asks for what was told; without it the model says that it was not."""
    known = [kind for kind in _PERSONAL if kind in memory]
    kind = rng.choice(known) if known and rng.random() < 0.85 else rng.choice(_PERSONAL)
    question = phrase(rng, _TEXTS[f"{kind} asked"])
    if kind not in memory:
        subject = {"name": "your name", "city": "where you live", "pet": "about a pet", "word": "a word"}
        reply = f"You have not told me {subject.get(kind, f'your favorite {kind}')} yet."
        return task(question, reply, f"norecall:{question.lower()}", (reply,), "exact", short="")
    value = memory[kind]
    return task(question, pick(rng, _TEXTS[f"{kind} answer"], v=value), f"recall:{value}", value)


def recall(rng: random.Random) -> Task:
    memory: dict[str, str] = {}
    told = tell(rng, memory)
    between = [PLAIN_SKILLS[rng.choice(tuple(PLAIN_SKILLS))][1](rng) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
    (kind,) = memory
    question = phrase(rng, _TEXTS[f"{kind} asked"])
    value = memory[kind]
    last = Turn(question, pick(rng, _TEXTS[f"{kind} answer"], v=value), value)
    turns = (*told.turns, *(t for b in between for t in b.turns), last)
    keys = (*(k for b in between for k in b.keys), f"recall:{value}")
    return Task(turns, keys, (value,))


SKILLS = skills("facts", globals())
