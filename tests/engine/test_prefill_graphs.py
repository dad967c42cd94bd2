"""PrefillGraphs: steps with prefills give the same bits in graphs as kernel by kernel.

Without a GPU, the step is called where its graph would be replayed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from called_graphs import Called, capturable
from conftest import FEW, Checkpoint, check_idle, random_ids
from handmade import make_runner, mover, run, start, table
from hash_model import hopeful, num_tokens
from test_schedules import answers
from test_sharing import REQUESTS, each_apart, host_gb

from fastgen import Generator, SamplingParams
from fastgen.engine.cuda_graphs import PREFILL_SIZES, PREFILL_TOKENS, prefill_sizes
from fastgen.engine.host_pages import PageMoves
from fastgen.engine.prompt_scores import ScorePlan
from fastgen.engine.runner import Runner
from fastgen.engine.uploads import StepArrays, StepMemory
from fastgen.engine.warm_up import capture, captured_prefills
from fastgen.model.linear import ROW_TILE
from fastgen.request import Batch, Prefill


def in_graphs(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Run steps with prefills in `Called` graphs from now on. Return the lists to which the number of tokens, and the
    number of draws, of each step is appended."""
    capturable(monkeypatch)
    capture(runner, [ROW_TILE])
    graphs = runner.prefill_graphs
    assert graphs is not None
    assert isinstance(graphs.layers[False], Called)
    assert isinstance(graphs.ends, Called)
    return graphs.layers[False].ran, graphs.ends.ran


def test_sizes_rise_and_fill_tiles() -> None:
    assert sorted(set(PREFILL_SIZES)) == list(PREFILL_SIZES)
    assert all(size % ROW_TILE == 0 for size in PREFILL_SIZES)
    assert prefill_sizes(PREFILL_SIZES[0] - 1) == []
    assert prefill_sizes(PREFILL_SIZES[1]) == list(PREFILL_SIZES[:2])
    assert prefill_sizes(8192) == list(PREFILL_SIZES)
    assert all(size % 128 == 0 for size in PREFILL_SIZES if size > 256), "whole tiles of the kernels for many tokens"


