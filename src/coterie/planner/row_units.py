"""Units of a row's answer: what the text of the unit column multiplies an answer by.

The forms answer times in ms and rates in tokens a second; a row may ask in s, us, thousands of tokens, a minute, or
requests. Whom a rate counts for ("/node", "/GPU") is `Row.per`, not here. A unit that does not measure what the metric
asks is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace

from coterie.planner.data import Quantity, Row, number
from coterie.spec.errors import SpecError

_SECONDS: tuple[tuple[str, float], ...] = (
    (r"ns|nanosec\w*", 1e-9), (r"[uµμ]s|[uµμ]sec|microsec\w*", 1e-6), (r"ms|msec|millis\w*", 1e-3),
    (r"s|secs?|seconds?", 1.0), (r"mins?|minutes?", 60.0),
)  # fmt: skip
_USUAL: dict[Quantity, str] = {
    "tpot": "ms", "ttft": "ms", "e2e": "s", "dispatch": "us", "combine": "us", "kernel": "us", "a2a": "us",
    "prefill": "tok/s", "decode": "tok/s", "output": "tok/s", "total": "tok/s", "speed": "tok/s",
}  # fmt: skip
"""Units of the shipped table: taken where a row has none and its metric does not name one."""
_TIMES = ("tpot", "ttft", "e2e", "dispatch", "combine", "kernel", "a2a")
_RATES = ("prefill", "decode", "output", "total", "speed")


def canonical(row: Row) -> tuple[Row, float, str]:
    """(the row in a unit that the forms answer in, what their answer is to be multiplied by, the unit to show). Raises
    SpecError for a unit that is none of the quantity's."""
    unit = row.unit.strip() or _named(row.metric) or _USUAL.get(row.quantity, "")
    if row.quantity in _TIMES:
        return replace(row, unit="ms"), 1e-3 / _seconds(unit, row), unit
    if row.quantity in _RATES:
        return replace(row, unit=unit), _rate(unit, row), unit
    return row, 1.0, unit


def _named(metric: str) -> str:
    """The unit that a metric's name ends on: "median_ttft_ms", "TPOT (us)"."""
    found = re.search(r"[_\s(](ns|us|ms|s|sec|seconds|req/s|tok/s)\)?$", metric.strip(), re.I)
    return found[1].lower() if found else ""


def _seconds(unit: str, row: Row) -> float:
    """Seconds of a unit of time; words behind it ("ms (mean)", "ms/token") do not count."""
    word = re.split(r"[\s/(,;]", unit, maxsplit=1)[0]
    for pattern, seconds in _SECONDS:
        if re.fullmatch(pattern, word, re.I):
            return seconds
    raise SpecError(f"the unit {unit!r} of row {row.id} is no time, but {row.metric} is one: write ns, us, ms or s")


def _rate(unit: str, row: Row) -> float:
    """What tokens a second are multiplied by."""
    lower = unit.lower()
    if re.match(r"(ns|us|ms|s|sec|seconds)\b(?!/)", lower):
        raise SpecError(f"the unit {unit!r} of row {row.id} is a time, but {row.metric} is a rate: write tok/s")
    factor = 1.0
    if found := re.match(r"(k|thousand|m|million)[\s-]*(?:output |input |total )?tok", lower):
        factor = 1e-6 if found[1].startswith("m") else 1e-3
    if found := re.search(r"(?:/|per )\s*(min|h\b|hr|hour|day)", lower):
        factor *= {"min": 60.0, "day": 86400.0}.get(found[1], 3600.0)
    if re.search(r"\breq|\bquer|\bqps|\brps", lower):
        factor /= _tokens_a_request(row)
    return factor


def _tokens_a_request(row: Row) -> float:
    prompt, answer = number(row.isl) or 0.0, number(row.osl) or 0.0
    tokens = {"prefill": prompt, "total": prompt + answer}.get(row.quantity, answer)
    if tokens <= 0:
        raise SpecError(f"row {row.id} asks for requests, but does not say how many tokens one has (isl, osl)")
    return tokens
