"""Fleet: several ranks as one engine for the front end. It hands out requests, forms generations, survives lost ranks.

One thread owns all of it and takes events in order: messages of the front end, news of the ranks, ends of processes,
the clock. A rank is lost when its process ends, its beats stay away or they say that it stands still (`fleet_place`);
then it is killed for certain, the others form the next generation with its experts taken over, its sequences go on
elsewhere, and a new process is started that joins when it is loaded. What is in flight and has no rank again within
`PATIENCE` ends with an error. Not here: how a process is started (`launch`), which sequence goes where (`fleet_book`),
which expert (`fleet_table`).
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal

from coterie.engine.fleet_book import Book, OpenSequence
from coterie.engine.fleet_place import MOST_MISSES, Place
from coterie.engine.fleet_stats import Totals
from coterie.engine.fleet_table import ExpertTable
from coterie.engine.messages import (
    Abort,
    Add,
    Beat,
    Drain,
    Fault,
    GroupStats,
    Leave,
    Moved,
    Output,
    Regroup,
    Regrouped,
    Stats,
    ToEngine,
    ToRank,
    Wake,
)
from coterie.engine.process import Child, StartedProcess
from coterie.engine.rank import BEAT_SECONDS
from coterie.engine.worker import Closed, Deliver, EngineLink
from coterie.spec.errors import CoterieError
from coterie.spec.repair import Table

PATIENCE = 2.0
"""Seconds after a fault is known in which a sequence in flight must have a rank again."""
QUIET_SECONDS = 0.2
"""After a rank has fallen out of its generation: time for the end of a process to be seen, which is the usual cause."""
MOST_RESTARTS = 3
"""Of one rank, until it has served for `CALM_SECONDS`, or has been left alone for so long."""
CALM_SECONDS = 300.0
MOST_REFORMS = 8
"""Generations without any news of a sequence between them; more are a mistake that repeats itself."""
_log = logging.getLogger(__name__)

Restart = Callable[[int], StartedProcess]
"""Starts a rank's process again and waits until it is loaded. Raises CoterieError."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """`slots`: the initial table of experts. `restart` None: lost ranks stay lost. `tensor`: so many consecutive ranks
    share requests; the first has them, and they are lost together. `stall_seconds`: how long a rank's work may stand
    still."""

    slots: Table
    num_experts: int
    page_size: int
    token_budget: int
    restart: Restart | None = None
    tensor: int = 1
    stall_seconds: float = 30.0


class Fleet:
    """Make it with started processes, `start` it, and give the front end its `link`."""

    def __init__(self, plan: FleetPlan, places: list[Place], deliver: Deliver, closed: Closed) -> None:
        self._plan, self._places, self._deliver, self._closed = plan, places, deliver, closed
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._book = Book(plan.page_size, plan.token_budget)
        self._table, self._totals = ExpertTable(plan.slots, len(places), plan.num_experts), Totals()
        self._group = GroupStats()
        self._wake = 0
        self._draining = self._over = False
        self._unavailable: str | None = "the ranks have not met yet"
        self._cause = ""
        self._fault_at: float | None = None
        self._reform_at: float | None = None
        self._reforms = 0
        self._next_tick = time.monotonic() + BEAT_SECONDS
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coterie-fleet", daemon=True)

    def start(self) -> None:
        """Listen to the ranks and let them meet; returns when they serve. Raises CoterieError if they do not."""
        for place in self._places:
            self._listen(place)
        self._events.put(lambda: self._form("start"))
        self._thread.start()
        self._serving.wait()
        if self._over:
            raise CoterieError(f"the ranks could not form a group: {self._unavailable}")

    @property
    def link(self) -> EngineLink:
        """The front end's way here."""
        return EngineLink(self._send, self._thread.join, self._kill, lambda: self._unavailable)

    def _send(self, message: ToEngine) -> None:
        self._events.put(lambda: self._take(message))

    def _kill(self) -> None:
        self._events.put(lambda: self._die("the engine was killed"))

    # The thread

    def _run(self) -> None:
        try:
            while not self._over:
                due = self._next_tick if self._reform_at is None else min(self._next_tick, self._reform_at)
                try:
                    self._events.get(timeout=max(0.0, due - time.monotonic()))()
                except Empty:
                    self._tick(time.monotonic())
        except Exception as error:
            _log.exception("the front end's part of several ranks failed")
            self._die(f"{type(error).__name__}: {error}")

    def _listen(self, place: Place) -> None:
        """Read a process's messages on a thread of their own, for as long as it lives."""
        process, life = place.process, place.life
        assert process is not None
        process.wire.limit_sending(MOST_MISSES * BEAT_SECONDS)

        def body() -> None:
            for message in process.wire.receive():
                self._events.put(lambda message=message: self._hear(place, life, message))  # type: ignore[misc]
            code = process.child.wait()
            self._events.put(lambda: self._ended(place, life, code))

        threading.Thread(target=body, name=f"coterie-rank-{place.number}", daemon=True).start()

    def _tick(self, now: float) -> None:
        if self._reform_at is not None and now >= self._reform_at:
            self._reform_at = None
            self._form("fault")
        if now < self._next_tick:
            return
        late = now - self._next_tick > BEAT_SECONDS  # then this machine stalls, and the ranks with it
        self._next_tick = now + BEAT_SECONDS
        for place in self._places:
            fault = place.fault(now, self._plan.stall_seconds)
            if place.state in ("ready", "member") and fault is not None and not late:
                self._lose(place, *fault)
            elif place.state == "member" and place.has_joined and now - place.joined > CALM_SECONDS:
                place.restarts = 0
        if self._fault_at is not None and now - self._fault_at > PATIENCE:
            self._give_up(list(self._book.open.values()))

    # From the front end

    def _take(self, message: ToEngine) -> None:
        match message:
            case Add():
                sequence = self._book.enter(message)
                if self._unavailable is None:
                    self._assign(sequence)
                elif self._fault_at is None:
                    self._fault_at = time.monotonic()
            case Abort():
                self._abort(message)
            case Drain():
                self._draining = True
                for place in self._places:
                    if place.state != "member":
                        self._end(place)
                self._to_members(message)
                self._wake_all()
                if not self._members:
                    self._die(None)

    def _assign(self, sequence: OpenSequence) -> None:
        rank = self._book.choose(sequence, [place.number for place in self._members if self._schedules(place)])
        self._tell(self._places[rank], sequence.resumed())
        self._wake_all()

    def _abort(self, message: Abort) -> None:
        sequence = self._book.open.get(message.request_id)
        if sequence is None:
            return
        if sequence.rank is not None:
            self._tell(self._places[sequence.rank], message)
        else:
            self._news(Output(message.request_id, [], finish_reason="abort"))

    # From the ranks

    def _hear(self, place: Place, life: int, message: Any) -> None:
        if life != place.life:
            return
        place.heard = time.monotonic()
        match message:
            case Output():
                self._reforms = 0
                self._news(message)
            case Stats():
                place.stats = message
                self._publish()
            case Regrouped(generation=generation) if generation == self._group.generation:
                place.join()
                if place is self._members[0]:
                    for line in message.choices:
                        _log.info("%s: %s (%s)", *line)
                self._count(experts_loaded=self._group.experts_loaded + message.experts_loaded)
                if all(member.has_joined for member in self._members):
                    self._serve()
            case Moved(generation=generation, layer=layer, slots=slots) if generation == self._group.generation:
                self._table.moved(place.number, layer, slots)
            case Fault(generation=generation) if generation == self._group.generation and place.state == "member":
                self._fell(place, message)
            case Beat():
                place.note(message)

    def _news(self, output: Output) -> None:
        if self._book.note(output):
            self._deliver([output])

    def _fell(self, place: Place, fault: Fault) -> None:
        """A rank is out of the present generation. If a process has ended, that is about to be seen."""
        place.fallen = True
        self._cause = self._cause or f"rank {place.number}: {fault.message}"
        self._suspend(self._cause)
        if self._reform_at is None:
            self._reform_at = time.monotonic() + QUIET_SECONDS

    def _ended(self, place: Place, life: int, code: int) -> None:
        if life != place.life or place.state in ("lost", "ended"):
            return
        if self._draining and (code == 0 or not self._book.open):
            place.state = "ended"
            if all(other.state != "member" for other in self._places):
                self._die(None)
            return
        how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit status {code}"
        self._lose(place, how if code else "its connection ended")

    # Generations

    def _mates(self, place: Place) -> list[Place]:
        """The ranks that share requests with one, itself among them."""
        first = place.number // self._plan.tensor * self._plan.tensor
        return self._places[first : first + self._plan.tensor]

    def _schedules(self, place: Place) -> bool:
        """Whether a rank has requests of its own."""
        return place.number % self._plan.tensor == 0

    @property
    def _members(self) -> list[Place]:
        return [place for place in self._places if place.state == "member"]

    def _form(self, why: Literal["start", "fault", "join"]) -> None:
        """Make the next generation of all loaded ranks (whole tensor-parallel groups), if they have slots enough."""
        loaded = [
            place for place in self._places if all(mate.state in ("ready", "member") for mate in self._mates(place))
        ]
        numbers = [place.number for place in loaded]
        self._reform_at = None
        self._reforms += why == "fault"
        if self._reforms > MOST_REFORMS:
            self._die(f"the ranks fail again and again: {self._cause}")
            return
        try:
            slots = self._table.form(numbers)
        except CoterieError as error:
            self._stall(loaded, str(error))
            return
        self._count(generation=self._group.generation + 1)
        nodes = [place.node for place in loaded]
        gently = why == "join" and self._unavailable is None
        for place in loaded:
            place.ask()
        message = Regroup(self._group.generation, numbers, nodes, slots, self._wake, gently)
        for place in loaded:
            self._tell(place, message)

    def _stall(self, loaded: list[Place], reason: str) -> None:
        """No generation can be formed until a rank comes back."""
        self._suspend(f"{self._cause}; {reason}" if self._cause else reason)
        _log.error("cannot serve: %s", reason)
        for place in loaded:
            if place.state == "member":
                place.state = "ready"
                self._tell(place, Leave(self._group.generation))
        if not any(place.state == "loading" for place in self._places):
            self._die(f"{self._unavailable}, and no rank comes back")

    def _serve(self) -> None:
        """All members are in the present generation."""
        now = time.monotonic()
        if self._fault_at is not None:
            self._count(recovery_seconds=now - self._fault_at)
        self._fault_at, self._unavailable, self._cause = None, None, ""
        self._count(living=len(self._members))
        _log.info("generation %d serves with %d ranks", self._group.generation, len(self._members))
        for sequence in self._book.waiting:
            self._assign(sequence)
        self._publish()
        self._serving.set()

    def _suspend(self, reason: str) -> None:
        self._unavailable = reason
        if self._fault_at is None:
            self._fault_at = time.monotonic()

    # Losses

    def _lose(self, place: Place, how: str, since: float | None = None) -> None:
        """A rank is gone, or is made to be gone, and with it those that share its requests. `since`: a clock time."""
        silent = time.monotonic() - (place.heard if since is None else since)
        gone = [mate for mate in self._mates(place) if mate is place or mate.state in ("ready", "member")]
        was_member = any(mate.state == "member" for mate in gone)
        cause = f"rank {place.number} on node {place.node} was lost: {how}"
        _log.error("%s", cause)
        for mate in gone:
            self._end(mate)
            mate.state = "lost"
            self._totals.lose(mate.stats if self._schedules(mate) else None)
            mate.stats = None
            self._table.lose(mate.number)
        given_up, going_on = self._book.lose(self._mates(place)[0].number)
        if was_member:
            self._cause = cause
            self._suspend(cause)
            self._fault_at = time.monotonic()
            self._count(faults=self._group.faults + 1, detect_seconds=silent, living=len(self._members))
        self._count(retried=self._group.retried + len(going_on))
        self._fail(given_up, f"{cause}, the second rank that this request has lost")
        for mate in gone:
            self._restart(mate)
        if self._draining and not self._members:
            self._die(None if not self._book.open else cause)
        elif was_member or self._unavailable is not None:
            self._form("fault")

    def _restart(self, place: Place) -> None:
        """Start a lost rank again beside the others."""
        restart = self._plan.restart
        if restart is None or self._draining:
            return
        if place.restarts >= MOST_RESTARTS:
            told = "rank %d is not started again for %g s, as it was lost %d times"
            _log.error(told, place.number, CALM_SECONDS, place.restarts + 1)
            timer = threading.Timer(CALM_SECONDS, lambda: self._events.put(lambda: self._try_again(place)))
            timer.daemon = True
            timer.start()
            return
        place.restarts += 1
        place.state = "loading"

        def body() -> None:
            try:
                process = restart(place.number)
            except Exception as error:
                reason = str(error)
                self._events.put(lambda: self._not_back(place, reason))
            else:
                self._events.put(lambda: self._back(place, process))

        threading.Thread(target=body, name=f"coterie-restart-{place.number}", daemon=True).start()

    def _try_again(self, place: Place) -> None:
        """What ended it again and again, as a bad cable, may be mended."""
        place.restarts = 0
        if place.state == "lost":
            self._restart(place)

    def _back(self, place: Place, process: StartedProcess) -> None:
        place.revive(process)
        if self._over or self._draining:
            self._end(place)
            return
        _log.info("rank %d is back and joins", place.number)
        self._table.back(place.number)
        self._listen(place)
        if all(mate.state in ("ready", "member") for mate in self._mates(place)):
            self._form("join")

    def _not_back(self, place: Place, reason: str) -> None:
        _log.error("rank %d could not be started again: %s", place.number, reason)
        place.state = "lost"
        self._restart(place)
        if self._unavailable is not None and not self._members:
            self._form("join")

    def _give_up(self, sequences: list[OpenSequence]) -> None:
        """End what is in flight: too much time has passed since the fault."""
        for sequence in sequences:
            if sequence.rank is not None:
                self._tell(self._places[sequence.rank], Abort(sequence.add.request_id))
            self._book.open.pop(sequence.add.request_id, None)
        self._fail(sequences, f"{self._cause or self._unavailable}; the others could not go on in time")

    def _fail(self, sequences: list[OpenSequence], reason: str) -> None:
        if sequences:
            self._count(failed=self._group.failed + len(sequences))
        for sequence in sequences:
            name = sequence.add.request_id
            self._deliver([Output(name, [], finish_reason="error", error=reason, retry_after=PATIENCE)])

    # To the ranks

    def _tell(self, place: Place, message: ToRank) -> None:
        if place.process is not None and place.state in ("ready", "member"):
            try:
                place.process.wire.send(message)
            except BlockingIOError:
                life = place.life
                self._events.put(lambda: self._deaf(place, life))
            except OSError:
                _log.debug("rank %d is gone, which will be seen: not sent: %r", place.number, message)

    def _deaf(self, place: Place, life: int) -> None:
        """A rank has not read for so long that a message for it did not fit in the buffers between."""
        if life == place.life and place.state in ("ready", "member"):
            self._lose(place, "reads no messages")

    def _to_members(self, message: ToRank) -> None:
        for place in self._members:
            self._tell(place, message)

    def _wake_all(self) -> None:
        self._wake += 1
        self._to_members(Wake(self._wake))

    def _end(self, place: Place) -> None:
        """Kill a rank's process for certain."""
        if place.process is not None:
            place.life += 1
            place.process.child.kill()
            place.process.wire.close()
            place.process = None

    def _die(self, reason: str | None) -> None:
        """All ends."""
        self._over = True
        self._unavailable = reason or "the engine was shut down"
        for place in self._places:
            if place.process is not None:
                end = place.process.child
                self._end(place)
                _reap(end)
        self._serving.set()
        self._closed(reason)

    # Numbers

    def _count(self, **changes: Any) -> None:
        values = {name: getattr(self._group, name) for name in self._group.__struct_fields__} | changes
        self._group = GroupStats(**values)

    def _publish(self) -> None:
        living = [place.stats for place in self._places if place.stats is not None and self._schedules(place)]
        if living:
            self._count(ranks=tuple(place.rank_stats() for place in self._places))
            self._deliver([self._totals.of(living, self._group)])


def _reap(child: Child) -> None:
    try:
        child.wait(5.0)
    except subprocess.TimeoutExpired:
        _log.error("process %d does not end", child.pid)
