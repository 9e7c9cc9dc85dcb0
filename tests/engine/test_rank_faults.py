"""Lost ranks, on real processes: killed, hung, failing at once or one after another; nothing waits for ever.

The promise is EXPERT_PARALLEL 6.3's: what is in flight goes on with the same tokens or ends with an error that names
the rank within two seconds of the loss being known; the survivors serve; a restarted rank joins.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_ranks import PROMPTS, Running, params, together

from coterie.engine.errors import EngineDead, EngineRecovering
from coterie.engine.fleet import PATIENCE
from coterie.engine.fleet_place import MOST_MISSES
from coterie.engine.frontend import AsyncEngine
from coterie.engine.launch import Launch
from coterie.engine.messages import GroupStats
from coterie.engine.output import RequestOutput
from coterie.engine.process import StartedProcess
from coterie.engine.rank import BEAT_SECONDS, CONNECT_SECONDS

pytestmark = pytest.mark.slow

LONG = 160
SPARE = {"ep": 3, "redundant_experts": 16}
"""Any one of three ranks may be lost."""


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    from test_ranks import CONFIG

    engine = AsyncEngine.launch(None, CONFIG)

    async def main() -> list[list[int]]:
        try:
            return await together(engine, LONG)
        finally:
            await engine.shutdown(drain=True)

    return asyncio.run(main())


def group(running: Running) -> GroupStats:
    found = running.stats.group
    assert found is not None
    return found


def kill(running: Running, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(running.launch.processes[rank].child.pid, number)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "waited in vain"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def all_running(running: Running) -> None:
    await until(lambda: running.stats.num_running == len(PROMPTS) and running.stats.generation_tokens > 40)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_lost_rank_costs_no_request(rank: int, how: str, alone: list[list[int]]) -> None:
    running = Running(**SPARE, restart_ranks=False)

    async def work(engine: AsyncEngine) -> None:
        await engine.generate(PROMPTS[0], params(4))
        tasks = asyncio.create_task(together(engine, LONG))
        await all_running(running)
        kill(running, rank, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        began = time.monotonic()
        await until(lambda: engine.unavailable() is not None)
        known = time.monotonic() - began
        with pytest.raises(EngineRecovering, match=f"rank {rank}"):
            await engine.generate(PROMPTS[0], params(4))
        await until(engine.is_ready)
        again = time.monotonic() - began
        print(f"\nrank {rank} {how}: known after {known:.2f} s, serving after {again:.2f} s")
        assert await tasks == alone
        assert await together(engine, 8) == [tokens[:8] for tokens in alone]

    try:
        running.run(work)
        now = group(running)
        assert (now.faults, now.living, now.failed) == (1, 2, 0) and now.retried >= 1
        assert (now.experts_loaded > 0) == (rank == 0), "the last rank has copies only"
        assert now.ranks[rank].state == "lost"
        if how == "hung":
            assert now.detect_seconds >= MOST_MISSES * BEAT_SECONDS
        print(f"detect {now.detect_seconds:.3f} s, recover {now.recovery_seconds:.3f} s, loaded {now.experts_loaded}")
    finally:
        running.close()


def test_too_few_slots_end_requests_in_time_and_the_rank_comes_back(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Launch._restart

    def slow(self: Launch, rank: int) -> StartedProcess:
        time.sleep(4.0)
        return restart(self, rank)

    monkeypatch.setattr(Launch, "_restart", slow)
    running = Running(ep=2)

    async def work(engine: AsyncEngine) -> None:
        await engine.generate(PROMPTS[0], params(4))
        tasks = [asyncio.create_task(engine.generate(prompt, params(400))) for prompt in PROMPTS]
        await all_running(running)
        kill(running, 0)
        began = time.monotonic()
        outputs: list[RequestOutput] = await asyncio.gather(*tasks)
        assert time.monotonic() - began < PATIENCE + 2.0
        for output in outputs:
            (choice,) = output.outputs
            assert choice.finish_reason == "error"
            assert "rank 0 on node 0 was lost" in (choice.error or "") and "signal 9" in (choice.error or "")
        with pytest.raises(EngineRecovering, match="16 slots are missing: 1 of 2 ranks"):
            await engine.generate(PROMPTS[0], params(4))
        assert engine.is_alive() and not engine.is_ready()
        print(f"\nback after {await until(engine.is_ready):.1f} s")
        assert await together(engine, LONG) == alone

    try:
        running.run(work)
        now = group(running)
        assert (now.living, now.generation, now.failed) == (2, 2, len(PROMPTS))
    finally:
        running.close()


def test_a_restarted_rank_joins_while_the_others_serve(alone: list[list[int]]) -> None:
    running = Running(**SPARE)

    async def work(engine: AsyncEngine) -> None:
        await engine.generate(PROMPTS[0], params(4))
        tasks = asyncio.create_task(together(engine, LONG))
        await all_running(running)
        kill(running, 1)
        assert await tasks == alone
        while group(running).living < 3:
            assert await together(engine, 24) == [tokens[:24] for tokens in alone]
        assert await together(engine, LONG) == alone
        assert [rank.state for rank in group(running).ranks] == ["serving"] * 3
        assert group(running).failed == 0
        assert all(rank.num_running == 0 for rank in group(running).ranks)

    try:
        running.run(work)
    finally:
        running.close()


def test_a_hung_rank_with_full_buffers_holds_nobody_up(alone: list[list[int]]) -> None:
    """It reads no more messages: the front end must not wait in a `send` to it."""
    running = Running(**SPARE, restart_ranks=False)

    async def work(engine: AsyncEngine) -> None:
        await engine.generate(PROMPTS[0], params(4))
        kill(running, 1, signal.SIGSTOP)
        many = [engine.generate(PROMPTS[-1] * 6, params(2)) for _ in range(40)]
        outputs: list[RequestOutput] = await asyncio.gather(*many)
        assert all(output.outputs[0].token_ids == outputs[0].outputs[0].token_ids for output in outputs)
        assert await together(engine, 8) == [tokens[:8] for tokens in alone]

    try:
        wire = running.launch.processes[1].wire
        wire._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        running.run(work)
        assert group(running).ranks[1].state == "lost" and group(running).living == 2
    finally:
        running.close()


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_two_losses_one_after_the_other(pause: float, alone: list[list[int]]) -> None:
    """Four ranks with room for two losses; the second comes while the first is being dealt with. Only what had lost its
    rank before may end with an error, and nobody sits out the time that a meeting may take."""
    running = Running(ep=4, redundant_experts=32, restart_ranks=False)

    async def work(engine: AsyncEngine) -> None:
        await engine.generate(PROMPTS[0], params(4))
        tasks = [asyncio.create_task(engine.generate(prompt, params(LONG))) for prompt in PROMPTS]
        await all_running(running)
        kill(running, 3)
        await asyncio.sleep(pause)
        kill(running, 1)
        await until(lambda: group(running).living == 2, seconds=CONNECT_SECONDS / 2)
        outputs: list[RequestOutput] = await asyncio.gather(*tasks)
        for output, wanted in zip(outputs, alone, strict=True):
            (choice,) = output.outputs
            if choice.finish_reason == "error":
                assert "was lost" in (choice.error or "")
            else:
                assert choice.token_ids == wanted
        await until(engine.is_ready)
        assert sum(output.outputs[0].finish_reason == "error" for output in outputs) <= len(PROMPTS) // 2
        assert await together(engine, LONG) == alone

    try:
        running.run(work)
        assert group(running).living == 2 and group(running).faults == 2
    finally:
        running.close()


PATCH = """
import os, time
from pathlib import Path
from coterie.engine.runner import ModelRunner
run, order = ModelRunner.run, Path(os.environ["COTERIE_TEST_ORDER"])

