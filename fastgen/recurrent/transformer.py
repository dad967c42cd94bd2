"""The transformer of a hybrid model (Qwen3.5): most layers are recurrent, and the attention of the others has gates."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastgen.device.profiling import span
from fastgen.kernels.epilogue import sigmoid_gate
from fastgen.kernels.rope import rope_write
from fastgen.model.attention.interface import Attention
from fastgen.model.kv_pool import KVPool
from fastgen.model.parameters import Parameters
from fastgen.model.transformer import StepPart, Transformer
from fastgen.recurrent.hybrid import HybridAttention, HybridPlan


class HybridTransformer(Transformer):
    """A Transformer whose layers are of two kinds. The KV pool has only the layers with attention.

    Its queries have gates: `project_qkv` returns [T, 2 * H, D], first the queries and then a gate for each of them.
    """

    def __init__(self, parameters: Parameters, context: int) -> None:
        super().__init__(parameters, context)
        recurrent = [number for number, layer in enumerate(self.layers) if layer.delta is not None]
        others = [number for number, layer in enumerate(self.layers) if layer.delta is None]
        self._place = {number: place for kind in (recurrent, others) for place, number in enumerate(kind)}

    @property
    def query_rows(self) -> int:
        return 2 * self.config.num_heads

    def project_qkv(self, part: StepPart, number: int, pool: KVPool) -> Tensor:
        layer, place, rows, size = self.layers[number], self._place[number], self.query_rows, self.config.head_size
        with span("qkv"):
            qkv = part.residual.project(layer.qkv, layer.input_norm)
            both, kv = qkv[:, : rows * size], qkv[:, rows * size :]
            q, gate = both.view(-1, rows // 2, 2, size).unbind(2)  # q_proj has a head's gate after its query
            qkv = torch.cat([q.flatten(1), kv], 1)
            q = rope_write(qkv, part.mapping, pool.keys[place], pool.values[place], layer.head_norm)
            return torch.cat([q, gate], 1)

    def _mix(self, part: StepPart, number: int, pool: KVPool, attention: Attention) -> Tensor:
        layer = self.layers[number]
        if layer.delta is None:
            return super()._mix(part, number, pool, attention)
        attention, plan = cast(HybridAttention, attention), cast(HybridPlan, part.plan)
        with span("recurrent"):
            x = part.residual.project(layer.qkv, layer.input_norm)
            return attention.mix(plan, self._place[number], layer.delta, x)

    def _attend(self, plan: object, number: int, q: Tensor, attention: Attention) -> Tensor:
        with span("attention"):
            q, gate = q.chunk(2, 1)
            attended = attention.attend(plan, self._place[number], q, window=0).flatten(1)
            gated: Tensor = sigmoid_gate(attended, gate.flatten(1).contiguous())
            return gated
