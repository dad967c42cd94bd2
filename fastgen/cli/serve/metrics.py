"""What /metrics says, in the format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastgen.cli.serve.engine import Engine
from fastgen.request import Event

GAUGES = {
    "running": "requests' sequences that run",
    "waiting": "sequences that wait for a lane",
    "pages_used": "pages of the KV cache that sequences hold",
    "pages": "pages of the KV cache",
}
COUNTERS = {
    "requests": "requests that the engine took",
    "finished": "requests that finished",
    "aborted": "requests that were aborted",
    "prompt_tokens": "tokens in",
    "generated_tokens": "tokens out",
    "cached_tokens": "known tokens that nothing had to be computed for",
    "prefilled_tokens": "known tokens that were computed",
    "preemptions": "sequences that had to make room",
    "steps": "steps of the engine",
}
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class _Stats(Collector):
    """The counts of the engines, as they are when they are asked for. They begin anew where an engine is restarted."""

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
    """engines: by the names of their models."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Stats(engines))
        self.queue = self._seconds("queue", "from a request's arrival until it begins to run", SECONDS)
        self.first = self._seconds("first_token", "from a request's arrival to its first token", SECONDS)
        self.gap = self._seconds("inter_token", "between two tokens of a sequence; of a whole answer their mean", GAPS)

    def _seconds(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        told = f"seconds {what}"
        return Histogram(f"fastgen_{name}_seconds", told, ["model"], buckets=buckets, registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Meter:
    """Measures one request, from its arrival on."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._queue, self._first = metrics.queue.labels(model), metrics.first.labels(model)
        self._gap = metrics.gap.labels(model)
        self._arrival = time.monotonic()
        self._waits = True
        self._last: dict[tuple[int, int], float] = {}  # by prompt and sample: when its last tokens came

    def take(self, prompt: int, events: Iterable[Event]) -> None:
        """New events of a prompt have come."""
        now = time.monotonic()
        for event in events:
            if self._waits and event.started is not None:
                self._waits = False
                self._queue.observe(event.started - self._arrival)
            if not event.token_ids:
                continue
            key = (prompt, event.index)
            if key in self._last:
                self._gap.observe((now - self._last[key]) / len(event.token_ids))
            elif not self._last:
                self._first.observe(now - self._arrival)
            self._last[key] = now
