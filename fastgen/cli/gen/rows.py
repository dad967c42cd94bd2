"""Rows of prompt files (JSONL, CSV and Parquet), which are read one at a time and not kept in memory."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, NamedTuple, cast

from fastgen.cli.command import needed, one_line

STDIN = "-"
CSV, GZIP, PARQUET = ".csv", ".gz", ".parquet"
SUFFIXES = (".jsonl", ".ndjson", CSV, ".jsonl.gz", ".ndjson.gz", ".csv.gz", PARQUET)
PARQUET_ROWS = 256  # number of rows in memory at a time
NESTED = 200  # levels of JSON; what has more can often be read, but neither rendered nor written
csv.field_size_limit(1 << 30)  # characters per cell; the logprobs of a row exceed Python's default

RowReader = Iterator[tuple[str, Callable[[], dict[str, Any]]]]
"""The name of each row, and a function that returns its columns or raises an error if it cannot be read."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row. index: its position in the whole input, from 0. error: the reason if the row cannot be read."""

    index: int
    columns: dict[str, Any]
    error: str | None = None


class Survey(NamedTuple):
    """The number of rows of a file and the SHA-256 of its bytes, taken when its rows were counted."""

    rows: int
    digest: bytes


class Source:
    """The input of a job: files, folders and globs, or the single name "-" for stdin, which becomes a temporary file.

    total: number of rows. fingerprint: hash of the files' content. columns: the columns of the first readable row.
    batch: True if this is a row of an OpenAI batch file.
    """

    def __init__(self, inputs: Sequence[str], output: Path) -> None:
        if list(inputs) == [STDIN]:
            self._stdin = NamedTemporaryFile(prefix="stdin-", suffix=".jsonl")  # noqa: SIM115 (deleted with this object)
            shutil.copyfileobj(sys.stdin.buffer, self._stdin)
            self._stdin.flush()
            self.files = [Path(self._stdin.name)]
        else:
            self.files = find_files(inputs, output)
        self._surveys = [survey(path) for path in self.files]
        self.total = sum(each.rows for each in self._surveys)
        self.fingerprint = hashlib.sha256(b"".join(each.digest for each in self._surveys)).hexdigest()
        self.columns = next((row.columns for row in read_rows(self.files) if row.error is None), {})
        self.batch = {"custom_id", "body"} <= self.columns.keys()

    def rows(self, done: Sequence[int]) -> Iterator[Row]:
        """Yield the rows whose entry in `done` is 0. Raises ValueError for a file that has changed."""
        return read_rows(self.files, self._surveys, done)


def find_files(inputs: Sequence[str], output: Path) -> list[Path]:
    """Return the input files for a list of names: files, folders (searched at any depth) and globs.

    The files of a folder or glob are sorted. Files with other suffixes and files of the output are left out. Raises
    ValueError for a name without files.
    """
    input_files, left_out = list[Path](), list[Path]()
    for name in inputs:
        path = Path(name)
        inside = path.rglob("*") if path.is_dir() else map(Path, glob.glob(name, recursive=True))
        files = [file for file in ([path] if path.is_file() else sorted(inside)) if format_of(file) and file.is_file()]
        if name == STDIN:
            raise ValueError("- is stdin, which is read alone; leave the other inputs out")
        if not (path.exists() or files or glob.has_magic(name)):
            raise ValueError(f"{name}: there is no such file or folder")
        if not files:
            raise ValueError(f"{name}: there is no file of {', '.join(SUFFIXES)}")
        for file in files:
            (left_out if file.resolve().is_relative_to(output.resolve()) else input_files).append(file)
    if not input_files:
        raise ValueError(f"{left_out[0]} is the only input and belongs to the output; give another -o")
    return input_files


def format_of(path: Path) -> str:
    """Return the suffix of a file's format, without .gz; "" for an unknown format."""
    return next((suffix.removesuffix(GZIP) for suffix in SUFFIXES if path.name.endswith(suffix)), "")


def unpacked(path: Path, file: BinaryIO) -> BinaryIO:
    """Return an opened file, decompressed if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(file)) if path.suffix == GZIP else file


def survey(path: Path) -> Survey:
    """Read a file to count its rows and hash its bytes."""
    with path.open("rb") as file:
        digest = _digest(file)
        if format_of(path) == PARQUET:
            return Survey(parquet_file(path, file).metadata.num_rows, digest)
        return Survey(sum(1 for _ in _rows(path, file)), digest)


def _digest(file: io.BufferedReader) -> bytes:
    """Return the SHA-256 of a file, and rewind it."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").digest()
    file.seek(0)
    return digest


