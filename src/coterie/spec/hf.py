"""A Hugging Face config.json to a ModelSpec: the only reader of that format.

Steps: unwrap `text_config`, find the family (`spec/families.py`), unify spellings (`spec/fields.py`,
`spec/hf_rope.py`), expand every count into a tuple of layers, refuse what is left over and may alter the mathematics.
No tensor is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.spec.errors import SpecError
from coterie.spec.families import FAMILIES, MISSING, PLANNED, Family, RouterRule
from coterie.spec.fields import Fields, is_harmless, is_integer, same_value
from coterie.spec.hf_quant import read_quantization
from coterie.spec.hf_rope import read_rope, rope_spec, softmax_factor
from coterie.spec.model import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec

MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 10_000
_MLA_SKIPPED = ("head_dim", "num_key_value_heads")
_DTYPES = ("float32", "bfloat16", "float16")
_INHERITED = frozenset(
    {"tie_word_embeddings", "quantization_config", "torch_dtype", "dtype", "bos_token_id", "eos_token_id"}
)


def spec_from_hf(source: str | Path | Mapping[str, Any], *, strict: bool = False, planned: bool = False) -> ModelSpec:
    """Read a `config.json` (its path, its folder, or the parsed mapping).

    A field that may alter the mathematics and is not implemented is always an error. `strict` makes an error of every
    unknown field, also of one that says nothing (null, false, empty); otherwise those are listed in `unknown_fields`.
    `planned`: families that can be sized but not run are read too; such a spec has `missing`.
    """
    raw = source if isinstance(source, Mapping) else _load(source)
    values, outer = _unwrap(raw)
    family = _family(values, planned=planned)
    fields = Fields(values, family.defaults, family.model_type)
    fields.skip("model_type")
    _check_fixed(family, fields)
    count = fields.integer("num_hidden_layers")
    if count > MAX_LAYERS:
        raise fields.error("num_hidden_layers", f"at most {MAX_LAYERS}")
    _check_window(family, fields, count)
    depth = fields.optional_integer("num_nextn_predict_layers", 0) or 0
    if depth > MAX_LAYERS or (depth and not family.has_mtp):
        raise fields.error("num_nextn_predict_layers", "0: it is not known where this family stores prediction layers")
    layers = _layers(family, fields, count, depth)
    spec = ModelSpec(
        model_type=family.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers[:count],
        norm_eps=fields.number("rms_norm_eps"),
        max_positions=fields.integer("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        mtp_layers=layers[count:],
        bos_token_id=fields.optional_integer("bos_token_id", 0),
        eos_token_ids=_eos(fields),
        dtype=_dtype(fields),
        quantization=read_quantization(
            fields.owner, fields.raw("quantization_config") if "quantization_config" in fields else None
        ),
    )
    skipped = _MLA_SKIPPED if family.attention == "mla" else ()
    left = fields.finish(skipped, strict=strict)
    ignored = tuple(sorted({*left.ignored, *outer}))
    missing = "" if family.model_type in FAMILIES else MISSING[family.model_type]
    return replace(spec, ignored_fields=ignored, unknown_fields=left.unknown, missing=missing)


def _load(source: str | Path) -> Mapping[str, Any]:
    """The JSON object in a file, or in `config.json` of a folder."""
    if not isinstance(source, str | Path):
        raise SpecError(f"a model description is a path or a mapping, not {type(source).__name__}")
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        with path.open("rb") as file:  # bounded by what comes, not by a size that a device or pipe does not have
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise SpecError(f"{path} is larger than {MAX_CONFIG_BYTES >> 20} MiB; that is no config.json")
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}; expected a model folder with config.json") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that is given twice with two values is an error."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise SpecError(f"config.json gives {key} twice: {result[key]!r} and {value!r}")
        result[key] = value
    return result


def _unwrap(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The language model's mapping, and the wrapper's keys if it was nested under `text_config`.

    The wrapper supplies only what the inner mapping leaves out: tying, quantisation, data type and token ids. Any other
    language-model field of the wrapper must agree with the inner one.
    """
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(raw), ()
    values = dict(inner)
    outer = []
    for key, value in raw.items():
        if key in _INHERITED:
            if values.get(key) is None:
                values[key] = value
        elif key not in ("text_config", "model_type"):
            if key in inner and not is_harmless(key) and inner[key] != value:
                raise SpecError(f"{key}={value!r} and text_config.{key}={inner[key]!r} disagree")
            outer.append(key)
    return values, tuple(outer)


