"""Compiles native.cpp for this processor, and loads it.

The library is compiled at first use, in about four seconds, and kept in the user's cache folder. Without a compiler,
torch computes the same, more slowly and with other bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from fastgen.device.processor import features
from fastgen.device.threads import at_most

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")


def compiler() -> str | None:
    """Return the path of the C++ compiler: the one that the environment's CXX names, or g++. None without one, on other
    systems than Linux, and without AVX-512, where compiled vectors of 16 numbers are slower than torch."""
    tried = sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return shutil.which(os.environ.get("CXX") or "g++") if tried else None


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None if it cannot be had on this machine."""
    found = compiler()
    if found is None:
        return None
    try:
        loaded = ctypes.CDLL(str(compiled(found)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("the kernels for this CPU cannot be compiled; torch computes them, slower: %s", detail)
        return None
    return loaded if _has_torchs_threads(loaded) else None


def compiled(found: str) -> Path:
    """Return the file of the library, compiled with the compiler `found` unless it has been before.

    Raises OSError if the file cannot be written, and SubprocessError if the compiler fails.
    """
    version = subprocess.run([found, "--version"], capture_output=True, check=True).stdout
    parts = (SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), " ".join(sorted(features())).encode())
    name = f"native-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fastgen"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may compile at the same time
            built = Path(own) / name
            subprocess.run([found, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, check=True, text=True)
            built.replace(folder / name)
    return folder / name


def _has_torchs_threads(loaded: ctypes.CDLL) -> bool:
    """Return whether a library runs on the same threads as torch. A second set of threads would wait actively beside
    the first one, and fastgen would not limit their number."""
    with at_most(1):
        return bool(loaded.threads() == 1)
