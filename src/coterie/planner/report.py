"""A search as one HTML file that loads nothing: budget, limits, Pareto front, recommendation, every number of it.

The charts are those of the what-if page (`draw`); the numbers stand in a table and, complete, as JSON in the file.
Not here: the page that redraws itself (`page`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from coterie.planner.advice import describe
from coterie.planner.batch import largest_batch, ridge_batch
from coterie.planner.draw import Mark, budget_bar, limit_chart, scatter
from coterie.planner.layout import Layout
from coterie.planner.memory import Budget, budget
from coterie.planner.search import Candidate, Found, Instance, Search

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:1100px;margin:24px auto;padding:0 16px}
h1{font-size:22px}h2{font-size:17px;margin-top:28px}table{border-collapse:collapse;font-size:13px}
td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}
pre{background:#f5f5f5;padding:10px;overflow:auto;white-space:pre-wrap}svg{max-width:760px;width:100%;display:block}
"""


def memory_chart(search: Search, layout: Layout, batch: int | None = None) -> str:
    """The budget bar of a rank, with the cache of a batch where there is one."""
    found = budget(search.model, search.hardware, layout, search.load(batch))
    return budget_bar(bar_items(found), found.capacity.value, f"Memory of a device: {search.hardware.name}")


def bar_items(found: Budget) -> list[tuple[str, float, str]]:
    """Items of the bar."""
    items: list[tuple[str, float, str]] = [(name, quantity.value, quantity.kind) for name, quantity in found.items]
    if found.cache is not None:
        items.append(("cache of the batch", found.cache.value, found.cache.kind))
    return items


def limits_of(search: Search, layout: Layout) -> tuple[list[tuple[str, float]], str]:
    """Batch limits of an instance by name, and which binds: B_RP of the ridge, B_cap of the itemised memory, B_SLO of
    the step's cost, prompts left out."""
    instance, tpot = Instance(search, layout), search.slo.tpot
    slo = math.inf if math.isinf(tpot) else float(largest_batch(lambda b: instance.decode_only(b).tpot, tpot))
    limits = [
        ("B_RP", ridge_batch(search.model, search.hardware, layout)), ("B_cap", float(instance.b_cap)), ("B_SLO", slo)
    ]  # fmt: skip
    return limits, min(limits[1:], key=lambda limit: limit[1])[0]


def limits_chart(search: Search, layout: Layout) -> str:
    limits, binding = limits_of(search, layout)
    return limit_chart(limits, binding, "Batch limits, requests of an instance")


def label(each: Candidate) -> str:
    """A candidate's tooltip."""
    return (
        f"{describe(each)}, batch {each.batch}: {each.per_user:.0f} tok/s per user, {each.per_device:,.0f} per device, "
        f"TPOT {1e3 * each.tpot:.1f} ms, TTFT {1e3 * each.ttft:.0f} ms"
    )


def pareto_chart(found: Found, search: Search) -> str:
    """The front with its intervals, all else in grey, the recommendation marked."""
    front = list(found.front)
    widths = [search.known.spread(each.layout)[0] for each in front]
    marks = [
        Mark(e.per_user, e.per_device, label(e), 0, e.per_user / width, e.per_user * width)
        for e, width in zip(front, widths, strict=True)
    ]
    marks += [Mark(e.per_user, e.per_device, label(e), 1) for e in found.candidates if e not in set(front)]
    best = -1
    chosen = found.safe or found.bold
    if chosen is not None:
        order = front + [each for each in found.candidates if each not in set(front)]
        best = order.index(chosen)
    labels = ("output tokens/s per user", "output tokens/s per device")
    return scatter(marks, labels, ["front, with 80 % interval", "beaten"], "Throughput against speed", best=best)


def report(found: Found, search: Search, title: str, answer: Mapping[str, Any]) -> str:
    """The whole file. `answer`: the JSON of the search, already plain."""
    chosen = found.safe or found.bold
    parts = [f"<h1>{escape(title)}</h1>"]
    if chosen is None:
        parts.append(f"<p>{escape(str(answer['why_none']))}</p>")
    else:
        parts += _chosen(chosen, search, answer)
    parts += ["<h2>Pareto front</h2>", pareto_chart(found, search), front_table(found.front, search)]
    data = json.dumps(answer, indent=1).replace("<", "\\u003c")
    parts.append(f"<h2>All numbers</h2><details><summary>JSON</summary><pre>{escape(data)}</pre></details>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _chosen(chosen: Candidate, search: Search, answer: Mapping[str, Any]) -> list[str]:
    detail = answer["safe"] or answer["bold"]
    how = "by the upper ends of the 80 % intervals" if answer["safe"] else "by the medians only"
    steps = [(line["name"], line["seconds"]["value"], line["bound"]) for line in detail["step"]]
    rows = "".join(f"<tr><td>{escape(n)}</td><td>{1e3 * s:.2f} ms</td><td>{escape(b)}</td></tr>" for n, s, b in steps)
    helps = "".join(
        f"<li>{escape(each['text'])}: {100 * (each['factor']['value'] - 1):+.0f} % tokens/s per device</li>"
        for each in detail.get("changes", [])
    )
    return [
        f"<h2>Recommendation, {how}</h2><p><b>{escape(label(chosen))}</b></p>",
        f"<p>Why: {escape(detail['reason'])}. Binds: {escape(detail['binding']['meaning'])}.</p>",
        f"<pre>{escape(chr(10).join(detail['launch']))}</pre>",
        f"<p>What would help most:</p><ul>{helps or '<li>nothing that was tried</li>'}</ul>",
        "<h2>Memory</h2>", memory_chart(search, chosen.layout, chosen.batch),
        "<h2>Limits</h2>", limits_chart(search, chosen.layout),
        f"<h2>A decode step</h2><table><tr><th>part</th><th>time</th><th>bound</th></tr>{rows}</table>",
    ]  # fmt: skip


def front_table(front: Sequence[Candidate], search: Search) -> str:
    """The front as a table."""
    widths = [search.known.spread(each.layout)[0] for each in front]
    heads = ("deployment", "batch", "TPOT ms (p10 to p90)", "TTFT ms", "tok/s per user", "tok/s per device")
    rows = [
        (describe(e), f"{e.batch:,}",
         f"{1e3 * e.tpot:.1f} ({1e3 * e.tpot / width:.1f} to {1e3 * e.tpot * width:.1f})", f"{1e3 * e.ttft:.0f}",
         f"{e.per_user:.0f}", f"{e.per_device:,.0f}")
        for e, width in zip(front, widths, strict=True)
    ]  # fmt: skip
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
