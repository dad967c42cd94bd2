"""scripts/hybrid: Gated DeltaNet with the same bits in prefills and decodes, and the policy for kept states."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "hybrid"))
import check_reference
import states
from reference import BLOCK, Layer, add_rows, invert, new_lane

HALF = torch.float16  # Triton's interpreter truncates to bfloat16


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def test_a_layer_and_a_model_agree_with_transformers() -> None:
    for errors in (check_reference.compare_layers(range(2)), check_reference.compare_models(range(1))):
        assert errors["float32"] < 1e-5
        assert 1e-4 < errors["bfloat16"] < errors["bfloat16_transformers"]


def test_random_schedules_change_no_bit() -> None:
    counts = check_reference.check_schedules(6)
    assert counts["schedules"] == 12
    assert counts["different"] == 0
    assert min(counts[name] for name in ("prefill", "decode", "draft", "rejected", "resume")) > 10


def test_a_row_of_the_inverse_needs_no_later_row() -> None:
    lower = torch.randn(3, BLOCK, BLOCK).tril(-1) / 8
    want = torch.linalg.inv(torch.eye(BLOCK, dtype=torch.float64) + lower.double())
    torch.testing.assert_close(invert(lower).double(), want, rtol=1e-4, atol=1e-4)
    for row in (0, 15, 16, 40):
        part = lower.clone()
        part[:, row + 1 :] = 7
        assert torch.equal(invert(part.tril(-1))[:, : row + 1], invert(lower)[:, : row + 1])


def test_a_full_block_refuses_drafts_and_a_state_is_kept_at_borders() -> None:
    layer = Layer(check_reference.random_layer(0), torch.float32)
    lane, x = layer.new_lane(), check_reference.random_tokens(0, 70)
    layer.forward(x[:60], lane)
    with pytest.raises(ValueError, match="drafts end at the block border: 5 rows after 60 of 64"):
        layer.draft(x[60:65], lane, len)
    with pytest.raises(ValueError, match="at a block border only; the block has 60 tokens"):
        lane.without_rows()


@pytest.fixture
def _products_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter as tensor cores sum them: 16 summands at a time, 8 of tf32."""
    np, interpreter = pytest.importorskip("numpy"), pytest.importorskip("triton.runtime.interpreter")

    def dot(_: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        step, total = 8 if a.data.dtype == np.float32 else 16, acc.data
        for first in range(0, a.data.shape[1], step):
            part = slice(first, first + step)
            exact = a.data[:, part].astype(np.float64) @ b.data[part].astype(np.float64)
            total = (total + exact).astype(np.float32)
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="on a GPU, scripts/hybrid/measure.py checks more")
@pytest.mark.usefixtures("_products_in_steps")
@pytest.mark.long
def test_prefills_decodes_and_drafts_of_the_kernels_have_the_same_bits() -> None:
    import schedules

    inputs = schedules.random_inputs(150, 2, 1, "cpu", half=HALF)
    want, lanes = schedules.whole(inputs)
    assert lanes.count.tolist() == [150 % BLOCK]
    reference = schedules.reference_outputs(inputs, torch.float32)
    assert check_reference.error(want, reference) < 1e-3
    for seed in range(3):
        assert torch.equal(schedules.by_schedule(inputs, seed), want)


def test_rows_that_do_not_exist_are_not_read() -> None:
    lane = new_lane(2, 128, 1)  # its rows are NaN
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 5, 2, 128), dim=-1)
    assert add_rows(lane, q, k, v, -torch.rand(5, 2), torch.rand(5, 2), torch.float32).isfinite().all()


def test_kept_states_are_those_of_a_plain_model() -> None:
    """Random conversations over shared prefixes; without eviction, a match is the longest common one that was kept."""
    choice = random.Random(0)
    large, small = states.StateCache(10**9, 10, 25), states.StateCache(1500, 10, 25)
    prefixes = [[choice.randrange(9) for _ in range(200)] for _ in range(3)]
    pages: set[tuple[int, ...]] = set()
    kept: set[tuple[int, ...]] = set()
    hits = 0
    for _ in range(300):
        tokens = choice.choice([*prefixes, *map(list, kept)]) + [
            choice.randrange(9) for _ in range(choice.randrange(150))
        ]
        borders = range(states.PAGE, len(tokens), states.PAGE)
        want = [max((at for at in borders if tuple(tokens[:at]) in each), default=0) for each in (pages, kept)]
        assert large.match(tokens) == tuple(want)
        for cache in (large, small):
            match = cache.match(tokens)
            at = cache.borders_of_prompt(len(tokens), *match)
            cache.add(tokens, at)
            cache.check()
            hits += cache is small and match[1] > 0
            if cache is large:
                pages |= {tuple(tokens[:each]) for each in range(states.PAGE, len(tokens) + 1, states.PAGE)}
                kept |= {tuple(tokens[:each]) for each in at}
    assert 30 < hits < 300
    assert small.used > 1400
    large.drop()
    assert large.match(tokens) == (0, 0)
