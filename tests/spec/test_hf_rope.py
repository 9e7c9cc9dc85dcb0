"""Rope settings against transformers: frequencies, cos/sin factor, MLA's softmax scale, for every scaling that runs."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.spec import ModelSpec, SpecError
from coterie.spec.rope import cos_sin, inverse_frequencies

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tiny_mla(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V2-Lite's released config with changes."""
    return {**json.loads((CONFIGS / "deepseek-v2-lite.json").read_text()), **changes}


def tiny_gqa(**changes: Any) -> dict[str, Any]:
    return {**json.loads((CONFIGS / "qwen3-8b.json").read_text()), **changes}


def oracle(config: dict[str, Any]) -> tuple[np.ndarray[Any, Any], float]:
    """(inverse frequencies, cos/sin factor) of transformers."""
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    values = {
        key: value for key, value in config.items() if key not in ("model_type", "quantization_config", "auto_map")
    }
    parsed = transformers.AutoConfig.for_model(config["model_type"], **copy.deepcopy(values))
    frequencies, factor = rope_utils.ROPE_INIT_FUNCTIONS[parsed.rope_parameters["rope_type"]](parsed, "cpu")
    return frequencies.numpy(), factor


SCALINGS: list[dict[str, Any]] = [
    {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    {**YARN, "mscale": 0.707},
    {**YARN, "mscale_all_dim": 0.707},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 0},
    YARN,
    {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "beta_fast": 1, "beta_slow": 1, "factor": 32.0},
    {**YARN, "truncate": False},
    {**YARN, "truncate": None},
    {**YARN, "beta_fast": 0, "beta_slow": None},
    {**YARN, "factor": 0.5, "mscale": 0.707},
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3,
]


@pytest.mark.parametrize("make", [tiny_mla, tiny_gqa])
@pytest.mark.parametrize("scaling", SCALINGS, ids=range(len(SCALINGS)))
def test_frequencies_and_cos_sin_factor(make: Any, scaling: dict[str, Any]) -> None:
    config = make(rope_scaling=scaling)
    rope = ModelSpec.from_hf(config).layers[0].attention.rope
    frequencies, factor = oracle(config)
    np.testing.assert_allclose(inverse_frequencies(rope), frequencies, rtol=3e-7)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("mscale_all_dim", "factor", "expected"),
    [
        (0.707, 40, (0.1 * 0.707 * math.log(40) + 1) ** 2),
        (1.0, 40, (0.1 * math.log(40) + 1) ** 2),
        (None, 40, 1.0),
        (0, 40, 1.0),
        (0.0, 40, 1.0),
        (0.707, 1, 1.0),
        (0.707, 1.0, 1.0),
    ],
)
def test_softmax_scale_takes_mscale_all_dim_squared(mscale_all_dim: Any, factor: float, expected: float) -> None:
    scaling = {**YARN, "factor": factor, "mscale": 0.707, "mscale_all_dim": mscale_all_dim}
    attention = ModelSpec.from_hf(tiny_mla(rope_scaling=scaling)).layers[0].attention
    assert attention.softmax_scale == pytest.approx(192**-0.5 * expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_original_positions_default_to_the_models(kind: str) -> None:
    values = {**(YARN if kind == "yarn" else LLAMA3), "type": kind, "rope_type": kind}
    del values["original_max_position_embeddings"]
    config = tiny_gqa(rope_scaling=values, max_position_embeddings=1024)
    rope = ModelSpec.from_hf(config).layers[0].attention.rope
    assert rope.original_max_positions == 1024
    np.testing.assert_allclose(inverse_frequencies(rope), oracle(config)[0], rtol=3e-7)


def test_softmax_scale_without_the_field() -> None:
    attention = ModelSpec.from_hf(tiny_mla(rope_scaling={**YARN, "mscale": 0.707})).layers[0].attention
    assert attention.softmax_scale == 192**-0.5


def test_yarn_does_not_depend_on_the_context_that_is_asked_for() -> None:
    scaling = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
    long, short = (
        ModelSpec.from_hf(tiny_mla(rope_scaling=scaling, max_position_embeddings=positions)).layers[0].attention
        for positions in (163_840, 512)
    )
    assert long == short
    np.testing.assert_array_equal(cos_sin(long.rope, 1024)[:64], cos_sin(short.rope, 64))


def test_yarn_leaves_grouped_attentions_softmax_alone() -> None:
    attention = ModelSpec.from_hf(tiny_gqa(rope_scaling={**YARN, "factor": 4.0})).layers[0].attention
    assert attention.softmax_scale == 128**-0.5
    assert attention.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope'"),
        ({"rope_scaling": {"type": ["yarn"]}}, "not supported"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": "40"}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": True}}, "factor"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 10**400}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "mscale_all_dim": 1e308}}, "mscale_all_dim"),
        ({"rope_scaling": {**YARN, "beta_slow": 1e-320}}, "beta_slow"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 1e-320}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-320}}, "factor"),
        ({"rope_scaling": {1: 2}}, "not text"),
        ({"rope_theta": 1e-320}, "rope_theta"),
        ({"rope_scaling": {**YARN, "new_trick": 3}}, "new_trick"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": {**SCALINGS[-1], "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1e400}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8}}, "factor"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "disagree"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "truncate": None}}, "disagree on truncate"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer kind"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_refused_rope(changes: dict[str, Any], message: str) -> None:
    config = tiny_gqa(**changes)
    if "rope_parameters" in changes and "rope_scaling" not in changes:
        config.pop("rope_scaling")
    with pytest.raises(SpecError, match=message):
        ModelSpec.from_hf(config)


def test_both_spellings_that_agree() -> None:
    plain = tiny_gqa(rope_scaling=YARN, rope_theta=1e6)
    modern = {key: value for key, value in YARN.items() if key != "type"}
    both = {**plain, "rope_parameters": {**modern, "rope_type": "yarn", "rope_theta": 1_000_000}}
    assert ModelSpec.from_hf(both) == ModelSpec.from_hf(plain)


def test_partial_rotation_is_read_from_either_place() -> None:
    base = json.loads((CONFIGS / "glm-4.5-air.json").read_text())
    top = ModelSpec.from_hf(base).layers[0].attention.rope
    base.pop("partial_rotary_factor")
    inside = {
        **base,
        "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default", "partial_rotary_factor": 0.5},
    }
    assert ModelSpec.from_hf(inside).layers[0].attention.rope == top
    assert ModelSpec.from_hf(base).layers[0].attention.rope == top, "absent means 0.5 in this family"
    assert ModelSpec.from_hf({**base, "partial_rotary_factor": 1.0}).layers[0].attention.rope.dim == 128
    with pytest.raises(SpecError, match="partial_rotary_factor"):
        ModelSpec.from_hf({**inside, "partial_rotary_factor": 1.0})
