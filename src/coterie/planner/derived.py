"""Answers to rows that nothing is fitted to: imbalance of routing, and what the reference paper simulated.

Imbalance is drawn from the shipped trace (`imbalance`); the paper's batch limits and exchanges are its own equations at
its own constants (arXiv 2507.15465), so they check a re-implementation and predict no machine. Not here: fitted kinds.
"""

from __future__ import annotations

import re
from dataclasses import replace

from coterie.planner.data import Row, number
from coterie.planner.devices import device
from coterie.planner.imbalance import gamma
from coterie.planner.layout import Layout
from coterie.planner.limits import paper_limits
from coterie.planner.models import model
from coterie.planner.named import device_of, model_of, weight_name
from coterie.planner.network import PAPER, Exchange, all_to_all
from coterie.planner.phrases import Setup, setup
from coterie.planner.quantity import Flag, Kind, Quantity, sure
from coterie.planner.skew import Skew
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec, MoESpec

REFERENCE = "DeepSeek-R1"
PAPER_FACTOR = 1.03
"""What the paper does not state, its reserve of memory and seeds, moves its numbers by so much (thrice that where it
drew a placement): our assumption."""
KNOWN_FACTOR, UNKNOWN_FACTOR = 1.2, 1.6
"""Half-widths of the intervals of an imbalance, as factors: for the model that the trace was fitted to, for others."""


def derived(row: Row) -> tuple[Quantity, str, tuple[str, ...]]:
    """(answer, "", what was assumed). Raises SpecError where the row says too little."""
    answers = {
        "rank-imbalance": imbalance_of, "expert-imbalance": imbalance_of, "capacity": capacity_of, "a2a": exchange_of,
        "gamma-ratio": ratio_of,
    }  # fmt: skip
    if row.quantity not in answers:
        raise SpecError(f"nothing here computes the metric {row.metric!r} of row {row.id}")
    quantity, assumed = answers[row.quantity](row, setup(row))
    return quantity, "", assumed


def routed_model(row: Row) -> tuple[ModelSpec, bool]:
    """The row's model, or the reference where it names none that has experts; and whether it is the row's."""
    try:
        _, spec, exact = model_of(row.model)
    except SpecError:
        return model(REFERENCE)[1], False
    if not any(isinstance(layer.ffn, MoESpec) for layer in spec.layers):
        if re.search(r"\bMoE\b", row.model):
            return model(REFERENCE)[1], False
        raise SpecError(f"{row.model} has no experts, so nothing is out of balance")
    return spec, exact


def imbalance_of(row: Row, said: Setup) -> tuple[Quantity, tuple[str, ...]]:
    """The busiest rank or expert over the mean: placed at random without balancing, balanced where EPLB is named."""
    spec, exact = routed_model(row)
    experts = next(layer.ffn.num_experts for layer in reversed(spec.layers) if isinstance(layer.ffn, MoESpec))
    assumed: list[str] = [] if exact else [f"routing of {REFERENCE}"]
    if said.decode is None:
        assumed.append("64 ranks")
    ranks = said.decode.ep if said.decode else 64
    tokens = (said.load.per_rank or said.load.tokens or 256.0) * ranks
    text = f"{row.parallelism} {row.load}"
    balanced = bool(re.search(r"EPLB|balanc", text, re.I)) and not re.search(r"no EPLB|without EPLB|before", text, re.I)
    slots = said.slots * ranks if said.slots and said.slots < experts else said.slots or experts
    redundant = max(0, slots - experts) if balanced else 0
    if balanced and not said.slots:
        redundant, assumed = ranks, [*assumed, "a copy on each rank"]
    redundant += -(experts + redundant) % ranks
    skew = Skew.parse("trace").resolve(experts)
    found = gamma(skew, spec, tokens, ranks, "balanced" if balanced else "random", redundant)
    value = found.expert if row.quantity == "expert-imbalance" else found.rank
    if re.search(r"real.?time|online", text, re.I) and balanced:
        value, assumed = min(value, found.rank_even), [*assumed, "balanced on the batch itself"]
    known = not assumed
    factor = KNOWN_FACTOR if known else UNKNOWN_FACTOR
    flags: tuple[Flag, ...] = () if known else ("EXTRAPOLATED", "UNCALIBRATED")
    low = 1 + (value - 1) / factor**2 if value < factor else value / factor
    kind: Kind = "calibrated" if known else "extrapolated"
    return Quantity(value, row.unit, kind, "imbalance", low, value * factor, flags), tuple(assumed)


