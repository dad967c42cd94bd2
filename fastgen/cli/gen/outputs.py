"""Output files. A job can be killed and continued, and in the end there is one record for each row.

The records of the output itself show which rows are done, so that no second file can contradict it.

A line of JSONL or CSV is handed to the system as soon as its row is done, so a process that dies loses no complete
line. A torn line is dropped when the job continues. Parquet is written in parts: a part exists completely or not at
all, and the rows of a missing part are done again. Data is forced to the disk (fsync) after each Parquet part and when
the job ends normally, with an error or by Ctrl-C. A power cut may lose lines, whose rows are done again.
"""

from __future__ import annotations

import base64
import csv
import fcntl
import gzip
import io
import json
import os
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from fastgen.cli.gen.rows import CSV, GZIP, PARQUET, format_of, parquet_file, pyarrow, read_rows, unpacked
from fastgen.cli.gen.work import Record, State, check_added
from fastgen.cli.options import flag
from fastgen.disk import naming_full_disk

PART_BYTES = 64 << 20  # size of a Parquet part in memory
PART_SECONDS = 300.0  # maximum time that a row waits for its part to be written
AGAIN = "make room, and give the same command again"
SCHEMA_ROWS = 1024  # number of rows of JSON or CSV whose types are inferred at a time


def begin(
    output: Output, job: Mapping[str, Any], rows: int, seed: int | None, retry: Sequence[str] | None = None
) -> tuple[bytearray, int, int]:
    """Begin or continue a job. Return one byte per row, which is 1 if the row is done, the number of failed rows among
    them, and the seed of the job.

    output: the opened output.
    job: the settings that define the job, by their names in messages.
    rows: number of rows of the input.
    seed: seed of a new job; None for a random one. A job that continues keeps its seed.
    retry: None to keep failed rows; otherwise they are done again, and the settings with these names may change.

    Raises ValueError if the output belongs to another job.
    """
    name, done, failures = output.path.name, bytearray(rows), 0
    if not output.begun():
        seed = secrets.randbits(63) if seed is None else seed
        _describe(output, job, seed)
        return done, failures, seed
    if not output.about.exists():
        raise ValueError(f"{name} has records, and no {output.about.name} describes their job; give another -o")
    begun, seed = _described(output.about)
    changed = [each for each in {**begun, **job} if begun.get(each) != job.get(each)]
    if wrong := [each for each in changed if each not in (retry or ())]:
        names = ", ".join(each if each in ("input", "model") else flag(each) for each in wrong)
        what = f"another {names}, as {output.about} says"
        raise ValueError(f"{name} was begun with {what}; give another -o, or what it was begun with")
    for index, failed in output.recover(retry is not None):
        if not 0 <= index < rows or done[index]:
            raise ValueError(f"{output.path} has row {index} twice, or the input does not have it; remove its record")
        done[index] = not (failed and retry is not None)
        failures += failed and done[index]
    if changed:
        _describe(output, job, seed)
    return done, failures, seed


def _describe(output: Output, job: Mapping[str, Any], seed: int) -> None:
    if not isinstance(output, Stdout):
        _save(output.about, json.dumps({"job": job, "seed": seed}, indent=1).encode())


def _described(about: Path) -> tuple[dict[str, Any], int]:
    """Read the settings and the seed of a job from its file. Raises ValueError if the file is damaged."""
    try:
        match json.loads(about.read_bytes()):
            case {"job": dict(job), "seed": int(seed)}:
                return job, seed
        reason = "it has no job and seed"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise ValueError(
        f"{about} describes the job of the output, and is damaged: {reason}; restore it, or give another -o"
    )


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces the file at `path`, keeping its mode, once it is complete and on the disk.

    If the path is a symlink, its target is replaced. After an error the new file is removed, since a full disk needs
    the space.
    """
    target = path.resolve()
    beside = target.with_name(f".{target.name}.fggen.tmp")  # Parquet readers skip hidden files
    beside.unlink(missing_ok=True)  # left by a process that was killed
    try:
        with naming_full_disk(path, AGAIN), beside.open("xb") as file:
            if target.exists():
                shutil.copystat(target, beside)
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _save(path: Path, data: bytes) -> None:
    with _replacing(path) as file:
        file.write(data)


def _lock(file: int, path: Path) -> None:
    """Lock an open file or folder against other processes until it is closed. Raises ValueError if it is locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another fggen is writing {path}; wait for it, or give another -o") from None


# ------------------------------------------------------------------------------------------------- JSONL and CSV


