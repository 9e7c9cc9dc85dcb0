"""`coterie plan step`: a decode and a prefill step by operation, what each waits for, and the limits of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import click

from coterie.cli.plan_options import TOKENS, Asked, plan_options
from coterie.cli.plan_output import number, say, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.cost import Efficiency, StepCost, decode_step, prefill_step, prior
from coterie.planner.limits import Limits, paper_limits
from coterie.planner.ops import Point
from coterie.planner.quantity import Flag, Kind, Quantity
from coterie.spec.errors import SpecError

MEASURED_SPREAD = (1.2, 1.3)
"""Of decode and prefill on a machine that was calibrated: `benchmarks/plan_vs_engine.py`."""
PRIOR_SPREAD = (1.6, 1.8)
"""Of a device whose class was not fitted: what leaving a model or an engine out of the fit costs (docs/planner.md)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Both steps, how they were made and the limits; `gamma` of the busiest rank, `hit` experts of it with a token."""

    decode: StepCost
    prefill: StepCost
    efficiency: Efficiency
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
@click.option("--overlap", is_flag=True, help="Two micro-batches: one computes while the other exchanges.")
@click.option("--draft", type=click.IntRange(0, 16), default=0, show_default=True, help="Tokens drafted a step.")
@click.option("--accept", type=FiniteRange(0, 1), default=0.85, show_default=True,
              help="Probability that a drafted token is right.")  # fmt: skip
def step(asked: Asked, **values: Any) -> None:
    """Show the time of a decode and a prefill step by operation.

    With a hardware file of `plan calibrate` it predicts our engine on that machine; a device of the table gets
    efficiencies of its class.
    """
    answer = solve(asked, values)
    if asked.as_json:
        show_json(document(asked, answer, values))
        return
    click.echo(f"{asked.title()}\n")
    batch, length = values["batch"], values["context"]
    click.echo(f"decode, {batch:,} requests with {length:,} tokens each\n{ops_table(answer.decode)}")
    click.echo("\n" + "\n".join(decode_lines(asked, answer)))
    click.echo(f"\nprefill, a prompt of {values['prompt']:,} tokens\n{ops_table(answer.prefill)}")
    click.echo("\n" + "\n".join([*prefill_lines(asked, answer), *limit_lines(answer.limits)]))


def solve(asked: Asked, values: dict[str, Any]) -> Answer:
    """Both steps and the limits. Limits that cannot be are kept as the refusal that says why."""
    layout, model = asked.layout, asked.model
    efficiency = efficiency_of(asked)
    point = Point(batch=values["batch"], context=values["context"], overlap=values["overlap"], draft=values["draft"],
                  accept=values["accept"])  # fmt: skip
    prompt = Point(batch=1, context=values["prompt"], past=values["past"])
    if values["skew"] is not None:
        point, prompt = (skewed(asked, each, values["skew"], tokens)
                         for each, tokens in ((point, point.batch), (prompt, prompt.context)))  # fmt: skip
    layout.check(model)
    decode = decode_step(model, asked.hardware, layout, point, efficiency)
    prefill = prefill_step(model, asked.hardware, layout, prompt, efficiency)
    limits: Limits | SpecError
    try:
        limits = paper_limits(model, asked.hardware, layout, values["context"])
    except SpecError as error:
        limits = error
    return Answer(decode, prefill, efficiency, limits, point, prompt)


def efficiency_of(asked: Asked) -> Efficiency:
    """Our engine's where the file was calibrated, else the class's."""
    known = prior(asked.hardware)
    return known if asked.measured is None else replace(known, measured=asked.measured, absorbed=True)


def skewed(asked: Asked, point: Point, skew: str, tokens: float) -> Point:
    """The point with the busiest rank's load and the experts it reads."""
    from coterie.planner.imbalance import gamma
    from coterie.planner.skew import Skew

    layout = asked.layout
    found = gamma(Skew.parse(skew), asked.model, max(1.0, tokens), layout.ep, "random", layout.redundant)
    slots = next(moe.num_experts for _, moe in asked.model.moe_layers()) + layout.redundant
    return replace(point, gamma=max(1.0, found.rank), hit=max(found.hit * slots / layout.ep, 1e-9))


