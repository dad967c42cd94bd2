"""The layers of the design: who may import whom; and what else holds of the whole source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fastgen"

LEVELS = {
    "fastgen": 0,  # resolves the public names lazily; who imports one of them imports its home
    "fastgen.arch": 0,
    "fastgen.config": 0,
    "fastgen.interrupts": 0,
    "fastgen.rank_errors": 0,
    "fastgen.request": 0,
    "fastgen.tokenizer": 0,
    "fastgen.tiny": 0,
    "fastgen.exchange": 1,
    "fastgen.kernels": 1,
    "fastgen.memory": 1,
    "fastgen.parallel": 1,
    "fastgen.pinned": 1,
    "fastgen.profiling": 1,  # names parts of a step, wherever they are
    "fastgen.rope": 1,
    # The design lists all of cache/ at level 3. These two know nothing of a model (one is two tensors, the other only
    # numbers), and attention reads the pool, so they stand under it; cache/host.py, which copies, stays at 3.
    "fastgen.cache": 1,
    "fastgen.cache.pages": 1,
    "fastgen.cache.pool": 1,
    "fastgen.attention": 2,
    "fastgen.cache.host": 3,
    "fastgen.graphs": 3,
    "fastgen.pieces": 3,
    "fastgen.loader": 3,
    "fastgen.model": 3,
    "fastgen.sampler": 3,
    "fastgen.staging": 3,
    "fastgen.weights": 3,
    "fastgen.residual": 2,
    "fastgen.runner": 4,
    "fastgen.startup": 4,
    "fastgen.admission": 4,  # two parts of the scheduler
    "fastgen.results": 4,
    "fastgen.scheduler": 4,
    "fastgen.outputs": 5,  # what becomes of sequences: beside the ranks, under Generator alone
    "fastgen.intake": 5,  # what goes in: beside outputs
    "fastgen.ranks": 5,
    "fastgen.updating": 5,
    "fastgen.generator": 6,
    "fastgen.cli": 7,
    "fastgen.ray": 7,
}


def module_name(path: Path) -> str:
    return ".".join(("fastgen", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def level(module: str) -> int:
    """The level of a module, or of the nearest package around it that has one; cli's is its modules' as well."""
    assigned = module
    while assigned not in LEVELS or (assigned == "fastgen" and module != "fastgen"):
        assigned, dot, _ = assigned.rpartition(".")
        assert dot, f"{module} has no level; give it one in LEVELS, as the design says"
    return LEVELS[assigned]


def targets(module: str, node: ast.AST) -> Iterator[str]:
    """The modules of fastgen that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "fastgen")
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:  # relative to the package of this module
            package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
            base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])])
        if base.partition(".")[0] == "fastgen":
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in SOURCES else PUBLIC.get(inner, base)


def type_checking_imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """What stands under `if TYPE_CHECKING` at the top of a file."""
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (inner for inner in node.body if isinstance(inner, ast.ImportFrom))


# "fastgen.Generator" -> "fastgen.generator": the homes of the public names, as the package tells type checkers.
PUBLIC = {
    f"fastgen.{alias.name}": node.module or ""
    for node in type_checking_imports(TREES["fastgen"])
    for alias in node.names
}


def imports(module: str) -> Iterator[tuple[str, int]]:
    """All imports of a module, wherever they stand: (module, line). Those of the package itself are lazy."""
    lazy = set(type_checking_imports(TREES["fastgen"])) if module == "fastgen" else set()
    for node in ast.walk(TREES[module]):
        if node not in lazy:
            yield from ((target, getattr(node, "lineno", 0)) for target in targets(module, node))


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_nothing_from_above(module: str) -> None:
    own = level(module)
    upward = [f"line {line}: {target}" for target, line in imports(module) if level(target) > own]
    assert not upward, f"{module} (level {own}) imports from above: {upward}"


def test_a_module_without_a_level_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"fastgen\.extra has no level"):
        level("fastgen.extra")
    assert level("fastgen.cli.serve.app") == 7


def test_the_imports_are_read_wherever_they_stand() -> None:
    found = {module: {target for target, _ in imports(module)} for module in SOURCES}
    assert {"fastgen.scheduler", "fastgen.ranks.start", "fastgen.request"} <= found["fastgen.generator"]
    assert "fastgen.attention.reference" in found["fastgen.attention"], "inside a function"
    assert "fastgen.generator" in found["fastgen.cli.chat"], "by its public name"
    assert found["fastgen"] == set()


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: {target for target, _ in imports(module)} for module in SOURCES}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which shows the circle
    assert len(order) >= len(SOURCES)


@pytest.mark.parametrize("module", SOURCES)
def test_files_and_functions_can_be_read_without_scrolling(module: str) -> None:
    lines = SOURCES[module].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 500
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, f"{node.name} needs scrolling"


@pytest.mark.parametrize("module", SOURCES)
def test_nothing_is_left_for_later(module: str) -> None:
    source = SOURCES[module].read_text(encoding="utf-8")
    assert not re.findall(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", source)


def test_the_modules_without_torch_do_not_name_it() -> None:
    scheduling = ("cache.pages", "admission", "results", "scheduler")
    ranks = ("ranks.channel", "ranks.processes")  # fgserve's server uses them
    for module in ("arch", "config", "rank_errors", "request", "tokenizer", *scheduling, "outputs", *ranks):
        named = {
            alias.name.partition(".")[0]
            for node in ast.walk(TREES[f"fastgen.{module}"])
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {
            (node.module or "").partition(".")[0]
            for node in ast.walk(TREES[f"fastgen.{module}"])
            if isinstance(node, ast.ImportFrom)
        }
        assert "torch" not in named, module
