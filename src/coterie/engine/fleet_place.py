"""Place: one rank of a fleet as the front end sees it, and how its silence or standing still is judged.

A rank is silent when its beats stay away, and stalled when they say that it neither works nor waits: then its engine's
thread hangs while the process lives, and the others wait for it. Long kernels, loading and page faults count as work,
piece by piece, so only what gets nowhere is a stall. No threads, no sockets; times are the monotonic clock's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from coterie.engine.messages import Beat, RankStats, Stats
from coterie.engine.process import StartedProcess
from coterie.engine.rank import BEAT_SECONDS

MOST_MISSES = 3
"""Beats a rank may miss before it is lost."""
JOIN_SECONDS = 10.0
"""A rank that joins may be silent for longer: it builds its model and connects."""

State = Literal["loading", "ready", "member", "lost", "ended"]


@dataclass(slots=True, eq=False)
class Place:
    """`life` counts its processes; `fallen`: out of the present generation; `heard`, `active`: when it last said
    anything, and when its work last went on or had to wait; `asked`: when it was called into a generation; `settled`:
    its process has joined one before."""

    number: int
    node: int
    process: StartedProcess | None
    state: State = "ready"
    life: int = 0
    heard: float = field(default_factory=time.monotonic)
    active: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    joined: float = 0.0
    settled: bool = False
    has_joined: bool = False
    fallen: bool = False
    restarts: int = 0
    stats: Stats | None = None
    beat: Beat = Beat()  # noqa: RUF009

    def revive(self, process: StartedProcess) -> None:
        """Its process was started again and is loaded."""
        self.process, self.life = process, self.life + 1
        self.heard = self.active = time.monotonic()
        self.state, self.has_joined, self.settled = "ready", False, False

    def ask(self) -> None:
        """It is called into a generation."""
        self.state, self.has_joined, self.fallen, self.asked = "member", False, False, time.monotonic()

    def join(self) -> None:
        """It says that it has joined the present generation."""
        self.joined, self.has_joined, self.settled = self.heard, True, True

    def note(self, beat: Beat) -> None:
        """A sign of life."""
        if beat.waits or beat != self.beat:
            self.active = self.heard
        self.beat = beat

    def fault(self, now: float, stall_seconds: float) -> tuple[str, float] | None:
        """Why it is to be taken for lost, and since when; None while it is not."""
        # One that was silent when it was called gets no more time: the cable of its machine may be out.
        joins = not self.has_joined and (not self.settled or self.heard > self.asked)
        patience = JOIN_SECONDS if joins else MOST_MISSES * BEAT_SECONDS
        if now - self.heard > patience:
            return f"said nothing for {now - self.heard:.1f} s", self.heard
        if now - self.active > stall_seconds:
            return f"its work stood still for {now - self.active:.1f} s, without waiting for another", self.active
        return None

    def rank_stats(self) -> RankStats:
        """Its part of the group's numbers."""
        state = "serving" if self.state == "member" and self.has_joined else self.state
        stats = self.stats
        if stats is None:
            return RankStats(self.number, self.node, state)
        load = (stats.num_running, stats.num_waiting, stats.kv_usage, stats.generation_tokens, stats.steps)
        return RankStats(self.number, self.node, state, *load)
