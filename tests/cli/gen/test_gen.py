"""fggen over a Generator of random weights: records, errors, memory and options."""

from __future__ import annotations

import json
import re
import sys
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generating import PROMPTS, SHORT, Fggen, by_row, read, write

import fastgen
from fastgen import Generator, SamplingParams
from fastgen.cli.gen import main
from fastgen.cli.gen.outputs import Lines
from fastgen.cli.gen.progress import Progress
from fastgen.cli.gen.rows import Row, read_rows
from fastgen.cli.gen.work import Done, RowJob, state_by, work
from fastgen.engine.seeds import seed_of
from fastgen.model.loader import find_tokenizer, resolve
from fastgen.request import Completion, Request, RequestOutput

# ------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("extra", [(), ("token_ids", "logprobs", "raw_logprobs")])
def test_rows_say_what_generate_says(
    fggen: Fggen, gen: Generator, extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are of every kind. Parameters are those of the row, then of the options, then of the model."""
    monkeypatch.setattr(gen, "default_params", SamplingParams(temperature=0, top_k=3))
    messages = [{"role": "user", "content": "hello"}]
    own = {"n": 3, "max_tokens": 2, "temperature": 0.5, "seed": 9, "top_k": 5, "logit_bias": {"7": 3.0}}
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"prompt": "hello", "id": "a"}, {}),
        ({"messages": messages, "topic": None}, {"temperature": 0.5}),
        ({"prompt_token_ids": [5, 6, 7]}, own),
        ({"prompt": "hello"}, {"max_tokens": None, "stop": ["zz"], "ignore_eos": True}),
    ]
    write("in.jsonl", *({**row, **given} for row, given in rows))
    temperature = 0.7 if extra else 0
    options = ("--n", 2, *SHORT, *(("--logprobs", "--temperature", temperature) if extra else ()))
    assert fggen("in.jsonl", "-o", "out.jsonl", *options) == 0
    for index, (row, given) in enumerate(rows):
        params = {"n": 2, "temperature": temperature, "top_k": 3, "max_tokens": 5, "seed": seed_of(3, index)}
        params |= {name: value for name, value in given.items() if value is not None}
        params |= {"logit_bias": {7: 3.0}} if "logit_bias" in given else {}
        prompt = row.get("prompt") or row.get("messages") or row["prompt_token_ids"]
        (output,) = gen.generate([prompt], SamplingParams(**params))
        assert by_row("out.jsonl")[index] == {
            "row": index,
            "error": None,
            **row,
            **given,
            "completions": [completion.text for completion in output.completions],
            "finish_reasons": [completion.finish_reason for completion in output.completions],
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": [len(completion.token_ids) for completion in output.completions],
            **{name: [getattr(completion, name) for completion in output.completions] for name in extra},
        }


def test_answers_that_repeat_themselves_end_and_are_counted(fggen: Fggen, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"max_pattern_size": 1, "min_count": 2}
    row = {"prompt": "hello", "logit_bias": {"7": 100.0}, "ignore_eos": True}
    write("in.jsonl", row, {**row, "repetition_detection": {"max_pattern_size": 0}}, {**row, "n": 2})
    assert fggen("in.jsonl", "-o", "out.jsonl", *SHORT, "--repetition-detection", json.dumps(limits)) == 0
    found = [(each["completion_tokens"], each["finish_reasons"]) for each in by_row("out.jsonl")]
    assert found == [([2], ["stop"]), ([5], ["length"]), ([2, 2], ["stop", "stop"])]
    assert "; ended by repetition: 3; in out.jsonl" in capsys.readouterr().err


def test_a_template_makes_prompts_of_columns(fggen: Fggen) -> None:
    write("topics.jsonl", {"topic": "a fox", "size": 3}, {"topic": None, "size": 3}, {"topic": "{size}", "size": 4})
    write("same.jsonl", {"prompt": "Write {3:02} about a fox in 03 words"}, {"prompt": "x"})
    write("chat.jsonl", {"messages": [{"role": "user", "content": "Write {3:02} about a fox in 03 words"}]})
    template = ("--template", "Write {{3:02}} about {topic} in {size:02} words")
    for number, arguments in enumerate((("topics", *template), ("same",), ("topics", *template, "--chat"), ("chat",))):
        name, *options = arguments
        assert fggen(f"{name}.jsonl", "-o", f"{number}.jsonl", *options, *SHORT) == 0
    template_said, prompt_said, chat_said, messages_said = (by_row(f"{number}.jsonl") for number in range(4))
    assert template_said[0]["completions"] == prompt_said[0]["completions"]
    assert template_said[0]["topic"] == "a fox"
    assert template_said[1]["error"] == "the row has no topic, which the template needs"
    assert template_said[2]["error"] is None
    assert chat_said[0]["completions"] == messages_said[0]["completions"]
    assert chat_said[0]["prompt_tokens"] > template_said[0]["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--template", "{a} and {topik}"], "no row has a column topik, which the template needs (a literal brace is"),
        (["--template", "{a.b}"], "no row has a column a.b, which"),
        (["--template", "{a"], "the template cannot be read: "),
        (["--template", "a}"], "the template cannot be read: "),
        (["--template", "{}"], "the template has {} without the name of a column; write a literal brace twice"),
        ([], "no row has a column prompt or messages or prompt_token_ids, and no --template makes one of other"),
    ],
)
def test_a_wrong_template_is_told_before_the_model_is_loaded(
    options: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["no/model", write("in.jsonl", {"a": 1, "b": 2}, {"a": 2}), "-o", "out.jsonl", *options]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize(("rows", "status", "failed"), [([{"prompt": "x"}], 0, "some"), ([{"prompt": 5}], 3, "all")])
def test_the_summary_and_the_status(
    fggen: Fggen, rows: list[Any], status: int, failed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("in.jsonl", "nonsense", *rows * 4)
    assert fggen("in.jsonl", "-o", "out.jsonl", *SHORT) == status
    said, errors = capsys.readouterr().err, 5 if status else 1
    records = by_row("out.jsonl")
    prompts = sum(record["prompt_tokens"] or 0 for record in records)
    generated = sum(sum(record["completion_tokens"] or ()) for record in records)
    assert f", {errors} of them errors; {prompts} tokens in, {generated} out, " in said
    assert f"fggen: {failed} rows have failed; one error is: line 1 of in.jsonl cannot be read" in said
    assert fggen("in.jsonl", "-o", "out.jsonl", *SHORT) == status, "and so it does again"
    assert f"nothing is left to do of 5 rows, {errors} of them errors" in capsys.readouterr().err


def test_a_system_prompt_begins_conversations_that_have_none(fggen: Fggen) -> None:
    user = {"role": "user", "content": "hello"}
    own, other = ({"role": "system", "content": text} for text in ("be kind", "be short"))
    write("in.jsonl", {"prompt": "hello"}, {"messages": [user]}, {"messages": [own, user]}, {"prompt_token_ids": [5]})
    write("same.jsonl", {"messages": [other, user]}, {"messages": [other, user]}, {"messages": [own, user]})
    assert fggen("in.jsonl", "-o", "out.jsonl", "--system", "be short", *SHORT) == 0
    assert fggen("same.jsonl", "-o", "same_out.jsonl", *SHORT) == 0
    *found, ids = by_row("out.jsonl")
    names = ("completions", "prompt_tokens")
    assert [[row[name] for name in names] for row in found] == [
        [row[name] for name in names] for row in by_row("same_out.jsonl")
    ]
    assert "leave --system out for prompt_token_ids" in ids["error"]


def test_answers_have_the_structure_that_is_asked_for(fggen: Fggen, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    write("in.jsonl", *PROMPTS[:2])
    Path("schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    for name, options in (("json", ["--json-schema", "schema.json"]), ("regex", ["--regex", "[ab]{3}"])):
        assert fggen("in.jsonl", "-o", f"{name}.jsonl", *options, "--max-tokens", 60) == 0
    assert fggen("in.jsonl", "-o", "choice.jsonl", "--choice", "yes", "no", "--choice", "may be") == 0
    texts = {name: [row["completions"][0] for row in by_row(f"{name}.jsonl")] for name in ("json", "regex", "choice")}
    assert all(json.loads(text) in ({"a": True}, {"a": False}) for text in texts["json"])
    assert all(set(text) <= set("ab") and len(text) == 3 for text in texts["regex"])
    assert set(texts["choice"]) <= {"yes", "no", "may be"}
    assert fggen("in.jsonl", "-o", "json.jsonl", "--json-schema", '{"type": "string"}') == 1
    assert "was begun with another --max-tokens, --json-schema, as" in capsys.readouterr().err
    assert fggen("in.jsonl", "-o", "bad.jsonl", "--json-schema", '{"type": "nothing"}') == 1
    assert "fggen: error: --json-schema: " in capsys.readouterr().err
    assert read("bad.jsonl") == []


def test_a_limit_can_be_raised(fggen: Fggen, capsys: pytest.CaptureFixture[str]) -> None:
    write("in.jsonl", *PROMPTS)
    assert fggen("in.jsonl", "-o", "whole.jsonl", *SHORT) == 0
    for limit, rows in ((2, 2), (2, 2), (1, 2), (4, 4)):
        assert fggen("in.jsonl", "-o", "out.jsonl", "--limit", limit, "--ordered", *SHORT) == 0
        assert len(by_row("out.jsonl")) == rows
    assert capsys.readouterr().err.count("nothing is left to do") == 2
    assert fggen("in.jsonl", "-o", "out.jsonl", "--ordered", *SHORT) == 0
    assert read("out.jsonl") == by_row("whole.jsonl")


def test_a_dry_run_shows_prompts_and_loads_only_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = find_tokenizer(None, resolve("fastgen-tiny"))
    assert tokenizer is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "_load", lambda args: pytest.fail("the model is loaded"))
    rows = [{"topic": "foxes"}, {"topic": None}, {"topic": "the other\nthings"}, {"topic": "unseen"}]
    command = ["fastgen-tiny", write("in.jsonl", *rows), "--dry-run", "--template", "About {topic}"]
    assert main.main([*command, "--system", "be short"]) == 0
    said = capsys.readouterr()
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "About foxes"}]
    ids, text = tokenizer.read_chat(messages)
    first, wrong, last = said.out.split("--- row ")[1:]
    assert first == f"0: {len(ids)} tokens\n{text}\n"
    assert wrong == "1\nerror: the row has no topic, which the template needs\n"
    assert "About the other\nthings" in last
    assert "fggen: dry run: 3 of 4 rows, 1 of them errors, " in said.err
    assert main.main([*command, "--limit", "1"]) == 0
    assert capsys.readouterr().out == f"--- row 0: {len(tokenizer.encode('About foxes'))} tokens\nAbout foxes\n"
    body = {"messages": messages, "response_format": {"type": "json_object"}}
    batch = {"custom_id": "x", "url": "/v1/chat/completions", "body": body}
    write("batch.jsonl", batch, {**batch, "body": {"messages": [{"role": "user", "content": "a " * 9999}]}})
    assert main.main(["fastgen-tiny", "batch.jsonl", "--dry-run"]) == 0
    first, wrong = capsys.readouterr().out.split("--- row ")[1:]
    assert first == f"0: {len(ids)} tokens\n{tokenizer.decode(ids, special=True)}\n"
    assert "maximum context length" in wrong
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.jsonl", "in.jsonl"]


# ------------------------------------------------------------------------------------------------- bad rows


BAD = (
    ("not json", "line 1 of in.jsonl cannot be read: it is not JSON: Expecting value: "),
    ('{"prompt": "x"', "line 1 of in.jsonl cannot be read"),
    ("[1, 2]", "it is not an object"),
    ("[" * 10**5, "line 1 of in.jsonl cannot be read"),
    ({"text": "hello"}, "needs one of prompt, messages, prompt_token_ids, and this one has none"),
    ({"prompt": "hello", "prompt_token_ids": [5]}, "this one has prompt and prompt_token_ids"),
    ({"prompt": 5}, "prompt must be text or a list of ids, not 5"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": ["hello"]}, "a prompt of ids must hold integers"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "no critics"),
    ({"prompt_token_ids": [5, 10**6]}, "outside the vocabulary"),
    ({"prompt_token_ids": [5, "x"]}, "must hold integers"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    ({"prompt_token_ids": [5] * 600}, "the prompt has 600 tokens, and the context"),
    ({"prompt": "x", "temperature": -1}, "temperature is -1"),
    ({"prompt": "x", "n": "two"}, "n must be an integer"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "n": 10**9}, "n is 1000000000; it may be at most 10000"),
    ({"prompt": "x", "ignore_eos": "no"}, "ignore_eos must be True or False"),
    ({"prompt": "\ud800"}, "surrogates not allowed"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
)  # fmt: skip


def test_bad_rows_are_records_with_a_reason(fggen: Fggen, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row, _ in BAD]
    write("in.jsonl", *(each for row in rows for each in (row, {"prompt": "hello"})))
    assert fggen("in.jsonl", "-o", "out.jsonl", *SHORT) == 0
    found = by_row("out.jsonl")
    for place, (row, reason) in enumerate(BAD):
        bad, good = found[2 * place], found[2 * place + 1]
        assert reason in bad["error"].replace(f"line {2 * place + 1}", "line 1")
        assert bad["completions"] is bad["prompt_tokens"] is None
        assert good["error"] is None
        if isinstance(row, dict):
            assert {name: bad[name] for name in row} == row
    said = capsys.readouterr().err
    assert f"{len(found)} rows in" in said
    assert f"{len(BAD)} of them errors" in said


def test_strict_stops_at_a_bad_row_and_can_be_gone_on_without(
    fggen: Fggen, capsys: pytest.CaptureFixture[str], gen: Generator
) -> None:
    write("in.jsonl", *PROMPTS, {"text": "x"}, *PROMPTS)
    assert fggen("in.jsonl", "-o", "out.jsonl", "--strict", *SHORT) == 1
    assert "error: row 5: a row needs one of prompt" in capsys.readouterr().err
    kept = read("out.jsonl")
    assert all(record["error"] is None for record in kept)
    assert gen.unfinished == 0
    assert fggen("in.jsonl", "-o", "out.jsonl", *SHORT) == 0
    found = by_row("out.jsonl")
    assert [record["row"] for record in found if record["error"]] == [5]
    assert len(found) == 11


def test_columns_of_fggens_own_names_need_a_prefix(fggen: Fggen, capsys: pytest.CaptureFixture[str]) -> None:
    assert fggen(write("in.jsonl", PROMPTS[0], PROMPTS[1]), "-o", "one.jsonl", *SHORT) == 0
    assert fggen("one.jsonl", "-o", "two.jsonl", *SHORT) == 1
    assert "there is a column row already; rename it, or give those of fggen a --prefix" in capsys.readouterr().err
    assert fggen("one.jsonl", "-o", "two.jsonl", "--prefix", "second_", *SHORT) == 0
    assert fggen("one.jsonl", "-o", "two.jsonl", "--prefix", "second_", *SHORT) == 0, "and it finds its rows again"
    found = sorted(read("two.jsonl"), key=lambda record: record["second_row"])
    assert [record["completions"] for record in found] == [record["completions"] for record in read("one.jsonl")]
    assert all(len(record["second_completions"]) == 1 for record in found)
    assert fggen(write("late.jsonl", PROMPTS[0], {"prompt": "x", "error": 1}), "-o", "late_out.jsonl", *SHORT) == 0
    assert "column error already" in by_row("late_out.jsonl")[1]["error"]
    assert fggen("one.jsonl", "-o", "three.csv", "--prefix", 'my "own" ', *SHORT) == 0
    assert fggen("one.jsonl", "-o", "three.csv", "--prefix", 'my "own" ', *SHORT) == 0


# ------------------------------------------------------------------------------------------------- long files


class Echo:
    """A fake Generator: it reads `lanes` requests, and completes the youngest one first."""

    lanes = 16

    def __init__(self) -> None:
        self.read = self.done = self.most = 0

    def stream(self, requests: Iterable[Request | None]) -> Iterator[RequestOutput]:
        waiting: list[Request] = []
        for request in requests:
            assert request is not None
            waiting.append(request)
            self.read += 1
            self.most = max(self.most, self.read - self.done)
            if len(waiting) == self.lanes or not request.prompt:
                yield from self._answer(waiting.pop())
        while waiting:
            yield from self._answer(waiting.pop())

    def _answer(self, request: Request) -> Iterator[RequestOutput]:
        assert request.id is not None
        error = None if request.prompt else "the prompt is empty"
        completion = Completion(0, [], "", "error" if error else "stop", error=error)
        self.done += 1
        yield RequestOutput(request.id, [1], [completion])


def test_an_integer_in_the_column_priority_is_that_of_the_request() -> None:
    ask = RowJob(SamplingParams(), seed=0).ask
    given: list[Any] = [None, 3, "-4", "high", 2.5, True, 2.0, "1.0"]
    rows = (Row(0, {"prompt": "x", "priority": priority}) for priority in given)
    assert [request.priority for row in rows for request in ask(row).requests] == [0, 3, -4, 0, 0, 0, 2, 1]


@pytest.mark.parametrize("bad", [False, True])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, bad: bool) -> None:
    """bad: all rows have errors, so that none of them reaches a step."""
    peaks = []
    job = RowJob(SamplingParams(), seed=0)
    for count in (200, 2000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text((json.dumps({"prompt": None if bad else "x" * 500}) + "\n") * count)
        output = Lines(tmp_path / f"{count}-out.jsonl", state_by(("row", "error")))
        echo = Echo()
        with output.opened():
            tracemalloc.start()
            progress = Progress(count)
            main.write_all(work(job.ask, read_rows([path]), echo.stream), output, progress)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert sorted(index for index, _ in output.recover(retry=False)) == list(range(count))
        assert echo.most <= Echo.lanes
        assert (progress.tally.rows, progress.tally.errors) == (count, count * bad)
    assert peaks[1] < peaks[0] + 250_000, "the larger file has 1 MB"


# ------------------------------------------------------------------------------------------------- the command


WRONG_OPTIONS = (
    *(["--temperature", "-1"], ["--stop", ""], ["--n", "0"], ["--what"], ["--top-p", "0"], ["--limit", "0"]),
    *(["--json-schema", "{"], ["--json-schema", "no.json"], ["--regex", "a", "--choice", "b"]),
)


def test_options_are_checked_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    for options in WRONG_OPTIONS:
        with pytest.raises(SystemExit) as ended:
            main.main(["model", "nothing.jsonl", "-o", "out.jsonl", *options])
        assert ended.value.code == 2
    with pytest.raises(SystemExit):
        main.main(["model", "nothing.jsonl"])
    assert "the following arguments are required: -o" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert f"fggen {fastgen.__version__}" in capsys.readouterr().out


def test_outside_a_terminal_the_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastgen.cli.gen.progress.LINE_SECONDS", 0.02)
    with Progress(total=8, initial=2) as progress:
        time.sleep(0.1)
        progress.add(Done(0, {}, None, 3, 50))
        progress.add(Done(1, {}, "wrong", 3, 0))
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fggen: 2/8 rows"
    assert re.fullmatch(r"fggen: 4/8 rows, 1 errors, \d+\.\d tok/s, 00:00 left", lines[-1])
    progress.tally.started -= 600  # for the two rows of this run
    assert progress.line.endswith(" 20:00 left")


def test_options_reach_the_generator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(model: str, **options: Any) -> None:
        raise ValueError(f"{model} {options}")

    monkeypatch.setattr("fastgen.generator.Generator", load)
    monkeypatch.chdir(tmp_path)
    options = ["--max-seqs", "4", "--no-prefix-cache", "--kv-cache-gb", "1.5", "--tensor-parallel", "2"]
    files = [write(name, PROMPTS[0]) for name in ("a.jsonl", "b.jsonl")]
    assert main.main(["some/model", "-o", "x.jsonl", *options, *files]) == 1
    expected = {"max_seqs": 4, "kv_cache_gb": 1.5, "prefix_cache": False, "tensor_parallel": 2}
    assert f"fggen: error: some/model {expected}\n" in capsys.readouterr().err


def test_a_missing_chat_template_is_told_before_any_row(
    gen: Generator, fggen: Fggen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gen.tokenizer is not None
    monkeypatch.setattr(gen.tokenizer.hf, "chat_template", None)
    assert fggen(write("in.jsonl", *PROMPTS), "-o", "out.jsonl", "--chat") == 1
    assert "this model's tokenizer has no chat template" in capsys.readouterr().err
    assert read("out.jsonl") == []


def test_a_model_without_a_tokenizer_gives_ids(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt": "x"}\n')
    command = [
        str(llama),
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--max-tokens",
        "3",
        "--ignore-eos",
    ]
    assert main.main(command) == 1
    assert "--logprobs gives their token ids" in capsys.readouterr().err
    assert main.main([*command, "--logprobs", "--chat"]) == 0
    first, second = by_row(str(tmp_path / "out.jsonl"))
    assert len(first["token_ids"][0]) == 3
    assert "no tokenizer files" in second["error"]


@pytest.mark.parametrize(("arguments", "stream"), [(("-", "-o", "out.jsonl"), "stdin"), (("x", "-o", "-"), "stdout")])
def test_a_closed_stream_is_told(
    fggen: Fggen, arguments: tuple[str, ...], stream: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(sys, stream, None)
        assert fggen(*arguments) == 2
    assert capsys.readouterr().err == f"fggen: error: - is {stream}, which is closed; give a file\n"
