"""`coterie plan serve`: times and goodput of one layout under a load, by a closed form and by simulating the engine.

Arrivals are drawn or read from a trace; `--rate` asks about one rate, limits of time about the largest rate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from coterie.cli.plan_goals import goal_options
from coterie.cli.plan_options import COUNT, Asked, load_options, plan_options
from coterie.cli.plan_output import number, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.deploy import Pool, deploy, enough_requests, impossible, likely_rate
from coterie.planner.goodput import Closed, Deployment, Served, closed_form, largest_rate, pools
from coterie.planner.goodput import serve as run
from coterie.planner.layout import Wish, choose
from coterie.planner.outcome import asked as question
from coterie.planner.outcome import count, layout_numbers, rated, timed
from coterie.planner.quantity import Quantity, sure
from coterie.planner.search import Search
from coterie.planner.workload import Requests, Workload, draw, read_trace
from coterie.spec.errors import SpecError

PERCENTILES = (50, 95, 99)
SPREAD = FiniteRange(0, 10)
DRAWN = ("isl", "osl", "hit", "requests", "spread_isl", "spread_osl", "burstiness", "seed")
"""What requests are drawn from where there is no trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found at one rate, and the largest within the limits if there are any. `speed`: simulated steps (of one
    rank) a second."""

    rate: float
    closed: Closed
    served: Served
    best: Served | None
    curve: list[Served]
    speed: float


@click.command()
@plan_options
@load_options
@goal_options
@click.option("--rate", type=FiniteRange(0, 1e9, min_open=True), 
              help="Requests a second that arrive. [default: the largest within --ttft and --tpot]")  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False),
              help="JSON lines with arrival (seconds), isl, osl and cached.")  # fmt: skip
@click.option("--requests", type=click.IntRange(20, 200_000), help="To simulate. [default: enough]")
@click.option("--spread-isl", type=SPREAD, default=0.0, show_default=True, help="Coefficient of variation of prompts.")
@click.option("--spread-osl", type=SPREAD, default=0.0, show_default=True, help="The same of answers.")
@click.option("--burstiness", type=SPREAD, default=1.0, show_default=True,
              help="The same of the gaps between arrivals: 1 is Poisson, above bursts.")  # fmt: skip
@click.option("--max-running", type=COUNT, help="Requests of a rank at once. [default: as many as fit, up to 1024]")
@click.option("--prefill-instances", type=click.IntRange(0, 65536), default=0, show_default=True,
              help="Instances beside these devices that only compute prompts.")  # fmt: skip
@click.option("--prefill-devices", type=COUNT, help="Devices of each. [default: --devices]")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of what is drawn.")
def serve(asked: Asked, search: Search, **values: Any) -> None:
    """Simulate serving: percentiles of TTFT and TPOT, goodput by rate, the largest rate within limits."""
    trace = None if (file := values.pop("trace")) is None else traced(file)
    if trace is not None:
        search = replace(search, isl=round(trace.isl.mean()), osl=round(trace.osl.mean()),
                         hit=float(trace.cached.sum() / trace.isl.sum()))  # fmt: skip
    pool = pool_of(asked, values.pop("prefill_instances"), values.pop("prefill_devices"))
    where = deploy(search, pool, values.pop("max_running"))
    answer = answered(search, where, values, trace)
    if asked.as_json:
        show_json(document(asked, search, where, answer))
        return
    click.echo("\n".join(words(asked, search, where, answer)))


def pool_of(asked: Asked, instances: int, devices: int | None) -> Pool | None:
    """The instances for prompts, in the same formats."""
    if not instances:
        return None
    layout = asked.layout
    wish = Wish(weights=layout.weights, attention=layout.attention, kv=layout.kv)
    return Pool(layout=choose(asked.model, asked.hardware, devices or layout.devices, wish), instances=instances)


def traced(file: Path) -> Requests:
    """The requests of a trace, whose lengths, prefix hits and times are its own. Raises SpecError for a flag that says
    them too, as it could change nothing."""
    context = click.get_current_context()
    given = [
        f"--{name.replace('_', '-')}"
        for name in DRAWN
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise SpecError(f"{', '.join(given)} would change nothing: a trace has lengths, hits and times of its own")
    return read_trace(file)


def answered(search: Search, where: Deployment, values: dict[str, Any], trace: Requests | None) -> Answer:
    """Simulate. Raises SpecError for limits that cannot be kept, or if there is neither a rate nor a limit."""
    limited = min(search.slo.ttft, search.slo.tpot) < float("inf")
    given: float | None = values["rate"]
    if trace is not None and given is None:
        if trace.arrival[-1] > 0:
            given = len(trace) / float(trace.arrival[-1])
        elif not limited:
            raise SpecError("all requests of the trace arrive at once: say --rate, or --ttft or --tpot")
    if given is None and not limited:
        raise SpecError("say --rate, or --ttft or --tpot to find the largest rate within them")
    guess = given or likely_rate(search, where)
    requests = trace or draw_requests(search, where, guess, values)
    begun = time.perf_counter()
    best, curve = largest_rate(requests, where, search.slo, guess) if limited else (None, [])
    if limited and best is None and given is None:
        raise SpecError(f"no rate keeps the limits: {impossible(search, where)}")
    rate = given or (best.rate if best is not None else guess)
    served = best if best is not None and best.rate == rate else run(requests, where, rate)
    seconds = time.perf_counter() - begun
    closed = closed_form(where, rate, round(float(requests.isl.mean())), round(float(requests.osl.mean())), search.hit)
    speed = served.run.steps * where.policy.ranks / max(seconds, 1e-9) if best is None else 0.0
    return Answer(rate=rate, closed=closed, served=served, best=best, curve=curve, speed=speed)


def draw_requests(search: Search, where: Deployment, rate: float, values: dict[str, Any]) -> Requests:
    """The requests of the options, enough of them unless their number is given."""
    closed = closed_form(where, rate, search.isl, search.osl, search.hit)
    count = values["requests"] or enough_requests(where, rate, closed, search.osl)
    load = Workload(rate=rate, isl=search.isl, osl=search.osl, spread_isl=values["spread_isl"],
                    spread_osl=values["spread_osl"], spread_gaps=values["burstiness"], hit=search.hit, requests=count,
                    seed=values["seed"])  # fmt: skip
    return draw(load)


def document(asked: Asked, search: Search, where: Deployment, answer: Answer) -> dict[str, Any]:
    """The answer as JSON holds it."""
    served, closed = answer.served, answer.closed
    result: dict[str, Any] = {
        "asked": {**question(search, asked.name, asked.layout.devices), "rate": answer.rate},
        "layout": layout_numbers(asked.layout),
        "how": search.known.how,
        "closed_form": {
            "tpot": timed(search, closed.tpot, "tpot-serving", search.known.spread(search.like)[0]),
            "ttft": timed(search, closed.ttft, "ttft-serving", search.known.spread(search.like)[1]),
            "batch": rated(search, closed.batch * asked.layout.dp, "requests", "batch"),
            "load": flagged(rated(search, closed.load, "", "prompt-load"), closed.load > 0.9),
        },
        "simulated": simulated(search, served),
        "pools": None,
    }
    if where.prefill is not None:
        prefill, decode = pools(where, answer.rate, search.isl, search.osl, search.hit)
        result["pools"] = {name: rated(search, load, "", "pool-load")
                           for name, load in (("prefill", prefill), ("decode", decode))}  # fmt: skip
    if answer.best is not None:
        result["largest_rate"] = rated(search, answer.best.rate, "requests/s", "largest-rate")
        result["at_largest_rate"] = simulated(search, answer.best)
    result["goodput"] = [{"asked": {"rate": each.rate}, "goodput": goodput(search, each)} for each in answer.curve]
    return result


def simulated(search: Search, served: Served) -> dict[str, Any]:
    """Percentiles and totals of a simulated rate."""
    found: dict[str, Any] = {}
    for name, values in served.percentiles(PERCENTILES).items():
        tpot, ttft = search.known.spread(search.like)
        factor = tpot if name == "tpot" else ttft
        each = {q: timed(search, value, f"{name}-simulated", factor) for q, value in values.items()}
        found[name] = {f"p{q}": flagged(quantity, served.saturated) for q, quantity in each.items()}
    found |= {
        "goodput_share": rated(search, served.goodput(search.slo), "", "goodput", most=1.0),
        "batch_per_rank": rated(search, served.batch, "requests", "batch"),
        "tokens_per_second": rated(search, served.tokens_per_second, "tokens/s", "tokens-per-device"),
        "utilisation": rated(search, served.utilisation, "", "utilisation"),
        "preemptions": sure(served.run.preemptions, "", "preemptions"),
        "cache_peak": sure(served.run.peak, "tokens", "cache-tokens"),
        "requests": count(len(served.ttft)),
        "steps": count(served.run.steps, "steps"),
        "saturated": served.saturated,
    }
    return found


def goodput(search: Search, served: Served) -> Quantity:
    """Requests a second that keep the limits."""
    kept = rated(search, served.rate * served.goodput(search.slo), "requests/s", "goodput", most=served.rate)
    return flagged(kept, served.saturated)


def flagged(quantity: Quantity, saturated: bool) -> Quantity:
    return replace(quantity, flags=(*quantity.flags, "SATURATED")) if saturated else quantity


def tails(served: Served) -> list[str]:
    """95th percentiles of a rate, and whether it has no steady state."""
    found = served.percentiles((95,))
    return [number(found[name][95], "s") for name in ("ttft", "tpot")] + ["saturated" if served.saturated else ""]


def words(asked: Asked, search: Search, where: Deployment, answer: Answer) -> list[str]:
    """The answer for people."""
    served, closed, policy = answer.served, answer.closed, where.policy
    beside = (
        "" if where.prefill is None else f", {where.prefill.instances * where.groups} ranks beside them for prompts"
    )
    lines = [
        f"{asked.title()}{beside}",
        f"{answer.rate:.4g} requests/s of {search.isl} + {search.osl} tokens; a rank: {policy.max_running} requests, "
        f"{policy.cache_tokens:,} tokens of cache, {policy.token_budget:,} tokens a step",
        "",
        table(["", "closed form", *(f"p{q}" for q in PERCENTILES)], [
            [name.upper(), formed, *(number(value, "s") for value in served.percentiles(PERCENTILES)[name].values())]
            for name, formed in (("ttft", number(closed.ttft, "s")), ("tpot", number(closed.tpot, "s")), ("e2e", "-"))
        ]),
        "",
        f"{len(served.ttft)} requests counted in {served.run.steps:,} steps; {served.batch:.1f} streams a rank, "
        f"{served.tokens_per_second:,.0f} output tokens/s, cache at most {served.run.peak:,} tokens a rank, "
        f"{served.run.preemptions} preemptions",
    ]  # fmt: skip
    if where.prefill is not None:
        prefill, decode = pools(where, answer.rate, search.isl, search.osl, search.hit)
        lines.append(f"load of the pools: prompts {prefill:.2f}, streams {decode:.2f}")
    if served.saturated:
        lines.append("SATURATED: waiting grows as long as this rate lasts; the times mean little")
    if answer.curve:
        lines.append(f"within the limits at this rate: {100 * served.goodput(search.slo):.1f} %")
        rows = [
            [f"{each.rate:.4g}", f"{each.rate * each.goodput(search.slo):.4g}", *tails(each)] for each in answer.curve
        ]
        lines += ["", table(["requests/s", "within limits", "TTFT p95", "TPOT p95", ""], rows)]
    if answer.best is not None:
        lines.append(
            f"largest rate with {100 * search.slo.attain:g} % within the limits: {answer.best.rate:.4g} requests/s"
        )
    elif answer.curve:
        lines.append(f"no rate keeps the limits: {impossible(search, where)}")
    tpot, ttft = search.known.spread(search.like)
    flags = "".join(f", {flag}" for flag in search.known.flags_of(search.like))
    lines.append(f"times: {search.known.how}{flags}; 80 % intervals TPOT x or / {tpot:.2f}, TTFT x or / {ttft:.2f}")
    return lines
