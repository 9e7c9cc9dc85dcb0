"""The same exchange over other topologies: what a device's links would give as a switch, a mesh, tori or circuits.

Each row is one way to connect and to send, priced by `network.all_to_all`, so that they can be set side by side. The
links of a device keep their bandwidth; only what they connect changes. Beside them stand published measurements of the
same exchange, from the shipped table. Not here: which rank is busiest (`imbalance`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from coterie.planner.data import Row, shipped_rows
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


@dataclass(frozen=True, slots=True)
class Published:
    """A measured exchange of the same rows: `what` kernels and ranks, seconds."""

    id: str
    hardware: str
    what: str
    precision: str
    seconds: float
    source: str


def published(exchange: Exchange) -> list[Published]:
    """Published latencies of this exchange's width, top-k, ranks and tokens, on whatever hardware."""
    found = []
    for row in shipped_rows():
        said = [re.search(pattern, text) for pattern, text in _said(row)]
        if row.quantity not in ("dispatch", "combine") or row.value is None or not all(said):
            continue
        hidden, top_k, ranks, tokens = (int(each[1]) for each in said if each is not None)
        if (hidden, top_k, ranks, tokens) == (
            exchange.hidden, exchange.top_k, exchange.ranks, round(exchange.tokens_per_rank),
        ):  # fmt: skip
            seconds = row.value * _UNITS.get(row.unit.split()[0], math.nan)
            found.append(Published(row.id, row.hardware, row.parallelism, row.precision, seconds, row.source))
    return found


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _said(row: Row) -> tuple[tuple[str, str], ...]:
    """(pattern, text) of hidden size, top-k, ranks and tokens of a rank."""
    return (
        (r"\bh(\d+)", row.model), (r"top-?(\d+)", row.model), (r"\bEP(\d+)", row.parallelism),
        (r"(\d+) tokens", row.load),
    )  # fmt: skip


def _way(name: str, exchange: Exchange, hw: HardwareSpec, link: Link, *, own: bool = False) -> Way:
    try:
        return Way(name, exchange.form, all_to_all(exchange, hw, link), own)
    except SpecError as error:
        return Way(name, exchange.form, None, own, str(error))
