"""The work on rows: requests for an engine, and records of its outputs. Nothing here knows files."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Protocol

from fastgen.cli.gen.rows import Row
from fastgen.cli.options import SAMPLING
from fastgen.request import Prompt, Request, RequestOutput, SamplingParams

Record = dict[str, Any]

PROMPTS = ("prompt", "messages", "prompt_token_ids")
PARAMS = (*SAMPLING, "logit_bias", "seed", "stop", "stop_token_ids")  # columns that are parameters of their row
LOGPROBS = ("token_ids", "logprobs", "raw_logprobs")
MAX_SAMPLES = 10_000  # of a row, which are in memory together


@dataclass(frozen=True)
class RowRequests:
    """The requests of a row: none, if the row has an error. finish: returns the record, and the error, for outputs."""

    requests: Sequence[tuple[Prompt, SamplingParams]]
    finish: Callable[[list[RequestOutput]], tuple[Record, str | None]]


@dataclass(frozen=True, slots=True)
class Done:
    """The record of a row. error: the one that it has; prompt_tokens, tokens: of the prompts and the answers."""

    index: int
    record: Record
    error: str | None
    prompt_tokens: int
    tokens: int


Work = Generator[Done, None, None]


class Job(Protocol):
    """A way to turn rows into requests."""

    def ask(self, row: Row) -> RowRequests: ...


def work(
    job: Job, rows: Iterable[Row | None], stream: Callable[[Iterable[Request | None]], Iterable[RequestOutput]]
) -> Work:
    """Do a job on rows, which are read as the engine takes them; yield them in the order of completion.

    stream: of a Generator; None among the rows is passed on to it. Only rows whose requests are in the engine are held.
    """
    ids = count()
    owners: dict[str | int, tuple[Row, RowRequests, int]] = {}  # by the ids of requests
    outputs: dict[int, list[RequestOutput | None]] = {}  # by the indices of rows

    def requests() -> Iterator[Request | None]:
        for row in rows:
            if row is None:
                yield None
                continue
            asked = job.ask(row)
            # An empty prompt comes back at once, so that any number of rows with errors pass one by one.
            wanted = asked.requests or [([], SamplingParams())]
            outputs[row.index] = [None] * len(wanted)
            for place, (prompt, params) in enumerate(wanted):
                id = next(ids)
                owners[id] = (row, asked, place)
                yield Request(prompt, params, id)

    for output in stream(requests()):
        row, asked, place = owners.pop(output.id)
        outputs[row.index][place] = output
        found = [each for each in outputs[row.index] if each is not None]
        if len(found) == len(outputs[row.index]):
            del outputs[row.index]
            record, error = asked.finish(found)
            prompt_tokens = sum(len(each.prompt_token_ids) for each in found)
            tokens = sum(len(completion.token_ids) for each in found for completion in each.completions)
            yield Done(row.index, record, error, prompt_tokens, tokens)


def seed_of(seed: int, index: int) -> int:
    """Return the seed of a row, derived from that of its job."""
    return int.from_bytes(hashlib.blake2b(b"%d:%d" % (seed, index), digest_size=8).digest(), "little")


def added_columns(prefix: str, logprobs: bool) -> tuple[str, ...]:
    """Return the columns that a record has beside those of its row; the first one is the row's index."""
    names = ("row", "error", "completions", "finish_reasons", "prompt_tokens", "completion_tokens")
    return tuple(prefix + name for name in names + LOGPROBS * logprobs)


def check_added(added: Iterable[str], columns: Container[str]) -> None:
    """Raise ValueError if a row has a column that is to be added."""
    for name in added:
        if name in columns:
            raise ValueError(f"there is a column {name} already; rename it, or give those of fggen a --prefix")


def check_samples(n: int) -> None:
    """Raise ValueError for too many samples of one row."""
    if n > MAX_SAMPLES:
        raise ValueError(f"n is {n}; it may be at most {MAX_SAMPLES}: repeat the row for more")


