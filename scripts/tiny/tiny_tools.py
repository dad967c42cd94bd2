"""Skills with tools: choosing one of several, copying its arguments from the question, and reading its results.

data/tools.txt describes some thirty kinds of tools with many names; half of the tools are made up of a verb and a noun.
A conversation has a toolbox. Its calls are JSON in the form that the chat template and `fastgen.text.tool_calls` know.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiny_facts import SKILLS as FACT_SKILLS
from tiny_skills import SKILLS as PLAIN_SKILLS
from tiny_skills import evaluate
from tiny_talk import SKILLS as TALK_SKILLS
from tiny_task import Skills, Task, Turn, any_word, casual, made_up_word, skills
from tiny_words import CAPITALS, DAYS, NAMES, WORDS, joined, read

_TEXTS = {title: [re.sub(r"\{(\d)\}", r"{p\1}", line) for line in lines] for title, lines in read("tools").items()}
_LISTS = {name: values.split("; ") for name, values in (line.split(": ", 1) for line in _TEXTS.pop("words"))}
_MADE_UP = "made up"
_CITIES = (*CAPITALS.values(), *(_LISTS["places"] * 3))
_DONE = ("ok", "done", "true", "sent", "success", "set", "written", "saved", "added", "started", "created", "null", "")
_TYPES = {"int": "integer", "number": "number", "bool": "boolean", "numbers": "array", "list": "array"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool, or a field of JSON. kind: what its values are, in the words of data/tools.txt. place: of a
    field, its place in a record; -1 if neither the text nor the answer tells its value."""

    name: str
    kind: str
    required: bool
    place: int = -1


@dataclass(frozen=True)
class Tool:
    """A tool of one conversation. kind: its section in data/tools.txt. words: the verb and noun of a made-up tool."""

    kind: str
    name: str
    parameters: tuple[Parameter, ...]
    schema: dict[str, Any] = field(repr=False)
    words: tuple[str, str] = ("", "")


def _lines(kind: str, name: str) -> list[list[str]]:
    """Return the values of each line "name: a; b" in a section."""
    return [line.split(": ", 1)[1].split("; ") for line in _TEXTS[kind] if line.startswith(f"{name}: ")]


def _first(kind: str, name: str) -> str:
    found = _lines(kind, name)
    return found[0][0] if found else ""


_KINDS = tuple(kind for kind in _TEXTS if kind != _MADE_UP)
# What each kind is in the place of: two tools of one group are never in one toolbox.
_GROUPS = {kind: _first(kind, "group") or kind for kind in _KINDS}
# Kinds of tools for what the model does itself where there is no such tool.
_ALONE = {kind: _first(kind, "alone") for kind in _KINDS}


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "topic": lambda r: r.choice(_LISTS["topics"]) if r.random() < 0.5 else f"{any_word(r)} {r.choice(WORDS)}",
    "name": lambda r: r.choice(NAMES) if r.random() < 0.7 else made_up_word(r).capitalize(),
    "word": any_word,
    "email": lambda r: f"{r.choice(NAMES).lower()}@{r.choice(('example', made_up_word(r)))}.{r.choice(('com', 'org'))}",
    "path": lambda r: r.choice(("", "", "src/", "docs/", "/tmp/", "data/", "./", f"/home/{r.choice(WORDS)}/"))
    + f"{any_word(r)}.{r.choice(('txt', 'md', 'py', 'csv', 'json', 'yaml'))}",
    "folder": lambda r: r.choice(("src", "docs", "/tmp", ".", "data", "/", f"/home/{r.choice(WORDS)}", any_word(r))),
    "url": lambda r: f"https://{any_word(r)}.com",
    "date": lambda r: f"20{r.randint(10, 30)}-{r.randint(1, 12):02}-{r.randint(1, 28):02}",
    "time": lambda r: f"{r.randint(0, 23):02}:{r.randint(0, 59):02}",
    "person": lambda r: r.choice(NAMES) + r.choice(("", f" {r.choice(_LISTS['surnames'])}")),
    "phone": lambda r: f"{r.choice(('+1 ', '', '+49 '))}{r.randint(100, 999)}{r.choice('- ')}{r.randint(1000, 9999)}",
    "street": lambda r: f"{r.randint(1, 199)} {any_word(r).capitalize()} {r.choice(('Street', 'Road', 'Lane'))}",
    "weekday": lambda r: r.choice(DAYS),
    "country": lambda r: r.choice(tuple(CAPITALS)),
    "capital": lambda r: r.choice(tuple(CAPITALS.values())),
    "sql": lambda r: f"SELECT {r.choice(('*', 'name', 'count(*)', 'id'))} FROM {r.choice(WORDS)}s"
    + r.choice(("", f" WHERE id = {r.randint(1, 99)}", f" LIMIT {r.randint(1, 20)}")),
}  # fmt: skip


