"""Scheduler under random traffic: arrivals, aborts, failures, tiny pools, shared prefixes, budgets from 1 up.

The mock engine checks after each of thousands of steps that blocks are conserved, that nobody reads another's rows, and
that work is never left lying; here also that the oldest always advances, that equals start in order, and that every
request that was left alone ends with exactly its tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import MockEngine, finished_well

from coterie.engine.classes import CLASS_NAMES, ClassTable
from coterie.engine.config import ServiceConfig
from coterie.engine.errors import EngineBusy, InvalidRequest
from coterie.engine.messages import SamplingParams
from coterie.engine.request import Request, Status
from coterie.engine.scheduler import MAX_OVERTAKES, SchedulerLimits


@dataclass
class Traffic:
    """Random clients of a mock engine. `undisturbed`: requests that nobody aborted or failed."""

    engine: MockEngine
    chance: random.Random
    accepted: list[Request] = field(default_factory=list)
    undisturbed: list[Request] = field(default_factory=list)
    refused: int = 0
    num_added: int = 0
    class_names: tuple[str | None, ...] = (None,)
    _oldest: tuple[Request | None, int, int] = (None, 0, 0)

    def random_prompt(self) -> list[int]:
        family = self.chance.randrange(4)
        shared = [(family * 13 + i) % 45 + 2 for i in range(40)][: self.chance.choice([0, 3, 8, 17, 40])]
        tail = [self.chance.randrange(2, 50) for _ in range(self.chance.choice([0, 1, 2, 5, 20]))]
        return shared + tail or [5]

    def arrive(self) -> None:
        params = SamplingParams(
            max_tokens=self.chance.choice([1, 2, 5, 12, 30]),
            ignore_eos=self.chance.random() < 0.5,
            prompt_logprobs=0 if self.chance.random() < 0.1 else None,
        )
        name = f"{self.num_added}"
        self.num_added += 1
        try:
            service_class = self.chance.choice(self.class_names)
            request = self.engine.add(name, self.random_prompt(), params=params, service_class=service_class)
            self.accepted.append(request)
            self.undisturbed.append(self.accepted[-1])
        except (EngineBusy, InvalidRequest):
            self.refused += 1

    def disturb(self) -> None:
        alive = self.engine.scheduler.requests()
        if not alive:
            return
        victim = self.chance.choice(alive)
        self.undisturbed.remove(victim)
        if self.chance.random() < 0.7:
            assert self.engine.scheduler.abort(victim.request_id) is victim
        else:
            self.engine.scheduler.fail(victim, "bad luck")
        self.engine.scheduler.check_integrity()

    def step(self, arrival_rate: float, disturb_rate: float) -> None:
        while self.chance.random() < arrival_rate:
            self.arrive()
        if self.chance.random() < disturb_rate:
            self.disturb()
        if self.chance.random() < 0.03:
            self.engine.scheduler.schedule()  # a step whose result is lost
        self.engine.step()
        if len(self.class_names) == 1:
            self.check_oldest_advances()
            self.check_overtakes()

    def check_overtakes(self) -> None:
        assert all(request.num_overtakes <= MAX_OVERTAKES for request in self.engine.scheduler.requests())

    def check_oldest_advances(self) -> None:
        """The first to arrive among the running ones never stands still for more than its turn takes."""
        running = [r for r in self.engine.scheduler.requests() if r.status is Status.RUNNING]
        oldest = running[0] if running else None
        computed = oldest.num_computed_tokens if oldest else 0
        same, last, since = self._oldest
        stands = oldest is same and computed == last
        self._oldest = (oldest, computed, since + 1 if stands else 0)
        limits = self.engine.limits
        assert oldest is None or self._oldest[2] <= 2 * limits.max_running // limits.token_budget + 4

    def finish(self) -> None:
        self.engine.drain()
        assert all(finished_well(request) for request in self.undisturbed)
        counters = self.engine.scheduler.counters
        assert counters.prefix_hits <= counters.prefix_queries
        for block in range(self.engine.pool.num_blocks):
            self.engine.pool.forget(block)
        assert self.engine.pool.num_cached == 0
        self.engine.scheduler.check_integrity()


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    token_budget=st.sampled_from([1, 2, 5, 16, 64]),
    max_running=st.integers(1, 9),
    num_blocks=st.integers(4, 40),
    page_size=st.sampled_from([1, 3, 4, 8]),
    caching=st.booleans(),
)
def test_random_traffic(
    seed: int, token_budget: int, max_running: int, num_blocks: int, page_size: int, caching: bool
) -> None:
    limits = SchedulerLimits(
        token_budget=token_budget,
        max_running=max_running,
        max_queued=20,
        page_size=page_size,
        enable_prefix_caching=caching,
    )
    traffic = Traffic(MockEngine(limits, num_blocks), random.Random(seed))
    for phase in range(3):
        for _ in range(25):
            traffic.step(arrival_rate=(0.5, 0.2, 0.05)[phase], disturb_rate=0.05)
    traffic.finish()


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    token_budget=st.sampled_from([1, 2, 5, 16, 64]),
    max_running=st.integers(1, 9),
    num_blocks=st.integers(4, 40),
    caching=st.booleans(),
    weights=st.tuples(*[st.sampled_from([0.1, 1.0, 5.0])] * 3),
    seconds=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_random_traffic_of_three_classes(
    seed: int,
    token_budget: int,
    max_running: int,
    num_blocks: int,
    caching: bool,
    weights: tuple[float, float, float],
    seconds: float,
) -> None:
    limits = SchedulerLimits(
        token_budget=token_budget, max_running=max_running, max_queued=20, page_size=4, enable_prefix_caching=caching
    )
    table = ClassTable.of(ServiceConfig(enabled=True, weights=weights))
    engine = MockEngine(limits, num_blocks, table, cost=lambda schedule: seconds)
    traffic = Traffic(engine, random.Random(seed), class_names=CLASS_NAMES)
    for phase in range(3):
        for _ in range(25):
            traffic.step(arrival_rate=(0.5, 0.2, 0.05)[phase], disturb_rate=0.05)
    traffic.finish()
    assert all(request.num_evictions <= 2 for request in traffic.accepted)
    assert all(request.num_evictions == 0 for request in traffic.accepted if request.rank == 0)


@pytest.mark.parametrize("seed", range(4))
def test_long_runs_of_three_classes_under_pressure(seed: int) -> None:
    limits = SchedulerLimits(token_budget=24, max_running=8, max_queued=40, page_size=4)
    table = ClassTable.of(ServiceConfig(enabled=True, slo_seconds=(2.0, 10.0, 60.0)))
    engine = MockEngine(limits, 26, table, cost=lambda schedule: 0.2)
    traffic = Traffic(engine, random.Random(seed), class_names=CLASS_NAMES)
    for _ in range(1200):
        traffic.step(arrival_rate=0.6, disturb_rate=0.03)
    traffic.finish()
    evictions = [counters.evictions for counters in engine.scheduler.shares.counters]
    assert evictions[0] == 0 and evictions[2] > 5, "the run was too easy to prove anything"
    assert sum(evictions) == sum(request.num_evictions for request in traffic.accepted)
    assert max(request.num_evictions for request in traffic.accepted) == 2


@pytest.mark.parametrize("seed", range(4))
def test_long_runs_under_pressure_see_everything(seed: int) -> None:
    limits = SchedulerLimits(token_budget=24, max_running=8, max_queued=40, page_size=4)
    traffic = Traffic(MockEngine(limits, 26), random.Random(seed))
    for _ in range(600):
        traffic.step(arrival_rate=0.35, disturb_rate=0.03)
    traffic.finish()
    counters = traffic.engine.scheduler.counters
    assert counters.preemptions > 10 and counters.prefix_hits > 500, "the run was too easy to prove anything"
    done = [r for r in traffic.undisturbed if r.num_preemptions == 0]
    assert len(done) > 100 and sum(r.num_cached_tokens > 0 for r in done) > 30


@pytest.mark.parametrize("seed", range(4))
def test_equals_start_in_order_among_others(seed: int) -> None:
    limits = SchedulerLimits(token_budget=16, max_running=6, max_queued=500, page_size=4, enable_prefix_caching=False)
    engine = MockEngine(limits, 40)
    chance = random.Random(seed)
    classes: dict[tuple[int, int], list[str]] = {}
    for i in range(250):
        if chance.random() < 0.4:
            length, count = chance.choice([3, 10, 25, 60]), chance.choice([2, 15])
            engine.add(f"{i}", [chance.randrange(2, 50) for _ in range(length)], count)
            classes.setdefault((length, count), []).append(f"{i}")
        engine.step()
    engine.drain()
    assert len(classes) == 8
    for names in classes.values():
        starts = [engine.first_step[name] for name in names]
        assert starts == sorted(starts)


def test_counters_add_up_whatever_happens() -> None:
    limits = SchedulerLimits(token_budget=24, max_running=6, max_queued=100, page_size=4)
    traffic = Traffic(MockEngine(limits, 24), random.Random(5))
    for _ in range(200):
        traffic.step(arrival_rate=0.3, disturb_rate=0.05)
    traffic.finish()
    counters, everyone = traffic.engine.scheduler.counters, traffic.accepted
    assert counters.generation_tokens == sum(r.num_output_tokens for r in everyone)
    assert counters.preemptions == sum(r.num_preemptions for r in everyone) > 0
    complete = [r for r in everyone if r.num_prompt_rows == r.num_prompt_tokens]
    assert counters.prompt_tokens == sum(r.num_prompt_tokens for r in complete)
    assert {r for r in everyone if r.num_output_tokens} <= set(complete) < set(everyone)
    assert counters.prefix_hits == sum(r.num_cached_tokens for r in everyone) > 0
