"""TRL's own VLLMClient against fgserve: all of its calls but those that need vLLM and CUDA. Needs the extra `rl`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the extra rl")

from serving import FGSERVE, Server
from trl.generation import vllm_client

from fastgen import Generator, SamplingParams

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(FGSERVE, "--rollout", "--logprobs-mode", "processed_logprobs") as server:
        yield server.await_ready()


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    return vllm_client.VLLMClient(base_url=server.url)


@pytest.fixture(scope="module")
def here() -> Iterator[Generator]:
    with Generator(page_size=16, num_pages=300) as gen:
        yield gen


def test_generate_returns_ids_and_the_logprobs_that_were_sampled_from(client: Any, here: Generator) -> None:
    seeded = {"seed": 3, "ignore_eos": True}
    found = client.generate(
        PROMPTS, n=2, temperature=0.7, top_p=0.9, max_tokens=6, logprobs=0, generation_kwargs=seeded
    )
    params = SamplingParams(n=2, temperature=0.7, top_p=0.9, max_tokens=6, **seeded)  # type: ignore[arg-type]
    samples = [sample for output in here.generate(PROMPTS, params) for sample in output.completions]
    assert found["prompt_ids"] == PROMPTS
    assert found["completion_ids"] == [sample.token_ids for sample in samples]
    assert found["logprobs"] == [[[logprob] for logprob in sample.logprobs] for sample in samples]
    assert found["logprob_token_ids"] == [[[token] for token in sample.token_ids] for sample in samples]
    constrained = client.generate(PROMPTS[:1], structured_outputs_regex="[0-9]{3}", max_tokens=8, top_k=0, min_p=0.0)
    text = here.tokenizer.decode(constrained["completion_ids"][0])  # type: ignore[union-attr]
    assert text.strip("</s>").strip().isdecimal()


def test_chats_are_rendered_by_the_server(client: Any) -> None:
    messages = [[{"role": "user", "content": "how are you?"}], [{"role": "user", "content": "12 + 30"}]]
    found = client.chat(messages, max_tokens=5, logprobs=2, generation_kwargs={"ignore_eos": True})
    assert [len(ids) for ids in found["completion_ids"]] == [5, 5]
    for ids, logprobs, tokens in zip(
        found["completion_ids"], found["logprobs"], found["logprob_token_ids"], strict=True
    ):
        assert all(token in named for token, named in zip(ids, tokens, strict=True))
        assert all(values == sorted(values, reverse=True) for values in logprobs)


def test_a_teacher_scores_sequences_with_a_hundred_alternatives(client: Any, here: Generator) -> None:
    sequences = [[5, 6, 7, 8, 9, 10], [9, 10, 11, 12]]
    found = client.get_sequence_logprobs(sequences, [4, 2], top_logprobs=100, chunk_size=1)
    scores = here.score(sequences, [4, 2])
    for own, actual, tops in zip(scores, found["actual_logprobs"], found["logprobs"], strict=True):
        assert [len(row) for row in tops] == [100] * len(own)
        for expected, (value,) in zip(own, actual, strict=True):
            assert value in (pytest.approx(expected, abs=1e-4), -math.inf)


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
def test_an_asynchronous_trainer_asks_and_updates(server: Server, here: Generator) -> None:
    """The client of AsyncGRPOTrainer, in the order of a trainer that starts and makes a step."""
    from accelerate import PartialState
    from trl.experimental.async_distillation.async_distillation_trainer import select_adapter_sync as also_sync
    from trl.experimental.async_grpo.async_grpo_trainer import select_adapter_sync
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState(cpu=True)  # which its log needs
    client: Any = VLLMClient(server.url, server_timeout=5)
    client.wait_for_server_ready()
    info = client.get_server_info()
    for choose in (select_adapter_sync, also_sync):
        assert choose(info, None, None) is False, "adapters are merged by the trainer, as without --enable-lora"
    assert client.get_dtype() == f"torch.{here.config.dtype}"
    assert client.get_max_model_len() == info["model_config"]["max_model_len"]
    assert info["parallel_config"]["data_parallel_size"] == client.get_world_size() == 1
    with pytest.raises(Exception, match="NCCL"):
        client.init_weight_transfer_engine({"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2})
    client.pause()
    client.start_weight_update()
    client.finish_weight_update()
    client.resume()
    client.unload_lora_adapter("never-loaded")
    body = {"model": "fastgen-tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
            "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 2**63 - 1}  # fmt: skip
    (choice,) = server.post("/v1/completions", body).json()["choices"]  # as its AsyncRolloutWorker asks
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])


def test_the_server_describes_itself_and_needs_no_reset(client: Any, server: Server) -> None:
    info = client.get_server_info()
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["weight_transfer_config"] is None, "there is no NCCL on the CPU"
    assert client.get_world_size() == 1
    client.reset_prefix_cache()
    client._start_weight_update()
    client._finish_weight_update()
    with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
        client.init_communicator("cpu")
