"""Steps on made-up tokens before the first request: they compile the kernels, are captured in CUDA graphs, and show how
much memory the largest step takes and how fast prefills are."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch

from fastgen.device.chip import Chip, current
from fastgen.engine import halves
from fastgen.engine.cuda_graphs import Graphs, batch_sizes, prefill_sizes, shared_sizes
from fastgen.engine.options import MIN_PREFILL_TOKENS, EngineConfig
from fastgen.engine.pages import PageMoves
from fastgen.engine.prefill_graphs import PrefillGraphs
from fastgen.engine.prompt_scorer import SCORE_ROWS
from fastgen.engine.prompt_scores import ScorePlan, ScoreRequest
from fastgen.engine.runner import Runner
from fastgen.engine.speculation.drafting import Drafting, speculative_sizes
from fastgen.engine.speculation.planning import DraftPlan
from fastgen.engine.speculation.self_draft import SelfDraft
from fastgen.kernels import scoring
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.rope import SlotMapping
from fastgen.model.attention.interface import CapturableAttention
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import Linear
from fastgen.model.transformer import Transformer
from fastgen.request import Batch, LaneStart, Prefill, SamplingParams

STEP_SECONDS = 0.06  # limit of a step of decodes and prefills at the measured rate; rounding makes it 50 ms on average
MULTIPLE = 1024  # tokens; for Mistral 7B on an H200, a step of 2176 takes 21 % longer than one of 2048
FLASH_TOKENS = 256  # up to which steps are captured, with our own kernels, if flash-attn computes prefills
CPU_RATE_TOKENS = 64  # tokens of the step that measures the speed of prefills on the CPU


def compile_kernels(runner: Runner) -> None:
    """Compile the kernels that steps need. Imported here, since only GPUs load them."""
    from fastgen.kernels.triton.compile_ahead import compile_ahead

    show = sys.stderr.isatty() and runner.group.rank == 0
    compile_ahead(partial(_launch_all, runner), runner.device, show)


def _launch_all(runner: Runner) -> None:
    """Launch each kernel that a step may need: in the largest steps, in decodes of all sizes, and in products of all
    sizes that have kernels of their own."""
    from fastgen.kernels.triton import batch_invariant  # as above

    config, model = runner.config, runner.model
    run_largest_steps(runner)
    if runner.attention.capturable:
        sizes = batch_sizes(config.max_seqs)
        rehearse_decodes(runner, sizes)
        if prefills := captured_prefills(runner):
            make_prefill_graphs(runner, prefills, sizes).rehearse(kinds_of_layers(runner.model))
    deterministic = model.parameters.lm_head.batch_invariant
    head = drafting.head if (drafting := drafting_of(runner)) else None
    sizes = [*batch_invariant.SIZES, config.max_step_tokens] if deterministic else []
    launch_products(model, runner.pool, sizes, head.linears if head else ())
    if isinstance(head, SelfDraft):
        launch_products(head.model, runner.pool, sizes)
    if deterministic:
        return
    for size in (size for size in batch_invariant.SIZES if size <= batch_invariant.MOST):
        count = min(size, config.max_step_tokens, config.max_model_len - 1)
        start = LaneStart(0, SamplingParams(), prompt_len=count)
        zeros = np.zeros(count, dtype=np.int32)
        scores = ScorePlan((ScoreRequest(0, 0, zeros),))  # so that the head is run too
        runner.collect(
            runner.launch(Batch(prefills=(Prefill(0, 0, zeros, True),), starts=(start,), features=(scores,)))
        )
    runner.clear_lanes()


@torch.inference_mode()
def launch_products(
    model: Transformer, pool: KVPool, sizes: list[int], more: Iterable[tuple[Linear, Fused]] = ()
) -> None:
    """Launch the kernels of linear layers: fp8 products, and int4 and batch-invariant products for steps of these
    numbers of tokens, on which their tiles depend. more: linear layers in addition to the model's, as in
    `products_of`."""
    from fastgen.kernels.triton import batch_invariant  # as above
    from fastgen.model.int4_linear import Int4Linear
    from fastgen.model.quantized import Fp8Linear, WeightOnlyFp8

    device = pool.keys.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    for linear, fused in (*products_of(model, model.slot_mapping(pool, zero, zero - 1, 1), pool), *more):
        if isinstance(linear, Fp8Linear):
            linear.launch_all(fused, model.parameters.dtype)
            if not isinstance(linear, WeightOnlyFp8):
                continue
            linear = linear.dequantized(model.parameters.dtype)
        if isinstance(linear, Int4Linear):
            linear.launch_all(fused, model.parameters.dtype, sizes)
            continue
        x = linear.weight.new_zeros(1, linear.weight.shape[1])
        for size in sizes:
            found = batch_invariant.config(size, *linear.weight.shape, x.dtype, Chip.of(device))
            rope = fused.rope if batch_invariant.fuses_rope(size, x.dtype, Chip.of(device)) else None
            batch_invariant.launch_as(found, x, linear.weight, linear.bias, fused._replace(rope=rope))


def products_of(model: Transformer, mapping: SlotMapping, pool: KVPool) -> list[tuple[Linear, Fused]]:
    """Return one linear layer per kind, with the operations that are fused with it for one token at `mapping`. A layer
    that is in fp8 in some layers of the model and not in others is two kinds."""
    head, layers = model.parameters.lm_head, model.layers
    normed = layers[0].head_norm or layers[0].wide_norm
    rope = None if normed or pool.fp8 else RopeWrite(mapping, pool.keys[0], pool.values[0])
    zeros = model.parameters.norm.weight.new_zeros(1, model.config.hidden_size)
    adds = Fused(add=zeros if model.config.adds_products else None)
    fused = Fused(rope=rope), adds, Fused(swiglu=model.config.gated), adds  # in the order of Layer.linears
    kinds = {(at, type(linear)): (linear, fused[at]) for layer in layers for at, linear in enumerate(layer.linears)}
    return [*kinds.values(), (head, Fused(out_dtype=torch.float32))]


def run_largest_steps(runner: Runner) -> None:
    """Run the largest possible steps on made-up tokens, with every kind of sampling operation and with none, and steps
    of few tokens with penalties and truncation."""
    plain = SamplingParams()
    everything = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, min_tokens=1,
        logit_bias={0: 1.0}, logprobs=min(scoring.MOST, runner.model.config.vocab_size), return_sampling_mask=True,
    )  # fmt: skip
    demanding = SamplingParams(temperature=0.5, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1)
    config = runner.config
    small = replace(config, max_step_tokens=config.max_seqs)
    for params, size in ((everything, config), (demanding, small), (plain, config)):
        for batch in largest_batches(size, params):
            runner.collect(runner.launch(batch))
    runner.clear_lanes()


def largest_batches(config: EngineConfig, params: SamplingParams) -> Iterator[Batch]:
    """Yield a step of prefills on all lanes that fill the token budget, a step of decodes on all lanes, and, after a
    step that starts its lanes, the speculative step with the maximum number of lanes.

    The steps also save, load, wipe and copy the spare page. Forks are left out: they take no more memory than prefills.
    """
    lanes, most = config.max_seqs, config.max_model_len - 1
    lengths, left = [1] * lanes, config.max_step_tokens - lanes
    for lane in range(lanes):  # the first lanes are the longest, so that many rows are scored
        more = min(left, most - 1)
        lengths[lane], left = 1 + more, left - more
    scored = min(lengths[0] - 1, SCORE_ROWS) if params.logprobs else 0
    starts = tuple(LaneStart(lane, params, 0, 0, lengths[lane], frozenset((0,)), (0,)) for lane in range(lanes))
    score = ScoreRequest(0, 0, np.zeros(scored, dtype=np.int32), params.logprobs or 0)
    prefills = tuple(Prefill(lane, 0, np.zeros(lengths[lane], dtype=np.int32), True) for lane in range(lanes))
    spare = config.num_pages
    saves, loads = (((spare, 0),), ((0, spare),)) if config.host_pages else ((), ())
    scores = (ScorePlan((score,)),) if scored else ()
    yield Batch(prefills=prefills, starts=starts, features=(PageMoves((spare,), saves, loads), *scores))
    yield Batch(decodes=tuple(range(lanes)), copies=((0, spare),))
    if config.speculate:
        lanes = speculative_sizes(config)[-1]
        rows = (config.speculate.max_draft + 1,) * lanes
        token = np.zeros(1, dtype=np.int32)
        texts = tuple((lane, 0, token) for lane in range(lanes))
        first = tuple(Prefill(lane, 0, token, True) for lane in range(lanes))
        limits = (most,) * lanes if config.speculate.head else ()
        yield Batch(prefills=first, features=(DraftPlan(texts=texts, drafts=True, limits=limits),))
        yield Batch(decodes=tuple(range(lanes)), features=(DraftPlan(rows=rows, drafts=True, limits=limits),))


@torch.inference_mode()
def capture(runner: Runner, sizes: list[int] | None = None, prefills: list[int] | None = None) -> None:
    """Capture the CUDA graphs of decode steps, speculative steps and steps with prefills.

    sizes: numbers of lanes for which decode steps are captured; None: all. If given, only the largest speculative step
        is captured.
    prefills: numbers of tokens for which steps with prefills are captured; None: all.
    """
    config, device, group = runner.config, runner.device, runner.group
    speculative = speculative_sizes(config)[-1 if sizes else 0 :]
    sizes = sizes or batch_sizes(config.max_seqs)
    prefills = captured_prefills(runner) if prefills is None else prefills
    with current(device):
        rehearse_decodes(runner, sizes)  # compiles all kernels; those that do not compile disable attention.prefixes
        if not runner.attention.capturable:
            return
        plain = Graphs(sizes, device)
        plain.capture(runner.decode_body, compiled=True)
        runner.graphs = {False: plain}
        if shares_prefixes(runner):
            runner.graphs[True] = Graphs(shared_sizes(sizes), device, partner=plain)
            runner.graphs[True].capture(lambda size: runner.decode_body(size, shared=True), compiled=True)
        for graphs in runner.graphs.values():
            group.register_graphs(graphs)
        if drafting := drafting_of(runner):
            drafting.graphs = Graphs(speculative, device, partner=plain)
            drafting.graphs.capture(lambda size: runner.decode_body(size, source=drafting), compiled=True)
            group.register_graphs(drafting.graphs)
            if drafting.head is not None:
                drafting.head.graphs = Graphs(speculative, device, partner=plain)
                drafting.head.graphs.capture(drafting.head.body)
                group.register_graphs(drafting.head.graphs)
        if prefills:
            runner.prefill_graphs = made = make_prefill_graphs(runner, prefills, sizes, plain)
            made.rehearse(kinds_of_layers(runner.model))
            made.capture()
            for part in (*made.layers.values(), made.ends):
                group.register_graphs(part)


def captured_prefills(runner: Runner) -> list[int]:
    """Return the numbers of tokens for which steps with prefills are captured."""
    most = runner.config.max_step_tokens
    if runner.config.attention == "flash":
        most = min(most, FLASH_TOKENS)
    if runner.group.exchange is not None:
        most = min(most, halves.CUT_TOKENS - 1)
    return prefill_sizes(most)


def make_prefill_graphs(
    runner: Runner, prefills: list[int], draws: list[int], partner: Graphs[int] | None = None
) -> PrefillGraphs:
    """Return PrefillGraphs that are not yet captured."""
    attention = cast(CapturableAttention, runner.attention)
    return PrefillGraphs(
        runner.model, runner.pool, attention, runner.lanes, runner.logits, prefills, draws,
        shares_prefixes(runner), partner,
    )  # fmt: skip


def kinds_of_layers(model: Transformer) -> list[int]:
    """Return the numbers of layers that have all kernels of the model: one of each kind, and those that are read."""
    return sorted({*model.parameters.distinct, *(model.observer.layers if model.observer else ())})


@torch.inference_mode()
def rehearse_decodes(runner: Runner, sizes: list[int]) -> None:
    """Run decode steps of these numbers of lanes on padding, as they will be captured, through one layer per kind."""
    lanes, layers = runner.lanes, kinds_of_layers(runner.model)
    lanes.input.lanes.fill_(lanes.padding)
    for size in sizes:
        runner.decode_body(size, layers=layers)
    for size in shared_sizes(sizes) if shares_prefixes(runner) else ():
        runner.decode_body(size, shared=True, layers=layers)
    for size in speculative_sizes(runner.config):
        runner.decode_body(size, source=drafting_of(runner), layers=layers)
    lanes.forget_decodes()


def count_graphs(runner: Runner) -> int:
    """Return the number of graphs that `capture` makes of all sizes."""
    config = runner.config
    sizes = batch_sizes(config.max_seqs)
    shared = shared_sizes(sizes) if shares_prefixes(runner) else []
    speculative = speculative_sizes(config) * (2 if config.speculate and config.speculate.head else 1)
    prefills = captured_prefills(runner)
    draws = sizes if prefills else []
    return sum(map(len, (sizes, shared, speculative, prefills * (2 if shared else 1), draws)))


def shares_prefixes(runner: Runner) -> bool:
    """Return whether decodes read the pages that sequences share once."""
    return runner.prefixes is not None and runner.prefixes.enabled


def drafting_of(runner: Runner) -> Drafting | None:
    """Return the feature that drafts tokens; None if speculation is off."""
    found = runner.features.get(DraftPlan)
    return found if isinstance(found, Drafting) else None


def measure_prefill_tokens(runner: Runner) -> int:
    """Return the number of prefill tokens in a step of about 50 ms: the minimum over the ranks, since all ranks have
    the same schedule.

    The rate is measured in the largest step on a GPU, and in a short step on the CPU, where the largest may take
    seconds.
    """
    config = runner.config
    if runner.device.type == "cpu":
        config = replace(config, max_seqs=1, max_step_tokens=min(config.max_step_tokens, CPU_RATE_TOKENS))
    largest = next(largest_batches(config, SamplingParams()))
    batch, seconds = Batch(prefills=largest.prefills, starts=largest.starts), math.inf
    for _ in range(2):
        start = time.perf_counter()
        runner.collect(runner.launch(batch))
        seconds = min(seconds, time.perf_counter() - start)
    runner.clear_lanes()
    rate = sum(len(chunk.tokens) for chunk in batch.prefills) / seconds
    return runner.group.minimum(min(even_tokens(rate * STEP_SECONDS), runner.config.max_step_tokens))


def even_tokens(most: float) -> int:
    """Return the largest number of tokens <= `most` whose tiles fill a GPU evenly, but at least MIN_PREFILL_TOKENS."""
    unit = MULTIPLE if most >= MULTIPLE else MIN_PREFILL_TOKENS
    return max(int(most) // unit * unit, MIN_PREFILL_TOKENS)
