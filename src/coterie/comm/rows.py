"""What travels in an exchange and in which order: packed rows, who needs which, and the way back. Host integers only.

A packed row is one byte row: the token's row as it travels, its K slot ids and, in forms that sum on the way, its K
weights.
Plans are permutations of rows; `moe.forms` moves rows by them and lets the kernels do the arithmetic.
Letters: T tokens, K experts per token, D destinations, M rows sent, N rows received, P (row, slot) pairs computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.comm.buffers import Bytes
from coterie.comm.transport import CountMismatch, Int64

Integers = NDArray[np.integer[Any]]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Bytes of a packed row: the row itself (`body` of them, a multiple of four), int32 slots [K], float32 weights [K]
    if `weighted`."""

    body: int
    top_k: int
    weighted: bool = False

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.body + 4 * self.top_k * (2 if self.weighted else 1)

    def address(self, packed: Bytes, slots: NDArray[np.int32], weights: Floats) -> None:
        """Write where each packed row [T, width] goes."""
        self.slots(packed)[:] = slots
        if self.weighted:
            packed.view(np.float32)[:, self.body // 4 + self.top_k :] = weights

    def bodies(self, packed: Bytes) -> NDArray[np.uint32]:
        """The rows themselves: a view [N, body / 4]."""
        return packed.view(np.uint32)[:, : self.body // 4]

    def slots(self, packed: Bytes) -> NDArray[np.int32]:
        """A view [N, K]."""
        return packed.view(np.int32)[:, self.body // 4 : self.body // 4 + self.top_k]

    def weights(self, packed: Bytes) -> Floats:
        """A copy [N, K] (of no columns unless weighted)."""
        return packed.view(np.float32)[:, self.body // 4 + self.top_k :].copy()


class FanOut(NamedTuple):
    """Rows by destination: `row` [M] in order of (destination, row), `counts` [D]."""

    row: Int64
    counts: Int64


def needed(slots: NDArray[np.int32], slots_per_destination: int, destinations: range) -> NDArray[np.bool_]:
    """Which of some destinations (ranks, or nodes) each row has a slot on [rows, D]."""
    where = slots // slots_per_destination - destinations.start
    member = np.zeros((len(slots), len(destinations)), np.bool_)
    inside = where.astype(np.uint32) < len(destinations)  # what lies before the first is a large number
    if inside.all():
        member[np.arange(len(slots))[:, None], where] = True
        return member
    row, k = inside.nonzero()
    member[row, where[row, k]] = True
    return member


def fan_out(member: NDArray[np.bool_]) -> FanOut:
    """Every row once to each destination that needs it."""
    destination, row = member.T.nonzero()
    return FanOut(row, np.bincount(destination, minlength=member.shape[1]))


def in_order(counts: Int64) -> FanOut:
    """All rows as they lie, the first `counts[0]` to destination 0 and so on."""
    return FanOut(np.arange(int(counts.sum())), counts)


class Part(NamedTuple):
    """One transfer of a payload: what goes to each destination, and how many rows come from each."""

    plan: FanOut
    received: Int64

    @property
    def leaving(self) -> int:
        """Rows to send."""
        return len(self.plan.row)

    @property
    def coming(self) -> int:
        """Rows to receive."""
        return int(self.received.sum())


def far_first(plan: FanOut, received: Int64, near: range, pieces: int) -> list[Part]:
    """A payload in parts: what goes to and comes from ranks that are not `near`, every rank's share of it cut in so
    many pieces, then the rest."""
    is_near = np.zeros(len(received), np.bool_)
    is_near[near.start : near.stop] = True
    ends = np.cumsum(plan.counts)
    begins = ends - plan.counts
    far, parts = np.where(is_near, 0, plan.counts), []
    for piece in range(pieces):
        start, stop = begins + far * piece // pieces, begins + far * (piece + 1) // pieces
        order = [plan.row[a:b] for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
        coming = np.where(is_near, 0, received * (piece + 1) // pieces - received * piece // pieces)
        parts.append(Part(FanOut(np.concatenate(order), stop - start), coming))
    own = plan.row[int(begins[near.start]) : int(ends[near.stop - 1])]
    return [*parts, Part(FanOut(own, np.where(is_near, plan.counts, 0)), np.where(is_near, received, 0))]


def sources_of(parts: Sequence[Part]) -> Int64:
    """Source of each row that arrives, part by part [N]."""
    return np.concatenate([np.repeat(np.arange(len(part.received)), part.received) for part in parts])


def row_counts(member: NDArray[np.bool_]) -> Int64:
    """Rows to each destination [D]."""
    return np.count_nonzero(member, axis=0)


class Sum(NamedTuple):
    """Which rows make each sum: `position` and `weights` [N, D], for `Kernels.combine`. Shorter sums are padded with
    their own first row at weight 0, so that another token's infinities stay its own."""

    position: Int64
    weights: Floats


def sum_plan(member: NDArray[np.bool_]) -> Sum:
    """The rows that come back for a fan-out, in its order, summed per row in order of destination."""
    ends = np.cumsum(np.count_nonzero(member, axis=0))
    number = np.cumsum(member, axis=0) - 1 + np.concatenate([[0], ends[:-1]])
    return _sums(member, number[member], np.ones(int(ends[-1]), np.float32))


def _sums(member: NDArray[np.bool_], position: Int64, weights: Floats) -> Sum:
    """Sums of the marked entries of each row, given in row-major order."""
    place = np.cumsum(member, axis=1) - 1
    row, column = np.nonzero(member)
    terms = max(int(member.sum(1).max(initial=0)), 1)
    plan = Sum(np.zeros((len(member), terms), np.int64), np.zeros((len(member), terms), np.float32))
    plan.position[row] = position[np.searchsorted(row, row)][:, None]
    plan.position[row, place[row, column]] = position
    plan.weights[row, place[row, column]] = weights
    return plan


class Arrived(NamedTuple):
    """Rows at the rank that computes them. `gather` [P]: received row of each row of the expert kernel, by local slot;
    `counts`: rows per local slot; `output` [P]: where the output of each pair is, in order of (received row, k);
    `member` [N, K]: which slots of the received rows are here; `row` [P]: the received row of each pair in that order.
    """

    gather: Int64
    counts: Int64
    output: Int64
    member: NDArray[np.bool_]
    row: Int64

    @classmethod
    def of(cls, slots: NDArray[np.int32], own: range) -> Arrived:
        """Received rows with `slots` [N, K], on a rank that holds the slots `own`."""
        local = slots - own.start
        member = local.astype(np.uint32) < len(own)
        row, k = member.nonzero()
        pair = local[row, k]
        order = pair.argsort(kind="stable")
        output = np.empty(len(order), np.int64)
        output[order] = np.arange(len(order))
        return cls(row[order], np.bincount(pair, minlength=len(own)), output, member, row)

    @property
    def work(self) -> tuple[int, int]:
        """Rows to compute, and slots that have any."""
        return len(self.gather), int(np.count_nonzero(self.counts))

    def sums(self, weights: Floats) -> Sum:
        """The weighted sum of each row's own outputs, in k order."""
        return _sums(self.member, self.output, weights[self.member])

    def returned(self, sources: Int64, num_ranks: int) -> FanOut:
        """Outputs in order of (source rank, received row, k), and how many go back to each. `sources` [N] by row."""
        source = sources[self.row]
        counts = np.bincount(source, minlength=num_ranks)
        ordered = len(source) < 2 or bool((source[1:] >= source[:-1]).all())
        return FanOut(self.output if ordered else self.output[source.argsort(kind="stable")], counts)


def check_equal(what: str, counted: Int64, announced: Int64) -> None:
    """Compare what was found in a payload with what its senders had announced."""
    if counted.shape != announced.shape or not (counted == announced).all():
        raise CountMismatch(f"{what}: found {counted.tolist()} by source, announced were {announced.tolist()}")


class WayBack(NamedTuple):
    """Where the exact forms find the outputs that come back: `position` [T, K], `counts` [R] from each rank. `pieces`:
    in how many those of far ranks come first; 0: all at once, by rank."""

    position: Int64
    counts: Int64
    pieces: int = 0

    @classmethod
    def of(cls, slots: NDArray[np.int32], slots_per_rank: int, num_ranks: int) -> WayBack:
        """Outputs come back in order of (rank, token, k)."""
        rank = (slots // slots_per_rank).reshape(-1)
        position = np.empty(len(rank), np.int64)
        position[rank.argsort(kind="stable")] = np.arange(len(rank))
        return cls(position.reshape(slots.shape), np.bincount(rank, minlength=num_ranks))

    def far_first(self, ranks: Integers, near: range, pieces: int) -> WayBack:
        """The same where outputs come back in the parts that `far_first` makes. `ranks` [T, K]: which computes each."""
        every = np.arange(len(self.counts))
        is_near = (every >= near.start) & (every < near.stop)
        begins = np.arange(pieces + 1)[:, None] * self.counts // pieces  # of each rank's share [pieces + 1, R]
        taken = np.diff(begins, axis=0)
        taken[:, is_near] = 0
        sizes = np.concatenate([taken, np.where(is_near, self.counts, 0)[None]])
        starts = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(sizes.shape)
        within = self.position - (np.cumsum(self.counts) - self.counts)[ranks]
        piece = ((within + 1) * pieces - 1) // self.counts[ranks]
        piece = np.where(is_near[ranks], pieces, piece)
        begins[pieces] = 0  # the near part has all of a share
        return self._replace(position=starts[piece, ranks] + within - begins[piece, ranks], pieces=pieces)
