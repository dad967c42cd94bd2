"""loader.py, the slices that one rank of several holds: which they are, and where they go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_loader import write_sharded
from torch import Tensor

from fastgen.model.loader import fill_random, load
from fastgen.model.weights import Shard, Update, write

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCAB = 24, 8, 2, 4, 40, 16
Q, K, V, OUT = (f"self_attn.{part}_proj" for part in "qkvo")
GATE, UP, DOWN = (f"mlp.{part}_proj" for part in ("gate", "up", "down"))
OUTPUTS = {Q: HEADS * SIZE, K: KV_HEADS * SIZE, V: KV_HEADS * SIZE, GATE: INNER, UP: INNER}
INPUTS = {OUT: HEADS * SIZE, DOWN: INNER}


def layer_tensors() -> dict[str, Tensor]:
    """The tensors of a layer with all biases, of an embedding and of a norm, in several dtypes."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for name, size in OUTPUTS.items():
        shapes |= {f"{name}.weight": (size, HIDDEN), f"{name}.bias": (size,)}
    for name, size in INPUTS.items():
        shapes |= {f"{name}.weight": (HIDDEN, size), f"{name}.bias": (HIDDEN,)}
    draw = torch.Generator().manual_seed(0)
    # Values of bfloat16 that float16 does not hold, so that one is not read as the other.
    kinds = [(torch.bfloat16, 1e6), (torch.float16, 1.0), (torch.float32, 1.0), (torch.float64, 1.0)]
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        dtype, scale = kinds[number % 4]
        tensors[name] = (scale * torch.randn(shape, generator=draw)).to(dtype)
    return tensors


def rank_targets(rank: int, ranks: int, dtype: torch.dtype) -> tuple[dict[str, Shard], list[Tensor]]:
    """What a rank holds, as `Transformer` fuses it, filled with NaN; and the parameters themselves.

    Heads, and what is between gate or up and down, are shared out; KV heads are held by several where they are too few;
    the first rank adds the biases of o and down.
    """
    parameters: list[Tensor] = []

    def new(*shape: int) -> Tensor:
        parameters.append(torch.full(shape, torch.nan, dtype=dtype))
        return parameters[-1]

    def share(name: str) -> tuple[int, int]:
        """How many shares there are of a tensor's split dimension, and which one the rank holds."""
        shares = min(ranks, KV_HEADS) if name in (K, V) else ranks
        return shares, rank * shares // ranks

    found = {"norm.weight": Shard.whole(new(HIDDEN))}
    rows = VOCAB // ranks
    found["embed.weight"] = Shard(new(rows, HIDDEN), (VOCAB, HIDDEN), 0, rank * rows)
    for names in ((Q, K, V), (GATE, UP)):
        sizes = [OUTPUTS[name] // share(name)[0] for name in names]
        weight, bias = new(sum(sizes), HIDDEN), new(sum(sizes))
        for name, size, matrix, vector in zip(names, sizes, weight.split(sizes), bias.split(sizes), strict=True):
            start = share(name)[1] * size
            found[f"{name}.weight"] = Shard(matrix, (OUTPUTS[name], HIDDEN), 0, start)
            found[f"{name}.bias"] = Shard(vector, (OUTPUTS[name],), 0, start)
    for name, size in INPUTS.items():
        columns = size // ranks
        found[f"{name}.weight"] = Shard(new(HIDDEN, columns), (HIDDEN, size), 1, rank * columns)
        found[f"{name}.bias"] = Shard(new(HIDDEN if rank == 0 else 0), (HIDDEN,))
    return found, parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("way", ["given", "read"])
def test_the_slices_of_all_ranks_are_the_whole(way: str, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = layer_tensors()
    write_sharded(tmp_path, tensors)
    held = []
    for rank in range(ranks):
        targets, parameters = rank_targets(rank, ranks, dtype)
        if way == "given":
            write(targets, Update(tensors, targets).tensors())
        else:
            load(targets, tmp_path)
        assert not any(parameter.isnan().any() for parameter in parameters)
        held.append({name: part.view for name, part in targets.items()})
    for name, tensor in tensors.items():
        views = [views[name] for views in held]
        if name == "norm.weight":
            assert all(torch.equal(view, tensor.to(dtype)) for view in views)
            continue
        if name.startswith((K, V)):  # each KV head is held by as many ranks as there are a head
            copies = max(ranks // KV_HEADS, 1)
            assert all(torch.equal(view, views[rank // copies * copies]) for rank, view in enumerate(views))
            views = views[::copies]
        dim = 1 if name in (f"{OUT}.weight", f"{DOWN}.weight") else 0
        assert torch.equal(torch.cat(views, dim), tensor.to(dtype)), name


@pytest.mark.parametrize("way", ["given", "read"])
def test_tensors_are_held_to_the_shape_of_the_whole(way: str, tmp_path: Path) -> None:
    def fill(tensors: dict[str, Tensor]) -> None:
        targets, _ = rank_targets(1, 2, torch.float32)
        if way == "given":
            write(targets, Update(tensors, targets).tensors())
        else:
            save_file(tensors, tmp_path / "model.safetensors")
            load(targets, tmp_path)

    good = layer_tensors()
    for name, part in rank_targets(1, 2, torch.float32)[0].items():
        if not part.is_whole:  # as if another had cut it, or had left it out
            shapes = rf"{name}' has shape \[{part.view.shape[0]}.*; the model needs \[{good[name].shape[0]}"
            with pytest.raises(ValueError, match=shapes):
                fill({**good, name: torch.zeros(part.view.shape)})
            with pytest.raises(ValueError, match=rf"missing 1 of 16 tensors: {name}$"):
                fill({other: tensor for other, tensor in good.items() if other != name})


def test_random_values_follow_from_names_and_starts() -> None:
    """Whatever else a rank holds, so that what is replicated is equal; and slices of one tensor differ."""
    first, _ = rank_targets(0, 2, torch.float32)
    without = {name: part for name, part in first.items() if name not in (f"{OUT}.bias", f"{DOWN}.bias")}
    second, parameters = rank_targets(1, 2, torch.float32)
    fill_random(without)
    fill_random(second)
    assert not any(parameter.isnan().any() for parameter in parameters)
    alike = {name: part.start == second[name].start or name.endswith("norm.weight") for name, part in without.items()}
    assert len({*alike.values()}) == 2
    for name, part in without.items():
        assert torch.equal(part.view, second[name].view) == alike[name], name
