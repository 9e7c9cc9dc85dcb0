"""The `quantization_config` of a config.json: DeepSeek's FP8 blocks, compressed-tensors, AWQ and GPTQ.

Every other method, and every setting that changes what the bytes mean and is not read, is refused by its name with the
nearest alternative. How activations are quantised is not read: we choose that ourselves, and never more coarsely than
8 bits a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from coterie.spec.errors import SpecError
from coterie.spec.fields import is_integer, says_nothing, short_text
from coterie.spec.model import Fp8BlockQuant
from coterie.spec.stored import StoredLayout, StoredQuant, StoredScheme

GROUPS = (16, 32, 64, 128)
_ALTERNATIVE = "take the model as bfloat16, DeepSeek FP8, compressed-tensors int4, int8 or mxfp4, AWQ, GPTQ or GGUF"
_FP8_VALUES: Mapping[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float", "ue8m0"),
}
_FP8_KEYS = frozenset({"quant_method", "weight_block_size", "modules_to_not_convert", "ignored_layers", *_FP8_VALUES})
_CT_KEYS = frozenset(
    """
    quant_method config_groups format ignore kv_cache_scheme quantization_status global_compression_ratio
    sparsity_config moe_sparsity_config transform_config version compression_version run_compressed
    """.split()  # noqa: SIM905
)
_CT_FORMATS: Mapping[str, StoredLayout] = {
    "pack-quantized": "pack",
    "int-quantized": "int8",
    "float-quantized": "fp8",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
}
_BITS = {"pack": (4, 8), "int8": (8,), "fp8": (8,), "mxfp4": (4,), "nvfp4": (4,)}
_AWQ_KEYS = frozenset("quant_method bits group_size zero_point version modules_to_not_convert backend".split())  # noqa: SIM905
_GPTQ_KEYS = frozenset(
    """
    quant_method bits group_size desc_act sym checkpoint_format damp_percent static_groups true_sequential model_name
    model_name_or_path model_file_base_name is_marlin_format meta quantizer lm_head dataset tokenizer batch_size
    block_name_to_quantize module_name_preceding_first_block use_cuda_fp16 model_seqlen pad_token_id disable_exllama
    max_input_length exllama_config cache_block_outputs modules_in_block_to_quantize use_exllama pack_dtype hyb_act
    """.split()  # noqa: SIM905
)


def read_quantization(owner: str, config: Any) -> Fp8BlockQuant | StoredQuant | None:
    """What a `quantization_config` says; None for none. Raises `SpecError` for whatever is not supported."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        given = short_text(config)
        raise SpecError(f"{owner}: quantization_config={given} is not possible; expected an object or null")
    where, method = f"{owner}: quantization_config", config.get("quant_method")
    if method == "fp8":
        return _fp8(where, config)
    if method == "compressed-tensors":
        return _compressed(where, config)
    if method in ("awq", "gptq"):
        return (_awq if method == "awq" else _gptq)(where, config)
    raise SpecError(f"{where} of method {method!r} is not supported; {_ALTERNATIVE}")


def _known(where: str, config: Mapping[str, Any], keys: frozenset[str]) -> None:
    unknown = [str(key) for key, value in config.items() if key not in keys and not says_nothing(value)]
    if unknown:
        raise SpecError(f"{where} has unknown fields {', '.join(sorted(unknown))}")


def _refuse(where: str, what: str, instead: str = _ALTERNATIVE) -> SpecError:
    return SpecError(f"{where} {what} is not supported; {instead}")


def _fp8(where: str, config: Mapping[str, Any]) -> Fp8BlockQuant:
    for key, allowed in _FP8_VALUES.items():
        if config.get(key) not in allowed:
            raise SpecError(f"{where} {key}={config[key]!r} is not supported")
    _known(where, config, _FP8_KEYS)
    return Fp8BlockQuant(*_block(where, "weight_block_size", config.get("weight_block_size")))


def _block(where: str, key: str, block: Any) -> tuple[int, int]:
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(is_integer(n) and n > 0 for n in block):
        raise SpecError(f"{where} {key}={block!r} is not [rows, columns]")
    return cast(tuple[int, int], tuple(block))


