"""Skills on numbers beyond plain sums: counting, decimals, powers, conversions, and follow-ups on a result."""

import random
from collections.abc import Sequence
from decimal import Decimal

from tiny_skills import ASK_VALUE, VALUE_REPLIES, evaluate, fact_key
from tiny_skills import SKILLS as PLAIN_SKILLS
from tiny_task import Task, Turn, phrase, pick, skills, task
from tiny_words import NAMES, THINGS, filled, number_in_words, pairs, read

_TEXTS = read("numbers")


def shown(value: Decimal) -> str:
    """Return a number without trailing zeros, such as 6 or 2.5."""
    return format(value.normalize(), "f") if value else "0"


def _value(rng: random.Random, asked: str, e: str, value: Decimal | int, keys: Sequence[str]) -> Task:
    """Return the task that asks for an expression, typed as `asked`; `e` is how the reply writes it."""
    c = shown(Decimal(value))
    question = phrase(rng, ASK_VALUE, e=asked)
    return Task((Turn(question, pick(rng, VALUE_REPLIES, e=e, c=c), c),), tuple(keys), (c,), "number")


def _tight(rng: random.Random, expression: str) -> str:
    """Return the expression as people type it: with spaces, or without."""
    return expression if rng.random() < 0.7 else expression.replace(" ", "")


_STEP_NAMES = {2: "twos", 3: "threes", 4: "fours", 5: "fives", 6: "sixes", 10: "tens"}


def _count_wording(rng: random.Random, first: int, last: int, step: int) -> tuple[str, ...]:
    """Return templates that ask for first, first + step, ... last."""
    if step == 1 and first == 1 and rng.random() < 0.6:
        return _TEXTS["count to"]
    if step == -1 and last == 1 and rng.random() < 0.6:
        return _TEXTS["count down to one"]
    size = abs(step)
    steps = ("",) if size == 1 else (f" by {size}s", f" in steps of {size}", f" by {size}")
    if size in _STEP_NAMES:
        steps += (f" by {_STEP_NAMES[size]}", f" in {_STEP_NAMES[size]}")
    by = rng.choice(steps)
    if step == first > 1 and rng.random() < 0.6:
        return filled(_TEXTS["count in steps"], by=by)
    if step == 2 and rng.random() < 0.6:
        return filled(_TEXTS["odd or even numbers"], k="odd" if first % 2 else "even")
    return tuple(template + by for template in _TEXTS["count up" if step > 0 else "count down"])


def count_range(rng: random.Random) -> Task:
    longest = rng.choice((6, 12, 12, 12, 30, 30, 50, 100))
    step = rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4, 5, 5, 6, 10))
    first = rng.choice((1, 1, 1, step, step, rng.randrange(100), rng.randrange(20)))
    last = first + step * rng.randint(2, longest)
    while last > 200 or (step == 1 and last > 100 and rng.random() < 0.8):
        first = rng.choice((1, step, rng.randrange(60)))
        last = first + step * rng.randint(2, longest)
    if rng.random() < 0.25:
        first, last, step = last, first, -step
    wording = [template + rng.choice((".", ".", "", "?")) for template in _count_wording(rng, first, last, step)]
    answer = ", ".join(map(str, range(first, last + (1 if step > 0 else -1), step)))
    return task(phrase(rng, wording, a=first, b=last), f"{answer}.", f"count:{first},{last},{step}", answer)


def number_list(rng: random.Random) -> Task:
    shape = rng.random()
    if shape < 0.4:
        start, step = rng.randint(0, 50), rng.choice((1, 2, 2, 3, 4, 5, 5, 10, 10, -1, -2))
        row = [start + 20 * (step < 0) + step * i for i in range(rng.randint(3, 5) + 1)]
        text, value = ", ".join(map(str, row[:-1])), row[-1]
        question = phrase(rng, _TEXTS["next number"], l=text)
        reply = pick(rng, ("{c}", "The next number is {c}."), c=value)
        return task(question, reply, f"row:{text}", str(value), "number")
    if shape < 0.75:
        n, after = rng.choice((rng.randrange(1, 120), rng.randrange(1, 2000))), rng.random() < 0.7
        where = "after" if after else "before"
        value = n + 1 if after else n - 1
        question = phrase(rng, _TEXTS["beside"], w=where, n=n)
        reply = pick(rng, ("{c} comes {w} {n}.", "{c}"), c=value, w=where, n=n)
        return task(question, reply, f"beside:{where}:{n}", (str(value), f"{value} comes {where} {n}"))
    n, k = rng.randint(3, 12), rng.randint(2, 9)
    rows = {
        "primes": [p for p in range(2, 40) if all(p % d for d in range(2, p))][:n],
        "multiples": [k * i for i in range(1, n + 1)],
        "fibonacci": [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89][:n],
        "table": [k * i for i in range(1, 11)],
    }
    kind = rng.choice(tuple(rows))
    answer = ", ".join(map(str, rows[kind]))
    question = phrase(rng, _TEXTS[kind], n=n if rng.random() < 0.7 else number_in_words(n), k=k)
    return task(question, f"{answer}.", f"list:{question.lower()}", answer)


