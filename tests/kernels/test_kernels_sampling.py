"""The sampler's kernels, in Triton's interpreter if there is no GPU, compared with their torch twins."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen.kernels import noise, scoring
from fastgen.kernels.launch import INTERPRETED
from fastgen.kernels.triton import sampler_rows as layout
from fastgen.kernels.triton.jit import jit, tl
from fastgen.kernels.triton.sampler_rows import as_mass, key_ids, key_logits, rank_keys, scale_of, weigh
from fastgen.model import sampler
from fastgen.model.sampler import LaneState, SampleOutput, SamplePlan
from fastgen.request import LaneStart, SamplingParams

pytestmark = [
    pytest.mark.skipif(tl is None or not (INTERPRETED or torch.cuda.is_available()), reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter, about what is not selected
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates to bfloat16
PROMPT, ANSWER, STOPS = (3, 5, 5, 9), (7, 9, 9, 11, 0), frozenset({0, 2, 8})
GREEDY = SamplingParams(temperature=0)
VOCAB = 2 * 4096 + 1003  # three chunks, the last one short, and rows that do not start where vector registers do


def randn(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def plan_of(rows: list[SamplingParams]) -> SamplePlan:
    return SamplePlan.together(np.array([SamplePlan.of(params) for params in rows]).T)


@dataclass
class Draw:
    """Rows to draw. Row r has params[r], seed r and its own lane; one more lane is never started."""

    logits: Tensor
    params: list[SamplingParams]
    mask: Tensor | None = None

    @property
    def lanes(self) -> Tensor:
        return torch.randperm(len(self.params), generator=torch.Generator().manual_seed(9)).to(DEVICE)

    @property
    def positions(self) -> Tensor:
        return len(PROMPT) + torch.arange(len(self.params), device=DEVICE) * 7 % 12

    def state(self) -> LaneState:
        state = LaneState(len(self.params) + 1, self.logits.shape[1], DEVICE)
        lanes = self.lanes.tolist()
        state.start(
            [
                LaneStart(lanes[row], params, row, row % 3, len(PROMPT), STOPS, PROMPT + ANSWER)
                for row, params in enumerate(self.params)
            ]
        )
        return state

    def by(self, draw: Any) -> tuple[SampleOutput, LaneState]:
        state, before = self.state(), self.logits.clone()
        out = draw(self.logits, state, self.lanes, self.positions, plan_of(self.params), self.mask, to_host=True)
        assert torch.equal(self.logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits are left as they are"
        return out, state

    def check(self) -> SampleOutput:
        """Check that the kernels do the same as the twin, except for the rounding of exp, and return what they drew."""
        (out, state), (twin, twin_state) = self.by(sampler.draw.launch), self.by(sampler.draw.twin)
        assert out.host is not None
        assert torch.equal(out.packed.cpu(), out.host), "the copy waits for the kernels, which write to the host"
        same = out.tokens == twin.tokens
        for row in (~same).nonzero().flatten().tolist():
            self.check_near(row, int(out.tokens[row]))
        ours, its = out.logprobs[:2, same], twin.logprobs[:2, same]
        torch.testing.assert_close(ours, its, atol=4e-6, rtol=2e-6, equal_nan=True)
        drawn = same & (twin.tokens >= 0)
        torch.testing.assert_close(
            out.logprobs[2][drawn], twin.logprobs[2][drawn], atol=4e-6, rtol=2e-6, equal_nan=True
        )
        assert torch.equal(state.last_token[self.lanes], out.tokens.clamp(min=0))
        if same.all():
            for name in ("last_token", "counts", "in_prompt"):
                assert torch.equal(getattr(state, name), getattr(twin_state, name)), name
        return out

    def check_near(self, row: int, token: int) -> None:
        """Check that the score of a token is so close to the best that rounding decides."""
        state, at = self.state(), slice(row, row + 1)
        lane, position = self.lanes[at], self.positions[at]
        rows, plan = state.rows(lane), SamplePlan.of(self.params[row])
        mask = None if self.mask is None else self.mask[at]
        edited = sampler._edit(state, rows, lane, position, self.logits[at].float(), plan, mask)
        best = edited.amax(1, keepdim=True)
        assert best.isfinite(), self.params[row]
        assert rows.temperature > 0, self.params[row]
        kept = sampler._draw(edited, best, rows, position[:, None], plan)[2]
        assert kept is not None
        drawn = noise.gumbel(rows.seed, rows.sample_index, position[:, None], edited.shape[1])
        scores = ((edited - best) / rows.temperature + drawn).where(kept, -math.inf)[0]
        assert scores[token] >= scores.max() - 3e-5, self.params[row]


# The parts.


@jit()
def _parts_kernel(x_ptr, temperature_ptr, weights_ptr, mass_ptr, keys_ptr, back_ptr, ids_ptr, size: tl.constexpr):
    at = tl.arange(0, size)
    x = tl.load(x_ptr + at)
    weights = weigh(x, tl.max(x), scale_of(tl.load(temperature_ptr)))
    keys = rank_keys(x, at)
    tl.store(weights_ptr + at, weights)
    tl.store(mass_ptr + at, as_mass(weights))
    tl.store(keys_ptr + at, keys)
    tl.store(back_ptr + at, key_logits(keys))
    tl.store(ids_ptr + at, key_ids(keys))


@dataclass
class Parts:
    weights: Tensor
    mass: Tensor
    keys: Tensor
    back: Tensor
    ids: Tensor

    @staticmethod
    def of(x: Tensor, temperature: float = 1.0) -> Parts:
        """Compute all parts of x, whose size is a power of two."""
        parts = Parts(*(torch.empty(len(x), dtype=d, device=DEVICE) for d in (x.dtype, torch.int64, torch.int64)),
                      torch.empty_like(x), torch.empty(len(x), dtype=torch.int64, device=DEVICE))  # fmt: skip
        at = torch.tensor([temperature], device=DEVICE)
        _parts_kernel[(1,)](
            x, at, parts.weights, parts.mass, parts.keys, parts.back, parts.ids, len(x), enable_fp_fusion=False
        )
        return parts


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-30, 13.7, 1e30])
def test_weights_are_exp_and_mass_their_fixed_point(temperature: float) -> None:
    x = torch.cat([-torch.rand(2047, generator=torch.Generator().manual_seed(0)) * 60, torch.zeros(1)]).to(DEVICE)
    x = x * min(temperature, 1e10)
    x[5], x[6] = -math.inf, -3e38
    parts = Parts.of(x, temperature)
    exact = x.double() / torch.tensor(temperature).double()
    error = (parts.weights.double() - exact.exp()).abs() / exact.exp().clamp(min=2.0**-100)
    assert (error <= 4e-7 + 1.2e-7 * exact.abs().clamp(max=100)).all()
    assert parts.weights.max() == 1.0
    assert torch.equal(parts.mass, (parts.weights * 2.0**44).long())


def test_rank_keys_order_as_the_twins_and_go_back() -> None:
    x = randn(1, 1024)[0].to(HALF).float()
    x[:8] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3e38, -3e38, 1e-40, -1e-40])
    parts = Parts.of(x)
    twin = scoring.rank_keys_of(x[None])[0]
    assert torch.equal(parts.keys.argsort(), twin.argsort())
    assert torch.equal(parts.back, x)
    assert torch.equal(parts.ids, torch.arange(1024, device=DEVICE))


@jit()
def _noise_kernel(table_ptr, positions_ptr, out_ptr, count: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    drawn = layout.noise(table_ptr + row * layout.ENTRY, tl.load(positions_ptr + row), chunk * count, count)
    tl.store(out_ptr + (row * tl.num_programs(1) + chunk) * count + tl.arange(0, count), drawn)


def test_noise_is_the_twins() -> None:
    inputs = [(0, 0, 0), (1, 0, 0), (2**32, 1, 5), (-1, 0, 0), (-(2**63), 3, 2**32), (2**63 - 1, 2**31, 2**33 + 7)]
    seed, index, position = torch.tensor(inputs, device=DEVICE).unbind(1)
    table = torch.zeros(len(inputs), 14, dtype=torch.int64, device=DEVICE)
    table[:, 0], table[:, 1] = seed, index
    out = torch.empty(len(inputs), 2 * 4096, dtype=torch.float32, device=DEVICE)
    _noise_kernel[(len(inputs), 2)](table, position.contiguous(), out, 4096)
    twin = noise.gumbel(seed[:, None], index[:, None], position[:, None], 2 * 4096)
    torch.testing.assert_close(out * math.log(2) - math.log(math.log(2)), twin, atol=1e-5, rtol=1e-6)


# Draws.


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("vocab", [5, 40, 512, VOCAB])
def test_plain_draws(vocab: int, dtype: torch.dtype) -> None:
    params = [SamplingParams(temperature=t, min_p=m) for t in (0, 0.3, 1, 1, 4, 1e-9, 1e9) for m in (0, 0.03)]
    Draw(randn(len(params), vocab).to(dtype), params).check()


def test_the_last_tokens_of_gemmas_vocabulary_are_drawn() -> None:
    """Gemma 3 has 2**18 + 64 tokens."""
    logits = randn(4, 2**18 + 64)
    logits[:, 2**18 + 3 :: 7] = 30.0
    params = [GREEDY, SamplingParams(top_k=5), SamplingParams(top_p=0.9), SamplingParams(min_p=0.5)]
    out = Draw(logits, params).check()
    assert out.tokens[0] == 2**18 + 3
    assert (out.tokens > 2**18).all()
    assert (out.tokens[1] - 2**18) // 7 < 5  # the lowest ids of equal tokens


@pytest.mark.long
def test_the_masses_of_the_largest_vocabulary_do_not_overflow() -> None:
    """Equal logits have the largest sum."""
    logits = torch.zeros(1, sampler.MAX_VOCAB, device=DEVICE)
    (kept,) = kept_by(logits, SamplingParams(top_p=0.25))
    assert abs(len(kept) - sampler.MAX_VOCAB / 4) <= 1


def test_tokens_of_no_probability_are_not_drawn() -> None:
    logits = randn(16)
    logits[:, :700] = logits[:, VOCAB - 899 :] = -200.0
    for params in (SamplingParams(), SamplingParams(top_k=VOCAB - 1)):
        tokens = Draw(logits, [params] * 16).check().tokens
        assert ((tokens >= 700) & (tokens < VOCAB - 899)).all()


def mixed_params(count: int, rng: np.random.Generator) -> list[SamplingParams]:
    """Return parameters of all kinds, many of them plain or greedy."""

    def some(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return [
        SamplingParams(
            temperature=some(0.0, 0.7, 1.0, 1.0, 1e-6, 30.0),
            top_k=some(0, 0, 0, 1, 15, 40, 2000, 9000),
            top_p=some(1.0, 1.0, 1.0, 0.9, 0.999, 1e-9),
            min_p=some(0.0, 0.0, 0.02),
            repetition_penalty=some(1.0, 1.0, 1.2, 0.8),
            presence_penalty=some(0.0, 0.0, 0.7),
            frequency_penalty=some(0.0, 0.0, 0.5),
            logit_bias=some(None, None, {3: 4.0}, dict.fromkeys(range(300), -1.0)),
            min_tokens=some(0, 0, 9),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("vocab", "masked"), [(40, False), (VOCAB, True)])
def test_mixed_draws(vocab: int, masked: bool) -> None:
    rng = np.random.default_rng(vocab)
    params = mixed_params(24, rng)
    if vocab < 300:
        params = [replace(p, logit_bias=None) for p in params]
    mask = None
    if masked:  # random bits for every third row, and all bits for the others
        words = np.full((24, -(-vocab // 32)), -1, dtype=np.int32)
        words[::3] = rng.integers(-(2**31), 2**31, words[::3].shape, dtype=np.int32)
        mask = torch.from_numpy(words).to(DEVICE)
    Draw(randn(24, vocab, seed=2).to(HALF).float(), params, mask).check()


def kept_by(logits: Tensor, params: SamplingParams) -> list[set[int]]:
    """Return the tokens that the kernels keep of rows with these parameters."""
    out = Draw(logits, [replace(params, return_sampling_mask=True)] * len(logits)).check()
    assert out.kept is not None
    assert out.kept.gather(1, out.tokens[:, None]).all()
    return [set(row.nonzero().flatten().tolist()) for row in out.kept]


def expected(x: Tensor, p: SamplingParams) -> set[int]:
    """Return the tokens to keep of logits [V], found by a sort of the kernels' own weights."""
    size = 1 << (len(x) - 1).bit_length()
    parts = Parts.of(torch.nn.functional.pad(x, (0, size - len(x)), value=-math.inf), p.temperature)
    mass, x = parts.mass.tolist(), x.cpu()
    order = np.lexsort((np.arange(len(x)), -x.double().numpy())).tolist()[: p.top_k or len(x)]
    total, held, kept = sum(mass[token] for token in order), 0, set()
    for token in order:
        if p.top_p < 1 and held >= float(total) * p.top_p:
            break
        held += mass[token]
        kept.add(token)
    temperature = torch.tensor(p.temperature)
    least = x.max() + torch.tensor(p.min_p).log() * temperature
    if p.top_k or p.top_p < 1:
        least = torch.maximum(least, x.max() - sampler.REACH * temperature)
    return {token for token in kept if x[token] >= least}


