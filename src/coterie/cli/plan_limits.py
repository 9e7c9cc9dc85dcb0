"""`coterie plan limits`: the three limits of the batch in the reference paper's form, by context, and which binds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from coterie.cli.plan_options import TOKENS, Asked, plan_options
from coterie.cli.plan_output import number, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.limits import Limits, Terms, paper_limits
from coterie.planner.quantity import sure
from coterie.spec.errors import SpecError


@click.command()
@plan_options
@click.option(
    "--context",
    type=TOKENS,
    multiple=True,
    default=(8192,),
    show_default=True,
    help="Tokens of a request; may be given more than once.",
)
@click.option(
    "--slo",
    type=FiniteRange(0, 3.6e6, min_open=True),
    default=50.0,
    show_default=True,
    help="Milliseconds that a token may take.",
)
@click.option(
    "--utilisation",
    type=FiniteRange(0.01, 1),
    default=0.95,
    show_default=True,
    help="Share of memory that is usable.",
)
@click.option(
    "--gamma",
    type=FiniteRange(1, 1e6),
    default=1.0,
    show_default=True,
    help="Tokens of the busiest rank over the mean.",
)
@click.option("--skew", metavar="SKEW", help="Take gamma from a skew at each batch (see `plan imbalance`).")
def limits(
    asked: Asked, context: tuple[int, ...], slo: float, utilisation: float, gamma: float, skew: str | None
) -> None:
    """Show the compute, capacity and latency limits of the batch.

    The equations are those of arXiv 2507.15465 (10 to 13): one switch, no buffers, full rates. `plan memory` counts
    what they leave out.
    """
    terms = Terms(slo=slo / 1e3, utilisation=utilisation, gamma=gamma)
    try:
        found = {length: at(asked, length, terms, skew) for length in sorted(set(context))}
    except SpecError as error:
        if asked.hardware.kind == "cpu" and any(asked.model.moe_layers()):
            raise SpecError(f"{error}; {PAPER_FORM}") from error
        raise
    if asked.as_json:
        question = asked.question(slo=terms.slo, utilisation=utilisation, gamma=gamma, skew=skew)
        show_json(document(question, found, skew))
        return
    click.echo(f"{asked.title()}\n")
    rows = [row(length, *pair) for length, pair in found.items()]
    click.echo(table(["context", "B_RP", "B_cap", "B_SLO", "batch", "token", "gamma", "binds", "reaches B_RP"], rows))
    click.echo("\n" + "\n".join(explain(asked, next(iter(found.values()))[0])))


PAPER_FORM = (
    "the paper's form reads every expert in each step, at full rates: at a CPU's small batches a step reads far fewer "
    "(`plan step` has the limits of its own step)"
)


def at(asked: Asked, length: int, terms: Terms, skew: str | None) -> tuple[Limits, float]:
    """(limits at a context, gamma). With a skew, gamma is that of the batch that follows without one."""
    result = paper_limits(asked.model, asked.hardware, asked.layout, length, terms)
    if skew is None or asked.layout.ep == 1:
        return result, terms.gamma
    from coterie.planner.imbalance import gamma
    from coterie.planner.skew import Skew

    layout = asked.layout
    found = gamma(Skew.parse(skew), asked.model, max(1.0, result.batch.value), layout.ep, "random", layout.redundant)
    terms = replace(terms, gamma=max(1.0, found.rank))
    return paper_limits(asked.model, asked.hardware, layout, length, terms), terms.gamma


def document(question: dict[str, Any], found: dict[int, tuple[Limits, float]], skew: str | None) -> dict[str, Any]:
    """The answer as JSON holds it."""
    points = []
    for length, (result, gamma) in found.items():
        names = [name for name in Limits.__dataclass_fields__ if name != "binds"]
        point: dict[str, Any] = {name: getattr(result, name) for name in names}
        point |= {"gamma": sure(gamma, "", "gamma", "assumed" if skew is None else "derived")}
        points.append({"asked": {"context": length}, **point, "binds": result.binds, "reaches_b_rp": result.saturated})
    return {"asked": question, "points": points}


def row(length: int, result: Limits, gamma: float) -> list[str]:
    """One context's line."""
    counts = [number(quantity.value, "") for quantity in (result.b_rp, result.b_cap, result.b_slo, result.batch)]
    token = number(result.tpot.value, "s")
    return [f"{length:,}", *counts, token, f"{gamma:.2f}", result.binds, "yes" if result.saturated else "no"]


def explain(asked: Asked, result: Limits) -> list[str]:
    """What the numbers are made of."""
    coarse = [PAPER_FORM] if asked.hardware.kind == "cpu" and any(asked.model.moe_layers()) else []
    bound = "compute" if result.intensity.value > result.ridge.value else "memory"
    experts = f", experts from {result.b_moe.value:,.0f}" if result.b_moe.value else ""
    return [
        *coarse,
        f"products are compute-bound from B_RP requests on: attention's projections from {result.b_attn.value:,.0f}"
        f"{experts}",
        f"attention in decode does {result.intensity.value:.1f} operations a byte of cache, the device's ridge is "
        f"{result.ridge.value:.1f}: {bound}-bound",
        f"a token takes {number(result.weight_seconds.value, 's')} for the weights, and for each request "
        f"{number(result.cache_seconds.value, 's')} for its cache and {number(result.exchange_seconds.value, 's')} for "
        "the exchanges",
    ]
