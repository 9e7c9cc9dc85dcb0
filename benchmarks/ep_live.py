"""A serving group of ranks while a rank is killed, and while experts move: recovery time, time between tokens.

    python benchmarks/ep_live.py MODEL --kill [--ranks 3 --redundant 32]
    python benchmarks/ep_live.py MODEL --moves [--ranks 2 --redundant 8] [--rate 32 --rate 200]

MODEL is a folder; a synthetic one of a released shape comes from make_checkpoint.py and `coterie quantize`. The ranks
are processes of this machine behind the front end, as `coterie serve --ep` starts them; streams of greedy requests run
all the while. Printed are the seconds from the kill to the fault being known, to serving again and to the next token,
experts read from the files, and whether the tokens are those of an undisturbed run; with --moves, between two tokens of
a stream (a step, seen by a client): median and longest, without moves and with, in turns, and what moved.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine
from coterie.engine.launch import Launch, RunSpec
from coterie.engine.messages import FromEngine, GroupStats, Output, SamplingParams, Stats
from coterie.spec.parallel import ParallelConfig

WARM_TOKENS = 24


class Group:
    """Ranks behind a front end on an event loop of its own."""

    def __init__(self, model: str, given: argparse.Namespace, **layout: Any) -> None:
        config = EngineConfig(threads=1, kv_cache_tokens=8192, max_model_len=2048, chunked_prefill_size=256)
        began = time.monotonic()
        run = RunSpec(parallel=ParallelConfig(ep=given.ranks, redundant_experts=given.redundant, **layout))
        self.launch = Launch(model, config, run)
        self.engine = AsyncEngine(self.launch.load(), "ranks")
        self.arrivals: dict[str, list[float]] = {}
        self._deliver, closed = self.engine.callbacks()
        self.engine.connect(self.launch.start(self._note, closed))
        self.start_seconds = time.monotonic() - began
        self.runner = asyncio.Runner()
        vocabulary = self.launch._files.num_generated_ids
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(2, vocabulary, 64).tolist() for _ in range(given.streams)]

    @property
    def stats(self) -> Stats:
        """The engine's last word."""
        found = self.engine.stats()
        assert found is not None
        return found

    @property
    def group(self) -> GroupStats:
        """The ranks' part of it."""
        assert self.stats.group is not None
        return self.stats.group

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run something on the loop."""
        return self.runner.run(work())

    def close(self) -> None:
        """End all."""
        self.runner.run(self.engine.shutdown(drain=False))
        self.runner.close()

    def _note(self, messages: list[FromEngine]) -> None:
        """Pass messages to the front end, and keep when each token came."""
        now = time.monotonic()
        for message in messages:
            if isinstance(message, Output) and message.token_ids:
                self.arrivals.setdefault(message.request_id, []).append(now)
        self._deliver(messages)

    async def all_streams(self, length: int) -> tuple[list[list[int]], list[list[float]]]:
        """All prompts at once, greedily: each one's tokens, and the times at which tokens came by request."""
        self.arrivals.clear()
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        found = await asyncio.gather(*(self.engine.generate(prompt, params) for prompt in self.prompts))
        return [output.outputs[0].token_ids for output in found], list(self.arrivals.values())


@contextmanager
def serving(model: str, given: argparse.Namespace, **layout: Any) -> Any:
    """A group that is closed at the end."""
    group = Group(model, given, **layout)
    try:
        yield group
    finally:
        group.close()


def steps(arrivals: list[list[float]]) -> list[tuple[float, float]]:
    """Times of each two neighbouring tokens of a stream; the first ones, with prompts in the steps, are left out."""
    return [pair for times in arrivals for pair in pairwise(times[4:])]


def kill(given: argparse.Namespace, console: Console) -> None:
    """Kill each chosen rank once, of a fresh group each."""
    table = Table("rank", "known s", "serving s", "next token s", "experts moved", "read", "longest gap s",
                  "median ms before", "median ms after", "tokens", "back s",
                  title=f"{given.ranks} ranks, {given.redundant} redundant, {given.streams} streams")  # fmt: skip
    for rank in given.rank or [0, given.ranks - 1]:
        with serving(given.model, given, **(_moving(given, 32.0) if given.moves else {})) as group:
            table.add_row(str(rank), *group.run(lambda: _kill(group, rank, given.tokens)))  # noqa: B023
            console.print(f"started in {group.start_seconds:.1f} s")
    console.print(table)


