"""The import of Triton, and how a call to a kernel becomes a launch or a call to its torch twin.

Triton is not a dependency: without it, or without a GPU, the torch twins run. If TRITON_INTERPRET=1 is set before
Triton is first imported, kernels run on CPU tensors, as in tests without a GPU. Triton's interpreter does not run
kernels in Gluon, so tests compile them, and run some with a stand-in for Gluon.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch

from fastgen.device.chip import HOPPER, Chip

log = logging.getLogger(__name__)


def optional(name: str) -> Any:
    """Import a module of Triton and return it.

    Return None if the module is missing, or if nothing would run its kernels, since the import is slow.
    """
    useless = torch.version.cuda is None and os.environ.get("TRITON_INTERPRET") != "1"
    if useless and "triton" not in sys.modules:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


triton, tl = optional("triton"), optional("triton.language")
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def version() -> tuple[int, int]:
    """Return Triton's major and minor version, or (0, 0) without Triton."""
    major, minor = triton.__version__.split(".")[:2] if triton else (0, 0)
    return int(major), int(minor)


KNOWN_TRITON = ((3, 6), (3, 7), (3, 8), (3, 9))
KNOWN = version() in KNOWN_TRITON
"""True if fastgen was tested with this version's launcher and Gluon."""

GLUON = KNOWN and not INTERPRETED
"""True if kernels in Gluon can run."""

REMEDY = "install torch 2.11 to 2.15, each of which brings a known Triton (3.6 to 3.9)"


class Notes:
    """Kernels that would have been launched but are not compiled yet (see fastgen.kernels.ahead).

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


class Kernel:
    """A function that launches Triton kernels, paired with a torch twin that takes the same arguments.

    A call with CUDA tensors launches the kernels, and any other call runs the twin. If Triton cannot compile a kernel
    for a device, the twin runs on that device from then on, with one warning. (Compilation precedes all writes, so the
    twin can still start from the same state.)

    launch: the function that launches. twin: its torch twin. refused: the devices on which the twin has to run.
    """

    def __init__(self, launch: Callable[..., Any], twin: Callable[..., Any]) -> None:
        self.launch, self.twin = launch, twin
        self.refused: set[torch.device] = set()

    def __call__(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if self.runs_on(x.device):
            try:
                return self.launch(x, *arguments, **options)
            except Exception as error:
                if not refused(error):
                    raise
                self.refused.add(x.device)
                name = self.launch.__module__.rpartition(".")[2]
                log.warning(
                    "the %s kernel does not compile on %s with Triton %s; torch computes it, slower (another Triton "
                    "may compile it): %s", name, x.device, triton.__version__, error,
                )  # fmt: skip
        return self.twin(x, *arguments, **options)

    def runs_on(self, device: torch.device) -> bool:
        """Return whether calls with tensors on `device` launch kernels."""
        return device.type == "cuda" and triton is not None and device not in self.refused


def refused(error: Exception) -> bool:
    """Return whether an error means that Triton cannot compile a kernel: because of its language, a compiler pass,
    ptxas, or a lack of resources."""
    if triton is None:
        return False
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return isinstance(error, CompilationError | OutOfResources | PTXASError) or "PassManager" in str(error)


def kernels_of(device: torch.device) -> str:
    """Return the fastest kind of kernels that a device can run.

    - "gluon": kernels in Gluon and in Triton. They need Hopper and a version in KNOWN_TRITON. Gluon computes attention
      and the products of few tokens in 2-byte dtypes (with an fp8 KV cache, decodes only in bfloat16).
    - "triton": only kernels in Triton.
    - "torch": only the torch twins, on the CPU or without Triton.
    """
    if device.type != "cuda" or triton is None:
        return "torch"
    return "gluon" if GLUON and Chip.of(device).capability == HOPPER else "triton"


def slower_than_possible(device: torch.device) -> str:
    """Return why a GPU runs slower than it could, and what to do about it, or "" if it does not."""
    if device.type != "cuda":
        return ""
    if triton is None:
        return f"Triton is not installed, so that all kernels run as torch operations, several times slower; {REMEDY}"
    if not KNOWN:
        effect = "kernels launch slower"
        if Chip.of(device).capability == HOPPER:
            effect += (
                ", the fastest kernels for Hopper are off, layers in fp8 do not quantize their inputs, and results may "
                "depend on the schedule"
            )
        return f"Triton {triton.__version__} is unknown to this version of fastgen: {effect}; {REMEDY}"
    return ""
