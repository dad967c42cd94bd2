"""Weights from a trainer that speaks vLLM's protocol to fgserve on another GPU."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

for package in ("httpx", "pydantic", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"fgserve needs {package}")

import httpx  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from serving import FGSERVE, ROOT, Server  # noqa: E402
from vllm_trainer import BlockingCommunicator, Trainer  # noqa: E402

from fastgen import Generator, SamplingParams  # noqa: E402
from fastgen.async_engine.trainer_group import TrainerGroup  # noqa: E402
from fastgen.device.nccl import Communicator, unique_id  # noqa: E402
from fastgen.model.loader import BUNDLED  # noqa: E402
from fastgen.processes.errors import DepartedError  # noqa: E402
from fastgen.rl.remote import RemoteGenerator  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
    pytest.mark.timeout(280),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of its two processes")
GPU = f"cuda:{min(torch.cuda.device_count(), 2) - 1}"  # the server's GPU
PATIENCE = 10.0  # seconds that the server waits for its trainer
PATCHED = f"""
from fastgen.cli.serve import main
from fastgen.cli.serve.dialects import vllm
vllm.TRANSFER_SECONDS = {PATIENCE}
main.main()
"""
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = ["hello", [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    program = ("-c", PATCHED, *FGSERVE[2:])
    options = ("--rollout", "--device", GPU, "--dtype", "float32", "--speculate", "fastgen-tiny/medusa")
    with Server(program, *options, seconds=120) as server:
        server.await_said("ready: ", 240)
        yield server


def answers(gen: Generator | RemoteGenerator) -> list[list[int]]:
    return [output.completions[0].token_ids for output in gen.generate(PROMPTS, GREEDY)]


@two_gpus
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
    head = load_file(BUNDLED / "medusa" / "medusa_lm_head.safetensors", device="cuda:0")
    assert trainer.update(head, "/start_draft_weight_update") == gen.weight_version
    assert answers(gen) == old


def joined() -> tuple[Communicator, TrainerGroup]:
    """Return the two ends of a group: of the trainer on the first GPU, and of the server on the second one."""
    id, device = unique_id(), torch.device("cuda:1")
    with ThreadPoolExecutor(1) as pool, torch.cuda.device(0):
        joining = pool.submit(TrainerGroup, id, (1, 2), device, None, 8.0, lambda: None)
        trainer = BlockingCommunicator(2, id, 0)
        trainer.all_reduce(torch.zeros(1, device="cuda:0"))
        torch.cuda.synchronize(0)
        return trainer, joining.result()


@two_gpus
def test_a_trainer_that_sends_nothing_blocks_neither_the_gpu_nor_the_next_group() -> None:
    header = [("a", "float32", [1000])]
    trainer, group = joined()
    with pytest.raises(DepartedError, match="has sent nothing for 8 seconds"):
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


def id_of_a_program_that_ends() -> bytes:
    command = [sys.executable, "-c", "from fastgen.device.nccl import unique_id; print(unique_id().hex())"]
    made = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, text=True, check=True).stdout
    return bytes.fromhex(made.split()[-1])


@pytest.mark.parametrize("lives", [True, False])
def test_a_trainer_that_never_joins_is_left(lives: bool) -> None:
    id, begun = unique_id() if lives else id_of_a_program_that_ends(), time.monotonic()
    with pytest.raises(DepartedError, match="trainer's group") as error:
        TrainerGroup(id, (1, 2), torch.device(GPU), None, 3.0, lambda: None)
    print(f"{time.monotonic() - begun:.2f} s: {error.value}")
    assert time.monotonic() - begun < 10
    assert torch.ones(3, device=GPU).sum().item() == 3


def test_a_server_whose_trainer_never_joins_goes_on(server: Server) -> None:
    """It answers with an error after its time limit, does not wait for a client that has gone, and takes the next
    trainer."""
    gen = RemoteGenerator(server.url)
    before = answers(gen)

    def body() -> dict[str, Any]:
        id = base64.b64encode(unique_id()).decode()
        return {"init_info": {"nccl_unique_id_b64": id, "rank_offset": 1, "world_size": 2}}

    begun = time.monotonic()
    late = server.post("/init_weight_transfer_engine", body())
    print(f"{time.monotonic() - begun:.2f} s: {late.status_code} {late.text}")
    assert (late.status_code, late.json()["error"]["code"]) == (504, "departed")
    assert answers(gen) == before
    begun = time.monotonic()
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/init_weight_transfer_engine", json=body(), timeout=1)
    assert server.get("/health").status_code == 200
    assert answers(gen) == before
    print(f"{time.monotonic() - begun:.2f} s with a client that has left after 1 s")
    assert time.monotonic() - begun < PATIENCE
    if torch.cuda.device_count() > 1:
        Trainer(server.url, "cuda:0", None)
