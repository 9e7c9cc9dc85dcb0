"""The hub's spelling and transformers 5's describe the same model; no file raises anything but a SpecError."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from released_configs import CONFIGS, config

from coterie.spec import ModelSpec, SpecError

NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def essence(values: dict[str, Any]) -> ModelSpec:
    """The spec without what was ignored (the spellings carry different harmless keys) and without quantisation."""
    spec = ModelSpec.from_hf(values)
    return replace(spec, ignored_fields=(), unknown_fields=(), quantization=None)


def modern(values: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 writes it to a file."""
    transformers = pytest.importorskip("transformers")
    model_type = "deepseek_v3" if values["model_type"] == "kimi_k2" else values["model_type"]
    kept = {key: value for key, value in values.items() if key not in ("model_type", "quantization_config", "auto_map")}
    written = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(kept)).to_json_string(use_diff=False)
    return {**json.loads(written), "model_type": values["model_type"]}


@pytest.mark.parametrize("name", NAMES)
def test_released_spelling_equals_modern_spelling(name: str) -> None:
    written = modern(config(name))
    assert "rope_parameters" in written and "rope_scaling" not in written
    assert essence(written) == essence(config(name))
    assert ModelSpec.from_hf(written).unknown_fields == () or config(name)["model_type"] != "deepseek_v3"


@settings(max_examples=60)
@given(
    name=st.sampled_from(["deepseek-v3", "deepseek-v2", "glm-4.5", "glm-4.7-flash", "dots.llm1.inst", "qwen3-30b-a3b"]),
    experts=st.sampled_from([8, 16, 24]),
    top_k=st.integers(1, 4),
    groups=st.sampled_from([1, 2, 4, 8]),
    scale=st.floats(0.1, 20),
    normalize=st.booleans(),
    tied=st.booleans(),
    bias=st.booleans(),
    layers=st.integers(1, 6),
    theta=st.floats(10.0, 1e7),
    yarn=st.one_of(st.none(), st.tuples(st.sampled_from([None, 0.707, 1.0]), st.sampled_from([None, 0.707, 1.0]))),
)
def test_spellings_agree_for_any_values(name: str, yarn: Any, **drawn: Any) -> None:
    values = config(
        name,
        num_experts_per_tok=drawn["top_k"],
        norm_topk_prob=drawn["normalize"],
        tie_word_embeddings=drawn["tied"],
        attention_bias=drawn["bias"],
        num_hidden_layers=drawn["layers"],
        rope_theta=drawn["theta"],
    )
    values["num_experts" if "num_experts" in values else "n_routed_experts"] = drawn["experts"]
    if "routed_scaling_factor" in values:
        values.update(routed_scaling_factor=drawn["scale"], n_group=drawn["groups"], topk_group=drawn["groups"])
    values["rope_scaling"] = None
    if yarn is not None:
        scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
        given_scales = {"mscale": yarn[0], "mscale_all_dim": yarn[1]}
        values["rope_scaling"] = {**scaling, **{key: value for key, value in given_scales.items() if value is not None}}
    assert essence(modern(values)) == essence(values)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400)
@given(data=st.data())
def test_any_value_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    values = config(data.draw(st.sampled_from(NAMES)), num_hidden_layers=4)
    for key in data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=2)):
        values[key] = data.draw(JSON)
    if isinstance(values.get("rope_scaling"), dict) and data.draw(st.booleans()):
        values["rope_scaling"][data.draw(st.sampled_from(["type", "factor", "mscale", "beta_fast"]))] = data.draw(JSON)
    try:
        spec = ModelSpec.from_hf(values)
    except SpecError as error:
        assert str(error)
    else:
        assert len(spec.layers) == values["num_hidden_layers"]
        assert spec.num_parameters > 0
        assert hash(spec.layers) == hash(ModelSpec.from_hf(copy.deepcopy(values)).layers)


@settings(max_examples=100)
@given(JSON)
def test_any_mapping_is_refused_in_words(values: Any) -> None:
    if isinstance(values, dict):
        with pytest.raises(SpecError, match="model_type"):
            ModelSpec.from_hf(values)
    elif not isinstance(values, str):
        with pytest.raises(SpecError):
            ModelSpec.from_hf(values)
