"""A step at the efficiencies that were fitted on published measurements of an engine, an architecture and a device.

The fit (`calibrate`) knows engines, architectures, devices and their combinations; what it has not seen widens the
interval. Here it prices any step of `ops`, not only the rows it was fitted on. Not here: queues, prompts beside
streams, what passes before a prompt is computed (`served`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from coterie.planner.bayes import Case, Vector
from coterie.planner.calibrate import NOISE, shipped
from coterie.planner.cost import Efficiency, OpCost
from coterie.planner.named import architecture, maker_of
from coterie.planner.quantity import Flag
from coterie.planner.served import FRONT_SECONDS, ROW_LIMIT, ROW_SECONDS, efficiency, times
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

Quantity = Literal["tpot", "ttft"]


@dataclass(frozen=True, slots=True)
class FittedStep:
    """efficiency: posterior mean. spread: factor of the 80 % interval. rows: seconds of a stream in a step beyond bytes
    and products, while few (to about `row_limit`). front: seconds before a prompt is computed. seen: measurements of
    the engine's class."""

    efficiency: Efficiency
    spread: float
    rows: float
    seen: int
    flags: tuple[Flag, ...]
    front: float = 0.0
    row_limit: float = ROW_LIMIT

    def streams(self, count: float) -> OpCost:
        """Sampling and bookkeeping of so many streams of a group."""
        return OpCost("sampling and streams", self.rows * count / (1 + count / ROW_LIMIT), "constant")


def engines() -> tuple[str, ...]:
    """Engines with measurements of served models."""
    fit = shipped().fits["served"]
    return tuple(sorted({row.labels[fit.prior.levels.index("engine")] for row in fit.rows} - {"", "unknown"}))


def fitted_step(
    model: ModelSpec, hw: HardwareSpec, engine: str | None, seconds: Callable[[Efficiency], float], quantity: Quantity
) -> FittedStep:
    """Efficiencies for a model on a device, of an engine or (None) of one that is not known; `seconds` prices the step
    that the interval is for, a decode step (tpot) or a prompt's (ttft). Raises SpecError for an engine without
    measurements."""
    if engine is not None and engine not in engines():
        raise SpecError(f"there are no measurements of an engine {engine!r}; there are of {', '.join(engines())}")
    calibration, kind, name = shipped(), architecture(model), engine or "none"
    fit = calibration.fits["served"]
    labels = {
        "all": "all", "engine": name, "architecture": kind, "maker": maker_of(hw), "hardware": hw.name,
        "quantity": quantity,
        "engine-architecture": f"{name}/{kind}",
        "engine-architecture-hardware": f"{name}/{kind}/{hw.name}",
        "engine-model": f"{name}/{model.num_parameters / 1e9:.1f}B",
    }  # fmt: skip
    own = tuple(labels.get(level, "") for level in fit.prior.levels)

    def form(z: Vector) -> float:
        return math.log(seconds(efficiency(z, kind, hw)))

    answer = fit.answer(Case("step", form, own, (0.0,) * 4, NOISE[quantity]))
    members = fit.members(own)
    seen = members["engine-architecture"]
    flags: tuple[Flag, ...] = ()
    if not members["hardware"] or not members["engine-model"]:
        flags += ("EXTRAPOLATED",)
    if not seen or not members["maker"]:
        flags += ("UNCALIBRATED",)
    factor = calibration.factor(quantity, known=True)
    if flags:  # the factor of left-out classes may be the smaller one; what was not seen is never surer than what was
        factor = max(factor, calibration.factor(quantity, known=False, maker=members["maker"] > 0))
    deviation = math.hypot(answer.spread, NOISE[quantity]) * factor
    return FittedStep(
        efficiency(answer.z, kind, hw), math.exp(deviation), ROW_SECONDS * times(answer.z, "rows"), seen, flags,
        FRONT_SECONDS * times(answer.z, "front"),
    )
