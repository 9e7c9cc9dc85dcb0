"""Dispatcher: token rows to the ranks that hold their experts, and the inverse.

Dispatch is sort-by-expert; expert parallelism adds only an exchange, so world size one is not special. Experts are laid
out contiguously: rank r holds [r * E/R, (r+1) * E/R). The receipt that `dispatch` returns is what `combine` spends.
Exact form: one row per (token, expert) travels each way and `combine` sums a token's K rows in top-k order, so the
result does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.comm.transport import Handle, Transport
from coterie.kernels.api import Array, Kernels, Regrouped, Routed, SortedRows


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """Rows on the rank that computes them, sorted by local expert [M, H], rows per local expert, and the way back."""

    rows: Array
    counts: Array
    sorted: SortedRows
    regrouped: Regrouped | None
    sent: NDArray[np.integer] | None
    received: NDArray[np.integer] | None


class Dispatcher:
    """Dispatch and combine of one MoE layer's rows over a transport."""

    def __init__(self, num_experts: int, transport: Transport, kernels: Kernels) -> None:
        assert num_experts % transport.size == 0, f"{num_experts} experts do not divide over {transport.size} ranks"
        self.num_experts = num_experts
        self.num_local = num_experts // transport.size
        self.transport = transport
        self.kernels = kernels

    def dispatch(self, x: Array, routed: Routed) -> Generator[Handle, None, Dispatched]:
        """x [T, H] and its routing -> the rows this rank's experts must compute."""
        order = self.kernels.sort_by_expert(routed.expert_ids, self.num_experts)
        rows = self.kernels.gather(x, order)
        if self.transport.size == 1:
            return Dispatched(rows, order.counts, order, None, None, None)
        handle = self.transport.all_gather(self.kernels.to_host(order.counts))
        yield handle
        received = handle.result().reshape(self.transport.size, self.transport.size, self.num_local)
        sent, received = received[self.transport.rank].sum(1), received[:, self.transport.rank]
        handle = self.transport.all_to_all_v(self.kernels.to_host(rows), sent, received.sum(1))
        yield handle
        arrived = self.kernels.from_host(handle.result())
        regrouped = self.kernels.regroup(received)
        return Dispatched(arrived[regrouped.order], regrouped.counts, order, regrouped, sent, received.sum(1))

    def combine(
        self, outputs: Array, dispatched: Dispatched, routed: Routed, shared: Array | None
    ) -> Generator[Handle, None, Array]:
        """Expert outputs [M, H] in dispatched order -> the weighted sum per token (+ shared) [T, H]."""
        if dispatched.regrouped is not None and dispatched.received is not None and dispatched.sent is not None:
            back = self.kernels.to_host(outputs[dispatched.regrouped.inverse])
            handle = self.transport.all_to_all_v(back, dispatched.received, dispatched.sent)
            yield handle
            outputs = self.kernels.from_host(handle.result())
        return self.kernels.combine(outputs, dispatched.sorted.position, routed.expert_weights, shared)
