"""Compiles native.cpp for this processor, and loads it.

The library is compiled at first use, in about a second, and kept in the user's cache folder. Without a compiler, or if
anything fails, torch's operations compute the same, more slowly and with other bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from fastgen.device.processor import features
from fastgen.device.threads import at_most

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
COMPILERS = ("g++", "clang++", "c++")


def compiler() -> str | None:
    """Return the path of the C++ compiler: the one of the environment's CXX, or one of COMPILERS, or None."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None if it cannot be had on this machine."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX") or (found := compiler()) is None:
        return None
    try:
        path = compiled(found)
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("%s does not compile the kernels for this CPU; torch computes them, slower: %s", found, detail)
        return None
    return loaded if _has_torchs_threads(loaded) else None


def compiled(found: str) -> Path:
    """Return the file of the library, compiled with the compiler `found` unless it has been before.

    Raises OSError if the file cannot be written, and SubprocessError if the compiler fails.
    """
    version = subprocess.run([found, "--version"], capture_output=True, check=True).stdout
    parts = (SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), " ".join(sorted(features())).encode())
    name = f"native-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastgen"
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
        return bool(loaded.threads() == 1) or torch.get_num_threads() == 1
