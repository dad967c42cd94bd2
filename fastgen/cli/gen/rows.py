"""Rows of prompt files, JSONL and Parquet, as they are read: one after another, none of them kept."""

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

from fastgen.cli.extras import pyarrow

STDIN = "-"
PARQUET = ".parquet"
SUFFIXES = (".jsonl", ".ndjson", PARQUET)
FIRST_ROWS = 100  # that are looked at to see of which kind they are, if the first ones can not be read
PARQUET_ROWS = 256  # that are objects of Python at a time


@dataclass(frozen=True, slots=True)
class Row:
    """One row; index: among those of all files, from 0. error: why it could not be read, and has no columns."""

    index: int
    columns: dict[str, Any]
    error: str | None = None


class Source:
    """What is read: files, folders and globs, or stdin where the only name is "-".

    fingerprint: of all that is in the files; total: rows; both None of stdin, which can be read once. columns: of the
    first row that has some; batch: whether it is of an OpenAI batch file.
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
        """All that are not done."""
        if self.fingerprint is not None:
            return read_rows(self.files, done)
        return chain(self._seen, self._rows)


def find_files(inputs: Sequence[str], output: Path) -> list[Path]:
    """The files that names stand for: files, folders with all that is in them, and globs. Those of a folder or glob are
    sorted; what lies at `output` is none of them. Raises ValueError where there is none for a name."""
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_file():
            if path.suffix not in SUFFIXES:
                raise ValueError(f"{name} is of no known kind; the suffixes are {', '.join(SUFFIXES)}")
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
    """(rows, fingerprint of all that is in the files), which takes reading them once."""
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
                digest.update(b"\n\n")  # so that a row may not move from one file to the next
    return rows, digest.hexdigest()


def read_rows(files: Sequence[Path], done: Container[int] = ()) -> Iterator[Row]:
    """The rows of files, in order, but for those with the indices `done`."""
    indices = count()
    for path in files:
        if path.suffix == PARQUET:
            yield from _parquet_rows(path, indices, done)
        else:
            with path.open("rb") as file:
                yield from read_lines(file, str(path), indices, done)


def read_lines(lines: Iterable[bytes], name: str, indices: Iterator[int], done: Container[int] = ()) -> Iterator[Row]:
    """The rows of lines of JSON, of which blank ones are none. name: of where they are from."""
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


def _parquet_file(path: Path) -> Any:
    """Raises ValueError where it is none."""
    opened = pyarrow("parquet").ParquetFile
    try:
        return opened(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} can not be read as Parquet: {error}") from None


def _parquet_rows(path: Path, indices: Iterator[int], done: Container[int]) -> Iterator[Row]:
    with _parquet_file(path) as file:
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            numbers = [next(indices) for _ in range(batch.num_rows)]
            if not all(index in done for index in numbers):
                yield from (row for row in _batch_rows(batch, numbers) if row.index not in done)


def _batch_rows(batch: Any, indices: list[int]) -> list[Row]:
    """The rows of a batch, one by one if there is one among them that has no values in Python."""
    try:
        return [Row(index, columns) for index, columns in zip(indices, batch.to_pylist(), strict=True)]
    except (ValueError, OverflowError) as error:
        if len(indices) == 1:
            return [Row(indices[0], {}, f"it can not be read: {error}")]
        return [row for place, index in enumerate(indices) for row in _batch_rows(batch.slice(place, 1), [index])]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
