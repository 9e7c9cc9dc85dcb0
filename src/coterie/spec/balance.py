"""Where experts go: `place` makes a placement for a load, or improves the current one by a few moves per layer.

From nothing, several constructions compete per layer (`balance_pack`, improved by `balance_search`): whichever is best
on loads near the planned one, as long as it is not worse on the planned one than greedy packing. Loads are judged by
the split among copies that a batch would get (`split`). With a current placement only steps that pay are taken: a layer
that would gain less than `WORTH` keeps what it has. All is deterministic; nothing here moves weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.spec.balance_pack import by_nodes, linked, packed
from coterie.spec.balance_search import Search, swap_in_pairs
from coterie.spec.errors import SpecError
from coterie.spec.placement import EMPTY, ExpertPlacement, check_slots, check_topology, node_of_rank
from coterie.spec.split import SWEEPS, SplitPlan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WORTH = 0.01
"""A layer is changed only if its busiest rank is expected to have less by this part."""
_ROUNDS = 8
_STEPS = 60
_SAMPLES = 2
_SPREAD = 0.8
"""Width of the factors that make a load like the planned one: as noisy as batches are (standard deviation 0.23)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Slots of a layer and where they are. `num_nodes` may be the ranks of each node where they are unequal.

    With `num_groups` > 1 groups of consecutive experts stay on a node where they can (group-limited routing).
    """

    num_slots: int
    num_ranks: int
    num_nodes: int | tuple[int, ...] = 1
    num_groups: int = 1

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Ranks of each node; empty where all have equally many."""
        return self.num_nodes if isinstance(self.num_nodes, tuple) else ()


def place(
    load: NDArray[Any],
    room: Room,
    *,
    current: ExpertPlacement | None = None,
    max_moves: int | None = None,
    dead: Collection[int] = (),
) -> ExpertPlacement:
    """Load [L, E] (any scale) -> a placement, or `current` improved by at most `max_moves` moves in each layer.

    `dead` ranks keep empty slots. A move is an expert that a rank must receive; experts without a living copy are
    placed first, whatever `max_moves` says.
    """
    load = np.asarray(load, np.float64)
    if load.ndim != 2 or not load.size or not np.isfinite(load).all() or load.min() < 0:
        raise SpecError(f"load must be finite numbers from 0 [layers, experts], not {list(load.shape)}")
    num_slots, num_ranks, num_groups, sizes = room.num_slots, room.num_ranks, room.num_groups, room.node_sizes
    nodes = len(room.num_nodes) if isinstance(room.num_nodes, tuple) else room.num_nodes
    check_topology(num_ranks, nodes, sizes)
    check_slots(num_slots, load.shape[1], num_ranks)
    if num_groups < 1 or (max_moves is not None and max_moves < 0):
        raise SpecError(f"num_groups must be from 1 and max_moves from 0, not {num_groups} and {max_moves}")
    shape = _Shape.of(load.shape[1], num_slots, node_of_rank(num_ranks, nodes, sizes), num_groups, frozenset(dead))
    mean = load.mean(1, keepdims=True)
    load = np.where(mean > 0, load / np.where(mean > 0, mean, 1), 1.0)
    if current is None:
        table = shape.expand(_fresh(load, shape))
    else:
        if (current.num_layers, current.num_experts, current.num_slots, current.num_ranks) != (
            *load.shape,
            num_slots,
            num_ranks,
        ):
            raise SpecError(
                f"the current placement has (layers, experts, slots, ranks) = "
                f"{(current.num_layers, current.num_experts, current.num_slots, current.num_ranks)}, "
                f"not {(*load.shape, num_slots, num_ranks)}"
            )
        table = shape.expand(_improved(load, shape, current, max_moves))
    return ExpertPlacement(table.astype(np.int32), load.shape[1], num_ranks, nodes, sizes)


