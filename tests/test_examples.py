"""The example of an app runs."""

from __future__ import annotations

import httpx
from serving import Server


def test_the_app_counts_answers_and_tells_what_is_wrong() -> None:
    command = ("-m", "uvicorn", "--app-dir", "scripts/examples", "app:app", "--port", "0")
    with Server(command, listening=r"running on (\S+)") as server:
        url = server.url
        found = httpx.get(f"{url}/vote", params={"question": "what is 12 + 30?"}, timeout=30).json()
        assert sum(found.values()) == 16
        assert "42" in max(found, key=found.__getitem__)
        long = httpx.get(f"{url}/vote", params={"question": "far too long " * 1000}, timeout=30)
        assert (long.status_code, httpx.get(f"{url}/vote", params={"question": "?", "samples": 0}).status_code) == (
            400,
            400,
        )
        assert "context" in long.json()["detail"]
