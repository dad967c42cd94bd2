"""model/recurrent_layers.py and recurrent/feature.py: what config.json says of recurrent layers, and what cannot work
with them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import HYBRIDS, Checkpoint
from safetensors.torch import load_file

from fastgen import Generator
from fastgen.engine.features import features_of
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.model.config import parse_config, read_config
from fastgen.recurrent.feature import num_slots

NAME, FIELDS = HYBRIDS["qwen3_5"]
LINEAR, FULL = "linear_attention", "full_attention"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint(NAME, **FIELDS)


@pytest.fixture
def written(folder: Path) -> dict[str, Any]:
    """The fields that transformers writes."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_recurrent_layers_are_those_that_layer_types_names(written: dict[str, Any]) -> None:
    config = parse_config(written)
    assert config.recurrent is not None
    assert (config.recurrent.layers, config.recurrent.key_heads, config.recurrent.value_heads) == ((0, 1), 1, 2)
    assert parse_config({**written, "architectures": None}) == config  # model_type names the family, too
    assert parse_config({**written, "layer_types": None, "full_attention_interval": 3}) == config
    eight = parse_config({**written, "layer_types": None, "num_hidden_layers": 8})  # every fourth has attention
    assert eight.recurrent is not None
    assert eight.recurrent.layers == (0, 1, 2, 4, 5, 6)


def test_the_size_of_the_weights_is_known_before_they_are_read(folder: Path) -> None:
    """All but the vectors, and the taps of the convolutions."""
    matrices = [t for name, t in load_file(folder / "model.safetensors").items() if t.dim() == 2]
    assert read_config(folder).weight_bytes(4) == pytest.approx(4 * sum(math.prod(t.shape) for t in matrices), rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [FULL, FULL, LINEAR]}, "it must have linear_attention, and end with full_attention"),
        ({"layer_types": [FULL] * 3}, "is not supported; it must have linear_attention, and end with"),
        ({"layer_types": None, "num_hidden_layers": 6}, "it must have linear_attention, and end with"),
        ({"layer_types": [LINEAR, FULL]}, "it must list 3 layers, each full_attention or linear_attention"),
        ({"layer_types": [LINEAR, "sliding_attention", FULL]}, "it must list 3 layers, each full_attention or linear"),
        ({"linear_key_head_dim": 64}, "linear_key_head_dim=64 is not supported; only 128 is"),
        ({"linear_value_head_dim": 256}, "linear_value_head_dim=256 is not supported; only 128 is"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim=3 is not supported; only 4 is"),
        (
            {"linear_num_key_heads": 2, "linear_num_value_heads": 3},
            "linear_num_value_heads=3 is not a multiple of linear_num_key_heads=2",
        ),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads=0 is missing or not an integer from 1"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0 is missing or not an integer"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported; only true is"),
        ({"attn_output_gate": 0}, "attn_output_gate=0 is not supported; only true is"),
        ({"layer_types": [["linear_attention"]]}, "layer_types=[['linear_attention']] is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported; only swish is"),
        ({"quantization_config": FP8}, "take a checkpoint that is not quantized"),
    ],
)
def test_a_config_that_cannot_work_is_an_error(
    change: dict[str, Any], message: str, written: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**written, **change}))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, "models with recurrent layers cannot be quantized; leave quantization out"),
        ({"tensor_parallel": 2}, "the recurrent layers of this model cannot be split over ranks; take tensor_parallel"),
        ({"speculate": "ngram"}, "speculate does not work with models that have recurrent layers; leave it out"),
        ({"host_cache_gb": 0.01}, "host_cache_gb does not work with models that have recurrent layers; leave it out"),
        ({"deterministic": False}, "deterministic=False does not work with models that have recurrent layers; leave"),
        ({"free_windows": True}, "free_windows needs a model with a sliding window"),
    ],
)
def test_an_option_that_cannot_work_is_an_error(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Generator(folder, device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "slots"), [({"max_seqs": 8}, 32), ({"max_seqs": 64}, 64), ({"max_seqs": 64, "prefix_cache": False}, 0)]
)
def test_states_are_kept_for_as_many_prefixes_as_sequences(
    options: dict[str, Any], slots: int, written: dict[str, Any]
) -> None:
    config = EngineConfig.make(parse_config(written), GeneratorOptions(device="cpu", **options))
    assert num_slots(config) == slots


@pytest.mark.parametrize(
    ("changes", "kernels", "message"),
    [
        ({"dtype": "float32"}, "triton", "multiply no float32; take dtype='bfloat16', or device='cpu'"),
        ({"dtype": "auto"}, "triton", "multiply no float32; take dtype='bfloat16', or device='cpu'"),
        (
            {"attention": "flash"},
            "triton",
            "recurrent layers needs attention='paged' on a GPU, not 'flash'; use 'auto'",
        ),
        ({}, "torch", "models with recurrent layers need Triton on a GPU; install it, or take device='cpu'"),
    ],
)
def test_what_a_gpu_cannot_run_is_an_error(
    changes: dict[str, Any], kernels: str, message: str, written: dict[str, Any]
) -> None:
    options = GeneratorOptions(device="cuda", **{"dtype": "bfloat16", **changes})
    with pytest.raises(ValueError, match=re.escape(message)):
        features_of(EngineConfig.make(parse_config(written), options, int(80e9), kernels, 132))
