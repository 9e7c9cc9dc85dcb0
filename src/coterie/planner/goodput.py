"""What a deployment serves: percentiles of the simulation, goodput by rate, the largest rate in the SLO, closed form.

A `Deployment` is one group of ranks that do everything, or a pool of prefill instances that send cache rows to such a
group (disaggregated). Definitions: TTFT from arrival to the first token, TPOT (end - first) / (tokens - 1), goodput the
rate of requests that meet both limits. Not here: step times (`steptime`), the rules of a step (`simulate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.planner.simulate import Policy, Run, StepTime, simulate
from coterie.planner.workload import Requests, Slo
from coterie.spec.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A pool of `instances` that only compute prompts. `kv_bytes`: cache bytes of a token over all layers, `layers` of
    them sent as they are computed, at `link` bytes a second per instance."""

    instances: int
    cost: StepTime
    policy: Policy
    kv_bytes: float
    layers: int
    link: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Ranks that decode (and prefill, where `prefill` is None) and the share of the whole traffic that is simulated:
    `groups` of `policy.ranks` ranks are alike, one of them is looked at. `front`: seconds of everything before and
    after the engine."""

    cost: StepTime
    policy: Policy
    prefill: Prefill | None = None
    groups: int = 1
    front: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """A simulated rate. Arrays over the requests that count (`ttft`, `tpot` [M] in seconds; tpot 0 for one token)."""

    rate: float
    ttft: NDArray[np.float64]
    tpot: NDArray[np.float64]
    e2e: NDArray[np.float64]
    utilisation: float
    batch: float
    saturated: bool
    tokens_per_second: float
    run: Run

    def goodput(self, slo: Slo) -> float:
        """Share of requests that meet both limits."""
        return float(((self.ttft <= slo.ttft) & (self.tpot <= slo.tpot)).mean())

    def meets(self, slo: Slo) -> bool:
        return not self.saturated and self.goodput(slo) >= slo.attain

    def percentiles(self, quantities: Iterable[int] = (50, 95, 99)) -> dict[str, dict[int, float]]:
        """Seconds by metric and percentile."""
        parts = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {name: {q: float(np.percentile(values, q)) for q in quantities} for name, values in parts.items()}


def serve(requests: Requests, where: Deployment, rate: float) -> Served:
    """Simulate the requests at `rate` a second over the whole deployment.

    The first and the last tenth of the arrivals are run but not counted: the system fills and empties.
    """
    group = requests.at_rate(rate / where.groups)
    if where.prefill is None:
        run = simulate(group, where.policy, where.cost)
        first, end, load = run.first, run.end, _utilisation(run, group)
    else:
        first, end, run, load = _disaggregated(group, where.prefill, where)
    cut = len(group) // 10
    kept = slice(cut, len(group) - cut) if len(group) >= 20 else slice(None)
    ttft = (first - group.arrival + where.front)[kept]
    tpot = ((end - first) / np.maximum(group.osl - 1, 1))[kept]
    spans = (end - group.arrival + where.front)[kept]
    span = float(run.end.max() - group.arrival[0]) or 1.0
    batch = run.streams / max(run.busy, 1e-12) / where.policy.ranks
    rate_out = float(group.osl.sum()) / span * where.groups
    return Served(rate, ttft, tpot, spans, load, batch, _grows(ttft, group.arrival[kept]), rate_out, run)


def _utilisation(run: Run, requests: Requests) -> float:
    """Share of the time of arrivals in which work was there to be done, counting what was left over as above 1."""
    window = float(requests.arrival[-1]) or 1.0
    return run.busy / window if len(requests) > 1 else 0.0


def _grows(waits: NDArray[np.float64], arrival: NDArray[np.float64]) -> bool:
    """Whether waiting grows with time by more than a twentieth of it: the queue has no steady state at this rate."""
    span = float(np.ptp(arrival)) if len(arrival) > 1 else 0.0
    if len(waits) < 40 or span <= 0 or float(waits.std()) < 1e-3 * span:
        return False
    slope = float(np.polyfit(arrival - arrival[0], waits, 1)[0])
    return slope > 0.05 and float(np.corrcoef(arrival, waits)[0, 1]) > 0.5


def _disaggregated(
    requests: Requests, pool: Prefill, where: Deployment
) -> tuple[NDArray[np.float64], NDArray[np.float64], Run, float]:
    """(first tokens, ends, the decode group's run, the busier pool's utilisation). Instances take requests in turn."""
    ready = np.zeros(len(requests))
    busy = 0.0
    prompts = replace(requests, osl=np.ones_like(requests.osl))
    for instance in range(pool.instances):
        mine = np.arange(instance, len(requests), pool.instances)
        if not len(mine):
            continue
        part = Requests(prompts.arrival[mine], prompts.isl[mine], prompts.osl[mine], prompts.cached[mine])
        run = simulate(part, pool.policy, pool.cost)
        ready[mine] = _transferred(run, part, pool)
        busy = max(busy, _utilisation(run, requests))
    order = np.argsort(ready, kind="stable")
    order = order[requests.osl[order] > 1]
    first, end = ready.copy(), ready.copy()
    if not len(order):
        return first, end, run, busy
    joined = Requests(ready[order], requests.isl[order], requests.osl[order], requests.isl[order])
    decode = simulate(joined, where.policy, where.cost)
    end[order] = decode.end
    return first, end, decode, busy


def _transferred(run: Run, requests: Requests, pool: Prefill) -> NDArray[np.float64]:
    """When the cache rows of each prompt have arrived: layers are sent as they are done, one prompt at a time on the
    link, the last layer after the prompt has ended."""
    seconds = requests.isl * pool.kv_bytes / pool.link
    arrived = np.empty(len(requests))
    link_free = 0.0
    for index in np.argsort(run.first, kind="stable"):
        begun = max(link_free, float(run.start[index]))
        link_free = max(begun + seconds[index], float(run.first[index]) + seconds[index] / pool.layers)
        arrived[index] = link_free
    return arrived


def largest_rate(requests: Requests, where: Deployment, slo: Slo, guess: float) -> tuple[Served | None, list[Served]]:
    """(the largest rate that meets the SLO, all that was tried, by rate): growing steps from `guess`, then bisection to
    3 %. None where not even requests that come one at a time meet it: the deployment is too slow, not too busy."""
    tried: list[Served] = []

    def probe(rate: float) -> bool:
        tried.append(serve(requests, where, rate))
        return tried[-1].meets(slo)

    low, high, factor = guess, guess, 1.25
    if probe(guess):
        for _ in range(20):
            high, factor = low * factor, min(factor * factor, 4.0)
            if not probe(high):
                break
            low = high
    else:
        for _ in range(10):
            low, factor = high / factor, min(factor * factor, 4.0)
            if probe(low):
                break
            high = low
    while any(each.meets(slo) for each in tried) and high > 1.03 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if probe(middle) else (low, middle)
    tried.sort(key=lambda each: each.rate)
    return max((each for each in tried if each.meets(slo)), key=lambda each: each.rate, default=None), tried


@dataclass(frozen=True, slots=True)
class Closed:
    """The closed form at a rate: `batch` streams per rank, `tpot`, `ttft` seconds, `load` of the prompt server (from 1
    on there is no steady state, and tpot and ttft are infinite)."""

    batch: float
    tpot: float
    ttft: float
    wait: float
    load: float


def closed_form(where: Deployment, rate: float, isl: int, osl: int, hit: float = 0.0) -> Closed:
    """First-order serving without simulation, for one rank and its share of the traffic.

    A rank has a piece of a prompt in p = rate x pieces x T of its steps of T seconds; of R ranks that step together
    some rank has one with 1 - (1 - p)^R, and T is t_dec(b) with that share of what a piece adds, b = rate osl T
    (Little).
    Waiting for the prompt server: Allen and Cunneen's rho / (1 - rho) (ca^2 + cs^2) / 2 s with Poisson arrivals and
    equal prompts. Raises SpecError for a rate that is not above 0.
    """
    if not rate > 0:
        raise SpecError(f"the rate must be above 0, not {rate}")
    if where.prefill is not None:
        return _closed_apart(where, where.prefill, rate / where.groups, (isl, osl, hit))
    ranks, policy = where.policy.ranks, where.policy
    mine = rate / where.groups / ranks
    new = max(1, round(isl * (1 - hit)))
    pieces = -(-new // policy.token_budget)
    piece, pairs = -(-new // pieces), new * (isl - 0.5 * new) / pieces
    tpot, batch, one, often = where.cost(1, isl), 1.0, 0.0, 0.0
    for _ in range(200):
        batch = min(max(mine * osl * tpot, 1e-3), policy.max_running)
        streams = max(1, round(batch))
        state = (streams, round(streams * (isl + osl / 2)))
        step = where.cost(*state)
        one = where.cost.local(*state, piece, pairs) - where.cost.local(*state, 0, 0.0)
        one += where.cost.shared(streams, piece / ranks) - where.cost.shared(streams, 0.0)
        one = max(one, 0.0)  # a short piece has another exchange beside it, which may be the faster one
        rest = max(where.cost.shared(streams, piece) - where.cost.shared(streams, piece / ranks), 0.0)
        often = mine * pieces * tpot
        some = 1 - (1 - min(often, 1.0)) ** ranks
        fresh = step + some * one + max(ranks * often - some, 0.0) / max(ranks - 1, 1) * rest
        if often > 1:
            fresh = step + often * (one + rest)
        if abs(fresh - tpot) < 1e-6 * tpot or tpot > 1e4:
            break
        tpot = 0.5 * (tpot + fresh)
    own = pieces * (step + one)
    load = mine * own
    full = mine * osl * tpot > policy.max_running * 1.001 or tpot > 1e4
    if load >= 1 or full:
        return Closed(batch, math.inf if full else tpot, math.inf, math.inf, max(load, 1.0))
    wait = load / (1 - load) * 0.5 * own + 0.5 * tpot
    return Closed(batch, tpot, wait + own + where.front, wait, load)


def _closed_apart(where: Deployment, pool: Prefill, rate: float, lengths: tuple[int, int, float]) -> Closed:
    """The same where a pool computes prompts: its server is each instance's, streams are not disturbed."""
    isl, osl, hit = lengths
    new = max(1, round(isl * (1 - hit)))
    pieces = -(-new // pool.policy.token_budget)
    alone = pieces * pool.cost(0, 0, -(-new // pieces), new * (isl - 0.5 * new) / pieces)
    mine = rate / where.policy.ranks
    tpot, batch = where.cost(1, isl), 1.0
    for _ in range(200):
        batch = min(max(mine * osl * tpot, 1e-3), where.policy.max_running)
        streams = max(1, round(batch))
        fresh = where.cost(streams, round(streams * (isl + osl / 2)))
        if abs(fresh - tpot) < 1e-6 * tpot:
            break
        tpot = 0.5 * (tpot + fresh)
    load = rate / pool.instances * alone
    full = mine * osl * tpot > where.policy.max_running * 1.001
    if load >= 1 or full:
        return Closed(batch, math.inf if full else tpot, math.inf, math.inf, max(load, 1.0))
    wait = load / (1 - load) * 0.5 * alone
    return Closed(batch, tpot, wait + alone + _late(pool, isl, alone) + where.front, wait, load)


def _late(pool: Prefill, isl: int, alone: float) -> float:
    """Seconds of the cache transfer that the prompt's own time does not hide."""
    seconds = isl * pool.kv_bytes / pool.link
    return max(seconds - alone, seconds / pool.layers)


def pools(where: Deployment, rate: float, isl: int, osl: int, hit: float = 0.0) -> tuple[float, float]:
    """Load of the prefill and of the decode pool at a rate (1: full), which should be near each other. Prefill: prompts
    a second against what instances compute; decode: streams needed for TPOT at a full batch against places."""
    if where.prefill is None:
        raise SpecError("there are no pools to compare: the deployment is not disaggregated")
    pool = where.prefill
    new = max(1, round(isl * (1 - hit)))
    alone = pool.cost(0, 0, new, new * (isl - 0.5 * new))
    places = min(where.policy.max_running, int(where.policy.cache_tokens / (isl + osl / 2)))
    step = where.cost(places, round(places * (isl + osl / 2)))
    mine = rate / where.groups
    return mine * alone / pool.instances, mine * osl * step / (places * where.policy.ranks)
