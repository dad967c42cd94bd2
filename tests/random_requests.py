"""Random requests to the hash model, for simulations of the scheduler."""

from __future__ import annotations

import random

from hash_model import POISON, VOCAB, HashMask, InexactEstimate, drawn_first, expected, make_sequence

from fastgen.engine.admission import LengthEstimate
from fastgen.engine.options import EngineConfig
from fastgen.request import SamplingParams, Sequence


def random_mask(rng: random.Random) -> HashMask | None:
    if rng.random() < 0.75:
        return None
    end, kind = rng.randrange(8), rng.choice((None, "forbids", "fill_raises", "accept_raises"))
    mask = HashMask(rng.randrange(1000))
    if kind is not None:
        setattr(mask, kind, end)
    return mask


def random_prompt(rng: random.Random, room: int, before: list[Sequence]) -> list[int]:
    """Return random tokens, which may follow all or a part of an earlier prompt, with or without its output."""
    prompt = [rng.randrange(VOCAB) for _ in range(min(rng.randint(1, room), rng.randint(1, room)))]
    if rng.random() < 0.02:
        prompt[rng.randrange(len(prompt))] = POISON
    if not before or rng.random() < 0.4:
        return prompt
    known = rng.choice(before)
    tokens = known.token_ids if rng.random() < 0.6 else expected(known).token_ids
    kept = rng.choice((len(tokens), rng.randint(1, len(tokens))))
    return (tokens[:kept] + rng.choice(([], prompt)))[:room]


def random_request(rng: random.Random, config: EngineConfig, before: list[Sequence]) -> list[Sequence]:
    scored_only = rng.random() < 0.1
    prompt = random_prompt(rng, config.max_model_len - (not scored_only), before)
    max_tokens = 0 if scored_only else rng.choice((None, 1, 2, rng.randint(1, 12)))
    params = SamplingParams(
        n=1 if scored_only else rng.choice((1, 1, 2, 3)),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, rng.randint(0, 4))),
        presence_penalty=rng.choice((0.0, 0.0, 1.0)),
        stop=rng.choice(((), (), "ab", ("dad", "c"))),
        mask=random_mask(rng),
    )
    stop_ids = frozenset(rng.choice(((), (2,), (2, 7, 11))))
    scored = scored_only or rng.random() < 0.15
    score = (rng.choice((0, rng.randint(0, len(prompt)))), rng.choice((1.0, 0.7))) if scored else None
    seed = rng.getrandbits(63)
    sequences = [
        make_sequence(prompt, params, config, index=index, seed=seed, stop_ids=stop_ids, score=score)
        for index in range(params.n)
    ]
    for sequence in sequences:
        if rng.random() < 0.1:
            resume(sequence, rng)
    return sequences


def resume(sequence: Sequence, rng: random.Random) -> None:
    """Let a sequence begin with a part of its output, as after an abort."""
    right = expected(sequence)
    count = rng.randrange(max(len(right.drawn.logprobs), 1))
    sequence.token_ids = right.token_ids[: sequence.prompt_len + count]
    sequence.drawn = drawn_first(right.drawn, count)
    if sequence.mask is not None:
        for token in sequence.output_ids:
            sequence.mask.accept(token)


def random_estimate(rng: random.Random, crowd: bool) -> LengthEstimate:
    """Return an estimate that is above all output lengths, or one that may be below some or all of them."""
    if crowd and rng.random() < 0.5:
        return InexactEstimate(0, 0)
    if rng.random() < 0.3:
        return LengthEstimate()
    kind = rng.choice((LengthEstimate, InexactEstimate))
    return kind(rng.choice((0, 0, 2, 3, 10)), rng.choice((0, 1 / 16, 1)))
