"""The options of fgserve: flags, environment variables and a YAML file, of which the former go before the latter."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from fastgen import __version__
from fastgen.cli.options import BUNDLED, MODEL, PREFIX, Option, Value, add_flag


@dataclass(frozen=True)
class ServerOptions:
    """Times in seconds. max_queued_requests, max_queued_tokens: of each model, samples (n for each prompt) whose
    prompts have come and have no first token yet, and the tokens of these. request_timeout: None for no end. replicas,
    max_replicas: the least and the most; None and None for one without Ray. replica_requests: under way at each, on
    average, that call for another replica. replica_gpus: None for those of its models, where Ray has GPUs."""

    host: str = "127.0.0.1"
    port: int = 5678
    api_key: str | None = None
    max_queued_requests: int = 16384
    max_queued_tokens: int = 8_000_000
    max_body_mb: float = 8.0
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    stall_timeout: float = 60.0
    restart: bool = True
    verbose: bool = False
    replicas: int | None = None
    max_replicas: int | None = None
    replica_requests: float = 32.0
    replica_cpus: float = 1.0
    replica_gpus: float | None = None


@dataclass(frozen=True)
class ModelOptions:
    """One model: what clients call it, and the arguments of its Generator; model: None for the bundled one.

    again: those that are others where it is started again, beside all models.
    """

    name: str
    model: str | None
    generator: Mapping[str, Any]
    again: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    server: ServerOptions
    models: tuple[ModelOptions, ...]


SERVER = (
    Option("host", str, "address to listen at; 0.0.0.0 is all of this machine's", "127.0.0.1"),
    Option("port", int, "0 takes a free one", "5678", low=0, high=65535),
    Option("api_key", str, "what clients have to send as their key", "none is needed"),
    Option("max_queued_requests", int, "samples (n a prompt) of a model that may wait for their first token", "16384",
           low=1),
    Option("max_queued_tokens", int, "tokens of their prompts", "8000000", low=1),
    Option("max_body_mb", float, "size of a request, in 10^6 bytes", "8", low=0, above=True),
    Option("request_timeout", float, "seconds that a request may take", "no end", low=0, above=True),
    Option("shutdown_timeout", float, "seconds that running requests have to finish after a SIGTERM", "30", low=0),
    Option("stall_timeout", float, "seconds without a step, with work to do, after which /health is 503", "60", low=0,
           above=True),
    Option("restart", bool, "start an engine that has died again, once", "true"),
    Option("verbose", bool, "log what happens", "false"),
    Option("replicas", int, "servers like this one behind one address, by Ray Serve", "this one, without Ray", low=1),
    Option("max_replicas", int, "as many as there may be under load", "no more", low=1),
    Option("replica_requests", float, "requests under way at a replica that call for another", "32", low=0, above=True),
    Option("replica_cpus", float, "CPUs of a replica; less than 1 shares one", "1", low=0),
    Option("replica_gpus", float, "GPUs of a replica", "its models' own", low=0),
)  # fmt: skip

TABLE = {option.name: option for option in (*SERVER, *MODEL)}


def read_options(argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> Options:
    """The options of a command line. Ends the program, as argparse does, with a message for what is wrong."""
    environment = os.environ if environment is None else environment
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        path = args.config or environment.get(PREFIX + "CONFIG")
        file = _read_file(Path(path)) if path else {}
        given = {name: value for name, value in vars(args).items() if name in TABLE and value is not None}
        return make_options(file, environment, args.model, given)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def make_options(
    file: Mapping[str, Any],
    environment: Mapping[str, str],
    models: Sequence[str] = (),
    given: Mapping[str, Value] | None = None,
) -> Options:
    """The options of a file that has been read, of variables, and of flags: those `given`, and `models`. Raises
    ValueError."""
    file = dict(file)
    entries = _entries(models, environment, file)
    return _resolve({**_from_environment(environment), **(given or {})}, file, entries)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fgserve",
        description="Serve models over HTTP, in the manner of OpenAI's API.",
        epilog="Each option is a flag, an environment variable and a key of the YAML file; the former go before the "
        "latter. In the file, an entry of `models` may be a mapping of `model`, `name` (what clients call it) and any "
        "of the options of models, which then hold for that one.",
        allow_abbrev=False,
    )
    models_help = f"hub ids or folders [{PREFIX}MODELS, separated by spaces; models: the bundled one]"
    parser.add_argument("model", nargs="*", metavar="MODEL", help=models_help)
    parser.add_argument("--config", metavar="FILE", help=f"a YAML file [{PREFIX}CONFIG]")
    for title, options in (("server", SERVER), ("models", MODEL)):
        group = parser.add_argument_group(title)
        for option in options:
            default = f": {option.default}" if option.default else ""
            add_flag(group, option, f"{option.help} [{option.variable}, {option.name}{default}]")
    parser.add_argument("--version", action="version", version=f"fgserve {__version__}")
    return parser


def _from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    found = {}
    for option in TABLE.values():
        if text := environment.get(option.variable):
            try:
                found[option.name] = option.read(text)
            except ValueError as error:
                raise ValueError(f"{option.variable} {error}") from None
    return found


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"{path} must be a mapping of options")
    return data


def _from_yaml(data: Mapping[str, Any], known: Mapping[str, Option], where: str) -> dict[str, Value]:
    found = {}
    for name, value in data.items():
        if name not in known:
            raise ValueError(f"{where}: {name!r} is no option; there are {', '.join(known)}")
        if value is not None:
            try:
                found[name] = known[name].read_yaml(value)
            except ValueError as error:
                raise ValueError(f"{where}: {name} {error}") from None
    return found


def _entries(given: Sequence[str], environment: Mapping[str, str], file: dict[str, Any]) -> list[dict[str, Any]]:
    """The models that are to be served, as mappings of the file; takes them out of it."""
    listed = file.pop("models", None) or []
    if not isinstance(listed, list):
        raise ValueError("models of the file must be a list")
    if not all(isinstance(entry, str | dict) for entry in listed):
        raise ValueError("models of the file must be names, or mappings with a model each")
    named = list(given) or environment.get(PREFIX + "MODELS", "").split() or listed
    return [{"model": entry} if isinstance(entry, str) else dict(entry) for entry in named] or [{}]


def _resolve(given: Mapping[str, Value], file: Mapping[str, Any], entries: Sequence[dict[str, Any]]) -> Options:
    """given: by flags and variables. entries: of `models`."""
    settings = {**_from_yaml(file, TABLE, "the file"), **given}
    server = ServerOptions(**{field.name: settings[field.name] for field in fields(ServerOptions)
                              if field.name in settings})  # type: ignore[arg-type]  # fmt: skip
    known = {option.name: option for option in MODEL}
    texts = {name: Option(name, str, "") for name in ("model", "name")}
    models: list[ModelOptions] = []
    for place, entry in enumerate(entries):
        own = _from_yaml(entry, {**texts, **known}, f"models[{place}]")
        model = None if "model" not in own else str(own["model"])
        name = str(own.get("name", BUNDLED if model is None else model))
        if any(other.name == name for other in models):
            raise ValueError(f"two models are called {name!r}; give one of them another name in the file")
        chosen = {**settings, **own, **given}
        models.append(ModelOptions(name, model, {key: chosen[key] for key in known if key in chosen}))
    return Options(server, tuple(_share_memory(models)))


def _share_memory(models: Sequence[ModelOptions]) -> list[ModelOptions]:
    """Split what is free of a GPU among its models. They start one after another, so a later one's part is a larger
    share of what it finds, and one that is started again has the last one's."""
    shared = []
    for place, model in enumerate(models):
        beside = [other for other, options in enumerate(models) if gpus(options) & gpus(model)]
        if len(beside) > 1 and not model.generator.keys() & {"memory_fraction", "num_pages", "kv_cache_gb"}:
            now, again = (0.9 / (len(beside) - 0.9 * before) for before in (beside.index(place), len(beside) - 1))
            model = replace(
                model,
                generator={**model.generator, "memory_fraction": now},
                again={"memory_fraction": again},
            )
        shared.append(model)
    return shared


def gpus(model: ModelOptions) -> set[int]:
    """The GPUs that a model will use, where there are some."""
    kind, _, number = str(model.generator.get("device", "cuda")).partition(":")
    if kind == "cpu":
        return set()
    first = int(number) if number.isdecimal() else 0
    return set(range(first, first + int(model.generator.get("tensor_parallel", 1))))
