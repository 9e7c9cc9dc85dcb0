"""`quantization_config`: what each method says, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.spec.errors import SpecError
from coterie.spec.hf_quant import read_quantization
from coterie.spec.model import Fp8BlockQuant
from coterie.spec.stored import StoredQuant, StoredScheme

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def config(weights: dict[str, Any], form: str = "pack-quantized", **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    group |= changes.pop("group", {})
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **changes}


def scheme(weights: dict[str, Any], form: str = "pack-quantized", **changes: Any) -> StoredScheme:
    found = read_quantization("llama", config(weights, form, **changes))
    assert isinstance(found, StoredQuant) and len(found.schemes) == 1
    return found.schemes[0]


def test_schemes_of_compressed_tensors() -> None:
    assert scheme(INT4) == StoredScheme("pack", 4, 32)
    assert scheme({**INT4, "symmetric": False, "group_size": 128}) == StoredScheme("pack", 4, 128, False)
    assert scheme({"num_bits": 4, "strategy": "channel"}) == StoredScheme("pack", 4, 0)
    assert scheme({"num_bits": 8, "strategy": "channel"}, "int-quantized") == StoredScheme("int8", 8, 0)
    assert scheme({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized").group == -1
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    assert read_quantization("x", config(block, "float-quantized")) == Fp8BlockQuant(128, 128)
    e2m1 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    assert scheme(e2m1, "mxfp4-pack-quantized") == StoredScheme("mxfp4", 4, 32)
    own = {"group": {"format": "int-quantized"}}
    assert scheme({"num_bits": 8, "strategy": "channel"}, "mixed-precision", **own).layout == "int8"


def test_the_module_decides() -> None:
    """Names and patterns before class names; ignored modules first; both of a module's names count."""
    values = config(INT4, ignore=["lm_head", "re:.*mlp.gate$"])
    values["config_groups"]["wide"] = {
        "targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "strategy": "group", "group_size": 128},
    }  # fmt: skip
    found = read_quantization("llama", values)
    assert isinstance(found, StoredQuant)
    bits = {
        name: None if (one := found.scheme_of(name)) is None else one.bits
        for name in ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.q")
    }
    assert list(bits.values()) == [None, None, 4, 8]
    assert found.scheme_of("other", "lm_head") is None


def test_awq_and_gptq() -> None:
    awq = read_quantization("llama", {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True})
    assert isinstance(awq, StoredQuant) and awq.schemes == (StoredScheme("awq", 4, 64, False),)
    gptq = {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "damp_percent": 0.1}
    first, second = (read_quantization("llama", gptq | {"checkpoint_format": form}) for form in (None, "gptq_v2"))
    assert isinstance(first, StoredQuant) and isinstance(second, StoredQuant)
    assert first.schemes == (StoredScheme("gptq", 8, 0, False, offset=1),)
    assert second.schemes[0].offset == 0


def test_fp8_and_none() -> None:
    assert read_quantization("x", {"quant_method": "fp8", "weight_block_size": [64, 128]}) == Fp8BlockQuant(64, 128)
    assert read_quantization("x", None) is None
    assert read_quantization("x", {}) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; take the model as bfloat16, DeepSeek FP8"),
        ({"quant_method": "aqlm"}, "'aqlm' is not supported"),
        ({"quant_method": None, "bits": 4}, "None is not supported"),
        (config(INT4, "marlin-24"), "group_0 of format 'marlin-24' is not supported; take"),
        (config({**INT4, "num_bits": 3}), "with 3 bits of type 'int'"),
        (config({**INT4, "type": "float"}), "with 4 bits of type 'float'"),
        (config({**INT4, "actorder": "group"}), "inputs in another order"),
        (config({**INT4, "strategy": "token"}), "strategy 'token'"),
        (config({**INT4, "group_size": "32"}), "group_size='32' is not a positive integer"),
        (config({**INT4, "type": "float"}, "mxfp4-pack-quantized", group={"targets": "Linear"}), "not a list of names"),
        (config({**INT4, "type": "float", "group_size": 16}, "mxfp4-pack-quantized"), r"expected 32"),
        (config(INT4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (config(INT4, transform_config={"config_groups": {"a": 1}}), "rotated weights"),
        (config(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (config(INT4, surprise=1), "unknown fields surprise"),
        (config(INT4, ignore=["re:("]), "is no regular expression"),
        (config(INT4, group={"output_activations": {"num_bits": 8}}), "quantised outputs"),
        (config(INT4) | {"config_groups": {}}, "has no config_groups"),
        (config(INT4) | {"config_groups": {"W4A16": ["Linear"]}}, "without weights of its own"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act=true"),
        ({"quant_method": "gptq", "bits": 3}, "with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {}}}, "unknown fields dynamic"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read_quantization("llama", given)


def test_one_group_without_a_scale_dense_and_null_settings() -> None:
    same = config(INT4, sparsity_config={"format": "dense"}, kv_cache_scheme=None, ignore=None, version="0.17")
    assert read_quantization("x", same) == read_quantization("x", config(INT4))
