"""Products for Hopper, which no interpreter knows: what they are compiled to. On a GPU they are seen in
test_kernels_fixed.py and in gpu/test_gpu_deterministic.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_kernels_product import A100, H200

from fastgen.kernels import fixed, hopper
from fastgen.kernels.launch import KNOWN

COMPILE = """
import json
import torch, triton  # before fastgen, which without a GPU does without it
from dataclasses import asdict
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from fastgen.kernels import fixed, hopper
from fastgen.kernels.launch import Chip

H200, kernel = Chip((9, 0), 132, 232_448), hopper._product_kernel
assert [each.name for each in kernel.params if each.do_not_specialize] == ["T"]  # or it would compile after the start
for tokens, outputs, half, heads, what in [
    (1, 4096, 0, 1, "add"), (1, 28672, 14336, 1, "swiglu"), (17, 6144, 64, 1, "rope"), (64, 28672, 14336, 1, "swiglu"),
    (1, 1152, 24, 1, "rope"), (33, 4096, 0, 1, "add"), (17, 32768, 0, 1, "logits"), (1, 12288, 16, 2, "rope"),
]:
    found = fixed.config(tokens, outputs, torch.bfloat16, H200)
    blocks = [found.tokens, found.depth], [found.rows, found.depth]
    if half:
        blocks = blocks[0], [heads, 2, found.rows // 2 // heads, found.depth]
    types = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    types |= {"out_ptr": "*fp32"} if what == "logits" else {}
    aligned = [place for place, name in enumerate(kernel.arg_names) if name in types or name == "N"]
    for name, block in zip(("x_desc", "weight_desc"), blocks):
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        types[name] = f"tensordesc<bf16{block},{layout!r}>"
    constants = {
        "K": 4096, "HALF": half, "KV": 8 * (what == "rope"), "P": 64, "ADD": what == "add", "TOKENS": found.tokens,
        "ROWS": found.rows, "HEADS": heads, "DEPTH": found.depth, "STAGES": found.stages,
    }
    types = {name: types.get(name, "i32" if name in "TN" else "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, types, places, {(place,): [["tt.divisibility", 16]] for place in aligned})
    options = {"num_warps": found.warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(json.dumps({**asdict(found), "shared": made.metadata.shared, "ptx": made.asm["ptx"]}))
"""


@pytest.mark.skipif(not KNOWN, reason="needs the Triton whose Gluon we know")
def test_the_weight_is_loaded_before_the_kernel_ahead_has_ended() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-2000:]
    several = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {each["depth"] for each in several} == {64, 128, hopper.DEPTH}
    for made in several:
        ptx, stages = made["ptx"], made["stages"]
        assert made["swap"]
        programs = 1 if made["depth"] == hopper.DEPTH else 2
        assert made["shared"] <= (H200.shared_memory - 1024) // programs
        loads = [each.start() for each in re.finditer(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)]
        wait, start = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
        assert len(loads) == 2 * stages + 2, "of weight and x: each stage's first ones, and those of the loop"
        assert loads[stages - 1] < wait < loads[stages], "the weight's first ones"
        assert ptx.index("ld.global") > wait if "ld.global" in ptx else True
        assert start > loads[-1]
        products = set(re.findall(r"wgmma\.mma_async\S+", ptx))
        assert products == {f"wgmma.mma_async.sync.aligned.m64n{made['tokens']}k16.f32.bf16.bf16"}, "fixed's"
        assert "fma.rn.f32" not in ptx


def test_it_runs_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "GLUON", True)
    assert hopper.runs_on(H200, torch.bfloat16)
    assert not hopper.runs_on(H200, torch.float32)
    assert not hopper.runs_on(A100, torch.bfloat16)
    assert not hopper.runs_on(replace(H200, capability=(10, 0)), torch.bfloat16), "which has no wgmma"
    fixed.config.cache_clear()
    assert fixed.config(1, 6144, torch.bfloat16, H200).depth == hopper.DEPTH
    assert fixed.config(1, 6144, torch.bfloat16, A100).depth == fixed.NARROW[1]
    monkeypatch.setattr(hopper, "GLUON", False)
    assert not hopper.runs_on(H200, torch.bfloat16), "as with another Triton, whose Gluon we do not know"
    fixed.config.cache_clear()
    assert fixed.config(1, 6144, torch.bfloat16, H200).depth == fixed.NARROW[1]
    fixed.config.cache_clear()
