"""Measured: one machine's rates and an engine's kernels on it, as `coterie plan calibrate` read them; their times.

The physics is that of `cost` (the longer of products and bytes); what is measured is the share of that roofline that
kernels reach, over the size of a matrix, the memory they go round in, and the rows that share a matrix. Shares are
interpolated, not times: they are smooth where times are not. Constants of a step, a layer and a stream are fitted on
models too small to matter. Not here: taking readings (they need the engine), the file (`machine_file`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations
from typing import Literal

import numpy as np

from coterie.planner.ops import Op
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec

Bound = Literal["memory", "compute", "network", "constant"]
WHOLE_ROWS = 256
"""Rows of an expert beyond which their spread no longer matters."""
INTEGER_FORMS = ("int8", "int4")
"""Forms that our kernels multiply with int8 activations."""


@dataclass(frozen=True, slots=True)
class Share:
    """A kernel's share of its roofline. form: of weights, or the kind of attention; unit: values of one matrix (width
    of a key); set_bytes: memory it goes round in; rows: that share a matrix (of one sequence)."""

    form: str
    unit: float
    set_bytes: float
    rows: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Seconds that no operation accounts for: of a step, each dense and each MoE layer, each stream of a step, and each
    value of a row in a layer (norms, sums, copies), each row in a layer (rotation, choice of experts), and each logit
    that is sampled from."""

    step: float
    dense_layer: float
    moe_layer: float
    stream: float
    value: float
    row: float
    logit: float


@dataclass(frozen=True)
class Measured:
    """reads: (bytes gone round in, GB/s), ascending, the last one memory's."""

    threads: int
    isa: str
    reads: tuple[tuple[float, float], ...]
    shares: tuple[Share, ...]
    constants: Constants

    def read_rate(self, nbytes: float) -> float:
        """Bytes a second when going round in so many bytes."""
        points = [(math.log(size), math.log(rate * 1e9)) for size, rate in self.reads]
        return math.exp(interpolate(points, math.log(max(1.0, nbytes))))

    def share(self, op: Op, set_bytes: float) -> float:
        """Interpolated share of an operation's roofline. Raises SpecError for a format that was not measured."""
        grid = self._grid.get(op.form)
        if grid is None:
            known = ", ".join(sorted(self._grid))
            raise SpecError(f"{op.form} was not measured on this machine; measured are {known}: calibrate again")
        by_unit = []
        for unit, sets in grid.items():
            by_set = [(math.log(size), interpolate(rows, _log(op.rows))) for size, rows in sets.items()]
            by_unit.append((math.log(unit), interpolate(by_set, _log(set_bytes))))
        return math.exp(interpolate(by_unit, _log(op.unit)))

    @cached_property
    def _grid(self) -> dict[str, dict[float, dict[float, list[tuple[float, float]]]]]:
        """(log rows, log share) by form, unit and set; units and sets ascending."""
        found: dict[str, dict[float, dict[float, list[tuple[float, float]]]]] = {}
        for each in sorted(self.shares, key=lambda each: (each.form, each.unit, each.set_bytes, each.rows)):
            rows = found.setdefault(each.form, {}).setdefault(each.unit, {}).setdefault(each.set_bytes, [])
            rows.append((math.log(each.rows), math.log(each.share)))
        return found


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Straight lines through points of ascending x; the end values beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0]:
        return points[-1][1]
    place = bisect_right([known for known, _ in points], x)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (x - left) / (right - left)


def _log(value: float) -> float:
    """Logarithm of a size, 0 below one."""
    return math.log(max(1.0, value))


def share_of(reading: tuple[float, float, float], read: float, peak: float) -> float:
    """Share of the roofline of a kernel that took `reading`'s seconds for its bytes and operations, at those rates."""
    seconds, nbytes, operations = reading
    return max(nbytes / read, operations / peak) / seconds


def measured_seconds(op: Op, hw: HardwareSpec, measured: Measured, set_bytes: float) -> tuple[float, Bound]:
    """Seconds of one operation in one layer and what bounds it: roofline over share. `set_bytes`: `resident_bytes`."""
    if op.kind == "values":
        return op.unit * value_seconds(op, measured.constants), "memory"
    op = replace(op, nbytes=op.nbytes * op.padded, operations=op.operations * op.padded, held=op.held * op.padded)
    integer = op.form in INTEGER_FORMS and hw.int8_tops > 0
    rates = ((hw.int8_tops if integer else hw.bf16_tops) * 1e12, measured.read_rate(set_bytes))
    bound: Bound = "compute" if op.operations / rates[0] > op.nbytes / rates[1] else "memory"
    each = [(count, _roofline(one, rates) / measured.share(one, set_bytes)) for count, one in by_rows(op)]
    return sum(count * seconds for count, seconds in each), bound


