"""The start of an engine on one rank: load the weights, size the KV pool, compile kernels and capture CUDA graphs.

On a GPU the peak memory of a step is measured: after the weights are loaded, the largest step runs over a pool of one
page, and the pool then takes the rest of `memory_fraction`. The graphs are captured and the largest step runs again
with the pool in place; torch keeps its memory. If memory is too small, the start fails, and not a later step.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import torch

from fastgen.device.chip import Chip, current
from fastgen.device.find import first_line, is_out_of_memory
from fastgen.device.memory import device_memory, release_memory
from fastgen.device.threads import FreeCores
from fastgen.disk import naming_full_disk
from fastgen.engine.features import HYBRID, Feature, StepFeatures, features_of
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.runner import Runner
from fastgen.kernels.launch import kernels_of, slower_than_possible, triton
from fastgen.model.attention.interface import Attention
from fastgen.model.config import ModelConfig
from fastgen.model.kv_pool import KVPool
from fastgen.model.loader import fill_random, scale_dtype
from fastgen.model.loader import load as load_checkpoint
from fastgen.model.parameters import Parameters, checkpoint_shards
from fastgen.model.quantization import Int4, explaining_sizes
from fastgen.model.transformer import Transformer
from fastgen.parallel.group import Group
from fastgen.processes.process_memory import keep_heap

log = logging.getLogger(__name__)

BuildArguments = tuple[ModelConfig, GeneratorOptions, Path]
"""The first arguments of `build_rank`."""

GRAPH_BYTES = 4e6  # memory of one graph, without its tensors


@torch.inference_mode(False)  # inference tensors cannot be written outside of the program's inference mode
def build_rank(model_config: ModelConfig, options: GeneratorOptions, folder: Path, device: str, group: Group) -> Runner:
    """Return the Runner of a rank of `group`. device: device of this rank; `options.device` may be another rank's."""
    release_memory(device)
    memory, kernels = group.minimum(device_memory(device)), kernels_of(torch.device(device))
    processors = group.minimum(Chip.of(torch.device(device)).processors)
    config = EngineConfig.make(
        model_config.split(group.size), replace(options, device=device), memory, kernels, processors
    )
    if config.deterministic and not group.sums_in_order:
        if options.deterministic:
            raise ValueError("deterministic=True needs all ranks on one host; leave it out, or use fewer ranks")
        config = replace(config, deterministic=False)
    if model_config.quantization and torch.device(device).type == "cuda":
        with explaining_sizes(group.size):
            check_quantized(model_config.split(group.size), config.dtype)
    if config.kv_cache_dtype == "fp8" and kernels != "torch" and Chip.of(torch.device(device)).capability < (8, 9):
        raise ValueError("kv_cache_dtype='fp8' needs an Ada or Hopper GPU or a newer one; leave it out")
    if slower := slower_than_possible(torch.device(device)):
        log.warning("%s: %s", device, slower)
    return build_runner(model_config, config, folder, options.load, group)


def check_quantized(model: ModelConfig, dtype: str) -> None:
    """Raise ValueError if a GPU cannot run a model with quantized weights. model: config of one rank. Only the kind of
    weights that the model has is imported."""
    if isinstance(model.quantization, Int4):
        from fastgen.model.int4_linear import check_int4

        check_int4(model, model.quantization)
    else:
        from fastgen.model.quantized import check_fp8

        check_fp8(model, dtype)


def build_runner(model_config: ModelConfig, config: EngineConfig, folder: Path, load: str, group: Group) -> Runner:
    """Load the model and its weights, size the KV pool, and return the runner; its `config` has the pool's size."""
    device, features = torch.device(config.device), features_of(config)
    free = device_memory(config.device)
    kernels = os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")
    remedy = "make room, or set TRITON_CACHE_DIR to a folder on another disk"
    with _explain_out_of_memory(config, free), naming_full_disk(kernels, remedy), current(device):
        with group.agreeing():  # if one rank cannot load its weights, the others must not wait for it
            model = build_model(model_config, config, folder, load, group)
            for feature in features:
                feature.load(model, load)
        on_cpu = device.type == "cpu"
        if on_cpu:
            keep_heap()
        runner = make_runner(model, config, features) if on_cpu else _start_gpu(model, config, free, features)
        if not config.max_prefill_tokens:
            from fastgen.engine.largest_steps import measure_prefill_tokens  # only if it is to be measured

            runner.config = replace(runner.config, max_prefill_tokens=measure_prefill_tokens(runner))
    return runner


