"""The config reader's values: layer lists, windows, types and ranges, tying, wrappers."""

from __future__ import annotations

from typing import Any

import pytest
from released_configs import config, refused, v3

from coterie.spec import DenseSpec, ModelSpec


def kinds(values: dict[str, Any]) -> str:
    spec = ModelSpec.from_hf(values)
    return "".join("D" if isinstance(layer.ffn, DenseSpec) else "M" for layer in (*spec.layers, *spec.mtp_layers))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek-v3", {"first_k_dense_replace": 0}, "MMMMM"),
        ("deepseek-v3", {"first_k_dense_replace": 2}, "DDMMM"),
        ("deepseek-v3", {"first_k_dense_replace": 4}, "DDDDM"),
        ("deepseek-v3", {"first_k_dense_replace": 9}, "DDDDM"),
        ("deepseek-v3", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, "DDMDM"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1, 0, 1]}, "DMDMM"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1, 0, 1, 0, 1]}, "DMDMD"),
        ("deepseek-v3", {"num_nextn_predict_layers": 0, "first_k_dense_replace": 1}, "DMMM"),
        ("deepseek-v3", {"num_nextn_predict_layers": None, "first_k_dense_replace": 1}, "DMMM"),
        ("glm-4.7-flash", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, "DMDMM"),
        ("glm-4.7-flash", {"first_k_dense_replace": ..., "num_nextn_predict_layers": ...}, "DMMM"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0, 3]}, "DMMD"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "DMDM"),
        ("qwen2-57b-a14b", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "DMDD"),
        ("qwen3-30b-a3b", {"mlp_only_layers": None}, "MMMM"),
        ("mixtral-8x7b", {}, "MMMM"),
        ("llama-3.1-8b", {}, "DDDD"),
    ],
)
def test_layer_rules(name: str, changes: dict[str, Any], expected: str) -> None:
    assert kinds(config(name, num_hidden_layers=4, **changes)) == expected


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("deepseek-v3", {"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1, 1, 2]}, "moe_layer_freq"),
        ("deepseek-v3", {"moe_layer_freq": 0}, "moe_layer_freq"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("glm-4.7-flash", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        ("glm-4.7-flash", {"mlp_layer_types": ["dense", "sparse", "moe", "sparse"]}, "mlp_layer_types"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [4]}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [True]}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_wrong_layer_lists(name: str, changes: dict[str, Any], word: str) -> None:
    refused(config(name, num_hidden_layers=4, **changes), word)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-8b", {"use_sliding_window": False, "sliding_window": 4096}),
        ("qwen3-8b", {"use_sliding_window": True, "sliding_window": 40960}),
        ("qwen3-8b", {"layer_types": ["full_attention"] * 40}),
        ("qwen2-57b-a14b", {"sliding_window": 0}),
        ("mixtral-8x7b", {"sliding_window": 32768}),
        ("mixtral-8x7b", {"sliding_window": 0}),
        ("dots.llm1.inst", {"sliding_window": 4096, "max_window_layers": 62}),
        ("dots.llm1.inst", {"sliding_window": ...}),
    ],
)
def test_windows_that_do_nothing(name: str, changes: dict[str, Any]) -> None:
    assert ModelSpec.from_hf(config(name, **changes)).layers == ModelSpec.from_hf(config(name)).layers


@pytest.mark.parametrize("value", [0, -1, 2.0, 64.5, True, False, "64", None, [64], {}, float("nan"), 1 << 40])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "v_head_dim"])
def test_integers_are_positive_integers(key: str, value: Any) -> None:
    refused(v3(**{key: value}), key)


@pytest.mark.parametrize("value", [0, -1e-6, True, "1e-6", None, float("nan"), float("inf"), [], 10**400])
@pytest.mark.parametrize("key", ["rms_norm_eps", "routed_scaling_factor", "latent_norm_eps"])
def test_numbers_are_finite_and_positive(key: str, value: Any) -> None:
    refused(v3(**{key: value}), key)


@pytest.mark.parametrize("value", [0, 1, "true", 0.5, []])
@pytest.mark.parametrize("key", ["norm_topk_prob", "attention_bias", "tie_word_embeddings", "rope_interleave"])
def test_flags_are_booleans(key: str, value: Any) -> None:
    refused(v3(**{key: value}), key)


def test_too_many_layers() -> None:
    refused(v3(num_hidden_layers=10_000_000), "num_hidden_layers", "10000")
    refused(v3(num_nextn_predict_layers=10_000_000), "num_nextn_predict_layers")


def test_heads_must_divide() -> None:
    refused(config("qwen3-8b", num_key_value_heads=5), "num_key_value_heads=5", "32")
    refused(config("mixtral-8x7b", num_attention_heads=24, num_key_value_heads=8), "num_attention_heads=24", "4096")
    assert ModelSpec.from_hf(config("qwen3-8b", num_key_value_heads=None)).layers[0].attention.num_kv_heads == 32


def test_token_ids() -> None:
    assert ModelSpec.from_hf(v3(eos_token_id=[1, 2], bos_token_id=None)).eos_token_ids == (1, 2)
    assert ModelSpec.from_hf(v3(eos_token_id=None)).eos_token_ids == ()
    for value in ("1", [1, None], -1, True, 1.0):
        refused(v3(eos_token_id=value), "eos_token_id")


def test_biases_of_latent_attention() -> None:
    attention = ModelSpec.from_hf(v3(attention_bias=True)).layers[0].attention
    assert attention.q_bias and attention.o_bias


def test_latent_epsilon_is_a_field_of_its_own() -> None:
    spec = ModelSpec.from_hf(config("moonlight-16b-a3b"))
    assert (spec.norm_eps, spec.layers[0].attention.latent_norm_eps) == (1e-5, 1e-6)
    spec = ModelSpec.from_hf(config("moonlight-16b-a3b", latent_norm_eps=1e-5))
    assert spec.layers[0].attention.latent_norm_eps == 1e-5


# B4 and the nested text config


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (..., ..., False),
        (..., True, True),
        (True, ..., True),
        (True, False, False),
        (False, True, True),
        (False, ..., False),
        (True, True, True),
        (None, True, True),
    ],
)
def test_tying_is_read_at_the_level_of_the_head(outer: Any, inner: Any, expected: bool) -> None:
    wrapper = {"model_type": "kimi_k25", "vision_config": {"hidden_size": 1}}
    wrapper["text_config"] = v3(tie_word_embeddings=inner)
    if outer is not ...:
        wrapper["tie_word_embeddings"] = outer
    spec = ModelSpec.from_hf(wrapper)
    assert spec.tie_embeddings is expected
    assert spec.num_parameters == 671_026_419_200 - 129_280 * 7168 * expected
    assert "vision_config" in spec.ignored_fields


@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), (..., False), (None, False)])
def test_tying_of_a_plain_config(value: Any, expected: bool) -> None:
    assert ModelSpec.from_hf(config("llama-3.1-8b", tie_word_embeddings=value)).tie_embeddings is expected


def test_wrappers() -> None:
    refused({"model_type": "wrapper", "text_config": {"model_type": "kimi_linear"}}, "kimi_linear", "linear-attention")
    refused({"model_type": "wrapper", "text_config": v3(), "hidden_size": 5}, "hidden_size=5", "7168")
    outer = {"model_type": "wrapper", "text_config": v3(quantization_config=...), "torch_dtype": "float16"}
    outer["quantization_config"] = v3()["quantization_config"]
    assert ModelSpec.from_hf(outer).quantization == ModelSpec.from_hf(v3()).quantization
    refused({"model_type": "kimi_k25"}, "text_config")
