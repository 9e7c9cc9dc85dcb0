"""Bug reports A3, A4 and A5: routers on all backends against a slow reference that follows the words, not the code.

A3: every group shape, groups of one included. A4: selecting, weighing and normalising are separate switches. A5: the
correction bias keeps its bits from the file to the top-k. Exact sets; where two experts are closer than float32 can
tell, the float64 margin is what decides whether a different set is a fault.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import ISAS, make_bank, normal
from safetensors.torch import save_file

from coterie.kernels.api import Kernels
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.model.loader import LoadOptions, load_weights
from coterie.spec import ModelSpec, SpecError
from coterie.spec.model import MoESpec

BACKENDS = [*(f"native-{isa}" for isa in ISAS), "reference"]
V3 = Path(__file__).parents[1] / "data" / "configs" / "deepseek-v3.json"


def kernels_of(name: str) -> Kernels:
    torch.set_num_threads(1)
    return ReferenceKernels() if name == "reference" else NativeKernels(2, name.removeprefix("native-"))


def v3(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V3's released config with changes."""
    return {**json.loads(V3.read_text()), "quantization_config": None, **changes}


def moe_of(config: dict[str, Any]) -> MoESpec:
    ffn = ModelSpec.from_hf(config).layers[-1].ffn
    assert isinstance(ffn, MoESpec)
    return ffn


def slow_route(logits: np.ndarray, bias: np.ndarray | None, spec: MoESpec) -> list[tuple[list[int], list[float]]]:
    """Per row: experts, best first, and weights. Plain loops in float64."""
    rows = []
    for row in logits.astype(np.float64):
        if spec.scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-value)) for value in row]
        else:
            total = sum(math.exp(value - max(row)) for value in row)
            scores = [math.exp(value - max(row)) / total for value in row]
        choice = [score + (0.0 if bias is None else float(bias[e])) for e, score in enumerate(scores)]
        allowed = set(range(len(choice)))
        if spec.num_groups > 1:
            size = len(choice) // spec.num_groups
            groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(spec.num_groups)]
            value = [group[0] if spec.group_score == "max" else sum(group[:2]) for group in groups]
            kept = sorted(range(spec.num_groups), key=lambda g: (-value[g], g))[: spec.topk_groups]
            allowed = {e for e in allowed if e // size in kept}
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: spec.top_k]
        weights = [scores[e] for e in chosen]
        if spec.normalize:
            weights = [weight / (sum(weights) + spec.norm_epsilon) for weight in weights]
        if spec.scale_normalized or not spec.normalize:
            weights = [weight * spec.routed_scaling_factor for weight in weights]
        rows.append((chosen, weights))
    return rows


def route_logits(
    kernels: Kernels, logits: np.ndarray, bias: np.ndarray | None, spec: MoESpec
) -> tuple[np.ndarray, np.ndarray]:
    """Route rows whose logits are exactly these: the gate is the identity."""
    gate = make_bank(kernels, np.eye(logits.shape[1], dtype=np.float32)[None], "f32")
    native = isinstance(kernels, NativeKernels)
    x: Any = logits if native else torch.from_numpy(logits)
    routed = kernels.route(x, gate, None if bias is None else kernels.vector(bias), spec)
    return kernels.to_host(routed.expert_ids), kernels.to_host(routed.expert_weights)


def check(kernels: Kernels, logits: np.ndarray, bias: np.ndarray | None, spec: MoESpec) -> None:
    ids, weights = route_logits(kernels, logits, bias, spec)
    for row, (chosen, wanted) in enumerate(slow_route(logits, bias, spec)):
        assert ids[row].tolist() == chosen, f"row {row}"
        np.testing.assert_allclose(weights[row], wanted, rtol=3e-6, atol=1e-9)
        assert (weights[row] >= 0).all()


# A3: n_routed_experts / n_group / topk_group
SHAPES = [(8, 8, 4), (8, 1, 1), (8, None, None), (8, 0, 0), (12, 4, 2), (256, 8, 4)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
@pytest.mark.parametrize(("experts", "groups", "keep"), SHAPES)
def test_a3_every_group_shape_from_config_to_choice(
    experts: int, groups: int | None, keep: int | None, group_score: Any, backend: str
) -> None:
    top_k = 4 if experts < 256 else 8
    config = v3(n_routed_experts=experts, n_group=groups, topk_group=keep, num_experts_per_tok=top_k)
    spec = replace(moe_of(config), group_score=group_score)
    assert spec.num_groups == (groups or 1)
    kernels = kernels_of(backend)
    for scale in (0.0, 0.3, -5.0):
        bias = normal(experts, experts, scale=abs(scale)) + np.float32(min(scale, 0.0))
        check(kernels, normal(7, 40, experts), bias, spec)
    check(kernels, normal(8, 40, experts) - 3, None, spec)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a3_a_group_of_one_is_worth_its_only_expert(backend: str) -> None:
    spec = moe_of(v3(n_routed_experts=8, n_group=8, topk_group=4, num_experts_per_tok=4))
    logits = normal(3, 200, 8)
    ids, _ = route_logits(kernels_of(backend), logits, np.zeros(8, np.float32), spec)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :4])


def test_a3_groups_that_do_not_divide_are_refused_with_both_names() -> None:
    with pytest.raises(SpecError) as caught:
        moe_of(v3(n_routed_experts=10, n_group=4, topk_group=2, num_experts_per_tok=2))
    assert "n_group=4" in str(caught.value) and "n_routed_experts=10" in str(caught.value)


