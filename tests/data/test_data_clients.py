"""NeMo Data Designer, distilabel and Ray Data as clients of fgserve, with structured output, and the requests of
curator, which does not start without the internet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_clients_program import COUNTRIES, MODEL, SCHEMA
from serving import FGSERVE, ROOT, Server

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]

CAPITALS = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo"}
PACKAGES = {"data_designer": "data_designer", "distilabel": "distilabel", "ray_data": "ray.data.llm"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(FGSERVE, MODEL) as server:
        yield server.await_ready()


@pytest.mark.parametrize("client", PACKAGES)
def test_a_package_that_makes_data_gets_json(client: str, server: Server, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[client], reason=f".ci/nightly installs {client}", exc_type=ImportError)
    program = [sys.executable, ROOT / "tests" / "data_clients_program.py", client, server.url, str(tmp_path)]
    quiet = {"NEMO_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet}, timeout=200)
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1]) == sorted(CAPITALS[country] for country in COUNTRIES)


def test_the_requests_of_curator(server: Server) -> None:
    """As bespokelabs-curator 0.1.31 makes them: at the start one without messages, for rate limits in its headers, and
    then a schema that is not strict."""
    headers = {"Authorization": "Bearer none"}
    limits = server.post("/v1/chat/completions", {"model": MODEL, "messages": []}, headers=headers)
    assert limits.status_code == 400
    assert "x-ratelimit-limit-requests" not in limits.headers
    schema = {"type": "json_schema", "json_schema": {"name": "output_schema", "schema": SCHEMA}}
    for country in CAPITALS:
        messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
        body = {"model": MODEL, "messages": messages, "response_format": schema, "max_tokens": 48, "temperature": 0.0}
        answer = server.post("/v1/chat/completions", body, headers=headers).json()
        assert json.loads(answer["choices"][0]["message"]["content"]) == {"capital": CAPITALS[country]}
        assert answer["usage"]["completion_tokens"] > 0
