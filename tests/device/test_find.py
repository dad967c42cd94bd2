"""find.py: the device that a start takes, and the errors and warnings that say why it is not the one you expect."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastgen.device import find
from fastgen.device.find import find_device

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver."
FULL = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
TOLD_OLD = r"cuda:0 is a Tesla T4 of compute capability 7\.5, and fastgen needs 8\.0 or higher.*use device='cpu'$"
TOLD_FULL = r"device is 'cuda.*: CUDA error: out of memory; end the programs that hold its memory.*use device='cpu'$"


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    driver: str | None = None,
    full: bool = False,
    capability: tuple[int, int] = (8, 0),
    count: int = 1,
) -> None:
    """Let torch behave as on a machine with `count` GPUs. driver: why CUDA does not start there, as torch tells it."""
    empty = torch.empty

    def init() -> None:
        if driver is not None:
            raise RuntimeError(driver)

    def is_available() -> bool:
        if driver is not None and count:
            warnings.warn(f"CUDA initialization: {driver}", stacklevel=2)
        return driver is None

    def make_empty(size: int, device: str) -> torch.Tensor:
        if torch.device(device).type == "cuda":
            init()
        return empty(size, device="cpu")

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        if full:
            raise torch.AcceleratorError(FULL)
        return 8 * 10**9, 16 * 10**9

    properties = SimpleNamespace(name="Tesla T4", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch, "empty", make_empty)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (
        ("init", init), ("is_available", is_available), ("mem_get_info", mem_get_info), ("device_count", lambda: count),
        ("current_device", lambda: 0), ("get_device_properties", lambda device: properties),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0"])
def test_a_gpu_is_found_or_an_error_says_why_not(
    asked: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch)
    assert find_device(asked) == "cuda:0"
    pretend(monkeypatch, capability=(7, 5))
    with pytest.raises(ValueError, match=TOLD_OLD):
        find_device(asked)
    assert find_device("cpu") == "cpu"
    pretend(monkeypatch, full=True)
    with pytest.raises(ValueError, match=TOLD_FULL):
        find_device(asked)
    assert not caplog.records


@pytest.mark.parametrize("name", ["mps", "xpu", "vulkan", "privateuseone", "gpu", "CPU", "", "cuda:x"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^device is '{name}'; fastgen runs on 'cpu' and on 'cuda', or 'cuda:1' and"):
        find_device(name)
    assert find_device("cpu:0") == "cpu"


@pytest.mark.filterwarnings("error")
def test_an_old_driver_is_an_error_where_the_gpu_is_asked_for_and_else_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, driver=OLD_DRIVER)
    assert find_device(None) == "cpu"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.match(r"the model runs on the CPU, .*found version 11040\).*; device='cpu' runs", record.getMessage())
    with pytest.raises(ValueError, match=r"found version 11040\)\. Please.* GPU driver; device='cpu' needs no GPU$"):
        find_device("cuda")


def test_a_torch_without_cuda_is_one_warning_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, driver="", count=0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(find, "Path", lambda folder: {"/dev": tmp_path}[folder])
    (tmp_path / "nvidiactl").touch()
    assert find_device(None) == find_device(None, ranks=2) == "cpu"
    assert not caplog.records
    (tmp_path / "nvidia0").touch()
    assert find_device("cpu") == find_device(None, ranks=2) == "cpu"
    (record,) = caplog.records
    assert "this torch is built without CUDA; device='cpu' runs" in record.getMessage()


def test_the_cpu_needs_no_warning_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, driver="No CUDA GPUs are available", count=0)
    assert find_device(None) == find_device(None, ranks=2) == "cpu"
    assert not caplog.records
    with pytest.raises(ValueError, match=r"No CUDA GPUs are available; device='cpu' needs no GPU$"):
        find_device("cuda")


def test_ranks_take_the_first_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert find_device(None, ranks=2) == find_device("cuda", ranks=2) == "cuda:0"
    with pytest.raises(ValueError, match="tensor_parallel is 3, and torch finds 2 GPUs here; lower it, or use device"):
        find_device(None, ranks=3)
    with pytest.raises(ValueError, match="device is 'cuda:1'; with tensor_parallel it is 'cpu', or 'cuda' for the f"):
        find_device("cuda:1", ranks=2)
    pretend(monkeypatch, driver=OLD_DRIVER, count=2)
    with pytest.raises(ValueError, match=r"device is 'cuda:0', which torch cannot use here: .*device='cpu' needs no G"):
        find_device("cuda", ranks=2)
