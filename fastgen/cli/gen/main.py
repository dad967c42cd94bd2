"""fggen: the command."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fastgen import __version__
from fastgen.cli.extras import needed
from fastgen.cli.gen.outputs import Indices, InOrder, Lines, Output, Parts, begin, parquet_schema
from fastgen.cli.gen.rows import PARQUET, SUFFIXES, Source
from fastgen.cli.gen.work import (
    PARAMS,
    PROMPTS,
    Done,
    Job,
    RowJob,
    Template,
    Work,
    added_columns,
    check_added,
    check_samples,
    work,
)
from fastgen.cli.options import BUNDLED, MODEL, SAMPLING, add_flag, flag
from fastgen.cli.signals import leave
from fastgen.cli.speakers import Interrupt
from fastgen.engine.options import Option
from fastgen.request import SamplingParams

if TYPE_CHECKING:
    from fastgen.generator import Generator

GENERATOR = {name: option for name, option in MODEL.items() if name != "seed"}  # rows have seeds of their own
SAME = ("revision", "tokenizer", "dtype", "max_model_len", "load")  # of GENERATOR, that make it another job
ROWS_ONLY = ("n", "template", "chat", "logprobs", "prefix")  # what a body of a batch says, or has no place for

RAY = (
    Option("ray_address", str, help="cluster to join, instead of starting Ray here", unset="RAY_ADDRESS, if it is set"),
    Option("replicas", int, help="Generators, each an actor of Ray", unset="as many as its GPUs are for, or 1", low=1),
    Option("replica_cpus", float, help="CPUs of a replica; less than 1 shares one", unset="1", low=0),
)

LOG_SECONDS = 30.0  # between two states of the bar, where it is not on a terminal


class StrictError(ValueError):
    """A row can not be done, and --strict says to stop then."""


@dataclass
class Tally:
    """What a run has done. errors: rows that are; prompt_tokens, tokens: in and out."""

    rows: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, done: Done) -> None:
        self.rows += 1
        self.errors += done.error is not None
        self.prompt_tokens += done.prompt_tokens
        self.tokens += done.tokens

    @property
    def rate(self) -> str:
        return f"{self.tokens / max(time.perf_counter() - self.started, 1e-9):.1f} tok/s"

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.started
        said = f"{self.rows} rows in {seconds:.1f} s, {self.errors} of them errors"
        return f"{said}; {self.prompt_tokens} tokens in, {self.tokens} out, {self.rate}"


def write_all(done_rows: Work, output: Output | InOrder, bar: tqdm[Any], strict: bool = False) -> tuple[Tally, bool]:
    """Write what comes of the work on rows; (what was done, whether Ctrl-C has ended it).

    Ctrl-C ends what the engine does at once, and never cuts a record. Raises StrictError for a row that fails.
    """
    tally = Tally()
    with Interrupt() as interrupt, closing(done_rows) as all_done:
        try:
            while (done := interrupt.call(lambda: next(all_done, None))) is not None:
                if strict and done.error is not None:
                    raise StrictError(f"row {done.index}: {done.error}; without --strict it is written as an error")
                output.write(done.index, done.record)
                tally.add(done)
                bar.set_postfix_str(f"{tally.rate}, {tally.errors} errors", refresh=False)
                bar.update()
        except KeyboardInterrupt:
            pass
        return tally, interrupt.asked


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises ValueError or OSError for what can not be done."""
    template = None if args.template is None else Template(args.template)
    path = Path(args.output)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"the suffix of {path} says no format; it must be one of {', '.join(SUFFIXES)}")
    if re.fullmatch(r"\w*", args.prefix, re.ASCII) is None:
        raise ValueError(f"--prefix is {args.prefix!r}; it may have letters, digits and _")
    args.ray = args.ray or args.ray_address is not None
    for option in RAY:
        if not args.ray and getattr(args, option.name) is not None:
            raise ValueError(f"{flag(option.name)} is for work on Ray; give --ray too, or leave it out")
    source = Source(args.inputs, path)
    if args.ray and source.total is None:
        raise ValueError("what comes by stdin can not be read by Ray; write it to a file, or leave --ray out")
    output = _output(args, path, source)
    begun = output.open()
    try:
        done, seed = begin(output, begun, {"input": source.fingerprint, "options": _identity(args)}, args.seed)
        if done:
            _say(f"{len(done)} rows are in {path} already")
        if len(done) == source.total:
            _say(f"nothing is left to do of {source.total} rows")
            return 0
        with _working(args, template, source, done, seed) as working, _bar(source.total, len(done)) as bar:
            written = InOrder(output, done) if args.ordered else output
            tally, stopped = write_all(working, written, bar, args.strict)
    finally:
        output.close()
    _say(f"{tally}; in {path}")
    if stopped:
        _say("stopped; what came by stdin can not be gone on with" if source.total is None else
             "stopped; the same command goes on from here")  # fmt: skip
    return 130 if stopped else 0