def _family(values: Mapping[str, Any], *, planned: bool) -> Family:
    name = values.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    if planned and isinstance(name, str) and name in PLANNED:
        return PLANNED[name]
    possible = f"supported are {', '.join(sorted(FAMILIES))}"
    if not isinstance(name, str):
        raise SpecError(f"model_type={name!r} names no model family; {possible}")
    if name in MISSING:
        raise SpecError(f"model_type {name!r} is not supported: it needs {MISSING[name]}; {possible}")
    raise SpecError(f"model_type {name!r} is unknown; {possible}")


def _check_fixed(family: Family, fields: Fields) -> None:
    """Refuse a value that the family's code does not vary."""
    for name, allowed in {"hidden_act": ("silu", "swish"), **family.fixed}.items():
        if name in fields:
            value = fields.raw(name)
            if value is not None and not any(same_value(value, item) for item in allowed):
                raise fields.error(name, f"{' or '.join(map(repr, allowed))} for this family")


def _check_window(family: Family, fields: Fields, count: int) -> None:
    """Refuse attention that does not see the whole context."""
    fields.skip(*family.unread)
    if "layer_types" in family.unread:
        return
    kinds = fields.raw("layer_types") if "layer_types" in fields else None
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or len(kinds) < count:
            raise fields.error("layer_types", f"a list of at least {count} layer kinds")
        if any(kind != "full_attention" for kind in kinds[:count]):
            raise fields.error("layer_types", "'full_attention' for every layer")
    if family.window == "none":
        return
    fields.skip("sliding_window", "use_sliding_window", "max_window_layers")
    if family.window == "switch" and not (kinds is None and fields.flag("use_sliding_window")):
        return
    if family.window == "upper_layers" and (kinds is not None or fields.integer("max_window_layers", 0) >= count):
        return
    window = fields.optional_integer("sliding_window", 0)
    if window and window < fields.integer("max_position_embeddings"):
        raise fields.error(
            "sliding_window",
            f"null or at least max_position_embeddings ({fields.integer('max_position_embeddings')}): "
            "sliding-window attention is not supported",
        )


def _layers(family: Family, fields: Fields, count: int, depth: int) -> tuple[LayerSpec, ...]:
    """Every decoder layer and then the prediction layers, which continue the numbering."""
    attention = (_latent if family.attention == "mla" else _grouped)(family, fields)
    routed = _routed(family, fields, count, depth)
    dense = None if all(routed) else DenseSpec(fields.integer(family.dense_key), family.gated)
    moe = _moe(family, family.router, fields) if family.router else None
    fields.skip("intermediate_size", family.dense_key)
    layers = []
    for is_routed in routed:
        ffn = moe if is_routed else dense
        assert ffn is not None
        layers.append(LayerSpec(attention, ffn))
    return tuple(layers)


def _routed(family: Family, fields: Fields, count: int, depth: int) -> list[bool]:
    """Which layers route. A list in the file overrides counts; its entries past the decoder layers are the MTP blocks',
    which route unless it says otherwise."""
    total = count + depth
    if family.layers in ("dense", "all_routed"):
        return [family.layers == "all_routed"] * total
    if family.layers == "interleaved":
        step = fields.integer("interleave_moe_layer_step")
        return [(index + 1) % step == 0 for index in range(total)]
    if family.layers == "sparse_step":
        step, dense = fields.integer("decoder_sparse_step"), fields.integers("mlp_only_layers")
        if any(index >= count for index in dense):
            raise fields.error("mlp_only_layers", f"layer numbers below {count}")
        return [index not in dense and (index + 1) % step == 0 for index in range(total)]
    first, frequency = fields.integer("first_k_dense_replace", 0), fields.raw("moe_layer_freq")
    kinds = fields.raw("mlp_layer_types") if "mlp_layer_types" in fields else None
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or any(kind not in ("dense", "sparse") for kind in kinds):
            raise fields.error("mlp_layer_types", "a list of 'dense' and 'sparse'")
        return _listed(fields, "mlp_layer_types", [kind == "sparse" for kind in kinds], count, total)
    if isinstance(frequency, list | tuple):
        if any(not is_integer(item) or item not in (0, 1) for item in frequency):
            raise fields.error("moe_layer_freq", "an integer, or a list of 0 and 1")
        return _listed(fields, "moe_layer_freq", [item == 1 for item in frequency], count, total)
    step = fields.integer("moe_layer_freq")
    return [index >= first and index % step == 0 for index in range(count)] + [True] * depth


def _listed(fields: Fields, name: str, routed: list[bool], count: int, total: int) -> list[bool]:
    """A per-layer list cut to the layers there are; prediction layers that it leaves out route."""
    if len(routed) < count:
        raise fields.error(name, f"a list of at least num_hidden_layers={count} entries")
    return (routed + [True] * total)[:total]


