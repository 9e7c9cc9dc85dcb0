"""Packed rows: what was written is read, whatever the widths and types; the receiver gets what its experts read."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.comm.rows import RowFormat
from coterie.comm.travel import Travel
from coterie.kernels.native import NativeKernels
from coterie.spec.weights import F32, MatrixSpec, WeightFormat

KERNELS = NativeKernels(1)


@settings(max_examples=100)
@given(
    st.integers(1, 90), st.integers(0, 6), st.integers(1, 4), st.booleans(),
    st.sampled_from([F32, WeightFormat("int8", 32), WeightFormat("int8", 0), WeightFormat("affine4", 16)]),
    st.integers(0, 99),
)  # fmt: skip
def test_out(hidden: int, tokens: int, top_k: int, weighted: bool, format: WeightFormat, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gate_up, down = KERNELS.allocate(1, MatrixSpec(8, hidden, format, 2), MatrixSpec(hidden, 4, format))
    for bank in (gate_up, down):
        KERNELS.fill(bank, 0, 0, rng.normal(size=(bank.rows, bank.cols)).astype(np.float32))
    travel = Travel(KERNELS, gate_up)
    row = RowFormat(travel.out_bytes(hidden), top_k, weighted)
    assert row.width % 4 == 0 and row.body == (4 * hidden if format is F32 else KERNELS.row_bytes(gate_up))
    x = rng.normal(size=(tokens, hidden)).astype(np.float32)
    slots = rng.integers(0, 1 << 30, (tokens, top_k)).astype(np.int32)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    packed = np.full((tokens, row.width), 0xA5, np.uint8)
    travel.write(x, packed)
    row.address(packed, slots, weights)
    np.testing.assert_array_equal(row.slots(packed), slots)
    np.testing.assert_array_equal(row.weights(packed), weights if weighted else weights[:, :0])
    take = rng.integers(0, max(tokens, 1), 9 if tokens else 0)
    counts = np.array([len(take)])
    got = KERNELS.experts(travel.read(row.bodies(packed)[take]), counts, gate_up, down)
    assert got.tobytes() == KERNELS.experts(x[take], counts, gate_up, down).tobytes()


@settings(max_examples=60)
@given(st.integers(1, 90), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_back(hidden: int, count: int, rounded: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(count, hidden)).astype(np.float32)
    order, buffer = rng.integers(0, count, 7), np.full(1 << 12, 0xA5, np.uint8)
    travel = Travel(KERNELS, rounded=rounded)
    assert travel.back_bytes(hidden) == hidden * (2 if rounded else 4)
    sent = travel.send_back(outputs, order, travel.back_rows(buffer, 7, hidden))
    assert np.shares_memory(sent, buffer) and (buffer[sent.nbytes :] == 0xA5).all()
    position, ones = np.arange(7)[:, None], np.ones((7, 1), np.float32)
    summed = KERNELS.combine(KERNELS.from_host(sent), position, ones, None)
    want = KERNELS.combine(outputs, order[:, None], ones, None, rounded=rounded)
    assert summed.tobytes() == want.tobytes()
    assert rounded or want.tobytes() == outputs[order].tobytes()
