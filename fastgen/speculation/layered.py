"""The common part of heads that have layers, DFlash and EAGLE-3: the outputs of the target's layers that they read, the
matrix to the vocabulary, and the slots of the rows that they draft with.

Shape letters, in addition to the letters in head.py: F layers of the target that are read.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from fastgen.device.memory import Memory
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import RMSNorm
from fastgen.model.linear import Linear
from fastgen.model.loader import read_tensors
from fastgen.model.parameters import Parameters
from fastgen.model.transformer import StepPart
from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import Tensors, write
from fastgen.speculation.head import Head, HeadPlace, StoredWeights
from fastgen.speculation.heads import LayeredConfig

LOGITS = Fused(out_dtype=torch.float32)
COPIES = ("embed_tokens.weight", "t2d")
"""Tensors of checkpoints that are not needed: a copy of the target's embedding, and the inverse of d2t."""


class LayeredWeights(StoredWeights):
    """The weights of a head that has layers.

    fc: [H, F H]. lm_head: [V or a reduced vocabulary, H]; None: the target's head is used. ids: the target's tokens of
    a reduced vocabulary, int64 [reduced]; empty if there is none.
    """

    config: LayeredConfig
    fc: Linear
    lm_head: Linear | None

    def __init__(self, config: LayeredConfig, target: Parameters, memory: Memory, batch_invariant: bool) -> None:
        self.memory = memory
        self._dtype, self._invariant = target.dtype, batch_invariant
        self.ids = torch.arange(config.reduced, device=target.device)

    def _zeros(self, *shape: int) -> Tensor:
        return self.memory.zeros(shape, self._dtype)

    def _linear(self, outputs: int, inputs: int) -> Linear:
        return Linear(self._zeros(outputs, inputs), None, self._invariant)

    def read(self) -> Tensors:
        return read_tensors(self.config.folder)

    def store(self, tensors: dict[str, Tensor]) -> None:
        """Write tensors by their names in `shards`, and set `ids` from the offsets d2t. Raises ValueError if they do
        not fit, before anything is written."""
        offsets = tensors.pop("d2t", None)
        unneeded = (*COPIES, *(() if self.lm_head else ("lm_head.weight",)))
        shards = self.shards()
        update = WeightUpdate({name: x for name, x in tensors.items() if name not in unneeded}, shards)
        update.check()
        if self.config.reduced:
            set_ids(self.ids, offsets, self.config.layers.vocab_size)
        write(shards, update.tensors())

    def logits(self, x: Tensor, target: Parameters, norm: RMSNorm | None = None) -> Tensor:
        """Return logits, float32 [R, V], of rows x [R, H]. norm: applied to x first."""
        if self.lm_head is None:
            return target.lm_head.apply(x, LOGITS, norm)
        logits = self.lm_head.apply(x, LOGITS, norm)
        if not self.config.reduced:
            return logits
        whole = logits.new_full((len(x), target.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.ids, logits)


class LayeredHead(Head):
    """A head in a Runner that keeps keys and values of all tokens in the pages, in layers of the pool after the
    target's."""

    def __init__(self, weights: LayeredWeights, place: HeadPlace, most: int) -> None:
        super().__init__(weights, place, most)
        self._read, hidden = weights.config.features, weights.config.layers.hidden_size
        self._most_tokens = place.config.max_step_tokens + self._target.row_tile
        self._features = self._zeros(len(self._read) * hidden)

    def _zeros(self, columns: int) -> Tensor:
        """Return a tensor with a row for each token of a step, which sleeps with the pool."""
        return self._pool.memory.zeros((self._most_tokens, columns), self._target.parameters.dtype)

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(self._read)

    def observe(self, part: StepPart, number: int) -> None:
        x = part.residual.whole()
        hidden = x.shape[1]
        for at, layer in enumerate(self._read):
            if layer == number:
                self._features[: len(x), at * hidden : (at + 1) * hidden] = x
        if number == max(self.layers):
            self._keep_context(part, self._features[: len(x)])

    @abstractmethod
    def _keep_context(self, part: StepPart, features: Tensor) -> None:
        """Write the keys and values of a step's tokens to the pages. features: [T, F H]."""


def set_ids(ids: Tensor, offsets: Tensor | None, vocab_size: int) -> None:
    """Write the target's tokens of a reduced vocabulary, number + offsets[number], to `ids`, int64 [n]. Raises
    ValueError if the offsets, d2t of a checkpoint, do not fit."""
    if offsets is None or offsets.shape != ids.shape:
        raise ValueError(f"draft_vocab_size={len(ids)} needs a tensor d2t [{len(ids)}]")
    targets = torch.arange(len(offsets), device="cpu") + offsets.cpu().long()
    if len(set(targets.tolist())) < len(targets) or int(targets.min()) < 0 or int(targets.max()) >= vocab_size:
        raise ValueError("d2t must name another token of the model for each number")
    ids.copy_(targets)
