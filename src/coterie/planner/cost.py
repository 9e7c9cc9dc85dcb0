"""Time of one step: its operations (`ops`) at a device's rates times efficiencies; decode, prefill, or both at once.

Each operation takes the longer of its products and its bytes; a layer adds a constant (launches, norms, routing: at
small batches the largest part), a step another. Efficiencies are priors here; `planner/calibrate.py` fits them on
published measurements, `coterie plan calibrate` measures them on one machine. Seconds throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.planner.layout import Layout
from coterie.planner.measured import Bound, Measured, constant_seconds, measured_seconds, resident_bytes
from coterie.planner.network import Link, all_to_all
from coterie.planner.ops import Op, Point, step_ops
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What software makes of a device. Shares of its rates: `eta_m` of reading memory, `eta_p` of products, `eta_a` of
    attention's products, `eta_e` of reading routed experts (0: eta_m; they are many short reads). `layer_seconds` of
    every layer and `step_seconds` of every step come on top. Exchanges: `alpha` seconds each way, `beta` share of the
    links' bandwidth; `link` instead of both where more is known. absorbed: prompts use absorbed attention too.
    measured: our engine's kernels on this machine, which replace the shares and constants above."""

    eta_m: float = 0.85
    eta_p: float = 0.45
    eta_a: float = 0.5
    eta_e: float = 0.0
    layer_seconds: float = 90e-6
    step_seconds: float = 0.5e-3
    alpha: float = 15e-6
    beta: float = 0.8
    link: Link | None = None
    absorbed: bool = False
    measured: Measured | None = None

    def links(self) -> Link:
        """What exchanges make of the links."""
        return self.link or Link(alpha=self.alpha, share=self.beta, net_alpha=self.alpha, net_share=self.beta)


@dataclass(frozen=True, slots=True)
class OpCost:
    """One line of a step's table: an operation summed over its layers. `bound`: what its time is made of."""

    name: str
    seconds: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step. `tokens`: that each stream gains by it (more than one with multi-token prediction)."""

    ops: tuple[OpCost, ...]
    tokens: float = 1.0

    @property
    def seconds(self) -> float:
        return sum(op.seconds for op in self.ops)

    @property
    def tpot(self) -> float:
        """Seconds between two tokens of a stream."""
        return self.seconds / self.tokens

    @property
    def bound(self) -> Bound:
        """What most of the time is spent on."""
        total: dict[Bound, float] = {}
        for op in self.ops:
            total[op.bound] = total.get(op.bound, 0.0) + op.seconds
        return max(total, key=lambda bound: total[bound])


def prior(hw: HardwareSpec) -> Efficiency:
    """Efficiencies before any measurement of the class. CPU servers reach a quarter to two fifths of their bandwidth
    and a sixth of their matrix units' peak (published runs on Xeon 6980P, 6454S and EPYC 9654, docs/planner.md)."""
    if hw.measured:
        return Efficiency(eta_m=0.8, eta_p=0.6, eta_a=0.4, layer_seconds=60e-6, step_seconds=0.3e-3, absorbed=True)
    if hw.kind == "cpu":
        return Efficiency(eta_m=0.33, eta_p=0.16, eta_a=0.1, layer_seconds=60e-6, step_seconds=0.5e-3, absorbed=True)
    return Efficiency()


def decode_step(
    model: ModelSpec, hw: HardwareSpec, layout: Layout, point: Point, eff: Efficiency | None = None
) -> StepCost:
    """One step of `point.batch` streams with `point.context` tokens each."""
    return mixed_step(model, hw, layout, (point, None), eff)


def prefill_step(
    model: ModelSpec, hw: HardwareSpec, layout: Layout, point: Point, eff: Efficiency | None = None
) -> StepCost:
    """One step of `point.batch` prompts of `point.context` new tokens each, after `point.past` cached ones."""
    return mixed_step(model, hw, layout, (None, point), eff)


def mixed_step(
    model: ModelSpec,
    hw: HardwareSpec,
    layout: Layout,
    points: tuple[Point | None, Point | None],
    eff: Efficiency | None = None,
) -> StepCost:
    """One step of streams that decode and prompts beside them; either may be None, not both."""
    eff = eff or prior(hw)
    decode, prefill = points
    leader = decode or prefill
    overlap = leader is not None and leader.overlap
    halves = tuple(half(point) if overlap else point for point in points)
    ops = step_ops(model, layout, halves[0], halves[1], absorbed=eff.absorbed)
    tokens = decode.tokens_per_step if decode is not None else 1.0
    return price(ops, hw, eff, overlap=overlap, tokens=tokens)


