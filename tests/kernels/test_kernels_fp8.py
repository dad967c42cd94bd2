"""kernels/fp8.py: quantization, the twin of the product, and what the kernels for Hopper are compiled to. On a GPU
gpu/test_gpu_fp8.py runs them. Products with only the weight in fp8 run here in Triton's
interpreter if there is no GPU, and gpu/test_gpu_weight_only.py compares their bits."""

from __future__ import annotations

import math
import re

import pytest
import torch
from compiling import compiled
from test_kernels_batch_invariant import H200, changed, randn
from test_kernels_hopper import check_hand_over
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import fp8, launch
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.fp8 import rms_norm_fp8
from fastgen.kernels.launch import KNOWN, triton
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.rope import SlotMapping
from fastgen.kernels.triton import fp8 as fp8_kernels
from fastgen.kernels.triton.batch_invariant import ProductConfig, fuses_rope

PRODUCTS = """
from fastgen.kernels import fp8
from fastgen.kernels.batch_invariant import Fused

for outputs, inputs, swiglu in [(4096, 14336, False), (28672, 4096, True)]:
    for tokens in (1, 64, 128, 300):
        about["tokens"] = tokens
        for scales in (zeros(outputs, dtype=torch.float32), zeros(outputs // 128, inputs // 128, dtype=torch.float32)):
            fused = Fused(None if swiglu else zeros(tokens, outputs), swiglu, out_dtype=torch.bfloat16)
            x, weight = zeros(tokens, inputs, dtype=fp8.E4M3), zeros(outputs, inputs, dtype=fp8.E4M3)
            fp8.product.launch(x, torch.zeros(tokens), fp8.Quantized(weight, scales), None, fused)
"""


@pytest.mark.long
@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_products_are_compiled_for_hopper() -> None:
    several = compiled(PRODUCTS)
    assert {each["kernel"] for each in several} == {"hopper.products", "hopper.fp8"}
    assert len(several) == 16
    for made in several:
        check_hand_over(made["ptx"])
        assert made["shared"] <= 232_448
        products = set(re.findall(r"wgmma\.mma_async\S+", made["ptx"]))
        sides = {1: [8], 64: [64], 128: [64, 128], 300: [64, 128]}[made["tokens"]]
        assert products in [{f"wgmma.mma_async.sync.aligned.m64n{side}k32.f32.e4m3.e4m3"} for side in sides]


@pytest.mark.usefixtures("fresh_configs")
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 14336), (28672, 4096), (6144, 4096), (2048, 8192)])
def test_every_kind_of_product_is_known_ahead(outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `kinds_of` returns is compiled at the start."""
    monkeypatch.setattr(launch, "GLUON", True)
    known = fp8_kernels.kinds_of(outputs, inputs, H200)
    for tokens in range(1, 400):
        kind = fp8_kernels.kind_of(tokens, outputs, inputs, H200)
        assert kind in known
        if isinstance(kind, ProductConfig):
            assert kind.swap
            assert tokens <= kind.tokens * kind.token_tiles < tokens + kind.tokens or tokens < 8
            most = kind.tokens * kind.token_tiles
            assert fuses_rope(most, fp8.E4M3, H200) == fuses_rope(tokens, torch.bfloat16, H200)
    assert isinstance(fp8_kernels.kind_of(64, outputs, inputs, H200), ProductConfig)
    assert isinstance(fp8_kernels.kind_of(257, outputs, inputs, H200), int)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_quantized_numbers() -> None:
    x = random(5, 300)
    x[1] = 0
    x[2, 7], x[3, 9] = 1e6, -1e-9
    values, scales = fp8.quantize(x)
    assert values.dtype == torch.float8_e4m3fn
    assert torch.equal(scales.cpu(), (x.cpu().abs().amax(1) / 448).clamp(min=1 / (448 * 512)))
    assert values.float().abs().amax(1)[[0, 2]].tolist() == [448, 448]
    error = (values.float() * scales[:, None] - x).abs()
    assert (error <= x.abs() / 16 + scales[:, None] / 512).all(), "three bits of mantissa, and steps of 1/512 near zero"


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference divided by the largest number."""
    return float((found.float() - expected).abs().max() / expected.abs().max())


def same(found: Tensor, expected: Tensor) -> float:
    """Return the fraction of equal fp8 numbers. The interpreter rounds ties, and numbers below a power of two,
    differently."""
    return (found.float() == expected.float()).float().mean().item()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [128, 300, 14336])
def test_the_kernel_quantizes_as_its_twin(size: int, exact: bool) -> None:
    x = random(3, size).bfloat16()
    x[1] = 0
    (found, scales), (expected, their_scales) = fp8.quantize.launch(x, exact), fp8.quantize.twin(x, exact)
    assert torch.equal(scales, their_scales)
    assert same(found, expected) > (0.97 if DEVICE.type == "cpu" else 0.999999)