def _start_gpu(model: Transformer, config: EngineConfig, free: int, features: list[Feature]) -> Runner:
    """Return a runner whose kernels are compiled and whose graphs are captured.

    free: bytes of device memory that were free before the weights were loaded. Here and in `measure_pages` warm_up is
    imported, since a CPU has nothing to warm up.
    """
    from fastgen.engine import warm_up

    measured = not config.num_pages
    if measured:
        config = config.with_pages(measure_pages(model, config, free, features))
    runner = make_runner(model, config, features)
    if not measured:  # measure_pages has not compiled the kernels
        warm_up.compile_kernels(runner)
        warm_up.run_largest_steps(runner)
    if runner.attention.capturable:
        warm_up.capture(runner)
    warm_up.run_largest_steps(runner)
    return runner


def build_model(model_config: ModelConfig, config: EngineConfig, folder: Path, load: str, group: Group) -> Transformer:
    """Return the model of a rank with its weights, into which an adapter of the options is merged.

    load: "auto", for the checkpoint in `folder`, or "dummy", for random weights.
    """
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    if config.deterministic and device.type == "cuda" and triton is None:
        raise ValueError("deterministic=True needs Triton on a GPU; install it, or leave deterministic out")
    update = None
    if config.adapter is not None:  # before the weights are loaded, since it raises what is wrong with the adapter
        from fastgen.model.adapter import AdapterUpdate  # most models have none

        update = AdapterUpdate.read(config.adapter, checkpoint_shards(model_config))
    group.prepare(model_config.hidden_size, dtype, _largest_half(model_config, config, group))
    form = model_config.quantization
    if isinstance(form, Int4) and load == "auto":
        from fastgen.model.int4_layouts import LAYOUTS  # only int4 weights have layouts

        form = replace(form, scale_dtype=scale_dtype(folder, LAYOUTS[form.stored].scales.suffix))
        model_config = replace(model_config, quantization=form)
    with explaining_sizes(group.size):
        parameters = Parameters(model_config, dtype, device, group, config.deterministic)
    if load == "dummy":
        if update is not None:
            raise ValueError("adapter needs the weights of the checkpoint; leave load='dummy' out")
        fill_random(parameters.targets())
    else:
        load_checkpoint(parameters.targets(stored=True), folder, progress=sys.stderr.isatty() and group.rank == 0)
    if update is not None:
        parameters.bases.merge(update, parameters.targets(), folder)
    with FreeCores().step():  # the thread that imports transformers may need a core
        parameters.pack()
    kind: type[Transformer] = resolve_name(HYBRID) if model_config.recurrent else Transformer
    return kind(parameters, config.max_model_len)


def _largest_half(model: ModelConfig, config: EngineConfig, group: Group) -> int:
    """Return the maximum number of tokens in a half of a step; see `ShardedResidual.apply`. The import stands here
    because only several ranks cut steps."""
    if group.size == 1 or not model.adds_products:
        return 0
    from fastgen.engine.halves import largest_half

    return largest_half(config.max_step_tokens)


def make_runner(model: Transformer, config: EngineConfig, features: list[Feature] | None = None) -> Runner:
    """Return a Runner over a new KV pool. features: what the options ask for, with weights loaded; None: features
    without weights."""
    c = model.config
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    sizes = c.kv_layers + config.more_kv_layers, config.num_pages, c.num_kv_heads, config.page_size, c.head_size
    fp8 = config.kv_cache_dtype == "fp8"
    pool = KVPool(*sizes, dtype if fp8 else getattr(torch, config.kv_cache_dtype), device, fp8)
    attention = make_attention(
        config.attention, pool, c.num_heads, c.windows, config.most_rows, config.max_model_len,
        config.deterministic, c.attention_scale,
    )  # fmt: skip
    if device.type == "cpu":
        from fastgen.model.native_layers import NativeLayers

        model.in_one_call = NativeLayers.of(model.parameters, attention)
    runner = Runner(model, pool, attention, config, StepFeatures(model))
    for feature in features_of(config) if features is None else features:
        feature.attach(runner)
    return runner


