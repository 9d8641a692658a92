"""Metrics for Prometheus: the counters of schedulers, by bundle, and of the server itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tfexport.api.model import Model
from tfexport.scheduling.metrics import SECONDS
from tfexport.serving.catalog import Catalog, Served
from tfexport.serving.state import State

OUTCOMES = ("accepted", "rejected", "finished", "failed", "cancelled", "expired")
GAUGES = {
    "queued": ("queue_requests", "Requests of which a sentence waits."),
    "queued_tokens": ("queue_source_tokens", "Source ids of the sentences that wait."),
    "live_rows": ("live_rows", "Rows of the sentences that workers have."),
}
COUNTERS = {
    "restarts": ("worker_restarts", "Workers that ended and were replaced."),
    "sentences": ("sentences", "Sentences that were decoded."),
    "source_tokens": ("source_tokens", "Source ids of the sentences that were decoded."),
    "tokens": ("output_tokens", "Tokens of their best outputs."),
}
HISTOGRAMS = {
    "step_rows": "Rows of each step.",
    "step_seconds": "Seconds of each step, with the encoding before it.",
    "waiting_seconds": "Seconds of each sentence from its request to its beginning.",
    "request_seconds": "Seconds of each request that was answered, in the scheduler.",
}


class Metrics:
    """All metrics of a server, in its own registry."""

    def __init__(self, catalog: Catalog, state: State):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(_Schedulers(catalog))
        self.registry.register(_Server(state))
        self.requests = Counter(
            "tfexport_http_requests",
            "Requests by address and status; 499: the client went away.",
            ["method", "address", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "tfexport_http_request_seconds",
            "Seconds from a request's headers to the end of its answer.",
            ["address"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refused = Counter(
            "tfexport_http_refused",
            "What limits ended: malformed, host, origin, key, rate, requests, queue, connections, size, large headers, slow "
            "request, slow headers, slow reader.",
            ["reason"],
            registry=self.registry,
        )
        self.reloads = Counter(
            "tfexport_reloads",
            "Bundles that were loaded again, or could not be.",
            ["model", "outcome"],
            registry=self.registry,
        )


class _Server(Collector):
    """The current state of the server."""

    def __init__(self, state: State):
        self._state = state

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("tfexport_http_requests_active", "Requests being answered.", self._state.active)
        yield GaugeMetricFamily("tfexport_draining", "1 while the server ends.", int(self._state.is_draining))


class _Schedulers(Collector):
    """`Model.serving_metrics` of all bundles, read at each scrape. After a reload they begin at 0 again."""

    def __init__(self, catalog: Catalog):
        self._catalog = catalog

    def collect(self) -> Iterable[Metric]:
        bundles = self._catalog.served
        info = InfoMetricFamily("tfexport_bundle", "Bundles that are served.", labels=["model"])
        for served in bundles:
            about = {
                "runtime": served.runtime,
                "precision": served.precision,
                "certified": str(served.uncertified is None).lower(),
                "confirmed": str(served.bundle.origin.confirmation.is_confirmed).lower(),
            }
            info.add_metric([served.name], about)
        yield info
        counts = {served.name: _counted(served) for served in bundles if isinstance(served.model, Model)}
        outcomes = CounterMetricFamily(
            "tfexport_requests", "Requests by what became of them.", labels=["model", "outcome"]
        )
        for name, counted in counts.items():
            for outcome in OUTCOMES:
                outcomes.add_metric([name, outcome], counted[outcome])
        yield outcomes
        for field, (called, help) in GAUGES.items():
            gauge = GaugeMetricFamily(f"tfexport_{called}", help, labels=["model"])
            for name, counted in counts.items():
                gauge.add_metric([name], counted[field])
            yield gauge
        for field, (called, help) in COUNTERS.items():
            counter = CounterMetricFamily(f"tfexport_{called}", help, labels=["model"])
            for name, counted in counts.items():
                counter.add_metric([name], counted[field])
            yield counter
        for field, help in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"tfexport_{field}", help, labels=["model"])
            for name, counted in counts.items():
                histogram.add_metric([name], _buckets(counted[field]), counted[field]["sum"])
            yield histogram


def _counted(served: Served) -> dict[str, Any]:
    assert isinstance(served.model, Model)
    return served.model.serving_metrics()


def _buckets(counted: dict[str, Any]) -> list[tuple[str, float]]:
    """Cumulative buckets: Prometheus counts the values up to each bound."""
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip([*map(str, counted["bounds"]), "+Inf"], counted["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
