"""Every native op against the float64 reference, at odd sizes, zero, one and many rows, on every ISA level and kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    KINDS,
    LEVELS,
    PagedSequences,
    as_multiplied,
    attention_tolerance,
    fill_caches,
    gqa_spec,
    make_bank,
    mla_spec,
    new_bank,
    normal,
    to_bf16,
)

from coterie.kernels.api import LatentMaps
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.spec.cache import CacheKind as WeightKind
from coterie.spec.model import AttentionSpec, RopeSpec

ROWS = (0, 1, 2, 7, 70)


@pytest.fixture(params=LEVELS)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(2, request.param)


@pytest.fixture
def oracle() -> ReferenceKernels:
    torch.set_num_threads(1)
    return ReferenceKernels("float64")


def wide(values: Any) -> Any:
    """The oracle's form of an array."""
    tensor = torch.from_numpy(np.asarray(values))
    return tensor.double() if tensor.dtype == torch.float32 else tensor.long()


def assert_close(got: Any, expected: Any, *, tolerance: float = 2e-5) -> None:
    expected = expected.detach().numpy()
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_allclose(
        got, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max(initial=0))
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (31, 60), (32, 64), (33, 7), (131, 259)])
def test_linear(native: NativeKernels, oracle: ReferenceKernels, kind: WeightKind, rows: int, cols: int) -> None:
    weight, bias = normal(1, 1, rows, cols), normal(2, rows)
    mine, theirs = make_bank(native, weight, kind), make_bank(oracle, weight, kind)
    for count in ROWS:
        x = as_multiplied(native.isa, kind, normal(count, count, cols))
        assert_close(native.linear(x, mine), oracle.linear(wide(x), theirs))
        assert_close(native.linear(x, mine, native.vector(bias)), oracle.linear(wide(x), theirs, wide(bias)))
        assert_close(native.head(x, mine), oracle.head(wide(x), theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_fill_in_pieces_and_read(native: NativeKernels, kind: WeightKind) -> None:
    values = normal(3, 2, 75, 19)
    bank = new_bank(native, 2, 75, 19, kind)
    assert not native.read(bank, 1).any()
    for begin, end in [(0, 1), (1, 40), (40, 64), (64, 75), (70, 70)]:
        native.fill(bank, 1, begin, values[1, begin:end])
    expected = values[1] if kind == "f32" else to_bf16(values[1])
    np.testing.assert_array_equal(native.read(bank, 1), expected)
    assert not native.read(bank, 0).any()


def test_bf16_rounding_of_special_values(native: NativeKernels) -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0x7FC00001, 0x7F800001], np.uint32)
    values = ties.view(np.float32).reshape(1, 6)
    bank = make_bank(native, values[None], "bf16")
    got = native.read(bank, 0)[0]
    expected = torch.from_numpy(values[0]).bfloat16().float().numpy()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_embed(native: NativeKernels, oracle: ReferenceKernels, kind: WeightKind) -> None:
    table = normal(4, 1, 101, 61)
    ids = np.array([0, 100, 33, 33, 64], np.int32)
    got = native.embed(make_bank(native, table, kind), ids)
    np.testing.assert_array_equal(got, oracle.embed(make_bank(oracle, table, kind), wide(ids)).numpy())
    assert native.embed(make_bank(native, table, kind), ids[:0]).shape == (0, 61)


@pytest.mark.parametrize("kind", KINDS)
def test_head_linear(native: NativeKernels, oracle: ReferenceKernels, kind: WeightKind) -> None:
    weight = normal(5, 3, 37, 29)
    for count in ROWS:
        x = as_multiplied(native.isa, kind, normal(count, count, 3, 29))
        expected = oracle.head_linear(wide(x), make_bank(oracle, weight, kind))
        assert_close(native.head_linear(x, make_bank(native, weight, kind)), expected)


