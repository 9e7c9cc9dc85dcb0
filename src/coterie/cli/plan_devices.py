"""`coterie plan devices`: the devices and models that can be named, with the numbers that plans use."""

from __future__ import annotations

import click

from coterie.cli.main import debug_option
from coterie.cli.plan_output import number, show_json, table
from coterie.planner.devices import devices as known_devices
from coterie.planner.models import model_names


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print every field of every device.")
@debug_option
def devices(as_json: bool) -> None:
    """List the devices and models that can be named."""
    if as_json:
        show_json({"devices": known_devices(), "models": model_names()})
        return
    rows = [
        [
            each.name,
            f"{each.memory_gb:g}",
            f"{each.memory_gbps:g}",
            f"{each.bf16_tops:g}",
            f"{each.fp8_tops:g}" if each.fp8_tops else "-",
            f"{each.ridge:.0f}",
            f"{each.scaleup_gbps:g} x {each.domain} {each.topology}" if each.scaleup_gbps else "-",
            number(each.network_gbps, "") if each.network_gbps else "-",
        ]
        for each in known_devices()
    ]
    click.echo(table(["device", "GB", "GB/s", "bf16 T", "fp8 T", "op/B", "links GB/s", "net GB/s"], rows))
    click.echo(f"\nmodels: {', '.join(model_names())}")
