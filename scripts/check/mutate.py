"""Apply plausible bugs, one at a time, to a copy of the repository, and run the tests that should find them.

    python scripts/check/mutate.py --json scripts/results/mutants.json
    python scripts/check/mutate.py --only engine.scheduler    # the bugs of one module, or of a package's modules
    python scripts/check/mutate.py --check                    # only whether each bug can still be applied; in a second

The bugs are in mutants.toml. A bug is found if a test fails. The exit status is 0 only if every bug is found. Each bug
names the function, method, class or constant whose source it changes, so that it does not matter where in the module
this stands. Bugs that can no longer be applied are listed with the reason, and nothing is run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SECONDS = 120  # time limit of a test; a bug may let it hang
BUGS = Path(__file__).with_name("mutants.toml")


class Mutant(NamedTuple):
    """A plausible bug: `text` within the source of `symbol` is replaced by `other`, and `tests` should find it.

    module: dotted name of the module, below fastgen. symbol: qualified name of a function, class or constant in it.
    """

    module: str
    tests: tuple[str, ...]
    symbol: str
    text: str
    other: str

    @property
    def path(self) -> Path:
        """The file of the module, relative to the root of the repository."""
        return Path("fastgen", *self.module.split(".")).with_suffix(".py")

    def apply(self, root: Path = ROOT) -> str:
        """Return the source of the module with this bug. Raises LookupError if it cannot be applied."""
        if not (root / self.path).exists():
            raise LookupError(f"there is no {self.path}")
        source = (root / self.path).read_text(encoding="utf-8")
        places = symbols(source).get(self.symbol)
        if places is None:
            name = self.symbol.rpartition(".")[2]
            others = [other for other in symbols(source) if other.rpartition(".")[2] == name]
            raise LookupError(f"there is no {self.symbol}" + f"; there is {', '.join(others)}" * bool(others))
        pattern = re.compile(r"\s+".join(map(re.escape, self.text.split())))
        found = [(place, match) for place in places for match in pattern.finditer(source, *place)]
        if len(found) != 1:
            raise LookupError(f"{self.symbol} has the text {len(found)} times, not once")
        [((start, end), match)] = found
        mutated = source[start : match.start()] + self.other + source[match.end() : end]
        try:
            ast.parse(textwrap.dedent(mutated))
        except SyntaxError as error:
            raise LookupError(f"with the bug there is a syntax error: {error}") from None
        return source[:start] + mutated + source[end:]


@cache
def symbols(source: str) -> dict[str, list[tuple[int, int]]]:
    """Return the functions, classes, methods and constants of a source: where in it the lines of each begin and end, as
    often as it is defined."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: dict[str, list[tuple[int, int]]] = {}
    for name, node in definitions(ast.parse(source)):
        assert node.end_lineno is not None
        found.setdefault(name, []).append((lines[node.lineno - 1], lines[node.end_lineno]))
    return found


def definitions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield (qualified name, node) of all definitions below a node, but for what is local to a function."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.ClassDef():
                yield outer + node.name, node
                yield from definitions(node, f"{outer}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield outer + node.name, node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield outer + name, node
            case ast.If() | ast.Try():
                yield from definitions(node, outer)


def mutants(only: str = "") -> list[Mutant]:
    """Return all mutants, or those of one module or package."""
    table = tomllib.loads(BUGS.read_text(encoding="utf-8"))
    found = []
    for module in table["module"]:
        tests = tuple(path for name in module["tests"] for path in table["groups"].get(name, [name]))
        found += [Mutant(module["name"], tests, *bug) for bug in module["bugs"]]
    return [mutant for mutant in found if f"{mutant.module}.".startswith(f"{only}." if only else "")]


def faults(wanted: list[Mutant], root: Path = ROOT) -> list[str]:
    """Return a line for each mutant that cannot be applied, and for each file of tests that does not exist."""
    found = [
        f"{module}: there is no {test}"
        for module, tests in dict.fromkeys((mutant.module, mutant.tests) for mutant in wanted)
        for test in tests
        if not (root / test).exists()
    ]
    for mutant in wanted:
        try:
            mutant.apply(root)
        except LookupError as error:
            found.append(f"{mutant.module}: {mutant.symbol}: {mutant.text!r}: {error}")
    return found


def run(copy: Path, mutant: Mutant) -> dict[str, object]:
    """Run the tests with one bug; return which it is, whether they found it, and the seconds that they took."""
    path = copy / mutant.path
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(copy), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--timeout={SECONDS}"]
    start, environment = time.perf_counter(), {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([*command, *mutant.tests], cwd=copy, env=environment, stdout=subprocess.PIPE)
    path.write_text(text, encoding="utf-8")
    if done.returncode in (4, 5):  # no tests have run; 3: pytest could not describe a failure, in too deep a recursion
        sys.exit(done.stdout.decode())
    found = {"module": mutant.module, "symbol": mutant.symbol, "from": mutant.text, "to": mutant.other}
    return {**found, "found": done.returncode != 0, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="MODULE", help="such as engine.scheduler, or engine")
    parser.add_argument("--check", action="store_true", help="run no tests, only check that each bug can be applied")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs at a time, each in a copy of its own")
    parser.add_argument("--json", type=Path, help="the file to write")
    args = parser.parse_args()
    wanted = mutants(args.only)
    if not wanted:
        modules = sorted({mutant.module for mutant in mutants()})
        parser.error(f"--only {args.only}: no bug is in this module; there are {', '.join(modules)}")
    if wrong := faults(wanted):
        sys.exit("\n".join([*wrong, f"{len(wrong)} of {len(wanted)} bugs need another symbol or text"]))
    if args.check:
        print(f"{len(wanted)} bugs can be applied")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            copies.put(Path(folder) / str(number))
            prefix = f"--prefix={folder}/{number}/"
            subprocess.run(["git", "checkout-index", "-a", prefix], cwd=ROOT, check=True)
        if wrong := faults(wanted, Path(folder) / "0"):
            sys.exit("\n".join([*wrong, "git add the changed files: the bugs are applied to what is staged"]))

        def run_in_a_copy(mutant: Mutant) -> dict[str, object]:
            copy = copies.get()
            try:
                result = run(copy, mutant)
            finally:
                copies.put(copy)  # others wait for it
            print("found" if result["found"] else "LIVES", json.dumps(result), flush=True)
            return result

        results = list(pool.map(run_in_a_copy, wanted))
    alive = [result for result in results if not result["found"]]
    found = {
        "command": " ".join(["python scripts/check/mutate.py", *sys.argv[1:]]),
        "mutants": len(results),
        "found": len(results) - len(alive),
        "alive": alive,
        "seconds": round(sum(float(str(result["seconds"])) for result in results)),
    }
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
