"""The three limits of the batch of arXiv 2507.15465, in the paper's form (Eq. 10 to 13), and which of them binds.

Compute: the batch at which weights are read no longer than they are multiplied (B_RP). Capacity: requests whose cache
fits beside the weights (B_cap). Latency: requests at which a token still takes no longer than asked (B_SLO). Coarser
than `memory` and `cost` on purpose: no buffers, no efficiencies, one fully connected switch; norms, embedding and head
are left out. What depends on data groups (M_attn) is attention, and in a model without experts its feed-forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from coterie.planner.layout import WEIGHT_BITS, WEIGHT_BYTES, Layout, WeightName
from coterie.planner.memory import cache_bytes_per_token, layer_row
from coterie.planner.network import PAPER, Link
from coterie.planner.quantity import Quantity, sure
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import AttentionSpec, ModelSpec

Limit = Literal["capacity", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the equations take beside model, device and layout.

    slo: seconds a token may take. utilisation: share of memory that is usable; with 0.95 of 192 GiB the paper's B_cap
    is met within 2 %. gamma: tokens of the busiest rank over the mean. activation: M_act, bytes of a request's
    activations in one block (the paper gives none). link: constants of the exchange. Raises SpecError for values that
    cannot be.
    """

    slo: float = 0.05
    utilisation: float = 0.95
    gamma: float = 1.0
    activation: float = 0.0
    link: Link = PAPER

    def __post_init__(self) -> None:
        if not 0 < self.slo <= 3600:
            raise SpecError(f"the time a token may take must be above 0 and at most 3,600 s, not {self.slo:g} s")
        if not 0 < self.utilisation <= 1:
            raise SpecError(f"utilisation must be above 0 and at most 1, not {self.utilisation:g}")
        if not 1 <= self.gamma <= 1e6 or not 0 <= self.activation <= 1e12:
            raise SpecError(f"gamma must be from 1 and activation from 0, not {self.gamma:g} and {self.activation:g}")


DEFAULT_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Limits:
    """Requests of the whole system. `tpot`: seconds a token takes at `batch`, the smaller of B_cap and B_SLO; of it
    `weight_seconds` whatever the batch, `cache_seconds` and `exchange_seconds` for each request. `binds`: which of the
    two is smaller. `saturated`: whether the batch reaches B_RP. `intensity`: of attention in decode, operations a
    byte of cache; `ridge` the device's."""

    b_attn: Quantity
    b_moe: Quantity
    b_rp: Quantity
    b_cap: Quantity
    b_slo: Quantity
    batch: Quantity
    tpot: Quantity
    weight_seconds: Quantity
    cache_seconds: Quantity
    exchange_seconds: Quantity
    intensity: Quantity
    ridge: Quantity
    binds: Limit

    @property
    def saturated(self) -> bool:
        return self.batch.value >= self.b_rp.value


def paper_limits(
    model: ModelSpec, hw: HardwareSpec, layout: Layout, context: int, terms: Terms = DEFAULT_TERMS
) -> Limits:
    """Eq. 10 to 13 at `context` tokens a request. Raises SpecError if weights alone are more than the memory or take
    longer than the SLO, with the numbers."""
    layout.check(model)
    if not 1 <= context <= 100_000_000:
        raise SpecError(f"context must be from 1 to 100000000 tokens, not {context}")
    attention, experts = weights_of(model, layout)
    weights = attention * layout.dp + experts
    of_request = cache_bytes_per_token(model, layout).value * layout.tp * context + terms.activation
    _check_capacity(weights, hw, layout, terms)
    b_cap = (hw.memory_bytes * terms.utilisation * layout.devices - weights) / of_request
    bandwidth = hw.memory_rate * layout.devices
    exchange, constant = exchange_terms(model, hw, layout, terms)
    _check_latency(weights / bandwidth, constant, terms)
    fixed = weights / bandwidth + constant
    each = of_request / bandwidth
    b_slo = (terms.slo - fixed) / (each + exchange)
    batch = math.floor(min(b_cap, b_slo))
    b_attn, b_moe = compute_limits(model, hw, layout)
    return Limits(
        b_attn=sure(b_attn, "requests", "eq-10-attn"),
        b_moe=sure(b_moe, "requests", "eq-10-moe"),
        b_rp=sure(max(b_attn, b_moe), "requests", "eq-10"),
        b_cap=sure(math.floor(b_cap), "requests", "eq-11"),
        b_slo=sure(math.floor(b_slo), "requests", "eq-12-slo"),
        batch=sure(batch, "requests", "batch"),
        tpot=sure(fixed + batch * (each + exchange), "s", "eq-12"),
        weight_seconds=sure(fixed, "s", "eq-12-weights"),
        cache_seconds=sure(each, "s", "eq-12-cache"),
        exchange_seconds=sure(exchange, "s", "eq-13"),
        intensity=sure(attention_intensity(model.layers[0].attention, layout), "op/B", "intensity"),
        ridge=sure(hw.ridge, "op/B", "ridge"),
        binds="capacity" if b_cap <= b_slo else "latency",
    )


