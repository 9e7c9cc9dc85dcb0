"""Local search on a placement, many layers at once: what lowers the hottest rank.

`swap_in_pairs` is for fresh placements: hot ranks swap experts with light ones, all pairs at once. `Search` makes few
changes to one that is in use, by two kinds of step, both between the hottest rank and one of the lightest: swap two
experts (two moves), or put a copy of one of its experts where another expert can spare one (one move). Loads are split
equally among copies here, which measured better on the next window than following the split of a batch closely. Where
experts are kept on nodes, a step to another node is taken only if none inside helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_LEAST = 1e-4
"""A step must lower the hottest rank by this part of it."""


def swap_in_pairs(table: Ints, load: Floats, rounds: int, tolerance: float = 0.0) -> None:
    """Swap in table [B, R, k] for loads [B, E], in place: the n-th hottest rank with the n-th lightest, then others.

    Ranks that exceed the mean by less than `tolerance` of it are left alone.
    """
    batch, ranks, _ = table.shape
    half = ranks // 2
    copies = np.maximum(_count(table, load.shape[1]), 1)
    item = np.take_along_axis(load / copies, table.reshape(batch, -1), 1).reshape(table.shape)
    active = np.arange(batch)
    for turn in range(rounds if half else 0):
        height = item[active].sum(-1)
        order = np.argsort(height, 1, kind="stable")
        hot, light = order[:, : -half - 1 : -1], np.roll(order[:, :half], turn // 2 % half, 1)
        rows = active[:, None]
        gap = np.take_along_axis(height, hot, 1) - np.take_along_axis(height, light, 1)
        shift = item[rows, hot][..., None] - item[rows, light][..., None, :]
        same = table[rows, hot][..., None] == table[rows, light][..., None, :]
        wrong = same.any(3, keepdims=True) | same.any(2, keepdims=True)
        miss = np.where(wrong, np.inf, np.abs(shift - 0.5 * gap[..., None, None])).reshape(len(active), half, -1)
        best = miss.argmin(2)
        gain = 0.5 * gap - np.take_along_axis(miss, best[..., None], 2)[..., 0]
        mean = height.mean(1, keepdims=True)
        high = np.take_along_axis(height, hot, 1) > mean * (1 + tolerance)
        problem, pair = np.nonzero((gain > _LEAST * mean) & high)
        own, other = np.divmod(best[problem, pair], table.shape[2])
        one = active[problem], hot[problem, pair], own
        two = active[problem], light[problem, pair], other
        for array in (table, item):
            array[one], array[two] = array[two], array[one]
        if turn % 2:
            active = active[np.bincount(problem, minlength=len(active)) > 0]
        if not len(active):
            return


def _count(table: Ints, experts: int) -> Ints:
    """Copies [B, E]."""
    flat = table.reshape(len(table), -1) + np.arange(len(table))[:, None] * experts
    return np.bincount(flat.ravel(), minlength=len(table) * experts).reshape(len(table), experts)


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """`steps` at most; `node_of_rank` [R] keeps steps inside nodes while that helps."""

    steps: int
    node_of_rank: NDArray[np.int32] | None = None
    lightest: int = 8

    def improve(self, table: Ints, load: Floats, left: Ints | None = None) -> None:
        """Change table [L, R, k] in place for loads [L, E]; `left` [L], if given, are the moves that may be made, and
        has those made subtracted."""
        layers, experts = load.shape
        wide = np.full(layers, self.node_of_rank is None)
        price = 1.0 if left is None else 2.0
        left = np.full(layers, 1 << 30) if left is None else left
        active = np.flatnonzero(left > 0)
        for _ in range(self.steps if len(active) else 0):
            state = _State.of(table[active], load[active], experts)
            step = self._step(state, wide[active], left[active], price)
            better = step.gain > _LEAST * state.hottest
            step.apply(table, active, better)
            left[active[better]] -= step.cost[better]
            done = ~better & wide[active]
            wide[active] = ~better
            if self.node_of_rank is None:
                wide[:] = True
            active = active[~done & (left[active] > 0)]
            if not len(active):
                return

    def _step(self, state: _State, wide: Bools, left: Ints, price: float) -> _Step:
        rows = np.arange(len(state.table))
        heat = state.rank_load.copy()
        if self.node_of_rank is not None:
            away = self.node_of_rank[None] != self.node_of_rank[state.hot][:, None]
            heat[away & ~wide[:, None]] = np.inf
        heat[rows, state.hot] = np.inf
        number = min(self.lightest, heat.shape[1] - 1)
        if number < 1:
            return _Step.none(len(rows))
        light = np.argpartition(heat, number - 1, 1)[:, :number]
        allowed = np.isfinite(np.take_along_axis(heat, light, 1))
        here, there = state.table[rows, state.hot], state.table[rows[:, None], light]
        same = here[:, :, None, None] == there[:, None]
        swap = state.after_swap(rows, light)
        swap[same.any(3)[..., None] | same.any(1)[:, None] | ~allowed[:, None, :, None]] = np.inf
        copy = state.after_copy(rows, light)
        copy[np.broadcast_to(same.any(3)[..., None] | ~allowed[:, None, :, None], copy.shape)] = np.inf
        swap[left < 2] = np.inf
        return _Step.best(state, light, swap, copy, price)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """Loads of slots [L, R, k] and ranks [L, R] of a table, its hottest ranks, copies and loads of experts [L, E]."""

    table: Ints
    load: Floats
    copies: Ints
    item: Floats
    rank_load: Floats
    hot: Ints

    @classmethod
    def of(cls, table: Ints, load: Floats, experts: int) -> _State:
        copies = _count(table, experts)
        item = np.take_along_axis(load / copies, table.reshape(len(table), -1), 1).reshape(table.shape)
        rank_load = item.sum(-1)
        return cls(table, load, copies, item, rank_load, rank_load.argmax(1))

    @property
    def hottest(self) -> Floats:
        return self.rank_load.max(1)

    def after_swap(self, rows: Ints, light: Ints) -> Floats:
        """The higher of the two ranks after a swap: slot i of the hottest with slot j of light rank g [L, i, g, j]."""
        shift = self.item[rows, self.hot][:, :, None, None] - self.item[rows[:, None], light][:, None]
        high, low = self.hottest[:, None, None, None], np.take_along_axis(self.rank_load, light, 1)[:, None, :, None]
        return np.maximum(high - shift, low + shift)

    def after_copy(self, rows: Ints, light: Ints) -> Floats:
        """The highest rank concerned after slot j of light rank g becomes a copy of slot i of the hottest."""
        here, there = self.table[rows, self.hot], self.table[rows[:, None], light]
        copies = np.take_along_axis(self.copies, here, 1)[:, :, None, None]
        whole = np.take_along_axis(self.load, here, 1)[:, :, None, None]
        high = self.hottest[:, None, None, None] - whole / (copies * (copies + 1))
        low = np.take_along_axis(self.rank_load, light, 1)[:, None, :, None]
        low = low + whole / (copies + 1) - self.item[rows[:, None], light][:, None]
        flat = there.reshape(len(rows), -1)
        spare = np.take_along_axis(self.copies, flat, 1)
        rest = np.take_along_axis(self.load, flat, 1) / np.maximum(spare * (spare - 1), 1)
        rest = np.where(spare > 1, rest + np.take_along_axis(self._highest(), flat, 1), np.inf)
        return np.maximum(np.maximum(high, low), rest.reshape(there.shape)[:, None])

    def _highest(self) -> Floats:
        """The highest rank that holds each expert [L, E]."""
        highest = np.zeros(self.load.shape)
        rows = np.arange(len(self.table))[:, None, None]
        np.maximum.at(highest, (rows, self.table), np.broadcast_to(self.rank_load[..., None], self.table.shape))
        return highest


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One step per layer: how much lower, how many moves, which slots, swap or copy."""

    gain: Floats
    cost: Ints
    swaps: Bools
    hot: tuple[Ints, Ints]
    light: tuple[Ints, Ints]

    @classmethod
    def none(cls, layers: int) -> _Step:
        zero = np.zeros(layers, np.int64)
        return cls(np.zeros(layers), zero, zero > 0, (zero, zero), (zero, zero))

    @classmethod
    def best(cls, state: _State, light: Ints, swap: Floats, copy: Floats, swap_price: float) -> _Step:
        """The step with the largest gain per price."""
        layers, shape = len(swap), swap.shape[1:]
        rows = np.arange(layers)
        first, second = swap.reshape(layers, -1).argmin(1), copy.reshape(layers, -1).argmin(1)
        by_swap = state.hottest - swap.reshape(layers, -1)[rows, first]
        by_copy = state.hottest - copy.reshape(layers, -1)[rows, second]
        swaps = by_swap >= by_copy * swap_price
        own, rank, other = np.unravel_index(np.where(swaps, first, second), shape)
        gain = np.where(swaps, by_swap, by_copy)
        return cls(gain, np.where(swaps, 2, 1), swaps, (state.hot, own), (light[rows, rank], other))

    def apply(self, table: Ints, layers: Ints, chosen: Bools) -> None:
        """Change the table in the chosen ones of `layers`."""
        rows = layers[chosen]
        hot = rows, self.hot[0][chosen], self.hot[1][chosen]
        light = rows, self.light[0][chosen], self.light[1][chosen]
        swaps = self.swaps[chosen]
        ours, theirs = table[hot], table[light]
        table[light] = ours
        table[hot] = np.where(swaps, theirs, ours)
