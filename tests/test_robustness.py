"""Faults that once crossed modules: exceptions in odd places, values of odd types, logits that are not finite."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, random_ids
from hypothesis import strategies as some
from properties import EXAMPLES, holds_for

from fastgen import Generator, Request, SamplingParams
from fastgen.engine.inputs import InputProcessor
from fastgen.request import MAX_BIASES
from fastgen.text.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(60)
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def test_logits_that_are_not_finite_fail_only_their_request(llama: Path) -> None:
    with Generator(llama, page_size=16, num_pages=12, max_seqs=4) as gen:
        right = gen.generate([random_ids(40)], SHORT)
        gen._runner.model.parameters.embedding[7] = torch.nan
        clean = [token for token in random_ids(40) if token != 7]
        before = gen.generate([clean], SHORT)[0].completions[0].token_ids
        poisoned, other = gen.generate([[1, 7, 9] * 10, clean], SHORT)
        named = "the logits are not finite, nor are the weights model.embed_tokens.weight; load or update them again"
        assert poisoned.error == named
        assert other.completions[0].token_ids == before
        assert gen.generate([clean], SHORT)[0].completions[0].token_ids == before
        assert right[0].error is None


TOKENS = some.lists(some.sampled_from([0, 2, 7, VOCAB - 1]), min_size=1, max_size=3)
TEXTS = some.lists(some.sampled_from(["a", "the ", "\n"]), max_size=3)
USUAL = some.fixed_dictionaries(
    {"max_tokens": some.integers(1, 3)},
    optional={
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), some.floats(-3, 3)),
        **dict.fromkeys(
            ("temperature", "repetition_penalty"), some.floats(0.01, 3) | some.sampled_from([1e-300, 1e300])
        ),
        **dict.fromkeys(("top_p", "min_p"), some.floats(0, 1, exclude_min=True)),
        **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), TOKENS),
        **dict.fromkeys(("ignore_eos", "return_sampling_mask"), some.booleans()),
        **dict.fromkeys(("include_stop_str_in_output", "skip_special_tokens"), some.booleans()),
        **dict.fromkeys(("stop", "bad_words"), TEXTS),
        **dict.fromkeys(("n", "min_tokens", "top_k", "logprobs", "prompt_logprobs"), some.integers(1, 3)),
        "seed": some.integers(-(2**63), 2**64 - 1),
        "logit_bias": some.dictionaries(some.sampled_from([0, 5]), some.floats(-1e9, 1e9)),
    },
)
SIZES = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logprobs", "seed")
ODD = some.sampled_from(
    [0, 5, -1, 2**31, 2**64, 10**400, math.nan, math.inf, None, True, "1", "", [], [5], [""], [-1], {-1: 1}]
)
CHANGED = some.dictionaries(some.sampled_from((*SIZES, "logit_bias", "stop", "stop_token_ids")), ODD, max_size=1)


@EXAMPLES
def test_any_parameters_are_refused_or_give_tokens_with_logprobs(examples: int, gen: Generator) -> None:
    @holds_for(examples, USUAL, CHANGED)
    def holds(usual: dict[str, Any], changed: dict[str, Any]) -> None:
        given = usual | changed
        (output,) = gen.generate([[5, 6, 7]], [SamplingParams(**given)])
        if output.error is None:
            assert len(output.completions) == given.get("n", 1)
            assert all(len(found.token_ids) <= (given["max_tokens"] or 512) for found in output.completions)
        for found in output.completions:
            for name, values in found.lists().items():
                assert len(values) == len(found.token_ids), name
            assert all(-math.inf < each <= 1e-5 for each in (*found.logprobs, *found.raw_logprobs))


def test_params_that_have_changed_are_checked_again(gen: Generator) -> None:
    biases = {5: 1.0}
    params = replace(SHORT, logit_bias=biases)
    assert gen.generate([5], params)[0].error is None
    biases[10**6] = 1.0
    with pytest.raises(ValueError, match="logit_bias holds the id 1000000"):
        gen.generate([5], params)


def test_too_many_biases_are_refused(gen: Generator) -> None:
    """A lane has room for MAX_BIASES; stop ids and eos take some of this room while min_tokens forbids them."""
    intake = InputProcessor(replace(gen.model_config, vocab_size=3 * MAX_BIASES, eos_ids=(1, 2)), None, 100, 0, SHORT)
    stops = SamplingParams(stop_token_ids=range(MAX_BIASES - 2), min_tokens=1)
    most = SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0))
    for params in (most, replace(most, min_tokens=1, ignore_eos=True), stops, replace(stops, min_tokens=0)):
        intake.check_params(params)
    for params, count in (
        (SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0)), MAX_BIASES + 1),
        (replace(most, min_tokens=1), MAX_BIASES + 2),
        (replace(stops, logit_bias={5: 1.0, 6: 1.0, 7: 1.0}), MAX_BIASES + 1),
    ):
        with pytest.raises(ValueError, match=rf"logit_bias .* are {count} tokens; .* at most {MAX_BIASES}: a mask"):
            intake.check_params(params)


def test_one_thread_of_one_process_uses_a_generator(gen: Generator) -> None:
    """Another thread gets an error while a step runs, and a fork of the process does at any time."""
    errors: list[str] = []

    def call() -> None:
        for method in (gen.step, gen.close, lambda: gen.add([5, 6], SHORT), lambda: next(gen.stream([]))):
            with pytest.raises(RuntimeError) as raised:
                method()
            errors.append(str(raised.value))

    handler = signal.getsignal(signal.SIGINT)
    mask = Calls(lambda: ThreadPoolExecutor(1).submit(call).result())
    assert gen.generate([5, 6], replace(SHORT, mask=mask, max_tokens=2))[0].error is None
    assert {error.partition(";")[0] for error in errors} == {"another thread is using this Generator"}
    assert ThreadPoolExecutor(1).submit(gen.generate, [5, 6], SHORT).result()[0].error is None, "one after the other"
    assert signal.getsignal(signal.SIGINT) is handler
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of a fork while there are threads
        child = os.fork()
    if not child:
        try:
            gen.add([5, 6], SHORT)
        except RuntimeError as error:
            gen.close()  # does nothing
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading) as told:
        assert f"was made by process {os.getpid()}, and a fork of it cannot use it" in told.read()


def test_a_generator_is_not_copied_or_pickled_but_its_outputs_are(gen: Generator) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled; make one in each process"):
            attempt(gen)
    outputs = gen.generate([[5, 6, 7]], SHORT)
    assert copy.deepcopy(outputs) == pickle.loads(pickle.dumps(outputs)) == outputs


FORK = """
import os, signal, sys, torch
from fastgen import Generator
torch.set_num_threads(2)
options = {"device": "cpu", "dtype": "float32", "num_pages": 4, "max_model_len": 64}
gen = Generator(**options)
if not (child := os.fork()):
    signal.alarm(20)  # a fork that waits for threads which it does not have ends here
    try:
        Generator(**options)
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(3)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_of_a_process_with_a_generator_makes_none_instead_of_hanging() -> None:
    program = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert program.returncode == 3, program
    assert "start method 'spawn'" in program.stdout


