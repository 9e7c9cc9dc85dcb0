"""Dispatcher: token rows to the ranks that hold their experts, and the inverse, for one MoE layer.

Dispatch is sort-by-expert; expert parallelism adds only an exchange (`moe.forms`), so world size one is not special:
it is the form without one. The handle that `dispatch` returns is what `combine` spends, once. Exact forms sum a token's
K rows in top-k order, so its result does not depend on the number of ranks, on the form or on copies of experts.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from coterie.comm.exchange import COUNTED, Exchange
from coterie.comm.transport import Handle, Int64
from coterie.comm.travel import Travel
from coterie.kernels.api import Array, Kernels, Routed, SortedRows
from coterie.moe.form import Call
from coterie.moe.forms import FixedForm, FlatForm, Forms, sized_forms


@dataclass(slots=True, eq=False)
class Dispatched:
    """Rows on the rank that computes them, sorted by local slot [M, H] (or as narrow rows), rows per local slot, and
    the way back.

    `routed_counts`: this rank's own rows per logical expert [E], for the load record. `way` is None once spent. `work`:
    rows and slots with any, where an exchange counted them.
    """

    rows: Array
    counts: Array
    routed_counts: Array
    form: Forms | None
    way: Any
    work: tuple[int, int] = (0, 0)


class Dispatcher:
    """Dispatch and combine of one layer. `exchange` None: all experts are here; else `layer` is its row there.
    `travel` None: rows travel as float32."""

    def __init__(
        self,
        num_experts: int,
        kernels: Kernels,
        exchange: Exchange | None = None,
        layer: int = 0,
        travel: Travel | None = None,
    ) -> None:
        self.num_experts, self.kernels, self.exchange, self.layer = num_experts, kernels, exchange, layer
        self.travel = travel or Travel(kernels)
        if exchange is not None:
            self.sized = sized_forms(exchange, self.travel)
            self.fixed = FixedForm(exchange, self.travel, self.sized)

    def dispatch(self, x: Array, routed: Routed, most_tokens: int | None = None) -> Generator[Handle, None, Dispatched]:
        """x [T, H] and its routing -> the rows this rank's experts must compute.

        most_tokens: the largest T of any rank, if all ranks know it; None lets the headers find out.
        """
        exchange, kernels = self.exchange, self.kernels
        if exchange is None:
            order = kernels.sort_by_expert(routed.expert_ids, self.num_experts)
            return Dispatched(kernels.gather(x, order), order.counts, order.counts, None, order)
        ids = kernels.to_host(routed.expert_ids)
        counts, table = exchange.count_experts(ids), exchange.tables[self.layer]
        policy = exchange.policy
        use_fixed = policy.exact and policy.capacity > 0 and (most_tokens or 0) <= policy.capacity
        form: Forms = self.fixed if use_fixed else self.sized[policy.sized]
        gathered = None
        if table.has_copies and isinstance(form, FlatForm):
            gathered = yield from self._gather(exchange, counts)
        slots = table.assign(ids, exchange.mesh.world.rank, gathered, exchange.last_counts[self.layer])
        tell = table.has_copies and gathered is None
        landed = yield from form.dispatch(Call(self.layer, x, routed, slots, counts if tell else counts[:0]))
        return Dispatched(landed.rows, landed.counts, kernels.from_host(counts), form, landed.way, landed.work)

    def _gather(self, exchange: Exchange, counts: Int64) -> Generator[Handle, None, Int64]:
        """Rows per expert of all ranks [R, E]."""
        header = exchange.header(COUNTED, self.layer, 0, 0)
        handle = exchange.mesh.words.all_gather(exchange.message(header, counts))
        yield handle
        return exchange.read_experts(handle.result(), header, self.layer)

    def computed(self, dispatched: Dispatched, nanoseconds: int) -> None:
        """Note how long the expert kernel took for what `dispatch` gave."""
        if self.exchange is not None:
            self.exchange.live.computed(nanoseconds, *dispatched.work)

    def combine(
        self, outputs: Array, dispatched: Dispatched, routed: Routed, shared: Array | None
    ) -> Generator[Handle, None, Array]:
        """Expert outputs [M, H] in dispatched order -> the weighted sum per token (+ shared) [T, H]."""
        way, dispatched.way = dispatched.way, None
        assert way is not None, "a dispatch is combined once"
        if dispatched.form is None:
            order: SortedRows = way
            rounded = self.travel.rounded
            return self.kernels.combine(outputs, order.position, routed.expert_weights, shared, rounded=rounded)
        home = yield from dispatched.form.combine(outputs, way, routed)
        hidden = self.kernels.combine(home.rows, home.position, home.weights, shared)
        home.lease.release()
        return hidden
