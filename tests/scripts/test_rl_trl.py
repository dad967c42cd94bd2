"""scripts/rl/rl_trl.py: what a Generator gives a GRPOTrainer, and five steps of training. Needs the extra `rl`."""

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


@pytest.fixture
def server() -> Iterator[str]:
    with Server(FGSERVE, "--rollout", "--seed", "0", "--dtype", "float32") as server:
        yield server.await_ready().url


def test_completions_come_with_ids_and_logprobs() -> None:
    params = {"n": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 64}
    with Generator(dtype="float32", seed=0, num_pages=32) as gen:
        prompts = [encode_prompt(rl_grpo.chat(problem), gen.tokenizer)[0] for problem in ((12, 34), (56, 78))]
        found = rl_trl.GeneratorClient(gen).generate(prompts, repetition_penalty=1.0, **params)
        with pytest.raises(ValueError, match="a prompt cannot be answered: the prompt has 3000 tokens"):
            rl_trl.GeneratorClient(gen).generate([[5] * 3000], max_tokens=4)
    assert found["prompt_ids"] == prompts
    assert [len(logprobs) for logprobs in found["logprobs"]] == [len(ids) for ids in found["completion_ids"]]
    assert len(found["completion_ids"]) == 6
    assert all(ids[-1] in (2, 6) for ids in found["completion_ids"]), "the final EOS stays"


@pytest.mark.parametrize("remote", [False, True])
def test_five_steps_with_the_weights_of_each(
    remote: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards differ within nearly every group, so that each step changes the weights."""
    monkeypatch.setattr(rl_trl, "reward", lambda problem, text: float(sum(map(ord, text)) % 7))
    monkeypatch.setattr(rl_trl, "LEARNING_RATE", 1e-3)
    log = rl_trl.main(["--smoke", *(["--url", request.getfixturevalue("server")] if remote else [])])["log"]
    assert len(log) == 5
    assert sum(entry["grad_norm"] > 0 for entry in log) >= 2, "in some steps all answers of a group are equally good"
    for entry in log:
        assert entry[rl_trl.RATIO] == pytest.approx(1, abs=1e-3)
        assert entry["sampling/sampling_logp_difference/max"] < 1e-4
