"""The door of the queue: places of each class, refusals for a deadline, and appointments that hold when obeyed."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from scheduling import MockEngine

from coterie.engine.classes import CLASS_NAMES, ONE_CLASS, ClassTable
from coterie.engine.config import ServiceConfig
from coterie.engine.errors import EngineBusy
from coterie.engine.messages import SamplingParams, Stats
from coterie.engine.pace import Pace
from coterie.engine.queue_door import (
    GRACE,
    GRACE_SECONDS,
    LEAST_WAIT,
    LONGEST_WAIT,
    MARGIN,
    MAX_APPOINTMENTS,
    Appointments,
    Needs,
    QueueDoor,
)
from coterie.engine.request import Schedule, Status
from coterie.engine.row_times import Run
from coterie.engine.scheduler import Progress, SchedulerLimits

GOLD, SILVER, BRONZE = range(3)
TABLE = ClassTable.of(ServiceConfig(enabled=True, slo_seconds=(1.0, 5.0, 10.0)))


def door(places: int = 100, max_running: int = 8, table: ClassTable = TABLE) -> QueueDoor:
    made = QueueDoor(table, (places,) * len(table), max_running)
    made.prefill_rate, made.row_times.step_seconds = 100.0, 0.5
    for _ in range(200):
        made.row_times.note_end(Run(0, 10, 0.0, 10), 2.0, by_itself=False)
    return made


def test_before_anything_was_measured_only_places_count() -> None:
    fresh = QueueDoor(TABLE, (3, 3, 3), 1)
    fresh.check(BRONZE, Needs(3, 10**6, 10), 0.0)
    with pytest.raises(EngineBusy, match="of class bronze, 3 may"):
        fresh.check(BRONZE, Needs(4, 1, 10), 0.0)


def test_the_lowest_class_is_refused_when_its_deadline_cannot_be_met_and_the_others_wait() -> None:
    made = door()
    made.enter(SILVER, Needs(1, 0, 10))
    made.check(BRONZE, Needs(1, 300, 10), 0.0)
    made = door()
    made.enter(BRONZE, Needs(1, 0, 10))
    made.check(BRONZE, Needs(1, 900, 10), 0.0)
    with pytest.raises(EngineBusy, match=r"about 12 s, the deadline of class bronze is 10 s") as caught:
        made.check(BRONZE, Needs(1, 1150, 10), 0.0)
    assert caught.value.retry_after == 3.0  # 11.5 s of tokens, half a second's step, 10 s may pass; half as much again
    for rank in (GOLD, SILVER):
        made.check(rank, Needs(1, 10**6, 10), 0.0)


def test_work_of_higher_classes_counts_and_a_share_of_the_rate() -> None:
    made = door()
    gold = made.enter(GOLD, Needs(2, 800, 20))
    made.check(BRONZE, Needs(1, 50, 10), 0.0)
    with pytest.raises(EngineBusy):  # 950 tokens are 9.5 s at the full rate, and the step
        made.check(BRONZE, Needs(1, 160, 10), 0.0)
    made.opened(GOLD, 800)
    made.check(BRONZE, Needs(1, 300, 10), 0.0)
    with pytest.raises(EngineBusy):  # at a share of 1 / 2.8 while gold is busy: 35.7 tokens a second
        made.check(BRONZE, Needs(1, 350, 10), 0.0)
    for run in gold:
        made.end(GOLD, run, 0.0, by_itself=False)
    made.check(BRONZE, Needs(1, 350, 10), 0.0)


def test_sequences_without_a_row_count_as_well() -> None:
    made = door()
    made.enter(BRONZE, Needs(8 + 16, 0, 240))
    made.check(BRONZE, Needs(1, 1, 10), 0.0)
    made.enter(BRONZE, Needs(8, 0, 80))
    with pytest.raises(EngineBusy):  # 39 must end first, 4 a second do
        made.check(BRONZE, Needs(1, 1, 10), 0.0)


def test_those_refused_together_are_told_times_one_after_the_other() -> None:
    small, busy = door(places=2, table=ONE_CLASS), door()
    busy.enter(BRONZE, Needs(1, 0, 10))
    small.enter(0, Needs(1, 0, 10))
    for made, rank, needs in ((busy, BRONZE, Needs(1, 1500, 10)), (small, 0, Needs(3, 1, 30))):
        waits = []
        for mark in range(5):
            with pytest.raises(EngineBusy) as caught:
                made.check(rank, Needs(*needs[:3], mark), 0.0)
            waits.append(caught.value.retry_after)
        assert waits == sorted(waits) and waits[0] >= 1 and waits[-1] >= waits[0] + 2
        with pytest.raises(EngineBusy) as caught:
            made.check(rank, needs, waits[-1] + GRACE_SECONDS + 1)
        assert caught.value.retry_after == waits[0], "who does not come is not waited for"


def test_an_appointment_is_worth_a_later_deadline_once() -> None:
    made = door()
    made.enter(BRONZE, Needs(1, 1400, 10))
    me, other = Needs(1, 1, 10, 1), Needs(1, 1, 10, 2)
    with pytest.raises(EngineBusy) as caught:
        made.check(BRONZE, me, 0.0)
    due = caught.value.retry_after
    with pytest.raises(EngineBusy):
        made.check(BRONZE, other, due)
    made.check(BRONZE, me, due)
    with pytest.raises(EngineBusy) as caught:
        made.check(BRONZE, me, due)
    with pytest.raises(EngineBusy):
        made.check(BRONZE, me, due + caught.value.retry_after - 1.0)


def test_an_empty_engine_refuses_nobody_for_a_deadline_and_forgets_who_was_told_to_wait() -> None:
    made = door()
    made.check(BRONZE, Needs(1, 10**6, 10), 0.0)
    (run,) = made.enter(BRONZE, Needs(1, 10**6, 10))
    for mark in range(50):
        with pytest.raises(EngineBusy) as caught:
            made.check(BRONZE, Needs(1, 900, 10, mark), 0.0)
    assert caught.value.retry_after > 100
    made.opened(BRONZE, 10**6)
    made.end(BRONZE, run, 1.0, by_itself=False)
    made.check(BRONZE, Needs(1, 900, 10), 1.0)
    made.enter(BRONZE, Needs(1, 1500, 10))
    with pytest.raises(EngineBusy) as caught:
        made.check(BRONZE, Needs(1, 2000, 10), 1.0)
    assert caught.value.retry_after < 60, "the fifty of before do not count"


def test_a_million_refusals_are_bounded_in_memory_and_time() -> None:
    made = door()
    made.enter(BRONZE, Needs(1, 10**9, 10))
    for i in range(MAX_APPOINTMENTS + 100):
        with pytest.raises(EngineBusy) as caught:
            made.check(BRONZE, Needs(1, 100, 10, i), i * 1e-6)
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
    runs: dict[str, Run] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    serial: int = 0

    def go(self, arrivals: list[tuple[float, str, int, int]], max_tokens: int) -> None:
        heapq.heapify(arrivals)
        scheduler = self.engine.scheduler
        while arrivals or scheduler.has_work:
            while arrivals and arrivals[0][0] <= self.engine.now:
                _, name, rank, tokens = heapq.heappop(arrivals)
                self.visits[name] = self.visits.get(name, 0) + 1
                try:
                    self.door.check(rank, Needs(1, tokens, max_tokens, hash(name)), self.engine.now)
                except EngineBusy as busy:
                    heapq.heappush(arrivals, (self.engine.now + busy.retry_after, name, rank, tokens))
                    continue
                self.enter(name, rank, tokens, max_tokens)
            if scheduler.has_work:
                self.step()
            else:
                self.engine.now = arrivals[0][0]

    def enter(self, name: str, rank: int, tokens: int, max_tokens: int, end: int = 0) -> None:
        self.entered[name] = self.engine.now
        (self.runs[name],) = self.door.enter(rank, Needs(1, tokens, max_tokens))
        prompt = [(0 if self.engine.scheduler.limits.enable_prefix_caching else self.serial) % 40 + 2 + i % 5
                  for i in range(tokens)]  # fmt: skip
        self.serial += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if end:  # the mock's every token is a 2
            params = SamplingParams(max_tokens=max_tokens, min_tokens=end, stop_token_ids=[2])
        service_class = CLASS_NAMES[rank] if len(self.door.table) > 1 else None
        self.engine.add(name, prompt, params=params, service_class=service_class)

    def step(self) -> None:
        before = self.engine.now
        news = self.engine.step()
        for entry in self.engine.steps[-1].entries:
            self.begun.setdefault(entry.request.request_id, before)
        self.pace.end(self.engine.now - before)
        scheduler = self.engine.scheduler
        self.door.note_stats(
            Stats(
                scheduler.num_running, scheduler.num_waiting, self.engine.pool.usage, 0, 0, 0, 0, 0, 0, 0, {},
                prefill_rate=self.pace.prefill_rate, step_seconds=self.pace.step_seconds,
            )
        )  # fmt: skip
        for progress in news:
            self._note(progress)

    def _note(self, progress: Progress) -> None:
        """As the tracker does."""
        request, now = progress.request, self.engine.now
        name, rank = request.request_id, request.rank
        run = self.runs[name]
        if not run.tokens:
            before = now - self.begun[name]
            self.first[name] = now
            self.door.opened(rank, request.num_prompt_tokens, request.num_cached_tokens, before)
            self.door.begin(rank, run, now)
        run.tokens += len(progress.token_ids)
        if progress.finish_reason is not None:
            self.door.end(rank, self.runs.pop(name), now, by_itself=progress.finish_reason == "stop")
            self.ends.append(now)

    def abort(self, name: str) -> None:
        """The client hangs up."""
        request = self.engine.scheduler.abort(name)
        assert request is not None
        if name not in self.first:
            self.door.opened(request.rank, request.num_prompt_tokens)
        self.door.end(request.rank, self.runs.pop(name), self.engine.now, by_itself=False)


def flood(table: ClassTable, places: int, *, num_blocks: int = 4000, slow: float = 1.0, cached: bool = False) -> Flood:
    limits = SchedulerLimits(token_budget=64, max_running=16, max_queued=3000, page_size=4,
                             enable_prefix_caching=cached)  # fmt: skip
    made: Flood

    def cost(schedule: Schedule) -> float:
        made.pace.begin(schedule)
        return slow * (0.02 + 0.002 * schedule.num_tokens)

    engine = MockEngine(limits, num_blocks, table, cost, checked=False)
    made = Flood(engine, QueueDoor(table, (places,) * len(table), 16))
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


# Estimates of a full queue against what came true


Kind = tuple[int, int, int]
"""Prompt tokens, tokens asked for, tokens after which it ends by itself (0: it takes all it asked for)."""
LOADS: dict[str, list[Kind]] = {
    "prompts only": [(200, 1, 0)],
    "decoding only": [(4, 100, 0)],
    "both at once": [(200, 40, 0)],
    "some of either": [(300, 1, 0), (4, 60, 0)],
    "few end where they may": [(20, 2000, 30), (20, 2000, 5), (20, 2000, 90), (20, 2000, 12), (20, 2000, 60)],
    "long and short": [(10, 300, 0), (10, 5, 0), (10, 20, 0), (10, 5, 0)],
    "asked for little and for all": [(10, 8, 0), (10, 4000, 20), (10, 4000, 60)],
}
PLACES = 60


@dataclass
class Full:
    """A flood that keeps the queue full of a load's kinds in random order."""

    made: Flood
    kinds: list[Kind]
    chance: random.Random
    count: int = 0
    kind_of: dict[str, Kind] = field(default_factory=dict)

    def fill(self) -> None:
        while self.made.door.backlogs[0].sequences < PLACES:
            self.count += 1
            length, asked, end = kind = self.chance.choice(self.kinds)
            self.made.enter(f"{self.count}", 0, length, asked, end)
            self.kind_of[f"{self.count}"] = kind

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.fill()
            self.made.step()
        self.fill()

    def told(self, ends: int) -> float:
        """Retry-After, without its margin, for a request that needs so many ends; nobody else was told anything."""
        backlog = self.made.door.backlogs[0]
        backlog.appointments = Appointments()
        needs = Needs(ends + PLACES - backlog.sequences, 10, 10 * ends)
        with pytest.raises(EngineBusy) as caught:
            self.made.door.check(0, needs, self.made.engine.now)
        return caught.value.retry_after / MARGIN

    def came_true(self, begin: float, ends: int) -> float:
        while len(late := [end for end in self.made.ends if end > begin]) < ends:
            self.go(1)
        return late[ends - 1] - begin


