"""The ops of narrow rows, at every level: rounding to bf16, sums of bf16 rows, rows packed as experts read them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LEVELS, new_bank, normal, to_bf16

from coterie.kernels.api import NarrowRows
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.spec.weights import BF16, F32, IQ4_TABLE, MXFP4_TABLE, MatrixSpec, WeightFormat
from coterie.spec.weights import INT4_TABLE as INT4

FORMATS = (
    *(WeightFormat("int8", group) for group in (0, 16, 32, 64, 128)),
    *(WeightFormat("code4", group, "f16", INT4) for group in (0, 16, 128)),
    WeightFormat("code4", 32, "e8m0", MXFP4_TABLE),
    WeightFormat("code4", 32, "f32", IQ4_TABLE),
    *(WeightFormat("affine4", group, "f32") for group in (0, 16, 32)),
    WeightFormat("affine8", 64),
)
EVERY = (*FORMATS, F32, BF16, WeightFormat("fp8", 128))


def odd_floats() -> np.ndarray:
    """Every pattern of the upper half with lower halves below, at and above the middle: all kinds of numbers."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (high[:, None] | low).reshape(-1, 96).view(np.float32)


@pytest.mark.parametrize("isa", LEVELS)
def test_rounding_to_bf16(isa: str) -> None:
    kernels, rows = NativeKernels(2, isa), odd_floats()
    take = np.random.default_rng(1).integers(0, len(rows), 5000)
    out = np.empty((5000, 96), np.uint16)
    kernels.narrow(rows, take, out)
    finite = ~np.isnan(rows)
    want = np.where(finite, to_bf16(np.where(finite, rows, 0)).view(np.uint32), rows.view(np.uint32) | 0x400000) >> 16
    np.testing.assert_array_equal(out, want[take])
    torch_out = np.empty_like(out)
    ReferenceKernels().narrow(ReferenceKernels().from_host(rows), take, torch_out)
    assert ((out == torch_out) | np.isnan(rows[take])).all()


@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("isa", LEVELS)
def test_combine_rounds_as_narrow_does(isa: str, with_shared: bool) -> None:
    """bf16 rows from elsewhere, rows that combine rounds itself, and rows rounded before: one result."""
    kernels = NativeKernels(2, isa)
    rows, weights = normal(8, 90, 61), normal(9, 30, 3)
    position = np.random.default_rng(1).permutation(90).reshape(30, 3)
    shared = normal(10, 30, 61) if with_shared else None
    bits = np.empty(rows.shape, np.uint16)
    kernels.narrow(rows, np.arange(90), bits)
    want = kernels.combine(to_bf16(rows), position, weights, shared)
    assert kernels.combine(bits, position, weights, shared).tobytes() == want.tobytes()
    assert kernels.combine(rows, position, weights, shared, rounded=True).tobytes() == want.tobytes()
    assert kernels.combine(rows, position, weights, shared).tobytes() != want.tobytes()


def packed(kernels: NativeKernels, x: np.ndarray, bank: object, room: int = 0) -> np.ndarray:
    """Rows as they travel, cut out of wider rows."""
    width = kernels.row_bytes(bank)
    out = np.full((len(x), width + room), 0xA5, np.uint8)
    kernels.pack_rows(x, bank, out)
    assert (out[:, width:] == 0xA5).all(), "wrote behind its bytes"
    return np.ascontiguousarray(out[:, :width])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", EVERY, ids=[f"{format.label()} {format.scale}" for format in EVERY])
def test_experts_read_packed_rows_as_the_floats_they_were(format: WeightFormat, isa: str) -> None:
    for hidden, inner in ((19, 33), (200, 70), (576, 40)):
        kernels, counts = NativeKernels(2, isa), np.array([3, 0, 17, 1])
        gate_up, down = kernels.allocate(4, MatrixSpec(2 * inner, hidden, format, 2), MatrixSpec(hidden, inner, format))
        for index in range(4):
            kernels.fill(gate_up, index, 0, normal(index, 2 * inner, hidden, scale=0.1))
            kernels.fill(down, index, 0, normal(9 + index, hidden, inner, scale=0.1))
        x = normal(3, 21, hidden)
        x[2], x[5, 4], x[7, 1], x[9] = 0.0, np.nan, -np.inf, 1e-42
        narrow = format.is_integer or (format == BF16 and isa.startswith("amx"))
        assert (kernels.row_bytes(gate_up) > 0) == narrow
        if not narrow:
            continue
        rows = packed(kernels, x, gate_up, 5)
        assert kernels.experts(rows, counts, gate_up, down).tobytes() == kernels.experts(
            x, counts, gate_up, down
        ).tobytes()
        assert kernels.experts(rows[:0], np.zeros(4, np.int64), gate_up, down).shape == (0, hidden)


@settings(max_examples=60)
@given(st.integers(1, 150), st.integers(0, 7), st.sampled_from(FORMATS), st.sampled_from(LEVELS), st.integers(0, 99))
def test_what_a_packed_row_holds(hidden: int, count: int, format: WeightFormat, isa: str, seed: int) -> None:
    """A factor for each group, that of its largest value over 127; then the nearest multiples, one byte each."""
    kernels = NativeKernels(1, isa)
    (bank,) = kernels.allocate(1, MatrixSpec(4, hidden, format, 2))
    x = normal(seed, count, hidden) * np.exp(normal(seed + 1, count, 1) * 5)
    rows = packed(kernels, x, bank)
    group = max(32, format.group) if format.group else hidden
    groups = -(-hidden // group)
    assert rows.shape[1] == -(-(4 * groups + hidden) // 4) * 4
    factors = np.ascontiguousarray(rows[:, : 4 * groups]).view(np.float32)
    codes = rows[:, 4 * groups : 4 * groups + hidden].view(np.int8).astype(np.float64)
    for index in range(groups):
        part = x[:, index * group : (index + 1) * group]
        top = np.abs(part).max(1, keepdims=True)
        np.testing.assert_array_equal(factors[:, index], (top / np.float32(127))[:, 0])
        found = codes[:, index * group : (index + 1) * group]
        assert np.abs(found).max(initial=127) == 127 and (np.abs(found - part / (top / 127.0)) < 0.5001).all()


def test_what_is_refused() -> None:
    kernels = NativeKernels(1)
    assert isinstance(kernels, NarrowRows) and not isinstance(ReferenceKernels(), NarrowRows)
    floats = new_bank(kernels, 1, 4, 8, "f32", 2)
    (codes,) = kernels.allocate(1, MatrixSpec(4, 8, WeightFormat("int8", 32), 2))
    (down,) = kernels.allocate(1, MatrixSpec(8, 2, WeightFormat("int8", 32)))
    x = normal(1, 2, 8)
    assert kernels.row_bytes(floats) == 0 and kernels.row_bytes(codes) == 12
    with pytest.raises(ValueError, match="take rows of float32"):
        kernels.pack_rows(x, floats, np.zeros((2, 32), np.uint8))
    with pytest.raises(ValueError, match="2 rows of at least 12 bytes"):
        kernels.pack_rows(x, codes, np.zeros((2, 11), np.uint8))
    with pytest.raises(ValueError, match=r"rows has shape \[2, 13\], needs \[2, 12\]"):
        kernels.experts(np.zeros((2, 13), np.uint8), np.array([2]), codes, down)
    with pytest.raises(ValueError, match="narrow: take holds 2"):
        kernels.narrow(x, np.array([2]), np.zeros((1, 8), np.uint16))
    with pytest.raises(ValueError, match="narrow: out has shape"):
        kernels.narrow(x, np.array([1]), np.zeros((1, 7), np.uint16))
