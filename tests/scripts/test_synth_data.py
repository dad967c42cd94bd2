"""scripts/data/synth_data.py runs, and what it has done is not done again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "data"))

import synth_data


def test_synthetic_data_goes_on_and_is_filtered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = synth_data.main([str(tmp_path), "--smoke"])
    assert (found["topics"], found["answers"]) == (4, 16)
    data = tmp_path / "data.jsonl"
    whole = data.read_bytes()
    samples = [json.loads(line) for line in whole.splitlines()]
    assert [sample["kept"] for sample in samples] == [sample["score"] > synth_data.BOUND for sample in samples]
    assert found["kept"] == sum(found["lengths_of_kept"].values()) == sum(sample["kept"] for sample in samples) > 0
    assert json.loads((tmp_path / "report.json").read_text())["kept"] == found["kept"]
    data.unlink()
    (tmp_path / "report.json").unlink()
    assert synth_data.main([str(tmp_path), "--smoke"]) == found
    assert data.read_bytes() == whole
    assert "nothing is left to do of 8 rows" in capsys.readouterr().err
