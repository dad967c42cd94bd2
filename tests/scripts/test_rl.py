"""scripts/rl: what rl_grpo.py rewards and how it learns; and rl_agreement.py notices logprobs unlike a trainer's."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.extend(str(SCRIPTS / folder) for folder in ("bench", "rl", "tiny"))

import plot_rl  # noqa: E402
import policy_step  # noqa: E402
import rl_agreement  # noqa: E402
import rl_grpo  # noqa: E402
import tiny_skills  # noqa: E402
import tiny_task  # noqa: E402

from fastgen import Completion, Generator, RequestOutput, SamplingParams  # noqa: E402
from fastgen.rl.policy import Policy  # noqa: E402


@pytest.fixture
def gen() -> Iterator[Generator]:
    with Generator(dtype="float32", seed=0, num_pages=32) as gen:
        yield gen


def test_held_out_problems_are_of_the_kind_trained_on_and_none_of_them() -> None:
    to_train, held_out = rl_grpo.problems(rl_grpo.Settings())
    assert (len(held_out), len(to_train)) == (400, 1955)
    assert all(tiny_task.is_held_out(tiny_skills.fact_key("*", *problem)) for problem in to_train + held_out)
    assert not {frozenset(problem) for problem in to_train} & {frozenset(problem) for problem in held_out}


@pytest.mark.parametrize(
    ("text", "right"),
    [("12 * 34 = 408.", 1), ("12 * 4 = 48, 360 + 48 = 408.", 1), ("408 = 12 * 34", 0), ("1408", 0), ("", 0)],
)
def test_the_reward_is_for_the_exact_product_at_the_end(text: str, right: float) -> None:
    assert rl_grpo.reward((12, 34), text) == right


def test_advantages_are_of_a_group_and_groups_without_a_difference_are_left_out() -> None:
    outputs = [
        RequestOutput(0, [1, 2, 3], [Completion(k, [10] * k, "", "stop", logprobs=[-0.1] * k) for k in lengths])
        for lengths in ((1, 2, 3, 4), (2, 2, 2, 2))
    ]
    samples = rl_grpo.rollouts(outputs, torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    assert [sample.advantage for sample in samples] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert samples[1] == rl_grpo.Rollout([1, 2, 3, 10, 10], 3, [-0.1, -0.1], samples[1].advantage)


def test_the_loss_is_the_mean_over_each_token_by_itself(gen: Generator) -> None:
    """Computed again for one sample at a time, with ratios inside and outside the clip range."""
    batch, expected, tokens = [], 0.0, 0
    for prompt, length, shift, advantage in ((9, 4, 0.0, 1.0), (5, 6, 0.5, 1.0), (7, 1, -0.5, 1.0), (7, 3, 0.5, -2.0),
                                             (6, 5, -0.5, -2.0)):  # fmt: skip
        ids = random.Random(length).choices(range(10, 4000), k=prompt + length)
        (own,) = gen.score([ids], start=prompt)
        batch.append(rl_grpo.Rollout(ids, prompt, [p - shift for p in own], advantage))
        ratio = 2.718281828**shift
        expected -= length * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        tokens += length
    loss, ratios = rl_grpo.clipped_loss(Policy(gen), batch, rl_grpo.Settings())
    assert loss.item() == pytest.approx(expected / tokens, rel=1e-4)
    shifts = [0.0] * 4 + [0.5] * 6 + [-0.5] + [0.5] * 3 + [-0.5] * 5
    assert ratios.log().tolist() == pytest.approx(shifts, abs=1e-4)


def test_a_step_makes_what_was_better_likelier_in_the_generator_too(gen: Generator) -> None:
    policy, settings = Policy(gen), rl_grpo.Settings(batch=4)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, weight_decay=0.0)
    chats = [rl_grpo.chat(problem) for problem in ((12, 34), (56, 78))]
    outputs = gen.generate(chats, SamplingParams(n=4, max_tokens=16, seed=3))
    samples = rl_grpo.rollouts(outputs, torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]))
    found = rl_grpo.learn(policy, optimizer, list(samples), settings, random.Random(0))
    assert found["first_ratio_error"] == 0
    assert found["mean_ratio"] != 1  # of the second batch, after the first optimizer step
    policy.commit()
    scores = gen.score([sample.ids for sample in samples], start=[sample.prompt_len for sample in samples])
    gain = sum(s.advantage * (sum(new) - sum(s.logprobs)) for s, new in zip(samples, scores, strict=True))
    assert gain > 0


def test_the_program_runs_small(tmp_path: Path) -> None:
    report = rl_grpo.main(["--smoke", "--out", str(tmp_path / "curve.json")])
    assert ["held_out_accuracy" in point for point in report["curve"]] == [True, False, True]
    assert report["first_ratio_error"] == 0
    assert json.loads((tmp_path / "curve.json").read_text()) == report
    assert report.keys() == json.loads((SCRIPTS / "results" / "rl-grpo-cpu.json").read_text()).keys()


def test_the_plot_of_a_result_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, which fastgen does not")
    plot_rl.plot(json.loads((SCRIPTS / "results" / "rl-grpo-cpu.json").read_text()), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_is_measured_beside_transformers() -> None:
    (report,) = policy_step.main(["--smoke", "--device", "cpu"])
    assert report["policy"]["equal"]
    assert report["policy_groups"]["equal"]
    assert sum(report["transformers"]["ratios"]) == 4 * 16
    assert report["gradient_errors"]["policy"] < 1e-4
    keys = json.loads((SCRIPTS / "results" / "cpu-policy.json").read_text())[0].keys()
    assert report.keys() - {"gradient_errors"} == keys


@pytest.mark.parametrize(("dtype", "most", "mean"), [("float32", rl_agreement.LIMIT, 1e-5), ("bfloat16", 0.25, 0.01)])
def test_logprobs_agree_with_a_trainers(dtype: str, most: float, mean: float) -> None:
    found = list(rl_agreement.measure(None, dtype, "cpu", questions=4, n=2, max_tokens=10))
    assert len(found) == 3 * len(rl_agreement.SAMPLING)
    for row in found:
        assert row.tokens > 50
        assert row.p50 <= row.p99 <= row.max < most, row
        assert row.mean < mean, row


def test_a_large_difference_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    row = rl_agreement.Agreement.of(("float32", "temperature 1", "score"), [-1.0, -2.0], [-1.0, -2.0 + 2e-4])
    assert (row.max, row.mean, row.tokens) == (2e-4, 1e-4, 2)
    monkeypatch.setattr(rl_agreement, "measure", lambda *_: iter([row]))
    monkeypatch.setattr(sys, "argv", ["rl_agreement.py", "--dtype", "float32"])
    with pytest.raises(SystemExit, match=r"a float32 logprob is 2\.00e-04 from the trainer's; the limit is 0\.0001"):
        rl_agreement.main()
