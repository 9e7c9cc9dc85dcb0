"""Moves of experts under what went wrong elsewhere: ranks late at random, slow copies, memory that was not planned."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_rank import CONFIG, SPEC
from test_rebalance import BYTES, EXPERTS, LAYERS, Bench
from thread_ranks import ThreadTransport

from coterie.engine.build import Share, build_engine
from coterie.engine.rebalance import CHUNK, Arrived, Attempt, Mover, RebalancePolicy, Units
from coterie.model.shard import ExpertShard
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import CoterieError
from coterie.spec.parallel import ParallelConfig

MANY = [20, pytest.param(200, marks=pytest.mark.slow)]


class Serving:
    """Ranks of a Bench on threads of their own, in lockstep by a control exchange, each late at random."""

    def __init__(self, bench: Bench, seed: int, cycles: int) -> None:
        self.cycles = cycles
        self.bench, self.commits = bench, [list[tuple[int, str]]() for _ in bench.ranks]
        self.largest, self.errors = 0, list[BaseException]()
        self._control = ThreadTransport.group(len(bench.ranks))
        self._loads = np.exp(np.random.default_rng(seed).normal(3, 1.5, (64, LAYERS, EXPERTS))).astype(int)
        self._random = [np.random.default_rng([seed, rank, 1]) for rank in range(len(bench.ranks))]
        for rank, (one, _, _) in enumerate(bench.ranks):
            self._delay(one._mover._transport, np.random.default_rng([seed, rank, 2]))

    def _delay(self, transport: Any, rng: np.random.Generator) -> None:
        gather, exchange = transport.all_gather, transport.all_to_all_v

        def late_gather(values: Any) -> Any:
            pause(rng)
            return gather(values)

        def late_exchange(rows: Any, sent: Any, received: Any) -> Any:
            pause(rng)
            self.largest = max(self.largest, *sent)
            return exchange(rows, sent, received)

        transport.all_gather, transport.all_to_all_v = late_gather, late_exchange

    def run(self) -> None:
        ranks = range(len(self._control))
        threads = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        assert not self.errors, self.errors

    def _serve(self, rank: int) -> None:
        try:
            one, _, load = self.bench.ranks[rank]
            for step in itertools.count():
                pause(self._random[rank])
                table = self._control[rank].all_gather(np.array([one.progress, one.cycles])).result()
                if table[:, 1].min() >= self.cycles:
                    return
                for layer, row in enumerate(self._loads[one.cycles % 64]):
                    load.record(layer, row)
                before = one.exchange.version
                one.after_step(int(table[:, 0].min()))
                assert one.failures == 0, one.last_failure
                if one.exchange.version != before:
                    self.commits[rank].append((step, one.exchange.placement.digest()))
        except BaseException as error:
            self.errors.append(error)


def pause(rng: np.random.Generator) -> None:
    """Mostly a moment, now and then as long as many steps."""
    time.sleep(rng.choice([0.0, 0.0, 0.0002, 0.001, 0.01], p=[0.5, 0.25, 0.2, 0.045, 0.005]))


@pytest.mark.parametrize("cycles", MANY)
def test_two_hundred_rebalances_of_ranks_that_are_late_at_random(cycles: int) -> None:
    """Nobody hangs, and every change comes at the same step on all ranks."""
    bench = Bench(4, 16, RebalancePolicy(steps=2, moves=5, rate=1e9))
    serving = Serving(bench, 1, cycles)
    serving.run()
    assert len(serving.commits[0]) > cycles, "most cycles changed layers"
    assert all(commits == serving.commits[0] for commits in serving.commits)
    assert CHUNK / 2 < serving.largest <= CHUNK, "no rank is sent more at once"
    bench.check()
    bench.stop()


class SlowBank:
    """A layer's experts [slots, bytes] that take their time to be written: the second half comes after a while."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.shape, self.writes = memory, memory.shape, 0

    def __getitem__(self, slot: int) -> np.ndarray:
        return self.memory[slot]

    def __setitem__(self, slot: int, unit: np.ndarray) -> None:
        half = len(unit) // 2
        self.memory[slot, :half] = unit[:half]
        time.sleep(0.002)
        self.memory[slot, half:] = unit[half:]
        self.writes += 1


def slow_bench() -> tuple[Bench, list[SlowBank]]:
    bench = Bench(2, 16, RebalancePolicy(steps=1, moves=3, rate=1e9))
    banks = []
    for _, memory, _ in bench.ranks:
        memory[:] = [SlowBank(layer) for layer in memory]  # type: ignore[list-item]
        banks += memory
    return bench, banks  # type: ignore[return-value]


