"""linear.py: the products and the operations around them on the CPU, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import RMSNorm
from fastgen.model.linear import Linear


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_a_product_with_operations_around_it(biased: bool) -> None:
    x, delta, bias = randn(5, 16), randn(5, 16, seed=1), randn(8, seed=2) if biased else None
    linear, norm = Linear(randn(8, 16, seed=3), bias), RMSNorm(randn(16, seed=4), 1e-5)
    product = F.linear(x, linear.weight, bias)
    assert torch.equal(linear.apply(x), product)
    residual = randn(5, 8, seed=5)
    expected = residual + product
    assert linear.apply(x, Fused(add=residual)) is residual
    torch.testing.assert_close(residual, expected)
    gate, up = product.chunk(2, 1)
    torch.testing.assert_close(linear.apply(x, Fused(swiglu=True)), F.silu(gate) * up)
    out = torch.empty(5, 8)
    assert torch.equal(linear.apply(x, Fused(out=out)), product)
    assert torch.equal(out, product)
    summed = x + delta
    normed = F.rms_norm(summed, (16,), norm.weight, norm.eps)
    found = linear.apply(x, norm=norm, delta=delta)
    torch.testing.assert_close(found, F.linear(normed, linear.weight, bias))
    assert torch.equal(x, summed), "delta is added in place"


def test_a_result_may_have_another_dtype() -> None:
    x, linear = randn(3, 16).bfloat16(), Linear(randn(8, 16, seed=1).bfloat16(), None)
    assert torch.equal(linear.apply(x, Fused(out_dtype=torch.float32)), F.linear(x, linear.weight).float())
