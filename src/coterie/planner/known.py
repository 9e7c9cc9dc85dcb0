"""What is known of step times before a search: efficiencies and half-widths of intervals, by where they come from.

Our engine measured on this machine; an engine fitted on published measurements; or priors. The fit was made on layouts
of few attention groups, so wide ones get the wider interval that uncalibrated wide expert parallelism deserves. Not
here: the fit (`calibrate`, `fitted_step`), measuring (`plan calibrate`).
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.planner.cost import Efficiency, OpCost, mixed_step
from coterie.planner.layout import Layout
from coterie.planner.measured import Measured
from coterie.planner.ops import Point
from coterie.planner.quantity import Flag
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

UNKNOWN_TPOT, UNKNOWN_TTFT = 1.6, 1.8
"""Half-widths (x or /) of 80 % intervals of a model and engine that nothing was fitted on."""
CPU_TPOT, CPU_TTFT = 1.8, 2.0
"""The same of a CPU server that was not calibrated: published CPU rows lie about so far apart at equal rates."""
MEASURED = (1.3, 1.35)
"""The same of a decode and a prefill step of our engine on a machine that was calibrated, as compared so far
(docs/planner.md); two calibrations of one machine differ by up to a quarter."""
WIDE, FAR_SPREAD = 8, 1.35
"""Attention groups from which an expert-parallel layout is wide, and the least half-width there and without a
measurement of the class: models of wide expert parallelism that was not measured err by up to about a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Efficiencies (None: the device's priors), half-widths of TPOT and TTFT, seconds of a stream in a step beyond
    bytes and products (while few), seconds before a prompt is computed, flags, and whence in words."""

    efficiency: Efficiency | None = None
    tpot: float = UNKNOWN_TPOT
    ttft: float = UNKNOWN_TTFT
    rows: float = 0.0
    row_limit: float = 128.0
    front: float = 0.0
    flags: tuple[Flag, ...] = ("UNCALIBRATED",)
    how: str = "priors of the device: no measurement of the model or engine"

    def spread(self, layout: Layout) -> tuple[float, float]:
        """Half-widths of a layout's TPOT and TTFT."""
        least = least_spread(layout, self.flags)
        return max(self.tpot, least), max(self.ttft, least)

    def flags_of(self, layout: Layout) -> tuple[Flag, ...]:
        """The flags, and EXTRAPOLATED for a wide layout."""
        return layout_flags(layout, self.flags)

    def streams(self, count: float) -> OpCost:
        """Sampling and bookkeeping of so many streams of a group."""
        return OpCost(STREAMS, self.rows * count / (1 + count / self.row_limit), "constant")


STREAMS = "sampling and streams"
PRIOR = Known()
CPU_PRIOR = Known(
    tpot=CPU_TPOT, ttft=CPU_TTFT, how="efficiencies of CPU servers in general: calibrate on the machine itself"
)


def is_wide(layout: Layout) -> bool:
    return layout.dp > WIDE and layout.ep > WIDE


def least_spread(layout: Layout, flags: tuple[Flag, ...]) -> float:
    """The least half-width of a time on a layout with these flags."""
    return FAR_SPREAD if is_wide(layout) or "UNCALIBRATED" in flags else 1.0


def layout_flags(layout: Layout, flags: tuple[Flag, ...]) -> tuple[Flag, ...]:
    """The flags, and EXTRAPOLATED for a wide layout."""
    return (*flags, "EXTRAPOLATED") if is_wide(layout) and "EXTRAPOLATED" not in flags else flags


def check_engine(engine: str | None, hw: HardwareSpec, measured: Measured | None) -> None:
    """Raise SpecError for an engine where the times are already those of ours, measured on this machine."""
    if engine is not None and measured is not None:
        raise SpecError(
            f"{hw.name} was measured with this engine, so it has no times of {engine!r}: leave --engine out"
        )


def known_of(
    model: ModelSpec, hw: HardwareSpec, layout: Layout, engine: str | None = None, measured: Measured | None = None
) -> Known:
    """What is known of a model on a device. `engine`: whose published measurements to use, None for no engine in
    particular. `measured`: our engine on this machine. Raises SpecError for an engine without measurements."""
    check_engine(engine, hw, measured)
    if measured is not None:
        how = f"our engine as measured on this machine: {measured.threads} threads, {measured.isa}"
        return Known(efficiency=Efficiency(measured=measured, absorbed=True), tpot=MEASURED[0], ttft=MEASURED[1],
                     flags=(), how=how)  # fmt: skip
    if hw.kind not in ("gpu", "npu", "tpu"):
        if engine is not None:
            raise SpecError(
                f"on {hw.name} times are those of this engine, not of {engine!r}: leave --engine out (`plan step` "
                "knows other engines on CPUs)"
            )
        return CPU_PRIOR if hw.kind == "cpu" else PRIOR
    from coterie.planner.fitted_step import fitted_step

    streams, prompt = Point(batch=16.0 * layout.dp, context=4096), Point(batch=1, context=4096)

    def step(efficiency: Efficiency) -> float:
        return mixed_step(model, hw, layout, (streams, None), efficiency).seconds

    def first(efficiency: Efficiency) -> float:
        return mixed_step(model, hw, layout, (None, prompt), efficiency).seconds

    token, start = fitted_step(model, hw, engine, step, "tpot"), fitted_step(model, hw, engine, first, "ttft")
    name = f"of {engine}" if engine else "of no engine in particular (see --engine)"
    return Known(
        efficiency=token.efficiency, tpot=token.spread, ttft=start.spread, rows=token.rows, row_limit=token.row_limit,
        front=start.front, flags=token.flags, how=f"efficiencies {name}, {token.seen} measurements of its class",
    )  # fmt: skip
