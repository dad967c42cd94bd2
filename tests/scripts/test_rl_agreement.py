"""scripts/rl/rl_agreement.py: the bundled model's logprobs are a trainer's, and another distribution is noticed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "rl"))

import rl_agreement
from rl_agreement import LIMIT, SAMPLING, Agreement, Trainer

from fastgen import Generator

COMPARED = {"untruncated_logprobs", "logprobs", "score"}
BFLOAT16 = 0.25  # seldom, a token that was all but impossible


@pytest.mark.parametrize(("dtype", "most", "mean"), [("float32", LIMIT, 1e-5), ("bfloat16", BFLOAT16, 0.01)])
def test_logprobs_agree_with_a_trainers(dtype: str, most: float, mean: float) -> None:
    found = list(rl_agreement.measure(None, dtype, "cpu", questions=4, n=2, max_tokens=10))
    assert {(row.sampling, row.compared) for row in found} == {(name, key) for name in SAMPLING for key in COMPARED}
    for row in found:
        assert row.dtype == dtype
        assert row.tokens > 50
        assert row.p50 <= row.p99 <= row.max < most, row
        assert row.mean < mean, row
        assert abs(row.mean_ratio - 1) < 2 * mean, row


def test_logprobs_of_another_distribution_do_not_agree() -> None:
    """A trainer that leaves out the temperature, or the truncation."""
    (name,) = (name for name in SAMPLING if "top_p" in name)
    params = SAMPLING[name]
    with Generator() as gen:
        trainer = Trainer(gen.folder, "float32", "cpu")
        (output,) = gen.generate("the sea", replace(params, max_tokens=30, seed=0))
        completion, start = output.completions[0], len(output.prompt_token_ids)
    logits = trainer.logits(output.prompt_token_ids + completion.token_ids, start)
    for temperature, ours in ((1.0, completion.untruncated_logprobs), (params.temperature, completion.logprobs)):
        logprobs = (logits / temperature).log_softmax(1)
        its = logprobs[range(len(logprobs)), completion.token_ids].tolist()
        assert Agreement.of(("float32", name, "wrong"), its, ours).max > 100 * LIMIT


def test_the_script_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Agreement.of(("float32", "temperature 1", "score"), [-1.0, -2.0], [-1.0, -2.0 + 2e-4])
    monkeypatch.setattr(rl_agreement, "RESULTS", tmp_path)
    monkeypatch.setattr(rl_agreement, "measure", lambda *_: iter([row]))
    monkeypatch.setattr(sys, "argv", ["rl_agreement.py", "--dtype", "float32", "--name", "here"])
    with pytest.raises(SystemExit, match=r"a float32 logprob is 2\.00e-04 from the trainer's; the limit is 0\.0001"):
        rl_agreement.main()
    assert "max 2.00e-04" in capsys.readouterr().out
    (written,) = json.loads((tmp_path / "rl-agreement-here.json").read_text())["agreement"]
    assert (written["max"], written["mean"], written["tokens"]) == (2e-4, 1e-4, 2)
