"""`coterie plan step`: a decode and a prefill step by operation, what each waits for, and the limits of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import click

from coterie.cli.plan_options import TOKENS, Asked, plan_options
from coterie.cli.plan_output import number, say, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.cost import Efficiency, StepCost, mixed_step, prior
from coterie.planner.limits import Limits, paper_limits
from coterie.planner.ops import Point, requests_per_group
from coterie.planner.quantity import Flag, Kind, Quantity
from coterie.spec.errors import SpecError

MEASURED_SPREAD = (1.2, 1.3)
"""Of decode and prefill on a machine that was calibrated: `benchmarks/plan_vs_engine.py`."""
PRIOR_SPREAD = (1.8, 2.0)
"""Of a CPU server that was not calibrated: published CPU rows lie about so far apart at equal rates."""
INTERVAL: tuple[Literal["tpot", "ttft"], ...] = ("tpot", "ttft")


@dataclass(frozen=True, slots=True)
class Phase:
    """A step with the factor of its interval, and what to know of it."""

    cost: StepCost
    spread: float
    kind: Kind
    flags: tuple[Flag, ...]
    how: str

    def quantity(self, seconds: float, formula: str) -> Quantity:
        """A time of this step with its interval."""
        return Quantity(seconds, "s", self.kind, formula, seconds / self.spread, seconds * self.spread, self.flags)


@dataclass(frozen=True, slots=True)
class Answer:
    """Both steps and the limits, or the refusal that says why there are none."""

    decode: Phase
    prefill: Phase
    limits: Limits | SpecError
    point: Point
    prompt: Point


@click.command()
@plan_options
@click.option("--batch", type=TOKENS, default=1, show_default=True, help="Requests that decode together, in all.")
@click.option("--context", type=TOKENS, default=4096, show_default=True, help="Tokens in the cache of each.")
@click.option("--prompt", type=TOKENS, default=1024, show_default=True, help="Tokens of the prompt of the prefill.")
@click.option("--past", type=click.IntRange(0), default=0, show_default=True, help="Tokens cached before the prompt.")
@click.option("--skew", metavar="SKEW", help="How uneven experts are (see `plan imbalance`). [default: even]")
@click.option("--engine", help="Take the efficiencies fitted for this engine. [default: of none in particular]")
@click.option("--overlap", is_flag=True, help="Two micro-batches: one computes while the other exchanges.")
@click.option("--draft", type=click.IntRange(0, 16), default=0, show_default=True, help="Tokens drafted a step.")
@click.option("--accept", type=FiniteRange(0, 1), default=0.85, show_default=True,
              help="Probability that a drafted token is right.")  # fmt: skip
def step(asked: Asked, **values: Any) -> None:
    """Show the time of a decode and a prefill step by operation.

    With a hardware file of `plan calibrate` it predicts our engine on that machine; a device of the table gets
    efficiencies fitted on published measurements.
    """
    answer = solve(asked, values)
    if asked.as_json:
        show_json(document(asked, answer, values))
        return
    click.echo(f"{asked.title()}\n")
    batch, length = values["batch"], values["context"]
    click.echo(f"decode, {batch:,} requests with {length:,} tokens each\n{ops_table(answer.decode.cost)}")
    click.echo("\n" + "\n".join(decode_lines(answer)))
    click.echo(f"\nprefill, a prompt of {values['prompt']:,} tokens\n{ops_table(answer.prefill.cost)}")
    click.echo("\n" + "\n".join([*prefill_lines(answer), *limit_lines(answer.limits)]))


def solve(asked: Asked, values: dict[str, Any]) -> Answer:
    """Both steps and the limits. Limits that cannot be are kept as the refusal that says why."""
    layout, model = asked.layout, asked.model
    layout.check(model)
    point = Point(batch=values["batch"], context=values["context"], overlap=values["overlap"], draft=values["draft"],
                  accept=values["accept"])  # fmt: skip
    prompt = Point(batch=1, context=values["prompt"], past=values["past"])
    if values["skew"] is not None:
        point, prompt = (skewed(asked, each, values["skew"], tokens)
                         for each, tokens in ((point, point.batch), (prompt, prompt.context)))  # fmt: skip
    decode, prefill = phase(asked, values["engine"], point, None), phase(asked, values["engine"], None, prompt)
    limits: Limits | SpecError
    try:
        limits = paper_limits(model, asked.hardware, layout, values["context"])
    except SpecError as error:
        limits = error
    return Answer(decode, prefill, limits, point, prompt)


def phase(asked: Asked, engine: str | None, point: Point | None, prompt: Point | None) -> Phase:
    """A step by what is known: our engine measured on the machine, engines fitted on accelerators, or a prior."""
    hw, layout = asked.hardware, asked.layout
    number = 0 if prompt is None else 1

    def step_at(efficiency: Efficiency) -> StepCost:
        return mixed_step(asked.model, hw, layout, (point, prompt), efficiency)

    if asked.measured is not None:
        found = step_at(Efficiency(measured=asked.measured, absorbed=True))
        how = f"our engine as measured on this machine: {asked.measured.threads} threads, {asked.measured.isa}"
        return Phase(found, MEASURED_SPREAD[number], "calibrated", (), how)
    if hw.kind == "cpu":
        how = "efficiencies of CPU servers in general: calibrate on the machine itself"
        return Phase(step_at(prior(hw)), PRIOR_SPREAD[number], "extrapolated", ("UNCALIBRATED",), how)
    from coterie.planner.fitted_step import fitted_step
    from coterie.planner.known import layout_flags, least_spread

    fit = fitted_step(asked.model, hw, engine, lambda known: step_at(known).seconds, INTERVAL[number])
    cost = step_at(fit.efficiency)
    if point is not None:
        cost = replace(cost, ops=(*cost.ops, fit.streams(requests_per_group(point, layout))))
    flags, spread = layout_flags(layout, fit.flags), max(fit.spread, least_spread(layout, fit.flags))
    kind: Kind = "extrapolated" if flags else "calibrated"
    name = f"of {engine}" if engine else "of no engine in particular (see --engine)"
    shown = f": {', '.join(flags)}" if flags else ""
    return Phase(cost, spread, kind, flags, f"efficiencies {name}, {fit.seen} measurements of its class{shown}")


def skewed(asked: Asked, point: Point, skew: str, tokens: float) -> Point:
    """The point with the busiest rank's load and the experts it reads."""
    from coterie.planner.imbalance import gamma
    from coterie.planner.skew import Skew

    layout = asked.layout
    found = gamma(Skew.parse(skew), asked.model, max(1.0, tokens), layout.ep, "random", layout.redundant)
    slots = next(moe.num_experts for _, moe in asked.model.moe_layers()) + layout.redundant
    return replace(point, gamma=max(1.0, found.rank), hit=max(found.hit * slots / layout.ep, 1e-9))