class Lines:
    """A JSONL or CSV file, compressed if its name ends in .gz.

    state: function that returns the row index and the failure of a record that is read back.
    columns: the column names of a CSV file.
    about: path of the file that describes the job.
    """

    def __init__(self, path: Path, state: State, columns: Sequence[str] = ()) -> None:
        self.path, self.about = path, path.with_name(f"{path.name}.fggen.json")
        self._state, self._columns = state, columns
        self._csv = format_of(path) == CSV
        self._writer: BinaryIO | gzip.GzipFile | None = None  # the file, or the compressor that writes to it
        self._torn = False  # True if the file has torn records

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the output for writing in the block, and force it to the disk at the end."""
        self._file = self._open()
        try:
            yield
        finally:
            with naming_full_disk(self.path, AGAIN), self._file:
                if isinstance(self._writer, gzip.GzipFile):
                    self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())

    def _open(self) -> BinaryIO:
        file = self.path.open("ab")
        try:
            _lock(file.fileno(), self.path)
        except ValueError:
            file.close()
            raise
        return file

    def begun(self) -> bool:
        """Return True if the output has records, even of another job."""
        return self.path.stat().st_size > 0

    def recover(self, retry: bool) -> Iterator[tuple[int, bool]]:
        """Yield (index, failed) for the row of each record. Raises ValueError for a record of another job.

        Afterwards, torn records are dropped; with `retry`, the records of failed rows are dropped too.
        """
        failures = False
        for _, index, failed in self._read():
            failures = failures or failed
            yield index, failed
        if self._torn or (retry and failures):
            self._drop(retry)

    def _drop(self, retry: bool) -> None:
        """Write the file again without the records that `recover` drops."""
        old = self._file
        try:
            with _replacing(self.path) as self._file:
                for raw, _, failed in self._read():
                    if not (retry and failed):
                        self._append(raw)
                if isinstance(self._writer, gzip.GzipFile):
                    self._writer.close()
        finally:
            self._file, self._writer = old, None
        self._file = self._open()
        old.close()

    def _read(self) -> Iterator[tuple[bytes, int, bool]]:
        """Yield (record, index, failed) for each complete record, and note whether there are torn ones.

        A power cut may leave NUL bytes anywhere in the file. In CSV they may replace a quote, and then the lines after
        them are split into records at the wrong places.
        """
        records = self._records()
        torn = self._csv and b"\0" in next(records, b"")  # the line of column names
        for number, raw in enumerate(records, 1):
            if b"\0" in raw:
                torn = True
                continue
            try:
                if self._csv:
                    cells = next(csv.reader(io.StringIO(raw.decode(), newline="")))
                    record = dict(zip(self._columns, cells, strict=True))
                else:
                    record = json.loads(raw)
                index, failed = self._state(record)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                if self._csv and torn:
                    continue
                wrong = f"record {number} of {self.path} is not of this job; remove it to do its row again"
                raise ValueError(wrong) from None
            yield raw, index, failed
        self._torn = self._torn or torn

    def _records(self) -> Iterator[bytes]:
        """Yield the bytes of each complete record, and note whether a torn one follows."""
        lines, quotes, self._torn = [], 0, True
        with self.path.open("rb") as file, suppress(EOFError, zlib.error, gzip.BadGzipFile):
            for line in unpacked(self.path, file):
                lines.append(line)
                quotes += self._csv and line.count(b'"')
                if line.endswith(b"\n") and quotes % 2 == 0:  # otherwise the line ends inside a cell
                    yield b"".join(lines)
                    lines, quotes = [], 0
            self._torn = bool(lines)

    def write(self, record: Record) -> None:
        self._append(to_cells(map(record.get, self._columns)) if self._csv else to_line(record))

    def _append(self, raw: bytes) -> None:
        if self._writer is None:  # not earlier: a file without records stays empty
            empty, packed = self._file.tell() == 0, self.path.suffix == GZIP
            self._writer = gzip.GzipFile(fileobj=self._file, mode="ab") if packed else self._file
            if self._csv and empty:
                self._writer.write(to_cells(self._columns))
        with naming_full_disk(self.path, AGAIN):
            self._writer.write(raw)
            self._writer.flush()


class Stdout(Lines):
    """JSONL on stdout. A job that writes to stdout cannot be continued."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._writer, self.path = sys.stdout.buffer, Path("stdout")  # for errors
        yield

    def begun(self) -> bool:
        return False


