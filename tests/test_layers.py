"""The rooms of docs/architecture.md: each imports only from rooms below it; and what else holds of the whole source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fastgen"
SCRIPTS = Path(__file__).parent.parent / "scripts"

# A folder of fastgen/, or a module beside them. A room imports from itself and from those behind it in this list.
ROOMS = (
    "__main__",
    "remote",
    "cli",
    "rl",
    "async_engine",
    "generator",
    "ranks",
    "engine",
    "model",
    "parallel",
    "kernels",
    "text",
    "device",
    "request",
    "processes",
    "option",
    "names",
    "disk",
    "tiny",
)
WITHOUT_TORCH = (
    "async_engine.client",
    "async_engine.loop",
    "rl.remote",
    "text.grammar",
    "text.tokenizer",
    "text.tool_calls",
    "disk",
    "names",
    "option",
    "request",
    "model.config",
    "engine.options",
    "engine.pages",
    "engine.prompt_scores",
    "engine.speculation.planning",
    "engine.admission",
    "engine.scheduler",
    "engine.inputs",
    "engine.outputs",
    "processes.spawning",
)


# What one reads to follow a token. The sum may fall and not rise: the aim is 3,500 lines.
CORE = (
    "generator",
    "request",
    *(f"engine.{name}" for name in ("loop", "scheduler", "pages", "admission", "runner", "step", "cuda_graphs")),
    *("engine.inputs", "engine.outputs", "model.transformer", "model.linear", "model.sampler", "model.attention.paged"),
)
CORE_LINES = 4240
LARGE_CLASSES = {"Generator", "Scheduler"}  # the facade, and one that is to be divided


def module_name(path: Path) -> str:
    return ".".join(("fastgen", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def height(module: str) -> int:
    """Return how many rooms are above that of a module. The package itself, which imports lazily, is below all."""
    room = module.split(".")[1] if "." in module else ""
    assert not room or room in ROOMS, (
        f"{module} is in no room; put it into one, or add the room to ROOMS and to docs/architecture.md"
    )
    return ROOMS.index(room) if room else len(ROOMS)


def targets(module: str, node: ast.AST) -> Iterator[str]:
    """Yield the modules of fastgen that an import statement names."""
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
    """Yield the imports under `if TYPE_CHECKING` at the top of a file."""
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
    """Yield all imports of a module, inside functions too: (module, line). Those of the package itself are lazy."""
    lazy = set(type_checking_imports(TREES["fastgen"])) if module == "fastgen" else set()
    for node in ast.walk(TREES[module]):
        if node not in lazy:
            yield from ((target, getattr(node, "lineno", 0)) for target in targets(module, node))


@pytest.mark.parametrize("module", SOURCES)
def test_a_room_imports_nothing_from_above(module: str) -> None:
    upward = [f"line {line}: {target}" for target, line in imports(module) if height(target) < height(module)]
    assert not upward, f"{module} imports from rooms above: {upward}"


def test_a_module_in_no_room_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"fastgen\.extra is in no room"):
        height("fastgen.extra")
    assert height("fastgen.cli.serve.app") < height("fastgen.engine.runner") < height("fastgen.kernels.launch")


def test_the_imports_are_read_wherever_they_stand() -> None:
    found = {module: {target for target, _ in imports(module)} for module in SOURCES}
    assert {"fastgen.engine.loop", "fastgen.request"} <= found["fastgen.generator"]
    assert "fastgen.model.attention.paged" in found["fastgen.engine.startup"], "inside a function"
    assert "fastgen.generator" in found["fastgen.cli.chat"], "by its public name"
    assert found["fastgen"] == set()


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: {target for target, _ in imports(module)} for module in SOURCES}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which shows the circle
    assert len(order) >= len(SOURCES)


def test_no_script_imports_itself_in_a_circle() -> None:
    """Scripts import each other by their names alone, so each name is there once."""
    paths = [path for path in SCRIPTS.rglob("*.py") if "results" not in path.parts]
    graph: dict[str, set[str]] = {path.stem: set() for path in paths}
    assert len(graph) == len(paths)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                graph[path.stem] |= {alias.name for alias in node.names} & graph.keys()
            elif isinstance(node, ast.ImportFrom) and node.module in graph:
                graph[path.stem].add(node.module)
    assert "bench_limits" in graph["bench_engine"]
    assert not graph["rl_grpo"] | graph["synth_data"], "these are to be copied, one file each"
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


@pytest.mark.parametrize("module", SOURCES)
def test_files_and_functions_can_be_read_without_scrolling(module: str) -> None:
    lines = SOURCES[module].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 660
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, f"{node.name} needs scrolling"


def test_the_core_stays_small() -> None:
    sizes = {name: len(SOURCES[f"fastgen.{name}"].read_text(encoding="utf-8").splitlines()) for name in CORE}
    assert len(CORE) == 15
    assert sum(sizes.values()) <= CORE_LINES, sizes


@pytest.mark.parametrize("module", SOURCES)
def test_classes_are_small(module: str) -> None:
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ClassDef) and node.name not in LARGE_CLASSES:
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            assert (node.end_lineno or 0) - node.lineno < 350, node.name
            assert len(methods) <= 25, node.name


@pytest.mark.parametrize("module", SOURCES)
def test_nothing_is_left_for_later(module: str) -> None:
    source = SOURCES[module].read_text(encoding="utf-8")
    assert not re.findall(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", source)


def test_no_interval_is_measured_by_a_clock_that_jumps() -> None:
    """The time of day is only a field of answers."""
    read = {module for module, path in SOURCES.items() if re.search(r"\btime\.time\b", path.read_text("utf-8"))}
    assert {module.rpartition(".")[0] for module in read} == {"fastgen.cli.serve", "fastgen.cli.serve.compat"}


def test_the_modules_without_torch_do_not_name_it() -> None:
    for module in WITHOUT_TORCH:
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


def test_the_tests_of_gpus_have_one_process() -> None:
    """By pyproject.toml's options, tests have a worker per core."""
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-k", "no_such_test"]
    tests = ROOT.parent / "tests" / "gpu" / "test_gpu_host.py"
    alone = subprocess.run([*command, tests], capture_output=True, text=True)
    assert re.search(r"\n=+ \d+ deselected in", alone.stdout), alone.stdout
    assert "worker" not in alone.stdout
    refused = subprocess.run([*command, "-n", "2", tests], capture_output=True, text=True)
    assert (refused.returncode, "leave -n out: pytest tests/gpu" in refused.stderr) == (
        pytest.ExitCode.USAGE_ERROR,
        True,
    )
