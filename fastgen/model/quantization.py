"""The quantized forms of a model's linear layers. This module imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

SKIPPED = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale")
"""Suffixes of the names of tensors in fp8 checkpoints that are not read."""


@dataclass(frozen=True)
class Quantization:
    """The quantized form of a model's linear layers, except the head: this class is fp8, and Int4 a subclass.

    name: the numbers that weights are stored as. weight_bytes: bytes per weight, with its share of the scales.
    stored: granularity of the scales in the checkpoint, "tensor", "channel" or "block"; "" for a checkpoint that is not
    quantized: it is quantized with one scale per row as it is loaded. ignored: modules that are not quantized, given as
    names, prefixes or suffixes of names, patterns with *, or regular expressions after "re:".
    """

    name: ClassVar[str] = "fp8"
    weight_bytes: ClassVar[float] = 1
    stored: str = ""
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.ignored:
            try:
                _matches(pattern, "")
            except (AttributeError, TypeError, re.error) as error:
                raise ValueError(f"quantization_config ignores {pattern!r}, which is not a pattern: {error}") from None

    @property
    def blocks(self) -> bool:
        """Return whether there is one scale per block of 128 x 128, rather than one per row."""
        return self.stored == "block"

    def covers(self, name: str) -> bool:
        """Return whether the linear layer with this module name is quantized."""
        names = name, name.replace("model.", "model.language_model.", 1)  # as inside a model with vision
        return not any(_matches(pattern, each) for pattern in self.ignored for each in names)

    def check_fused(self, names: Collection[str]) -> None:
        """Raise ValueError if only some of the modules that are fused into one linear layer are quantized."""
        if not all(map(self.covers, names)):
            raise ValueError(
                f"quantization_config leaves some of {', '.join(names)} unquantized and not all of them, which is not "
                "supported"
            )


@dataclass(frozen=True)
class Int4(Quantization):
    """The int4 form of a model's linear layers, except the head: w = (q - zero) * scale, with q from 0 to 15.

    stored: layout of the checkpoint's tensors, a key of LAYOUTS in int4_layouts.py. group_size: number of neighbouring
    inputs with one scale; 0: all inputs of a row. zeros: each group has a zero; otherwise it is 8. scale_dtype: dtype
    of the scales in the checkpoint, which they keep.
    """

    name: ClassVar[str] = "int4"
    weight_bytes: ClassVar[float] = 4.25 / 8
    group_size: int = 128
    zeros: bool = False
    scale_dtype: str = "float16"


class SizeError(ValueError):
    """A weight has sizes that a quantized form cannot have. The message does not say what to change."""


@contextmanager
def explaining_sizes(ranks: int) -> Iterator[None]:
    """Turn a SizeError into a ValueError that says what to change. ranks: number of ranks that split the weights."""
    try:
        yield
    except SizeError as error:
        parts, remedy = (" on each rank", "fewer ranks, or ") if ranks > 1 else ("", "")
        raise ValueError(f"{error}{parts}; take {remedy}another checkpoint") from None


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return f".{name}.".endswith(f".{pattern}.") or name.startswith(pattern + ".")


def check_requantize(form: Quantization | None, requantize: bool) -> None:
    """Raise ValueError if an update of the weights of a model with this form does not go with `requantize`."""
    if isinstance(form, Int4) and not requantize:
        raise ValueError(
            "the model is in int4, which an update would round to the nearest numbers, without the care that its "
            "checkpoint was made with; pass requantize=True if that is wanted, or use a model that is not quantized"
        )
    if requantize and form is None:
        raise ValueError("requantize=True, and the model is not quantized; leave it out")


def method_of(config: dict[str, Any]) -> str | None:
    """Return the quant_method in the content of config.json, or None for a model that is not quantized."""
    given = given_quantization(config)
    if not given:
        return None
    method = given.get("quant_method") or given.get("method")
    return "compressed-tensors" if method is None and "config_groups" in given else str(method)


def given_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config in the content of config.json; {} for a model that is not quantized."""
    return config.get("quantization_config") or config.get("compression_config") or {}
