"""Products with weights of 4 bits on a GPU: with any number of rows, and by any kernel, they have the bits of the
product with the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from test_gpu_deterministic import SHAPES
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import batch_invariant, int4
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.hopper import int4 as hopper_int4
from fastgen.kernels.rope import SlotMapping
from fastgen.kernels.triton import int4 as int4_kernels
from fastgen.kernels.triton.compile_ahead import compile_ahead

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

MOST = 300
FORMS = {
    "awq": (128, torch.float16, True),
    "compressed-tensors": (32, torch.bfloat16, False),
    "gptq": (64, torch.float16, True),
    "gptq symmetric": (128, torch.float16, False),
    "whole rows": (0, torch.bfloat16, True),
    "float32": (128, torch.float32, False),
}
"""Columns per group (0: all), dtype of scales, and whether there are zeros."""


class Product:
    """A product of SHAPES with its epilogue, of up to MOST tokens."""

    def __init__(self, name: str, form: str = "awq", dtype: torch.dtype = torch.bfloat16) -> None:
        (outputs, inputs), (group, scale_dtype, zeros) = SHAPES[name], FORMS[form]
        torch.manual_seed(0)
        self.name = name
        words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), device="cuda", dtype=torch.int64).int()
        scales = (torch.rand(outputs, inputs // (group or inputs), device="cuda") + 0.5) * 0.2 * inputs**-0.5
        zero = torch.randint(0, 16, scales.shape, device="cuda", dtype=torch.uint8) if zeros else None
        self.weight = words, scales.to(scale_dtype), zero
        self.dense = int4.dequantize.twin(*self.weight, dtype)
        self.x = torch.randn(MOST, inputs, device="cuda", dtype=dtype)
        self.bias = torch.randn(outputs, device="cuda", dtype=dtype)
        self.residual = torch.randn(MOST, outputs, device="cuda", dtype=dtype)
        angles = torch.randn(MOST, 64, device="cuda")
        self.turns = angles.cos(), angles.sin()
        self.slots = torch.randperm(320, device="cuda")[:MOST]
        self.pool = torch.zeros(2, 5, 8, 64, 128, device="cuda", dtype=dtype)

    def rows(self, tokens: int, how: str | hopper_int4.Tile | None = "own") -> list[Tensor]:
        """Return all results of the product for the first tokens, with one row per token. how: "dense" (with the
        dequantized weight), "own", a tile of the kernel in Gluon, or None for the kernel in Triton."""
        mapping = SlotMapping(torch.arange(tokens, device="cuda"), self.slots[:tokens], *self.turns, tokens, 8, 64)
        fused = Fused(
            add=self.residual[:tokens].clone() if self.name in ("o", "down") else None,
            swiglu=self.name.startswith("gate_up"),
            rope=RopeWrite(mapping, *self.pool) if self.name == "qkv" else None,
        )
        self.pool.zero_()
        x = self.x[:tokens]
        if how == "dense":
            out = batch_invariant.product.launch(x, self.dense, self.bias, fused)
        elif how == "own":
            out = int4.int4_product.launch(x, *self.weight, self.bias, fused)
        else:
            assert not isinstance(how, str)
            out = int4_kernels.launch_as(how, x, *self.weight, self.bias, fused)
        if self.name != "qkv":
            return [out]
        kept = self.pool.transpose(2, 3).flatten(1, 2)[:, self.slots[:tokens]]  # [keys and values, tokens, K, D]
        return [out, *kept]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(x, wanted[: len(x)]) for x, wanted in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_dequantizes_as_its_twin(form: str, dtype: torch.dtype) -> None:
    product = Product("o", form, dtype)
    assert torch.equal(int4.dequantize.launch(*product.weight, dtype), product.dense)


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        *((name, "awq", torch.bfloat16) for name in SHAPES if name != "head"),
        *(("o", form, torch.bfloat16) for form in FORMS if form != "awq"),
        ("gate_up", "compressed-tensors", torch.bfloat16), ("qkv", "gptq", torch.bfloat16),
        ("down", "awq", torch.float16), ("down", "gptq symmetric", torch.float16), ("o", "whole rows", torch.float16),
    ],
)  # fmt: skip
def test_a_row_has_the_bits_of_the_dequantized_weight(name: str, form: str, dtype: torch.dtype) -> None:
    """With any number of rows from 1 to MOST, by both routes."""
    product = Product(name, form, dtype)
    few = [1, 9, 17, 33, 65, 129, 257, MOST]
    compile_ahead(lambda: [product.rows(tokens) for tokens in few], product.x.device)  # on all cores
    expected = product.rows(MOST, "dense")
    for tokens in range(1, MOST + 1):
        assert same(product.rows(tokens), expected), f"{tokens} tokens"


@pytest.mark.parametrize("name", ["qkv", "o", "gate_up"])
def test_all_kernels_give_the_same_bits(name: str) -> None:
    product, chip = Product(name), Chip.of(torch.device("cuda", 0))
    ways: dict[hopper_int4.Tile | None, int] = {None: 50}
    if hopper_int4.runs_on(chip, torch.bfloat16, torch.float16):
        for tokens in (1, 9, 17, 33, 64, 65, 128, 129, 257, MOST):
            ways[hopper_int4.tile_of(tokens, *SHAPES[name], chip, name == "o")] = min(
                tokens, 64 if name == "qkv" else MOST
            )
        for programs, tokens in ((1, 8), (2, 8), (1, 32)):
            ways[hopper_int4.Tile(tokens, *hopper_int4.HALVED, programs)] = tokens
        ways[hopper_int4.Tile(8, *hopper_int4.HALVED, 2, "memory")] = 8
    compile_ahead(lambda: [product.rows(tokens, how) for how, tokens in ways.items()], product.x.device)
    expected = product.rows(MOST, "dense")
    for how, tokens in ways.items():
        assert same(product.rows(tokens, how), expected), how
