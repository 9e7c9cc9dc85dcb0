"""MoELayer: route, dispatch, experts (+ shared), combine: the only MoE forward, driven plain, EP or overlapped."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from coterie.comm.tensor_group import TensorGroup
from coterie.comm.transport import Handle
from coterie.kernels.api import Array, Bank, Kernels, Prepared
from coterie.moe.dispatch import Dispatcher
from coterie.moe.experts import Experts, FusedExperts, SplitExpert
from coterie.moe.router import Router
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer

T = TypeVar("T")


class _Once:
    """A result that is computed when it is first asked for."""

    def __init__(self, computing: Generator[Handle, None, Array | None]) -> None:
        self._computing = computing
        self._values: list[Array | None] = []

    def value(self) -> Generator[Handle, None, Array | None]:
        if not self._values:
            self._values.append((yield from self._computing))
        return self._values[0]


@dataclass(frozen=True, slots=True)
class MoELayer:
    """One layer's routed and shared experts. `load` (if any) is handed the expert counts, unread.

    `fused` (only where no exchange lies between) does what the stages after the router do, all in the lap "experts".
    `group`: ranks with the same rows; each routes and dispatches its share of them, so that no row is sent twice.
    """

    layer: int
    router: Router
    dispatcher: Dispatcher
    experts: Experts
    shared: Experts | SplitExpert | None
    shared_gate: Bank | None
    kernels: Kernels
    timer: StageTimer
    load: ExpertLoad | None = None
    fused: FusedExperts | None = None
    group: TensorGroup | None = None

    def stages(self, x: Array, batch: Prepared) -> Generator[Handle, None, Array]:
        """x [T, H] -> [T, H]; yields where communication would be waited for."""
        own = x if self.group is None else self.group.own_rows(x)
        routed = self.router.route(own)
        self.timer.lap("router", self.layer)
        if self.fused is not None:
            hidden, counts = self.fused.forward(own, routed)
            if self.load is not None:
                self.load.record(self.layer, counts)
            self.timer.lap("experts", self.layer)
            return hidden
        dispatching = self.dispatcher.dispatch(own, routed, batch.host.most_tokens)
        shared = _Once(self._shared(x, own, batch))
        dispatched = yield from self._watch("dispatch", dispatching, shared)
        if self.load is not None:
            self.load.record(self.layer, dispatched.routed_counts)
        self.timer.lap("dispatch", self.layer)
        beside = yield from shared.value()
        start = time.monotonic_ns()
        outputs = self.experts.forward(dispatched.rows, dispatched.counts)
        self.dispatcher.computed(dispatched, time.monotonic_ns() - start)
        self.timer.lap("experts", self.layer)
        hidden = yield from self._watch("combine", self.dispatcher.combine(outputs, dispatched, routed, beside))
        self.timer.lap("combine", self.layer)
        if self.group is not None:
            hidden = yield from self.group.rows(hidden, batch.num_tokens)
        return hidden

    def _watch(
        self, stage: str, exchanging: Generator[Handle, None, T], meanwhile: _Once | None = None
    ) -> Generator[Handle, None, T]:
        """The same generator, with its work, its waiting and its exchanges timed apart.

        `meanwhile` is computed while its first payload travels.
        """
        while True:
            try:
                handle = next(exchanging)
            except StopIteration as end:
                return end.value
            self.timer.lap(stage, self.layer)
            if meanwhile is not None and handle.carries_rows:
                yield from meanwhile.value()
                self.timer.lap("experts", self.layer)
            yield handle
            handle.wait()
            self.timer.lap("wait", self.layer)
            self.timer.exchanged(stage, self.layer, handle.begun_ns, handle.ended_ns)

    def _shared(self, x: Array, own: Array, batch: Prepared) -> Generator[Handle, None, Array | None]:
        """The shared experts' output for this rank's own rows of x."""
        if self.shared is None:
            return None
        if isinstance(self.shared, SplitExpert):
            out = yield from self.shared.own_rows(x)
        else:
            out = self.shared.forward(own, batch.ones_counts)
        if self.shared_gate is None:
            return out
        return self.kernels.sigmoid_scale(out, self.kernels.linear(own, self.shared_gate))
