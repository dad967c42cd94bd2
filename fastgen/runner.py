"""Batch -> tensors -> logits -> tokens: launch now, collect later."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fastgen.arch import ModelConfig
from fastgen.attention import Attention, StepLayout, make_attention
from fastgen.cache.pool import KVPool
from fastgen.config import EngineConfig
from fastgen.loader import fill_random
from fastgen.loader import load as load_checkpoint
from fastgen.model import ROW_TILE, StepInput, Transformer
from fastgen.request import Batch, SamplingParams, Scored, StepResult
from fastgen.sampler import LaneState, SampleOutput, SamplePlan, sample, score

SCORE_ROWS = 512
"""Rows whose logits over the whole vocabulary are held at a time when prompts are scored."""


@dataclass
class _ScoreOutput:
    lane: int
    start: int
    logprobs: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None


@dataclass
class Launched:
    """A step on its way: its results are on the device until `Runner.collect`."""

    batch: Batch
    params: list[SamplingParams]  # of the lanes that draw
    lanes: Tensor  # int64 [R]
    positions: Tensor  # int64 [R], of the tokens to be drawn
    hidden: Tensor | None  # [R, hidden], until sampled
    scored: list[_ScoreOutput] = field(default_factory=list)
    sampled: SampleOutput | None = None


class Runner:
    """Keeps what the device knows of the lanes: page tables, KV lengths, sampling state; and the model and its pool."""

    def __init__(self, model: Transformer, pool: KVPool, attention: Attention, config: EngineConfig) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention
        self.device = torch.device(config.device)
        slots = -(-config.max_model_len // config.page_size)
        self.page_table = torch.zeros(config.max_seqs, slots, dtype=torch.int64, device=self.device)
        self.state = LaneState(config.max_seqs, model.config.vocab_size, self.device)
        self._kv_lens = np.zeros(config.max_seqs, dtype=np.int64)  # the host's mirrors
        self._params = [SamplingParams()] * config.max_seqs

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Run the forward pass, and the sampler too unless the batch is masked; does not wait for the device."""
        self._apply_changes(batch)
        lanes = [*batch.decodes, *(chunk.lane for chunk in batch.prefills)]
        query_lens = np.array([1] * len(batch.decodes) + [len(chunk.tokens) for chunk in batch.prefills])
        self._kv_lens[list(batch.decodes)] += 1
        for chunk in batch.prefills:
            self._kv_lens[chunk.lane] = chunk.start + len(chunk.tokens)
        hidden = self._forward(batch, np.array(lanes), query_lens)
        scored = self._launch_scores(batch, hidden)
        drawing = np.array([1] * len(batch.decodes) + [chunk.sample for chunk in batch.prefills], dtype=bool)
        rows = (query_lens.cumsum() - 1)[drawing]
        launched = Launched(
            batch=batch,
            params=[self._params[lane] for lane in batch.sampling],
            lanes=self._tensor(np.array(batch.sampling, dtype=np.int64)),
            positions=self._tensor(self._kv_lens[list(batch.sampling)]),
            hidden=hidden[self._tensor(rows)],
            scored=scored,
        )
        if not batch.masked:
            self.sample(launched)
        return launched

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: np.ndarray | None = None) -> None:
        """Draw the tokens of a launched step; masks: int32 [R, ceil(V / 32)], for a masked batch."""
        assert launched.hidden is not None
        if launched.params:
            launched.sampled = sample(
                self.state,
                launched.lanes,
                launched.positions,
                self.model.logits(launched.hidden),
                SamplePlan.of(launched.params),
                None if masks is None else self._tensor(masks),
            )
        launched.hidden = None

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step, and read it."""
        result = StepResult([], [], [], scored=[_read_score(output) for output in launched.scored])
        output = launched.sampled
        if output is None:
            return result
        result.tokens = output.tokens.tolist()
        result.logprobs = output.logprobs.tolist()
        result.raw_logprobs = output.raw_logprobs.tolist()
        if output.top_ids is not None and output.top_logprobs is not None:
            ids, logprobs = output.top_ids.tolist(), output.top_logprobs.tolist()
            result.top_logprobs = [
                None if p.logprobs is None else dict(zip(ids[row][: p.logprobs], logprobs[row], strict=False))
                for row, p in enumerate(launched.params)
            ]
        if output.kept is not None:
            result.sampling_masks = [
                output.kept[row].nonzero().flatten().tolist() if p.return_sampling_mask else None
                for row, p in enumerate(launched.params)
            ]
        return result

    def _apply_changes(self, batch: Batch) -> None:
        if batch.starts:
            self.state.start(batch.starts)
            for start in batch.starts:
                self._params[start.lane] = start.params
        if batch.pages:
            lanes, slots, pages = self._tensor(np.array(batch.pages, dtype=np.int64)).unbind(1)
            self.page_table[lanes, slots] = pages
            self.pool.wipe(pages)

    def _forward(self, batch: Batch, lanes: np.ndarray, query_lens: np.ndarray) -> Tensor:
        """Hidden states [T, hidden], T padded to ROW_TILE."""
        kv_lens = self._kv_lens[lanes]
        table = self.page_table[self._tensor(lanes), : -(-int(kv_lens.max()) // self.pool.page_size)]
        total = int(query_lens.sum())
        first = np.repeat(kv_lens - query_lens, query_lens)
        positions = np.zeros(-(-total // ROW_TILE) * ROW_TILE, dtype=np.int64)
        positions[:total] = first + np.arange(total) - np.repeat(query_lens.cumsum() - query_lens, query_lens)
        token_ids = np.zeros_like(positions)
        token_ids[len(batch.decodes) : total] = [token for chunk in batch.prefills for token in chunk.tokens]
        device_ids, device_positions = self._tensor(token_ids), self._tensor(positions)
        decodes = len(batch.decodes)
        device_ids[:decodes] = self.state.last_token[self._tensor(lanes[:decodes])]
        owner = self._tensor(np.repeat(np.arange(len(lanes)), query_lens))
        pages = table[owner, device_positions[:total] // self.pool.page_size]
        layout = StepLayout(torch.from_numpy(query_lens), torch.from_numpy(kv_lens), table)
        step = StepInput(
            token_ids=device_ids,
            positions=device_positions,
            kv_rows=self.pool.rows(pages, device_positions[:total] % self.pool.page_size),
            plan=self.attention.plan(layout),
        )
        return self.model.forward(step, self.pool, self.attention)

    def _launch_scores(self, batch: Batch, hidden: Tensor) -> list[_ScoreOutput]:
        found = []
        first = len(batch.decodes)
        for chunk in batch.prefills:
            if chunk.score is not None:
                wanted = chunk.score
                rows = hidden[first + wanted.row : first + wanted.row + len(wanted.targets)]
                targets = self._tensor(np.array(wanted.targets, dtype=np.int64))
                temperatures = torch.full(targets.shape, wanted.temperature, device=self.device)
                for at in range(0, len(rows), SCORE_ROWS):
                    part = slice(at, at + SCORE_ROWS)
                    logits = self.model.logits(rows[part])
                    output = score(logits, targets[part], temperatures[part], wanted.top)
                    found.append(_ScoreOutput(chunk.lane, chunk.start + wanted.row + 1 + at, *output))
            first += len(chunk.tokens)
        return found

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _read_score(output: _ScoreOutput) -> Scored:
    top = None
    if output.top_ids is not None and output.top_logprobs is not None:
        pairs = zip(output.top_ids.tolist(), output.top_logprobs.tolist(), strict=True)
        top = [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
    return Scored(output.lane, output.start, output.logprobs.tolist(), top)


def find_device(name: str | None) -> str:
    """The device to run on; the GPU, where there is one, for None. Raises ValueError where it can not be had."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch's own, for an unknown and for an absent device
        raise ValueError(f"device is {name!r}, which torch can not use here: {str(error).splitlines()[0]}") from error
    return str(torch.device(name))


def build_runner(model_config: ModelConfig, config: EngineConfig, folder: Path, load: str) -> Runner:
    """The model with its weights, the KV pool and the runner over them."""
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    model = Transformer(model_config, dtype, device, config.max_model_len)
    if load == "dummy":
        fill_random(model.targets())
    else:
        load_checkpoint(model.targets(), folder, progress=sys.stderr.isatty())
    model.pack()
    c = model_config
    try:
        pool = KVPool(c.num_layers, config.num_pages, c.num_kv_heads, config.page_size, c.head_size, dtype, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(f"no memory for {config.num_pages} pages of KV; lower num_pages or kv_cache_gb") from error
    return Runner(model, pool, make_attention(config.attention, pool), config)
