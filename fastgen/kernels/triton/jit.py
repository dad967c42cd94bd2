"""The compilation and the launch of kernels in Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch

from fastgen.kernels.launch import INTERPRETED, KNOWN, optional, triton

tl: Any = None if triton is None else optional("triton.language")


class Notes:
    """Kernels that would have been launched but are not compiled yet (see fastgen.kernels.triton.compile_ahead).

    kernels: functions, each of which compiles one kernel.
    """

    def __init__(self) -> None:
        self.kernels: list[Callable[[], Any]] = []
        self._seen: set[object] = set()

    def is_new(self, launch: object) -> bool:
        """Return whether `launch`, a pair (kernel, kinds of its arguments), is seen for the first time."""
        new = launch not in self._seen
        self._seen.add(launch)
        return new


noting: ContextVar[Notes | None] = ContextVar("noting", default=None)
"""While this is set, launches in this context only add their kernels to the Notes."""


def constant(value: object) -> Any:
    """Return a value (a number, a string, a tuple, a cache policy) in a form that kernels can refer to as a global."""
    return value if tl is None else tl.constexpr(value)


def jit(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """Return triton.jit for kernels that are not recompiled for new values of the `unspecialized` arguments.

    Without Triton the decorator returns the plain function, which nothing calls.
    """
    if triton is None:
        return lambda function: function
    if INTERPRETED:
        return lambda function: triton.jit(function, do_not_specialize=unspecialized)
    return lambda function: quick(triton.JITFunction)(function, do_not_specialize=unspecialized)


@cache
def quick(base: Any) -> Any:
    """Return a subclass of triton.JITFunction with a faster launch of compiled kernels.

    Triton's own launch keeps the host busy for longer than a small kernel runs on the GPU. This slows down steps that
    do not replay a CUDA graph, such as short prefills.
    """
    modules = ("triton.tools.tensor_descriptor", *["triton.experimental.gluon.nvidia.hopper"] * KNOWN)
    described = tuple(importlib.import_module(name).TensorDescriptor for name in modules)

    class Quick(base):  # type: ignore[misc]
        def __init__(self, function: Callable[..., Any], **options: Any) -> None:
            super().__init__(function, **options)
            # The line number is part of the key of Triton's cache on disk. A kernel that only moved within its file
            # must not be compiled again.
            self.starting_line_number = 1
            self._loose = [param.do_not_specialize for param in self.params]
            self._compiled: dict[Any, Callable[..., None]] = {}

        def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
            device = torch.cuda.current_device()
            # Triton recompiles at most if one of these changes. (A descriptor's layout follows from its dtype and
            # block.)
            kinds = [
                (arg.dtype, arg.data_ptr() & 15) if isinstance(arg, torch.Tensor)
                else (arg.base.dtype, *arg.block_shape) if arg.__class__ in described
                else arg if not loose
                else isinstance(arg, int) and -(2**31) <= arg < 2**31
                for arg, loose in zip(args, self._loose, strict=True)
            ]  # fmt: skip
            key = device, *map(type, args), *kinds, *options.items()
            launch, notes = self._compiled.get(key), noting.get()
            if notes is not None:
                if launch is not None or not notes.is_new((self, key)):
                    return None
                warmup = True
            if launch is None or warmup:
                # Triton 3.9 warns if this is not set, because the default changes in 3.10.
                options.setdefault("enable_fp_fusion", True)
                kernel = super().run(*args, grid=grid, warmup=warmup, **options)
                if not warmup:
                    self._compiled[key] = launcher(kernel)
                return kernel
            launch((*grid, 1, 1)[:3], device, args)

        def _do_compile(self, *what: Any) -> Any:
            """Compile a kernel for Triton's `run`, or while `noting` is set, note it and return None."""
            compile_kernel, notes = partial(super()._do_compile, *what), noting.get()
            return compile_kernel() if notes is None else notes.kernels.append(compile_kernel)

    return Quick


def launcher(kernel: Any) -> Callable[[tuple[int, ...], int, tuple[Any, ...]], None]:
    """Load a compiled kernel onto the current GPU, and return a function that launches it on a device's current stream.

    With an unknown version of Triton, the returned function uses Triton's own launch, which is slower.
    """
    if not KNOWN:
        return lambda grid, device, args: kernel[grid](*args)
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    stream = torch._C._cuda_getCurrentRawStream
    return lambda grid, device, args: run(*grid, stream(device), function, metadata, None, None, None, *args)
