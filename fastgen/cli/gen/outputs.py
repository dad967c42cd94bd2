"""Records in files, so that a job which was killed goes on: each row has one record in the end.

What has been done is what the output holds, and is read from it: there is no second book that could say otherwise.

A line of JSONL goes to the system as soon as its row is done, so that the end of this process, of any kind, loses none
that is whole; a torn one is cut off when the job goes on. Parquet is written in parts, which are there as a whole or
not at all; the rows of a part that is not written yet are done again. The disk has it all for certain (fsync) when the
job ends, by itself, an error or Ctrl-C, and each part of Parquet when it is there: a power cut may cost what the system
had not yet written of JSONL, and these rows are done again.
"""

from __future__ import annotations

import base64
import fcntl
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from fastgen.cli.extras import pyarrow
from fastgen.cli.gen.rows import PARQUET, read_rows
from fastgen.cli.gen.work import Record, check_added

PART_BYTES = 64 << 20  # of a part in memory
PART_SECONDS = 300.0  # that a row may wait for its part to be written
CHUNK_ROWS = 64  # that wait as objects of Python
SCHEMA_ROWS = 1024  # of JSON, that types are found of at a time


class Indices:
    """A set of indices that come nearly in order: all below `start`, and some others. It holds these alone."""

    def __init__(self) -> None:
        self.start = 0
        self._others: set[int] = set()

    def add(self, index: int) -> None:
        """Raises ValueError for one that it has."""
        if index in self:
            raise ValueError(f"row {index} is there twice")
        self._others.add(index)
        while self.start in self._others:
            self._others.remove(self.start)
            self.start += 1

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and (index < self.start or index in self._others)

    def __len__(self) -> int:
        return self.start + len(self._others)


class Output(Protocol):
    """Where records go. `open` finds what is there and keeps others from writing; `close` saves what has come."""

    path: Path
    about: Path  # what job it is the output of

    def open(self) -> bool: ...  # whether it has records, of whatever job
    def recover(self) -> Indices: ...
    def write(self, index: int, record: Record) -> None: ...
    def close(self) -> None: ...


def begin(output: Output, begun: bool, identity: Mapping[str, Any], seed: int | None) -> tuple[Indices, int]:
    """Begin a job, or go on with it; (the rows that are done, the job's seed). begun: what opening the output has said.

    identity: what makes it the same job: a fingerprint of the input, None of stdin, and the options that matter.
    seed: where it is None, the job has one from when it began. Raises ValueError where the output is of another job.
    """
    name = output.path.name
    if not begun:
        seed = secrets.randbits(63) if seed is None else seed
        _save(output.about, json.dumps({"job": identity, "seed": seed}, indent=1).encode())
        return output.recover(), seed
    if identity["input"] is None:
        raise ValueError(f"{name} has records, and what comes by stdin can not be gone on with; give another -o")
    if not output.about.exists():
        raise ValueError(f"{name} has records, and there is no {output.about.name} that says of what; give another -o")
    found = json.loads(output.about.read_bytes())
    was, now = found["job"], identity
    if was["input"] != now["input"]:
        raise ValueError(f"{name} was begun with another input, or it has changed since; give another -o")
    for option in {**was["options"], **now["options"]}:
        before, after = was["options"].get(option), now["options"].get(option)
        if before != after:
            flag = f"--{option.replace('_', '-')}"
            change = f"{flag} {_said(before)}, and now it is {_said(after)}"
            raise ValueError(f"{name} was begun with {change}; give another -o, or go on as it began")
    return output.recover(), found["seed"]


def _said(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)


def _save(path: Path, data: bytes) -> None:
    """Write a file so that it is there as a whole, for certain, or not at all."""
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _lock(number: int, path: Path, close: Callable[[], None]) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        close()
        raise ValueError(f"another fggen is writing {path}; wait for it, or give another -o") from None


# ------------------------------------------------------------------------------------------------- JSONL


class Lines:
    """JSONL. head: how a line begins, as an expression whose group is the row's index."""

    def __init__(self, path: Path, head: str) -> None:
        self.path, self.about = path, path.with_name(f"{path.name}.fggen.json")
        self._head = re.compile(head.encode())

    def open(self) -> bool:
        self._file = self.path.open("ab")
        _lock(self._file.fileno(), self.path, self._file.close)
        return self.path.stat().st_size > 0

    def recover(self) -> Indices:
        """The rows that are there; a line that was not finished is cut off. Raises ValueError for one of no row."""
        done, whole = Indices(), 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                found = self._head.match(line)
                try:
                    if found is None:
                        raise ValueError("it is not of this job")
                    done.add(int(found[1]))
                except ValueError as error:
                    reason = f"line {number} of {self.path}: {error}; remove it to do its row again"
                    raise ValueError(reason) from None
                whole += len(line)
        self._file.truncate(whole)
        return done

    def write(self, index: int, record: Record) -> None:
        self._file.write(to_line(record))
        self._file.flush()

    def close(self) -> None:
        with self._file:
            os.fsync(self._file.fileno())


