"""Kernels for Hopper in Gluon: what they are compiled to. Other tests run them: test_kernels_decode.py and
test_kernels_prefill.py with a stand-in for Gluon, and on a GPU test_kernels_batch_invariant.py and tests/gpu."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiling import compiled
from control_flow import BARRIER, ControlFlow, instructions
from test_kernels_batch_invariant import A100, H200

from fastgen.device.chip import power_of_two
from fastgen.kernels import launch
from fastgen.kernels.hopper import decode as hopper_decode
from fastgen.kernels.hopper import prefill as hopper_prefill
from fastgen.kernels.hopper import products as hopper_products
from fastgen.kernels.hopper.gluon import ANY_BOXES, HALVES
from fastgen.kernels.launch import KNOWN
from fastgen.kernels.triton import batch_invariant

PRODUCTS = """
from dataclasses import asdict
from fastgen.kernels.batch_invariant import Fused, RopeWrite, product
from fastgen.kernels.triton.batch_invariant import config
from fastgen.kernels.rope import SlotMapping

for tokens, outputs, inputs, half, what in [
    (1, 4096, 4096, 0, "add"), (1, 4096, 14336, 0, "add"), (1, 28672, 4096, 0, "swiglu"),
    (17, 6144, 4096, 64, "rope"), (64, 28672, 4096, 0, "swiglu"), (1, 1152, 4096, 24, "rope"),
    (1, 2048, 8192, 0, "add"), (33, 4096, 4096, 0, "add"), (17, 32768, 4096, 0, "logits"),
    (9, 12288, 4096, 16, "rope"), (1, 1024, 512, 8, "rope"), (1, 1024, 512, 0, "swiglu"),
    (1, 16384, 2048, 0, "swiglu"), (1, 2048, 2048, 0, "add"), (128, 28672, 4096, 0, "swiglu"),
    (128, 4096, 14336, 0, "add"), (256, 4096, 14336, 0, "add"), (96, 32768, 4096, 0, "logits"),
    (8, 24576, 4096, 0, "swiglu"), (8, 20480, 4096, 0, "swiglu"),
]:
    found = config(tokens, outputs, inputs, torch.bfloat16, chip)
    pieces = 1 if found.rows >= 64 else found.depth // 64
    if found.rows & (found.rows - 1):  # a box has the largest power of two of rows that divides the tile's
        pieces = found.depth // 64 * (found.rows // (found.rows & -found.rows))
    about |= {"pieces": pieces, "outputs": outputs, "inputs": inputs}
    about |= {"steps": -(-inputs // found.depth), **asdict(found)}
    fused = Fused(
        add=zeros(tokens, outputs) if what == "add" else None, swiglu=what == "swiglu",
        out_dtype=torch.float32 if what == "logits" else None,
    )
    if what == "rope":
        places, turns = zeros(tokens, dtype=torch.int64), zeros(9, half, dtype=torch.float32)
        mapping = SlotMapping(places, places, turns, turns, tokens, 8, 64)
        fused = Fused(rope=RopeWrite(mapping, *zeros(2, 2, 8, 64, 2 * half)))
    product.launch(zeros(tokens, inputs), zeros(outputs, inputs), zeros(outputs), fused)
"""
ATTENTION = """
from fastgen.device.chip import power_of_two
from fastgen.kernels.hopper import decode as hopper_decode
from fastgen.kernels.hopper import prefill as hopper_prefill
from fastgen.kernels import work_tiles
from fastgen.kernels.attention import PartialResults
from fastgen.model.kv_pool import KVPool

cpu, tiles = torch.device("cpu"), zeros(work_tiles.HEADER + 4 * work_tiles.FIELDS, dtype=torch.int32)
table = zeros(4, 2, dtype=torch.int32)

def tensors(group, head_size, fp8=False):
    q, pool = zeros(4, 8 * group, head_size), KVPool(1, 4, 8, 64, head_size, torch.bfloat16, cpu, fp8)
    return q, torch.empty_like(q), pool.keys, pool.values, table, tiles

"""
DECODES = """
for group, head_size, window, fp8, most in [
    (4, 128, 0, False, 4), (4, 128, 0, False, 40), (1, 96, 100, False, 40), (5, 64, 0, False, 40),
    (16, 128, 0, False, 40), (4, 128, 0, True, 4), (1, 96, 100, True, 40), (32, 64, 0, True, 40),
]:
    dims, partial = power_of_two(head_size), PartialResults.empty(4, 8 * group, 8, head_size, cpu)
    programs = 1 if most == 4 else hopper_decode.PROGRAMS
    stages = hopper_decode.stages_of(group, dims, 1 if fp8 else 2, chip, programs)
    about |= {"programs": programs, "rows": hopper_decode.rows_of(group), "dims": dims, "stages": stages}
    about["fp8"] = fp8
    memory = partial.parts, partial.peaks, partial.totals, partial.arrivals
    hopper_decode.launch(*tensors(group, head_size, fp8), most, True, True, window > 0, memory, 0, window, 0.1)
"""
PREFILLS = """
for group, head_size, window in [(4, 128, 0), (5, 96, 100)]:
    about |= {"group": group, "dims": power_of_two(head_size)}
    hopper_prefill.launch(*tensors(group, head_size), 4, 0, window, 0.1)
"""
LOAD, WAIT, START = r"cp\.async\.bulk\.tensor\.\dd\.shared", "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def check_hand_over(ptx: str, early_end: bool = False) -> ControlFlow:
    """Check that data for other groups of warps (their tasks, and values that they take over) is in shared memory
    between two barriers of all threads. racecheck does not know these barriers, and reports races.

    early_end: whether programs without a task end before other warps begin one.
    """
    flow = ControlFlow(ptx)
    stores = rf"((?:\s*st\.shared\S*\s+\[global_smem\+\d+\], [^\n]*\n)+)\s*{BARRIER}"
    written = flow.matching(stores)
    assert written <= flow.first
    [tasks] = [label for label in written if flow.reached(label) & written > {label}]
    ends = written - {tasks}
    assert "ret;" not in flow.text(flow.reached(flow.ENTRY, [flow.dispatch, *ends])), "other warps learn of each end"
    assert ("ret;" in flow.text(flow.reached(flow.ENTRY, [flow.dispatch, tasks]))) == early_end
    taken = flow.taken_over()
    names = {re.sub(r"@\S+\s+", "", each).split()[0] for each in instructions(taken)}
    assert all(re.match(r"setmaxnreg|ld\.shared|mov|add|setp|bra|brx|ret", name) for name in names), names
    assert any(name.startswith("setmaxnreg") for name in names), "a task begins with it"
    # After the second barrier the first group may use this memory for something else.
    values = re.findall(r"global_smem\+\d+", "".join(re.findall(stores, flow.code[tasks])))
    loads = [rf"ld\.shared[^\n]*\[{re.escape(value)}\]" for value in values]
    assert all(len(places(each, flow.text(flow.others))) == len(places(each, taken)) for each in loads), "read in time"
    return flow


def places(pattern: str, text: str) -> list[int]:
    return [each.start() for each in re.finditer(pattern, text)]


@pytest.mark.long
@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_the_weight_is_loaded_before_the_kernel_ahead_has_ended() -> None:
    several = compiled(PRODUCTS)
    starts = {}  # when the next kernel may start, by outputs and inputs
    assert {each["rows"] for each in several} == {64, 128, *[32] * HALVES, *[160, 192, 224] * ANY_BOXES}
    assert {each["tokens"] for each in several} == {8, 16, 32, 64, 128}
    for made in several:
        flow = check_hand_over(made["ptx"])
        ptx, stages = made["ptx"], made["stages"]
        multiplying, loading = flow.text(flow.first), flow.text(flow.others)
        programs = 1 if made["token_tiles"] * made["outputs"] <= 132 * made["rows"] else 2
        assert made["shared"] <= (H200.shared_memory + 1024) // programs - 1024
        loads = places(LOAD, loading)
        [wait], [wait_to_load] = places(WAIT, multiplying), places(WAIT, loading)
        assert not places(LOAD, multiplying)
        a_stage = made["pieces"] * max(made["depth"] // made["pieces"] // 64, 1)  # instructions with 64 columns each
        first = min(stages, made["steps"])
        assert len(places(LOAD, loading[:wait_to_load])) == first * a_stage, "the weight's first ones"
        x_too = a_stage + max(made["depth"] // 64, 1)
        loops = {first + (made["steps"] > stages), made["steps"]}  # a short loop may be unrolled
        assert len(loads) in {each * x_too for each in loops}, "each stage's first ones, and the loop's"
        assert all(wait < each for each in places("ld.global", multiplying))
        assert "ld.global" not in loading
        assert ptx.count(START) == 1
        start = loading.find(START)
        starts[made["outputs"], made["inputs"]] = (
            "early" if start > wait_to_load else "at once" if start > loads[0] else "late"
        )
        products = set(re.findall(r"wgmma\.mma_async\S+", ptx))
        assert products == {f"wgmma.mma_async.sync.aligned.m64n{made['tokens']}k16.f32.bf16.bf16"}, (
            "as batch_invariant's"
        )
        assert "fma.rn.f32" not in ptx
    assert starts[28672, 4096] == "late", "most processors are occupied, unevenly"
    assert starts[6144, 4096] == "early", "many processors are free"
    assert starts[16384, 2048] == "early", "all processors have two programs"
    assert starts[4096, 14336] == "early", "several tiles of tokens have one program per processor"
    for small in ((1024, 512), (2048, 2048)):
        assert starts[small] == ("at once" if HALVES else "early"), "nearly the whole weight of halved tiles is loaded"
    assert starts[2048, 8192] == "early", "most of the weight is not"


@pytest.mark.long
@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_decodes_are_compiled() -> None:
    for made in compiled(ATTENTION + DECODES):
        flow = check_hand_over(made["ptx"], early_end=True)
        assert made["shared"] <= (H200.shared_memory + 1024) // made["programs"] - 1024
        assert made["stages"] > (2 if made["programs"] > 1 else 5)
        # The four warps wait twice: in a step with prefills, and before the first query. The warp that loads keys waits
        # in a branch for a block with a new key, and loads other blocks without it.
        attending = flow.text(flow.first)
        loads, waits = places(LOAD, attending), places(WAIT, attending)
        assert len(waits) == 2
        assert len(loads) == len([each for each in loads if each > waits[1]]) == 2, "of the first and the next queries"
        [wait] = flow.matching(WAIT) & flow.others
        assert len(places(WAIT, flow.code[wait])) == 1
        assert not places(LOAD, flow.code[wait])
        at_once = flow.text(flow.reached(flow.dispatch, [wait]))
        assert len(places(LOAD, at_once)) == len(places(LOAD, flow.text(flow.others))), "each can run without the wait"
        products = set(re.findall(r"wgmma\.mma_async\S+k16\.(\S+)", made["ptx"]))
        assert products == {"f32.bf16.bf16", *["f32.f16.f16"] * made["fp8"]}
        assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)", made["ptx"])) == {f"m64n{made['rows']}"}
        if made["fp8"]:  # 4 bytes per thread at a time
            each = hopper_decode.KEYS * made["dims"] // (32 * hopper_products.WARPS) // 4
            assert len(places(r"ldmatrix\S+x4\.shared", made["ptx"])) == each // 4, "keys"
            assert len(places(r"ldmatrix\S+x4\.trans", made["ptx"])) == each // 4, "values"
            assert len(places(r"cvt\.rn\.f16x2\.e4m3x2", made["ptx"])) == 2 * each
            assert "cvt.f32.f16" not in made["ptx"]


@pytest.mark.long
@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_prefills_are_compiled(tmp_path: Path) -> None:
    """A group's softmax overlaps with its second product if the wait for that product comes after the softmax. ptxas
    would put the wait first, and serializes products that it does not understand."""
    import triton

    for made in compiled(ATTENTION + PREFILLS):
        check_hand_over(made["ptx"])
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
def test_they_run_only_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GLUON", True)
    assert launch.gluon_runs_on(H200, torch.bfloat16)
    assert not launch.gluon_runs_on(H200, torch.float32)
    assert not launch.gluon_runs_on(A100, torch.bfloat16)
    assert not launch.gluon_runs_on(replace(H200, capability=(10, 0)), torch.bfloat16), "which has no wgmma"
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
    monkeypatch.setattr(launch, "GLUON", False)
    assert not launch.gluon_runs_on(H200, torch.bfloat16), "as with an unknown Triton"
    batch_invariant.config.cache_clear()
    assert batch_invariant.config(1, 6144, 4096, torch.bfloat16, H200).tokens == 16


@pytest.mark.parametrize("item_size", [1, 2])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        (4096, 4096), (6144, 4096), (28672, 4096), (24576, 4096), (20480, 4096), (4096, 14336), (50257, 512),
        (2048, 8192), (3072, 2048),
    ],
)  # fmt: skip
def test_tiles_fit_the_chip(outputs: int, inputs: int, item_size: int) -> None:
    """Beyond ALL tokens these products are used only if all tiles run at the same time."""
    for tokens in range(1, hopper_products.MAX_TOKENS + 1):
        tile, rows, depth, warps, stages = hopper_products.tile_of(tokens, outputs, inputs, item_size, H200)
        programs = 1 if -(-tokens // tile) * -(-outputs // rows) <= H200.processors else 2
        few = tokens <= hopper_products.ALL[item_size]
        at_once = -(-tokens // tile) * -(-outputs // rows) <= (3 - item_size) * H200.processors
        assert hopper_products.takes(tokens, outputs, item_size, H200) == (few or at_once)
        side = max(power_of_two(rows), hopper_products.SIDE)
        memory = stages * (tile + rows) * depth * item_size + (side - rows) * hopper_products.PIECE
        assert programs * (memory + 2048) <= H200.shared_memory
        assert tile * side <= 64 * item_size * 32 * warps, "sums fit into registers"
        assert stages > 1 + (tokens > 64)
        if tokens <= 64:
            assert tokens <= tile <= max(2 * tokens, 8)
            halved = (outputs, inputs) in ((4096, 4096), (2048, 8192), (3072, 2048))
            quarter = 4 * -(-outputs // hopper_products.SIDE) <= H200.processors
            wanted = HALVES and tokens <= 32 and (halved if item_size == 2 else quarter)
            assert (rows < hopper_products.SIDE) == wanted
