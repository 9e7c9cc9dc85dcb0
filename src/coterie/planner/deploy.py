"""A layout as a deployment that can be simulated: its cache, its step times, how many ranks step together.

Ranks whose experts are spread over all of them step together; ranks of a dense model, or of whole copies, do not. At
most `MOST_RANKS` are simulated of those that do (all are alike), so that a step costs little; the busiest of so many
stands for the busiest of all. Not here: the search for a layout (`search`), what is simulated (`goodput`, `simulate`).
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.planner.cost import prior
from coterie.planner.goodput import Closed, Deployment, Prefill, closed_form
from coterie.planner.layout import Layout
from coterie.planner.memory import budget
from coterie.planner.search import Search
from coterie.planner.simulate import Policy
from coterie.planner.steptime import step_time
from coterie.spec.errors import SpecError

MOST_RANKS = 32
MOST_RUNNING = 1024
FEWEST, MOST_REQUESTS = 300, 4000
LIVES = 3
"""Requests that are simulated: so many times as many as are in the system at once, so that the start is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Instances that only compute prompts."""

    layout: Layout
    instances: int


def lockstep(search: Search, layout: Layout) -> int:
    """Ranks (attention groups) of an instance that step together."""
    shares = any(search.model.moe_layers()) and layout.dp > 1
    return layout.dp if shares else 1


def policy_of(search: Search, layout: Layout, ranks: int, running: int | None) -> Policy:
    """Limits of a rank. Raises SpecError if its cache holds nothing."""
    load = search.load(None)
    found = budget(search.model, search.hardware, layout, load)
    tokens = int(found.capacity_tokens.value)
    if tokens < load.page:
        raise SpecError(
            f"nothing is left for the cache: a rank needs {found.used / 1e9:.1f} GB of {search.hardware.memory_gb:g}; "
            "use more devices or narrower weights"
        )
    if running is None:
        running = min(MOST_RUNNING, max(1, int(tokens / load.resident)))
    budget_tokens = max(search.chunk, running + running // 3)
    return Policy(token_budget=budget_tokens, max_running=running, cache_tokens=tokens, page=load.page, ranks=ranks)


def deploy(search: Search, pool: Pool | None = None, running: int | None = None) -> Deployment:
    """`search.like` as a deployment, with a pool for prompts if there is one. `running`: requests of a rank at most.

    Raises SpecError if the model does not fit.
    """
    layout = search.like
    together = lockstep(search, layout)
    ranks = min(together, MOST_RANKS)
    policy = policy_of(search, layout, ranks, running)
    context = search.isl + search.osl / 2
    setting = search.setting(layout)
    groups = layout.dp // ranks
    front = search.known.front or prior(search.hardware).step_seconds
    cost = step_time(setting, context, policy.token_budget)
    return Deployment(cost=cost, policy=policy, prefill=None if pool is None else _prefill(search, pool, groups),
                      groups=groups, front=front)  # fmt: skip


def _prefill(search: Search, pool: Pool, groups: int) -> Prefill:
    """The pool as the simulated share of ranks sees it: its ranks divided among the groups."""
    ranks = pool.layout.dp * pool.instances
    if ranks % groups:
        raise SpecError(
            f"{pool.instances} instances of {pool.layout.dp} attention groups for prompts do not divide over {groups} "
            "simulated groups; use a multiple"
        )
    found = budget(search.model, search.hardware, pool.layout, search.load(None))
    gbps = search.hardware.network_gbps or search.hardware.scaleup_gbps
    if not gbps:
        raise SpecError(f"{search.hardware.name} has no links to send the cache over; state network_gbps")
    policy = policy_of(search, pool.layout, 1, None)
    cost = step_time(search.setting(pool.layout), search.isl, policy.token_budget)
    return Prefill(instances=ranks // groups, cost=cost, policy=policy, kv_bytes=found.kv_token.value,
                   layers=len(search.model.layers), link=gbps * 1e9)  # fmt: skip


def enough_requests(where: Deployment, rate: float, closed: Closed, osl: int) -> int:
    """Requests to simulate at a rate, a few times those in the system at once."""
    places = where.policy.max_running * where.policy.ranks
    life = closed.ttft + osl * closed.tpot
    inside = min(rate / where.groups * life, 2.0 * places)
    return int(min(max(LIVES * inside, FEWEST), MOST_REQUESTS))


def likely_rate(search: Search, where: Deployment) -> float:
    """A rate near the largest within the limits, by the closed form, bisected over ten orders."""
    low, high = 1e-4, 1e6
    for _ in range(40):
        middle = (low * high) ** 0.5
        closed = closed_form(where, middle, search.isl, search.osl, search.hit)
        good = closed.load < 0.9 and closed.tpot <= search.slo.tpot and closed.ttft <= search.slo.ttft
        low, high = (middle, high) if good else (low, middle)
    return low


def impossible(search: Search, where: Deployment) -> str:
    """Why not even single requests keep the limits, in one line."""
    new = max(1, round(search.isl * (1 - search.hit)))
    server = where if where.prefill is None else where.prefill
    prompt = server.cost(0, 0, new, new * (search.isl - 0.5 * new)) + where.front
    token = where.cost(1, search.isl)
    lines = []
    if prompt > search.slo.ttft:
        lines.append(
            f"computing the prompt alone takes {1e3 * prompt:.0f} ms of {1e3 * search.slo.ttft:g} to the first token"
        )
    if token > search.slo.tpot:
        shared = where.cost.shared(1.0, 0.0)
        lines.append(f"a step of one stream a rank takes {1e3 * token:.1f} ms of {1e3 * search.slo.tpot:g} a token, "
                     f"{1e3 * shared:.1f} of it experts, exchange and constants")  # fmt: skip
    return "; ".join(lines) or "each limit can be kept, not both for enough requests; lower --attain or allow more"
