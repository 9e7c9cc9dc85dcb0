"""Packed weight formats on native: codes and scales against the numpy definition, products against float64, bits.

The oracle of a product with an integer kind quantises the activations by its own few lines, sums in exact integers and
scales in float64. Sizes are odd on purpose: columns that end inside a group, panels that are not full.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_cases import LEVELS, normal

from coterie.kernels.api import ExpertBanks, Routed
from coterie.kernels.native import NativeKernels
from coterie.kernels.quantize import dequantize, quantize
from coterie.spec.model import MoESpec
from coterie.spec.weights import (
    BF16,
    F32,
    IQ4_TABLE,
    MXFP4_TABLE,
    MatrixSpec,
    WeightFormat,
    unit_bytes,
)
from coterie.spec.weights import INT4_TABLE as INT4

FORMATS = (
    *(WeightFormat("int8", group, scale) for group, scale in ((16, "f32"), (32, "f16"), (64, "bf16"), (0, "f32"))),
    WeightFormat("int8", 128, "f16"),
    *(WeightFormat("code4", group, "f16", INT4) for group in (16, 32, 64, 128, 0)),
    WeightFormat("code4", 32, "e8m0", MXFP4_TABLE),
    WeightFormat("code4", 32, "f32", IQ4_TABLE),
    *(WeightFormat("affine4", group, "f32") for group in (16, 32, 128, 0)),
    *(WeightFormat("affine8", group, "bf16") for group in (32, 64, 0)),
    WeightFormat("fp8", 128),
    WeightFormat("fp8", 32, "bf16"),
)
IDS = [f"{format.label()} {format.scale}" for format in FORMATS]
SHAPES = ((33, 19), (70, 200), (32, 576), (129, 1100))


def bank_of(kernels: NativeKernels, values: np.ndarray, format: WeightFormat, segments: int = 1):
    (bank,) = kernels.allocate(len(values), MatrixSpec(*values.shape[1:], format, segments))
    for index, matrix in enumerate(values):
        kernels.fill(bank, index, 0, matrix)
    return bank


def activations(x: np.ndarray, format: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """(codes, factor of every value) of int8 activations: the weights' groups, of 32 at least, or the whole row."""
    group = max(32, format.group) if format.group else max(x.shape[1], 1)
    codes, factors = np.zeros(x.shape), np.zeros(x.shape)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group]
        factor = np.abs(part).max(1, keepdims=True).astype(np.float32) / np.float32(127)
        codes[:, start : start + group] = np.rint(part / np.where(factor > 0, factor, 1))
        factors[:, start : start + group] = factor
    return codes, factors


