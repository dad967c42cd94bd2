"""scripts/rl/rl_trl.py: what a GRPOTrainer is given by a Generator, and five steps of it. Needs the extra `rl`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the extra rl")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "rl"))

import rl_grpo
import rl_trl
from serving import FGSERVE, Server

from fastgen import Generator
from fastgen.text.tokenizer import encode_prompt

DIFFERENCE = "sampling/sampling_logp_difference/max"


@pytest.fixture
def gen() -> Iterator[Generator]:
    with Generator(seed=0, num_pages=32) as gen:
        yield gen


@pytest.fixture
def server() -> Iterator[str]:
    with Server(FGSERVE, "--rollout", "--seed", "0") as server:
        yield server.await_ready().url


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that differ within nearly every group, so that each step changes the weights."""
    monkeypatch.setattr(rl_trl, "reward", lambda problem, text: float(sum(map(ord, text)) % 7))
    monkeypatch.setattr(rl_trl, "LEARNING_RATE", 1e-3)


def test_completions_come_with_ids_and_logprobs(gen: Generator) -> None:
    prompts = [encode_prompt(rl_grpo.chat(problem), gen.tokenizer)[0] for problem in ((12, 34), (56, 78))]
    params = {"n": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 64}
    found = rl_trl.GeneratorClient(gen).generate(prompts, repetition_penalty=1.0, **params)
    assert found["prompt_ids"] == prompts
    assert [len(logprobs) for logprobs in found["logprobs"]] == [len(ids) for ids in found["completion_ids"]]
    assert len(found["completion_ids"]) == 6
    assert all(ids[-1] in (2, 6) for ids in found["completion_ids"]), "the final EOS stays"
    with pytest.raises(ValueError, match="a prompt cannot be answered: the prompt has 3000 tokens"):
        rl_trl.GeneratorClient(gen).generate([[5] * 3000], max_tokens=4)


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("url", [[], ["--url", "of a server"]])
def test_five_steps_with_the_weights_of_each(url: list[str], request: pytest.FixtureRequest) -> None:
    if url:
        url = ["--url", request.getfixturevalue("server")]
    log = rl_trl.main(["--smoke", *url])["log"]
    assert len(log) == 5
    assert sum(entry["grad_norm"] > 0 for entry in log) >= 2, "in some steps all answers of a group are equally good"
    for entry in log:
        assert entry[rl_trl.RATIO] == pytest.approx(1, abs=1e-3)
        assert entry[DIFFERENCE] < 1e-4
        assert entry["completions/clipped_ratio"] < 1


@pytest.mark.usefixtures("dense")
def test_old_weights_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_trl.GeneratorClient, "update_named_params", lambda self, metadata, named_params: None)
    log = rl_trl.main(["--smoke"])["log"]
    assert max(abs(entry[rl_trl.RATIO] - 1) for entry in log) > 1e-3
    assert log[-1][DIFFERENCE] > 1e-2
