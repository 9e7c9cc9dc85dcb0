"""Options of the commands of `plan` that serve a load: limits of time, skew, drafts, price; read into a `Search`.

Times are given in milliseconds as users state them and are seconds from here on. Not here: model, device and layout
(`plan_options`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, get_args

import click

from coterie.cli.plan_options import Asked, Decorator
from coterie.cli.ranges import FiniteRange
from coterie.planner.imbalance import Placement
from coterie.planner.known import known_of
from coterie.planner.memory import Load
from coterie.planner.search import Search
from coterie.planner.skew import FORMS, Skew
from coterie.planner.workload import Slo
from coterie.spec.errors import SpecError

MILLISECONDS = FiniteRange(0, 3.6e6, min_open=True)
GOAL_OPTIONS: tuple[Decorator, ...] = (
    click.option("--ttft", type=MILLISECONDS, help="Milliseconds to the first token. [default: no limit]"),
    click.option("--tpot", type=MILLISECONDS, help="Milliseconds per output token. [default: no limit]"),
    click.option("--attain", type=FiniteRange(0, 1, min_open=True), default=0.9, show_default=True,
                 help="Share of requests that must meet both."),
    click.option("--hit", type=FiniteRange(0, 1, max_open=True), default=0.0, show_default=True,
                 help="Share of each prompt that the prefix cache holds."),
    click.option("--skew", metavar="SKEW", help=f"Use of the experts: {FORMS}. [default: even]"),
    click.option("--placement", type=click.Choice(get_args(Placement)), default="random", show_default=True,
                 help="Where experts are put."),
    click.option("--draft", type=click.IntRange(0, 8), default=0, show_default=True,
                 help="Tokens drafted a step by multi-token prediction."),
    click.option("--accept", type=FiniteRange(0, 1), default=0.85, show_default=True,
                 help="Probability that a drafted token is right."),
    click.option("--overlap", is_flag=True, help="Two micro-batches, one computes while the other exchanges."),
    click.option("--engine", help="Whose published measurements the times are fitted on. [default: of none in "
                 "particular]"),
    click.option("--price", type=FiniteRange(0, 1e6), default=0.0,
                 help="Of a device-hour, in any currency. [default: the hardware file's]"),
)  # fmt: skip


def goal_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command with `Asked` and `Load`; it gets a `Search` in place of the load."""

    @functools.wraps(function)
    def command(asked: Asked, load: Load, **values: Any) -> None:
        function(asked, search=search_of(asked, load, values), **values)

    wrapped: Callable[..., None] = command
    for option in reversed(GOAL_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def search_of(asked: Asked, load: Load, values: dict[str, Any]) -> Search:
    """Take the shared values out of a command's. Raises SpecError."""
    if load.batch is not None:
        raise SpecError("the batch is what is looked for here: leave --batch out (plan serve has --max-running)")
    ttft, tpot = values.pop("ttft"), values.pop("tpot")
    limits = [math.inf if each is None else each / 1e3 for each in (ttft, tpot)]
    slo = Slo(limits[0], limits[1], values.pop("attain"))
    skew = values.pop("skew")
    given = {name: values.pop(name) for name in ("hit", "placement", "draft", "accept", "overlap")}
    return Search(
        model=asked.model, hardware=asked.hardware, like=asked.layout, slo=slo, isl=max(load.isl, 1), osl=load.osl,
        known=known_of(asked.model, asked.hardware, asked.layout, values.pop("engine"), asked.measured),
        chunk=load.chunk, utilisation=load.utilisation, page=load.page, price_hour=values.pop("price"),
        skew=None if skew is None else Skew.parse(skew), **given,
    )  # fmt: skip
