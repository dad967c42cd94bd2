"""A stress test of a running fgserve: chats and completions, streamed or not, of which some clients leave early.

    fgserve &
    python -m locust -f scripts/bench/locustfile.py --headless -u 50 -r 10 -t 60s --host http://localhost:5678

Writes scripts/results/serve-locust.json (--out PATH: another file). A request fails where its answer is not what was
asked for; at the end the server may hold nothing of those that have left. Times are in milliseconds, of streams to
their first chunk, of others to the end. Needs locust, which fastgen itself does not.
"""

from __future__ import annotations

import json
import random
import re
import time
import urllib.request
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from locust import HttpUser, between, events, task
from locust.env import Environment

OUT = Path(__file__).parent.parent / "results" / "serve-locust.json"
TEXT = "tell me what you know about the moon and its light on water where a small boat sails to the north"
SETTLE_SECONDS = 30.0


class Client(HttpUser):
    wait_time = between(0, 0.5)

    def on_start(self) -> None:
        self.draw = random.Random()

    def text(self) -> str:
        return " ".join(self.draw.choices(TEXT.split(), k=self.draw.randint(3, 60)))

    def options(self) -> dict[str, Any]:
        return {"model": "any", "max_tokens": self.draw.randint(1, 64), "temperature": 0.8, "ignore_eos": True}

    def chat(self) -> dict[str, Any]:
        return self.options() | {"messages": [{"role": "user", "content": self.text()}]}

    def completion(self) -> dict[str, Any]:
        return self.options() | {"prompt": self.text()}

    @task(3)
    def chat_whole(self) -> None:
        self.whole("/v1/chat/completions", self.chat(), "chat")

    @task(3)
    def completion_whole(self) -> None:
        self.whole("/v1/completions", self.completion(), "completion")

    @task(3)
    def chat_streamed(self) -> None:
        self.streamed("/v1/chat/completions", self.chat(), "chat, streamed")

    @task(3)
    def completion_streamed(self) -> None:
        self.streamed("/v1/completions", self.completion(), "completion, streamed")

    @task(2)
    def leave(self) -> None:
        """Disconnect after a few chunks of a long answer."""
        body = self.completion() | {"max_tokens": 1000, "stream": True}
        with self.client.post(
            "/v1/completions", json=body, stream=True, catch_response=True, name="completion, left"
        ) as reply:
            for place, _ in enumerate(reply.iter_lines()):
                if place == 10:
                    break
            reply.close()
            self.judge(reply, reply.status_code == 200, "the status")

    @task(1)
    def wrong(self) -> None:
        with self.client.post(
            "/v1/completions", json={"prompt": "x", "best_of": -1}, catch_response=True, name="wrong"
        ) as reply:
            self.judge(reply, reply.status_code == 400 and "error" in reply.json(), "the error")

    def whole(self, path: str, body: dict[str, Any], name: str) -> None:
        with self.client.post(path, json=body, catch_response=True, name=name) as reply:
            right = reply.status_code == 200
            self.judge(reply, right and reply.json()["usage"]["completion_tokens"] == body["max_tokens"], "the answer")

    def streamed(self, path: str, body: dict[str, Any], name: str) -> None:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self.client.post(path, json=body, stream=True, catch_response=True, name=name) as reply:
            lines = [line for line in reply.iter_lines() if line]
            right = reply.status_code == 200 and lines[-1] == b"data: [DONE]"
            usage = json.loads(lines[-2].removeprefix(b"data: "))["usage"] if right else {}
            self.judge(reply, usage.get("completion_tokens") == body["max_tokens"], "the end of the stream")

    @staticmethod
    def judge(reply: Any, right: bool, what: str) -> None:
        if right:
            reply.success()
        else:
            reply.failure(f"{what} is wrong; the status is {reply.status_code}")


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", default=str(OUT), help="the JSON to write")


@events.quitting.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Write the figures; the exit status tells of failures, and of what is left in the server."""
    options, stats = environment.parsed_options, environment.stats
    assert options is not None
    assert environment.host is not None
    after = settle(environment.host.rstrip("/"))
    report = {
        "users": options.num_users,
        "run_time_seconds": options.run_time,
        "total": figures(stats.total),
        "requests": {name: figures(entry) for (name, _), entry in sorted(stats.entries.items())},
        "after": after,
    }
    Path(options.out).write_text(json.dumps(report, indent=2) + "\n")
    if stats.total.num_failures or not stats.total.num_requests or not after["idle"]:
        environment.process_exit_code = 1


def figures(entry: Any) -> dict[str, Any]:
    return {
        "requests": entry.num_requests,
        "failures": entry.num_failures,
        "requests_per_second": entry.total_rps,
        **{f"p{100 * part:g}_ms": entry.get_response_time_percentile(part) for part in (0.5, 0.9, 0.99)},
        "longest_ms": entry.max_response_time,
    }


def settle(host: str) -> dict[str, Any]:
    """Return what the server still holds after all clients have left, once it is idle."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        held = {name: metric(host, name) for name in ("running", "waiting", "pages_used")}
        if not any(held.values()) or time.monotonic() > deadline:
            return held | {"aborted": metric(host, "aborted_total"), "idle": not any(held.values())}
        time.sleep(0.2)


def metric(host: str, name: str) -> float:
    with urllib.request.urlopen(f"{host}/metrics", timeout=30) as reply:
        told = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^fastgen_{name}\{{.*\}} (\S+)$", told, re.M))
