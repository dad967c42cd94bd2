"""generator.py: prompts and parameters, bad input, streams, aborts, masks, seeds, and closing."""

from __future__ import annotations

import inspect
import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, Script, Turns, check_idle, random_ids
from families import EOS
from handmade import let_pages_run_out

import fastgen.generator
from fastgen import Event, Generator, Request, RequestOutput, SamplingParams, names
from fastgen.engine.options import OPTIONS, GeneratorOptions

pytestmark = pytest.mark.timeout(60)  # the likely failure is a loop that waits for ever
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.completions]


def drain(gen: Generator) -> list[Event]:
    """Step until nothing is left."""
    events = gen.step()
    while gen.unfinished:
        events += gen.step()
    return events


# Prompts, parameters and answers.


def test_prompts_of_all_kinds_and_outputs_in_their_order(gen: Generator) -> None:
    message = {"role": "user", "content": "hello"}
    prompts = ["hello", [5, 6, 7], [message], (8, 9), torch.tensor([5, 6, 7])]
    outputs = gen.generate(prompts, [replace(SHORT, max_tokens=9 - place) for place in range(5)])
    assert [len(ids) for ids in ids_of(outputs)] == [9, 8, 7, 6, 5]
    assert outputs[0].prompt_token_ids[0] == 1
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert outputs[2].prompt_token_ids.count(1) == 1
    for place, single in enumerate(("hello", [5, 6, 7], [message])):
        (output,) = gen.generate(single, replace(SHORT, max_tokens=9 - place))
        assert output.prompt_token_ids == outputs[place].prompt_token_ids
        assert output.completions == outputs[place].completions
        assert output.text == output.completions[0].text
    assert gen.generate([]) == []


def test_an_answer_goes_on_to_the_end_of_the_context(llama: Path) -> None:
    with Generator(llama, max_model_len=50, max_seqs=2) as gen:
        for length in (1, 48, 49):
            (completion,) = gen.generate(random_ids(length), SamplingParams(ignore_eos=True, n=1))[0].completions
            assert (len(completion.token_ids), completion.finish_reason) == (50 - length, "length")
        assert "has room for 49" in str(gen.generate(random_ids(50))[0].error)
    with Generator(llama, page_size=16, num_pages=4, max_seqs=4) as gen:
        assert gen.max_model_len == 48, "what the pool holds, less a page"
        good, bad = gen.generate([random_ids(40), random_ids(48)], SamplingParams(ignore_eos=True))
        assert len(ids_of([good])[0]) == 8
        assert "the context of 48 tokens" in str(bad.error)


@pytest.mark.parametrize(
    ("structure", "least"),
    [
        ({"choice": ["hello"]}, 0),
        ({"json_schema": {"enum": ["a", 5]}}, 0),
        ({"regex": "(ab)?"}, 1),
        ({"regex": "a{1,40}"}, 12),
        ({"allowed_token_ids": [EOS]}, 0),
        ({"allowed_token_ids": [EOS, 9]}, 12),
    ],
)
def test_a_structure_that_is_complete_ends_before_min_tokens(gen: Generator, structure: Any, least: int) -> None:
    params = SamplingParams(n=3, max_tokens=60, min_tokens=12, seed=1, logit_bias={EOS: 50}, **structure)
    for output in gen.generate(["hello", [5, 6]], params):
        for completion in output.completions:
            assert (completion.finish_reason, completion.stop_reason) == ("stop", EOS), completion.error
            assert len(completion.token_ids) > least, "what may go on does"


def test_eos_ends_an_answer_and_stays_in_its_ids_and_min_tokens_forbids_it_until_then(gen: Generator) -> None:
    likely = SamplingParams(max_tokens=8, temperature=0, logit_bias={EOS: 1e4, 9: 9e3}, stop_token_ids=[9])
    (completion,) = gen.generate([5, 6], likely)[0].completions
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([EOS], "stop", EOS)
    ids = ids_of(gen.generate([5, 6], replace(likely, min_tokens=4)))[0]
    assert (len(ids), ids[-1]) == (5, EOS)
    assert not {EOS, 9} & set(ids[:4])
    (completion,) = gen.generate([5, 6], replace(likely, min_tokens=4, ignore_eos=True))[0].completions
    assert (completion.token_ids, completion.finish_reason) == ([EOS] * 8, "length")


