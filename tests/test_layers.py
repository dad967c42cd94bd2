"""The rooms of docs/architecture.md: each imports only from rooms below it; and what else holds of the whole source."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fastgen"
SCRIPTS = Path(__file__).parent.parent / "scripts"

# A folder of fastgen/, or a module beside them. A room imports from itself and from those behind it in this list.
ROOMS = (
    "__main__",
    "cli",
    "data",
    "rl",
    "pool",
    "async_engine",
    "generator",
    "prefill_only",
    "hidden_states",
    "beam_search",
    "start",
    "ranks",
    "speculation",
    "recurrent",
    "engine",
    "model",
    "parallel",
    "kernels",
    "text",
    "device",
    "request",
    "limits",
    "drawn",
    "prompt_score",
    "processes",
    "option",
    "display",
    "names",
    "disk",
    "tiny",
)
WITHOUT_TORCH = (
    "async_engine.client",
    "async_engine.loop",
    "pool.generator_pool",
    "pool.processes",
    "rl.bodies",
    "rl.http",
    "rl.remote",
    "text.chat",
    "text.detokenizer",
    "text.grammar",
    "text.reasoning",
    "text.syntax_names",
    "text.tokenizer",
    "text.tool_calls",
    "text.tools.formats",
    "text.tools.history",
    "disk",
    "display",
    "drawn",
    "names",
    "option",
    "prompt_score",
    "request",
    "model.config",
    "model.generation_config",
    "model.families",
    "engine.options",
    "engine.weight_state",
    "engine.pages",
    "engine.host_pages",
    "engine.host_tier",
    "engine.free_windows",
    "engine.window_pages",
    "engine.masks",
    "engine.prompt_scores",
    "engine.thinking",
    "limits",
    "speculation.feature",
    "speculation.options",
    "engine.features",
    "engine.interface",
    "engine.stats",
    "speculation.planning",
    "engine.admission",
    "engine.scheduler",
    "engine.inputs",
    "engine.outputs",
    "engine.prompts",
    "processes.spawning",
)


# What one reads to follow a token; see docs/architecture.md.
CORE = (
    "generator",
    "request",
    *(f"engine.{name}" for name in ("loop", "scheduler", "pages", "admission", "runner", "step", "cuda_graphs")),
    *("engine.inputs", "engine.outputs", "model.transformer", "model.linear", "model.sampler", "model.attention.paged"),
)

FEATURE_LINES = 30  # of code in core files, not counting signatures, imports, and fields of requests
FEATURES = {
    "speculation": r"\w*([Ss]pecul|[Dd]raft)\w*",
    "host tier": r"\w*(host_page|host_tier|make_allocator|arrivals|saves|loads)\w*",
    "freed windows": r"\w*(free_windows|FreeWindows|WindowPages|slots_of_windows|of_windows|windowed)\w*",
    "shared prefixes": r"prefixes|Shared\w+|shared",
    "adapters": r"\w*([Aa]dapter|lora|keep_bases)\w*",
    "updates and sleep": r"torn|unusable|needs_weights|asleep|sleep|wake|WeightChanges|_?changes|update_weights|blame",
    "fp8 and int4": r"\w*([Ff]p8|[Ii]nt4|quantiz)\w*",
    "prompt scores": r"score|scored|PromptScores?|pair_scores",
    "hidden states": r"kept|keep|KeptStreams|states|first_row",
    "chosen logprobs": r"chosen|ChosenTokens|alternatives_of|logprob_token_ids",
    "reasoning and tool calls": r"\w*([Rr]easoning|tool_call|parse_message|tool_syntax)\w*|TOKENIZER_OPTIONS",
    "thinking budgets": r"_?thinking|thinking_\w+|ThinkingBudgets?",
    "repetitions": r"_?repetition|repetition_\w+|REPETITION|RepetitionDetector|repeated",
    "embeddings": r"embed|embedding|classify|PrefillOnly",
    "grammars": r"mask|masks|masked|_?masks|TokenMask|MaskMaker|mask_of|fill_masks|token_masks|structure\w*",
    "tensor parallelism": r"tp_group|tensor_parallel|rank|on_all_ranks|Leader|Follower|agreeing|_team|\w*exchange",
    "priorities": r"\w*(priority|PRIORITY|move_first|may_prefill)\w*",
    "profiling": r"span|[Tt]racer|profile|end_step",
    "recurrent layers": r"cut|done|_mix|query_rows|\w*([Rr]ecurren|[Hh]ybrid)\w*",
    "CPU acceleration": r"\w*([Ff]ree_?[Cc]ores|[Pp]acked|mkl)\w*",
}
"""The names that a feature has in code."""


def module_name(path: Path) -> str:
    return ".".join(("fastgen", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


class Trees(dict[str, ast.Module]):
    """The syntax trees of modules, each made when it is first asked for, so that collecting tests makes none."""

    def __missing__(self, module: str) -> ast.Module:
        return self.setdefault(module, ast.parse(SOURCES[module].read_text(encoding="utf-8")))


TREES = Trees()


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


def test_a_room_imports_nothing_from_above() -> None:
    upward = [
        f"{module}, line {line}: {target}"
        for module in SOURCES
        for target, line in imports(module)
        if height(target) < height(module)
    ]
    assert not upward, f"imports from rooms above: {upward}"


def test_names_of_classes_in_strings_are_those_of_the_source() -> None:
    """What a string names is imported when it is used, perhaps on a GPU only. Only the doors may name rooms above."""
    found = {
        (module, node.value)
        for module in SOURCES
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Constant) and re.fullmatch(r"fastgen[\w.]*:\w+", str(node.value))
    }
    assert len(found) > 30
    for module, text in found:
        target, _, name = text.partition(":")
        assert name in {getattr(node, "name", "") for node in TREES[target].body}, f"{module}: {text}"
    upward = {(module, text) for module, text in found if height(text.partition(":")[0]) < height(module)}
    assert {module for module, _ in upward} == {"fastgen.engine.features"}, upward


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


def test_files_and_functions_can_be_read_without_scrolling() -> None:
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in SOURCES.items()}
    assert not {module: count for module, count in lines.items() if count > 600}
    long = [
        f"{module}: {node.name}"
        for module in SOURCES
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 70
    ]
    assert not long


@cache
def names_of_code(module: str) -> dict[int, set[str]]:
    """Return the names on each line of a module that has code: no strings, comments, imports, signatures of functions,
    or fields of classes."""
    left_out: set[int] = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left_out.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            left_out.update(line for each in fields for line in range(each.lineno, (each.end_lineno or 0) + 1))
    found: dict[int, set[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(SOURCES[module].read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME and token.start[0] not in left_out:
            found.setdefault(token.start[0], set()).add(token.string)
    return found


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_only_called_in_the_core(feature: str) -> None:
    hooks = {
        f"{module}:{line}"
        for module in CORE
        for line, names in names_of_code(f"fastgen.{module}").items()
        if any(re.fullmatch(FEATURES[feature], name) for name in names)
    }
    assert hooks, "the names of a feature are not those of the code"
    assert len(hooks) <= FEATURE_LINES, sorted(hooks)


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b")
    assert not [module for module, path in SOURCES.items() if later.search(path.read_text(encoding="utf-8"))]


def test_no_interval_is_measured_by_a_clock_that_jumps() -> None:
    """The time of day is only a field of answers."""
    read = {module for module, path in SOURCES.items() if re.search(r"\btime\.time\b", path.read_text("utf-8"))}
    assert {module.rpartition(".")[0] for module in read} == {"fastgen.cli.serve", "fastgen.cli.serve.dialects"}


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


@pytest.mark.long
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
