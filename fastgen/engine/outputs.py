"""The output side of the engine: text of samples, events, and request outputs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from fastgen.request import Completion, Event, RequestOutput, Sequence, Status, Timings
from fastgen.text.detokenizer import OutputText
from fastgen.text.tokenizer import Tokenizer


@dataclass(eq=False)
class ActiveSample:
    """A sample of a request in the engine, with its text and the position up to which events were emitted."""

    sequence: Sequence
    min_tokens: int = 0  # number of tokens before which no stop string counts
    text: OutputText | None = None  # updated at each token if events or stop strings need it; else made at the end
    ids_read: int = 0  # number of ids that are in the text
    emitted: tuple[int, int] = (0, 0)  # numbers of ids and of characters in events so far
    resumed_chars: int = 0  # see Event

    def update_text(self, tokenizer: Tokenizer | None) -> str | None:
        """Add the new ids to the text; return the stop string that they complete, if any."""
        sequence, params = self.sequence, self.sequence.params
        if tokenizer is None:
            return None
        text = self.text or self.begin_text(tokenizer)
        end = sequence.output_len
        if isinstance(sequence.stop_reason, int) and not params.include_stop_str_in_output:
            end -= 1  # a stop id is not part of the text
        finished = sequence.status is Status.FINISHED
        while self.ids_read < end or finished:
            # With stop strings, ids are added one at a time, since the text ends at the first stop string.
            upto = min(self.ids_read + 1, end) if params.stop_strings else end
            new = sequence.token_ids[sequence.prompt_len + self.ids_read : sequence.prompt_len + upto]
            # A stop string in the tokens of a speculative step comes before the end that a later token brings.
            last = finished and (self.ids_read if params.stop_strings else upto) == end
            stop = text.push(new, may_stop=upto > self.min_tokens, last=last)
            self.ids_read = upto
            if stop is not None and new:
                sequence.cut(upto)
            if stop is not None or last:
                return stop
        return None

    def begin_text(self, tokenizer: Tokenizer) -> OutputText:
        """Begin the text, or begin it anew after an exception that may have interrupted `update_text`."""
        sequence, params = self.sequence, self.sequence.params
        prompt = sequence.token_ids[: sequence.prompt_len]
        stops = list(map(str.__str__, params.stop_strings))  # events hold plain strings, and no enums or NumPy's
        special = not params.skip_special_tokens
        self.text = OutputText(tokenizer, prompt, stops, params.include_stop_str_in_output, special)
        self.ids_read = 0
        return self.text

    def resume(self, completion: Completion, tokenizer: Tokenizer | None) -> str | None:
        """Begin with the tokens of a completion of the same prompt, which count as emitted; return the stop string that
        is in them, if any."""
        sequence = self.sequence
        sequence.token_ids += completion.token_ids
        sequence.drawn.extend(completion)
        sequence.versions = [(version, start) for version, start, _ in completion.weight_versions]
        sequence.kv_version = sequence.versions[-1][0] if sequence.versions else None
        sequence.recomputed = completion.recomputed.copy()
        stop = None if self.text is None else self.update_text(tokenizer)
        self.resumed_chars = 0 if self.text is None else len(self.text.text)
        self.emitted = (sequence.output_len, self.resumed_chars)
        return stop

    def emit(self, events: list[Event], active: ActiveRequest) -> None:
        """Append an event with what is new since the last one, if anything. active: the sample's request."""
        sequence, (ids, chars) = self.sequence, self.emitted
        text = self.text.text if self.text is not None else ""
        if (sequence.output_len, len(text)) == self.emitted and sequence.finish_reason is None:
            return
        last = sequence.finish_reason is not None
        with_prompt = last and self is active.samples[0]
        score = sequence.score if last else None
        event = Event(
            id=sequence.request_id,
            index=sequence.index,
            token_ids=sequence.token_ids[sequence.prompt_len + ids :],
            **{name: values[ids:] for name, values in sequence.drawn.lists().items()},
            text=text[chars:],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            prompt_logprobs=None if score is None else score.logprobs,
            prompt_top_logprobs=None if score is None else score.top_logprobs or None,
            prompt_ranks=None if score is None else score.ranks or None,
            cached_tokens=active.cached_tokens,
            started=None if any(self.emitted) else sequence.started,
            weight_versions=sequence.weight_versions if last else None,
            recomputed=sequence.recomputed if last else None,
            prompt_token_ids=active.prompt_ids if with_prompt else None,
            prompt=active.prompt if with_prompt else None,
            seed=sequence.seed if last else None,
            resumed_chars=self.resumed_chars,
        )
        self.emitted = (sequence.output_len, len(text))
        events.append(event)

    def completion(self) -> Completion:
        sequence = self.sequence
        assert sequence.finish_reason is not None
        return Completion(
            index=sequence.index,
            token_ids=sequence.output_ids,
            **sequence.drawn.lists(),
            text=self.text.text if self.text is not None else "",
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            weight_versions=sequence.weight_versions,
            recomputed=sequence.recomputed,
            seed=sequence.seed,
        )


@dataclass(eq=False)
class OutputQueue:
    """The requests of one call: ids of those in the engine, oldest first, and the outputs of finished ones."""

    running: dict[str | int, None] = field(default_factory=dict)
    done: deque[RequestOutput] = field(default_factory=deque)


@dataclass(eq=False)
class ActiveRequest:
    """A request in the engine. queue: receives its output; None: `Generator.step` returns its events."""

    id: str | int
    prompt_ids: list[int]
    samples: list[ActiveSample]
    queue: OutputQueue | None
    added: float  # time.perf_counter()
    first_token: float | None = None  # time.perf_counter() at the first token
    prompt: str | None = None  # its text

    @property
    def cached_tokens(self) -> int:
        """The cached tokens of the first sample; the other samples find the KV that it computed."""
        return self.samples[0].sequence.cached_tokens

    def leave(self) -> None:
        """Remove this request from its call's running requests."""
        if self.queue is not None:
            self.queue.running.pop(self.id, None)

    def finish(self, error: str = "") -> None:
        """Leave, and put the output, or an output with `error`, into the queue. With `error` samples may be
        unfinished."""
        self.leave()
        if self.queue is not None:
            self.queue.done.append(error_output(self.id, RuntimeError(error)) if error else self.output())

    def output(self) -> RequestOutput:
        score = self.samples[0].sequence.score
        return RequestOutput(
            id=self.id,
            prompt_token_ids=self.prompt_ids,
            completions=[sample.completion() for sample in self.samples],
            prompt_logprobs=None if score is None else score.logprobs,
            prompt_top_logprobs=None if score is None else score.top_logprobs or None,
            prompt_ranks=None if score is None else score.ranks or None,
            cached_tokens=self.cached_tokens,
            timings=Timings(
                first_token=None if self.first_token is None else self.first_token - self.added,
                finished=time.perf_counter() - self.added,
            ),
            prompt=self.prompt,
        )


def error_output(id: str | int, error: Exception) -> RequestOutput:
    """Return the output of a request that could not begin or was cut off."""
    return RequestOutput(id, [], [Completion(0, [], "", "error", error=str(error))])
