"""The start of an engine: find the device, load the weights, size the KV pool, compile kernels and capture CUDA graphs.

On a GPU the peak memory of a step is measured: after the weights are loaded, the largest step runs over a pool of one
page, and the pool then takes the rest of `memory_fraction`. The largest step runs again with the pool in place, and
torch keeps its memory; then the graphs are captured. So if memory is too small, the start fails, and not a later step.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastgen.device.chip import Chip, current
from fastgen.device.memory import device_memory, release_memory
from fastgen.disk import naming_full_disk
from fastgen.engine.cuda_graphs import Graphs, PrefillGraphs, batch_sizes, prefill_sizes, shared_sizes
from fastgen.engine.halves import largest_half
from fastgen.engine.options import MIN_PREFILL_TOKENS, EngineConfig, GeneratorOptions
from fastgen.engine.page_moves import PageMover
from fastgen.engine.pages import PageMoves
from fastgen.engine.prompt_scorer import SCORE_ROWS, PromptScorer
from fastgen.engine.prompt_scores import ScorePlan, ScoreRequest
from fastgen.engine.runner import Runner
from fastgen.engine.speculation.drafting import Drafting, speculative_sizes
from fastgen.engine.speculation.planning import DraftPlan
from fastgen.kernels import batch_invariant
from fastgen.kernels.ahead import compile_ahead
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.launch import kernels_of, slower_than_possible, triton
from fastgen.kernels.rope import SlotMapping
from fastgen.model.adapter import AdapterUpdate
from fastgen.model.attention.cpu import CpuAttention
from fastgen.model.attention.interface import Attention
from fastgen.model.attention.reference import ReferenceAttention
from fastgen.model.config import ModelConfig
from fastgen.model.host_tier import HostTier
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import Linear
from fastgen.model.loader import fill_random
from fastgen.model.loader import load as load_checkpoint
from fastgen.model.parameters import Parameters, checkpoint_shards
from fastgen.model.quantized import Fp8Linear, check_fp8
from fastgen.model.transformer import Transformer
from fastgen.parallel.group import Group
from fastgen.request import MAX_LOGPROBS, Batch, LaneStart, Prefill, SamplingParams

log = logging.getLogger(__name__)

GRAPH_BYTES = 4e6  # memory of the graphs of one step size, beside their tensors
STEP_SECONDS = 0.06  # a step of prefills beside decodes takes no longer at the measured rate, 50 ms in the middle
MULTIPLE = 1024  # tokens; for Mistral 7B on an H200, 2176 take 21 % longer than 2048
CPU_RATE_TOKENS = 64  # of the step that measures the speed of prefills on the CPU
LEAST_CAPABILITY = 8  # Ampere, the first with bfloat16


def find_device(name: str | None, ranks: int = 1) -> str:
    """Return the device to run on; for None, the GPU if torch can use one, else the CPU.

    ranks: the number of ranks of `tensor_parallel`, which take the first GPUs; the device is that of rank 0.

    Raises ValueError for a device that torch cannot use, for a GPU whose memory is full, and for a GPU that is too old
    for fastgen. The last two are errors for None too, since the rest of the program may use that GPU. Raises ValueError
    if there are fewer GPUs than ranks.
    """
    if ranks > 1 and name not in (None, "cpu", "cuda"):
        raise ValueError(
            f"device is {str(name)!r}; with tensor_parallel it is 'cpu', or 'cuda' for the first GPUs that "
            "CUDA_VISIBLE_DEVICES names"
        )
    name = _default_device() if name is None else name
    if ranks > 1 and name == "cuda":
        if (found := torch.cuda.device_count()) < ranks:
            raise ValueError(
                f"tensor_parallel is {ranks}, and torch finds {found} GPUs here; lower it, or use device='cpu'"
            )
        name = "cuda:0"
    try:
        torch.empty(0, device=name)
        device = torch.device(name)
        device_memory(str(device))  # creates the context, which takes hundreds of MB
    except (RuntimeError, AssertionError) as error:
        remedy = "device='cpu' needs no GPU"
        if _is_out_of_memory(error):
            remedy = (
                "end the programs that hold its memory, select another GPU with device='cuda:N' or "
                "CUDA_VISIBLE_DEVICES, or use device='cpu'"
            )
        raise ValueError(
            f"device is {str(name)!r}, which torch cannot use here: {_first_line(error)}; {remedy}"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(name)!r}; fastgen runs on 'cpu' and on 'cuda'")
    if device.type == "cuda" and device.index is None:  # the current GPU may change later
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda":
        chip = torch.cuda.get_device_properties(device)
        if chip.major < LEAST_CAPABILITY:
            raise ValueError(
                f"{device} is a {chip.name} of compute capability {chip.major}.{chip.minor}, and fastgen needs "
                f"{LEAST_CAPABILITY}.0 or higher; select another GPU, or use device='cpu'"
            )
    return str(device)


def _default_device() -> str:
    """Return "cuda" if torch can use a GPU, else "cpu", and log a warning if the machine has a GPU."""
    with warnings.catch_warnings():  # torch warns once in a process, and does not say that the CPU is used
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return "cuda"
    why = None
    if torch.version.cuda is None:
        why = "this torch is built without CUDA" if any(Path("/dev").glob("nvidia[0-9]*")) else None
    elif torch.cuda.device_count():  # counts with NVML, which works beside a driver that is too old for CUDA
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            why = _first_line(error)
    if why is not None:
        log.warning(
            "the model runs on the CPU, which is far slower, because torch cannot use the GPU of this machine: %s; "
            "device='cpu' runs there without this warning",
            why,
        )
    return "cpu"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _is_out_of_memory(error: Exception) -> bool:
    """Return True for an out-of-memory error of a GPU, from torch's allocator, the CUDA runtime, Triton or cuBLAS."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        phrase in str(error) for phrase in ("out of memory", "STATUS_ALLOC_FAILED")
    )


