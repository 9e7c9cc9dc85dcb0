"""QueueDoor: whether one more request may wait, and if not, when to come back. No requests, no clock of its own.

Each class may have so many sequences here. The lowest of several classes is also refused when its first token could not
come before its deadline; the others wait. A refusal is an appointment: the next one refused is told a later time, so
that those who obey find room one after the other. Estimates are of measured rates (prompt tokens per second, seconds
that a sequence runs) and of the share that a class has while others are busy.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from coterie.engine.classes import ClassTable
from coterie.engine.errors import EngineBusy

MAX_APPOINTMENTS = 10_000
"""Appointments that are remembered; more refusals than that share their times."""
LONGEST_WAIT = 3600.0
"""Seconds; nobody is told to come back later than that."""
MARGIN = 1.1
"""Longer than computed: rates vary, and who comes too early is refused again."""


class Appointment(NamedTuple):
    """What a refused request will ask for when it comes back at `due` (seconds)."""

    due: float
    sequences: int
    tokens: int


@dataclass(slots=True)
class Backlog:
    """One class: sequences without an end, prompt tokens of requests without a first token, who was told to return."""

    sequences: int = 0
    tokens: int = 0
    appointments: deque[Appointment] = field(default_factory=lambda: deque(maxlen=MAX_APPOINTMENTS))

    def promised(self, now: float) -> tuple[int, int]:
        """(sequences, tokens) of those who are still to come; whose time is up is forgotten."""
        while self.appointments and self.appointments[0].due <= now:
            self.appointments.popleft()
        return sum(a.sequences for a in self.appointments), sum(a.tokens for a in self.appointments)


class QueueDoor:
    """One engine's. `places`: sequences of each class that may be here. `max_running`: those computed together.

    prefill_rate and step_seconds are the engine's (Stats), 0 while unknown; `run_seconds` is how long a sequence runs.
    """

    def __init__(self, table: ClassTable, places: tuple[int, ...], max_running: int) -> None:
        self.table, self.places = table, places
        self.backlogs = [Backlog() for _ in table.names]
        self.prefill_rate = self.step_seconds = 0.0
        self.run_seconds = 1.0
        self._max_running = max_running

    def check(self, rank: int, sequences: int, tokens: int, now: float) -> None:
        """Raise EngineBusy if a request of so many sequences and prompt tokens may not wait at `now` (seconds)."""
        backlog, places = self.backlogs[rank], self.places[rank]
        if backlog.sequences + sequences > places:
            coming, _ = backlog.promised(now)
            over = backlog.sequences + coming + sequences - places
            wait = over * self.run_seconds / (self._max_running * self._share(rank))
            raise self._refusal(
                Appointment(now + wait, sequences, tokens),
                rank,
                f"the queue is full: {backlog.sequences} sequences wait or run{self._of(rank)}, {places} may, "
                f"and this request asks for {sequences}; try again later or raise max_queued_requests",
                now,
            )
        slo = self.table.slo_seconds[rank]
        first = self._first_token(rank, sequences, tokens)
        if rank < len(self.table) - 1 or first <= slo:
            return
        coming, coming_tokens = backlog.promised(now)
        wait = self._first_token(rank, sequences + coming, tokens + coming_tokens) - slo
        raise self._refusal(
            Appointment(now + wait, sequences, tokens),
            rank,
            f"the first token would come in about {first:.0f} s, the deadline of class {self.table.names[rank]} is "
            f"{slo:g} s; try again later",
            now,
        )

    def _refusal(self, wanted: Appointment, rank: int, message: str, now: float) -> EngineBusy:
        wait = float(min(LONGEST_WAIT, max(1, math.ceil(MARGIN * (wanted.due - now)))))
        self.backlogs[rank].appointments.append(wanted._replace(due=now + wait))
        return EngineBusy(message, retry_after=wait)

    def _first_token(self, rank: int, sequences: int, tokens: int) -> float:
        """Seconds to the first token of a new request that brings so many sequences and tokens; 0 if not known yet.

        Whatever is as high or higher goes first, at the full rate; a class's own goes at its share of the rate while
        others are busy; and it must find a row.
        """
        if not self.prefill_rate:
            return 0.0
        at_or_above = self.backlogs[: rank + 1]
        share = self._share(rank)
        everything = (sum(backlog.tokens for backlog in at_or_above) + tokens) / self.prefill_rate
        own = (self.backlogs[rank].tokens + tokens) / (self.prefill_rate * share)
        over = max(0, sum(backlog.sequences for backlog in at_or_above) + sequences - self._max_running)
        row = over * self.run_seconds / self._max_running
        return max(everything, own, row) + self.step_seconds

    def _share(self, rank: int) -> float:
        """A class's share among those that have work."""
        busy = [other for other, backlog in enumerate(self.backlogs) if backlog.sequences or other == rank]
        return self.table.weights[rank] / sum(self.table.weights[other] for other in busy)

    def _of(self, rank: int) -> str:
        return f" of class {self.table.names[rank]}" if len(self.table) > 1 else ""
