"""Batch -> tensors -> logits -> tokens: launch now, collect later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fastgen.device.cuda_graphs import Graphs, batch_sizes, shared_sizes
from fastgen.device.memory import release_memory, taken
from fastgen.device.pinned import upload, upload_together
from fastgen.engine.config import EngineConfig
from fastgen.engine.prefill_graphs import PrefillGraphs, prefill_sizes
from fastgen.kernels.launch import current
from fastgen.kernels.state import DecodeInput, advance
from fastgen.model.attention import Attention, StepLayout
from fastgen.model.host_tier import Arrivals, HostTier
from fastgen.model.kv_pool import KVPool
from fastgen.model.sampler import LARGE, LaneState, SampleOutput, SamplePlan, plan_flags, sample, score
from fastgen.model.transformer import Ends, StepInput, Transformer
from fastgen.model.weights import Update, write
from fastgen.parallel.errors import DepartedError
from fastgen.request import Batch, SamplingParams, Scored, StepResult

CUT_TOKENS = 2048
"""From so many tokens on, ranks cut a step in two, so that one part's sums are made while the other computes."""

CUT_MULTIPLE = 128

SCORE_ROWS = 512
"""Rows whose logits over the whole vocabulary are held at a time when prompts are scored."""


def largest_half(tokens: int) -> int:
    """Tokens of the larger part, with padding, of a step of up to so many tokens that is cut in two, unless it is of
    decodes for the most part; 0: none is cut."""
    return 0 if tokens < CUT_TOKENS else -(-tokens // (2 * CUT_MULTIPLE)) * CUT_MULTIPLE


@dataclass
class _Scores:
    """Of the prompt tokens of a lane at positions start, start + 1, ...; on their way to the host."""

    lane: int
    start: int
    logprobs: Tensor  # float32 [n]
    top_ids: Tensor | None  # int64 [n, top]
    top_logprobs: Tensor | None  # float32 [n, top]


@dataclass
class Launched:
    """A step on its way. What it comes to is on its way to the host, and there when `arrived` (None: at once)."""

    batch: Batch
    lanes: Tensor  # int64 [R], those that draw
    positions: Tensor  # int32 [R], of the tokens to be drawn
    logits: Tensor | None  # float32 [R, V], until sampled
    scored: list[_Scores] = field(default_factory=list)
    sampled: SampleOutput | None = None
    expired: Tensor | None = None  # see Group
    arrived: torch.cuda.Event | None = None


class Runner:
    """Keeps what the device knows of the lanes: page tables, KV lengths, sampling state; and the model, its pool and
    the host tier, if there is one.

    The last lane of all is padding: the rows that a CUDA graph has too many run there, on a page of its own. A step of
    decodes alone replays a graph, which takes tokens, positions and pages from the lanes, so that the host sends
    nothing but what changed. A step with prefills is sent whole, and launched kernel by kernel; if it has few tokens,
    all but its attention is graphs too.
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
        self.config = config
        self.group = model.group
        self.device = torch.device(config.device)
        lanes, slots = config.max_seqs + 1, -(-config.max_model_len // config.page_size)
        self.page_table = torch.full((lanes, slots), pool.spare, dtype=torch.int32, device=self.device)
        self.kv_lens = torch.zeros(lanes, dtype=torch.int32, device=self.device)
        self.state = LaneState(lanes, model.config.vocab_size, self.device, draws=self.group.rank == 0)
        self._kv_lens = np.zeros(lanes, dtype=np.int64)  # the host's mirrors
        self._flags = np.zeros(lanes, dtype=np.int64)  # plan_flags of each lane's parameters
        self._params = [SamplingParams()] * lanes
        self.graphs: dict[bool, Graphs] = {}  # of decodes, by whether rows share keys
        self.prefill_graphs: PrefillGraphs | None = None  # of steps with prefills
        self.share_prefixes = attention.shares and config.max_seqs > 1  # whether decodes read shared keys once
        self._tables = np.full((lanes, slots), pool.spare, dtype=np.int32)
        self._looked_at: tuple[int, ...] = ()  # the decodes that `_sharing` holds for
        self._sharing = False
        self._decodes: tuple[int, ...] = ()  # the lanes that `_step` holds
        self._decode_lanes = np.zeros(0, dtype=np.int64)

    @torch.inference_mode()
    def capture(self, sizes: list[int] | None = None, pieces: list[int] | None = None) -> None:
        """Capture decode steps of `sizes` lanes, and pieces of steps of `pieces` tokens (None: all), as CUDA graphs."""
        sizes = sizes or batch_sizes(self.config.max_seqs)
        pieces = prefill_sizes(self.config.max_step_tokens) if pieces is None else pieces
        with current(self.device):
            self.decode_all(sizes)  # all kernels compile now, or are known not to
            self.share_prefixes = self.share_prefixes and self.attention.shares
            if self.attention.capturable:
                plain = Graphs(sizes, self.device)
                plain.capture(self.decode, compiled=True)
                self.graphs = {False: plain}
                if self.share_prefixes:
                    self.graphs[True] = Graphs(shared_sizes(sizes), self.device, beside=plain)
                    self.graphs[True].capture(lambda size: self.decode(size, shared=True), compiled=True)
                for graphs in self.graphs.values():
                    self.group.hold(graphs)
                if pieces:
                    self.prefill_graphs = PrefillGraphs(self.model, self.pool, pieces, beside=plain)
                    self.group.hold(self.prefill_graphs.graphs)

    @torch.inference_mode()
    def decode_all(self, sizes: list[int]) -> None:
        """Run decode steps of padding, of these many lanes, as they will be captured."""
        most = self.config.max_seqs
        self._step = DecodeInput.empty(most, self.device)
        self._step.lanes.fill_(most)  # the lane of padding
        rows = most if self.group.rank == 0 else 0  # elsewhere there are no logits
        self._logits = torch.empty(rows, self.model.config.vocab_size, device=self.device)
        for size in sizes:
            self.decode(size)
        for size in shared_sizes(sizes) if self.share_prefixes else ():
            self.decode(size, shared=True)

    def forget(self) -> None:
        """All lanes are empty again."""
        self.kv_lens.zero_()
        self._kv_lens[:] = 0
        self.page_table.fill_(self.pool.spare)
        self._tables.fill(self.pool.spare)
        nobody = np.zeros(0, dtype=np.int64)
        self._looked_at, self._sharing = (), self.attention.share(nobody, nobody, self._tables)

    def update_weights(self, update: Update, begin: Callable[[], None]) -> None:
        """Check an update as far as can be, call `begin`, and write it; raises what `Update` does. Nothing may be on
        its way."""
        update.check()
        begin()
        self.write_weights(update.tensors())

    def write_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors, by Hugging Face name, over the model's, in place, so that graphs read the new ones."""
        self.model.unpack()
        try:
            write(self.model.targets(), tensors)
        finally:
            self.model.pack()
        self.settle()

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int:
        """Give the memory of "weights", "kv_cache" or both back; returns the bytes that are free now, and were not.

        keep_weights: `wake` brings them back; else they are to be written. What the KV pool held is lost. Raises
        ValueError, and the weights stay, where the host has no memory for their copies.
        """
        with current(self.device):
            self.settle()
            before = taken(self.config.device)
            if "weights" in tags:
                self.model.release(keep_weights)
            if "kv_cache" in tags:
                self.pool.memory.release(keep=False)
            release_memory(self.config.device)
            return max(before - taken(self.config.device), 0)

    def wake(self, tags: Collection[str]) -> None:
        """Take the memory again; raises torch.OutOfMemoryError, and can be called again, where there is too little."""
        with current(self.device):
            if "weights" in tags:
                self.model.memory.restore()
            if "kv_cache" in tags:
                self.pool.memory.restore()
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is on its way: needed before the next launch where steps will not be collected, or an
        exception has cut one short."""
        self._looked_at, self._sharing, self._decodes = (), False, ()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for what is on its way, so that its memory may go."""
        self.settle()

    def decode(self, size: int, shared: bool = False) -> None:
        """The launches of one decode step of the first `size` lanes of `_step`; at fixed addresses throughout. shared:
        what they share is read once."""
        step = self._step.first(size)
        advance(self.state.last_token, self.kv_lens, self.page_table, step, self.pool.page_size)
        plan = self.attention.plan_decode(step.lanes, step.kv_lens, self.page_table, shared, alone=True)
        mapping = self.model.slot_mapping(self.pool, step.positions, step.slots, size)
        x = self.model.forward([StepInput(step.token_ids, mapping, plan)], self.pool, self.attention)
        self.model.logits(x, self._logits[:size])

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Run the forward pass, and the sampler too unless the batch is masked; does not wait for the device."""
        with current(self.device):
            arrivals = self._move_pages(batch)
            self._apply_changes(batch)
            shared = self._look(batch.decodes)
            replayed = self.graphs and not batch.prefills
            launched = self._replay(batch, shared) if replayed else self._launch(batch, shared, arrivals)
            if not batch.masked:
                self._sample(launched, None)
        return launched

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: np.ndarray | None) -> None:
        """Draw the tokens of a launched step whose batch is masked; masks: int32 [R, ceil(V / 32)], on rank 0."""
        with current(self.device):
            self._sample(launched, masks)

    def _sample(self, launched: Launched, masks: np.ndarray | None) -> None:
        """Draw tokens, and send what the step came to to the host."""
        if launched.logits is not None:
            plan = SamplePlan.of(self._flags[list(launched.batch.sampling)])
            mask = None if masks is None else upload(masks, self.device)
            drawn = sample(self.state, launched.lanes, launched.positions, launched.logits, plan, mask)
            self.group.broadcast(drawn.packed[0])
            sent = (self._to_host(x) for x in (drawn.packed, drawn.top_ids, drawn.top_logprobs, drawn.kept))
            launched.sampled = SampleOutput(*sent)  # type: ignore[arg-type]
            launched.logits = None
        elif self.group.rank and len(launched.lanes):
            tokens = torch.empty(len(launched.lanes), dtype=torch.int32, device=self.device)
            self.group.broadcast(tokens)
            self.state.drew(launched.lanes, tokens.long(), None)
        if self.group.rank == 0:  # the others collect nothing
            launched.expired = self._to_host(self.group.expired)
        if self.device.type == "cuda":
            launched.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.arrived.record()

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step, and read it."""
        if launched.arrived is not None:
            launched.arrived.synchronize()
        if launched.expired is not None and int(launched.expired):
            raise DepartedError("a rank has not taken part in a step for too long; make a new Generator")
        result = StepResult(scored=[_read(scores) for scores in launched.scored])
        output = launched.sampled
        if output is None:
            return result
        packed = output.packed.numpy()
        result.tokens = packed[0].tolist()
        result.logprobs, result.untruncated_logprobs, result.raw_logprobs = packed[1:].view(np.float32).tolist()
        params = [self._params[lane] for lane in launched.batch.sampling]
        if output.top_ids is not None and output.top_logprobs is not None:
            rows = zip(params, output.top_ids.tolist(), output.top_logprobs.tolist(), strict=True)
            result.top_logprobs = [dict(zip(ids[: p.logprobs or 0], values, strict=False)) for p, ids, values in rows]
        if output.kept is not None:
            kept = output.kept.numpy()  # torch would wake all of its threads for each row
            result.sampling_mask = [
                np.flatnonzero(row).tolist() if p.return_sampling_mask else []
                for p, row in zip(params, kept, strict=True)
            ]
        return result

    def _apply_changes(self, batch: Batch) -> None:
        if batch.starts and self.group.rank == 0:  # which draws for all
            self.state.start(batch.starts)
            for start in batch.starts:
                self._params[start.lane] = start.params
                self._flags[start.lane] = plan_flags(start.params)
        if batch.pages:
            rows = [(lane, slot, page) for lane, first, pages in batch.pages for slot, page in enumerate(pages, first)]
            updates = np.array(rows, dtype=np.int64).T.copy()
            self._tables[updates[0], updates[1]] = updates[2]
            lanes, slots, pages = upload(updates, self.device)
            self.page_table.index_put_((lanes, slots), pages.int())

    def _move_pages(self, batch: Batch) -> Arrivals | None:
        """What is done to pages before the step computes anything; loads are only begun."""
        arrivals = None
        if batch.saves:
            assert self.host is not None
            self.host.save(batch.saves)
        if batch.fresh and self.attention.needs_clean_pages:
            self.pool.wipe(upload(np.array(batch.fresh, dtype=np.int64), self.device))
        if batch.loads:
            assert self.host is not None
            assert batch.prefills, "a graph can not wait for loads"
            arrivals = self.host.load(batch.loads)
        if batch.copies:
            sources, targets = zip(*batch.copies, strict=True)
            assert {*targets, *batch.fresh, *(page for _, page in batch.loads)}.isdisjoint(sources)
            self.pool.copy(*upload_together([np.array(sources), np.array(targets)], self.device))
        return arrivals

    def _look(self, decodes: tuple[int, ...]) -> bool:
        """Whether to read once what these lanes share, which is looked into when they change."""
        if decodes is not self._looked_at and decodes != self._looked_at:
            lanes = np.array(decodes, dtype=np.int64)
            full = self._kv_lens[lanes] // self.pool.page_size
            self._sharing = self.share_prefixes and self.attention.share(lanes, full, self._tables)
        self._looked_at = decodes
        return self._sharing

    def _replay(self, batch: Batch, shared: bool) -> Launched:
        """A step of decodes, as a graph."""
        graphs = self.graphs[shared]
        count = len(batch.decodes)
        size = graphs.size_of(count)
        if batch.decodes is not self._decodes and batch.decodes != self._decodes:
            self._decode_lanes = np.array(batch.decodes, dtype=np.int64)
            lanes = np.full(self.config.max_seqs, self.config.max_seqs, dtype=np.int64)  # padding for any size
            lanes[:count] = self._decode_lanes
            self._step.lanes.copy_(upload(lanes, self.device))
        self._decodes = batch.decodes
        self._kv_lens[self._decode_lanes] += 1
        graphs.run(size)
        logits = self._logits[:count] if self.group.rank == 0 else None
        return Launched(batch, self._step.lanes[:count], self._step.kv_lens[:count], logits)

    def _launch(self, batch: Batch, shared: bool, arrivals: Arrivals | None) -> Launched:
        """Any step, kernel by kernel, or in pieces."""
        step, decodes = _Lengths.of(batch, self._kv_lens), len(batch.decodes)
        parts = [step] if self.group.exchange is None else step.parts(decodes)
        total = int(step.query_lens.sum())
        graphs = self.prefill_graphs
        pieces = graphs if graphs and total <= graphs.sizes[-1] and len(parts) == 1 else None
        padding = -total % self.model.row_tile
        if pieces:
            padding = pieces.size_of(total) - total
        few = len(step.rows) < total and not any(chunk.score for chunk in batch.prefills)
        owners, at, page_size = np.repeat(step.lanes, step.query_lens), step.positions(), self.config.page_size
        slots = self._tables[owners, at // page_size].astype(np.int64) * page_size + at % page_size
        ids, positions, slots, lanes, kv_lens, rows, drawn_from, drawing, drawn_at = upload_together([
            step.token_ids(batch, padding),
            np.pad(at, (0, padding)),
            np.pad(slots, (0, padding), constant_values=-1),
            np.concatenate([step.lanes, step.forks]),
            np.concatenate([step.kv_lens, self._kv_lens[step.forks]]),
            step.rows,
            np.repeat(np.arange(len(step.rows)) if few else step.rows, step.draws[step.draws > 0]),
            np.array(batch.sampling, dtype=np.int64),
            np.repeat(step.kv_lens, step.draws),
        ], self.device)  # fmt: skip
        ids[:decodes] = self.state.last_token[lanes[:decodes]]
        self.kv_lens.index_put_((lanes,), kv_lens.int())
        inputs, start, row = [], 0, 0
        for part in parts:
            count = int(part.query_lens.sum())
            here = slice(start, total + padding if start + count == total else start + count)
            lone = start > 0  # the decodes, which may share keys, are all in the first part
            plan = self.attention.plan(part.layout(self.page_table, 0 if lone else decodes, shared and not lone))
            ends = None
            if few:
                layout = part.ends.layout(self.page_table, len(part.rows), shared and not lone)
                ends = Ends(rows[row : row + len(part.rows)] - start, layout)
            mapping = self.model.slot_mapping(self.pool, positions[here], slots[here], count)
            inputs.append(StepInput(ids[here], mapping, plan, ends, arrivals))
            start, row = start + count, row + len(part.rows)
        if pieces:
            x = pieces.forward(inputs[0], self.attention)
        else:
            x = self.model.forward(inputs, self.pool, self.attention)
        # A fork draws from a copy of the row: copies of logits would take more memory than the largest step.
        wanted = x[: len(rows)] if few and not len(step.forks) else x[drawn_from]
        logits = self.model.logits(wanted) if len(rows) else None
        return Launched(batch, drawing, drawn_at.int(), logits, self._launch_scores(batch, x))

    def _launch_scores(self, batch: Batch, x: Tensor) -> list[_Scores]:
        found = []
        first = len(batch.decodes)
        for chunk in batch.prefills:
            if chunk.score is not None:
                wanted = chunk.score
                rows = x[first + wanted.row : first + wanted.row + len(wanted.targets)]
                targets = upload(np.array(wanted.targets, dtype=np.int64), self.device)
                temperature = min(max(wanted.temperature, 1 / LARGE), LARGE)  # float32 holds no more
                temperatures = torch.full(targets.shape, temperature, device=self.device)
                for at in range(0, len(rows), SCORE_ROWS):
                    part = slice(at, at + SCORE_ROWS)
                    logits = self.model.logits(rows[part])
                    if logits is None:
                        continue
                    output = score(logits, targets[part], temperatures[part], wanted.top)
                    sent = (self._to_host(x) for x in output)
                    found.append(_Scores(chunk.lane, chunk.start + wanted.row + 1 + at, *sent))  # type: ignore[arg-type]
            first += len(chunk.tokens)
        return found

    def _to_host(self, tensor: Tensor | None) -> Tensor | None:
        """A copy that is there when what was launched so far has run."""
        if tensor is None or self.device.type == "cpu":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class _Lengths:
    """The sequences of a step, decodes first. All int64 numpy arrays."""

    lanes: np.ndarray  # [S]
    query_lens: np.ndarray  # [S]
    kv_lens: np.ndarray  # [S], with the query tokens
    draws: np.ndarray  # [S], how many lanes draw from its last query token
    forks: np.ndarray  # [F], lanes that draw from another's

    @classmethod
    def of(cls, batch: Batch, known: np.ndarray) -> _Lengths:
        """Also counts the step's tokens in `known`, the KV lengths of all lanes; a fork's is then its chunk's end."""
        decodes = len(batch.decodes)
        lanes = np.array([*batch.decodes, *(chunk.lane for chunk in batch.prefills)], dtype=np.int64)
        query_lens = np.array([1] * decodes + [len(chunk.tokens) for chunk in batch.prefills], dtype=np.int64)
        known[lanes[:decodes]] += 1
        known[lanes[decodes:]] = [chunk.start + len(chunk.tokens) for chunk in batch.prefills]
        draws = np.array([1] * decodes + [chunk.sample + len(chunk.forks) for chunk in batch.prefills], dtype=np.int64)
        forks = np.array([lane for chunk in batch.prefills for lane in chunk.forks], dtype=np.int64)
        assert all(chunk.sample for chunk in batch.prefills if chunk.forks)
        kv_lens = known[lanes]
        known[forks] = np.repeat(kv_lens[decodes:], [len(chunk.forks) for chunk in batch.prefills])
        return cls(lanes, query_lens, kv_lens, draws, forks)

    def parts(self, decodes: int) -> list[_Lengths]:
        """In two of about as many tokens, where that pays: all decodes in the first; a sequence with tokens in both
        goes on in the second. Forks are in neither."""
        total = int(self.query_lens.sum())
        at = max(-(-total // (2 * CUT_MULTIPLE)), -(-decodes // CUT_MULTIPLE)) * CUT_MULTIPLE
        if total < CUT_TOKENS or total - at < CUT_TOKENS // 4:
            return [self]
        first = np.clip(at - (self.query_lens.cumsum() - self.query_lens), 0, self.query_lens)
        rest = self.query_lens - first
        none, begun, unfinished = self.forks[:0], first > 0, rest > 0
        kv_lens, draws = self.kv_lens - rest, np.where(unfinished, 0, self.draws)
        return [
            _Lengths(self.lanes[begun], first[begun], kv_lens[begun], draws[begun], none),
            _Lengths(self.lanes[unfinished], rest[unfinished], self.kv_lens[unfinished], self.draws[unfinished], none),
        ]

    @property
    def ends(self) -> _Lengths:
        """The last query tokens of the sequences that draw."""
        drawing = self.draws > 0
        ones = np.ones_like(self.lanes[drawing])
        return _Lengths(self.lanes[drawing], ones, self.kv_lens[drawing], ones, self.forks[:0])

    def layout(self, page_table: Tensor, decodes: int, shared: bool) -> StepLayout:
        lens = torch.from_numpy(self.query_lens), torch.from_numpy(self.kv_lens)
        return StepLayout(*lens, decodes, torch.from_numpy(self.lanes), page_table, shared)

    @property
    def rows(self) -> np.ndarray:
        """The rows that are drawn from: the last of those sequences."""
        last: np.ndarray = self.query_lens.cumsum() - 1
        drawing: np.ndarray = last[self.draws > 0]
        return drawing

    def positions(self) -> np.ndarray:
        """Return the positions of the query tokens in their sequences."""
        first = self.kv_lens - self.query_lens.cumsum()  # the position that token 0 of the step would have in each
        positions: np.ndarray = np.repeat(first, self.query_lens) + np.arange(self.query_lens.sum())
        return positions

    def token_ids(self, batch: Batch, padding: int) -> np.ndarray:
        """0 for the decodes, whose tokens are on the device."""
        zeros = np.zeros(len(batch.decodes) + padding, dtype=np.int64)
        known = [chunk.tokens for chunk in batch.prefills]
        return np.concatenate([zeros[padding:], *known, zeros[:padding]])


def _read(scores: _Scores) -> Scored:
    top = None
    if scores.top_ids is not None and scores.top_logprobs is not None:
        pairs = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        top = [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
    return Scored(scores.lane, scores.start, scores.logprobs.tolist(), top)