def test_min_p_cuts_among_few_tokens_too() -> None:
    """Three tokens hold all mass, so top-k of 30 cuts none of them."""
    logits = torch.full((1, 40), -50.0, device=DEVICE)
    logits[:, 3], logits[:, 5], logits[:, 1] = 1.0, 0.9, 0.85
    for fields in ({"top_k": 30}, {"top_k": 30, "min_p": 0.3}, {"min_p": 0.3}, {"top_p": 0.9, "min_p": 0.5}):
        params = SamplingParams(**fields, temperature=0.1)
        assert kept_by(logits, params) == [expected(logits[0], params)], fields


ODD_ROWS: dict[str, Tensor] = {
    "normal": randn(1, seed=5)[0],
    "half": randn(1, seed=5)[0].to(HALF).float(),
    "coarse": (randn(1, seed=5)[0] * 2).round() / 2,
    "peaked": torch.where(torch.arange(VOCAB, device=DEVICE) == 4099, 40.0, randn(1)[0]),
    "two": torch.where(torch.arange(VOCAB, device=DEVICE) % 1000 == 7, 1.0, 0.0),
    "steps": -(torch.arange(VOCAB, device=DEVICE) // 40).float(),
    "far": randn(1, scale=1e30)[0],
    "close": 1000 + randn(1, scale=1e-4)[0],
    "tail": torch.where(torch.arange(VOCAB, device=DEVICE) == 60, 0.0, math.log(1.5 / VOCAB) + 0.02 * randn(1)[0]),
    "few": torch.where(torch.arange(VOCAB, device=DEVICE) % 3000 == 1, randn(1)[0], -math.inf),
    # More are equal than can be listed (truncation.LISTED).
    "equal": torch.where(torch.arange(VOCAB, device=DEVICE) < 100, 1.0, 0.0),
}
CUTS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": 300}, {"top_k": 5000}, {"top_p": 0.5}, {"top_p": 0.999},
    {"top_k": 40, "top_p": 0.9, "temperature": 0.6},
    {"top_k": 6000, "top_p": 0.97, "min_p": 0.05, "temperature": 2.0},
    {"top_k": 20, "temperature": 0.01}, {"top_p": 0.9, "temperature": 50.0},
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_ROWS)
def test_what_is_kept_is_what_a_sort_keeps(name: str) -> None:
    """A GPU tests each way to truncate. The interpreter takes half a second for each, and tests two."""
    turn = 1 if DEVICE.type == "cuda" else 5
    for fields in CUTS[list(ODD_ROWS).index(name) % turn :: turn]:
        params = SamplingParams(**fields)
        assert kept_by(ODD_ROWS[name][None], params) == [expected(ODD_ROWS[name], params)], fields


