"""Medusa: heads that each draft one of the next tokens from the last hidden state (arXiv 2401.10774).

x is the target's normed hidden state at the last position that is computed, from which the last token was drawn. Head i
drafts the token i + 1 positions after that token, from W_i y, where y = x + silu(L x + b) for each of its blocks (one
after the other). Files without W_i use the target's own head. Nothing is kept in the pages.

Only the most likely chain is drafted; Medusa's trees would need attention that is not there.

Shape letters: see head.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import rms_norm
from fastgen.model.linear import Linear
from fastgen.model.loader import read_tensors
from fastgen.model.parameters import Parameters
from fastgen.model.transformer import StepPart
from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import Shard, Tensors, write
from fastgen.speculation.head import Head, HeadPlace, StoredWeights
from fastgen.speculation.heads import MEDUSA_FILES, MedusaConfig

LOGITS = Fused(out_dtype=torch.float32)
_CONVERSION = (
    "tensors = torch.load('medusa_lm_head.pt', 'cpu', weights_only=True); safetensors.torch.save_file({name: "
    "tensor.clone() for name, tensor in tensors.items()}, 'medusa_lm_head.safetensors')"
)


class MedusaWeights(StoredWeights):
    """The weights of Medusa heads. blocks: [head][block], each [H, H] with a bias. outputs: one per head, [V, H]; none
    if the target's head is used."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target: Parameters, context: int, deterministic: bool) -> None:
        self.config = config
        self.memory = target.new_memory()
        hidden, vocab, invariant = target.config.hidden_size, target.config.vocab_size, target.lm_head.batch_invariant
        dtype = target.dtype

        def linear(outputs: int, bias: bool) -> Linear:
            of_bias = self.memory.zeros((outputs,), dtype) if bias else None
            return Linear(self.memory.zeros((outputs, hidden), dtype), of_bias, invariant)

        names = {_plain(name) for name in dict(self.read())} if _file(config.folder) is not None else None
        count = config.heads if names is None else len({name.split(".")[0] for name in names})
        own = names is None or f"0.{config.blocks}.weight" in names
        self.blocks = [[linear(hidden, True) for _ in range(config.blocks)] for _ in range(count)]
        self.outputs = [linear(vocab, False) for _ in range(count)] if own else []

    def read(self) -> Tensors:
        path = _file(self.config.folder)
        if path is None:
            raise ValueError(
                f"there is no {' or '.join(MEDUSA_FILES)}; fastgen reads safetensors only, so convert a "
                f"medusa_lm_head.pt: {_CONVERSION}"
            )
        return read_tensors(path)

    def shards(self) -> dict[str, Shard]:
        shards: dict[str, Shard] = {}
        for head, blocks in enumerate(self.blocks):
            for number, block in enumerate(blocks):
                assert block.bias is not None
                shards[f"{head}.{number}.linear.weight"] = Shard.whole(block.weight)
                shards[f"{head}.{number}.linear.bias"] = Shard.whole(block.bias)
        for head, output in enumerate(self.outputs):
            shards[f"{head}.{self.config.blocks}.weight"] = Shard.whole(output.weight)
        return shards

    def finish(self) -> None:
        """Nothing is made of the weights."""

    def update(self, named: Tensors) -> None:
        shards = self.shards()
        update = WeightUpdate({_plain(name): tensor for name, tensor in dict(named).items()}, shards)
        update.check()
        write(shards, update.tensors())

    def attach(self, place: HeadPlace) -> Medusa:
        return Medusa(self, place)


class Medusa(Head):
    """Medusa heads in a Runner, which keep the last hidden states of each step until its tokens are drawn."""

    def __init__(self, weights: MedusaWeights, place: HeadPlace) -> None:
        super().__init__(weights, place, len(weights.blocks))
        self._weights, config = weights, place.target.config
        shape = place.config.max_step_tokens + place.target.row_tile, config.hidden_size
        self._states = place.pool.memory.zeros(shape, place.target.parameters.dtype)  # it sleeps with the pool

    @property
    def layers(self) -> frozenset[int]:
        return frozenset((len(self._target.layers) - 1,))

    @property
    def linears(self) -> Iterable[tuple[Linear, Fused]]:
        yield self._weights.blocks[0][0], Fused()
        if self._weights.outputs:
            yield self._weights.outputs[0], LOGITS

    def observe(self, part: StepPart, number: int) -> None:
        x = part.residual.whole()
        self._states[: len(x)] = x

    def observe_rows(self, x: Tensor, rows: Tensor) -> None:
        self._states[rows] = x

    def body(self, size: int) -> None:
        lanes, norm, most = self._draw_lanes[:size], self._target.parameters.norm, self.most_drafts(size)
        x = rms_norm(self._states[self._ends[:size]], norm)
        logits = torch.stack([self._logits(x, head) for head in range(most)], 1)
        start = self._lanes.kv_lens[lanes]
        positions = (start[:, None] + 1 + self._offsets[:most]).flatten()
        drafts = self.draw(logits.flatten(0, 1), lanes.repeat_interleave(most), positions)
        self._tokens[lanes, :most] = drafts.view(size, most)
        self._counts.index_fill_(0, lanes, most)  # a graph cannot hold an assignment of a number

    def _logits(self, x: Tensor, head: int) -> Tensor:
        """Return the logits of a head, float32 [S, V], of normed hidden states x [S, H]."""
        for block in self._weights.blocks[head]:
            x = x + F.silu(block.apply(x))
        output = self._weights.outputs[head] if self._weights.outputs else self._target.parameters.lm_head
        return output.apply(x, LOGITS)


def _plain(name: str) -> str:
    return name.removeprefix("medusa_head.")


def _file(folder: Path) -> Path | None:
    return next((folder / name for name in MEDUSA_FILES if (folder / name).is_file()), None)