def _identity(args: argparse.Namespace) -> dict[str, Any]:
    """The options that make it another job."""
    names = ("model", *SAME, *SAMPLING, "stop", "seed", "template", "chat", "logprobs",
             "prefix", "ordered")  # fmt: skip
    given = {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None and value is not False and value != ""}


def _output(args: argparse.Namespace, path: Path, source: Source) -> Output:
    added = added_columns(args.prefix, args.logprobs)
    if source.batch:
        given = [name for name in ROWS_ONLY if getattr(args, name)]
        if given:
            raise ValueError(f"--{given[0]} is not for OpenAI's batch files, whose bodies say all; leave it out")
        if path.suffix == PARQUET:
            raise ValueError("the answers of an OpenAI batch are lines of JSON; write .jsonl")
        return Lines(path, r'\{"id": "batch_req_(\d+)",')
    check_added(added, source.columns)
    if path.suffix != PARQUET:
        return Lines(path, rf'\{{"{added[0]}": (\d+),')
    if source.total is None:
        raise ValueError("what comes by stdin can not be written as Parquet, as its types are not known; write .jsonl")
    return Parts(path, parquet_schema(source.files, added), added[0])


@contextmanager
def _working(
    args: argparse.Namespace, template: Template | None, source: Source, done: Indices, seed: int
) -> Iterator[Work]:
    """The work on the rows that are not done, in this process or on Ray."""
    if args.ray:
        make = partial(_make, args, template, source.batch, seed)
        yield needed("fastgen.cli.gen.rays", "ray", "actors of Ray").work_on_ray(args, make, source, done)
        return
    with _load(args) as gen:
        yield work(_job(args, gen, template, source.batch, seed), source.rows(done), gen.stream)


def _make(args: argparse.Namespace, template: Template | None, batch: bool, seed: int) -> tuple[Generator, Job]:
    """What does the work, in an actor of Ray."""
    gen = _generator(args)
    return gen, _job(args, gen, template, batch, seed)


def _load(args: argparse.Namespace) -> Generator:
    interruptible = signal.signal(signal.SIGINT, leave)
    try:
        gen = _generator(args)
    finally:
        signal.signal(signal.SIGINT, interruptible)
    return gen


def _generator(args: argparse.Namespace) -> Generator:
    from fastgen.generator import Generator  # seconds of importing torch: only when there is something to do

    options = {name: value for name in GENERATOR if (value := getattr(args, name)) is not None}
    return Generator(None if args.model == BUNDLED else args.model, **options)


