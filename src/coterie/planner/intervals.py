"""Intervals that keep what they promise: split conformal on the errors of measurements that were left out.

A fit says by how much it expects to be wrong; how much it was wrong where measurements were left out, by kind and by
whether their class was known, says by what factor that is to be widened or may be narrowed (Lei et al., arXiv
1604.04173, with the fit's own deviation as the scale). Errors are of logarithms, so intervals multiply and divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.8
NORMAL = 1.2816
"""Standard deviations of the 80 % interval of a normal distribution."""
FEWEST = 8
"""Errors below which the factor of a normal distribution is the least."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A left-out measurement: its row and kind, the error of the logarithm, and the deviation that was expected."""

    name: str
    kind: str
    error: float
    spread: float


def conformal(misses: Sequence[Miss]) -> float:
    """Expected deviations that hold 80 % of such errors: the ceil(0.8 (n + 1))-th smallest ratio. With few errors at
    least a normal distribution's; without any 1.6 times that."""
    ratios = sorted(abs(miss.error) / miss.spread for miss in misses)
    if not ratios:
        return 1.6 * NORMAL
    rank = math.ceil(LEVEL * (len(ratios) + 1))
    found = ratios[rank - 1] if rank <= len(ratios) else 1.2 * ratios[-1]
    return max(found, NORMAL) if len(ratios) < FEWEST else found


@dataclass(frozen=True, slots=True)
class Tally:
    """How predictions of one kind did: errors are |predicted / measured - 1|; width is the median of p90 / value."""

    kind: str
    number: int
    median: float
    mean: float
    p90: float
    bias: float
    coverage: float
    width: float
    failures: int = 0


def tally(kind: str, found: Sequence[tuple[float, float, float, float]], failures: int = 0) -> Tally:
    """Of (measured, value, p10, p90). Bias is the mean of predicted / measured - 1."""
    if not found:
        return Tally(kind, 0, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, failures)
    errors = sorted(abs(value / measured - 1) for measured, value, _, _ in found)
    inside = sum(low <= measured <= high for measured, _, low, high in found)
    widths = sorted(math.sqrt(high / low) for _, _, low, high in found)
    count = len(found)
    return Tally(
        kind, count, _quantile(errors, 0.5), sum(errors) / count, _quantile(errors, 0.9),
        sum(value / measured - 1 for measured, value, _, _ in found) / count, inside / count, _quantile(widths, 0.5),
        failures,
    )  # fmt: skip


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between order statistics."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
