"""The import budget: a process loads at most so many lines of fastgen. Features, devices and ranks that it does not use
cost it nothing, and a reader of its path has nothing else to read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

IMPORT, GENERATE = 1_500, 14_000  # lines that `import fastgen` and one `generate` on a CPU may load

PROGRAM = """
import json, sys
from pathlib import Path

def lines():
    files = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "fastgen"}
    return {name: len(Path(file).read_text(encoding="utf-8").splitlines()) for name, file in files.items() if file}

import fastgen
imported = lines()
with fastgen.Generator(device="cpu") as gen:
    gen.generate("x")
print(json.dumps([imported, lines()]))
"""


@pytest.fixture(scope="module")
def loaded() -> tuple[dict[str, int], dict[str, int]]:
    """The lines of each module after `import fastgen`, and after one `generate`."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    imported, generated = json.loads(done.stdout)
    return imported, generated


def test_importing_fastgen_loads_few_lines(loaded: tuple[dict[str, int], dict[str, int]]) -> None:
    assert sum(loaded[0].values()) <= IMPORT, loaded[0]


def test_one_generate_on_a_cpu_loads_few_lines(loaded: tuple[dict[str, int], dict[str, int]]) -> None:
    assert sum(loaded[1].values()) <= GENERATE, sorted((count, name) for name, count in loaded[1].items())


@pytest.mark.parametrize(
    "door",
    ["fastgen.speculation", "fastgen.recurrent", "fastgen.model.recurrent_layers", "fastgen.ranks",
     "fastgen.parallel.rank_group", "fastgen.kernels.triton", "fastgen.kernels.hopper", "fastgen.text.tools",
     "fastgen.engine.warm_up", "fastgen.cli", "fastgen.rl", "fastgen.pool", "fastgen.async_engine"],
)  # fmt: skip
def test_a_feature_is_loaded_only_when_it_is_used(loaded: tuple[dict[str, int], dict[str, int]], door: str) -> None:
    assert [name for name in loaded[1] if f"{name}.".startswith(f"{door}.")] == []
