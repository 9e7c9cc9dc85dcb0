"""ExpertTable: which slot of which rank holds which expert, as far as the front end has heard of it.

Ranks tell of every layer whose experts have moved, so what a living rank holds is not loaded again when a generation is
formed. News may be on its way when one is: then a rank loads what it is asked for and has just given away, which costs
time and nothing else. The rules are `spec.repair`'s. No threads, no sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.spec.repair import Table, cover, slots_of, with_again, with_moved, without


class ExpertTable:
    """`initial` [layers, slots of all ranks]: with what a rank's process starts."""

    def __init__(self, initial: Table, num_ranks: int, num_experts: int) -> None:
        self._initial, self._table, self._ranks, self._experts = initial, initial, num_ranks, num_experts

    @property
    def slots(self) -> Table:
        """The table now [layers, slots]; a lost rank's slots are empty."""
        return self._table

    def lose(self, rank: int) -> None:
        """A rank is lost with all that it held."""
        self._table = without(self._table, self._ranks, rank)

    def back(self, rank: int) -> None:
        """A lost rank's process was started again and holds what it held at first."""
        self._table = with_again(self._table, self._initial, self._ranks, rank)

    def moved(self, rank: int, layer: int, slots: Sequence[int]) -> None:
        """A rank holds these experts of a MoE layer from now on."""
        self._table = with_moved(self._table, self._ranks, rank, layer, slots)

    def form(self, ranks: Sequence[int]) -> bytes:
        """The slots of a generation of some ranks, as `Regroup` says them; experts without a slot get one.

        Raises SpecError that says how many slots are missing.
        """
        self._table = cover(self._table, self._ranks, ranks, self._experts)
        return np.ascontiguousarray(slots_of(self._table, self._ranks, ranks), "<i4").tobytes()
