"""The scheduler: which lanes decode, which chunks prefill, which sequences are admitted or preempted. No torch here.

In a step of steady decode, the host's work is a few short loops over the lanes that decode. All other work follows
changes: `_decoding` is updated as sequences come and go, and a sequence is looked at when its `computed` reaches its
`limit`.

Within the token budget of a step, decodes go first, then prefill chunks, which `next_chunk` chooses. A step may be
scheduled before the previous step is read. If a sequence then turns out to have ended, it keeps its lane until the
token too many is read and dropped.

**Admission.** The first waiting sequence gets a lane, and pages for its known tokens, when `PageReservations.fits`
finds that the pages it is expected to fill fit next to the pages of all running sequences. Up to `MAX_PREFILLS` may
be in the middle of their prefill, so that a short prompt is computed while long ones are.

**Prefix cache.** The full pages of a prompt are indexed when the step that computes them is scheduled, the pages of
an output when the sequence leaves. An admitted sequence holds its longest cached prefix, and begins after it, or within
it (see `PageAllocator.start_of`). When the last chunk of a prompt is scheduled, the next waiting sequences with the
same tokens become its forks: they share its pages, draw from its last row, and compute nothing. A last page that is
partly filled is copied for each fork.

**Preemption.** If predictions were too low and pages run out, the youngest running sequence gives up its lane and
its pages, and later computes again what is not cached. `running` is in order of admission.

**Priorities.** Sequences with lower numbers leave the queue and prefill first, and are preempted last. A waiting
sequence never preempts a running one to get its lane. Sequences with high numbers may wait forever.

**Features** add payloads to batches and read their results; see PlanFeature. One of them may plan how many rows each
decode has. Those that requests ask for come with the first such request (`add`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from fastgen.engine.admission import LaneTable, LengthEstimate, PageReservations, begins_like, next_chunk
from fastgen.engine.features import add_requested, features_of, history_of, make_allocator
from fastgen.engine.interface import EarlierOutputs, PlanFeature
from fastgen.engine.options import EngineConfig
from fastgen.engine.pages import NOT_INDEXED
from fastgen.engine.stats import Stats
from fastgen.request import REPETITION, Batch, Prefill, Sequence, Status, StepResult

MAX_PREFILLS = 8  # maximum number of sequences in the middle of their prefill, apart from less urgent ones
RETRY_STEPS = 8  # from a rejected admission until the next attempt, if no sequence leaves meanwhile
NOT_FINITE = "the logits are not finite"


class Scheduler:
    """Turns sequences into Batches, and the results of Batches into longer sequences.

    `schedule` may be called again before the step that it returned is read. running: the sequences with a lane, in
    order of admission. waiting: the queue.
    """

    def __init__(self, config: EngineConfig, estimate: LengthEstimate | None = None) -> None:
        self.config = config
        self.estimate = estimate or LengthEstimate()
        self.complete = False  # True: nothing will be added before all current sequences have ended
        self.stats = Stats(pages=config.num_pages)
        self._features: list[PlanFeature] = [feature.plan(self.stats) for feature in features_of(config)]
        self._row_planner = next((feature for feature in self._features if feature.plans_rows), None)
        self._mask_maker: PlanFeature | None = None
        self.reset()

    def reset(self, sequences: Iterable[Sequence] = ()) -> None:
        """Rebuild all state from sequences, in order of arrival; those that have not finished wait again.

        This repairs the scheduler after an exception came out of any of its methods or of a step. No step may be in
        flight. The contents of the prefix cache and of the host tier are dropped.
        """
        config = self.config
        self.pages = make_allocator(config, self._features)
        self.reservations = PageReservations(config, self.pages, self.estimate)
        self.waiting = self.reservations.waiting
        self.running: list[Sequence] = []
        self.prefilling: list[Sequence] = []  # the running ones with known tokens to compute, in order of admission
        self.lanes = LaneTable(config.max_seqs)
        self.in_flight = 0  # number of steps scheduled and not yet updated
        # By lane, without sequences that have ended. A sequence whose last token is in flight leaves this dict at the
        # next `schedule`.
        self._decoding: dict[int, Sequence] = {}
        self._decodes: tuple[int, ...] = ()  # lanes that decode in the last batch
        self._pause = 0  # number of steps without an attempt to admit
        for feature in self._features:
            feature.reset(self.lanes)
        for sequence in [s for s in sequences if s.status is not Status.FINISHED]:
            self._requeue(sequence)
            if sequence.output_len:  # the exception may have come between the last token and the end
                self._end_at(sequence, sequence.token_ids[-1])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def history(self) -> EarlierOutputs:
        """The outputs of earlier requests that a feature keeps."""
        return history_of(self._features)

    @property
    def wants_more(self) -> bool:
        """True if there are lanes and pages for more sequences than wait."""
        return len(self.waiting) <= len(self.lanes.free) and self.reservations.all_fit()

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue, after all others of its priority."""
        add_requested(self._features, sequence, self.lanes)
        self._mask_maker = next((feature for feature in self._features if feature.makes_masks), None)
        self.reservations.enqueue(sequence)
        if next(iter(self.waiting)) is sequence:
            self._pause = 0

    def drop_prefixes(self) -> None:
        """Empty the prefix cache: KV of the old weights is not given to another sequence. No step may be in flight.

        Prefills that are not complete begin again, so that forks share only KV of the new weights; so do all sequences
        that came after the first of them, to keep the order of arrival.
        """
        while self.prefilling:
            self._preempt(self.running[-1])
        for sequence in self.running:
            sequence.indexed = NOT_INDEXED
        self.pages.drop_index()

    def preempt_all(self) -> None:
        """Preempt all running sequences. No step may be in flight."""
        assert not self.in_flight
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence)

    # -------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> Batch | None:
        """Return the next step; None if there is none, or if the step in flight must be read first.

        `Batch.decodes` stays the same object while the lanes are the same, which saves comparisons in the runner.
        """
        decodes = self._schedule_decodes()
        if decodes is None:
            return None
        prefills = tuple(self._schedule_prefills(self.config.prefill_tokens(len(decodes))))
        if not decodes and not prefills:
            return None
        batch = Batch(decodes, prefills, *self.lanes.take_changes(), self.pages.take_copies(), self.pages.take_fresh())
        batch.masked = bool(self.lanes.masked) and not self.lanes.masked.isdisjoint(batch.sampling)
        payloads = (feature.payload(batch) for feature in self._features)
        batch.features = tuple(payload for payload in payloads if payload is not None)
        self.in_flight += 1
        return batch

    def _schedule_decodes(self) -> tuple[int, ...] | None:
        """Return the lanes that decode; None if the step in flight must be read first."""
        for sequence in [s for s in self._decoding.values() if s.computed == s.limit]:
            if sequence.lane >= 0 and not self._pass_limit(sequence):  # lane < 0: preempted for an older sequence
                return None
        rows: tuple[int, ...] | None = ()
        if self._row_planner is not None:
            prefills = bool(self.prefilling or (self.waiting and self.lanes.free and self._pause <= 1))
            rows = self._row_planner.plan_rows(self._decoding.values(), prefills, self.in_flight, self._room)
        if rows is None:
            return None
        for sequence, count in zip(self._decoding.values(), rows or itertools.repeat(1), strict=False):
            sequence.computed += count
            sequence.pending += count
        decodes = tuple(self._decoding)
        if decodes != self._decodes:
            self._decodes = decodes
        return self._decodes

    def _room(self, sequence: Sequence, rows: int) -> int:
        """Return how many of a decode's rows have room, with more pages if there are some."""
        length = min(sequence.computed + rows, sequence.max_len - 1)
        if length > sequence.limit and self._grow(sequence, length):
            self._set_limit(sequence)
        return min(rows, sequence.limit - sequence.computed)

    def _pass_limit(self, sequence: Sequence) -> bool:
        """Give a sequence its next page, or stop decoding if its last token is in flight. Return False if it must wait
        for the step in flight."""
        if sequence.length >= sequence.max_len:
            if self._row_planner is not None and self._row_planner.in_flight:  # perhaps not all of its tokens are kept
                return False
            del self._decoding[sequence.lane]
            return True
        while not self._grow(sequence, sequence.computed + 1):
            if self.in_flight:
                return False
            victim = max(reversed(self.running), key=lambda running: running.priority)  # the youngest of these
            self._preempt(victim)
            if victim is sequence:
                return True
        self._set_limit(sequence)
        return True

    def _set_limit(self, sequence: Sequence) -> None:
        # The last token is drawn when all tokens before it are computed.
        sequence.limit = min(len(sequence.pages) * self.config.page_size, sequence.max_len - 1)

    def _schedule_prefills(self, budget: int) -> list[Prefill]:
        """Admit sequences, and schedule `budget` tokens of those in their prefill, or all if these are fewer."""
        chunks: list[Prefill] = []
        done: set[Sequence] = set()  # a lane has one chunk in a step, even if a feature cuts it
        self._pause = max(0, self._pause - 1)
        reserve = budget - budget // 2
        while budget:
            while self._may_prefill() and self._admit():
                pass
            left = [each for each in self.prefilling if each not in done]
            if not left:
                break
            sequence, count = next_chunk(left, budget, reserve)
            for feature in self._features:
                count = feature.cut(sequence, count)
            chunks.append(self._chunk(sequence, count))
            done.add(sequence)
            budget -= count
        return chunks

    def _may_prefill(self) -> bool:
        """Return whether the first waiting sequence may begin its prefill: fewer than MAX_PREFILLS prefilling ones have
        its priority or a lower number."""
        if len(self.prefilling) < MAX_PREFILLS:
            return True
        first = next(iter(self.waiting), None)
        return first is not None and sum(each.priority <= first.priority for each in self.prefilling) < MAX_PREFILLS

    def _chunk(self, sequence: Sequence, count: int) -> Prefill:
        """Schedule the next `count` known tokens of a sequence."""
        start, end = sequence.computed, sequence.computed + count
        sample = sequence.prefill_len == end < sequence.max_len
        sequence.computed = end
        sequence.pending += sample
        if not sequence.prefill_left:
            self.prefilling.remove(sequence)
        self.stats.prefilled_tokens += count
        sequence.indexed = self.pages.index(sequence.indexed, sequence.pages, sequence.token_ids, end)
        if sample:
            self._start_decoding(sequence)
        forks = self._admit_forks(sequence) if sample else ()
        tokens = np.array(sequence.token_ids[start:end], dtype=np.int32)
        chunk = Prefill(sequence.lane, start, tokens, sample, forks)
        for feature in self._features:
            feature.chunk(chunk, len(self.running) + len(self.waiting))
        return chunk

    def _start_decoding(self, sequence: Sequence) -> None:
        """Decode from the next step on, unless the token in flight is the last."""
        if sequence.length < sequence.max_len:
            self._decoding[sequence.lane] = sequence
            self._set_limit(sequence)

    # ------------------------------------------------------------------------------------------------- admission

    def _admit(self) -> bool:
        """Admit the first waiting sequence if its reservation fits: it gets a lane, the cached pages that match its
        known tokens, and pages for the other known tokens. It waits while its next pages are in another's prefill."""
        if not self.waiting or not self.lanes.free or self._pause:
            return False
        sequence = next(iter(self.waiting))
        if any(begins_like(sequence, other, self.config.page_size) for other in self.prefilling):
            return False
        nodes = self.pages.match(sequence.token_ids, sequence.cacheable_len if self.config.prefix_cache else 0)
        expected = self.reservations.expected(sequence)
        need = expected - self.pages.held(nodes)
        if not self.reservations.fits(sequence, expected, need, self.running, self.complete):
            self._pause = RETRY_STEPS
            return False
        self.pages.adopt(sequence.pages, nodes)
        sequence.indexed = len(nodes) if self.config.prefix_cache else NOT_INDEXED
        sequence.computed = cached = self.pages.start_of(nodes)
        self._start(sequence, expected, cached)
        grown = self._grow(sequence, sequence.prefill_len)
        assert grown, "admitted without enough pages"
        self.prefilling.append(sequence)
        return True

    def _admit_forks(self, source: Sequence) -> tuple[int, ...]:
        """Admit the next waiting sequences that have the same known tokens as `source`, whose last chunk is scheduled;
        return their lanes."""
        forks: list[int] = []
        while self.waiting and self.lanes.free:
            sequence, length = next(iter(self.waiting)), len(source.token_ids)
            if sequence.cacheable_len < length - 1 or sequence.max_len <= length:
                break  # it must compute tokens of its prompt to score them, or draws nothing
            if sequence.token_ids != source.token_ids:
                break
            copy = length + 1 < sequence.max_len and length % self.config.page_size != 0  # it writes to its last page
            expected = self.reservations.expected(sequence)
            need = expected - len(source.pages) + copy
            if not self.reservations.fits(sequence, expected, need, self.running, self.complete):
                break
            self.pages.fork(sequence.pages, source.pages, copy)
            sequence.indexed, sequence.computed, sequence.pending = source.indexed, length, 1
            self._start(sequence, expected, length - 1)
            self._start_decoding(sequence)
            forks.append(sequence.lane)
        return tuple(forks)

    def _start(self, sequence: Sequence, expected: int, cached: int) -> None:
        """Move a sequence from the queue to a lane. expected: number of pages to reserve. cached: number of its known
        tokens that it need not compute."""
        self.reservations.dequeue(sequence)
        self.reservations.reserve(sequence, expected)
        self.running.append(sequence)
        sequence.start()
        self.lanes.take(sequence)
        self.lanes.send_pages(sequence, 0)
        self._pause = 0
        self.stats.cached_tokens += cached
        if not sequence.preemptions:
            sequence.cached_tokens = cached

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend a sequence's page table to `num_tokens` tokens; return False if too few pages are available."""
        first = len(sequence.pages)
        if not self.pages.grow(sequence.pages, num_tokens):
            return False
        self.lanes.send_pages(sequence, first)
        self.reservations.extend(sequence)
        return True

    # ---------------------------------------------------------------------------------------------------- update

    def update(self, batch: Batch, result: StepResult) -> list[Sequence]:
        """Append the tokens that a step drew; return the sequences that finished, or changed with `every_token` set."""
        self.in_flight -= 1
        for feature in self._features:
            feature.update(batch, result)
        changed, dropped = [], 0
        lanes, alive, masked = self.lanes.sequences, Status.RUNNING, batch.masked
        for lane, token, row in zip(result.lanes, result.tokens, result.per_token(), strict=True):
            sequence = lanes[lane]
            assert sequence is not None, "a lane is empty"
            sequence.pending -= 1
            if sequence.status is not alive:
                dropped += 1
                if not sequence.pending:
                    self._leave(sequence)
                continue
            sequence.drawn.append(row)
            if (masked or token < 0) and not self._accepts(sequence, token):
                dropped += 1
                sequence.drawn.cut(sequence.output_len)
                self.finish(sequence, "error")
                changed.append(sequence)
                continue
            sequence.token_ids.append(token)  # right after the mask, which cannot go back; `rewind` drops other values
            may_end = token in sequence.stop_ids or sequence.repetition is not None
            if may_end or len(sequence.token_ids) == sequence.max_len:
                self._end_at(sequence, token)
                if sequence.every_token or sequence.status is not alive:
                    changed.append(sequence)
            elif sequence.every_token:
                changed.append(sequence)
        self.stats.generated_tokens += len(result.tokens) - dropped
        for chunk in batch.prefills:
            if not chunk.sample:
                sequence = self.lanes[chunk.lane]
                if chunk.start + len(chunk.tokens) == sequence.max_len:  # the end of a prompt that is only scored
                    self.finish(sequence, "length")
                    changed.append(sequence)
        repeated = len(result.lanes) > len(batch.sampling)
        return list(dict.fromkeys(changed)) if repeated else changed

    def _accepts(self, sequence: Sequence, token: int) -> bool:
        """Return whether a sequence can go on with the token that it drew; if not, its `error` says why."""
        # Nothing is called between the mask and the token's append: a signal's handler may run in a call.
        accepted = self._mask_maker is None or self._mask_maker.accepts(sequence, token)
        if token < 0:
            sequence.error = sequence.error or NOT_FINITE
        return accepted and token >= 0

    def token_masks(self, batch: Batch, vocab_size: int) -> np.ndarray:
        """Return the tokens that the lanes of a masked batch may draw: int32 [R, ceil(V / 32)]; see TokenMask. The step
        before must have been read."""
        assert self._mask_maker is not None, "no sequence has a mask"
        return self._mask_maker.fill_masks([self.lanes[lane] for lane in batch.sampling], vocab_size)

    def _end_at(self, sequence: Sequence, token: int) -> None:
        """Finish a sequence if its last token, `token`, ends it."""
        if token in sequence.stop_ids and sequence.output_len > sequence.params.min_tokens:
            self.finish(sequence, "stop", token)
        elif len(sequence.token_ids) >= sequence.max_len:
            self.finish(sequence, "length")
        elif sequence.repetition is not None:
            repeats = sequence.repetition.repeats(sequence.token_ids, sequence.prompt_len)
            if repeats and sequence.output_len >= sequence.params.min_tokens:
                self.stats.repeated += 1
                self.finish(sequence, "stop", REPETITION)

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence with the tokens it has. It leaves its lane now, or when its token in flight is read."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.pending:
            self._decoding.pop(sequence.lane, None)
        elif sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.reservations.dequeue(sequence)
            self._pause = 0
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.status = Status.FINISHED
        if reason in ("stop", "length") and sequence.output_len:
            self.estimate.learn(sequence.output_len)
            for feature in self._features:
                feature.finish(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.pending
        self._leave(sequence)
        self._requeue(sequence)
        self.reservations.move_first(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Let a sequence wait, with the tokens that it has."""
        self.stats.preemptions += sequence.status is Status.RUNNING
        sequence.rewind()
        self.add(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence's lane and pages back."""
        self.pages.index(sequence.indexed, sequence.pages, sequence.token_ids, sequence.computed)
        self.running.remove(sequence)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self.pages.release(sequence.pages)
        self.reservations.reserve(sequence, 0)
        self._pause = 0
        self._decoding.pop(sequence.lane, None)
        for feature in self._features:
            feature.leave(sequence)
        self.lanes.leave(sequence)
