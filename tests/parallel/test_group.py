"""Groups of ranks: the store of symmetric memory, and graphs. The tests of ranks hold the sums."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import HashStore, PrefixStore

from fastgen.parallel.rank_group import RankGroup, RendezvousStore


def test_ranks_meet_whose_processes_have_counted_differently() -> None:
    """Two exchanges and a barrier through C++, as in the rendezvous of symmetric memory."""
    shared, found = HashStore(), list[list[bytes]]()

    def meet(rank: int, counter: int) -> None:
        own = RendezvousStore(shared)  # C++ calls its methods as long as it lives
        store = PrefixStore("symmetric", own)
        for exchange in range(2):
            store.set(f"{counter + exchange}/{rank}", f"{exchange}{rank}")
            found.append([store.get(f"{counter + exchange}/{peer}") for peer in range(2)])
            found.append(store.multi_get([f"{counter + exchange}/{peer}" for peer in range(2)]))
        store.add(f"{counter + 2}/members", 1)
        store.set(f"{counter + 2}/all", "1")
        store.wait([f"{counter + 2}/all"])

    with ThreadPoolExecutor(2) as pool:
        for meeting in [pool.submit(meet, 0, 12), pool.submit(meet, 1, 0)]:
            meeting.result(timeout=30)
    assert sorted(found) == [[b"00", b"01"]] * 4 + [[b"10", b"11"]] * 4


class Resettable:
    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


def test_a_group_resets_graphs_when_it_ends_and_does_not_keep_them() -> None:
    group = RankGroup.join(HashStore(), "graphs", 0, 1, torch.device("cpu"))
    kept, dropped = Resettable(), Resettable()
    for graphs in (kept, dropped):
        group.register_graphs(graphs)
    known = weakref.ref(dropped)
    del graphs, dropped
    assert known() is None
    group.leave()
    assert kept.resets == 1
    group.leave()
    assert kept.resets == 1, "it has ended"
