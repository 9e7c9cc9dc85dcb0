"""Tile kernels of the amx level: on emulated tiles wherever avx512 runs, on real ones where the processor has them.

Integer products must have the bits of the vector kernels; bf16 products follow the order of the tile instruction, which
a few lines of numpy spell out here. The instructions themselves run only on a processor that has them: the level then
checks itself before it is offered, and these tests run on it too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_cases import ISAS, LEVELS, Floats, normal, to_bf16

from coterie.kernels import _native
from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.kernels.select import choose_isa
from coterie.spec.errors import CoterieError
from coterie.spec.weights import BF16, INT4_TABLE, IQ4_TABLE, MatrixSpec, WeightFormat

TILED = [level for level in LEVELS if level.startswith("amx")]
GROUPS = (0, 16, 32, 64, 128)
INTEGERS = [
    *(WeightFormat("int8", group, "f16") for group in GROUPS),
    *(WeightFormat("code4", group, "f16", table) for group in GROUPS for table in (INT4_TABLE, IQ4_TABLE)),
    *(WeightFormat(kind, group, "bf16") for group in GROUPS for kind in ("affine4", "affine8")),
]
SHAPES = ((33, 19), (70, 200), (32, 576), (129, 1100), (64, 513))
RUNS = ((0, 1), (3, 7), (10, 18), (20, 29), (40, 56), (60, 77), (100, 141), (0, 300))

pytestmark = pytest.mark.skipif(not TILED, reason="tile kernels build on avx512")


def filled(isa: str, weight: Floats, format: WeightFormat) -> tuple[NativeKernels, _native.Bank]:
    kernels = NativeKernels(2, isa)
    (bank,) = kernels.allocate(1, MatrixSpec(*weight.shape, format))
    kernels.fill(bank, 0, 0, weight)
    return kernels, bank


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize("format", INTEGERS, ids=lambda format: f"{format.label()} {format.scale}")
def test_integer_products_have_the_bits_of_the_vector_kernels(format: WeightFormat, isa: str) -> None:
    for rows, cols in SHAPES:
        weight, x, bias = normal(rows, rows, cols), normal(cols, 300, cols), normal(1, rows)
        vector, its_bank = filled("avx512", weight, format)
        tiles, bank = filled(isa, weight, format)
        wanted = vector.linear(x, its_bank, bias)
        for begin, end in RUNS:
            assert tiles.linear(x[begin:end], bank, bias).tobytes() == wanted[begin:end].tobytes(), (rows, cols, begin)


@pytest.mark.parametrize("isa", TILED)
def test_scales_beyond_f16_are_the_same_for_few_rows_and_many(isa: str) -> None:
    weight, x = normal(1, 40, 100), normal(2, 40, 100)
    weight[3, 40] = 1e12
    for format in (WeightFormat("int8", 32, "f16"), WeightFormat("code4", 32, "f16", INT4_TABLE)):
        kernels, bank = filled(isa, weight, format)
        got = kernels.linear(x, bank)
        assert not np.isfinite(got[:, 3]).any() and np.isfinite(got[:, 4:]).all()
        for row in range(40):
            assert kernels.linear(x[row : row + 1], bank).tobytes() == got[row].tobytes()


def tile_order(x: Floats, weight: Floats) -> Floats:
    """x @ weight.T as documented for the bf16 tile product: 32 columns at a time, even and odd columns apart."""
    pad = -x.shape[1] % 32
    x, weight = (np.pad(to_bf16(values), ((0, 0), (0, pad))) for values in (x, weight))
    total = np.zeros((len(x), len(weight)), np.float32)
    for start in range(0, x.shape[1], 32):
        chains = np.zeros((2, *total.shape), np.float32)
        for column in range(start, start + 32):
            # a product of two bf16 values is exact in float32: adding it rounds once, as a fused operation does
            chains[column % 2] += x[:, column, None] * weight[None, :, column]
        total = total + (chains[0] + chains[1])
    return total


@pytest.mark.parametrize("isa", TILED)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_bf16_products_have_the_order_of_the_instruction(isa: str, rows: int, cols: int) -> None:
    weight, x = normal(rows, rows, cols), normal(cols, 300, cols)
    kernels, bank = filled(isa, weight, BF16)
    wanted = tile_order(x, weight)
    for begin, end in RUNS:
        got = kernels.linear(x[begin:end], bank)
        assert got.tobytes() == wanted[begin:end].tobytes(), (begin, end)


@pytest.mark.parametrize("isa", TILED)
def test_denormals_are_zero_and_nan_stays(isa: str) -> None:
    weight, x = normal(1, 40, 100), normal(2, 40, 100)
    weight[0], x[1], x[2, 5], x[3, 6] = 1e-40, 1e-39, np.nan, np.inf
    kernels, bank = filled(isa, weight, BF16)
    got = kernels.linear(x, bank)
    assert not got[1].any()
    assert not got[4:, 0].any()
    assert np.isnan(got[2]).all()
    assert not np.isfinite(got[3, 1:]).any()
    for row in range(40):
        alone = kernels.linear(x[row : row + 1], bank)[0]
        assert np.array_equal(alone, got[row], equal_nan=True)


@pytest.mark.parametrize("isa", LEVELS)
def test_the_check_of_a_level_passes(isa: str) -> None:
    assert _native.differing_kind(isa) == ""


def test_emulated_tiles_are_for_tests_only() -> None:
    assert "amx-emulated" not in machine().isa_levels
    with pytest.raises(CoterieError, match="'amx-emulated' is unknown"):
        choose_isa(machine(), "amx-emulated")


def test_a_level_that_fails_its_check_is_left_out_and_said() -> None:
    why = "its bf16 products differ from the vector kernels' on this processor"
    facts = replace(machine(), isa_levels=("generic", "avx512"), refused_levels=(("amx", why),))
    choice = choose_isa(facts, "auto")
    assert choice.value == "avx512"
    assert choice.reason.endswith(f"amx is left out: {why}")
    with pytest.raises(CoterieError, match="'amx' is left out: its bf16"):
        choose_isa(facts, "amx")


@pytest.mark.skipif("amx" in ISAS, reason="this processor has the level")
def test_a_processor_without_tiles_refuses_the_level() -> None:
    with pytest.raises(ValueError, match="'amx' is not available"):
        NativeKernels(1, "amx")
