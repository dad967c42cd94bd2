"""formats.py: formats by name, and by what chat templates say."""

from __future__ import annotations

from typing import get_args

import pytest

from fastgen.engine.options import GeneratorOptions
from fastgen.text.syntax_names import CALL_MARKS, ToolCallParser
from fastgen.text.tools.formats import (
    FORMATS,
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_V11,
    MISTRAL_V13,
    OLMO_3,
    PHI_4_MINI,
    QWEN_CODER,
    SEED_OSS,
    find_format,
)


def test_a_name_overrides_the_template() -> None:
    assert find_format("<tool_call>") is HERMES
    assert find_format("<tool_call>", "llama3_json") is LLAMA
    assert find_format(None, "hermes") is HERMES
    assert find_format(None) is find_format("{{ messages }}") is None
    for name, syntax in FORMATS.items():
        assert find_format("", name) is (syntax or MISTRAL)


@pytest.mark.parametrize(
    ("template", "syntax"),
    [("", MISTRAL), ("[TOOL_CALLS][ARGS]", MISTRAL_V13), ("[TOOL_CALLS][CALL_ID][ARGS]", MISTRAL_V11)],
)
def test_the_template_tells_the_version_of_mistral(template: str, syntax: object) -> None:
    assert find_format(template, "mistral") is syntax


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("<tool_call>\\n<function=example_function_name>", QWEN_CODER),
        ("<seed:tool_call>\\n<function=example_function_name>", SEED_OSS),
        ("<function_calls>", OLMO_3),
        ("<|tool_call|>", GRANITE),
        ('functools[{"name": [function name]', PHI_4_MINI),
    ],
)
def test_the_template_tells_the_format(template: str, syntax: object) -> None:
    assert find_format(template) is syntax


def test_names_and_marks_are_known_without_the_parsers() -> None:
    assert tuple(FORMATS) == get_args(ToolCallParser)
    assert {mark for syntax in FORMATS.values() if syntax is not None for mark in syntax.marks} == CALL_MARKS


def test_marks_that_models_have_as_tokens_are_known() -> None:
    assert {"<tool_call>", "</tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"} < CALL_MARKS


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    GeneratorOptions(tool_call_parser="qwen3_coder").check()
    with pytest.raises(ValueError, match=r"tool_call_parser is 'gpt'; it must be one of 'hermes', .*'deepseek_v31'"):
        GeneratorOptions(tool_call_parser="gpt").check()