def build_rank(model_config: ModelConfig, options: GeneratorOptions, folder: Path, device: str, group: Group) -> Runner:
    """Return the Runner of a rank of `group`. device: of this rank; the options may have that of another."""
    release_memory(device)
    memory, kernels = group.minimum(device_memory(device)), kernels_of(torch.device(device))
    config = EngineConfig.make(model_config.split(group.size), replace(options, device=device), memory, kernels)
    if model_config.quantization and torch.device(device).type == "cuda":
        check_fp8(model_config.split(group.size), config.dtype, kernels)
    if config.kv_cache_dtype == "fp8" and kernels != "torch" and Chip.of(torch.device(device)).capability < (8, 9):
        raise ValueError("kv_cache_dtype='fp8' needs an Ada or Hopper GPU or a newer one; leave it out")
    if slower := slower_than_possible(torch.device(device)):
        log.warning("%s: %s", device, slower)
    return build_runner(model_config, config, folder, options.load, group)


def build_runner(model_config: ModelConfig, config: EngineConfig, folder: Path, load: str, group: Group) -> Runner:
    """Load the model and its weights, size the KV pool, and return the runner; its `config` has the pool's size."""
    device = torch.device(config.device)
    free = device_memory(config.device)
    kernels = os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")
    remedy = "make room, or set TRITON_CACHE_DIR to a folder on another disk"
    with _explain_out_of_memory(config, free), naming_full_disk(kernels, remedy), current(device):
        with group.agreeing():  # if one rank cannot load its weights, the others must not wait for it
            model = _build_model(model_config, config, folder, load, group)
        runner = _make_runner(model, config) if device.type == "cpu" else _start_gpu(model, config, free)
        if not config.max_prefill_tokens:
            runner.config = replace(runner.config, max_prefill_tokens=_measure_prefill_tokens(runner))
    return runner


def _start_gpu(model: Transformer, config: EngineConfig, free: int) -> Runner:
    """Return a runner whose kernels are compiled and whose graphs are captured. free: bytes free before the weights."""
    measured = not config.num_pages
    if measured:
        config = config.with_pages(_measure_pages(model, config, free))
    runner = _make_runner(model, config)
    if not measured:  # _measure_pages has not compiled the kernels
        _compile(runner)
        _run_largest_steps(runner)
    if runner.attention.capturable:
        capture(runner)
    _run_largest_steps(runner)
    return runner


