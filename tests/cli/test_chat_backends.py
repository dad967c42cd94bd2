"""fgchat with a server: fgserve in a pseudo-terminal, and a fake server whose responses the test writes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pexpect
import pytest
from serving import Server, until
from terminal import BANNER, STATS, ask, at_prompt, leave, said, spawn

from fastgen.cli import chat
from fastgen.cli.chat_backends import ServerBackend
from fastgen.cli.chat_console import Console
from fastgen.cli.chat_session import Chat

HELLO = [{"role": "user", "content": "hello"}]


PROGRAM = ("-m", "fastgen.cli.chat", "--temperature", "0", "--url")


def test_a_conversation_in_a_terminal(caller: Server, tmp_path: Path) -> None:
    """Answers stream; Ctrl-C ends the answer and the server's request; a refusal is one line."""
    before = caller.stats()["aborted_total"]
    with spawn(tmp_path, *PROGRAM, caller.url, FASTGEN_API_KEY="secret") as child:
        assert at_prompt(child, 1) == BANNER
        assert re.search(rf"\n[^\n]*\b42\b[^\n]*\n{STATS}\n$", ask(child, "what is 12 + 30?", 2))
        child.sendline("please count from 1 to 100")
        child.expect("2, 3, ")
        child.sendintr()
        child.expect(STATS)
        assert int(child.match[1]) > 4, "the pieces so far"
        assert "98, 99" not in said(child)
        until(lambda: caller.idle() and caller.stats()["aborted_total"] == before + 1)
        at_prompt(child, 3)
        refused = ask(child, f"\x1b[200~{'far too long ' * 1000}\x1b[201~", 3)
        hint = "; /r N goes back before round N"
        assert re.search(rf"\nThis model's maximum context [^\n]*{hint}\n", refused)


# A fake server


class Fake:
    """A fake OpenAI-style server.

    models: the list of /models, or (status, body). answer: writes the response to a chat request. asked: the requests.
    """

    def __init__(self) -> None:
        self.models: Any = [{"id": "some-model"}]
        self.answer: Callable[[BaseHTTPRequestHandler], None] = stream()
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                if isinstance(fake.models, list):
                    reply(200, {"object": "list", "data": fake.models})(self)
                else:
                    reply(*fake.models)(self)

            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.asked.append((dict(self.headers), body))
                fake.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


def reply(status: int, body: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.end_headers()
        request.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    return answer


def stream(
    *texts: str | dict[str, str], end: str = "stop", tail: bytes = b"data: [DONE]\n\n"
) -> Callable[[BaseHTTPRequestHandler], None]:
    """Stream an answer of these pieces, which are contents or deltas, a byte at a time."""
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}]
    deltas = [text if isinstance(text, dict) else {"content": text} for text in texts]
    chunks += [{"choices": [{"delta": delta}], "usage": None} for delta in deltas]
    chunks += [{"choices": [{"delta": {}, "finish_reason": end}]}] if end else []
    lines = (f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks)
    data = b": a comment\n\n" + "".join(lines).encode() + tail

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for at in range(len(data)):
            request.wfile.write(data[at : at + 1])

    return answer


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def pipe(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """pipe(lines, *options) -> (exit status, stdout, stderr) of fgchat with the fake server."""
    monkeypatch.delenv("FASTGEN_API_KEY", raising=False)

    def run(lines: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = chat.main(["--url", fake.url, *options])
        return status, *capsys.readouterr()

    return run


def test_what_is_sent(fake: Fake, pipe: Callable[..., Any]) -> None:
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 12}}\n\ndata: [DONE]\n\n'
    fake.answer = stream("a\u2028b\x85", "c\nd\u00e9", tail=usage)  # text may hold any line ends
    options = ["--temperature", "0.5", "--top-p", "0.9", "--max-tokens", "7", "--seed", "3", "--system", "be short"]
    status, out, err = pipe("one\ntwo\n", *options, "--api-key", "secret")
    said = "a\u2028b\x85c\nd\u00e9"
    assert (status, out) == (0, f"{said}\n{said}\n")
    assert re.search(STATS, err)[1] == "12"  # type: ignore[index]
    headers, body = fake.asked[1]
    assert headers["Authorization"] == "Bearer secret"
    assert [message["content"] for message in body.pop("messages")] == ["be short", "one", said, "two"]
    given = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"model": "some-model", **given, **streamed}
    fake.models = [{"id": "one"}, {"id": "two"}]
    fake.answer = stream("so ", "it is", end="length")
    _, _, err = pipe("hello\n", "--model", "one")
    headers, body = fake.asked[2]
    assert "Authorization" not in headers
    assert body == {"model": "one", "messages": HELLO, **streamed}, "what is not given is not sent"
    assert err.endswith("\n(cut: the server's limit; /r N goes back)\n")
    assert re.search(STATS, err)[1] == "2", "pieces, where the server does not count"  # type: ignore[index]
    assert pipe("hello\n", "--model", "one", "--max-tokens", "2")[2].endswith("\n(cut at max_tokens 2)\n")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_is_no_part_of_the_answer(field: str, fake: Fake, pipe: Callable[..., Any]) -> None:
    fake.answer = stream({field: "let me "}, {field: "see"}, "it is")
    status, out, err = pipe("one\ntwo\n", "--no-thinking")
    assert (status, out) == (0, "it is\nit is\n")
    assert re.search(STATS, err)[1] == "3"  # type: ignore[index]
    _, body = fake.asked[1]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["messages"][1] == {"role": "assistant", "content": "it is"}, "some servers refuse other fields"


