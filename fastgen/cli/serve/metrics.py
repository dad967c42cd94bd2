"""The metrics of a server, in the format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastgen.cli.serve.engine import Engine
from fastgen.request import Event

GAUGES = {
    "running": "running sequences",
    "waiting": "sequences waiting for a lane",
    "pages_used": "pages of the KV cache held by sequences",
    "pages": "pages of the KV cache",
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
}
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class _EngineCollector(Collector):
    """The current counts of all engines. They start at 0 again when an engine is restarted."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        for kind, counts in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, help in counts.items():
                family = kind(f"fastgen_{name}", help, labels=["model"])
                for model, engine in self._engines.items():
                    family.add_metric([model], getattr(engine.stats, name))
                yield family


class Metrics:
    """All metrics of a server. engines: by the names of their models."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engines))
        self.queue = self._histogram("queue", "from a request's arrival to its first step", SECONDS)
        self.first = self._histogram("first_token", "from a request's arrival to its first token", SECONDS)
        self.gap = self._histogram("inter_token", "between tokens of a sample; without streaming, their mean", GAPS)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        name = f"fastgen_{name}_seconds"
        return Histogram(name, f"seconds {help}", ["model"], buckets=buckets, registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Meter:
    """Measures one request from its arrival on."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._queue, self._first = metrics.queue.labels(model), metrics.first.labels(model)
        self._gap = metrics.gap.labels(model)
        self._arrival = time.monotonic()
        self._started = False
        self._last: dict[tuple[str | int, int], float] = {}  # by prompt and sample: the time of the last tokens

    def observe(self, events: Iterable[Event]) -> None:
        """Record new events. The `id` of an event is the index of its prompt."""
        now = time.monotonic()
        for event in events:
            if not self._started and event.started is not None:
                self._started = True
                self._queue.observe(event.started - self._arrival)
            if not event.token_ids:
                continue
            key = (event.id, event.index)
            if key in self._last:
                self._gap.observe((now - self._last[key]) / len(event.token_ids))
            elif not self._last:
                self._first.observe(now - self._arrival)
            self._last[key] = now
