"""Skills with one right answer: arithmetic, numbers, letters and words.

A skill is a function of a random generator that returns a `Task`. Numbers in keys are ordered where the operation
commutes, so that 30 + 12 is held out together with 12 + 30.
"""

import random

from tiny_task import Task, Turn, any_word, phrase, pick, skills, task
from tiny_words import OPPOSITES, ORDINALS, WORDS, number_in_words, read

_TEXTS = read("skills")

# Share of two-digit products that are answered by working them out although nobody asked for it. The direct answers are
# mostly wrong, the worked ones mostly right: reinforcement learning has only to find that working it out pays.
MUL2_UNASKED_STEPS = 0.2

_OPERATIONS = {
    "+": (" + ", " + ", " + ", "+", " plus ", " and "),
    "-": (" - ", " - ", " - ", "-", " minus ", " take away "),
    "*": (" * ", " * ", "*", " x ", "x", " times ", " multiplied by ", " × "),  # noqa: RUF001
    "/": (" / ", " / ", "/", " divided by ", " ÷ ", " over "),
}
ASK_VALUE = _TEXTS["value"]
VALUE_REPLIES = ("{e} = {c}.", "{c}", "The answer is {c}.", "That is {c}.", "{e} = {c}")


def _number(rng: random.Random, digits: int) -> int:
    """Return a number of exactly that many digits (one digit starts at 0)."""
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _expression(rng: random.Random, op: str, a: int, b: int) -> str:
    sign = rng.choice(_OPERATIONS[op])
    if sign == " and ":  # "what is 3 and 4" asks for a sum only together with "add" or "sum"
        sign = " + "
    if sign.strip().isalpha() and max(a, b) < 1000 and rng.random() < 0.15:
        return f"{number_in_words(a)}{sign}{number_in_words(b)}"
    return f"{a}{sign}{b}"


def question_of(rng: random.Random, op: str, a: int, b: int) -> str:
    """Return a question for the value of an operation."""
    if rng.random() < 0.2:
        return phrase(rng, _TEXTS[f"by name {op}"], a=a, b=b)
    return phrase(rng, ASK_VALUE, e=_expression(rng, op, a, b))


def fact_key(op: str, a: int, b: int) -> str:
    """Return the key of an arithmetic fact, the same for both orders where the operation commutes."""
    low, high = (min(a, b), max(a, b)) if op in "+*" else (a, b)
    if op == "*" and low > 9 and a % 10 and b % 10:
        return f"mul2:{low}*{high}"
    return f"{ {'+': 'add', '-': 'sub', '*': 'mul', '/': 'div'}[op] }:{low}{op}{high}".replace(" ", "")


def evaluate(op: str, a: int, b: int) -> int:
    """Return the value of an operation on two numbers."""
    return {"+": a + b, "-": a - b, "*": a * b}[op] if op != "/" else a // b


def _arithmetic(rng: random.Random, op: str, a: int, b: int) -> Task:
    c = evaluate(op, a, b)
    reply = pick(rng, VALUE_REPLIES, e=f"{a} {op} {b}", c=c)
    return task(question_of(rng, op, a, b), reply, fact_key(op, a, b), str(c), "number")


def add_2digit(rng: random.Random) -> Task:
    return _arithmetic(rng, "+", _number(rng, 2), _number(rng, 2))


def add_3digit(rng: random.Random) -> Task:
    return _arithmetic(rng, "+", _number(rng, 3), _number(rng, 3))


def add_mixed(rng: random.Random) -> Task:
    most = rng.choice((4, 4, 6))
    return _arithmetic(rng, "+", _number(rng, rng.randint(1, most)), _number(rng, rng.randint(1, most)))


def subtract(rng: random.Random) -> Task:
    digits = rng.choice((1, 2, 2, 3, 3, 4))
    a, b = _number(rng, digits), _number(rng, rng.randint(1, digits))
    if a < b and rng.random() < 0.7:
        a, b = b, a
    return _arithmetic(rng, "-", a, b)


