"""Traces: what is written, and how much communication counts as hidden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.observe.stages import StageTimer
from coterie.observe.trace import Span, Trace, chrome_events, coverage, write_chrome


def span(track: str, begin: int, end: int, stage: str = "experts") -> Span:
    return Span(track, stage, 3, 0, begin, end)  # type: ignore[arg-type]


def test_hidden_share_counts_each_moment_once_and_waiting_never() -> None:
    spans = [
        span("comm", 0, 100),
        span("comm", 50, 120),  # two exchanges in flight at once
        span("compute", 10, 40),
        span("compute", 90, 200),
        span("compute", 40, 90, "wait"),
    ]
    result = coverage(spans)
    assert (result.comm_ns, result.compute_ns, result.both_ns) == (120, 140, 60)
    assert result.hidden == pytest.approx(0.5)
    assert coverage([span("compute", 0, 5)]).hidden == 1.0
    assert coverage([span("comm", 0, 5), span("compute", 5, 9)]).hidden == 0.0


_intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(_intervals, _intervals)
def test_coverage_equals_counting_moments(comm: list[tuple[int, int]], compute: list[tuple[int, int]]) -> None:
    spans = [span("comm", b, b + n) for b, n in comm] + [span("compute", b, b + n) for b, n in compute]
    moments = [{t for b, n in part for t in range(b, b + n)} for part in (comm, compute)]
    assert coverage(spans) == (len(moments[0]), len(moments[1]), len(moments[0] & moments[1]))


def test_a_timer_with_a_trace_keeps_laps_and_exchanges(tmp_path: Path) -> None:
    trace = Trace(rank=2, capacity=3)
    timer = StageTimer(trace)
    timer.lap("attention", 0)
    timer.lap("router", 0)
    timer.micro_batch = 1
    timer.exchanged("dispatch", 5, 1_000, 3_500)
    timer.lap("wait", 5)
    spans = trace.spans()
    assert [s.name for s in spans] == ["A L0 router", "B L5 dispatch", "B L5 wait"], "the oldest made room"
    assert spans[0].end_ns == spans[2].begin_ns, "laps follow each other; an exchange runs beside them"
    assert timer.totals_ns["dispatch"] == 0
    path = tmp_path / "trace.json"
    write_chrome(path, [*chrome_events(2, spans), *chrome_events(0, [])])
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {2: "rank 2", 0: "rank 0"}
    (exchange,) = [event for event in events if event["name"] == "B L5 dispatch"]
    assert exchange == {
        "ph": "X", "name": "B L5 dispatch", "cat": "dispatch", "pid": 2, "tid": 1, "ts": 1.0, "dur": 2.5,
    }  # fmt: skip


def test_without_a_trace_nothing_is_kept() -> None:
    timer = StageTimer()
    timer.lap("experts", 1)
    timer.exchanged("dispatch", 1, 0, 5)
    assert timer.trace is None and timer.totals_ns["experts"] > 0
