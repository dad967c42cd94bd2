"""The runner: turns a Batch into launches on the device, and reads their results later."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import current
from fastgen.device.pinned import upload, upload_together
from fastgen.device.threads import FreeCores
from fastgen.engine.cuda_graphs import Graphs, PrefillGraphs, batch_sizes, prefill_sizes, shared_sizes, smallest_size
from fastgen.engine.options import EngineConfig
from fastgen.engine.speculation import HISTORY, LONGEST, Speculation
from fastgen.engine.step import StepSequences
from fastgen.kernels import scoring
from fastgen.kernels.drafts import Drafts, follow, spread
from fastgen.kernels.state import DecodeInput, advance
from fastgen.model.attention.interface import Attention
from fastgen.model.host_tier import HostTier
from fastgen.model.kv_pool import KVPool
from fastgen.model.live_weights import LiveWeights
from fastgen.model.sampler import LARGE, LaneState, SampleOutput, SamplePlan, draw
from fastgen.model.transformer import StepPart, Transformer
from fastgen.processes.errors import DepartedError
from fastgen.request import Batch, LaneStart, SamplingParams, Scored, StepResult

SCORE_ROWS = 512
"""Prompts are scored in pieces of so many rows, whose logits over the whole vocabulary are in memory at a time."""


def speculative_sizes(config: EngineConfig) -> list[int]:
    """Return the numbers of lanes whose speculative steps are captured."""
    return batch_sizes(min(config.speculate.most_lanes, config.max_seqs)) if config.speculate else []


class _PendingScores(NamedTuple):
    """The logprobs of the prompt tokens of a lane at positions start, start + 1, ..., in a copy to the host."""

    lane: int
    start: int
    logprobs: Tensor  # float32 [n]
    top_ids: Tensor | None  # int64 [n, top]
    top_logprobs: Tensor | None  # float32 [n, top]

    def read(self) -> Scored:
        top = None
        if self.top_ids is not None and self.top_logprobs is not None:
            pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
            top = [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
        return Scored(self.lane, self.start, self.logprobs.tolist(), top)


@dataclass
class Launched:
    """A step in flight. Its results are on the host when the event `arrived` has passed (None: now).

    In a speculative step a lane may have several rows, one after another.
    """

    batch: Batch
    lanes: Tensor  # int64 [R], the lanes that draw
    positions: Tensor  # int32 [R], of the tokens to draw
    logits: Tensor | None  # float32 [R, V], until the tokens are drawn
    scored: list[_PendingScores] = field(default_factory=list)
    sampled: SampleOutput | None = None
    followed: Tensor | None = None  # int32 [3, S], see kernels.drafts.follow
    expired: Tensor | None = None  # see Group
    arrived: torch.cuda.Event | None = None


class Runner:
    """The model with its KV pool and host tier, and the state of the lanes on the device: page tables, KV lengths and
    sampling state.

    The last lane is for padding: rows that a CUDA graph has beyond those of a step run there, on a page of its own. A
    step of decodes alone and a speculative step replay a graph, which takes tokens, positions and pages from the lanes,
    so that the host sends only what changed. Any other step is uploaded as a whole and launched kernel by kernel; if it
    has few tokens, all but its attention runs in CUDA graphs too (PrefillGraphs). The CPU has no graphs.
    """

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        attention: Attention,
        config: EngineConfig,
        host: HostTier | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.host = host
        self.attention = attention
        self.weights = LiveWeights(model, pool)
        self.config = config
        self.group = model.group
        self.device = torch.device(config.device)
        most, columns = config.max_seqs, -(-config.max_model_len // config.page_size)
        lanes, vocab, samples = most + 1, model.config.vocab_size, self.group.rank == 0  # other ranks have no logits
        self.page_table = torch.full((lanes, columns), pool.spare, dtype=torch.int32, device=self.device)
        self.kv_lens = torch.zeros(lanes, dtype=torch.int32, device=self.device)
        self.state = LaneState(lanes, vocab, self.device, samples)
        # By lane on the host: copies of page_table and kv_lens, sampling parameters, and their SamplePlan.
        self._tables = np.full((lanes, columns), pool.spare, dtype=np.int32)
        self._kv_lens = np.zeros(lanes, dtype=np.int64)
        self._params = [SamplingParams()] * lanes
        self._plans = np.zeros((len(SamplePlan._fields), lanes), dtype=np.int64)
        self.share_prefixes = attention.shares and most > 1  # decodes may read shared keys once
        self._sharing_of: tuple[int, ...] = ()  # the decodes for which `_sharing` was found
        self._sharing = False
        self.prefill_graphs: PrefillGraphs | None = None
        self.graphs: dict[bool, Graphs[int]] = {}  # of decodes, by whether shared keys are read once
        self.speculative_graphs: Graphs[int] | None = None
        self._decode_input = DecodeInput.empty(most, self.device)  # their input and their logits, at fixed addresses
        self._logits = torch.empty(config.most_rows if samples else 0, vocab, device=self.device)
        self.drafts = None if config.speculate is None else self._make_drafts(config.speculate)
        self._decodes: tuple[int, ...] = ()  # the lanes in `_decode_input`
        self._decode_lanes = np.zeros(0, dtype=np.int64)
        self._free_cores = FreeCores()

    def _make_drafts(self, options: Speculation) -> Drafts:
        """Allocate what speculative steps need."""
        padding = self.config.max_seqs
        self._draft_input = DecodeInput.empty(options.max_rows, self.device)
        if self.group.rank == 0:  # rows of padding are drawn, too
            self.state.start([LaneStart(padding, SamplingParams())])
        length = HISTORY + min(self.config.max_model_len, LONGEST)
        return Drafts.empty(len(self.kv_lens), length, options.max_draft, self.device)

    @torch.inference_mode()
    def capture(self, sizes: list[int] | None = None, prefills: list[int] | None = None) -> None:
        """Capture the CUDA graphs of decode steps, speculative steps and PrefillGraphs.

        sizes: lanes of decode steps; None: all. With `sizes`, the largest speculative step alone is captured. prefills:
        tokens of the PrefillGraphs; None: all."""
        speculative = speculative_sizes(self.config)[-1 if sizes else 0 :]
        sizes = sizes or batch_sizes(self.config.max_seqs)
        prefills = prefill_sizes(self.config.max_step_tokens) if prefills is None else prefills
        with current(self.device):
            self.rehearse_decodes(sizes)  # compiles all kernels; those that do not compile clear attention.shares
            self.share_prefixes = self.share_prefixes and self.attention.shares
            if self.attention.capturable:
                plain = Graphs(sizes, self.device)
                plain.capture(self.decode_body, compiled=True)
                self.graphs = {False: plain}
                if self.share_prefixes:
                    self.graphs[True] = Graphs(shared_sizes(sizes), self.device, beside=plain)
                    self.graphs[True].capture(lambda size: self.decode_body(size, shared=True), compiled=True)
                for graphs in self.graphs.values():
                    self.group.register_graphs(graphs)
                if speculative:
                    self.speculative_graphs = Graphs(speculative, self.device, beside=plain)
                    self.speculative_graphs.capture(self.speculative_body, compiled=True)
                    self.group.register_graphs(self.speculative_graphs)
                if prefills:
                    self.prefill_graphs = PrefillGraphs(self.model, self.pool, prefills, beside=plain)
                    self.group.register_graphs(self.prefill_graphs.graphs)

    @torch.inference_mode()
    def rehearse_decodes(self, sizes: list[int]) -> None:
        """Run decode steps of these sizes on padding, as they will be captured, through one layer of each kind."""
        layers = self.model.parameters.distinct
        self._decode_input.lanes.fill_(self.config.max_seqs)  # the padding lane
        for size in sizes:
            self.decode_body(size, layers=layers)
        for size in shared_sizes(sizes) if self.share_prefixes else ():
            self.decode_body(size, shared=True, layers=layers)
        for size in speculative_sizes(self.config):
            self.speculative_body(size, layers)
        self._decodes = ()

    def clear_lanes(self) -> None:
        """Empty all lanes."""
        self.kv_lens.zero_()
        self._kv_lens[:] = 0
        self.page_table.fill_(self.pool.spare)
        self._tables.fill(self.pool.spare)
        none = np.zeros(0, dtype=np.int64)
        if self.drafts is not None:
            self.drafts.counts.zero_()
        self._sharing_of, self._sharing = (), self.attention.share(none, none, self._tables)

    def synchronize(self) -> None:
        """Wait for the device. Call it before the next launch if a step in flight will not be collected, or if an
        exception has interrupted one."""
        self._sharing_of, self._sharing, self._decodes = (), False, ()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for the device, so that memory can be released."""
        self.synchronize()

    def decode_body(self, size: int, shared: bool = False, layers: Sequence[int] | None = None) -> None:
        """Compute the logits of the first `size` lanes of `_decode_input`, with all tensors at fixed addresses, as the
        body of a decode graph. shared: read keys that rows share once. layers: see Transformer.forward."""
        step = self._decode_input.first(size)
        advance(self.state.last_token, self.kv_lens, self.page_table, step, self.pool.page_size)
        self._decode_rows(step, layers, shared, alone=True)

    def speculative_body(self, size: int, layers: Sequence[int] | None = None) -> None:
        """Do what `decode_body` does for the rows of a speculative step of `size` lanes, in `_draft_input`: the body of
        its graph. To attention, each row is a decode."""
        assert self.config.speculate is not None
        self._decode_rows(self._spread(size, self.config.speculate.rows(size)), layers)

    def _decode_rows(
        self, rows: DecodeInput, layers: Sequence[int] | None, shared: bool = False, alone: bool = False
    ) -> None:
        """Compute the logits of rows that attend as decodes. shared, alone: see Attention.plan_decode."""
        count = len(rows.lanes)
        plan = self.attention.plan_decode(rows.lanes, rows.kv_lens, self.page_table, shared, alone)
        mapping = self.model.slot_mapping(self.pool, rows.positions, rows.slots, count)
        x = self.model.forward([StepPart(rows.token_ids, mapping, plan)], self.pool, self.attention, layers)
        self.model.logits(x, self._logits[:count])

    def _spread(self, size: int, count: int) -> DecodeInput:
        """Return `count` rows: last and drafted tokens of the first `size` lanes of `_decode_input`, and padding."""
        assert self.drafts is not None
        rows, lanes, page_size = self._draft_input.first(count), self._decode_input.lanes[:size], self.pool.page_size
        spread(lanes, self.drafts, self.state.last_token, self.kv_lens, self.page_table, rows, page_size)
        return rows

    def _launch_speculative_eagerly(self, batch: Batch) -> Launched:
        """Launch a speculative step without a graph, on the CPU, where each row takes time: no rows of padding."""
        assert self.drafts is not None
        assert self.config.speculate is not None
        wanted = torch.minimum(self.drafts.most, self.drafts.counts + 1)[self._decode_lanes]
        count = min(int(wanted.sum()), self.config.speculate.max_rows)
        rows, padding = self._spread(len(batch.decodes), count), (0, -count % self.model.row_tile)
        plan = self.attention.plan_decode(rows.lanes, rows.kv_lens, self.page_table)
        ids, positions = F.pad(rows.token_ids, padding), F.pad(rows.positions, padding)
        mapping = self.model.slot_mapping(self.pool, positions, F.pad(rows.slots, padding, value=-1), count)
        x = self.model.forward([StepPart(ids, mapping, plan)], self.pool, self.attention)
        return Launched(batch, rows.lanes, rows.kv_lens, self.model.logits(x[:count]))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Launch the forward pass, and the sampler unless the batch is masked. Does not wait for the device."""
        with self._step_context():
            arrivals = self._move_pages(batch)
            self._apply_changes(batch)
            shared = self._detect_sharing(batch.decodes)
            if batch.rows:
                launched = self._launch_speculative(batch)
            elif self.graphs and not batch.prefills:
                launched = self._replay(batch, shared)
            else:
                launched = self._launch_uploaded(batch, shared, arrivals)
            if batch.copies:  # of pages that this step has filled
                sources, targets = zip(*batch.copies, strict=True)
                self.pool.copy(*upload_together([np.array(sources), np.array(targets)], self.device))
            if not batch.masked:
                self._sample(launched, None)
        return launched

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: np.ndarray | None) -> None:
        """Draw the tokens of a launched step whose batch is masked. masks: int32 [R, ceil(V / 32)], on rank 0."""
        with self._step_context():
            self._sample(launched, masks)

    def _step_context(self) -> AbstractContextManager[object]:
        """Return the context of a step: on the CPU as many threads as cores are free."""
        return self._free_cores.step() if self.device.type == "cpu" else current(self.device)

    def _sample(self, launched: Launched, masks: np.ndarray | None) -> None:
        """Draw tokens, and start copying the step's results to the host."""
        if launched.logits is not None:
            plan = SamplePlan.together(self._plans.take(launched.batch.sampling, 1))
            mask = None if masks is None else upload(masks, self.device)
            if mask is not None and launched.batch.rows:
                of_row = launched.lanes[:, None] == self._decode_input.lanes[: len(mask)]
                mask = mask[of_row.int().argmax(1)]  # of padding: any
            drawn = draw(launched.logits, self.state, launched.lanes, launched.positions, plan, mask)
            self.group.broadcast(drawn.packed[0])
            sent = (self._to_host(x) for x in (drawn.packed, drawn.top_ids, drawn.top_logprobs, drawn.kept))
            launched.sampled = SampleOutput(*sent)  # type: ignore[arg-type]
            launched.logits = None
            self._follow(launched, drawn.packed[0])
        elif self.group.rank and len(launched.lanes):
            tokens = torch.empty(len(launched.lanes), dtype=torch.int32, device=self.device)
            self.group.broadcast(tokens)
            self.state.drew(launched.lanes, tokens.long(), None)
            self._follow(launched, tokens)
        if self.group.rank == 0:  # the other ranks do not collect
            launched.expired = self._to_host(self.group.expired)
        if self.device.type == "cuda":
            launched.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.arrived.record()

    def _follow(self, launched: Launched, tokens: Tensor) -> None:
        """Keep the draws of a step that drafts, int32 [R], and draft the next tokens."""
        if not launched.batch.drafts:
            return
        lanes = self._decode_input.lanes[: len(launched.batch.rows)] if launched.batch.rows else launched.lanes
        followed = follow(lanes, self.drafts, self.state.last_token, self.kv_lens, tokens, launched.positions)
        launched.followed = self._to_host(followed)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step, and return its result."""
        if launched.arrived is not None:
            launched.arrived.synchronize()
        if launched.expired is not None and int(launched.expired):
            raise DepartedError("a rank has not taken part in a step for too long; make a new Generator")
        result = StepResult(scored=[scores.read() for scores in launched.scored])
        output = launched.sampled
        if output is None:
            return result
        lanes = launched.batch.sampling
        if launched.followed is not None:
            result.kept, result.guesses, result.verified = launched.followed.tolist()
        if launched.batch.rows:
            counts, kept = 1 + np.array(result.verified), np.array(result.kept)
            ahead = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of each row in its lane
            output = output.rows(np.flatnonzero(ahead < np.repeat(kept, counts)))
            lanes = tuple(np.repeat(lanes, kept))
        result.tokens = output.packed[0].numpy().tolist()
        result.logprobs, result.untruncated_logprobs, result.raw_logprobs = output.logprobs.numpy().tolist()
        params = [self._params[lane] for lane in lanes]
        if output.top_ids is not None and output.top_logprobs is not None:
            rows = zip(params, output.top_ids.tolist(), output.top_logprobs.tolist(), strict=True)
            result.top_logprobs = [dict(zip(ids[: p.logprobs or 0], values, strict=False)) for p, ids, values in rows]
        if output.kept is not None:
            kept = output.kept.numpy()  # torch would start all of its threads for each row
            result.sampling_mask = [
                np.flatnonzero(row).tolist() if p.return_sampling_mask else []
                for p, row in zip(params, kept, strict=True)
            ]
        return result

    def _apply_changes(self, batch: Batch) -> None:
        """Start new lanes and update page tables."""
        if batch.starts and self.group.rank == 0:  # rank 0 draws for all ranks
            self.state.start(batch.starts)
            for start in batch.starts:
                self._params[start.lane] = start.params
                self._plans[:, start.lane] = SamplePlan.of(start.params)
        if batch.page_updates:
            rows = [(lane, at, page) for lane, first, new in batch.page_updates for at, page in enumerate(new, first)]
            updates = np.array(rows, dtype=np.int64).T.copy()
            self._tables[updates[0], updates[1]] = updates[2]
            lanes, columns, pages = upload(updates, self.device)
            self.page_table.index_put_((lanes, columns), pages.int())
        for lane, length in batch.lengths:
            self._kv_lens[lane] = length
        for lane, first, tokens in batch.texts:
            assert self.drafts is not None
            self.drafts.begin(lane, first, upload(tokens, self.device))

    def _move_pages(self, batch: Batch) -> dict[int, torch.cuda.Event]:
        """Save, wipe and load pages. Loads are only started; see HostTier.load for the result."""
        arrivals = {}
        if batch.saves:
            assert self.host is not None
            self.host.save(batch.saves)
        if batch.fresh and self.attention.needs_clean_pages:
            self.pool.wipe(upload(np.array(batch.fresh, dtype=np.int64), self.device))
        if batch.loads:
            assert self.host is not None
            assert batch.prefills, "a CUDA graph can not wait for loads"
            arrivals = self.host.load(batch.loads)
        return arrivals

    def _detect_sharing(self, decodes: tuple[int, ...]) -> bool:
        """Return True if keys that these lanes share are to be read once. Found anew only if the lanes change."""
        if decodes is not self._sharing_of and decodes != self._sharing_of:
            lanes = np.array(decodes, dtype=np.int64)
            full = self._kv_lens[lanes] // self.pool.page_size
            self._sharing = self.share_prefixes and self.attention.share(lanes, full, self._tables)
        self._sharing_of = decodes
        return self._sharing

    def _replay(self, batch: Batch, shared: bool) -> Launched:
        """Launch a step of decodes as a CUDA graph."""
        graphs = self.graphs[shared]
        count = len(batch.decodes)
        size = smallest_size(graphs.keys, count)
        self._set_decodes(batch.decodes)
        self._kv_lens[self._decode_lanes] += 1
        graphs.run(size)
        logits = self._logits[:count] if self.group.rank == 0 else None
        return Launched(batch, self._decode_input.lanes[:count], self._decode_input.kv_lens[:count], logits)

    def _set_decodes(self, decodes: tuple[int, ...]) -> None:
        """Send the lanes that decode, if they changed."""
        if decodes is not self._decodes and decodes != self._decodes:
            self._decode_lanes = np.array(decodes, dtype=np.int64)
            lanes = np.full(self.config.max_seqs, self.config.max_seqs, dtype=np.int64)  # padding for any size
            lanes[: len(decodes)] = self._decode_lanes
            self._decode_input.lanes.copy_(upload(lanes, self.device))
        self._decodes = decodes

    def _launch_speculative(self, batch: Batch) -> Launched:
        """Launch a speculative step, on a GPU as a CUDA graph."""
        assert self.config.speculate is not None
        assert self.drafts is not None
        count, graphs = len(batch.decodes), self.speculative_graphs
        self._set_decodes(batch.decodes)
        self.drafts.most[self._decode_input.lanes[:count]] = upload(np.array(batch.rows, dtype=np.int32), self.device)
        if graphs is None and self.device.type == "cpu":
            return self._launch_speculative_eagerly(batch)
        size = smallest_size(graphs.keys, count) if graphs else count
        (graphs.run if graphs else self.speculative_body)(size)  # without graphs: before their capture
        rows = self._draft_input.first(self.config.speculate.rows(size))
        logits = self._logits[: len(rows.lanes)] if self.group.rank == 0 else None
        return Launched(batch, rows.lanes, rows.kv_lens, logits)

    def _launch_uploaded(self, batch: Batch, shared: bool, arrivals: dict[int, torch.cuda.Event]) -> Launched:
        """Launch any step kernel by kernel, or through the PrefillGraphs."""
        step, decodes = StepSequences.of(batch, self._kv_lens), len(batch.decodes)
        parts = [step] if self.group.exchange is None else step.parts(decodes)
        total, graphs = int(step.query_lens.sum()), self.prefill_graphs
        if graphs and (total > graphs.sizes[-1] or len(parts) > 1):
            graphs = None
        padding = smallest_size(graphs.sizes, total) - total if graphs else -total % self.model.row_tile
        # Only the rows that tokens are drawn from go through all of the last layer.
        ends_only = len(step.rows) < total and not any(chunk.score for chunk in batch.prefills)
        changed = np.concatenate([step.lanes, step.forks])  # lanes with new KV lengths
        host_positions = step.positions()
        host_slots = self._slots(np.repeat(step.lanes, step.query_lens), host_positions)
        ids, positions, slots, lanes, kv_lens, rows, drawn_from, drawing, drawn_at = upload_together([
            step.token_ids(batch, padding),
            np.pad(host_positions, (0, padding)),
            np.pad(host_slots, (0, padding), constant_values=-1),
            changed,
            self._kv_lens[changed],
            step.rows,
            np.repeat(np.arange(len(step.rows)) if ends_only else step.rows, step.num_draws[step.num_draws > 0]),
            np.array(batch.sampling, dtype=np.int64),
            np.repeat(step.kv_lens, step.num_draws),
        ], self.device)  # fmt: skip
        ids[:decodes] = self.state.last_token[lanes[:decodes]]
        self.kv_lens.index_put_((lanes,), kv_lens.int())
        step_parts, start, row = [], 0, 0
        for part in parts:
            count = int(part.query_lens.sum())
            here = slice(start, total + padding if start + count == total else start + count)
            own_decodes, own_shared = (0, False) if start else (decodes, shared)  # all decodes are in the first part
            plan = self.attention.plan(part.layout(self.page_table, own_decodes, own_shared))
            ends = None
            if ends_only:
                layout = part.ends.layout(self.page_table, len(part.rows), own_shared)
                ends = rows[row : row + len(part.rows)] - start, layout
            mapping = self.model.slot_mapping(self.pool, positions[here], slots[here], count)
            step_parts.append(StepPart(ids[here], mapping, plan, ends, arrivals))
            start, row = start + count, row + len(part.rows)
        if graphs:
            x = graphs.forward(step_parts[0], self.attention)
        else:
            x = self.model.forward(step_parts, self.pool, self.attention)
        # A fork draws from a copy of the row: copies of logits would take more memory than the largest step.
        drawn = x[: len(rows)] if ends_only and not len(step.forks) else x[drawn_from]
        logits = self.model.logits(drawn) if len(rows) else None
        return Launched(batch, drawing, drawn_at.int(), logits, self._launch_scores(batch, x))

    def _slots(self, lanes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the slots of the KV pool for tokens of these lanes at these positions: int64 [T]."""
        page_size = self.config.page_size
        pages = self._tables[lanes, positions // page_size].astype(np.int64)
        slots: np.ndarray = pages * page_size + positions % page_size
        return slots

    def _launch_scores(self, batch: Batch, x: Tensor) -> list[_PendingScores]:
        """Compute the prompt logprobs that prefill chunks ask for. x: [T, hidden size], behind the last layer."""
        found = []
        first = len(batch.decodes)
        for chunk in batch.prefills:
            if chunk.score is not None:
                wanted = chunk.score
                rows = x[first + wanted.row : first + wanted.row + len(wanted.targets)]
                targets = upload(np.array(wanted.targets, dtype=np.int64), self.device)
                temperature = min(max(wanted.temperature, 1 / LARGE), LARGE)  # float32 holds no more
                for at in range(0, len(rows), SCORE_ROWS):
                    part = slice(at, at + SCORE_ROWS)
                    logits = self.model.logits(rows[part])
                    if logits is None:
                        continue
                    logprobs, _ = scoring.score(logits, targets[part], temperature)
                    top = scoring.alternatives(logits, wanted.top) if wanted.top else (None, None)
                    sent = (self._to_host(x) for x in (logprobs, *top))
                    found.append(_PendingScores(chunk.lane, chunk.start + wanted.row + 1 + at, *sent))  # type: ignore[arg-type]
            first += len(chunk.tokens)
        return found

    def _to_host(self, tensor: Tensor | None) -> Tensor | None:
        """Start a copy to the host. It is complete when all launches so far have run."""
        if tensor is None or self.device.type == "cpu":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