def made_up_value(rng: random.Random, kind: str) -> tuple[str, Any]:
    """Return how a value is typed, and the value."""
    name, _, rest = kind.partition(" ")
    if name in ("int", "digits"):
        n = rng.randint(*map(int, rest.split()))
        return str(n), n if name == "int" else str(n)
    if name == "number":
        cents = rng.choice((0.99, 0.5, 0.95))
        x = rng.choice((rng.randint(1, 20), rng.randint(1, 500), rng.randint(1, 999) / 10, rng.randint(1, 99) + cents))
        return str(x), x
    if name == "numbers":
        numbers = [rng.randint(0, 99) for _ in range(rng.randint(2, 5))]
        return ", ".join(map(str, numbers)), numbers
    if name == "bool":
        on = rng.random() < 0.5
        return rest.split(", ")[not on], on
    if name in ("enum", "any"):  # "any": one of a list that the schema does not have
        value = rng.choice(rest.split(", "))
        return value, value
    if name == "map":
        text, _, value = rng.choice(rest.split("; ")).partition("=")
        return text, value
    if name == "city":
        value = rng.choice(_CITIES) if rng.random() < 0.65 else made_up_word(rng).capitalize()
        return value.lower() if value in _CITIES and rng.random() < 0.2 else value, value
    if name == "sum":
        value = f"{rng.randint(1, 999)} {rng.choice('+-**/')} {rng.randint(1, 99)}"
        signs = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
        spoken = " ".join(signs.get(part, part) for part in value.split())
        return rng.choice((value, value, value.replace(" ", ""), spoken)), value
    if name == "words":
        value = " ".join([rng.choice(_LISTS["first"]), *(rng.choice(WORDS) for _ in range(rng.randint(0, 3)))])
        return value, value
    value = rng.choice(_LISTS[name]) if name in _LISTS else _MAKERS[name](rng)
    return value, value


def property_schema(rng: random.Random, parameter: Parameter, about: str, titled: bool) -> dict[str, Any]:
    """Return the schema of a parameter in one of the forms of clients; `titled`: as pydantic writes it."""
    name, _, rest = parameter.kind.partition(" ")
    schema: dict[str, Any] = {"type": _TYPES.get(name, "string")}
    if name == "int" and rng.random() < 0.2:
        schema["type"] = "number"
    if schema["type"] == "array":
        schema["items"] = {"type": "number" if name == "numbers" else "string"}
    if name == "enum" and not (titled and rng.random() < 0.2):
        schema["enum"] = rest.split(", ")
    if titled and not parameter.required:
        schema = {"anyOf": [schema, {"type": "null"}], "default": None}
    if about and rng.random() < 0.6:
        schema["description"] = about
    if titled:
        schema["title"] = parameter.name.replace("_", " ").title()
    items = list(schema.items())
    if rng.random() < 0.25:
        rng.shuffle(items)
    return dict(items)


def styled(rng: random.Random, name: str) -> str:
    """Return the name of a tool or a parameter as some people write it."""
    if "_" in name and rng.random() < 0.12:
        first, *rest = name.split("_")
        return first + "".join(map(str.capitalize, rest))
    return name


