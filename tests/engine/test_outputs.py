"""Events, texts and stop strings: what is told piece by piece adds up to the output."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Script, check_idle, random_ids
from families import EOS

from fastgen import Event, Generator, SamplingParams
from fastgen.drawn import Drawn
from fastgen.engine.outputs import ActiveSample
from fastgen.request import Sequence
from fastgen.text.tokenizer import BROKEN, Tokenizer

PARAMS = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)


@dataclass
class Told(Drawn):
    """What the events of one sample say together."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        assert {*map(len, event.lists().values())} == {len(event.token_ids)}
        self.extend(event)
        self.token_ids += event.token_ids
        self.texts.append(event.text)
        self.finish_reasons.append(event.finish_reason)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def told(gen: Generator, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Told]]:
    """Return what the events of requests say: [request][sample]."""
    heard: dict[str | int, dict[int, Told]] = defaultdict(lambda: defaultdict(Told))
    ids = [gen.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    while gen.unfinished:
        for event in gen.step():
            heard[event.id][event.index].hear(event)
    assert set(heard) == set(ids)
    return [[heard[id][index] for index in sorted(heard[id])] for id in ids]


def tokenizer_of(gen: Generator) -> Tokenizer:
    assert gen.tokenizer is not None
    return gen.tokenizer


def saying(gen: Generator, text: str, **params: object) -> SamplingParams:
    """Return parameters that make the model say a text and end."""
    ids = [*tokenizer_of(gen).encode(text)[1:], EOS]
    return replace(SamplingParams(mask=Script(ids), max_tokens=len(ids)), **params)  # type: ignore[arg-type]


def test_events_add_up_to_the_outputs(gen: Generator) -> None:
    prompts = [random_ids(length) for length in (1, 30, 90, 12)] * 2
    params = [
        replace(PARAMS, n=2),
        replace(PARAMS, temperature=0, logprobs=2),
        replace(PARAMS, temperature=1.5, stop=["he", "o", "\n", "zz"]),
        replace(PARAMS, max_tokens=1),
    ]
    params += [replace(own, seed=2, min_tokens=own.max_tokens and own.max_tokens // 2) for own in params]
    outputs = gen.generate(prompts, params)
    for output, samples in zip(outputs, told(gen, prompts, params), strict=True):
        assert output.error is None
        for completion, said in zip(output.completions, samples, strict=True):
            assert (said.token_ids, said.text) == (completion.token_ids, completion.text)
            assert completion.lists().items() >= said.lists().items()
            assert said.finish_reasons == [None] * (len(said.texts) - 1) + [completion.finish_reason]
    assert any(completion.finish_reason == "stop" for output in outputs for completion in output.completions)


@pytest.mark.parametrize("text", ["hi 😀😀😀😀👍🏽 the é", "你好吗。我很好。hello", "the é ß 字"])
def test_events_never_show_a_broken_character(gen: Generator, text: str) -> None:
    params = saying(gen, text)
    said = told(gen, [[1, 290]], [params])[0][0]
    assert said.text.strip() == text
    assert all(BROKEN not in piece for piece in said.texts)
    assert len([piece for piece in said.texts if piece]) > len(text) // 3  # it was shown as it grew
    (output,) = gen.generate([[1, 290]], params)
    assert output.text == said.text
    assert output.completions[0].token_ids[-1] == EOS, "which is no text"


# Stop strings.

TEXT = "hello world, how are you today? hello the other fox 😀 jumps"


@pytest.mark.parametrize("max_step_tokens", [8, 64])
@pytest.mark.parametrize("stop", ["world, how", "w", "?", "x 😀 j", "😀", "today? hello the o", "jumps"])
def test_a_stop_string_ends_the_text_and_not_the_ids(talker: Path, stop: str, max_step_tokens: int) -> None:
    with Generator(talker, max_seqs=8, max_step_tokens=max_step_tokens, page_size=16) as gen:
        params = saying(gen, TEXT, stop=["never", stop])
        completion = gen.generate([random_ids(20)], params)[0].completions[0]
        assert completion.text.strip() == TEXT[: TEXT.index(stop)].strip()
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert isinstance(params.mask, Script)
        ids = params.mask.ids
        count = len(completion.token_ids)
        assert completion.token_ids == ids[:count]
        decode = tokenizer_of(gen).decode
        assert stop in decode(ids[:count])
        assert stop not in decode(ids[: count - 1])  # it ended at once
        said = told(gen, [random_ids(20)], [params])[0][0]
        assert (said.text, said.token_ids) == (completion.text, completion.token_ids)
        check_idle(gen)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "kept", "shown"), [("<s>", 3, "ab"), ("b<s>", 3, "a"), ("<s>c", 4, "ab"), ("abc", 4, "")]
)
def test_a_stop_string_may_have_a_special_token(
    gen: Generator, stop: str, kept: int, shown: str, include: bool
) -> None:
    """Special tokens are not in the text, but stop strings are found in them, as by `generate` of transformers."""
    a, b, c = (tokenizer_of(gen).encode(f"d{letter}", special=False)[-1] for letter in "abc")
    ids = [a, b, 1, c, a, a]
    params = SamplingParams(
        mask=Script(ids), max_tokens=6, n=2, stop=["never", stop], include_stop_str_in_output=include, ignore_eos=True
    )
    (output,) = gen.generate([[290]], params)
    for completion in output.completions:
        assert (completion.token_ids, completion.text) == (ids[:kept], shown + stop * include)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert [said.text for said in told(gen, [[290]], [params])[0]] == [shown + stop * include] * 2


def test_a_text_may_show_special_tokens(gen: Generator) -> None:
    """It does not show the id that ended it. Stop strings are found in special tokens as before."""
    a, b = (tokenizer_of(gen).encode(f"d{letter}", special=False)[-1] for letter in "ab")
    ids = [a, 1, b, b, EOS]
    plain = SamplingParams(mask=Script(ids), max_tokens=5)
    shown, stop = replace(plain, skip_special_tokens=False), "<s>b"
    cases = [
        (plain, "abb"),
        (shown, "a<s>bb"),
        (replace(shown, include_stop_str_in_output=True), "a<s>bb</s>"),
        (replace(shown, stop=stop), "a"),
        (replace(shown, stop=stop, include_stop_str_in_output=True), "a<s>b"),
    ]
    outputs = gen.generate([[290]] * len(cases), [params for params, _ in cases])
    assert [output.text for output in outputs] == [text for _, text in cases]
    for params, text in cases:
        assert told(gen, [[290]], [params])[0][0].text == text


def test_the_end_token_of_the_tokenizer_ends_answers(
    tmp_path: Path, talker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be missing among the model's, as where a base model's configuration came with a chat model's tokenizer."""
    for file in talker.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    for generation, eos_ids in (
        ({"eos_token_id": [7, 300]}, (7, 300, EOS)),
        ({"eos_token_id": [300, EOS]}, (300, EOS)),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        caplog.clear()
        with Generator(tmp_path, max_seqs=2, page_size=16) as gen:
            said = [message for message in caplog.messages if "the tokenizer's end token" in message]
            assert len(said) == (7 in eos_ids)
            assert all("</s> (2) is not among the model's eos_token_id [7, 300]" in message for message in said)
            assert gen.model_config.eos_ids == eos_ids
            for end in eos_ids:
                params = SamplingParams(mask=Script([9, end, 9]), max_tokens=3)
                completion = gen.generate([[1]], params)[0].completions[0]
                assert (completion.token_ids, completion.stop_reason) == ([9, end], end)
                assert gen.generate([[1]], replace(params, ignore_eos=True))[0].completions[0].token_ids == [9, end, 9]


def test_text_that_may_become_a_stop_string_is_held_back(gen: Generator) -> None:
    """Each id is one character, so that the events show what is held back."""
    letters = "abcabd"
    vocabulary = {tokenizer_of(gen).decode([5, token])[1:]: token for token in range(3, 259)}
    ids = [vocabulary[letter] for letter in letters]
    params = SamplingParams(mask=Script(ids), max_tokens=6, stop="abd", ignore_eos=True)
    said = told(gen, [[290]], [params])[0][0]
    assert said.texts == ["", "", "abc", "", "", ""]
    assert said.finish_reasons[-1] == "stop"
    assert said.token_ids == ids
    said = told(gen, [[290]], [replace(params, max_tokens=5)])[0][0]  # it did not become one
    assert said.texts == ["", "", "abc", "", "ab"]
    assert said.finish_reasons[-1] == "length"


def test_held_back_text_comes_with_an_abort(gen: Generator) -> None:
    id = gen.add([1], saying(gen, TEXT, stop="hello world, how are you tomorrow"))
    for _ in range(8):
        gen.step()
    (output,) = gen.abort([id])
    assert output.completions[0].finish_reason == "abort"
    assert output.text.strip() == tokenizer_of(gen).decode(output.completions[0].token_ids).strip()
    assert output.text.strip()
    assert TEXT.startswith(output.text.strip())


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_string_counts_only_after_min_tokens(gen: Generator, at_once: bool) -> None:
    """at_once: several ids are read at once, as after an exception in a step."""
    ids = tokenizer_of(gen).encode("hello hello hello")[1:]
    each = len(ids) // 3  # the tokens of a "hello"
    for min_tokens, kept in ((each - 1, ""), (each, "hello "), (2 * each, "hello hello ")):
        params = SamplingParams(max_tokens=50, min_tokens=min_tokens, stop="hello")
        sequence = Sequence(
            request_id=0, index=0, params=params, token_ids=[1], prompt_len=1, max_len=60, seed=0, stop_ids=frozenset()
        )
        sample, stop = ActiveSample(sequence, min_tokens), None
        for token in ids:
            sequence.token_ids.append(token)
            if not at_once and stop is None:
                stop = sample.update_text(tokenizer_of(gen))
        stop = stop or sample.update_text(tokenizer_of(gen))
        assert sample.text is not None
        assert (stop, sample.text.text) == ("hello", kept)


def test_a_string_at_the_last_token_is_the_reason(gen: Generator) -> None:
    params = saying(gen, "hello", stop="lo")
    count = len(tokenizer_of(gen).encode("hello")) - 1
    completion = gen.generate([[1]], replace(params, max_tokens=count))[0].completions[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "lo")
    assert completion.text.strip() == "hel"


def test_stops_in_sampled_text_as_without_masks(gen: Generator) -> None:
    """A stop string is found one step late; each output is the beginning of the one without stop strings."""
    prompts = [random_ids(10, seed=i) for i in range(8)]
    whole = gen.generate(prompts, PARAMS)
    stops = [output.text[len(output.text) // 2 :][:3] for output in whole]
    stopped = gen.generate(prompts, [replace(PARAMS, stop=stop) for stop in stops])
    for full, cut, stop in zip(whole, stopped, stops, strict=True):
        completion, ids = cut.completions[0], full.completions[0].token_ids
        assert BROKEN in stop or cut.text == full.text[: full.text.index(stop)]
        assert completion.token_ids == ids[: len(completion.token_ids)]
        assert completion.finish_reason == "stop"
        assert completion.logprobs == full.completions[0].logprobs[: len(completion.token_ids)]


# The prefix cache.


def test_cached_tokens_are_told_and_change_nothing(llama: Path) -> None:
    params = SamplingParams(n=2, max_tokens=12, seed=3, ignore_eos=True)
    system = random_ids(50)
    prompts = [system + random_ids(9, seed=i) for i in range(3)]
    options: dict[str, Any] = {"page_size": 16, "max_seqs": 8, "num_pages": 40}
    with Generator(llama, prefix_cache=False, **options) as gen:
        expected = [gen.generate([prompt], params)[0] for prompt in prompts]
        assert (gen.stats.prefilled_tokens, gen.stats.cached_tokens) == (3 * 59, 3 * 58)  # the second samples'
        assert not any(output.cached_tokens for output in expected)
    with Generator(llama, **options) as gen:
        outputs = [gen.generate([prompt], params)[0] for prompt in prompts]
        assert [output.cached_tokens for output in outputs] == [0, 48, 48]
        assert [output.completions for output in outputs] == [output.completions for output in expected]
        stats = gen.stats
        assert stats.cached_tokens == 2 * 48 + 3 * 58  # of the first samples, and all but a token of the others
        assert stats.prefilled_tokens == 59 + 2 * 11
        assert f"cached {100 * 270 / (270 + 81):.1f} %" in str(stats)
        assert stats.since(stats).cached_tokens == stats.pages_used == 0
        check_idle(gen)


def test_events_and_output_tell_the_same_cached_tokens(gen: Generator) -> None:
    prompt = random_ids(70, seed=5)
    gen.generate([prompt], PARAMS)
    (output,) = gen.generate([prompt], replace(PARAMS, n=3))
    assert output.cached_tokens == 64
    gen.add(prompt, replace(PARAMS, n=3))
    events = gen.step()
    while gen.unfinished:
        events += gen.step()
    assert {event.index for event in events} == {0, 1, 2}
    assert {event.cached_tokens for event in events} == {64}


def test_timings_are_in_order(gen: Generator) -> None:
    output = gen.generate([[5, 6]], PARAMS)[0]
    assert output.timings is not None
    assert output.timings.first_token is not None
    assert 0 < output.timings.first_token < output.timings.finished < 60
    *others, waiting = [gen.add([5], PARAMS) for _ in range(9)]
    (aborted,) = gen.abort([waiting])
    assert aborted.timings is not None
    assert aborted.timings.first_token is None
    gen.abort(others)


def test_the_first_event_of_a_sample_says_when_it_began_to_run(gen: Generator) -> None:
    """With 8 lanes, the last two of ten samples wait for others to end."""
    before = time.monotonic()
    gen.add(random_ids(9), SamplingParams(n=10, max_tokens=6, ignore_eos=True))
    told: dict[int, list[float | None]] = defaultdict(list)
    while gen.unfinished:
        for event in gen.step():
            told[event.index].append(event.started)
    first = [started[0] for started in told.values() if started[0] is not None]
    assert len(first) == 10
    assert not any(later for _, *rest in told.values() for later in rest)
    assert before < min(first)
    assert max(first[:8]) < min(first[8:])
    assert max(first) < time.monotonic()
