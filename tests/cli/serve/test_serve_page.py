"""The page of fgserve: its script in Node with a small DOM everywhere, and in Chromium where there is one.

Node comes with playwright's wheel, from PyPI; no wheel has a browser. So the first test holds the script to all that it
does, on any machine, against a real server; the next ones hold that a browser shows it, that no text becomes more than
text there, and that it enforces the page's policy. They are long, since Node and Chromium take seconds to start.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import playwright
import pytest
from conftest import SIZES, save_random, save_tokenizer
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving import FGSERVE, Server
from starlette.testclient import TestClient

from fastgen.cli import serve
from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.service import Service

pytestmark = pytest.mark.timeout(120)

TESTS = Path(__file__).parents[2]
NODE = Path(playwright.__file__).parent / "driver" / "node"
NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
VENDOR = Path(serve.__file__).parent / "vendor"
KEY = "key of the page's test"
HOSTILE = """<img src=x onerror=alert(1)> <script>alert(2)</script> <a href="javascript:alert(3)">a</a>
[b](javascript:alert(4)) [c](&#106;avascript:alert(5)) [d](data:text/html,<b>) <svg/onload=alert(7)>
<javascript:alert(8)> [e](<java\tscript:alert(9)>) `<img src=x onerror=alert(10)>`"""
MARKDOWN = f"""# One

**bold** <your-name>, [link](https://page.example/), ![picture](https://page.example/a.png)
{HOSTILE}

| name | tokens/s | a rather long heading of a column | another rather long heading of a column |
|---|--:|---|---|
| one | 1234 | x | <b onclick=alert(1)>y</b><br>z |

1. first

2. second
   - [x] done

Two
---
<div onclick="alert(1)">
**block** <style>* {{ display: none }}</style>
</div>

```python"><img/src=x/onerror=alert(1)>
print("<b>")
```
{"wide" * 100}

so $x^2$ or $\\frac{{a}}{{b}}$, from $5 to $6

\\[
\\begin{{aligned}} a &= \\sqrt{{b}} \\\\
c &= \\text{{<img src=x onerror=alert(1)>}} \\href{{javascript:alert(1)}}{{d}} \\end{{aligned}}
\\]

$$\\begin{{pmatrix}} 1 & 2 \\\\ 3 & 4 \\end{{pmatrix}}$$

The end."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose answers do not end."""
    folder = tmp_path_factory.mktemp("endless")
    save_random("Llama", {**SIZES, "max_position_embeddings": 4096, "eos_token_id": None}, folder)
    save_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": None}))
    with Server(FGSERVE, str(folder), "--served-model-name", "mine", "--api-key", KEY) as server:
        yield server.await_ready()


@pytest.fixture
def chromium() -> Iterator[Browser]:
    with sync_playwright() as running:
        own = running.chromium.executable_path  # of `playwright install chromium-headless-shell`
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip("there is no Chromium; test_the_script_of_the_page has run its script")
        with running.chromium.launch(executable_path=found, args=["--no-sandbox"]) as browser:
            yield browser


def console(page: Page) -> list[str]:
    """Return the list to which the errors and warnings of a page are added."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss())[1])  # of alert()
    return said


def stream() -> str:
    """Return a streamed answer, with its reasoning as reasoning models have it."""
    deltas = [{"reasoning_content": "my <thoughts>"}] + [{"content": text} for text in MARKDOWN]
    chunks = [{"choices": [{"delta": delta}], "usage": {"completion_tokens": 1}} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def assert_harmless(page: Page) -> None:
    assert not page.locator("#log :is(img, script, style, iframe, svg, form, input, object)").count()
    assert not page.locator("#log :is([onerror], [onclick], [style], [href^=javascript], [href^=data])").count()


@pytest.mark.long
def test_the_script_of_the_page(server: Server) -> None:
    command = [str(NODE), str(TESTS / "page_in_node.mjs"), server.url, KEY]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250)
    assert run.returncode == 0, run.stdout


@pytest.mark.long
def test_the_page_in_a_browser(server: Server, chromium: Browser) -> None:
    page = chromium.new_page()
    said = console(page)
    page.goto(server.url)
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("fgserve · mine")
    page.get_by_label("Message").fill(HOSTILE)
    page.keyboard.press("Enter")
    stop = page.get_by_role("button", name="Stop")
    expect(page.locator("article .facts").last).to_contain_text("tokens/s")
    stop.click()
    expect(page.locator("article .facts").last).to_contain_text("stopped")
    expect(stop).to_be_hidden()
    expect(page.locator("article").first).to_contain_text("<img src=x onerror=alert(1)>")
    assert_harmless(page)
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


@pytest.mark.long
def test_the_page_of_routes_in_a_browser(server: Server, chromium: Browser) -> None:
    page = chromium.new_page()
    said, loaded = console(page), list[str]()
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(f"{server.url}/docs")
    page.get_by_text("POST /v1/completions", exact=True).click()
    route = page.locator("details[open]")
    expect(route.get_by_role("row", name="max_tokens")).to_contain_text("integer")
    body = route.get_by_label("Body of /v1/completions")
    body.fill(json.dumps({**json.loads(body.input_value()), "max_tokens": 3}))
    for key, told in ("wrong", "401"), (KEY, '"completion_tokens":3'):
        page.get_by_label("API key").fill(key)
        route.get_by_role("button", name="Send").click()
        expect(route.locator("pre")).to_contain_text(told)
    body.fill(json.dumps({"prompt": "Hello", "max_tokens": 3, "stream": True}))
    route.get_by_role("button", name="Send").click()
    expect(route.locator("pre")).to_contain_text("data: [DONE]")
    page.get_by_text("GET /v1/models", exact=True).click()
    page.get_by_role("button", name="Send").first.click()
    expect(page.locator("pre").first).to_contain_text('"id":"mine"')
    assert not [line for line in said if "Failed to load resource" not in line]
    assert all(url.startswith((server.url, "data:")) for url in loaded)


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (360, "dark")])
def test_markdown_of_a_model_that_thinks_in_a_browser(
    server: Server, chromium: Browser, width: int, scheme: Literal["light", "dark"]
) -> None:
    """The answer is a stream of this test's own, one character a chunk, since no small model writes Markdown."""
    context = chromium.new_context(viewport={"width": width, "height": 720}, color_scheme=scheme)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    said = console(page)
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.add_init_script(f"sessionStorage.setItem('fgserve-key', {KEY!r})")
    page.route("**/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream()))
    page.goto(server.url)
    expect(page.get_by_role("heading", level=1)).to_have_text("fgserve · mine")
    page.get_by_label("Message").fill("# hello *you*")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The end.")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert_harmless(page)
    streamed = page.locator("article .text").last.inner_html()
    expect(page.get_by_role("cell", name="1234")).to_be_visible()
    expect(page.get_by_role("heading", level=4)).to_have_text("Two")
    expect(page.get_by_role("listitem").filter(has_text=re.compile("^☑ done$"))).to_be_visible()
    assert page.locator("#log a[href]").evaluate_all("all => all.map(({ href, rel }) => [href, rel])") == [
        ["https://page.example/", "noopener noreferrer"],
        ["https://page.example/a.png", "noopener noreferrer"],
    ]
    assert page.locator("#log math").count() == 3  # the one with \\href is no formula
    assert page.locator("#log math[display=block]").count() == 1
    expect(page.get_by_text("<thoughts>")).to_be_hidden()
    page.get_by_text("Thinking", exact=True).last.click()
    expect(page.get_by_text("<thoughts>")).to_be_visible()
    page.get_by_role("button", name="Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<b>")\n'
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(251, 251, 253)", "dark": "rgb(20, 22, 28)"}[scheme]

    # What the browser keeps is the same after a reload, and is no more HTML than what came.
    page.evaluate("""() => {
        const bad = "<img src=x onerror=alert(1)><script>alert(2)</" + "script>";
        const messages = [{ role: "user", content: bad }, { role: "assistant", content: bad, reasoning_content: bad }];
        localStorage.setItem("fgserve-chat-bad", JSON.stringify({ id: "bad", title: bad, changed: 1, messages }));
    }""")
    page.reload()
    assert page.locator("article .text").last.inner_html() == streamed
    chats = page.get_by_role("button", name="Chats")
    if chats.is_visible():
        chats.click()
    page.get_by_role("navigation").get_by_text("<img src=x").click()
    expect(page.locator("article .text").last).to_have_text("<img src=x onerror=alert(1)><script>alert(2)</script>")
    assert_harmless(page)
    assert not [line for line in said if "Failed to load resource" not in line]
    assert all(url.startswith((server.url, "data:")) for url in loaded)


class Inside(HTMLParser):
    """What is inside the scripts and styles of a page, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(url) for name, url in attributes if name in ("src", "href") and str(url)[:5] != "data:"]
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in self.texts:
            self.texts[self.cdata_elem][-1] += data


def csp_hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_third_party_files_are_those_that_their_readme_names() -> None:
    rows = re.findall(r"^\| `(\S+)` .* \(`(\S+)`\) \| `(\w{64})` \|$", (VENDOR / "README.md").read_text(), re.MULTILINE)
    assert {name: hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() for name, _, _ in rows} == {
        name: digest for name, _, digest in rows
    }
    named = {name for name, _, _ in rows} | {license_name for _, license_name, _ in rows} | {"README.md"}
    assert named == {path.name for path in VENDOR.iterdir()}


def test_the_policy_and_the_switch() -> None:
    client = TestClient(make_app(Service(read_options([], {}))))
    for path, scripts, types in ("/", 5, "dompurify"), ("/docs", 1, "'none'"):
        page = client.get(path)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        inside = Inside()
        inside.feed(page.text)
        hashes = {tag: " ".join(map(csp_hash, texts)) for tag, texts in inside.texts.items()}
        policy = page.headers["content-security-policy"]
        assert (
            f"script-src {hashes['script']}; style-src {hashes['style']}; require-trusted-types-for 'script'" in policy
        )
        assert policy.endswith(f"trusted-types {types}")
        assert (len(inside.texts["script"]), inside.loaded) == (scripts, ["openapi.json"] * (path == "/docs"))
        assert client.head(path).status_code == 200
    unlimited = TestClient(make_app(Service(read_options(["--ignore-limits"], {}))))
    fields = [re.findall('<input id="temperature"[^>]*>', each.get("/").text)[0] for each in (client, unlimited)]
    assert [" max=" in field for field in fields] == [True, False]
    client = TestClient(make_app(Service(read_options(["--no-page"], {}))))
    assert client.get("/").status_code == client.get("/docs").status_code == 404
