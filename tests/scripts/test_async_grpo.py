"""scripts/rl/async_grpo.py: which tokens are old and how they are corrected; and the program runs small."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.extend(str(SCRIPTS / folder) for folder in ("bench", "rl"))

import async_grpo  # noqa: E402
from rl_grpo import Rollout, Settings, answer_logprobs, clipped_loss  # noqa: E402

from fastgen import Generator  # noqa: E402
from fastgen.rl.policy import Policy  # noqa: E402


def test_only_answers_with_old_tokens_are_corrected() -> None:
    """An answer begins with weights of version 4, under which its tokens were half or 9 times as likely, and ends with
    the weights of version 5, which the trainer has, over the KV of version 4."""
    with Generator(dtype="float32", num_pages=8, max_seqs=1) as gen:
        _check_corrections(Policy(gen))


def _check_corrections(policy: Policy) -> None:
    sample = Rollout(list(range(100, 112)), 8, [], 0.5, [(4, 0, 2), (5, 2, 4)])
    now = answer_logprobs(policy, [sample]).detach().tolist()
    drawn = [now[0] - math.log(2), now[1] - math.log(9), now[2] + math.log(4), now[3]]
    sample = replace(sample, logprobs=drawn)
    fresh = replace(sample, weight_versions=[(5, 0, 4)])
    same, found = async_grpo.corrected(policy, [sample, fresh], 5)
    assert same is fresh
    assert found.logprobs == pytest.approx(now, abs=1e-6)
    assert found.advantages == pytest.approx([1.0, 1.0, 0.125, 0.5])  # times 2, 9, which is cut to 2, 1 / 4, and 1
    loss, ratios = clipped_loss(policy, [found], Settings())
    assert ratios.tolist() == [1, 1, 1, 1]
    assert loss.item() == pytest.approx(-2.625 / 4, abs=1e-3)
    with pytest.raises(RuntimeError, match="2 steps old"):
        async_grpo.corrected(policy, [sample], 6)


@pytest.mark.long
def test_the_program_runs_small_with_a_server_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "curve.json"
    report = async_grpo.main(["--smoke", "--out", str(out)])
    assert [point["most_lag"] for point in report["curve"][1:]] in ([0, 0], [0, 1])
    assert json.loads(out.read_text()) == report
