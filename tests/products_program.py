"""A program that checks that the bits of packed products and of attention do not depend on other rows or on the number
of threads. With the argument `few`, it checks only some sizes and numbers of threads."""

import sys
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

from fastgen.device.memory import Memory
from fastgen.device.mkl_packed import PACKS
from fastgen.device.processor import is_intel
from fastgen.kernels.batch_invariant import Fused
from fastgen.model.attention.cpu import CpuAttention
from fastgen.model.attention.interface import StepLayout
from fastgen.model.kv_pool import KVPool
from fastgen.model.linear import Linear, PackedLinear
from fastgen.model.mkl_linear import MklLinear
from fastgen.model.onednn_linear import OneDnnLinear
from fastgen.model.packed import has_onednn, pack, packing, unpack

new = Memory().zeros
FEW = "few" in sys.argv
SHAPES = [
    (16, 64), (128, 64), (256, 704), (392, 96), (520, 300), (896, 4864), (37, 41), (4, 2048),
    (128, 128), (200, 96), (456, 352), (512, 256), (896, 1024), (1024, 3072), (4096, 256), (960, 576), (576, 1536),
    (96, 1000),
]  # fmt: skip
SHAPES = [*SHAPES[:5], (128, 4864), *SHAPES[6:8]] if FEW else SHAPES
ROWS = [1, 3, 16, 64] if FEW else [1, 2, 3, 5, 8, 16, 25, 64, 150]  # in units of row_tile


def check(kind: type[PackedLinear], outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    plain, x = Linear(weight, bias), torch.randn(ROWS[-1] * kind.row_tile, inputs).to(dtype)
    torch.set_num_threads(16)
    packed = kind.pack(plain, new)
    gated = kind.pack_gated(plain, new) if outputs % 2 == 0 else packed
    for each in (packed, gated):
        assert pack(each, kind, new) is each
        assert torch.equal(unpack(each).weight, weight)
    expected, stream = packed.apply(x), torch.randn(len(x), outputs).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    # A result is a sum of `inputs` random products, so its size is about the root of `inputs`. Rounding to bfloat16
    # changes a number by up to 1 / 256 of itself: `absolute` allows for four roundings of a number of that size, such
    # as the sums of parts, and `relative` for two of the result, before and after the bias.
    absolute, relative = (inputs**0.5 * 1e-5, 1e-5) if dtype == torch.float32 else (max(inputs**0.5 / 64, 0.1), 1e-2)
    close = {"atol": absolute, "rtol": relative}
    torch.testing.assert_close(expected.double(), exact, **close)
    added = packed.apply(x, Fused(add=stream.clone()))
    torch.testing.assert_close(added, stream + expected, **close)
    logits = packed.apply(x, Fused(out_dtype=torch.float32))
    torch.testing.assert_close(logits, expected.float(), **close)
    if outputs % 2 == 0:
        hidden = gated.apply(x, Fused(swiglu=True))
        check_swiglu(hidden.double(), exact, absolute, relative)
    for threads in (1, 16) if FEW else (1, 2, 4, 16):
        torch.set_num_threads(threads)
        for rows in ROWS:
            part = slice(rows * kind.row_tile)
            if outputs % 2 == 0:
                assert torch.equal(gated.apply(x[part], Fused(swiglu=True)), hidden[part]), (outputs, threads, rows)
            assert torch.equal(packed.apply(x[part]), expected[part]), (kind, outputs, inputs, threads, rows)
            if rows < 20:
                assert torch.equal(packed.apply(x[part], Fused(add=stream[part].clone())), added[part])


def check_swiglu(hidden: torch.Tensor, exact: torch.Tensor, absolute: float, relative: float) -> None:
    """Check a result of SwiGLU. exact: gate and up, float64, of which the factors of `hidden` may differ by `absolute`
    plus `relative` of themselves, as products do.

    The factors are multiplied, so an error of one of them grows with the other one, and no fixed error is right for all
    elements: two factors that are rounded twice, to 1 / 256 each, already give a result that differs by 1.6 %.
    """
    gate, up = exact.chunk(2, dim=-1)
    gate_error, up_error = (absolute + relative * factor.abs() for factor in (gate, up))
    weight = F.silu(gate)
    of_gate = 1.1 * gate_error * (up.abs() + up_error)  # the derivative of SiLU is at most 1.1
    of_rounding = relative * (weight * up).abs()
    error, most = (hidden - weight * up).abs(), of_gate + weight.abs() * up_error + of_rounding
    assert (error <= most).all(), f"SwiGLU: {(error / most).max():.3} times the error that rounding explains"


def check_attention(head_size: int, kv_heads: int, page_size: int) -> None:
    lens = np.array([2, 16, 40, 65, 130, 190])
    columns, heads = -(-lens[-1] // page_size), 2 * kv_heads
    pool = KVPool(1, len(lens) * columns, kv_heads, page_size, head_size, torch.float32, torch.device("cpu"))
    pool.whole.normal_()
    table = torch.arange(len(lens) * columns, dtype=torch.int32).view(len(lens), columns)
    attention = CpuAttention(pool, heads)
    queries = [torch.randn(length, heads, head_size) for length in lens]

    def attend(members: list[int], most: int) -> list[torch.Tensor]:
        """Attend with up to `most` last tokens of these sequences in one step."""
        query_lens = np.minimum(lens[members], most)
        plan = attention.plan(StepLayout(query_lens, lens[members], 0, np.array(members), table))
        q = torch.cat([queries[member][-most:] for member in members])
        return list(attention.attend(plan, 0, q, 0).split(query_lens.tolist()))

    torch.set_num_threads(1)
    everyone = list(range(len(lens)))
    expected = attend(everyone, lens[-1])
    for threads in (1, 64) if FEW else (1, 2, 3, 4, 16, 64):
        torch.set_num_threads(threads)
        for members in (everyone, everyone[::2], *([member] for member in everyone)):
            for most in (1, 7, lens[-1]):
                for member, found in zip(members, attend(members, most), strict=True):
                    assert torch.equal(found, expected[member][-most:]), (head_size, kv_heads, page_size, threads, most)


torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    chosen, by_mkl = packing(dtype, deterministic=True), MklLinear if PACKS and dtype == torch.float32 else None
    kinds = chosen, by_mkl, None if is_intel() or not has_onednn(dtype) else OneDnnLinear
    for kind in dict.fromkeys(kind for kind in kinds if kind is not None):  # in one order, so with one seed
        for shape in SHAPES:
            check(kind, *shape, dtype)
for head_size in (12, 64, 264) if FEW else (12, 24, 40, 64, 72, 100, 120, 128, 264):
    for kv_heads, page_size in ((1, 64), (2, 16)) if FEW else product((1, 2), (16, 64)):
        check_attention(head_size, kv_heads, page_size)
print("equal")
