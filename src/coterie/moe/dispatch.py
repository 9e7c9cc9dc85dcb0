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

from coterie.comm.transport import Handle, Transport, split_rows
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
        counts = order.counts.reshape(self.transport.size, self.num_local)
        handle = self.transport.all_to_all_v([counts[rank : rank + 1] for rank in range(self.transport.size)])
        yield handle
        received = self.kernels.to_host(self.kernels.concat(handle.result()))
        sent = self.kernels.to_host(order.counts).reshape(counts.shape).sum(1)
        handle = self.transport.all_to_all_v(split_rows(rows, sent))
        yield handle
        arrived = self.kernels.concat(handle.result())
        regrouped = self.kernels.regroup(received)
        return Dispatched(arrived[regrouped.order], regrouped.counts, order, regrouped, sent, received.sum(1))

    def combine(
        self, outputs: Array, dispatched: Dispatched, routed: Routed, shared: Array | None
    ) -> Generator[Handle, None, Array]:
        """Expert outputs [M, H] in dispatched order -> the weighted sum per token (+ shared) [T, H]."""
        if dispatched.regrouped is not None and dispatched.received is not None:
            back = split_rows(outputs[dispatched.regrouped.inverse], dispatched.received)
            handle = self.transport.all_to_all_v(back)
            yield handle
            outputs = self.kernels.concat(handle.result())
        return self.kernels.combine(outputs, dispatched.sorted.position, routed.expert_weights, shared)
