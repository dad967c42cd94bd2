"""Weights by NCCL, from a trainer on one GPU to fgserve on another."""

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
from fastgen.remote import RemoteGenerator

for package in ("httpx", "pydantic", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"fgserve needs {package}")

from serving import FGSERVE, ROOT, Server  # noqa: E402
from test_remote import KEY, SENDER, refusal  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than 2 GPUs that torch can use"),
    pytest.mark.timeout(280),
]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = ["hello", [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--rollout", "--api-key", KEY, "--device", "cuda:1", "--dtype", "float32")
    with Server(FGSERVE, *flags, seconds=120) as server:
        server.await_said("ready: ", 240)
        yield server


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """New weights of the bundled model on the first GPU."""
    draw = torch.Generator().manual_seed(0)
    old = load_file(BUNDLED / "model.safetensors")
    return {name: (t + 0.01 * torch.randn(t.shape, generator=draw)).cuda(0) for name, t in old.items()}


def answers(gen: Generator | RemoteGenerator) -> list[list[int]]:
    return [output.completions[0].token_ids for output in gen.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_weights_reach_another_gpu(server: Server, weights: dict[str, Tensor], backend: str) -> None:
    with Generator(device="cuda:1", dtype="float32", num_pages=64, memory_fraction=0.1) as here:
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


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
def test_a_sender_that_dies_does_not_hang_the_server(server: Server, weights: dict[str, Tensor], end: str) -> None:
    command = [sys.executable, "-c", SENDER, server.url, KEY, str(BUNDLED), end, "cuda:0"]
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
