"""Router: which experts a token goes to, with what weight. The rule is data (`MoESpec`), the arithmetic one op."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.kernels.api import Array, Bank, Kernels, Routed
from coterie.spec.model import MoESpec


@dataclass(frozen=True, slots=True)
class Router:
    """One layer's router: gate [E, H] in float32 and the correction bias [E] exactly as the checkpoint holds it."""

    spec: MoESpec
    gate: Bank
    correction_bias: Array | None
    kernels: Kernels

    def route(self, x: Array) -> Routed:
        """x [T, H] -> expert_ids [T, K], expert_weights [T, K]."""
        return self.kernels.route(x, self.gate, self.correction_bias, self.spec)