def some_loads(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    while True:
        yield np.exp(rng.normal(3, 1.5, (LAYERS, EXPERTS))).astype(int)


@pytest.mark.parametrize("number", MANY)
def test_two_hundred_moves_with_slow_copies_leave_every_expert_whole(number: int) -> None:
    bench, banks = slow_bench()
    for cycle, load in enumerate(some_loads(0), 1):
        bench.run(load, cycle)
        bench.check()
        if sum(bank.writes for bank in banks) >= number:
            break
    assert sum(one.moved for one, _, _ in bench.ranks) >= number
    bench.stop()


def test_the_check_sees_buffers_that_are_filled_again_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the fault itself: a mover that does not wait until its buffers were copied."""

    def eager(self: Mover, attempt: Attempt, what: Arrived | None) -> None:
        with self._changed:
            attempt.ready.append(what)
            attempt.done += 1

    monkeypatch.setattr(Mover, "_deliver", eager)
    bench, _ = slow_bench()
    with pytest.raises(AssertionError):
        for cycle, load in zip(range(1, 60), some_loads(0), strict=False):
            bench.run(load, cycle)
            bench.check()
    bench.stop()


def test_moves_allocate_no_memory_for_experts() -> None:
    """Buffers are those of the start, whatever moves."""
    bench = Bench(4, 24, RebalancePolicy(steps=1, moves=5, rate=1e9))
    addresses = [one._units.buffers.ctypes.data for one, _, _ in bench.ranks]
    assert all(one._units.buffers.shape == (5, BYTES) for one, _, _ in bench.ranks)
    for cycle, load in zip(range(1, 6), some_loads(3), strict=False):
        bench.run(load, cycle)
    assert sum(one.moved for one, _, _ in bench.ranks) > 10
    assert [one._units.buffers.ctypes.data for one, _, _ in bench.ranks] == addresses
    bench.stop()


def test_balancedness_is_over_ranks_for_every_layer() -> None:
    """Two ranks with 100 and 200 rows are 0.75 balanced, in each layer; the other axis would say 1.0."""
    bench = Bench(2, 12, RebalancePolicy(steps=1, moves=1, rate=1e9))
    load = np.zeros((LAYERS, EXPERTS), int)
    load[:, 0], load[:, 6] = 100, 200
    load[2, 0] = 200
    bench.run(load, 1)
    for one, _, _ in bench.ranks:
        assert one.balancedness == {0: 0.75, 1: 0.75, 2: 1.0}
    bench.stop()


def test_buffers_are_counted_before_the_cache_is_sized() -> None:
    """Whoever moves experts has so much less cache, and not less memory at the first move."""
    config = replace(CONFIG, kv_cache_tokens=None, max_model_len=None)
    shard = ExpertShard.of(ParallelConfig(ep=2).placement(SPEC), SPEC, 0)
    pages, core = [], None
    for most_moves in (0, 8):
        core, _ = build_engine(shipped_model_path(), config, share=Share(shard, 100_000_000, most_moves))
        pages.append(core.scheduler.pool.num_blocks)
    assert core is not None
    model = core.runner.model
    buffers = Units.buffer_bytes(model.weights, SPEC, model.runtime.kernels, 8)
    assert Units.of(model.weights, SPEC, model.runtime.kernels, 8).buffers.nbytes == buffers
    slots = len(next(iter(shard.experts.values())))
    most = Units.of(model.weights, SPEC, model.runtime.kernels, 10**9).buffers  # not a terabyte: one for each slot
    assert len(most) == slots and most.nbytes == Units.buffer_bytes(model.weights, SPEC, model.runtime.kernels, 10**9)
    page = CONFIG.page_size * 960  # bytes of a token's latents, 6 layers in bf16
    assert abs((pages[0] - pages[1]) * page - config.mem_fraction_static * buffers) < 2 * page


def test_a_backend_whose_experts_cannot_be_moved_is_refused_when_it_loads() -> None:
    pytest.importorskip("torch")
    config = replace(CONFIG, backend="reference")
    shard = ExpertShard.of(ParallelConfig(ep=2).placement(SPEC), SPEC, 0)
    with pytest.raises(CoterieError, match="native backend only; use --rebalance-steps 0"):
        build_engine(shipped_model_path(), config, share=Share(shard, 1 << 40, 8))
