"""`coterie plan pim`: decode on a GPU, on processing in memory, and on both by part, over batch and context."""

from __future__ import annotations

from typing import Any

import click

from coterie.cli.plan_options import TOKENS, Asked, plan_options
from coterie.cli.plan_output import number, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.ops import Point
from coterie.planner.pim import Part, Rivals, crossover, rivals
from coterie.planner.pim import pim as pim_device
from coterie.planner.quantity import sure

PARTS: tuple[Part, ...] = ("attention", "experts", "all")


@click.command()
@plan_options
@click.option("--context", type=TOKENS, multiple=True, default=(2048, 16384), show_default=True,
              help="Tokens of a request; may be given more than once.")  # fmt: skip
@click.option("--requests", type=TOKENS, multiple=True, default=(1, 8, 32, 128), show_default=True,
              help="Requests a device; may be given more than once.")  # fmt: skip
@click.option("--ridge", type=FiniteRange(0, 1e6, min_open=True), default=8.0, show_default=True,
              help="Operations a byte of the PIM device.")  # fmt: skip
@click.option("--bandwidth", type=FiniteRange(0, 1e4, min_open=True), default=4.0, show_default=True,
              help="Its memory rate over the GPU's.")  # fmt: skip
def pim(asked: Asked, context: tuple[int, ...], requests: tuple[int, ...], ridge: float, bandwidth: float) -> None:
    """Show what a processing-in-memory device would change, and up to which batch.

    Full rates and no constants, as in arXiv 2507.15465. Columns are times a token over the GPU's: above 1 is faster.
    """
    both = (asked.hardware, pim_device(asked.hardware, ridge=ridge, bandwidth=bandwidth))
    devices = asked.layout.devices
    found = {
        length: [rivals(asked.model, both, asked.layout, Point(batch=each * devices, context=length))
                 for each in requests]
        for length in context
    }  # fmt: skip
    ends = {length: crossover(asked.model, both, asked.layout, length) / devices for length in context}
    if asked.as_json:
        question = asked.question(context=context, requests=requests, ridge=ridge, bandwidth=bandwidth)
        show_json({"asked": question, "points": document(found, devices), "crossover": crossings(ends)})
        return
    click.echo(f"{asked.title()}\n")
    rows = [line(length, each, devices) for length, points in found.items() for each in points]
    heads = ["context", "requests a device", "GPU", "PIM alone", *(f"{part} on PIM" for part in PARTS)]
    click.echo(table(heads, rows) + "\n")
    for length, end in ends.items():
        click.echo(f"context {length:,}: PIM alone is {words(end)}")


def words(end: float) -> str:
    """Where PIM stops to be faster."""
    if end == 0:
        return "never faster"
    return "faster at every batch" if end == float("inf") else f"faster below {end:.3g} requests a device"


def line(length: int, found: Rivals, devices: int) -> list[str]:
    """One row of the table."""
    speedups = [found.gpu.tpot / found.pim.tpot, *(found.gpu.tpot / found.hybrid[part].tpot for part in PARTS)]
    cells = [f"{value:.2f}" for value in speedups]
    return [f"{length:,}", f"{found.batch / devices:g}", number(found.gpu.tpot, "s"), *cells]


def document(found: dict[int, list[Rivals]], devices: int) -> list[dict[str, Any]]:
    """Every point as JSON holds it."""
    return [
        {
            "asked": {"context": length, "requests_a_device": each.batch / devices},
            "gpu": sure(each.gpu.tpot, "s", "pim"),
            "pim_speedup": sure(each.gpu.tpot / each.pim.tpot, "", "pim"),
            "hybrid_speedup": {part: sure(each.gpu.tpot / each.hybrid[part].tpot, "", "pim") for part in PARTS},
        }
        for length, points in found.items()
        for each in points
    ]


def crossings(ends: dict[int, float]) -> list[dict[str, Any]]:
    """Requests a device below which PIM alone is faster; null where it is at every batch."""
    return [{"asked": {"context": length}, "below": sure(end, "requests", "pim-crossover")}
            for length, end in ends.items()]  # fmt: skip
