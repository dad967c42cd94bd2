"""EAGLE-3: a layer that drafts token by token (arXiv 2503.01840).

A row of the head is made of a state and a token: for position i of a sequence, the state h = fc(f), where f has the
outputs of some of the target's layers at position i side by side, and the token at position i + 1. Queries, keys and
values come from both, side by side after a norm each. Keys and values of position i are written to the pages in the
step that computes position i, in a layer of the KV pool after the target's.

The token at i + 1 is known in that step, but for the last position of a sequence. So the first row of a draft is that
position again, with the token that was drawn for it. Its result is the logits of the first draft, and the state of the
next row, which has the first draft as its token, and so on. These rows go to the pages after it, where the next step
overwrites them.

Where a prefill is cut into chunks, and where a cached page ends, the keys and values of one position were made with the
wrong token. This makes drafts a little worse, and changes nothing else.

Shape letters: see head.py and layered.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.rope import HeadNorm, SlotMapping, rope_write
from fastgen.model.linear import Linear
from fastgen.model.parameters import Parameters
from fastgen.model.rope import rope_tables
from fastgen.model.transformer import StepPart
from fastgen.model.weights import Shard, Tensors
from fastgen.speculation.head import HeadPlace
from fastgen.speculation.heads import EagleConfig
from fastgen.speculation.layered import LOGITS, LayeredHead, LayeredWeights


class EagleWeights(LayeredWeights):
    """The weights of an EAGLE-3 head, on the target's device and in its dtype.

    norms: by the names of a checkpoint without `.weight`. qkv: inputs are 2 H, of which `kv` has the rows of keys and
    values.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig, target: Parameters, context: int, deterministic: bool) -> None:
        self.config = config
        super().__init__(config, target, target.new_memory(), target.lm_head.batch_invariant)
        there = any(config.folder.glob("*.safetensors"))  # not for load="dummy"
        names = {_plain(name) for name in dict(self.read())} if there else set()
        c, hidden, count = config.layers, config.layers.hidden_size, len(config.features)
        heads, kv_heads = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        sizes = dict.fromkeys(("norm", "input_layernorm", "hidden_norm", "post_attention_layernorm"), hidden)
        sizes |= {f"fc_norm.{number}": hidden for number in range(count) if config.fc_norm}
        sizes |= {"input_norm": count * hidden} if config.norm_before_fc else {}
        qk_norm = "self_attn.q_norm.weight" in names
        sizes |= {f"self_attn.{name}_norm": c.head_size for name in "qk" if qk_norm}
        self.norms = {name: RMSNorm(self._zeros(size), c.norm_eps) for name, size in sizes.items()}
        self.fc = self._linear(hidden, count * hidden)
        self.qkv = self._linear(heads + 2 * kv_heads, 2 * hidden)
        self.kv = Linear(self.qkv.weight[heads:], None, self._invariant)
        self.o, self.down = self._linear(hidden, heads), self._linear(hidden, c.intermediate_size)
        self.gate_up = self._linear(2 * c.intermediate_size, hidden)
        self.head_norm: HeadNorm | None = None
        if qk_norm:
            q, k = (self.norms[f"self_attn.{name}_norm"].weight for name in "qk")
            self.head_norm = HeadNorm(q, k, c.norm_eps)
        own = config.reduced or "lm_head.weight" in names
        self.lm_head = self._linear(config.reduced or target.config.vocab_size, hidden) if own else None
        self.cos, self.sin = (table.to(target.device) for table in rope_tables(c, context))

    def shards(self) -> dict[str, Shard]:
        c = self.config.layers
        kv_heads, inner = c.num_kv_heads * c.head_size, c.intermediate_size
        stacked = {
            self.qkv: {"self_attn.q_proj": c.num_heads * c.head_size, "self_attn.k_proj": kv_heads,
                       "self_attn.v_proj": kv_heads},
            self.gate_up: {"mlp.gate_proj": inner, "mlp.up_proj": inner},
        }  # fmt: skip
        tensors = {"fc": self.fc.weight, "self_attn.o_proj": self.o.weight, "mlp.down_proj": self.down.weight}
        for linear, rows in stacked.items():
            tensors |= dict(zip(rows, torch.split(linear.weight, list(rows.values())), strict=True))
        tensors |= {name: norm.weight for name, norm in self.norms.items()}
        if self.lm_head is not None:
            tensors["lm_head"] = self.lm_head.weight
        return {f"{name}.weight": Shard.whole(weight) for name, weight in tensors.items()}

    def finish(self) -> None:
        """Nothing is made of the weights."""

    def update(self, named: Tensors) -> None:
        self.store({_plain(name): x for name, x in dict(named).items()})

    def attach(self, place: HeadPlace) -> Eagle:
        return Eagle(self, place)


