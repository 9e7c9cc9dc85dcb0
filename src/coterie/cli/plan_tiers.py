"""`coterie plan tiers`: experts over device memory, RAM and disk; brought to the device, or computed by the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from coterie.cli.plan_options import TOKENS, Asked, plan_options
from coterie.cli.plan_output import number, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.cost import Efficiency
from coterie.planner.devices import device
from coterie.planner.memory import Load
from coterie.planner.ops import Point
from coterie.planner.quantity import Quantity, sure
from coterie.planner.skew import Skew
from coterie.planner.tiers import TIERS, Host, How, TierPlan, TierQuestion, tier_plan
from coterie.spec.errors import SpecError

SPREAD = 1.8
"""Of a step over tiers: none was measured here; published hybrids lie within it (docs/planner.md)."""
RATE = FiniteRange(0, 1e5)


@click.command()
@plan_options
@click.option("--cpu", metavar="NAME|FILE|cpu:...", help="The CPU beside the device: computes experts, has the RAM.")
@click.option("--ram-gb", type=FiniteRange(0, 1e7), help="RAM for experts, if not the CPU's or the table's.")
@click.option("--ram-gbps", type=RATE, help="Its rate.")
@click.option("--link-gbps", type=RATE, help="From RAM to the device.")
@click.option("--disk-gbps", type=RATE, help="Of the disk; 0 for none.")
@click.option("--batch", type=TOKENS, default=1, show_default=True, help="Requests that decode together.")
@click.option("--context", type=TOKENS, default=4096, show_default=True, help="Tokens in the cache of each.")
@click.option("--skew", default="uniform", show_default=True, metavar="SKEW", help="How uneven experts are.")
def tiers(asked: Asked, **values: Any) -> None:
    """Plan experts over tiers: where they lie by heat, what a step reads from each, what a token takes.

    Two forms: chosen experts are brought over the host link, or computed by the CPU where they lie (needs --cpu).
    """
    question = read(asked, values)
    found: dict[str, TierPlan] = {}
    refused: dict[str, str] = {}
    known = None if asked.measured is None else Efficiency(measured=asked.measured, absorbed=True)
    forms: tuple[How, ...] = ("hybrid", "stream")
    for how in forms:
        try:
            found[how] = tier_plan(question, how, known)
        except SpecError as error:
            refused[how] = str(error)
    if not found:
        raise SpecError(refused["stream"])
    if asked.as_json:
        show_json(document(asked, values, found, refused))
        return
    click.echo(f"{asked.title()}\n")
    click.echo(places(next(iter(found.values()))))
    for name, plan in found.items():
        away = [op for op in plan.cost.ops if op.name.startswith("experts ")]
        waits = f"; {number(away[0].seconds, 's')} of it for {away[0].name} ({away[0].bound})" if away else ""
        token = time(plan)
        click.echo(f"{name}: time per token {number(token.value, 's')} ({number(token.p10, 's')} to "
                   f"{number(token.p90, 's')}), {values['batch'] / plan.tpot:,.1f} tokens/s{waits}")  # fmt: skip
    for name, why in refused.items():
        click.echo(f"{name}: {why}")


def read(asked: Asked, values: dict[str, Any]) -> TierQuestion:
    """The question of a command line."""
    cpu = None if values["cpu"] is None else device(values["cpu"])
    host = Host.of(asked.hardware, cpu)
    given = {name: values[name] for name in ("ram_gb", "ram_gbps", "link_gbps", "disk_gbps")}
    host = replace(host, **{name: value for name, value in given.items() if value is not None})
    batch, context = values["batch"], values["context"]
    return TierQuestion(
        model=asked.model, hardware=asked.hardware, layout=asked.layout, host=host, skew=Skew.parse(values["skew"]),
        point=Point(batch=batch, context=context), load=Load(batch=batch, isl=context, osl=1, chunk=512),
    )  # fmt: skip


def time(plan: TierPlan) -> Quantity:
    """A token's time with its interval."""
    return Quantity(plan.tpot, "s", "extrapolated", "tiers", plan.tpot / SPREAD, plan.tpot * SPREAD, ("UNCALIBRATED",))


def places(plan: TierPlan) -> str:
    """Where experts lie and what a step reads, by tier."""
    rows = [
        [tier, f"{plan.experts[place]:.1f}", number(plan.gb[place] * 1e9, "B"), number(plan.read[place], "B"),
         f"{100 * plan.chosen[place]:.1f} %"]
        for place, tier in enumerate(TIERS)
    ]  # fmt: skip
    return table(["tier", "experts a layer", "bytes", "read a step", "choices served"], rows) + "\n"


def document(asked: Asked, values: dict[str, Any], found: dict[str, TierPlan], refused: dict[str, str]) -> Any:
    """The answer as JSON holds it."""
    forms = {}
    for how, plan in found.items():
        ops = [{"name": op.name, "bound": op.bound, "seconds": sure(op.seconds, "s", "op-seconds", "extrapolated")}
               for op in plan.cost.ops]  # fmt: skip
        lie = [
            {"tier": tier, "experts": sure(plan.experts[place], "experts", "tier-place"),
             "bytes": sure(plan.gb[place] * 1e9, "B", "tier-place"), "read": sure(plan.read[place], "B", "hit"),
             "choices": sure(plan.chosen[place], "", "tier-choices")}
            for place, tier in enumerate(TIERS)
        ]  # fmt: skip
        forms[how] = {"tiers": lie, "ops": ops, "tpot": time(plan)}
    return {"asked": asked.question(**values), "forms": forms, "refused": refused}
