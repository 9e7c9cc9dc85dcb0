"""What tensor parallelism rests on: an output column has the same bits wherever its weights lie, in every format."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import LEVELS, normal

from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.spec.weights import BF16, F32, FP8, INT4_TABLE, MXFP4_TABLE, MatrixSpec, WeightFormat

FORMATS = (
    F32,
    BF16,
    FP8,
    WeightFormat("int8", 32, "f16"),
    WeightFormat("int8", 0, "f32"),
    WeightFormat("code4", 16, "f16", INT4_TABLE),
    WeightFormat("code4", 32, "e8m0", MXFP4_TABLE),
    WeightFormat("affine4", 32, "f16"),
    WeightFormat("affine8", 64, "f32"),
)


def bank_of(kernels, values: np.ndarray, form: WeightFormat, segments: int = 1):
    (bank,) = kernels.allocate(1, MatrixSpec(*values.shape, form, segments))
    kernels.fill(bank, 0, 0, np.ascontiguousarray(values))
    return bank


@pytest.mark.parametrize("form", FORMATS, ids=WeightFormat.label)
@pytest.mark.parametrize("isa", LEVELS)
def test_columns_computed_apart_have_the_bits_of_the_whole(isa: str, form: WeightFormat) -> None:
    """Odd widths, cuts inside panels, 1 row and enough rows for tiles."""
    kernels = NativeKernels(2, isa)
    weight, bias = normal(1, 131, 150, scale=0.1), normal(2, 131)
    whole = bank_of(kernels, weight, form)
    parts = [(a, b, bank_of(kernels, weight[a:b], form)) for a, b in ((0, 32), (32, 47), (47, 128), (128, 131))]
    for rows in (1, 3, 40):
        x = normal(rows, rows, 150)
        expected = kernels.linear(x, whole, bias)
        for first, end, part in parts:
            np.testing.assert_array_equal(kernels.linear(x, part, bias[first:end]), expected[:, first:end])


@pytest.mark.parametrize("form", FORMATS, ids=WeightFormat.label)
@pytest.mark.parametrize("isa", LEVELS)
def test_a_cut_feed_forward_has_the_bits_of_the_whole(isa: str, form: WeightFormat) -> None:
    """gated is what `experts` multiplies by down; its columns may come from several banks."""
    kernels, inner, hidden = NativeKernels(2, isa), 147, 70
    gate, up, down = normal(1, inner, hidden, scale=0.1), normal(2, inner, hidden), normal(3, hidden, inner, scale=0.1)
    gate_up, out = bank_of(kernels, np.concatenate([gate, up]), form, 2), bank_of(kernels, down, form)
    for rows in (0, 1, 5, 300):
        x = normal(rows, rows, hidden)
        expected = kernels.experts(x, np.array([rows]), gate_up, out)
        whole = kernels.gated(x, gate_up)
        np.testing.assert_array_equal(kernels.linear(whole, out), expected)
        for first, end in ((0, 64), (64, 130), (130, inner)):
            part = bank_of(kernels, np.concatenate([gate[first:end], up[first:end]]), form, 2)
            np.testing.assert_array_equal(kernels.gated(x, part), whole[:, first:end])


def test_gated_is_silu_of_gate_times_up() -> None:
    kernels, oracle, x = NativeKernels(1), ReferenceKernels(), normal(4, 9, 20)
    weight = normal(5, 26, 20)
    expected = oracle.gated(oracle.from_host(x), bank_of(oracle, weight, F32, 2))
    np.testing.assert_allclose(kernels.gated(x, bank_of(kernels, weight, F32, 2)), oracle.to_host(expected), rtol=1e-5)
    with pytest.raises(ValueError, match="2 segments"):
        kernels.gated(x, bank_of(kernels, weight, F32))
    with pytest.raises(ValueError, match="x has"):
        kernels.gated(x[:, :19], bank_of(kernels, weight, F32, 2))