async def _kill(group: Group, rank: int, length: int) -> list[str]:
    expected, _ = await group.all_streams(length)
    task = asyncio.create_task(group.all_streams(length))
    begun = group.stats.generation_tokens
    while group.stats.generation_tokens < begun + len(group.prompts) * length // 3:
        await asyncio.sleep(0.005)
    moved, began = group.stats.experts_moved, time.monotonic()
    os.kill(group.launch.processes[rank].child.pid, signal.SIGKILL)
    while group.engine.unavailable() is None:
        await asyncio.sleep(0.001)
    known = time.monotonic() - began
    while not group.engine.is_ready():
        await asyncio.sleep(0.001)
    again = time.monotonic() - began
    tokens, arrivals = await task
    first = min(moment for times in arrivals for moment in times if moment > began + again) - began
    longest = max(b - a for a, b in steps(arrivals))
    before = [1e3 * (b - a) for a, b in steps(arrivals) if b < began]
    after = [1e3 * (b - a) for a, b in steps(arrivals) if a > began + again]
    same = "the same" if tokens == expected else "DIFFER"
    while group.group.living < len(group.launch.processes):
        await asyncio.sleep(0.05)
    loaded = group.group.experts_loaded  # a rank that comes back loads its own before it joins
    return [f"{known:.3f}", f"{again:.2f}", f"{first:.2f}", str(moved), str(loaded), f"{longest:.2f}",
            f"{statistics.median(before):.0f}", f"{statistics.median(after):.0f}", same,
            f"{time.monotonic() - began:.1f}"]  # fmt: skip


def _moving(given: argparse.Namespace, rate: float) -> dict[str, Any]:
    return {"rebalance_steps": given.steps, "rebalance_moves": given.moves_at_once, "rebalance_rate": rate}


def moves(given: argparse.Namespace, console: Console) -> None:
    """Groups that differ in whether and how fast experts move, in turns; those that are not asked sleep."""
    table = Table("moves", "median ms", "p99 ms", "longest ms", "longest / median", "experts moved", "cycles",
                  title=f"{given.ranks} ranks, {given.redundant} redundant, {given.streams} streams")  # fmt: skip
    groups = {"none": Group(given.model, given)}
    for rate in given.rate or [32.0]:
        groups[f"every {given.steps} steps, {rate:g} MB/s"] = Group(given.model, given, **_moving(given, rate))
    found: dict[str, list[float]] = {name: [] for name in groups}
    tokens: list[list[int]] = []
    try:
        for group in groups.values():
            group.run(lambda: group.all_streams(WARM_TOKENS))  # noqa: B023
        for _ in range(given.rounds):
            for name, group in groups.items():
                own, arrivals = group.run(lambda: group.all_streams(given.tokens))  # noqa: B023
                found[name] += [1e3 * (b - a) for a, b in steps(arrivals)]
                tokens = tokens or own
                if tokens != own:
                    raise AssertionError(f"{name}: the tokens differ")
        for name, group in groups.items():
            values, stats = np.array(found[name]), group.stats
            median = float(np.median(values))
            table.add_row(name, f"{median:.1f}", f"{np.percentile(values, 99):.1f}", f"{values.max():.1f}",
                          f"{values.max() / median:.2f}", str(stats.experts_moved), str(stats.move_cycles))  # fmt: skip
            if stats.moves_failed:
                raise AssertionError(f"{name}: moving failed {stats.moves_failed} times")
    finally:
        for group in groups.values():
            group.close()
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kill", action="store_true", help="with --moves: while experts move")
    parser.add_argument("--moves", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="of each stream")
    parser.add_argument("--rank", type=int, action="append", help="to kill; default the first and the last")
    parser.add_argument("--steps", type=int, default=20, help="between two decisions")
    parser.add_argument("--moves-at-once", type=int, default=4)
    parser.add_argument("--rate", type=float, action="append", help="MB/s of moving experts; default 32")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    console = Console(width=150)
    if given.kill:
        kill(given, console)
    elif given.moves:
        moves(given, console)


if __name__ == "__main__":
    main()
