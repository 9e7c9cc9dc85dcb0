"""LiveState: how fast ranks compute and links carry now, from what the exchanges themselves show.

Four numbers of each rank ride in the headers that are gathered anyway, so all ranks hold the same and draw the same
conclusions after the same number of exchanges: each rank's nanoseconds per expert row set its share among copies; the
fastest payload of a window (the one that waited least for late ranks) tells what a link can carry, and the time that
payloads took since the last header what the form in use costs, both for the choice of form (`comm.form_choice`). No
messages and no clock of its own. 0 means not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.comm.transport import Int64

WORDS = 4
"""Nanoseconds per expert row, bytes per second inside a node, bytes per second between nodes, nanoseconds of payloads
since the header before."""

WINDOW = 64
"""Gathered headers between two conclusions."""

LEAST_ROWS = 16
"""Rows per slot with any below which a kernel's time is that of reading weights and says nothing about rows."""

LEAST_BYTES = 64 << 10
"""Of a payload below which its time is latency."""

SLOWEST, STEP = 0.125, 0.1
"""No rank is taken for slower than this part of the median, and a change of speed by less than STEP is none."""

FADE = 0.9


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of the slowest rank's best payload inside a node and between nodes; 0: not known."""

    inside: float
    between: float


class LiveState:
    """One rank's measurements and everyone's latest words. One engine thread."""

    def __init__(self, size: int) -> None:
        self.speeds: NDArray[np.float64] = np.ones(size)
        self._words: Int64 = np.zeros((size, WORDS), np.int64)
        self._spent = self._rows = 0.0
        self._best = [0.0, 0.0]
        self._headers = self._carrying = 0

    def computed(self, nanoseconds: int, rows: int, slots_hit: int) -> None:
        """Note that the expert kernel took so long for `rows` rows on `slots_hit` slots."""
        if rows >= LEAST_ROWS * max(slots_hit, 1):
            self._spent = FADE * self._spent + nanoseconds
            self._rows = FADE * self._rows + rows

    def carried(self, inside: int, between: int, nanoseconds: int) -> None:
        """Note that a payload with so many bytes to either class of link was complete after so long."""
        self._carrying += nanoseconds
        for hop, nbytes in enumerate((inside, between)):
            if nbytes >= LEAST_BYTES and nbytes >= (inside, between)[1 - hop]:
                self._best[hop] = max(self._best[hop], nbytes * 1e9 / max(nanoseconds, 1))

    def together(self, nanoseconds: int) -> None:
        """Note that the last payload was for so long under way beside others: that time is counted once."""
        self._carrying -= nanoseconds

    def words(self) -> Int64:
        """What this rank says of itself in its next header; time of payloads is said once."""
        per_row = self._spent / self._rows if self._rows else 0.0
        carrying, self._carrying = self._carrying, 0
        return np.array([per_row, *self._best, carrying], np.int64)

    def heard(self, words: Int64) -> bool:
        """Keep what all ranks said [R, WORDS]; True where a window ends and conclusions are due, on all ranks alike."""
        self._words = words
        self._headers += 1
        return self._headers % WINDOW == 0

    @property
    def carrying(self) -> int:
        """Nanoseconds of the slowest rank's payloads between the last two headers."""
        return int(self._words[:, 3].max())

    def conclude(self) -> tuple[bool, Rates]:
        """Whether `speeds` [R] changed, and what the links carry. Begins a new window."""
        self._best = [0.0, 0.0]
        per_row = self._words[:, 0].astype(np.float64)
        changed = False
        if (per_row > 0).all():
            speeds = np.clip(np.median(per_row) / per_row, SLOWEST, 1 / SLOWEST)
            changed = bool((np.abs(speeds / self.speeds - 1) > STEP).any())
            if changed:
                self.speeds = speeds
        return changed, Rates(self._slowest(1), self._slowest(2))

    def _slowest(self, column: int) -> float:
        known = self._words[:, column][self._words[:, column] > 0]
        return float(known.min()) if len(known) else 0.0
