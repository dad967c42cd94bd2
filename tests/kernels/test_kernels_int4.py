"""kernels/int4.py: the prepared form, the kernels in Triton's interpreter if there is no GPU, the conversion that the
kernel in Gluon makes, and what the kernels are compiled to. gpu/test_gpu_int4.py runs the kernel in Gluon."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compiling import compiled
from gluon_on_cpu import Tensor as Register
from gluon_on_cpu import compute
from test_kernels_batch_invariant import changed, error, randn
from test_kernels_hopper import LOAD, WAIT, check_hand_over, places
from torch import Tensor

from fastgen.device.chip import Chip
from fastgen.kernels import int4, launch
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.hopper import int4 as hopper_int4
from fastgen.kernels.launch import KNOWN, triton
from fastgen.kernels.rope import SlotMapping
from fastgen.kernels.triton import batch_invariant
from fastgen.kernels.triton import int4 as int4_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates to bfloat16
Packed = tuple[Tensor, Tensor, Tensor | None]


def numbers(outputs: int, inputs: int, group: int, zeros: bool = True, seed: int = 0) -> tuple[Tensor, Packed]:
    """Return random numbers q [outputs, inputs] and their logical form, packed as the files' formats say."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (outputs, inputs), generator=random)
    words = sum(q[:, i::8] << 4 * i for i in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    scales = ((torch.rand(outputs, inputs // group, generator=random) + 0.1) * inputs**-0.5).half()
    zero = torch.randint(0, 16, scales.shape, generator=random).to(torch.uint8) if zeros else None
    return q, (words, scales, zero)


def prepared(packed: Packed) -> Packed:
    words, scales, zeros = int4.prepare(*packed)
    return words.to(DEVICE), scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 384])
def test_the_weight_of_the_prepared_form(group: int, zeros: bool) -> None:
    q, packed = numbers(96, 384, group, zeros)
    _, scales, zero = packed
    middle = torch.full_like(scales, 8) if zero is None else zero
    expected = (q - middle.repeat_interleave(group, 1).int()).float() * scales.float().repeat_interleave(group, 1)
    form = prepared(packed)
    for dtype in (torch.float32, EXACT):
        for dequantize in (int4.dequantize.twin, int4.dequantize.launch):
            assert torch.equal(dequantize(*form, dtype).cpu(), expected.to(dtype))
    for found, wanted in zip(int4.restore(*form), packed, strict=True):
        assert wanted is None or torch.equal(found.cpu(), wanted)
    part = prepared((packed[0][32:64], scales[32:64], None if zero is None else zero[32:64]))
    for found, whole in zip(part, form, strict=True):
        assert whole is None or torch.equal(found, whole[32:64]), "blocks of 16 rows are independent"


@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(40, 128, 64), (64, 96, 32), (64, 192, 48), (64, 256, 96), (64, 512, 192)]
)
def test_shapes_that_are_refused(outputs: int, inputs: int, group: int) -> None:
    with pytest.raises(ValueError, match="weights of 4 bits need"):
        int4.check(outputs, inputs, group)


@pytest.mark.parametrize("parts", ["", "bias add", "bias swiglu", "logits"])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "group"), [(1, 192, 192, 64), (17, 160, 256, 32), (70, 96, 384, 128)]
)
def test_the_product_against_the_twin(tokens: int, outputs: int, inputs: int, group: int, parts: str) -> None:
    weight = prepared(numbers(outputs, inputs, group)[1])
    fused = Fused(
        add=randn(tokens, outputs, seed=4, dtype=EXACT) if "add" in parts else None,
        swiglu="swiglu" in parts,
        out_dtype=torch.float32 if "logits" in parts else None,
    )
    x, bias = randn(tokens, inputs, dtype=EXACT), randn(outputs, dtype=EXACT) if "bias" in parts else None
    twin = int4.int4_product.twin(x, *weight, bias, changed(fused, Tensor.clone))
    found = int4.int4_product.launch(x, *weight, bias, fused)
    assert fused.add is None or found is fused.add, "written in place"
    assert (found.dtype, found.shape) == (twin.dtype, twin.shape)
    assert error(found, twin.double()) < 2 * torch.finfo(EXACT).eps


