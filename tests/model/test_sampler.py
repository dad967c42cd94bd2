"""The sampler against exact distributions and known random numbers; a row against itself in other batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen.kernels import noise
from fastgen.kernels.noise import gumbel, philox
from fastgen.model import sampler
from fastgen.model.sampler import LaneState, SampleOutput, SamplePlan
from fastgen.request import MAX_BIASES, LaneStart, SamplingParams

CPU = torch.device("cpu")
PROMPT, ANSWER, STOPS = (3, 5, 5, 9), (7, 9, 9, 11, 0), frozenset({0, 2, 8})
VOCAB = 40  # of the chi-square tests


def lane_start(lane: int, params: SamplingParams, seed: int | None = None, **other: Any) -> LaneStart:
    given = LaneStart(lane, params, lane if seed is None else seed, 0, len(PROMPT), STOPS, PROMPT + ANSWER)
    return replace(given, **other)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


EVERYTHING = SamplePlan(*[True] * 6, sorted_tokens=sampler.MAX_VOCAB, top_logprobs=0)


def plan_of(rows: list[SamplingParams]) -> SamplePlan:
    return SamplePlan.together(np.array([SamplePlan.of(params) for params in rows]).T)


def sample(
    state: LaneState, lanes: Tensor, positions: Tensor, logits: Tensor, plan: SamplePlan, mask: Tensor | None = None
) -> SampleOutput:
    output: SampleOutput = sampler.draw(logits.contiguous(), state, lanes, positions, plan, mask)
    return output


def draw(
    logits: Tensor, params: SamplingParams, rows: int = 1, mask: Tensor | None = None, plan: SamplePlan | None = None
) -> SampleOutput:
    """Draw for `rows` lanes that differ in seed and position only, all from logits [V]."""
    state = LaneState(rows, len(logits), CPU)
    state.start([lane_start(lane, params, seed=lane // 4) for lane in range(rows)])
    lanes = torch.arange(rows)
    masks = None if mask is None else mask.expand(rows, -1)
    positions = len(PROMPT) + lanes % 4  # early in the answer, for the sake of min_tokens
    return sample(state, lanes, positions, logits.expand(rows, -1), plan or SamplePlan.of(params), masks)


def as_mask(allowed: set[int], vocab: int) -> Tensor:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))


# The exact distribution, written plainly in float64.


def exact(logits: Tensor, p: SamplingParams, allowed: set[int] | None = None) -> np.ndarray:
    x = logits.double().numpy().copy()
    for token in set(PROMPT + ANSWER):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(ANSWER):
        x[token] -= p.presence_penalty + p.frequency_penalty * ANSWER.count(token)
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    if p.min_tokens:
        x[list(STOPS)] = -math.inf
    if allowed is not None:
        x[[token for token in range(len(x)) if token not in allowed]] = -math.inf
    probs = np.exp((x - x.max()) / p.temperature)
    order = np.lexsort((np.arange(len(x)), -x))
    if p.top_k:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    below = np.cumsum(probs[order]) - probs[order]  # what the tokens before this one hold
    if p.top_p < 1:
        probs[order[below >= p.top_p]] = 0
    probs[probs < p.min_p * probs.max()] = 0
    return np.asarray(probs / probs.sum())


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return how many standard deviations the counts are from what the probabilities make likely (Wilson and
    Hilferty's normal form of chi-square). Classes with fewer than 5 expected draws are merged into one."""
    expected = counts.sum() * probs
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    freedom = len(seen) - 1
    if not freedom:
        return 0.0
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom)))