def balance(shares: NDArray[Any], num_ranks: int) -> Floats:
    """Shares [L, S] of slots -> mean / maximum over ranks of each layer [L]: 1.0 is perfect; no load is balanced."""
    by_rank = np.asarray(shares, np.float64).reshape(len(shares), num_ranks, -1).sum(-1)
    most = by_rank.max(1)
    return np.where(most > 0, by_rank.mean(1) / np.where(most > 0, most, 1), 1.0)


def moves(before: ExpertPlacement, after: ExpertPlacement) -> Ints:
    """Experts that ranks must receive in each layer [L]: another order of slots on a rank is free."""
    return _moves(before.slot_to_expert, after.slot_to_expert, before.num_experts, before.num_ranks)


def held(table: NDArray[Any], num_experts: int, num_ranks: int) -> NDArray[np.bool_]:
    """Which rank holds which expert [L, R, E] of a table [L, S]."""
    layers = len(table)
    holds = np.zeros((layers, num_ranks, num_experts + 1), bool)
    by_rank = np.asarray(table).reshape(layers, num_ranks, -1)
    np.put_along_axis(holds, np.where(by_rank == EMPTY, num_experts, by_rank), True, 2)
    return holds[..., :-1]


def _moves(before: NDArray[Any], after: NDArray[Any], num_experts: int, num_ranks: int) -> Ints:
    new = held(after, num_experts, num_ranks) & ~held(before, num_experts, num_ranks)
    return new.sum((1, 2))


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """The living ranks, their nodes, and whether groups of experts are kept on nodes."""

    num_slots: int
    alive: Ints
    node_of_rank: NDArray[np.int32]
    num_ranks: int
    groups: int

    @classmethod
    def of(
        cls, num_experts: int, num_slots: int, nodes: NDArray[np.int32], groups: int, dead: frozenset[int]
    ) -> _Shape:
        ranks = len(nodes)
        if not dead <= set(range(ranks)):
            raise SpecError(f"dead ranks {sorted(dead)} must be among 0 to {ranks - 1}")
        alive = np.array([rank for rank in range(ranks) if rank not in dead], np.int64)
        slots = num_slots // ranks * len(alive)
        if slots < num_experts:
            raise SpecError(
                f"{len(alive)} of {ranks} ranks have {slots} slots for {num_experts} experts: "
                f"{num_experts - slots} slots are missing"
            )
        sizes = np.bincount(nodes[alive], minlength=int(nodes[-1]) + 1)
        whole = len(sizes) > 1 and groups % len(sizes) == 0 and num_experts % groups == 0 and len(set(sizes)) == 1
        return cls(slots, alive, nodes[alive], ranks, groups if groups > 1 and whole else 1)

    @property
    def living(self) -> int:
        return len(self.alive)

    def expand(self, table: Ints) -> Ints:
        """Table of living ranks [L, R, k] -> table of all slots [L, S]."""
        full = np.full((len(table), self.num_ranks, table.shape[2]), EMPTY, np.int64)
        full[:, self.alive] = table
        return full.reshape(len(table), -1)


