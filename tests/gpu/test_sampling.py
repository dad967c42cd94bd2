"""Tokens are sampled on a GPU with the frequencies of their distribution, by the chi-square test, and logprobs agree.

Each sample has two tokens, the first drawn after a prefill and the second after a decode step. The exact distribution
of the pair comes from the raw scores of all pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastgen import Generator, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

SMALL = {"vocab_size": 48, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "initializer_range": 0.05}
PROMPT = [5, 9, 14, 3, 21]
SAMPLES = 20_000
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"temperature": 0.6, "top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
}


def pair_scores(gen: Generator) -> np.ndarray:
    """Return raw logprobs, float64 [V + 1, V]: row 0 for the first token, row 1 + i for the second one after token
    i."""
    vocab = gen.model_config.vocab_size
    starts = [PROMPT, *([*PROMPT, first] for first in range(vocab))]
    sequences = [[*start, token] for start in starts for token in range(vocab)]
    scores = gen.score(sequences, start=[len(sequence) - 1 for sequence in sequences])
    return np.array(scores, dtype=np.float64).reshape(vocab + 1, vocab)


def distribution(
    raw: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Return the probabilities [V] for raw logprobs [V], after temperature, top-k, top-p and min-p."""
    p: np.ndarray = np.exp((raw - raw.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    held = p[order]
    if top_k:
        held[top_k:] = 0
    if top_p < 1:
        before = np.cumsum(held) - held
        held[before >= top_p * held.sum()] = 0
    held[held < min_p * held[0]] = 0
    p[order] = held
    p /= p.sum()
    return p


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the p-value of the chi-square test; cells with an expectation below 5 are combined."""
    stats = pytest.importorskip("scipy.stats")
    rare = expected < 5
    observed, wanted = counts[~rare], expected[~rare]
    if expected[rare].sum() >= 5:
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def check_frequencies(gen: Generator, raw: np.ndarray, case: dict[str, Any]) -> None:
    first = distribution(raw[0], **case)
    second = np.array([distribution(row, **case) for row in raw[1:]])
    joint = first[:, None] * second
    whole = np.array([distribution(row, case.get("temperature", 1.0)) for row in raw])
    params = SamplingParams(n=SAMPLES, max_tokens=2, ignore_eos=True, seed=11, **case)
    (output,) = gen.generate([PROMPT], params)
    counts = np.zeros_like(joint)
    for pair, times in Counter(tuple(completion.token_ids) for completion in output.completions).items():
        counts[pair] = times
    assert counts.sum() == SAMPLES
    assert not counts[joint == 0].any()
    assert p_value(counts.ravel(), SAMPLES * joint.ravel()) > 1e-3
    for completion in output.completions[:200]:
        a, b = completion.token_ids
        assert completion.raw_logprobs == pytest.approx([raw[0, a], raw[1 + a, b]], abs=1e-3)
        assert completion.logprobs == pytest.approx(np.log([first[a], second[a, b]]), abs=1e-3)
        assert completion.untruncated_logprobs == pytest.approx(np.log([whole[0, a], whole[1 + a, b]]), abs=1e-3)


@pytest.fixture(scope="module")
def gen(checkpoint: Callable[..., Path]) -> Iterator[Generator]:
    pytest.importorskip("transformers")
    folder = checkpoint("Llama", **SMALL)
    with Generator(folder, device="cuda", dtype="float32", kv_cache_gb=1.0, seed=0) as gen:
        yield gen


@pytest.fixture(scope="module")
def raw(gen: Generator) -> np.ndarray:
    return pair_scores(gen)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_pass_the_chi_square_test(case: str, gen: Generator, raw: np.ndarray) -> None:
    check_frequencies(gen, raw, CASES[case])
