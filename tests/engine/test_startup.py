"""startup.py: what a GPU's memory is shared out to; its arithmetic and its rehearsal, on the CPU."""

from __future__ import annotations

import errno
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hash_model import num_tokens

from fastgen import Generator
from fastgen.device import find
from fastgen.device.chip import Chip
from fastgen.device.find import find_device
from fastgen.device.memory import device_memory
from fastgen.engine import startup, warm_up
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.pages import PageMoves
from fastgen.engine.startup import _build_model, _make_runner, _measure_pages
from fastgen.engine.warm_up import largest_batches, launch_products, products_of, run_largest_steps
from fastgen.kernels import batch_invariant, hopper_products
from fastgen.kernels.batch_invariant import Fused, ProductConfig
from fastgen.model.config import read_config
from fastgen.model.host_tier import HostTier
from fastgen.model.kv_pool import KVPool
from fastgen.model.parameters import Parameters
from fastgen.model.quantization import Quantization
from fastgen.model.quantized import Fp8Linear
from fastgen.model.transformer import Transformer
from fastgen.parallel.group import Group
from fastgen.request import SamplingParams

GB = 10**9


def test_the_cpu_has_no_memory_to_share_out() -> None:
    assert device_memory("cpu") == device_memory("cpu:0") == 0
    assert find_device("cpu") == "cpu"


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver."
FULL = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    driver: str | None = None,
    full: bool = False,
    capability: tuple[int, int] = (9, 0),
    count: int = 1,
) -> None:
    """Let torch behave as on a machine with `count` GPUs. driver: why CUDA does not start there, as torch tells it."""
    empty = torch.empty

    def init() -> None:
        if driver is not None:
            raise RuntimeError(driver)

    def is_available() -> bool:
        if driver is not None and count:
            warnings.warn(f"CUDA initialization: {driver}", stacklevel=2)
        return driver is None

    def make_empty(size: int, device: str) -> torch.Tensor:
        if torch.device(device).type == "cuda":
            init()
        return empty(size, device="cpu")

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        if full:
            raise torch.AcceleratorError(FULL)
        return 8 * GB, 16 * GB

    properties = SimpleNamespace(name="Tesla T4", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch, "empty", make_empty)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (("init", init), ("is_available", is_available), ("mem_get_info", mem_get_info)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0"])
def test_a_gpu_is_found(asked: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretend(monkeypatch, capability=(8, 0))
    assert find_device(asked) == "cuda:0"
    assert find_device("cpu") == "cpu"
    assert not caplog.records


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0"])
def test_a_gpu_of_an_old_kind_is_an_error_with_its_name(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability=(7, 5))
    told = r"cuda:0 is a Tesla T4 of compute capability 7\.5, and fastgen needs 8\.0 or higher.*use device='cpu'$"
    with pytest.raises(ValueError, match=told):
        find_device(asked)
    assert find_device("cpu") == "cpu"


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0"])
def test_a_gpu_without_memory_for_a_context_is_an_error(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, full=True)
    told = r"device is 'cuda.*: CUDA error: out of memory; end the programs that hold its memory.*use device='cpu'$"
    with pytest.raises(ValueError, match=told):
        find_device(asked)


def test_an_old_driver_is_an_error_where_the_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, driver=OLD_DRIVER)
    for asked in ("cuda", "cuda:0"):
        with pytest.raises(
            ValueError, match=r"found version 11040\)\. Please.* GPU driver; device='cpu' needs no GPU$"
        ):
            find_device(asked)


@pytest.mark.filterwarnings("error")
def test_an_old_driver_is_one_warning_where_nothing_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, driver=OLD_DRIVER)
    assert find_device(None) == "cpu"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.match(r"the model runs on the CPU, .*found version 11040\).*; device='cpu' runs", record.getMessage())


def test_a_torch_without_cuda_is_one_warning_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(find, "Path", lambda folder: {"/dev": tmp_path}[folder])
    (tmp_path / "nvidiactl").touch()
    assert find_device(None) == "cpu"
    assert not caplog.records
    (tmp_path / "nvidia0").touch()
    assert find_device(None, ranks=2) == "cpu"
    (record,) = caplog.records
    assert "this torch is built without CUDA; device='cpu' runs" in record.getMessage()
    assert find_device("cpu") == "cpu"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("why", ["Found no NVIDIA driver on your system.", "No CUDA GPUs are available"])
