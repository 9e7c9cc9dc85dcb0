"""Experts move between ranks while they serve, and no token changes; what goes wrong leaves them where they are."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from test_rank import PROMPTS, Ranks, alone  # noqa: F401
from test_ranks import Running, together
from thread_ranks import ThreadTransport

from coterie.comm.exchange import Exchange
from coterie.comm.mesh import Mesh
from coterie.engine.frontend import AsyncEngine
from coterie.engine.rebalance import FAILED, RebalancePolicy, Rebalancer, Units, plan_moves
from coterie.observe.expert_load import ExpertLoad
from coterie.spec.placement import ExpertPlacement

ALWAYS = RebalancePolicy(steps=1, moves=6, rate=1e9)
LAYERS, EXPERTS, BYTES = 3, 12, 70_000


@pytest.mark.parametrize(("size", "redundant"), [(2, None), (2, 4), (4, 12)])
def test_tokens_are_those_of_one_rank_with_rebalancing_at_every_step(
    size: int,
    redundant: int | None,
    alone: list[list[int]],  # noqa: F811
) -> None:
    ranks = Ranks(size, redundant, ALWAYS)
    ranks.form(range(size))
    before = [rank.core.runner.model.runtime.exchange.placement.digest() for rank in ranks.ranks]
    for turn in range(4):
        for index, prompt in enumerate(PROMPTS):
            ranks.add((index + turn) % size if turn else 0, f"p{index}.{turn}", prompt)
        time.sleep(0.05)
    ranks.drain(range(size))
    for turn in range(4):
        for index, tokens in enumerate(alone):
            rank = (index + turn) % size if turn else 0
            assert ranks.threads[rank].tokens(f"p{index}.{turn}") == tokens
    digests = {rank.core.runner.model.runtime.exchange.placement.digest() for rank in ranks.ranks}
    assert len(digests) == 1, "all ranks have the same placement"
    assert digests != set(before)
    movers = [rank.rebalancer for rank in ranks.ranks]
    assert all(one is not None and one.failure is None and one.cycles > 0 for one in movers)
    assert sum(one.moved for one in movers if one is not None) > 0


def test_a_generation_after_moves_serves_what_it_says(alone: list[list[int]]) -> None:  # noqa: F811
    """The front end does not know of moves: ranks load again what its table wants and they no longer have."""
    ranks = Ranks(3, 16, ALWAYS)
    ranks.form(range(3))
    for index, prompt in enumerate(PROMPTS):
        ranks.add(0, f"p{index}", prompt)
    ranks.drain(range(3))
    moved = sum(rank.rebalancer.moved for rank in ranks.ranks if rank.rebalancer is not None)
    assert moved > 0
    for thread in ranks.threads:
        thread.loop._draining = False
    assert sum(ranks.form(range(3))) > 0
    for index, prompt in enumerate(PROMPTS):
        ranks.add(index % 3, f"q{index}", prompt)
    ranks.drain(range(3))
    assert [ranks.threads[index % 3].tokens(f"q{index}") for index in range(len(PROMPTS))] == alone


class Bench:
    """Rebalancers of some ranks without a model: units whose bytes say which expert they are."""

    def __init__(self, size: int, num_slots: int, policy: RebalancePolicy) -> None:
        placement = ExpertPlacement.linear(LAYERS, EXPERTS, size, num_slots=num_slots)
        self.placement, self.ranks = placement, []
        control = ThreadTransport.group(size)
        for rank, transport in enumerate(ThreadTransport.group(size)):
            row = placement.slot_to_expert[:, placement.slots_of_rank(rank)]
            memory = [np.stack([self.unit(layer, expert) for expert in row[layer]]) for layer in range(LAYERS)]
            units = Units(memory, np.zeros((policy.moves, BYTES), np.uint8))
            load = ExpertLoad(list(range(LAYERS)), EXPERTS, np.asarray)
            exchange = Exchange(Mesh.of(control[rank], placement.node_of_rank), placement)
            self.ranks.append((Rebalancer(policy, transport, exchange, units, load), memory, load))

    @staticmethod
    def unit(layer: int, expert: int) -> np.ndarray:
        return np.random.default_rng([layer, expert]).integers(0, 256, BYTES).astype(np.uint8)

    def step(self, counts: np.ndarray) -> None:
        """One step of all ranks, each with counts [L, E]."""
        least = min(one.progress for one, _, _ in self.ranks)
        for one, _, load in self.ranks:
            for layer, row in enumerate(counts):
                load.record(layer, row)
            one.after_step(least)

    def run(self, counts: np.ndarray, cycles: int) -> None:
        deadline = time.monotonic() + 30
        while min(one.cycles for one, _, _ in self.ranks) < cycles:
            assert time.monotonic() < deadline, "a cycle hangs"
            assert all(one.failure is None for one, _, _ in self.ranks)
            self.step(counts)
            time.sleep(0.001)

    def check(self) -> None:
        digests = {one.exchange.placement.digest() for one, _, _ in self.ranks}
        assert len(digests) == 1
        for rank, (one, memory, _) in enumerate(self.ranks):
            table = one.exchange.placement.slot_to_expert[:, self.placement.slots_of_rank(rank)]
            for layer in range(LAYERS):
                for slot, expert in enumerate(table[layer]):
                    assert (memory[layer][slot] == self.unit(layer, int(expert))).all()

    def stop(self) -> None:
        for one, _, _ in self.ranks:
            one.stop()


@pytest.mark.parametrize("slots", [12, 16, 24])
def test_weights_and_table_agree_after_many_cycles(slots: int) -> None:
    rng = np.random.default_rng(slots)
    bench = Bench(4, slots, RebalancePolicy(steps=2, moves=5, rate=1e9))
    for cycle in range(1, 13):
        bench.run(np.round(np.exp(rng.normal(3, 1.5, (LAYERS, EXPERTS)))).astype(int), cycle)
        bench.check()
    assert sum(one.moved for one, _, _ in bench.ranks) > 10
    bench.stop()


def test_a_balanced_load_moves_nothing() -> None:
    bench = Bench(4, 12, RebalancePolicy(steps=1, moves=5, rate=1e9))
    bench.run(np.full((LAYERS, EXPERTS), 100), 5)
    assert sum(one.moved for one, _, _ in bench.ranks) == 0
    assert bench.ranks[0][0].exchange.version == 0
    bench.stop()


def test_a_damaged_expert_is_not_used() -> None:
    bench = Bench(2, 12, RebalancePolicy(steps=1, moves=4, rate=1e9))
    mover = bench.ranks[0][0]._mover
    exchange = mover._transport.all_to_all_v

    def flip(rows: np.ndarray, *rest: Any) -> Any:
        rows = rows.copy()
        if len(rows):
            rows[len(rows) // 2] ^= 1
        return exchange(rows, *rest)

    mover._transport.all_to_all_v = flip  # type: ignore[method-assign]
    hot = np.ones((LAYERS, EXPERTS), int)
    hot[:, :6] = 100
    deadline = time.monotonic() + 30
    while any(one.failure is None for one, _, _ in bench.ranks):
        assert time.monotonic() < deadline
        bench.step(hot)
        time.sleep(0.001)
    assert any("arrived damaged" in str(one.failure) for one, _, _ in bench.ranks)
    assert {one.progress for one, _, _ in bench.ranks} == {FAILED}
    bench.check()
    assert sum(one.moved for one, _, _ in bench.ranks) == 0, "the old placement serves on"
    bench.step(hot)


def test_the_rate_is_kept() -> None:
    bench = Bench(2, 12, RebalancePolicy(steps=1, moves=4, rate=BYTES * 20.0))
    hot = np.ones((LAYERS, EXPERTS), int)
    hot[:, :6] = 100
    began = time.monotonic()
    bench.run(hot, 1)
    sent = max(one.moved for one, _, _ in bench.ranks)
    assert time.monotonic() - began > (sent - 2) / 20
    bench.stop()


def test_stop_ends_the_thread_while_it_waits() -> None:
    before = threading.active_count()
    bench = Bench(2, 12, RebalancePolicy(steps=1, moves=4, rate=1.0))
    hot = np.ones((LAYERS, EXPERTS), int)
    hot[:, :6] = 100
    bench.step(hot)
    time.sleep(0.1)
    bench.stop()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sources_are_near_and_shared_out() -> None:
    before = ExpertPlacement(np.array([[0, 1, 2, 3, 0, 4, 5, 1]]), 6, 4, 2)
    after = ExpertPlacement(np.array([[0, 1, 0, 3, 2, 4, 5, 1]]), 6, 4, 2)
    moves = {move.target: (move.expert, move.source) for move in plan_moves(before, after, 0)}
    assert moves == {2: (0, 0), 4: (2, 2)}


@pytest.mark.slow
def test_ranks_that_are_processes(caplog: pytest.LogCaptureFixture) -> None:
    running = [Running(ep=2, **layout) for layout in ({}, {"redundant_experts": 8, "rebalance_steps": 1})]
    try:
        plain, moving = (one.run(lambda engine: together(engine, 48)) for one in running)
        assert moving == plain
        again = running[1].run(lambda engine: together(engine, 48))
        assert again == plain
        assert running[1].stats.experts_moved > 0
        assert running[1].stats.moves_failed == 0
    finally:
        for one in running:
            one.close()


@pytest.mark.slow
def test_a_rank_that_is_lost_while_experts_move_costs_no_token() -> None:
    running = Running(ep=3, redundant_experts=16, rebalance_steps=1, restart_ranks=False)

    async def work(engine: AsyncEngine) -> None:
        expected = await together(engine, 64)
        tasks = asyncio.create_task(together(engine, 64))
        begun = running.stats.generation_tokens
        while running.stats.generation_tokens < begun + 40:
            await asyncio.sleep(0.01)
        running.launch.processes[1].child.kill()
        assert await tasks == expected
        assert await together(engine, 64) == expected

    try:
        running.run(work)
        assert running.stats.group is not None
        assert (running.stats.group.faults, running.stats.group.living) == (1, 2)
        assert running.stats.experts_moved > 0
    finally:
        running.close()
