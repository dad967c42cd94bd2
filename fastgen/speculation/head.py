"""The common part of heads, which are small models that draft from the target's residual stream: their weights, and
their work in a Runner.

Drafts are drawn with the noise of the draws that will verify them, so that the same token is drawn wherever the two
distributions are close.

Shape letters: S lanes, R rows of logits, H hidden size, V vocabulary, T tokens of a step, L all lanes, D maximum number
of drafts.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fastgen.device.memory import Memory
from fastgen.device.pinned import upload
from fastgen.engine.cuda_graphs import Graphs
from fastgen.engine.options import EngineConfig
from fastgen.engine.step import Lanes
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.drafts import StepDraws
from fastgen.model.attention.interface import Attention
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import Linear
from fastgen.model.loader import fill_random
from fastgen.model.sampler import SampleOutput, SamplePlan, draw
from fastgen.model.transformer import StepPart, Transformer
from fastgen.model.weights import Shard, Tensors
from fastgen.speculation.heads import HeadConfig
from fastgen.speculation.options import Speculation
from fastgen.speculation.planning import DraftPlan

PLAN = SamplePlan(
    greedy=True, random=True, penalties=False, addends=False, min_p=False, keep_mask=False, sorted_tokens=0,
    top_logprobs=0,
)  # fmt: skip
"""How drafts are drawn: at the temperature of the request, without truncation."""


@dataclass(frozen=True)
class HeadPlace:
    """The place of a head in a Runner.

    pool: the head's layers of the KV pool; all layers, if it has none. make_attention: returns attention over `pool`,
    for a number of query heads and a maximum number of rows. attention: the target's attention. tokens: int64 [L, D],
    and counts: int32 [L], where the head writes drafts.
    """

    target: Transformer
    pool: KVPool
    make_attention: Callable[[int, int], Attention]
    attention: Attention
    lanes: Lanes
    config: EngineConfig
    options: Speculation
    tokens: Tensor
    counts: Tensor


class HeadWeights(ABC):
    """The weights of a head, on the target's device and in its dtype. memory: holds them."""

    config: HeadConfig
    memory: Memory

    @abstractmethod
    def load(self, dummy: bool) -> None:
        """Fill the weights. dummy: those of a checkpoint are random, and no file is read."""

    @abstractmethod
    def update(self, named: Tensors) -> None:
        """Write all tensors by their names in a checkpoint. Raises ValueError, and nothing is written, if they do not
        fit."""

    @abstractmethod
    def attach(self, place: HeadPlace) -> Head:
        """Return the head that works in a Runner."""


class StoredWeights(HeadWeights):
    """The weights of a head that has a checkpoint."""

    @abstractmethod
    def read(self) -> Tensors:
        """Return the tensors of the checkpoint."""

    @abstractmethod
    def shards(self) -> dict[str, Shard]:
        """Return the places of tensors by their names in a checkpoint."""

    @abstractmethod
    def finish(self) -> None:
        """Act when `shards` have been written."""

    def load(self, dummy: bool) -> None:
        if dummy:
            fill_random(self.shards())
            self.finish()
            return
        try:
            self.update(self.read())
        except ValueError as error:
            raise ValueError(f"speculate is {str(self.config.folder)!r}: {error}") from error


