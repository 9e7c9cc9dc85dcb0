"""Attention blocks: absorbed MLA and GQA over paged caches or packed rows. Weights are split and absorbed at load.

MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1), for every row in its absorbed form:
    c_kv [T, R] = RMSNorm(W_DKV x), k_rope [T, r] = RoPE(W_KR x): together the cache row, shared by all heads
    q = [W_UK^T q_nope | RoPE(q_rope)]  [T, N, R + r];   scores = softmax_scale * q . row
    o = W_UV (softmax(scores) c_kv)     [T, N, V];       out = W_O concat(o)
The latent is never expanded, so a generated page can be reused as a prompt's page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from coterie.kernels.api import Array, BlockInput, GroupedWeights, Kernels, LatentWeights, Prepared
from coterie.spec.model import AttentionSpec

LayerCache = dict[str, Array]
"""The cache streams of one layer by name; empty when the batch has no cache."""


class Attention(Protocol):
    """What a decoder layer asks of its attention."""

    def block(self, entry: BlockInput, batch: Prepared, cache: LayerCache) -> tuple[Array, Array]:
        """(attention of the normed input, residual + delta), both [T, H]; writes the step's rows to the cache."""


def bind(kernels: Kernels, weights: LatentWeights | GroupedWeights, spec: AttentionSpec) -> Any:
    """The backend's form of a block's weights for its fused op; None if it has no such op."""
    binder = getattr(kernels, "bind_attention", None)
    return None if binder is None else binder(weights, spec)


def run_block(
    attention: LatentAttention | GroupedAttention, entry: BlockInput, batch: Prepared, cache: LayerCache
) -> tuple[Array, Array]:
    """The fused op where the backend has one, else the norm and `forward`: the same bits."""
    kernels: Any = attention.kernels
    if attention.bound is not None:
        out: tuple[Array, Array] = kernels.attention_block(attention.bound, entry, batch, cache)
        return out
    x, total = normed(attention.kernels, entry)
    return attention.forward(x, batch, cache), total


def normed(kernels: Kernels, entry: BlockInput) -> tuple[Array, Array]:
    """(norm of the sum, the sum)."""
    if entry.residual is None:
        return kernels.norm(entry.delta, entry.norm, entry.eps), entry.delta
    return kernels.add_norm(entry.delta, entry.residual, entry.norm, entry.eps)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA. `bound`: the weights as the backend's fused op takes them, if it has one."""

    spec: AttentionSpec
    weights: LatentWeights
    kernels: Kernels
    bound: Any = None

    def block(self, entry: BlockInput, batch: Prepared, cache: LayerCache) -> tuple[Array, Array]:
        return run_block(self, entry, batch, cache)

    def forward(self, x: Array, batch: Prepared, cache: LayerCache) -> Array:
        """Normed input [T, H] -> [T, H], op by op."""
        spec, weights, kernels = self.spec, self.weights, self.kernels
        latent_q = x
        if weights.q_a is not None:
            latent_q = kernels.norm(kernels.linear(x, *weights.q_a), weights.q_norm, spec.latent_norm_eps)
        query, rows = kernels.mla_inputs(
            kernels.linear(latent_q, *weights.q_b),
            kernels.linear(x, *weights.kv_a),
            weights.w_uk,
            weights.kv_norm,
            weights.rope,
            batch.positions,
            spec,
        )
        if cache:
            kernels.cache_write(cache["latent"], rows, batch, spec.cache_streams[0])
        out = kernels.attend(query, cache["latent"] if cache else rows, None, batch, spec)
        values = kernels.head_linear(out, weights.w_uv)
        return kernels.linear(values.reshape(-1, spec.num_heads * spec.v_head_dim), *weights.o)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention with optional per-head QK norm (before rope) and biases. `bound` as above."""

    spec: AttentionSpec
    weights: GroupedWeights
    kernels: Kernels
    bound: Any = None

    def block(self, entry: BlockInput, batch: Prepared, cache: LayerCache) -> tuple[Array, Array]:
        return run_block(self, entry, batch, cache)

    def forward(self, x: Array, batch: Prepared, cache: LayerCache) -> Array:
        """Normed input [T, H] -> [T, H], op by op."""
        spec, weights, kernels = self.spec, self.weights, self.kernels
        query, keys = kernels.gqa_inputs(
            kernels.linear(x, *weights.q),
            kernels.linear(x, *weights.k),
            weights.norms,
            weights.rope,
            batch.positions,
            spec,
        )
        values = kernels.linear(x, *weights.v)
        if cache:
            for stream, rows in zip(spec.cache_streams, (keys, values), strict=True):
                kernels.cache_write(cache[stream.name], rows, batch, stream)
            keys, values = cache["key"], cache["value"]
        out = kernels.attend(query, keys, values, batch, spec)
        return kernels.linear(out.reshape(-1, spec.num_heads * spec.v_head_dim), *weights.o)