def _roofline(op: Op, rates: tuple[float, float]) -> float:
    return max(op.operations / rates[0], op.nbytes / rates[1])


def by_rows(op: Op) -> list[tuple[float, Op]]:
    """(how many, one) of an operation's matrices by the rows they get. Tokens choose experts independently, so an
    expert's rows are binomial: some wait for memory and some for products, which their mean would hide."""
    if not op.tokens or not op.operations or op.rows > WHOLE_ROWS:
        return [(1.0, op)]
    unit = op.unit * op.padded
    total = op.operations / (2 * unit)
    hit = total / op.rows
    slots, tokens = hit * op.held / op.nbytes, max(1, round(op.tokens))
    share = min(1.0, total / slots / tokens)
    most = min(tokens, math.ceil(tokens * share + 6 * math.sqrt(tokens * share) + 4))
    weights = {rows: _binomial(rows, tokens, share) for rows in range(1, most + 1)}
    scale = hit / max(1e-300, sum(weights.values()))
    nbytes = op.nbytes / hit
    return [
        (weight * scale, replace(op, rows=rows, operations=2 * rows * unit, nbytes=nbytes))
        for rows, weight in weights.items()
        if weight * scale > 1e-6
    ]


def _binomial(count: int, tries: int, share: float) -> float:
    """Probability of exactly so many."""
    if share >= 1:
        return float(count == tries)
    log = math.lgamma(tries + 1) - math.lgamma(count + 1) - math.lgamma(tries - count + 1)
    return math.exp(log + count * math.log(share) + (tries - count) * math.log1p(-share))


def value_seconds(op: Op, constants: Constants) -> float:
    """Seconds of what is passed: a logit, a row or a value of it."""
    return {"sampling": constants.logit, "row work": constants.row}.get(op.name, constants.value)


def resident_bytes(ops: Sequence[Op]) -> float:
    """Memory that step after step goes round in: all weights held, chosen or not, and the cache that is read."""
    return sum(max(op.held, op.nbytes) * op.padded * op.times for op in ops)


def constant_seconds(ops: Sequence[Op], constants: Constants) -> tuple[float, float]:
    """(of all layers, of the step): MoE layers are those with a router, streams those with logits."""
    layers = {op.layer: op.times for op in ops if op.layer >= 0}
    routed = {op.layer for op in ops if op.name == "router"}
    each = sum(times * (constants.moe_layer if layer in routed else constants.dense_layer)
               for layer, times in layers.items())  # fmt: skip
    streams = sum(op.rows for op in ops if op.name == "head")
    return each, constants.step + streams * constants.stream


NOTHING = Constants(step=0.0, dense_layer=0.0, moe_layer=0.0, stream=0.0, value=0.0, row=0.0, logit=0.0)


def fit_constants(steps: Sequence[tuple[Sequence[Op], float]], hw: HardwareSpec, measured: Measured) -> Constants:
    """Constants of small steps (operations, seconds): what their operations do not account for, by least squares of
    relative errors, none below 0 (all subsets are tried, as there are seven)."""
    bare = replace(measured, constants=NOTHING)
    rows, left = [], []
    for ops, seconds in steps:
        around = resident_bytes(ops)
        known = sum(op.times * measured_seconds(op, hw, bare, around)[0] for op in ops)
        rows.append([effect(ops, replace(NOTHING, **{name: 1.0})) / seconds for name in NAMES])
        left.append((seconds - known) / seconds)
    matrix, target = np.array(rows), np.array(left)
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    best, lowest = np.zeros(len(NAMES)), float((target**2).sum())
    for size in range(1, len(NAMES) + 1):
        for chosen in map(list, combinations(range(len(NAMES)), size)):
            found = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], target, rcond=None)[0]
            error = float(((matrix[:, chosen] / scale[chosen] @ found - target) ** 2).sum())
            if (found >= 0).all() and error < lowest:
                best, lowest = np.zeros(len(NAMES)), error
                best[chosen] = found / scale[chosen]
    return Constants(**dict(zip(NAMES, map(float, best), strict=True)))


NAMES = tuple(field.name for field in fields(Constants))


def effect(ops: Sequence[Op], constants: Constants) -> float:
    """Seconds that constants add to a step."""
    values = sum(op.times * op.unit * value_seconds(op, constants) for op in ops if op.kind == "values")
    return values + sum(constant_seconds(ops, constants))
