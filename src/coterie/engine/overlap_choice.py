"""OverlapChooser: whether the next step of all ranks runs as two micro-batches. Measures, does not model.

Two-batch overlap hides exchanges under compute and reads weights twice; which weighs more depends on links, experts
and rows. So each size of step (by powers of two of all ranks' rows) keeps a smoothed time per row of either form, tries
both, stays with the faster and looks at the other again now and then, the more rarely the worse it was. Every rank
feeds the same gathered numbers, so all choose alike without another exchange. Not here: how a batch is cut
(`engine.runner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

OverlapMode = Literal["auto", "on", "off"]

TRIALS = 3
"""Steps of each form before a size is judged."""
SMOOTHING = 0.25
RETRY_STEPS = 32
"""Steps between two looks at a form that lost narrowly; one that took r times as long waits r times as often again."""
MOST_RETRY_STEPS = 1024


@dataclass(slots=True)
class _Form:
    """One form at one size: seconds per row, how many steps it took, and the step after which it is tried again."""

    seconds: float = 0.0
    steps: int = 0

    def learn(self, seconds: float) -> None:
        self.seconds = seconds if not self.steps else self.seconds + SMOOTHING * (seconds - self.seconds)
        self.steps += 1


@dataclass(slots=True)
class _Size:
    """Steps of one size: plain (0) and cut in two (1)."""

    forms: tuple[_Form, _Form] = field(default_factory=lambda: (_Form(), _Form()))
    since_retry: int = 0


class OverlapChooser:
    """`choose` before a step, `learn` after it; both with what was gathered from all ranks, in rank order."""

    def __init__(self, mode: OverlapMode) -> None:
        self.mode = mode
        self._sizes: dict[int, _Size] = {}
        self._asked: tuple[_Size, int, int] | None = None

    def choose(self, rows: Sequence[int]) -> int:
        """Micro-batches of the next step, 1 or 2. `rows`: of each rank; a step that no rank can cut is not cut."""
        self._asked = None
        if self.mode == "off" or max(rows, default=0) < 2:
            return 1
        if self.mode == "on":
            return 2
        total = sum(rows)
        size = self._sizes.setdefault(total.bit_length(), _Size())
        form = self._pick(size)
        self._asked = (size, form, total)
        return 1 + form

    def learn(self, seconds: Sequence[float]) -> None:
        """How long the step that was last chosen took on each rank; the slowest counts."""
        if self._asked is not None:
            size, form, total = self._asked
            size.forms[form].learn(max(seconds) / total)
            self._asked = None

    def _pick(self, size: _Size) -> int:
        plain, cut = size.forms
        if plain.steps < TRIALS or cut.steps < TRIALS:
            return 0 if plain.steps <= cut.steps else 1
        best = 0 if plain.seconds <= cut.seconds else 1
        worse = size.forms[1 - best].seconds / max(size.forms[best].seconds, 1e-12)
        size.since_retry += 1
        if size.since_retry >= min(RETRY_STEPS * worse**2, MOST_RETRY_STEPS):
            size.since_retry = 0
            return 1 - best
        return best
