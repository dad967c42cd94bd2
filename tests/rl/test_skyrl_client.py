"""SkyRL's own clients (skyrl 0.4) against fgserve. They need skyrl, aiohttp, orjson, pybase64, cloudpathlib, requests.

The package requires Python 3.12, but of it these two clients need only another TypedDict.
"""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typing_extensions
from adapters import CONFIG, adapter, save_adapter
from conftest import random_ids
from serving import FGSERVE, Server, until

from fastgen import Generator, SamplingParams

pytest.importorskip("skyrl", reason="needs the package skyrl")
for package in ("orjson", "pybase64", "cloudpathlib", "requests"):
    pytest.importorskip(package, reason=f"skyrl's clients need {package}")
aiohttp = pytest.importorskip("aiohttp", reason="skyrl's clients need aiohttp")

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)  # for Pydantic before Python 3.12
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import PauseMode, RemoteInferenceClient
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient, nccl_init_payloads

pytestmark = pytest.mark.timeout(120)

PROMPTS = [random_ids(9), [5, 6, 7]]
SAMPLING = {  # as its get_vllm_sampling_params makes them
    "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 6,
    "temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None, "seed": 3,
    "ignore_eos": True,
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=6, min_tokens=1, temperature=0.8, seed=3, ignore_eos=True)
Ask = Callable[[Callable[[RemoteInferenceClient], Awaitable[Any]]], Any]


@pytest.fixture(scope="module")
def server(talker: Path) -> Iterator[Server]:
    with Server(FGSERVE, str(talker), "--rollout", "--logprobs-mode", "processed_logprobs") as server:
        yield server.await_ready()


@pytest.fixture(scope="module")
def here(talker: Path) -> Iterator[Generator]:
    with Generator(talker, page_size=16, num_pages=300) as gen:
        yield gen


@pytest.fixture
def ask(server: Server) -> Ask:
    """A function that runs calls of a client."""

    async def run(calls: Callable[[RemoteInferenceClient], Awaitable[Any]]) -> Any:
        async with RemoteInferenceClient(server.url, [server.url], 1) as client:
            return await calls(client)

    return lambda calls: asyncio.run(run(calls))


def test_generate_returns_ids_texts_and_logprobs(ask: Ask, here: Generator) -> None:
    batch = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "session_ids": ["a", "b"], "cache_salt": "v1"}
    found = ask(lambda client: client.generate(batch))
    expected = [output.completions[0] for output in here.generate(PROMPTS, PARAMS)]
    assert found["response_ids"] == [each.token_ids for each in expected]
    assert found["response_logprobs"] == [each.logprobs for each in expected]
    assert found["stop_reasons"] == ["length", "length"]
    assert all(found["responses"])


def test_samples_of_tinker(ask: Ask, here: Generator) -> None:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
        "num_samples": 2,
        "sampling_params": {"temperature": 0.8, "max_tokens": 6, "seed": 3, "stop_tokens": [319]},
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
    }
    found = ask(lambda client: client.sample({"json": body}))
    params = replace(PARAMS, n=2, ignore_eos=False, min_tokens=0, prompt_logprobs=3, stop_token_ids=[319])
    (expected,) = here.generate([PROMPTS[0]], params)
    assert [each["tokens"] for each in found["sequences"]] == [each.token_ids for each in expected.completions]
    assert [each["logprobs"] for each in found["sequences"]] == [each.logprobs for each in expected.completions]
    assert found["prompt_logprobs"] == [None, *(expected.prompt_logprobs or [])[1:]]
    assert [len(each) for each in found["topk_prompt_logprobs"][1:]] == [3] * 8


def test_openais_routes(ask: Ask) -> None:
    chat = {"messages": [{"role": "user", "content": "how are you?"}], "max_tokens": 3, "session_id": "a"}

    async def calls(client: RemoteInferenceClient) -> None:
        (ids,) = await client.tokenize(["how are you?"])
        assert ids
        assert (await client.detokenize([ids]))[0]
        assert (await client.chat_completion({"json": dict(chat)}))["choices"]
        assert (await client.completion({"json": {"prompt": ids, "max_tokens": 3}}))["choices"]

    ask(calls)


def test_pauses(ask: Ask, server: Server) -> None:
    """`keep` freezes requests, `abort` ends them with their tokens, and `wait` lets them finish."""
    batch = {"prompt_token_ids": PROMPTS[:1], "sampling_params": {**SAMPLING, "max_tokens": 300}}

    async def pauses(client: RemoteInferenceClient) -> list[str]:
        reasons = list[str]()
        for mode in (PauseMode.KEEP, "abort", "wait"):
            running = asyncio.create_task(client.generate(batch))
            await asyncio.to_thread(until, lambda: server.stats()["running"])
            await client.pause(mode)
            await client.resume()
            reasons += (await running)["stop_reasons"]
        await client.pause_generation()
        await client.resume_generation()
        return reasons

    assert ask(pauses) == ["length", "abort", "length"]


def test_sleep_and_what_a_trainer_asks(ask: Ask) -> None:
    batch = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING}

    async def calls(client: RemoteInferenceClient) -> None:
        assert await client.get_world_size() == (1, 1)
        before = await client.generate(batch)
        await client.sleep(level=1, tags=["weights", "kv_cache"])
        with pytest.raises(aiohttp.ClientResponseError, match="asleep"):
            await client.generate(batch)
        await client.wake_up(["weights"])
        await client.wake_up(["kv_cache"])
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.finish_session("a")
        assert await client.generate(batch) == before

    ask(calls)


def test_adapters_are_loaded_from_a_folder(ask: Ask, here: Generator, talker: Path, tmp_path: Path) -> None:
    state = adapter(talker)
    folder = save_adapter(tmp_path / "step", state)
    batch = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING}

    async def calls(client: RemoteInferenceClient) -> list[Any]:
        await client.load_lora_adapter("skyrl-lora", str(folder))
        found = [await client.generate(batch, model="skyrl-lora")]
        await client.unload_lora_adapter("skyrl-lora")
        return [*found, await client.generate(batch)]

    adapted, base = ask(calls)
    here.update_adapter(state, CONFIG)
    for found in (adapted, base):
        expected = [output.completions[0] for output in here.generate(PROMPTS, PARAMS)]
        assert found["response_ids"] == [each.token_ids for each in expected]
        here.update_adapter(None)
    assert adapted["response_ids"] != base["response_ids"]


def test_the_weight_sync_says_what_is_wrong(server: Server) -> None:
    """On the CPU there is no NCCL; the transfer itself is tested on GPUs."""
    meeting = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    init = {**meeting, "packed": True, "packed_buffer_size_bytes": 1 << 20}
    client = SkyrlWeightSyncClient([server.url], init_payload_fn=nccl_init_payloads)
    try:
        with pytest.raises(RuntimeError, match=r"\[400\].*this server's are on the CPU"):
            client.init_weight_transfer_engine(init)
        client.pause_generation()
        client.start_weight_update()
        with pytest.raises(RuntimeError, match=r"\[409\].*POST /init_weight_transfer_engine first"):
            client.update_weights({"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[64]]})
        client.finish_weight_update("3")
        client.reset_prefix_cache()
        client.resume_generation()
    finally:
        client.close()


def test_what_needs_skyrls_own_server_is_refused(ask: Ask) -> None:
    async def calls(client: RemoteInferenceClient) -> None:
        for call in (client.sleep_for_weight_sync(), client.fetch_weights(3)):
            with pytest.raises(aiohttp.ClientResponseError) as error:
                await call
            assert error.value.status == 404

    ask(calls)
