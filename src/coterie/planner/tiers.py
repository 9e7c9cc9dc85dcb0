"""Experts over tiers: the device's memory, RAM, disk. Where they go by heat, what a step reads from each, how long.

Attention, shared experts, head and cache stay on the device. Routed experts fill what is left, the most used first,
then RAM, then the disk. An expert that is not on the device is either brought there when it is chosen ("stream": its
bytes pass the host link, or the disk if that is slower) or computed where it lies ("hybrid": by the CPU at RAM's rate,
beside the device; from disk it passes RAM). Reads follow the probability that any token of a step chooses an expert,
1 - (1 - p)^B: a hit rate is not a speed. Not here: what a RAM cache does with a changing order (residency).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.planner.cost import Efficiency, OpCost, StepCost, price, prior
from coterie.planner.layout import WEIGHT_BYTES, Layout
from coterie.planner.measured import Bound
from coterie.planner.memory import Load, budget
from coterie.planner.ops import Op, Point, step_ops
from coterie.planner.skew import Skew
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec, MoESpec

How = Literal["stream", "hybrid"]
TIERS = ("device", "ram", "disk")
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What stands behind a device. cpu: computes in the hybrid form, None without. ram_gb: for experts; link_gbps: to
    the device; rates in GB/s."""

    ram_gb: float
    ram_gbps: float
    link_gbps: float
    disk_gbps: float
    cpu: HardwareSpec | None = None

    @classmethod
    def of(cls, hw: HardwareSpec, cpu: HardwareSpec | None) -> Host:
        """The tiers that a device's table row names, or those of a CPU server beside it."""
        ram = cpu.memory_gb if cpu is not None else hw.ram_gb
        rate = cpu.memory_gbps if cpu is not None else hw.ram_gbps
        disk = hw.disk_gbps or (cpu.disk_gbps if cpu is not None else 0.0)
        return cls(ram_gb=ram, ram_gbps=rate, link_gbps=hw.host_link_gbps, disk_gbps=disk, cpu=cpu)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A step over tiers. experts, gb, read, chosen: by tier, the number of experts of a layer that lie there, their
    bytes in 1e9 over all layers, the bytes a step reads from it, and the share of (token, expert) choices it serves."""

    how: How
    experts: tuple[float, ...]
    gb: tuple[float, ...]
    read: tuple[float, ...]
    chosen: tuple[float, ...]
    cost: StepCost

    @property
    def tpot(self) -> float:
        return self.cost.tpot


def place(model: ModelSpec, hw: HardwareSpec, layout: Layout, host: Host, load: Load) -> tuple[float, float, float]:
    """Experts of each layer on the device, in RAM and on disk. Raises SpecError if what must be on the device does not
    fit, or experts find no place."""
    moe = next((moe for _, moe in model.moe_layers()), None)
    if moe is None:
        raise SpecError(f"{model.model_type} has no experts that could lie on another tier")
    each = sum(expert_bytes(model, ffn, layout) for _, ffn in model.moe_layers())
    room = budget(model, hw, layout, load)
    routed = sum(item.value for name, item in room.items if name.startswith(("routed", "redundant")))
    cache = 0.0 if room.cache is None else room.cache.value
    free = room.free.value + routed - cache
    if free < 0:
        raise SpecError(
            f"attention, shared experts, cache and the rest need {(hw.memory_bytes - free) / 1e9:.1f} GB without any "
            f"routed expert, and {hw.name} has {hw.memory_gb:.1f} GB: a smaller format, fewer requests, or more devices"
        )
    slots = moe.num_experts / layout.ep
    near = min(slots, free / each)
    middle = min(slots - near, host.ram_gb * 1e9 / layout.devices / each)
    far = slots - near - middle
    if far > 1e-9 and not host.disk_gbps:
        raise SpecError(
            f"{far * layout.ep:.0f} of {moe.num_experts} experts a layer fit neither on {hw.name} nor in "
            f"{host.ram_gb:.0f} GB of RAM, and there is no disk: give --disk-gbps, more --ram-gb or a smaller format"
        )
    return near, middle, far


def expert_bytes(model: ModelSpec, ffn: MoESpec, layout: Layout) -> float:
    """One routed expert of one layer on one rank."""
    return 3 * model.hidden_size * ffn.intermediate_size / layout.moe_tp * WEIGHT_BYTES[layout.weights]


def shares_by_heat(skew: Skew, moe: MoESpec, layers: int) -> Floats:
    """Probability that a token chooses each expert, most used first [E], mean over layers."""
    shares = skew.shares(moe.num_experts, moe.top_k, layers)
    return -np.sort(-np.asarray(shares, np.float64), axis=1).mean(0)


def split(shares: Floats, counts: tuple[float, ...], tokens: float) -> tuple[list[float], list[float]]:
    """(experts with a token, share of choices) of each tier; a tier may end inside an expert."""
    hit, edges = 1 - (1 - np.minimum(shares, 1.0)) ** tokens, np.cumsum([0.0, *counts])
    edges *= len(shares) / edges[-1]
    sums = [np.concatenate([[0.0], np.cumsum(values)]) for values in (hit, shares / shares.sum())]
    marks = np.arange(len(shares) + 1)
    hits, choices = (np.diff(np.interp(edges, marks, total)).tolist() for total in sums)
    return hits, choices


@dataclass(frozen=True, slots=True, kw_only=True)
class TierQuestion:
    """What a plan over tiers is about. prefill: a prompt's step instead of a decode step."""

    model: ModelSpec
    hardware: HardwareSpec
    layout: Layout
    host: Host
    point: Point
    skew: Skew
    load: Load
    prefill: bool = False


