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
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from fastgen.cli.gen.rows import PARQUET, parquet_file, pyarrow, read_rows
from fastgen.cli.gen.work import Record, check_added

PART_BYTES = 64 << 20  # size of a part in memory
PART_SECONDS = 300.0  # time that a row may wait for its part to be written
SCHEMA_ROWS = 1024  # rows of JSON whose types are found at a time


def begin(output: Output, job: Mapping[str, Any], rows: int, seed: int | None) -> tuple[bytearray, int]:
    """Begin a job, or continue it; return a byte for each row, which is 1 if the row is done, and the seed of the job.

    output: opened. job: all that defines the job, by names for messages. seed: None for the seed that the job began
    with. Raises ValueError if the output is of another job.
    """
    name, done = output.path.name, bytearray(rows)
    if not output.begun():
        seed = secrets.randbits(63) if seed is None else seed
        _save(output.about, json.dumps({"job": job, "seed": seed}, indent=1).encode())
        return done, seed
    if not output.about.exists():
        raise ValueError(f"{name} has records, and no {output.about.name} describes their job; give another -o")
    about = json.loads(output.about.read_bytes())
    if changed := [each for each in {**about["job"], **job} if about["job"].get(each) != job.get(each)]:
        what = f"another {', '.join(changed)}, as {output.about} says"
        raise ValueError(f"{name} was begun with {what}; give another -o, or what it was begun with")
    for index in output.recover():
        if index >= rows or done[index]:
            raise ValueError(f"{output.path} has row {index} twice, or the input does not have it; remove its record")
        done[index] = 1
    return done, about["seed"]


def _save(path: Path, data: bytes) -> None:
    """Write a file, and force it to the disk, so that it is there as a whole or not at all."""
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file or folder against other processes, and force it to the disk at the end."""
    number = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another fggen is writing {path}; wait for it, or give another -o") from None
        yield
    finally:
        os.fsync(number)
        os.close(number)


# ------------------------------------------------------------------------------------------------- JSONL


class Lines:
    """A file of JSONL. head: a regular expression for the beginning of a line, whose group is the row's index.

    about: the file that describes the job.
    """

    def __init__(self, path: Path, head: str) -> None:
        self.path, self.about = path, path.with_name(f"{path.name}.fggen.json")
        self._head = re.compile(head.encode())

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the output against other processes, so that it can be written within; force it to the disk."""
        with self.path.open("ab") as self._file, _locked(self.path):
            yield

    def begun(self) -> bool:
        """Return True if the output has records, of whatever job."""
        return self.path.stat().st_size > 0

    def recover(self) -> Iterator[int]:
        """Yield the indices of rows, and cut off a torn last line. Raises ValueError for a line of another job."""
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                found = self._head.match(line)
                if found is None:
                    raise ValueError(f"line {number} of {self.path} is not of this job; remove it to do its row again")
                whole += len(line)
                yield int(found[1])
        self._file.truncate(whole)

    def write(self, record: Record) -> None:
        self._file.write(to_line(record))
        self._file.flush()


def to_line(record: Record) -> bytes:
    """Return a record as a line of JSON. Values that JSON does not have become null (NaN), text, or base64 (bytes)."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_as_text)
    except ValueError:  # NaN or an infinity
        finite = json.loads(json.dumps(record, default=_as_text), parse_constant=lambda name: None)
        text = json.dumps(finite, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"  # a lone surrogate becomes its escape in JSON


def _as_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


# ------------------------------------------------------------------------------------------------- Parquet


class Parts:
    """A folder of numbered Parquet files with one schema; otherwise as Lines. index: the column of the row's index."""

    def __init__(self, path: Path, schema: Any, index: str) -> None:
        self.path, self.about = path, path / "_fggen.json"
        self._schema, self._index = schema, index
        self._number = 0  # of the next part
        self._rows: list[Any] = []  # Arrow batches of one row, which take less memory than Python's objects
        self._bytes = 0
        self._since = 0.0  # when the oldest row came

    @contextmanager
    def opened(self) -> Iterator[None]:
        if self.path.is_file():
            raise ValueError(f"{self.path} is a file, and Parquet is written in parts in a folder; give another -o")
        self.path.mkdir(exist_ok=True)
        with _locked(self.path):
            try:
                yield
            finally:
                self._write_part()

    def begun(self) -> bool:
        return any(self.path.glob(f"*{PARQUET}"))

    def recover(self) -> Iterator[int]:
        found = ((int(part.stem.removeprefix("part-")), part) for part in self.path.glob("part-*.parquet"))
        for number, part in sorted(found):
            yield from parquet_file(part).read([self._index]).column(0).to_pylist()
            self._number = number + 1

    def write(self, record: Record) -> None:
        self._since = self._since if self._rows else time.monotonic()
        row = pyarrow().RecordBatch.from_pylist([record], schema=self._schema)
        self._rows.append(row)
        self._bytes += row.nbytes
        if self._bytes >= PART_BYTES or time.monotonic() - self._since >= PART_SECONDS:
            self._write_part()

    def _write_part(self) -> None:
        if self._rows:
            sink = pyarrow().BufferOutputStream()
            pyarrow("parquet").write_table(pyarrow().Table.from_batches(self._rows), sink)
            _save(self.path / f"part-{self._number:05}.parquet", sink.getvalue())
            self._number += 1
            self._rows, self._bytes = [], 0


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
    for path in files:
        if path.suffix == PARQUET:
            yield parquet_file(path).schema_arrow.remove_metadata()
            continue
        rows = (row.columns for row in read_rows([path]))
        while chunk := list(islice(rows, SCHEMA_ROWS)):
            yield pyarrow().schema(list(pyarrow().array(chunk).type))  # a struct with the columns of all rows
