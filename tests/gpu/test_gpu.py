"""The engine on a GPU: the same answers as on the CPU. Run there as PYTHONPATH=. python3 -m pytest tests/gpu."""

import pytest
import torch

from fastgen import Generator, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("hello", "what is 12 + 30?", "spell banana", "sort 5, 2, 9, 1", "what day comes after friday?")
]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


def answers(**options: object) -> list[list[int]]:
    with Generator(**options) as gen:  # type: ignore[arg-type]
        return [output.completions[0].token_ids for output in gen.generate(CHATS, GREEDY)]


@pytest.mark.parametrize("page_size", [16, 64])
def test_float32_answers_are_those_of_the_cpu(page_size: int) -> None:
    expected = answers(device="cpu")
    assert answers(device="cuda", dtype="float32", page_size=page_size) == expected
    tight = {"max_seqs": 3, "max_step_tokens": 7, "page_size": page_size, "num_pages": 128 // page_size + 2}
    assert answers(device="cuda", dtype="float32", **tight) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_answers_make_sense(dtype: str) -> None:
    with Generator(device="cuda", dtype=dtype) as gen:
        texts = [output.text for output in gen.generate(CHATS, GREEDY)]
    assert texts[1] == "12 + 30 = 42."
    assert texts[2] == "b-a-n-a-n-a"


def test_sampling_and_scores_agree_on_the_gpu() -> None:
    params = SamplingParams(seed=1, temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.1, n=4, max_tokens=32)
    with Generator(device="cuda", dtype="float32") as gen:
        for output in gen.generate(CHATS, params):
            ids, start = output.prompt_token_ids, len(output.prompt_token_ids)
            scores = gen.score([ids + completion.token_ids for completion in output.completions], start=start)
            for score, completion in zip(scores, output.completions, strict=True):
                assert score == pytest.approx(completion.raw_logprobs, abs=1e-3)
