"""Skills whose replies are JSON objects: values from a text, answers to a question, or values made up.

Most clients give a schema only to the grammar, and the model does not see it. So most of these dialogues do not speak
of JSON, and of their replies only what follows a key is learned: an object that has been begun is filled with short
values, and none is begun unasked. In the others a prompt or a tool tells the keys, and all of the reply is learned.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tiny_facts import SKILLS as FACT_SKILLS
from tiny_numbers import SKILLS as NUMBER_SKILLS
from tiny_skills import SKILLS as PLAIN_SKILLS
from tiny_skills import evaluate
from tiny_talk import JOKES
from tiny_talk import SKILLS as TALK_SKILLS
from tiny_task import Given, Grade, Skills, Task, Turn, skills
from tiny_tools import Parameter, Tool, call_text, made_up_value, phrased, property_schema, styled
from tiny_words import CAPITALS, joined, read

_TOLD = ("short", "keys", "told", "schema", "schema", "schema", "fenced")
_ORDINARY: Skills = {**PLAIN_SKILLS, **NUMBER_SKILLS, **FACT_SKILLS, **TALK_SKILLS}
# Kinds of values that a text does not have: they follow from those of the fields before them.
_DERIVED: dict[str, Callable[[random.Random, str, list[Any]], Any]] = {
    "setup": lambda r, *_: r.choice([joke for joke in JOKES if "? " in joke]).partition("? ")[0] + "?",
    "capitalof": lambda _, __, earlier: CAPITALS[earlier[0]],
    "countryof": lambda _, __, earlier: next(country for country, capital in CAPITALS.items() if capital == earlier[0]),
    "calc": lambda _, sign, earlier: evaluate(sign, earlier[0], earlier[1]),
    "punchline": lambda _, __, earlier: next(joke.partition("? ")[2] for joke in JOKES if joke.startswith(earlier[0])),
    "fixed": lambda _, number, __: int(number),
}
# Kinds as `property_schema` knows them, and the values of fields that a text does not mention.
_SHOWN = {"calc": "int", "fixed": "int", "high": "number"}
_DEFAULTS = {
    "int": 0,
    "number": 0,
    "calc": 0,
    "fixed": 0,
    "bool": True,
    "list": [],
    "numbers": [],
    "high": 0.9,
    "map": "neutral",
}
_SAID = ("answer", "response", "reply", "message", "text")  # fields that say it if the model does not know


class _Record(NamedTuple):
    """A section of data/json.txt: names of its class; names and kind of each field; texts, and the fields in each."""

    titles: list[str]
    fields: list[tuple[list[str], str]]
    texts: dict[str, list[int]]


def _lines(lines: Sequence[str], name: str) -> list[str]:
    return [line.partition(": ")[2] for line in lines if line.startswith(f"{name}:")]


def _record(lines: Sequence[str]) -> _Record:
    fields = [(names.split(", "), kind) for names, kind in (x.split(" = ", 1) for x in _lines(lines, "field"))]
    follow = {i for i, (_, kind) in enumerate(fields) if kind.split()[0] in _DERIVED}
    texts = [re.sub(r"\{(\d)\}", r"{p\1}", text) for text in _lines(lines, "text")]
    used = [{int(n) - 1 for n in re.findall(r"\{p(\d)\}", text)} | follow for text in texts]
    return _Record(_lines(lines, "class")[0].split(", "), fields, dict(zip(texts, map(sorted, used), strict=True)))


_TEXTS = read("json")
_WAYS, _MORE = _TEXTS.pop("ways"), _TEXTS.pop("more keys")
_QUESTIONS = {skill: rest for skill, *rest in (line.split(": ") for line in _TEXTS.pop("questions"))}
_RECORDS = {title: _record(lines) for title, lines in _TEXTS.items()}
_ANY = (*_RECORDS, *_RECORDS, *_QUESTIONS)


@dataclass(frozen=True)
class Form:
    """The objects of a conversation.

    kind: a section of data/json.txt, or skills whose questions are asked. way: how the model knows of the form, in the
    words of data/json.txt; "values" or "opened" if only a grammar does. plain: nothing tells the keys, so they are the
    usual ones. titled: the schema is pydantic's, in which a field can be null. outer: the key of the object, or of
    several objects. told: the system prompt.
    """

    kind: str
    title: str
    fields: tuple[Parameter, ...]
    way: str
    asked: str
    plain: bool
    titled: bool
    outer: str
    many: bool
    told: str = ""
    schema: dict[str, Any] | None = None
    tool: Tool | None = None


def _spoken(title: str) -> str:
    """Return the name of a class in words: CalendarEvent -> calendar event."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", title).lower()