class Template:
    """A text with names of columns in braces. Raises ValueError for a malformed one."""

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            fields = [(name, form) for _, name, form, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise ValueError(f"the template can not be read: {error}; write a literal brace twice") from None
        for name, form in fields:
            if not name or name.isdigit() or any(char in name for char in ".[]") or "{" in (form or ""):
                raise ValueError(f"the template has {{{name}}}; braces must hold the name of a column")
        self.names = sorted({name for name, _ in fields})

    def fill(self, columns: Mapping[str, Any]) -> str:
        """Return the text of a row. Raises ValueError if a column is missing."""
        for name in self.names:
            if columns.get(name) is None:
                raise ValueError(f"the row has no {name}, which the template needs")
        return string.Formatter().vformat(self._text, (), columns)


@dataclass(frozen=True)
class RowJob:
    """A job on rows with a prompt each, whose records have the completions.

    params: those that a row does not set. seed: rows without a seed derive theirs from it. template: makes the prompt.
    chat: a prompt that is text is the message of a user. logprobs: records have token ids and logprobs. prefix: of the
    names of the added columns.
    """

    params: SamplingParams
    seed: int
    template: Template | None = None
    chat: bool = False
    logprobs: bool = False
    prefix: str = ""

    @cached_property
    def _added(self) -> tuple[str, ...]:
        return added_columns(self.prefix, self.logprobs)

    def ask(self, row: Row) -> RowRequests:
        try:
            if row.error is not None:
                raise ValueError(row.error)
            check_added(self._added, row.columns)
            requests = [(self._prompt(row.columns), self._params(row))]
            return RowRequests(requests, lambda outputs: self._finish(row, outputs))
        except (ValueError, TypeError) as error:
            reason = str(error)
            return RowRequests([], lambda _: (self._record(row, reason), reason))

    def _prompt(self, columns: Mapping[str, Any]) -> Prompt:
        if self.template is not None:
            return self._text(self.template.fill(columns))
        given = [name for name in PROMPTS if columns.get(name) is not None]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "has none"
            raise ValueError(f"a row needs one of {', '.join(PROMPTS)}, and this one {found}")
        value = columns[given[0]]
        if given[0] == "prompt":
            if not isinstance(value, str):
                raise ValueError(f"prompt must be text, not {type(value).__name__}")
            return self._text(value)
        if not isinstance(value, list):
            raise ValueError(f"{given[0]} must be a list, not {type(value).__name__}")
        if given[0] == "messages":
            if not all(isinstance(message, dict) for message in value):
                raise ValueError("messages must be a list of objects, with a role and content each")
            # Parquet gives each message the fields of all others.
            return [{name: part for name, part in message.items() if part is not None} for message in value]
        if any(isinstance(token, dict) for token in value):
            raise ValueError("prompt_token_ids must be a list of integers")
        return value

    def _text(self, text: str) -> Prompt:
        text.encode()  # raises for a lone surrogate, with a clearer message than the tokenizer's
        return [{"role": "user", "content": text}] if self.chat else text

    def _params(self, row: Row) -> SamplingParams:
        given = {name: value for name in PARAMS if (value := row.columns.get(name)) is not None}
        given.setdefault("seed", seed_of(self.seed, row.index))
        if isinstance(bias := given.get("logit_bias"), dict):
            given["logit_bias"] = {int(id) if id.isdecimal() else id: value for id, value in bias.items()}
        if isinstance(n := given.get("n"), int):
            check_samples(n)
        if not isinstance(given.get("ignore_eos", False), bool):
            raise TypeError(f"ignore_eos must be true or false, not {given['ignore_eos']!r}")
        return replace(self.params, **given)

    def _finish(self, row: Row, outputs: list[RequestOutput]) -> tuple[Record, str | None]:
        (output,) = outputs
        if output.error is not None:
            return self._record(row, output.error), output.error
        made = output.completions
        texts = [completion.text for completion in made]
        reasons = [completion.finish_reason for completion in made]
        values = [texts, reasons, len(output.prompt_token_ids), [len(completion.token_ids) for completion in made]]
        if self.logprobs:
            values += [[getattr(completion, name) for completion in made] for name in LOGPROBS]
        return self._record(row, None, values), None

    def _record(self, row: Row, error: str | None, values: list[Any] | None = None) -> Record:
        index, reason, *names = self._added
        own = {index: row.index, reason: error}
        # Index and error come first in the line, and override columns of the same names.
        return {**own, **row.columns, **own, **dict(zip(names, values or [None] * len(names), strict=True))}
