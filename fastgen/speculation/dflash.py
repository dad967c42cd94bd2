"""DFlash: a head that drafts a block of tokens in one pass (arXiv 2602.06036).

The head has a few layers of Qwen3's kind. Its context is not made of tokens, but of the target's residual stream: the
outputs of some of the target's layers, side by side, go through `fc` and `hidden_norm`, and each layer of the head
makes keys and values of the result. These are written to the pages of the KV pool in the step that computes a token, in
layers of the pool after the target's. They depend only on earlier tokens, as the target's keys and values do. So
whatever happens to a page (a prefix cache hit, the host tier, a copy for a fork) happens to the head's context too.

After each draw, the block is computed at the positions from the last token on: that token, and then mask tokens. All
rows of a block see the whole context and the whole block. To attention, each row is therefore a decode, and all rows of
a lane have the same length, the end of the block. The keys and values of the block go into the pages after the context,
where the next step overwrites them. If the pages of a sequence do not have room for a block, the block is shorter.

DSpark's heads are DFlash heads with a Markov head: each token adds logits to those of the next one, so that drafts are
drawn one after the other.

Shape letters, in addition to the letters in head.py and layered.py: B rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.rope import SlotMapping, rope_write
from fastgen.model.linear import Linear
from fastgen.model.packed import pack
from fastgen.model.parameters import Parameters
from fastgen.model.transformer import StepPart, Transformer
from fastgen.model.weights import Shard, Tensors
from fastgen.parallel.residual import ReplicatedResidual
from fastgen.speculation.head import HeadPlace
from fastgen.speculation.heads import DFlashConfig
from fastgen.speculation.layered import LOGITS, LayeredHead, LayeredWeights


class DFlashWeights(LayeredWeights):
    """The weights of a DFlash head, on the target's device and in its dtype.

    `layers` is a Transformer of the head's layers, whose stages are used one by one. hidden_norm: the norm of fc's
    outputs. kv: the rows of each layer's qkv that make keys and values. markov: the Markov head, if there is one: for
    each token a row, [V, rank], and the matrix that makes logits of it, [V, rank].
    """

    config: DFlashConfig

    def __init__(self, head: DFlashConfig, target: Parameters, context: int, deterministic: bool) -> None:
        self.config = head
        sizes = replace(head.layers, vocab_size=1)  # no embedding of its own
        own = self._parameters = Parameters(sizes, target.dtype, target.device, deterministic=deterministic)
        super().__init__(head, target, own.memory, own.layers[0].qkv.batch_invariant)
        hidden, eps = head.layers.hidden_size, head.layers.norm_eps
        self.layers = Transformer(own, context)
        self.fc = self._linear(hidden, len(head.features) * hidden)
        self.hidden_norm = RMSNorm(self._zeros(hidden), eps)
        self.lm_head = self._linear(head.reduced, hidden) if head.reduced else None
        self.kv: list[Linear] = []
        self.markov: tuple[Tensor, Linear] | None = None
        if head.markov_rank:
            shape = target.config.vocab_size, head.markov_rank
            self.markov = self._zeros(*shape), self._linear(*shape)

    @property
    def norm(self) -> RMSNorm:
        return self._parameters.norm

    def attach(self, place: HeadPlace) -> DFlash:
        return DFlash(self, place)

    def update(self, named: Tensors) -> None:
        tensors = {name.removeprefix("model."): x for name, x in dict(named).items()}
        self._parameters.unpack()
        try:
            self.store({name: x for name, x in tensors.items() if not name.startswith("confidence_head.")})
        finally:
            self.finish()

    def shards(self) -> dict[str, Shard]:
        shards = {name.removeprefix("model."): shard for name, shard in self._parameters.targets().items()}
        del shards["embed_tokens.weight"]
        shards |= {"fc.weight": Shard.whole(self.fc.weight), "hidden_norm.weight": Shard.whole(self.hidden_norm.weight)}
        if self.lm_head is not None:
            shards["lm_head.weight"] = Shard.whole(self.lm_head.weight)
        if self.markov is not None:
            shards["markov_head.markov_w1.weight"] = Shard.whole(self.markov[0])
            shards["markov_head.markov_w2.weight"] = Shard.whole(self.markov[1].weight)
        return shards

    def finish(self) -> None:
        """Take the parts of weights, and pack the layers' where that is faster."""
        c, invariant = self.config.layers, self.fc.batch_invariant
        first = c.num_heads * c.head_size
        qkvs = [layer.qkv for layer in self._parameters.layers]
        self.kv = [Linear(x.weight[first:], None if x.bias is None else x.bias[first:], invariant) for x in qkvs]
        self._parameters.pack()
        if (kind := self._parameters.packing) is not None:
            self.kv = [pack(linear, kind, self._parameters.memory.zeros) for linear in self.kv]


