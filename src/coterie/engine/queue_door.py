"""QueueDoor: whether one more request may wait, and if not, when to come back. No requests, no clock of its own.

Each class may have so many sequences here. The lowest of several classes is also refused when its first token could
not come before its deadline; the others wait. With nobody here a refusal would gain nothing. A refusal is an
appointment: the next one refused is told a later time, and who returns when it is due is let in more easily than
others, so that those who obey find room. Those who were told to return count for as many as of late did return.
Estimates are of measured rates: prompt tokens per second, how long sequences keep their rows (`engine/row_times.py`),
and the share that a class has while others are busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from coterie.engine.classes import ClassTable
from coterie.engine.errors import EngineBusy
from coterie.engine.messages import Stats
from coterie.engine.row_times import Present, Quotient, RowTimes, Run

MAX_APPOINTMENTS = 10_000
"""Appointments that are remembered; more refusals than that share their times."""
LONGEST_WAIT = 3600.0
"""Seconds; nobody is told to come back later than that."""
MARGIN = 1.5
"""Told to wait so much longer than computed: rates vary, and who comes too early is refused again."""
LEAST_WAIT = 3.0
"""Seconds; nobody is told to come back sooner: what brought the refusal is hardly over by then."""
GRACE_SECONDS = 10.0
"""How long an appointment is kept once it is due; then nobody came."""
GRACE = 2.0
"""What an appointment is worth: the deadline is taken so much later."""
MORE_PLACES = 0.25
"""And the places are so many more."""
_KEPT = 0.98
"""What an appointment's end leaves of the weight of those before it: about the last fifty count."""
_TRUST = 4.0
"""Appointments that were kept, as taken for granted before any were."""
_KEPT_PROMPTS = 0.95
"""Likewise a prompt's: about the last twenty."""
_MEMORY_IS_SHORT = 0.75
"""Part of the blocks in use above which it is they that keep others waiting."""
_SMOOTH = 0.1
"""Weight of the latest report in the number of rows that memory allows."""


class Needs(NamedTuple):
    """What a request brings: sequences, prompt tokens, tokens that it asks for in all. `mark`: the same when it comes
    again, and hardly ever that of another."""

    sequences: int
    prompt: int
    asked: int
    mark: int = 0

    def plus(self, other: Needs, part: float = 1.0) -> Needs:
        """This one, with `part` of another added."""
        sequences, prompt, asked = (a + round(part * b) for a, b in zip(self[:3], other[:3], strict=True))
        return Needs(sequences, prompt, asked, self.mark)


NOTHING = Needs(0, 0, 0)


@dataclass(slots=True, eq=False)
class Appointment:
    """A refused request that was told to return at `due` (seconds); is_open: it has not, and counts."""

    due: float
    needs: Needs
    is_open: bool = True


