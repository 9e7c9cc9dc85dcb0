"""What a run was like for its users: percentiles, throughput, goodput, errors by kind. Keys are those of vLLM's report.

All of successful requests, unless a key says otherwise: ttft (sending to first news), tpot (time after the first token
over the tokens after it), itl (between pieces of news), e2el (sending to [DONE]). Milliseconds in keys that end in
`_ms`. Not here: tables (`cli.bench_serve`), the plot (`loadgen.plot`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.loadgen.client import Record
from coterie.loadgen.run import Load

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")
"""Metrics that a goodput may bound: those of which a request has one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which metrics get percentiles, which ones, and the bounds (ms) that a good request keeps."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goals: tuple[tuple[str, float], ...] = ()


def values_of(metric: str, records: Sequence[Record]) -> list[float]:
    """A metric's values in seconds; requests that have none are left out."""
    if metric == "itl":
        return [gap for record in records for gap in record.gaps]
    found = [value_of(metric, record) for record in records]
    return [value for value in found if value is not None]


def value_of(metric: str, record: Record) -> float | None:
    """A request's value of ttft, tpot or e2el in seconds."""
    if metric == "ttft":
        return record.ttft
    return record.tpot if metric == "tpot" else record.end - record.sent


def is_good(record: Record, goals: Sequence[tuple[str, float]]) -> bool:
    """Whether a request succeeded and kept every bound; a metric it does not have binds nothing."""
    if not record.ok:
        return False
    values = [(value_of(metric, record), bound) for metric, bound in goals]
    return all(value is None or 1e3 * value <= bound for value, bound in values)


def make_report(load: Load, wanted: Wanted) -> dict[str, Any]:
    """The result of a run, complete or not."""
    good = [record for record in load.records if record.ok]
    seconds = load.ended - load.started
    prompt, output = (sum(getattr(r, name) for r in good) for name in ("prompt_tokens", "output_tokens"))
    report: dict[str, Any] = {
        "duration": seconds,
        "num_prompts": load.total,
        "completed": len(good),
        "failed": sum(record.error is not None for record in load.records),
        "unfinished": sum(record.cancelled for record in load.records),
        "interrupted": load.interrupted,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "max_output_tokens_per_s": busiest_second(good, load),
        "max_concurrent_requests": peak_concurrency(load.records),
        "answers_without_usage": sum(not record.counted for record in good),
        "errors_by_kind": dict(Counter(record.error for record in load.records if record.error is not None)),
        "error_examples": {r.error: r.said for r in reversed(load.records) if r.error is not None},
        "max_send_delay_ms": 1e3 * max((record.sent - record.due for record in load.records), default=0.0),
    }
    if wanted.goals:
        kept = sum(is_good(record, wanted.goals) for record in good)
        report["goodput_goals_ms"] = dict(wanted.goals)
        report |= {"request_goodput": kept / seconds, "good_requests": kept}
    for metric in METRICS:
        if metric in wanted.metrics:
            report |= summary(metric, values_of(metric, good), wanted.percentiles)
    gaps = [(gap, record.index) for record in good for gap in record.gaps]
    worst = max(gaps, default=(0.0, None))
    return report | {"worst_gap_ms": 1e3 * worst[0], "worst_gap_request": worst[1]}


def summary(metric: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in ms; None where there are no values."""
    names = [f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms"]
    names += [f"p{percentile:g}_{metric}_ms" for percentile in percentiles]
    if not len(seconds):
        return dict.fromkeys(names)
    values = 1e3 * np.asarray(seconds)
    found = [values.mean(), np.median(values), values.std(), *np.percentile(values, list(percentiles))]
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def busiest_second(records: Sequence[Record], load: Load) -> float:
    """Most tokens that came within one second of the run; a request's tokens lie evenly over its pieces of news."""
    buckets = np.zeros(max(1, math.ceil(load.ended - load.started) + 1))
    for record in records:
        if record.news:
            places = (np.asarray(record.news) - load.started).astype(int).clip(0, len(buckets) - 1)
            np.add.at(buckets, places, record.output_tokens / len(record.news))
    return float(buckets.max())


def peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests in flight at once."""
    edges = sorted([(record.sent, 1) for record in records] + [(record.end, -1) for record in records])
    running = most = 0
    for _, step in edges:
        running += step
        most = max(most, running)
    return most


def details(load: Load) -> dict[str, Any]:
    """Every request, in the order of arrival: times in seconds from the start."""
    records = sorted(load.records, key=lambda record: record.index)
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.sent - load.started for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.gaps for record in records],
        "e2els": [record.end - record.sent for record in records],
        "finish_reasons": [record.finish_reason for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }
