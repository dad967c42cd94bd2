"""The device's side of speculation: the rows of a speculative step, what is kept of its draws, and the next drafts.

To attention each row of a lane is a decode, so a row has the same bits as in a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import to_host, upload
from fastgen.engine.cuda_graphs import Graphs, batch_sizes
from fastgen.engine.options import EngineConfig
from fastgen.engine.step import DecodeBody, Lanes, Launched, StepFeature
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.drafts import Drafts, StepDraws, Texts, choose, follow, recall, spread
from fastgen.kernels.lane_updates import DecodeInput
from fastgen.model.attention.interface import Attention
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import Linear
from fastgen.model.parameters import Parameters
from fastgen.model.transformer import Transformer
from fastgen.request import Batch, LaneStart, Prefill, SamplingParams, StepResult
from fastgen.speculation.dflash import DFlashWeights
from fastgen.speculation.eagle import EagleWeights
from fastgen.speculation.head import Head, HeadPlace, HeadWeights
from fastgen.speculation.heads import DFlashConfig, EagleConfig, HeadConfig, MedusaConfig, SelfDraftConfig
from fastgen.speculation.medusa import MedusaWeights
from fastgen.speculation.options import Speculation
from fastgen.speculation.planning import HISTORY, LONGEST, Drafted, DraftPlan
from fastgen.speculation.self_draft import SelfDraftWeights


class Drafter(Protocol):
    """Drafts the next tokens of lanes on the device, without a wait. No draft can change a bit of an output, since each
    is verified by the draw that would have happened anyway."""

    def begin(self, plan: DraftPlan) -> None:
        """Act before a step whose Batch has this payload: begin lanes that draft from now on."""

    def draft(self, drawn: StepDraws, plan: DraftPlan, rows: Tensor, tokens: Tensor, counts: Tensor) -> bool:
        """Draft the next tokens of the lanes that a step drew for. Return whether it drafts now.

        rows: `Drafts.rows`. tokens: int64 [L, D], and counts: int32 [L], are written for these lanes.
        """


class TextDrafter:
    """Copies drafts from the text of a lane, which holds earlier outputs and its own tokens; see kernels/drafts.py."""

    def __init__(self, lanes: int, max_model_len: int, device: torch.device) -> None:
        self._texts = Texts.empty(lanes, HISTORY + min(max_model_len, LONGEST), device)
        self._device = device

    def begin(self, plan: DraftPlan) -> None:
        for lane, first, tokens in plan.texts:
            self._texts.begin(lane, first, upload(tokens, self._device))

    def draft(self, drawn: StepDraws, plan: DraftPlan, rows: Tensor, tokens: Tensor, counts: Tensor) -> bool:
        recall(drawn.lanes, drawn, rows, self._texts, tokens, counts)
        return True


def weights_of(config: HeadConfig, target: Parameters, context: int, deterministic: bool) -> HeadWeights:
    """Return the weights of a head, not yet filled. context: maximum length of a sequence. deterministic: as for
    Parameters."""
    if isinstance(config, SelfDraftConfig):
        return SelfDraftWeights(config, target, deterministic)
    if isinstance(config, DFlashConfig):
        return DFlashWeights(config, target, context, deterministic)
    if isinstance(config, EagleConfig):
        return EagleWeights(config, target, context, deterministic)
    assert isinstance(config, MedusaConfig)
    return MedusaWeights(config, target, context, deterministic)


class Drafting(StepFeature[DraftPlan]):
    """The drafts of the lanes, and the rows that a speculative step makes of them (see RowSource).

    drafters: those that propose. Each may be replaced while no request runs (docs/ideas.md).
    """

    reads_early = False

    def __init__(self, options: Speculation, config: EngineConfig, lanes: Lanes, page_size: int, samples: bool) -> None:
        self.options, self._config = options, config
        self._sizes = batch_sizes(min(options.most_lanes, config.max_seqs))  # numbers of lanes that are captured
        self.graphs: Graphs[int] | None = None
        self._lanes, self._page_size = lanes, page_size
        self._device = lanes.kv_lens.device
        if samples:  # rows of padding are drawn, too
            lanes.state.start([LaneStart(lanes.padding, SamplingParams())])
        self.drafters: list[Drafter] = [TextDrafter(lanes.padding + 1, config.max_model_len, self._device)]
        count = 2 if self.options.head else 1
        self._drafts = Drafts.empty(lanes.padding + 1, self.options.max_draft, self._device, count)
        self.head: Head | None = None
        self._rows = DecodeInput.empty(self.options.max_rows, self._device)

    def add_head(
        self, weights: HeadWeights, target: Transformer, pool: KVPool, make_attention: Callable[[int, int], Attention],
        attention: Attention,
    ) -> Head:  # fmt: skip
        """Let a head draft as well. The arguments are those of HeadPlace."""
        out = self._drafts.proposals[1], self._drafts.proposed[1]
        self.head = weights.attach(
            HeadPlace(target, pool, make_attention, attention, self._lanes, self._config, self.options, *out)
        )
        self.drafters.append(self.head)
        return self.head

    def clear(self) -> None:
        """Forget all drafts."""
        self._drafts.counts.zero_()
        self._drafts.proposed.zero_()

    def before(self, step: Launched, payload: DraftPlan) -> None:
        for lane, length in payload.lengths:
            self._lanes.host_kv_lens[lane] = length
        for lane, _, _ in payload.texts:
            self._drafts.begin(lane)
        for drafter in self.drafters:
            drafter.begin(payload)
        if payload.rows:
            self._lanes.set_decodes(step.batch.decodes)
            lanes, most = self._lanes.input.lanes[: len(payload.rows)], np.array(payload.rows, dtype=np.int32)
            self._drafts.most[lanes] = upload(most, self._device)
            step.source, step.graphs = self, self.graphs

    def make_rows(self, size: int, exact: bool = False) -> DecodeInput:
        """Return last and drafted tokens of the first `size` lanes that decode, and padding. exact: without padding on
        the CPU, where each row takes time."""
        drafts, lanes, count = self._drafts, self._lanes.input.lanes[:size], self.options.row_limit(size)
        if exact and self._device.type == "cpu":
            demand = torch.minimum(drafts.most, drafts.counts + 1)[lanes]
            count = min(int(demand.sum()), self.options.max_rows)
        rows, own = self._rows.first(count), self._lanes
        spread(lanes, drafts, own.state.last_token, own.kv_lens, own.page_table, rows, self._page_size)
        return rows

    def graph_rows(self, size: int, count: int) -> DecodeInput:
        return self._rows.first(self.options.row_limit(size))

    def drawn(self, step: Launched, payload: DraftPlan, tokens: Tensor) -> None:
        """Keep the draws, int32 [R], and draft the next tokens."""
        if payload.drafts:
            own = self._lanes
            lanes = own.input.lanes[: len(payload.rows)] if payload.rows else step.lanes
            drawn: StepDraws = follow(lanes, self._drafts, own.state.last_token, own.kv_lens, tokens, step.positions)
            drawn = replace(drawn, prefills=step.batch.prefills)
            for event in step.arrivals.values() if self.head else ():  # it reads pages that are being loaded
                event.wait()
            active = 0
            for number, drafter in enumerate(self.drafters):
                draft = self._drafts.proposals[number], self._drafts.proposed[number]
                active |= drafter.draft(drawn, payload, self._drafts.rows, *draft) << number
            choose(lanes, self._drafts, drawn.found, active)
            step.held[DraftPlan] = to_host(drawn.found)

    def collect(self, step: Launched, payload: DraftPlan, result: StepResult) -> None:
        """Drop the rows whose draws are not kept."""
        followed = step.held.get(DraftPlan)
        if followed is None or step.sampled is None:
            return
        drafted = Drafted(*followed.tolist())
        result.features.append(drafted)
        if payload.rows:
            counts, kept = 1 + np.array(drafted.verified), np.array(drafted.kept)
            ahead = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of each row in its lane
            step.sampled = step.sampled.rows(np.flatnonzero(ahead < np.repeat(kept, counts)))
            step.sampling = tuple(np.repeat(step.sampling, kept).tolist())

    # ------------------------------------------------------------------------------------------ the start

    def largest_batches(self, config: EngineConfig) -> Iterator[Batch]:
        """After a step that starts its lanes, yield the speculative step with the maximum number of lanes."""
        lanes, token = self._sizes[-1], np.zeros(1, dtype=np.int32)
        rows = (self.options.max_draft + 1,) * lanes
        texts = tuple((lane, 0, token) for lane in range(lanes))
        first = tuple(Prefill(lane, 0, token, True) for lane in range(lanes))
        limits = (config.max_model_len - 1,) * lanes if self.options.head else ()
        yield Batch(prefills=first, features=(DraftPlan(texts=texts, drafts=True, limits=limits),))
        yield Batch(decodes=tuple(range(lanes)), features=(DraftPlan(rows=rows, drafts=True, limits=limits),))

    @property
    def linears(self) -> Iterable[tuple[Linear, Fused]]:
        return self.head.linears if self.head is not None else ()

    @property
    def num_graphs(self) -> int:
        return len(self._sizes) * (2 if self.options.head else 1)

    def rehearse(self, body: DecodeBody, layers: Sequence[int]) -> None:
        for size in self._sizes:
            body(size, source=self, layers=layers)

    def capture(self, body: DecodeBody, largest: bool, partner: Graphs[int]) -> Iterator[Graphs[int]]:
        sizes = self._sizes[-1 if largest else 0 :]
        self.graphs = Graphs(sizes, self._device, partner=partner)
        self.graphs.capture(lambda size: body(size, source=self), compiled=True)
        yield self.graphs
        if self.head is not None:
            self.head.graphs = Graphs(sizes, self._device, partner=partner)
            self.head.graphs.capture(self.head.body)
            yield self.head.graphs
