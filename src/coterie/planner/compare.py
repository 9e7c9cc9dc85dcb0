"""Models or layouts side by side: sizes, work and memory of a token, the batch served in time, what a token costs.

A side is a model on devices in a layout. All sides answer the same question (`Ask`), so that their ratios mean
something. Nothing is computed here that `memory`, `limits` or `cost` do not say; this puts them next to each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from coterie.planner.batch import largest_batch
from coterie.planner.cost import decode_step
from coterie.planner.known import known_of
from coterie.planner.layout import Layout
from coterie.planner.limits import Terms, paper_limits
from coterie.planner.measured import Measured
from coterie.planner.memory import DEFAULT_LOAD, Load, budget, weight_items
from coterie.planner.ops import Point
from coterie.planner.quantity import Kind, Quantity, least_trusted, sure
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Side:
    """One column. measured: our engine's kernels on the device, where its file has them."""

    name: str
    model: ModelSpec
    hardware: HardwareSpec
    layout: Layout
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What every side is asked. `slo`: seconds that a token may take. `price`: of a device and hour, 0 for the
    device's own (which may be unknown). `engine`: whose published runs times follow,
    None for none in particular."""

    load: Load = DEFAULT_LOAD
    slo: float = 0.05
    price: float = 0.0
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A side's answers by name, None where there is none, and why not."""

    side: Side
    values: dict[str, Quantity | None]
    reason: str


NAMES: tuple[str, ...] = (
    "parameters",
    "active parameters",
    "active share",
    "operations a token",
    "weights in bf16",
    "cache a token in bf16",
    "weights of a rank",
    "free for the cache",
    "requests that fit",
    "paper B_RP",
    "paper B_cap",
    "paper B_SLO",
    "requests in time",
    "time of a token",
    "tokens a second and device",
    "device-seconds a million tokens",
    "cost of a million tokens",
)


def compare(sides: Iterable[Side], ask: Ask) -> tuple[Column, ...]:
    """One column a side, in order."""
    return tuple(_column(side, ask) for side in sides)


def _column(side: Side, ask: Ask) -> Column:
    values: dict[str, Quantity | None] = dict.fromkeys(NAMES)
    clock = Clock(side, ask)
    values |= sizes(side.model, ask.load.resident)
    result = budget(side.model, side.hardware, side.layout, ask.load)
    items = [quantity for _, quantity in weight_items(side.model, side.layout, side.hardware)]
    held = sum(quantity.value for quantity in items)
    kind = least_trusted(quantity.kind for quantity in items)
    values["weights of a rank"] = sure(held, "B", "weight-bytes", kind)
    values["free for the cache"] = result.free
    values["requests that fit"] = result.b_cap
    reason = _limits(side, ask, values)
    if result.b_cap.value < 1 or not result.fits:
        asked = ask.load.batch
        return Column(side, values, "it does not fit" if asked is None else f"{asked:,} requests do not fit")
    return Column(side, values, _decode(clock, ask, int(result.b_cap.value), values) or reason)


def sizes(model: ModelSpec, context: float) -> dict[str, Quantity]:
    """What does not depend on devices. Published active parameters include the embedding table."""
    active = model.num_active_parameters + (0 if model.tie_embeddings else model.counts.embedding)
    return {
        "parameters": sure(model.num_parameters, "values", "parameters", "exact"),
        "active parameters": sure(active, "values", "active-parameters", "exact"),
        "active share": sure(100 * active / model.num_parameters, "%", "active-parameters", "exact"),
        "operations a token": sure(model.flops_per_token(round(context)), "op", "operations", "derived"),
        "weights in bf16": sure(model.weight_bytes(), "B", "weight-bytes", "exact"),
        "cache a token in bf16": sure(model.kv_bytes_per_token(), "B", "kv-bytes", "exact"),
    }


def _limits(side: Side, ask: Ask, values: dict[str, Quantity | None]) -> str:
    """Fill the paper's limits; the reason if it has none."""
    try:
        terms = Terms(slo=ask.slo, utilisation=ask.load.utilisation)
        limits = paper_limits(side.model, side.hardware, side.layout, max(1, round(ask.load.resident)), terms)
    except SpecError as error:
        return str(error)
    values |= {"paper B_RP": limits.b_rp, "paper B_cap": limits.b_cap, "paper B_SLO": limits.b_slo}
    return ""


class Clock:
    """Times of decode steps of a side, by what is known of its class: fitted on published runs, or a prior."""

    def __init__(self, side: Side, ask: Ask):
        self.side, self.context = side, max(1.0, ask.load.resident)
        self.known = known_of(side.model, side.hardware, side.layout, ask.engine, side.measured)

    def seconds(self, batch: int) -> float:
        """A step of so many requests over all devices."""
        side, point = self.side, Point(batch=batch, context=self.context)
        step = decode_step(side.model, side.hardware, side.layout, point, self.known.efficiency)
        return step.seconds + self.known.streams(batch / side.layout.dp).seconds

    def time(self, batch: int) -> Quantity:
        """The same with its interval."""
        value, flags = self.seconds(batch), self.known.flags_of(self.side.layout)
        kind: Kind = "extrapolated" if flags else "calibrated"
        return Quantity(value, "s", kind, "decode-step", value, value, flags).spread(
            self.known.spread(self.side.layout)[0]
        )


def _decode(clock: Clock, ask: Ask, most: int, values: dict[str, Quantity | None]) -> str:
    """Fill what the largest batch in time costs; the reason if there is none."""
    side = clock.side
    batch = ask.load.batch or largest_batch(clock.seconds, ask.slo, most)
    if batch < 1:
        alone = clock.seconds(1)
        return f"one request alone takes {alone * 1e3:.3g} ms a token, {ask.slo * 1e3:.3g} ms are allowed"
    time, devices = clock.time(batch), side.layout.devices
    price = ask.price or side.hardware.price_hour
    values["requests in time"] = sure(batch, "requests", "batch", time.kind if ask.load.batch is None else "exact")
    values["time of a token"] = time
    values["tokens a second and device"] = scaled(time, batch / devices, "tokens/s", "token-rate", power=-1)
    values["device-seconds a million tokens"] = scaled(time, 1e6 * devices / batch, "device-s", "device-seconds")
    if price:
        values["cost of a million tokens"] = scaled(time, 1e6 * devices / batch / 3600 * price, "$", "cost")
    return ""


def scaled(time: Quantity, factor: float, unit: str, formula: str, *, power: int = 1) -> Quantity:
    """factor x time, or factor / time with the bounds exchanged."""
    low, value, high = (factor * bound**power for bound in (time.p10, time.value, time.p90)[::power])
    return replace(time, value=value, p10=low, p90=high, unit=unit, formula=formula)


def ratio(value: Quantity | None, first: Quantity | None) -> float | None:
    """A value over the first column's; None where one is missing or the first is not above zero."""
    if value is None or first is None or first.value <= 0:
        return None
    return value.value / first.value