def to_line(record: Record) -> bytes:
    """A record as a line of JSON. What JSON does not have becomes null (NaN), text, or base64 (bytes)."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, default=_as_text).encode() + b"\n"
    except ValueError:  # of a number, or a surrogate that stands alone, which is no UTF-8
        return json.dumps(_finite(record), allow_nan=False, default=_as_text).encode() + b"\n"


def _as_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------- Parquet


class Parts:
    """Numbered files of Parquet in a folder, all of one schema. index: the column with the row's index."""

    def __init__(self, path: Path, schema: Any, index: str) -> None:
        self.path, self.about = path, path / "_fggen.json"
        self._schema, self._index = schema, index
        self._rows: list[Record] = []
        self._batches: list[Any] = []
        self._bytes = 0  # of the batches
        self._since = 0.0

    def open(self) -> bool:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and Parquet is written in parts in a folder; give another -o")
        self.path.mkdir(exist_ok=True)
        self._folder = os.open(self.path, os.O_RDONLY)
        _lock(self._folder, self.path, lambda: os.close(self._folder))
        return any(self.path.glob(f"*{PARQUET}"))

    def recover(self) -> Indices:
        done = Indices()
        self._number = 0
        found = ((int(part.stem.removeprefix("part-")), part) for part in self.path.glob("part-*.parquet"))
        for number, part in sorted(found):
            table = pyarrow("parquet").read_table(part, columns=[self._index])
            for index in table.column(0).to_pylist():
                done.add(index)
            self._number = number + 1
        return done

    def write(self, index: int, record: Record) -> None:
        if not self._rows and not self._batches:
            self._since = time.monotonic()
        self._rows.append(record)
        if len(self._rows) == CHUNK_ROWS:
            self._pack()
        if self._bytes >= PART_BYTES or time.monotonic() - self._since >= PART_SECONDS:
            self._write_part()

    def _pack(self) -> None:
        """Rows as Arrow has them, which is small."""
        if self._rows:
            batch = pyarrow().RecordBatch.from_pylist(self._rows, schema=self._schema)
            self._batches.append(batch)
            self._bytes += batch.nbytes
            self._rows = []

    def _write_part(self) -> None:
        self._pack()
        if not self._batches:
            return
        sink = pyarrow().BufferOutputStream()
        pyarrow("parquet").write_table(pyarrow().Table.from_batches(self._batches), sink)
        _save(self.path / f"part-{self._number:05}.parquet", sink.getvalue())
        self._number += 1
        self._batches, self._bytes = [], 0

    def close(self) -> None:
        try:
            self._write_part()
            os.fsync(self._folder)
        finally:
            os.close(self._folder)


def parquet_schema(files: Sequence[Path], added: Sequence[str]) -> Any:
    """The types of the input's columns and of those that are added. JSON is read for it, all of it.

    Raises ValueError where a column has values of types that do not go together, or that Parquet does not have.
    """
    pa, parquet = pyarrow(), pyarrow("parquet")
    lists, ints = pa.list_, pa.int64()
    types = {"row": ints, "error": pa.string(), "completions": lists(pa.string()), "finish_reasons": lists(pa.string()),
             "prompt_tokens": ints, "completion_tokens": lists(ints), "token_ids": lists(lists(ints)),
             "logprobs": lists(lists(pa.float32())), "raw_logprobs": lists(lists(pa.float32()))}  # fmt: skip
    prefix = added[0].removesuffix("row")
    own = [pa.field(name, types[name.removeprefix(prefix)]) for name in added]
    found = pa.schema([])
    try:
        for schema in _schemas(files):
            found = pa.unify_schemas([found, schema], promote_options="permissive")
            check_added(added, found.names)
        whole = pa.schema([*own[:2], *found, *own[2:]])
        parquet.write_table(whole.empty_table(), pa.BufferOutputStream())
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ValueError(f"the columns can not be Parquet's: {error}; write .jsonl instead") from None
    return whole


def _schemas(files: Sequence[Path]) -> Iterator[Any]:
    pa = pyarrow()
    for path in files:
        if path.suffix == PARQUET:
            yield pyarrow("parquet").read_schema(path).remove_metadata()
            continue
        rows = (row.columns for row in read_rows([path]))
        while chunk := list(islice(rows, SCHEMA_ROWS)):
            names = dict.fromkeys(name for columns in chunk for name in columns)
            arrays = [pa.array([columns.get(name) for columns in chunk]) for name in names]
            yield pa.schema([pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)])


# ------------------------------------------------------------------------------------------------- order


class InOrder:
    """Writes records in the order of their rows, holding those that come early.

    These are at most those that the engine can do while it does one: the oldest row is never the one that is preempted.
    """

    def __init__(self, output: Output, done: Indices) -> None:
        self._output, self._next = output, done.start
        self._early: dict[int, Record] = {}

    def write(self, index: int, record: Record) -> None:
        self._early[index] = record
        while self._next in self._early:
            self._output.write(self._next, self._early.pop(self._next))
            self._next += 1
