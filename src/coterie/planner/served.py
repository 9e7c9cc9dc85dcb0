"""Times and throughputs of a served model as forms of few efficiencies: what a fit multiplies and a question asks.

Operations (`ops`) are priced by `cost` at prior efficiencies times exp(z), then put together by the closed forms of
aggregated and disaggregated serving: a step that also computes prompts takes as long as both together, (C - 1)/osl of
the steps do for each prompt; a prompt waits for a share kappa of those before it. Not here: the fit (`bayes`,
`calibrate`), what a row says (`phrases`, `questions`), CPUs (`hosts`), exchanges alone (`exchanges`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from coterie.planner.bayes import Vector
from coterie.planner.cost import Efficiency, price
from coterie.planner.layout import Layout
from coterie.planner.memory import Load, budget
from coterie.planner.named import architecture
from coterie.planner.network import Link
from coterie.planner.ops import Point, step_ops
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec

PARAMETERS = (
    "eta_m", "eta_p", "eta_a", "layer", "alpha", "beta", "exchange", "experts", "rows", "prompts", "front", "kappa",
    "bias",
)  # fmt: skip
"""What z multiplies: shares of memory bandwidth, products and attention; the constant of a layer; latency of links, the
share of them that all-reduces and that all-to-alls reach; `experts`, the share of bandwidth of routed experts; `rows`,
what a stream costs beyond its bytes and products; `prompts` computed beside streams; `front`, what passes before a
prompt is computed; `kappa`, the share of the prompts before it that one waits for; all."""
AT = {name: index for index, name in enumerate(PARAMETERS)}

PRIOR = Efficiency(eta_m=0.85, eta_p=0.4, eta_a=0.55, eta_e=0.7, step_seconds=1e-3, alpha=6e-6, beta=0.65)
EXCHANGE = Link(alpha=20e-6, net_alpha=20e-6, share=0.4, net_share=0.5)
LAYER_SECONDS = {"mla-moe": 85e-6, "gqa-moe": 80e-6, "gqa-dense": 45e-6, "mla-dense": 60e-6}
"""Launches, norms and routing of a layer: fewer kernels without a latent, fewer yet without experts."""
ROW_SECONDS = 80e-6
ROW_LIMIT = 128.0
"""Sampling, bookkeeping and small kernels of a stream in a step; beyond so many they are done together."""
FRONT_SECONDS = 0.16
KAPPA = 0.09
RIDGE, EASIER = 295.0, 0.25
HIGHEST = 1.1
"""Shares of a peak end here: published peaks are rounded and clocks move."""

Timer = Callable[[Vector], float]


@dataclass(frozen=True, slots=True)
class Served:
    """A model on its pools. requests: running at once over all decode pools; context: mean tokens in a stream's cache;
    prompts: in each attention group of a prefill step; accepted: tokens that a step yields with `draft` speculated."""

    model: ModelSpec
    hw: HardwareSpec
    prefill: Layout
    decode: Layout
    prefill_count: int
    decode_count: int
    apart: bool
    isl: float
    osl: float
    context: float
    requests: float
    prompts: float = 1.0
    gamma: float = 1.0
    draft: int = 0
    accepted: float = 1.0
    overlap: bool = False
    running: float = 0.0

    @property
    def per_pool(self) -> float:
        """Streams that one decode pool runs."""
        return (self.running or self.requests) / self.decode_count


def efficiency(z: Vector, kind: str, hw: HardwareSpec) -> Efficiency:
    """Efficiencies at z for an architecture. A device with fewer operations a byte is kept busy more easily."""
    m = [math.exp(value) for value in z]
    easier = (RIDGE / hw.ridge) ** EASIER
    alpha, share = EXCHANGE.alpha * m[4], m[6]
    link = Link(
        alpha=alpha, net_alpha=alpha, share=min(HIGHEST, EXCHANGE.share * share),
        net_share=min(HIGHEST, EXCHANGE.net_share * share),
    )  # fmt: skip
    return Efficiency(
        eta_m=min(HIGHEST, PRIOR.eta_m * m[0]), eta_p=min(HIGHEST, PRIOR.eta_p * m[1] * easier),
        eta_a=min(HIGHEST, PRIOR.eta_a * m[2]), eta_e=min(HIGHEST, PRIOR.eta_e * m[0] * m[7]),
        layer_seconds=LAYER_SECONDS[kind] * m[3], step_seconds=PRIOR.step_seconds, alpha=PRIOR.alpha * m[4],
        beta=min(HIGHEST, PRIOR.beta * m[5]), link=link,
    )  # fmt: skip


def times(z: Vector, name: str) -> float:
    """What a parameter multiplies by at z."""
    return math.exp(z[AT[name]])


def step_timer(case: Served, requests: float, prompts: float = 0.0) -> Timer:
    """Seconds of a step of so many streams in one decode pool, with so many prompts in each attention group beside."""
    parts = 2.0 if case.overlap else 1.0
    batch = max(requests, 1.0) / parts
    point = Point(batch=batch, context=max(case.context, 1.0), gamma=case.gamma, draft=case.draft)
    new = None
    if prompts:
        new = Point(batch=prompts * case.decode.dp / parts, context=max(case.isl, 1.0), gamma=case.gamma)
    ops = step_ops(case.model, case.decode, point, new)
    kind = architecture(case.model)
    streams = requests / case.decode.dp
    rows = ROW_SECONDS * streams / (1 + streams / ROW_LIMIT)

    def seconds(z: Vector) -> float:
        step = price(ops, case.hw, efficiency(z, kind, case.hw), overlap=case.overlap).seconds
        return step + rows * times(z, "rows")

    return seconds


def prefill_timer(case: Served) -> Timer:
    """Seconds of a step that computes `prompts` prompts in each attention group of a prefill pool."""
    batch = case.prompts * case.prefill.dp / (2.0 if case.overlap else 1.0)
    kind = architecture(case.model)
    ops = step_ops(case.model, case.prefill, None, Point(batch=batch, context=max(case.isl, 1.0), gamma=case.gamma))
    return lambda z: price(ops, case.hw, efficiency(z, kind, case.hw), overlap=case.overlap).seconds


def token_timer(case: Served) -> Timer:
    """Seconds a token of a stream. In aggregated serving every stream gives way to the prompts of all others."""
    step = step_timer(case, case.per_pool)
    share = 0.0 if case.apart or case.osl <= 1 else max(0.0, case.per_pool / case.decode.dp - 1) / case.osl
    if share == 0:
        return lambda z: step(z) / case.accepted
    mixed = step_timer(case, case.per_pool, max(1.0, share))

    def seconds(z: Vector) -> float:
        alone = step(z)
        longer = max(0.0, mixed(z) - alone) * min(1.0, share) * times(z, "prompts")
        return alone / case.accepted + longer

    return seconds


def first_token_timer(case: Served) -> Timer:
    """Seconds to the first token: the front end, prompts before, its own, and the step that is running. Where prompts
    come faster than they are computed, all requests that do not decode wait: C own / groups - osl x token."""
    step, prompt = step_timer(case, case.per_pool), prefill_timer(replace(case, prompts=1.0, overlap=False))
    token = token_timer(case)
    groups = case.prefill_count * case.prefill.dp
    before = max(0.0, case.requests / groups - 1)

    def seconds(z: Vector) -> float:
        own = prompt(z)
        wait = KAPPA * times(z, "kappa") * before * own
        full = case.requests / groups * own - case.osl * token(z) if case.apart else 0.0
        return FRONT_SECONDS * times(z, "front") + own + max(wait, full) + step(z)

    return seconds


def decoding(case: Served) -> Served:
    """The same with as many streams running as do not wait for their first token, at prior efficiencies."""
    zero = np.zeros(len(PARAMETERS))
    running = case.osl * token_timer(case)(zero)
    return replace(case, running=case.requests * running / (running + first_token_timer(case)(zero)))


def busy_share(case: Served) -> Timer:
    """Share of the time that the prefill pools compute, by Little's law; above 0.9 a queue decides and TTFT means
    little."""
    token, prompt = token_timer(case), prefill_timer(replace(case, prompts=1.0, overlap=False))
    groups = case.prefill_count * case.prefill.dp

    def share(z: Vector) -> float:
        own = prompt(z)
        return case.requests / groups * own / (case.osl * token(z) + own)

    return share


def prefill_rate(case: Served) -> Timer:
    """Prompt tokens a second of one device."""
    prompt = prefill_timer(case)
    tokens = case.prompts * case.prefill.dp * case.isl / case.prefill.devices
    return lambda z: tokens / prompt(z)


def output_rate(case: Served) -> Timer:
    """Generated tokens a second of one device of the decode pools."""
    token = token_timer(case)
    share = case.per_pool / case.decode.devices
    return lambda z: share / token(z)


def total_rate(case: Served, token_seconds: float | None = None) -> Timer:
    """Prompt and generated tokens a second of one device over all pools, by Little's law; with the time of a token as
    the form says or as given."""
    token, first = token_timer(case), first_token_timer(case)
    devices = case.decode_count * case.decode.devices
    devices += case.prefill_count * case.prefill.devices if case.apart else 0
    tokens = case.requests * (case.isl + case.osl) / devices
    return lambda z: tokens / (first(z) + max(case.osl - 1, 1) * (token_seconds or token(z)))


def whole_timer(case: Served) -> Timer:
    """Seconds from arrival to the last token."""
    token, first = token_timer(case), first_token_timer(case)
    return lambda z: first(z) + max(case.osl - 1, 0) * token(z)


def streams_within(case: Served, seconds: float, most: float) -> float:
    """Streams over all pools at which a token takes no longer, at prior efficiencies; at most so many, and at least
    four in each group, or one where groups are of several devices: with fewer nobody publishes a throughput."""
    zero = np.zeros(len(PARAMETERS))
    low = case.decode.dp * case.decode_count * (4.0 if case.decode.tp == 1 else 1.0)
    high = max(low, most)
    for _ in range(12):
        middle = math.sqrt(low * high)
        within = token_timer(replace(case, requests=middle, running=0.0))(zero) <= seconds
        low, high = (middle, high) if within else (low, middle)
    return low


def capacity(model: ModelSpec, hw: HardwareSpec, layout: Layout, lengths: tuple[float, float]) -> float:
    """Requests with prompts and answers of these lengths that fit the devices of a layout; one where none does."""
    load = Load(isl=round(lengths[0]), osl=max(1, round(lengths[1])))
    return max(1.0, budget(model, hw, layout, load).b_cap.value)
