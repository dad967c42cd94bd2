"""Rotary position embedding: RopeConfig -> the tables of cos and sin that the model rotates q and k with.

Bit for bit those of transformers on the CPU, so that logprobs can be compared with a trainer's: the operations round to
float32 where its `ROPE_INIT_FUNCTIONS` and `*RotaryEmbedding.forward` do, in that order. Mathematically equal forms of
these formulas are an ulp off here and there, which position 131071 multiplies. D is the head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastgen.model.config import ModelConfig, RopeConfig

CPU = torch.device("cpu")


def rope_tables(config: ModelConfig, context: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each float32 [context, D / 2] on the CPU, multiplied with the attention factor."""
    frequencies, factor = rope_frequencies(config.rope, config.head_size, config.max_position)
    angles = torch.arange(context, device=CPU).float()[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def rope_frequencies(rope: RopeConfig, head_size: int, max_position: int) -> tuple[Tensor, float]:
    """(radians a token for each rotated pair, float32 [D / 2] on the CPU; the factor that multiplies cos and sin)."""
    pairs = torch.arange(0, head_size, 2, dtype=torch.float32, device=CPU)
    periods = rope.theta ** (pairs / head_size)  # tokens a radian
    context = rope.original_max_position or max_position
    if rope.kind == "linear":
        return 1.0 / periods / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / periods, context), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, periods, context), _yarn_attention_factor(rope)
    assert rope.kind == "default", f"{rope.kind}: parse_config lets no other kind through"
    return 1.0 / periods, 1.0


def _llama3(rope: RopeConfig, plain: Tensor, context: int) -> Tensor:
    """Long waves are stretched, short ones stay; between the two, what `keep` says."""
    wavelengths = 2 * math.pi / plain  # tokens a turn
    keep = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - keep) * plain / rope.factor + keep * plain
    unless_long = torch.where(wavelengths < context / rope.high_freq_factor, plain, between)
    return torch.where(wavelengths > context / rope.low_freq_factor, plain / rope.factor, unless_long)


def _yarn(rope: RopeConfig, periods: Tensor, context: int) -> Tensor:
    """Pairs before the ramp of `_yarn_ramp` stay, those behind it are interpolated."""
    low, high = _yarn_ramp(rope, 2 * len(periods), context)
    pairs = torch.arange(len(periods), dtype=torch.float32, device=CPU)
    keep = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    # 1 - keep is not always the ramp again in float32.
    return 1.0 / (rope.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_ramp(rope: RopeConfig, head_size: int, context: int) -> tuple[float, float]:
    """The indices, in doubles, of the pairs between which YaRN goes from keeping to interpolating."""

    def pair_with(turns: float) -> float:
        """The index, not rounded, of the pair that turns this many times over the original context."""
        return head_size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    return low, high + 0.001 if low == high else high  # a step instead of a ramp


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    log_factor = math.log(max(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * log_factor + 1) / (0.1 * rope.mscale_all_dim * log_factor + 1)
    return 0.1 * log_factor + 1
