"""Random adapters with PEFT's names, and their merge by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastgen.model.adapter import LINEARS
from fastgen.model.config import read_config
from fastgen.model.parameters import checkpoint_shards

ALL = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
       "input_linear", "output_linear")  # fmt: skip
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": list(ALL), "bias": "none", "use_rslora": False,
    "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "init_lora_weights": True, "use_dora": False,
    "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "base_model_name_or_path": "x", "layer_replication": None,
    "megatron_core": "megatron.core", "loftq_config": {}, "layers_to_transform": None,
}  # fmt: skip
PREFIX = "base_model.model."


def base_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def adapter(
    folder: Path, layers: tuple[str, ...] = ALL, rank: Callable[[str], int] = lambda _: 4, seed: int = 0, name: str = ""
) -> dict[str, Tensor]:
    """A random adapter of these layers of a model, with PEFT's names."""
    source = torch.Generator().manual_seed(seed)
    made = {}
    for weight, shard in checkpoint_shards(read_config(folder)).items():
        layer = weight.removesuffix(".weight")
        if layer.endswith(tuple(f".{name}" for name in layers)) and weight.endswith(LINEARS):
            outputs, inputs = shard.shape
            made[f"{PREFIX}{layer}.lora_A{name}.weight"] = torch.randn(rank(layer), inputs, generator=source) * 0.2
            made[f"{PREFIX}{layer}.lora_B{name}.weight"] = torch.randn(outputs, rank(layer), generator=source) * 0.2
    return made


def merged(
    folder: Path, state: dict[str, Tensor], scaling: Callable[[str], float] = lambda _: 1.5, dtype: Any = None
) -> dict[str, Tensor]:
    """The weights of a model with an adapter, merged by hand."""
    weights = base_of(folder)
    for name, a in state.items():
        if ".lora_A" in name:
            layer = name.removeprefix(PREFIX).partition(".lora_A")[0]
            b = state[name.replace("lora_A", "lora_B")]
            base = weights[layer + ".weight"].to(dtype)
            weights[layer + ".weight"] = (base.float() + scaling(layer) * b.float() @ a.float()).to(dtype)
    return weights


def save_adapter(folder: Path, state: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
