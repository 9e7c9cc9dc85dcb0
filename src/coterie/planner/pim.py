"""Processing in memory as a what-if device: few products, much bandwidth, alone or beside a GPU; where that pays.

A PIM device has `bandwidth` times a GPU's memory rate and `ridge` operations a byte (arXiv 2507.15465 takes 4 and 8).
In the hybrid each operation of a kind runs on the device that is faster for it: attention (which reads the cache),
experts, or all products. Rates are full and constants nil, as in the reference, unless efficiencies are given: no such
device can be measured here. Moving activations between the two is not counted, which favours the hybrid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from coterie.planner.cost import Efficiency, OpCost, StepCost, price
from coterie.planner.layout import Layout
from coterie.planner.ops import Op, Point, step_ops
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

Part = Literal["attention", "experts", "all"]
IDEAL = Efficiency(eta_m=1.0, eta_p=1.0, eta_a=1.0, layer_seconds=0.0, step_seconds=0.0, alpha=0.0, beta=1.0)
MOST = 1 << 20


def pim(hw: HardwareSpec, *, ridge: float = 8.0, bandwidth: float = 4.0) -> HardwareSpec:
    """The what-if device made of a GPU's memory. 8-bit products run at twice the 16-bit rate where the GPU's do."""
    if not 0 < ridge <= 1e6 or not 0 < bandwidth <= 1e4:
        raise SpecError(f"ridge and bandwidth of a PIM device must be above 0, not {ridge:g} and {bandwidth:g}")
    rate = hw.memory_gbps * bandwidth * ridge / 1e3
    ratio = {name: getattr(hw, name) / hw.bf16_tops for name in ("fp8_tops", "fp4_tops", "int8_tops")}
    return replace(
        hw, name=f"{hw.name} with PIM", kind="pim", memory_gbps=hw.memory_gbps * bandwidth, bf16_tops=rate,
        **{name: rate * factor for name, factor in ratio.items()},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rivals:
    """One decode step on the GPU, on PIM alone, and on both by part."""

    batch: float
    gpu: StepCost
    pim: StepCost
    hybrid: dict[Part, StepCost]


def rivals(
    model: ModelSpec, devices: tuple[HardwareSpec, HardwareSpec], layout: Layout, point: Point,
    efficiency: Efficiency = IDEAL,
) -> Rivals:  # fmt: skip
    """The same step on (GPU, PIM) and their hybrids."""
    ops = step_ops(model, layout, point, None)
    alone = [price(ops, hw, efficiency, tokens=point.tokens_per_step) for hw in devices]
    parts: tuple[Part, ...] = ("attention", "experts", "all")
    mixed = {part: hybrid(ops, devices, part, efficiency) for part in parts}
    return Rivals(point.batch, alone[0], alone[1], mixed)


def hybrid(
    ops: Sequence[Op], devices: tuple[HardwareSpec, HardwareSpec], part: Part, efficiency: Efficiency = IDEAL
) -> StepCost:
    """A step whose operations of a part run where they are faster, all others on the GPU; one after the other."""
    lines: list[OpCost] = []
    rest: list[Op] = []
    for op in ops:
        if not belongs(op, part):
            rest.append(op)
            continue
        options = [_alone(op, hw, efficiency) for hw in devices]
        best = min(options, key=lambda line: line.seconds)
        lines.append(replace(best, name=f"{best.name}{' (PIM)' if best is options[1] else ''}"))
    plain = price(tuple(rest), devices[0], efficiency)
    return replace(plain, ops=(*plain.ops, *lines))


def belongs(op: Op, part: Part) -> bool:
    """Whether an operation may move."""
    if op.kind not in ("product", "attention"):
        return False
    return part == "all" or (op.kind == "attention" if part == "attention" else op.name == "routed experts")


def _alone(op: Op, hw: HardwareSpec, efficiency: Efficiency) -> OpCost:
    """One operation without constants."""
    bare = replace(efficiency, layer_seconds=0.0, step_seconds=0.0)
    return next(iter(price((op,), hw, bare).ops), OpCost(op.name, 0.0, "memory"))


def crossover(
    model: ModelSpec, devices: tuple[HardwareSpec, HardwareSpec], layout: Layout, context: float,
    efficiency: Efficiency = IDEAL,
) -> float:  # fmt: skip
    """Requests of the whole system from which on PIM alone is no longer faster than the GPU; 0 if it never is, inf if
    it still is at 2^20."""

    def faster(batch: int) -> bool:
        point = Point(batch=batch, context=context)
        ops = step_ops(model, layout, point, None)
        gpu, other = (price(ops, hw, efficiency).seconds for hw in devices)
        return other < gpu

    if not faster(1):
        return 0.0
    low, high = 1, 2
    while high <= MOST and faster(high):
        low, high = high, 2 * high
    if high > MOST:
        return float("inf")
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if faster(middle) else (low, middle)
    return float(high)
