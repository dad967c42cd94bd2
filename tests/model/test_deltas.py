"""Sparse deltas: a partial update with the changed elements is the update with the whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FEW, random_ids
from safetensors.torch import load_file
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.model.deltas import AT_ONCE, Delta, DeltaTarget
from fastgen.model.weights import Shard

SHORT = SamplingParams(max_tokens=8, seed=7, ignore_eos=True)
PROMPTS = [random_ids(5), random_ids(20)]


def changed(weights: dict[str, Tensor], share: float = 0.05) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights in which some elements are new, and these elements as deltas."""
    draw = torch.Generator().manual_seed(0)
    new, deltas = {}, {}
    for name, tensor in weights.items():
        chosen = torch.rand(tensor.shape, generator=draw) < share
        new[name] = torch.where(chosen, torch.randn(tensor.shape, generator=draw).to(tensor.dtype), tensor)
        indices = chosen.view(-1).nonzero().squeeze(1)
        deltas[name] = indices, new[name].view(-1)[indices]
    return new, deltas


def answers(gen: Generator) -> list[Any]:
    return [(each.token_ids, each.logprobs) for output in gen.generate(PROMPTS, SHORT) for each in output.completions]


@pytest.mark.parametrize("family", [*FEW, "phi3"], indirect=True)  # with tensors that are fused here, and in the file
def test_deltas_are_the_update_with_whole_tensors(family: Path) -> None:
    new, deltas = changed(load_file(family / "model.safetensors"))
    with Generator(family, page_size=16, num_pages=64) as gen:
        old = answers(gen)
        gen.update_weights(new)
        expected = answers(gen)
        gen.update_weights(load_file(family / "model.safetensors"))
        assert answers(gen) == old != expected
        mixed: dict[str, Any] = {**deltas, "model.norm.weight": new["model.norm.weight"]}
        assert gen.update_weights(mixed, partial=True) == gen.weight_version == 3
        assert answers(gen) == expected
        gen.update_weights(iter(mixed.items()), partial=True)  # again, which changes nothing
        assert answers(gen) == expected


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ((torch.tensor([5, 3]), torch.ones(2)), "do not increase; sort them"),
        ((torch.tensor([3, 3]), torch.ones(2)), "do not increase; sort them, each one once$"),
        ((torch.tensor([3, 1 << 40]), torch.ones(2)), "indices outside of its"),
        ((torch.tensor([-1, 3]), torch.ones(2)), "indices outside of its"),
        ((torch.tensor([1, 3]), torch.ones(3)), r"shapes \[2\] and \[3\]; give two vectors"),
        ((torch.tensor([1.0]), torch.ones(1)), "give indices in int64"),
        ((torch.tensor([1]), torch.ones(1, dtype=torch.int32)), "values in a float dtype"),
        ((torch.tensor([1]),), "not a pair of tensors"),
        ((torch.tensor([1]), [2.0]), "not a pair of tensors"),
    ],
)
def test_a_wrong_delta_is_refused_before_anything_is_written(talker: Path, delta: Any, message: str) -> None:
    weights = load_file(talker / "model.safetensors")
    _, deltas = changed(weights)
    with Generator(talker, page_size=16, num_pages=64) as gen:
        old = answers(gen)
        with pytest.raises(ValueError, match=message):
            gen.update_weights({**deltas, "model.layers.0.self_attn.q_proj.weight": delta}, partial=True)
        with pytest.raises(ValueError, match="which only partial=True allows"):
            gen.update_weights({**weights, "model.norm.weight": deltas["model.norm.weight"]})
        with pytest.raises(ValueError, match="unexpected tensor 'x'"):
            gen.update_weights({**deltas, "x": deltas["model.norm.weight"]}, partial=True)
        assert not gen.needs_weights
        assert (answers(gen), gen.weight_version) == (old, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((12, 10), 0), ((10, 12), 1), ((12,), 0)])
def test_each_rank_writes_its_slice(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice is often a part of a fused parameter."""
    monkeypatch.setattr("fastgen.model.deltas.AT_ONCE", 7)
    assert AT_ONCE > 7
    whole = {"weight": torch.randn(shape).to(dtype)}
    new, deltas = changed(whole, 0.4)
    for start in (0, 4, 8):
        fused = torch.zeros([size if axis != dim else 4 for axis, size in enumerate(shape)], dtype=dtype)
        fused = torch.cat((torch.zeros_like(fused), fused))
        view = fused[len(fused) // 2 :]
        view.copy_(whole["weight"].narrow(dim, start, 4))
        DeltaTarget(Shard(view, shape, dim, start)).write(Delta.of("weight", deltas["weight"]).packed)
        assert torch.equal(view, new["weight"].narrow(dim, start, 4))
        assert not fused[: len(fused) // 2].any()


def test_quantized_weights_take_no_deltas() -> None:
    shard = Shard(torch.zeros(4, 4), (4, 4), scales=torch.ones(4))
    with pytest.raises(ValueError, match="is quantized"):
        Delta.of("a", (torch.tensor([1]), torch.ones(1))).check("a", shard, partial=True)
