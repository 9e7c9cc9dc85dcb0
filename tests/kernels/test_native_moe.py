"""Router, sort, experts and combine of the native backend against the float64 reference and against hand-made cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import KINDS, LEVELS, make_bank, normal

from coterie.kernels.native import MAX_ROUTE_SHAPES, NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.spec.cache import CacheKind as WeightKind
from coterie.spec.model import MoESpec

BASE = MoESpec(num_experts=24, top_k=4, intermediate_size=8)
RULES = [
    BASE,
    replace(BASE, normalize=True, norm_epsilon=1e-20, routed_scaling_factor=2.5),
    replace(BASE, normalize=True, scale_normalized=False, routed_scaling_factor=16.0),
    replace(BASE, scale_normalized=False, routed_scaling_factor=16.0),
    replace(BASE, scoring="sigmoid", correction_bias=True, normalize=True, norm_epsilon=1e-20),
    replace(BASE, num_groups=8, topk_groups=3, group_score="max"),
    replace(BASE, scoring="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum", correction_bias=True),
    replace(BASE, scoring="sigmoid", num_groups=24, topk_groups=5, group_score="top2_sum", correction_bias=True),
    replace(BASE, num_experts=1, top_k=1),
    replace(BASE, num_experts=7, top_k=7),
]


@pytest.fixture(params=LEVELS)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(2, request.param)


@pytest.fixture
def oracle() -> ReferenceKernels:
    torch.set_num_threads(1)
    return ReferenceKernels("float64")


def wide(values: Any) -> Any:
    tensor = torch.from_numpy(np.asarray(values))
    return tensor.double() if tensor.dtype == torch.float32 else tensor.long()


@pytest.mark.parametrize("bias_scale", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("spec", RULES)
def test_route(native: NativeKernels, oracle: ReferenceKernels, spec: MoESpec, bias_scale: float) -> None:
    gate = normal(1, 1, spec.num_experts, 37, scale=0.3)
    bias = normal(2, spec.num_experts, scale=bias_scale) - bias_scale if spec.correction_bias else None
    for count in (0, 1, 65):
        x = normal(count + 5, count, 37)
        got = native.route(x, make_bank(native, gate, "f32"), bias, spec)
        expected = oracle.route(wide(x), make_bank(oracle, gate, "f32"), None if bias is None else wide(bias), spec)
        np.testing.assert_array_equal(got.expert_ids, expected.expert_ids.numpy())
        np.testing.assert_allclose(got.expert_weights, expected.expert_weights.numpy(), rtol=3e-6, atol=1e-7)


def routed_scores(native: NativeKernels, logits: np.ndarray, spec: MoESpec, bias: np.ndarray | None = None) -> Any:
    """Route one token whose logits are exactly these: an identity gate."""
    gate = make_bank(native, np.eye(len(logits), dtype=np.float32)[None], "f32")
    return native.route(logits.astype(np.float32)[None], gate, bias, spec)


def test_rules_that_are_remembered_are_few(native: NativeKernels) -> None:
    logits = np.array([0, 2, 1, 3])
    for count in range(2 * MAX_ROUTE_SHAPES + 1):
        spec = replace(BASE, num_experts=4, top_k=1 + count % 4, scoring="sigmoid")
        assert routed_scores(native, logits, spec).expert_ids.shape == (1, spec.top_k)
        assert len(native._route_shapes) <= MAX_ROUTE_SHAPES


def test_ties_go_to_the_lower_id(native: NativeKernels) -> None:
    spec = replace(BASE, num_experts=8, top_k=3, scoring="sigmoid")
    got = routed_scores(native, np.array([0, 2, 1, 2, 2, 1, 1, 0]), spec)
    assert got.expert_ids.tolist() == [[1, 3, 4]]
    assert routed_scores(native, np.zeros(8), spec).expert_ids.tolist() == [[0, 1, 2]]


def test_tied_groups_go_to_the_lower_group(native: NativeKernels) -> None:
    spec = replace(BASE, num_experts=8, top_k=2, scoring="sigmoid", num_groups=4, topk_groups=2)
    got = routed_scores(native, np.array([0, 0, 1, 0, 1, 0, 1, 0]), spec)
    assert got.expert_ids.tolist() == [[2, 4]]


def test_excluded_groups_never_win_against_negative_scores(native: NativeKernels) -> None:
    spec = replace(
        BASE, num_experts=8, top_k=4, scoring="sigmoid", num_groups=2, topk_groups=1, group_score="top2_sum",
        correction_bias=True,
    )  # fmt: skip
    bias = np.array([-5, -5, -5, -5, -6, -6, -6, -6], np.float32)
    got = routed_scores(native, np.arange(8) - 4, spec, bias)
    assert got.expert_ids.tolist() == [[3, 2, 1, 0]]
    np.testing.assert_allclose(got.expert_weights[0], 1 / (1 + np.exp(np.array([1.0, 2, 3, 4]))), rtol=1e-6)


def test_group_score_sums_the_two_best(native: NativeKernels) -> None:
    logits = np.array([3.0, -9, 1, 1])
    spec = replace(BASE, num_experts=4, top_k=1, scoring="sigmoid", num_groups=2, topk_groups=1)
    assert routed_scores(native, logits, spec).expert_ids.tolist() == [[0]]
    assert routed_scores(native, logits, replace(spec, group_score="top2_sum")).expert_ids.tolist() == [[2]]


@pytest.mark.parametrize("groups", [1, 4])
def test_a_row_of_nan_picks_distinct_experts_and_leaves_others_alone(native: NativeKernels, groups: int) -> None:
    spec = replace(BASE, num_groups=groups, topk_groups=2, group_score="top2_sum")
    gate, x = make_bank(native, normal(3, 1, 24, 16), "f32"), normal(4, 3, 16)
    good = native.route(x, gate, None, spec)
    x[1] = np.nan
    got = native.route(x, gate, None, spec)
    assert len(set(got.expert_ids[1].tolist())) == spec.top_k
    assert np.isnan(got.expert_weights[1]).all()
    for row in (0, 2):
        np.testing.assert_array_equal(got.expert_ids[row], good.expert_ids[row])
        np.testing.assert_array_equal(got.expert_weights[row], good.expert_weights[row])


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 30), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_sort_by_expert_is_a_stable_sort(tokens: int, k: int, experts: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, experts, (tokens, k)).astype(np.int32)
    got = NativeKernels(1).sort_by_expert(ids, experts)
    order = np.argsort(ids.reshape(-1), kind="stable")
    np.testing.assert_array_equal(got.token, order // k)
    np.testing.assert_array_equal(got.position.reshape(-1)[order], np.arange(tokens * k))
    np.testing.assert_array_equal(got.counts, np.bincount(ids.reshape(-1), minlength=experts))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_regroup_orders_by_expert_then_rank(ranks: int, experts: int, seed: int) -> None:
    received = np.random.default_rng(seed).integers(0, 4, (ranks, experts))
    got = NativeKernels(1).regroup(received)
    label = np.repeat(np.tile(np.arange(experts), ranks), received.reshape(-1))
    assert (np.diff(label[got.order]) >= 0).all()
    for expert in range(experts):
        assert (np.diff(got.order[label[got.order] == expert]) > 0).all()
    np.testing.assert_array_equal(got.order[got.inverse], np.arange(len(label)))
    np.testing.assert_array_equal(got.counts, received.sum(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(60, 33), (64, 32), (7, 5)])
@pytest.mark.parametrize("counts", [[3, 0, 1, 70, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 2]])
def test_experts(
    native: NativeKernels, oracle: ReferenceKernels, kind: WeightKind, hidden: int, inner: int, counts: list[int]
) -> None:
    gate_up, down = normal(5, 5, 2 * inner, hidden, scale=0.3), normal(6, 5, hidden, inner, scale=0.3)
    rows, sizes = normal(7, sum(counts), hidden), np.array(counts)
    got = native.experts(rows, sizes, make_bank(native, gate_up, kind, 2), make_bank(native, down, kind))
    banks = make_bank(oracle, gate_up, kind), make_bank(oracle, down, kind)
    expected = oracle.experts(wide(rows), wide(sizes), *banks).numpy()
    close = 1e-2 if native.isa.startswith("amx") and kind == "bf16" else 2e-5  # activations of 8 bits
    np.testing.assert_allclose(got, expected, rtol=close, atol=close * np.abs(expected).max(initial=1))


@pytest.mark.parametrize("with_shared", [True, False])
def test_combine_and_sigmoid_scale(native: NativeKernels, oracle: ReferenceKernels, *, with_shared: bool) -> None:
    rows, weights = normal(8, 90, 61), normal(9, 30, 3)
    position = np.random.default_rng(1).permutation(90).reshape(30, 3)
    shared = normal(10, 30, 61) if with_shared else None
    got = native.combine(rows, position, weights, shared)
    expected = oracle.combine(wide(rows), wide(position), wide(weights), None if shared is None else wide(shared))
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-5)
    gate = normal(11, 30, 1, scale=20.0)
    got = native.sigmoid_scale(got, gate)
    np.testing.assert_allclose(got, oracle.sigmoid_scale(expected, wide(gate)).numpy(), rtol=1e-5, atol=1e-5)
