"""Gated DeltaNet (Qwen3.5) in a form whose prefill and decode have the same bits, in torch.

    H value heads, K key heads, D head size, B = 64 tokens of a block, N new tokens

A sequence is cut into blocks of 64 tokens. A `Lane` holds the state S (H, D, D) before the current block, and the rows
of the tokens that the block has so far. Token t of a block has a key k, a query q, a value v, a write strength beta,
and G, the sum of the log decays from the block's first token to t:

    A[t, j] = beta[t] (k[t] . k[j]) exp(G[t] - G[j])     for j < t, otherwise 0
    T       = (I + A)^-1                                  row t needs rows <= t of A
    r[t]    = beta[t] (v[t] - exp(G[t]) k[t] S)
    d[t]    = r[t] + sum over j < t of T[t, j] r[j]       what the token writes
    o[t]    = exp(G[t]) q[t] S + sum over j <= t of exp(G[t] - G[j]) (q[t] . k[j]) d[j]
    S'      = exp(G[63]) S + sum over j of exp(G[63] - G[j]) k[j]^T d[j]

A token's output is a function of S and of the block's rows up to it, whoever computes it: a prefill computes 64 rows, a
decode one. Both multiply tiles of the same shape, in which the rows that are not computed, or do not exist yet, are
zero; a row of a product does not depend on the other rows. The state changes only when a block is full.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
PART = 16  # rows of T that are inverted together


@dataclass
class Lane:
    """What a sequence keeps of one layer: `state` (H, D, D) float32 at the start of the current block, the `count` rows
    of the block's tokens, and `inputs` (3, channels), the last inputs of the convolution."""

    state: Tensor
    inputs: Tensor
    keys: Tensor  # (H, 64, D)
    strengths: Tensor  # (H, 64), beta
    decays: Tensor  # (H, 64), G
    residuals: Tensor  # (H, 64, D), r
    writes: Tensor  # (H, 64, D), d
    count: int = 0

    def copy(self) -> Lane:
        return copy.deepcopy(self)

    def without_rows(self) -> Lane:
        """Return what is kept for prefix reuse at a block border: state and convolution inputs."""
        if self.count:
            raise ValueError(f"a state can be kept at a block border only; the block has {self.count} tokens")
        rows = (self.keys, self.strengths, self.decays, self.residuals, self.writes)
        return Lane(self.state.clone(), self.inputs.clone(), *(torch.full_like(row, torch.nan) for row in rows))


def new_lane(heads: int, size: int, channels: int) -> Lane:
    """Return the lane of an empty sequence. Rows hold NaN until they are written, so that reading one shows."""
    row = torch.full((heads, BLOCK, size), torch.nan)
    gate = torch.full((heads, BLOCK), torch.nan)
    zeros = torch.zeros(heads, size, size), torch.zeros(3, channels)
    return Lane(*zeros, row.clone(), gate.clone(), gate.clone(), row.clone(), row.clone())


