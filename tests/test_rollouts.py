"""What RL rollouts rest on: logprobs that a trainer can compute again, completions that go on where they ended, and
turns that begin with the very ids of the turns before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Script, Turns, check_idle, hf_logits, random_ids
from families import EOS
from hash_model import hopeful

from fastgen import Completion, Generator, Request, SamplingParams
from fastgen.async_engine.client import joined

pytestmark = pytest.mark.timeout(60)
PLAIN = SamplingParams(max_tokens=20, ignore_eos=True, seed=5, speculate=False)
CUTS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8, "temperature": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
}


def completed(gen: Generator, *requests: Request) -> list[Completion]:
    """Return the first completion of each request, in the order of the requests."""
    outputs = {output.id: output for output in gen.stream(replace(r, id=i) for i, r in enumerate(requests))}
    assert [output.error for output in outputs.values()] == [None] * len(requests)
    return [outputs[place].completions[0] for place in range(len(requests))]


def cut_short(gen: Generator, request: Request, steps: int) -> list[Completion]:
    """Return the completions of a request that is aborted after this number of steps."""
    id = gen.add(request.prompt, request.params, resume=request.resume)
    for _ in range(steps):
        gen.step()
    (output,) = gen.abort(id)
    assert {completion.finish_reason for completion in output.completions} == {"abort"}
    return output.completions


# Logprobs.


@pytest.mark.parametrize("name", CUTS)
def test_a_trainer_finds_the_same_logprobs_with_and_without_the_mask(gen: Generator, name: str) -> None:
    """A softmax over the vocabulary gives the untruncated logprobs and the scores of `score`; over the kept ids, the
    logprobs."""
    params = replace(PLAIN, **CUTS[name], return_sampling_mask=True)
    prompt = random_ids(20)
    (completion,) = completed(gen, Request(prompt, params))
    logits = hf_logits(gen.folder, prompt + completion.token_ids)[19:-1] / params.temperature
    assert completion.sampling_mask is not None
    assert any(len(kept) > 1 for kept in completion.sampling_mask)
    whole, within = [], []
    for token, row, kept in zip(completion.token_ids, logits, completion.sampling_mask, strict=True):
        assert token in kept
        whole.append((row[token] - row.logsumexp(0)).item())
        within.append((row[token] - row[kept].logsumexp(0)).item())
    assert completion.untruncated_logprobs == pytest.approx(whole, abs=1e-4)
    assert completion.logprobs == pytest.approx(within, abs=1e-4)
    assert max(np.subtract(completion.logprobs, completion.untruncated_logprobs)) > 0.01
    (score,) = gen.score([prompt + completion.token_ids], start=20, temperature=params.temperature)
    assert completion.untruncated_logprobs == score, "to the bit"


def test_scores_come_with_the_alternatives_of_prompt_logprobs(gen: Generator) -> None:
    sequences, params = [random_ids(9), random_ids(30)], SamplingParams(max_tokens=0, prompt_logprobs=3)
    scores, tops = gen.score(sequences, start=[2, 30], temperature=0.5, logprobs=3)
    assert scores == gen.score(sequences, start=[2, 30], temperature=0.5)
    assert tops == [(gen.generate(sequences, params)[0].prompt_top_logprobs or [])[2:], []]
    assert {*map(len, tops[0])} == {3}
    for wrong in (0, 129):
        with pytest.raises(ValueError, match=f"logprobs is {wrong}; it must be at least 1 and at most 128"):
            gen.score(sequences, logprobs=wrong)


def test_a_score_of_nothing_is_an_error(gen: Generator) -> None:
    for sequences, start in (([[5, 6]], 2), ([[5, 6], [7]], [2, 1])):
        with pytest.raises(ValueError, match=r"start is .*, the end of each sequence, which leaves nothing to score"):
            gen.score(sequences, start)
    assert [len(found) for found in gen.score([[5, 6], [7]], 1)] == [1, 0]
    assert gen.score([]) == []


def test_untruncated_logprobs_are_the_logprobs_where_nothing_is_truncated(gen: Generator) -> None:
    penalized = replace(PLAIN, temperature=0.8, repetition_penalty=1.3, logit_bias={7: 3.0}, mask=Turns())
    greedy = replace(PLAIN, temperature=0, top_k=5, top_p=0.5)
    for completion in completed(gen, *(Request(random_ids(9), params) for params in (PLAIN, penalized, greedy))):
        assert completion.untruncated_logprobs == completion.logprobs
    (likeliest,) = completed(gen, Request(random_ids(9), replace(penalized, top_k=1)))
    assert likeliest.logprobs == [0.0] * 20
    assert max(likeliest.untruncated_logprobs) < 0


# Completions that go on.

GOING_ON: dict[str, SamplingParams] = {
    "greedy": replace(PLAIN, temperature=0),
    "seeded": replace(PLAIN, seed=-3),
    "without a seed": replace(PLAIN, seed=None),
    "truncated": replace(PLAIN, top_p=0.9, logprobs=3, return_sampling_mask=True),
    "penalized": replace(PLAIN, repetition_penalty=1.3, frequency_penalty=0.6, presence_penalty=0.3),
    "masked": replace(PLAIN, mask=Turns()),
    "held back": replace(PLAIN, min_tokens=12, stop_token_ids=tuple(range(3, 100)), ignore_eos=False),
}


@pytest.mark.parametrize("name", GOING_ON)
def test_an_aborted_completion_goes_on_as_if_it_had_not_ended(gen: Generator, name: str) -> None:
    request = Request(random_ids(21), GOING_ON[name])
    (part,) = cut_short(gen, request, steps=6)
    assert 3 <= len(part.token_ids) < 12
    before = replace(part, token_ids=part.token_ids[:])
    resumed, again, expected = completed(
        gen,
        replace(request, resume=part),
        replace(request, resume=replace(part, seed=part.seed, text="another view of the same ids")),
        replace(request, params=replace(request.params, seed=part.seed)),
    )
    assert resumed == again == expected
    assert resumed.seed == part.seed
    assert part == before
    lists = (resumed.logprobs, resumed.untruncated_logprobs, resumed.raw_logprobs)
    assert {*map(len, lists)} == {len(resumed.token_ids)}


def test_a_completion_at_its_length_goes_on_with_more_tokens(gen: Generator) -> None:
    request = Request(random_ids(33), PLAIN)
    short, whole = completed(gen, replace(request, params=replace(PLAIN, max_tokens=7)), request)
    assert (short.finish_reason, len(short.token_ids)) == ("length", 7)
    assert completed(gen, replace(request, resume=short)) == [whole]


def test_an_aborted_group_goes_on_sample_by_sample(gen: Generator) -> None:
    """Samples find the pages that they left in the cache, and have logprobs of the prompt. One had not begun."""
    params = replace(PLAIN, n=5, temperature=1.2, prompt_logprobs=2)
    request = Request(random_ids(40), params)
    whole = gen.generate([request.prompt], params)[0]
    parts = cut_short(gen, request, steps=9)
    parts[3] = replace(parts[3], token_ids=[], logprobs=[], untruncated_logprobs=[], raw_logprobs=[])
    resumed = [Request(request.prompt, replace(params, n=1), part.index, part) for part in parts]
    for output in gen.stream(resumed):
        assert output.completions == [whole.completions[output.id]]  # type: ignore[index]
        assert (output.prompt_logprobs or [])[1:] == (whole.prompt_logprobs or [])[1:]
        assert output.prompt_top_logprobs == whole.prompt_top_logprobs
    assert [part.index for part in parts] == [0, 1, 2, 3, 4]


def test_an_output_makes_the_request_that_goes_on_from_it(gen: Generator) -> None:
    """The request continues with the seed of the first draws if the parameters have none."""
    given: dict[str, Any] = {"n": 2, "max_tokens": 7, "ignore_eos": True}
    for params in (given, SamplingParams(**given), SamplingParams(**given, seed=5)):
        (output,) = gen.generate([random_ids(9)], params)
        seed = output.completions[0].seed
        (whole,) = gen.generate([random_ids(9)], SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=seed))
        longer = {**params, "max_tokens": 20} if isinstance(params, dict) else params.replace(max_tokens=20)
        requests = [output.resume(longer, index) for index in range(2)]
        assert [request.id for request in requests] == [output.id] * 2
        assert completed(gen, *requests) == whole.completions


def test_a_resumed_sample_of_any_index_ends_with_its_prompt(gen: Generator) -> None:
    """A client that joins the events of `step` finds there what a new request has in the event of its first sample."""
    params = replace(PLAIN, n=3)
    part = cut_short(gen, Request(random_ids(21), params), steps=6)[2]
    id = gen.add({"prompt_token_ids": random_ids(21), "prompt": "as told"}, replace(params, n=1), resume=part)
    events = []
    while gen.unfinished:
        events += gen.step()
    assert [event.index for event in events] == [2] * len(events)
    assert [event.prompt_token_ids for event in events[:-1]] == [None] * (len(events) - 1)
    (whole,) = joined(events)
    assert (whole.id, whole.prompt_token_ids, whole.prompt) == (id, random_ids(21), "as told")


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_resumed_completions_are_preempted_like_others(llama: Path, prefix_cache: bool) -> None:
    params = [replace(GOING_ON[name], max_tokens=40) for name in ("seeded", "truncated", "penalized", "masked")]
    requests = [Request(random_ids(20 + 3 * place), own) for place, own in enumerate(params)]
    options: dict[str, Any] = {"page_size": 4, "max_seqs": 4, "max_step_tokens": 32, "prefix_cache": prefix_cache}
    with Generator(llama, num_pages=200, **options) as gen:
        expected = completed(gen, *requests)
    with Generator(llama, num_pages=36, **options) as gen:
        gen._loop.scheduler = hopeful(gen.config)
        parts = [cut_short(gen, request, 5 + place)[0] for place, request in enumerate(requests)]
        resumed = [replace(request, resume=part) for request, part in zip(requests, parts, strict=True)]
        assert completed(gen, *resumed) == expected
        assert gen.stats.preemptions > 0
        check_idle(gen)


def test_events_of_what_goes_on_tell_what_is_new(gen: Generator) -> None:
    text = "hello world, how are you today? hello the other fox 😀 jumps"
    assert gen.tokenizer is not None
    ids = [*gen.tokenizer.encode(text)[1:], EOS]
    params = SamplingParams(mask=Script(ids), max_tokens=len(ids), stop="jumps over")
    (part,) = cut_short(gen, Request([1], params), steps=12)
    gen.add([1], params, id="more", resume=part)
    events = []
    while gen.unfinished:
        events += gen.step()
    assert part.token_ids + [token for event in events for token in event.token_ids] == ids
    assert part.text + "".join(event.text for event in events) == completed(gen, Request([1], params))[0].text
    assert all(len(event.token_ids) == len(event.untruncated_logprobs) == len(event.logprobs) for event in events)
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", EOS)


def test_a_stop_string_may_begin_before_the_end_and_end_after_it(gen: Generator) -> None:
    """The part of the string that an abort has told is taken back: the text ends before the string."""
    assert gen.tokenizer is not None
    ids = gen.tokenizer.encode("hello world, how are you")[1:]
    params = SamplingParams(mask=Script(ids), max_tokens=len(ids), stop="world, how", ignore_eos=True)
    request = Request([1], params)
    (whole,) = completed(gen, request)
    count = next(n for n in range(len(ids)) if "w" in gen.tokenizer.decode(ids[:n]))
    short = completed(gen, replace(request, params=replace(params, max_tokens=count)))[0]
    assert "world, how".startswith(short.text.strip().removeprefix("hello "))
    assert completed(gen, replace(request, resume=short)) == [whole]
    assert (whole.text.strip(), whole.stop_reason) == ("hello", "world, how")


DONE = Completion(
    0, [5, 6, 7], "", "length", seed=1,
    logprobs=[-1.0] * 3, untruncated_logprobs=[-1.0] * 3, raw_logprobs=[-1.0] * 3,
)  # fmt: skip
UNFIT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "stopped": (replace(DONE, finish_reason="stop"), {}, "ended with 'stop'; 'length' and 'abort' can be resumed"),
    "many": (DONE, {"n": 2}, "n is 2; a request resumes one completion"),
    "no room": (DONE, {"max_tokens": 3}, "has 3 tokens already, and max_tokens is 3; raise it"),
    "no alternatives": (DONE, {"logprobs": 2}, "not one entry of top_logprobs for each token"),
    "no mask": (DONE, {"return_sampling_mask": True}, "not one entry of sampling_mask for each token"),
    "too few": (replace(DONE, logprobs=[-1.0]), {}, "not one entry of logprobs for each token"),
    "no seed": (replace(DONE, seed=None), {"seed": None}, "has no seed"),
    "a wrong id": (replace(DONE, token_ids=[5, 6, 320]), {}, "an id outside the vocabulary of 320"),
    "ends": (DONE, {"stop_token_ids": [7]}, "ends with 7, which is a stop id"),
    "another grammar": (
        replace(DONE, token_ids=[6, 5, 7]),
        {"mask": Turns()},
        "the mask does not accept the completion",
    ),
    "ids": ([5, 6], {}, "resume must be a Completion, not list"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_go_on(gen: Generator, name: str) -> None:
    resume, fields, message = UNFIT[name]
    params = replace(PLAIN, **fields)
    with pytest.raises((ValueError, TypeError), match=message):
        gen.add([5, 6, 7], params, resume=resume)
    requests = Request([5], params, "bad", resume), Request([5], replace(PLAIN, max_tokens=1), "good")
    errors = {output.id: output.error for output in gen.stream(requests)}
    assert errors["good"] is None
    assert message in str(errors["bad"])


def test_a_full_context_and_a_stop_string_cannot_go_on(gen: Generator) -> None:
    assert gen.tokenizer is not None
    full: dict[str, Any] = {"max_tokens": None}
    for prompt, said, params, message in (
        (random_ids(152), random_ids(12) * 30, full, "360 tokens already, and the context of 512"),
        ([5], gen.tokenizer.encode("hello"), {"stop": "ell"}, "has the stop string 'ell' already"),
    ):
        logprobs = dict.fromkeys(("logprobs", "untruncated_logprobs", "raw_logprobs"), [-1.0] * len(said))
        with pytest.raises(ValueError, match=message):
            gen.add(prompt, replace(PLAIN, **params), resume=replace(DONE, token_ids=said, **logprobs))  # type: ignore[arg-type]


# Turns.


def test_a_turn_begins_with_the_ids_of_those_before(gen: Generator) -> None:
    """Text would be tokenized to other ids. The ids find their pages, and have the logprobs of one whole sequence."""
    rollout, tool = random_ids(30), random_ids(11, seed=1)
    assert gen.tokenizer is not None
    params = replace(PLAIN, max_tokens=24, ignore_eos=False, mask=Script([*random_ids(20, seed=2), EOS]))
    turns = []
    for turn in range(3):
        (output,) = gen.generate([rollout], params if turn == 0 else replace(PLAIN, seed=turn))
        completion = output.completions[0]
        turns.append((len(rollout), completion))
        assert output.prompt_token_ids == rollout
        assert output.cached_tokens >= (turns[-2][0] + 20) // 16 * 16 if turn else True
        rollout = [*rollout, *completion.token_ids, *tool]
    assert turns[0][1].token_ids[-1] == EOS
    assert gen.tokenizer.encode(turns[0][1].text)[1:] != turns[0][1].token_ids[:-1]
    with Generator(gen.folder, prefix_cache=False, max_seqs=2) as other:
        whole = other.score([rollout])[0]
        for (start, completion), seed in zip(turns[1:], (1, 2), strict=True):
            alone = other.generate([rollout[:start]], replace(PLAIN, seed=seed))[0].completions
            assert alone == [completion]
    for start, completion in turns:
        end = start + len(completion.token_ids)
        assert completion.raw_logprobs == pytest.approx(whole[start:end], abs=1e-4)