# Output


def document(asked: Asked, answer: Answer, values: dict[str, Any]) -> dict[str, Any]:
    """The answer as JSON holds it."""
    parts: dict[str, Any] = {}
    for name, found in (("decode", answer.decode), ("prefill", answer.prefill)):
        ops = [{"name": op.name, "bound": op.bound, "seconds": found.quantity(op.seconds, "op-seconds")}
               for op in found.cost.ops]  # fmt: skip
        seconds = found.quantity(found.cost.seconds, f"{name}-step")
        parts[name] = {"ops": ops, "bound": found.cost.bound, "seconds": seconds, "how": found.how}
    limits = answer.limits
    shown = {"refused": str(limits)} if isinstance(limits, SpecError) else {
        name: getattr(limits, name) for name in ("b_rp", "b_cap", "b_slo", "binds")
    }  # fmt: skip
    tpot = answer.decode.quantity(answer.decode.cost.tpot, "step-tpot")
    return {"asked": asked.question(**values), **parts, "tpot": tpot, "limits": shown}


def ops_table(cost: StepCost) -> str:
    """Operations, longest first."""
    ops = sorted(cost.ops, key=lambda op: -op.seconds)
    rows = [[op.name, number(op.seconds, "s"), f"{100 * op.seconds / cost.seconds:.1f} %", op.bound] for op in ops]
    rows.append(["step", number(cost.seconds, "s"), "100 %", cost.bound])
    return table(["operation", "time", "share", "waits for"], rows)


def decode_lines(answer: Answer) -> list[str]:
    """What the decode step means to a user."""
    found, point = answer.decode, answer.point
    tpot = found.quantity(found.cost.tpot, "step-tpot")
    lines = [f"time per token {say(tpot)}, {1 / tpot.value:,.1f} tokens/s a stream, "
             f"{point.batch / tpot.value:,.1f} in all"]  # fmt: skip
    if point.gamma > 1:
        lines.append(f"the busiest rank's experts have {point.gamma:.2f} times the mean load")
    return [*lines, f"most time goes to {found.cost.bound}", found.how]


def prefill_lines(answer: Answer) -> list[str]:
    """What the prefill step means."""
    found = answer.prefill
    seconds = found.quantity(found.cost.seconds, "prefill-step")
    rate = answer.prompt.batch * answer.prompt.context / seconds.value
    return [f"prefill takes {say(seconds)}, {rate:,.0f} tokens/s; most time goes to {found.cost.bound}"]


def limit_lines(limits: Limits | SpecError) -> list[str]:
    """The three limits in the reference paper's form."""
    if isinstance(limits, SpecError):
        return [f"limits: {limits}"]
    shown = ", ".join(f"{name} {number(value.value, '')}" for name, value in
                      (("B_RP", limits.b_rp), ("B_cap", limits.b_cap), ("B_SLO", limits.b_slo)))  # fmt: skip
    return [f"limits of the batch at full rates and 50 ms a token: {shown}; {limits.binds} binds (see `plan limits`)"]
