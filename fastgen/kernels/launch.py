"""The import of Triton, and how a call to a kernel becomes a launch or a call to its torch twin.

Triton is not a dependency: without it, or without a GPU, the torch twins run, and no module with kernels is loaded. If
TRITON_INTERPRET=1 is set before Triton is first imported, kernels run on CPU tensors, as in tests without a GPU.
Triton's interpreter does not run kernels in Gluon, so tests compile them, and run some with a stand-in for Gluon.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from functools import cached_property
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


triton = optional("triton")
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


class Kernel:
    """A function that launches Triton kernels, paired with a torch twin that takes the same arguments.

    A call with CUDA tensors launches the kernels, and any other call runs the twin. If Triton cannot compile a kernel
    for a device, the twin runs on that device from then on, with one warning. (Compilation precedes all writes, so the
    twin can still start from the same state.)

    twin: the torch twin. name: "module:function", the function that launches. native: "module:function", the function
    for tensors on the CPU, which returns None for arguments that the twin has to compute; "" if there is none. refused:
    the devices on which the twin has to run.
    """

    def __init__(self, twin: Callable[..., Any], name: str, native: str = "") -> None:
        self.twin, self.name, self._native = twin, name, native
        self.refused: set[torch.device] = set()

    @cached_property
    def launch(self) -> Callable[..., Any]:
        """The function that launches. Its module is imported here, so that only a GPU loads kernels."""
        return _function(self.name)

    @cached_property
    def on_cpu(self) -> Callable[..., Any] | None:
        """The function for tensors on the CPU, or None."""
        return _function(self._native) if self._native else None

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
        elif x.device.type == "cpu" and self.on_cpu is not None:
            result = self.on_cpu(x, *arguments, **options)
            if result is not None:
                return result
        return self.twin(x, *arguments, **options)

    def runs_on(self, device: torch.device) -> bool:
        """Return whether calls with tensors on `device` launch kernels."""
        return device.type == "cuda" and triton is not None and device not in self.refused


def _function(name: str) -> Callable[..., Any]:
    """Import a module and return its function; name: "module:function"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


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


def gluon_runs_on(chip: Chip, dtype: torch.dtype) -> bool:
    """Return whether kernels in Gluon run on a chip with inputs of a dtype."""
    return GLUON and chip.capability == HOPPER and dtype.itemsize <= 2


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