def _new_tool(rng: random.Random, kind: str, others: Sequence[Tool] = ()) -> Tool:
    """Return a tool of a kind. A made-up one may share its verb or noun with one of the others."""
    words = ("", "")
    abouts = _lines(kind, "about")[0]
    if kind == _MADE_UP:
        words = (rng.choice(_lines(kind, "verbs")[0]), rng.choice(WORDS) if rng.random() < 0.8 else made_up_word(rng))
        like = [tool.words for tool in others if tool.words[0]]
        if like and rng.random() < 0.3:
            words = (like[0][0], words[1]) if rng.random() < 0.5 else (words[0], like[0][1])
        name = "_".join(words)
        abouts = [about.format(v=words[0], V=words[0].capitalize(), n=words[1]) for about in abouts]
    else:
        name = rng.choice(_lines(kind, "names")[0])
    given = [line for line in _TEXTS[kind] if line.startswith("param")]
    if kind == _MADE_UP:
        given = rng.sample(given, rng.choice((0, 1, 1, 2, 2, 3)))
    titled, parameters, properties = rng.random() < 0.25, list[Parameter](), dict[str, Any]()
    for line in given:
        head, _, rest = line.partition(": ")
        names, _, rest = rest.partition(" = ")
        of, _, texts = rest.partition(" # ")
        called = styled(rng, rng.choice(names.split(", ")))
        called = called if called not in properties else names.split(", ")[0] + "2"
        required = head == "param" and (kind != _MADE_UP or rng.random() < 0.7)
        of = of.replace("int ", "digits ", 1) if "id" in names.split(", ") and rng.random() < 0.25 else of
        parameters.append(Parameter(called, of, required))
        properties[called] = property_schema(rng, parameters[-1], rng.choice(texts.split("; ")), titled)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if any(p.required for p in parameters) or rng.random() < 0.5:
        schema["required"] = [p.name for p in parameters if p.required]
    about = rng.choice(abouts) if rng.random() < (0.9 if kind == _MADE_UP else 0.95) else ""
    name = styled(rng, name)
    function = {"name": name, "description": about, "parameters": schema}
    return Tool(kind, name, tuple(parameters), {"type": "function", "function": function}, words)


def toolbox(rng: random.Random, most: int = 6) -> tuple[Tool, ...]:
    """Return 1 to `most` tools of different names and groups."""
    tools: list[Tool] = []
    for _ in range(rng.randint(1, most)):
        tool = _new_tool(rng, _MADE_UP if rng.random() < 0.45 else rng.choice(_KINDS), tools)
        taken = {each.name for each in tools} | {_GROUPS.get(each.kind) for each in tools if each.kind != _MADE_UP}
        if tool.name not in taken and _GROUPS.get(tool.kind) not in taken:
            tools.append(tool)
    return tuple(tools)


def tools_text(tools: Sequence[Tool]) -> str:
    """Return what the chat template tells of the tools."""
    lines = []
    for function in (tool.schema["function"] for tool in tools):
        schema = function["parameters"]
        told = {"name": function["name"], "description": function["description"], "parameters": schema["properties"]}
        lines.append(json.dumps(told | {"required": schema.get("required", [])}, ensure_ascii=False) + "\n")
    return f"<tools>\n{''.join(lines)}</tools>"


def call_text(tool: Tool, arguments: dict[str, Any]) -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{tool.name}", "arguments": {written}}}\n</tool_call>'


@dataclass(frozen=True)
class Asked:
    """A question, the calls that answer it, and of each call how its values are typed."""

    tool: Tool
    question: str
    calls: tuple[dict[str, Any], ...]
    typed: tuple[tuple[str, ...], ...]

    @property
    def reply(self) -> str:
        """The text of all calls."""
        return "\n".join(call_text(self.tool, arguments) for arguments in self.calls)

    @property
    def key(self) -> str:
        """The fact that is held out: the tool and its arguments, or the wording where these are very few."""
        values = json.dumps([list(call.values()) for call in self.calls])
        fact = values if len(values) > 14 else self.question.lower()
        return f"tool:{self.tool.kind} {' '.join(self.tool.words)}:{fact}"


def phrased(rng: random.Random, template: str, **fields: str) -> str:
    """Return a wording, typed casually; nothing is added next to a value that could be taken for a part of it."""
    if rng.random() < 0.3:
        template = template.replace('"', "")
    return casual(rng, template, decorate=not template.endswith(("}", '"')) and template[0] != "{").format(**fields)


# How a value follows the noun where its kind tells what it is.
_NATURAL = {"name": "for {}", "city": "in {}", "date": "on {}", "path": "from {}", "number": "for {} dollars"}


def _made_up_question(rng: random.Random, tool: Tool, chosen: Sequence[Parameter], typed: Sequence[str]) -> str:
    verb, noun = tool.words
    named, natural = list[str](), ""
    free = rng.random() < 0.35
    for parameter, text in zip(chosen, typed, strict=True):
        kind = parameter.kind.split()[0]
        if free and parameter.name in ("color", "colour", "size"):
            noun = f"{text} {noun}"
        elif free and kind in _NATURAL:
            natural += f" {_NATURAL[kind].format(text)}"
        else:
            named.append(f"{parameter.name.replace('_', ' ')} {text}")
    told = f" {rng.choice(('with', 'with', 'for', 'where', 'using'))} {joined(named)}" if named else ""
    wording = rng.choice(_lines(_MADE_UP, "ask")[0])
    return phrased(rng, wording, v=verb, V=verb.capitalize(), n=noun, **{"with": natural + told})


