"""Products of a few tokens, in Triton's interpreter where there is no GPU, against the twin; and how they are cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.kernels import product as module
from fastgen.kernels.launch import Chip, triton
from fastgen.kernels.product import (
    MOST,
    PAYS,
    SIZES,
    Config,
    Fused,
    RopeWrite,
    Workspace,
    complete,
    config,
    launch_as,
    padded,
    pays,
    product,
)
from fastgen.kernels.rope import SlotMapping

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALVES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]  # the interpreter truncates

H200 = Chip((9, 0), 132, 232_448)
A100 = Chip((8, 0), 108, 166_912)
RTX_3090 = Chip((8, 6), 82, 101_376)
SMALL = Chip((7, 5), 14, 65_536)

SHAPES = [  # outputs, inputs: of models with a hidden size from 256 to 8192
    (512, 256), (256, 512), (1024, 256), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (32768, 4096),
    (7168, 5120), (5120, 13824), (27648, 5120), (152064, 5120), (10240, 8192), (8192, 28672), (262144, 8192),
    (50257, 768), (1000, 200),
]  # fmt: skip


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


Arguments = tuple[Tensor, Tensor, Tensor | None, Workspace, Fused]
"""x, weight, bias, work, fused."""


def arguments(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, parts: str) -> Arguments:
    """What product takes, with the named parts: bias, norm, add, swiglu, logits."""
    x = randn(tokens, inputs, dtype=dtype)
    weight = randn(outputs, inputs, seed=1, dtype=dtype, scale=inputs**-0.5)
    fused = Fused(
        norm=(1 + randn(inputs, seed=3, dtype=dtype, scale=0.2), 1e-5) if "norm" in parts else None,
        add=randn(tokens, outputs, seed=4, dtype=dtype) if "add" in parts else None,
        swiglu="swiglu" in parts,
        out_dtype=torch.float32 if "logits" in parts else None,
    )
    bias = randn(outputs, seed=2, dtype=dtype) if "bias" in parts else None
    return x, weight, bias, Workspace.make(DEVICE), fused


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with `change` of each tensor."""
    if isinstance(value, tuple):
        inner = [changed(each, change) for each in value]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    return change(value) if isinstance(value, Tensor) else value


def check(chosen: Config, tokens: int, outputs: int, inputs: int, dtype: torch.dtype, parts: str) -> None:
    """The kernel is at most 1.1 times as far from float64 as the twin."""
    given = arguments(tokens, outputs, inputs, dtype, parts)
    *wide, wide_fused = changed(given, Tensor.double)
    exact = product.twin(*wide, wide_fused._replace(out_dtype=None))
    twin = product.twin(*changed(given, Tensor.clone))
    found = launch_as(chosen, *given)
    _, _, _, work, fused = given
    assert (found.dtype, found.shape) == (twin.dtype, twin.shape)
    assert fused.add is None or found is fused.add, "written in place"
    assert error(found, exact) <= 1.1 * error(twin, exact) + 4 * torch.finfo(torch.float32).eps
    assert not work.arrived.any(), "the counters are left at 0"


@pytest.mark.parametrize("parts", ["", "bias", "norm", "bias norm", "add", "swiglu", "bias norm swiglu", "norm logits"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 192, 512), (5, 134, 200), (17, 64, 384), (64, 256, 256)])
def test_against_the_twin(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, parts: str) -> None:
    check(config(outputs, inputs, tokens, dtype, Chip.of(DEVICE)), tokens, outputs, inputs, dtype, parts)


@pytest.mark.parametrize("parts", ["norm", "bias norm swiglu", "add"])
@pytest.mark.parametrize("split", [1, 2, 3, 7])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_any_way_to_cut(tokens: int, split: int, parts: str) -> None:
    """Also shares of K without a column, and the way without tensor cores."""
    chosen = Config(tokens, rows=32, depth=64, split=split, warps=4, stages=3)
    check(chosen, max(1, tokens - 3), 150, 328, HALVES[0], parts)


