"""Which configurations are compared with transformers, and for each a change of the config that must be noticed.

The shared matrix gives one entry a family; ours vary what the DeepSeek families vary. `override` is what our
config.json says differently from the oracle's for the same mathematics (transformers crashes on `n_group: null`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oracle import MAX_POSITIONS, Entry, matrix_entries

BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": MAX_POSITIONS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "intermediate_size": 96, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 24,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def yarn(**values: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16,
        "beta_fast": 32, "beta_slow": 1, **values,
    }  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0,
}  # fmt: skip
V2 = {
    **BASE, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707),
}  # fmt: skip
V3 = {
    **BASE, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_mtp_layers": 0, "n_group": 4, "topk_group": 2,
    "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An oracle entry, our differing spelling, and the mutations (config changes) that it must detect."""

    entry: Entry
    mutation: dict[str, Any]
    override: dict[str, Any] = field(default_factory=dict)


def _v2(name: str, mutation: dict[str, Any], bias_shift: float = 0.0, **values: Any) -> Case:
    entry = Entry(name, "DeepseekV2Config", "DeepseekV2ForCausalLM", {**V2, **values}, bias_shift=bias_shift)
    return Case(entry, mutation)


def _v3(
    name: str, mutation: dict[str, Any], bias_shift: float = 0.0, override: dict[str, Any] | None = None, **values: Any
) -> Case:
    entry = Entry(name, "DeepseekV3Config", "DeepseekV3ForCausalLM", {**V3, **values}, bias_shift=bias_shift)
    return Case(entry, mutation, override or {})


def _other(
    name: str, family: str, mutation: dict[str, Any], override: dict[str, Any] | None = None, **values: Any
) -> Case:
    common = {
        "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "tie_word_embeddings": False, "intermediate_size": 96,
    }  # fmt: skip
    return Case(Entry(name, f"{family}Config", f"{family}ForCausalLM", {**common, **values}), mutation, override or {})


MATRIX_MUTATIONS: dict[str, dict[str, Any]] = {
    "ds2-lite": {"routed_scaling_factor": 2.0},
    "ds3": {"norm_topk_prob": False},
    "ds3-moonlight": {"rms_norm_eps": 1e-6},
    "ds3-mtp": {"routed_scaling_factor": 1.0},
    "glm4-moe": {"norm_topk_prob": False},
    "glm47-flash": {"routed_scaling_factor": 1.0},
    "dots1": {"norm_topk_prob": False},
    "qwen2-moe": {"norm_topk_prob": True},
    "qwen3-moe": {"norm_topk_prob": False},
    "mixtral": {"num_experts_per_tok": 1},
    "llama-dense": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "qwen3-dense": {"rms_norm_eps": 1e-2},
}
MATRIX_CASES = [Case(entry, MATRIX_MUTATIONS[entry.id]) for entry in matrix_entries(list(MATRIX_MUTATIONS))]

