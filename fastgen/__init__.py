"""fastgen: high-throughput generation from dense transformers. The public names, resolved when they are first used, so
that importing a torch-free module does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.async_engine.client import AsyncGenerator, EngineError
    from fastgen.generator import Generator
    from fastgen.pool.generator_pool import GeneratorPool
    from fastgen.request import (
        Completion,
        Event,
        Request,
        RequestOutput,
        SamplingParams,
        TokenMask,
        raise_for_errors,
    )
    from fastgen.speculation.options import Speculation

__version__ = "0.3.0"
__all__ = [
    "AsyncGenerator",
    "Completion",
    "EngineError",
    "Event",
    "Generator",
    "GeneratorPool",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "TokenMask",
    "raise_for_errors",
]

_HOMES = {
    "AsyncGenerator": "fastgen.async_engine.client",
    "EngineError": "fastgen.async_engine.client",
    "Generator": "fastgen.generator",
    "GeneratorPool": "fastgen.pool.generator_pool",
    "Speculation": "fastgen.speculation.options",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fastgen' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "fastgen.request")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
