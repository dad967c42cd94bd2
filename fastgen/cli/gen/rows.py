"""Rows of prompt files, JSONL and Parquet, read one after another; none of them is kept."""

from __future__ import annotations

import glob
import hashlib
import json
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from fastgen.cli.command import needed

STDIN = "-"
PARQUET = ".parquet"
SUFFIXES = (".jsonl", ".ndjson", PARQUET)
FIRST_ROWS = 100  # rows to look at for columns, if the first ones can not be read
PARQUET_ROWS = 256  # rows that are Python objects at a time


@dataclass(frozen=True, slots=True)
class Row:
    """A row. index: its number among those of all files, from 0. error: why it can not be read and has no columns."""

    index: int
    columns: dict[str, Any]
    error: str | None = None


class Source:
    """The input of a job: files, folders and globs, or stdin for the single name "-".

    fingerprint: of the files' content; total: rows; both are None for stdin, which can be read once. columns: of the
    first readable row; batch: it is a row of an OpenAI batch file.
    """

    def __init__(self, inputs: Sequence[str], output: Path) -> None:
        self.total: int | None = None
        self.fingerprint: str | None = None
        self.files: list[Path] = []
        if list(inputs) == [STDIN]:
            self._rows = read_lines(sys.stdin.buffer, "stdin", count())
        else:
            self.files = find_files(inputs, output)
            self.total, self.fingerprint = survey(self.files)
            self._rows = read_rows(self.files)
        self._seen: list[Row] = []
        for row in islice(self._rows, FIRST_ROWS):
            self._seen.append(row)
            if row.error is None:
                break
        self.columns = self._seen[-1].columns if self._seen else {}
        self.batch = {"custom_id", "body"} <= self.columns.keys()

    def rows(self, done: Container[int]) -> Iterator[Row]:
        """Return the rows that are not done."""
        return chain(self._seen, self._rows) if self.fingerprint is None else read_rows(self.files, done)


def find_files(inputs: Sequence[str], output: Path) -> list[Path]:
    """Return the files that names stand for: files, folders (at any depth) and globs, the latter two sorted.

    Files at `output` are left out. Raises ValueError for a name without files.
    """
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_file():
            if path.suffix not in SUFFIXES:
                raise ValueError(f"the suffix of {name} names no format; it must be one of {', '.join(SUFFIXES)}")
            files = [path]
        else:
            inside = path.rglob("*") if path.is_dir() else map(Path, glob.glob(name, recursive=True))
            files = sorted(file for file in inside if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"{name}: there is no such file, and no {', '.join(SUFFIXES)} in such a folder or glob")
        files = [file for file in files if not file.resolve().is_relative_to(output.resolve())]
        if not files:
            raise ValueError(f"{name} is where the output goes, and nothing else; give another -o")
        found += files
    return found


def survey(files: Sequence[Path]) -> tuple[int, str]:
    """Read the files once; return the number of rows and a fingerprint of the content."""
    rows, digest = 0, hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            if path.suffix == PARQUET:
                rows += _parquet_file(path).metadata.num_rows
                digest.update(hashlib.file_digest(file, "sha256").digest())
            else:
                for line in file:
                    digest.update(line)
                    rows += not line.isspace()
                digest.update(b"\n\n")  # a row that moves to the next file changes the fingerprint
    return rows, digest.hexdigest()


def read_rows(files: Sequence[Path], done: Container[int] = ()) -> Iterator[Row]:
    """Yield the rows of files in order, without those of the indices `done`."""
    indices = count()
    for path in files:
        if path.suffix == PARQUET:
            yield from _parquet_rows(path, indices, done)
        else:
            with path.open("rb") as file:
                yield from read_lines(file, str(path), indices, done)


def read_lines(lines: Iterable[bytes], name: str, indices: Iterator[int], done: Container[int] = ()) -> Iterator[Row]:
    """Yield the rows of lines of JSON; blank lines are no rows. name: of the file, for errors."""
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        index = next(indices)
        if index in done:
            continue
        try:
            columns = _DECODER.decode(line.decode("utf-8-sig"))
            if not isinstance(columns, dict):
                raise ValueError("it is not an object")
            row = Row(index, columns)
        except (ValueError, RecursionError) as error:
            row = Row(index, {}, f"line {number} of {name} is no row in JSON: {error}")
        yield row


def pyarrow(part: str = "") -> Any:
    """Return pyarrow, or a module of it. Raises ValueError if it is not installed."""
    return needed(f"pyarrow.{part}".rstrip("."), "parquet", "Parquet files")


def _parquet_file(path: Path) -> Any:
    opened = pyarrow("parquet").ParquetFile
    try:
        return opened(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} can not be read as Parquet: {error}") from None


def _parquet_rows(path: Path, indices: Iterator[int], done: Container[int]) -> Iterator[Row]:
    with _parquet_file(path) as file:
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            numbers = list(islice(indices, batch.num_rows))
            if not all(index in done for index in numbers):
                yield from (row for row in _batch_rows(batch, numbers) if row.index not in done)


def _batch_rows(batch: Any, indices: list[int]) -> list[Row]:
    """Return the rows of an Arrow batch; a row with values that Python does not have is a row with an error."""
    try:
        return [Row(index, columns) for index, columns in zip(indices, batch.to_pylist(), strict=True)]
    except (ValueError, OverflowError) as error:
        if len(indices) == 1:
            return [Row(indices[0], {}, f"it can not be read: {error}")]
        return [row for place, index in enumerate(indices) for row in _batch_rows(batch.slice(place, 1), [index])]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
