"""parser.py: the work of parsers of tool calls; test_tool_calls.py has their results."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.text.tools.formats import FORMATS
from fastgen.text.tools.parser import HELD, Function, ToolParser


@pytest.mark.parametrize("name", [name for name, syntax in FORMATS.items() if syntax is not None])
@pytest.mark.parametrize("text", [" ", '{"type": "', '{"name": "', "<function="])
def test_waiting_text_is_matched_a_few_times(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may write for long what looks like the beginning of a call."""
    match, matched = ToolParser._match, 0

    def counted(self: ToolParser, pattern: Any, at: int, last: bool) -> Any:
        nonlocal matched
        matched += len(self._text) - at
        return match(self, pattern, at, last)

    monkeypatch.setattr(ToolParser, "_match", counted)
    syntax = FORMATS[name]
    assert syntax is not None
    parser = syntax.parser([Function("f")])
    pieces = [syntax.opens + text, *["abc" if text.strip() else "   "] * (HELD // 3)]
    said = "".join(delta.get("content", "") for piece in pieces for delta in parser.push(piece))
    said += "".join(delta.get("content", "") for delta in parser.push("", last=True))
    assert said == "".join(pieces) or not said, "it is no call, or one that never began"
    assert matched < 50 * HELD


def test_a_call_is_reported_when_its_arguments_begin() -> None:
    """Also if much text has waited before."""
    syntax = FORMATS["hermes"]
    assert syntax is not None
    parser, late = syntax.parser([Function("f")]), 0
    parser.push("<tool_call>" + "\n" * 1000 + '{"name": "f", "arguments": ')
    while not parser.push("{" if late == 0 else "a"):
        late += 1
    assert late < 200
