"""What runs next: which lanes decode, which chunks prefill, who waits and who gives up its pages. No torch here.

The host's work in a step of steady decode is a few short loops over the lanes that decode. All else follows what
changes: `_prefilling` and `_decoding` are kept as sequences come and go, and `_limits` says for each lane how far it
may go before it is looked at again.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from fastgen.cache.pages import PageAllocator
from fastgen.config import EngineConfig
from fastgen.request import Batch, LaneStart, Prefill, Score, Scored, Sequence, Status, StepResult


@dataclass
class Expectation:
    """How long answers get. One that nothing but its length ends gets as long as that; of others, finished ones tell.

    Twice a moving average, since most answers are shorter than that and those that are not can still be preempted.
    Before any has finished: 2048 tokens.
    """

    average: float = 1024.0  # tokens
    least: int = 256  # what is expected at the least, tokens
    weight: float = 1 / 16  # of one answer in the average
    exact: bool = True  # whether an end that is certain is known

    @property
    def tokens(self) -> int:
        return max(self.least, round(2 * self.average))

    def learn(self, tokens: int) -> None:
        """An answer has finished with so many tokens."""
        self.average += self.weight * (tokens - self.average)


class Scheduler:
    """Turns sequences into Batches and Batches' results into longer sequences.

    Within the token budget of a step, decodes go first, then prefill chunks in order of arrival. A step may be
    scheduled before the one before it is read; a sequence that then turns out to have stopped keeps its lane until
    the token too many comes back and is dropped.

    **Admission.** A sequence reserves the pages that it is expected to fill: those of the tokens it knows and of the
    answer that `expectation` says, as far as its max_len lets it grow. Who has come further reserves a page more than
    it holds. The first that waits is admitted where its reservation fits the pool beside those of all that run; a lone
    one always is. So where answers end as expected, or at a max_tokens below that, nobody is ever preempted, and no
    prefill is done twice.

    **Waves.** Where nothing else will come (`closed`) and what is there does not fit at once, no more run at a time
    than make the waves equal: a small rest, alone at the end, would take as long as a wave and leave the GPU idle.

    **Preemption.** Where expectations were too low and pages run out, the youngest gives up its lane and pages, and
    computes everything again when it comes back. `running` is in order of arrival.
    """

    def __init__(self, config: EngineConfig, expectation: Expectation | None = None) -> None:
        self.config = config
        self.pages = PageAllocator(config.num_pages, config.page_size)
        self.expectation = expectation or Expectation()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.lanes: list[Sequence | None] = [None] * config.max_seqs
        self.closed = False  # nothing else will be added before all that is there has ended
        self.in_flight = 0  # steps scheduled and not yet updated
        self.prefilled_tokens = 0  # those computed again count again
        self.generated_tokens = 0
        self.preemptions = 0
        self._free_lanes = list(range(config.max_seqs))
        # By lane, in order of arrival. A sequence is in neither when it has ended, or its last token is in flight.
        self._prefilling: dict[int, Sequence] = {}
        self._decoding: dict[int, Sequence] = {}
        self._decodes: tuple[int, ...] = ()  # of the last step
        self._limits = [0] * config.max_seqs  # of each lane that decodes: tokens computed when it needs a page, or ends
        self._masked: set[int] = set()  # lanes
        self._reserved = [0] * config.max_seqs  # pages, of each lane
        self._reserved_sum = 0
        self._wanted_sum = 0  # the pages that those who wait will reserve
        self._answer_len = self.expectation.tokens  # the expectation that these numbers are made with
        self._starts: list[LaneStart] = []
        self._page_updates: list[tuple[int, int, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def wants_more(self) -> bool:
        """Whether there are lanes, and pages, for more than already wait."""
        fit = self._reserved_sum + self._wanted_sum <= self.pages.num_pages
        return fit and len(self.waiting) <= len(self._free_lanes)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._wanted_sum += self._expected_pages(sequence)

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
        masked = not self._masked.isdisjoint(decodes) or any(p.sample and p.lane in self._masked for p in prefills)
        batch = Batch(decodes, tuple(prefills), tuple(self._starts), tuple(self._page_updates), masked)
        self._starts.clear()
        self._page_updates.clear()
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
        chunk = Prefill(
            lane=sequence.lane,
            start=start,
            tokens=tuple(sequence.token_ids[start:end]),
            sample=ends and end < sequence.max_len,
            score=_wanted_score(sequence, start, end),
        )
        sequence.computed = end
        sequence.pending += chunk.sample
        self.prefilled_tokens += end - start
        if ends:
            del self._prefilling[sequence.lane]
        if sequence.pending and sequence.length < sequence.max_len:
            self._decoding[sequence.lane] = sequence
            self._set_limit(sequence)
        return chunk

    def _admit(self) -> bool:
        """Give the first waiting sequence a lane and the pages of all its known tokens, where its reservation fits."""
        if not self.waiting or not self._free_lanes:
            return False
        sequence = self.waiting[0]
        expected = self._expected_pages(sequence)
        if self.running and (self._reserved_sum + expected > self.pages.num_pages or len(self.running) >= self._wave()):
            return False
        sequence.lane = lane = heapq.heappop(self._free_lanes)
        self.lanes[lane] = self.waiting.popleft()
        self.running.append(sequence)
        self._wanted_sum -= expected
        self._reserve(sequence, expected)
        sequence.status = Status.RUNNING
        sequence.prefill_len = len(sequence.token_ids)
        self._prefilling[lane] = sequence
        if sequence.mask is not None:
            self._masked.add(lane)
        self._starts.append(
            LaneStart(
                lane=lane,
                params=sequence.params,
                seed=sequence.seed,
                index=sequence.index,
                prompt_len=sequence.prompt_len,
                stop_ids=sequence.stop_ids,
                token_ids=tuple(sequence.token_ids) if sequence.params.penalized else (),
            )
        )
        grown = self._grow(sequence, sequence.prefill_len)
        assert grown, "admitted without enough pages"
        return True

    def _wave(self) -> int:
        """So many sequences may run at a time."""
        if not self.closed:
            return self.config.max_seqs
        waves = -(-(self._reserved_sum + self._wanted_sum) // self.pages.num_pages)
        return -(-(len(self.running) + len(self.waiting)) // waves)

    # -------------------------------------------------------------------------------- pages, held and reserved

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        held = len(sequence.pages)
        if not self.pages.grow(sequence.pages, num_tokens):
            return False
        for slot in range(held, len(sequence.pages)):
            self._page_updates.append((sequence.lane, slot, sequence.pages[slot]))
        if len(sequence.pages) >= self._reserved[sequence.lane]:
            self._reserve(sequence, self._expected_pages(sequence))
        return True

    def _expected_pages(self, sequence: Sequence) -> int:
        """How many pages a sequence will hold at the end: as expected, or else one more than now."""
        count = self.pages.count
        now = max(count(len(sequence.token_ids)), len(sequence.pages))
        most = max(now, count(sequence.max_len - 1))  # the last token needs no place
        if sequence.ends_at_length and self.expectation.exact:
            return most
        return min(max(count(sequence.prompt_len + self._answer_len), now + 1), most)

    def _reserve(self, sequence: Sequence, num_pages: int) -> None:
        self._reserved_sum += num_pages - self._reserved[sequence.lane]
        self._reserved[sequence.lane] = num_pages

    def _learn(self, answer_len: int) -> None:
        """From an answer that has finished. Reservations are made anew where that moves them by much, which is rare."""
        self.expectation.learn(answer_len)
        if abs(self.expectation.tokens - self._answer_len) * 8 > self._answer_len:
            self._answer_len = self.expectation.tokens
            self._wanted_sum = sum(map(self._expected_pages, self.waiting))
            for sequence in self.running:
                self._reserve(sequence, self._expected_pages(sequence))

    # ------------------------------------------------------------------------------------ what has come of it

    def update(self, batch: Batch, result: StepResult) -> list[Sequence]:
        """Append what a step drew; returns the sequences with something new, the finished ones among them."""
        self.in_flight -= 1
        self._keep_scores(result.scored)
        changed = []
        lanes, running = self.lanes, Status.RUNNING
        plain = result.top_logprobs is None and result.sampling_masks is None and not batch.masked
        rows = zip(batch.sampling, result.tokens, result.logprobs, result.raw_logprobs, strict=True)
        for row, (lane, token, logprob, raw_logprob) in enumerate(rows):
            sequence = lanes[lane]
            assert sequence is not None, "a lane is empty"
            sequence.pending -= 1
            if sequence.status is not running:
                if not sequence.pending:
                    self._leave(sequence)
                continue
            changed.append(sequence)
            if plain and token >= 0:  # the loop that each token goes through: what _append does, without the calls
                sequence.logprobs.append(logprob)
                sequence.raw_logprobs.append(raw_logprob)
                sequence.token_ids.append(token)
                self.generated_tokens += 1
                if token in sequence.stop_ids or len(sequence.token_ids) == sequence.max_len:
                    self._end(sequence, token)
            else:
                self._append(sequence, result, row)
        for chunk in batch.prefills:
            if not chunk.sample:
                sequence = self._on(chunk.lane)
                if chunk.start + len(chunk.tokens) == sequence.max_len:  # a prompt that is only scored ends here
                    self.finish(sequence, "length")
                    changed.append(sequence)
        return changed

    def _keep_scores(self, found: list[Scored]) -> None:
        for scored in found:
            sequence = self._on(scored.lane)
            end = scored.start + len(scored.logprobs)
            sequence.prompt_logprobs[scored.start : end] = scored.logprobs
            if scored.top_logprobs is not None:
                sequence.prompt_top_logprobs[scored.start : end] = scored.top_logprobs

    def _append(self, sequence: Sequence, result: StepResult, row: int) -> None:
        """Keep a token and all that was asked for with it, where a mask and finite logits let there be one."""
        token = result.tokens[row]
        if token < 0:
            nothing = "the logits are not finite" if sequence.mask is None else "the mask allowed no token"
            sequence.error = sequence.error or nothing
            return self.finish(sequence, "error")
        if sequence.mask is not None:
            try:
                sequence.mask.accept(token)
            except Exception as error:
                sequence.error = f"the mask raised {error!r}"
                return self.finish(sequence, "error")
        sequence.logprobs.append(result.logprobs[row])
        sequence.raw_logprobs.append(result.raw_logprobs[row])
        if result.top_logprobs is not None and (top := result.top_logprobs[row]) is not None:
            sequence.top_logprobs.append(top)
        if result.sampling_masks is not None and (kept := result.sampling_masks[row]) is not None:
            sequence.sampling_mask.append(kept)
        sequence.token_ids.append(token)  # last, so that an interrupt leaves no token without its logprobs
        self.generated_tokens += 1
        self._end(sequence, token)

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
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            self._wanted_sum -= self._expected_pages(sequence)
        elif sequence.pending:
            self._decoding.pop(sequence.lane, None)
        else:
            self._leave(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if reason in ("stop", "length") and sequence.output_len:
            self._learn(sequence.output_len)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence with what it has. The step in flight must have been read."""
        assert not self.in_flight
        self.finish(sequence, "abort")

    def rewind(self) -> None:
        """Forget the steps in flight, whose results are lost: what runs computes again from the tokens it has."""
        self.in_flight = 0
        for sequence in self.running[::-1]:
            sequence.pending = 0
            known = sequence.output_len
            for kept in (sequence.logprobs, sequence.raw_logprobs, sequence.top_logprobs, sequence.sampling_mask):
                del kept[known:]
            if sequence.status is Status.FINISHED:
                self._leave(sequence)
            else:
                self._preempt(sequence)
        # An interrupt may have come in the middle of a sum.
        self._reserved_sum, self._wanted_sum = 0, sum(map(self._expected_pages, self.waiting))

    def fill_masks(self, batch: Batch, vocab_size: int) -> np.ndarray:
        """Allowed tokens of the lanes that draw: int32 [R, ceil(V / 32)]. All lanes must have been updated."""
        rows = np.full((len(batch.sampling), -(-vocab_size // 32)), -1, dtype=np.int32)
        for row, lane in zip(rows, batch.sampling, strict=True):
            sequence = self._on(lane)
            if sequence.mask is not None and sequence.status is Status.RUNNING:
                try:
                    sequence.mask.fill(row)
                except Exception as error:  # the user's code; ends this sequence alone, when no token comes back
                    sequence.error = f"the mask raised {error!r}"
                    row[:] = 0
        return rows

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.pending
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.error = None
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)
        self._wanted_sum += self._expected_pages(sequence)

    def _leave(self, sequence: Sequence) -> None:
        lane = sequence.lane
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        self._reserve(sequence, 0)
        self._prefilling.pop(lane, None)
        self._decoding.pop(lane, None)
        self._masked.discard(lane)
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
        for sequence in self.waiting:
            assert sequence.status is Status.WAITING
            assert not sequence.pages
            assert sequence.lane < 0
        for sequence in self.running:
            assert sequence.computed <= sequence.length
            assert len(sequence.pages) * self.config.page_size >= sequence.computed
            assert len(sequence.token_ids) <= sequence.max_len
            assert len(sequence.pages) <= self._reserved[sequence.lane] <= self._expected_pages(sequence)
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
        assert self._reserved_sum == sum(self._reserved) == sum(self._reserved[s.lane] for s in self.running)
        assert self._wanted_sum == sum(map(self._expected_pages, self.waiting))


def _wanted_score(sequence: Sequence, start: int, end: int) -> Score | None:
    """The prompt logprobs that the chunk of positions start .. end - 1 gives: of the tokens one further."""
    if sequence.score_start is None:
        return None
    first = max(start, sequence.score_start - 1)
    targets = tuple(sequence.token_ids[first + 1 : min(end, sequence.prompt_len - 1) + 1])
    if not targets:
        return None
    return Score(first - start, targets, sequence.params.prompt_logprobs or 0, sequence.score_temperature)
