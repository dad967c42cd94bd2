"""Modes of torch that a program has set, such as autocast in a training loop, change nothing in an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import CONFIG, adapter
from conftest import families_in_turn, random_ids
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.rl.policy import pad

pytestmark = pytest.mark.timeout(60)
DRAWN = SamplingParams(max_tokens=12, logprobs=2, seed=1, ignore_eos=True)
PROMPTS = [random_ids(40, seed=1), random_ids(7, seed=2)]


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
}

CASES = [
    ("autocast", "float32"),
    ("autocast", "bfloat16"),
    ("autocast to float16", "bfloat16"),
    ("inference mode", "float32"),
    ("default device", "float32"),
    ("default dtype", "bfloat16"),
]
"""Modes, and the dtypes of engines."""


def answers(gen: Generator) -> list[Any]:
    """Return all that is drawn and scored, and the samples as a trainer gets them."""
    outputs = gen.generate(PROMPTS, DRAWN)
    drawn = [(each.token_ids, each.logprobs, each.top_logprobs) for output in outputs for each in output.completions]
    padded = pad(outputs)
    return [drawn, gen.score(PROMPTS), padded.ids.tolist(), padded.logprobs.tolist()]


def all_answers(gen: Generator, state: dict[str, Tensor]) -> list[Any]:
    """Return the answers, those with an adapter, and those of the base afterwards."""
    found = [answers(gen)]
    for factors, config in ((state, CONFIG), (None, None)):
        gen.update_adapter(factors, config)
        found.append(answers(gen))
    return found


@pytest.mark.parametrize(("family", "case"), families_in_turn(CASES), indirect=["family"])
def test_a_mode_of_the_program_changes_no_bit(family: Path, case: tuple[str, str]) -> None:
    """The mode is on while an existing engine works, and while another one is made, which also works afterwards."""
    mode, dtype = case
    options: dict[str, Any] = {"dtype": dtype, "page_size": 16, "num_pages": 64, "max_seqs": 4, "max_step_tokens": 24}
    state = adapter(family)
    with Generator(family, **options) as gen:
        expected = all_answers(gen, state)
        with MODES[mode]():
            assert all_answers(gen, state) == expected
            other = Generator(family, **options)
            assert all_answers(other, state) == expected
    with other:
        assert all_answers(other, state) == expected
