"""Products of few rows have oneDNN's bits, and a weight for which they do not is left to oneDNN."""

from __future__ import annotations

import pytest
import torch

from fastgen.kernels.batch_invariant import UNFUSED
from fastgen.kernels.native.calls import function
from fastgen.model import few_rows
from fastgen.model.linear import Linear
from fastgen.model.packed import OneDnnGatedLinear, OneDnnLinear, packing

DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if packing(dtype) is OneDnnLinear and function("multiply", dtype) is not None
]
pytestmark = pytest.mark.skipif(not DTYPES, reason="the kernel does not run on this CPU")


def layer_of(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return Linear(weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (130, 96), (576, 576), (200, 1536), (96, 2304)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_among_few_and_among_many(
    dtype: torch.dtype, outputs: int, inputs: int, bias: bool
) -> None:
    linear = layer_of(outputs, inputs, dtype, bias)
    packed = OneDnnLinear.pack(linear)
    assert packed.few is not None
    x = torch.randn(few_rows.FEW_ROWS + 30, inputs).to(dtype)  # so many that oneDNN multiplies them
    many = packed.product(x, UNFUSED)
    exact = torch.nn.functional.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(many, exact, atol=20 * torch.finfo(dtype).eps * inputs**0.5, rtol=1e-2)
    for first, rows in ((0, 1), (0, 2), (5, 4), (9, 143), (20, few_rows.FEW_ROWS), (3, few_rows.FEW_ROWS + 1)):
        assert torch.equal(packed.product(x[first : first + rows], UNFUSED), many[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_has_the_same_bits_among_few_and_among_many(dtype: torch.dtype, bias: bool) -> None:
    linear = layer_of(2 * 96, 576, dtype, bias)
    packed = OneDnnGatedLinear.pack(linear)
    x = torch.randn(few_rows.FEW_ROWS + 30, 576).to(dtype) / 24
    many = packed.product(x, UNFUSED._replace(swiglu=True))
    gate, up = torch.nn.functional.linear(x, linear.weight, linear.bias).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(many, expected, atol=128 * torch.finfo(dtype).eps, rtol=1e-2)
    assert torch.equal(packed.product(x[7:11], UNFUSED._replace(swiglu=True)), many[7:11])
    assert torch.equal(packed.unpack().weight, linear.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [32, 96, 130, 576])
def test_no_number_of_threads_changes_a_bit(dtype: torch.dtype, outputs: int) -> None:
    """If there are many threads for a few outputs, the rows are divided as well."""
    packed, before = OneDnnLinear.pack(layer_of(outputs, 64, dtype)), torch.get_num_threads()
    assert packed.few is not None
    x = torch.randn(few_rows.FEW_ROWS - 5, 64).to(dtype)
    expected = packed.few.product(x)
    try:
        for threads in (1, 3, 7, 40):
            torch.set_num_threads(threads)
            assert torch.equal(packed.few.product(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_is_left_to_onednn(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_chunks", {})
    monkeypatch.setattr(few_rows, "CHUNKS", (32,))
    packed = OneDnnLinear.pack(layer_of(576, 576, dtype))
    assert packed.few is None
    x = torch.randn(20, 576).to(dtype)
    assert torch.equal(packed.product(x[:4], UNFUSED), packed.product(x, UNFUSED)[:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_format_depends_on_the_threads_that_packed_the_weight(dtype: torch.dtype) -> None:
    before, linear = torch.get_num_threads(), layer_of(128, 64, dtype)
    x = torch.randn(4, 64).to(dtype)
    try:
        for threads in (1, 3, 16, 1):
            torch.set_num_threads(threads)
            packed = OneDnnLinear.pack(linear)
            exact = torch.nn.functional.linear(x, linear.weight)
            torch.testing.assert_close(packed.product(x, UNFUSED), exact, atol=0.2, rtol=1e-2)
    finally:
        torch.set_num_threads(before)
