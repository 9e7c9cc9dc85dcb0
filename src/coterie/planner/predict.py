"""Answers to rows whose value is blank: value, 80 % interval, how far to trust it, or why there is no answer.

Fitted kinds come from `calibrate`; imbalance and the reference paper's simulated values from `derived`. A row is
EXTRAPOLATED outside the box of its class's measurements or with a device or model that none of them had, UNCALIBRATED
if no measurement has its class or a device of its maker, SATURATED if prompts arrive as fast as they can be computed.
Not here: scores, which rows cannot be (`row_checks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.planner.calibrate import CLASS_LEVEL, HARDWARE_LEVEL, Asked, Calibration, asked, family_of, shipped
from coterie.planner.data import Row
from coterie.planner.derived import derived
from coterie.planner.quantity import Flag, Kind, Quantity
from coterie.planner.remarks import remarks
from coterie.planner.row_checks import check_row
from coterie.planner.row_units import canonical
from coterie.planner.served import PARAMETERS
from coterie.spec.errors import SpecError

BUSIEST = 0.9
BOX_MARGIN = 0.5
"""Length scales beyond the outermost measurement of a class that still count as inside."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row's answer in its unit, or None and the reason. assumed: what the row did not say."""

    row: Row
    quantity: Quantity | None
    reason: str = ""
    assumed: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """One line of `plan predict --json`."""
        if self.quantity is None:
            return {
                "id": self.row.id,
                "value": None,
                "p10": None,
                "p90": None,
                "kind": None,
                "flags": [],
                "reason": self.reason,
            }
        plain = self.quantity.as_json()
        return {"id": self.row.id, **plain, "metric": self.row.metric, "assumed": list(self.assumed)}


def predict(row: Row, calibration: Calibration | None = None) -> Prediction:
    """The answer to one row. Whatever its value is, it is not looked at."""
    try:
        check_row(row)
        plain, factor, unit = canonical(row)
        if family_of(row) is None:
            found, _, assumed = derived(plain)
        else:
            one = asked(plain)
            found, assumed = fitted(one, calibration or shipped()), one.assumed
        notes = remarks(row)
    except SpecError as error:
        return Prediction(row, None, str(error))
    except (ArithmeticError, ValueError) as error:  # of the form: a log or a quotient of what cannot be
        return Prediction(row, None, f"the numbers of row {row.id} cannot be computed with: {error}")
    low, value, high = (each * factor for each in (found.p10, found.value, found.p90))
    if not 0 <= low <= value <= high < math.inf:
        return Prediction(row, None, f"the numbers of row {row.id} have no finite answer")
    scaled = replace(found, p10=low, value=value, p90=high, unit=unit)
    return Prediction(row, scaled, "", (*assumed, *notes))


def fitted(one: Asked, calibration: Calibration) -> Quantity:
    """Value and interval of a fitted kind."""
    fit = calibration.fits[one.family]
    answer = fit.answer(one.case)
    flags = flags_of(one, calibration)
    known = not set(flags) & {"EXTRAPOLATED", "UNCALIBRATED"}
    maker = fit.members(one.case.labels)["maker"] > 0
    spread = math.hypot(answer.spread, one.case.noise) * calibration.factor(kind_of(one), known=known, maker=maker)
    value = math.exp(answer.mean)
    kind: Kind = "calibrated" if known else "extrapolated"
    return Quantity(
        value, one.row.unit, kind, f"fit-{one.family}", value / math.exp(spread), value * math.exp(spread), flags
    )


def kind_of(one: Asked) -> str:
    """Whose factor widens an answer: its family's, where an id of another form does not name the kind."""
    return {"host": "cpu", "exchange": "a2a", "kernel": "kern"}.get(one.family, one.row.kind)


def flags_of(one: Asked, calibration: Calibration) -> tuple[Flag, ...]:
    """What to know before trusting an answer."""
    fit = calibration.fits[one.family]
    members = fit.members(one.case.labels)
    flags: list[Flag] = []
    level = fit.prior.levels.index(CLASS_LEVEL[one.family])
    same = [row for row in fit.rows if row.labels[level] == one.case.labels[level]]
    outside = not same or any(
        not min(row.features[axis] for row in same) - BOX_MARGIN
        <= value
        <= max(row.features[axis] for row in same) + BOX_MARGIN
        for axis, value in enumerate(one.case.features)
    )
    new = not members[HARDWARE_LEVEL[one.family]] or not members.get("engine-model", 1)
    if outside or new or not one.exact:
        flags.append("EXTRAPOLATED")
    if not same or not one.exact or not members["maker"]:
        flags.append("UNCALIBRATED")
    if one.row.quantity == "ttft" and one.busy is not None and one.busy(fit.z_of(one.case.labels)) > BUSIEST:
        flags.append("SATURATED")
    return tuple(flags)


def suspect_speculation(row: Row) -> bool:
    """Whether a measured time between tokens is shorter than a step without speculation, all rates at their peaks and
    no constants, could be."""
    if row.value is None or row.quantity != "tpot":
        return False
    one = asked(row)
    fastest = np.array([_FASTEST.get(name, 0.0) for name in PARAMETERS])
    return math.log(row.value) < one.case.form(fastest)


_FASTEST = {"eta_m": 0.3, "eta_p": 1.2, "eta_a": 0.7, "layer": -9.0, "alpha": -9.0, "beta": 0.5, "exchange": 1.0,
            "experts": 0.6, "rows": -9.0, "prompts": -9.0, "front": -9.0, "kappa": -9.0}  # fmt: skip


def predict_all(rows: Sequence[Row], calibration: Calibration | None = None) -> list[Prediction]:
    """Answers in order."""
    return [predict(row, calibration) for row in rows]