@pytest.mark.parametrize("width", [1, 7, 60, 256, 1021])
def test_norms(native: NativeKernels, oracle: ReferenceKernels, width: int) -> None:
    weight = normal(6, width)
    for count in ROWS:
        x, residual = normal(count, count, width), normal(count + 1, count, width)
        assert_close(native.norm(x, weight, 1e-6), oracle.norm(wide(x), wide(weight), 1e-6))
        got = native.add_norm(x, residual, weight, 1e-5)
        expected = oracle.add_norm(wide(x), wide(residual), wide(weight), 1e-5)
        assert_close(got[0], expected[0])
        np.testing.assert_array_equal(got[1], residual + x)
    heads = normal(7, 3, 2, width)
    assert_close(native.norm(heads, weight, 1e-6), oracle.norm(wide(heads), wide(weight), 1e-6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [mla_spec(), mla_spec(1, 64, 64, 512, 16), mla_spec(33, 3, 2, 5, 4)])
def test_mla_inputs(native: NativeKernels, oracle: ReferenceKernels, kind: WeightKind, spec: AttentionSpec) -> None:
    w_uk = normal(8, spec.num_heads, spec.kv_lora_rank, spec.qk_nope_head_dim)
    weight = normal(9, spec.kv_lora_rank)
    for count in ROWS:
        query = as_multiplied(native.isa, kind, normal(count, count, spec.num_heads * spec.qk_head_dim))
        kv = normal(count + 9, count, spec.latent_width)
        positions = np.random.default_rng(count).integers(0, 500, count).astype(np.int32)
        maps = LatentMaps(make_bank(native, w_uk, kind), weight, native.rope_table(spec.rope, 500))
        mine = native.mla_inputs(query, kv, maps, positions, spec)
        maps = LatentMaps(make_bank(oracle, w_uk, kind), wide(weight), oracle.rope_table(spec.rope, 500))
        theirs = oracle.mla_inputs(wide(query), wide(kv), maps, wide(positions), spec)
        for got, expected in zip(mine, theirs, strict=True):
            assert_close(got, expected)


@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("spec", [gqa_spec(), gqa_spec(rope=8), gqa_spec(1, 1, 64, 64, 64)])
def test_gqa_inputs(native: NativeKernels, oracle: ReferenceKernels, spec: AttentionSpec, *, with_norms: bool) -> None:
    norms = (normal(10, spec.qk_head_dim), normal(11, spec.qk_head_dim)) if with_norms else None
    table = native.rope_table(spec.rope, 300)
    for count in ROWS:
        query = normal(count, count, spec.num_heads * spec.qk_head_dim)
        key = normal(count + 3, count, spec.num_kv_heads * spec.qk_head_dim)
        positions = np.arange(count, dtype=np.int32) * 4
        mine = native.gqa_inputs(query, key, norms, table, positions, spec)
        wide_norms = (wide(norms[0]), wide(norms[1])) if norms else None
        theirs = oracle.gqa_inputs(wide(query), wide(key), wide_norms, wide(table), wide(positions), spec)
        for got, expected in zip(mine, theirs, strict=True):
            assert_close(got, expected)


def test_interleaved_rope_differs_from_split() -> None:
    kernels, spec = NativeKernels(1), gqa_spec(1, 1, 8, 8, 8)
    assert not spec.rope.interleaved
    x, positions = normal(12, 4, 8), np.arange(4, dtype=np.int32) + 1
    turned = []
    for interleaved in (False, True):
        rope = RopeSpec(dim=8, theta=10000.0, interleaved=interleaved)
        one = AttentionSpec("gqa", 1, 1, 8, 8, 1.0, rope)
        turned.append(kernels.gqa_inputs(x, x, None, kernels.rope_table(rope, 8), positions, one)[1])
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rope = RopeSpec(dim=8, theta=10000.0, interleaved=False)
    one = AttentionSpec("gqa", 1, 1, 8, 8, 1.0, rope)
    shuffled = np.ascontiguousarray(x[:, order])
    again = kernels.gqa_inputs(shuffled, shuffled, None, kernels.rope_table(rope, 8), positions, one)[1]
    assert not np.array_equal(turned[0], turned[1])
    np.testing.assert_array_equal(turned[1][:, order], again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [mla_spec(), mla_spec(16, 16, 8, 40, 8), gqa_spec(), gqa_spec(4, 4, 16, 16, 16)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_attend_paged(
    native: NativeKernels, oracle: ReferenceKernels, kind: WeightKind, spec: AttentionSpec, page_size: int
) -> None:
    layout = PagedSequences((1, 63, 64, 65, 150), page_size)
    total, latent = sum(layout.lengths), spec.kind == "mla"
    key_width = spec.latent_width if latent else spec.num_kv_heads * spec.qk_head_dim
    rows = [normal(13, total, key_width)] + ([] if latent else [normal(14, total, spec.num_kv_heads * spec.v_head_dim)])
    mine, _ = fill_caches(native, layout, rows, kind)
    theirs, _ = fill_caches(oracle, layout, [wide(row) for row in rows], kind)
    part = layout.batch([(4, 130, 150), (0, 0, 1), (2, 5, 5), (1, 62, 63), (3, 0, 65)])
    query = normal(15, part.num_tokens, spec.num_heads, spec.latent_width if latent else spec.qk_head_dim, scale=2.0)
    got = native.attend(query, mine[0], None if latent else mine[1], native.prepare(part), spec)
    expected = oracle.attend(wide(query), theirs[0], None if latent else theirs[1], oracle.prepare(part), spec)
    assert_close(got, expected, tolerance=attention_tolerance(native.isa, kind))


@pytest.mark.parametrize("spec", [mla_spec(), gqa_spec()])
def test_attend_without_cache(native: NativeKernels, oracle: ReferenceKernels, spec: AttentionSpec) -> None:
    batch = ForwardBatch.packed(np.zeros(200, np.int32), np.array([3, 0, 129, 68]))
    latent = spec.kind == "mla"
    keys = normal(16, 200, spec.latent_width if latent else spec.num_kv_heads * spec.qk_head_dim)
    values = None if latent else normal(17, 200, spec.num_kv_heads * spec.v_head_dim)
    query = normal(18, 200, spec.num_heads, spec.latent_width if latent else spec.qk_head_dim)
    got = native.attend(query, keys, values, native.prepare(batch), spec)
    wide_values = None if values is None else wide(values)
    assert_close(got, oracle.attend(wide(query), wide(keys), wide_values, oracle.prepare(batch), spec))


def test_attend_of_extreme_scores(native: NativeKernels, oracle: ReferenceKernels) -> None:
    spec = gqa_spec(2, 1, 16, 16, 16)
    batch = ForwardBatch.packed(np.zeros(130, np.int32), np.array([130]))
    keys, values = normal(19, 130, 16, scale=60.0), normal(20, 130, 16)
    query = normal(21, 130, 2, 16, scale=60.0)
    got = native.attend(query, keys, values, native.prepare(batch), spec)
    expected = oracle.attend(wide(query), wide(keys), wide(values), oracle.prepare(batch), spec)
    assert_close(got, expected, tolerance=3e-3)


def test_zero_rows_everywhere(native: NativeKernels) -> None:
    empty = ForwardBatch.packed(np.zeros(0, np.int32), np.zeros(0, np.int32))
    batch = native.prepare(empty)
    spec = mla_spec()
    query, rows = normal(0, 0, spec.num_heads, spec.latent_width), normal(0, 0, spec.latent_width)
    assert native.attend(query, rows, None, batch, spec).shape == (0, spec.num_heads, spec.kv_lora_rank)
    assert native.sort_by_expert(np.zeros((0, 4), np.int32), 9).counts.tolist() == [0] * 9
    bank, down = new_bank(native, 3, 10, 8, "f32", 2), new_bank(native, 3, 8, 5, "f32")
    assert native.experts(np.zeros((0, 8), np.float32), np.zeros(3, np.int64), bank, down).shape == (0, 8)
    out = native.combine(normal(0, 0, 8), np.zeros((0, 2), np.int64), normal(0, 0, 2), normal(0, 0, 8))
    assert out.shape == (0, 8)
