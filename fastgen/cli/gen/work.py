"""The work on rows: requests to an engine, and records made of its outputs. Nothing here deals with files."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from fastgen.cli.command import UsageError
from fastgen.cli.gen.rows import Row, read_json
from fastgen.cli.options import SAMPLING
from fastgen.engine.seeds import seed_of
from fastgen.request import REPETITION, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from fastgen.model.config import ModelConfig
    from fastgen.text.tokenizer import Tokenizer

Record = dict[str, Any]

PROMPTS = ("prompt", "messages", "prompt_token_ids")
# Columns with sampling parameters of their row.
PARAMS = (*SAMPLING, "logit_bias", "repetition_detection", "seed", "stop", "stop_token_ids")
LOGPROBS = ("token_ids", "logprobs", "raw_logprobs")
MAX_SAMPLES = 10_000  # maximum `n` of a row, whose samples are in memory together


@dataclass(frozen=True)
class RowRequests:
    """The requests of a row; none if the row has an error. finish: makes the record and the error of the outputs."""

    requests: Sequence[Request]
    finish: Callable[[list[RequestOutput]], tuple[Record, str | None]]


class Model(Protocol):
    """The facts about a model that turn rows into requests: a Generator's, or those that a dry run loads."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def max_model_len(self) -> int: ...


State = Callable[[Record], tuple[int, bool]]
"""A function that returns the index of a record's row and whether the row has failed."""

Ask = Callable[[Row], RowRequests]
"""A function that turns a row into requests."""


@dataclass(frozen=True, slots=True)
class Done:
    """The record of a finished row. error: the reason if the row failed. prompt_tokens, tokens: number of tokens in the
    prompts and in the answers. repeated: number of answers that `repetition_detection` ended."""

    index: int
    record: Record
    error: str | None
    prompt_tokens: int
    tokens: int
    repeated: int = 0


Work = Generator[Done, None, None]


def work(
    ask: Ask, rows: Iterable[Row | None], stream: Callable[[Iterable[Request | None]], Iterable[RequestOutput]]
) -> Work:
    """Answer rows, which are read as the engine takes them, and yield them in the order of completion.

    stream: the method of a Generator; a None among the rows is passed on to it. Only rows whose requests are in the
    engine are kept in memory.
    """
    ids = count()
    owners: dict[str | int, tuple[int, RowRequests, list[Any], int]] = {}  # by request id

    def requests() -> Iterator[Request | None]:
        for row in rows:
            if row is None:
                yield None
                continue
            asked = ask(row)
            # An empty prompt comes back at once, so rows with errors pass one at a time, however many there are.
            row_requests = asked.requests or [Request([])]
            outputs = [None] * len(row_requests)
            for place, request in enumerate(row_requests):
                id = next(ids)
                owners[id] = (row.index, asked, outputs, place)
                yield replace(request, id=id)

    for output in stream(requests()):
        index, asked, outputs, place = owners.pop(output.id)
        outputs[place] = output
        if all(outputs):
            record, error = asked.finish(outputs)
            prompt_tokens = sum(len(each.prompt_token_ids) for each in outputs)
            completions = [completion for each in outputs for completion in each.completions]
            tokens = sum(len(completion.token_ids) for completion in completions)
            repeated = sum(completion.stop_reason == REPETITION for completion in completions)
            yield Done(index, record, error, prompt_tokens, tokens, repeated)


def in_order(done_rows: Work, done: Sequence[int]) -> Work:
    """Yield rows in the order of their indices, holding those that finish early.

    done: 1 at the index of each row that does not come. Few rows are held: the scheduler never preempts the oldest
    sequence, so only rows that finish while it runs are early.
    """
    early: dict[int | None, Done] = {}
    indices = (index for index, there in enumerate(done) if not there)
    index = next(indices, None)
    with closing(done_rows):
        for row in done_rows:
            early[row.index] = row
            while index in early:
                yield early.pop(index)
                index = next(indices, None)


def added_columns(prefix: str, logprobs: bool) -> tuple[str, ...]:
    """Return the columns that a record adds to those of its row. The first two are the row's index and its error."""
    names = ("row", "error", "completions", "finish_reasons", "prompt_tokens", "completion_tokens")
    return tuple(prefix + name for name in names + LOGPROBS * logprobs)


def state_by(added: Sequence[str]) -> State:
    """Return the State function for records with these added columns."""
    index, error = added[:2]
    return lambda record: (int(record[index]), bool(record[error]))


def check_added(added: Iterable[str], columns: Container[str]) -> None:
    """Raise ValueError if a row already has a column that would be added."""
    for name in added:
        if name in columns:
            raise ValueError(f"there is a column {name} already; rename it, or give those of fggen a --prefix")


class _Columns(string.Formatter):
    """A str.format whose braces hold the name of a column, but no attributes or items of its value."""

    def get_field(self, name: str, args: Sequence[Any], columns: Mapping[str, Any]) -> tuple[Any, str]:
        if columns.get(name) is None:
            raise ValueError(f"the row has no {name}, which the template needs")
        return columns[name], name


def fill(template: str, columns: Mapping[str, Any]) -> str:
    """Fill a template with the columns of a row. Raises ValueError or TypeError if that is not possible."""
    return _Columns().vformat(template, (), columns)


