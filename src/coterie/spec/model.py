"""ModelSpec: what a model *is*, as frozen values, and every number that follows from that.

Families are values, not classes: a model is a tuple of `LayerSpec(attention, ffn)`, so a hybrid is no special case.
Parameters, weight bytes, KV bytes and FLOPs per token are derived here and only here, so `plan` and `serve` agree.
This file holds no parsing (`spec/hf.py` reads a Hugging Face config), no tensor names (`model/names.py`) and no arrays.
Shape letters: H hidden, N heads, E experts, K experts per token, I intermediate width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from coterie.spec.cache import CacheKind, CacheStream
from coterie.spec.counts import WeightCounts, model_counts, mtp_counts
from coterie.spec.stored import StoredQuant


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dim` channels of a head, or of MLA's separate rope part.

    `interleaved` rotates channels (2i, 2i+1); otherwise (i, i + dim/2). `attention_factor` multiplies cos and sin and
    is already resolved (YaRN's m(mscale)/m(mscale_all_dim), or what the file says); the softmax's share of YaRN is in
    `AttentionSpec.softmax_scale`. Angles: `spec/rope.py`.
    """

    dim: int
    theta: float
    interleaved: bool
    scaling: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """MLA or GQA. MLA: `qk_head_dim` = `qk_nope_head_dim` + `qk_rope_head_dim`; one latent of `kv_lora_rank` + rope.

    `q_bias`/`o_bias`: GQA has the first on q, k and v; MLA on q_a and kv_a (never on q_b, kv_b or a single q_proj).
    """

    kind: Literal["mla", "gqa"]
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope: RopeSpec
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    latent_norm_eps: float = 1e-6
    q_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6

    @property
    def latent_width(self) -> int:
        """Width of MLA's cache row: the compressed latent and the shared rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def cache_streams(self) -> tuple[CacheStream, ...]:
        if self.kind == "mla":
            return (CacheStream("latent", "append", self.latent_width, exact=self.qk_rope_head_dim),)
        heads = self.num_kv_heads
        return (
            CacheStream("key", "append", heads * self.qk_head_dim, heads=heads),
            CacheStream("value", "append", heads * self.v_head_dim, heads=heads),
        )


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A gated MLP: down(silu(gate x) * up x). Not `gated`: down(act(up x)), which is planned but not run."""

    intermediate_size: int
    gated: bool = True

    def counts(self, hidden: int) -> WeightCounts:
        """Weights by kind."""
        return WeightCounts(dense=(3 if self.gated else 2) * hidden * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Routed and shared experts of one layer; the router's rule is DeepSeek's unless a value says otherwise.

    Selection sees score + correction bias, weights use the unbiased score. `num_groups` <= 1 means plain top-k;
    otherwise the best `topk_groups` groups stay and all other experts are excluded with -inf. `group_score`: V2 `max`,
    V3 `top2_sum`. Weights: normalised by (sum + `norm_epsilon`) if `normalize`, then multiplied by
    `routed_scaling_factor` unless (`normalize` and not `scale_normalized`): the V2 exception. The shared expert is
    never scaled; `shared_gate` multiplies it by sigmoid(x . g) (Qwen2-MoE).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    normalize: bool = False
    norm_epsilon: float = 0.0
    scale_normalized: bool = True
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0
    shared_gate: bool = False

    def counts(self, hidden: int) -> WeightCounts:
        """Weights by kind, of all experts."""
        return WeightCounts(
            shared=3 * hidden * self.shared_intermediate_size,
            routed=self.num_experts * 3 * hidden * self.intermediate_size,
            other=self.num_experts * hidden + hidden * self.shared_gate,
            vectors=self.num_experts * self.correction_bias,
        )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: pre-norm attention, pre-norm feed-forward, plain residual."""

    attention: AttentionSpec
    ffn: DenseSpec | MoESpec
    residual: Literal["plain"] = "plain"


@dataclass(frozen=True, slots=True)
class Fp8BlockQuant:
    """DeepSeek's FP8 checkpoint format: e4m3 weights, one fp32 multiplier per (rows x cols) block, last ones short."""

    block_rows: int = 128
    block_cols: int = 128


@dataclass(frozen=True)
class ModelSpec:
    """A whole model. `layers` are the decoder layers; `mtp_layers` the multi-token-prediction blocks after them.

    `ignored_fields` lists config keys that were seen and cannot alter the mathematics, `unknown_fields` unheard-of
    ones that say nothing (null, false, empty); the loader reports both.
    `dtype` is the checkpoint's declared weight type ("float32", "bfloat16", "float16").
    `missing`: what the engine lacks to run it; such a model is only planned, as a comparison.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_positions: int
    tie_embeddings: bool = False
    mtp_layers: tuple[LayerSpec, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    quantization: Fp8BlockQuant | StoredQuant | None = None
    ignored_fields: tuple[str, ...] = ()
    unknown_fields: tuple[str, ...] = ()
    missing: str = ""

    @classmethod
    def from_hf(
        cls, source: str | Path | Mapping[str, Any], *, strict: bool = False, planned: bool = False
    ) -> ModelSpec:
        """Read a `config.json` (a path to it, its folder, or the parsed mapping). See `spec/hf.py` for the rules.

        Raises `SpecError` for an unknown family, a missing field or an unknown field that may alter the mathematics;
        with `strict` also for an unknown field that switches nothing on. `planned`: also families that are only sized.
        """
        from coterie.spec.hf import spec_from_hf

        return spec_from_hf(source, strict=strict, planned=planned)

    @cached_property
    def counts(self) -> WeightCounts:
        """Weights of the main model by kind; MTP blocks excluded."""
        return model_counts(self)

    @cached_property
    def mtp_counts(self) -> WeightCounts:
        """The same of the MTP blocks."""
        return mtp_counts(self)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[LayerSpec, int], ...]:
        """Decoder layers that are alike, and how many there are of each, in order of first appearance."""
        return tuple(Counter(self.layers).items())

    @property
    def num_parameters(self) -> int:
        """All weights of the main model (embedding, layers, final norm, head unless tied); MTP blocks excluded."""
        return self.counts.total

    @cached_property
    def num_active_parameters(self) -> int:
        """Weights that one token multiplies: all but unselected routed experts and the embedding row look-up."""
        idle = sum(
            (moe.num_experts - moe.top_k) * 3 * self.hidden_size * moe.intermediate_size for _, moe in self.moe_layers()
        )
        return self.counts.total - idle - (0 if self.tie_embeddings else self.counts.embedding)

    @property
    def num_mtp_parameters(self) -> int:
        """Weights of the MTP blocks (embedding and head are shared)."""
        return self.mtp_counts.total

    def weight_bytes(self, bytes_per_value: float = 2) -> int:
        """Bytes of the main model's weights at a uniform width."""
        return round(self.num_parameters * bytes_per_value)

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> int:
        """Bytes that one token adds to the cache over all decoder layers at a uniform width."""
        return round(sum(stream.width / stream.tokens_per_row for stream in self._growing_streams()) * bytes_per_value)

    def cache_bytes_per_token(self, kind: CacheKind) -> int:
        """The same for a kind of cache, scales included."""
        return round(sum(stream.row_bytes(kind) / stream.tokens_per_row for stream in self._growing_streams()))

    def _growing_streams(self) -> Iterator[CacheStream]:
        """Append streams that own storage."""
        for layer in self.layers:
            for stream in layer.attention.cache_streams:
                if stream.kind == "append" and stream.owner_layer is None:
                    yield stream

    def flops_per_token(self, context: int = 0) -> int:
        """Multiply-adds x 2 for one token at a context length, attention absorbed for MLA (scores and values)."""
        attention = 0
        for layer in self.layers:
            spec = layer.attention
            grouped = spec.qk_head_dim + spec.v_head_dim
            widths = spec.latent_width + spec.kv_lora_rank if spec.kind == "mla" else grouped
            attention += spec.num_heads * widths * context
        return 2 * (self.num_active_parameters - self.counts.vectors + attention)

    def moe_layers(self) -> Iterator[tuple[int, MoESpec]]:
        """(layer index, MoESpec) of every decoder layer that routes."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer.ffn, MoESpec):
                yield index, layer.ffn
