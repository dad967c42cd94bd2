"""The command fggen: its options, and the run of a job."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fastgen.cli.command import UsageError, loading_model, needed, note, run_tool
from fastgen.cli.gen.outputs import Lines, Output, Parts, Stdout, begin, csv_columns, parquet_schema
from fastgen.cli.gen.rows import CSV, PARQUET, SUFFIXES, Source, format_of, read_rows
from fastgen.cli.gen.work import (
    PARAMS,
    PROMPTS,
    Ask,
    Done,
    Record,
    RowJob,
    Work,
    added_columns,
    check_added,
    fields_of,
    in_order,
    state_by,
    work,
)
from fastgen.cli.options import MODEL, SAMPLING, Parser, add_flag, flag, given
from fastgen.engine.interrupts import DeferredInterrupt
from fastgen.model.config import BUNDLED_NAME
from fastgen.option import Option
from fastgen.request import SamplingParams

if TYPE_CHECKING:
    from fastgen.generator import Generator

GENERATOR = {name: option for name, option in MODEL.items() if name != "seed"}  # each row has its own seed
PARAMETERS = (*SAMPLING, "stop")
# Options of GENERATOR that are part of the identity of a job.
SAME = (
    "revision", "tokenizer", "allow_special_tokens", "reasoning_parser", "adapter", "dtype", "quantization",
    "kv_cache_dtype", "max_model_len", "load", "generation_config",
)  # fmt: skip
RETRIED = (*PARAMETERS, "max_model_len", "generation_config")  # may change with --retry-errors
ROWS_ONLY = ("n", "template", "chat", "logprobs", "prefix")  # options that do not apply to batch files

RAY = (
    Option("replicas", int, help="Generators, each in a Ray actor", unset="as many as fit on the GPUs, or 1", low=1),
    Option("replica_cpus", float, help="CPUs per replica; with less than 1, replicas share a CPU", unset="1", low=0),
)

SWITCHES = {
    "chat": "send text prompts as the message of a user (default: as plain text)",
    "ordered": "write rows in input order; after an interruption, finished rows that were not written are done again"
    " (default: in the order of completion)",
    "retry_errors": "do failed rows of the output again; sampling options and --max-model-len may change (default: keep"
    " their errors)",
    "strict": "stop at the first row that fails (default: write its error)",
    "logprobs": "also write token_ids, logprobs (of the distribution that was sampled from) and raw_logprobs (default:"
    " no)",
}
SEED = Option("seed", int, help="seed of the job; rows without a seed get one derived from it", unset="a random one")
STDOUT = "-"
# Outside a terminal, where each update of the progress bar stays visible: the interval between two updates as a share
# of the time of the run so far.
LOG_SHARE = 0.1
LOG_SECONDS = 30.0  # maximum of this interval


@dataclass
class Tally:
    """The counts of a run: rows, rows with errors, and tokens of prompts and answers. reason: the first error."""

    rows: int = 0
    errors: int = 0
    reason: str | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, done: Done) -> None:
        self.rows += 1
        self.errors += done.error is not None
        self.reason = self.reason or done.error
        self.prompt_tokens += done.prompt_tokens
        self.tokens += done.tokens

    @property
    def rate(self) -> str:
        return f"{self.tokens / max(time.perf_counter() - self.started, 1e-9):.1f} tok/s"

    def __str__(self) -> str:
        rows = f"{self.rows} rows in {time.perf_counter() - self.started:.1f} s, {self.errors} of them errors"
        return f"{rows}; {self.prompt_tokens} tokens in, {self.tokens} out, {self.rate}"


def write_all(done_rows: Work, output: Output, bar: tqdm[Any], strict: bool = False) -> tuple[Tally, bool]:
    """Write the records of rows as they finish. Return the counts, and True if Ctrl-C has ended the work.

    Ctrl-C stops the engine at once, but never in the middle of a record. strict: raise ValueError for a failed row.
    """
    tally, interrupt = Tally(), DeferredInterrupt()
    try:
        with interrupt, closing(done_rows):
            for done in interrupt.reading(done_rows):
                if strict and done.error is not None:
                    raise ValueError(f"row {done.index}: {done.error}; without --strict it is written as an error")
                output.write(done.record)
                tally.add(done)
                if not sys.stderr.isatty():
                    bar.mininterval = min(LOG_SHARE * (time.perf_counter() - tally.started), LOG_SECONDS)
                bar.set_postfix_str(f"{tally.rate}, {tally.errors} errors", refresh=False)
                bar.update()
    except KeyboardInterrupt:
        return tally, True
    return tally, False


def run(args: argparse.Namespace) -> int:
    """Run the job that the options describe and return the exit status. Raises ValueError or OSError."""
    path = Path(args.output)
    _check_options(args, path)
    source = Source(args.inputs, path)
    output = _output(args, path, source)
    with output.opened():
        retry = RETRIED if args.retry_errors else None
        done, failures, seed = begin(output, _identity(args, source), source.total, args.seed, retry)
        if number := sum(done):
            note("fggen", f"{number} rows are in {output.path} already")
        if number == source.total:
            left = f"nothing is left to do of {number} rows, {failures} of them errors"
            left += "; --retry-errors does those again" if failures else ""
            note("fggen", left if number else "the input has no rows")
            return 3 if number and failures == number else 0
        with (
            _working(args, source, done, seed) as working,
            tqdm(total=source.total, initial=number, unit="row", miniters=1, dynamic_ncols=True) as bar,
        ):
            working = in_order(working, done) if args.ordered else working
            tally, stopped = write_all(working, output, bar, args.strict)
    note("fggen", f"{tally}; {'on stdout' if args.output == STDOUT else f'in {output.path}'}")
    if stopped:
        note("fggen", "stopped" if args.output == STDOUT else "stopped; the same command goes on from here")
        return 130
    failed = failures + tally.errors
    if tally.reason:
        note("fggen", f"{'all' if failed == source.total else 'some'} rows have failed; one error is: {tally.reason}")
    return 3 if failed == source.total else 0


def _check_options(args: argparse.Namespace, path: Path) -> None:
    """Raise UsageError for options that cannot work. Nothing has been read yet."""
    if args.output != STDOUT and not format_of(path):
        raise UsageError(f"the suffix of {path} names no format; it must be one of {', '.join(SUFFIXES)}")
    if args.output != STDOUT and not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for {path.name}; make it, or give another -o")
    if args.output == STDOUT and args.retry_errors:
        raise UsageError("--retry-errors needs an output that can be read; give a file as -o")
    for name, what, stream in ((args.inputs[0], "stdin", sys.stdin), (args.output, "stdout", sys.stdout)):
        if name == STDOUT and stream is None:
            raise UsageError(f"- is {what}, which is closed; give a file")
    args.ray = args.ray or bool(given(args, (option.name for option in RAY)))


def _check_columns(template: str | None, source: Source) -> None:
    """Raise UsageError if the template is malformed or no row has one of its columns; without a template, if no row has
    a prompt.

    Rows are read until all columns have been found. An input without a readable row passes.
    """
    wanted: list[tuple[str, ...]] = [PROMPTS] if template is None else [(name,) for name in fields_of(template)]
    for columns in chain([source.columns], (row.columns for row in read_rows(source.files))):
        wanted = [names for names in wanted if columns.keys().isdisjoint(names)]
        if not wanted or not source.columns:
            return
    missing, there = " or ".join(wanted[0]), ", ".join(source.columns)
    advice = (
        "which the template needs (a literal brace is written twice)"
        if template
        else "and no --template makes one of other columns"
    )
    raise UsageError(f"no row has a column {missing}, {advice}; the first row has {there}")


def _identity(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """Return the input and options that define the job; if one of them changes, so does the output."""
    names = ("model", *SAME, *PARAMETERS, "seed", "template", "chat", "logprobs", "prefix", "ordered")
    return {"input": source.fingerprint, **given(args, names)}


def _output(args: argparse.Namespace, path: Path, source: Source) -> Output:
    """Return the output, not yet opened. Raises UsageError or ValueError if the rows cannot be written to it."""
    kind, lines = format_of(path), Stdout if args.output == STDOUT else Lines
    if source.batch:
        if excess := [flag(name) for name in ROWS_ONLY if getattr(args, name)]:
            raise UsageError(
                f"{excess[0]} is not for OpenAI's batch files, whose bodies have all options; leave it out"
            )
        if kind in (PARQUET, CSV):
            raise UsageError("the answers of an OpenAI batch are lines of JSON; write .jsonl")
        return lines(path, _batch_state)
    added = added_columns(args.prefix, args.logprobs)
    _check_columns(args.template, source)
    check_added(added, source.columns)
    if kind == PARQUET:
        return Parts(path, parquet_schema(source.files, added), added[:2])
    return lines(path, state_by(added), csv_columns(source.files, added) if kind == CSV else ())


def _batch_state(record: Record) -> tuple[int, bool]:
    return int(record["id"].removeprefix("batch_req_")), record["response"]["status_code"] != 200


@contextmanager
def _working(args: argparse.Namespace, source: Source, done: Sequence[int], seed: int) -> Iterator[Work]:
    """Yield the work on the rows that are not done yet, in this process or on Ray."""
    make, rows = partial(_make, args, source.batch, seed), source.rows(done)
    if args.ray:
        backend = needed("fastgen.cli.gen.ray_backend", "ray", "actors of Ray")
        yield backend.work_on_ray(args, make, rows, source.total - sum(done))
        return
    with loading_model():
        gen, ask = make()
    with gen:
        yield work(ask, rows, gen.stream)


def _make(args: argparse.Namespace, batch: bool, seed: int) -> tuple[Generator, Ask]:
    """Load the model, and return it with the function that turns rows into requests."""
    gen = _load(args)
    params = replace(gen.default_params, **given(args, PARAMETERS))
    params.validate(gen.model_config.vocab_size)
    if batch:
        batches = needed("fastgen.cli.gen.batch", "serve", "OpenAI's batch files")
        ask: Ask = batches.BatchJob(gen, args.model, params, seed).ask
        return gen, ask
    if gen.tokenizer is None and not args.logprobs:
        raise ValueError("this model has no tokenizer files, so answers have no text; --logprobs gives their token ids")
    if gen.tokenizer is not None and args.chat:
        gen.tokenizer.check_template()
    return gen, RowJob(params, seed, args.template, args.chat, args.logprobs, args.prefix).ask


def _load(args: argparse.Namespace) -> Generator:
    from fastgen.generator import Generator  # importing torch takes seconds

    return Generator(args.model, **given(args, GENERATOR))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done (rows may have errors), 1 error, 2 wrong options, 3 done but
    all rows failed, 130 Ctrl-C or SIGTERM, 141 closed stdout."""
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)
    try:
        SamplingParams(**given(args, PARAMETERS)).validate(vocab_size=1)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored, as in `fggen &`
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    return run_tool("fggen", args.verbose, lambda: run(args))