NO_ANSWER = "the server has sent something that is not an answer"
ERROR = {"error": {"message": "the engine died", "type": "server_error", "param": None, "code": None}}


@pytest.mark.parametrize(
    ("answer", "out", "line"),
    [
        (reply(503, ERROR), "", "error: the engine died"),
        (reply(502, b"<html>bad\ngateway"), "", r"error: the server says 502: '<html>bad\ngateway'"),
        (reply(400, ERROR), "", "the engine died"),
        (reply(422, ERROR), "", "the engine died"),
        (reply(404, {"detail": "Not Found"}), "", 'error: {"detail": "Not Found"}'),
        (
            stream("begun ", end="", tail=f"data: {json.dumps(ERROR)}\n\n".encode()),
            "begun \n",
            "error: the engine died",
        ),
        (stream("begun", end="", tail=b""), "begun\n", "error: the server has ended the answer early"),
        (
            stream(end="", tail=b"data: <html>\n\n"),
            "",
            "error: the server has sent something that is not an answer: b'<html>'",
        ),
        *(
            (
                stream("begun", end="", tail=b"data: " + wrong + b"\n\n"),
                "begun\n",
                f"error: {NO_ANSWER}: {wrong[:300]!r}",
            )
            for wrong in (
                b"5",
                b'{"choices": 5}',
                b'{"choices": [{"delta": {"content": 5}}]}',
                b'{"usage": "abc"}',
                b'{"usage": {"completion_tokens": 1e999}}',
                b"[" * 100_000,
            )
        ),
        (
            lambda request: None,
            "",
            "error: no connection to URL/v1: Remote end closed connection without response; is the server running?",
        ),
    ],
)
def test_an_error_is_a_line_and_the_chat_goes_on(
    answer: Callable[[BaseHTTPRequestHandler], None], out: str, line: str, fake: Fake, pipe: Callable[..., Any]
) -> None:
    answers = iter([answer, stream("again")])
    fake.answer = lambda request: next(answers)(request)
    status, shown, err = pipe("one\ntwo\n")
    assert (status, shown) == (1, f"{out}again\n")
    assert err.splitlines()[0] == line.replace("URL", fake.url)
    kept = ["one", out.strip("\n"), "two"] if out else ["two"]
    assert [message["content"] for message in fake.asked[1][1]["messages"]] == kept


def test_the_end_of_the_server_is_a_line(fake: Fake, tmp_path: Path) -> None:
    gone = rf"error: no connection to {fake.url}/v1: [^\n]*refused; is the server running\?\n$"
    with spawn(tmp_path, *PROGRAM, fake.url) as child:
        assert at_prompt(child, 1) == BANNER
        fake.server.shutdown()
        fake.server.server_close()
        assert re.search(rf"\n{gone}", ask(child, "hello", 1))
        assert leave(child, "/q") == 0
    with spawn(tmp_path, *PROGRAM, fake.url) as child:
        child.expect(pexpect.EOF)
        assert re.fullmatch(f"fgchat: {gone}", said(child))


def test_an_answer_is_kept_if_there_is_no_other(fake: Fake, pipe: Callable[..., Any]) -> None:
    answers = iter([stream("first"), reply(503, ERROR), reply(400, ERROR), stream("last")])
    fake.answer = lambda request: next(answers)(request)
    status, shown, err = pipe("/regen\none\n/regen\n/regen\ntwo\n")
    assert (status, shown) == (1, "first\nlast\n")
    assert err.splitlines()[0] == "/regen: there is no answer yet"
    assert [message["content"] for message in fake.asked[-1][1]["messages"]] == ["one", "first", "two"]


@pytest.mark.parametrize(
    ("models", "line"),
    [
        ([], "the server has no model yet; try again when it has loaded one"),
        ([{"id": "a"}, {"id": "b"}], "the server has several models; choose one by --model: a, b"),
        ((401, ERROR), "the server wants another key; give it by --api-key"),
        ((500, ERROR), "the engine died"),
        ((429, b""), "the server says 429: ''"),
        ((200, b"<html>"), "URL/v1 is not an OpenAI-style API: '<html>'"),
        ((200, {"data": [1]}), """URL/v1 is not an OpenAI-style API: '{"data": [1]}'"""),
    ],
)
def test_a_server_that_cannot_answer_is_a_line(models: Any, line: str, fake: Fake, pipe: Callable[..., Any]) -> None:
    fake.models = models
    assert pipe("hello\n") == (1, "", f"fgchat: error: {line.replace('URL', fake.url)}\n")


@pytest.mark.parametrize("url", ["localhost:5678", "http://localhost:port"])
def test_a_bad_url_is_a_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--url", url]) == 1
    assert re.fullmatch(rf"fgchat: error: --url (is )?{re.escape(repr(url))}[^\n]*\n", capsys.readouterr().err)


def test_one_ctrl_c_is_enough_while_nothing_has_come(fake: Fake) -> None:
    left = threading.Event()

    def wait(request: BaseHTTPRequestHandler) -> None:
        if request.connection.recv(1) == b"":
            left.set()

    fake.answer = wait
    conversation = Chat(ServerBackend(fake.url, None, "some-model", {}), Console())
    press = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("hello")
    press.join()
    assert conversation.rounds == []
    assert left.wait(50)
