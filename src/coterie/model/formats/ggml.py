"""The block types of GGUF files: raw bytes of rows to `CodeRows`, exactly.

A row is a run of blocks of 32 or 256 values, each with its own scales. `TYPES` knows the size of every published type;
`DECODERS` the ones that map onto our kinds without loss. The others (2 and 3 bits, sign grids, ternary) can only be
expanded, by the `gguf` package's own code (`expand`). File and names: `model/gguf_file.py`, `model/gguf_names.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.model.formats.codes import CodeArray, CodeRows, FloatArray
from coterie.spec.errors import CoterieError
from coterie.spec.weights import INT4_TABLE, IQ4_TABLE, MXFP4_TABLE, WeightFormat

RawBytes = NDArray[np.uint8]
Blocks = tuple[CodeArray, FloatArray, FloatArray | None]


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type: its number in files, values and bytes of a block."""

    number: int
    name: str
    values: int
    nbytes: int


TYPES: dict[int, BlockType] = {
    number: BlockType(number, name, values, nbytes)
    for number, name, values, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip
BY_NAME = {block.name: block for block in TYPES.values()}
EXPANDED = frozenset(
    {"Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"}
)
"""Types that only become floats: their memory grows several times."""


# ---- pieces of blocks ------------------------------------------------------------------------------------------------
def _half(blocks: RawBytes, at: int) -> FloatArray:
    """A float16 of each block as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: RawBytes, run: int) -> CodeArray:
    """Each `run` bytes hold `run` low and then `run` high nibbles: [blocks, 2 * bytes]."""
    count, size = packed.shape
    out = np.empty((count, size // run, 2, run), np.uint8)
    runs = packed.reshape(count, size // run, run)
    np.bitwise_and(runs, 15, out=out[:, :, 0])
    np.right_shift(runs, 4, out=out[:, :, 1])
    return out.reshape(count, 2 * size)


def _fifth_bits(high: RawBytes) -> CodeArray:
    """32 bits of each block, least significant first, as 0 or 16."""
    return np.unpackbits(high, axis=1, bitorder="little") * np.uint8(16)


def _six_bit_pairs(packed: RawBytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The eight 6-bit scales and eight 6-bit mins that Q4_K and Q5_K keep in 12 bytes."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, mins


# ---- one function a type ---------------------------------------------------------------------------------------------
def _q8_0(blocks: RawBytes) -> Blocks:
    return blocks[:, 2:34] ^ np.uint8(0x80), _half(blocks, 0), None


def _q4_plain(blocks: RawBytes) -> Blocks:
    return _nibbles(blocks[:, 2:18], 16), _half(blocks, 0), None


def _q4_1(blocks: RawBytes) -> Blocks:
    return _nibbles(blocks[:, 4:20], 16), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: RawBytes) -> Blocks:
    codes = _nibbles(blocks[:, 6:22], 16)
    codes |= _fifth_bits(blocks[:, 2:6])
    codes += 128 - 16
    return codes, _half(blocks, 0), None


def _q5_1(blocks: RawBytes) -> Blocks:
    return _nibbles(blocks[:, 8:24], 16) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), -_half(blocks, 2)


def _q4_k(blocks: RawBytes) -> Blocks:
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    return _nibbles(blocks[:, 16:144], 32), _half(blocks, 0) * scales, _half(blocks, 2) * mins


def _q5_k(blocks: RawBytes) -> Blocks:
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:176], 32).reshape(-1, 8, 32)
    for group in range(8):
        codes[:, group] |= ((blocks[:, 16:48] >> group) & 1) << 4
    return codes.reshape(-1, 256), _half(blocks, 0) * scales, _half(blocks, 2) * mins


def _q6_k(blocks: RawBytes) -> Blocks:
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for quarter in range(4):
        low[:, :, quarter] |= ((high >> (2 * quarter)) & 3) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return low.reshape(-1, 256) + np.uint8(96), _half(blocks, 208) * scales, None


def _iq4_xs(blocks: RawBytes) -> Blocks:
    low = _nibbles(blocks[:, 4:8], 1)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (low | (high << 4).astype(np.uint8)).astype(np.float32) - 32
    return _nibbles(blocks[:, 8:136], 16), _half(blocks, 0) * scales, None


def _mxfp4(blocks: RawBytes) -> Blocks:
    return _nibbles(blocks[:, 1:17], 16), e8m0_halves(blocks[:, :1]), None


def e8m0_halves(exponents: RawBytes) -> FloatArray:
    """Half of 2^(byte - 127), as MXFP4's doubled codes need it: exact, the smallest two are subnormal."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a type's codes mean, and how a matrix of blocks [count, bytes] becomes them."""

    form: WeightFormat
    blocks: Callable[[RawBytes], Blocks]


DECODERS: dict[str, Decoder] = {
    "Q8_0": Decoder(WeightFormat("int8", 32, "f16"), _q8_0),
    "Q4_0": Decoder(WeightFormat("code4", 32, "f16", INT4_TABLE), _q4_plain),
    "IQ4_NL": Decoder(WeightFormat("code4", 32, "f16", IQ4_TABLE), _q4_plain),
    "IQ4_XS": Decoder(WeightFormat("code4", 32, "f32", IQ4_TABLE), _iq4_xs),
    "MXFP4": Decoder(WeightFormat("code4", 32, "e8m0", MXFP4_TABLE), _mxfp4),
    "Q4_1": Decoder(WeightFormat("affine4", 32, "f16"), _q4_1),
    "Q4_K": Decoder(WeightFormat("affine4", 32, "f32"), _q4_k),
    "Q5_0": Decoder(WeightFormat("int8", 32, "f16"), _q5_0),
    "Q5_1": Decoder(WeightFormat("affine8", 32, "f16"), _q5_1),
    "Q5_K": Decoder(WeightFormat("affine8", 32, "f32"), _q5_k),
    "Q6_K": Decoder(WeightFormat("int8", 16, "f32"), _q6_k),
}


def decode(raw: RawBytes, name: str, rows: int) -> CodeRows:
    """Rows of whole blocks as codes. Scales of a damaged file may be NaN or infinite: see `CodeRows.is_finite`."""
    block, decoder = BY_NAME[name], DECODERS[name]
    with np.errstate(invalid="ignore"):
        codes, scales, mins = decoder.blocks(raw.reshape(-1, block.nbytes))
    mins = None if mins is None else mins.reshape(rows, -1)
    return CodeRows(decoder.form, codes.reshape(rows, -1), scales.reshape(rows, -1), mins)


def expand(raw: RawBytes, name: str, rows: int) -> FloatArray:
    """Rows of whole blocks of any readable type in float32."""
    if name in DECODERS:
        return decode(raw, name, rows).values()
    quants = expander()
    if quants is None:
        raise CoterieError(no_expander(name))
    return np.ascontiguousarray(quants(raw.reshape(rows, -1), name), np.float32)


def expander() -> Callable[[RawBytes, str], FloatArray] | None:
    """The `gguf` package's own expansion, if it is installed."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        return None
    return lambda raw, name: quants.dequantize(raw, GGMLQuantizationType[name])


def no_expander(name: str) -> str:
    """What to do about a type that needs the package."""
    return f"type {name} is only read with the gguf package: pip install 'coterie[gguf]', or use a Q4_K or Q4_0 file"
