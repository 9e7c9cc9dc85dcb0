"""A small MoE layer on any number of ranks, for tests: every rank draws the same weights and keeps its own slots'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.comm.exchange import Exchange, FormPolicy
from coterie.comm.mesh import Mesh
from coterie.comm.transport import Transport
from coterie.comm.travel import Travel
from coterie.kernels.batch import ForwardBatch
from coterie.moe.dispatch import Dispatcher
from coterie.moe.experts import Experts
from coterie.moe.layer import MoELayer
from coterie.moe.router import Router
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer
from coterie.spec.model import MoESpec
from coterie.spec.placement import ExpertPlacement
from coterie.spec.weights import F32, MatrixSpec, WeightFormat

HIDDEN, INNER, EXPERTS, TOP_K = 70, 24, 8, 3
SPEC = MoESpec(EXPERTS, TOP_K, INNER, scoring="sigmoid", correction_bias=True, normalize=True, norm_epsilon=1e-20)
REDUNDANT = np.array([[5, 0, 2, 7, 1, 4, 3, 5, 6, 0, 5, 3]])
"""Four ranks with three slots each; experts 0, 3 and 5 have copies."""


def placement(ranks: int, nodes: int, *, copies: bool) -> ExpertPlacement:
    """Experts in order, or an order of its own with copies of some."""
    if not copies or ranks == 1:
        return ExpertPlacement.linear(1, EXPERTS, ranks, nodes)
    if ranks == 4:
        return ExpertPlacement(REDUNDANT, EXPERTS, 4, nodes)
    return ExpertPlacement(np.array([[7, 1, 0, 5, 3, 4, 2, 6, 5, 1]]), EXPERTS, 2, nodes)


def make_exchange(transport: Transport, table: ExpertPlacement, policy: FormPolicy) -> Exchange:
    return Exchange(Mesh.of(transport, table.node_of_rank), table, policy)


@dataclass(frozen=True)
class Precision:
    """Of the experts' weights, and whether their outputs are summed as bf16 values."""

    format: WeightFormat = F32
    rounded: bool = False


def make_layer(
    kernels: Any, exchange: Exchange | None, load: ExpertLoad | None, skew: str = "", precision: Precision = Precision()
) -> MoELayer:
    """The layer of one rank. `skew`: "one expert" draws every token's first choice to expert 5."""
    rng = np.random.default_rng(7)

    def bank(
        count: int, rows: int, cols: int, keep: list[int] | None = None, segments: int = 1, format: WeightFormat = F32
    ) -> Any:
        values = (rng.normal(size=(count, rows, cols)) / np.sqrt(cols)).astype(np.float32)
        keep = list(range(count)) if keep is None else keep
        (out,) = kernels.allocate(len(keep), MatrixSpec(rows, cols, format, segments))
        for index, expert in enumerate(keep):
            kernels.fill(out, index, 0, values[expert])
        return out

    own = None
    if exchange is not None:
        own = exchange.placement.slot_to_expert[0, exchange.own_slots.start : exchange.own_slots.stop].tolist()
    gate = bank(1, EXPERTS, HIDDEN)
    bias = rng.normal(size=EXPERTS)
    if skew == "one expert":
        bias[5] = 100
    if skew == "one rank":
        bias[:3] = 100
    kind = precision.format
    gate_up, down = bank(EXPERTS, 2 * INNER, HIDDEN, own, 2, kind), bank(EXPERTS, HIDDEN, INNER, own, 1, kind)
    experts = Experts(gate_up, down, kernels)
    shared = Experts(bank(1, 2 * INNER, HIDDEN, None, 2, kind), bank(1, HIDDEN, INNER, None, 1, kind), kernels)
    router = Router(SPEC, gate, kernels.vector(bias.astype(np.float32)), kernels)
    dispatcher = Dispatcher(EXPERTS, kernels, exchange, 0, Travel(kernels, gate_up, rounded=precision.rounded))
    return MoELayer(0, router, dispatcher, experts, shared, None, kernels, StageTimer(), load)


def stages(kernels: Any, layer: MoELayer, x: np.ndarray, most_tokens: int | None = None) -> Any:
    """The layer's generator on rows x [T, H]."""
    packed = ForwardBatch.packed(np.zeros(len(x), np.int32), np.array([len(x)]))
    batch = kernels.prepare(packed)
    if most_tokens is not None:
        object.__setattr__(packed, "most_tokens", most_tokens)
    return layer.stages(rows_of(kernels, x), batch)


def rows_of(kernels: Any, x: np.ndarray) -> Any:
    """Backend rows equal to x, through the one op that makes rows from a table."""
    (bank,) = kernels.allocate(1, MatrixSpec(max(len(x), 1), HIDDEN, F32))
    kernels.fill(bank, 0, 0, x if len(x) else np.zeros((1, HIDDEN), np.float32))
    positions = kernels.prepare(ForwardBatch.packed(np.zeros(len(x), np.int32), np.array([len(x)]))).positions
    return kernels.embed(bank, positions)


def tokens(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, HIDDEN)).astype(np.float32)