def test_numpy_values_are_values(gen: Generator) -> None:
    plain = gen.generate([[5, 6, 7]], SamplingParams(max_tokens=4, seed=5, temperature=0.5))[0]
    odd = SamplingParams(max_tokens=np.int64(4), seed=np.int64(5), temperature=np.float32(0.5))  # type: ignore[arg-type]
    for prompt in (np.array([5, 6, 7]), list(np.array([5, 6, 7])), torch.tensor([5, 6, 7])):
        assert gen.generate(prompt, odd)[0].completions == plain.completions
    assert gen.generate([b"hello"])[0].error == "a prompt cannot be bytes; decode them to a string"  # type: ignore[list-item]
    ids = random_ids(9)
    expected = gen.score([ids], start=2)
    assert gen.score(ids, start=2) == expected
    assert gen.score([ids], start=np.array([2]), temperature=np.float32(1)) == expected  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="start must be an integer"):
        gen.score([ids], start=[1.5])  # type: ignore[list-item]


class Calls:
    """A mask that allows all tokens, and calls a function for each token."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __deepcopy__(self, memo: object) -> Calls:
        return self

    def fill(self, row: np.ndarray) -> None: ...

    def accept(self, token: int) -> None:
        self._function()


def test_a_mask_may_abort_and_call_nothing_else_of_its_generator(gen: Generator) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    gen.add([5, 6], replace(params, mask=Calls(lambda: gen.abort("quitter"))), id="quitter")
    gen.add([5, 6], SHORT, id="other")
    told = Counter(event.id for _ in range(60) for event in gen.step() for _ in event.token_ids)
    assert told["other"] == 6
    assert told["quitter"] < 50
    gen.add([5, 6], SHORT, id="quitter")
    assert sum(len(event.token_ids) for _ in range(9) for event in gen.step()) == 6, "its id is free again"
    calls = [gen.close, gen.step, gen.sleep, lambda: gen.add([5]), lambda: gen.generate([5]), lambda: gen.score([[5]])]
    right, *wrong = gen.generate([[5, 6]] * 7, [SHORT, *(replace(params, mask=Calls(call)) for call in calls)])
    assert len(right.completions[0].token_ids) == 6
    assert all("from which only `abort` can be called" in str(each.error) for each in wrong)
    assert gen.generate([5, 6], SHORT)[0].completions == right.completions


def test_a_tokenizer_may_come_from_a_folder_of_its_own(llama: Path, talker: Path, tmp_path: Path) -> None:
    Tokenizer(talker).hf.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert Generator(llama, tokenizer=tmp_path).generate("hello", SHORT)[0].error is None


def test_a_stream_reads_no_further_than_pages_are_free(llama: Path) -> None:
    read = itertools.count()
    requests = (Request(random_ids(90, seed=i), SHORT, id=next(read)) for i in range(40))
    with Generator(llama, page_size=16, num_pages=20, max_seqs=64) as gen:
        next(gen.stream(requests))
        assert next(read) < 12


@pytest.mark.parametrize("threads", [2, 3])
def test_the_schedule_never_shows_on_any_number_of_threads(threads: int) -> None:
    """Threads divide a tensor without regard to vectors, and a partial vector may be rounded differently."""
    torch.set_num_threads(threads)
    try:
        prompts = [random_ids(length, seed=length) for length in range(20, 140, 9)]
        with Generator(max_step_tokens=272) as gen:
            together = gen.score(prompts, start=1)
            assert [gen.score([prompt], start=1)[0] for prompt in prompts] == together
    finally:
        torch.set_num_threads(1)


def test_none_in_a_stream_is_a_step_and_no_request(gen: Generator) -> None:
    plain = replace(SHORT, speculate=False)
    asked = [None, Request("a", plain, 1), *[None] * 3, Request("b", plain, 2), *[None] * 20]
    before = gen.stats.steps
    assert [output.id for output in gen.stream(asked)] == [1, 2]
    assert 6 + 3 <= gen.stats.steps - before < 6 + 6, "the second begins while the first runs"
