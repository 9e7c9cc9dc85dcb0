"""Service classes under load, on the mock engine with a simulated clock: isolation, shares, lending, return, equality.

A step costs `fixed` seconds (weights are read) and a little for each token; nothing here measures real time. The real
engine's form of these is in the slow set (test_service_classes_real.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scheduling import MockEngine, finished_well

from coterie.engine.classes import CLASS_NAMES, ONE_CLASS, ClassTable
from coterie.engine.config import ServiceConfig
from coterie.engine.request import Request, Schedule, Status
from coterie.engine.scheduler import SchedulerLimits

GOLD, SILVER, BRONZE = CLASS_NAMES
TABLE = ClassTable.of(ServiceConfig(enabled=True))


def limits(**changes: int | bool) -> SchedulerLimits:
    base: dict[str, int | bool] = {"token_budget": 64, "max_running": 16, "max_queued": 5000, "page_size": 4}
    return SchedulerLimits(**{**base, **changes})  # type: ignore[arg-type]


def cost(fixed: float, per_token: float) -> Callable[[Schedule], float]:
    return lambda schedule: fixed + per_token * schedule.num_tokens


def prompt(length: int, salt: int) -> list[int]:
    return [salt // 45**i % 45 + 2 for i in range(3)] + [(salt + i * 7) % 47 + 2 for i in range(length - 3)]


@dataclass
class Load:
    """Requests of one class that arrive at `rate` a second, `count` at once; or are kept `waiting` deep (rate 0)."""

    name: str
    rate: float = 0.0
    waiting: int = 0
    length: int = 16
    max_tokens: int = 8
    requests: list[Request] = field(default_factory=list)
    next_arrival: float = 0.0


@dataclass
class Run:
    """A mock engine under loads until its clock says so; tokens computed and the times of first and last tokens."""

    engine: MockEngine
    loads: list[Load]
    served: list[tuple[float, int, int]] = field(default_factory=list)  # when, rank, tokens
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def go(self, seconds: float, seed: int = 1) -> None:
        chance = random.Random(seed)
        engine, scheduler = self.engine, self.engine.scheduler
        for load in self.loads:
            load.next_arrival = chance.expovariate(load.rate) if load.rate else 0.0
        while engine.now < seconds:
            for load in self.loads:
                self._arrive(load, chance)
            if not scheduler.has_work:
                engine.now = min(load.next_arrival for load in self.loads)
                continue
            for news in engine.step():
                self.first.setdefault(news.request.request_id, engine.now)
                self.last[news.request.request_id] = engine.now
            for entry in engine.steps[-1].entries:
                self.served.append((engine.now, entry.request.rank, entry.num_tokens))

    def _arrive(self, load: Load, chance: random.Random) -> None:
        engine = self.engine
        while load.rate and load.next_arrival <= engine.now:
            self._add(load, load.next_arrival)
            load.next_arrival += chance.expovariate(load.rate)
        rank = engine.classes.rank(load.name)
        while not load.rate and engine.scheduler.num_of_class(rank)[1] < load.waiting:
            self._add(load, engine.now)

    def _add(self, load: Load, when: float) -> None:
        name = f"{load.name}{len(load.requests)}"
        salt = len(load.requests) * 3 + CLASS_NAMES.index(load.name)  # type: ignore[arg-type]
        request = self.engine.add(name, prompt(load.length, salt), load.max_tokens, service_class=load.name)
        request.arrival_time = when
        load.requests.append(request)

    def tokens(self, start: float = 0.0, end: float = 1e9) -> Counter[int]:
        counts: Counter[int] = Counter()
        for when, rank, tokens in self.served:
            if start < when <= end:
                counts[rank] += tokens
        return counts

    def ttft(self, load: Load) -> float:
        """95th percentile."""
        done = [self.first[r.request_id] - r.arrival_time for r in load.requests if r.request_id in self.first]
        return sorted(done)[int(0.95 * len(done))]

    def tpot(self, load: Load) -> float:
        """95th percentile of the requests' mean time between tokens."""
        done = [
            (self.last[r.request_id] - self.first[r.request_id]) / (load.max_tokens - 1)
            for r in load.requests
            if r.status is Status.FINISHED
        ]
        return sorted(done)[int(0.95 * len(done))]


