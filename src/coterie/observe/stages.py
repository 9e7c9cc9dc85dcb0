"""StageTimer: where a step's time goes, by laps. No context managers, so it may be lapped between generator yields.

`lap("attention")` charges the time since the previous lap to that stage. Cost: one clock read and one add. The engine
publishes the totals; with a `trace` each lap and each exchange is kept as a span as well.
"""

from __future__ import annotations

from time import monotonic_ns

from coterie.observe.trace import WAITING, Span, Trace

STAGES = ("attention", "router", "dispatch", "experts", "combine", "head", "sample", WAITING, "other")


class StageTimer:
    """Accumulated nanoseconds per stage. One per rank; not thread-safe. `micro_batch`: whose laps are being timed."""

    __slots__ = ("_last", "micro_batch", "totals_ns", "trace")

    def __init__(self, trace: Trace | None = None) -> None:
        self.totals_ns: dict[str, int] = dict.fromkeys(STAGES, 0)
        self.trace = trace
        self.micro_batch = 0
        self._last = monotonic_ns()

    def start(self) -> None:
        """Begin a lap without charging the time before it to any stage."""
        self._last = monotonic_ns()

    def enter(self, micro_batch: int) -> None:
        """Laps are of this micro-batch from now on."""
        self.micro_batch = micro_batch

    def lap(self, stage: str, layer: int = -1) -> None:
        """Charge the time since the last lap (or start) to `stage`."""
        now = monotonic_ns()
        self.totals_ns[stage] += now - self._last
        if self.trace is not None:
            self.trace.add(Span("compute", stage, layer, self.micro_batch, self._last, now))
        self._last = now

    def exchanged(self, stage: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """Note an exchange of `stage`, which ran beside the laps and is charged to none."""
        if self.trace is not None:
            self.trace.add(Span("comm", stage, layer, self.micro_batch, begin_ns, end_ns))

    def seconds(self) -> dict[str, float]:
        """Totals so far, in seconds."""
        return {stage: total / 1e9 for stage, total in self.totals_ns.items()}
