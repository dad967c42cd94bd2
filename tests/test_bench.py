"""scripts/bench.py runs, and both engines do the work they are timed for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parent.parent / "scripts" / "bench.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_workload_is_the_same_each_time_and_within_its_bounds(bench: ModuleType) -> None:
    workload = bench.Workload()
    assert workload.lengths() == bench.Workload().lengths()
    assert workload.prompts(100) == bench.Workload().prompts(100)
    assert [len(prompt) for prompt in workload.prompts(100)] == [prompt for prompt, _ in workload.lengths()]
    assert len(workload.lengths()) == 64
    assert all(16 <= length <= 256 for pair in workload.lengths() for length in pair)


@pytest.mark.parametrize("engine", ["fastgen", "transformers"])
def test_an_engine_generates_what_the_workload_asks_for(bench: ModuleType, engine: str) -> None:
    workload = bench.Workload(sequences=3, longest=20)
    found = bench.measure(engine, None, workload, "float32", repeats=1)
    assert found["generated_tokens"] == sum(tokens for _, tokens in workload.lengths())
    assert found["tokens_per_second"] > 0
    assert found["peak_memory_mb"] > 100