def half(point: Point | None) -> Point | None:
    """One of two micro-batches."""
    return None if point is None else replace(point, batch=point.batch / 2)


def price(
    ops: tuple[Op, ...], hw: HardwareSpec, eff: Efficiency, *, overlap: bool = False, tokens: float = 1.0
) -> StepCost:
    """Seconds of operations. With `overlap` they are those of one of two micro-batches: a layer then takes the longer
    of both computations and of one computation with its exchange, max(2c, c + m)."""
    around = resident_bytes(ops)
    costs = [(op, *seconds_of(op, hw, eff, around)) for op in ops]
    times = 2.0 if overlap else 1.0
    lines: dict[tuple[str, Bound], float] = {}
    computing: dict[int, float] = {}
    for op, seconds, bound in costs:
        if op.kind != "exchange":
            computing[op.layer] = computing.get(op.layer, 0.0) + seconds
            key = (op.name, bound)
            lines[key] = lines.get(key, 0.0) + times * seconds * op.times
    for op, seconds, _ in costs:
        if op.kind == "exchange":
            shown = max(0.0, seconds - computing[op.layer] - eff.layer_seconds) if overlap else seconds
            name = f"{op.name}, not hidden" if overlap else op.name
            lines[name, "network"] = lines.get((name, "network"), 0.0) + shown * op.times
    each, step = constants_of(ops, eff)
    lines["layer constant", "constant"] = times * each
    lines["step constant", "constant"] = step
    return StepCost(tuple(OpCost(name, seconds, bound) for (name, bound), seconds in lines.items() if seconds), tokens)


def constants_of(ops: tuple[Op, ...], eff: Efficiency) -> tuple[float, float]:
    """Seconds of all layers and of the step that no operation accounts for."""
    if eff.measured is not None:
        return constant_seconds(ops, eff.measured.constants)
    layers = {op.layer: op.times for op in ops if op.layer >= 0}
    return eff.layer_seconds * sum(layers.values()), eff.step_seconds


def seconds_of(op: Op, hw: HardwareSpec, eff: Efficiency, around: float = 0.0) -> tuple[float, Bound]:
    """Seconds of one operation in one layer, and what they are made of. `around`: bytes that steps go round in."""
    if op.kind == "exchange":
        return exchange_seconds(op, hw, eff), "network"
    if op.kind == "reduce":
        return reduce_seconds(op, hw, eff), "network"
    if eff.measured is not None:
        return measured_seconds(op, hw, eff.measured, around)
    share = eff.eta_a if op.kind == "attention" else eff.eta_p
    bits = op.bits if op.kind != "attention" or hw.fp4_tops else 16  # before Blackwell an fp8 cache is widened first
    compute = op.operations / (hw.rate(bits) * share)
    reading = eff.eta_e or eff.eta_m if op.name == "routed experts" else eff.eta_m
    memory = op.nbytes / (hw.memory_rate * reading)
    return (compute, "compute") if compute > memory else (memory, "memory")


def exchange_seconds(op: Op, hw: HardwareSpec, eff: Efficiency) -> float:
    """Dispatch and combine over the device's topology (`network`)."""
    assert op.message is not None
    return all_to_all(op.message, hw, eff.links()).seconds


def reduce_seconds(op: Op, hw: HardwareSpec, eff: Efficiency) -> float:
    """All-reduce: each device sends 2 (n-1)/n of the vector, in two exchanges."""
    rate = link_rate(op.ranks, hw, eff)
    return eff.alpha + 2 * (op.ranks - 1) / op.ranks * op.nbytes / rate


def link_rate(ranks: int, hw: HardwareSpec, eff: Efficiency) -> float:
    """Bytes a second of a device among so many: inside the scale-up domain its links, beyond it the network's share.
    Raises SpecError where the device has none."""
    inside = ranks <= hw.domain
    rate = hw.scaleup_gbps if inside else hw.network_gbps
    if rate <= 0:
        where = "links between devices (scaleup_gbps)" if inside else f"network beyond {hw.domain} (network_gbps)"
        raise SpecError(f"{hw.name} has no {where}, which {ranks} ranks need; state it in the hardware file")
    return rate * 1e9 * eff.beta
