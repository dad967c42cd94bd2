"""The picture of the house in docs/architecture.md: which folder of fastgen/ imports which, as a Mermaid diagram.

    python scripts/docs/house.py            # write it into the page
    python scripts/docs/house.py --check    # fail if the page has another one

An arrow leads from a folder to one whose modules it imports when it is loaded. A dotted arrow is a door: an import
inside a function, or a module that a table of strings names. Arrows that follow from others are left out: A -> C is not
drawn if A imports B, and B imports C.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "```mermaid\n", "```\n"
SMALL = {"option", "limits", "names", "display", "disk"}  # modules that any other may import


def room(path: Path) -> str:
    """Return the folder or the module of fastgen/ that a file belongs to."""
    return path.relative_to(ROOT / "fastgen").parts[0].removesuffix(".py")


def imported(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield (room, whether it is a door) for the imports of fastgen's modules, and the modules that strings name."""
    lazy = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fastgen":
            names = node.module.split(".")[1:] or [alias.name for alias in node.names]
            yield names[0], node in lazy
        elif isinstance(node, ast.Constant) and (named := re.fullmatch(r"fastgen\.(\w+)[\w.]*:\w+", str(node.value))):
            yield named[1], True


def arrows() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return (imports, doors). Imports for type checkers only are left out."""
    direct: set[tuple[str, str]] = set()
    doors: set[tuple[str, str]] = set()
    files = sorted((ROOT / "fastgen").rglob("*.py"))
    rooms = {room(path) for path in files if path.parent != ROOT / "fastgen" or not path.stem.startswith("__")} - SMALL
    for path in files:
        if (own := room(path)) not in rooms:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not _only_for_types(node)]
        for target, lazy in imported(tree):
            if target in rooms - {own}:
                (doors if lazy else direct).add((own, target))
    return direct, doors - direct


def _only_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def reduced(edges: set[tuple[str, str]], all_edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges between whose ends there is no longer path, unless that path comes back to where it began."""

    def reaches(start: str, target: str, without: str) -> bool:
        seen, left = {start, without}, [start]
        while left:
            middle = left.pop()
            if middle == target:
                return True
            following = {end for origin, end in all_edges if origin == middle} - seen
            seen |= following
            left += following
        return False

    return {
        (source, target)
        for source, target in edges
        if not any(
            reaches(middle, target, source)
            for origin, middle in all_edges
            if origin == source and middle not in (source, target)
        )
    }


def diagram() -> str:
    direct, doors = arrows()
    drawn = reduced(direct, direct)
    shown = reduced(doors, direct | doors)
    parts = [BEGIN + "flowchart TD\n"]
    parts += [f"    {source} --> {target}\n" for source, target in sorted(drawn)]
    parts += [f"    {source} -.-> {target}\n" for source, target in sorted(shown)]
    return "".join([*parts, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    new = before + diagram() + after
    if check and new != page:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} shows another house; run: python scripts/docs/house.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