def _fresh(load: Floats, shape: _Shape) -> Ints:
    slots, ranks = shape.num_slots, shape.living
    if shape.groups > 1:
        nodes = int(shape.node_of_rank[-1]) + 1
        table = by_nodes(load, slots, ranks, nodes, shape.groups)
        inside = table.reshape(len(load) * nodes, ranks // nodes, -1).copy()
        swap_in_pairs(inside, load.repeat(nodes, 0), _ROUNDS)
        table = inside.reshape(table.shape)
        across = table.copy()
        swap_in_pairs(across, load, 4, tolerance=0.02)
        searched = across.copy()
        Search(10, node_of_rank=shape.node_of_rank).improve(searched, load)
        return _best([table, across, searched], load, price=WORTH)
    greedy = packed(load, slots, ranks)
    searched = greedy.copy()
    swap_in_pairs(searched, load, _ROUNDS)
    candidates = [greedy, searched]
    heavy = int((load > load.sum(1, keepdims=True) / ranks / 2).sum(1).max())
    for big in sorted({min(max(heavy, 1), load.shape[1]), min(ranks, load.shape[1])}):
        line = linked(load, slots, ranks, big)
        if line is not None:
            candidates.append(line)
    return _best(candidates, load, price=0.0)


def _best(candidates: list[Ints], load: Floats, price: float) -> Ints:
    """Per layer, the candidate best on loads like `load` among those that on `load` are no worse than the first one and
    nearly the best. With a `price` each must be better than the one before by it, and the first stays if it is good."""
    number, layers = len(candidates), len(load)
    tables = np.concatenate(candidates)
    factors = 1 + _SPREAD * (np.random.default_rng(0).random((_SAMPLES, *load.shape)) - 0.5)
    plan = SplitPlan.of(tables.reshape(len(tables), -1), load.shape[1], tables.shape[1])

    def busiest(like: Floats, sweeps: int) -> Floats:
        shares = plan.level(np.tile(like, (number, 1)), sweeps)
        return 1 / balance(shares, tables.shape[1]).reshape(number, layers)

    planned = busiest(load, 12)
    near = np.mean([busiest(load * factor, SWEEPS) for factor in factors], 0)
    limit = np.maximum(np.minimum(planned[0], planned.min(0) * 1.01), 1.0005)
    near = np.where(planned <= limit, near + planned, np.inf) + price * np.arange(number)[:, None]
    near[0, (planned[0] <= planned.min(0) * (1 + WORTH)) & (price > 0)] = 0.0
    return tables.reshape(number, layers, *tables.shape[1:])[near.argmin(0), np.arange(layers)]


def _improved(load: Floats, shape: _Shape, current: ExpertPlacement, max_moves: int | None) -> Ints:
    layers, experts = load.shape
    before = current.slot_to_expert.reshape(layers, shape.num_ranks, -1)[:, shape.alive].astype(np.int64)
    start = before.copy()
    missing = held(before.reshape(layers, -1), experts, 1).sum((1, 2)) < experts
    for row in np.flatnonzero(missing | (before == EMPTY).any((1, 2))):
        _complete(start[row], load[row])
    nodes = shape.node_of_rank if shape.groups > 1 else None
    candidates = [start]
    spent = np.zeros(layers, np.int64)
    for part in (0.25, 0.75, 1.0):
        candidates.append(candidates[-1].copy())
        allowed = int((max_moves or 0) * part)
        left = None if max_moves is None else allowed - spent
        Search(_STEPS, node_of_rank=nodes).improve(candidates[-1], load, left)
        spent = spent if left is None else allowed - left
    after = _best(candidates, load, price=WORTH / 2)
    for row, rank in np.argwhere((after != before).any(2)):
        _settle(after[row, rank], before[row, rank])
    return after


def _settle(after: Ints, before: Ints) -> None:
    """Order the slots [k] of a rank so that what it held keeps its slot."""
    new = [expert for expert in after.tolist() if expert not in before]
    stays = np.isin(before, after)
    after[:] = before
    after[~stays] = new


def _complete(table: Ints, load: Floats) -> None:
    """Give every expert a slot and every slot an expert, in one layer's table [R, k]."""
    copies = np.bincount(table[table >= 0], minlength=len(load))
    for expert in sorted(np.flatnonzero(copies == 0), key=lambda expert: (-load[expert], expert)):
        share = load / np.maximum(copies, 1)
        item = np.where(table == EMPTY, 0.0, share[table])
        spare = (table == EMPTY) | (copies[table] > 1)
        rank_load = np.broadcast_to(item.sum(1, keepdims=True), table.shape)
        price = np.where(spare, rank_load - item + np.where(table == EMPTY, 0.0, 1e-6), np.inf)
        slot = np.unravel_index(int(price.argmin()), table.shape)
        if table[slot] != EMPTY:
            copies[table[slot]] -= 1
        table[slot] = expert
        copies[expert] = 1
    for rank, slot in np.argwhere(table == EMPTY):
        share = load / copies
        share[table[rank][table[rank] >= 0]] = -1.0
        table[rank, slot] = share.argmax()
        copies[table[rank, slot]] += 1