def _build_model(model_config: ModelConfig, config: EngineConfig, folder: Path, load: str, group: Group) -> Transformer:
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    if config.deterministic and device.type == "cuda" and triton is None:
        raise ValueError("deterministic=True needs Triton on a GPU; install it, or leave deterministic out")
    update = None
    if config.adapter is not None:  # before the weights are loaded, since it raises what is wrong with the adapter
        update = AdapterUpdate.read(config.adapter, checkpoint_shards(model_config))
    group.prepare(model_config.hidden_size, dtype, largest_half(config.max_step_tokens))
    parameters = Parameters(model_config, dtype, device, group, config.deterministic)
    if load == "dummy":
        if update is not None:
            raise ValueError("adapter needs the weights of the checkpoint; leave load='dummy' out")
        fill_random(parameters.targets())
    else:
        load_checkpoint(parameters.targets(stored=True), folder, progress=sys.stderr.isatty() and group.rank == 0)
    if update is not None:
        parameters.bases.merge(update, parameters.targets(), folder)
    parameters.pack()
    return Transformer(parameters, config.max_model_len)


def _make_runner(model: Transformer, config: EngineConfig) -> Runner:
    c = model.config
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    sizes = c.num_layers, config.num_pages, c.num_kv_heads, config.page_size, c.head_size
    pool = KVPool(*sizes, dtype, device, fp8=config.kv_cache_dtype == "fp8")
    attention = make_attention(
        config.attention, pool, c.num_heads, c.windows, config.most_rows, config.max_model_len,
        config.deterministic,
    )  # fmt: skip
    runner = Runner(model, pool, attention, config)
    host = HostTier(pool, config.host_pages) if config.host_pages else None
    runner.features[PageMoves] = PageMover(pool, host, attention.needs_clean_pages)
    runner.features[ScorePlan] = PromptScorer(model)
    if config.speculate is not None:
        runner.features[DraftPlan] = Drafting(config, runner.lanes, pool.page_size, model.group.rank == 0)
    return runner


def make_attention(name: str, pool: KVPool, num_heads: int, *sizes: Any) -> Attention:
    """Make the implementation "cpu", "reference" (plain torch), "paged" (fastgen's kernels) or "flash" (flash-attn).

    sizes: see PagedAttention. Raises ValueError if flash-attn does not run here.
    """
    if name == "cpu":
        return CpuAttention(pool, num_heads)
    if name == "reference":
        return ReferenceAttention(pool, num_heads)
    if name == "flash":
        from fastgen.model.attention.flash import FlashAttention

        return FlashAttention(pool, num_heads, *sizes)
    from fastgen.model.attention.paged import PagedAttention

    return PagedAttention(pool, num_heads, *sizes)


def _measure_pages(model: Transformer, config: EngineConfig, free: int) -> int:
    """Return the number of pages that fit beside the weights and the largest step. free: bytes free before the weights
    were loaded."""
    weights = free - device_memory(config.device)
    # A host tier of one page takes as much of the GPU's memory as the whole tier.
    probe = _make_runner(model, replace(config, num_pages=1, host_pages=min(config.host_pages, 1)))
    _compile(probe)
    _run_largest_steps(probe)
    prefills = prefill_sizes(config.max_step_tokens)
    if probe.attention.capturable:
        capture(probe, [config.max_seqs], prefills[-1:])
        _run_largest_steps(probe)  # again, since the graphs may have taken its memory
    left = device_memory(config.device)  # torch keeps the memory of the largest step
    sizes = batch_sizes(config.max_seqs)
    graphs = len(sizes) + len(shared_sizes(sizes)) * _shares(probe) + len(prefills)
    graphs += len(speculative_sizes(config))
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


