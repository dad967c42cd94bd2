"""The options of fgserve: flags, environment variables and a YAML file, of which the former go before the latter."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from fastgen import __version__

BUNDLED = "fastgen-tiny"  # what clients call the bundled model
PREFIX = "FASTGEN_"

Value = str | int | float | bool


@dataclass(frozen=True)
class ServerOptions:
    """Times in seconds. max_queued_requests, max_queued_tokens: of each model, prompts and their tokens that have come
    and have no first token yet. request_timeout: None for no end."""

    host: str = "127.0.0.1"
    port: int = 5678
    api_key: str | None = None
    max_queued_requests: int = 4096
    max_queued_tokens: int = 8_000_000
    max_body_mb: float = 8.0
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    stall_timeout: float = 60.0
    restart: bool = True
    verbose: bool = False


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


@dataclass(frozen=True)
class Option:
    """One option: its flag, variable and key have the same name. low, high: of a number, low excluded if `above`."""

    name: str
    kind: type[Value]
    help: str
    default: str = ""
    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def read(self, text: str) -> Value:
        """The value that a text says. Raises ValueError, whose message goes on where the option's name ends."""
        if self.kind is str:
            if not text:
                raise ValueError("is empty; give it a value, or leave it out")
            return text
        if self.kind is bool:
            if text.lower() in ("1", "true", "yes", "on"):
                return True
            if text.lower() in ("0", "false", "no", "off"):
                return False
            raise ValueError(f"is {text!r}; it must be true or false")
        try:
            value: int | float = int(text) if self.kind is int else float(text)
        except ValueError:
            whole = "whole " if self.kind is int else ""
            raise ValueError(f"is {text!r}; it must be a {whole}number") from None
        if not self.low <= value <= self.high or not math.isfinite(value) or (self.above and value == self.low):
            least = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
            most = f" and at most {self.high:g}" if self.high < math.inf else ""
            raise ValueError(f"is {text}; it must be {least}{most}")
        return value

    def read_yaml(self, value: Any) -> Value:
        """The same of a value in the YAML file."""
        if self.kind is str and not isinstance(value, str):
            raise ValueError(f"is {value!r}; it must be a string, so put it in quotes")
        if not isinstance(value, str | int | float):
            raise ValueError(f"is {value!r}; it must be a single value")
        return self.read(str(value))


SERVER = (
    Option("host", str, "address to listen at; 0.0.0.0 is all of this machine's", "127.0.0.1"),
    Option("port", int, "0 takes a free one", "5678", low=0, high=65535),
    Option("api_key", str, "what clients have to send as their key", "none is needed"),
    Option("max_queued_requests", int, "prompts of a model that may wait for their first token", "4096", low=1),
    Option("max_queued_tokens", int, "tokens of such prompts", "8000000", low=1),
    Option("max_body_mb", float, "size of a request, in 10^6 bytes", "8", low=0, above=True),
    Option("request_timeout", float, "seconds that a request may take", "no end", low=0, above=True),
    Option("shutdown_timeout", float, "seconds that running requests have to finish after a SIGTERM", "30", low=0),
    Option("stall_timeout", float, "seconds without a step, with work to do, after which /health is 503", "60", low=0,
           above=True),
    Option("restart", bool, "start an engine that has died again, once", "true"),
    Option("verbose", bool, "log what happens", "false"),
)  # fmt: skip

MODEL = (
    Option("tensor_parallel", int, "GPUs that hold a model together", "1", low=1),
    Option("revision", str, "of a hub id"),
    Option("tokenizer", str, "folder or hub id of another tokenizer", "the model's own"),
    Option("dtype", str, "auto, bfloat16, float16 or float32", "auto"),
    Option("device", str, "cpu, cuda, cuda:1, ...", "a GPU if there is one"),
    Option("max_model_len", int, "tokens of prompt and answer together", "the model's", low=1),
    Option("max_seqs", int, "sequences that run at a time", "as suits the device", low=1),
    Option("max_step_tokens", int, "tokens that one step computes", "as suits the device", low=1),
    Option("page_size", int, "tokens of a page of the KV cache", "64", low=1),
    Option("num_pages", int, "pages of the KV cache", "what the memory holds", low=2),
    Option("kv_cache_gb", float, "size of the KV cache, in 10^9 bytes", "what the memory holds", low=0, above=True),
    Option("memory_fraction", float, "share of the GPU's free memory", "0.9, split among its models", low=0, high=1,
           above=True),
    Option("prefix_cache", bool, "keep the KV of prompts for those that begin alike", "true"),
    Option("host_cache_gb", float, "the host's memory for KV that the GPU has no room for, in 10^9 bytes", "0", low=0),
    Option("attention", str, "auto, flash, paged or reference", "auto"),
    Option("load", str, "auto, or dummy for random weights", "auto"),
    Option("seed", int, "the same requests then get the same answers", "other ones every time"),
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
        entries = _entries(args.model, environment, file)
        given = {name: value for name, value in vars(args).items() if name in TABLE and value is not None}
        return _resolve({**_from_environment(environment), **given}, file, entries)
    except (ValueError, OSError) as error:
        parser.error(str(error))


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
            help = f"{option.help} [{option.variable}, {option.name}{default}]".replace("%", "%%")
            if option.kind is bool:
                group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=help)
            else:
                group.add_argument(option.flag, type=_reader(option), help=help, metavar=option.kind.__name__.upper())
    parser.add_argument("--version", action="version", version=f"fgserve {__version__}")
    return parser


def _reader(option: Option) -> Any:
    def read(text: str) -> Value:
        try:
            return option.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


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
        beside = [other for other, options in enumerate(models) if _gpus(options) & _gpus(model)]
        if len(beside) > 1 and not model.generator.keys() & {"memory_fraction", "num_pages", "kv_cache_gb"}:
            now, again = (0.9 / (len(beside) - 0.9 * before) for before in (beside.index(place), len(beside) - 1))
            model = replace(
                model,
                generator={**model.generator, "memory_fraction": now},
                again={"memory_fraction": again},
            )
        shared.append(model)
    return shared


def _gpus(model: ModelOptions) -> set[int]:
    """The GPUs that a model will use, where there are some."""
    kind, _, number = str(model.generator.get("device", "cuda")).partition(":")
    if kind == "cpu":
        return set()
    first = int(number) if number.isdecimal() else 0
    return set(range(first, first + int(model.generator.get("tensor_parallel", 1))))
