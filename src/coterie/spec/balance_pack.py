"""Placements from nothing, many layers at once: how many copies, which ranks. `balance` chooses among the results.

`packed` is greedy: a copy more for whoever has the largest share, then the heaviest first onto the lightest rank that
has room and no copy of it. `linked` aims at the split: the ranks stand in a line, the big experts are laid over them
end to end (each reaches over the ranks it fills and shares its ends with its neighbours), so that load can flow from
any rank to any other through shared experts. Tables here are [B, R, k]: B problems, R ranks, k slots each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_OCCUPIED = 1e12
"""Stands for "has a copy already": worse than any load, better than a full rank."""
_LAYINGS = 4
"""Big and small experts are placed in turns, each time over the room that the others left; at first small ones are
taken to be equal."""
_NODE_TOLERANCE = 0.01
"""A node may have this much more than its part of the load before copies of its experts go elsewhere."""


def packed(load: Floats, num_slots: int, num_ranks: int) -> Ints:
    """Loads [B, E] -> table [B, R, k]: greedy copies, greedy packing."""
    items, weight = _copies(load, replicate(load, num_slots - load.shape[1], num_ranks))
    room = np.full((len(load), num_ranks), num_slots // num_ranks)
    return _table(items, _place(items, weight, room), num_ranks)


def by_nodes(load: Floats, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int) -> Ints:
    """Greedy copies; groups of experts have a home node, copies leave it only where it has its part of the load."""
    layers, experts = load.shape
    grouped = load.reshape(layers, num_groups, -1).sum(-1)
    room = np.full((layers, num_nodes), num_groups // num_nodes)
    homes = _place(*_copies(grouped, np.ones(grouped.shape, np.int64)), room).repeat(experts // num_groups, 1)
    order = np.argsort(-grouped, 1, kind="stable").repeat(experts // num_groups, 1) * (experts // num_groups)
    home = np.empty(load.shape, np.int64)
    np.put_along_axis(home, order + np.tile(np.arange(experts // num_groups), num_groups), homes, 1)
    items, weight = _copies(load, replicate(load, num_slots - experts, num_ranks))
    nodes = _place_near(items, weight, np.take_along_axis(home, items, 1), (num_slots, num_ranks, num_nodes))
    sort = np.argsort(nodes, 1, kind="stable")
    items = np.take_along_axis(items, sort, 1).reshape(layers * num_nodes, -1)
    weight = np.take_along_axis(weight, sort, 1).reshape(items.shape)
    room = np.full((len(items), num_ranks // num_nodes), num_slots // num_ranks)
    return _table(items, _place(items, weight, room), num_ranks // num_nodes).reshape(layers, num_ranks, -1)


def _place_near(items: Ints, weight: Floats, home: Ints, shape: tuple[int, int, int]) -> Ints:
    """Node of each copy [B, N], heaviest first: at home while that keeps to its part of the load, else the lightest."""
    num_slots, num_ranks, num_nodes = shape
    rows = np.arange(len(items))
    room = np.full((len(items), num_nodes), num_slots // num_nodes)
    height = np.zeros(room.shape)
    part = weight.sum(1) / num_nodes * (1 + _NODE_TOLERANCE)
    held = np.zeros(room.shape, np.int64)
    nodes = np.empty(items.shape, np.int64)
    for item in range(items.shape[1]):
        if item:
            held[items[:, item] != items[:, item - 1]] = 0
        full = (room == 0) | (held >= num_ranks // num_nodes)
        lightest = np.where(full, np.inf, height).argmin(1)
        near = home[:, item]
        fits = ~full[rows, near] & (height[rows, near] + weight[:, item] <= part)
        node = np.where(fits | full.all(1), near, lightest)
        nodes[:, item] = node
        height[rows, node] += weight[:, item]
        room[rows, node] -= 1
        held[rows, node] += 1
    return nodes


def replicate(load: Floats, extra: int, most: int) -> Ints:
    """Copies [B, E] of each expert, at most `most`: one more for the largest share, `extra` times."""
    copies = np.ones(load.shape, np.int64)
    share = load.copy() if most > 1 else np.full(load.shape, -1.0)
    rows = np.arange(len(load))
    for _ in range(extra):
        expert = share.argmax(1)
        many = copies[rows, expert] + 1
        copies[rows, expert] = many
        share[rows, expert] = np.where(many < most, load[rows, expert] / many, -1.0)
    return copies


def _copies(load: Floats, copies: Ints) -> tuple[Ints, Floats]:
    """The experts of all copies and their shares [B, N], heaviest first, copies of one expert side by side."""
    share = load / np.maximum(copies, 1)
    order = np.argsort(-share, 1, kind="stable")
    many = np.take_along_axis(copies, order, 1)
    experts = np.repeat(order.ravel(), many.ravel()).reshape(len(load), -1)
    return experts, np.take_along_axis(share, experts, 1)


def _place(experts: Ints, weight: Floats, room: Ints) -> Ints:
    """Rank of each copy [B, N]: the lightest with room [B, R] that has none of the expert; if none is left, any."""
    first = np.ones(experts.shape, bool)
    first[:, 1:] = experts[:, 1:] != experts[:, :-1]
    again = np.append((~first).any(0), False)
    rows = np.arange(len(experts))
    left = room.copy()
    height = np.where(left > 0, 0.0, np.inf)
    taken = np.zeros(height.shape)
    ranks = np.empty(experts.shape, np.int64)
    for item in range(experts.shape[1]):
        if again[item]:
            taken[first[:, item]] = 0.0
            rank = (height + taken).argmin(1)
        else:
            rank = height.argmin(1)
        ranks[:, item] = rank
        left[rows, rank] -= 1
        height[rows, rank] = np.where(left[rows, rank] > 0, height[rows, rank] + weight[:, item], np.inf)
        if again[item + 1]:
            if not again[item]:
                taken[:] = 0.0
            taken[rows, rank] = _OCCUPIED
    return ranks


def _table(experts: Ints, ranks: Ints, num_ranks: int) -> Ints:
    """Experts ordered by rank [B, R, k], ranks without two copies of one expert."""
    table = np.take_along_axis(experts, np.argsort(ranks, 1, kind="stable"), 1).reshape(len(experts), num_ranks, -1)
    ordered = np.sort(table, -1)
    for row in np.flatnonzero((ordered[..., 1:] == ordered[..., :-1]).any((1, 2))):
        _separate(table[row])
    return table


def _separate(table: Ints) -> None:
    """Swap second copies on a rank [R, k] for other experts; a rank that has none of it has an expert to give."""
    for rank in range(len(table)):
        for slot in range(table.shape[1]):
            expert = table[rank, slot]
            if (table[rank, :slot] != expert).all():
                continue
            here = set(table[rank].tolist())
            other, place = next(
                (other, place)
                for other in range(len(table))
                if expert not in table[other]
                for place in range(table.shape[1])
                if int(table[other, place]) not in here
            )
            table[rank, slot], table[other, place] = table[other, place], expert


def linked(load: Floats, num_slots: int, num_ranks: int, big: int) -> Ints | None:
    """Loads [B, E] -> table [B, R, k] in which the `big` largest experts link the ranks; None where it cannot be."""
    experts, per_rank = load.shape[1], num_slots // num_ranks
    order = np.argsort(-load, 1, kind="stable")
    target = load.sum(1) / num_ranks
    heavy = np.maximum(np.take_along_axis(load, order[:, :big], 1), 1e-6 * target[:, None])
    light = load.copy()
    np.put_along_axis(light, order[:, :big], 0.0, 1)
    pieces = num_slots - (experts - big)
    if not big <= pieces <= big * num_ranks:
        return None
    small = np.repeat(light.sum(1)[:, None] / num_ranks, num_ranks, 1)
    one = np.ones(load.shape, np.int64)
    np.put_along_axis(one, order[:, :big], 0, 1)
    ids, weight = _copies(light, one)
    for turn in range(_LAYINGS):
        holds = _lay(heavy, np.maximum(target[:, None] - small, 1e-3 * target[:, None]))
        if not _fit(holds, heavy, pieces, per_rank):
            return None
        room = per_rank - holds.sum(1)
        if turn < _LAYINGS // 2:
            small = room * (light.sum(1) / max(experts - big, 1))[:, None]
            continue
        ranks = _place(ids, weight, room)
        small = np.zeros(small.shape)
        np.add.at(small, (np.arange(len(load))[:, None], ranks), weight)
    batch, row, rank = np.nonzero(holds)
    ids = np.concatenate([ids, order[batch, row].reshape(len(load), -1)], 1)
    return _table(ids, np.concatenate([ranks, rank.reshape(len(load), -1)], 1), num_ranks)


def _lay(heavy: Floats, room: Floats) -> NDArray[np.bool_]:
    """Experts [B, J] end to end over rooms [B, R], scaled to end together -> who reaches over whom [B, J, R]."""
    ends = np.cumsum(heavy, 1)
    ends /= ends[:, -1:]
    walls = np.cumsum(room, 1)
    walls /= walls[:, -1:]
    begin = np.concatenate([np.zeros((len(ends), 1)), ends[:, :-1]], 1)
    left = np.concatenate([np.zeros((len(walls), 1)), walls[:, :-1]], 1)
    margin = 1e-9
    return (ends[:, :, None] > left[:, None] + margin) & (begin[:, :, None] < walls[:, None] - margin)


def _fit(holds: NDArray[np.bool_], heavy: Floats, pieces: int, per_rank: int) -> bool:
    """Add and drop copies until each problem has `pieces` and no rank more than `per_rank`; False where impossible."""
    rows = np.arange(len(holds))
    if pieces > per_rank * holds.shape[2]:
        return False
    for _ in range(holds[0].size):
        total, on_rank, copies = holds.sum((1, 2)), holds.sum(1), holds.sum(2)
        crowded = on_rank.argmax(1)
        drop = (total > pieces) | (on_rank[rows, crowded] > per_rank)
        add = ~drop & (total < pieces)
        if not (drop | add).any():
            return True
        share = heavy / np.maximum(copies, 1)
        spare = holds[rows, :, crowded] & (copies > 1)
        if not spare[drop].any(1).all():
            return False
        victim = np.where(spare, share, np.inf).argmin(1)
        holds[rows[drop], victim[drop], crowded[drop]] = False
        free = on_rank.argmin(1)
        chosen = np.where(holds[rows, :, free], -1.0, share).argmax(1)
        if holds[rows, chosen, free][add].any():
            return False
        holds[rows[add], chosen[add], free[add]] = True
    return False
