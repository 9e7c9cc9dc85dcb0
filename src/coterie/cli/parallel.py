"""Flags of several ranks (`ParallelConfig`), for the verbs that load a model to serve or to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from coterie.cli.common import AT_LEAST_ONE, Decorator
from coterie.cli.ranges import FiniteRange
from coterie.engine.remote import World
from coterie.spec.parallel import ParallelConfig

PARALLEL_NAMES = frozenset(field.name for field in fields(ParallelConfig))
"""Flags that say how many ranks and how they work together."""

PARALLEL_OPTIONS: tuple[Decorator, ...] = (
    click.option("--ep", "--ep-size", "ep", type=AT_LEAST_ONE,
                 help="Ranks (processes) over which the experts are spread. [default: 1]"),
    click.option("--dp", "--dp-size", "dp", type=AT_LEAST_ONE,
                 help="Groups of --tp ranks that answer different requests. [default: --ep / --tp]"),
    click.option("--tp", "--tp-size", "tp", type=AT_LEAST_ONE, default=1, show_default=True,
                 help="Ranks that share requests, with heads and columns of everything that is no expert."),
    click.option("--nodes", "--nnodes", "nodes", type=AT_LEAST_ONE, default=1, show_default=True,
                 help="Groups of ranks with fast links inside."),
    click.option("--redundant-experts", "--ep-num-redundant-experts", "redundant_experts",
                 type=click.IntRange(min=0),
                 help="Slots for second copies in each layer: for balance, and to outlive lost ranks. "
                      "[default: the fewest that divide over the ranks]"),
    click.option("--restart-ranks/--no-restart-ranks", default=True, show_default=True,
                 help="Start a lost rank's process again."),
    click.option("--overlap", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
                 help="Two micro-batches a step, each computing while the other's rows travel; auto measures."),
    click.option("--rebalance-steps", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Steps after which experts may move to ranks with less load, while serving; 0 never."),
    click.option("--rebalance-moves", type=AT_LEAST_ONE, default=8, show_default=True,
                 help="Experts of a layer that may move at once, up to a rank's slots; a rank has buffers for them."),
    click.option("--rebalance-rate", type=FiniteRange(min=0, min_open=True), default=32.0, show_default=True,
                 help="MB a second that a rank sends of moving experts."),
    click.option("--stall-seconds", type=FiniteRange(min=1), default=30.0, show_default=True,
                 help="A rank whose work stands still for so long, without waiting for another, is taken for lost."),
    click.option("--enable-dp-attention", "--enable-expert-parallel", is_flag=True, expose_value=False,
                 help="Accepted and not needed: with several ranks both are so."),
)  # fmt: skip


def parallel_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of several ranks to a command."""
    for option in reversed(PARALLEL_OPTIONS):
        function = option(function)
    return function


def parallel_config(values: Mapping[str, Any], world: World | None = None) -> ParallelConfig:
    """Build the ParallelConfig from a command's values; under torchrun its ranks and nodes are the layout."""
    if world is not None:
        for name, number in (("ep", world.size), ("dp", world.size), ("nodes", world.num_nodes)):
            if values[name] not in (None, 1, number):
                raise click.UsageError(f"torchrun has started {number} for --{name}, not {values[name]}; leave it out")
        values = {**values, "ep": world.size, "dp": None, "nodes": world.num_nodes}
    return ParallelConfig(
        tp=values["tp"],
        dp=values["dp"],
        ep=values["ep"],
        nodes=values["nodes"],
        redundant_experts=values["redundant_experts"],
        restart_ranks=values["restart_ranks"],
        rebalance_steps=values["rebalance_steps"],
        rebalance_moves=values["rebalance_moves"],
        rebalance_rate=values["rebalance_rate"],
        stall_seconds=values["stall_seconds"],
        overlap=values["overlap"],
    )
