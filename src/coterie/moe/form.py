"""Form: what the forms of an exchange share: packing, sending rows part by part, landing them, and the exact way back.

A form is two generators that yield a handle where they would wait. `dispatch` gives the rows for this rank's expert
kernel and the way back, which `combine` spends. A payload is one planned exchange; where much of it goes to other
nodes it is several transfers (`Part`), those first, and only the first of them ends a turn of two micro-batches.
Which rows go where is the forms' own (`moe.forms`, `moe.hierarchical`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from coterie.comm.buffers import Bytes, Lease, take_rows
from coterie.comm.exchange import Counts, Exchange
from coterie.comm.pieces import parts_received, parts_sent
from coterie.comm.rows import Arrived, FanOut, Part, RowFormat, Sum, WayBack, far_first
from coterie.comm.transport import Handle, Int64, Transport
from coterie.comm.travel import Travel
from coterie.kernels.api import Array, Routed


class Call(NamedTuple):
    """One layer's batch on this rank: x [T, H], routing, slots [T, K] (host), expert counts if copies exist."""

    layer: int
    x: Array
    routed: Routed
    slots: Any
    experts: Int64


class Landed(NamedTuple):
    """What a dispatch gives: rows (P of them) by local slot, rows per slot, the form's own way back, and how many rows
    there are on how many slots."""

    rows: Array
    counts: Array
    way: Any
    work: tuple[int, int]


class Home(NamedTuple):
    """Outputs on their way to the sum: rows, where each term is, its weight; the buffer to release after."""

    rows: Array
    position: Array
    weights: Array
    lease: Lease


class Ahead(NamedTuple):
    """Counts that all ranks are being told, of `parts` parts of each rank's tokens, and the exact way back."""

    handle: Handle
    header: list[int]
    home: WayBack
    parts: int


class Following:
    """A transfer that is posted with or after another one of its exchange, which has ended the turn: it is waited for
    at once."""

    carries_rows = False

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.ready, self.wait, self.result = handle.ready, handle.wait, handle.result

    @property
    def begun_ns(self) -> int:
        return self._handle.begun_ns

    @property
    def ended_ns(self) -> int:
        return self._handle.ended_ns


class Room:
    """Rows of a lent buffer, handed out one after another."""

    def __init__(self, rows: Any) -> None:
        self.rows, self._used = rows, 0

    def take(self, count: int) -> Any:
        """The next `count` rows."""
        self._used += count
        return self.rows[self._used - count : self._used]


Dispatching = Generator[Handle, None, Landed]
Returning = Generator[Handle, None, Home]


