"""The page of fgserve: its script in Node (from the wheel of playwright) with a small DOM, and its policy."""

from __future__ import annotations

import hashlib
import re
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import playwright
import pytest
from conftest import SIZES, save_random, save_tokenizer
from serving import FGSERVE, Server
from starlette.testclient import TestClient

from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.service import Service

pytestmark = pytest.mark.timeout(120)

TESTS = Path(__file__).parents[2]
NODE = Path(playwright.__file__).parent / "driver" / "node"
KEY = "key of the page's test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose answers do not end."""
    folder = tmp_path_factory.mktemp("endless")
    save_random("Llama", {**SIZES, "max_position_embeddings": 4096, "eos_token_id": None}, folder)
    save_tokenizer(folder)
    with Server(FGSERVE, str(folder), "--served-model-name", "mine", "--api-key", KEY) as server:
        yield server


def test_the_script_of_the_page(server: Server) -> None:
    command = [str(NODE), str(TESTS / "page_in_node.mjs"), server.url, KEY]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    assert run.returncode == 0, run.stdout


def test_the_policy_and_the_switch() -> None:
    client = TestClient(make_app(Service(read_options([], {}))))
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for kind in ("script", "style"):
        (own,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page.text, re.S)
        digest = b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page.headers["content-security-policy"]
    assert not re.search(r"(?:src|href)=\"(?!data:)", page.text), "something is loaded"
    assert client.head("/").status_code == 200
    docs = client.get("/docs")
    loaded = re.findall(r"<(?:script|link)[^>]*https://[^>]*>", docs.text)
    assert len(loaded) == 2
    assert all(re.search(r'crossorigin="anonymous"\s+integrity="sha384-\S{64}"', tag) for tag in loaded)
    assert re.search(r"script-src https://\S+/ 'sha256-\S+='", docs.headers["content-security-policy"])
    client = TestClient(make_app(Service(read_options(["--no-page"], {}))))
    assert client.get("/").status_code == client.get("/docs").status_code == 404
