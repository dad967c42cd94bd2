"""Reads the `quantization_config` of quantized checkpoints as a Quantization. This module imports neither torch nor
transformers.

Supported forms of fp8 are those of Qwen and DeepSeek (one scale per block), Mistral and AutoFP8 (one scale per tensor),
compressed-tensors (`float-quantized`) and ModelOpt (`FP8`). Activations are quantized with one scale per token, or not
at all; static scales of activations and scales of a KV cache are not read. Supported forms of int4 are AWQ (`gemm`),
GPTQ without desc_act, AutoRound's `auto_gptq` and `auto_awq`, and compressed-tensors (`pack-quantized`). Other forms
raise a ValueError that names the field and its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastgen.model.quantization import Int4, Quantization, given_quantization, method_of

BLOCK = [128, 128]


def parse_quantization(config: dict[str, Any], gated: bool = True) -> Quantization | None:
    """Return the Quantization for the content of config.json, or None for a model that is not quantized. gated: the MLP
    has a gate_proj."""
    given, method = given_quantization(config), method_of(config)
    if method is None:
        return None
    if method not in _METHODS:
        raise _unsupported("quantization_config.quant_method", method, *_METHODS)
    quantization = _METHODS[method](given)
    if isinstance(quantization, Int4):
        _check_modules(given.get("modules_in_block_to_quantize"), gated)
    has_head = method == "compressed-tensors" and not config.get("tie_word_embeddings")
    if isinstance(quantization, Int4) and has_head and quantization.covers("lm_head"):
        raise ValueError(f"ignore={given.get('ignore')!r} lacks lm_head, and fastgen runs no head in int4")
    return quantization


def _need(given: dict[str, Any], field: str, *values: Any, name: str = "") -> Any:
    """Return the value of a field, None if absent. Raises ValueError if it is not one of `values`."""
    value = given.get(field)
    if value not in values:
        raise _unsupported(name or field, value, *values)
    return value


def _unsupported(name: str, value: object, *instead: object) -> ValueError:
    supported = ", ".join(map(repr, instead))
    return ValueError(f"{name}={value!r} is not supported in a quantized model; {supported} is")


def _fp8(given: dict[str, Any]) -> Quantization:
    """Read the form of Qwen and DeepSeek, which has blocks, or of Mistral and AutoFP8, which has none."""
    _need(given, "fmt", None, "e4m3")
    _need(given, "activation_scheme", "dynamic", "static")
    _need(given, "scale_fmt", None, "float")
    _need(given, "kv_cache_scheme", None, "static")
    block = _need(given, "weight_block_size", None, BLOCK)
    ignored = given.get("ignored_layers") or given.get("modules_to_not_convert") or ()
    return Quantization("block" if block else "tensor", tuple(ignored))


def _compressed_tensors(given: dict[str, Any]) -> Quantization:
    packed = _need(given, "format", "float-quantized", "pack-quantized") == "pack-quantized"
    _need(given, "quantization_status", None, "compressed")
    _need(given.get("sparsity_config") or {}, "format", None, "dense", name="sparsity_config.format")
    _need(given, "transform_config", None, {})
    groups = given.get("config_groups") or {}
    if len(groups) != 1:
        raise ValueError(f"config_groups has {len(groups)} groups; one, of all linear layers, is supported")
    (group,) = groups.values()
    _need(group, "targets", ["Linear"])
    if packed:
        return _pack_quantized(group, tuple(given.get("ignore") or ()))
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


def _pack_quantized(group: dict[str, Any], ignored: tuple[str, ...]) -> Int4:
    """Read a group of compressed-tensors in int4 (W4A16)."""
    weights = group.get("weights") or {}
    needed = {"num_bits": (4,), "type": ("int",), "strategy": ("group", "channel"), "symmetric": (None, True, False),
              "dynamic": (None, False), "actorder": (None, "static", "weight")}  # fmt: skip
    for field, values in needed.items():
        _need(weights, field, *values, name=f"weights.{field}")
    for field in ("input_activations", "output_activations"):
        _need(group, field, None)
    _need(group, "format", None, "pack-quantized", name="group.format")
    size = _group_size(weights, "weights.group_size") if weights["strategy"] == "group" else 0
    return Int4("packed", ignored, size, weights.get("symmetric") is False)


def _awq(given: dict[str, Any]) -> Int4:
    bits = given.get("bits", given.get("w_bit"))  # the second one is in quant_config.json
    _need({"bits": bits}, "bits", 4)
    for field in ("version", "format", "checkpoint_format"):
        _need({field: str(given.get(field) or "gemm").lower()}, field, "gemm")
    if given.get("backend") in ("llm-awq", "exllama", "exllamav2"):
        raise _unsupported("backend", given["backend"], "autoawq")
    size = _group_size(given, "group_size" if "group_size" in given else "q_group_size")
    zeros = _need(given, "zero_point", None, True, False) is not False
    return Int4("awq", _parts_of_names(given), size, zeros)


def _gptq(given: dict[str, Any]) -> Int4:
    _need(given, "bits", 4)
    _need(given, "desc_act", None, False)
    _need(given, "lm_head", None, False)
    _need(given, "pack_dtype", None, "int32")
    _need(given, "is_marlin_format", None, False)
    layouts = "gptq", "gptq_v2"
    formats = [_need(given, field, None, *layouts) for field in ("checkpoint_format", "format")]
    layout = next((form for form in formats if form), "gptq")
    ignored = []
    for pattern, changed in (given.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            ignored.append("re:" + pattern[2:])
        else:
            _check_same(given, changed, f"dynamic has {pattern!r}")
    return Int4(layout, tuple(ignored), _group_size(given), _need(given, "sym", None, True, False) is False)


def _auto_round(given: dict[str, Any]) -> Int4:
    """Read AutoRound's own configuration of a checkpoint with the tensors of GPTQ or AWQ."""
    packing = _need(given, "packing_format", "auto_round:auto_gptq", "auto_round:auto_awq")
    _need(given, "bits", 4)
    _need(given, "data_type", None, "int")
    _need(given, "act_bits", None, 16, 32)
    _need(given, "super_bits", None)
    for field in ("block_name_to_quantize", "to_quant_block_names"):
        if not all(name.startswith(_LAYERS) for name in _flat(given.get(field))):
            raise _unsupported(field, given[field], *_LAYERS)
    ignored = list(_parts_of_names(given))
    for name, changed in (given.get("extra_config") or {}).items():
        if changed.get("bits", 4) >= 16:
            ignored.append(f"re:(?:{name})$")
        else:
            _check_same(given, changed, f"extra_config has {name!r}")
    zeros = _need(given, "sym", None, True, False) is False
    return Int4("gptq" if packing.endswith("gptq") else "awq", tuple(ignored), _group_size(given), zeros)


