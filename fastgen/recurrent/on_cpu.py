"""Recurrent layers on a CPU, in torch.

    H value heads, D = 128, block of 64 tokens, part of 16

Token t of a block has a key k and a query q of any length, a value v, a strength beta, and G, the sum of the logs of
the decays from the block's first token to t. f and h make the lengths of k and q one (h also divides by the root of
D), and S is the state at the block's start:

    A[t, j] = beta[t] f[t] f[j] (k[t] . k[j]) exp(G[t] - G[j])                  for j < t, otherwise 0
    r[t]    = beta[t] (v[t] - exp(G[t]) f[t] k[t] S) - sum of A[t, j] d[j] over j in earlier parts
    d[t]    = r[t] + sum of T[t, j] r[j] over earlier j in t's part              what t writes
    o[t]    = exp(G[t]) h[t] q[t] S + sum of exp(G[t] - G[j]) h[t] f[j] (q[t] . k[j]) d[j] over j <= t
    S'      = exp(G[63]) S + sum of exp(G[63] - G[j]) f[j] k[j]^T d[j]

T is the inverse of I + A within a part, whose row t needs rows <= t of A. This is the gated delta rule (arXiv
2412.06464) in blocks, in an order in which a token's output does not depend on later ones. A step multiplies tiles of
64 rows, in which each token has its place and the others are zero: a row of a product, and a number of an elementwise
function, have the same bits whatever the others are, if shapes and places are the same.
"""

from __future__ import annotations

from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.model.attention.interface import StepLayout
from fastgen.model.recurrent_layers import DELTA_HEAD, DELTA_TAPS, DeltaWeights, Recurrent
from fastgen.recurrent.planning import BLOCK
from fastgen.recurrent.states import PART, LaneStates

Runs = list[tuple[int, int, int]]
"""The sequences of a step in order: (lane, position of the first token, number of tokens)."""


