"""GGUF files for tests, written by the `gguf` package from transformers models, by the published converter's rules.

The names, the order of rows and the split of `kv_b_proj` are written down here a second time on purpose: they are the
oracle of `model/gguf_names.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
Tensors = Mapping[str, np.ndarray]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(tensors: Tensors, config: Mapping[str, Any], architecture: str, *, absorbed: bool = True) -> dict:
    """Tensors of a Hugging Face checkpoint as a GGUF file names and orders them."""
    result: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    plain = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, value in tensors.items():
        if name in plain:
            result[plain[name]] = value
        elif name == "lm_head.weight":
            if not config.get("tie_word_embeddings"):
                result["output.weight"] = value
        elif match := EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{match[1]}.{EXPERT_NAMES[match[3]]}.weight", {})[int(match[2])] = value
        elif name.endswith("e_score_correction_bias"):
            result[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = value
        else:
            _, _, layer, *middle, end = name.split(".")
            part = ".".join(middle)
            if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                key = "num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"
                value = permuted(value, config[key])
            if part == "self_attn.kv_b_proj" and absorbed:
                nope, width = config["qk_nope_head_dim"], config["v_head_dim"]
                both = value.reshape(config["num_attention_heads"], nope + width, -1)
                result[f"blk.{layer}.attn_k_b.weight"] = both[:, :nope].transpose(0, 2, 1)
                result[f"blk.{layer}.attn_v_b.weight"] = both[:, nope:]
            else:
                result[f"blk.{layer}.{NAMES[part]}.{end}"] = value
    for name, parts in experts.items():
        result[name] = np.stack([parts[index] for index in range(len(parts))])
    return result


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Tensors, types: Mapping[str, str] | None = None
) -> None:
    """Write a file. `types`: a type name for tensors whose name holds the key; their rows must divide."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, value in tensors.items():
        kind = next((kind for part, kind in (types or {}).items() if part in name), None)
        value = np.ascontiguousarray(value)
        if kind is None or value.ndim < 2:
            writer.add_tensor(name, value.astype(np.float32))
        else:
            number = GGMLQuantizationType[kind]
            writer.add_tensor(name, quants.quantize(value.astype(np.float32), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def metadata_of(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The metadata that the published converter writes for a config.json, without a tokenizer."""
    rope = config.get("rope_parameters") or {}
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)), "vocab_size": config["vocab_size"],
    }  # fmt: skip
    if rope.get("rope_type") in ("yarn", "linear"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope.get("rope_type") == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "mscale_all_dim" in rope:
            values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if experts:
        values |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if config.get("moe_intermediate_size"):
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if architecture == "deepseek2":
        values |= _deepseek(config)
    elif config.get("head_dim"):
        values |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    values: dict[str, Any] = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": rank, "attention.key_length": rank + rope,
        "attention.value_length": rank, "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": rope,
        "leading_dense_block_count": config["first_k_dense_replace"], "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
    }  # fmt: skip
    if config.get("q_lora_rank"):
        values["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("n_group"):
        values |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if config["model_type"] == "deepseek_v3":
        values |= {"expert_gating_func": 2, "expert_weights_norm": bool(config["norm_topk_prob"])}
    return values


HALVES = {
    "Q6_K": (208,), "Q2_K": (80, 82), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
}  # fmt: skip


def tame_raw(name: str, rows: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks [rows, bytes] whose scales are of ordinary size, so that a model of them stays finite."""
    raw = rng.integers(0, 256, (rows * blocks, GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]), dtype=np.uint8)
    if name == "MXFP4":
        raw[:, 0] = rng.integers(110, 130, len(raw))
    else:
        for start in HALVES.get(name, (0,)):
            size = 0.02 / {"IQ4_XS": 1000, "Q6_K": 2000, "Q4_K": 300, "Q5_K": 600, "Q8_0": 100}.get(name, 50)
            raw[:, start : start + 2] = rng.normal(0, size, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)
