"""WeightCounts: how many weights a layer or a model has of each kind, which is what ranks and formats divide by.

One place for all parameter arithmetic: `ModelSpec`'s totals and the planner's bytes are sums of these. The loader's
name table says the same in banks; a test holds the two together. No bytes, no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.spec.model import AttentionSpec, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Values by kind.

    attention: projections that a tensor-parallel group divides by heads; kv: keys' and values' projections of grouped
    attention, divided by key heads at most; latent: MLA's down-projections, whole on every rank. dense, shared:
    feed-forwards; routed: all routed experts. other: routers, gates and an MTP block's joining projection; vectors:
    norms and biases.
    """

    attention: int = 0
    kv: int = 0
    latent: int = 0
    dense: int = 0
    shared: int = 0
    routed: int = 0
    other: int = 0
    vectors: int = 0
    embedding: int = 0
    head: int = 0

    def __add__(self, more: WeightCounts) -> WeightCounts:
        return WeightCounts(*(getattr(self, field.name) + getattr(more, field.name) for field in fields(self)))

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def attention_counts(spec: AttentionSpec, hidden: int) -> WeightCounts:
    """One attention block, its input norm excluded."""
    heads = spec.num_heads
    out = heads * spec.v_head_dim * hidden
    if spec.kind == "mla":
        rank, q_out = spec.q_lora_rank, heads * spec.qk_head_dim
        down = spec.latent_width + (rank or 0)
        norms = spec.kv_lora_rank + (rank or 0)
        expand = spec.kv_lora_rank * heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        return WeightCounts(
            attention=(rank or hidden) * q_out + expand + out,
            latent=hidden * down,
            vectors=norms + spec.q_bias * down + spec.o_bias * hidden,
        )
    q_width, kv_width = heads * spec.qk_head_dim, spec.num_kv_heads * (spec.qk_head_dim + spec.v_head_dim)
    biases = spec.q_bias * (q_width + kv_width) + spec.o_bias * hidden
    return WeightCounts(
        attention=hidden * q_width + out,
        kv=hidden * kv_width,
        vectors=biases + 2 * spec.qk_head_dim * spec.qk_norm,
    )


def layer_counts(layer: LayerSpec, hidden: int) -> WeightCounts:
    """One decoder layer with its two norms."""
    both = attention_counts(layer.attention, hidden) + WeightCounts(vectors=2 * hidden)
    return both + layer.ffn.counts(hidden)


def model_counts(spec: ModelSpec) -> WeightCounts:
    """The main model: embedding, layers, final norm, head unless tied."""
    table = spec.vocab_size * spec.hidden_size
    ends = WeightCounts(embedding=table, head=0 if spec.tie_embeddings else table, vectors=spec.hidden_size)
    return _sum(spec.layers, spec.hidden_size, ends)


def mtp_counts(spec: ModelSpec) -> WeightCounts:
    """MTP blocks: a decoder layer, three norms and the 2H -> H projection each (embedding and head are shared)."""
    hidden, blocks = spec.hidden_size, len(spec.mtp_layers)
    extra = WeightCounts(other=blocks * 2 * hidden * hidden, vectors=blocks * 3 * hidden)
    return _sum(spec.mtp_layers, hidden, extra)


def _sum(layers: tuple[LayerSpec, ...], hidden: int, start: WeightCounts) -> WeightCounts:
    return sum((layer_counts(layer, hidden) for layer in layers), start)
