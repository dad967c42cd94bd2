"""The functions of the CUDA driver that torch does not expose: virtual memory, memory that two processes share, and
flags that streams write and wait for. They come from cuda.bindings, which CUDA builds of torch depend on.

https://nvidia.github.io/cuda-python/cuda-bindings/latest/module/driver.html
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def library() -> Any:
    """Return the module cuda.bindings.driver. Raises ImportError if this torch came without it."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(f"{error}; run: pip install cuda-bindings, in the version of torch.version.cuda") from error
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver, for the current GPU. Return its result, or None if it has none. Raises
    RuntimeError if it fails."""
    status, *results = getattr(library(), name)(*arguments)
    check(name, status)
    return results[0] if results else None


def check(name: str, status: int) -> None:
    """Raise RuntimeError if a function has returned an error."""
    if status:
        raise RuntimeError(f"the GPU's driver refuses {name} (CUDA error {int(status)})")
