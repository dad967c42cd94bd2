"""Kernels compiled for a chip that is not here: a fork of one process, without Triton's interpreter, runs their
launches, and scripts/tune/compile_kernels.py replaces each launch by a compilation."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
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


# Imports what takes seconds once, and forks for each line of stdin: [program, chip, folder for what it prints].
SERVER = f"""
import json, os, sys, traceback
sys.path.insert(0, {str(Path(__file__).parents[1] / "scripts" / "tune")!r})
import torch, triton, compile_kernels

for line in sys.stdin:
    program, chip, folder = json.loads(line)
    process = os.fork()
    if process == 0:
        for number, name in ((1, "out"), (2, "errors")):
            os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY), number)
        sys.argv, status = ["", chip], 0
        try:
            exec(program, {{}})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(server.kill)
    return server


def compiled(launches: str, chip: str = "H200") -> list[dict[str, Any]]:
    """Return the kernels that a program launches, each with `about`, a dictionary that the program may fill."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as folder:
        print(json.dumps([BEGIN + launches, chip, folder]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        said, errors = (Path(folder, name).read_text() for name in ("out", "errors"))
    assert status == 0, errors[-2000:]
    return [json.loads(line) for line in said.splitlines()]