def make_attention(
    name: str,
    pool: KVPool,
    num_heads: int,
    windows: tuple[int, ...],
    max_seqs: int,
    context: int,
    deterministic: bool = False,
    scale: float | None = None,
) -> Attention:
    """Return an implementation of attention: "cpu", "paged" (fastgen's kernels) or "flash"
    (flash-attn). Only this one is imported.

    See PagedAttention for the other arguments. Raises ValueError if flash-attn does not run here.
    """
    if name == "cpu":
        from fastgen.model.attention.native import NativeAttention

        if NativeAttention.fits(pool):
            return NativeAttention(pool, num_heads, scale)
        from fastgen.model.attention.cpu import CpuAttention

        return CpuAttention(pool, num_heads, scale)
    if name == "flash":
        from fastgen.model.attention.flash import FlashAttention

        return FlashAttention(pool, num_heads, windows, max_seqs, context, deterministic, scale)
    from fastgen.model.attention.paged import PagedAttention

    return PagedAttention(pool, num_heads, windows, max_seqs, context, deterministic, scale)


def measure_pages(model: Transformer, config: EngineConfig, free: int, features: list[Feature] | None = None) -> int:
    """Return the number of pages that fit next to the weights and the largest step.

    free: bytes of device memory that were free before the weights were loaded. features: see `make_runner`.
    """
    from fastgen.engine import warm_up

    weights = free - device_memory(config.device)
    # A host tier of one page takes as much of the GPU's memory as the whole tier.
    probe = make_runner(model, replace(config, num_pages=1, host_pages=min(config.host_pages, 1)), features)
    warm_up.compile_kernels(probe)
    warm_up.run_largest_steps(probe)
    if probe.attention.capturable:
        warm_up.capture(probe, [config.max_seqs], warm_up.captured_prefills(probe)[-1:])
        warm_up.run_largest_steps(probe)  # again, since the graphs may have taken its memory
    left = device_memory(config.device)  # torch keeps the memory of the largest step
    graphs = warm_up.count_graphs(probe)
    model.observer = None  # it holds tensors of the probe
    del probe
    gc.collect()
    release_memory(config.device)
    room = left - GRAPH_BYTES * graphs - (1 - config.memory_fraction) * free
    page_bytes = config.page_bytes(model.config)
    pages = model.group.minimum(int(room // page_bytes) - 1)
    if pages < max(config.max_seqs, 2):
        step = free - weights - left
        raise ValueError(
            f"of {free / 1e9:.1f} GB that were free, memory_fraction={config.memory_fraction:g} allows "
            f"{config.memory_fraction * free / 1e9:.1f}; the weights take {weights / 1e9:.1f} and the largest step "
            f"{step / 1e9:.1f}, which leaves {max(pages, 0)} pages of {page_bytes / 1e6:.1f} MB, and max_seqs="
            f"{config.max_seqs} needs one each: raise memory_fraction, or lower max_seqs or max_step_tokens"
        )
    return min(pages, config.useful_pages())


@contextmanager
def _explain_out_of_memory(config: EngineConfig, free: int) -> Iterator[None]:
    """Turn an out-of-memory error into a ValueError that says what to lower.

    free: bytes of device memory that were free before the weights were loaded.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch's allocator of host memory raises no MemoryError.
        of_host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if not of_host and not is_out_of_memory(error):
            raise
        memory = f"the memory of {config.device}, of which {free / 1e9:.1f} GB were free,"
        lower, instead = "num_pages, kv_cache_gb or memory_fraction", "a smaller model or device='cpu'"
        if of_host:
            memory, lower, instead = "the host's memory", "num_pages, kv_cache_gb or host_cache_gb", "a smaller model"
        raise ValueError(
            f"{memory} does not suffice for the weights, the KV pool and a step of max_step_tokens="
            f"{config.max_step_tokens} over max_seqs={config.max_seqs}: lower these, {lower}, end other programs that "
            f"hold the memory, or use {instead} ({first_line(error)})"
        ) from error