@pytest.mark.parametrize(("heads", "num_kv", "head_size"), [(4, 2, 32), (2, 1, 96), (2, 1, 128), (4, 2, 48)])
def test_rope_fused_with_the_product(heads: int, num_kv: int, head_size: int) -> None:
    tokens, inputs, page_size = 5, 128, 16
    weight = prepared(numbers((heads + 2 * num_kv) * head_size, inputs, 64)[1])
    x, angles = randn(tokens, inputs, dtype=EXACT), randn(200, head_size // 2, seed=4)
    positions = torch.arange(tokens, device=DEVICE) * 2
    slots = torch.tensor([3, 20, 7, 1, -1], device=DEVICE)
    mapping = SlotMapping(positions, slots, angles.cos(), angles.sin(), tokens - 1, num_kv, page_size)
    pool = randn(2, 2, num_kv, page_size, head_size, seed=5, dtype=EXACT)
    twin_pool, before = pool.clone(), pool.clone()
    found = int4.int4_product.launch(x, *weight, None, Fused(rope=RopeWrite(mapping, *pool)))
    twin = int4.int4_product.twin(x, *weight, None, Fused(rope=RopeWrite(mapping, *twin_pool)))
    assert found.shape == twin.shape == (tokens, heads, head_size)
    assert error(found, twin.double()) < 1e-2
    assert error(pool, twin_pool.double()) < 1e-2
    assert torch.equal((pool != before).any(-1), (twin_pool != before).any(-1))


def pairs(values: Tensor) -> Register:
    """Return registers with two copies of each 2-byte number."""
    return Register(torch.stack((values, values), -1))


def registers(numbers: Tensor, dtype: torch.dtype) -> Register:
    """Return registers with the lowest 32 bits of numbers, as two numbers of 2 bytes each."""
    return Register(torch.where(numbers >= 2**31, numbers - 2**32, numbers).int().view(dtype).view(-1, 2))


@pytest.mark.parametrize(("rows", "side"), [(1, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [(torch.bfloat16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_the_instructions_round_once(
    dtype: torch.dtype, scale_dtype: torch.dtype, rows: int, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 16 x 16 numbers q and zeros, with many scales, as two words of the numbers (q + i) % 16: (q - zero) * scale
    in float32, rounded once. side: which of a block's two halves a warp has; in bfloat16, its words were shifted."""
    monkeypatch.setattr(hopper_int4, "gl", torch)  # for the dtypes
    middle, masked = (getattr(each, "fn", each) for each in (hopper_int4._middle, hopper_int4._masked))
    scales = (torch.rand(200, generator=torch.Generator().manual_seed(0)) * 0.05).to(scale_dtype)
    scales[:4] = torch.tensor([6e-8, 1e-5, -0.3, 1.0])
    q, zero, scale = torch.meshgrid(torch.arange(16), torch.arange(16), torch.arange(200), indexing="ij")
    q, zero, scale = q.flatten(), zero.flatten(), scales[scale.flatten()]
    several = [(q + number) % 16 for number in range(8)]
    word = sum(each << 4 * number for number, each in enumerate(several))
    words = registers(word if dtype == torch.float16 else word >> 4 * side, dtype)
    middles = [registers(middle(zero.int(), odd, dtype), dtype) for odd in ((0, 1) if rows == 2 else (side,))]
    high = scale.to(dtype)
    low = (scale.float() - high.float()).to(dtype)
    split = scale_dtype != dtype
    name = "BF16_LOW" if split else "BF16" if dtype == torch.bfloat16 else "F16"
    text = getattr(hopper_int4, name + "_ROW" * (rows == 1))
    factors = [*middles, *[pairs(high)] * rows, *[pairs(low)] * (rows * split)]
    if rows == 1 and dtype == torch.float16:
        factors += [registers(torch.full_like(q, each), dtype) for each in masked(side)]
    given = [words, words, *[each for each in factors for _ in range(2)]]
    expected = [((each - zero).float() * scale.float()).to(dtype) for each in several]
    computed = compute(getattr(text, "value", text), given, (dtype,) * 8)
    for number in range(0, 8, 3 - rows):
        pair = number % 4 + side
        assert torch.equal(computed[number].x.view(-1, 2), torch.stack((expected[pair], expected[pair + 4]), -1))
    assert all(found.x.isnan().all() for found in computed[1 :: 3 - rows] if rows == 1)


SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Outputs and inputs of Mistral 7B's products."""

LAUNCHES = """
from fastgen.kernels import int4
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.rope import SlotMapping

for outputs, inputs, group, what, dtype in [
    (4096, 4096, 128, "add", "bf16"), (4096, 14336, 128, "add", "bf16"), (28672, 4096, 128, "swiglu", "bf16"),
    (6144, 4096, 128, "rope", "bf16"), (4096, 4096, 32, "", "bf16"), (4096, 4096, 64, "", "bf16"),
    (4096, 4096, 4096, "", "bf16"), (4096, 14336, 128, "add", "f16"), (28672, 4096, 128, "swiglu", "f16"),
]:
    for tokens in (1, 9, 17, 33, 65) if what else (1,):
        about |= {"tokens": tokens, "dtype": dtype}
        words, scales = zeros(outputs, inputs // 8, dtype=torch.int32), zeros(outputs, inputs // group).half()
        zero = scales.to(torch.uint8) if group == 128 else None
        x = zeros(tokens, inputs, dtype=torch.float16 if dtype == "f16" else torch.bfloat16)
        fused = Fused(add=zeros(tokens, outputs, dtype=x.dtype) if what == "add" else None, swiglu=what == "swiglu")
        if what == "rope":
            where, turns = zeros(tokens, dtype=torch.int64), zeros(9, 64, dtype=torch.float32)
            mapping = SlotMapping(where, where, turns, turns, tokens, 8, 64)
            fused = Fused(rope=RopeWrite(mapping, *zeros(2, 2, 8, 64, 128)))
        int4.int4_product.launch(x, words, scales, zero, None, fused)
"""


@pytest.mark.long
@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_products_are_compiled_for_hopper() -> None:
    several: list[dict[str, Any]] = [each for each in compiled(LAUNCHES) if each["kernel"] == "hopper.int4"]
    for dtype in ("bf16", "f16"):
        assert sum(made["dtype"] == dtype for made in several) >= 10
    for made in several:
        flow = check_hand_over(made["ptx"])
        assert made["shared"] <= 232_448
        multiplying, loading = flow.text(flow.first), flow.text(flow.others)
        assert len(places(WAIT, multiplying)) == 1
        assert not places(LOAD, multiplying)
        [wait] = places(WAIT, loading)
        assert places(LOAD, loading)[0] < wait, "the weight loads before the previous kernel has ended"
        products = set(re.findall(r"wgmma\.mma_async\S+", made["ptx"]))
        assert len(products) == 1
        name = rf"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.{made['dtype']}\.{made['dtype']}"
        assert re.fullmatch(name, products.pop())
        assert "cvt.rn.f32" not in made["ptx"]
        assert len(places(r"ld\.shared\.v4", made["ptx"])) >= 4, "a thread's words of 64 columns at a time"


@pytest.mark.long
@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("chip", ["A100", "RTX 4090"])
def test_products_are_compiled_for_older_chips(chip: str) -> None:
    several = [each for each in compiled(LAUNCHES, chip) if each["kernel"] == "triton.int4"]
    products = {name for made in several for name in re.findall(r"mma\.sync\S+", made["ptx"])}
    widths = {width for made in several for width in re.findall(r"kWidth = \d", made["ttgir"])}
    assert widths == {"kWidth = 2"}, "neighbours in an instruction are neighbours in a row, as in other products"
    assert products == {f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32" for dtype in ("bf16", "f16")}


def test_a_scratch_copy_is_read_after_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of hopper.products load the first tiles of a weight before the previous kernel has ended."""
    chip, chosen = Chip((9, 0), 132, 232_448), list[batch_invariant.ProductConfig]()
    monkeypatch.setattr(Chip, "of", lambda device: chip)
    monkeypatch.setattr(launch, "GLUON", True)
    monkeypatch.setattr(
        int4_kernels, "dequantize", lambda words, scales, zeros, dtype: torch.zeros(len(words), 256, dtype=dtype)
    )
    monkeypatch.setattr(batch_invariant, "launch_as", lambda found, *others: chosen.append(found))
    weight = torch.zeros(4096, 32, dtype=torch.int32), torch.ones(4096, 2), None  # no Gluon with scales in float32
    for tokens in range(65, 600):
        int4_kernels.launch_for(tokens, torch.zeros(1, 256, dtype=torch.bfloat16), *weight, None, Fused())
    assert len(chosen) == 535
    assert not any(found.swap for found in chosen)
    assert batch_invariant.config(65, 4096, 256, torch.bfloat16, chip).swap


def test_tiles_of_few_tokens() -> None:
    """Wide weights have tiles of 128 rows, and others of 64 rows, or of 32 if all of them can run at the same time. All
    tiles leave room for several steps, also in groups of 32."""
    chip = Chip((9, 0), 132, 232_448)
    for tokens in range(1, 65):
        tiles = {
            name: hopper_int4.tile_of(tokens, *SHAPES[name], chip, name in ("o", "down"), swiglu=name == "gate_up")
            for name in SHAPES
        }
        halved = 32 if tokens <= 32 else 64
        assert {name: tile.rows for name, tile in tiles.items()} == {
            "qkv": 64, "o": halved, "gate_up": 128, "down": halved
        }  # fmt: skip
        assert all(tokens <= tile.tokens or tile.tokens == 32 < tokens for tile in tiles.values())
        least = 2 if tokens <= 32 else 4
        assert all(tile.stages(chip, group) >= least for tile in tiles.values() for group in (32, 128))
        assert tiles["down"].programs == tiles["qkv"].programs == (2 if tokens <= 8 else 1)
        assert tiles["o"].programs == (2 if tokens <= 16 else 1)
        quarter = hopper_int4.tile_of(tokens, 7168, 4096, chip, swiglu=True)
        assert (quarter.rows, quarter.programs) == (64, 1), "gate_up on 4 ranks, which no program of down follows"


@pytest.mark.parametrize("factor_bytes", [2, 3], ids=["scales", "scales and zeros"])
@pytest.mark.parametrize("group", [32, 64, 128, 2048])
def test_what_shares_a_processor(group: int, factor_bytes: int) -> None:
    """For up to 8 tokens, a processor has room for a program of down and one of gate_up or of q, k and v, but not for
    two of down, and not for two of q, k and v. In small groups, down has a processor's whole memory, as with more
    tokens."""
    chip, most = Chip((9, 0), 132, 232_448), 233_472  # bytes of a processor, of which each program has 1024 more
    tiles = {
        name: hopper_int4.tile_of(8, *SHAPES[name], chip, name == "down", group, name == "gate_up")
        for name in ("qkv", "gate_up", "down")
    }

    def share(*names: str) -> bool:
        several = [tiles[name] for name in names]
        factors = [factor_bytes * each.rows * each.groups(group) * each.apart(group) for each in several]
        steps = [(32 + each.rows) * each.depth // 2 + more for each, more in zip(several, factors, strict=True)]
        memory = sum(x.stages(chip, group) * step + 1024 + 512 for x, step in zip(several, steps, strict=True))
        return memory <= most and sum(32 * (each.warps + 4) * each.registers for each in several) <= 65536

    assert share("gate_up", "gate_up")
    assert not share("down", "down")
    assert not share("qkv", "qkv")
    assert share("down", "gate_up") == share("down", "qkv") == (group >= 128)


class Recorder:
    """A kernel that is not run: it notes its compile-time arguments. copies: for notes of the tiles of products with a
    scratch copy."""

    def __init__(self) -> None:
        self.seen = set[tuple[Any, ...]]()
        self.copies = set[batch_invariant.ProductConfig]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.seen.add((*(each for each in args if isinstance(each, int | bool)), options["num_warps"]))

        return launch


@pytest.mark.parametrize("what", ["plain", "add", "swiglu"])
def test_one_row_launches_the_kernels_of_all_numbers_of_tokens(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the start of an engine does, which compiles what is launched."""
    chip, kernels = Chip((9, 0), 132, 232_448), [Recorder(), Recorder()]
    monkeypatch.setattr(Chip, "of", lambda device: chip)
    monkeypatch.setattr(hopper_int4, "GLUON", True)
    monkeypatch.setattr(hopper_int4, "_described", lambda *args: None)
    monkeypatch.setattr(hopper_int4, "described", lambda *args: None)
    words, scales = torch.zeros(4096, 32, dtype=torch.int32), torch.ones(4096, 2, dtype=torch.bfloat16)

    def run(tokens: int, rows: int) -> None:
        x = torch.zeros(rows, 256, dtype=torch.bfloat16)
        fused = Fused(add=torch.zeros(rows, 4096) if what == "add" else None, swiglu=what == "swiglu")
        sizes = int4_kernels.sizes_of(x, words, scales, fused) if tokens == 0 else [tokens]
        for each in sizes:
            int4_kernels.launch_for(each, x, words, scales, None, None, fused)

    monkeypatch.setattr(int4_kernels, "dequantize", lambda words, scales, zeros, dtype: torch.zeros(1))
    for kernel, several in zip(kernels, ((0,), range(1, 4097)), strict=True):
        copies = kernel.copies
        monkeypatch.setattr(hopper_int4, "_product_kernel", kernel)
        monkeypatch.setattr(batch_invariant, "launch_as", lambda found, *others, copies=copies: copies.add(found))
        for tokens in several:
            run(tokens, 1)
    assert kernels[0].seen == kernels[1].seen
    assert len(kernels[0].seen) > 5
    assert kernels[0].copies == kernels[1].copies
    assert len(kernels[0].copies) == 2
