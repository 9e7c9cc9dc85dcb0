"""ServerMetrics: what /metrics shows, in a private registry. Stems and units are vLLM's, the prefix is `coterie:`.

Counters add up: every request that was handed to the engine is counted once, when it ends, under one finished_reason,
and its tokens are those of its `usage`. Gauges are read from the engine's latest Stats when scraped. Label values are
bounded. Not here: how events are observed (`engine.frontend` tells the observer).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie.engine.messages import Stats
from coterie.observe.requests import RequestObserver, RequestSummary
from coterie.server.class_metrics import ClassMetrics, class_families
from coterie.server.rank_metrics import rank_families

PREFIX = "coterie:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS = ("stop", "length", "abort", "error")

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5, 10.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

CORE = frozenset({
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens", "generation_tokens",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_success",
    "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
})  # fmt: skip
"""Repeated under `vllm:` for stock dashboards."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the engine's numbers come from once a model is served."""

    model_name: str
    stats: Callable[[], Stats | None]


class ServerMetrics(RequestObserver):
    """Observer of requests and source of the exposition; told and scraped on the event loop's thread."""

    def __init__(self, compat: Literal["none", "vllm"] = "none") -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._repeat = compat == "vllm"
        self._source: _Source | None = None
        self._model_name = ""
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests, the prompt once.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that came from the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Completion tokens of ended requests.")
        self._ended = self._counter("request_success", "Ended requests by reason.", "finished_reason")
        self._http = Counter(
            PREFIX + "http_requests", "HTTP answers by route and status.", ("path", "status"), registry=self._registry
        )
        text = "Connections beyond the limit: told 503, closed, or answered about health only."
        self._connections = Counter(PREFIX + "connections_refused", text, registry=self._registry)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _LATENCY)
        self._gaps = _Gaps()
        self._registry.register(self._gaps)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to the first computed chunk.", _LATENCY)
        text = "First computed chunk to first token, or to the end of a scored prompt."
        self._prefill = self._histogram("request_prefill_time_seconds", text, _LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", "First token to end.", _LATENCY)
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_size = self._histogram("request_generation_tokens", "Completion tokens of a request.", _TOKENS)
        self._classes = ClassMetrics(self._registry, PREFIX, _LATENCY)
        self._registry.register(_EngineCollector(lambda: self._source))

    def serve(self, model_name: str, stats: Callable[[], Stats | None]) -> None:
        """Name the model and where its engine's Stats come from."""
        self._model_name = model_name
        self._gaps.model_name = model_name
        self._source = _Source(model_name, stats)
        for counter in (self._prompt_tokens, self._cached_tokens, self._generation_tokens):
            counter.labels(model_name)
        for reason in REASONS:
            self._ended.labels(model_name, reason)

    def rest(self) -> None:
        """No engine serves: what was counted stays, and none is kept for its Stats."""
        self._source = _Source(self._model_name, lambda: None)

    def first_token(self, seconds: float) -> None:
        """The first token of a request came."""
        self._first_token.labels(self._model_name).observe(seconds)

    def token_gap(self, seconds: float, num_tokens: int) -> None:
        """Further tokens of a choice came; each counts with its share of the time."""
        self._gaps.observe(seconds, num_tokens)

    def finished(self, summary: RequestSummary) -> None:
        """A request ended."""
        name = self._model_name
        self._ended.labels(name, summary.reason).inc()
        self._prompt_tokens.labels(name).inc(summary.prompt_tokens)
        self._cached_tokens.labels(name).inc(summary.cached_tokens)
        self._generation_tokens.labels(name).inc(summary.completion_tokens)
        self._prompt_size.labels(name).observe(summary.prompt_tokens)
        self._answer_size.labels(name).observe(summary.completion_tokens)
        self._whole.labels(name).observe(summary.seconds)
        if summary.queue is not None and summary.prefill is not None:
            self._queue.labels(name).observe(summary.queue)
            self._prefill.labels(name).observe(summary.prefill)
        if summary.first_token is not None:
            self._decode.labels(name).observe(max(0.0, summary.seconds - summary.first_token))
        self._classes.finished(name, summary)

    def refused(self, service_class: str) -> None:
        """A request of a class found no place."""
        self._classes.refused(self._model_name, service_class)

    def connection_refused(self) -> None:
        """There was no room for a connection."""
        self._connections.inc()

    def answered(self, path: str, status: int) -> None:
        """An HTTP answer went out."""
        self._http.labels(path, str(status)).inc()

    def render(self) -> bytes:
        """The exposition in Prometheus' text format."""
        families = [_without_created(family) for family in self._registry.collect()]
        if self._repeat:
            families += [_renamed(f, "vllm:") for f in families if f.name.removeprefix(PREFIX) in CORE]
        return generate_latest(_Families(families))

    def _counter(self, stem: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + stem, text, ("model_name", *labels), registry=self._registry)

    def _histogram(self, stem: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + stem, text, ("model_name",), buckets=buckets, registry=self._registry)


class _Gaps(Collector):
    """The histogram of gaps between tokens, without a lock and a search for its labels: it is told of every token.

    Told and scraped on the event loop's thread. No series before a model is served.
    """

    def __init__(self) -> None:
        self.model_name: str | None = None
        self._counts = [0] * (len(_GAP) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` tokens share a time."""
        self._counts[bisect_left(_GAP, seconds / num_tokens)] += num_tokens
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        """Buckets up to each bound, as Prometheus counts them."""
        name, text = PREFIX + "inter_token_latency_seconds", "Time between tokens of a choice."
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        if self.model_name is not None:
            bounds = map(floatToGoString, (*_GAP, math.inf))
            family.add_metric((self.model_name,), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class _EngineCollector(Collector):
    """The engine's Stats as metrics, read when scraped."""

    def __init__(self, source: Callable[[], _Source | None]) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """Nothing to check at registration: the names are fixed below."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Metrics of the latest Stats; none before the engine has sent some."""
        source = self._source()
        stats = None if source is None else source.stats()
        if source is None or stats is None:
            return
        gauges = (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Used share of the KV cache, 1 is full.", stats.kv_usage),
        )
        for stem, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + stem, text, labels=("model_name",))
            gauge.add_metric((source.model_name,), value)
            yield gauge
        counters = (
            ("num_preemptions", "Sequences put back to the queue for lack of cache.", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("engine_steps", "Steps of the engine.", stats.steps),
        )
        for stem, text, count in counters:
            counter = CounterMetricFamily(PREFIX + stem, text, labels=("model_name",))
            counter.add_metric((source.model_name,), count)
            yield counter
        stages = CounterMetricFamily(PREFIX + "stage_seconds", "Seconds per stage.", labels=("model_name", "stage"))
        for stage, seconds in stats.stage_seconds.items():
            stages.add_metric((source.model_name, stage), seconds)
        yield stages
        yield from class_families(PREFIX, source.model_name, stats)
        yield from rank_families(PREFIX, source.model_name, stats)


class _Families(Collector):
    """Metric families that were collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The families."""
        return iter(self._families)


def _without_created(family: Metric) -> Metric:
    """Drop the `_created` time stamps: one useless series for each real one."""
    copy = Metric(family.name, family.documentation, family.type, family.unit)
    copy.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return copy


def _renamed(family: Metric, prefix: str) -> Metric:
    copy = Metric(prefix + family.name.removeprefix(PREFIX), family.documentation, family.type, family.unit)
    copy.samples = [s._replace(name=prefix + s.name.removeprefix(PREFIX)) for s in family.samples]
    return copy


class CountAnswers:
    """ASGI layer that counts answers. `label` says what a path is counted as, which keeps the labels bounded."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, label: Callable[[str], str]) -> None:
        self._app = app
        self._metrics = metrics
        self._label = label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = self._label(scope["path"])

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, counted)