def _latent(family: Family, fields: Fields) -> AttentionSpec:
    nope, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    heads = fields.integer("num_attention_heads")
    if "qk_head_dim" in fields and fields.integer("qk_head_dim") != nope + rope_dim:
        raise fields.error("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim = {nope + rope_dim}")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    rope = read_rope(fields, partial=False)
    bias = family.bias_key is not None and fields.flag(family.bias_key)
    return AttentionSpec(
        kind="mla",
        num_heads=heads,
        num_kv_heads=heads,
        qk_head_dim=nope + rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        softmax_scale=(nope + rope_dim) ** -0.5 * softmax_factor(rope),
        rope=rope_spec(
            rope,
            rope_dim,
            fields.integer("max_position_embeddings"),
            interleaved=fields.flag("rope_interleave"),
        ),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        latent_norm_eps=fields.number("latent_norm_eps"),
        q_bias=bias,
        o_bias=bias and family.output_bias,
    )


def _grouped(family: Family, fields: Fields) -> AttentionSpec:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    head_dim = fields.optional_integer("head_dim") if fields.known("head_dim") else None
    if head_dim is None:
        if hidden % heads:
            raise fields.error("num_attention_heads", f"a divisor of hidden_size={hidden} when head_dim is not given")
        head_dim = hidden // heads
    bias = family.bias_key is not None and fields.flag(family.bias_key)
    rope = read_rope(fields, partial=family.partial_rotary)
    return AttentionSpec(
        kind="gqa",
        num_heads=heads,
        num_kv_heads=kv_heads,
        qk_head_dim=head_dim,
        v_head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=rope_spec(rope, head_dim, fields.integer("max_position_embeddings"), interleaved=False),
        q_bias=bias,
        o_bias=bias and family.output_bias,
        qk_norm=family.qk_norm == "always" or (family.qk_norm == "use_qk_norm" and fields.flag("use_qk_norm")),
        qk_norm_eps=fields.number("rms_norm_eps"),
    )


def _moe(family: Family, rule: RouterRule, fields: Fields) -> MoESpec:
    experts, top_k = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    groups, keep = _groups(rule, fields, experts)
    reach = experts // groups * keep
    if top_k > reach:
        where = f"the {keep} of {groups} groups that are kept" if groups > 1 else "all"
        raise fields.error("num_experts_per_tok", f"at most {reach}, the number of experts in {where}")
    inner = fields.integer(family.expert_key)
    scale = fields.number("routed_scaling_factor") if fields.has_default("routed_scaling_factor") else 1.0
    shared = 0
    if family.shared == "count":
        shared = inner * (fields.optional_integer("n_shared_experts", 0) or 0)
    elif family.shared == "width":
        shared = fields.integer("shared_expert_intermediate_size", 0)
    return MoESpec(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=inner,
        scoring=rule.scoring,
        correction_bias=rule.correction_bias,
        num_groups=groups,
        topk_groups=keep,
        group_score=rule.group_score,
        normalize=rule.always_normalize or fields.flag("norm_topk_prob"),
        norm_epsilon=rule.norm_epsilon,
        scale_normalized=rule.scale_normalized,
        routed_scaling_factor=scale,
        shared_intermediate_size=shared,
        shared_gate=family.shared == "width" and shared > 0,
    )


def _groups(rule: RouterRule, fields: Fields, experts: int) -> tuple[int, int]:
    """(groups, groups kept); (1, 1) for plain top-k, which null, 0 or 1 groups mean."""
    if not rule.topk_methods:
        return 1, 1
    method = fields.raw("topk_method")
    if method is not None and method not in rule.topk_methods:
        raise fields.error("topk_method", f"{' or '.join(map(repr, rule.topk_methods))} for this family")
    groups = fields.optional_integer("n_group", 0) or 1
    if groups > 1 and experts % groups:
        raise fields.error("n_group", f"a divisor of {fields.label('n_routed_experts')}={experts}")
    fields.skip("topk_group")
    if groups == 1 or method == "greedy":
        return 1, 1
    keep = fields.integer("topk_group")
    if keep > groups:
        raise fields.error("topk_group", f"at most {fields.label('n_group')}={groups}")
    return groups, keep


def _eos(fields: Fields) -> tuple[int, ...]:
    value = fields.raw("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(is_integer(item) and item >= 0 for item in ids):
        raise fields.error("eos_token_id", "a token id or a list of them")
    return tuple(ids)


def _dtype(fields: Fields) -> str:
    """The declared weight type; float32, which holds any of them, when the file declares none."""
    value = fields.raw("torch_dtype") if "torch_dtype" in fields else None
    if value is None:
        return "float32"
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.error("torch_dtype", f"one of {', '.join(_DTYPES)}")
    return name
