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

The drafts are drawn with the noise of the draws that will verify them, so that the same token is drawn wherever the two
distributions are close.

Shape letters: S lanes, B rows of a block, H hidden size, F layers of the target that are read, V vocabulary, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.pinned import upload
from fastgen.engine.cuda_graphs import Graphs, smallest_size
from fastgen.engine.options import EngineConfig
from fastgen.engine.speculation.heads import HeadConfig
from fastgen.engine.speculation.planning import DraftPlan
from fastgen.engine.step import Lanes
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.drafts import Drawn
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.rope import SlotMapping, rope_write
from fastgen.model.attention.interface import Attention
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import Linear
from fastgen.model.loader import fill_random, read_tensors
from fastgen.model.packed import pack
from fastgen.model.parameters import Parameters
from fastgen.model.sampler import SamplePlan, draw
from fastgen.model.transformer import StepPart, Transformer
from fastgen.model.weights import Shard, Tensors, Update, write
from fastgen.parallel.residual import ReplicatedResidual

COPIES = ("embed_tokens.weight", "t2d")
"""Tensors of checkpoints that are not needed: a copy of the target's embedding, and the inverse of d2t."""

PLAN = SamplePlan(
    greedy=True, random=True, penalties=False, addends=False, min_p=False, keep_mask=False, sorted_tokens=0,
    top_logprobs=0,
)  # fmt: skip
"""How drafts are drawn: at the temperature of the request, without truncation."""


class DFlashWeights:
    """The weights of a DFlash head, on the target's device and in its dtype.

    `layers` is a Transformer of the head's layers, whose stages are used one by one. fc: [H, F H]. hidden_norm: of its
    result. kv: the rows of each layer's qkv that make keys and values. lm_head: of the reduced vocabulary, with the
    target's tokens `ids`, int64 [reduced]; None: the target's head is used.
    """

    def __init__(self, head: HeadConfig, target: Parameters, context: int, deterministic: bool) -> None:
        self.config = head
        sizes = replace(head.layers, vocab_size=1)  # no embedding of its own
        own = self._parameters = Parameters(sizes, target.dtype, target.device, deterministic=deterministic)
        self.memory = own.memory
        hidden, eps = head.layers.hidden_size, head.layers.norm_eps
        invariant = own.layers[0].qkv.batch_invariant
        self.layers = Transformer(own, context)
        self.fc = Linear(self._zeros(hidden, len(head.features) * hidden), None, invariant)
        self.hidden_norm = RMSNorm(self._zeros(hidden), eps)
        self.lm_head = Linear(self._zeros(head.reduced, hidden), None, invariant) if head.reduced else None
        self.ids = torch.arange(head.reduced, device=target.device)
        self.kv: list[Linear] = []

    def _zeros(self, *shape: int) -> Tensor:
        return self.memory.zeros(shape, self._parameters.dtype)

    @property
    def norm(self) -> RMSNorm:
        return self._parameters.norm

    def load(self, dummy: bool) -> None:
        """Read the checkpoint, or if dummy, make random weights."""
        if dummy:
            fill_random(self._shards())
            self._finish()
            return
        try:
            self.update(read_tensors(self.config.folder))
        except ValueError as error:
            raise ValueError(f"speculate is {str(self.config.folder)!r}: {error}") from error

    def update(self, named: Tensors) -> None:
        """Write whole tensors by their names in a checkpoint. Raises ValueError, and nothing is written, if they do not
        fit."""
        tensors = {name.removeprefix("model."): x for name, x in dict(named).items()}
        offsets = tensors.pop("d2t", None)
        unneeded = (*COPIES, *(() if self.lm_head else ("lm_head.weight",)))
        self._parameters.unpack()
        shards = self._shards()
        update = Update({name: x for name, x in tensors.items() if name not in unneeded}, shards)
        try:
            update.check()
            if self.lm_head is not None:
                self._set_ids(offsets)
            write(shards, update.tensors())
        finally:
            self._finish()

    def _set_ids(self, offsets: Tensor | None) -> None:
        """Set the tokens of the reduced vocabulary: number + d2t[number]."""
        if offsets is None or offsets.shape != self.ids.shape:
            raise ValueError(f"draft_vocab_size={len(self.ids)} needs a tensor d2t [{len(self.ids)}]")
        ids = torch.arange(len(offsets)) + offsets.cpu().long()
        if len(set(ids.tolist())) < len(ids) or int(ids.min()) < 0:
            raise ValueError("d2t must name another token for each number")
        self.ids.copy_(ids)

    def _shards(self) -> dict[str, Shard]:
        """Return the places of tensors by their names in a checkpoint."""
        shards = {name.removeprefix("model."): shard for name, shard in self._parameters.targets().items()}
        del shards["embed_tokens.weight"]
        shards |= {"fc.weight": Shard.whole(self.fc.weight), "hidden_norm.weight": Shard.whole(self.hidden_norm.weight)}
        if self.lm_head is not None:
            shards["lm_head.weight"] = Shard.whole(self.lm_head.weight)
        return shards

    def _finish(self) -> None:
        """Take the parts of weights, and pack the layers' where that is faster."""
        c, invariant = self.config.layers, self.fc.batch_invariant
        first = c.num_heads * c.head_size
        qkvs = [layer.qkv for layer in self._parameters.layers]
        self.kv = [Linear(x.weight[first:], None if x.bias is None else x.bias[first:], invariant) for x in qkvs]
        packs = [type(x) for x in qkvs]
        self._parameters.pack()
        if [type(layer.qkv) for layer in self._parameters.layers] != packs:
            self.kv = [pack(linear) for linear in self.kv]


