"""MoELayer: route, dispatch, experts (+ shared), combine: the only MoE forward, driven plain, EP or overlapped."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from coterie.comm.transport import Handle
from coterie.kernels.api import Array, Bank, Kernels, Prepared
from coterie.moe.dispatch import Dispatcher
from coterie.moe.experts import Experts, FusedExperts
from coterie.moe.router import Router
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MoELayer:
    """One layer's routed and shared experts. `load` (if any) is handed the expert counts, unread.

    `fused` (only where no exchange lies between) does what the stages after the router do, all in the lap "experts".
    """

    layer: int
    router: Router
    dispatcher: Dispatcher
    experts: Experts
    shared: Experts | None
    shared_gate: Bank | None
    kernels: Kernels
    timer: StageTimer
    load: ExpertLoad | None = None
    fused: FusedExperts | None = None

    def stages(self, x: Array, batch: Prepared) -> Generator[Handle, None, Array]:
        """x [T, H] -> [T, H]; yields where communication would be waited for."""
        routed = self.router.route(x)
        self.timer.lap("router", self.layer)
        if self.fused is not None:
            hidden, counts = self.fused.forward(x, routed)
            if self.load is not None:
                self.load.record(self.layer, counts)
            self.timer.lap("experts", self.layer)
            return hidden
        dispatching = self.dispatcher.dispatch(x, routed, batch.host.most_tokens)
        dispatched = yield from self._watch("dispatch", dispatching)
        if self.load is not None:
            self.load.record(self.layer, dispatched.routed_counts)
        self.timer.lap("dispatch", self.layer)
        shared = self._shared(x, batch)
        outputs = self.experts.forward(dispatched.rows, dispatched.counts)
        self.timer.lap("experts", self.layer)
        hidden = yield from self._watch("combine", self.dispatcher.combine(outputs, dispatched, routed, shared))
        self.timer.lap("combine", self.layer)
        return hidden

    def _watch(self, stage: str, exchanging: Generator[Handle, None, T]) -> Generator[Handle, None, T]:
        """The same generator, with its work, its waiting and its exchanges timed apart."""
        while True:
            try:
                handle = next(exchanging)
            except StopIteration as end:
                return end.value
            self.timer.lap(stage, self.layer)
            yield handle
            handle.wait()
            self.timer.lap("wait", self.layer)
            self.timer.exchanged(stage, self.layer, handle.begun_ns, handle.ended_ns)

    def _shared(self, x: Array, batch: Prepared) -> Array | None:
        if self.shared is None:
            return None
        out = self.shared.forward(x, batch.ones_counts)
        if self.shared_gate is None:
            return out
        return self.kernels.sigmoid_scale(out, self.kernels.linear(x, self.shared_gate))
