"""`coterie plan pods`: one large expert-parallel group against pods, as a map over skew, context and balancing."""

from __future__ import annotations

from typing import Any

import click

from coterie.cli.plan_options import Asked, plan_options
from coterie.cli.plan_output import show_json, table
from coterie.cli.ranges import FiniteRange
from coterie.planner.cost import prior
from coterie.planner.imbalance import TooLarge
from coterie.planner.pods import IDEAL, Contest, Side, contest_sides, crossing
from coterie.planner.quantity import sure
from coterie.planner.skew import Skew

CASES = (("random", False, 0), ("balanced", True, 0), ("balanced, one copy a rank", True, 1))
"""How experts are placed: name, balanced, extra slots on each rank."""


@click.command()
@plan_options
@click.option("--pod", type=click.IntRange(1, 65536), default=32, show_default=True, help="Devices of a pod.")
@click.option(
    "--requests",
    type=FiniteRange(1e-3, 1e6),
    multiple=True,
    default=(81.0, 281.0),
    show_default=True,
    help="Requests on each device; may be given several times.",
)
@click.option(
    "--context",
    type=FiniteRange(1, 1e8),
    multiple=True,
    default=(2048.0, 16384.0),
    show_default=True,
    help="Tokens of each request; may be given several times.",
)
@click.option(
    "--zipf",
    type=FiniteRange(0, 10),
    multiple=True,
    default=(0.0, 0.2, 0.4, 0.6, 0.8),
    show_default=True,
    help="Exponent of the experts' use; may be given several times.",
)
@click.option(
    "--group-gbps",
    type=FiniteRange(0, 1e6),
    default=0.0,
    help="Links of a device in the large group, GB/s a direction. [default: as in a pod]",
)
@click.option("--software", is_flag=True, help="With the planner's efficiencies, not at every rate's peak.")
def pods(
    asked: Asked, pod: int, requests: tuple[float, ...], context: tuple[float, ...], zipf: tuple[float, ...],
    group_gbps: float, software: bool,
) -> None:  # fmt: skip
    """Compare -n devices in one expert-parallel group with pods of fewer.

    Numbers are the step time of the large group over that of a pod at equal requests a device: above 1 pods win.
    """
    eff = prior(asked.hardware) if software else IDEAL
    skews = sorted(zipf)
    found, notes = [], dict[str, None]()
    for placement, balanced, copies in CASES:
        for many in requests:
            for length in context:
                contest = Contest(
                    group=asked.layout.devices, pod=pod, requests=many, context=length, group_gbps=group_gbps,
                    balanced=balanced, copies=copies, weights=asked.layout.weights, kv=asked.layout.kv,
                )  # fmt: skip
                try:
                    sides = [
                        contest_sides(asked.model, asked.hardware, contest, Skew.parse(f"zipf:{s:g}"), eff)
                        for s in skews
                    ]
                except TooLarge as error:
                    notes[str(error)] = None
                    continue
                found.append((placement, contest, sides))
    if asked.as_json:
        show_json({"asked": asked.question(pod=pod, zipf=skews, group_gbps=group_gbps, software=software),
                   "rows": [_row(*each) for each in found], "notes": list(notes)})  # fmt: skip
        return
    click.echo(
        f"{asked.name}, {asked.layout.weights} weights, on {asked.layout.devices} x {asked.hardware.name}: step time "
        f"in one group over that in pods of {pod} (above 1: pods win), by Zipf exponent s of the experts' use\n"
    )
    rows = []
    for placement, contest, sides in found:
        ratios = [group.seconds / one.seconds for group, one in sides]
        meets = [crossing(skews, ratios, level) for level in (1.0, 1.18)]
        rows.append([placement, f"{contest.requests:g}", f"{contest.context:g}", *[f"{ratio:.2f}" for ratio in ratios],
                     *["never" if s is None else f"{s:.2f}" for s in meets]])  # fmt: skip
    click.echo(table(["placement", "requests", "context", *[f"s={s:g}" for s in skews], "even at", "18 % at"], rows))
    group, one = found[0][2][-1]
    click.echo(
        f"\nbusiest rank over the mean at s={skews[-1]:g}, random: {group.gamma:.2f} in the group, {one.gamma:.2f} in "
        "a pod; requests are those of one device, context that of one request"
    )
    for note in notes:
        click.echo(f"\n-: {note}")


def _row(placement: str, contest: Contest, sides: list[tuple[Side, Side]]) -> dict[str, Any]:
    return {
        "asked": {"requests": contest.requests, "context": contest.context},
        "placement": placement,
        "ratio": [sure(group.seconds / one.seconds, "ratio", "pods", "assumed") for group, one in sides],
        "group_seconds": [sure(group.seconds, "s", "decode-step", "assumed") for group, _ in sides],
        "pod_seconds": [sure(one.seconds, "s", "decode-step", "assumed") for _, one in sides],
        "group_gamma": [sure(group.gamma, "ratio", "gamma-rank", "assumed") for group, _ in sides],
        "pod_gamma": [sure(one.gamma, "ratio", "gamma-rank", "assumed") for _, one in sides],
    }  # fmt: skip
