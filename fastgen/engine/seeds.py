"""Seeds that are derived from others, so that requests without a seed draw different samples, and the same ones in a
run that is repeated."""

from __future__ import annotations

import hashlib


def seed_of(base: int | bytes, number: int) -> int:
    """Return the seed of request `number`. base: seed of its engine, job or fleet."""
    text = base if isinstance(base, bytes) else b"%d" % base
    return int.from_bytes(hashlib.blake2b(b"%b:%d" % (text, number), digest_size=8).digest(), "little")


def replica_seed(seed: int | None, rank: int) -> int | None:
    """Return the seed of one of several engines with the same options. The engine of rank 0 keeps the given seed."""
    return seed if seed is None or rank == 0 else seed_of(b"replica of %d" % seed, rank)
