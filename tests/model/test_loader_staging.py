"""model/loader.py, on the CPU with ordinary buffers: the same tensors as read one by one, and an end to every
trouble."""

from __future__ import annotations

import io
import json
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastgen.model import loader
from fastgen.model.loader import Piece, load, stage
from fastgen.model.weights import Shard

CPU = torch.device("cpu")
SHAPES = {"a": (300, 24), "b": (7,), "c": (24, 300), "d": (), "e": (0, 8), "f": (40, 24), "g": (3, 5, 7)}


def write_tensors(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtypes[place % len(dtypes)])
        for place, (name, shape) in enumerate(SHAPES.items())
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def empty_targets(dtype: torch.dtype) -> dict[str, Shard]:
    """a and f are rows of one parameter; c is a part of each row of another."""
    fused = torch.nn.Parameter(torch.full((340, 24), torch.nan, dtype=dtype))
    wide = torch.full((24, 900), torch.nan, dtype=dtype)
    views = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in SHAPES.items()}
    views |= {"a": fused[:300], "f": fused[300:], "c": wide[:, 300:600]}
    return {name: Shard.whole(view) for name, view in views.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("buffer", [2400, 1 << 20])
def test_what_is_staged_is_what_is_copied(dtype: torch.dtype, buffer: int, tmp_path: Path) -> None:
    tensors, targets = write_tensors(tmp_path), empty_targets(dtype)
    stage(loader._pieces(targets, tmp_path), CPU, buffer=buffer)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].view, tensor.to(dtype)), name
    wide = targets["c"].view._base
    assert wide is not None
    assert wide[:, :300].isnan().all()
    assert wide[:, 600:].isnan().all()
    assert torch.is_grad_enabled()


def cut(part: Shard, tensor: Tensor) -> Tensor:
    """The slice of a part, in numpy's words."""
    end = part.start + part.view.shape[part.dim]
    return tensor[part.start : end] if part.dim == 0 else tensor[:, part.start : end]


def random_slices(tensors: dict[str, Tensor], ranks: int, dtype: torch.dtype, seed: int) -> list[dict[str, Shard]]:
    """Each tensor cut along rows or columns, at random places, for so many ranks; into views that are contiguous, or
    columns of something larger. Some slices are empty."""
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


@pytest.mark.parametrize("seed", range(20))
def test_each_rank_reads_its_slices_and_no_more(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    rows_of = loader._mapped_rows

    def counted_rows(file: int, part: Piece) -> Any:
        rows = rows_of(file, part)
        counts.append(rows.nbytes)
        return rows

    class CountedFile(io.FileIO):
        def readinto(self, into: Any) -> int:
            count = super().readinto(into)
            assert count is not None
            counts.append(count)
            return count

    monkeypatch.setattr(loader, "open", lambda path, mode, buffering: CountedFile(path, mode), raising=False)
    monkeypatch.setattr(loader, "_mapped_rows", counted_rows)
    tensors = {name: tensor for name, tensor in write_tensors(tmp_path).items() if tensor.ndim}
    save_file(tensors, tmp_path / "model.safetensors")
    dtype = torch.float32 if seed % 2 else torch.bfloat16
    for targets in random_slices(tensors, 1 + seed % 4, dtype, seed):
        counts.clear()
        stage(loader._pieces(targets, tmp_path), CPU, buffer=2400 if seed % 3 else None)
        for name, part in targets.items():
            assert torch.equal(part.view, cut(part, tensors[name]).to(dtype)), name
            around = part.view._base
            if around is not None:
                assert around.isnan().sum() == around.numel() - part.view.numel(), "something beside it was written"
        assert sum(counts) == sum(part.view.numel() * tensors[name].itemsize for name, part in targets.items())


def test_columns_of_a_file_of_many_pages(tmp_path: Path) -> None:
    """Parts of it begin anywhere in a page, and the last one ends where the file does."""
    tensor = torch.randn(3000, 501)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    views = [torch.zeros(3000, 167) for _ in range(3)]
    for rank, view in enumerate(views):
        stage(loader._pieces({"w": Shard(view, (3000, 501), 1, 167 * rank)}, tmp_path), CPU, buffer=100_000)
    assert torch.equal(torch.cat(views, 1), tensor)


def test_load_takes_this_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, targets = write_tensors(tmp_path), empty_targets(torch.float32)
    load(targets, tmp_path, progress=True)
    assert all(torch.equal(targets[name].view, tensor.float()) for name, tensor in tensors.items())
    shown = capsys.readouterr().err
    assert "100%" in shown
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert f"{total / 1000:.1f}k/{total / 1000:.1f}k" in shown


def test_tensors_may_lie_at_odd_places_in_a_file(tmp_path: Path) -> None:
    values = torch.arange(100, dtype=torch.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}).encode()
    header += b" " * (1 - len(header) % 2)
    assert (8 + len(header)) % 2 == 1
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.numpy().tobytes())
    view = torch.zeros(100)
    load({"w": Shard.whole(view)}, tmp_path)
    assert torch.equal(view, values)


def test_nothing_is_copied_where_something_is_wrong(tmp_path: Path) -> None:
    write_tensors(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"h": Shard.whole(torch.zeros(1))}, "missing 1 of 8 tensors: h"),
        ({"b": Shard.whole(torch.zeros(8))}, r"tensor 'b' has shape \[7\]; the model needs \[8\]"),
    ]
    for change, message in cases:
        targets = {**empty_targets(torch.float32), **change}
        with pytest.raises(ValueError, match=message):
            load(targets, tmp_path)
        assert targets["a"].view.isnan().all()
    save_file({"b": torch.zeros(7, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'b' is I8; bfloat16, float16 and float32 weights are supported"):
        load({"b": Shard.whole(torch.zeros(7))}, tmp_path)
    with pytest.raises(ValueError, match=r"unexpected tensor 'b'"):
        loader._pieces({}, tmp_path)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("left", [0, 100, 10_000, -2])
def test_a_file_that_shrinks_while_it_is_read(left: int, columns: bool, tmp_path: Path) -> None:
    """Above all it must not end the process, as a mapped page would that is gone."""
    save_file({"w": torch.zeros(200, 200)}, tmp_path / "model.safetensors")
    view = torch.zeros(200, 50) if columns else torch.zeros(50, 200)
    pieces = loader._pieces({"w": Shard(view, (200, 200), int(columns), 150)}, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated; delete it and fetch it again"):
        stage(pieces, CPU, buffer=2400)


def test_after_an_error_nobody_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good").write_bytes(b"\0" * 4000)
    good = [Piece(tmp_path / "good", 0, torch.float32, torch.zeros(1000)) for _ in range(1000)]
    read: list[Path] = []
    failed = threading.Event()

    def fill(buffer: Tensor, part: Piece) -> None:
        if part.path.name == "gone":
            failed.set()
            raise FileNotFoundError(part.path)
        failed.wait(10)
        read.append(part.path)

    monkeypatch.setattr(loader, "THREADS", 2)
    monkeypatch.setattr(loader, "_fill", fill)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(FileNotFoundError, match="gone"):
        stage([good[0], Piece(tmp_path / "gone", 0, torch.float32, torch.zeros(1000)), *good], CPU)
    assert len(read) < 1000


def test_an_interrupt_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tensors(tmp_path)
    pieces = loader._pieces(empty_targets(torch.float32), tmp_path)

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage(pieces, CPU)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fastgen-load")]


def test_nothing_to_read() -> None:
    stage([], CPU)
    stage([Piece(Path("not read"), 0, torch.float32, torch.zeros(0))], CPU)