class Eagle(LayeredHead):
    """An EAGLE-3 head in a Runner."""

    def __init__(self, weights: EagleWeights, place: HeadPlace) -> None:
        super().__init__(weights, place, weights.config.drafts)
        self.weights, self._head = weights, weights.config
        self._attention = place.make_attention(self._head.layers.num_heads, self._options.most_lanes)
        self._states = self._zeros(self._head.layers.hidden_size)

    @property
    def linears(self) -> Iterable[tuple[Linear, Fused]]:
        own, adds = self.weights, torch.zeros_like(self.weights.norms["norm"].weight)[None]
        yield from ((linear, Fused()) for linear in (own.fc, own.kv, own.qkv))
        yield from ((own.o, Fused(add=adds)), (own.gate_up, Fused(swiglu=True)), (own.down, Fused(add=adds)))
        if own.lm_head is not None:
            yield own.lm_head, LOGITS

    # ------------------------------------------------------------------------------------------- the context

    def _keep_context(self, part: StepPart, features: Tensor) -> None:
        states = self._states[: len(features)]
        states.copy_(self._state_of(features))
        both = self._both(part.token_ids.roll(-1), states)[0]
        mapping = self._mapping(part.mapping.positions, part.mapping.slots, part.mapping.real)
        rope_write(self.weights.kv.apply(both), mapping, *self._keys_and_values, self.weights.head_norm)

    @property
    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        return self._pool.keys[0], self._pool.values[0]

    def _state_of(self, features: Tensor) -> Tensor:
        """Return the states, [T, H], of features [T, F H]."""
        norms = self.weights.norms
        if self._head.norm_before_fc:
            features = _normed(features, norms["input_norm"])
        if self._head.fc_norm:
            chunks = torch.split(features, self._head.layers.hidden_size, 1)
            parts = [_normed(chunk.contiguous(), norms[f"fc_norm.{at}"]) for at, chunk in enumerate(chunks)]
            features = torch.cat(parts, 1)
        return self.weights.fc.apply(features)

    def _both(self, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of qkv [T, 2 H], for tokens [T] and states [T, H], and the normed states."""
        norms = self.weights.norms
        embedded = _normed(F.embedding(ids, self._target.parameters.embedding), norms["input_layernorm"])
        normed = _normed(states, norms["hidden_norm"])
        return torch.cat((embedded, normed), 1), normed

    def _mapping(self, positions: Tensor, slots: Tensor, real: int) -> SlotMapping:
        own, (num_kv, page_size) = self.weights, self._pool.keys.shape[2:4]
        return SlotMapping(positions, slots, own.cos, own.sin, real, num_kv, page_size)

    # ------------------------------------------------------------------------------------------- drafts

    def body(self, size: int) -> None:
        lanes, most = self._draw_lanes[:size], self.most_drafts(size)
        start, limits = self._lanes.kv_lens[lanes], self._limits[lanes]
        states, ids = self._states[self._ends[:size]], self._lanes.state.last_token[lanes]
        for number in range(most):
            position = start - 1 + number
            hidden, states = self._run(lanes, position, position < limits, ids, states)
            ids = self.draw(self.weights.logits(hidden, self._target.parameters), lanes, position + 2)
            self._tokens[lanes, number] = ids
        self._counts[lanes] = (limits - start + 1).clamp(0, most)

    def _run(
        self, lanes: Tensor, position: Tensor, inside: Tensor, ids: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the results of the layer [S, H], normed for the head, and the states of the next rows.

        position: int32 [S], of the rows. inside: bool [S], whether they have a slot. ids: int64 [S]. states: [S, H].
        """
        own, norms = self.weights, self.weights.norms
        at = torch.where(inside, position, 0).clamp(min=0).long()
        mapping = self._mapping(at, self._slots(lanes, at, inside), len(at))
        both, normed = self._both(ids, states)
        q = rope_write(own.qkv.apply(both), mapping, *self._keys_and_values, own.head_norm)
        plan = self._attention.plan_decode(lanes, at.int() + 1, self._lanes.page_table)
        attended = self._attention.attend(plan, 0, q, 0).flatten(1)
        x = own.o.apply(attended, Fused(add=(normed if self._head.norm_before_residual else states).clone()))
        inner = own.gate_up.apply(x, Fused(swiglu=True), norms["post_attention_layernorm"])
        x = own.down.apply(inner, Fused(add=x))
        hidden = _normed(x, norms["norm"])
        return hidden, hidden if self._head.norm_output else x


def _normed(x: Tensor, norm: RMSNorm) -> Tensor:
    y: Tensor = rms_norm(x, norm)
    return y


def _plain(name: str) -> str:
    """Return a tensor's name without the place of the layer."""
    return name.removeprefix("model.").removeprefix("midlayer.").removeprefix("layers.0.")
