"""A step of another engine on a CPU alone, at the efficiencies that were fitted on published rows about it.

The fit is that of rows about CPUs (`hosts`): shares of one socket's memory and of its matrix or 8-bit vector rate, what
further sockets add, the constant of a layer. Here it prices any step of `ops`. Not here: accelerators beside (`tiers`),
our engine, which `plan calibrate` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from coterie.planner.bayes import Case, Vector
from coterie.planner.calibrate import shipped
from coterie.planner.cost import Efficiency
from coterie.planner.cpu_server import CYCLE, described
from coterie.planner.data import shipped_rows
from coterie.planner.hosts import LAYER_SECONDS, NOISE, Machine
from coterie.planner.hosts import efficiency as machine_efficiency
from coterie.planner.layout import Layout
from coterie.planner.named import architecture, host_of, is_guessed_host, maker_of
from coterie.planner.phrases import parts_of
from coterie.planner.quantity import Flag
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

WITH_TILES = ("sglang-cpu",)
"""Engines that multiply with matrix units; the others' rows are about vector instructions."""


@dataclass(frozen=True, slots=True)
class FittedHost:
    """efficiency on `hardware`, the device at the rates of the unit that the engine uses. spread: factor of the 80 %
    interval. seen: measurements of the engine."""

    efficiency: Efficiency
    hardware: HardwareSpec
    spread: float
    seen: int
    flags: tuple[Flag, ...]


def host_engines() -> tuple[str, ...]:
    """Engines with measurements on CPUs alone."""
    fit = shipped().fits["host"]
    alone = {row.id for row in shipped_rows() if not parts_of(row.hardware)[1]}
    place = fit.prior.levels.index("engine")
    return tuple(sorted({row.labels[place] for row in fit.rows if row.name in alone} - {""}))


def fitted_host(
    model: ModelSpec, hw: HardwareSpec, layout: Layout, engine: str,
    seconds: Callable[[Efficiency, HardwareSpec], float], *, prompt: bool,
) -> FittedHost:  # fmt: skip
    """Efficiencies of an engine on a CPU; `seconds` prices the step that the interval is for. Raises SpecError for an
    engine without measurements there, a CPU whose instructions are not known, or several devices."""
    known = host_engines()
    if engine not in known:
        raise SpecError(
            f"there are no measurements of an engine {engine!r} on CPUs alone; there are of {', '.join(known)}; "
            "without --engine times are those of ours (`plan tiers` answers for a CPU beside an accelerator)"
        )
    if layout.devices > 1:
        raise SpecError(
            f"sockets of {engine} work as one, not as {layout.devices} devices: leave -n out and describe them as one "
            "server, cpu:...,sockets=N"
        )
    machine = machine_of(hw, engine)
    calibration, kind, quantity = shipped(), architecture(model), "ttft" if prompt else "decode"
    fit = calibration.fits["host"]
    labels = {
        "all": "all", "engine": engine, "maker": maker_of(machine.host), "hardware": machine.host.name,
        "architecture": kind, "quantity": quantity, "engine-model": f"{engine}/{model.num_parameters / 1e9:.1f}B",
    }  # fmt: skip
    own = tuple(labels.get(level, "") for level in fit.prior.levels)

    def efficiency(z: Vector) -> Efficiency:
        found = machine_efficiency(z, machine)
        shares = {name: getattr(found, name) / machine.sockets for name in ("eta_m", "eta_p", "eta_a")}
        return replace(found, **shares, layer_seconds=LAYER_SECONDS * math.exp(z[2]))

    device = replace(hw, bf16_tops=machine.host.bf16_tops * machine.sockets,
                     int8_tops=machine.host.int8_tops * machine.sockets)  # fmt: skip
    answer = fit.answer(Case("step", lambda z: math.log(seconds(efficiency(z), device)), own, (0.0, 0.0, 1.0), NOISE))
    members = fit.members(own)
    flags: tuple[Flag, ...] = () if members["hardware"] and members["engine-model"] else ("EXTRAPOLATED",)
    if not members["maker"]:
        flags += ("UNCALIBRATED",)
    unseen = calibration.factor("cpu", known=not flags, maker=members["maker"] > 0)
    factor = max(calibration.factor("cpu", known=True), unseen)
    return FittedHost(efficiency(answer.z), device, math.exp(math.hypot(answer.spread, NOISE) * factor),
                      members["engine"], flags)  # fmt: skip


def machine_of(hw: HardwareSpec, engine: str) -> Machine:
    """The device as the fit sees it: one socket at the rate of the unit that the engine uses, and how many. Raises
    SpecError for a CPU without that unit, or of which it is not known."""
    tiles, server = engine in WITH_TILES, described(hw)
    if server is not None:
        sockets, isa = server
        if tiles and isa != "amx":
            raise SpecError(f"{engine} was measured with AMX, which this CPU has not: say isa=amx, or another engine")
        bf16, int8 = hw.bf16_tops / sockets, hw.int8_tops / sockets
        if not tiles:  # 8-bit vector instructions; a CPU with AMX has those of avx512
            bf16 = int8 = int8 / CYCLE[isa][1] * CYCLE["avx512" if isa == "amx" else isa][1]
        host = replace(hw, bf16_tops=bf16, int8_tops=int8, memory_gbps=hw.memory_gbps / sockets)
        return Machine(host, sockets, 1.0, None, 0, tiles)
    name = hw.name.replace("-", " ")
    if is_guessed_host(name):
        raise SpecError(
            f"times of {engine} are known for CPUs of `plan devices` and for cpu:channels=...: not for {hw.name}, "
            "whose instructions are not known"
        )
    host, _ = host_of(name, tiles)
    return Machine(host, 1, 1.0, None, 0, tiles)
