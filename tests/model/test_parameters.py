"""parameters.py: the parts of tensors that ranks hold, and layers that are packed and unpacked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FAMILIES, HYBRIDS, Checkpoint, new_weights

from fastgen.model.config import read_config
from fastgen.model.parameters import Parameters, checkpoint_shards
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


def test_ranks_hold_halves_of_rows_and_columns(checkpoint: Checkpoint) -> None:
    """o and down are split into columns, and rank 0 adds their biases; norms are whole."""
    folder = checkpoint("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    weights = new_weights(folder)
    for rank in range(2):
        parameters = of_rank(folder, rank, 2, CPU)
        write(parameters.targets(), weights.items())
        for name, shard in parameters.targets().items():
            whole = weights[name]
            if "norm" in name:
                expected = whole
            elif name.endswith(("o_proj.bias", "down_proj.bias")):
                expected = whole if rank == 0 else whole[:0]
            else:
                expected = whole.chunk(2, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)[rank]
            assert torch.equal(shard.view, expected), name
        assert [layer.o.bias is None for layer in parameters.layers] == [bool(rank)] * len(parameters.layers)


def test_ranks_hold_parts_of_each_module_of_a_fused_tensor(checkpoint: Checkpoint) -> None:
    folder = checkpoint("Phi3", num_attention_heads=8, num_key_value_heads=2, pad_token_id=0)
    weights, name = new_weights(folder), "model.layers.1.self_attn.qkv_proj.weight"
    inner = "model.layers.1.mlp.gate_up_proj.weight"
    q, k, v = weights[name].split([64, 16, 16])
    gate, up = weights[inner].chunk(2)
    for rank in range(4):
        parameters = of_rank(folder, rank, 4, CPU)
        write(parameters.targets(), weights.items())
        expected = torch.cat([q.chunk(4)[rank], k.chunk(2)[rank // 2], v.chunk(2)[rank // 2]])
        shard = parameters.targets()[name]
        assert torch.equal(shard.view, expected)
        assert torch.equal(torch.cat([part.slice(weights[name]) for part in shard.separated()]), expected)
        assert torch.equal(parameters.targets()[inner].view, torch.cat([gate.chunk(4)[rank], up.chunk(4)[rank]]))


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS], indirect=True)
def test_the_table_has_the_tensors_of_transformers(family: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in new_weights(family).items()}
    assert {name: shard.shape for name, shard in checkpoint_shards(read_config(family)).items()} == shapes


def test_one_layer_of_each_kind_stands_for_all(llama: Path) -> None:
    config = replace(read_config(llama), num_layers=5, windows=(0, 8, 8, 0, 8))
    assert Parameters(config, torch.bfloat16, META).distinct == [3, 4]
