"""Measurements of a server: metrics in Prometheus' format, the meter of each request, and lines with the throughput.

scripts/deploy/grafana.json has a dashboard of these metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastgen.engine.stats import Stats
from fastgen.request import Event

ReadStats = Callable[[], Mapping[str, Stats]]
"""A function that returns the current statistics of each model's engine, by the name of the model."""

GAUGES = {
    "running": "running sequences",
    "waiting": "sequences waiting for a lane",
    "pages_used": "pages of the KV cache held by sequences",
    "pages": "pages of the KV cache",
    "kv_cache_usage": "share of the KV cache's pages held by sequences, from 0 to 1",
}
COUNTERS = {
    "requests": "requests accepted by the engine",
    "finished": "finished requests",
    "aborted": "aborted requests",
    "prompt_tokens": "prompt tokens",
    "generated_tokens": "generated tokens",
    "cached_tokens": "known tokens whose KV was found in a cache",
    "prefilled_tokens": "known tokens whose KV was computed",
    "preemptions": "preempted sequences",
    "steps": "steps of the engine",
    "drafted": "drafted tokens that were verified",
    "accepted": "drafted tokens that were accepted",
    "head_drafted": "tokens drafted by a head that were verified",
    "head_accepted": "tokens drafted by a head that were accepted",
    "saved_steps": "decode steps avoided by speculation",
    "repeated": "samples that repetition_detection ended",
}
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
LATENCIES = (*SECONDS[4:], 120.0, 300.0, 600.0, 1800.0)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics(Collector):
    """All metrics of a server, in Prometheus' format: counts of each model's engine, and latencies of requests. The
    counts start at 0 again when an engine is restarted."""

    def __init__(self, read_stats: ReadStats) -> None:
        self._read_stats = read_stats
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.queue = self._histogram("queue", "from a request's arrival to its first step", SECONDS)
        self.first = self._histogram("first_token", "from a request's arrival to its first token", SECONDS)
        self.latency = self._histogram("e2e_request_latency", "from a request's arrival to its last token", LATENCIES)
        self.responses = Counter("fastgen_responses", "HTTP responses", ["status"], registry=self._registry)
        self.gap = self._histogram("inter_token", "between tokens of a sample; their mean if it is not streamed", GAPS)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        name = f"fastgen_{name}_seconds"
        return Histogram(name, f"seconds {help}", ["model"], buckets=buckets, registry=self._registry)

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats()
        for kind, counts in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, help in counts.items():
                family = kind(f"fastgen_{name}", help, labels=["model"])
                for model, own in stats.items():
                    family.add_metric([model], getattr(own, name))
                yield family

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Meter:
    """The measurements of one request from its arrival on. As text, it is the end of the line in the access log."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._queue, self._first = metrics.queue.labels(model), metrics.first.labels(model)
        self._gap, self._latency = metrics.gap.labels(model), metrics.latency.labels(model)
        self._arrival = time.monotonic()
        self._last: dict[tuple[str | int, int], float] = {}  # {(prompt, sample): time of its last tokens}
        self._queued: float | None = None  # seconds until the first step
        self._first_token: float | None = None  # seconds until the first token
        self.model, self.prompt_tokens, self._tokens = model, 0, 0

    def observe(self, events: Iterable[Event]) -> None:
        """Record new events. The `id` of an event is the index of its prompt."""
        now = time.monotonic()
        for event in events:
            self._tokens += len(event.token_ids)
            if self._queued is None and event.started is not None:
                self._queued = event.started - self._arrival
                self._queue.observe(self._queued)
            if not event.token_ids:
                continue
            key = (event.id, event.index)
            if key in self._last:
                self._gap.observe((now - self._last[key]) / len(event.token_ids))
            elif self._first_token is None:
                self._first_token = now - self._arrival
                self._first.observe(self._first_token)
            self._last[key] = now

    def end(self) -> None:
        """Record the end of a request that was answered to the end."""
        self._latency.observe(time.monotonic() - self._arrival)

    def __str__(self) -> str:
        counts = f"model={self.model} prompt_tokens={self.prompt_tokens} completion_tokens={self._tokens}"
        times = {"queue": self._queued, "first_token": self._first_token}
        return " ".join([counts, *(f"{name}={value:.3f}s" for name, value in times.items() if value is not None)])


class Throughput:
    """The throughput of each model between two calls of `lines`."""

    def __init__(self, read_stats: ReadStats) -> None:
        self._read_stats = read_stats
        self._time, self._before = time.monotonic(), dict(read_stats())

    def lines(self) -> list[str]:
        """Return a line for each model that has computed something since the last call or has requests."""
        now, stats = time.monotonic(), dict(self._read_stats())
        seconds, before = now - self._time, self._before
        self._time, self._before = now, stats
        lines = []
        for model, own in stats.items():
            restarted = own.steps < before[model].steps
            new = own.since(Stats() if restarted else before[model])
            prompt = new.cached_tokens + new.prefilled_tokens
            if not (prompt or new.generated_tokens or own.running or own.waiting):
                continue
            lines.append(
                f"{model}: prompts {prompt / seconds:.1f} tok/s, generated {new.generated_tokens / seconds:.1f} tok/s, "
                f"running {own.running}, waiting {own.waiting}, KV cache {own.kv_cache_usage:.1%}, "
                f"prefix hits {new.cached_share:.1%}"
            )
        return lines
