"""Skills on fixed facts and on what was said before: capitals, the calendar, follow-up questions, recall.

The facts are few, so the split is by the exact phrasing of a question: every capital is trained, but a held-out
wording of the question for that country never was.
"""

import random
from collections.abc import Callable, Sequence

from tiny_skills import SKILLS as PLAIN_SKILLS
from tiny_skills import backwards, steps_keys, two_digit_factors, work_out
from tiny_task import Task, Turn, any_word, made_up_word, phrase, pick, task
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
)


def _cased(rng: random.Random, name: str) -> str:
    return name.lower() if rng.random() < 0.3 else name


def _country(rng: random.Random) -> tuple[str, str]:
    """A country and how a user might write it."""
    country = rng.choice(tuple(CAPITALS))
    shown = rng.choice(COUNTRY_ALIASES[country]) if country in COUNTRY_ALIASES and rng.random() < 0.5 else country
    return country, _cased(rng, shown)


def _article(country: str) -> str:
    return f"the {country}" if country.startswith(("United", "Netherlands", "Philippines", "Maldives")) else country


_ASK_CAPITAL = (
    "What is the capital of {c}?", "What is the capital of {c}?", "Capital of {c}?", "What's the capital of {c}?",
    "What is {c}'s capital?", "Which city is the capital of {c}?", "Tell me the capital of {c}.", "{c} capital",
    "Do you know the capital of {c}?", "Name the capital of {c}.", "The capital of {c} is?", "the capital of {c}",
    "What is the capital city of {c}?", "What's the capital city of {c}?", "Can you tell me the capital of {c}?",
)  # fmt: skip


def _capital_reply(rng: random.Random, country: str) -> str:
    replies = ("The capital of {c} is {a}.", "{a}.", "{a} is the capital of {c}.")
    # The graded reply ends with the answer, so the third form is used only half as often as pick() would.
    return pick(rng, replies[: 2 + (rng.random() < 0.5)], c=_article(country), a=CAPITALS[country])


def capital(rng: random.Random) -> Task:
    """The capital of a country."""
    country, shown = _country(rng)
    question, answer = phrase(rng, _ASK_CAPITAL, c=shown), CAPITALS[country]
    reply = _capital_reply(rng, country)
    accept = (answer, f"{answer} is the capital of {_article(country)}")
    return task(question, reply, f"capital:{question.lower()}", accept)


def country_of_capital(rng: random.Random) -> Task:
    """The country of a capital."""
    country = rng.choice(tuple(CAPITALS))
    shown = _cased(rng, CAPITALS[country])
    asked = (
        "{a} is the capital of which country?", "Which country has the capital {a}?",
        "What country is {a} the capital of?", "Of which country is {a} the capital?", "In which country is {a}?",
        "Where is {a}?", "What country is {a} in?",
    )  # fmt: skip
    question = phrase(rng, asked, a=shown)
    reply = pick(rng, ("{a} is the capital of {c}.", "{c}."), a=CAPITALS[country], c=_article(country))
    return task(question, reply, f"country:{question.lower()}", country)


def unknown_capital(rng: random.Random) -> Task:
    """The capital of a country that does not exist, or that nobody taught the model."""
    name = made_up_word(rng).capitalize()
    question = phrase(rng, _ASK_CAPITAL, c=_cased(rng, name))
    shown = name if name in question else name.lower()
    reply = f"I do not know the capital of {shown}."
    return task(question, reply, f"nocapital:{name}", (reply,), "exact", short="I do not know.")


def weekday(rng: random.Random) -> Task:
    """The day after, before, or n days from a weekday."""
    asked: Sequence[str]
    i, shape = rng.randrange(7), rng.random()
    day = _cased(rng, DAYS[i])
    if shape < 0.35:
        asked = (
            "What day comes after {d}?", "Which day is after {d}?", "What is the day after {d}?", "The day after {d}?",
            "If today is {d}, what day is tomorrow?", "Today is {d}. What is tomorrow?",
            "Today is {d}, what is tomorrow?", "It is {d} today. Which day is tomorrow?",
            "What is tomorrow if today is {d}?", "Today's {d}, so tomorrow is?",
            "If it is {d} today, what day will tomorrow be?", "Which day follows {d}?",
        )  # fmt: skip
        step, question = 1, phrase(rng, asked, d=day)
    elif shape < 0.6:
        asked = (
            "What day comes before {d}?", "Which day is before {d}?", "What is the day before {d}?",
            "The day before {d}?", "If today is {d}, what day was yesterday?", "Today is {d}. What was yesterday?",
            "It is {d} today. Which day was yesterday?", "What was yesterday if today is {d}?",
        )  # fmt: skip
        step, question = -1, phrase(rng, asked, d=day)
    else:
        step = rng.randint(2, 10) * (1 if rng.random() < 0.7 else -1)
        n = str(abs(step)) if rng.random() < 0.8 else number_in_words(abs(step))
        after = (
            "What day is {n} days after {d}?", "{n} days after {d}?", "Today is {d}. What day is it in {n} days?",
            "Which day comes {n} days after {d}?", "If today is {d}, what day is it in {n} days?",
        )  # fmt: skip
        before = (
            "What day is {n} days before {d}?", "{n} days before {d}?", "Which day comes {n} days before {d}?",
            "If today is {d}, what day was it {n} days ago?",
        )  # fmt: skip
        question = phrase(rng, after if step > 0 else before, n=n, d=day)
    answer = DAYS[(i + step) % 7]
    return task(question, pick(rng, ("{a}.", "It is {a}.", "{a}"), a=answer), f"weekday:{question.lower()}", answer)