def ordered(self, batch, *, micro_batches=1):
    found = order.read_text().split() if order.exists() else []
    if found and int(found[1]) == os.getpid():
        end = time.monotonic() + float(found[2])
        while time.monotonic() < end and order.exists():
            time.sleep(0.05)
            if found[0] == "works":
                self._kernels.norm(*[self._kernels.vector([1.0] * 64)] * 2, 1e-6)
        order.unlink(missing_ok=True)
    return run(self, batch, micro_batches=micro_batches)

ModelRunner.run = ordered
"""


@pytest.mark.parametrize("how", ["stuck", "works"])
def test_a_rank_whose_work_stands_still_is_lost_and_one_that_is_slow_is_not(
    how: str, alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hold the others up in a step for longer than a stall may be, and both processes give signs of life."""
    (tmp_path / "sitecustomize.py").write_text(PATCH)
    order = tmp_path / "order"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COTERIE_TEST_ORDER", str(order))
    running = Running(**SPARE, restart_ranks=False, stall_seconds=2.0)

    async def work(engine: AsyncEngine) -> None:
        await engine.generate(PROMPTS[0], params(4))
        tasks = asyncio.create_task(together(engine, LONG))
        await all_running(running)
        began = time.monotonic()
        order.with_suffix(".new").write_text(f"{how} {running.launch.processes[1].child.pid} 6")
        order.with_suffix(".new").rename(order)
        if how == "stuck":
            await until(lambda: engine.unavailable() is not None)
            assert 2.0 <= time.monotonic() - began < 5.0
            assert "rank 1" in str(engine.unavailable()) and "its work stood still for" in str(engine.unavailable())
        assert await tasks == alone
        if how == "works":
            assert time.monotonic() - began >= 6.0

    try:
        running.run(work)
        assert group(running).faults == (how == "stuck") and group(running).living == (2 if how == "stuck" else 3)
        assert how == "works" or group(running).detect_seconds >= 2.0
    finally:
        running.close()


def test_the_last_rank_ends_the_engine() -> None:
    running = Running(ep=2, restart_ranks=False)

    async def work(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate(PROMPTS[0], params(400)))
        await until(lambda: engine.stats() is not None and running.stats.num_running == 1)
        kill(running, 0)
        kill(running, 1)
        with pytest.raises(EngineDead, match="was lost"):
            await task
        assert not engine.is_alive()

    try:
        running.run(work)
    finally:
        running.close()


def test_a_dead_front_end_leaves_no_process(tmp_path: Any) -> None:
    """Ranks end when their front end does, wherever they are."""
    import subprocess
    import sys

    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_ranks import Running\n"
        "running = Running(ep=2)\n"
        "print(*(process.child.pid for process in running.launch.processes), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in found.stdout.split()]
    assert len(pids) == 2, found.stderr
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end, "a rank outlives its front end"
        time.sleep(0.05)
