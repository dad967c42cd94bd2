"""Options that several of the command-line tools have: what they mean, and how they are read from a text."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

BUNDLED = "fastgen-tiny"  # what the bundled model is called
PREFIX = "FASTGEN_"

Value = str | int | float | bool


@dataclass(frozen=True)
class Option:
    """One option: its flag, variable and key have the same name. default: in words. low, high: of a number, low
    excluded if `above`."""

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
    Option("memory_fraction", float, "share of the GPU's free memory; several models split it", "0.9", low=0, high=1,
           above=True),
    Option("prefix_cache", bool, "keep the KV of prompts for those that begin alike", "true"),
    Option("host_cache_gb", float, "the host's memory for KV that the GPU has no room for, in 10^9 bytes", "0", low=0),
    Option("attention", str, "auto, flash, paged or reference", "auto"),
    Option("deterministic", bool, "no bit of an answer depends on what else is asked",
           "on the CPU and on one H100 or H200"),
    Option("load", str, "auto, or dummy for random weights", "auto"),
    Option("seed", int, "the same requests then get the same answers", "other ones every time"),
)  # fmt: skip


def add_flag(group: argparse._ActionsContainer, option: Option, help: str) -> None:
    """Make a flag of an option; it is None where it is not given."""
    help = help.replace("%", "%%")
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=help)
    else:
        group.add_argument(option.flag, type=_reader(option), help=help, metavar=option.kind.__name__.upper())


def _reader(option: Option) -> Any:
    def read(text: str) -> Value:
        try:
            return option.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
