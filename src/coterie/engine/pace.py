"""Pace: how fast prompts are computed of late, for the front end's estimates. Seconds come in; it has no clock."""

from __future__ import annotations

from coterie.engine.request import Schedule

_KEPT = 0.95
"""What a step leaves of the weight of those before it: about the last twenty steps with prompts count."""


class Pace:
    """Exponential averages over the steps that computed prompts, decode rows riding along: the load's of late."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._steps = 0.0
        self._pending = 0

    def begin(self, schedule: Schedule) -> None:
        """Note a step before it is computed, while its requests still show what they lack."""
        entries = schedule.entries
        self._pending = sum(entry.num_tokens for entry in entries if entry.request.num_uncomputed_tokens > 1)

    def end(self, seconds: float) -> None:
        """The step took so long."""
        if self._pending:
            self._tokens = self._tokens * _KEPT + self._pending
            self._seconds = self._seconds * _KEPT + seconds
            self._steps = self._steps * _KEPT + 1.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 before any were computed."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Mean length of a step with prompts."""
        return self._seconds / self._steps if self._steps else 0.0
