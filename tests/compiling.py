"""Kernels compiled for a chip that is not here: a new process, without Triton's interpreter, runs their launches, and
scripts/tune/compile_kernels.py replaces each launch by a compilation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BEGIN = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "scripts" / "tune")!r})
import torch, triton
from compile_kernels import CHIPS, Compiled

def show(self, name, kernel):
    made = {{name: kernel.asm[name] for name in ("ptx", "ttgir")}}
    module = ".".join(name.split(".")[-3:-1])
    made |= {{"cubin": kernel.asm["cubin"].hex(), "shared": kernel.metadata.shared, "kernel": module}}
    print(json.dumps(made | about))

Compiled.add = show
chip = CHIPS[sys.argv[1]]
compiled, about = Compiled(chip), {{}}

from fastgen.device.chip import Chip
Chip.of = staticmethod(lambda device: chip)

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)

"""


def compiled(launches: str, chip: str = "H200") -> list[dict[str, Any]]:
    """Return the kernels that a program launches, each with `about`, a dictionary that the program may fill."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", BEGIN + launches, chip]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]