def full(kinds: list[Kind], seed: int, **limits: Any) -> Full:
    made = flood(ONE_CLASS, PLACES, **{"slow": 3.0} | limits)
    return Full(made, kinds, random.Random(seed))


def judge(load: Full, *ends: int) -> None:
    """Estimates are within a factor of 3 of what comes true; below LEAST_WAIT nothing is told."""
    begin, told = load.made.engine.now, {count: load.told(count) for count in ends}
    for count, value in told.items():
        true = load.came_true(begin, count)
        assert value <= 3 * max(LEAST_WAIT / MARGIN, true), f"{count} ends: told {value:.1f} s, it took {true:.1f} s"
        assert value >= true / 3, f"{count} ends: told {value:.1f} s, it took {true:.1f} s"


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("num_blocks", [4000, 1100], ids=["rows", "memory"])
def test_a_full_queue_says_when_there_will_be_room(name: str, num_blocks: int) -> None:
    if num_blocks < 4000 and max(asked for _, asked, _ in LOADS[name]) < 1000:
        num_blocks = 200
    load = full(LOADS[name], 1, num_blocks=num_blocks)
    load.go(250)
    for _ in range(4):
        load.go(61)
        judge(load, *(8, 16, 50, 120)[num_blocks < 4000 :])  # with preemptions single ends are a matter of luck


