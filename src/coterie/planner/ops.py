"""What one step must do, as operations with their products and bytes on the busiest device; no rates, no seconds.

Two forms of MLA attention (arXiv 2507.15465, section on reordering): absorbed, where scores are taken against the
cached latent, for decode; expanded, where keys and values are rebuilt, for prefill. A step may hold both: prompts that
are computed beside running streams share every product and have their own attention. Symbols: H hidden, I the width of
an expert, K experts per token. Not here: rates and efficiencies (`cost`), how often a rank is the busy one
(`imbalance`), the time of an exchange (`network`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from coterie.planner.layout import WEIGHT_BITS, WEIGHT_BYTES, Layout, WeightName
from coterie.planner.memory import kv_share, layer_row, own_bytes
from coterie.planner.network import FP8_ROW, Exchange, Form
from coterie.spec.counts import attention_counts
from coterie.spec.errors import SpecError
from coterie.spec.model import AttentionSpec, LayerSpec, ModelSpec, MoESpec
from coterie.spec.weights import PANEL

OpKind = Literal["product", "attention", "values", "exchange", "reduce"]
ACTIVATION_BYTES = 2.0
"""Bytes of an activation that travels."""
PASSES = 4
"""Times that norms and residual sums of a layer pass a row; each chosen expert adds a copy in and a sum out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a step works on, counted over all devices.

    Decode: `batch` requests with `context` tokens in the cache each. Prefill: `batch` prompts together, `context` new
    tokens each after `past` that are cached. gamma: load of the busiest rank's experts over the mean. hit: experts
    with a token on that rank and layer, None: expected from even routing. draft: tokens that multi-token prediction
    proposes a step, accept: probability that one is right given that all before it are. overlap: two micro-batches,
    one computes while the other exchanges. past may be fractional means.
    """

    batch: float
    context: float
    past: float = 0.0
    gamma: float = 1.0
    hit: float | None = None
    draft: int = 0
    accept: float = 0.85
    overlap: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch", 0), ("context", 0), ("past", 0), ("gamma", 1), ("draft", 0), ("accept", 0)):
            if not least <= getattr(self, name) <= 1e12:
                raise SpecError(f"{name} must be a number from {least} to 1e12, not {getattr(self, name)}")
        if self.accept > 1 or self.draft > 16:
            raise SpecError(f"accept {self.accept} must be at most 1 and draft {self.draft} at most 16")
        if self.batch == 0 or self.context == 0:
            raise SpecError("a step needs at least one request with at least one token: batch and context above 0")

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gains by a decode step: 1 + accept + accept^2 + ... over the draft."""
        return sum(self.accept**number for number in range(self.draft + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a layer, or of a step. `times`: layers that do it; `layer`: kind of layer it belongs to, -1 for
    once a step. operations: two a multiply-add; nbytes: read from memory; rows: that share each matrix; both of one
    layer on the busiest device. form: format of the weights, or the kind of attention. unit: values of one matrix,
    width of a key, or what norms, sums and copies pass. held: bytes of all matrices of a layer on the device, 0
    for nbytes. tokens: of which each chooses some of the matrices, 0 where all rows share all. padded: values that our
    kernels' panels hold over those there are. message: what an exchange carries; for a reduce, nbytes are its vector's
    and ranks its partners."""

    name: str
    kind: OpKind
    layer: int
    times: float
    operations: float = 0.0
    bits: int = 16
    nbytes: float = 0.0
    rows: float = 0.0
    form: WeightName | Literal["mla", "gqa"] = "bf16"
    unit: float = 0.0
    held: float = 0.0
    tokens: float = 0.0
    padded: float = 1.0
    message: Exchange | None = None
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's decode and prefill together. rows: tokens of the busiest attention group; tokens: of all groups; heads:
    rows of logits of that group."""

    decode: Point | None
    prefill: Point | None
    rows: float
    tokens: float
    heads: float
    gamma: float
    hit: float | None


def batch_of(layout: Layout, decode: Point | None, prefill: Point | None) -> Batch:
    """Count a step's tokens. Raises SpecError if both are None."""
    rows = tokens = heads = 0.0
    for point, width in ((decode, 1 + decode.draft if decode else 0), (prefill, prefill.context if prefill else 0)):
        if point is not None:
            own = requests_per_group(point, layout)
            rows, tokens = rows + own * width, tokens + point.batch * width
            heads += own * (width if point is decode else 1)
    leader = decode or prefill
    if leader is None:
        raise SpecError("a step needs streams that decode or prompts")
    gamma = max(point.gamma for point in (decode, prefill) if point is not None)
    hit = leader.hit if decode is None or prefill is None else None
    return Batch(decode=decode, prefill=prefill, rows=rows, tokens=tokens, heads=heads, gamma=gamma, hit=hit)


def requests_per_group(point: Point, layout: Layout) -> float:
    """Requests of the busiest attention group: the share of each, but one where there are fewer than groups."""
    return max(point.batch / layout.dp, min(1.0, point.batch))


def step_ops(
    model: ModelSpec, layout: Layout, decode: Point | None, prefill: Point | None = None, *, absorbed: bool = False
) -> tuple[Op, ...]:
    """All operations of one step; layers that are alike are counted once. absorbed: prompts use that form too."""
    batch = batch_of(layout, decode, prefill)
    found: list[Op] = []
    for number, (layer, times) in enumerate(model.layer_kinds):
        found += layer_ops(model, layer, layout, batch, (number, float(times)), absorbed=absorbed)
    found.append(head_op(model, layout, batch.heads))
    logits = batch.heads * model.vocab_size
    found.append(Op(name="sampling", kind="values", layer=-1, times=1.0, unit=logits))
    if decode is not None and decode.draft:
        found += draft_ops(model, layout, decode)
    return tuple(found)


def layer_ops(
    model: ModelSpec, layer: LayerSpec, layout: Layout, batch: Batch, place: tuple[int, float], *, absorbed: bool
) -> Iterator[Op]:
    """Operations of one kind of layer; `place`: its number and how many there are."""
    number, times = place
    hidden, spec = model.hidden_size, layer.attention
    form = layout.attention or layout.weights
    yield product("attention projections", number, times, attention_weights(spec, hidden, layout.tp), batch.rows, form)
    for op in attention_ops(spec, layout, batch, absorbed=absorbed):
        yield replace(op, layer=number, times=times)
    if layout.tp > 1:
        yield reduce_op("all-reduce of attention", number, times, batch.rows * hidden, layout.tp)
    ffn = layer.ffn
    passes = PASSES + (2 * ffn.top_k if isinstance(ffn, MoESpec) else 0)
    yield Op(name="norms and copies", kind="values", layer=number, times=times, unit=batch.rows * hidden * passes)
    yield Op(name="row work", kind="values", layer=number, times=times, unit=batch.rows)
    if isinstance(ffn, MoESpec):
        yield from moe_ops(model, ffn, layout, batch, place)
        return
    values = ffn.counts(hidden).dense / layout.tp
    dense = product("dense feed-forward", number, times, values, batch.rows, layout.weights)
    yield replace(dense, padded=panel_factor(hidden, ffn.intermediate_size / layout.tp, layout.weights))
    if layout.tp > 1:
        yield reduce_op("all-reduce of feed-forward", number, times, batch.rows * hidden, layout.tp)


def product(name: str, layer: int, times: float, values: float, rows: float, form: WeightName) -> Op:
    """`rows` rows by matrices of so many values, all read once."""
    return Op(
        name=name, kind="product", layer=layer, times=times, operations=2 * rows * values, bits=WEIGHT_BITS[form],
        nbytes=values * WEIGHT_BYTES[form], rows=rows, form=form, unit=values,
    )  # fmt: skip


def panel_factor(hidden: int, inner: float, form: WeightName) -> float:
    """Values of a gated feed-forward as our kernels pack it over those it has: outputs in panels of 32, inputs in steps
    of 32 (bf16) or 64."""
    step = 32 if form == "bf16" else 64
    held = 2 * _whole(inner, PANEL) * _whole(hidden, step) + _whole(hidden, PANEL) * _whole(inner, step)
    return held / (3 * hidden * inner)


def _whole(size: float, step: int) -> float:
    return -(-size // step) * step


def reduce_op(name: str, layer: int, times: float, values: float, ranks: int) -> Op:
    """A sum over ranks of a vector of so many values."""
    return Op(name=name, kind="reduce", layer=layer, times=times, nbytes=values * ACTIVATION_BYTES, ranks=ranks)


# Attention


def attention_weights(spec: AttentionSpec, hidden: int, tp: int) -> float:
    """Values of the projections on one rank: heads are cut by tp, the latent's own projections are not."""
    counts = attention_counts(spec, hidden)
    return counts.attention / tp + counts.kv * kv_share(spec.num_kv_heads, tp) + counts.latent


def attention_ops(spec: AttentionSpec, layout: Layout, batch: Batch, *, absorbed: bool) -> Iterator[Op]:
    """Scores and values. Decode reads each request's cache once, whatever the draft, and multiplies an fp8 cache in 8
    bits where the device has kernels for that (`cost`)."""
    row = layer_row(spec, layout.tp, layout.kv)
    heads = spec.num_heads / layout.tp
    narrow = 2 * heads * (spec.qk_head_dim + spec.v_head_dim)
    wide = 2 * heads * (spec.latent_width + spec.kv_lora_rank) if spec.kind == "mla" else narrow
    width = spec.latent_width if spec.kind == "mla" else spec.qk_head_dim
    if batch.decode is not None:
        requests, length = requests_per_group(batch.decode, layout), batch.decode.context
        pairs = requests * (1 + batch.decode.draft) * length
        yield Op(name="attention of streams", kind="attention", layer=0, times=1, operations=wide * pairs,
                 bits=8 if layout.kv.startswith("fp8") else 16, nbytes=requests * length * row,
                 rows=1 + batch.decode.draft, form=spec.kind, unit=width)  # fmt: skip
    if batch.prefill is not None:
        new, past = batch.prefill.context, batch.prefill.past
        requests = requests_per_group(batch.prefill, layout)
        pairs = requests * new * (past + (new + 1) / 2)
        operations = (wide if absorbed else narrow) * pairs
        if spec.kind == "mla" and not absorbed:  # keys and values of what is cached are rebuilt
            operations += 2 * requests * past * spec.kv_lora_rank * heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        yield Op(name="attention of prompts", kind="attention", layer=0, times=1, operations=operations,
                 nbytes=requests * (past + new) * row, rows=new, form=spec.kind, unit=width)  # fmt: skip


# Feed-forward


def moe_ops(model: ModelSpec, ffn: MoESpec, layout: Layout, batch: Batch, place: tuple[int, float]) -> Iterator[Op]:
    """Router, exchange, routed and shared experts of one kind of layer."""
    number, times = place
    hidden, form = model.hidden_size, layout.weights
    yield product("router", number, times, hidden * ffn.num_experts, batch.rows, "bf16")
    if layout.dp > 1 or (layout.exchange is not None and layout.ep > 1):
        yield exchange_op(model, ffn, layout, batch, place)
    values = ffn.counts(hidden).routed / ffn.num_experts / layout.moe_tp
    rows = batch.gamma * batch.tokens * ffn.top_k / layout.ep
    hit = expected_hit(ffn, layout, batch.tokens) if batch.hit is None else batch.hit
    yield Op(
        name="routed experts", kind="product", layer=number, times=times, operations=2 * rows * values,
        bits=WEIGHT_BITS[form], nbytes=hit * values * WEIGHT_BYTES[form], rows=rows / hit, form=form, unit=values,
        held=(ffn.num_experts + layout.redundant) / layout.ep * values * WEIGHT_BYTES[form], tokens=batch.tokens,
        padded=panel_factor(hidden, ffn.intermediate_size / layout.moe_tp, form),
    )  # fmt: skip
    if ffn.shared_intermediate_size:
        shared = ffn.counts(hidden).shared / layout.tp
        inner = ffn.shared_intermediate_size / layout.tp
        one = product("shared experts", number, times, shared, batch.rows, form)
        yield replace(one, padded=panel_factor(hidden, inner, form))
    if layout.tp > 1:
        yield reduce_op("all-reduce of feed-forward", number, times, batch.rows * hidden, layout.tp)


def expected_hit(ffn: MoESpec, layout: Layout, tokens: float) -> float:
    """Expert slots of one rank with at least one of so many tokens, routing even: n (1 - (1 - K/E)^T)."""
    slots = ffn.num_experts + layout.redundant
    return slots / layout.ep * (1 - (1 - ffn.top_k / slots) ** tokens)


def exchange_op(model: ModelSpec, ffn: MoESpec, layout: Layout, batch: Batch, place: tuple[int, float]) -> Op:
    """Dispatch and combine: a device sends its share of its group's tokens, in 8 bits with scales where weights have
    no more, and gets them back in 16. With prompts a row goes once to each node, else to each expert (the two kernels
    of DeepEP's README). Where several ranks share each expert, a row goes to all of them. Our engine's: `own_bytes`, a
    row once to each rank, an output for each expert back."""
    top_k = ffn.top_k if layout.moe_tp == 1 else min(ffn.top_k * layout.moe_tp, layout.devices)
    form: Form = "rank" if layout.exchange else "copies" if batch.prefill is None else "node"
    out, back = FP8_ROW if layout.weights in ("fp8", "fp4") else ACTIVATION_BYTES, ACTIVATION_BYTES
    if layout.exchange is not None:
        out, back = own_bytes(layout)
    message = replace(
        Exchange.of(model, batch.rows / layout.tp, layout.devices, form=form), top_k=top_k, bytes_out=out,
        bytes_back=back, gamma=batch.gamma, reduced=layout.exchange is None,
    )  # fmt: skip
    return Op(name="all-to-all", kind="exchange", layer=place[0], times=place[1], message=message, ranks=layout.devices)


# Ends of a step


def head_op(model: ModelSpec, layout: Layout, rows: float, times: float = 1) -> Op:
    """Logits of the rows that need them, in bf16."""
    return product("head", -1, times, model.vocab_size * model.hidden_size / layout.tp, rows, "bf16")


def draft_ops(model: ModelSpec, layout: Layout, decode: Point) -> Iterator[Op]:
    """A multi-token-prediction block for each drafted token: one layer, its 2H -> H projection, the head
    (arXiv 2412.19437, section 2.2)."""
    layer = (model.mtp_layers or model.layers)[-1]
    plain = batch_of(layout, replace(decode, draft=0), None)
    number = len(model.layer_kinds)
    for op in layer_ops(model, layer, layout, plain, (number, float(decode.draft)), absorbed=False):
        yield replace(op, name=f"draft: {op.name}")
    values = 2 * model.hidden_size * model.hidden_size
    form = layout.attention or layout.weights
    yield product("draft: projection", number, float(decode.draft), values, plain.rows, form)
    yield replace(head_op(model, layout, plain.rows, float(decode.draft)), name="draft: head")