@pytest.mark.parametrize("bad", ["nan", "inf", "mask", "-inf", "a forbidden nan"])
def test_if_nothing_can_be_drawn_only_that_row_has_no_token(bad: str) -> None:
    params = [GREEDY, SamplingParams(), SamplingParams(top_k=4, top_p=0.9, repetition_penalty=1.1)] * 2
    logits, mask = randn(6), torch.full((6, -(-VOCAB // 32)), -1, dtype=torch.int32, device=DEVICE)
    if bad == "mask":
        mask[:3] = 0
    elif bad == "a forbidden nan":
        logits[:3, 33], mask[:, 1] = math.nan, 0
    else:
        logits[:3, slice(None) if bad == "-inf" else 5000] = float(bad)
    out = Draw(logits, params, mask if "mask" in bad or "forbidden" in bad else None).check()
    drawable = bad == "a forbidden nan"
    assert (out.tokens >= 0).tolist() == [drawable] * 3 + [True] * 3
    assert out.logprobs[2 if drawable else 0][:3].isnan().all(), "raw logprobs, and all logprobs"


def test_a_row_is_the_same_to_the_bit_in_any_company() -> None:
    rng = np.random.default_rng(4)
    params, logits = mixed_params(12, rng), randn(12, seed=8)
    params[:4] = [SamplingParams(), GREEDY, SamplingParams(temperature=0.6), SamplingParams(temperature=2.0)]
    draw = Draw(logits, params)
    (whole, _), state = draw.by(sampler.draw.launch), draw.state()
    for row in range(12):
        at = slice(row, row + 1)
        plan = plan_of(params[at])
        assert row >= 4 or not (plan.edits or plan.sorted_tokens or plan.min_p), "drawn by the plain variant"
        alone = sampler.draw.launch(logits[at].clone(), state, draw.lanes[at], draw.positions[at], plan, None)
        assert torch.equal(alone.packed[:, 0], whole.packed[:, row])


def test_the_padding_lane_changes_nothing() -> None:
    params = [SamplingParams(top_k=3, frequency_penalty=0.5), SamplingParams()]
    draw = Draw(randn(2), params)
    state, padding = draw.state(), 2
    logits = torch.cat([draw.logits, torch.full((3, VOCAB), math.nan, device=DEVICE)])
    lanes = torch.cat([draw.lanes, torch.full((3,), padding, device=DEVICE)])
    positions = torch.cat([draw.positions, torch.zeros(3, dtype=torch.int64, device=DEVICE)])
    out = sampler.draw.launch(logits, state, lanes, positions, plan_of(params), None)
    expected, expected_state = draw.by(sampler.draw.twin)
    assert torch.equal(out.tokens[:2], expected.tokens)
    assert torch.equal(state.counts, expected_state.counts)


# Scores.


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 30.0])
def test_scores(dtype: torch.dtype, temperature: float) -> None:
    logits = randn(5).to(dtype)
    targets = torch.tensor([0, VOCAB - 1, 4096, 77, 5], device=DEVICE)
    ours, _ = scoring.score.launch(logits, targets, temperature)
    twin, _ = scoring.score.twin(logits, targets, temperature)
    torch.testing.assert_close(ours, twin, atol=1e-5, rtol=2e-6)
    exact = (logits.double() / temperature).log_softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours, exact.float(), atol=1e-5, rtol=2e-6)


