"""`coterie plan step`: a decode and a prefill step by operation, what each waits for, and the limits of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click

from coterie.cli.plan_options import TOKENS, Asked, plan_options
from coterie.cli.plan_output import number, say, show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.batch import MOST, BatchLimits, batch_limits
from coterie.planner.cost import Efficiency, OpCost, StepCost, mixed_step, prior
from coterie.planner.known import CPU_TPOT, CPU_TTFT, MEASURED, check_engine, layout_flags, least_spread
from coterie.planner.memory import Load
from coterie.planner.ops import Point, requests_per_group
from coterie.planner.quantity import Flag, Kind, Quantity
from coterie.spec.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of steps: efficiencies on a device (another engine's view of a CPU has its own rates), half-width
    of the interval, what a stream costs beyond its operations, flags, and whence in words."""

    efficiency: Efficiency
    hardware: HardwareSpec
    spread: float
    flags: tuple[Flag, ...]
    how: str
    streams: Callable[[float], OpCost] | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """A step with the factor of its interval, and what to know of it. hardware: the device at the rates of what runs
    there; at: the same step with another point."""

    cost: StepCost
    spread: float
    kind: Kind
    flags: tuple[Flag, ...]
    how: str
    hardware: HardwareSpec
    at: Callable[[Point], StepCost]

    def quantity(self, seconds: float, formula: str) -> Quantity:
        """A time of this step with its interval."""
        return Quantity(seconds, "s", self.kind, formula, seconds / self.spread, seconds * self.spread, self.flags)


@dataclass(frozen=True, slots=True)
class Answer:
    """Both steps and the limits of the batch for `slo` seconds a token."""

    decode: Phase
    prefill: Phase
    limits: BatchLimits
    point: Point
    prompt: Point
    slo: float


@click.command()
@plan_options
@click.option("--batch", type=TOKENS, default=1, show_default=True, help="Requests that decode together, in all.")
@click.option("--context", type=TOKENS, default=4096, show_default=True, help="Tokens in the cache of each.")
@click.option("--prompt", type=TOKENS, default=1024, show_default=True, help="Tokens of the prompt of the prefill.")
@click.option("--past", type=click.IntRange(0), default=0, show_default=True, help="Tokens cached before the prompt.")
@click.option(
    "--slo",
    type=FiniteRange(0, 3.6e6, min_open=True),
    default=50.0,
    show_default=True,
    help="Milliseconds that a token may take, for the limit of the batch.",
)
@click.option("--skew", metavar="SKEW", help="How uneven experts are (see `plan imbalance`). [default: even]")
@click.option(
    "--engine", help="Take the efficiencies fitted for this engine. [default: of none in particular; on CPUs ours]"
)
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
    click.echo("\n" + "\n".join([*prefill_lines(answer), *limit_lines(answer)]))


def solve(asked: Asked, values: dict[str, Any]) -> Answer:
    """Both steps, and the limits of the batch by the decode step."""
    asked.layout.check(asked.model)
    plain = Point(batch=1, context=values["context"], overlap=values["overlap"], draft=values["draft"],
                  accept=values["accept"])  # fmt: skip

    def point_at(batch: int) -> Point:
        point = replace(plain, batch=batch)
        return point if values["skew"] is None else skewed(asked, point, values["skew"], batch)

    prompt = Point(batch=1, context=values["prompt"], past=values["past"])
    if values["skew"] is not None:
        prompt = skewed(asked, prompt, values["skew"], prompt.context)
    point = point_at(values["batch"])
    decode, prefill = (phase(asked, values["engine"], *points) for points in ((point, None), (None, prompt)))

    def token(batch: int) -> Quantity:
        return decode.quantity(decode.at(point_at(batch)).tpot, "step-tpot")

    load = Load(isl=values["context"] - 1, osl=2)  # so many tokens on average
    limits = batch_limits((asked.model, decode.hardware, asked.layout), load, token, values["slo"] / 1e3)
    return Answer(decode, prefill, limits, point, prompt, values["slo"] / 1e3)


