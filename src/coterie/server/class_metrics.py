"""ClassMetrics: what /metrics says of each service class. Three label values at most; nothing without classes.

Requests are counted once, when they end or are refused; tokens and evictions are the engine's own counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coterie.engine.messages import Stats
from coterie.observe.requests import RequestSummary


class ClassMetrics:
    """Counters and a histogram in a registry; all have the labels model_name and service_class."""

    def __init__(self, registry: CollectorRegistry, prefix: str, buckets: tuple[float, ...]) -> None:
        labels = ("model_name", "service_class")
        self._ended = Counter(
            prefix + "class_requests", "Ended requests.", (*labels, "finished_reason"), registry=registry
        )
        self._refused = Counter(prefix + "class_refused", "Requests told to come later.", labels, registry=registry)
        self._deadline = Counter(
            prefix + "class_deadline", "First tokens within the class's deadline or not.", (*labels, "met"),
            registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            prefix + "class_time_to_first_token_seconds", "Arrival to first token.", labels,
            buckets=buckets, registry=registry,
        )  # fmt: skip

    def refused(self, model_name: str, service_class: str) -> None:
        """A request found no place."""
        self._refused.labels(model_name, service_class).inc()

    def finished(self, model_name: str, summary: RequestSummary) -> None:
        """A request ended; one without a class is not counted."""
        name = summary.service_class
        if name is None:
            return
        self._ended.labels(model_name, name, summary.reason).inc()
        if summary.first_token is not None:
            self._first.labels(model_name, name).observe(summary.first_token)
            met = "yes" if summary.first_token <= summary.deadline else "no"
            self._deadline.labels(model_name, name, met).inc()


def class_families(prefix: str, model_name: str, stats: Stats) -> Iterator[Metric]:
    """The engine's numbers of each class; nothing if it has one class only."""
    if not stats.classes:
        return
    labels = ("model_name", "service_class")
    running = GaugeMetricFamily(prefix + "class_num_requests_running", "Sequences in the running batch.", labels=labels)
    waiting = GaugeMetricFamily(prefix + "class_num_requests_waiting", "Sequences in the queue.", labels=labels)
    tokens = CounterMetricFamily(prefix + "class_tokens", "Tokens computed, again or not.", labels=(*labels, "kind"))
    evicted = CounterMetricFamily(prefix + "class_evictions", "Sequences put back for a higher class.", labels=labels)
    for one in stats.classes:
        own = (model_name, one.name)
        running.add_metric(own, one.num_running)
        waiting.add_metric(own, one.num_waiting)
        tokens.add_metric((*own, "prompt"), one.prompt_tokens)
        tokens.add_metric((*own, "decode"), one.decode_tokens)
        evicted.add_metric(own, one.evictions)
    yield from (running, waiting, tokens, evicted)
