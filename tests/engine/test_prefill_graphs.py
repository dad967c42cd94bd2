"""PrefillGraphs: steps of few tokens give the same bits in pieces as kernel by kernel.

Without a GPU, a piece is called where its graph would be replayed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from called_graphs import Called, capturable
from conftest import Checkpoint, check_idle, random_ids
from handmade import make_runner, run, start, table
from hash_model import hopeful, num_tokens
from test_schedules import answers
from test_sharing import REQUESTS, each_apart, host_gb

from fastgen import Generator, SamplingParams
from fastgen.engine.cuda_graphs import PREFILL_SIZES, prefill_sizes
from fastgen.engine.pages import PageMoves
from fastgen.engine.prompt_scores import ScorePlan
from fastgen.engine.runner import Runner
from fastgen.engine.warm_up import capture
from fastgen.kernels.rope import SlotMapping
from fastgen.model.linear import ROW_TILE
from fastgen.model.transformer import StepPart
from fastgen.request import Batch, Prefill

LAYERS = 3


def in_pieces(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run steps in pieces from now on, and return the list to which (size, layer) of each piece is appended."""
    capturable(monkeypatch)
    capture(runner, [ROW_TILE])
    assert runner.prefill_graphs is not None
    assert isinstance(runner.prefill_graphs.graphs, Called)
    return runner.prefill_graphs.graphs.ran


def test_sizes_rise_and_fill_tiles() -> None:
    assert sorted(set(PREFILL_SIZES)) == list(PREFILL_SIZES)
    assert all(size % ROW_TILE == 0 for size in PREFILL_SIZES)
    assert prefill_sizes(PREFILL_SIZES[0] - 1) == []
    assert prefill_sizes(PREFILL_SIZES[1]) == list(PREFILL_SIZES[:2])
    assert prefill_sizes(4096) == list(PREFILL_SIZES)


NAMES = "llama", "mistral", "qwen2", "qwen3", "ministral3", "granite", "olmo3", "exaone4", "arcee"


