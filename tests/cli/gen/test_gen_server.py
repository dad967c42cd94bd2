"""fggen with --url: a fake OpenAI-style server whose answers the test writes."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from generating import by_row, read, write
from openai.types.chat import ChatCompletion

from fastgen.cli.gen import main, server_backend
from fastgen.cli.gen.rows import read_rows
from fastgen.cli.options import error_message
from fastgen.engine.seeds import seed_of

Answer = tuple[int | None, Any]
NO_KEY = {"error": {"message": "wrong key", "type": "invalid_request_error", "param": None, "code": None}}


def echoed(path: str, body: dict[str, Any]) -> Answer:
    """Answer with the last message or the prompt, once for each of n."""
    chat = path == "/v1/chat/completions"
    text = body["messages"][-1]["content"] if chat else str(body["prompt"])
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choices = [{"index": index, "finish_reason": "stop", **content} for index in range(body.get("n", 1))]
    usage = {"prompt_tokens": 7, "completion_tokens": 3 * len(choices), "total_tokens": 0}
    kind = "chat.completion" if chat else "text_completion"
    return 200, {"id": "x", "object": kind, "created": 0, "model": body["model"], "choices": choices, "usage": usage}


class Fake:
    """A fake server. answer: function of the path and the body of a request, which returns (status, body), or (None,
    all bytes of the response). asked: the requests, as (path, body). keys: their keys. most: maximum number of requests
    at a time."""

    def __init__(self) -> None:
        self.answer: Callable[[str, dict[str, Any]], Answer] = echoed
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.running = self.most = 0
        fake, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(404, {"detail": "no list of models"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    fake.asked.append((self.path, body))
                    fake.keys.add(self.headers["Authorization"])
                    fake.running += 1
                    fake.most = max(fake.most, fake.running)
                found = fake.answer(self.path, body)
                with lock:
                    fake.running -= 1
                self.send(*found)

            def send(self, status: int | None, body: Any) -> None:
                if status is None:
                    self.wfile.write(body)
                    return
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # many requests come at the same time

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def sent(self) -> list[dict[str, Any]]:
        return [body for _, body in self.asked]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTGEN_API_KEY", raising=False)
    server = Fake()
    yield server
    server.server.shutdown()
    server.server.server_close()


def fggen(fake: Fake, *options: Any) -> int:
    return main.main(["a/model", "in.jsonl", "-o", "out.jsonl", "--url", fake.url, *map(str, options)])


def numbered(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"number {index}"} for index in range(count)]


def test_what_is_sent_and_written(fake: Fake) -> None:
    system = {"role": "system", "content": "be short"}
    user = {"role": "user", "content": "hello"}
    own = {"messages": [{**system, "content": "own"}, user]}
    biased = {"messages": [user], "n": 2, "logit_bias": {"5": 1.0}}
    rows = [
        {"prompt": "hello", "id": 1, "priority": "high"}, {**biased, "priority": -2},
        {"prompt": "x", "seed": 5, "temperature": 1, "priority": "3"}, own,
    ]  # fmt: skip
    write("in.jsonl", *rows, {"prompt_token_ids": [5]}, {"prompt": 3})
    options = ("--system", "be short", "--temperature", 0.5, "--seed", 3, "--json-schema", '{"type": "object"}')
    assert fggen(fake, *options, "--concurrency", 1, "--api-key", "secret") == 0
    assert fake.keys == {"Bearer secret"}
    assert {path for path, _ in fake.asked} == {"/v1/chat/completions"}
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    same = {"model": "a/model", "temperature": 0.5, "response_format": {"type": "json_schema", "json_schema": schema}}
    seeds = [seed_of(3, index) >> 1 for index in range(6)]
    assert fake.sent() == [
        {**same, "messages": [system, user], "seed": seeds[0]},
        {**same, "messages": [system, user], "seed": seeds[1], "n": 2, "logit_bias": {"5": 1.0}, "priority": -2},
        {**same, "messages": [system, {"role": "user", "content": "x"}], "seed": 5, "temperature": 1, "priority": 3},
        {**same, **own, "seed": seeds[3]},
    ]
    found = by_row("out.jsonl")
    given = {"completions": ["hello"], "finish_reasons": ["stop"], "prompt_tokens": 7, "completion_tokens": [3]}
    assert found[0] == {"row": 0, "error": None, **rows[0], **given}
    assert (found[1]["completions"], found[1]["completion_tokens"]) == (["hello"] * 2, None), "only their sum is known"
    assert "leave --system out for prompt_token_ids" in found[4]["error"]
    assert "prompt must be text" in found[5]["error"]


@pytest.mark.parametrize("end", [{"stop_reason": "repetition"}, {"finish_reason": "repetition"}])
def test_answers_that_the_server_ends_for_repetition_are_counted(
    fake: Fake, end: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(path: str, body: dict[str, Any]) -> Answer:
        status, reply = echoed(path, body)
        reply["choices"][0] |= end if body["repetition_detection"]["min_count"] == 3 else {}
        return status, reply

    fake.answer = answer
    other = {"prompt": "x", "repetition_detection": {"max_pattern_size": 9, "min_count": 2}}
    write("in.jsonl", {"prompt": "x"}, other)
    assert fggen(fake, "--repetition-detection", '{"max_pattern_size": 9, "min_count": 3}') == 0
    assert "; ended by repetition: 1; in out.jsonl" in capsys.readouterr().err


def test_prompts_that_are_no_chat_and_structures(fake: Fake) -> None:
    write("in.jsonl", {"prompt": "hello", "top_k": 5}, {"prompt_token_ids": [5, 6]}, {"prompt": "x", "temperature": -1})
    assert fggen(fake, "--choice", "a", "b", "--concurrency", 1) == 0
    structure = {"model": "a/model", "structured_outputs": {"choice": ["a", "b"]}}
    expected = [{**structure, "prompt": "hello", "top_k": 5}, {**structure, "prompt": [5, 6]}]
    assert fake.asked == [("/v1/completions", body) for body in expected], "and no seed, which some servers refuse"
    assert "temperature is -1" in by_row("out.jsonl")[2]["error"]


def test_thinking_is_kept_in_the_text(fake: Fake) -> None:
    def think(path: str, body: dict[str, Any]) -> Answer:
        status, reply = echoed(path, body)
        reply["choices"][0]["message"]["reasoning_content"] = "let me see"
        return status, reply

    fake.answer = think
    write("in.jsonl", {"prompt": "hello"})
    assert fggen(fake, "--chat") == 0
    assert by_row("out.jsonl")[0]["completions"] == ["<think>\nlet me see\n</think>\n\nhello"]


@pytest.mark.parametrize("ordered", [False, True])
def test_so_many_requests_run_at_a_time(fake: Fake, ordered: bool) -> None:
    together, last = threading.Barrier(4), threading.Event()

    def wait(path: str, body: dict[str, Any]) -> Answer:
        index = int(body["prompt"].split()[1])
        if index < 4:
            together.wait(50)
        if index == 0:
            last.wait(50)
        if index == 11:
            last.set()
        return echoed(path, body)

    fake.answer = wait
    write("in.jsonl", *numbered(12))
    assert fggen(fake, "--concurrency", 4, *(("--ordered",) if ordered else ())) == 0
    assert fake.most == 4
    rows = [record["row"] for record in read("out.jsonl")]
    assert rows == list(range(12)) if ordered else rows.index(0) >= 8  # 9 and 10 may run beside 11
    assert [record["completions"] for record in by_row("out.jsonl")] == [[row["prompt"]] for row in numbered(12)]


def test_errors_of_rows(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """A busy server is asked again; what the server refuses or answers wrongly is the row's error."""
    refused = {"error": {"message": "too long", "type": "invalid_request_error"}}
    answers: dict[str, list[Answer]] = {
        "number 0": [(503, refused), (429, b"slowly")],
        "number 1": [(400, refused)],
        "number 2": [(422, {"detail": "no such field"})],
        "number 3": [(400, b"<html>")],
        "number 4": [(200, {"choices": 5})],
        "number 5": [(200, {"choices": []})],
    }

    def answer(path: str, body: dict[str, Any]) -> Answer:
        waiting = answers.get(body["prompt"])
        return waiting.pop(0) if waiting else echoed(path, body)

    fake.answer = answer
    write("in.jsonl", *numbered(7))
    assert fggen(fake) == 0
    wrong = [record["error"] for record in by_row("out.jsonl")]
    assert wrong[0] is wrong[6] is None
    assert wrong[1:3] == ["too long", '{"detail": "no such field"}']
    assert "<html>" in wrong[3]
    assert wrong[4] == 'the server\'s answer is wrong: choices should be a valid list; it begins {"choices": 5}'
    assert wrong[5] == "the server has given 0 answers instead of 1"
    assert "fggen: 7 rows in " in capsys.readouterr().err
    assert fggen(fake, "--retry-errors") == 0
    assert [record["error"] for record in by_row("out.jsonl")] == [None] * 7