def test_prompts_in_the_forms_of_vllm(gen: Generator) -> None:
    text, ids = gen.generate(["hello", [5, 6]], SHORT)
    assert text.prompt == "hello"
    forms: list[Any] = [
        ({"prompt": "hello"}, {"prompt_token_ids": [5, 6]}),
        iter([{"prompt": "hello", "prompt_token_ids": None}, {"prompt_token_ids": (5, 6), "prompt": "five six"}]),
        {"a": "hello", "b": [5, 6]}.values(),
    ]
    for prompts in forms:
        assert ids_of(gen.generate(prompts, SHORT)) == ids_of([text, ids])
    assert ids_of(gen.generate({"prompt": "hello"}, SHORT)) == ids_of([text])
    assert ids_of(gen.generate(np.array(["hello"]), SHORT)) == ids_of([text])
    assert ids_of(gen.generate(np.array([[5, 6], [5, 6]]), SHORT)) == ids_of([ids, ids])
    for wrong, kind in ((None, "NoneType"), (5, "int"), (b"hello", "bytes")):
        with pytest.raises(TypeError, match=f"prompts must be a prompt or a list of prompts, not {kind}"):
            gen.generate(wrong, SHORT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a Request goes to `stream`"):
        gen.generate([Request("hello", SHORT)])  # type: ignore[list-item]
    assert "'prompt', 'prompt_token_ids' or 'messages', not 'promt'" in str(gen.generate([{"promt": "a"}])[0].error)


def test_params_may_be_dicts_of_differences_from_the_models_defaults(talker: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talker, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.1, "top_k": 5}')
    own = SamplingParams(temperature=0.1, top_k=5)
    with Generator(folder, seed=0) as gen:
        assert gen.default_params == own
        given = {"max_tokens": 5, "seed": 1}
        expected = ids_of(gen.generate(["hello"] * 2, replace(own, max_tokens=5, seed=1)))
        assert ids_of(gen.generate(["hello"] * 2, given)) == expected
        assert ids_of(gen.generate(["hello"] * 2, iter([given, given]))) == expected
        assert ids_of(list(gen.stream(Request("hello", given, id) for id in range(2)))) == expected
        gen.add("hello", given)
        assert [token for event in drain(gen) for token in event.token_ids] == expected[0]
        assert ids_of(gen.generate("hello", SamplingParams(max_tokens=50, seed=1))) != ids_of(
            gen.generate("hello", {"max_tokens": 50, "seed": 1})
        ), "SamplingParams do not take the model's defaults"
    with Generator(folder, seed=0, generation_config=False) as gen:
        assert gen.default_params == SamplingParams()


def test_chat_takes_conversations_tools_and_variables(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gen.tokenizer is not None
    one, two = ([{"role": "user", "content": text}] for text in ("hello", "world"))
    assert ids_of(gen.chat(one, SHORT)) == ids_of(gen.generate(one, SHORT))
    assert ids_of(gen.chat(iter([one, two]), SHORT)) == ids_of(gen.generate([one, two], SHORT))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools and tools[0].function.name }}{{ mood }}"
    monkeypatch.setattr(gen.tokenizer.hf, "chat_template", template + "{{ '!' if add_generation_prompt }}")
    tool = {"type": "function", "function": {"name": "f"}}
    (out,) = gen.chat(one, SHORT, tools=[tool], chat_template_kwargs={"mood": "glad"})
    assert out.prompt == "hellofglad!"
    assert gen.chat(one, SHORT, add_generation_prompt=False)[0].prompt == "helloNone"
    (out,) = gen.chat([*one, {"role": "assistant", "content": "wor"}], SHORT, continue_final_message=True)
    assert out.prompt == "hellowor"
    for wrong, kind, reason in (
        ({"continue_final_message": True, "add_generation_prompt": True}, ValueError, "cannot go with continue_final"),
        ({"tools": tool}, TypeError, "tools must be a list of functions or dicts, not dict"),
        ({"chat_template_kwargs": {"tokenize": True}}, ValueError, "tokenize is not a variable of a chat template"),
        ({"add_generation_prompt": "no"}, TypeError, "add_generation_prompt must be True or False, not 'no'"),
        ({"chat_template_kwargs": "glad"}, TypeError, "chat_template_kwargs must be a dict, not str"),
    ):
        with pytest.raises(kind, match=reason):
            gen.chat(one, SHORT, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="messages must be a list of dicts, or a list of such lists, not str"):
        gen.chat("hello", SHORT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no known format for tools"):
        gen.parse_message(out.prompt or "")
    monkeypatch.setattr(gen.tokenizer.hf, "chat_template", "{{ messages[0].content }}")
    assert gen.chat(one, SHORT, tools=[])[0].prompt == "hello"
    with pytest.raises(ValueError, match=r"does not use tools, .*; leave tools out"):
        gen.chat(one, SHORT, tools=[tool])
    monkeypatch.setattr(gen.tokenizer.hf, "chat_template", None)
    for call in (gen.generate, gen.chat):
        with pytest.raises(ValueError, match="no chat template"):
            call(one, SHORT)  # type: ignore[operator]


def test_special_tokens_in_messages_stay_text(gen: Generator, talker: Path) -> None:
    said = [{"role": "user", "content": "hello</s><s>"}]
    (out,) = gen.chat(said, SHORT)
    with Generator(talker, allow_special_tokens=True, max_seqs=2, num_pages=8) as other:
        for allowed in other.chat(said, SHORT)[0], other.generate({"messages": said}, SHORT)[0]:
            assert [allowed.prompt_token_ids.count(id) for id in (1, 2)] == [2, 2]
            assert allowed.prompt == out.prompt
    assert [out.prompt_token_ids.count(id) for id in (1, 2)] == [1, 1]
    assert gen.tokenizer is not None
    assert "hello</s><s>" in gen.tokenizer.decode(out.prompt_token_ids)


def get_weather(city: str) -> str:
    """
    Tell the weather.

    Args:
        city: where
    """
    return f"It rains in {city}."


def test_an_agent_calls_a_tool_and_reads_its_result(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gen.tokenizer is not None
    template = """{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{- call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"""
    monkeypatch.setattr(gen.tokenizer.hf, "chat_template", template)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Rain?"}]
    (out,) = gen.chat(messages, SHORT, tools=[get_weather])
    assert out.prompt == "get_weather: Tell the weather.<user>Rain?"
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    messages.append(gen.parse_message(f"hello {call}", [get_weather]))
    (made,) = messages[-1]["tool_calls"]
    messages.append({"role": "tool", "content": get_weather(**made["function"]["arguments"])})
    (out,) = gen.chat(messages, SHORT, tools=[get_weather])
    assert '"arguments": {"city": "Rome"}}</tool_call><tool>It rains in Rome.' in str(out.prompt)


def test_allowed_and_forbidden_tokens(gen: Generator) -> None:
    assert gen.tokenizer is not None
    free = SamplingParams(n=8, max_tokens=30, ignore_eos=True, seed=3)
    allowed = ids_of(gen.generate([5, 6], replace(free, allowed_token_ids=[7, 70, 9])))
    assert {token for ids in allowed for token in ids} == {7, 70, 9}
    for word, size in (("hello", 1), ("wor", 3)):
        likely = gen.tokenizer.encode(word, special=False)
        assert len(likely) == size
        for bad, there in (([], True), (["x y", word], False)):
            params = replace(free, logit_bias=dict.fromkeys([*likely, 70], 1e4), bad_words=bad)
            drawn = ids_of(gen.generate([5, 6], params))
            runs = [ids[place : place + size] for ids in drawn for place in range(len(ids))]
            assert (likely in runs) == there
            assert size == 1 or set(likely) <= {token for ids in drawn for token in ids}
    (out,) = gen.generate([5], replace(free, n=1, choice=["hello", "world"], bad_words=["hello"]))
    assert out.text.strip() == "world"


def test_a_text_may_end_with_its_stop_string(gen: Generator) -> None:
    assert gen.tokenizer is not None
    ids = gen.tokenizer.encode("hello world", special=False)
    for stops, text in (({"stop": ["lo wo", "x"]}, "hello wo"), ({"stop_token_ids": ids[-1:]}, "hello world")):
        params = SamplingParams(max_tokens=20, mask=Script(ids), **stops)  # type: ignore[arg-type]
        (plain,) = gen.generate([5], params)
        (shown,) = gen.generate([5], replace(params, include_stop_str_in_output=True))
        assert ids_of([plain]) == ids_of([shown])
        assert text == shown.text.strip() != plain.text.strip()


# Bad input.


def test_errors_that_concern_all_prompts_are_raised(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    for params, reason in (
        (SamplingParams(temperature=-1), "temperature is -1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"regex": "("}, "unclosed group"),
    ):
        with pytest.raises(ValueError, match=reason):
            gen.generate(["hello", [5]], params)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be SamplingParams, a dict or a list of them, not str"):
        gen.generate("hello", "greedy")  # type: ignore[arg-type]
    monkeypatch.setattr(gen.tokenizer, "encode", lambda text, special: [])
    with pytest.raises(ValueError, match="bad_words has 'x', which has no tokens; remove it"):
        gen.add([5], SamplingParams(bad_words=["x"]))
    for wrong, reason in ((5, "SamplingParams or a dict, not int"), ({"max_new_tokens": 5}, "use max_tokens")):
        for call in (gen.add, lambda prompt, params: gen.generate([prompt] * 2, [SHORT, params])):
            with pytest.raises(TypeError, match=reason):
                call([5], wrong)  # type: ignore[operator]
    for prompts, params, reason in (([5.0], None, "stream takes prompts and Requests, not float"), ([], 5, "not int")):
        with pytest.raises(TypeError, match=reason):
            next(gen.stream(iter(prompts), params))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts and 1 params"):
        gen.generate(["hello", "world"], [SHORT])
    check_idle(gen)


def test_a_pool_that_limits_the_context_is_a_warning_with_all_that_can_raise_it(
    talker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Generator(talker, page_size=16, num_pages=9).close()
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith("the KV pool holds a context of 128 tokens")
    assert said.endswith("raise num_pages, kv_cache_gb or memory_fraction")


def test_failed_prompts_are_counted_in_the_log(gen: Generator, caplog: pytest.LogCaptureFixture) -> None:
    good, empty, wrong = gen.generate([[5], [], [VOCAB]], SHORT)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.getMessage().startswith("2 of 3 prompts failed; the first error is: the prompt is empty; give")
    assert good.error is None
    with pytest.raises(ValueError, match=f"'{empty.id}' failed: the prompt is empty"):
        _ = empty.text
    assert wrong.completions[0].text == ""
    caplog.clear()
    gen.generate([[5]], SHORT)
    assert not caplog.records


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "the prompt is empty"),
    "longer than the context": ([5] * 512, {}, "512 tokens, and the context of 512 tokens has room for 511"),
    "id above the vocabulary": ([5, VOCAB], {}, f"the id {VOCAB}, outside the vocabulary of {VOCAB} tokens"),
    "id below 0": ([5, -1], {}, "the id -1, outside the vocabulary"),
    "no prompt": (None, {}, "not NoneType"),
    "words as ids": (["hello", "world"], {}, "must hold integers, not 'hello'"),
    "no tokens": ([5], {"max_tokens": 0}, "at least 1 token .in Python, 0 goes with prompt_logprobs"),
    "cold": ([5], {"temperature": -0.1}, "temperature is -0.1; it must be at least 0"),
    "stop id outside": ([5], {"stop_token_ids": [VOCAB]}, f"stop_token_ids holds the id {VOCAB}"),
    "many logprobs": ([5], {"logprobs": 129}, "logprobs is 129; it must be at least 0 and at most 128"),
    "a blank word": ([5], {"bad_words": [" "]}, "a text in bad_words is blank"),
}


def test_bad_requests_fail_alone(gen: Generator) -> None:
    good = [([random_ids(9, seed=i)], replace(SHORT, temperature=1, seed=i)) for i in range(len(BAD))]
    alone = [ids_of(gen.generate(*request))[0] for request in good]
    prompts = [p for (prompt,), bad in zip([g[0] for g in good], BAD.values(), strict=True) for p in (prompt, bad[0])]
    params = [p for (_, own), bad in zip(good, BAD.values(), strict=True) for p in (own, replace(SHORT, **bad[1]))]
    outputs = gen.generate(prompts, params)
    assert ids_of(outputs[::2]) == alone
    for output, (prompt, fields, message) in zip(outputs[1::2], BAD.values(), strict=True):
        (completion,) = output.completions
        assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [], "")
        with pytest.raises(ValueError, match=message):
            raise ValueError(output.error)
        with pytest.raises((ValueError, TypeError), match=message):
            gen.add(prompt, fields)
    requests = [Request(prompt, fields, id=name) for name, (prompt, fields, _) in BAD.items()]
    assert {output.id for output in gen.stream(requests) if output.error} == set(BAD)


def test_text_needs_a_tokenizer_and_ids_do_not(llama: Path) -> None:
    with Generator(llama, max_seqs=2) as gen:
        for prompt in ("hello", [{"role": "user", "content": "hello"}], {"prompt": "hello"}):
            for prompts in (prompt, [[5], prompt]):
                with pytest.raises(ValueError, match="no tokenizer files"):
                    gen.generate(prompts, SHORT)
        stop, words, ids = gen.generate([[5], [5], {"prompt_token_ids": [5, 6]}], [
            replace(SHORT, stop="x"), replace(SHORT, bad_words=["x"]), SHORT
        ])  # fmt: skip
        assert "stop_token_ids" in str(stop.error)
        assert "use a mask" in str(words.error)
        assert (ids.text, ids.prompt, len(ids_of([ids])[0])) == ("", None, 6)
        id = gen.add([5, 6], SHORT)
        assert {(event.id, event.text) for event in drain(gen)} == {(id, "")}


def test_the_signature_and_the_docstring_show_the_options() -> None:
    shown = inspect.signature(Generator).parameters
    assert list(shown) == list(OPTIONS)
    assert {name: each.default for name, each in shown.items()} == asdict(GeneratorOptions())
    assert shown["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert shown["seed"].kind is inspect.Parameter.KEYWORD_ONLY
    assert str(Generator.__init__.__doc__).splitlines() == [option.line for option in OPTIONS.values()]
    assert OPTIONS["load"].line.endswith("Choices: auto, dummy. Default: auto.")


def test_names_of_other_libraries_are_errors_that_say_ours(gen: Generator) -> None:
    for kind, name, ours in (
        (Generator, "max_seq", "the nearest one is 'max_seqs'"),
        (Generator, "gpu_memory_utilization", "use memory_fraction"),
        (SamplingParams, "topk", ".*'top_k'"),
        (SamplingParams, "guided_regex", "use regex"),
        (SamplingParams, "xyz", "the options are allowed_token_ids, bad"),
    ):
        with pytest.raises(TypeError, match=f"{kind.__name__} has no option '{name}'; {ours}"):
            kind(**{name: 1})  # type: ignore[arg-type]
    assert SamplingParams(top_k=-1) == SamplingParams()
    for call in (gen.generate, gen.chat):
        for name, ours in (
            ("sampling_params", "use params$"),
            ("use_tqdm", "use progress$"),
            ("progres", "the nearest one is 'progress'$"),
            ("max_new_tokens", "use max_tokens; parameters of sampling go into params"),
            ("top_p", "the arguments are .*params, .*; parameters of sampling go into params, as SamplingParams or"),
        ):
            with pytest.raises(TypeError, match=f"^Generator.{call.__name__} has no argument '{name}'; {ours}"):
                call("hello", **{name: 1})  # type: ignore[operator]
    for method in (gen.score, gen.classify, gen.embed):
        with pytest.raises(
            TypeError, match=f"^Generator.{method.__name__} has no argument 'normalize'; the arguments ar"
        ):
            method("hello", normalize=True)  # type: ignore[operator]
        with pytest.raises(TypeError, match=f"^Generator.{method.__name__}: missing a required argument: "):
            method()  # type: ignore[operator]
    assert not names.advice("argument").keys() & (OPTIONS.keys() | SamplingParams.__dataclass_fields__.keys())


# Streams.


def test_a_stream_takes_prompts_and_parameters_as_generate_does(gen: Generator) -> None:
    own = replace(SHORT, max_tokens=3)
    (alone,) = gen.stream("hello", SHORT)
    assert ids_of([alone]) == ids_of(gen.generate("hello", SHORT))
    assert ids_of(list(gen.stream([5, 6], SHORT))) == ids_of(gen.generate([5, 6], SHORT))
    items = iter([Request([5, 6], own, 0), None, Request([5, 6], id=1), [5, 6]])
    outputs = {output.id: ids_of([output])[0] for output in gen.stream(items, SHORT)}
    assert [len(outputs.pop(0)), *map(len, outputs.values())] == [3, 6, 6]
    with pytest.raises(ValueError, match="top_k is -2"):
        next(gen.stream(["hello"], {"top_k": -2}))


class Feed:
    """Endless requests. busy: number of running sequences at the time when each request was read."""

    def __init__(self, gen: Generator, params: SamplingParams = SHORT) -> None:
        self.gen, self.params = gen, params
        self.busy: list[int] = []

    def __iter__(self) -> Iterator[Request]:
        while True:
            self.busy.append(self.gen.stats.running)
            length = 3 + 7 * len(self.busy) % 22
            yield Request(random_ids(length), replace(self.params, max_tokens=length), len(self.busy))


@pytest.mark.parametrize("n", [3])
def test_an_endless_stream_fills_each_lane_that_falls_free_and_reads_no_further(gen: Generator, n: int) -> None:
    feed = Feed(gen, replace(SHORT, n=n, temperature=1))
    for done, output in enumerate(itertools.islice(gen.stream(feed), 60), 1):
        assert len(output.completions) == n
        assert len(feed.busy) <= done + gen.config.max_seqs // n + 2
    assert gen.stats.running == 0  # leaving has aborted the others
    assert len(feed.busy) > 60
    assert np.mean(feed.busy[10:]) > gen.config.max_seqs - n - 1


class ReadPrompt(list[int]):
    """A prompt that notes when it is read: the number of steps so far, and of unfinished requests."""

    gen: Generator
    reads: list[tuple[int, int]]

    def __iter__(self) -> Iterator[int]:
        self.reads.append((self.gen.stats.steps, self.gen.unfinished))
        return super().__iter__()


def test_a_list_is_read_little_by_little(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step does not wait until all prompts are tokenized; soon AHEAD prompts are in the engine."""
    monkeypatch.setattr(fastgen.generator, "AHEAD", 30)
    prompts = [ReadPrompt(random_ids(40, seed=i)) for i in range(70)]
    for prompt in prompts:
        prompt.gen, prompt.reads = gen, []
    outputs = gen.generate(prompts, SHORT)
    assert [output.prompt_token_ids for output in outputs] == prompts
    tokens: Counter[int] = Counter()
    for prompt in prompts:
        tokens[prompt.reads[0][0]] += len(prompt)
    budget = fastgen.generator.READ_STEPS * gen.config.max_step_tokens
    assert budget <= tokens[min(tokens)] <= max(tokens.values()) <= budget + 40 < 30 * 40
    assert 25 < max(prompt.reads[0][1] for prompt in prompts) < 30


def test_a_stream_yields_in_the_order_of_completion(gen: Generator) -> None:
    lengths = [30, 5, 20, 1, 10]
    requests = [Request([5], replace(SHORT, max_tokens=length), length) for length in lengths]
    assert [output.id for output in gen.stream(requests)] == sorted(lengths)


def test_an_exception_of_the_input_is_raised_and_aborts(gen: Generator) -> None:
    def broken() -> Iterator[Request]:
        yield from itertools.islice(Feed(gen), 10)
        raise OSError("the file is gone")

    done = []
    with pytest.raises(OSError, match="the file is gone"):
        done.extend(output.id for output in gen.stream(broken()))
    assert gen.unfinished == 0


def test_events_of_added_requests_survive_a_stream(gen: Generator) -> None:
    params = replace(SHORT, max_tokens=20)
    alone = ids_of(gen.generate([random_ids(9)], params))[0]
    id = gen.add(random_ids(9), params)
    said = [token for event in gen.step() for token in event.token_ids]
    outputs = list(gen.stream(itertools.islice(Feed(gen), 12)))
    assert sorted(output.id for output in outputs) == list(range(1, 13))
    (kept,) = itertools.islice(gen.stream([Request([5], SHORT, "inner")]), 1)
    assert kept.id == "inner"
    while gen.unfinished:
        for event in gen.step():
            assert event.id == id
            said += event.token_ids
    assert said == alone


def test_streams_nest_and_an_aborted_request_leaves_its_stream(gen: Generator) -> None:
    requests = [Request([5], SHORT, "short"), *(Request([6], replace(SHORT, max_tokens=90), i) for i in range(3))]
    done = []
    for output in gen.stream(requests):
        done += [output.id, *(inner.id for inner in gen.stream([Request([7], SHORT, f"in {output.id}")]))]
        if output.id == "short":
            partial, gone = gen.abort([1, "nobody", 2])
            assert (partial.id, gone.id) == (1, 2)
            assert 0 < len(ids_of([partial])[0]) < 90
    assert done == ["short", "in short", 0, "in 0"]


def test_an_id_that_is_running_is_refused_and_automatic_ids_avoid_it(gen: Generator) -> None:
    made = gen.add([5], SHORT)
    mine = gen.add([5], SHORT, id=f"r{int(str(made)[1:]) + 1}")
    with pytest.raises(ValueError, match=f"'{mine}' is running"):
        gen.add([6], SHORT, id=mine)
    ids = {made, mine, gen.add([5], SHORT)}
    first, *_ = gen.stream([Request([7], SHORT, mine), Request([7], replace(SHORT, max_tokens=1), "other")])
    assert (first.id, first.error is None) == (mine, False)
    assert len(ids) == len(gen.abort(ids)) == 3
    assert gen.add([6], SHORT, id=mine) == mine
    assert len(gen.abort([mine])) == 1


# Aborts.


def test_an_abort_returns_the_tokens_so_far(gen: Generator) -> None:
    params = replace(SHORT, max_tokens=40, n=2, prompt_logprobs=0, speculate=False)
    plain = replace(SHORT, speculate=False)
    whole = gen.generate([random_ids(9)], params)[0]
    running, waiting = gen.add(random_ids(9), params), [gen.add([5], plain) for _ in range(9)]
    for _ in range(5):
        gen.step()
    outputs = gen.abort([running, *waiting[-2:]])
    assert [output.id for output in outputs] == [running, *waiting[-2:]]
    for part, full in zip(outputs[0].completions, whole.completions, strict=True):
        count = len(part.token_ids)
        assert 3 <= count < 40
        assert part.finish_reason == "abort"
        assert part.token_ids == full.token_ids[:count]
        assert part.raw_logprobs == full.raw_logprobs[:count]
        assert len(part.logprobs) == count
    assert outputs[0].prompt_logprobs is not None
    assert outputs[0].prompt_logprobs[1:] == (whole.prompt_logprobs or [])[1:]
    assert ids_of(outputs[1:]) == [[], []]
    assert gen.abort([running, "nobody"]) == []
    assert {event.id for event in drain(gen)} == set(waiting[:-2])


def test_without_ids_all_requests_end(gen: Generator) -> None:
    long = replace(SHORT, max_tokens=90)
    ids = [gen.add([5], long) for _ in range(9)]
    assert [output.id for output in gen.abort()] == ids
    gen.add([5], long, id="one")
    gen.add([6], long, id="two")
    gen.cut_off("one")
    gen.cut_off()
    assert [(event.id, event.finish_reason) for event in drain(gen)] == [("one", "abort"), ("two", "abort")]


# Masks.


class Fails(Turns):
    """A mask that breaks after three tokens: in fill, in accept, or by allowing nothing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def fill(self, row: np.ndarray) -> None:
        super().fill(row)
        self.fail_in("fill")
        if self.count == 3 and self.how == "nothing":
            row[:] = 0

    def accept(self, token: int) -> None:
        self.fail_in("accept")
        super().accept(token)

    def fail_in(self, method: str) -> None:
        if self.count == 3 and self.how == method:
            raise RuntimeError("no more")


@pytest.mark.parametrize("how", ["fill", "accept", "nothing"])
def test_a_mask_that_fails_fails_alone(gen: Generator, how: str) -> None:
    params = replace(SHORT, max_tokens=8, temperature=1, seed=2)
    alone = ids_of(gen.generate([random_ids(12)], params))
    masked = ids_of(gen.generate([random_ids(9)], replace(params, mask=Turns())))[0]
    bad, good = gen.generate([random_ids(9), random_ids(12)], [replace(params, mask=Fails(how)), params])
    assert ids_of([good]) == alone
    completion = bad.completions[0]
    message = "allowed no token" if how == "nothing" else "raised RuntimeError('no more')"
    assert (completion.finish_reason, completion.error) == ("error", f"the mask {message}")
    assert completion.token_ids == masked[:3]
    assert len(completion.logprobs) == len(completion.raw_logprobs) == 3


def test_masked_answers_follow_their_grammar_when_preempted(llama: Path) -> None:
    mask = Turns()
    params = SamplingParams(max_tokens=24, temperature=1, seed=0, n=2, mask=mask, ignore_eos=True)
    with Generator(llama, page_size=4, num_pages=16, max_seqs=4, max_step_tokens=16) as gen:
        let_pages_run_out(gen)
        outputs = gen.generate([random_ids(9), random_ids(20), random_ids(5)], params)
        assert gen.stats.preemptions > 0
        check_idle(gen)
    for ids in ids_of(outputs):
        assert [token % 5 for token in ids] == [place % 5 for place in range(24)]
    assert len({tuple(ids) for ids in ids_of(outputs)}) == 6
    assert mask.count == 0  # each sample had its own copy


# Seeds.


def test_seeds_decide_the_answers(llama: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[5, 6], [5, 6], [7]]

    def said(seed: int | None, request_seed: int | None = None) -> list[list[int]]:
        with Generator(llama, seed=seed, max_seqs=4) as gen:
            return ids_of(gen.generate(prompts, replace(params, seed=request_seed)))

    torch.manual_seed(0)
    first = said(1)
    assert first == said(1)
    assert first[0] != first[1]  # each request has its own
    assert first != said(2)
    torch.manual_seed(0)
    assert said(None) != said(None)
    given = said(1, request_seed=3)
    assert given == said(None, request_seed=3)
    assert given[0] == given[1]
    assert given[2] != said(1, request_seed=4)[2]


# Progress, statistics, closing.


def test_progress_is_a_bar_on_stderr(gen: Generator, capsys: pytest.CaptureFixture[str]) -> None:
    gen.generate([[5]] * 3, SHORT)
    assert capsys.readouterr() == ("", "")
    gen.generate([[5]] * 3, SHORT, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert "tok/s" in shown.err


def test_stats_add_up(llama: Path) -> None:
    with Generator(llama, max_seqs=4, max_step_tokens=16, page_size=16, num_pages=20) as gen:
        gen.generate([random_ids(20), random_ids(11), []], replace(SHORT, n=2))
        stats = gen.stats
        assert (stats.requests, stats.finished, stats.prompt_tokens, stats.generated_tokens) == (2, 2, 31, 24)
        assert stats.steps >= 31 / 16 + 5
        assert stats.pages == 20
        assert (stats.prefilled_tokens, stats.cached_tokens) == (31, 19 + 10)  # all but a token of the second samples
        assert stats.tokens_per_second == pytest.approx(24 / stats.step_seconds)
        gen.add(random_ids(20, seed=1), replace(SHORT, n=5))
        gen.step()  # the first 16 tokens; then the others join
        stats = gen.stats
        assert (stats.running, stats.waiting, stats.pages_used) == (1, 4, 2)
        assert "running 1, waiting 4" in str(stats)


def test_a_closed_generator_says_so(llama: Path) -> None:
    with Generator(llama, max_seqs=2) as gen:
        gen.add([5], SHORT)
        gen.step()
        assert gen.unfinished == 1
    assert gen.unfinished == 0
    gen.close()
    for call in (
        lambda: gen.generate([5], SHORT),
        lambda: gen.score([[5, 6]]),
        lambda: list(gen.stream([Request([5], SHORT)])),
        lambda: (gen.add([5], SHORT), gen.step()),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
