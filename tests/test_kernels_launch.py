"""The way to a kernel that has been compiled; falling back to twins is in test_kernels.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastgen.kernels import launch


def _noted(p, q, count, size, block):
    """A kernel that is never compiled."""


def test_a_kernel_that_has_run_is_found_again_where_triton_would_not_compile_it_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's own specialization is what decides; more keys than it has are allowed, fewer are not."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import JITFunction, native_specialize_impl

    ran: list[tuple[Any, ...]] = []

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        made = len(ran)
        ran.append(args)
        return Compiled(made)

    class Compiled:
        def __init__(self, number: int) -> None:
            self.number = number

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert len(grid) == 3
            return lambda *args: quick.append((self.number, grid, args))

    quick: list[Any] = []
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    kernel = launch._quick()(_noted, do_not_specialize=("count",))
    memory = torch.zeros(64, dtype=torch.float16)
    tensors = [memory, memory[1:], memory[8:], memory.float(), memory.to(torch.int32), None]
    values = [
        (p, q, count, size, block)
        for p in tensors for q in tensors[:3] for count in (1, 2, 16, 2**31 - 1, 2**31, 0.5) for size in (1, 2, 16, 1.0)
        for block in (1, 16, None)
    ]  # fmt: skip
    rng = random.Random(0)
    seen: dict[Any, Any] = {}
    for _ in range(2000):
        args, device, warps = rng.choice(values), rng.randrange(2), rng.choice([4, 8])
        before = len(ran), len(quick)
        found = kernel[rng.choice([(1,), (2, 3)])](*args, num_warps=warps)
        exact = [
            native_specialize_impl(BaseBackend, arg, False, number != 2, number != 2)
            for number, arg in enumerate(args[:4])
        ]
        key = device, warps, str(exact), str(args[4])
        assert (len(ran), len(quick)) in ((before[0] + 1, before[1]), (before[0], before[1] + 1))
        assert seen.setdefault(found.number, key) == key, "a kernel ran that was compiled for something else"
    assert len(quick) > 500
