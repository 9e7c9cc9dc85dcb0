"""The forms of an exchange: how rows reach the ranks that compute them, and how outputs come back.

Exact forms return one row per (token, expert), and the sum is taken at home in top-k order; reduced forms return sums.
A token's row goes once to each rank that needs it (flat, fixed capacity), or once to each node (`moe.hierarchical`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from coterie.comm.exchange import FORMS, Exchange, FormName
from coterie.comm.fixed import FixedMessages, every_one
from coterie.comm.rows import (
    Arrived,
    FanOut,
    Part,
    WayBack,
    check_equal,
    fan_out,
    in_order,
    needed,
    row_counts,
    sources_of,
    sum_plan,
)
from coterie.comm.transport import Int64
from coterie.comm.travel import Travel
from coterie.kernels.api import Array, Routed
from coterie.moe.form import Call, Dispatching, Form, Landed, Returning
from coterie.moe.hierarchical import HierarchicalForm, HierarchicalWay


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
        ahead = self.announce(call, self.kind, row, plan.counts[None], None)
        packed, lease = self.pack(call, row)
        yield ahead.handle
        counts, home = self.told(call, ahead)
        received = counts.rows[:, world.rank]
        parts = [Part(plan, received)]
        incoming, buffer = yield from self.send(world, packed, parts)
        lease.release()
        rows, by_slot, arrived, weights = self.land(incoming, row, buffer)
        sources = arrived.returned(sources_of(parts), world.size)
        check_equal("outputs to return", sources.counts, counts.pairs[:, world.rank])
        return Landed(rows, by_slot, FlatWay(sources, home, arrived, received, member, weights), arrived.work)

    def combine(self, outputs: Array, way: FlatWay, routed: Routed) -> Returning:
        """Outputs, or their sums per rank, back to the tokens' ranks."""
        if not self.reduced:
            return (yield from self.exact_return(outputs, way.sources, way.home, routed))
        sums = self.add_up(outputs, way.arrived.sums(way.weights))
        part = Part(in_order(way.received), row_counts(way.member))
        rows, lease = yield from self.give_back(self.mesh.world, sums, [part])
        return self.home(rows, sum_plan(way.member), lease)


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
