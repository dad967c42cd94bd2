"""rendering.py: chat templates that take too long or write too much end with an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastgen.text import rendering
from fastgen.text.tokenizer import Tokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS.replace("BODY", ""), "takes more than 0.2 seconds; look for a loop"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "than 0.2 seconds"),
        (ENDLESS.replace("BODY", "{{ messages[0].content * 9999 }}"), "takes more than 64 MiB of memory"),
        ("{{ messages[0].content * 2001 }}", "it renders 10005 characters, above the maximum of 10000"),
        ("{{ messages[0].content * 10**14 }}", "messages: MemoryError"),
    ],
)
def test_a_template_that_loops_or_multiplies_text_is_an_error(
    talker: Path, template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 20 if "MiB" in reason else 0.2)
    monkeypatch.setattr(rendering, "TEMPLATE_BYTES", 2**26)
    monkeypatch.setattr(rendering, "TEMPLATE_CHARS", 10_000)
    tokenizer = Tokenizer(talker)
    tokenizer.hf.chat_template = template
    with pytest.raises(ValueError, match=re.escape(reason)):
        tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert sum(1 for _ in range(10**6)) == 10**6, "nothing is raised later"