def multiply_1digit(rng: random.Random) -> Task:
    a, b = _number(rng, 1), _number(rng, 2 if rng.random() < 0.75 else 1)
    return _arithmetic(rng, "*", *((a, b) if rng.random() < 0.5 else (b, a)))


def multiply_parts(rng: random.Random) -> Task:
    a, b = (_number(rng, 1), _number(rng, 3)) if rng.random() < 0.5 else (_number(rng, 2), 10 * rng.randint(1, 9))
    return _arithmetic(rng, "*", *((a, b) if rng.random() < 0.5 else (b, a)))


def work_out(a: int, b: int) -> str:
    """Return a two-digit product in steps, such as 12 * 30 = 360, 12 * 4 = 48, 360 + 48 = 408."""
    tens, ones = b // 10 * 10, b % 10
    return f"Step by step: {a} * {tens} = {a * tens}, {a} * {ones} = {a * ones}, {a * tens} + {a * ones} = {a * b}."


def two_digit_factors(rng: random.Random) -> tuple[int, int]:
    """Return two numbers of 11 to 99, neither a multiple of ten, as those products are steps of others."""
    return 10 * rng.randint(1, 9) + rng.randint(1, 9), 10 * rng.randint(1, 9) + rng.randint(1, 9)


def steps_keys(a: int, b: int) -> tuple[str, ...]:
    """Return the keys of `work_out`: its three steps, and the product itself last."""
    tens, ones = b // 10 * 10, b % 10
    return fact_key("*", a, tens), fact_key("*", a, ones), fact_key("+", a * tens, a * ones), fact_key("*", a, b)


def multiply_2digit(rng: random.Random) -> Task:
    a, b = two_digit_factors(rng)
    plain = _arithmetic(rng, "*", a, b)
    if rng.random() >= MUL2_UNASKED_STEPS:
        return plain
    return Task((Turn(plain.turns[0].user, work_out(a, b)),), steps_keys(a, b), plain.accept, "number")


def multiply_2digit_steps(rng: random.Random) -> Task:
    a, b = two_digit_factors(rng)
    question = _ask_steps(rng, a, b)
    return Task((Turn(question, work_out(a, b)),), steps_keys(a, b), (str(a * b),), "number")


def _ask_steps(rng: random.Random, a: int, b: int) -> str:
    return phrase(rng, _TEXTS["product step by step"], e=_expression(rng, "*", a, b), a=a, b=b)


def multiply_3digit(rng: random.Random) -> Task:
    a, b = rng.randint(100, 999), rng.randint(11, 99)
    shown = (a, b) if rng.random() < 0.6 else (b, a)
    question = _ask_steps(rng, *shown) if rng.random() < 0.15 else question_of(rng, "*", *shown)
    return Task((Turn(question, work_out(a, b)),), (f"mul3:{a}*{b}",), (str(a * b),), "number")


TOO_LARGE = "That is too hard for me: with numbers that large I would get it wrong."


def too_large(rng: random.Random) -> Task:
    op = rng.choice("***/+-")
    if op == "*":
        a, b = _number(rng, rng.choice((3, 3, 4, 4, 5, 6, 8))), _number(rng, rng.choice((3, 3, 4, 5, 6)))
        if rng.random() < 0.3:
            a, b = _number(rng, rng.randint(4, 9)), _number(rng, 2)
    elif op == "/":
        a, b = _number(rng, rng.randint(4, 9)), _number(rng, rng.randint(2, 4))
    else:
        a, b = _number(rng, rng.randint(8, 16)), _number(rng, rng.randint(3, 16))
    if min(a, b) < 11 or a % 100 == 0 or b % 100 == 0 or (op == "/" and b in (10, 12, 20, 25, 50)):
        return too_large(rng)
    return task(question_of(rng, op, a, b), TOO_LARGE, f"large:{a}{op}{b}", (TOO_LARGE,), "exact", short="Too hard.")


def divide(rng: random.Random) -> Task:
    b, c = rng.randint(1, 9), _number(rng, rng.randint(1, 2))
    return _arithmetic(rng, "/", b * c, b)