def oracle(x: np.ndarray, weight: np.ndarray, format: WeightFormat) -> np.ndarray:
    """x @ weight.T in float64 with the activations that the format multiplies."""
    if format.is_integer:
        codes, factors = activations(x, format)
        x = codes * factors
    return x.astype(np.float64) @ weight.astype(np.float64).T


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_quantised_rows_are_those_of_the_definition(format: WeightFormat, isa: str) -> None:
    kernels = NativeKernels(2, isa)
    for rows, cols in SHAPES:
        values = normal(rows + cols, rows, cols)
        values[3] = 0
        values[4, :] *= 1e4
        values[5, 0] = 1e3
        got = kernels.read(bank_of(kernels, values[None], format), 0)
        wanted = dequantize(format, *quantize(format, values))
        ours, theirs = np.square(got - values).sum(1), np.square(wanted - values).sum(1)
        assert np.allclose(ours, theirs, rtol=2e-2, atol=1e-12), (rows, cols)
        assert np.mean(np.isclose(got, wanted, rtol=1e-5, atol=0)) > 0.98, (rows, cols)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_every_level_writes_the_same_bytes(format: WeightFormat) -> None:
    values = normal(3, 2, 70, 200)
    units = [
        (kernels := NativeKernels(1, isa)).units(bank_of(kernels, values, format)).tobytes() for isa in LEVELS
    ]
    assert all(unit == units[0] for unit in units)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_codes_are_placed_exactly(format: WeightFormat) -> None:
    kernels, rng = NativeKernels(2), np.random.default_rng(1)
    spec = MatrixSpec(75, 211, format, 3)
    (bank,) = kernels.allocate(2, spec)
    codes = rng.integers(0, 16 if format.kind in ("code4", "affine4") else 127, (75, 211)).astype(np.uint8)
    scales = np.ldexp(np.float32(1), rng.integers(-9, 3, (75, spec.groups))).astype(np.float32)
    mins = scales * 3 if format.is_affine else None
    for row in (0, 7, 41):
        end = {0: 7, 7: 41, 41: 75}[row]
        part = None if mins is None else mins[row:end]
        kernels.fill_codes(bank, 1, row, codes[row:end], scales[row:end], part)
    assert np.array_equal(kernels.read(bank, 1), dequantize(format, codes, scales, mins))
    assert not kernels.read(bank, 0)[:, : 211].any() or format.kind in ("int8", "code4"), "matrix 0 was touched"


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("kind", ["int8", "code4"])
def test_bits_of_a_product_do_not_depend_on_the_type_of_its_scales(isa: str, group: int, kind: str) -> None:
    """Kernels leave out a conversion where scales are f16; the same scales as f32 take the plain way."""
    kernels, rng = NativeKernels(2, isa), np.random.default_rng(group)
    table = INT4 if kind == "code4" else ()
    formats = [WeightFormat(kind, group, scale, table) for scale in ("f16", "f32")]
    banks = [kernels.allocate(1, MatrixSpec(75, 333, format))[0] for format in formats]
    codes = rng.integers(0, 16 if kind == "code4" else 256, (75, 333)).astype(np.uint8)
    scales = rng.standard_normal((75, -(-333 // group))).astype(np.float16)
    scales[3], scales[4], scales[5, 1] = 6e-8, -65504, 0
    codes[6] = 0  # the largest sums
    for bank in banks:
        kernels.fill_codes(bank, 0, 0, codes, scales.astype(np.float32), None)
    x = normal(group, 90, 333)
    x[:2] = -1
    for rows in (1, 2, 5, 13, 90):
        got, wanted = (kernels.linear(x[:rows], bank) for bank in banks)
        assert got.tobytes() == wanted.tobytes(), rows


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_products(format: WeightFormat, isa: str) -> None:
    kernels = NativeKernels(2, isa)
    for (rows, cols), count in itertools.product(SHAPES, (0, 1, 2, 5, 17)):
        bank = bank_of(kernels, normal(1, 1, rows, cols), format)
        x, bias = normal(2, count, cols), normal(4, rows)
        x[:, 0] *= 50
        got = kernels.linear(x, bank, bias)
        wanted = oracle(x, kernels.read(bank, 0), format) + bias
        assert got.shape == (count, rows)
        assert np.allclose(got, wanted, rtol=1e-4, atol=2e-4 * np.sqrt(cols)), (rows, cols, count)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_rows_do_not_depend_on_batch_or_threads(format: WeightFormat, isa: str) -> None:
    x, weight = normal(1, 300, 333), normal(2, 1, 77, 333)
    kernels = NativeKernels(1, isa)
    whole = kernels.linear(x, bank_of(kernels, weight, format))
    for threads in (1, 2, 3):
        kernels = NativeKernels(threads, isa)
        bank = bank_of(kernels, weight, format)
        for size, start in ((1, 0), (1, 299), (2, 17), (7, 100), (9, 3), (64, 200), (257, 43)):
            got = kernels.linear(x[start : start + size], bank)
            assert got.tobytes() == whole[start : start + size].tobytes(), (threads, size, start)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_hard_inputs_have_a_defined_result(format: WeightFormat, isa: str) -> None:
    kernels = NativeKernels(1, isa)
    bank = bank_of(kernels, normal(1, 1, 40, 150), format)
    x = normal(2, 6, 150)
    x[0], x[1, 7], x[2, 140], x[3] = 0, np.nan, np.inf, 1e-41
    x[4, 5] = 3e38
    got = kernels.linear(x, bank)
    assert not got[0].any() and not got[3].any(), "zeros and denormals give zero"
    assert not np.isfinite(got[1]).any() and not np.isfinite(got[2]).any(), "NaN and infinity are not lost"
    assert got[5].tobytes() == kernels.linear(x[5:], bank)[0].tobytes(), "other rows are not disturbed"
    with pytest.raises(ValueError, match="needs"):
        kernels.fill(bank, 0, 0, normal(1, 2, 151))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", [F32, BF16, *FORMATS], ids=["f32", "bf16", *IDS])
def test_fused_experts_are_the_single_ops(format: WeightFormat, isa: str) -> None:
    hidden, inner, count, k = 200, 150, 5, 3
    spec = MoESpec(count, k, inner, "sigmoid", True, 1, 1, "top2_sum", True, 1e-20, True, 2.5)
    make = [(count, normal(1, count, 2 * inner, hidden, scale=0.1), normal(2, count, hidden, inner, scale=0.1)),
            (1, normal(3, 1, 2 * 70, hidden, scale=0.1), normal(4, 1, hidden, 70, scale=0.1))]  # fmt: skip
    for threads in (1, 3):
        kernels = NativeKernels(threads, isa)
        banks = []
        for number, gate_up, down in make:
            width = down.shape[2]
            up = MatrixSpec(2 * width, hidden, format, 2)
            both = kernels.allocate(number, up, MatrixSpec(hidden, width, format))
            assert kernels.units(both[0]).shape == (number, unit_bytes((up, MatrixSpec(hidden, width, format))))
            for bank, values in zip(both, (gate_up, down), strict=True):
                for index, matrix in enumerate(values):
                    kernels.fill(bank, index, 0, matrix)
            banks.append(both)
        (gate,) = kernels.allocate(1, MatrixSpec(count, hidden, F32))
        (scale,) = kernels.allocate(1, MatrixSpec(1, hidden, BF16))
        kernels.fill(gate, 0, 0, normal(5, count, hidden))
        kernels.fill(scale, 0, 0, normal(6, 1, hidden))
        for tokens in (0, 1, 2, 37):
            x = normal(7, tokens, hidden)
            routed = kernels.route(x, gate, None, spec)
            got, hits = kernels.moe(x, routed, ExpertBanks(*banks[0]), ExpertBanks(*banks[1], scale))
            assert np.array_equal(hits, np.bincount(routed.expert_ids.reshape(-1), minlength=len(hits)))
            order = kernels.sort_by_expert(routed.expert_ids, count)
            rows = kernels.experts(kernels.gather(x, order), order.counts, *banks[0])
            shared = kernels.experts(x, np.array([tokens]), *banks[1])
            shared = kernels.sigmoid_scale(shared, kernels.linear(x, scale))
            wanted = kernels.combine(rows, order.position, routed.expert_weights, shared)
            assert got.tobytes() == wanted.tobytes(), (threads, tokens)
            plain, _ = kernels.moe(x, routed, ExpertBanks(*banks[0]), None)
            assert plain.tobytes() == kernels.combine(rows, order.position, routed.expert_weights, None).tobytes()
            check_against_float64(kernels, x, routed, banks[0], plain, format)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", [F32, WeightFormat("int8", 0), WeightFormat("int8", 128)], ids=["f32", "row", "128"])
def test_long_steps_through_fused_experts_are_the_single_ops(format: WeightFormat, isa: str) -> None:
    """So many rows that they are gathered in parts and their outputs are summed some columns after the others."""
    hidden, inner, count, k, tokens = 450, 40, 5, 3, 2500
    kernels, draw = NativeKernels(2, isa), np.random.default_rng(8)
    banks = []
    for number in (count, 1):
        both = kernels.allocate(number, MatrixSpec(2 * inner, hidden, format, 2), MatrixSpec(hidden, inner, format))
        for bank, index in itertools.product(both, range(number)):
            kernels.fill(bank, index, 0, normal(index, bank.rows, bank.cols, scale=0.1))
        banks.append(both)
    ids = np.argsort(draw.random((tokens, count)), axis=1)[:, :k].astype(np.int32)
    x, weights = normal(7, tokens, hidden), draw.random((tokens, k)).astype(np.float32)
    got, _ = kernels.moe(x, Routed(ids, weights), ExpertBanks(*banks[0]), ExpertBanks(*banks[1]))
    order = kernels.sort_by_expert(ids, count)
    rows = kernels.experts(kernels.gather(x, order), order.counts, *banks[0])
    shared = kernels.experts(x, np.array([tokens]), *banks[1])
    assert got.tobytes() == kernels.combine(rows, order.position, weights, shared).tobytes()


@pytest.mark.parametrize("name", ["routed", "shared"])
def test_down_in_segments_is_refused(name: str) -> None:
    kernels, x = NativeKernels(1), normal(1, 2, 64)
    up, whole, cut = MatrixSpec(2 * 32, 64, F32, 2), MatrixSpec(64, 32, F32), MatrixSpec(64, 32, F32, 2)
    routed = kernels.allocate(1, up, cut if name == "routed" else whole)
    shared = kernels.allocate(1, up, cut if name == "shared" else whole)
    with pytest.raises(ValueError, match="down must be allocated with 1 segment"):
        kernels.moe(x, Routed(np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)), ExpertBanks(*routed),
                    ExpertBanks(*shared))  # fmt: skip


def check_against_float64(kernels: NativeKernels, x, routed: Routed, banks, got, format: WeightFormat) -> None:
    wanted = np.zeros_like(got, np.float64)
    for token, (ids, weights) in enumerate(zip(routed.expert_ids, routed.expert_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            both = oracle(x[token : token + 1], kernels.read(banks[0], expert), format)
            half = both.shape[1] // 2
            inner = (both[:, :half] / (1 + np.exp(-both[:, :half])) * both[:, half:]).astype(np.float32)
            wanted[token] += weight * oracle(inner, kernels.read(banks[1], expert), format)[0]
    error = np.abs(got - wanted).max(initial=0) / max(np.abs(wanted).max(initial=0), 1e-9)
    coarse = format.is_integer or (format == BF16 and kernels.isa.startswith("amx"))
    assert error < (5e-3 if coarse else 1e-5)


def test_sizes_are_those_of_the_spec() -> None:
    kernels = NativeKernels(1)
    for format, (rows, cols), segments in itertools.product((F32, BF16, *FORMATS), SHAPES, (1, 3)):
        spec = MatrixSpec(rows // 3 * 3, cols, format, segments)
        (bank,) = kernels.allocate(2, spec)
        assert bank.nbytes == 2 * spec.nbytes and bank.groups == spec.groups
        assert kernels.units(bank).shape == (2, unit_bytes((spec,)))


def test_packed_bf16_bits_are_kept() -> None:
    kernels, bits = NativeKernels(2), np.random.default_rng(0).integers(0, 0x7F00, (70, 51)).astype(np.uint16)
    for format in (F32, BF16):
        (bank,) = kernels.allocate(1, MatrixSpec(70, 51, format))
        kernels.fill_bf16(bank, 0, 0, bits)
        assert np.array_equal(kernels.read(bank, 0).view(np.uint32) >> 16, bits)
    (bank,) = kernels.allocate(1, MatrixSpec(70, 51, WeightFormat("int8", 32)))
    with pytest.raises(ValueError, match="fill_bf16"):
        kernels.fill_bf16(bank, 0, 0, bits)
