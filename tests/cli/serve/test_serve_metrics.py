"""metrics.py: what an operator sees of a server, in its log, by Prometheus and on Grafana's dashboard."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ROOT, STUB, Server, until

from fastgen.cli.serve import metrics
from fastgen.cli.serve.metrics import LATENCIES, Throughput
from fastgen.engine.stats import Stats

pytestmark = pytest.mark.timeout(60)

ASKED: dict[str, Any] = {"model": "x", "prompt": [5, 6], "max_tokens": 40}
LINE = (
    r"fgserve: fastgen-tiny: prompts [\d.]+ tok/s, generated ([\d.]+) tok/s, running \d, waiting \d, KV cache \d.0%, "
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(STUB, "--log-interval=0.2", "--no-access-log") as server:
        yield server.await_ready()


def samples(server: Server) -> dict[str, set[str]]:
    """Return the names in the exposition of a server, each with the names of its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_log_has_the_throughput_while_there_is_some(server: Server) -> None:
    assert f"chat page: {server.url}/\n" in server.said
    time.sleep(0.5)
    assert "tok/s" not in server.said, "idle"
    assert server.post("/v1/completions", ASKED).status_code == 200
    until(lambda: "running 0" in server.said)
    lines = re.findall(LINE, server.said)
    assert len(lines) >= 2, "40 tokens take at least 0.4 s"
    assert 0 < 0.2 * sum(map(float, lines)) <= 41
    time.sleep(0.5)
    assert len(re.findall(LINE, server.said)) == len(lines), "idle again"
    assert "POST" not in server.said


def test_a_throughput_is_of_the_time_since_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"a": Stats(), "b": Stats(pages=10)}
    now = 100.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    throughput = Throughput(lambda: stats)
    busy = {"running": 2, "waiting": 1, "pages_used": 5}
    stats["b"] = Stats(pages=10, steps=4, prefilled_tokens=300, cached_tokens=100, generated_tokens=50, **busy)
    now = 110.0
    ends = "running 2, waiting 1, KV cache 50.0%, prefix hits 25.0%"
    assert throughput.lines() == [f"b: prompts 40.0 tok/s, generated 5.0 tok/s, {ends}"]
    stats["b"] = Stats(pages=10, steps=2, prefilled_tokens=10, generated_tokens=20)  # the engine has been restarted
    now = 112.0
    ends = "running 0, waiting 0, KV cache 0.0%, prefix hits 0.0%"
    assert throughput.lines() == [f"b: prompts 5.0 tok/s, generated 10.0 tok/s, {ends}"]
    assert throughput.lines() == []


def test_the_time_of_a_request_is_counted_when_it_is_answered(server: Server) -> None:
    def counts() -> tuple[float, float]:
        found = server.get("/metrics").text
        name = 'fastgen_e2e_request_latency_seconds_{}{{model="fastgen-tiny"}} (\\S+)'
        count, total = (re.search(name.format(kind), found) for kind in ("count", "sum"))
        return (float(count[1]), float(total[1])) if count and total else (0, 0)

    before = counts()
    for stream in (False, True):
        assert server.post("/v1/completions", {**ASKED, "stream": stream}).status_code == 200
    assert server.post("/v1/completions", {**ASKED, "n": 0}).status_code == 400
    after = counts()
    assert after[0] - before[0] == 2
    assert 0.8 <= after[1] - before[1] < 10
    assert sorted(LATENCIES) == list(LATENCIES)


def test_the_dashboard_asks_for_what_is_there(server: Server) -> None:
    server.post("/v1/completions", ASKED)  # a histogram of a model begins with its first request
    known = samples(server)
    dashboard = json.loads((ROOT / "scripts/deploy/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for query in [*queries, *(variable["query"] for variable in dashboard["templating"]["list"])]:
        for name, labels in re.findall(r"(fastgen_\w+)(?:\{(\w+)=~)?", query):
            assert name in known, query
            assert not labels or labels in known[name], query
        (name, *_) = re.findall(r"fastgen_\w+", query) or [""]
        for label in re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query))):
            assert label in known[name], query
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(set(titles)) == len(titles)
    assert {"fastgen_kv_cache_usage", "fastgen_e2e_request_latency_seconds_bucket"} <= known.keys()
