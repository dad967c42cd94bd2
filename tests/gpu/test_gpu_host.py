"""The host tier and copies of pages on a GPU: whatever its streams do, the result is as if batches ran in order.

The streams are delayed at random, so that a missing wait has an effect.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from handmade import add_host_tier, continued, make_runner, mover, run, start, table
from hash_model import page_moves
from torch import Tensor

from fastgen.engine.host_pages import PageMoves
from fastgen.engine.runner import Runner
from fastgen.engine.step import Launched
from fastgen.model import host_tier
from fastgen.model.host_tier import HostTier
from fastgen.model.loader import resolve
from fastgen.request import Batch, Prefill, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

GREEDY = SamplingParams(temperature=0)
PROMPT = [3 + 7 * at % 50 for at in range(75)]
CYCLES = 20_000_000  # about 10 ms, which is many steps of the bundled model
HOST_PAGES = 12
COLD = list(range(20, 60))  # pages that no lane holds


@contextmanager
def bundled(staging: int = host_tier.STAGING_PAGES, **options: Any) -> Iterator[Runner]:
    """Yield a runner of the bundled model with HOST_PAGES host pages. staging: number of pages of staging memory."""
    runner = make_runner(resolve(None, None), device="cuda:0", max_model_len=256, **options)
    with patch.object(host_tier, "STAGING_PAGES", staging):
        add_host_tier(runner, HOST_PAGES)
    yield runner
    runner.synchronize()


def hold_up(runner: Runner, draw: random.Random) -> None:
    """Delay the next launch on the current stream, on a copy stream, or on none."""
    stream = draw.choice((None, torch.cuda.current_stream(), mover(runner).tier._out, mover(runner).tier._in))
    if stream is not None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(draw.randint(1, CYCLES))


class Expected:
    """The expected contents of the pages and the host pages after the batches so far."""

    def __init__(self, runner: Runner) -> None:
        self.pages = runner.pool.whole.cpu().clone()
        self.host: dict[int, Tensor] = {}

    def follow(self, batch: Batch) -> None:
        moves = page_moves(batch)
        self.host |= {host_page: self.pages[:, :, page].clone() for page, host_page in moves.saves}
        for host_page, page in moves.loads:
            self.pages[:, :, page] = self.host[host_page]
        copied = {target: self.pages[:, :, source].clone() for source, target in batch.copies}
        for page, content in copied.items():
            self.pages[:, :, page] = content


def traffic(draw: random.Random, filled: list[int], before: Batch) -> Batch:
    """Return a batch that saves pages, and overwrites some of them in the same step by loads and copies.

    Like the scheduler, it does not touch pages that the previous step, which may be in flight, copies.
    """
    busy = {page for pair in before.copies for page in pair}
    cold = draw.sample([page for page in COLD if page not in busy], len(COLD) - len(busy))
    saves = tuple(zip(cold, draw.sample(range(HOST_PAGES), draw.randint(0, HOST_PAGES)), strict=False))
    filled = sorted({*filled, *(host_page for _, host_page in saves)})
    at = draw.randint(0, 6)  # the pages that are written begin among those that are saved
    loads = tuple(zip(draw.sample(filled, draw.randint(0, len(filled))), cold[at:], strict=False))
    at += len(loads)
    count = draw.randint(0, 3)
    copies = tuple(zip(cold[-count:] if count else (), cold[at : at + count], strict=True))
    prefills = (Prefill(4, 0, (5, 6, 7), sample=False),) if loads else ()
    return Batch(decodes=(0, 1, 2), prefills=prefills, copies=copies, features=(PageMoves(saves, loads),))


@pytest.mark.parametrize(("dtype", "staging"), [("bfloat16", 64), ("float32", 5), ("bfloat16", 1)])
def test_random_traffic_with_steps_in_flight(dtype: str, staging: int) -> None:
    draw = random.Random(str(staging))
    with bundled(staging, dtype=dtype) as runner, torch.inference_mode():
        runner.pool.whole.normal_()
        expected, flying = Expected(runner), list[Launched]()
        chunks = tuple(Prefill(lane, 0, (9, 8, 7), sample=True) for lane in range(3))
        pages = [entry for lane in range(3) for entry in table(lane, range(6 * lane, 6 * lane + 6))]
        starts = tuple(start(lane, GREEDY, (), 3) for lane in range(3))
        run(runner, Batch(prefills=chunks, starts=starts, page_updates=(*pages, *table(4, [18]))))
        seen, batch = dict.fromkeys(("saves", "loads", "copies"), 0), Batch()
        for _ in range(80):
            batch = traffic(draw, list(expected.host), before=batch)
            hold_up(runner, draw)
            flying.append(runner.launch(batch))
            expected.follow(batch)
            moves = page_moves(batch)
            for name, moved in (("saves", moves.saves), ("loads", moves.loads), ("copies", batch.copies)):
                seen[name] += len(moved)
            if len(flying) > 1:
                runner.collect(flying.pop(0))
        runner.synchronize()
        assert min(seen.values()) > 50
        assert torch.equal(runner.pool.whole[:, :, COLD].cpu(), expected.pages[:, :, COLD])
        for host_page, content in expected.host.items():
            assert torch.equal(mover(runner).tier.pages[host_page].transpose(0, 1), content)


@pytest.mark.parametrize("staging", [64, 1])
def test_a_prefix_from_the_host_is_waited_for(staging: int) -> None:
    with bundled(staging, dtype="bfloat16") as runner:
        expected = continued(runner, PROMPT, 12, moved=False)
        tier, draw = mover(runner).tier, random.Random(0)
        assert tier is not None
        for _ in range(5):
            for name in ("save", "load"):
                setattr(tier, name, late(runner, getattr(HostTier, name), draw))
            assert continued(runner, PROMPT, 12, moved=True) == expected


def late(runner: Runner, method: Any, draw: random.Random) -> Any:
    def wrapped(pairs: Any) -> Any:
        hold_up(runner, draw)
        return method(mover(runner).tier, pairs)

    return wrapped


def test_pinned_memory_is_given_back() -> None:
    runner = make_runner(resolve(None, None), device="cuda:0", host_cache_gb=0.05)
    tier = mover(runner).tier
    memory = tier.pages
    assert len(memory) == runner.config.host_pages
    assert memory.is_pinned()
    tier.save([(1, 2)])
    del tier, runner.features[PageMoves]
    gc.collect()
    assert not memory.is_pinned()