def _group_size(given: dict[str, Any], field: str = "group_size") -> int:
    """Return the group size, 0 for whole rows. Raises ValueError if it is not a multiple of 8."""
    size = given.get(field.rpartition(".")[2])
    if type(size) is not int or not (size == -1 or (size > 0 and size % 8 == 0)):
        raise _unsupported(field, size, -1, 32, 64, 128)
    return max(size, 0)


def _parts_of_names(given: dict[str, Any]) -> tuple[str, ...]:
    """Return patterns for modules_to_not_convert, whose entries are parts of names."""
    return tuple(f"*{part}*" for part in given.get("modules_to_not_convert") or ())


def _check_same(given: dict[str, Any], changed: dict[str, Any], where: str) -> None:
    """Raise ValueError if some layers, for which `changed` holds, have another form than the others."""
    if any(given.get(field) != changed.get(field, given.get(field)) for field in _OF_FORM):
        raise ValueError(f"{where}: {changed!r}; fastgen runs all quantized layers in one form")


def _flat(given: list[Any] | str | None) -> list[str]:
    """Return the names in a name, a list of names, or lists in a list."""
    if isinstance(given, str):
        return [given]
    return [name for each in given or () for name in _flat(each)]


def _check_modules(given: list[Any] | None, gated: bool) -> None:
    """Raise ValueError if `modules_in_block_to_quantize` leaves out a linear layer. given: names, or lists of them."""
    names, needed = _flat(given), [each for each in _LINEARS if gated or each != "gate_proj"]
    if names and not all(any(name.endswith(each) for name in names) for each in needed):
        raise _unsupported("modules_in_block_to_quantize", given, None)


_LAYERS = "model.layers", "model.language_model.layers"
_OF_FORM = "bits", "group_size", "sym", "desc_act", "data_type"
_LINEARS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
_METHODS: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "awq": _awq, "gptq": _gptq,
    "auto-round": _auto_round,
}  # fmt: skip
"""{quant_method: function that reads its quantization_config}."""
