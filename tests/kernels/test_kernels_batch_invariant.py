"""Products whose rows do not depend on each other, in Triton's interpreter where there is no GPU, against the twin; and
what instructions they are compiled to for chips that are not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import batch_invariant, hopper_products, rope
from fastgen.kernels.batch_invariant import Fused, ProductConfig, RopeWrite, config, launch_as, pays, product
from fastgen.kernels.launch import triton
from fastgen.kernels.rope import SlotMapping

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALVES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]  # the interpreter truncates
H200 = Chip((9, 0), 132, 232_448)
A100 = Chip((8, 0), 108, 166_912)
RTX_3090 = Chip((8, 6), 82, 101_376)
TOKENS = (1, 17, 64, 65, 100, 256, 512, 1000, 8192)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested tuples with `change` applied to each tensor."""
    if isinstance(value, tuple):
        inner = [changed(each, change) for each in value]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    return change(value) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("parts", ["", "bias", "add", "bias swiglu", "logits", "logits out"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 192, 200), (17, 130, 64), (70, 96, 136)])
def test_against_the_twin(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, parts: str) -> None:
    x, weight = randn(tokens, inputs, dtype=dtype), randn(outputs, inputs, seed=1, dtype=dtype, scale=inputs**-0.5)
    bias = randn(outputs, seed=2, dtype=dtype) if "bias" in parts else None
    fused = Fused(
        add=randn(tokens, outputs, seed=4, dtype=dtype) if "add" in parts else None,
        swiglu="swiglu" in parts,
        out_dtype=torch.float32 if "logits" in parts else None,
        out=torch.full((tokens, outputs), torch.nan, device=DEVICE) if "out" in parts else None,
    )
    given = x, weight, bias, fused
    exact = product.twin(*changed((x, weight, bias, fused._replace(out_dtype=None)), Tensor.double))
    twin = product.twin(*changed(given, Tensor.clone))
    found = product.launch(*given)
    assert (found.dtype, found.shape) == (twin.dtype, twin.shape)
    assert fused.add is None or found is fused.add, "written in place"
    assert fused.out is None or found is fused.out
    assert error(found, exact) <= 1.1 * error(twin, exact) + 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("heads", "num_kv", "head_size"), [(4, 2, 64), (5, 1, 48), (1, 1, 256), (4, 2, 16)])
@pytest.mark.parametrize(("tokens", "dtype"), [(5, HALVES[0]), (70, HALVES[0]), (70, torch.float32)])
def test_rope_behind_the_product(tokens: int, dtype: torch.dtype, heads: int, num_kv: int, head_size: int) -> None:
    page_size, pages = 16, 5
    x, weight = randn(tokens, 72, dtype=dtype), randn((heads + 2 * num_kv) * head_size, 72, seed=1, dtype=dtype)
    bias = randn(len(weight), seed=2, dtype=dtype)
    angles = randn(200, head_size // 2, seed=4) * 3
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(0))[:tokens].to(x.device)
    slots[-1] = -1
    positions = torch.arange(tokens, device=x.device) * 2
    mapping = SlotMapping(positions, slots, angles.cos(), angles.sin(), tokens - 1, num_kv, page_size)
    before = randn(2, pages, num_kv, page_size, head_size, seed=5, dtype=dtype)
    pool, twin_pool, exact_pool = before.clone(), before.clone(), before.double()
    out = product.launch(x, weight, bias, Fused(rope=RopeWrite(mapping, *pool)))
    twin = product.twin(x, weight, bias, Fused(rope=RopeWrite(mapping, *twin_pool)))
    wide = (t.double() for t in (x, weight, bias))
    exact = product.twin(*wide, Fused(rope=RopeWrite(mapping, *exact_pool)))
    for found, other, right in ((out, twin, exact), (pool, twin_pool, exact_pool)):
        assert error(found, right) <= 1.1 * error(other, right) + 4 * torch.finfo(torch.float32).eps
    assert torch.equal((pool != before).any(-1), (twin_pool != before).any(-1))
    chosen, alone = config(tokens, *weight.shape, dtype, Chip.of(x.device)), before.clone()
    within = launch_as(chosen, x, weight, bias, Fused(rope=RopeWrite(mapping, *alone)))
    assert torch.equal(within, out), "as behind it"
    assert torch.equal(alone, pool)
    assert batch_invariant.fuses_rope(tokens) == (tokens <= 64)


