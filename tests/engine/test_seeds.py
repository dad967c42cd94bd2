"""seeds.py: requests have the seeds that they had in earlier versions, and replicas have others."""

from __future__ import annotations

from fastgen import Generator
from fastgen.engine.seeds import replica_seed, seed_of

OF_ZERO = [7120306904099482837, 5509842535781378034]  # as version 0.2.0 derived them from the seed 0
OF_MINUS_FIVE = [17209702359404445921, 16910621107983289284]


def test_seeds_are_those_of_earlier_versions() -> None:
    assert [seed_of(-5, number) for number in range(2)] == OF_MINUS_FIVE
    with Generator(seed=0, page_size=16, num_pages=300) as gen:
        outputs = gen.generate([[5], [6]], {"max_tokens": 1})
    assert [output.completions[0].seed for output in outputs] == OF_ZERO


def test_replicas_have_other_seeds_and_the_first_one_that_of_the_options() -> None:
    seeds = [replica_seed(7, rank) for rank in range(8)]
    assert seeds[0] == 7
    assert len({*seeds, *(seed_of(7, number) for number in range(8))}) == 16
    assert replica_seed(None, 3) is None
