"""The scheduler: which lanes decode, which chunks prefill, which sequences are admitted or preempted. No torch here.

In a step of steady decode, the host's work is a few short loops over the lanes that decode. All other work follows
changes: `_decoding` is updated as sequences come and go, and a sequence needs attention when its computed tokens reach
its `limit`.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from fastgen.engine.admission import LengthEstimate, PageReservations
from fastgen.engine.options import EngineConfig
from fastgen.engine.outputs import Stats
from fastgen.engine.pages import PageAllocator
from fastgen.engine.prompt_scores import Scored, ScorePlan, ScoreRequest, chunk_score, keep_scores
from fastgen.engine.speculation.planning import Drafted, DraftPlan, History, Speculator, kept_lanes
from fastgen.request import Batch, LaneStart, Prefill, Sequence, Status, StepResult

NOT_FINITE = "the logits are not finite"
MAX_PREFILLS = 8  # sequences in the middle of their prefill
RETRY_STEPS = 8  # from a rejected admission until the next attempt, if no sequence leaves meanwhile


class Scheduler:
    """Turns sequences into Batches, and the results of Batches into longer sequences.

    Within the token budget of a step, decodes go first, then prefill chunks, which `next_chunk` chooses. A step may be
    scheduled before the step before it is read. If a sequence then turns out to have ended, it keeps its lane until the
    token too many is read and dropped.

    **Admission.** The first waiting sequence gets a lane, and pages for its known tokens, when `PageReservations.fits`
    finds that the pages it is expected to fill fit beside those of all running sequences. Up to `MAX_PREFILLS` may be
    in the middle of their prefill, so that a short prompt is seen while long ones are computed.

    **Sharing.** The full pages of a prompt are indexed when the step that computes them is scheduled, the pages of an
    output when the sequence leaves. An admitted sequence begins behind its longest cached prefix. When the last chunk
    of a prompt is scheduled, the next waiting sequences with the same tokens become its forks: they share its pages,
    draw from its last row, and compute nothing. A last page that is partly filled is copied for each fork.

    **Preemption.** If predictions were too low and pages run out, the youngest running sequence gives up its lane and
    its pages, and later computes again what is not cached. `running` is in order of arrival.

    **Speculation.** A step without prefills may be speculative; see `fastgen.engine.speculation`. While it is in
    flight, `computed` and `pending` of a sequence are upper bounds.
    """

    def __init__(self, config: EngineConfig, estimate: LengthEstimate | None = None) -> None:
        self.config = config
        self.estimate = estimate or LengthEstimate()
        self.closed = False  # True: nothing will be added before all current sequences have ended
        self.stats = Stats(pages=config.num_pages)
        self.history = History(config.speculate.history_tokens if config.speculate else 0)
        self.reset()

    def reset(self, sequences: Iterable[Sequence] = ()) -> None:
        """Rebuild all state from sequences, in order of arrival; those that have not finished wait again.

        This repairs the scheduler after an exception came out of any of its methods or of a step. No step may be in
        flight. The contents of the prefix cache and of the host tier are dropped.
        """
        config = self.config
        self.pages = PageAllocator(config.num_pages, config.page_size, config.host_pages)
        self.reservations = PageReservations(config, self.pages, self.estimate)
        self.waiting: OrderedDict[Sequence, int] = OrderedDict()  # with the pages that it was expected to reserve
        self.running: list[Sequence] = []
        self.prefilling: list[Sequence] = []  # the running ones with known tokens to compute, in order of arrival
        self.lanes: list[Sequence | None] = [None] * config.max_seqs
        self.in_flight = 0  # steps scheduled and not yet updated
        self._free_lanes = list(range(config.max_seqs))
        # By lane, without sequences that have ended. A sequence whose last token is in flight leaves it at the next
        # `schedule`.
        self._decoding: dict[int, Sequence] = {}
        self._decodes: tuple[int, ...] = ()  # of the last step
        self._masked: set[int] = set()  # lanes
        self._pause = 0  # steps without an attempt to admit
        self._starts: list[LaneStart] = []
        self._scores: list[ScoreRequest] = []
        self._page_updates: list[tuple[int, int, tuple[int, ...]]] = []
        padded = config.device != "cpu"
        self._speculator = Speculator(config.speculate, self.history, padded) if config.speculate else None
        for sequence in [s for s in sequences if s.status is not Status.FINISHED]:
            self._requeue(sequence)
            if sequence.output_len:  # the exception may have come between the last token and the end
                self._end_at(sequence, sequence.token_ids[-1])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def wants_more(self) -> bool:
        """True if there are lanes and pages for more sequences than wait."""
        return len(self.waiting) <= len(self._free_lanes) and self.reservations.all_fit()

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the queue."""
        self.waiting[sequence] = self.reservations.expected(sequence)
        self.reservations.waiting_pages += self.waiting[sequence]

    def _unqueue(self, sequence: Sequence) -> None:
        self.reservations.waiting_pages -= self.waiting.pop(sequence)
        self._pause = 0

    def drop_prefixes(self) -> None:
        """Empty the prefix cache: KV of the old weights is not given to another sequence. No step may be in flight.

        Prefills that are not complete begin again, so that forks share only KV of the new weights; so do all sequences
        that came after the first of them, to keep the order of arrival.
        """
        while self.prefilling:
            self._preempt(self.running[-1])
        for sequence in self.running:
            sequence.tip = None
        self.pages.drop_index()

    def preempt_all(self) -> None:
        """Preempt all running sequences. No step may be in flight."""
        assert not self.in_flight
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence)

    # -------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> Batch | None:
        """Return the next step; None if there is none, or if the step in flight must be read first.

        If `Batch.decodes` equals that of the step before, it is the same object.
        """
        planned = self._schedule_decodes()
        if planned is None:
            return None
        decodes, rows = planned
        prefills = self._schedule_prefills(self.config.prefill_tokens(len(decodes)))
        if not decodes and not prefills:
            return None
        drawing = [lane for chunk in prefills if chunk.sample for lane in (chunk.lane, *chunk.forks)]
        masked = not (self._masked.isdisjoint(decodes) and self._masked.isdisjoint(drawing))
        features: list[Any] = [*self.pages.take_moves()]
        for moves in features:
            self.stats.pages_saved += len(moves.saves)
            self.stats.pages_loaded += len(moves.loads)
        if self._scores:
            features.append(ScorePlan(tuple(self._scores)))
            self._scores.clear()
        if self._speculator:
            on = dict(zip(decodes, map(self._on, decodes), strict=True)) if self._speculator.moved else {}
            features += self._speculator.take_plan(rows, decodes, on, len(decodes) + len(drawing))
        batch = Batch(
            decodes, tuple(prefills), tuple(self._starts), tuple(self._page_updates), self.pages.take_copies(), masked,
            tuple(features),
        )  # fmt: skip
        self._starts.clear()
        self._page_updates.clear()
        self.in_flight += 1
        return batch

    def _schedule_decodes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the lanes that decode and their rows (see Batch); None if the step in flight must be read first."""
        for sequence in [s for s in self._decoding.values() if s.computed == s.limit]:
            if sequence.lane >= 0 and not self._pass_limit(sequence):  # lane < 0: preempted for an older sequence
                return None
        rows = self._plan_rows(self._speculator) if self._speculator else ()
        if rows is None:
            return None
        for sequence, count in zip(self._decoding.values(), rows or itertools.repeat(1), strict=False):
            sequence.computed += count
            sequence.pending += count
        decodes = tuple(self._decoding)
        if decodes != self._decodes:
            self._decodes = decodes
        return self._decodes, rows

    def _plan_rows(self, speculator: Speculator) -> tuple[int, ...] | None:
        """Return the most rows of each decode; () for one each. None if the step in flight must be read first."""
        decoding = self._decoding.values()
        prefills = self.prefilling or (self.waiting and self._free_lanes and self._pause <= 1)
        rows: list[int] = []
        if not prefills and len(decoding) <= speculator.options.most_lanes:
            lacking = speculator.lacking(decoding)
            if lacking and self.in_flight:
                return None
            speculator.send(lacking)
            rows = [self._fit(*each) for each in zip(decoding, speculator.rows(decoding), strict=True)]
        if max(rows, default=1) > 1:
            return tuple(rows)
        return None if speculator.in_flight else ()

    def _fit(self, sequence: Sequence, rows: int) -> int:
        """Return how many of a decode's rows have room, with more pages if there are some."""
        wanted = min(sequence.computed + rows, sequence.max_len - 1)
        if wanted > sequence.limit and self._grow(sequence, wanted):
            self._set_limit(sequence)
        return min(rows, sequence.limit - sequence.computed)

    def _pass_limit(self, sequence: Sequence) -> bool:
        """Give a sequence its next page, or stop decoding if its last token is in flight. Return False if it must wait
        for the step in flight."""
        if sequence.length >= sequence.max_len:
            if self._speculator and self._speculator.in_flight:  # perhaps not all of its tokens are kept
                return False
            del self._decoding[sequence.lane]
            return True
        while not self._grow(sequence, sequence.computed + 1):
            if self.in_flight:
                return False
            victim = self.running[-1]
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
        self._pause = max(0, self._pause - 1)
        reserve = budget - budget // 2
        while budget:
            while len(self.prefilling) < MAX_PREFILLS and self._admit():
                pass
            if not self.prefilling:
                break
            sequence, count = next_chunk(self.prefilling, budget, reserve)
            chunks.append(self._chunk(sequence, count))
            budget -= count
        return chunks

    def _chunk(self, sequence: Sequence, count: int) -> Prefill:
        """Schedule the next `count` known tokens of a sequence."""
        start, end = sequence.computed, sequence.computed + count
        sample = sequence.prefill_len == end < sequence.max_len
        sequence.computed = end
        sequence.pending += sample
        if not sequence.prefill_left:
            self.prefilling.remove(sequence)
        self.stats.prefilled_tokens += count
        self._index(sequence, end)
        if (score := chunk_score(sequence, start, end)) is not None:
            self._scores.append(score)
        if sample:
            self._start_decoding(sequence)
        forks = self._admit_forks(sequence) if sample else ()
        if sample and self._speculator and len(self.running) + len(self.waiting) <= self._speculator.options.most_lanes:
            self._speculator.send(self._on(lane) for lane in (sequence.lane, *forks))
        return Prefill(
            lane=sequence.lane,
            start=start,
            tokens=np.array(sequence.token_ids[start:end], dtype=np.int32),
            sample=sample,
            forks=forks,
        )

    def _start_decoding(self, sequence: Sequence) -> None:
        """Decode from the next step on, unless the token in flight is the last."""
        if sequence.length < sequence.max_len:
            self._decoding[sequence.lane] = sequence
            self._set_limit(sequence)

    # ------------------------------------------------------------------------------------------------- admission

    def _admit(self) -> bool:
        """Admit the first waiting sequence if its reservation fits: it gets a lane, the cached pages that match its
        known tokens, and pages for the other known tokens. It waits while its next pages are in another's prefill."""
        if not self.waiting or not self._free_lanes or self._pause:
            return False
        sequence = next(iter(self.waiting))
        if any(begins_like(sequence, other, self.config.page_size) for other in self.prefilling):
            return False
        nodes = self.pages.match(sequence.token_ids, cacheable(sequence) if self.config.prefix_cache else 0)
        expected = self.reservations.expected(sequence)
        if not self._fits(sequence, expected, expected - self.pages.held(nodes)):
            self._pause = RETRY_STEPS
            return False
        self._start(sequence, expected)
        if self.config.prefix_cache:
            sequence.tip = nodes[-1] if nodes else self.pages.root
        self.pages.adopt(sequence.pages, nodes)
        sequence.computed = len(nodes) * self.config.page_size
        self._count_cached(sequence, sequence.computed)
        self._send_pages(sequence, 0)
        grown = self._grow(sequence, sequence.prefill_len)
        assert grown, "admitted without enough pages"
        self.prefilling.append(sequence)
        return True

    def _admit_forks(self, source: Sequence) -> tuple[int, ...]:
        """Admit the next waiting sequences that have the same known tokens as `source`, whose last chunk is scheduled;
        return their lanes."""
        forks: list[int] = []
        while self.waiting and self._free_lanes:
            sequence, known = next(iter(self.waiting)), len(source.token_ids)
            if sequence.score_start is not None or sequence.max_len <= known or sequence.token_ids != source.token_ids:
                break
            copy = known + 1 < sequence.max_len and known % self.config.page_size != 0  # it will write to its last page
            expected = self.reservations.expected(sequence)
            if not self._fits(sequence, expected, expected - len(source.pages) + copy):
                break
            self._start(sequence, expected)
            sequence.tip = source.tip
            self.pages.fork(sequence.pages, source.pages, copy)
            sequence.computed, sequence.pending = known, 1
            self._count_cached(sequence, known - 1)
            self._send_pages(sequence, 0)
            self._start_decoding(sequence)
            forks.append(sequence.lane)
        return tuple(forks)

    def _fits(self, sequence: Sequence, expected: int, need: int) -> bool:
        return self.reservations.fits(sequence, expected, need, self.running, len(self.waiting), self.closed)

    def _start(self, sequence: Sequence, expected: int) -> None:
        """Move a sequence from the queue to a lane."""
        sequence.lane = lane = heapq.heappop(self._free_lanes)
        sequence.prefill_len = len(sequence.token_ids)
        sequence.status = Status.RUNNING
        if sequence.started is None:
            sequence.started = time.monotonic()
        self.lanes[lane] = sequence
        self._unqueue(sequence)
        self.running.append(sequence)
        self.reservations.reserve(sequence, expected)
        if sequence.mask is not None:
            self._masked.add(lane)
        counted = tuple(sequence.token_ids) if sequence.params.penalized else ()
        self._starts.append(
            LaneStart(
                lane, sequence.params, sequence.seed, sequence.index, sequence.prompt_len, sequence.stop_ids, counted
            )
        )

    def _count_cached(self, sequence: Sequence, num_tokens: int) -> None:
        self.stats.cached_tokens += num_tokens
        if not sequence.preemptions:
            sequence.cached_tokens = num_tokens

    # ----------------------------------------------------------------------------------------------------- pages

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend a sequence's page table to `num_tokens` tokens; return False if too few pages are available."""
        held = len(sequence.pages)
        if not self.pages.grow(sequence.pages, num_tokens):
            return False
        self._send_pages(sequence, held)
        self.reservations.extend(sequence)
        return True

    def _send_pages(self, sequence: Sequence, first: int) -> None:
        """Put the pages of a sequence, from entry `first` of its table on, into the next batch."""
        if first < len(sequence.pages):
            self._page_updates.append((sequence.lane, first, tuple(sequence.pages[first:])))

    def _index(self, sequence: Sequence, num_tokens: int) -> None:
        """Index the pages that are full of a sequence's first `num_tokens` tokens."""
        stop = min(num_tokens // self.config.page_size, len(sequence.pages))
        sequence.tip = self.pages.index(sequence.tip, sequence.pages, sequence.token_ids, stop)

    # ---------------------------------------------------------------------------------------------------- update

    def update(self, batch: Batch, result: StepResult) -> list[Sequence]:
        """Append the tokens that a step drew; return the sequences that finished, or changed with `every_token` set."""
        self.in_flight -= 1
        for found in result.features:
            if type(found) is Scored:
                keep_scores(self._on(found.lane), found)
        changed, dropped = [], 0
        lanes, alive, masked = self.lanes, Status.RUNNING, batch.masked
        drafted = result.find(Drafted) if result.features else None
        speculative = drafted is not None and self._learn(batch, result, drafted)
        sampling = kept_lanes(batch, drafted) if drafted and speculative else batch.sampling
        for lane, token, row in zip(sampling, result.tokens, result.per_token(), strict=True):
            sequence = lanes[lane]
            assert sequence is not None, "a lane is empty"
            sequence.pending -= 1
            if sequence.status is not alive:
                dropped += 1
                if not sequence.pending:
                    self._leave(sequence)
                continue
            if (masked or token < 0) and not accepts(sequence, token):
                dropped += 1
                self.finish(sequence, "error")
                changed.append(sequence)
                continue
            token_ids = sequence.token_ids
            sequence.drawn.append(row)
            token_ids.append(token)  # last: `_requeue` drops values without a token, should an exception come between
            if token in sequence.stop_ids or len(token_ids) == sequence.max_len:
                self._end_at(sequence, token)
                if sequence.every_token or sequence.status is not alive:
                    changed.append(sequence)
            elif sequence.every_token:
                changed.append(sequence)
        self.stats.generated_tokens += len(result.tokens) - dropped
        for chunk in batch.prefills:
            if not chunk.sample:
                sequence = self._on(chunk.lane)
                if chunk.start + len(chunk.tokens) == sequence.max_len:  # the end of a prompt that is only scored
                    self.finish(sequence, "length")
                    changed.append(sequence)
        return list(dict.fromkeys(changed)) if speculative else changed

    def _learn(self, batch: Batch, result: StepResult, drafted: Drafted) -> bool:
        """Learn how many rows each lane has kept, and which drafts were right. Return True for a speculative step."""
        speculator, stats, first, plan = self._speculator, self.stats, 0, batch.find(DraftPlan)
        assert speculator is not None
        assert plan is not None
        speculator.in_flight -= bool(plan.rows)
        most = plan.rows or itertools.repeat(1)
        for lane, rows, kept, guess, verified in zip(
            batch.sampling, most, drafted.kept, drafted.guesses, drafted.verified, strict=False
        ):
            sequence = self._on(lane)
            sequence.pending -= rows - kept
            sequence.computed -= rows - kept
            stats.drafted += verified
            stats.accepted += kept - 1
            speculator.learn(lane, result.tokens[first : first + kept], verified, guess)
            first += kept
        stats.saved_steps += first / len(drafted.kept) - 1 if plan.rows else 0
        return bool(plan.rows)

    def _end_at(self, sequence: Sequence, token: int) -> None:
        """Finish a sequence if its last token, `token`, ends it."""
        if token in sequence.stop_ids and sequence.output_len > sequence.params.min_tokens:
            self.finish(sequence, "stop", token)
        elif len(sequence.token_ids) >= sequence.max_len:
            self.finish(sequence, "length")

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence with the tokens it has. It leaves its lane now, or when its token in flight is read."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.pending:
            self._decoding.pop(sequence.lane, None)
        elif sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence in self.waiting:
            self._unqueue(sequence)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.status = Status.FINISHED
        if reason in ("stop", "length") and sequence.output_len:
            self.estimate.learn(sequence.output_len)
            if self.history.limit:
                self.history.add(sequence.token_ids[: sequence.prompt_len], sequence.output_ids)

    def fill_masks(self, batch: Batch, vocab_size: int) -> np.ndarray:
        """Return the allowed tokens of the lanes that draw: int32 [R, ceil(V / 32)]. All lanes must be updated.

        If a mask raises, no token is allowed: the token is then -1 and ends this sequence alone.
        """
        rows = np.full((len(batch.sampling), -(-vocab_size // 32)), -1, dtype=np.int32)
        for row, lane in zip(rows, batch.sampling, strict=True):
            sequence = self._on(lane)
            if sequence.mask is not None and sequence.status is Status.RUNNING:
                try:
                    sequence.mask.fill(row)
                except Exception as error:  # the user's code
                    sequence.error = f"the mask raised {error!r}"
                    row[:] = 0
        return rows

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.pending
        self._leave(sequence)
        self._requeue(sequence)
        self.waiting.move_to_end(sequence, last=False)

    def _requeue(self, sequence: Sequence) -> None:
        """Let a sequence wait, with the tokens that it has."""
        preempted = sequence.status is Status.RUNNING
        sequence.preemptions += preempted
        self.stats.preemptions += preempted
        sequence.pages.clear()
        sequence.lane, sequence.tip = -1, None
        sequence.computed = sequence.pending = sequence.reserved = 0
        sequence.status = Status.WAITING
        sequence.finish_reason = sequence.stop_reason = sequence.error = None
        sequence.drawn.cut(sequence.output_len)
        self.add(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence's lane and pages back."""
        lane = sequence.lane
        self._index(sequence, min(len(sequence.token_ids), sequence.computed))
        self.running.remove(sequence)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self.pages.release(sequence.pages)
        self.reservations.reserve(sequence, 0)
        self._pause = 0
        self._decoding.pop(lane, None)
        self._masked.discard(lane)
        self.lanes[lane] = None
        heapq.heappush(self._free_lanes, lane)
        self._page_updates = [update for update in self._page_updates if update[0] != lane]
        if self._speculator:
            self._speculator.leave(lane)
        sequence.lane, sequence.tip = -1, None

    def _on(self, lane: int) -> Sequence:
        sequence = self.lanes[lane]
        assert sequence is not None, f"lane {lane} is empty"
        return sequence


# ------------------------------------------------------------------------------------------------- one sequence


def next_chunk(prefilling: list[Sequence], budget: int, reserve: int) -> tuple[Sequence, int]:
    """Return the sequence whose known tokens a step computes next, and how many of them.

    The oldest sequence goes first, unless the shortest one lacks less than half as many tokens: overtaking then saves
    the short one more time than it costs the oldest. `reserve` tokens of each step are left to the oldest, so that it
    never starves. prefilling: the sequences in their prefill, in order of arrival. budget: prefill tokens that the step
    has left.
    """
    oldest = prefilling[0]
    shortest = min(prefilling, key=lambda sequence: sequence.prefill_left)
    spare = budget - min(oldest.prefill_left, reserve)
    if 2 * shortest.prefill_left < oldest.prefill_left and spare > 0:
        return shortest, min(shortest.prefill_left, spare)
    return oldest, min(oldest.prefill_left, budget)


def begins_like(sequence: Sequence, other: Sequence, page_size: int) -> bool:
    """Return True if a waiting sequence can share the page that another one's prefill has reached, or be its fork."""
    at = other.computed
    end, tokens, others = min((at // page_size + 1) * page_size, other.prefill_len), sequence.token_ids, other.token_ids
    return tokens[at:end] == others[at:end] and tokens[:at] == others[:at]


def cacheable(sequence: Sequence) -> int:
    """Return how many known tokens may come from the prefix cache. The last one is computed, since its row is drawn
    from, and so is the token before each position whose prompt logprob is wanted."""
    known = len(sequence.token_ids)
    return max(0, min(known, known if sequence.score_start is None else sequence.score_start) - 1)


def accepts(sequence: Sequence, token: int) -> bool:
    """Advance a sequence's mask by its next token. Return False, with the reason in `error`, if there can be none."""
    if token < 0:
        reason = NOT_FINITE if sequence.mask is None else "the mask allowed no token"
        if sequence.mask is not None and sequence.output_len < sequence.params.min_tokens:
            reason += "; min_tokens forbids an end so early"
        sequence.error = sequence.error or reason
        return False
    if sequence.mask is not None:
        try:
            sequence.mask.accept(token)
        except Exception as error:  # the user's code
            sequence.error = f"the mask raised {error!r}"
            return False
    return True
