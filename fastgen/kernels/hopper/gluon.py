"""Gluon, Triton's language with explicit layouts. This module hides the differences between its versions.

Gluon is experimental, and its names change between versions of Triton. Kernels in Gluon therefore run only with the
versions in `fastgen.kernels.launch.KNOWN_TRITON`, and not in Triton's interpreter. Without Gluon, `gl` and `nvidia`
are None, and a kernel is a plain function that nothing calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fastgen.kernels.launch import GLUON, optional, version
from fastgen.kernels.triton import jit

gl: Any = optional("triton.experimental.gluon.language") if GLUON else None
nvidia: Any = optional("triton.experimental.gluon.language.nvidia.hopper") if GLUON else None

barrier: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)
"""Synchronize the threads of a partition. Triton 3.6 has only the second name."""

_tma: Any = getattr(nvidia, "tma", None)
load_tile: Any = getattr(_tma, "async_load", None) or getattr(_tma, "async_copy_global_to_shared", None)
"""Begin a TMA load. Triton 3.6 and 3.7 have only the second name, 3.9 only the first."""

store_tile: Any = getattr(_tma, "async_store", None) or getattr(_tma, "async_copy_shared_to_global", None)
"""Begin a TMA store. Triton 3.6 and 3.7 have only the second name."""

_memory: Any = getattr(gl, "shared_memory_descriptor", None)
reinterpret: Any = getattr(_memory, "reinterpret", None) or getattr(_memory, "_reinterpret", None)
"""View shared memory in another shape. Triton 3.9 has only the first name, earlier versions only the second."""

_VERSION = version()
_SLICES = jit.constant(_VERSION >= (3, 9))
"""True if a buffer of any number of tiles can be sliced, which lets a view begin between two larger tiles."""

HALVES = _VERSION != (3, 8)
"""True if `side_of` can view two halved tiles as one: by a slice, or (until 3.7) by a view larger than its source."""

ANY_BOXES = _VERSION < (3, 8)
"""True if `side_of` can view a tile whose number of boxes is not a power of two: until 3.7, by a view larger than its
source."""

EVICTS = jit.constant(hasattr(nvidia, "CachePolicy"))
"""True if TMA loads take a policy for the L2 cache, as with Triton 3.9."""

ONCE: Any = jit.constant(
    nvidia.CachePolicy(l2=nvidia.FractionalEvictionPolicy("evict_first", 1.0))
    if hasattr(nvidia, "CachePolicy")
    else None
)
"""The policy of what a kernel reads only once."""


def gluon_jit(*unspecialized: str) -> Callable[[Callable[..., Any]], Any]:
    """Return `jit.jit`'s counterpart for kernels in Gluon."""
    if not GLUON:
        return lambda function: function
    base = importlib.import_module("triton.experimental.gluon._runtime").GluonJITFunction
    return lambda function: jit.quick(base)(function, do_not_specialize=unspecialized)


@gluon_jit()
def side_of(
    tiles, stage, piece: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, SIDE: gl.constexpr,
    LONG: gl.constexpr, BOXES: gl.constexpr = 1,
):  # fmt: skip
    """Return a view [SIDE, LONG] of shared memory that begins with the given piece of a stage.

    tiles: [STAGES * PIECES * BOXES, ...]. BOXES: number of tiles below one another that a piece consists of; with more
    than one, there is enough memory after the last for the view's other rows. Otherwise a tile has SIDE rows, or if the
    tiles are halved, SIDE // 2 rows. PIECES is then even, there is one extra tile at the end, and the second half of
    the view is the memory after the piece.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, LONG], tiles.dtype)
    if _SLICES:
        gl.static_assert(BOXES == 1, "see ANY_BOXES")
        TILES: gl.constexpr = 2 if PIECES > 1 else 1
        sides: gl.constexpr = [STAGES * PIECES // TILES, SIDE, LONG]
        view = reinterpret(tiles.slice(piece % TILES, STAGES * PIECES), tiles.dtype, sides, layout)
        return view.index(stage * (PIECES // TILES) + piece // TILES)
    else:
        return reinterpret(tiles.index((stage * PIECES + piece) * BOXES), tiles.dtype, [SIDE, LONG], layout)


@gluon_jit()
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage of a ring of shared memory that follows `stage`, and its barriers' phase."""
    stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    return stage, gl.where(stage == 0, phase ^ 1, phase)


@gluon_jit()
def clear_rows(v, keys):
    """Overwrite the values from row `keys` on with zeros.

    No step has written them, so they may be NaN, which a weight of 0 does not cancel. All groups of warps that call
    this write the same numbers.
    """
    KEYS: gl.constexpr = v.shape[0]
    DIMS: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIMS, DIMS // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, layout)), 1)
    v.store(gl.where(row < keys, v.load(layout), gl.zeros([KEYS, DIMS], v.dtype, layout)))
