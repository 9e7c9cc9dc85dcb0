"""GGUF metadata to the config.json that describes the same model: families stay values, read by `spec/hf.py` alone.

One function an architecture; a key that nobody read and that is not known to be harmless is refused, as it may alter
the mathematics. Not here: tensor names (`gguf_names`), tokenizer (`gguf_tokenizer`), bytes (`gguf_file`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.model.safetensors_io import LoadError
from coterie.spec.model import RopeSpec
from coterie.spec.rope import inverse_frequencies

_HARMLESS = frozenset(
    {
        "vocab_size", "attention.causal", "tensor_data_layout", "pooling_type", "attention.max_alibi_bias",
        "rope.scaling.finetuned", "expert_group_scale", "interleave_moe_layer_step", "rope.scaling.yarn_ext_factor",
        "attention.layer_norm_epsilon",
    }
)  # fmt: skip
_LLAMA3_ORIGINALS = (8192, 4096, 2048, 16384, 32768, 65536, 131072)
_LLAMA3_BANDS = ((1.0, 4.0), (1.0, 8.0), (1.0, 2.0), (2.0, 4.0))
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a config is made from. `shapes` of all tensors, slowest dimension first; `rope_factors`: the values of
    rope_freqs.weight, which divide the frequencies (Llama 3), if the file has it."""

    name: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: NDArray[np.float32] | None


class _Keys:
    """Typed reading of one architecture's metadata; remembers what was read."""

    def __init__(self, facts: GgufFacts, architecture: str) -> None:
        self.facts, self.architecture = facts, architecture
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value; an array that says one thing for every layer counts as that thing."""
        full = f"{self.architecture}.{key}"
        self.read.add(full)
        value = self.facts.metadata.get(full, default)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.error(key, "differs from layer to layer, which is not supported")
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {value!r:.40}, not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. Files hold float32: the shortest decimal that means the same is what the author wrote."""
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"is {value!r:.40}, not a number")
        return float(str(np.float32(value)))

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.facts.metadata

    def error(self, key: str, text: str) -> LoadError:
        return LoadError(f"{self.facts.name}: metadata {self.architecture}.{key} {text}")

    def check_all_read(self) -> None:
        prefix = f"{self.architecture}."
        unread = [
            key
            for key in self.facts.metadata
            if key.startswith(prefix) and key not in self.read and key.removeprefix(prefix) not in _HARMLESS
        ]
        if unread:
            text = f"{self.facts.name}: metadata {', '.join(sorted(unread)[:4])} may alter the mathematics"
            raise LoadError(f"{text} and is not implemented for architecture {self.architecture}")


def config_of(facts: GgufFacts) -> dict[str, Any]:
    """The config.json of a GGUF model. Raises `LoadError` for an architecture or a setting that is not supported."""
    architecture = facts.metadata.get("general.architecture")
    make = _ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if make is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise LoadError(
            f"{facts.name}: architecture {architecture!r} is not read from GGUF; supported are {known}. "
            "If the model has a safetensors folder of a supported model_type, give that"
        )
    assert isinstance(architecture, str)
    keys = _Keys(facts, architecture)
    config = {**_common(keys), **make(keys)}
    keys.check_all_read()
    return config


# ---- what all share --------------------------------------------------------------------------------------------------
def _common(keys: _Keys) -> dict[str, Any]:
    embedding = keys.facts.shapes.get(_EMBEDDING)
    if embedding is None or len(embedding) != 2:
        raise LoadError(f"{keys.facts.name}: tensor {_EMBEDDING} is missing: one part of a split, or no language model")
    predictors = keys.integer("nextn_predict_layers", 0)
    layers = keys.integer("block_count") - predictors
    if layers < 1:
        raise keys.error("block_count", f"leaves {layers} layers")
    window, length = keys.integer("attention.sliding_window", 0), keys.integer("context_length")
    if 0 < window < length:
        raise keys.error("attention.sliding_window", f"is {window}: sliding-window attention is not supported")
    for key in ("attention.scale", "logit_scale", "embedding_scale", "residual_scale"):
        if keys.get(key, 1.0) not in (1.0, 0.0):
            raise keys.error(key, f"is {keys.get(key)}, which is not implemented")
    return {
        "vocab_size": embedding[0],
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": keys.integer("attention.head_count"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": length,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": _HEAD not in keys.facts.shapes,
        "torch_dtype": "bfloat16",
        **_token_ids(keys.facts.metadata),
    }


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """First token, and every token that ends an answer: what the file says, and control tokens known by their text."""

    def named(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    ends = {named(name) for name in ("eos", "eot", "eom")}
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        control = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == 3}
        ends.update(control.get(text) for text in _ENDS)
    return {"bos_token_id": named("bos"), "eos_token_id": sorted(i for i in ends if i is not None) or None}


