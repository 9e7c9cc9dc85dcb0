"""Released config.json files: exact parameters against transformers, exact cache bytes, exact values of the fields.

The files in tests/data/configs are written from the public values, in the hub's spelling. The parameter oracle is the
transformers model of the same config, built on the meta device (no memory).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from coterie.model.names import weight_layout
from coterie.spec import Fp8BlockQuant, ModelSpec, MoESpec

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def load(name: str) -> ModelSpec:
    return ModelSpec.from_hf(CONFIGS / f"{name}.json")


def oracle_parameters(config: dict[str, Any]) -> int:
    """Parameters and correction biases of the transformers model with this config."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = {
        key: value for key, value in config.items() if key not in ("model_type", "quantization_config", "auto_map")
    }
    model_type = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
    parsed = transformers.AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(parsed)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(tensor.numel() for tensor in [*model.parameters(), *biases])


def test_every_listed_release_is_shipped() -> None:
    assert len(NAMES) >= 18
    assert {"deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "moonlight-16b-a3b", "kimi-k2-instruct"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_equal_transformers(name: str) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    assert load(name).num_parameters == oracle_parameters(config)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_names_cover_exactly_the_parameters(name: str) -> None:
    spec = load(name)
    stored = sum(math.prod(entry.shape) for entry in weight_layout(spec).tensors.values())
    assert stored == spec.num_parameters + spec.num_mtp_parameters


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_a_released_file_is_unknown(name: str) -> None:
    spec = ModelSpec.from_hf(CONFIGS / f"{name}.json", strict=True)
    assert spec.unknown_fields == ()
    assert "transformers_version" in spec.ignored_fields
    assert spec.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v3", 70_272),
        ("deepseek-r1", 70_272),
        ("deepseek-v3.1", 70_272),
        ("kimi-k2-instruct", 70_272),
        ("deepseek-v2", 69_120),
        ("deepseek-v2-lite", 31_104),
        ("moonlight-16b-a3b", 31_104),
        ("glm-4.7-flash", 54_144),
        ("qwen3-235b-a22b", 192_512),
        ("qwen3-30b-a3b", 98_304),
        ("mixtral-8x7b", 131_072),
        ("llama-3.1-8b", 131_072),
        ("qwen3-8b", 147_456),
    ],
)
def test_cache_bytes_per_token(name: str, expected: int) -> None:
    assert load(name).kv_bytes_per_token(2) == expected
    assert load(name).kv_bytes_per_token(4) == 2 * expected


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek-v3", 671_026_419_200, 37e9),
        ("deepseek-v2", 235_741_434_880, 21e9),
        ("deepseek-v2-lite", 15_706_484_224, 2.4e9),
        ("kimi-k2-instruct", 1_026_408_232_448, 32e9),
        ("qwen3-235b-a22b", 235_093_634_560, 22e9),
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
        ("dots.llm1.inst", 142_774_381_696, 14e9),
        ("llama-3.1-8b", 8_030_261_248, 8.03e9),
    ],
)
def test_published_sizes(name: str, total: int, active: float) -> None:
    """Published "activated" numbers are rounded and some count the embedding: within 5 % with or without it."""
    spec = load(name)
    assert spec.num_parameters == total
    embedding = spec.vocab_size * spec.hidden_size
    nearest = min(abs(spec.num_active_parameters - active), abs(spec.num_active_parameters + embedding - active))
    assert nearest < 0.05 * active


def test_prediction_block_of_v3_is_its_published_size() -> None:
    spec = load("deepseek-v3")
    assert len(spec.mtp_layers) == 1
    assert isinstance(spec.mtp_layers[0].ffn, MoESpec)
    assert round(spec.num_mtp_parameters / 1e9, 1) == 11.6
    assert load("kimi-k2-instruct").mtp_layers == ()


