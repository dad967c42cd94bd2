"""The platform `cpu` for verl, which knows accelerators only: VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu.

Workers then have a share of a resource "GPU" of Ray that stands for no device.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase


class _Cpu(types.ModuleType):
    """torch.cpu, with the functions of torch.cuda that verl calls and that a CPU has no counterpart of."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name == "get_device_name":
            return lambda *_: "CPU"
        if name == "mem_get_info":
            return lambda *_: (0, 0)
        if name == "get_rng_state":
            return torch.get_rng_state
        if name == "set_rng_state":
            return torch.set_rng_state
        if name.startswith(("memory_", "max_memory_")):
            return lambda *_: 0
        if name in ("empty_cache", "ipc_collect", "set_per_process_memory_fraction", "manual_seed", "manual_seed_all"):
            return lambda *_, **__: None
        raise AttributeError(name)


@platform_manager.PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _Cpu("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return "cpu"  # type: ignore[return-value]  # verl passes it to torch as a device

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


platform_manager.set_platform(PlatformCpu())
_init_process_group = torch.distributed.init_process_group


def _init_with_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Call torch's function, which refuses the two backends that verl names, as they are for one device."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _init_with_gloo


def register_engines() -> None:
    """Let verl train with FSDP on the CPU."""
    from verl.workers.engine import EngineRegistry

    for backends in EngineRegistry._engines.values():
        for devices in backends.values():
            if "cuda" in devices:
                devices.setdefault("cpu", devices["cuda"])


register_engines()
