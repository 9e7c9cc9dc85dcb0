"""StageTimer: where a step's time goes, by laps. No context managers, so it may be lapped between generator yields.

`lap("attention")` charges the time since the previous lap to that stage. Cost: one clock read and one add. Not a trace
(no events are kept) and not a metric by itself (the engine publishes the totals).
"""

from __future__ import annotations

from time import perf_counter_ns

STAGES = ("attention", "router", "dispatch", "experts", "combine", "head", "sample", "other")


class StageTimer:
    """Accumulated nanoseconds per stage. One per rank; not thread-safe."""

    __slots__ = ("_last", "totals_ns")

    def __init__(self) -> None:
        self.totals_ns: dict[str, int] = dict.fromkeys(STAGES, 0)
        self._last = perf_counter_ns()

    def start(self) -> None:
        """Begin a lap without charging the time before it to any stage."""
        self._last = perf_counter_ns()

    def lap(self, stage: str) -> None:
        """Charge the time since the last lap (or start) to `stage`."""
        now = perf_counter_ns()
        self.totals_ns[stage] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Totals so far, in seconds."""
        return {stage: total / 1e9 for stage, total in self.totals_ns.items()}
