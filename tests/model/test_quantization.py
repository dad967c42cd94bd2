"""quantization.py: which quantization_config of config.json is read, and which is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Checkpoint
from test_quantized import BLOCKS, MODELOPT, QWEN, SIZES

from fastgen.model.config import read_config
from fastgen.model.quantization import Quantization, parse_quantization


@pytest.mark.parametrize(
    ("form", "path", "value", "named"),
    [
        (QWEN, "quant_method", "awq", "quant_method='awq'"),
        (QWEN, "quant_method", "fbgemm_fp8", "quant_method='fbgemm_fp8'"),
        (QWEN, "weight_block_size", [64, 128], r"weight_block_size=\[64, 128\]"),
        (QWEN, "activation_scheme", None, "activation_scheme=None"),
        (QWEN, "fmt", "e5m2", "fmt='e5m2'"),
        (QWEN, "scale_fmt", "ue8m0", "scale_fmt='ue8m0'"),
        (MODELOPT, "quant_algo", "NVFP4", "quant_algo='NVFP4'"),
        (BLOCKS, "format", "pack-quantized", "format='pack-quantized'"),
        (BLOCKS, "quantization_status", "frozen", "quantization_status='frozen'"),
        (BLOCKS, "config_groups", {}, "config_groups has 0 groups"),
        (BLOCKS, "config_groups.group_0.targets", ["re:.*mlp.*"], "targets="),
        (BLOCKS, "config_groups.group_0.weights.num_bits", 4, "weights.num_bits=4"),
        (BLOCKS, "config_groups.group_0.weights.strategy", "group", "weights.strategy='group'"),
        (BLOCKS, "config_groups.group_0.input_activations", None, "input_activations.num_bits=None"),
        (BLOCKS, "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config.format='sparse-24-bitmask'"),
    ],
)
def test_other_fields_are_refused(form: dict[str, Any], path: str, value: Any, named: str) -> None:
    form = inner = json.loads(json.dumps(form))
    *parts, last = path.split(".")
    for part in parts:
        inner = inner[part]
    inner[last] = value
    with pytest.raises(ValueError, match=named):
        parse_quantization({"quantization_config": form})


def test_modelopts_own_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("Llama", **SIZES), folder)
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.layers.0.*"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    found = read_config(folder).quantization
    assert found == Quantization("tensor", ("lm_head", "*.layers.0.*"))


def test_modules_that_are_left_out() -> None:
    form = Quantization("channel", ("lm_head", "re:.*layers\\.0\\..*", "model.layers.1", "down_proj", "*.layers.3.*"))
    covered = ["model.layers.2.mlp.up_proj", "model.layers.10.mlp.up_proj", "model.layers.2.self_attn.o_proj"]
    assert all(map(form.covers, covered))
    left_out = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.down_proj",
                "model.layers.3.self_attn.q_proj"]  # fmt: skip
    assert not any(map(form.covers, left_out))
