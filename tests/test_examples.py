"""The app of docs/python.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from serving import Server, until

GUIDE = Path(__file__).parents[1] / "docs" / "python.md"

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
