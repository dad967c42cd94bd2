"""What once went wrong between the modules: exceptions in odd places, values of odd types, a request that poisons."""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, check_idle, random_ids
from hypothesis import strategies as some
from properties import EXAMPLES, holds_for

from fastgen import Event, Generator, Request, SamplingParams
from fastgen.engine.inputs import InputProcessor
from fastgen.request import MAX_BIASES
from fastgen.text.tokenizer import OutputText, Tokenizer

pytestmark = pytest.mark.timeout(60)
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def test_not_finite_logits_fail_alone_and_leave_nothing_behind(llama: Path) -> None:
    with Generator(llama, page_size=16, num_pages=12, max_seqs=4) as gen:
        right = gen.generate([random_ids(40)], SHORT)
        gen._runner.model.embedding[7] = torch.nan
        clean = [token for token in random_ids(40) if token != 7]
        before = gen.generate([clean], SHORT)[0].completions[0].token_ids
        poisoned, beside = gen.generate([[1, 7, 9] * 10, clean], SHORT)
        named = "the logits are not finite, nor are the weights model.embed_tokens.weight; load or update them again"
        assert poisoned.error == named
        assert beside.completions[0].token_ids == before
        assert gen.generate([clean], SHORT)[0].completions[0].token_ids == before
        assert right[0].error is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias=[5]),  # type: ignore[arg-type]
        SamplingParams(min_tokens=2**63),
        SamplingParams(temperature=10**400),
        SamplingParams(seed=2**64),
        SamplingParams(stop=5),  # type: ignore[arg-type]
        SamplingParams(stop_token_ids=5),  # type: ignore[arg-type]
    ],
)
def test_an_odd_parameter_fails_alone(gen: Generator, params: SamplingParams) -> None:
    good, bad = gen.generate([[5, 6], [5, 6]], [SHORT, params])
    assert good.error is None
    assert bad.error


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
        **dict.fromkeys(("ignore_eos", "return_sampling_mask", "include_stop_str_in_output"), some.booleans()),
        **dict.fromkeys(("stop", "bad_words"), TEXTS),
        **dict.fromkeys(("n", "min_tokens", "top_k", "logprobs", "prompt_logprobs"), some.integers(1, 3)),
        "seed": some.integers(-(2**63), 2**64 - 1),
        "logit_bias": some.dictionaries(some.sampled_from([0, 5]), some.floats(-1e9, 1e9)),
    },
)
NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "stop",
)
ODD = some.sampled_from(
    [0, -1, 2**31, 2**64, 10**400, math.nan, math.inf, None, True, "1", "", [], [""], [-1], {-1: 1}]
)
CHANGED = some.dictionaries(some.sampled_from((*NAMES, "stop_token_ids", "logprobs", "seed")), ODD, max_size=1)


@EXAMPLES
def test_any_parameters_are_refused_or_give_tokens_with_logprobs(examples: int, gen: Generator) -> None:
    @holds_for(2 * examples, USUAL, CHANGED)
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
    """Each lane has room for so many; with a wide row all lanes' would have to grow."""
    intake = InputProcessor(replace(gen.model_config, vocab_size=3 * MAX_BIASES, eos_ids=(1, 2)), None, 100, 0, SHORT)
    most = SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), -1.0))
    intake.check_params(most)
    intake.check_params(replace(most, min_tokens=1, ignore_eos=True))
    stops = range(MAX_BIASES - 2)
    intake.check_params(SamplingParams(stop_token_ids=range(2 * MAX_BIASES)))  # nothing is held back
    intake.check_params(SamplingParams(stop_token_ids=stops, min_tokens=1))
    for params, count in (
        (SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES + 1), -1.0)), MAX_BIASES + 1),
        (replace(most, min_tokens=1), MAX_BIASES + 2),
        (SamplingParams(stop_token_ids=stops, min_tokens=1, logit_bias={5: 1.0, 6: 1.0, 7: 1.0}), MAX_BIASES + 1),
    ):
        with pytest.raises(ValueError, match=rf"logit_bias .* are {count} tokens; .* at most {MAX_BIASES}: a mask"):
            intake.check_params(params)