def to_line(record: Any) -> bytes:
    """Return a record or another value as a line of JSON.

    Values without a JSON form become null (NaN and infinities), base64 (bytes) or text (others).
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_as_text)
    except ValueError:  # NaN or an infinity
        finite = json.loads(json.dumps(record, default=_as_text), parse_constant=lambda name: None)
        text = json.dumps(finite, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"  # a lone surrogate becomes a JSON escape


def to_cells(values: Iterable[Any]) -> bytes:
    """Return a row of CSV. None becomes an empty cell, and values other than text become JSON."""
    row = io.StringIO()
    csv.writer(row).writerow(
        "" if value is None else value if isinstance(value, str) else to_line(value)[:-1].decode() for value in values
    )
    return row.getvalue().encode(errors="backslashreplace")


def _as_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


# ------------------------------------------------------------------------------------------------- Parquet


class ParquetParts:
    """A folder of numbered Parquet files with one schema, with the methods of Lines.

    state: names of the columns with the row index and the error.
    """

    def __init__(self, path: Path, schema: Any, state: Sequence[str]) -> None:
        self.path, self.about = path, path / "_fggen.json"
        self._schema, self._columns = schema, list(state)
        self._number = 0  # number of the next part
        self._rows: list[Any] = []  # Arrow batches of one row each, which take less memory than Python objects
        self._bytes = 0
        self._since = 0.0  # time.monotonic() when the oldest row of the part came

    @contextmanager
    def opened(self) -> Iterator[None]:
        if self.path.is_file():
            raise ValueError(f"{self.path} is a file, and Parquet is written in parts in a folder; give another -o")
        self.path.mkdir(exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            _lock(folder, self.path)
            yield
        finally:
            try:
                self._write_part()
                os.fsync(folder)
            finally:
                os.close(folder)

    def begun(self) -> bool:
        return any(self.path.glob(f"*{PARQUET}"))

    def recover(self, retry: bool) -> Iterator[tuple[int, bool]]:
        schema = pyarrow().schema(map(self._schema.field, self._columns))
        parts = ((int(part.stem.removeprefix("part-")), part) for part in self.path.glob("part-*.parquet"))
        for number, part in sorted(parts):
            state = parquet_file(part).read(self._columns)
            if state.schema != schema or state.columns[0].null_count:
                raise ValueError(f"{part} is not of this job; remove it to do its rows again")
            indices, errors = state.columns
            yield from zip(indices.to_pylist(), errors.is_valid().to_pylist(), strict=True)
            if retry and errors.null_count < len(errors):
                self._save_part(number, parquet_file(part).read().filter(errors.is_null()))
            self._number = number + 1

    def write(self, record: Record) -> None:
        self._since = self._since if self._rows else time.monotonic()
        make = pyarrow().RecordBatch.from_pylist
        try:
            row = make([record], schema=self._schema)
        except UnicodeEncodeError:
            row = make([_encodable(record)], schema=self._schema)
        self._rows.append(row)
        self._bytes += row.nbytes
        if self._bytes >= PART_BYTES or time.monotonic() - self._since >= PART_SECONDS:
            self._write_part()

    def _write_part(self) -> None:
        if self._rows:
            self._save_part(self._number, pyarrow().Table.from_batches(self._rows))
            self._number += 1
            self._rows, self._bytes = [], 0

    def _save_part(self, number: int, table: Any) -> None:
        sink = pyarrow().BufferOutputStream()
        pyarrow("parquet").write_table(table, sink)
        _save(self.path / f"part-{number:05}.parquet", sink.getvalue())


Output = Lines | ParquetParts


def _encodable(value: Any) -> Any:
    """Return a value whose texts have JSON's escapes instead of halves of surrogate pairs, as in CSV."""
    if isinstance(value, dict):
        return {name: _encodable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_encodable(inner) for inner in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def csv_columns(files: Sequence[Path], added: Sequence[str]) -> list[str]:
    """Return the columns of the input and the added ones. Reads all rows."""
    columns = dict.fromkeys(chain.from_iterable(row.columns for row in read_rows(files)))
    check_added(added, columns)
    return [*added[:2], *columns, *added[2:]]


def parquet_schema(files: Sequence[Path], added: Sequence[str]) -> Any:
    """Return the schema of the input's columns and of the added ones. Reads all rows of JSON and CSV.

    Raises ValueError if the values of a column have no common type, or a type that Parquet does not support.
    """
    pa, parquet = pyarrow(), pyarrow("parquet")
    lists, ints = pa.list_, pa.int64()
    types = {"row": ints, "error": pa.string(), "completions": lists(pa.string()), "finish_reasons": lists(pa.string()),
             "prompt_tokens": ints, "completion_tokens": lists(ints), "token_ids": lists(lists(ints)),
             "logprobs": lists(lists(pa.float32())), "raw_logprobs": lists(lists(pa.float32()))}  # fmt: skip
    prefix = added[0].removesuffix("row")
    own = [pa.field(name, types[name.removeprefix(prefix)]) for name in added]
    joint_schema = pa.schema([])
    try:
        for schema in _schemas(files):
            joint_schema = pa.unify_schemas([joint_schema, schema], promote_options="permissive")
            check_added(added, joint_schema.names)
        whole = pa.schema([*own[:2], *joint_schema, *own[2:]])
        parquet.write_table(whole.empty_table(), pa.BufferOutputStream())
    except (pa.ArrowException, UnicodeError) as error:
        raise ValueError(f"the columns cannot be written as Parquet: {error}; write .jsonl instead") from None
    return whole


def _schemas(files: Sequence[Path]) -> Iterator[Any]:
    for path in files:
        if path.suffix == PARQUET:
            yield parquet_file(path).schema_arrow.remove_metadata()
            continue
        rows = (row.columns for row in read_rows([path]))
        while chunk := list(islice(rows, SCHEMA_ROWS)):
            names = dict.fromkeys(chain.from_iterable(chunk))
            yield pyarrow().schema([(name, _type_of(name, [row.get(name) for row in chunk])) for name in names])


def _type_of(name: str, values: list[Any]) -> Any:
    """Return the type of a column. Raises ArrowInvalid, which names the column, for values without a common type."""
    pa = pyarrow()
    try:
        with suppress(UnicodeEncodeError):
            return pa.array(values).type
        return pa.array(_encodable(values)).type
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise pa.ArrowInvalid(f"the values of {name} have no type in common: {error}") from None