def decimals(rng: random.Random) -> Task:
    op, places = rng.choice("++--*"), rng.choice((1, 1, 1, 2))
    a = Decimal(rng.randrange(1, rng.choice((20, 100, 1000)))).scaleb(-places)
    b = Decimal(rng.randrange(1, rng.choice((20, 100, 1000)))).scaleb(-rng.choice((places, places, 0)))
    if op == "*":
        a, b = Decimal(rng.randrange(1, 100)).scaleb(-1), Decimal(rng.randint(2, 9))
        if rng.random() < 0.5:
            a, b = b, a
    elif op == "-" and a < b and rng.random() < 0.8:
        a, b = b, a
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    left, right = shown(a), shown(b)
    typed = _tight(rng, f"{left} {op} {right}")
    if rng.random() < 0.25:
        typed = f"{left} {rng.choice({'+': ('plus',), '-': ('minus',), '*': ('times', 'x')}[op])} {right}"
    return _value(rng, typed, f"{left} {op} {right}", value, (f"decimal:{left}{op}{right}",))


def divide_any(rng: random.Random) -> Task:
    kind = rng.random()
    if kind < 0.5:
        b = rng.choice((10, 11, 12, 12, 13, 14, 15, 16, 18, 20, 24, 25, 30, 40, 50, 60, 100))
        a = b * rng.randint(1, 20)
    elif kind < 0.85:
        b = rng.choice((2, 2, 4, 5, 8, 10, 10, 100))
        a = rng.randint(1, 20 * b if b < 10 else 200)
    else:
        b = rng.choice((3, 3, 6, 7, 9))
        a = rng.randint(1, 100)
    e, typed = f"{a} / {b}", f"{a}{rng.choice((' / ', ' / ', '/', ' divided by ', ' : ', ' ÷ ', ' over '))}{b}"
    value = Decimal(a) / b
    if value == round(value, 3):
        return _value(rng, typed, e, value, (f"div:{a}/{b}",))
    c = shown(round(value, 2))
    return task(phrase(rng, ASK_VALUE, e=typed), f"{e} is about {c}.", f"div:{a}/{b}", c, "number")


def expression(rng: random.Random) -> Task:
    shape = rng.choice(("sums", "sums", "product last", "product first", "brackets"))
    sign, other = rng.choices("+-", k=2)
    a, b, c = (rng.randint(1, rng.choice((10, 20, 50, 100)) if shape == "sums" else 9) for _ in range(3))
    if shape == "product last":
        a = rng.randint(1, 30)
        typed, steps = f"{a} {sign} {b} * {c}", (("*", b, c), (sign, a, b * c))
    elif shape == "product first":
        typed, steps = f"{a} * {b} {sign} {c}", (("*", a, b), (sign, a * b, c))
    elif shape == "brackets":
        typed, steps = f"({a} {sign} {b}) * {c}", ((sign, a, b), ("*", evaluate(sign, a, b), c))
    else:
        typed, steps = f"{a} {sign} {b} {other} {c}", ((sign, a, b), (other, evaluate(sign, a, b), c))
    written = ", ".join(f"{x} {op} {y} = {evaluate(op, x, y)}" for op, x, y in steps)
    value = str(evaluate(*steps[1]))
    words = typed.replace(" + ", " plus ").replace(" - ", " minus ").replace(" * ", " times ")
    question = phrase(rng, ASK_VALUE, e=words if rng.random() < 0.12 else _tight(rng, typed))
    keys = (*(fact_key(*step) for step in steps), f"three:{typed}")
    return Task((Turn(question, f"{typed}: {written}.", value),), keys, (value,), "number")


def percent(rng: random.Random) -> Task:
    p = rng.choice((1, 5, 10, 10, 15, 20, 20, 25, 25, 30, 40, 50, 50, 60, 70, 75, 80, 90, 100))
    n = rng.choice((rng.randint(1, 20) * 10, rng.randint(1, 10) * 4, rng.randint(1, 10) * 100, rng.randint(1, 99)))
    value = Decimal(p * n) / 100
    sign = rng.choice(("%", "%", " %", " percent", " per cent"))
    c = shown(value)
    asked = (*ASK_VALUE, "{e}?", "How many is {e}?", "What number is {e}?")
    reply = pick(rng, ("{p}% of {n} is {c}.", "{c}", "{p}% of {n} = {c}."), p=p, n=n, c=c)
    return task(phrase(rng, asked, e=f"{p}{sign} of {n}"), reply, f"percent:{p},{n}", c, "number")


