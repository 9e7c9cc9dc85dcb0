"""GGUF block types against the `gguf` package: random bytes of every type, equal bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from coterie.model.formats.codes import CodeRows, common_format, convert, holds
from coterie.model.formats.ggml import BY_NAME, DECODERS, EXPANDED, decode, expand
from coterie.spec.weights import WeightFormat

PLAIN = ("F32", "F16", "BF16")
ROWS, BLOCKS = 48, 3


def random_rows(name: str, seed: int, rows: int = ROWS) -> np.ndarray:
    """Any bytes at all, so that every code, scale and sign occurs, also infinite ones."""
    return np.random.default_rng(seed).integers(0, 256, (rows, BLOCKS * BY_NAME[name].nbytes), dtype=np.uint8)


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    both_nan = np.isnan(ours) & np.isnan(theirs)
    assert ours.shape == theirs.shape
    assert ((ours.view(np.uint32) == theirs.view(np.uint32)) | both_nan).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", [*DECODERS, *sorted(EXPANDED)])
def test_random_blocks_equal_the_oracle(name: str, seed: int) -> None:
    raw = random_rows(name, seed)
    same_bits(expand(raw.reshape(-1), name, ROWS), quants.dequantize(raw, GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_quantised_values_come_back(name: str) -> None:
    values = np.random.default_rng(4).standard_normal((5, 96)).astype(np.float32)
    packed = quants.quantize(values, GGMLQuantizationType[name])
    ours = expand(packed.reshape(-1).view(np.uint8), name, 5)
    same_bits(ours, quants.dequantize(packed, GGMLQuantizationType[name]))
    assert np.abs(ours - values).max() < (0.02 if name == "Q8_0" else 0.8)


def test_sizes_are_the_published_ones() -> None:
    published = {kind.name: (int(kind), *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {block.name: (block.number, block.values, block.nbytes) for block in BY_NAME.values()}
    assert {name: published[name] for name in ours if name in published} == {
        name: sizes for name, sizes in ours.items() if name in published
    }
    assert published.keys() <= ours.keys()
    assert not {*DECODERS, *EXPANDED} & set(PLAIN)


@pytest.mark.parametrize("name", DECODERS)
def test_rows_decode_alone_as_together(name: str) -> None:
    raw = random_rows(name, 5)
    whole = decode(raw.reshape(-1), name, ROWS)
    for row in (0, 7, ROWS - 1):
        one = decode(raw[row].copy(), name, 1)
        assert np.array_equal(one.codes[0], whole.codes[row])
        assert np.array_equal(one.scales[0], whole.scales[row], equal_nan=True)
        assert np.array_equal(whole[row : row + 1].codes, one.codes)


@pytest.mark.parametrize("name", DECODERS)
def test_codes_fit_their_kind(name: str) -> None:
    form, codes = DECODERS[name].form, decode(random_rows(name, 6).reshape(-1), name, ROWS)
    assert codes.codes.dtype == np.uint8 and codes.scales.dtype == np.float32
    assert codes.codes.shape == (ROWS, BLOCKS * BY_NAME[name].values)
    assert codes.scales.shape == (ROWS, codes.codes.shape[1] // form.group)
    assert (codes.mins is None) == (not form.is_affine)
    assert codes.codes.max() <= (15 if form.kind.endswith("4") else 255)


MEETING = [
    (("Q4_0", "Q8_0"), WeightFormat("int8", 32, "f16")),
    (("Q4_0", "IQ4_NL"), WeightFormat("int8", 32, "f16")),
    (("Q6_K", "Q8_0"), WeightFormat("int8", 16, "f32")),
    (("Q4_K", "Q5_K"), WeightFormat("affine8", 32, "f32")),
    (("Q4_1", "Q4_K"), WeightFormat("affine4", 32, "f32")),
    (("Q4_K", "Q6_K"), None),
    (("MXFP4",), DECODERS["MXFP4"].form),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("names", "expected"), MEETING)
def test_two_types_meet_without_loss(names: tuple[str, ...], expected: WeightFormat | None) -> None:
    common = common_format({DECODERS[name].form for name in names})
    assert common == expected
    if common is None:
        return
    for name in names:
        raw = random_rows(name, 7).reshape(-1)
        assert holds(common, DECODERS[name].form)
        same_bits(convert(decode(raw, name, ROWS), common).values(), expand(raw, name, ROWS))


def test_rows_that_no_group_divides_and_rows_with_one_scale() -> None:
    rng = np.random.default_rng(8)
    codes = rng.integers(0, 256, (3, 40), dtype=np.uint8)
    scales, mins = rng.random((2, 3, 2), np.float32)
    ours = CodeRows(WeightFormat("affine8", 32), codes, scales, mins).values()
    wide = np.repeat(scales, 32, axis=1)[:, :40] * codes - np.repeat(mins, 32, axis=1)[:, :40]
    assert np.array_equal(ours, wide.astype(np.float32))
    row = CodeRows(WeightFormat("int8", 0), codes, scales[:, :1]).values()
    assert np.array_equal(row, (codes.astype(np.float32) - 128) * scales[:, :1])
    assert common_format({WeightFormat("int8", 0), WeightFormat("int8", 32)}) is None
