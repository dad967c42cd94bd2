"""Rows of prompt files, JSONL and Parquet, read one after another; none of them is kept."""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from fastgen.cli.command import needed

STDIN = "-"
PARQUET = ".parquet"
SUFFIXES = (".jsonl", ".ndjson", PARQUET)
PARQUET_ROWS = 256  # rows that are in memory at a time


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
            if file.suffix in SUFFIXES and file.is_file() and not file.resolve().is_relative_to(output.resolve())
        ]
        if not files:
            raise ValueError(f"{name}: there is no file of {', '.join(SUFFIXES)}, apart from those of the output")
        found += files
    return found


def survey(files: Sequence[Path]) -> tuple[int, str]:
    """Read the files once; return the number of rows and a fingerprint of the content."""
    rows, digest = 0, hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            if path.suffix == PARQUET:
                rows += parquet_file(path).metadata.num_rows
                digest.update(hashlib.file_digest(file, "sha256").digest())
            else:
                for line in file:
                    digest.update(line)
                    rows += not line.isspace()
                digest.update(b"\n\n")  # a row that moves to the next file changes the fingerprint
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


def _file_rows(path: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the name of each row and a function that returns its columns, or raises an error for a row without."""
    if path.suffix == PARQUET:
        with parquet_file(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for place in range(batch.num_rows):
                    yield f"a row of {path}", partial(_parquet_row, batch, place)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield f"line {number} of {path}", partial(_json_row, line)


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
