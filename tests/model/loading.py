"""What the tests of the loader share: a load of a made-up checkpoint, its refusal, and every value by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import (
    EXPERTS,
    HEADS,
    HIDDEN,
    NOPE,
    RANK,
    VALUE,
    FakeKernels,
    tiny_spec,
)

from coterie.model.loader import LoadedWeights, LoadError, LoadOptions, LoadProgress, load_weights
from coterie.model.names import weight_layout
from coterie.spec.model import ModelSpec

Tensors = dict[str, torch.Tensor]


def load(
    folder: Path, spec: ModelSpec | None = None, progress: Callable[[LoadProgress], None] | None = None, **options: Any
) -> tuple[LoadedWeights, FakeKernels]:
    kernels = FakeKernels()
    chosen = LoadOptions(**options)
    return load_weights(folder, spec or tiny_spec(), kernels, chosen, progress=progress), kernels  # type: ignore[arg-type]


def refused(folder: Path, spec: ModelSpec | None = None, **options: Any) -> LoadError:
    """The error of a load that must stop before any allocation."""
    kernels = FakeKernels()
    with pytest.raises(LoadError) as caught:
        load_weights(folder, spec or tiny_spec(), kernels, LoadOptions(**options))  # type: ignore[arg-type]
    assert kernels.allocated == 0
    return caught.value


def bank(loaded: LoadedWeights, kernels: FakeKernels, key: str, index: int = 0) -> torch.Tensor:
    return torch.from_numpy(kernels.read(loaded.weights[key], index))


def check_every_value(loaded: LoadedWeights, kernels: FakeKernels, tensors: Tensors) -> None:
    """Every bank and vector against slices of the checkpoint written down by hand."""
    t = {name: tensor.float() for name, tensor in tensors.items()}

    def same(key: str, expected: torch.Tensor, index: int = 0) -> None:
        assert torch.equal(bank(loaded, kernels, key, index), expected), key

    same("embed", t["model.embed_tokens.weight"])
    same("head", t["lm_head.weight"])
    assert torch.equal(torch.from_numpy(loaded.weights["norm"]), t["model.norm.weight"])
    for layer, key in enumerate(("layers.0", "layers.1", "mtp.0.layer")):
        source = f"model.layers.{layer}"
        for name, stored in {"q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "o": "o_proj"}.items():
            same(f"{key}.attention.{name}", t[f"{source}.self_attn.{stored}.weight"])
        kv_b = t[f"{source}.self_attn.kv_b_proj.weight"].reshape(HEADS, NOPE + VALUE, RANK)
        for head in range(HEADS):
            same(f"{key}.attention.w_uk", kv_b[head, :NOPE].T, head)
            same(f"{key}.attention.w_uv", kv_b[head, NOPE:], head)
        vectors = {
            "attention_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attention.q_norm": "self_attn.q_a_layernorm",
            "attention.kv_norm": "self_attn.kv_a_layernorm",
        }
        for name, stored in vectors.items():
            assert torch.equal(torch.from_numpy(loaded.weights[f"{key}.{name}"]), t[f"{source}.{stored}.weight"])
        mlps = [("ffn", "mlp", 0)] if layer == 0 else [("ffn.shared", "mlp.shared_experts", 0)]
        mlps += [("ffn", f"mlp.experts.{e}", e) for e in range(EXPERTS)] if layer else []
        for name, stored, index in mlps:
            gate, up = t[f"{source}.{stored}.gate_proj.weight"], t[f"{source}.{stored}.up_proj.weight"]
            same(f"{key}.{name}.gate_up", torch.cat([gate, up]), index)
            same(f"{key}.{name}.down", t[f"{source}.{stored}.down_proj.weight"], index)
        if layer:
            same(f"{key}.ffn.gate", t[f"{source}.mlp.gate.weight"])
            bias = torch.from_numpy(loaded.weights[f"{key}.ffn.correction_bias"])
            assert torch.equal(bias, t[f"{source}.mlp.gate.e_score_correction_bias"])
    same("mtp.0.e_proj", t["model.layers.2.eh_proj.weight"][:, :HIDDEN])
    same("mtp.0.h_proj", t["model.layers.2.eh_proj.weight"][:, HIDDEN:])
    for name, stored in {"enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}.items():
        assert torch.equal(torch.from_numpy(loaded.weights[f"mtp.0.{name}"]), t[f"model.layers.2.{stored}.weight"])


def all_keys(*, mtp: bool = True) -> set[str]:
    layout = weight_layout(tiny_spec(), mtp=mtp)
    return layout.banks.keys() | layout.vectors.keys()
