"""process_memory.py: the memory of this process."""

from __future__ import annotations

import platform

import pytest

from fastgen.processes.process_memory import trim_heap, used_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_holes_in_the_heap_are_given_back() -> None:
    blocks = [bytearray(b"x" * 100_000) for _ in range(500)]  # below the size of a mapping of its own
    last = blocks.pop()
    before = used_memory()
    blocks.clear()
    trim_heap()
    assert before - used_memory() > 40_000_000
    assert last[0] == ord("x")