NAMES = "llama", "mistral", "qwen2", "qwen3", "ministral3", "granite", "olmo3", "exaone4", "arcee"


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        pytest.param(name, 50 if name in ("mistral", "olmo3") else 32, marks=() if name in FEW else pytest.mark.long)
        for name in NAMES
    ],
    indirect=["family"],
)
def test_graphs_change_no_bit_in_any_schedule(budget: int, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive at random, with few pages and a small host tier; steps of more than 32 tokens have no graphs."""
    draw, plain = random.Random(budget), each_apart(family)  # computed kernel by kernel
    options = {"page_size": 8, "num_pages": 24, "max_seqs": ROW_TILE, "max_step_tokens": budget}
    with Generator(family, **options, host_cache_gb=host_gb(family, 40, 8)) as gen:  # type: ignore[arg-type]
        gen._loop.scheduler = hopeful(gen.config)
        (ran, drawn), seen = in_graphs(gen._runner, monkeypatch), []
        launch = gen._runner.launch

        def noted(batch: Batch) -> Any:
            before = len(ran), len(drawn)
            launched = launch(batch)
            if batch.prefills:
                seen.append((batch, ran[before[0] :], drawn[before[1] :]))
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
    for batch, sizes, draws in seen:
        size = next((size for size in (16, 32) if num_tokens(batch) <= size), None)
        assert sizes == ([] if size is None else [size])
        assert draws == ([ROW_TILE] if size and batch.sampling and not batch.find(ScorePlan) else [])
    few = [batch for batch, sizes, _ in seen if sizes]
    assert (len(few) < len(seen)) == (budget > 32)
    assert {num_tokens(batch) > 16 for batch in few} == {False, True}
    assert any(batch.decodes for batch in few)
    assert any(moves.loads for batch in few if (moves := batch.find(PageMoves)))
    assert any(batch.find(ScorePlan) for batch in few)
    assert any(chunk.forks for batch in few for chunk in batch.prefills)
    if budget == 32:
        assert any(not batch.sampling for batch in few), "with parts of prompts, a step ends with the keys"


def test_padding_has_no_slot_and_no_lane(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So padding is written nowhere. What a longer step has sent must not remain behind a shorter one's."""
    runner = make_runner(llama)
    in_graphs(runner, monkeypatch)
    graphs, spare = runner.prefill_graphs, runner.lanes.padding
    assert graphs is not None
    for length in (16, 5):
        chunks = tuple(
            Prefill(lane, 0, tuple(random_ids(length // 2)), sample=True) for lane in range(1 + length // 16)
        )
        begun = tuple(start(chunk.lane, SamplingParams(temperature=0), (), length) for chunk in chunks)
        updates = tuple(entry for chunk in chunks for entry in table(chunk.lane, [4 + chunk.lane]))
        run(runner, Batch(prefills=chunks, starts=begun, page_updates=updates))
        sent, _ = graphs._memory.tensors(16)
        count, tokens = len(chunks), sum(len(chunk.tokens) for chunk in chunks)
        assert sent.slots[tokens:].tolist() == [-1] * (16 - tokens)
        assert sent.positions[tokens:].tolist() == sent.ids[tokens:].tolist() == [0] * (16 - tokens)
        assert sent.lanes[count:].tolist() == [spare] * (spare - count)
        assert not sent.kv_lens[count:].any()
        for draws in (sent.rows, sent.sources, sent.ends):
            assert set(draws[count:].tolist()) == {int(draws[0])}, "the first draw again"


def test_a_step_without_chunks_sends_lists_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of a list has counters as well as the number of its entries, so that no number of it may remain from
    what the memory held before."""
    attention = SimpleNamespace(list_sizes=lambda tokens: [256 + tokens])
    memory = StepMemory(3, cast(Any, attention), [16], torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), 255, **options))
    memory.send(StepArrays.empty(16), [])
    _, (sent,) = memory.tensors(16)
    assert not sent.any()


def test_decodes_draw_and_embed_their_last_tokens(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that decodes has its last token from the device, whichever row it was in before."""
    runner, prompts = make_runner(llama), [random_ids(7), random_ids(9)]
    plain = [run(runner, batch)[0] for batch in decoding_steps(prompts)]
    runner.clear_lanes()
    sizes, draws = in_graphs(runner, monkeypatch)
    assert [run(runner, batch)[0] for batch in decoding_steps(prompts)] == plain
    assert (sizes, draws) == ([16, 16, 16], [16, 16, 16])


def decoding_steps(prompts: list[list[int]]) -> list[Batch]:
    """Return a step that prefills, and two in which these lanes decode in another order while others prefill."""
    first = [Prefill(lane, 0, tuple(prompt), sample=True) for lane, prompt in enumerate(prompts)]
    begun = tuple(start(chunk.lane, SamplingParams(seed=chunk.lane), (), len(chunk.tokens)) for chunk in first)
    pages = tuple(entry for lane in range(4) for entry in table(lane, [2 * lane, 2 * lane + 1]))
    others = [Prefill(lane, 0, (5, 6, lane), sample=True) for lane in (2, 3)]
    return [
        Batch(prefills=tuple(first), starts=begun, page_updates=pages),
        *(
            Batch(decodes=order, prefills=(other,), starts=(start(other.lane, SamplingParams(seed=9), (), 3),))
            for order, other in zip(((1, 0), (0, 1)), others, strict=True)
        ),
    ]


def test_loads_are_waited_for_before_the_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama, host_cache_gb=0.01)
    ran, _ = in_graphs(runner, monkeypatch)
    prompt, order = random_ids(40), []
    pages = (*table(0, [0, 1, 2]), *table(1, [5, 6, 2]))
    run(runner, Batch(prefills=(Prefill(0, 0, tuple(prompt), sample=False),), page_updates=pages))
    run(runner, Batch(prefills=(Prefill(0, 0, (5,), sample=False),), features=(PageMoves(saves=((0, 3), (1, 4))),)))
    ran.clear()
    events = {layer: SimpleNamespace(wait=lambda layer=layer: order.append((layer, len(ran)))) for layer in (0, 2)}
    tier = mover(runner).tier
    load = tier.load
    monkeypatch.setattr(tier, "load", lambda pairs: load(pairs) or events)
    last = Prefill(1, 32, tuple(prompt[32:]), sample=False)
    run(runner, Batch(prefills=(last,), features=(PageMoves(loads=((3, 5), (4, 6))),)))
    assert order == [(0, 0), (2, 0)]
    assert ran == [16]


def test_they_end_with_the_group(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, registered = make_runner(llama), []
    monkeypatch.setattr(runner.group, "register_graphs", registered.append)
    in_graphs(runner, monkeypatch)
    graphs = runner.prefill_graphs
    assert graphs is not None
    assert all(part in registered for part in (*graphs.layers.values(), graphs.ends))


def test_an_engine_of_small_steps_has_none(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama, max_step_tokens=15)
    capturable(monkeypatch)
    capture(runner, [8])
    assert runner.prefill_graphs is None
    first = Prefill(0, 0, (5, 6, 7), sample=True)
    said, _ = run(runner, Batch(prefills=(first,), starts=(start(0, SamplingParams(), (), 3),)))
    assert 0 in said


def test_steps_that_are_cut_in_two_have_none(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama, max_step_tokens=256)
    monkeypatch.setattr("fastgen.engine.halves.CUT_TOKENS", 192)
    assert captured_prefills(runner) == [16, 32, 64, 96, 128, 192, 256]
    runner.group.exchange = cast(Any, object())
    assert captured_prefills(runner) == [16, 32, 64, 96, 128]


def test_long_steps_have_them_if_the_model_is_small(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(llama, max_step_tokens=8192)
    assert captured_prefills(runner)[-1] == 8192
    layers, size = runner.model.config.num_layers, runner.model.config.num_parameters
    monkeypatch.setattr("fastgen.engine.warm_up.LAUNCH_SECONDS", 3000 * 2 * size / (6e14 * layers))
    assert captured_prefills(runner)[-1] == 2816
    monkeypatch.setattr("fastgen.engine.warm_up.LAUNCH_SECONDS", 0.0)
    assert captured_prefills(runner)[-1] == PREFILL_TOKENS == 2304


def test_with_flash_attn_only_steps_of_few_tokens_have_them(llama: Path) -> None:
    runner = make_runner(llama, max_step_tokens=512)
    assert captured_prefills(runner)[-1] == 512
    runner.config = replace(runner.config, attention="flash")
    assert captured_prefills(runner)[-1] == 256


def test_a_step_may_have_more_draws_than_tokens(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes of forks are sent as well, and rows of padding repeat the first draw."""
    request = (random_ids(9), SamplingParams(n=21, seed=4, max_tokens=3, ignore_eos=True))
    with Generator(llama, max_seqs=28, max_step_tokens=28, prefix_cache=False) as gen:
        plain = answers(gen, [request])
        capturable(monkeypatch)
        capture(gen._runner)
        graphs = gen._runner.prefill_graphs
        assert graphs is not None
        assert isinstance(graphs.layers[False], Called)
        assert isinstance(graphs.ends, Called)
        assert answers(gen, [request]) == plain
        assert (graphs.layers[False].ran, graphs.ends.ran) == ([16], [24])


RANK = """
import sys
import torch.distributed as dist
from fastgen.engine import halves, startup, warm_up
from fastgen import Generator
from fastgen.model.transformer import Transformer
import called_graphs
from gathering import cut_steps
from test_sharing import REQUESTS as ALL

cut_steps()

REQUESTS = ALL[1:6]
rank, folder, store = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
halves.CUT_TOKENS, halves.CUT_MULTIPLE = 20, 8
import pytest
called_graphs.capturable(pytest.MonkeyPatch())
run_layers, parts = Transformer.run_layers, []
Transformer.run_layers = lambda self, steps, *rest: parts.append(len(steps)) or run_layers(self, steps, *rest)
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
assert len(runners[0].prefill_graphs.layers[False].ran) > 3, "some are in graphs"
"""


@pytest.mark.long
def test_graphs_change_no_bit_with_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Steps that are cut in two are launched kernel by kernel."""
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
