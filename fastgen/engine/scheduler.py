"""What runs next: which lanes decode, which chunks prefill, who waits and who gives up its pages. No torch here.

The host's work in a step of steady decode is a few short loops over the lanes that decode. All else follows what
changes: `_prefilling` and `_decoding` are kept as sequences come and go, and `_limits` says for each lane how far it
may go before it is looked at again.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict

import numpy as np

from fastgen.engine.admission import PATIENCE, LengthEstimate, PageReservations
from fastgen.engine.config import EngineConfig
from fastgen.engine.pages import Node, PageAllocator
from fastgen.request import Batch, LaneStart, Prefill, Score, Scored, Sequence, Status, StepResult


class Scheduler:
    """Turns sequences into Batches and Batches' results into longer sequences.

    Within the token budget of a step, decodes go first, then prefill chunks in order of arrival. A step may be
    scheduled before the one before it is read; a sequence that then turns out to have stopped keeps its lane until
    the token too many comes back and is dropped.

    **Admission.** A sequence reserves the pages that it is expected to fill: those of the tokens it knows and of the
    answer that `estimate` says, as far as its max_len lets it grow. Who has come further reserves a page more than
    it holds. The first that waits is admitted where its reservation, less the pages that others hold already, fits the
    pool beside those of all that run, or where it will have room as others come to their max_len and leave; a lone one
    always is. So where answers end as expected, or at a max_tokens below that, nobody is ever preempted, and no prefill
    is done twice.

    **Sharing.** Full pages of a prompt are indexed as soon as a step is scheduled that computes them, and those of an
    answer when the sequence leaves. One that is admitted begins behind the longest prefix that is cached. When the last
    chunk of a prompt is scheduled, those that wait next with the same tokens become its forks: they share its pages,
    draw from its last row, and compute nothing; a last page that is not full is copied for each.

    **Waves.** Where nothing else will come (`closed`) and what is there does not fit at once, no more run at a time
    than make the waves equal: a small rest, alone at the end, would take as long as a wave and leave the GPU idle. The
    next wave begins before the end of the one ahead, as soon as all of it will have room.

    **Preemption.** Where expectations were too low and pages run out, the youngest gives up its lane and pages, and
    computes again what is not cached when it comes back. `running` is in order of arrival.

    **Exceptions.** After one that came out of a step, from wherever in it, `reset` makes everything anew from the
    sequences themselves, and trusts nothing else.
    """

    def __init__(self, config: EngineConfig, estimate: LengthEstimate | None = None) -> None:
        self.config = config
        self.estimate = estimate or LengthEstimate()
        self.closed = False  # nothing else will be added before all that is there has ended
        self.prefilled_tokens = 0  # those computed again count again
        self.generated_tokens = 0
        self.cached_tokens = 0  # that admitted sequences did not have to compute
        self.saved_pages = 0  # to the host tier
        self.loaded_pages = 0
        self.preemptions = 0
        self._sequences: dict[Sequence, None] = {}  # all that wait or hold a lane, in order of arrival
        self.reset()

    def reset(self) -> None:
        """Make everything anew from the sequences, which all wait again. The steps in flight, the prefix cache and the
        host tier are lost. This makes the scheduler right after an exception that came out of any of its methods."""
        config = self.config
        self.pages = PageAllocator(config.num_pages, config.page_size, config.host_pages)
        self.reservations = PageReservations(self.pages, self.estimate, config.max_seqs)
        self.running: list[Sequence] = []
        self.lanes: list[Sequence | None] = [None] * config.max_seqs
        self.in_flight = 0  # steps scheduled and not yet updated
        self._free_lanes = list(range(config.max_seqs))
        # By lane, in order of arrival. A sequence is in neither when it has ended, or its last token is in flight.
        self._prefilling: dict[int, Sequence] = {}
        self._decoding: dict[int, Sequence] = {}
        self._decodes: tuple[int, ...] = ()  # of the last step
        self._limits = [0] * config.max_seqs  # of each lane that decodes: tokens computed when it needs a page, or ends
        self._masked: set[int] = set()  # lanes
        self._tips: list[Node | None] = [None] * config.max_seqs  # of each lane: its last indexed page, or the root
        self._outdated: set[int] = set()  # lanes whose KV is of old weights, in part at least
        self._refused: tuple[object, ...] = ()  # who was not admitted last, and why
        self._starts: list[LaneStart] = []
        self._page_updates: list[tuple[int, int, tuple[int, ...]]] = []
        self._sequences = {s: None for s in self._sequences if s.status is not Status.FINISHED}
        self.waiting = OrderedDict(self._sequences)
        for sequence in self._sequences:
            self.preemptions += sequence.status is Status.RUNNING
            requeue(sequence)
            self.reservations.wanted_sum += self.reservations.expected(sequence)
        for sequence in list(self._sequences):
            if sequence.output_len:  # the exception may have come between a last token and the end
                self._end(sequence, sequence.token_ids[-1])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def wants_more(self) -> bool:
        """Whether there are lanes, and pages, for more than already wait."""
        return len(self.waiting) <= len(self._free_lanes) and self.reservations.all_fit()

    def add(self, sequence: Sequence) -> None:
        expected = self.reservations.expected(sequence)
        self._sequences[sequence] = None
        self.waiting[sequence] = None
        self.reservations.wanted_sum += expected

    def drop_prefixes(self) -> None:
        """The weights have changed: nothing that was computed with the old ones is given to anybody any more."""
        self._outdated = {sequence.lane for sequence in self.running}
        self._tips = [None] * self.config.max_seqs
        self.pages.forget()

    def preempt_all(self) -> None:
        """What runs computes all its tokens again that are not cached. The step in flight must have been read."""
        assert not self.in_flight
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence)

    # ------------------------------------------------------------------------------------------ what runs next

    def schedule(self) -> Batch | None:
        """The next step; None where there is none, or where the step in flight must be read first.

        `Batch.decodes` is the same object as in the step before where it is equal.
        """
        decodes = self._schedule_decodes()
        if decodes is None:
            return None
        prefills = self._schedule_prefills(self.config.max_step_tokens - len(decodes))
        if not decodes and not prefills:
            return None
        drawing = [lane for chunk in prefills if chunk.sample for lane in (chunk.lane, *chunk.forks)]
        masked = not (self._masked.isdisjoint(decodes) and self._masked.isdisjoint(drawing))
        changes = self.pages.take_changes()
        batch = Batch(decodes, tuple(prefills), tuple(self._starts), tuple(self._page_updates), masked, *changes)
        self._starts.clear()
        self._page_updates.clear()
        self.saved_pages += len(changes.saves)
        self.loaded_pages += len(changes.loads)
        self.in_flight += 1
        return batch

    def _schedule_decodes(self) -> tuple[int, ...] | None:
        """Lanes that decode; None where pages ran out and the step in flight may free some."""
        limits = self._limits
        for sequence in [s for lane, s in self._decoding.items() if s.computed == limits[lane]]:
            if sequence.lane >= 0 and not self._pass_limit(sequence):  # else preempted for an older one
                return None
        for sequence in self._decoding.values():
            sequence.computed += 1
            sequence.pending += 1
        decodes = tuple(self._decoding)
        if decodes != self._decodes:
            self._decodes = decodes
        return self._decodes

    def _pass_limit(self, sequence: Sequence) -> bool:
        """End the decoding of a sequence whose last token is in flight, or give it a page; False where it must wait."""
        if sequence.length >= sequence.max_len:
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
        """The last token is drawn when all before it are computed."""
        self._limits[sequence.lane] = min(len(sequence.pages) * self.config.page_size, sequence.max_len - 1)

    def _schedule_prefills(self, budget: int) -> list[Prefill]:
        chunks: list[Prefill] = []
        for sequence in list(self._prefilling.values()):
            if budget:
                chunks.append(self._chunk(sequence, budget))
                budget -= len(chunks[-1].tokens)
        while budget and self._admit():
            chunks.append(self._chunk(self.running[-1], budget))
            budget -= len(chunks[-1].tokens)
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> Prefill:
        start = sequence.computed
        end = min(sequence.prefill_len, start + budget)
        ends = end == sequence.prefill_len
        sample = ends and end < sequence.max_len
        sequence.computed = end
        sequence.pending += sample
        self.prefilled_tokens += end - start
        self._index(sequence, end)
        if ends:
            del self._prefilling[sequence.lane]
        if sample:
            self._begin_decoding(sequence)
        return Prefill(
            lane=sequence.lane,
            start=start,
            tokens=np.array(sequence.token_ids[start:end], dtype=np.int32),
            sample=sample,
            score=wanted_score(sequence, start, end),
            forks=self._admit_forks(sequence) if sample else (),
        )

    def _begin_decoding(self, sequence: Sequence) -> None:
        """From its first token on, which is in flight, if it goes on after that."""
        if sequence.length < sequence.max_len:
            self._decoding[sequence.lane] = sequence
            self._set_limit(sequence)

    # -------------------------------------------------------------------------------------------- who is admitted

    def _admit(self) -> bool:
        """Give the first waiting sequence a lane, the cached pages that match its known tokens, and pages for the rest
        of these, where its reservation fits."""
        if not self.waiting or not self._free_lanes:
            return False
        sequence = next(iter(self.waiting))
        limit = cacheable(sequence) if self.config.prefix_cache else 0
        expected = self.reservations.expected(sequence)
        clock = self.running[0].computed // PATIENCE if self.running else 0
        state = (sequence, self.reservations.sum, len(self.running), self.closed, clock)
        if state == self._refused:  # nobody has come or left, and little time has passed
            return False
        nodes = self.pages.match(sequence.token_ids, limit)
        if not self._fits(sequence, expected, expected - self.pages.held(nodes)):
            self._refused = state
            return False
        tip = nodes[-1] if nodes else self.pages.root
        self._start(sequence, expected, tip if self.config.prefix_cache else None)
        self.pages.adopt(sequence.pages, nodes)
        sequence.computed = len(nodes) * self.config.page_size
        self._count_cached(sequence, sequence.computed)
        self._prefilling[sequence.lane] = sequence
        self._send_pages(sequence, 0)
        grown = self._grow(sequence, sequence.prefill_len)
        assert grown, "admitted without enough pages"
        return True

    def _admit_forks(self, source: Sequence) -> tuple[int, ...]:
        """Lanes of those next in line that know the same tokens as `source`, whose last known one is now scheduled."""
        forks: list[int] = []
        while self.waiting and self._free_lanes and source.lane not in self._outdated:
            sequence, known = next(iter(self.waiting)), len(source.token_ids)
            if sequence.score_start is not None or sequence.max_len <= known or sequence.token_ids != source.token_ids:
                break
            copy = known + 1 < sequence.max_len and known % self.config.page_size != 0  # it will write its last page
            expected = self.reservations.expected(sequence)
            if not self._fits(sequence, expected, expected - len(source.pages) + copy):
                break
            self._start(sequence, expected, self._tips[source.lane])
            self.pages.fork(sequence.pages, source.pages, copy)
            sequence.computed, sequence.pending = known, 1
            self._count_cached(sequence, known - 1)
            self._send_pages(sequence, 0)
            self._begin_decoding(sequence)
            forks.append(sequence.lane)
        return tuple(forks)

    def _fits(self, sequence: Sequence, expected: int, need: int) -> bool:
        """Whether one that waits may run: one that is expected to hold, and needs, so many pages."""
        running, waiting, count = len(self.running), len(self.waiting), 1
        if not running:
            return True
        wave = running + 1  # how many may run at a time, if all have room
        if self.closed:
            wave = -(-(running + waiting) // self.reservations.waves(expected, need))
        if running >= wave:
            count = (waiting - 1) % wave + 1  # the wave ahead is full: all that the next one still lacks, or nobody
        elif self.reservations.fits(need):
            return True
        budget = self.config.max_step_tokens - min(running + count, self.config.max_seqs) + 1
        return self.reservations.fit_in_time(sequence, count, self.running, budget)

    def _start(self, sequence: Sequence, expected: int, tip: Node | None) -> None:
        """Take a sequence from the queue and give it a lane."""
        lane = heapq.heappop(self._free_lanes)
        sequence.prefill_len = len(sequence.token_ids)
        self._tips[lane] = tip
        sequence.lane = lane
        sequence.status = Status.RUNNING
        if sequence.started is None:
            sequence.started = time.monotonic()
        self.lanes[lane] = sequence
        del self.waiting[sequence]
        self.running.append(sequence)
        self.reservations.wanted_sum -= expected
        self.reservations.reserve(lane, expected)
        if sequence.mask is not None:
            self._masked.add(lane)
        self._starts.append(lane_start(sequence))

    def _count_cached(self, sequence: Sequence, num_tokens: int) -> None:
        self.cached_tokens += num_tokens
        if not sequence.preemptions:
            sequence.cached_tokens = num_tokens

    # ------------------------------------------------------------------------------------------------------ pages

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        held = len(sequence.pages)
        if not self.pages.grow(sequence.pages, num_tokens):
            return False
        self._send_pages(sequence, held)
        self.reservations.renew(sequence)
        return True

    def _send_pages(self, sequence: Sequence, first: int) -> None:
        """Tell the lane of its pages from number `first` on."""
        if first < len(sequence.pages):
            self._page_updates.append((sequence.lane, first, tuple(sequence.pages[first:])))

    def _index(self, sequence: Sequence, num_tokens: int) -> None:
        """Index the pages that are full of a sequence's first `num_tokens` tokens."""
        stop = min(num_tokens // self.config.page_size, len(sequence.pages))
        tip = self._tips[sequence.lane]
        self._tips[sequence.lane] = self.pages.index(tip, sequence.pages, sequence.token_ids, stop)

    # ------------------------------------------------------------------------------------ what has come of it

    def update(self, batch: Batch, result: StepResult) -> list[Sequence]:
        """Append what a step drew; returns the sequences with something new, the finished ones among them."""
        self.in_flight -= 1
        self.pages.finish_step()
        for scored in result.scored:
            keep_scores(self._on(scored.lane), scored)
        changed = []
        lanes, running = self.lanes, Status.RUNNING
        plain = result.top_logprobs is None and result.sampling_mask is None and not batch.masked
        logprobs = result.logprobs, result.untruncated_logprobs, result.raw_logprobs
        rows = zip(batch.sampling, result.tokens, *logprobs, strict=True)
        for row, (lane, token, logprob, untruncated, raw_logprob) in enumerate(rows):
            sequence = lanes[lane]
            assert sequence is not None, "a lane is empty"
            sequence.pending -= 1
            if sequence.status is not running:
                if not sequence.pending:
                    self._leave(sequence)
                    del self._sequences[sequence]
                continue
            changed.append(sequence)
            if plain and token >= 0:  # the loop that each token goes through: what _append does, without the calls
                drawn, token_ids = sequence.drawn, sequence.token_ids
                drawn.logprobs.append(logprob)
                drawn.untruncated_logprobs.append(untruncated)
                drawn.raw_logprobs.append(raw_logprob)
                token_ids.append(token)
                if token in sequence.stop_ids or len(token_ids) == sequence.max_len:
                    self._end(sequence, token)
            else:
                self._append(sequence, result, row)
        self.generated_tokens += len(changed)
        for chunk in batch.prefills:
            if not chunk.sample:
                sequence = self._on(chunk.lane)
                if chunk.start + len(chunk.tokens) == sequence.max_len:  # a prompt that is only scored ends here
                    self.finish(sequence, "length")
                    changed.append(sequence)
        return changed

    def _append(self, sequence: Sequence, result: StepResult, row: int) -> None:
        if keep_token(sequence, result, row):
            self._end(sequence, sequence.token_ids[-1])
        else:
            self.generated_tokens -= 1  # `update` counts a token for each
            self.finish(sequence, "error")

    def _end(self, sequence: Sequence, token: int) -> None:
        """Finish a sequence where the token it has just said ends it."""
        if token in sequence.stop_ids and sequence.output_len > sequence.params.min_tokens:
            self.finish(sequence, "stop", token)
        elif len(sequence.token_ids) >= sequence.max_len:
            self.finish(sequence, "length")

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence. One that runs leaves its lane at once, or when its token in flight has come back."""
        if sequence.status is Status.FINISHED:
            return
        stays = sequence.pending > 0
        if stays:
            self._decoding.pop(sequence.lane, None)
        elif sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.reservations.wanted_sum -= self.reservations.expected(sequence)
            del self.waiting[sequence]
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.status = Status.FINISHED
        if not stays:
            self._sequences.pop(sequence, None)
        if reason in ("stop", "length") and sequence.output_len:
            self.reservations.learn(sequence.output_len, self.running, self.waiting)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence with what it has. The step in flight must have been read."""
        assert not self.in_flight
        self.finish(sequence, "abort")

    def fill_masks(self, batch: Batch, vocab_size: int) -> np.ndarray:
        """Allowed tokens of the lanes that draw: int32 [R, ceil(V / 32)]. All lanes must have been updated."""
        rows = np.full((len(batch.sampling), -(-vocab_size // 32)), -1, dtype=np.int32)
        for row, lane in zip(rows, batch.sampling, strict=True):
            fill_mask(self._on(lane), row)
        return rows

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.pending
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.error = None
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting[sequence] = None
        self.waiting.move_to_end(sequence, last=False)
        self.reservations.wanted_sum += self.reservations.expected(sequence)

    def _leave(self, sequence: Sequence) -> None:
        lane = sequence.lane
        self._index(sequence, min(len(sequence.token_ids), sequence.computed))
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        self.reservations.reserve(lane, 0)
        self._prefilling.pop(lane, None)
        self._decoding.pop(lane, None)
        self._masked.discard(lane)
        self._outdated.discard(lane)
        self._tips[lane] = None
        self.lanes[lane] = None
        heapq.heappush(self._free_lanes, lane)
        self._starts = [start for start in self._starts if start.lane != lane]
        self._page_updates = [update for update in self._page_updates if update[0] != lane]
        sequence.lane = -1

    def _on(self, lane: int) -> Sequence:
        sequence = self.lanes[lane]
        assert sequence is not None, f"lane {lane} is empty"
        return sequence

    def check(self) -> None:
        """What holds between any two calls."""
        self.pages.check(sequence.pages for sequence in self.running)
        assert {s.lane: s for s in self.running} == {lane: s for lane, s in enumerate(self.lanes) if s is not None}
        assert sorted([*self._free_lanes, *(s.lane for s in self.running)]) == list(range(self.config.max_seqs))
        assert list(self._sequences) == [*self.running, *self.waiting], "the order of arrival is lost"
        for sequence in self.waiting:
            assert sequence.status is Status.WAITING
            assert not sequence.pages
            assert sequence.lane < 0
        for sequence in self.running:
            assert sequence.computed <= sequence.length
            assert len(sequence.pages) * self.config.page_size >= sequence.computed
            assert len(sequence.token_ids) <= sequence.max_len
            reserved = self.reservations.of(sequence.lane)
            assert len(sequence.pages) <= reserved <= self.reservations.expected(sequence)
        self._check_kept()

    def _check_kept(self) -> None:
        """What is kept from step to step is what could be found out anew."""
        alive = [s for s in self.running if s.status is Status.RUNNING]
        assert list(self._prefilling.values()) == [s for s in alive if s.computed < s.prefill_len]
        # One whose last token is in flight is dropped from `_decoding` when the next step is scheduled.
        decoding = [s for s in self._decoding.values() if s.length < s.max_len]
        assert decoding == [s for s in alive if s.computed >= s.prefill_len and s.length < s.max_len]
        for sequence in self._decoding.values():
            limit = min(len(sequence.pages) * self.config.page_size, sequence.max_len - 1)
            assert sequence.computed <= self._limits[sequence.lane] == limit
        assert self._masked == {s.lane for s in self.running if s.mask is not None}
        assert self._outdated <= {s.lane for s in self.running}
        for sequence in self.running:
            tip = self._tips[sequence.lane]
            assert tip in (None, self.pages.root) or sequence.pages[tip.depth - 1] == tip.page
        assert self.reservations.sum == sum(self.reservations.of(s.lane) for s in self.running)
        assert self.reservations.wanted_sum == sum(map(self.reservations.expected, self.waiting))


# What one sequence wants of a step, and what it keeps of the step's result


def lane_start(sequence: Sequence) -> LaneStart:
    return LaneStart(
        lane=sequence.lane,
        params=sequence.params,
        seed=sequence.seed,
        index=sequence.index,
        prompt_len=sequence.prompt_len,
        stop_ids=sequence.stop_ids,
        token_ids=tuple(sequence.token_ids) if sequence.params.penalized else (),
    )


def cacheable(sequence: Sequence) -> int:
    """How many of a sequence's known tokens need not be computed, at most: the last one's row is drawn from, and a
    prompt logprob comes from the row before its position."""
    known = len(sequence.token_ids)
    return max(0, min(known, known if sequence.score_start is None else sequence.score_start) - 1)


def wanted_score(sequence: Sequence, start: int, end: int) -> Score | None:
    """The prompt logprobs that the chunk of positions start .. end - 1 gives: of the tokens one further."""
    if sequence.score_start is None:
        return None
    first = max(start, sequence.score_start - 1)
    targets = np.array(sequence.token_ids[first + 1 : min(end, sequence.prompt_len - 1) + 1], dtype=np.int32)
    if not len(targets):
        return None
    return Score(first - start, targets, sequence.params.prompt_logprobs or 0, sequence.score_temperature)


def keep_scores(sequence: Sequence, scored: Scored) -> None:
    end = scored.start + len(scored.logprobs)
    sequence.prompt_logprobs[scored.start : end] = scored.logprobs
    if scored.top_logprobs is not None:
        sequence.prompt_top_logprobs[scored.start : end] = scored.top_logprobs


def fill_mask(sequence: Sequence, row: np.ndarray) -> None:
    """Write the tokens that a sequence's mask allows into a row; none, where it raises."""
    if sequence.mask is not None and sequence.status is Status.RUNNING:
        try:
            sequence.mask.fill(row)
        except Exception as error:  # the user's code; ends this sequence alone, when no token comes back
            sequence.error = f"the mask raised {error!r}"
            row[:] = 0


def keep_token(sequence: Sequence, result: StepResult, row: int) -> bool:
    """Keep a token and all that was asked for with it; False, and `error` says why, where there can be none."""
    token = result.tokens[row]
    if token < 0:
        nothing = "the logits are not finite" if sequence.mask is None else "the mask allowed no token"
        sequence.error = sequence.error or nothing
        return False
    if sequence.mask is not None:
        try:
            sequence.mask.accept(token)
        except Exception as error:
            sequence.error = f"the mask raised {error!r}"
            return False
    sequence.drawn.append(result, row)
    sequence.token_ids.append(token)  # last: what an exception leaves without its token is cut by `requeue`
    return True


def requeue(sequence: Sequence) -> None:
    """Make a sequence what it was before it ran, but for the tokens that have been read, after an exception."""
    sequence.pages.clear()
    sequence.lane = -1
    sequence.computed = sequence.pending = 0
    sequence.preemptions += sequence.status is Status.RUNNING
    sequence.status = Status.WAITING
    sequence.finish_reason = sequence.stop_reason = sequence.error = None
    sequence.drawn.cut(sequence.output_len)
