"""The weights of a running model: replaced in place, changed by adapters, checked, and asleep with the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fastgen.device.chip import current
from fastgen.device.memory import device_memory, release_memory
from fastgen.model.deltas import DELTA, DeltaTarget, delta_targets
from fastgen.model.kv_pool import KVPool
from fastgen.model.parameters import Parameters
from fastgen.model.transformer import Transformer
from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import HEAD, Shard, Target, Tensors, write


class OwnHead:
    """Writes the head of a tied model, or with `kind` a delta of it, to separate memory of the head."""

    def __init__(self, parameters: Parameters, kind: Callable[[Shard], Target] = lambda shard: shard) -> None:
        self._parameters, self._kind = parameters, kind

    def write(self, tensor: Tensor) -> None:
        self._parameters.untie()
        self._kind(self._parameters.targets()[HEAD]).write(tensor)


class LiveWeights:
    """The weights of one rank, where steps and CUDA graphs read them. No step may be in flight during a call."""

    def __init__(self, model: Transformer, pool: KVPool) -> None:
        self._model, self._pool = model, pool
        self._device = pool.whole.device

    @property
    def adapted(self) -> frozenset[str]:
        """The layers that adapters have changed."""
        return self._model.parameters.bases.layers

    @property
    def in_place(self) -> bool:
        """True if `tensors` returns the memory that steps read: not on the CPU, which packs its weights."""
        return self._device.type != "cpu"

    def tensors(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the whole tensors of the weights (None: all) by Hugging Face name: the memory itself if `in_place`,
        else copies. Call it on one rank only, for weights that are not quantized."""
        with self._unpacked() as shards:
            chosen = shards if names is None else {name: shards[name] for name in names}
            return {name: shard.view if self.in_place else shard.view.clone() for name, shard in chosen.items()}

    def update(self, update: WeightUpdate, begin: Callable[[], None]) -> None:
        """Check an update as far as possible, call `begin`, and write it. Raises ValueError as `WeightUpdate.tensors`
        does."""
        update.check()
        begin()
        self.write(update.tensors())

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors, by Hugging Face name, over the model's in place. Merge the factors of adapters, by layer,
        into the bases, and write sparse deltas into the weights."""
        self._model.parameters.changes += 1
        with self._unpacked() as shards:
            parameters = self._model.parameters
            heads = {
                HEAD: OwnHead(parameters),
                HEAD + DELTA: OwnHead(parameters, DeltaTarget),
            }  # unless there is a shard
            targets: dict[str, Target] = {**heads, **shards, **delta_targets(shards)}
            write({**targets, **self._model.parameters.bases.targets(shards)}, tensors)
        self._synchronize()

    def update_drafter(self, named: Tensors) -> None:
        """Replace the weights of a head that drafts. Raises ValueError if there is none, or if they do not fit."""
        if self._model.observer is None:
            raise ValueError("there is no head that drafts; give one as speculate")
        with current(self._device):
            self._synchronize()
            self._model.observer.update(named)
            self._synchronize()

    def keep_bases(self, layers: Collection[str], place: str) -> None:
        """Keep the weights of layers that an adapter will change; see `AdapterBases.keep`. No layers: all weights will
        be replaced."""
        if not layers:
            self._model.parameters.bases.forget()
        elif not self._model.parameters.bases.valid.issuperset(layers):
            with self._unpacked() as shards:
                self._model.parameters.bases.keep(layers, shards, place)

    @torch.inference_mode()
    def find_not_finite(self) -> list[str]:
        """Return the Hugging Face names of this rank's weights that hold NaN or an infinity."""
        with self._unpacked() as shards:
            return [name for name, shard in shards.items() if not shard.is_finite()]

    def checksums(self) -> list[dict[str, str]]:
        """Return the SHA-256 of each of this rank's weights, by Hugging Face name, as the only item of a list."""
        with self._unpacked() as shards:
            return [{name: shard.checksum() for name, shard in shards.items()}]

    def sleep(self, tags: Collection[str], keep_weights: bool) -> int:
        """Release the memory of "weights", "kv_cache" or both; return the bytes that this freed, 0 on the CPU.

        keep_weights: `wake` restores the weights; else they must be written again. The contents of the KV pool are
        lost. Raises ValueError, and the weights stay, if the host has too little memory for their copies.
        """
        with current(self._device):
            self._synchronize()
            before = device_memory(str(self._device))
            if "weights" in tags:
                self._model.parameters.memory.release(keep_weights)
                if self._model.observer is not None:
                    self._model.observer.release()
            if "kv_cache" in tags:
                self._pool.memory.release(keep=False)
            release_memory(str(self._device))
            return max(device_memory(str(self._device)) - before, 0)

    def wake(self, tags: Collection[str]) -> None:
        """Take the memory back. Raises torch.OutOfMemoryError if there is too little; it may then be called again."""
        with current(self._device):
            if "weights" in tags:
                self._model.parameters.memory.restore()
                if self._model.observer is not None:
                    self._model.observer.restore()
            if "kv_cache" in tags:
                self._pool.memory.restore()
            self._synchronize()

    @contextmanager
    def _unpacked(self) -> Iterator[dict[str, Shard]]:
        """Yield the model's shards, by name."""
        with current(self._device):
            self._model.parameters.unpack()
            try:
                yield self._model.parameters.targets()
            finally:
                self._model.parameters.pack()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
