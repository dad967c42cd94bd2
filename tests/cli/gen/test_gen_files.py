"""fggen's files: input, output, and jobs that are continued."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from generating import PROMPTS, SHORT, Fggen, by_row, read, write

from fastgen.cli.gen import main, outputs
from fastgen.cli.gen.outputs import to_line
from fastgen.cli.gen.rows import Row, Source, read_rows
from fastgen.cli.gen.work import RowJob, RowRequests, parsed, state_by

# ------------------------------------------------------------------------------------------------- files


def test_files_folders_globs_and_stdin(fggen: Fggen, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("data/deep").mkdir(parents=True)
    write("data/b.jsonl", *PROMPTS[:2])
    write("data/deep/c.ndjson", "\ufeff" + json.dumps(PROMPTS[2]), "", " ", PROMPTS[3])
    pq.write_table(pa.table({"prompt": [PROMPTS[4]["prompt"]]}), "data/deep/d.parquet")
    write("data/readme.md", "nothing")
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in PROMPTS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    said = []
    for number, names in enumerate((["data"], ["data/*.jsonl", "data/deep/*"], ["data/b.jsonl", "data/deep"], ["-"])):
        assert fggen(*names, "-o", f"{number}.jsonl", *SHORT) == 0
        said.append(by_row(f"{number}.jsonl"))
    assert said[0] == said[1] == said[2] == said[3]
    assert [record["prompt"] for record in said[0]] == [row["prompt"] for row in PROMPTS]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.csv", "out.parquet"])
def test_a_full_disk_loses_nothing(fggen: Fggen, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("in.jsonl", *PROMPTS * 4)
    assert fggen("in.jsonl", "-o", f"whole-{name}", *SHORT) == 0
    place = f"{name}/part-00000.parquet" if name == "out.parquet" else name
    for cut in (None, -9)[: 1 + (place == name)]:  # a part of Parquet is never torn
        before = Path(name).read_bytes()[:cut] if cut else None
        if before:
            Path(name).write_bytes(before)
        with full_disk():
            assert fggen("in.jsonl", "-o", name, *SHORT) == 1
        assert f"File too large; make room, and give the same command again: '{place}'" in capsys.readouterr().err
        assert not list(Path.cwd().rglob("*.tmp")), "it would take room"
        assert not before or Path(name).read_bytes() == before
        assert fggen("in.jsonl", "-o", name, *SHORT) == 0
        assert columns_of(name) == columns_of(f"whole-{name}")


@contextmanager
def full_disk() -> Iterator[None]:
    """Leave room for files of 300 bytes, as the one that describes the job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing.jsonl", "-o", "out.jsonl"], "nothing.jsonl: there is no such file or folder"),
        (["-", "in.jsonl", "-o", "out.jsonl"], "- is stdin, which is read alone"),
        (["in.txt", "-o", "out.jsonl"], "in.txt: there is no file of .jsonl"),
        (["in.jsonl", "-o", "out.txt"], "the suffix of out.txt names no format"),
        (["in.jsonl", "-o", "-", "--retry-errors"], "--retry-errors needs an output that can be read"),
        (["torn.jsonl.gz", "-o", "out.jsonl"], "torn.jsonl.gz cannot be read: Not a gzipped file"),
        (["open.csv", "-o", "out.jsonl"], "end of data, in the row that begins on line 4; check its quotes"),
        (["latin.csv", "-o", "out.jsonl"], "latin.csv cannot be read: line 3002 is not UTF-8; save the file as UTF-8"),
        (["twice.csv", "-o", "out.jsonl"], "twice.csv has two columns of one name"),
        (["in.jsonl", "-o", "in.jsonl"], "in.jsonl is the only input and belongs to the output; give another -o"),
        (["torn.parquet", "-o", "out.jsonl"], "torn.parquet cannot be read as Parquet: "),
        (["in.jsonl", "-o", "spark.parquet"], "no _fggen.json describes their job"),
        (["half.jsonl", "-o", "out.parquet"], "the columns cannot be written as Parquet"),
        (["in.jsonl", "-o", "nowhere/out.jsonl"], "no folder nowhere for out.jsonl; make it, or give another -o"),
        (["in.jsonl", "-o", "file.parquet"], "is a file, and Parquet is written in parts in a folder"),
        (["mixed.jsonl", "-o", "out.parquet"], "written as Parquet: the values of a have no type in common: Could not"),
        (["late.jsonl", "-o", "out.parquet"], "there is a column completions already"),
    ],
)
def test_what_cannot_be_read_or_written(
    fggen: Fggen, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("spark.parquet").mkdir()
    write("spark.parquet/part-0-ab.snappy.parquet", PROMPTS[0])
    for name in ("torn.jsonl.gz", "in.txt", "in.jsonl", "file.parquet", "torn.parquet"):
        write(name, PROMPTS[0])
    write("open.csv", "prompt,b", '"x\n",1', 'x,"y', "x,1")
    write("twice.csv", "prompt,prompt", "x,y")
    Path("latin.csv").write_bytes(b"prompt\n" + b"coffee\n" * 3000 + b"caf\xe9\n")
    write("half.jsonl", {"prompt": "x", "\ud800": 1})
    write("mixed.jsonl", {"prompt": "x", "a": 1}, {"prompt": "x", "a": "one"})
    write("late.jsonl", {"prompt": "x"}, {"prompt": "x", "completions": []})
    assert fggen(*arguments) in (1, 2)
    assert reason in capsys.readouterr().err


def test_halves_of_surrogate_pairs_in_rows_become_escapes_in_parquet(fggen: Fggen) -> None:
    write("in.jsonl", {"prompt": "\ud800"}, {"prompt": "hello", "a": {"b": ["\ud800"]}})
    assert fggen("in.jsonl", "-o", "out.parquet", *SHORT) == 0
    bad, good = sorted(pq.read_table("out.parquet").to_pylist(), key=lambda record: record["row"])
    assert bad["prompt"] == "\\ud800"
    assert "surrogates not allowed" in bad["error"]
    assert good["a"] == {"b": ["\\ud800"]}
    assert good["error"] is None


def test_an_output_that_a_glob_finds_again_is_no_input(fggen: Fggen) -> None:
    write("a.jsonl", *PROMPTS[:2])
    for _ in range(2):
        names = sorted(path.name for path in Path.cwd().glob("*.jsonl"))  # as a shell expands *.jsonl
        assert fggen(*names, "-o", "out.jsonl", *SHORT) == 0
    assert len(by_row("out.jsonl")) == 2


def test_the_output_in_the_folder_is_no_input(fggen: Fggen) -> None:
    for name in ("out.jsonl", "out.parquet"):
        folder = Path(f"of-{name}")
        folder.mkdir()
        write(f"{folder}/in.jsonl", *PROMPTS)
        for _ in range(2):
            assert fggen(folder, "-o", folder / name, *SHORT) == 0
            assert Source([str(folder)], folder / name).total == 5


def write_prompts(name: str, *prompts: str) -> str:
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"prompt": prompts}), name)
    elif name.endswith(".csv.gz"):
        Path(name).write_bytes(gzip.compress("\n".join(("prompt", *prompts)).encode()))
    else:
        write(name, *({"prompt": prompt} for prompt in prompts))
    return name