def test_the_cpu_needs_no_warning_without_a_gpu(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, driver=why, count=0)
    assert find_device(None) == find_device(None, ranks=2) == "cpu"
    assert not caplog.records
    with pytest.raises(ValueError, match=rf"{why.rstrip('.')}; device='cpu' needs no GPU$"):
        find_device("cuda")


def test_ranks_take_the_first_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert find_device(None, ranks=2) == find_device("cuda", ranks=2) == "cuda:0"
    with pytest.raises(ValueError, match="tensor_parallel is 3, and torch finds 2 GPUs here; lower it, or use device"):
        find_device(None, ranks=3)
    with pytest.raises(ValueError, match="device is 'cuda:1'; with tensor_parallel it is 'cpu', or 'cuda' for the f"):
        find_device("cuda:1", ranks=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ranks_say_why_they_have_no_gpu(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device is 'cuda:0', which torch cannot use here: .*device='cpu' needs no"):
        Generator(llama, device="cuda", tensor_parallel=2)


def make(folder: Path, **options: Any) -> EngineConfig:
    given = GeneratorOptions(device="cpu", dtype="float32", **options)  # type: ignore[arg-type]
    return EngineConfig.make(read_config(folder), given)


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
    """So that all kernels are compiled, and what they take is known."""
    config = make(llama, max_seqs=4, num_pages=9, host_cache_gb=1)
    prefill, decode, *_ = largest_batches(config, SamplingParams())
    assert prefill.find(PageMoves) == PageMoves((9,), ((9, 0),), ((0, 9),)), "only the spare page"
    assert decode.copies == ((0, 9),)
    config = make(llama, max_seqs=4, num_pages=9)
    moves = [batch.find(PageMoves) for batch in largest_batches(config, SamplingParams())]
    assert not any(each.saves or each.loads for each in moves if each)
    runner = _make_runner(
        _build_model(read_config(llama), config, llama, "dummy", Group()), replace(config, host_pages=3)
    )
    runner.pool.whole.normal_()
    before = runner.pool.whole.clone()
    run_largest_steps(runner)
    assert torch.equal(runner.pool.whole[:, :, :9], before[:, :, :9])


@pytest.mark.usefixtures("fresh_configs")
@pytest.mark.parametrize("gluon", [False, True])
def test_deterministic_products_of_all_sizes_are_launched_at_the_start(
    llama: Path, gluon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_products, "GLUON", gluon)
    config, cpu, ran = read_config(llama), torch.device("cpu"), set()
    model = Transformer(Parameters(config, torch.bfloat16, cpu), context=64)
    pool = KVPool(config.num_layers, 2, config.num_kv_heads, 16, config.head_size, torch.bfloat16, cpu)
    zero = torch.zeros(1, dtype=torch.int64)
    products = products_of(model, model.slot_mapping(pool, zero, zero, 1), pool)

    def about(weight: torch.Tensor, behind: Fused, found: ProductConfig) -> tuple[object, ...]:
        parts = (each is not None and each is not False for each in behind)
        early = 4 * found.token_tiles * -(-len(weight) // found.rows) <= 3 * 132
        return weight.shape, *parts, early, replace(found, token_tiles=min(found.token_tiles, 2))  # one kernel for more

    monkeypatch.setattr(Chip, "of", lambda device: Chip((9, 0), 132, 232_448))
    monkeypatch.setattr(
        batch_invariant, "launch_as", lambda found, x, weight, bias, behind: ran.add(about(weight, behind, found))
    )
    launch_products(model, pool, [*batch_invariant.SIZES, 5000])
    for linear, behind in products:
        for tokens in range(1, 5001):
            found = batch_invariant.config(tokens, *linear.weight.shape, torch.bfloat16, Chip((9, 0), 132, 232_448))
            now = behind if batch_invariant.fuses_rope(tokens) else behind._replace(rope=None)
            assert about(linear.weight, now, found) in ran, tokens


def test_products_of_layers_in_fp8_and_not_are_launched_at_the_start(llama: Path) -> None:
    config = replace(read_config(llama), quantization=Quantization(ignored=("model.layers.0.mlp.down_proj",)))
    cpu = torch.device("cpu")
    model = Transformer(Parameters(config, torch.bfloat16, cpu), context=64)
    pool = KVPool(config.num_layers, 2, config.num_kv_heads, 16, config.head_size, torch.bfloat16, cpu)
    zero = torch.zeros(1, dtype=torch.int64)
    found = products_of(model, model.slot_mapping(pool, zero, zero, 1), pool)
    downs = [
        isinstance(linear, Fp8Linear) for linear, _ in found if linear.weight.shape == model.layers[0].down.weight.shape
    ]
    assert sorted(downs) == [False, True]
    assert len(found) == 6
    assert model.parameters.distinct == [0, config.num_layers - 1]


def test_a_rehearsal_leaves_nothing_behind(llama: Path) -> None:
    with Generator(llama, max_seqs=4, max_step_tokens=32, page_size=16) as gen:
        expected = gen.generate([[5, 6, 7]], SamplingParams(max_tokens=9, temperature=0))
        run_largest_steps(gen._runner)
        assert gen.generate([[5, 6, 7]], SamplingParams(max_tokens=9, temperature=0))[0].completions == (
            expected[0].completions
        )


def test_the_start_measures_the_prefill_tokens_of_a_step_and_ranks_take_the_least(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower of two steps of 64 tokens in 2 ms takes 1 ms longer, and another rank is slower still."""
    clock = iter((0.0, 0.003, 1.0, 1.002))
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found: list[int] = []
    monkeypatch.setattr(Group, "minimum", lambda _, number: found.append(number) or number // 2)
    with Generator(llama, max_prefill_tokens=0, max_step_tokens=4096) as gen:
        assert found[-1] == 60 / 2 * 64 // 1024 * 1024
        assert gen.config.max_prefill_tokens == found[-1] // 2
        assert not gen._runner.lanes.kv_lens.any(), "the lanes are empty again"


@pytest.mark.parametrize(("most", "tokens"), [(9, 256), (700, 512), (1023, 768), (2047, 1024), (2500, 2048)])
def test_prefill_tokens_of_a_step_are_whole_tiles(most: float, tokens: int) -> None:
    assert warm_up.even_tokens(most) == tokens


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, free: list[float], **options: Any) -> EngineConfig:
    """_measure_pages on a made-up GPU, whose free memory is `free` after the weights and after the rehearsal."""
    readings = iter(free[1:])
    monkeypatch.setattr(startup, "device_memory", lambda device: int(next(readings)))
    monkeypatch.setattr(startup, "release_memory", lambda device: None)
    config = replace(make(folder, max_seqs=4, max_step_tokens=32, **options), num_pages=0)
    model = _build_model(read_config(folder), config, folder, "dummy", Group())
    return config.with_pages(_measure_pages(model, config, int(free[0])))


def test_the_pool_takes_what_the_largest_step_leaves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(llama, max_seqs=4)
    page = config.page_bytes(read_config(llama))
    graphs = startup.GRAPH_BYTES * (4 + 4 + 2)  # of 1 to 4 lanes, also with drafts, and pieces of 16 and 32 tokens
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

    monkeypatch.setattr(startup, "HostTier", Tier)
    config = measured(llama, monkeypatch, [10 * GB, 9 * GB, 8 * GB], host_cache_gb=0.01)
    assert config.host_pages > 1
    assert slots == [1]
    _make_runner(_build_model(read_config(llama), config, llama, "dummy", Group()), config)
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
        torch.AcceleratorError(FULL),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_out_of_memory_at_start_says_what_to_lower(
    error: Exception, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(startup, "_build_model", full)
    monkeypatch.setattr(startup, "device_memory", lambda device: 3 * GB)
    where = "the host's memory" if isinstance(error, MemoryError) else r"of which 3\.0 GB were free,"
    first = re.escape(str(error).splitlines()[0].rstrip(".")) if str(error) else "MemoryError"
    lower = r"max_step_tokens=77.*max_seqs=5: lower these, num_pages, .*end other programs.*device='cpu'"
    with pytest.raises(ValueError, match=rf"{where} does not suffice.*{lower} \({first}\)$"):
        Generator(llama, max_seqs=5, max_step_tokens=77)


def test_a_full_disk_of_compiled_kernels_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_kernels(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as Triton's cache raises it

    monkeypatch.setenv("TRITON_CACHE_DIR", "/a/cache")
    monkeypatch.setattr(startup, "_make_runner", compile_kernels)
    with pytest.raises(OSError, match=r"make room, or set TRITON_CACHE_DIR to a folder on another disk: '/a/cache'"):
        Generator(llama)


def test_other_errors_at_start_stay_what_they_are(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(startup, "_build_model", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Generator(llama)
