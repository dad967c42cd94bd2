"""The elementwise kernels, in Triton's interpreter if there is no GPU, compared with their torch twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels import fp8_pages, launch
from fastgen.kernels.embedding import embed
from fastgen.kernels.epilogue import geglu, sigmoid_gate, swiglu
from fastgen.kernels.lane_updates import DecodeInput, advance, begin_step
from fastgen.kernels.launch import Kernel
from fastgen.kernels.merge import merge
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.rope import HeadNorm, SlotMapping, rope_write
from fastgen.kernels.sum_norm import sum_norm
from fastgen.kernels.triton.embedding import MAX_BLOCK

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates to bfloat16


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    """Check that the numbers differ by at most a few units in the last place."""
    assert found.dtype == expected.dtype
    tolerance = 8 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "size", "added"), [(1, 64, False), (5, 96, True), (3, 2048, False)])
def test_rms_norm(rows: int, size: int, added: bool, dtype: torch.dtype, centered: bool) -> None:
    x, norm = randn(rows, size, dtype=dtype), RMSNorm(randn(size, seed=1, dtype=dtype), 1e-5, centered)
    delta, y = randn(rows, size, seed=2, dtype=dtype) if added else None, x.clone()
    close(rms_norm.launch(x, norm, delta), rms_norm.twin(y, norm, delta))
    assert torch.equal(x, y), "the sum is kept in x"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("ranks", "rank", "rows", "scaled"), [(2, 0, 1, True), (3, 1, 4, True), (4, 3, 4, False), (4, 3, 1, True)]
)
def test_the_norm_of_a_sum_over_ranks(ranks: int, rank: int, rows: int, scaled: bool, dtype: torch.dtype) -> None:
    x, y, out = (randn(rows, 80, seed=seed, dtype=dtype) for seed in range(3))
    stage = randn(ranks, 4, 80, seed=3, dtype=dtype) * 100
    stage[rank] = torch.nan  # is not read
    weight = randn(80, seed=4, dtype=dtype) if scaled else None
    twin_x, twin_out = x.clone(), out.clone()
    sum_norm.launch(x, y, stage, rank, weight, 1e-5, out)
    sum_norm.twin(twin_x, y, stage, rank, weight, 1e-5, twin_out)
    assert torch.equal(x, twin_x), "in the order of ranks, and rounded once"
    close(out, twin_out)
    assert scaled or torch.equal(out, x)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("kind", ["launch", "twin"])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(128, 64, 32), (130, 96, 4), (17, 200, 1), (64, 80, 65)])
def test_a_merged_adapter_is_rounded_once(rows: int, columns: int, rank: int, kind: str, dtype: torch.dtype) -> None:
    """The output is a slice of a fused weight and may be the base; the factors are slices, too."""
    base, factors = randn(rows, columns, dtype=dtype), randn(rank, 3 * columns + rows + 5, seed=1) / rank**0.5
    a, b = factors[:, columns : 2 * columns], factors[:, 3 * columns + 5 :]
    product = b.double().t() @ a.double()
    fused = torch.zeros(rows + 7, columns, device=DEVICE, dtype=dtype)
    out = fused[3 : 3 + rows]
    getattr(merge, kind)(out, base, a, b)
    expected = base.double() + product
    if dtype == torch.float32:
        torch.testing.assert_close(out.double(), expected, rtol=2**-22, atol=2**-18)
    else:  # next to the middle of two numbers the last bits of float32 decide
        assert (out != expected.to(dtype)).sum() <= 1 + 1e-3 * out.numel()
        close(out, expected.to(dtype))
    assert not fused[:3].any()
    assert not fused[3 + rows :].any()
    getattr(merge, kind)(base, base, a, b)
    assert torch.equal(base, out)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 2100)])
@pytest.mark.parametrize("kernel", [swiglu, geglu])
def test_gated_activations(rows: int, size: int, dtype: torch.dtype, kernel: Kernel) -> None:
    x = randn(rows, 2 * size, dtype=dtype) * 3
    gate, up = x.double().chunk(2, 1)
    exact = up * (F.silu(gate) if kernel is swiglu else F.gelu(gate, approximate="tanh"))
    error, twin_error = ((y - exact).abs().max() for y in (kernel.launch(x), kernel.twin(x)))
    assert twin_error <= exact.abs().max() * torch.finfo(dtype).eps
    assert error <= 1.1 * twin_error + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_gate_of_attention(dtype: torch.dtype) -> None:
    x, gate = (randn(3, 700, seed=seed, dtype=dtype) * 3 for seed in range(2))
    for run in (sigmoid_gate.launch, sigmoid_gate.twin):
        close(run(x, gate.clone()), (x.double() * gate.double().sigmoid()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "num_kv", "head_size"), [(4, 2, 64), (5, 1, 24), (8, 8, 96)])
@pytest.mark.parametrize(
    ("normed", "rotated"),
    [("", 1.0), ("before rope", 1.0), ("after rope", 1.0), ("", 0.75), ("before rope", 0.5), ("centered", 1.0)],
)
def test_rope_and_the_write_to_the_pool(
    heads: int, num_kv: int, head_size: int, dtype: torch.dtype, normed: str, rotated: float
) -> None:
    tokens, page_size, pages = 7, 4, 5
    qkv = randn(tokens, (heads + 2 * num_kv) * head_size, dtype=dtype)
    angles = randn(40, int(head_size * rotated) // 2, seed=1) * 3
    slots = torch.tensor([3, 4, 19, 0, 11, -1, -1], device=DEVICE)
    positions = torch.tensor([39, 0, 7, 8, 20, 1, 0], device=DEVICE)
    mapping = SlotMapping(positions, slots, angles.cos(), angles.sin(), 5, num_kv, page_size)
    weights = randn(head_size, seed=2, dtype=dtype), randn(head_size, seed=3, dtype=dtype)
    norm = HeadNorm(*weights, 1e-5, normed == "after rope", normed == "centered") if normed else None
    before = randn(2, pages, num_kv, page_size, head_size, seed=4, dtype=dtype)
    pool, twin_pool = before.clone(), before.clone()
    close(rope_write.launch(qkv, mapping, *pool, norm), rope_write.twin(qkv, mapping, *twin_pool, norm))
    close(pool, twin_pool)
    written = (pool != before).any(-1).any(2).any(0)
    assert written.flatten().nonzero().flatten().tolist() == [0, 3, 4, 11, 19]
    # In a graph padding counts as real. The twin then writes it to a slot of the last page, and the kernel nowhere.
    mapping = replace(mapping, slots=slots.masked_fill(slots == 19, -1), real=tokens)
    pool, twin_pool = before.clone(), before.clone()
    close(rope_write.launch(qkv, mapping, *pool, norm), rope_write.twin(qkv, mapping, *twin_pool, norm))
    close(pool[:, :-1], twin_pool[:, :-1])
    for found, expected in ((pool, [0, 3, 4, 11]), (twin_pool, [0, 3, 4, 11, 19])):
        assert (found != before).any(-1).any(2).any(0).flatten().nonzero().flatten().tolist() == expected


@pytest.mark.parametrize(("dtype", "rotary"), [(torch.float32, 48), (HALF, 48), (HALF, 24)])
def test_rope_into_a_pool_in_fp8(dtype: torch.dtype, rotary: int) -> None:
    """The kernel writes the same bytes as its twin. All numbers are exact in E4M3; Triton's interpreter rounds others
    differently."""
    heads, num_kv, head_size, page_size = 5, 2, 48, 4
    qkv = torch.randint(-15, 16, (6, (heads + 2 * num_kv) * head_size), generator=torch.Generator().manual_seed(0))
    qkv = qkv.to(DEVICE, dtype) * 2.0 ** torch.tensor([0, -10, 9, -24, 3, 1], device=DEVICE)[:, None]
    qkv[4, head_size * (heads + 1) :] = 0
    angles = torch.zeros(40, rotary // 2, device=DEVICE)
    slots = torch.tensor([3, 4, 19, 0, 11, -1], device=DEVICE)
    mapping = SlotMapping(slots.clamp(min=0), slots, angles.cos(), angles.sin(), 5, num_kv, page_size)
    found = []
    for run in (rope_write.launch, rope_write.twin):
        memory = torch.full((2, 6, num_kv, fp8_pages.head_bytes(page_size, head_size)), 255, dtype=torch.uint8)
        memory = memory.to(DEVICE)
        pool = fp8_pages.numbers_of(memory, page_size, head_size)
        run(qkv.to(dtype), mapping, *pool)
        found.append(memory)
        for kept, part in zip(pool, qkv.view(6, -1, head_size)[:5, heads:].chunk(2, 1), strict=True):
            read = fp8_pages.read(kept, mapping.rows.flatten(), 1)
            assert torch.equal(read.view(5, num_kv, head_size), part.float())
            assert (fp8_pages.scales_of(kept) != 255).sum() == 5 * num_kv
    assert torch.equal(*found)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 448.0, 1e30])
def test_heads_in_fp8(magnitude: float) -> None:
    """Rounding errors are at most half of the distance of neighbours in E4M3, whatever the largest number is."""
    heads = randn(20, 2, 32) * magnitude
    heads[0] = 0
    memory = torch.zeros(10, 2, fp8_pages.head_bytes(4, 32), dtype=torch.uint8, device=DEVICE)
    pool = fp8_pages.numbers_of(memory, 4, 32)
    rows = torch.randperm(80, generator=torch.Generator().manual_seed(0))[:40].to(DEVICE).view(20, 2)
    fp8_pages.put(pool, rows, heads)
    found = fp8_pages.read(pool, rows.flatten(), 1).view(heads.shape)
    largest = heads.abs().amax(-1, keepdim=True)
    assert ((found - heads).abs() <= heads.abs() / 16 + largest * 2**-17).all()
    everything = fp8_pages.read(pool, torch.arange(40, device=DEVICE), 2).view(80, 32)
    fp8_pages.check(fp8_pages.numbers_of(memory[:, :1].contiguous(), 4, 32))
    assert torch.equal(everything[rows], found)
    fp8_pages.put(pool, rows, found)
    assert torch.equal(fp8_pages.read(pool, rows.flatten(), 1).view(heads.shape), found)


def test_begin_step() -> None:
    """Lanes get their lengths; those that decode, their last tokens. Padding stays at length 0, and other ids stay."""
    lanes = torch.tensor([3, 0, 5, 7, 7], device=DEVICE)  # two decode, one prefills, and padding
    lens = torch.tensor([12, 4, 90, 0, 0], dtype=torch.int32, device=DEVICE)
    decode_lens = torch.tensor([12, 4, 0, 0], dtype=torch.int32, device=DEVICE)
    last_token = torch.arange(100, 108, device=DEVICE)
    for run in (begin_step.launch, begin_step.twin):
        ids, kv_lens = torch.arange(6, device=DEVICE), torch.arange(8, dtype=torch.int32, device=DEVICE)
        kv_lens[7] = 0
        run(lanes, lens, decode_lens, ids, last_token, kv_lens)
        assert ids.tolist() == [103, 100, 2, 3, 4, 5]
        assert kv_lens.tolist() == [4, 1, 2, 12, 4, 90, 6, 0]


def test_advance() -> None:
    lanes, table = 7, torch.arange(8 * 3, dtype=torch.int32, device=DEVICE).view(8, 3)
    last_token = torch.arange(50, 50 + lanes + 1, device=DEVICE)
    kv_lens = torch.tensor([0, 5, 11, 4, 3, 8, 1, 0], dtype=torch.int32, device=DEVICE)
    found = []
    for run in (advance.launch, advance.twin):
        lens, step = kv_lens.clone(), DecodeInput.empty(9, DEVICE).first(6)
        step.lanes.copy_(torch.tensor([2, 0, 5, 7, 7, 1]))
        run(last_token, lens, table, step, 4)
        found.append((lens, step))
    (lens, step), (twin_lens, twin_step) = found
    assert lens.tolist() == twin_lens.tolist() == [1, 6, 12, 4, 3, 9, 1, 0]
    assert step.token_ids.tolist() == twin_step.token_ids.tolist() == [52, 50, 55, 57, 57, 51]
    assert step.positions.tolist() == twin_step.positions.tolist() == [11, 0, 8, 0, 0, 5]
    assert step.kv_lens.tolist() == twin_step.kv_lens.tolist() == [12, 1, 9, 1, 1, 6]
    assert step.slots.tolist() == twin_step.slots.tolist() == [8 * 4 + 3, 0, 17 * 4, 21 * 4, 21 * 4, 4 * 4 + 1]


@pytest.mark.parametrize("size", [64, 96, MAX_BLOCK + 8])
@pytest.mark.parametrize("first", [None, 0, 20])
def test_embeddings(first: int | None, size: int) -> None:
    """A rank has zeros for the ids that other ranks hold."""
    weight, start = randn(20, size, dtype=HALF), first or 0
    ids = torch.tensor([start + 19, start + 3, start, start + 3], device=DEVICE)
    others = ids.new_tensor([] if first is None else [start - 1, start + 20])
    for run in (embed.launch, embed.twin):
        found = run(torch.cat((ids, others)), weight, first)
        assert torch.equal(found[:4], weight[ids - start])
        assert not found[4:].any()


def test_a_kernel_that_does_not_compile_falls_back_to_its_twin_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error at run time is raised."""
    from triton.runtime.errors import OutOfResources

    errors = [RuntimeError("an illegal memory access"), OutOfResources(200_000, 100_000, "shared memory")]

    def refused(x: Tensor, by: int) -> Tensor:
        raise errors.pop()

    kernel = Kernel(lambda x, by: x * by, "")
    kernel.launch = refused
    monkeypatch.setattr(Kernel, "runs_on", lambda self, device: device not in self.refused)
    assert kernel(torch.tensor(3), 4) == 12
    assert kernel(torch.tensor(3), 5) == 15
    assert len(errors) == len(caplog.records) == 1
    assert "test_kernels kernel does not compile on cpu" in caplog.text
    kernel.refused.clear()
    with pytest.raises(RuntimeError, match="illegal"):
        kernel(torch.tensor(3), 4)


def test_a_kernel_that_does_not_compile_for_one_device_runs_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not rms_norm.runs_on(torch.device("cpu"))
    monkeypatch.setattr(launch, "triton", object())
    kernel = Kernel(lambda x: x, "")
    kernel.refused.add(torch.device("cuda:0"))
    assert [kernel.runs_on(torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu")] == [False, True, False]
