"""The kind of kernels that a device runs, and the warning if it could run faster ones. The GPU is a fake."""

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
    """Return the kind of kernels of a GPU with this version of Triton (None: not installed), and the warning."""
    monkeypatch.setattr(Chip, "of", lambda device: chip)
    monkeypatch.setattr(launch, "triton", version and SimpleNamespace(__version__=version))
    known = launch.version() in launch.KNOWN_TRITON
    monkeypatch.setattr(launch, "KNOWN", known)
    monkeypatch.setattr(launch, "GLUON", known)
    return kernels_of(GPU), slower_than_possible(GPU)


def test_a_known_triton_runs_the_fastest_kernels_of_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0"):
        assert on(H200, version, monkeypatch) == ("gluon", "")
        assert on(A100, version, monkeypatch) == ("triton", "")


def test_an_unknown_or_missing_triton_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, reported = on(H200, "3.10.0", monkeypatch)
    assert kind == "triton"
    assert "Triton 3.10.0 is unknown" in reported
    assert "fastest kernels for Hopper are off, and results may depend on the schedule" in reported
    assert "install torch 2.11 to 2.15" in reported
    kind, reported = on(A100, "3.10.0", monkeypatch)
    assert kind == "triton"
    assert "Hopper" not in reported
    kind, reported = on(H200, None, monkeypatch)
    assert kind == "torch"
    assert reported.startswith("Triton is not installed")


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
