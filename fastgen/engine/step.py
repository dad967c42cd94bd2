"""The state of the lanes, the arrays of a step, and what is in flight until its results are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import upload, upload_together
from fastgen.engine.options import EngineConfig
from fastgen.kernels.lane_updates import DecodeInput, advance
from fastgen.model.attention.interface import StepLayout
from fastgen.model.sampler import LaneState, SampleOutput, SamplePlan
from fastgen.model.transformer import KeptStreams
from fastgen.request import Batch, SamplingParams, StepResult

if TYPE_CHECKING:  # a CPU has no graphs; the runner imports this module
    from fastgen.engine.cuda_graphs import Graphs
    from fastgen.kernels.batch_invariant import Fused
    from fastgen.model.linear import Linear


@dataclass(frozen=True)
class StepSequences:
    """The sequences of a step, decodes first, as int64 numpy arrays."""

    lanes: np.ndarray  # [S]
    query_lens: np.ndarray  # [S]
    kv_lens: np.ndarray  # [S], with the query tokens
    num_draws: np.ndarray  # [S], number of lanes that draw from its last query token
    forks: np.ndarray  # [F], lanes that draw from another's last token

    @property
    def tokens(self) -> int:
        return int(self.query_lens.sum())

    def layout(self, page_table: Tensor, decodes: int, shared: bool) -> StepLayout:
        """Return the layout for attention. The arguments are its fields."""
        return StepLayout(self.query_lens, self.kv_lens, decodes, self.lanes, page_table, shared)

    def positions(self) -> np.ndarray:
        """Return the positions of the query tokens in their sequences: int64 [T]."""
        first = self.kv_lens - self.query_lens.cumsum()  # the position that token 0 of the step would have in each
        positions: np.ndarray = np.repeat(first, self.query_lens) + np.arange(self.query_lens.sum())
        return positions

    def token_ids(self, batch: Batch, padding: int) -> np.ndarray:
        """Return the tokens of the step: int64 [T]; 0 for decodes, whose tokens are on the device, and for padding."""
        zeros = np.zeros(len(batch.decodes) + padding, dtype=np.int64)
        chunks = [chunk.tokens for chunk in batch.prefills]
        return np.concatenate([zeros[padding:], *chunks, zeros[:padding]])


class Lanes:
    """The rows of device state that running sequences hold: page table, KV length, sampling state.

    The last lane, `padding`, is for rows that a CUDA graph has and a step does not need; they run on the page `spare`.
    host_table and host_kv_lens are copies on the host. input: the rows of a decode step, one per lane, at fixed
    addresses. samples: this rank draws the tokens.
    """

    reads_early = True  # see RowSource

    def __init__(
        self, config: EngineConfig, vocab: int, page_size: int, spare: int, device: torch.device, samples: bool
    ) -> None:
        self.padding = config.max_seqs
        count, columns = config.max_seqs + 1, -(-config.max_model_len // config.page_size)
        self.page_table = torch.full((count, columns), spare, dtype=torch.int32, device=device)
        self.kv_lens = torch.zeros(count, dtype=torch.int32, device=device)
        self.state = LaneState(count, vocab, device, samples)
        self.host_table = np.full((count, columns), spare, dtype=np.int32)
        self.host_kv_lens = np.zeros(count, dtype=np.int64)
        self.params = [SamplingParams()] * count
        self.input = DecodeInput.empty(config.max_seqs, device)
        self._plans = np.zeros((len(SamplePlan._fields), count), dtype=np.int64)  # by lane
        self._decodes: tuple[int, ...] = ()  # the lanes in `input`
        self._decode_lanes = np.zeros(0, dtype=np.int64)
        self._page_size, self._spare, self._device, self._samples = page_size, spare, device, samples

    def update_tables(self, batch: Batch) -> None:
        """Write the batch's page updates into the page tables."""
        if batch.page_updates:
            columns = self.host_table.shape[1]
            cells = [np.arange(len(new)) + (lane * columns + first) for lane, first, new in batch.page_updates]
            pages = [np.array(new, dtype=np.int32) for _, _, new in batch.page_updates]
            cell, page = np.concatenate(cells), np.concatenate(pages)
            self.host_table.reshape(-1)[cell] = page
            self.page_table.view(-1).index_copy_(0, *upload_together([cell, page], self._device))

    def start(self, batch: Batch) -> None:
        """Take over the parameters of the lanes that a batch starts."""
        if batch.starts and self._samples:
            self.state.start(batch.starts)
            for start in batch.starts:
                self.params[start.lane] = start.params
                self._plans[:, start.lane] = SamplePlan.of(start.params)

    def set_decodes(self, decodes: tuple[int, ...]) -> None:
        """Send the lanes that decode, if they changed."""
        if decodes is not self._decodes and decodes != self._decodes:
            self._decode_lanes = np.array(decodes, dtype=np.int64)
            lanes = np.full(self.padding, self.padding, dtype=np.int64)  # padding for any size
            lanes[: len(decodes)] = self._decode_lanes
            self.input.lanes.copy_(upload(lanes, self._device))
        self._decodes = decodes

    def count_decodes(self) -> None:
        """Add the tokens of the lanes that decode to host_kv_lens."""
        self.host_kv_lens[self._decode_lanes] += 1

    def count_batch(self, batch: Batch) -> StepSequences:
        """Add the tokens of a batch to host_kv_lens, and return its sequences. A fork's length becomes the end of its
        chunk."""
        lengths, decodes = self.host_kv_lens, len(batch.decodes)
        lanes = np.array([*batch.decodes, *(chunk.lane for chunk in batch.prefills)], dtype=np.int64)
        query_lens = np.array([1] * decodes + [len(chunk.tokens) for chunk in batch.prefills], dtype=np.int64)
        lengths[lanes[:decodes]] += 1
        lengths[lanes[decodes:]] = [chunk.start + len(chunk.tokens) for chunk in batch.prefills]
        draws = np.array([1] * decodes + [chunk.sample + len(chunk.forks) for chunk in batch.prefills], dtype=np.int64)
        forks = np.array([lane for chunk in batch.prefills for lane in chunk.forks], dtype=np.int64)
        assert all(chunk.sample for chunk in batch.prefills if chunk.forks)
        kv_lens = lengths[lanes]
        lengths[forks] = np.repeat(kv_lens[decodes:], [len(chunk.forks) for chunk in batch.prefills])
        return StepSequences(lanes, query_lens, kv_lens, draws, forks)

    def make_rows(self, size: int, exact: bool = False) -> DecodeInput:
        """Write the rows of the first `size` lanes that decode, and count their tokens in kv_lens."""
        rows = self.input.first(size)
        advance(self.state.last_token, self.kv_lens, self.page_table, rows, self._page_size)
        return rows

    def graph_rows(self, size: int, count: int) -> DecodeInput:
        return self.input.first(count)

    def plan_of(self, lanes: tuple[int, ...]) -> SamplePlan:
        """Return the operations that the sampler needs for these lanes."""
        return SamplePlan.together(self._plans.take(lanes, 1))

    def slots(self, lanes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the slots of the KV pool for tokens of these lanes at these positions: int64 [T]."""
        pages = self.host_table[lanes, positions // self._page_size].astype(np.int64)
        slots: np.ndarray = pages * self._page_size + positions % self._page_size
        return slots

    def clear(self) -> None:
        """Empty all lanes."""
        self.kv_lens.zero_()
        self.host_kv_lens[:] = 0
        self.page_table.fill_(self._spare)
        self.host_table.fill(self._spare)

    def forget_decodes(self) -> None:
        """Let the next step send the lanes that decode, even if they have not changed."""
        self._decodes = ()


class RowSource(Protocol):
    """Makes the rows of a step of decodes from the lanes on the device: Lanes, or a feature that adds rows.

    reads_early: whether these rows keep the promise of `reads_early` in Attention.plan_decode.
    """

    @property
    def reads_early(self) -> bool: ...

    def make_rows(self, size: int, exact: bool = False) -> DecodeInput:
        """Launch the kernels that make the rows of the first `size` lanes of `Lanes.input`, and return the rows. A CUDA
        graph can hold these launches, unless `exact` is set: that may leave padding out."""

    def graph_rows(self, size: int, count: int) -> DecodeInput:
        """Return the rows to draw from, after a graph of `size` lanes has run for the `count` lanes of a step."""


class DecodeBody(Protocol):
    """Protocol of `Runner.decode_body`."""

    def __call__(
        self, size: int, shared: bool = False, source: RowSource | None = None, layers: Sequence[int] | None = None
    ) -> None: ...


@dataclass(eq=False)
class Launched:
    """A step in flight. Its results are on the host when the event `arrived` has passed (None: now). Keep it until
    then, since a kernel writes to `sampled.packed`.

    sampling: the lane of each result. lanes: int64 [R], the lanes that draw. positions: int32 [R], the positions of the
    tokens to draw. logits: float32 [R, V] on rank 0, until tokens are drawn. All three may be at fixed addresses, where
    the next launch overwrites them.

    For features: source: makes the rows of a step of decodes, instead of the Runner's Lanes. graphs: the CUDA graphs of
    such steps, by number of lanes. all_rows: the layers compute the results of all tokens, not only of
    those that are drawn from. kept: receives copies of the residual stream; such a step runs without a CUDA graph.
    arrivals: the events of HostTier.load, by layer. held: what a feature keeps until `collect`, by the type of its
    payload.
    """

    batch: Batch
    sampling: tuple[int, ...]
    lanes: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    logits: Tensor | None = None
    sampled: SampleOutput | None = None
    expired: Tensor | None = None  # see Group
    arrived: torch.cuda.Event | None = None
    source: RowSource | None = None
    graphs: Graphs[int] | None = None
    all_rows: bool = False
    kept: KeptStreams | None = None
    arrivals: dict[int, torch.cuda.Event] = field(default_factory=dict)
    held: dict[type, Any] = field(default_factory=dict)


Payload = TypeVar("Payload")


class StepFeature(Generic[Payload]):
    """The hooks of a feature in the runner, called in each step whose Batch has a payload for it; see PlanFeature.

    The hooks of a step's features run in the order of the payloads. `launch` calls `before`, then `after`, `restrict`
    and `drawn`; in a masked step, `sample` calls the last two. They run on all ranks, except for `restrict`, which runs
    on rank 0. `collect` is called one step later, also on rank 0.

    On a GPU, warm_up calls the other hooks before the first request, so that all kernels are compiled, the memory of
    the largest step is measured, and steps of decodes that the feature makes are captured.
    """

    def clear(self) -> None:
        """Forget what the lanes hold, when all lanes are emptied after the warm-up."""

    def before(self, step: Launched, payload: Payload) -> None:
        """Act before the step is built, and before the lanes get its page updates and parameters."""

    def after(self, step: Launched, payload: Payload, x: Tensor) -> None:
        """Act when the layers of a step with prefills have been launched, if `before` has set `step.all_rows`. x: the
        residual stream after the last layer, [T, hidden size], perhaps with padding."""

    def restrict(self, step: Launched, payload: Payload, bits: Tensor | None, last_tokens: Tensor) -> Tensor | None:
        """Return the tokens that may be drawn, which may depend on `step.logits`. bits: int32 [R, ceil(V / 32)], the
        mask so far (see `model.sampler.draw`), which may be changed. last_tokens: int64 [S], the last token of each
        lane, undefined for lanes that have not decoded yet."""
        return bits

    def drawn(self, step: Launched, payload: Payload, tokens: Tensor) -> None:
        """Act when the draws, int32 [R], have been launched; not called if no lane draws."""

    def collect(self, step: Launched, payload: Payload, result: StepResult) -> None:
        """Act when the results are on the host: change step.sampled and step.sampling, or add to result.features."""

    def largest_payloads(self, config: EngineConfig, rows: int, top: int) -> Iterable[Payload]:
        """Return the payload that takes the most memory in a step of prefills on all lanes, if there is one. rows:
        number of tokens of the chunk on lane 0, less one; 0: nothing is asked of them. top: alternatives of each."""
        return ()

    def largest_batches(self, config: EngineConfig) -> Iterable[Batch]:
        """Return the largest steps that the feature makes, to be run in this order."""
        return ()

    @property
    def linears(self) -> Iterable[tuple[Linear, Fused]]:
        """Linear layers that are not the model's, one of each kind, with the operations that are fused with them; see
        warm_up.products_of."""
        return ()

    @property
    def num_graphs(self) -> int:
        """The number of graphs that `capture` makes of all sizes."""
        return 0

    def rehearse(self, body: DecodeBody, layers: Sequence[int]) -> None:
        """Run each step that `capture` captures once, on padding, through these layers. body: Runner.decode_body."""

    def capture(self, body: DecodeBody, largest: bool, partner: Graphs[int]) -> Iterable[Graphs[int]]:
        """Return CUDA graphs, captured, which share a memory pool with `partner`. body: Runner.decode_body. largest:
        only of the largest step."""
        return ()