def run(loads: list[Load], seconds: float, table: ClassTable = TABLE, **kwargs: float | int) -> Run:
    step_cost = cost(float(kwargs.pop("fixed", 0.05)), float(kwargs.pop("per_token", 0.001)))
    num_blocks = int(kwargs.pop("num_blocks", 1000))
    engine = MockEngine(limits(**kwargs), num_blocks, table, step_cost, checked=False)  # type: ignore[arg-type]
    made = Run(engine, loads)
    made.go(seconds)
    return made


# D-share


@pytest.mark.parametrize(("length", "max_tokens"), [(16, 8), (200, 1), (5, 40)])
def test_share_all_classes_backlogged_get_their_shares_and_nobody_is_forgotten(length: int, max_tokens: int) -> None:
    loads = [Load(name, waiting=8, length=length, max_tokens=max_tokens) for name in CLASS_NAMES]
    made = run(loads, 60.0)
    for start in (0.0, 10.0, 25.0, 50.0):
        tokens = made.tokens(start, start + 10.0)
        shares = [tokens[rank] / sum(tokens.values()) for rank in range(3)]
        assert all(abs(share - TABLE.share(rank)) <= 0.02 for rank, share in enumerate(shares)), shares
    for load in loads:
        waits = [made.first.get(r.request_id, made.engine.now) - r.arrival_time for r in load.requests]
        assert max(waits) < 30.0
        old = [r for r in load.requests if r.arrival_time < 20.0]
        assert all(r.status is Status.FINISHED for r in old) and len(old) > 3


@settings(max_examples=25, phases=[Phase.generate])  # a long run does not shrink in useful time
@given(
    weights=st.tuples(*[st.sampled_from([0.25, 1.0, 3.0])] * 3),
    budget=st.sampled_from([16, 40, 128]),
    length=st.integers(4, 60),
    max_tokens=st.integers(1, 20),
)
def test_a_busy_class_is_served_what_it_is_promised_over_any_ten_seconds(
    weights: tuple[float, float, float], budget: int, length: int, max_tokens: int
) -> None:
    table = ClassTable.of(ServiceConfig(enabled=True, weights=weights))
    backlog = 8 + budget // length
    loads = [Load(name, waiting=backlog, length=length, max_tokens=max_tokens) for name in CLASS_NAMES]
    made = run(loads, 20.0, table, token_budget=budget, num_blocks=2000, max_running=64)
    for start in (0.0, 5.0, 10.0):
        tokens = made.tokens(start, start + 10.0)
        for rank in range(3):
            assert tokens[rank] / sum(tokens.values()) >= table.share(rank) - 0.02


# D-lend


@pytest.mark.parametrize("name", CLASS_NAMES)
def test_lend_one_class_alone_has_the_whole_engine(name: str) -> None:
    alone = run([Load(name, waiting=20, length=30, max_tokens=10)], 20.0)
    plain = run([Load(name, waiting=20, length=30, max_tokens=10)], 20.0, ONE_CLASS)
    assert sum(alone.tokens().values()) >= 0.98 * sum(plain.tokens().values())
    assert [step.num_tokens for step in alone.engine.steps] == [step.num_tokens for step in plain.engine.steps]


# D-reclaim


