"""Attention blocks: absorbed MLA and GQA over paged caches or packed rows. Weights are split and absorbed at load.

MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1), for every row in its absorbed form:
    c_kv [T, R] = RMSNorm(W_DKV x), k_rope [T, r] = RoPE(W_KR x): together the cache row, shared by all heads
    q = [W_UK^T q_nope | RoPE(q_rope)]  [T, N, R + r];   scores = softmax_scale * q . row
    o = W_UV (softmax(scores) c_kv)     [T, N, V];       out = W_O concat(o)
The latent is never expanded, so a generated page can be reused as a prompt's page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coterie.kernels.api import Array, Bank, Kernels, Prepared
from coterie.spec.model import AttentionSpec

LayerCache = dict[str, Array]
"""The cache streams of one layer by name; empty when the batch has no cache."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One projection with an optional bias."""

    weight: Bank
    bias: Array | None
    kernels: Kernels

    def forward(self, x: Array) -> Array:
        """[T, cols] -> [T, rows]."""
        return self.kernels.linear(x, self.weight, self.bias)


class Attention(Protocol):
    """What a decoder layer asks of its attention."""

    def forward(self, x: Array, batch: Prepared, cache: LayerCache) -> Array:
        """Normed input [T, H] -> [T, H]; writes the step's rows to the cache first."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA. With `q_a` None the query comes from one projection `q_b` of x (V2-Lite, Moonlight)."""

    spec: AttentionSpec
    q_a: Linear | None
    q_norm: Array | None
    q_b: Linear
    kv_a: Linear
    kv_norm: Array
    w_uk: Bank
    w_uv: Bank
    o: Linear
    rope: Array
    kernels: Kernels

    def forward(self, x: Array, batch: Prepared, cache: LayerCache) -> Array:
        spec, kernels = self.spec, self.kernels
        latent_q = x
        if self.q_a is not None:
            latent_q = kernels.norm(self.q_a.forward(x), self.q_norm, spec.latent_norm_eps)
        query, rows = kernels.mla_inputs(
            self.q_b.forward(latent_q), self.kv_a.forward(x), self.w_uk, self.kv_norm, self.rope, batch.positions, spec
        )
        if cache:
            kernels.cache_write(cache["latent"], rows, batch, spec.cache_streams[0])
        out = kernels.attend(query, cache["latent"] if cache else rows, None, batch, spec)
        values = kernels.head_linear(out, self.w_uv)
        return self.o.forward(values.reshape(-1, spec.num_heads * spec.v_head_dim))


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention with optional per-head QK norm (before rope) and biases."""

    spec: AttentionSpec
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    norms: tuple[Array, Array] | None
    rope: Array
    kernels: Kernels

    def forward(self, x: Array, batch: Prepared, cache: LayerCache) -> Array:
        spec, kernels = self.spec, self.kernels
        query, keys = kernels.gqa_inputs(
            self.q.forward(x), self.k.forward(x), self.norms, self.rope, batch.positions, spec
        )
        values = self.v.forward(x)
        if cache:
            for stream, rows in zip(spec.cache_streams, (keys, values), strict=True):
                kernels.cache_write(cache[stream.name], rows, batch, stream)
            keys, values = cache["key"], cache["value"]
        out = kernels.attend(query, keys, values, batch, spec)
        return self.o.forward(out.reshape(-1, spec.num_heads * spec.v_head_dim))
