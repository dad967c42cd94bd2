"""The lookup of launch functions, and of compiled kernels. (The fallback to twins is in test_kernels.py.)"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen import kernels
from fastgen.kernels.launch import Kernel
from fastgen.kernels.triton import jit
from fastgen.model import sampler


def test_the_launch_of_every_kernel_is_found_and_takes_the_arguments_of_its_twin() -> None:
    modules = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(kernels.__path__, "fastgen.kernels.")
    ]
    found = {
        f"{module.__name__}.{name}": value
        for module in (*modules, sampler)
        for name, value in vars(module).items()
        if isinstance(value, Kernel)
    }
    assert len(set(found.values())) > 20
    for name, kernel in found.items():
        twin, launch = (list(inspect.signature(each).parameters) for each in (kernel.twin, kernel.launch))
        assert launch[: len(twin)] == twin, name
        assert kernel.launch is kernel.launch, "imported once"


def test_twins_import_no_kernels() -> None:
    """The sums over ranks and the kernels of speculation are loaded only if they are used."""
    kernel = re.compile(r"import .*\bjit\b|fastgen\.kernels\.(triton|hopper)[\w.]* import")
    for path in Path(kernels.__path__[0]).glob("*.py"):
        if path.stem not in ("allreduce", "drafts"):
            assert not kernel.search(path.read_text("utf-8")), path


def _noted(p, q, count, size, block):
    """A kernel that is never compiled."""


def test_a_kernel_runs_again_only_if_triton_would_not_compile_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our keys distinguish at least what Triton's own specialization distinguishes."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import JITFunction, native_specialize_impl

    made: list[int] = []  # the kernels
    ran: list[tuple[int, tuple[int, ...]]] = []  # of these, and their grids

    class Compiled:
        def __init__(self) -> None:
            self.number = len(made)
            made.append(self.number)
            self.function = self.packed_metadata = None

        def run(self, x: int, y: int, z: int, *rest: Any) -> None:
            ran.append((self.number, (x, y, z)))

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args: self.run(*grid)

    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **options: Compiled())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    kernel = jit.quick(JITFunction)(_noted, do_not_specialize=("count",))
    memory = torch.zeros(64, dtype=torch.float16)
    tensors = [memory, memory[1:], memory[8:], memory.float(), memory.to(torch.int32), None]
    values = [
        (p, q, count, size, block)
        for p in tensors for q in tensors[:3] for count in (1, 2, 16, 2**31 - 1, 2**31, 0.5) for size in (1, 2, 16, 1.0)
        for block in (1, 16, None)
    ]  # fmt: skip
    rng = random.Random(0)
    seen: dict[int, Any] = {}
    for _ in range(4000):
        args, device, warps = rng.choice(values), rng.randrange(2), rng.choice([4, 8])
        before = len(made), len(ran)
        kernel[rng.choice([(1,), (2, 3)])](*args, num_warps=warps)
        now = len(made), len(ran)
        assert now in ((before[0] + 1, before[1]), (before[0], before[1] + 1))
        exact = [
            native_specialize_impl(BaseBackend, arg, False, place != 2, place != 2)
            for place, arg in enumerate(args[:4])
        ]
        key = device, warps, str(exact), str(args[4])
        number = ran[-1][0] if now[1] > before[1] else made[-1]
        assert seen.setdefault(number, key) == key, "a kernel ran that was compiled for something else"
    assert len(ran) > 1000
    assert {grid for _, grid in ran} == {(1, 1, 1), (2, 3, 1)}


KERNEL = """
@jit()
def copy(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + {offset})
"""


def key_on_disk(path: Path, text: str) -> str:
    """Return the key of the kernel `copy` of a module in Triton's cache on disk."""
    from triton.runtime.jit import JITFunction

    path.parent.mkdir(exist_ok=True)
    path.write_text("import triton.language as tl\njit = lambda: lambda function: function\n" + text)
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    key: str = jit.quick(JITFunction)(module.copy).cache_key
    return key


def test_an_upgrade_compiles_only_kernels_that_it_changed(tmp_path: Path) -> None:
    old = key_on_disk(tmp_path / "old" / "kernels.py", KERNEL.format(offset=1))
    moved = key_on_disk(tmp_path / "new" / "kernels.py", "# A line\n# or two.\n" + KERNEL.format(offset=1))
    changed = key_on_disk(tmp_path / "changed" / "kernels.py", KERNEL.format(offset=2))
    assert moved == old
    assert changed != old
