"""When requests are sent: at times drawn beforehand (open loop), at most so many at once (closed loop), or both.

Arrivals never wait for answers: the times are fixed before the first request, and how late each was sent is kept, so a
client that could not keep up is seen. Stopping early gives what there is. Not here: one request (`loadgen.client`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import numpy as np

from coterie.loadgen.client import Client, Prompt, Record

LEAD_SECONDS = 0.01
"""Between making the tasks and the first arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """`rate`: requests a second, inf for all at once. `burstiness`: 1 is a Poisson process, less comes in bursts,
    more is steadier. `max_concurrency`: requests in flight; None: no bound. `timeout`: seconds of one request."""

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    timeout: float | None = None
    seed: int = 0

    def times(self, count: int) -> list[float]:
        """Seconds from the start at which `count` requests are due; gamma-distributed gaps."""
        if math.isinf(self.rate):
            return [0.0] * count
        random = np.random.default_rng([self.seed, 1])
        scale = 1.0 / (self.rate * self.burstiness)
        return np.cumsum(random.gamma(self.burstiness, scale, size=count)).tolist()


@dataclass(slots=True)
class Load:
    """A run while it goes and when it is over. Times are monotonic; `records` are of requests that were sent."""

    total: int
    started: float = 0.0
    ended: float = 0.0
    interrupted: bool = False
    records: list[Record] = field(default_factory=list)
    running: int = 0
    done: int = 0
    failed: int = 0
    news: int = 0

    def note_news(self, record: Record) -> None:
        """A piece of news came."""
        self.news += 1


async def run_load(
    client: Client, prompts: Sequence[Prompt], arrivals: Arrivals, *, load: Load | None = None,
    stop: asyncio.Event | None = None,
) -> Load:  # fmt: skip
    """Send every prompt at its time and wait for the answers, or until `stop`. `load` may be watched meanwhile."""
    load = load or Load(len(prompts))
    gate = None if arrivals.max_concurrency is None else asyncio.Semaphore(arrivals.max_concurrency)
    load.started = time.monotonic() + LEAD_SECONDS
    due = [load.started + offset for offset in arrivals.times(len(prompts))]
    sending = asyncio.create_task(_send_all(client, prompts, due, arrivals, gate, load))
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        load.interrupted = not sending.done()
        for task in (sending, stopping):
            task.cancel()
        await asyncio.wait({sending, stopping})
        load.ended = time.monotonic()
        client.pool.close()
    if not sending.cancelled() and (failure := sending.exception()) is not None:
        raise failure.exceptions[0] if isinstance(failure, BaseExceptionGroup) else failure
    return load


async def _send_all(
    client: Client, prompts: Sequence[Prompt], due: list[float], arrivals: Arrivals,
    gate: asyncio.Semaphore | None, load: Load,
) -> None:  # fmt: skip
    """Start a task for every prompt when it is due, and wait for all of them."""
    async with asyncio.TaskGroup() as group:
        for index, (prompt, when) in enumerate(zip(prompts, due, strict=True)):
            if (wait := when - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            group.create_task(_one(client, prompt, Record(index, when), arrivals, gate, load))


async def _one(
    client: Client, prompt: Prompt, record: Record, arrivals: Arrivals, gate: asyncio.Semaphore | None, load: Load
) -> None:
    async with AsyncExitStack() as stack:
        if gate is not None:
            await stack.enter_async_context(gate)
        load.records.append(record)
        load.running += 1
        try:
            async with asyncio.timeout(arrivals.timeout):
                await client.stream(prompt, record, load.note_news)
        except TimeoutError:
            record.error, record.said = "timeout", f"no end after {arrivals.timeout:g} s"
        except asyncio.CancelledError:
            record.cancelled = True
            raise
        finally:
            record.end = record.end or time.monotonic()
            load.running -= 1
        load.done += 1
        load.failed += record.error is not None
