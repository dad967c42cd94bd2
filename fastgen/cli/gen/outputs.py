"""Records in files, so that a job can be killed and continued: in the end each row has one record.

The output itself tells which rows are done; no second file could contradict it.

A line of JSONL is handed to the system as soon as its row is done, so that no end of this process loses a whole line. A
torn line is cut off when the job continues. Parquet is written in parts; a part is there as a whole or not at all, and
the rows of an unwritten part are done again. Data is forced to the disk (fsync) when the job ends, by itself, an error
or Ctrl-C, and with each part of Parquet: a power cut may cost lines of JSONL, and their rows are done again.
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
from typing import Any

from fastgen.cli.gen.rows import PARQUET, pyarrow, read_rows
from fastgen.cli.gen.work import Record, check_added
from fastgen.cli.options import flag

PART_BYTES = 64 << 20  # size of a part in memory
PART_SECONDS = 300.0  # time that a row may wait for its part to be written
CHUNK_ROWS = 64  # rows that wait as Python objects
SCHEMA_ROWS = 1024  # rows of JSON whose types are found at a time


class Indices:
    """A set of indices that come nearly in order: all below `start`, and some others. Only the others take memory."""

    def __init__(self) -> None:
        self.start = 0
        self._others: set[int] = set()

    def add(self, index: int) -> None:
        """Add an index. Raises ValueError for one that is there."""
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


def begin(output: Output, begun: bool, identity: Mapping[str, Any], seed: int | None) -> tuple[Indices, int]:
    """Begin a job, or continue it; return the rows that are done, and the seed of the job.

    begun: the result of output.open(). identity: "input", a fingerprint (None for stdin), and "options", those that
    define the job. seed: None for the seed that the job began with. Raises ValueError if the output is of another job.
    """
    name = output.path.name
    if not begun:
        seed = secrets.randbits(63) if seed is None else seed
        _save(output.about, json.dumps({"job": identity, "seed": seed}, indent=1).encode())
        return output.recover(), seed
    if identity["input"] is None:
        raise ValueError(f"{name} has records, and a job on stdin can not be continued; give another -o")
    if not output.about.exists():
        raise ValueError(f"{name} has records, and no {output.about.name} describes their job; give another -o")
    found = json.loads(output.about.read_bytes())
    if found["job"]["input"] != identity["input"]:
        raise ValueError(f"{name} was begun with another input, or it has changed since; give another -o")
    was, now = found["job"]["options"], identity["options"]
    for option in {**was, **now}:
        before, after = was.get(option), now.get(option)
        if before != after:
            change = f"{flag(option)} {_shown(before)}, and now it is {_shown(after)}"
            raise ValueError(f"{name} was begun with {change}; give another -o, or the options that it began with")
    return output.recover(), found["seed"]


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)


def _save(path: Path, data: bytes) -> None:
    """Write a file, and force it to the disk, so that it is there as a whole or not at all."""
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
    """A file of JSONL. head: a regular expression for the beginning of a line, whose group is the row's index.

    about: the file that describes the job.
    """

    def __init__(self, path: Path, head: str) -> None:
        self.path, self.about = path, path.with_name(f"{path.name}.fggen.json")
        self._head = re.compile(head.encode())

    def open(self) -> bool:
        """Lock the output against other processes; return whether it has records, of whatever job."""
        self._file = self.path.open("ab")
        _lock(self._file.fileno(), self.path, self._file.close)
        return self.path.stat().st_size > 0

    def recover(self) -> Indices:
        """Cut off a torn last line, and return the rows. Raises ValueError for a line that is not of the job."""
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
        """Force the records to the disk, and unlock."""
        with self._file:
            os.fsync(self._file.fileno())


def to_line(record: Record) -> bytes:
    """Return a record as a line of JSON. Values that JSON does not have become null (NaN), text, or base64 (bytes)."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, default=_as_text).encode() + b"\n"
    except ValueError:  # NaN, an infinity, or a lone surrogate, which is no UTF-8
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
    """A folder of numbered Parquet files with one schema; otherwise as Lines. index: the column of the row's index."""

    def __init__(self, path: Path, schema: Any, index: str) -> None:
        self.path, self.about = path, path / "_fggen.json"
        self._schema, self._index = schema, index
        self._rows: list[Record] = []
        self._batches: list[Any] = []
        self._bytes = 0  # of the batches
        self._since = 0.0  # when the oldest row came

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
        """Turn the waiting rows into an Arrow batch, which takes less memory."""
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


Output = Lines | Parts


def parquet_schema(files: Sequence[Path], added: Sequence[str]) -> Any:
    """Return the schema of the input's columns and of the added ones. All rows of JSON are read for it.

    Raises ValueError for a column whose values have types that do not go together, or that Parquet does not have.
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
        raise ValueError(f"the columns can not be written as Parquet: {error}; write .jsonl instead") from None
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
    """An output that gets records in the order of their rows; early records are held.

    Few are held: the scheduler never preempts the oldest sequence, so only rows that finish while it runs are early.
    """

    def __init__(self, output: Output, done: Indices) -> None:
        self._output, self._next = output, done.start
        self._early: dict[int, Record] = {}

    def write(self, index: int, record: Record) -> None:
        self._early[index] = record
        while self._next in self._early:
            self._output.write(self._next, self._early.pop(self._next))
            self._next += 1
