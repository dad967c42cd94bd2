"""fggen with --url: a fake OpenAI-style server whose answers the test writes."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from generating import by_row, read, write
from openai.types.chat import ChatCompletion

from fastgen.cli.gen import main
from fastgen.cli.gen.work import seed_of

Answer = tuple[int, Any]
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
    """A fake server. answer: function of the path and the body of a request. asked: the requests, as (path, body).
    keys: their keys. most: maximum number of requests at a time."""

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

            def send(self, status: int, body: Any) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
    rows = [{"prompt": "hello", "id": 1}, biased, {"prompt": "x", "seed": 5, "temperature": 1}, own]
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
        {**same, "messages": [system, user], "seed": seeds[1], "n": 2, "logit_bias": {"5": 1.0}},
        {**same, "messages": [system, {"role": "user", "content": "x"}], "seed": 5, "temperature": 1},
        {**same, **own, "seed": seeds[3]},
    ]
    found = by_row("out.jsonl")
    given = {"completions": ["hello"], "finish_reasons": ["stop"], "prompt_tokens": 7, "completion_tokens": [3]}
    assert found[0] == {"row": 0, "error": None, **rows[0], **given}
    assert (found[1]["completions"], found[1]["completion_tokens"]) == (["hello"] * 2, None), "only their sum is known"
    assert "leave --system out for prompt_token_ids" in found[4]["error"]
    assert "prompt must be text" in found[5]["error"]


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
            together.wait(10)
        if index == 0:
            last.wait(10)
        if index == 11:
            last.set()
        return echoed(path, body)

    fake.answer = wait
    write("in.jsonl", *numbered(12))
    assert fggen(fake, "--concurrency", 4, *(("--ordered",) if ordered else ())) == 0
    assert fake.most == 4
    rows = [record["row"] for record in read("out.jsonl")]
    assert rows == list(range(12)) if ordered else rows.index(0) > 8
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
    assert wrong[4] == 'the server has sent what is no answer: {"choices": 5}'
    assert wrong[5] == "the server has given 0 answers instead of n=1"
    assert "fggen: 7 rows in " in capsys.readouterr().err
    assert fggen(fake, "--retry-errors") == 0
    assert [record["error"] for record in by_row("out.jsonl")] == [None] * 7


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
    assert fggen(fake, "--temperature", 0.5, "--max-tokens", 9, "--concurrency", 1) == 0
    assert fake.sent() == [
        {**chat, "model": "a/model", "max_tokens": 9},
        {"input": "x", "model": "a/model", "temperature": 0.5, "max_tokens": 9},
    ]
    good, refused, wrong = read("out.jsonl")
    assert ChatCompletion.model_validate(good["response"]["body"]).choices[0].message.content == "hello"
    assert (good["custom_id"], good["response"]["status_code"]) == ("a", 200)
    assert (refused["response"]["status_code"], refused["response"]["body"]) == (404, NO_KEY)
    assert wrong["response"]["status_code"] == 400
    assert "a row needs a url such as" in wrong["response"]["body"]["error"]["message"]


AT_URL = ("--device cpu", "--ray", "--logprobs", "--no-prefix-cache", "--replicas 2", "--concurrency 0")


@pytest.mark.parametrize("options", [*(f"--url http://x {each}" for each in AT_URL), "--url x", "--api-key x"])
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