@pytest.mark.parametrize("name", [name for name, kinds in LOADS.items() if not any(end for *_, end in kinds)])
@pytest.mark.parametrize("steps", [1, 10])
def test_the_first_flood_of_a_new_engine_is_told_so_too(name: str, steps: int) -> None:
    load = full(LOADS[name], 2)
    load.go(steps)
    judge(load, 50)


@pytest.mark.parametrize(("before", "after"), [("prompts only", "decoding only"), ("decoding only", "prompts only"),
                                               ("long and short", "both at once")])  # fmt: skip
def test_another_load_is_told_its_own_time(before: str, after: str) -> None:
    load = full(LOADS[before], 3)
    load.go(300)
    load.kinds = LOADS[after]
    while any(load.kind_of[request.request_id] in LOADS[before] for request in load.made.engine.scheduler.requests()):
        load.go(1)
    judge(load, 16, 50)


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("part", ["running", "waiting", "both"])
def test_after_many_hung_up_the_time_is_that_of_the_others(name: str, part: str) -> None:
    load = full(LOADS[name], 4)
    load.go(250)
    for request in load.made.engine.scheduler.requests()[:: 1 if part == "both" else 2]:
        if part == "both" or (request.status is Status.RUNNING) == (part == "running"):
            load.made.abort(request.request_id)
    load.go(1)
    judge(load, 16, 50)