def _ask(rng: random.Random, tool: Tool, more: bool = False) -> Asked:
    """Return a question for a tool. more: one that follows another with the same tool, such as "and in Rome?"."""
    if tool.kind == _MADE_UP:
        chosen = [p for p in tool.parameters if p.required or rng.random() < 0.5]
        values = [made_up_value(rng, p.kind) for p in chosen]
        typed = tuple(text for text, _ in values)
        question = _made_up_question(rng, tool, chosen, typed)
        arguments = {p.name: value for p, (_, value) in zip(chosen, values, strict=True)}
        return Asked(tool, question, (arguments,), (typed,))
    wordings = _lines(tool.kind, "more" if more else "ask")
    template = rng.choice(wordings[0] if rng.random() < 0.65 else rng.choice(wordings))
    used = [i for i in range(len(tool.parameters)) if f"{{p{i + 1}}}" in template]
    several = used == [0] and bool(_lines(tool.kind, "more")) and not more and rng.random() < 0.2
    calls, texts = [], []
    for _ in range(rng.choice((2, 2, 2, 3)) if several else 1):
        values = [made_up_value(rng, tool.parameters[i].kind) for i in used]
        calls.append({tool.parameters[i].name: value for i, (_, value) in zip(used, values, strict=True)})
        texts.append(tuple(text for text, _ in values))
    fields = {f"p{i + 1}": joined(column) for i, column in zip(used, zip(*texts, strict=True), strict=True)}
    return Asked(tool, phrased(rng, template, **fields), tuple(calls), tuple(texts))


def _computed(kind: str, arguments: dict[str, Any]) -> str:
    """Return the result of one of the tools for sums."""
    values = list(arguments.values())
    if kind == "sum":
        return str(sum(values[0]))
    if kind == "calculator":
        a, sign, b = values[0].split()
    else:
        a, b, sign = *values, {"add": "+", "subtract": "-", "multiply": "*"}[kind]
    return str(round(int(a) / int(b), 2) if sign == "/" else evaluate(sign, int(a), int(b)))


def _result(rng: random.Random, tool: Tool, arguments: dict[str, Any], typed: Sequence[str]) -> str:
    """Return what a tool may answer to a call: JSON, a text, or an error."""
    if rng.random() < 0.06:
        failure = rng.choice(_LISTS["failures"])
        return rng.choice((f"Error: {failure}", json.dumps({"error": failure})))
    gives, says = ([each for line in _lines(tool.kind, name) for each in line] for name in ("gives", "says"))
    if _ALONE.get(tool.kind) == "sums":
        value = _computed(tool.kind, arguments)
        return value if rng.random() < 0.7 else json.dumps({"result": json.loads(value)})
    if gives and (not says or rng.random() < 0.5):
        chosen = [line.split(" ", 1) for line in gives[: rng.randint(1, len(gives))]]
        return json.dumps({key: made_up_value(rng, kind)[1] for key, kind in chosen}, ensure_ascii=False)
    word, name, time, date = (_MAKERS[kind](rng) for kind in ("word", "name", "time", "date"))
    fields = {f"p{i + 1}": text for i, text in enumerate(typed)}
    text = rng.choice(says)
    fields |= {"n": str(rng.randint(0, 99)), "w": word, "N": name, "t": time, "d": date}
    for slot, value in fields.items():
        text = text.replace(f"{{{slot}}}", value)
    return text


def tell(result: str) -> str:
    """Return a sentence that says what a tool answered."""
    try:
        value = json.loads(result)
    except ValueError:
        value = result
    if isinstance(value, dict):
        if "error" in value:
            return f"The tool failed: {value['error']}."
        text = joined([f"the {key.replace('_', ' ')} is {each}" for key, each in value.items()])
    elif isinstance(value, list):
        text = f"I found {', '.join(map(str, value)) or 'nothing'}"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        text = f"The result is {result}"
    elif result.lower().rstrip(".") in _DONE:
        text = "Done"
    else:
        text = result.replace("Error: ", "The tool failed: ")
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _answered(rng: random.Random, asked: Asked) -> Turn:
    """Return the turn of the results of calls and the answer to the user."""
    pairs = zip(asked.calls, asked.typed, strict=True)
    results = [_result(rng, asked.tool, arguments, typed) for arguments, typed in pairs]
    told = [tell(result) for result in results]
    if len(told) > 1:
        told = [f"{next(iter(call.values()))}: {text}" for call, text in zip(asked.calls, told, strict=True)]
    responses = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return Turn(responses, " ".join(told))


