"""prefill_only.py: probabilities of choices and embeddings, held to transformers; test_rollouts.py has the scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, Checkpoint, hf_logits, hf_model, random_ids, save_embedder

from fastgen import Generator, SamplingParams

CHOICES = ["hello", "hello world", "the quick", " fox", "été"]


def test_the_probability_of_a_choice_is_that_of_its_ids_and_an_end(talker: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talker, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    prompts: list[Any] = ["hello you", random_ids(70), [{"role": "user", "content": "the lazy dog"}]]
    with Generator(folder, max_seqs=4, max_step_tokens=32, page_size=16) as gen:
        assert gen.tokenizer is not None
        found = gen.classify(prompts, CHOICES)
        assert gen.classify(prompts[0], CHOICES[:1]) == [{"hello": 1.0}]
        for prompt, probabilities in zip(prompts, found, strict=True):
            ids = gen.generate([prompt], SamplingParams(max_tokens=1))[0].prompt_token_ids
            weights = []
            for text in CHOICES:
                answer = gen.tokenizer.encode("\n" + text, special=False)[2:]  # after the ids of a space and a newline
                logprobs = hf_logits(folder, ids + answer).double().log_softmax(-1)[len(ids) - 1 :]
                drawn = logprobs[range(len(answer)), answer].sum()
                weights.append(drawn + logprobs[-1, [2, 9]].logsumexp(0))
            expected = torch.stack(weights).softmax(0)
            assert list(probabilities) == CHOICES
            assert sum(probabilities.values()) == pytest.approx(1, abs=1e-12)
            assert list(probabilities.values()) == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("prompt", "choices", "reason"),
    [
        ("hello", [], "choice is empty"),
        ("hello", ["a", "a"], "a choice is given twice"),
        ("hello", ["a", ""], "the choice '' cannot be encoded on its own"),
        ("hello", ["a</s>"], "the choice 'a</s>' cannot be encoded"),
        ([[]], ["a"], "a prompt is empty"),
        ([[5] * 511], ["hello"], "the prompt has 514 tokens"),
    ],
)
def test_choices_and_prompts_that_cannot_be_classified(
    gen: Generator, prompt: Any, choices: list[str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        gen.classify(prompt, choices)
    with pytest.raises(TypeError, match="choice must be a list of strings, not 'ab'"):
        gen.classify("hello", "ab")


@pytest.fixture(scope="module")
def embedder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = checkpoint("Qwen3", **FAMILIES["qwen3"][1], tie_word_embeddings=True)
    return save_embedder(model, tmp_path_factory.mktemp("embedder") / "model")


def hf_states(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    """Return the last token's state of each prompt: float32 [N, hidden size]."""
    with torch.inference_mode():
        return torch.stack([hf_model(folder).model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts])


def test_an_embedding_is_the_normalized_state_of_the_last_token(embedder: Path) -> None:
    prompts = [random_ids(length) for length in (1, 16, 17, 90, 90)]
    states = torch.nn.functional.normalize(hf_states(embedder, prompts))
    with Generator(embedder, max_seqs=4, max_step_tokens=32, page_size=16) as gen:
        gen.add(random_ids(5, seed=1), SamplingParams(max_tokens=40, ignore_eos=True))
        gen.step()  # the steps of embeddings decode it
        found = gen.embed(prompts)
        assert gen.embed(prompts[3]) == [found[3]] == [found[4]], "from the prefix cache"
        scores = gen.score(prompts[1:2])
        assert gen.unfinished
        gen.abort("r0")
    torch.testing.assert_close(torch.tensor(found), states, rtol=0, atol=1e-5)
    assert len(scores[0]) == 16


def test_an_embedding_is_not_normalized_unless_the_files_say_so(embedder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(embedder, tmp_path / "m")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')  # as newer versions write it
    with Generator(folder, max_seqs=2) as gen:
        torch.testing.assert_close(torch.tensor(gen.embed([[5, 6, 7]])), hf_states(folder, [[5, 6, 7]]))
        for name, text, reason in (
            ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": true}', "asks for mean_tokens of Transformer"),
            ("modules.json", json.dumps([*modules, {"type": "a.Dense", "path": ""}]), "of .*, Dense"),
            ("modules.json", "[", "this model has no embeddings: embed needs modules.json"),
        ):
            (folder / name).write_text(text)
            with pytest.raises(ValueError, match=reason):
                gen.embed("hello")
