"""Products whose rows do not depend on each other, in Triton's interpreter if there is no GPU, compared with the twin;
and the instructions that they are compiled to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiling import compiled
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import launch, rope
from fastgen.kernels.batch_invariant import Fused, RopeWrite, pays, product
from fastgen.kernels.launch import triton
from fastgen.kernels.rope import SlotMapping
from fastgen.kernels.triton import batch_invariant
from fastgen.kernels.triton import rope as rope_kernels
from fastgen.kernels.triton.batch_invariant import ProductConfig, config, launch_as

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


@pytest.fixture(params=["pointers", "descriptors"])
def both_loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, products load as on Ampere, and as on Hopper."""
    if DEVICE.type == "cpu":
        chip = Chip((8, 0) if request.param == "pointers" else (9, 0), 4, 100_000)
        monkeypatch.setattr(Chip, "of", lambda device: chip)
        monkeypatch.setattr(Chip, "dependent_launch", False)
    elif request.param == "pointers":
        pytest.skip("the GPU's own kernels are tested once")


@pytest.mark.usefixtures("both_loads")
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


@pytest.mark.usefixtures("both_loads")
@pytest.mark.parametrize(
    ("tokens", "dtype", "heads", "num_kv", "head_size"),
    [
        (5, HALVES[0], 4, 2, 64), (5, HALVES[0], 1, 1, 256), (70, HALVES[0], 4, 2, 16), (70, torch.float32, 5, 1, 48),
    ],
)  # fmt: skip
def test_rope_fused_with_the_product(tokens: int, dtype: torch.dtype, heads: int, num_kv: int, head_size: int) -> None:
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
    assert torch.equal(within, out), "the same bits as the separate kernel"
    assert torch.equal(alone, pool)
    gluon = launch.gluon_runs_on(Chip.of(x.device), dtype)
    assert batch_invariant.fuses_rope(tokens, dtype, Chip.of(x.device)) == (tokens <= (32 if gluon else 64))


def test_rope_is_compiled_without_fused_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused multiply-add rounds once, which has other bits on a GPU."""
    asked = {}

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: asked.update(options)

    monkeypatch.setattr(rope_kernels, "_rope_kernel", Recorded())
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


def test_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """If bits may depend on the schedule, these products are used for few tokens, and in Gluon for more."""
    monkeypatch.setattr(launch, "GLUON", True)
    for chip, most in ((H200, 128), (A100, 32), (replace(H200, capability=(10, 0)), 32)):
        assert [pays(tokens, 4096, torch.bfloat16, chip) for tokens in (1, most, most + 1)] == [True, True, False]
        assert not pays(1, 4097, torch.bfloat16, chip), "rows that are not aligned"
        assert not pays(1, 4096, torch.float32, chip)


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
    assert config(8192, 28672, 4096, torch.bfloat16, chip).rows == (128 if chip == RTX_3090 else 256)
    few = config(128, 4096, 4096, torch.bfloat16, chip)
    assert -(-128 // few.tokens) * 4096 // few.rows >= min(chip.processors / 2, 64)


LAUNCHES = """
from dataclasses import asdict
from fastgen.kernels import launch
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.triton.batch_invariant import config, launch_as
from fastgen.kernels.rope import SlotMapping

launch.GLUON = False
several = dict.fromkeys(
    config(tokens, outputs, 4096, torch.bfloat16, chip)
    for tokens in (1, 17, 64, 65, 100, 256, 512, 1000, 8192) for outputs in (4096, 28672)
)
for number, chosen in enumerate(several):
    tokens, kind = chosen.tokens, ("", "add", "swiglu", "rope")[number % 4]
    about |= {"swap": chosen.swap, "kind": kind}
    fused = Fused(add=zeros(tokens, 28672) if kind == "add" else None, swiglu=kind == "swiglu")
    if kind == "rope":
        places, turns = zeros(tokens, dtype=torch.int64), zeros(9, 64, dtype=torch.float32)
        mapping = SlotMapping(places, places, turns, turns, tokens, 8, 64)
        fused = Fused(rope=RopeWrite(mapping, *zeros(2, 2, 8, 64, 128)))
    launch_as(chosen, zeros(tokens, 4096), zeros(28672, 4096), zeros(28672), fused)
"""


@pytest.mark.long
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize(("name", "chip"), [("H200", H200), ("A100", A100)])
def test_one_instruction_whatever_the_tile(name: str, chip: Chip) -> None:
    """The bits of a row depend on the instruction. (For kernels in Gluon see test_kernels_hopper.py.)"""
    hopper = chip == H200
    several = compiled(LAUNCHES, name)
    assert len(several) > 4
    for made in several:
        assert made["shared"] <= chip.shared_memory
        (product,) = set(re.findall(r"wgmma\.mma_async\S+|mma\.sync\S+", made["ptx"]))
        assert re.match(
            r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32" if hopper else r"mma\.sync.*m16n8k16", product
        ), made["kind"]
        assert "fma.rn.f32" not in made["ptx"]
        assert ("cp.async.bulk.tensor" in made["ptx"]) == hopper
        assert ("cp.async.cg.shared.global" in made["ptx"]) != hopper, "16 bytes at a time, ahead of their use"
        if hopper:
            wait, start = (made["ptx"].index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
            loads = [each.start() for each in re.finditer(r"cp\.async\.bulk\.tensor", made["ptx"])]
            assert wait < loads[0]
            assert start > loads[-1] if made["swap"] else start < wait