@pytest.mark.parametrize("after", ["ab", "cba", "abcd"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv.gz", "in.parquet"])
def test_an_input_that_has_changed_is_named(
    fggen: Fggen, name: str, after: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = main._load
    monkeypatch.setattr(main, "_load", lambda args: write_prompts(name, *after) and load(args))
    for inputs in ((name, write("other.jsonl", PROMPTS[0])), ("other.jsonl", name)):
        write_prompts(name, *"abc")
        assert fggen(*inputs, "-o", f"of-{inputs[0]}.jsonl", *SHORT) == 1
        assert f"error: {name} has changed since fggen counted its rows" in capsys.readouterr().err


def test_an_input_without_rows(fggen: Fggen, capsys: pytest.CaptureFixture[str]) -> None:
    assert fggen(write("in.jsonl"), "-o", "out.jsonl") == 0
    assert "fggen: the input has no rows" in capsys.readouterr().err
    assert fggen("in.jsonl", "-o", "out.parquet") == 0
    assert read("out.jsonl") == []


def test_parquet_keeps_types_and_is_written_in_parts(fggen: Fggen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "PART_BYTES", 1)
    messages = [[{"role": "user", "content": "hello", "name": None}, {"role": "assistant", "content": "hi"}]] * 7
    when = [datetime.datetime(2026, 1, day + 1) for day in range(7)]
    table = pa.table({"id": pa.array(range(7), pa.int16()), "messages": messages, "when": when, "raw": [b"\xff"] * 7})
    pq.write_table(table, "in.parquet")
    for _ in range(2):
        assert fggen("in.parquet", "-o", "out.parquet", "--logprobs", "--n", 2, *SHORT) == 0
    parts = sorted(Path("out.parquet").glob("*.parquet"))
    assert [part.name for part in parts] == [f"part-{number:05}.parquet" for number in range(7)]
    assert len({str(pq.read_schema(part)) for part in parts}) == 1
    found = pq.read_table("out.parquet").sort_by("row")
    assert found.schema.field("id").type == pa.int16()
    assert found.schema.field("logprobs").type == pa.list_(pa.list_(pa.float32()))
    assert found.select(["id", "messages", "when", "raw"]).equals(table)
    assert fggen("in.parquet", "-o", "out.jsonl", "--logprobs", "--n", 2, *SHORT) == 0
    for line, row in zip(by_row("out.jsonl"), found.to_pylist(), strict=True):
        assert line["completions"] == row["completions"]
        assert line["token_ids"] == row["token_ids"]
        assert line["logprobs"] == row["logprobs"]
        assert (line["when"], line["raw"]) == (str(row["when"]), "/w==")


def test_json_becomes_parquet_with_the_types_of_all_of_it(fggen: Fggen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "SCHEMA_ROWS", 2)
    rows = [{"prompt": "x", "a": None}, {"prompt": "y"}, "nonsense", {"prompt": "x", "a": 1, "b": {"c": "d"}},
            {"prompt": "z", "a": 1.5, "b": {"e": [1]}}]  # fmt: skip
    assert fggen(write("in.jsonl", *rows), "-o", "out.parquet", *SHORT) == 0
    found = pq.read_table("out.parquet").sort_by("row").to_pylist()
    assert [row["a"] for row in found] == [None, None, None, 1.0, 1.5]
    assert [row["b"] for row in found[3:]] == [{"c": "d", "e": None}, {"c": None, "e": [1]}]
    assert "line 3 of in.jsonl cannot be read" in found[2]["error"]


def test_without_pyarrow_parquet_is_an_error_that_names_it(
    fggen: Fggen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert fggen(write("in.jsonl", PROMPTS[0]), "-o", "out.parquet") == 1
    missing = "the package pyarrow is not installed; run: pip install -e '"
    assert capsys.readouterr().err.startswith(f"fggen: error: Parquet files cannot be used: {missing}")
    assert fggen("in.jsonl", "-o", "out.jsonl", *SHORT) == 0


def test_a_line_is_json_whatever_the_columns_hold() -> None:
    record = {"row": 1, "a": float("nan"), "b": [float("inf"), 1.5], "c": "\ud800é", "d": b"\x00"}
    assert json.loads(to_line(record)) == {"row": 1, "a": None, "b": [None, 1.5], "c": "\ud800é", "d": "AA=="}
    assert to_line({"a": "é\u2028"}) == b'{"a": "\xc3\xa9\xe2\x80\xa8"}\n', "one line, which people can read"


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.jsonl.gz"])
def test_torn_records_are_done_again(fggen: Fggen, name: str) -> None:
    prompts = ['a "quoted" one', "two\nlines\r\n", "a, b", "", "é", "long" * 5_000]
    write("in.jsonl", *({"prompt": prompt, "n": 1 + row, "id": row} for row, prompt in enumerate(prompts)))
    assert fggen("in.jsonl", "-o", "whole.jsonl", *SHORT) == 0
    assert fggen("in.jsonl", "-o", name, *SHORT) == 0
    whole, data = by_row("whole.jsonl"), Path(name).read_bytes()
    assert whole == found_in(name)
    torn = [data[:kept] for kept in (len(data) - 1, len(data) // 2, 5, 0)]
    for start in (0, len(data) - 50) if name.endswith(".gz") else (0, 60, 300, len(data) - 50):
        torn.append(data[:start] + bytes(40) + data[start + 40 :])  # as a power cut may leave it
    for content in torn:
        Path(name).write_bytes(content)
        assert fggen("in.jsonl", "-o", name, *SHORT) == 0
        assert whole == found_in(name)


def columns_of(name: str) -> list[dict[str, Any]]:
    """Return the records of an output in any format, in the order of the input's rows."""
    files = sorted(Path(name).glob("*.parquet")) if name.endswith("parquet") else [Path(name)]
    return sorted((row.columns for row in read_rows(files)), key=lambda columns: int(columns["row"]))


def found_in(name: str) -> list[dict[str, Any]]:
    """Return the records of a file of lines or of CSV, with the values of JSON."""
    texts = ("prompt", "error")
    found = ({key: value if key in texts else parsed(value) for key, value in row.items()} for row in columns_of(name))
    return [{**row, "prompt": row["prompt"] or ""} for row in found]


def test_csv_and_gzip_are_read_and_what_csv_says_is_typed(fggen: Fggen) -> None:
    rows = [{"prompt": "hello", "n": 2, "temperature": 0.5}, {"messages": [{"role": "user", "content": "a, b"}]},
            {"prompt_token_ids": [5, 6], "ignore_eos": True}, {"prompt": "stop", "stop": "1"}]  # fmt: skip
    write("in.jsonl", *rows)
    with Path("in.csv").open("w", encoding="utf-8-sig", newline="") as file:
        names = ("prompt", "messages", "prompt_token_ids", "n", "temperature", "ignore_eos", "stop")
        table = csv.DictWriter(file, names)
        table.writeheader()
        for row in rows:
            table.writerow({key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()})
    for name in ("in.csv", "in.jsonl"):
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    said = []
    for name in ("in.jsonl", "in.csv", "in.jsonl.gz", "in.csv.gz"):
        assert fggen(name, "-o", f"of-{name}.jsonl", *SHORT) == 0
        said.append([(row["error"], row["completions"]) for row in by_row(f"of-{name}.jsonl")])
    assert said[0] == said[1] == said[2] == said[3]
    assert [error for error, _ in said[0]] == [None] * 4
    assert fggen(write("long.csv", "prompt,a", "x,1", "y,2,3"), "-o", "long.jsonl", *SHORT) == 0
    assert "line 3 of long.csv cannot be read: it has more cells" in by_row("long.jsonl")[1]["error"]


def test_stdout_gets_lines_and_nothing_else(
    fggen: Fggen, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fggen(write("in.jsonl", *PROMPTS), "-o", "out.jsonl", *SHORT) == 0
    assert fggen("in.jsonl", "-o", "-", *SHORT) == 0
    said = capfdbinary.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert said.err.endswith(b" tok/s; on stdout\n")
    assert sorted(lines, key=lambda record: record["row"]) == by_row("out.jsonl")
    assert not Path("-").exists()
    with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(full))
        assert fggen("in.jsonl", "-o", "-", *SHORT) == 1
    assert b"give the same command again: 'stdout'" in capfdbinary.readouterr().err


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv.gz", "out.parquet"])
def test_rows_that_have_failed_are_done_again(
    fggen: Fggen, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def states() -> list[tuple[int, bool]]:
        return [(int(columns["row"]), columns["error"] is None) for columns in columns_of(name)]

    ask, broken = RowJob.ask, [True]

    def ask_or_fail(job: RowJob, row: Row) -> RowRequests:
        return ask(job, replace(row, error="it broke") if broken and row.index < 2 else row)

    monkeypatch.setattr(RowJob, "ask", ask_or_fail)
    write("in.jsonl", *PROMPTS, {"prompt": "x", "n": -1})
    assert fggen("in.jsonl", "-o", name, *SHORT) == 0
    assert states() == list(enumerate([False, False, True, True, True, False]))
    broken.clear()
    assert fggen("in.jsonl", "-o", name, *SHORT) == 0
    assert "nothing is left to do of 6 rows, 3 of them errors" in capsys.readouterr().err
    for _ in range(2):
        assert fggen("in.jsonl", "-o", name, *SHORT, "--temperature", 0.5, "--retry-errors") == 0
        assert states() == list(enumerate([True] * 5 + [False]))
    assert fggen("in.jsonl", "-o", name, *SHORT, "--chat", "--retry-errors") == 1
    assert "begun with another --chat" in capsys.readouterr().err


def test_ordered_is_the_order_of_the_input(fggen: Fggen) -> None:
    lengths = [40, 1, 2, 30, 1, 1, 20, 1, 1, 1, 3, 2]
    write("in.jsonl", *({"prompt": "x", "max_tokens": n, "ignore_eos": True} for n in lengths))
    assert fggen("in.jsonl", "-o", "free.jsonl", "--seed", 1) == 0
    assert fggen("in.jsonl", "-o", "ordered.jsonl", "--seed", 1, "--ordered") == 0
    assert read("ordered.jsonl") == by_row("free.jsonl") != read("free.jsonl")


def test_a_job_whose_seed_was_drawn_goes_on_with_it(fggen: Fggen, monkeypatch: pytest.MonkeyPatch) -> None:
    write("in.jsonl", *PROMPTS)
    for source in ("in.jsonl", "-"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("in.jsonl").read_bytes())))
        assert fggen("in.jsonl", "-o", "out.jsonl", "--ordered", "--max-tokens", 8) == 0
        whole = Path("out.jsonl").read_bytes()
        Path("out.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
        assert fggen(source, "-o", "out.jsonl", "--ordered", "--max-tokens", 8) == 0
        assert Path("out.jsonl").read_bytes() == whole


# ------------------------------------------------------------------------------------------------- going on


ABOUT, RECORD = "out.jsonl.fggen.json", b'{"row": %b, "error": null}\n'


@pytest.fixture
def begun(fggen: Fggen) -> bytes:
    """Return the output (out.jsonl) of a finished job on in.jsonl with SHORT."""
    assert fggen(write("in.jsonl", *PROMPTS), "-o", "out.jsonl", *SHORT) == 0
    return Path("out.jsonl").read_bytes()


def test_a_torn_file_stays_where_a_symlink_says_with_its_mode(fggen: Fggen, begun: bytes) -> None:
    whole, target = by_row("out.jsonl"), Path("disk/target.jsonl")
    target.parent.mkdir()
    target.write_bytes(begun[:-9])
    target.chmod(0o600)
    Path("out.jsonl").unlink()
    Path("out.jsonl").symlink_to(target)
    assert fggen("in.jsonl", "-o", "out.jsonl", *SHORT) == 0
    assert by_row("out.jsonl") == whole
    assert Path("out.jsonl").readlink() == target
    assert target.stat().st_mode & 0o777 == 0o600
    assert list(target.parent.iterdir()) == [target]


def rewritten(name: str, content: bytes) -> tuple[Any, ...]:
    """Write a file, and return the options of the job that has begun."""
    Path(name).write_bytes(content)
    return SHORT


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: ["--max-tokens", 6, "--seed", 3], "out.jsonl was begun with another --max-tokens, as out.jsonl.fggen"),
        (lambda: ["--max-tokens", 5], "another --seed, as out.jsonl.fggen.json says; give another -o, or what it was"),
        (lambda: [*SHORT, "--ordered"], "out.jsonl was begun with another --ordered, as"),
        (lambda: write("in.jsonl", *PROMPTS[::-1]) and SHORT, "out.jsonl was begun with another input, as"),
        (lambda: write("in.jsonl", *PROMPTS, PROMPTS[0]) and SHORT, "out.jsonl was begun with another input, as"),
        (lambda: Path(ABOUT).unlink() or SHORT, f"no {ABOUT} describes their job; give another -o"),
        (lambda: rewritten(ABOUT, b""), f"{ABOUT} describes the job of the output, and is damaged: Expecting value"),
        (lambda: rewritten(ABOUT, b"[]"), "is damaged: it has no job and seed; restore it, or give another -o"),
        (lambda: rewritten(ABOUT, b'{"job": [], "seed": 1}'), "is damaged: it has no job and seed"),
        (lambda: rewritten("out.jsonl", RECORD % b"0" + RECORD % b"0"), "out.jsonl has row 0 twice"),
        (lambda: rewritten("out.jsonl", RECORD % b"5"), "out.jsonl has row 5 twice, or the input does not have it"),
        (lambda: rewritten("out.jsonl", RECORD % b"0" + b"nonsense\n"), "record 2 of out.jsonl is not of this job"),
        (lambda: rewritten("out.jsonl", RECORD % b"1e999"), "record 1 of out.jsonl is not of this job"),
        (lambda: rewritten("out.jsonl", b"[" * 10**5 + b"\n"), "record 1 of out.jsonl is not of this job"),
    ],
)
def test_what_is_not_of_this_job_is_refused_and_kept(
    fggen: Fggen, begun: bytes, capsys: pytest.CaptureFixture[str], change: Callable[[], Any], reason: str
) -> None:
    options, before = change(), Path("out.jsonl").read_bytes()
    assert fggen("in.jsonl", "-o", "out.jsonl", *options) == 1
    assert reason in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == before


def test_what_does_not_change_the_job_may_change(fggen: Fggen, begun: bytes) -> None:
    options = ("--max-seqs", 2, "--device", "cpu", "--strict", "-v")
    assert fggen("in.jsonl", "-o", "out.jsonl", *SHORT, *options) == 0
    Path("out.jsonl").unlink()
    assert fggen("in.jsonl", "-o", "out.jsonl", "--max-tokens", 2) == 0, "without records it is a new one"


@pytest.mark.parametrize("rows", [[0, None], ["0", "1"]])
def test_a_part_of_another_job_is_refused(fggen: Fggen, rows: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert fggen(write("in.jsonl", *PROMPTS), "-o", "out.parquet", *SHORT) == 0
    pq.write_table(pa.table({"row": rows, "error": pa.nulls(2, pa.string())}), "out.parquet/part-00001.parquet")
    assert fggen("in.jsonl", "-o", "out.parquet", *SHORT) == 1
    assert "out.parquet/part-00001.parquet is not of this job; remove it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_two_that_write_the_same_output_are_refused(
    fggen: Fggen, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fggen(write("in.jsonl", *PROMPTS), "-o", name, *SHORT) == 0
    schema = pa.schema([("row", pa.int64()), ("error", pa.string())])
    state = ("row", "error")
    parts = name.endswith(".parquet")
    output = outputs.ParquetParts(Path(name), schema, state) if parts else outputs.Lines(Path(name), state_by(state))
    if not parts:
        Path(name).write_bytes(Path(name).read_bytes()[:-9])
    with output.opened():
        assert fggen("in.jsonl", "-o", name, *SHORT) == 1
        assert len(list(output.recover(retry=False))) >= 4, "which replaces a torn file"
        assert fggen("in.jsonl", "-o", name, *SHORT) == 1
    assert f"another fggen is writing {name}" in capsys.readouterr().err
    assert fggen("in.jsonl", "-o", name, *SHORT) == 0


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv.gz", "in.parquet"])
def test_an_input_may_be_replaced_but_not_rewritten_while_it_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    source = Source([write_prompts(str(path), *"abc")], tmp_path / "out.jsonl")
    rows = source.rows(bytearray(3))
    first = next(rows)
    path.rename(tmp_path / f"old-{name}")
    write_prompts(str(path), *"xyz")
    assert [row.columns["prompt"] for row in (first, *rows)] == ["a", "b", "c"]
    source = Source([str(path)], tmp_path / "out.jsonl")
    rows = source.rows(bytearray(3))
    next(rows)
    write_prompts(str(path), *"xya")
    with pytest.raises(ValueError, match="has changed since"):
        list(rows)
