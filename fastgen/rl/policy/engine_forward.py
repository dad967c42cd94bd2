"""The forward pass of a Generator's own model over whole sequences, which keeps the residual stream of each layer.

It has the attention and the products of the Generator's steps, and a KV pool of its own, so requests of the Generator
are not disturbed. Its results have the bits of the Generator's, since these depend neither on the schedule nor on other
rows of a step (docs/determinism.md).

Shape letters: T rows of a pack, N tokens whose logprobs are wanted, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import current
from fastgen.engine.prompt_scores import SCORE_ROWS
from fastgen.engine.runner import Runner
from fastgen.engine.startup import make_attention
from fastgen.kernels import scoring
from fastgen.model.attention.interface import StepLayout
from fastgen.model.kv_pool import KVPool
from fastgen.model.sampler import LARGE
from fastgen.model.transformer import KeptStreams, StepPart, Transformer
from fastgen.rl.policy.packs import Pack


class EngineForward:
    """Runs the model of a Runner over packs. num_pages: of the KV pool, which lives as long as this object."""

    def __init__(self, runner: Runner, num_pages: int) -> None:
        self._model, config, c = runner.model, runner.config, runner.model.config
        dtype, self._device = getattr(torch, config.dtype), runner.device
        fp8 = config.kv_cache_dtype == "fp8"
        stored = dtype if fp8 else getattr(torch, config.kv_cache_dtype)
        sizes = c.kv_layers, num_pages, c.num_kv_heads, config.page_size, c.head_size
        self._pool = KVPool(*sizes, stored, self._device, fp8)
        self._attention = make_attention(
            config.attention, self._pool, c.num_heads, c.windows, 1, config.max_model_len, config.deterministic,
            c.attention_scale,
        )  # fmt: skip

    @torch.no_grad()
    def streams(self, pack: Pack, all_layers: bool = True) -> list[Tensor]:
        """Return the residual stream after each layer, or only after the last one: [T, hidden] each."""
        model, count = self._model, len(self._model.layers)
        padding = -pack.tokens % model.row_tile
        arrays = pack.ids, pack.positions, pack.slots
        ids, positions, slots = (torch.from_numpy(array).to(self._device) for array in arrays)
        table = torch.from_numpy(pack.page_table).to(self._device)
        kept = KeptStreams(range(0 if all_layers else count - 1, count))
        with current(self._device):
            lanes = np.arange(len(pack.segments))
            plan = self._attention.plan(StepLayout(pack.query_lens, pack.kv_lens, 0, lanes, table))
            padded = F.pad(positions, (0, padding)), F.pad(slots, (0, padding), value=-1)
            mapping = model.slot_mapping(self._pool, *padded, pack.tokens)
            part = StepPart(F.pad(ids, (0, padding)), mapping, plan, kept=kept)
            model.forward([part], self._pool, self._attention)
        return list(kept.streams.values())


@torch.no_grad()
def score_rows(
    model: Transformer, x: Tensor, rows: Tensor, targets: Tensor, temperature: float, entropy: bool, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprobs of targets, float32 [N], the entropies, float32 [N] (empty unless asked for), and the logits
    of the targets `kept`, float32 [K, V].

    x: [T, hidden], the stream after the last layer. rows: int64 [N], the row that predicts each target, int64 [N].
    kept: int64 [K], ascending indices of targets.
    """
    temperature = min(max(temperature, 1 / LARGE), LARGE)  # float32 holds no more
    logprobs, entropies = x.new_empty(len(rows), dtype=torch.float32), list[Tensor]()
    logits_kept = x.new_empty(len(kept), model.config.vocab_size, dtype=torch.float32)
    with current(x.device):
        for at in range(0, len(rows), SCORE_ROWS):
            part = slice(at, at + SCORE_ROWS)
            logits = model.logits(x[rows[part]])
            assert logits is not None
            logprobs[part] = scoring.score(logits, targets[part], temperature)[0]
            chosen = (kept >= at) & (kept < at + SCORE_ROWS)
            logits_kept[chosen] = logits[kept[chosen] - at]
            if entropy:
                all_logprobs = (logits / temperature).log_softmax(1)
                entropies.append(-(all_logprobs.exp() * all_logprobs).sum(1))
    return logprobs, torch.cat(entropies) if entropies else logprobs[:0], logits_kept
