"""fggen as processes that tests can kill. This program imports the slow modules once and forks for each line of stdin.

A line is JSON: [arguments of fggen, file for its stderr]. The program prints the id of the new process and, when it has
ended, its status.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import fastgen.generator  # noqa: F401
from fastgen.cli.gen import outputs
from fastgen.cli.gen.main import main
from fastgen.model.loader import resolve
from fastgen.text.tokenizer import Tokenizer

PART_SECONDS = 0.05


def serve() -> None:
    torch.set_num_threads(1)
    Tokenizer(resolve(None))  # imports further modules
    outputs.PART_SECONDS = PART_SECONDS
    for line in sys.stdin:
        arguments, errors = json.loads(line)
        process = os.fork()
        if process == 0:
            with Path(errors).open("w") as file:
                os.dup2(file.fileno(), 2)
            os._exit(main(arguments))
        print("process", process, flush=True)
        print("status", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
