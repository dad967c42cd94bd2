"""names.py: attributes of vLLM's outputs and engine are errors that say what to use here."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from fastgen import AsyncGenerator
from fastgen.names import explains_names, foreign_names
from fastgen.request import Completion, RequestOutput
from fastgen.rl.remote import RemoteGenerator

OUTPUT = RequestOutput("r0", [1], [Completion(0, [5], "five", "stop")])


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("outputs", "use completions"),
        ("request_id", "use id"),
        ("finished", "leave it out: an output is always complete"),
        ("metrics", "use timings"),
        ("num_cached_tokens", "use cached_tokens"),
    ],
)
def test_an_attribute_of_vllm_is_an_error_that_says_ours(name: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=f"^RequestOutput has no attribute '{name}'; {ours}"):
        getattr(OUTPUT, name)
    assert not hasattr(OUTPUT, name)


@pytest.mark.parametrize("engine", [AsyncGenerator("folder"), RemoteGenerator("http://localhost:1")])
def test_an_argument_of_vllm_is_an_error_that_says_ours(engine: Any) -> None:
    for method in (engine.generate, engine.stream):
        with pytest.raises(TypeError, match=r"has no argument 'sampling_params'; use params$"):
            method("hello", sampling_params=None)


def test_advice_is_given_only_where_the_attribute_exists() -> None:
    with pytest.raises(AttributeError, match=r"^'Completion' object has no attribute 'outputs'$"):
        OUTPUT.completions[0].outputs  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"^'RequestOutput' object has no attribute 'completion'$"):
        OUTPUT.completion  # type: ignore[attr-defined]  # noqa: B018


def test_an_error_within_a_property_stays_and_copies_are_made_as_before() -> None:
    @explains_names()
    class Broken:
        @property
        def outputs(self) -> int:
            return [].size  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="'list' object has no attribute 'size'"):
        Broken().outputs  # noqa: B018
    with pytest.raises(ValueError, match="failed: too long"):
        RequestOutput("r0", [], [Completion(0, [], "", "error", error="too long")]).text  # noqa: B018
    assert copy.deepcopy(OUTPUT) == pickle.loads(pickle.dumps(OUTPUT)) == OUTPUT


def test_the_guide_for_users_of_vllm_has_the_tables_of_the_data_file() -> None:
    """If names.toml has changed, copy its tables from this test's message into the page."""
    page = (Path(__file__).parents[1] / "docs" / "from-vllm.md").read_text(encoding="utf-8")
    for title, table in foreign_names()["tables"].items():
        rows = [table["header"], ["---"] * 2, *([row["theirs"], row["ours"]] for row in table["rows"])]
        text = "".join(f"| {left} | {right} |\n" for left, right in rows).replace("| --- | --- |", "|---|---|")
        found = re.search(rf"^## {title}\n\n((?:\|.*\n)+)", page, re.MULTILINE)
        assert found is not None
        assert found[1] == text