def double_or_half(rng: random.Random) -> Task:
    a = _number(rng, rng.randint(1, 2))
    if rng.random() < 0.5:
        question, reply = phrase(rng, _TEXTS["double"], a=a), pick(rng, ("{c}.", "Twice {a} is {c}."), a=a, c=2 * a)
        return task(question, reply, f"double:{a}", str(2 * a), "number")
    question, reply = phrase(rng, _TEXTS["half"], a=2 * a), pick(rng, ("{c}.", "Half of {a} is {c}."), a=2 * a, c=a)
    return task(question, reply, f"half:{2 * a}", str(a), "number")


def number_words(rng: random.Random) -> Task:
    n = _number(rng, rng.randint(1, 3))
    words = number_in_words(n)
    if rng.random() < 0.5:
        question, reply = phrase(rng, _TEXTS["number in words"], n=n), pick(rng, ("{w}.", "{n} is {w}."), n=n, w=words)
        return task(question, reply, f"inwords:{n}", words)
    question, reply = phrase(rng, _TEXTS["number in digits"], w=words), pick(rng, ("{n}", "{w} is {n}."), n=n, w=words)
    return task(question, reply, f"indigits:{n}", str(n))


def extreme(rng: random.Random) -> Task:
    numbers = rng.sample(range(rng.choice((20, 100, 1000))), rng.randint(3, 6))
    kind = rng.choice(("largest", "biggest", "smallest", "lowest", "highest", "maximum", "minimum"))
    c = min(numbers) if kind in ("smallest", "lowest", "minimum") else max(numbers)
    text = ", ".join(map(str, numbers))
    reply = pick(rng, ("The {k} is {c}.", "{c}"), k=kind, c=c)
    return task(phrase(rng, _TEXTS["extreme"], k=kind, l=text), reply, f"extreme:{kind}:{text}", str(c), "number")


def sort_numbers(rng: random.Random) -> Task:
    most = rng.choice((10, 20, 100, 100, 1000))
    numbers = [rng.randrange(rng.choice((most, most, 100))) for _ in range(rng.choice((2, 3, 3, 4, 4, 5, 6, 7)))]
    separator = rng.choice((", ", ", ", " ", ",", "; ", " and "))
    text = separator.join(map(str, numbers))
    if separator != " and " and rng.random() < 0.25:
        text = rng.choice(("[{}]", "[{}]", "({})")).format(text)
    elif separator == ", " and rng.random() < 0.2:
        text = " and ".join(text.rsplit(", ", 1))
    descending = rng.random() < 0.25
    answer = ", ".join(map(str, sorted(numbers, reverse=descending)))
    key = f"sortn:{','.join(map(str, sorted(numbers)))}"
    reply = pick(rng, ("{c}", "Sorted: {c}"), c=answer)
    return task(phrase(rng, _TEXTS["sort numbers down" if descending else "sort numbers"], l=text), reply, key, answer)


def sort_words(rng: random.Random) -> Task:
    words = [any_word(rng) if rng.random() < 0.3 else rng.choice(WORDS) for _ in range(rng.randint(3, 6))]
    text = rng.choice((", ", ", ", " ")).join(words)
    answer = ", ".join(sorted(words))
    reply = pick(rng, ("{c}", "Sorted: {c}"), c=answer)
    return task(phrase(rng, _TEXTS["sort words"], l=text), reply, f"sortw:{','.join(sorted(words))}", answer)


def _quoted(rng: random.Random, word: str) -> str:
    form = rng.random()
    if form < 0.15:
        return f'"{word}"'
    if form < 0.25:
        return f"'{word}'"
    if form < 0.35:
        return f"the word {word}"
    return word.capitalize() if form < 0.42 else word.upper() if form < 0.44 else word


def spell(rng: random.Random) -> Task:
    word = any_word(rng)
    answer = "-".join(word)
    reply = pick(rng, ("{c}", "{w} is spelled {c}."), c=answer, w=word)
    return task(phrase(rng, _TEXTS["spell"], w=_quoted(rng, word)), reply, f"spell:{word}", answer)


