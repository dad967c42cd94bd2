"""The progress of a job: counts of its rows, shown as a bar on a terminal and otherwise as a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm

from fastgen.cli.command import note, one_line
from fastgen.cli.gen.work import Done
from fastgen.cli.options import EXCERPT

LINE_SECONDS = 10.0  # between two lines outside a terminal


@dataclass
class Tally:
    """The counts of a run: rows, rows with errors, and tokens of prompts and answers. repeated: number of answers that
    `repetition_detection` ended. reason: the beginning of the first error, and its row."""

    rows: int = 0
    errors: int = 0
    reason: str | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    repeated: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, done: Done) -> None:
        self.rows += 1
        self.errors += done.error is not None
        if self.reason is None and done.error is not None:
            self.reason = f"{one_line(done.error)[:EXCERPT]} (row {done.index})"
        self.prompt_tokens += done.prompt_tokens
        self.tokens += done.tokens
        self.repeated += done.repeated

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.started, 1e-9)

    @property
    def rate(self) -> str:
        return f"{self.tokens / self.seconds:.1f} tok/s"

    def __str__(self) -> str:
        rows = f"{self.rows} rows in {self.seconds:.1f} s, {self.errors} of them errors"
        repeated = f"; ended by repetition: {self.repeated}" if self.repeated else ""
        return f"{rows}; {self.prompt_tokens} tokens in, {self.tokens} out, {self.rate}{repeated}"


class Progress:
    """Context manager that shows a Tally while rows are added to it.

    total: number of rows of the job. initial: number of rows that earlier runs have finished.
    """

    def __init__(self, total: int, initial: int = 0) -> None:
        self.tally = Tally()
        self._total, self._initial = total, initial
        self._bar = tqdm(
            total=total, initial=initial, unit="row", miniters=1, dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, daemon=True)

    def __enter__(self) -> Progress:
        if self._bar.disable:  # a thread, since the work of this one may be in a long step
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, done: Done) -> None:
        self.tally.add(done)
        self._bar.set_postfix_str(f"{self.tally.rate}, {self.tally.errors} errors", refresh=False)
        self._bar.update()

    def _write_lines(self) -> None:
        while not self._over.wait(LINE_SECONDS):
            note("fggen", self.line)

    @property
    def line(self) -> str:
        """The state in words, such as "1200/50000 rows, 3 errors, 5231.4 tok/s, 12:30 left"."""
        tally = self.tally
        finished = f"{self._initial + tally.rows}/{self._total} rows"
        if not tally.rows:
            return finished
        seconds = (self._total - self._initial - tally.rows) * tally.seconds / tally.rows
        return f"{finished}, {tally.errors} errors, {tally.rate}, {tqdm.format_interval(seconds)} left"
