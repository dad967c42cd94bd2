"""CUDA graphs, and decoding from the state of the lanes.

Without a GPU, the step is called where a graph would be replayed. Everything except the capture is real.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from called_graphs import Called, capturable
from conftest import FEW, Script, check_idle, random_ids
from drafting import adversary

from fastgen import Generator, SamplingParams
from fastgen.device.pinned import upload
from fastgen.engine.cuda_graphs import batch_sizes, shared_sizes
from fastgen.engine.warm_up import capture
from fastgen.model.attention.shared import SharedPrefixes
from fastgen.model.linear import ROW_TILE
from fastgen.speculation.drafting import Drafting
from fastgen.speculation.options import Speculation
from fastgen.speculation.planning import DraftPlan

PROMPTS = [random_ids(length) for length in (1, 2, 40, 90, 17)]


@pytest.mark.parametrize("most", [1, 2, 5, 7, 8, 9, 33, 100, 256, 300, 384, 385, 1000, 1024])
def test_batch_sizes_rise_to_the_largest_and_lie_close(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(small < large for small, large in pairwise(sizes))
    assert all(large - small <= max(1, small / 2) for small, large in pairwise(sizes))
    assert len(sizes) <= 40
    shared = shared_sizes(sizes)
    assert set(shared) <= set(sizes)
    assert shared[-1] == most
    assert all(large <= max(4, 2 * small) for small, large in pairwise(shared))


def with_graphs(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decode with `Called` graphs from now on, and return the list to which the size of each decode is appended."""
    runner = gen._runner
    capturable(monkeypatch)
    # A multiple of ROW_TILE rows, as without graphs: other sizes would round differently on the CPU.
    capture(runner, [ROW_TILE, 2 * ROW_TILE])
    graphs = runner.graphs[False]
    assert isinstance(graphs, Called)
    return graphs.ran


@pytest.mark.parametrize("family", FEW, indirect=True)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=20, seed=1, top_p=0.9, frequency_penalty=0.5, logprobs=2, n=3),
    ],
)
def test_decoding_from_the_lanes_gives_the_same_bits(
    family: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_seqs": 2 * ROW_TILE, "max_step_tokens": 48, "page_size": 16, "num_pages": 40, "speculate": False}
    with Generator(family, **options) as gen:  # type: ignore[arg-type]
        expected = [output.completions for output in gen.generate(PROMPTS, params)]
        ran = with_graphs(gen, monkeypatch)
        assert [output.completions for output in gen.generate(PROMPTS, params)] == expected
        assert ran
        check_idle(gen)
        gen._runner.clear_lanes()


@pytest.mark.parametrize("lanes", [1, 3, 5])
def test_speculative_steps_from_graphs_give_the_same_bits(
    lanes: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes above the number of lanes and rows without a draft are padding."""
    prompts, params = PROMPTS[:lanes], SamplingParams(max_tokens=30, seed=5, ignore_eos=True, logprobs=1)
    with Generator(llama, page_size=16, speculate=False) as gen:
        outputs = gen.generate(prompts, params)
    adversary(monkeypatch, outputs, gen.model_config.vocab_size)
    options = Speculation(max_draft=15, max_rows=128, row_cost=0.0, history_tokens=0)
    with Generator(llama, max_seqs=8, page_size=16, speculate=options) as gen:
        runner = gen._runner
        capturable(monkeypatch)
        capture(runner, None, [])
        runner.graphs[False].keys = [4, 8]  # as in `with_graphs`
        drafting = runner.features[DraftPlan]
        assert isinstance(drafting, Drafting)
        assert isinstance(drafting.graphs, Called)
        runner.pool.keys[:, :-1].fill_(7)
        found = gen.generate(prompts, params)
        assert [output.completions for output in found] == [output.completions for output in outputs]
        assert lanes in drafting.graphs.ran
        assert gen.stats.drafted > gen.stats.accepted > 5 * lanes
        check_idle(gen)


def test_a_mask_is_asked_between_the_forward_and_the_sampler(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = [9, 8, 7, 6, 5]
    masked = SamplingParams(max_tokens=5, mask=Script(script), ignore_eos=True)
    free = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with Generator(llama, max_seqs=ROW_TILE, page_size=16, speculate=False) as gen:
        expected = gen.generate(PROMPTS[:2], free)
        ran = with_graphs(gen, monkeypatch)
        outputs = gen.generate([*PROMPTS[:2], PROMPTS[3]], [free, free, masked])
    assert [output.completions for output in outputs[:2]] == [output.completions for output in expected]
    assert outputs[2].completions[0].token_ids == script
    assert len(ran) >= 8


def test_padding_lanes_write_only_to_the_spare_page(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Generator(llama, max_seqs=ROW_TILE, page_size=16, num_pages=6) as gen:
        with_graphs(gen, monkeypatch)
        runner = gen._runner
        runner.pool.keys.fill_(7)
        with torch.inference_mode():
            runner.lanes.input.lanes.fill_(ROW_TILE)
            runner.decode_body(ROW_TILE)
        assert bool((runner.pool.keys[:, :-1] == 7).all())
        assert bool((runner.pool.keys[:, -1] != 7).any())
        assert runner.lanes.kv_lens.tolist() == [0] * (ROW_TILE + 1)


def test_the_same_lanes_may_come_back_in_a_step_of_another_size(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five lanes without shared keys run in a step of size 5, and later, with shared keys, in a step of size 8.

    The other three rows of that step must be padding: lanes that ended long ago would write to pages of others.
    """
    shares = [False]
    capturable(monkeypatch)
    monkeypatch.setattr(SharedPrefixes, "find", lambda *_: shares[0])
    with Generator(llama, max_seqs=8, max_model_len=128, page_size=16, seed=0, num_pages=30, speculate=False) as gen:
        runner = gen._runner
        runner.prefixes = SharedPrefixes(runner.pool, 1, None, 8, 1)
        capture(runner)
        plain, shared = runner.graphs[False], runner.graphs[True]
        assert isinstance(plain, Called)
        assert isinstance(shared, Called)
        for count in (8, 5):
            gen.generate([random_ids(20)] * count, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        shares[0] = True
        # After a step without decodes, shared prefixes are looked for again.
        gen.generate([random_ids(9)], SamplingParams(max_tokens=1, ignore_eos=True))
        seen = []
        monkeypatch.setattr(shared, "_step", lambda size: seen.append(runner.lanes.input.lanes[:size].tolist()))
        gen.generate([random_ids(20)] * 5, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert plain.ran[-2:] == [5, 5]
    assert shared.ran[-2:] == [8, 8]
    assert seen[-1][5:] == [8, 8, 8], "the padding lane"


def test_lanes_are_sent_when_they_change(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A steady decode sends nothing about lanes."""
    with Generator(llama, max_seqs=ROW_TILE, page_size=64, speculate=False) as gen:
        with_graphs(gen, monkeypatch)
        sent: list[np.ndarray] = []
        monkeypatch.setattr(
            "fastgen.engine.step.upload", lambda array, device: sent.append(array) or upload(array, device)
        )
        gen.generate(PROMPTS[:2], SamplingParams(max_tokens=30, ignore_eos=True, temperature=0))
        assert len(sent) <= 6, [len(array) for array in sent]
