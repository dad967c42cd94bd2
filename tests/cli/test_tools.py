"""fgchat, fggen and fgserve as processes: a model that can not be loaded is one line, and the exit status 1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastgen.model.loader import BUNDLED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("fgchat", ["fastgen.cli.chat", "model"]),
        ("fggen", ["fastgen.cli.gen.main", "model", "rows.jsonl", "-o", "out.jsonl"]),
        ("fgserve", ["fastgen.cli.serve.main", "model", "--port", "0"]),
    ],
)
def test_a_checkpoint_of_another_format_is_one_line(tool: str, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(BUNDLED / "config.json", tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello"}\n')
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *arguments]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    told = [line for line in ended.stderr.splitlines() if "listening at" not in line]
    assert ended.returncode == 1, ended.stderr
    assert len(told) == 1
    assert told[0].startswith(f"{tool}: error: model/model.safetensors is missing, and there is pytorch_model.bin")
    assert ended.stdout == ""
