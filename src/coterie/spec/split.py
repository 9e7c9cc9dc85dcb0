"""How a batch's tokens are divided among the copies of each expert: `split` for many layers, `LayerSplit` for one.

The exact problem is a linear programme: the busiest rank shall have as little as possible. Water-filling solves it by
turns: an expert's tokens go to its copies so that their ranks rise to one level, given everything else; sweeps over the
experts (over-relaxed, most copies first) approach the minimum of the sum of squares, which is also the min-max; they
begin with the division that suits the load the placement was made for. The last sweep is in whole tokens. All is
elementwise, sorted or summed in a fixed order, so every rank computes the same shares from the same counts. Experts of
one copy have no choice and cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.spec.errors import SpecError
from coterie.spec.placement import EMPTY, ExpertPlacement

Counts = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SWEEPS = 4
RELAX = 1.4
_NOWHERE = 1e18
"""Load of the rank that pads an expert's list of copies: no water reaches it."""


def split(
    counts: Counts, placement: ExpertPlacement, *, expected: Floats | None = None, speeds: Floats | None = None
) -> Ints:
    """Counts [L, E] of tokens per expert -> tokens per slot [L, S]; the slots of an expert sum to its count.

    `expected` [L, E] is the load that `placement` was made for: a good beginning. `speeds` [R] (1.0 is usual) makes
    slow ranks get less: levels are then in time. `SplitPlan` keeps what does not depend on the counts.
    """
    counts = np.asarray(counts)
    _check_counts(counts, (placement.num_layers, placement.num_experts))
    plan = SplitPlan.of(placement.slot_to_expert, placement.num_experts, placement.num_ranks, speeds)
    return (plan if expected is None else plan.expecting(expected)).whole(counts)


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """The copies of one replicated expert of each layer [L, C]: flat ranks and slots, parts to begin with, speeds."""

    ranks: Ints
    slots: Ints
    parts: Floats
    speeds: Floats | None

    @property
    def width(self) -> int:
        return self.ranks.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """What `split` needs of a placement: the replicated experts of many layers as columns, most copies first.

    `owner` and `single` [L, S] say whose tokens a slot of a single copy takes; `experts` [J, L] are the experts of the
    columns (flat, in rows of E + 1). Padding (layers with fewer copies or columns than others) points behind the last
    rank, slot and expert of the layer.
    """

    num_ranks: int
    owner: Ints
    single: NDArray[np.bool_]
    experts: Ints
    columns: tuple[_Column, ...]

    @classmethod
    def of(
        cls, table: NDArray[np.integer[Any]], num_experts: int, num_ranks: int, speeds: Floats | None = None
    ) -> SplitPlan:
        """Table [L, S] (no two copies on a rank) and the ranks' speeds -> plan."""
        layers, slots = table.shape
        order, start, copies = _by_expert(table, num_experts)
        owner = np.maximum(table, 0).astype(np.int64)
        rows, layer = np.arange(layers), np.arange(layers)[:, None]
        single = (np.take_along_axis(copies, owner, 1) == 1) & (table != EMPTY)
        ranked = np.argsort((-copies).astype(np.int16), 1, kind="stable")
        speed = None if speeds is None else np.append(_checked_speeds(speeds, num_ranks), 1.0)
        columns, experts = [], []
        for column in range(int((copies > 1).sum(1).max(initial=0))):
            expert = ranked[:, column]
            held = copies[rows, expert]
            lane = np.arange(int(held.max()))
            real = (lane < held[:, None]) & (held > 1)[:, None]
            slot = order[layer, np.minimum(start[rows, expert][:, None] + lane, slots - 1)]
            rank = np.where(real, slot // (slots // num_ranks), num_ranks)
            experts.append(np.where(held > 1, expert, num_experts) + rows * (num_experts + 1))
            columns.append(
                _Column(
                    rank + layer * (num_ranks + 1),
                    np.where(real, slot, slots) + layer * (slots + 1),
                    real / np.maximum(held, 1)[:, None],
                    None if speed is None else speed[rank],
                )
            )
        return cls(num_ranks, owner, single, np.array(experts, np.int64).reshape(-1, layers), tuple(columns))

    def expecting(self, loads: Floats, sweeps: int = 40) -> SplitPlan:
        """The plan that begins as `loads` [L, E] are best divided."""
        padded = np.zeros((len(loads), self.owner.shape[1] + 1))
        padded[:, :-1] = self.level(loads, sweeps)
        shares, columns = padded.reshape(-1), []
        for column in self.columns:
            share = shares[column.slots]
            total = share.sum(1, keepdims=True)
            parts = np.where(total > 0, share / np.maximum(total, 1e-300), column.parts)
            columns.append(_Column(column.ranks, column.slots, parts, column.speeds))
        return SplitPlan(self.num_ranks, self.owner, self.single, self.experts, tuple(columns))

    def whole(self, counts: Counts, sweeps: int = SWEEPS) -> Ints:
        """Counts [L, E] -> whole tokens per slot [L, S]."""
        return self._fill(counts.astype(np.float64), sweeps, whole=True).astype(np.int64)

    def level(self, loads: Floats, sweeps: int = SWEEPS) -> Floats:
        """Loads [L, E] of any scale -> share of each slot [L, S], not rounded."""
        return self._fill(loads, sweeps, whole=False)

    def _fill(self, loads: Floats, sweeps: int, *, whole: bool) -> Floats:
        layers, slots = self.owner.shape
        shares = np.zeros((layers, slots + 1))
        shares[:, :-1] = np.where(self.single, np.take_along_axis(loads, self.owner, 1), 0.0)
        ranks = np.full((layers, self.num_ranks + 1), _NOWHERE)
        ranks[:, :-1] = shares[:, :-1].reshape(layers, self.num_ranks, -1).sum(-1)
        padded = np.concatenate([loads, np.zeros((layers, 1))], 1)
        flat, tokens = ranks.reshape(-1), padded.reshape(-1)[self.experts]
        fills = [
            _Two(column, many) if column.width == 2 else _Many(column, many)
            for column, many in zip(self.columns, tokens, strict=True)
        ]
        for fill in fills:
            fill.begin(flat)
        for _ in range(sweeps - 1):
            for fill in fills:
                fill.pour(flat)
        for fill in fills:
            if whole:
                fill.pour_whole(flat)
            else:
                fill.pour(flat)
        for column, fill in zip(self.columns, fills, strict=True):
            shares.reshape(-1)[column.slots] = fill.share
        return shares[:, :-1]


class _Many:
    """Shares [L, C] of one column, poured again in each sweep."""

    def __init__(self, column: _Column, tokens: Floats) -> None:
        self.ranks, self.speeds, self.tokens = column.ranks, column.speeds, tokens[:, None]
        self.share = column.parts * self.tokens

    def begin(self, flat: Floats) -> None:
        flat[self.ranks] += self.share

    def pour(self, flat: Floats) -> None:
        """Level the ranks of the copies and go beyond by RELAX, as far as no share becomes negative."""
        base = flat[self.ranks] - self.share
        step = self._level(base) - self.share
        reach = np.divide(self.share, -step, out=np.full(step.shape, RELAX), where=step < 0).min(1, keepdims=True)
        self.share = np.maximum(self.share + np.minimum(reach, RELAX) * step, 0.0)
        flat[self.ranks] = base + self.share

    def pour_whole(self, flat: Floats) -> None:
        """Level in whole tokens: round down, then one more each to the copies on the lowest ranks."""
        base = flat[self.ranks] - self.share
        share = np.floor(np.minimum(self._level(base), self.tokens))
        left = np.maximum(self.tokens - share.sum(1, keepdims=True), 0.0)
        height = base + share if self.speeds is None else (base + share) / self.speeds
        place = np.argsort(np.argsort(height, 1, kind="stable"), 1)
        each = np.floor(left / share.shape[1])
        self.share = share + each + (place < left - each * share.shape[1])
        flat[self.ranks] = base + self.share

    def _level(self, base: Floats) -> Floats:
        if self.speeds is None:
            ordered = np.sort(base, 1)
            water = (self.tokens + np.cumsum(ordered, 1)) / np.arange(1, base.shape[1] + 1)
            return np.maximum(water.min(1, keepdims=True) - base, 0.0)
        order = np.argsort(base / self.speeds, 1, kind="stable")
        ordered, speeds = np.take_along_axis(base, order, 1), np.take_along_axis(self.speeds, order, 1)
        water = (self.tokens + np.cumsum(ordered, 1)) / np.cumsum(speeds, 1)
        return np.maximum(water.min(1, keepdims=True) * self.speeds - base, 0.0)


class _Two:
    """`_Many` for columns of two copies: the first share [L] says all, and half the numpy calls do."""

    def __init__(self, column: _Column, tokens: Floats) -> None:
        self.first, self.second = column.ranks[:, 0], column.ranks[:, 1]
        self.speeds, self.tokens = column.speeds, tokens
        self.taken = column.parts[:, 0] * tokens

    @property
    def share(self) -> Floats:
        return np.stack([self.taken, self.tokens - self.taken], 1)

    def begin(self, flat: Floats) -> None:
        flat[self.first] += self.taken
        flat[self.second] += self.tokens - self.taken

    def pour(self, flat: Floats) -> None:
        one, other = flat[self.first], flat[self.second]
        self._move(flat, one, other, self._level(one, other, RELAX))

    def pour_whole(self, flat: Floats) -> None:
        one, other = flat[self.first], flat[self.second]
        level = self._level(one, other, 1.0)
        taken = np.floor(level)
        left = self.tokens - taken - np.floor(self.tokens - level)
        high, low = one + (taken - self.taken), other - (level - self.taken)
        if self.speeds is not None:
            high, low = high / self.speeds[:, 0], low / self.speeds[:, 1]
        self._move(flat, one, other, taken + left * (high <= low))

    def _level(self, one: Floats, other: Floats, relax: float) -> Floats:
        if self.speeds is None:
            step = (other - one) * (0.5 * relax)
        else:
            up, down = self.speeds[:, 0], self.speeds[:, 1]
            step = (other * up - one * down) * (relax / (up + down))
        step += self.taken
        np.maximum(step, 0.0, out=step)
        return np.minimum(step, self.tokens, out=step)

    def _move(self, flat: Floats, one: Floats, other: Floats, taken: Floats) -> None:
        change = taken - self.taken
        self.taken = taken
        flat[self.first] = one + change
        flat[self.second] = other - change


class LayerSplit:
    """`split` of one layer without numpy's cost per call: what a dispatcher asks in every step.

    The method is the same; a token may go to another copy than in `split`, where rounding decides.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        layer: int,
        *,
        expected: Floats | None = None,
        speeds: Floats | None = None,
    ) -> None:
        row = placement.slot_to_expert[layer : layer + 1]
        plan = SplitPlan.of(row, placement.num_experts, placement.num_ranks, speeds)
        if expected is not None:
            plan = plan.expecting(np.asarray(expected, np.float64)[None])
        self._num_experts, self._num_ranks = placement.num_experts, placement.num_ranks
        self._owner, self._single = plan.owner[0], plan.single[0]
        self._experts = plan.experts[:, 0]
        self._slots = [column.slots[0].tolist() for column in plan.columns]
        self._ranks = [column.ranks[0].tolist() for column in plan.columns]
        self._parts = [column.parts[0].tolist() for column in plan.columns]
        self._speeds = None if speeds is None else _checked_speeds(speeds, placement.num_ranks).tolist()

    def whole(self, counts: Counts, sweeps: int = SWEEPS) -> Ints:
        """Counts [E] -> whole tokens per slot [S]."""
        _check_counts(counts, (self._num_experts,))
        shares = np.where(self._single, counts[self._owner], 0).astype(np.int64)
        loads = shares.reshape(self._num_ranks, -1).sum(1).astype(float).tolist()
        tokens = counts[self._experts].tolist()
        active = [(float(many), self._ranks[index], index) for index, many in enumerate(tokens) if many]
        taken = [[many * part for part in self._parts[index]] for many, _, index in active]
        for share, (_, ranks, _) in zip(taken, active, strict=True):
            for part, rank in zip(share, ranks, strict=True):
                loads[rank] += part
        for _ in range(sweeps - 1):
            for share, (many, ranks, _) in zip(taken, active, strict=True):
                if len(ranks) == 2:
                    self._pour_two(loads, ranks, share, many)
                else:
                    self._pour(loads, ranks, share, many)
        for share, (many, ranks, index) in zip(taken, active, strict=True):
            for slot, value in zip(self._slots[index], self._pour_whole(loads, ranks, share, many), strict=True):
                shares[slot] = value
        return shares

    def _pour_two(self, loads: list[float], ranks: list[int], taken: list[float], many: float) -> None:
        first, second = ranks
        one, other = loads[first], loads[second]
        if self._speeds is None:
            step = (other - one) * 0.5
        else:
            up, down = self._speeds[first], self._speeds[second]
            step = (other * up - one * down) / (up + down)
        old = taken[0]
        new = min(max(step * RELAX + old, 0.0), many)
        taken[0], taken[1] = new, many - new
        loads[first], loads[second] = one + (new - old), other - (new - old)

    def _pour(self, loads: list[float], ranks: list[int], taken: list[float], many: float) -> None:
        base = [loads[rank] - share for rank, share in zip(ranks, taken, strict=True)]
        level = self._level(base, ranks, many)
        relax = RELAX
        for old, new in zip(taken, level, strict=True):
            if new < old:
                relax = min(relax, old / (old - new))
        for index, (rank, low) in enumerate(zip(ranks, base, strict=True)):
            taken[index] = max(taken[index] + relax * (level[index] - taken[index]), 0.0)
            loads[rank] = low + taken[index]

    def _pour_whole(self, loads: list[float], ranks: list[int], taken: list[float], many: float) -> list[float]:
        base = [loads[rank] - share for rank, share in zip(ranks, taken, strict=True)]
        share = [float(int(min(new, many))) for new in self._level(base, ranks, many)]
        height = [low + new for low, new in zip(base, share, strict=True)]
        if self._speeds is not None:
            height = [high / self._speeds[rank] for high, rank in zip(height, ranks, strict=True)]
        each, more = divmod(max(many - sum(share), 0.0), len(ranks))
        for place, index in enumerate(sorted(range(len(ranks)), key=height.__getitem__)):
            share[index] += each + (place < more)
        for rank, low, new in zip(ranks, base, share, strict=True):
            loads[rank] = low + new
        return share

    def _level(self, base: list[float], ranks: list[int], many: float) -> list[float]:
        if self._speeds is None:
            water, total = _NOWHERE, 0.0
            for number, low in enumerate(sorted(base), 1):
                total += low
                water = min(water, (many + total) / number)
            return [max(water - low, 0.0) for low in base]
        speeds = [self._speeds[rank] for rank in ranks]
        order = sorted(range(len(base)), key=lambda index: base[index] / speeds[index])
        water, total, width = _NOWHERE, 0.0, 0.0
        for index in order:
            total += base[index]
            width += speeds[index]
            water = min(water, (many + total) / width)
        return [max(water * speed - low, 0.0) for low, speed in zip(base, speeds, strict=True)]


def _check_counts(counts: Counts, shape: tuple[int, ...]) -> None:
    if counts.shape != shape or not np.issubdtype(counts.dtype, np.integer):
        raise SpecError(f"counts must be integers {list(shape)}, not {counts.dtype} {list(counts.shape)}")
    if counts.size and counts.min() < 0:
        raise SpecError("counts must not be negative")


def _checked_speeds(speeds: Floats, num_ranks: int) -> Floats:
    speeds = np.asarray(speeds, np.float64)
    if speeds.shape != (num_ranks,) or not (np.isfinite(speeds).all() and (speeds > 0).all()):
        raise SpecError(f"speeds must be {num_ranks} positive numbers, one per rank")
    return speeds


def _by_expert(table: NDArray[np.integer[Any]], num_experts: int) -> tuple[Ints, Ints, Ints]:
    """Slots of each layer ordered by expert [L, S], where each expert's begin [L, E], and how many they are [L, E]."""
    small = np.int16 if num_experts < 1 << 15 else np.int64  # a radix sort
    order = np.argsort(table.astype(small), 1, kind="stable")
    layers = len(table)
    flat = table.astype(np.int64) + 1 + np.arange(layers)[:, None] * (num_experts + 1)
    counts = np.bincount(flat.ravel(), minlength=layers * (num_experts + 1)).reshape(layers, -1)
    return order, np.cumsum(counts, 1)[:, :-1], counts[:, 1:]