def power(rng: random.Random) -> Task:
    kind = rng.choice(("square", "root", "power", "power", "cube"))
    n, e = rng.choice((*range(1, 13), *range(1, 11), 15, 20, 25, 30)), 2
    keys = [fact_key("*", n, n)] if n > 10 and kind in ("square", "root") else []
    if kind == "cube":
        n, e = rng.randint(1, 10), 3
    elif kind == "power":
        n, e = rng.choice([(2, i) for i in range(13)] + [(10, i) for i in range(7)] + [(3, i) for i in range(6)])
    value = n if kind == "root" else n**e
    question = phrase(rng, filled(_TEXTS[kind], e=e), n=n, m=n * n)
    reply = pick(rng, (*_TEXTS[f"{kind} reply"], "{c}"), n=n, m=n * n, e=e, c=value)
    keys.append(f"power:{question.lower()}")
    return Task((Turn(question, reply, str(value)),), tuple(keys), (str(value),), "number")


def prime(rng: random.Random) -> Task:
    n = rng.randint(2, 120)
    factor = next((d for d in range(2, n) if n % d == 0), 0)
    question = phrase(rng, _TEXTS["prime"], n=n)
    reply = f"No, {n} is not prime: {n} = {factor} * {n // factor}." if factor else f"Yes, {n} is prime."
    return task(question, reply, f"prime:{question.lower()}", (reply,), "exact", short="No." if factor else "Yes.")


def parity(rng: random.Random) -> Task:
    n, kind = rng.randrange(10 ** rng.randint(1, 4)), rng.choice(("even", "odd"))
    truth = "odd" if n % 2 else "even"
    if rng.random() < 0.3:
        asked, reply = "even or odd", pick(rng, ("{n} is {t}.", "It is {t}."), n=n, t=truth)
    else:
        asked, reply = "parity", f"{'Yes' if kind == truth else 'No'}, {n} is {truth}."
    return task(phrase(rng, _TEXTS[asked], n=n, k=kind), reply, f"parity:{n}", truth)


def bigger(rng: random.Random) -> Task:
    if rng.random() < 0.5:
        whole = rng.randrange(20)
        a, b = (f"{whole}.{rng.randrange(1, 10 ** rng.randint(1, 2)):d}" for _ in range(2))
        if rng.random() < 0.2:
            b = f"{whole + rng.choice((-1, 1)) if whole else 1}.{rng.randrange(1, 100)}"
    else:
        a, b = (str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(2))
    if Decimal(a) == Decimal(b):
        b = str(Decimal(b) + 1)
    up = rng.random() < 0.7
    word = rng.choice(("bigger", "larger", "greater", "more") if up else ("smaller", "less"))
    right = (Decimal(a) > Decimal(b)) == up
    winner, other = (a, b) if right else (b, a)
    if rng.random() < 0.5:
        asked = filled(_TEXTS["is bigger"], sign=">" if up else "<")
        reply = f"{'Yes' if right else 'No'}, {winner} is {word} than {other}."
    else:
        asked = _TEXTS["which is bigger"]
        reply = f"{winner} is {word} than {other}."
    return task(phrase(rng, asked, a=a, b=b, w=word), reply, f"bigger:{a},{b}", reply)


# Names of a unit and of a smaller one, and how many of the smaller one it has.
_UNITS = tuple((large, small.split("; "), factor) for large, (small, factor) in pairs(_TEXTS["units"]))
_SINGULAR = {"feet": "foot", "inches": "inch", "centuries": "century", "dozen": "dozen"}


def _singular(unit: str) -> str:
    return _SINGULAR.get(unit) or (unit[:-1] if unit.endswith("s") else unit)


def convert(rng: random.Random) -> Task:
    if rng.random() < 0.12:
        celsius = rng.randrange(-20, 105, 5)
        value = celsius * 9 // 5 + 32
        reply = f"{celsius} degrees Celsius is {value} degrees Fahrenheit."
        question = phrase(rng, _TEXTS["celsius"], n=celsius)
        return Task((Turn(question, reply, str(value)),), (f"convert:C:{celsius}",), (reply[:-1],))
    large, small, factor = rng.choice(_UNITS)
    n = rng.choice((1, 1, 2, 3, *range(2, 13), 15, 20, 24, 30, 50, 60, 100))
    x, y, value = rng.choice(large), rng.choice(small), Decimal(n) * Decimal(factor)
    count = rng.choice((str(n), str(n), number_in_words(n)))
    if n == 1:
        unit = _singular(x)
        count, x = ("an" if unit[0] in "aeio" or unit == "hour" else "a") if rng.random() < 0.6 else count, unit
    if rng.random() < 0.3 and value == int(value) and large[0] != "dozen":  # the other way round
        x, y, n, value, count = y, rng.choice(large), int(value), Decimal(n), str(int(value))
    about = "about " if "miles" in (*large, x, y) else ""
    question = phrase(rng, _TEXTS["convert"], n=count, x=x, y=y)
    one = _singular(y) if value == 1 else y
    reply = f"{n} {x} is {about}{shown(value)} {one}."
    return Task((Turn(question, reply, shown(value)),), (f"convert:{n}:{x}:{y}",), (reply[:-1],))


