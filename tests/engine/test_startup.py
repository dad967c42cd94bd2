"""The start of a Generator: the division of a GPU's memory, and the steps before the first request, on the CPU."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hash_model import num_tokens

from fastgen import Generator
from fastgen.device.chip import Chip
from fastgen.engine import largest_steps, startup
from fastgen.engine.features import read_options
from fastgen.engine.host_pages import PageMoves
from fastgen.engine.largest_steps import largest_batches
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.startup import build_model, make_runner, measure_pages
from fastgen.engine.warm_up import launch_products, products_of, run_largest_steps
from fastgen.kernels import fp8, launch
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.launch import Kernel
from fastgen.kernels.triton import batch_invariant
from fastgen.kernels.triton.batch_invariant import ProductConfig
from fastgen.model.config import ModelConfig, read_config
from fastgen.model.host_tier import HostTier
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import Linear
from fastgen.model.parameters import LINEARS, Parameters
from fastgen.model.quantization import Quantization, explaining_sizes
from fastgen.model.quantized import Fp8Linear, WeightOnlyFp8, check_fp8
from fastgen.model.transformer import Transformer
from fastgen.parallel.group import Group
from fastgen.request import SamplingParams

GB = 10**9
CPU = torch.device("cpu")


def make(folder: Path, **options: Any) -> EngineConfig:
    given = GeneratorOptions(device="cpu", dtype="float32", **options)  # type: ignore[arg-type]
    return EngineConfig.make(read_config(folder), read_options(given, read_config(folder), 1))


@pytest.mark.parametrize(
    ("lanes", "budget", "context"), [(1, 1, 2), (4, 4, 512), (4, 7, 512), (3, 300, 64), (8, 512, 9)]
)
def test_the_largest_steps_fill_lanes_and_budget(llama: Path, lanes: int, budget: int, context: int) -> None:
    config = make(llama, max_seqs=lanes, max_step_tokens=budget, max_model_len=context)
    prefill, decode, *_ = largest_batches(config, SamplingParams())
    assert num_tokens(prefill) == min(budget, lanes * (context - 1))
    assert [start.lane for start in prefill.starts] == list(range(lanes))
    assert len(prefill.sampling) == lanes, "each lane draws, so that all logits are there at once"
    assert all(0 < len(chunk.tokens) < context for chunk in prefill.prefills)
    assert decode.decodes == tuple(range(lanes))


def test_the_largest_steps_move_pages_in_all_ways(llama: Path) -> None:
    """So all kernels are compiled, and their memory is measured."""
    config = make(llama, max_seqs=4, num_pages=9, host_cache_gb=1)
    model = build_model(read_config(llama), config, llama, "dummy", Group())
    runner = make_runner(model, replace(config, host_pages=3))
    prefill, decode, *_ = largest_batches(config, SamplingParams(), runner.features.values())
    assert prefill.find(PageMoves) == PageMoves(((9, 0),), ((0, 9),)), "only the spare page"
    assert prefill.fresh == (9,)
    assert decode.copies == ((0, 9),)
    runner.pool.whole.normal_()
    before = runner.pool.whole.clone()
    run_largest_steps(runner)
    assert torch.equal(runner.pool.whole[:, :, :9], before[:, :, :9])
    assert not runner.lanes.kv_lens.any(), "the lanes are empty again"


def products(config: ModelConfig) -> tuple[Transformer, KVPool, list[tuple[Linear, Fused]]]:
    """Return a model, its KV pool, and its linear layers of each kind."""
    model = Transformer(Parameters(config, torch.bfloat16, CPU), context=64)
    pool = KVPool(config.num_layers, 2, config.num_kv_heads, 16, config.head_size, torch.bfloat16, CPU)
    zero = torch.zeros(1, dtype=torch.int64)
    return model, pool, products_of(model, model.slot_mapping(pool, zero, zero, 1), pool)


@pytest.mark.usefixtures("fresh_configs")
@pytest.mark.parametrize("gluon", [False, True])
def test_deterministic_products_of_all_sizes_are_launched_at_the_start(
    llama: Path, gluon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GLUON", gluon)
    hopper, ran = Chip((9, 0), 132, 232_448), set()
    model, pool, linears = products(read_config(llama))

    def about(weight: torch.Tensor, behind: Fused, found: ProductConfig) -> tuple[object, ...]:
        parts = (each is not None and each is not False for each in behind)
        early = 4 * found.token_tiles * -(-len(weight) // found.rows) <= 3 * 132
        return weight.shape, *parts, early, replace(found, token_tiles=min(found.token_tiles, 2))  # one kernel for more

    monkeypatch.setattr(Chip, "of", lambda device: hopper)
    monkeypatch.setattr(
        batch_invariant, "launch_as", lambda found, x, weight, bias, behind: ran.add(about(weight, behind, found))
    )
    launch_products(model, pool, [*batch_invariant.SIZES, 5000])
    for linear, behind in linears:
        for tokens in range(1, 5001):
            found = batch_invariant.config(tokens, *linear.weight.shape, torch.bfloat16, hopper)
            within = batch_invariant.fuses_rope(tokens, torch.bfloat16, hopper)
            now = behind if within else behind._replace(rope=None)
            assert about(linear.weight, now, found) in ran, tokens


@pytest.mark.parametrize(("family", "gated"), [("llama", True), ("arcee", False)], indirect=["family"])
def test_only_a_gate_is_launched_with_swiglu_at_the_start(family: Path, gated: bool) -> None:
    model, _, found = products(read_config(family))
    assert [linear is model.layers[-1].gate_up for linear, fused in found if fused.swiglu] == [True] * gated


def test_products_of_layers_in_fp8_and_not_are_launched_at_the_start(llama: Path) -> None:
    config = replace(read_config(llama), quantization=Quantization(ignored=("model.layers.0.mlp.down_proj",)))
    model, _, found = products(config)
    down = model.layers[0].down.weight.shape
    assert sorted(isinstance(linear, Fp8Linear) for linear, _ in found if linear.weight.shape == down) == [False, True]
    assert len(found) == 6
    assert model.parameters.distinct == [0, config.num_layers - 1]


@pytest.mark.usefixtures("fresh_configs")
def test_products_with_only_the_weights_in_fp8_are_launched_at_the_start(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pool, _ = products(replace(read_config(llama), quantization=Quantization()))
    for layer in model.layers:
        for place, linear in zip(LINEARS, layer.linears, strict=False):
            assert isinstance(linear, Fp8Linear)
            setattr(layer, place, WeightOnlyFp8(linear.weight, linear.bias, True, scales=linear.scales))
    chip, ran = Chip((8, 6), 82, 101_376), list[object]()
    monkeypatch.setattr(Chip, "of", lambda device: chip)
    monkeypatch.setattr(Kernel, "runs_on", lambda self, device: True)
    monkeypatch.setattr(
        batch_invariant, "launch_as", lambda found, x, weight, *others: ran.append((weight.shape, weight.dtype, found))
    )
    copied = Mock(side_effect=lambda values, scales, dtype: values.to(dtype))
    monkeypatch.setattr(fp8.dequantize, "launch", copied)
    launch_products(model, pool, [*batch_invariant.SIZES])
    assert copied.call_count == 4
    known = {*ran}
    for linear in model.layers[0].linears:
        for tokens in (*range(1, 300), 512, 1000, 2048, 4096):
            linear.product(torch.empty(tokens, linear.weight.shape[1], dtype=torch.bfloat16), Fused())
            assert ran[-1] in known, tokens


def test_models_in_fp8_that_a_gpu_refuses(llama: Path) -> None:
    config = read_config(llama)
    check_fp8(config, "bfloat16")
    with pytest.raises(ValueError, match="need bfloat16 or float16 on a GPU; pass dtype='bfloat16'"):
        check_fp8(config, "float32")
    with (
        pytest.raises(ValueError, match=r"multiples of 16 .* these have 64, 64, 1000; take another checkpoint$"),
        explaining_sizes(1),
    ):
        check_fp8(replace(config, intermediate_size=1000), "bfloat16")


def test_the_start_measures_the_prefill_tokens_of_a_step_and_ranks_take_the_least(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of 64 tokens take 3 and 2 ms, and another rank is slower still."""
    clock = iter((0.0, 0.003, 1.0, 1.002))
    monkeypatch.setattr(largest_steps, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found: list[int] = []
    monkeypatch.setattr(Group, "minimum", lambda _, number: found.append(number) or number // 2)
    with Generator(llama, max_prefill_tokens=0, max_step_tokens=4096) as gen:
        assert found[-1] == 60 / 2 * 64 // 1024 * 1024
        assert gen.config.max_prefill_tokens == found[-1] // 2


def test_prefill_tokens_of_a_step_are_whole_tiles() -> None:
    assert [largest_steps.even_tokens(most) for most in (9, 700, 1023, 2047, 2500)] == [256, 512, 768, 1024, 2048]


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, free: list[float], **options: Any) -> EngineConfig:
    """Return the config after measure_pages on a GPU whose free memory is `free`: at first, after the weights, and
    after the largest steps."""
    readings = iter(free[1:])
    monkeypatch.setattr(startup, "device_memory", lambda device: int(next(readings)))
    monkeypatch.setattr(startup, "release_memory", lambda device: None)
    config = replace(make(folder, max_seqs=4, max_step_tokens=32, **options), num_pages=0)
    model = build_model(read_config(folder), config, folder, "dummy", Group())
    return config.with_pages(measure_pages(model, config, int(free[0])))


def test_the_pool_takes_what_the_largest_step_leaves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(llama, max_seqs=4)
    page = config.page_bytes(read_config(llama))
    # Of 1 to 4 lanes, also with drafts; of steps with prefills of 16 and 32 tokens, and with 1 to 4 draws.
    graphs = startup.GRAPH_BYTES * (4 + 4 + 2 + 4)
    left = [10 * GB, 9 * GB, 1 * GB + graphs + 20.5 * page]
    assert measured(llama, monkeypatch, left, speculate="auto").num_pages == 19, "one is the spare page"
    assert measured(llama, monkeypatch, [10 * GB, 9 * GB, 8 * GB]).num_pages == config.useful_pages()


def test_staging_memory_is_measured_and_the_host_tier_is_not_made_twice(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = []

    class Tier(HostTier):
        def __init__(self, pool: KVPool, num_pages: int) -> None:
            super().__init__(pool, num_pages)
            slots.append(num_pages)

    monkeypatch.setattr("fastgen.model.host_tier.HostTier", Tier)
    config = measured(llama, monkeypatch, [10 * GB, 9 * GB, 8 * GB], host_cache_gb=0.01)
    assert config.host_pages > 1
    assert slots == [1]
    make_runner(build_model(read_config(llama), config, llama, "dummy", Group()), config)
    assert slots == [1, config.host_pages]


def test_too_little_for_a_page_a_lane_is_an_error_with_the_numbers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, step = r"=0\.9 allows 9\.0; the weights take 6\.0", r"and the largest step 3\.1"
    lanes = r"leaves 0 pages.*max_seqs=4 needs one each: raise"
    with pytest.raises(ValueError, match=rf"of 10\.0 GB that were free.*{weights} {step}.*{lanes}"):
        measured(llama, monkeypatch, [10 * GB, 4 * GB, 0.9 * GB])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        torch.AcceleratorError(
            "CUDA error: out of memory\nCUDA kernel errors might be reported at some other API call"
        ),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 5 bytes"),
    ],
)
def test_out_of_memory_at_start_says_what_to_lower(
    error: Exception, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "build_model", Mock(side_effect=error))
    monkeypatch.setattr(startup, "device_memory", lambda device: 3 * GB)
    of_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
    where = "the host's memory" if of_host else r"of which 3\.0 GB were free,"
    first = re.escape(str(error).splitlines()[0].rstrip(".")) if str(error) else "MemoryError"
    lower = r"max_step_tokens=77.*max_seqs=5: lower these, num_pages, .*end other programs.*use a smaller model"
    lower += "" if of_host else " or device='cpu'"
    with pytest.raises(ValueError, match=rf"{where} does not suffice.*{lower} \({first}\)$"):
        Generator(llama, max_seqs=5, max_step_tokens=77)


def test_a_full_disk_of_compiled_kernels_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as Triton's cache raises it
    monkeypatch.setenv("TRITON_CACHE_DIR", "/a/cache")
    monkeypatch.setattr(startup, "make_runner", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"make room, or set TRITON_CACHE_DIR to a folder on another disk: '/a/cache'"):
        Generator(llama)


def test_other_errors_at_start_stay_what_they_are(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(startup, "build_model", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Generator(llama)