class CpuMixer:
    """Computes recurrent layers on a CPU; see HybridAttention. eps: of the norm of outputs."""

    def __init__(self, shape: Recurrent, lanes: LaneStates, eps: float) -> None:
        self._shape, self._eps = shape, eps
        self._layers = [lanes.layer(number) for number in range(len(shape.layers))]

    def plan(self, layout: StepLayout) -> Runs:
        first = layout.kv_lens - layout.query_lens
        return list(zip(layout.lanes.tolist(), first.tolist(), layout.query_lens.tolist(), strict=True))

    def plan_decode(self, lanes: Tensor, kv_lens: Tensor) -> Runs:
        return [(lane, length - 1, 1) for lane, length in zip(lanes.tolist(), kv_lens.tolist(), strict=True)]

    def mix(self, plan: Runs, number: int, weights: DeltaWeights, x: Tensor) -> Tensor:
        outputs, states, row = list[Tensor](), self._layers[number], 0
        for lane, position, count in plan:
            own = _lane(states, lane)
            if position == 0:
                own.state.zero_()
                own.rounded.zero_()
                own.inputs.zero_()
            while count:
                some = min(count, BLOCK - position % BLOCK)
                outputs.append(self._add(own, weights, x[row : row + some], position % BLOCK))
                row, position, count = row + some, position + some, count - some
                if position % BLOCK == 0:
                    _advance(own, self._group)
        return torch.cat(outputs)

    @property
    def _group(self) -> int:
        return self._shape.value_heads // self._shape.key_heads

    def _add(self, lane: LaneStates, weights: DeltaWeights, x: Tensor, start: int) -> Tensor:
        """Add rows x to a lane's block, from row `start` on, and return their outputs, normed and gated."""
        shape, new = self._shape, slice(start, start + len(x))
        tile = torch.zeros(BLOCK, x.shape[1])
        tile[new] = x.float()
        sizes = [shape.channels, shape.value_size, shape.value_heads, shape.value_heads]
        inputs, z, b, a = torch.split(tile, sizes, 1)
        mixed = self._convolve(lane, weights, inputs, new).to(x.dtype)
        q, k, v = torch.split(mixed, [DELTA_HEAD * shape.key_heads] * 2 + [shape.value_size], 1)
        lane.keys[new] = k.view(BLOCK, -1, DELTA_HEAD)[new]
        lane.strengths[new] = torch.sigmoid(b)[new]
        log_decay = -weights.decay.float().exp() * F.softplus(a + weights.step.float())
        total = lane.decays[start - 1] if start else torch.zeros(shape.value_heads)
        for place in range(new.start, new.stop):
            total = total + log_decay[place]
            lane.decays[place] = total
        output = self._outputs(lane, q, v, new)
        output = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + self._eps)
        z = z.reshape(BLOCK, -1, DELTA_HEAD)
        output = weights.norm.float() * output * (z / (1 + torch.exp(-z)))  # F.silu has no fixed bits: see epilogue.py
        return output.flatten(1)[new].to(x.dtype)

    def _convolve(self, lane: LaneStates, weights: DeltaWeights, inputs: Tensor, new: slice) -> Tensor:
        """Return silu of the convolution of the rows `new` of inputs [64, C], and note the last ones."""
        before = DELTA_TAPS - 1
        window = torch.cat([torch.zeros(before, inputs.shape[1]), inputs])
        window[new.start : new.start + before] = lane.inputs.float()
        lane.inputs.copy_(window[new.stop : new.stop + before])
        if new.stop == BLOCK:
            lane.border_inputs.copy_(lane.inputs)
        taps = weights.taps.float()[:, 0]
        mixed = window[:BLOCK] * taps[:, 0]
        for tap in range(1, DELTA_TAPS):
            mixed = mixed + window[tap : tap + BLOCK] * taps[:, tap]
        return mixed / (1 + torch.exp(-mixed))

    def _outputs(self, lane: LaneStates, q: Tensor, v: Tensor, new: slice) -> Tensor:
        """Return the outputs [64, H, D] float32 of the rows `new` of q and v, whose keys, strengths and decays the lane
        has, and add residuals and writes to the lane."""
        dtype, group, row = q.dtype, self._group, torch.arange(BLOCK)
        exists, fresh = row < new.stop, (row >= new.start) & (row < new.stop)
        heads = [each.float().view(BLOCK, -1, DELTA_HEAD).transpose(0, 1) for each in (q, v)]
        query, value = heads[0].repeat_interleave(group, 0), heads[1]
        keys = _only(lane.keys.float().transpose(0, 1), exists).repeat_interleave(group, 0)
        decays = lane.decays.t().masked_fill(~exists, 0.0)
        strengths = lane.strengths.t().masked_fill(~exists, 0.0)[:, :, None]
        factors, query_factors = _factors(keys), _factors(query) * DELTA_HEAD**-0.5
        causal = (row[:, None] >= row) & exists[:, None]
        decay = (decays[:, :, None] - decays[:, None, :]).masked_fill(~causal, -torch.inf).exp()
        lower = strengths * (keys @ keys.mT) * (factors * factors.mT) * decay
        lower = lower.masked_fill(row[:, None] == row, 0.0)
        weights = _round((query @ keys.mT) * (query_factors * factors.mT) * decay, dtype)

        state, reach = lane.rounded.float(), decays.exp()[:, :, None]
        residual = strengths * (value - reach * factors * (_only(keys, fresh) @ state))
        writes = lane.writes.float().transpose(0, 1)
        for first in range(0, BLOCK, PART):
            part = slice(first, first + PART)
            computed = fresh[part]
            if not computed.any():
                continue
            early = _round(lower[:, part].masked_fill(row >= first, 0.0), dtype)
            rest = residual[:, part] - early @ _only(writes, row < first)
            lane.residuals[computed] = rest.transpose(0, 1)[computed].to(dtype)
            kept = _only(lane.residuals.float().transpose(0, 1), exists[part])
            write = rest + _round(_invert(lower[:, part, part]).tril(-1), dtype) @ kept
            lane.writes[part][computed] = write.transpose(0, 1)[computed].to(dtype)
            writes = lane.writes.float().transpose(0, 1)
        output: Tensor = reach * query_factors * (query @ state) + weights @ _only(writes, exists)
        return output.transpose(0, 1)


def _lane(states: LaneStates, lane: int) -> LaneStates:
    return LaneStates(*(getattr(states, field.name)[lane] for field in fields(states)))


def _advance(lane: LaneStates, group: int) -> None:
    """Replace a lane's state by the one after its block, which is full."""
    keys = lane.keys.float().transpose(0, 1).repeat_interleave(group, 0)
    decays, dtype = lane.decays.t(), lane.writes.dtype
    last = decays[:, -1:]
    factors = _factors(keys) * (last - decays).exp()[:, :, None]
    writes = _round(lane.writes.float().transpose(0, 1) * factors, dtype)
    state = lane.state * last.exp()[:, :, None] + keys.mT @ writes
    lane.state.copy_(state)
    lane.rounded.copy_(state)


def _invert(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1 of strictly lower triangular matrices [H, 16, 16], row after row."""
    result = torch.eye(PART).expand_as(lower).clone()
    for row in range(1, PART):
        result[:, row, :row] = -(lower @ result)[:, row, :row]
    return result


def _factors(x: Tensor) -> Tensor:
    """Return the factors [..., 1] that give vectors x [..., D] the length 1."""
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def _only(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.masked_fill(~mask[:, None], 0.0)
