"""validation.py: bodies with too many of anything are refused before they are checked."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from fastgen.cli.serve import routes, validation
from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.service import ServedModel, Service
from fastgen.cli.serve.validation import ApiError, parse

CONTEXT = 40
ASKED: list[Any] = [{"role": "user", "content": "a"}]
PART = {"type": "text", "text": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A client of a server whose model has a small context; a body that is checked is a 500."""
    monkeypatch.setattr(routes, "check_request", None)
    monkeypatch.setattr(ServedModel, "facts", SimpleNamespace(max_model_len=CONTEXT, vocab_size=100), raising=False)
    monkeypatch.setattr(validation, "MAX_VALUES", 50)
    application = make_app(Service(read_options(["--max-queued-requests=30"], {})))
    return TestClient(application, "http://localhost", raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("path", "most", "body", "field"),
    [
        ("/chat/completions", CONTEXT, lambda n: {"messages": ASKED * n}, "messages"),
        ("/chat/completions", CONTEXT - 1, lambda n: {"messages": [{"content": [PART] * n}]}, "messages"),
        ("/chat/completions", CONTEXT - 2, lambda n: {"messages": [*ASKED, {"tool_calls": [CALL] * n}]}, "messages"),
        ("/chat/completions", CONTEXT, lambda n: {"tools": [{}] * n}, "tools"),
        ("/chat/completions", 48, lambda n: {"tools": [{"a": {str(i): 1 for i in range(n)}}]}, "tools"),
        ("/chat/completions", 49, lambda n: {"chat_template_kwargs": {"a": [1] * n}}, "chat_template_kwargs"),
        ("/chat/completions", 50, lambda n: {"stop": ["a"] * n}, "stop"),
        ("/tokenize", CONTEXT, lambda n: {"messages": ASKED * n}, "messages"),
        ("/responses", CONTEXT, lambda n: {"input": ASKED * n}, "input"),
        ("/responses", CONTEXT, lambda n: {"input": [CALLED] * n}, "input"),
        ("/responses", CONTEXT - 1, lambda n: {"input": "a", "tools": [{"tools": [{}] * n}]}, "tools"),
        ("/responses/input_tokens", CONTEXT, lambda n: {"input": ASKED * n}, "input"),
        ("/messages", CONTEXT, lambda n: {"messages": ASKED * n}, "messages"),
        ("/messages", CONTEXT - 1, lambda n: {"messages": [{"content": [USE] * n}]}, "messages"),
        ("/messages", CONTEXT, lambda n: {"messages": ASKED, "system": [PART] * n}, "system"),
        ("/messages", 50, lambda n: {"metadata": {str(i): 1 for i in range(n)}}, "metadata"),
        ("/messages/count_tokens", CONTEXT, lambda n: {"messages": ASKED * n}, "messages"),
        ("/completions", 30, lambda n: {"prompt": ["a"] * n}, "prompt"),
        ("/completions", 30, lambda n: {"prompt": [[5]] * n}, "prompt"),
        ("/completions", 47, lambda n: {"guided_json": {"anyOf": [{"enum": [1] * n}]}}, "guided_json"),
        ("/embeddings", 30, lambda n: {"input": ["a"] * n}, "input"),
    ],
)  # fmt: skip
def test_too_many_items_are_refused_at_once(client: TestClient, path: str, most: int, body: Any, field: str) -> None:
    told = client.post(path, json=body(most + 1))
    error = told.json()["error"]
    assert told.status_code == 400
    assert field in error["message"]
    assert client.post(path, json=body(most)).status_code == 500, "it is checked"


def test_ids_may_be_as_many_as_the_vocabulary_has(client: TestClient) -> None:
    for count, status in ((100, 500), (101, 400)):  # 500: it is checked
        asked = {"messages": ASKED, "allowed_token_ids": [5] * count}
        assert client.post("/chat/completions", json=asked).status_code == status


def test_too_many_lists_and_objects_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_CONTAINERS", 50)
    few: list[Any] = [[[]] * 49, [{}] * 49, ["[{"] * 90, '[{\\"' * 90, ['"[{', "\\"] * 30, [["]"]] * 49]
    for value in few:
        assert parse(json.dumps(value).encode()) == value
    for value in ([[]] * 50, [{}] * 50, [["\\"], ['"[']] * 30):
        with pytest.raises(ApiError, match="more than 50 lists and objects") as refused:
            parse(json.dumps(value).encode())
        assert refused.value.status == 400
