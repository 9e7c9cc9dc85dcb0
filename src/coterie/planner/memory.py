"""What a rank's memory holds, item by item, and how many requests fit beside it (B_cap).

Weights are ModelSpec's counts, divided as a layout divides them and in its formats; rows of the cache are the cache
streams'. What is counted is exact or derived; what nobody can know from a description (activations, context and graphs)
is assumed, with an interval. Everything is bytes of one rank. Not here: the reference paper's simpler form (`limits`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.planner.layout import WEIGHT_BYTES, CacheName, Layout, WeightName, Wish, choose
from coterie.planner.quantity import Quantity, sure
from coterie.spec.cache import CacheStream
from coterie.spec.counts import WeightCounts
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import AttentionSpec, LayerSpec, ModelSpec, MoESpec
from coterie.spec.weights import OWN_GROUPS, PANEL, MatrixSpec, QuantPlan

GIB = float(1 << 30)
MAX_TOKENS = 100_000_000
DISPATCH_TOKENS = 128
"""Tokens a rank that low-latency exchange buffers are made for, at least (the usual setting)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is served. `batch`: requests running in the whole system, None for as many as fit. `isl`, `osl`: prompt and
    answer in tokens. `chunk`: prompt tokens of one step of a rank. `utilisation`: share of a device's memory that may
    be used. `page`: tokens of a page of the cache. Raises SpecError for sizes that cannot be."""

    batch: int | None = None
    isl: int = 4096
    osl: int = 1024
    chunk: int = 8192
    utilisation: float = 0.9
    page: int = 64

    def __post_init__(self) -> None:
        for name, least in (("isl", 0), ("osl", 1), ("chunk", 1), ("page", 1)):
            if not least <= getattr(self, name) <= MAX_TOKENS:
                raise SpecError(f"{name} must be from {least} to {MAX_TOKENS} tokens, not {getattr(self, name)}")
        if self.batch is not None and not 1 <= self.batch <= MAX_TOKENS:
            raise SpecError(f"batch must be from 1 to {MAX_TOKENS} requests, not {self.batch}")
        if not 0 < self.utilisation <= 1:
            raise SpecError(f"utilisation must be above 0 and at most 1, not {self.utilisation:g}")

    @property
    def resident(self) -> float:
        """Mean tokens in the cache of a running request: the prompt and half of the answer."""
        return self.isl + self.osl / 2

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return self.isl + self.osl


DEFAULT_LOAD = Load()


@dataclass(frozen=True, slots=True)
class Budget:
    """One rank's memory. `items`: (name, bytes) of all but the cache; `free`: what is left for the cache, below zero if
    the weights do not fit. `kv_token`: bytes a token on this rank. `capacity_tokens`: tokens of the cache of one
    attention group. `b_cap`: requests of the whole system that fit on average; `b_cap_safe`: that fit at their
    longest, so that none is ever thrown out. `cache`: bytes that `load.batch` takes, None without one."""

    capacity: Quantity
    items: tuple[tuple[str, Quantity], ...]
    free: Quantity
    kv_token: Quantity
    capacity_tokens: Quantity
    b_cap: Quantity
    b_cap_safe: Quantity
    cache: Quantity | None

    @property
    def fits(self) -> bool:
        """Whether one page at least, and the batch that was asked for, fit."""
        needed = self.kv_token.value if self.cache is None else self.cache.value
        return self.capacity_tokens.value > 0 and self.free.value >= needed

    @property
    def used(self) -> float:
        """Bytes of all items."""
        return sum(quantity.value for _, quantity in self.items)


def budget(model: ModelSpec, hw: HardwareSpec, layout: Layout, load: Load = DEFAULT_LOAD) -> Budget:
    """The memory of the fullest rank. Raises SpecError if the layout cannot hold the model's shape."""
    layout.check(model)
    capacity = sure(hw.memory_bytes, "B", "device-memory", "exact")
    reserve = sure((1 - load.utilisation) * hw.memory_bytes, "B", "reserve", "assumed")
    fixed = (
        *weight_items(model, layout, hw),
        ("activations", activations(model, hw, layout, load)),
        ("context and graphs", context(hw)),
        ("reserve", reserve),
    )
    kv_token = cache_bytes_per_token(model, layout)
    used = [sum(getattr(quantity, bound) for _, quantity in fixed) for bound in ("value", "p10", "p90")]
    buffers = exchange_buffers(model, hw, layout, load, hw.memory_bytes - used[0])
    items = (*fixed[:-2], ("all-to-all buffers", buffers), *fixed[-2:])
    left = hw.memory_bytes - buffers.value
    free = Quantity(left - used[0], "B", "assumed", "free-memory", left - used[2], left - used[1])
    page_bytes = kv_token.value * load.page
    tokens = [max(0.0, bound // page_bytes * load.page) for bound in (free.value, free.p10, free.p90)]
    capacity_tokens = Quantity(tokens[0], "tokens", "assumed", "cache-tokens", tokens[1], tokens[2])
    return Budget(
        capacity=capacity,
        items=items,
        free=free,
        kv_token=kv_token,
        capacity_tokens=capacity_tokens,
        b_cap=_requests(capacity_tokens, layout.dp, load.resident, "b-cap"),
        b_cap_safe=_requests(capacity_tokens, layout.dp, load.longest, "b-cap-safe"),
        cache=_cache(load, layout, kv_token),
    )


def _requests(tokens: Quantity, groups: int, length: float, formula: str) -> Quantity:
    """Requests of all groups that so many tokens hold, each of a length."""
    value, p10, p90 = (bound / length // 1 * groups for bound in (tokens.value, tokens.p10, tokens.p90))
    return replace(tokens, value=value, p10=p10, p90=p90, unit="requests", formula=formula)


def _cache(load: Load, layout: Layout, kv_token: Quantity) -> Quantity | None:
    if load.batch is None:
        return None
    return sure(-(-load.batch // layout.dp) * load.resident * kv_token.value, "B", "kv-bytes", "derived")


def weight_items(model: ModelSpec, layout: Layout, hw: HardwareSpec | None = None) -> tuple[tuple[str, Quantity], ...]:
    """(name, bytes of a rank) of every kind of weight that the model has. Norms, routers, embedding and head have 16
    bits; a format with scales makes an item derived, as short blocks round up."""
    plain = ("bf16", 2.0)
    weights = layout.weights, value_bytes(layout.weights, hw)
    other = layout.attention or layout.weights
    attention = other, value_bytes(other, hw)
    share = shares(model, layout)
    counts = model.counts
    rows: list[tuple[str, float, tuple[str, float]]] = [
        ("attention", rank_attention(counts, share), attention),
        ("dense feed-forward", counts.dense * share.tensor, weights),
        ("shared experts", counts.shared * share.tensor, weights),
        ("routed experts", counts.routed * share.expert, weights),
        ("redundant experts", counts.routed * share.redundant, weights),
        ("routers and norms", counts.other + counts.vectors, plain),
        ("embedding", counts.embedding * share.tensor, plain),
        ("head", counts.head * share.tensor, plain),
    ]
    items = [(f"{name} ({label})", _bytes(values, width)) for name, values, (label, width) in rows if values]
    if layout.mtp:
        items.append((f"mtp block ({layout.weights})", _mtp(model, layout, share, weights[1], attention[1])))
    return tuple(items)


@dataclass(frozen=True, slots=True)
class Shares:
    """What part of each kind of weight a rank holds: `tensor` of what heads and columns divide, `kv` of key heads,
    `expert` of routed experts (one of each), `redundant` for their copies."""

    tensor: float
    kv: float
    expert: float
    redundant: float


def shares(model: ModelSpec, layout: Layout) -> Shares:
    """The parts of a rank. A key head is never divided; experts are divided into slots, and over the ranks that share a
    slot."""
    kv_heads = min((layer.attention.num_kv_heads for layer, _ in model.layer_kinds), default=1)
    experts = max(
        (layer.ffn.num_experts for layer, _ in model.layer_kinds if isinstance(layer.ffn, MoESpec)), default=1
    )
    return Shares(
        tensor=1 / layout.tp,
        kv=kv_share(kv_heads, layout.tp),
        expert=1 / layout.devices,
        redundant=layout.redundant / experts / layout.devices,
    )


def rank_attention(counts: WeightCounts, share: Shares) -> float:
    """Values of attention's projections on a rank: MLA's down-projections are whole on every rank."""
    return counts.attention * share.tensor + counts.kv * share.kv + counts.latent


def _mtp(model: ModelSpec, layout: Layout, share: Shares, weights: float, attention: float) -> Quantity:
    """The prediction blocks, laid out as the other layers are."""
    counts = model.mtp_counts
    if not counts.total:
        raise SpecError(f"{model.model_type} has no multi-token-prediction block in this configuration; leave out mtp")
    feed = (counts.dense + counts.shared) * share.tensor + counts.routed * (share.expert + share.redundant)
    total = feed * weights + rank_attention(counts, share) * attention + (counts.other + counts.vectors) * 2.0
    return sure(total, "B", "weight-bytes", "exact" if layout.weights == "bf16" and attention == 2.0 else "derived")


def value_bytes(name: WeightName, hw: HardwareSpec | None = None) -> float:
    """Bytes of a value with its scales; on a CPU those of this engine's packed panels."""
    form = None if hw is None or hw.kind != "cpu" else QuantPlan().format("mxfp4" if name == "fp4" else name)
    if form is None:
        return WEIGHT_BYTES[name]
    panel = MatrixSpec(PANEL, 4096, form)
    return panel.nbytes / (panel.rows * panel.cols)


def _bytes(values: float, width: float) -> Quantity:
    return sure(values * width, "B", "weight-bytes", "exact" if width == 2.0 else "derived")


def cache_bytes_per_token(model: ModelSpec, layout: Layout) -> Quantity:
    """Bytes that a token takes on a rank, over all layers: MLA's row is whole on every rank of a group, of grouped
    attention a rank has the heads that its query heads read. An MTP block caches as a layer does."""
    kinds = (*model.layer_kinds, *((layer, 1) for layer in (model.mtp_layers if layout.mtp else ())))
    total = sum(times * layer_row(layer.attention, layout.tp, layout.kv) for layer, times in kinds)
    return sure(total, "B", "kv-bytes", "exact")


def layer_row(attention: AttentionSpec, tp: int, kind: CacheName) -> float:
    """Bytes of a token in one layer on one rank of a group of `tp`."""
    kept = 1.0 if attention.kind == "mla" else kv_share(attention.num_kv_heads, tp)
    rows = (cache_row_bytes(stream, kind) / stream.tokens_per_row for stream in attention.cache_streams)
    return kept * sum(rows)


def kv_share(heads: int, tp: int) -> float:
    """Part of the key heads that a rank has: none is divided."""
    return -(-heads // tp) / heads


def cache_row_bytes(stream: CacheStream, kind: CacheName) -> int:
    """Bytes of a row of the cache in a format."""
    if kind == "bf16" or kind == "int8":
        return stream.row_bytes(kind)
    return stream.fp8_row_bytes(scaled=kind == "fp8-scaled")


def activations(model: ModelSpec, hw: HardwareSpec, layout: Layout, load: Load) -> Quantity:
    """Peak of the activations of one step of `load.chunk` prompt tokens: residual stream and the widest layer part,
    and logits of a row each. Assumed: frameworks keep up to half as much again, or free earlier."""
    width = 4.0 if hw.kind == "cpu" else 2.0
    hidden, chunk = model.hidden_size, load.chunk
    widest = max((_layer_width(layer, model, layout) for layer, _ in model.layer_kinds), default=0.0)
    rows = min(chunk, 1024 if load.batch is None else -(-load.batch // layout.dp))
    logits = rows * model.vocab_size / layout.tp * 4.0
    total = chunk * (2 * hidden + widest) * width + logits
    return Quantity(total, "B", "assumed", "activations", total / 1.5, total * 1.5)


def _layer_width(layer: LayerSpec, model: ModelSpec, layout: Layout) -> float:
    """Values a token that the widest part of a layer holds at once: queries, expanded keys and values and the output;
    or the inputs, gate, up and outputs of a feed-forward; with experts, of as many rows as a rank gets on average."""
    spec, hidden = layer.attention, model.hidden_size
    keys = spec.num_heads if spec.kind == "mla" else spec.num_kv_heads
    attention = (
        spec.num_heads * (spec.qk_head_dim + spec.v_head_dim) + keys * (spec.qk_head_dim + spec.v_head_dim)
    ) / layout.tp
    if not isinstance(layer.ffn, MoESpec):
        return max(attention, 3 * layer.ffn.intermediate_size / layout.tp + hidden)
    rows = layer.ffn.top_k * layout.dp / layout.ep
    routed = rows * (2 * hidden + 3 * layer.ffn.intermediate_size / layout.moe_tp)
    return max(attention, routed + 3 * layer.ffn.shared_intermediate_size / layout.tp)


def context(hw: HardwareSpec) -> Quantity:
    """What runtime and libraries take before any weights. On a device 0.5 to 1 GiB of context and about as much of
    captured graphs; of a process on a CPU 170 MB were measured for this engine."""
    if hw.kind == "cpu":
        return Quantity(170e6, "B", "assumed", "context", 150e6, 300e6)
    return Quantity(1.5 * GIB, "B", "assumed", "context", 1.0 * GIB, 2.5 * GIB)


def own_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes of a value that our engine sends to an expert and that come back (docs/expert-parallel.md, Forms): int8 and
    a float32 for each group of inputs where weights are integers (MXFP4 is held as such), bf16 where bf16 weights are
    multiplied in tiles, else float32."""
    out = 4.0
    if layout.weights in ("int8", "int4", "fp4"):
        out = 1 + 4 / OWN_GROUPS.get(layout.weights, 32)
    elif layout.weights == "bf16" and layout.tiles:
        out = 2.0
    return out, 2.0 if layout.exchange == "bfloat16" else 4.0


def exchange_buffers(model: ModelSpec, hw: HardwareSpec, layout: Layout, load: Load, room: float = 0.0) -> Quantity:
    """Buffers of the all-to-all. On devices those of low-latency kernels (DeepEP, LowLatencyLayout of csrc/config.hpp):
    two send and two receive buffers, each of experts x tokens of a rank x a row in 16 bits with its scales. They are
    made for a rank's rows of the batch, which the ranks of a group divide; without a batch, for as many as fit in
    `room` bytes with their cache."""
    routed = [layer.ffn for layer, _ in model.layer_kinds if isinstance(layer.ffn, MoESpec)]
    if layout.ep == 1 or layout.dp == 1 or not routed:
        return sure(0.0, "B", "exchange-buffers", "exact")
    slots = max(moe.num_experts for moe in routed) + layout.redundant
    hidden = model.hidden_size
    if hw.kind == "cpu":
        top_k = max(moe.top_k for moe in routed)
        return sure(load.chunk * top_k * hidden * sum(own_bytes(layout)), "B", "exchange-buffers", "derived")
    token_bytes = 4.0 * slots * (2 * hidden + 4 * (hidden // 128))
    if load.batch is not None:
        rows = float(-(-load.batch // layout.devices))
    else:
        rows = room / (token_bytes + layout.tp * load.resident * cache_bytes_per_token(model, layout).value)
    return sure(max(float(DISPATCH_TOKENS), rows) * token_bytes, "B", "exchange-buffers", "derived")


def least_devices(model: ModelSpec, hw: HardwareSpec, like: Layout, load: Load, most: int = 4096) -> int | None:
    """The smallest power of two of devices on which the model fits in these formats; None if none does."""
    wish = Wish(weights=like.weights, attention=like.attention, kv=like.kv, mtp=like.mtp)
    devices = 1
    while devices <= most:
        if budget(model, hw, choose(model, hw, devices, wish), load).fits:
            return devices
        devices *= 2
    return None
