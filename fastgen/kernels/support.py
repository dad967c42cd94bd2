"""Which kernels run on a device, and what a user can do where faster ones exist.

- "gluon": kernels in Gluon beside those in Triton. They need Hopper and a Triton of `launch.KNOWN_TRITON`. With 2-byte
  dtypes, products of few tokens use them, and in deterministic mode decode attention.
- "triton": kernels in Triton alone.
- "torch": the torch twins alone, on the CPU and where Triton is missing.
"""

from __future__ import annotations

import torch

from fastgen.kernels import launch
from fastgen.kernels.gluon import GLUON
from fastgen.kernels.launch import Chip

HOPPER = (9, 0)
REMEDY = "install torch 2.11 to 2.15, each of which brings a known Triton (3.6 to 3.9)"


def kernels_of(device: torch.device) -> str:
    """Return the fastest kind of kernels that a device runs: "gluon", "triton" or "torch"."""
    if device.type != "cuda" or launch.triton is None:
        return "torch"
    return "gluon" if GLUON and Chip.of(device).capability == HOPPER else "triton"


def slower_than_possible(device: torch.device) -> str:
    """Return why a GPU runs slower than it could and what to install; "" where it does not."""
    if device.type != "cuda":
        return ""
    if launch.triton is None:
        return f"Triton is not installed, so that all kernels run as torch operations, several times slower; {REMEDY}"
    if not launch.KNOWN:
        effect = "kernels launch slower"
        if Chip.of(device).capability == HOPPER:
            effect += ", the fastest kernels for Hopper are off, and deterministic mode is off by default"
        return f"Triton {launch.triton.__version__} is unknown to this version of fastgen: {effect}; {REMEDY}"
    return ""
