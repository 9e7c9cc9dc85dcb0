"""Rows that travel narrow: int8 or bf16 on their way out, bf16 on their way back. Every bit is that of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_ranks import EXPERTS, HIDDEN, TOP_K, Precision, make_exchange, make_layer, placement, stages, tokens

from coterie.comm.exchange import FormPolicy
from coterie.comm.local import LocalTransport
from coterie.comm.transport import TransportError
from coterie.kernels import _native
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive_all, interleave
from coterie.moe.experts import FusedExperts
from coterie.spec.weights import BF16, F32, INT4_TABLE, WeightFormat

LEVELS = (*_native.isa_levels(), *(["amx-emulated"] if "avx512" in _native.isa_levels() else []))
FORMATS = {
    "f32": F32,
    "bf16": BF16,
    "int8": WeightFormat("int8", 32, "f16"),
    "int8 by row": WeightFormat("int8", 0),
    "int4": WeightFormat("code4", 16, "f16", INT4_TABLE),
    "affine4": WeightFormat("affine4", 64),
    "affine8": WeightFormat("affine8", 16),
}
FORMS = {
    "flat": FormPolicy(),
    "fixed": FormPolicy(capacity=13),
    "fixed, too small": FormPolicy(capacity=2),
    "hierarchical": FormPolicy("hierarchical"),
    "hierarchical, fixed": FormPolicy("hierarchical", capacity=4),
    "flat, far first": FormPolicy(piece_bytes=1),
    "hierarchical, in pieces": FormPolicy("hierarchical", piece_bytes=1),
}
SIZES = (5, 0, 9, 3)


def alone(kernels: Any, precision: Precision, x: np.ndarray, *, fused: bool = False) -> np.ndarray:
    """One rank's output, by stages or by the fused op."""
    layer = make_layer(kernels, None, None, precision=precision)
    if fused:
        whole = FusedExperts.of(layer.experts, layer.shared, None, rounded=precision.rounded)  # type: ignore[arg-type]
        assert whole is not None
        layer = replace(layer, fused=whole)
    (out,) = drive_all([stages(kernels, layer, x)])
    return kernels.to_host(out)


def on_ranks(
    kernels: Any, precision: Precision, policy: FormPolicy, parts: list[np.ndarray], *, copies: bool = True,
    overlap: bool = False,
) -> list[np.ndarray]:
    """The outputs of as many ranks as there are parts, the second of two batches."""
    nodes = 2 if policy.sized.startswith("hier") or policy.piece_bytes == 1 else 1
    table = placement(len(parts), nodes, copies=copies)
    exchanges = [make_exchange(transport, table, policy) for transport in LocalTransport.group(len(parts))]
    layers = [make_layer(kernels, exchange, None, precision=precision) for exchange in exchanges]
    outputs: list[Any] = []
    for _ in range(2):
        if overlap:
            halves = [np.array_split(x, 2) for x in parts]
            running = [
                interleave([stages(kernels, layer, half) for half in pair], lambda index: None)
                for layer, pair in zip(layers, halves, strict=True)
            ]
            outputs = [kernels.concat(pair) for pair in drive_all(running)]
        else:
            outputs = drive_all([stages(kernels, layer, x) for layer, x in zip(layers, parts, strict=True)])
    assert all(exchange.pool.lent == 0 for exchange in exchanges), "a buffer was not given back"
    return [kernels.to_host(out) for out in outputs]