_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "[EOT]",
    "[EOS]", "<｜end▁of▁sentence｜>",
)  # fmt: skip


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.get("rope.scaling.original_context_length")
    beta = {name: keys.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    attention = keys.number("rope.scaling.attn_factor", keys.number("rope.scaling.yarn_attn_factor", 1.0))
    log = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if kind == "none" and factor != 1.0:
        kind = "linear"
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        scaling.update({name: value for name, value in beta.items() if value is not None})
        if log:
            # The converter writes a tenth of mscale_all_dim; released models have the same mscale.
            scaling["mscale"] = scaling["mscale_all_dim"] = float(str(np.float32(log * 10)))
        if attention != 1.0:
            scaling["attention_factor"] = attention
        return scaling
    if kind not in ("none", "linear"):
        raise keys.error("rope.scaling.type", f"is {kind!r}, which is not supported")
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _grouped(keys: _Keys, bias: str | None) -> dict[str, Any]:
    """Grouped attention. `bias`: the config key that says whether projections have biases, which tensors decide."""
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // max(1, heads))
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"differs from the key length {head_dim}, which is not supported")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.error("rope.dimension_count", f"is not the head's width {head_dim}, which is not supported")
    config = {"num_key_value_heads": keys.integer("attention.head_count_kv", heads), "head_dim": head_dim}
    if bias is not None:
        config[bias] = "blk.0.attn_q.bias" in keys.facts.shapes
    return config


# ---- architectures ---------------------------------------------------------------------------------------------------
def _llama(keys: _Keys) -> dict[str, Any]:
    experts = keys.integer("expert_count", 0)
    config: dict[str, Any] = {"model_type": "mixtral" if experts else "llama"}
    config["intermediate_size"] = keys.integer("feed_forward_length")
    config.update(_grouped(keys, None if experts else "attention_bias"))
    if keys.facts.rope_factors is not None:
        config["rope_scaling"] = _llama3_scaling(keys, keys.facts.rope_factors, config["head_dim"])
    used = keys.integer("expert_used_count", 0)
    if experts:
        config.update({"num_local_experts": experts, "num_experts_per_tok": used, "sliding_window": None})
    return config


def _llama3_scaling(keys: _Keys, factors: NDArray[np.float32], head_dim: int) -> dict[str, Any]:
    """Llama 3's settings from the factors that the converter computed with them: known sets are tried until one gives
    the same numbers."""
    theta, factor = keys.number("rope.freq_base", 10000.0), float(str(factors.max()))
    plain = inverse_frequencies(RopeSpec(head_dim, theta, interleaved=False))
    for original in _LLAMA3_ORIGINALS:
        for low, high in _LLAMA3_BANDS:
            rope = RopeSpec(
                head_dim, theta, False, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high
            )
            if len(factors) == len(plain) and np.allclose(plain / inverse_frequencies(rope), factors, rtol=1e-4):
                return {
                    "rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original,
                    "low_freq_factor": low, "high_freq_factor": high,
                }  # fmt: skip
    raise LoadError(f"{keys.facts.name}: {ROPE_FACTORS} holds factors that are not Llama 3's, which is not supported")


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return {"model_type": "qwen2", "intermediate_size": keys.integer("feed_forward_length"), **_grouped(keys, None)}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": "qwen3", "intermediate_size": keys.integer("feed_forward_length")}
    return config | _grouped(keys, "attention_bias")


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    inner = keys.integer("expert_feed_forward_length")
    return {
        "model_type": "qwen3_moe",
        "intermediate_size": keys.integer("feed_forward_length", inner) or inner,
        "moe_intermediate_size": inner,
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        **_unscaled(keys),
        **_grouped(keys, "attention_bias"),
    }


def _unscaled(keys: _Keys) -> dict[str, Any]:
    if keys.get("expert_weights_scale", 1.0) not in (0.0, 1.0) or keys.get("expert_gating_func", 1) != 1:
        raise keys.error("expert_weights_scale", "or expert_gating_func is not this architecture's")
    return {}


def _deepseek2(keys: _Keys) -> dict[str, Any]:
    """DeepSeek V2 and V3 and their kin, told apart by the router's function."""
    experts = keys.integer("expert_count")
    gating = keys.integer("expert_gating_func", 1)
    if gating not in (0, 1, 2):
        raise keys.error("expert_gating_func", f"is {gating}; 1 (softmax) and 2 (sigmoid) are supported")
    sigmoid = gating == 2
    # Files of before mid-2025 leave the groups out; V3 is known by its experts.
    groups, kept = (8, 4) if sigmoid and experts == 256 else (1, 1)
    groups = keys.integer("expert_group_count", groups) or 1
    kept = keys.integer("expert_group_used_count", kept) or 1
    rope = keys.integer("rope.dimension_count")
    absorbed = keys.has("attention.key_length_mla")
    key = keys.integer("attention.key_length_mla" if absorbed else "attention.key_length")
    value = keys.integer("attention.value_length_mla" if absorbed else "attention.value_length")
    for seen in ("attention.key_length", "attention.value_length", "attention.head_count_kv"):
        keys.get(seen)
    method = "noaux_tc" if sigmoid else ("group_limited_greedy" if groups > 1 else "greedy")
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": method,
        "n_group": groups,
        "topk_group": kept,
        "n_routed_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
    }


_ARCHITECTURES: Mapping[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "deepseek2": _deepseek2,
}
