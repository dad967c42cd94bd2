"""Helpers that build batches for a Runner by hand, and force preemptions of a Generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from hash_model import hopeful

from fastgen import Generator
from fastgen.engine.features import read_options
from fastgen.engine.host_pages import PageMoves
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.page_moves import PageMover
from fastgen.engine.prompt_scores import ChunkTargets, ScorePlan
from fastgen.engine.runner import Runner
from fastgen.engine.startup import build_runner
from fastgen.model.config import read_config
from fastgen.model.host_tier import HostTier
from fastgen.parallel.group import Group
from fastgen.request import Batch, LaneStart, Prefill, SamplingParams, StepResult

PAGE = 16
PARAMS = [  # of lanes 0, 1 and 2
    SamplingParams(temperature=0.9, top_k=40, logprobs=3),
    SamplingParams(temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.7, min_p=0.01, presence_penalty=0.5, logprobs=1),
]
Said = dict[int, tuple[Any, ...]]
"""The draw of each lane in a step: (token, logprob, untruncated logprob, raw logprob, alternatives)."""


def make_runner(folder: Path, **options: Any) -> Runner:
    """Return a Runner with 8 lanes and 64 pages of 16 tokens, unless options say otherwise."""
    settings: dict[str, Any] = {"max_seqs": 8, "max_step_tokens": 256, "page_size": PAGE, "num_pages": 64, **options}
    model = read_config(folder)
    given = GeneratorOptions(**{"device": "cpu", **settings})
    config = EngineConfig.make(model, read_options(given, model, 1))
    return build_runner(model, config, folder, "auto", Group())


def let_pages_run_out(gen: Generator) -> None:
    """Let the scheduler expect outputs of no length, so that it admits too many sequences and preempts some."""
    gen._loop.scheduler.estimate = hopeful(gen.config).estimate
    gen._loop.scheduler.reset()


def mover(runner: Runner) -> PageMover:
    """Return the runner's feature that moves pages."""
    found = runner.features[PageMoves]
    assert isinstance(found, PageMover)
    return found


def add_host_tier(runner: Runner, host_pages: int) -> HostTier:
    """Give the runner a host tier, which its options have not asked for."""
    tier = HostTier(runner.pool, host_pages)
    runner.features[PageMoves] = PageMover(tier)
    return tier


def start(lane: int, params: SamplingParams, tokens: Sequence[int], prompt_len: int, seed: int = 0) -> LaneStart:
    return LaneStart(lane, params, seed, 0, prompt_len, frozenset((2,)), tuple(tokens) if params.penalized else ())


