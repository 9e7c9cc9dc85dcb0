"""Charts as SVG text, for the HTML report and the what-if page: budget bar, limits, Pareto front, goodput by rate.

Written by hand so that they need no library, load nothing and can be put into a page as they are. Every mark carries a
`<title>`, which browsers show on hovering and screen readers read. Not here: PNG and SVG files by matplotlib (`plot`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
           "#1b6e4b", "#c9b6f2", "#7f3f5f", "#d9d27a", "#5b7083", "#f2b5a7")  # fmt: skip
INK, GRID, FREE = "#333", "#ddd", "#f0f0f0"
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a chart: where, its tooltip, and its series. `low`, `high`: an interval in x, equal for none."""

    x: float
    y: float
    text: str
    series: int = 0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high` (both above 0 where `log`) that is drawn from pixel `start` to `end`."""

    label: str
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixels of a value; values outside are put on the edge."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Round numbers within."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if math.log10(self.high / self.low) < 3 else (1,)
            return [m * 10.0**p for p in powers for m in steps if self.low <= m * 10.0**p <= self.high * 1.0001]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        return [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def axis(label: str, values: Sequence[float], pixels: tuple[float, float], *, log: bool = False) -> Axis:
    """An axis that holds all values, from 0 unless logarithmic."""
    good = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    low = min(good) / 1.3 if log else 0.0
    high = max(good) * (1.3 if log else 1.08) or 1.0
    return Axis(label, low, high, *pixels, log=log)


def compact(value: float) -> str:
    """A number for a tick: 1,200 as 1.2k."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def frame(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """A whole SVG with its name for those who do not see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" {FONT} fill="{INK}"><rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="8" y="18" font-size="14" font-weight="600">{escape(title)}</text>{"".join(body)}</svg>'
    )


def rect(x: float, y: float, size: tuple[float, float], colour: str, text: str = "") -> str:
    """A filled rectangle with a tooltip."""
    inside = f"<title>{escape(text)}</title>" if text else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}" fill="{colour}">{inside}</rect>'


def dot(x: float, y: float, radius: float, style: str, text: str = "") -> str:
    """A circle with a tooltip; `style`: attributes."""
    inside = f"<title>{escape(text)}</title>" if text else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {style}>{inside}</circle>'


def line(start: tuple[float, float], end: tuple[float, float], style: str, text: str = "") -> str:
    """A line with a tooltip; `style`: attributes."""
    inside = f"<title>{escape(text)}</title>" if text else ""
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {style}>{inside}</line>'


def words(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def budget_bar(items: Sequence[tuple[str, float, str]], capacity: float, title: str) -> str:
    """Memory of a device as one bar. `items`: (name, bytes, what kind of number); what is left is shown as free, and a
    budget beyond `capacity` passes its line."""
    used = sum(size for _, size, _ in items)
    scale = Axis("", 0.0, max(used, capacity, 1.0), 10, 710)
    parts, x = [], scale.start
    legend = [*items, ("free", max(capacity - used, 0.0), "left")]
    for number, (name, size, kind) in enumerate(legend):
        colour = FREE if name == "free" else COLOURS[number % len(COLOURS)]
        width, text = scale.at(size) - scale.start, f"{name}: {size / 1e9:.2f} GB, {kind}"
        left, top = 10 + 355 * (number % 2), 82 + 18 * (number // 2)
        parts += [
            rect(x, 30, (width, 34), colour, text),
            rect(left, top, (10, 10), colour),
            words(left + 16, top + 9, text),
        ]
        x += width
    edge = scale.at(capacity)
    parts.append(
        line((edge, 26), (edge, 68), f'stroke="{INK}" stroke-width="2"', f"{capacity / 1e9:.1f} GB of the device")
    )
    return frame(720, 92 + 18 * -(-len(legend) // 2), title, parts)


def limit_chart(limits: Sequence[tuple[str, float]], binding: str, title: str) -> str:
    """Batch limits as bars on a logarithmic scale; the one that binds is marked."""
    finite = [value for _, value in limits if math.isfinite(value) and value > 0] or [1.0]
    scale = Axis("requests", 1.0, max(max(finite) * 1.5, 10.0), 130, 610, log=True)
    parts = _grid_x(scale, 28, 34 + 26 * len(limits))
    for number, (name, value) in enumerate(limits):
        y = 34 + 26 * number
        end = scale.at(value) if math.isfinite(value) else scale.end
        shown = f"{value:,.0f}" if math.isfinite(value) else "unbounded"
        shown += " (binds)" if name == binding else ""
        colour = COLOURS[2] if name == binding else COLOURS[0]
        parts.append(words(122, y + 14, name, 'text-anchor="end"'))
        parts.append(rect(scale.start, y, (max(end - scale.start, 1.0), 18), colour, f"{name}: {shown} requests"))
        parts.append(words(end + 6, y + 14, shown))
    return frame(720, 70 + 26 * len(limits), title, parts)


def scatter(
    marks: Sequence[Mark], labels: tuple[str, str], series: Sequence[str], title: str, *, best: int = -1
) -> str:
    """Points on logarithmic scales; those of series 0 are joined in order of x, the last of several series is grey.
    `best`: index of the one to mark."""
    if not marks:
        return frame(720, 60, f"{title}: nothing fits", [])
    across = axis(labels[0], [m.x for m in marks], (70, 700), log=True)
    up = axis(labels[1], [m.y for m in marks], (330, 40), log=True)
    colours = [*COLOURS[: max(len(series) - 1, 1)], *(["#bbb"] if len(series) > 1 else [])]
    parts = _grid_x(across, 40, 330) + _grid_y(up, 70, 700)
    path = " ".join(f"{across.at(m.x):.1f},{up.at(m.y):.1f}" for m in sorted(marks, key=lambda m: m.x) if m.series == 0)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.5"/>')
    for mark in sorted(marks, key=lambda mark: -mark.series):
        colour, y = colours[mark.series], up.at(mark.y)
        if mark.high > mark.low:
            parts.append(line((across.at(mark.low), y), (across.at(mark.high), y), f'stroke="{colour}" opacity="0.4"'))
        parts.append(dot(across.at(mark.x), y, 2.5 if mark.series else 4, f'fill="{colour}"', mark.text))
    if 0 <= best < len(marks):
        style = f'class="best" fill="none" stroke="{COLOURS[2]}" stroke-width="2.5"'
        parts.append(dot(across.at(marks[best].x), up.at(marks[best].y), 9, style, f"recommended: {marks[best].text}"))
    for number, name in enumerate(series):
        parts.append(dot(90 + 200 * number, 386, 4, f'fill="{colours[number]}"'))
        parts.append(words(98 + 200 * number, 390, name))
    return frame(720, 398, title, parts)


def _grid_x(scale: Axis, top: float, bottom: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        x = scale.at(tick)
        parts.append(line((x, top), (x, bottom), f'stroke="{GRID}"'))
        parts.append(words(x, bottom + 14, compact(tick), 'text-anchor="middle" font-size="11"'))
    return [*parts, words((scale.start + scale.end) / 2, bottom + 29, scale.label, 'text-anchor="middle"')]


def _grid_y(scale: Axis, left: float, right: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        y = scale.at(tick)
        parts.append(line((left, y), (right, y), f'stroke="{GRID}"'))
        parts.append(words(left - 6, y + 4, compact(tick), 'text-anchor="end" font-size="11"'))
    middle = (scale.start + scale.end) / 2
    turn = f'text-anchor="middle" transform="rotate(-90 16 {middle})"'
    return [*parts, words(16, middle, scale.label, turn)]