def weights_of(model: ModelSpec, layout: Layout) -> tuple[float, float]:
    """(n_dec M_attn, n_dec M_MoE): bytes that each data group holds, and bytes that all hold together."""
    counts, width = model.counts, WEIGHT_BYTES[layout.weights]
    attention = (counts.attention + counts.kv + counts.latent) * WEIGHT_BYTES[layout.attention or layout.weights]
    dense, experts = counts.dense * width, (counts.shared + counts.routed) * width
    if not counts.routed:
        return attention + dense, 0.0
    slots = max(moe.num_experts for _, moe in model.moe_layers())
    return attention, dense + experts + counts.routed * width * layout.redundant / slots


def compute_limits(model: ModelSpec, hw: HardwareSpec, layout: Layout) -> tuple[float, float]:
    """(B_attn, B_MoE) of Eq. 10: the first does not depend on the context; the second is 0 without experts."""
    b_attn = ridge_rows(hw, layout.attention or layout.weights) * layout.dp
    routed = [moe for _, moe in model.moe_layers()]
    if not routed:
        return b_attn, 0.0
    return b_attn, ridge_rows(hw, layout.weights) * max(moe.num_experts / moe.top_k for moe in routed)


def ridge_rows(hw: HardwareSpec, form: WeightName) -> float:
    """Rows at which a product takes as long as reading its matrix: ridge x bytes / 2. Eq. 10 for 2-byte weights; FP8
    halves the bytes and doubles the ridge, weights alone in 4 bits make it a quarter."""
    bits = WEIGHT_BITS[form]
    nominal = {"int4": 0.5, "fp4": 0.5}.get(form, bits / 8)
    return hw.rate(bits) / hw.memory_rate * nominal / 2


def exchange_terms(model: ModelSpec, hw: HardwareSpec, layout: Layout, terms: Terms) -> tuple[float, float]:
    """(seconds a request, seconds whatever the batch) of the exchanges of all MoE layers, Eq. 13: dispatch and combine
    in 16 bits over one switch, or over the network alone where devices are more than a domain."""
    routed = [moe for _, moe in model.moe_layers()]
    if not routed or layout.devices == 1 or layout.dp == 1:
        return 0.0, 0.0
    inside = layout.devices <= hw.domain
    rate = (hw.scaleup_gbps if inside else hw.network_gbps) * 1e9
    if not rate:
        where, field = ("inside", "scaleup_gbps") if inside else ("between", "network_gbps")
        raise SpecError(
            f"{hw.name} has no links {where} its domains of {hw.domain}: use fewer devices, or a hardware file with "
            f"{field}"
        )
    alpha = terms.link.alpha if inside else terms.link.net_alpha
    rows = sum(moe.top_k for moe in routed)
    return 2 * terms.gamma * 2 * model.hidden_size * rows / (rate * layout.devices), 2 * alpha * len(routed)


def attention_intensity(spec: AttentionSpec, layout: Layout) -> float:
    """Operations a byte of cache of decode attention, absorbed for MLA (Table III): 241.8 for DeepSeek-V3 in bf16, the
    size of a group of query heads for grouped attention. tp divides the heads but not MLA's cache."""
    heads = spec.num_heads / layout.tp
    latent = spec.latent_width + spec.kv_lora_rank
    widths = latent if spec.kind == "mla" else spec.qk_head_dim + spec.v_head_dim
    return 2 * heads * widths / layer_row(spec, layout.tp, layout.kv)


def _check_capacity(weights: float, hw: HardwareSpec, layout: Layout, terms: Terms) -> None:
    """Raise SpecError if the weights leave no memory."""
    each = hw.memory_bytes * terms.utilisation
    have = each * layout.devices
    if weights >= have:
        raise SpecError(
            f"no request fits: {layout.devices} x {hw.name} have {have / 1e9:,.0f} GB of usable memory and weights "
            f"take {weights / 1e9:,.0f} GB; use more devices (at least {math.ceil(weights / max(each, 1.0))} for one "
            "copy of these) or a smaller format"
        )


def _check_latency(reading: float, constant: float, terms: Terms) -> None:
    """Raise SpecError if no batch is fast enough, with the term that alone is too long."""
    if reading + constant < terms.slo:
        return
    name, seconds = "reading the weights and the exchange's latency", reading + constant
    if reading >= terms.slo:
        name, seconds = "reading the weights alone", reading
    elif constant >= terms.slo:
        name, seconds = "the latency of the exchanges alone", constant
    raise SpecError(
        f"no request is fast enough: {name} takes {seconds * 1e3:.3g} ms of the {terms.slo * 1e3:.3g} ms that a token "
        "may take; use more devices, a smaller format or a longer time"
    )