def phase(asked: Asked, engine: str | None, point: Point | None, prompt: Point | None) -> Phase:
    """A step of streams or of a prompt by what is known, at the point given and at others."""
    layout = asked.layout

    def step_at(each: Point, efficiency: Efficiency, hw: HardwareSpec) -> StepCost:
        points = (each, None) if prompt is None else (None, each)
        return mixed_step(asked.model, hw, layout, points, efficiency)

    first = prompt or point
    assert first is not None
    known = source(asked, engine, lambda *by: step_at(first, *by).seconds, prompt=prompt is not None)

    def at(each: Point) -> StepCost:
        cost = step_at(each, known.efficiency, known.hardware)
        if prompt is not None or known.streams is None:
            return cost
        return replace(cost, ops=(*cost.ops, known.streams(requests_per_group(each, layout))))

    kind: Kind = "extrapolated" if known.flags else "calibrated"
    return Phase(at(first), known.spread, kind, known.flags, known.how, known.hardware, at)


def source(
    asked: Asked, engine: str | None, seconds: Callable[[Efficiency, HardwareSpec], float], *, prompt: bool
) -> Source:
    """Our engine measured on the machine, an engine fitted on published runs, or a prior. `seconds` prices the step
    that the interval is for. Raises SpecError for an engine that nothing is known of here."""
    hw, number = asked.hardware, int(prompt)
    check_engine(engine, hw, asked.measured)
    if asked.measured is not None:
        how = f"our engine as measured on this machine: {asked.measured.threads} threads, {asked.measured.isa}"
        return Source(Efficiency(measured=asked.measured, absorbed=True), hw, MEASURED[number], (), how)
    if hw.kind == "cpu" and engine is None:
        how = "efficiencies of CPU servers in general: calibrate on the machine itself"
        return Source(prior(hw), hw, (CPU_TPOT, CPU_TTFT)[number], ("UNCALIBRATED",), how)
    if hw.kind == "cpu":
        from coterie.planner.fitted_host import fitted_host

        host = fitted_host(asked.model, hw, asked.layout, str(engine), seconds, prompt=prompt)
        how = f"efficiencies of {engine} on CPUs, {host.seen} measurements of it{_marked(host.flags)}"
        return Source(host.efficiency, host.hardware, host.spread, host.flags, how)
    from coterie.planner.fitted_step import fitted_step

    fit = fitted_step(asked.model, hw, engine, lambda known: seconds(known, hw), "ttft" if prompt else "tpot")
    flags, spread = layout_flags(asked.layout, fit.flags), max(fit.spread, least_spread(asked.layout, fit.flags))
    name = f"of {engine}" if engine else "of no engine in particular (see --engine)"
    how = f"efficiencies {name}, {fit.seen} measurements of its class{_marked(flags)}"
    return Source(fit.efficiency, hw, spread, flags, how, fit.streams)


def _marked(flags: tuple[Flag, ...]) -> str:
    return f": {', '.join(flags)}" if flags else ""


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
    tpot = answer.decode.quantity(answer.decode.cost.tpot, "step-tpot")
    return {"asked": asked.question(**values), **parts, "tpot": tpot, "limits": answer.limits}


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


def limit_lines(answer: Answer) -> list[str]:
    """The three limits of the batch by the decode step and the memory, and which binds."""
    limits, milliseconds = answer.limits, f"{1e3 * answer.slo:g} ms"
    lines = [f"limits of the batch, {answer.point.context:,} tokens each: weights are well used from B_RP "
             f"{number(limits.b_rp.value, '')} on; memory holds B_cap {say(limits.b_cap)}"]  # fmt: skip
    if limits.b_cap.value < 1:
        lines[0] += ": nothing is left beside the weights (see `plan memory`)"
    if limits.b_slo.value < 1:
        alone = number(limits.alone.value, "s")
        lines.append(f"B_SLO 0: one stream takes {alone} a token, more than {milliseconds} (--slo)")
    elif limits.b_slo.value >= MOST:
        lines.append(f"B_SLO: even {MOST:,} requests keep {milliseconds} a token")
    else:
        lines.append(f"{milliseconds} a token (--slo) allow B_SLO {say(limits.b_slo)}; {limits.binds} binds")
    return lines