def month(rng: random.Random) -> Task:
    """The month after or before another, the n-th month, or how many days a month has."""
    asked: Sequence[str]
    i, shape = rng.randrange(12), rng.random()
    name = _cased(rng, MONTHS[i])
    if shape < 0.55:
        step = rng.choice((1, 1, -1, -1, 2, 3))
        where = "before" if step < 0 else "after"
        asked = (
            "What month comes {w} {m}?", "Which month is {w} {m}?", "What is the month {w} {m}?", "The month {w} {m}?",
        )  # fmt: skip
        many = ("What month is {n} months {w} {m}?", "Which month comes {n} months {w} {m}?", "{n} months {w} {m}?")
        question = phrase(rng, asked if abs(step) == 1 else many, w=where, m=name, n=abs(step))
        answer = MONTHS[(i + step) % 12]
        reply = pick(rng, ("{a}.", "It is {a}.", "{a}"), a=answer)
    elif shape < 0.75:
        asked = (
            "What is the {o} month?", "What is the {o} month of the year?", "Which month is the {o}?", "{o} month?",
            "Which month is the {o} of the year?", "Name the {o} month.",
        )  # fmt: skip
        short = f"{i + 1}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(i + 1, 'th') }".replace(" ", "")
        question = phrase(rng, asked, o=ORDINALS[i] if rng.random() < 0.7 else short)
        answer, reply = MONTHS[i], pick(rng, ("{a}.", "It is {a}."), a=MONTHS[i])
    else:
        asked = (
            "How many days does {m} have?", "How many days are in {m}?", "Number of days in {m}?", "Days in {m}?",
            "How many days are there in {m}?", "How long is {m}?",
        )  # fmt: skip
        question, answer = phrase(rng, asked, m=name), f"{MONTH_DAYS[i]} days"
        reply = f"{MONTHS[i]} has {MONTH_DAYS[i]} days." if i != 1 else "In most years, February has 28 days."
    return task(question, reply, f"month:{question.lower()}", answer)


def follow_up_capital(rng: random.Random) -> Task:
    """The capital of one country, and of another."""
    one, shown = _country(rng)
    two, other = _country(rng)
    asked = (
        "And of {c}?", "And {c}?", "What about {c}?", "How about {c}?", "and the capital of {c}?", "{c}?", "Now {c}.",
        "And for {c}?", "and what about {c}?", "And that of {c}?", "ok, and {c}?", "And in {c}?",
    )  # fmt: skip
    question, answer = phrase(rng, asked, c=other), CAPITALS[two]
    turns = (
        Turn(phrase(rng, _ASK_CAPITAL, c=shown), f"The capital of {_article(one)} is {CAPITALS[one]}.", CAPITALS[one]),
        Turn(question, f"The capital of {_article(two)} is {answer}.", answer),
    )
    return Task(turns, (f"capital2:{one},{question.lower()}",), (answer,))


def follow_up_word(rng: random.Random) -> Task:
    """A word is spelled or named; "it" is then reversed, spelled or counted."""
    asked: Sequence[str]
    if rng.random() < 0.3:
        country, shown = _country(rng)
        word = CAPITALS[country]
        first = Turn(phrase(rng, _ASK_CAPITAL, c=shown), f"The capital of {_article(country)} is {word}.", word)
    else:
        word = any_word(rng)
        first = Turn(phrase(rng, ("Spell {w}.", "How do you spell {w}?", "spell {w}"), w=word), "-".join(word))
    if not word.isalpha():
        return follow_up_word(rng)
    kind = rng.random()
    if kind < 0.4:
        asked = (
            "Now backwards.", "And backwards?", "Spell it backwards.", "Reverse it.", "What is it backwards?",
            "now reverse it",
        )  # fmt: skip
        second, answer = Turn(phrase(rng, asked), backwards(word.lower()), word.lower()[::-1]), word.lower()[::-1]
    elif kind < 0.7:
        asked = ("How many letters does it have?", "How many letters is that?", "How long is it?", "Count the letters.")
        second = Turn(phrase(rng, asked), f"{'-'.join(word.lower())}: {len(word)} letters.", str(len(word)))
        return Task((first, second), (f"spell:{word}", f"letters:{word.lower()}"), (str(len(word)),), "number")
    else:
        answer = "-".join(word)
        asked = ("Spell it.", "How do you spell that?", "Now spell it.", "Can you spell it?", "spell that")
        if first.reply == answer:
            asked = ("Again, please.", "Once more.", "Spell it again.", "Can you repeat that?")
        second = Turn(phrase(rng, asked), answer, answer)
    return Task((first, second), (f"spell:{word}", f"reverse:{word.lower()}"), (answer,))