def fields_of(template: str) -> set[str]:
    """Return the columns that a template names. Raises UsageError for a malformed template."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise UsageError(f"the template cannot be read: {error}; write a literal brace twice") from None
    if "" in names:
        raise UsageError("the template has {} without the name of a column; write a literal brace twice")
    return names


def parsed(value: Any) -> Any:
    """Return the value of a column. Text is parsed as JSON if possible, since CSV has only text."""
    try:
        return read_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def given_by(row: Row) -> dict[str, Any]:
    """Return the sampling parameters that the columns of a row set."""
    given = {name: value for name in PARAMS if (value := row.columns.get(name)) is not None}
    return {name: value if name == "stop" else parsed(value) for name, value in given.items()}


def priority_of(row: Row) -> int | None:
    """Return the priority of a row's request, which its column `priority` sets if it has an integer, also one that is
    written as 1.0, as in a pandas column with empty cells."""
    value = parsed(row.columns.get("priority"))
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return whole if type(whole) is int else None


def check_json(body: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of a request that cannot be sent as JSON."""
    for name, value in body.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(f"{name} has {half}, half of a surrogate pair, which is not a character") from None
        except ValueError:
            raise ValueError(f"{name} has NaN or an infinity, which JSON does not have") from None
        except TypeError as error:  # of a value from Parquet
            raise ValueError(f"{name} cannot be sent as JSON: {error}") from None


def batch_record(row: Row, status: int, body: Mapping[str, Any]) -> Record:
    """Return the record of a row of a batch file. Its id holds the row's index, for which OpenAI's format has no other
    place."""
    response = {"status_code": status, "request_id": f"req_{row.index}", "body": body}
    custom_id = row.columns.get("custom_id")
    return {"id": f"batch_req_{row.index}", "custom_id": custom_id, "response": response, "error": None}


@dataclass(frozen=True)
class RowJob:
    """A job on rows with one prompt each. Its records have the completions.

    params: sampling parameters that a row does not set.
    seed: seed that the seeds of rows without one are derived from.
    template: template of the prompts; None if rows have prompts.
    chat: send text prompts as the message of a user.
    system: system prompt of conversations that have none; None for no prompt.
    logprobs: add token ids and logprobs to the records.
    prefix: prefix for the names of the added columns.
    """

    params: SamplingParams
    seed: int
    template: str | None = None
    chat: bool = False
    system: str | None = None
    logprobs: bool = False
    prefix: str = ""

    @cached_property
    def _added(self) -> tuple[str, ...]:
        return added_columns(self.prefix, self.logprobs)

    def ask(self, row: Row) -> RowRequests:
        try:
            if row.error is not None:
                raise ValueError(row.error)
            prompt = self.prompt(row.columns)
            params = self.params_with({"seed": seed_of(self.seed, row.index), **given_by(row)})
            requests = [Request(prompt, params, priority=priority_of(row) or 0)]
            return RowRequests(requests, lambda outputs: self._finish(row, outputs[0]))
        except (ValueError, TypeError) as error:
            reason = str(error)
            return RowRequests([], lambda _: (self.record(row, reason), reason))

    def prompt(self, columns: Mapping[str, Any]) -> str | list[Any]:
        """Return the prompt of a row: text, ids or messages. Raises ValueError or TypeError."""
        check_added(self._added, columns)
        prompt = self._prompt(columns)
        if self.system is None:
            return prompt
        if isinstance(prompt, str) or not all(isinstance(each, dict) for each in prompt):
            raise ValueError("a system prompt goes with messages; leave --system out for prompt_token_ids")
        own = prompt and prompt[0].get("role") == "system"
        return prompt if own else [{"role": "system", "content": self.system}, *prompt]

    def _prompt(self, columns: Mapping[str, Any]) -> str | list[Any]:
        if self.template is not None:
            return self._text(fill(self.template, columns))
        given = [name for name in PROMPTS if columns.get(name) is not None]
        if len(given) != 1:
            state = f"has {' and '.join(given)}" if given else "has none"
            raise ValueError(f"a row needs one of {', '.join(PROMPTS)}, and this one {state}")
        value = columns[given[0]]
        if isinstance(value, str) and given[0] == "prompt":
            return self._text(value)
        value = parsed(value)
        if not isinstance(value, list):
            form = "text or a list of ids" if given[0] == "prompt" else "a list"
            raise ValueError(f"{given[0]} must be {form}, not {value!r:.40}")
        # In Parquet, each message has the fields of all others.
        return [
            {name: part for name, part in each.items() if part is not None} if isinstance(each, dict) else each
            for each in value
        ]

    def _text(self, text: str) -> str | list[Any]:
        return [{"role": "user", "content": text}] if self.chat else text

    def params_with(self, given: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a row that sets the given ones. Raises ValueError or TypeError."""
        params = replace(self.params, **given)
        if isinstance(params.n, int) and params.n > MAX_SAMPLES:
            raise ValueError(f"n is {params.n}; it may be at most {MAX_SAMPLES}: repeat the row for more")
        return params

    def _finish(self, row: Row, output: RequestOutput) -> tuple[Record, str | None]:
        if output.error is not None:
            return self.record(row, output.error), output.error
        made = output.completions
        texts = [completion.text for completion in made]
        reasons = [completion.finish_reason for completion in made]
        values = [texts, reasons, len(output.prompt_token_ids), [len(completion.token_ids) for completion in made]]
        if self.logprobs:
            values += [[getattr(completion, name) for completion in made] for name in LOGPROBS]
        return self.record(row, None, values), None

    def record(self, row: Row, error: str | None, values: list[Any] | None = None) -> Record:
        """Return the record of a row. values: those of the added columns after the error, if the row has not failed."""
        index, reason, *names = self._added
        # A server's error, and with it this one, may have halves of surrogate pairs, which not every format has.
        own = {index: row.index, reason: error and error.encode(errors="backslashreplace").decode()}
        # Index and error come first in the line and override columns of the same name.
        return {**own, **row.columns, **own, **dict(zip(names, values or [None] * len(names), strict=True))}
