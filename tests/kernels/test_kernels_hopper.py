"""Kernels for Hopper in Gluon, which no interpreter knows: what they are compiled to. On a GPU they are seen in
test_kernels_batch_invariant.py, and in gpu/test_gpu_deterministic.py and test_gpu_prefill.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kernels_batch_invariant import A100, H200

from fastgen.kernels import batch_invariant, hopper_decode, hopper_prefill, hopper_products
from fastgen.kernels.gluon import HALVES
from fastgen.kernels.launch import KNOWN

BEGIN = """
import json
import torch, triton  # before fastgen, which without a GPU does without it
from dataclasses import asdict
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from fastgen.kernels import batch_invariant, hopper_products, hopper_decode, hopper_prefill, work_tiles
from fastgen.device.chip import Chip

H200 = Chip((9, 0), 132, 232_448)

def compiled(kernel, types, blocks, constants, aligned, options, fp8=False):
    for name, block in blocks.items():
        kind = gl.float8e4nv if fp8 and name != "q_desc" else gl.bfloat16
        layout = gl.NVMMASharedLayout.get_default_for(block, kind)
        types[name] = f"tensordesc<{kind}{block},{layout!r}>"
    loose = [each.name for each in kernel.params if each.do_not_specialize]  # or it would compile after the start
    types = {name: types.get(name, "i32" if name in aligned + loose else "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    multiples = [name for name in types if name.endswith("_ptr") and types[name] != "constexpr"] + aligned
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = GluonASTSource(kernel, types, places, attributes)
    options = {"enable_fp_fusion": False, "maxnreg": hopper_products.REGISTERS, **options}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"shared": made.metadata.shared, "ptx": made.asm["ptx"], "cubin": made.asm["cubin"].hex()}
"""
PRODUCTS = """
kernel = hopper_products._product_kernel
for tokens, outputs, inputs, half, heads, what in [
    (1, 4096, 4096, 0, 1, "add"), (1, 4096, 14336, 0, 1, "add"), (1, 28672, 4096, 14336, 1, "swiglu"),
    (17, 6144, 4096, 64, 1, "rope"), (64, 28672, 4096, 14336, 1, "swiglu"), (1, 1152, 4096, 24, 1, "rope"),
    (1, 2048, 8192, 0, 1, "add"), (33, 4096, 4096, 0, 1, "add"), (17, 32768, 4096, 0, 1, "logits"),
    (9, 12288, 4096, 16, 2, "rope"), (1, 1024, 512, 8, 2, "rope"), (1, 1024, 512, 512, 1, "swiglu"),
    (128, 28672, 4096, 14336, 1, "swiglu"),
    (128, 4096, 14336, 0, 1, "add"), (256, 4096, 14336, 0, 1, "add"), (96, 32768, 4096, 0, 1, "logits"),
]:
    found = batch_invariant.config(tokens, outputs, inputs, torch.bfloat16, H200)
    pieces = 1 if found.rows >= 64 else found.depth // 64
    block = [found.rows, found.depth // pieces]
    if half:
        block = [heads, 2, found.rows // 2 // heads, found.depth // pieces]
    types = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    types |= {"x_scales_ptr": "constexpr", "scales_ptr": "constexpr"}
    types |= {"out_ptr": "*fp32"} if what == "logits" else {}
    constants = {
        "x_scales_ptr": None, "scales_ptr": None, "BLOCKS": False,
        "K": inputs, "HALF": half, "KV": 8 * (what == "rope"), "P": 64, "ADD": what == "add", "TOKENS": found.tokens,
        "ROWS": found.rows, "HEADS": heads, "DEPTH": found.depth, "STAGES": found.stages, "SIDE": max(found.rows, 64),
        "PIECES": pieces, "CUT": found.token_tiles > 1, "AHEAD": tokens <= 64,
        "EARLY": outputs == 6144,
    }
    blocks = {"x_desc": [found.tokens, found.depth], "weight_desc": block}
    made = compiled(kernel, types, blocks, constants, ["N"], {"num_warps": found.warps})
    more = {"pieces": pieces, "outputs": outputs, "steps": -(-inputs // found.depth)}
    print(json.dumps({**asdict(found), **more, **made}))
"""
DECODES = """
kernel = hopper_decode._decode_kernel
for group, head_size, window, fp8 in [
    (4, 128, 0, False), (1, 96, 100, False), (5, 64, 0, False), (16, 128, 0, False), (4, 128, 0, True),
    (1, 96, 100, True), (32, 64, 0, True),
]:
    rows, dims = hopper_decode.rows_of(group), 1 << (head_size - 1).bit_length()
    stages = hopper_decode.stages_of(group, dims, 1 if fp8 else 2, H200)
    types = {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= {"out_ptr": "*bf16", "table_ptr": "*i32", "list_ptr": "*i32"}
    constants = {
        "H": 8 * group, "K": 8, "D": head_size, "P": 64, "WINDOW": window, "SCALE": 0.1, "ROWS": rows, "KEYS": 64,
        "DIMS": dims, "STAGES": stages, "SIDE": 64, "HEADER": work_tiles.HEADER, "FIELDS": work_tiles.FIELDS,
        "SPLITS": work_tiles.SPLITS, "PRIVATE": window > 0,
    }
    blocks = {"q_desc": [rows, dims], "keys_desc": [1, 64, dims], "values_desc": [1, 64, dims]}
    if fp8:
        blocks |= {"key_bits_desc": [1, 64], "value_bits_desc": [1, 64]}
    else:
        constants |= {"key_bits_desc": None, "value_bits_desc": None}
    made = compiled(kernel, types, blocks, constants, [], {"num_warps": hopper_products.WARPS}, fp8)
    print(json.dumps({"rows": rows, "dims": dims, "stages": stages, "fp8": fp8, **made}))
"""
PREFILLS = """
kernel = hopper_prefill._prefill_kernel
for group, head_size, window in [(4, 128, 0), (5, 96, 100)]:
    dims = 1 << (head_size - 1).bit_length()
    types = {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= {"out_ptr": "*bf16", "table_ptr": "*i32", "list_ptr": "*i32"}
    constants = {
        "H": 8 * group, "K": 8, "D": head_size, "P": 64, "WINDOW": window, "SCALE": 0.1, "DIMS": dims,
        "STAGES": hopper_prefill.stages_of(dims, 2, H200), "SIDE": hopper_prefill.SIDE,
        "PIECE": hopper_prefill.PIECE, "HEADER": work_tiles.HEADER, "FIELDS": work_tiles.FIELDS,
        "KEYS": hopper_prefill.KEYS,
    }
    blocks = {"q_desc": [*hopper_prefill.unit_of(group), 64], "keys_desc": [1, 64, 64], "values_desc": [1, 64, 64]}
    options = {"maxnreg": hopper_prefill.REGISTERS, "num_warps": hopper_prefill.WARPS}
    made = compiled(kernel, types, blocks, constants, [], options)
    print(json.dumps({"group": group, "dims": dims, **made}))
"""
LOAD, WAIT, START = r"cp\.async\.bulk\.tensor\.\dd\.shared", "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def compiled(script: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", BEGIN + script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-2000:]
    several = [json.loads(line) for line in ran.stdout.splitlines()]
    for made in several:
        check_hand_over(made["ptx"])
    return several


def check_hand_over(ptx: str) -> None:
    """What the first warps hand to the other groups of warps (a group's task, values that it takes over) lies in shared
    memory between two barriers of all threads. racecheck does not know these barriers, and reports races."""
    barrier = r"barrier\.sync\s+1;\s*\n"
    written = re.findall(rf"st\.shared\S*\s+\[global_smem\+\d+\], [^\n]*\n\s*{barrier}", ptx)
    assert len(written) == 2, "tasks, and the end"
    assert len(re.findall(rf"{barrier}(?:[^\n]*\n){{0,2}}?\s*ld\.shared\.b8", ptx)) == 1, "which task"
    [taken] = re.findall(rf"brx\.idx[^\n]*\n\$L__BB[^\n]*\n((?:[^\n]*\n)*?)\s*{barrier}", ptx)
    names = [line.split()[0] for line in taken.splitlines() if line.strip()]
    assert all(re.match(r"setmaxnreg|\.pragma|\.loc|ld\.shared|mov", name) for name in names), names


def places(pattern: str, text: str) -> list[int]:
    return [each.start() for each in re.finditer(pattern, text)]


@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_the_weight_is_loaded_before_the_kernel_ahead_has_ended() -> None:
    several = compiled(PRODUCTS)
    assert {each["rows"] for each in several} == {32, 64, 128} if HALVES else {64, 128}
    assert {each["tokens"] for each in several} == {8, 16, 32, 64, 128}
    for made in several:
        ptx, stages = made["ptx"], made["stages"]
        programs = 1 if made["token_tiles"] * made["outputs"] <= 132 * made["rows"] else 2
        assert made["shared"] <= (H200.shared_memory + 1024) // programs - 1024
        # The part of the four warps, whose wait is the first; then that of the warp that loads.
        loads, waits = places(LOAD, ptx), places(WAIT, ptx)
        assert len(waits) == 2
        assert waits[0] < waits[1]
        a_stage = made["pieces"] * max(made["depth"] // made["pieces"] // 64, 1)  # instructions: 64 columns each
        first = min(stages, made["steps"])
        assert len(places(LOAD, ptx[: waits[1]])) == first * a_stage, "the weight's first ones"
        x_too = a_stage + max(made["depth"] // 64, 1)
        loops = {first + (made["steps"] > stages), made["steps"]}  # a short loop may be unrolled
        assert len(loads) in {each * x_too for each in loops}, "each stage's first ones, and the loop's"
        assert all(waits[0] < each for each in places("ld.global", ptx))
        early = made["outputs"] == 6144
        assert (ptx.index(START) > waits[1]) == early, "where the part that loads says it, when it has waited"
        products = set(re.findall(r"wgmma\.mma_async\S+", ptx))
        assert products == {f"wgmma.mma_async.sync.aligned.m64n{made['tokens']}k16.f32.bf16.bf16"}, (
            "as batch_invariant's"
        )
        assert "fma.rn.f32" not in ptx


@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_decodes_are_compiled() -> None:
    for made in compiled(DECODES):
        assert made["shared"] <= (H200.shared_memory + 1024) // hopper_decode.PROGRAMS - 1024
        assert made["stages"] > 2
        loads, waits = places(LOAD, made["ptx"]), places(WAIT, made["ptx"])
        # Two of the four warps: where the step is not of decodes alone, and before the first query. And one of the warp
        # that loads keys, in a branch of its own, for a block with a new key.
        assert len(waits) == 3
        assert waits[1] < loads[0], "the first query"
        products = set(re.findall(r"wgmma\.mma_async\S+k16\.(\S+)", made["ptx"]))
        assert products == {"f32.bf16.bf16", *["f32.f16.f16"] * made["fp8"]}
        assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)", made["ptx"])) == {f"m64n{made['rows']}"}
        if made["fp8"]:  # by 4 bytes a thread, and not one by one
            each = hopper_decode.KEYS * made["dims"] // (32 * hopper_products.WARPS) // 4
            assert len(places(r"ldmatrix\S+x4\.shared", made["ptx"])) == each // 4, "keys"
            assert len(places(r"ldmatrix\S+x4\.trans", made["ptx"])) == each // 4, "values"
            assert len(places(r"cvt\.rn\.f16x2\.e4m3x2", made["ptx"])) == 2 * each
            assert "cvt.f32.f16" not in made["ptx"]


@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_prefills_are_compiled(tmp_path: Path) -> None:
    """Where a group's softmax runs beside its second product, the wait for that stands behind the softmax: the compiler
    of PTX would put it first, and compiles products one after the other if it cannot follow them."""
    import triton

    for made in compiled(PREFILLS):
        assert made["shared"] <= H200.shared_memory
        keys, dims = hopper_prefill.KEYS, made["dims"]
        sizes = {keys, dims, 8}  # 8: the sums of weights
        products = set(re.findall(r"wgmma\.mma_async\S+", made["ptx"]))
        assert products == {f"wgmma.mma_async.sync.aligned.m64n{size}k16.f32.bf16.bf16" for size in sizes}
        units = {4: 2, 5: 15}[made["group"]]
        pieces = dims // 64
        assert len(places(LOAD, made["ptx"])) == pieces * (units + 2)
        (tmp_path / "cubin").write_bytes(bytes.fromhex(made["cubin"]))
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", tmp_path / "cubin"]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        waits = re.split(r"(WARPGROUP\.DEPBAR\.LE gsb0, 0x[012])", sass)
        softmaxes = [code for wait, code in zip(waits[1::2], waits[2::2], strict=True) if not wait.endswith("0x0")]
        assert len(softmaxes) >= 4, "of two groups, with a mask and without"
        assert all(code.count("MUFU.EX2") >= keys // 2 for code in softmaxes)


@pytest.mark.usefixtures("fresh_configs")
def test_they_run_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_products, "GLUON", True)
    assert hopper_products.runs_on(H200, torch.bfloat16)
    assert not hopper_products.runs_on(H200, torch.float32)
    assert not hopper_products.runs_on(A100, torch.bfloat16)
    assert not hopper_products.runs_on(replace(H200, capability=(10, 0)), torch.bfloat16), "which has no wgmma"
    assert hopper_decode.streams(H200, torch.bfloat16, 4, 128, 64)
    for group, head_size, page_size in ((4, 128, 32), (4, 32, 64), (4, 256, 64), (40, 128, 64), (4, 100, 64)):
        assert not hopper_decode.streams(H200, torch.bfloat16, group, head_size, page_size)
    assert hopper_decode.streams(H200, torch.bfloat16, 4, 128, 64, 1)
    assert not hopper_decode.streams(H200, torch.float16, 4, 128, 64, 1), "values in fp8 become bfloat16"
    for group, tokens in ((1, 128), (2, 64), (3, 40), (4, 32), (5, 24), (6, 20), (8, 16), (15, 8), (16, 8), (64, 2)):
        assert hopper_prefill.tokens_of(group) == tokens
        assert hopper_prefill.runs(H200, torch.bfloat16, group, 128, 64)
    for group, head_size, page_size in ((4, 128, 32), (4, 32, 64), (4, 256, 64), (17, 128, 64), (4, 100, 64)):
        assert not hopper_prefill.runs(H200, torch.bfloat16, group, head_size, page_size)
    assert batch_invariant.config(1, 6144, 4096, torch.bfloat16, H200).tokens == 8
    assert batch_invariant.config(1, 6144, 4096, torch.bfloat16, A100).tokens == 16
    monkeypatch.setattr(hopper_products, "GLUON", False)
    assert not hopper_products.runs_on(H200, torch.bfloat16), "as with a Triton whose Gluon we do not know"
    batch_invariant.config.cache_clear()
    assert batch_invariant.config(1, 6144, 4096, torch.bfloat16, H200).tokens == 16


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (50257, 512)]
)
def test_tiles_of_many_tokens(outputs: int, inputs: int) -> None:
    """All fit, with stages enough, and no sum is cut; beyond ALL tokens only where all tiles run at once."""
    for tokens in range(65, hopper_products.MOST + 1):
        tile, rows, depth, warps, stages = hopper_products.tile_of(tokens, outputs, inputs, 2, H200)
        tiles = -(-tokens // tile) * -(-outputs // rows)
        programs = 1 if tiles <= H200.processors else 2
        assert stages > 2
        assert programs * (stages * (tile + rows) * depth * 2 + 2048) <= H200.shared_memory
        assert tile * rows <= 128 * 32 * warps, "sums fit into registers"
        few = tokens <= hopper_products.ALL
        assert hopper_products.takes(tokens, outputs, H200) == (few or programs == 1)


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (50257, 512), (2048, 8192), (3072, 2048)],
)
def test_tile_of(outputs: int, inputs: int) -> None:
    for tokens in range(1, 65):
        padded, rows, depth, _, stages = hopper_products.tile_of(tokens, outputs, inputs, 2, H200)
        programs = 1 if outputs <= rows * H200.processors else 2
        assert tokens <= padded <= max(2 * tokens, 8)
        assert stages > 1
        assert programs * (stages * (padded + rows) * depth * 2 + 2048) <= H200.shared_memory
        halved = (outputs, inputs) in ((4096, 4096), (2048, 8192), (3072, 2048))
        assert (rows < hopper_products.SIDE) == (HALVES and halved and tokens <= 32)
