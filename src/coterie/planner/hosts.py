"""Rows about models served by CPUs, alone or with accelerators beside, as cases of a fit.

Experts (and without an accelerator all else) are read from the memory of the host's sockets at a share of its rate that
engine, sockets and threads decide; prompts are computed at a share of the peak of matrix units or vectors, which
differs most between engines. Not here: rows about accelerators alone (`questions`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from coterie.planner.bayes import Case, Form, Vector
from coterie.planner.cost import Efficiency, price
from coterie.planner.data import Row
from coterie.planner.layout import WEIGHT_BYTES, Layout, WeightName
from coterie.planner.named import architecture, device_of, host_of, maker_of, model_of
from coterie.planner.ops import Op, Point, step_ops
from coterie.planner.phrases import Setup, setup
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

PARAMETERS = ("memory", "compute", "layer", "sockets", "threads", "front", "attention", "bias")
"""What z multiplies: shares of the sockets' memory and product rates, the constant of a layer, what more than one
socket and fewer threads than cores change, what passes before a prompt, attention's rate, and everything."""
LEVELS = ("all", "engine", "release", "maker", "hardware", "architecture", "engine-model", "quantity", "run")
WIDTHS = (
    (0.3, 0.4, 0.4, 0.3, 0.3, 0.3, 0.5, 0.05),
    (0.3, 0.5, 0.2, 0.4, 0.2, 0.2, 0.3, 0.05),
    (0.1, 0.5, 0.1, 0.1, 0.0, 0.1, 0.2, 0.05),
    (0.2, 0.4, 0.2, 0.1, 0.1, 0.0, 0.2, 0.10),
    (0.2, 0.3, 0.1, 0.0, 0.0, 0.0, 0.0, 0.05),
    (0.1, 0.2, 0.2, 0.0, 0.0, 0.0, 0.2, 0.10),
    (0.1, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0, 0.10),
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.10),
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.10),
)
RESIDUAL = (("run", 1.0),)
NOISE = 0.06
MEMORY_SHARE, LAYER_SECONDS, FRONT_SECONDS = 0.5, 200e-6, 0.02
MATRIX_SHARE, VECTOR_SHARE, ATTENTION_SHARE = 0.08, 0.15, 0.15
"""Of the peak of matrix units, of the peak of 8-bit vector instructions, and of attention in either."""
ACCELERATOR = Efficiency(eta_m=0.6, eta_p=0.4, eta_a=0.3, layer_seconds=0.0, step_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Machine:
    """Sockets that work as one, and what stands beside them."""

    host: HardwareSpec
    sockets: int
    share_threads: float
    accelerator: HardwareSpec | None
    count: int
    matrix: bool


def host_case(row: Row) -> tuple[Case, str]:
    """A row's case and its engine. Raises SpecError where the row says too little."""
    said = setup(row)
    machine = machine_of(row, said)
    _, spec, _ = model_of(row.model)
    isl, osl = said.isl or 0.0, said.osl or 0.0
    batch = said.load.requests or 1.0
    quantity = {"speed": "decode", "tpot": "decode", "output": "decode"}.get(row.quantity, row.quantity)
    if quantity not in ("ttft", "prefill", "decode"):
        raise SpecError(f"no form answers the metric {row.metric!r} of row {row.id} on a CPU")
    point = (
        Point(batch=1, context=max(isl, 1.0))
        if quantity != "decode"
        else Point(batch=batch, context=max(isl + osl / 2, 1.0))
    )
    form = seconds_form(row, said, machine, point)
    engine, name = said.engine, machine.host.name
    labels = (
        "all", engine, f"{engine}/{said.version[:3]}/{said.experts}", maker_of(machine.host), name, architecture(spec),
        f"{engine}/{spec.num_parameters / 1e9:.1f}B", quantity, f"{engine}/{name}/{quantity}/{architecture(spec)}",
    )  # fmt: skip
    features = (math.log(point.context) / 2, math.log(batch), said.threads / 64 if said.threads else 1.0)
    value = math.log(row.value) if row.value else math.nan
    return Case(row.id, form, labels, features, NOISE, value), engine


def machine_of(row: Row, said: Setup) -> Machine:
    """The machine of a row. "one instance per socket": each answers alone."""
    if not said.hosts:
        raise SpecError(f"row {row.id} names no CPU")
    sockets, name = said.hosts[0]
    matrix = said.engine == "sglang-cpu" or "AMX" in row.parallelism
    host, cores = host_of(name, matrix)
    if "per socket" in row.parallelism:
        sockets = 1
    threads = said.threads / (cores * sockets) if said.threads else 1.0
    beside = said.accelerators[0] if said.accelerators else None
    accelerator = device_of(beside[1]) if beside else None
    return Machine(host, sockets, threads, accelerator, beside[0] if beside else 0, matrix)


def bytes_of(form: str) -> float:
    """Bytes of a weight: GGUF's mixtures by their mean bits."""
    if form.startswith("q"):
        return float(form[1:]) / 8
    return WEIGHT_BYTES.get(form, 1.0)  # type: ignore[call-overload]


def parts(row: Row, said: Setup, machine: Machine, point: Point) -> tuple[list[Op], list[Op], float]:
    """Operations on the host and beside it, and how many layers there are."""
    _, spec, _ = model_of(row.model)
    form: WeightName = "bf16" if said.experts == "bf16" else "int8"
    layout = Layout(devices=1, tp=1, dp=1, ep=1, weights=form, kv="bf16")
    prefill = row.quantity in ("ttft", "prefill")
    ops = step_ops(spec, layout, None if prefill else point, point if prefill else None, absorbed=not prefill)
    kept = re.search(r"(\d+) experts on GPU", row.parallelism)
    moe = next((moe for _, moe in spec.moe_layers()), None)
    away = float(kept[1]) / moe.num_experts if kept and moe else room_for_experts(spec, said, machine)
    own: list[Op] = []
    beside: list[Op] = []
    for op in ops:
        experts = op.name == "routed experts"
        weight = bytes_of(said.experts if experts or machine.accelerator is None else said.others) / WEIGHT_BYTES[form]
        scaled = replace(op, nbytes=op.nbytes * weight) if op.kind == "product" else op
        if machine.accelerator is None:
            own.append(scaled)
        elif not experts:
            beside.append(
                replace(scaled, nbytes=scaled.nbytes / machine.count, operations=scaled.operations / machine.count)
            )
        else:
            own.append(replace(scaled, nbytes=scaled.nbytes * (1 - away), operations=scaled.operations * (1 - away)))
    return own, beside, float(len(spec.layers))


def room_for_experts(spec: ModelSpec, said: Setup, machine: Machine) -> float:
    """Share of the routed experts that fits the accelerators beside the rest, four fifths of their memory used. One
    accelerator holds none: engines then keep its memory for the cache."""
    if machine.accelerator is None or machine.count < 2:
        return 0.0
    experts = sum(3 * spec.hidden_size * moe.intermediate_size * moe.num_experts for _, moe in spec.moe_layers())
    rest = (spec.num_parameters - experts) * bytes_of(said.others)
    free = 0.8 * machine.count * machine.accelerator.memory_bytes - rest
    return min(1.0, max(0.0, free / max(experts * bytes_of(said.experts), 1.0)))


def efficiency(z: Vector, machine: Machine) -> Efficiency:
    """What an engine reaches of one socket's rates with all of a machine's, at z; the constant of a layer apart."""
    more = (machine.sockets ** (0.7 + z[3])) if machine.sockets > 1 else 1.0
    more *= machine.share_threads ** z[4]
    share = MATRIX_SHARE if machine.matrix else VECTOR_SHARE
    return Efficiency(
        eta_m=MEMORY_SHARE * math.exp(z[0]) * more, eta_p=share * math.exp(z[1]) * more,
        eta_a=ATTENTION_SHARE * math.exp(z[6]) * more, layer_seconds=0.0, step_seconds=0.0,
    )  # fmt: skip


def seconds_form(row: Row, said: Setup, machine: Machine, point: Point) -> Form:
    """Log of the value in the row's unit."""
    own, beside, layers = parts(row, said, machine, point)
    rows, rate = point.batch, row.quantity in ("prefill", "decode", "output", "speed")
    scale = 1.0 if rate else 1e3 if row.unit.lower().startswith("ms") else 1.0
    amount = point.context if row.quantity == "prefill" else rows if row.quantity in ("decode", "output") else 1.0

    def form(z: Vector) -> float:
        eff = efficiency(z, machine)
        seconds = price(tuple(own), machine.host, eff).seconds + layers * LAYER_SECONDS * math.exp(z[2])
        if machine.accelerator is not None and beside:
            seconds += price(tuple(beside), machine.accelerator, ACCELERATOR).seconds
        if row.quantity == "ttft":
            seconds += FRONT_SECONDS * math.exp(z[5])
        return (math.log(amount / seconds) if rate else math.log(seconds * scale)) + (-z[7] if rate else z[7])

    return form
