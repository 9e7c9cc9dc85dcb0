"""What a search found as numbers with intervals, units, kinds and formula ids: for JSON, reports and the page.

The intervals of times are those of `Search.known`; rates have their inverse. What nothing was fitted for is
extrapolated and flagged UNCALIBRATED. Not here: the search, the words (`advice`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from coterie.planner.advice import MEANING, binding, changes, cost_of, describe, launch, reason, unreachable
from coterie.planner.cost import StepCost
from coterie.planner.layout import Layout
from coterie.planner.quantity import Flag, Kind, Quantity, sure
from coterie.planner.search import Candidate, Found, Search


def timed(search: Search, seconds: float, formula: str, factor: float, layout: Layout | None = None) -> Quantity:
    """A time with its interval; flags are those of a layout (the search's own by default)."""
    return _kind(search, Quantity(seconds, "s", "extrapolated", formula, seconds / factor, seconds * factor), layout)


def _kind(search: Search, quantity: Quantity, layout: Layout | None) -> Quantity:
    flags: tuple[Flag, ...] = search.known.flags_of(layout or search.like)
    kind: Kind = "extrapolated" if flags else "calibrated"
    return replace(quantity, kind=kind, flags=flags)


def rated(
    search: Search, value: float, unit: str, formula: str, layout: Layout | None = None, most: float = math.inf
) -> Quantity:
    """A rate that falls as time per token rises; a share is at most 1 (`most`)."""
    factor = search.known.spread(layout or search.like)[0]
    high = max(value, min(value * factor, most))
    return _kind(search, Quantity(value, unit, "extrapolated", formula, value / factor, high), layout)


def count(number: int, unit: str = "requests") -> Quantity:
    """A whole number that was chosen."""
    return sure(number, unit, "layout", "exact")


def layout_numbers(layout: Layout) -> dict[str, Any]:
    """A layout, its whole numbers as quantities."""
    return {
        name: count(value, "ranks") if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in asdict(layout).items()
    }


def candidate_numbers(each: Candidate, search: Search) -> dict[str, Any]:
    """One way to serve."""
    cost = cost_of(each, search)
    tpot, ttft = search.known.spread(each.layout)
    own = each.layout
    numbers: dict[str, Any] = {
        "deployment": describe(each),
        "layout": layout_numbers(each.layout),
        "instances": count(each.instances, "instances"),
        "prefill": None if each.prefill is None else layout_numbers(each.prefill),
        "prefill_instances": count(each.prefill_instances, "instances"),
        "chunk": count(each.chunk, "tokens"),
        "devices": count(each.devices, "devices"),
        "batch": sure(each.batch, "requests", "batch"),
        "b_cap": sure(each.b_cap, "requests", "b-cap"),
        "tpot": timed(search, each.tpot, "tpot-serving", tpot, own),
        "ttft": timed(search, each.ttft, "ttft-serving", ttft, own),
        "tokens_per_device": rated(search, each.per_device, "tokens/s", "tokens-per-device", own),
        "tokens_per_user": rated(search, each.per_user, "tokens/s", "tokens-per-user", own),
        "tokens": rated(search, each.per_device * each.devices, "tokens/s", "tokens-per-device", own),
        "rate": rated(search, each.rate, "requests/s", "request-rate", own),
        "prompt_share": rated(search, each.prompt_share, "", "prompt-share", own, 1.0),
        "watts": sure(cost.watts, "W", "watts", "assumed"),
    }
    if cost.per_million:
        numbers["cost_per_million_tokens"] = rated(search, cost.per_million, "currency", "cost-per-million", own)
    if cost.watts:
        numbers["joules_per_token"] = rated(search, cost.joules, "J", "joules-per-token", own)
    return numbers


def step_lines(step: StepCost, search: Search, layout: Layout) -> list[dict[str, Any]]:
    """Where the time of a decode step goes, the longest first."""
    factor = search.known.spread(layout)[0]
    ops = sorted(step.ops, key=lambda op: -op.seconds)
    return [
        {"name": op.name, "seconds": timed(search, op.seconds, "step", factor, layout), "bound": op.bound} for op in ops
    ]


def recommendation(found: Found, search: Search, model: str, *, safe: bool) -> dict[str, Any] | None:
    """The best within the SLO with its reason, the limit that binds, changes, and how to start it."""
    chosen = found.safe if safe else found.bold
    if chosen is None:
        return None
    limit = binding(chosen, search, safe=safe)
    numbers = candidate_numbers(chosen, search)
    numbers |= {
        "reason": reason(chosen, found, search, safe=safe),
        "binding": {"limit": limit, "meaning": MEANING[limit]},
        "step": step_lines(chosen.step, search, chosen.layout),
        "most_time": chosen.step.bound,
        "launch": launch(chosen, model, search),
    }
    if safe:
        numbers["changes"] = [
            {"text": each.text, "factor": rated(search, each.factor, "", "change"), "batch": count(each.batch)}
            for each in changes(chosen, search)
        ]
    return numbers


def outcome(found: Found, search: Search, model: str) -> dict[str, Any]:
    """All of a search: `safe` by the upper ends of intervals, `bold` by the medians, the front, why there is none."""
    result: dict[str, Any] = {
        "safe": recommendation(found, search, model, safe=True),
        "bold": recommendation(found, search, model, safe=False),
        "front": [candidate_numbers(each, search) for each in found.front],
        "how": search.known.how,
        "looked_at": count(len(found.candidates), "candidates"),
    }
    if found.safe is None and found.bold is None:
        result["why_none"] = unreachable(found, search)
    elif found.safe is None:
        result["why_none"] = "only the median keeps the limits; the upper end of the 80 % interval does not"
    return result


def asked(search: Search, model: str, devices: int) -> Mapping[str, Any]:
    """What was asked, as an answer repeats it."""
    slo = {name: (value if value < float("inf") else None)
           for name, value in (("ttft", search.slo.ttft), ("tpot", search.slo.tpot))}  # fmt: skip
    like = search.like
    return {
        "model": model, "hardware": search.hardware.name, "devices": devices, "weights": like.weights,
        "attention": like.attention, "kv": like.kv, "exchange": like.exchange, "mtp": like.mtp, "isl": search.isl,
        "osl": search.osl, "hit": search.hit, "slo": slo, "attain": search.slo.attain,
        "utilisation": search.utilisation, "chunk": search.chunk, "page": search.page,
        "skew": search.skew and search.skew.source,
        "placement": search.placement, "overlap": search.overlap, "draft": search.draft, "accept": search.accept,
        "price": search.price_hour, "fixed": dict(search.fixed), "together": not search.apart,
    }  # fmt: skip
