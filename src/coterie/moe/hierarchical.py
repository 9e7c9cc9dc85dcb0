"""The hierarchical forms: a row once to each node that needs it, to the rank with the sender's place, then on inside.

In pieces where that pays: a piece is passed on inside the node while the next one travels between nodes, and the rows
of the node's own tokens are sent inside while the first travels. Outputs go straight home (exact), or are summed per
rank, per node and at home (reduced; always whole).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from coterie.comm.buffers import Bytes, Lease, take_rows
from coterie.comm.exchange import FORMS, PIECES, Counts, Exchange
from coterie.comm.pieces import PiecePlan, Tokens, by_part, part_bounds, parts_received, parts_sent
from coterie.comm.rows import (
    Arrived,
    FanOut,
    Part,
    RowFormat,
    WayBack,
    check_equal,
    fan_out,
    in_order,
    needed,
    row_counts,
    sum_plan,
)
from coterie.comm.transport import Handle, Int64
from coterie.comm.travel import Travel
from coterie.kernels.api import Array, Routed
from coterie.moe.form import Call, Dispatching, Following, Form, Landed, Returning


class Passing(NamedTuple):
    """What passed through this rank, for sums that go back the same way: `rail` rows came from each node, `inner`
    through each rank of the own; who needed which."""

    rail: Int64
    inner: Int64
    to_nodes: Any
    to_ranks: Any


class HierarchicalWay(NamedTuple):
    """The way back of the hierarchical forms; `passing` where rows went whole."""

    sources: FanOut
    home: WayBack
    arrived: Arrived
    passing: Passing | None
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
        row = self.row(call, weighted=self.reduced)
        to_nodes = needed(call.slots, per_rank * size, range(mesh.num_nodes))
        to_all = needed(call.slots, per_rank, range(mesh.world.size))
        cut = PIECES if self.exchange.policy.piece_bytes and not self.reduced else 1
        bounds = part_bounds(len(to_all), cut)
        ahead = self.announce(call, self.kind, row, by_part(to_all, bounds), by_part(to_nodes, bounds))
        packed, lease = self.pack(call, row)
        yield ahead.handle
        counts, home = self.told(call, ahead)
        pieces = self.exchange.pieces(counts.crossing(mesh.node_of) * row.width) if cut > 1 else 1
        passing: Passing | None = None
        if pieces > 1:
            tokens = Tokens(packed, to_nodes, to_all, bounds)
            incoming, last, origin = yield from self.in_pieces(row, tokens, counts, pieces)
        else:
            incoming, last, passing = yield from self.whole(row, packed, to_nodes, counts)
            origin = counts.forwarded(rank, size)
        lease.release()
        rows, by_slot, arrived, weights = self.land(incoming, row, last)
        sources = arrived.returned(origin, mesh.world.size)
        check_equal("outputs to return", sources.counts, counts.pairs[:, rank])
        return Landed(rows, by_slot, HierarchicalWay(sources, home, arrived, passing, weights), arrived.work)

    def whole(
        self, row: RowFormat, packed: Bytes, to_nodes: Any, counts: Counts
    ) -> Generator[Handle, None, tuple[Bytes, Lease, Passing]]:
        """All rows between nodes, then all inside -> what arrived, and what passed."""
        mesh, per_rank = self.mesh, self.exchange.placement.slots_per_rank
        rank, size = mesh.world.rank, mesh.ranks_per_node
        assert mesh.node is not None and mesh.rail is not None
        rail, inner = counts.from_nodes(rank, size), counts.to_places(rank, size)
        came, buffer = yield from self.send(mesh.rail, packed, [Part(fan_out(to_nodes), rail)])
        to_ranks = needed(row.slots(came), per_rank, mesh.near)
        incoming, last = yield from self.send(mesh.node, came, [Part(fan_out(to_ranks), inner)])
        buffer.release()
        return incoming, last, Passing(rail, inner, to_nodes, to_ranks)

    def in_pieces(
        self, row: RowFormat, tokens: Tokens, counts: Counts, pieces: int
    ) -> Generator[Handle, None, tuple[Bytes, Lease, Int64]]:
        """Rows for other nodes leave first, in pieces; the node's own are sent while they travel, and each piece is
        passed on inside while the next one travels -> what arrived, and the source of each row."""
        mesh, near = self.mesh, self.mesh.near
        assert mesh.node is not None and mesh.rail is not None
        plan = PiecePlan(mesh, counts, pieces)
        rail = plan.rail(tokens)
        leaving, out = self.room(parts_sent(rail), row.width)
        passing, passed = self.room(parts_received(rail), row.width)
        inside, inner = self.room(plan.passed_on, row.width)
        landing, last = self.room(len(plan.sources), row.width)

        def own(order: Int64, to: Bytes) -> Bytes:
            return take_rows(tokens.packed, order, to)

        flying = [self.post(mesh.rail, part, own, (leaving, passing)) for part in rail]
        parts = [plan.own(tokens)]
        following = [self.post(mesh.node, parts[0], own, (inside, landing))]
        for number, (part, handle) in enumerate(zip(rail, flying, strict=True)):
            yield Following(handle) if number else handle
            came = handle.result()
            self.exchange.carried(mesh.rail, part.plan.counts, row.width, handle)
            member = needed(row.slots(came), self.exchange.placement.slots_per_rank, near)
            parts.append(Part(fan_out(member), plan.passed_to_me[number]))

            def on(order: Int64, to: Bytes, came: Bytes = came) -> Bytes:
                return take_rows(came, order, to)

            following.append(self.post(mesh.node, parts[-1], on, (inside, landing)))
        for part, handle in zip(parts, following, strict=True):
            yield Following(handle)
            handle.result()
            self.exchange.carried(mesh.node, part.plan.counts, row.width, handle)
        for lease in (out, passed, inner):
            lease.release()
        return landing.rows, last, plan.sources

    def combine(self, outputs: Array, way: HierarchicalWay, routed: Routed) -> Returning:
        """Outputs straight home, or sums by the way they came."""
        if not self.reduced:
            return (yield from self.exact_return(outputs, way.sources, way.home, routed))
        mesh, passing = self.mesh, way.passing
        assert mesh.node is not None and mesh.rail is not None and passing is not None
        sums = self.add_up(outputs, way.arrived.sums(way.weights))
        part = Part(in_order(passing.inner), row_counts(passing.to_ranks))
        rows, lease = yield from self.give_back(mesh.node, sums, [part])
        sums = self.add_up(self.kernels.from_host(rows), sum_plan(passing.to_ranks))
        lease.release()
        part = Part(in_order(passing.rail), row_counts(passing.to_nodes))
        rows, lease = yield from self.give_back(mesh.rail, sums, [part])
        return self.home(rows, sum_plan(passing.to_nodes), lease)
