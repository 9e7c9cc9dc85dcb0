"""`coterie plan net`: time of one layer's expert exchange, by topology and by how often a row is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import click

from coterie.cli.plan_options import Asked, plan_options
from coterie.cli.plan_output import number, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.cost import prior
from coterie.planner.imbalance import gamma
from coterie.planner.memory import own_bytes
from coterie.planner.network import FORMS, FP8_ROW, PAPER, Exchange, Form, busiest_pair, ranks_per_domain
from coterie.planner.quantity import Kind, sure
from coterie.planner.skew import FORMS as SKEWS
from coterie.planner.skew import Skew
from coterie.planner.topologies import Way, published, ways
from coterie.spec.errors import SpecError

BYTES = {"bf16": 2.0, "fp8": FP8_ROW}


@click.command()
@plan_options
@click.option(
    "--tokens", type=FiniteRange(1e-3, 1e7), default=128.0, show_default=True, help="Tokens that each rank sends."
)
@click.option("--skew", default="uniform", show_default=True, help=f"Use of the experts: {SKEWS}.")
@click.option(
    "--placement",
    type=click.Choice(("order", "random", "balanced")),
    default="random",
    show_default=True,
    help="Where experts are.",
)
@click.option(
    "--dispatch",
    type=click.Choice(tuple(BYTES)),
    help="Format of dispatched rows; combined ones are bf16. [default: bf16; on CPUs this engine's both ways]",
)
@click.option(
    "--form",
    type=click.Choice(FORMS),
    help="How often a row is sent in the what-if topologies: to each expert, rank or node. [default: copies; on CPUs "
    "rank, this engine's]",
)
@click.option("--alpha-us", type=FiniteRange(0, 1e6), help="Seconds of an exchange beside its bytes, in us.")
@click.option("--share", type=FiniteRange(0, 1, min_open=True), help="Share of the links' rate that is reached.")
def net(
    asked: Asked, tokens: float, skew: str, placement: Any, dispatch: str | None, form: Form | None,
    alpha_us: float | None, share: float | None,
) -> None:  # fmt: skip
    """Time of an expert exchange by topology and form.

    "ideal" is bytes over the published rate and the 0.8 us (network 0.13 us) of arXiv 2507.15465; "expected" takes the
    planner's efficiencies, or --alpha-us and --share.
    """
    ranks = asked.layout.ep
    if ranks < 2:
        raise SpecError("an exchange needs at least two expert-parallel ranks: give -n or --ep")
    found = gamma(Skew.parse(skew), asked.model, max(tokens * ranks, 1), ranks, placement, asked.layout.redundant)
    rows = rows_of(asked, dispatch)
    form = form or ("copies" if rows.reduced else "rank")
    sent = replace(
        Exchange.of(asked.model, tokens, ranks, form=form), gamma=max(found.rank, 1.0), bytes_out=rows.out,
        bytes_back=rows.back, reduced=rows.reduced,
    )  # fmt: skip
    nodes = found.node(ranks // ranks_per_domain(ranks, asked.hardware))
    sent = replace(sent, gamma_pair=busiest_pair(sent), gamma_node=max(nodes, 1.0))
    expected = prior(asked.hardware).links()
    if alpha_us is not None:
        expected = replace(expected, alpha=alpha_us / 1e6, net_alpha=alpha_us / 1e6)
    if share is not None:
        expected = replace(expected, share=share, net_share=share)
    ideal, soft = ways(sent, asked.hardware, PAPER), ways(sent, asked.hardware, expected)
    given = alpha_us is not None and share is not None
    if asked.as_json:
        question = asked.question(tokens=tokens, skew=skew, placement=placement, dispatch=rows.words, form=form)
        gammas = {"gamma": sure(found.rank, "ratio", "gamma-rank", "assumed")}
        links = [_json(one, other, "derived" if given else "assumed")
                 for one, other in zip(ideal, soft, strict=True)]  # fmt: skip
        measured = [
            {"id": row.id, "hardware": row.hardware, "what": row.what, "precision": row.precision,
             "seconds": sure(row.seconds, "s", "published", "exact"), "source": row.source}
            for row in published(sent)
        ]  # fmt: skip
        show_json({"asked": question, **gammas, "ways": links, "published": measured})
        return
    click.echo(
        f"{asked.title()}\n{tokens:g} tokens a rank, {rows.words}; busiest rank {found.rank:.3f} of "
        f"the mean ({skew}, placed {placement})\n"
    )
    headers = [
        "links", "a row goes", "links B", "network B", "dispatch ideal", "combine ideal", "dispatch expected",
        "combine expected",
    ]  # fmt: skip
    click.echo(table(headers, [_row(one, other) for one, other in zip(ideal, soft, strict=True)]))
    for why in dict.fromkeys(way.why for way in ideal if way.why):
        click.echo(f"\n-: {why}")
    others = [[row.hardware, row.what, row.precision, number(row.seconds, "s")] for row in published(sent)]
    if others:
        click.echo(f"\n{table(['measured by others, the same rows', 'kernels', 'format', 'time'], others)}")
    click.echo("\n* as the device is. The others are what its links would give as another topology over all ranks.")


@dataclass(frozen=True, slots=True)
class Rows:
    """What travels: bytes of a value out and back, the same in words, and whether sums return for rows sent once."""

    out: float
    back: float
    words: str
    reduced: bool


def rows_of(asked: Asked, dispatch: str | None) -> Rows:
    """The rows of a format; on CPUs, unless one is asked for, those of this engine."""
    if dispatch is not None or asked.layout.exchange is None:
        name = dispatch or "bf16"
        return Rows(BYTES[name], 2.0, f"{name} out and bf16 back", reduced=True)
    out, back = own_bytes(asked.layout)
    words = f"{out:g} bytes a value out and {back:g} back, as this engine sends them"
    return Rows(out, back, words, reduced=False)


TIMES = {"copies": "per expert", "rank": "per rank", "node": "per node"}


def _row(ideal: Way, soft: Way) -> list[str]:
    name = ("* " if ideal.own else "  ") + ideal.name
    if ideal.transfer is None or soft.transfer is None:
        return [name, TIMES[ideal.form], *["-"] * 6]
    one, other = ideal.transfer, soft.transfer
    cells = [number(value, "B") if value else "-" for value in (one.up_bytes, one.net_bytes)]
    times = [f"{value * 1e6:.2f} us" for value in (one.dispatch, one.combine, other.dispatch, other.combine)]
    return [name, TIMES[ideal.form], *cells, *times]


def _json(ideal: Way, soft: Way, kind: Kind) -> dict[str, Any]:
    answer: dict[str, Any] = {"links": ideal.name, "form": ideal.form, "as_the_device_is": ideal.own}
    if ideal.transfer is None or soft.transfer is None:
        return answer | {"refused": ideal.why}
    one, other = ideal.transfer, soft.transfer
    return answer | {
        "scaleup_bytes": sure(one.up_bytes, "B", "exchange-bytes"),
        "network_bytes": sure(one.net_bytes, "B", "exchange-bytes"),
        "dispatch_ideal": sure(one.dispatch, "s", "all-to-all"),
        "combine_ideal": sure(one.combine, "s", "all-to-all"),
        "dispatch": sure(other.dispatch, "s", "all-to-all", kind),
        "combine": sure(other.combine, "s", "all-to-all", kind),
    }
