"""history.py: earlier calls in the form that a chat template takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
import pytest

from fastgen.text.tools.formats import DEEPSEEK_V3, HERMES, MISTRAL_V13, PYTHONIC, QWEN_CODER
from fastgen.text.tools.history import template_calls
from fastgen.text.tools.parser import Syntax

BEGINS, MIDDLE, ENDS = DEEPSEEK_V3.each
CALL = f"{BEGINS}function{MIDDLE}{{{{ f.name }}}}\n```json\n%s\n```{ENDS}"
ARGUMENTS = {"a": "x 'y'", "b": [True, None, {"c": 1.5}]}
JSON = '{"a": "x \'y\'", "b": [true, null, {"c": 1.5}]}'
# Of DeepSeek's own templates, R1-Distill's writes calls only if there is no content.
DEEPSEEK = "{% if m.content is none or not distilled %}" + CALL % "{{ '' + f.arguments }}" + "{% endif %}"
QUOTED = (
    "{{ f.name }}({% for k in f.arguments %}{{ ', ' if not loop.first }}"
    "{{ k }}={{ f.arguments[k] | tojson }}{% endfor %})"
)


def renderer(template: str, **variables: Any) -> Callable[[list[dict[str, Any]]], str]:
    """Return a function that renders the call in the last message, and fails as a tokenizer does."""
    source = jinja2.Template("{% set f = m.tool_calls[0].function %}" + template)

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return source.render(m=messages[-1], **variables)
        except TypeError as error:
            raise ValueError(str(error)) from error

    return render


def history(arguments: Any, content: str | None = None) -> list[dict[str, Any]]:
    call = {"id": "call_1234567890", "type": "function", "function": {"name": "get", "arguments": arguments}}
    return [{"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", [ARGUMENTS, JSON])
@pytest.mark.parametrize(
    ("syntax", "template", "variables", "written"),
    [
        (HERMES, "{{ f.arguments | tojson }}", {}, JSON.replace("'", "\\u0027")),
        (DEEPSEEK_V3, CALL % "{{ f.arguments | string }}", {}, str(ARGUMENTS)),
        (DEEPSEEK_V3, DEEPSEEK, {"distilled": False}, JSON),
        (DEEPSEEK_V3, DEEPSEEK, {"distilled": True}, JSON),
        (PYTHONIC, QUOTED.replace("| tojson", "| string"), {}, 'get(a="x \'y\'", b=[True, None, {"c": 1.5}])'),
        (PYTHONIC, QUOTED, {}, 'get(a="x \\u0027y\\u0027", b=[true, null, {"c": 1.5}])'),
        (
            PYTHONIC,
            '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}',
            {},
            JSON.replace("'", "\\u0027"),
        ),
    ],
)
def test_templates_get_arguments_in_the_form_that_they_take(
    syntax: Syntax, template: str, variables: dict[str, Any], written: str, arguments: Any
) -> None:
    if "string }}" in template and syntax is DEEPSEEK_V3:
        written = JSON  # a template that shows no JSON of an object gets the text
    render = renderer(template, **variables)
    assert written in render(template_calls(history(arguments), syntax, render))


def test_a_text_that_is_no_object_is_not_lost() -> None:
    """Qwen3-Coder's templates and those for Python go through the arguments."""
    for syntax in (QWEN_CODER, PYTHONIC):
        (message,) = template_calls(history('{"a": "Par'), syntax, renderer(QUOTED))
        assert message["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"a": "Par'}
    for text in ('{"a": "Par', "[1]", "[" * 100_000):
        (message,) = template_calls(history(text), HERMES, renderer(QUOTED))
        assert message["tool_calls"][0]["function"]["arguments"] == text


def test_a_template_that_leaves_calls_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="leaves tool calls out"):
        template_calls(history(JSON), DEEPSEEK_V3, renderer("{{ m.content or '' }}"))


def test_ids_and_names_are_what_templates_need() -> None:
    result = {"role": "tool", "tool_call_id": "call_1234567890", "content": "Yes."}
    asked, told = template_calls([*history(JSON, "Well."), result], MISTRAL_V13, renderer(QUOTED))
    assert asked["content"] == "Well."
    assert len(asked["tool_calls"][0]["id"]) == 9
    assert told == {**result, "tool_call_id": asked["tool_calls"][0]["id"], "name": "get"}
    asked, told = template_calls([*history(JSON), {**result, "name": "set"}], HERMES, renderer(QUOTED))
    assert (asked["tool_calls"][0]["id"], asked["content"]) == ("call_1234567890", "")
    assert told == {**result, "name": "set"}
    plain = [{"role": "assistant", "content": "x", "tool_calls": [{"name": "get", "arguments": {}}]}]
    assert template_calls(plain, HERMES, renderer(QUOTED)) == plain, "the form without `function` is left alone"
