"""Experts move between ranks while they serve, and no token changes; what goes wrong leaves them where they are."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from test_rank import PROMPTS, Ranks, alone  # noqa: F401
from test_ranks import Running, together
from thread_ranks import ThreadTransport

from coterie.comm.exchange import Exchange
from coterie.comm.mesh import Mesh
from coterie.comm.transport import Transport, TransportError
from coterie.engine.fleet_table import ExpertTable
from coterie.engine.frontend import AsyncEngine
from coterie.engine.rebalance import RebalancePolicy, Rebalancer, Units, plan_moves
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
    assert all(one is not None and one.failures == 0 and one.cycles > 0 for one in movers)
    assert sum(one.moved for one in movers if one is not None) > 0


@pytest.mark.parametrize("told", [True, False])
def test_a_generation_after_moves_serves_what_it_says(told: bool, alone: list[list[int]]) -> None:  # noqa: F811
    """Nothing is loaded again if the front end has heard of the moves; else what it believes that ranks still have."""
    ranks = Ranks(3, 16, ALWAYS)
    if told:
        for rank in ranks.ranks:
            rank.on_moved = ranks.note(rank.number)
    ranks.form(range(3))
    for index, prompt in enumerate(PROMPTS):
        ranks.add(0, f"p{index}", prompt)
    ranks.drain(range(3))
    moved = sum(rank.rebalancer.moved for rank in ranks.ranks if rank.rebalancer is not None)
    assert moved > 0
    for thread in ranks.threads:
        thread.loop._draining = False
    assert (sum(ranks.form(range(3))) > 0) == (not told)
    for index, prompt in enumerate(PROMPTS):
        ranks.add(index % 3, f"q{index}", prompt)
    ranks.drain(range(3))
    assert [ranks.threads[index % 3].tokens(f"q{index}") for index in range(len(PROMPTS))] == alone


class Bench:
    """Rebalancers of some ranks without a model: units whose bytes say which expert they are."""

    def __init__(
        self, size: int, num_slots: int, policy: RebalancePolicy, transports: Sequence[Transport] = ()
    ) -> None:
        placement = ExpertPlacement.linear(LAYERS, EXPERTS, size, num_slots=num_slots)
        self.placement, self.ranks = placement, []
        control = ThreadTransport.group(size)
        for rank, transport in enumerate(transports or ThreadTransport.group(size)):
            row = placement.slot_to_expert[:, placement.slots_of_rank(rank)]
            memory = [np.stack([self.unit(layer, expert) for expert in row[layer]]) for layer in range(LAYERS)]
            units = Units(memory, np.zeros((policy.moves, BYTES), np.uint8))
            load = ExpertLoad(list(range(LAYERS)), EXPERTS, np.asarray)
            exchange = Exchange(Mesh.of(control[rank], placement.node_of_rank), placement)
            self.ranks.append((Rebalancer(policy, transport, exchange, (units, load)), memory, load))

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

    def run(self, counts: np.ndarray, cycles: int, failures: int = 0) -> None:
        deadline = time.monotonic() + 30
        while min(one.cycles for one, _, _ in self.ranks) < cycles:
            assert time.monotonic() < deadline, "a cycle hangs"
            assert all(one.failures == failures for one, _, _ in self.ranks)
            self.step(counts)
            time.sleep(0.001)

    def fail(self, counts: np.ndarray, failures: int) -> None:
        """Steps until all have given up so often."""
        deadline = time.monotonic() + 30
        while min(one.failures for one, _, _ in self.ranks) < failures:
            assert time.monotonic() < deadline, "a failure is not noticed"
            self.step(counts)
            time.sleep(0.001)
        assert {one.failures for one, _, _ in self.ranks} == {failures}, "all give up after the same step"

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


HOT = np.where(np.arange(EXPERTS) < 6, 100, 1) * np.ones((LAYERS, 1), int)


def test_a_damaged_expert_is_not_used_and_the_next_cycle_moves() -> None:
    bench = Bench(2, 12, RebalancePolicy(steps=1, moves=4, rate=1e9))
    mover = bench.ranks[0][0]._mover
    exchange = mover._transport.all_to_all_v

    def flip(rows: np.ndarray, *rest: Any) -> Any:
        rows = rows.copy()
        if len(rows):
            rows[len(rows) // 2] ^= 1
        return exchange(rows, *rest)

    mover._transport.all_to_all_v = flip  # type: ignore[method-assign]
    bench.fail(HOT, 1)
    assert any("arrived damaged" in str(one.last_failure) for one, _, _ in bench.ranks)
    bench.check()
    assert sum(one.moved for one, _, _ in bench.ranks) == 0, "the old placement serves on"
    bench.run(HOT, 1, failures=1)
    bench.check()
    assert sum(one.moved for one, _, _ in bench.ranks) > 0
    bench.stop()


def over_gloo(size: int) -> tuple[Any, list[Transport]]:
    """Real groups between threads of this process, and the store where they meet."""
    from coterie.comm.torch_dist import GroupSpec, StoreHost, connect

    host = StoreHost()
    with ThreadPoolExecutor(size) as pool:
        spec = [GroupSpec(rank, size, purpose="weights", timeout=10.0) for rank in range(size)]
        return host, list(pool.map(lambda one: connect(host.address, one), spec))


@pytest.mark.parametrize("kind", ["threads", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_stuck_peer_is_given_up_in_time_and_moving_goes_on(
    kind: str, layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1's thread stops before the chunks of a layer: whole layers have moved, the rest is tried again."""
    policy = RebalancePolicy(steps=1, moves=4, rate=1e9, patience=0.3)
    host, transports = (None, []) if kind == "threads" else over_gloo(2)
    bench = Bench(2, 12, policy, transports)
    mover, blocked, begun = bench.ranks[1][0]._mover, threading.Event(), threading.Event()
    exchange, chunks = mover._exchange, []

    def stuck(*args: Any) -> None:
        chunks.append(args)
        if len(chunks) == layer + 1:
            begun.set()
            assert blocked.wait(30)
        exchange(*args)

    mover._exchange = stuck  # type: ignore[method-assign]
    bench.step(HOT)
    while not begun.is_set():
        bench.step(HOT)
        time.sleep(0.001)
    began = time.monotonic()
    bench.fail(HOT, 1)
    assert time.monotonic() - began < 5
    assert any("moving experts failed" in record.message for record in caplog.records)
    bench.check()
    assert (bench.ranks[0][0].moved > 0) == (layer > 0), "whole layers have moved, and nothing else"
    bench.fail(HOT, 2)  # rank 1 is stuck still
    blocked.set()
    deadline = time.monotonic() + 30
    while not all(one.cycles for one, _, _ in bench.ranks):
        assert time.monotonic() < deadline, "moving does not go on"
        bench.step(HOT)
        time.sleep(0.001)
    bench.check()
    assert sum(one.moved for one, _, _ in bench.ranks) > 0
    bench.stop()
    del host


