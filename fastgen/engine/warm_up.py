"""Steps on made-up tokens before the first request on a GPU: they compile the kernels, are captured in CUDA graphs, and
show how much memory the largest step takes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch

from fastgen.device.chip import Chip, current
from fastgen.engine import halves
from fastgen.engine.cuda_graphs import PREFILL_TOKENS, Graphs, batch_sizes, prefill_sizes, shared_sizes
from fastgen.engine.features import make_requested
from fastgen.engine.largest_steps import largest_batches
from fastgen.engine.prefill_graphs import PrefillGraphs
from fastgen.engine.runner import Runner
from fastgen.kernels.batch_invariant import UNFUSED, Fused, RopeWrite
from fastgen.kernels.rope import SlotMapping
from fastgen.kernels.scoring import MAX_LISTED
from fastgen.model.attention.interface import CapturableAttention
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import Linear
from fastgen.model.transformer import Transformer
from fastgen.request import Batch, LaneStart, Prefill, SamplingParams

LAUNCH_SECONDS = 0.5e-3  # that the host takes at least to launch the kernels of a layer of a step with prefills
FLOPS = 6e14  # rate of long products in bfloat16 on an H100 or H200
FLASH_TOKENS = 256  # up to which steps are captured, with our own kernels, if flash-attn computes prefills


def compile_kernels(runner: Runner) -> None:
    """Compile the kernels that steps need. Here and below, what only GPUs load is imported in functions."""
    from fastgen.kernels.triton.compile_ahead import compile_ahead

    show = sys.stderr.isatty() and runner.group.rank == 0
    compile_ahead(partial(_launch_all, runner), runner.device, show)


def _launch_all(runner: Runner) -> None:
    """Launch each kernel that a step may need: in the largest steps, in decodes of all sizes, and in products of all
    sizes that have kernels of their own."""
    from fastgen.kernels.triton import batch_invariant

    config, model = runner.config, runner.model
    run_largest_steps(runner)
    if runner.attention.capturable:
        sizes = batch_sizes(config.max_seqs)
        rehearse_decodes(runner, sizes)
        if prefills := captured_prefills(runner):
            make_prefill_graphs(runner, prefills, sizes).rehearse(kinds_of_layers(runner.model))
    deterministic = model.parameters.lm_head.batch_invariant
    sizes = [*batch_invariant.SIZES, config.max_step_tokens] if deterministic else []
    more = [each for feature in runner.features.values() for each in feature.linears]
    launch_products(model, runner.pool, sizes, more)
    if deterministic:
        return
    for size in (size for size in batch_invariant.SIZES if size <= batch_invariant.MAX_TOKENS):
        count = min(size, config.max_step_tokens, config.max_model_len - 1)
        start = LaneStart(0, SamplingParams(), prompt_len=count)
        zeros = np.zeros(count, dtype=np.int32)
        # The features let the head run on all of these rows.
        payloads = [each for feature in runner.features.values() for each in feature.largest_payloads(config, count, 0)]
        chunk = Prefill(0, 0, zeros, True)
        runner.collect(runner.launch(Batch(prefills=(chunk,), starts=(start,), features=tuple(payloads))))
    runner.clear_lanes()


@torch.inference_mode()
def launch_products(
    model: Transformer, pool: KVPool, sizes: list[int], more: Iterable[tuple[Linear, Fused]] = ()
) -> None:
    """Launch the kernels of linear layers: fp8 products, and int4 and batch-invariant products for steps of these
    numbers of tokens, on which their tiles depend. more: linear layers in addition to the model's, as in
    `products_of`."""
    from fastgen.kernels.triton import batch_invariant
    from fastgen.model.int4_linear import Int4Linear
    from fastgen.model.quantized import Fp8Linear, WeightOnlyFp8

    device = pool.keys[0].device
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
            tiles = batch_invariant.config(size, *linear.weight.shape, x.dtype, Chip.of(device))
            rope = fused.rope if batch_invariant.fuses_rope(size, x.dtype, Chip.of(device)) else None
            batch_invariant.launch_as(tiles, x, linear.weight, linear.bias, fused._replace(rope=rope))


def products_of(model: Transformer, mapping: SlotMapping, pool: KVPool) -> list[tuple[Linear, Fused]]:
    """Return one linear layer per kind, with the operations that are fused with it for one token at `mapping`. A layer
    that is in fp8 in some layers of the model and not in others is two kinds."""
    head, layers = model.parameters.lm_head, model.layers
    apart = layers[-1].head_norm or layers[-1].wide_norm or pool.fp8 or model.config.partial_rope
    rope = None if apart else RopeWrite(mapping, pool.keys[0], pool.values[0])
    zeros = model.parameters.norm.weight.new_zeros(1, model.config.hidden_size)
    adds = Fused(add=zeros if model.config.adds_products else None)
    fused = Fused(rope=rope), adds, Fused(swiglu=model.config.swiglu), adds, UNFUSED  # in the order of Layer.linears
    kinds = {
        (at, layer.delta is None, type(linear)): (linear, fused[at])
        for layer in layers
        for at, linear in enumerate(layer.linears)
    }
    return [*kinds.values(), (head, Fused(out_dtype=torch.float32))]


def run_largest_steps(runner: Runner) -> None:
    """Run the largest possible steps on made-up tokens, with every kind of sampling operation and with none, and steps
    of few tokens with penalties and truncation."""
    plain = SamplingParams()
    everything = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, min_tokens=1,
        return_sampling_mask=True, logit_bias={0: 1.0}, logprobs=min(MAX_LISTED, runner.model.config.vocab_size),
    )  # fmt: skip
    demanding = SamplingParams(temperature=0.5, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1)
    config = runner.config
    make_requested(runner.features)
    small = replace(config, max_step_tokens=config.max_seqs)
    for params, size in ((everything, config), (demanding, small), (plain, config)):
        for batch in largest_batches(size, params, runner.features.values()):
            runner.collect(runner.launch(batch))
    runner.clear_lanes()


@torch.inference_mode()
def capture(runner: Runner, sizes: list[int] | None = None, prefills: list[int] | None = None) -> None:
    """Capture the CUDA graphs of decode steps, of steps that features make, and of steps with prefills.

    sizes: numbers of lanes for which decode steps are captured; None: all. If given, only the largest step of each
        feature is captured.
    prefills: numbers of tokens for which steps with prefills are captured; None: all.
    """
    config, device, group = runner.config, runner.device, runner.group
    largest, sizes = sizes is not None, sizes or batch_sizes(config.max_seqs)
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
        for feature in runner.features.values():
            for graphs in feature.capture(runner.decode_body, largest, plain):
                group.register_graphs(graphs)
        if prefills:
            runner.prefill_graphs = made = make_prefill_graphs(runner, prefills, sizes, plain)
            made.rehearse(kinds_of_layers(runner.model))
            made.capture()
            for part in (*made.layers.values(), made.ends):
                group.register_graphs(part)


def captured_prefills(runner: Runner) -> list[int]:
    """Return the numbers of tokens for which steps with prefills are captured."""
    c = runner.model.config
    # Up to this number of tokens, the host takes longer to launch a step's kernels than the GPU to run them.
    host_bound = int(LAUNCH_SECONDS * c.num_layers * FLOPS / (2 * c.num_parameters))
    most = min(runner.config.max_step_tokens, max(host_bound, PREFILL_TOKENS))
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
    for feature in runner.features.values():
        feature.rehearse(runner.decode_body, layers)
    lanes.forget_decodes()


def count_graphs(runner: Runner) -> int:
    """Return the number of graphs that `capture` makes of all sizes."""
    sizes = batch_sizes(runner.config.max_seqs)
    shared = shared_sizes(sizes) if shares_prefixes(runner) else []
    of_features = sum(feature.num_graphs for feature in runner.features.values())
    prefills = captured_prefills(runner)
    draws = sizes if prefills else []
    return of_features + sum(map(len, (sizes, shared, prefills * (2 if shared else 1), draws)))


def shares_prefixes(runner: Runner) -> bool:
    """Return whether decodes read the pages that sequences share once."""
    return runner.prefixes is not None and runner.prefixes.enabled