def paper_device(row: Row, said: Setup) -> HardwareSpec:
    """The paper's device (192 GiB, one switch), or the row's own; links as the text says."""
    text = row.hardware
    if not said.accelerators:
        raise SpecError(f"row {row.id} names no device")
    hw = device("b200-paper") if re.search(r"\bB200", text) else device_of(said.accelerators[0][1])
    rate = number(re.sub(r".*?(\d[\d.]*)\s*GB/s.*", r"\1", text)) if "GB/s" in text else None
    if re.search(r"\bIB\b|InfiniBand|XDR|NDR", text):
        return replace(hw, domain=1, network_gbps=rate or hw.network_gbps)
    return replace(hw, domain=max(hw.domain, said.devices or 1), scaleup_gbps=rate or hw.scaleup_gbps)


def exchange_of(row: Row, said: Setup) -> tuple[Quantity, tuple[str, ...]]:
    """One dispatch or combine, even routing: bytes of the busiest rank, as drawn, over the link (Eq. 13)."""
    spec, _ = routed_model(row)
    ranks = said.decode.devices if said.decode else said.devices or 32
    tokens = said.load.per_rank or said.load.tokens or 128.0
    hw = paper_device(row, said)
    busiest = gamma(Skew.parse("uniform"), spec, tokens * ranks, ranks, "order").rank
    exchange = replace(Exchange.of(spec, tokens, ranks), gamma=max(1.0, busiest))
    seconds = all_to_all(exchange, hw, replace(PAPER, only_network=True)).dispatch
    return sure(seconds * (1e3 if row.unit.lower().startswith("ms") else 1e6), row.unit, "eq-13").spread(
        PAPER_FACTOR
    ), ()


def capacity_of(row: Row, said: Setup) -> tuple[Quantity, tuple[str, ...]]:
    """Requests that fit (Eq. 11)."""
    _, spec, _ = model_of(row.model)
    pool = said.decode
    if pool is None:
        raise SpecError(f"row {row.id} does not say how the model is laid out (TP..., DP...)")
    experts = next((layer.ffn.num_experts for layer in spec.layers if isinstance(layer.ffn, MoESpec)), 0)
    ep = pool.devices if experts and experts % pool.devices == 0 else 1
    form = weight_name(said.experts or "bf16")
    layout = Layout(devices=pool.devices, tp=pool.tp, dp=pool.dp, ep=ep, weights=form, kv="bf16")
    context = said.isl or said.context
    if not context:
        raise SpecError(f"row {row.id} does not say the context length")
    found = paper_limits(spec, paper_device(row, said), layout, int(context))
    return replace(found.b_cap, unit=row.unit).spread(PAPER_FACTOR), ()


def ratio_of(row: Row, said: Setup) -> tuple[Quantity, tuple[str, ...]]:
    """Gamma of many ranks over Gamma of fewer, "256 vs 32", experts placed at random, many tokens."""
    spec, _ = routed_model(row)
    text = f"{row.parallelism} {row.devices} {row.metric}"
    sides = re.search(r"(\d+)[^\d]*(?:vs|over|against)\.?\s*(\d+)", text)
    power = re.search(r"s\s*=\s*(\d*\.?\d+)", text)
    if sides is None or power is None:
        raise SpecError(f"row {row.id} does not name both numbers of ranks and the skew (s = ...)")
    skew = Skew.parse(f"zipf:{power[1]}")
    many, few = (gamma(skew, spec, 1 << 17, int(side), "random").rank for side in sides.groups())
    return sure(many / few, row.unit, "gamma").spread(PAPER_FACTOR**3), ()
