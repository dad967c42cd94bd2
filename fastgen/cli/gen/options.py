"""The options of fggen."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastgen.cli.command import UsageError
from fastgen.cli.gen.rows import SUFFIXES, format_of
from fastgen.cli.gen.work import PARAMS, PROMPTS
from fastgen.cli.options import API_KEY, MODEL, SAMPLING, Parser, add_flag, api_url, flag, given
from fastgen.model.config import BUNDLED_NAME
from fastgen.option import Option
from fastgen.request import SamplingParams

GENERATOR = {name: option for name, option in MODEL.items() if name != "seed"}  # each row has its own seed
STRUCTURE_FLAGS = ("json_schema", "regex", "choice")
PARAMETERS = (*SAMPLING, "stop", "repetition_detection", *STRUCTURE_FLAGS)
# Options of GENERATOR that are part of the identity of a job.
SAME = (
    "revision", "tokenizer", "allow_special_tokens", "reasoning_parser", "tool_call_parser", "adapter", "dtype",
    "quantization", "kv_cache_dtype", "max_model_len", "load", "generation_config",
)  # fmt: skip
RETRIED = (*PARAMETERS, "max_model_len", "generation_config")  # may change with --retry-errors
# Options that do not apply to batch files.
ROWS_ONLY = ("n", "template", "system", "chat", "logprobs", "prefix", *STRUCTURE_FLAGS)

RAY = (
    Option("replicas", int, help="Generators, each in a Ray actor", unset="as many as fit on the GPUs, or 1", low=1),
    Option("replica_cpus", float, help="CPUs per replica; with less than 1, replicas share a CPU", unset="1", low=0),
)
DATA_PARALLEL = Option(
    "data_parallel", int, help="Generators, each in a separate process on --tensor-parallel GPUs of this machine",
    unset="1", low=1,
)  # fmt: skip
LIMIT = Option(
    "limit", int, help="work on the first rows only; a later run may have a higher limit", unset="all", low=1
)
CONCURRENCY = Option("concurrency", int, default=64, help="requests to --url at a time", low=1)
PRIORITY = Option("priority", int, help="priority of requests to --url; above 0, others' requests go first", unset="0")

SWITCHES = {
    "chat": "send text prompts as the message of a user (default: as plain text)",
    "ordered": "write rows in input order; after an interruption, finished rows that were not written are done again"
    " (default: in the order of completion)",
    "retry_errors": "do failed rows of the output again; sampling options and --max-model-len may change (default: keep"
    " their errors)",
    "strict": "stop at the first row that fails (default: write its error)",
    "dry_run": "print the rendered prompts of the first rows (3, or --limit) and their numbers of tokens; only the"
    " tokenizer is loaded, and no -o is needed (default: off)",
    "logprobs": "also write token_ids, logprobs (of the distribution that was sampled from) and raw_logprobs"
    " (default: off)",
}
SEED = Option("seed", int, help="seed of the job; rows without a seed get one derived from it", unset="a random one")
STDOUT = "-"


def make_parser() -> Parser:
    parser = Parser(
        prog="fggen",
        usage="fggen MODEL INPUT [INPUT ...] -o OUTPUT [options]",
        description="Run files of prompts through a model. A job that was killed continues when the same command is"
        " started again: in the end there is exactly one output row for each input row.",
        epilog=f"A row has one of {', '.join(PROMPTS)}, and any other columns, which are kept. Columns with these names"
        f" override the options: {', '.join(PARAMS)}. The `error` of a failed row is the reason. OpenAI batch files"
        " (custom_id, body) are answered in OpenAI's own format, errors included (see response.status_code). Exit"
        " status: 0 done, 1 error, 2 wrong options or a template column that no row has, 3 all rows failed, 130"
        " Ctrl-C.",
        examples={
            f"fggen {BUNDLED_NAME} prompts.jsonl -o answers.jsonl --chat": "answer each prompt",
            'fggen Qwen/Qwen3-8B notes.csv -o sums.csv --template "Summarize: {text}"': "fill a prompt from columns",
        },
    )
    option = parser.add_argument
    suffixes = ", ".join(SUFFIXES)
    model_help = f"a hub id or a folder; {BUNDLED_NAME} is fastgen's own model; with --url, its name on the server"
    option("model", metavar="MODEL", help=model_help)
    option("inputs", metavar="INPUT", nargs="*", help=f"files, folders or globs ({suffixes}); - is JSONL on stdin")
    output_help = "JSONL or CSV file, or folder of Parquet files, depending on the suffix; - is JSONL on stdout"
    option("-o", "--output", metavar="OUTPUT", help=output_help)
    template_help = "template of the prompt, in which {name} stands for a column (default: rows have prompts)"
    option("--template", metavar="TEXT", help=template_help)
    system_help = "system prompt; text prompts are then sent as with --chat (default: none)"
    option("--system", metavar="TEXT", help=system_help)
    add_flag(parser, LIMIT)
    for name, text in SWITCHES.items():
        option(flag(name), action="store_true", help=text)
    option("--prefix", metavar="TEXT", default="", help="prefix for the names of added columns (default: none)")
    group = parser.add_argument_group("sampling")
    for each in (*SAMPLING.values(), SEED):
        add_flag(group, each)
    stop_help = "string that ends an answer; may be given several times"
    group.add_argument("--stop", metavar="TEXT", action="append", help=stop_help)
    repetition_help = "end answers that repeat themselves; see SamplingParams.repetition_detection (default: off)"
    group.add_argument("--repetition-detection", metavar="FILE_OR_JSON", type=_object, help=repetition_help)
    schema_help = "answers are JSON of this schema (default: any text)"
    group.add_argument("--json-schema", metavar="FILE_OR_JSON", type=_object, help=schema_help)
    group.add_argument("--regex", metavar="REGEX", help="this expression matches each answer (default: any text)")
    choice_help = "each answer is one of these texts; may be given several times (default: any text)"
    group.add_argument("--choice", metavar="TEXT", nargs="+", action="extend", help=choice_help)
    group = parser.add_argument_group("model")
    for each in (*GENERATOR.values(), DATA_PARALLEL):
        add_flag(group, each)
    group = parser.add_argument_group("Ray")
    ray_help = "run in Ray actors, on this machine or the cluster at RAY_ADDRESS (default: in this process)"
    group.add_argument("--ray", action="store_true", help=ray_help)
    for each in RAY:
        add_flag(group, each)
    group = parser.add_argument_group("server")
    group.add_argument("--url", help="URL of an OpenAI-style server that has the model (default: load it here)")
    key_help = f"API key of the server (default: the environment variable {API_KEY})"
    group.add_argument("--api-key", metavar="KEY", help=key_help)
    add_flag(group, CONCURRENCY)
    add_flag(group, PRIORITY)
    option("-v", "--verbose", action="store_true", help="log what happens, and show tracebacks (default: off)")
    return parser


def _object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text, or in the file that the text names."""
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).expanduser().read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is neither JSON nor a file of JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is neither a JSON object nor a file with one")
    return value


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line. Exits with status 2 if they cannot work."""
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)
    if args.model == STDOUT or format_of(Path(args.model)):
        parser.error(f"MODEL is missing: the first argument, {args.model}, is an INPUT")
    if not args.inputs:
        parser.error(f"INPUT is missing: the only argument, {args.model}, is the MODEL")
    try:
        SamplingParams(**given(args, PARAMETERS)).validate(vocab_size=1)
        _check_place(args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    if args.output is None and not args.dry_run:
        parser.error("the following arguments are required: -o/--output")
    args.output = args.output or STDOUT
    args.chat = args.chat or args.system is not None
    args.ray = args.ray or bool(given(args, (option.name for option in RAY)))
    return args


def _check_place(args: argparse.Namespace) -> None:
    """Raise ValueError for options of a server without --url, of a model here or on Ray with it, and of both of
    these."""
    if args.data_parallel and (args.ray or given(args, (option.name for option in RAY))):
        raise ValueError("--data-parallel is for this machine, without Ray; leave it out, and give --replicas")
    if args.url is None:
        names, why = ["api_key", "concurrency", "priority"], "goes with --url"
    else:
        names, why = [*GENERATOR, *(each.name for each in (DATA_PARALLEL, *RAY))], "needs the model here, not at --url"
        names += [name for name in ("ray", "logprobs") if getattr(args, name)]
        api_url(args.url)
    if excess := list(given(args, names)):
        raise ValueError(f"{flag(excess[0])} {why}; leave it out")


def check_files(args: argparse.Namespace, path: Path) -> None:
    """Raise UsageError for inputs and outputs that cannot work. Nothing has been read yet."""
    if args.output != STDOUT and not format_of(path):
        raise UsageError(f"the suffix of {path} names no format; it must be one of {', '.join(SUFFIXES)}")
    if args.output != STDOUT and not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for {path.name}; make it, or give another -o")
    if args.output == STDOUT and args.retry_errors:
        raise UsageError("--retry-errors needs an output that can be read; give a file as -o")
    for name, what, stream in ((args.inputs[0], "stdin", sys.stdin), (args.output, "stdout", sys.stdout)):
        if name == STDOUT and stream is None:
            raise UsageError(f"- is {what}, which is closed; give a file")
