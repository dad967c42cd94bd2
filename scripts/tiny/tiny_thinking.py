"""Skills with thinking: the work is done between <think> and </think>, and the answer after it is short."""

import random
from dataclasses import replace

from tiny_facts import SKILLS as FACT_SKILLS
from tiny_numbers import SKILLS as NUMBER_SKILLS
from tiny_skills import fact_key, question_of, sort_numbers, sort_words, steps_keys, two_digit_factors, work_out
from tiny_talk import SKILLS as TALK_SKILLS
from tiny_task import Skills, Task, Turn, any_word, phrase, skills
from tiny_words import read

_TEXTS = read("thinking")
_THOUGHTS = dict(line.split(": ", 1) for line in _TEXTS["thoughts"])
_OTHERS: Skills = {**NUMBER_SKILLS, **FACT_SKILLS, **TALK_SKILLS}


def _thoughtful(task: Task, thought: str, reply: str | None = None) -> Task:
    """Return the task with a thought before its last reply, which may become another one."""
    *earlier, last = task.turns
    last = last._replace(thought=thought, reply=last.reply if reply is None else reply)
    return replace(task, turns=(*earlier, last))


def think_sum(rng: random.Random) -> Task:
    a, b = (rng.randrange(10 ** rng.randint(1, 5)) for _ in range(2))
    columns, carry, x, y = list[str](), 0, a, b
    while x or y or not columns:
        total = x % 10 + y % 10 + carry
        columns.append(f"{x % 10} + {y % 10}{' + 1' if carry else ''} = {total}")
        carry, x, y = total // 10, x // 10, y // 10
    turn = Turn(question_of(rng, "+", a, b), f"{a} + {b} = {a + b}.", thought=f"From the right: {', '.join(columns)}.")
    return Task((turn,), (fact_key("+", a, b),), (str(a + b),), "number")


def think_product(rng: random.Random) -> Task:
    if rng.random() < 0.5:
        a, b = two_digit_factors(rng)
        keys = steps_keys(a, b)
    else:
        a, b = rng.randint(100, 999), two_digit_factors(rng)[0]
        keys = (f"mul3:{a}*{b}",)
    shown, thought = (a, b) if rng.random() < 0.6 else (b, a), work_out(a, b).removeprefix("Step by step: ")
    turn = Turn(question_of(rng, "*", *shown), f"{a} * {b} = {a * b}.", thought=thought)
    return Task((turn,), keys, (str(a * b),), "number")


def think_sort(rng: random.Random) -> Task:
    task = rng.choice((sort_numbers, sort_words))(rng)
    ordered = task.accept[0].split(", ")
    return _thoughtful(task, f"First {', then '.join(ordered)}.", f"{task.accept[0]}")


def think_letters(rng: random.Random) -> Task:
    word = any_word(rng)
    letter, count, parts = rng.choice(word), 0, list[str]()
    for each in word:
        count += each == letter
        parts.append(f"{each} ({count})" if each == letter else each)
    reply = f"The letter {letter} appears {count} time{'' if count == 1 else 's'} in {word}."
    turn = Turn(phrase(rng, _TEXTS["count letter"], l=letter, w=word), reply, thought=f"{', '.join(parts)}.")
    accept = (reply, str(count))
    return Task((turn,), (f"letter:{letter}:{word}",), accept, "exact")


def think_other(rng: random.Random) -> Task:
    weights = [weight for weight, _ in _OTHERS.values()]
    ((name, (_, make)),) = rng.choices(tuple(_OTHERS.items()), weights)
    return _thoughtful(make(rng), _THOUGHTS.get(name, _THOUGHTS["default"]))


SKILLS = skills("thinking", globals())
