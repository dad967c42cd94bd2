"""loader.py: the slices of mapped files that ranks hold are copied into their views, and nothing else is read."""

from __future__ import annotations

import json
import random
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from fastgen.model import loader
from fastgen.model.loader import load
from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import Shard, write

SHAPES = {"a": (300, 24), "b": (7,), "c": (24, 300), "e": (0, 8), "f": (40, 24), "g": (3, 5, 7)}


def write_tensors(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    tensors = {}
    for place, (name, shape) in enumerate(SHAPES.items()):
        dtype = dtypes[place % len(dtypes)]
        scale = 1e6 if dtype == torch.bfloat16 else 1.0  # values that float16 cannot hold
        tensors[name] = (scale * torch.randn(shape, generator=generator)).to(dtype)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def random_slices(tensors: dict[str, Tensor], ranks: int, dtype: torch.dtype, seed: int) -> list[dict[str, Shard]]:
    """Return shards of each tensor cut for `ranks` ranks at random places, along rows or columns, into views that are
    contiguous or columns of a larger tensor. Some slices are empty."""
    draw = random.Random(seed)
    held: list[dict[str, Shard]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        dim = draw.randrange(min(tensor.ndim, 2))
        cuts = [0, *sorted(draw.randrange(tensor.shape[dim] + 1) for _ in range(ranks - 1)), tensor.shape[dim]]
        for targets, start, end in zip(held, cuts, cuts[1:], strict=False):
            shape = list(tensor.shape)
            shape[dim] = end - start
            view = torch.full(shape, torch.nan, dtype=dtype)
            if draw.random() < 0.5 and tensor.ndim > 1:
                view = torch.full([shape[0], shape[1] + 7, *shape[2:]], torch.nan, dtype=dtype)[:, 3 : 3 + shape[1]]
            targets[name] = Shard(view, tuple(tensor.shape), dim, 0 if end - start == tensor.shape[dim] else start)
    return held


def fill(targets: dict[str, Shard], source: Path | dict[str, Tensor]) -> None:
    """Load a folder into targets, or write given tensors to them."""
    if isinstance(source, Path):
        load(targets, source, progress=True)
    else:
        write(targets, WeightUpdate(source, targets).tensors())


@pytest.mark.parametrize("way", ["read", "given"])
@pytest.mark.parametrize("seed", range(12))
def test_each_rank_takes_its_slices_and_no_more(
    seed: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "PIECE_BYTES", 2400 if seed % 3 else 1 << 20)
    tensors = write_tensors(tmp_path)
    dtype = torch.float32 if seed % 2 else torch.bfloat16
    for targets in random_slices(tensors, 1 + seed % 4, dtype, seed):
        fill(targets, tensors if way == "given" else tmp_path)
        if way == "read":
            read = sum(shard.view.numel() * tensors[name].itemsize for name, shard in targets.items())
            assert f"/{tqdm.format_sizeof(read)}" in capsys.readouterr().err
        for name, shard in targets.items():
            end = shard.start + shard.view.shape[shard.dim]
            part = tensors[name][shard.start : end] if shard.dim == 0 else tensors[name][:, shard.start : end]
            assert torch.equal(shard.view, part.to(dtype)), name
            around = shard.view._base
            if around is not None:
                assert around.isnan().sum() == around.numel() - shard.view.numel(), "something around it was written"


def test_tensors_may_lie_at_odd_places_in_a_file(tmp_path: Path) -> None:
    values = torch.arange(100, dtype=torch.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}).encode()
    header += b" " * (1 - len(header) % 2)
    assert (8 + len(header)) % 2 == 1
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.numpy().tobytes())
    view = torch.zeros(100)
    load({"w": Shard.whole(view)}, tmp_path)
    assert torch.equal(view, values)


def test_nothing_is_copied_if_a_tensor_does_not_match(tmp_path: Path) -> None:
    write_tensors(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"h": Shard.whole(torch.zeros(1))}, "missing 1 of 7 tensors: h"),
        ({"b": Shard.whole(torch.zeros(8))}, r"tensor 'b' has shape \[7\]; the model needs \[8\]"),
        # A tensor that is a rank's slice already.
        ({"b": Shard(torch.zeros(7), (14,), 0, 7)}, r"tensor 'b' has shape \[7\]; the model needs \[14\]"),
    ]
    for change, message in cases:
        targets = {name: Shard.whole(torch.full(shape, torch.nan)) for name, shape in SHAPES.items()} | change
        with pytest.raises(ValueError, match=message):
            load(targets, tmp_path)
        assert targets["a"].view.isnan().all()
    save_file({"b": torch.zeros(7, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"tensor 'b' is I8; bfloat16, float16, float32 and float64 weights are supported"
    ):
        load({"b": Shard.whole(torch.zeros(7))}, tmp_path)
    with pytest.raises(ValueError, match=r"unexpected tensor 'b'"):
        load({"a": Shard.whole(torch.zeros(7))}, tmp_path)


@pytest.mark.parametrize("error", [FileNotFoundError, KeyboardInterrupt])
def test_after_an_error_the_threads_end(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.zeros(1000, 10)}, tmp_path / "model.safetensors")
    read: list[int] = []

    def fail(threads: int) -> None:
        read.append(1)
        time.sleep(0.002)  # else a busy machine may read all pieces before the first error is seen
        raise error

    monkeypatch.setattr(loader, "PIECE_BYTES", 40)
    monkeypatch.setattr(loader, "at_most", fail)
    with pytest.raises(error):
        load({"w": Shard.whole(torch.zeros(1000, 10))}, tmp_path)
    assert len(read) < 1000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastgen-load")]