def test_deepseek_v3_field_by_field() -> None:
    spec = load("deepseek-v3")
    attention = spec.layers[0].attention
    magnitude = 0.1 * math.log(40) + 1
    assert attention.softmax_scale == pytest.approx(192**-0.5 * magnitude**2, rel=1e-12)
    assert (attention.rope.scaling, attention.rope.factor, attention.rope.attention_factor) == ("yarn", 40.0, 1.0)
    assert (attention.rope.dim, attention.rope.interleaved, attention.rope.original_max_positions) == (64, True, 4096)
    assert (attention.q_lora_rank, attention.latent_width, attention.latent_norm_eps) == (1536, 576, 1e-6)
    assert [index for index, _ in spec.moe_layers()] == list(range(3, 61))
    assert spec.layers[3].ffn == MoESpec(
        num_experts=256,
        top_k=8,
        intermediate_size=2048,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=8,
        topk_groups=4,
        group_score="top2_sum",
        normalize=True,
        norm_epsilon=1e-20,
        scale_normalized=True,
        routed_scaling_factor=2.5,
        shared_intermediate_size=2048,
    )
    assert spec.quantization == Fp8BlockQuant(128, 128)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.max_positions) == (0, (1,), 163_840)


def test_deepseek_v2_and_lite_routers() -> None:
    full, lite = load("deepseek-v2").layers[1].ffn, load("deepseek-v2-lite").layers[1].ffn
    assert isinstance(full, MoESpec) and isinstance(lite, MoESpec)
    assert (full.scoring, full.num_groups, full.topk_groups, full.group_score) == ("softmax", 8, 3, "max")
    assert (full.normalize, full.routed_scaling_factor, full.correction_bias) == (False, 16.0, False)
    assert (lite.num_groups, lite.topk_groups, lite.shared_intermediate_size) == (1, 1, 2816)
    assert not full.scale_normalized
    assert load("deepseek-v2-lite").layers[0].attention.q_lora_rank is None


def test_glm_air_has_half_rotation_biases_and_no_qk_norm() -> None:
    attention = load("glm-4.5-air").layers[0].attention
    assert (attention.kind, attention.rope.dim, attention.rope.interleaved) == ("gqa", 64, False)
    assert (attention.q_bias, attention.o_bias, attention.qk_norm) == (True, False, False)
    assert load("glm-4.5").layers[0].attention.qk_norm
    assert load("glm-4.5").layers[0].attention.qk_norm_eps == 1e-5
    assert load("glm-4.5-air").eos_token_ids == (151329, 151336, 151338)


def test_glm_flash_is_mla_with_wide_values() -> None:
    attention = load("glm-4.7-flash").layers[0].attention
    assert (attention.kind, attention.qk_head_dim, attention.v_head_dim) == ("mla", 256, 256)
    assert (attention.rope.dim, attention.rope.interleaved, attention.rope.theta) == (64, True, 1e6)
    assert attention.latent_norm_eps == 1e-6
    assert load("glm-4.7-flash").norm_eps == 1e-5


def test_qwen2_moe_gates_its_shared_expert_and_has_biases() -> None:
    spec = load("qwen2-57b-a14b")
    moe = spec.layers[0].ffn
    assert isinstance(moe, MoESpec)
    assert (moe.shared_gate, moe.shared_intermediate_size, moe.normalize, moe.norm_epsilon) == (True, 20480, False, 0.0)
    assert spec.layers[0].attention.q_bias and not spec.layers[0].attention.o_bias


def test_kimi_and_llama_rope() -> None:
    kimi, llama = load("kimi-k2-instruct").layers[0].attention.rope, load("llama-3.1-8b").layers[0].attention.rope
    assert (kimi.beta_fast, kimi.beta_slow, kimi.factor, kimi.theta) == (1.0, 1.0, 32.0, 50_000.0)
    assert (llama.scaling, llama.low_freq_factor, llama.high_freq_factor) == ("llama3", 1.0, 4.0)
    assert (llama.original_max_positions, llama.attention_factor) == (8192, 1.0)


def test_dots_score_function_under_the_selections_name() -> None:
    moe = load("dots.llm1.inst").layers[1].ffn
    assert isinstance(moe, MoESpec)
    assert (moe.scoring, moe.correction_bias, moe.num_groups, moe.normalize) == ("sigmoid", True, 1, True)
