"""Rotary position embedding: computes the tables of cos and sin that rotate q and k from a RopeConfig.

The tables equal those of transformers on the CPU bit for bit, so that logprobs can be compared with a trainer's. To
achieve that, operations have the order of `ROPE_INIT_FUNCTIONS` and `*RotaryEmbedding.forward` in transformers, and
round to float32 at the same places. Other formulas that are equal mathematically differ by an ulp in places, which is
multiplied by positions of up to 131071. D is the head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastgen.model.config import ModelConfig, RopeConfig

CPU = torch.device("cpu")


def rope_tables(config: ModelConfig, context: int, other: bool = False) -> tuple[Tensor, Tensor]:
    """Return cos and sin, multiplied by the attention factor, both float32 [context, D / 2] on the CPU. D: number of
    rotated dimensions. other: of the rope of `other_layers`."""
    rope = config.other_rope if other else config.rope
    size = config.head_size if other else config.rotary_size
    frequencies, factor = rope_frequencies(rope, size, config.max_position, context)
    angles = torch.arange(context, device=CPU).float()[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def rope_frequencies(rope: RopeConfig, head_size: int, max_position: int, length: int = 0) -> tuple[Tensor, float]:
    """Return the radians per token of each rotated pair, float32 [D / 2] on the CPU, and the factor of cos and sin.

    head_size: number of rotated dimensions of a head. length: number of positions that are used, on which longrope
    depends.
    """
    pairs = torch.arange(0, head_size, 2, dtype=torch.float32, device=CPU)
    theta = rope.theta if rope.alpha == 1 else rope.theta * rope.alpha ** (head_size / max(head_size - 2, 1))
    periods = theta ** (pairs / head_size)  # tokens per radian
    context = rope.original_max_position or max_position
    if rope.kind == "none":  # turned by 0, which changes no bit, so that these layers run the same kernels
        return torch.zeros_like(periods), 1.0
    if rope.kind == "linear":
        return 1.0 / periods / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / periods, context), 1.0
    if rope.kind == "longrope":
        factors = rope.long_factors if length > context else rope.short_factors
        return 1.0 / (torch.tensor(factors, device=CPU) * periods), rope.attention_factor or _long_factor(rope, context)
    if rope.kind == "yarn":
        return _yarn(rope, periods, context), rope.attention_factor or _yarn_factor(rope)
    assert rope.kind == "default", f"parse_config refuses rope type {rope.kind}"
    return 1.0 / periods, 1.0


def query_scales(rope: RopeConfig, context: int, max_position: int) -> Tensor | None:
    """Return the factor of the queries at each position, float32 [context] on the CPU; None if all factors are 1."""
    original = rope.original_max_position or max_position
    if not rope.query_growth or context <= original:
        return None
    return 1 + rope.query_growth * torch.log(1 + torch.floor(torch.arange(context, device=CPU) / original))


def _yarn_factor(rope: RopeConfig) -> float:
    """Return the factor of cos and sin that a config does not give."""
    growth = 0.1 * math.log(max(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (growth * rope.mscale + 1) / (growth * rope.mscale_all_dim + 1)
    return growth + 1


def _long_factor(rope: RopeConfig, context: int) -> float:
    """Return the factor of cos and sin that a config with longrope does not give."""
    return math.sqrt(1 + math.log(rope.factor) / math.log(context)) if rope.factor > 1 else 1.0


def _llama3(rope: RopeConfig, plain: Tensor, context: int) -> Tensor:
    """Stretch long wavelengths, keep short ones, and interpolate in between."""
    wavelengths = 2 * math.pi / plain  # tokens per turn
    keep = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - keep) * plain / rope.factor + keep * plain
    unless_long = torch.where(wavelengths < context / rope.high_freq_factor, plain, between)
    return torch.where(wavelengths > context / rope.low_freq_factor, plain / rope.factor, unless_long)


def _yarn(rope: RopeConfig, periods: Tensor, context: int) -> Tensor:
    """Keep the pairs before a ramp, and interpolate the pairs after it. The ends of the ramp are Python floats."""
    head_size = 2 * len(periods)

    def pair_with(turns: float) -> float:
        """Return the unrounded index of the pair that makes `turns` turns over the original context."""
        return head_size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    pairs = torch.arange(len(periods), dtype=torch.float32, device=CPU)
    keep = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    # In float32, 1 - keep is not always equal to the ramp.
    return 1.0 / (rope.factor * periods) * (1 - keep) + 1.0 / periods * keep
