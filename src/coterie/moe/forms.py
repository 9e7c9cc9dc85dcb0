"""The forms of an exchange: how rows reach the ranks that compute them, and how outputs come back.

Every form is two generators that yield a handle where they would wait. `dispatch` gives the rows for this rank's expert
kernel and the way back, which `combine` spends. Exact forms return one row per (token, expert), and the sum is taken at
home in top-k order; reduced forms return sums. A token's row goes once to each rank that needs it, or (hierarchical)
once to each node, to the rank with the sender's place in it, which passes it on inside.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from coterie.comm.buffers import Bytes, Lease, take_rows
from coterie.comm.exchange import FORMS, Counts, Exchange, FormName
from coterie.comm.fixed import FixedMessages, every_one
from coterie.comm.rows import (
    Arrived,
    FanOut,
    RowFormat,
    Sum,
    WayBack,
    check_equal,
    fan_out,
    in_order,
    needed,
    row_counts,
    sum_plan,
)
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
        self, group: Transport, rows: Bytes, plan: FanOut, received: Int64
    ) -> Generator[Handle, None, tuple[Bytes, Lease]]:
        """rows[plan.row] to the destinations -> what arrived, in a lent buffer."""
        pool, width, total = self.exchange.pool, rows.shape[1], int(received.sum())
        out, back = pool.lease(len(plan.row) * width), pool.lease(total * width)
        outgoing = take_rows(rows, plan.row, out.rows(len(plan.row), width))
        handle = group.all_to_all_v(outgoing, plan.counts, received, back.rows(total, width))
        yield handle
        arrived = handle.result()
        self.exchange.carried(group, plan.counts, width, handle)
        out.release()
        return arrived, back

    def give_back(
        self, group: Transport, outputs: Array, plan: FanOut, received: Int64
    ) -> Generator[Handle, None, tuple[Any, Lease]]:
        """outputs[plan.row] to the ranks they came from -> host rows in a lent buffer."""
        travel, pool = self.travel, self.exchange.pool
        hidden, leaving, total = outputs.shape[1], len(plan.row), int(received.sum())
        width = travel.back_bytes(hidden)
        out, back = pool.lease(leaving * width), pool.lease(total * width)
        outgoing = travel.send_back(outputs, plan.row, travel.back_rows(out.whole, leaving, hidden))
        handle = group.all_to_all_v(outgoing, plan.counts, received, travel.back_rows(back.whole, total, hidden))
        yield handle
        arrived = handle.result()
        self.exchange.carried(group, plan.counts, width, handle)
        out.release()
        return arrived, back

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
        rows, lease = yield from self.give_back(self.mesh.world, outputs, sources, way.counts)
        kernels = self.kernels
        return Home(kernels.from_host(rows), kernels.from_host(way.position), routed.expert_weights, lease)

    def count(
        self, call: Call, kind: int, row: RowFormat, rows: Int64, nodes: Int64 | None
    ) -> Generator[Handle, None, tuple[Counts, WayBack]]:
        """Tell all ranks what is coming -> everyone's counts, and the exact way back."""
        exchange, world = self.exchange, self.mesh.world
        between = rows[: self.mesh.num_nodes] * 0 if nodes is None else nodes
        back = WayBack.of(call.slots, exchange.placement.slots_per_rank, world.size)
        header = exchange.header(kind, call.layer, row.width, self.travel.back_bytes(call.x.shape[1]))
        handle = self.mesh.words.all_gather(exchange.message(header, rows, back.counts, between, call.experts))
        yield handle
        return exchange.read_counts(handle.result(), header, call.layer), back


class FlatWay(NamedTuple):
    """The way back of the flat forms: outputs to send by source rank, what comes home, and the plans of the sums."""

    sources: FanOut
    home: WayBack
    arrived: Arrived
    received: Int64
    member: Any
    weights: Any


class FlatForm(Form):
    """Every token's row once to each rank that needs it."""

    def __init__(self, exchange: Exchange, travel: Travel, *, reduced: bool) -> None:
        super().__init__(exchange, travel)
        self.reduced = reduced
        self.kind = FORMS.index("flat-reduced" if reduced else "flat")

    def dispatch(self, call: Call) -> Dispatching:
        """Counts, then rows."""
        world, per_rank = self.mesh.world, self.exchange.placement.slots_per_rank
        row = self.row(call, weighted=self.reduced)
        member = needed(call.slots, per_rank, range(world.size))
        plan = fan_out(member)
        counts, home = yield from self.count(call, self.kind, row, plan.counts, None)
        packed, lease = self.pack(call, row)
        received = counts.rows[:, world.rank]
        incoming, buffer = yield from self.send(world, packed, plan, received)
        lease.release()
        rows, by_slot, arrived, weights = self.land(incoming, row, buffer)
        sources = arrived.returned(counts.sources(world.rank), world.size)
        check_equal("outputs to return", sources.counts, counts.pairs[:, world.rank])
        return Landed(rows, by_slot, FlatWay(sources, home, arrived, received, member, weights), arrived.work)

    def combine(self, outputs: Array, way: FlatWay, routed: Routed) -> Returning:
        """Outputs, or their sums per rank, back to the tokens' ranks."""
        if not self.reduced:
            return (yield from self.exact_return(outputs, way.sources, way.home, routed))
        sums = self.add_up(outputs, way.arrived.sums(way.weights))
        rows, lease = yield from self.give_back(self.mesh.world, sums, in_order(way.received), row_counts(way.member))
        return self.home(rows, sum_plan(way.member), lease)


class HierarchicalWay(NamedTuple):
    """The way back of the hierarchical forms; `rail` rows came from each node, `inner` through each rank of the own."""

    sources: FanOut
    home: WayBack
    arrived: Arrived
    rail: Int64
    inner: Int64
    to_nodes: Any
    to_ranks: Any
    weights: Any


