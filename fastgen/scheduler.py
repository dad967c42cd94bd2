"""What runs next: which lanes decode, which chunks prefill, who waits and who gives up its pages. No torch here."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace

import numpy as np

from fastgen.cache.pages import PageAllocator
from fastgen.config import EngineConfig
from fastgen.request import Batch, LaneStart, Prefill, Score, Sequence, Status, StepResult


class Scheduler:
    """Turns sequences into Batches and Batches' results into longer sequences.

    Within the token budget of a step, decodes go first, then prefill chunks in order of arrival. `running` is in order
    of arrival too: where pages run out, the youngest is preempted: it gives up its lane and pages, and computes
    everything again when it comes back. A step may be scheduled before the one before it is read; a sequence that then
    turns out to have stopped keeps its lane until the token too many comes back and is dropped.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pages = PageAllocator(config.num_pages, config.page_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.lanes: list[Sequence | None] = [None] * config.max_seqs
        self.in_flight = 0  # steps scheduled and not yet updated
        self.generated_tokens = 0
        self.preemptions = 0
        self._free_lanes = list(range(config.max_seqs))
        self._starts: list[LaneStart] = []
        self._page_updates: list[tuple[int, int, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def wants_more(self) -> bool:
        """Whether there are lanes, and pages, for more than already wait."""
        if len(self.waiting) > len(self._free_lanes):
            return False
        wanted = sum(self.pages.missing([], len(sequence.token_ids)) for sequence in self.waiting)
        return wanted <= self.pages.num_free

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    # ------------------------------------------------------------------------------------------ what runs next

    def schedule(self) -> Batch | None:
        """The next step; None where there is none, or where the step in flight must be read first."""
        decodes = self._schedule_decodes()
        if decodes is None:
            return None
        prefills = self._schedule_prefills(self.config.max_step_tokens - len(decodes))
        if not decodes and not prefills:
            return None
        batch = Batch(tuple(decodes), tuple(prefills), tuple(self._starts), tuple(self._page_updates), masked=False)
        self._starts.clear()
        self._page_updates.clear()
        self.in_flight += 1
        lanes = [self._on(lane) for lane in batch.sampling]
        for sequence in lanes:
            sequence.pending += 1
        return replace(batch, masked=True) if any(s.mask is not None for s in lanes) else batch

    def _schedule_decodes(self) -> list[int] | None:
        """Lanes that decode; None where pages ran out and the step in flight may free some."""
        decoding = [s for s in self.running if self._decodes(s)]
        for sequence in decoding:
            if sequence.lane < 0:
                continue  # preempted for an older one
            while not self._grow(sequence, sequence.computed + 1):
                if self.in_flight:
                    return None
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
        decodes = []
        for sequence in decoding:
            if sequence.lane >= 0:
                sequence.computed += 1
                decodes.append(sequence.lane)
        return decodes

    @staticmethod
    def _decodes(sequence: Sequence) -> bool:
        return (
            sequence.computed >= sequence.prefill_len
            and sequence.length < sequence.max_len
            and sequence.status is Status.RUNNING
        )

    def _schedule_prefills(self, budget: int) -> list[Prefill]:
        chunks = []
        for sequence in self.running:
            if budget and sequence.computed < sequence.prefill_len:
                chunks.append(self._chunk(sequence, budget))
                budget -= len(chunks[-1].tokens)
        while budget and self._admit():
            chunks.append(self._chunk(self.running[-1], budget))
            budget -= len(chunks[-1].tokens)
        return chunks

    def _admit(self) -> bool:
        """Give the first waiting sequence a lane and the pages of all its known tokens, where there are enough."""
        if not self.waiting or not self._free_lanes:
            return False
        sequence = self.waiting[0]
        known = len(sequence.token_ids)
        # A page stays free for each running sequence that will grow, or it would soon preempt the newcomer.
        growing = sum(self.pages.missing(other.pages, other.max_len - 1) > 0 for other in self.running)
        if self.running and self.pages.missing([], known + 1) + growing > self.pages.num_free:
            return False
        sequence.lane = heapq.heappop(self._free_lanes)
        self.lanes[sequence.lane] = self.waiting.popleft()
        self.running.append(sequence)
        sequence.status = Status.RUNNING
        sequence.prefill_len = known
        self._starts.append(
            LaneStart(
                lane=sequence.lane,
                params=sequence.params,
                seed=sequence.seed,
                index=sequence.index,
                prompt_len=sequence.prompt_len,
                stop_ids=sequence.stop_ids,
                token_ids=tuple(sequence.token_ids) if sequence.params.penalized else (),
            )
        )
        grown = self._grow(sequence, known)
        assert grown, "admitted without enough pages"
        return True

    def _chunk(self, sequence: Sequence, budget: int) -> Prefill:
        start = sequence.computed
        end = min(sequence.prefill_len, start + budget)
        sequence.computed = end
        return Prefill(
            lane=sequence.lane,
            start=start,
            tokens=tuple(sequence.token_ids[start:end]),
            sample=end == sequence.prefill_len and end < sequence.max_len,
            score=_wanted_score(sequence, start, end),
        )

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        held = len(sequence.pages)
        if not self.pages.grow(sequence.pages, num_tokens):
            return False
        for slot in range(held, len(sequence.pages)):
            self._page_updates.append((sequence.lane, slot, sequence.pages[slot]))
        return True

    # ------------------------------------------------------------------------------------ what has come of it

    def update(self, batch: Batch, result: StepResult) -> list[Sequence]:
        """Append what a step drew; returns the sequences with something new, the finished ones among them."""
        self.in_flight -= 1
        changed: dict[int, Sequence] = {}
        for scored in result.scored:
            sequence = self._on(scored.lane)
            end = scored.start + len(scored.logprobs)
            sequence.prompt_logprobs[scored.start : end] = scored.logprobs
            if scored.top_logprobs is not None:
                sequence.prompt_top_logprobs[scored.start : end] = scored.top_logprobs
        for row, lane in enumerate(batch.sampling):
            sequence = self._on(lane)
            sequence.pending -= 1
            if sequence.status is Status.RUNNING:
                self._append(sequence, result, row)
                changed[lane] = sequence
            elif not sequence.pending:
                self._leave(sequence)
        for chunk in batch.prefills:
            if chunk.sample:
                continue
            sequence = self._on(chunk.lane)
            if chunk.start + len(chunk.tokens) == sequence.max_len:  # a prompt that is only scored ends here
                self.finish(sequence, "length")
                changed[chunk.lane] = sequence
        return list(changed.values())

    def _append(self, sequence: Sequence, result: StepResult, row: int) -> None:
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
        self.generated_tokens += 1
        sequence.token_ids.append(token)  # last, so that an interrupt leaves no token without its logprobs
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
        elif not sequence.pending:
            self._leave(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason

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

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        self.lanes[sequence.lane] = None
        heapq.heappush(self._free_lanes, sequence.lane)
        self._starts = [start for start in self._starts if start.lane != sequence.lane]
        self._page_updates = [update for update in self._page_updates if update[0] != sequence.lane]
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


def _wanted_score(sequence: Sequence, start: int, end: int) -> Score | None:
    """The prompt logprobs that the chunk of positions start .. end - 1 gives: of the tokens one further."""
    if sequence.score_start is None:
        return None
    first = max(start, sequence.score_start - 1)
    targets = tuple(sequence.token_ids[first + 1 : min(end, sequence.prompt_len - 1) + 1])
    if not targets:
        return None
    return Score(first - start, targets, sequence.params.prompt_logprobs or 0, sequence.score_temperature)