@pytest.mark.filterwarnings("ignore:invalid value")  # of Triton's interpreter
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_stays_so(value: float) -> None:
    """An update of weights is checked by their scales."""
    x = random(2, 128)
    x[0, 5] = value
    for kind in ("launch", "twin"):
        values, scales = getattr(fp8.quantize, kind)(x, True)
        assert scales.isfinite().tolist() == [False, True]
        assert not (values.float() * scales[:, None])[0].isfinite().any()


def test_the_norm_in_fp8() -> None:
    x, weight, delta = random(3, 200), random(200, seed=1), random(3, 200, seed=2)
    for kind in ("twin", "launch"):
        expected, their_scales = fp8.quantize.twin(getattr(rms_norm, kind)(x + delta, RMSNorm(weight, 1e-5)))
        found, scales = getattr(rms_norm_fp8, kind)(stream := x.clone(), RMSNorm(weight, 1e-5), delta)
        assert torch.equal(stream, x + delta)
        torch.testing.assert_close(scales, their_scales)
        assert same(found, expected) > 0.97


@pytest.mark.parametrize("rows", [5, 70, 300])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_product_is_that_of_the_dequantized_numbers(blocks: bool, rows: int) -> None:
    outputs, inputs = (512, 384) if blocks or rows > 64 else (300, 208)
    weight, x = fp8.quantize_weight(random(outputs, inputs, seed=1), blocks), random(rows, inputs)
    values, scales = fp8.quantize(x)
    dtype = torch.float32 if rows <= 64 else torch.bfloat16  # the kernel of many rows has results of two bytes
    limit = 1e-5 if DEVICE.type == "cpu" and dtype == torch.float32 else 5e-3  # a GPU's sums have 14 bits
    expected = (values.float() * scales[:, None]) @ weight.dequantized().t()
    gate, up = expected.chunk(2, dim=1)
    for fused, wanted in (
        (Fused(out_dtype=dtype), expected),
        (Fused(add=torch.ones(rows, outputs, device=DEVICE, dtype=dtype)), expected + 1),
        (Fused(swiglu=True, out_dtype=dtype), torch.nn.functional.silu(gate) * up),
    ):
        found = fp8.product(values, scales, weight, None, fused)
        assert found.dtype == dtype
        assert error(found, wanted) < limit
    biased = fp8.product(values, scales, weight, torch.ones(outputs, device=DEVICE), Fused(out_dtype=torch.bfloat16))
    assert error(biased, expected + 1) < 5e-3


# Products with only the weight in fp8.


