"""beam_search.py: the beams and scores are those of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import FAMILIES, Checkpoint, check_idle, hf_model, random_ids

from fastgen import Generator, SamplingParams
from fastgen.beam_search import BeamCompletion

PROMPTS = [random_ids(length, seed=length) for length in (1, 17, 33, 70)]
MANY_ENDS = [2, 5, 9, 11, *range(100, 106)]


def beams(gen: Generator, width: int, max_tokens: int, length_penalty: float) -> list[list[BeamCompletion]]:
    outputs = gen.beam_search(PROMPTS, width, max_tokens, length_penalty=length_penalty, logprobs=2)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    return [[each for each in output.completions if isinstance(each, BeamCompletion)] for output in outputs]


@pytest.mark.parametrize(
    ("name", "eos", "cases"),
    [
        ("llama", MANY_ENDS, [(4, 30, 1.0), (3, 20, 0.0), (5, 15, -1.0), (2, 8, 2.0), (3, 1, 0.6)]),
        ("qwen3", 2, [(2, 12, 1.0)]),
    ],
)
def test_beams_and_scores_are_those_of_transformers(
    name: str, eos: int | list[int], cases: list[tuple[int, int, float]], checkpoint: Checkpoint
) -> None:
    family, config = FAMILIES[name]
    folder = checkpoint(family, **config, eos_token_id=eos)
    reasons = set()
    with Generator(folder, max_seqs=6, max_step_tokens=32, page_size=16) as gen:
        for width, max_tokens, length_penalty in cases:
            found = beams(gen, width, max_tokens, length_penalty)
            for prompt, completions in zip(PROMPTS, found, strict=True):
                expected = hf_model(folder).generate(
                    torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=max_tokens,
                    length_penalty=length_penalty, do_sample=False, eos_token_id=eos, pad_token_id=1,
                    return_dict_in_generate=True, output_scores=True,
                )  # fmt: skip
                assert len(completions) == width
                for completion, ids, score in zip(
                    completions, expected.sequences, expected.sequences_scores, strict=True
                ):
                    count = len(completion.token_ids)
                    assert completion.token_ids == ids[len(prompt) : len(prompt) + count].tolist()
                    assert (ids[len(prompt) + count :] == 1).all(), "padding"
                    assert completion.score == pytest.approx(score.item(), rel=1e-4)
                    assert completion.score == completion.cumulative_logprob / count**length_penalty
                    assert [len(top) for top in completion.top_logprobs or ()] == [2] * count
                    reasons.add(completion.finish_reason)
        check_idle(gen)
    assert reasons == {"stop", "length"} or eos == 2


def test_a_search_does_not_depend_on_others_and_has_texts(gen: Generator) -> None:
    (alone,) = gen.beam_search("hello you", 3, 6)
    gen.add(random_ids(20), SamplingParams(max_tokens=300, ignore_eos=True), id=0)
    gen.step()
    first, failed, again = gen.beam_search(["the quick fox", [5] * 512, "hello you"], 3, 6)
    gen.abort(0)
    assert again.completions == alone.completions
    assert (failed.id, "the prompt has 512 tokens" in str(failed.error)) == (1, True)
    assert gen.tokenizer is not None
    for output in (first, again):
        assert output.prompt in ("the quick fox", "hello you")
        scores = gen.score([output.prompt_token_ids + each.token_ids for each in output.completions],
                           start=len(output.prompt_token_ids))  # fmt: skip
        assert [each.raw_logprobs for each in output.completions] == scores, "the same bits"
        for completion in output.completions:
            assert isinstance(completion, BeamCompletion)
            assert completion.score == sum(completion.logprobs) / len(completion.token_ids)
            whole = gen.tokenizer.decode(output.prompt_token_ids + completion.token_ids)
            assert whole.endswith(completion.text)
            assert completion.text


def test_where_a_beam_ends(gen: Generator) -> None:
    (free,) = gen.beam_search([[5, 6, 7]], 2, 5, ignore_eos=True)
    assert {each.finish_reason for each in free.completions} == {"length"}
    _, stop = free.completions[0].token_ids[:2]
    (found,) = gen.beam_search([[5, 6, 7]], 2, 5, ignore_eos=True, stop_token_ids=[stop])
    ended = next(each for each in found.completions if each.finish_reason == "stop")
    assert (ended.token_ids[-1], ended.stop_reason) == (stop, stop)
    assert stop not in ended.token_ids[:-1]
    assert gen.tokenizer is not None
    assert ended.text == gen.tokenizer.decode(ended.token_ids[:-1])
    nothing: Any = None  # as in SamplingParams
    assert (
        gen.beam_search([[5, 6, 7]], 2, 5, ignore_eos=True, stop_token_ids=nothing)[0].completions == free.completions
    )
    (full,) = gen.beam_search([[5] * 509], 2, 50, ignore_eos=True)
    assert {len(each.token_ids) for each in full.completions} == {3}, "the context is full"


def test_arguments_that_cannot_be_used(gen: Generator) -> None:
    for error, reason, width, max_tokens, more in [
        (ValueError, "width is 0; it must be at least 1", 0, 5, {}),
        (ValueError, "128 beams are too many with 1 stop ids; ask for at most 127", 128, 5, {}),
        (TypeError, "width must be an integer, not 2.5", 2.5, 5, {}),
        (ValueError, "max_tokens is 0", 2, 0, {}),
        (TypeError, "length_penalty must be a number, not '1'", 2, 5, {"length_penalty": "1"}),
        (ValueError, "length_penalty is 1000; it must be from -40 to 40", 2, 5, {"length_penalty": 1000}),
        (ValueError, "length_penalty is nan", 2, 5, {"length_penalty": math.nan}),
        (TypeError, "no argument 'num_beams'", 2, 5, {"num_beams": 2}),
        (ValueError, "logprobs is 129", 2, 5, {"logprobs": 129}),
        (TypeError, "stop_token_ids must be a list of token ids", 2, 5, {"stop_token_ids": 5}),
        (TypeError, "stop_token_ids must hold token ids", 2, 5, {"stop_token_ids": ["a"]}),
    ]:
        with pytest.raises(error, match=reason):
            gen.beam_search([[5]], width, max_tokens, **more)  # type: ignore[arg-type]
    assert gen.beam_search([], 2, 5) == []
