"""GeneratorOptions and EngineConfig: values for options that are left open, and a clear error for impossible ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastgen.engine.features import read_options
from fastgen.engine.options import DEFAULT_KV_CACHE_GB, EngineConfig, GeneratorOptions
from fastgen.model.config import ModelConfig, RopeConfig
from fastgen.model.quantization import Quantization
from fastgen.model.recurrent_layers import Recurrent
from fastgen.speculation.options import Speculation

MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_position=1000,
    norm_eps=1e-5,
    rope=RopeConfig(),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied=False,
    windows=(0, 0, 0),
    eos_ids=(2,),
    dtype="bfloat16",
)
PAGE_GB = 64 * 2 * 3 * 2 * 16 * 4 / 1e9  # tokens, K and V, layers, KV heads, head size, float32
LARGE = replace(
    MODEL, num_layers=32, windows=(0,) * 32, num_kv_heads=8, num_heads=32, head_size=128, hidden_size=4096,
    intermediate_size=14336, vocab_size=32768, max_position=32768,
)  # fmt: skip
ODD = replace(MODEL, intermediate_size=100)  # not a multiple of 8


def make(
    model: ModelConfig = MODEL, memory: float = 0, kernels: str = "torch", processors: int = 132, **given: Any
) -> EngineConfig:
    options = GeneratorOptions(**{"device": "cpu", **given})
    options.check()
    return EngineConfig.make(model, read_options(options, model, 1), int(memory), kernels, processors)


def test_the_defaults() -> None:
    assert make(dtype="float32") == EngineConfig(
        device="cpu",
        dtype="float32",
        max_model_len=1000,
        max_seqs=256,
        max_step_tokens=512,
        max_prefill_tokens=512,
        page_size=64,
        num_pages=256 * 16 + 1,  # what all lanes can use, and one spare page; far below the default size
        attention="cpu",
        memory_fraction=0.9,
        prefix_cache=True,
        host_pages=0,
        tensor_parallel=1,
        deterministic=True,
        kernels="torch",
        context_given=False,
        kv_cache_dtype="float32",
    )


def test_a_configuration_has_all_values_that_are_chosen() -> None:
    with pytest.raises(TypeError, match=r"missing .* 'dtype', .* 'device', .* 'max_seqs', .* 'deterministic'"):
        EngineConfig(host_pages=0, kernels="torch", context_given=False)  # type: ignore[call-arg]


def test_prefill_tokens_are_limited_only_in_steps_with_decodes_and_these_count_if_256_remain() -> None:
    assert make(max_step_tokens=2048).prefill_tokens(200) == 2048 - 200
    limited = make(max_step_tokens=2048, max_prefill_tokens=1024)
    assert [limited.prefill_tokens(decodes) for decodes in (0, 24, 768, 1000, 1900)] == [2048, 1000, 256, 256, 148]
    assert make(max_prefill_tokens=5).prefill_tokens(3) == 5
    assert make(max_prefill_tokens=0).max_prefill_tokens == 0, "to be measured"


def test_speculation_suits_the_device() -> None:
    assert make(device="cpu", speculate="auto").speculate == Speculation(max_rows=32, row_cost=0.08)
    assert make(device="cuda", speculate="auto", kernels="torch").speculate is None


@pytest.mark.parametrize(
    ("fast", "checkpoint", "dtype", "start"),
    [
        (True, "bfloat16", "bfloat16", "cpu, bfloat16 (the checkpoint's; it is so), "),
        (False, "bfloat16", "float32", "cpu, float32 (it is so), "),
        (True, "float16", "float32", "cpu, float32 (the CPU has no fast products for this checkpoint's dtype), "),
        (True, "float32", "float32", "cpu, float32, "),
    ],
)
def test_dtype_auto_on_the_cpu_is_one_that_it_multiplies_fast_and_the_start_says_why(
    fast: bool, checkpoint: str, dtype: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgen.engine.options.fast_bfloat16", lambda: (fast, "it is so"))
    config = make(replace(MODEL, dtype=checkpoint))
    assert (config.dtype, config.kv_cache_dtype) == (dtype, "float32")
    assert config.summary.startswith(start)


@pytest.mark.parametrize("kernel", [True, False])
def test_keys_have_the_models_dtype_on_a_cpu_with_a_kernel_for_it(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgen.model.attention.native.function", lambda *_: kernel or None)
    assert make(LARGE, dtype="bfloat16").kv_cache_dtype == ("bfloat16" if kernel else "float32")
    assert make(replace(LARGE, head_size=48), dtype="bfloat16").kv_cache_dtype == "float32"
    assert make(LARGE, dtype="float32").kv_cache_dtype == "float32"


def test_dtype_auto_is_the_checkpoints_on_a_gpu() -> None:
    assert make(device="cuda").dtype == make(device="cuda").kv_cache_dtype == "bfloat16"
    assert make(device="cuda", dtype="float16").dtype == "float16"
    assert make(dtype="bfloat16").dtype == make(dtype=torch.bfloat16).dtype == "bfloat16"


ONE_LANE = {"max_seqs": 1, "max_step_tokens": 64, "max_model_len": 64}


@pytest.mark.parametrize(
    ("options", "pages", "host_pages"),
    [
        ({"num_pages": 7}, 7, 0),
        ({"kv_cache_gb": 5.5 * PAGE_GB}, 5, 0),
        ({"kv_cache_gb": 5.5 * PAGE_GB, "dtype": "bfloat16"}, 5, 0),  # the CPU's KV cache is in float32
        ({"kv_cache_gb": 5.5 * PAGE_GB, "page_size": 16}, 22, 0),
        ({"kv_cache_gb": 9.5 * PAGE_GB, **ONE_LANE}, 9, 0),  # the prefix cache can use more pages than the lanes
        ({"kv_cache_gb": 9.5 * PAGE_GB, "prefix_cache": False, **ONE_LANE}, 2, 0),
        (ONE_LANE, 2, 0),
        ({"num_pages": 7, "host_cache_gb": 5.5 * PAGE_GB}, 7, 5),
        ({"num_pages": 7, "host_cache_gb": 5.5 * PAGE_GB, "page_size": 16}, 7, 22),
        ({"device": "cuda", "host_cache_gb": 5.5 * PAGE_GB}, 0, 11),  # in bfloat16; the pool is measured later
    ],
)
def test_the_pool_and_the_host_tier_have_the_size_that_was_asked_for(
    options: dict[str, Any], pages: int, host_pages: int
) -> None:
    config = make(**options)
    assert (config.num_pages, config.host_pages) == (pages, host_pages)


def test_the_default_pool_is_a_size_that_large_models_use_up() -> None:
    config = make(replace(LARGE, max_position=131072), dtype="float32")
    assert config.num_pages == int(DEFAULT_KV_CACHE_GB * 1e9 / (2 * 32 * 8 * 128 * 64 * 4))
    assert config.max_model_len == (config.num_pages - 1) * 64, "below the model's, for the pool holds less"


def test_the_context_is_a_page_less_than_a_pool_that_was_asked_for_and_sizes_one_that_was_not() -> None:
    for page_size, num_pages, context in ((16, 10, 144), (1, 2, 1), (64, 16, 960), (64, 99, 1000)):
        assert make(page_size=page_size, num_pages=num_pages).max_model_len == context
    for context in (1, 63, 64, 65, 1000):
        config = make(max_model_len=context, max_seqs=1)
        assert (config.max_model_len, config.num_pages) == (context, -(-context // 64) + 1)


def test_equal_bits_where_they_cost_little() -> None:
    assert make().deterministic
    assert not make(deterministic=False).deterministic
    assert make(tensor_parallel=2).deterministic
    assert make(ODD, deterministic=True).deterministic
    hopper: dict[str, Any] = {"device": "cuda", "kernels": "gluon", "dtype": "bfloat16"}
    model = replace(MODEL, head_size=128)

    def modes(model: ModelConfig = model, **options: Any) -> tuple[bool, str, str]:
        config = make(model, memory=10**11, **hopper | options)
        return config.deterministic, config.attention, config.kernels

    assert modes() == modes(dtype="float16") == modes(attention="paged") == (True, "paged", "gluon")
    for options in ({}, {"dtype": "float16"}, {"kv_cache_dtype": "fp8"}, {"tensor_parallel": 2}):
        with pytest.raises(ValueError, match=r"the same bits under any schedule.*; leave deterministic out"):
            modes(deterministic=False, **options)
    for options in ({"dtype": "float32"}, {"attention": "flash"}):
        assert not modes(deterministic=False, **options)[0], options
    assert modes(attention="flash") == (False, "flash", "gluon")
    assert modes(kernels="torch") == (False, "paged", "torch")
    assert modes(kernels="triton", deterministic=True) == (True, "paged", "triton")
    for other in ({"dtype": "float32"}, {"kernels": "triton"}):
        assert modes(**other) == (False, "paged", "triton"), other
    assert modes(tensor_parallel=2) == (True, "paged", "gluon")
    assert modes(page_size=32) == (True, "paged", "gluon")
    for change in ({"head_size": 256}, {"head_size": 32}, {"head_size": 100}, {"num_heads": 1000}):
        assert modes(replace(model, **change)) == (True, "paged", "gluon"), change
    assert modes(replace(model, intermediate_size=100)) == (False, "paged", "gluon")


def test_bfloat16_with_amx_is_fast_and_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.engine.options.has_amx", lambda: True)
    assert not make(dtype="bfloat16").deterministic
    monkeypatch.setattr("fastgen.kernels.native.calls.multiplies", lambda dtype: False)
    with pytest.raises(ValueError, match=r"deterministic=True in bfloat16 needs fastgen's C\+\+ kernels"):
        make(dtype="bfloat16", deterministic=True)
    monkeypatch.setattr("fastgen.kernels.native.calls.multiplies", lambda dtype: True)
    assert make(dtype="bfloat16", deterministic=True).deterministic
    with pytest.raises(ValueError, match="and no fp8 on this CPU"):
        make(replace(MODEL, quantization=Quantization()), dtype="bfloat16", deterministic=True)
    assert make(dtype="float32", deterministic=True).deterministic
    assert make(dtype="float16").deterministic, "as elsewhere"


def test_the_smallest_values_work() -> None:
    config = make(max_seqs=1, max_step_tokens=1, page_size=1, num_pages=2, max_model_len=1)
    assert (config.max_seqs, config.max_step_tokens, config.page_size, config.num_pages) == (1, 1, 1, 2)
    assert make(max_seqs=64, max_step_tokens=64).max_step_tokens == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": 1}, "deterministic must be True or False, not 1"),
        ({"page_size": 16.0}, "page_size must be an integer, not 16.0"),
        ({"max_seqs": True}, "max_seqs must be an integer, not True"),
        ({"max_model_len": "8"}, "max_model_len must be an integer, not '8'"),
        ({"host_cache_gb": "8"}, "host_cache_gb must be a number, not '8'"),
        ({"host_cache_gb": True}, "host_cache_gb must be a number, not True"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "dtype is 'float64'.*'float32', 'bfloat16', 'float16'"),
        ({"max_seqs": 0}, "max_seqs is 0; it must be at least 1"),
        ({"max_seqs": 8193}, "max_seqs is 8193; it must be at least 1 and at most 8192"),
        ({"num_pages": 1}, "num_pages is 1; it must be at least 2"),
        ({"kv_cache_gb": 0}, "kv_cache_gb is 0; it must be above 0"),
        ({"memory_fraction": 1.1}, r"memory_fraction is 1\.1; it must be above 0 and at most 1"),
        ({"host_cache_gb": float("nan")}, "host_cache_gb is nan"),
        ({"host_cache_gb": float("inf")}, "host_cache_gb is inf; it must be at least 0 and at most"),
        ({"host_cache_gb": 10**400}, "host_cache_gb is 10000"),
        ({"max_seqs": 9, "max_step_tokens": 8}, "max_step_tokens is 8, below max_seqs, which is 9"),
        ({"max_model_len": 1001}, "max_model_len is 1001, above the model's 1000 positions"),
        ({"num_pages": 9, "kv_cache_gb": 1.0}, "num_pages and kv_cache_gb.*one of them"),
        ({"kv_cache_gb": 1.9 * PAGE_GB}, "holds 1 pages"),
        ({"host_cache_gb": 2, "prefix_cache": False}, "host_cache_gb is 2 with prefix_cache=False"),
        ({"host_cache_gb": 1e-6}, r"1e-06, which holds 0 pages of 0\.0 MB, .* lower page_size"),
        ({"attention": "flash"}, "'flash', which needs a GPU; use 'auto' or 'cpu'"),
        ({"attention": "paged"}, "'paged', which needs a GPU; use 'auto' or 'cpu'"),
        ({"attention": "cpu", "device": "cuda"}, "'cpu', which does not run on a GPU; use 'auto' or 'paged'"),
        ({"deterministic": True, "attention": "flash", "device": "cuda"}, "not 'flash'; use 'auto'"),
        (
            {"deterministic": True, "device": "cuda", "model": ODD},
            r"inputs are multiples of 8 on a GPU.* 100; leave it out",
        ),
    ],
)
def test_a_value_that_cannot_work_is_an_error_that_names_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("memory", "lanes", "budget"), [(24e9, 128, 2048), (48e9, 512, 4096), (80e9, 1024, 8448), (140e9, 1024, 8448)]
)
def test_lanes_and_budget_suit_the_model_and_the_gpu(memory: float, lanes: int, budget: int) -> None:
    config = make(LARGE, device="cuda", memory=memory)
    assert (config.max_seqs, config.max_step_tokens) == (lanes, budget)
    assert (config.attention, config.num_pages) == ("paged", 0), "the pool is measured"
    assert make(LARGE, device="cuda", memory=memory, max_seqs=7).max_seqs == 7
    assert make(LARGE, device="cuda", memory=memory, max_step_tokens=33).max_seqs == 33


def test_a_lane_of_a_hybrid_has_states_and_little_kv() -> None:
    shape = Recurrent(tuple(range(24)), 16, 32)  # of Qwen3.5 9B
    model = replace(LARGE, recurrent=shape, num_kv_heads=4, head_size=256, num_heads=16, vocab_size=248320)
    assert make(model, device="cuda", memory=150e9).max_seqs == 512
    assert make(model, device="cuda", memory=80e9).max_seqs == 256
    assert make(model).max_seqs == 32


@pytest.mark.parametrize(("processors", "budget"), [(132, 8448), (114, 7296), (108, 6912), (78, 9984), (0, 8192)])
def test_the_tiles_of_a_step_are_shared_evenly(processors: int, budget: int) -> None:
    config = make(LARGE, device="cuda", memory=80e9, processors=processors)
    assert config.max_step_tokens == budget
    assert processors == 0 or budget // 128 * 2 % processors == 0
    small = make(LARGE, device="cuda", memory=40e9, processors=processors)
    assert small.max_step_tokens == (4992 if processors == 78 else 4096), "no even number of tiles is near"


def test_a_pool_that_is_measured_limits_the_context() -> None:
    config = make(LARGE, device="cuda", memory=24e9)
    assert config.with_pages(101).max_model_len == 6400
    assert config.with_pages(10**6).max_model_len == 32768
    given = make(LARGE, device="cuda", memory=24e9, max_model_len=7000)
    with pytest.raises(ValueError, match=r"101 pages of 64 tokens hold a context of 6400; lower it.*memory_fraction"):
        given.with_pages(101)