def test_a_score_is_the_logprob_of_the_draw() -> None:
    """The bits are the same as for raw logprobs, and at another temperature, as for untruncated logprobs."""
    logits = randn(4)
    out, _ = Draw(logits, [SamplingParams(logprobs=6, top_k=5, repetition_penalty=1.3)] * 4).by(sampler.draw.launch)
    logprobs, totals = scoring.score.launch(logits, out.tokens)
    assert torch.equal(logprobs, out.logprobs[2])
    ids, tops = scoring.alternatives.launch(logits, 6, totals)
    assert torch.equal(ids, out.top_ids)
    assert torch.equal(tops, out.top_logprobs)
    for temperature in (0.7, 1.9):
        out, _ = Draw(logits, [SamplingParams(temperature=temperature, top_k=5)] * 4).by(sampler.draw.launch)
        assert torch.equal(scoring.score.launch(logits, out.tokens, temperature)[0], out.logprobs[1])


@pytest.mark.parametrize("most", [1, 5, 20, 33])
@pytest.mark.parametrize("vocab", [40, VOCAB])
def test_alternatives(vocab: int, most: int) -> None:
    logits = (randn(3, vocab) * 2).round() / 2
    ids, logprobs = scoring.alternatives.launch(logits, most)
    twin_ids, twin = scoring.alternatives.twin(logits, most)
    assert torch.equal(ids, twin_ids)
    torch.testing.assert_close(logprobs, twin, atol=4e-6, rtol=1e-6)
