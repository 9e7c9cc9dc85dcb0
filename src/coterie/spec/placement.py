"""ExpertPlacement: which expert each slot of each MoE layer holds, where a slot is, and what a legal table is.

A slot is a place for one expert's weights. Slot s lies on rank s // (S / R), nodes hold consecutive ranks. Slots beyond
the first that hold an expert are its redundant copies; -1 is an empty slot (a dead rank holds nothing else). Two copies
of one expert on one rank are refused: they would balance nothing. No loads here (`balance`), no moving of weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.spec.errors import SpecError

Int32 = NDArray[np.int32]
EMPTY = -1


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """`slot_to_expert` [L, S], one row per MoE layer in the model's order; kept as a read-only copy.

    `ranks_per_node` is needed only where nodes are of unequal size. Compare placements by `digest()`.
    """

    slot_to_expert: Int32
    num_experts: int
    num_ranks: int
    num_nodes: int = 1
    ranks_per_node: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_topology(self.num_ranks, self.num_nodes, self.ranks_per_node)
        table = np.array(self.slot_to_expert)
        _check_table(table, self.num_experts, self.num_ranks)
        table = table.astype(np.int32)
        table.flags.writeable = False
        object.__setattr__(self, "slot_to_expert", table)

    @classmethod
    def linear(
        cls, num_layers: int, num_experts: int, num_ranks: int, num_nodes: int = 1, num_slots: int | None = None
    ) -> ExpertPlacement:
        """Slot s holds expert s; further slots hold second copies, spread evenly over the experts.

        `num_slots` is the smallest legal number unless given.
        """
        if num_slots is None:
            num_slots = smallest_slots(num_experts, num_ranks)
        check_slots(num_slots, num_experts, num_ranks)
        row = np.arange(num_slots, dtype=np.int32)
        per_rank, extra = num_slots // num_ranks, num_slots - num_experts
        copies = np.ones(num_experts, np.int64)
        for index in range(extra):
            slot = num_experts + index
            first = slot // per_rank * per_rank
            wanted = index * num_experts // extra
            ring = (np.arange(num_experts) + wanted) % num_experts
            ring = ring[~np.isin(ring, row[first:slot])]
            row[slot] = ring[np.argmin(copies[ring])]
            copies[row[slot]] += 1
        return cls(np.tile(row, (num_layers, 1)), num_experts, num_ranks, num_nodes)

    @classmethod
    def without_experts(
        cls, num_ranks: int, num_nodes: int = 1, ranks_per_node: tuple[int, ...] = ()
    ) -> ExpertPlacement:
        """The ranks of a dense model: no layer and no slot."""
        return cls(np.empty((0, 0), np.int32), 0, num_ranks, num_nodes, ranks_per_node)

    @property
    def num_layers(self) -> int:
        return self.slot_to_expert.shape[0]

    @property
    def num_slots(self) -> int:
        return self.slot_to_expert.shape[1]

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    @property
    def rank_of_slot(self) -> Int32:
        """Rank of each slot [S]."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), self.slots_per_rank)

    @property
    def node_of_rank(self) -> Int32:
        """Node of each rank [R]."""
        return node_of_rank(self.num_ranks, self.num_nodes, self.ranks_per_node)

    def slots_of_rank(self, rank: int) -> slice:
        """The slots of one rank: `slot_to_expert[:, slots]`."""
        return slice(rank * self.slots_per_rank, (rank + 1) * self.slots_per_rank)

    def num_copies(self) -> NDArray[np.int64]:
        """Copies of each expert [L, E]."""
        return count_copies(self.slot_to_expert, self.num_experts)

    def copies(self, layer: int) -> Int32:
        """Slots that hold each expert of a layer [E, C], ascending, padded with -1 to the largest number of copies."""
        row = self.slot_to_expert[layer]
        order = np.argsort(row, kind="stable")
        order = order[np.count_nonzero(row == EMPTY) :]
        experts = row[order]
        counts = np.bincount(experts, minlength=self.num_experts)
        table = np.full((self.num_experts, counts.max()), EMPTY, np.int32)
        table[experts, np.arange(len(experts)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
        return table

    def digest(self) -> str:
        """Hash of everything in it: ranks compare it before they serve."""
        shape = (self.num_experts, self.num_ranks, *self.slot_to_expert.shape, *self.node_of_rank.tolist())
        state = hashlib.sha256(repr(shape).encode())
        state.update(self.slot_to_expert.astype("<i4").tobytes())
        return state.hexdigest()[:16]

    def with_layers(self, slot_to_expert: NDArray[np.integer[Any]]) -> ExpertPlacement:
        """The same ranks and nodes with another table."""
        table = slot_to_expert.astype(np.int32)
        return ExpertPlacement(table, self.num_experts, self.num_ranks, self.num_nodes, self.ranks_per_node)


def count_copies(slot_to_expert: NDArray[np.integer[Any]], num_experts: int) -> NDArray[np.int64]:
    """Copies of each expert [L, E] of a table [L, S]."""
    layers = len(slot_to_expert)
    flat = slot_to_expert.astype(np.int64) + 1 + np.arange(layers)[:, None] * (num_experts + 1)
    counts = np.bincount(flat.ravel(), minlength=layers * (num_experts + 1))
    return counts.reshape(layers, num_experts + 1)[:, 1:]


def node_of_rank(num_ranks: int, num_nodes: int, ranks_per_node: tuple[int, ...] = ()) -> Int32:
    """Node of each rank [R]; nodes hold consecutive ranks."""
    sizes = ranks_per_node or (num_ranks // num_nodes,) * num_nodes
    return np.repeat(np.arange(num_nodes, dtype=np.int32), sizes)


def smallest_slots(num_experts: int, num_ranks: int) -> int:
    """The smallest number of slots that holds every expert and divides over the ranks."""
    return -(-num_experts // max(num_ranks, 1)) * num_ranks


def check_topology(num_ranks: int, num_nodes: int, ranks_per_node: tuple[int, ...] = ()) -> None:
    """Refuse ranks and nodes that are no layout."""
    if num_ranks < 1 or num_nodes < 1:
        raise SpecError(f"{num_ranks} ranks on {num_nodes} nodes: both must be at least 1")
    if ranks_per_node:
        if len(ranks_per_node) != num_nodes or sum(ranks_per_node) != num_ranks or min(ranks_per_node) < 1:
            raise SpecError(
                f"ranks_per_node {list(ranks_per_node)} must be {num_nodes} numbers from 1 that sum to {num_ranks}"
            )
    elif num_ranks % num_nodes:
        valid = [nodes for nodes in range(1, num_ranks + 1) if num_ranks % nodes == 0]
        raise SpecError(
            f"{num_ranks} ranks do not divide over {num_nodes} nodes; valid numbers of nodes: {_listed(valid)}"
        )


def check_slots(num_slots: int, num_experts: int, num_ranks: int) -> None:
    """Refuse numbers of slots that no placement can have."""
    if num_experts < 1:
        raise SpecError(f"a placement needs at least one expert, not {num_experts}")
    least, most = smallest_slots(num_experts, num_ranks), num_experts * num_ranks
    if num_slots % num_ranks == 0 and least <= num_slots <= most:
        return
    below = min(max(num_slots // num_ranks * num_ranks, least), most)
    near = range(max(below - num_ranks, least), min(below + 3 * num_ranks, most) + 1, num_ranks)
    raise SpecError(
        f"{num_slots} slots for {num_experts} experts on {num_ranks} ranks: must be a multiple of {num_ranks} "
        f"from {least} to {most} (at most one copy of an expert on a rank); valid ones near it: {_listed(list(near))} "
        f"({_listed([slots - num_experts for slots in near])} redundant)"
    )


def _check_table(table: NDArray[Any], num_experts: int, num_ranks: int) -> None:
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
        raise SpecError(f"slot_to_expert must be integers [layers, slots], not {table.dtype} {list(table.shape)}")
    layers, slots = table.shape
    if slots % num_ranks:
        check_slots(slots, num_experts, num_ranks)
    if table.size and (table.min() < EMPTY or table.max() >= num_experts):
        wrong = table[(table < EMPTY) | (table >= num_experts)][0]
        raise SpecError(f"a slot holds expert {wrong}; valid are 0 to {num_experts - 1}, and -1 for an empty slot")
    missing = np.argwhere(count_copies(table, num_experts) == 0)
    if len(missing):
        layer, expert = missing[0]
        raise SpecError(
            f"no slot of layer {layer} holds expert {expert} ({len(missing)} (layer, expert) pairs have no slot): "
            f"{num_experts} experts need {num_experts} slots, and there are {slots}"
        )
    by_rank = np.sort(table.reshape(layers, num_ranks, slots // num_ranks), -1)
    twice = np.argwhere((by_rank[..., 1:] == by_rank[..., :-1]) & (by_rank[..., 1:] != EMPTY))
    if len(twice):
        layer, rank, index = twice[0]
        raise SpecError(f"rank {rank} holds expert {by_rank[layer, rank, index]} of layer {layer} twice")


def _listed(numbers: list[int], most: int = 12) -> str:
    shown = ", ".join(str(number) for number in numbers[:most])
    return shown + (", ..." if len(numbers) > most else "")
