"""`coterie plan`: a table of its commands, each in a file of its own, imported only when it is run.

A command that plans a model on devices takes `plan_options` of `cli/plan_options.py` and prints with `show` of
`cli/plan_output.py`. No command imports torch, the engine or the kernels (`calibrate` measures and `record` counts with
them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import click

from coterie.cli.main import VerbGroup, debug_option

COMMANDS: Mapping[str, tuple[str, str]] = {
    "memory": ("coterie.cli.plan_memory:memory", "Show what a rank's memory holds and how many requests fit."),
    "limits": ("coterie.cli.plan_limits:limits", "Show the compute, capacity and latency limits of the batch."),
    "step": ("coterie.cli.plan_step:step", "Show the time of a decode and a prefill step by operation."),
    "calibrate": ("coterie.cli.plan_calibrate:calibrate", "Measure this machine and write a hardware file."),
    "tiers": ("coterie.cli.plan_tiers:tiers", "Experts over device memory, RAM and disk; CPU and GPU together."),
    "pim": ("coterie.cli.plan_pim:pim", "What a processing-in-memory device would change, and up to which batch."),
    "compare": ("coterie.cli.plan_compare:compare", "Set models or layouts side by side."),
    "net": ("coterie.cli.plan_net:net", "Time of an expert exchange by topology and form."),
    "imbalance": ("coterie.cli.plan_imbalance:imbalance", "Busiest expert and rank by skew and placement."),
    "record": ("coterie.cli.plan_record:record", "Count what a model's router asks for on a text."),
    "pods": ("coterie.cli.plan_pods:pods", "One large expert-parallel group against pods."),
    "score": ("coterie.cli.plan_score:score", "Score the planner on published measurements, by kind."),
    "predict": ("coterie.cli.plan_score:predict", "Answer rows of measurements whose value is blank."),
    "serve": ("coterie.cli.plan_serve:serve", "Simulate serving: percentiles, goodput, the largest rate."),
    "search": ("coterie.cli.plan_search:search", "Find the best layout for a load and limits."),
    "ui": ("coterie.cli.plan_ui:ui", "Show a page where everything can be changed and is redrawn."),
    "devices": ("coterie.cli.plan_devices:devices", "List the devices and models that can be named."),
}


class PlanGroup(VerbGroup):
    """The commands of `plan`."""

    verbs: ClassVar[Mapping[str, tuple[str, str]]] = COMMANDS


@click.group(cls=PlanGroup)
@debug_option
def plan() -> None:
    """Say whether a model fits, how fast it will be, and what to deploy.

    MODEL is a folder, a config.json, or the name of a shipped configuration. Only descriptions are read, no weights.
    """
