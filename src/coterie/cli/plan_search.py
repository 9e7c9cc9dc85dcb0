"""`coterie plan search`: all layouts, the Pareto front, a recommendation with its reason, a plot and a report.

The layout's options are found here unless given: `--tp`, `--dp`, `--ep` then hold for every instance that decodes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from coterie.cli.main import check_folder
from coterie.cli.plan_goals import goal_options
from coterie.cli.plan_options import COUNT, Asked, load_options, plan_options
from coterie.cli.plan_output import number, plain, show_json, table
from coterie.planner.advice import binding, describe, sentences, unreachable
from coterie.planner.outcome import asked as question
from coterie.planner.outcome import outcome
from coterie.planner.search import Candidate, Found, Search, find


@click.command()
@plan_options
@load_options
@goal_options
@click.option("--also", type=COUNT, multiple=True, help="Search so many devices too; may be given more than once.")
@click.option("--together", is_flag=True, help="No instances that only compute prompts.")
@click.option("--every", is_flag=True, help="Look at layouts too that are never best.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write the front as .png or .svg.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write a whole HTML page.")
def search(
    asked: Asked, search: Search, also: tuple[int, ...], plot: Path | None, report: Path | None, together: bool,
    every: bool,
) -> None:  # fmt: skip
    """Find the best layout for a load and limits.

    Throughput is output tokens a second of all devices, both pools counted. TPOT is (end - first token) / (tokens - 1).
    "safe" keeps the limits by the upper end of the 80 % interval, "bold" by the median.
    """
    check_folder(plot, report)
    if plot is not None:
        from coterie.planner.plot import check_plot_file

        check_plot_file(plot)
    given = click.get_current_context().get_parameter_source("redundant") is ParameterSource.COMMANDLINE
    where = click.get_current_context().params["model"]
    asked = replace(asked, name=where) if Path(where).exists() else asked  # as the launch command needs it
    like = search.like if given else replace(search.like, redundant=0)
    search = replace(search, like=like, apart=not together, every=every, fixed=fixed())
    found = {devices: find(search, devices) for devices in (asked.layout.devices, *also)}
    main = found[asked.layout.devices]
    title = f"{asked.name} on {asked.layout.devices} x {asked.hardware.name}"
    answers = {devices: outcome(each, search, asked.name) for devices, each in found.items()} if asked.as_json else {}
    if plot is not None:
        from coterie.planner.plot import plot_search

        plot_search(main, search, title, plot)
    if report is not None:
        from coterie.planner.report import report as html

        answer = plain(outcome(main, search, asked.name))
        report.write_text(html(main, search, title, answer), encoding="utf-8")
    if asked.as_json:
        show_json(document(asked, search, answers))
        return
    if also:
        click.echo(sizes_table(found, search))
        return
    click.echo(f"{title}: {load_words(search)}\n")
    click.echo(front_table(main, search))
    click.echo("\n" + "\n".join(sentences(main, search, asked.name)))


def fixed() -> tuple[tuple[str, int], ...]:
    """What the user gave of tp, dp and ep on the command line."""
    context = click.get_current_context()
    names = ("tp", "dp", "ep")
    given = [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    return tuple((name, int(context.params[name])) for name in given)


def document(asked: Asked, search: Search, answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The answer as JSON holds it: one for each number of devices."""
    return {
        "asked": question(search, asked.name, asked.layout.devices),
        "searches": [{"asked": question(search, asked.name, devices), **answer} for devices, answer in answers.items()],
    }


def load_words(search: Search) -> str:
    """What is served, in words."""
    limits = [f"{name} {1e3 * value:g} ms" for name, value in (("TTFT", search.slo.ttft), ("TPOT", search.slo.tpot))
              if value < float("inf")]  # fmt: skip
    return f"prompts of {search.isl}, answers of {search.osl}, {' and '.join(limits) or 'no limits'}"


def front_table(found: Found, search: Search) -> str:
    """The Pareto front; the recommendations carry their names."""
    rows = []
    chosen = [(found.safe, "safe"), (found.bold, "bold")]
    extra = [each for each, _ in chosen if each is not None and each not in found.front]
    for each in sorted({*found.front, *extra}, key=lambda each: -each.per_user):
        rows.append([" ".join([describe(each), *(name for who, name in chosen if who is each)]), *cells(each, search)])
    return table(["deployment", "batch", "TPOT (p10 to p90)", "TTFT", "tok/s user", "tok/s device", "most time"], rows)


def cells(each: Candidate, search: Search) -> list[str]:
    """A candidate's numbers."""
    factor = search.known.spread(each.layout)[0]
    tpot = f"{number(each.tpot, 's')} ({number(each.tpot / factor, 's')} to {number(each.tpot * factor, 's')})"
    speeds = [f"{each.per_user:.0f}", f"{each.per_device:,.0f}"]
    return [f"{each.batch:,}", tpot, number(each.ttft, "s"), *speeds, each.step.bound]


def sizes_table(found: dict[int, Found], search: Search) -> str:
    """One line for each number of devices: what to run there within the limits."""
    rows = []
    for devices, each in found.items():
        chosen = each.safe or each.bold
        if chosen is None:
            rows.append([f"{devices}", unreachable(each, search), *[""] * 7])
            continue
        domain = "inside a domain" if chosen.layout.devices <= search.hardware.domain else "between domains"
        links = "none" if chosen.layout.devices == 1 else domain
        counts = [f"{chosen.batch * chosen.instances:,}", f"{chosen.b_cap * chosen.instances:,}"]
        times = [number(chosen.tpot, "s"), number(chosen.ttft, "s"), f"{chosen.per_device:,.0f}"]
        limit = binding(chosen, search, safe=each.safe is not None)
        words = describe(chosen) + ("" if each.safe else " (by the median)")
        rows.append([f"{devices}", words, *counts, *times, limit, links])
    heads = ["devices", "deployment", "batch", "B_cap", "TPOT", "TTFT", "tok/s device", "binds", "exchange"]
    return table(heads, rows)
