"""Experts: gated MLPs over rows sorted by expert. Knows weights and counts, no ranks and no routing.

A dense feed-forward and the shared experts are a bank of one expert that sees every row.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.kernels.api import Array, Bank, Kernels


@dataclass(frozen=True, slots=True)
class Experts:
    """gate_up: E matrices [2I, H] (gate rows first); down: E matrices [H, I]."""

    gate_up: Bank
    down: Bank
    kernels: Kernels

    def forward(self, rows: Array, counts: Array) -> Array:
        """rows [M, H] sorted by expert, counts [E] -> unweighted outputs [M, H]."""
        return self.kernels.experts(rows, counts, self.gate_up, self.down)
