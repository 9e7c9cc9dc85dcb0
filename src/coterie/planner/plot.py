"""The Pareto plot of a search as a PNG or SVG file, by matplotlib (extra `plot`), which is imported only here.

Charts that need no library are in `draw`.
"""

from __future__ import annotations

from pathlib import Path

from coterie.planner.advice import describe
from coterie.planner.search import Found, Search
from coterie.spec.errors import SpecError

FORMATS = (".png", ".svg")


def check_plot_file(file: Path) -> None:
    """Refuse a file that `plot_search` could not write, before any work. Raises SpecError."""
    if file.suffix.lower() not in FORMATS:
        raise SpecError(f"a plot is written as {' or '.join(FORMATS)}, not {file.suffix or file.name}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise SpecError("a plot needs matplotlib, which is not installed: pip install 'coterie[plot]'") from error


def plot_search(found: Found, search: Search, title: str, file: Path) -> None:
    """Draw tokens a second per device against per user, with the front, its intervals, the SLO and both
    recommendations. Raises SpecError for another ending or without matplotlib, OSError if the file cannot be written.
    """
    check_plot_file(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    front = set(found.front)
    for kind, label, marker in ((False, "one pool", "o"), (True, "prompts apart", "^")):
        rest = [each for each in found.candidates if (each.prefill is not None) == kind and each not in front]
        axes.plot([each.per_user for each in rest], [each.per_device for each in rest], marker, color="#bbb",
                  markersize=3, label=f"{label}, beaten")  # fmt: skip
        best = [each for each in found.front if (each.prefill is not None) == kind]
        axes.plot([each.per_user for each in best], [each.per_device for each in best], marker, color="#4269d0",
                  label=label)  # fmt: skip
    users, devices = [each.per_user for each in found.front], [each.per_device for each in found.front]
    widths = [search.known.spread(each.layout)[0] for each in found.front]
    axes.plot(users, devices, color="#4269d0", linewidth=1)
    low, high = ([user * width**sign for user, width in zip(users, widths, strict=True)] for sign in (-1, 1))
    axes.fill_betweenx(devices, low, high, color="#4269d0", alpha=0.1, label="80 % interval")
    if search.slo.tpot < float("inf"):
        axes.axvline(1 / search.slo.tpot, color="#333", linestyle="--", linewidth=1,
                     label=f"{1e3 * search.slo.tpot:g} ms a token")  # fmt: skip
    for name, chosen, colour in (("safe", found.safe, "#ff725c"), ("bold", found.bold, "#efb118")):
        if chosen is not None:
            axes.plot(chosen.per_user, chosen.per_device, "o", markersize=13, fillstyle="none", color=colour,
                      markeredgewidth=2, label=f"{name}: {describe(chosen)}, batch {chosen.batch}")  # fmt: skip
    axes.set(xscale="log", yscale="log", title=title, xlabel="output tokens/s per user",
             ylabel="output tokens/s per device")  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=130, format=file.suffix.lower()[1:])
