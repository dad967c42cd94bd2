"""The runner: turns a Batch into launches on the device, and reads their results later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.device.chip import current
from fastgen.device.pinned import to_host, upload, upload_together
from fastgen.device.threads import FreeCores
from fastgen.engine.options import EngineConfig
from fastgen.engine.step import Lanes, Launched, RowSource, StepFeature, StepSequences
from fastgen.engine.uploads import StepArrays, StepTensors
from fastgen.kernels.lane_updates import DecodeInput, begin_step
from fastgen.model.attention.interface import Attention, StepLayout
from fastgen.model.chosen import alternatives_of
from fastgen.model.kv_pool import KVPool
from fastgen.model.sampler import SampleOutput, draw
from fastgen.model.transformer import StepPart, Transformer
from fastgen.processes.errors import DepartedError
from fastgen.request import Batch, StepResult

if TYPE_CHECKING:  # only a GPU has graphs, and only updates and sleep need LiveWeights
    from fastgen.engine.cuda_graphs import Graphs
    from fastgen.engine.prefill_graphs import PrefillGraphs
    from fastgen.model.live_weights import LiveWeights


class Runner:
    """The model with its KV pool, and the lanes.

    A step of decodes takes its tokens, positions and pages from the lanes on the device, so that the host sends only
    what changed; a CUDA graph holds all of it (`decode_body`), and is replayed. Any other step is uploaded as a whole,
    and replayed by PrefillGraphs, or launched kernel by kernel if it has too many tokens for them. The CPU has no
    graphs, and uploads decodes of one row as well.

    The start fills `features` with those that options ask for (startup.make_runner), and `graphs` and `prefill_graphs`
    on a GPU (warm_up.capture).

    features: the features that act in steps, by the type of their payloads in a Batch. draw: the sampler, which is not
    part of a graph and may be replaced while no request runs (docs/ideas.md). logits: float32 [most rows of a step of
    decodes, V], at a fixed address; no rows on ranks above 0.
    """

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        attention: Attention,
        config: EngineConfig,
        features: dict[type, StepFeature[Any]],
    ) -> None:
        self.model, self.pool, self.attention, self.config = model, pool, attention, config
        self.group = model.group
        self.device = torch.device(config.device)
        vocab, samples = model.config.vocab_size, self.group.rank == 0  # other ranks have no logits
        self.lanes = Lanes(config, vocab, pool.page_size, pool.spare, self.device, samples)
        self.prefixes = attention.prefixes if config.max_seqs > 1 else None
        self.features = features
        self.draw: Callable[..., SampleOutput] = draw
        self.graphs: dict[bool, Graphs[int]] = {}  # decode steps, by whether shared keys are read once
        self.prefill_graphs: PrefillGraphs | None = None
        self.logits = torch.empty(config.most_rows if samples else 0, vocab, device=self.device)  # for decode steps
        self._free_cores = FreeCores()

    @cached_property
    def weights(self) -> LiveWeights:
        """The weights while the model runs, whose module loads with the first update or sleep."""
        from fastgen.model.live_weights import LiveWeights

        return LiveWeights(self.model, self.pool)

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
            if batch.fresh and self.attention.needs_clean_pages:
                self.pool.wipe(upload(np.array(batch.fresh, dtype=np.int64), self.device))
            self.lanes.update_tables(batch)
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
            self.lanes.start(batch)  # not earlier: the device works already, and only draws need it
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
        self._run_decodes(source.make_rows(size), shared, source.reads_early, layers)

    def _run_decodes(
        self, rows: DecodeInput, shared: bool = False, reads_early: bool = False, layers: Sequence[int] | None = None
    ) -> None:
        """Launch the layers for rows that attend as decodes, and write their logits. shared, reads_early: see
        Attention.plan_decode. layers: see Transformer.forward."""
        count, padding = len(rows.lanes), -len(rows.lanes) % self.model.row_tile
        plan = self.attention.plan_decode(rows.lanes, rows.kv_lens, self.lanes.page_table, shared, reads_early)
        ids, positions, slots = rows.token_ids, rows.positions, rows.slots
        if padding:
            ids, positions = F.pad(ids, (0, padding)), F.pad(positions, (0, padding))
            slots = F.pad(slots, (0, padding), value=-1)
        mapping = self.model.slot_mapping(self.pool, positions, slots, count)
        x = self.model.forward([StepPart(ids, mapping, plan)], self.pool, self.attention, layers)
        self.model.logits(x[:count], self.logits[:count])

    def _launch_decodes(self, step: Launched, source: RowSource, graphs: Graphs[int] | None) -> None:
        """Launch a step of decodes that is made on the device, as a CUDA graph if there is one."""
        count = len(step.batch.decodes)
        if graphs is not None:
            size = graphs.size_for(count)
            graphs.run(size)
            rows = source.graph_rows(size, count)
        else:
            rows = source.make_rows(count, exact=True)
            self._run_decodes(rows)
        step.lanes, step.positions = rows.lanes, rows.kv_lens  # with n keys, the token at position n is drawn
        step.logits = self.logits[: len(rows.lanes)] if self.group.rank == 0 else None

    def _launch_uploaded(self, step: Launched, shared: bool) -> None:
        """Launch any step, as CUDA graphs if there are some for its number of tokens."""
        sequences = self.lanes.count_batch(step.batch)
        layout = sequences.layout(self.lanes.page_table, len(step.batch.decodes), shared)
        graphs = self.prefill_graphs
        if graphs is not None and sequences.tokens <= graphs.sizes[-1] and step.kept is None:
            x = self._replay(graphs, step, sequences, layout)
        else:
            x = self._launch_kernels(step, sequences, layout)
        if x is not None:
            for payload in step.batch.features:
                self.features[type(payload)].after(step, payload, x)

    def _replay(
        self, graphs: PrefillGraphs, step: Launched, sequences: StepSequences, layout: StepLayout
    ) -> Tensor | None:
        """Run a step as CUDA graphs. Return the residual stream [T, hidden size] if `step.all_rows` is set."""
        padding = graphs.size_for(sequences.tokens) - sequences.tokens
        arrays = StepArrays.of(step.batch, sequences, self.lanes, padding)
        for event in step.arrivals.values():
            event.wait()
        sent, draws = graphs.run(arrays, layout), len(step.sampling)
        step.lanes, step.positions, x = sent.draw_lanes[:draws], sent.ends[:draws], None
        if step.all_rows:
            x = graphs.finish(len(sent.ids), layout)
            step.logits = self.model.logits(x[sent.rows[:draws]]) if draws else None
        elif draws:
            graphs.draw(draws)
            step.logits = self.logits[:draws] if self.group.rank == 0 else None
        return x

    def _launch_kernels(self, step: Launched, sequences: StepSequences, layout: StepLayout) -> Tensor | None:
        """Launch a step kernel by kernel. Return the residual stream [T, hidden size] if `step.all_rows` is set."""
        model, total, draws = self.model, sequences.tokens, len(step.sampling)
        sent = StepArrays.of(step.batch, sequences, self.lanes, -total % model.row_tile).send(self.device)
        step.lanes, step.positions = sent.draw_lanes, sent.ends
        state = self.lanes.state
        begin_step(sent.lanes, sent.kv_lens, sent.decode_lens, sent.ids, state.last_token, self.lanes.kv_lens)
        parts = self._parts(step, sequences, sent, layout)
        if step.all_rows or (draws == total and not len(sequences.forks)):
            x = model.forward(parts, self.pool, self.attention)
            step.logits = model.logits(x[sent.rows]) if draws else None
            return x if step.all_rows else None
        model.embed(parts)
        queries = model.run_layers(parts, self.pool, self.attention, range(len(model.layers)))
        if draws:  # only the rows that tokens are drawn from go through all of the last layer
            x, q = _select(parts, queries, sent.rows, sequences)
            plan = self.attention.plan_decode(sent.sources, sent.ends, self.lanes.page_table)
            step.logits = model.logits(model.finish_rows(x, q, sent.rows, plan, self.attention))
        return None

    def _parts(self, step: Launched, sequences: StepSequences, sent: StepTensors, layout: StepLayout) -> list[StepPart]:
        """Return the step as one part, or under tensor parallelism as two halves if it is long."""
        table, parts = self.lanes.page_table, list[StepPart]()
        for part in [sequences] if self.group.exchange is None else self._halves(sequences, layout.decodes):
            start, count = sum(part.mapping.real for part in parts), part.tokens
            end = len(sent.ids) if start + count == sequences.tokens else start + count  # with the step's padding
            # All decodes, which may share keys, are in the first part.
            decodes, shared = (0, False) if parts else (layout.decodes, layout.shared)
            plan = self.attention.plan(part.layout(table, decodes, shared))
            mapping = self.model.slot_mapping(self.pool, sent.positions[start:end], sent.slots[start:end], count)
            parts.append(StepPart(sent.ids[start:end], mapping, plan, step.arrivals, step.kept))
        return parts

    def _halves(self, sequences: StepSequences, decodes: int) -> list[StepSequences]:
        """Cut a long step in two. The import stands here because only tensor parallelism needs it."""
        from fastgen.engine import halves

        return halves.cut(sequences, decodes)

    def _sample(self, step: Launched, masks: np.ndarray | None) -> None:
        """Draw tokens, and start copying the step's results to the host."""
        tokens = None
        if step.logits is not None:
            mask = None if masks is None else upload(masks, self.device)
            if mask is not None and len(mask) < len(step.lanes):  # lanes have several rows
                # Rows of padding get any mask.
                mask = mask[(step.lanes[:, None] == self.lanes.input.lanes[: len(mask)]).int().argmax(1)]
            for payload in step.batch.features:
                mask = self.features[type(payload)].restrict(step, payload, mask, self.lanes.state.last_token)
            plan = self.lanes.plan_of(step.sampling)
            drawn = self.draw(step.logits, self.lanes.state, step.lanes, step.positions, plan, mask, to_host=True)
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
        return self._step_on_cpu() if self.device.type == "cpu" else current(self.device)

    @contextmanager
    def _step_on_cpu(self) -> Iterator[None]:
        with current(self.device), self._free_cores.step():
            yield


def _select(
    parts: list[StepPart], queries: list[Tensor], rows: Tensor, sequences: StepSequences
) -> tuple[Tensor, Tensor]:
    """Return the residual stream [R, hidden size] and the queries [R, H, D] of the rows that are drawn from, int64 [R],
    ascending."""
    if len(parts) == 1:
        return parts[0].residual.select(rows), queries[0][rows]
    at = parts[0].mapping.real
    ends = np.repeat(sequences.query_lens.cumsum(), sequences.num_draws)
    first = int((ends <= at).sum())
    halves_of_rows = rows[:first], rows[first:] - at
    xs = [part.residual.select(own) for part, own in zip(parts, halves_of_rows, strict=True)]
    return torch.cat(xs), torch.cat([q[own] for q, own in zip(queries, halves_of_rows, strict=True)])
