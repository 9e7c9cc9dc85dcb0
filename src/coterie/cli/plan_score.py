"""`coterie plan score` and `coterie plan predict`: how good the planner is on published measurements, and its answers.

Both read tables in the columns of the shipped one. `--save-fit` writes the calibration that the package ships.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from coterie.cli.main import debug_option

DATA = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--data", type=DATA, help="Measurements to score instead of the shipped ones (CSV in their columns).")
@click.option("--save-fit", type=click.Path(dir_okay=False, path_type=Path), help="Fit anew and write the calibration.")
@click.option("--refit", is_flag=True, help="Also fit anew without each run (a few minutes).")
@click.option("--rows", is_flag=True, help="Show every row as well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug_option
def score(data: Path | None, save_fit: Path | None, refit: bool, rows: bool, as_json: bool) -> None:
    """Score the planner on published measurements, by kind: error, coverage of the 80 % intervals, failures.

    Without --data: on the rows of the fit, as fitted and with their run, model, hardware or engine left out.
    """
    from coterie.planner import calibrate
    from coterie.planner.data import read_rows, shipped_rows
    from coterie.planner.score import marked, score_fit, score_new, table

    if save_fit is not None:
        save_fit.write_text(calibrate.shipped_calibration_text(), encoding="utf-8")
        click.echo(f"wrote {save_fit}", err=True)
        calibrate.shipped.cache_clear()
    known = calibrate.shipped()
    found = score_fit(shipped_rows(), known, refit=refit) if data is None else score_new(read_rows(data), known)
    lines = [each for each in map(marked, found.predictions) if rows or each.quantity is None]
    if as_json:
        tallies = {way: [_plain(each) for each in tallies] for way, tallies in found.tallies.items()}
        document = {"scores": tallies, "rows": [each.as_json() | {"measured": each.row.value} for each in lines]}
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    click.echo(table(found))
    for each in lines:
        click.echo(_say(each))


@click.command()
@click.option("--data", type=DATA, required=True, help="Rows whose value is blank (CSV as the shipped table).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@debug_option
def predict(data: Path, as_json: bool) -> None:
    """Answer rows whose value is blank: value, 80 % interval, how far to trust it, or why there is no answer."""
    from coterie.planner.data import read_rows
    from coterie.planner.predict import predict_all

    found = predict_all(read_rows(data, values=False))
    if as_json:
        click.echo(json.dumps([each.as_json() for each in found], indent=2, allow_nan=False))
        return
    for each in found:
        click.echo(_say(each))


def _plain(tally: Any) -> dict[str, Any]:
    """A tally as JSON holds it; what does not exist is null."""
    from dataclasses import asdict

    return {name: None if value != value else value for name, value in asdict(tally).items()}


def _say(prediction: Any) -> str:
    """One row for people."""
    quantity, row = prediction.quantity, prediction.row
    if quantity is None:
        return f"{row.id}: no answer: {prediction.reason}"
    text = f"{row.id}: {quantity.value:.4g} ({quantity.p10:.4g} to {quantity.p90:.4g}) {quantity.unit}, {quantity.kind}"
    if row.value is not None:
        text += f", measured {row.value:.4g}"
    if quantity.flags:
        text += f", {' '.join(quantity.flags)}"
    return text + (f" (assumed: {'; '.join(prediction.assumed)})" if prediction.assumed else "")
