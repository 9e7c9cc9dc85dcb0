"""`coterie plan ui`: the what-if page on this machine's loopback address, until Ctrl-C."""

from __future__ import annotations

import webbrowser

import click

from coterie.cli.main import debug_option
from coterie.cli.plan_options import read_model
from coterie.planner.layout import WeightName
from coterie.planner.page import offer, page_server
from coterie.spec.model import ModelSpec


def first_of(text: str) -> tuple[str, ModelSpec, WeightName | None]:
    """(name, description, format of the feed-forwards that the files hold) of the model that is shown first."""
    name, spec, stored = read_model(text)
    return name, spec, stored.weights


@click.command()
@click.argument("model", default="DeepSeek-R1")
@click.option("--hardware", "--hw", "hardware", default="b200", show_default=True, metavar="NAME|FILE",
              help="The device that is shown first.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=8010, show_default=True, help="0 takes a free one.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@debug_option
def ui(model: str, hardware: str, port: int, opens: bool) -> None:
    """Show a page where model, device, load and limits can be changed and the plan is redrawn."""
    offered = offer(model, hardware, first_of)
    with page_server(offered, port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        click.echo(f"{address} (Ctrl-C ends it)")
        if opens:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("ended", err=True)
