"""The hidden states of prompts: `Generator.features` and `Generator.write_features`.

Shape letters: N positions of a sequence.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastgen.disk import naming_full_disk
from fastgen.engine.loop import Loop
from fastgen.engine.outputs import OutputQueue
from fastgen.model.config import ModelConfig
from fastgen.prompt_score import Positions, PromptStates
from fastgen.request import Prompt, Request, SamplingParams
from fastgen.text.tokenizer import Tokenizer, encode_prompt

log = logging.getLogger("fastgen.generator")  # the name that users of a Generator know

# Sequences are handed to the engine until they fill so many steps, or their hidden states have so many bytes.
AHEAD_STEPS = 2
AHEAD_BYTES = 2**30


@dataclass(frozen=True)
class States:
    """The hidden states of a sequence. positions: int64 [N]. values: [layers, N, hidden]. error: the reason if there
    are none."""

    positions: Tensor
    values: Tensor
    error: Exception | None = None


def _layer_numbers(layers: int | Iterable[int], count: int, ranks: int) -> tuple[int, ...]:
    """Return indices of hidden states, from 0 to `count`, the number of layers. Raises ValueError or TypeError."""
    indices = list(layers) if isinstance(layers, Iterable) else [layers]
    if not indices or not all(isinstance(layer, Integral) for layer in indices):
        raise TypeError(f"layers must be an integer or a list of integers, not {layers!r}")
    if wrong := [layer for layer in indices if not -count - 1 <= layer <= count]:
        raise ValueError(f"there is no layer {wrong[0]}; give 0 (the embedding) to {count} (after the last norm)")
    numbers = tuple(int(layer) % (count + 1) for layer in indices)
    if ranks > 1 and min(numbers) < count:
        raise ValueError(
            "with several ranks only the states of the last layer can be read; give layers=-1, or leave "
            "tensor_parallel out"
        )
    return numbers


def with_positions(
    sequences: Iterable[Prompt], positions: Positions | Iterable[Positions]
) -> Iterator[tuple[Prompt, Positions]]:
    """Yield each sequence with its positions. positions: the same for all sequences, or one entry for each. Raises
    ValueError or TypeError for impossible positions, and ValueError for too few or too many entries."""
    if isinstance(positions, str):
        _numbers(positions, 1)
    elif isinstance(positions, Tensor):
        positions = positions.tolist()
    elif not isinstance(positions, Iterable):
        raise TypeError(f"positions must be 'all', 'last' or lists of integers, not {positions!r}")
    one = isinstance(positions, SequenceOf | np.ndarray) and all(isinstance(each, Integral) for each in positions)
    if isinstance(positions, str) or one:
        yield from zip(sequences, itertools.repeat(cast(Positions, positions)))
        return
    absent: Any = object()
    for sequence, entry in itertools.zip_longest(sequences, positions, fillvalue=absent):
        if sequence is absent or entry is absent:
            raise ValueError("give one list of positions for each sequence, or one for all")
        yield sequence, cast(Positions, entry)


class StateReader:
    """Reads hidden states through the engine of a Generator.

    layers: see `Generator.features`; as an attribute, their indices from 0 to the number of layers.
    """

    def __init__(
        self, loop: Loop, tokenizer: Tokenizer | None, model: ModelConfig, layers: int | Iterable[int]
    ) -> None:
        self.layers = _layer_numbers(layers, model.num_layers, loop.scheduler.config.tensor_parallel)
        self._loop, self._tokenizer, self._hidden = loop, tokenizer, model.hidden_size
        self._dtype: torch.dtype = getattr(torch, loop.scheduler.config.dtype)

    def read(self, pairs: Iterable[tuple[Prompt, Positions]]) -> PyGenerator[States, None, None]:
        """Yield the states of each sequence at its positions, in order. A sequence that cannot be served has an error.
        Few sequences are in memory at a time. Closing the generator aborts them."""
        queue, reading = OutputQueue(), deque[_Reading]()
        most_tokens = AHEAD_STEPS * self._loop.scheduler.config.max_step_tokens
        source, tokens, size = iter(pairs), 0, 0
        try:
            while True:
                while not reading or (tokens < most_tokens and size < AHEAD_BYTES):
                    pair = next(source, None)
                    if pair is None:
                        break
                    reading.append(self._begin(*pair, queue))
                    tokens, size = tokens + reading[-1].tokens, size + reading[-1].states.values.nbytes
                if not reading:
                    return
                first = reading.popleft()
                tokens, size = tokens - first.tokens, size - first.states.values.nbytes
                while first.id in queue.running:
                    self._loop.advance()
                queue.done.clear()
                values = torch.from_numpy(first.states.values[:, first.order]).view(self._dtype)
                yield States(torch.from_numpy(first.states.positions[first.order]), values, first.error)
        finally:
            self._loop.abort(list(queue.running))

    def _begin(self, prompt: Prompt, positions: Positions, queue: OutputQueue) -> _Reading:
        """Hand a sequence to the engine."""
        try:
            ids, _ = encode_prompt(prompt, self._tokenizer)
            unique, order = np.unique(_numbers(positions, len(ids)), return_inverse=True)
            request = Request(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
            id = self._loop.begin(request, queue, (len(ids), 1.0))
        except (ValueError, TypeError) as error:
            return _Reading(None, self._states(np.zeros(0, dtype=np.int64)), np.zeros(0, dtype=np.int64), 0, error)
        score = self._loop.active[id].samples[0].sequence.score
        assert score is not None
        score.states = states = self._states(unique)
        return _Reading(id, states, order, len(ids))

    def _states(self, positions: np.ndarray) -> PromptStates:
        shape = len(self.layers), len(positions), self._hidden
        kind = np.int16 if self._dtype.itemsize == 2 else np.float32
        return PromptStates(self.layers, positions, np.zeros(shape, dtype=kind))


@dataclass
class _Reading:
    """A sequence in the engine. order: int64 [N], the index in `states.positions` of each requested position.
    tokens: number of tokens of the sequence. id: None if there is an error."""

    id: str | int | None
    states: PromptStates
    order: np.ndarray
    tokens: int
    error: Exception | None = None


def _numbers(positions: Positions, length: int) -> np.ndarray:
    """Return positions of a sequence of `length` tokens: int64 [N]. Raises ValueError or TypeError."""
    if isinstance(positions, str):
        if positions not in ("all", "last"):
            raise ValueError(f"positions is {positions!r}; give 'all', 'last' or a list of integers")
        return np.arange(0 if positions == "all" else length - 1, length)
    if not isinstance(positions, Iterable) or not all(isinstance(each, Integral) for each in positions):
        raise TypeError(f"positions must be integers, not {positions!r}")
    if wrong := [each for each in positions if not -length <= each < length]:
        raise ValueError(f"there is no position {wrong[0]} in a sequence of {length} tokens")
    return np.array([int(each) % length for each in positions], dtype=np.int64)


class ShardWriter:
    """Writes hidden states of sequences to safetensors files in a folder; `Generator.write_features` describes them.

    layers: indices from 0. shard_bytes: number of bytes of hidden states at which a file ends. paths: the files so far.
    """

    def __init__(self, folder: str | Path, layers: tuple[int, ...], shard_bytes: int) -> None:
        if not isinstance(shard_bytes, int):
            raise TypeError(f"shard_bytes must be an integer, not {shard_bytes!r}")
        self._folder, self._layers, self._shard_bytes = Path(folder), layers, shard_bytes
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes is {shard_bytes}; it must be at least 1")
        self._folder.mkdir(parents=True, exist_ok=True)
        if any(self._folder.glob("features-*.safetensors")):
            raise ValueError(f"{folder} already has features; give a new folder, or remove its files")
        self.paths: list[Path] = []
        self._first, self._size, self._states = 0, 0, list[States]()

    def add(self, states: States) -> None:
        """Add the next sequence."""
        self._states.append(states)
        self._size += states.values.nbytes
        if self._size >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the sequences that are in no file yet."""
        if not self._states:
            return
        values = torch.cat([each.values for each in self._states], dim=1)
        counts = torch.tensor([0, *(len(each.positions) for each in self._states)], device="cpu")
        tensors = {f"layer.{number}": layer for number, layer in zip(self._layers, values, strict=True)}
        tensors |= {"offsets": counts.cumsum(0), "positions": torch.cat([each.positions for each in self._states])}
        path = self._folder / f"features-{len(self.paths):05}.safetensors"
        beside = path.with_name(f".{path.name}.tmp")  # renamed when it is complete
        with naming_full_disk(path, "make room, and write the features again"):
            save_file({name: each.contiguous() for name, each in tensors.items()}, beside, {"first": str(self._first)})
            os.replace(beside, path)
        self.paths.append(path)
        self._first, self._size, self._states = self._first + len(self._states), 0, []


def write(reader: StateReader, pairs: Iterable[tuple[Prompt, Positions]], writer: ShardWriter) -> list[Path]:
    """Write the states of sequences, and return the files. The log counts sequences that cannot be served."""
    count = failed = 0
    with closing(reader.read(pairs)) as sequences:
        for states in sequences:
            if states.error is not None:
                failed += 1
                if failed == 1:
                    log.warning("sequence %d has no features: %s; other failures are only counted", count, states.error)
            writer.add(states)
            count += 1
    writer.flush()
    if failed > 1:
        log.warning("%d of %d sequences have no features", failed, count)
    return writer.paths
