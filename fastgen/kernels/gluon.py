"""Gluon, Triton's language of layouts, in the versions that fastgen knows; their differences end in this module.

Gluon is experimental, and its names move from one Triton to the next. Kernels in Gluon therefore run with the versions
of `launch.KNOWN_TRITON` alone, and Triton's interpreter does not know the language. Without Gluon, `gl` and `nvidia`
are None, and a kernel is a plain function that nothing calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fastgen.kernels import launch

GLUON = launch.KNOWN and not launch.INTERPRETED
"""Whether kernels in Gluon run."""

gl: Any = launch.optional("triton.experimental.gluon.language") if GLUON else None
nvidia: Any = launch.optional("triton.experimental.gluon.language.nvidia.hopper") if GLUON else None

barrier: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)
"""Synchronizes the threads of a partition. Triton 3.6 has the second name alone, later ones the first."""

_tma: Any = getattr(nvidia, "tma", None)
load_tile: Any = getattr(_tma, "async_load", None) or getattr(_tma, "async_copy_global_to_shared", None)
"""Begins a load by TMA. Triton 3.6 and 3.7 have the second name alone, 3.9 the first."""


def gluon_jit(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """Return `launch.jit`'s counterpart for kernels in Gluon."""
    if not GLUON:
        return lambda function: function
    base = importlib.import_module("triton.experimental.gluon._runtime").GluonJITFunction
    return lambda function: launch.quick(base)(function, do_not_specialize=unspecialized)
