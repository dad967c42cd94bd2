"""process_memory.py: the memory of this process."""

from __future__ import annotations

import platform

import pytest

from fastgen.processes.process_memory import keep_heap, trim_heap, used_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def test_holes_in_the_heap_are_given_back() -> None:
    blocks = [bytearray(b"x" * 100_000) for _ in range(500)]  # below the size of a mapping of its own
    last = blocks.pop()
    before = used_memory()
    blocks.clear()
    trim_heap()
    assert before - used_memory() > 40_000_000
    assert last[0] == ord("x")


def test_memory_at_the_end_of_the_heap_is_kept_until_it_is_given_back() -> None:
    """Blocks of 10 MB, as the tensors of a step have."""
    keep_heap()
    blocks = [bytearray(b"x" * 10_000_000) for _ in range(10)]
    before = used_memory()
    blocks.clear()
    assert before - used_memory() < 50_000_000
    trim_heap()
    assert before - used_memory() > 50_000_000