def parts_of(x: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("rounded", [False, True], ids=["f32 back", "bf16 back"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", LEVELS)
def test_every_level_and_format_has_the_bits_of_one_rank(isa: str, name: str, rounded: bool) -> None:
    """The stages and the fused op of one rank, and four ranks in every exact form, overlapped or not."""
    kernels, precision = NativeKernels(2, isa), Precision(FORMATS[name], rounded)
    x = tokens(sum(SIZES))
    want = alone(kernels, precision, x)
    assert np.isfinite(want).all() and np.abs(want).max() > 0.1
    assert alone(kernels, precision, x, fused=True).tobytes() == want.tobytes(), "fused"
    if rounded:
        plain = alone(kernels, replace(precision, rounded=False), x)
        assert 0 < np.abs(plain - want).max() < 2**-7 * np.abs(want).max(), "bf16 rounds, and little"
    for form, policy in FORMS.items():
        for copies, overlap in ((True, False), (False, True)):
            got = on_ranks(kernels, precision, policy, parts_of(x, SIZES), copies=copies, overlap=overlap)
            assert np.concatenate(got).tobytes() == want.tobytes(), (form, copies, overlap)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(["flat", "fixed", "fixed, too small"]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_batch(sizes: list[int], name: str, form: str, overlap: bool, seed: int) -> None:
    kernels, precision = NativeKernels(1), Precision(FORMATS[name], rounded=True)
    x = tokens(sum(sizes), seed) * np.exp(np.random.default_rng(seed).normal(size=(sum(sizes), 1)) * 3)
    x = x.astype(np.float32)
    got = on_ranks(kernels, precision, FORMS[form], parts_of(x, tuple(sizes)), overlap=overlap)
    assert np.concatenate(got).tobytes() == alone(kernels, precision, x).tobytes()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("form", ["flat", "hierarchical"])
def test_odd_values_stay_their_own(form: str, name: str) -> None:
    """NaN, infinity, the largest and the smallest floats, and zeros: the same bits, and other rows unharmed."""
    kernels, precision = NativeKernels(1), Precision(FORMATS[name], rounded=True)
    x = tokens(12)
    x[1, 3], x[4, 40], x[7], x[9] = np.nan, np.inf, 0.0, 1e-40
    x[10, ::2] = 3e38
    want = alone(kernels, precision, x)
    got = np.concatenate(on_ranks(kernels, precision, FORMS[form], parts_of(x, (3, 3, 3, 3))))
    assert got.tobytes() == want.tobytes()
    assert not np.isfinite(want[[1, 4]]).any(1).all() and np.isfinite(want[[0, 2, 3, 5, 6, 7, 8, 9, 11]]).all()


def test_the_reference_backend_rounds_in_the_same_place() -> None:
    pytest.importorskip("torch")
    from coterie.kernels.reference import ReferenceKernels

    kernels, x = ReferenceKernels(), tokens(sum(SIZES))
    rounded, plain = alone(kernels, Precision(rounded=True), x), alone(kernels, Precision(), x)
    got = np.concatenate(on_ranks(kernels, Precision(rounded=True), FORMS["flat"], parts_of(x, SIZES)))
    native = alone(NativeKernels(), Precision(rounded=True), x)
    np.testing.assert_allclose(got, rounded, atol=1e-2)  # products of other batches may round to the next bf16
    np.testing.assert_allclose(native, rounded, atol=1e-2)
    assert np.abs(got - rounded).mean() < np.abs(plain - rounded).mean() / 4


@pytest.mark.parametrize("form", ["flat-reduced", "hierarchical-reduced"])
def test_reduced_forms_are_close_and_repeatable(form: Any) -> None:
    kernels, precision, x = NativeKernels(1), Precision(FORMATS["int8"], rounded=True), tokens(sum(SIZES))
    first, second = (
        np.concatenate(on_ranks(kernels, precision, FormPolicy(form), parts_of(x, SIZES))) for _ in range(2)
    )
    assert first.tobytes() == second.tobytes()
    np.testing.assert_allclose(first, alone(kernels, precision, x), atol=3e-2)


@pytest.mark.parametrize(
    ("precision", "out", "back"),
    [
        (Precision(), 4 * HIDDEN, 4 * HIDDEN),
        (Precision(rounded=True), 4 * HIDDEN, 2 * HIDDEN),
        (Precision(FORMATS["int8"], rounded=True), HIDDEN + 2 + 3 * 4, 2 * HIDDEN),
        (Precision(FORMATS["int8 by row"]), HIDDEN + 2 + 4, 4 * HIDDEN),
    ],
)
def test_bytes_that_travel(precision: Precision, out: int, back: int) -> None:
    """Two ranks, one of which has tokens: its rows go once to the other, which sends each output back."""
    kernels, table = NativeKernels(1), placement(2, 2, copies=False)
    exchanges = [make_exchange(transport, table, FormPolicy()) for transport in LocalTransport.group(2)]
    layers = [make_layer(kernels, exchange, None, precision=precision) for exchange in exchanges]
    x = [tokens(6), tokens(0)]
    drive_all([stages(kernels, layer, rows) for layer, rows in zip(layers, x, strict=True)])
    ids = layers[0].router.route(x[0]).expert_ids
    away = ids >= EXPERTS // 2
    rows, pairs = int(away.any(1).sum()), int(away.sum())
    assert 0 < rows < pairs
    assert exchanges[0].mesh.world.bytes_to[1] == rows * (out + 4 * TOP_K)
    assert exchanges[1].mesh.world.bytes_to[0] == pairs * back


def test_ranks_that_disagree_are_refused() -> None:
    kernels, table = NativeKernels(1), placement(2, 1, copies=False)
    exchanges = [make_exchange(transport, table, FormPolicy()) for transport in LocalTransport.group(2)]
    layers = [
        make_layer(kernels, exchange, None, precision=Precision(rounded=rounded))
        for exchange, rounded in zip(exchanges, (False, True), strict=True)
    ]
    with pytest.raises(TransportError, match=rf"rows of \d+ bytes, {2 * HIDDEN} back; .* {4 * HIDDEN} back"):
        drive_all([stages(kernels, layer, tokens(2)) for layer in layers])
