"""`coterie plan imbalance`: the busiest expert and rank, by skew, placement and copies of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import click

from coterie.cli.plan_options import Asked, plan_options
from coterie.cli.plan_output import number, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.cost import decode_step, prior
from coterie.planner.imbalance import Imbalance, Placement, TooLarge, gamma
from coterie.planner.layout import WEIGHT_BYTES
from coterie.planner.network import moe_of
from coterie.planner.ops import Point
from coterie.planner.pods import IDEAL
from coterie.planner.quantity import Kind, Quantity, sure
from coterie.planner.skew import FORMS, Skew
from coterie.spec.errors import SpecError


@dataclass(frozen=True, slots=True)
class Row:
    """One line: `extra` expert slots beyond one each, `step` seconds of decode, None where the
    device lacks links."""

    skew: str
    placement: Placement
    extra: int
    found: Imbalance
    step: float | None


@click.command()
@plan_options
@click.option(
    "--skew",
    "skews",
    multiple=True,
    default=("trace",),
    show_default=True,
    help=f"Use of the experts: {FORMS}. May be given several times.",
)
@click.option(
    "--tokens",
    type=FiniteRange(1e-3, 1e7),
    default=128.0,
    show_default=True,
    help="Tokens of a step on each rank.",
)
@click.option(
    "--context",
    type=FiniteRange(1, 1e8),
    default=2048.0,
    show_default=True,
    help="Tokens of each request in the step whose time is shown; a request is one of --tokens.",
)
@click.option("--ideal", is_flag=True, help="The step at every rate's peak, not with the planner's efficiencies.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of what is drawn.")
def imbalance(
    asked: Asked, skews: tuple[str, ...], tokens: float, context: float, ideal: bool, seed: int
) -> None:  # fmt: skip
    """Busiest expert and rank by skew and placement.

    Loads are over the mean, means of the maximum over layers and steps. "split by batch" divides each batch among the
    copies of an expert as the engine does; "equal parts" leaves that to chance, as a fixed rerouting would. The step is
    one of decode, with each batch split.
    """
    layout, ranks = asked.layout, asked.layout.ep
    if ranks < 2:
        raise SpecError("imbalance needs at least two expert-parallel ranks: give -n or --ep")
    batch = max(tokens * ranks, 1.0)
    least, more = layout.redundant, layout.redundant + ranks
    cases: tuple[tuple[Placement, int], ...] = (
        ("order", least), ("random", least), ("balanced", least), ("balanced", more),
    )  # fmt: skip
    eff = IDEAL if ideal else prior(asked.hardware)
    rows, notes = [], dict[str, None]()
    for text in skews:
        for placement, extra in cases:
            try:
                found = gamma(Skew.parse(text, seed), asked.model, batch, ranks, placement, extra)
            except TooLarge as error:
                notes[str(error)] = None
                continue
            point = Point(batch=batch, context=context, gamma=max(found.rank, 1.0))
            try:
                step = decode_step(asked.model, asked.hardware, replace(layout, redundant=extra), point, eff).seconds
            except SpecError as error:
                notes[str(error)], step = None, None
            rows.append(Row(text, placement, extra, found, step))
    experts = moe_of(asked.model).num_experts
    if asked.as_json:
        question = asked.question(skews=skews, tokens=tokens, context=context, ideal=ideal, seed=seed)
        show_json({"asked": question, "rows": [_json(asked, row) for row in rows],
                   "notes": list(notes)})  # fmt: skip
        return
    click.echo(f"{asked.title()}\n{tokens:g} tokens of a step on each rank\n")
    headers = [
        "skew, placement", "copies", "expert bytes", "expert", "p95", "rank, equal parts", "split by batch", "p95",
        "step",
    ]  # fmt: skip
    cells = [
        [f"{row.skew}, {row.placement}", str(row.extra), f"+{row.extra / experts:.1%}", f"{row.found.expert:.2f}",
         f"{row.found.expert_p95:.2f}", f"{row.found.rank_even:.3f}", f"{row.found.rank:.3f}",
         f"{row.found.rank_p95:.3f}", "-" if row.step is None else number(row.step, "s")]
        for row in rows
    ]  # fmt: skip
    click.echo(table(headers, cells))
    for source in dict.fromkeys(row.found.source for row in rows if row.found.source not in skews):
        click.echo(f"\ntrace: {source}")
    for note in notes:
        click.echo(f"\n-: {note}")


def _json(asked: Asked, row: Row) -> dict[str, Any]:
    text, found, extra = row.skew, row.found, row.extra
    kind: Kind = "derived" if text.endswith((".npy", ".json", ".csv")) else "assumed"
    moe, layers = moe_of(asked.model), len(list(asked.model.moe_layers()))
    values = layers * 3 * asked.model.hidden_size * moe.intermediate_size * extra / asked.layout.ep
    reach = 1.2816 * found.error
    return {
        "skew": text, "source": found.source, "placement": row.placement,
        "asked": {"redundant": extra},
        "copies_bytes_per_rank": sure(values * WEIGHT_BYTES[asked.layout.weights], "B", "weight-bytes"),
        "expert": sure(found.expert, "ratio", "gamma-expert", kind),
        "expert_p95": sure(found.expert_p95, "ratio", "gamma-expert", kind),
        "rank": Quantity(found.rank, "ratio", kind, "gamma-rank", found.rank - reach, found.rank + reach),
        "rank_p95": sure(found.rank_p95, "ratio", "gamma-rank", kind),
        "rank_equal_parts": sure(found.rank_even, "ratio", "gamma-rank", kind),
        "hit": sure(found.hit, "share", "hit", kind),
        "step": None if row.step is None else sure(row.step, "s", "decode-step", "assumed"),
    }  # fmt: skip
