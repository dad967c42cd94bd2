"""The command fggen: the run of a job, in this process, in several, on Ray or on a server."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.cli.command import UsageError, loading_model, needed, note, run_tool
from fastgen.cli.gen.dry_run import load_tokenizer, show_call, show_prompts, show_request
from fastgen.cli.gen.options import (
    CONCURRENCY,
    GENERATOR,
    PARAMETERS,
    RETRIED,
    ROWS_ONLY,
    SAME,
    STDOUT,
    STRUCTURE_FLAGS,
    check_files,
    make_parser,
    read_arguments,
)
from fastgen.cli.gen.outputs import Lines, Output, ParquetParts, Stdout, begin, csv_columns, parquet_schema
from fastgen.cli.gen.progress import Progress
from fastgen.cli.gen.rows import CSV, PARQUET, Row, Source, format_of, read_rows
from fastgen.cli.gen.work import (
    PROMPTS,
    Ask,
    Model,
    Record,
    RowJob,
    Work,
    added_columns,
    check_added,
    fields_of,
    in_order,
    parsed,
    state_by,
    work,
)
from fastgen.cli.options import API_KEY, api_url, flag, given
from fastgen.engine.interrupts import DeferredInterrupt
from fastgen.request import SamplingParams
from fastgen.text.tokenizer import TOKENIZER_OPTIONS

if TYPE_CHECKING:
    from fastgen.cli.gen.server_backend import Calls
    from fastgen.generator import Generator
    from fastgen.pool.child import Serve

CHARACTERS_PER_TOKEN = 4  # of English, about


def write_all(done_rows: Work, output: Output, progress: Progress, strict: bool = False) -> bool:
    """Write the records of rows as they finish. Return True if Ctrl-C has ended the work.

    Ctrl-C stops the engine at once, but never in the middle of a record. strict: raise ValueError for a failed row.
    """
    interrupt = DeferredInterrupt()
    try:
        with interrupt, closing(done_rows):
            for done in interrupt.reading(done_rows):
                if strict and done.error is not None:
                    raise ValueError(f"row {done.index}: {done.error}; without --strict it is written as an error")
                output.write(done.record)
                progress.add(done)
    except KeyboardInterrupt:
        return True
    return False


def run(args: argparse.Namespace) -> int:
    """Run the job that the options describe and return the exit status. Raises ValueError or OSError."""
    path = Path(args.output)
    check_files(args, path)
    source = Source(args.inputs, path)
    if args.dry_run:
        return _dry_run(args, source)
    output = _output(args, path, source)
    with output.opened():
        retry = RETRIED if args.retry_errors else None
        done, failures, seed = begin(output, _identity(args, source), source.total, args.seed, retry)
        if number := sum(done):
            note("fggen", f"{number} rows are in {output.path} already")
        total = min(source.total, args.limit or source.total)
        done[total:] = bytes([1]) * (source.total - total)  # passes over the rows after --limit
        number = sum(done[:total])
        if number == total:
            left = f"nothing is left to do of {number} rows, {failures} of them errors"
            left += "; --retry-errors does those again" if failures else ""
            note("fggen", left if number else "the input has no rows")
            return 3 if number and failures == number else 0
        with _working(args, source, done, seed) as working, Progress(total, number) as progress:
            working = in_order(working, done) if args.ordered else working
            stopped = write_all(working, output, progress, args.strict)
    tally = progress.tally
    note("fggen", f"{tally}; {'on stdout' if args.output == STDOUT else f'in {output.path}'}")
    if stopped:
        note("fggen", "stopped" if args.output == STDOUT else "stopped; the same command goes on from here")
        return 130
    failed = failures + tally.errors
    if tally.reason:
        note("fggen", f"{'all' if failed == total else 'some'} rows have failed; one error is: {tally.reason}")
    return 3 if failed == total else 0


def check_columns(template: str | None, source: Source) -> None:
    """Raise UsageError if the template is malformed or no row has one of its columns; without a template, if no row has
    a prompt.

    Rows are read until all columns have been found. An input without a readable row passes.
    """
    alternatives: list[tuple[str, ...]] = [PROMPTS] if template is None else [(name,) for name in fields_of(template)]
    for columns in chain([source.columns], (row.columns for row in read_rows(source.files))):
        alternatives = [names for names in alternatives if columns.keys().isdisjoint(names)]
        if not alternatives or not source.columns:
            return
    missing, there = " or ".join(alternatives[0]), ", ".join(source.columns)
    advice = (
        "which the template needs (a literal brace is written twice)"
        if template
        else "and no --template makes one of other columns"
    )
    raise UsageError(f"no row has a column {missing}, {advice}; the first row has {there}")


def _identity(args: argparse.Namespace, source: Source) -> dict[str, Any]:
    """Return the input and options that define the job; if one of them changes, so does the output."""
    names = ("model", *SAME, *PARAMETERS, "seed", "template", "chat", "logprobs", "prefix", "ordered", "system")
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
    check_columns(args.template, source)
    check_added(added, source.columns)
    if kind == PARQUET:
        return ParquetParts(path, parquet_schema(source.files, added), added[:2])
    return lines(path, state_by(added), csv_columns(source.files, added) if kind == CSV else ())


def _batch_state(record: Record) -> tuple[int, bool]:
    return int(record["id"].removeprefix("batch_req_")), record["response"]["status_code"] != 200


@contextmanager
def _working(args: argparse.Namespace, source: Source, done: Sequence[int], seed: int) -> Iterator[Work]:
    """Yield the work on the rows that are not done yet, in this process, in several, on a server or on Ray."""
    make, rows = partial(_make, args, source.batch, seed), source.rows(done)
    if args.url is not None:
        backend = needed("fastgen.cli.gen.server_backend", "openai", "--url")
        key = args.api_key or os.environ.get(API_KEY) or None
        calls = _calls(args, source, None if args.seed is None else seed)
        yield backend.work_on_server(api_url(args.url), key, calls, rows, args.concurrency or CONCURRENCY.default)
        return
    if args.ray:
        backend = needed("fastgen.cli.gen.ray_backend", "ray", "actors of Ray")
        yield backend.work_on_ray(args, make, rows, source.total - sum(done))
        return
    if (args.data_parallel or 1) > 1:
        from fastgen.pool.processes import Processes

        place = args.data_parallel, args.tensor_parallel or 1, args.device
        processes = Processes("fastgen.cli.gen.main:serve_rows", (args, source.batch, seed), *place)
        with closing(processes):
            yield processes.run(((row.index, row) for row in rows), partial(_tokens, args))
        return
    with loading_model():
        gen, ask = make()
    with gen:
        yield work(ask, rows, gen.stream)


def _calls(args: argparse.Namespace, source: Source, seed: int | None) -> Calls:
    """Return the requests to the server at --url. seed: of the job; None for none."""
    backend = needed("fastgen.cli.gen.server_backend", "openai", "--url")
    params = given(args, PARAMETERS)
    fields = {**params, **given(args, ["priority"])}
    if source.batch:
        calls: Calls = backend.BatchCalls(args.model, fields, seed)
        return calls
    calls = backend.RowCalls(_row_job(args, SamplingParams(**params), seed or 0), args.model, fields, seed)
    return calls


def _row_job(args: argparse.Namespace, params: SamplingParams, seed: int) -> RowJob:
    return RowJob(params, seed, args.template, args.chat, args.system, args.logprobs, args.prefix)


def _make(args: argparse.Namespace, batch: bool, seed: int) -> tuple[Generator, Ask]:
    """Load the model, and return it with the function that turns rows into requests."""
    gen = _load(args)
    params = replace(gen.default_params, **given(args, PARAMETERS))
    params.validate(gen.model_config.vocab_size)
    if given(args, STRUCTURE_FLAGS):
        gen.abort(gen.add([0], params))  # raises for a grammar that cannot be used
    if gen.tokenizer is None and not args.logprobs and not batch:
        raise ValueError("this model has no tokenizer files, so answers have no text; --logprobs gives their token ids")
    return gen, _ask(args, batch, seed, gen, params)


def serve_rows(arguments: tuple[argparse.Namespace, bool, int], device: str | None) -> tuple[Generator, Serve]:
    """Load the model in a process of --data-parallel; see `fastgen.pool.child.Serve`."""
    args, batch, seed = arguments
    args.device = device
    gen, ask = _make(args, batch, seed)
    return gen, lambda rows: ((done.index, done) for done in work(ask, rows, gen.stream))


def _tokens(args: argparse.Namespace, row: Row) -> int:
    """Estimate the tokens of a row, which is what --data-parallel balances."""

    def limit(name: str, unset: int) -> int:
        own = parsed(row.columns.get(name))
        return own if isinstance(own, int) else getattr(args, name) or unset

    return len(str(row.columns)) // CHARACTERS_PER_TOKEN + limit("n", 1) * limit("max_tokens", 0)


def _ask(args: argparse.Namespace, batch: bool, seed: int, model: Model, params: SamplingParams) -> Ask:
    """Return the function that turns rows into requests."""
    if batch:
        batches = needed("fastgen.cli.gen.batch", "serve", "OpenAI's batch files")
        ask: Ask = batches.BatchJob(model, args.model, params, seed).ask
        return ask
    if model.tokenizer is not None and args.chat:
        model.tokenizer.check_template()
    return _row_job(args, params, seed).ask


def _dry_run(args: argparse.Namespace, source: Source) -> int:
    """Show the first prompts, and return the exit status."""
    if not source.batch:
        check_columns(args.template, source)
    if args.url is not None:
        show = partial(show_call, _calls(args, source, args.seed))
    else:
        model = load_tokenizer(args.model, args.revision, args.tokenizer, **given(args, TOKENIZER_OPTIONS))
        params = SamplingParams(**given(args, PARAMETERS))
        show = partial(show_request, _ask(args, source.batch, args.seed or 0, model, params), model.tokenizer)
    return show_prompts(show, source.rows(()), args.limit, source.total)


def _load(args: argparse.Namespace) -> Generator:
    from fastgen.generator import Generator  # importing torch takes seconds

    return Generator(args.model, **given(args, GENERATOR))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 done (rows may have errors), 1 error, 2 wrong options, 3 done but
    all rows failed, 130 Ctrl-C or SIGTERM, 141 closed stdout."""
    args = read_arguments(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored, as in `fggen &`
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    return run_tool("fggen", args.verbose, lambda: run(args), make_parser().in_flags)


if __name__ == "__main__":
    sys.exit(main())
