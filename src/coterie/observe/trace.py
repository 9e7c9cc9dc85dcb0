"""Trace: when each stage and each exchange of a rank began and ended, as Chrome trace events.

Spans lie on two tracks of a rank: "compute" (laps of the StageTimer) and "comm" (exchanges, from posting to
completion). Open the file in Perfetto or chrome://tracing. `coverage` says how much of the communication was hidden.
Not a profile of kernels, and nothing is written while it runs: the newest `capacity` spans stay in memory.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Track = Literal["compute", "comm"]
TRACKS: tuple[Track, ...] = ("compute", "comm")
WAITING = "wait"
"""The lap in which a rank does nothing but wait for an exchange; no compute."""


class Span(NamedTuple):
    """One stage or exchange: nanoseconds of the monotonic clock; `layer` -1 where it belongs to none."""

    track: Track
    stage: str
    layer: int
    micro_batch: int
    begin_ns: int
    end_ns: int

    @property
    def name(self) -> str:
        """As people read it: "A L3 dispatch"."""
        place = "" if self.layer < 0 else f"L{self.layer} "
        return f"{chr(ord('A') + self.micro_batch)} {place}{self.stage}"


class Trace:
    """The newest spans of one rank. Not thread-safe: one rank is one thread."""

    __slots__ = ("_spans", "rank")

    def __init__(self, rank: int = 0, capacity: int = 200_000) -> None:
        self.rank = rank
        self._spans: deque[Span] = deque(maxlen=capacity)

    def add(self, span: Span) -> None:
        """Keep a span; the oldest makes room."""
        self._spans.append(span)

    def spans(self) -> list[Span]:
        """What is kept, oldest first."""
        return list(self._spans)

    def clear(self) -> None:
        """Forget everything."""
        self._spans.clear()


def chrome_events(rank: int, spans: Iterable[Span]) -> list[dict[str, object]]:
    """Spans as complete events ("ph": "X", microseconds), one process a rank, one thread a track."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": track}}
            for tid, track in enumerate(TRACKS)
        ),
    ]
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.stage,
                "pid": rank,
                "tid": TRACKS.index(span.track),
                "ts": span.begin_ns / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
            }
        )
    return events


def write_chrome(path: Path, events: Sequence[dict[str, object]]) -> None:
    """Write events, of one rank or of several on one clock, as one file."""
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


class Coverage(NamedTuple):
    """Nanoseconds in which a rank communicated, computed, and did both."""

    comm_ns: int
    compute_ns: int
    both_ns: int

    @property
    def hidden(self) -> float:
        """Share of the communication that ran under compute; 1 if there was none."""
        return self.both_ns / self.comm_ns if self.comm_ns else 1.0


def coverage(spans: Iterable[Span]) -> Coverage:
    """How one rank's compute covers its communication. Waiting is no compute, and overlapping exchanges count once."""
    comm: list[tuple[int, int]] = []
    compute: list[tuple[int, int]] = []
    for span in spans:
        if span.track == "comm":
            comm.append((span.begin_ns, span.end_ns))
        elif span.stage != WAITING:
            compute.append((span.begin_ns, span.end_ns))
    comm, compute = _union(comm), _union(compute)
    return Coverage(_length(comm), _length(compute), _length(_intersect(comm, compute)))


def _union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint intervals in order that cover the same points."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _intersect(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where two lists of disjoint ordered intervals meet."""
    both: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            both.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def _length(intervals: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in intervals)