@pytest.fixture(params=[4, 108], ids=["wide", "narrow"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are wide or narrow for the GPU that the interpreter stands for."""
    if DEVICE.type == "cpu":
        chip = Chip((8, 0), request.param, 100_000)
        monkeypatch.setattr(Chip, "of", lambda device: chip)


EXACT = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates to bfloat16


def test_every_number_is_dequantized() -> None:
    """With scales of all magnitudes; the last tiles of rows and columns are not full."""
    numbers = torch.arange(256, device=DEVICE).to(torch.uint8)
    numbers[[127, 255]] = 0  # they are NaN
    values = torch.stack([numbers.roll(shift)[:208] for shift in range(70)]).view(fp8.E4M3)
    scales = torch.logspace(-7, 1.5, 70, device=DEVICE)
    scales[3] = -scales[3]
    for dtype in (torch.float32, EXACT):
        expected = (values.float() * scales[:, None]).to(dtype)
        for dequantize in (fp8.dequantize.twin, fp8.dequantize.launch):
            assert torch.equal(dequantize(values, scales, dtype), expected)


def test_blocks_are_dequantized() -> None:
    weight = fp8.quantize_weight(random(256, 384), blocks=True)
    assert len(weight.scales.unique()) == 6
    found = fp8.dequantize.launch(weight.values, weight.scales, torch.float32)
    assert torch.equal(found, weight.dequantized())
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]], device=DEVICE)  # of blocks that are not whole
    weight = fp8.Quantized(random(200, 144).to(fp8.E4M3), scales)
    found = fp8.dequantize.launch(weight.values, weight.scales, torch.float32)
    assert torch.equal(found, weight.dequantized())


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("parts", ["", "bias add", "bias swiglu", "logits"])
@pytest.mark.parametrize("tokens", [1, 17, 64])
def test_the_product_with_only_the_weight_in_fp8(tokens: int, parts: str, blocks: bool) -> None:
    outputs, inputs = (384, 128) if blocks else (270, 144)
    weight = fp8.quantize_weight(randn(outputs, inputs, seed=1, scale=inputs**-0.5), blocks)
    x, bias = randn(tokens, inputs, dtype=EXACT), randn(outputs, dtype=EXACT) if "bias" in parts else None
    fused = Fused(
        add=randn(tokens, outputs, seed=4, dtype=EXACT) if "add" in parts else None,
        swiglu="swiglu" in parts,
        out_dtype=torch.float32 if "logits" in parts else None,
    )
    twin = fp8.weight_product.twin(x, weight, bias, changed(fused, Tensor.clone))
    found = fp8.weight_product.launch(x, weight, bias, fused)
    assert fused.add is None or found is fused.add, "written in place"
    assert (found.dtype, found.shape) == (twin.dtype, twin.shape)
    assert error(found, twin.float()) < 4 * torch.finfo(EXACT).eps


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize(("heads", "num_kv", "head_size"), [(6, 2, 32), (2, 1, 96), (2, 1, 128), (4, 2, 48)])
def test_rope_fused_with_the_product(heads: int, num_kv: int, head_size: int) -> None:
    tokens, inputs, page_size = 5, 128, 16
    weight = fp8.quantize_weight(randn((heads + 2 * num_kv) * head_size, inputs, seed=1, scale=inputs**-0.5))
    x, angles = randn(tokens, inputs, dtype=EXACT), randn(200, head_size // 2, seed=4)
    slots = torch.tensor([3, 20, 7, 1, -1], device=DEVICE)
    positions = torch.arange(tokens, device=DEVICE) * 2
    mapping = SlotMapping(positions, slots, angles.cos(), angles.sin(), tokens - 1, num_kv, page_size)
    pool = randn(2, 2, num_kv, page_size, head_size, seed=5, dtype=EXACT)
    twin_pool, before = pool.clone(), pool.clone()
    found = fp8.weight_product.launch(x, weight, None, Fused(rope=RopeWrite(mapping, *pool)))
    twin = fp8.weight_product.twin(x, weight, None, Fused(rope=RopeWrite(mapping, *twin_pool)))
    assert error(found, twin.float()) < 1e-2
    assert error(pool, twin_pool.float()) < 1e-2
    assert torch.equal((pool != before).any(-1), (twin_pool != before).any(-1))


WEIGHT_ONLY = """
from fastgen.kernels import batch_invariant, fp8, launch
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.rope import SlotMapping

launch.GLUON = False
for outputs, inputs, what in [(4096, 4096, "add"), (28672, 4096, "swiglu"), (6144, 4096, "rope")]:
    for tokens in (1, 17, 64):
        x, fused = zeros(tokens, inputs), Fused(zeros(tokens, outputs) if what == "add" else None, what == "swiglu")
        if what == "rope":
            where, turns = zeros(tokens, dtype=torch.int64), zeros(9, 64, dtype=torch.float32)
            mapping = SlotMapping(where, where, turns, turns, tokens, 8, 64)
            fused = Fused(rope=RopeWrite(mapping, *zeros(2, 2, 8, 64, 128)))
        scales = zeros(*((outputs // 128, inputs // 128) if what == "add" else (outputs,)), dtype=torch.float32)
        about |= {"fp8": True}
        weight = fp8.Quantized(zeros(outputs, inputs, dtype=fp8.E4M3), scales)
        fp8.weight_product.launch(x, weight, None, fused)
        about |= {"fp8": False}
        if tokens == 17:
            batch_invariant.product.launch(x, zeros(outputs, inputs), None, fused)
fp8.dequantize.launch(weight.values, weight.scales, torch.bfloat16)
"""


@pytest.mark.long
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("chip", ["A100", "RTX 4090", "RTX 5090", "H200"])
def test_products_with_only_the_weight_in_fp8_are_compiled(chip: str) -> None:
    """They have the instruction of the products with the dequantized weight, and neighbours in an instruction are
    neighbours in a row. Weights load 16 bytes at a time, ahead of their use."""
    several = [each for each in compiled(WEIGHT_ONLY, chip) if each["kernel"] == "triton.batch_invariant"]
    assert [each["fp8"] for each in several].count(True) == 9
    for made in several:
        products = set(re.findall(r"mma\.sync\S+", made["ptx"]))
        if chip == "H200":
            products = {re.sub(r"n\d+k", "k", each) for each in re.findall(r"wgmma\.mma_async\S+", made["ptx"])}
            assert products == {"wgmma.mma_async.sync.aligned.m64k16.f32.bf16.bf16"}
        else:
            assert products == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
            assert set(re.findall(r"kWidth = \d", made["ttgir"])) == {"kWidth = 2"}
        if made["fp8"]:
            assert made["shared"] <= 101_376
            assert "0x10, " in "".join(re.findall(r"cp\.async\.cg.*", made["ptx"]))
            assert "fma.rn.f32" not in made["ptx"]
            assert "ld.global.b8" not in made["ptx"]
