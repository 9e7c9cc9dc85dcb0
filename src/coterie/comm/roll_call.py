"""Roster: who is in a group, and who still answers after an exchange has failed.

Ranks sign in at the store. After a failure every living rank marks itself; who has not within the grace is missing. A
process that has ended on this machine is seen at once, so a killed neighbour costs no waiting. Not a heartbeat: nothing
runs while all is well.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

GRACE_SECONDS = 1.0
"""How much later than this rank another may notice the same failure: it may have been computing."""

POLL_SECONDS = 0.005


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def set_timeout(self, timeout: timedelta) -> None: ...


class Roster:
    """One rank's part of the sign-in sheet of a group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._machine = machine_name()
        self._processes: dict[int, tuple[str, int]] = {}

    def meet(self, seconds: float, given_up: Callable[[], bool]) -> tuple[int, ...]:
        """Sign in and wait for the others; returns the ranks that did not come, or not before it was given up."""
        self._store.set(f"here/{self._rank}", json.dumps([self._machine, os.getpid()]))
        missing = self._wait("here", seconds, given_up)
        for rank in set(range(self._size)) - set(missing):
            machine, process = json.loads(self._store.get(f"here/{rank}"))
            self._processes[rank] = (machine, process)
        return missing

    def call(self, what: str, given_up: Callable[[], bool]) -> tuple[int, ...] | None:
        """Mark this rank as living and return those that are not, or not before it was given up; None if the store
        cannot be reached."""
        try:
            self._store.set_timeout(timedelta(seconds=GRACE_SECONDS))
            self._store.set(f"failed/{self._rank}", what)
            return self._wait("failed", GRACE_SECONDS, given_up, watch=True)
        except RuntimeError:
            return None

    def _wait(
        self, prefix: str, seconds: float, given_up: Callable[[], bool], *, watch: bool = False
    ) -> tuple[int, ...]:
        deadline = time.monotonic() + seconds
        missing = set(range(self._size))
        while True:
            missing -= {rank for rank in missing if self._store.check([f"{prefix}/{rank}"])}
            over = given_up() or time.monotonic() > deadline
            if not missing or over or (watch and all(map(self._ended, missing))):
                return tuple(sorted(missing))
            time.sleep(POLL_SECONDS)

    def _ended(self, rank: int) -> bool:
        """Whether the process of a rank on this machine is gone; False if it cannot be known."""
        machine, process = self._processes.get(rank, ("", 0))
        if machine != self._machine:
            return False
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[-1].split()[0]
        except OSError:
            return True
        return state in "ZX"


def machine_name() -> str:
    """The same for processes that see each other's process ids."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
