"""model/host_tier.py on the CPU, where it runs without streams."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from conftest import random_ids
from handmade import add_host_tier, continued, make_runner, run, table

from fastgen.device import pinned_memory
from fastgen.engine.host_pages import PageMoves
from fastgen.model import host_tier
from fastgen.model.host_tier import GROUPS, HostTier
from fastgen.model.kv_pool import KVPool
from fastgen.request import Batch, Prefill

CPU = torch.device("cpu")


def new_pool(layers: int = 6, pages: int = 20) -> KVPool:
    pool = KVPool(layers, pages, 2, 4, 8, torch.float32, CPU)
    pool.whole.copy_(torch.randn(pool.whole.shape, generator=torch.Generator().manual_seed(0)))
    return pool


@pytest.mark.parametrize(("limit", "value"), [("STAGING_PAGES", 1), ("STAGING_PAGES", 3), ("STAGING_BYTES", 1)])
@pytest.mark.parametrize("layers", [1, 3, GROUPS, 6])
def test_random_saves_and_loads_equal_plain_copies(
    layers: int, limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, limit, value)
    pool, draw = new_pool(layers), random.Random(layers)
    tier = HostTier(pool, 9)
    assert tier.pages.is_contiguous()
    assert tier.pages.data_ptr() % pinned_memory.ALIGNMENT == 0
    pages, slots = pool.whole.clone(), {}
    for _ in range(40):
        saves = list(zip(draw.sample(range(20), 6), draw.sample(range(9), 6), strict=True))[: draw.randint(1, 6)]
        tier.save(saves)
        slots |= {slot: pages[:, :, page].clone() for page, slot in saves}
        overwritten = [page for page, _ in saves]
        pool.wipe(torch.tensor(overwritten))
        pages[1][:, overwritten] = 0
        count = draw.randint(1, len(slots))
        loads = list(zip(draw.sample(sorted(slots), count), draw.sample(range(20), count), strict=True))
        assert not tier.load(loads)  # they are complete
        for slot, page in loads:
            pages[:, :, page] = slots[slot]
        assert torch.equal(pool.whole, pages)
    for slot, page in slots.items():
        assert torch.equal(tier.pages[slot].transpose(0, 1), page)


def test_too_little_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"host tier takes .* GB of the host's memory.*lower host_cache_gb"):
        HostTier(new_pool(), 10**13)
    monkeypatch.setattr(pinned_memory, "_free_memory", lambda: 1e6)
    with pytest.raises(ValueError, match=r"takes 3\.1 GB of the host's memory, of which 0\.0 GB are free"):
        HostTier(new_pool(), 10**6)


# In steps.


class Late:
    """The event of a layer's loads, which are done when it is waited for."""

    def __init__(self, tier: HostTier, pool: KVPool, pairs: list[tuple[int, int]], layer: int) -> None:
        self.tier, self.pool, self.pairs, self.layer = tier, pool, pairs, layer
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        for slot, page in self.pairs:
            self.pool.whole[:, self.layer, page] = self.tier.pages[slot, self.layer]


def test_each_layer_waits_for_its_own_pages(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, late = random_ids(75), dict[int, Late]()
    runner = make_runner(llama, max_model_len=200)
    expected = continued(runner, prompt, 5, moved=False)
    tier = add_host_tier(runner, 8)

    def load(pairs: list[tuple[int, int]]) -> dict[int, Late]:
        late.update({layer: Late(tier, runner.pool, pairs, layer) for layer in range(3)})
        return late

    monkeypatch.setattr(tier, "load", load)
    assert continued(runner, prompt, 5, moved=True) == expected
    assert [each.waits for each in late.values()] == [1, 1, 1]


def test_a_page_may_be_saved_given_out_and_loaded_elsewhere_in_one_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(llama)
    monkeypatch.setattr(type(runner.attention), "needs_clean_pages", True)
    add_host_tier(runner, 2)
    whole = runner.pool.whole
    whole.copy_(torch.randn(whole.shape, generator=torch.Generator().manual_seed(0)))
    before = whole.clone()
    chunk = Prefill(0, 0, (5, 6), sample=False)
    run(
        runner,
        Batch(
            prefills=(chunk,),
            page_updates=table(0, [30]),
            copies=((5, 6), (5, 7)),
            fresh=(30, 4),
            features=(PageMoves(((4, 1),), ((1, 9),)),),
        ),
    )
    assert torch.equal(whole[:, :, 9], before[:, :, 4])
    assert torch.equal(whole[:, :, [6, 7]], before[:, :, [5, 5]])
    assert not whole[1, :, 4].any()
    written = {4, 6, 7, 9, 30}
    kept = [page for page in range(64) if page not in written]
    assert torch.equal(whole[:, :, kept], before[:, :, kept])
