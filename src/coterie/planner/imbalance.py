"""Imbalance: how much more the busiest expert and the busiest rank get than the mean, for a skew and a placement.

A step waits in every layer for its busiest rank, so what counts is the mean over layers and steps of the maximum, not
the maximum of the mean. Batches are drawn (`skew.draw`), experts are placed in order, at random, or balanced on the
expected load with copies as the engine does it (`spec.balance.place`), and each batch is divided among copies as the
engine does it (`spec.split`). Router groups are not drawn: they add a little noise and no skew.
Gamma_imb and Gamma_imb^acc: arXiv 2507.15465, section IV. Results are cached; the same arguments give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.planner.network import moe_of
from coterie.planner.skew import Floats, Skew, capped, clock_rates, draw, is_small
from coterie.spec.balance import Room, place
from coterie.spec.errors import SpecError
from coterie.spec.model import ModelSpec
from coterie.spec.placement import ExpertPlacement, check_slots, smallest_slots
from coterie.spec.split import SplitPlan

Placement = Literal["order", "random", "balanced"]
_SAMPLES = 256
_STEPS = 8
_LAYERS = 64
_PLACING = 1_200_000
"""Slots x ranks that are balanced at most, for an answer within two seconds."""
_PLACED = 300_000
"""Layers x slots x ranks that are, where there are more layers than one."""
_DRAWN = 1 << 20
"""Samples x slots of one answer, for the same reason."""
_LARGEST = 1 << 26
_SLOTS = 1 << 14


class TooLarge(SpecError):
    """More slots and ranks than are balanced in the time of an answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Imbalance:
    """Maxima over means: `expert` of an expert (of a slot where there are copies, in equal parts), `rank` of a rank.

    The numbers are means over layers and steps, `_p95` the 95th percentile. rank: batches divided among copies by the
    engine's split; rank_even: copies take equal parts whatever the batch (the same without copies). hit: share of the
    layer's experts that any token of the batch chose. error: standard error of `rank`. loads [samples, R]: tokens of
    each rank over the mean, by which nodes are judged too.
    """

    expert: float
    expert_p95: float
    rank: float
    rank_p95: float
    rank_even: float
    hit: float
    error: float
    loads: Floats
    source: str

    def node(self, nodes: int) -> float:
        """Mean of the busiest node over the mean, for so many nodes of consecutive ranks."""
        ranks = self.loads.shape[1]
        if nodes < 1 or ranks % nodes:
            raise SpecError(f"{ranks} ranks do not divide over {nodes} nodes")
        return float(self.loads.reshape(len(self.loads), nodes, -1).mean(-1).max(1).mean())


def gamma(
    skew: Skew, model: ModelSpec, batch_tokens: float, ep: int, placement: Placement = "random", redundant: int = 0
) -> Imbalance:
    """Imbalance of a step with `batch_tokens` tokens over all `ep` ranks, `redundant` expert slots beyond one each.

    Between powers of two of the tokens it is interpolated. Raises SpecError for slots that do not divide over the
    ranks, counts of another model, or a placement that is none.
    """
    moe = moe_of(model)
    if placement not in get_args(Placement):
        raise SpecError(f"there is no placement {placement!r}; possible are {', '.join(get_args(Placement))}")
    if not 1 <= batch_tokens < _LARGEST:
        raise SpecError(f"a batch must have from 1 to {_LARGEST - 1} tokens, not {batch_tokens}")
    if not 1 <= ep <= 65536 or redundant < 0:
        raise SpecError(f"ep must be from 1 to 65536 and redundant at least 0, not {ep} and {redundant}")
    _check_redundant(moe.num_experts, ep, redundant)
    found = _Case(skew.resolve(moe.num_experts), moe.num_experts, moe.top_k, ep, placement, redundant)
    low = int(np.floor(np.log2(batch_tokens)))
    part = float(np.log2(batch_tokens) - low)
    below = _measured(found, 1 << low)
    return below if part < 1e-9 else _between(below, _measured(found, 2 << low), part)


def _check_redundant(experts: int, ep: int, redundant: int) -> None:
    if (experts + redundant) % ep:
        least = smallest_slots(experts, ep) - experts
        raise SpecError(
            f"{experts} experts and {redundant} redundant ones do not divide over ep {ep}; valid numbers of redundant "
            f"experts are {least}, {least + ep}, {least + 2 * ep}, ..."
        )
    check_slots(experts + redundant, experts, ep)
    if experts + redundant > _SLOTS:
        raise SpecError(f"{experts + redundant} expert slots are more than the {_SLOTS} that imbalance is drawn for")


@dataclass(frozen=True, slots=True)
class _Case:
    """All that an imbalance depends on but the batch."""

    skew: Skew
    experts: int
    top_k: int
    ep: int
    placement: Placement
    redundant: int

    @property
    def slots(self) -> int:
        return self.experts + self.redundant


@dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """Experts laid on ranks: which layer's and which expert's share [N], [N, E]; slots' experts [N, S], a plan to split
    where there are copies."""

    layer: NDArray[np.int64]
    expert: NDArray[np.int64]
    table: NDArray[np.int64]
    plan: SplitPlan | None