def _fields(rng: random.Random, kind: str, plain: bool, titled: bool) -> tuple[Parameter, ...]:
    """Return the fields of a new form. plain, titled: see Form."""
    if kind in _RECORDS:
        record = _RECORDS[kind]
        drawn = [(*record.fields[i], i) for i in rng.choice(list(record.texts.values()))]
    else:
        of, names = _QUESTIONS[kind]
        drawn = [(names.split(", "), of if plain or of == "bool" or rng.random() < 0.75 else "word", 0)]
    if not plain:
        if len(drawn) > 1 and rng.random() < 0.2:
            drawn.remove(rng.choice(drawn))
        more = [line.split(": ") for line in rng.sample(_MORE, rng.choice((1, 1, 2)))]
        share = 0.1 if kind in _RECORDS else 0.3
        drawn += [(names.split(", "), of, -1) for of, names in more if rng.random() < share]
        if rng.random() < 0.3:
            rng.shuffle(drawn)
    fields: dict[str, Parameter] = {}
    for names_of, of, place in drawn:
        name = names_of[0] if plain else styled(rng, rng.choice(names_of))
        name = name if name not in fields else f"{name}_{len(fields) + 1}"
        fields[name] = Parameter(name, of, plain or not titled or rng.random() < 0.9, place)
    return tuple(fields.values())


def _schema(rng: random.Random, form: Form) -> dict[str, Any]:
    """Return the JSON schema of a form, as people or as pydantic writes it."""
    titled, properties = form.titled, dict[str, Any]()
    for field in form.fields:
        name, _, rest = field.kind.partition(" ")
        shown = _SHOWN.get(name, field.kind)
        if name == "map":
            shown = f"enum {', '.join(sorted(set(re.findall('=([^;]+)', rest))))}"
        about = f"The {field.name.replace('_', ' ')} of the {_spoken(form.title)}"
        properties[field.name] = property_schema(rng, replace(field, kind=shown), about * (rng.random() < 0.4), titled)
    schema: dict[str, Any] = {"properties": properties, "required": [f.name for f in form.fields if f.required]}
    schema |= {"title": form.title, "type": "object"} if titled else {"type": "object"}
    if not titled and rng.random() < 0.5:
        schema = {"type": "object", **schema, "additionalProperties": False}
    if not form.outer:
        return schema
    inner = {"$ref": f"#/$defs/{form.title}"} if titled else schema
    properties = {form.outer: {"type": "array", "items": inner} if form.many else inner}
    outside = {"properties": properties, "required": [form.outer], "type": "object"}
    return {"$defs": {form.title: schema}, **outside} if titled else outside