def table(lane: int, pages: Sequence[int]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return the update that writes the whole page table of a lane."""
    return ((lane, 0, tuple(pages)),)


def run(runner: Runner, batch: Batch, masks: Mapping[int, np.ndarray] | None = None) -> tuple[Said, StepResult]:
    """Run a batch, and return what its lanes drew, and its result. masks: masks of lanes, if the batch is masked; other
    lanes may draw any token."""
    launched = runner.launch(batch)
    if batch.masked:
        words = -(-runner.model.config.vocab_size // 32)
        free = np.full(words, -1, dtype=np.int32)
        runner.sample(launched, np.stack([(masks or {}).get(lane, free) for lane in batch.sampling]))
    result = runner.collect(launched)
    assert runner.lanes.kv_lens.tolist() == runner.lanes.host_kv_lens.tolist()
    tops = [top or None for top in result.top_logprobs or [{}] * len(result.tokens)]
    logprobs = result.logprobs, result.untruncated_logprobs, result.raw_logprobs
    rows = zip(result.tokens, *logprobs, tops, strict=True)
    return dict(zip(batch.sampling, rows, strict=True)), result


def siblings(
    runner: Runner,
    prompt: Sequence[int],
    forked: bool,
    steps: int = 20,
    params: Sequence[SamplingParams] = PARAMS,
    score: ChunkTargets | None = None,
    masks: Mapping[int, np.ndarray] | None = None,
) -> tuple[list[Said], StepResult]:
    """Return what lanes 0, 1 and 2 draw after a prompt in each step, and the result of the step that prefills.

    forked: lanes 1 and 2 are forks of 0 and share its full pages; otherwise each prefills on pages of its own. In the
    same steps lane 3 decodes, lane 4 prefills a chunk, and lane 5 prefills a whole prompt of one token.
    """
    total = len(prompt) + steps + 1
    held = [list(range(10 * lane, 10 * lane + -(-total // PAGE))) for lane in range(3)]
    shared, partial = divmod(len(prompt), PAGE)
    if forked:
        held[1][:shared] = held[2][:shared] = held[0][:shared]
    everyone = [*enumerate(held), (3, [40, 41, 42]), (4, [43]), (5, [44, 45])]
    others = {3: [9, 8, 7], 5: [11]}
    starts = [start(lane, params[lane], prompt, len(prompt), seed=lane + 5) for lane in range(3)]
    starts += [start(lane, params[0], ids, len(ids)) for lane, ids in others.items()]
    run(
        runner,
        Batch(
            prefills=(Prefill(3, 0, tuple(others[3]), sample=True),),
            starts=tuple(starts[3:4]),
            page_updates=tuple(chain.from_iterable(table(lane, pages) for lane, pages in everyone)),
            fresh=tuple(sorted({page for _, pages in everyone for page in pages})),
        ),
    )
    first = Prefill(0, 0, tuple(prompt), sample=True, forks=(1, 2) if forked else ())
    rest = () if forked else tuple(Prefill(lane, 0, tuple(prompt), sample=True) for lane in (1, 2))
    chunks = (Prefill(4, 0, (5, 6, 7, 8), sample=False), first, *rest, Prefill(5, 0, (11,), sample=True))
    copies = tuple((held[0][shared], held[lane][shared]) for lane in (1, 2)) if forked and partial else ()
    batch = Batch(
        decodes=(3,),
        prefills=chunks,
        starts=(*starts[:3], starts[4]),
        masked=masks is not None,
        copies=copies,
        features=() if score is None else (ScorePlan((score,)),),
    )
    said, prefilled = run(runner, batch, masks)
    following = [run(runner, Batch(decodes=(0, 1, 2, 3, 5)))[0] for _ in range(steps)]
    return [said, *following], prefilled


def continued(runner: Runner, prompt: Sequence[int], steps: int, moved: bool) -> list[Said]:
    """Return what lane 1 draws after a prompt whose full pages lane 0 has computed.

    moved: the full pages go to the host tier, are overwritten, and come back to other pages of the pool.
    """
    params, full = PARAMS[1], (len(prompt) - 1) // PAGE
    pages = list(range(-(-(len(prompt) + steps) // PAGE)))
    first = (Prefill(0, 0, tuple(prompt), sample=False),)
    run(runner, Batch(prefills=first, page_updates=table(0, pages), fresh=tuple(pages)))
    rest, loads = [50 + page for page in pages[full:]], ()
    if moved:
        saves = tuple((page, 2 * page + 1) for page in pages[:full])
        over = Prefill(2, 0, tuple(reversed(prompt)), sample=False)
        moves = (PageMoves(saves),)
        run(runner, Batch(prefills=(over,), page_updates=table(2, pages), fresh=tuple(pages), features=moves))
        loads = tuple((slot, 30 - page) for page, slot in saves)
    places = [page for _, page in loads] or pages[:full]
    batch = Batch(
        prefills=(Prefill(1, full * PAGE, tuple(prompt[full * PAGE :]), sample=True),),
        starts=(start(1, params, prompt, len(prompt), seed=3),),
        page_updates=table(1, [*places, *rest]),
        fresh=tuple(rest),
        features=(PageMoves(loads=loads),) if loads else (),
    )
    said = [run(runner, batch)[0]]
    return said + [run(runner, Batch(decodes=(1,)))[0] for _ in range(steps - 1)]