def _finished(rng: random.Random, box: Sequence[Tool], task: Task, thought: str) -> Task:
    """Return the task with its tools, and now and then with a thought before its last reply."""
    *earlier, last = task.turns
    if rng.random() < 0.15:
        last = last._replace(thought=thought)
    return replace(task, turns=(*earlier, last), tools=tuple(tool.schema for tool in box))


def _begin(rng: random.Random, box: Sequence[Tool]) -> tuple[Asked, list[Turn]]:
    asked = _ask(rng, rng.choice(box))
    return asked, [Turn(asked.question, asked.reply)]


def tool_call_name(rng: random.Random, box: Sequence[Tool] = ()) -> Task:
    task = tool_call_arguments(rng, box)
    return replace(task, grade="names")


def tool_call_arguments(rng: random.Random, box: Sequence[Tool] = ()) -> Task:
    box = box or toolbox(rng)
    asked, turns = _begin(rng, box)
    if _lines(asked.tool.kind, "more") and rng.random() < 0.25:
        turns.append(_answered(rng, asked))
        asked = _ask(rng, asked.tool, more=True)
        turns.append(Turn(asked.question, asked.reply))
    thought = rng.choice(_LISTS["thoughts"][:1]).format(name=asked.tool.name)
    return _finished(rng, box, Task(tuple(turns), (asked.key,), (asked.reply,), "exact"), thought)


def tool_answer(rng: random.Random, box: Sequence[Tool] = ()) -> Task:
    box = box or toolbox(rng)
    asked, turns = _begin(rng, box)
    turns.append(_answered(rng, asked))
    reply = turns[-1].reply
    keys = (asked.key, f"result:{asked.key}:{turns[-1].user}")
    return _finished(rng, box, Task(tuple(turns), keys, (reply,), "exact"), "The tool has answered.")


_NUMBER_SKILLS = ("add_2digit", "add_3digit", "subtract", "multiply_1digit")
_OTHER_SKILLS = (
    *("spell", "reverse", "count_letters", "count_letter", "sort_numbers", "sort_words", "opposite", "capital"),
    *("joke", "greeting", "about_fastgen", "features", "model_support", "rhyme", "plural", "upper_case", "write_text"),
    *("repeat", "small_talk", "small_talk", "fact", "likes", "foreign", "nonsense", "country_of_capital"),
)
_ORDINARY: Skills = {**PLAIN_SKILLS, **FACT_SKILLS, **TALK_SKILLS}


def tool_none(rng: random.Random, box: Sequence[Tool] = ()) -> Task:
    box = box or toolbox(rng)
    bare = [line[6:].split(" -> ") for tool in box for line in _TEXTS[tool.kind] if line.startswith("bare: ")]
    if bare and rng.random() < 0.4:
        wordings, reply = rng.choice(bare)
        question = casual(rng, rng.choice(wordings.split("; ")))
        task = Task((Turn(question, reply),), (f"bare:{question.lower()}",), (reply,), "exact")
    elif rng.random() < 0.3:
        taken = {_GROUPS.get(tool.kind, tool.words) for tool in box}
        kinds = [kind for kind in _KINDS if not _ALONE[kind] and _GROUPS[kind] not in taken]
        tool = _new_tool(rng, _MADE_UP if rng.random() < 0.5 else rng.choice(kinds))
        if any(word in tool.words for each in box for word in each.words if word):
            return tool_none(rng, box)
        asked = _ask(rng, tool)
        reply = _LISTS["refusals"][0]
        task = Task((Turn(asked.question, reply),), (f"none:{asked.key}",), (reply,), "exact")
    else:
        sums = any(_ALONE.get(tool.kind) == "sums" for tool in box)
        name = rng.choice(_OTHER_SKILLS if sums or rng.random() < 0.8 else _NUMBER_SKILLS)
        task = _ORDINARY[name][1](rng)
        if name == "small_talk" and re.search("cannot|internet", task.turns[-1].reply):  # what a tool may change
            return tool_none(rng, box)
    return _finished(rng, box, task, "No tool is needed.")


# They are drawn only in conversations that have tools, and there by these weights.
TOOL_SKILLS = skills("tools", globals())
SKILLS: Skills = {name: (0, make) for name, (_, make) in TOOL_SKILLS.items()}


def system_prompt(rng: random.Random) -> str | None:
    """Return the system prompt of a conversation with tools, which most of them have not."""
    return rng.choice(_LISTS["systems"]) if rng.random() < 0.4 else None
