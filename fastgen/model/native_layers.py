"""Steps on the CPU whose layers run in one call of native.cpp.

A layer takes a dozen calls from Python, which take longer than the arithmetic if a step has one token and the model is
small. The call computes the same functions in the same order, with the same bits.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from dataclasses import dataclass

from torch import Tensor

from fastgen.kernels.native.calls import LANES, function, rope_of
from fastgen.kernels.norm import RMSNorm
from fastgen.model.attention.interface import Attention
from fastgen.model.attention.native import NativeAttention, NativePlan
from fastgen.model.linear import Linear
from fastgen.model.native_linear import NativeGatedLinear, NativeLinear
from fastgen.model.parameters import Layer, Parameters
from fastgen.model.transformer import StepPart


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int) for name in ("inputs", "outputs")),
    )

    @classmethod
    def of(cls, linear: NativeLinear) -> _Product:
        outputs, inputs = linear.weight.shape
        return cls(linear.packed.data_ptr(), _address(linear.bias), inputs, outputs)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "keys", "values")),
        *((name, _Product) for name in ("qkv", "o", "gate", "up", "down")),
        ("window", c_int),
    )


@dataclass(frozen=True)
class _Table:
    """The layers as native.cpp reads them. first: a layer of the weights that they point to, which an update replaces.
    norm: the first norm, whose eps all norms have."""

    layers: ctypes.Array[_Layer]
    first: Linear
    norm: RMSNorm


class NativeLayers:
    """Runs layers of a model with these parameters, whose keys and values are in the pool of `attention`."""

    def __init__(self, parameters: Parameters, attention: NativeAttention) -> None:
        self._parameters, self._attention = parameters, attention
        self._run = function("run_layers", parameters.dtype)
        self._table: _Table | None = None

    @classmethod
    def of(cls, parameters: Parameters, attention: Attention) -> NativeLayers | None:
        """Return the layers, or None if native.cpp lacks one of their operations."""
        c = parameters.config
        if not isinstance(attention, NativeAttention) or attention.pool.keys.dtype != parameters.dtype:
            return None
        sizes = c.hidden_size, c.intermediate_size, c.rotary_size // 2
        whole = parameters.group.size == 1 and c.swiglu and not any(size % LANES for size in sizes)
        return cls(parameters, attention) if whole and all(map(_is_plain, parameters.layers)) else None

    def run(self, part: StepPart, numbers: Sequence[int]) -> bool:
        """Run layers `numbers`, which follow each other, on the residual stream of the tokens before the padding, and
        write their keys and values. Return False, and do nothing, for a step that has to run layer by layer."""
        mapping, plan = part.mapping, part.plan
        plain = mapping.windowed is None and mapping.query_scales is None and not part.arrivals and part.kept is None
        table = self._layers() if plain and numbers else None
        if table is None:
            return False
        assert isinstance(plan, NativePlan)
        assert list(numbers) == list(range(numbers[0], numbers[-1] + 1))
        x, heads = part.residual.whole(), self._parameters.config.num_heads
        assert x.is_contiguous()
        assert self._run is not None
        norm = table.norm
        rope = rope_of(mapping, mapping.real, heads, self._attention.pool.keys.shape[-1], norm.eps, norm.centered)
        shape = self._attention.shape(plan, 0)
        inputs = plan.page_table, mapping.positions, mapping.slots, mapping.cos, mapping.sin, x
        self._run(
            ctypes.addressof(table.layers[numbers[0]]), len(numbers), ctypes.addressof(rope), ctypes.addressof(shape),
            plan.tiles.ctypes.data, *(each.data_ptr() for each in inputs),
        )  # fmt: skip
        return True

    def _layers(self) -> _Table | None:
        """Return the table for the present weights, or None if native.cpp does not multiply all of them."""
        layers = self._parameters.layers
        first = layers[0].qkv
        if self._table is None or self._table.first is not first:
            self._table = None
            found = [self._layer(number, layer) for number, layer in enumerate(layers)]
            norm = layers[0].input_norm
            assert norm is not None
            if all(found):
                self._table = _Table((_Layer * len(found))(*itertools.chain(*found)), first, norm)
        return self._table

    def _layer(self, number: int, layer: Layer) -> list[_Layer]:
        """Return the layer, or none if native.cpp does not multiply all of its weights."""
        halves = (layer.gate_up.gate, layer.gate_up.up) if isinstance(layer.gate_up, NativeGatedLinear) else ()
        linears = [each for each in (layer.qkv, layer.o, *halves, layer.down) if isinstance(each, NativeLinear)]
        if len(linears) != 5:
            return []
        assert layer.input_norm is not None
        assert layer.post_norm is not None
        head = (None, None) if layer.head_norm is None else (layer.head_norm.q, layer.head_norm.k)
        pool = self._attention.pool
        tensors = layer.input_norm.weight, layer.post_norm.weight, *head, pool.keys[number], pool.values[number]
        return [_Layer(*map(_address, tensors), *map(_Product.of, linears), layer.window)]


def _is_plain(layer: Layer) -> bool:
    """Return whether a layer has the operations of Llama, and at most norms of heads in addition."""
    more = layer.delta, layer.wide_norm, layer.o_gate, layer.o_end, layer.down_end
    norms = layer.input_norm, layer.post_norm
    after_rope = layer.head_norm is not None and layer.head_norm.after_rope
    return not any(more) and all(norms) and not layer.has_other_rope and not after_rope


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