TEXT = json.dumps(echoed("", {"prompt": "x", "model": ""})[1]).encode()
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WRONG: tuple[tuple[Answer, str], ...] = (
    *(((200, {"choices": [{"text": "x"}], "usage": usage}), "usage") for usage in ("abc", 5, [1])),
    *(
        ((200, {"choices": [{"text": "x"}], "usage": {"prompt_tokens": count}}), "usage.prompt_tokens")
        for count in ("1", -1, 1.5, True, 2**70, [1], {})
    ),
    *(((200, {"choices": choices}), "choices") for choices in (None, 5, {"0": 1}, ["x"], [None])),
    *(((200, {"choices": [choice]}), "choice") for choice in ({"text": 5}, {"text": ["x"]}, {"text": None}, {})),
    ((200, {"choices": [{"text": "x", "finish_reason": 5}]}), "choices.0.finish_reason"),
    ((200, {"choices": [{"text": "x"}] * 3}), "3 answers instead of 1"),
    *(((200, body), "answer is wrong") for body in ([], 5, "x", {}, None)),
    *(((200, body), "answer cannot be read") for body in (TEXT[:40], b"", b"<html>", b'{"a": "\xe9"}', b"\x00")),
    *(((200, b * 100_000), "more than 200 levels") for b in (b"[", b'{"a":')),
    ((200, TEXT[:-1] + b', "a":' + b"[" * 300 + b"]" * 300 + b"}"), "more than 200 levels"),
    ((200, TEXT[:-1] + b', "a": ' + b"1" * 5000 + b"}"), "an integer of more than 4300 digits"),
    ((200, {"error": {"message": "over quota", "code": 429}}), "over quota"),
    *(((None, raw), "gave no answer") for raw in (b"", b"\x00\r\n\r\n", CHUNKED + b"ZZ\r\n", CHUNKED + b"9\r\n{")),
    ((None, b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + TEXT), "the server gave no answer"),
    ((None, b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nnot gzip"), "the server gave no answer"),
    ((None, b"HTTP/1.1 307 T\r\nLocation: http://[::x\r\n\r\n"), "the server gave no answer"),
    ((None, b"HTTP/1.1 301 Moved\r\n\r\n"), "the server says 301"),
    *(((None, b"HTTP/1.1 429 T\r\nRetry-After: %s\r\n\r\nslow" % when), "slow") for when in (b"nan", b"9" * 999)),
    ((400, b"[" * 100_000), "[[["),
    ((400, b'{"error": {"message": "\\ud800!"}}'), "\\ud800!"),
    ((403, {"error": {"message": "blocked"}}), "blocked"),
    ((404, {"error": {"message": "gone"}}), "gone"),
)  # fmt: skip


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "batch.jsonl"])
def test_a_wrong_answer_is_the_error_of_its_row_and_the_job_goes_on(
    fake: Fake, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_backend, "RETRIES", 0)

    def answer(path: str, body: dict[str, Any]) -> Answer:
        number = body["prompt"].removeprefix("number ")
        place, bad = divmod(int(number) if number.isdecimal() else 0, 2)
        return WRONG[place][0] if bad else echoed(path, body)

    fake.answer, rows = answer, list[dict[str, Any]](numbered(2 * len(WRONG)))
    if name == "batch.jsonl":
        rows = [{"custom_id": "x", "url": "/v1/completions", "body": row} for row in rows]
    write("in.jsonl", *rows)

    def run(*options: str) -> list[tuple[str | None, Any]]:
        """Return the error of each row, and its answer if it has none."""
        assert main.main(["m", "in.jsonl", "-o", name, "--url", fake.url, *options]) == 0
        if name == "batch.jsonl":
            found = sorted(read(name), key=lambda record: int(record["id"].removeprefix("batch_req_")))
            bodies = [record["response"]["body"] for record in found]
            return [
                (None, body["choices"][0]["text"]) if "choices" in body else (error_message(body), None)
                for body in bodies
            ]
        files = sorted(Path(name).glob("*.parquet")) if name == "out.parquet" else [Path(name)]
        records = sorted((row.columns for row in read_rows(files)), key=lambda record: record["row"])
        return [(record["error"], record["completions"] and record["completions"][0]) for record in records]

    for found in (run(), run()):  # the second run finds all rows done
        assert len(found) == len(rows)
        for place, (_, reason) in enumerate(WRONG):
            assert found[2 * place] == (None, f"number {2 * place}")
            assert reason in ascii(found[2 * place + 1][0])
    assert f"{len(WRONG)} of them errors; --retry-errors does those again" in capsys.readouterr().err
    fake.answer = lambda path, body: (200, {"choices": [{"text": f"\ud83d {body['prompt']}"}]})
    half = "\\ud83d" if name == "out.parquet" else "\ud83d"  # Parquet has no halves of surrogate pairs
    expected = [f"number {index}" if index % 2 == 0 else f"{half} number {index}" for index in range(len(rows))]
    assert run("--retry-errors") == [(None, text) for text in expected]


