"""Runs a function as N rank processes on loopback and gives their results; always ends them. Used by tests only.

Processes are forked from a server that has torch loaded, so a group starts in a fraction of a second. A function is
called as `work(address, rank, size, *args)`; what it returns (or raises, as text) comes back through a queue.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from typing import Any

from coterie.comm.torch_dist import StoreAddress, StoreHost

PRELOAD = ["torch", "torch.distributed", "coterie.comm.torch_dist", "coterie.kernels.native", "psutil"]


def _call(results: Any, work: Callable[..., Any], address: StoreAddress, rank: int, size: int, args: tuple) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, True, work(address, rank, size, *args)))
    except BaseException as error:
        results.put((rank, False, f"{type(error).__name__}: {error}"))


def run_ranks(
    size: int, work: Callable[..., Any], *args: Any, missing: tuple[int, ...] = (), seconds: float = 60.0
) -> list[Any]:
    """Results by rank. `missing` ranks are expected to end without one (None). A rank's error fails the caller."""
    outcomes = outcomes_of_ranks(size, work, *args, missing=missing, seconds=seconds)
    for rank, outcome in enumerate(outcomes):
        if outcome is not None and not outcome[0]:
            raise AssertionError(f"rank {rank}: {outcome[1]}")
    return [None if outcome is None else outcome[1] for outcome in outcomes]


def outcomes_of_ranks(
    size: int, work: Callable[..., Any], *args: Any, missing: tuple[int, ...] = (), seconds: float = 60.0
) -> list[tuple[bool, Any] | None]:
    """(succeeded, result or error text) by rank, None for those of `missing`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    host, results = StoreHost(), context.Queue()
    ranks = [
        context.Process(target=_call, args=(results, work, host.address, rank, size, args), daemon=True)
        for rank in range(size)
    ]
    outcomes: list[tuple[bool, Any] | None] = [None] * size
    deadline = time.monotonic() + seconds
    try:
        for process in ranks:
            process.start()
        for _ in range(size - len(missing)):
            try:
                rank, succeeded, value = results.get(timeout=max(deadline - time.monotonic(), 0.1))
            except queue.Empty:
                silent = [rank for rank in range(size) if outcomes[rank] is None]
                raise AssertionError(f"ranks {silent} gave no result in {seconds:g} s; so far {outcomes}") from None
            outcomes[rank] = (succeeded, value)
        return outcomes
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
