"""SlotTable: which slot computes each (token, expert) pair of one layer, under one placement.

Where an expert has one slot this is a look-up. Where it has several, its rows are divided by `spec.split` so that ranks
come out level, by gathered counts, so every rank computes the same shares; which copy computes a row never changes the
row. Two bases: the counts of this batch, if they were gathered, and else those of the layer's previous batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.comm.transport import Int64
from coterie.spec.placement import ExpertPlacement
from coterie.spec.split import LayerSplit

Integers = NDArray[np.integer[Any]]


class SlotTable:
    """One layer of a placement, in the form that the exchange reads."""

    def __init__(self, placement: ExpertPlacement, layer: int, speeds: NDArray[np.float64] | None = None) -> None:
        """`speeds` [R], the same on all ranks: slower ranks get less."""
        self.copies = placement.copies(layer)
        self.first = np.ascontiguousarray(self.copies[:, 0])
        self.num_copies = np.count_nonzero(self.copies >= 0, axis=1)
        self.has_copies = bool(self.copies.shape[1] > 1)
        self._split = LayerSplit(placement, layer, speeds=speeds) if self.has_copies else None
        self.num_experts, self.num_ranks = placement.num_experts, placement.num_ranks

    def assign(self, expert_ids: Integers, rank: int, gathered: Int64 | None, before: Int64) -> NDArray[np.int32]:
        """Slots of expert ids [T, K] of `rank`. `gathered` [R, E]: this batch's counts; `before` [E]: the last's."""
        if not self.has_copies:
            return self.first[expert_ids]
        flat = expert_ids.reshape(-1)
        own = np.bincount(flat, minlength=self.num_experts)
        if gathered is not None:
            ends = self._ends(gathered.sum(0))
            start, step = gathered[:rank].sum(0).astype(np.float64) + 0.5, np.ones(self.num_experts)
        else:
            ends = self._ends(np.maximum(before, self.num_copies))
            step = ends[:, -1] / np.maximum(own, 1)
            start = step * ((rank + 0.5) / self.num_ranks)
        position = start[flat] + step[flat] * _occurrence(flat, own)
        copy = np.count_nonzero(position[:, None] >= ends[flat, :-1], axis=1)
        return self.copies[flat, copy].reshape(expert_ids.shape)

    def _ends(self, counts: Int64) -> NDArray[np.float64]:
        """Where the rows of each copy end [E, C] when an expert's rows are numbered."""
        assert self._split is not None
        shares = np.append(self._split.whole(counts), 0)  # the last one is what -1 in `copies` reads
        return np.cumsum(shares[self.copies], axis=1).astype(np.float64)


def _occurrence(flat: Integers, counts: Int64) -> Int64:
    """For each entry, how many equal entries lie before it."""
    order = np.argsort(flat, kind="stable")
    starts = np.cumsum(counts) - counts
    out = np.empty(len(flat), np.int64)
    out[order] = np.arange(len(flat)) - starts[flat[order]]
    return out
