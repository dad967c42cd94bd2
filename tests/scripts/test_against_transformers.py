"""scripts/check/against_transformers.py: it sees that models agree, and that a scale, rope or norm differs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import FAMILIES, Checkpoint, save_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "check"))

import against_transformers

OPTIONS = ["--device", "cpu", "--tokens", "12", "--length", "90"]


@pytest.mark.parametrize(("family", "dtype"), [("exaone4", "float32"), ("exaone4", "bfloat16"), ("arcee", "float32")])
def test_a_model_agrees(
    family: str, dtype: str, checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (name, config) = tmp_path / "model", FAMILIES[family]
    shutil.copytree(checkpoint(name, **config), folder)
    save_tokenizer(folder)
    assert against_transformers.main([str(folder), *OPTIONS, "--dtype", dtype]) == 0
    printed = capsys.readouterr().out
    assert f"verdict: AGREE in {dtype}" in printed
    assert re.search(rf"^\| model \| CPU, {dtype} \| \d+ of 48, greedy \| \d\.\de-\d\d \| \|$", printed, re.MULTILINE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("granite", {"attention_multiplier": 0.25}),
        ("granite", {"residual_multiplier": 0.36}),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}),
        ("mistral", {"sliding_window": 40}),
    ],
)
def test_another_model_differs(
    family: str, change: dict[str, Any], dtype: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    name, config = FAMILIES[family]
    folder, other = checkpoint(name, **config), tmp_path / "other"
    shutil.copytree(folder, other)
    settings = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, **change}))
    _, answers = against_transformers.answer(str(folder), {"device": "cpu", "dtype": dtype}, 12, 90)
    model = against_transformers.reference(other, "cpu", dtype)
    agree, text = against_transformers.verdict(against_transformers.compare(model, answers), dtype)
    assert not agree
    assert f"verdict: DIFFER in {dtype}" in text
