"""Times of an expert exchange (dispatch and combine) over a topology: bytes of the busiest rank, alpha and beta.

How many bytes: `Exchange`, from the tokens, the top-k and how often a row is sent (to each expert, rank or node).
Where they pass: the links of `HardwareSpec` inside a scale-up domain (switch, direct mesh, torus, optical circuits) and
the network between domains. How fast software makes that: `Link`. Not here: which rank is busiest (`imbalance`).
Sources: arXiv 2507.15465 (Eq. 13: bytes over bandwidth plus a constant; its constants are the defaults of `Link`),
DeepEP's README (the two kernels: low latency sends a row per expert, normal one per node), Dally and Towles on tori.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec, MoESpec

Form = Literal["copies", "rank", "node"]
"""How often a row travels: once per chosen expert, per rank that holds any of them, per node (passed on inside)."""
FORMS: tuple[Form, ...] = ("copies", "rank", "node")
FP8_ROW = 1 + 4 / 128
"""Bytes of a dispatched value in fp8 with one float32 scale per 128 (DeepEP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one MoE layer sends: `tokens_per_rank` rows of `hidden` values from each rank to `top_k` experts.

    bytes_out, bytes_back: of a value in dispatch and combine. gamma: rows of the busiest rank over the mean (receives
    in dispatch, sends in combine); gamma_node and gamma_pair the same for nodes (form "node") and for pairs of ranks (a
    direct mesh waits for the busiest, `busiest_pair`), 0 for gamma's. experts: in the layer, 0 to draw with
    replacement. groups, kept_groups: group-limited routing. reduced: forms "rank" and "node" return one sum for each
    row that was sent, not one row per expert. Raises SpecError for sizes that cannot be.
    """

    tokens_per_rank: float
    hidden: int
    top_k: int
    ranks: int
    bytes_out: float = 2.0
    bytes_back: float = 2.0
    gamma: float = 1.0
    gamma_node: float = 0.0
    gamma_pair: float = 0.0
    experts: int = 0
    groups: int = 1
    kept_groups: int = 1
    form: Form = "copies"
    reduced: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "form" and not 0 <= value < 1e12:
                raise SpecError(f"{field.name} of an exchange must be a number from 0, not {value}")
        if min(self.ranks, self.hidden, self.top_k) < 1 or self.gamma < 1:
            raise SpecError(
                f"an exchange needs ranks, hidden, top_k and gamma of at least 1, not {self.ranks}, {self.hidden}, "
                f"{self.top_k} and {self.gamma}"
            )
        if self.form not in FORMS:
            raise SpecError(f"there is no form {self.form!r} of an exchange; possible are {', '.join(FORMS)}")

    @classmethod
    def of(cls, model: ModelSpec, tokens_per_rank: float, ranks: int, *, form: Form = "copies") -> Exchange:
        """The exchange of a model's (first) MoE layer in bf16, without skew; `dataclasses.replace` changes the rest."""
        moe = moe_of(model)
        return cls(
            tokens_per_rank=tokens_per_rank,
            hidden=model.hidden_size,
            top_k=moe.top_k,
            ranks=ranks,
            experts=moe.num_experts,
            groups=max(moe.num_groups, 1),
            kept_groups=moe.topk_groups if moe.num_groups > 1 else 1,
            form=form,
        )

    def distinct(self, places: int) -> float:
        """Expected number of `places` (ranks or nodes that share the experts evenly) that a row is needed in."""
        return distinct(places, self.top_k, self.experts, self.groups, self.kept_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What software makes of the links: seconds before the first byte, and the share of the published rate.

    alpha, share: inside the scale-up domain; net_alpha, net_share: between domains. beta, net_beta: bytes a second of
    one device where they are fitted, 0 for share x published. oversubscription: of the network's upper stage.
    pipelined: the two stages of form "node" overlap, else they follow each other. only_network: beyond one domain all
    rows travel by the network, those to neighbours too (the reference paper's rule, and kernels of pure RDMA).
    degree: circuits of a device under an optical switch; duty: time to reconfigure over time between reconfigurations.
    The defaults are the simulator's of arXiv 2507.15465: 0.8 us, 0.13 us, full rate.
    """

    alpha: float = 0.8e-6
    beta: float = 0.0
    share: float = 1.0
    net_alpha: float = 0.13e-6
    net_beta: float = 0.0
    net_share: float = 1.0
    oversubscription: float = 1.0
    pipelined: bool = True
    only_network: bool = False
    degree: int = 6
    duty: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < 1e15:
                raise SpecError(f"{field.name} of a link must be a number from 0, not {getattr(self, field.name)}")
        if min(self.share, self.net_share) <= 0 or self.oversubscription < 1 or self.degree < 1:
            raise SpecError("share and net_share of a link must be above 0, oversubscription and degree at least 1")


PAPER = Link()


@dataclass(frozen=True, slots=True)
class Transfer:
    """dispatch, combine: seconds. Bytes out of (or into) the busiest rank, by where they pass. `bound`: what is waited
    for in dispatch: "scale-up", "network", or "none" on one rank."""

    dispatch: float
    combine: float
    up_bytes: float
    net_bytes: float
    back_up_bytes: float
    back_net_bytes: float
    nodes: int
    bound: Literal["scale-up", "network", "none"]

    @property
    def seconds(self) -> float:
        """Dispatch and combine of one layer."""
        return self.dispatch + self.combine


def moe_of(model: ModelSpec) -> MoESpec:
    """The model's first MoE layer. Raises SpecError for a dense model."""
    for _, moe in model.moe_layers():
        return moe
    raise SpecError(f"{model.model_type} has no MoE layer, so no rows travel between ranks")


@lru_cache(maxsize=4096)
def distinct(places: int, top_k: int, experts: int = 0, groups: int = 1, kept_groups: int = 1) -> float:
    """Expected number of places, of `places` that share the experts evenly, among the top-k choices of a row.

    experts = 0: P (1 - (1 - 1/P)^k), draws with replacement. Otherwise without: P (1 - C(E - E/P, k) / C(E, k)). With
    groups, the same given which of a place's groups are kept, if places hold whole groups (hypergeometric); at most
    `kept_groups` places then.
    """
    if places <= 1:
        return 1.0
    if not experts:
        return places * (1 - (1 - 1 / places) ** top_k)
    if groups > 1 and groups % places == 0:
        own, size = groups // places, experts // groups
        missed = sum(
            _choose(own, kept) * _choose(groups - own, kept_groups - kept) / _choose(groups, kept_groups)
            * _missed((kept_groups - kept) * size, kept_groups * size, top_k)
            for kept in range(min(own, kept_groups) + 1)
        )  # fmt: skip
        return places * (1 - missed)
    if groups > 1 and places % groups == 0:
        kept = kept_groups * experts / groups
        return places * kept_groups / groups * (1 - _missed(kept - experts / places, kept, top_k))
    return places * (1 - _missed(experts - experts / places, experts, top_k))


def _choose(number: int, part: int) -> float:
    return float(math.comb(number, part)) if 0 <= part <= number else 0.0


def _missed(others: float, experts: float, top_k: int) -> float:
    """C(others, k) / C(experts, k), also between whole numbers: none of k draws falls on the rest (0: one must)."""
    if top_k > others + 1:
        return 0.0
    return math.prod(max(others - draw, 0.0) / (experts - draw) for draw in range(top_k))


def ranks_per_domain(ranks: int, hw: HardwareSpec) -> int:
    """Ranks in each scale-up domain: the largest number that divides them evenly and fits in one."""
    return next(size for size in range(min(ranks, hw.domain), 0, -1) if ranks % size == 0)


def all_to_all(exchange: Exchange, hw: HardwareSpec, link: Link = PAPER) -> Transfer:
    """Dispatch and combine of one layer. Raises SpecError for devices without the links that the ranks need.

    Rows to the rank itself do not travel. Inside one domain T = alpha + time of the topology. Beyond, forms "copies"
    and "rank" use both kinds of links at once: T is the later of the two; form "node" sends along rails (to the rank
    with the sender's place) and passes on inside: the later of the two stages plus both alphas, or their sum.
    """
    if exchange.ranks == 1:
        return Transfer(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1, "none")
    per_node = 1 if link.only_network and exchange.ranks > hw.domain else ranks_per_domain(exchange.ranks, hw)
    out = _volumes(exchange, per_node, exchange.bytes_out)
    straight = exchange.form == "copies" or not exchange.reduced
    back = _volumes(exchange, per_node, exchange.bytes_back, copies=straight)
    dispatch, bound = _seconds(exchange, hw, link, per_node, out)
    combine, _ = _seconds(exchange, hw, link, per_node, back)
    busiest = exchange.gamma
    return Transfer(
        dispatch, combine, out.up * busiest, out.net * out.net_gamma, back.up * busiest, back.net * back.net_gamma,
        exchange.ranks // per_node, bound,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Volume:
    """Mean bytes that a rank sends inside its node and between nodes, the latter's skew, and whether in two stages."""

    up: float
    net: float
    net_gamma: float
    staged: bool


def _volumes(exchange: Exchange, per_node: int, value_bytes: float, *, copies: bool = False) -> _Volume:
    ranks = exchange.ranks
    row = exchange.tokens_per_rank * exchange.hidden * value_bytes
    if copies or exchange.form == "copies":
        each = row * exchange.top_k / ranks
        return _Volume(each * (per_node - 1), each * (ranks - per_node), exchange.gamma, staged=False)
    needed = row * exchange.distinct(ranks)
    if exchange.form == "rank" or per_node == ranks:
        each = needed / ranks
        return _Volume(each * (per_node - 1), each * (ranks - per_node), exchange.gamma, staged=False)
    nodes = ranks // per_node
    to_nodes = row * exchange.distinct(nodes) * (nodes - 1) / nodes
    return _Volume(needed * (per_node - 1) / per_node, to_nodes, exchange.gamma_node or exchange.gamma, staged=True)


def _seconds(
    exchange: Exchange, hw: HardwareSpec, link: Link, per_node: int, volume: _Volume
) -> tuple[float, Literal["scale-up", "network"]]:
    pairs = exchange.gamma_pair if hw.topology == "mesh" else 0.0
    up = _up_seconds(volume.up, pairs or exchange.gamma, per_node, hw, link) if per_node > 1 else 0.0
    up_alpha = link.alpha if per_node > 1 else 0.0
    if per_node == exchange.ranks:
        return up_alpha + up, "scale-up"
    net = volume.net * volume.net_gamma * link.oversubscription / _net_rate(hw, link)
    bound: Literal["scale-up", "network"] = "scale-up" if up > net else "network"
    if not volume.staged:
        return max(up_alpha + up, link.net_alpha + net), bound
    return up_alpha + link.net_alpha + (max(up, net) if link.pipelined else up + net), bound


def _net_rate(hw: HardwareSpec, link: Link) -> float:
    """Bytes a second of one device between domains; cards in one host without a network use their host link."""
    published = hw.network_gbps or (hw.scaleup_gbps if hw.domain == 1 else 0.0)
    if not link.net_beta and not published:
        raise SpecError(
            f"{hw.name} has no network between its domains of {hw.domain}: use at most {hw.domain} ranks, or a "
            "hardware file with network_gbps"
        )
    return link.net_beta or published * 1e9 * link.net_share


def _up_seconds(volume: float, gamma: float, ranks: int, hw: HardwareSpec, link: Link) -> float:
    """Seconds without alpha for `volume` mean bytes from each of `ranks` devices of a domain to the others, evenly.

    switch: gamma V / beta. mesh: each pair has its own link, beta / (domain - 1), so fewer ranks have fewer links.
    torus: `torus_load`. ocs: V x hops of the best graph of that degree / beta, and the duty loss.
    """
    rate = link.beta or hw.scaleup_gbps * 1e9 * link.share
    if rate <= 0:
        raise SpecError(f"{hw.name} has no scale-up links: use one rank, or a hardware file with scaleup_gbps")
    match hw.topology:
        case "switch":
            return gamma * volume / rate
        case "mesh":
            return gamma * volume / (ranks - 1) * (max(hw.domain, ranks) - 1) / rate
        case "ocs":
            return gamma * volume * circuit_hops(ranks, link.degree) / rate * (1 + link.duty)
    sides = torus_sides(ranks, 2 if hw.topology == "torus2d" else 3)
    dimensions = 2 if hw.topology == "torus2d" else 3
    return torus_load(sides, gamma) * volume * ranks / (ranks - 1) / (rate / (2 * dimensions))


def busiest_pair(exchange: Exchange) -> float:
    """Rows of the busiest pair of ranks over the mean: chance (a Poisson count's normal limit and the expected largest
    of so many, by Blom's plotting position), among all pairs or among those of the busiest rank."""
    ranks = exchange.ranks
    if ranks < 2:
        return 1.0
    each = exchange.top_k if exchange.form == "copies" else exchange.distinct(ranks)
    mean = max(exchange.tokens_per_rank * each / ranks, 1e-9)
    tops = [(1.0, ranks * (ranks - 1)), (exchange.gamma, ranks - 1)]
    heights = [NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) for _, number in tops]
    return max(
        gamma + max(height, 0.0) * math.sqrt(gamma / mean) for (gamma, _), height in zip(tops, heights, strict=True)
    )


def torus_sides(ranks: int, dimensions: int) -> tuple[int, ...]:
    """The sub-torus of so many ranks whose longest side is shortest, longest side first."""
    if dimensions == 1:
        return (ranks,)
    best: tuple[int, ...] = (ranks, *(1,) * (dimensions - 1))
    for side in range(1, ranks + 1):
        if ranks % side == 0:
            found = tuple(sorted((side, *torus_sides(ranks // side, dimensions - 1)), reverse=True))
            best = min(best, found)
    return best


def ring_hops(side: int) -> float:
    """Mean distance on a ring from a node to all nodes, itself included: side / 4 if even."""
    return side * side // 4 / side


def torus_load(sides: tuple[int, ...], gamma: float = 1.0) -> float:
    """Load of the busiest link, in units of what each node sends, spread evenly over all nodes (itself included).

    Dimension order, two directions. Even traffic loads a link of a ring of k with k/8 (Dally and Towles). One hot node
    gets `gamma` parts and the others (R - gamma) / (R - 1): its share, in the i-th dimension that is passed, converges
    from a line of k_i over the rest's product of places.
    """
    ranks = math.prod(sides)
    gamma = min(gamma, ranks)
    rest = (ranks - gamma) / (ranks - 1) if ranks > 1 else 1.0
    loads, later = [], 1
    for side in sides[::-1]:
        loads.append(rest * ring_hops(side) / 2 + (gamma - rest) * (side - 1) / (2 * side * later))
        later *= side
    return max(loads)


def circuit_hops(ranks: int, degree: int) -> float:
    """Least mean distance to the other nodes in a graph of that degree (Moore bound): what fixed circuits cost."""
    if ranks <= 1:
        return 0.0
    left, layer, distance, total = ranks - 1, degree, 1, 0
    while left > 0:
        reached = min(left, layer) if layer else left
        total += reached * distance
        left -= reached
        layer *= max(degree - 1, 1)
        distance += 1
    return total / (ranks - 1)
