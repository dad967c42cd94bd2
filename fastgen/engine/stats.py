"""The counts of `Generator.stats`, and the progress bar of `Generator.generate`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from fastgen.display import shown
from fastgen.request import RequestOutput


@shown("requests", "finished", "running", "waiting", "prompt_tokens", "generated_tokens", "cached_tokens", "steps")
@dataclass
class Stats:
    """Counts of a Generator since its start, and its current state.

    requests, finished, aborted: numbers of requests. running, waiting: numbers of sequences now.
    steps, step_seconds: number of engine steps, and the time spent in them.
    prompt_tokens: number of prompt tokens, once per request. generated_tokens: number of tokens of all samples.
    prefilled_tokens: number of known tokens that steps computed: a prompt once for all samples that draw from it, and
        again after a preemption.
    cached_tokens: number of known tokens of admitted sequences that were not computed again.
    pages: size of the KV pool. pages_used: number of pages that sequences hold now; other cached pages are evicted on
        demand.
    pages_saved, pages_loaded: numbers of pages copied to the host tier, and back.
    drafted, accepted: numbers of drafted tokens that steps verified, and that equalled the draws.
    head_drafted, head_accepted: the same for drafts of a head; the other drafts came from texts.
    saved_steps: decode steps avoided by speculation.
    repeated: number of samples that `repetition_detection` ended.
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
    drafted: int = 0
    accepted: int = 0
    head_drafted: int = 0
    head_accepted: int = 0
    saved_steps: float = 0.0
    repeated: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of steps."""
        return self.generated_tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def prefilled_per_second(self) -> float:
        """Prefilled tokens per second of steps."""
        return self.prefilled_tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def cached_share(self) -> float:
        """The share of known tokens that were cached, from 0 to 1."""
        tokens = self.cached_tokens + self.prefilled_tokens
        return self.cached_tokens / tokens if tokens else 0.0

    @property
    def kv_cache_usage(self) -> float:
        """The share of the KV pool's pages that sequences hold now, from 0 to 1."""
        return self.pages_used / self.pages if self.pages else 0.0

    def __str__(self) -> str:
        return (
            f"running {self.running}, waiting {self.waiting}, finished {self.finished}; "
            f"{self.prompt_tokens} tokens in, {self.generated_tokens} out, "
            f"{self.prefilled_per_second:.1f} tok/s in, {self.tokens_per_second:.1f} tok/s out; "
            f"cached {100 * self.cached_share:.1f} %, pages {self.pages_used}/{self.pages}, "
            f"preemptions {self.preemptions}"
            + (f", drafts right {self.accepted}/{self.drafted}" if self.drafted else "")
            + (f", repetitions {self.repeated}" if self.repeated else "")
        )

    def since(self, before: Stats) -> Stats:
        """Return the counts since `before`, and the current state."""
        state = ("running", "waiting", "pages_used", "pages")
        return replace(self, **{n: v - getattr(before, n) for n, v in vars(self).items() if n not in state})


def with_progress(outputs: Iterable[RequestOutput], total: int, show: bool) -> Iterator[RequestOutput]:
    """Yield the outputs, and show a bar of requests and tokens/s if `show`."""
    start, generated = time.perf_counter(), 0
    with tqdm(total=total, unit="req", disable=not show) as bar:
        for output in outputs:
            generated += sum(len(completion.token_ids) for completion in output.completions)
            bar.set_postfix_str(f"{generated / (time.perf_counter() - start):.1f} tok/s", refresh=False)
            bar.update()
            yield output