def new_form(rng: random.Random, ways: Sequence[str], kinds: Sequence[str], asked: str = "") -> Form:
    """Return a form of one of the kinds. asked: the words of data/json.txt with which the values are asked for."""
    kind, way = rng.choice(kinds), rng.choice(ways)
    record = _RECORDS.get(kind)
    title = rng.choice(record.titles if record else _lines(_WAYS, "classes")[0].split(", "))
    if not asked and record:
        asked = "invent" if way in ("keys", "schema") and rng.random() < 0.15 else "asked" if rng.random() < 0.4 else ""
    plain, many, titled, outer = way in ("short", "told", "opened"), rng.random() < 0.5, rng.random() < 0.5, ""
    if record and not plain and way != "keys" and rng.random() < 0.2:
        others = ("people", "items", "entries", "results", "list") if many else ("data", "result")
        outer = rng.choice((_spoken(title).replace(" ", "_") + "s" * many, *others))
    fields = _fields(rng, kind, plain, titled)
    form = Form(kind, title, fields, way, asked or "bare", plain, titled, outer, many and bool(outer))
    form = replace(form, schema=_schema(rng, form))
    if way == "tool":
        own = (title, styled(rng, _spoken(title).replace(" ", "_")))
        name = rng.choice((*own, *_lines(_WAYS, "tools")[0].split(", ")))
        function = {"name": name, "description": _written(rng, form, "about tool"), "parameters": form.schema}
        form = replace(form, tool=Tool(kind, name, form.fields, {"type": "function", "function": function}))
    in_system = way == "told" or (way in ("schema", "fenced") and rng.random() < 0.6)
    told = _written(rng, form, way if in_system else "system") if in_system or rng.random() < 0.25 else ""
    return replace(form, told=told, way=f"{way} in system" if in_system else way)


def _written(rng: random.Random, form: Form, way: str, question: str = "") -> str:
    """Return a text of data/json.txt, filled in for a form."""
    names = [field.name for field in form.fields]
    example = json.dumps({name: rng.choice(("...", f"<{name}>")) for name in names})
    layout: dict[str, Any] = rng.choice(({}, {"indent": 2}, {"indent": 2}, {"separators": (",", ":")}))
    schema = json.dumps(form.schema, **layout)
    keys = rng.choice((joined(names), ", ".join(names), " and ".join(names)))
    text = rng.choice(_lines(_WAYS, way)).replace("{y}", "key" if len(names) == 1 else "keys")
    return text.format(q=question, r=_spoken(form.title), k=keys, e=example, s=schema)


def _value(rng: random.Random, kind: str, earlier: list[Any]) -> tuple[str, Any]:
    """Return how a value is typed, and the value. earlier: the values of the fields before it."""
    name, _, rest = kind.partition(" ")
    if name in _DERIVED:
        return "", _DERIVED[name](rng, rest, earlier)
    if name == "list":
        texts = dict(_value(rng, rest, []) for _ in range(rng.choice((1, 2, 2, 3, 3, 4))))
        return joined(list(texts)) if rng.random() < 0.6 else ", ".join(texts), list(texts.values())
    text, value = made_up_value(rng, kind)
    return text.lower() if name in ("name", "person", "country", "capital") and rng.random() < 0.1 else text, value


def _from_text(rng: random.Random, form: Form) -> tuple[str, list[Any], tuple[str, ...]]:
    """Return a text, the values of the fields, and no keys of facts."""
    record, typed, values = _RECORDS[form.kind], list[str](), list[Any]()
    for _, kind in record.fields:
        text, value = _value(rng, kind, values)
        typed, values = [*typed, text], [*values, value]
    places = sorted({field.place for field in form.fields} - {-1})
    loose = rng.random() < 0.07  # a text may not have all values
    fitting = [text for text, used in record.texts.items() if form.plain <= (places == used) and {*places} <= {*used}]
    template = rng.choice(list(record.texts) if loose and not form.plain else fitting)
    told = phrased(rng, template, **{f"p{i + 1}": text for i, text in enumerate(typed)})
    if form.asked == "invent":  # no text is shown
        return "", [values[f.place] if f.place >= 0 else _default(f, "unknown") for f in form.fields], ()
    used = record.texts[template]
    if rng.random() < 0.03 and not form.plain:  # a text of something else
        told, used = _ORDINARY[rng.choice(("greeting", "off_topic", "fact", "small_talk"))][1](rng).turns[-1].user, []
    return told, [values[f.place] if f.place in used else _default(f, told) for f in form.fields], ()


