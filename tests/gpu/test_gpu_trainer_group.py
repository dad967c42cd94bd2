"""Weights from a trainer that speaks vLLM's protocol to fgserve on another GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

for package in ("httpx", "pydantic", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"fgserve needs {package}")

from serving import FGSERVE, Server  # noqa: E402
from vllm_trainer import Trainer  # noqa: E402

from fastgen import Generator, SamplingParams  # noqa: E402
from fastgen.async_engine.trainer_group import TrainerGroup  # noqa: E402
from fastgen.device.nccl import Communicator, unique_id  # noqa: E402
from fastgen.processes.errors import DepartedError  # noqa: E402
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


def joined() -> tuple[Communicator, TrainerGroup]:
    """Return the two ends of a group: of the trainer on the first GPU, and of the server on the second."""
    id, device = unique_id(), torch.device("cuda:1")
    with ThreadPoolExecutor(1) as pool, torch.cuda.device(0):
        joining = pool.submit(TrainerGroup, id, (1, 2), device, None, 3.0, lambda: None)
        trainer = Communicator(2, id, 0)
        trainer.all_reduce(torch.zeros(1, device="cuda:0"))
        torch.cuda.synchronize(0)
        return trainer, joining.result()


def test_a_trainer_that_sends_nothing_blocks_neither_the_gpu_nor_the_next_group() -> None:
    header = [("a", "float32", [1000])]
    trainer, group = joined()
    with pytest.raises(DepartedError, match="has sent nothing for 3 seconds"):
        list(group.receive(header, None, lambda: None))
    assert group.broken
    assert torch.ones(3, device="cuda:1").sum().item() == 3, "the broadcast has ended"
    group.close()
    trainer.close()
    trainer, group = joined()
    sent = torch.randn(1000, device="cuda:0")
    with torch.cuda.device(0):
        trainer.broadcast(sent.view(torch.uint8))
    ((name, found),) = group.receive(header, None, lambda: None)
    assert (name, found.tolist()) == ("a", sent.tolist())
    assert not group.broken
    group.close()
    trainer.close()
