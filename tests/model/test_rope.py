"""rope.py: the same bits as in transformers for every kind and setting, up to position 131071."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgen.model.config import ModelConfig, parse_config
from fastgen.model.rope import query_scales, rope_frequencies, rope_tables

CONTEXT = 131072
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "eos_token_id": 3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"type": "linear", "factor": 4},
    {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0},  # which is HunYuan's
    LLAMA3,
    {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 1024, "low_freq_factor": 2.0},
    {**LLAMA3, "factor": 3.3},  # dividing by a power of two would round in the same way at any place
    {**YARN, "factor": 3.3},
    {**YARN, "original_max_position_embeddings": 32768},
    {"type": "yarn", "factor": 4.0},  # the original context is then max_position_embeddings
    {**YARN, "factor": 8, "beta_fast": 64, "beta_slow": 2.0},
    {**YARN, "factor": 16.0, "attention_factor": 1.3},
    {**YARN, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "factor": 16.0, "mscale": 0.9, "mscale_all_dim": 0.7},
    {**YARN, "factor": 16.0, "mscale": 0.9},
    {**YARN, "factor": 16.0, "mscale": 0.9, "mscale_all_dim": 0.7, "attention_factor": 1.3},
    {**YARN, "factor": 0.5},  # no stretch: the attention factor is 1
    {**YARN, "factor": 16.0, "truncate": False},
    {**YARN, "original_max_position_embeddings": 4, "beta_fast": 4, "beta_slow": 4},  # a step instead of a ramp
]
SHAPES = [(10000.0, 64), (500000.0, 128), (1000000.0, 96), (10000, 10)]  # theta, head size


def transformers_rope(rope: dict[str, Any], theta: float, head_size: int) -> Any:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    parameters = {**rope, "rope_theta": theta}
    return llama.LlamaRotaryEmbedding(llama.LlamaConfig(**SMALL, head_dim=head_size, rope_parameters=parameters))


def parsed(rope: dict[str, Any], theta: float, head_size: int) -> ModelConfig:
    config = {**SMALL, "model_type": "llama", "head_dim": head_size}
    ours = parse_config({**config, "rope_parameters": {**rope, "rope_theta": theta}})
    assert parse_config({**config, "rope_scaling": rope, "rope_theta": theta}) == ours  # as transformers 4 wrote it
    return ours


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("theta", "head_size"), SHAPES)
def test_frequencies_equal_transformers(rope: dict[str, Any], theta: float, head_size: int) -> None:
    theirs, ours = transformers_rope(rope, theta, head_size), parsed(rope, theta, head_size)
    frequencies, factor = rope_frequencies(ours.rope, ours.head_size, ours.max_position)
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, theirs.inv_freq)
    assert factor == theirs.attention_scaling


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.3}, {"factor": 8.0}, {"factor": 0.5}])
@pytest.mark.parametrize(("part", "original"), [(0.75, 4096), (1.0, 4096), (0.5, CONTEXT)])
def test_longrope_has_other_factors_in_a_longer_context(part: float, original: int, more: dict[str, Any]) -> None:
    phi = pytest.importorskip("transformers.models.phi3.modeling_phi3")
    factors = {f"{name}_factor": [end ** (i / 64) for i in range(int(128 * part) // 2)]
               for name, end in (("short", 1.5), ("long", 40.0))}  # fmt: skip
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": part, **factors, **more}
    settings = {**SMALL, "hidden_size": 512, "original_max_position_embeddings": original, "rope_parameters": rope}
    theirs = phi.Phi3RotaryEmbedding(phi.Phi3Config(**settings, pad_token_id=0))
    ours = parse_config({**settings, "model_type": "phi3"})
    for length in (4096, CONTEXT):
        cos, sin = rope_tables(ours, length)
        their_cos, their_sin = theirs(torch.zeros(1), torch.arange(length)[None])
        assert torch.equal(cos.repeat(1, 2), their_cos[0])
        assert torch.equal(sin.repeat(1, 2), their_sin[0])


@pytest.mark.parametrize(("theta", "head_size"), SHAPES)
def test_the_alpha_of_hunyuan_stretches_theta(theta: float, head_size: int) -> None:
    hunyuan = pytest.importorskip("transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense")
    parameters = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": theta}
    settings = {**SMALL, "head_dim": head_size, "rope_parameters": parameters}
    theirs = hunyuan.HunYuanDenseV1RotaryEmbedding(hunyuan.HunYuanDenseV1Config(**settings))
    ours = parse_config({**settings, "model_type": "hunyuan_v1_dense"})
    assert torch.equal(rope_frequencies(ours.rope, head_size, CONTEXT)[0], theirs.inv_freq)


@pytest.mark.parametrize("rope", ROPES)
def test_tables_equal_transformers_at_far_positions(rope: dict[str, Any]) -> None:
    theirs, ours = transformers_rope(rope, 500000.0, 128), parsed(rope, 500000.0, 128)
    cos, sin = rope_tables(ours, CONTEXT)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (CONTEXT, 64)
    for start, stop in ((0, 1), (1, 4096), (65533, 65600), (CONTEXT - 4096, CONTEXT)):
        their_cos, their_sin = theirs(torch.zeros(1), torch.arange(start, stop)[None])
        assert torch.equal(cos[start:stop].repeat(1, 2), their_cos[0])
        assert torch.equal(sin[start:stop].repeat(1, 2), their_sin[0])


def test_queries_grow_as_in_transformers() -> None:
    ministral = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    rope = parsed({**YARN, "llama_4_scaling_beta": 0.1}, 10000.0, 64).rope
    found = query_scales(rope, 20000, CONTEXT)
    assert found is not None
    assert torch.equal(found, ministral.get_llama_4_attn_scale(torch.arange(20000)[None], 0.1, 4096)[0, 0, :, 0])
    assert query_scales(rope, 4096, CONTEXT) is None  # all of them are 1, so no step multiplies by them