@pytest.mark.parametrize("fails", ["launch", "collect"])
def test_after_an_exception_the_device_is_waited_for_before_pages_are_given_out(
    llama: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    with Generator(llama, max_seqs=2) as gen:
        expected = gen.generate([[5, 6, 7]], SHORT)[0].completions
        done: list[str] = []
        call, count = getattr(gen._runner, fails), itertools.count()

        def interrupted(*arguments: Any) -> Any:
            if next(count) == 3:
                raise KeyboardInterrupt
            return call(*arguments)

        for owner, name in ((gen._runner, "synchronize"), (gen._scheduler, "reset")):
            inner = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda *given, name=name, inner=inner: (done.append(name), inner(*given))[1]
            )
        monkeypatch.setattr(gen._runner, fails, interrupted)
        gen.add([5, 6, 7], replace(SHORT, speculate=False))
        tokens: list[int] = []
        while gen.unfinished:
            try:
                tokens += [token for event in gen.step() for token in event.token_ids]
            except KeyboardInterrupt:
                assert done == ["synchronize", "reset"]
        assert done
        assert tokens == expected[0].token_ids
        check_idle(gen)


def test_a_step_without_memory_is_tried_again_once(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Generator(llama, page_size=16, num_pages=12, max_seqs=4) as gen:
        prompts = [random_ids(20, seed=seed) for seed in range(6)]
        expected = gen.generate(prompts, SHORT)
        launch, count, failing = gen._runner.launch, itertools.count(), {3, 5, 6}

        def launched(*given: Any) -> Any:
            if next(count) in failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return launch(*given)

        monkeypatch.setattr(gen._runner, "launch", launched)
        with pytest.raises(torch.OutOfMemoryError):  # at steps 5 and 6
            gen.generate(prompts, SHORT)
        assert caplog.text.count("a step had too little memory") == 2
        check_idle(gen)
        failing.add(next(count) + 4)
        assert [output.completions for output in gen.generate(prompts, SHORT)] == [o.completions for o in expected]
        assert gen.stats.preemptions > 0
        check_idle(gen)


def test_one_thread_of_one_process_uses_a_generator(gen: Generator) -> None:
    """Another thread gets an error while a step runs, and a fork of the process does at any time."""
    errors: list[str] = []

    def call() -> None:
        for method in (gen.step, gen.close, lambda: gen.add([5, 6], SHORT), lambda: next(gen.stream([]))):
            with pytest.raises(RuntimeError) as raised:
                method()
            errors.append(str(raised.value))

    class Elsewhere:
        def fill(self, row: np.ndarray) -> None:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(call).result()

        def accept(self, token: int) -> None:
            pass

    assert gen.generate([5, 6], replace(SHORT, mask=Elsewhere(), max_tokens=2))[0].error is None
    assert {error.partition(";")[0] for error in errors} == {"another thread is using this Generator"}
    assert ThreadPoolExecutor(1).submit(gen.generate, [5, 6], SHORT).result()[0].error is None, "one after the other"
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of a fork beside threads
        child = os.fork()
    if not child:
        try:
            gen.add([5, 6], SHORT)
        except RuntimeError as error:
            gen.close()  # does nothing
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert f"was made by process {os.getpid()}, and a fork of it can not use it".encode() in os.read(reading, 1000)
    os.close(reading)
    os.close(writing)


def test_a_clock_that_jumps_changes_nothing(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gen.generate([[5, 6, 7]] * 3, SHORT)
    now, jumps = time.time, itertools.cycle((1e8, -1e8, 0))
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    found = gen.generate([[5, 6, 7]] * 3, SHORT)
    assert [output.completions for output in found] == [output.completions for output in expected]
    assert all(0 <= seconds < 60 for output in found for seconds in asdict(output.timings).values())


def test_numpy_values_are_values(gen: Generator) -> None:
    plain = gen.generate([[5, 6, 7]], SamplingParams(max_tokens=4, seed=5, temperature=0.5))[0]
    odd = SamplingParams(max_tokens=np.int64(4), seed=np.int64(5), temperature=np.float32(0.5))  # type: ignore[arg-type]
    for prompt in (np.array([5, 6, 7]), list(np.array([5, 6, 7])), torch.tensor([5, 6, 7])):
        assert gen.generate(prompt, odd)[0].completions == plain.completions
    assert gen.generate([b"hello"])[0].error == "a prompt can not be bytes; decode them to a string"  # type: ignore[list-item]
    ids = random_ids(9)
    expected = gen.score([ids], start=2)
    assert gen.score(ids, start=2) == expected
    assert gen.score([ids], start=np.array([2]), temperature=np.float32(1)) == expected  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="start must be an integer"):
        gen.score([ids], start=[1.5])  # type: ignore[list-item]


@pytest.mark.parametrize("after", range(8))
def test_an_exception_while_text_is_made_loses_nothing(
    gen: Generator, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    expected = gen.generate([[5, 6, 7]], params)[0].completions[0]
    push, count = OutputText.push, itertools.count()

    def interrupted(self: OutputText, *args: Any, **options: Any) -> str | None:
        if next(count) == after:
            raise KeyboardInterrupt
        return push(self, *args, **options)

    monkeypatch.setattr(OutputText, "push", interrupted)
    gen.add([5, 6, 7], params)
    events: list[Event] = []
    while gen.unfinished:
        try:
            events += gen.step()
        except KeyboardInterrupt:
            continue
    assert [token for event in events for token in event.token_ids] == expected.token_ids
    assert "".join(event.text for event in events) == expected.text
    assert events[-1].finish_reason == expected.finish_reason
    check_idle(gen)


def test_a_mask_may_abort_from_within_a_step(gen: Generator) -> None:
    class Quitter:
        def __deepcopy__(self, memo: object) -> Quitter:
            return self

        def fill(self, row: np.ndarray) -> None:
            pass

        def accept(self, token: int) -> None:
            gen.abort("quitter")

    gen.add([5, 6], SamplingParams(max_tokens=50, mask=Quitter(), ignore_eos=True), id="quitter")
    gen.add([5, 6], SHORT, id="other")
    events = list(itertools.chain.from_iterable(iter(gen.step, [])))
    while gen.unfinished:
        events += gen.step()
    assert sum(len(event.token_ids) for event in events if event.id == "other") == 6
    assert sum(len(event.token_ids) for event in events if event.id == "quitter") < 50
    check_idle(gen)


def test_events_tell_all_that_outputs_tell(gen: Generator) -> None:
    params = SamplingParams(
        max_tokens=5, top_k=3, logprobs=2, prompt_logprobs=1, return_sampling_mask=True, seed=3, ignore_eos=True
    )
    (output,) = gen.generate([[5, 6, 7]], params)
    gen.add([5, 6, 7], params)
    events = gen.step()
    while gen.unfinished:
        events += gen.step()
    completion = output.completions[0]
    for name in ("token_ids", "logprobs", "untruncated_logprobs", "raw_logprobs", "top_logprobs", "sampling_mask"):
        assert [each for event in events for each in getattr(event, name)] == getattr(completion, name), name
    assert str(events[-1].prompt_logprobs) == str(output.prompt_logprobs)  # NaN is not equal to itself
    assert events[-1].prompt_top_logprobs == output.prompt_top_logprobs


def test_the_cpu_by_any_name_is_float32_and_a_wrong_device_an_error(llama: Path) -> None:
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert Generator(llama, device=device).config.dtype == "float32"  # type: ignore[arg-type]
    for device in ("foo", "cuda:99"):
        with pytest.raises(ValueError, match="which torch can not use here"):
            Generator(llama, device=device)


def test_a_tokenizer_may_come_from_a_folder_of_its_own(llama: Path, talker: Path, tmp_path: Path) -> None:
    Tokenizer(talker).hf.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert Generator(llama, tokenizer=tmp_path).generate("hello", SHORT)[0].error is None
    with pytest.raises(ValueError, match="no tokenizer files"):
        Generator(llama, tokenizer=llama)


def test_stats_are_a_snapshot(gen: Generator) -> None:
    before = gen.stats
    gen.generate([[5]], SHORT)
    assert gen.stats.generated_tokens - before.generated_tokens == 6


def test_a_stream_reads_no_further_than_pages_are_free(llama: Path) -> None:
    read = itertools.count()
    requests = (Request(random_ids(90, seed=i), SHORT, id=next(read)) for i in range(40))
    with Generator(llama, page_size=16, num_pages=20, max_seqs=64) as gen:
        next(gen.stream(requests))
        assert next(read) < 12


def test_a_context_that_the_pool_can_not_hold_is_refused(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Generator(llama, page_size=16, num_pages=4).max_model_len == 48
    assert "holds a context of 48 tokens" in caplog.text
    with pytest.raises(ValueError, match=r"max_model_len is 100.*hold a context of 48"):
        Generator(llama, max_model_len=100, page_size=16, num_pages=4)
    with pytest.raises(ValueError, match="lower these, num_pages"):
        Generator(llama, num_pages=10**12)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_schedule_never_shows_on_any_number_of_threads(threads: int) -> None:
    """Threads share a tensor out without regard to vectors, and the rest of a vector may be rounded otherwise."""
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
