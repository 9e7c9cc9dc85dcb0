"""`coterie plan memory`: the budget of a rank item by item, B_cap, and how many devices would do where these do not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from coterie.cli.plan_options import Asked, load_options, plan_options
from coterie.cli.plan_output import number, say, show_json, table
from coterie.planner.memory import Budget, Load, budget, least_devices
from coterie.planner.quantity import Quantity, sure


@click.command()
@plan_options
@load_options
def memory(asked: Asked, load: Load) -> None:
    """Show what a rank's memory holds and how many requests fit."""
    result = budget(asked.model, asked.hardware, asked.layout, load)
    least = None if result.fits else least_devices(asked.model, asked.hardware, asked.layout, load)
    if asked.as_json:
        show_json(document(asked, load, result, least))
        return
    click.echo(f"{asked.title()}\n")
    click.echo(budget_table(asked, load, result))
    click.echo("\n" + "\n".join([*summary(asked, load, result, least), *notes(asked, load)]))


def document(asked: Asked, load: Load, result: Budget, least: int | None) -> dict[str, Any]:
    """The answer as JSON holds it."""
    model = asked.model
    return {
        "asked": asked.question(**asdict(load)),
        "parameters": sure(model.num_parameters, "values", "parameters", "exact"),
        "active_parameters": sure(active(asked), "values", "active-parameters", "exact"),
        "items": [{"name": name, "bytes": quantity} for name, quantity in result.items],
        "device_memory": result.capacity,
        "free": result.free,
        "cache_bytes_per_token": result.kv_token,
        "cache_bytes_per_token_of_model": sure(model.kv_bytes_per_token(), "B", "kv-bytes", "exact"),
        "cache_tokens_per_group": result.capacity_tokens,
        "b_cap": result.b_cap,
        "b_cap_safe": result.b_cap_safe,
        "cache_of_batch": result.cache,
        "fits": result.fits,
        "least_devices": None if least is None else sure(least, "devices", "least-devices"),
        "notes": notes(asked, load),
    }


def active(asked: Asked) -> int:
    """Weights that a token uses, its embedding row's table counted as published figures do."""
    model = asked.model
    return model.num_active_parameters + (0 if model.tie_embeddings else model.counts.embedding)


def budget_table(asked: Asked, load: Load, result: Budget) -> str:
    """Items of a rank, of all ranks, and their share of the device."""
    rows = [row(asked, name, quantity, result) for name, quantity in result.items]
    rows.append(row(asked, "free for the cache", result.free, result))
    if result.cache is not None:
        rows.append(row(asked, f"of it {load.batch:,} requests", result.cache, result))
    rows.append(row(asked, "device", result.capacity, result))
    return table(["item", "a rank", "all ranks", "share", "kind", "80 % interval"], rows)


def row(asked: Asked, name: str, quantity: Quantity, result: Budget) -> list[str]:
    """One line of the table."""
    exact = quantity.p10 == quantity.p90
    interval = "" if exact else f"{number(quantity.p10, 'B')} to {number(quantity.p90, 'B')}"
    share = f"{100 * quantity.value / result.capacity.value:.1f} %"
    of_all = number(quantity.value * asked.layout.devices, "B")
    return [name, number(quantity.value, "B"), of_all, share, quantity.kind, interval]


def summary(asked: Asked, load: Load, result: Budget, least: int | None) -> list[str]:
    """What follows, in sentences."""
    model, layout = asked.model, asked.layout
    total = f"{model.num_parameters / 1e9:,.2f} B parameters, {active(asked) / 1e9:,.2f} B active a token"
    lines = [
        f"{total}; {result.kv_token.value:,.0f} B of cache a token and rank",
        f"cache of an attention group: {say(result.capacity_tokens)}",
        f"B_cap: {say(result.b_cap)} of {load.resident:,.0f} tokens on average (isl + osl / 2); "
        f"{say(result.b_cap_safe)} of {load.longest:,} tokens, so that none is thrown out",
    ]
    if result.fits:
        return [*lines, "it fits"]
    needed = result.kv_token.value if result.cache is None else result.cache.value
    what = "the weights" if result.free.value <= 0 else "the cache"
    short = number(needed - result.free.value, "B")
    cure = "no number of them up to 4,096 would do in the default layout: try a larger --tp, narrower --weights"
    if least is not None:
        cure = f"{least} would do" + ("" if least == layout.devices else " in the default layout")
    return [*lines, f"it does not fit: a rank is {short} short for {what}; of these devices {cure}"]


def notes(asked: Asked, load: Load) -> list[str]:
    """What the user should know about the question."""
    found = []
    if load.longest > asked.model.max_positions:
        found.append(f"note: isl + osl = {load.longest} is beyond the model's {asked.model.max_positions} positions")
    if asked.model.missing:
        found.append(f"note: the engine cannot run this model; it lacks {asked.model.missing}")
    return found