OWN_CASES = [
    _v2("v2-groups-max-q-lora", {"topk_group": 4}, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=16.0),
    _v2("v2-groups-one-kept", {"topk_group": 2}, n_group=4, topk_group=1, topk_method="group_limited_greedy",
        num_experts_per_tok=2, q_lora_rank=None),
    _v2("v2-no-dense-layer", {"rope_parameters": yarn(mscale=0.707, mscale_all_dim=1.0)}, first_k_dense_replace=0),
    _v2("v2-yarn-mscale-differs", {"rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707)},
        rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.5)),
    _v3("v3-all-scores-negative", {"topk_group": 4}, bias_shift=-5.0),
    _v3("v3-bias-plus-five-groups-8", {"topk_group": 8}, bias_shift=5.0, n_group=8, topk_group=3),
    _v3("v3-groups-null-raw-weights", {"norm_topk_prob": True}, q_lora_rank=None, norm_topk_prob=False,
        routed_scaling_factor=1.5, n_group=1, topk_group=1, override={"n_group": None, "topk_group": None}),
    _v3("v3-two-dense-layers", {"routed_scaling_factor": 2.0}, num_hidden_layers=4, first_k_dense_replace=2),
    _v3("v3-all-moe", {"topk_group": 1}, first_k_dense_replace=0, num_hidden_layers=2),
    _v3("v3-yarn-mscale-differs", {"rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)},
        rope_parameters=yarn(mscale=0.5, mscale_all_dim=1.0)),
    _v3("v3-yarn-no-all-dim", {"rope_parameters": yarn(mscale_all_dim=1.0, mscale=1.0)},
        rope_parameters=yarn(mscale=1.0)),
    _v3("v3-yarn-bare", {"rope_parameters": PLAIN_ROPE}, rope_parameters=yarn(factor=4.0)),
    _v3("v3-yarn-ramp-one-wide", {"rope_parameters": {**yarn(mscale=1.0, mscale_all_dim=1.0), "factor": 32.0,
        "rope_theta": 50000.0, "original_max_position_embeddings": 128}},
        rope_parameters={**yarn(mscale=1.0, mscale_all_dim=1.0), "factor": 32.0, "rope_theta": 50000.0,
        "beta_fast": 1, "beta_slow": 1, "original_max_position_embeddings": 128}),
    _v3("v3-yarn-truncate-null", {"rope_parameters": {**yarn(mscale=1.0, mscale_all_dim=1.0, truncate=True),
        "rope_theta": 100.0, "original_max_position_embeddings": 128}},
        rope_parameters={**yarn(mscale=1.0, mscale_all_dim=1.0, truncate=None), "rope_theta": 100.0,
        "original_max_position_embeddings": 128}),
    _v3("v3-tied-head", {"routed_scaling_factor": 1.0}, tie_word_embeddings=True),
    _v3("v3-odd-sizes", {"topk_group": 3}, hidden_size=60, num_attention_heads=3, num_key_value_heads=3,
        qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, kv_lora_rank=22, q_lora_rank=18, vocab_size=101,
        moe_intermediate_size=21, intermediate_size=75, n_routed_experts=12, num_experts_per_tok=5, n_group=3),
    _v3("v3-top-1", {"norm_topk_prob": False}, num_experts_per_tok=1),
    _v3("v3-attention-bias", {"rope_interleave": False}, attention_bias=True),
    _v3("v3-rope-half-split", {"rope_interleave": True}, rope_interleave=False),
    _v3("v3-value-wider", {"num_experts_per_tok": 3}, v_head_dim=24, n_shared_experts=3),
    _other("mixtral-top-3-of-5", "Mixtral", {"num_experts_per_tok": 2}, num_local_experts=5, num_experts_per_tok=3,
           sliding_window=None),
    _other("qwen3-moe-every-second", "Qwen3Moe", {"norm_topk_prob": True}, num_experts=8, num_experts_per_tok=3,
           moe_intermediate_size=32, norm_topk_prob=False, decoder_sparse_step=2, num_hidden_layers=4, head_dim=16),
    _other("qwen3-yarn-tied", "Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, head_dim=16,
           tie_word_embeddings=True, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
           "original_max_position_embeddings": 64}),
    _other("llama-bias-linear-rope", "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
           attention_bias=True, head_dim=18,
           rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    _other("glm4-moe-air", "Glm4Moe",
           {"partial_rotary_factor": 1.0, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 1.0}},
           head_dim=16, moe_intermediate_size=32,
           n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=1, topk_group=1,
           first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.0, use_qk_norm=False,
           attention_bias=False, partial_rotary_factor=0.5, num_mtp_layers=0),
    _other("qwen2-moe-normed", "Qwen2Moe", {"norm_topk_prob": False}, num_experts=6, num_experts_per_tok=2,
           moe_intermediate_size=24, shared_expert_intermediate_size=40, norm_topk_prob=True, qkv_bias=True),
    _v2("v2-one-layer-all-experts", {"routed_scaling_factor": 1.0}, num_hidden_layers=1, first_k_dense_replace=0,
        num_experts_per_tok=8, n_group=8, topk_group=8, topk_method="group_limited_greedy", routed_scaling_factor=0.5,
        qk_rope_head_dim=16, v_head_dim=5, rms_norm_eps=0.1),
    _other("glm4-moe-groups-three-quarters", "Glm4Moe", {"topk_group": 3}, head_dim=16, hidden_size=33,
           num_key_value_heads=1, moe_intermediate_size=21, n_routed_experts=6, num_experts_per_tok=2, n_group=3,
           topk_group=2, n_shared_experts=2, use_qk_norm=True, attention_bias=True, num_mtp_layers=0, vocab_size=101,
           rope_parameters={**yarn(attention_factor=0.8, factor=2.5), "partial_rotary_factor": 0.75}),
    _other("glm47-flash-mixed-layers", "Glm4MoeLite", {"rope_interleave": True}, num_key_value_heads=4,
           mlp_layer_types=["sparse", "dense", "sparse"], kv_lora_rank=33, q_lora_rank=None, qk_nope_head_dim=7,
           qk_rope_head_dim=10, v_head_dim=24, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=3,
           n_group=2, topk_group=1, rope_interleave=False, attention_bias=True),
    _other("dots1-groups-biases", "Dots1", {"topk_group": 4}, head_dim=18, hidden_size=60, num_key_value_heads=4,
           moe_intermediate_size=33, n_routed_experts=12, num_experts_per_tok=6, n_shared_experts=3, n_group=4,
           topk_group=2, first_k_dense_replace=0, attention_bias=True, sliding_window=None, norm_topk_prob=True,
           routed_scaling_factor=2.5),
    _other("qwen3-moe-all-experts-one-key-head", "Qwen3Moe", {"num_experts_per_tok": 5}, num_key_value_heads=1,
           hidden_size=33, head_dim=18, num_experts=6, num_experts_per_tok=6, moe_intermediate_size=1,
           mlp_only_layers=[0], attention_bias=True, rms_norm_eps=0.3, tie_word_embeddings=True, vocab_size=101,
           rope_parameters={"rope_type": "linear", "rope_theta": 25.5, "factor": 0.5}),
    _other("llama3-rope-original-absent", "Llama",
           {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
           {"rope_parameters": LLAMA3}, rope_parameters=LLAMA3),
    _other("llama3-tied-head-dim", "Llama",
           {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 128}}, head_dim=24,
           tie_word_embeddings=True, num_hidden_layers=2, intermediate_size=88,
           rope_parameters={**LLAMA3, "factor": 32.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 128}),
    _other("qwen2-dense-tied", "Qwen2", {"rms_norm_eps": 1e-2}, num_key_value_heads=1, tie_word_embeddings=True,
           rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    _other("mistral-dense", "Mistral", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
           head_dim=20, sliding_window=None, rms_norm_eps=1e-5),
]  # fmt: skip

ALL_CASES = MATRIX_CASES + OWN_CASES
