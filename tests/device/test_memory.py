"""device/gpu_memory.py: release and restore, with a fake driver that checks each call instead of a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fake_driver import MB, FakeDriver
from torch import Tensor

from fastgen.device import cuda_driver, gpu_memory, memory
from fastgen.device.gpu_memory import DeviceMemory, VirtualMemory
from fastgen.device.new_memory import memory_on

CPU = torch.device("cpu")


def fill(tensors: list[Tensor]) -> list[Tensor]:
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + number)
    return [tensor.clone() for tensor in tensors]


SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3,), torch.float32), ((40, 50), torch.bfloat16), ((1,), torch.int64), ((5000, 3), torch.float32),
]  # fmt: skip


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="only Linux tells")
@pytest.mark.parametrize("huge", [False, True])
def test_large_tensors_on_the_cpu_are_in_huge_pages_if_asked(huge: bool) -> None:
    tensor = memory_on(CPU, huge_pages=huge).zeros((2 * memory.HUGE,), torch.uint8)
    flags: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            start, end = (int(number, 16) for number in name.split("-"))
        elif name == "VmFlags:" and start <= tensor.data_ptr() < end:
            flags = rest
    assert ("hg" in flags, "nh" in flags) == (huge, not huge)  # asks for huge pages, asks for none


def test_a_gpus_tensors_stay_where_they_are_and_their_memory_goes() -> None:
    driver = FakeDriver()
    held = DeviceMemory(driver, CPU)
    tensors = [held.zeros(*SHAPES[0])]
    held.release(keep=True)
    held.restore()
    tensors += [held.zeros(shape, dtype) for shape, dtype in SHAPES[1:]]  # after a release, too
    assert not any(tensor.any() for tensor in tensors)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == SHAPES
    assert all(tensor.data_ptr() % gpu_memory.ALIGNMENT == 0 for tensor in tensors)
    size = sum(driver.mapped.values())
    assert size < sum(t.nbytes for t in tensors) + len(tensors) * gpu_memory.ALIGNMENT + driver.granularity
    before = fill(tensors)
    for keep in (True, True, False, True):
        for _ in range(2):
            held.release(keep)
            assert not driver.mapped
        driver.log.clear()
        for _ in range(2):
            held.restore()
        assert driver.log == [("map", size)], "as one mapping, and once"
        assert [torch.equal(*pair) for pair in zip(tensors, before, strict=True)] == [keep] * len(tensors)
        if not keep:
            assert not any(tensor.any() for tensor in tensors)
            fill(tensors)
    assert held._pinned is not None
    assert len(held._pinned.bytes) < size


def test_addresses_and_memory_go_with_the_last_tensor() -> None:
    for released in (False, True):
        driver = FakeDriver()
        held = DeviceMemory(driver, CPU)
        tensors = [held.zeros((5,), torch.float32) for _ in range(2)]
        if released:
            held.release(keep=False)
        del held
        assert driver.ranges
        tensors.pop()
        assert driver.ranges
        assert bool(driver.mapped) is not released
        tensors.clear()
        assert not driver.ranges
        assert not driver.mapped


def test_a_restore_without_enough_memory_can_be_repeated() -> None:
    driver = FakeDriver()
    held = DeviceMemory(driver, CPU)
    with pytest.raises(torch.OutOfMemoryError):
        held.zeros((driver.total + 1,), torch.uint8)
    tensor = held.zeros((2 * MB,), torch.uint8)
    tensor.fill_(7)
    held.release(keep=True)
    driver.capacity = MB
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            held.restore()
    driver.capacity = driver.total
    held.restore()
    assert bool((tensor == 7).all())


def test_the_cpus_memory_stays() -> None:
    held = memory_on(CPU)
    tensors = [held.zeros(shape, dtype) for shape, dtype in [*SHAPES, ((24 * MB,), torch.uint8)]]
    assert not any(tensor.any() for tensor in tensors)
    before = fill(tensors)
    held.release(keep=False)
    held.restore()
    assert all(map(torch.equal, tensors, before))
    with pytest.raises(MemoryError, match="GB of memory cannot be had"):
        held.zeros((1 << 60,), torch.uint8)


class FakeLibrary:
    """cuda.bindings.driver, whose functions return a status, and give numbers out. Its structures and constants exist
    as far as they are used."""

    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=2)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccessDesc = SimpleNamespace
    results: ClassVar = {"cuMemGetAllocationGranularity": 2 * MB, "cuMemAddressReserve": 1 << 40, "cuMemCreate": 77}

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.statuses: dict[str, list[int]] = {}
        self.CUmemAllocationProp = lambda: SimpleNamespace(location=SimpleNamespace())

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, list(arguments)))
            status = self.statuses[name].pop(0) if self.statuses.get(name) else 0
            return (status, None if status else self.results[name]) if name in self.results else (status,)

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary()
    monkeypatch.setattr(cuda_driver, "library", lambda: made)
    monkeypatch.setattr(gpu_memory, "release_memory", lambda device: made.calls.append(("release", [device])))
    for name, result in {"mem_get_info": (5 * MB, 7 * MB), "current_device": 3, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
    monkeypatch.setattr(gpu_memory, "current", made_current)
    return made


@contextmanager
def made_current(device: torch.device) -> Iterator[None]:
    assert device == torch.device("cuda", 3)
    yield


def test_the_driver_is_called_as_cuda_says(library: FakeLibrary) -> None:
    driver = VirtualMemory(torch.device("cuda"))
    assert driver.granularity == 2 * MB
    assert driver.reserve() == (1 << 40, 8 * MB)
    library.calls.clear()
    driver.map(1 << 40, 4 * MB)
    (_, created), (_, mapped), (_, released), (_, access) = library.calls
    assert [name for name, _ in library.calls] == ["cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess"]
    size, allocation, _ = created
    assert size == 4 * MB
    assert (allocation.type, allocation.location.type, allocation.location.id) == (1, 1, 3)
    assert mapped == [1 << 40, 4 * MB, 0, 77, 0]
    assert released == [77]
    assert (access[:2], access[3]) == ([1 << 40, 4 * MB], 1)
    assert [(each.flags, each.location.id) for each in access[2]] == [(3, 3)]
    driver.unmap(1 << 40, 4 * MB)
    driver.free(1 << 40, 8 * MB)
    assert library.calls[4:] == [("cuMemUnmap", [1 << 40, 4 * MB]), ("cuMemAddressFree", [1 << 40, 8 * MB])]


def test_memory_that_torch_keeps_is_asked_for_before_there_is_too_little(library: FakeLibrary) -> None:
    driver = VirtualMemory(torch.device("cuda", 3))
    library.calls.clear()
    library.statuses["cuMemCreate"] = [2]
    driver.map(1 << 40, 4 * MB)
    names = [name for name, _ in library.calls]
    assert names == ["cuMemCreate", "release", "cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess"]
    library.statuses["cuMemCreate"] = [2, 2]
    with pytest.raises(torch.OutOfMemoryError, match=r"0\.00 GB of cuda:3 are needed, and 0\.01 are free; free as"):
        driver.map(1 << 40, 4 * MB)
    for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        library.statuses[name] = [1]
        with pytest.raises(RuntimeError, match=rf"refuses {name} \(CUDA error 1\)"):
            driver.map(1 << 40, 4 * MB)
