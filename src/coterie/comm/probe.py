"""What the links between ranks can do, measured once at start, and the times of the forms that are expected of it.

Every rank sends at once, as in an exchange, so a link that ranks share is measured shared. The slowest rank's numbers
count, and they are gathered, so all ranks come to the same choice and can say why. The expected bytes assume that
routing is uniform. Expectations are right to about a fifth: forms that come nearer are measured (`comm.form_choice`).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np

from coterie.comm.exchange import FormName, FormPolicy
from coterie.comm.mesh import Mesh
from coterie.comm.transport import Handle, Transport
from coterie.kernels.select import Choice

PROBE_BYTES = 1 << 20
ROUNDS = 5
"""Of each measurement; the median counts."""

REDUCED: dict[FormName, FormName] = {"flat": "flat-reduced", "hierarchical": "hierarchical-reduced"}

MARGIN = 0.95
"""A form must be expected to take at most this much of the flat form's time to be preferred to it."""


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds of a small exchange among all ranks, and bytes per second of each rank inside its node and between nodes
    while all send. `between` equals `inside` where there is one node."""

    latency: float
    inside: float
    between: float

    def __str__(self) -> str:
        rates = f"{self.inside / 1e6:.0f} MB/s a rank inside a node"
        if self.between != self.inside:
            rates += f", {self.between / 1e6:.1f} MB/s between nodes"
        return f"{self.latency * 1e3:.2f} ms a small exchange, {rates}"


def probe_links(mesh: Mesh, nbytes: int = PROBE_BYTES) -> Generator[Handle, None, Links]:
    """Measure with `nbytes` a rank, on all ranks at the same time."""
    latency = yield from _median(mesh.world, 0)
    inside = yield from _median(mesh.node or mesh.world, nbytes)
    between = inside
    if mesh.rail is not None:
        between = yield from _median(mesh.rail, nbytes)
    own = np.array([latency, inside, between])
    handle = mesh.world.all_gather(own.view(np.int64))
    yield handle
    slowest = handle.result().view(np.float64).max(0)
    return Links(float(slowest[0]), nbytes / float(slowest[1]), nbytes / float(slowest[2]))


def _median(group: Transport, nbytes: int) -> Generator[Handle, None, float]:
    """Seconds in which every rank of a group sends `nbytes` in equal parts to the others; 0: a gather."""
    others = max(group.size - 1, 1)
    counts = np.full(group.size, nbytes // others, np.int64)
    counts[group.rank] = 0
    rows, seconds = np.zeros((int(counts.sum()), 1), np.uint8), []
    for _ in range(ROUNDS):
        ready = group.all_gather(np.zeros(1, np.int64))  # start together
        yield ready
        ready.result()
        start = time.monotonic()
        handle = group.all_to_all_v(rows, counts, counts) if nbytes else group.all_gather(np.zeros(1, np.int64))
        yield handle
        handle.result()
        seconds.append(max(time.monotonic() - start, 1e-6))
    return float(np.median(seconds))


@dataclass(frozen=True, slots=True)
class Traffic:
    """A layer's exchange as the choice sees it: `tokens` a rank in a long step, `small` in a short one (or 0).
    `out_bytes`, `back_bytes`: of a row on its way to an expert, without its slots, and of an output on its way back."""

    out_bytes: int
    back_bytes: int
    top_k: int
    tokens: int
    small: int = 0

    def packed(self, *, weighted: bool) -> int:
        """Bytes of a row with its slots, and with its weights."""
        return self.out_bytes + 4 * self.top_k * (2 if weighted else 1)


def expected_seconds(form: FormName, mesh: Mesh, links: Links, traffic: Traffic) -> float:
    """Dispatch and combine of `traffic.tokens` uniformly routed tokens a rank."""
    ranks, nodes, top_k = mesh.world.size, mesh.num_nodes, traffic.top_k
    local = ranks / nodes
    to_ranks, to_nodes = _distinct(ranks, top_k), _distinct(nodes, top_k)
    reduced = form.endswith("reduced")
    if form.startswith("hierarchical"):
        between, inside = to_nodes * (nodes - 1) / nodes, to_ranks * (local - 1) / local
        exchanges = 5 if reduced else 4
    else:
        between, inside = to_ranks * (ranks - local) / ranks, to_ranks * (local - 1) / ranks
        exchanges = 3
    back = (between, inside) if reduced else (top_k * (ranks - local) / ranks, top_k * (local - 1) / ranks)
    out = traffic.packed(weighted=reduced) * (between / links.between + inside / links.inside)
    home = traffic.back_bytes * (back[0] / links.between + back[1] / links.inside)
    return exchanges * links.latency + traffic.tokens * (out + home)


def _distinct(places: float, draws: int) -> float:
    """Expected number of distinct places that `draws` uniform draws hit."""
    return float(places * (1 - (1 - 1 / places) ** draws))


def exact_forms(mesh: Mesh) -> list[FormName]:
    """The forms that give every token the bits of one rank, on this mesh."""
    return ["flat", "hierarchical"] if mesh.has_rails else ["flat"]


def choose(mesh: Mesh, links: Links, traffic: Traffic, *, exact: bool = True) -> tuple[FormPolicy, tuple[Choice, ...]]:
    """The policy with the least expected time, and why. `exact` False lets the reduced forms compete as well."""
    forms = exact_forms(mesh)
    if not exact:
        forms = [name for form in forms for name in (form, REDUCED[form])]
    seconds = {form: expected_seconds(form, mesh, links, traffic) for form in forms}
    best = min(forms, key=lambda form: seconds[form])
    if seconds[best] > MARGIN * seconds["flat"]:
        best = "flat"
    times = ", ".join(f"{form} {seconds[form] * 1e3:.1f} ms" for form in forms)
    why = f"{links}; expected for {traffic.tokens} tokens a rank: {times}"
    if not mesh.has_rails:
        why += "; one node, or nodes of unequal size: no hierarchy"
    chosen, policy = [Choice("exchange", best, why)], FormPolicy(best)
    if traffic.small and policy.exact:
        policy, choice = choose_short(policy, mesh, links, traffic)
        chosen.append(choice)
    return policy, tuple(chosen)


def fixed_seconds(mesh: Mesh, links: Links, traffic: Traffic) -> float:
    """The same in messages of fixed capacity of a short step: padded ways out, and one round trip less."""
    ranks, local = mesh.world.size, mesh.world.size / mesh.num_nodes
    row, back = traffic.packed(weighted=False), traffic.back_bytes * traffic.top_k / ranks
    padded = (ranks - local) * (row + back) / links.between + (local - 1) * (row + back) / links.inside
    return 2 * links.latency + traffic.small * padded


def choose_short(policy: FormPolicy, mesh: Mesh, links: Links, traffic: Traffic) -> tuple[FormPolicy, Choice]:
    """Whether short steps use messages of fixed capacity: the padding must cost less than the round trips it saves."""
    sized = expected_seconds(policy.sized, mesh, links, replace(traffic, tokens=traffic.small))
    fixed = fixed_seconds(mesh, links, traffic)
    text = f"{traffic.small} tokens a rank: fixed capacity {fixed * 1e3:.2f} ms, {policy.sized} {sized * 1e3:.2f} ms"
    if fixed < sized:
        return replace(policy, capacity=traffic.small), Choice("exchange in short steps", "fixed capacity", text)
    return replace(policy, capacity=0), Choice("exchange in short steps", policy.sized, text)