BAD_ROWS = (
    ('{"prompt": "\\ud800"}', "prompt has '\\ud800', half of a surrogate pair"),
    ('{"messages": [{"role": "user", "content": "x", "a": NaN}]}', "messages has NaN"),
    ('{"messages": [{"role": "user", "content": "x", "a": -Infinity}]}', "messages has NaN or an infinity"),
    ('{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias"),
    ('{"prompt": "x", "a": %s}' % ("[" * 300 + "]" * 300), "line 9 of in.jsonl cannot be read: it has more than 200"),
    ('{"prompt": "x", "a": %s}' % ("1" * 5000), "line 11 of in.jsonl cannot be read: it has an integer of more than"),
    ("\x00", "line 13 of in.jsonl cannot be read: it is not JSON"),
)
IDS = '{"prompt": ["one", "two"]}', "a prompt of ids must hold integers, not ['one', 'two']"


@pytest.mark.parametrize("batch", [False, True])
def test_a_row_that_cannot_be_sent_has_an_error(fake: Fake, batch: bool) -> None:
    wrong = BAD_ROWS if batch else (*BAD_ROWS, IDS)  # two prompts are for batch files
    bad, good = [row for row, _ in wrong], '{"prompt": "hello"}'
    url = {False: "/v1/completions", True: "/v1/chat/completions"}
    lines = [line for row in bad for line in (row, good)]
    if batch:
        lines = [f'{{"custom_id": "x", "url": "{url["messages" in row]}", "body": {row}}}' for row in lines]
    write("in.jsonl", *lines)
    assert fggen(fake) == 0
    found = read("out.jsonl")
    assert len(fake.asked) == len(bad), "only the good ones were sent"
    if batch:
        found = [{"row": int(each["id"].removeprefix("batch_req_")), **each["response"]["body"]} for each in found]
    errors = [error_message(row) if row.get("error") else None for row in sorted(found, key=lambda row: row["row"])]
    for place, (_, reason) in enumerate(wrong):
        assert reason in str(errors[2 * place])
        assert errors[2 * place + 1] is None
    for path in ("/v1/../x", "/v1/a b", "/v1/a\n", "/v1/é", "/v1//a", None):
        write("paths.jsonl", {"custom_id": "x", "url": path, "body": {}}, {"custom_id": "y"})
        assert main.main(["m", "paths.jsonl", "-o", "paths_out.jsonl", "--url", fake.url]) == 3
        Path("paths_out.jsonl").unlink()


def test_answers_that_come_together_with_an_error_of_the_job_are_kept(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        """A client of openai whose requests all end at the same moment."""

        def __init__(self, **_: Any) -> None:
            pass

        def with_options(self, **_: Any) -> Client:
            return self

        async def get(self, *_: Any, **__: Any) -> bytes:
            return b""

        async def post(self, path: str, body: dict[str, Any], **_: Any) -> bytes:
            if body["prompt"] == "number 1":
                refusal: Any = SimpleNamespace(status_code=401, headers={}, request=None)
                raise openai.AuthenticationError("no", response=refusal, body=None)
            return json.dumps(echoed(path, body)[1]).encode()

    with monkeypatch.context() as patch:
        patch.setattr(openai, "AsyncOpenAI", Client)
        write("in.jsonl", *numbered(9))
        assert fggen(fake) == 1
    assert sorted(record["row"] for record in read("out.jsonl")) == [0, *range(2, 9)]
    assert fggen(fake) == 0
    assert [body["prompt"] for body in fake.sent()] == ["number 1"]


@pytest.mark.parametrize(
    ("status", "why"),
    [(401, "another key; give it by --api-key"), (404, "says 404: wrong key"), (None, "no connection to")],
)
def test_an_error_of_the_job_ends_it_and_it_goes_on_from_there(
    status: int | None, why: str, fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(path: str, body: dict[str, Any]) -> Answer:
        return echoed(path, body) if len(fake.asked) <= 5 else (status or 500, NO_KEY)

    fake.answer = some
    write("in.jsonl", *numbered(9))
    if status is None:
        url = fake.url
        monkeypatch.setattr(fake, "url", "http://127.0.0.1:9")
        assert fggen(fake) == 1
        monkeypatch.setattr(fake, "url", url)
    else:
        assert fggen(fake, "--concurrency", 1) == 1
    assert why in capsys.readouterr().err
    before = read("out.jsonl")
    assert len(before) == (0 if status is None else 5)
    assert all(record["error"] is None for record in before)
    fake.answer, fake.asked = echoed, []
    assert fggen(fake) == 0
    assert len(fake.asked) == 9 - len(before)
    assert [record["completions"] for record in by_row("out.jsonl")] == [[row["prompt"]] for row in numbered(9)]


def test_ctrl_c_ends_the_requests(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()

    def wait(path: str, body: dict[str, Any]) -> Answer:
        if body["prompt"] == "number 3":
            os.kill(os.getpid(), signal.SIGINT)
        if int(body["prompt"].split()[1]) > 2:
            over.wait(10)
        return echoed(path, body)

    fake.answer = wait
    write("in.jsonl", *numbered(20))
    assert fggen(fake, "--concurrency", 2) == 130
    over.set()
    assert "stopped; the same command goes on from here" in capsys.readouterr().err
    assert len(read("out.jsonl")) in (2, 3), "number 2 may be on its way"
    assert len(fake.asked) <= 5
    fake.answer = echoed
    assert fggen(fake) == 0
    assert len(by_row("out.jsonl")) == 20


def test_a_batch_file_is_sent_as_it_is(fake: Fake) -> None:
    def some(path: str, body: dict[str, Any]) -> Answer:
        return echoed(path, body) if path != "/v1/embeddings" else (404, NO_KEY)

    fake.answer = some
    chat = {"messages": [{"role": "user", "content": "hello"}], "model": "other", "temperature": 1, "tools": []}
    rows = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "b", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "c", "url": "elsewhere", "body": {}},
    ]
    write("in.jsonl", *rows)
    assert fggen(fake, "--temperature", 0.5, "--max-tokens", 9, "--concurrency", 1, "--priority", 4) == 0
    assert fake.sent() == [
        {**chat, "model": "a/model", "max_tokens": 9, "priority": 4},
        {"input": "x", "model": "a/model", "temperature": 0.5, "max_tokens": 9, "priority": 4},
    ]
    good, refused, wrong = read("out.jsonl")
    assert ChatCompletion.model_validate(good["response"]["body"]).choices[0].message.content == "hello"
    assert (good["custom_id"], good["response"]["status_code"]) == ("a", 200)
    assert (refused["response"]["status_code"], refused["response"]["body"]) == (404, NO_KEY)
    assert wrong["response"]["status_code"] == 400
    assert "a row needs a url such as" in wrong["response"]["body"]["error"]["message"]


AT_URL = ("--device cpu", "--ray", "--logprobs", "--no-prefix-cache", "--replicas 2", "--concurrency 0")


@pytest.mark.parametrize(
    "options", [*(f"--url http://x {each}" for each in AT_URL), "--url x", "--api-key x", "--priority 1"]
)
def test_options_that_do_not_go_together(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["a/model", "in.jsonl", "-o", "out.jsonl", *options.split()])
    assert "fggen: error: " in capsys.readouterr().err


def test_a_dry_run_sends_nothing(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    write("in.jsonl", *numbered(9))
    assert main.main(["a/model", "in.jsonl", "--dry-run", "--limit", "2", "--chat", "--url", fake.url]) == 0
    said = capsys.readouterr()
    first, second = said.out.split("--- row ")[1:]
    head, path, body = first.split("\n", 2)
    assert (head, path) == ("0", "POST /chat/completions")
    assert json.loads(body) == {"model": "a/model", "messages": [{"role": "user", "content": "number 0"}]}
    assert "number 1" in second
    assert "dry run: 2 of 9 rows, 0 of them errors; nothing was generated" in said.err
    assert fake.asked == []
