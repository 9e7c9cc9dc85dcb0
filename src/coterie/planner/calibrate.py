"""Efficiencies of engines, model classes and devices, fitted on the measurements that ship with the package.

Four families of rows have a form and a prior each: served models, CPUs, exchanges, kernels. `calibrate` fits them and
reads from left-out rows how wide their intervals must be; `shipped` is the result for the shipped rows, stored as data
(`coterie plan score --save-fit` writes it). Widths of priors are in this file and chosen by cross-validation, rounded:
they say how much engines, classes and devices differ, and no row has one of its own.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from coterie.planner import exchanges, hosts, kernels, questions, served
from coterie.planner.bayes import Case, Fit, Form, Linear, Prior, fit
from coterie.planner.data import Row, shipped_rows
from coterie.planner.intervals import NORMAL, Miss, conformal
from coterie.planner.phrases import parts_of
from coterie.spec.errors import SpecError

Family = Literal["served", "host", "exchange", "kernel"]

NOISE = {"tpot": 0.06, "ttft": 0.2, "svc": 0.16, "thr": 0.1}
"""Standard deviation of the logarithm of a measurement of its kind that is repeated: definitions, versions, queues."""

SERVED = Prior(
    served.PARAMETERS, questions.LEVELS,
    (
        # eta_m eta_p eta_a layer alpha beta exchange experts rows prompts front kappa bias
        (0.10, 0.40, 0.30, 0.30, 0.40, 0.30, 0.30, 0.20, 0.60, 0.20, 0.40, 0.40, 0.02),  # all
        (0.03, 0.20, 0.10, 0.15, 0.15, 0.10, 0.20, 0.10, 0.30, 0.05, 0.40, 0.15, 0.02),  # engine
        (0.08, 0.25, 0.20, 0.25, 0.00, 0.00, 0.00, 0.10, 0.40, 0.00, 0.20, 0.00, 0.03),  # architecture
        (0.25, 0.30, 0.30, 0.40, 0.30, 0.30, 0.30, 0.10, 0.20, 0.00, 0.20, 0.00, 0.05),  # maker
        (0.12, 0.20, 0.25, 0.15, 0.20, 0.20, 0.20, 0.00, 0.00, 0.00, 0.30, 0.00, 0.05),  # hardware
        (0.03, 0.25, 0.10, 0.10, 0.00, 0.00, 0.00, 0.10, 0.30, 0.05, 0.15, 0.10, 0.02),  # engine-architecture
        (0.05, 0.10, 0.00, 0.10, 0.00, 0.00, 0.00, 0.05, 0.15, 0.00, 0.30, 0.80, 0.02),  # engine-architecture-hardware
        (0.03, 0.15, 0.05, 0.10, 0.00, 0.00, 0.00, 0.05, 0.20, 0.00, 0.15, 0.10, 0.03),  # engine-model
        (0.00, 0.40, 0.30, 0.20, 0.15, 0.15, 0.20, 0.10, 0.30, 0.00, 0.35, 0.15, 0.03),  # release
        (0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.02),  # quantity
        (0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.02),  # run
    ),
    (("run", 1.2),),
)  # fmt: skip
PRIORS: Mapping[Family, Prior] = {
    "served": SERVED,
    "host": Prior(hosts.PARAMETERS, hosts.LEVELS, hosts.WIDTHS, hosts.RESIDUAL),
    "exchange": Prior(exchanges.PARAMETERS, exchanges.LEVELS, exchanges.WIDTHS, exchanges.RESIDUAL),
    "kernel": Prior(kernels.PARAMETERS, kernels.LEVELS, kernels.WIDTHS, kernels.RESIDUAL),
}
ROUNDS = 16
MANY = 20
"""Rows of a kind below which what the fit has not seen gets at least the factor of what it has."""
CLASS_LEVEL: Mapping[Family, str] = {
    "served": "engine-architecture", "host": "engine", "exchange": "library-direction", "kernel": "work",
}  # fmt: skip
"""The level whose groups are classes: a row is calibrated if the fit has seen others of its class."""
HARDWARE_LEVEL: Mapping[Family, str] = {
    "served": "engine-architecture-hardware", "host": "hardware", "exchange": "library-direction-hardware",
    "kernel": "work-hardware",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A row as a case of its family. exact: its model is described, not guessed. assumed: what the row did not say.
    busy: share of the time that prompts are computed, of a served model."""

    row: Row
    family: Family
    case: Case
    assumed: tuple[str, ...] = ()
    exact: bool = True
    busy: Form | None = None


def family_of(row: Row) -> Family | None:
    """The family of a row; None for those that are derived, not fitted (imbalance, the paper's simulated values)."""
    if row.kind in ("imb", "sim"):
        return None
    if row.kind == "a2a":
        return "exchange"
    if row.kind == "kern":
        return "kernel"
    hosts_named, _ = parts_of(row.hardware)
    return "host" if hosts_named else "served"


