"""engine/free_windows.py, window_pages.py and window_pool.py: KV that is freed outside of windows changes no bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from bitwise import preempting
from conftest import FAMILIES, Checkpoint, check_idle, random_ids
from test_schedules import answers
from test_sharing import REQUESTS

from fastgen import Generator, SamplingParams
from fastgen.engine.window_pages import WindowAllocator

CONTEXT = 420
LONG = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
TURN = random_ids(200, seed=9)
REQUESTS_OF_ALL_LENGTHS = [*REQUESTS[:6], (TURN, LONG), (TURN + random_ids(100, seed=8), LONG), (random_ids(64), LONG)]
SCHEDULES: dict[str, dict[str, Any]] = {
    "olmo3": {"page_size": 16, "max_seqs": 5, "max_step_tokens": 64, "num_pages": 90},
    "gemma3": {"page_size": 4, "max_seqs": 2, "max_step_tokens": 33, "num_pages": 220},
    "exaone4": {"page_size": 64, "max_seqs": 4, "max_step_tokens": 128, "num_pages": 24},
    "muse": {"page_size": 7, "max_seqs": 3, "max_step_tokens": 80, "num_pages": 150},
}


def allocator(gen: Generator) -> WindowAllocator:
    pages = gen._loop.scheduler.pages
    assert isinstance(pages, WindowAllocator)
    return pages


@pytest.mark.parametrize(
    "family", ["olmo3", "exaone4", *(pytest.param(each, marks=pytest.mark.long) for each in ("gemma3", "muse"))]
)
def test_freed_windows_change_no_bit(family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in chunks, as forks, from cached prefixes and after preemptions, with fewer places than pages."""
    folder = checkpoint(FAMILIES[family][0], **FAMILIES[family][1])
    options: dict[str, Any] = {"max_model_len": CONTEXT, "seed": 0, **SCHEDULES[family]}
    take = WindowAllocator.take_places

    def checked(self: WindowAllocator) -> object:
        self.check()
        return take(self)

    monkeypatch.setattr(WindowAllocator, "take_places", checked)
    with Generator(folder, **options, prefix_cache=False) as gen:
        expected = answers(gen, REQUESTS_OF_ALL_LENGTHS)
    with Generator(folder, **options, free_windows=True) as gen:
        for _ in range(2):
            assert answers(gen, REQUESTS_OF_ALL_LENGTHS) == expected
        assert gen.stats.cached_tokens > 500
        assert allocator(gen).nowhere < gen.config.num_pages
        preempting(gen, steps=41)
        assert answers(gen, REQUESTS_OF_ALL_LENGTHS) == expected
        assert gen.stats.preemptions > 3
        for version in (1, 0):
            gen.update_weights(folder, version=version)  # drops the prefix cache
        assert answers(gen, REQUESTS_OF_ALL_LENGTHS[-3:]) == expected[-3:]
        check_idle(gen)


def test_a_prefix_counts_as_cached_as_long_as_its_last_window_is_there() -> None:
    """Places are taken from prefixes that were left longest ago, from their ends on."""
    window, size = 20, 16

    def first(position: int) -> int:
        return max(position - window + 1, 0)

    pages = WindowAllocator(8, size, 3, first)
    tokens, table = list(range(4 * size)), list[int]()
    assert pages.grow(table, len(tokens))
    for page in table[:2]:
        pages.hold(page)
    pages.let_go(table[0])  # it is not indexed yet
    for page in table[2:]:
        pages.hold(page)
    assert pages.index(0, table, tokens, len(tokens)) == 4
    assert [node.page for node in pages.match(tokens, len(tokens))] == table
    assert len(pages.match(tokens, 3 * size)) == 3
    assert pages.match(tokens, 2 * size) == [], "the window at its end begins in the first page"
    for page in table[:0:-1]:
        pages.let_go(page)
    pages.check()
    pages.release(table)
    other: list[int] = []
    assert pages.grow(other, 1)
    pages.hold(other[0])
    assert len(pages.match(tokens, len(tokens))) == 3
    pages.check()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {}, "free_windows needs a model with a sliding window in some layers and none in others"),
        ("phi3", {}, "free_windows needs a model with a sliding window in some layers and none in others"),
        ("exaone4", {"speculate": "ngram"}, "free_windows does not work together with speculate"),
        ("exaone4", {"host_cache_gb": 0.1}, "free_windows does not work together with host_cache_gb"),
    ],
)
def test_what_cannot_work_is_an_error(
    family: str, options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    folder: Path = checkpoint(FAMILIES[family][0], **FAMILIES[family][1])
    with pytest.raises(ValueError, match=re.escape(message)):
        Generator(folder, free_windows=True, **options)
