"""The fragments of the changelog: towncrier passes over files whose names it does not understand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_fragment_says_what_kind_of_change_it_is() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    kinds = "|".join(kind["directory"] for kind in settings["type"])
    names = {path.name for path in (ROOT / settings["directory"]).iterdir()} - {"README.md"}
    assert {name for name in names if not re.fullmatch(rf"\+[\w-]+\.({kinds})\.md", name)} == set()
    assert settings["start_string"] in (ROOT / settings["filename"]).read_text(encoding="utf-8")
