"""What becomes of sequences: the text of answers, events, and outputs; and the counts that `stats` shows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tqdm import tqdm

from fastgen.request import Completion, Event, RequestOutput, Sequence, Status, Timings, drawn_lists
from fastgen.tokenizer import AnswerText, Tokenizer

if TYPE_CHECKING:  # it imports NumPy, which those who only hand numbers on do without
    from fastgen.engine.scheduler import Scheduler


@dataclass
class Stats:
    """What a Generator has done, and holds now. Times in seconds; tokens, pages and requests counted.

    prompt_tokens: of the requests, each once. prefilled_tokens: what steps computed of known tokens: a prompt once,
    however many samples draw from it, and again what a preemption lost. cached_tokens: of the known tokens of sequences
    that took a lane, those that nothing had to be computed for, as the KV was there. pages_used: of the KV pool, held
    by sequences; what else is cached gives way to them. pages_saved, pages_loaded: to the host tier, and back from it.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    pages_saved: int = 0
    pages_loaded: int = 0
    preemptions: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time spent in steps."""
        return self.generated_tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def prefilled_per_second(self) -> float:
        """Prefilled tokens over the time spent in steps."""
        return self.prefilled_tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def cached_share(self) -> float:
        """Cached tokens over all known ones, from 0 to 1."""
        known = self.cached_tokens + self.prefilled_tokens
        return self.cached_tokens / known if known else 0.0

    def __str__(self) -> str:
        return (
            f"running {self.running}, waiting {self.waiting}, finished {self.finished}; "
            f"{self.prompt_tokens} tokens in, {self.generated_tokens} out, "
            f"{self.prefilled_per_second:.1f} tok/s in, {self.tokens_per_second:.1f} tok/s out; "
            f"cached {100 * self.cached_share:.1f} %, pages {self.pages_used}/{self.pages}, "
            f"preemptions {self.preemptions}"
        )

    def now(self, scheduler: Scheduler) -> Stats:
        """A copy, with what a scheduler counts itself."""
        pages = scheduler.pages
        return replace(
            self,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=pages.num_pages - pages.available,
            pages_saved=scheduler.saved_pages,
            pages_loaded=scheduler.loaded_pages,
            prefilled_tokens=scheduler.prefilled_tokens,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=scheduler.generated_tokens,
            preemptions=scheduler.preemptions,
        )

    def since(self, before: Stats) -> Stats:
        """What was done since then, and what is held now."""
        done = ("requests", "finished", "aborted", "prompt_tokens", "prefilled_tokens", "cached_tokens",
                "generated_tokens", "steps", "step_seconds", "pages_saved", "pages_loaded",
                "preemptions")  # fmt: skip
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in done})


def shown(outputs: Iterable[RequestOutput], total: int, progress: bool) -> Iterator[RequestOutput]:
    """The same outputs; with `progress`, a bar of requests and tokens/s goes along."""
    start, generated = time.perf_counter(), 0
    with tqdm(total=total, unit="req", disable=not progress) as bar:
        for output in outputs:
            generated += sum(len(completion.token_ids) for completion in output.completions)
            bar.set_postfix_str(f"{generated / (time.perf_counter() - start):.1f} tok/s", refresh=False)
            bar.update()
            yield output


@dataclass(eq=False)
class ActiveSample:
    """One sample, and the text and events that have been made of it."""

    sequence: Sequence
    text: AnswerText | None  # kept up to date where somebody reads it, or a stop string may end it
    ids_read: int = 0  # ids that have gone into the text
    told: tuple[int, int] = (0, 0)  # ids and characters that events have told

    def read(self, tokenizer: Tokenizer | None) -> str | None:
        """Bring the text up to date; returns the stop string that it has come to."""
        sequence, params = self.sequence, self.sequence.params
        if tokenizer is None:
            return None
        if self.text is None:
            self.text = AnswerText(tokenizer, sequence.token_ids[: sequence.prompt_len], params.stop_strings)
        end = sequence.output_len - isinstance(sequence.stop_reason, int)  # a stop id is no text
        finished = sequence.status is Status.FINISHED
        while self.ids_read < end or finished:
            # One id at a time where a stop string may end it: the text ends at the first.
            upto = min(self.ids_read + 1, end) if params.stop_strings else end
            new = sequence.token_ids[sequence.prompt_len + self.ids_read : sequence.prompt_len + upto]
            last = finished and upto == end
            stop = self.text.push(new, may_stop=upto > params.min_tokens, last=last)
            self.ids_read = upto
            if stop is not None or last:
                return stop
        return None

    def resume(self, completion: Completion, tokenizer: Tokenizer | None) -> str | None:
        """Go on where a completion of the same prompt ended, all of which counts as told; returns the stop string that
        is in it."""
        sequence = self.sequence
        sequence.token_ids += completion.token_ids
        sequence.drawn.extend(completion)
        sequence.versions = [(version, start) for version, start, _ in completion.weight_versions]
        stop = None if self.text is None else self.read(tokenizer)
        self.told = (sequence.output_len, 0 if self.text is None else len(self.text.text))
        return stop

    def forget_text(self, tokenizer: Tokenizer | None) -> None:
        """Begin the text anew, after an exception that may have come while it was made."""
        if self.text is not None and tokenizer is not None:
            sequence = self.sequence
            prompt = sequence.token_ids[: sequence.prompt_len]
            self.text, self.ids_read = AnswerText(tokenizer, prompt, sequence.params.stop_strings), 0

    def tell(self, events: list[Event], cached_tokens: int) -> None:
        """Append what is new since the last event. cached_tokens: of the request."""
        sequence, (ids, chars) = self.sequence, self.told
        text = self.text.text if self.text is not None else ""
        if (sequence.output_len, len(text)) == self.told and sequence.finish_reason is None:
            return
        scored = sequence.finish_reason is not None and sequence.score_start is not None
        event = Event(
            id=sequence.request_id,
            index=sequence.index,
            token_ids=sequence.token_ids[sequence.prompt_len + ids :],
            **sequence.drawn.since(ids),
            text=text[chars:],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            prompt_logprobs=sequence.prompt_logprobs if scored else None,
            prompt_top_logprobs=(sequence.prompt_top_logprobs or None) if scored else None,
            cached_tokens=cached_tokens,
            started=None if any(self.told) else sequence.started,
            weight_versions=sequence.weight_versions if sequence.finish_reason is not None else None,
        )
        self.told = (sequence.output_len, len(text))
        events.append(event)

    def completion(self) -> Completion:
        sequence = self.sequence
        assert sequence.finish_reason is not None
        return Completion(
            index=sequence.index,
            token_ids=sequence.output_ids,
            text=self.text.text if self.text is not None else "",
            **drawn_lists(sequence.drawn),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            weight_versions=sequence.weight_versions,
            seed=sequence.seed,
        )


def failed(id: str | int, error: Exception) -> RequestOutput:
    """The output of a request that did not begin."""
    completion = Completion(0, [], "", [], [], [], "error", error=str(error))
    return RequestOutput(id, [], [completion])


@dataclass(eq=False)
class OutputQueue:
    """Where the outputs of one call's requests go: `running` are the ids that are still in the engine, oldest first."""

    running: dict[str | int, None] = field(default_factory=dict)
    done: deque[RequestOutput] = field(default_factory=deque)


@dataclass(eq=False)
class ActiveRequest:
    """A request in the engine. Its output goes to `sink`; where there is none, its events are kept for `step`."""

    id: str | int
    prompt_ids: list[int]
    answers: list[ActiveSample]
    sink: OutputQueue | None
    added: float
    first_token: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, that the prefix cache held when the first sample began; the others find what it computed."""
        return self.answers[0].sequence.cached_tokens

    def output(self) -> RequestOutput:
        first = self.answers[0].sequence
        return RequestOutput(
            id=self.id,
            prompt_token_ids=self.prompt_ids,
            completions=[answer.completion() for answer in self.answers],
            prompt_logprobs=first.prompt_logprobs if first.score_start is not None else None,
            prompt_top_logprobs=first.prompt_top_logprobs or None,
            cached_tokens=self.cached_tokens,
            timings=Timings(
                first_token=None if self.first_token is None else self.first_token - self.added,
                finished=time.perf_counter() - self.added,
            ),
        )