@torch.inference_mode()
def capture(runner: Runner, sizes: list[int] | None = None, prefills: list[int] | None = None) -> None:
    """Capture the CUDA graphs of decode steps, speculative steps and PrefillGraphs.

    sizes: lanes of decode steps; None: all. With `sizes`, only the largest speculative step is captured. prefills:
    tokens of the PrefillGraphs; None: all."""
    config, device, group = runner.config, runner.device, runner.group
    speculative = speculative_sizes(config)[-1 if sizes else 0 :]
    sizes = sizes or batch_sizes(config.max_seqs)
    prefills = prefill_sizes(config.max_step_tokens) if prefills is None else prefills
    with current(device):
        rehearse_decodes(runner, sizes)  # compiles all kernels; those that do not compile disable attention.prefixes
        if not runner.attention.capturable:
            return
        plain = Graphs(sizes, device)
        plain.capture(runner.decode_body, compiled=True)
        runner.graphs = {False: plain}
        if _shares(runner):
            runner.graphs[True] = Graphs(shared_sizes(sizes), device, partner=plain)
            runner.graphs[True].capture(lambda size: runner.decode_body(size, shared=True), compiled=True)
        for graphs in runner.graphs.values():
            group.register_graphs(graphs)
        if drafting := _drafting(runner):
            drafting.graphs = Graphs(speculative, device, partner=plain)
            drafting.graphs.capture(lambda size: runner.decode_body(size, source=drafting), compiled=True)
            group.register_graphs(drafting.graphs)
        if prefills:
            runner.prefill_graphs = PrefillGraphs(runner.model, runner.pool, prefills, partner=plain)
            group.register_graphs(runner.prefill_graphs.graphs)


@torch.inference_mode()
def rehearse_decodes(runner: Runner, sizes: list[int]) -> None:
    """Run decode steps of these sizes on padding, as they will be captured, through one layer of each kind."""
    layers, lanes = runner.model.parameters.distinct, runner.lanes
    lanes.input.lanes.fill_(lanes.padding)
    for size in sizes:
        runner.decode_body(size, layers=layers)
    for size in shared_sizes(sizes) if _shares(runner) else ():
        runner.decode_body(size, shared=True, layers=layers)
    for size in speculative_sizes(runner.config):
        runner.decode_body(size, source=_drafting(runner), layers=layers)
    lanes.forget_decodes()


def _shares(runner: Runner) -> bool:
    return runner.prefixes is not None and runner.prefixes.enabled


def _drafting(runner: Runner) -> Drafting | None:
    found = runner.features.get(DraftPlan)
    return found if isinstance(found, Drafting) else None


def _compile(runner: Runner) -> None:
    """Compile the kernels that steps need."""
    show = sys.stderr.isatty() and runner.group.rank == 0
    compile_ahead(partial(_launch_all, runner), runner.device, show)


def _launch_all(runner: Runner) -> None:
    """Launch each kernel that a step may need: the largest steps, decodes of all sizes, and products of all sizes that
    kernels are compiled for."""
    config, model = runner.config, runner.model
    _run_largest_steps(runner)
    if runner.attention.capturable:
        rehearse_decodes(runner, batch_sizes(config.max_seqs))
    deterministic = model.parameters.lm_head.batch_invariant
    _launch_products(model, runner.pool, [*batch_invariant.SIZES, config.max_step_tokens] if deterministic else [])
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
def _launch_products(model: Transformer, pool: KVPool, sizes: list[int]) -> None:
    """Launch products in fp8, and the others in batch-invariant kernels as for steps of these sizes, on which their
    tiles depend."""
    device = pool.keys.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    for linear, fused in _products(model, model.slot_mapping(pool, zero, zero - 1, 1), pool):
        if isinstance(linear, Fp8Linear):
            linear.launch_all(fused, model.parameters.dtype)
            continue
        x = linear.weight.new_zeros(1, linear.weight.shape[1])
        for size in sizes:
            found = batch_invariant.config(size, *linear.weight.shape, linear.weight.dtype, Chip.of(device))
            rope = fused.rope if batch_invariant.fuses_rope(size) else None
            batch_invariant.launch_as(found, x, linear.weight, linear.bias, fused._replace(rope=rope))