class DFlash:
    """A DFlash head in a Runner: an Observer that keeps the context, and a Drafter.

    pool: the head's layers of the KV pool. attention: attention over `pool`, for the rows of all blocks of a step.
    tokens: int64 [L, D], and counts: int32 [L], where it writes drafts. layers: numbers of the target's layers that are
    read. graphs: CUDA graphs of `body` by the number of lanes, if there are some.
    """

    name = "head"

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(
        self,
        weights: DFlashWeights,
        target: Transformer,
        pool: KVPool,
        attention: Attention,
        lanes: Lanes,
        config: EngineConfig,
        tokens: Tensor,
        counts: Tensor,
    ) -> None:
        assert config.speculate is not None
        assert target.group.size == 1
        self.weights, self._head, self._target, self._options = weights, weights.config, target, config.speculate
        self._pool, self._attention, self._lanes = pool, attention, lanes
        self._tokens, self._counts = tokens, counts
        self.layers = frozenset(self._head.features)
        self.graphs: Graphs[int] | None = None
        most, device = self._options.most_lanes, pool.keys.device
        shape = config.max_step_tokens + target.row_tile, len(self._head.features) * self._head.layers.hidden_size
        self._features = pool.memory.zeros(shape, target.parameters.dtype)  # it sleeps with the pool
        self._limits = torch.zeros(lanes.padding + 1, dtype=torch.int32, device=device)
        self._drawing = torch.full((most,), lanes.padding, dtype=torch.int64, device=device)
        self._offsets = torch.arange(self._head.block, device=device)
        self._state = copy.copy(lanes.state)  # with the same parameters of lanes, and another last token
        self._state.last_token = torch.zeros_like(lanes.state.last_token)

    def update(self, named: Tensors) -> None:
        self.weights.update(named)

    def release(self) -> None:
        self.weights.memory.release(keep=True)  # even if the target's weights are dropped and will be written again

    def restore(self) -> None:
        self.weights.memory.restore()

    # ------------------------------------------------------------------------------------------- the context

    def observe(self, part: StepPart, number: int) -> None:
        x, hidden = part.residual.whole(), self._head.layers.hidden_size
        for at, layer in enumerate(self._head.features):
            if layer == number:
                self._features[: len(x), at * hidden : (at + 1) * hidden] = x
        if number == max(self.layers):
            self._keep_context(part, len(x))

    def _keep_context(self, part: StepPart, count: int) -> None:
        """Write the keys and values of a step's tokens to the pages."""
        own, positions, slots = self.weights, part.mapping.positions, part.mapping.slots
        norm = own.hidden_norm
        context = rms_norm(own.fc.apply(self._features[:count]), norm.weight, norm.eps)
        mapping = own.layers.slot_mapping(self._pool, positions, slots, part.mapping.real)
        for number, (layer, kv) in enumerate(zip(own.layers.layers, own.kv, strict=True)):
            keys, values = self._pool.keys[number], self._pool.values[number]
            rope_write(kv.apply(context), mapping, keys, values, layer.head_norm)

    # ------------------------------------------------------------------------------------------- drafts

    def begin(self, plan: DraftPlan) -> None:
        """Lanes have their context in the pages already."""

    def draft(self, drawn: Drawn, plan: DraftPlan, rows: Tensor, tokens: Tensor, counts: Tensor) -> bool:
        if not plan.limits:
            return False
        count = size = len(drawn.lanes)
        self._limits[drawn.lanes] = upload(np.array(plan.limits, dtype=np.int32), self._limits.device)
        self._drawing[:count] = drawn.lanes
        if self.graphs is None:
            self.body(size)
        else:
            size = smallest_size(self.graphs.keys, count)
            self._drawing[count:size] = self._lanes.padding
            self.graphs.run(size)
        return True

    def body(self, size: int) -> None:
        """Draft for the first `size` of the lanes that draw, with all tensors at fixed addresses."""
        lanes, own, block = self._drawing[:size], self._lanes, self._head.block
        start = own.kv_lens[lanes]
        room = (self._limits[lanes] - start).clamp(0, block)
        mapping, ids = self._block(lanes, start, room)
        ends = (start + room).clamp(min=1).repeat_interleave(block)
        plan = self._attention.plan_decode(lanes.repeat_interleave(block), ends, own.page_table)
        x = self._run(StepPart(ids, mapping, plan)).view(size, block, -1)
        first, most = self._head.first, self.most_drafts(size)
        positions = (start[:, None] + 1 + self._offsets[:most]).flatten()
        rows = x[:, first : first + most].flatten(0, 1)
        drawn = draw(self._logits(rows), self._state, lanes.repeat_interleave(most), positions, PLAN, None)
        self._tokens[lanes, :most] = drawn.tokens.clamp(min=0).view(size, most)
        self._counts[lanes] = (room - first).clamp(0, most)

    def most_drafts(self, size: int) -> int:
        """Return the maximum number of drafts of each of `size` lanes, for which a step can have rows."""
        rows = max(2 * self._options.row_limit(size) // size - 1, 1)  # see Speculator.best_rows
        return min(rows, self._head.block - self._head.first, self._options.max_draft)

    def _block(self, lanes: Tensor, start: Tensor, room: Tensor) -> tuple[SlotMapping, Tensor]:
        """Return the mapping and the tokens of the rows of a block, int64 [S B]. start, room: int32 [S], the position
        of its first row, and the number of rows that have a slot."""
        size, inside = self._pool.page_size, self._offsets < room[:, None]
        positions = torch.where(inside, start[:, None] + self._offsets, 0)
        pages = self._lanes.page_table[lanes[:, None], positions // size].long()
        slots = torch.where(inside, pages * size + positions % size, -1)
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
            model.add_attended(part, number, attended)
            model.add_mlp(part, number)
        return part.residual.whole()

    def _logits(self, x: Tensor) -> Tensor:
        """Return logits, float32 [R, V], of rows x [R, H]."""
        own, fused = self.weights, Fused(out_dtype=torch.float32)
        if own.lm_head is None:
            return self._target.parameters.lm_head.apply(x, fused, own.norm)
        reduced = own.lm_head.apply(x, fused, own.norm)
        logits = reduced.new_full((len(x), self._target.config.vocab_size), -torch.inf)
        return logits.index_copy_(1, own.ids, reduced)

    @property
    def linears(self) -> Iterable[tuple[Linear, Fused]]:
        """One linear layer per kind, with what is fused with it; see warm_up.products_of."""
        layer, adds = self.weights.layers.layers[0], torch.zeros_like(self.weights.hidden_norm.weight)[None]
        yield from ((self.weights.fc, Fused()), (self.weights.kv[0], Fused()), (layer.qkv, Fused()))
        yield from ((layer.o, Fused(add=adds)), (layer.gate_up, Fused(swiglu=True)), (layer.down, Fused(add=adds)))
        if self.weights.lm_head is not None:
            yield self.weights.lm_head, Fused(out_dtype=torch.float32)