def tier_plan(question: TierQuestion, how: How, efficiency: Efficiency | None = None) -> TierPlan:
    """One step. The device's part is priced as everywhere; the experts of other tiers take the longest of what they
    wait for, in a layer beside the device's experts (hybrid) or before them (stream). Raises SpecError."""
    model, hw, host, layout = question.model, question.hardware, question.host, question.layout
    if how == "hybrid" and host.cpu is None:
        raise SpecError("the hybrid form computes experts on a CPU: name it with --cpu")
    if how == "stream" and not host.link_gbps and host.ram_gb:
        raise SpecError(f"{hw.name} names no host link, over which experts would come: give --link-gbps")
    counts = place(model, hw, layout, host, question.load)
    point = question.point
    tokens = point.batch * (point.context if question.prefill else 1)
    layers = list(model.moe_layers())
    shares = shares_by_heat(question.skew, layers[0][1], len(layers))
    hits, chosen = split(shares, counts, tokens)
    found = ([hit / layout.ep for hit in hits], chosen)
    unit = expert_bytes(model, layers[0][1], layout)
    eff = efficiency or prior(hw)
    ops = step_ops(model, layout, *((None, point) if question.prefill else (point, None)), absorbed=eff.absorbed)
    routed = next(op for op in ops if op.name == "routed experts")
    near = tuple(_on_device(op, unit, found, how) if op.name == "routed experts" else op for op in ops)
    device = price(near, hw, eff, tokens=1.0 if question.prefill else point.tokens_per_step)
    lines = list(device.ops)
    away = _away(question, how, routed, found)
    if away is not None:
        seconds, bound = away
        if how == "hybrid":  # the device computes its own experts and the shared ones meanwhile
            own = sum(op.seconds for op in lines if op.name in ("routed experts", "shared experts"))
            seconds = max(0.0, seconds - own)
        lines.append(
            OpCost("experts of the host, not hidden" if how == "hybrid" else "experts brought", seconds, bound)
        )
    total = unit * len(layers)
    gb = tuple(count * total / 1e9 for count in counts)
    read = tuple(hit * total for hit in found[0])
    return TierPlan(how, counts, gb, read, tuple(chosen), replace(device, ops=tuple(lines)))


def _on_device(op: Op, unit: float, split_of: tuple[list[float], list[float]], how: How) -> Op:
    """The routed experts that the device computes: its own, or all where they are brought. `unit`: bytes of one."""
    hits, chosen = split_of
    here = hits[0] if how == "hybrid" else sum(hits)
    part = chosen[0] if how == "hybrid" else 1.0
    rows = op.operations * part / (2 * op.unit)
    return replace(op, nbytes=unit * here, operations=op.operations * part, rows=rows / max(here, 1e-9))


def _away(
    question: TierQuestion, how: How, op: Op, split_of: tuple[list[float], list[float]]
) -> tuple[float, Bound] | None:
    """Seconds of all layers that experts of RAM and disk cost, and what they wait for; None where all are near."""
    hits, chosen = split_of
    if sum(hits[1:]) <= 1e-12:
        return None
    host, layout = question.host, question.layout
    unit = expert_bytes(question.model, next(moe for _, moe in question.model.moe_layers()), layout)
    layers = sum(1 for _ in question.model.moe_layers())
    ram, disk = hits[1] * unit, hits[2] * unit
    terms: list[tuple[float, Bound]] = []
    if disk:
        terms.append((disk / (host.disk_gbps * 1e9 / layout.devices), "memory"))
    if how == "stream":
        if host.link_gbps:
            terms.append(((ram + disk) / (host.link_gbps * 1e9), "network"))
        return max((layers * seconds, bound) for seconds, bound in terms)
    cpu = host.cpu
    assert cpu is not None
    known = prior(cpu)
    work = replace(op, nbytes=ram + disk, operations=op.operations * (chosen[1] + chosen[2]))
    terms.append((work.nbytes * layout.devices / (cpu.memory_rate * known.eta_m), "memory"))
    terms.append((work.operations * layout.devices / (cpu.rate(op.bits) * known.eta_p), "compute"))
    return max((layers * seconds, bound) for seconds, bound in terms)