def _products(model: Transformer, mapping: SlotMapping, pool: KVPool) -> list[tuple[Linear, Fused]]:
    """Return each kind of linear layer, in fp8 and not where layers differ, with the operations fused with it for one
    token at `mapping`."""
    head, layers = model.parameters.lm_head, model.layers
    rope = None if layers[0].head_norm or pool.fp8 else RopeWrite(mapping, pool.keys[0], pool.values[0])
    adds = Fused(add=model.parameters.norm.weight.new_zeros(1, model.config.hidden_size))
    fused = Fused(rope=rope), adds, Fused(swiglu=True), adds  # in the order of Layer.linears
    kinds = {(at, type(linear)): (linear, fused[at]) for layer in layers for at, linear in enumerate(layer.linears)}
    return [*kinds.values(), (head, Fused(out_dtype=torch.float32))]


def _run_largest_steps(runner: Runner) -> None:
    """Run the largest possible steps on made-up tokens, with all options of sampling and with none, and small prefills
    with some."""
    plain = SamplingParams()
    everything = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, min_tokens=1,
        logit_bias={0: 1.0}, logprobs=min(MAX_LOGPROBS, runner.model.config.vocab_size), return_sampling_mask=True,
    )  # fmt: skip
    demanding = SamplingParams(temperature=0.5, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1)
    config = runner.config
    small = replace(config, max_step_tokens=config.max_seqs)
    for params, size in ((everything, config), (demanding, small), (plain, config)):
        for batch in _largest_batches(size, params):
            runner.collect(runner.launch(batch))
    runner.clear_lanes()


def _measure_prefill_tokens(runner: Runner) -> int:
    """Return the prefill tokens of a step of about 50 ms: the least of all ranks, since their schedules are one.

    The largest step of a GPU gives the rate, a short one on the CPU, where the largest may take seconds.
    """
    config = runner.config
    if runner.device.type == "cpu":
        config = replace(config, max_seqs=1, max_step_tokens=min(config.max_step_tokens, CPU_RATE_TOKENS))
    largest = next(_largest_batches(config, SamplingParams()))
    batch, seconds = Batch(prefills=largest.prefills, starts=largest.starts), math.inf
    for _ in range(2):
        start = time.perf_counter()
        runner.collect(runner.launch(batch))
        seconds = min(seconds, time.perf_counter() - start)
    runner.clear_lanes()
    rate = sum(len(chunk.tokens) for chunk in batch.prefills) / seconds
    return runner.group.minimum(min(even_tokens(rate * STEP_SECONDS), runner.config.max_step_tokens))


def even_tokens(most: float) -> int:
    """Return the largest number of tokens up to `most` whose tiles fill a GPU evenly; MIN_PREFILL_TOKENS at least."""
    unit = MULTIPLE if most >= MULTIPLE else MIN_PREFILL_TOKENS
    return max(int(most) // unit * unit, MIN_PREFILL_TOKENS)


def _largest_batches(config: EngineConfig, params: SamplingParams) -> Iterator[Batch]:
    """Yield a step of prefills on all lanes that fill the token budget, a step of decodes on all lanes, and the
    speculative step of most lanes, behind one that begins them.

    They also save, load, wipe and copy the spare page. Forks are left out: they take no more memory than prefills.
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
        yield Batch(prefills=first, features=(DraftPlan(texts=texts, drafts=True),))
        yield Batch(decodes=tuple(range(lanes)), features=(DraftPlan(rows=rows, drafts=True),))


@contextmanager
def _explain_out_of_memory(config: EngineConfig, free: int) -> Iterator[None]:
    """Turn an out-of-memory error into a ValueError that says what to lower. free: bytes before the weights."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not _is_out_of_memory(error):
            raise
        where = f"the memory of {config.device}, of which {free / 1e9:.1f} GB were free,"
        if isinstance(error, MemoryError):
            where = "the host's memory"
        raise ValueError(
            f"{where} does not suffice for the weights, the KV pool and a step of max_step_tokens="
            f"{config.max_step_tokens} over max_seqs={config.max_seqs}: lower these, num_pages, kv_cache_gb or "
            f"memory_fraction, end other programs that hold the memory, or use a smaller model or device='cpu' "
            f"({_first_line(error)})"
        ) from error
