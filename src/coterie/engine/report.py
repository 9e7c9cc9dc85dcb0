"""What an engine says about its weights and activations: one line a role, with bytes; what rounding costs is measured.

Facts and one measurement through the kernels; nothing is chosen here (`engine/resolve.py`, `model/load_plan.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.engine.config import EngineConfig
from coterie.engine.resolve import gigabytes
from coterie.kernels.api import Kernels
from coterie.kernels.select import Choice
from coterie.model.loader import LoadedWeights
from coterie.spec.cache import CacheKind
from coterie.spec.model import ModelSpec
from coterie.spec.weights import MatrixSpec, WeightFormat

_COLS, _ROWS = 256, 64


def weight_choices(loaded: LoadedWeights, config: EngineConfig, kernels: Kernels) -> tuple[Choice, ...]:
    """Lines for all weights, for each role, and for the activations that they are multiplied with."""
    total = sum(need.nbytes for need in loaded.needs)
    reason = "asked for" if config.dtype != "auto" else "as the files hold them"
    by_size = sorted(loaded.needs, key=lambda need: -need.nbytes)
    kinds = ", ".join(dict.fromkeys(need.label for need in by_size)) or loaded.kind
    lines = [Choice("weights", kinds, f"{reason}; {gigabytes(total)} in all")]
    asked: Mapping[str, str] = {
        "experts": config.quant.experts, "attention": config.quant.attention, "head": config.quant.head,
    }  # fmt: skip
    for need in loaded.needs:
        why = "asked for" if asked.get(need.role, "auto") != "auto" else reason
        if need.role == "router":
            why = "never narrowed"
        lines.append(Choice(f"weights of {need.role}", need.label, f"{why}; {gigabytes(need.nbytes)}"))
    return (*lines, *activation_choices(loaded.weights, kernels))


def attention_choice(kernels: Kernels, cache: CacheKind) -> tuple[Choice, ...]:
    """What the native kernels compute attention in: bf16 tiles, where the level has them and the cache is narrower than
    float32, else float32."""
    if kernels.name != "native":
        return ()
    if cache == "f32" or not getattr(kernels, "isa", "").startswith("amx"):
        return (Choice("attention", "float32", f"sums, queries and softmax weights; cache rows are {cache}"),)
    reason = "queries and softmax weights before AMX tiles, sums in float32; --isa avx512 keeps float32"
    return (Choice("attention", "bfloat16", reason),)


def exchange_choice(spec: ModelSpec, config: EngineConfig) -> tuple[Choice, ...]:
    """In what a token's experts are summed; nothing for a model without any."""
    if not any(spec.moe_layers()):
        return ()
    if config.exchange_dtype == "float32":
        return (Choice("exchange_dtype", "float32", "routed experts' outputs are summed as they are computed"),)
    return (Choice("exchange_dtype", "bfloat16", "asked for; outputs are rounded alike on any number of ranks"),)


def activation_choices(weights: Mapping[str, Any], kernels: Kernels) -> tuple[Choice, ...]:
    """How native holds the rows of products: int8 before integer kinds of weights, bfloat16 before bf16 weights where
    tiles multiply them, else float32."""
    if kernels.name != "native":
        return ()  # said where the backend was chosen
    integer = {"int8", "code4", "affine4", "affine8"}
    kinds = {getattr(bank, "kind", "") for bank in weights.values()}
    rounded = getattr(kernels, "isa", "").startswith("amx") and "bf16" in kinds
    if not kinds & integer and rounded:
        return (Choice("activations", "bfloat16", "before bf16 weights, for AMX tiles; --isa avx512 keeps float32"),)
    if not kinds & integer:
        return (Choice("activations", "float32", "exact products; no weights of an integer kind"),)
    error = activation_error(kernels)
    elsewhere = "bfloat16 before bf16 weights" if rounded else "float32 elsewhere"
    reason = f"for integer kinds of weights; relative error {error:.2g}, normal rows, groups of 128; {elsewhere}"
    return (Choice("activations", "int8 per token and group of weights", reason),)


def activation_error(kernels: Kernels) -> float:
    """Relative error (root of squared error over squared values) of normal rows that went through an identity."""
    (bank,) = kernels.allocate(1, MatrixSpec(_COLS, _COLS, WeightFormat("int8", 128)))
    codes = np.full((_COLS, _COLS), 128, np.uint8)
    np.fill_diagonal(codes, 129)
    kernels.fill_codes(bank, 0, 0, codes, np.ones((_COLS, _COLS // 128), np.float32), None)
    rows = np.random.default_rng(0).standard_normal((_ROWS, _COLS)).astype(np.float32)
    out = kernels.to_host(kernels.linear(rows, bank)).astype(np.float64)
    return float(np.sqrt(((out - rows) ** 2).sum() / (rows.astype(np.float64) ** 2).sum()))