class DFlash(LayeredHead):
    """A DFlash head in a Runner."""

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, weights: DFlashWeights, place: HeadPlace) -> None:
        super().__init__(weights, place, weights.config.block - weights.config.first)
        self.weights, self._head = weights, weights.config
        own = self._head.layers
        self._attention = place.make_attention(own.num_heads, self._options.most_lanes * self._head.block)
        self._offsets = self._offsets[: self._head.block]

    def _keep_context(self, part: StepPart, features: Tensor) -> None:
        own, positions, slots = self.weights, part.mapping.positions, part.mapping.slots
        norm = own.hidden_norm
        context = rms_norm(own.fc.apply(features), norm)
        mapping = own.layers.slot_mapping(self._pool, positions, slots, part.mapping.real)
        for number, (layer, kv) in enumerate(zip(own.layers.layers, own.kv, strict=True)):
            keys, values = self._pool.keys[number], self._pool.values[number]
            rope_write(kv.apply(context), mapping, keys, values, layer.head_norm)

    def body(self, size: int) -> None:
        lanes, own, block = self._draw_lanes[:size], self._lanes, self._head.block
        start = own.kv_lens[lanes]
        room = (self._limits[lanes] - start).clamp(0, block)
        mapping, ids = self._block(lanes, start, room)
        ends = (start + room).clamp(min=1).repeat_interleave(block)
        plan = self._attention.plan_decode(lanes.repeat_interleave(block), ends, own.page_table)
        x = self._run(StepPart(ids, mapping, plan)).view(size, block, -1)
        first, most = self._head.first, self.most_drafts(size)
        positions = start[:, None] + 1 + self._offsets[:most]
        rows = x[:, first : first + most].flatten(0, 1)
        logits = self.weights.logits(rows, self._target.parameters, self.weights.norm)
        if self.weights.markov is None:
            drafts = self.draw(logits, lanes.repeat_interleave(most), positions.flatten()).view(size, most)
        else:
            drafts = self._draw_in_turn(logits.view(size, most, -1), lanes, positions, *self.weights.markov)
        self._tokens[lanes, :most] = drafts
        self._counts[lanes] = (room - first).clamp(0, most)

    def _block(self, lanes: Tensor, start: Tensor, room: Tensor) -> tuple[SlotMapping, Tensor]:
        """Return the mapping and the tokens of the rows of a block, int64 [S B]. start, room: int32 [S], the position
        of its first row, and the number of rows that have a slot."""
        inside = self._offsets < room[:, None]
        positions = torch.where(inside, start[:, None] + self._offsets, 0)
        slots = self._slots(lanes[:, None], positions, inside)
        last = self._lanes.state.last_token[lanes][:, None]
        ids = torch.where(self._offsets == 0, last, self._head.mask_id)
        flat = positions.flatten(), slots.flatten()
        return self.weights.layers.slot_mapping(self._pool, *flat, len(flat[0])), ids.flatten()

    def _run(self, part: StepPart) -> Tensor:
        """Return the residual stream [S B, H] after the head's layers."""
        model = self.weights.layers
        embedding = F.embedding(part.token_ids, self._target.parameters.embedding)
        part.residual = ReplicatedResidual(model.group, embedding)
        for number in range(len(model.layers)):
            q = model.project_qkv(part, number, self._pool)
            attended = self._attention.attend(part.plan, number, q, 0).flatten(1)
            model.add_attended(part.residual, number, attended)
            model.add_mlp(part.residual, number)
        return part.residual.whole()

    def _draw_in_turn(self, logits: Tensor, lanes: Tensor, positions: Tensor, rows: Tensor, matrix: Linear) -> Tensor:
        """Return drafts, int64 [S, D], from logits [S, D, V] and those that the token before each of them adds. rows,
        matrix: the Markov head."""
        last, drafts = self._lanes.state.last_token[lanes], list[Tensor]()
        for number in range(logits.shape[1]):
            added = matrix.apply(F.embedding(last, rows), LOGITS)
            last = self.draw(logits[:, number] + added, lanes, positions[:, number])
            drafts.append(last)
        return torch.stack(drafts, 1)

    @property
    def linears(self) -> Iterable[tuple[Linear, Fused]]:
        layer, adds = self.weights.layers.layers[0], torch.zeros_like(self.weights.hidden_norm.weight)[None]
        yield from ((self.weights.fc, Fused()), (self.weights.kv[0], Fused()), (layer.qkv, Fused()))
        yield from ((layer.o, Fused(add=adds)), (layer.gate_up, Fused(swiglu=True)), (layer.down, Fused(add=adds)))
        if self.weights.lm_head is not None:
            yield self.weights.lm_head, LOGITS
        if self.weights.markov is not None:
            yield self.weights.markov[1], LOGITS
