"""WorkThreads of service.py and its users: large work delays nobody, and work ends with its request."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from fastgen.cli.serve import app, http_responses, routes
from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.dialects.anthropic import MessageRequest
from fastgen.cli.serve.dialects.openai_responses import ResponseRequest
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.routes import Post
from fastgen.cli.serve.service import LARGE_THREADS, ServedModel, Service, WorkThreads
from fastgen.cli.serve.validation import ApiError

pytestmark = pytest.mark.timeout(60)

LARGE = "a" * (app.LARGE + 1)


class Loop:
    """Work that ends only if it is stopped, or after half a minute, so that a failed test ends."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> Any:
        self.begun.set()
        try:
            for _ in range(3000):
                time.sleep(0.01)
        finally:
            self.ended.set()


IMPORTS = """
import sys
from pathlib import Path
from types import SimpleNamespace

from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.openai_input import ChatRequest
from fastgen.cli.serve.engine_input import prepare
from fastgen.cli.serve.openai_output import ChatReply
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.service import Service
from fastgen.model.loader import BUNDLED
from fastgen.request import SamplingParams

service = Service(read_options(["tiny"]))
make_app(service)
model = service.models["tiny"]
sizes = {"vocab_size": 4096, "max_model_len": 2048, "default_params": SamplingParams()}
model.engine = SimpleNamespace(info=SimpleNamespace(tokenizer=str(BUNDLED), **sizes))
facts = model._read_facts()
before = set(sys.modules)
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
said = [{"role": "user", "content": "a <|im_end|> b"}]
prepare(facts, ChatRequest(messages=said, tools=[tool], tool_choice="required"), ChatReply)
print(sorted(name for name in set(sys.modules) - before if name.startswith("fastgen")))
"""


def test_work_that_may_be_stopped_imports_no_modules() -> None:
    """A thread that is stopped while it imports may keep the lock of the module for ever."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_small_work_does_not_wait_for_large_work() -> None:
    async def main() -> None:
        work, loops = WorkThreads(), [Loop() for _ in range(LARGE_THREADS + 2)]
        running = [asyncio.create_task(work.run(True, loop)) for loop in loops]
        await asyncio.to_thread(loops[LARGE_THREADS - 1].begun.wait)
        assert await work.run(False, max, 3, 5) == 5
        assert not any(loop.ended.is_set() for loop in loops)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert await work.run(True, max, 3, 5) == 5, "its threads are free again"
        assert not loops[-1].begun.is_set()

    asyncio.run(main())


async def ask(path: str, body: dict[str, Any], leaves: Callable[[], bool], *flags: str) -> list[Message]:
    """Send a request to an application whose models are ready. Return the response.

    leaves: function that returns whether the client disconnects now.
    """
    sent: list[Message] = []
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        while not leaves():
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await make_app(Service(read_options(list(flags), {})))(scope, receive, send)
    return sent


@pytest.mark.parametrize(
    ("module", "name", "path", "body"),
    [
        (routes, "check_request", "/completions", {"prompt": LARGE}),
        (Post, "read", "/responses", {"input": LARGE}),
        (ResponseRequest, "chat", "/responses", {"input": "a"}),
        (MessageRequest, "chat", "/messages", {"messages": [{"role": "user", "content": LARGE}], "max_tokens": 1}),
        (http_responses, "prepare", "/completions", {"prompt": "a"}),
        (app, "tokenize", "/tokenize", {"prompt": "a"}),
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_work_ends_with_its_request(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, path: str, body: dict[str, Any], late: bool
) -> None:
    """It reaches --request-timeout, or its client goes."""
    loop = Loop()
    monkeypatch.setattr(module, name, loop)
    monkeypatch.setattr(ServedModel, "check_ready", lambda _: None)
    monkeypatch.setattr(ServedModel, "facts", SimpleNamespace(max_model_len=100, vocab_size=100), raising=False)
    flags = ["--request-timeout=0.1"] if late else []
    sent = asyncio.run(ask(path, body, lambda: not late and loop.begun.is_set(), *flags))
    assert loop.begun.is_set()
    assert loop.ended.wait(10)
    assert sent[0]["status"] == (504 if late else 400)


def test_all_parts_of_a_request_have_one_time_limit() -> None:
    async def main() -> None:
        service, scope = Service(read_options(["--request-timeout=0.1"], {})), dict[str, Any]()
        async with http_responses.limited(service, scope):
            await asyncio.sleep(0.01)
        ends = scope["ends"]
        with pytest.raises(ApiError, match=r"took more than 0\.1 seconds"):
            async with http_responses.limited(service, scope):
                await asyncio.Event().wait()
        assert scope["ends"] == ends
        async with http_responses.limited(service, scope, timed=False):
            await asyncio.sleep(0.01)

    asyncio.run(main())
