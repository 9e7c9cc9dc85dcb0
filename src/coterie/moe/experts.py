"""Experts: gated MLPs over rows sorted by expert. Knows weights and counts, no ranks and no routing.

A dense feed-forward and the shared experts are a bank of one expert that sees every row; each rank of a tensor-parallel
group has columns of it (`SplitExpert`). `FusedExperts` is one optional op of the backend for what `MoELayer` writes as
stages; it serves a layer whose experts all lie on one rank.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from coterie.comm.tensor_group import TensorGroup
from coterie.comm.transport import Handle
from coterie.kernels.api import Array, Bank, ExpertBanks, FusedMoE, Kernels, Routed


@dataclass(frozen=True, slots=True)
class Experts:
    """gate_up: E matrices [2I, H] (gate rows first); down: E matrices [H, I]."""

    gate_up: Bank
    down: Bank
    kernels: Kernels

    def forward(self, rows: Array, counts: Array) -> Array:
        """rows [M, H] (or narrow ones) sorted by expert, counts [E] -> unweighted outputs [M, H]."""
        return self.kernels.experts(rows, counts, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class SplitExpert:
    """One expert [2 `inner`, H], [H, `inner`] of which this rank has some outputs of gate and up and some of down."""

    gate_up: Bank
    down: Bank
    inner: int
    kernels: Kernels
    group: TensorGroup

    def columns(self, x: Array) -> Generator[Handle, None, Array]:
        """x [T, H] -> this rank's columns of the output."""
        gated = yield from self.group.columns(self.kernels.gated(x, self.gate_up), self.inner)
        return self.kernels.linear(gated, self.down)

    def stages(self, x: Array) -> Generator[Handle, None, Array]:
        """x [T, H] -> the output [T, H]."""
        block = yield from self.columns(x)
        return (yield from self.group.columns(block, x.shape[1]))

    def own_rows(self, x: Array) -> Generator[Handle, None, Array]:
        """x [T, H] -> the output of this rank's share of the rows."""
        block = yield from self.columns(x)
        return (yield from self.group.columns_of_own_rows(block, x.shape[1]))


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Routed and shared experts with sort and combine. `rounded`: the routed outputs are summed as bf16 values."""

    routed: ExpertBanks
    shared: ExpertBanks | None
    kernels: FusedMoE
    rounded: bool = False

    @classmethod
    def of(
        cls, experts: Experts, shared: Experts | None, shared_gate: Bank | None, *, rounded: bool = False
    ) -> FusedExperts | None:
        """The fused form of a layer that has all its experts here; None if the backend has no such op."""
        kernels = experts.kernels
        if not isinstance(kernels, FusedMoE):
            return None
        own = None if shared is None else ExpertBanks(shared.gate_up, shared.down, shared_gate)
        return cls(ExpertBanks(experts.gate_up, experts.down), own, kernels, rounded)

    def forward(self, x: Array, routed: Routed) -> tuple[Array, Array]:
        """x [T, H] and its routing -> the layer's output [T, H], rows per expert [E]."""
        return self.kernels.moe(x, routed, self.routed, self.shared, rounded=self.rounded)