class Appointments:
    """Those of one class. `needs`: of the open ones in all."""

    def __init__(self) -> None:
        self.needs = NOTHING
        self._kept, self._lapsed = _TRUST, 0.0  # fading counts
        self._by_end: list[tuple[float, int, Appointment]] = []  # a heap
        self._by_mark: dict[int, dict[Appointment, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_end)

    @property
    def part(self) -> float:
        """Which part of those who were told to return does, going by the last ones."""
        return self._kept / (self._kept + self._lapsed)

    @property
    def expected(self) -> Needs:
        """What those who will return bring."""
        return NOTHING.plus(self.needs, self.part)

    def promise(self, due: float, needs: Needs) -> None:
        """Remember who was told to return."""
        appointment = Appointment(due, needs)
        self._count += 1
        heappush(self._by_end, (due + GRACE_SECONDS, self._count, appointment))
        self._by_mark.setdefault(needs.mark, {})[appointment] = None
        self.needs = self.needs.plus(needs)
        if len(self._by_end) > MAX_APPOINTMENTS:
            self._end(heappop(self._by_end)[2])

    def turn(self, now: float) -> None:
        """Forget those whose time is over."""
        while self._by_end and self._by_end[0][0] < now:
            if self._end(heappop(self._by_end)[2]):
                self._note(kept=False)

    def come(self, mark: int, now: float) -> bool:
        """Somebody comes: whether it was told to come by now. Who comes too early has its appointment no longer."""
        appointment = next(iter(self._by_mark.get(mark, ())), None)
        if appointment is None:
            return False
        if self._close(appointment):
            self._note(kept=True)
        self._drop(appointment)
        return appointment.due <= now

    def call_in(self) -> None:
        """There is room for all: they need not be waited for."""
        for _, _, appointment in self._by_end:
            self._close(appointment)

    def _close(self, appointment: Appointment) -> bool:
        """Count it no longer; whether it did."""
        was_open, appointment.is_open = appointment.is_open, False
        if was_open:
            self.needs = self.needs.plus(appointment.needs, -1.0)
        return was_open

    def _end(self, appointment: Appointment) -> bool:
        was_open = self._close(appointment)
        self._drop(appointment)
        return was_open

    def _drop(self, appointment: Appointment) -> None:
        same = self._by_mark.get(appointment.needs.mark, {})
        same.pop(appointment, None)
        if not same:
            self._by_mark.pop(appointment.needs.mark, None)

    def _note(self, *, kept: bool) -> None:
        self._kept, self._lapsed = _KEPT * self._kept + kept, _KEPT * self._lapsed + (not kept)


@dataclass(slots=True)
class Backlog:
    """One class: its sequences without a first token, in order of arrival, and with one; prompt tokens that wait."""

    waiting: dict[Run, None] = field(default_factory=dict)
    runs: dict[Run, None] = field(default_factory=dict)
    prompt: int = 0
    appointments: Appointments = field(default_factory=Appointments)

    @property
    def sequences(self) -> int:
        """How many are here."""
        return len(self.waiting) + len(self.runs)


class QueueDoor:
    """One engine's. `places`: sequences of each class that may be here. `max_running`: those computed together.

    prefill_rate: the engine's, 0 while unknown. Told of each request: `enter`, then `opened` and for each sequence
    `begin` and `end`.
    """

    def __init__(self, table: ClassTable, places: tuple[int, ...], max_running: int) -> None:
        self.table, self.places = table, places
        self.backlogs = [Backlog() for _ in table.names]
        self.row_times = RowTimes(max_running)
        self.prefill_rate = 0.0
        self._fresh = Quotient(_KEPT_PROMPTS)  # part of prompts that is computed: the rest is in the prefix cache
        self._max_running = max_running

    # What happens

    def note_stats(self, stats: Stats) -> None:
        """Take the engine's measured rates, and how many rows its memory allows."""
        self.prefill_rate, self.row_times.step_seconds = stats.prefill_rate, stats.step_seconds
        is_short = stats.num_waiting and stats.kv_usage > _MEMORY_IS_SHORT
        rows = min(stats.num_running, self._max_running) if is_short else self._max_running
        self.row_times.rows += _SMOOTH * (rows - self.row_times.rows)

    def enter(self, rank: int, needs: Needs) -> list[Run]:
        """A request was let in: its sequences."""
        backlog = self.backlogs[rank]
        asked = needs.asked // max(1, needs.sequences)
        made = [Run(0 if index else needs.prompt, asked) for index in range(needs.sequences)]
        backlog.waiting.update(dict.fromkeys(made))
        backlog.prompt += needs.prompt
        return made

    def opened(self, rank: int, prompt: int, cached: int = 0, seconds: float | None = None) -> None:
        """A request's prompt waits no longer: it was computed within so many seconds, if it was."""
        self.backlogs[rank].prompt -= prompt
        if seconds is not None:
            self.row_times.note_prompt(seconds, prompt)
            self._fresh.add(prompt - cached, prompt)

    def begin(self, rank: int, run: Run, now: float) -> None:
        """A sequence has its first token; the caller counts its tokens."""
        run.since = now
        backlog = self.backlogs[rank]
        del backlog.waiting[run]
        backlog.runs[run] = None

    def end(self, rank: int, run: Run, now: float, *, by_itself: bool) -> None:
        """A sequence ended, by itself or for another reason."""
        backlog = self.backlogs[rank]
        if run in backlog.waiting:
            del backlog.waiting[run]
            return
        del backlog.runs[run]
        self.row_times.note_end(run, now, by_itself=by_itself)

    # Who may come in

    def check(self, rank: int, needs: Needs, now: float) -> None:
        """Raise EngineBusy if a request may not wait at `now` (seconds)."""
        backlog, table = self.backlogs[rank], self.table
        appointments = backlog.appointments
        appointments.turn(now)
        places, slo = self.places[rank], table.slo_seconds[rank]
        if appointments.come(needs.mark, now):
            places, slo = places + int(MORE_PLACES * places), GRACE * slo
        idle = not any(each.sequences or each.prompt for each in self.backlogs)
        if idle:  # estimates were too careful, or those who were told to return do not
            appointments.call_in()
        if backlog.sequences + needs.sequences > places:
            wait = self._room(rank, needs.plus(appointments.expected), now)
            message = (
                f"the queue is full: {backlog.sequences} sequences wait or run{self._of(rank)}, {self.places[rank]} "
                f"may, and this request asks for {needs.sequences}; try again later or raise max_queued_requests"
            )
            raise self._refusal(rank, needs, now, wait, message)
        if rank == len(table) - 1 and not idle and (first := self._first_token(rank, needs, now)) > slo:
            later = self._first_token(rank, needs.plus(appointments.expected), now)
            message = (
                f"the first token would come in about {first:.0f} s, the deadline{self._of(rank)} is "
                f"{table.slo_seconds[rank]:g} s; try again later"
            )
            raise self._refusal(rank, needs, now, later - table.slo_seconds[rank], message)

    def _refusal(self, rank: int, needs: Needs, now: float, wait: float, message: str) -> EngineBusy:
        told = float(min(LONGEST_WAIT, max(LEAST_WAIT, math.ceil(MARGIN * wait))))
        self.backlogs[rank].appointments.promise(now + told, needs)
        return EngineBusy(message, retry_after=told)

    def _room(self, rank: int, needs: Needs, now: float) -> float:
        """Seconds until a full class has places for `needs` more: its own must end."""
        backlog, share = self.backlogs[rank], self._share(rank)
        ends = backlog.sequences + needs.sequences - self.places[rank]
        here = Present(backlog.runs, backlog.waiting, share, self._prefill_seconds(1.0) / share)
        return self.row_times.until(ends, here, now)

    def _first_token(self, rank: int, needs: Needs, now: float) -> float:
        """Seconds to the first token of a new request; 0 if not known yet.

        Whatever is as high or higher goes first, at the full rate; a class's own goes at its share of the rate while
        others are busy; and it must find a row.
        """
        if not self.prefill_rate:
            return 0.0
        at_or_above = self.backlogs[: rank + 1]
        everything = self._prefill_seconds(sum(backlog.prompt for backlog in at_or_above) + needs.prompt)
        own = self._prefill_seconds(self.backlogs[rank].prompt + needs.prompt) / self._share(rank)
        over = sum(backlog.sequences for backlog in at_or_above) + needs.sequences - self._max_running
        row = 0.0
        if over > 0:
            runs = [run for backlog in at_or_above for run in backlog.runs]
            waiting = [run for backlog in at_or_above for run in backlog.waiting]
            row = self.row_times.until(over, Present(runs, waiting, 1.0, self._prefill_seconds(1.0)), now)
        return max(everything, own, row) + self.row_times.step_seconds

    def _prefill_seconds(self, tokens: float) -> float:
        """How long prompts of so many tokens take; 0 if not known yet."""
        return self._fresh.value(1.0) * tokens / self.prefill_rate if self.prefill_rate else 0.0

    def _share(self, rank: int) -> float:
        """A class's share among those that have work."""
        busy = [other for other, backlog in enumerate(self.backlogs) if backlog.sequences or other == rank]
        return self.table.weights[rank] / sum(self.table.weights[other] for other in busy)

    def _of(self, rank: int) -> str:
        return f" of class {self.table.names[rank]}" if len(self.table) > 1 else ""
