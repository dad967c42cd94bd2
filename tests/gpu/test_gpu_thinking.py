"""Thinking budgets on a GPU, where the steps are CUDA graphs and the tokens of a step are read one step later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgen import Generator
from fastgen.engine.thinking import LATEST

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

QUESTIONS = ("17 * 23?", "Why is the sky blue?", "Write a story about a dog.", "How many legs do 3 spiders have?")


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_reasoning_ends_alike_alone_and_among_others(speculate: str | None) -> None:
    def ask(gen: Generator, which: slice) -> list[Any]:
        requests = [(question, budget) for budget in (0, 3, 8, 20) for question in QUESTIONS][which]
        params = [{"temperature": 0.7, "seed": 5, "max_tokens": 200, "thinking_token_budget": n} for _, n in requests]
        messages = [[{"role": "user", "content": question}] for question, _ in requests]
        outputs = gen.chat(messages, params, chat_template_kwargs={"enable_thinking": True})
        return [output.completions[0] for output in outputs]

    with Generator(seed=0, device="cuda", speculate=speculate) as gen:
        assert gen.tokenizer is not None
        closes, together = gen.tokenizer.added_ids["</think>"], ask(gen, slice(None))
        for number, completion in enumerate(together):
            budget = (0, 3, 8, 20)[number // len(QUESTIONS)]
            assert completion.token_ids.index(closes) <= budget + min(budget // 4, LATEST)
        plain = gen.chat([{"role": "user", "content": "hello"}], {"seed": 5, "max_tokens": 40})[0].completions
        if gen.config.deterministic:
            assert [ask(gen, slice(k, k + 1))[0] for k in range(len(together))] == together
            assert (
                gen.chat([{"role": "user", "content": "hello"}], {"seed": 5, "max_tokens": 40})[0].completions == plain
            )
