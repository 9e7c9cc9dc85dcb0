"""GGUF tensor names to the ones of `model/names.py`, and the one place where values are stored in another order.

Architecture `llama` (also Mistral and Mixtral) stores the rows of q and k so that neighbouring rows are rotated
together; `pair_rows` is the head's width there and the loader puts the rows back. Everything else is renaming.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from coterie.model.safetensors_io import StoredTensor

_PLAIN = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(
    r"blk\.(?P<layer>\d{1,5})\.(?P<name>[a-z0-9_]+)(?:\.(?P<expert>\d{1,5}))?(?:\.(?P<end>weight|bias))?"
)
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp": "{moe}.gate",
}
_STACKED = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
    "ffn_gate_up_exps": "gate_up_proj",
}
_PER_EXPERT = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}


def canonical_tensors(
    tensors: Mapping[str, StoredTensor], architecture: str, config: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """Tensors under the names of a Hugging Face folder of the same model; unknown names stay and are refused later."""
    mixtral = config["model_type"] == "mixtral"
    moe = "block_sparse_moe" if mixtral else "mlp"
    head_dim = config.get("head_dim")
    pair_rows = head_dim if architecture == "llama" and isinstance(head_dim, int) else 0
    result: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _BLOCK.fullmatch(name)
        new = _PLAIN.get(name) if match is None else _block_name(match, moe)
        is_rotated = match is not None and match["name"] in ("attn_q", "attn_k")
        result[new or name] = replace(tensor, name=new or name, pair_rows=pair_rows if is_rotated else 0)
    return result


def _block_name(match: re.Match[str], moe: str) -> str | None:
    layer, name, end = f"model.layers.{match['layer']}", match["name"], match["end"]
    if match["expert"] is not None:
        projection = _PER_EXPERT.get(name)
        return f"{layer}.{moe}.experts.{match['expert']}.{projection}.weight" if projection else None
    if name == "exp_probs_b":
        return f"{layer}.{moe}.gate.e_score_correction_bias"
    if name in _STACKED:
        return f"{layer}.{moe}.experts.{_STACKED[name]}"
    part = _PARTS.get(name)
    return f"{layer}.{part.format(moe=moe)}.{end or 'weight'}" if part else None
