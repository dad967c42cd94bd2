"""The loop of the engine: each turn launches a step, and then reads the previous step."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from fastgen.device.profiling import Tracer, span
from fastgen.engine.inputs import InputProcessor
from fastgen.engine.interface import StepRunner
from fastgen.engine.interrupts import OneCaller
from fastgen.engine.outputs import ActiveRequest, ActiveSample, OutputQueue
from fastgen.engine.scheduler import NOT_FINITE, Scheduler
from fastgen.engine.stats import Stats
from fastgen.engine.step import Launched
from fastgen.engine.weight_state import WeightState
from fastgen.request import REPETITION, Event, Request, RequestOutput, Sequence, Status

log = logging.getLogger("fastgen.generator")  # the name that users of a Generator know
LOG_SECONDS = 10.0  # time spent in steps between two lines in the log


class Loop:
    """Runs the steps of a Generator: `begin` takes a request, `advance` runs a step, and results go to the queue of the
    request or, if it has none, to `events`.

    active: the requests in the engine, by id. owners: the request and the sample of each sequence, in order of arrival.
    """

    def __init__(self, runner: StepRunner, inputs: InputProcessor, weights: WeightState, interrupt: OneCaller) -> None:
        self.runner, self._inputs, self._interrupt = runner, inputs, interrupt
        self.weight_state, self.scheduler, self.tracer = weights, Scheduler(runner.config), Tracer()
        self.in_flight: Launched | None = None  # the last launched step, until it is collected
        self.stepping = self.closed = False  # stepping: within a step
        self.active: dict[str | int, ActiveRequest] = {}
        self.owners: dict[Sequence, tuple[ActiveRequest, ActiveSample]] = {}
        self.events: list[Event] = []
        self._late_aborts: list[str | int] = []  # requests that were aborted from within a step
        self._logged = Stats()  # the counts at the last line in the log
        self._ids = itertools.count()

    def advance(self) -> None:
        """Run one step, then the work deferred to its end: aborts, statistics, logging, Ctrl-C."""
        self.check_open()
        self.weight_state.check()
        start = time.perf_counter()
        ran = self._within_step(self._turn)
        late, self._late_aborts = self._late_aborts, []
        self.abort(late)
        stats = self.scheduler.stats
        stats.step_seconds += time.perf_counter() - start
        if ran:
            stats.steps += 1
            self.tracer.end_step()
        if stats.step_seconds - self._logged.step_seconds >= LOG_SECONDS:
            before, self._logged = self._logged, self.stats
            log.info("%s", self._logged.since(before))
        self._interrupt.check()

    def _turn(self) -> bool:
        """Schedule and launch a step, then collect the previous step and update. Return False if none was launched.

        A step with a mask draws its tokens last, since the mask depends on the tokens of the previous step.
        """
        launched = None
        with span("schedule"):
            batch = self.scheduler.schedule()
        if batch is not None:
            with span("launch"):
                launched = self.runner.launch(batch)
        self._collect()
        if launched is not None and launched.batch.masked:
            with span("sample"):
                vocab_size = self._inputs.model.vocab_size
                self.runner.sample(launched, self.scheduler.token_masks(launched.batch, vocab_size))
        self.in_flight = launched
        if not self.active:  # the step in flight computes only tokens too many
            self._collect()
        return launched is not None

    def _collect(self) -> None:
        """Read the step in flight, and process the sequences that it changed."""
        if self.in_flight is None:
            return
        launched, self.in_flight = self.in_flight, None
        with span("collect"):
            result = self.runner.collect(launched)
        with span("update"):
            for sequence in self.scheduler.update(launched.batch, result):
                self.update_output(sequence)

    def drain(self) -> None:
        """Read the step in flight, outside a turn."""
        self._within_step(self._collect)

    def _within_step(self, part: Callable[[], bool | None]) -> bool | None:
        """Run a part of a step, and `reset` after an exception."""
        try:
            self.stepping = True
            return part()
        except BaseException:
            self.reset()
            raise
        finally:
            self.stepping = False

    def reset(self) -> None:
        """Drop the step in flight, and preempt all running sequences, which compute again from the tokens read."""
        try:
            self.runner.synchronize()  # before the scheduler allocates pages again that launched steps read or write
        finally:
            self.in_flight = None  # not before: kernels of the step write to host memory that it holds
            self.scheduler.reset(self.owners)
            for sequence, (_, sample) in list(self.owners.items()):
                if sample.text is not None and self._inputs.tokenizer is not None:
                    sample.begin_text(self._inputs.tokenizer)
                if sample.text is not None or sequence.status is Status.FINISHED:
                    self.update_output(sequence)

    def update_output(self, sequence: Sequence) -> None:
        """Update the text and the events of a sequence, and close its request if all its samples have finished."""
        active, sample = self.owners[sequence]
        if sequence.error == NOT_FINITE:
            sequence.error += self.weight_state.blame(self.runner.weights.find_not_finite)
        if active.first_token is None and sequence.output_len > sample.emitted[0]:
            active.first_token = time.perf_counter()
        text_needed = sample.text is not None or sequence.status is Status.FINISHED
        if text_needed and (stop := sample.update_text(self._inputs.tokenizer)) is not None:
            # If an id, the length or a repetition ended it with the same token, the string is still the reason: it cuts
            # the text.
            self.scheduler.stats.repeated -= sequence.stop_reason == REPETITION
            self.scheduler.finish(sequence, "stop", stop)
            sequence.finish_reason, sequence.stop_reason = "stop", stop
        if active.queue is None:
            sample.emit(self.events, active)
        elif sample.text is None:
            sequence.every_token = False  # its text is made at the end; it was returned for the time of its first token
        if sequence.status is Status.FINISHED:
            del self.owners[sequence]
            if not any(other.sequence in self.owners for other in active.samples):
                self.active.pop(active.id).finish()
                self.scheduler.stats.finished += 1

    def begin(self, request: Request, queue: OutputQueue | None, score: tuple[int, float] | None = None) -> str | int:
        """Hand a request's sequences to the scheduler and return its id. score: (first position, temperature)."""
        self.check_open()
        self.weight_state.check()
        if not self.active:
            self.weight_state.check_committed()
        id = self.new_id() if request.id is None else request.id
        if not isinstance(id, str | int):
            raise TypeError(f"id must be a string or an integer, not {id!r}")
        if id in self.active:
            raise ValueError(f"a request with the id {id!r} is running; give another id")
        active = self._inputs.process(id, request, queue, score)
        self._interrupt.check()  # raised later, a Ctrl-C would leave a request in the engine whose id nobody has
        self.active[id] = active
        if queue is not None:
            queue.running[id] = None
        for sample in active.samples:
            self.owners[sample.sequence] = (active, sample)
            sample.sequence.begin_version(self.weight_state.version)
            self.scheduler.add(sample.sequence)
        self.scheduler.stats.requests += 1
        self.scheduler.stats.prompt_tokens += len(active.prompt_ids)
        return id

    def abort(self, ids: list[str | int]) -> list[RequestOutput]:
        """End requests and return their outputs so far; within a step, at its end."""
        if self.stepping or self._interrupt.exiting():  # by a mask, or by a stream that is garbage-collected
            self._late_aborts += ids
            return []
        if not any(id in self.active for id in ids):
            return []
        self.drain()
        outputs = []
        for active in [self.active[id] for id in dict.fromkeys(ids) if id in self.active]:
            for sample in active.samples:
                if sample.sequence in self.owners:
                    self.scheduler.finish(sample.sequence, "abort")
                    sample.update_text(self._inputs.tokenizer)
                    del self.owners[sample.sequence]
            self.active.pop(active.id).leave()
            self.scheduler.stats.aborted += 1
            self.events = [event for event in self.events if event.id != active.id]
            outputs.append(active.output())
        return outputs

    def cut_off(self, ids: Iterable[str | int]) -> None:
        """End requests; their outputs or last events have the finish_reason "abort". Raises RuntimeError in a step."""
        self.check_open()
        self.drain()
        for active in [self.active[id] for id in dict.fromkeys(ids) if id in self.active]:
            for sequence in [each.sequence for each in active.samples if each.sequence in self.owners]:
                self.scheduler.finish(sequence, "abort")
                self.update_output(sequence)

    def new_id(self) -> str:
        return next(key for key in map("r{}".format, self._ids) if key not in self.active)

    @property
    def stats(self) -> Stats:
        """Counts since the start, and the current state."""
        scheduler, pages = self.scheduler, self.scheduler.pages
        return replace(
            scheduler.stats,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=pages.num_pages - pages.available,
        )

    def check_open(self) -> None:
        """Raise RuntimeError if the Generator is closed, or if a step runs."""
        if self.closed:
            raise RuntimeError("this Generator is closed; make a new one")
        if self.stepping:
            raise RuntimeError("a step of this Generator runs, from which only `abort` can be called")

    def close(self) -> None:
        """Abort all requests, and close the runner."""
        self.closed, runner = True, self.runner
        del self.runner
        for active in self.active.values():
            active.finish("the Generator was closed")
        self.active, self.owners, self.events = {}, {}, []
        self.scheduler.stats.aborted = self.scheduler.stats.requests - self.scheduler.stats.finished
        runner.close()
        self.in_flight = None
