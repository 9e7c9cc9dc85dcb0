"""Quantity: a number of the planner with its interval, unit, kind and formula. Every number that is printed is one.

kind says how far to trust it: exact (counted), derived (arithmetic on given numbers), assumed (a default nobody
measured), calibrated (fitted on published measurements of its class), extrapolated (the fit has no row of its class).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["exact", "derived", "assumed", "calibrated", "extrapolated"]
Flag = Literal["EXTRAPOLATED", "UNCALIBRATED", "SATURATED", "SUSPECT-SPEC"]
_TRUST: tuple[Kind, ...] = ("exact", "derived", "calibrated", "assumed", "extrapolated")


@dataclass(frozen=True, slots=True)
class Quantity:
    """`p10`, `p90`: bounds of the 80 % interval, equal to the value where it is exact. `formula`: id in docs/planner.md
    (for instance "kv-bytes")."""

    value: float
    unit: str
    kind: Kind
    formula: str
    p10: float
    p90: float
    flags: tuple[Flag, ...] = ()

    def spread(self, factor: float) -> Quantity:
        """The same with an interval of value / factor to value x factor."""
        return replace(self, p10=self.value / factor, p90=self.value * factor)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints; an unbounded number is null."""
        bounds = {name: getattr(self, name) for name in ("value", "p10", "p90")}
        plain: dict[str, Any] = {name: (x if math.isfinite(x) else None) for name, x in bounds.items()}
        return plain | {"unit": self.unit, "kind": self.kind, "formula": self.formula, "flags": list(self.flags)}


def sure(value: float, unit: str, formula: str, kind: Kind = "derived") -> Quantity:
    """A quantity without an interval."""
    return Quantity(value, unit, kind, formula, value, value)


def least_trusted(kinds: Iterable[Kind]) -> Kind:
    """The kind of a sum of such numbers."""
    return max(kinds, key=_TRUST.index, default="exact")
