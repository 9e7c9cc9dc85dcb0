"""The limits of the batch by the planner's own models: B_RP, B_cap of the itemised memory, B_SLO of the step's time.

What a step costs is given as a function of the batch, so that whoever knows a step (`plan step`, a search, a
comparison) has the same limits of it. Not here: the reference paper's coarser form of the three (`limits`), and what a
step costs (`cost`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from coterie.planner.layout import Layout
from coterie.planner.limits import compute_limits
from coterie.planner.memory import Load, budget
from coterie.planner.quantity import Quantity, sure
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

MOST = 1 << 24
"""Requests beyond which nobody asks: a larger limit is said to be this."""


def largest_batch(seconds: Callable[[int], float], slo: float, most: int = MOST) -> int:
    """The most requests, up to `most`, with which a token takes no longer than the SLO; 0 if one takes longer. A step
    never gets faster with more of them, so they are doubled and then halved."""
    low, high = 0, 1
    while high <= most and seconds(high) <= slo:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= slo else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Requests of the whole system. b_rp: from which products take longer than reading weights; b_cap: whose cache fits
    beside the weights on average; b_slo: with which a token takes no longer than asked; alone: time of a token of one
    request. binds: which of the last two is smaller."""

    b_rp: Quantity
    b_cap: Quantity
    b_slo: Quantity
    alone: Quantity
    binds: Literal["capacity", "latency"]


def ridge_batch(model: ModelSpec, hw: HardwareSpec, layout: Layout) -> float:
    """B_RP: both attention's and the experts' products reach the ridge (Eq. 10 of arXiv 2507.15465)."""
    return max(compute_limits(model, hw, layout))


def batch_limits(
    side: tuple[ModelSpec, HardwareSpec, Layout], load: Load, time: Callable[[int], Quantity], slo: float
) -> BatchLimits:
    """Limits of a model on devices in a layout. load: lengths that the cache is for. time: of a token with so many
    requests. slo: seconds. B_SLO's interval is that of the time, turned around."""
    model, hw, layout = side
    alone = time(1)
    b_cap = budget(model, hw, layout, load).b_cap

    def within(bound: Literal["value", "p10", "p90"]) -> float:
        return float(largest_batch(lambda batch: float(getattr(time(batch), bound)), slo))

    b_slo = replace(alone, value=within("value"), p10=within("p90"), p90=within("p10"), unit="requests",
                    formula="b-slo")  # fmt: skip
    b_rp = sure(ridge_batch(model, hw, layout), "requests", "eq-10")
    return BatchLimits(b_rp, b_cap, b_slo, alone, "capacity" if b_cap.value <= b_slo.value else "latency")
