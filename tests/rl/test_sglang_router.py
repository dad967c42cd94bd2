"""SGLang's router (sglang-router 0.3), through which slime sends its requests, in front of fgserve."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import random_ids
from serving import FGSERVE, Server, until

from fastgen import Generator, SamplingParams

pytest.importorskip("sglang_router", reason="needs the package sglang-router")

pytestmark = pytest.mark.timeout(120)

PROMPT = random_ids(9)
SAMPLING = {  # as slime's sglang_rollout.py makes them
    "temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(talker: Path) -> Iterator[Server]:
    with Server(FGSERVE, str(talker), "--rollout") as server:
        yield server.await_ready()


@pytest.fixture(scope="module")
def router(server: Server) -> Iterator[httpx.Client]:
    """A client of a router whose only worker is the server, which is registered as slime does."""
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        try:
            until(lambda: listens(client))
            client.post("/workers", json={"url": server.url, "worker_type": "regular"}).raise_for_status()
            until(lambda: [worker["url"] for worker in client.get("/workers").json()["workers"]] == [server.url])
            yield client
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def listens(client: httpx.Client) -> bool:
    try:
        return client.get("/liveness").status_code == 200
    except httpx.TransportError:
        return False


def generate(router: httpx.Client, sampling: dict[str, Any], **fields: Any) -> Any:
    body = {"input_ids": PROMPT, "sampling_params": {**SAMPLING, **sampling}, "return_logprob": True, **fields}
    answer = router.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["meta_info"]


def test_a_rollout_of_slime(router: httpx.Client, talker: Path) -> None:
    found = generate(router, {"ignore_eos": True})["output_token_logprobs"]
    with Generator(talker, page_size=16, num_pages=300) as here:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        (expected,) = here.generate([PROMPT], params)[0].completions
    assert [(item[1], item[0]) for item in found] == list(zip(expected.token_ids, expected.raw_logprobs, strict=True))


def test_a_teachers_scores(router: httpx.Client) -> None:
    assert len(generate(router, {"max_new_tokens": 0}, logprob_start_len=0)["input_token_logprobs"]) == len(PROMPT)


def test_agents_chat(router: httpx.Client) -> None:
    model = router.get("/workers").json()["workers"][0]["model_id"]
    chat = {"model": model, "messages": [{"role": "user", "content": "how are you?"}], "max_tokens": 3}
    answer = router.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"]