def test_rope_is_compiled_as_behind_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused multiplication and addition would round once: on a GPU these have other bits."""
    asked = {}

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: asked.update(options)

    monkeypatch.setattr(rope, "_rope_kernel", Recorded())
    cell = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    mapping = SlotMapping(cell, cell, torch.ones(1, 8, device=DEVICE), torch.ones(1, 8, device=DEVICE), 1, 1, 16)
    pool = torch.zeros(2, 1, 1, 16, 16, device=DEVICE)
    rope.rope_write.launch(torch.zeros(1, 48, device=DEVICE), mapping, *pool)
    assert asked["enable_fp_fusion"] is False


@pytest.mark.parametrize("swap", [False, True])
def test_any_tile_gives_the_same_bits(swap: bool) -> None:
    x, weight = randn(70, 96, dtype=HALVES[0]), randn(150, 96, seed=1, dtype=HALVES[0])
    expected = launch_as(ProductConfig(32, 64, 32, 4, 2, swap), x, weight, None, Fused())
    for tokens, rows in ((16, 64), (32, 64), (64, 128)):
        tile = ProductConfig(tokens, rows, 32, 4, 2, swap)
        for count in (1, 31, 33, 70):
            assert torch.equal(launch_as(tile, x[:count], weight, None, Fused()), expected[:count])


def test_on_the_cpu_the_twin_answers() -> None:
    x, weight = randn(3, 64).cpu(), randn(32, 64, seed=1).cpu()
    assert torch.equal(product(x, weight, None, Fused()), torch.nn.functional.linear(x, weight))


def test_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary mode takes these products for few tokens: for more where they are in Gluon."""
    monkeypatch.setattr(hopper_products, "GLUON", True)
    for chip, most in ((H200, 128), (A100, 32), (replace(H200, capability=(10, 0)), 32)):
        assert pays(1, 4096, torch.bfloat16, chip)
        assert pays(most, 4096, torch.float16, chip)
        assert not pays(most + 1, 4096, torch.bfloat16, chip)
        assert not pays(1, 4097, torch.bfloat16, chip), "rows that are not aligned"
        assert not pays(1, 4096, torch.float32, chip)
    monkeypatch.setattr(hopper_products, "GLUON", False)
    assert not pays(33, 4096, torch.bfloat16, H200)


@pytest.mark.parametrize("chip", [H200, A100, RTX_3090])
def test_config(chip: Chip) -> None:
    for tokens in TOKENS:
        for outputs in (4096, 6144, 28672, 50257):
            found = config(tokens, outputs, 4096, torch.bfloat16, chip)
            assert found.stages * (found.tokens + found.rows) * found.depth * 2 <= chip.shared_memory
            assert tokens > 64 or found.swap or outputs < 28672, "many rows are the left side of few tokens"
            assert tokens <= 64 or not found.swap
            assert not found.swap or tokens <= found.tokens < max(2 * tokens, 17)
            assert found.swap or found.tokens >= 64, "Hopper's instruction takes no fewer on the left"
            assert config(tokens, outputs, 4096, torch.float32, chip) == ProductConfig(*batch_invariant.FLOAT32), (
                "one for all"
            )
    assert config(8192, 28672, 4096, torch.bfloat16, chip).rows == (128 if chip == RTX_3090 else 256)
    few = config(128, 4096, 4096, torch.bfloat16, chip)
    assert -(-128 // few.tokens) * 4096 // few.rows >= min(chip.processors / 2, 64)


COMPILE = """
import json, sys
import triton  # before fastgen, which without a GPU does without it
import fastgen.kernels.batch_invariant as module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

kernel = module._product_kernel
for capability, config, what in json.loads(sys.argv[1]):
    config = module.ProductConfig(**config)
    half = {"swiglu": 14336, "rope": 64}.get(what, 0)
    heads = max(config.rows // 128, 1) if what == "rope" else 1
    block = [heads, 2, config.rows // 2 // heads, config.depth] if half else [config.rows, config.depth]
    signature = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    signature |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    aligned = [place for place, name in enumerate(kernel.arg_names) if name in signature or name == "N"]
    signature |= {
        "x_desc": f"tensordesc<bf16[{config.tokens},{config.depth}]>",
        "weight_desc": f"tensordesc<bf16{json.dumps(block, separators=(',', ':'))}>", "T": "i32", "N": "i32",
    }
    constants = {
        "K": 4096, "HALF": half, "KV": 8 * (what == "rope"), "P": 64, "ADD": what == "add", "TOKENS": config.tokens,
        "ROWS": config.rows, "HEADS": heads, "DEPTH": config.depth, "STAGES": config.stages, "SWAP": config.swap,
        "GROUP": config.group, "PDL": capability >= 90,
    }
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in aligned})
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(json.dumps({"shared": made.metadata.shared, "ptx": made.asm["ptx"]}))
"""


@pytest.mark.usefixtures("fresh_configs")
@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_one_instruction_whatever_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """For chips that are not here. The bits of a row rest on it. (In Gluon: test_kernels_hopper.py.)"""
    monkeypatch.setattr(hopper_products, "GLUON", False)
    surroundings = ("", "add", "swiglu", "rope")
    several, older = (
        dict.fromkeys(config(tokens, rows, 4096, torch.bfloat16, chip) for tokens in TOKENS for rows in (4096, 28672))
        for chip in (H200, A100)
    )
    cases = [(90, each, surroundings[number % 4]) for number, each in enumerate(several)]
    cases.append((80, next(iter(older)), ""))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps([(cap, asdict(each), what) for cap, each, what in cases])]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for (capability, found, what), line in zip(cases, ran.stdout.splitlines(), strict=True):
        made = json.loads(line)
        assert made["shared"] <= (H200 if capability == 90 else A100).shared_memory
        products = set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", made["ptx"]))
        assert len(products) == 1, (found, products)
        wanted = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32" if capability == 90 else r"mma\.sync.*m16n8k16"
        assert re.match(wanted, products.pop()), (found, what)
        assert "fma.rn.f32" not in made["ptx"]
        assert ("cp.async.bulk.tensor" in made["ptx"]) == (capability == 90)
        if capability == 90:
            wait, start = (made["ptx"].index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
            loads = [each.start() for each in re.finditer(r"cp\.async\.bulk\.tensor", made["ptx"])]
            assert wait < loads[0]
            assert start > loads[-1] if found.swap else start < wait