def follow_up_steps(rng: random.Random) -> Task:
    """A product is answered at once; asked how, the model works it out."""
    a, b = two_digit_factors(rng)
    asked = (
        "How?", "Show me the steps.", "Step by step, please.", "Are you sure?", "Is that right?", "Can you check that?",
        "Why?",
    )  # fmt: skip
    turns = (
        Turn(phrase(rng, ("What is {a} * {b}?", "{a} * {b}", "{a} x {b}?"), a=a, b=b), f"{a} * {b} = {a * b}."),
        Turn(phrase(rng, asked), work_out(a, b)),
    )
    return Task(turns, steps_keys(a, b), (str(a * b),), "number")


_PERSONAL: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # kind: (how it is told, the reply, how it is asked, the answer)
    "name": (
        ("My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.", "Hi, my name is {v}.", "Hello, I'm {v}!",
         "{v} is my name."),
        ("Nice to meet you, {v}!", "Hello, {v}! How can I help you?"),
        ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Do you know my name?",
         "Tell me my name."),
        ("Your name is {v}.", "You are {v}."),
    ),
    "color": (
        ("My favorite color is {v}.", "I like the color {v} best.", "My favourite colour is {v}.",
         "I love {v}, it is my favorite color."),
        ("{v} is a nice color.", "I will remember that: {v}."),
        ("What is my favorite color?", "What's my favourite colour?", "Which color do I like best?",
         "Do you remember my favorite color?"),
        ("Your favorite color is {v}.",),
    ),
    "number": (
        ("My favorite number is {v}.", "Remember the number {v}.", "My lucky number is {v}.", "Please remember {v}."),
        ("I will remember that: {v}.",),
        ("What is my number?", "Which number did I tell you?", "What was my number?",
         "What number did I ask you to remember?"),
        ("Your number is {v}.",),
    ),
    "city": (
        ("I live in {v}.", "I am from {v}.", "I come from {v}.", "My home is in {v}.", "My city is {v}."),
        ("{v}, that is good to know.",),
        ("Where do I live?", "Where am I from?", "Which city do I live in?", "Do you remember where I live?"),
        ("You live in {v}.",),
    ),
    "pet": (
        ("My pet is called {v}.", "I have a dog named {v}.", "My cat is called {v}.", "My dog's name is {v}."),
        ("{v} is a lovely name for a pet.",),
        ("What is my pet called?", "What is the name of my pet?", "Do you remember the name of my pet?",
         "What is my pet's name?"),
        ("Your pet is called {v}.",),
    ),
    "word": (
        ("Remember the word {v}.", "The secret word is {v}.", "My secret word is {v}.", "The password is {v}."),
        ("I will remember it.", "All right, I will remember the word {v}."),
        ("What is the secret word?", "What was the word?", "Which word did I tell you?",
         "What word did I ask you to remember?"),
        ("The word is {v}.",),
    ),
}  # fmt: skip


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
    told, replies, _, _ = _PERSONAL[kind]
    memory[kind] = value
    reply = pick(rng, replies, v=value)
    return task(phrase(rng, told, v=value), reply[:1].upper() + reply[1:], f"recall:{value}", value, short="")


def ask(rng: random.Random, memory: dict[str, str]) -> Task:
    """The user asks for what was told; without it the model says that it was not."""
    known = [kind for kind in _PERSONAL if kind in memory]
    kind = rng.choice(known) if known and rng.random() < 0.85 else rng.choice(tuple(_PERSONAL))
    question = phrase(rng, _PERSONAL[kind][2])
    if kind not in memory:
        subject = {"name": "your name", "city": "where you live", "pet": "about a pet", "word": "a word"}
        reply = f"You have not told me {subject.get(kind, f'your favorite {kind}')} yet."
        return task(question, reply, f"norecall:{question.lower()}", (reply,), "exact", short="")
    value = memory[kind]
    return task(question, pick(rng, _PERSONAL[kind][3], v=value), f"recall:{value}", value)


def recall(rng: random.Random) -> Task:
    """Something is told, other questions come between, then it is asked for."""
    memory: dict[str, str] = {}
    told = tell(rng, memory)
    between = [PLAIN_SKILLS[rng.choice(tuple(PLAIN_SKILLS))][1](rng) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
    (kind,) = memory
    question = phrase(rng, _PERSONAL[kind][2])
    value = memory[kind]
    turns = (
        *told.turns,
        *(t for b in between for t in b.turns),
        Turn(question, pick(rng, _PERSONAL[kind][3], v=value), value),
    )
    keys = (*(k for b in between for k in b.keys), f"recall:{value}")
    return Task(turns, keys, (value,))


SKILLS: dict[str, tuple[float, Callable[[random.Random], Task]]] = {
    "capital": (7, capital),
    "country_of_capital": (4, country_of_capital),
    "unknown_capital": (0.7, unknown_capital),
    "weekday": (4, weekday),
    "month": (4, month),
    "follow_up_capital": (2, follow_up_capital),
    "follow_up_word": (4, follow_up_word),
    "follow_up_steps": (0.5, follow_up_steps),
    "recall": (4, recall),
}
