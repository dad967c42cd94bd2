"""The app of docs/python.md runs, the client of docs/quickstart-serve.md prints what its page shows, and the lines that
docs/ideas.md changes exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
from serving import Server, until

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = DOCS / "python.md"

MORE = """
@app.get("/long")
async def long():
    events = app.state.gen.stream("x", SamplingParams(max_tokens=1500, ignore_eos=True))
    return StreamingResponse(event.text async for event in events)


@app.get("/stats")
async def stats():
    return app.state.gen.stats
"""


def test_the_app_streams_answers_and_ends_those_of_clients_that_leave(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if "FastAPI(" in block)
    (tmp_path / "app.py").write_text(code + MORE, encoding="utf-8")
    command = ("-m", "uvicorn", "--app-dir", str(tmp_path), "app:app", "--port", "0")
    with Server(command, listening=r"running on (\S+)") as server:
        assert "42" in server.get("/ask", params={"question": "what is 12 + 30?"}, timeout=30).text
        refused = server.get("/ask", params={"question": "x " * 9000}, timeout=30)
        assert (refused.status_code, "shorten it" in refused.json()["detail"]) == (400, True)
        with httpx.stream("GET", f"{server.url}/long", timeout=30) as answer:
            assert next(answer.iter_raw())
        until(lambda: server.get("/stats").json()["aborted"] == 1)
        stats = server.get("/stats").json()
        assert (stats["finished"], stats["pages_used"]) == (1, 0)


def test_the_client_of_the_quickstart_prints_what_its_page_shows(bundled_server: Server) -> None:
    page = (DOCS / "quickstart-serve.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python no-test\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"`python client.py` prints\n\n(.*?)\n\n", page, re.DOTALL)
    code = code.replace("http://localhost:5678", bundled_server.url)
    client = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    counters = re.findall(r"^    (fastgen_\w+)\{", page, re.MULTILINE)
    metrics = bundled_server.get("/metrics").text
    assert client.stdout.splitlines() == [line.strip() for line in shown.splitlines()], client.stderr
    assert len(counters) == 2
    assert all(f"\n{name}{{" in metrics for name in counters)


def test_the_lines_that_the_page_of_ideas_changes_exist() -> None:
    page = (DOCS / "ideas.md").read_text(encoding="utf-8")
    diffs = re.findall(r"```diff\n--- (\S+)\n(.*?)```", page, re.DOTALL)
    assert diffs
    for name, diff in diffs:
        source = (DOCS.parent / name).read_text(encoding="utf-8")
        assert all(source.count(line) == 1 for line in re.findall(r"^-(.*\n)", diff, re.MULTILINE)), diff
