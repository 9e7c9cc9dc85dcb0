"""The families Coterie runs, each as one value: which attention and router, and what an absent key means.

A family is data, not a class of its own: `spec/hf.py` reads every one of them through the same few functions. Defaults
are those of the published implementation (transformers) where it has one for that family; a key that is neither in the
file nor here is an error. `docs/families.md` states where implementations disagree and which one is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RouterRule:
    """The part of a router that the family's code fixes. `topk_methods`: the selections a file may name."""

    scoring: Literal["softmax", "sigmoid"]
    correction_bias: bool = False
    group_score: Literal["max", "top2_sum"] = "max"
    norm_epsilon: float = 0.0
    scale_normalized: bool = True
    always_normalize: bool = False
    topk_methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    `layers`: how dense and routed layers alternate. `bias_key`: the config key that switches the projection biases
    (None: the family has none), `output_bias`: whether the output projection follows it. `fixed`: keys that the
    family's code does not vary, with the values a file may give; any other value is refused. `shared`: how the shared
    expert is sized. `window`: what makes a sliding window act (its presence, a switch, a layer number past
    `max_window_layers`). `dense_key`, `expert_key`: the keys of the inner widths. `gated`: whether a dense feed-forward
    has a gate. `unread`: keys that do not alter sizes, of a family that can be planned only.
    """

    model_type: str
    attention: Literal["mla", "gqa"]
    layers: Literal["dense", "first_k", "sparse_step", "all_routed", "interleaved"]
    defaults: Mapping[str, Any]
    router: RouterRule | None = None
    bias_key: str | None = None
    output_bias: bool = False
    qk_norm: Literal["always", "never", "use_qk_norm"] = "never"
    partial_rotary: bool = False
    shared: Literal["none", "count", "width"] = "none"
    window: Literal["none", "always", "switch", "upper_layers"] = "none"
    has_mtp: bool = False
    dense_key: str = "intermediate_size"
    expert_key: str = "moe_intermediate_size"
    gated: bool = True
    unread: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_V2_ROUTER = RouterRule(
    "softmax", norm_epsilon=1e-20, scale_normalized=False, topk_methods=("greedy", "group_limited_greedy")
)
_V3_ROUTER = RouterRule(
    "sigmoid", correction_bias=True, group_score="top2_sum", norm_epsilon=1e-20, topk_methods=("noaux_tc",)
)
_SOFTMAX_ROUTER = RouterRule("softmax")
_MIXTRAL_ROUTER = RouterRule("softmax", always_normalize=True)

_COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MLA: Mapping[str, Any] = {
    **_COMMON,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "latent_norm_eps": 1e-6,
    "moe_layer_freq": 1,
}
_V3: Mapping[str, Any] = {
    **_MLA,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_DEEPSEEK_V2 = Family(
    "deepseek_v2",
    attention="mla",
    layers="first_k",
    router=_V2_ROUTER,
    bias_key="attention_bias",
    output_bias=True,
    shared="count",
    fixed={"scoring_func": ("softmax",), "rope_interleave": (True,), "mlp_bias": (False,)},
    defaults={
        **_MLA,
        "vocab_size": 102400,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 1407,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    attention="mla",
    layers="first_k",
    router=_V3_ROUTER,
    bias_key="attention_bias",
    output_bias=True,
    shared="count",
    has_mtp=True,
    fixed={"scoring_func": ("sigmoid",)},
    defaults=_V3,
)
_KIMI_K2 = Family(
    "kimi_k2",
    attention="mla",
    layers="first_k",
    router=_V3_ROUTER,
    bias_key="attention_bias",
    output_bias=True,
    shared="count",
    has_mtp=True,
    fixed={"scoring_func": ("sigmoid",)},
    defaults={**_V3, "num_nextn_predict_layers": 0, "bos_token_id": None, "eos_token_id": None},
)
_GLM4_MOE = Family(
    "glm4_moe",
    attention="gqa",
    layers="first_k",
    router=_V3_ROUTER,
    bias_key="attention_bias",
    qk_norm="use_qk_norm",
    partial_rotary=True,
    shared="count",
    has_mtp=True,
    fixed={"scoring_func": ("sigmoid",)},
    defaults={
        **_COMMON,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
    },
)
_GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    attention="mla",
    layers="first_k",
    router=_V3_ROUTER,
    bias_key="attention_bias",
    output_bias=True,
    shared="count",
    has_mtp=True,
    fixed={"scoring_func": ("sigmoid",)},
    defaults={
        **_MLA,
        "rms_norm_eps": 1e-5,
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
)
_DOTS1 = Family(
    "dots1",
    attention="gqa",
    layers="first_k",
    router=_V3_ROUTER,
    bias_key="attention_bias",
    output_bias=True,
    qk_norm="always",
    shared="count",
    window="upper_layers",
    # The released file writes "noaux_tc", the name of the selection, where the score function belongs.
    fixed={"scoring_func": ("sigmoid", "noaux_tc")},
    defaults={
        **_COMMON,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
)
_QWEN2_MOE = Family(
    "qwen2_moe",
    attention="gqa",
    layers="sparse_step",
    router=_SOFTMAX_ROUTER,
    bias_key="qkv_bias",
    shared="width",
    window="switch",
    defaults={
        **_COMMON,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "norm_topk_prob": False,
        "num_experts_per_tok": 4,
    },
)
_QWEN3_MOE = Family(
    "qwen3_moe",
    attention="gqa",
    layers="sparse_step",
    router=_SOFTMAX_ROUTER,
    bias_key="attention_bias",
    output_bias=True,
    qk_norm="always",
    window="switch",
    defaults={
        **_COMMON,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "norm_topk_prob": False,
        "num_experts_per_tok": 8,
    },
)
_MIXTRAL = Family(
    "mixtral",
    attention="gqa",
    layers="all_routed",
    router=_MIXTRAL_ROUTER,
    expert_key="intermediate_size",
    window="always",
    fixed={"norm_topk_prob": (True,)},
    defaults={
        **_COMMON,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
_LLAMA = Family(
    "llama",
    attention="gqa",
    layers="dense",
    bias_key="attention_bias",
    output_bias=True,
    fixed={"mlp_bias": (False,)},
    defaults={**_COMMON, "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": None},
)
_QWEN3 = Family(
    "qwen3",
    attention="gqa",
    layers="dense",
    bias_key="attention_bias",
    output_bias=True,
    qk_norm="always",
    window="switch",
    defaults={**_COMMON, "head_dim": 128, "use_sliding_window": False, "sliding_window": 4096},
)
_QWEN2 = Family(
    "qwen2",
    attention="gqa",
    layers="dense",
    bias_key="qkv_bias",
    window="switch",
    fixed={"qkv_bias": (True,)},
    defaults={**_COMMON, "qkv_bias": True, "use_sliding_window": False, "sliding_window": 4096},
)
_MISTRAL = Family(
    "mistral",
    attention="gqa",
    layers="dense",
    window="always",
    defaults={**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        _DEEPSEEK_V2,
        _DEEPSEEK_V3,
        _KIMI_K2,
        _GLM4_MOE,
        _GLM4_MOE_LITE,
        _DOTS1,
        _QWEN2_MOE,
        _QWEN3_MOE,
        _MIXTRAL,
        _LLAMA,
        _QWEN3,
        _QWEN2,
        _MISTRAL,
    )
}

_LLAMA4 = Family(
    "llama4_text",
    attention="gqa",
    layers="interleaved",
    router=RouterRule("sigmoid"),
    bias_key="attention_bias",
    output_bias=True,
    shared="count",
    dense_key="intermediate_size_mlp",
    expert_key="intermediate_size",
    unread=(
        "attention_chunk_size",
        "attn_scale",
        "attn_temperature_tuning",
        "floor_scale",
        "for_llm_compressor",
        "layer_types",
        "moe_layers",
        "no_rope_layer_interval",
        "no_rope_layers",
        "use_qk_norm",
    ),
    defaults={**_COMMON, "num_experts_per_tok": 1, "n_shared_experts": 1, "norm_topk_prob": False},
)
_GPT3 = Family(
    "gpt3",
    attention="gqa",
    layers="dense",
    bias_key="attention_bias",
    output_bias=True,
    gated=False,
    fixed={"hidden_act": ("gelu",)},
    defaults={**_COMMON, "hidden_act": "gelu", "attention_bias": True, "num_key_value_heads": None},
)

PLANNED: Mapping[str, Family] = {family.model_type: family for family in (_LLAMA4, _GPT3)}
"""Families whose sizes are values though their mathematics is not: `coterie plan` compares with them, nothing runs
them. Norms' and feed-forwards' biases and learned positions are not counted (0.02 % of GPT-3)."""

MISSING: Mapping[str, str] = {
    "deepseek_v32": "a sparse-attention indexer with its own key cache",
    "deepseek_v4": "compressed key caches, sliding-window rings, residual streams and hash routing",
    "deepseek_v41": "compressed and shared key caches, residual streams and n-gram embedding tables",
    "glm_moe_dsa": "a sparse-attention indexer with its own key cache",
    "glm5_next": "linear-attention layers, a pooled indexer and residual streams",
    "glm5_next_text": "linear-attention layers, a pooled indexer and residual streams",
    "kimi_linear": "linear-attention layers (KDA)",
    "kimi_k3": "linear-attention layers (KDA) and an attention-residual bank",
    "kimi_k25": "a vision wrapper whose text_config holds the language model; give that text_config a supported type",
    "qwen3_next": "linear-attention layers (gated delta net) and gated full attention",
    "qwen3_5_moe": "linear-attention layers (gated delta net) and gated full attention",
    "qwen3_5_moe_text": "linear-attention layers (gated delta net) and gated full attention",
    "qwen4_exp": "linear-attention layers, indexed attention and per-layer n-gram tables",
    "llama4": "chunked attention, layers without rope and expert input scaling",
    "llama4_text": "chunked attention, layers without rope and expert input scaling",
    "gpt3": "a feed-forward without gate, learned positions and LayerNorm",
    "gpt_oss": "attention sinks, sliding-window layers and a clamped activation",
    "minimax": "lightning (linear) attention and a scaled residual of the normed input",
    "minimax_m2": "query/key norms over the whole projection width",
    "minimax_m3_vl": "block-sparse attention and zero-centred norms",
    "minimax_m3_vl_text": "block-sparse attention and zero-centred norms",
    "bailing_moe_v2": "its own tensor names with a fused query_key_value projection",
    "bailing_hybrid": "linear-attention layers (KDA) and gated MLA",
    "ernie4_5_moe": "interleaved rope on grouped attention and its own router tensor names",
    "hunyuan_v1_moe": "dynamic rope and query/key norms after rope",
    "hy_v3": "its own router tensor names",
    "hy_v4": "a sparse-attention indexer, attention sinks and residual streams",
    "olmoe": "query/key norms over the whole projection width and clipped projections",
    "mimo_v2_flash": "sliding-window layers with attention sinks and unequal key and value heads",
    "longcat_flash": "two attention blocks per layer, identity experts and scaled latents",
    "mistral4": "position-dependent query temperature",
    "phimoe": "sparse-mixer routing and longrope",
    "dbrx": "its own tensor names with fused projections and clipped attention",
    "gemma3": "sliding-window layers, zero-centred norms and scaled embeddings",
    "gemma3_text": "sliding-window layers, zero-centred norms and scaled embeddings",
    "glm4": "interleaved partial rope and norms after each block",
}
"""Families that are known but need more than values, with what is missing."""
