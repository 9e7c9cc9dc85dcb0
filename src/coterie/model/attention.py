"""Attention blocks: absorbed MLA and GQA over paged caches or packed rows. Weights are split and absorbed at load.

MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1), for every row in its absorbed form:
    c_kv [T, R] = RMSNorm(W_DKV x), k_rope [T, r] = RoPE(W_KR x): together the cache row, shared by all heads
    q = [W_UK^T q_nope | RoPE(q_rope)]  [T, N, R + r];   scores = softmax_scale * q . row
    o = W_UV (softmax(scores) c_kv)     [T, N, V];       out = W_O concat(o)
The latent is never expanded, so a generated page can be reused as a prompt's page.
The ranks of a tensor-parallel group have some heads each, and some outputs of W_O: `spec` and weights are the rank's.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

from coterie.comm.tensor_group import TensorGroup
from coterie.comm.transport import Handle
from coterie.kernels.api import Array, BlockInput, GroupedWeights, Kernels, LatentMaps, LatentWeights, Prepared
from coterie.spec.model import AttentionSpec

LayerCache = dict[str, Array]
"""The cache streams of one layer by name; empty when the batch has no cache."""

Blocks = Generator[Handle, None, tuple[Array, Array]]


class Attention(Protocol):
    """What a decoder layer asks of its attention."""

    def stages(self, entry: BlockInput, batch: Prepared, cache: LayerCache) -> Blocks:
        """(attention of the normed input, residual + delta), both [T, H]; writes the step's rows to the cache."""


def bind(kernels: Kernels, weights: LatentWeights | GroupedWeights, spec: AttentionSpec) -> Any:
    """The backend's form of a block's weights for its fused op; None if it has no such op."""
    binder = getattr(kernels, "bind_attention", None)
    return None if binder is None else binder(weights, spec)


def run_block(
    attention: LatentAttention | GroupedAttention, entry: BlockInput, batch: Prepared, cache: LayerCache
) -> Blocks:
    """The fused op where the backend has one and all heads are here, else the norm and the ops: the same bits."""
    kernels: Any = attention.kernels
    if attention.bound is not None:
        out: tuple[Array, Array] = kernels.attention_block(attention.bound, entry, batch, cache)
        return out
    x, total = normed(attention.kernels, entry)
    values = attention.values(x, batch, cache)
    values = values.reshape(-1, attention.spec.num_heads * attention.spec.v_head_dim)
    if attention.group is not None:
        values = yield from attention.group.heads(values)
    delta = attention.kernels.linear(values, *attention.weights.o)
    if attention.group is not None:
        delta = yield from attention.group.columns(delta, total.shape[1])
    return delta, total


def normed(kernels: Kernels, entry: BlockInput) -> tuple[Array, Array]:
    """(norm of the sum, the sum)."""
    if entry.residual is None:
        return kernels.norm(entry.delta, entry.norm, entry.eps), entry.delta
    return kernels.add_norm(entry.delta, entry.residual, entry.norm, entry.eps)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA. `bound`: the weights as the backend's fused op takes them, if it has one and no `group` shares the heads."""

    spec: AttentionSpec
    weights: LatentWeights
    kernels: Kernels
    bound: Any = None
    group: TensorGroup | None = None

    def stages(self, entry: BlockInput, batch: Prepared, cache: LayerCache) -> Blocks:
        return run_block(self, entry, batch, cache)

    def values(self, x: Array, batch: Prepared, cache: LayerCache) -> Array:
        """Normed input [T, H] -> values [T, N, V] of this rank's heads, op by op."""
        spec, weights, kernels = self.spec, self.weights, self.kernels
        latent_q = x
        if weights.q_a is not None:
            latent_q = kernels.norm(kernels.linear(x, *weights.q_a), weights.q_norm, spec.latent_norm_eps)
        query, rows = kernels.mla_inputs(
            kernels.linear(latent_q, *weights.q_b),
            kernels.linear(x, *weights.kv_a),
            LatentMaps(weights.w_uk, weights.kv_norm, weights.rope),
            batch.positions,
            spec,
        )
        if cache:
            kernels.cache_write(cache["latent"], rows, batch, spec.cache_streams[0])
        out = kernels.attend(query, cache["latent"] if cache else rows, None, batch, spec)
        return kernels.head_linear(out, weights.w_uv)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention with optional per-head QK norm (before rope) and biases. `bound` as above."""

    spec: AttentionSpec
    weights: GroupedWeights
    kernels: Kernels
    bound: Any = None
    group: TensorGroup | None = None

    def stages(self, entry: BlockInput, batch: Prepared, cache: LayerCache) -> Blocks:
        return run_block(self, entry, batch, cache)

    def values(self, x: Array, batch: Prepared, cache: LayerCache) -> Array:
        """Normed input [T, H] -> values [T, N, V] of this rank's heads, op by op."""
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
        return kernels.attend(query, keys, values, batch, spec)
