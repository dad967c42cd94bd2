"""thinking.py and thinking_closer.py: the budget of reasoning, whatever the schedule is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SIZES, allow, check_idle, save_random
from grammars import byte_level
from handmade import let_pages_run_out
from tokenizers import AddedToken

from fastgen import Generator, Request, SamplingParams
from fastgen.engine.thinking import LATEST, LIKELY
from fastgen.request import Completion

OPENS, CLOSES = "<think>", "</think>"
OPTIONS: dict[str, Any] = {"seed": 0, "max_seqs": 8, "max_step_tokens": 64, "page_size": 16, "num_pages": 64}
SHORT = SamplingParams(max_tokens=45, seed=5, ignore_eos=True, logprobs=LIKELY)


def make_folder(folder: Path, marks: tuple[str, ...]) -> Path:
    """Save a random model and its tokenizer, which has these marks as tokens."""
    tokenizer = byte_level(folder, ("<|end|>",), f"{{# {OPENS} #}}{{{{ messages[0].content }}}}")
    tokenizer.hf.add_tokens([AddedToken(text, normalized=False) for text in marks])
    tokenizer.hf.save_pretrained(folder)
    save_random("Llama", {**SIZES, "vocab_size": len(tokenizer.hf), "eos_token_id": 0}, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("thinker"), (OPENS, CLOSES))


@pytest.fixture(scope="module")
def gen(folder: Path) -> Iterator[Generator]:
    with Generator(folder, **OPTIONS, speculate="ngram") as gen:
        yield gen


def marks(gen: Generator) -> tuple[int, int]:
    assert gen.tokenizer is not None
    return gen.tokenizer.added_ids[OPENS], gen.tokenizer.added_ids[CLOSES]


def inside(gen: Generator, budget: int, number: int = 0, **params: Any) -> Request:
    """Return a request whose prompt leaves the reasoning open."""
    prompt = [7 + number, 8, 9 + number % 3, marks(gen)[0]]
    return Request(prompt, replace(SHORT, thinking_token_budget=budget, seed=number, **params))


def answers(gen: Generator, requests: list[Request]) -> list[Completion]:
    """Return the answer to each request, all of which run together."""
    found = [
        output.completions[0] for output in gen.generate([r.prompt for r in requests], [r.params for r in requests])
    ]
    assert not [each.error for each in found if each.error]
    check_idle(gen)
    return found


def check(completion: Completion, closes: int, budget: int) -> str:
    """Hold the answer to the rule, and return how its reasoning has ended: alone, early or late."""
    assert completion.top_logprobs is not None
    most = budget + min(budget // 4, LATEST)
    for place, (token, top) in enumerate(zip(completion.token_ids, completion.top_logprobs, strict=True)):
        likely = closes in [*top][:LIKELY]
        assert token == closes or place < budget or (place < most and not likely), (place, likely)
        if token == closes:
            forced = place == most or (place >= budget and likely)
            assert not forced or completion.logprobs[place] == 0, "no other token was possible"
            assert closes not in completion.token_ids[place + 1 :], "it is drawn once"
            return "late" if place == most else "early" if forced else "alone"
    raise AssertionError("the reasoning goes on")


def test_the_mark_is_drawn_when_it_is_likely_or_late_in_any_schedule(gen: Generator, folder: Path) -> None:
    closes, budgets = marks(gen)[1], [0, 1, 5, 13, 40, 60, 80, 100]
    requests = [inside(gen, budgets[k % 8], k, temperature=k % 3 / 2, max_tokens=130) for k in range(16)]
    together = answers(gen, requests)
    ends = [check(each, closes, budgets[k % 8]) for k, each in enumerate(together)]
    assert {"early", "late"} <= set(ends)
    assert [answers(gen, [request])[0] for request in requests[:8:2]] == together[:8:2]
    with Generator(folder, **{**OPTIONS, "max_step_tokens": 9, "num_pages": 24}) as small:
        let_pages_run_out(small)
        assert answers(small, requests) == together
        assert small.stats.preemptions
    doomed = [gen.add([5, 6, 7 + k], replace(SHORT, max_tokens=200)) for k in range(8)]
    queue = gen.stream([replace(request, id=k) for k, request in enumerate(requests[:6])])
    for output in queue:  # an abort reads the step in flight before the next one is planned
        assert output.completions[0] == together[int(output.id)]
        gen.abort([doomed.pop()])
    gen.abort(doomed)
    gen.take_events()


def test_requests_without_a_budget_keep_their_bits(gen: Generator) -> None:
    plain = Request([5, 6, 7], replace(SHORT, temperature=0.8, logprobs=3))
    (alone,) = answers(gen, [plain])
    assert answers(gen, [inside(gen, 5), plain, inside(gen, 9, 1)])[1] == alone


def test_a_completion_that_is_resumed_keeps_its_budget(gen: Generator) -> None:
    (whole,) = answers(gen, [inside(gen, 20, 3, temperature=0.7)])
    for length in (5, 20, 21, 24, 30):
        (begun,) = answers(gen, [inside(gen, 20, 3, temperature=0.7, max_tokens=length)])
        resumed = replace(inside(gen, 20, 3, temperature=0.7), resume=begun)
        assert [output.completions[0] for output in gen.stream([resumed])] == [whole]


def test_a_structure_follows_the_mark(gen: Generator) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    closes, budget = marks(gen)[1], 12
    requests = [inside(gen, budget, k, json_schema=schema, max_tokens=200, ignore_eos=False) for k in range(4)]
    for completion in answers(gen, requests):
        check(completion, closes, budget)
        assert json.loads(completion.text.partition(CLOSES)[2])["a"] in (1, 22)


class Opening:
    """A mask whose first token is the opening mark."""

    def __init__(self, opens: int) -> None:
        self.opens: int | None = opens

    def fill(self, row: np.ndarray) -> None:
        if self.opens is not None:
            allow(row, np.array([self.opens]))

    def accept(self, token: int) -> None:
        self.opens = None


@pytest.mark.parametrize("budget", [0, 1, 6])
def test_reasoning_that_the_model_opens_is_limited_too(gen: Generator, budget: int) -> None:
    opens, closes = marks(gen)
    params = replace(SHORT, thinking_token_budget=budget, mask=Opening(opens), temperature=0)
    (completion,) = answers(gen, [Request([5, 6, 7], params)])
    assert completion.token_ids[0] == opens
    assert closes in completion.token_ids[budget + 1 : budget + 2 + budget // 4]
    (without,) = answers(gen, [Request([5, 6, 7], replace(params, mask=None))])
    (plain,) = answers(gen, [Request([5, 6, 7], replace(params, mask=None, thinking_token_budget=-1))])
    assert without == plain, "an answer that does not begin with reasoning is not changed"


def test_a_mark_that_may_not_be_drawn_ends_nothing(gen: Generator) -> None:
    closes = marks(gen)[1]
    others = [id for id in range(gen.model_config.vocab_size) if id not in (0, closes)]
    (kept,) = answers(gen, [inside(gen, 5, allowed_token_ids=others)])
    assert (len(kept.token_ids), closes in kept.token_ids) == (SHORT.max_tokens, False)
    (stopped,) = answers(gen, [inside(gen, 5, stop_token_ids=[closes], min_tokens=9)])
    assert 9 < len(stopped.token_ids) <= 11, "when it may end the output"
    assert stopped.stop_reason == closes


def test_marks_that_are_text_are_written_when_the_budget_is_used_up(tmp_path: Path) -> None:
    with Generator(make_folder(tmp_path, ()), **OPTIONS) as gen:
        assert gen.tokenizer is not None
        opens, closes = (gen.tokenizer.encode(mark, special=False) for mark in (OPENS, CLOSES))
        begun, budget = [1, 0, 3], 17
        requests = [
            Request([40, *opens], replace(SHORT, thinking_token_budget=budget, seed=k, temperature=k / 2))
            for k in range(3)
        ]
        # A mark that the text has begun itself, with a large bias, puts off the other one.
        params = replace(SHORT, thinking_token_budget=budget, logit_bias={closes[0]: 100.0}, temperature=0)
        requests.append(Request([40, *opens], params))
        together = answers(gen, requests)
        for completion in together[: len(begun)]:
            assert completion.text.count(CLOSES) == 1
            assert completion.token_ids[budget : budget + len(closes)] == closes
        assert CLOSES not in together[-1].text
        assert [answers(gen, [request])[0] for request in requests] == together


def test_wrong_budgets_are_refused(gen: Generator) -> None:
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()
    with pytest.raises(ValueError, match="thinking_token_budget is -2; it must be at least 0"):
        gen.generate("a", {"thinking_token_budget": -2})