class Head(ABC):
    """A head in a Runner: an Observer of the target's residual stream, and a Drafter.

    most: maximum number of tokens that it drafts for a lane. graphs: CUDA graphs of `body` by the number of lanes, if
    there are some.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, weights: HeadWeights, place: HeadPlace, most: int) -> None:
        assert place.target.group.size == 1
        self._own, self._options, self.most = weights, place.options, most
        # The target refers to its observer; in a circle, both would keep their memory until garbage is collected.
        self._target = cast(Transformer, weakref.proxy(place.target))
        self._pool, self._lanes = place.pool, place.lanes
        self._tokens, self._counts = place.tokens, place.counts
        self.graphs: Graphs[int] | None = None
        lanes, device = self._options.most_lanes, self._tokens.device
        self._limits = torch.zeros(self._lanes.padding + 1, dtype=torch.int32, device=device)
        self._draw_lanes = torch.full((lanes,), self._lanes.padding, dtype=torch.int64, device=device)
        self._ends = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._offsets = torch.arange(64, device=device)
        self._state = copy.copy(self._lanes.state)  # with the same parameters of lanes, and another last token
        self._state.last_token = torch.zeros_like(self._lanes.state.last_token)
        # Graphs hold its address, so it must be large enough for all of them; the number of rows does not rise with the
        # number of lanes.
        self._state.workspace(max(size * self.most_drafts(size) for size in range(1, lanes + 1)))

    @property
    @abstractmethod
    def layers(self) -> frozenset[int]:
        """Numbers of the target's layers whose outputs are read."""

    @abstractmethod
    def observe(self, part: StepPart, number: int) -> None:
        """Read `part.residual` after a layer; see Observer."""

    def observe_rows(self, x: Tensor, rows: Tensor) -> None:
        raise AssertionError("this head does not read the last layer")

    @property
    @abstractmethod
    def linears(self) -> Iterable[tuple[Linear, Fused]]:
        """Return one linear layer per kind, with the operations that are fused with it; see warm_up.products_of."""

    @abstractmethod
    def body(self, size: int) -> None:
        """Draft for the first `size` of the lanes that draw, with all tensors at fixed addresses: `_draw_lanes`, their
        `_limits`, and `_ends`, the rows of their last tokens in the step, int64 [S]."""

    def update(self, named: Tensors) -> None:
        self._own.update(named)

    def release(self) -> None:
        self._own.memory.release(keep=True)  # even if the target's weights are dropped, and written again later

    def restore(self) -> None:
        self._own.memory.restore()

    def begin(self, plan: DraftPlan) -> None:  # noqa: B027
        """Lanes have their context in the pages already."""

    def draft(self, drawn: StepDraws, plan: DraftPlan, rows: Tensor, tokens: Tensor, counts: Tensor) -> bool:
        if not plan.limits:
            return False
        count = size = len(drawn.lanes)
        self._limits[drawn.lanes] = upload(np.array(plan.limits, dtype=np.int32), self._limits.device)
        self._draw_lanes[:count] = drawn.lanes
        self._ends[:count] = drawn.ends(rows)
        if self.graphs is None:
            self.body(size)
        else:
            size = self.graphs.size_for(count)
            self._draw_lanes[count:size] = self._lanes.padding
            self._ends[count:size] = 0
            self.graphs.run(size)
        return True

    def most_drafts(self, size: int) -> int:
        """Return the maximum number of drafts of each of `size` lanes, for which a step can have rows."""
        rows = max(2 * self._options.row_limit(size) // size - 1, 1)  # see Speculator.best_rows
        return min(rows, self.most, self._options.max_draft)

    def _slots(self, lanes: Tensor, positions: Tensor, inside: Tensor) -> Tensor:
        """Return the slots, int64, of positions of lanes; -1 where `inside` is False."""
        size = self._pool.page_size
        pages = self._lanes.page_table[lanes, positions // size].long()
        return torch.where(inside, pages * size + positions % size, -1)

    def draw(self, logits: Tensor, lanes: Tensor, positions: Tensor) -> Tensor:
        """Return drafts, int64 [R], from logits [R, V], for positions [R] of lanes [R]."""
        # Positions have the dtype that they have in the Runner: the noise of the torch twin depends on it.
        drawn: SampleOutput = draw(logits, self._state, lanes, positions.int(), PLAN, None)
        # -1 is for no token. While kernels are compiled ahead, nothing has written the tokens, and they may be any
        # numbers, whose embeddings are read all the same.
        return drawn.tokens.clamp(0, logits.shape[1] - 1)
