"""`coterie plan compare`: two or more models or layouts side by side, each over the first.

A side is `MODEL` or `MODEL@key=value,...` with the keys hw, n, tp, dp, ep, redundant, weights, attention, kv; `@dense`
makes the model its dense twin. What a side does not say, the options say for all.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, get_args

import click

from coterie.cli.plan_options import LAYOUT_OPTIONS, MODEL_OPTIONS, load_options, read_model
from coterie.cli.plan_output import number, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.compare import NAMES, Ask, Column, Side, ratio
from coterie.planner.compare import compare as compare_sides
from coterie.planner.devices import device
from coterie.planner.layout import CacheName, WeightName, Wish, choose
from coterie.planner.measured_file import read_engine
from coterie.planner.memory import Load
from coterie.planner.models import dense_twin
from coterie.planner.quantity import sure
from coterie.spec.errors import SpecError

INTEGERS = ("n", "tp", "dp", "ep", "redundant")
FORMATS = {"weights": get_args(WeightName), "attention": get_args(WeightName), "kv": get_args(CacheName)}
KEYS = ("hw", *INTEGERS, *FORMATS, "dense")
"""What may follow a model's name."""


def side_options(function: Any) -> Any:
    """The shared options of a plan, without its one MODEL."""
    for option in reversed((*MODEL_OPTIONS[1:], *LAYOUT_OPTIONS)):
        function = option(function)
    return function


@click.command()
@click.argument("sides", nargs=-1, required=True, metavar="MODEL[@KEY=VALUE,...]...")
@side_options
@load_options
@click.option(
    "--slo",
    type=FiniteRange(0, 3.6e6, min_open=True),
    default=50.0,
    show_default=True,
    help="Milliseconds that a token may take.",
)
@click.option("--price", type=FiniteRange(0, 1e6), default=0.0, help="Price of a device and hour.")
@click.option("--engine", help="Whose published runs times follow: sglang, trtllm, vllm. [default: none in particular]")
def compare(sides: tuple[str, ...], load: Load, slo: float, price: float, engine: str | None, **values: Any) -> None:
    """Set models or layouts side by side: size, limits, cost of a token.

    A side is MODEL or MODEL@KEY=VALUE,... with the keys hw, n, tp, dp, ep, redundant, weights, attention and kv, for
    instance deepseek-v3@weights=bf16,n=32. MODEL@dense is a dense model of the same size. Ratios are over the first.
    """
    ask = Ask(load=load, slo=slo / 1e3, price=price, engine=engine)
    columns = compare_sides([side(text, values) for text in sides], ask)
    if values["as_json"]:
        show_json(document(columns, ask))
        return
    click.echo(table(["", *labels(columns)], rows(columns)))
    notes = [f"{column.side.name}: {column.reason}" for column in columns if column.reason]
    notes += [hint for hint in [trust(columns)] if hint]
    click.echo("\n" + "\n".join([*layouts(columns), *notes]))


def trust(columns: tuple[Column, ...]) -> str:
    """How wide the intervals of times are."""
    times = [time for column in columns if (time := column.values["time of a token"]) is not None]
    if not times:
        return ""
    widest = max(times, key=lambda time: time.p90 / time.value)
    flags = sorted({flag for time in times for flag in time.flags})
    marked = f" ({', '.join(flags)})" if flags else ""
    return f"times are x/÷ {widest.p90 / widest.value:.2f} at most{marked}; ratios of like sides are closer"


def side(text: str, values: dict[str, Any]) -> Side:
    """Read one side. Raises SpecError for a key or value that is none."""
    name, own = split(text)
    found, spec, stored = read_model(name)
    if own:
        found += text[len(name) :]
    if own.pop("dense", False):
        spec = dense_twin(spec)
    place = own.pop("hw", values["hardware"])
    hardware, measured = device(place), read_engine(place)
    if values["memory_gb"] is not None:
        hardware = replace(hardware, memory_gb=values["memory_gb"])
    devices = own.pop("n", values["devices"])
    wishes = {name: values[name] for name in ("tp", "dp", "ep", "redundant", "weights", "attention", "kv", "mtp",
                                           "exchange")}  # fmt: skip
    given: dict[str, Any] = {name: None if value == "auto" else value for name, value in {**wishes, **own}.items()}
    return Side(found, spec, hardware, choose(spec, hardware, devices, stored.of(Wish(**given))), measured)


def split(text: str) -> tuple[str, dict[str, Any]]:
    """(model, settings) of `MODEL@key=value,...`; an @ before anything else belongs to the name."""
    name, at, rest = text.rpartition("@")
    if not at or not any(part.partition("=")[0] in KEYS for part in rest.split(",")):
        return text, {}
    found: dict[str, Any] = {}
    for part in rest.split(","):
        key, _, value = part.partition("=")
        if key not in KEYS or (value == "") != (key == "dense"):
            raise SpecError(
                f"{part!r} of {text!r} is not a setting; possible are dense and KEY=VALUE of {', '.join(KEYS)}"
            )
        if key in INTEGERS and not (value.isascii() and value.isdigit() and len(value) < 7):
            raise SpecError(f"{key} of {text!r} must be a whole number, not {value!r}")
        if key in FORMATS and value not in FORMATS[key]:
            raise SpecError(f"{key} of {text!r} must be one of {', '.join(FORMATS[key])}, not {value!r}")
        found[key] = True if key == "dense" else int(value) if key in INTEGERS else value
    return name, found


def labels(columns: tuple[Column, ...]) -> list[str]:
    """A name and, after the first, a ratio column for each side."""
    found = [columns[0].side.name]
    for column in columns[1:]:
        found += [column.side.name, "x"]
    return found


def rows(columns: tuple[Column, ...]) -> list[list[str]]:
    """One row a quantity, left out where no side has it."""
    shown = []
    for name in NAMES:
        if all(column.values[name] is None for column in columns):
            continue
        line = [name]
        for index, column in enumerate(columns):
            value = column.values[name]
            line.append("-" if value is None else number(value.value, value.unit))
            if index:
                factor = ratio(value, columns[0].values[name])
                line.append("-" if factor is None else f"{factor:.3g}")
        shown.append(line)
    return shown


def layouts(columns: tuple[Column, ...]) -> list[str]:
    """What each side stands on."""
    found = []
    for column in columns:
        layout = column.side.layout
        found.append(
            f"{column.side.name}: {layout.devices} x {column.side.hardware.name}, tp {layout.tp}, dp {layout.dp}, "
            f"ep {layout.ep}, weights {layout.weights}, cache {layout.kv}"
        )
    return found


def document(columns: tuple[Column, ...], ask: Ask) -> dict[str, Any]:
    """The answer as JSON holds it."""
    first = columns[0].values
    shown = []
    for column in columns:
        values = {name.replace(" ", "_"): value for name, value in column.values.items()}
        ratios = {name: ratio(value, first[name]) for name, value in column.values.items()}
        shown.append({
            "asked": {"name": column.side.name, "hardware": column.side.hardware.name, **asdict(column.side.layout)},
            **values,
            "over_first": {
                name.replace(" ", "_"): None if value is None else sure(value, "x", "ratio", kind(column, name))
                for name, value in ratios.items()
            },
            "reason": column.reason,
        })  # fmt: skip
    return {"asked": asdict(ask), "sides": shown}


def kind(column: Column, name: str) -> Any:
    """How far to trust a ratio: no further than its value."""
    value = column.values[name]
    return "derived" if value is None or value.kind == "exact" else value.kind
