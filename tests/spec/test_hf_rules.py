"""What from_hf accepts, ignores and refuses: missing keys, unknown keys, groups, layer lists, tying, bad values."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from released_configs import CONFIGS, config, refused, v3

from coterie.spec import ModelSpec, MoESpec, SpecError

MATRIX = json.loads((CONFIGS.parent / "parity_matrix.json").read_text())
ENTRIES = {
    "ds2-lite",
    "ds3",
    "ds3-moonlight",
    "ds3-mtp",
    "glm4-moe",
    "glm47-flash",
    "dots1",
    "qwen2-moe",
    "qwen3-moe",
    "mixtral",
    "llama-dense",
    "qwen3-dense",
}


def moe(values: dict[str, Any]) -> MoESpec:
    """The routed feed-forward of the last layer."""
    ffn = ModelSpec.from_hf(values).layers[-1].ffn
    assert isinstance(ffn, MoESpec)
    return ffn


SHAPES = """
hidden_size num_hidden_layers num_attention_heads vocab_size intermediate_size num_key_value_heads num_experts
moe_intermediate_size max_position_embeddings
""".split()  # noqa: SIM905


@pytest.mark.parametrize("entry", [e for e in MATRIX if e["id"] in ENTRIES], ids=lambda e: e["id"])
def test_parity_entries(entry: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf({"model_type": entry["family"], **entry["config"]}, strict=True)
    biases = sum(ffn.num_experts for _, ffn in spec.moe_layers() if ffn.correction_bias)
    assert spec.num_parameters == entry["oracle_selfcheck"]["params"] + biases
    if "oracle_facts" in entry:
        assert spec.layers[0].attention.latent_norm_eps == entry["oracle_facts"]["latent_norm_eps"]


def test_every_parity_entry_of_a_supported_family_is_listed() -> None:
    assert {entry["id"] for entry in MATRIX} >= ENTRIES


@pytest.mark.parametrize("entry", [e for e in MATRIX if e["id"] not in ENTRIES], ids=lambda e: e["id"])
def test_other_families_are_refused_by_name(entry: dict[str, Any]) -> None:
    refused({"model_type": entry["family"], **entry["config"]}, entry["family"], "needs", "supported are")


def test_sources(tmp_path: Path) -> None:
    path = CONFIGS / "deepseek-v2-lite.json"
    (tmp_path / "config.json").write_text(path.read_text())
    sources = (path, str(path), tmp_path, str(tmp_path), json.loads(path.read_text()))
    specs = [ModelSpec.from_hf(source) for source in sources]
    assert all(spec == specs[0] for spec in specs)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"a": 1, "a": 2}',
        "[" * 100_000,
        '{"n": ' + "9" * 5000 + "}",
        "\x00",
    ],
    ids=range(8),
)
def test_bad_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json")


def test_missing_file_and_wrong_type(tmp_path: Path) -> None:
    refused(tmp_path, "config.json", "cannot read")
    refused(tmp_path / "nowhere", "cannot read")
    refused(17, "int")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    refused(tmp_path, "not valid JSON")


def test_reading_does_not_change_the_mapping() -> None:
    values = v3()
    before = copy.deepcopy(values)
    ModelSpec.from_hf(values)
    assert values == before


def test_model_type() -> None:
    refused({}, "model_type")
    refused({"model_type": 3}, "model_type=3")
    refused({"model_type": "bert"}, "'bert' is unknown", "deepseek_v3")
    refused({"model_type": "deepseek_v32"}, "indexer")


@pytest.mark.parametrize("name", SHAPES)
def test_missing_key_without_default_is_named(name: str) -> None:
    refused(config("qwen3-235b-a22b", **{name: ..., "mlp_only_layers": [0]}), name, "missing")


@pytest.mark.parametrize(
    ("name", "key", "read", "expected"),
    [
        ("deepseek-v3", "n_group", lambda s: s.layers[-1].ffn.num_groups, 8),
        ("deepseek-v3", "routed_scaling_factor", lambda s: s.layers[-1].ffn.routed_scaling_factor, 2.5),
        ("deepseek-v3", "scoring_func", lambda s: s.layers[-1].ffn.scoring, "sigmoid"),
        ("deepseek-v3", "first_k_dense_replace", lambda s: sum(1 for _ in s.moe_layers()), 58),
        ("deepseek-v3", "q_lora_rank", lambda s: s.layers[0].attention.q_lora_rank, 1536),
        ("deepseek-v3", "num_nextn_predict_layers", lambda s: len(s.mtp_layers), 1),
        ("kimi-k2-instruct", "num_nextn_predict_layers", lambda s: len(s.mtp_layers), 0),
        ("deepseek-v2", "first_k_dense_replace", lambda s: sum(1 for _ in s.moe_layers()), 60),
        ("deepseek-v2", "topk_method", lambda s: s.layers[-1].ffn.num_groups, 1),
        ("deepseek-v2", "routed_scaling_factor", lambda s: s.layers[-1].ffn.routed_scaling_factor, 1.0),
        ("glm-4.5-air", "attention_bias", lambda s: s.layers[0].attention.q_bias, False),
        ("glm-4.5", "use_qk_norm", lambda s: s.layers[0].attention.qk_norm, False),
        ("glm-4.5", "routed_scaling_factor", lambda s: s.layers[-1].ffn.routed_scaling_factor, 1.0),
        ("glm-4.5", "rms_norm_eps", lambda s: s.norm_eps, 1e-5),
        ("dots.llm1.inst", "norm_topk_prob", lambda s: s.layers[-1].ffn.normalize, False),
        ("qwen3-30b-a3b", "norm_topk_prob", lambda s: s.layers[-1].ffn.normalize, False),
        ("qwen3-30b-a3b", "head_dim", lambda s: s.layers[0].attention.qk_head_dim, 64),
        ("qwen3-8b", "head_dim", lambda s: s.layers[0].attention.qk_head_dim, 128),
        ("qwen2-57b-a14b", "norm_topk_prob", lambda s: s.layers[-1].ffn.normalize, False),
        ("mixtral-8x7b", "rope_theta", lambda s: s.layers[0].attention.rope.theta, 1e6),
        ("llama-3.1-8b", "num_key_value_heads", lambda s: s.layers[0].attention.num_kv_heads, 32),
        ("llama-3.1-8b", "rms_norm_eps", lambda s: s.norm_eps, 1e-6),
        ("llama-3.1-8b", "torch_dtype", lambda s: s.dtype, "float32"),
    ],
)
def test_default_of_an_absent_key(name: str, key: str, read: Any, expected: Any) -> None:
    assert read(ModelSpec.from_hf(config(name, **{key: ...}))) == expected


@pytest.mark.parametrize(
    ("alias", "name", "model"),
    [
        ("num_local_experts", "n_routed_experts", "deepseek-v3"),
        ("num_experts", "n_routed_experts", "deepseek-v3"),
        ("num_mtp_layers", "num_nextn_predict_layers", "deepseek-v3"),
        ("num_expert_group", "n_group", "deepseek-v3"),
        ("num_shared_experts", "n_shared_experts", "deepseek-v3"),
        ("num_experts_per_token", "num_experts_per_tok", "qwen3-30b-a3b"),
        ("moe_renormalize", "norm_topk_prob", "deepseek-v3"),
        ("num_local_experts", "num_experts", "qwen3-30b-a3b"),
        ("dtype", "torch_dtype", "qwen3-30b-a3b"),
    ],
)
def test_aliases(alias: str, name: str, model: str) -> None:
    released = config(model)
    renamed = config(model, **{name: ..., alias: released[name]})
    assert ModelSpec.from_hf(renamed) == ModelSpec.from_hf(released)
    assert ModelSpec.from_hf(config(model, **{alias: released[name]})) == ModelSpec.from_hf(released)
    other = {True: False, "bfloat16": "float32"}.get(released[name], 97) if released[name] != 1 else 97
    refused(config(model, **{alias: other}), alias, name, "disagree")


# A2


def test_q_lora_rank_null_means_one_projection() -> None:
    low = ModelSpec.from_hf(v3(q_lora_rank=32)).layers[0].attention
    single = ModelSpec.from_hf(v3(q_lora_rank=None)).layers[0].attention
    assert (low.q_lora_rank, single.q_lora_rank) == (32, None)
    refused(v3(q_lora_rank=0), "q_lora_rank=0")


# A3


@pytest.mark.parametrize(
    ("experts", "groups", "keep", "expected"),
    [
        (8, 8, 4, (8, 4)),
        (8, 1, 1, (1, 1)),
        (8, None, None, (1, 1)),
        (8, 0, 0, (1, 1)),
        (8, 1, None, (1, 1)),
        (12, 4, 2, (4, 2)),
        (256, 8, 4, (8, 4)),
    ],
)
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2", "glm-4.5", "dots.llm1.inst", "glm-4.7-flash"])
def test_groups(name: str, experts: int, groups: Any, keep: Any, expected: tuple[int, int]) -> None:
    values = config(name, n_routed_experts=experts, n_group=groups, topk_group=keep, num_experts_per_tok=3)
    assert (moe(values).num_groups, moe(values).topk_groups) == expected


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "glm-4.5", "dots.llm1.inst"])
def test_groups_that_do_not_divide(name: str) -> None:
    values = config(name, n_routed_experts=10, n_group=4, topk_group=2, num_experts_per_tok=2)
    refused(values, "n_group=4", "n_routed_experts=10")


def test_group_bounds() -> None:
    refused(v3(n_group=4, topk_group=5), "topk_group=5", "n_group=4")
    refused(v3(n_group=4, topk_group=None), "topk_group")
    refused(v3(n_group=4, topk_group=0), "topk_group=0")
    refused(v3(n_routed_experts=16, n_group=8, topk_group=2, num_experts_per_tok=5), "num_experts_per_tok=5", "4")
    refused(v3(n_group=-1), "n_group=-1")
    refused(v3(num_experts_per_tok=257, n_group=1), "num_experts_per_tok=257", "256")
    assert moe(v3(n_routed_experts=16, n_group=8, topk_group=2, num_experts_per_tok=4)).top_k == 4


def test_greedy_v2_ignores_its_groups() -> None:
    assert moe(config("deepseek-v2", topk_method="greedy")).num_groups == 1


@pytest.mark.parametrize("name", ["deepseek-v2", "dots.llm1.inst", "deepseek-v3"])
def test_null_top_k_is_refused(name: str) -> None:
    refused(config(name, num_experts_per_tok=None), "num_experts_per_tok=None")


def test_absent_top_k() -> None:
    refused(config("deepseek-v2", num_experts_per_tok=...), "num_experts_per_tok", "missing")
    refused(config("dots.llm1.inst", n_routed_experts=...), "n_routed_experts", "missing")


# A4


def test_normalising_and_scaling_are_two_switches() -> None:
    for name in ("deepseek-v3", "deepseek-v2", "glm-4.5", "dots.llm1.inst", "qwen3-30b-a3b", "qwen2-57b-a14b"):
        on, off = (moe(config(name, norm_topk_prob=value)) for value in (True, False))
        assert (on.normalize, off.normalize) == (True, False)
        assert on.scoring == off.scoring
        assert on.routed_scaling_factor == off.routed_scaling_factor
        assert on.scale_normalized == (name != "deepseek-v2")
    assert moe(config("mixtral-8x7b")).normalize
    refused(config("mixtral-8x7b", norm_topk_prob=False), "norm_topk_prob")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek-v3", {"scoring_func": "softmax"}),
        ("deepseek-v3", {"scoring_func": "sqrtsoftplus"}),
        ("deepseek-v3", {"topk_method": "greedy"}),
        ("deepseek-v2", {"scoring_func": "sigmoid"}),
        ("deepseek-v2", {"topk_method": "noaux_tc"}),
        ("glm-4.5", {"topk_method": "group_limited_greedy"}),
        ("dots.llm1.inst", {"scoring_func": "softmax"}),
        ("deepseek-v3", {"hidden_act": "gelu"}),
        ("llama-3.1-8b", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama-3.1-8b", {"mlp_bias": True}),
        ("qwen3-8b", {"mlp_bias": True}),
        ("mixtral-8x7b", {"attention_bias": True}),
        ("deepseek-v2", {"rope_interleave": False}),
        ("deepseek-v3", {"swiglu_limit": 10.0}),
        ("deepseek-v3", {"index_topk": 2048}),
        ("llama-3.1-8b", {"attn_logit_softcapping": 30.0}),
        ("llama-3.1-8b", {"partial_rotary_factor": 0.5}),
        ("llama-3.1-8b", {"sliding_window": 4096}),
        ("llama-3.1-8b", {"num_nextn_predict_layers": 1}),
        ("qwen3-8b", {"layer_types": ["full_attention"] * 35 + ["sliding_attention"]}),
        ("qwen3-8b", {"layer_types": ["full_attention"] * 35}),
        ("qwen3-8b", {"layer_types": ["linear_attention"] * 36}),
        ("qwen3-8b", {"use_sliding_window": True, "sliding_window": 4096}),
        ("qwen2-57b-a14b", {"use_sliding_window": True, "sliding_window": 4096}),
        ("mixtral-8x7b", {"sliding_window": 4096}),
        ("dots.llm1.inst", {"sliding_window": 4096, "max_window_layers": 30}),
        ("deepseek-v3", {"qk_head_dim": 128}),
        ("deepseek-v3", {"qk_rope_head_dim": 63}),
        ("deepseek-v3", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
        ("deepseek-v3", {"quantization_config": {"quant_method": "compressed-tensors"}}),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 1], "fmt": "e5m2"}}),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 1], "trick": 1}}),
        ("deepseek-v3", {"quantization_config": "fp8"}),
        ("deepseek-v3", {"quantization": {"bits": 4, "group_size": 64}}),
        ("deepseek-v3", {"torch_dtype": "float8_e4m3fn"}),
        ("deepseek-v3", {"torch_dtype": 16}),
    ],
)
def test_mathematics_that_is_not_implemented(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_hf(config(name, **changes))
    assert any(key in str(caught.value) for key in changes), str(caught.value)


# A6


def test_fields_that_alter_the_mathematics_are_honoured() -> None:
    values = config("glm-4.5-air", partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=True)
    attention = ModelSpec.from_hf(values).layers[0].attention
    assert (attention.rope.dim, attention.q_bias, attention.qk_norm) == (64, True, True)


def test_an_invented_field() -> None:
    refused(config("glm-4.5-air", new_router_trick=True), "new_router_trick=True")
    refused(config("glm-4.5-air", new_router_trick=0), "new_router_trick=0")
    refused(config("glm-4.5-air", new_router_trick="x" * 500), "new_router_trick", "...")
    for nothing in (None, False, [], {}, ""):
        values = config("glm-4.5-air", new_router_trick=nothing)
        assert ModelSpec.from_hf(values).unknown_fields == ("new_router_trick",)
        refused(values, "new_router_trick", strict=True)


def test_harmless_fields_are_listed() -> None:
    extra = {
        "image_token_id": 5,
        "resid_dropout": 0.1,
        "router_z_loss_coef": 0.5,
        "output_attentions": True,
        "_name_or_path": "somewhere",
        "num_return_sequences": 1,
        "model_max_length": 7,
    }
    spec = ModelSpec.from_hf(v3(**extra), strict=True)
    assert set(extra) <= set(spec.ignored_fields)
    assert {"head_dim", "num_key_value_heads"} & set(spec.ignored_fields) == {"num_key_value_heads"}


def test_mla_never_reads_head_dim() -> None:
    assert ModelSpec.from_hf(v3(head_dim=64)).layers == ModelSpec.from_hf(v3()).layers


# A7: V4's fields are refused by name, also when they are put on a family that we run.


@pytest.mark.parametrize("key", ["swiglu_limit", "compress_ratios", "num_hash_layers", "hc_mult", "o_lora_rank"])
def test_v4_fields_on_v3(key: str) -> None:
    refused(v3(**{key: 1}), key)