LIMIT = 3.1  # standard deviations; a correct sampler stays below it in 999 of 1000 cases, and the seeds are fixed


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"temperature": 1.6, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.9},
    "bias": {"logit_bias": {4: 3.0, 6: -100.0, 12: 2.5}},
    "min_tokens": {"min_tokens": 5},
    "mask": {"mask": True},
    "all": {
        **{"temperature": 1.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "min_tokens": 5, "mask": True},
        **{
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "logit_bias": {4: 3.0, 8: 9.0},
        },
    },
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    fields = dict(DISTRIBUTIONS[name])
    allowed = set(range(0, VOCAB, 2)) | {3, 9, 33} if fields.pop("mask", False) else None
    params = SamplingParams(**fields, return_sampling_mask=True)
    logits = random_logits(1, VOCAB, seed=1, scale=1.0)[0]  # flat enough that every token is seen
    probs = exact(logits, params, allowed)
    out = draw(logits, params, rows=12_000, mask=None if allowed is None else as_mask(allowed, VOCAB))
    counts = np.bincount(out.tokens.numpy(), minlength=VOCAB)
    assert not counts[probs == 0].any()
    assert chi_square(counts, probs) < LIMIT
    np.testing.assert_allclose(out.logprobs[0].numpy(), np.log(probs[out.tokens.numpy()]), atol=2e-6)
    whole = exact(logits, replace(params, top_k=0, top_p=1.0, min_p=0.0), allowed)
    np.testing.assert_allclose(out.logprobs[1].numpy(), np.log(whole[out.tokens.numpy()]), atol=2e-6)
    truncates = bool(params.top_k or params.top_p < 1 or params.min_p)
    assert torch.equal(out.logprobs[1], out.logprobs[0]) == (not truncates)
    raw = logits.double().log_softmax(0)[out.tokens]
    np.testing.assert_allclose(out.logprobs[2].numpy(), raw.numpy(), atol=2e-6)
    assert out.kept is not None
    assert np.array_equal(out.kept[0].numpy(), probs > 0)
    assert (out.kept == out.kept[0]).all()


