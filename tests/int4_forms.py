"""Checkpoints in int4, rounded to the nearest, in the forms that other programs publish.

The packing is written from the publishers' descriptions, number by number, and shares no code with fastgen's readers,
which are tested with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each 8 that nibble i of a word holds
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Weight:
    """A weight in int4: (q - zero) * scale. q: int64 [N, K]. scale: [N, G]. zero: int64 [N, G]."""

    q: Tensor
    scale: Tensor
    zero: Tensor

    @property
    def meant(self) -> Tensor:
        """The weight that is represented, float32 [N, K]."""
        group = self.q.shape[1] // self.scale.shape[1]
        scale, zero = (each.float().repeat_interleave(group, 1) for each in (self.scale, self.zero))
        return (self.q.float() - zero) * scale


def rounded(weight: Tensor, group: int, symmetric: bool, dtype: torch.dtype) -> Weight:
    """Return a weight rounded to the nearest. group: columns with one scale, -1 for all. dtype: of the scales."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, columns if group == -1 else group)
    if symmetric:
        scale = (groups.abs().amax(2) * 2 / 15).to(dtype)
        zero = torch.full(scale.shape, 8)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / 15).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, 15).long()
    q = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15).long()
    return Weight(q.view(rows, columns), scale, zero)


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return int32 [R, C / 8] of numbers [R, C]: nibble i of word j holds column 8j + order[i]."""
    found = sum(numbers[:, column::8] << (4 * i) for i, column in enumerate(order))
    assert isinstance(found, Tensor)
    return torch.where(found >= 2**31, found - 2**32, found).int().contiguous()


def awq(weight: Weight) -> dict[str, Tensor]:
    return {
        "qweight": words(weight.q.t(), AWQ_ORDER),
        "qzeros": words(weight.zero.t(), AWQ_ORDER),
        "scales": weight.scale.t().contiguous(),
    }


def gptq_v2(weight: Weight) -> dict[str, Tensor]:
    columns, groups = weight.q.shape[1], weight.scale.shape[1]
    return {
        "qweight": words(weight.q).t().contiguous(),
        "qzeros": words(weight.zero.t()),
        "scales": weight.scale.t().contiguous(),
        "g_idx": (torch.arange(columns) // (columns // groups)).int(),
    }


def gptq(weight: Weight) -> dict[str, Tensor]:
    found = gptq_v2(weight)
    unsigned = (found["qzeros"].long() - 0x11111111) % 2**32  # of whole words: a zero of 0 borrows
    return {**found, "qzeros": torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).int()}


def pack_quantized(weight: Weight) -> dict[str, Tensor]:
    return {
        "weight_packed": words(weight.q),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.q.shape),
        "weight_zero_point": words(weight.zero.t()).t().contiguous(),
    }


@dataclass(frozen=True)
class Form:
    """A published form. config: quantization_config. tensors: function that returns the tensors of a weight. ignored:
    parts of names of modules that are not quantized."""

    config: dict[str, Any]
    tensors: Callable[[Weight], dict[str, Tensor]]
    group: int = 128
    symmetric: bool = False
    dtype: torch.dtype = torch.float16
    ignored: tuple[str, ...] = ()

    def modules(self, tensors: dict[str, Tensor]) -> list[str]:
        """Return the names of the modules that are quantized in a checkpoint with these tensors."""
        names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
        chosen = [name for name in names if name.rpartition(".")[2] in LINEARS]
        return [name for name in chosen if not any(part in name for part in self.ignored)]

    def write(self, source: Path, folder: Path) -> dict[str, Tensor]:
        """Write the int4 form of the checkpoint `source` into a new folder; return the weights that it represents."""
        shutil.copytree(source, folder)
        tensors = load_file(source / "model.safetensors")
        meant = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in self.modules(tensors):
            weight = rounded(tensors.pop(f"{name}.weight"), self.group, self.symmetric, self.dtype)
            meant[f"{name}.weight"] = weight.meant
            found = self.tensors(weight)
            if self.symmetric and self.tensors in (awq, pack_quantized):
                found.pop("qzeros", None)
                found.pop("weight_zero_point", None)
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in found.items()}
        save_file(tensors, folder / "model.safetensors")
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": self.config}))
        return meant


def awq_form(group: int, symmetric: bool = False, ignored: tuple[str, ...] = ()) -> Form:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": not symmetric, "version": "gemm",
              "modules_to_not_convert": list(ignored) or None}  # fmt: skip
    return Form(config, awq, group, symmetric, ignored=ignored)


def gptq_form(group: int, symmetric: bool, version: int = 1) -> Form:
    layout = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": False,
              "lm_head": False, "checkpoint_format": layout, "damp_percent": 0.01, "true_sequential": True}  # fmt: skip
    return Form(config, gptq if version == 1 else gptq_v2, group, symmetric)


def compressed_form(group: int, symmetric: bool, ignored: tuple[str, ...] = ()) -> Form:
    weights = {"num_bits": 4, "type": "int", "strategy": "channel" if group == -1 else "group", "actorder": None,
               "group_size": None if group == -1 else group, "symmetric": symmetric, "dynamic": False}  # fmt: skip
    quantized = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
              "config_groups": {"group_0": quantized}, "kv_cache_scheme": None,
              "ignore": ["lm_head", *(f"re:.*{part}.*" for part in ignored)]}  # fmt: skip
    return Form(config, pack_quantized, group, symmetric, torch.bfloat16, ignored)


def auto_round_form(group: int, symmetric: bool, packing: str) -> Form:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": group, "sym": symmetric, "data_type": "int",
              "packing_format": f"auto_round:{packing}", "autoround_version": "0.9.0", "iters": 200}  # fmt: skip
    return Form(config, gptq if packing == "auto_gptq" else awq, group, symmetric)
