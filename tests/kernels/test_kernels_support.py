"""Which kernels run on a device, and the warning where faster ones exist. A GPU is simulated: its type and its chip."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastgen import Generator
from fastgen.device.chip import Chip
from fastgen.kernels import launch
from fastgen.kernels.launch import kernels_of, slower_than_possible

GPU = torch.device("cuda:0")
H200, A100 = Chip((9, 0), 132, 232_448), Chip((8, 0), 108, 166_912)


def on(chip: Chip, version: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return what `support` says of a GPU of this kind with this Triton, None for none."""
    monkeypatch.setattr(Chip, "of", lambda device: chip)
    monkeypatch.setattr(launch, "triton", version and SimpleNamespace(__version__=version))
    known = launch.version() in launch.KNOWN_TRITON
    monkeypatch.setattr(launch, "KNOWN", known)
    monkeypatch.setattr(launch, "GLUON", known)
    return kernels_of(GPU), slower_than_possible(GPU)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_a_known_triton_runs_the_fastest_kernels_of_a_chip(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(H200, version, monkeypatch) == ("gluon", "")
    assert on(A100, version, monkeypatch) == ("triton", "")


def test_an_unknown_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, told = on(H200, "3.10.0", monkeypatch)
    assert kind == "triton"
    assert "Triton 3.10.0 is unknown" in told
    assert "fastest kernels for Hopper are off, and results may depend on the schedule" in told
    assert "install torch 2.11 to 2.15" in told
    kind, told = on(A100, "3.10.0", monkeypatch)
    assert kind == "triton"
    assert "Hopper" not in told


def test_a_missing_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for chip in (H200, A100):
        kind, told = on(chip, None, monkeypatch)
        assert kind == "torch"
        assert told.startswith("Triton is not installed")


def test_the_cpu_runs_torch_and_a_generator_says_so(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(H200, "3.10.0", monkeypatch)
    assert kernels_of(torch.device("cpu")) == "torch"
    with caplog.at_level("WARNING"), Generator(llama, device="cpu") as gen:
        assert gen.config.kernels == "torch"
    assert not caplog.records


def test_a_start_warns_once(llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(
        "fastgen.engine.startup.slower_than_possible", lambda device: "kernels are slow; install another"
    )
    with caplog.at_level("WARNING"), Generator(llama, device="cpu"):
        pass
    assert [record.getMessage() for record in caplog.records] == ["cpu: kernels are slow; install another"]