def invert(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1 of strictly lower triangular matrices (H, 64, 64), in an order in which row t needs rows
    <= t: each 16 x 16 block on the diagonal by forward substitution, column by column, then the blocks beside it."""
    heads, parts = lower.shape[0], BLOCK // PART
    blocks = lower.view(heads, parts, PART, parts, PART)
    result = torch.zeros_like(lower)
    for i in range(parts):
        diagonal = torch.eye(PART).expand(heads, -1, -1).clone()
        for j in range(PART):
            diagonal = diagonal - blocks[:, i, :, i, j, None] * diagonal[:, j, None, :]
        rows = slice(i * PART, (i + 1) * PART)
        left = lower[:, rows].masked_fill(torch.arange(BLOCK) >= i * PART, 0.0)
        beside = torch.zeros(heads, PART, BLOCK)
        beside[:, :, rows] = torch.eye(PART)
        result[:, rows] = diagonal @ (beside - left @ result)
    return result


def add_rows(lane: Lane, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, dtype: torch.dtype) -> Tensor:
    """Add N rows to a lane's block, which has room for them, and return their outputs (N, H, D), float32.

    q, k, v: (N, H, D), q and k normalized and q scaled; g: (N, H), the log of the decay; beta: (N, H). All are float32
    with values of `dtype` where `dtype` multiplies them: operands of products are rounded to it, sums are float32.
    """
    new = slice(lane.count, lane.count + len(k))
    total = lane.decays[:, lane.count - 1] if lane.count else torch.zeros(k.shape[1])
    for place in range(len(k)):
        total = total + g[place]
        lane.decays[:, lane.count + place] = total
    lane.keys[:, new], lane.strengths[:, new] = k.transpose(0, 1), beta.t()

    row = torch.arange(BLOCK)
    exists, computed = row < new.stop, (row >= new.start) & (row < new.stop)
    keys, decays = _only(lane.keys, exists), lane.decays.masked_fill(~exists, 0.0)
    difference = decays[:, :, None] - decays[:, None, :]
    causal = (row[:, None] >= row[None, :]) & exists[:, None]
    decay = difference.masked_fill(~causal, -torch.inf).exp()
    strengths = lane.strengths.masked_fill(~exists, 0.0)[:, :, None]
    lower = (strengths * (keys @ keys.mT) * decay).masked_fill(row[:, None] == row[None, :], 0.0)
    mix = invert(lower).masked_fill(row[:, None] == row[None, :], 0.0)

    state = _round(lane.state, dtype)
    reach = decays.exp()[:, :, None]
    value, query = torch.zeros_like(keys), torch.zeros_like(keys)
    value[:, new], query[:, new] = v.transpose(0, 1), q.transpose(0, 1)
    residual = strengths * (value - reach * (_only(keys, computed) @ state))
    lane.residuals[:, new] = _round(residual, dtype)[:, new]
    write = residual + _only(_round(mix, dtype), computed) @ _only(lane.residuals, exists)
    lane.writes[:, new] = _round(write, dtype)[:, new]
    weights = _round((query @ keys.mT) * decay, dtype)
    output = reach * (query @ state) + weights @ _only(lane.writes, exists)
    lane.count = new.stop
    return output[:, new].transpose(0, 1)


def advance(lane: Lane, dtype: torch.dtype) -> None:
    """Replace the state by the one after a full block, and empty the block."""
    last = lane.decays[:, -1:]
    writes = _round(lane.writes * (last - lane.decays).exp()[:, :, None], dtype)
    lane.state = lane.state * last.exp()[:, :, None] + lane.keys.mT @ writes
    for rows in (lane.keys, lane.strengths, lane.decays, lane.residuals, lane.writes):
        rows.fill_(torch.nan)
    lane.count = 0


class Layer:
    """transformers' Qwen3_5GatedDeltaNet with the arithmetic of this module, for one sequence at a time."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.groups = module.num_v_heads // module.num_k_heads
        self.size = module.head_k_dim

    def new_lane(self) -> Lane:
        return new_lane(self.module.num_v_heads, self.size, self.module.conv_dim)

    def forward(self, x: Tensor, lane: Lane) -> Tensor:
        """Return the layer's output (N, hidden) of a sequence's next N tokens, and add them to its lane."""
        outputs = []
        while len(x):
            part = x[: BLOCK - lane.count]
            outputs.append(self._within_block(part, lane))
            x = x[len(part) :]
            if lane.count == BLOCK:
                advance(lane, self.dtype)
        return torch.cat(outputs)

    def draft(self, x: Tensor, lane: Lane, accepted: Callable[[Tensor], int]) -> Tensor:
        """Like `forward` of rows that end within the block, of which only the first `accepted(outputs)` remain."""
        if lane.count + len(x) > BLOCK:
            raise ValueError(f"drafts end at the block border: {len(x)} rows after {lane.count} of {BLOCK}")
        before, inputs = lane.count, lane.inputs
        outputs = self._within_block(x, lane)
        kept = accepted(outputs)
        lane.count = before + kept
        lane.inputs = torch.cat([inputs, self._last_inputs[:kept]])[-3:]
        if lane.count == BLOCK:
            advance(lane, self.dtype)
        return outputs[:kept]

    def _within_block(self, x: Tensor, lane: Lane) -> Tensor:
        """Compute the next rows at their places in a tile of 64: products and vectorized functions of torch give a row
        the same bits in any company only if the shape and the row's place are the same."""
        module, new = self.module, slice(lane.count, lane.count + len(x))
        tile = _place(x, new.start)
        inputs = self._linear(module.in_proj_qkv, tile)
        window = torch.cat([torch.zeros(3, module.conv_dim), inputs])
        window[new.start : new.start + 3] = lane.inputs
        self._last_inputs = inputs[new]
        lane.inputs = window[new.stop : new.stop + 3].clone()
        taps = module.conv1d.weight.float()[:, 0]
        mixed = window[:BLOCK] * taps[:, 0]
        for tap in range(1, 4):
            mixed = mixed + window[tap : tap + BLOCK] * taps[:, tap]
        mixed = mixed * torch.sigmoid(mixed)
        parts = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        q, k, v = (part.view(BLOCK, -1, self.size) for part in parts)
        q = self._round(_normalize(q) * self.size**-0.5).repeat_interleave(self.groups, 1)
        k = self._round(_normalize(k)).repeat_interleave(self.groups, 1)
        beta = torch.sigmoid(self._linear(module.in_proj_b, tile))
        a = self._linear(module.in_proj_a, tile)
        g = -module.A_log.float().exp() * F.softplus(a + module.dt_bias.float())
        output = add_rows(lane, q[new], k[new], self._round(v)[new], g[new], beta[new], self.dtype)
        output = _place(output, new.start)
        z = self._linear(module.in_proj_z, tile).view(BLOCK, -1, self.size)
        mean = output.pow(2).mean(-1, keepdim=True)
        output = output * torch.rsqrt(mean + module.layer_norm_epsilon)
        output = self._round(module.norm.weight.float() * output * (z * torch.sigmoid(z)))
        return self._linear(module.out_proj, output.reshape(BLOCK, -1))[new]

    def _linear(self, linear: torch.nn.Module, tile: Tensor) -> Tensor:
        return self._round(tile @ linear.weight.float().t())

    def _round(self, x: Tensor) -> Tensor:
        return _round(x, self.dtype)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def _only(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.masked_fill(~mask[:, None], 0.0)


def _place(rows: Tensor, first: int) -> Tensor:
    tile = torch.zeros(BLOCK, *rows.shape[1:])
    tile[first : first + len(rows)] = rows
    return tile


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