def leap_year(rng: random.Random) -> Task:
    year = rng.choice((rng.randint(1980, 2060), rng.choice(range(1600, 2500, 100)), rng.randint(1500, 2500)))
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    reply = f"Yes, {year} is a leap year." if leap else f"No, {year} is not a leap year."
    question, short = phrase(rng, _TEXTS["leap year"], y=year), reply.split(",")[0]
    return task(question, reply, f"leap:{year}", (reply,), "exact", short)


def story_sum(rng: random.Random) -> Task:
    b = rng.randint(1, 20)
    gain = rng.random() < 0.45
    a = rng.randint(1 if gain else b, 40 if gain else b + 40)
    thing, other = rng.choice(THINGS), rng.choice(NAMES)
    event = rng.choice(_TEXTS["gain" if gain else "loss"])
    c, op = (a + b, "+") if gain else (a - b, "-")
    ask = rng.choice(_TEXTS["how many" if gain else "how many left"])
    reply, keys = f"{a} {op} {b} = {c}.", (fact_key(op, a, b), f"story:{a}{op}{b}")
    if rng.random() < 0.5:
        who = "" if event.startswith("{o}") else "I "
        joint = filled(_TEXTS["story"], t=thing, event=event, who=who, ask=ask)
        question = phrase(rng, (rng.choice(joint),), a=a, b=b, o=other)
        return Task((Turn(question, reply, str(c)),), keys, (str(c),), "number")
    event = event if event.startswith("{o}") else f"I {rng.choice(('', '', 'now ', 'then '))}{event}"
    told = Turn(phrase(rng, filled(_TEXTS["story start"], t=thing), a=a), f"You have {a} {thing}.")
    asked = phrase(rng, filled(_TEXTS["story end"], event=event, ask=ask[:-1]), b=b, o=other)
    return Task((told, Turn(asked, reply, str(c))), keys, (str(c),), "number")


def _again(rng: random.Random, value: int) -> tuple[Turn, int, list[str]]:
    """Return a turn that does something with the value, the new value, and the keys of the step."""
    kinds = ["+", "-", "double", "double", "parity"]
    if value % 2 == 0:
        kinds.append("half")
    if value < 100:
        kinds.append("*")
    kind = rng.choice(kinds)
    c = rng.randint(2, 9) if kind == "*" else rng.randint(1, 60)
    question = phrase(rng, _TEXTS[f"again {kind}"], c=c)
    if kind == "parity":
        truth = "odd" if value % 2 else "even"
        asked = {word for word in ("odd", "even") if word in question.lower()}
        yes = "" if len(asked) != 1 else "Yes, " if truth in asked else "No, "
        return Turn(question, f"{yes}{value} is {truth}.", truth), value, [f"parity:{value}"]
    op, c = {"double": ("*", 2), "half": ("/", 2)}.get(kind, (kind, c))
    result = evaluate(op, value, c)
    return Turn(question, f"{value} {op} {c} = {result}.", str(result)), result, [fact_key(op, value, c)]


def lone_number(rng: random.Random) -> Task:
    n = rng.randrange(10 ** rng.randint(1, 4))
    reply = f"{n}? I can double it, halve it, add to it, or tell if it is even."
    return task(str(n), reply, f"lone:{n}", str(n), "number", short="")


def follow_up_sum(rng: random.Random) -> Task:
    names = ("add_2digit", "add_2digit", "subtract", "multiply_1digit", "double_or_half", "divide")
    plain = [PLAIN_SKILLS[name][1] for name in names]
    begun = rng.choice([*plain, story_sum, expression, lone_number])(rng)
    value, turns, keys = int(begun.accept[0]), list(begun.turns), list(begun.keys)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        turn, value, added = _again(rng, value)
        turns.append(turn)
        keys += added
    last = turns[-1].short
    return Task(tuple(turns), tuple(keys), (last,), "ends" if last in ("odd", "even") else "number")


SKILLS = skills("numbers", globals())
