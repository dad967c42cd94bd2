"""The runner: turns a Batch into launches on the device, and reads their results later."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import current
from fastgen.device.pinned import to_host, upload, upload_together
from fastgen.device.threads import FreeCores
from fastgen.engine import halves
from fastgen.engine.cuda_graphs import Graphs, PrefillGraphs, smallest_size
from fastgen.engine.options import EngineConfig
from fastgen.engine.step import Lanes, Launched, RowSource, StepFeature, StepInput, StepSequences
from fastgen.kernels.state import DecodeInput
from fastgen.model.attention.interface import Attention
from fastgen.model.chosen import alternatives_of
from fastgen.model.kv_pool import KVPool
from fastgen.model.live_weights import LiveWeights
from fastgen.model.sampler import SampleOutput, draw
from fastgen.model.transformer import StepPart, Transformer
from fastgen.processes.errors import DepartedError
from fastgen.request import Batch, StepResult


class Runner:
    """The model with its KV pool, and the lanes.

    A step is a StepInput, which is made in one of two ways and run in one way (`_run`). A step of decodes takes its
    tokens, positions and pages from the lanes on the device, so that the host sends only what changed; a CUDA graph
    holds all of it (`decode_body`), and is replayed. Any other step is uploaded as a whole and launched kernel by
    kernel; if it has few tokens, all but its attention runs in CUDA graphs too (PrefillGraphs). The CPU has no graphs,
    and uploads decodes of one row as well.

    The start fills `features` (startup.make_runner), and `graphs` and `prefill_graphs` (warm_up.capture).

    features: the features that act in steps, by the type of their payloads in a Batch.
    """

    def __init__(self, model: Transformer, pool: KVPool, attention: Attention, config: EngineConfig) -> None:
        self.model, self.pool, self.attention, self.config = model, pool, attention, config
        self.group = model.group
        self.weights = LiveWeights(model, pool)
        self.device = torch.device(config.device)
        vocab, samples = model.config.vocab_size, self.group.rank == 0  # other ranks have no logits
        self.lanes = Lanes(config, vocab, pool.page_size, pool.spare, self.device, samples)
        self.prefixes = attention.prefixes if config.max_seqs > 1 else None
        self.features: dict[type, StepFeature[Any]] = {}
        self.graphs: dict[bool, Graphs[int]] = {}  # decode steps, by whether shared keys are read once
        self.prefill_graphs: PrefillGraphs | None = None
        self._logits = torch.empty(config.most_rows if samples else 0, vocab, device=self.device)  # for decode steps
        self._free_cores = FreeCores()

    def clear_lanes(self) -> None:
        """Empty all lanes."""
        self.lanes.clear()
        if self.prefixes is not None:
            self.prefixes.clear()
        for feature in self.features.values():
            feature.clear()

    def synchronize(self) -> None:
        """Wait for the device. Call it before the next launch if a step in flight will not be collected, or if an
        exception has interrupted one."""
        self.lanes.forget_decodes()
        if self.prefixes is not None:
            self.prefixes.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for the device, so that memory can be released."""
        self.synchronize()

    # ------------------------------------------------------------------------------------------ the step

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Launch the forward pass, and the sampler unless the batch is masked. Does not wait for the device."""
        step = Launched(batch, batch.sampling)
        with self._step_context():
            for payload in batch.features:
                self.features[type(payload)].before(step, payload)
            self.lanes.apply(batch)
            shared = self.prefixes is not None and self.prefixes.update(
                batch.decodes, self.lanes.host_kv_lens, self.lanes.host_table
            )
            if step.source is not None:
                self._launch_decodes(step, step.source, step.graphs)
            elif self.graphs and not batch.prefills:
                self.lanes.set_decodes(batch.decodes)
                self.lanes.count_decodes()
                self._launch_decodes(step, self.lanes, self.graphs[shared])
            else:
                self._launch_uploaded(step, shared)
            if batch.copies:  # of pages that this step has filled
                sources, targets = zip(*batch.copies, strict=True)
                self.pool.copy(*upload_together([np.array(sources), np.array(targets)], self.device))
            if not batch.masked:
                self._sample(step, None)
        return step

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: np.ndarray | None) -> None:
        """Draw the tokens of a launched step whose batch is masked. masks: int32 [R, ceil(V / 32)], on rank 0."""
        with self._step_context():
            self._sample(launched, masks)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step, and return its result."""
        if launched.arrived is not None:
            launched.arrived.synchronize()
        if launched.expired is not None and int(launched.expired):
            raise DepartedError("a rank has not taken part in a step for too long; make a new Generator")
        result = StepResult()
        for payload in launched.batch.features:
            self.features[type(payload)].collect(launched, payload, result)
        output, result.lanes = launched.sampled, launched.sampling
        if output is None:
            return result
        result.tokens = output.packed[0].numpy().tolist()
        result.logprobs, result.untruncated_logprobs, result.raw_logprobs = output.logprobs.numpy().tolist()
        # The lanes still have these sequences' parameters: no lane is given away before its last tokens are read.
        params = [self.lanes.params[lane] for lane in launched.sampling]
        result.top_logprobs = alternatives_of(params, output.top_ids, output.top_logprobs, output.chosen)
        if output.kept is not None:
            kept = output.kept.numpy()  # torch would start all of its threads for each row
            result.sampling_mask = [
                np.flatnonzero(row).tolist() if p.return_sampling_mask else []
                for p, row in zip(params, kept, strict=True)
            ]
        return result

    def decode_body(
        self, size: int, shared: bool = False, source: RowSource | None = None, layers: Sequence[int] | None = None
    ) -> None:
        """Compute the logits of a step of the first `size` lanes that decode, with all tensors at fixed addresses, as
        the body of a graph. shared: read keys that rows share once. layers: see Transformer.forward."""
        source = self.lanes if source is None else source
        self._run(self._decoding(source.fill(size), shared, source.alone), layers)

    def _decoding(self, rows: DecodeInput, shared: bool = False, alone: bool = False) -> StepInput:
        """Return the StepInput of rows that attend as decodes. shared, alone: see Attention.plan_decode."""
        count, padding = len(rows.lanes), -len(rows.lanes) % self.model.row_tile
        plan = self.attention.plan_decode(rows.lanes, rows.kv_lens, self.lanes.page_table, shared, alone)
        ids, positions, slots = rows.token_ids, rows.positions, rows.slots
        if padding:
            ids, positions = F.pad(ids, (0, padding)), F.pad(positions, (0, padding))
            slots = F.pad(slots, (0, padding), value=-1)
        mapping = self.model.slot_mapping(self.pool, positions, slots, count)
        return StepInput([StepPart(ids, mapping, plan)], rows.lanes, rows.kv_lens, out=self._logits[:count])

    def _run(self, step: StepInput, layers: Sequence[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """Launch the layers and the logits of a step. Returns the residual stream, [T, hidden size], and the logits, on
        rank 0 and if tokens are drawn."""
        if step.graphs is not None:
            x = step.graphs.forward(step.parts[0], self.attention)
        else:
            x = self.model.forward(step.parts, self.pool, self.attention, layers)
        if not len(step.lanes):
            return x, None
        return x, self.model.logits(x[: len(step.lanes)] if step.rows is None else x[step.rows], step.out)

    def _launch_decodes(self, step: Launched, source: RowSource, graphs: Graphs[int] | None) -> None:
        """Launch a step of decodes that is made on the device, as a CUDA graph if there is one."""
        count = len(step.batch.decodes)
        if graphs is not None:
            size = smallest_size(graphs.keys, count)
            graphs.run(size)
            rows = source.filled(size, count)
        else:
            rows = source.fill(count, exact=True)
            self._run(self._decoding(rows))
        step.lanes, step.positions = rows.lanes, rows.kv_lens  # with n keys, the token at position n is drawn
        step.logits = self._logits[: len(rows.lanes)] if self.group.rank == 0 else None

    def _launch_uploaded(self, step: Launched, shared: bool) -> None:
        """Launch any step kernel by kernel, or through the PrefillGraphs."""
        uploaded = self._upload(step, shared)
        x, step.logits = self._run(uploaded)
        step.lanes, step.positions = uploaded.lanes, uploaded.positions
        for payload in step.batch.features:
            self.features[type(payload)].after(step, payload, x)

    def _upload(self, launched: Launched, shared: bool) -> StepInput:
        """Build the StepInput of a step from arrays on the host, and send it to the device."""
        batch, known, table = launched.batch, self.lanes.host_kv_lens, self.lanes.page_table
        step, decodes = StepSequences.of(batch, known), len(batch.decodes)
        parts = [step] if self.group.exchange is None else halves.cut(step, decodes)
        total, graphs = int(step.query_lens.sum()), self.prefill_graphs
        if graphs and (total > graphs.sizes[-1] or len(parts) > 1):
            graphs = None
        padding = smallest_size(graphs.sizes, total) - total if graphs else -total % self.model.row_tile
        # Only the rows that tokens are drawn from go through all of the last layer.
        ends_only = len(step.rows) < total and not launched.all_rows
        changed = np.concatenate([step.lanes, step.forks])  # lanes with new KV lengths
        host_positions = step.positions()
        host_slots = self.lanes.slots(np.repeat(step.lanes, step.query_lens), host_positions)
        ids, positions, slots, lanes, kv_lens, rows, drawn_from, drawing, drawn_at = upload_together([
            step.token_ids(batch, padding),
            np.pad(host_positions, (0, padding)),
            np.pad(host_slots, (0, padding), constant_values=-1),
            changed,
            known[changed],
            step.rows,
            np.repeat(np.arange(len(step.rows)) if ends_only else step.rows, step.num_draws[step.num_draws > 0]),
            np.array(launched.sampling, dtype=np.int64),
            np.repeat(step.kv_lens, step.num_draws),
        ], self.device)  # fmt: skip
        ids[:decodes] = self.lanes.state.last_token[lanes[:decodes]]
        self.lanes.kv_lens.index_put_((lanes,), kv_lens.int())
        step_parts, start, row = [], 0, 0
        for part in parts:
            count = int(part.query_lens.sum())
            here = slice(start, total + padding if start + count == total else start + count)
            own_decodes, own_shared = (0, False) if start else (decodes, shared)  # all decodes are in the first part
            plan = self.attention.plan(part.layout(table, own_decodes, own_shared))
            ends = None
            if ends_only:
                layout = part.ends.layout(table, len(part.rows), own_shared)
                ends = rows[row : row + len(part.rows)] - start, layout
            mapping = self.model.slot_mapping(self.pool, positions[here], slots[here], count)
            step_parts.append(StepPart(ids[here], mapping, plan, ends, launched.arrivals))
            start, row = start + count, row + len(part.rows)
        # A fork needs a row of logits of its own, so its row is repeated before the head. To repeat logits would take
        # more memory than the largest step.
        repeated = None if ends_only and not len(step.forks) else drawn_from
        return StepInput(step_parts, drawing, drawn_at.int(), repeated, graphs=graphs)

    def _sample(self, step: Launched, masks: np.ndarray | None) -> None:
        """Draw tokens, and start copying the step's results to the host."""
        tokens = None
        if step.logits is not None:
            mask = None if masks is None else upload(masks, self.device)
            if mask is not None and len(mask) < len(step.lanes):  # lanes have several rows
                of_row = step.lanes[:, None] == self.lanes.input.lanes[: len(mask)]
                mask = mask[of_row.int().argmax(1)]  # rows of padding get any mask
            plan = self.lanes.plan_of(step.sampling)
            drawn = draw(step.logits, self.lanes.state, step.lanes, step.positions, plan, mask, to_host=True)
            tokens = drawn.packed[0]
            self.group.broadcast(tokens)
            rest = drawn.top_ids, drawn.top_logprobs, drawn.kept, drawn.chosen
            packed = to_host(drawn.packed) if drawn.host is None else drawn.host
            step.sampled = SampleOutput(packed, *map(to_host, rest))
            step.logits = None
        elif self.group.rank and len(step.lanes):
            tokens = torch.empty(len(step.lanes), dtype=torch.int32, device=self.device)
            self.group.broadcast(tokens)
            self.lanes.state.drew(step.lanes, tokens.long(), None)
        if tokens is not None:
            for payload in step.batch.features:
                self.features[type(payload)].drawn(step, payload, tokens)
        if self.group.rank == 0:  # the other ranks do not collect
            step.expired = None if self.group.expired is None else to_host(self.group.expired)
        if self.device.type == "cuda":
            step.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            step.arrived.record()

    def _step_context(self) -> AbstractContextManager[object]:
        """Return the context of a step: on the CPU as many threads as cores are free."""
        return self._free_cores.step() if self.device.type == "cpu" else current(self.device)