# ---- compressed-tensors ----------------------------------------------------------------------------------------------
def _compressed(where: str, config: Mapping[str, Any]) -> StoredQuant | Fp8BlockQuant:
    _known(where, config, _CT_KEYS)
    if not says_nothing(config.get("kv_cache_scheme")):
        raise _refuse(where, "with a kv_cache_scheme (quantised keys and values)", "take the model without it")
    if not says_nothing(config.get("transform_config")):
        raise _refuse(where, "with a transform_config (rotated weights)")
    for key in ("sparsity_config", "moe_sparsity_config"):
        value = config.get(key)
        if not says_nothing(value) and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _refuse(where, f"with a {key}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SpecError(f"{where} of method compressed-tensors has no config_groups")
    schemes = tuple(_group(f"{where} {name}", group, config.get("format")) for name, group in groups.items())
    blocks = {scheme.block for scheme in schemes}
    block = next(iter(blocks))
    if len(blocks) == 1 and block is not None:
        return Fp8BlockQuant(*block)
    if blocks != {None}:
        raise _refuse(where, "with block scales in some groups only")
    return StoredQuant("compressed-tensors", schemes, _patterns(where, "ignore", config.get("ignore")))


def _group(where: str, group: Any, common: Any) -> StoredScheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise _refuse(where, "without weights of its own")
    if not says_nothing(group.get("output_activations")):
        raise _refuse(where, "with quantised outputs")
    name = group.get("format") or common
    layout = _CT_FORMATS.get(str(name))
    if layout is None:
        raise _refuse(where, f"of format {name!r}")
    bits, symmetric = weights.get("num_bits", 8), weights.get("symmetric", True)
    is_float = weights.get("type", "int") == "float"
    if bits not in _BITS[layout] or is_float != (layout in ("fp8", "mxfp4", "nvfp4")):
        raise _refuse(where, f"of format {name!r} with {bits!r} bits of type {weights.get('type', 'int')!r}")
    if not symmetric and is_float:
        raise _refuse(where, f"of format {name!r} with zero points")
    if weights.get("actorder") == "group":
        raise _refuse(where, "with actorder 'group' (inputs in another order)", "take one with 'weight' or none")
    block, size = None, _group_size(where, layout, weights)
    if size == -2:
        block = _block(where, "block_structure", weights.get("block_structure"))
    targets = _patterns(where, "targets", group.get("targets"))
    return StoredScheme(layout, bits, size, bool(symmetric), block, targets=targets)


def _group_size(where: str, layout: StoredLayout, weights: Mapping[str, Any]) -> int:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = {None: "tensor", -1: "channel"}.get(size, "group") if size is None or is_integer(size) else "group"
    if layout in ("mxfp4", "nvfp4"):
        expected = 32 if layout == "mxfp4" else 16
        if strategy not in ("group", "tensor_group") or size != expected:
            raise _refuse(where, f"with strategy {strategy!r} and group_size {size!r} (expected {expected})")
        return expected
    if strategy == "group":
        if not isinstance(size, int) or not is_integer(size) or size < 1:
            raise SpecError(f"{where} group_size={size!r} is not a positive integer")
        return size
    sizes = {"channel": 0, "tensor": -1, "block": -2}
    if strategy not in sizes or (strategy == "block" and layout != "fp8"):
        raise _refuse(where, f"with strategy {strategy!r}")
    return sizes[strategy]


def _patterns(where: str, key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise SpecError(f"{where} {key} is not a list of names")
    for item in value:
        try:
            re.compile(item.removeprefix("re:"))
        except re.error as error:
            if item.startswith("re:"):
                raise SpecError(f"{where} {key}: {short_text(item)} is no regular expression: {error}") from error
    return tuple(value)


# ---- AWQ and GPTQ ----------------------------------------------------------------------------------------------------
def _awq(where: str, config: Mapping[str, Any]) -> StoredQuant:
    _known(where, config, _AWQ_KEYS)
    version, bits = config.get("version", "gemm"), config.get("bits", 4)
    if str(version).lower() != "gemm" or bits != 4 or config.get("zero_point", True) is not True:
        raise _refuse(where, f"version {version!r} with {bits!r} bits", "take AWQ 'gemm' with 4 bits and zero points")
    scheme = StoredScheme("awq", 4, _plain_group(where, config), False)
    kept = _patterns(where, "modules_to_not_convert", config.get("modules_to_not_convert"))
    return StoredQuant("awq", (scheme,), tuple(f"re:.*{re.escape(name)}" for name in kept))


def _gptq(where: str, config: Mapping[str, Any]) -> StoredQuant:
    _known(where, config, _GPTQ_KEYS)
    form = config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2") or config.get("bits") not in (4, 8) or config.get("is_marlin_format"):
        raise _refuse(where, f"format {form!r} with {config.get('bits')!r} bits", "take GPTQ with 4 or 8 bits")
    if config.get("desc_act"):
        raise _refuse(where, "desc_act=true (inputs in another order)", "take one with desc_act=false")
    group, offset = _plain_group(where, config), 1 if form == "gptq" else 0
    return StoredQuant("gptq", (StoredScheme("gptq", config["bits"], group, False, offset=offset),))


def _plain_group(where: str, config: Mapping[str, Any]) -> int:
    size = config.get("group_size", 128)
    if not is_integer(size) or (size < 1 and size != -1):
        raise SpecError(f"{where} group_size={size!r} is not a positive integer or -1")
    return 0 if size == -1 else cast(int, size)
