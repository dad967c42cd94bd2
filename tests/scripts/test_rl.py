"""scripts/rl/rl_grpo.py: what it asks, what it rewards, how it learns; and what it wrote."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.extend(str(SCRIPTS / folder) for folder in ("bench", "rl", "tiny"))

import plot  # noqa: E402
import rl_grpo  # noqa: E402
import tiny_skills  # noqa: E402
import tiny_task  # noqa: E402

from fastgen import Completion, Generator, RequestOutput, SamplingParams  # noqa: E402

PROBLEMS = [(12, 34), (56, 78)]
REPORTS = sorted((SCRIPTS / "results").glob("rl-grpo-*.json"))


@pytest.fixture
def gen() -> Iterator[Generator]:
    with Generator(seed=0, num_pages=32) as gen:
        yield gen


def answered(lengths: list[list[int]]) -> list[RequestOutput]:
    """Outputs with samples of these lengths, whose tokens count up from 10 and whose logprobs down from 0."""
    said = [[list(range(10, 10 + length)) for length in group] for group in lengths]
    return [
        RequestOutput(
            number,
            [1, 2, 3],
            [
                Completion(k, ids, "", "stop", logprobs=[-0.1 * i for i in range(len(ids))])
                for k, ids in enumerate(group)
            ],
        )
        for number, group in enumerate(said)
    ]


def test_held_out_problems_are_of_the_kind_trained_on_and_none_of_them() -> None:
    to_train, held_out = rl_grpo.problems(rl_grpo.Settings())
    assert (len(held_out), len(to_train)) == (400, 1955)
    assert rl_grpo.problems(rl_grpo.Settings()) == (to_train, held_out)
    assert all(tiny_task.is_held_out(tiny_skills.fact_key("*", *problem)) for problem in to_train + held_out)
    trained = {frozenset(problem) for problem in to_train}
    assert not trained & {frozenset(problem) for problem in held_out}
    for side in (to_train, held_out):
        assert all(11 <= factor <= 99 and factor % 10 for problem in side for factor in problem)
        assert 0.3 < sum(a < b for a, b in side) / len(side) < 0.7


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("12 * 34 = 408.", 1.0),
        ("408", 1.0),
        ("Step by step: 12 * 30 = 360, 12 * 4 = 48, 360 + 48 = 408.", 1.0),
        ("12 * 34 = 407.", 0.0),
        ("408 = 12 * 34", 0.0),
        ("1408", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_for_the_exact_product_at_the_end(text: str, right: float) -> None:
    assert rl_grpo.reward((12, 34), text) == right


def test_advantages_are_of_a_group_and_groups_without_a_difference_are_left_out() -> None:
    outputs = answered([[1, 2, 3, 4], [2, 2, 2, 2], [5, 5, 5, 5]])
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    samples = rl_grpo.rollouts(outputs, rewards)
    assert [len(sample.ids) - sample.prompt_len for sample in samples] == [1, 2, 3, 4]
    assert [sample.advantage for sample in samples] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert samples[1] == rl_grpo.Rollout([1, 2, 3, 10, 11], 3, [0.0, -0.1], samples[1].advantage)


def test_the_loss_is_that_of_each_token_alone(gen: Generator) -> None:
    """Written down again for one unpadded sample at a time, with ratios inside and outside the clip range."""
    model: Any = AutoModelForCausalLM.from_pretrained(gen.folder, dtype=torch.float32)
    settings = rl_grpo.Settings()
    batch, expected = [], 0.0
    for prompt, length, shift, advantage in ((9, 4, 0.0, 1.0), (5, 6, 0.5, 1.0), (7, 1, -0.5, 1.0), (7, 3, 0.5, -2.0),
                                             (6, 5, -0.5, -2.0)):  # fmt: skip
        ids = random.Random(length).choices(range(10, 4000), k=prompt + length)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = [logprobs[at - 1, ids[at]].item() for at in range(prompt, len(ids))]
        batch.append(rl_grpo.Rollout(ids, prompt, [p - shift for p in own], advantage))
        ratio = 2.718281828**shift
        expected -= length * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    loss, log_ratios = rl_grpo.clipped_loss(model, batch, settings)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    shifts = [0.0] * 4 + [0.5] * 6 + [-0.5] + [0.5] * 3 + [-0.5] * 5
    assert log_ratios.tolist() == pytest.approx(shifts, abs=1e-4)


def test_a_step_makes_what_was_better_likelier_in_the_generator_too(gen: Generator) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(gen.folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    outputs = gen.generate([rl_grpo.chat(p) for p in PROBLEMS], SamplingParams(n=4, max_tokens=16, seed=3))
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    samples = rl_grpo.rollouts(outputs, rewards)
    assert len(samples) == 8
    settings = rl_grpo.Settings(batch=8, micro_batch=3)
    found = rl_grpo.learn(model, optimizer, list(samples), settings, random.Random(0))
    assert found["max_logprob_difference"] < 1e-4
    assert found["mean_ratio"] == pytest.approx(1, abs=1e-4)
    assert found["outside_clip"] == 0
    gen.update_weights(model.state_dict())
    scores = gen.score([sample.ids for sample in samples], start=[sample.prompt_len for sample in samples])
    gain = sum(s.advantage * (sum(new) - sum(s.logprobs)) for s, new in zip(samples, scores, strict=True))
    assert gain > 0.1


def test_nothing_is_learnt_of_no_samples(gen: Generator) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert rl_grpo.learn(None, optimizer, [], rl_grpo.Settings(), random.Random(0)) == {}


def test_the_program_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = rl_grpo.main(["--smoke", "--out", str(tmp_path / "curve.json")])
    curve = report["curve"]
    assert [point["step"] for point in curve] == [0, 1, 2]
    assert ["held_out_accuracy" in point for point in curve] == [True, False, True]
    assert all(0 <= point["reward"] <= 1 for point in curve[1:])
    assert sum(report["shares"].values()) == pytest.approx(1)
    assert report["max_logprob_difference"] < 1e-4
    assert json.loads((tmp_path / "curve.json").read_text()) == report
    assert report.keys() == json.loads((SCRIPTS / "results" / "rl-grpo-cpu.json").read_text()).keys()
    assert "step 2, reward" in capsys.readouterr().out


def test_drafts_change_no_point_of_the_curve() -> None:
    settings = rl_grpo.Settings(steps=2, prompts=2, samples=4, problems=2, batch=8, micro_batch=8, held_out=1)
    off, auto = (rl_grpo.train(settings, "cpu", "float32", speculate)["curve"] for speculate in ("off", "auto"))
    for plain, drafted in zip(off, auto, strict=True):
        for times in ("seconds", "cpu_seconds"):
            assert plain.pop(times) != drafted.pop(times)
    assert auto == off


def test_the_learning_curve_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, which fastgen does not")
    plot.plot(json.loads((SCRIPTS / "results" / "rl-grpo-cpu.json").read_text()), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_model_has_learnt_in_what_was_measured(path: Path) -> None:
    report = json.loads(path.read_text())
    accuracies = [point["held_out_accuracy"] for point in report["curve"] if "held_out_accuracy" in point]
    assert accuracies[-1] > accuracies[0] + 0.2
    assert report["curve"][-1]["seconds"] < (600 if path.stem == "rl-grpo-cpu" else 120)
    if report["dtype"] == "float32":
        assert report["max_logprob_difference"] < 1e-4
