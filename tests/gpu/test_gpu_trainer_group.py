"""Weights from a trainer that speaks vLLM's protocol to fgserve on another GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

for package in ("httpx", "pydantic", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"fgserve needs {package}")

from serving import FGSERVE, Server  # noqa: E402
from vllm_trainer import Trainer  # noqa: E402

from fastgen import Generator, SamplingParams  # noqa: E402
from fastgen.rl.remote import RemoteGenerator  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of its two processes"),
    pytest.mark.timeout(280),
]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = ["hello", [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(FGSERVE, "--rollout", "--device", "cuda:1", "--dtype", "float32", seconds=120) as server:
        server.await_said("ready: ", 240)
        yield server


def answers(gen: Generator | RemoteGenerator) -> list[list[int]]:
    return [output.completions[0].token_ids for output in gen.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(("buffer_bytes", "by_id"), [(1 << 30, False), (1 << 18, True), (None, False)])
def test_a_trainer_of_vllm_sends_weights(server: Server, buffer_bytes: int | None, by_id: bool) -> None:
    with Generator(device="cuda:0", dtype="float32", num_pages=64, memory_fraction=0.3) as here:
        old = answers(here)
        draw = torch.Generator("cuda:0").manual_seed(0)
        shards = here._runner.model.parameters.targets()
        weights = {name: shard.view.clone() for name, shard in shards.items()}
        new = {name: t + 0.01 * torch.randn(t.shape, generator=draw, device=t.device) for name, t in weights.items()}
        here.update_weights(new)
        expected = answers(here)
        here.update_weights(weights)
    assert old != expected
    gen = RemoteGenerator(server.url)
    trainer = Trainer(server.url, "cuda:0", buffer_bytes, by_id)
    for tensors, answer in ((new, expected), (weights, old), (new, expected), (weights, old)):
        begun = time.perf_counter()
        assert trainer.update(tensors) == gen.weight_version
        print(f"{sum(t.nbytes for t in tensors.values())} bytes in {time.perf_counter() - begun:.4f} s")
        assert answers(gen) == answer
    some = {"model.norm.weight": new["model.norm.weight"]}
    assert trainer.update(some) == gen.weight_version
    assert answers(gen) != expected, "the others stay"
    trainer.update(weights)