@settings(max_examples=60)
@given(st.data())
def test_a3_any_shape_that_divides(data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    keep = data.draw(st.integers(1, groups))
    allowed = keep * size if groups > 1 else size
    spec = MoESpec(
        groups * size,
        data.draw(st.integers(1, allowed)),
        8,
        scoring=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        num_groups=groups,
        topk_groups=keep if groups > 1 else 1,
        group_score=data.draw(st.sampled_from(["max", "top2_sum"])),
        normalize=data.draw(st.booleans()),
        routed_scaling_factor=2.5,
    )
    seed = data.draw(st.integers(0, 1000))
    bias = normal(seed, spec.num_experts) if data.draw(st.booleans()) else None
    check(NativeKernels(1), normal(seed + 1, 5, spec.num_experts), bias, spec)


# A4
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a4_weights_are_scores_whether_normalised_or_not(
    scoring: Any, normalize: bool, top_k: int, backend: str
) -> None:
    base = MoESpec(16, top_k, 8, scoring=scoring, normalize=normalize, norm_epsilon=1e-20)
    kernels = kernels_of(backend)
    logits = normal(11, 300, 16, scale=4.0) - 2
    for factor in (1.0, 2.5):
        spec = replace(base, routed_scaling_factor=factor)
        check(kernels, logits, None, spec)
        _, weights = route_logits(kernels, logits, None, spec)
        if normalize:
            np.testing.assert_allclose(weights.sum(1), factor, rtol=1e-6)
        else:
            assert (weights <= factor).all() and (weights.sum(1) < factor * top_k).all()
        if normalize and top_k == 1:
            assert (weights == np.float32(factor)).all(), "one expert, normalised, is exactly one"


# A5
HIDDEN, EXPERTS, ROWS = 64, 256, 1000


def write_model(folder: Path, bias: torch.Tensor, gate: torch.Tensor) -> Path:
    """A bf16 checkpoint of one MoE layer whose router is this; the bias is float32, as DeepSeek ships it."""
    config = {
        "model_type": "deepseek_v3", "vocab_size": 16, "hidden_size": HIDDEN, "intermediate_size": 8,
        "moe_intermediate_size": 2, "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_attention_heads": 1,
        "num_key_value_heads": 1, "n_routed_experts": EXPERTS, "num_experts_per_tok": 8, "n_shared_experts": 0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4, "v_head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "num_nextn_predict_layers": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    layer, a = "model.layers.0.", "model.layers.0.self_attn."
    shapes = {
        "model.embed_tokens.weight": (16, HIDDEN), "lm_head.weight": (16, HIDDEN), "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,), f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{a}q_proj.weight": (8, HIDDEN), f"{a}kv_a_proj_with_mqa.weight": (12, HIDDEN),
        f"{a}kv_a_layernorm.weight": (8,), f"{a}kv_b_proj.weight": (8, 8), f"{a}o_proj.weight": (HIDDEN, 4),
    }  # fmt: skip
    for expert in range(EXPERTS):
        for name, shape in (("gate", (2, HIDDEN)), ("up", (2, HIDDEN)), ("down", (HIDDEN, 2))):
            shapes[f"{layer}mlp.experts.{expert}.{name}_proj.weight"] = shape
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    tensors[f"{layer}mlp.gate.weight"] = gate
    tensors[f"{layer}mlp.gate.e_score_correction_bias"] = bias
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=[7.0, 34.0])
def banded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A folder whose biases lie in a band 0.256 wide, the bias, the gate."""
    torch.manual_seed(5)
    bias = request.param + 0.001 * torch.arange(EXPERTS)
    gate = (torch.randn(EXPERTS, HIDDEN) * 0.1).bfloat16()
    return write_model(tmp_path_factory.mktemp("band"), bias, gate), bias, gate


def best_eight(x: np.ndarray, gate: torch.Tensor, bias: torch.Tensor) -> tuple[list[set[int]], np.ndarray]:
    """In float64, per row: the eight best experts, and by how much the eighth is ahead of the ninth."""
    choice = 1 / (1 + np.exp(-(x.astype(np.float64) @ gate.double().numpy().T))) + bias.double().numpy()
    order = np.argsort(-choice, axis=1, kind="stable")
    edge = np.take_along_axis(choice, order[:, 7:9], 1)
    return [set(row) for row in order[:, :8].tolist()], edge[:, 0] - edge[:, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a5_the_bias_keeps_its_bits_from_file_to_choice(
    banded: tuple[Path, torch.Tensor, torch.Tensor], dtype: Any, backend: str
) -> None:
    folder, bias, gate = banded
    spec, kernels = ModelSpec.from_hf(folder), kernels_of(backend)
    loaded = load_weights(folder, spec, kernels, LoadOptions(dtype=dtype))
    moe = spec.layers[0].ffn
    assert isinstance(moe, MoESpec)
    x = normal(9, ROWS, HIDDEN)
    rows: Any = x if isinstance(kernels, NativeKernels) else torch.from_numpy(x)
    router = (loaded.weights["layers.0.ffn.gate"], loaded.weights["layers.0.ffn.correction_bias"])
    ids = kernels.to_host(kernels.route(rows, *router, moe).expert_ids)

    wanted, margin = best_eight(x, gate, bias)
    wrong = [row for row in range(ROWS) if set(ids[row].tolist()) != wanted[row]]
    finest = 2 * np.spacing(bias.numpy().max())  # closer than this, float32 itself cannot tell two experts apart
    assert all(margin[row] < finest for row in wrong) and len(wrong) <= 2, (wrong, margin[wrong])
    in_bf16, _ = best_eight(x, gate, bias.bfloat16())
    assert sum(a != b for a, b in zip(in_bf16, wanted, strict=True)) > ROWS / 3, "this test must show a rounded bias"
