"""parameters.py: the parts of tensors that ranks hold, and layers that are packed and unpacked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Checkpoint, new_weights

from fastgen.device import mkl
from fastgen.model.config import read_config
from fastgen.model.packed import PackedLinear
from fastgen.model.parameters import Layer, Parameters, checkpoint_shards
from fastgen.model.weights import write

CPU, META = torch.device("cpu"), torch.device("meta")


def of_rank(folder: Path, rank: int, size: int, device: torch.device = META) -> Parameters:
    group: Any = SimpleNamespace(rank=rank, size=size)
    return Parameters(read_config(folder), torch.float32, device, group)


def test_ranks_that_hold_the_same_kv_head_are_neighbours(checkpoint: Checkpoint) -> None:
    """Each rank has the KV head of its own query heads."""
    folder = checkpoint("Llama", num_attention_heads=8, num_key_value_heads=2)
    starts: dict[str, list[int]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    for rank in range(4):
        targets = of_rank(folder, rank, 4).targets()
        for name, found in starts.items():
            found.append(targets[f"model.layers.0.self_attn.{name}.weight"].start // read_config(folder).head_size)
    assert starts == {"q_proj": [0, 2, 4, 6], "k_proj": [0, 0, 1, 1], "v_proj": [0, 0, 1, 1]}


def test_layers_hold_the_parts_of_each_rank(checkpoint: Checkpoint) -> None:
    """The rows of q, k, v, gate and up, and the columns of o and down, whose biases one rank adds."""
    folder = checkpoint("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    weights = new_weights(folder)

    def half(name: str, rank: int, dim: int) -> torch.Tensor:
        return weights[name].chunk(2, dim)[rank]

    def rows(*names: str, rank: int, kind: str = "weight") -> torch.Tensor:
        return torch.cat([half(f"model.layers.1.{name}_proj.{kind}", rank, 0) for name in names])

    for rank in range(2):
        parameters = of_rank(folder, rank, 2, CPU)
        write(parameters.targets(), weights.items())
        layer, qkv = parameters.layers[1], ("self_attn.q", "self_attn.k", "self_attn.v")
        for linear, names in ((layer.qkv, qkv), (layer.gate_up, ("mlp.gate", "mlp.up"))):
            assert torch.equal(linear.weight, rows(*names, rank=rank))
            assert linear.bias is not None
            assert torch.equal(linear.bias, rows(*names, rank=rank, kind="bias"))
        for linear, name in (
            (layer.o, "model.layers.1.self_attn.o_proj"),
            (layer.down, "model.layers.1.mlp.down_proj"),
        ):
            assert torch.equal(linear.weight, half(f"{name}.weight", rank, 1))
            assert (linear.bias is None) == bool(rank)
            assert linear.bias is None or torch.equal(linear.bias, weights[f"{name}.bias"])
        assert torch.equal(layer.post_norm.weight, weights["model.layers.1.post_attention_layernorm.weight"])
        assert torch.equal(parameters.norm.weight, weights["model.norm.weight"])
        assert torch.equal(parameters.embedding, half("model.embed_tokens.weight", rank, 0))
        assert torch.equal(parameters.lm_head.weight, half("lm_head.weight", rank, 0))


def test_the_table_has_the_tensors_of_transformers(family: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in new_weights(family).items()}
    assert {name: shard.shape for name, shard in checkpoint_shards(read_config(family)).items()} == shapes


def test_one_layer_of_each_kind_stands_for_all(llama: Path) -> None:
    config = replace(read_config(llama), num_layers=5, windows=(0, 8, 8, 0, 8))
    assert Parameters(config, torch.bfloat16, META).distinct == [3, 4]


@pytest.mark.skipif(not mkl.PACKS, reason="this torch has no MKL")
@pytest.mark.parametrize("tied", [False, True])
def test_a_pack_that_fails_midway_is_undone(
    tied: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("Llama", tie_word_embeddings=tied)
    weights, parameters = new_weights(folder), of_rank(folder, 0, 1, CPU)
    write(parameters.targets(), weights.items())

    def kinds() -> set[type]:
        return {type(linear) for layer in parameters.layers for linear in layer.linears}

    with monkeypatch.context() as patch:
        patch.setattr(Layer, "__setattr__", fail_at_down)
        with pytest.raises(MemoryError):
            parameters.pack()
    assert len(kinds()) == 2
    for _ in range(2):
        parameters.unpack()
        for name, shard in parameters.targets().items():
            assert torch.equal(shard.view, weights[name]), name
        assert (parameters.lm_head.weight is parameters.embedding) == tied
        parameters.pack()
        assert kinds() == {type(parameters.lm_head)} == {PackedLinear}


def fail_at_down(layer: Layer, name: str, value: object) -> None:
    if name == "down":
        raise MemoryError
    object.__setattr__(layer, name, value)
