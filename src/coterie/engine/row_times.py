"""RowTimes: how long sequences keep their rows, measured while they run, and so when the next ones will end.

Measured as quotients of fading sums: row seconds per prompt token and per decoded token, and the mean length of
sequences that end by themselves, as tokens per such end. The next ends come out of a small simulation, in which those
who wait take the rows of those who end. Arithmetic only: no requests, no clock, no chance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain, cycle

_KEPT = 0.95
"""What an end leaves of the weight of those before it: about the last twenty count."""
_KEPT_LONG = 0.98
"""Likewise for lengths, as few end by themselves."""
_GUESS = 0.05
"""Seconds a token, before anything was measured."""
_GUESSED_LENGTH = 100.0
"""Tokens of one that ends by itself, before any did."""
_MOST_ENDS = 96
"""Ends that are simulated; more take as long in proportion."""
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(slots=True, eq=False)
class Run:
    """A sequence: tokens of its prompt that nobody else computes, tokens that it asked for; when it had its first one,
    and how many it has."""

    prompt: int
    asked: int
    since: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Present:
    """Sequences with a first token and those who wait, in order; part of the rows that is theirs; seconds that a token
    of all their prompts takes."""

    runs: Collection[Run]
    waiting: Collection[Run]
    share: float
    prompt_seconds: float


class Quotient:
    """Two sums whose older parts fade."""

    def __init__(self, kept: float, over: float = 0.0, under: float = 0.0) -> None:
        self.over, self.under = over, under
        self._kept = kept

    def add(self, over: float, under: float) -> None:
        """Let both fade and add to them."""
        self.over = self.over * self._kept + over
        self.under = self.under * self._kept + under

    def value(self, default: float) -> float:
        """The quotient; the default while it has none."""
        return self.over / self.under if self.under > 0 else default


class RowTimes:
    """One engine's. step_seconds: the engine's mean step, 0 while unknown; stands in where no sequence said better.
    rows: how many sequences are computed together while others wait."""

    def __init__(self, max_running: int) -> None:
        self.step_seconds = 0.0
        self.rows = float(max_running)
        self._prompt, self._decode = Quotient(_KEPT), Quotient(_KEPT)
        self._length = Quotient(_KEPT_LONG, _GUESSED_LENGTH, 1.0)

    def note_prompt(self, seconds: float, tokens: int) -> None:
        """A prompt of which so many tokens were computed had a row for so long before its first token."""
        self._prompt.add(seconds, tokens)

    def note_end(self, run: Run, now: float, *, by_itself: bool) -> None:
        """A sequence with tokens ended, of its own accord or not."""
        self._decode.add(now - run.since, run.tokens - 1)
        self._length.add(run.tokens, by_itself)

    def until(self, ends: int, here: Present, now: float) -> float:
        """Seconds until so many sequences (> 0) of those present will have ended."""
        speed, length = self._speed(here.runs, now), self._mean_length(here.runs)
        first, per_prompt = self.step_seconds or _GUESS, self._prompt.value(0.0)
        chance, queued = _spread(), 0.0

        def decode(run: Run) -> float:
            left = max(0, run.asked - max(1, run.tokens))  # the first comes with the prompt
            return speed * min(left, -length * math.log(next(chance))) if length < math.inf else speed * left

        def end(run: Run, start: float) -> float:
            """Of one that gets a row at `start`, when the prompts before it are computed too."""
            nonlocal queued
            queued += here.prompt_seconds * run.prompt
            return max(start + first, start + per_prompt * run.prompt, queued) + decode(run)

        ahead = chain(here.waiting, cycle(here.waiting or here.runs or [Run(0, 1)]))
        row_ends = [decode(run) for run in here.runs]
        while len(row_ends) < round(self.rows * here.share) or not row_ends:
            row_ends.append(end(next(ahead), 0.0))
        heapify(row_ends)
        simulated = min(ends, _MOST_ENDS)
        for _ in range(simulated - 1):
            heapreplace(row_ends, end(next(ahead), row_ends[0]))
        return row_ends[0] * ends / simulated

    def _speed(self, runs: Collection[Run], now: float) -> float:
        """Seconds per decoded token."""
        seconds = self._decode.over + sum(now - run.since for run in runs)
        tokens = self._decode.under + sum(run.tokens - 1 for run in runs)
        return seconds / tokens if tokens > 0.5 and seconds > 0 else self.step_seconds or _GUESS

    def _mean_length(self, runs: Collection[Run]) -> float:
        """Tokens of one that ends by itself."""
        stops = self._length.under
        return (self._length.over + sum(run.tokens for run in runs)) / stops if stops > 1e-3 else math.inf


def _spread() -> Iterator[float]:
    """Numbers above 0 and below 1, spread evenly however many are taken."""
    at = 0.5
    while True:
        yield at
        at = (at + _GOLDEN) % 1.0 or 0.5
