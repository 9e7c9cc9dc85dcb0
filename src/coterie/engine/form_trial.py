"""FormTrial: an exchange of made-up rows in one form, timed, by which ranks choose their form at start.

The rows are as wide and as many as in serving, their routing is random and uniform, and everything but the experts is
done: dispatch, the way back, the sum. Which forms are tried, how often and with how many rows is `comm.form_choice`'s.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import numpy as np

from coterie.comm.exchange import Exchange, FormPolicy
from coterie.comm.mesh import Mesh
from coterie.comm.transport import Handle
from coterie.comm.travel import Travel
from coterie.kernels.api import Routed
from coterie.moe.dispatch import Dispatcher
from coterie.spec.placement import ExpertPlacement


class FormTrial:
    """One rank's part in trials with rows of `hidden` values for `top_k` experts each, placed as in layer 0."""

    def __init__(self, travel: Travel, placement: ExpertPlacement, hidden: int, top_k: int) -> None:
        self.travel, self.hidden, self.top_k = travel, hidden, top_k
        self.placement = placement.with_layers(placement.slot_to_expert[:1])
        self._dispatchers: dict[FormPolicy, Dispatcher] = {}
        self._outputs = np.zeros((0, hidden), np.float32)

    def __call__(self, mesh: Mesh, policy: FormPolicy, tokens: int) -> Generator[Handle, None, float]:
        """Seconds of dispatch and combine of `tokens` rows of this rank, with all ranks at once."""
        kernels, experts = self.travel.kernels, self.placement.num_experts
        if policy not in self._dispatchers:
            exchange = Exchange(mesh, self.placement, policy)
            self._dispatchers[policy] = Dispatcher(experts, kernels, exchange, 0, self.travel)
        dispatcher = self._dispatchers[policy]
        rng = np.random.default_rng([tokens, mesh.world.rank])
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, : self.top_k].astype(np.int32)
        routed = Routed(kernels.from_host(ids), kernels.from_host(np.ones((tokens, self.top_k), np.float32)))
        x = kernels.from_host(np.zeros((tokens, self.hidden), np.float32))
        together = mesh.world.all_gather(np.zeros(1, np.int64))
        yield together
        together.result()
        start = time.monotonic()
        dispatched = yield from dispatcher.dispatch(x, routed, tokens)
        if len(dispatched.rows) > len(self._outputs):
            self._outputs = np.zeros((len(dispatched.rows), self.hidden), np.float32)
        outputs = kernels.from_host(self._outputs[: len(dispatched.rows)])
        yield from dispatcher.combine(outputs, dispatched, routed, None)
        return time.monotonic() - start
