"""Flags of the service classes and of the file of API keys, which may bind a key to a class. No verb of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from coterie.cli.common import Decorator
from coterie.engine.classes import CLASS_NAMES
from coterie.engine.config import NO_CLASSES, ServiceConfig
from coterie.server.config import ApiKey
from coterie.spec.errors import CoterieError

T = TypeVar("T", int, float)


def _per_class(convert: type[T]) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, T]]:
    """Callback of a flag that takes CLASS=VALUE, more than once."""

    def read(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, T]:
        found: dict[str, T] = {}
        for value in values:
            name, _, text = value.partition("=")
            try:
                number = convert(text)
            except ValueError:
                number = convert(0)
            if name not in CLASS_NAMES or not number > 0 or not math.isfinite(number):
                expected = f"one of {', '.join(CLASS_NAMES)}, an equals sign and a number above 0"
                raise click.BadParameter(f"{value!r} is not {expected}", context, parameter)
            found[name] = number
        return found

    return read


def _said(values: tuple[float, ...]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in zip(CLASS_NAMES, values, strict=True))


SERVICE_OPTIONS: tuple[Decorator, ...] = (
    click.option("--service-classes", "enabled", is_flag=True,
                 help="Share the engine among gold, silver and bronze requests (docs/server.md)."),
    click.option("--default-class", type=click.Choice(CLASS_NAMES), default=NO_CLASSES.default_class,
                 show_default=True, help="Class of requests that name none."),
    click.option("--class-weight", "weights", multiple=True, metavar="CLASS=N", callback=_per_class(float),
                 help="Multiplies a class's own 1.8, 1.3 or 1.0; repeatable. [default: 1 for each]"),
    click.option("--class-slo", "slo_seconds", multiple=True, metavar="CLASS=SECONDS", callback=_per_class(float),
                 help=f"Deadline of the first token; repeatable. [default: {_said(NO_CLASSES.slo_seconds)}]"),
    click.option("--class-max-queued", "max_queued", multiple=True, metavar="CLASS=N", callback=_per_class(int),
                 help="Requests of a class that may wait; repeatable. [default: --max-queued-requests for each]"),
)  # fmt: skip


def service_config(values: Mapping[str, Any]) -> ServiceConfig:
    """Build the ServiceConfig from a command's values. Flags that would do nothing are a usage error."""
    changed = [name for name in ("weights", "slo_seconds", "max_queued") if values[name]]
    if not values["enabled"]:
        if changed or values["default_class"] != NO_CLASSES.default_class:
            raise click.UsageError("flags of service classes were given without --service-classes")
        return NO_CLASSES
    triples = {name: _triple(values[name], getattr(NO_CLASSES, name)) for name in changed}
    return ServiceConfig(enabled=True, default_class=values["default_class"], **triples)


def _triple(given: Mapping[str, Any], default: tuple[Any, ...]) -> Any:
    return tuple(given.get(name, value) for name, value in zip(CLASS_NAMES, default, strict=True))


def read_keys(path: Path, service: ServiceConfig) -> tuple[ApiKey, ...]:
    """Keys of a file, one a line, each with a class after a space if keys are bound to classes.

    If any is, the others are bound to the default class: clients cannot choose then. Raises CoterieError.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        words = line.split()
        if not words:
            continue
        where = f"{path}, line {number}"
        key = checked_key(words[0], where)
        bound = next((name for name in CLASS_NAMES if words[1:] == [name]), None)
        if bound is None and len(words) > 1:
            raise CoterieError(f"{where}: after the key stands its class ({', '.join(CLASS_NAMES)}) or nothing")
        if bound is not None and not service.enabled:
            raise CoterieError(f"{where} binds a key to a class; start with --service-classes, or leave the class out")
        if key in keys:
            raise CoterieError(f"{where}: this key stands in the file twice")
        keys[key] = ApiKey(key, bound)
    if not keys:
        raise CoterieError(f"{path} is empty; it must hold an API key")
    if not any(key.service_class for key in keys.values()):
        return tuple(keys.values())
    return tuple(ApiKey(key.key, key.service_class or service.default_class) for key in keys.values())


def checked_key(key: str, where: str) -> str:
    """Return the key, or raise: an empty one protects nothing, and a header can carry visible ASCII only."""
    if not key:
        raise CoterieError(f"{where} is empty; it must hold the API key")
    if not all("!" <= character <= "~" for character in key):
        raise CoterieError(f"{where} holds a character that no header can carry; use visible ASCII without spaces")
    return key