def make_parser() -> Parser:
    parser = Parser(
        prog="fggen",
        description="Run files of prompts through a model. A job that was killed continues when the same command is"
        " started again: in the end there is exactly one output row for each input row.",
        epilog=f"A row has one of {', '.join(PROMPTS)}, and any other columns, which are kept. Columns with these names"
        f" override the options: {', '.join(PARAMS)}. The `error` of a failed row is the reason. OpenAI batch files"
        " (custom_id, body) are answered in OpenAI's own format, errors included (see response.status_code). Exit"
        " status: 0 done, 1 error, 2 wrong options or a template column that no row has, 3 all rows failed, 130"
        " Ctrl-C.",
    )
    option = parser.add_argument
    suffixes = ", ".join(SUFFIXES)
    option("model", metavar="MODEL", help=f"a hub id or a folder; {BUNDLED_NAME} is fastgen's own small model")
    option("inputs", metavar="INPUT", nargs="+", help=f"files, folders or globs ({suffixes}); - is JSONL on stdin")
    output_help = "JSONL or CSV file, or folder of Parquet files, depending on the suffix; - is JSONL on stdout"
    option("-o", "--output", required=True, metavar="OUTPUT", help=output_help)
    template_help = "template of the prompt, in which {name} stands for a column (default: rows have prompts)"
    option("--template", metavar="TEXT", help=template_help)
    for name, text in SWITCHES.items():
        option(flag(name), action="store_true", help=text)
    option("--prefix", metavar="TEXT", default="", help="prefix for the names of added columns (default: none)")
    group = parser.add_argument_group("sampling")
    for each in (*SAMPLING.values(), SEED):
        add_flag(group, each)
    group.add_argument(
        "--stop", metavar="TEXT", action="append", help="string that ends an answer; may be given several times"
    )
    group = parser.add_argument_group("model")
    for each in GENERATOR.values():
        add_flag(group, each)
    group = parser.add_argument_group("Ray")
    group.add_argument(
        "--ray",
        action="store_true",
        help="run in Ray actors, on this machine or the cluster at RAY_ADDRESS (default: in this process)",
    )
    for each in RAY:
        add_flag(group, each)
    option("-v", "--verbose", action="store_true", help="log what happens, and show tracebacks (default: no)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