def test_norm_of_any_size_in_float16() -> None:
    """Neither x * norm nor its small numbers leave float16's range, wherever the large ones stand."""
    chosen = config(64, 512, 4, torch.float16, Chip.of(DEVICE))
    weight = randn(64, 512, seed=1, dtype=torch.float16, scale=0.05)
    norm = randn(512, seed=3, dtype=torch.float16, scale=4.0), 1e-5
    work = Workspace.make(DEVICE)
    for size, outlier in ((1e4, 0), (1e-3, 0), (0.02, 3), (0.02, 500)):
        x = randn(4, 512, scale=size)
        if outlier:
            x[:, outlier] = 2000.0
        x[3] = 0
        x = x.half()
        exact = product.twin(x.double(), weight.double(), None, work, Fused((norm[0].double(), norm[1])))
        found = launch_as(chosen, x, weight, None, work, Fused(norm))
        assert error(found, exact) <= 1.1 * error(product.twin(x, weight, None, work, Fused(norm)), exact)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_a_chain_in_a_cuda_graph(tokens: int) -> None:
    """Started early, and in a graph, products give bit for bit what they give one after the other."""
    dtype, chip = torch.bfloat16, Chip.of(DEVICE)
    up = [randn(4096, 1024, seed=seed, dtype=dtype, scale=0.03) for seed in range(8)]
    down = [randn(1024, 2048, seed=seed, dtype=dtype, scale=0.02) for seed in range(8)]
    norm = (1 + randn(1024, dtype=dtype, scale=0.1), 1e-5)
    start = randn(tokens, 1024, dtype=dtype)
    work = Workspace.make(DEVICE)

    def chain(x: Tensor, dependent: bool) -> None:
        for wide, narrow in zip(up, down, strict=True):
            first, second = (config(*weight.shape, tokens, dtype, chip) for weight in (wide, narrow))
            if not dependent:
                first, second = (replace(each, dependent=False, ahead=0) for each in (first, second))
            y = launch_as(first, x, wide, None, work, Fused(norm, swiglu=True))
            launch_as(second, y, narrow, None, work, Fused(add=x))

    one_by_one, x = start.clone(), start.clone()
    chain(one_by_one, dependent=False)
    chain(x, dependent=chip.dependent_launch)
    assert torch.equal(x, one_by_one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(x, dependent=chip.dependent_launch)
    for _ in range(20):
        x.copy_(start)
        graph.replay()
        assert torch.equal(x, one_by_one)


def test_on_the_cpu_the_twin_answers() -> None:
    x, weight = randn(3, 64).cpu(), randn(32, 64, seed=1).cpu()
    found = product(x, weight, None, Workspace.make(x.device), Fused())
    assert torch.equal(found, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("chip", [H200, A100, RTX_3090, SMALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_config(chip: Chip, dtype: torch.dtype) -> None:
    for outputs, inputs in SHAPES:
        for tokens in (1, 2, 8, 9, 33, MOST):
            found = config(outputs, inputs, tokens, dtype, chip)
            tiles = -(-outputs // found.rows)
            assert tokens <= found.tokens <= max(8, 2 * tokens)
            assert found.shared_memory(dtype.itemsize) <= chip.shared_memory
            assert all(size & (size - 1) == 0 for size in (found.tokens, found.rows, found.depth, found.ahead))
            assert found.depth >= 16
            assert found.split == 1 or tiles <= module.TILES
            assert found.split == 1 or tiles * found.split * (found.rows + 1) * found.tokens <= module.PARTIALS
            assert found.split * found.depth < 2 * max(inputs, found.depth)
            assert found.dependent == (chip.capability >= (9, 0))
            assert found.dependent or found.ahead == 0, "nothing of Hopper elsewhere"
            assert found.ahead * found.split <= inputs


def test_enough_programs_fill_the_chip() -> None:
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (5120, 5120)):
        for tokens in (1, 16, 32, 64):
            found = config(outputs, inputs, tokens, torch.bfloat16, H200)
            assert -(-outputs // found.rows) * found.split >= 1.5 * H200.processors


def test_one_kernel_for_the_tokens_of_a_padded_number() -> None:
    found = {config(4096, 4096, tokens, torch.bfloat16, H200) for tokens in range(1, MOST + 1)}
    assert sorted(each.tokens for each in found) == [1, 8, 16, 32, 64]


def test_the_sizes_to_run_at_the_start_are_all_that_pay() -> None:
    made = {config(4096, 4096, size, torch.bfloat16, H200) for size in SIZES}
    for tokens in range(1, MOST + 1):
        if pays(tokens, 4096):
            assert padded(tokens) in SIZES
            assert config(4096, 4096, tokens, torch.bfloat16, H200) in made
    assert max(SIZES) <= PAYS


def test_shares_meet_in_the_workspace_that_is_given() -> None:
    x, weight, bias, work, fused = arguments(4, 96, 512, HALVES[0], "norm")
    other = Workspace.make(DEVICE)
    for partials in (work.partials, other.partials):
        partials.fill_(torch.nan)
    launch_as(Config(8, rows=32, depth=64, split=4, warps=4, stages=3), x, weight, bias, work, fused)
    assert work.partials.isfinite().sum() == 3 * 4 * (32 + 1) * 8  # tiles, shares, rows and the squares, tokens
    assert other.partials.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("heads", "num_kv", "head_size"), [(4, 2, 64), (5, 1, 24), (2, 2, 96)])
@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_rope_behind_the_product(tokens: int, heads: int, num_kv: int, head_size: int, dtype: torch.dtype) -> None:
    inputs, page_size, pages = 96, 16, 4
    x, weight = randn(tokens, inputs, dtype=dtype), randn((heads + 2 * num_kv) * head_size, inputs, seed=1, dtype=dtype)
    bias, norm = randn(len(weight), seed=2, dtype=dtype), randn(inputs, seed=3, dtype=dtype)
    angles = randn(40, head_size // 2, seed=4) * 3
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(0))[:tokens].to(x.device)
    slots[-1] = -1 if tokens > 1 else slots[-1]
    positions = torch.arange(tokens, device=x.device) * 2 % 40
    real = tokens - (tokens > 1)
    mapping = SlotMapping(positions, slots, angles.cos(), angles.sin(), real, num_kv, page_size)
    before = randn(2, pages, num_kv, page_size, head_size, seed=5, dtype=dtype)
    pool, twin_pool, exact_pool = before.clone(), before.clone(), before.double()
    work = Workspace.make(DEVICE)
    out = product.launch(x, weight, bias, work, Fused((norm, 1e-5), rope=RopeWrite(mapping, *pool)))
    twin = product.twin(x, weight, bias, work, Fused((norm, 1e-5), rope=RopeWrite(mapping, *twin_pool)))
    wide = (t.double() for t in (x, weight, bias))
    exact = product.twin(*wide, work, Fused((norm.double(), 1e-5), rope=RopeWrite(mapping, *exact_pool)))
    assert out.shape == twin.shape == (tokens, heads, head_size)
    for found, other, right in ((out, twin, exact), (pool, twin_pool, exact_pool)):
        error, twin_error = ((each.double() - right).norm() / right.norm() for each in (found, other))
        assert error <= 1.1 * twin_error + 1e-7
    assert torch.equal((pool != before).any(-1), (twin_pool != before).any(-1))


def test_pays() -> None:
    assert pays(1, 4096)
    assert pays(32, 4096)
    assert not pays(2048, 4096)
    assert not pays(1, 4097), "rows that are not aligned"


COMPILE = """
import json, sys
import triton  # before fastgen, which without a GPU does without it
import fastgen.kernels.product as module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

kernel = module._product_kernel
for capability, config, what in json.loads(sys.argv[1]):
    config = module.Config(**config)
    pointers = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    signature = pointers | {"partials_ptr": "*fp32", "counters_ptr": "*i32", "T": "i32", "N": "i32", "eps": "fp32"}
    signature |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    steps = -(-4096 // (config.depth * config.split))
    constants = {
        "K": 4096, "HALF": {"add": 0, "swiglu": 2048, "rope": 64}[what], "KV": 8 * (what == "rope"), "P": 64,
        "ADD": what == "add", "TOKENS": config.tokens, "ROWS": config.rows,
        "DEPTH": config.depth, "SPLIT": config.split, "STEPS": steps,
        "EVEN": steps * config.depth * config.split == 4096, "STAGES": config.stages, "PDL": config.dependent,
        "AHEAD": config.ahead, "EARLY": config.early,
    }
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [place for place, name in enumerate(kernel.arg_names) if name in pointers or name == "N"]
    source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in aligned})
    options = {"num_warps": config.warps, "num_stages": config.stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(json.dumps({"shared": made.metadata.shared, "ptx": made.asm["ptx"]}))
"""


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_compiled_without_the_gpu() -> None:
    """For chips that are not here: copies of 16 bytes, tensor cores; on Hopper weights before the kernel ahead ends."""
    cases = []
    for capability, chip in ((90, H200), (86, RTX_3090)):
        for tokens, what in ((1, "rope"), (16, "swiglu"), (32, "rope"), (32, "add"), (64, "swiglu")):
            found = config(4096, 4096, tokens, torch.bfloat16, chip)
            cases.append((capability, found, what))
        plain = complete(Config(1, *module.NARROW[1][:2], 1, *module.NARROW[1][2:]), 4096, 4096, 2, chip)
        cases.append((capability, replace(plain, early=False), "add"))
    sent = json.dumps([(capability, asdict(found), what) for capability, found, what in cases])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, sent]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for (capability, found, _), line in zip(cases, ran.stdout.splitlines(), strict=True):
        made = json.loads(line)
        ptx = made["ptx"]
        assert made["shared"] <= found.shared_memory(2)
        assert ", 0x10" in ptx or "ld.global.v4" in ptx
        assert found.tokens == 1 or "cp.async.cg.shared.global" in ptx
        assert found.tokens == 1 or "mma" in ptx
        if capability < 90:
            assert "griddepcontrol" not in ptx
            assert "prefetch" not in ptx
        else:
            loads = min(ptx.index(load) for load in ("cp.async.cg", "ld.global") if load in ptx)
            assert ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < loads
            start = ptx.index("griddepcontrol.launch_dependents")
            assert start < ptx.index("prefetch.global.L2") if found.early else start > loads
