"""Products of native.cpp: those of torch, with the same bits for any number of rows and of threads."""

from __future__ import annotations

import pytest
import torch

from fastgen.device.memory import Memory
from fastgen.kernels.batch_invariant import UNFUSED
from fastgen.kernels.native.calls import function
from fastgen.model.linear import Linear
from fastgen.model.native_linear import NativeGatedLinear, NativeLinear

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if function("multiply", dtype) is not None]
ROWS = 1100  # more than a thread computes at once
pytestmark = pytest.mark.skipif(not DTYPES, reason="the kernel does not run on this CPU")


def layer_of(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return Linear(weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (130, 96), (576, 576), (200, 1536), (96, 2304), (7, 41)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_among_few_and_among_many(
    dtype: torch.dtype, outputs: int, inputs: int, bias: bool
) -> None:
    linear = layer_of(outputs, inputs, dtype, bias)
    packed = NativeLinear.pack(linear, Memory().zeros)
    x = torch.randn(ROWS, inputs).to(dtype)
    many = packed.product(x, UNFUSED)
    exact = torch.nn.functional.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(many, exact, atol=20 * torch.finfo(dtype).eps * inputs**0.5, rtol=1e-2)
    for first, rows in ((0, 1), (0, 2), (5, 4), (9, 143), (20, 512), (3, 1025)):
        assert torch.equal(packed.product(x[first : first + rows], UNFUSED), many[first : first + rows])
    assert torch.equal(packed.unpack().weight, linear.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [96, 41])
def test_swiglu_has_the_same_bits_among_few_and_among_many(dtype: torch.dtype, outputs: int, bias: bool) -> None:
    linear = layer_of(2 * outputs, 576, dtype, bias)
    packed = NativeGatedLinear.pack(linear, Memory().zeros)
    x = torch.randn(ROWS, 576).to(dtype) / 24
    many = packed.product(x, UNFUSED._replace(swiglu=True))
    gate, up = torch.nn.functional.linear(x, linear.weight, linear.bias).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(many, expected, atol=128 * torch.finfo(dtype).eps, rtol=1e-2)
    assert torch.equal(packed.product(x[7:8], UNFUSED._replace(swiglu=True)), many[7:8])
    assert torch.equal(packed.unpack().weight, linear.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [32, 96, 130, 576])
def test_no_number_of_threads_changes_a_bit(dtype: torch.dtype, outputs: int) -> None:
    """If there are many threads for a few outputs, the rows are divided as well."""
    packed, before = NativeLinear.pack(layer_of(outputs, 64, dtype), Memory().zeros), torch.get_num_threads()
    x = torch.randn(507, 64).to(dtype)
    expected = packed.multiply(x)
    try:
        for threads in (1, 3, 7, 40):
            torch.set_num_threads(threads)
            assert torch.equal(packed.multiply(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.float32 not in DTYPES, reason="the kernel does not run on this CPU")
@pytest.mark.parametrize("inputs", [2048, 8192])
def test_errors_in_float32_are_not_above_those_of_torch(inputs: int) -> None:
    """torch's are 2.5e-7 and 2.8e-7; sums of 1024 products in a row would be wrong by 5.7e-7."""
    linear, x = layer_of(256, inputs, torch.float32), torch.randn(64, inputs)
    exact = x.double() @ linear.weight.double().t()
    found = NativeLinear.pack(linear, Memory().zeros).multiply(x)
    assert (found - exact).norm() <= 3e-7 * exact.norm()


def test_sums_are_as_exact_as_those_of_chunks() -> None:
    """One sum of 2**14 equal numbers would be wrong by 2e-4."""
    linear = Linear(torch.full((64, 2**14), 1 / 3), None)
    found = NativeLinear.pack(linear, Memory().zeros).multiply(torch.full((1, 2**14), 1 / 3))
    exact = float(linear.weight[0, 0].double() ** 2 * 2**14)
    assert abs(found.double() - exact).max() <= 3e-5 * exact
