"""QueueDoor: whether one more request may wait, and if not, when to come back. No requests, no clock of its own.

Each class may have so many sequences here. The lowest of several classes is also refused when its first token could not
come before its deadline; the others wait. With nobody here a refusal would gain nothing. A refusal is an appointment:
the next one refused is told a later time, and when an appointment is due, whoever comes is let in more easily than
others, so that those who obey find room. Estimates are of measured rates (prompt tokens per second, row seconds per
token asked for) and of the share that a class has while others are busy.
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
MARGIN = 1.5
"""Told to wait so much longer than computed: rates vary, and who comes too early is refused again."""
LEAST_WAIT = 3.0
"""Seconds; nobody is told to come back sooner: what brought the refusal is hardly over by then."""
GRACE_SECONDS = 30.0
"""How long an appointment is kept once it is due."""
GRACE = 2.0
"""What an appointment is worth: the deadline is taken so much later."""
MORE_PLACES = 0.25
"""And the places are so many more."""


_ENDS = 12
"""Ends over which a rate is taken."""


class Needs(NamedTuple):
    """What a request brings: sequences, prompt tokens, tokens that it asks for in all."""

    sequences: int
    prompt: int
    asked: int


NOTHING = Needs(0, 0, 0)


class Appointment(NamedTuple):
    """A refused request that was told to return at `due` (seconds)."""

    due: float
    needs: Needs


@dataclass(slots=True)
class Backlog:
    """One class: sequences without an end and what they asked for, prompt tokens of requests without a first token.

    appointments: of those told to return later. `coming`: their needs in all. due: times of those who may come now.
    """

    sequences: int = 0
    prompt: int = 0
    asked: int = 0
    appointments: deque[Appointment] = field(default_factory=deque)
    coming: Needs = NOTHING
    due: deque[float] = field(default_factory=deque)

    def enter(self, needs: Needs) -> None:
        """A request was let in."""
        self.sequences += needs.sequences
        self.prompt += needs.prompt
        self.asked += needs.asked

    def promise(self, appointment: Appointment) -> None:
        """Remember who was told to return."""
        self.appointments.append(appointment)
        self._count(appointment.needs, 1)
        if len(self.appointments) > MAX_APPOINTMENTS:
            self._count(self.appointments.popleft().needs, -1)

    def turn(self, now: float) -> None:
        """Appointments fall due, and lapse."""
        while self.appointments and self.appointments[0].due <= now:
            appointment = self.appointments.popleft()
            self._count(appointment.needs, -1)
            self.due.append(appointment.due)
        while self.due and self.due[0] + GRACE_SECONDS < now:
            self.due.popleft()

    def call_in(self) -> None:
        """There is room: whoever was told to return may come now."""
        self.due.extend(appointment.due for appointment in self.appointments)
        self.appointments.clear()
        self.coming = NOTHING

    def _count(self, needs: Needs, sign: int) -> None:
        self.coming = Needs(*(old + sign * new for old, new in zip(self.coming, needs, strict=True)))


class QueueDoor:
    """One engine's. `places`: sequences of each class that may be here. `max_running`: those computed together.

    prefill_rate and step_seconds are the engine's (Stats), 0 while unknown.
    """

    def __init__(self, table: ClassTable, places: tuple[int, ...], max_running: int) -> None:
        self.table, self.places = table, places
        self.backlogs = [Backlog() for _ in table.names]
        self.prefill_rate = self.step_seconds = 0.0
        self._seconds_per_token = 0.05
        self._ends: deque[float] = deque(maxlen=_ENDS)
        self._max_running = max_running

    def note_run(self, seconds: float, asked: int, now: float) -> None:
        """A sequence ended at `now` that asked for so many tokens and had a row for so many seconds."""
        self._seconds_per_token += 0.1 * (seconds / max(1, asked) - self._seconds_per_token)
        self._ends.append(now)
        if sum(backlog.sequences for backlog in self.backlogs) < self._max_running:
            self._ends.clear()

    def check(self, rank: int, needs: Needs, now: float) -> None:
        """Raise EngineBusy if a request may not wait at `now` (seconds)."""
        backlog, table = self.backlogs[rank], self.table
        backlog.turn(now)
        places, slo = self.places[rank], table.slo_seconds[rank]
        idle = not any(each.sequences or each.prompt for each in self.backlogs)
        if idle:  # estimates were too careful, or those who were told to return do not
            backlog.call_in()
        if backlog.due:
            places, slo = places + int(MORE_PLACES * places), GRACE * slo
        if backlog.sequences + needs.sequences > places:
            over = backlog.sequences + backlog.coming.sequences + needs.sequences - places
            wait = over / (self._ends_per_second(rank, needs, now) * self._share(rank))
            message = (
                f"the queue is full: {backlog.sequences} sequences wait or run{self._of(rank)}, {self.places[rank]} "
                f"may, and this request asks for {needs.sequences}; try again later or raise max_queued_requests"
            )
            raise self._refusal(rank, needs, now, wait, message)
        first = self._first_token(rank, needs, now)
        if rank == len(table) - 1 and first > slo and not idle:
            together = Needs(*(a + b for a, b in zip(needs, backlog.coming, strict=True)))
            later = self._first_token(rank, together, now)
            message = (
                f"the first token would come in about {first:.0f} s, the deadline{self._of(rank)} is "
                f"{table.slo_seconds[rank]:g} s; try again later"
            )
            raise self._refusal(rank, needs, now, later - table.slo_seconds[rank], message)
        if backlog.due:
            backlog.due.popleft()

    def _refusal(self, rank: int, needs: Needs, now: float, wait: float, message: str) -> EngineBusy:
        told = float(min(LONGEST_WAIT, max(LEAST_WAIT, math.ceil(MARGIN * wait))))
        self.backlogs[rank].promise(Appointment(now + told, needs))
        return EngineBusy(message, retry_after=told)

    def _first_token(self, rank: int, needs: Needs, now: float) -> float:
        """Seconds to the first token of a new request; 0 if not known yet.

        Whatever is as high or higher goes first, at the full rate; a class's own goes at its share of the rate while
        others are busy; and it must find a row.
        """
        if not self.prefill_rate:
            return 0.0
        at_or_above = self.backlogs[: rank + 1]
        everything = (sum(backlog.prompt for backlog in at_or_above) + needs.prompt) / self.prefill_rate
        own = (self.backlogs[rank].prompt + needs.prompt) / (self.prefill_rate * self._share(rank))
        over = max(0, sum(backlog.sequences for backlog in at_or_above) + needs.sequences - self._max_running)
        row = over / self._ends_per_second(rank, needs, now)
        return max(everything, own, row) + self.step_seconds

    def _ends_per_second(self, rank: int, needs: Needs, now: float) -> float:
        """Sequences that end in a second with all rows taken: by what they asked for, or fewer if fewer did of late."""
        at_or_above = self.backlogs[: rank + 1]
        sequences = sum(backlog.sequences for backlog in at_or_above) + needs.sequences
        asked = sum(backlog.asked for backlog in at_or_above) + needs.asked
        rate = self._max_running * sequences / max(1e-6, self._seconds_per_token * max(1, asked))
        if len(self._ends) == _ENDS and now > self._ends[0]:
            rate = min(rate, _ENDS / (now - self._ends[0]))
        return rate

    def _share(self, rank: int) -> float:
        """A class's share among those that have work."""
        busy = [other for other, backlog in enumerate(self.backlogs) if backlog.sequences or other == rank]
        return self.table.weights[rank] / sum(self.table.weights[other] for other in busy)

    def _of(self, rank: int) -> str:
        return f" of class {self.table.names[rank]}" if len(self.table) > 1 else ""