def _job(args: argparse.Namespace, gen: Generator, template: Template | None, batch: bool, seed: int) -> Job:
    from fastgen.model.config import sampling_defaults

    params = SamplingParams(**{**sampling_defaults(gen.folder), **_sampling(args)})
    params.validate(gen.model_config.vocab_size)
    if batch:
        batches = needed("fastgen.cli.gen.batch", "serve", "OpenAI's batch files")
        job: Job = batches.BatchJob(gen, args.model, params, seed)
        return job
    if gen.tokenizer is None and not args.logprobs:
        raise ValueError("this model has no tokenizer files, so answers have no text; --logprobs gives their token ids")
    return RowJob(params, seed, template, args.chat, args.logprobs, args.prefix)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the options give."""
    return {name: value for name in (*SAMPLING, "stop") if (value := getattr(args, name)) is not None}


def _bar(total: int | None, done: int) -> tqdm[Any]:
    seconds = 0.1 if sys.stderr.isatty() else LOG_SECONDS
    return tqdm(total=total, initial=done, unit="row", mininterval=seconds, dynamic_ncols=True)


def _say(text: str) -> None:
    print(f"fggen: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: done, also where rows are errors; 1: an error, told in one line; 2: bad options; 130: Ctrl-C, or
    a SIGTERM, which is one."""
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)
    try:
        params = SamplingParams(**_sampling(args))
        params.validate(vocab_size=1)
        check_samples(params.n)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("fastgen").setLevel(logging.INFO if args.verbose else logging.WARNING)
    try:
        return run(args)
    except KeyboardInterrupt:
        _say("stopped; the same command goes on")
        return 130
    except Exception as error:
        if args.verbose:
            logging.getLogger(__name__).exception("where it happened:")
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        _say(f"error: {kind}{' '.join(str(error).split())}")
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fggen",
        description="Run files of prompts through a model. Killed at any moment and started again with the same"
        " command, it goes on: in the end there is one row of output for each row of input.",
        epilog=f"A row has one of {', '.join(PROMPTS)}, and any other columns, which are kept. Where it has columns of"
        f" these names, they go before the options: {', '.join(PARAMS)}. A row that can not be done comes back with the"
        " reason as its `error`. Files of OpenAI's batches (custom_id, body) come back as such, with the errors among"
        " the answers, as response.status_code says.",
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("model", metavar="MODEL", help=f"a hub id or a folder; {BUNDLED} is fastgen's own small model")
    option(
        "inputs", metavar="INPUT", nargs="+", help=f"files, folders or globs ({', '.join(SUFFIXES)}); - is stdin, JSONL"
    )
    option(
        "-o", "--output", required=True, metavar="OUTPUT", help="a file of JSONL, or a folder of Parquet, by its suffix"
    )
    option(
        "--template", metavar="TEXT", help="makes the prompt; {name} stands for a column (default: rows have prompts)"
    )
    option(
        "--chat", action="store_true", help="a prompt that is text is the message of a user (default: it is as it is)"
    )
    option("--ordered", action="store_true", help="write in the order of the input (default: in that of completion);"
           " rows that have to wait are done again after an interruption")  # fmt: skip
    option("--strict", action="store_true", help="stop at a row that can not be done (default: write its error)")
    logprobs_help = "write token_ids, logprobs (of what was sampled from) and raw_logprobs too (default: no)"
    option("--logprobs", action="store_true", help=logprobs_help)
    option("--prefix", metavar="TEXT", default="", help="of the names of the columns that are added (default: none)")
    group = parser.add_argument_group("sampling")
    for each in SAMPLING.values():
        add_flag(group, each)
    group.add_argument("--stop", metavar="TEXT", action="append", help="ends an answer; may be given several times")
    seed_help = (
        "rows derive theirs from it: the same command then gives the same answers (default: other ones each time)"
    )
    group.add_argument("--seed", type=int, help=seed_help)
    group = parser.add_argument_group("model")
    for each in GENERATOR.values():
        add_flag(group, each)
    group = parser.add_argument_group("Ray")
    group.add_argument("--ray", action="store_true", help="work in actors of Ray (default: in this process)")
    for each in RAY:
        add_flag(group, each)
    option("-v", "--verbose", action="store_true", help="log what happens, and show tracebacks (default: no)")
    option("--version", action="version", version=f"fggen {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