def asked(row: Row) -> Asked:
    """A row as a case. Raises SpecError where no form answers it."""
    family = family_of(row)
    if family == "served":
        question = questions.serving_question(row, NOISE.get(row.kind, NOISE["svc"]))
        return Asked(row, family, question.case, question.assumed, question.exact, question.busy)
    forms: Mapping[str, Callable[[Row], tuple[Case, str]]] = {
        "host": hosts.host_case, "exchange": exchanges.exchange_case, "kernel": kernels.kernel_case,
    }  # fmt: skip
    if family is None:
        raise SpecError(f"row {row.id} is derived, not fitted")
    return Asked(row, family, forms[family](row)[0])


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fits by family, and by kind the factors of expected deviations: for known classes, for unknown ones, and for
    devices of makers that nobody measured."""

    fits: Mapping[Family, Fit]
    near: Mapping[str, float]
    far: Mapping[str, float]
    apart: Mapping[str, float]

    def factor(self, kind: str, *, known: bool, maker: bool = True) -> float:
        """Standard deviations of an 80 % interval. `maker`: whether any device of the maker was measured."""
        factors = (self.near if known else self.far) if maker else self.apart
        return factors.get(kind, factors.get("", 2.0))

    def without(self, names: Collection[str]) -> Calibration:
        """The same without some measurements; factors stay."""
        return replace(self, fits={name: each.without(names) for name, each in self.fits.items()})


def usable(rows: Iterable[Row]) -> list[Asked]:
    """Measurements that a fit takes: with a value, not suspect, with a form."""
    found = []
    for row in rows:
        if row.value is not None and not row.suspect and family_of(row) is not None:
            try:
                found.append(asked(row))
            except SpecError:
                continue
    return found


def calibrate(rows: Iterable[Row]) -> Calibration:
    """Fit all families and find the factors of their intervals."""
    known = usable(rows)
    fits: dict[Family, Fit] = {}
    for name, prior in PRIORS.items():
        fits[name] = fit([each.case for each in known if each.family == name], prior, rounds=ROUNDS)
    return Calibration(fits, *factors_of(known, fits))


Factors = dict[str, float]


def factors_of(known: Sequence[Asked], fits: Mapping[Family, Fit]) -> tuple[Factors, Factors, Factors]:
    """Conformal factors by kind: near from left-out runs, far from left-out models, devices and engines, apart from
    left-out makers. Makers are few and widths were chosen on the one with most rows, so what errors of left-out makers
    say counts only where it is more than for known classes and than a normal distribution's."""
    near = misses(known, fits, run_of)
    far = [miss for how in (model_of_row, hardware_of_row, engine_of_row) for miss in misses(known, fits, how)]
    found: list[dict[str, float]] = []
    few: set[str] = set()
    for group in (near, far, misses(known, fits, maker_of_row)):
        by_kind: dict[str, list[Miss]] = defaultdict(list)
        for miss in group:
            by_kind[miss.kind].append(miss)
            by_kind[""].append(miss)
        found.append({kind: conformal(each) for kind, each in by_kind.items()})
        few |= {kind for kind, each in by_kind.items() if group is near and len(each) < MANY}
    for kind in few & found[1].keys():
        found[1][kind] = max(found[1][kind], found[0][kind])
    apart = {kind: max(factor, found[0][kind], NORMAL) for kind, factor in found[2].items()}
    return found[0], found[1], apart


Grouping = Callable[[Asked], str]


def run_of(one: Asked) -> str:
    """TPOT and TTFT of one run are left out together."""
    return one.row.id.replace("tpot", "").replace("ttft", "")


def model_of_row(one: Asked) -> str:
    """Models of one shape are one: V3 and R1."""
    levels = PRIORS[one.family].levels
    if "engine-model" in levels:
        return one.case.labels[levels.index("engine-model")].rpartition("/")[2]
    return one.row.model.split(" (")[0]


def hardware_of_row(one: Asked) -> str:
    level = PRIORS[one.family].levels.index(HARDWARE_LEVEL[one.family])
    return one.case.labels[level].rpartition("/")[2]


def maker_of_row(one: Asked) -> str:
    return one.case.labels[PRIORS[one.family].levels.index("maker")]


def engine_of_row(one: Asked) -> str:
    level = next(name for name in ("engine", "library") if name in PRIORS[one.family].levels)
    return one.case.labels[PRIORS[one.family].levels.index(level)]


def misses(known: Sequence[Asked], fits: Mapping[Family, Fit], how: Grouping) -> list[Miss]:
    """Errors of measurements whose whole group is left out, by the forms at the others' solution."""
    groups: dict[tuple[Family, str], list[Asked]] = defaultdict(list)
    for one in known:
        groups[one.family, how(one)].append(one)
    found = []
    for (family, _), members in groups.items():
        rest = fits[family].without({one.case.name for one in members})
        for one in members:
            answer = rest.answer(one.case)
            spread = math.hypot(answer.spread, one.case.noise)
            found.append(Miss(one.row.id, one.row.kind, one.case.log_value - answer.mean, spread))
    return found


# As data


def as_json(found: Calibration) -> dict[str, Any]:
    """What is stored: rows as the fits left them, six digits."""
    families = {
        name: [
            [
                row.name,
                row.labels,
                _short(row.features),
                row.noise,
                *_short((row.weight, row.target)),
                _short(row.jacobian),
            ]
            for row in each.rows
        ]
        for name, each in found.fits.items()
    }
    factors = {"near": _rounded(found.near), "far": _rounded(found.far), "apart": _rounded(found.apart)}
    return {"families": families, **factors}


def from_json(stored: Mapping[str, Any]) -> Calibration:
    """The calibration of `as_json`."""
    fits: dict[Family, Fit] = {}
    for name, prior in PRIORS.items():
        rows = [
            Linear(row[0], tuple(row[1]), tuple(row[2]), row[3], row[4], tuple(row[6]), row[5])
            for row in stored["families"][name]
        ]
        fits[name] = Fit(prior, rows)
    return Calibration(fits, stored["near"], stored["far"], stored["apart"])


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in sorted(values.items())}


@cache
def shipped() -> Calibration:
    """The calibration on the shipped rows."""
    file = resources.files("coterie") / "data" / "planner" / "calibration.json"
    return from_json(json.loads(file.read_text(encoding="utf-8")))


def shipped_calibration_text() -> str:
    """What the shipped file holds: the calibration on the shipped rows, made anew."""
    return json.dumps(as_json(calibrate(shipped_rows())), separators=(",", ":")).replace('],["', '],\n["') + "\n"
