"""The same exchange over other topologies: what a device's links would give as a switch, a mesh, tori or circuits.

Each row is one way to connect and to send, priced by `network.all_to_all`, so that they can be set side by side. The
links of a device keep their bandwidth; only what they connect changes. Not here: which rank is busiest (`imbalance`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.planner.network import Exchange, Form, Link, Transfer, all_to_all, torus_sides
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec, Topology

WHAT_IF: tuple[tuple[str, Topology], ...] = (
    ("one switch", "switch"), ("direct mesh", "mesh"), ("2D torus", "torus2d"), ("3D torus", "torus3d"),
    ("optical circuits", "ocs"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """One way to send. `transfer` None where the device lacks the links, `why` says which. own: as the device is."""

    name: str
    form: Form
    transfer: Transfer | None
    own: bool
    why: str = ""


def ways(exchange: Exchange, hw: HardwareSpec, link: Link) -> list[Way]:
    """The device as it is (once per expert, per rank and per node), all by the network, then every topology over all
    ranks as one domain."""
    apart = exchange.ranks > hw.domain
    name = f"{hw.topology} of {hw.domain}" + (" and network" if apart else "")
    own: tuple[Form, ...] = ("copies", "rank", "node") if apart else ("copies", "rank")
    found = [_way(name, replace(exchange, form=form), hw, link, own=True) for form in own]
    if hw.network_gbps:
        found.append(_way("network only", exchange, replace(hw, domain=1), replace(link, only_network=True)))
    for title, topology in WHAT_IF:
        if not apart and topology == hw.topology:
            continue
        wide = replace(hw, topology=topology, domain=exchange.ranks)
        if topology in ("torus2d", "torus3d"):
            title += " " + " x ".join(map(str, torus_sides(exchange.ranks, 2 if topology == "torus2d" else 3)))
        found.append(_way(title, exchange, wide, link))
    return found


def _way(name: str, exchange: Exchange, hw: HardwareSpec, link: Link, *, own: bool = False) -> Way:
    try:
        return Way(name, exchange.form, all_to_all(exchange, hw, link), own)
    except SpecError as error:
        return Way(name, exchange.form, None, own, str(error))
