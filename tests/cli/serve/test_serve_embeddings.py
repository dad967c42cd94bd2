"""/embeddings, with OpenAI's client; test_prefill_only.py holds the values to transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from conftest import save_embedder
from serving import FGSERVE, Server

from fastgen import Generator
from fastgen.cli.serve import embeddings
from fastgen.cli.serve.validation import ApiError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def folder(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(talker, tmp_path_factory.mktemp("embeddings") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(FGSERVE, str(folder)) as server:
        yield server.await_ready()


def test_embeddings_are_those_of_python(server: Server, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    inputs: Any = [f"hello {number}" for number in range(embeddings.PROMPTS + 2)]
    with Generator(folder) as gen:
        ids = [gen.generate(text, {"max_tokens": 1})[0].prompt_token_ids for text in inputs]
        expected = gen.embed(inputs)
    packed = client.embeddings.create(model="any", input=inputs, user="me")  # the client asks for base64
    assert [each.index for each in packed.data] == list(range(len(inputs)))
    for found, ours in zip(packed.data, expected, strict=True):
        assert found.embedding == pytest.approx(ours, abs=1e-6)
    count = sum(map(len, ids))
    assert (packed.usage.prompt_tokens, packed.usage.total_tokens) == (count, count)
    for one, answers in (("hello 0", 1), (ids[0], 1), (ids[:2], 2)):
        plain = client.embeddings.create(model="any", input=one, encoding_format="float")  # type: ignore[arg-type]
        assert len(plain.data) == answers
        assert plain.data[0].embedding == pytest.approx(expected[0], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input is required"),
        ({"input": []}, "input", "is empty; give at least 1 item"),
        ({"input": ["a", 5]}, "input[1]", "valid string"),
        ({"input": "a", "dimensions": 8}, "dimensions", "dimensions is not supported"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": [5] * 600}, "input", "input has 600 tokens, above this model's maximum"),
        ({"input": [[5], [9999]]}, None, "the prompt holds the id 9999, outside the vocabulary"),
    ],
)
def test_wrong_requests_are_named(server: Server, fields: dict[str, Any], param: str | None, message: str) -> None:
    reply = server.post("/v1/embeddings", fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_model_without_embeddings_tokenizes_nothing() -> None:
    async def call(*_: Any) -> None:
        raise ValueError("it has no embeddings")

    model = SimpleNamespace(engine=SimpleNamespace(call=call), facts=None)
    service: Any = SimpleNamespace(choose=lambda _: model)  # without threads
    many = embeddings.EmbeddingRequest(input=["a"] * (embeddings.PROMPTS + 1))
    with pytest.raises(ApiError, match="it has no embeddings"):
        asyncio.run(embeddings.embed(service, many, False))
