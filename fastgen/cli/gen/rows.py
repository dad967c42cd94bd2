"""Rows of prompt files, JSONL, CSV and Parquet, read one after another; none of them is kept."""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import io
import json
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, cast

from fastgen.cli.command import needed

STDIN = "-"
CSV, GZIP, PARQUET = ".csv", ".gz", ".parquet"
SUFFIXES = (".jsonl", ".ndjson", CSV, ".jsonl.gz", ".ndjson.gz", ".csv.gz", PARQUET)
PARQUET_ROWS = 256  # rows that are in memory at a time
csv.field_size_limit(1 << 30)  # characters of a cell; logprobs of a row do not fit into Python's limit

RowReader = Iterator[tuple[str, Callable[[], dict[str, Any]]]]
"""The name of each row, and a function that returns its columns, or raises an error if it has none."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row. index: its number among those of all files, from 0. error: why it can not be read and has no columns."""

    index: int
    columns: dict[str, Any]
    error: str | None = None


class Source:
    """The input of a job: files, folders and globs, or stdin for the single name "-", which becomes a temporary file.

    total: rows. fingerprint: of the files' content. columns: of the first readable row; batch: it is a row of an OpenAI
    batch file.
    """

    def __init__(self, inputs: Sequence[str], output: Path) -> None:
        if list(inputs) == [STDIN]:
            self._stdin = NamedTemporaryFile(prefix="stdin-", suffix=".jsonl")  # noqa: SIM115 (deleted with this object)
            shutil.copyfileobj(sys.stdin.buffer, self._stdin)
            self._stdin.flush()
            self.files = [Path(self._stdin.name)]
        else:
            self.files = find_files(inputs, output)
        self.total, self.fingerprint = survey(self.files)
        self.columns = next((row.columns for row in read_rows(self.files) if row.error is None), {})
        self.batch = {"custom_id", "body"} <= self.columns.keys()


def find_files(inputs: Sequence[str], output: Path) -> list[Path]:
    """Return the files that names stand for: files, folders (at any depth) and globs, the latter two sorted.

    Files of other suffixes, and files at `output`, are left out. Raises ValueError for a name without files.
    """
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        inside = path.rglob("*") if path.is_dir() else map(Path, glob.glob(name, recursive=True))
        files = [
            file
            for file in ([path] if path.is_file() else sorted(inside))
            if format_of(file) and file.is_file() and not file.resolve().is_relative_to(output.resolve())
        ]
        if name == STDIN:
            raise ValueError("- is stdin, which is read alone; leave the other inputs out")
        if not (path.exists() or files or glob.has_magic(name)):
            raise ValueError(f"{name}: there is no such file or folder")
        if not files:
            raise ValueError(f"{name}: there is no file of {', '.join(SUFFIXES)}, apart from those of the output")
        found += files
    return found


def format_of(path: Path) -> str:
    """Return the suffix of a file's format, without .gz; "" for a format that is not read or written."""
    return next((suffix.removesuffix(GZIP) for suffix in SUFFIXES if path.name.endswith(suffix)), "")


def open_file(path: Path) -> BinaryIO:
    """Open a file to be read; decompress it if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix == GZIP else path.open("rb")


def survey(files: Sequence[Path]) -> tuple[int, str]:
    """Return the number of rows and a fingerprint of the content. The files are read for it."""
    rows, digest = 0, hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        parquet = format_of(path) == PARQUET
        rows += parquet_file(path).metadata.num_rows if parquet else sum(1 for _ in _file_rows(path))
    return rows, digest.hexdigest()


def read_rows(files: Sequence[Path], done: Sequence[int] = ()) -> Iterator[Row]:
    """Yield the rows of files in order. done: 1 at the indices of rows to leave out; if it is empty, there are none."""
    for index, (where, load) in enumerate(chain.from_iterable(map(_file_rows, files))):
        if done and done[index]:
            continue
        try:
            row = Row(index, load())
        except (ValueError, OverflowError, RecursionError) as error:
            row = Row(index, {}, f"{where} can not be read: {error}")
        yield row


def _file_rows(path: Path) -> RowReader:
    """Read a file. Raises ValueError if the file as a whole is damaged."""
    kind = format_of(path)
    try:
        yield from _parquet_rows(path) if kind == PARQUET else _csv_rows(path) if kind == CSV else _json_rows(path)
    except (gzip.BadGzipFile, zlib.error, EOFError, csv.Error, UnicodeError) as error:
        raise ValueError(f"{path} can not be read: {error}") from None


def _parquet_rows(path: Path) -> RowReader:
    with parquet_file(path) as file:
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            for place in range(batch.num_rows):
                yield f"a row of {path}", partial(_parquet_row, batch, place)


def _csv_rows(path: Path) -> RowReader:
    with io.TextIOWrapper(open_file(path), "utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            if len(set(reader.fieldnames or ())) < len(reader.fieldnames or ()):
                raise ValueError(f"{path} has two columns of one name; rename one")
            for cells in reader:
                yield f"line {reader.line_num} of {path}", partial(_csv_row, cells)
        except UnicodeDecodeError as error:  # of a chunk, which begins within the line after those that were read
            line = reader.reader.line_num + 1 + error.object[: error.start].count(b"\n")
            raise csv.Error(f"line {line} is not UTF-8; save the file as UTF-8") from None
        except csv.Error as error:
            line = reader.line_num + 1  # line_num counts the lines of whole rows
            raise csv.Error(f"{error}, in the row that begins on line {line}; check its quotes") from None


def _json_rows(path: Path) -> RowReader:
    with open_file(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield f"line {number} of {path}", partial(_json_row, line)


def _csv_row(cells: dict[str | None, Any]) -> dict[str, Any]:
    """Return the columns of a row, whose values are text, or None for an empty cell."""
    if None in cells:
        raise ValueError("it has more cells than the first line")
    return {str(name): cell or None for name, cell in cells.items()}


def _json_row(line: bytes) -> dict[str, Any]:
    columns = json.loads(line)
    if not isinstance(columns, dict):
        raise ValueError("it is not an object")
    return columns


def _parquet_row(batch: Any, place: int) -> dict[str, Any]:
    columns: dict[str, Any] = batch.slice(place, 1).to_pylist()[0]
    return columns


def pyarrow(part: str = "") -> Any:
    """Return pyarrow, or a module of it. Raises ValueError if it is not installed."""
    return needed(f"pyarrow.{part}".rstrip("."), "parquet", "Parquet files")


def parquet_file(path: Path) -> Any:
    """Open a Parquet file. Raises ValueError if it is none."""
    opened = pyarrow("parquet").ParquetFile
    try:
        return opened(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} can not be read as Parquet: {error}") from None