# Random numbers.


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "answer"),
    [
        # Random123, kat_vectors: philox4x32.
        (7, [0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (10, [0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (10, [noise.WORD] * 4, [noise.WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            10,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(rounds: int, counter: list[int], key: list[int], answer: list[int]) -> None:
    words = philox(tuple(torch.tensor(counter)[:, None]), tuple(torch.tensor(key)[:, None]), rounds)
    assert [word.item() for word in words] == answer


def test_noise_is_made_of_philox_words_and_of_all_inputs() -> None:
    zero = torch.zeros(1, 1, dtype=torch.int64)
    words = np.array([0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48], dtype=np.float64)
    np.testing.assert_allclose(gumbel(zero, zero, zero, 4)[0], -np.log(-np.log1p(-(words + 0.5) / 2**32)), rtol=1e-6)
    assert torch.equal(gumbel(zero, zero, zero, 3), gumbel(zero, zero, zero, 9)[:, :3])
    inputs = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**32), (0, 1, 1)]
    drawn = {float(gumbel(*torch.tensor(row)[:, None, None], vocab=1)) for row in inputs}
    assert len(drawn) == len(inputs)


def test_seeds_have_64_bits_with_or_without_a_sign() -> None:
    drawn = {}
    for seed in (-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1):
        state = LaneState(1, 4096, CPU)
        state.start([lane_start(0, SamplingParams(), seed)])
        out = sample(state, torch.tensor([0]), torch.tensor([7]), torch.zeros(1, 4096), plan_of([SamplingParams()]))
        drawn[seed] = int(out.tokens)
    assert drawn[-1] == drawn[2**64 - 1]
    assert drawn[-(2**63)] == drawn[2**63]
    assert len(set(drawn.values())) == 4


@pytest.mark.parametrize("word", [0, noise.WORD])
def test_the_least_and_the_largest_word_draw_possible_tokens(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "philox", lambda counter, key: (torch.full((1, 1), word),) * 4)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    assert gumbel(zero, zero, zero, VOCAB).isfinite().all()
    logits = torch.zeros(VOCAB)
    out = draw(logits, SamplingParams(), mask=as_mask(set(range(3, 36)), VOCAB))
    assert out.tokens.item() == 3


# Batches.

ODD_VOCAB = 1003  # rows that do not start where vector registers do


def mixed_params(count: int, rng: np.random.Generator) -> list[SamplingParams]:
    """All kinds of rows, many of them plain or greedy."""

    def some(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return [
        SamplingParams(
            temperature=some(0.0, 0.7, 1.0, 1.0, 1e-6, 30.0),
            top_k=some(0, 0, 0, 1, 40, 2000),
            top_p=some(1.0, 1.0, 1.0, 0.9, 1e-9),
            min_p=some(0.0, 0.0, 0.02),
            repetition_penalty=some(1.0, 1.0, 1.2),
            frequency_penalty=some(0.0, 0.0, 0.5),
            logit_bias=some(None, None, {3: 4.0}, dict.fromkeys(range(90), -1.0)),
            min_tokens=some(0, 0, 9),
            logprobs=some(None, 0, 3, 20),
            return_sampling_mask=some(False, False, True),
        )
        for _ in range(count)
    ]


def row_bits(out: SampleOutput, row: int, params: SamplingParams) -> list[int | float]:
    """Return the part of the output that this row has asked for, floats as bits."""
    bits = out.packed[:, row].tolist()
    if params.logprobs:
        assert out.top_ids is not None
        assert out.top_logprobs is not None
        bits += out.top_ids[row, : params.logprobs].tolist()
        bits += out.top_logprobs[row, : params.logprobs].view(torch.int32).tolist()
    if params.return_sampling_mask:
        assert out.kept is not None
        bits += out.kept[row].nonzero().flatten().tolist()
    return bits


def test_a_row_gets_the_same_bits_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    count = 64
    params = mixed_params(count, rng)
    logits = random_logits(count, ODD_VOCAB, seed=3, scale=4.0).bfloat16().float()  # bfloat16: many equal logits
    masks = torch.full((count, -(-ODD_VOCAB // 32)), -1, dtype=torch.int32)
    masked = set(range(0, count, 5))
    for row in masked:
        masks[row] = torch.from_numpy(rng.integers(-(2**31), 2**31, masks.shape[1], dtype=np.int32))
    positions = torch.from_numpy(rng.integers(len(PROMPT), 40, count))

    def run(rows: list[int], plan: SamplePlan | None = None) -> dict[int, list[int | float]]:
        state = LaneState(count, ODD_VOCAB, CPU)
        lanes = rng.permutation(count)[: len(rows)]
        state.start([lane_start(int(lane), params[row], seed=row) for lane, row in zip(lanes, rows, strict=True)])
        mask = masks[rows] if masked & set(rows) else None
        plan = plan or plan_of([params[row] for row in rows])
        out = sample(state, torch.from_numpy(lanes), positions[rows], logits[rows], plan, mask)
        assert torch.equal(state.last_token[torch.from_numpy(lanes)], out.tokens)
        return {row: row_bits(out, at, params[row]) for at, row in enumerate(rows)}

    alone = {row: run([row])[row] for row in range(count)}
    everything = EVERYTHING._replace(top_logprobs=20)
    assert run(list(range(count)), everything) == alone
    for size in (2, 3, 5, 17, 33, 63, 64):
        rows = rng.permutation(count)[:size].tolist()
        assert run(rows) == {row: alone[row] for row in rows}
        assert run(rows, everything) == {row: alone[row] for row in rows}


# Greedy rows, ties, extremes.


def test_among_equal_logits_the_lower_ids_win() -> None:
    first = torch.zeros(VOCAB)
    first[[11, 5, 30]] = 2.5
    zeros = torch.zeros(VOCAB)
    zeros[0] = -0.0  # equal to the others
    half = torch.zeros(VOCAB)
    half[20:] = 1.0
    one: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0, "top_k": 2}, {"top_k": 1}, {"top_p": 1e-9}]
    three: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.1}, {"top_k": 10, "top_p": 0.3}]
    for logits, kept, rows in (
        (first, [5], one),
        (zeros, [0], one),
        (half, [20, 21, 22], three),
        (half, [*range(20, VOCAB)], [{"top_k": 1000, "min_p": 1.0}]),
    ):
        for fields in rows:
            out = draw(logits, SamplingParams(**fields, return_sampling_mask=True), rows=50)
            assert out.kept is not None
            assert out.kept[0].nonzero().flatten().tolist() == kept
            assert set(out.tokens.tolist()) <= set(kept)
            np.testing.assert_allclose(out.logprobs[0], -math.log(len(kept)), atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-300},
        {"temperature": 1e-6},
        {"temperature": 1e6},
        {"temperature": 1e300},
        {"repetition_penalty": 1e300, "presence_penalty": -1e300, "logit_bias": {1: 1e300, 2: -1e300}},
    ],
)
def test_extreme_parameters_give_finite_logprobs(fields: dict[str, Any]) -> None:
    logits = random_logits(1, VOCAB, scale=50.0)[0]
    logits[3] = -math.inf
    out = draw(logits, SamplingParams(**fields), rows=4000)
    assert (out.tokens >= 0).all()
    assert out.logprobs[0].isfinite().all()
    temperature = fields.get("temperature", 1.0)
    if temperature < 1:
        assert (out.tokens == logits.argmax()).all()
        assert (out.logprobs[0] == 0).all()
    elif temperature > 1:
        counts = np.bincount(out.tokens.numpy(), minlength=VOCAB)
        assert chi_square(counts, (logits > -math.inf).double().numpy() / (VOCAB - 1)) < LIMIT


def test_greedy_follows_penalties_bias_and_mask_but_its_raw_logprob_does_not() -> None:
    logits = random_logits(1, VOCAB)[0]
    best = int(logits.argmax())
    params = SamplingParams(temperature=0, logit_bias={best: -100.0}, logprobs=2)
    out = draw(logits, params)
    assert out.tokens.item() == logits.topk(2).indices[1]
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    assert out.top_ids[0].tolist() == logits.topk(2).indices.tolist()
    assert out.logprobs[2].item() == out.top_logprobs[0, 1].item()
    masked = draw(logits, SamplingParams(temperature=0), mask=as_mask({best + 1}, VOCAB))
    assert masked.tokens.item() == best + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "mask"])
@pytest.mark.parametrize("fields", [{}, {"top_k": 4, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}])
def test_a_row_from_which_nothing_can_be_drawn_fails_by_itself(
    fields: dict[str, Any], bad: float | str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, logprobs=2, **fields)
    state = LaneState(2, VOCAB, CPU)
    state.start([lane_start(lane, params) for lane in range(2)])
    logits = random_logits(1, VOCAB).expand(2, -1).clone()
    mask = torch.full((2, 2), -1, dtype=torch.int32)
    if isinstance(bad, str):
        mask[0] = 0
    else:
        logits[0, 13] = bad
    out = sample(state, torch.arange(2), torch.tensor([9, 9]), logits, SamplePlan.of(params), mask)
    assert out.tokens[0] == sampler.NO_TOKEN
    assert out.logprobs[0][0].isnan()
    assert out.logprobs[1][0].isnan()
    assert state.last_token[0] == 0
    assert out.tokens[1] >= 0
    assert out.logprobs[0][1].isfinite()


# Lanes.


def test_a_lane_started_anew_keeps_nothing_of_the_one_before() -> None:
    logits = random_logits(1, VOCAB)[0]
    used, fresh = LaneState(2, VOCAB, CPU), LaneState(2, VOCAB, CPU)
    before = SamplingParams(logit_bias=dict.fromkeys(range(9), 9.0), min_tokens=30, top_k=2, frequency_penalty=1.0)
    used.start([lane_start(0, before)])
    params = SamplingParams(min_tokens=5, logit_bias={30: 0.5})
    for state in (used, fresh):
        state.start([])
        state.start([lane_start(0, params, token_ids=())])
    plan, asked = EVERYTHING, replace(params, return_sampling_mask=True)
    outs = [sample(s, torch.tensor([0]), torch.tensor([6]), logits[None], plan) for s in (used, fresh)]
    assert row_bits(outs[0], 0, asked) == row_bits(outs[1], 0, asked)


def test_min_tokens_counts_from_the_end_of_the_prompt() -> None:
    params = SamplingParams(temperature=0, min_tokens=3)
    state = LaneState(5, VOCAB, CPU)
    state.start([lane_start(lane, params) for lane in range(5)])
    logits = torch.zeros(5, VOCAB)
    logits[:, 8] = 5.0  # a stop token
    out = sample(state, torch.arange(5), len(PROMPT) + torch.arange(5), logits, SamplePlan.of(params))
    assert out.tokens.tolist() == [1, 1, 1, 8, 8]


def test_a_long_list_of_biases_takes_no_more_memory() -> None:
    """The tables are allocated at the start for the longest list, since a GPU's memory is divided up then."""
    vocab = 3 * MAX_BIASES
    state, logits = LaneState(3, vocab, CPU), random_logits(3, vocab)
    tables = state.token_ids, state.addends
    most = replace(SamplingParams(temperature=0, min_tokens=9), logit_bias=dict.fromkeys(range(MAX_BIASES - 3), -200.0))
    params = [most, most, SamplingParams(temperature=0, logit_bias={5: 99.0})]
    state.start([lane_start(lane, own, token_ids=()) for lane, own in enumerate(params)])
    assert (state.token_ids is tables[0], state.addends is tables[1]) == (True, True)
    allowed = logits[:2].clone()
    allowed[:, : MAX_BIASES - 3] = -math.inf
    out = sample(state, torch.arange(3), torch.full((3,), len(PROMPT)), logits, plan_of(params))
    assert out.tokens.tolist() == [*allowed.argmax(1).tolist(), 5]


def test_a_vocabulary_whose_masses_could_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 524287"):
        LaneState(1, 2**19, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_read_as_float32_and_not_changed(dtype: torch.dtype) -> None:
    logits = random_logits(1, VOCAB)[0].to(dtype)
    params = SamplingParams(repetition_penalty=1.3, logit_bias={4: 1.0}, top_p=0.9)
    before = logits.clone()
    half, full = draw(logits, params, rows=30), draw(logits.float(), params, rows=30)
    assert torch.equal(half.packed, full.packed)
    assert torch.equal(logits, before)
