"""Tables of slots when ranks are lost and come back: who takes over which expert. Pure functions, the same everywhere.

A table is int32 [L, S] over all ranks of a deployment, living or not; rank r has slots [r * S/R, (r + 1) * S/R), and a
lost rank's are EMPTY. As few experts as possible are loaded: what living ranks hold stays, except that an expert
without a living copy takes the place of one that has several. Balance is not looked at here (`balance`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.spec.errors import SpecError
from coterie.spec.placement import EMPTY

Table = NDArray[np.int32]


def slots_of(table: Table, num_ranks: int, ranks: Sequence[int]) -> Table:
    """The slots of some ranks, in their order [L, len(ranks) * S/R]."""
    per_rank = table.shape[1] // num_ranks
    columns = [rank * per_rank + slot for rank in ranks for slot in range(per_rank)]
    return np.ascontiguousarray(table[:, columns])


def without(table: Table, num_ranks: int, rank: int) -> Table:
    """The table once a rank is lost; experts may be left without a slot (`cover`)."""
    result = table.copy()
    per_rank = table.shape[1] // num_ranks
    result[:, rank * per_rank : (rank + 1) * per_rank] = EMPTY
    return result


def with_moved(table: Table, num_ranks: int, rank: int, layer: int, slots: Sequence[int]) -> Table:
    """The table once a rank's slots of one layer hold other experts."""
    result = table.copy()
    per_rank = table.shape[1] // num_ranks
    result[layer, rank * per_rank : (rank + 1) * per_rank] = slots
    return result


def with_again(table: Table, initial: Table, num_ranks: int, rank: int) -> Table:
    """The table once a lost rank has come back, loaded with what it had in the initial table."""
    result = table.copy()
    per_rank = table.shape[1] // num_ranks
    columns = slice(rank * per_rank, (rank + 1) * per_rank)
    result[:, columns] = initial[:, columns]
    return result


def cover(table: Table, num_ranks: int, living: Sequence[int], num_experts: int) -> Table:
    """Give every expert a slot on a living rank. Raises SpecError that says how many slots are missing."""
    if not len(living):
        raise SpecError(f"none of {num_ranks} ranks is left, or none with all of its tensor-parallel group")
    per_rank = table.shape[1] // num_ranks
    slots = np.array([rank * per_rank + slot for rank in living for slot in range(per_rank)], np.int64)
    if len(slots) < num_experts:
        raise SpecError(
            f"{num_experts - len(slots)} slots are missing: {len(living)} of {num_ranks} ranks are left with "
            f"{len(slots)} slots in a layer for {num_experts} experts; start with more redundant experts"
        )
    result = table.copy()
    for row in result:
        _cover_layer(row, slots, per_rank, num_experts)
    return result


def _cover_layer(row: Table, slots: NDArray[np.int64], per_rank: int, num_experts: int) -> None:
    held = row[slots]
    copies = np.bincount(held[held != EMPTY], minlength=num_experts)
    loads: dict[int, int] = {}
    for expert in np.flatnonzero(copies == 0).tolist():
        free = [int(slot) for slot in slots if row[slot] == EMPTY or copies[row[slot]] > 1]

        def cost(slot: int) -> tuple[int, int, int]:
            spare = copies[row[slot]] if row[slot] != EMPTY else num_experts
            return loads.get(slot // per_rank, 0), -int(spare), slot

        slot = min(free, key=cost)
        if row[slot] != EMPTY:
            copies[row[slot]] -= 1
        row[slot], copies[expert] = expert, 1
        loads[slot // per_rank] = loads.get(slot // per_rank, 0) + 1
