"""Reads the `quantization_config` of fp8 checkpoints as a Quantization. This module imports neither torch nor
transformers.

Supported forms are those of Qwen and DeepSeek (one scale per block), Mistral and AutoFP8 (one scale per tensor),
compressed-tensors (`float-quantized`) and ModelOpt (`FP8`). Activations are always quantized with one scale per token;
static scales of activations and scales of a KV cache are not read. Other forms raise a ValueError that names the field
and its value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

BLOCK = [128, 128]
SKIPPED = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Suffixes of the names of tensors in fp8 checkpoints that are not read."""


@dataclass(frozen=True)
class Quantization:
    """The fp8 form of a model's linear layers, except the head.

    stored: granularity of the scales in the checkpoint, "tensor", "channel" or "block"; "" for a checkpoint that is not
    quantized: it is quantized with one scale per row as it is loaded. ignored: modules that are not quantized, given as
    names, prefixes or suffixes of names, patterns with *, or regular expressions after "re:".
    """

    stored: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def blocks(self) -> bool:
        """Return whether there is one scale per block of 128 x 128, rather than one per row."""
        return self.stored == "block"

    def covers(self, name: str) -> bool:
        """Return whether the linear layer with this module name is quantized."""
        return not any(_matches(pattern, name) for pattern in self.ignored)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return f".{name}.".endswith(f".{pattern}.") or name.startswith(pattern + ".")


def parse_quantization(config: dict[str, Any]) -> Quantization | None:
    """Return the Quantization for the content of config.json, or None for a model that is not quantized."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    method = given.get("quant_method")
    if method == "compressed-tensors" or (method is None and "config_groups" in given):
        return _compressed_tensors(given)
    if method == "modelopt":
        return _modelopt(given)
    _need(given, "quant_method", "fp8", name="quantization_config.quant_method")
    return _fp8(given)


def _need(given: dict[str, Any], field: str, *values: Any, name: str = "") -> Any:
    """Return the value of a field, None if absent. Raises ValueError if it is not one of `values`."""
    value = given.get(field)
    if value not in values:
        instead = ", ".join(map(repr, values))
        raise ValueError(f"{name or field}={value!r} is not supported in a quantized model; {instead} is")
    return value


def _fp8(given: dict[str, Any]) -> Quantization:
    """Read the form of Qwen and DeepSeek, which has blocks, or of Mistral and AutoFP8, which has none."""
    _need(given, "fmt", None, "e4m3")
    _need(given, "activation_scheme", "dynamic", "static")
    _need(given, "scale_fmt", None, "float")
    _need(given, "kv_cache_scheme", None)
    block = _need(given, "weight_block_size", None, BLOCK)
    ignored = given.get("ignored_layers") or given.get("modules_to_not_convert") or ()
    return Quantization("block" if block else "tensor", tuple(ignored))


def _compressed_tensors(given: dict[str, Any]) -> Quantization:
    _need(given, "format", "float-quantized")
    _need(given, "quantization_status", None, "compressed")
    _need(given.get("sparsity_config") or {}, "format", None, "dense", name="sparsity_config.format")
    groups = given.get("config_groups") or {}
    if len(groups) != 1:
        raise ValueError(f"config_groups has {len(groups)} groups; one, of all linear layers, is supported")
    (group,) = groups.values()
    _need(group, "targets", ["Linear"])
    weights = _need_float(group, "weights", "channel", "tensor", "block")
    _need(weights, "dynamic", None, False, name="weights.dynamic")
    if weights["strategy"] == "block":
        _need(weights, "block_structure", BLOCK)
    _need_float(group, "input_activations", "token", "tensor", "group")
    return Quantization(weights["strategy"], tuple(given.get("ignore") or ()))


def _need_float(group: dict[str, Any], part: str, *strategies: str) -> dict[str, Any]:
    """Return a part of a group. Raises ValueError if it is not fp8 with one of the strategies."""
    given: dict[str, Any] = group.get(part) or {}
    needed = {"num_bits": (8,), "type": ("float",), "symmetric": (None, True), "strategy": strategies}
    for field, values in needed.items():
        _need(given, field, *values, name=f"{part}.{field}")
    return given


def _modelopt(given: dict[str, Any]) -> Quantization:
    inner = given.get("quantization") or given  # as in hf_quant_config.json
    _need(inner, "quant_algo", "FP8")
    return Quantization("tensor", tuple(inner.get("exclude_modules") or inner.get("ignore") or ()))