def read_rows(
    files: Sequence[Path], surveys: Iterable[Survey | None] = repeat(None), done: Sequence[int] = ()
) -> Iterator[Row]:
    """Yield the rows of files in order.

    surveys: the earlier survey of each file; ValueError is raised for a file that no longer matches it.
    done: 1 at the index of each row to leave out; empty to leave out none.
    """
    for index, (where, load) in enumerate(chain.from_iterable(map(_surveyed_rows, files, surveys))):
        if done and done[index]:
            continue
        try:
            row = Row(index, load())
        except (ValueError, OverflowError, RecursionError) as error:
            row = Row(index, {}, f"{where} cannot be read: {error}")
        yield row


def _surveyed_rows(path: Path, before: Survey | None) -> RowReader:
    """Read a file. Raises ValueError if it is damaged as a whole or does not match its survey.

    Rows beyond the counted ones are not read, since their indices belong to the next file. The digest is taken from the
    opened file after its rows, since another file may have been moved to this path in the meantime.
    """
    with path.open("rb") as file:
        number = 0
        for number, row in enumerate(_rows(path, file), 1):
            if before and number > before.rows:
                break
            yield row
        if before and (number, _digest(file)) != before:
            raise ValueError(
                f"{path} has changed since fggen counted its rows, so that answers which are written may be to other"
                " prompts; start again with another -o"
            )


def _rows(path: Path, file: BinaryIO) -> RowReader:
    """Read the rows of an opened file. Raises ValueError if it is damaged as a whole."""
    kind = format_of(path)
    read = _parquet_rows if kind == PARQUET else _csv_rows if kind == CSV else _json_rows
    try:
        yield from read(path, file)
    except (OSError, zlib.error, EOFError, csv.Error, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from None


def _parquet_rows(path: Path, file: BinaryIO) -> RowReader:
    for batch in parquet_file(path, file).iter_batches(batch_size=PARQUET_ROWS):
        for place in range(batch.num_rows):
            yield f"a row of {path}", partial(_parquet_row, batch, place)


def _csv_rows(path: Path, file: BinaryIO) -> RowReader:
    lines = io.TextIOWrapper(unpacked(path, file), "utf-8-sig", newline="")
    reader = csv.DictReader(lines, strict=True)
    try:
        if len(set(reader.fieldnames or ())) < len(reader.fieldnames or ()):
            raise ValueError(f"{path} has two columns of one name; rename one")
        for cells in reader:
            yield f"line {reader.line_num} of {path}", partial(_csv_row, cells)
    except UnicodeDecodeError as error:  # from decoding a chunk that begins in the line after those that were read
        line = reader.reader.line_num + 1 + error.object[: error.start].count(b"\n")
        raise csv.Error(f"line {line} is not UTF-8; save the file as UTF-8") from None
    except csv.Error as error:
        line = reader.line_num + 1  # line_num counts the lines of complete rows
        raise csv.Error(f"{error}, in the row that begins on line {line}; check its quotes") from None
    finally:
        lines.detach()  # so that the file stays open


def _json_rows(path: Path, file: BinaryIO) -> RowReader:
    for number, line in enumerate(unpacked(path, file), 1):
        if not line.isspace():
            yield f"line {number} of {path}", partial(_json_row, line)


def _csv_row(cells: dict[str | None, Any]) -> dict[str, Any]:
    """Return the columns of a row. Values are text, or None for an empty cell."""
    if None in cells:
        raise ValueError("it has more cells than the first line")
    return {str(name): cell or None for name, cell in cells.items()}


def _json_row(line: bytes) -> dict[str, Any]:
    columns = read_json(line)
    if not isinstance(columns, dict):
        raise ValueError("it is not an object")
    return columns


def read_json(text: str | bytes) -> Any:
    """Return the value of JSON that others wrote. Raises ValueError if it cannot be read, or not be written again."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"it has more than {NESTED} levels") from None
    except ValueError:  # Python's own limit
        raise ValueError(f"it has an integer of more than {sys.get_int_max_str_digits()} digits") from None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _inside(outer)]:
        depth += 1
        if depth > NESTED:
            raise ValueError(f"it has more than {NESTED} levels")
    return value


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _parquet_row(batch: Any, place: int) -> dict[str, Any]:
    columns: dict[str, Any] = batch.slice(place, 1).to_pylist()[0]
    return columns


def pyarrow(part: str = "") -> Any:
    """Return pyarrow or one of its modules. Raises ValueError if it is not installed."""
    return needed(f"pyarrow.{part}".rstrip("."), "parquet", "Parquet files")


def parquet_file(path: Path, file: BinaryIO | None = None) -> Any:
    """Open the Parquet file at a path. file: the same file if it is open already. Raises ValueError for other files."""
    opened = pyarrow("parquet").ParquetFile
    try:
        return opened(file or path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None