# Output


def quantity(asked: Asked, seconds: float, formula: str, phase: int) -> Quantity:
    """A time with its interval."""
    measured = asked.measured is not None
    kind: Kind = "calibrated" if measured else "extrapolated"
    flags: tuple[Flag, ...] = () if measured else ("UNCALIBRATED",)
    spread = (MEASURED_SPREAD if measured else PRIOR_SPREAD)[phase]
    return Quantity(seconds, "s", kind, formula, seconds / spread, seconds * spread, flags)


def document(asked: Asked, answer: Answer, values: dict[str, Any]) -> dict[str, Any]:
    """The answer as JSON holds it."""
    parts = {}
    for phase, (name, cost) in enumerate((("decode", answer.decode), ("prefill", answer.prefill))):
        ops = [{"name": op.name, "bound": op.bound, "seconds": quantity(asked, op.seconds, "op-seconds", phase)}
               for op in cost.ops]  # fmt: skip
        parts[name] = {"ops": ops, "bound": cost.bound, "seconds": quantity(asked, cost.seconds, f"{name}-step", phase)}
    tpot = quantity(asked, answer.decode.tpot, "tpot", 0)
    limits = answer.limits
    shown = {"refused": str(limits)} if isinstance(limits, SpecError) else {
        name: getattr(limits, name) for name in ("b_rp", "b_cap", "b_slo", "binds")
    }  # fmt: skip
    return {"asked": asked.question(**values), **parts, "tpot": tpot, "limits": shown}


def ops_table(cost: StepCost) -> str:
    """Operations, longest first."""
    ops = sorted(cost.ops, key=lambda op: -op.seconds)
    rows = [[op.name, number(op.seconds, "s"), f"{100 * op.seconds / cost.seconds:.1f} %", op.bound] for op in ops]
    rows.append(["step", number(cost.seconds, "s"), "100 %", cost.bound])
    return table(["operation", "time", "share", "waits for"], rows)


def decode_lines(asked: Asked, answer: Answer) -> list[str]:
    """What the decode step means to a user."""
    tpot, point = quantity(asked, answer.decode.tpot, "tpot", 0), answer.point
    lines = [f"time per token {say(tpot)}, {1 / tpot.value:,.1f} tokens/s a stream, "
             f"{point.batch / tpot.value:,.1f} in all"]  # fmt: skip
    if point.gamma > 1:
        lines.append(f"the busiest rank's experts have {point.gamma:.2f} times the mean load")
    return [*lines, f"most time goes to {answer.decode.bound}", *_how(asked)]


def prefill_lines(asked: Asked, answer: Answer) -> list[str]:
    """What the prefill step means."""
    seconds = quantity(asked, answer.prefill.seconds, "prefill-step", 1)
    rate = answer.prompt.batch * answer.prompt.context / seconds.value
    return [f"prefill takes {say(seconds)}, {rate:,.0f} tokens/s; most time goes to {answer.prefill.bound}"]


def limit_lines(limits: Limits | SpecError) -> list[str]:
    """The three limits in the reference paper's form."""
    if isinstance(limits, SpecError):
        return [f"limits: {limits}"]
    shown = ", ".join(f"{name} {number(value.value, '')}" for name, value in
                      (("B_RP", limits.b_rp), ("B_cap", limits.b_cap), ("B_SLO", limits.b_slo)))  # fmt: skip
    return [f"limits of the batch at full rates and 50 ms a token: {shown}; {limits.binds} binds (see `plan limits`)"]


def _how(asked: Asked) -> list[str]:
    if asked.measured is not None:
        return [f"efficiencies measured on this machine, {asked.measured.threads} threads, {asked.measured.isa}"]
    return ["efficiencies of the class, not measured: UNCALIBRATED"]
