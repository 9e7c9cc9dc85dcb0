"""The door of the queue: places of each class, refusals for a deadline, and appointments that hold when obeyed."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

import pytest
from scheduling import MockEngine

from coterie.engine.classes import CLASS_NAMES, ONE_CLASS, ClassTable
from coterie.engine.config import ServiceConfig
from coterie.engine.errors import EngineBusy
from coterie.engine.pace import Pace
from coterie.engine.queue_door import GRACE, GRACE_SECONDS, LONGEST_WAIT, MAX_APPOINTMENTS, Needs, QueueDoor
from coterie.engine.request import Request, Schedule
from coterie.engine.scheduler import SchedulerLimits

GOLD, SILVER, BRONZE = range(3)
TABLE = ClassTable.of(ServiceConfig(enabled=True, slo_seconds=(1.0, 5.0, 10.0)))


def door(places: int = 100, max_running: int = 8, table: ClassTable = TABLE) -> QueueDoor:
    made = QueueDoor(table, (places,) * len(table), max_running)
    made.prefill_rate, made.step_seconds = 100.0, 0.5
    for _ in range(200):
        made.note_run(2.0, 10, 0.0)
    return made


def test_before_anything_was_measured_only_places_count() -> None:
    fresh = QueueDoor(TABLE, (3, 3, 3), 1)
    fresh.check(BRONZE, Needs(3, 10**6, 10), 0.0)
    with pytest.raises(EngineBusy, match="of class bronze, 3 may"):
        fresh.check(BRONZE, Needs(4, 1, 10), 0.0)


def test_the_lowest_class_is_refused_when_its_deadline_cannot_be_met_and_the_others_wait() -> None:
    made = door()
    made.backlogs[SILVER].enter(Needs(1, 0, 10))
    made.check(BRONZE, Needs(1, 300, 10), 0.0)
    made = door()
    made.backlogs[BRONZE].enter(Needs(1, 0, 10))
    made.check(BRONZE, Needs(1, 900, 10), 0.0)
    with pytest.raises(EngineBusy, match=r"about 12 s, the deadline of class bronze is 10 s") as caught:
        made.check(BRONZE, Needs(1, 1150, 10), 0.0)
    assert caught.value.retry_after == 3.0  # 11.5 s of tokens, half a second's step, 10 s may pass; half as much again
    for rank in (GOLD, SILVER):
        made.check(rank, Needs(1, 10**6, 10), 0.0)


def test_work_of_higher_classes_counts_and_a_share_of_the_rate() -> None:
    made = door()
    made.backlogs[GOLD].sequences, made.backlogs[GOLD].prompt = 2, 800
    made.check(BRONZE, Needs(1, 50, 10), 0.0)
    with pytest.raises(EngineBusy):  # 950 tokens are 9.5 s at the full rate, and the step
        made.check(BRONZE, Needs(1, 160, 10), 0.0)
    made.backlogs[GOLD].prompt = 0
    made.check(BRONZE, Needs(1, 300, 10), 0.0)
    with pytest.raises(EngineBusy):  # at a share of 1 / 2.8 while gold is busy: 35.7 tokens a second
        made.check(BRONZE, Needs(1, 350, 10), 0.0)
    made.backlogs[GOLD].sequences = 0
    made.check(BRONZE, Needs(1, 350, 10), 0.0)


def test_sequences_without_a_row_count_as_well() -> None:
    made = door()
    made.backlogs[BRONZE].enter(Needs(8 + 30, 0, 380))
    made.check(BRONZE, Needs(1, 1, 10), 0.0)
    made.backlogs[BRONZE].enter(Needs(8, 0, 80))
    with pytest.raises(EngineBusy):  # 39 must end first, 4 a second do
        made.check(BRONZE, Needs(1, 1, 10), 0.0)


def test_those_refused_together_are_told_times_one_after_the_other() -> None:
    small, busy = door(places=2, table=ONE_CLASS), door()
    busy.backlogs[BRONZE].enter(Needs(1, 0, 10))
    small.backlogs[0].enter(Needs(1, 0, 10))
    for made, rank, needs in ((busy, BRONZE, Needs(1, 1500, 10)), (small, 0, Needs(3, 1, 30))):
        waits = []
        for _ in range(5):
            with pytest.raises(EngineBusy) as caught:
                made.check(rank, needs, 0.0)
            waits.append(caught.value.retry_after)
        assert waits == sorted(waits) and waits[0] >= 1 and waits[-1] >= waits[0] + 2
        with pytest.raises(EngineBusy) as caught:
            made.check(rank, needs, waits[-1] + GRACE_SECONDS + 1)
        assert caught.value.retry_after == waits[0], "who does not come is not waited for"


def test_an_appointment_is_worth_a_later_deadline_once() -> None:
    made = door()
    made.backlogs[BRONZE].prompt = 1400
    with pytest.raises(EngineBusy) as caught:
        made.check(BRONZE, Needs(1, 1, 10), 0.0)
    due = caught.value.retry_after
    made.check(BRONZE, Needs(1, 1, 10), due)
    with pytest.raises(EngineBusy):
        made.check(BRONZE, Needs(1, 1, 10), due)


def test_an_empty_engine_refuses_nobody_for_a_deadline_and_forgets_who_was_told_to_wait() -> None:
    made = door()
    made.check(BRONZE, Needs(1, 10**6, 10), 0.0)
    made.backlogs[BRONZE].enter(Needs(1, 10**6, 10))
    for _ in range(50):
        with pytest.raises(EngineBusy) as caught:
            made.check(BRONZE, Needs(1, 900, 10), 0.0)
    assert caught.value.retry_after > 100
    made.backlogs[BRONZE] = replace(made.backlogs[BRONZE], sequences=0, prompt=0, asked=0)
    made.check(BRONZE, Needs(1, 900, 10), 1.0)
    made.backlogs[BRONZE].enter(Needs(1, 1500, 10))
    with pytest.raises(EngineBusy) as caught:
        made.check(BRONZE, Needs(1, 2000, 10), 1.0)
    assert caught.value.retry_after < 60, "the fifty of before do not count"


def test_a_million_refusals_are_bounded_in_memory_and_time() -> None:
    made = door()
    made.backlogs[BRONZE].prompt = 10**9
    for i in range(MAX_APPOINTMENTS + 100):
        with pytest.raises(EngineBusy) as caught:
            made.check(BRONZE, Needs(1, 100, 10), i * 1e-6)
    assert caught.value.retry_after == LONGEST_WAIT
    assert len(made.backlogs[BRONZE].appointments) == MAX_APPOINTMENTS


# D-door


@dataclass
class Flood:
    """Clients that come at once and obey Retry-After, in front of the mock engine with a simulated clock."""

    engine: MockEngine
    door: QueueDoor
    pace: Pace = field(default_factory=Pace)
    entered: dict[str, float] = field(default_factory=dict)
    visits: dict[str, int] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)

    def go(self, arrivals: list[tuple[float, str, int, int]], max_tokens: int) -> None:
        heapq.heapify(arrivals)
        scheduler = self.engine.scheduler
        while arrivals or scheduler.has_work:
            while arrivals and arrivals[0][0] <= self.engine.now:
                _, name, rank, tokens = heapq.heappop(arrivals)
                self.visits[name] = self.visits.get(name, 0) + 1
                try:
                    self.door.check(rank, Needs(1, tokens, max_tokens), self.engine.now)
                except EngineBusy as busy:
                    heapq.heappush(arrivals, (self.engine.now + busy.retry_after, name, rank, tokens))
                    continue
                self._enter(name, rank, tokens, max_tokens)
            if scheduler.has_work:
                self._step()
            else:
                self.engine.now = arrivals[0][0]

    def _enter(self, name: str, rank: int, tokens: int, max_tokens: int) -> None:
        self.entered[name] = self.engine.now
        self.door.backlogs[rank].enter(Needs(1, tokens, max_tokens))
        prompt = [hash(name) % 40 + 2 + i % 5 for i in range(tokens)]
        self.engine.add(name, prompt, max_tokens, service_class=CLASS_NAMES[rank] if len(self.door.table) > 1 else None)

    def _step(self) -> None:
        before = self.engine.now
        news = self.engine.step()
        for entry in self.engine.steps[-1].entries:
            self.begun.setdefault(entry.request.request_id, before)
        self.pace.end(self.engine.now - before)
        self.door.prefill_rate, self.door.step_seconds = self.pace.prefill_rate, self.pace.step_seconds
        for progress in news:
            request = progress.request
            if request.request_id not in self.first:
                self.first[request.request_id] = self.engine.now
                self.door.backlogs[request.rank].prompt -= request.num_prompt_tokens
            if progress.finish_reason is not None:
                self._leave(request)

    def _leave(self, request: Request) -> None:
        backlog, asked = self.door.backlogs[request.rank], request.params.max_tokens or 0
        backlog.sequences -= 1
        backlog.asked -= asked
        self.door.note_run(self.engine.now - self.begun[request.request_id], asked, self.engine.now)


def flood(table: ClassTable, places: int, max_running: int = 16) -> Flood:
    limits = SchedulerLimits(token_budget=64, max_running=max_running, max_queued=3000, page_size=4,
                             enable_prefix_caching=False)  # fmt: skip
    made: Flood

    def cost(schedule: Schedule) -> float:
        made.pace.begin(schedule)
        return 0.02 + 0.002 * schedule.num_tokens

    engine = MockEngine(limits, 4000, table, cost, checked=False)
    made = Flood(engine, QueueDoor(table, (places,) * len(table), max_running))
    return made


@pytest.mark.parametrize(("tokens", "max_tokens"), [(40, 2), (12, 20)])
def test_a_thousand_refused_for_their_deadline_find_room_when_they_obey(tokens: int, max_tokens: int) -> None:
    made = flood(TABLE, 2000)
    made.go([(0.0, "warm", BRONZE, 64)], max_tokens)
    start = made.engine.now
    arrivals = [(start + 0.001 * i, f"b{i}", BRONZE, tokens) for i in range(1000)]
    made.go(arrivals, max_tokens)
    refused = [name for name, visits in made.visits.items() if visits > 1]
    assert len(refused) > 300, "the flood was too small to prove anything"
    once = sum(made.visits[name] == 2 for name in refused) / len(refused)
    assert once >= 0.9, f"{once:.0%} found room when they came back"
    late = [name for name, at in made.entered.items() if made.first[name] - at > GRACE * 10.0]
    assert len(late) <= 0.05 * len(made.entered), "an appointment is no way around the deadline"


@pytest.mark.parametrize("table", [ONE_CLASS, TABLE])
def test_a_thousand_refused_for_a_full_queue_find_room_when_they_obey(table: ClassTable) -> None:
    made = flood(table, 60)
    made.go([(0.0, f"warm{i}", 0, 20) for i in range(40)], 8)
    start = made.engine.now
    made.go([(start + 0.001 * i, f"r{i}", 0, 20) for i in range(1000)], 8)
    refused = [name for name, visits in made.visits.items() if visits > 1]
    assert len(refused) > 300
    assert sum(made.visits[name] == 2 for name in refused) >= 0.9 * len(refused)