def test_attempts_that_fail_in_a_row_wait_longer_each_time() -> None:
    bench = Bench(2, 12, RebalancePolicy(steps=2, moves=4, rate=1e9))
    broken = bench.ranks[0][0]._mover

    def refuse(*args: Any) -> None:
        raise TransportError("no")

    broken._exchange = refuse  # type: ignore[method-assign]
    waited = []
    for failures in range(1, 10):
        bench.fail(HOT, failures)
        waited.append(bench.ranks[0][0].policy.steps - bench.ranks[0][0]._steps)
    assert waited == [2, 4, 8, 16, 32, 64, 128, 128, 128]
    bench.stop()


def test_ranks_tell_what_they_hold() -> None:
    bench = Bench(2, 12, RebalancePolicy(steps=1, moves=4, rate=1e9))
    told = ExpertTable(bench.placement.slot_to_expert, 2, EXPERTS)
    for rank, (one, _, _) in enumerate(bench.ranks):
        one._installed = lambda layer, row, rank=rank: told.moved(rank, layer, row.tolist())  # type: ignore[misc]
    bench.run(HOT, 2)
    placement = bench.ranks[0][0].exchange.placement
    assert (told.slots == placement.slot_to_expert).all()
    assert (told.slots != bench.placement.slot_to_expert).any()
    bench.stop()


def test_the_rate_is_kept() -> None:
    bench = Bench(2, 12, RebalancePolicy(steps=1, moves=4, rate=BYTES * 20.0))
    began = time.monotonic()
    bench.run(HOT, 1)
    sent = max(one.moved for one, _, _ in bench.ranks)
    assert time.monotonic() - began > (sent - 2) / 20
    bench.stop()


def test_stop_ends_the_thread_while_it_waits() -> None:
    before = threading.active_count()
    bench = Bench(2, 12, RebalancePolicy(steps=1, moves=4, rate=1.0))
    bench.step(HOT)
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
