"""Published all-to-all measurements as cases of a fit: latencies and bandwidths of dispatch and combine kernels.

The form is `network`'s: bytes of the busiest rank over the links' share that a library reaches, plus a latency. Both
are fitted for each library and direction; what grows with the number of ranks is a power of it. Not here: exchanges
inside a step (`cost`), the paper's simulated ones (`predict`).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from coterie.planner.bayes import Case, Form, Vector
from coterie.planner.data import Row
from coterie.planner.named import device_of, larger_domain, maker_of
from coterie.planner.network import Exchange, Link, all_to_all, ranks_per_domain
from coterie.planner.phrases import Setup, setup
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec

PARAMETERS = ("alpha", "up", "net", "ranks", "alpha-ranks", "bias")
"""What z multiplies: latency, shares of the links inside a domain and of the network, their exponents of ranks / 16,
and everything."""
LEVELS = ("all", "direction", "link", "maker", "library", "library-direction", "library-direction-hardware")
WIDTHS = (
    (0.3, 0.2, 0.2, 0.07, 0.10, 0.04),
    (0.2, 0.1, 0.1, 0.05, 0.05, 0.05),
    (0.3, 0.1, 0.1, 0.05, 0.05, 0.10),
    (0.3, 0.2, 0.2, 0.07, 0.10, 0.04),
    (0.6, 0.3, 0.4, 0.10, 0.10, 0.10),
    (0.2, 0.1, 0.2, 0.10, 0.10, 0.10),
    (0.1, 0.1, 0.1, 0.05, 0.05, 0.05),
)
RESIDUAL = (("library-direction", 2.0), ("library", 2.0))
NOISE = 0.05
ALPHA_SECONDS = 25e-6
UP_SHARE, NET_SHARE = 0.7, 0.8
NETWORK_GBPS = {"cx7": 50.0, "400g": 50.0, "cx8": 100.0, "800g": 100.0, "ibgda": 50.0, "cx6": 25.0, "200g": 25.0}


def exchange_case(row: Row) -> tuple[Case, str]:
    """A row's case and the library it is about. Raises SpecError where the row says too little."""
    said = setup(row)
    if said.decode is None or said.decode.ep < 2:
        raise SpecError(f"row {row.id} does not say over how many ranks it exchanges (EP...)")
    hw = links_of(row, said)
    ranks = said.decode.ep
    direction = "dispatch" if row.quantity.startswith("dispatch") else "combine"
    tokens = said.load.tokens or said.load.per_rank or 128.0
    far = ranks > hw.domain or ("rdma" in f"{row.metric} {row.parallelism}".lower() and ranks > 8)
    place = "network" if far else "scale-up"
    rate = row.quantity.endswith("bandwidth")
    form = bandwidth_form(row, hw, ranks) if rate else latency_form(row, said, hw, (ranks, tokens))
    engine = said.engine
    what = f"{direction}{'-rate' if rate else ''}"
    labels = ("all", direction, place, maker_of(hw), engine, f"{engine}/{what}", f"{engine}/{what}/{hw.name}")
    features = (math.log2(ranks), math.log(tokens) / 2.5, 0.0 if place == "network" else 3.0)
    value = math.log(row.value) if row.value else math.nan
    return Case(row.id, form, labels, features, NOISE, value), engine


def links_of(row: Row, said: Setup) -> HardwareSpec:
    """The device, with the network that the row names."""
    if not said.accelerators:
        raise SpecError(f"row {row.id} names no device")
    hw = larger_domain(device_of(said.accelerators[0][1]), row.hardware)
    for name, rate in NETWORK_GBPS.items():
        if name in row.hardware.lower():
            return replace(hw, network_gbps=rate)
    return hw


def shape_of(row: Row) -> tuple[int, int, int, int]:
    """Hidden size, experts a token, groups and kept groups of "DeepSeek-V3 layer (h7168 top8 top-4 groups)"."""
    hidden = re.search(r"\bh(\d{3,5})", row.model)
    top = re.search(r"top-?(\d+)(?!\d|\s*groups)", row.model)
    groups = re.search(r"top-?(\d+)\s*groups", row.model)
    return (
        int(hidden[1]) if hidden else 7168,
        int(top[1]) if top else 8,
        8 if groups else 1,
        int(groups[1]) if groups else 1,
    )


def value_bytes(precision: str, direction: str) -> float:
    """Bytes of a value that travels, scales included."""
    text = precision.lower()
    if "fp4" in text:
        return 0.5 + 1 / 16
    if "fp8" in text or "int8" in text:
        return 1 + 4 / 128 if "mx" not in text else 1 + 1 / 32
    return 2.0


def latency_form(row: Row, said: Setup, hw: HardwareSpec, size: tuple[int, float]) -> Form:
    """Log of the latency in the row's unit; size: ranks and tokens of each."""
    ranks, tokens = size
    hidden, top_k, _, _ = shape_of(row)
    width = value_bytes(row.precision, row.quantity)
    exchange = Exchange(
        tokens_per_rank=tokens, hidden=hidden, top_k=top_k, ranks=ranks, bytes_out=width, bytes_back=width
    )
    scale = 1e3 if row.unit.lower().startswith("ms") else 1e6

    def form(z: Vector) -> float:
        growth = math.log(ranks / 16)
        alpha = ALPHA_SECONDS * math.exp(z[0] + z[4] * growth)
        slower = math.exp(-z[3] * growth)
        link = Link(alpha=alpha, net_alpha=alpha, share=UP_SHARE * math.exp(z[1]) * slower,
                    net_share=NET_SHARE * math.exp(z[2]) * slower)  # fmt: skip
        return math.log(all_to_all(exchange, hw, link).dispatch * scale) + z[5]

    return form


def bandwidth_form(row: Row, hw: HardwareSpec, ranks: int) -> Form:
    """Log of GB/s: of the link that is waited for, or "logical", bytes of all rows over the time of the slower link."""
    text = f"{row.metric} {row.parallelism}".lower()
    near = "nvlink" in text or (ranks <= hw.domain and "rdma" not in text)
    published = hw.scaleup_gbps if near else hw.network_gbps
    if published <= 0:
        raise SpecError(f"{hw.name} has no {'links inside a node' if near else 'network'}; row {row.id} needs its rate")
    share = UP_SHARE if near else NET_SHARE
    if "logical" in text and not near:
        inside = ranks_per_domain(ranks, hw) if ranks > hw.domain else 8
        share *= ranks / max(ranks - inside, 1)

    def form(z: Vector) -> float:
        return math.log(published * share) + z[1 if near else 2] - z[3] * math.log(ranks / 16) - z[5]

    return form
