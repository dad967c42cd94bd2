"""The options of fgserve, given as flags or as keys of a YAML file, which flags override."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fastgen.async_engine.grammars import GRAMMAR_TIMEOUT, MAX_TIMEOUT
from fastgen.cli.command import note, one_line
from fastgen.cli.options import API_KEY, MODEL, TEMPLATE, Parser, Value, add_flag, read_text, read_yaml
from fastgen.model.config import BUNDLED_NAME
from fastgen.option import Option, option, options_of

LOCAL = ("127.0.0.1", "::1", "localhost")  # addresses that can be reached only from this machine


@dataclass(frozen=True)
class ServerOptions:
    """The options of the server; ModelOptions has those of its models."""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 is all addresses of this machine")
    port: int = option(5678, "port to listen at; 0 takes a free one", low=0, high=65535)
    api_key: str | None = option(None, "API key that clients have to send", unset="no key is needed")
    page: bool = option(True, "serve a chat page at / and a page with all routes and fields at /docs")
    strict: bool = option(False, "refuse fields of OpenAI's API that have no effect here")
    ignore_unknown: bool = option(
        False, "ignore fields of requests that are not supported, and log each name once, instead of a 400"
    )
    ignore_limits: bool = option(False, "allow temperatures above 2, which OpenAI's API refuses")
    strict_max_tokens: bool = option(
        False, "refuse a request whose prompt and max_tokens exceed the context together; otherwise, its answer ends "
        "at the end of the context. /messages is never refused for this",
    )  # fmt: skip
    allow_origin: str | None = option(
        None, "origins of web pages whose scripts may use this server (CORS), separated by spaces; * allows any",
        unset="only pages of this server",
    )  # fmt: skip
    ssl_certfile: str | None = option(None, "PEM file of the certificate for HTTPS", unset="HTTP")
    ssl_keyfile: str | None = option(None, "PEM file of the certificate's key", unset="in ssl_certfile")
    max_queued_requests: int = option(
        16384, "maximum number of samples (n per prompt) per model that wait for their first token", low=1
    )
    max_queued_tokens: int = option(8_000_000, "maximum number of prompt tokens of waiting samples", low=1)
    max_body_mb: float = option(8.0, "maximum size of a request, in 10^6 bytes", low=0, high=1e6, above=True)
    request_timeout: float | None = option(
        None, "maximum time of a request, in seconds", unset="no limit", low=0, above=True
    )
    read_timeout: float = option(
        60.0, "seconds to wait for the head of a request, or for more of its body, before its connection is closed",
        low=0, above=True,
    )  # fmt: skip
    grammar_timeout: float = option(
        GRAMMAR_TIMEOUT,
        "maximum CPU time to compile a schema, in seconds; a slower one is answered with a 400",
        low=0,
        high=MAX_TIMEOUT,
        above=True,
    )
    shutdown_timeout: float = option(30.0, "time for running requests to finish after a SIGTERM, in seconds", low=0)
    stall_timeout: float = option(
        60.0, "seconds without a step, while there is work, after which /health is 503", low=0, above=True
    )
    restart: bool = option(True, "restart an engine that has died (only once)")
    access_log: bool = option(True, "log one line per request, without its text")
    log_interval: float = option(
        10.0, "seconds between lines with the throughput, which an idle server does not log; 0 logs none", low=0
    )
    verbose: bool = option(False, "log what the engines do, and tracebacks")
    rollout: bool = option(
        False,
        "serve routes for a trainer: new weights, pause and sleep. Those of vLLM and SGLang, for trainers written for "
        "these, are experimental. An engine that dies is restarted only with replicas, which each have their own "
        "address for the trainer",
    )
    logprobs_mode: str = option(
        "raw_logprobs", "logprobs that requests get by default: under the model's own softmax, under the distribution "
        "that was sampled from, or under it without truncation; TRL wants processed_logprobs",
        choices=("raw_logprobs", "processed_logprobs", "untruncated_logprobs"),
    )  # fmt: skip
    replicas: int | None = option(
        None, "number of servers that share one address, run by Ray Serve", unset="one server, without Ray", low=1
    )
    max_replicas: int | None = option(
        None, "maximum number of replicas under load", unset="the value of replicas", low=1
    )
    replica_requests: float = option(
        32.0, "number of running requests per replica above which another replica is started", low=0, above=True
    )
    replica_cpus: float = option(1.0, "CPUs per replica; with less than 1, replicas share a CPU", low=0)
    replica_gpus: float | None = option(None, "GPUs per replica", unset="as many as its models use", low=0)

    def __post_init__(self) -> None:
        if (self.replicas or 1) > (self.max_replicas or self.replicas or 1):
            raise ValueError(f"max_replicas is {self.max_replicas}, and replicas is {self.replicas}, which is more")
        if self.ssl_certfile and (self.replicas or self.max_replicas):
            raise ValueError(
                "ssl_certfile has no effect on replicas, which Ray serves over HTTP; leave one of them out"
            )
        if self.rollout and self.max_replicas not in (None, self.replicas):
            raise ValueError("rollout needs a fixed number of replicas, which it updates; leave out max_replicas")
        if self.api_key is not None and not re.fullmatch(r"(?!\s)[^\x00-\x1f\x7f]+(?<!\s)", self.api_key):
            raise ValueError("api_key is empty, or has white space at an end or control characters; give another one")
        if self.rollout and self.api_key is None and self.host not in LOCAL:
            raise ValueError(f"rollout is on, and lets clients replace the weights; at {self.host} it needs api_key")
        for origin in self.origins:
            if not re.fullmatch(r"\*|null|[^/]+://[^/]+", origin):
                raise ValueError(f"allow_origin has {origin!r}; an origin is a scheme and a host: https://page.example")

    @property
    def origins(self) -> list[str]:
        """The single origins of `allow_origin`."""
        return [origin.rstrip("/") for origin in (self.allow_origin or "").split()]

    def url(self, port: int) -> str:
        """Return the URL of the server. port: the actual port, which may be another one if the option `port` is 0."""
        return f"http{'s' if self.ssl_certfile else ''}://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"


def note_address(options: ServerOptions, port: int) -> None:
    """Print the URLs of the server and of its chat page on stderr. port: as in `ServerOptions.url`."""
    note("fgserve", f"listening at {options.url(port)}")
    if options.page:
        note("fgserve", f"chat page: {options.url(port)}/")


@dataclass(frozen=True)
class ModelOptions:
    """A model to serve.

    name: its name for clients. model: its folder or hub id; None for the bundled model. generator: arguments of its
    Generator. chat_template: text of a template that replaces the tokenizer's own. again: arguments that replace those
    of `generator` when the engine is restarted, while all other models run.
    """

    name: str
    model: str | None
    generator: Mapping[str, Any]
    chat_template: str | None = None
    again: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServeOptions:
    server: ServerOptions
    models: tuple[ModelOptions, ...]


SERVER = options_of(ServerOptions)
NAME = Option("served_model_name", str, None, "name of the model for clients", unset="its hub id or folder")
SERVED = {NAME.name: NAME, TEMPLATE.name: TEMPLATE, **MODEL}
"""The options of each model."""

TABLE = SERVER | SERVED


def read_options(argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> ServeOptions:
    """Return the options of a command line. Wrong options end the program with a message, as in argparse."""
    parser = make_parser()
    args = parser.parse_args(argv)
    given = {name: value for name, value in vars(args).items() if name in TABLE and value is not None}
    try:
        file = _read_file(Path(args.config)) if args.config else {}
        return make_options(file, os.environ if environment is None else environment, args.model, given, args.config)
    except (ValueError, OSError) as error:
        parser.error(one_line(error))


def make_options(
    file: Mapping[str, Any],
    environment: Mapping[str, str],
    models: Sequence[str] = (),
    given: Mapping[str, Value] | None = None,
    path: str | None = None,
) -> ServeOptions:
    """Return the options.

    file: content of the YAML file at `path`. environment: environment variables, of which API_KEY is read; it overrides
    the file. models, given: models and flags of the command line, which override both.

    Raises ValueError for a wrong option, and OSError if the file of a chat template cannot be read.
    """
    file, where = dict(file), f"{path or 'the file'}: "
    entries = _entries(models, file.pop("models", None) or [], where)
    key = {name: value for name, value in environment.items() if name == API_KEY}
    given = {**_read(key, {API_KEY: SERVER["api_key"]}), **(given or {})}
    settings = {**_read(file, TABLE, where), **given}
    server = ServerOptions(**{name: settings[name] for name in SERVER if name in settings})  # type: ignore[arg-type]
    entry_options = {"model": Option("model", str), "name": NAME, **SERVED}
    served: list[ModelOptions] = []
    for place, entry in enumerate(entries):
        own = _read(entry, entry_options, f"{where}models[{place}]: ")
        model = str(own["model"]) if "model" in own else None
        chosen = {**settings, **own, **given}
        name = str(chosen.get(NAME.name, BUNDLED_NAME if model is None else model))
        if any(other.name == name for other in served):
            advice = "another name" if path else "another name in a file of --config"
            raise ValueError(f"two models are called {name!r}; give one of them {advice}")
        template = read_text(TEMPLATE.name, Path(str(chosen[TEMPLATE.name]))) if TEMPLATE.name in chosen else None
        served.append(ModelOptions(name, model, {key: chosen[key] for key in MODEL if key in chosen}, template))
    return ServeOptions(server, tuple(_share_memory(served)))


def make_parser() -> Parser:
    parser = Parser(
        prog="fgserve",
        usage="fgserve [MODEL ...] [options]",
        description="Serve models over HTTP with OpenAI's and Anthropic's APIs.",
        epilog="Each option is a flag, such as --max-seqs, and a key of the YAML file, such as max_seqs; flags "
        "override the file. In the file, an entry of `models` may be a mapping with `model`, `name` (for clients) and "
        f"options that apply only to this model. The API key can also be given by the environment variable {API_KEY}.",
        examples={
            "fgserve Qwen/Qwen3-8B --max-model-len 16384": "serve one model to this machine",
            "fgserve --host 0.0.0.0 --api-key KEY": "serve the bundled model to the network",
        },
    )
    parser.add_argument("model", nargs="*", metavar="MODEL", help=f"hub ids or folders (default: {BUNDLED_NAME})")
    parser.add_argument("--config", metavar="FILE", help="a YAML file (default: none)")
    for title, options in (("server", SERVER), ("models", SERVED)):
        group = parser.add_argument_group(title)
        for each in options.values():
            add_flag(group, each)
    return parser


def _read_file(path: Path) -> dict[str, Any]:
    text = read_text("config", path)
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # also of dates and numbers
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        else:
            reason = str(error)
        raise ValueError(f"{path} is not YAML: {reason}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"{path} must be a mapping of options")
    return data


def _read(data: Mapping[str, Any], options: Mapping[str, Option], where: str = "") -> dict[str, Value]:
    """Return the values of a mapping by option name. where: where the mapping comes from, for error messages."""
    values = {}
    for name, value in data.items():
        if name not in options:
            raise ValueError(f"{where}there is no option {name!r}; the options are {', '.join(options)}")
        if value is not None or name == "api_key":
            try:
                values[options[name].name] = read_yaml(options[name], "" if value is None else value)
            except ValueError as error:
                raise ValueError(f"{where}{name} {error}") from None
    return values


def _entries(given: Sequence[str], listed: Any, where: str) -> list[dict[str, Any]]:
    """Return the models to serve, as mappings like those of the file. listed: `models` of the file. where: begins error
    messages."""
    if not isinstance(listed, list):
        raise ValueError(f"{where}models must be a list")
    if not all(isinstance(entry, str | dict) for entry in listed):
        raise ValueError(f"{where}models must hold names, or mappings with a model each")
    named = list(given) or listed
    return [{"model": entry} if isinstance(entry, str) else dict(entry) for entry in named] or [{}]


def _share_memory(models: Sequence[ModelOptions]) -> list[ModelOptions]:
    """Split the free memory of each GPU evenly among its models.

    The models start one after another, so an equal part for a later model is a larger share of the memory that is left.
    A restarted model finds as much free memory as the last model did, so it takes the last model's share.
    """
    shared = []
    for place, model in enumerate(models):
        sharing = [other for other, options in enumerate(models) if gpus(options) & gpus(model)]
        if len(sharing) > 1 and not model.generator.keys() & {"memory_fraction", "num_pages", "kv_cache_gb"}:
            now, again = (0.9 / (len(sharing) - 0.9 * before) for before in (sharing.index(place), len(sharing) - 1))
            model = replace(
                model,
                generator={**model.generator, "memory_fraction": now},
                again={"memory_fraction": again},
            )
        shared.append(model)
    return shared


def gpus(model: ModelOptions) -> set[int]:
    """Return the indices of the GPUs that a model would use; none on the CPU."""
    kind, _, number = str(model.generator.get("device", "cuda")).partition(":")
    if kind == "cpu":
        return set()
    first = int(number) if number.isdecimal() else 0
    return set(range(first, first + int(model.generator.get("tensor_parallel", 1))))