@pytest.mark.parametrize(
    ("family", "budget"), [(name, 50 if name in ("mistral", "olmo3") else 32) for name in NAMES], indirect=["family"]
)
def test_pieces_change_no_bit_in_any_schedule(budget: int, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive at random, with few pages and a small host tier; steps of more than 32 tokens have no pieces."""
    draw, plain = random.Random(budget), each_apart(family)  # computed kernel by kernel
    options = {"page_size": 8, "num_pages": 24, "max_seqs": ROW_TILE, "max_step_tokens": budget}
    with Generator(family, **options, host_cache_gb=host_gb(family, 40, 8)) as gen:  # type: ignore[arg-type]
        gen._loop.scheduler = hopeful(gen.config)
        ran, seen = in_pieces(gen._runner, monkeypatch), []
        launch = gen._runner.launch

        def noted(batch: Batch) -> Any:
            before = len(ran)
            launched = launch(batch)
            if batch.prefills:
                seen.append((batch, ran[before:]))
            return launched

        monkeypatch.setattr(gen._runner, "launch", noted)
        asked: dict[Any, int] = {}
        said: dict[Any, list[list[Any]]] = {}
        waiting = draw.sample(range(len(REQUESTS)), len(REQUESTS)) + draw.sample(range(len(REQUESTS)), 5)
        while waiting or gen.unfinished:
            for number in [waiting.pop() for _ in range(min(len(waiting), draw.choice((0, 0, 1, 2))))]:
                asked[gen.add(*REQUESTS[number])] = number
            for event in gen.step():
                lists = said.setdefault((event.id, event.index), [[], [], []])
                for values, new in zip(lists, (event.token_ids, event.logprobs, event.raw_logprobs), strict=True):
                    values += new
        check_idle(gen)
        for id, number in asked.items():
            for completion in plain[number][0]:
                expected = [completion.token_ids, completion.logprobs, completion.raw_logprobs]
                assert said[id, completion.index] == expected
        assert answers(gen, REQUESTS) == plain
        assert min(gen.stats.preemptions, gen.stats.pages_loaded, gen.stats.cached_tokens) > 0
    for batch, numbers in seen:
        size = next((size for size in (16, 32) if num_tokens(batch) <= size), None)
        assert numbers == ([] if size is None else [(size, layer) for layer in range(LAYERS)])
    few = [batch for batch, numbers in seen if numbers]
    assert (len(few) < len(seen)) == (budget > 32)
    assert {num_tokens(batch) > 16 for batch in few} == {False, True}
    assert any(batch.decodes for batch in few)
    assert any(moves.loads for batch in few if (moves := batch.find(PageMoves)))
    assert any(batch.find(ScorePlan) for batch in few)
    assert any(chunk.forks for batch in few for chunk in batch.prefills)
    if budget == 32:
        assert any(not batch.sampling for batch in few), "with parts of prompts, the last layer ends with their keys"


def test_padding_has_no_slot(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So padding is written nowhere. The slots of a longer step must not remain after the rows of a shorter one."""
    runner = make_runner(llama)
    in_pieces(runner, monkeypatch)
    mapping, seen = runner.model.slot_mapping, []

    def noted(*arguments: Any) -> SlotMapping:
        seen.append(mapping(*arguments))
        return seen[-1]

    for length in (16, 5):
        first = Prefill(0, 0, tuple(random_ids(length)), sample=True)
        begun = (start(0, SamplingParams(temperature=0), (), length),)
        monkeypatch.setattr(runner.model, "slot_mapping", noted)
        seen.clear()
        run(runner, Batch(prefills=(first,), starts=begun, page_updates=table(0, [4])))
        own, *pieces = seen
        assert own.real == length
        assert len(pieces) == LAYERS
        for piece in pieces:
            assert piece.slots.tolist() == [64 + at for at in range(length)] + [-1] * (16 - length)
            assert piece.positions.tolist() == [*range(length)] + [0] * (16 - length)


def test_a_layer_that_is_loaded_is_waited_for_before_its_piece(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama, host_cache_gb=0.01)
    ran = in_pieces(runner, monkeypatch)
    prompt, order = random_ids(40), []
    pages = (*table(0, [0, 1, 2]), *table(1, [5, 6, 2]))
    run(runner, Batch(prefills=(Prefill(0, 0, tuple(prompt), sample=False),), page_updates=pages))
    run(runner, Batch(prefills=(Prefill(0, 0, (5,), sample=False),), features=(PageMoves(saves=((0, 3), (1, 4))),)))
    ran.clear()
    monkeypatch.setattr(StepPart, "wait", lambda self, layer: order.append((layer, len(ran))))
    last = Prefill(1, 32, tuple(prompt[32:]), sample=False)
    run(runner, Batch(prefills=(last,), features=(PageMoves(loads=((3, 5), (4, 6))),)))
    assert order == [(layer, layer) for layer in range(LAYERS)]
    assert len(ran) == LAYERS


def test_they_end_with_the_group(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama)
    in_pieces(runner, monkeypatch)
    assert runner.prefill_graphs is not None
    assert runner.prefill_graphs.graphs in [held() for held in runner.group._graphs]


def test_steps_too_small_for_pieces_have_none(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama, max_step_tokens=15)
    capturable(monkeypatch)
    capture(runner, [8])
    assert runner.prefill_graphs is None
    first = Prefill(0, 0, (5, 6, 7), sample=True)
    said, _ = run(runner, Batch(prefills=(first,), starts=(start(0, SamplingParams(), (), 3),)))
    assert 0 in said


RANK = """
import sys
import torch.distributed as dist
from fastgen.engine import halves, startup, warm_up
from fastgen import Generator
from fastgen.model.attention.cpu import CpuAttention
from fastgen.model.transformer import Transformer
from called_graphs import Called
from gathering import cut_steps
from test_sharing import REQUESTS as ALL

cut_steps()

REQUESTS = ALL[1:6]
rank, folder, store = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
halves.CUT_TOKENS, halves.CUT_MULTIPLE = 20, 8
warm_up.Graphs = sys.modules["fastgen.engine.cuda_graphs"].Graphs = Called
CpuAttention.capturable = True
forward, parts = Transformer.forward, []
Transformer.forward = lambda self, steps, *rest: parts.append(len(steps)) or forward(self, steps, *rest)
assemble, runners = startup.make_runner, []

def captured(*arguments):
    made = assemble(*arguments)
    warm_up.capture(made, [16])
    runners.append(made)
    return made

found = []
for make in (assemble, captured):
    parts.clear()
    startup.make_runner = make
    options = {"page_size": 8, "num_pages": 60, "max_seqs": 16, "max_step_tokens": 32, "seed": 3}
    with Generator(folder, device="cpu", tp_group=dist.group.WORLD, **options) as gen:
        outputs = gen.generate(*map(list, zip(*REQUESTS)))
        outputs += [gen.generate(*request)[0] for request in REQUESTS]
    found.append([(output.completions, (output.prompt_logprobs or [])[1:]) for output in outputs])
assert found[0] == found[1]
assert parts.count(2) > 0, "steps are cut in two"
assert len(runners[0].prefill_graphs.graphs.ran) > 3, "some have pieces"
"""


@pytest.mark.long
def test_pieces_change_no_bit_with_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Steps that are cut in two have no pieces."""
    folder = checkpoint("Llama", attention_bias=True, mlp_bias=True)
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent.parent)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder), str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
