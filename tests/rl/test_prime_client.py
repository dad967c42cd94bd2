"""The client of the package renderers 0.1, by which prime-rl samples and scores, against fgserve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import random_ids
from openai import AsyncOpenAI
from serving import FGSERVE, Server

from fastgen import Generator, SamplingParams

client_module = pytest.importorskip("renderers.client", reason="needs the package renderers")
pytestmark = pytest.mark.timeout(120)

PROMPT = random_ids(9)
STOP = 319


class Renderer:
    """A renderer of ids that were made before."""

    def get_stop_token_ids(self) -> list[int]:
        return [STOP]

    def parse_response(self, ids: list[int], **_: Any) -> Any:
        return SimpleNamespace(content=ids, reasoning_content=None, tool_calls=[], reasoning_complete=True)


@pytest.fixture(scope="module")
def server(talker: Path) -> Iterator[Server]:
    with Server(FGSERVE, str(talker), "--rollout", "--logprobs-mode", "processed_logprobs") as server:
        yield server.await_ready()


def test_a_turn_of_an_agent(server: Server, talker: Path) -> None:
    """Sampling parameters are those of prime-rl's TrainSamplingConfig, and of verifiers' client after a first turn."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_tokens": 6, "seed": 3}

    async def run() -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="EMPTY") as client:
            found: dict[str, Any] = await client_module.generate(
                client=client, renderer=Renderer(), messages=[], model="any", prompt_ids=PROMPT, cache_salt="7",
                sampling_params={**sampling, "routed_experts_prompt_start": 4}, extra_headers={"X-Session-ID": "a"},
            )  # fmt: skip
            return found

    found = asyncio.run(run())
    with Generator(talker, page_size=16, num_pages=300) as here:
        params = SamplingParams(temperature=1.0, max_tokens=6, seed=3, stop_token_ids=[STOP])
        (expected,) = here.generate([PROMPT], params)[0].completions
    assert found["completion_ids"] == expected.token_ids
    assert found["completion_logprobs"] == expected.logprobs
    assert (found["finish_reason"], found["prompt_ids"]) == (expected.finish_reason, PROMPT)


def test_a_prompt_that_is_too_long_is_seen_before_it_is_sent(server: Server) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="EMPTY") as client:
            (model,) = [each.id async for each in client.models.list()]
            await client_module.generate(
                client=client, renderer=Renderer(), messages=[], model=model, prompt_ids=[5] * 5000
            )

    with pytest.raises(client_module.OverlongPromptError):
        asyncio.run(run())
