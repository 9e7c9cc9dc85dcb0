"""How good the planner is: errors, coverage and failures by kind, on the rows of the fit and on rows left out.

Five ways to leave out: a run (its TPOT and TTFT together), a model, a device, an engine, all devices of a maker. What
is left out is answered by the solution for the rest, with the linearisation of the whole; interval factors are those of
the calibration. A file of other measurements is answered by the shipped calibration as it is. Not here: how a row is
answered (`predict`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coterie.planner.bayes import fit
from coterie.planner.calibrate import (
    PRIORS,
    Asked,
    Calibration,
    Family,
    engine_of_row,
    family_of,
    hardware_of_row,
    maker_of_row,
    model_of_row,
    run_of,
    usable,
)
from coterie.planner.data import KINDS, Row
from coterie.planner.intervals import Tally, tally
from coterie.planner.predict import Prediction, predict, suspect_speculation

WAYS: Mapping[str, Callable[[Asked], str]] = {
    "left out: run": run_of, "left out: model": model_of_row, "left out: hardware": hardware_of_row,
    "left out: engine": engine_of_row, "left out: maker": maker_of_row,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Score:
    """Tallies by way, each by kind, and what could not be answered."""

    tallies: Mapping[str, tuple[Tally, ...]]
    failures: tuple[Prediction, ...]
    predictions: tuple[Prediction, ...]


def score_fit(rows: Sequence[Row], calibration: Calibration, *, refit: bool = False) -> Score:
    """Of the rows that a calibration was made from: as fitted, and left out in five ways; with `refit` also fitted anew
    without each run."""
    known = usable(rows)
    seen = [predict(row, calibration) for row in rows if row.value is not None and not row.suspect]
    tallies = {"fitted": tallies_of(seen)}
    for way, how in WAYS.items():
        tallies[way] = tallies_of(left_out(known, calibration, how))
    if refit:
        tallies["left out: run, fitted anew"] = tallies_of(fitted_anew(known, calibration, run_of))
    return Score(tallies, tuple(each for each in seen if each.quantity is None), tuple(seen))


def score_new(rows: Sequence[Row], calibration: Calibration) -> Score:
    """Of measurements that the calibration has not seen; those of it with an id that the calibration knows are left
    out of it first."""
    measured = [row for row in rows if row.value is not None and not row.suspect]
    rest = calibration.without({row.id for row in measured})
    found = [predict(row, rest) for row in measured]
    return Score({"unseen": tallies_of(found)}, tuple(each for each in found if each.quantity is None), tuple(found))


def fitted_anew(known: Sequence[Asked], calibration: Calibration, how: Callable[[Asked], str]) -> list[Prediction]:
    """The same with a fit of its own to the rest of its family, from the solution for the rest; a minute or two."""
    groups: dict[tuple[Family, str], list[Asked]] = defaultdict(list)
    for one in known:
        groups[one.family, how(one)].append(one)
    found = []
    for (family, _), members in groups.items():
        names = {one.case.name for one in members}
        rest = calibration.without(names)
        cases = [one.case for one in known if one.family == family and one.case.name not in names]
        anew = fit(cases, PRIORS[family], rounds=6, start=rest.fits[family])
        own = replace(rest, fits={**rest.fits, family: anew})
        found += [predict(one.row, own) for one in members]
    return found


def left_out(known: Sequence[Asked], calibration: Calibration, how: Callable[[Asked], str]) -> list[Prediction]:
    """Answers to rows whose whole group is left out of the fit."""
    groups: dict[tuple[str, str], list[Asked]] = defaultdict(list)
    for one in known:
        groups[one.family, how(one)].append(one)
    found = []
    for members in groups.values():
        rest = calibration.without({one.case.name for one in members})
        found += [predict(one.row, rest) for one in members]
    return found


def tallies_of(found: Sequence[Prediction]) -> tuple[Tally, ...]:
    """By kind, in the order of KINDS; TPOT also by whether its answer is flagged."""
    by_kind: dict[str, list[Prediction]] = defaultdict(list)
    for each in found:
        by_kind[each.row.kind].append(each)
        if each.row.kind == "tpot" and each.quantity is not None:
            known = not each.quantity.flags
            by_kind[f"tpot, {'calibrated' if known else 'flagged'}"].append(each)
    order = [name for kind in KINDS for name in by_kind if name.split(",")[0] == kind]
    return tuple(_tally(name, by_kind[name]) for name in order)


def _tally(name: str, found: Sequence[Prediction]) -> Tally:
    answered = [
        (each.row.value, each.quantity.value, each.quantity.p10, each.quantity.p90)
        for each in found
        if each.quantity is not None and each.row.value is not None
    ]
    return tally(name, answered, len(found) - len(answered))


def marked(prediction: Prediction) -> Prediction:
    """With SUSPECT-SPEC where a measured time is shorter than any step without speculation can be."""
    quantity = prediction.quantity
    if quantity is None or family_of(prediction.row) != "served" or not suspect_speculation(prediction.row):
        return prediction
    return replace(prediction, quantity=replace(quantity, flags=(*quantity.flags, "SUSPECT-SPEC")))


def table(score: Score) -> str:
    """Markdown tables of the tallies."""
    lines = []
    for way, tallies in score.tallies.items():
        lines += [f"### {way}", "", "| kind | n | median | mean | p90 | bias | coverage | width | no answer |"]
        lines.append("|---|---|---|---|---|---|---|---|---|")
        lines += [_line(each) for each in tallies]
        lines.append("")
    return "\n".join(lines)


def _line(one: Tally) -> str:
    def percent(value: float, sign: str = "") -> str:
        return "-" if math.isnan(value) else f"{value * 100:{sign}.1f} %"

    width = "-" if math.isnan(one.width) else f"x/÷ {one.width:.2f}"
    return (
        f"| {one.kind} | {one.number} | {percent(one.median)} | {percent(one.mean)} | {percent(one.p90)} | "
        f"{percent(one.bias, '+')} | {percent(one.coverage)} | {width} | {one.failures} |"
    )
