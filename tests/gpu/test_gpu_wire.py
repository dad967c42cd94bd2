"""Weights from a trainer to fgserve on the same GPU, and on another one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.model.loader import BUNDLED
from fastgen.rl.engine import RemoteEngine
from fastgen.rl.remote import RemoteGenerator

for package in ("httpx", "pydantic", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"fgserve needs {package}")

from sending import KEY, SENDER, Sharded, refusal  # noqa: E402
from serving import FGSERVE, ROOT, Server  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
    pytest.mark.timeout(280),
]
GPU = f"cuda:{min(torch.cuda.device_count(), 2) - 1}"  # the server's GPU
DEVICES = list(dict.fromkeys([GPU, "cuda:0"]))  # the trainer's GPUs
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = ["hello", [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--rollout", "--api-key", KEY, "--device", GPU, "--dtype", "float32")
    with Server(FGSERVE, *flags, seconds=120) as server:
        server.await_said("ready: ", 240)
        yield server


def new_weights(device: str) -> dict[str, Tensor]:
    """Make weights of the bundled model."""
    draw = torch.Generator().manual_seed(0)
    old = load_file(BUNDLED / "model.safetensors")
    return {name: (t + 0.01 * torch.randn(t.shape, generator=draw)).to(device) for name, t in old.items()}


def answers(gen: Generator | RemoteGenerator) -> list[list[int]]:
    return [output.completions[0].token_ids for output in gen.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(("device", "backend"), [(GPU, "gloo"), *((device, None) for device in DEVICES)])
def test_weights_reach_the_server(server: Server, device: str, backend: str | None) -> None:
    weights = new_weights(device)
    with Generator(device=GPU, dtype="float32", num_pages=64, memory_fraction=0.1) as here:
        old = answers(here)
        here.update_weights(weights)
        new = answers(here)
    assert old != new
    with RemoteGenerator(server.url, api_key=KEY, backend=backend, bucket_bytes=1 << 20) as gen:
        gen.update_weights(BUNDLED)
        assert answers(gen) == old
        for _ in range(2):
            gen.update_weights(weights)
            assert answers(gen) == new
        assert isinstance(gen._engines, RemoteEngine)
        assert gen._engines._sender.backend == (backend or ("ipc" if device == GPU else "nccl"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_trainers_error_leaves_a_server_that_takes_the_next_update(server: Server, device: str) -> None:
    weights = new_weights(device)
    last = Sharded(weights["model.norm.weight"], KeyError("model.norm.weight"))
    with RemoteGenerator(server.url, api_key=KEY, bucket_bytes=1 << 20) as gen:
        for _ in range(3):
            with pytest.raises(KeyError):
                gen.update_weights({**weights, "model.norm.weight": last})
            assert "the weights are torn" in refusal(lambda: gen.generate("a", GREEDY))
        gen.update_weights(weights)
        assert gen.generate("a", GREEDY)[0].error is None


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_sender_that_dies_does_not_hang_the_server(server: Server, device: str, end: str) -> None:
    weights = new_weights(device)
    command = [sys.executable, "-c", SENDER, server.url, KEY, str(BUNDLED), end, device]
    sender = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sending\n"
        with RemoteGenerator(server.url, api_key=KEY, replace_group=True) as gen:
            begun = time.monotonic()
            assert "the weights are torn" in refusal(lambda: gen.generate("a", GREEDY))
            assert time.monotonic() - begun < 20
            gen.update_weights(weights)
            assert gen.generate("a", GREEDY)[0].error is None
    finally:
        sender.kill()
        sender.communicate()