@lru_cache(maxsize=64)
def _shares(skew: Skew, experts: int, top_k: int) -> Floats:
    """Shares [L, E] of the layers that are looked at."""
    shares = skew.shares(experts, top_k, 16)
    picked = np.unique(np.linspace(0, len(shares) - 1, min(len(shares), _LAYERS)).round().astype(int))
    return shares[picked]


@lru_cache(maxsize=64)
def _rates(skew: Skew, experts: int, top_k: int) -> Floats:
    """Clock rates [L, E] of the same."""
    return clock_rates(_shares(skew, experts, top_k), top_k)


@lru_cache(maxsize=24)
def _laid(case: _Case) -> _Laid:
    layers = len(_shares(case.skew, case.experts, case.top_k))
    rng = np.random.default_rng(case.skew.seed)
    if case.placement == "balanced":
        layer, expert, table = _balanced(case, rng)
    else:
        number = -(-min(_SAMPLES, _DRAWN // case.slots) // layers)
        layer = np.repeat(np.arange(layers), number)
        expert = np.tile(np.arange(case.experts), (len(layer), 1))
        if case.placement == "random":
            expert = np.argsort(rng.random(expert.shape), 1)
        row = ExpertPlacement.linear(1, case.experts, case.ep, num_slots=case.slots).slot_to_expert
        table = np.repeat(row, len(layer), 0).astype(np.int64)
    return _Laid(layer, expert, table, SplitPlan.of(table, case.experts, case.ep) if case.redundant else None)


def _balanced(case: _Case, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Layers, experts and tables of as many layers as time allows, several steps of each. A curve is one layer: it is
    shuffled and balanced some times, as the search ends differently each time."""
    if case.slots * case.ep > _PLACING:
        raise TooLarge(
            f"{case.slots} slots on {case.ep} ranks take too long to balance here (slots x ranks up to {_PLACING:,}): "
            "only placements in order and at random are drawn"
        )
    shares = _shares(case.skew, case.experts, case.top_k)
    most = min(max(_PLACED // (case.slots * case.ep), 1), _LAYERS)
    if len(shares) == 1:
        layer = np.zeros(min(most, 4), np.int64)
        expert = np.argsort(rng.random((len(layer), case.experts)), 1)
    else:
        layer = np.linspace(0, len(shares) - 1, min(len(shares), most)).round().astype(np.int64)
        expert = np.tile(np.arange(case.experts), (len(layer), 1))
    room = Room(num_slots=case.slots, num_ranks=case.ep)
    table = place(shares[layer[:, None], expert], room).slot_to_expert.astype(np.int64)
    number = max(min(_SAMPLES // 4, _DRAWN // case.slots) // len(layer), _STEPS)
    return np.repeat(layer, number), np.repeat(expert, number, 0), np.repeat(table, number, 0)


@lru_cache(maxsize=256)
def _measured(case: _Case, tokens: int) -> Imbalance:
    laid = _laid(case)
    rng = np.random.default_rng([case.skew.seed, 1])
    small = is_small(tokens, case.experts)
    question = (case.skew, case.experts, case.top_k)
    shares = _shares(*question)[laid.layer[:, None], laid.expert]
    rates = _rates(*question)[laid.layer[:, None], laid.expert] if small else None
    if case.skew.drift:
        factor = np.exp(case.skew.drift * rng.standard_normal(shares.shape))
        shares = capped(shares * factor, case.top_k)
        rates = rates * factor if rates is not None else None
    counts = np.concatenate(
        [
            draw(shares[part], rates[part] if rates is not None else None, case.top_k, tokens, rng)
            for part in np.array_split(np.arange(len(shares)), -(-len(shares) // 32))
        ]
    )
    copies = _copies(laid.table, case.experts)
    even = np.take_along_axis(counts / copies, laid.table, 1)
    expert = even.max(1) / even.mean(1)
    loads = even.reshape(len(even), case.ep, -1).sum(2)
    evenly = float((loads.max(1) / loads.mean(1)).mean())
    if laid.plan is not None:
        loads = laid.plan.whole(np.rint(counts).astype(np.int64)).reshape(len(even), case.ep, -1).sum(2)
    loads = loads / loads.mean(1, keepdims=True)
    rank = loads.max(1)
    return Imbalance(
        float(expert.mean()), float(np.percentile(expert, 95)), float(rank.mean()), float(np.percentile(rank, 95)),
        evenly, float((1 - (1 - np.minimum(shares, 1)) ** tokens).mean()),
        float(rank.std() / np.sqrt(len(rank))), loads, case.skew.source or case.skew.kind,
    )  # fmt: skip


def _copies(table: NDArray[np.int64], experts: int) -> Floats:
    """Copies of each expert [N, E]."""
    flat = table + np.arange(len(table))[:, None] * experts
    return np.bincount(flat.ravel(), minlength=len(table) * experts).reshape(len(table), experts).astype(np.float64)


def _between(low: Imbalance, high: Imbalance, part: float) -> Imbalance:
    mixed = [
        (1 - part) * getattr(low, name) + part * getattr(high, name)
        for name in ("expert", "expert_p95", "rank", "rank_p95", "rank_even", "hit", "error")
    ]
    expert, expert_p95, rank, rank_p95, even, hit, error = mixed
    loads = (low if part < 0.5 else high).loads
    return Imbalance(expert, expert_p95, rank, rank_p95, even, hit, error, loads, low.source)