class HierarchicalForm(Form):
    """Every token's row once to each node that needs it, then to the ranks there. Outputs go straight home (exact), or
    are summed per rank, per node and at home."""

    def __init__(self, exchange: Exchange, travel: Travel, *, reduced: bool) -> None:
        super().__init__(exchange, travel)
        self.reduced = reduced
        self.kind = FORMS.index("hierarchical-reduced" if reduced else "hierarchical")

    def dispatch(self, call: Call) -> Dispatching:
        """Counts, rows between nodes, rows inside the node."""
        mesh, per_rank = self.mesh, self.exchange.placement.slots_per_rank
        rank, size = mesh.world.rank, mesh.ranks_per_node
        assert mesh.node is not None and mesh.rail is not None
        row = self.row(call, weighted=self.reduced)
        to_nodes = needed(call.slots, per_rank * size, range(mesh.num_nodes))
        plan, to_all = fan_out(to_nodes), needed(call.slots, per_rank, range(mesh.world.size))
        counts, home = yield from self.count(call, self.kind, row, row_counts(to_all), plan.counts)
        packed, lease = self.pack(call, row)
        rail = counts.nodes[rank % size :: size, rank // size]
        passing, buffer = yield from self.send(mesh.rail, packed, plan, rail)
        lease.release()
        first = rank // size * size
        to_ranks = needed(row.slots(passing), per_rank, range(first, first + size))
        inner = counts.to_places(rank, size)
        incoming, last = yield from self.send(mesh.node, passing, fan_out(to_ranks), inner)
        buffer.release()
        rows, by_slot, arrived, weights = self.land(incoming, row, last)
        sources = arrived.returned(counts.forwarded(rank, size), mesh.world.size)
        check_equal("outputs to return", sources.counts, counts.pairs[:, rank])
        way = HierarchicalWay(sources, home, arrived, rail, inner, to_nodes, to_ranks, weights)
        return Landed(rows, by_slot, way, arrived.work)

    def combine(self, outputs: Array, way: HierarchicalWay, routed: Routed) -> Returning:
        """Outputs straight home, or sums by the way they came."""
        if not self.reduced:
            return (yield from self.exact_return(outputs, way.sources, way.home, routed))
        mesh = self.mesh
        assert mesh.node is not None and mesh.rail is not None
        sums = self.add_up(outputs, way.arrived.sums(way.weights))
        rows, lease = yield from self.give_back(mesh.node, sums, in_order(way.inner), row_counts(way.to_ranks))
        sums = self.add_up(self.kernels.from_host(rows), sum_plan(way.to_ranks))
        lease.release()
        rows, lease = yield from self.give_back(mesh.rail, sums, in_order(way.rail), row_counts(way.to_nodes))
        return self.home(rows, sum_plan(way.to_nodes), lease)


SizedForms = Mapping[FormName, FlatForm | HierarchicalForm]


class FixedForm(Form):
    """Up to `capacity` rows to each rank in messages of one size, their counts inside: one exchange instead of two.

    A rank with more rows says so to all, and all take the sized form instead. Outputs go straight home.
    """

    def __init__(self, exchange: Exchange, travel: Travel, sized: SizedForms) -> None:
        super().__init__(exchange, travel)
        self.sized = sized

    def dispatch(self, call: Call) -> Dispatching:
        """Rows with their counts."""
        exchange, world, per_rank = self.exchange, self.mesh.world, self.exchange.placement.slots_per_rank
        row = self.row(call)
        member, home = needed(call.slots, per_rank, range(world.size)), WayBack.of(call.slots, per_rank, world.size)
        plan = fan_out(member)
        fixed = FixedMessages(row.width, self.travel.back_bytes(call.x.shape[1]), exchange, call.layer)
        nbytes = fixed.nbytes(len(call.experts))
        out, back = exchange.pool.lease(nbytes * world.size), exchange.pool.lease(nbytes * world.size)
        packed, lease = self.pack(call, row)
        outgoing = fixed.write(out.rows(world.size, nbytes), packed, plan, home.counts, call.experts)
        lease.release()
        each = every_one(world.size)
        handle = world.all_to_all_v(outgoing, each, each, back.rows(world.size, nbytes))
        yield handle
        messages = fixed.read(handle.result(), len(call.experts))
        out.release()
        exchange.note_experts(call.layer, messages.experts)
        if messages.overflow:
            back.release()
            exchange.overflows += 1
            return (yield from self.sized[exchange.policy.sized].dispatch(call))
        rows, by_slot, arrived, weights = self.land(messages.rows, row, back)
        sources = arrived.returned(messages.sources, world.size)
        check_equal("outputs to return", sources.counts, messages.pairs)
        return Landed(rows, by_slot, FlatWay(sources, home, arrived, messages.counts, member, weights), arrived.work)

    def combine(self, outputs: Array, way: FlatWay | HierarchicalWay, routed: Routed) -> Returning:
        """As in every exact form: both sides know the counts by now."""
        return (yield from self.exact_return(outputs, way.sources, way.home, routed))


Forms = FlatForm | HierarchicalForm | FixedForm


def sized_forms(exchange: Exchange, travel: Travel) -> SizedForms:
    """The forms for batches of any size that this mesh allows."""
    forms: dict[FormName, FlatForm | HierarchicalForm] = {
        "flat": FlatForm(exchange, travel, reduced=False),
        "flat-reduced": FlatForm(exchange, travel, reduced=True),
    }
    if exchange.mesh.has_rails:
        forms["hierarchical"] = HierarchicalForm(exchange, travel, reduced=False)
        forms["hierarchical-reduced"] = HierarchicalForm(exchange, travel, reduced=True)
    return forms
