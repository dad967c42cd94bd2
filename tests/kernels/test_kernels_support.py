"""The kind of kernels that a device runs, and the warning if it could run faster ones. The GPU is a fake."""

from __future__ import annotations

import re
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


def test_an_unknown_or_missing_triton_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0"):
        assert on(H200, version, monkeypatch) == ("gluon", "")
        assert on(A100, version, monkeypatch) == ("triton", "")
    for chip, version, kind, words in (
        (
            H200,
            "3.10.0",
            "triton",
            "Triton 3.10.0 is .* Hopper are off, layers in fp8 do not .* may depend on the schedule",
        ),
        (A100, "3.10.0", "triton", "Triton 3.10.0 is unknown((?!Hopper).)*install torch 2.11 to 2.15((?!Hopper).)*$"),
        (H200, None, "torch", "Triton is not installed"),
    ):
        found, reported = on(chip, version, monkeypatch)
        assert found == kind
        assert re.match(words, reported), reported
    assert kernels_of(torch.device("cpu")) == "torch"


def test_a_start_warns_once_and_never_on_the_cpu(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Generator(llama, device="cpu") as gen:
        assert gen.config.kernels == "torch"
    assert not caplog.records
    monkeypatch.setattr("fastgen.engine.startup.slower_than_possible", lambda device: "kernels are slow")
    with Generator(llama, device="cpu"):
        pass
    assert [record.getMessage() for record in caplog.records] == ["cpu: kernels are slow"]