def test_prompts_in_the_prefix_cache_take_no_time() -> None:
    load = full([(200, 4, 0)], 5, cached=True)
    load.go(400)
    judge(load, 16, 50)


# Appointments of those who do not come


@pytest.mark.parametrize("returns", ["never", "too early"])
def test_who_does_not_keep_the_appointment_counts_less_and_less(returns: str) -> None:
    """Every second ten are refused, and none returns, or each does every second: nobody is told to wait for them."""
    load = full(LOADS["decoding only"], 6)
    load.go(400)
    door, engine, told = load.made.door, load.made.engine, []
    begin = engine.now
    for second in range(120):
        for i in range(10):
            with pytest.raises(EngineBusy) as caught:
                door.check(0, Needs(1, 4, 100, i + (10 * second if returns == "never" else 0)), engine.now)
            told.append((engine.now - begin, caught.value.retry_after))
        until = engine.now + 1.0
        while engine.now < until:
            load.go(1)
    longest = max(wait for at, wait in told if at > 90.0)
    honest = MARGIN * load.told(10)
    assert longest < 4 * honest, f"{longest:.0f} s, {honest:.0f} s would do"


def test_who_returns_is_waited_for_again() -> None:
    made = Appointments()
    for i in range(50):
        made.promise(float(i), Needs(1, 1, 1, i))
    made.turn(50.0 + GRACE_SECONDS)
    assert made.part < 0.2 and not len(made) and made.needs == Needs(0, 0, 0)
    for i in range(100):
        made.promise(100.0 + i, Needs(1, 1, 1, i))
        made.turn(100.0 + i)
        assert made.come(i, 100.0 + i)
    assert made.part > 0.8


def test_the_sums_of_appointments_are_those_of_who_is_told() -> None:
    made, chance, now = Appointments(), random.Random(1), 0.0
    known: list[tuple[float, Needs]] = []
    for _ in range(3000):
        now += chance.random()
        made.turn(now)
        known = [(due, needs) for due, needs in known if due + GRACE_SECONDS >= now]
        needs = Needs(chance.randrange(1, 9), 7, 11, chance.randrange(40))
        mine = [one for one in known if one[1].mark == needs.mark]
        assert made.come(needs.mark, now) == bool(mine and mine[0][0] <= now)
        if mine:
            known.remove(mine[0])
        if chance.random() < 0.8:
            known.append((now + chance.choice([3.0, 9.0, 40.0]), needs))
            made.promise(*known[-1])
        assert made.needs[:3] == tuple(sum(needs[k] for _, needs in known) for k in range(3))
        assert 0.0 < made.part <= 1.0
    made.call_in()
    assert made.needs == Needs(0, 0, 0)
