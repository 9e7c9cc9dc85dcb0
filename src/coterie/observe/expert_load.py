"""ExpertLoad: tokens routed to each (layer, expert), and experts hit by each step, counted exactly.

Counts are handed over as backend arrays and kept unread until `read()`, so recording never waits for a device.
Conservation law: the sum over experts of a layer = real tokens x K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FOLD_AFTER = 256
"""Unread count arrays kept before they are folded, so that memory stays flat."""


class ExpertLoad:
    """Totals [layers, experts] since creation. `layers` maps a model layer index to a row."""

    def __init__(self, layers: list[int], num_experts: int, to_host: Callable[[Any], NDArray[Any]]) -> None:
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._totals = np.zeros((len(layers), num_experts), np.int64)
        self._hits = np.zeros(len(layers), np.int64)
        self._to_host = to_host
        self._pending: list[tuple[int, Any]] = []

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layer of each row."""
        return tuple(self._rows)

    def record(self, layer: int, counts: Any) -> None:
        """Add one step's counts [E] of a layer (a backend array, not read now)."""
        self._pending.append((self._rows[layer], counts))
        if len(self._pending) >= _FOLD_AFTER:
            self._fold()

    def read(self) -> NDArray[np.int64]:
        """Totals so far [layers, experts], a copy."""
        self._fold()
        return self._totals.copy()

    def hits(self) -> dict[int, int]:
        """By layer: experts that had any row, summed over the steps so far. What a step reads of a layer's weights."""
        self._fold()
        return {layer: int(self._hits[row]) for layer, row in self._rows.items()}

    def _fold(self) -> None:
        for row, counts in self._pending:
            host = self._to_host(counts)
            self._totals[row, : len(host)] += host
            self._hits[row] += np.count_nonzero(host)
        self._pending.clear()