class Form:
    """What the forms share: one rank's exchange, kernels, and what a row is on its way."""

    def __init__(self, exchange: Exchange, travel: Travel) -> None:
        self.exchange, self.travel, self.kernels, self.mesh = exchange, travel, travel.kernels, exchange.mesh

    def row(self, call: Call, *, weighted: bool = False) -> RowFormat:
        """What a token's packed row is made of."""
        return RowFormat(self.travel.out_bytes(call.x.shape[1]), call.slots.shape[1], weighted)

    def pack(self, call: Call, row: RowFormat) -> tuple[Bytes, Lease]:
        """All tokens' packed rows [T, width]."""
        tokens = len(call.slots)
        lease = self.exchange.pool.lease(tokens * row.width)
        packed = lease.rows(tokens, row.width)
        self.travel.write(call.x, packed)
        row.address(packed, call.slots, self.kernels.to_host(call.routed.expert_weights))
        return packed, lease

    def send(
        self, group: Transport, rows: Bytes, parts: Sequence[Part]
    ) -> Generator[Handle, None, tuple[Bytes, Lease]]:
        """rows[plan.row] to the destinations, part by part -> what arrived, in a lent buffer."""
        width = rows.shape[1]
        leaving, out = self.room(parts_sent(parts), width)
        arriving, back = self.room(parts_received(parts), width)
        yield from self.ship(group, parts, lambda order, to: take_rows(rows, order, to), (leaving, arriving))
        out.release()
        return arriving.rows, back

    def room(self, count: int, width: int) -> tuple[Room, Lease]:
        """A lent buffer for so many rows."""
        lease = self.exchange.pool.lease(count * width)
        return Room(lease.rows(count, width)), lease

    def ship(
        self, group: Transport, parts: Sequence[Part], fill: Callable[[Int64, Any], Any], rooms: tuple[Room, Room]
    ) -> Generator[Handle, None, None]:
        """Every part leaves as soon as `fill` has gathered its rows; all are waited for. rooms: to send, to receive."""
        posted = [self.post(group, part, fill, rooms) for part in parts]
        width = rooms[1].rows.itemsize * rooms[1].rows.shape[1]
        for number, (part, handle) in enumerate(zip(parts, posted, strict=True)):
            yield Following(handle) if number else handle
            handle.result()
            self.exchange.carried(group, part.plan.counts, width, handle)

    def post(
        self, group: Transport, part: Part, fill: Callable[[Int64, Any], Any], rooms: tuple[Room, Room]
    ) -> Handle:
        """Let one part go."""
        leaving, arriving = rooms
        outgoing = fill(part.plan.row, leaving.take(part.leaving))
        return group.all_to_all_v(outgoing, part.plan.counts, part.received, arriving.take(part.coming))

    def give_back(
        self, group: Transport, outputs: Array, parts: Sequence[Part]
    ) -> Generator[Handle, None, tuple[Any, Lease]]:
        """outputs[plan.row] to the ranks they came from, part by part -> host rows in a lent buffer."""
        travel, pool = self.travel, self.exchange.pool
        hidden, leaving, total = outputs.shape[1], parts_sent(parts), parts_received(parts)
        width = travel.back_bytes(hidden)
        out, back = pool.lease(leaving * width), pool.lease(total * width)
        rooms = Room(travel.back_rows(out.whole, leaving, hidden)), Room(travel.back_rows(back.whole, total, hidden))
        yield from self.ship(group, parts, lambda order, to: travel.send_back(outputs, order, to), rooms)
        out.release()
        return rooms[1].rows, back

    def land(self, packed: Bytes, row: RowFormat, lease: Lease) -> tuple[Array, Array, Arrived, Any]:
        """Received rows -> the expert kernel's rows and counts, the plan, the weights [N, K] of a weighted row."""
        arrived = Arrived.of(row.slots(packed), self.exchange.own_slots)
        rows = self.travel.read(row.bodies(packed)[arrived.gather])
        weights = row.weights(packed)
        lease.release()
        return rows, self.kernels.from_host(arrived.counts), arrived, weights

    def add_up(self, rows: Array, plan: Sum) -> Array:
        """The sums of a plan."""
        kernels = self.kernels
        return kernels.combine(rows, kernels.from_host(plan.position), kernels.from_host(plan.weights), None)

    def home(self, rows: Any, plan: Sum, lease: Lease) -> Home:
        """The last sum, left to the dispatcher, which adds the shared experts to it."""
        kernels = self.kernels
        position, weights = kernels.from_host(plan.position), kernels.from_host(plan.weights)
        return Home(kernels.from_host(rows), position, weights, lease)

    def exact_return(self, outputs: Array, sources: FanOut, way: WayBack, routed: Routed) -> Returning:
        """One row per (token, expert) straight to the token's rank, to be summed there in top-k order."""
        parts = [Part(sources, way.counts)]
        if way.pieces:
            parts = far_first(sources, way.counts, self.mesh.near, way.pieces)
        rows, lease = yield from self.give_back(self.mesh.world, outputs, parts)
        kernels = self.kernels
        return Home(kernels.from_host(rows), kernels.from_host(way.position), routed.expert_weights, lease)

    def announce(self, call: Call, kind: int, row: RowFormat, rows: Int64, nodes: Int64 | None) -> Ahead:
        """Begin to tell all ranks what is coming: `rows` [C, R] and `nodes` [C, nodes] of each part of the tokens."""
        exchange, world = self.exchange, self.mesh.world
        between = rows[:, : self.mesh.num_nodes] * 0 if nodes is None else nodes
        back = WayBack.of(call.slots, exchange.placement.slots_per_rank, world.size)
        header = exchange.header(kind, call.layer, row.width, self.travel.back_bytes(call.x.shape[1]))
        parts = rows.reshape(-1), back.counts, between.reshape(-1), call.experts
        return Ahead(self.mesh.words.all_gather(exchange.message(header, *parts)), header, back, len(rows))

    def told(self, call: Call, ahead: Ahead) -> tuple[Counts, WayBack]:
        """Everyone's counts, and the way back: from ranks of other nodes first, where that is much."""
        exchange = self.exchange
        counts = exchange.read_counts(ahead.handle.result(), ahead.header, call.layer, ahead.parts)
        pieces = exchange.pieces(counts.far_pairs(self.mesh.node_of) * self.travel.back_bytes(call.x.shape[1]))
        if not exchange.policy.exact or pieces == 1:
            return counts, ahead.home
        ranks = call.slots // exchange.placement.slots_per_rank
        return counts, ahead.home.far_first(ranks, self.mesh.near, pieces)
