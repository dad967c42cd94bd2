"""scripts/rl/rl_agreement.py: the bundled model's logprobs are a trainer's, and a larger difference is an error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "rl"))

import rl_agreement
from rl_agreement import LIMIT, SAMPLING, Agreement


@pytest.mark.parametrize(("dtype", "most", "mean"), [("float32", LIMIT, 1e-5), ("bfloat16", 0.25, 0.01)])
def test_logprobs_agree_with_a_trainers(dtype: str, most: float, mean: float) -> None:
    found = list(rl_agreement.measure(None, dtype, "cpu", questions=4, n=2, max_tokens=10))
    compared = {"untruncated_logprobs", "logprobs", "score"}
    assert {(row.sampling, row.compared) for row in found} == {(name, key) for name in SAMPLING for key in compared}
    for row in found:
        assert row.tokens > 50
        assert row.p50 <= row.p99 <= row.max < most, row
        assert row.mean < mean, row
        assert abs(row.mean_ratio - 1) < 2 * mean, row


def test_a_large_difference_is_written_and_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Agreement.of(("float32", "temperature 1", "score"), [-1.0, -2.0], [-1.0, -2.0 + 2e-4])
    monkeypatch.setattr(rl_agreement, "RESULTS", tmp_path)
    monkeypatch.setattr(rl_agreement, "measure", lambda *_: iter([row]))
    monkeypatch.setattr(sys, "argv", ["rl_agreement.py", "--dtype", "float32", "--name", "here"])
    with pytest.raises(SystemExit, match=r"a float32 logprob is 2\.00e-04 from the trainer's; the limit is 0\.0001"):
        rl_agreement.main()
    (written,) = json.loads((tmp_path / "rl-agreement-here.json").read_text())["agreement"]
    assert (written["max"], written["mean"], written["tokens"]) == (2e-4, 1e-4, 2)