def _from_question(rng: random.Random, form: Form) -> tuple[str, list[Any], tuple[str, ...]]:
    """Return a question, the values of the fields, and the keys of the question's facts."""
    while True:
        task = _ORDINARY[rng.choice(form.kind.split())][1](rng)
        turn = task.turns[-1]
        try:
            values = [_default(f, turn.reply) if f.place < 0 else _answer(f, turn) for f in form.fields]
        except ValueError:  # this answer is of another type: another question
            continue
        if len(task.turns) == 1 and "<" not in turn.reply:  # no marks
            return turn.user, values, task.keys


def _default(field: Parameter, said: str) -> Any:
    """Return the value of a field that the text does not mention."""
    name, _, rest = field.kind.partition(" ")
    if name == "reply":
        return said
    unknown = rest.split(", ")[0] if name == "enum" else _DEFAULTS.get(name, "unknown")
    return unknown if field.required else None


def _answer(field: Parameter, turn: Turn) -> Any:
    """Return the answer as a value of the field. Raises ValueError if it has another type."""
    short = (turn.short or turn.reply).strip(".")
    if field.kind == "bool":
        said = re.search(r"\b(yes|no)\b", f"{turn.short} {turn.reply}".lower())
        return ("no", "yes").index(said[0] if said else "") == 1
    if field.kind in ("int", "number", "numbers"):
        numbers = json.loads(f"[{short}]")
        if field.kind == "int" and not isinstance(numbers[0], int):
            raise ValueError(short)
        return numbers if field.kind == "numbers" else numbers[0]
    if field.kind == "list":
        return short.split(", ")
    if short == "I do not know":
        return turn.reply if field.name in _SAID else "unknown"
    return short if turn.short else turn.reply


def fill(rng: random.Random, form: Form) -> Task:
    """Return a task whose reply is an object of a form."""
    make = _from_text if form.kind in _RECORDS else _from_question
    made = [make(rng, form) for _ in range(rng.choice((2, 2, 3)) if form.many else 1)]
    objects = [{f.name: value for f, value in zip(form.fields, values, strict=True)} for _, values, _ in made]
    question = rng.choice((" ", " ", "\n", "; ")).join(text for text, _, _ in made)
    question = _written(rng, form, form.asked, question)
    if form.way in ("short", "keys"):
        question = _written(rng, form, form.way, question)
    elif form.way in ("schema", "fenced"):
        parts = [question, _written(rng, form, form.way)]
        question = "\n\n".join(parts if rng.random() < 0.5 else parts[::-1])
    data = {form.outer: objects if form.many else objects[0]} if form.outer else objects[0]
    reply = call_text(form.tool, data) if form.tool else json.dumps(data, ensure_ascii=False)
    if form.way.startswith("fenced"):
        reply = f"```json\n{reply}\n```"
    grade: Grade = "keys" if form.asked == "invent" else "exact" if form.tool else "json"
    keys = (*(key for _, _, facts in made for key in facts), f"json:{question.lower()}")
    given: Given = {"values": "keys", "opened": "start"}.get(form.way, "")
    schema = {"keys": form.schema, "start": {"type": "object"}, "": None}[given]
    tools = (form.tool.schema,) if form.tool else ()
    return Task((Turn(question, reply, given=given),), keys, (reply,), grade, tools, form.told, schema)


def told_form(rng: random.Random) -> Form:
    """Return the form of a conversation whose prompts tell of it."""
    return new_form(rng, (*_TOLD, "tool", "tool"), _ANY)


def _skill(ways: Sequence[str], kinds: Sequence[str], asked: str = "") -> Callable[[random.Random], Task]:
    return lambda rng: fill(rng, new_form(rng, ways, kinds, asked))


_MAKERS = {
    "json_text": _skill(("values", "values", "values", "opened"), tuple(_RECORDS)),
    "json_answer": _skill(("values", "values", "opened"), tuple(_QUESTIONS)),
    "json_invent": _skill(("values",), tuple(_RECORDS), "invent"),
    "json_asked": _skill(_TOLD, _ANY),
    "json_call": _skill(("tool",), _ANY),
}
SKILLS = skills("json", _MAKERS)