@pytest.mark.parametrize("silver", [0, 20])
def test_reclaim_a_burst_of_gold_is_served_at_once(silver: int) -> None:
    loads = [Load(BRONZE, waiting=20, length=12, max_tokens=60), Load(SILVER, waiting=silver, length=40)]
    made = run(loads, 5.0)
    engine = made.engine
    assert engine.scheduler.num_running >= limits().max_running, "every row is lent"
    own_rows, own_tokens = TABLE.reserved(16)[0], TABLE.reserved(64)[0]
    burst = [engine.add(f"burst{i}", prompt(25, 9000 + i), 5, service_class=GOLD) for i in range(own_rows)]
    begin = len(engine.steps)
    for _ in range(40):
        engine.step()
    for i, request in enumerate(burst):
        prefill = -(-25 * (i + 1) // own_tokens)
        assert engine.token_steps[request.request_id][0] - begin < 2 + prefill
        gaps = [b - a for a, b in zip(*[engine.token_steps[request.request_id][k:] for k in (0, 1)], strict=False)]
        assert gaps == [1] * 4, "a running gold stream rides in every step"
    assert engine.scheduler.counters.preemptions == 0, "tokens and rows come back without evicting anybody"
    engine.drain()


def test_reclaim_blocks_by_eviction_after_half_the_deadline_and_at_most_twice() -> None:
    engine = MockEngine(limits(max_running=8), 48, TABLE, cost(0.1, 0.0))
    bronze = [engine.add(f"b{i}", prompt(8, i), 40, service_class=BRONZE) for i in range(8)]
    while engine.pool.num_free > 8:
        engine.step()
    gold = engine.add("gold", prompt(48, 99), 4, service_class=GOLD)
    arrived = engine.now
    while gold.status is Status.WAITING:
        engine.step()
    waited = engine.now - arrived
    assert 0.5 * TABLE.slo_seconds[0] < waited <= 0.5 * TABLE.slo_seconds[0] + 0.3
    evicted = [r for r in bronze if r.num_evictions]
    assert evicted and all(r.status is Status.WAITING for r in evicted)
    assert max(r.num_computed_tokens for r in evicted) <= min(r.num_tokens for r in bronze if not r.num_evictions)
    for i in range(60):  # gold comes again and again
        engine.add(f"gold{i}", prompt(48, 200 + i), 4, service_class=GOLD)
        for _ in range(12):
            engine.step()
    engine.drain()
    assert max(r.num_evictions for r in bronze) <= 2
    assert all(finished_well(r) for r in (*bronze, gold))


def test_an_equal_or_higher_class_is_never_evicted() -> None:
    engine = MockEngine(limits(max_running=8), 30, TABLE, cost(1.0, 0.0))
    first = [engine.add(f"s{i}", prompt(8, i), 16, service_class=SILVER) for i in range(4)]
    for _ in range(3):
        engine.step()
    later = [engine.add(f"{name}", prompt(60, 50), 4, service_class=name) for name in (SILVER, BRONZE)]
    for _ in range(10):
        engine.step()
    assert all(r.num_evictions == 0 for r in first)
    engine.drain()
    assert all(finished_well(r) for r in (*first, *later))


def test_one_that_needs_more_than_its_class_has_is_not_passed_over_for_ever() -> None:
    engine = MockEngine(limits(max_running=8), 40, TABLE, cost(0.1, 0.0))
    big = None
    for i in range(800):
        while engine.scheduler.num_of_class(0)[1] < 4:
            engine.add(f"g{i}{engine.scheduler.num_waiting}", prompt(20, i), 8, service_class=GOLD)
        if i == 20:
            big = engine.add("big", prompt(140, 7), 4, service_class=BRONZE)
        engine.step()
    assert big is not None and finished_well(big)


def test_nobody_waits_for_pages_that_a_lower_class_computes() -> None:
    engine = MockEngine(limits(token_budget=8), 400, TABLE)
    shared = prompt(200, 3)
    engine.add("bronze", shared, 4, service_class=BRONZE)
    engine.step()
    engine.add("silver", shared, 4, service_class=SILVER)
    engine.add("silver2", shared, 4, service_class=SILVER)
    engine.step()
    running = {r.request_id for r in engine.scheduler.requests() if r.status is Status.RUNNING}
    assert running == {"bronze", "silver"}, "the second silver one waits for the first, whom bronze does not hold up"
    engine.drain()


# D-equal


def test_equal_texts_do_not_depend_on_the_class() -> None:
    """The mock's outputs are a function of the prompt, and its memory notices a row that is not one's own."""
    chance = random.Random(3)
    engine = MockEngine(limits(max_running=6, token_budget=24), 24, TABLE, cost(0.8, 0.0))
    made = []
    for i in range(150):
        name = chance.choice(CLASS_NAMES)
        made.append(engine.add(f"{i}", prompt(chance.choice([3, 9, 30]), i % 20), 12, service_class=name))
        for _ in range(chance.randrange(4)):
            engine.step()
    engine.drain()
    assert all(finished_well(r) for r in made)
    assert sum(r.num_evictions for r in made) > 3 and engine.scheduler.counters.prefix_hits > 0


# D-isolate


def test_isolate_gold_keeps_its_latency_beside_twice_the_capacity_of_bronze() -> None:
    """Reading the weights dominates a step: the budget was chosen so that a full one is little longer than an empty.

    Bronze is kept waiting, which is what its door leaves of any load above the capacity. Where tokens dominate a step,
    gold's steps beside bronze are longer in proportion, and only a smaller budget helps.
    """
    model = {"fixed": 0.05, "per_token": 0.00005, "token_budget": 128, "max_running": 32}
    size = {"length": 24, "max_tokens": 8}
    capacity = _capacity(model, size)
    alone_load = Load(GOLD, rate=0.3 * capacity, **size)
    alone = run([alone_load], 120.0, **model)
    gold, bronze = Load(GOLD, rate=0.3 * capacity, **size), Load(BRONZE, waiting=100, **size)
    both = run([gold, bronze], 120.0, **model)
    assert both.ttft(gold) <= 1.25 * alone.ttft(alone_load)
    assert both.tpot(gold) <= 1.15 * alone.tpot(alone_load)
    mixed = [Load(GOLD, rate=0.3 * capacity, **size), Load(BRONZE, waiting=100, **size)]
    plain = run(mixed, 120.0, ONE_CLASS, **model)
    assert sum(both.tokens().values()) >= 0.95 * sum(plain.tokens().values())
    assert plain.ttft(mixed[0]) > 5 * both.ttft(gold), "without classes gold waits behind everybody"


@pytest.mark.parametrize("budget", [16, 64])
def test_isolate_whatever_the_budget_first_tokens_come_as_soon_as_alone(budget: int) -> None:
    """Gold's prompts go before bronze's while it claims what it lent, so its prefill takes as many steps as alone."""
    model = {"fixed": 0.05, "per_token": 0.00005, "token_budget": budget, "max_running": 32}
    gold, alone, bronze = _beside_bronze(model)
    assert bronze.ttft(gold[1]) <= 1.25 * alone.ttft(gold[0])
    assert bronze.tpot(gold[1]) <= 1.15 * alone.tpot(gold[0])


@pytest.mark.parametrize("budget", [16, 64])
def test_isolate_where_tokens_dominate_the_loss_is_the_length_of_full_steps(budget: int) -> None:
    """No step is missed: each token takes one full step, which is what the engine's owner chose with the budget."""
    model = {"fixed": 0.006, "per_token": 0.0006, "token_budget": budget, "max_running": 32}
    gold, alone, bronze = _beside_bronze(model)
    full = model["fixed"] + model["per_token"] * budget
    assert bronze.tpot(gold[1]) <= full * 1.001
    assert bronze.ttft(gold[1]) / full <= 1.25 * alone.ttft(gold[0]) / model["fixed"]


def _beside_bronze(model: dict[str, float]) -> tuple[list[Load], Run, Run]:
    """Gold at 30 % of the capacity alone, and beside bronze that is kept waiting: its loads and both runs."""
    size = {"length": 24, "max_tokens": 8}
    rate = 0.3 * _capacity(model, size)
    gold = [Load(GOLD, rate=rate, **size) for _ in range(2)]
    return gold, run(gold[:1], 40.0, **model), run([gold[1], Load(BRONZE, waiting=100, **size)], 40.0, **model)


def _capacity(model: dict[str, float], size: dict[str, int]) -> float:
    """Requests a second when many wait."""
    load = Load(BRONZE, waiting=40, **size)
    made = run([load], 60.0, ONE_CLASS, **model)
    return sum(r.status is Status.FINISHED for r in load.requests) / made.engine.now
