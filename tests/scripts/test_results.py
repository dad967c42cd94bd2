"""scripts/results: a page of the docs or a README names each file, so that none outlives what was said of it."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_page_names_each_result() -> None:
    """A name may have a * or VERSION in it, and stands for the data of a plot, too."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "fastgen" / "tiny" / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.name != "CHANGELOG.md")
    names = {name.replace("VERSION", "*") for name in re.findall(r"([\w.*-]+)\.(?:jsonl?|png)\b", text)}
    unnamed = {path.name for path in (ROOT / "scripts" / "results").iterdir()}
    unnamed = {name for name in unnamed if not any(fnmatch(name.rpartition(".")[0], each) for each in names)}
    assert unnamed == set(), "delete them, or name them in a page"
