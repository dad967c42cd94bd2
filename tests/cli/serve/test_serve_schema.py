"""schemathesis makes requests of /openapi.json: the server does not fail, and responses follow the schema."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import save_embedder
from serving import FGSERVE, Server

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]

EXAMPLES = 5  # random requests per route, in addition to those that try the limits of each field


@pytest.fixture(scope="module")
def server(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a small model with tools, whose answers have a few tokens."""
    folder = save_embedder(talker, tmp_path_factory.mktemp("schema") / "caller")
    template = "{{ bos_token }}{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    with Server(FGSERVE, str(folder), "--max-model-len", "4") as server:
        yield server.await_ready()


def test_answers_are_what_the_schema_says(server: Server, tmp_path: Path) -> None:
    """Some valid requests are refused, since a schema cannot express every check."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{server.url}/openapi.json"),
        *("--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--generation-deterministic"),
        *("--exclude-checks", "positive_data_acceptance", "--report-har-path", "run.har"),
    ]
    run = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    seen = defaultdict(set)
    for entry in json.loads((tmp_path / "run.har").read_text())["log"]["entries"]:
        reply = entry["response"]
        path = entry["request"]["url"].removeprefix(server.url).partition("?")[0]
        seen[re.sub("^/v1/models/.*", "/v1/models/NAME", path)].add(reply["status"])
        assert "server_error" not in reply["content"].get("text", ""), entry  # in a stream, after its 200
    posted = {"/v1/chat/completions", "/v1/completions", "/v1/tokenize", "/v1/detokenize", "/v1/embeddings"}
    posted |= {"/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"}
    posted |= {"/v1/invocations", "/v1/ping", "/v1/chat/completions/batch", "/v1/generative_scoring"}
    assert {path for path, statuses in seen.items() if {200, 400, 405} <= statuses} == posted
    assert all(statuses == {200, 405} for path, statuses in seen.items() if path not in posted)
    assert len(seen) == 22
