"""The page of fgserve: its script in Node with a small DOM everywhere, and in Chromium where there is one.

Node comes with playwright's wheel, from PyPI; no wheel has a browser. So the first test holds the script to all that it
does, on any machine, against a real server; the second one holds that a browser shows it and enforces its policy.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import playwright
import pytest
from conftest import SIZES, save_random, save_tokenizer
from playwright.sync_api import Browser, expect, sync_playwright
from serving import FGSERVE, Server
from starlette.testclient import TestClient

from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.service import Service

pytestmark = pytest.mark.timeout(120)

TESTS = Path(__file__).parents[2]
NODE = Path(playwright.__file__).parent / "driver" / "node"
NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
KEY = "key of the page's test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose answers do not end."""
    folder = tmp_path_factory.mktemp("endless")
    save_random("Llama", {**SIZES, "max_position_embeddings": 4096, "eos_token_id": None}, folder)
    save_tokenizer(folder)
    with Server(FGSERVE, str(folder), "--served-model-name", "mine", "--api-key", KEY) as server:
        yield server


@pytest.fixture
def chromium() -> Iterator[Browser]:
    with sync_playwright() as running:
        own = running.chromium.executable_path  # of `playwright install chromium-headless-shell`
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip("there is no Chromium; test_the_script_of_the_page has run its script")
        with running.chromium.launch(executable_path=found, args=["--no-sandbox"]) as browser:
            yield browser


def test_the_script_of_the_page(server: Server) -> None:
    command = [str(NODE), str(TESTS / "page_in_node.mjs"), server.url, KEY]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    assert run.returncode == 0, run.stdout


def test_the_page_in_a_browser(server: Server, chromium: Browser) -> None:
    page = chromium.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(server.url)
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("fgserve · mine")
    page.get_by_label("Message").fill("<img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    stop = page.get_by_role("button", name="Stop")
    expect(page.locator("article .facts")).to_contain_text("tokens/s")
    stop.click()
    expect(page.locator("article .facts")).to_contain_text("stopped")
    expect(stop).to_be_hidden()
    expect(page.locator("article").first).to_contain_text("<img src=x onerror=alert(1)>")
    assert not page.locator("#log img").count()
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    page.get_by_label("Message").fill("far too long " * 2000)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("maximum context length")
    assert not [line for line in said if "Failed to load resource" not in line]  # it reports each 400, 401 and 503
    page.evaluate("fetch('https://example.com').catch(() => {})")
    assert page.evaluate("() => { try { document.body.innerHTML = 'x' } catch { return true } }")
    assert "Content Security Policy" in "".join(said)
    assert page.get_by_role("heading", level=1).is_visible()


def test_the_policy_and_the_switch() -> None:
    client = TestClient(make_app(Service(read_options([], {}))))
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert re.search(r"script-src 'sha256-\S+='; style-src 'sha256-\S+='", page.headers["content-security-policy"])
    assert not re.search(r"(?:src|href)=\"(?!data:)", page.text), "something is loaded"
    assert client.head("/").status_code == 200
    docs = client.get("/docs")
    loaded = re.findall(r"<(?:script|link)[^>]*https://[^>]*>", docs.text)
    assert len(loaded) == 2
    assert all(re.search(r'crossorigin="anonymous"\s+integrity="sha384-\S{64}"', tag) for tag in loaded)
    assert re.search(r"script-src https://\S+/ 'sha256-\S+='", docs.headers["content-security-policy"])
    client = TestClient(make_app(Service(read_options(["--no-page"], {}))))
    assert client.get("/").status_code == client.get("/docs").status_code == 404