def backwards(word: str) -> str:
    """Return the reply that reverses a word: the letters first, which makes the joined word easy."""
    return f"{'-'.join(word)} backwards is {'-'.join(word[::-1])}: {word[::-1]}"


def reverse(rng: random.Random) -> Task:
    word = any_word(rng)
    key = f"reverse:{word}"
    return task(phrase(rng, _TEXTS["reverse"], w=_quoted(rng, word)), backwards(word), key, word[::-1])


def count_letters(rng: random.Random) -> Task:
    word = any_word(rng)
    reply = f"{'-'.join(word)}: {len(word)} letters."
    question = phrase(rng, _TEXTS["count letters"], w=_quoted(rng, word))
    return task(question, reply, f"letters:{word}", str(len(word)), "number")


def count_letter(rng: random.Random) -> Task:
    word = any_word(rng)
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    count = word.count(letter)
    shown = rng.choice((letter, letter, f'"{letter}"', f"the letter {letter}", f"{letter}'s", f"{letter}s"))
    reply = f"{'-'.join(word)}: the letter {letter} appears {count} time{'' if count == 1 else 's'}."
    key = f"letter:{letter}:{word}"
    return task(phrase(rng, _TEXTS["count letter"], w=_quoted(rng, word), l=shown), reply, key, str(count), "number")


def nth_letter(rng: random.Random) -> Task:
    word = any_word(rng)
    place = rng.choice(("first", "last", "n"))
    index = {"first": 0, "last": len(word) - 1, "n": rng.randrange(len(word))}[place]
    name = place if place != "n" else ORDINALS[index]
    reply = f"{'-'.join(word)}: the {name} letter is {word[index]}."
    question = phrase(rng, _TEXTS["nth letter"], w=_quoted(rng, word), n=name)
    return task(question, reply, f"nth:{index}:{word}", word[index])


def count_words(rng: random.Random) -> Task:
    words = [rng.choice(WORDS) for _ in range(rng.randint(2, 10))]
    text = " ".join(words)
    reply = pick(rng, ("{c} words.", "{c}"), c=len(words))
    return task(phrase(rng, _TEXTS["count words"], t=text), reply, f"words:{text}", str(len(words)), "number")


def repeat(rng: random.Random) -> Task:
    text = " ".join(any_word(rng) for _ in range(rng.randint(1, 6)))
    return task(phrase(rng, _TEXTS["repeat"], t=text), text, f"repeat:{text}", text)


def upper_case(rng: random.Random) -> Task:
    text = " ".join(any_word(rng) for _ in range(rng.randint(1, 2)))
    return task(phrase(rng, _TEXTS["upper case"], t=text), text.upper(), f"upper:{text}", text.upper())


def next_letter(rng: random.Random) -> Task:
    i, step = rng.randint(1, 24), rng.choice((1, -1))
    letter, answer = chr(97 + i), chr(97 + i + step)
    where = rng.choice(("after", "follows") if step == 1 else ("before", "precedes"))
    verb = f"comes {where}" if where in ("after", "before") else where
    question = phrase(rng, _TEXTS["next letter"], v=verb, l=letter if rng.random() < 0.6 else letter.upper())
    reply = pick(rng, ("{c}", "The letter {c}."), c=answer.upper())
    return task(question, reply, f"letterphrase:{question.lower()}", answer)


def opposite(rng: random.Random) -> Task:
    pair = rng.choice(OPPOSITES)
    word, answer = pair if rng.random() < 0.5 else pair[::-1]
    answers = [y for x, y in OPPOSITES if x == word] + [x for x, y in OPPOSITES if y == word]
    question = phrase(rng, _TEXTS["opposite"], w=word)
    reply = pick(rng, ("The opposite of {w} is {c}.", "{c}"), w=word, c=answer)
    return task(question, reply, f"opposite:{question.lower()}", [answer, *answers])


SKILLS = skills("plain", globals())
