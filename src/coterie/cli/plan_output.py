"""How the commands of `plan` print: JSON in which every number is a Quantity's, or aligned text for people.

Light on purpose: nothing but click is imported, so that an answer comes in a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import click

from coterie.planner.quantity import Quantity

_STEPS = {"B": ("B", "kB", "MB", "GB", "TB"), "s": ("ns", "us", "ms", "s")}
_COUNTED = {"op": ("op", "kop", "Mop", "Gop", "Top"), "values": ("values", "thousand", "million", "billion")}
"""Unit names in steps of a thousand."""


def show_json(document: Any) -> None:
    """Print a document of quantities, texts, flags, mappings, sequences and frozen values."""
    click.echo(json.dumps(plain(document), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """A value as JSON holds it. Counts that describe the question stay numbers; every answer is a Quantity."""
    if isinstance(value, Quantity):
        return value.as_json()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def say(quantity: Quantity) -> str:
    """A number for people: `1.18 TB`, `28.0 ms`, `7,346 requests`, with its interval if it has one."""
    text = number(quantity.value, quantity.unit)
    if quantity.p10 != quantity.p90:
        unit = quantity.unit if quantity.unit in _STEPS else ""
        text += f" ({number(quantity.p10, unit)} to {number(quantity.p90, unit)})"
    return text


def number(value: float, unit: str) -> str:
    """A value with three digits and a unit of fitting size."""
    if value != value or value in (float("inf"), float("-inf")):
        return "unbounded"
    if unit == "B":
        return _scaled(value, _STEPS["B"], 0)
    if unit == "s":
        return _scaled(value * 1e9, _STEPS["s"], 0)
    if unit in _COUNTED:
        return _scaled(value, _COUNTED[unit], 0)
    digits = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()


def _scaled(value: float, units: tuple[str, ...], place: int) -> str:
    while abs(value) >= 1000 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    digits = f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{digits} {units[place]}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right, a line under the headers."""
    lines = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    shown = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in
                  enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    ]  # fmt: skip
    return "\n".join([shown[0], "-" * len(shown[0]), *shown[1:]])
